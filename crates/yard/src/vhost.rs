//! The vhost-user servers of a yard: devices that hypervisors use, each at its own unix socket.
//!
//! ```text
//! SERVED ── suspend: the device is replaced ──▸ SUSPENDED ── resume ──▸ SERVED
//!    └── remove: as asked, or with the device ──▸ gone ◂── dropped ──┘
//! ```
#![allow(clippy::disallowed_types)] // The table of servers is control plane.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use blockyard_core::channel::Stats;
use blockyard_core::rmw::SharedDisk;
use blockyard_nbd::{Endpoint, ListenError, UnixPlace, listen_unix};
use blockyard_vhost::{VhostInfo, VhostServer};

use crate::error::YardError;

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
    file: SocketFile,
}

impl BoundVhost {
    /// Listens at a place.
    ///
    /// # Errors
    /// If the place is in use, or the system refuses.
    pub(crate) fn bind(place: &VhostPlace) -> Result<BoundVhost, ListenError> {
        let listener = listen_unix(&place.place)?;
        let file = SocketFile(place.place.path.clone());
        Ok(BoundVhost { place: place.clone(), listener, file })
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
    file: SocketFile,
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
        let server = VhostServer::start(disk, listener, poll_percent).map_err(refused)?;
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

    /// The counters of the channels of a device's hypervisor; `None` without one.
    pub(crate) fn channel_stats(&self, device: &str) -> Option<Stats> {
        let table = self.table();
        table.servers.iter().find(|it| it.place.device == device)?.server.channel_stats()
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
}

/// A server without a disk. Dropping it stops the server and removes its socket.
#[derive(Debug)]
pub(crate) struct SuspendedVhost(DeviceServer);
