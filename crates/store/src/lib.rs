//! Where pools keep their bytes: a directory, a disk, or two copies of either, read and written by
//! io_uring or by blocking calls; or remote storage that another crate provides ([`remote`]).
//!
//! [`SegmentStore`] is the interface between a pool and its storage. It has three parts:
//!
//! - [`SegmentFiles`]: the files, which are opened, made, renamed and removed by name;
//! - [`StoreLocation`]: the directory or disk that contains them;
//! - [`SegmentStore`] itself: the log writer and the reader, and the status of the copies.
//!
//! It has few operations, so that a simulated store can record each of them, cut the power after
//! any, and return false data.
//!
//! Written data are visible at once. They are durable when `sync` of the file has returned, and a
//! name is durable when [`SegmentFiles::sync_names`] has. Until then a power cut may keep any part
//! of them.

pub mod buffer;
mod directory;
pub mod disk;
mod error;
mod file;
pub mod lease;
mod lock;
pub mod lock_owner;
pub mod log_writer;
pub mod mirror;
mod pool_store;
pub mod reads;
pub mod remote;
mod ring;

use std::fmt;
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_core::owner_only;
use blockyard_volume_format::{FormatError, segment_name, superblock};
use rustix::fs::Access;

pub use error::{CopiesError, StoreError};
pub use file::{PoolFile, is_short};
pub use lease::{LeaseTerm, Serving};
pub use lock_owner::LockOwner;
pub use log_writer::{Blocking, Durability, LogWriter, WriteBatch};
pub use mirror::locations::PoolPaths;
pub use mirror::{CopyStatus, Mirror};
pub use pool_store::{PoolLogWriter, PoolReads, PoolStore, Purpose};
pub use reads::{BlockingReads, Reads};
pub use ring::EventFd;

/// How files are read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StoreKind {
    /// By io_uring if the system allows it to this process, else by blocking calls.
    #[default]
    Auto,
    /// By io_uring.
    Uring,
    /// By blocking calls.
    Threads,
}

impl fmt::Display for StoreKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StoreKind::Auto => "auto",
            StoreKind::Uring => "uring",
            StoreKind::Threads => "threads",
        })
    }
}

/// How writes become durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Commit {
    /// Group commit: all waiting records are written together and synced once.
    #[default]
    Group,
    /// This number of workers each write one request and sync for it.
    TaskQueue(u16),
}

impl Commit {
    /// Parses `group` or `taskq:N`.
    pub fn parse(text: &str) -> Option<Commit> {
        if text == "group" {
            return Some(Commit::Group);
        }
        let workers = text.strip_prefix("taskq:")?.parse().ok()?;
        (1..=log_writer::WORKERS_MAX).contains(&workers).then_some(Commit::TaskQueue(workers))
    }
}

impl fmt::Display for Commit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Commit::Group => f.write_str("group"),
            Commit::TaskQueue(workers) => write!(f, "taskq:{workers}"),
        }
    }
}

/// The layout of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Alignment of everything on disk, in bytes.
    pub align: u32,
    /// Length of a segment in bytes.
    pub segment_bytes: u32,
}

/// Whether a path names a pool: a directory with a superblock, or a disk with one.
///
/// # Errors
/// If the path cannot be examined: there may be a pool.
pub fn is_pool(path: &Path) -> Result<bool, StoreError> {
    if let Some(uri) = remote::uri_of(path) {
        return remote::provider(uri)?.is_pool(uri);
    }
    let superblock = path.join(superblock::FILE);
    let examine = || -> io::Result<bool> {
        match metadata_of(path)? {
            None => Ok(false),
            Some(it) if it.is_dir() => Ok(metadata_of(&superblock)?.is_some_and(|it| it.is_file())),
            Some(_) => disk::is_pool(path),
        }
    };
    examine().map_err(StoreError::io(format!("cannot examine `{}`", path.display())))
}

/// The superblock's slots of a pool at a path, read without its lock; `None` if there is no pool.
///
/// # Errors
/// If they cannot be read, or this process may not write there.
fn superblock_at(path: &Path) -> Result<Option<Vec<u8>>, StoreError> {
    if let Some(uri) = remote::uri_of(path) {
        return remote::provider(uri)?.superblock(uri);
    }
    let read = || -> io::Result<Option<Vec<u8>>> {
        let found = match metadata_of(path)? {
            None => None,
            Some(it) if it.is_dir() => directory::superblock_of(path)?,
            Some(_) => disk::superblock_of(path)?,
        };
        if found.is_some() {
            rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK)?;
        }
        Ok(found)
    };
    read().map_err(StoreError::io(format!("cannot read the superblock of `{}`", path.display())))
}

/// The error for a path without a pool. Segments without a superblock are a damaged pool.
pub fn no_pool(path: &Path) -> StoreError {
    if remote::is_remote(path) {
        return StoreError::NoPool { path: path.to_owned(), why: "it has no manifest".to_owned() };
    }
    let first = path.join(segment_name(0));
    if let Ok(Some(_)) = metadata_of(&first) {
        return FormatError::NoSuperblock { path: path.display().to_string() }.into();
    }
    let why = match metadata_of(path) {
        Err(error) => format!("it cannot be examined ({error})"),
        Ok(None) => "it does not exist".to_owned(),
        Ok(Some(it)) if it.is_dir() => match directory::other_file(path) {
            Some(name) => format!("the directory has other files, such as `{name}`"),
            None => "the directory is empty".to_owned(),
        },
        Ok(Some(it)) if it.is_file() => "it is a file without a superblock".to_owned(),
        Ok(Some(_)) if disk::Disk::is_one(path) => "it is a disk without a superblock".to_owned(),
        Ok(Some(_)) => "it is neither a directory nor a disk".to_owned(),
    };
    StoreError::NoPool { path: path.to_owned(), why }
}

/// The metadata of a path; `None` only if the system says that nothing is there.
pub(crate) fn metadata_of(path: &Path) -> io::Result<Option<Metadata>> {
    match path.metadata() {
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// The canonical path of a pool: a directory, which is made if there is none, or a disk.
///
/// # Errors
/// If the path cannot hold a pool.
pub(crate) fn prepare_path(path: &Path) -> Result<PathBuf, StoreError> {
    if let Some(uri) = remote::uri_of(path) {
        return remote::provider(uri).map(|_| path.to_owned());
    }
    let doing = || StoreError::io(format!("cannot make `{}`", path.display()));
    let wrong = |wanted: &str| {
        let (value, wanted) = (path.display().to_string(), wanted.to_owned());
        Err(StoreError::Invalid { field: "path", value, wanted })
    };
    match metadata_of(path).map_err(|error| doing()(error))? {
        Some(it) if it.is_file() => {
            owner_only::sync_names_above(path, 1).map_err(|error| doing()(error))?
        }
        Some(_) if disk::Disk::is_one(path) => {}
        Some(it) if !it.is_dir() => return wrong("a directory, a block device or a file"),
        // A file made in /dev would be gone after a reboot; the user meant a device.
        None if path.starts_with("/dev") && !path.starts_with("/dev/shm") => {
            return wrong("a block device that is there");
        }
        _ => owner_only::create_dir_all_durably(path).map_err(|error| doing()(error))?,
    }
    path.canonicalize().map_err(|error| doing()(error))
}

/// The numbers of copies are below this. A copy that joins gets a number that no copy had since the
/// pool was opened.
pub const COPIES_MAX: usize = 32;

/// The copies of a file that held all data when [`StoreFile::copies`] was called, a bit for each
/// number. A copy keeps its number while the file is open. So a caller that tries one copy after
/// another reaches each of them, even if another thread marks a copy as failed in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GoodCopies(u32);

impl GoodCopies {
    /// The only copy of a pool of one copy.
    pub const ONE: GoodCopies = GoodCopies(1);

    /// The copies of these numbers.
    pub fn of(numbers: impl Iterator<Item = usize>) -> GoodCopies {
        GoodCopies(numbers.fold(0, |all, number| all | 1 << number))
    }

    /// How many copies held all data.
    pub fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether the copy of this number is one of them.
    #[inline]
    pub fn has(self, number: usize) -> bool {
        self.0 & 1 << number != 0
    }

    /// The numbers of the copies that held all data, in ascending order.
    pub fn numbers(self) -> impl Iterator<Item = usize> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let number = (rest != 0).then(|| rest.trailing_zeros() as usize);
            rest &= rest.wrapping_sub(1);
            number
        })
    }

    /// One more than the highest number; 0 if there is none.
    #[inline]
    pub fn end(self) -> usize {
        (u32::BITS - self.0.leading_zeros()) as usize
    }

    /// Those copies of which `is` is true.
    #[must_use]
    pub fn filter(self, is: impl Fn(usize) -> bool) -> GoodCopies {
        GoodCopies::of(self.numbers().filter(|number| is(*number)))
    }

    /// The number of the copy that is read first; 0 if no copy is left.
    #[inline]
    pub fn first(self) -> usize {
        if self.0 == 0 { 0 } else { self.0.trailing_zeros() as usize }
    }
}

/// The files of a pool, in a directory or on a disk that is divided into files: superblock,
/// segments, and the label of a copy.
pub trait SegmentFiles: fmt::Debug + Send + Sync + 'static {
    /// An open file.
    type File: StoreFile;

    /// Opens a file, if there is one of this name.
    ///
    /// # Errors
    /// If the file exists and cannot be opened.
    fn open(&self, name: &str) -> io::Result<Option<Self::File>>;

    /// Makes a file of `len` written zeros, and replaces an existing one.
    ///
    /// # Errors
    /// If it cannot be made.
    fn create(&self, name: &str, len: u64) -> io::Result<Self::File>;

    /// Renames a file, and replaces an existing one.
    ///
    /// # Errors
    /// If it cannot be renamed.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file, if there is one of this name.
    ///
    /// # Errors
    /// If the file exists and cannot be removed.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// The names of all files; empty on a disk, whose parts have no names.
    ///
    /// # Errors
    /// If they cannot be read.
    fn names(&self) -> io::Result<Vec<String>>;

    /// Makes the names of all files durable.
    ///
    /// # Errors
    /// If they may not be durable.
    fn sync_names(&self) -> io::Result<()>;

    /// Removes a pool that was made since this process took the storage, so that the storage is
    /// empty again.
    ///
    /// # Errors
    /// If some of the pool may be left.
    fn erase(&self) -> io::Result<()> {
        self.names()?.iter().try_for_each(|name| self.remove(name))?;
        self.sync_names()
    }

    /// Whether [`SegmentFiles::discard`] has an effect.
    fn discards(&self) -> bool {
        false
    }

    /// Discards the contents of a file. Reads return arbitrary data until it is written.
    fn discard(&self, file: &Self::File) {
        let _ = file;
    }

    /// Gives the space of an unneeded file back to the file system. Reads return arbitrary data
    /// until [`SegmentFiles::allocate`] is called.
    ///
    /// # Errors
    /// If this is impossible here.
    fn deallocate(&self, file: &Self::File) -> io::Result<()> {
        let _ = file;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Allocates the space of a file of this length again, as for a new file.
    ///
    /// # Errors
    /// If there is no space.
    fn allocate(&self, file: &Self::File, len: u64) -> io::Result<()> {
        let _ = (file, len);
        Ok(())
    }
}

/// The directory or disk itself: its name, its layout, its capacity, and whether it is still there.
pub trait StoreLocation {
    /// The name in messages.
    fn title(&self) -> String;

    /// Prepares an empty directory or disk for a new pool, or a copy of one.
    ///
    /// # Errors
    /// If there are other data, or too little space.
    fn prepare(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Sets the layout of the pool, before a segment is opened. For a new pool (`is_new`), it is
    /// called earlier to ask which layout is possible if `wanted` is desired.
    ///
    /// # Errors
    /// If a pool of this layout is impossible here.
    fn set_layout(&self, wanted: Layout, is_new: bool) -> Result<Layout, StoreError> {
        let _ = is_new;
        Ok(wanted)
    }

    /// Most segments that there may be, as far as is known before making one fails.
    fn segments_max(&self) -> usize {
        usize::MAX
    }

    /// How many more bytes files may occupy, as far as is known.
    fn growth_bytes(&self) -> u64 {
        u64::MAX
    }

    /// Checks that the directory was not removed or replaced, so that data written from now on can
    /// be found. The committer calls this periodically.
    ///
    /// # Errors
    /// What was removed or replaced.
    fn check_location(&self) -> io::Result<()> {
        Ok(())
    }

    /// A new unique identity.
    ///
    /// # Errors
    /// If the system gives no random bytes.
    fn fresh_id(&self) -> io::Result<[u8; 16]>;
}

/// The storage of a pool: its files, their location, and how they are read and written.
pub trait SegmentStore: SegmentFiles + StoreLocation {
    /// Writes log batches into the files.
    type LogWriter: LogWriter<Self::File>;
    /// Reads from the files.
    type Reads: Reads<Self::File>;

    /// The status of each copy, by its number in [`StoreFile::copies`]; empty for a pool of one
    /// copy.
    fn copy_status(&self) -> Vec<CopyStatus> {
        Vec::new()
    }

    /// Whether every caller that syncs a file gets the error of a failed write. If only the first
    /// caller gets it, two must not sync at once.
    fn reports_sync_error_to_all(&self) -> bool {
        true
    }

    /// Alignment of the offsets and lengths that the storage reads without further memory, in
    /// bytes: a power of two up to 4096.
    fn io_align(&self) -> u32 {
        1
    }

    /// Until when the opener may serve requests, if that is limited.
    fn lease_term(&self) -> Option<Arc<LeaseTerm>> {
        None
    }

    /// Makes a log writer for the calling thread. It may write zeros to the beginning of `scratch`,
    /// a free file, to measure the speed.
    fn log_writer(&self, scratch: Option<&Arc<Self::File>>) -> Self::LogWriter;

    /// Makes a reader for one thread at a time. Each read signals the eventfd when it ends, unless
    /// it ended when it was started.
    fn reads(&self, event_fd: Option<&EventFd>) -> Self::Reads;
}

/// An open file of fixed length. Several threads use it at once.
#[expect(clippy::len_without_is_empty, reason = "no file of a pool is empty")]
pub trait StoreFile: fmt::Debug + Send + Sync + 'static {
    /// The length in bytes.
    ///
    /// # Errors
    /// If the system does not report it.
    fn len(&self) -> io::Result<u64>;

    /// Reads. Offset and length are multiples of 512 bytes; [`SegmentStore::io_align`] says which
    /// are read without further memory. If the file is open for direct I/O, the memory must be
    /// aligned.
    ///
    /// # Errors
    /// If the read fails, or the file ends before.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes the parts contiguously, within the file's length.
    ///
    /// # Errors
    /// If some of the bytes may not have been written.
    fn write_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()>;

    /// Makes everything durable that was written before.
    ///
    /// # Errors
    /// If some of it may not be durable. The caller does not sync again then.
    fn sync(&self) -> io::Result<()>;

    /// Whether the file took less space than its length when it was opened: it may have given its
    /// space back.
    fn is_sparse(&self) -> bool {
        false
    }

    /// Keeps the file open while the result is held, so that it can be written even if the process
    /// has no descriptors left by then.
    ///
    /// # Errors
    /// If it cannot be opened.
    fn pin(&self) -> io::Result<Pin> {
        Ok(Pin::default())
    }

    /// The copies of the file that hold all data now.
    fn copies(&self) -> GoodCopies {
        GoodCopies::ONE
    }

    /// Reads the copy with a number of [`StoreFile::copies`]. A copy that was marked as failed
    /// after that call is still read: its data may be stale, so the caller compares them with a
    /// checksum.
    ///
    /// # Errors
    /// As [`StoreFile::read_at`]; other copies are not tried.
    fn read_copy(&self, copy: usize, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let _ = copy;
        self.read_at(offset, into)
    }

    /// Reads a copy that does not hold all data. The data may be stale, so the caller verifies them
    /// by a checksum.
    ///
    /// # Errors
    /// As [`StoreFile::read_at`], or if there is no such copy.
    fn read_resyncing(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let _ = (offset, into);
        Err(io::ErrorKind::NotFound.into())
    }

    /// Writes `whole` over the good copies, if the copy that [`StoreFile::read_resyncing`] reads
    /// still has these bytes, and the range is not being written. Returns whether it did.
    ///
    /// # Errors
    /// If the good copies cannot be written.
    fn repair_from_resyncing(&self, offset: u64, whole: &[u8]) -> io::Result<bool> {
        let _ = (offset, whole);
        Ok(false)
    }

    /// Writes `whole` over those copies that differ there, or cannot be read there, if one copy has
    /// these bytes. Returns how many copies were durably repaired; `None` if pages of the range are
    /// being written, in which case nothing was changed.
    ///
    /// # Errors
    /// If no copy is left that is known to hold all data.
    fn repair(&self, offset: u64, whole: &[u8]) -> io::Result<Option<usize>> {
        let _ = (offset, whole);
        Ok(Some(0))
    }
}

/// Keeps a file open, in each copy.
#[derive(Debug, Default)]
pub struct Pin(Vec<Arc<File>>);

impl Pin {
    pub(crate) fn of(file: Arc<File>) -> Pin {
        Pin(vec![file])
    }

    /// Also keeps open what `other` keeps open.
    pub(crate) fn join(&mut self, other: Pin) {
        self.0.extend(other.0);
    }
}

/// The storage of a served pool: a directory or a disk, or several copies with the same files.
pub type PoolBacking = Mirror<PoolStore>;

/// Makes a file atomically: after a power cut it exists completely or not at all.
pub fn make<D: SegmentStore>(directory: &D, name: &str, len: u64) -> io::Result<D::File> {
    let new = format!("{name}.new");
    let made = (|| {
        let file = directory.create(&new, len)?;
        file.sync()?;
        directory.rename(&new, name)?;
        directory.sync_names()?;
        // Open it by its name, so that it has no descriptor until it is needed.
        drop(file);
        directory.open(name)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    })();
    if made.is_err() {
        // Free the space that the file takes.
        _ = directory.remove(&new);
    }
    made
}
