//! The storage of a pool: one directory, or two with the same files. A pool of one directory does
//! not use the code for two.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockyard_sync::event_count::{EventCount, Waker};

use crate::buffer::Buffer;
use crate::error::StoreError;
use crate::log_writer::Ended;
use crate::mirror::{CopyStatus, Mirror, MirrorFile, MirrorLogWriter, MirrorReads};
use crate::reads::FinishedRead;
use crate::{
    Durability, EventFd, GoodCopies, Layout, LogWriter, Pin, PoolStore, Reads, SegmentFiles,
    SegmentStore, StoreFile, StoreLocation, WriteBatch,
};

/// The storage of a pool: one copy or two.
#[derive(Debug)]
pub enum Copies<D: SegmentStore> {
    /// One copy.
    One(D),
    /// Two copies.
    Two(Mirror<D>),
}

/// A file of a pool.
#[derive(Debug)]
pub enum CopiesFile<D: SegmentStore> {
    /// One copy.
    One(Arc<D::File>),
    /// Two copies.
    Two(Arc<MirrorFile<D>>),
}

/// The log writer of a pool.
#[derive(Debug)]
pub enum CopiesLogWriter<D: SegmentStore> {
    /// Writes one copy.
    One(D::LogWriter),
    /// Writes two copies.
    Two(MirrorLogWriter<D>),
}

/// The reader of a pool.
#[derive(Debug)]
pub enum CopiesReads<D: SegmentStore> {
    /// Reads the only copy.
    One(D::Reads),
    /// Reads one of two copies.
    Two(MirrorReads<D>),
}

/// Calls the same method of either variant.
macro_rules! delegate {
    ($enum:ident, $self:ident, $inner:ident => $call:expr) => {
        match $self {
            $enum::One($inner) => $call,
            $enum::Two($inner) => $call,
        }
    };
}

/// Why a file of a pool of one copy never meets a pool of two.
const OWN: &str = "files go with the directory that they are of";

impl<D: SegmentStore> Copies<D> {
    /// The directories of the copies that are present.
    pub fn directories(&self) -> Vec<&D> {
        match self {
            Copies::One(one) => vec![one],
            Copies::Two(two) => two.directories().collect(),
        }
    }

    /// The directories of the copies that hold all data.
    fn used(&self) -> Vec<&D> {
        match self {
            Copies::One(one) => vec![one],
            Copies::Two(two) => two.used().collect(),
        }
    }

    fn one(file: D::File) -> CopiesFile<D> {
        CopiesFile::One(Arc::new(file))
    }

    fn two(file: MirrorFile<D>) -> CopiesFile<D> {
        CopiesFile::Two(Arc::new(file))
    }
}

impl Copies<PoolStore> {
    fn first(&self) -> &PoolStore {
        match self {
            Copies::One(one) => one,
            Copies::Two(two) => two.directories().next().expect("one of them is there"),
        }
    }

    /// The path of the pool; with two copies the first one that is present.
    pub fn path(&self) -> &Path {
        self.first().path()
    }

    /// Publishes the control socket of the daemon that has this pool open.
    ///
    /// # Errors
    /// If the system refuses to write it down.
    pub fn announce(&self, control: &Path) -> Result<(), StoreError> {
        self.directories().into_iter().try_for_each(|directory| directory.announce(control))
    }

    /// Whether I/O bypasses the page cache.
    pub fn is_direct(&self) -> bool {
        self.directories().into_iter().all(PoolStore::is_direct)
    }

    /// Free bytes of the file system; with two good copies the smaller number.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn free_bytes(&self) -> Result<u64, StoreError> {
        let free = self.used().into_iter().map(PoolStore::free_bytes);
        Ok(free.collect::<Result<Vec<u64>, _>>()?.into_iter().min().unwrap_or(0))
    }

    /// Whether files are read and written by io_uring.
    pub fn is_uring(&self) -> bool {
        self.first().is_uring()
    }
}

impl<D: SegmentStore> SegmentFiles for Copies<D> {
    type File = CopiesFile<D>;

    fn open(&self, name: &str) -> io::Result<Option<CopiesFile<D>>> {
        Ok(match self {
            Copies::One(one) => one.open(name)?.map(Copies::one),
            Copies::Two(two) => two.open(name)?.map(Copies::two),
        })
    }

    fn create(&self, name: &str, len: u64) -> io::Result<CopiesFile<D>> {
        Ok(match self {
            Copies::One(one) => Copies::one(one.create(name, len)?),
            Copies::Two(two) => Copies::two(two.create(name, len)?),
        })
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        delegate!(Copies, self, it => it.rename(from, to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        delegate!(Copies, self, it => it.remove(name))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        delegate!(Copies, self, it => it.names())
    }

    fn sync_names(&self) -> io::Result<()> {
        delegate!(Copies, self, it => it.sync_names())
    }

    fn erase(&self) -> io::Result<()> {
        delegate!(Copies, self, it => it.erase())
    }

    fn discards(&self) -> bool {
        delegate!(Copies, self, it => it.discards())
    }

    fn discard(&self, file: &CopiesFile<D>) {
        match (self, file) {
            (Copies::One(one), CopiesFile::One(file)) => one.discard(file),
            (Copies::Two(two), CopiesFile::Two(file)) => two.discard(file),
            _ => unreachable!("{OWN}"),
        }
    }

    fn deallocate(&self, file: &CopiesFile<D>) -> io::Result<()> {
        match self {
            Copies::One(one) => one.deallocate(file.as_one()),
            Copies::Two(two) => two.deallocate(file.as_two()),
        }
    }

    fn allocate(&self, file: &CopiesFile<D>, len: u64) -> io::Result<()> {
        match self {
            Copies::One(one) => one.allocate(file.as_one(), len),
            Copies::Two(two) => two.allocate(file.as_two(), len),
        }
    }
}

impl<D: SegmentStore> StoreLocation for Copies<D> {
    fn title(&self) -> String {
        delegate!(Copies, self, it => it.title())
    }

    fn set_layout(&self, wanted: Layout, is_new: bool) -> Result<Layout, StoreError> {
        let mut directories = self.used().into_iter();
        directories.try_fold(wanted, |wanted, directory| directory.set_layout(wanted, is_new))
    }

    fn segments_max(&self) -> usize {
        let most = self.used().into_iter().map(StoreLocation::segments_max);
        most.min().unwrap_or(usize::MAX)
    }

    fn growth_bytes(&self) -> u64 {
        let bytes = self.used().into_iter().map(StoreLocation::growth_bytes);
        bytes.min().unwrap_or(u64::MAX)
    }

    fn check_location(&self) -> io::Result<()> {
        delegate!(Copies, self, it => it.check_location())
    }

    fn fresh_id(&self) -> io::Result<[u8; 16]> {
        delegate!(Copies, self, it => it.fresh_id())
    }
}

impl<D: SegmentStore> SegmentStore for Copies<D> {
    type LogWriter = CopiesLogWriter<D>;
    type Reads = CopiesReads<D>;

    fn copy_status(&self) -> Vec<CopyStatus> {
        match self {
            Copies::One(_) => Vec::new(),
            Copies::Two(two) => two.copy_status(),
        }
    }

    fn reports_sync_error_to_all(&self) -> bool {
        self.directories().into_iter().all(SegmentStore::reports_sync_error_to_all)
    }

    fn log_writer(&self, scratch: Option<&Arc<CopiesFile<D>>>) -> CopiesLogWriter<D> {
        match self {
            Copies::One(one) => {
                CopiesLogWriter::One(one.log_writer(scratch.map(|file| file.as_one())))
            }
            Copies::Two(two) => {
                CopiesLogWriter::Two(two.log_writer(scratch.map(|file| file.as_two())))
            }
        }
    }

    fn reads(&self, event_fd: Option<&EventFd>) -> CopiesReads<D> {
        match self {
            Copies::One(one) => CopiesReads::One(one.reads(event_fd)),
            Copies::Two(two) => CopiesReads::Two(two.reads(event_fd)),
        }
    }
}

impl<D: SegmentStore> CopiesFile<D> {
    fn as_one(&self) -> &Arc<D::File> {
        match self {
            CopiesFile::One(one) => one,
            CopiesFile::Two(_) => unreachable!("{OWN}"),
        }
    }

    fn as_two(&self) -> &Arc<MirrorFile<D>> {
        match self {
            CopiesFile::Two(two) => two,
            CopiesFile::One(_) => unreachable!("{OWN}"),
        }
    }
}

impl<D: SegmentStore> StoreFile for CopiesFile<D> {
    fn len(&self) -> io::Result<u64> {
        delegate!(CopiesFile, self, it => it.len())
    }

    #[inline]
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        delegate!(CopiesFile, self, it => it.read_at(offset, into))
    }

    fn write_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        delegate!(CopiesFile, self, it => it.write_at(offset, parts))
    }

    fn sync(&self) -> io::Result<()> {
        delegate!(CopiesFile, self, it => it.sync())
    }

    fn is_sparse(&self) -> bool {
        delegate!(CopiesFile, self, it => it.is_sparse())
    }

    fn pin(&self) -> io::Result<Pin> {
        delegate!(CopiesFile, self, it => it.pin())
    }

    #[inline]
    fn copies(&self) -> GoodCopies {
        match self {
            CopiesFile::One(_) => GoodCopies::ONE,
            CopiesFile::Two(two) => two.copies(),
        }
    }

    fn read_copy(&self, copy: usize, offset: u64, into: &mut [u8]) -> io::Result<()> {
        match self {
            CopiesFile::One(one) => one.read_at(offset, into),
            CopiesFile::Two(two) => two.read_copy(copy, offset, into),
        }
    }

    fn read_resyncing(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        match self {
            CopiesFile::One(_) => Err(io::ErrorKind::NotFound.into()),
            CopiesFile::Two(two) => two.read_resyncing(offset, into),
        }
    }

    fn repair(&self, offset: u64, whole: &[u8]) -> io::Result<usize> {
        match self {
            CopiesFile::One(_) => Ok(0),
            CopiesFile::Two(two) => two.repair(offset, whole),
        }
    }
}

impl<D: SegmentStore> LogWriter<CopiesFile<D>> for CopiesLogWriter<D> {
    fn depth(&self) -> usize {
        delegate!(CopiesLogWriter, self, it => it.depth())
    }

    fn waker(&self) -> Option<Waker> {
        delegate!(CopiesLogWriter, self, it => it.waker())
    }

    fn begin(
        &mut self,
        file: &Arc<CopiesFile<D>>,
        offset: u64,
        write_batch: WriteBatch,
        durability: Durability,
    ) {
        match self {
            CopiesLogWriter::One(one) => one.begin(file.as_one(), offset, write_batch, durability),
            CopiesLogWriter::Two(two) => two.begin(file.as_two(), offset, write_batch, durability),
        }
    }

    fn wait(&mut self, event_count: &EventCount, is_there: &dyn Fn() -> bool) -> bool {
        delegate!(CopiesLogWriter, self, it => it.wait(event_count, is_there))
    }

    fn end(&mut self) -> Option<Ended> {
        delegate!(CopiesLogWriter, self, it => it.end())
    }
}

impl<D: SegmentStore> Reads<CopiesFile<D>> for CopiesReads<D> {
    fn begin(&mut self, token: u32, file: &Arc<CopiesFile<D>>, offset: u64, buffer: Buffer) {
        match self {
            CopiesReads::One(one) => one.begin(token, file.as_one(), offset, buffer),
            CopiesReads::Two(two) => two.begin(token, file.as_two(), offset, buffer),
        }
    }

    fn submit(&mut self) {
        delegate!(CopiesReads, self, it => it.submit())
    }

    fn take(&mut self) -> Option<FinishedRead> {
        delegate!(CopiesReads, self, it => it.take())
    }

    fn is_any(&mut self) -> bool {
        delegate!(CopiesReads, self, it => it.is_any())
    }

    fn in_flight(&self) -> usize {
        delegate!(CopiesReads, self, it => it.in_flight())
    }

    fn sleep(&mut self, at_most: Duration) {
        delegate!(CopiesReads, self, it => it.sleep(at_most))
    }
}
