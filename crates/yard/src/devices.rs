//! The devices of one process, by name: opened, listed, exported and removed while in use.
#![allow(clippy::disallowed_types)] // The table of devices is control plane.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use blockyard_core::Disk;
use blockyard_core::claim::DiskClaim;
use blockyard_core::rmw::SharedDisk;
use blockyard_file::FileDevice;
use blockyard_fuse::Files;
use blockyard_nbd::{ExportOptions, Exports};
use blockyard_nvme::{HostAccess, HostInfo, NQN_PREFIX, Subsystems, SuspendedSubsystem};
use blockyard_zonefs::MountOptions;

use crate::config::DEVICES_MAX;
use crate::entry::{DeviceEntry, NvmeExport, describe};
use crate::error::{StackError, YardError};
use crate::replays::Replays;
use crate::scrubs::Scrubs;
use crate::spec::DeviceSpec;
use crate::stack;
use crate::ublk::{SuspendedUblk, UblkInfo, UblkPlace, UblkServers, block_path};
use crate::vhost::{BoundVhost, SuspendedVhost, VhostServers};
use crate::view::{FormatRequest, FormatView, HostView, MountView};
use crate::warnings::Warnings;
use crate::zonefs::Mounts;

mod close;
mod hand_over;

pub(crate) use hand_over::WithdrawnDevices;

/// How long the commands of NVMe hosts and of hypervisors may take before a device is replaced, and
/// how long requests may keep the device.
const SUSPEND_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a device that is to be closed is looked at.
const CLOSE_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The devices of one process.
pub struct Devices {
    table: Mutex<DeviceTable>,
    exports: Arc<Exports>,
    /// The NVMe subsystems, once the access of hosts is known.
    subsystems: OnceLock<Arc<Subsystems>>,
    mounts: Mounts,
    files: Arc<Files>,
    vhost: VhostServers,
    ublk: UblkServers,
    replays: Replays,
    /// The control socket of this yard, once it is known.
    control: OnceLock<PathBuf>,
    scrubs: Scrubs,
    warnings: Warnings,
}

#[derive(Default)]
struct DeviceTable {
    /// In the order in which they were added.
    entries: Vec<DeviceEntry>,
    /// The names of devices that are being opened or removed, which no other request may use: a
    /// device opens its files, and devices of one name often have the same files.
    reserved: Vec<(String, ReservedFor)>,
    /// The yard is ending: it opens no device any more.
    is_ending: bool,
}

/// What is done with a device that is not in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReservedFor {
    /// It is opened for the first time, and has no completed writes.
    Open,
    /// It was open, and is opened again.
    Reopen,
    /// It is removed.
    Remove,
}

impl DeviceTable {
    fn is_taken(&self, name: &str) -> bool {
        self.entries.iter().any(|entry| entry.spec.name() == name)
            || self.reserved.iter().any(|(reserved, _)| reserved == name)
    }

    /// Refuses requests that open a device while the yard ends.
    fn check_open(&self) -> Result<(), YardError> {
        if self.is_ending { Err(YardError::Ending) } else { Ok(()) }
    }

    fn unknown(&self, name: &str) -> YardError {
        YardError::no_such_device(name, self.entries.iter().map(|entry| entry.spec.name()))
    }
}

/// The exporters that wait for a device that is being replaced.
#[derive(Default)]
struct Suspended<'d> {
    subsystem: Option<SuspendedSubsystem>,
    vhost: Option<SuspendedVhost>,
    ublk: Option<SuspendedUblk<'d>>,
}

/// A reserved name. Dropping it releases the name; it must not be dropped while the lock is held.
struct Reserved<'d> {
    devices: &'d Devices,
    name: String,
    what: ReservedFor,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        // Another request may have reserved the name since, if this one has put the device in the
        // table.
        let own = |(name, what): &(String, ReservedFor)| *name == self.name && *what == self.what;
        let mut table = self.devices.table();
        if let Some(index) = table.reserved.iter().position(own) {
            table.reserved.swap_remove(index);
        }
    }
}

impl Default for Devices {
    fn default() -> Devices {
        Devices {
            table: Mutex::default(),
            exports: Exports::new(),
            subsystems: OnceLock::new(),
            files: Files::new(),
            vhost: VhostServers::default(),
            ublk: UblkServers::default(),
            mounts: Mounts::default(),
            replays: Replays::default(),
            control: OnceLock::new(),
            scrubs: Scrubs::default(),
            warnings: Warnings::default(),
        }
    }
}

impl Devices {
    /// No devices.
    pub fn new() -> Arc<Devices> {
        Arc::default()
    }

    /// The scrubs of pools.
    pub(crate) fn scrubs(&self) -> &Scrubs {
        &self.scrubs
    }

    /// The warnings about pools and devices.
    pub(crate) fn warnings(&self) -> &Warnings {
        &self.warnings
    }

    /// The NBD exports: every device under its name.
    pub fn exports(&self) -> &Arc<Exports> {
        &self.exports
    }

    /// Makes an NVMe subsystem of each device that is added from now on, for the hosts that may
    /// use it, and a namespace of the subsystem of the NQN `all`, if one is given; a later call
    /// changes nothing. Hosts reach it once a listener is started.
    pub fn make_subsystems(&self, access: HostAccess, all: Option<String>) {
        self.subsystems.get_or_init(|| Subsystems::new(&machine_id(), access, all));
    }

    /// The NVMe subsystems, once there are any.
    pub fn subsystems(&self) -> Option<&Arc<Subsystems>> {
        self.subsystems.get()
    }

    /// The vhost-user servers of the devices that have one.
    pub fn vhost(&self) -> &VhostServers {
        &self.vhost
    }

    /// Serves a device to hypervisors at a socket that listens.
    ///
    /// # Errors
    /// If there is no such device, it is served already, or the system refuses.
    pub(crate) fn serve_vhost(&self, bound: BoundVhost) -> Result<(), YardError> {
        let name = bound.device().to_owned();
        let entry = self.find(&name)?;
        self.vhost.start(entry.shared.clone(), bound)?;
        // A request may have removed or replaced the device meanwhile.
        let is_same = |now: DeviceEntry| Arc::ptr_eq(&now.disk, &entry.disk);
        if self.find(&name).is_ok_and(is_same) {
            return Ok(());
        }
        self.vhost.remove(&name, Duration::ZERO);
        Err(YardError::VhostBusy { name })
    }

    /// The servers of the devices that are block devices of the kernel.
    pub fn ublk(&self) -> &UblkServers {
        &self.ublk
    }

    /// Serves a device as a block device of the kernel.
    ///
    /// # Errors
    /// If there is no such device, it is served already, or the kernel refuses.
    pub(crate) fn serve_ublk(&self, place: &UblkPlace) -> Result<(), YardError> {
        // First: who claims the device from now on finds a client. It lasts to the end of this
        // function, so that no other request starts the server that is removed below.
        let changing = self.ublk.begin_change(&place.device)?;
        let entry = self.find(&place.device)?;
        self.ublk.start(&changing, &entry, place)?;
        // A request may have removed or replaced the device meanwhile.
        let is_same = |now: DeviceEntry| Arc::ptr_eq(&now.disk, &entry.disk);
        if self.find(&place.device).is_ok_and(is_same) {
            return Ok(());
        }
        self.ublk.remove(&place.device)?;
        Err(YardError::UblkBusy { name: place.device.clone() })
    }

    /// The replays of traces that are in progress.
    pub(crate) fn replays(&self) -> &Replays {
        &self.replays
    }

    /// The block files: every device under its name.
    pub fn files(&self) -> &Arc<Files> {
        &self.files
    }

    /// Opens a device and exports it.
    ///
    /// # Errors
    /// If the name is taken, there are too many devices, or the device cannot be opened.
    pub fn add(&self, spec: DeviceSpec) -> Result<DeviceEntry, YardError> {
        self.add_by(spec, stack::open_to_serve)
    }

    /// Opens devices, and exports them when all are open. A device is opened by the specification
    /// that `opened_as` returns.
    ///
    /// # Errors
    /// As [`Devices::add`], or that of `check`, for the device of the returned name. Then no client
    /// has used a device, and what the others made on disk is removed.
    pub(crate) fn add_all(
        &self,
        specs: &[DeviceSpec],
        opened_as: impl Fn(&DeviceSpec) -> DeviceSpec,
        check: impl Fn(&DeviceSpec, &stack::Made) -> Result<(), YardError>,
    ) -> Result<(), (String, YardError)> {
        let failed = |spec: &DeviceSpec| {
            let name = spec.name().to_owned();
            |error| (name, error)
        };
        // What is refused without opening anything is refused before anything is made.
        for spec in specs {
            stack::check(spec).map_err(|error| failed(spec)(error.into()))?;
        }
        let open = |spec: &DeviceSpec| {
            let reserved = self.reserve(spec.name())?;
            let made = stack::open_provisional(&opened_as(spec))?;
            check(spec, &made)?;
            Ok((reserved, made))
        };
        let opened = specs.iter().map(|spec| open(spec).map_err(failed(spec)));
        let opened: Vec<_> = opened.collect::<Result<_, _>>()?;
        opened.iter().for_each(|(_, made)| made.keep());
        for (spec, (_reserved, made)) in specs.iter().zip(opened) {
            self.enter(spec.clone(), usize::MAX, made, Suspended::default())
                .map_err(failed(spec))?;
        }
        Ok(())
    }

    /// Opens a device by `make` and exports it.
    fn add_by(
        &self,
        spec: DeviceSpec,
        make: impl FnOnce(&DeviceSpec) -> Result<stack::Made, StackError>,
    ) -> Result<DeviceEntry, YardError> {
        let _reserved = self.reserve(spec.name())?;
        // Outside the lock: it opens files, and requests that only read the list must not wait.
        let made = make(&spec)?;
        self.enter(spec, usize::MAX, made, Suspended::default())
    }

    /// Exports an open device whose name is reserved, and inserts it at this index of the list.
    /// `suspended` are the exporters that wait for it.
    fn enter(
        &self,
        spec: DeviceSpec,
        index: usize,
        made: stack::Made,
        suspended: Suspended<'_>,
    ) -> Result<DeviceEntry, YardError> {
        if let (Some(pool), Some(control)) = (&made.pool, self.control.get())
            && let Err(error) = pool.announce(control)
        {
            tracing::warn!(device = spec.name(), "commands will not find the yard: {error}");
        }
        self.publish(DeviceEntry::new(spec, made), index, suspended)
    }

    /// Exports a device whose name is reserved, and inserts it at this index of the list.
    fn publish(
        &self,
        mut entry: DeviceEntry,
        index: usize,
        suspended: Suspended<'_>,
    ) -> Result<DeviceEntry, YardError> {
        self.export(&entry.spec, &entry.shared)?;
        entry.nvme = self.add_subsystem(&entry, suspended.subsystem);
        if let Some(vhost) = suspended.vhost {
            self.vhost.resume(vhost, entry.shared.clone());
        }
        let resumed = suspended.ublk.map_or(Ok(()), |ublk| ublk.resume(&entry.shared));
        entry.warn_of_nvme();
        for note in entry.notes() {
            tracing::debug!(device = entry.spec.name(), "{note}");
        }
        let mut table = self.table();
        let index = index.min(table.entries.len());
        table.entries.insert(index, entry.clone());
        // The device is there, also if its block device did not take it over.
        resumed.map(|()| entry)
    }

    /// Gives a disk to NBD and to the block files.
    fn export(&self, spec: &DeviceSpec, shared: &SharedDisk) -> Result<(), YardError> {
        let options = ExportOptions {
            read_only: shared.disk.limits().read_only,
            min_block_bytes: spec.number("min_block") as u32, // At most 64 KiB.
            description: describe(spec, shared.disk.as_ref()),
        };
        self.exports.add(spec.name(), shared.clone(), options)?;
        self.files.add(spec.name(), shared.clone()).map_err(|error| {
            // It was added just now, and no other request can remove it while its name is reserved.
            let _ = self.exports.remove(spec.name(), Duration::ZERO);
            error.into()
        })
    }

    /// Makes an NVMe subsystem of a device, if the yard has a table of them.
    fn add_subsystem(
        &self,
        entry: &DeviceEntry,
        suspended: Option<SuspendedSubsystem>,
    ) -> Option<NvmeExport> {
        let subsystems = Arc::clone(self.subsystems.get()?);
        let (name, disk) = (entry.spec.name(), entry.shared.clone());
        let added = match suspended {
            Some(suspended) => suspended.resume(disk),
            None => subsystems.add_contents(name, entry.contents().as_ref(), disk),
        };
        let nqn = added.map(|()| format!("{NQN_PREFIX}{name}")).map_err(|error| error.to_string());
        let nsid = subsystems.find_info(name).map(|info| info.nsid);
        Some(NvmeExport { subsystems, nqn, nsid })
    }

    /// Takes an unused device away from all exporters. If it `grows`, NVMe hosts, hypervisors and
    /// the kernel may use it: they wait for it. If this fails, the device is exported as before.
    fn withdraw(&self, entry: &DeviceEntry, grows: bool) -> Result<Suspended<'_>, YardError> {
        let name = entry.spec.name();
        // No client that comes after this is admitted, so that the counts below stay true.
        let _claim = entry.shared.claim.claim().ok_or_else(|| self.claimed(name))?;
        let (clients, opens) = self.users(name);
        let waits = grows && self.ublk.check_growth(name)?;
        let others = self.nbd_clients(name)
            + self.replays.count(name)
            + if waits { 0 } else { self.block_devices(name) };
        let clients = if grows { others } else { clients };
        let used = |opens| YardError::Used { name: name.to_owned(), clients, opens };
        if clients + opens > 0 {
            return Err(used(opens));
        }
        // A claim keeps no reader away.
        if !self.files.remove_unused(name)? {
            return Err(used(1));
        }
        self.exports.remove(name, Duration::ZERO)?;
        self.suspend(entry, grows).or_else(|error| {
            self.export(&entry.spec, &entry.shared)?;
            Err(error)
        })
    }

    /// Takes a device away from the exporters whose clients may wait for it.
    fn suspend(&self, entry: &DeviceEntry, grows: bool) -> Result<Suspended<'_>, YardError> {
        let name = entry.spec.name();
        let subsystems = self.subsystems.get().filter(|_| grows && entry.has_subsystem());
        let suspend = |subsystems: &Arc<Subsystems>| subsystems.suspend(name, SUSPEND_TIMEOUT);
        let subsystem = subsystems.map(suspend).transpose()?;
        let mut suspended = Suspended { subsystem, ..Suspended::default() };
        let mut suspend_others = || {
            suspended.vhost = self.vhost.suspend(name, SUSPEND_TIMEOUT)?;
            suspended.ublk = self.ublk.suspend(name, SUSPEND_TIMEOUT)?;
            Ok(())
        };
        if let Err(error) = suspend_others() {
            // The disk that they had.
            if let Some(vhost) = suspended.vhost {
                self.vhost.resume(vhost, entry.shared.clone());
            }
            suspended.subsystem.map(|it| it.resume(entry.shared.clone())).transpose()?;
            return Err(error);
        }
        if suspended.subsystem.is_none() {
            self.remove_subsystem(name, Duration::ZERO);
        }
        Ok(suspended)
    }

    /// Removes the NVMe subsystem of a device, if it has one.
    fn remove_subsystem(&self, name: &str, drain: Duration) {
        if let Some(subsystems) = self.subsystems.get() {
            // A device that NVMe cannot describe has none.
            let _ = subsystems.remove(name, drain);
        }
    }

    /// Reserves a name in the locked table.
    fn note_reserved(
        &self,
        table: &mut DeviceTable,
        name: &str,
        what: ReservedFor,
    ) -> Reserved<'_> {
        table.reserved.push((name.to_owned(), what));
        Reserved { devices: self, name: name.to_owned(), what }
    }

    /// Reserves the name of a device that is to be opened, and room in the list.
    fn reserve(&self, name: &str) -> Result<Reserved<'_>, YardError> {
        let reserved = {
            let mut table = self.table();
            table.check_open()?;
            if table.is_taken(name) {
                return Err(YardError::Taken { name: name.to_owned() });
            }
            if table.entries.len() + table.reserved.len() >= DEVICES_MAX {
                return Err(YardError::Full { max: DEVICES_MAX });
            }
            self.note_reserved(&mut table, name, ReservedFor::Open)
        };
        // A device of this name is gone and its block device is not: a file system on that one must
        // not get the data of the next device of the name.
        match self.ublk.find(name) {
            Some(UblkInfo { id, .. }) => {
                let (name, path) = (name.to_owned(), block_path(id));
                Err(YardError::UblkLeft { name, path })
            }
            None => Ok(reserved),
        }
    }

    /// Removes a device. Its clients' requests in flight are answered and the clients disconnected;
    /// those that take longer than `drain` are cut off. Replays on it are stopped. Completed writes
    /// are made durable, and the device is closed before its name is free. A request that was cut
    /// off, or another thread, may use it for longer; then its last user closes it.
    ///
    /// # Errors
    /// If there is no such device, or the kernel does not remove its block device. The device is
    /// removed then too; its server goes on, and `ublk remove` stops it.
    pub fn remove(&self, name: &str, drain: Duration) -> Result<(), YardError> {
        // In this order: the last one is dropped first.
        let (_reserved, entry) = {
            let mut table = self.table();
            let index = table.entries.iter().position(|entry| entry.spec.name() == name);
            let index = index.ok_or_else(|| table.unknown(name))?;
            let reserved = self.note_reserved(&mut table, name, ReservedFor::Remove);
            (reserved, table.entries.remove(index))
        };
        // Outside the lock: it waits for clients. All waits share the time.
        let deadline = Instant::now() + drain;
        self.replays.stop(name, None);
        self.mounts.remove(name, drain);
        let left = || deadline.saturating_duration_since(Instant::now());
        while self.replays.count(name) > 0 && !left().is_zero() {
            std::thread::sleep(CLOSE_POLL_INTERVAL);
        }
        self.vhost.remove(name, left());
        if self.ublk.find(name).is_some() {
            // The kernel may wait without a limit for the end of the block device.
            entry.flush_at_end();
        }
        let unserved = self.ublk.remove(name);
        let exported = self.exports.remove(name, left());
        self.remove_subsystem(name, left());
        let files = self.files.remove(name, left());
        entry.flush_at_end();
        files?;
        exported?;
        unserved
    }

    /// Stores the path of this yard's control socket, once; a later call changes nothing.
    pub fn set_control(&self, control: &Path) {
        let control = std::path::absolute(control).unwrap_or_else(|_| control.to_owned());
        // It is empty, or has the same value.
        let _ = self.control.set(control);
    }

    /// Removes an unused device, runs an operation that requires this, and opens the device again
    /// with `spec`; with its old specification if the operation fails. If it `grows` the device,
    /// NVMe hosts, a hypervisor and the kernel may use it: they keep it, and learn the new size.
    ///
    /// # Errors
    /// If there is no such device, clients use it, other requests have it for longer than 5 s, or
    /// the operation fails.
    pub fn rework<T>(
        &self,
        spec: DeviceSpec,
        grows: bool,
        work: impl FnOnce() -> Result<T, YardError>,
    ) -> Result<T, YardError> {
        self.rework_within(SUSPEND_TIMEOUT, spec, grows, work)
    }

    /// As [`Devices::rework`]; other requests may have the device for this long.
    fn rework_within<T>(
        &self,
        timeout: Duration,
        spec: DeviceSpec,
        grows: bool,
        work: impl FnOnce() -> Result<T, YardError>,
    ) -> Result<T, YardError> {
        let name = spec.name().to_owned();
        let _flusher = self.ublk.begin_reopen()?;
        let (index, entry, _reserved) = {
            let mut table = self.table();
            table.check_open()?;
            let index = table.entries.iter().position(|entry| entry.spec.name() == name);
            let index = index.ok_or_else(|| table.unknown(&name))?;
            let reserved = self.note_reserved(&mut table, &name, ReservedFor::Reopen);
            (index, table.entries.remove(index), reserved)
        };
        let suspended = match self.withdraw(&entry, grows) {
            Ok(suspended) => suspended,
            Err(error) => {
                let mut table = self.table();
                let index = index.min(table.entries.len());
                table.entries.insert(index, entry);
                return Err(error);
            }
        };
        // Now: what was in flight has completed.
        if let Err(error) = entry.check_latch() {
            self.publish(entry, index, suspended)?;
            return Err(error);
        }
        let released = entry.release();
        // A request that lists the devices may have it for a moment longer, and an open volume can
        // neither be changed nor opened again.
        let deadline = Instant::now() + timeout;
        while released.is_held() && Instant::now() < deadline {
            std::thread::sleep(CLOSE_POLL_INTERVAL);
        }
        if let Some(entry) = released.restore() {
            self.publish(entry, index, suspended)?;
            return Err(YardError::Held { name });
        }
        let done = work();
        let spec = if done.is_ok() { spec } else { released.spec };
        let made = stack::open_to_serve(&spec)?;
        self.enter(spec, index, made, suspended)?;
        done
    }

    /// Opens a `file` device with the length that another program has given to the file. If the
    /// file has become longer, NVMe hosts, a hypervisor and the kernel may use the device: they
    /// learn the new size.
    ///
    /// # Errors
    /// If there is no such device, it is no file, another file is at the path, the length is not a
    /// multiple of the device's blocks, clients use the device that may not, or a flush has failed.
    pub fn rescan(&self, name: &str) -> Result<DeviceEntry, YardError> {
        let entry = self.find(name)?;
        let refused = |why: String| YardError::Rescan { name: name.to_owned(), why };
        let mut spec = entry.spec.clone();
        // Other kinds of devices have no parameter of this name.
        let path = (spec.kind().name == "file").then(|| spec.text("path"));
        let path = path.flatten().ok_or_else(|| {
            refused("only devices of the kind `file` have a file of other programs".to_owned())
        })?;
        let probed = FileDevice::probe(Path::new(&path));
        let (len, identity) = probed.map_err(|error| refused(error.to_string()))?;
        if identity != entry.identity {
            let why = format!("another file is at `{path}`; remove the device and add it again");
            return Err(refused(why));
        }
        let block = u64::from(entry.disk.geometry().logical_block_bytes);
        if len == 0 || !len.is_multiple_of(block) {
            return Err(refused(format!(
                "`{path}` has {len} bytes; expected a multiple of {block}, and not 0"
            )));
        }
        let has = entry.disk.geometry().len_bytes();
        // The same length again tells it to a block device that did not take it over.
        if len == has && !self.ublk.is_outdated(name) {
            return Ok(entry);
        }
        drop(entry);
        if spec.is_set("size") {
            spec.set_text("size", &len.to_string()).map_err(crate::uri::UriError::from)?;
        }
        self.rework(spec, len >= has, || Ok(()))?;
        self.find(name)
    }

    /// Replaces the specification of a device whose parameters were changed in use.
    pub(crate) fn replace_spec(&self, spec: DeviceSpec) {
        let mut table = self.table();
        let mut entries = table.entries.iter_mut();
        if let Some(entry) = entries.find(|entry| entry.spec.name() == spec.name()) {
            entry.spec = spec;
        }
    }

    /// The number of a device's clients, and how many times its file is open.
    fn users(&self, name: &str) -> (u64, u64) {
        (self.clients(name), self.files.find_info(name).map_or(0, |info| info.opens))
    }

    /// The number of a device's NBD clients, NVMe hosts, hypervisors, block devices and replays.
    pub fn clients(&self, name: &str) -> u64 {
        let subsystem = self.subsystems.get().and_then(|subsystems| subsystems.find_info(name));
        let hosts = subsystem.map_or(0, |subsystem| subsystem.controllers as u64);
        let (files, replays) = (self.block_devices(name), self.replays.count(name));
        self.nbd_clients(name) + hosts + self.hypervisors(name) + files + replays
    }

    /// The number of block devices of the kernel that a device is served as: 0 or 1. The kernel is
    /// its client, whether a program has it open or not, and from the beginning of a start to the
    /// end of a stop.
    fn block_devices(&self, name: &str) -> u64 {
        self.ublk.is_client(name).into()
    }

    /// The number of hypervisors that use a device: 0 or 1.
    fn hypervisors(&self, name: &str) -> u64 {
        self.vhost.find(name).map_or(0, |(_, info)| info.is_connected.into())
    }

    /// The NVMe hosts of a device.
    pub fn hosts(&self, name: &str) -> Vec<HostView> {
        let subsystem = self.subsystems.get().and_then(|subsystems| subsystems.find_info(name));
        let hosts = subsystem.map(|subsystem| subsystem.hosts).unwrap_or_default();
        let view = |host: HostInfo| HostView {
            nqn: host.nqn,
            subsystem: host.subsystem,
            peer: host.peer,
            controller: host.controller,
            queues: host.queues.len() as u64,
            queue_numbers: host.queues,
        };
        hosts.into_iter().map(view).collect()
    }

    fn nbd_clients(&self, name: &str) -> u64 {
        let exports = self.exports.list();
        let export = exports.iter().find(|export| export.name == name);
        export.map_or(0, |export| export.clients as u64)
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
                let (change, name) = ("change zones of", name.to_owned());
                Err(YardError::ChangesUsed { change, name, clients, opens })
            }
            _ => Ok(()),
        }
    }

    /// Whether writes of a trace may be replayed on a device. The caller has claimed it, so that no
    /// client comes afterwards.
    ///
    /// # Errors
    /// If, without `force`, clients use it.
    pub fn may_replay(&self, name: &str, force: bool) -> Result<(), YardError> {
        match self.users(name) {
            (clients, opens) if clients + opens > 0 && !force => {
                let (change, name) = ("replay writes on", name.to_owned());
                Err(YardError::ChangesUsed { change, name, clients, opens })
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

    /// Mounts the zonefs of a device. `ended` is called after it is unmounted. Until then NBD
    /// clients are refused, and the block file cannot be opened for writing. `force` mounts a
    /// device that clients use; they go on.
    ///
    /// # Errors
    /// If there is no such device, it is mounted or has no zonefs, the system refuses, or, without
    /// `force`, clients use it.
    pub fn mount_zonefs(
        &self,
        name: &str,
        dir: &Path,
        options: MountOptions,
        force: bool,
        ended: impl FnOnce() + Send + Sync + 'static,
    ) -> Result<MountView, YardError> {
        let claim = |entry: &DeviceEntry| self.claim(entry, force);
        self.mounts.mount(name, || self.find(name), claim, dir, options, ended)
    }

    /// The error about a device that another request has claimed.
    pub(crate) fn claimed(&self, name: &str) -> YardError {
        let owned = name.to_owned();
        match self.zonefs_place(name) {
            Some(dir) => YardError::Mounted { name: owned, dir: Some(dir) },
            None => {
                let by = match self.replays.has_claimed(name) {
                    true => "a replay",
                    false => "another request (a mount, `zone load` or `replay`)",
                };
                YardError::Claimed { name: owned, by }
            }
        }
    }

    /// Claims a device for a file system.
    fn claim(&self, entry: &DeviceEntry, force: bool) -> Result<DiskClaim, YardError> {
        let name = entry.spec.name().to_owned();
        let claim = entry.shared.claim.claim().ok_or_else(|| self.claimed(&name))?;
        // After the claim: a client that comes later is refused.
        match self.users(&name) {
            (clients, opens) if clients + opens > 0 && !force => {
                Err(YardError::MountUsed { name, clients, opens })
            }
            _ => Ok(claim),
        }
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
    pub fn find(&self, name: &str) -> Result<DeviceEntry, YardError> {
        let table = self.table();
        let found = table.entries.iter().find(|entry| entry.spec.name() == name).cloned();
        found.ok_or_else(|| table.unknown(name))
    }

    /// The disks of all zoned devices. A device that a request has cannot be replaced, so a request
    /// that asks slow drives for their zones has no others.
    pub fn zoned_disks(&self) -> Vec<Arc<dyn Disk>> {
        let table = self.table();
        let zoned = table.entries.iter().filter(|entry| entry.disk.geometry().zones.is_some());
        zoned.map(|entry| Arc::clone(&entry.disk)).collect()
    }

    /// All devices, in the order in which they were added.
    pub fn list(&self) -> Vec<DeviceEntry> {
        self.table().entries.clone()
    }

    fn table(&self) -> MutexGuard<'_, DeviceTable> {
        // Every change of a list is one call: a holder that panicked has left it consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The identity of this machine, from which those of its NVMe namespaces are derived, except of
/// volumes; empty if it has none.
fn machine_id() -> String {
    let read = std::fs::read_to_string("/etc/machine-id");
    read.map(|id| id.trim().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use blockyard_core::blocking::Io;
    use blockyard_core::{Flags, Sector};
    use blockyard_testing::temp_dir::TempDir;
    use virtio_driver::{VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags};

    use super::*;
    use crate::uri;
    use crate::vhost::VhostPlace;

    const DRAIN: Duration = Duration::from_secs(1);
    const EIO: i32 = 5;

    fn spec(uri: &str) -> DeviceSpec {
        uri::parse(uri).unwrap()
    }

    /// Adds a zoned device in files with a completed write that cannot become durable, because the
    /// superblock is gone.
    pub(super) fn add_lossy(devices: &Devices, place: &TempDir, name: &str) {
        let path = place.fresh();
        let zoned = "zoned=1&size=16M&zone_size=1M";
        let uri = format!("null:///{name}?{zoned}&backing={}", path.display());
        let entry = devices.add(spec(&uri)).unwrap();
        let mut io = Io::new(entry.disk.open().unwrap(), 4096);
        io.write(Sector(0), &[1; 4096], Flags::NONE).unwrap();
        std::fs::remove_file(path.join("superblock")).unwrap();
    }

    /// The bug: a latched device was opened again under its clients, whose next flush succeeded.
    #[test]
    fn latched_device_is_not_opened_again_under_a_hypervisor() {
        let devices = Devices::new();
        let place = TempDir::new(&std::env::temp_dir(), "blockyard-latched");
        add_lossy(&devices, &place, "a");
        let path = place.fresh();
        let at = VhostPlace::of("a", &format!("unix:{}", path.display())).unwrap();
        devices.serve_vhost(BoundVhost::bind(&at).unwrap()).unwrap();
        let features = VirtioFeatureFlags::VERSION_1.bits() | 1 << 9 | 1 << 12;
        let transport = VhostUser::new(path.to_str().unwrap(), features).unwrap();
        let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
        let mut queues = VirtioBlkQueue::setup_queues(transport.as_mut(), 1, 16).unwrap();
        let mut flush = || {
            queues[0].flush(()).unwrap();
            transport.get_submission_notifier(0).notify().unwrap();
            loop {
                if let Some(done) = queues[0].completions().next() {
                    return done.ret;
                }
                std::thread::yield_now();
            }
        };
        assert_eq!(flush(), -EIO);
        let spec = devices.find("a").unwrap().spec;
        let rework = || devices.rework(spec.clone(), true, || panic!("the device is open"));
        let refused: Result<(), _> = rework();
        assert!(matches!(refused, Err(YardError::Latched { name, .. }) if name == "a"));
        assert_eq!(flush(), -EIO, "it has the same disk");
        assert!(devices.vhost().find("a").unwrap().1.is_connected);
        assert!(devices.exports().list().len() == 1 && devices.list().len() == 1);
    }

    #[test]
    fn devices_come_and_go() {
        let devices = Devices::new();
        devices.add(spec("null:///a?size=1G")).unwrap();
        devices.add(spec("null:///b?size=1G")).unwrap();
        let error = devices.add(spec("null:///a?size=2G")).map(drop).unwrap_err();
        assert_eq!(error.code(), "taken");
        devices.remove("a", DRAIN).unwrap();
        let error = devices.remove("a", DRAIN).unwrap_err();
        assert_eq!(error.code(), "no_such_device");
        let names: Vec<_> = devices.list().iter().map(|e| e.spec.name().to_owned()).collect();
        assert_eq!(names, ["b"]);
        assert_eq!(devices.exports().list().len(), 1);
        devices.add(spec("null:///a?size=2G")).unwrap();
    }

    #[test]
    fn a_device_that_cannot_be_made_leaves_nothing() {
        let devices = Devices::new();
        let error = devices.add(spec("null:///a?zoned=1&zone_size=3M")).map(drop).unwrap_err();
        assert_eq!(error.code(), "invalid");
        assert_eq!(error.blame().0.as_deref(), Some("zone_size"));
        assert!(devices.list().is_empty());
        assert!(devices.exports().list().is_empty());
    }

    #[test]
    fn a_name_is_taken_while_its_device_is_made() {
        // The bug: two concurrent requests for one name both opened the device's files, and
        // truncated a trace that the other was writing, before one of them was refused.
        let devices = Devices::new();
        let entry = devices.add_by(spec("null:///a?size=1G"), |made| {
            let error = devices.add_by(spec("null:///a?size=2G"), |_| panic!("it is made twice"));
            assert_eq!(error.map(drop).unwrap_err().code(), "taken");
            assert_eq!(devices.find("a").map(drop).unwrap_err().code(), "no_such_device");
            assert!(devices.add(spec("null:///b?size=1G")).is_ok());
            stack::open(made)
        });
        assert!(entry.is_ok());
        assert_eq!(devices.list().len(), 2);
        // A failed request releases the name, and so does a removal.
        let bad = spec("null:///c?zoned=1&zone_size=3M");
        assert!(devices.add(bad).is_err() && devices.remove("a", DRAIN).is_ok());
        assert!(devices.add(spec("null:///a?size=1G")).is_ok());
        assert!(devices.add(spec("null:///c?size=1G")).is_ok());
    }

    /// A list of devices that another request had just taken kept the device open while it was
    /// changed: the change failed, the device could not be opened again, and the yard lost it.
    #[test]
    fn a_device_is_changed_when_no_request_has_it_any_more() {
        let devices = Devices::new();
        devices.add(spec("null:///a?size=1G")).unwrap();
        let held = devices.list();
        let disk = Arc::downgrade(&held[0].disk);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while devices.find("a").is_ok() {
                    std::thread::yield_now();
                }
                drop(held);
            });
            let holders = || Ok(disk.strong_count());
            let holders = devices.rework(spec("null:///a?size=2G"), false, holders);
            assert_eq!(holders.unwrap(), 0);
        });
        assert_eq!(devices.find("a").unwrap().disk.geometry().len_bytes(), 2 << 30);
    }

    /// The bug: a device that a request had for too long could not be opened again, and the yard
    /// lost it.
    #[test]
    fn a_device_that_a_request_keeps_is_not_changed_and_stays() {
        let devices = Devices::new();
        devices.add(spec("null:///a?size=1G")).unwrap();
        devices.add(spec("null:///b?size=1G")).unwrap();
        let held = devices.find("a").unwrap();
        let change = |work: fn() -> Result<(), YardError>| {
            devices.rework_within(Duration::ZERO, spec("null:///a?size=2G"), false, work)
        };
        let refused = change(|| panic!("the device is open"));
        assert!(matches!(refused, Err(YardError::Held { .. })));
        let now = devices.find("a").unwrap();
        assert!(Arc::ptr_eq(&now.disk, &held.disk) && Arc::ptr_eq(&now.shared.disk, &held.disk));
        assert!(devices.files().find_info("a").is_some());
        assert!(devices.exports().list().iter().any(|export| export.name == "a"));
        let names: Vec<_> = devices.list().iter().map(|it| it.spec.name().to_owned()).collect();
        assert_eq!(names, ["a", "b"]);
        drop((held, now));
        change(|| Ok(())).unwrap();
        assert_eq!(devices.find("a").unwrap().disk.geometry().len_bytes(), 2 << 30);
    }

    /// The bug: a request that read the zones of a slow drive kept all devices open meanwhile.
    #[test]
    fn who_reads_zones_keeps_no_other_device() {
        let devices = Devices::new();
        devices.add(spec("null:///a?size=1G")).unwrap();
        devices.add(spec("null:///z?size=1G&zoned=1")).unwrap();
        let disks = devices.zoned_disks();
        assert!(disks.len() == 1 && disks[0].name() == "z");
        let change = |name: &str| {
            let spec = spec(&format!("null:///{name}?size=2G"));
            devices.rework_within(Duration::ZERO, spec, false, || Ok(()))
        };
        change("a").unwrap();
        assert!(matches!(change("z"), Err(YardError::Held { .. })));
    }

    #[test]
    fn a_device_that_a_mount_has_claimed_is_not_changed_and_stays() {
        let devices = Devices::new();
        let entry = devices.add(spec("null:///a?size=1G")).unwrap();
        let change = || devices.rework(spec("null:///a?size=2G"), false, || Ok(()));
        let claim = entry.shared.claim.claim();
        let error = change().unwrap_err().to_string();
        assert!(error.contains("is in use by another request"), "{error}");
        drop(claim);
        assert!(devices.files().find_info("a").is_some() && devices.list().len() == 1);
        assert!(devices.exports().list().iter().any(|export| export.name == "a"));
        drop(entry);
        change().unwrap();
        assert_eq!(devices.find("a").unwrap().disk.geometry().len_bytes(), 2 << 30);
        // New clients are admitted again.
        assert!(!devices.find("a").unwrap().shared.claim.is_claimed());
    }

    #[test]
    fn rescan_serves_the_length_that_a_file_has_now() {
        let place = TempDir::new(&std::env::temp_dir(), "blockyard-rescan");
        let path = place.fresh();
        let set_len = |len| File::create(&path).unwrap().set_len(len).unwrap();
        set_len(1 << 20);
        let devices = Devices::new();
        let uri = format!("file:///a?path={}&size=1M", path.display());
        drop(devices.add(spec(&uri)).unwrap());
        let has = || devices.find("a").unwrap().disk.geometry().len_bytes();
        let rescan = || devices.rescan("a").map(|it| it.disk.geometry().len_bytes());
        let same = devices.find("a").unwrap().disk;
        assert!(Arc::ptr_eq(&same, &devices.rescan("a").unwrap().disk));
        drop(same);
        set_len(2 << 20);
        assert_eq!((has(), rescan().unwrap(), has()), (1 << 20, 2 << 20, 2 << 20));
        set_len((3 << 20) + 1);
        let error = rescan().unwrap_err();
        assert_eq!(error.code(), "rescan_failed");
        assert!(error.to_string().contains("expected a multiple of 512"), "{error}");
        set_len(1 << 20);
        assert_eq!(rescan().unwrap(), 1 << 20);
        std::fs::rename(&path, place.fresh()).unwrap();
        set_len(4 << 20);
        let error = rescan().unwrap_err().to_string();
        assert!(error.contains("another file is at"), "{error}");
        devices.add(spec("null:///n?size=1G")).unwrap();
        let error = devices.rescan("n").map(drop).unwrap_err().to_string();
        assert!(error.contains("cannot rescan `n`: only devices of the kind `file`"), "{error}");
        assert_eq!(has(), 1 << 20);
    }

    /// The bug: the error about a claimed device named a replay that only read, and had no claim.
    #[test]
    fn the_error_about_a_claimed_device_names_a_replay_that_writes() {
        let devices = Devices::new();
        devices.add(spec("null:///a?size=1G")).unwrap();
        let stop = blockyard_trace::ReplayStop::new();
        let _reads = devices.replays().enter("a", None, false, &stop).unwrap();
        let is_named = || devices.claimed("a").to_string().contains("in use by a replay;");
        assert!(!is_named());
        let _writes = devices.replays().enter("a", None, true, &stop).unwrap();
        assert!(is_named());
    }

    /// The bug: a block device that was being started was no client until it was there, so that a
    /// zonefs was mounted, or the device replaced, meanwhile.
    #[test]
    fn a_block_device_that_is_being_started_is_a_client() {
        let devices = Devices::new();
        let entry = devices.add(spec("null:///a?size=1G")).unwrap();
        let changing = devices.ublk().begin_change("a").unwrap();
        assert_eq!((devices.clients("a"), devices.clients("b")), (1, 0));
        let change = || devices.rework(spec("null:///a?size=2G"), true, || Ok(()));
        assert!(matches!(change(), Err(YardError::Used { clients: 1, opens: 0, .. })));
        let claimed = devices.claim(&entry, false).map(drop);
        assert!(matches!(claimed, Err(YardError::MountUsed { clients: 1, .. })));
        let zones = devices.may_change_zones("a", false);
        assert!(matches!(zones, Err(YardError::ChangesUsed { clients: 1, .. })));
        // No other request starts or stops it.
        let place = UblkPlace { device: "a".to_owned(), id: None };
        assert!(matches!(devices.serve_ublk(&place), Err(YardError::UblkBusy { .. })));
        assert!(matches!(devices.ublk().unserve("a", true), Err(YardError::UblkBusy { .. })));
        drop((changing, entry));
        change().unwrap();
        assert!(matches!(devices.ublk().unserve("a", true), Err(YardError::NoUblk { .. })));
    }

    #[test]
    fn an_unknown_name_gets_the_nearest() {
        let devices = Devices::new();
        devices.add(spec("null:///zoned0?size=1G")).unwrap();
        let error = devices.find("zoned1").map(drop).unwrap_err().to_string();
        assert_eq!(error, "there is no device `zoned1`; did you mean `zoned0`?");
    }
}
