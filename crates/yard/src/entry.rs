//! A device of the daemon: its specification, the open device, and a description for people.

use std::sync::{Arc, Weak};
use std::time::Instant;

use blockyard_core::Disk;
use blockyard_core::claim::ClaimState;
use blockyard_core::rmw::SharedDisk;
use blockyard_core::zone::gate::GateMode;
use blockyard_file::FileStatus;
use blockyard_nvme::Subsystems;
use blockyard_nvme::identify::DiskContents;
use blockyard_ram::Ram;
use blockyard_store::PoolBacking;
use blockyard_sync::rmw_lock::RmwLock;
use blockyard_volume::{Pool, Running};
use blockyard_zone_media::{Files, Media};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::YardError;
use crate::scheduler;
use crate::size::Bytes;
use crate::spec::DeviceSpec;
use crate::stack::{Made, pool_path};

/// The most requests of the control API that wait for one device at once.
pub const WORK_MAX: usize = 4;

/// A device of the daemon.
#[derive(Clone)]
pub struct DeviceEntry {
    /// The specification of the device.
    pub spec: DeviceSpec,
    /// The device.
    pub disk: Arc<dyn Disk>,
    /// Notes on parameters that were corrected when it was opened.
    notes: Vec<String>,
    /// The device as a RAM disk, if it is one.
    pub ram: Option<Arc<Ram>>,
    /// The pool that the device is in, if it is a volume.
    pub pool: Option<Arc<Running>>,
    /// How the device accesses its file, if it is a `file` device.
    pub file: Option<FileStatus>,
    /// The files that keep the data and zones of the device, if it is zoned and has such files.
    zone_files: Option<Weak<Files>>,
    /// What tells the data of the device from those of one that was made again at the same place.
    pub(crate) identity: String,
    /// The device as an NVMe subsystem, if the yard has a table of them.
    pub(crate) nvme: Option<NvmeExport>,
    /// The time at which it was opened.
    pub since: Instant,
    work: Arc<Semaphore>,
    /// The disk with the lock and the claim that its exporters share.
    pub(crate) shared: SharedDisk,
}

/// A device that no exporter has any more. It is closed when no request has it.
pub(crate) struct ReleasedEntry {
    disk: Weak<dyn Disk>,
    ram: Option<Weak<Ram>>,
    /// The open pool, and its state, which a stream of a volume may have for longer.
    pool: Option<(Weak<Running>, Weak<Pool<PoolBacking>>)>,
    file: Option<FileStatus>,
    zone_files: Option<Weak<Files>>,
    lock: Arc<RmwLock>,
    claim: Arc<ClaimState>,
    pub(crate) spec: DeviceSpec,
    notes: Vec<String>,
    pub(crate) identity: String,
    since: Instant,
    work: Arc<Semaphore>,
}

impl ReleasedEntry {
    /// Whether a request still has the device.
    pub(crate) fn is_held(&self) -> bool {
        self.disk.strong_count() > 0
    }

    /// Whether a request, or another device, still has the pool.
    pub(crate) fn is_pool_held(&self) -> bool {
        let is_held = |(running, pool): &(Weak<Running>, Weak<Pool<PoolBacking>>)| {
            running.strong_count() > 0 || pool.strong_count() > 0
        };
        self.pool.as_ref().is_some_and(is_held)
    }

    /// The device as it was, if a request still has it; it is not exported yet.
    pub(crate) fn restore(&self) -> Option<DeviceEntry> {
        let disk = self.disk.upgrade()?;
        let ram = self.ram.as_ref().map(|ram| ram.upgrade().ok_or(())).transpose().ok()?;
        let pool = self.pool.as_ref().map(|(pool, _)| pool.upgrade().ok_or(()));
        let pool = pool.transpose().ok()?;
        let (lock, claim) = (Arc::clone(&self.lock), Arc::clone(&self.claim));
        Some(DeviceEntry {
            spec: self.spec.clone(),
            shared: SharedDisk { disk: Arc::clone(&disk), lock, claim },
            disk,
            notes: self.notes.clone(),
            ram,
            pool,
            file: self.file.clone(),
            zone_files: self.zone_files.clone(),
            identity: self.identity.clone(),
            nvme: None,
            since: self.since,
            work: Arc::clone(&self.work),
        })
    }
}

/// A device as an NVMe subsystem.
#[derive(Clone)]
pub(crate) struct NvmeExport {
    pub(crate) subsystems: Arc<Subsystems>,
    /// The NQN, or the reason for which the device has no subsystem.
    pub(crate) nqn: Result<String, String>,
    /// The number of the device as a namespace of the subsystem of all devices.
    pub(crate) nsid: Option<u32>,
}

impl DeviceEntry {
    /// A device that was opened just now, and is not exported yet.
    pub(crate) fn new(spec: DeviceSpec, made: Made) -> DeviceEntry {
        let Made { disk, notes, ram, pool, file, zone_files, identity, .. } = made;
        DeviceEntry {
            spec,
            // One lock for sub-block writes by any protocol.
            shared: SharedDisk::from(Arc::clone(&disk)),
            disk,
            notes,
            ram,
            pool,
            file,
            zone_files,
            identity,
            nvme: None,
            since: Instant::now(),
            work: Arc::new(Semaphore::new(WORK_MAX)),
        }
    }

    /// The device as one that this process no longer keeps open.
    pub(crate) fn release(self) -> ReleasedEntry {
        let DeviceEntry { spec, disk, notes, ram, pool, file, zone_files, .. } = self;
        let DeviceEntry { identity, since, work, shared, .. } = self;
        ReleasedEntry {
            disk: Arc::downgrade(&disk),
            ram: ram.as_ref().map(Arc::downgrade),
            pool: pool.as_ref().map(|pool| (Arc::downgrade(pool), Arc::downgrade(pool.pool()))),
            file,
            zone_files,
            lock: shared.lock,
            claim: shared.claim,
            spec,
            notes,
            identity,
            since,
            work,
        }
    }

    /// What has failed, so that writes and flushes fail until the device is opened again; `None`
    /// if they do not.
    pub fn latched_by(&self) -> Option<&'static str> {
        let zone_files = || self.zone_files.as_ref()?.upgrade();
        if self.file.as_ref().is_some_and(FileStatus::is_latched) {
            Some("a flush or a write with FUA of its file")
        } else if zone_files().is_some_and(|files| files.is_latched()) {
            Some("a write or a sync of its files")
        } else if self.pool.as_ref().is_some_and(|pool| pool.pool().is_latched()) {
            Some("a write or a sync of its pool")
        } else {
            None
        }
    }

    /// Whether the device has a latch of its own. That of a volume is its pool's.
    pub(crate) fn has_latch(&self) -> bool {
        self.file.is_some() || self.zone_files.is_some()
    }

    /// Checks that clients of the device may go on after it was closed and opened again.
    ///
    /// # Errors
    /// If the device is latched: completed writes may be lost, and a flush after the opening would
    /// succeed.
    pub(crate) fn check_latch(&self) -> Result<(), YardError> {
        match self.latched_by() {
            Some(by) => Err(self.lossy_after(by)),
            None => Ok(()),
        }
    }

    /// The error of a device that may lose completed writes when it is closed, because `by` has
    /// failed.
    fn lossy_after(&self, by: &'static str) -> YardError {
        let again = match self.pool {
            Some(_) => "remove all devices of its pool and add them again",
            None => "remove the device and add it again",
        };
        YardError::Latched { name: self.spec.name().to_owned(), by, again }
    }

    /// Makes the completed writes durable that a failed closing of the device would lose. The
    /// files of zones and pools have such writes; a `file` device has none, because its file has
    /// them.
    ///
    /// # Errors
    /// If the device is latched, or is latched by this. Its clients get errors then.
    pub(crate) fn flush_before_closing(&self) -> Result<(), YardError> {
        self.check_latch()?;
        let zone_files = self.zone_files.as_ref().and_then(Weak::upgrade);
        let is_flushed = zone_files.is_none_or(|files| files.flush().is_ok())
            && self.pool.as_ref().is_none_or(|pool| pool.flush_in_turn().is_ok());
        match is_flushed {
            true => Ok(()),
            false => Err(self.lossy_after(self.latched_by().unwrap_or("a flush"))),
        }
    }

    /// [`DeviceEntry::flush_before_closing`] of a device that is closed in any case. Logs an error.
    pub(crate) fn flush_at_end(&self) {
        // What a latched device has lost is known.
        if self.latched_by().is_none()
            && let Err(error) = self.flush_before_closing()
        {
            let device = self.spec.name();
            tracing::error!(device, %error, "completed writes may be lost");
        }
    }

    /// What tells the data of the device from others that had its name, for hosts that may have
    /// some of them in a cache. Only a volume has that; a rollback changes it. It is the same on
    /// each machine that has the pool.
    pub(crate) fn contents(&self) -> Option<DiskContents> {
        // The volume is open, so the pool has it.
        let live = self.pool.as_ref()?.pool().find(self.spec.name()).ok()?;
        Some(DiskContents { origin: self.identity.clone(), version: live.meta.guid })
    }

    /// The device as a subsystem, while NVMe is served.
    fn served_nvme(&self) -> Option<&NvmeExport> {
        self.nvme.as_ref().filter(|export| export.subsystems.is_served())
    }

    /// Whether the device has an NVMe subsystem, served or not.
    pub(crate) fn has_subsystem(&self) -> bool {
        self.nvme.as_ref().is_some_and(|export| export.nqn.is_ok())
    }

    /// The NQN of its NVMe subsystem, if NVMe is served and can describe the device.
    pub fn nqn(&self) -> Option<&str> {
        self.served_nvme().and_then(|export| export.nqn.as_deref().ok())
    }

    /// The NSID of the device in the NVMe subsystem of all devices, if that is served.
    pub fn nsid(&self) -> Option<u32> {
        let export = self.served_nvme().filter(|export| export.subsystems.all_nqn().is_some());
        export.and_then(|export| export.nsid)
    }

    /// Notes: the parameters that were corrected when it was opened, and why no NVMe host can use
    /// the device while NVMe is served.
    pub fn notes(&self) -> Vec<String> {
        self.notes.iter().cloned().chain(self.nvme_note()).collect()
    }

    /// Logs why no NVMe host can use the device while NVMe is served.
    pub(crate) fn warn_of_nvme(&self) {
        if let Some(note) = self.nvme_note() {
            tracing::warn!(device = self.spec.name(), "{note}");
        }
    }

    fn nvme_note(&self) -> Option<String> {
        let NvmeExport { subsystems, nqn, .. } = self.served_nvme()?;
        match nqn {
            Err(refusal) => Some(format!("not served over NVMe: {refusal}")),
            Ok(_) if subsystems.access().allowed.permits_none(self.spec.name()) => Some(
                "no NVMe host may use it: neither the device nor `*` has an allow list; start the \
                 yard with one for it (--nvme-allow DEVICE=NQN), or with one for `*`"
                    .to_owned(),
            ),
            Ok(_) => None,
        }
    }

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

/// A device in one line, for people.
pub fn describe(spec: &DeviceSpec, disk: &dyn Disk) -> String {
    let geometry = disk.geometry();
    let mut text = format!("{} {}", disk.kind(), Bytes(geometry.len_bytes()));
    if spec.kind().name == "null" {
        text += &match spec.text("backing") {
            Some(backing) => format!(", keeps data in {backing}"),
            None if spec.switch("memory_backed") => ", keeps data in memory".to_owned(),
            None => ", keeps nothing".to_owned(),
        };
    }
    if spec.kind().name == "smr" {
        text += &match (spec.text("device"), spec.text("backing")) {
            (Some(device), _) => format!(", drives {device}"),
            (None, Some(backing)) => format!(", keeps data in {backing}"),
            (None, None) => ", keeps data in memory".to_owned(),
        };
    }
    if spec.kind().name == "volume" {
        text += &format!(", in {}", pool_path(spec).display());
    }
    if spec.kind().name == "file" {
        text += &format!(", {}", spec.text("path").unwrap_or_default());
    }
    if let Some(ram) = describe_ram(spec) {
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
            GateMode::ZoneWritePlug => ", one write of a zone at a time",
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

/// A description of a RAM disk from its parameters, for people; `None` for other devices.
fn describe_ram(spec: &DeviceSpec) -> Option<String> {
    if spec.kind().name != "ram" {
        return None;
    }
    let mut text = ", compressed by ".to_owned() + ["lz4", "lz4hc", "zstd"][spec.choice("algo")];
    if spec.number("unit") != 4096 {
        text += &format!(" in units of {}", Bytes(spec.number("unit")));
    }
    if spec.switch("dedup") {
        text += ", equal blocks stored once";
    }
    if spec.number("mem_limit") != 0 {
        text += &format!(", {} of memory at most", Bytes(spec.number("mem_limit")));
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{stack, uri};

    #[test]
    fn a_device_is_described_in_a_line() {
        let uri = "null:///z?size=1G&bs=4k&zoned=1&zone_size=64M&zone_capacity=48M&zone_nr_conv=2\
                   &zone_max_open=3&zone_max_active=5";
        let spec = uri::parse(uri).unwrap();
        let made = stack::open(&spec).unwrap();
        assert_eq!(
            describe(&spec, made.disk.as_ref()),
            "null 1G, keeps nothing, 4k blocks, 16 zones of 64M (48M writable), 2 conventional, \
             3 open at most, 5 active at most"
        );
    }
}
