//! The real storage of a pool: the files of a directory or the parts of a disk, accessed by
//! io_uring or by blocking calls. They are opened for direct I/O if possible, so that there is no
//! page cache between a sync and the disk.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockyard_sync::bell::{Bell, Caller};

use super::disk::Disk;
use super::folder::Folder;
use super::lane::Ended;
use super::lock::{self, Lock};
use super::reads::Got;
use super::ring::reads::RingReads;
use super::ring::writes::RingLane;
use super::ring::{self, Doorbell};
use super::{
    Blocking, BlockingReads, Directory, Division, Durability, Lane, Parcel, Reads, RealFile,
    StoreKind,
};
use crate::buffer::Buffer;
use crate::error::VolumeError;
use crate::holder::Holder;

/// Where Linux generates random identities.
const FRESH_ID: &str = "/proc/sys/kernel/random/uuid";

/// A directory or a disk that this process has exclusively.
#[derive(Debug)]
pub struct RealDirectory {
    path: PathBuf,
    home: Home,
    uring: bool,
}

/// The purpose for which a directory or a disk is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To be read only; nothing changes.
    Look,
    /// To hold a pool.
    Use,
    /// To hold a pool, even if a disk has other data, which are overwritten.
    Overwrite,
}

/// The kind of place.
#[derive(Debug)]
enum Home {
    Folder(Folder),
    Disk(Disk),
}

impl RealDirectory {
    /// Locks a directory, which is made if it does not exist, or a disk.
    ///
    /// # Errors
    /// If it cannot be made, or another process has it.
    pub fn take(path: &Path) -> Result<RealDirectory, VolumeError> {
        RealDirectory::take_for(path, Purpose::Use)
    }

    /// Locks a directory or a disk for a purpose.
    ///
    /// # Errors
    /// As [`RealDirectory::take`].
    pub fn take_for(path: &Path, purpose: Purpose) -> Result<RealDirectory, VolumeError> {
        let path = match purpose {
            Purpose::Look => path
                .canonicalize()
                .map_err(VolumeError::io(format!("cannot look at `{}`", path.display())))?,
            _ => super::place(path)?,
        };
        let home = lock::wait_for(|| {
            Ok(match Disk::is_one(&path) {
                true => Home::Disk(Disk::take(&path, purpose)?),
                false => Home::Folder(Folder::take(&path, purpose)?),
            })
        })?;
        Ok(RealDirectory { path, home, uring: false })
    }

    /// The path of the directory or the disk.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The locks that this process holds while it has the place.
    fn locks(&self) -> Vec<Arc<Lock>> {
        match &self.home {
            Home::Folder(folder) => folder.locks(),
            Home::Disk(disk) => vec![Arc::clone(disk.lock())],
        }
    }

    /// Publishes the control socket of the daemon that has this pool open.
    ///
    /// # Errors
    /// If the system refuses to write it down.
    pub fn announce(&self, control: &Path) -> Result<(), VolumeError> {
        let holder = Holder::this(Some(control));
        let written = match &self.home {
            Home::Folder(folder) => folder.hold(&holder),
            Home::Disk(disk) => disk.hold(&holder),
        };
        written.map_err(VolumeError::io(format!("cannot write to `{}`", self.path.display())))
    }

    /// Chooses how files are read and written. Without this call, blocking calls are used.
    ///
    /// # Errors
    /// If the system refuses what `kind` requires.
    pub fn with(mut self, kind: StoreKind) -> Result<RealDirectory, VolumeError> {
        let probed = match kind {
            StoreKind::Threads => return Ok(self),
            StoreKind::Auto | StoreKind::Uring => ring::probe(),
        };
        let path = self.path.display();
        match probed {
            Ok(()) => self.uring = true,
            Err(error) if kind == StoreKind::Auto => {
                tracing::info!("{path}: io_uring is refused here ({error}): blocking calls");
            }
            Err(error) => {
                let doing = format!("cannot use io_uring for `{path}` (`store=threads` does not)");
                return Err(VolumeError::io(doing)(error));
            }
        }
        Ok(self)
    }

    /// Whether files are read and written by io_uring.
    pub fn is_uring(&self) -> bool {
        self.uring
    }

    /// Whether I/O bypasses the page cache.
    pub fn is_direct(&self) -> bool {
        match &self.home {
            Home::Folder(folder) => folder.is_direct(),
            Home::Disk(disk) => disk.is_direct(),
        }
    }

    /// Free bytes of the file system, into which the pool can grow.
    ///
    /// # Errors
    /// If the system does not tell it.
    pub fn free_bytes(&self) -> Result<u64, VolumeError> {
        let doing = format!("cannot look at `{}`", self.path.display());
        match &self.home {
            Home::Folder(folder) => folder.free_bytes().map_err(VolumeError::io(doing)),
            // All of the disk is segments.
            Home::Disk(_) => Ok(0),
        }
    }
}

impl Directory for RealDirectory {
    type File = RealFile;
    type Lane = RealLane;
    type Reads = RealReads;

    fn reads(&self, doorbell: Option<&Doorbell>) -> RealReads {
        if self.uring
            && let Some(doorbell) = doorbell
        {
            match RingReads::new(doorbell) {
                Ok(reads) => return RealReads::Ring(Box::new(reads)),
                Err(error) => {
                    let path = self.path.display();
                    tracing::warn!("{path}: no ring for a queue ({error}): blocking calls");
                }
            }
        }
        RealReads::Blocking(BlockingReads::default())
    }

    fn lane(&self, scratch: Option<&Arc<RealFile>>) -> RealLane {
        // On a disk with page cache, syncs of the shared descriptor must be serialised, which a
        // ring does not do.
        let is_apart = matches!(&self.home, Home::Folder(_)) || self.is_direct();
        if self.uring && is_apart {
            let scratch = scratch.filter(|file| !file.is_behind_fuse());
            match RingLane::new(scratch, self.locks()) {
                Ok(lane) => return RealLane::Ring(Box::new(lane)),
                Err(error) => {
                    let path = self.path.display();
                    tracing::warn!("{path}: no ring for the log ({error}): blocking calls");
                }
            }
        }
        RealLane::Blocking(Blocking::default())
    }

    fn title(&self) -> String {
        self.path.display().to_string()
    }

    /// With direct I/O each write reports its own error. An error of the page cache is reported
    /// once per open file description, which all users of a file share here.
    fn tells_everybody(&self) -> bool {
        self.is_direct()
    }

    fn claim(&self) -> Result<(), VolumeError> {
        match &self.home {
            Home::Folder(folder) => folder.claim(&self.path),
            Home::Disk(disk) => disk.claim(),
        }
    }

    fn divide(&self, wanted: Division, is_new: bool) -> Result<Division, VolumeError> {
        match &self.home {
            Home::Folder(folder) if is_new => folder.claim(&self.path).map(|()| wanted),
            Home::Folder(_) => Ok(wanted),
            Home::Disk(disk) => disk.divide(wanted, is_new),
        }
    }

    fn segments_max(&self) -> usize {
        match &self.home {
            Home::Folder(_) => usize::MAX,
            Home::Disk(disk) => disk.segments_max(),
        }
    }

    fn discards(&self) -> bool {
        matches!(&self.home, Home::Disk(disk) if disk.discards())
    }

    fn discard(&self, file: &RealFile) {
        if let Home::Disk(disk) = &self.home {
            disk.discard(file);
        }
    }

    fn give_back(&self, file: &RealFile) -> io::Result<()> {
        match &self.home {
            Home::Folder(folder) => folder.give_back(file),
            // A disk uses discards instead.
            Home::Disk(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn fill(&self, file: &RealFile, len: u64) -> io::Result<()> {
        match &self.home {
            Home::Folder(folder) => folder.fill(file, len),
            Home::Disk(_) => Ok(()),
        }
    }

    fn look(&self) -> io::Result<()> {
        match &self.home {
            Home::Folder(folder) => folder.look(),
            // A device that disappears returns errors by itself.
            Home::Disk(_) => Ok(()),
        }
    }

    fn open(&self, name: &str) -> io::Result<Option<RealFile>> {
        match &self.home {
            Home::Folder(folder) => folder.open(name),
            Home::Disk(disk) => disk.open(name),
        }
    }

    fn create(&self, name: &str, len: u64) -> io::Result<RealFile> {
        match &self.home {
            Home::Folder(folder) => folder.create(name, len),
            Home::Disk(disk) => disk.create(name),
        }
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        match &self.home {
            Home::Folder(folder) => folder.rename(from, to),
            Home::Disk(disk) => {
                disk.rename(to);
                Ok(())
            }
        }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match &self.home {
            Home::Folder(folder) => folder.remove(name),
            Home::Disk(_) => Ok(()),
        }
    }

    fn sync_names(&self) -> io::Result<()> {
        match &self.home {
            Home::Folder(folder) => folder.sync_names(),
            Home::Disk(_) => Ok(()),
        }
    }

    fn names(&self) -> io::Result<Vec<String>> {
        match &self.home {
            Home::Folder(folder) => folder.names(),
            // The parts of a disk have no names.
            Home::Disk(_) => Ok(Vec::new()),
        }
    }

    fn needed(&self) -> io::Result<Vec<String>> {
        match &self.home {
            Home::Folder(folder) => folder.names(),
            Home::Disk(disk) => Ok(disk.names()),
        }
    }

    fn outside_bytes(&self) -> u64 {
        match &self.home {
            Home::Folder(folder) => folder.outside_bytes().unwrap_or(u64::MAX),
            // A disk limits the number of segments instead.
            Home::Disk(_) => u64::MAX,
        }
    }

    fn fresh_id(&self) -> io::Result<[u8; 16]> {
        let text = std::fs::read_to_string(FRESH_ID)?;
        let digits: String = text.trim().chars().filter(|digit| *digit != '-').collect();
        match u128::from_str_radix(&digits, 16) {
            Ok(number) if digits.len() == 32 => Ok(number.to_be_bytes()),
            _ => Err(io::Error::other(format!("{FRESH_ID} says `{}`", text.trim()))),
        }
    }
}

/// The log writer of real files.
#[derive(Debug)]
pub enum RealLane {
    /// By io_uring.
    Ring(Box<RingLane>),
    /// By blocking calls.
    Blocking(Blocking),
}

impl Lane<RealFile> for RealLane {
    fn depth(&self) -> usize {
        match self {
            RealLane::Ring(lane) => lane.depth(),
            RealLane::Blocking(lane) => Lane::<RealFile>::depth(lane),
        }
    }

    fn run_beside(&mut self) {
        if let RealLane::Ring(lane) = self {
            lane.run_beside();
        }
    }

    fn ripen(&mut self) -> bool {
        match self {
            RealLane::Ring(lane) => lane.ripen(),
            RealLane::Blocking(_) => false,
        }
    }

    fn caller(&self) -> Option<Caller> {
        match self {
            RealLane::Ring(lane) => lane.caller(),
            RealLane::Blocking(_) => None,
        }
    }

    fn begin(&mut self, file: &Arc<RealFile>, at: u64, parcel: Parcel, durability: Durability) {
        match self {
            RealLane::Ring(lane) => lane.begin(file, at, parcel, durability),
            RealLane::Blocking(lane) => lane.begin(file, at, parcel, durability),
        }
    }

    fn wait(&mut self, bell: &Bell, is_there: &dyn Fn() -> bool) -> bool {
        match self {
            RealLane::Ring(lane) => lane.wait(bell, is_there),
            RealLane::Blocking(_) => true,
        }
    }

    fn end(&mut self) -> Option<Ended> {
        match self {
            RealLane::Ring(lane) => lane.end(),
            RealLane::Blocking(lane) => Lane::<RealFile>::end(lane),
        }
    }
}

/// The reader of real files.
#[derive(Debug)]
pub enum RealReads {
    /// By io_uring.
    Ring(Box<RingReads>),
    /// By blocking calls.
    Blocking(BlockingReads),
}

impl Reads<RealFile> for RealReads {
    fn begin(&mut self, token: u32, file: &Arc<RealFile>, offset: u64, buffer: Buffer) {
        match self {
            RealReads::Ring(reads) => reads.begin(token, file, offset, buffer),
            RealReads::Blocking(reads) => reads.begin(token, file, offset, buffer),
        }
    }

    fn submit(&mut self) {
        if let RealReads::Ring(reads) = self {
            reads.submit();
        }
    }

    fn take(&mut self) -> Option<Got> {
        match self {
            RealReads::Ring(reads) => reads.take(),
            RealReads::Blocking(reads) => Reads::<RealFile>::take(reads),
        }
    }

    fn is_any(&mut self) -> bool {
        match self {
            RealReads::Ring(reads) => reads.is_any(),
            RealReads::Blocking(reads) => Reads::<RealFile>::is_any(reads),
        }
    }

    fn under_way(&self) -> usize {
        match self {
            RealReads::Ring(reads) => reads.under_way(),
            RealReads::Blocking(reads) => Reads::<RealFile>::under_way(reads),
        }
    }

    fn sleep(&mut self, at_most: Duration) {
        if let RealReads::Ring(reads) = self {
            reads.sleep(at_most);
        }
    }
}
