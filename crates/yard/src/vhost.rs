//! The vhost-user servers of a yard: devices that hypervisors use, each at its own unix socket.
//!
//! ```text
//! SERVED ── suspend: the device is replaced ──▸ SUSPENDED ── resume ──▸ SERVED
//!    └── remove: the device is removed, or the yard ends ──▸ gone
//! ```
#![allow(clippy::disallowed_types)] // The table of servers is control plane.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

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

/// A socket that listens, for a device that is not open yet, or that is being replaced.
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

/// The servers of a yard.
#[derive(Debug, Default)]
pub struct VhostServers {
    table: Mutex<Vec<DeviceServer>>,
}

impl VhostServers {
    fn table(&self) -> MutexGuard<'_, Vec<DeviceServer>> {
        // Every change of the table is one call: a holder that panicked has left it consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a device at a socket that listens.
    ///
    /// # Errors
    /// If the device is served already, or the system refuses.
    pub(crate) fn start(&self, disk: SharedDisk, bound: BoundVhost) -> Result<(), YardError> {
        let BoundVhost { place, listener, file } = bound;
        let path = place.place.path.display().to_string();
        let refused = |source| YardError::Listen { place: format!("unix:{path}"), source };
        let mut table = self.table();
        if table.iter().any(|it| it.place.device == place.device) {
            let text = format!("`{}` has a vhost-user socket already", place.device);
            return Err(refused(std::io::Error::other(text)));
        }
        let server = VhostServer::start(disk, listener).map_err(refused)?;
        tracing::info!(device = place.device, path, "serving vhost-user-blk");
        table.push(DeviceServer { place, server, file });
        Ok(())
    }

    /// The socket of a device, and the state of its server.
    pub fn find(&self, device: &str) -> Option<(VhostPlace, VhostInfo)> {
        let table = self.table();
        let found = table.iter().find(|it| it.place.device == device);
        found.map(|it| (it.place.clone(), it.server.info()))
    }

    /// All sockets, in the order in which they were given.
    pub fn list(&self) -> Vec<(VhostPlace, VhostInfo)> {
        self.table().iter().map(|it| (it.place.clone(), it.server.info())).collect()
    }

    fn take(&self, device: &str) -> Option<DeviceServer> {
        let mut table = self.table();
        let at = table.iter().position(|it| it.place.device == device)?;
        Some(table.remove(at))
    }

    /// Stops the server of a device that is being replaced, and keeps its socket.
    pub(crate) fn suspend(&self, device: &str) -> Option<BoundVhost> {
        let DeviceServer { place, server, file } = self.take(device)?;
        server.stop().map(|listener| BoundVhost { place, listener, file })
    }

    /// Serves a device that was replaced.
    pub(crate) fn resume(&self, suspended: BoundVhost, disk: SharedDisk) {
        if let Err(error) = self.start(disk, suspended) {
            tracing::error!("the device is not served to hypervisors any more: {error}");
        }
    }

    /// Stops the server of a device and removes its socket. The hypervisor's requests in flight are
    /// completed.
    pub(crate) fn remove(&self, device: &str) {
        if let Some(removed) = self.take(device) {
            removed.server.stop();
        }
    }
}
