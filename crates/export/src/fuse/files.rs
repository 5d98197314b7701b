//! The table of files: disks by name, shared by the mounts and changeable while they run.
//!
//! Control plane: the lock here is never taken for an I/O. It is taken when a file is looked up,
//! opened or listed, when a thread uses a device for the first time, and when a device is added or
//! removed.
#![allow(clippy::disallowed_types)] // Control plane only, as said above.

use std::ffi::OsStr;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use blockyard_core::Disk;
use blockyard_sync::rmw_lock::RmwLock;
use fuser::{INodeNo, Notifier};

use crate::fuse::memory::BLOCK_BYTES_MAX;
use crate::fuse::mount::Transport;
use crate::fuse::ranges::Shape;
use crate::fuse::seat::Seats;
use crate::rmw::SharedDisk;

/// The most files of one table.
pub const FILES_MAX: usize = 4096;

/// The bits of an inode number that are the slot.
const SLOT_BITS: u32 = FILES_MAX.trailing_zeros();

/// The slot of an inode number.
#[inline]
pub(crate) fn slot_of(ino: u64) -> usize {
    ino as usize & (FILES_MAX - 1)
}

/// A disk as a file.
pub(crate) struct File {
    /// Never reused, so that the kernel's cached state of a removed file affects no other.
    pub(crate) ino: u64,
    pub(crate) name: String,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) shape: Shape,
    pub(crate) made: SystemTime,
    /// The lock for sub-block writes to the disk.
    pub(crate) lock: Arc<RmwLock>,
}

/// A file as listings show it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileInfo {
    /// The file's name, which is the device's.
    pub name: String,
    /// The path, if the file is mounted.
    pub path: Option<PathBuf>,
    /// The transport of the mount's requests, if the file is mounted.
    pub transport: Option<Transport>,
    /// The number of times that it is open now.
    pub opens: u64,
}

/// The reason for which the table of files refused a change.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileError {
    /// There is a file of this name already.
    Taken {
        /// The name.
        name: String,
    },
    /// There is no file of this name.
    Unknown {
        /// The name.
        name: String,
    },
    /// The name is no valid file name.
    Name {
        /// The name.
        name: String,
    },
    /// The device's blocks are too long.
    Block {
        /// The device.
        name: String,
        /// The length of the device's blocks, in bytes.
        block_bytes: u64,
    },
    /// There are [`FILES_MAX`] files already.
    Full,
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FileError::Taken { name } => {
                write!(f, "file `{name}` exists already: remove it first or take another name")
            }
            FileError::Unknown { name } => write!(f, "there is no file `{name}`"),
            FileError::Name { name } => write!(
                f,
                "name: `{}` cannot name a file: expected 1 to 255 bytes without `/` and NUL, and \
                 neither `.` nor `..`",
                name.escape_debug()
            ),
            FileError::Block { name, block_bytes } => write!(
                f,
                "`{name}` has blocks of {block_bytes} bytes; a file can have at most \
                 {BLOCK_BYTES_MAX}"
            ),
            FileError::Full => write!(f, "there are {FILES_MAX} files already: remove one"),
        }
    }
}

impl std::error::Error for FileError {}

/// The table of files.
#[derive(Default)]
pub struct Files {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// By slot.
    entries: Vec<Option<Entry>>,
    /// The number of files that were ever added.
    made: u64,
    mounts: Vec<Attached>,
}

struct Entry {
    file: Arc<File>,
    opens: u64,
}

/// A mount that shows the files.
#[derive(Clone)]
struct Attached {
    dir: PathBuf,
    seats: Arc<Seats>,
    notifier: Notifier,
    transport: Transport,
}

impl Table {
    fn by_name(&self, name: &OsStr) -> Option<&Entry> {
        self.entries.iter().flatten().find(|entry| OsStr::new(&entry.file.name) == name)
    }

    fn info(&self, entry: &Entry) -> FileInfo {
        let name = &entry.file.name;
        let mount = self.mounts.first();
        let path = mount.map(|mount| mount.dir.join(name));
        let transport = mount.map(|mount| mount.transport);
        FileInfo { name: name.clone(), path, transport, opens: entry.opens }
    }

    fn by_ino(&mut self, ino: u64) -> Option<&mut Entry> {
        let entry = self.entries.get_mut(slot_of(ino))?.as_mut()?;
        (entry.file.ino == ino).then_some(entry)
    }
}

impl Files {
    /// An empty table.
    pub fn new() -> Arc<Files> {
        Arc::default()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Every change is one call: a holder that panicked has left the table consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a disk under a name.
    ///
    /// # Errors
    /// If the name is taken or is no valid file name, or the table is full.
    pub fn add(&self, name: &str, disk: impl Into<SharedDisk>) -> Result<(), FileError> {
        let SharedDisk { disk, lock } = disk.into();
        let owned = || name.to_owned();
        let plain = (1..=255).contains(&name.len()) && !name.contains(['/', '\0']);
        if !plain || matches!(name, "." | "..") {
            return Err(FileError::Name { name: owned() });
        }
        let shape = Shape::of(disk.as_ref());
        let block_bytes = shape.block_bytes;
        if block_bytes > BLOCK_BYTES_MAX {
            return Err(FileError::Block { name: owned(), block_bytes });
        }
        let mut table = self.table();
        if table.by_name(OsStr::new(name)).is_some() {
            return Err(FileError::Taken { name: owned() });
        }
        let slot = table.entries.iter().position(Option::is_none).unwrap_or(table.entries.len());
        if slot >= FILES_MAX {
            return Err(FileError::Full);
        }
        table.made += 1;
        // The root has number 1, so no file is in generation 0.
        let ino = table.made << SLOT_BITS | slot as u64;
        let made = SystemTime::now();
        let file = Arc::new(File { ino, name: owned(), disk, shape, made, lock });
        let entry = Some(Entry { file, opens: 0 });
        match table.entries.get_mut(slot) {
            Some(empty) => *empty = entry,
            None => table.entries.push(entry),
        }
        Ok(())
    }

    /// Removes a file. Requests in flight are answered; those that take longer than `drain` fail,
    /// and so do later requests by programs that have the file open.
    ///
    /// # Errors
    /// If there is no such file.
    pub fn remove(&self, name: &str, drain: Duration) -> Result<(), FileError> {
        let deadline = Instant::now() + drain;
        let (ino, mounts) = {
            let mut table = self.table();
            let Some(entry) = table.by_name(OsStr::new(name)) else {
                return Err(FileError::Unknown { name: name.to_owned() });
            };
            let ino = entry.file.ino;
            table.entries[slot_of(ino)] = None;
            (ino, table.mounts.clone())
        };
        // Outside the lock: serving threads may need it before they release their handles.
        for mount in mounts {
            mount.seats.close(ino, deadline);
            // The kernel may not have cached the name; then there is nothing to invalidate.
            let _ = mount.notifier.inval_entry(INodeNo::ROOT, OsStr::new(name));
        }
        Ok(())
    }

    /// All files.
    pub fn list(&self) -> Vec<FileInfo> {
        let table = self.table();
        table.entries.iter().flatten().map(|entry| table.info(entry)).collect()
    }

    /// The file of this name.
    pub fn find_info(&self, name: &str) -> Option<FileInfo> {
        let table = self.table();
        table.by_name(OsStr::new(name)).map(|entry| table.info(entry))
    }

    /// The number of files.
    pub(crate) fn count(&self) -> usize {
        self.table().entries.iter().flatten().count()
    }

    pub(crate) fn lookup(&self, name: &OsStr) -> Option<Arc<File>> {
        self.table().by_name(name).map(|entry| Arc::clone(&entry.file))
    }

    pub(crate) fn find(&self, ino: u64) -> Option<Arc<File>> {
        self.table().by_ino(ino).map(|entry| Arc::clone(&entry.file))
    }

    /// Counts an open file.
    pub(crate) fn opened(&self, ino: u64) -> Option<Arc<File>> {
        let mut table = self.table();
        let entry = table.by_ino(ino)?;
        entry.opens += 1;
        Some(Arc::clone(&entry.file))
    }

    /// Counts a file that is no longer open.
    pub(crate) fn released(&self, ino: u64) {
        if let Some(entry) = self.table().by_ino(ino) {
            entry.opens = entry.opens.saturating_sub(1);
        }
    }

    /// All files, by inode number.
    pub(crate) fn snapshot(&self) -> Vec<Arc<File>> {
        let table = self.table();
        let mut files: Vec<_> =
            table.entries.iter().flatten().map(|entry| Arc::clone(&entry.file)).collect();
        drop(table);
        files.sort_by_key(|file| file.ino);
        files
    }

    /// Adds a mount, which is notified about removed files from now on.
    pub(crate) fn attach(
        &self,
        dir: PathBuf,
        seats: Arc<Seats>,
        notifier: Notifier,
        transport: Transport,
    ) {
        self.table().mounts.push(Attached { dir, seats, notifier, transport });
    }

    pub(crate) fn detach(&self, seats: &Arc<Seats>) {
        self.table().mounts.retain(|mount| !Arc::ptr_eq(&mount.seats, seats));
    }
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Files").field("files", &self.list()).finish_non_exhaustive()
    }
}
