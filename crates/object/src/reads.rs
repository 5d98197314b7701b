//! Reads of a pool in an object store. A thread of the runtime executes each, so that a queue has
//! many requests to the object store in flight.
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
        self.handle.spawn_blocking(move || {
            let result = file.read_at(offset, &mut buffer);
            finished.reads().push_back(FinishedRead { token, buffer: Some(buffer), result });
            finished.changed.notify_one();
            waker.wake();
        });
    }
}

impl fmt::Debug for ParallelReads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParallelReads").field("in_flight", &self.in_flight).finish()
    }
}

impl BucketReads {
    /// The reader of a queue that sleeps on an eventfd; without one, reads block.
    pub(crate) fn new(handle: &Handle, event_fd: Option<&EventFd>) -> BucketReads {
        match event_fd {
            None => BucketReads::Blocking(BlockingReads::default()),
            Some(event_fd) => BucketReads::Parallel(ParallelReads {
                handle: handle.clone(),
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
