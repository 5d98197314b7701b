//! A pool with the thread that runs its committer. A process opens each pool once, however many of
//! its volumes are served as devices.
#![allow(clippy::disallowed_types)] // Pools are opened and closed rarely.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blockyard_core::Status;
use blockyard_store::mirror::locations::has_copy;
use blockyard_store::{PoolBacking, PoolPaths, Purpose, SegmentStore, StoreError};
use blockyard_volume_format::catalogue::{Change, VolumeMeta};
use blockyard_volume_format::properties::Properties;
use blockyard_volume_format::superblock;

use crate::address_space;
use crate::config::VolumeConfig;
use crate::error::VolumeError;
use crate::options::Options;
use crate::pool::Pool;
use crate::record::{Body, Record};
use crate::resync::Background;
use crate::settings::OpenDevice;
use crate::verify::PoolVerifier;

/// The pools of this process, by path.
static POOLS: LazyLock<Mutex<HashMap<PathBuf, Place>>> = LazyLock::new(Mutex::default);

/// The state of a path in this process.
enum Place {
    /// A thread is opening the pool.
    Opening,
    /// The pool was opened; it may be closed by now.
    Open(Weak<Running>),
}

impl Place {
    /// The pool, if it is open.
    fn running(&self) -> Option<Arc<Running>> {
        match self {
            Place::Opening => None,
            Place::Open(running) => running.upgrade(),
        }
    }

    /// Whether the pool is open or being opened.
    fn is_taken(&self) -> bool {
        match self {
            Place::Opening => true,
            Place::Open(running) => running.strong_count() > 0,
        }
    }
}

/// Paths of a pool that this thread is opening. If the opening fails, they become free again.
struct Opening(Vec<PathBuf>);

impl Opening {
    fn done(mut self, running: &Arc<Running>) {
        let places = std::mem::take(&mut self.0).into_iter();
        pools().extend(places.map(|place| (place, Place::Open(Arc::downgrade(running)))));
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        let mut pools = pools();
        for place in &self.0 {
            if matches!(pools.get(place), Some(Place::Opening)) {
                pools.remove(place);
            }
        }
    }
}

/// How long an opening waits for this process to close the pool, which makes its data durable
/// meanwhile.
const CLOSE_MAX: Duration = Duration::from_secs(30);

/// How often the thread checks whether the pool is closed, or opened.
const CLOSE_CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// How often the committer's thread continues after a panic, only to answer records.
const PANICS_MAX: usize = 3;

/// An open pool with its committer's thread.
#[derive(Debug)]
pub struct Running<D: SegmentStore = PoolBacking> {
    pool: Arc<Pool<D>>,
    thread: Option<JoinHandle<()>>,
    /// Numbers of the volumes that are served as devices or held for a change.
    taken: Mutex<BTreeSet<u32>>,
    /// The volumes that are devices, by their numbers.
    devices: Mutex<BTreeMap<u32, OpenDevice>>,
    /// Locked while a key slot, properties or a reservation are changed, and from the comparison of
    /// a volume with its copy until it is destroyed: the comparison sees every change that was
    /// answered.
    attributes: Mutex<()>,
    /// Locked while properties of a volume that may be a device are set.
    setting: Mutex<()>,
    /// Locked during a flush before a device is closed: of many that close at once, one flush
    /// writes, and the others find nothing to write.
    flushing: Mutex<()>,
    /// The resync of a copy that has joined or come back.
    background: Background,
    /// The control socket of the daemon, once it was announced.
    control: Mutex<Option<PathBuf>>,
    /// Paths of copies that were detached: a configuration may still name them.
    former: Mutex<Vec<PathBuf>>,
    /// Those of them that were detached since this opening.
    left: Mutex<Vec<PathBuf>>,
    /// Whether this opening made the pool.
    is_new: bool,
    /// Directories that this opening made, a directory before its parent.
    new_directories: Vec<PathBuf>,
    /// Whether to remove the pool at the close if it has no volume then.
    erase_if_empty: AtomicBool,
}

fn pools() -> MutexGuard<'static, HashMap<PathBuf, Place>> {
    POOLS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The open pool of which a copy was at one of these paths until it was detached, if no other pool
/// is there now. The path may be that of a disk that is gone, so nothing is made there.
fn by_former_path(given: &PoolPaths) -> Option<Arc<Running>> {
    let mut open: Vec<Arc<Running>> = pools().values().filter_map(Place::running).collect();
    let is_former = |open: &Arc<Running>| {
        given.all().iter().any(|path| {
            let real = path.canonicalize().unwrap_or_else(|_| path.clone());
            let left = open.left.lock().unwrap_or_else(PoisonError::into_inner);
            let was_there = left.contains(&real) || left.contains(path);
            was_there && !open.has_copy_at(&real) && !has_copy(&real)
        })
    };
    let at = open.iter().position(is_former)?;
    let found = open.swap_remove(at);
    tracing::warn!(
        "`{}` is no copy of the pool any more that was there; opening that pool, `{}`. Change the \
         configuration; after a restart a new pool can be made there",
        given.path.display(),
        found.path().display()
    );
    Some(found)
}

/// Removes directories that are empty.
fn remove_empty(directories: &[PathBuf]) {
    directories.iter().for_each(|path| _ = std::fs::remove_dir(path));
}

impl Running {
    /// Opens the pool of a directory, or creates it; returns the open pool if this process has it
    /// open. A second copy is opened too.
    ///
    /// # Errors
    /// If the pool cannot be opened.
    pub fn open(path: &Path, options: Options) -> Result<Arc<Running>, VolumeError> {
        Running::open_places(&PoolPaths::of(path), options)
    }

    /// Opens a pool by one path or by the paths of both copies.
    ///
    /// # Errors
    /// If the pool cannot be opened.
    pub fn open_places(given: &PoolPaths, options: Options) -> Result<Arc<Running>, VolumeError> {
        address_space::check(&options)?;
        if let Some(open) = by_former_path(given) {
            return Ok(open);
        }
        let now = given.current()?;
        let former = given.all().into_iter().filter(|path| !now.all().contains(path)).collect();
        let running = Running::open_current(&now, options)?;
        running.add_former(former);
        Ok(running)
    }

    /// Opens a pool by the paths of copies that belong to it.
    fn open_current(given: &PoolPaths, options: Options) -> Result<Arc<Running>, VolumeError> {
        let new = given.missing_directories();
        let given = given.canonical()?;
        Running::open_canonical(&given, options, &new).inspect_err(|_| remove_empty(&new))
    }

    /// Opens a pool by its canonical paths. `new_directories` were made for it.
    fn open_canonical(
        given: &PoolPaths,
        options: Options,
        new_directories: &[PathBuf],
    ) -> Result<Arc<Running>, VolumeError> {
        let places = given.all();
        let until = Instant::now() + CLOSE_MAX;
        let opening = loop {
            let mut pools = pools();
            pools.retain(|_, place| place.is_taken());
            let found = |place: &PathBuf| Some((place.clone(), pools.get(place)?.running()));
            match places.iter().find_map(found) {
                // The copy there was detached.
                Some((place, Some(open))) if !open.has_copy_at(&place) => {
                    pools.remove(&place);
                    continue;
                }
                Some((_, Some(open))) => return Ok(open),
                // Another thread is opening this pool. Wait, without holding the lock.
                Some((_, None)) => {}
                None => {
                    let opening = |place: &PathBuf| (place.clone(), Place::Opening);
                    pools.extend(places.iter().map(opening));
                    break Opening(places);
                }
            }
            drop(pools);
            std::thread::sleep(CLOSE_CHECK_INTERVAL);
        };
        let purpose = if options.consent { Purpose::Overwrite } else { Purpose::Use };
        let taken = loop {
            match given.lock(purpose, options.store) {
                // This process is still closing the pool.
                Err(StoreError::InUse { lock_owner, .. })
                    if lock_owner.pid == Some(std::process::id()) && Instant::now() < until => {}
                taken => break taken?,
            }
            std::thread::sleep(CLOSE_CHECK_INTERVAL);
        };
        let directory = taken.assemble(given.degraded, &PoolVerifier)?;
        let running = Running::start_in(directory, options, new_directories.to_vec())?;
        if !running.pool.segments().directory().is_direct() {
            let path = running.path();
            tracing::warn!("{}: no direct I/O there; through the page cache", path.display());
        }
        running.forget_all();
        opening.done(&running);
        // Also the copies that only labels name.
        for path in running.pool.segments().directory().paths() {
            running.add_place(path);
        }
        running.start_resync()?;
        Ok(running)
    }

    /// The path of the pool.
    pub fn path(&self) -> PathBuf {
        self.pool.segments().directory().path()
    }

    /// Whether one of the pool's copies is in the directory `path`, or was when the configuration
    /// was written and nothing else is there now.
    pub fn is_at(&self, path: &Path) -> bool {
        let former = self.former.lock().unwrap_or_else(PoisonError::into_inner);
        self.pool.segments().directory().sides().iter().any(|side| side.path == path)
            || former.iter().any(|it| it == path) && !has_copy(path)
    }

    /// Whether one of the pool's copies is at `path`, or is missing there.
    fn has_copy_at(&self, path: &Path) -> bool {
        self.pool.segments().directory().paths().iter().any(|it| it == path)
    }

    /// Publishes the control socket of the daemon that has this pool open.
    ///
    /// # Errors
    /// If the system refuses to write it to the lock file.
    pub fn announce(&self, control: &Path) -> Result<(), VolumeError> {
        self.pool.segments().directory().announce(control)?;
        *self.control.lock().unwrap_or_else(PoisonError::into_inner) = Some(control.to_owned());
        Ok(())
    }

    /// Makes this process find the pool by the path of a copy that has joined, and others find the
    /// daemon.
    pub(crate) fn add_place(&self, path: PathBuf) {
        let is_this = |place: &Place| {
            let open = place.running();
            open.filter(|open| std::ptr::eq(&raw const **open, self)).map(|it| Arc::downgrade(&it))
        };
        let mut pools = pools();
        if let Some(this) = pools.values().find_map(is_this) {
            pools.insert(path, Place::Open(this));
        }
        drop(pools);
        let control = self.control.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(control) = control
            && let Err(error) = self.announce(&control)
        {
            tracing::warn!("other processes do not find this one by the new copy: {error}");
        }
    }
}

impl<D: SegmentStore> Running<D> {
    /// Opens a pool on a directory of any kind, which only the caller uses.
    ///
    /// # Errors
    /// If the pool cannot be opened.
    pub fn start(directory: D, options: Options) -> Result<Arc<Running<D>>, VolumeError> {
        Running::start_in(directory, options, Vec::new())
    }

    fn start_in(
        directory: D,
        options: Options,
        new_directories: Vec<PathBuf>,
    ) -> Result<Arc<Running<D>>, VolumeError> {
        let is_new = matches!(directory.open(superblock::FILE), Ok(None));
        let (pool, mut committer) = Pool::open(directory, options)?;
        pool.set_running(true);
        let thread = std::thread::Builder::new().name("volume-log".to_owned());
        let opened = Arc::clone(&pool);
        let run = move || {
            // A panic there is a bug. The thread continues only to answer waiting clients with
            // errors.
            for _ in 0..PANICS_MAX {
                if catch_unwind(AssertUnwindSafe(|| committer.run())).is_ok() {
                    return;
                }
                opened.latch("the thread of the log has panicked");
            }
            opened.set_running(false);
        };
        let thread = thread.spawn(run);
        let thread = thread.map_err(VolumeError::io("cannot start the thread of the log"))?;
        Ok(Arc::new(Running {
            pool,
            thread: Some(thread),
            taken: Mutex::new(BTreeSet::new()),
            devices: Mutex::new(BTreeMap::new()),
            attributes: Mutex::new(()),
            setting: Mutex::new(()),
            flushing: Mutex::new(()),
            background: Background::default(),
            control: Mutex::new(None),
            former: Mutex::new(Vec::new()),
            left: Mutex::new(Vec::new()),
            is_new,
            new_directories,
            erase_if_empty: AtomicBool::new(false),
        }))
    }

    /// If the pool has no volume and this opening made it: removes it at the close, unless it has a
    /// volume by then. For a pool whose first volume could not be made.
    pub fn erase_if_empty(&self) {
        let is_empty = self.pool.volumes().by_id.is_empty();
        // A flag alone: it publishes no other data.
        self.erase_if_empty.store(is_empty, Ordering::Relaxed);
    }

    /// Removes a volume that was made for a device that is not served, and the pool with it if the
    /// pool was made for the same reason. The volume is still marked as served.
    pub(crate) fn discard(&self, id: u32) {
        let name = self.pool.volumes().by_id.get(&id).map(|live| live.meta.name.clone());
        if let Some(name) = name
            && let Err(error) = self.pool.change(&name, Change::Destroy { id })
        {
            tracing::warn!("the new volume `{name}` stays: {error}");
        }
        self.erase_if_empty();
    }

    /// Restores the reservation of a volume for a device that is not served.
    pub(crate) fn reserve_again(&self, id: u32, bytes: u64) {
        let name = self.pool.volumes().by_id.get(&id).map(|live| live.meta.name.clone());
        if let Some(name) = name
            && let Err(error) = self.pool.change(&name, Change::Reserve { id, bytes })
        {
            tracing::warn!("`{name}` keeps its new reservation: {error}");
        }
    }

    /// Removes the pool, whose log has ended.
    fn erase(&self) {
        let directory = self.pool.segments().directory();
        if let Err(error) = directory.erase() {
            tracing::warn!("parts of the new pool `{}` stay: {error}", directory.title());
        }
        remove_empty(&self.new_directories);
    }

    /// Remembers the path of a copy that is detached, or will be.
    pub(crate) fn add_left(&self, path: PathBuf) {
        self.add_former(vec![path.clone()]);
        self.left.lock().unwrap_or_else(PoisonError::into_inner).push(path);
    }

    /// The paths of copies that do not belong to the pool any more.
    pub fn former_paths(&self) -> Vec<PathBuf> {
        self.former.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Remembers the paths of copies that do not belong to the pool any more.
    pub(crate) fn add_former(&self, paths: Vec<PathBuf>) {
        let mut former = self.former.lock().unwrap_or_else(PoisonError::into_inner);
        paths.into_iter().for_each(|path| {
            if !former.contains(&path) {
                former.push(path);
            }
        });
    }

    /// The resync of a copy that has joined.
    pub(crate) fn background(&self) -> &Background {
        &self.background
    }

    /// The mark of the pool: a random number, the same for all of its copies.
    pub fn mark(&self) -> u64 {
        crate::checkpoint::pool_mark(&self.pool)
    }

    /// The pool.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        &self.pool
    }

    /// Makes the completed writes of all volumes durable, before a device is closed. Threads that
    /// do so at once take turns.
    pub fn flush_in_turn(&self) -> Status {
        let _turn = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        self.pool.flush()
    }

    /// Locks the key slots, properties and reservations of all volumes.
    pub(crate) fn attributes(&self) -> MutexGuard<'_, ()> {
        self.attributes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the properties of devices: of two requests at once, the device and its parameters get
    /// what the pool stores last. Each pool has a lock, so that a request does not wait for another
    /// pool whose storage does not answer.
    pub fn setting(&self) -> MutexGuard<'_, ()> {
        self.setting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a volume is served as a device, or held for a change.
    pub fn is_taken(&self, id: u32) -> bool {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).contains(&id)
    }

    /// Adds a volume that is served: changes of its properties reach it.
    pub(crate) fn add_device(&self, id: u32, device: OpenDevice) {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner).insert(id, device);
    }

    /// The present parameters of a volume that is a device.
    pub fn device_config(&self, id: u32) -> Option<VolumeConfig> {
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        devices.get(&id).map(|device| device.config.clone())
    }

    /// Applies properties to a volume if it is a device.
    pub(crate) fn apply(&self, id: u32, properties: &Properties) {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = devices.get_mut(&id) {
            device.set(properties);
        }
    }

    /// Whether a volume is a device that must be closed before it gets these properties, because
    /// its clients could not learn of the change: `read_only`, and `sync` from `always` on.
    pub fn needs_closing(&self, id: u32, properties: &Properties) -> bool {
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        devices.get(&id).is_some_and(|device| device.needs_closing(properties))
    }

    /// Marks a volume as served. Returns whether it was free.
    pub(crate) fn take(&self, id: u32) -> bool {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).insert(id)
    }

    /// Keeps a volume from being served while it is changed, until the result is dropped.
    ///
    /// # Errors
    /// If the volume is served as a device, or is being changed.
    pub fn hold(&self, meta: &VolumeMeta) -> Result<Held<'_, D>, VolumeError> {
        if self.take(meta.id) {
            return Ok(Held { running: self, id: meta.id });
        }
        let why = "in use; close it first".to_owned();
        Err(VolumeError::Busy { name: meta.name.clone(), why })
    }

    /// Marks a volume as no longer served.
    pub(crate) fn put(&self, id: u32) {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }
}

/// Keeps a volume from being served as a device.
pub struct Held<'a, D: SegmentStore> {
    running: &'a Running<D>,
    id: u32,
}

impl<D: SegmentStore> Drop for Held<'_, D> {
    fn drop(&mut self) {
        self.running.put(self.id);
    }
}

/// Closes the pool: makes everything durable, and unlocks the directory for other processes.
impl<D: SegmentStore> Drop for Running<D> {
    fn drop(&mut self) {
        self.background.stop();
        self.pool.send(Record::of(Body::Stop, None));
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the log has panicked");
        }
        self.pool.set_running(false);
        self.pool.segments().log_repairs();
        let may_erase = self.is_new && self.erase_if_empty.load(Ordering::Relaxed);
        if may_erase && self.pool.volumes().by_id.is_empty() {
            self.erase();
        }
    }
}
