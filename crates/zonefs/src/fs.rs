//! The file system: a device, its superblock, and a file for each zone.
// A table of files and what is counted of all of them; no I/O takes a lock of this file, but those
// that open, close, reset and finish zones.
#![allow(clippy::disallowed_types)]

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::SystemTime;

use blockyard_core::zone::ZoneCond;
use blockyard_core::{Disk, SECTOR_BYTES, Sector};

use crate::attributes::{Attributes, FileKind, Node, Space, parse_name};
use crate::door::{BUFFER_BYTES, Door};
use crate::error::{Problem, ZoneFsError};
use crate::file::File;
use crate::layout::{self, Shape};
use crate::options::MountOptions;
use crate::remount::Remount;
use crate::superblock::{PERMISSIONS, SUPERBLOCK_BYTES, Superblock};

/// Permissions of directories.
const DIRECTORY_PERMISSIONS: u16 = 0o555;

/// What counts against the limits of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Sequential files open for writing.
    pub write_open: u32,
    /// The most that `explicit-open` allows; 0: no limit.
    pub write_open_max: u32,
    /// Sequential files that are partly written, or whose zone is open.
    pub active: u32,
    /// The most active zones that the device allows; 0: no limit.
    pub active_max: u32,
}

/// Permissions and owner of a directory.
#[derive(Clone, Copy)]
pub(crate) struct Directory {
    pub(crate) permissions: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// A zonefs file system over a zoned device, open.
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
    /// By kind, in the order of their zones.
    files: [Vec<Arc<File>>; 2],
    /// The root, and the directories by kind.
    directories: Mutex<[Directory; 3]>,
    read_only: AtomicBool,
    /// Sequential files open for writing.
    writers: AtomicU32,
    /// For zone operations: they are rare.
    control: Mutex<Door>,
    opened: SystemTime,
    /// What is told when it becomes read-only.
    mount: OnceLock<Arc<Remount>>,
}

impl ZoneFs {
    /// Opens the file system of a device. Zones that are open are closed first.
    ///
    /// # Errors
    /// If the device has no zones or no zonefs, or its report fails.
    pub fn open(disk: Arc<dyn Disk>, options: MountOptions) -> Result<Arc<ZoneFs>, ZoneFsError> {
        let failed = |problem| ZoneFsError { device: disk.name().to_owned(), problem };
        if disk.geometry().zones.is_none() {
            return Err(failed(Problem::NotZoned));
        }
        let mut door = Door::open(disk.as_ref())?;
        let mut bytes = [0; SUPERBLOCK_BYTES];
        let loaded = door.load(Sector(0), &mut bytes, "reading the superblock");
        loaded.map_err(failed)?;
        let superblock = Superblock::decode(&bytes).map_err(|error| failed(error.into()))?;
        ZoneFs::open_with(disk, superblock, options)
    }

    /// Opens a device as if this superblock were on it, for devices that keep nothing.
    ///
    /// # Errors
    /// As [`ZoneFs::open`], but for the superblock.
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
        let control = Mutex::new(Door::open(disk.as_ref())?);
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

    /// Closes the zones that are open: from now on the files open for writing say which are.
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

    /// A way to the files for one thread.
    ///
    /// # Errors
    /// If the device is gone or serves no more channels.
    pub fn door(&self) -> Result<Door, ZoneFsError> {
        Door::open(self.disk.as_ref())
    }

    /// The device.
    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    /// What the superblock says.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// How it was opened, after corrections.
    pub fn options(&self) -> &MountOptions {
        &self.options
    }

    /// The unit of writes in bytes.
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Most bytes of one append.
    pub fn append_bytes_max(&self) -> usize {
        self.append_bytes_max
    }

    /// Whether the device, or its stack, says itself where an append lands. Where it does not,
    /// appends to one file take turns.
    pub fn appends_natively(&self) -> bool {
        self.native_append
    }

    /// Whether writes are refused, from the beginning or since an error.
    pub fn is_read_only(&self) -> bool {
        // Relaxed: a write that does not see it yet is one that came before.
        self.read_only.load(Ordering::Relaxed)
    }

    /// How many files of a kind there are.
    pub fn file_count(&self, kind: FileKind) -> u32 {
        self.files[kind.index()].len() as u32
    }

    /// What counts against the limits of the device.
    pub fn resources(&self) -> Resources {
        let files = &self.files[FileKind::Sequential.index()];
        let active = files.iter().filter(|file| {
            let size = file.size();
            (size > 0 && size < file.capacity) || file.is_zone_open()
        });
        Resources {
            // Relaxed: a count for people.
            write_open: self.writers.load(Ordering::Relaxed),
            write_open_max: self.open_max,
            active: active.count() as u32,
            active_max: self.active_max,
        }
    }

    /// What is in the whole tree.
    pub fn space(&self) -> Space {
        let all = || self.files.iter().flatten();
        let block = u64::from(self.block_bytes);
        let blocks = all().map(|file| file.capacity).sum::<u64>() / block;
        let written = all().map(|file| file.size()).sum::<u64>() / block;
        let files = all().count() as u64 + self.directories().count() as u64;
        Space { block_bytes: self.block_bytes, blocks, free: blocks - written.min(blocks), files }
    }

    /// The directories that there are: those with a file in them.
    pub fn directories(&self) -> impl Iterator<Item = FileKind> + '_ {
        FileKind::ALL.into_iter().filter(|kind| self.file_count(*kind) > 0)
    }

    /// What a name means in a directory.
    pub fn lookup(&self, parent: Node, name: &[u8]) -> Option<Node> {
        match parent {
            Node::Root => {
                let kind = self.directories().find(|kind| kind.directory().as_bytes() == name)?;
                Some(Node::Directory(kind))
            }
            Node::Directory(kind) => {
                let number = parse_name(name)?;
                (number < self.file_count(kind)).then_some(Node::File(kind, number))
            }
            Node::File(..) => None,
        }
    }

    /// What is at an inode number.
    pub fn node(&self, ino: u64) -> Option<Node> {
        let count = u64::from(self.zone_count);
        if ino == count {
            return Some(Node::Root);
        }
        if ino > count {
            let kind = *FileKind::ALL.get((ino - count - 1) as usize)?;
            return (self.file_count(kind) > 0).then_some(Node::Directory(kind));
        }
        FileKind::ALL.into_iter().find_map(|kind| {
            let files = &self.files[kind.index()];
            let found = files.binary_search_by_key(&(ino as u32), |file| file.zone);
            found.ok().map(|number| Node::File(kind, number as u32))
        })
    }

    /// What `stat` says of something in the tree.
    pub fn attributes(&self, node: Node) -> Option<Attributes> {
        let count = u64::from(self.zone_count);
        let (ino, size, links, place) = match node {
            Node::File(kind, number) => {
                return Some(self.file_attributes(self.file(kind, number)?));
            }
            Node::Root => {
                let directories = self.directories().count() as u64;
                (count, directories + 2, directories as u32, 0)
            }
            Node::Directory(kind) => {
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

    /// One more sequential file is open for writing; says how many were.
    pub(crate) fn add_writer(&self) -> u32 {
        // Relaxed: only the number counts, and the operation is whole.
        self.writers.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn remove_writer(&self) {
        // Relaxed: as above.
        self.writers.fetch_sub(1, Ordering::Relaxed);
    }

    /// The door for zone operations.
    pub(crate) fn control(&self) -> MutexGuard<'_, Door> {
        // A door that a panic left in an operation answers the next one by its own number.
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn directory_table(&self) -> MutexGuard<'_, [Directory; 3]> {
        // Its fields do not depend on each other.
        self.directories.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a directory. Files are none.
    pub(crate) fn with_directory(&self, node: Node, change: impl FnOnce(&mut Directory)) {
        let place = match node {
            Node::Root => 0,
            Node::Directory(kind) => 1 + kind.index(),
            Node::File(..) => return,
        };
        change(&mut self.directory_table()[place]);
    }

    /// Refuses writes from now on.
    pub(crate) fn become_read_only(&self, why: &str) {
        // Relaxed: as in `is_read_only`.
        if !self.read_only.swap(true, Ordering::Relaxed) {
            self.warn(&format!("{why}: remounting the file system read-only"));
            self.remount();
        }
    }

    /// It is mounted, and the mount is to follow when it becomes read-only.
    pub(crate) fn set_mount(&self, mount: Arc<Remount>) {
        // It is mounted once: a second mount opens the file system anew.
        let _ = self.mount.set(mount);
    }

    /// Makes the mount read-only, if the file system is.
    pub(crate) fn remount(&self) {
        if let Some(mount) = self.mount.get().filter(|_| self.is_read_only()) {
            mount.begin();
        }
    }

    pub(crate) fn warn(&self, what: &str) {
        tracing::warn!("zonefs ({}) WARNING: {what}", self.disk.name());
    }
}

/// Whose the files are. Where the superblock does not say it they are root's, as in Linux; and if
/// it is not root who opens the file system, which Linux does not know, they are theirs.
fn owner(superblock: &Superblock) -> (u32, u32) {
    let uid = superblock.uid.unwrap_or_else(|| rustix::process::geteuid().as_raw());
    let gid = superblock.gid.unwrap_or_else(|| match rustix::process::geteuid().is_root() {
        true => 0,
        false => rustix::process::getegid().as_raw(),
    });
    (uid, gid)
}

/// The device's name stands for it in a debug print.
impl std::fmt::Debug for ZoneFs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ZoneFs").field("device", &self.disk.name()).finish_non_exhaustive()
    }
}
