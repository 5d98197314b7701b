//! Pools that are neither in a directory nor on a disk: a crate above this one provides them by
//! URI. This crate knows only what such storage can do.
//!
//! A program that opens such pools registers a provider once, at its start. Without a provider, and
//! in a program that has none, such a path is refused by name.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::error::StoreError;
use crate::lease::LeaseTerm;
use crate::log_writer::LogWriter;
use crate::reads::Reads;
use crate::{EventFd, PoolFile, Purpose, StoreFile, StoreLocation};

/// What the paths of such pools begin with.
const SCHEME: &str = "s3://";

/// What acknowledges a sync of a remote pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Acknowledge {
    /// The remote storage.
    #[default]
    Object,
    /// A log on a disk of this machine. The remote storage gets the writes later.
    Local,
}

impl fmt::Display for Acknowledge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Acknowledge::Object => "object",
            Acknowledge::Local => "local",
        })
    }
}

/// How a remote pool acknowledges syncs, and what the remote storage lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UploadStatus {
    /// What acknowledges a sync.
    pub acknowledge: Acknowledge,
    /// The bytes of the write batches that the remote storage lacks.
    pub lag_bytes: u64,
    /// The number of these batches.
    pub lag_batches: u64,
    /// The age of the oldest write in them.
    pub lag_ms: u64,
    /// The limit of `lag_bytes`; 0 without a local log.
    pub max_lag_bytes: u64,
    /// The limit of `lag_ms`; 0 without a local log.
    pub max_lag_ms: u64,
    /// The length of the lease; 0 without one.
    pub lease_ms: u64,
    /// The requests since the opening.
    pub requests: RequestTotals,
    /// How often writes have waited because of the limits.
    pub waits: u64,
    /// Whether writes wait now.
    pub is_waiting: bool,
    /// Whether no request is served, because the lease was not renewed in time.
    pub is_held: bool,
    /// Whether nothing is acknowledged any more until the pool is opened again: another opener has
    /// taken it over, or the remote storage has refused a write.
    pub has_failed: bool,
    /// Whether the local log could not be written: each sync waits for the remote storage until the
    /// pool is opened again.
    pub has_log_failed: bool,
    /// What this machine has acknowledged earlier, and the pool lacks.
    pub lost: LostWrites,
    /// Since when writes may be missing, in milliseconds since 1970: another opener acknowledged
    /// them by a local log that this opener does not have.
    pub missing_since_ms: Option<u64>,
}

/// The requests that a process has sent to the remote storage of a pool since it opened the pool,
/// repetitions included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestTotals {
    /// PUTs and pages of listings.
    pub puts: u64,
    /// Reads.
    pub gets: u64,
    /// The bytes that were sent.
    pub sent_bytes: u64,
    /// The bytes that were read.
    pub read_bytes: u64,
    /// For how long the process has had the pool open, in milliseconds.
    pub over_ms: u64,
}

/// Least limit of the lag, in bytes: some batches and the longest write.
pub const MAX_LAG_BYTES_MIN: u64 = 16 << 20;

/// The limits of the lag by default, in bytes and in milliseconds.
pub const MAX_LAG: (u64, u64) = (64 << 20, 30_000);

/// Shortest lease, in milliseconds. It is renewed three times in its length, and a request may take
/// a second.
pub const LEASE_MS_MIN: u64 = 3000;

/// The lease of a remote pool at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The random number of the opener, or of a standby that has claimed the lease.
    pub opener: [u8; 16],
    /// The epoch of the opener.
    pub epoch: u64,
    /// How often the opener has renewed it.
    pub renewals: u64,
    /// The time in which the opener promises to renew it.
    pub length: Duration,
}

/// Writes that this machine has acknowledged by its local log, and that were never uploaded:
/// another machine had taken the pool over. Their files are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LostWrites {
    /// The number of the files.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What this machine knows of a remote pool that another one may have open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnPart {
    /// The epoch of the last opener of the pool, if that was this machine, and no process of it has
    /// the pool open.
    pub last_epoch: Option<u64>,
    /// Whether the local log of this machine has writes that the remote storage may lack.
    pub has_writes: bool,
    /// What this machine has lost.
    pub lost: LostWrites,
}

/// What is expected of a pool that another machine may have open. `option` is that of the command
/// that takes it over.
pub fn only_open_here(option: &str) -> String {
    format!(
        "a pool that a daemon of this machine has open, or `blockyard serve` or {option}: another \
         machine may have this one open, and would lose it"
    )
}

/// The parameters of a pool that only remote storage has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteParameters {
    /// The directory of the cache; `None`: one in the state directory.
    pub cache: Option<PathBuf>,
    /// Most bytes of the cache; 0: the default.
    pub cache_bytes: u64,
    /// Most bytes of a pool that this opening makes; 0: an existing pool is expected.
    pub capacity_bytes: u64,
    /// What acknowledges a sync; `None`: the remote storage, or as the pool is open.
    pub acknowledge: Option<Acknowledge>,
    /// Most bytes of writes that only this machine has; 0: the default.
    pub max_lag_bytes: u64,
    /// Longest time for which only this machine has a write, in milliseconds; 0: the default.
    pub max_lag_ms: u64,
    /// A standby may take the pool over if its opener has not renewed the lease for this time, in
    /// milliseconds; 0: there is no lease; `None`: as the opener before had it.
    pub lease_ms: Option<u64>,
    /// Take an existing pool over, although another machine may have it open. Without it an opening
    /// that could change the pool is refused.
    pub take_over: bool,
}

impl RemoteParameters {
    /// Refuses parameters that are given for a pool in a directory or on a disk.
    ///
    /// # Errors
    /// Which one is given.
    pub fn refuse(&self) -> Result<(), StoreError> {
        let cache = self.cache.as_ref().map(|path| path.display().to_string());
        let number = |bytes: u64| (bytes > 0).then(|| bytes.to_string());
        let given = [
            ("ack", self.acknowledge.map(|acknowledge| acknowledge.to_string())),
            ("max_lag", number(self.max_lag_bytes)),
            ("max_lag_time", number(self.max_lag_ms)),
            ("lease", self.lease_ms.and_then(number)),
            ("cache", cache),
            ("cache_size", number(self.cache_bytes)),
            ("pool_size", number(self.capacity_bytes)),
        ];
        match given.into_iter().find_map(|(field, value)| Some((field, value?))) {
            None => Ok(()),
            Some((field, value)) => {
                let wanted = format!("none, unless path={SCHEME}BUCKET/PREFIX");
                Err(StoreError::Invalid { field, value, wanted })
            }
        }
    }
}

impl RemoteParameters {
    /// Refuses limits of a lag without a local log, and a limit that is too low.
    ///
    /// # Errors
    /// Which parameter is wrong.
    pub fn check(&self) -> Result<(), StoreError> {
        let given = [("max_lag", self.max_lag_bytes), ("max_lag_time", self.max_lag_ms)];
        let refused = |field, value: u64, wanted: &str| {
            let (value, wanted) = (value.to_string(), wanted.to_owned());
            Err(StoreError::Invalid { field, value, wanted })
        };
        if self.acknowledge != Some(Acknowledge::Local)
            && let Some((field, value)) = given.into_iter().find(|(_, value)| *value > 0)
        {
            return refused(field, value, "none without ack=local");
        }
        if let Some(ms @ 1..LEASE_MS_MIN) = self.lease_ms {
            return refused("lease", ms, "3s or more, or 0 for none");
        }
        match self.max_lag_bytes {
            0 | MAX_LAG_BYTES_MIN.. => Ok(()),
            bytes => refused("max_lag", bytes, "16M or more, or 0 for the default"),
        }
    }
}

/// Remote storage has not answered a read, although it was asked again and again; the source of an
/// [`io::Error`].
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NoAnswer(pub String);

/// Whether a read failed because remote storage has not answered it. A repetition at once would
/// take as long, and fail too.
pub fn is_unanswered(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|source| source.is::<NoAnswer>())
}

/// Provides the storage of remote pools.
pub trait RemotePools: fmt::Debug + Send + Sync {
    /// Whether there is a pool.
    ///
    /// # Errors
    /// If that cannot be determined.
    fn is_pool(&self, path: &str) -> Result<bool, StoreError>;

    /// The contents of the superblock of a pool that any process may have open; `None` if there is
    /// no pool.
    ///
    /// # Errors
    /// If they cannot be read.
    fn superblock(&self, path: &str) -> Result<Option<Vec<u8>>, StoreError>;

    /// The lease of the pool that any process may have open; `None` if there is none.
    ///
    /// # Errors
    /// If it cannot be read. [`is_unavailable`] says whether it may be read later.
    fn lease(&self, path: &str) -> Result<Option<Lease>, StoreError>;

    /// Claims a lease that has run out: replaces it, if it is still this one. Returns whether it
    /// was. From then on its opener cannot renew it. The next opening of the pool by this process
    /// gets an error if another opener was faster.
    ///
    /// # Errors
    /// If this process could not read the pool, or the lease may not have been replaced.
    fn claim_lease(&self, path: &str, lease: &Lease) -> Result<bool, StoreError>;

    /// The next opening of the pool by this process gets an error if another opener came after this
    /// epoch; `None`: it takes the pool over from any.
    fn expect_epoch(&self, path: &str, epoch: Option<u64>);

    /// What this machine knows of the pool. Writes of its local log that are lost are kept aside.
    ///
    /// # Errors
    /// If the pool or the log cannot be read, or another process of this machine has the pool open.
    /// [`is_unavailable`] says whether it may be read later.
    fn own_part(&self, path: &str) -> Result<OwnPart, StoreError>;

    /// Opens the storage of a pool, and makes it if there is none and `purpose` allows that.
    ///
    /// # Errors
    /// If it cannot be opened.
    fn open(
        &self,
        path: &str,
        purpose: Purpose,
        parameters: &RemoteParameters,
    ) -> Result<Box<dyn RemoteStore>, StoreError>;
}

/// A file of a remote pool.
pub trait RemoteFile: StoreFile {
    /// Discards the contents. Reads return zeros until it is written.
    fn discard(&self);
}

/// The storage of a remote pool; [`crate::SegmentStore`] without types that depend on the storage.
/// A call through this trait costs nanoseconds, and a request to remote storage milliseconds.
pub trait RemoteStore: StoreLocation + fmt::Debug + Send + Sync {
    /// As [`crate::SegmentFiles::open`].
    ///
    /// # Errors
    /// If the file exists and cannot be opened.
    fn open(&self, name: &str) -> io::Result<Option<Arc<dyn RemoteFile>>>;

    /// As [`crate::SegmentFiles::create`].
    ///
    /// # Errors
    /// If it cannot be made.
    fn create(&self, name: &str, len: u64) -> io::Result<Arc<dyn RemoteFile>>;

    /// As [`crate::SegmentFiles::rename`].
    ///
    /// # Errors
    /// If it cannot be renamed.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// As [`crate::SegmentFiles::remove`].
    ///
    /// # Errors
    /// If the file exists and cannot be removed.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// As [`crate::SegmentFiles::names`].
    ///
    /// # Errors
    /// If they cannot be read.
    fn names(&self) -> io::Result<Vec<String>>;

    /// As [`crate::SegmentFiles::sync_names`].
    ///
    /// # Errors
    /// If they may not be durable.
    fn sync_names(&self) -> io::Result<()>;

    /// As [`crate::SegmentStore::log_writer`].
    fn log_writer(&self) -> Box<dyn LogWriter<PoolFile>>;

    /// As [`crate::SegmentStore::reads`].
    fn reads(&self, event_fd: Option<&EventFd>) -> Box<dyn Reads<PoolFile>>;

    /// How the pool acknowledges syncs, and what the remote storage lacks; `None` if the pool is
    /// open for reading only.
    fn upload_status(&self) -> Option<UploadStatus>;

    /// Until when the opener may serve requests.
    fn lease_term(&self) -> Arc<LeaseTerm>;

    /// Tells other processes of this machine the control socket of the daemon that has the pool
    /// open.
    ///
    /// # Errors
    /// If the system refuses to write it down.
    fn announce(&self, control: &Path) -> io::Result<()>;
}

static PROVIDER: OnceLock<Box<dyn RemotePools>> = OnceLock::new();

/// Registers the provider of this process. Only the first call has an effect.
pub fn register(provider: Box<dyn RemotePools>) {
    _ = PROVIDER.set(provider);
}

/// The URI in a path of a pool, if it is remote.
pub fn uri_of(path: &Path) -> Option<&str> {
    path.to_str().filter(|text| text.starts_with(SCHEME))
}

/// The lease of a remote pool, by its path.
///
/// # Errors
/// If it cannot be read, or this program opens no remote pools.
pub fn lease(path: &str) -> Result<Option<Lease>, StoreError> {
    provider(path)?.lease(path)
}

/// Claims the lease of a remote pool, by its path. Returns whether it was still this one.
///
/// # Errors
/// As [`lease`].
pub fn claim_lease(path: &str, lease: &Lease) -> Result<bool, StoreError> {
    provider(path)?.claim_lease(path, lease)
}

/// As [`RemotePools::expect_epoch`], by the path of the pool.
///
/// # Errors
/// If this program opens no remote pools.
pub fn expect_epoch(path: &str, epoch: Option<u64>) -> Result<(), StoreError> {
    provider(path)?.expect_epoch(path, epoch);
    Ok(())
}

/// What this machine knows of a remote pool, by its path.
///
/// # Errors
/// As [`RemotePools::own_part`].
pub fn own_part(path: &str) -> Result<OwnPart, StoreError> {
    provider(path)?.own_part(path)
}

/// Whether an error of a provider says that the remote storage did not answer, so that a repetition
/// may succeed.
pub fn is_unavailable(error: &StoreError) -> bool {
    matches!(error, StoreError::Io { source, .. } if source.kind() == io::ErrorKind::TimedOut)
}

/// Whether a path names a remote pool.
pub fn is_remote(path: &Path) -> bool {
    uri_of(path).is_some()
}

/// The provider, for a path of a remote pool.
pub(crate) fn provider(uri: &str) -> Result<&'static dyn RemotePools, StoreError> {
    match PROVIDER.get() {
        Some(provider) => Ok(&**provider),
        None => Err(StoreError::Invalid {
            field: "path",
            value: uri.to_owned(),
            wanted: "a directory or a disk: this program opens no pools in object stores".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remote_path_is_refused_by_name_without_a_provider() {
        let path = Path::new("s3://bucket/pool");
        assert!(is_remote(path) && !is_remote(Path::new("/s3://bucket")));
        let error = crate::is_pool(path).unwrap_err().to_string();
        assert!(error.starts_with("invalid path `s3://bucket/pool`: expected a dir"), "{error}");
        let error = crate::PoolPaths::of(path).canonical().unwrap_err().to_string();
        assert!(error.starts_with("invalid path `s3://bucket/pool`"), "{error}");
        assert!(!Path::new("s3:").exists(), "nothing was made");
    }

    #[test]
    fn parameters_of_remote_pools_are_refused_elsewhere() {
        let given = RemoteParameters { capacity_bytes: 5, ..RemoteParameters::default() };
        let error = given.refuse().unwrap_err().to_string();
        assert!(
            error.starts_with("invalid pool_size `5`: expected none, unless path=s3:"),
            "{error}"
        );
        assert!(RemoteParameters::default().refuse().is_ok());
        let given = RemoteParameters {
            acknowledge: Some(Acknowledge::Local),
            ..RemoteParameters::default()
        };
        let error = given.refuse().unwrap_err().to_string();
        assert!(
            error.starts_with("invalid ack `local`: expected none, unless path=s3:"),
            "{error}"
        );
    }

    #[test]
    fn limits_of_a_lag_are_refused_without_a_local_log_and_if_they_are_too_low() {
        let refused = |acknowledge, max_lag_bytes, max_lag_ms| {
            let given = RemoteParameters {
                acknowledge,
                max_lag_bytes,
                max_lag_ms,
                ..RemoteParameters::default()
            };
            given.check().err().map(|error| error.to_string()).unwrap_or_default()
        };
        let local = Some(Acknowledge::Local);
        for (acknowledge, bytes, ms, expected) in [
            (None, 1 << 30, 0, "invalid max_lag `1073741824`: expected none without ack=local"),
            (Some(Acknowledge::Object), 0, 5, "invalid max_lag_time `5`: expected none without"),
            (local, 5, 0, "invalid max_lag `5`: expected 16M or more, or 0"),
        ] {
            let error = refused(acknowledge, bytes, ms);
            assert!(error.starts_with(expected), "{error}");
        }
        assert_eq!(refused(local, 16 << 20, 5) + &refused(local, 0, 0) + &refused(None, 0, 0), "");
    }
}
