//! The plug: pushed bios gather here until `submit`, and neighbours become one request.
//!
//! As in Linux's plug, a bio is compared with the request added last, and joins it behind (back
//! merge) or before it (front merge). Merging is invisible but for its speed: a device that would
//! fail a merged request because of some of its bios has it broken up again
//! ([`crate::request::Batch::break_up`]).

use super::merge::MergeRules;
use crate::limits::Limits;
use crate::request::Request;

/// Pushed and not yet submitted requests, in order.
#[derive(Debug)]
pub(super) struct Plug {
    requests: Vec<Request>,
    rules: MergeRules,
}

impl Plug {
    /// An empty plug with room for `depth` requests.
    pub(super) fn new(depth: usize, limits: &Limits) -> Plug {
        Plug { requests: Vec::with_capacity(depth), rules: MergeRules::new(limits) }
    }

    /// Whether nothing waits for `submit`.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Adds a request; says whether it was merged into the one before.
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

    /// Takes everything out, in order.
    #[inline]
    pub(super) fn drain(&mut self) -> std::vec::Drain<'_, Request> {
        self.requests.drain(..)
    }
}
