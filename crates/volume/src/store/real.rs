//! A real directory, locked against a second process. Files are open for direct I/O where the file
//! system has that, so that no page cache stands between a sync and the disk.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockyard_sync::bell::Bell;
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::ReadWriteFlags;

use super::lane::Ended;
use super::reads::Got;
use super::ring::reads::RingReads;
use super::ring::writes::RingLane;
use super::ring::{self, Doorbell};
use super::{
    Blocking, BlockingReads, Directory, Durability, Lane, Parcel, Reads, StoreFile, StoreKind,
};
use crate::buffer::Buffer;
use crate::buffer::Memory;
use crate::error::VolumeError;
use crate::holder::Holder;

/// The file that is locked.
const LOCK: &str = "lock";

/// Where Linux gives identities away.
const FRESH_ID: &str = "/proc/sys/kernel/random/uuid";

/// Zeros that are written at once.
const ZEROS: usize = 1 << 20;

/// Most parts that the kernel takes in one call (`IOV_MAX`).
const PARTS_MAX: usize = 1024;

/// A directory that this process has for itself.
#[derive(Debug)]
pub struct RealDirectory {
    path: PathBuf,
    direct: bool,
    uring: bool,
    /// Locked until it is dropped, or the process dies.
    lock: File,
}

impl RealDirectory {
    /// Takes a directory for this process alone; makes it if it does not exist.
    ///
    /// # Errors
    /// If it cannot be made, or if another process has it.
    pub fn take(path: &Path) -> Result<RealDirectory, VolumeError> {
        let doing = |what: &str| format!("cannot {what} `{}`", path.display());
        super::folder::make(path).map_err(VolumeError::io(doing("make")))?;
        let name = path.join(LOCK);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let lock = options.open(&name).map_err(VolumeError::io(doing("write to")))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let holder = Holder::read(&name);
                return Err(VolumeError::InUse { path: path.to_owned(), holder });
            }
            Err(TryLockError::Error(error)) => return Err(VolumeError::io(doing("lock"))(error)),
        }
        // Some file systems in memory refuse this; there nothing survives a power cut anyway.
        let direct = direct(&mut OpenOptions::new()).open(&name).is_ok();
        // Nothing depends on it, and a pool on a full disk has to open.
        if let Err(error) = Holder::this(None).write(&lock) {
            tracing::warn!("{}: {error}", name.display());
        }
        Ok(RealDirectory { path: path.to_owned(), direct, uring: false, lock })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lets others know where the yard can be asked that has this directory open.
    ///
    /// # Errors
    /// If the system refuses to write that down.
    pub fn announce(&self, control: &Path) -> Result<(), VolumeError> {
        let written = Holder::this(Some(control)).write(&self.lock);
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
        self.direct
    }

    fn options(&self) -> OpenOptions {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        if self.direct {
            direct(&mut options);
        }
        options
    }
}

/// Who is gone holds nothing.
impl Drop for RealDirectory {
    fn drop(&mut self) {
        // What is left there counts for nothing once the lock is gone.
        let _ = self.lock.set_len(0);
    }
}

fn direct(options: &mut OpenOptions) -> &mut OpenOptions {
    options.read(true).write(true).custom_flags(OFlags::DIRECT.bits() as i32)
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
        if self.uring {
            match RingLane::new(scratch) {
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

    /// A write past the page cache fails by itself. What the page cache could not write is told once
    /// to each who has opened the file, and everybody here shares a descriptor.
    fn tells_everybody(&self) -> bool {
        self.is_direct()
    }

    fn open(&self, name: &str) -> io::Result<Option<RealFile>> {
        match self.options().open(self.path.join(name)) {
            Ok(file) => Ok(Some(RealFile(file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn create(&self, name: &str, len: u64) -> io::Result<RealFile> {
        let file = self.options().create(true).truncate(true).open(self.path.join(name))?;
        let empty = FallocateFlags::empty();
        match rustix::io::retry_on_intr(|| rustix::fs::fallocate(&file, empty, 0, len)) {
            Ok(()) => {}
            // No reservation there; the zeros below take the space.
            Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(len)?,
            Err(error) => return Err(error.into()),
        }
        // An extent that was never written costs an entry in the file system's journal later.
        let zeros = Memory::new(ZEROS as u64).take_beyond(ZEROS.min(len as usize));
        let file = RealFile(file);
        let mut at = 0;
        while at < len {
            let part = zeros.len().min((len - at) as usize);
            file.write_at(at, &[&zeros[..part]])?;
            at += part as u64;
        }
        Ok(file)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.path.join(from), self.path.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match std::fs::remove_file(self.path.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn sync_names(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let entries = std::fs::read_dir(&self.path)?;
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
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

    fn hear(&mut self, bell: &Bell) {
        if let RealLane::Ring(lane) = self {
            lane.hear(bell);
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

/// A file of such a directory.
#[derive(Debug)]
pub struct RealFile(File);

impl RealFile {
    #[cfg(test)]
    pub(crate) fn of(file: File) -> RealFile {
        RealFile(file)
    }

    /// Writes slices one behind the other.
    pub(crate) fn write_slices(
        &self,
        mut offset: u64,
        slices: &mut [IoSlice<'_>],
        flags: ReadWriteFlags,
    ) -> io::Result<()> {
        let mut left = slices;
        IoSlice::advance_slices(&mut left, 0);
        while !left.is_empty() {
            let some = &left[..left.len().min(PARTS_MAX)];
            let write = || rustix::io::pwritev2(&self.0, some, offset, flags);
            let written = rustix::io::retry_on_intr(write)?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            offset += written as u64;
            IoSlice::advance_slices(&mut left, written);
        }
        Ok(())
    }
}

impl AsRawFd for RealFile {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl StoreFile for RealFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    #[inline]
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(into, offset)
    }

    fn write_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        self.write_slices(offset, &mut slices, ReadWriteFlags::empty())
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }
}
