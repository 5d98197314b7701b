//! The real storage of a copy: the files of a directory or the parts of a disk ([`PoolStore`]),
//! accessed by io_uring or by blocking calls. A pool has one copy or several ([`Mirror`]).
//!
//! Files are opened for direct I/O if possible, so that there is no page cache between a sync and
//! the disk.
#![allow(clippy::disallowed_types)] // A ring is rarely made.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use blockyard_sync::event_count::{EventCount, Waker};

use crate::buffer::Buffer;
use crate::directory::DirectoryStore;
use crate::disk::Disk;
use crate::error::StoreError;
use crate::file::{ANY_ALIGN, Source};
use crate::lock::{self, Lock};
use crate::lock_owner::LockOwner;
use crate::log_writer::Ended;
use crate::mirror::Mirror;
use crate::reads::FinishedRead;
use crate::remote::{self, RemoteParameters, RemoteStore, UploadStatus};
use crate::ring::reads::RingReads;
use crate::ring::{self, EventFd, ReadRing, UringLogWriter};
use crate::{
    Blocking, BlockingReads, Durability, Layout, LeaseTerm, LogWriter, PoolFile, Reads,
    SegmentFiles, SegmentStore, StoreKind, StoreLocation, WriteBatch,
};

/// A directory or a disk that this process has exclusively.
#[derive(Debug)]
pub struct PoolStore {
    path: PathBuf,
    location: PoolLocation,
    uring: bool,
    /// The rings that read files from here.
    rings: Mutex<Vec<Weak<ReadRing>>>,
}

/// The purpose for which a directory or a disk is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To be read only; nothing changes.
    ReadOnly,
    /// To hold a pool.
    Use,
    /// To hold a pool, even if a disk has other data, which are overwritten.
    Overwrite,
}

/// A directory or a disk.
#[derive(Debug)]
enum PoolLocation {
    DirectoryStore(DirectoryStore),
    Disk(Disk),
    Remote(Box<dyn RemoteStore>),
}

impl PoolStore {
    /// Locks a directory, which is made if it does not exist, or a disk.
    ///
    /// # Errors
    /// If it cannot be made, or another process has it.
    pub fn take(path: &Path) -> Result<PoolStore, StoreError> {
        PoolStore::take_for(path, Purpose::Use)
    }

    /// Locks a directory or a disk for a purpose.
    ///
    /// # Errors
    /// As [`PoolStore::take`].
    pub fn take_for(path: &Path, purpose: Purpose) -> Result<PoolStore, StoreError> {
        PoolStore::take_with(path, purpose, &RemoteParameters::default())
    }

    /// Locks a directory or a disk for a purpose, or opens remote storage by its parameters.
    ///
    /// # Errors
    /// As [`PoolStore::take`].
    pub(crate) fn take_with(
        path: &Path,
        purpose: Purpose,
        parameters: &RemoteParameters,
    ) -> Result<PoolStore, StoreError> {
        if let Some(uri) = remote::uri_of(path) {
            let remote = remote::provider(uri)?.open(uri, purpose, parameters)?;
            return Ok(PoolStore::of_remote(path, remote));
        }
        parameters.refuse()?;
        let path = match purpose {
            Purpose::ReadOnly => path
                .canonicalize()
                .map_err(StoreError::io(format!("cannot examine `{}`", path.display())))?,
            _ => super::prepare_path(path)?,
        };
        let location = lock::wait_for(|| {
            Ok(match Disk::is_one(&path) {
                true => PoolLocation::Disk(Disk::take(&path, purpose)?),
                false => PoolLocation::DirectoryStore(DirectoryStore::take(&path, purpose)?),
            })
        })?;
        Ok(PoolStore { path, location, uring: false, rings: Mutex::default() })
    }

    /// Remote storage that the caller has opened. `path` names the pool.
    pub fn of_remote(path: &Path, remote: Box<dyn RemoteStore>) -> PoolStore {
        let (path, location) = (path.to_owned(), PoolLocation::Remote(remote));
        PoolStore { path, location, uring: false, rings: Mutex::default() }
    }

    /// The path of the directory or the disk.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The locks that this process holds while it has the directory or disk.
    fn locks(&self) -> Vec<Arc<Lock>> {
        match &self.location {
            PoolLocation::DirectoryStore(directory) => directory.locks(),
            PoolLocation::Disk(disk) => vec![Arc::clone(disk.lock())],
            PoolLocation::Remote(_) => Vec::new(),
        }
    }

    /// Publishes the control socket of the daemon that has this pool open.
    ///
    /// # Errors
    /// If the system refuses to write it down.
    pub fn announce(&self, control: &Path) -> Result<(), StoreError> {
        let lock_owner = LockOwner::this(Some(control));
        let written = match &self.location {
            PoolLocation::DirectoryStore(directory) => directory.write_lock_owner(&lock_owner),
            PoolLocation::Disk(disk) => disk.write_lock_owner(&lock_owner),
            PoolLocation::Remote(remote) => remote.announce(control),
        };
        written.map_err(StoreError::io(format!("cannot write to `{}`", self.path.display())))
    }

    /// Chooses how files are read and written. Without this call, blocking calls are used.
    ///
    /// # Errors
    /// If the system refuses what `kind` requires.
    pub fn with(mut self, kind: StoreKind) -> Result<PoolStore, StoreError> {
        if matches!(&self.location, PoolLocation::Remote(_)) {
            return match kind {
                StoreKind::Auto => Ok(self),
                StoreKind::Uring | StoreKind::Threads => Err(StoreError::Invalid {
                    field: "store",
                    value: kind.to_string(),
                    wanted: "auto: a pool in an object store has no files".to_owned(),
                }),
            };
        }
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
                return Err(StoreError::io(doing)(error));
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
        match &self.location {
            PoolLocation::DirectoryStore(directory) => directory.is_direct(),
            PoolLocation::Disk(disk) => disk.is_direct(),
            // No page cache lies between a sync and the storage.
            PoolLocation::Remote(_) => true,
        }
    }

    /// How a remote pool acknowledges syncs, and what the remote storage lacks.
    pub fn upload_status(&self) -> Option<UploadStatus> {
        match &self.location {
            PoolLocation::Remote(remote) => remote.upload_status(),
            PoolLocation::DirectoryStore(_) | PoolLocation::Disk(_) => None,
        }
    }

    /// Free bytes of the file system, into which the pool can grow.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn free_bytes(&self) -> Result<u64, StoreError> {
        let doing = format!("cannot examine `{}`", self.path.display());
        match &self.location {
            PoolLocation::DirectoryStore(directory) => {
                directory.free_bytes().map_err(StoreError::io(doing))
            }
            // All of the disk is segments.
            PoolLocation::Disk(_) | PoolLocation::Remote(_) => Ok(0),
        }
    }
}

/// Closes the files that rings of idle threads have registered.
impl Drop for PoolStore {
    fn drop(&mut self) {
        let rings = self.rings.get_mut().unwrap_or_else(PoisonError::into_inner);
        rings.iter().filter_map(Weak::upgrade).for_each(|ring| ring.unregister_files());
    }
}

impl SegmentFiles for PoolStore {
    type File = PoolFile;

    fn open(&self, name: &str) -> io::Result<Option<PoolFile>> {
        match &self.location {
            PoolLocation::DirectoryStore(directory) => directory.open(name),
            PoolLocation::Disk(disk) => disk.open(name),
            PoolLocation::Remote(remote) => Ok(remote.open(name)?.map(PoolFile::remote)),
        }
    }

    fn create(&self, name: &str, len: u64) -> io::Result<PoolFile> {
        match &self.location {
            PoolLocation::DirectoryStore(directory) => directory.create(name, len),
            PoolLocation::Disk(disk) => disk.create(name),
            PoolLocation::Remote(remote) => Ok(PoolFile::remote(remote.create(name, len)?)),
        }
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        match &self.location {
            PoolLocation::DirectoryStore(directory) => directory.rename(from, to),
            PoolLocation::Disk(disk) => {
                disk.rename(to);
                Ok(())
            }
            PoolLocation::Remote(remote) => remote.rename(from, to),
        }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match &self.location {
            PoolLocation::DirectoryStore(directory) => directory.remove(name),
            PoolLocation::Disk(_) => Ok(()),
            PoolLocation::Remote(remote) => remote.remove(name),
        }
    }

    fn names(&self) -> io::Result<Vec<String>> {
        match &self.location {
            PoolLocation::DirectoryStore(directory) => directory.names(),
            // The parts of a disk have no names.
            PoolLocation::Disk(_) => Ok(Vec::new()),
            PoolLocation::Remote(remote) => remote.names(),
        }
    }

    fn sync_names(&self) -> io::Result<()> {
        match &self.location {
            PoolLocation::DirectoryStore(directory) => directory.sync_names(),
            PoolLocation::Disk(_) => Ok(()),
            PoolLocation::Remote(remote) => remote.sync_names(),
        }
    }

    fn erase(&self) -> io::Result<()> {
        match &self.location {
            PoolLocation::DirectoryStore(directory) => directory.erase(),
            PoolLocation::Disk(disk) => disk.erase(),
            PoolLocation::Remote(remote) => {
                remote.names()?.iter().try_for_each(|name| remote.remove(name))?;
                remote.sync_names()
            }
        }
    }

    fn discards(&self) -> bool {
        match &self.location {
            PoolLocation::DirectoryStore(_) => false,
            PoolLocation::Disk(disk) => disk.discards(),
            PoolLocation::Remote(_) => true,
        }
    }

    fn discard(&self, file: &PoolFile) {
        if let PoolLocation::Disk(disk) = &self.location {
            disk.discard(file);
        }
        if let Source::Remote(file) = file.source() {
            file.discard();
        }
    }

    fn deallocate(&self, file: &PoolFile) -> io::Result<()> {
        match &self.location {
            PoolLocation::DirectoryStore(directory) => directory.deallocate(file),
            // A disk uses discards instead.
            PoolLocation::Disk(_) | PoolLocation::Remote(_) => {
                Err(io::ErrorKind::Unsupported.into())
            }
        }
    }

    fn allocate(&self, file: &PoolFile, len: u64) -> io::Result<()> {
        match &self.location {
            PoolLocation::DirectoryStore(directory) => directory.allocate(file, len),
            PoolLocation::Disk(_) | PoolLocation::Remote(_) => Ok(()),
        }
    }
}

impl StoreLocation for PoolStore {
    fn title(&self) -> String {
        self.path.display().to_string()
    }

    fn prepare(&self) -> Result<(), StoreError> {
        match &self.location {
            PoolLocation::DirectoryStore(directory) => directory.prepare(&self.path),
            PoolLocation::Disk(disk) => disk.prepare(),
            PoolLocation::Remote(remote) => remote.prepare(),
        }
    }

    fn set_layout(&self, wanted: Layout, is_new: bool) -> Result<Layout, StoreError> {
        match &self.location {
            PoolLocation::DirectoryStore(directory) if is_new => {
                directory.prepare(&self.path).map(|()| wanted)
            }
            PoolLocation::DirectoryStore(_) => Ok(wanted),
            PoolLocation::Disk(disk) => disk.set_layout(wanted, is_new),
            PoolLocation::Remote(remote) => remote.set_layout(wanted, is_new),
        }
    }

    fn segments_max(&self) -> usize {
        match &self.location {
            PoolLocation::DirectoryStore(_) => usize::MAX,
            PoolLocation::Disk(disk) => disk.segments_max(),
            PoolLocation::Remote(remote) => remote.segments_max(),
        }
    }

    fn growth_bytes(&self) -> u64 {
        match &self.location {
            PoolLocation::DirectoryStore(directory) => directory.growth_bytes().unwrap_or(u64::MAX),
            // A disk limits the number of segments instead.
            PoolLocation::Disk(_) | PoolLocation::Remote(_) => u64::MAX,
        }
    }

    fn check_location(&self) -> io::Result<()> {
        match &self.location {
            PoolLocation::DirectoryStore(directory) => directory.check_location(),
            // A device that disappears returns errors by itself.
            PoolLocation::Disk(_) => Ok(()),
            PoolLocation::Remote(remote) => remote.check_location(),
        }
    }

    fn fresh_id(&self) -> io::Result<[u8; 16]> {
        blockyard_os::fresh_id()
    }
}

impl SegmentStore for PoolStore {
    type LogWriter = PoolLogWriter;
    type Reads = PoolReads;

    /// With direct I/O each write reports its own error. An error of the page cache is reported
    /// once per open file description, which all users of a file share here.
    fn reports_sync_error_to_all(&self) -> bool {
        self.is_direct()
    }

    fn io_align(&self) -> u32 {
        match &self.location {
            PoolLocation::DirectoryStore(directory) => directory.io_align(),
            PoolLocation::Disk(disk) => disk.io_align(),
            PoolLocation::Remote(_) => ANY_ALIGN,
        }
    }

    fn lease_term(&self) -> Option<Arc<LeaseTerm>> {
        match &self.location {
            PoolLocation::DirectoryStore(_) | PoolLocation::Disk(_) => None,
            PoolLocation::Remote(remote) => Some(remote.lease_term()),
        }
    }

    fn log_writer(&self, scratch: Option<&Arc<PoolFile>>) -> PoolLogWriter {
        if let PoolLocation::Remote(remote) = &self.location {
            return PoolLogWriter::Remote(remote.log_writer());
        }
        // On a disk with page cache, syncs of the shared descriptor must be serialised, which a
        // ring does not do.
        let is_apart =
            matches!(&self.location, PoolLocation::DirectoryStore(_)) || self.is_direct();
        if self.uring && is_apart {
            let scratch = scratch.filter(|file| !file.is_behind_fuse());
            match UringLogWriter::new(scratch, self.locks()) {
                Ok(log_writer) => return PoolLogWriter::Ring(Box::new(log_writer)),
                Err(error) => {
                    let path = self.path.display();
                    tracing::warn!("{path}: no ring for the log ({error}): blocking calls");
                }
            }
        }
        PoolLogWriter::Blocking(Blocking::default())
    }

    fn reads(&self, event_fd: Option<&EventFd>) -> PoolReads {
        if let PoolLocation::Remote(remote) = &self.location {
            return PoolReads::Remote(remote.reads(event_fd));
        }
        if self.uring
            && let Some(event_fd) = event_fd
        {
            match RingReads::new(event_fd) {
                Ok(reads) => {
                    let mut rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
                    rings.retain(|ring| ring.strong_count() > 0);
                    rings.push(Arc::downgrade(reads.shared()));
                    return PoolReads::Ring(Box::new(reads));
                }
                Err(error) => {
                    let path = self.path.display();
                    tracing::warn!("{path}: no ring for a queue ({error}): blocking calls");
                }
            }
        }
        PoolReads::Blocking(BlockingReads::default())
    }
}

/// The log writer of real files.
#[derive(Debug)]
pub enum PoolLogWriter {
    /// By io_uring.
    Ring(Box<UringLogWriter>),
    /// By blocking calls.
    Blocking(Blocking),
    /// To remote storage.
    Remote(Box<dyn LogWriter<PoolFile>>),
}

impl LogWriter<PoolFile> for PoolLogWriter {
    #[inline]
    fn depth(&self) -> usize {
        match self {
            PoolLogWriter::Ring(log_writer) => log_writer.depth(),
            PoolLogWriter::Blocking(log_writer) => LogWriter::<PoolFile>::depth(log_writer),
            PoolLogWriter::Remote(log_writer) => log_writer.depth(),
        }
    }

    fn waits_for_clients(&self) -> bool {
        match self {
            PoolLogWriter::Ring(log_writer) => log_writer.waits_for_clients(),
            PoolLogWriter::Blocking(log_writer) => {
                LogWriter::<PoolFile>::waits_for_clients(log_writer)
            }
            PoolLogWriter::Remote(log_writer) => log_writer.waits_for_clients(),
        }
    }

    fn submit_at_once(&mut self) {
        if let PoolLogWriter::Ring(log_writer) = self {
            log_writer.submit_at_once();
        }
    }

    fn waker(&self) -> Option<Waker> {
        match self {
            PoolLogWriter::Ring(log_writer) => log_writer.waker(),
            PoolLogWriter::Blocking(_) => None,
            PoolLogWriter::Remote(log_writer) => log_writer.waker(),
        }
    }

    #[inline]
    fn begin(
        &mut self,
        file: &Arc<PoolFile>,
        at: u64,
        write_batch: WriteBatch,
        durability: Durability,
    ) {
        match self {
            PoolLogWriter::Ring(log_writer) => log_writer.begin(file, at, write_batch, durability),
            PoolLogWriter::Blocking(log_writer) => {
                log_writer.begin(file, at, write_batch, durability)
            }
            PoolLogWriter::Remote(log_writer) => {
                log_writer.begin(file, at, write_batch, durability)
            }
        }
    }

    #[inline]
    fn wait(&mut self, event_count: &EventCount, is_there: &dyn Fn() -> bool) -> bool {
        match self {
            PoolLogWriter::Ring(log_writer) => log_writer.wait(event_count, is_there),
            PoolLogWriter::Blocking(_) => true,
            PoolLogWriter::Remote(log_writer) => log_writer.wait(event_count, is_there),
        }
    }

    #[inline]
    fn end(&mut self) -> Option<Ended> {
        match self {
            PoolLogWriter::Ring(log_writer) => log_writer.end(),
            PoolLogWriter::Blocking(log_writer) => LogWriter::<PoolFile>::end(log_writer),
            PoolLogWriter::Remote(log_writer) => log_writer.end(),
        }
    }
}

/// The reader of real files.
#[derive(Debug)]
pub enum PoolReads {
    /// By io_uring.
    Ring(Box<RingReads>),
    /// By blocking calls.
    Blocking(BlockingReads),
    /// From remote storage.
    Remote(Box<dyn Reads<PoolFile>>),
}

impl Reads<PoolFile> for PoolReads {
    #[inline]
    fn begin(&mut self, token: u32, file: &Arc<PoolFile>, offset: u64, buffer: Buffer) {
        match self {
            PoolReads::Ring(reads) => reads.begin(token, file, offset, buffer),
            PoolReads::Blocking(reads) => reads.begin(token, file, offset, buffer),
            PoolReads::Remote(reads) => reads.begin(token, file, offset, buffer),
        }
    }

    #[inline]
    fn submit(&mut self) {
        match self {
            PoolReads::Ring(reads) => reads.submit(),
            PoolReads::Blocking(_) => {}
            PoolReads::Remote(reads) => reads.submit(),
        }
    }

    #[inline]
    fn take(&mut self) -> Option<FinishedRead> {
        match self {
            PoolReads::Ring(reads) => reads.take(),
            PoolReads::Blocking(reads) => Reads::<PoolFile>::take(reads),
            PoolReads::Remote(reads) => reads.take(),
        }
    }

    #[inline]
    fn is_any(&mut self) -> bool {
        match self {
            PoolReads::Ring(reads) => reads.is_any(),
            PoolReads::Blocking(reads) => Reads::<PoolFile>::is_any(reads),
            PoolReads::Remote(reads) => reads.is_any(),
        }
    }

    #[inline]
    fn in_flight(&self) -> usize {
        match self {
            PoolReads::Ring(reads) => reads.in_flight(),
            PoolReads::Blocking(reads) => Reads::<PoolFile>::in_flight(reads),
            PoolReads::Remote(reads) => reads.in_flight(),
        }
    }

    fn sleep(&mut self, at_most: Duration) {
        match self {
            PoolReads::Ring(reads) => reads.sleep(at_most),
            PoolReads::Blocking(_) => {}
            PoolReads::Remote(reads) => reads.sleep(at_most),
        }
    }
}

impl Mirror<PoolStore> {
    /// The path of the pool: that of the first copy that is present.
    pub fn path(&self) -> PathBuf {
        let sides = self.sides();
        let first = sides.first().and_then(|side| side.directory.as_ref());
        first.expect("a good copy is present").path().to_owned()
    }

    /// Publishes the control socket of the daemon that has this pool open.
    ///
    /// # Errors
    /// If the system refuses to write it down.
    pub fn announce(&self, control: &Path) -> Result<(), StoreError> {
        let sides = self.sides();
        let mut directories = sides.iter().filter_map(|side| side.directory.as_ref());
        directories.try_for_each(|directory| directory.announce(control))
    }

    /// Whether I/O bypasses the page cache.
    pub fn is_direct(&self) -> bool {
        let sides = self.sides();
        sides.iter().filter_map(|side| side.directory.as_ref()).all(PoolStore::is_direct)
    }

    /// Free bytes of the file system; with several good copies the smallest number.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn free_bytes(&self) -> Result<u64, StoreError> {
        let free = self.used().into_iter();
        let free = free.filter_map(|side| Some(side.directory.as_ref()?.free_bytes()));
        Ok(free.collect::<Result<Vec<u64>, _>>()?.into_iter().min().unwrap_or(0))
    }

    /// Whether files are read and written by io_uring.
    pub fn is_uring(&self) -> bool {
        let sides = self.sides();
        sides.iter().filter_map(|side| side.directory.as_ref()).any(PoolStore::is_uring)
    }

    /// How a remote pool acknowledges syncs, and what the remote storage lacks.
    pub fn upload_status(&self) -> Option<UploadStatus> {
        let sides = self.sides();
        sides.iter().filter_map(|side| side.directory.as_ref()).find_map(PoolStore::upload_status)
    }
}
