//! The two batches between a channel and a device: requests for the device, with those that it did
//! not start, and completed requests for the channel.

use super::{CompletedRequest, Request, Started, TAG_NONE};
use crate::bio::Op;
use crate::ring::Ring;
use crate::status::Status;
use crate::units::{Sector, Tag};

/// Requests for a device, in order. Bounded by the channel's depth.
#[derive(Debug)]
pub struct Batch {
    requests: Ring<Started>,
    /// The channel has to offer the first request again bio by bio.
    broken: bool,
}

impl Batch {
    /// An empty batch with capacity for `depth` requests.
    pub fn with_capacity(depth: usize) -> Batch {
        Batch { requests: Ring::with_capacity(depth), broken: false }
    }

    /// Number of requests in the batch.
    #[inline]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether the batch is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// A request of the batch, without taking it; index 0 is the next one.
    #[inline]
    pub fn get(&self, index: usize) -> Option<&Started> {
        self.requests.get(index)
    }

    /// Takes the next request. The caller must complete it.
    #[inline]
    #[expect(clippy::should_implement_trait, reason = "a batch is also put back into")]
    pub fn next(&mut self) -> Option<Started> {
        self.requests.pop_front()
    }

    /// Adds a request at the end, for middleware that passes requests on.
    #[inline]
    pub fn push(&mut self, started: Started) {
        self.requests.push_back(started);
    }

    /// Puts a request back at the front. Requests that a device leaves in the batch count as not
    /// started; the channel offers them again later, in the same order.
    #[inline]
    pub fn requeue(&mut self, started: Started) {
        self.requests.push_front(started);
    }

    /// Puts a merged request back at the front, to be offered again bio by bio. For a device that
    /// would have to fail the request because of only some of its bios. The caller then leaves the
    /// batch alone, so that the order is kept and clients do not notice merging.
    ///
    /// A request of one bio cannot be broken up; check [`Started::is_merged`] first.
    pub fn break_up(&mut self, started: Started) {
        debug_assert!(started.is_merged(), "only a merged request can be broken up");
        self.requests.push_front(started);
        self.broken = true;
    }

    /// Reorders the first requests: the request at index `turns[0]` becomes the first, and so on.
    /// Each index below `turns.len()` occurs once.
    #[inline]
    pub(crate) fn arrange(&mut self, turns: &[u8]) {
        for index in 0..turns.len() {
            // An earlier swap moved the request from here to the place that its replacement came
            // from.
            let mut from = usize::from(turns[index]);
            while from < index {
                from = usize::from(turns[from]);
            }
            self.requests.swap(index, from);
        }
    }

    /// Moves the first `count` requests to the end of another batch.
    #[inline]
    pub(crate) fn move_first(&mut self, count: usize, to: &mut Batch) {
        for _ in 0..count {
            if let Some(started) = self.next() {
                to.push(started);
            }
        }
    }

    /// Takes the requests that another batch still holds and puts them at the front. For middleware
    /// that passed requests on in its own batch.
    pub fn requeue_all(&mut self, left: &mut Batch) {
        if left.is_empty() {
            return;
        }
        self.broken = std::mem::take(&mut left.broken);
        while let Some(started) = left.requests.pop_back() {
            self.requests.push_front(started);
        }
    }

    /// Whether the first request has to be offered again bio by bio; resets the flag.
    pub(crate) fn take_broken(&mut self) -> bool {
        std::mem::take(&mut self.broken)
    }

    #[inline]
    pub(crate) fn start(&mut self, mut request: Request, tag: Tag) {
        request.slot_mut().tag = tag.0;
        self.requests.push_back(Started(request));
    }

    /// Removes the last request from the batch, with the tag that it held.
    pub(crate) fn take_unstarted(&mut self) -> Option<(Request, Tag)> {
        let mut request = self.requests.pop_back()?.defuse();
        let tag = std::mem::replace(&mut request.slot_mut().tag, TAG_NONE);
        Some((request, Tag(tag)))
    }
}

/// Completed requests that the channel has not received yet. Bounded by the channel's depth.
#[derive(Debug)]
pub struct CompletionBatch {
    requests: Ring<CompletedRequest>,
}

impl CompletionBatch {
    /// An empty batch with capacity for `depth` completions.
    pub fn with_capacity(depth: usize) -> CompletionBatch {
        CompletionBatch { requests: Ring::with_capacity(depth) }
    }

    /// Number of completions in the batch.
    #[inline]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether the batch is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Completes a request.
    #[inline]
    pub fn complete(&mut self, started: Started, status: Status) {
        self.enter(started.defuse(), status);
    }

    /// Completes a zone append whose data landed at `sector`.
    #[inline]
    pub fn complete_append(&mut self, started: Started, sector: Sector) {
        debug_assert_eq!(started.op(), Op::ZoneAppend);
        let mut request = started.defuse();
        request.slot_mut().sector = sector;
        self.enter(request, Status::Ok);
    }

    /// Completes a request, which need not have reached the device.
    #[inline]
    pub(crate) fn enter(&mut self, mut request: Request, status: Status) {
        request.slot_mut().status = status;
        self.requests.push_back(CompletedRequest(request));
    }

    /// Adds a completed request that was taken out of another batch.
    #[inline]
    pub(crate) fn put(&mut self, ended: CompletedRequest) {
        self.requests.push_back(ended);
    }

    /// Takes the oldest completion.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<CompletedRequest> {
        self.requests.pop_front()
    }

    /// Moves the oldest completion of `from` into this batch, for middleware that delays
    /// completions. Returns `false` if `from` is empty.
    #[inline]
    pub fn take_from(&mut self, from: &mut CompletionBatch) -> bool {
        match from.requests.pop_front() {
            Some(ended) => {
                self.requests.push_back(ended);
                true
            }
            None => false,
        }
    }

    /// Operation, tag and status of the completion at `index`, oldest first, for middleware that
    /// observes completions.
    pub fn get(&self, index: usize) -> Option<(Op, Tag, Status)> {
        let slot = self.requests.get(index)?.0.slot();
        Some((slot.op, Tag(slot.tag), slot.status))
    }
}
