//! What a pool needs of a directory and its files: few operations, so that a simulated directory
//! can record every one, cut the power behind it, and lie about it.
//!
//! What is written is visible at once. It is durable when `sync` of its file has returned, and a
//! name when [`Directory::sync_names`] has; until then a power cut may keep any part of it.

pub mod copies;
pub(crate) mod descriptors;
pub(crate) mod disk;
mod file;
pub(crate) mod folder;
pub mod lane;
mod lock;
pub mod mirror;
pub mod reads;
mod real;
pub(crate) mod ring;
pub mod tasks;

use std::fmt;
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use copies::Copies;
pub use file::RealFile;
pub use lane::{Blocking, Durability, Lane, Parcel};
pub use reads::{BlockingReads, Reads};
pub use real::{Purpose, RealDirectory, RealLane, RealReads};
pub use ring::Doorbell;

use crate::error::VolumeError;
use crate::format::superblock;

/// By what files are read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StoreKind {
    /// By io_uring where the system lets this process have it, else by calls that block.
    #[default]
    Auto,
    /// By io_uring.
    Uring,
    /// By calls that block.
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
    /// What waits is written together and synced once.
    #[default]
    Group,
    /// So many workers each write one request and sync for it.
    TaskQueue(u16),
}

impl Commit {
    /// `group`, or `taskq:N`.
    pub fn parse(text: &str) -> Option<Commit> {
        if text == "group" {
            return Some(Commit::Group);
        }
        let workers = text.strip_prefix("taskq:")?.parse().ok()?;
        (1..=tasks::WORKERS_MAX).contains(&workers).then_some(Commit::TaskQueue(workers))
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

/// How a pool is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// What everything on disk is a multiple of, in bytes.
    pub align: u32,
    /// Length of a segment in bytes.
    pub segment_bytes: u32,
}

/// Whether a path names a pool: a directory with a superblock, or a disk with one.
///
/// # Errors
/// If the system does not say what is there: a pool may be there.
pub fn is_pool(path: &Path) -> Result<bool, VolumeError> {
    let superblock = path.join(superblock::FILE);
    let look = || -> io::Result<bool> {
        match found(path)? {
            None => Ok(false),
            Some(it) if it.is_dir() => Ok(found(&superblock)?.is_some_and(|it| it.is_file())),
            Some(_) => disk::is_pool(path),
        }
    };
    look().map_err(VolumeError::io(format!("cannot look for a pool at `{}`", path.display())))
}

/// What a path names; `None` only if the system says that nothing is there.
pub(crate) fn found(path: &Path) -> io::Result<Option<Metadata>> {
    match path.metadata() {
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// The place of a pool, by the name that it has after all links: a directory, which is made if
/// there is none, or a disk.
///
/// # Errors
/// If it can be none.
pub(crate) fn place(path: &Path) -> Result<PathBuf, VolumeError> {
    let doing = || VolumeError::io(format!("cannot make `{}`", path.display()));
    let wrong = |wanted: &str| {
        let (value, wanted) = (path.display().to_string(), wanted.to_owned());
        Err(VolumeError::Invalid { field: "path", value, wanted })
    };
    match found(path).map_err(|error| doing()(error))? {
        Some(it) if it.is_file() => folder::keep_names(path, 1).map_err(|error| doing()(error))?,
        Some(_) if disk::Disk::is_one(path) => {}
        Some(it) if !it.is_dir() => return wrong("a directory, a block device or a file"),
        // What is made there is gone at the next start, and a device was meant.
        None if path.starts_with("/dev") && !path.starts_with("/dev/shm") => {
            return wrong("a block device that is there");
        }
        _ => folder::make(path).map_err(|error| doing()(error))?,
    }
    path.canonicalize().map_err(|error| doing()(error))
}

/// Most copies that a pool has.
pub(crate) const COPIES_MAX: usize = 2;

/// The copies of a file that held all data when [`StoreFile::copies`] was called. A copy keeps its
/// number for as long as the file is open, so that a caller which tries one copy after another
/// reaches each of them, also if another thread gives a copy up in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GoodCopies([bool; COPIES_MAX]);

impl GoodCopies {
    /// The only copy of a pool of one copy.
    pub const ONE: GoodCopies = GoodCopies([true, false]);

    /// Whether each copy held all data, by the number of the copy.
    pub fn new(good: [bool; COPIES_MAX]) -> GoodCopies {
        GoodCopies(good)
    }

    /// How many copies held all data.
    pub fn count(self) -> usize {
        self.0.iter().filter(|good| **good).count()
    }

    /// The numbers of the copies that held all data, in ascending order.
    pub fn numbers(self) -> impl Iterator<Item = usize> {
        (0..).zip(self.0).filter(|(_, good)| *good).map(|(number, _)| number)
    }

    /// The number of the copy that is read first; 0 if no copy is left.
    #[inline]
    pub fn first(self) -> usize {
        usize::from(self.0 == [false, true])
    }
}

/// What a thread of a pool does.
pub type Work = Box<dyn FnOnce() + Send>;

/// A directory, or something that is divided as if it were one.
pub trait Directory: fmt::Debug + Send + Sync + 'static {
    /// An open file of it.
    type File: StoreFile;
    /// The way of groups into its files.
    type Lane: Lane<Self::File>;
    /// The way of reads out of its files.
    type Reads: Reads<Self::File>;

    /// What it is called in messages.
    fn title(&self) -> String;

    /// Whether everybody who syncs a file is told of a write that has failed. Where only the first
    /// of them is, there must not be two at once.
    fn tells_everybody(&self) -> bool {
        true
    }

    /// Makes sure that a pool, or a copy of one, may be made here where there is none.
    ///
    /// # Errors
    /// If what is there belongs to somebody, or there is too little room.
    fn claim(&self) -> Result<(), VolumeError> {
        Ok(())
    }

    /// Is told how the pool is divided, before a segment is opened. Before that it is asked, of one
    /// that is made (`is_new`), how it can be if somebody wants it so.
    ///
    /// # Errors
    /// If it can be no such pool.
    fn divide(&self, wanted: Division, is_new: bool) -> Result<Division, VolumeError> {
        let _ = is_new;
        Ok(wanted)
    }

    /// How many segments there may be at most, as far as that is known before one cannot be made.
    fn segments_max(&self) -> usize {
        usize::MAX
    }

    /// Whether it is of use to say what nobody needs.
    fn discards(&self) -> bool {
        false
    }

    /// Nobody needs what is in a file; what is read there until it is written may be anything.
    fn discard(&self, file: &Self::File) {
        let _ = file;
    }

    /// Gives the space of a file that is not needed back to the file system. What is read there
    /// until it is filled again may be anything.
    ///
    /// # Errors
    /// If that cannot be done here.
    fn give_back(&self, file: &Self::File) -> io::Result<()> {
        let _ = file;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Has a file of this length take its space again, as one that is made.
    ///
    /// # Errors
    /// If there is no room for it.
    fn fill(&self, file: &Self::File, len: u64) -> io::Result<()> {
        let _ = (file, len);
        Ok(())
    }

    /// Fails if what is written from now on would be found by nobody: all of it was removed. Asked
    /// now and then.
    ///
    /// # Errors
    /// What is gone.
    fn look(&self) -> io::Result<()> {
        Ok(())
    }

    /// Whether no copy is away that may have what is damaged in the others.
    fn has_all_copies(&self) -> bool {
        true
    }

    /// The name in messages of the copy with this number, one of [`StoreFile::copies`].
    fn copy_title(&self, copy: usize) -> String {
        let _ = copy;
        self.title()
    }

    /// Something is to be done on a thread beside the committer's; answers what that thread does.
    /// With [`Directory::until`] and its own operations a simulated directory has the threads of a
    /// pool go on one at a time, as it likes.
    fn beside(&self, work: Work) -> Work {
        work
    }

    /// One of these threads waits until something is so: it sleeps, or blocks, when this returns.
    fn until(&self, is_so: &dyn Fn() -> bool) {
        let _ = is_so;
    }

    /// A way of groups into files, for the calling thread. It may write zeros to the beginning of a
    /// file that nobody needs, to see how fast that is.
    fn lane(&self, scratch: Option<&Arc<Self::File>>) -> Self::Lane;

    /// A way of reads out of files, for one thread at a time. What ends rings the doorbell, unless
    /// it has ended when it has begun.
    fn reads(&self, doorbell: Option<&Doorbell>) -> Self::Reads;

    /// Opens a file, if there is one of this name.
    ///
    /// # Errors
    /// If it is there and cannot be opened.
    fn open(&self, name: &str) -> io::Result<Option<Self::File>>;

    /// Makes a file of `len` zeros that are written, in the place of one that is there.
    ///
    /// # Errors
    /// If it cannot be made.
    fn create(&self, name: &str, len: u64) -> io::Result<Self::File>;

    /// Renames a file, in the place of one that is there.
    ///
    /// # Errors
    /// If it cannot be renamed.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file, if there is one of this name.
    ///
    /// # Errors
    /// If it is there and cannot be removed.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes durable which files there are.
    ///
    /// # Errors
    /// If they may not be.
    fn sync_names(&self) -> io::Result<()>;

    /// The names of all files.
    ///
    /// # Errors
    /// If they cannot be read.
    fn names(&self) -> io::Result<Vec<String>>;

    /// The names of what a copy of the pool needs, beside others.
    ///
    /// # Errors
    /// As [`Directory::names`].
    fn needed(&self) -> io::Result<Vec<String>> {
        self.names()
    }

    /// How many bytes more files may have, as far as that is known.
    fn outside_bytes(&self) -> u64 {
        u64::MAX
    }

    /// An identity that nothing else has.
    ///
    /// # Errors
    /// If the system does not give one.
    fn fresh_id(&self) -> io::Result<[u8; 16]>;
}

/// An open file of fixed length. Several threads use it at once.
#[expect(clippy::len_without_is_empty, reason = "no file of a pool is empty")]
pub trait StoreFile: fmt::Debug + Send + Sync + 'static {
    /// Its length in bytes.
    ///
    /// # Errors
    /// If the system does not say.
    fn len(&self) -> io::Result<u64>;

    /// Reads. Where the file is open for direct I/O, place, length and memory are aligned.
    ///
    /// # Errors
    /// If the bytes cannot be had, or if the file ends before.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes the parts one behind the other, inside the file's length.
    ///
    /// # Errors
    /// If some of it may not be written.
    fn write_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()>;

    /// Makes everything durable that was written before.
    ///
    /// # Errors
    /// If some of it may not be; it is not asked again then.
    fn sync(&self) -> io::Result<()>;

    /// Whether it took less space than its length when it was found: it may have given that back.
    fn is_sparse(&self) -> bool {
        false
    }

    /// Keeps it open as long as the answer is held, so that it can be written to where the process
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

    /// Reads the copy with a number of [`StoreFile::copies`]. A copy that was given up after that
    /// call is still read: its data may be stale, so the caller compares them with a checksum.
    ///
    /// # Errors
    /// As [`StoreFile::read_at`]; other copies are not tried.
    fn read_copy(&self, copy: usize, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let _ = copy;
        self.read_at(offset, into)
    }

    /// Reads what a copy has that has not everything: it counts only if it is known by something
    /// else to be what is wanted.
    ///
    /// # Errors
    /// As [`StoreFile::read_at`], or if there is no such copy.
    fn read_spare(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let _ = (offset, into);
        Err(io::ErrorKind::NotFound.into())
    }

    /// Writes bytes over those copies that have something else there, or cannot be read there, if
    /// one has them: what is written now is left alone. Says how many were mended, durably.
    ///
    /// # Errors
    /// If it is known of no copy any more whether it has everything.
    fn mend(&self, offset: u64, whole: &[u8]) -> io::Result<usize> {
        let _ = (offset, whole);
        Ok(0)
    }
}

/// What keeps a file open, in each copy.
#[derive(Debug, Default)]
pub struct Pin(Vec<Arc<File>>);

impl Pin {
    pub(crate) fn of(file: Arc<File>) -> Pin {
        Pin(vec![file])
    }

    /// Keeps open what the other one does, too.
    pub(crate) fn join(&mut self, other: Pin) {
        self.0.extend(other.0);
    }
}

/// Where the pool of a device is: a directory, or two of them with the same files.
pub type Backing = Copies<RealDirectory>;

/// Makes a file that is there as a whole or not at all, whenever the power is cut.
pub(crate) fn make<D: Directory>(directory: &D, name: &str, len: u64) -> io::Result<D::File> {
    let new = format!("{name}.new");
    let made = (|| {
        let file = directory.create(&new, len)?;
        file.sync()?;
        directory.rename(&new, name)?;
        directory.sync_names()?;
        // By its name: it is opened when it is wanted, and has no descriptor until then.
        drop(file);
        directory.open(name)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    })();
    if made.is_err() {
        // What it holds is of use to others.
        _ = directory.remove(&new);
    }
    made
}
