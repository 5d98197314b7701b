//! The vhost-user servers of a yard: devices that hypervisors use, each at its own unix socket.
//!
//! ```text
//! SERVED ── suspend: the device is replaced ──▸ SUSPENDED ── resume ──▸ SERVED
//!    └── remove: as asked, or with the device ──▸ gone ◂── dropped ──┘
//!
//! all ── pause: an upgrade ──▸ PAUSED ── resume: it has failed ──▸ all SERVED
//!                                └── leave: another process serves ──▸ gone, the files stay
//! ```
#![allow(clippy::disallowed_types)] // The table of servers is control plane.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use blockyard_core::channel::Stats;
use blockyard_core::rmw::SharedDisk;
use blockyard_nbd::{Endpoint, ListenError, UnixPlace, listen_unix};
use blockyard_vhost::{VhostInfo, VhostServer};

use crate::error::YardError;

/// How long threads without a disk may take to end when another process serves.
const LEAVE_DRAIN: Duration = Duration::from_secs(2);

/// A device, and the socket at which hypervisors find it: `DEVICE=unix:PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostPlace {
    /// The name of the device.
    pub device: String,
    /// The socket.
    pub place: UnixPlace,
}

impl VhostPlace {
    /// Reads the place of a device.
    ///
    /// # Errors
    /// What is expected.
    pub fn of(device: &str, place: &str) -> Result<VhostPlace, String> {
        match place.parse() {
            Ok(Endpoint::Unix(place)) => Ok(VhostPlace { device: device.to_owned(), place }),
            Ok(Endpoint::Tcp { .. } | Endpoint::Stdio) => Err("expected unix:PATH".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Reads a device and its place, `DEVICE=unix:PATH`.
    ///
    /// # Errors
    /// What is expected.
    pub fn parse(text: &str) -> Result<VhostPlace, String> {
        let (device, place) = text.split_once('=').ok_or("expected DEVICE=unix:PATH")?;
        VhostPlace::of(device, place)
    }
}

impl fmt::Display for VhostPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}=unix:{}", self.device, self.place)
    }
}

/// The file of a socket, removed when it is dropped.
#[derive(Debug)]
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // It may be gone already; then there is nothing to do.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A socket that listens, for a device that is not served there yet.
#[derive(Debug)]
pub(crate) struct BoundVhost {
    place: VhostPlace,
    listener: UnixListener,
    /// `None` while the file is that of an earlier process.
    file: Option<SocketFile>,
}

impl BoundVhost {
    /// Listens at a place.
    ///
    /// # Errors
    /// If the place is in use, or the system refuses.
    pub(crate) fn bind(place: &VhostPlace) -> Result<BoundVhost, ListenError> {
        let listener = listen_unix(&place.place)?;
        let file = Some(SocketFile(place.place.path.clone()));
        Ok(BoundVhost { place: place.clone(), listener, file })
    }

    /// The socket of an earlier process. A server for it accepts no hypervisor, and does not remove
    /// the file, until [`VhostServers::proceed`].
    pub(crate) fn inherit(place: VhostPlace, socket: OwnedFd) -> BoundVhost {
        BoundVhost { place, listener: socket.into(), file: None }
    }

    /// Whether it is the socket of an earlier process.
    pub(crate) fn is_inherited(&self) -> bool {
        self.file.is_none()
    }

    /// The name of the device.
    pub(crate) fn device(&self) -> &str {
        &self.place.device
    }
}

/// The server of a device.
#[derive(Debug)]
struct DeviceServer {
    place: VhostPlace,
    server: VhostServer,
    /// `None` while the file is that of an earlier process.
    file: Option<SocketFile>,
}

impl DeviceServer {
    /// Takes the disk away from the server, which accepts no more hypervisors, and returns the
    /// socket.
    ///
    /// # Errors
    /// If the disk executes requests for longer than `drain`, or the system refuses a descriptor.
    /// Then it is served as before.
    fn pause(&self, drain: Duration) -> Result<OwnedFd, YardError> {
        let VhostPlace { device, place } = &self.place;
        let refused = |source| YardError::Listen { place: format!("unix:{place}"), source };
        let socket = self.server.socket().map_err(refused)?;
        match self.server.suspend(drain) {
            true => Ok(socket),
            false => Err(YardError::VhostBusy { name: device.clone() }),
        }
    }
}

#[derive(Debug, Default)]
struct VhostTable {
    servers: Vec<DeviceServer>,
    /// Stopped servers, by the names of their devices, whose threads wait for their disks. Until
    /// they have ended, no other server may serve the guests of the device.
    stopping: Vec<(String, VhostServer)>,
}

/// The servers of a yard.
#[derive(Debug, Default)]
pub struct VhostServers {
    table: Mutex<VhostTable>,
    /// The percentage of the time in which the thread of a ring may poll, once it is set.
    poll_percent: OnceLock<u32>,
}

impl VhostServers {
    /// Sets the percentage of the time in which the thread of each ring may look for work instead
    /// of sleeping, once; until then it is 0.
    pub fn set_poll_percent(&self, percent: u32) {
        // The daemon calls this once, so the cell is empty.
        let _ = self.poll_percent.set(percent);
    }

    fn table(&self) -> MutexGuard<'_, VhostTable> {
        // Every change of the table is one call: a holder that panicked has left it consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a device at a socket that listens.
    ///
    /// # Errors
    /// If the device is served already, a stopped server of it has requests in flight, or the
    /// system refuses.
    pub(crate) fn start(&self, disk: SharedDisk, bound: BoundVhost) -> Result<(), YardError> {
        let BoundVhost { place, listener, file } = bound;
        let mut table = self.table();
        table.stopping.retain(|(_, server)| !server.has_ended());
        if table.stopping.iter().any(|(device, _)| *device == place.device) {
            return Err(YardError::VhostBusy { name: place.device });
        }
        if let Some(other) = table.servers.iter().find(|it| it.place.device == place.device) {
            let (name, at) = (place.device, format!("unix:{}", other.place.place));
            return Err(YardError::VhostServed { name, at });
        }
        let path = place.place.path.display().to_string();
        let refused = |source| YardError::Listen { place: format!("unix:{path}"), source };
        let poll_percent = self.poll_percent.get().copied().unwrap_or(0);
        let holds = file.is_none();
        let server = VhostServer::start(disk, listener, poll_percent, holds).map_err(refused)?;
        tracing::info!(device = place.device, path, "serving vhost-user-blk");
        table.servers.push(DeviceServer { place, server, file });
        Ok(())
    }

    /// The socket of a device, and the state of its server.
    pub fn find(&self, device: &str) -> Option<(VhostPlace, VhostInfo)> {
        let table = self.table();
        let found = table.servers.iter().find(|it| it.place.device == device);
        found.map(|it| (it.place.clone(), it.server.info()))
    }

    /// All sockets.
    pub fn list(&self) -> Vec<(VhostPlace, VhostInfo)> {
        self.table().servers.iter().map(|it| (it.place.clone(), it.server.info())).collect()
    }

    /// The counters of the channels of a device's hypervisor, by the number of its connection;
    /// `None` if it has ended.
    pub(crate) fn channel_stats(&self, device: &str, connection: u64) -> Option<Stats> {
        let table = self.table();
        table.servers.iter().find(|it| it.place.device == device)?.server.channel_stats(connection)
    }

    fn take(&self, device: &str) -> Option<DeviceServer> {
        let mut table = self.table();
        let at = table.servers.iter().position(|it| it.place.device == device)?;
        Some(table.servers.remove(at))
    }

    /// Takes the disk away from the server of a device that is being replaced. Its hypervisor stays
    /// connected, and its requests wait. `None` if the device has no server.
    ///
    /// # Errors
    /// If the disk executes requests for longer than `drain`. Then it is served as before.
    pub(crate) fn suspend(
        &self,
        device: &str,
        drain: Duration,
    ) -> Result<Option<SuspendedVhost>, YardError> {
        let Some(server) = self.take(device) else { return Ok(None) };
        if server.server.suspend(drain) {
            return Ok(Some(SuspendedVhost(server)));
        }
        self.table().servers.push(server);
        Err(YardError::VhostBusy { name: device.to_owned() })
    }

    /// Serves a device that was replaced.
    pub(crate) fn resume(&self, suspended: SuspendedVhost, disk: SharedDisk) {
        let SuspendedVhost(server) = suspended;
        server.server.resume(disk);
        self.table().servers.push(server);
    }

    /// Stops the server of a device and removes its socket; `None` if it has none. The hypervisor's
    /// requests in flight are completed, if that takes no longer than `drain`.
    pub(crate) fn remove(&self, device: &str, drain: Duration) -> Option<VhostPlace> {
        let DeviceServer { place, server, file } = self.take(device)?;
        // No hypervisor finds it any more.
        drop(file);
        if !server.stop(drain) {
            self.table().stopping.push((place.device.clone(), server));
        }
        Some(place)
    }

    /// The devices whose stopped servers still execute requests of a hypervisor.
    pub(crate) fn stopping(&self) -> Vec<String> {
        let mut table = self.table();
        table.stopping.retain(|(_, server)| !server.has_ended());
        table.stopping.iter().map(|(device, _)| device.clone()).collect()
    }

    /// Accepts no more hypervisors, and takes the disks away from all servers. The hypervisors stay
    /// connected, and their requests wait.
    ///
    /// # Errors
    /// If a disk executes requests for longer than `drain`, or the system refuses a descriptor.
    /// Then all are served as before, with the disks of `disk_of`.
    pub(crate) fn pause(
        &self,
        drain: Duration,
        disk_of: impl Fn(&str) -> Option<SharedDisk>,
    ) -> Result<PausedVhost, YardError> {
        let since = Instant::now();
        let mut waiting = std::mem::take(&mut self.table().servers);
        waiting.iter().for_each(|it| it.server.hold());
        // All before any is waited for: they share the time.
        waiting.iter().for_each(|it| it.server.begin_suspend());
        let mut paused = PausedVhost { servers: Vec::new(), since };
        while let Some(server) = waiting.pop() {
            match server.pause((since + drain).saturating_duration_since(Instant::now())) {
                Ok(socket) => paused.servers.push((server, socket)),
                Err(error) => {
                    // Those without a disk first: all their requests wait.
                    self.resume_all(paused, disk_of);
                    waiting.push(server);
                    for it in &waiting {
                        it.server.cancel_suspend();
                        it.server.proceed();
                    }
                    // In their order, which `resume_all` has kept for those after them.
                    self.table().servers.splice(0..0, waiting);
                    return Err(error);
                }
            }
        }
        Ok(paused)
    }

    /// Serves all devices again after a pause. The server of a device without a disk is removed.
    pub(crate) fn resume_all(
        &self,
        paused: PausedVhost,
        disk_of: impl Fn(&str) -> Option<SharedDisk>,
    ) {
        for (server, _) in paused.servers.into_iter().rev() {
            let Some(disk) = disk_of(&server.place.device) else { continue };
            server.server.resume(disk);
            server.server.proceed();
            self.table().servers.push(server);
        }
    }

    /// Accepts hypervisors at the sockets of an earlier process, which has left their files to this
    /// one.
    pub(crate) fn proceed(&self) {
        for it in &mut self.table().servers {
            it.file.get_or_insert_with(|| SocketFile(it.place.place.path.clone()));
            it.server.proceed();
        }
    }
}

/// All servers, without their disks.
#[derive(Debug)]
pub(crate) struct PausedVhost {
    /// In reverse order, each with its socket.
    servers: Vec<(DeviceServer, OwnedFd)>,
    since: Instant,
}

impl PausedVhost {
    /// The places of the servers, and their sockets.
    pub(crate) fn listeners(&self) -> impl Iterator<Item = (&VhostPlace, BorrowedFd<'_>)> {
        self.servers.iter().rev().map(|(it, socket)| (&it.place, socket.as_fd()))
    }

    /// The time from which on no request was taken; `None` without servers.
    pub(crate) fn since(&self) -> Option<Instant> {
        (!self.servers.is_empty()).then_some(self.since)
    }

    /// Disconnects all hypervisors, without waiting for their threads.
    pub(crate) fn disconnect(&self) {
        self.servers.iter().for_each(|(it, _)| it.server.begin_stop());
    }

    /// Waits for the threads of the hypervisors, and leaves the files of the sockets to the process
    /// that serves them now.
    pub(crate) fn leave(self) {
        self.disconnect();
        let deadline = Instant::now() + LEAVE_DRAIN;
        for (DeviceServer { file, server, .. }, _) in self.servers {
            // Dropping it would remove the file.
            std::mem::forget(file);
            // A thread that has not ended ends with the process.
            server.stop(deadline.saturating_duration_since(Instant::now()));
        }
    }
}

/// A server without a disk. Dropping it stops the server and removes its socket.
#[derive(Debug)]
pub(crate) struct SuspendedVhost(DeviceServer);
