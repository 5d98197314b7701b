//! The log writer for `commit=taskq`: each worker writes one record and syncs for it.
//!
//! OpenZFS has done this for its volumes since 2020. It suits stores whose calls block, and group
//! commit is measured against it.

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

use crate::StoreFile;
use crate::log_writer::{Durability, Ended, LogWriter, WriteBatch};

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
