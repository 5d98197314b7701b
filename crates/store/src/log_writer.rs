//! The log writer: writes log batches into files. One thread has it, the committer's.
//!
//! The log writer owns the memory of a write until the write has ended. So the system may read the
//! memory at any time until then, and no thread has to wait meanwhile.
//!
//! | writer | of | how |
//! | --- | --- | --- |
//! | [`Blocking`] | any file | writes and syncs when the batch begins |
//! | [`UringLogWriter`](crate::ring::UringLogWriter) | real files | io_uring: a write and a linked sync |
//! | [`Tasks`] | any file | each worker writes and syncs a batch of its own |
//! | [`MirrorLogWriter`](crate::mirror::MirrorLogWriter) | the copies of a pool | passes each batch to the writers of all copies |
//!
//! An enum chooses between them at each level, once at the opening of the pool:
//! [`PoolLogWriter`](crate::PoolLogWriter) for a directory or disk, and [`CommitWriter`] for group
//! commit or workers.
//!
//! `commit=taskq` is [`Tasks`]: each worker writes one record and syncs for it. OpenZFS has done
//! this for its volumes since 2020. It suits stores whose calls block, and group commit is measured
//! against it.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use blockyard_sync::completion_queue::{CompletionQueue, Receiver};
use blockyard_sync::event_count::{EventCount, Waker};
use blockyard_sync::range_lock::{RangeLock, Use};
use blockyard_sync::task_queue::{Entry, TaskQueue};
use blockyard_volume_format::entry::Codec;

use crate::StoreFile;
use crate::buffer::{Buffer, Memory};

/// How much must be durable when a write batch is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Nothing.
    Nothing,
    /// The write batch. Everything that was written to its file before is durable already.
    Itself,
    /// The write batch, and everything that was written to its file before.
    File,
}

/// How a block is stored in a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Offset in the payload, in bytes.
    pub offset: u32,
    /// Length with padding, in bytes.
    pub len: u32,
    /// The codec.
    pub codec: Codec,
    /// The checksum of the stored bytes.
    pub crc: u64,
}

/// The blocks of a write, as they go into the log: either all are encrypted or none is.
#[derive(Debug)]
pub struct Payload {
    buffer: Buffer,
    blocks: Vec<Stored>,
}

impl Payload {
    /// A payload of blocks that are contiguous in a buffer.
    pub fn new(buffer: Buffer, blocks: Vec<Stored>) -> Payload {
        debug_assert!(
            blocks.windows(2).all(|two| two[0].codec.is_sealed() == two[1].codec.is_sealed()),
            "either all blocks are encrypted or none is"
        );
        Payload { buffer, blocks }
    }

    /// All stored bytes.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.buffer
    }

    /// Whether the blocks are encrypted.
    #[inline]
    pub fn is_sealed(&self) -> bool {
        self.blocks.first().is_some_and(|block| block.codec.is_sealed())
    }

    /// How each block is stored.
    #[inline]
    pub fn blocks(&self) -> &[Stored] {
        &self.blocks
    }

    /// The stored bytes of a block.
    #[inline]
    pub fn stored(&self, index: u32) -> &[u8] {
        let Stored { offset, len, .. } = self.blocks[index as usize];
        &self.buffer[offset as usize..][..len as usize]
    }
}

/// A part of a write batch.
#[derive(Debug)]
pub enum Part {
    /// The blocks of a write.
    Write(Arc<Payload>),
    /// Other bytes.
    Bytes(Buffer),
}

impl Part {
    /// The bytes of the part.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        match self {
            Part::Write(payload) => payload.bytes(),
            Part::Bytes(bytes) => bytes,
        }
    }
}

/// A write batch: immutable parts that are written contiguously.
#[derive(Debug)]
pub struct WriteBatch {
    /// The buffer of the head, of which the first `head_bytes` bytes are used.
    head: Buffer,
    head_bytes: usize,
    parts: Vec<Part>,
    range: Range<u64>,
}

impl WriteBatch {
    /// An empty write batch with this buffer for its head.
    pub fn new(head: Buffer) -> WriteBatch {
        WriteBatch { head, head_bytes: 0, parts: Vec::new(), range: 0..0 }
    }

    /// Makes the write batch empty.
    pub fn clear(&mut self) {
        self.head_bytes = 0;
        self.parts.clear();
        self.range = 0..0;
    }

    /// The blocks that the write batch changes, if it is of a single request; else empty.
    #[inline]
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Sets the blocks that the write batch changes.
    #[inline]
    pub fn set_range(&mut self, range: Range<u64>) {
        self.range = range;
    }

    /// The buffer of the head, of which the first `bytes` bytes will be used.
    #[inline]
    pub fn head(&mut self, bytes: usize) -> &mut [u8] {
        self.head_bytes = bytes;
        &mut self.head
    }

    /// Capacity of the head, in bytes.
    #[inline]
    pub fn head_bytes_max(&self) -> usize {
        self.head.len()
    }

    /// Adds a part.
    #[inline]
    pub fn push(&mut self, part: Part) {
        self.parts.push(part);
    }

    /// The parts of the write batch, without empty ones.
    #[inline]
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let head = &self.head[..self.head_bytes];
        let all = std::iter::once(head).chain(self.parts.iter().map(Part::bytes));
        all.filter(|part| !part.is_empty())
    }

    /// The length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.slices().map(<[u8]>::len).sum()
    }

    /// Copies the write batch into `duplicate`; blocks are copied by reference.
    pub(crate) fn copy_into(&self, duplicate: &mut WriteBatch, memory: &Arc<Memory>) {
        duplicate.clear();
        if duplicate.head.len() < self.head_bytes {
            duplicate.head = memory.take_beyond(self.head.len());
        }
        let head = duplicate.head(self.head_bytes);
        head[..self.head_bytes].copy_from_slice(&self.head[..self.head_bytes]);
        duplicate.range = self.range();
        duplicate.parts.extend(self.parts.iter().map(|part| match part {
            Part::Write(payload) => Part::Write(Arc::clone(payload)),
            Part::Bytes(bytes) => {
                let mut copy = memory.take_beyond(bytes.len());
                copy.copy_from_slice(bytes);
                Part::Bytes(copy)
            }
        }));
    }

    /// Whether the write batch has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A write batch that is no longer in flight, and the result. The write batch is missing if the
/// system may still be reading it.
pub type Ended = (Option<WriteBatch>, io::Result<()>);

/// Writes write batches into files, in order.
pub trait LogWriter<F>: fmt::Debug + Send + 'static {
    /// How many write batches may be in flight at once.
    fn depth(&self) -> usize;

    /// Tells the log writer that another one writes the same write batches: each write batch must
    /// be submitted immediately.
    fn submit_at_once(&mut self) {}

    /// Wakes the thread that sleeps in [`LogWriter::wait`], if the log writer sleeps by other means
    /// than the eventcount.
    fn waker(&self) -> Option<Waker> {
        None
    }

    /// Whether a durable write batch takes so long that the next one waits a moment for the clients
    /// whose writes were just answered: many of them send their next write at once. A log writer
    /// above others passes on what they say.
    fn waits_for_clients(&self) -> bool;

    /// Closes what belongs to a copy that has left the pool. The owner calls this while it is idle.
    fn renew(&mut self) {}

    /// Starts to write a write batch, within the file's length.
    fn begin(
        &mut self,
        file: &Arc<F>,
        offset: u64,
        write_batch: WriteBatch,
        durability: Durability,
    );

    /// Sleeps until the oldest write batch has ended, or `is_there` is true. Returns whether the
    /// oldest has ended. May return early.
    fn wait(&mut self, event_count: &EventCount, is_there: &dyn Fn() -> bool) -> bool {
        let _ = (event_count, is_there);
        true
    }

    /// Waits until the oldest write batch has ended, and removes it; `None` if none is in flight.
    /// After an error it is unknown which parts of it were written.
    fn end(&mut self) -> Option<Ended>;
}

/// A log writer that writes synchronously.
#[derive(Debug, Default)]
pub struct Blocking(VecDeque<Ended>);

impl<F: StoreFile> LogWriter<F> for Blocking {
    fn depth(&self) -> usize {
        1
    }

    fn waits_for_clients(&self) -> bool {
        false
    }

    fn begin(
        &mut self,
        file: &Arc<F>,
        offset: u64,
        write_batch: WriteBatch,
        durability: Durability,
    ) {
        let parts: Vec<&[u8]> = write_batch.slices().collect();
        let mut result = file.write_at(offset, &parts);
        if result.is_ok() && durability != Durability::Nothing {
            result = file.sync();
        }
        self.0.push_back((Some(write_batch), result));
    }

    fn end(&mut self) -> Option<Ended> {
        self.0.pop_front()
    }
}

/// Most workers.
pub(crate) const WORKERS_MAX: u16 = 256;

/// Longest sleep before the thread checks again.
const LOOK: Duration = Duration::from_secs(1);

/// A write batch for a worker.
struct Job<F> {
    number: u64,
    file: Arc<F>,
    offset: u64,
    write_batch: WriteBatch,
    durability: Durability,
}

/// A write batch that a worker has written.
struct Done {
    number: u64,
    ended: Ended,
}

/// State that the workers share.
struct Shared<F> {
    queue: TaskQueue<Job<F>>,
    ranges: RangeLock,
    done: Arc<CompletionQueue<Done>>,
}

impl<F: StoreFile> Shared<F> {
    fn work(&self) {
        while let Some(job) = self.queue.take() {
            let Job { number, file, offset, write_batch, durability } = job;
            let range = self.ranges.take(write_batch.range(), Use::Write);
            // Catch a panic: the committer waits for an answer in any case.
            let written =
                catch_unwind(AssertUnwindSafe(|| write(&*file, offset, &write_batch, durability)));
            let panicked = |_| Err(io::Error::other("a worker of the log has panicked"));
            let result = written.unwrap_or_else(panicked);
            drop(range);
            let ended = (Some(write_batch), result);
            self.done.post([Done { number, ended }].into_iter());
            self.done.event_count().notify();
        }
    }
}

fn write<F: StoreFile>(
    file: &F,
    offset: u64,
    write_batch: &WriteBatch,
    durability: Durability,
) -> io::Result<()> {
    let parts: Vec<&[u8]> = write_batch.slices().collect();
    file.write_at(offset, &parts)?;
    if durability == Durability::Nothing { Ok(()) } else { file.sync() }
}

/// The log writer with workers.
pub struct Tasks<F: StoreFile> {
    shared: Arc<Shared<F>>,
    done: Receiver<Done>,
    /// Write batches in flight, the oldest first, with their results.
    flights: VecDeque<Option<Ended>>,
    /// The number of the oldest write batch.
    first: u64,
    /// One entry for each worker; each write batch in flight uses one.
    entries: Vec<Arc<Entry<Job<F>>>>,
    workers: Vec<JoinHandle<()>>,
}

impl<F: StoreFile> Tasks<F> {
    /// Starts this number of workers.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn start(workers: u16) -> io::Result<Tasks<F>> {
        let count = workers.clamp(1, WORKERS_MAX);
        let done: Receiver<Done> = CompletionQueue::open(count.into());
        let (queue, ranges) = (TaskQueue::default(), RangeLock::default());
        let shared = Arc::new(Shared { queue, ranges, done: Arc::clone(done.completion_queue()) });
        let mut tasks = Tasks {
            shared,
            done,
            flights: VecDeque::with_capacity(count.into()),
            first: 0,
            entries: (0..count).map(|_| Arc::default()).collect(),
            workers: Vec::with_capacity(count.into()),
        };
        for number in 0..count {
            let shared = Arc::clone(&tasks.shared);
            let builder = std::thread::Builder::new().name(format!("volume-task-{number}"));
            tasks.workers.push(builder.spawn(move || shared.work())?);
        }
        Ok(tasks)
    }

    fn collect(&mut self) {
        while let Some(Done { number, ended }) = self.done.take() {
            if let Some(flight) = self.flights.get_mut((number - self.first) as usize) {
                *flight = Some(ended);
            }
        }
    }

    fn is_oldest_done(&self) -> bool {
        self.flights.front().is_none_or(Option::is_some)
    }
}

impl<F: StoreFile> LogWriter<F> for Tasks<F> {
    fn depth(&self) -> usize {
        self.entries.len()
    }

    fn waits_for_clients(&self) -> bool {
        false
    }

    fn waker(&self) -> Option<Waker> {
        let done = Arc::clone(self.done.completion_queue());
        Some(Waker::new(move || _ = done.event_count().notify()))
    }

    fn begin(
        &mut self,
        file: &Arc<F>,
        offset: u64,
        write_batch: WriteBatch,
        durability: Durability,
    ) {
        let number = self.first + self.flights.len() as u64;
        let file = Arc::clone(file);
        let entry = Arc::clone(&self.entries[number as usize % self.entries.len()]);
        self.flights.push_back(None);
        self.shared.queue.dispatch(&entry, Job { number, file, offset, write_batch, durability });
    }

    fn wait(&mut self, event_count: &EventCount, is_there: &dyn Fn() -> bool) -> bool {
        self.collect();
        if !self.is_oldest_done() {
            // Both the workers and the threads that send records notify this eventcount.
            if event_count.doze(is_there) {
                let own = self.done.completion_queue().event_count();
                own.sleep(LOOK, || self.done.is_any() || is_there());
                event_count.rise();
            }
            self.collect();
        }
        self.is_oldest_done()
    }

    fn end(&mut self) -> Option<Ended> {
        loop {
            self.collect();
            match self.flights.front()? {
                Some(_) => break,
                None if self.workers.iter().all(JoinHandle::is_finished) => {
                    let error = io::Error::other("the workers of the log have ended");
                    self.flights[0] = Some((None, Err(error)));
                }
                None => {
                    self.done.completion_queue().event_count().sleep(LOOK, || self.done.is_any())
                }
            }
        }
        self.first += 1;
        self.flights.pop_front()?
    }
}

impl<F: StoreFile> Drop for Tasks<F> {
    fn drop(&mut self) {
        self.shared.queue.close();
        for worker in self.workers.drain(..) {
            // The panic was reported when it happened.
            let _ = worker.join();
        }
    }
}

impl<F: StoreFile> fmt::Debug for Tasks<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (workers, flights) = (self.workers.len(), self.flights.len());
        f.debug_struct("Tasks").field("workers", &workers).field("flights", &flights).finish()
    }
}

/// The log writer of a pool: group commit with the directory's log writer, or workers.
#[derive(Debug)]
pub enum CommitWriter<F: StoreFile, L> {
    /// Group commit.
    Group(L),
    /// Workers.
    Tasks(Tasks<F>),
}

impl<F: StoreFile, L> CommitWriter<F, L> {
    /// Whether short write batches, too, should be in flight together.
    pub fn takes_short(&self) -> bool {
        matches!(self, CommitWriter::Tasks(_))
    }
}

impl<F: StoreFile, L: LogWriter<F>> LogWriter<F> for CommitWriter<F, L> {
    fn depth(&self) -> usize {
        match self {
            CommitWriter::Group(log_writer) => log_writer.depth(),
            CommitWriter::Tasks(log_writer) => log_writer.depth(),
        }
    }

    fn waker(&self) -> Option<Waker> {
        match self {
            CommitWriter::Group(log_writer) => log_writer.waker(),
            CommitWriter::Tasks(log_writer) => log_writer.waker(),
        }
    }

    fn waits_for_clients(&self) -> bool {
        match self {
            CommitWriter::Group(log_writer) => log_writer.waits_for_clients(),
            CommitWriter::Tasks(log_writer) => log_writer.waits_for_clients(),
        }
    }

    fn renew(&mut self) {
        match self {
            CommitWriter::Group(log_writer) => log_writer.renew(),
            CommitWriter::Tasks(log_writer) => log_writer.renew(),
        }
    }

    fn begin(
        &mut self,
        file: &Arc<F>,
        offset: u64,
        write_batch: WriteBatch,
        durability: Durability,
    ) {
        match self {
            CommitWriter::Group(log_writer) => {
                log_writer.begin(file, offset, write_batch, durability)
            }
            CommitWriter::Tasks(log_writer) => {
                log_writer.begin(file, offset, write_batch, durability)
            }
        }
    }

    fn wait(&mut self, event_count: &EventCount, is_there: &dyn Fn() -> bool) -> bool {
        match self {
            CommitWriter::Group(log_writer) => log_writer.wait(event_count, is_there),
            CommitWriter::Tasks(log_writer) => log_writer.wait(event_count, is_there),
        }
    }

    fn end(&mut self) -> Option<Ended> {
        match self {
            CommitWriter::Group(log_writer) => log_writer.end(),
            CommitWriter::Tasks(log_writer) => log_writer.end(),
        }
    }
}

/// The blocks of a volume as a range that practically never overlaps the range of another volume.
pub fn blocks_of(volume: u32, first: u64, blocks: u64) -> Range<u64> {
    let base = u64::from(volume) << 40;
    base.wrapping_add(first)..base.wrapping_add(first).saturating_add(blocks)
}
