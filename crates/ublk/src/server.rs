//! A server: a block device of the kernel, and the threads that serve its queues.
//!
//! ```text
//! NEW ─ add, parameters ▸ ADDED ─ threads fetch, start ▸ LIVE ─ stop, delete ▸ gone
//!                                     LIVE ─ the server is killed ▸ QUIESCED (or DEAD)
//!     QUIESCED ─ begin recovery, threads fetch, end recovery ▸ LIVE
//! disk: PRESENT ─ suspend: requests wait ▸ ABSENT ─ resume ▸ PRESENT
//!                                            └─ fail: requests fail ▸ FAILED ─ suspend ▸ ABSENT
//! ```
//!
//! A device that keeps its data over a kill of the server is made so that the kernel waits for
//! another server (QUIESCED). Any other is stopped by the kernel (DEAD): requests fail, because the
//! next server would have a device without the data.
#![allow(clippy::disallowed_types)] // Control plane: no lock is taken for an I/O.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use blockyard_core::Disk;
use blockyard_core::channel::{ChannelGroup, Stats};
use blockyard_core::rmw::SharedDisk;
use blockyard_sync::atomics::{AtomicBool, Ordering};

use crate::abi::{ControlCommand, DevInfo, DeviceState, Params, block_path, feature};
use crate::char_device::CharDevice;
use crate::control::Control;
use crate::error::UblkError;
use crate::machine;
use crate::name_file;
use crate::queue::{OrderState, QueueCounts, QueueHandle, QueueSetup};
use crate::shape::DeviceShape;

/// How long the kernel may take to notice that a server was killed. It finds a queue whose requests
/// were all in flight by their timeout, after 30 s.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a process may take to end after it was killed.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the number of a deleted device may stay in use by a program that has it open.
const FREE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long `resume` waits for the threads to open the disk, before it tells the kernel its size.
const RESUME_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the answers of the threads are looked for.
const ANSWER_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// How often the state of a device is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// How a disk is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UblkOptions {
    /// The number of the block device; `None` lets the kernel choose one.
    pub id: Option<u32>,
    /// A text that is equal for two servers only if their disks have the same data.
    pub identity: String,
    /// Whether the disk has its data after this process was killed, so that another one can go on.
    pub keeps_data: bool,
}

/// A server as listings show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UblkInfo {
    /// The number of the block device.
    pub id: u32,
    /// The queues that are served.
    pub queues: usize,
    /// Whether the block device was made by an earlier server.
    pub is_recovered: bool,
    /// Whether requests fail because a queue has no disk, or the kernel knows another capacity than
    /// the disk has.
    pub is_outdated: bool,
    /// Requests that were completed.
    pub requests: u64,
    /// Requests that were completed with an error.
    pub errors: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
}

/// A running server. Dropping it stops it.
pub struct UblkServer {
    name: String,
    id: u32,
    is_recovered: bool,
    counts: Vec<Arc<QueueCounts>>,
    channels: Arc<ChannelGroup>,
    disk: Mutex<DiskState>,
    /// Empty once stopped.
    running: Mutex<Vec<QueueHandle>>,
    /// Whether the block device is removed. Held by a thread that removes it.
    is_gone: Mutex<bool>,
}

/// The disk of a server.
struct DiskState {
    /// `None` while it is being replaced.
    disk: Option<Arc<dyn Disk>>,
    /// The shape of the disk, or of the one before.
    shape: Arc<DeviceShape>,
    /// The capacity that the kernel knows, in sectors.
    kernel_sectors: u64,
}

impl UblkServer {
    /// Makes a block device of a disk, or goes on with the one that a killed server of the same
    /// disk has left.
    ///
    /// # Errors
    /// If the kernel has no ublk driver or refuses, the driver cannot have the disk, or the number
    /// is in use.
    pub fn start(disk: SharedDisk, options: &UblkOptions) -> Result<UblkServer, UblkError> {
        let SharedDisk { disk, claim, .. } = disk;
        let shape = Arc::new(DeviceShape::of(disk.as_ref())?);
        if claim.is_claimed() {
            return Err(UblkError::Claimed);
        }
        let mut control = Control::open()?;
        let features = shape.features(options.keeps_data);
        control.check_features(features & !feature::CMD_IOCTL_ENCODE)?;
        let identity = name_file::identity_of(&options.identity);
        let left = match options.id {
            Some(id) => find_left(&mut control, id, identity, disk.name())?,
            None => {
                // The kernel may not have noticed yet that the server was killed.
                let is_left = |it: &DevInfo| match it.state {
                    DeviceState::Quiesced | DeviceState::FailIo => true,
                    DeviceState::Live => !machine::is_alive(it.pid),
                    DeviceState::Dead | DeviceState::Unknown(_) => false,
                };
                let found =
                    machine::find(&mut control, |it| it.identity == identity && is_left(it))?;
                match found {
                    Some(info) => find_left(&mut control, info.id, identity, disk.name())?,
                    None => None,
                }
            }
        };
        let starting = Starting { disk, shape, identity };
        match left {
            Some(info) => starting.recover(control, &info),
            None => starting.create(control, options.id, features),
        }
    }

    /// Checks what [`UblkServer::start`] needs and can be checked before: the shape of a disk, the
    /// features of the kernel's driver, and that no other server has the number.
    ///
    /// # Errors
    /// As [`UblkServer::start`].
    pub fn check(disk: &dyn Disk, options: &UblkOptions) -> Result<(), UblkError> {
        let features = DeviceShape::of(disk)?.features(options.keeps_data);
        let mut control = Control::open()?;
        control.check_features(features & !feature::CMD_IOCTL_ENCODE)?;
        let Some(id) = options.id else { return Ok(()) };
        let identity = name_file::identity_of(&options.identity);
        match control.info(id)? {
            Some(info) if info.identity != identity => Err(foreign(&info, disk.name())),
            _ => Ok(()),
        }
    }

    /// The state of the server.
    pub fn info(&self) -> UblkInfo {
        // Before the queues are locked below.
        let is_outdated = self.is_outdated();
        let sum = |counter: fn(&QueueCounts) -> u64| self.counts.iter().map(|it| counter(it)).sum();
        UblkInfo {
            id: self.id,
            queues: self.running().iter().filter(|queue| queue.is_serving()).count(),
            is_recovered: self.is_recovered,
            is_outdated,
            requests: sum(|counts| counts.requests.get()),
            errors: sum(|counts| counts.errors.get()),
            read_bytes: sum(|counts| counts.read_bytes.get()),
            written_bytes: sum(|counts| counts.written_bytes.get()),
        }
    }

    /// The counters of the channels of all queues.
    pub fn channel_stats(&self) -> Stats {
        self.channels.sum()
    }

    /// Whether the block device is mounted, or used exclusively by another part of the kernel.
    pub fn is_in_use(&self) -> bool {
        is_in_use(self.id)
    }

    /// Checks that the block device can become larger while it is used.
    ///
    /// # Errors
    /// If the kernel's driver cannot change the size of a block device, or refuses.
    pub fn check_growth(&self) -> Result<(), UblkError> {
        Control::open()?.check_features(feature::UPDATE_SIZE)
    }

    /// Releases the disk, to replace it by another one while the block device is used: the requests
    /// that were begun are completed, and later ones wait. `false` if the disk executes requests
    /// for longer than `drain`, the time for all queues together; then it is served as before, and
    /// a thread that is within a call of the device goes on when the call returns. A queue that had
    /// released the disk and cannot open it again fails its requests; then the server is outdated.
    pub fn suspend(&self, drain: Duration) -> bool {
        let deadline = Instant::now() + drain;
        // `None` after a `resume` that failed: requests fail, and will wait.
        let disk = self.disk().disk.take();
        self.running().iter_mut().for_each(QueueHandle::begin_release);
        if self.collect(deadline).is_some() {
            return true;
        }
        match disk {
            Some(disk) => self.begin_serve(disk),
            None => self.fail(),
        }
        false
    }

    /// Serves another disk, and tells the kernel if its capacity is not the one that the kernel
    /// knows. If anything else is different, or the capacity smaller, the requests of the block
    /// device fail from now on.
    ///
    /// # Errors
    /// If the disk has another shape or a queue cannot open it: then requests fail. If the kernel
    /// does not change the size of the block device, which is served as it was. After each of these
    /// a later `suspend` and `resume` try again.
    pub fn resume(&self, disk: &SharedDisk) -> Result<(), UblkError> {
        let id = self.id;
        let before = Arc::clone(&self.disk().shape);
        let shape = match DeviceShape::of(disk.disk.as_ref()) {
            Ok(shape) if shape.succeeds(&before) => Arc::new(shape),
            _ => {
                self.fail();
                return Err(UblkError::Changed { id, what: "shape" });
            }
        };
        // Before the kernel sends requests for what is new.
        self.disk().shape = shape;
        self.begin_serve(Arc::clone(&disk.disk));
        // A queue that has not answered in time serves the disk when its thread obeys.
        if let Some(outcome) = self.collect(Instant::now() + RESUME_TIMEOUT) {
            outcome.map_err(|source| {
                // Queues that serve go on; the others fail, and the server is outdated.
                self.disk().disk = None;
                UblkError::Queue { id, source }
            })?;
        }
        self.update_size()
    }

    /// Fails the requests that wait for a disk, and later ones.
    pub fn fail(&self) {
        self.running().iter().for_each(QueueHandle::fail_waiting);
    }

    /// Whether the kernel knows another capacity than the disk has, because it did not take it, or
    /// there is no disk, or a queue could not open it: a `suspend` and a `resume` try again. The
    /// disk is being replaced while this is true between the two.
    pub fn is_outdated(&self) -> bool {
        // Also of a queue that answers after `suspend` or `resume` has ceased to wait for it.
        let is_failing = self.running().iter_mut().any(QueueHandle::is_failing);
        let disk = self.disk();
        is_failing || disk.disk.is_none() || disk.shape.params.sectors != disk.kernel_sectors
    }

    /// Tells the kernel the capacity of the disk, if it does not know it.
    fn update_size(&self) -> Result<(), UblkError> {
        let (id, device) = (self.id, &self.name);
        let (sectors, known) = {
            let disk = self.disk();
            (disk.shape.params.sectors, disk.kernel_sectors)
        };
        if sectors == known {
            return Ok(());
        }
        let mut control = Control::open()?;
        // Linux 6.16 and later without commit 25966fc09769 dereference a null pointer if the device
        // was stopped.
        let is_ours = |it: &DevInfo| {
            it.state == DeviceState::Live && u32::try_from(it.pid) == Ok(std::process::id())
        };
        let is_live = control.info(id)?.is_some_and(|info| is_ours(&info));
        if !is_live || !self.running().iter().all(QueueHandle::is_serving) {
            return Err(UblkError::Stopped { id });
        }
        control.update_size(id, sectors)?;
        self.disk().kernel_sectors = sectors;
        tracing::info!(device, sectors, "the block device has another size");
        Ok(())
    }

    /// Lets all threads serve a disk of the present shape. Does not wait for them.
    fn begin_serve(&self, disk: Arc<dyn Disk>) {
        let shape = Arc::clone(&self.disk().shape);
        self.running().iter_mut().for_each(|queue| queue.begin_serve(&disk, &shape));
        self.disk().disk = Some(disk);
    }

    /// Waits until all threads have obeyed their last order or have ended, and returns the first
    /// error. `None` if one has not at the deadline. Does not hold the queues while it waits.
    fn collect(&self, deadline: Instant) -> Option<io::Result<()>> {
        let mut waits = vec![true; self.counts.len()];
        let mut outcome = Ok(());
        loop {
            // A server that is stopped meanwhile has no queues.
            for (queue, waits) in self.running().iter_mut().zip(&mut waits) {
                if !*waits {
                    continue;
                }
                match queue.answer() {
                    OrderState::Pending => {}
                    OrderState::Done | OrderState::Ended => *waits = false,
                    OrderState::Failed(error) => {
                        *waits = false;
                        outcome = outcome.and(Err(error));
                    }
                }
            }
            let count = self.running().len();
            if !waits.iter().take(count).any(|waits| *waits) {
                return Some(outcome);
            }
            if Instant::now() >= deadline {
                return None;
            }
            thread::sleep(ANSWER_POLL_INTERVAL);
        }
    }

    fn disk(&self) -> MutexGuard<'_, DiskState> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> MutexGuard<'_, Vec<QueueHandle>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Completes the requests in flight, and removes the block device. A program that has it open
    /// gets errors from then on. A call after one that succeeded does nothing.
    ///
    /// # Errors
    /// If the kernel refuses. If it has not stopped the device, the device is served as before; a
    /// later call tries again.
    pub fn stop(&self) -> Result<(), UblkError> {
        self.stop_by(|take| delete(self.id, take))
    }

    /// As [`UblkServer::stop`], by an operation that removes the block device, and takes the queues
    /// when the kernel has stopped it.
    fn stop_by(
        &self,
        delete: impl FnOnce(&dyn Fn() -> Vec<QueueHandle>) -> Result<(), UblkError>,
    ) -> Result<(), UblkError> {
        let mut is_gone = self.is_gone.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_gone {
            return Ok(());
        }
        // The kernel waits for requests that wait for a disk, also when the device is opened.
        self.running().iter().for_each(QueueHandle::fail_waiting);
        if is_in_use(self.id) {
            let path = block_path(self.id);
            tracing::warn!(device = self.name, path, "removed while it is mounted or in use");
        }
        delete(&|| std::mem::take(&mut *self.running()))?;
        *is_gone = true;
        Ok(())
    }
}

impl Drop for UblkServer {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            tracing::error!(device = self.name, "{error}");
        }
    }
}

impl fmt::Debug for UblkServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UblkServer").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The device of a number, if a killed server of the same disk has left it for another one. One
/// that the kernel has stopped is deleted.
fn find_left(
    control: &mut Control,
    id: u32,
    identity: u64,
    name: &str,
) -> Result<Option<DevInfo>, UblkError> {
    let begin = Instant::now();
    loop {
        let Some(info) = control.info(id)? else { return Ok(None) };
        let is_alive = machine::is_alive(info.pid);
        match info.state {
            _ if info.identity != identity => return Err(foreign(&info, name)),
            DeviceState::Quiesced | DeviceState::FailIo => return Ok(Some(info)),
            DeviceState::Dead => {
                // A server that is about to start the device has it open.
                CharDevice::open(id).map_err(|source| UblkError::Queue { id, source })?;
                machine::delete(control, id)?;
                return match wait_free(control, id)? {
                    true => Ok(None),
                    false => Err(UblkError::StillOpen { id }),
                };
            }
            // The kernel is noticing that the server was killed, or the server is ending.
            DeviceState::Live | DeviceState::Unknown(_) => {
                let timeout = if is_alive { END_TIMEOUT } else { NOTICE_TIMEOUT };
                if begin.elapsed() > timeout {
                    return Err(UblkError::Served { id, pid: info.pid });
                }
                thread::sleep(LOOK_INTERVAL);
            }
        }
    }
}

/// Why a device of this name cannot have the number of a ublk device of another identity.
fn foreign(info: &DevInfo, name: &str) -> UblkError {
    let DevInfo { id, state, pid, identity, .. } = *info;
    if state == DeviceState::Live && machine::is_alive(pid) {
        return UblkError::Served { id, pid };
    }
    match name_file::read(id, identity).filter(|left| left == name) {
        Some(name) => UblkError::Replaced { id, name },
        None => UblkError::Foreign { id, state: state.name() },
    }
}

/// A server that is being started.
struct Starting {
    disk: Arc<dyn Disk>,
    shape: Arc<DeviceShape>,
    identity: u64,
}

impl Starting {
    /// Makes a block device.
    fn create(
        self,
        mut control: Control,
        id: Option<u32>,
        features: u64,
    ) -> Result<UblkServer, UblkError> {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let info = control.add(&DevInfo {
            queues: self.shape.queues(processors),
            depth: self.shape.depth(),
            state: DeviceState::Dead,
            io_bytes_max: self.shape.io_bytes_max,
            id: id.unwrap_or(u32::MAX),
            pid: -1,
            features,
            identity: self.identity,
        })?;
        name_file::write(info.id, self.identity, self.disk.name());
        let set = control.set_params(info.id, &self.shape.params);
        let queues = set.and_then(|()| self.prepare(&info));
        match queues {
            Ok(queues) => self.serve(control, &info, queues, ControlCommand::StartDev),
            Err(error) => {
                // The reason why there is nothing to serve says more.
                let _ = machine::delete(&mut control, info.id);
                name_file::remove(info.id);
                Err(error)
            }
        }
    }

    /// Goes on with a block device.
    fn recover(self, mut control: Control, info: &DevInfo) -> Result<UblkServer, UblkError> {
        let id = info.id;
        let params = control.params(id)?;
        // The server was killed after it had made the disk larger, and before the kernel knew.
        let grown = Params { sectors: self.shape.params.sectors, ..params };
        let has_grown = self.shape.zones.is_none() && grown.sectors > params.sectors;
        if let Some(what) = self.shape.params.difference(if has_grown { &grown } else { &params }) {
            return Err(UblkError::Changed { id, what });
        }
        if has_grown {
            control.check_features(feature::UPDATE_SIZE)?;
        }
        if info.io_bytes_max > self.shape.io_bytes_max {
            return Err(UblkError::Changed { id, what: "longest request" });
        }
        let queues = self.prepare(info)?;
        begin_recovery(&mut control, id)?;
        let server = self.serve(control, info, queues, ControlCommand::EndUserRecovery)?;
        server.disk().kernel_sectors = params.sectors;
        if let Err(error) = server.update_size() {
            // Programs go on with the capacity that they know.
            tracing::error!(device = server.name, "{error}");
        }
        Ok(server)
    }

    /// Starts the threads of all queues.
    fn prepare(&self, info: &DevInfo) -> Result<Queues, UblkError> {
        let mut queues = Queues::default();
        for queue in 0..info.queues {
            let counts = Arc::new(QueueCounts::default());
            let setup = QueueSetup {
                disk: Arc::clone(&self.disk),
                shape: Arc::clone(&self.shape),
                queue,
                depth: info.depth,
                counts: Arc::clone(&counts),
                channels: Arc::clone(&queues.channels),
                has_failed: Arc::clone(&queues.has_failed),
            };
            let handle = QueueHandle::prepare(setup);
            let refused = |source| UblkError::Queue { id: info.id, source };
            queues.handles.push(handle.map_err(refused)?);
            queues.counts.push(counts);
        }
        Ok(queues)
    }

    /// Lets the threads fetch, and the block device appear or go on. If that fails, a device that
    /// was recovered stays for another server.
    fn serve(
        self,
        mut control: Control,
        info: &DevInfo,
        mut queues: Queues,
        command: ControlCommand,
    ) -> Result<UblkServer, UblkError> {
        let id = info.id;
        let is_recovered = command == ControlCommand::EndUserRecovery;
        let opened = CharDevice::open(id).map_err(|source| UblkError::Queue { id, source });
        let started = opened.and_then(|device| {
            let device = Arc::new(device);
            queues.handles.iter_mut().for_each(|queue| queue.serve(Arc::clone(&device)));
            drop(device);
            let has_failed = Arc::clone(&queues.has_failed);
            // Acquire: pairs with the Release of a thread that cannot fetch.
            control.command_unless(command, id, std::process::id(), move || {
                has_failed.load(Ordering::Acquire)
            })
        });
        // It may still be busy with a command that was given up.
        drop(control);
        if let Err(error) = started {
            if !is_recovered && let Err(error) = delete(id, || queues.handles) {
                tracing::error!(device = self.disk.name(), "{error}");
            }
            return Err(error);
        }
        let path = block_path(id);
        tracing::info!(device = self.disk.name(), path, is_recovered, "serving ublk");
        let Queues { handles, counts, channels, .. } = queues;
        let name = self.disk.name().to_owned();
        let running = Mutex::new(handles);
        let kernel_sectors = self.shape.params.sectors;
        let state = DiskState { disk: Some(self.disk), shape: self.shape, kernel_sectors };
        let disk = Mutex::new(state);
        let is_gone = Mutex::new(false);
        Ok(UblkServer { name, id, is_recovered, counts, channels, disk, running, is_gone })
    }
}

/// The queues of a device that is being started.
#[derive(Default)]
struct Queues {
    handles: Vec<QueueHandle>,
    counts: Vec<Arc<QueueCounts>>,
    channels: Arc<ChannelGroup>,
    has_failed: Arc<AtomicBool>,
}

/// Begins a recovery, once the kernel has closed what the killed server had open.
fn begin_recovery(control: &mut Control, id: u32) -> Result<(), UblkError> {
    let begin = Instant::now();
    loop {
        match control.command(ControlCommand::StartUserRecovery, id, 0) {
            Err(UblkError::Command { source, .. })
                if source.kind() == ErrorKind::ResourceBusy && begin.elapsed() < NOTICE_TIMEOUT =>
            {
                thread::sleep(LOOK_INTERVAL);
            }
            result => return result,
        }
    }
}

/// Stops a device, waits for its threads, which it takes only then, and deletes it.
fn delete(id: u32, take: impl FnOnce() -> Vec<QueueHandle>) -> Result<(), UblkError> {
    let mut control = Control::open()?;
    // It waits for the requests in flight, which the threads complete, and cancels all fetches.
    let stopped = control.command(ControlCommand::StopDev, id, 0);
    match &stopped {
        Ok(()) => {}
        // Another process has deleted it.
        Err(UblkError::Command { source, .. }) if source.raw_os_error() == Some(libc::ENODEV) => {}
        Err(_) => return stopped,
    }
    take().into_iter().for_each(QueueHandle::join);
    machine::delete(&mut control, id)?;
    name_file::remove(id);
    if !wait_free(&mut control, id)? {
        let path = block_path(id);
        tracing::warn!(path, "its number is free once all programs have closed it");
    }
    Ok(())
}

/// Waits until the number of a deleted device is free, and returns whether it is. A program that
/// has the block device open keeps the number.
fn wait_free(control: &mut Control, id: u32) -> Result<bool, UblkError> {
    let begin = Instant::now();
    while control.info(id)?.is_some() {
        if begin.elapsed() > FREE_TIMEOUT {
            return Ok(false);
        }
        thread::sleep(LOOK_INTERVAL);
    }
    Ok(true)
}

/// Whether a block device is mounted, or used exclusively by another part of the kernel.
fn is_in_use(id: u32) -> bool {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(block_path(id));
    opened.is_err_and(|error: io::Error| error.kind() == ErrorKind::ResourceBusy)
}

#[cfg(test)]
mod tests {
    use blockyard_core::Composed;
    use blockyard_core::channel::ChannelConfig;
    use blockyard_core::{Geometry, Limits};
    use blockyard_null::{Null, NullConfig};

    use super::*;

    fn shape() -> DeviceShape {
        let (logical_block_bytes, physical_block_bytes, zones) = (512, 512, None);
        let geometry = Geometry { sectors: 8, logical_block_bytes, physical_block_bytes, zones };
        DeviceShape::new(&geometry, &Limits::unlimited(16)).unwrap()
    }

    fn server(queues: Vec<QueueHandle>, disk: Option<Arc<dyn Disk>>) -> UblkServer {
        UblkServer {
            name: "v0".to_owned(),
            id: u32::MAX,
            is_recovered: false,
            counts: queues.iter().map(|_| Arc::default()).collect(),
            channels: Arc::default(),
            disk: Mutex::new(DiskState { disk, shape: Arc::new(shape()), kernel_sectors: 8 }),
            running: Mutex::new(queues),
            is_gone: Mutex::new(false),
        }
    }

    fn disk() -> Arc<dyn Disk> {
        let null = Null::open(NullConfig { size: 4096, ..NullConfig::default() }).unwrap();
        Arc::new(Composed::new("v0".to_owned(), "null", null, ChannelConfig { depth: 16 }))
    }

    /// The bug: a `suspend` that gave up did not look whether the queues could open the disk again:
    /// one that could not failed its requests, and the server was listed as healthy.
    #[test]
    fn a_queue_that_cannot_open_the_disk_again_makes_the_server_outdated() {
        use std::sync::mpsc::channel;
        let (names, orders) = channel();
        let ((free, is_free), (stuck, is_stuck)) = (channel(), channel());
        drop(free);
        let failing = QueueHandle::of_fake(is_free, false, names.clone());
        let queues = vec![failing, QueueHandle::of_fake(is_stuck, true, names)];
        let server = server(queues, Some(disk()));
        assert!(!server.suspend(Duration::from_millis(20)));
        while !server.info().is_outdated {
            thread::yield_now();
        }
        assert!(server.disk().disk.is_some() && server.is_outdated(), "it stays so");
        // The next `suspend` takes the disk away from all queues.
        drop(stuck);
        assert!(server.suspend(Duration::from_secs(3600)));
        // The threads end with their queues.
        server.running().clear();
        assert_eq!(orders.iter().filter(|name| *name == "release").count(), 4);
        *server.is_gone.lock().unwrap() = true;
    }

    /// The bug: `suspend` waited for the thread without a limit after its time was over, and kept
    /// listings of all servers waiting. The thread of the second queue is within a call of the
    /// device that does not return before the end of the test.
    #[test]
    fn suspend_ends_while_a_device_does_not_return() {
        use std::sync::mpsc::channel;
        let (names, orders) = channel();
        let ((free, is_free), (stuck, is_stuck)) = (channel(), channel());
        drop(free);
        let queues = [is_free, is_stuck].map(|it| QueueHandle::of_fake(it, true, names.clone()));
        drop(names);
        let server = server(queues.into(), Some(disk()));
        // Twice: an answer to the first release must not be taken for one to the second.
        for _ in 0..2 {
            assert!(!server.suspend(Duration::from_millis(20)));
            assert!(server.disk().disk.is_some(), "the disk is served again");
            assert_eq!(server.info().queues, 2);
        }
        let free: Vec<_> = orders.iter().take(4).collect();
        assert_eq!(free, ["release", "serve", "release", "serve"]);
        // The call returns: the thread takes the old orders first.
        drop(stuck);
        assert!(server.suspend(Duration::from_secs(3600)));
        assert!(server.disk().disk.is_none() && server.is_outdated());
        // Without a disk a suspend succeeds too: the requests wait for the next one.
        assert!(server.suspend(Duration::from_secs(3600)));
        server
            .stop_by(|take| {
                drop(take());
                Ok(())
            })
            .unwrap();
        let orders: Vec<_> = orders.iter().collect();
        assert_eq!(orders.len(), 4 + 2 * 2 + 2, "{orders:?}");
        assert_eq!(orders.iter().filter(|name| **name == "fail").count(), 2);
    }

    /// The bug: the queues were given up before the kernel had stopped the device, and a failure
    /// was only logged.
    #[test]
    fn a_device_that_the_kernel_does_not_stop_is_served_as_before() {
        let server = server(vec![QueueHandle::of_thread(thread::spawn(|| {}))], None);
        let refused = || UblkError::Unknown { id: u32::MAX };
        assert!(server.stop_by(|_| Err(refused())).is_err());
        assert_eq!(server.running().len(), 1, "its queues are still there");
        // One that was stopped and not deleted is tried again.
        let stop = |take: &dyn Fn() -> Vec<QueueHandle>| {
            take().into_iter().for_each(QueueHandle::join);
            Err(refused())
        };
        assert!(server.stop_by(stop).is_err() && server.running().is_empty());
        let mut calls = 0;
        for _ in 0..2 {
            let delete = |_: &dyn Fn() -> Vec<QueueHandle>| {
                calls += 1;
                Ok(())
            };
            server.stop_by(delete).unwrap();
        }
        assert_eq!(calls, 1);
    }
}
