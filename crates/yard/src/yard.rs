//! The devices of one process, by name: opened, listed, exported and removed while in use.
#![allow(clippy::disallowed_types)] // The table of devices is control plane.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use blockyard_core::Disk;
use blockyard_core::zone::gate::GateMode;
use blockyard_export::SharedDisk;
use blockyard_export::fuse::Files;
use blockyard_export::nbd::{ExportOptions, Exports};
use blockyard_ram::Ram;
use blockyard_volume::Running;
use blockyard_zonefs::MountOptions;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::DEVICES_MAX;
use crate::error::YardError;
use crate::ram;
use crate::scheduler;
use crate::size::Bytes;
use crate::spec::DeviceSpec;
use crate::stack::{self, StackError};
use crate::view::{FormatRequest, FormatView, MountView};
use crate::zonefs::Mounts;

/// The most requests of the control API that wait for one device at once.
pub const WORK_MAX: usize = 4;

/// A device of the yard.
#[derive(Clone)]
pub struct Entry {
    /// The specification of the device.
    pub spec: DeviceSpec,
    /// The device.
    pub disk: Arc<dyn Disk>,
    /// Notes on parameters that were corrected when it was opened.
    pub notes: Vec<String>,
    /// The device as a RAM disk, if it is one.
    pub ram: Option<Arc<Ram>>,
    /// The pool that the device is in, if it is a volume.
    pub pool: Option<Arc<Running>>,
    /// The time at which it was opened.
    pub since: Instant,
    work: Arc<Semaphore>,
}

impl Entry {
    /// A permit to wait for the device, held until it is dropped.
    ///
    /// # Errors
    /// If [`WORK_MAX`] requests wait for it already.
    pub fn begin_work(&self) -> Result<OwnedSemaphorePermit, YardError> {
        Arc::clone(&self.work)
            .try_acquire_owned()
            .map_err(|_| YardError::Overloaded { name: self.spec.name().to_owned(), max: WORK_MAX })
    }
}

/// The devices of one process.
pub struct Yard {
    devices: Mutex<Devices>,
    exports: Arc<Exports>,
    mounts: Mounts,
    files: Arc<Files>,
    /// The control socket of this yard, once it is known.
    control: OnceLock<PathBuf>,
}

#[derive(Default)]
struct Devices {
    /// In the order in which they were added.
    entries: Vec<Entry>,
    /// The names of devices that are being opened or removed, which no other request may use: a
    /// device opens its files, and devices of one name often have the same files.
    reserved: Vec<String>,
}

impl Devices {
    fn is_taken(&self, name: &str) -> bool {
        self.entries.iter().any(|entry| entry.spec.name() == name)
            || self.reserved.iter().any(|reserved| reserved == name)
    }

    fn unknown(&self, name: &str) -> YardError {
        YardError::no_such_device(name, self.entries.iter().map(|entry| entry.spec.name()))
    }
}

/// A reserved name. Dropping it releases the name; it must not be dropped while the lock is held.
struct Reserved<'y> {
    yard: &'y Yard,
    name: String,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        self.yard.devices().reserved.retain(|name| *name != self.name);
    }
}

impl Default for Yard {
    fn default() -> Yard {
        Yard {
            devices: Mutex::default(),
            exports: Exports::new(),
            files: Files::new(),
            mounts: Mounts::default(),
            control: OnceLock::new(),
        }
    }
}

impl Yard {
    /// A yard without devices.
    pub fn new() -> Arc<Yard> {
        Arc::default()
    }

    /// The NBD exports: every device under its name.
    pub fn exports(&self) -> &Arc<Exports> {
        &self.exports
    }

    /// The block files: every device under its name.
    pub fn files(&self) -> &Arc<Files> {
        &self.files
    }

    /// Opens a device and exports it.
    ///
    /// # Errors
    /// If the name is taken, there are too many devices, or the device cannot be opened.
    pub fn add(&self, spec: DeviceSpec) -> Result<Entry, YardError> {
        self.add_by(spec, stack::open)
    }

    /// Opens a device by `make` and exports it.
    fn add_by(
        &self,
        spec: DeviceSpec,
        make: impl FnOnce(&DeviceSpec) -> Result<stack::Made, StackError>,
    ) -> Result<Entry, YardError> {
        let _reserved = self.reserve(spec.name())?;
        self.enter(spec, usize::MAX, make)
    }

    /// Opens a device whose name is reserved, and inserts it at this index of the list.
    fn enter(
        &self,
        spec: DeviceSpec,
        index: usize,
        make: impl FnOnce(&DeviceSpec) -> Result<stack::Made, StackError>,
    ) -> Result<Entry, YardError> {
        // Outside the lock: it opens files, and requests that only read the list must not wait.
        let stack::Made { disk, notes, ram, pool } = make(&spec)?;
        if let (Some(pool), Some(control)) = (&pool, self.control.get())
            && let Err(error) = pool.announce(control)
        {
            tracing::warn!(device = spec.name(), "commands will not find the yard: {error}");
        }
        let options = ExportOptions {
            read_only: disk.limits().read_only,
            min_block_bytes: spec.number("min_block") as u32, // At most 64 KiB.
            description: describe(&spec, disk.as_ref()),
        };
        // One lock for sub-block writes by any protocol.
        let shared = SharedDisk::from(Arc::clone(&disk));
        self.exports.add(spec.name(), shared.clone(), options)?;
        if let Err(error) = self.files.add(spec.name(), shared) {
            // It was added just now, and no other request can remove it while its name is reserved.
            let _ = self.exports.remove(spec.name(), Duration::ZERO);
            return Err(error.into());
        }
        for note in &notes {
            tracing::debug!(device = spec.name(), "{note}");
        }
        let work = Arc::new(Semaphore::new(WORK_MAX));
        let entry = Entry { spec, disk, notes, ram, pool, since: Instant::now(), work };
        let mut devices = self.devices();
        let index = index.min(devices.entries.len());
        devices.entries.insert(index, entry.clone());
        Ok(entry)
    }

    /// Reserves the name of a device that is to be opened, and room in the list.
    fn reserve(&self, name: &str) -> Result<Reserved<'_>, YardError> {
        let mut devices = self.devices();
        if devices.is_taken(name) {
            return Err(YardError::Taken { name: name.to_owned() });
        }
        if devices.entries.len() + devices.reserved.len() >= DEVICES_MAX {
            return Err(YardError::Full { max: DEVICES_MAX });
        }
        devices.reserved.push(name.to_owned());
        Ok(Reserved { yard: self, name: name.to_owned() })
    }

    /// Removes a device. Its clients' requests in flight are answered and the clients disconnected;
    /// those that take longer than `drain` are cut off.
    ///
    /// # Errors
    /// If there is no such device.
    pub fn remove(&self, name: &str, drain: Duration) -> Result<Entry, YardError> {
        let (entry, _reserved) = {
            let mut devices = self.devices();
            let index = devices.entries.iter().position(|entry| entry.spec.name() == name);
            let index = index.ok_or_else(|| devices.unknown(name))?;
            devices.reserved.push(name.to_owned());
            (devices.entries.remove(index), Reserved { yard: self, name: name.to_owned() })
        };
        // Outside the lock: it waits for clients. All waits share the time.
        let deadline = Instant::now() + drain;
        self.mounts.remove(name, drain);
        let left = || deadline.saturating_duration_since(Instant::now());
        let exported = self.exports.remove(name, left());
        self.files.remove(name, left())?;
        exported?;
        Ok(entry)
    }

    /// Stores the path of this yard's control socket, once; a later call changes nothing.
    pub fn set_control(&self, control: &Path) {
        let control = std::path::absolute(control).unwrap_or_else(|_| control.to_owned());
        // It is empty, or has the same value.
        let _ = self.control.set(control);
    }

    /// Removes an unused device, runs an operation that requires this, and opens the device again
    /// with `spec`; with its old specification if the operation fails.
    ///
    /// # Errors
    /// If there is no such device, clients use it, or the operation fails.
    pub fn rework<T>(
        &self,
        spec: DeviceSpec,
        work: impl FnOnce() -> Result<T, YardError>,
    ) -> Result<T, YardError> {
        let name = spec.name().to_owned();
        self.is_idle(&name)?;
        let (index, entry, _reserved) = {
            let mut devices = self.devices();
            let index = devices.entries.iter().position(|entry| entry.spec.name() == name);
            let index = index.ok_or_else(|| devices.unknown(&name))?;
            devices.reserved.push(name.clone());
            let entry = devices.entries.remove(index);
            (index, entry, Reserved { yard: self, name: name.clone() })
        };
        let before = entry.spec.clone();
        drop(entry);
        let exported = self.exports.remove(&name, Duration::ZERO);
        self.files.remove(&name, Duration::ZERO)?;
        exported?;
        let done = work();
        let spec = if done.is_ok() { spec } else { before };
        self.enter(spec, index, stack::open)?;
        done
    }

    /// Fails if a device is in use.
    fn is_idle(&self, name: &str) -> Result<(), YardError> {
        if let Some(dir) = self.zonefs_place(name) {
            return Err(YardError::Mounted { name: name.to_owned(), dir: Some(dir) });
        }
        match self.users(name) {
            (0, 0) => Ok(()),
            (clients, opens) => Err(YardError::Used { name: name.to_owned(), clients, opens }),
        }
    }

    /// The number of a device's NBD clients, and how many times its file is open.
    fn users(&self, name: &str) -> (u64, u64) {
        let exports = self.exports.list();
        let export = exports.iter().find(|export| export.name == name);
        let clients = export.map_or(0, |export| export.clients as u64);
        (clients, self.files.find_info(name).map_or(0, |info| info.opens))
    }

    /// Whether a command may change zones of a device in use. A mounted zonefs keeps the states of
    /// its zones in memory, so `force` overrides clients and open files only.
    ///
    /// # Errors
    /// If a zonefs is mounted on the device, or, without `force`, clients use it.
    pub fn may_change_zones(&self, name: &str, force: bool) -> Result<(), YardError> {
        if let Some(dir) = self.zonefs_place(name) {
            return Err(YardError::Mounted { name: name.to_owned(), dir: Some(dir) });
        }
        match self.users(name) {
            (clients, opens) if clients + opens > 0 && !force => {
                Err(YardError::ZonesUsed { name: name.to_owned(), clients, opens })
            }
            _ => Ok(()),
        }
    }

    /// Makes a zonefs on a device.
    ///
    /// # Errors
    /// If there is no such device, it is mounted, the request is invalid, or the device refuses.
    pub fn format_zonefs(
        &self,
        name: &str,
        request: &FormatRequest,
    ) -> Result<FormatView, YardError> {
        let entry = self.find(name)?;
        if entry.disk.geometry().zones.is_some() {
            self.may_change_zones(name, request.force)?;
        }
        self.mounts.format(&entry, request)
    }

    /// Mounts the zonefs of a device. `ended` is called after it is unmounted.
    ///
    /// # Errors
    /// If there is no such device, it is mounted or has no zonefs, or the system refuses.
    pub fn mount_zonefs(
        &self,
        name: &str,
        dir: &Path,
        options: MountOptions,
        ended: impl FnOnce() + Send + Sync + 'static,
    ) -> Result<MountView, YardError> {
        self.mounts.mount(name, || self.find(name), dir, options, ended)
    }

    /// Unmounts the zonefs of a device.
    ///
    /// # Errors
    /// If it is not mounted, or programs use it.
    pub fn unmount_zonefs(&self, name: &str) -> Result<MountView, YardError> {
        self.mounts.unmount(name)
    }

    /// The mount point of a device's zonefs.
    pub fn zonefs_place(&self, name: &str) -> Option<PathBuf> {
        self.mounts.place(name)
    }

    /// All mounted zonefs.
    pub fn zonefs_mounts(&self) -> Vec<MountView> {
        self.mounts.list()
    }

    /// The device of this name.
    ///
    /// # Errors
    /// If there is none.
    pub fn find(&self, name: &str) -> Result<Entry, YardError> {
        let devices = self.devices();
        let found = devices.entries.iter().find(|entry| entry.spec.name() == name).cloned();
        found.ok_or_else(|| devices.unknown(name))
    }

    /// All devices, in the order in which they were added.
    pub fn list(&self) -> Vec<Entry> {
        self.devices().entries.clone()
    }

    fn devices(&self) -> MutexGuard<'_, Devices> {
        // Every change of a list is one call: a holder that panicked has left it consistent.
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A device in one line, for people.
pub fn describe(spec: &DeviceSpec, disk: &dyn Disk) -> String {
    let geometry = disk.geometry();
    let mut text = format!("{} {}", disk.kind(), Bytes(geometry.len_bytes()));
    if spec.kind().name == "null" {
        let kept = spec.switch("memory_backed");
        text += if kept { ", keeps data in memory" } else { ", keeps nothing" };
    }
    if spec.kind().name == "smr" {
        text += &match (spec.text("device"), spec.text("backing")) {
            (Some(device), _) => format!(", drives {device}"),
            (None, Some(backing)) => format!(", keeps data in {backing}"),
            (None, None) => ", keeps data in memory".to_owned(),
        };
    }
    if spec.kind().name == "volume" {
        text += &format!(", in {}", stack::pool_path(spec).display());
    }
    if let Some(ram) = ram::described(spec) {
        text += &ram;
    }
    if geometry.logical_block_bytes != 512 {
        text += &format!(", {} blocks", Bytes(geometry.logical_block_bytes.into()));
    }
    if let Some(zones) = &geometry.zones {
        let sectors = |sectors: u64| Bytes(sectors * blockyard_core::SECTOR_BYTES);
        text += &format!(", {} zones of {}", zones.zone_count, sectors(zones.zone_sectors));
        if zones.zone_capacity_sectors != zones.zone_sectors {
            text += &format!(" ({} writable)", sectors(zones.zone_capacity_sectors));
        }
        for (count, what) in [
            (zones.conventional_count, "conventional"),
            (zones.open_max, "open at most"),
            (zones.active_max, "active at most"),
        ] {
            if count > 0 {
                text += &format!(", {count} {what}");
            }
        }
    }
    if let Some(gate) = disk.gate() {
        text += match gate.mode {
            GateMode::Pipeline => "",
            GateMode::Plug => ", one write of a zone at a time",
        };
        text += if gate.emulates_append { ", append emulated" } else { "" };
    }
    let scheduler = scheduler::active(disk);
    if scheduler != "none" {
        text += &format!(", {scheduler}");
    }
    if disk.limits().read_only {
        text += ", read-only";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uri;

    const DRAIN: Duration = Duration::from_secs(1);

    fn spec(uri: &str) -> DeviceSpec {
        uri::parse(uri).unwrap()
    }

    #[test]
    fn devices_come_and_go() {
        let yard = Yard::new();
        yard.add(spec("null:///a?size=1G")).unwrap();
        yard.add(spec("null:///b?size=1G")).unwrap();
        let error = yard.add(spec("null:///a?size=2G")).map(drop).unwrap_err();
        assert_eq!(error.code(), "taken");
        yard.remove("a", DRAIN).unwrap();
        let error = yard.remove("a", DRAIN).map(drop).unwrap_err();
        assert_eq!(error.code(), "no_such_device");
        let names: Vec<_> = yard.list().iter().map(|e| e.spec.name().to_owned()).collect();
        assert_eq!(names, ["b"]);
        assert_eq!(yard.exports().list().len(), 1);
        yard.add(spec("null:///a?size=2G")).unwrap();
    }

    #[test]
    fn a_device_that_cannot_be_made_leaves_nothing() {
        let yard = Yard::new();
        let error = yard.add(spec("null:///a?zoned=1&zone_size=3M")).map(drop).unwrap_err();
        assert_eq!(error.code(), "invalid");
        assert_eq!(error.blame().0.as_deref(), Some("zone_size"));
        assert!(yard.list().is_empty());
        assert!(yard.exports().list().is_empty());
    }

    #[test]
    fn a_name_is_taken_while_its_device_is_made() {
        // The bug: two concurrent requests for one name both opened the device's files, and
        // truncated a trace that the other was writing, before one of them was refused.
        let yard = Yard::new();
        let entry = yard.add_by(spec("null:///a?size=1G"), |made| {
            let error = yard.add_by(spec("null:///a?size=2G"), |_| panic!("it is made twice"));
            assert_eq!(error.map(drop).unwrap_err().code(), "taken");
            assert_eq!(yard.find("a").map(drop).unwrap_err().code(), "no_such_device");
            assert!(yard.add(spec("null:///b?size=1G")).is_ok());
            stack::open(made)
        });
        assert!(entry.is_ok());
        assert_eq!(yard.list().len(), 2);
        // A failed request releases the name, and so does a removal.
        let bad = spec("null:///c?zoned=1&zone_size=3M");
        assert!(yard.add(bad).is_err() && yard.remove("a", DRAIN).is_ok());
        assert!(yard.add(spec("null:///a?size=1G")).is_ok());
        assert!(yard.add(spec("null:///c?size=1G")).is_ok());
    }

    #[test]
    fn an_unknown_name_gets_the_nearest() {
        let yard = Yard::new();
        yard.add(spec("null:///zoned0?size=1G")).unwrap();
        let error = yard.find("zoned1").map(drop).unwrap_err().to_string();
        assert_eq!(error, "there is no device `zoned1`; did you mean `zoned0`?");
    }

    #[test]
    fn a_device_is_described_in_a_line() {
        let yard = Yard::new();
        let uri = "null:///z?size=1G&bs=4k&zoned=1&zone_size=64M&zone_capacity=48M&zone_nr_conv=2\
                   &zone_max_open=3&zone_max_active=5";
        let entry = yard.add(spec(uri)).unwrap();
        assert_eq!(
            describe(&entry.spec, entry.disk.as_ref()),
            "null 1G, keeps nothing, 4k blocks, 16 zones of 64M (48M writable), 2 conventional, \
             3 open at most, 5 active at most"
        );
    }
}
