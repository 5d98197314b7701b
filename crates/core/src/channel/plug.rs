//! The plug: collects pushed bios until `submit` and merges neighbours into one request.
//!
//! As in Linux's plug, a bio is compared with the request that was added last, and joins its end
//! (back merge) or its start (front merge). A client can notice merging only by the speed. If a
//! device would fail a merged request because of some of its bios, the request is broken up again
//! ([`crate::request::Batch::break_up`]).

use super::merge::MergeRules;
use crate::limits::Limits;
use crate::request::Request;

/// Requests that were pushed and not yet submitted, in order.
#[derive(Debug)]
pub(super) struct Plug {
    requests: Vec<Request>,
    rules: MergeRules,
}

impl Plug {
    /// An empty plug with space for `depth` requests.
    pub(super) fn new(depth: usize, limits: &Limits) -> Plug {
        Plug { requests: Vec::with_capacity(depth), rules: MergeRules::new(limits) }
    }

    /// Whether the plug holds no request.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Adds a request; returns whether it was merged into the previous request.
    #[inline(always)]
    pub(super) fn add(&mut self, request: Request) -> bool {
        if let Some(last) = self.requests.last_mut() {
            if last.end() == request.sector() && self.rules.allow(last, &request) {
                last.merge_back(request);
                return true;
            }
            if request.end() == last.sector()
                && self.rules.front(&request)
                && self.rules.allow(&request, last)
            {
                last.merge_front(request);
                return true;
            }
        }
        self.requests.push(request);
        false
    }

    /// Removes all requests, in order.
    #[inline]
    pub(super) fn drain(&mut self) -> std::vec::Drain<'_, Request> {
        self.requests.drain(..)
    }
}
