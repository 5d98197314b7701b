//! The files: disks by name, and the handles of serving threads to them.
//!
//! The table of files ([`Files`]) is shared by the mounts and changeable while they run. Its lock
//! is never taken for an I/O. It is taken when a file is looked up, opened or listed, when a thread
//! uses a device for the first time, and when a device is added or removed.
//!
//! A serving thread has a [`DeviceHandle`] for each device that it has used. It executes a request
//! inline if the device completes it at once, and passes it to the handle's [`Worker`] otherwise.
//! The lock of a thread's handles is taken by the thread for each request, and by the control plane
//! when a device is removed. So the handles of a sleeping thread to a removed device are closed
//! with it.
#![allow(clippy::disallowed_types)] // The lock of the table is control plane, as said above.

use std::ffi::OsStr;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use blockyard_core::claim::ClaimState;
use blockyard_core::clock::{Clock, Monotonic};
use blockyard_core::rmw::{SharedDisk, Span};
use blockyard_core::{BufRef, Channel, Disk, Flags, Op, Region, RegionId, Status};
use blockyard_sync::lock::Lock;
use blockyard_sync::pad::Padded;
use blockyard_sync::rank::ranks;
use blockyard_sync::rmw_lock::{RmwLock, Writer};
use blockyard_sync::sleep_lock::SleepLock;
use fuser::{Errno, INodeNo, Notifier};

use crate::memory::{BLOCK_BYTES_MAX, IO_BYTES_MAX};
use crate::reply::ReplyToken;
use crate::rules::{FileRules, errno_of};
use crate::worker::{FileOperation, Worker};

/// The most files of one table.
pub const FILES_MAX: usize = 4096;

/// The bits of an inode number that are the slot.
const SLOT_BITS: u32 = FILES_MAX.trailing_zeros();

/// The slot of an inode number.
#[inline]
pub(crate) fn slot_of(ino: u64) -> usize {
    ino as usize & (FILES_MAX - 1)
}

/// A disk as a file.
pub(crate) struct File {
    /// Never reused, so that the kernel's cached state of a removed file affects no other.
    pub(crate) ino: u64,
    pub(crate) name: String,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) rules: FileRules,
    pub(crate) made: SystemTime,
    /// The lock for sub-block writes to the disk.
    pub(crate) lock: Arc<RmwLock>,
    /// Whether a file system has claimed the disk.
    pub(crate) claim: Arc<ClaimState>,
}

/// A file as listings show it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileInfo {
    /// The file's name, which is the device's.
    pub name: String,
    /// The path, if the file is mounted.
    pub path: Option<PathBuf>,
    /// The transport of the mount's requests, if the file is mounted.
    pub transport: Option<Transport>,
    /// The number of times that it is open now.
    pub opens: u64,
}

/// The reason for which the table of files refused a change.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileError {
    /// There is a file of this name already.
    Taken {
        /// The name.
        name: String,
    },
    /// There is no file of this name.
    Unknown {
        /// The name.
        name: String,
    },
    /// The name is no valid file name.
    Name {
        /// The name.
        name: String,
    },
    /// The device's blocks are too long.
    Block {
        /// The device.
        name: String,
        /// The length of the device's blocks, in bytes.
        block_bytes: u64,
    },
    /// There are [`FILES_MAX`] files already.
    Full,
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FileError::Taken { name } => {
                write!(f, "file `{name}` exists already: remove it first or take another name")
            }
            FileError::Unknown { name } => write!(f, "there is no file `{name}`"),
            FileError::Name { name } => write!(
                f,
                "name: `{}` cannot name a file: expected 1 to 255 bytes without `/` and NUL, and \
                 neither `.` nor `..`",
                name.escape_debug()
            ),
            FileError::Block { name, block_bytes } => write!(
                f,
                "`{name}` has blocks of {block_bytes} bytes; a file can have at most \
                 {BLOCK_BYTES_MAX}"
            ),
            FileError::Full => write!(f, "there are {FILES_MAX} files already: remove one"),
        }
    }
}

impl std::error::Error for FileError {}

/// The table of files.
#[derive(Default)]
pub struct Files {
    table: Mutex<FileTable>,
}

#[derive(Default)]
struct FileTable {
    /// By slot.
    entries: Vec<Option<FileEntry>>,
    /// The number of files that were ever added.
    made: u64,
    mounts: Vec<Attached>,
}

struct FileEntry {
    file: Arc<File>,
    opens: u64,
}

/// A mount that shows the files.
#[derive(Clone)]
struct Attached {
    dir: PathBuf,
    handles: Arc<ThreadHandles>,
    notifier: Notifier,
    transport: Transport,
}

impl FileTable {
    fn by_name(&self, name: &OsStr) -> Option<&FileEntry> {
        self.entries.iter().flatten().find(|entry| OsStr::new(&entry.file.name) == name)
    }

    fn info(&self, entry: &FileEntry) -> FileInfo {
        let name = &entry.file.name;
        let mount = self.mounts.first();
        let path = mount.map(|mount| mount.dir.join(name));
        let transport = mount.map(|mount| mount.transport);
        FileInfo { name: name.clone(), path, transport, opens: entry.opens }
    }

    fn by_ino(&mut self, ino: u64) -> Option<&mut FileEntry> {
        let entry = self.entries.get_mut(slot_of(ino))?.as_mut()?;
        (entry.file.ino == ino).then_some(entry)
    }
}

impl Files {
    /// An empty table.
    pub fn new() -> Arc<Files> {
        Arc::default()
    }

    fn table(&self) -> MutexGuard<'_, FileTable> {
        // Every change is one call: a holder that panicked has left the table consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a disk under a name.
    ///
    /// # Errors
    /// If the name is taken or is no valid file name, or the table is full.
    pub fn add(&self, name: &str, disk: impl Into<SharedDisk>) -> Result<(), FileError> {
        let SharedDisk { disk, lock, claim } = disk.into();
        let owned = || name.to_owned();
        let plain = (1..=255).contains(&name.len()) && !name.contains(['/', '\0']);
        if !plain || matches!(name, "." | "..") {
            return Err(FileError::Name { name: owned() });
        }
        let rules = FileRules::of(disk.as_ref());
        let block_bytes = rules.block_bytes;
        if block_bytes > BLOCK_BYTES_MAX {
            return Err(FileError::Block { name: owned(), block_bytes });
        }
        let mut table = self.table();
        if table.by_name(OsStr::new(name)).is_some() {
            return Err(FileError::Taken { name: owned() });
        }
        let slot = table.entries.iter().position(Option::is_none).unwrap_or(table.entries.len());
        if slot >= FILES_MAX {
            return Err(FileError::Full);
        }
        table.made += 1;
        // The root has number 1, so no file is in generation 0.
        let ino = table.made << SLOT_BITS | slot as u64;
        let made = SystemTime::now();
        let file = Arc::new(File { ino, name: owned(), disk, rules, made, lock, claim });
        let entry = Some(FileEntry { file, opens: 0 });
        match table.entries.get_mut(slot) {
            Some(empty) => *empty = entry,
            None => table.entries.push(entry),
        }
        Ok(())
    }

    /// Removes a file. Requests in flight are answered; those that take longer than `drain` fail,
    /// and so do later requests by programs that have the file open.
    ///
    /// # Errors
    /// If there is no such file.
    pub fn remove(&self, name: &str, drain: Duration) -> Result<(), FileError> {
        self.remove_if(name, drain, |_| true).map(|_| ())
    }

    /// Removes a file that no program has open; returns whether none has.
    ///
    /// # Errors
    /// If there is no such file.
    pub fn remove_unused(&self, name: &str) -> Result<bool, FileError> {
        self.remove_if(name, Duration::ZERO, |opens| opens == 0)
    }

    fn remove_if(
        &self,
        name: &str,
        drain: Duration,
        may_go: impl FnOnce(u64) -> bool,
    ) -> Result<bool, FileError> {
        let deadline = Instant::now() + drain;
        let (ino, mounts) = {
            let mut table = self.table();
            let Some(entry) = table.by_name(OsStr::new(name)) else {
                return Err(FileError::Unknown { name: name.to_owned() });
            };
            if !may_go(entry.opens) {
                return Ok(false);
            }
            let ino = entry.file.ino;
            table.entries[slot_of(ino)] = None;
            (ino, table.mounts.clone())
        };
        // Outside the lock: serving threads may need it before they release their handles.
        for mount in mounts {
            mount.handles.close(ino, deadline);
            // The kernel may not have cached the name; then there is nothing to invalidate.
            let _ = mount.notifier.inval_entry(INodeNo::ROOT, OsStr::new(name));
        }
        Ok(true)
    }

    /// All files.
    pub fn list(&self) -> Vec<FileInfo> {
        let table = self.table();
        table.entries.iter().flatten().map(|entry| table.info(entry)).collect()
    }

    /// The file of this name.
    pub fn find_info(&self, name: &str) -> Option<FileInfo> {
        let table = self.table();
        table.by_name(OsStr::new(name)).map(|entry| table.info(entry))
    }

    /// The number of files.
    pub(crate) fn count(&self) -> usize {
        self.table().entries.iter().flatten().count()
    }

    pub(crate) fn lookup(&self, name: &OsStr) -> Option<Arc<File>> {
        self.table().by_name(name).map(|entry| Arc::clone(&entry.file))
    }

    pub(crate) fn find(&self, ino: u64) -> Option<Arc<File>> {
        self.table().by_ino(ino).map(|entry| Arc::clone(&entry.file))
    }

    /// Counts an open file.
    pub(crate) fn opened(&self, ino: u64) -> Option<Arc<File>> {
        let mut table = self.table();
        let entry = table.by_ino(ino)?;
        entry.opens += 1;
        Some(Arc::clone(&entry.file))
    }

    /// Counts a file that is no longer open.
    pub(crate) fn released(&self, ino: u64) {
        if let Some(entry) = self.table().by_ino(ino) {
            entry.opens = entry.opens.saturating_sub(1);
        }
    }

    /// All files, by inode number.
    pub(crate) fn snapshot(&self) -> Vec<Arc<File>> {
        let table = self.table();
        let mut files: Vec<_> =
            table.entries.iter().flatten().map(|entry| Arc::clone(&entry.file)).collect();
        drop(table);
        files.sort_by_key(|file| file.ino);
        files
    }

    /// Adds a mount, which is notified about removed files from now on.
    pub(crate) fn attach(
        &self,
        dir: PathBuf,
        handles: Arc<ThreadHandles>,
        notifier: Notifier,
        transport: Transport,
    ) {
        self.table().mounts.push(Attached { dir, handles, notifier, transport });
    }

    pub(crate) fn detach(&self, handles: &Arc<ThreadHandles>) {
        self.table().mounts.retain(|mount| !Arc::ptr_eq(&mount.handles, handles));
    }
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Files").field("files", &self.list()).finish_non_exhaustive()
    }
}

/// The path of the FUSE device.
pub(crate) const DEVICE: &str = "/dev/fuse";

/// The transport of requests from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transport {
    /// One at a time, read from `/dev/fuse`.
    Device,
    /// Many at a time, over io_uring.
    IoUring,
}

impl Transport {
    /// The transport's name, as it is shown.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Device => DEVICE,
            Transport::IoUring => "io_uring",
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The attempts to execute a request inline: one, and one more for each layer that may first have
/// to reload its rules (the error injector, the device).
const INLINE_ATTEMPTS: u32 = 3;

/// The handles of one mount.
pub(crate) struct ThreadHandles {
    files: Arc<Files>,
    handles: Box<[Padded<SleepLock<HandlesOfThread, { ranks::FUSE_HANDLES }>>]>,
}

/// The handles of one thread, by the slot of the file.
type HandlesOfThread = Vec<Option<Box<DeviceHandle>>>;

impl ThreadHandles {
    pub(crate) fn new(files: Arc<Files>, count: usize) -> Arc<ThreadHandles> {
        let handles = (0..count.max(1)).map(|_| Padded(SleepLock::new(Vec::new()))).collect();
        Arc::new(ThreadHandles { files, handles })
    }

    /// Calls `f` with a thread's handle to the device of a file, or returns the error if there is
    /// none. The region is the one with this thread's data.
    #[inline]
    pub(crate) fn with_handle<R>(
        &self,
        index: usize,
        region: &Arc<Region>,
        ino: u64,
        f: impl FnOnce(Result<&mut DeviceHandle, Errno>) -> R,
    ) -> R {
        self.handles[index].with(|own| {
            if let Some(Some(handle)) = own.get_mut(slot_of(ino))
                && handle.ino == ino
            {
                return f(Ok(handle));
            }
            f(self.open(own, region, ino))
        })
    }

    /// Opens a handle. A file that is being removed is no longer in the table, so no handle is
    /// opened after [`ThreadHandles::close`].
    #[cold]
    fn open<'s>(
        &self,
        own: &'s mut HandlesOfThread,
        region: &Arc<Region>,
        ino: u64,
    ) -> Result<&'s mut DeviceHandle, Errno> {
        let file = self.files.find(ino).ok_or(Errno::ENODEV)?;
        let handle = DeviceHandle::open(&file, region)?;
        let slot = slot_of(ino);
        if own.len() <= slot {
            own.resize_with(slot + 1, || None);
        }
        Ok(own[slot].insert(Box::new(handle)))
    }

    /// Closes every thread's handle to a device; requests that still wait fail at the deadline.
    pub(crate) fn close(&self, ino: u64, deadline: Instant) {
        let slot = slot_of(ino);
        for thread in &self.handles {
            let handle = thread.with(|own| {
                let handle = own.get_mut(slot)?;
                handle.take_if(|handle| handle.ino == ino)
            });
            if let Some(handle) = handle {
                handle.close(deadline);
            }
        }
    }

    /// Closes all handles.
    pub(crate) fn close_all(&self, deadline: Instant) {
        for thread in &self.handles {
            let handles = thread.with(std::mem::take);
            handles.into_iter().flatten().for_each(|handle| handle.close(deadline));
        }
    }
}

/// The result of an inline request.
pub(crate) enum InlineResult {
    /// Success: the number of bytes, and for a read their offset in the thread's region.
    Done(u64, u64),
    /// An error.
    Failed(Errno),
    /// The request must wait for the device.
    Later(FileOperation),
}

/// A thread's handle to one device.
pub(crate) struct DeviceHandle {
    ino: u64,
    disk: Arc<dyn Disk>,
    rules: FileRules,
    channel: Box<dyn Channel>,
    /// The thread's region, which is registered with the channel; no bio is in flight in it after
    /// `execute_inline` has returned.
    region_id: RegionId,
    lock: Arc<RmwLock>,
    /// For the one write that may be executed inline at a time.
    writer: Writer,
    /// The worker for other requests; started when it is first needed.
    worker: Option<Worker>,
}

impl DeviceHandle {
    fn open(file: &File, region: &Arc<Region>) -> Result<DeviceHandle, Errno> {
        let disk = Arc::clone(&file.disk);
        let mut channel = open_channel(&disk)?;
        let region_id = channel.register(Arc::clone(region));
        let (ino, rules, lock) = (file.ino, file.rules, Arc::clone(&file.lock));
        let writer = lock.writer(1);
        Ok(DeviceHandle { ino, disk, rules, channel, region_id, lock, writer, worker: None })
    }

    fn close(self, deadline: Instant) {
        if let Some(worker) = self.worker {
            worker.close(deadline);
        }
    }

    /// Reads the part of the range that lies in the file, into the buffer at `at` of the thread's
    /// region.
    #[inline]
    pub(crate) fn read(&mut self, offset: u64, len: u64, at: u64) -> InlineResult {
        let want = self.rules.clip(offset, len.min(IO_BYTES_MAX));
        if want == 0 {
            return InlineResult::Done(0, at);
        }
        let span = self.rules.span(offset, want);
        match self.execute_inline(Op::Read, &span, at) {
            Some(status) if status.is_ok() => InlineResult::Done(want, at + span.skip),
            Some(status) => InlineResult::Failed(errno_of(status)),
            None => InlineResult::Later(FileOperation::Read(span)),
        }
    }

    /// Writes the part of the range that lies in the file; `len` bytes are at `at` of the thread's
    /// region.
    #[inline]
    pub(crate) fn write(&mut self, offset: u64, len: u64, flags: Flags, at: u64) -> InlineResult {
        if self.rules.read_only {
            return InlineResult::Failed(Errno::EROFS);
        }
        let want = self.rules.clip(offset, len.min(IO_BYTES_MAX));
        if want == 0 {
            // As for a block device; an empty write is no error.
            return if len == 0 {
                InlineResult::Done(0, at)
            } else {
                InlineResult::Failed(Errno::ENOSPC)
            };
        }
        let span = self.rules.span(offset, want);
        if !span.is_whole() && span.start + span.len > self.rules.sequential_from {
            return InlineResult::Failed(Errno::EINVAL);
        }
        let range = span.range();
        // A write that overlaps a read-modify-write waits for it at the worker.
        if span.is_whole() && flags == Flags::NONE && self.writer.try_start(0, range) {
            let result = self.execute_inline(Op::Write, &span, at);
            self.writer.clear(0);
            match result {
                Some(status) if status.is_ok() => return InlineResult::Done(want, at),
                Some(status) => return InlineResult::Failed(errno_of(status)),
                None => {}
            }
        }
        InlineResult::Later(FileOperation::Write(span, flags))
    }

    /// Executes a read or a write of whole blocks inline, between the device and the region.
    #[inline]
    fn execute_inline(&mut self, op: Op, span: &Span, offset: u64) -> Option<Status> {
        let buf = BufRef { region: self.region_id, offset };
        let began = Monotonic.now();
        let mut attempt = || self.channel.execute_inline(op, span.sector(), span.sectors(), buf);
        // A layer whose rules have changed reloads them and executes nothing in that attempt.
        let status = (0..INLINE_ATTEMPTS).find_map(|_| attempt())?;
        self.channel.note_latency(op, Monotonic.now().since(began), 1);
        Some(status)
    }

    /// Makes the part of a range that lies in the file read as zeros.
    pub(crate) fn zero(&mut self, offset: u64, len: u64, mode: i32) -> InlineResult {
        match self.rules.zeroing(offset, len, mode) {
            Ok(Some(zeroing)) => InlineResult::Later(FileOperation::Zero(zeroing)),
            Ok(None) => InlineResult::Done(0, 0),
            Err(errno) => InlineResult::Failed(errno),
        }
    }

    /// Passes a request to the worker, with the data of a write.
    #[cold]
    pub(crate) fn send_to_worker(&mut self, work: FileOperation, token: ReplyToken, data: &[u8]) {
        match self.worker() {
            Ok(worker) => worker.send(work, token, data),
            Err(errno) => token.fail(errno),
        }
    }

    fn worker(&mut self) -> Result<&Worker, Errno> {
        if self.worker.is_none() {
            let channel = open_channel(&self.disk)?;
            let worker = Worker::start(self.disk.name(), channel, self.rules, &self.lock);
            self.worker = Some(worker.map_err(|error| {
                let device = self.disk.name();
                tracing::error!(device, %error, "cannot start a worker for requests that wait");
                Errno::ENOMEM
            })?);
        }
        Ok(self.worker.as_ref().expect("it was just made"))
    }
}

fn open_channel(disk: &Arc<dyn Disk>) -> Result<Box<dyn Channel>, Errno> {
    disk.open().map_err(|error| {
        tracing::error!(device = disk.name(), %error, "no channel for its file");
        Errno::ENODEV
    })
}
