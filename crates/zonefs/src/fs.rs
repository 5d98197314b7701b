//! The file system: a device, its superblock, and a file for each zone.
// A table of files and their shared counters. Only opens, closes, resets and finishes of zones take
// a lock of this file; reads and writes take none.
#![allow(clippy::disallowed_types)]

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::SystemTime;

use blockyard_core::zone::{ZoneCond, ZoneInfo};
use blockyard_core::{Disk, SECTOR_BYTES, Sector};

use crate::attributes::{Attributes, FileKind, Space, TreeNode, parse_name};
use crate::error::{Problem, ZoneFsError};
use crate::file::{File, bit};
use crate::io_handle::{BUFFER_BYTES, IoHandle};
use crate::layout::{self, Shape, worst, written};
use crate::options::{MountOptions, OnError};
use crate::remount::Remount;
use crate::superblock::{PERMISSIONS, SUPERBLOCK_BYTES, Superblock};

/// Permissions of directories.
const DIRECTORY_PERMISSIONS: u16 = 0o555;

/// Use of resources that the device limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Number of sequential files open for writing.
    pub write_open: u32,
    /// Maximum of `write_open` with `explicit-open`; 0: no limit.
    pub write_open_max: u32,
    /// Number of sequential files that are partly written, or whose zone is open.
    pub active: u32,
    /// Maximum number of active zones of the device; 0: no limit.
    pub active_max: u32,
}

/// Permissions and owner of a directory.
#[derive(Clone, Copy)]
pub(crate) struct Directory {
    pub(crate) permissions: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// An open zonefs file system on a zoned device.
pub struct ZoneFs {
    disk: Arc<dyn Disk>,
    superblock: Superblock,
    options: MountOptions,
    block_bytes: u32,
    zone_count: u32,
    open_max: u32,
    active_max: u32,
    append_bytes_max: usize,
    native_append: bool,
    /// Files by kind, in the order of their zones.
    files: [Vec<Arc<File>>; 2],
    /// The root, then the directories by kind.
    directories: Mutex<[Directory; 3]>,
    read_only: AtomicBool,
    /// Number of sequential files open for writing.
    writers: AtomicU32,
    /// The handle for zone operations, which are rare.
    control: Mutex<IoHandle>,
    opened: SystemTime,
    /// The mount to make read-only when the file system becomes read-only.
    mount: OnceLock<Arc<Remount>>,
}

impl ZoneFs {
    /// Opens the file system of a device. First closes all open zones.
    ///
    /// # Errors
    /// If the device has no zones or no zonefs, or its zone report fails.
    pub fn open(disk: Arc<dyn Disk>, options: MountOptions) -> Result<Arc<ZoneFs>, ZoneFsError> {
        let failed = |problem| ZoneFsError { device: disk.name().to_owned(), problem };
        if disk.geometry().zones.is_none() {
            return Err(failed(Problem::NotZoned));
        }
        let mut io = IoHandle::open(disk.as_ref())?;
        let mut bytes = [0; SUPERBLOCK_BYTES];
        let loaded = io.load(Sector(0), &mut bytes, "reading the superblock");
        loaded.map_err(failed)?;
        let superblock = Superblock::decode(&bytes).map_err(|error| failed(error.into()))?;
        ZoneFs::open_with(disk, superblock, options)
    }

    /// Opens a device as if it had this superblock, for devices that do not store data.
    ///
    /// # Errors
    /// As [`ZoneFs::open`], except those of the superblock.
    pub fn open_with(
        disk: Arc<dyn Disk>,
        superblock: Superblock,
        mut options: MountOptions,
    ) -> Result<Arc<ZoneFs>, ZoneFsError> {
        let geometry = disk.geometry();
        let Some(zones) = geometry.zones.clone() else {
            return Err(ZoneFsError::new(disk.name(), Problem::NotZoned));
        };
        let (block_bytes, limits) = (geometry.physical_block_bytes, disk.limits());
        let shapes =
            layout::files(&layout::report(disk.as_ref())?, superblock.aggregate_conventional);
        options.read_only |= limits.read_only;
        if options.explicit_open && zones.open_max == 0 && zones.active_max == 0 {
            let name = disk.name();
            tracing::info!(
                "zonefs ({name}): no limit of open or active zones; explicit-open ignored"
            );
            options.explicit_open = false;
        }
        let append_bytes = limits.zone_append_sectors_max.saturating_mul(SECTOR_BYTES);
        let native_append = append_bytes >= u64::from(block_bytes);
        let longest = if native_append { append_bytes } else { BUFFER_BYTES as u64 };
        let longest = longest.min(BUFFER_BYTES as u64) / u64::from(block_bytes);
        let control = Mutex::new(IoHandle::open(disk.as_ref())?);
        let (uid, gid) = owner(&superblock);
        let directory = Directory { permissions: DIRECTORY_PERMISSIONS, uid: 0, gid: 0 };
        let permissions = superblock.permissions.unwrap_or(PERMISSIONS);
        let make = |shape: &Shape| Arc::new(File::new(shape, permissions, uid, gid));
        let fs = ZoneFs {
            superblock,
            block_bytes,
            zone_count: zones.zone_count,
            open_max: zones.open_max,
            active_max: zones.active_max,
            append_bytes_max: (longest * u64::from(block_bytes)) as usize,
            native_append,
            files: [shapes[0].iter().map(make).collect(), shapes[1].iter().map(make).collect()],
            directories: Mutex::new([directory; 3]),
            read_only: AtomicBool::new(options.read_only),
            options,
            writers: AtomicU32::new(0),
            control,
            opened: SystemTime::now(),
            mount: OnceLock::new(),
            disk,
        };
        fs.close_zones(&shapes[FileKind::Sequential.index()])?;
        Ok(Arc::new(fs))
    }

    /// Closes all open zones: from now on a zone is open only if its file is open for writing.
    fn close_zones(&self, shapes: &[Shape]) -> Result<(), ZoneFsError> {
        if self.disk.limits().read_only {
            return Ok(());
        }
        let is_open = |cond| matches!(cond, ZoneCond::ImplicitOpen | ZoneCond::ExplicitOpen);
        for shape in shapes.iter().filter(|shape| is_open(shape.cond)) {
            self.close_zone(shape.start, shape.written).map_err(|status| {
                let what = "closing an open zone";
                ZoneFsError::new(self.disk.name(), Problem::Io { what, status })
            })?;
        }
        Ok(())
    }

    /// Creates the access of one thread.
    ///
    /// # Errors
    /// If the device is gone or has no free channel.
    pub fn io_handle(&self) -> Result<IoHandle, ZoneFsError> {
        IoHandle::open(self.disk.as_ref())
    }

    /// The device.
    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    /// The superblock.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The mount options after corrections.
    pub fn options(&self) -> &MountOptions {
        &self.options
    }

    /// Unit of writes in bytes.
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Maximum bytes of one append.
    pub fn append_bytes_max(&self) -> usize {
        self.append_bytes_max
    }

    /// Whether the device or its stack reports where an append landed. Otherwise appends to one
    /// file are serialized.
    pub fn appends_natively(&self) -> bool {
        self.native_append
    }

    /// Whether writes are refused, since the opening or since an error.
    pub fn is_read_only(&self) -> bool {
        // Relaxed: a write that does not see the flag yet counts as earlier.
        self.read_only.load(Ordering::Relaxed)
    }

    /// The number of files of a kind.
    pub fn file_count(&self, kind: FileKind) -> u32 {
        self.files[kind.index()].len() as u32
    }

    /// Current use of resources that the device limits.
    pub fn resources(&self) -> Resources {
        let files = &self.files[FileKind::Sequential.index()];
        let active = files.iter().filter(|file| {
            let size = file.size();
            (size > 0 && size < file.capacity) || file.is_zone_open()
        });
        Resources {
            // Relaxed: a counter for display only.
            write_open: self.writers.load(Ordering::Relaxed),
            write_open_max: self.open_max,
            active: active.count() as u32,
            active_max: self.active_max,
        }
    }

    /// Usage of the whole file system.
    pub fn space(&self) -> Space {
        let all = || self.files.iter().flatten();
        let block = u64::from(self.block_bytes);
        let blocks = all().map(|file| file.capacity).sum::<u64>() / block;
        let written = all().map(|file| file.size()).sum::<u64>() / block;
        let files = all().count() as u64 + self.directories().count() as u64;
        Space { block_bytes: self.block_bytes, blocks, free: blocks - written.min(blocks), files }
    }

    /// The existing directories: those with at least one file.
    pub fn directories(&self) -> impl Iterator<Item = FileKind> + '_ {
        FileKind::ALL.into_iter().filter(|kind| self.file_count(*kind) > 0)
    }

    /// Looks up a name in a directory.
    pub fn lookup(&self, parent: TreeNode, name: &[u8]) -> Option<TreeNode> {
        match parent {
            TreeNode::Root => {
                let kind = self.directories().find(|kind| kind.directory().as_bytes() == name)?;
                Some(TreeNode::Directory(kind))
            }
            TreeNode::Directory(kind) => {
                let number = parse_name(name)?;
                (number < self.file_count(kind)).then_some(TreeNode::File(kind, number))
            }
            TreeNode::File(..) => None,
        }
    }

    /// The node with an inode number.
    pub fn node(&self, ino: u64) -> Option<TreeNode> {
        let count = u64::from(self.zone_count);
        if ino == count {
            return Some(TreeNode::Root);
        }
        if ino > count {
            let kind = *FileKind::ALL.get((ino - count - 1) as usize)?;
            return (self.file_count(kind) > 0).then_some(TreeNode::Directory(kind));
        }
        FileKind::ALL.into_iter().find_map(|kind| {
            let files = &self.files[kind.index()];
            let found = files.binary_search_by_key(&(ino as u32), |file| file.zone);
            found.ok().map(|number| TreeNode::File(kind, number as u32))
        })
    }

    /// The attributes of a node.
    pub fn attributes(&self, node: TreeNode) -> Option<Attributes> {
        let count = u64::from(self.zone_count);
        let (ino, size, links, place) = match node {
            TreeNode::File(kind, number) => {
                return Some(self.file_attributes(self.file(kind, number)?));
            }
            TreeNode::Root => {
                let directories = self.directories().count() as u64;
                (count, directories + 2, directories as u32, 0)
            }
            TreeNode::Directory(kind) => {
                let ino = count + 1 + kind.index() as u64;
                (ino, u64::from(self.file_count(kind)), 0, 1 + kind.index())
            }
        };
        let Directory { permissions, uid, gid } = self.directory_table()[place];
        Some(Attributes {
            ino,
            is_directory: true,
            permissions,
            nlink: 2 + links,
            uid,
            gid,
            size,
            blocks: 0,
            block_bytes: self.block_bytes,
            modified: self.opened,
        })
    }

    fn file_attributes(&self, file: &File) -> Attributes {
        let looks = file.looks();
        Attributes {
            ino: file.zone.into(),
            is_directory: false,
            permissions: looks.permissions,
            nlink: 1,
            uid: looks.uid,
            gid: looks.gid,
            size: file.size(),
            blocks: file.capacity / SECTOR_BYTES,
            block_bytes: self.block_bytes,
            modified: looks.modified,
        }
    }

    pub(crate) fn file(&self, kind: FileKind, number: u32) -> Option<&Arc<File>> {
        self.files[kind.index()].get(number as usize)
    }

    pub(crate) fn is_aligned(&self, bytes: u64) -> bool {
        bytes.is_multiple_of(u64::from(self.block_bytes))
    }

    pub(crate) fn open_max(&self) -> u32 {
        self.open_max
    }

    pub(crate) fn opens_explicitly(&self) -> bool {
        self.options.explicit_open
    }

    /// Counts another sequential file open for writing; returns the previous number.
    pub(crate) fn add_writer(&self) -> u32 {
        // Relaxed: only the number matters, and the operation is atomic.
        self.writers.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn remove_writer(&self) {
        // Relaxed: as above.
        self.writers.fetch_sub(1, Ordering::Relaxed);
    }

    /// The handle for zone operations.
    pub(crate) fn control(&self) -> MutexGuard<'_, IoHandle> {
        // After a panic during an operation the handle is still usable: completions are matched by
        // number.
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn directory_table(&self) -> MutexGuard<'_, [Directory; 3]> {
        // The fields do not depend on each other.
        self.directories.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a directory; does nothing for a file.
    pub(crate) fn with_directory(&self, node: TreeNode, change: impl FnOnce(&mut Directory)) {
        let place = match node {
            TreeNode::Root => 0,
            TreeNode::Directory(kind) => 1 + kind.index(),
            TreeNode::File(..) => return,
        };
        change(&mut self.directory_table()[place]);
    }

    /// Makes the file system read-only.
    pub(crate) fn become_read_only(&self, why: &str) {
        // Relaxed: as in `is_read_only`.
        if !self.read_only.swap(true, Ordering::Relaxed) {
            self.warn(&format!("{why}: remounting the file system read-only"));
            self.remount();
        }
    }

    /// Registers the mount that follows when the file system becomes read-only.
    pub(crate) fn set_mount(&self, mount: Arc<Remount>) {
        // A `ZoneFs` is mounted once: a second mount opens another one.
        let _ = self.mount.set(mount);
    }

    /// Makes the mount read-only if the file system is.
    pub(crate) fn remount(&self) {
        if let Some(mount) = self.mount.get().filter(|_| self.is_read_only()) {
            mount.begin();
        }
    }

    pub(crate) fn warn(&self, what: &str) {
        tracing::warn!("zonefs ({}) WARNING: {what}", self.disk.name());
    }
}

/// Owner and group of the files. Without the superblock's setting they belong to root, as in Linux;
/// if the process is not root, a case that Linux does not have, they belong to its user.
fn owner(superblock: &Superblock) -> (u32, u32) {
    let uid = superblock.uid.unwrap_or_else(|| rustix::process::geteuid().as_raw());
    let gid = superblock.gid.unwrap_or_else(|| match rustix::process::geteuid().is_root() {
        true => 0,
        false => rustix::process::getegid().as_raw(),
    });
    (uid, gid)
}

/// Shows the name of the device.
impl std::fmt::Debug for ZoneFs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ZoneFs").field("device", &self.disk.name()).finish_non_exhaustive()
    }
}

/// Recovery from device errors.
///
/// After an error, recovery reports the zone and adapts the file to it, as `errors=` specifies.
/// That applies to a failed write, flush or zone operation, and to a failed read of a zone that has
/// become read-only or offline.
///
/// | errors= | zone | size | file read | file write |
/// | --- | --- | --- | --- | --- |
/// | remount-ro | good | fixed, never grown | yes | no, in no file |
/// | zone-ro | good | as is | yes | no |
/// | zone-offline | good | 0 | no | no |
/// | repair | good | fixed | yes | yes |
/// | any but zone-offline | read-only | as is | yes | no |
/// | zone-offline | read-only | 0 | no | no |
/// | any | offline | 0 | no | no |
impl ZoneFs {
    /// Recovers a file after an error. `writing` says whether the failed operation was a change.
    pub(crate) fn recover(&self, file: &File, writing: bool) {
        let _alone = file.close_passage();
        let _state = file.state();
        self.recover_alone(file, writing);
    }

    /// Recovers a file; the caller has closed its passage and holds its state.
    pub(crate) fn recover_alone(&self, file: &File, writing: bool) {
        let Some((cond, in_zone)) = self.find_out(file) else {
            self.warn(&format!("zone {} gives no report", file.zone));
            return self.become_read_only("an error cannot be recovered from");
        };
        let size = file.size();
        match cond {
            ZoneCond::Offline => file.add_bits(bit::OFFLINE),
            ZoneCond::ReadOnly => file.add_bits(bit::READ_ONLY),
            _ => {}
        }
        if !file.is(bit::IMMUTABLE) && !writing && size == in_zone {
            return;
        }
        if size != in_zone {
            let zone = file.zone;
            self.warn(&format!("inode {zone}: invalid size {size} (should be {in_zone})"));
        }
        let fixed = self.settle(file, size, in_zone);
        self.update_permissions(file);
        if file.is(bit::IMMUTABLE) {
            // Such a zone needs no close.
            file.set_zone_open(false);
        }
        if self.options().errors == OnError::RemountRo {
            self.become_read_only("an error of the device, and errors=remount-ro");
        }
        file.set_size(fixed);
    }

    /// Sets the bits that the options require, and returns the new size of the file.
    fn settle(&self, file: &File, size: u64, in_zone: u64) -> u64 {
        let errors = self.options().errors;
        if file.is(bit::OFFLINE) || errors == OnError::ZoneOffline {
            self.warn(&format!("inode {}: read and write access disabled", file.zone));
            file.add_bits(bit::OFFLINE);
            0
        } else if file.is(bit::READ_ONLY) || errors == OnError::ZoneRo {
            self.warn(&format!("inode {}: write access disabled", file.zone));
            file.add_bits(bit::READ_ONLY);
            size
        } else if errors == OnError::RemountRo {
            // Data beyond the old size are undefined: they were never acknowledged.
            in_zone.min(size)
        } else {
            in_zone
        }
    }

    fn update_permissions(&self, file: &File) {
        let mut looks = file.looks();
        if file.is(bit::OFFLINE) {
            looks.permissions &= !0o777;
        } else if file.is(bit::READ_ONLY) {
            looks.permissions &= !0o222;
        }
        if file.is(bit::IMMUTABLE) && looks.permissions & 0o777 == 0 {
            file.add_bits(bit::UNREADABLE);
        }
    }

    /// The condition of the file's zones, the worst of several, and their number of bytes. The
    /// write pointer of a read-only zone is unknown: then the number is the file's size.
    fn find_out(&self, file: &File) -> Option<(ZoneCond, u64)> {
        let mut zones: Vec<ZoneInfo> = Vec::with_capacity(file.zones as usize);
        self.disk().report_zones(file.start, file.zones as usize, &mut zones).ok()?;
        let first = zones.first().filter(|first| first.start == file.start)?;
        if zones.len() != file.zones as usize {
            return None;
        }
        let cond = zones.iter().fold(first.cond, |cond, zone| worst(cond, zone.cond));
        let in_zone = match (cond, file.kind) {
            (ZoneCond::Offline, _) => 0,
            (_, FileKind::Conventional) => file.capacity,
            (ZoneCond::ReadOnly, _) => file.size(),
            _ => written(first, file.capacity),
        };
        Some((cond, in_zone))
    }

    /// Whether an append of `wanted` bytes failed only because other appends took the space: the
    /// zone is neither read-only nor offline, and has less space than that, or had until a
    /// truncation after the failure. `truncations` is the number of truncations when the append
    /// began.
    pub(crate) fn has_no_room(&self, file: &File, wanted: u64, truncations: u64) -> bool {
        let _alone = file.close_passage();
        let well = |cond| !matches!(cond, ZoneCond::Offline | ZoneCond::ReadOnly);
        self.find_out(file).is_some_and(|(cond, in_zone)| {
            let full = in_zone + wanted > file.capacity || file.truncations() != truncations;
            well(cond) && in_zone == file.size() && full
        })
    }
}
