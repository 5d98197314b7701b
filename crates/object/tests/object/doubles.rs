//! Test doubles: a connection that fails as a plan says, and stores that do not keep the promises
//! of conditional writes.
#![allow(clippy::disallowed_types)] // Plans of a test.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use blockyard_object::answer::StoreAnswer;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result,
};
use tokio::time::timeout;

/// What happens to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The request and its answer arrive.
    None,
    /// The connection breaks before the store has the request.
    LostRequest,
    /// The connection breaks after the request took effect.
    LostAnswer,
    /// No answer comes, and the request takes no effect.
    Hangs,
    /// No answer comes, although the request took effect.
    HangsAfterEffect,
    /// The store takes the request a minute later, when the client has given it up.
    Late,
    /// The store answers 503.
    Overloaded,
    /// The store answers 409 and does nothing.
    Conflict,
    /// The store answers 403.
    Denied,
}

pub(crate) const FAULTS: [Fault; 8] = [
    Fault::None,
    Fault::LostRequest,
    Fault::LostAnswer,
    Fault::Hangs,
    Fault::HangsAfterEffect,
    Fault::Late,
    Fault::Overloaded,
    Fault::Conflict,
];

/// A connection to a store: each of the next PUTs, and each of the next reads, has a fault.
#[derive(Debug)]
pub(crate) struct Connection {
    store: Arc<dyn ObjectStore>,
    pub(crate) puts: Mutex<VecDeque<Fault>>,
    pub(crate) gets: Mutex<VecDeque<Fault>>,
}

impl Connection {
    pub(crate) fn new(store: Arc<dyn ObjectStore>, puts: &[Fault], gets: &[Fault]) -> Connection {
        let plan = |faults: &[Fault]| Mutex::new(faults.iter().copied().collect());
        Connection { store, puts: plan(puts), gets: plan(gets) }
    }

    async fn suffer<T: Send>(
        &self,
        plan: &Mutex<VecDeque<Fault>>,
        request: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let fault = plan.lock().unwrap().pop_front().unwrap_or(Fault::None);
        match fault {
            Fault::None => request.await,
            Fault::LostRequest => Err(error("connection reset")),
            Fault::LostAnswer => request.await.and(Err(error("connection reset"))),
            Fault::Hangs => std::future::pending().await,
            Fault::HangsAfterEffect => {
                _ = request.await;
                std::future::pending().await
            }
            Fault::Late => unreachable!("only PUTs are late"),
            Fault::Overloaded => Err(error(StoreAnswer { status: 503, code: "SlowDown".into() })),
            Fault::Conflict => {
                Err(Error::AlreadyExists { path: String::new(), source: "409".into() })
            }
            Fault::Denied => Err(error(StoreAnswer { status: 403, code: "AccessDenied".into() })),
        }
    }
}

fn error(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Generic { store: "S3", source: source.into() }
}

impl fmt::Display for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a connection that fails")
    }
}

#[async_trait]
impl ObjectStore for Connection {
    async fn put_opts(&self, path: &Path, body: PutPayload, how: PutOptions) -> Result<PutResult> {
        if self.puts.lock().unwrap().front() == Some(&Fault::Late) {
            self.puts.lock().unwrap().pop_front();
            let (store, path) = (self.store.clone(), path.clone());
            tokio::spawn(async move {
                // The clock of these tests jumps.
                _ = timeout(Duration::from_secs(60), std::future::pending::<()>()).await;
                _ = store.put_opts(&path, body, how).await;
            });
            return std::future::pending().await;
        }
        self.suffer(&self.puts, self.store.put_opts(path, body, how)).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        self.suffer(&self.gets, self.store.get_opts(path, options)).await
    }

    fn list(&self, folder: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        // A listing that has a fault breaks after its first three objects.
        let fault = self.gets.lock().unwrap().pop_front().unwrap_or(Fault::None);
        match fault {
            // As of S3: `folder/` is listed first if it is an object, and this library calls it
            // `folder`. The store in memory does not list it.
            Fault::None => {
                let (store, name) = (self.store.clone(), folder.cloned());
                let own = async move { store.head(&name?).await.ok().map(Ok) };
                let own = stream::once(own).filter_map(std::future::ready);
                own.chain(self.store.list(folder)).boxed()
            }
            _ => {
                let broken = stream::once(async { Err(error("connection reset")) });
                self.store.list(folder).take(3).chain(broken).boxed()
            }
        }
    }

    fn list_with_offset(
        &self,
        folder: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.list_with_offset(folder, offset)
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        panic!("the client sends whole objects")
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        panic!("the client does not list with a delimiter")
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        panic!("the client does not copy")
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.store.delete_stream(paths)
    }
}

/// What a store does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// It ignores the conditions of a PUT, as Garage does.
    IgnoresConditions,
    /// It ignores If-Match alone.
    IgnoresIfMatch,
    /// It checks a condition and writes afterwards, as s3s-fs does.
    ChecksThenWrites,
    /// It answers 501 to a PUT with a condition.
    RefusesConditions,
    /// An object appears in listings when the next one is written.
    ListsLate,
    /// A listing has deleted objects for a while.
    ListsDeleted,
    /// A read returns what was there before the last PUT.
    ReadsStale,
}

/// A store in memory with a flaw.
#[derive(Debug)]
pub(crate) struct Flawed {
    store: InMemory,
    flaw: Flaw,
    previous: Mutex<Vec<(Path, Bytes)>>,
    listed: Mutex<Vec<ObjectMeta>>,
}

impl Flawed {
    pub(crate) fn new(flaw: Flaw) -> Flawed {
        let (previous, listed) = (Mutex::default(), Mutex::default());
        Flawed { store: InMemory::new(), flaw, previous, listed }
    }

    async fn check_then_write(
        &self,
        path: &Path,
        body: PutPayload,
        how: PutOptions,
    ) -> Result<PutResult> {
        let present = self.store.head(path).await.ok().and_then(|object| object.e_tag);
        let source = "412".into();
        match &how.mode {
            PutMode::Create if present.is_some() => {
                return Err(Error::AlreadyExists { path: path.to_string(), source });
            }
            PutMode::Update(version) if version.e_tag != present => {
                return Err(Error::Precondition { path: path.to_string(), source });
            }
            _ => {}
        }
        tokio::task::yield_now().await;
        self.store.put_opts(path, body, PutMode::Overwrite.into()).await
    }
}

impl fmt::Display for Flawed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a store that {:?}", self.flaw)
    }
}

#[async_trait]
impl ObjectStore for Flawed {
    async fn put_opts(&self, path: &Path, body: PutPayload, how: PutOptions) -> Result<PutResult> {
        let has_condition = how.mode != PutMode::Overwrite;
        match self.flaw {
            Flaw::IgnoresConditions => {
                tokio::task::yield_now().await;
                self.store.put_opts(path, body, PutMode::Overwrite.into()).await
            }
            Flaw::IgnoresIfMatch if matches!(how.mode, PutMode::Update(_)) => {
                self.store.put_opts(path, body, PutMode::Overwrite.into()).await
            }
            Flaw::ChecksThenWrites => self.check_then_write(path, body, how).await,
            Flaw::RefusesConditions if has_condition => {
                Err(error(StoreAnswer { status: 501, code: "NotImplemented".into() }))
            }
            Flaw::ReadsStale => {
                if let Ok(object) = self.store.get(path).await {
                    let before = (path.clone(), object.bytes().await?);
                    self.previous.lock().unwrap().push(before);
                }
                self.store.put_opts(path, body, how).await
            }
            _ => self.store.put_opts(path, body, how).await,
        }
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        let stale = {
            let mut previous = self.previous.lock().unwrap();
            let at = previous.iter().position(|(stale, _)| stale == path);
            at.map(|at| previous.swap_remove(at).1)
        };
        if let Some(stale) = stale {
            let store = InMemory::new();
            store.put(path, stale.into()).await?;
            return store.get_opts(path, options).await;
        }
        self.store.get_opts(path, options).await
    }

    fn list(&self, folder: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let now = self.store.list(folder);
        match self.flaw {
            Flaw::ListsLate => now.skip(1).boxed(),
            Flaw::ListsDeleted => {
                let before = std::mem::take(&mut *self.listed.lock().unwrap());
                if !before.is_empty() {
                    return stream::iter(before.into_iter().map(Ok)).boxed();
                }
                let objects = futures::FutureExt::now_or_never(now.collect::<Vec<_>>())
                    .expect("a store in memory lists at once");
                let metas = objects.iter().filter_map(|it| it.as_ref().ok().cloned());
                *self.listed.lock().unwrap() = metas.collect();
                stream::iter(objects).boxed()
            }
            _ => now,
        }
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        panic!("the client sends whole objects")
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        panic!("the client does not list with a delimiter")
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        panic!("the client does not copy")
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.store.delete_stream(paths)
    }
}

/// A runtime whose clock jumps to the next timer, so that time-outs take no time.
pub(crate) fn run<T>(test: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_time().start_paused(true).build().unwrap().block_on(test)
}

/// A store in memory that several connections share.
pub(crate) fn memory() -> Arc<dyn ObjectStore> {
    Arc::new(InMemory::new())
}

/// The object of a path, read from the store itself.
pub(crate) async fn present(store: &Arc<dyn ObjectStore>, path: &str) -> Option<Bytes> {
    let object = store.get(&Path::from(path)).await.ok()?;
    Some(object.bytes().await.unwrap())
}
