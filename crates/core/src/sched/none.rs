//! The scheduler `none`: first in, first out.

use std::collections::VecDeque;

use super::Scheduler;
use crate::request::Request;
use crate::units::Nanos;

/// Requests in the order of their submission.
#[derive(Debug)]
pub struct NoneScheduler {
    requests: VecDeque<Request>,
}

impl NoneScheduler {
    /// An empty queue with room for `depth` requests.
    pub fn new(depth: usize) -> NoneScheduler {
        NoneScheduler { requests: VecDeque::with_capacity(depth) }
    }
}

impl Scheduler for NoneScheduler {
    const NAME: &'static str = "none";

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
