//! The block devices of the kernel that a yard serves by ublk, and those of the whole machine.
#![allow(clippy::disallowed_types)] // The table of servers is control plane.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockyard_core::Disk;
use blockyard_core::channel::Stats;
use blockyard_core::rmw::SharedDisk;
pub use blockyard_ublk::{
    ID_MAX, IoFlusher, MachineDevice, UblkError, UblkInfo, begin_io_flusher, block_path,
    check_kernel, end_io_flusher, list, remove,
};
use blockyard_ublk::{UblkOptions, UblkServer};

use crate::entry::DeviceEntry;
use crate::error::YardError;
use crate::param::shown;
use crate::spec::DeviceSpec;
use crate::stack;

/// The choice `always` of a volume's `sync`, and `volatile` of an SMR disk's `cache`.
const SYNC_ALWAYS: usize = 1;
const CACHE_VOLATILE: usize = 2;

/// The word for a number that the kernel chooses.
pub const ANY_ID: &str = "any";

/// A device, and the number of the block device that it is served as: `DEVICE` or `DEVICE=N`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UblkPlace {
    /// The name of the device.
    pub device: String,
    /// The N of `/dev/ublkbN`; `None` lets the kernel choose it.
    pub id: Option<u32>,
}

impl UblkPlace {
    /// Reads the number of a device's block device.
    ///
    /// # Errors
    /// What is expected.
    pub fn of(device: &str, id: &str) -> Result<UblkPlace, String> {
        let device = device.to_owned();
        if id == ANY_ID {
            return Ok(UblkPlace { device, id: None });
        }
        match parse_id(id) {
            Ok(id) => Ok(UblkPlace { device, id: Some(id) }),
            Err(wanted) => Err(format!("invalid id `{}`: {wanted}, or {ANY_ID}", shown(id))),
        }
    }
}

/// Reads the number of a block device.
///
/// # Errors
/// What is expected.
pub fn parse_id(text: &str) -> Result<u32, String> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let id = text.parse().ok().filter(|id| is_number && *id <= ID_MAX);
    id.ok_or_else(|| format!("expected the N of /dev/ublkbN, 0 to {ID_MAX}"))
}

/// The server of a device.
#[derive(Debug)]
struct DeviceServer {
    device: String,
    server: Arc<UblkServer>,
}

#[derive(Debug, Default)]
struct UblkTable {
    servers: Vec<DeviceServer>,
    /// The names of devices whose servers are being started or stopped: the kernel may take long.
    changing: Vec<String>,
}

/// The servers of a yard.
#[derive(Debug, Default)]
pub struct UblkServers {
    table: Mutex<UblkTable>,
}

/// The name of a device whose server is being started or stopped. Dropping it releases the name; it
/// must not be dropped while the table is locked.
#[derive(Debug)]
pub(crate) struct Changing<'s> {
    servers: &'s UblkServers,
    device: String,
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.servers.table().changing.retain(|device| *device != self.device);
    }
}

/// A server without a disk. Dropping it fails the requests of the block device, which stays: a file
/// system may be mounted on it.
#[derive(Debug)]
pub(crate) struct SuspendedUblk<'s> {
    changing: Changing<'s>,
    /// `None` once it has a disk.
    server: Option<Arc<UblkServer>>,
}

impl SuspendedUblk<'_> {
    /// Serves a device that was replaced. The programs that use the block device learn a larger
    /// capacity.
    ///
    /// # Errors
    /// If the block device keeps its size, or its requests fail; the error says what to do.
    pub(crate) fn resume(mut self, disk: &SharedDisk) -> Result<(), YardError> {
        let Some(server) = self.server.take() else { return Ok(()) };
        let name = self.changing.device.clone();
        server.resume(disk).map_err(|source| {
            let path = block_path(server.info().id);
            tracing::error!(device = name, path, "the block device is outdated: {source}");
            YardError::UblkOutdated { name, path, source }
        })
    }
}

impl Drop for SuspendedUblk<'_> {
    fn drop(&mut self) {
        let Some(server) = &self.server else { return };
        server.fail();
        let (device, path) = (self.changing.device.as_str(), block_path(server.info().id));
        tracing::error!(
            device,
            path,
            "the device could not be opened again: requests of its block device fail; unmount it, \
             remove it by `blockyard ublk remove`, and add the device again"
        );
    }
}

/// Checks what can be checked before a device that was opened keeps anything: its shape, the
/// kernel's driver, and that the number is free.
///
/// # Errors
/// As [`UblkServers::start`].
pub(crate) fn check(
    disk: &dyn Disk,
    place: &UblkPlace,
    spec: &DeviceSpec,
    data: &str,
) -> Result<(), YardError> {
    Ok(UblkServer::check(disk, &options(place, spec, data))?)
}

fn options(place: &UblkPlace, spec: &DeviceSpec, data: &str) -> UblkOptions {
    let (identity, keeps_data) = identity(spec, data);
    UblkOptions { id: place.id, identity, keeps_data }
}

impl UblkServers {
    fn table(&self) -> MutexGuard<'_, UblkTable> {
        // Every change of the table is one call: a holder that panicked has left it consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a device, which was found after the caller had begun the change.
    ///
    /// # Errors
    /// If it is served already, or the kernel has no ublk driver, refuses or cannot have it.
    pub(crate) fn start(
        &self,
        changing: &Changing<'_>,
        entry: &DeviceEntry,
        place: &UblkPlace,
    ) -> Result<(), YardError> {
        let device = &changing.device;
        if let Some(info) = self.find(device) {
            let (name, path) = (device.clone(), block_path(info.id));
            return Err(YardError::UblkServed { name, path });
        }
        let options = options(place, &entry.spec, &entry.identity);
        let server = Arc::new(UblkServer::start(entry.shared.clone(), &options)?);
        self.table().servers.push(DeviceServer { device: device.clone(), server });
        Ok(())
    }

    /// Keeps other requests from starting or stopping the server of a device, and counts it as a
    /// client of the device from now on: before its claim is read.
    ///
    /// # Errors
    /// If another request has begun.
    pub(crate) fn begin_change(&self, device: &str) -> Result<Changing<'_>, YardError> {
        let mut table = self.table();
        if table.changing.iter().any(|changing| changing == device) {
            return Err(YardError::UblkBusy { name: device.to_owned() });
        }
        table.changing.push(device.to_owned());
        Ok(Changing { servers: self, device: device.to_owned() })
    }

    /// Checks that a device may become larger while it is a block device of the kernel. Returns
    /// whether it is one.
    ///
    /// # Errors
    /// If the kernel cannot change the size of a block device.
    pub(crate) fn check_growth(&self, device: &str) -> Result<bool, YardError> {
        let Some(server) = self.server(device) else { return Ok(false) };
        let (name, path) = (device.to_owned(), block_path(server.info().id));
        let refused = |source| YardError::UblkFixed { name, path, source };
        server.check_growth().map_err(refused).map(|()| true)
    }

    /// Takes the disk away from the server of a device that is being replaced. Its block device
    /// stays, and the requests of the kernel wait. `None` if the device has no server.
    ///
    /// # Errors
    /// If the disk executes requests for longer than `drain`, or another request starts or stops
    /// the server. Then the disk is served as before.
    pub(crate) fn suspend(
        &self,
        device: &str,
        drain: Duration,
    ) -> Result<Option<SuspendedUblk<'_>>, YardError> {
        let changing = self.begin_change(device)?;
        let Some(server) = self.server(device) else { return Ok(None) };
        match server.suspend(drain) {
            true => Ok(Some(SuspendedUblk { changing, server: Some(server) })),
            false => Err(YardError::UblkSlow { name: device.to_owned() }),
        }
    }

    /// Whether the block device of a device has another capacity than the device, or fails.
    pub(crate) fn is_outdated(&self, device: &str) -> bool {
        self.server(device).is_some_and(|server| server.is_outdated())
    }

    /// Prepares this thread to reopen a device, if any device is a block device: the kernel must
    /// not free memory for it by writing to a block device whose requests wait for this thread.
    ///
    /// # Errors
    /// If the system refuses.
    pub(crate) fn begin_reopen(&self) -> Result<Option<IoFlusher>, YardError> {
        if self.table().servers.is_empty() {
            return Ok(None);
        }
        let flusher = IoFlusher::begin().map_err(UblkError::System)?;
        Ok(Some(flusher))
    }

    /// Whether a device has a server, or one is being started or stopped.
    pub(crate) fn is_client(&self, device: &str) -> bool {
        let table = self.table();
        table.changing.iter().any(|changing| changing == device)
            || table.servers.iter().any(|it| it.device == device)
    }

    fn server(&self, device: &str) -> Option<Arc<UblkServer>> {
        let table = self.table();
        table.servers.iter().find(|it| it.device == device).map(|it| Arc::clone(&it.server))
    }

    /// The state of the server of a device.
    pub fn find(&self, device: &str) -> Option<UblkInfo> {
        self.server(device).map(|server| server.info())
    }

    /// The names of all devices that are served, with the states of their servers.
    pub fn list(&self) -> Vec<(String, UblkInfo)> {
        let server = |it: &DeviceServer| (it.device.clone(), Arc::clone(&it.server));
        // The lock is released before the servers are asked.
        let servers: Vec<_> = self.table().servers.iter().map(server).collect();
        servers.into_iter().map(|(device, server)| (device, server.info())).collect()
    }

    /// The counters of the channels of a device's block device, by its number; `None` without one.
    /// One that was removed and made again with its number has counted from 0.
    pub(crate) fn channel_stats(&self, device: &str, id: u64) -> Option<Stats> {
        let server = self.server(device).filter(|server| u64::from(server.info().id) == id);
        server.map(|server| server.channel_stats())
    }

    /// Completes the requests of a device's block device, and removes it, if there is one.
    ///
    /// # Errors
    /// If the kernel refuses; then the server is listed as before.
    pub(crate) fn remove(&self, device: &str) -> Result<(), YardError> {
        let Some(server) = self.server(device) else { return Ok(()) };
        // Without the lock: it waits for requests.
        server.stop()?;
        self.table().servers.retain(|it| !Arc::ptr_eq(&it.server, &server));
        Ok(())
    }

    /// Leaves the block devices that could not be removed as a kill of this process would leave
    /// them. For the end of the process: the kernel may wait without a limit in another attempt.
    pub(crate) fn leave(&self) {
        self.table().servers.drain(..).for_each(std::mem::forget);
    }

    /// Removes the block device of a device that stays; with `force` also one that is mounted.
    ///
    /// # Errors
    /// If the device has none, it is being started or stopped, the kernel refuses, or, without
    /// `force`, it is mounted. Then it is served as before.
    pub(crate) fn unserve(&self, device: &str, force: bool) -> Result<UblkInfo, YardError> {
        let _changing = self.begin_change(device)?;
        let server = self.server(device);
        let server = server.ok_or_else(|| YardError::NoUblk { name: device.to_owned() })?;
        let info = server.info();
        // Without the lock of the table: it opens the block device.
        if !force && server.is_in_use() {
            return Err(YardError::UblkUsed { path: block_path(info.id) });
        }
        self.remove(device)?;
        Ok(info)
    }
}

/// What tells the data of a device from those of another one, and whether all completed writes are
/// still there after the process was killed. A device that loses some must end with its server: a
/// file system that goes on would take the success of its next flush for theirs. `data` is the
/// identity of what is at the path.
fn identity(spec: &DeviceSpec, data: &str) -> (String, bool) {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let given = |key| spec.text(key).map(|path| real(Path::new(&path)));
    let (path, keeps_data) = match spec.kind().name {
        "volume" => {
            let keeps_data = spec.choice("sync") == SYNC_ALWAYS;
            (Some(real(&stack::pool_path(spec))), keeps_data)
        }
        "file" => (given("path"), true),
        "smr" => {
            let device = given("device");
            let is_volatile = device.is_none() && spec.choice("cache") == CACHE_VOLATILE;
            let path = device.or_else(|| given("backing"));
            let keeps_data = path.is_some() && !is_volatile;
            (path, keeps_data)
        }
        // Without memory it has no data to lose; the states of zones are data.
        "null" => {
            let path = given("backing");
            let has_data = spec.switch("memory_backed") || spec.switch("zoned");
            let keeps_data = path.is_some() || !has_data;
            (path, keeps_data)
        }
        _ => (None, false),
    };
    let path = path.map(|path| path.display().to_string()).unwrap_or_default();
    (format!("blockyard {} {} {path} {data}", spec.kind().name, spec.name()), keeps_data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uri;

    #[test]
    fn a_place_has_a_number_or_any() {
        let place = |id| Ok(UblkPlace { device: "v".to_owned(), id });
        assert_eq!(UblkPlace::of("v", "any"), place(None));
        assert_eq!(UblkPlace::of("v", "1048575"), place(Some(ID_MAX)));
        for bad in ["", "-1", "+1", "1048576", "0x1", "99999999999", "b0"] {
            let error = UblkPlace::of("v", bad).unwrap_err();
            let wanted = "expected the N of /dev/ublkbN, 0 to 1048575, or any";
            assert!(error.starts_with(&format!("invalid id `{bad}`")), "{error}");
            assert!(error.ends_with(wanted), "{error}");
        }
    }

    #[test]
    fn only_devices_without_writes_in_memory_keep_their_data_over_a_kill() {
        let identity = |text: &str| identity(&uri::parse(text).unwrap(), "7");
        for (text, keeps) in [
            ("volume:///a?path=/nowhere/p&size=1G", false),
            ("volume:///a?path=/nowhere/p&size=1G&sync=always", true),
            ("volume:///a?path=/nowhere/p&size=1G&sync=disabled", false),
            ("file:///a?path=/nowhere/f", true),
            ("smr:///a?backing=/nowhere/d", true),
            ("smr:///a?backing=/nowhere/d&cache=volatile", false),
            ("smr:///a", false),
            ("ram:///a", false),
            ("null:///a", true),
            ("null:///a?memory_backed=1", false),
            ("null:///a?zoned=1", false),
            ("null:///a?zoned=1&backing=/nowhere/z", true),
        ] {
            assert_eq!(identity(text).1, keeps, "{text}");
        }
        let (of, other) = (identity("file:///a?path=/f"), identity("file:///a?path=/g"));
        assert_ne!(of, other);
        // A link, or a parameter that changes no data, makes no other device.
        assert_eq!(
            identity("file:///a?path=/dev/../dev/null&read_only=1").0,
            "blockyard file a /dev/null 7"
        );
        // One that was made again at the same path is another one.
        let spec = uri::parse("file:///a?path=/f").unwrap();
        assert_ne!(super::identity(&spec, "7"), super::identity(&spec, "8"));
    }
}
