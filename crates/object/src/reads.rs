//! Reads of a pool in an object store. A thread of the runtime executes each, so that a queue has
//! many requests to the object store in flight.
//!
//! All pools share the threads. A pool has [`READS_MAX`] of them at most: if its object store does
//! not answer, its reads wait for each other, and those of another pool go on.
#![allow(clippy::disallowed_types)] // A request to an object store takes far longer than a lock.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockyard_store::buffer::Buffer;
use blockyard_store::reads::FinishedRead;
use blockyard_store::{BlockingReads, EventFd, Reads, StoreFile};
use blockyard_sync::event_count::Waker;
use tokio::runtime::Handle;

/// Most threads that read for one pool. More reads wait.
pub(crate) const READS_MAX: usize = 256;

type ReadCall = Box<dyn FnOnce() + Send>;

/// The threads that read for one pool.
#[derive(Default)]
pub(crate) struct ReadThreads(Mutex<ReadQueue>);

/// Reads wait only while all threads read.
#[derive(Default)]
struct ReadQueue {
    waiting: VecDeque<ReadCall>,
    /// The number of threads that read.
    threads: usize,
}

impl ReadThreads {
    fn queue(&self) -> MutexGuard<'_, ReadQueue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(self: &Arc<Self>, handle: &Handle, read: ReadCall) {
        let mut queue = self.queue();
        if queue.threads == READS_MAX {
            queue.waiting.push_back(read);
            return;
        }
        queue.threads += 1;
        drop(queue);
        let threads = Arc::clone(self);
        handle.spawn_blocking(move || {
            let mut next = Some(read);
            while let Some(read) = next {
                read();
                next = threads.next();
            }
        });
    }

    /// The read that has waited longest. Without one, the caller ends.
    fn next(&self) -> Option<ReadCall> {
        let mut queue = self.queue();
        let next = queue.waiting.pop_front();
        queue.threads -= usize::from(next.is_none());
        next
    }
}

impl fmt::Debug for ReadThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let queue = self.queue();
        let (waiting, threads) = (queue.waiting.len(), queue.threads);
        f.debug_struct("ReadThreads").field("waiting", &waiting).field("threads", &threads).finish()
    }
}

/// The reader of one queue.
#[derive(Debug)]
pub enum BucketReads {
    /// Reads end when they begin.
    Blocking(BlockingReads),
    /// Reads are executed by threads of the runtime.
    Parallel(ParallelReads),
}

/// Reads that threads of the runtime execute.
pub struct ParallelReads {
    handle: Handle,
    threads: Arc<ReadThreads>,
    finished: Arc<Finished>,
    in_flight: usize,
    waker: Waker,
}

#[derive(Default)]
struct Finished {
    reads: Mutex<VecDeque<FinishedRead>>,
    changed: Condvar,
}

impl Finished {
    fn reads(&self) -> MutexGuard<'_, VecDeque<FinishedRead>> {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ParallelReads {
    fn begin<F: StoreFile>(&mut self, token: u32, file: &Arc<F>, offset: u64, mut buffer: Buffer) {
        self.in_flight += 1;
        let (file, finished, waker) =
            (Arc::clone(file), Arc::clone(&self.finished), self.waker.clone());
        let read = move || {
            let result = file.read_at(offset, &mut buffer);
            finished.reads().push_back(FinishedRead { token, buffer: Some(buffer), result });
            finished.changed.notify_one();
            waker.wake();
        };
        self.threads.begin(&self.handle, Box::new(read));
    }
}

impl fmt::Debug for ParallelReads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParallelReads").field("in_flight", &self.in_flight).finish()
    }
}

impl BucketReads {
    /// The reader of a queue that sleeps on an eventfd; without one, reads block.
    pub(crate) fn new(
        handle: &Handle,
        threads: &Arc<ReadThreads>,
        event_fd: Option<&EventFd>,
    ) -> BucketReads {
        match event_fd {
            None => BucketReads::Blocking(BlockingReads::default()),
            Some(event_fd) => BucketReads::Parallel(ParallelReads {
                handle: handle.clone(),
                threads: Arc::clone(threads),
                finished: Arc::default(),
                in_flight: 0,
                waker: event_fd.waker(),
            }),
        }
    }
}

impl<F: StoreFile> Reads<F> for BucketReads {
    fn begin(&mut self, token: u32, file: &Arc<F>, offset: u64, buffer: Buffer) {
        match self {
            BucketReads::Blocking(reads) => reads.begin(token, file, offset, buffer),
            BucketReads::Parallel(reads) => reads.begin(token, file, offset, buffer),
        }
    }

    fn take(&mut self) -> Option<FinishedRead> {
        match self {
            BucketReads::Blocking(reads) => Reads::<F>::take(reads),
            BucketReads::Parallel(reads) => {
                let finished = reads.finished.reads().pop_front();
                reads.in_flight -= usize::from(finished.is_some());
                finished
            }
        }
    }

    fn is_any(&mut self) -> bool {
        match self {
            BucketReads::Blocking(reads) => Reads::<F>::is_any(reads),
            BucketReads::Parallel(reads) => !reads.finished.reads().is_empty(),
        }
    }

    fn in_flight(&self) -> usize {
        match self {
            BucketReads::Blocking(reads) => Reads::<F>::in_flight(reads),
            BucketReads::Parallel(reads) => reads.in_flight,
        }
    }

    fn sleep(&mut self, at_most: Duration) {
        if let BucketReads::Parallel(reads) = self {
            let finished = reads.finished.reads();
            let waited =
                reads.finished.changed.wait_timeout_while(finished, at_most, |it| it.is_empty());
            drop(waited);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use tokio::runtime::Builder;

    /// The object store of one pool answers no read. There are threads for two pools.
    #[test]
    fn reads_of_one_pool_leave_threads_to_another() {
        let mut builder = Builder::new_current_thread();
        let runtime = builder.max_blocking_threads(2 * READS_MAX).build().unwrap();
        let [one, other] = [(); 2].map(|()| Arc::<ReadThreads>::default());
        let (answers, answered) = channel::<()>();
        let answered = Arc::new(Mutex::new(answered));
        let (done, ends) = channel();
        for _ in 0..3 * READS_MAX {
            let (answered, done) = (Arc::clone(&answered), done.clone());
            let read = move || {
                _ = answered.lock().unwrap().recv();
                done.send("one").unwrap();
            };
            one.begin(runtime.handle(), Box::new(read));
        }
        {
            let queue = one.queue();
            assert_eq!((queue.threads, queue.waiting.len()), (READS_MAX, 2 * READS_MAX));
        }
        for _ in 0..3 * READS_MAX {
            let done = done.clone();
            other.begin(runtime.handle(), Box::new(move || done.send("other").unwrap()));
        }
        assert!((0..3 * READS_MAX).all(|_| ends.recv().unwrap() == "other"));
        drop(answers);
        assert!((0..3 * READS_MAX).all(|_| ends.recv().unwrap() == "one"));
        drop(runtime);
        for threads in [one, other] {
            let queue = threads.queue();
            assert_eq!((queue.threads, queue.waiting.len()), (0, 0));
        }
    }
}
