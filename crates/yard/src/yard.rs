//! The devices of one process, by name: made, listed, exported and taken away while they are used.
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

/// Most requests of the control API that one device works on at once.
pub const WORK_MAX: usize = 4;

/// A device of the yard.
#[derive(Clone)]
pub struct Entry {
    /// As it was asked for.
    pub spec: DeviceSpec,
    /// The device.
    pub disk: Arc<dyn Disk>,
    /// What was corrected when it was made.
    pub notes: Vec<String>,
    /// The device as a RAM disk, if it is one.
    pub ram: Option<Arc<Ram>>,
    /// The pool that the device is in, if it is a volume.
    pub pool: Option<Arc<Running>>,
    /// When it was made.
    pub since: Instant,
    work: Arc<Semaphore>,
}

impl Entry {
    /// A place among those that wait for the device, held until it is dropped.
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
    /// Where this yard can be asked, once that is known.
    control: OnceLock<PathBuf>,
}

#[derive(Default)]
struct Devices {
    /// In the order in which they were added.
    entries: Vec<Entry>,
    /// The names of devices that are being made or taken away. Nobody else may have them: a device
    /// opens its files, and a name's files are often the same.
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

/// A name that is reserved until this is dropped. Not to be dropped under the lock.
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

    /// The exports: every device under its name.
    pub fn exports(&self) -> &Arc<Exports> {
        &self.exports
    }

    /// The block files: every device under its name.
    pub fn files(&self) -> &Arc<Files> {
        &self.files
    }

    /// Makes a device and exports it.
    ///
    /// # Errors
    /// If the name is taken, there are too many, or the device cannot be made.
    pub fn add(&self, spec: DeviceSpec) -> Result<Entry, YardError> {
        self.add_by(spec, stack::open)
    }

    /// Makes a device by `make` and exports it.
    fn add_by(
        &self,
        spec: DeviceSpec,
        make: impl FnOnce(&DeviceSpec) -> Result<stack::Made, StackError>,
    ) -> Result<Entry, YardError> {
        let _reserved = self.reserve(spec.name())?;
        self.enter(spec, usize::MAX, make)
    }

    /// Makes a device whose name is reserved, and puts it at this place of the list.
    fn enter(
        &self,
        spec: DeviceSpec,
        index: usize,
        make: impl FnOnce(&DeviceSpec) -> Result<stack::Made, StackError>,
    ) -> Result<Entry, YardError> {
        // Outside the lock: it opens files, and others who only look must not wait for that.
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
        // One lock for all who write parts of blocks, whichever way they come.
        let shared = SharedDisk::from(Arc::clone(&disk));
        self.exports.add(spec.name(), shared.clone(), options)?;
        if let Err(error) = self.files.add(spec.name(), shared) {
            // It was added just now, and nobody else may remove it while its name is reserved.
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

    /// Reserves the name of a device that is to be made, and a place for it.
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

    /// Takes a device away. Its clients' requests are answered and the clients disconnected; those
    /// that take longer than `drain` are cut off.
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
        // Outside the lock: it waits for clients. All share the time.
        let deadline = Instant::now() + drain;
        self.mounts.remove(name, drain);
        let left = || deadline.saturating_duration_since(Instant::now());
        let exported = self.exports.remove(name, left());
        self.files.remove(name, left())?;
        exported?;
        Ok(entry)
    }

    /// Notes where this yard can be asked. What has it noted already keeps it.
    pub fn set_control(&self, control: &Path) {
        let control = std::path::absolute(control).unwrap_or_else(|_| control.to_owned());
        // It is empty, or it says the same.
        let _ = self.control.set(control);
    }

    /// Takes a device away that nobody uses, does something that needs that, and makes the device
    /// again as `spec` says; as it was, if that fails.
    ///
    /// # Errors
    /// If there is no such device, somebody uses it, or what is done fails.
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

    /// Whether nobody uses a device.
    fn is_idle(&self, name: &str) -> Result<(), YardError> {
        if let Some(dir) = self.zonefs_place(name) {
            return Err(YardError::Mounted { name: name.to_owned(), dir: Some(dir) });
        }
        match self.users(name) {
            (0, 0) => Ok(()),
            (clients, opens) => Err(YardError::Used { name: name.to_owned(), clients, opens }),
        }
    }

    /// How many NBD clients a device has, and how many times its file is open.
    fn users(&self, name: &str) -> (u64, u64) {
        let exports = self.exports.list();
        let export = exports.iter().find(|export| export.name == name);
        let clients = export.map_or(0, |export| export.clients as u64);
        (clients, self.files.find_info(name).map_or(0, |info| info.opens))
    }

    /// Whether a command may change zones of a device under its users. A mounted zonefs keeps the
    /// states of its zones in memory, so that `force` overrides clients and open files only.
    ///
    /// # Errors
    /// If a zonefs is mounted on the device, or, without `force`, others use it.
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
    /// If there is no such device, it is mounted, the request makes no sense, or it refuses.
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

    /// Mounts the zonefs of a device. `ended` is called when it is no longer mounted.
    ///
    /// # Errors
    /// If there is no such device, it is mounted or holds no zonefs, or the system refuses.
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

    /// Where the zonefs of a device is mounted.
    pub fn zonefs_place(&self, name: &str) -> Option<PathBuf> {
        self.mounts.place(name)
    }

    /// Every zonefs that is mounted.
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
        // Every change of a list is one call: a holder that panicked has left it whole.
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
        // Two who added one name at once both opened the device's files, and truncated a trace
        // that the other wrote already, before one of them was told that the name is taken.
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
        // Who fails gives the name back, and so does who takes the device away.
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
