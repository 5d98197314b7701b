//! io_uring: a ring for one thread, its registered files, and the log writer by it.
//!
//! Log writes are one vectored write by reference, linked to one sync, by one system call. If that
//! is faster, the write itself is durable (`RWF_DSYNC`). `ring/reads.rs` has the reads.
#![allow(unsafe_code)] // Submissions name memory by address.
#![allow(clippy::disallowed_types)] // A ring is rarely made or closed.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockyard_sync::event_count::{EventCount, Waker};
use io_uring::squeue::{Entry, Flags};
use io_uring::types::{Fd, Fixed, FsyncFlags};
use io_uring::{IoUring, opcode};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use rustix::io::ReadWriteFlags;

use crate::PoolFile;
use crate::buffer::{ALIGN, Memory};
use crate::file::{Source, Use};
use crate::lock::Lock;
use crate::log_writer::{Durability, Ended, LogWriter, WriteBatch};

pub(crate) mod reads;

/// The operations that are used.
const NEEDED: [u8; 5] = [
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Read::CODE,
    opcode::PollAdd::CODE,
    opcode::FilesUpdate::CODE,
];

/// Which threads use a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// Only the thread that opens it.
    Thread,
    /// Any thread, one at a time.
    AnyThread,
}

/// Opens a ring with this number of submission entries.
pub(crate) fn open(entries: u32, owner: Owner) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    match owner {
        Owner::Thread => builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag(),
        Owner::AnyThread => builder.setup_coop_taskrun().setup_taskrun_flag(),
    };
    match builder.build(entries) {
        // Linux before 6.1 does not have these flags.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
        result => result,
    }
}

/// Checks that the system allows rings to this process, with all operations that are needed.
///
/// # Errors
/// The reason why not.
pub(crate) fn probe() -> io::Result<()> {
    let ring = open(4, Owner::AnyThread)?;
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    match NEEDED.iter().find(|code| !probe.is_supported(**code)) {
        Some(code) => {
            Err(io::Error::other(format!("the kernel does not know operation {code} of io_uring")))
        }
        None => Ok(()),
    }
}

/// An eventfd: writing to it wakes a thread that waits for a ring, or polls.
#[derive(Clone, Debug)]
pub struct EventFd(Arc<OwnedFd>);

impl EventFd {
    /// An eventfd that is not signalled.
    ///
    /// # Errors
    /// If the system refuses it.
    pub fn new() -> io::Result<EventFd> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(EventFd(Arc::new(eventfd(0, flags)?)))
    }

    /// A waker that signals this eventfd.
    pub fn waker(&self) -> Waker {
        let own = self.clone();
        Waker::new(move || own.notify())
    }

    /// Signals the eventfd.
    pub(crate) fn notify(&self) {
        // A full counter wakes the waiter as well.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Resets the eventfd.
    #[inline]
    pub fn reset(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    /// Sleeps until it is signalled, or `at_most` has passed.
    pub fn wait(&self, at_most: Duration) {
        let mut entry = [PollFd::new(&self.0, PollFlags::IN)];
        let time = Timespec::try_from(at_most).ok();
        // On a signal, or a lack of memory, the caller checks again.
        let _ = rustix::event::poll(&mut entry, time.as_ref());
    }

    pub(crate) fn raw(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.raw()
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The registered files, of which there is a fixed number at a time.
///
/// The kernel keeps a registered file open, and it needs no descriptor of this process.
pub(crate) struct Files {
    slots: Box<[Option<Source>]>,
    /// The slot to be replaced next.
    next: usize,
    /// For each slot, the unregistered file that was last asked for and would use this slot.
    asked: Box<[Option<Source>]>,
    /// Locks that are registered while the ring has operations, in the slots after the others.
    locks: Vec<Arc<Lock>>,
}

impl Files {
    /// Registers no file yet, with `count` slots. If the ring writes, it holds the locks of the
    /// pool's directory or disk while any write is in flight, even if the process dies. The kernel
    /// closes a ring, and its registered files, only when its last operation has ended.
    pub(crate) fn new(ring: &IoUring, count: u32, locks: Vec<Arc<Lock>>) -> io::Result<Files> {
        ring.submitter().register_files_sparse(count + locks.len() as u32)?;
        let descriptors: Vec<RawFd> = locks.iter().map(|lock| lock.as_raw_fd()).collect();
        if !descriptors.is_empty() {
            ring.submitter().register_files_update(count, &descriptors)?;
        }
        let (slots, asked) =
            ((0..count).map(|_| None).collect(), (0..count).map(|_| None).collect());
        Ok(Files { slots, next: 0, asked, locks })
    }

    /// Called before the ring is closed. `is_idle` says whether it surely has no operation in
    /// flight.
    pub(crate) fn leave(&mut self, ring: &IoUring, is_idle: bool) {
        let locks = std::mem::take(&mut self.locks);
        if is_idle {
            // The kernel closes a ring up to 50 ms later. Until then its files would keep their
            // file system busy for umount, and hold the locks against another opening. If this call
            // is refused, unlocking frees the locks anyway.
            _ = ring.submitter().unregister_files();
        } else {
            // Writes may be in flight, so this process must never release the locks.
            std::mem::forget(locks);
        }
    }

    /// The slot of a file, if it is registered. A file is registered when it is asked for the
    /// second time, without a request for another file of that slot in between. Registering costs
    /// more than one lookup.
    pub(crate) fn known(
        &mut self,
        ring: &IoUring,
        file: &Arc<PoolFile>,
    ) -> io::Result<Option<Fixed>> {
        let source = file.source();
        let is_it = |slot: &Option<Source>| slot.as_ref().is_some_and(|known| known.is(source));
        let at = source.number() % self.slots.len();
        if is_it(&self.slots[at]) {
            return Ok(Some(Fixed(at as u32)));
        }
        if !is_it(&self.asked[at]) {
            self.asked[at] = Some(source.clone());
            return Ok(None);
        }
        self.put(ring, at, file)?;
        Ok(Some(Fixed(at as u32)))
    }

    /// The slot of a file, which is registered if necessary.
    pub(crate) fn number(&mut self, ring: &IoUring, file: &Arc<PoolFile>) -> io::Result<Fixed> {
        let is_it =
            |slot: &Option<Source>| slot.as_ref().is_some_and(|known| known.is(file.source()));
        if let Some(at) = self.slots.iter().position(is_it) {
            return Ok(Fixed(at as u32));
        }
        let at = self.next;
        self.next = (at + 1) % self.slots.len();
        self.put(ring, at, file)?;
        Ok(Fixed(at as u32))
    }

    /// Registers a file in a slot.
    fn put(&mut self, ring: &IoUring, at: usize, file: &Arc<PoolFile>) -> io::Result<()> {
        let open = file.source().get(Use::Read)?;
        // Submitted operations keep their file, so submit the pending ones before the slot changes.
        ring.submitter().submit()?;
        ring.submitter().register_files_update(at as u32, &[open.as_raw_fd()])?;
        self.slots[at] = Some(file.source().clone());
        Ok(())
    }
}

/// A ring that reads, for the thread that closes the directory or disk: the owner of the ring may
/// be idle, and the registered files would stay open.
#[derive(Debug)]
pub(crate) struct ReadRing(Mutex<Option<RawFd>>);

impl ReadRing {
    fn new(ring: &IoUring) -> Arc<ReadRing> {
        Arc::new(ReadRing(Mutex::new(Some(ring.as_raw_fd()))))
    }

    fn lock(&self) -> MutexGuard<'_, Option<RawFd>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the registered files once they are read no more. A read that begins afterwards fails.
    pub(crate) fn unregister_files(&self) {
        /// `IORING_UNREGISTER_FILES` of linux/io_uring.h.
        const UNREGISTER_FILES: libc::c_uint = 3;
        let ring = self.lock();
        let Some(ring) = *ring else { return };
        let none = std::ptr::null::<libc::c_void>();
        // If it is refused, the files stay open until the owner drops the ring.
        // SAFETY: the operation takes no memory, and the lock keeps the ring open.
        _ = unsafe { libc::syscall(libc::SYS_io_uring_register, ring, UNREGISTER_FILES, none, 0) };
    }

    /// Called before the ring is closed.
    fn leave(&self) {
        *self.lock() = None;
    }
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = self.slots.iter().flatten().count();
        f.debug_struct("Files").field("known", &known).finish_non_exhaustive()
    }
}

/// Write batches in flight at once: long writes wait for a slow disk together.
const DEPTH: usize = 8;

/// Registered files of the ring.
const FILES: u32 = 8;

/// A write of at most this length, for which this thread waits anyway, may use `RWF_DSYNC`.
const INLINE_BYTES: usize = 128 << 10;

/// A longer write is submitted immediately; a shorter one by the same call that waits for it.
const EAGER_BYTES: usize = 128 << 10;

/// How often an interrupted write, of which no byte was written, is submitted again.
const INTERRUPTED_MAX: u32 = 100;

/// How many writes of each kind a calibration measures, and how long it may take.
const ROUNDS: usize = 8;
const CALIBRATION_MAX: Duration = Duration::from_millis(50);

/// User data of the eventfd's completion.
const EVENT_FD: u64 = u64::MAX;

/// How a short write becomes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By a linked sync.
    Linked,
    /// By `RWF_DSYNC`. A disk with FUA does that without flushing its cache; on any other it saves
    /// one call.
    Itself,
}

/// A write batch in flight.
struct RingBatch {
    write_batch: WriteBatch,
    number: u64,
    file: Arc<PoolFile>,
    /// The descriptor for the sync: it stays open until the sync has ended.
    open: Option<Arc<File>>,
    offset: u64,
    /// The remaining parts to write; they point into the write batch.
    vectors: Vec<libc::iovec>,
    left: usize,
    syncs: bool,
    /// Completions that are still expected.
    pending: u32,
    interrupted: u32,
    synced: bool,
    result: Option<io::Result<()>>,
}

// SAFETY: the vectors point into the write batch, which moves along; its memory does not move.
unsafe impl Send for RingBatch {}

/// The log writer by io_uring.
pub struct UringLogWriter {
    ring: IoUring,
    files: Files,
    /// Write batches in flight, the oldest first.
    in_flight: VecDeque<RingBatch>,
    next: u64,
    way: Way,
    /// Signalled by threads that send records to the committer while it waits here.
    event_fd: EventFd,
    /// A poll of the eventfd is in flight.
    listens: bool,
    /// Submit each write batch immediately, because another log writer writes at the same time.
    eager: bool,
    /// The ring has failed, and the kernel may still read the memory in flight: it is never freed.
    lost: bool,
}

impl UringLogWriter {
    /// A log writer for the calling thread, which keeps the locks. A few writes to `scratch`, a
    /// file of a free segment, measure which kind of durable write is faster.
    ///
    /// # Errors
    /// If the system refuses the ring.
    pub(crate) fn new(
        scratch: Option<&Arc<PoolFile>>,
        locks: Vec<Arc<Lock>>,
    ) -> io::Result<UringLogWriter> {
        let ring = open(4 * DEPTH as u32, Owner::Thread)?;
        let mut log_writer = UringLogWriter {
            files: Files::new(&ring, FILES, locks)?,
            ring,
            in_flight: VecDeque::new(),
            next: 0,
            way: Way::Linked,
            event_fd: EventFd::new()?,
            listens: false,
            eager: false,
            lost: false,
        };
        if let Some(scratch) = scratch {
            let (linked, itself) = log_writer.calibrate(scratch)?;
            log_writer.way = if itself < linked { Way::Itself } else { Way::Linked };
            let (linked_us, itself_us) = (linked.as_micros(), itself.as_micros());
            tracing::info!(
                linked_us,
                itself_us,
                "the fastest durable write of 4 KiB on this disk is {}",
                match log_writer.way {
                    Way::Linked => "a write and a sync linked to it",
                    Way::Itself => "a write that is durable by itself",
                }
            );
        }
        Ok(log_writer)
    }

    /// The median times of both kinds of write.
    fn calibrate(&mut self, file: &Arc<PoolFile>) -> io::Result<(Duration, Duration)> {
        let memory = Memory::new(ALIGN as u64);
        let mut times: [Vec<Duration>; 2] = Default::default();
        let begin = Instant::now();
        for _ in 0..ROUNDS {
            for (way, times) in [Way::Linked, Way::Itself].into_iter().zip(&mut times) {
                self.way = way;
                let mut write_batch = WriteBatch::new(memory.take_beyond(ALIGN));
                write_batch.head(ALIGN).fill(0);
                let began = Instant::now();
                self.begin(file, 0, write_batch, Durability::Itself);
                self.end().map_or(Ok(()), |(_, result)| result)?;
                times.push(began.elapsed());
            }
            if begin.elapsed() > CALIBRATION_MAX {
                break;
            }
        }
        let [linked, itself] = times.map(|mut times| {
            times.sort_unstable();
            times.get(times.len() / 2).copied().unwrap_or(Duration::MAX)
        });
        Ok((linked, itself))
    }

    /// Pushes a submission into the ring, which has space for everything that can be in flight.
    fn push(&mut self, entry: &Entry) -> io::Result<()> {
        // SAFETY: what an entry points to lives in its `RingBatch`, which is kept until its
        // completions have come; the eventfd's points to nothing.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.ring.submitter().submit()?;
        }
        Ok(())
    }

    /// Submits the remaining bytes of a write batch.
    fn submit(&mut self, mut flight: RingBatch) {
        let pushed = self.push_batch(&mut flight);
        if let Err(error) = pushed {
            if flight.pending > 0 {
                self.lost = true;
            }
            flight.result = Some(Err(error));
        }
        let at = self.in_flight.partition_point(|other| other.number < flight.number);
        self.in_flight.insert(at, flight);
    }

    fn push_batch(&mut self, flight: &mut RingBatch) -> io::Result<()> {
        let file = self.files.number(&self.ring, &flight.file)?;
        let (vectors, count) = (flight.vectors.as_ptr(), flight.vectors.len() as u32);
        let write = opcode::Writev::new(file, vectors, count).offset(flight.offset).build();
        let write = write.user_data(flight.number << 1);
        // After a new submission, an earlier sync is not sufficient.
        flight.synced = false;
        if !flight.syncs {
            self.push(&write)?;
            flight.pending = 1;
            return Ok(());
        }
        // Push both entries or none: a full queue must not break the link.
        let queue = self.ring.submission();
        let free = queue.capacity() - queue.len();
        drop(queue);
        if free < 2 {
            self.ring.submitter().submit()?;
        }
        let open = flight.file.source().get(Use::Read)?;
        self.push(&write.flags(Flags::IO_LINK))?;
        flight.pending = 1;
        self.push(&sync(&open, flight.number))?;
        flight.open = Some(open);
        flight.pending = 2;
        Ok(())
    }

    /// Takes completions from the ring.
    fn reap(&mut self) {
        loop {
            let Some(entry) = self.ring.completion().next() else { return };
            let (tag, result) = (entry.user_data(), entry.result());
            if tag == EVENT_FD {
                self.listens = false;
                self.event_fd.reset();
                continue;
            }
            let at = self.in_flight.iter().position(|flight| flight.number == tag >> 1);
            let Some(at) = at else { continue };
            self.in_flight[at].completed(tag & 1 == 1, result);
            if self.in_flight[at].wants_more()
                && let Some(flight) = self.in_flight.remove(at)
            {
                self.submit(flight);
            }
        }
    }

    /// Sleeps until there is a completion.
    fn sleep(&mut self) {
        match self.ring.submitter().submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // There are too many completions that were not taken; the caller takes them now.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => {
                self.lost = true;
                for flight in self.in_flight.iter_mut().filter(|flight| flight.result.is_none()) {
                    let error = io::Error::new(error.kind(), error.to_string());
                    flight.result = Some(Err(error));
                }
            }
        }
    }

    fn wait_for_oldest(&mut self) {
        self.reap();
        while !self.is_oldest_done() {
            self.sleep();
            self.reap();
        }
    }

    fn is_oldest_done(&self) -> bool {
        self.in_flight.front().is_none_or(|flight| flight.result.is_some())
    }

    /// Writes synchronously with `RWF_DSYNC`.
    fn write_inline(file: &PoolFile, offset: u64, write_batch: &WriteBatch) -> io::Result<()> {
        let mut slices: Vec<IoSlice<'_>> = write_batch.slices().map(IoSlice::new).collect();
        file.write_slices(offset, &mut slices, ReadWriteFlags::DSYNC)
    }
}

/// A sync linked after a write. It uses a descriptor, which stays open while the write batch is in
/// flight.
/// The kernel resolves a registered slot when the write is done, and the slot may have another file
/// by then.
fn sync(file: &File, number: u64) -> Entry {
    let file = Fd(file.as_raw_fd());
    let sync = opcode::Fsync::new(file).flags(FsyncFlags::DATASYNC).build();
    sync.user_data(number << 1 | 1)
}

impl RingBatch {
    /// Handles a completion of the write or of the sync.
    fn completed(&mut self, is_sync: bool, result: i32) {
        self.pending = self.pending.saturating_sub(1);
        if is_sync {
            match result {
                0.. => self.synced = true,
                // The write was short or has failed, and its completion says so.
                _ if result == -libc::ECANCELED => {}
                _ => self.fail(io::Error::from_raw_os_error(-result)),
            }
        } else {
            match result {
                1.. => self.advance(result as usize),
                0 => self.fail(io::ErrorKind::WriteZero.into()),
                _ if [-libc::EINTR, -libc::EAGAIN].contains(&result)
                    && self.interrupted < INTERRUPTED_MAX =>
                {
                    self.interrupted += 1;
                }
                _ => self.fail(io::Error::from_raw_os_error(-result)),
            }
        }
        if self.pending == 0 && self.result.is_none() && self.left == 0 {
            self.result = Some(match self.syncs && !self.synced {
                true => Err(io::Error::other("the sync after a write was cancelled")),
                false => Ok(()),
            });
        }
    }

    fn fail(&mut self, error: io::Error) {
        if !matches!(self.result, Some(Err(_))) {
            self.result = Some(Err(error));
        }
    }

    /// Removes the written bytes from the vectors.
    fn advance(&mut self, mut bytes: usize) {
        self.left = self.left.saturating_sub(bytes);
        self.offset += bytes as u64;
        let whole = self.vectors.iter().take_while(|vector| {
            let is_whole = vector.iov_len <= bytes;
            bytes -= if is_whole { vector.iov_len } else { 0 };
            is_whole
        });
        let whole = whole.count();
        self.vectors.drain(..whole);
        if let Some(first) = self.vectors.first_mut() {
            // SAFETY: fewer bytes than the vector has.
            first.iov_base = unsafe { first.iov_base.byte_add(bytes) };
            first.iov_len -= bytes;
        }
    }

    /// Whether the remaining bytes must be submitted: the write was short, and its sync was
    /// cancelled.
    fn wants_more(&self) -> bool {
        self.pending == 0 && self.left > 0 && self.result.is_none()
    }

    /// Whether the kernel no longer uses this write batch.
    fn is_released(&self) -> bool {
        self.pending == 0
    }
}

impl LogWriter<PoolFile> for UringLogWriter {
    fn depth(&self) -> usize {
        DEPTH
    }

    fn waits_for_clients(&self) -> bool {
        false
    }

    fn submit_at_once(&mut self) {
        self.eager = true;
    }

    fn waker(&self) -> Option<Waker> {
        Some(self.event_fd.waker())
    }

    fn begin(
        &mut self,
        file: &Arc<PoolFile>,
        offset: u64,
        write_batch: WriteBatch,
        durability: Durability,
    ) {
        let vector = |slice: &[u8]| libc::iovec {
            iov_base: slice.as_ptr().cast_mut().cast(),
            iov_len: slice.len(),
        };
        let left = write_batch.len();
        let mut flight = RingBatch {
            vectors: write_batch.slices().map(vector).collect(),
            write_batch,
            number: self.next,
            file: Arc::clone(file),
            open: None,
            offset: file.source_offset(offset),
            left,
            syncs: durability != Durability::Nothing,
            pending: 0,
            interrupted: 0,
            synced: false,
            result: None,
        };
        self.next += 1;
        let is_only = self.in_flight.is_empty() && left <= INLINE_BYTES && !self.eager;
        if is_only && durability == Durability::Itself && self.way == Way::Itself {
            flight.result = Some(UringLogWriter::write_inline(file, offset, &flight.write_batch));
            self.in_flight.push_back(flight);
            return;
        }
        self.submit(flight);
        if self.eager || left > EAGER_BYTES || self.in_flight.len() > 1 {
            // An error here occurs again when the write batch is waited for.
            let _ = self.ring.submitter().submit();
        }
    }

    fn wait(&mut self, event_count: &EventCount, is_there: &dyn Fn() -> bool) -> bool {
        self.reap();
        if self.is_oldest_done() {
            return true;
        }
        if !self.listens {
            let poll = opcode::PollAdd::new(Fd(self.event_fd.raw()), libc::POLLIN as u32).build();
            if self.push(&poll.user_data(EVENT_FD)).is_err() {
                return false;
            }
            self.listens = true;
        }
        if event_count.doze(is_there) {
            self.sleep();
            event_count.rise();
        }
        self.reap();
        self.is_oldest_done()
    }

    fn end(&mut self) -> Option<Ended> {
        self.wait_for_oldest();
        let mut flight = self.in_flight.pop_front()?;
        while !flight.is_released() && !self.lost {
            // The write has failed, and the kernel still uses a part of it.
            self.in_flight.push_front(flight);
            self.sleep();
            self.reap();
            flight = self.in_flight.pop_front()?;
        }
        let result = flight.result.take().unwrap_or(Ok(()));
        if flight.is_released() {
            return Some((Some(flight.write_batch), result));
        }
        // The kernel may still read the write batch.
        std::mem::forget(flight);
        Some((None, result))
    }
}

/// Waits for the writes in flight: the kernel reads their memory.
impl Drop for UringLogWriter {
    fn drop(&mut self) {
        while self.end().is_some() {}
        self.files.leave(&self.ring, !self.lost);
    }
}

impl fmt::Debug for UringLogWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let in_flight = self.in_flight.len();
        f.debug_struct("UringLogWriter").field("in_flight", &in_flight).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use blockyard_testing::capability::Capability;

    use super::*;
    use crate::buffer::Memory;
    use crate::ring::reads::RingReads;
    use crate::{PoolStore, Reads, SegmentFiles, StoreFile, StoreLocation};

    /// With more files than slots, each read still gets the data of its own file.
    #[test]
    fn any_number_of_files_is_read() {
        if let Err(error) = probe() {
            return Capability::Uring.is_missing(error);
        }
        let path = std::env::temp_dir().join(format!("blockyard-files-{}", std::process::id()));
        let directory = PoolStore::take(&path).unwrap();
        let memory = Memory::new(1 << 20);
        let make = |number: u8| {
            let file = directory.create(&number.to_string(), 4096).unwrap();
            let mut bytes = memory.take_beyond(4096);
            bytes.fill(number);
            file.write_at(0, &[&bytes]).unwrap();
            Arc::new(file)
        };
        let files: Vec<_> = (0..150).map(make).collect();
        let mut random = fastrand::Rng::with_seed(3);
        let mut reads = RingReads::new(&EventFd::new().unwrap()).unwrap();
        for _ in 0..100 {
            let some: Vec<usize> = (0..8).map(|_| random.usize(..files.len())).collect();
            for number in some.iter().chain(&some) {
                reads.begin(*number as u32, &files[*number], 0, memory.take_beyond(4096));
            }
            reads.submit();
            for _ in 0..2 * some.len() {
                let got = loop {
                    match reads.take() {
                        Some(got) => break got,
                        None => reads.sleep(std::time::Duration::from_secs(1)),
                    }
                };
                let bytes = got.buffer.filter(|_| got.result.is_ok()).unwrap();
                assert!(bytes.iter().all(|byte| *byte == got.token as u8), "{}", got.token);
            }
        }
        drop(reads);
        std::fs::remove_dir_all(&path).unwrap();
    }

    fn write_batch(memory: &Arc<Memory>, byte: u8, parts: usize) -> WriteBatch {
        let mut write_batch = WriteBatch::new(memory.take_beyond(ALIGN));
        write_batch.head(ALIGN).fill(byte);
        for _ in 1..parts {
            let mut part = memory.take_beyond(ALIGN);
            part.fill(byte);
            write_batch.push(crate::log_writer::Part::Bytes(part));
        }
        write_batch
    }

    fn with_file(name: &str, test: impl FnOnce(&PoolStore, &Arc<PoolFile>)) {
        let name = format!("blockyard-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let directory = PoolStore::take(&path).unwrap();
        let file = Arc::new(directory.create("file", 1 << 20).unwrap());
        test(&directory, &file);
        std::fs::remove_dir_all(&path).unwrap();
    }

    fn flight(file: &Arc<PoolFile>, memory: &Arc<Memory>) -> RingBatch {
        let write_batch = write_batch(memory, 1, 2);
        let vector = |slice: &[u8]| libc::iovec {
            iov_base: slice.as_ptr().cast_mut().cast(),
            iov_len: slice.len(),
        };
        RingBatch {
            vectors: write_batch.slices().map(vector).collect(),
            left: write_batch.len(),
            write_batch,
            number: 0,
            file: Arc::clone(file),
            open: None,
            offset: 4096,
            syncs: true,
            pending: 2,
            interrupted: 0,
            synced: false,
            result: None,
        }
    }

    /// Results of the write and of the sync, and the result of the write batch.
    #[test]
    fn only_a_whole_write_with_its_sync_is_durable() {
        let memory = Memory::new(1 << 20);
        let (eio, cancelled) = (-libc::EIO, -libc::ECANCELED);
        with_file("flights", |_, file| {
            for (write, sync, ends, left) in [
                (8192, 0, Some(true), 0),
                (5000, cancelled, None, 3192),
                (4096, cancelled, None, 4096),
                (-libc::EINTR, cancelled, None, 8192),
                (0, cancelled, Some(false), 8192),
                (eio, cancelled, Some(false), 8192),
                (8192, eio, Some(false), 0),
                (8192, -libc::EINTR, Some(false), 0),
                (8192, cancelled, Some(false), 0),
            ] {
                let mut flight = flight(file, &memory);
                flight.completed(false, write);
                assert!(flight.result.as_ref().is_none_or(Result::is_err), "not yet");
                flight.completed(true, sync);
                let result = flight.result.as_ref().map(Result::is_ok);
                assert_eq!((result, flight.left), (ends, left), "{write} {sync}");
                assert_eq!(flight.wants_more(), ends.is_none());
                let bytes: usize = flight.vectors.iter().map(|vector| vector.iov_len).sum();
                assert_eq!(bytes, left);
                assert_eq!(flight.offset, 4096 + 8192 - left as u64);
            }
        });
    }

    #[test]
    fn two_write_batches_in_flight_end_in_order_and_return_their_errors() {
        if let Err(error) = probe() {
            return Capability::Uring.is_missing(error);
        }
        let memory = Memory::new(1 << 20);
        with_file("log-writer", |directory, file| {
            let mut log_writer = UringLogWriter::new(Some(file), Vec::new()).unwrap();
            for way in [Way::Linked, Way::Itself] {
                log_writer.way = way;
                log_writer.begin(file, 0, write_batch(&memory, 3, 60), Durability::File);
                log_writer.begin(file, 60 * 4096, write_batch(&memory, 4, 2), Durability::Itself);
                let event_count = EventCount::new();
                while !log_writer.wait(&event_count, &|| false) {}
                for parts in [60, 2] {
                    let (write_batch, result) = log_writer.end().unwrap();
                    assert_eq!((write_batch.unwrap().len(), result.is_ok()), (parts * 4096, true));
                }
                assert!(log_writer.end().is_none());
                log_writer.begin(file, 62 * 4096, write_batch(&memory, 5, 1), Durability::Itself);
                assert!(log_writer.end().unwrap().1.is_ok());
            }
            let mut found = memory.take_beyond(63 * 4096);
            crate::StoreFile::read_at(&**file, 0, &mut found).unwrap();
            for (index, block) in found.chunks(4096).enumerate() {
                let byte = if index < 60 { 3 } else { 4 + u8::from(index == 62) };
                assert!(block.iter().all(|it| *it == byte), "{index}");
            }
            // For a file that cannot be written, the sync after the write is cancelled.
            let lock = std::fs::File::open(std::path::Path::new(&directory.title()).join("file"));
            let closed = Arc::new(PoolFile::of(lock.unwrap()));
            for (syncs, way) in [Durability::Nothing, Durability::File, Durability::Itself]
                .into_iter()
                .zip([Way::Linked, Way::Linked, Way::Itself])
            {
                log_writer.way = way;
                log_writer.begin(&closed, 0, write_batch(&memory, 6, 2), syncs);
                let (write_batch, result) = log_writer.end().unwrap();
                assert!(write_batch.is_some());
                assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EBADF), "{syncs:?}");
            }
        });
    }

    /// Regression: the ring replaced a registered file whose write was in flight, and the sync
    /// after that write was of the other file.
    #[test]
    fn a_sync_is_of_the_file_that_was_written() {
        if let Err(error) = probe() {
            return Capability::Uring.is_missing(error);
        }
        let memory = Memory::new(1 << 20);
        with_file("slots", |_, file| {
            let mut log_writer = UringLogWriter::new(None, Vec::new()).unwrap();
            let open = || {
                let null = std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
                Arc::new(PoolFile::of(null))
            };
            for _ in 0..FILES {
                log_writer.begin(file, 0, write_batch(&memory, 1, 2), Durability::File);
                // More files than slots: the first one is replaced. These files cannot be synced,
                // which would be an error of its own.
                for _ in 0..FILES {
                    log_writer.begin(&open(), 0, write_batch(&memory, 1, 2), Durability::Nothing);
                }
                for at in 0..=FILES {
                    let (_, result) = log_writer.end().unwrap();
                    assert!(result.is_ok(), "{at}: {result:?}");
                }
            }
            log_writer.begin(&open(), 0, write_batch(&memory, 1, 2), Durability::File);
            assert!(log_writer.end().unwrap().1.is_err(), "the sync fails");
        });
    }

    /// A thread that sends a record wakes the committer, which waits for a write batch.
    #[test]
    fn a_record_ends_the_wait_for_a_write_batch() {
        if let Err(error) = probe() {
            return Capability::Uring.is_missing(error);
        }
        with_file("event_count", |_, file| {
            let mut log_writer = UringLogWriter::new(None, Vec::new()).unwrap();
            let event_count = EventCount::new();
            event_count.set_waker(LogWriter::waker(&log_writer).unwrap());
            let memory = Memory::new(1 << 20);
            std::thread::scope(|scope| {
                scope.spawn(|| while !event_count.notify() {});
                // No operation is in flight that could end.
                log_writer.in_flight.push_back(RingBatch { pending: 1, ..flight(file, &memory) });
                assert!(!log_writer.wait(&event_count, &|| false));
                assert!(!log_writer.listens);
                log_writer.in_flight.clear();
            });
        });
    }
}
