//! A disk whose requests go to 32 workers, each of which writes and syncs for itself: the published
//! change to ZFS' zvol, on a file that is written in place.
//!
//! A request is a task that lies in the queue's own slot, so that handing it to a worker cannot
//! fail. The worker locks the range, not the submitter. The product also writes a log that is never
//! overwritten and that keeps the old data. This disk does not, so it costs less than the change to
//! ZFS did; blocks are checksummed all the same.
#![allow(clippy::disallowed_types)] // The locks are what this is about.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use blockyard_core::clock::Clock;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{
    Batch, CompletionBatch, Device, DeviceError, DeviceQueue, Due, Flags, Geometry, Limits, Nanos,
    Op, Pieces, SECTOR_BYTES, SECTOR_SHIFT, Sector, Started, Status,
};
use blockyard_store::buffer::{Buffer, Memory};
use blockyard_store::{EventFd, StoreFile};
use blockyard_sync::completion_queue::{CompletionQueue, Receiver};
use blockyard_volume_format::bytes::crc;

/// The number of workers, as published.
pub const WORKERS: usize = 32;
/// The number of requests of one queue.
const DEPTH: u16 = 64;
/// The longest read or write, in bytes.
const LEN_MAX: u64 = 1 << 20;
/// The unit of a checksum, in bytes.
const BLOCK_BYTES: usize = 4096;
/// The longest time between two looks for answers, in ns: workers wake the owner earlier.
const LOOK_NS: u64 = 1_000_000;

/// A request that a worker executes.
struct Task {
    op: Op,
    durable: bool,
    at: u64,
    data: Option<Buffer>,
    slot: usize,
    to: Arc<CompletionQueue<FinishedRequest>>,
}

/// A request that a worker has finished.
struct FinishedRequest {
    slot: usize,
    data: Option<Buffer>,
    status: Status,
}

/// The waiting tasks, and whether more can come.
#[derive(Default)]
struct Tasks {
    waiting: VecDeque<Task>,
    closed: bool,
}

struct Shared<F> {
    file: F,
    geometry: Geometry,
    limits: Limits,
    memory: Arc<Memory>,
    /// Checksums by block, kept in memory only.
    checksums: Vec<AtomicU64>,
    tasks: Mutex<Tasks>,
    more: Condvar,
    /// The ranges that workers are writing or reading.
    ranges: Mutex<Vec<(u64, u64)>>,
    fewer: Condvar,
}

/// A disk whose requests go to workers.
pub struct TaskWorkers<F: StoreFile> {
    shared: Arc<Shared<F>>,
    workers: Vec<JoinHandle<()>>,
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<F: StoreFile> TaskWorkers<F> {
    /// Opens a disk over the whole of a file.
    ///
    /// # Errors
    /// If the file's length cannot be read, or a thread cannot be started.
    pub fn open(file: F) -> io::Result<TaskWorkers<F>> {
        let bytes = file.len()?;
        let geometry = Geometry {
            sectors: bytes / SECTOR_BYTES,
            logical_block_bytes: BLOCK_BYTES as u32,
            physical_block_bytes: BLOCK_BYTES as u32,
            zones: None,
        };
        let limits = Limits {
            sectors_max: LEN_MAX / SECTOR_BYTES,
            chunk_sectors: LEN_MAX / SECTOR_BYTES,
            discard_sectors_max: 0,
            write_zeroes_sectors_max: 0,
            write_cache: true,
            fua: true,
            ..Limits::unlimited(DEPTH)
        };
        let shared = Arc::new(Shared {
            file,
            geometry,
            limits,
            memory: Memory::new(0),
            checksums: (0..bytes / BLOCK_BYTES as u64).map(|_| AtomicU64::new(0)).collect(),
            tasks: Mutex::default(),
            more: Condvar::new(),
            ranges: Mutex::default(),
            fewer: Condvar::new(),
        });
        let mut disk = TaskWorkers { shared, workers: Vec::with_capacity(WORKERS) };
        for number in 0..WORKERS {
            let shared = Arc::clone(&disk.shared);
            let thread = thread::Builder::new().name(format!("taskq-{number}"));
            disk.workers.push(thread.spawn(move || shared.work())?);
        }
        Ok(disk)
    }
}

impl<F: StoreFile> Drop for TaskWorkers<F> {
    fn drop(&mut self) {
        held(&self.shared.tasks).closed = true;
        self.shared.more.notify_all();
        for worker in self.workers.drain(..) {
            // A worker that panicked has already reported it.
            let _ = worker.join();
        }
    }
}

impl<F: StoreFile> Shared<F> {
    /// The loop of one worker.
    fn work(&self) {
        loop {
            let mut tasks = held(&self.tasks);
            let task = loop {
                match tasks.waiting.pop_front() {
                    Some(task) => break task,
                    None if tasks.closed => return,
                    None => tasks = self.more.wait(tasks).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(tasks);
            let Task { op, durable, at, mut data, slot, to } = task;
            let range = (at, at + data.as_ref().map_or(0, |data| data.len() as u64));
            self.take(range);
            let status = match self.carry_out(op, durable, at, data.as_deref_mut()) {
                Ok(()) => Status::Ok,
                Err(_) => Status::IoErr,
            };
            self.give(range);
            to.post([FinishedRequest { slot, data, status }].into_iter());
            to.event_count().notify();
        }
    }

    fn carry_out(&self, op: Op, durable: bool, at: u64, data: Option<&mut [u8]>) -> io::Result<()> {
        match (op, data) {
            (Op::Read, Some(data)) => {
                self.file.read_at(at, data)?;
                let sums = self.checksums[(at / BLOCK_BYTES as u64) as usize..].iter();
                let is_bad = |(block, sum): (&[u8], &AtomicU64)| {
                    // Relaxed: this worker owns the range, whose lock orders the accesses.
                    let sum = sum.load(Ordering::Relaxed);
                    sum != 0 && sum != crc(block)
                };
                match data.chunks(BLOCK_BYTES).zip(sums).any(is_bad) {
                    true => Err(io::Error::other("a block is damaged")),
                    false => Ok(()),
                }
            }
            (Op::Write, Some(data)) => {
                let sums = self.checksums[(at / BLOCK_BYTES as u64) as usize..].iter();
                for (block, sum) in data.chunks(BLOCK_BYTES).zip(sums) {
                    // Relaxed: as above.
                    sum.store(crc(block), Ordering::Relaxed);
                }
                self.file.write_at(at, &[data])?;
                if durable { self.file.sync() } else { Ok(()) }
            }
            _ => self.file.sync(),
        }
    }

    /// Waits until no other worker uses the range, and takes it.
    fn take(&self, (from, to): (u64, u64)) {
        let mut ranges = held(&self.ranges);
        while ranges.iter().any(|range| range.0 < to && from < range.1) {
            ranges = self.fewer.wait(ranges).unwrap_or_else(PoisonError::into_inner);
        }
        ranges.push((from, to));
    }

    fn give(&self, range: (u64, u64)) {
        let mut ranges = held(&self.ranges);
        if let Some(at) = ranges.iter().position(|held| *held == range) {
            ranges.swap_remove(at);
        }
        drop(ranges);
        self.fewer.notify_all();
    }
}

impl<F: StoreFile> Device for TaskWorkers<F> {
    type Queue = TaskQueue<F>;

    fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    fn open_queue(&self) -> Result<TaskQueue<F>, DeviceError> {
        Ok(TaskQueue {
            shared: Arc::clone(&self.shared),
            replies: CompletionQueue::open(DEPTH.into()),
            waiting: (0..DEPTH).map(|_| None).collect(),
            free: (0..DEPTH.into()).collect(),
            buffers: Vec::new(),
            look_at: Nanos(0),
            event_fd: None,
            dozed: false,
        })
    }

    fn report_zones(&self, _: Sector, _: usize, _: &mut Vec<ZoneInfo>) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// The queue of one channel.
pub struct TaskQueue<F> {
    shared: Arc<Shared<F>>,
    replies: Receiver<FinishedRequest>,
    waiting: Vec<Option<Started>>,
    free: Vec<usize>,
    /// Buffers of finished requests, for later requests of equal length.
    buffers: Vec<Buffer>,
    look_at: Nanos,
    /// The eventfd on which the owner sleeps, if it has asked for one.
    event_fd: Option<EventFd>,
    /// Whether the owner may be asleep on `eventfd`.
    dozed: bool,
}

impl<F: StoreFile> TaskQueue<F> {
    fn buffer(&mut self, len: usize) -> Buffer {
        let fits = self.buffers.iter().position(|buffer| buffer.len() == len);
        match fits {
            Some(at) => self.buffers.swap_remove(at),
            None => self.shared.memory.take_beyond(len),
        }
    }
}

impl<F: StoreFile> DeviceQueue for TaskQueue<F> {
    fn start(&mut self, now: Nanos, batch: &mut Batch, _: &mut CompletionBatch) {
        let mut tasks = Vec::with_capacity(batch.len());
        while let Some(started) = batch.next() {
            let Some(slot) = self.free.pop() else {
                batch.requeue(started);
                break;
            };
            let (at, op) = (started.sector().bytes(), started.op());
            let len = (started.sectors() << SECTOR_SHIFT) as usize;
            let mut data = (len > 0).then(|| self.buffer(len));
            if let (Op::Write, Some(data)) = (op, &mut data) {
                Pieces::new(started.segments()).read(data);
            }
            let durable = started.flags().contains(Flags::FUA);
            let to = Arc::clone(self.replies.completion_queue());
            tasks.push(Task { op, durable, at, data, slot, to });
            self.waiting[slot] = Some(started);
        }
        let count = tasks.len();
        held(&self.shared.tasks).waiting.extend(tasks);
        for _ in 0..count {
            self.shared.more.notify_one();
        }
        self.look_at = now + LOOK_NS;
    }

    fn poll(&mut self, now: Nanos, done: &mut CompletionBatch) {
        if std::mem::take(&mut self.dozed)
            && let Some(event_fd) = &self.event_fd
        {
            self.replies.completion_queue().event_count().rise();
            event_fd.reset();
        }
        while let Some(FinishedRequest { slot, data, status }) = self.replies.take() {
            let Some(started) = self.waiting[slot].take() else { continue };
            if let (Op::Read, Some(data), true) = (started.op(), &data, status.is_ok()) {
                Pieces::new(started.segments()).write(data);
            }
            self.buffers.extend(data.filter(|_| self.buffers.len() < self.waiting.len()));
            done.complete(started, status);
            self.free.push(slot);
        }
        self.look_at = now + LOOK_NS;
    }

    fn room(&self) -> usize {
        self.free.len()
    }

    fn due(&self) -> Due {
        match (self.replies.is_any(), self.waits_for_others()) {
            (true, _) => Due::At(Nanos(0)),
            (false, true) if self.event_fd.is_none() => Due::At(self.look_at),
            (false, _) => Due::Never,
        }
    }

    fn waits_for_others(&self) -> bool {
        self.free.len() < self.waiting.len()
    }

    fn sleep<C: Clock>(&mut self, until: Due, clock: &C) {
        if !self.waits_for_others() {
            return;
        }
        let longest = Duration::from_nanos(LOOK_NS);
        let longest = match until {
            Due::At(at) => longest.min(Duration::from_nanos(at.since(clock.now()))),
            Due::Never => longest,
        };
        self.replies.completion_queue().event_count().sleep(longest, || self.replies.is_any());
    }

    fn descriptor(&mut self) -> Option<RawFd> {
        if self.event_fd.is_none()
            && let Ok(event_fd) = EventFd::new()
        {
            self.replies.completion_queue().event_count().set_waker(event_fd.waker());
            self.event_fd = Some(event_fd);
        }
        self.event_fd.as_ref().map(AsRawFd::as_raw_fd)
    }

    fn may_sleep(&mut self) -> bool {
        if self.replies.is_any() {
            return false;
        }
        self.dozed = true;
        self.replies.completion_queue().event_count().doze(|| self.replies.is_any())
    }
}

/// Waits for the requests in flight: their answers have no other queue to go to.
impl<F> Drop for TaskQueue<F> {
    fn drop(&mut self) {
        while self.free.len() < self.waiting.len() {
            match self.replies.take() {
                Some(FinishedRequest { slot, .. }) => self.free.push(slot),
                None => {
                    let look = Duration::from_nanos(LOOK_NS);
                    self.replies
                        .completion_queue()
                        .event_count()
                        .sleep(look, || self.replies.is_any());
                }
            }
        }
    }
}

impl<F: StoreFile> fmt::Debug for TaskWorkers<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskWorkers").field("file", &self.shared.file).finish_non_exhaustive()
    }
}

impl<F> fmt::Debug for TaskQueue<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskQueue").field("free", &self.free.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_core::channel::ChannelConfig;
    use blockyard_core::{Bio, BufRef, Composed, Disk, Region};
    use blockyard_store::{PoolStore, SegmentFiles};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::os::fd::BorrowedFd;

    /// A server sleeps on the eventfd and the workers wake it. Without the wake-up it would look
    /// again only after a millisecond.
    #[test]
    #[allow(unsafe_code)] // The channel's descriptor is only a number here.
    fn a_sleeping_submitter_is_woken_by_the_workers() {
        let path = std::env::temp_dir().join(format!("blockyard-taskq-{}", std::process::id()));
        // Left by a killed process that had this process's number.
        _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        let file = PoolStore::take(&path).unwrap().create("file", 1 << 20).unwrap();
        let device = Arc::new(TaskWorkers::open(file).unwrap());
        let disk = Composed::new("v0".to_owned(), "volume", device, ChannelConfig::default());
        let mut channel = disk.open().unwrap();
        let region = channel.register(Region::alloc(4096));
        let event_count = channel.descriptor().expect("the system has descriptors");
        let (mut ended, mut slept) = (Vec::new(), 0);
        for block in 0..64 {
            let bio = Bio::new(Op::Write, Sector(block * 8), 8).with_flags(Flags::FUA);
            assert_eq!(channel.push(&[bio.with_buf(BufRef { region, offset: 0 })]), 1);
            channel.submit();
            while ended.len() as u64 <= block {
                assert!(matches!(channel.due(), Due::Never | Due::At(Nanos(0))), "no time passes");
                if channel.may_sleep() {
                    // SAFETY: the channel owns the descriptor and outlives this borrow.
                    let event_count = unsafe { BorrowedFd::borrow_raw(event_count) };
                    let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
                    let rung = poll(&mut [PollFd::new(&event_count, PollFlags::IN)], Some(&minute));
                    assert_eq!(rung.unwrap(), 1, "the device did not signal its eventfd");
                    slept += 1;
                }
                channel.reap(&mut ended);
            }
        }
        assert!(slept > 0 && ended.iter().all(|end| end.status.is_ok()));
        drop((channel, disk));
        std::fs::remove_dir_all(&path).unwrap();
    }
}
