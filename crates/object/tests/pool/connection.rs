//! A connection to an object store in memory that all machines share. It fails as a plan says, and
//! calls a hook before or after a request takes effect.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use blockyard_object::answer::StoreAnswer;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt as _, PutMode, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
};

/// When a hook is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// Before the request with this number takes effect.
    Before(u64),
    /// After it took effect, before its answer.
    After(u64),
}

type Hook = Box<dyn FnOnce() + Send>;

/// The faults of a connection.
pub(crate) struct Plan {
    /// Draws faults and delays; `None` for a connection without either.
    pub(crate) random: Option<fastrand::Rng>,
    /// Requests from this number on get no answer and take no effect: the machine is cut off.
    pub(crate) cut_after: u64,
    /// Whether the machine has no power any more. Its requests get no answer and take no effect.
    pub(crate) is_off: Option<Box<dyn Fn() -> bool + Send>>,
    /// How long each request takes, in addition to what `random` draws.
    pub(crate) delay: Duration,
    /// Whether threads of other machines may run before each request.
    pub(crate) yields: bool,
    /// Writes of this object get no answer and take no effect.
    pub(crate) unwritable: Option<&'static str>,
    /// The number of answers to swaps of the manifest that come a minute late.
    pub(crate) slow_swaps: u64,
    pub(crate) hook: Option<(Moment, Hook)>,
    /// Called before each PUT takes effect. The machine stands still meanwhile.
    pub(crate) before_puts: Option<Arc<dyn Fn() + Send + Sync>>,
    /// Called before each GET takes effect, as `before_puts`.
    pub(crate) before_gets: Option<Arc<dyn Fn() + Send + Sync>>,
    pub(crate) requests: u64,
}

/// A connection of one machine.
#[derive(Clone)]
pub(crate) struct Connection {
    store: Arc<InMemory>,
    plan: Arc<Mutex<Plan>>,
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    LostRequest,
    LostAnswer,
    /// 409 to a conditional request, which takes no effect.
    Conflict,
    /// 503 after the request took effect.
    LateError,
}

impl Connection {
    pub(crate) fn new(store: &Arc<InMemory>) -> Connection {
        let plan = Plan {
            random: None,
            cut_after: u64::MAX,
            is_off: None,
            delay: Duration::ZERO,
            yields: false,
            unwritable: None,
            slow_swaps: 0,
            hook: None,
            before_puts: None,
            before_gets: None,
            requests: 0,
        };
        Connection { store: Arc::clone(store), plan: Arc::new(Mutex::new(plan)) }
    }

    pub(crate) fn plan(&self) -> std::sync::MutexGuard<'_, Plan> {
        self.plan.lock().unwrap()
    }

    /// Calls the hook if this is its moment. The hook runs on a thread of its own, since it has its
    /// own runtime; this machine stands still meanwhile.
    fn call(&self, moment: Moment) {
        let hook = {
            let mut plan = self.plan();
            match &plan.hook {
                Some((at, _)) if *at == moment => plan.hook.take(),
                _ => None,
            }
        };
        if let Some((_, hook)) = hook {
            // A panic here would end a task of the pool, for which the pool waits.
            if std::thread::spawn(hook).join().is_err() {
                std::process::exit(101);
            }
        }
    }

    /// Draws the fault of a request and its delays before and after the effect.
    fn draw(&self) -> (u64, bool, Fault, [Duration; 2]) {
        let mut plan = self.plan();
        plan.requests += 1;
        let number = plan.requests;
        let is_off = plan.is_off.as_ref().is_some_and(|is_off| is_off());
        let is_cut = is_off || number > plan.cut_after;
        let slow = plan.delay;
        let Some(random) = &mut plan.random else {
            return (number, is_cut, Fault::None, [slow, Duration::ZERO]);
        };
        let fault = match random.u32(0..20) {
            0 => Fault::LostRequest,
            1 | 2 => Fault::LostAnswer,
            3 => Fault::Conflict,
            4 => Fault::LateError,
            _ => Fault::None,
        };
        let mut delay = || slow + Duration::from_millis(random.u64(0..100));
        (number, is_cut, fault, [delay(), delay()])
    }

    async fn send<T>(&self, request: impl Future<Output = Result<T>>, is_put: bool) -> Result<T> {
        let (number, is_cut, fault, [early, late]) = self.draw();
        if self.plan().yields {
            std::thread::yield_now();
        }
        pass(early).await;
        self.call(Moment::Before(number));
        if is_cut {
            return std::future::pending().await;
        }
        match fault {
            Fault::LostRequest => return Err(broken()),
            Fault::Conflict if is_put => {
                return Err(Error::AlreadyExists { path: String::new(), source: "409".into() });
            }
            _ => {}
        }
        let before = match is_put {
            true => self.plan().before_puts.clone(),
            false => self.plan().before_gets.clone(),
        };
        if let Some(call) = before {
            call();
        }
        let result = request.await;
        self.call(Moment::After(number));
        pass(late).await;
        match fault {
            Fault::LostAnswer | Fault::LateError => result.and(Err(broken())),
            _ => result,
        }
    }
}

/// Lets time pass on the clock of the machine, which jumps while nothing else runs.
pub(crate) async fn pass(time: Duration) {
    _ = tokio::time::timeout(time, std::future::pending::<()>()).await;
}

const BROKEN: &str = "connection reset";

fn broken() -> Error {
    Error::Generic { store: "S3", source: BROKEN.into() }
}

/// Whether an error is that of a connection, and not of the store in memory.
fn is_broken(error: &Error) -> bool {
    matches!(error, Error::Generic { source, .. } if source.to_string() == BROKEN)
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connection")
    }
}

impl fmt::Display for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a connection")
    }
}

#[async_trait]
impl ObjectStore for Connection {
    async fn put_opts(&self, path: &Path, body: PutPayload, how: PutOptions) -> Result<PutResult> {
        let is_slow = matches!(how.mode, PutMode::Update(_)) && {
            let mut plan = self.plan();
            let left = plan.slow_swaps.checked_sub(1);
            plan.slow_swaps = left.unwrap_or_default();
            left.is_some()
        };
        let unwritable = self.plan().unwritable;
        if unwritable.is_some_and(|name| path.filename() == Some(name)) {
            return std::future::pending().await;
        }
        let put = self.send(self.store.put_opts(path, body, how), true).await;
        if is_slow {
            pass(Duration::from_secs(60)).await;
        }
        put
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        let wants_part = options.range.is_some();
        let got = self.send(self.store.get_opts(path, options), false).await;
        // S3 answers 416 if the object ends before the part. The store in memory answers by an
        // error without a name, or by nothing of an empty object.
        let is_there = self.store.head(path).await.is_ok();
        let has_part = match &got {
            Ok(got) => !got.range.is_empty(),
            Err(error) => is_broken(error),
        };
        if wants_part && is_there && !has_part {
            let source = StoreAnswer { status: 416, code: "InvalidRange".to_owned() };
            return Err(Error::Generic { store: "S3", source: source.into() });
        }
        got
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.store.delete_stream(paths)
    }

    fn list(&self, folder: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.list(folder)
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        panic!("a pool sends whole objects")
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        panic!("a pool does not list with a delimiter")
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        panic!("a pool does not copy objects")
    }
}
