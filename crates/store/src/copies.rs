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
use crate::reads::Got;
use crate::{
    Durability, EventFd, GoodCopies, Layout, LogWriter, Pin, PoolStore, Reads, SegmentStore,
    StoreFile, WriteBatch,
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

    /// The status of the copies; empty for a pool of one copy.
    pub fn status(&self) -> Vec<CopyStatus> {
        match self {
            Copies::One(_) => Vec::new(),
            Copies::Two(two) => two.status(),
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
    /// If the system does not tell it.
    pub fn free_bytes(&self) -> Result<u64, StoreError> {
        let free = self.used().into_iter().map(PoolStore::free_bytes);
        Ok(free.collect::<Result<Vec<u64>, _>>()?.into_iter().min().unwrap_or(0))
    }

    /// Whether files are read and written by io_uring.
    pub fn is_uring(&self) -> bool {
        self.first().is_uring()
    }
}

impl<D: SegmentStore> SegmentStore for Copies<D> {
    type File = CopiesFile<D>;
    type LogWriter = CopiesLogWriter<D>;
    type Reads = CopiesReads<D>;

    fn title(&self) -> String {
        match self {
            Copies::One(one) => one.title(),
            Copies::Two(two) => two.title(),
        }
    }

    fn copy_title(&self, copy: usize) -> String {
        match self {
            Copies::One(one) => one.title(),
            Copies::Two(two) => two.copy_title(copy),
        }
    }

    fn reports_sync_error_to_all(&self) -> bool {
        self.directories().into_iter().all(SegmentStore::reports_sync_error_to_all)
    }

    fn divide(&self, wanted: Layout, is_new: bool) -> Result<Layout, StoreError> {
        let mut directories = self.used().into_iter();
        directories.try_fold(wanted, |wanted, directory| directory.divide(wanted, is_new))
    }

    fn segments_max(&self) -> usize {
        let most = self.used().into_iter().map(SegmentStore::segments_max);
        most.min().unwrap_or(usize::MAX)
    }

    fn discards(&self) -> bool {
        match self {
            Copies::One(one) => one.discards(),
            Copies::Two(two) => two.discards(),
        }
    }

    fn discard(&self, file: &CopiesFile<D>) {
        match (self, file) {
            (Copies::One(one), CopiesFile::One(file)) => one.discard(file),
            (Copies::Two(two), CopiesFile::Two(file)) => two.discard(file),
            _ => unreachable!("{OWN}"),
        }
    }

    fn give_back(&self, file: &CopiesFile<D>) -> io::Result<()> {
        match self {
            Copies::One(one) => one.give_back(file.as_one()),
            Copies::Two(two) => two.give_back(file.as_two()),
        }
    }

    fn fill(&self, file: &CopiesFile<D>, len: u64) -> io::Result<()> {
        match self {
            Copies::One(one) => one.fill(file.as_one(), len),
            Copies::Two(two) => two.fill(file.as_two(), len),
        }
    }

    fn look(&self) -> io::Result<()> {
        match self {
            Copies::One(one) => one.look(),
            Copies::Two(two) => two.look(),
        }
    }

    fn has_all_copies(&self) -> bool {
        match self {
            Copies::One(one) => one.has_all_copies(),
            Copies::Two(two) => two.has_all_copies(),
        }
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
        match self {
            Copies::One(one) => one.rename(from, to),
            Copies::Two(two) => two.rename(from, to),
        }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match self {
            Copies::One(one) => one.remove(name),
            Copies::Two(two) => two.remove(name),
        }
    }

    fn sync_names(&self) -> io::Result<()> {
        match self {
            Copies::One(one) => one.sync_names(),
            Copies::Two(two) => two.sync_names(),
        }
    }

    fn outside_bytes(&self) -> u64 {
        let bytes = self.used().into_iter().map(SegmentStore::outside_bytes);
        bytes.min().unwrap_or(u64::MAX)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        match self {
            Copies::One(one) => one.names(),
            Copies::Two(two) => two.names(),
        }
    }

    fn erase(&self) -> io::Result<()> {
        match self {
            Copies::One(one) => one.erase(),
            Copies::Two(two) => two.erase(),
        }
    }

    fn fresh_id(&self) -> io::Result<[u8; 16]> {
        match self {
            Copies::One(one) => one.fresh_id(),
            Copies::Two(two) => two.fresh_id(),
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
        match self {
            CopiesFile::One(one) => one.len(),
            CopiesFile::Two(two) => two.len(),
        }
    }

    #[inline]
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        match self {
            CopiesFile::One(one) => one.read_at(offset, into),
            CopiesFile::Two(two) => two.read_at(offset, into),
        }
    }

    fn write_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        match self {
            CopiesFile::One(one) => one.write_at(offset, parts),
            CopiesFile::Two(two) => two.write_at(offset, parts),
        }
    }

    fn sync(&self) -> io::Result<()> {
        match self {
            CopiesFile::One(one) => one.sync(),
            CopiesFile::Two(two) => two.sync(),
        }
    }

    fn is_sparse(&self) -> bool {
        match self {
            CopiesFile::One(one) => one.is_sparse(),
            CopiesFile::Two(two) => two.is_sparse(),
        }
    }

    fn pin(&self) -> io::Result<Pin> {
        match self {
            CopiesFile::One(one) => one.pin(),
            CopiesFile::Two(two) => two.pin(),
        }
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
        match self {
            CopiesLogWriter::One(one) => one.depth(),
            CopiesLogWriter::Two(two) => two.depth(),
        }
    }

    fn takes_short(&self) -> bool {
        match self {
            CopiesLogWriter::One(one) => one.takes_short(),
            CopiesLogWriter::Two(two) => two.takes_short(),
        }
    }

    fn wait_written(&mut self) -> bool {
        match self {
            CopiesLogWriter::One(one) => one.wait_written(),
            CopiesLogWriter::Two(two) => two.wait_written(),
        }
    }

    fn waker(&self) -> Option<Waker> {
        match self {
            CopiesLogWriter::One(one) => one.waker(),
            CopiesLogWriter::Two(two) => two.waker(),
        }
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
        match self {
            CopiesLogWriter::One(one) => one.wait(event_count, is_there),
            CopiesLogWriter::Two(two) => two.wait(event_count, is_there),
        }
    }

    fn end(&mut self) -> Option<Ended> {
        match self {
            CopiesLogWriter::One(one) => one.end(),
            CopiesLogWriter::Two(two) => two.end(),
        }
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
        match self {
            CopiesReads::One(one) => one.submit(),
            CopiesReads::Two(two) => two.submit(),
        }
    }

    fn take(&mut self) -> Option<Got> {
        match self {
            CopiesReads::One(one) => one.take(),
            CopiesReads::Two(two) => two.take(),
        }
    }

    fn is_any(&mut self) -> bool {
        match self {
            CopiesReads::One(one) => one.is_any(),
            CopiesReads::Two(two) => two.is_any(),
        }
    }

    fn under_way(&self) -> usize {
        match self {
            CopiesReads::One(one) => one.under_way(),
            CopiesReads::Two(two) => two.under_way(),
        }
    }

    fn sleep(&mut self, at_most: Duration) {
        match self {
            CopiesReads::One(one) => one.sleep(at_most),
            CopiesReads::Two(two) => two.sleep(at_most),
        }
    }
}
