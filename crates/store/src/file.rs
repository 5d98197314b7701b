//! An open file of a pool: a file of its own, or a part of the disk that contains the pool; and the
//! descriptors of segments.
//!
//! A segment is opened when it is needed. A bounded number is open at once in this process, and the
//! one opened first is closed first. So a pool in a directory may have any number of segments.
//!
//! A descriptor is in use while another reference to it exists than the one here: a read or a write
//! in flight has one, and so has a segment that is being written ([`super::Pin`]). Descriptors in
//! use are not closed. A few spare descriptors are kept, which are closed when the process has no
//! others left.
#![allow(clippy::disallowed_types)] // A sync takes far longer than a lock; opening a file is rare.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use blockyard_sync::rcu_cell::RcuCell;
use blockyard_volume_format::UNIT;
use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::ReadWriteFlags;
use rustix::process::{Resource, getrlimit};

use crate::buffer::{ALIGN, Memory};
use crate::remote::RemoteFile;
use crate::{Pin, StoreFile};

/// Most parts that the kernel takes in one call (`IOV_MAX`).
const PARTS_MAX: usize = 1024;

/// The type that `statfs` reports for a FUSE file system (`FUSE_SUPER_MAGIC` of linux/magic.h).
const FUSE: rustix::fs::FsWord = 0x6573_5546;

/// The alignment of offsets and lengths of the page cache and of remote storage, in bytes.
pub(crate) const ANY_ALIGN: u32 = 1;

/// The alignment of offsets and lengths that direct I/O on an open file needs, in bytes: 512 to
/// 4096, a power of two. Where the system does not report it, the file may need the longest.
pub(crate) fn direct_align(file: &File) -> u32 {
    let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
    found
        .filter(|it| it.stx_mask & StatxFlags::DIOALIGN.bits() != 0)
        .map(|it| it.stx_dio_offset_align)
        // statx(2): 0 means that this file has no direct I/O.
        .filter(|align| align.is_power_of_two() && *align <= ALIGN as u32)
        .map(|align| align.max(UNIT as u32))
        .unwrap_or(ALIGN as u32)
}

/// How an open file is obtained.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// Open as long as this exists.
    Open(Arc<File>),
    /// Opened when it is needed; the number distinguishes files of this kind.
    OnDemand(Arc<OnDemand>, u32),
    /// No file of this system.
    Remote(Arc<dyn RemoteFile>),
}

impl Source {
    /// The open file, which stays open while the result is held.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub(crate) fn get(&self, what: Use) -> io::Result<Arc<File>> {
        match self {
            Source::Open(file) => Ok(Arc::clone(file)),
            Source::OnDemand(file, _) => file.get(what),
            Source::Remote(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Whether both are one file.
    pub(crate) fn is(&self, other: &Source) -> bool {
        match (self, other) {
            (Source::Open(one), Source::Open(other)) => Arc::ptr_eq(one, other),
            (Source::OnDemand(one, _), Source::OnDemand(other, _)) => Arc::ptr_eq(one, other),
            (Source::Remote(one), Source::Remote(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    /// A number that is different for most files.
    pub(crate) fn number(&self) -> usize {
        match self {
            Source::Open(file) => file.as_raw_fd() as usize,
            Source::OnDemand(_, number) => *number as usize,
            Source::Remote(file) => Arc::as_ptr(file).addr(),
        }
    }
}

/// An open file of a pool.
#[derive(Debug)]
pub struct PoolFile {
    source: Source,
    /// Offset of the part in the source, in bytes.
    base: u64,
    /// The length, if this is a part.
    len: Option<u64>,
    /// The file took less space than its length when it was found.
    is_sparse: bool,
    /// Shared sync state, for parts that use the page cache.
    syncs: Option<Arc<Syncs>>,
    /// Alignment of the offsets and lengths that the system reads, in bytes. Other ranges are read
    /// together with the bytes around them, through other memory.
    io_align: u32,
}

/// Serialises the syncs of a shared descriptor. The system reports a failed write-back only to the
/// first sync; this reports it to all later ones too.
#[derive(Debug, Default)]
pub(crate) struct Syncs {
    has_failed: Mutex<bool>,
}

impl Syncs {
    fn sync(&self, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut has_failed = self.has_failed.lock().unwrap_or_else(PoisonError::into_inner);
        if *has_failed {
            return Err(io::Error::other("a sync before has failed"));
        }
        let synced = sync();
        *has_failed = synced.is_err();
        synced
    }
}

impl PoolFile {
    /// A whole file.
    pub(crate) fn of(file: File) -> PoolFile {
        PoolFile::sharing(&Arc::new(file))
    }

    /// A whole file that other owners have open too.
    pub(crate) fn sharing(file: &Arc<File>) -> PoolFile {
        let source = Source::Open(Arc::clone(file));
        let io_align = ANY_ALIGN;
        PoolFile { source, base: 0, len: None, is_sparse: false, syncs: None, io_align }
    }

    /// A whole file of `len` bytes that is opened when it is needed; `number` identifies it.
    pub(crate) fn on_demand(
        file: Arc<OnDemand>,
        number: u32,
        len: u64,
        is_sparse: bool,
    ) -> PoolFile {
        let (source, io_align) = (Source::OnDemand(file, number), ANY_ALIGN);
        PoolFile { source, base: 0, len: Some(len), is_sparse, syncs: None, io_align }
    }

    /// Sets the alignment of the offsets and lengths that the system reads, in bytes.
    pub(crate) fn aligned(self, io_align: u32) -> PoolFile {
        PoolFile { io_align, ..self }
    }

    /// A file of a remote pool.
    pub(crate) fn remote(file: Arc<dyn RemoteFile>) -> PoolFile {
        let (source, io_align) = (Source::Remote(file), ANY_ALIGN);
        PoolFile { source, base: 0, len: None, is_sparse: false, syncs: None, io_align }
    }

    /// How the file is obtained.
    pub(crate) fn source(&self) -> &Source {
        &self.source
    }

    /// A part of a disk, which `number` identifies, from `base` on. `syncs` is the shared sync
    /// state, if the parts have one.
    pub(crate) fn part(
        (disk, number): (&Arc<OnDemand>, u32),
        base: u64,
        len: u64,
        syncs: Option<&Arc<Syncs>>,
    ) -> PoolFile {
        let (source, io_align) = (Source::OnDemand(Arc::clone(disk), number), ANY_ALIGN);
        let syncs = syncs.cloned();
        PoolFile { source, base, len: Some(len), is_sparse: false, syncs, io_align }
    }

    /// Whether the file system is FUSE. There the kernel passes the durability of a write as a flag
    /// of the write, which many servers ignore; a sync is a request of its own.
    pub(crate) fn is_behind_fuse(&self) -> bool {
        self.source
            .get(Use::Read)
            .is_ok_and(|file| rustix::fs::fstatfs(&file).is_ok_and(|it| it.f_type == FUSE))
    }

    /// The offset in the source file of an offset in this file.
    #[inline]
    pub(crate) fn source_offset(&self, offset: u64) -> u64 {
        debug_assert!(self.len.is_none_or(|len| offset < len), "{offset} of {:?}", self.len);
        self.base + offset
    }

    /// Whether the system reads `len` bytes at an offset.
    #[inline]
    pub(crate) fn is_aligned(&self, offset: u64, len: usize) -> bool {
        (offset | len as u64) & u64::from(self.io_align - 1) == 0
    }

    /// Reads the shortest aligned range that contains the wanted one.
    #[cold]
    fn read_around(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let align = u64::from(self.io_align);
        let from = offset / align * align;
        let len = (offset + into.len() as u64).next_multiple_of(align) - from;
        let mut bytes = Memory::new(len).take_beyond(len as usize);
        self.source.get(Use::Read)?.read_exact_at(&mut bytes, self.source_offset(from))?;
        into.copy_from_slice(&bytes[(offset - from) as usize..][..into.len()]);
        Ok(())
    }

    /// Writes slices contiguously.
    pub(crate) fn write_slices(
        &self,
        offset: u64,
        slices: &mut [IoSlice<'_>],
        flags: ReadWriteFlags,
    ) -> io::Result<()> {
        let file = self.source.get(Use::Read)?;
        let mut at = self.source_offset(offset);
        let mut left = slices;
        IoSlice::advance_slices(&mut left, 0);
        while !left.is_empty() {
            let some = &left[..left.len().min(PARTS_MAX)];
            let write = || rustix::io::pwritev2(&file, some, at, flags);
            let written = rustix::io::retry_on_intr(write)?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            at += written as u64;
            IoSlice::advance_slices(&mut left, written);
        }
        Ok(())
    }
}

impl StoreFile for PoolFile {
    fn len(&self) -> io::Result<u64> {
        match (self.len, &self.source) {
            (Some(len), _) => Ok(len),
            (None, Source::Remote(file)) => file.len(),
            (None, source) => Ok(source.get(Use::Read)?.metadata()?.len()),
        }
    }

    #[inline]
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        if let Source::Remote(file) = &self.source {
            return file.read_at(offset, into);
        }
        if !self.is_aligned(offset, into.len()) {
            return self.read_around(offset, into);
        }
        self.source.get(Use::Read)?.read_exact_at(into, self.source_offset(offset))
    }

    fn write_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        if let Source::Remote(file) = &self.source {
            return file.write_at(offset, parts);
        }
        let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        self.write_slices(offset, &mut slices, ReadWriteFlags::empty())
    }

    fn sync(&self) -> io::Result<()> {
        if let Source::Remote(file) = &self.source {
            return file.sync();
        }
        let file = self.source.get(Use::Read)?;
        match &self.syncs {
            Some(syncs) => syncs.sync(|| file.sync_data()),
            None => file.sync_data(),
        }
    }

    fn is_sparse(&self) -> bool {
        self.is_sparse
    }

    fn pin(&self) -> io::Result<Pin> {
        if let Source::Remote(file) = &self.source {
            return file.pin();
        }
        Ok(Pin::of(self.source.get(Use::Write)?))
    }
}

/// Bounds of the limit on segment descriptors that are open and not in use.
const OPEN_MIN: u64 = 16;
const OPEN_MAX: u64 = 8192;

/// These descriptors may be this fraction (1/4) of all descriptors of the process.
const PART: u64 = 4;

/// Spare descriptors for when the process has no others: one to open a segment, one to make one,
/// for several threads at once.
const SPARES: usize = 8;

/// Spare descriptors reserved for reads: a segment that is written keeps its descriptor until it is
/// durable.
const FOR_READS: usize = SPARES / 2;

/// What a descriptor is needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// A read, which releases it soon.
    Read,
    /// Making or writing a file.
    Write,
}

/// How a file is opened in its directory.
type Open = dyn Fn(&File) -> io::Result<File> + Send + Sync;

/// A file that is opened when it is needed, or a disk that is open until it is left.
pub(crate) struct OnDemand {
    /// The directory, as long as the pool has it: an idle reader may keep this file, and must not
    /// keep the directory open.
    directory: Weak<File>,
    open: Box<Open>,
    /// The file while it is open.
    file: RcuCell<Option<Arc<File>>>,
}

impl OnDemand {
    /// A file that `open` opens in a directory when it is needed.
    pub(crate) fn new(
        directory: &Arc<File>,
        open: impl Fn(&File) -> io::Result<File> + Send + Sync + 'static,
    ) -> Arc<OnDemand> {
        let (directory, open) = (Arc::downgrade(directory), Box::new(open));
        Arc::new(OnDemand { directory, open, file: RcuCell::new(None) })
    }

    /// A disk, which is open until [`OnDemand::leave`]: an idle reader may keep this, and must not
    /// keep the disk open.
    pub(crate) fn disk(file: &Arc<File>) -> Arc<OnDemand> {
        let (directory, open): (_, Box<Open>) = (Weak::new(), Box::new(File::try_clone));
        Arc::new(OnDemand { directory, open, file: RcuCell::new(Some(Arc::clone(file))) })
    }

    /// The open file, which stays open while the result is held.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub(crate) fn get(self: &Arc<Self>, what: Use) -> io::Result<Arc<File>> {
        match &*self.file.get() {
            Some(file) => Ok(Arc::clone(file)),
            None => self.reopen(what),
        }
    }

    #[cold]
    fn reopen(self: &Arc<Self>, what: Use) -> io::Result<Arc<File>> {
        let directory = self.directory.upgrade();
        let directory =
            directory.ok_or_else(|| io::Error::other("the pool does not have its copy there"))?;
        let opened = Arc::new(open_with_retry(what, || (self.open)(&directory))?);
        // Another thread may have opened it at the same moment.
        self.file.update(|file| Some(file.clone().unwrap_or_else(|| Arc::clone(&opened))));
        let file = (*self.file.get()).clone().unwrap_or(opened);
        open_files().add(self);
        drop(directory);
        // The directory was left meanwhile: `close_all_in` may have come before.
        if self.directory.strong_count() == 0 {
            self.leave();
        }
        Ok(file)
    }

    /// Closes the file as soon as no call uses it.
    pub(crate) fn leave(&self) {
        self.file.update(|_| None);
    }

    /// Closes the file unless it is in use. Returns whether it is closed.
    fn close(&self) -> bool {
        let mut is_closed = true;
        self.file.update(|file| {
            is_closed = file.as_ref().is_none_or(|file| Arc::strong_count(file) == 1);
            if is_closed { None } else { file.clone() }
        });
        is_closed
    }
}

impl fmt::Debug for OnDemand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnDemand").field("file", &*self.file.get()).finish_non_exhaustive()
    }
}

/// The open files, in the order in which they were opened, and the spare descriptors.
#[derive(Debug)]
struct OpenFiles {
    files: VecDeque<Weak<OnDemand>>,
    spares: Vec<OwnedFd>,
}

static OPEN: Mutex<OpenFiles> =
    Mutex::new(OpenFiles { files: VecDeque::new(), spares: Vec::new() });

fn open_files() -> MutexGuard<'static, OpenFiles> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl OpenFiles {
    fn add(&mut self, file: &Arc<OnDemand>) {
        self.files.push_back(Arc::downgrade(file));
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let most = (limit / PART).clamp(OPEN_MIN, OPEN_MAX) as usize;
        while self.files.len() > most && self.close_one() {}
        self.refill();
    }

    /// Closes the file that was opened first among those that are not in use. Returns whether there
    /// was one.
    fn close_one(&mut self) -> bool {
        for _ in 0..self.files.len() {
            let Some(first) = self.files.pop_front() else { return false };
            match first.upgrade() {
                // The pool of the file is closed.
                None => return true,
                Some(file) if file.close() => return true,
                Some(_) => self.files.push_back(first),
            }
        }
        false
    }

    /// Closes a descriptor, so that a file can be opened for this use. Returns whether one was
    /// closed. A read may take any spare descriptor. A write, which keeps its descriptor, takes
    /// only a spare beyond those reserved for reads; descriptors of closed segments replenish the
    /// spares first.
    fn close_for(&mut self, what: Use) -> bool {
        if what == Use::Read {
            return self.spares.pop().is_some() || self.close_one();
        }
        while self.spares.len() <= FOR_READS && self.close_one() {
            self.refill();
        }
        self.spares.len() > FOR_READS && self.spares.pop().is_some()
    }

    /// Opens spare descriptors until there are enough, or none are left in the process.
    fn refill(&mut self) {
        while self.spares.len() < SPARES {
            match File::open("/dev/null") {
                Ok(spare) => self.spares.push(spare.into()),
                Err(_) => return,
            }
        }
    }
}

/// Closes the files of a directory when this is dropped, which is after the directory itself: no
/// file is opened there any more.
#[derive(Debug)]
pub(crate) struct ClosesAll(pub(crate) Weak<File>);

impl Drop for ClosesAll {
    fn drop(&mut self) {
        let files = &mut open_files().files;
        files.retain(|file| {
            let Some(file) = file.upgrade() else { return false };
            let is_here = Weak::ptr_eq(&file.directory, &self.0);
            if is_here {
                file.leave();
            }
            !is_here
        });
    }
}

/// Whether an error says that no descriptors are left in the process or the system. Like missing
/// space, this is temporary and says nothing about the file.
pub fn is_short(error: &io::Error) -> bool {
    [Some(libc::EMFILE), Some(libc::ENFILE)].contains(&error.raw_os_error())
}

/// Opens the spare descriptors.
pub(crate) fn keep_spares() {
    open_files().refill();
}

/// Opens a file. If the process has no descriptor left, this closes a spare one or a segment that
/// is not in use. It tries again until nothing is left to close. One thread at a time does so:
/// otherwise each would take the descriptor that another one has just closed for itself.
///
/// # Errors
/// As `open`.
pub(crate) fn open_with_retry<T>(what: Use, open: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let mut opened = open();
    if !opened.as_ref().is_err_and(is_short) {
        return opened;
    }
    let mut files = open_files();
    while opened.as_ref().is_err_and(is_short) && files.close_for(what) {
        opened = open();
    }
    opened
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the checkpoint got the error, and the log then took for durable what had not
    /// been written.
    #[test]
    fn all_threads_that_sync_a_descriptor_get_its_error() {
        let syncs = Syncs::default();
        assert!(syncs.sync(|| Ok(())).is_ok());
        assert!(syncs.sync(|| Err(io::ErrorKind::StorageFull.into())).is_err());
        assert!(syncs.sync(|| Ok(())).is_err());
    }

    #[test]
    fn only_one_thread_syncs_a_descriptor_at_a_time() {
        let (syncs, running) = (Syncs::default(), Mutex::new(()));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let sync = || {
                            assert!(running.try_lock().is_ok());
                            Ok(())
                        };
                        assert!(syncs.sync(sync).is_ok());
                    }
                });
            }
        });
    }

    fn directory() -> Arc<File> {
        Arc::new(File::open("/dev").unwrap())
    }

    fn null(directory: &Arc<File>) -> Arc<OnDemand> {
        OnDemand::new(directory, |_| File::open("/dev/null"))
    }

    #[test]
    fn files_of_a_directory_that_was_left_are_closed() {
        let (directory, other) = (directory(), directory());
        let closes_all = ClosesAll(Arc::downgrade(&directory));
        let [one, another] = [&directory, &other].map(null);
        let in_use = one.get(Use::Read).unwrap();
        another.get(Use::Read).unwrap();
        drop(directory);
        drop(closes_all);
        assert!(one.file.get().is_none() && another.file.get().is_some());
        assert_eq!(Arc::strong_count(&in_use), 1, "the call that uses it closes it");
        assert!(one.get(Use::Read).is_err());
    }

    /// Regression: a read failed with an I/O error while the process had no descriptor left. Five
    /// times in a row, another thread had taken the descriptor that was closed for it.
    #[test]
    fn an_open_is_tried_until_no_descriptor_can_be_closed() {
        keep_spares();
        let tries = std::cell::Cell::new(0);
        let opened = open_with_retry(Use::Read, || {
            tries.set(tries.get() + 1);
            match tries.get() {
                1..=6 => Err(io::Error::from_raw_os_error(libc::EMFILE)),
                _ => Ok(tries.get()),
            }
        });
        assert_eq!(opened.unwrap(), 7);
    }

    #[test]
    fn a_file_in_use_is_not_closed() {
        let directory = directory();
        let file = null(&directory);
        let in_use = file.get(Use::Read).unwrap();
        assert!(Arc::ptr_eq(&in_use, &file.get(Use::Read).unwrap()), "it is opened once");
        assert!(!file.close() && file.file.get().is_some());
        drop(in_use);
        assert!(file.close() && file.file.get().is_none());
        assert!(file.get(Use::Read).is_ok(), "it is opened again");
    }

    #[test]
    fn the_one_opened_first_is_closed_first() {
        let directory = directory();
        let all: Vec<_> = (0..4).map(|_| null(&directory)).collect();
        let mut files = OpenFiles { files: VecDeque::new(), spares: Vec::new() };
        let is_open = |at: usize| all[at].file.get().is_some();
        for file in &all {
            let opened = Arc::new(File::open("/dev/null").unwrap());
            file.file.update(|_| Some(Arc::clone(&opened)));
            files.files.push_back(Arc::downgrade(file));
        }
        let used = all[0].get(Use::Read).unwrap();
        assert!(files.close_one() && is_open(0) && !is_open(1) && is_open(2));
        assert!(files.close_one() && files.close_one() && !is_open(2) && !is_open(3));
        assert!(!files.close_one(), "the one that is left is in use");
        drop(used);
        assert!(files.close_one() && !is_open(0) && !files.close_one());
    }
}
