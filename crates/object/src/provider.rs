//! Provides pools in object stores to `crates/store`: by URI, with the credentials of the
//! environment, a lock that keeps other processes of this machine out, and a cache.

#![allow(clippy::disallowed_types)] // Pools are opened on the control plane.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use blockyard_store::remote::{
    Acknowledge, Lease, OwnPart, RemoteFile, RemoteParameters, RemotePools, RemoteStore,
    UploadStatus, only_open_here,
};
use blockyard_store::{
    EventFd, Layout, LeaseTerm, LockOwner, LogWriter, PoolFile, Purpose, Reads, SegmentFiles as _,
    SegmentStore as _, StoreError, StoreFile as _, StoreLocation,
};
use blockyard_volume_format::{FormatError, superblock};
use tokio::runtime::{Builder, Runtime};

use crate::bucket_error::BucketError;
use crate::client::{ObjectClient, Retries};
use crate::lease;
use crate::local_log;
use crate::location::{Access, ObjectUri};
use crate::reads::READS_MAX;
use crate::recovery;
use crate::store::{BucketFile, BucketStore, Opening, has_pool, pool_id};
use crate::{BucketSettings, LocalAcknowledgement, ObjectError};

/// If the object stores of fewer pools than these do not answer, other pools still find threads for
/// their reads, and for the addresses of their hosts. A thread is made when it is needed, and ends
/// when it is not.
const READ_POOLS_MAX: usize = 16;

/// Opens pools in object stores.
#[derive(Debug)]
pub struct Provider {
    /// The state directory, in which each pool has a lock and a cache.
    state_directory: fn() -> PathBuf,
    runtime: OnceLock<Arc<Runtime>>,
    /// The pools of which the next opening by this process gets an error if another opener came
    /// after an epoch: the path, and the epoch.
    expected: Mutex<BTreeMap<String, u64>>,
    /// The pools whose leases were read: the path, and the mark of the pool.
    watched: Mutex<BTreeMap<String, u64>>,
}

impl Provider {
    /// A provider with the locks and caches of pools in the state directory.
    pub fn new(state_directory: fn() -> PathBuf) -> Provider {
        Provider {
            state_directory,
            runtime: OnceLock::new(),
            expected: Mutex::default(),
            watched: Mutex::default(),
        }
    }

    /// The runtime of all pools, which the first one starts. One thread sends all requests. Others
    /// read for the pools, and ask for the addresses of hosts.
    fn runtime(&self) -> Result<&Arc<Runtime>, StoreError> {
        if let Some(runtime) = self.runtime.get() {
            return Ok(runtime);
        }
        let failed = |source| StoreError::Io {
            doing: "cannot start the thread of the object store".to_owned(),
            source,
        };
        let mut builder = Builder::new_current_thread();
        builder.enable_all().max_blocking_threads(READ_POOLS_MAX * READS_MAX);
        let made = Arc::new(builder.build().map_err(failed)?);
        let runs = Arc::clone(&made);
        // It ends with the process. Another thread may have been faster: this one idles then.
        let thread = std::thread::Builder::new().name("object-store".to_owned());
        thread.spawn(move || runs.block_on(std::future::pending::<()>())).map_err(failed)?;
        Ok(self.runtime.get_or_init(|| made))
    }

    fn expected(&self) -> MutexGuard<'_, BTreeMap<String, u64>> {
        self.expected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watched(&self) -> MutexGuard<'_, BTreeMap<String, u64>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mark of the pool that is at a path, which is remembered; `None` if there is no pool.
    async fn watch(&self, client: &ObjectClient, path: &str) -> Result<Option<u64>, BucketError> {
        let Some((manifest, _)) = recovery::manifest(client).await? else { return Ok(None) };
        self.watched().insert(path.to_owned(), manifest.mark());
        Ok(Some(manifest.mark()))
    }

    /// The directory of a pool. Pools of several object stores may have the same URI, so it is
    /// named by the ID of the pool.
    fn directory_of(&self, id: [u8; 16]) -> PathBuf {
        (self.state_directory)().join("object").join(format!("{:032x}", u128::from_be_bytes(id)))
    }
}

/// The error of storage for the error of a pool in an object store.
fn refused(path: &str, error: BucketError) -> StoreError {
    let at = |name: String| format!("{path}/{name}");
    let object = |error: BucketError| FormatError::Object { what: error.to_string() }.into();
    match error {
        BucketError::Store(error) => error,
        BucketError::Format(error) => error.into(),
        BucketError::Damaged { name, why } => object(BucketError::Damaged { name: at(name), why }),
        BucketError::Missing { name } => object(BucketError::Missing { name: at(name) }),
        BucketError::Foreign { name } => object(BucketError::Foreign { name: at(name) }),
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
            wanted: only_open_here("--take-over"),
        },
        error => {
            let is_transient =
                matches!(&error, BucketError::Request(error) if error.is_transient());
            let kind = if is_transient { ErrorKind::TimedOut } else { ErrorKind::Other };
            let doing = format!("cannot open the pool `{path}`");
            StoreError::Io { doing, source: io::Error::new(kind, error) }
        }
    }
}

/// A standby reads the lease again soon, so that a request is not tried for long.
const LEASE_RETRIES: Retries = Retries {
    try_time: Duration::from_secs(5),
    give_up: Duration::from_secs(10),
    pause_min: Duration::from_millis(50),
    pause_max: Duration::from_secs(1),
};

fn connect(path: &str) -> Result<Arc<ObjectClient>, BucketError> {
    connect_with(path, Retries::default())
}

fn connect_with(path: &str, retries: Retries) -> Result<Arc<ObjectClient>, BucketError> {
    let uri = ObjectUri::parse(path)?;
    Ok(Arc::new(ObjectClient::connect(&uri, &Access::from_env()?, retries)?))
}

/// The limits of acknowledgements by the local log, if it is to give them.
fn local(parameters: &RemoteParameters) -> Option<LocalAcknowledgement> {
    let mut local = LocalAcknowledgement::default();
    if parameters.max_lag_bytes > 0 {
        local.lag_bytes_max = parameters.max_lag_bytes;
    }
    if parameters.max_lag_ms > 0 {
        local = local.with_lag_time_max(Duration::from_millis(parameters.max_lag_ms));
    }
    (parameters.acknowledge == Some(Acknowledge::Local)).then_some(local)
}

/// How often an opener tries to lock a pool. A reader holds the lock for a moment.
const LOCK_TRIES_MAX: usize = 20;

/// The pause between two tries.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// The name of the lock file of a pool.
const OWNER: &str = "owner";

/// Whether a creation was refused before there was a pool.
fn is_without_pool(error: &BucketError) -> bool {
    matches!(
        error,
        BucketError::NoPool { .. }
            | BucketError::NoManifest { .. }
            | BucketError::Unfenced { .. }
            | BucketError::Store(StoreError::Invalid { field: "pool_size", .. })
    )
}

/// Refuses a pool that another process of this machine has open. A reader keeps no lock, so that it
/// excludes no opener.
fn check_unlocked(path: &str, directory: &Path) -> Result<(), StoreError> {
    let name = directory.join(OWNER);
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
    let name = directory.join(OWNER);
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
        let read = async {
            let client = connect_with(path, LEASE_RETRIES)?;
            let known = self.watched().get(path).copied();
            if let Some(pool) = known {
                match lease::read(&client, pool).await {
                    // Another pool may have been made here.
                    Err(BucketError::Foreign { .. }) => {}
                    read => return read,
                }
            }
            match self.watch(&client, path).await? {
                Some(pool) => lease::read(&client, pool).await,
                None => Ok(None),
            }
        };
        self.runtime()?.block_on(read).map_err(|error| refused(path, error))
    }

    fn claim_lease(&self, path: &str, lease: &Lease) -> Result<bool, StoreError> {
        let failed = |source| StoreError::Io { doing: "cannot draw a number".into(), source };
        let standby = blockyard_os::fresh_id().map_err(failed)?;
        let claim = async {
            let client = connect_with(path, LEASE_RETRIES)?;
            let keep_bytes = BucketSettings::default().keep_bytes;
            lease::claim_readable(&client, lease, standby, keep_bytes).await
        };
        let claimed = self.runtime()?.block_on(claim).map_err(|error| refused(path, error))?;
        if claimed.is_some() {
            self.expect_epoch(path, claimed);
        }
        Ok(claimed.is_some())
    }

    fn expect_epoch(&self, path: &str, epoch: Option<u64>) {
        match epoch {
            Some(epoch) => self.expected().insert(path.to_owned(), epoch),
            None => self.expected().remove(path),
        };
    }

    fn own_part(&self, path: &str) -> Result<OwnPart, StoreError> {
        let read = async {
            let client = connect_with(path, LEASE_RETRIES)?;
            let Some((manifest, _)) = recovery::manifest(&client).await? else {
                return Ok(OwnPart::default());
            };
            let directory = self.directory_of(manifest.id);
            let log = directory.join("log");
            // Without a log this machine never had the pool.
            if !log.exists() {
                return Ok(OwnPart::default());
            }
            check_unlocked(path, &directory)?;
            let was_last = local_log::identities(&log)?.contains(&manifest.writer);
            if !was_last {
                let _lock = lock(path, &directory)?;
                local_log::upload_left(&client, &manifest, &log).await?;
            }
            Ok(OwnPart {
                last_epoch: was_last.then_some(manifest.epoch),
                has_writes: local_log::has_batches(&log)?,
                lost: local_log::lost(&log),
            })
        };
        self.runtime()?.block_on(read).map_err(|error: BucketError| refused(path, error))
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
        let lease = parameters.lease_ms.filter(|ms| *ms > 0);
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
                    after: self.expected().remove(path),
                    keeps_lease: parameters.lease_ms.is_none(),
                };
                BucketStore::open(client, settings, request, runtime)
            }
        };
        let store = opened.map_err(|error| {
            if found.is_none() && is_without_pool(&error) {
                // Each try has drawn another ID.
                _ = std::fs::remove_file(directory.join(OWNER));
                _ = std::fs::remove_dir(&directory);
            }
            refused(path, error)
        })?;
        Ok(Box::new(ProvidedStore { store, lock, log: Some(log) }))
    }
}

/// A pool in an object store as `crates/store` uses it. The provider locks it for this process,
/// unless it only reads.
#[derive(Debug)]
pub struct ProvidedStore {
    store: BucketStore,
    lock: Option<File>,
    /// The directory of the local log.
    log: Option<PathBuf>,
}

impl ProvidedStore {
    /// A pool without a lock, which only the caller opens.
    pub fn unlocked(store: BucketStore) -> ProvidedStore {
        ProvidedStore { store, lock: None, log: None }
    }
}

impl Drop for ProvidedStore {
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

impl RemoteStore for ProvidedStore {
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
        self.store.check_writes().ok()?;
        let lost = self.log.as_deref().map(local_log::lost).unwrap_or_default();
        Some(UploadStatus { lost, ..self.store.upload_status() })
    }

    fn lease_term(&self) -> Arc<LeaseTerm> {
        self.store.term()
    }

    fn announce(&self, control: &Path) -> io::Result<()> {
        match &self.lock {
            Some(lock) => LockOwner::this(Some(control)).write(lock),
            None => Ok(()),
        }
    }
}

impl StoreLocation for ProvidedStore {
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
