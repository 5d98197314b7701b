//! The queue that one channel has of a file: by io_uring, or by blocking calls.

use std::os::fd::RawFd;

use blockyard_core::clock::Clock;
use blockyard_core::{Batch, CompletionBatch, DeviceQueue, Due, Nanos};

use crate::blocking::BlockingQueue;
use crate::ring::RingQueue;

/// The queue that one channel has of a file.
#[derive(Debug)]
pub enum FileQueue {
    /// By io_uring: many requests in flight.
    Ring(Box<RingQueue>),
    /// By blocking calls: each request completes when it is started.
    Blocking(Box<BlockingQueue>),
}

impl DeviceQueue for FileQueue {
    #[inline]
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        match self {
            FileQueue::Ring(queue) => queue.start(now, batch, done),
            FileQueue::Blocking(queue) => queue.start(batch, done),
        }
    }

    #[inline]
    fn poll(&mut self, now: Nanos, done: &mut CompletionBatch) {
        if let FileQueue::Ring(queue) = self {
            queue.poll(now, done);
        }
    }

    #[inline]
    fn room(&self) -> usize {
        match self {
            FileQueue::Ring(queue) => queue.room(),
            FileQueue::Blocking(_) => crate::ring::DEPTH.into(),
        }
    }

    #[inline]
    fn due(&self) -> Due {
        match self {
            FileQueue::Ring(queue) => queue.due(),
            FileQueue::Blocking(_) => Due::Never,
        }
    }

    #[inline]
    fn is_immediate(&mut self) -> bool {
        matches!(self, FileQueue::Blocking(_))
    }

    #[inline]
    fn waits_for_others(&self) -> bool {
        matches!(self, FileQueue::Ring(queue) if queue.in_flight() > 0)
    }

    fn sleep<C: Clock>(&mut self, until: Due, clock: &C) {
        if let FileQueue::Ring(queue) = self {
            queue.sleep(match until {
                Due::At(at) => Some(at.since(clock.now())),
                Due::Never => None,
            });
        }
    }

    fn descriptor(&mut self) -> Option<RawFd> {
        match self {
            FileQueue::Ring(queue) => Some(queue.descriptor()),
            FileQueue::Blocking(_) => None,
        }
    }

    fn may_sleep(&mut self) -> bool {
        match self {
            FileQueue::Ring(queue) => !queue.is_any(),
            FileQueue::Blocking(_) => true,
        }
    }
}
