//! The client: objects below one prefix of a bucket, created, swapped, read, listed and deleted.
//!
//! A request can end without saying what happened: the connection broke, the time was over, or a
//! repetition found the effect of the first try. [`ObjectClient::create`] and
//! [`ObjectClient::swap`] then read the object back. What they return is known, never guessed:
//!
//! | the object read back | create returns | swap returns |
//! | --- | --- | --- |
//! | has the bytes of this call | `Created::New` | `Swapped::New` |
//! | has other bytes | `Created::Taken` | `Swapped::Changed`, unless it has the expected ETag |
//! | is not there | tries again | `Swapped::Changed` |
//!
//! **Bodies are unique.** Two writers must never send equal bytes to one name, nor one writer
//! twice: a body that is created or swapped contains a random number of its writer, and a number
//! that the writer never uses again.
//!
//! **Names are not reused.** A request that the client has given up may still take effect: a store
//! can receive it late. So a name that was created once must not be deleted while its writer may
//! live, if a late creation of the name is harmful.
//!
//! An error means that the outcome is unknown, unless it is [`ObjectError::Refused`] at the first
//! try: the caller may call again with the same body, and must not assume that nothing was written.

#![allow(clippy::disallowed_types)] // The lock of the counters: a request costs 10,000 times more.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockyard_volume_format::object::HEAD_BYTES_MAX;
use bytes::{Bytes, BytesMut};
use futures::stream::{self, StreamExt};
use object_store::aws::{AmazonS3Builder, S3ConditionalPut};
use object_store::path::Path;
use object_store::{
    ClientOptions, Error, GetOptions, GetRange, ObjectStore, PutMode, RetryConfig, UpdateVersion,
};
use tokio::time::{Instant, sleep, timeout};

use crate::ObjectError;
use crate::answer::{NamingConnector, StoreAnswer, causes};
use crate::location::{Access, ObjectUri};
use crate::requests::{RequestKind, Requests};

/// An object, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// The bytes: fewer than were asked for if the object ends before.
    pub bytes: Bytes,
    /// The version, for [`ObjectClient::swap`].
    pub etag: String,
}

/// What [`ObjectClient::create`] found out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Created {
    /// The object has the bytes of this call.
    New {
        /// The version.
        etag: String,
    },
    /// Another writer created the object: this is it.
    Taken(Object),
}

/// What [`ObjectClient::swap`] found out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Swapped {
    /// The object has the bytes of this call.
    New {
        /// The version.
        etag: String,
    },
    /// The object does not have the expected version, and not the bytes of this call: this is it.
    /// After an ambiguous answer it may have had the bytes of this call in between.
    Changed(Option<Object>),
}

/// An object in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedObject {
    /// The name below the client's prefix.
    pub name: String,
    /// The length in bytes.
    pub len: u64,
}

/// When a try has failed, and when the client gives up.
#[derive(Clone, Copy, Debug)]
pub struct Retries {
    /// Longest time until the store answers, in addition to a second for each MiB that is sent, and
    /// between two pieces of an object that is read.
    pub try_time: Duration,
    /// Time after which the client does not try again.
    pub give_up: Duration,
    /// Pause before the second try. Each further one is twice as long.
    pub pause_min: Duration,
    /// Longest pause.
    pub pause_max: Duration,
}

impl Default for Retries {
    fn default() -> Retries {
        Retries {
            try_time: Duration::from_secs(10),
            give_up: Duration::from_secs(60),
            pause_min: Duration::from_millis(50),
            pause_max: Duration::from_secs(5),
        }
    }
}

/// The bytes per second that a slow connection transfers at least.
const SLOWEST_BYTES_PER_S: u64 = 1 << 20;
/// Longest object that is read, in bytes: that of a head, which no object of a pool exceeds.
const OBJECT_BYTES_MAX: u64 = HEAD_BYTES_MAX as u64;
/// Names in one request to delete.
const DELETE_MAX: usize = 1000;
/// Names in one answer to a request to list.
const LIST_MAX: u64 = 1000;
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// A client of one prefix. Its futures run on a runtime of tokio with time and I/O, always the same
/// one: connections are kept and belong to it.
pub struct ObjectClient {
    store: Arc<dyn ObjectStore>,
    prefix: String,
    title: String,
    retries: Retries,
    requests: Mutex<Requests>,
}

impl fmt::Debug for ObjectClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ObjectClient").field(&self.title).finish()
    }
}

/// How one try ended without success.
enum Failed {
    /// The store does not do this.
    Refused(String),
    /// The object is not there.
    Absent(String),
    /// The object ends before the part that was to be read.
    Shorter(String),
    /// The condition of the request was not met, at least not by this try.
    Unmet(String),
    /// Whether the request took effect is unknown.
    Unclear(String),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        let why = reason(&error);
        match error {
            Error::NotFound { .. } => Failed::Absent(why),
            Error::AlreadyExists { .. } | Error::Precondition { .. } => Failed::Unmet(why),
            Error::Generic { .. } => match StoreAnswer::of(&error) {
                Some(answer) if answer.is_shorter() => Failed::Shorter(why),
                Some(answer) if !answer.is_transient() => Failed::Refused(why),
                _ => Failed::Unclear(why),
            },
            _ => Failed::Refused(why),
        }
    }
}

/// What caused an error: the store's answer, or what the system said of the connection.
fn reason(error: &(dyn std::error::Error + 'static)) -> String {
    match StoreAnswer::of(error) {
        Some(answer) => answer.to_string(),
        None => causes(error).last().map(ToString::to_string).unwrap_or_default(),
    }
}

fn no_etag() -> Failed {
    Failed::Refused("the store gave the object no ETag".to_owned())
}

fn time_is_over(time: Duration) -> Failed {
    Failed::Unclear(format!("no answer within {} s", time.as_secs()))
}

/// The tries of one operation.
struct Tries {
    doing: String,
    started: Instant,
    count: u32,
    pause: Duration,
}

impl Tries {
    fn new(retries: &Retries, verb: &str, name: &str) -> Tries {
        let doing = format!("{verb} object `{name}`");
        Tries { doing, started: Instant::now(), count: 1, pause: retries.pause_min }
    }

    /// The error of an operation that is not tried again.
    fn failed(&self, failed: Failed) -> ObjectError {
        let doing = self.doing.clone();
        match failed {
            Failed::Shorter(why) => ObjectError::Shorter { doing, why },
            Failed::Refused(why)
            | Failed::Absent(why)
            | Failed::Unmet(why)
            | Failed::Unclear(why) => ObjectError::Refused { doing, why },
        }
    }

    /// Waits before the next try, or fails if it would be too late.
    async fn pause(&mut self, retries: &Retries, last: String) -> Result<(), ObjectError> {
        // Between half and the whole of it: clients that failed together do not return together.
        let pause = self.pause.mul_f64(0.5 + 0.5 * fastrand::f64());
        let elapsed = self.started.elapsed();
        if elapsed + pause > retries.give_up {
            let (doing, tries, seconds) = (self.doing.clone(), self.count, elapsed.as_secs());
            return Err(ObjectError::Unavailable { doing, tries, seconds, last });
        }
        // The first failure of a store that does not answer is to be seen at once, and each further
        // one by who looks for it.
        match self.count {
            1 => tracing::warn!("cannot {}: {last}; trying again", self.doing),
            tries => tracing::debug!(doing = self.doing, tries, last, "a request has failed"),
        }
        sleep(pause).await;
        self.count += 1;
        self.pause = (self.pause * 2).min(retries.pause_max);
        Ok(())
    }
}

impl ObjectClient {
    /// A client of an S3-compatible store.
    ///
    /// # Errors
    /// If the parameters are unusable. The store is not asked.
    pub fn connect(
        uri: &ObjectUri,
        access: &Access,
        retries: Retries,
    ) -> Result<ObjectClient, ObjectError> {
        // reqwest takes its provider from the process. If there is one already, that one is used.
        _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = AmazonS3Builder::new()
            .with_bucket_name(uri.bucket())
            .with_region(&access.region)
            .with_access_key_id(&access.key_id)
            .with_secret_access_key(&access.secret_key)
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            // The client itself tries again: it has to know of each try.
            .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
            .with_client_options(
                ClientOptions::new().with_timeout_disabled().with_connect_timeout(CONNECT_TIME),
            )
            .with_http_connector(NamingConnector);
        if let Some(token) = &access.session_token {
            builder = builder.with_token(token);
        }
        let mut title = uri.to_string();
        if let Some(endpoint) = &access.endpoint {
            let is_plain = endpoint.starts_with("http://");
            builder = builder.with_endpoint(endpoint).with_allow_http(is_plain);
            title += &format!(" at {endpoint}");
        }
        let store = builder.build().map_err(|error| ObjectError::Refused {
            doing: format!("connect to {title}"),
            why: reason(&error),
        })?;
        Ok(ObjectClient { title, ..ObjectClient::over(Arc::new(store), uri.prefix(), retries) })
    }

    /// A client of any store, for example one in memory.
    pub fn over(store: Arc<dyn ObjectStore>, prefix: &str, retries: Retries) -> ObjectClient {
        let (prefix, title) = (prefix.to_owned(), prefix.to_owned());
        ObjectClient { store, prefix, title, retries, requests: Mutex::default() }
    }

    /// The URI and the endpoint, for messages.
    pub fn title(&self) -> &str {
        &self.title
    }

    /// The requests that were sent since the client was made.
    pub fn requests(&self) -> Requests {
        *self.counters()
    }

    /// Creates an object. Bodies are unique, as said above.
    ///
    /// # Errors
    /// If it is not known that the object has these bytes, nor that it has others.
    pub async fn create(&self, name: &str, body: &Bytes) -> Result<Created, ObjectError> {
        let mut tries = Tries::new(&self.retries, "create", name);
        loop {
            let last = match self.put_once(RequestKind::Create, name, body, PutMode::Create).await {
                Ok(etag) => return Ok(Created::New { etag }),
                Err(Failed::Unmet(last) | Failed::Unclear(last)) => last,
                Err(failed) => return Err(tries.failed(failed)),
            };
            match self.read_until_clear(name, None, &mut tries).await? {
                Some(object) if object.bytes == body => {
                    return Ok(Created::New { etag: object.etag });
                }
                Some(object) => return Ok(Created::Taken(object)),
                None => tries.pause(&self.retries, last).await?,
            }
        }
    }

    /// Replaces an object if it has the version `expected`. Bodies are unique, as said above.
    ///
    /// # Errors
    /// If it is not known that the object has these bytes, nor that it has others.
    pub async fn swap(
        &self,
        name: &str,
        body: &Bytes,
        expected: &str,
    ) -> Result<Swapped, ObjectError> {
        let mut tries = Tries::new(&self.retries, "replace", name);
        loop {
            let version = UpdateVersion { e_tag: Some(expected.to_owned()), version: None };
            let last = match self
                .put_once(RequestKind::Swap, name, body, PutMode::Update(version))
                .await
            {
                Ok(etag) => return Ok(Swapped::New { etag }),
                Err(Failed::Absent(last) | Failed::Unmet(last) | Failed::Unclear(last)) => last,
                Err(failed) => return Err(tries.failed(failed)),
            };
            match self.read_until_clear(name, None, &mut tries).await? {
                Some(object) if object.bytes == body => {
                    return Ok(Swapped::New { etag: object.etag });
                }
                Some(object) if object.etag == expected => {
                    tries.pause(&self.retries, last).await?;
                }
                changed => return Ok(Swapped::Changed(changed)),
            }
        }
    }

    /// Writes an object whose name only this writer uses.
    ///
    /// # Errors
    /// If the object may not be there.
    pub async fn put(&self, name: &str, body: &Bytes) -> Result<(), ObjectError> {
        let mut tries = Tries::new(&self.retries, "write", name);
        loop {
            match self.put_once(RequestKind::Put, name, body, PutMode::Overwrite).await {
                Ok(_) => return Ok(()),
                Err(Failed::Unmet(last) | Failed::Unclear(last)) => {
                    tries.pause(&self.retries, last).await?;
                }
                Err(failed) => return Err(tries.failed(failed)),
            }
        }
    }

    /// Reads an object, or the bytes of it in `range`; `None` if it is not there.
    ///
    /// # Errors
    /// If the store has not answered either.
    pub async fn get(
        &self,
        name: &str,
        range: Option<Range<u64>>,
    ) -> Result<Option<Object>, ObjectError> {
        let range = range.map(GetRange::Bounded);
        self.read_until_clear(name, range, &mut Tries::new(&self.retries, "read", name)).await
    }

    /// Reads the last bytes of an object, fewer if it is shorter; `None` if it is not there.
    ///
    /// # Errors
    /// As [`ObjectClient::get`].
    pub async fn get_end(&self, name: &str, len: u64) -> Result<Option<Object>, ObjectError> {
        let mut tries = Tries::new(&self.retries, "read", name);
        self.read_until_clear(name, Some(GetRange::Suffix(len)), &mut tries).await
    }

    /// The objects below `folder`, a path without a slash at its end; all objects if it is empty.
    ///
    /// # Errors
    /// If the store has not answered.
    pub async fn list(&self, folder: &str) -> Result<Vec<ListedObject>, ObjectError> {
        self.list_some(folder, usize::MAX).await
    }

    /// The name of an object below `folder`; `None` if there is none.
    ///
    /// # Errors
    /// As [`ObjectClient::list`].
    pub async fn first_in(&self, folder: &str) -> Result<Option<String>, ObjectError> {
        let found = self.list_some(folder, 1).await?;
        Ok(found.into_iter().next().map(|object| object.name))
    }

    /// As [`ObjectClient::list`]; ends after this number of objects.
    async fn list_some(&self, folder: &str, most: usize) -> Result<Vec<ListedObject>, ObjectError> {
        let mut tries = Tries::new(&self.retries, "list", folder);
        let mut found = Vec::new();
        loop {
            let before = found.len() as u64;
            let listed = self.list_once(folder, &mut found, most).await;
            let pages = (found.len() as u64 - before).div_ceil(LIST_MAX).max(1);
            self.count(RequestKind::List, pages, 0, matches!(listed, Err(Failed::Unclear(_))));
            match listed {
                Ok(()) => return Ok(found),
                Err(Failed::Unmet(last) | Failed::Unclear(last)) => {
                    tries.pause(&self.retries, last).await?;
                }
                Err(failed) => return Err(tries.failed(failed)),
            }
        }
    }

    /// Lists what comes after the last object found, until an error, or `most` were found.
    async fn list_once(
        &self,
        folder: &str,
        found: &mut Vec<ListedObject>,
        most: usize,
    ) -> Result<(), Failed> {
        let separator = if folder.is_empty() { "" } else { "/" };
        let path = parse(&format!("{}{separator}{folder}", self.prefix))?;
        let mut objects = match found.last() {
            None => self.store.list(Some(&path)),
            Some(last) => self.store.list_with_offset(Some(&path), &self.path(&last.name)?),
        };
        while found.len() < most {
            let next = timeout(self.retries.try_time, objects.next()).await;
            let Some(object) = next.map_err(|_| time_is_over(self.retries.try_time))? else {
                break;
            };
            let object = object?;
            // Consoles make an empty object for a folder, whose name ends with a slash.
            if object.location == path {
                continue;
            }
            let name = object.location.as_ref().strip_prefix(&self.prefix);
            let Some(name) = name.and_then(|name| name.strip_prefix('/')) else {
                return Err(Failed::Refused(format!("it listed `{}`", object.location)));
            };
            found.push(ListedObject { name: name.to_owned(), len: object.size });
        }
        Ok(())
    }

    /// Deletes objects, those that are there.
    ///
    /// # Errors
    /// If some may be left.
    pub async fn delete<N: AsRef<str>>(&self, names: &[N]) -> Result<(), ObjectError> {
        for names in names.chunks(DELETE_MAX) {
            let first = names.first().map_or("", AsRef::as_ref);
            let mut tries = Tries::new(&self.retries, "delete", first);
            loop {
                let deleted = self.delete_once(names).await;
                self.count(RequestKind::Delete, 1, 0, matches!(deleted, Err(Failed::Unclear(_))));
                match deleted {
                    Ok(()) | Err(Failed::Absent(_)) => break,
                    Err(Failed::Unmet(last) | Failed::Unclear(last)) => {
                        tries.pause(&self.retries, last).await?;
                    }
                    Err(failed) => return Err(tries.failed(failed)),
                }
            }
        }
        Ok(())
    }

    async fn delete_once<N: AsRef<str>>(&self, names: &[N]) -> Result<(), Failed> {
        let paths: Vec<Path> =
            names.iter().map(|name| self.path(name.as_ref())).collect::<Result<_, _>>()?;
        let deleting = self.store.delete_stream(stream::iter(paths.into_iter().map(Ok)).boxed());
        let deleting = async { Ok(deleting.collect::<Vec<_>>().await) };
        for result in self.within(0, deleting).await? {
            match result.map_err(Failed::from) {
                Ok(_) | Err(Failed::Absent(_)) => {}
                Err(failed) => return Err(failed),
            }
        }
        Ok(())
    }

    /// Reads until the store says what is there, as a part of the operation of `tries`.
    async fn read_until_clear(
        &self,
        name: &str,
        range: Option<GetRange>,
        tries: &mut Tries,
    ) -> Result<Option<Object>, ObjectError> {
        loop {
            match self.get_once(name, range.clone()).await {
                Ok(object) => return Ok(Some(object)),
                Err(Failed::Absent(_)) => return Ok(None),
                Err(Failed::Unmet(last) | Failed::Unclear(last)) => {
                    tries.pause(&self.retries, last).await?;
                }
                Err(failed) => return Err(tries.failed(failed)),
            }
        }
    }

    async fn get_once(&self, name: &str, range: Option<GetRange>) -> Result<Object, Failed> {
        let mut bytes = BytesMut::new();
        let read = self.get_into(name, range, &mut bytes).await;
        self.count(
            RequestKind::Get,
            1,
            bytes.len() as u64,
            matches!(read, Err(Failed::Unclear(_))),
        );
        Ok(Object { etag: read?, bytes: bytes.freeze() })
    }

    async fn get_into(
        &self,
        name: &str,
        range: Option<GetRange>,
        into: &mut BytesMut,
    ) -> Result<String, Failed> {
        let path = self.path(name)?;
        let options = GetOptions { range, ..GetOptions::default() };
        let result = self.within(0, self.store.get_opts(&path, options)).await?;
        let etag = result.meta.e_tag.clone().ok_or_else(no_etag)?;
        let len = result.range.end - result.range.start;
        if len > OBJECT_BYTES_MAX {
            return Err(Failed::Refused(format!("it has {len} bytes, {OBJECT_BYTES_MAX} at most")));
        }
        into.reserve(usize::try_from(len).unwrap_or_default());
        let mut pieces = result.into_stream();
        while let Some(piece) = self.within(0, async { pieces.next().await.transpose() }).await? {
            into.extend_from_slice(&piece);
        }
        if into.len() as u64 != len {
            return Err(Failed::Unclear(format!("{} bytes of {len} were received", into.len())));
        }
        Ok(etag)
    }

    async fn put_once(
        &self,
        kind: RequestKind,
        name: &str,
        body: &Bytes,
        mode: PutMode,
    ) -> Result<String, Failed> {
        let (path, len) = (self.path(name)?, body.len() as u64);
        let putting = self.store.put_opts(&path, body.clone().into(), mode.into());
        let put = self.within(len, putting).await;
        self.count(kind, 1, len, matches!(put, Err(Failed::Unclear(_))));
        put?.e_tag.ok_or_else(no_etag)
    }

    /// The result of a request that sends `len` bytes, if it has one in time.
    async fn within<T>(
        &self,
        len: u64,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, Failed> {
        let time = self.retries.try_time + Duration::from_secs(len / SLOWEST_BYTES_PER_S);
        timeout(time, request).await.map_err(|_| time_is_over(time))?.map_err(Failed::from)
    }

    fn path(&self, name: &str) -> Result<Path, Failed> {
        parse(&format!("{}/{name}", self.prefix))
    }

    fn count(&self, kind: RequestKind, requests: u64, bytes: u64, has_failed: bool) {
        let mut counters = self.counters();
        let tally = counters.of(kind);
        tally.requests += requests;
        tally.failed += u64::from(has_failed);
        tally.bytes += bytes;
    }

    fn counters(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn parse(path: &str) -> Result<Path, Failed> {
    Path::parse(path).map_err(|error| Failed::Refused(error.to_string()))
}
