//! The pool's files for real: those of a directory or parts of a disk, by io_uring or by calls that
//! block. They are open for direct I/O where that is to be had, so that no page cache stands
//! between a sync and the disk.

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

/// Where Linux gives identities away.
const FRESH_ID: &str = "/proc/sys/kernel/random/uuid";

/// A directory or a disk that this process has for itself.
#[derive(Debug)]
pub struct RealDirectory {
    path: PathBuf,
    home: Home,
    uring: bool,
}

/// What a directory or a disk is taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To look at what is there, of which nothing changes.
    Look,
    /// To be a pool.
    Use,
    /// The same, also where a disk has something else.
    Overwrite,
}

/// Where the pool is.
#[derive(Debug)]
enum Home {
    Folder(Folder),
    Disk(Disk),
}

impl RealDirectory {
    /// Takes a directory for this process alone, which is made if it does not exist; or a disk.
    ///
    /// # Errors
    /// If it cannot be made, or if somebody else has it.
    pub fn take(path: &Path) -> Result<RealDirectory, VolumeError> {
        RealDirectory::take_for(path, Purpose::Use)
    }

    /// The same for a purpose.
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

    /// The directory, or the disk.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What this process has locked as long as it has the place.
    fn locks(&self) -> Vec<Arc<Lock>> {
        match &self.home {
            Home::Folder(folder) => folder.locks(),
            Home::Disk(disk) => vec![Arc::clone(disk.lock())],
        }
    }

    /// Lets others know where the yard can be asked that has this directory open.
    ///
    /// # Errors
    /// If the system refuses to write that down.
    pub fn announce(&self, control: &Path) -> Result<(), VolumeError> {
        let holder = Holder::this(Some(control));
        let written = match &self.home {
            Home::Folder(folder) => folder.hold(&holder),
            Home::Disk(disk) => disk.hold(&holder),
        };
        written.map_err(VolumeError::io(format!("cannot write to `{}`", self.path.display())))
    }

    /// Chooses by what files are read and written. Without this by calls that block.
    ///
    /// # Errors
    /// If the system refuses what is asked for.
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

    /// Whether I/O goes past the page cache.
    pub fn is_direct(&self) -> bool {
        match &self.home {
            Home::Folder(folder) => folder.is_direct(),
            Home::Disk(disk) => disk.is_direct(),
        }
    }

    /// What is free where it is, in bytes: there the pool grows.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn free_bytes(&self) -> Result<u64, VolumeError> {
        let doing = format!("cannot look at `{}`", self.path.display());
        match &self.home {
            Home::Folder(folder) => folder.free_bytes().map_err(VolumeError::io(doing)),
            // All of it is segments.
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
        // A ring does not sync one after the other with those who do not use it.
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

    /// A write past the page cache fails by itself. What the page cache could not write is told
    /// once to each who has opened the file, and everybody here shares a descriptor.
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
            // It tells its device at once what nobody needs.
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
            // A device that goes away fails by itself.
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
            // Its parts are where they are.
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
            // All that it has are segments, of which it knows how many there may be.
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

/// The way of groups into real files.
#[derive(Debug)]
pub enum RealLane {
    /// By io_uring.
    Ring(Box<RingLane>),
    /// By calls that block.
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

/// The way of reads out of real files.
#[derive(Debug)]
pub enum RealReads {
    /// By io_uring.
    Ring(Box<RingReads>),
    /// By calls that block.
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
