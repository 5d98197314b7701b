//! The storage of a pool: one directory, or two with the same files. A pool of one directory does
//! not use the code for two.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockyard_sync::bell::{Bell, Caller};

use super::lane::Ended;
use super::mirror::{CopyStatus, Mirror, MirrorFile, MirrorLane, MirrorReads};
use super::reads::Got;
use super::{
    Directory, Division, Doorbell, Durability, GoodCopies, Lane, Parcel, Pin, Reads, RealDirectory,
    StoreFile, Work,
};
use crate::buffer::Buffer;
use crate::error::VolumeError;

/// The storage of a pool: one copy or two.
#[derive(Debug)]
pub enum Copies<D: Directory> {
    /// One copy.
    One(D),
    /// Two copies.
    Two(Mirror<D>),
}

/// A file of a pool.
#[derive(Debug)]
pub enum CopiesFile<D: Directory> {
    /// One copy.
    One(Arc<D::File>),
    /// Two copies.
    Two(Arc<MirrorFile<D>>),
}

/// The log writer of a pool.
#[derive(Debug)]
pub enum CopiesLane<D: Directory> {
    /// Writes one copy.
    One(D::Lane),
    /// Writes two copies.
    Two(MirrorLane<D>),
}

/// The reader of a pool.
#[derive(Debug)]
pub enum CopiesReads<D: Directory> {
    /// Reads the only copy.
    One(D::Reads),
    /// Reads one of two copies.
    Two(MirrorReads<D>),
}

/// Why a file of a pool of one copy never meets a pool of two.
const OWN: &str = "files go with the directory that they are of";

impl<D: Directory> Copies<D> {
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

impl Copies<RealDirectory> {
    fn first(&self) -> &RealDirectory {
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
    pub fn announce(&self, control: &Path) -> Result<(), VolumeError> {
        self.directories().into_iter().try_for_each(|directory| directory.announce(control))
    }

    /// Whether I/O bypasses the page cache.
    pub fn is_direct(&self) -> bool {
        self.directories().into_iter().all(RealDirectory::is_direct)
    }

    /// Free bytes of the file system; with two good copies the smaller number.
    ///
    /// # Errors
    /// If the system does not tell it.
    pub fn free_bytes(&self) -> Result<u64, VolumeError> {
        let free = self.used().into_iter().map(RealDirectory::free_bytes);
        Ok(free.collect::<Result<Vec<u64>, _>>()?.into_iter().min().unwrap_or(0))
    }

    /// Whether files are read and written by io_uring.
    pub fn is_uring(&self) -> bool {
        self.first().is_uring()
    }
}

impl<D: Directory> Directory for Copies<D> {
    type File = CopiesFile<D>;
    type Lane = CopiesLane<D>;
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

    fn tells_everybody(&self) -> bool {
        self.directories().into_iter().all(Directory::tells_everybody)
    }

    fn divide(&self, wanted: Division, is_new: bool) -> Result<Division, VolumeError> {
        let mut directories = self.used().into_iter();
        directories.try_fold(wanted, |wanted, directory| directory.divide(wanted, is_new))
    }

    fn segments_max(&self) -> usize {
        let most = self.used().into_iter().map(Directory::segments_max);
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

    fn beside(&self, work: Work) -> Work {
        match self.directories().first() {
            Some(first) => first.beside(work),
            None => work,
        }
    }

    fn until(&self, is_so: &dyn Fn() -> bool) {
        self.directories().first().into_iter().for_each(|first| first.until(is_so));
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

    fn lane(&self, scratch: Option<&Arc<CopiesFile<D>>>) -> CopiesLane<D> {
        match self {
            Copies::One(one) => CopiesLane::One(one.lane(scratch.map(|file| file.as_one()))),
            Copies::Two(two) => CopiesLane::Two(two.lane(scratch.map(|file| file.as_two()))),
        }
    }

    fn reads(&self, doorbell: Option<&Doorbell>) -> CopiesReads<D> {
        match self {
            Copies::One(one) => CopiesReads::One(one.reads(doorbell)),
            Copies::Two(two) => CopiesReads::Two(two.reads(doorbell)),
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
        let bytes = self.used().into_iter().map(Directory::outside_bytes);
        bytes.min().unwrap_or(u64::MAX)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        match self {
            Copies::One(one) => one.names(),
            Copies::Two(two) => two.names(),
        }
    }

    fn fresh_id(&self) -> io::Result<[u8; 16]> {
        match self {
            Copies::One(one) => one.fresh_id(),
            Copies::Two(two) => two.fresh_id(),
        }
    }
}

impl<D: Directory> CopiesFile<D> {
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

impl<D: Directory> StoreFile for CopiesFile<D> {
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

    fn read_spare(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        match self {
            CopiesFile::One(_) => Err(io::ErrorKind::NotFound.into()),
            CopiesFile::Two(two) => two.read_spare(offset, into),
        }
    }

    fn mend(&self, offset: u64, whole: &[u8]) -> io::Result<usize> {
        match self {
            CopiesFile::One(_) => Ok(0),
            CopiesFile::Two(two) => two.mend(offset, whole),
        }
    }
}

impl<D: Directory> Lane<CopiesFile<D>> for CopiesLane<D> {
    fn depth(&self) -> usize {
        match self {
            CopiesLane::One(one) => one.depth(),
            CopiesLane::Two(two) => two.depth(),
        }
    }

    fn takes_short(&self) -> bool {
        match self {
            CopiesLane::One(one) => one.takes_short(),
            CopiesLane::Two(two) => two.takes_short(),
        }
    }

    fn ripen(&mut self) -> bool {
        match self {
            CopiesLane::One(one) => one.ripen(),
            CopiesLane::Two(two) => two.ripen(),
        }
    }

    fn caller(&self) -> Option<Caller> {
        match self {
            CopiesLane::One(one) => one.caller(),
            CopiesLane::Two(two) => two.caller(),
        }
    }

    fn begin(
        &mut self,
        file: &Arc<CopiesFile<D>>,
        offset: u64,
        parcel: Parcel,
        durability: Durability,
    ) {
        match self {
            CopiesLane::One(one) => one.begin(file.as_one(), offset, parcel, durability),
            CopiesLane::Two(two) => two.begin(file.as_two(), offset, parcel, durability),
        }
    }

    fn wait(&mut self, bell: &Bell, is_there: &dyn Fn() -> bool) -> bool {
        match self {
            CopiesLane::One(one) => one.wait(bell, is_there),
            CopiesLane::Two(two) => two.wait(bell, is_there),
        }
    }

    fn end(&mut self) -> Option<Ended> {
        match self {
            CopiesLane::One(one) => one.end(),
            CopiesLane::Two(two) => two.end(),
        }
    }
}

impl<D: Directory> Reads<CopiesFile<D>> for CopiesReads<D> {
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
