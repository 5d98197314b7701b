//! The scheduler `none`: first in, first out.

use super::Scheduler;
use crate::request::Request;
use crate::ring::Ring;
use crate::units::Nanos;

/// A FIFO of requests.
#[derive(Debug)]
pub struct NoneScheduler {
    requests: Ring<Request>,
}

impl NoneScheduler {
    /// An empty queue with capacity for `depth` requests.
    pub fn new(depth: usize) -> NoneScheduler {
        NoneScheduler { requests: Ring::with_capacity(depth) }
    }
}

impl Scheduler for NoneScheduler {
    const NAME: &'static str = "none";
    const PASSES_ON: bool = true;

    #[inline]
    fn insert(&mut self, request: Request, _now: Nanos) {
        self.requests.push_back(request);
    }

    fn requeue(&mut self, request: Request) {
        self.requests.push_front(request);
    }

    #[inline]
    fn dispatch(&mut self, _now: Nanos) -> Option<Request> {
        self.requests.pop_front()
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }
}
