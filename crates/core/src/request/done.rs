//! The completion batch: devices put completed requests in, and the channel takes them out.

use super::{Ended, Request, Started};
use crate::bio::Op;
use crate::ring::Ring;
use crate::status::Status;
use crate::units::{Sector, Tag};

/// Completed requests on their way to the channel. Bounded by the channel's depth.
#[derive(Debug)]
pub struct Done {
    requests: Ring<Ended>,
}

impl Done {
    /// An empty batch with capacity for `depth` completions.
    pub fn with_capacity(depth: usize) -> Done {
        Done { requests: Ring::with_capacity(depth) }
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
        self.requests.push_back(Ended(request));
    }

    /// Adds a completed request that was taken out of another batch.
    pub(crate) fn put(&mut self, ended: Ended) {
        self.requests.push_back(ended);
    }

    /// Takes the oldest completion.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<Ended> {
        self.requests.pop_front()
    }

    /// Moves the oldest completion of `from` into this batch, for middleware that delays
    /// completions. Returns `false` if `from` is empty.
    #[inline]
    pub fn take_from(&mut self, from: &mut Done) -> bool {
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
