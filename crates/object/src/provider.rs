//! Provides pools in object stores to `crates/store`: by URI, with the credentials of the
//! environment, a lock that keeps other processes of this machine out, and a cache.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use blockyard_store::remote::{
    Acknowledge, Lease, RemoteFile, RemoteParameters, RemotePools, RemoteStore, UploadStatus,
};
use blockyard_store::{
    EventFd, Layout, LockOwner, LogWriter, PoolFile, Purpose, Reads, SegmentFiles as _,
    SegmentStore as _, StoreError, StoreFile as _, StoreLocation,
};
use blockyard_volume_format::superblock;
use tokio::runtime::{Builder, Runtime};

use crate::bucket_error::BucketError;
use crate::client::{ObjectClient, Retries};
use crate::lease;
use crate::location::{Access, ObjectUri};
use crate::store::{BucketFile, BucketStore, Opening, has_pool, pool_id};
use crate::{BucketSettings, LocalAcknowledgement, ObjectError};

/// Opens pools in object stores.
#[derive(Debug)]
pub struct Provider {
    /// The state directory, in which each pool has a lock and a cache.
    state_directory: fn() -> PathBuf,
    runtime: OnceLock<Arc<Runtime>>,
}

impl Provider {
    /// A provider with the locks and caches of pools in the state directory.
    pub fn new(state_directory: fn() -> PathBuf) -> Provider {
        Provider { state_directory, runtime: OnceLock::new() }
    }

    /// The runtime of all pools, which the first one starts. One thread sends all requests.
    fn runtime(&self) -> Result<&Arc<Runtime>, StoreError> {
        if let Some(runtime) = self.runtime.get() {
            return Ok(runtime);
        }
        let failed = |source| StoreError::Io {
            doing: "cannot start the thread of the object store".to_owned(),
            source,
        };
        let made = Arc::new(Builder::new_current_thread().enable_all().build().map_err(failed)?);
        let runs = Arc::clone(&made);
        // It ends with the process. Another thread may have been faster: this one idles then.
        let thread = std::thread::Builder::new().name("object-store".to_owned());
        thread.spawn(move || runs.block_on(std::future::pending::<()>())).map_err(failed)?;
        Ok(self.runtime.get_or_init(|| made))
    }

    /// The directory of a pool. Pools of several object stores may have the same URI, so it is
    /// named by the ID of the pool.
    fn directory_of(&self, id: [u8; 16]) -> PathBuf {
        (self.state_directory)().join("object").join(format!("{:032x}", u128::from_be_bytes(id)))
    }
}

/// The error of storage for the error of a pool in an object store.
fn refused(path: &str, error: BucketError) -> StoreError {
    match error {
        BucketError::Store(error) => error,
        BucketError::Format(error) => error.into(),
        BucketError::Request(ObjectError::Invalid { field, value, wanted }) => {
            StoreError::Invalid { field, value: value.unwrap_or_default(), wanted }
        }
        BucketError::NoPool { .. } => StoreError::Invalid {
            field: "pool_size",
            value: "0".to_owned(),
            wanted: format!("the most bytes of the pool to be made, as there is none at {path}"),
        },
        BucketError::MayBeOpen { .. } => StoreError::Invalid {
            field: "path",
            value: path.to_owned(),
            wanted: "a pool that a daemon of this machine has open, or `blockyard serve` or \
                     --take-over: another machine may have this one open, and would lose it"
                .to_owned(),
        },
        error => StoreError::Io {
            doing: format!("cannot open the pool `{path}`"),
            source: io::Error::other(error),
        },
    }
}

fn connect(path: &str) -> Result<Arc<ObjectClient>, BucketError> {
    let uri = ObjectUri::parse(path)?;
    let client = ObjectClient::connect(&uri, &Access::from_env()?, Retries::default())?;
    Ok(Arc::new(client))
}

/// The limits of acknowledgements by the local log, if it is to give them.
fn local(parameters: &RemoteParameters) -> Option<LocalAcknowledgement> {
    let mut local = LocalAcknowledgement::default();
    if parameters.max_lag_bytes > 0 {
        local.lag_bytes_max = parameters.max_lag_bytes;
    }
    if parameters.max_lag_ms > 0 {
        local.lag_time_max = Duration::from_millis(parameters.max_lag_ms);
        local.upload_delay = local.upload_delay.min(local.lag_time_max / 4);
    }
    (parameters.acknowledge == Some(Acknowledge::Local)).then_some(local)
}

/// How often an opener tries to lock a pool. A reader holds the lock for a moment.
const LOCK_TRIES_MAX: usize = 20;

/// The pause between two tries.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Refuses a pool that another process of this machine has open. A reader keeps no lock, so that it
/// excludes no opener.
fn check_unlocked(path: &str, directory: &Path) -> Result<(), StoreError> {
    let name = directory.join("owner");
    match File::open(&name) {
        Ok(file) if file.try_lock_shared().is_err() => {
            Err(StoreError::InUse { path: path.into(), lock_owner: LockOwner::read(&name) })
        }
        // A pool without a lock file is open nowhere here.
        _ => Ok(()),
    }
}

/// Locks the pool for this process.
fn lock(path: &str, directory: &Path) -> Result<File, StoreError> {
    let failed =
        |source| StoreError::Io { doing: format!("cannot lock the pool `{path}`"), source };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(failed)?;
    let name = directory.join("owner");
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = options.open(&name).map_err(failed)?;
    let mut tries = 1;
    while file.try_lock().is_err() {
        if tries < LOCK_TRIES_MAX {
            tries += 1;
            std::thread::sleep(LOCK_PAUSE);
            continue;
        }
        let lock_owner = LockOwner::read(&name);
        return Err(StoreError::InUse { path: path.into(), lock_owner });
    }
    LockOwner::this(None).write(&file).map_err(failed)?;
    Ok(file)
}

impl RemotePools for Provider {
    fn is_pool(&self, path: &str) -> Result<bool, StoreError> {
        let client = connect(path).map_err(|error| refused(path, error))?;
        has_pool(&client, BucketSettings::default().keep_bytes, self.runtime()?)
            .map_err(|error| refused(path, error))
    }

    fn superblock(&self, path: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let client = connect(path).map_err(|error| refused(path, error))?;
        let settings = BucketSettings::default();
        let store = match BucketStore::open_read_only(client, settings, self.runtime()?) {
            Err(BucketError::NoPool { .. }) => return Ok(None),
            opened => opened.map_err(|error| refused(path, error))?,
        };
        let read = || {
            let Some(file) = store.open(superblock::FILE)? else { return Ok(None) };
            let mut bytes = vec![0; file.len()? as usize];
            file.read_at(0, &mut bytes)?;
            Ok(Some(bytes))
        };
        let doing = || format!("cannot read the superblock of `{path}`");
        read().map_err(|source| StoreError::Io { doing: doing(), source })
    }

    fn lease(&self, path: &str) -> Result<Option<Lease>, StoreError> {
        let client = connect(path).map_err(|error| refused(path, error))?;
        self.runtime()?.block_on(lease::read(&client)).map_err(|error| refused(path, error))
    }

    fn open(
        &self,
        path: &str,
        purpose: Purpose,
        parameters: &RemoteParameters,
    ) -> Result<Box<dyn RemoteStore>, StoreError> {
        let client = connect(path).map_err(|error| refused(path, error))?;
        let runtime = self.runtime()?;
        let found = pool_id(&client, runtime).map_err(|error| refused(path, error))?;
        let failed = |source| StoreError::Io { doing: "cannot draw a number".into(), source };
        let id = found.map_or_else(|| blockyard_os::fresh_id().map_err(failed), Ok)?;
        let directory = self.directory_of(id);
        let is_read_only = purpose == Purpose::ReadOnly;
        let lock = match is_read_only {
            true => check_unlocked(path, &directory).map(|()| None)?,
            false => Some(lock(path, &directory)?),
        };
        let mut settings = BucketSettings::default();
        if parameters.cache_bytes > 0 {
            settings.cache_bytes = parameters.cache_bytes;
        }
        settings.local = local(parameters);
        let lease = Some(parameters.lease_ms).filter(|ms| *ms > 0);
        settings.lease = lease.map(Duration::from_millis);
        if let Some(local) = &settings.local {
            // What the object store lacks is in memory, too.
            let least = local.lag_bytes_max.saturating_add(settings.compact_bytes * 2);
            settings.memory_bytes = settings.memory_bytes.max(least);
        }
        let cache = parameters.cache.clone().unwrap_or_else(|| directory.join("cache"));
        // Not in the cache, which can be deleted; and each opener of this machine must find it.
        let log = directory.join("log");
        let opened = match purpose {
            Purpose::ReadOnly => {
                BucketStore::open_read_only_with(client, settings, Some(&log), runtime)
            }
            Purpose::Use | Purpose::Overwrite => {
                let request = Opening {
                    id: Some(id),
                    cache: Some(&cache),
                    log: Some(&log),
                    capacity_bytes: Some(parameters.capacity_bytes).filter(|bytes| *bytes > 0),
                    take_over: parameters.take_over,
                };
                BucketStore::open(client, settings, request, runtime)
            }
        };
        let store = opened.map_err(|error| refused(path, error))?;
        Ok(Box::new(LockedStore { store, lock }))
    }
}

/// A pool in an object store, which this process has locked unless it only reads.
#[derive(Debug)]
struct LockedStore {
    store: BucketStore,
    lock: Option<File>,
}

impl Drop for LockedStore {
    fn drop(&mut self) {
        // An entry that remains is ignored once the lock is released.
        _ = self.lock.as_ref().map(|lock| LockOwner::default().write(lock));
    }
}

impl RemoteFile for BucketFile {
    fn discard(&self) {
        self.clear();
    }
}

impl RemoteStore for LockedStore {
    fn open(&self, name: &str) -> io::Result<Option<Arc<dyn RemoteFile>>> {
        Ok(self.store.open(name)?.map(|file| Arc::new(file) as Arc<dyn RemoteFile>))
    }

    fn create(&self, name: &str, len: u64) -> io::Result<Arc<dyn RemoteFile>> {
        Ok(Arc::new(self.store.create(name, len)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.store.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.store.remove(name)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        self.store.names()
    }

    fn sync_names(&self) -> io::Result<()> {
        self.store.sync_names()
    }

    fn log_writer(&self) -> Box<dyn LogWriter<PoolFile>> {
        Box::new(self.store.log_writer(None))
    }

    fn reads(&self, event_fd: Option<&EventFd>) -> Box<dyn Reads<PoolFile>> {
        Box::new(self.store.reads(event_fd))
    }

    fn upload_status(&self) -> Option<UploadStatus> {
        self.lock.as_ref().map(|_| self.store.upload_status())
    }

    fn announce(&self, control: &Path) -> io::Result<()> {
        match &self.lock {
            Some(lock) => LockOwner::this(Some(control)).write(lock),
            None => Ok(()),
        }
    }
}

impl StoreLocation for LockedStore {
    fn title(&self) -> String {
        self.store.title()
    }

    fn set_layout(&self, wanted: Layout, is_new: bool) -> Result<Layout, StoreError> {
        self.store.set_layout(wanted, is_new)
    }

    fn segments_max(&self) -> usize {
        self.store.segments_max()
    }

    fn check_location(&self) -> io::Result<()> {
        self.store.check_location()
    }

    fn fresh_id(&self) -> io::Result<[u8; 16]> {
        self.store.fresh_id()
    }
}
