//! A batch: requests on their way to a device, and what it leaves of them.

use super::{Request, Started, TAG_NONE};
use crate::ring::Ring;
use crate::units::Tag;

/// Requests on their way to a device, in order. Bounded by the channel's depth.
#[derive(Debug)]
pub struct Batch {
    requests: Ring<Started>,
    /// The first request is to be offered again bio by bio.
    broken: bool,
}

impl Batch {
    /// An empty batch with room for `depth` requests.
    pub fn with_capacity(depth: usize) -> Batch {
        Batch { requests: Ring::with_capacity(depth), broken: false }
    }

    /// How many requests are left in it.
    #[inline]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether none is left.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// A request that is left, without taking it: 0 is the next one.
    #[inline]
    pub fn get(&self, index: usize) -> Option<&Started> {
        self.requests.get(index)
    }

    /// Takes the next request; whoever takes it owes its completion.
    #[inline]
    #[expect(clippy::should_implement_trait, reason = "a batch is also put back into")]
    pub fn next(&mut self) -> Option<Started> {
        self.requests.pop_front()
    }

    /// Adds a request behind the others: for middleware that passes requests on.
    #[inline]
    pub fn push(&mut self, started: Started) {
        self.requests.push_back(started);
    }

    /// Puts a request back before the others. What a device leaves in the batch was not started;
    /// the channel offers it again later, in the same order.
    #[inline]
    pub fn put_back(&mut self, started: Started) {
        self.requests.push_front(started);
    }

    /// Puts a merged request back before the others, to be offered again bio by bio: for a device
    /// that would have to fail it because of some of its bios only. The caller then leaves the
    /// batch alone, so that order is kept, and merging stays invisible.
    ///
    /// A request of one bio cannot be broken up; check [`Started::is_merged`] first.
    pub fn break_up(&mut self, started: Started) {
        debug_assert!(started.is_merged(), "only a merged request can be broken up");
        self.requests.push_front(started);
        self.broken = true;
    }

    /// Puts the first requests in another order: the one that is at `turns[0]` comes to the front,
    /// and so on. Each of them has one turn.
    #[inline]
    pub(crate) fn arrange(&mut self, turns: &[u8]) {
        for index in 0..turns.len() {
            // What stood before here has been moved to where the one that is there now came from.
            let mut from = usize::from(turns[index]);
            while from < index {
                from = usize::from(turns[from]);
            }
            self.requests.swap(index, from);
        }
    }

    /// Moves the first requests, so many, behind those of another batch.
    #[inline]
    pub(crate) fn pass_on(&mut self, count: usize, to: &mut Batch) {
        for _ in 0..count {
            if let Some(started) = self.next() {
                to.push(started);
            }
        }
    }

    /// Takes back what another batch has left, before its own: for middleware that passed requests
    /// on in a batch of its own.
    pub fn take_back(&mut self, left: &mut Batch) {
        if left.is_empty() {
            return;
        }
        self.broken = std::mem::take(&mut left.broken);
        while let Some(started) = left.requests.pop_back() {
            self.requests.push_front(started);
        }
    }

    /// Whether the first request is to be offered again bio by bio; asking forgets it.
    pub(crate) fn take_broken(&mut self) -> bool {
        std::mem::take(&mut self.broken)
    }

    #[inline]
    pub(crate) fn start(&mut self, mut request: Request, tag: Tag) {
        request.slot_mut().tag = tag.0;
        self.requests.push_back(Started(request));
    }

    /// Takes the last request back out of the batch, with the tag that it held.
    pub(crate) fn unstart_last(&mut self) -> Option<(Request, Tag)> {
        let mut request = self.requests.pop_back()?.defuse();
        let tag = std::mem::replace(&mut request.slot_mut().tag, TAG_NONE);
        Some((request, Tag(tag)))
    }
}
