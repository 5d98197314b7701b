//! zonefs on the yard's devices: made, mounted and unmounted by name.
#![allow(clippy::disallowed_types)] // The table of mounts is control plane.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockyard_core::claim::DiskClaim;
use blockyard_zonefs::format::{Format, Formatted, check_label, format};
use blockyard_zonefs::{FileKind, Hyphenated, Mount, MountOptions, ZoneFs};

use crate::entry::DeviceEntry;
use crate::error::YardError;
use crate::view::{FormatRequest, FormatView, MountView};

/// The mounted file systems.
#[derive(Default)]
pub(crate) struct Mounts {
    slots: Mutex<Vec<MountSlot>>,
    /// Notified when a slot has become free.
    freed: Condvar,
}

/// A device whose file system is mounted, or is being made, mounted or unmounted.
struct MountSlot {
    device: String,
    /// `None` while a file system is made, mounted or unmounted on it.
    mount: Option<Mount>,
    /// Whether the device is being removed: then its mount must be dropped.
    going: bool,
}

/// A device that no other request can format or mount until this is dropped.
struct Reserved<'m> {
    mounts: &'m Mounts,
    device: String,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        let free = |slot: &MountSlot| slot.device != self.device || slot.mount.is_some();
        self.mounts.slots().retain(free);
        self.mounts.freed.notify_all();
    }
}

impl Mounts {
    /// Makes a file system.
    ///
    /// # Errors
    /// If one is mounted on the device, the request is invalid, or the device refuses.
    pub(crate) fn format(
        &self,
        entry: &DeviceEntry,
        request: &FormatRequest,
    ) -> Result<FormatView, YardError> {
        let wanted = read_format(request)?;
        let _reserved = self.reserve(entry.spec.name())?;
        let made = format(entry.disk.as_ref(), &wanted)?;
        Ok(FormatView::new(entry.spec.name(), &made))
    }

    /// Mounts the file system of the device that `find` returns and that `claim` claims.
    ///
    /// # Errors
    /// If there is no such device, one is mounted on it, clients use it, it has none, or the system
    /// refuses.
    pub(crate) fn mount(
        &self,
        name: &str,
        find: impl Fn() -> Result<DeviceEntry, YardError>,
        claim: impl FnOnce(&DeviceEntry) -> Result<DiskClaim, YardError>,
        dir: &Path,
        options: MountOptions,
        ended: impl FnOnce() + Send + Sync + 'static,
    ) -> Result<MountView, YardError> {
        // `find` runs again after the reservation: from then on a removal of the device finds the
        // slot.
        find()?;
        let reserved = self.reserve(name)?;
        let entry = find()?;
        let claim = claim(&entry)?;
        let fs = ZoneFs::open(entry.disk, options)?;
        let ended = move || {
            drop(claim);
            ended();
        };
        let mount = Mount::new(fs, dir, Box::new(ended))?;
        let view = view(name, mount.fs(), mount.path());
        if self.put_back(name, mount) {
            return Ok(view);
        }
        drop(reserved);
        // The device is being removed, so `find` fails.
        find()?;
        Err(YardError::NotMounted { name: crate::param::shown(name) })
    }

    /// Unmounts a device's file system.
    ///
    /// # Errors
    /// If none is mounted, or programs use it.
    pub(crate) fn unmount(&self, device: &str) -> Result<MountView, YardError> {
        let mut slots = self.slots();
        let index = slots.iter().position(|slot| slot.device == device && slot.mount.is_some());
        let index =
            index.ok_or_else(|| YardError::NotMounted { name: crate::param::shown(device) })?;
        // The mount leaves the table, because unmounting may take time; the slot stays reserved.
        let mount = slots[index].mount.take().expect("it was looked for");
        drop(slots);
        let _reserved = Reserved { mounts: self, device: device.to_owned() };
        let view = view(device, mount.fs(), mount.path());
        match mount.unmount() {
            Ok(()) => drop(mount),
            Err(error) if !self.put_back(device, mount) => {
                tracing::debug!(device, %error, "unmounted by force, as the device is removed");
            }
            Err(error) => return Err(error.into()),
        }
        Ok(view)
    }

    /// Stores a mount in the slot that is reserved for it. If the device is being removed, drops
    /// the mount and returns `false`.
    fn put_back(&self, device: &str, mount: Mount) -> bool {
        let mut slots = self.slots();
        let slot = slots.iter_mut().find(|slot| slot.device == device);
        let slot = slot.expect("it is reserved");
        if slot.going {
            // Outside the lock: it waits for requests in flight.
            drop(slots);
            drop(mount);
            return false;
        }
        slot.mount = Some(mount);
        true
    }

    /// Removes a device's mount, if there is one, even if it is in use. Waits for one that is being
    /// made or unmounted, at most for `patience`; after that the thread that makes it drops it.
    pub(crate) fn remove(&self, device: &str, patience: Duration) {
        let deadline = Instant::now() + patience;
        let mut slots = self.slots();
        while let Some(index) = slots.iter().position(|slot| slot.device == device) {
            if slots[index].mount.is_some() {
                let slot = slots.remove(index);
                // Outside the lock: it waits for requests in flight.
                drop(slots);
                drop(slot);
                return;
            }
            slots[index].going = true;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.freed.wait_timeout(slots, left);
            slots = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The mount point of a device's file system.
    pub(crate) fn place(&self, device: &str) -> Option<PathBuf> {
        let slots = self.slots();
        let mut mounts = slots.iter().filter(|slot| slot.device == device);
        mounts.find_map(|slot| Some(slot.mount.as_ref()?.path().to_owned()))
    }

    /// All mounted file systems.
    pub(crate) fn list(&self) -> Vec<MountView> {
        let mounted = |slot: &MountSlot| {
            let mount = slot.mount.as_ref()?;
            Some((slot.device.clone(), Arc::clone(mount.fs()), mount.path().to_owned()))
        };
        // Read outside the lock, so that a slow file system does not block the table.
        let mounts: Vec<_> = self.slots().iter().filter_map(mounted).collect();
        mounts.iter().map(|(device, fs, dir)| view(device, fs, dir)).collect()
    }

    fn reserve(&self, device: &str) -> Result<Reserved<'_>, YardError> {
        let mut slots = self.slots();
        let reserved = || Reserved { mounts: self, device: device.to_owned() };
        let Some(slot) = slots.iter_mut().find(|slot| slot.device == device) else {
            slots.push(MountSlot { device: device.to_owned(), mount: None, going: false });
            return Ok(reserved());
        };
        let refused = |dir| YardError::Mounted { name: device.to_owned(), dir };
        let Some(mount) = slot.mount.take() else {
            return Err(refused(None));
        };
        // Outside the lock: a file system that was just unmounted takes a moment to end.
        drop(slots);
        let reserved = reserved();
        if mount.was_unmounted() {
            return Ok(reserved);
        }
        let dir = mount.path().to_owned();
        self.put_back(device, mount);
        Err(refused(Some(dir)))
    }

    /// The table, without mounts that another program has unmounted.
    fn slots(&self) -> MutexGuard<'_, Vec<MountSlot>> {
        // Every change is one call: a holder that panicked has left it consistent.
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.retain(|slot| !slot.mount.as_ref().is_some_and(Mount::has_ended));
        slots
    }
}

fn view(device: &str, fs: &ZoneFs, dir: &Path) -> MountView {
    let resources = fs.resources();
    MountView {
        device: device.to_owned(),
        dir: dir.display().to_string(),
        options: fs.options().to_string(),
        read_only: fs.is_read_only(),
        label: fs.superblock().label_text(),
        uuid: fs.superblock().uuid.to_string(),
        conventional_files: fs.file_count(FileKind::Conventional),
        sequential_files: fs.file_count(FileKind::Sequential),
        write_open: resources.write_open,
        write_open_max: resources.write_open_max,
        active: resources.active,
        active_max: resources.active_max,
    }
}

/// Checks a request to make a file system.
///
/// # Errors
/// If a field is invalid.
pub fn read_format(request: &FormatRequest) -> Result<Format, YardError> {
    let argument = |field, value: &str, wanted: String| YardError::Argument {
        field,
        value: crate::param::shown(value),
        wanted,
    };
    let FormatRequest { force, label, uuid, options } = request;
    check_label(label)
        .map_err(|_| argument("label", label, "at most 64 bytes, none of them zero".to_owned()))?;
    let uuid = uuid.as_deref().map(|text| {
        text.parse()
            .map(Hyphenated::into_uuid)
            .map_err(|_| argument("uuid", text, "32 hexadecimal digits, as 8-4-4-4-12".to_owned()))
    });
    let options = options.parse().map_err(|error: blockyard_zonefs::options::OptionError| {
        argument("options", &error.option, error.wanted.to_owned())
    })?;
    Ok(Format { force: *force, label: label.clone(), uuid: uuid.transpose()?, options })
}

/// Parses the options of a mount.
///
/// # Errors
/// If one is invalid.
pub fn read_mount_options(text: &str) -> Result<MountOptions, YardError> {
    text.parse().map_err(|error: blockyard_zonefs::options::OptionError| YardError::Argument {
        field: "options",
        value: error.option,
        wanted: error.wanted.to_owned(),
    })
}

impl FormatView {
    /// The view of a new file system.
    pub fn new(device: &str, made: &Formatted) -> FormatView {
        FormatView {
            device: device.to_owned(),
            label: made.superblock.label_text(),
            uuid: made.superblock.uuid.to_string(),
            conventional_files: made.conventional_files,
            sequential_files: made.sequential_files,
            zone_0_finished: made.zone_0_finished,
        }
    }
}
