//! The plug: pushed bios gather here until `submit`, and neighbours become one request.
//!
//! As in Linux's plug, a bio is compared with the request added last, and joins it behind (back
//! merge) or before it (front merge). Merging is invisible but for its speed: a device that would
//! fail a merged request because of some of its bios has it broken up again
//! ([`crate::request::Batch::break_up`]).

use crate::bio::{Flags, Op};
use crate::limits::Limits;
use crate::request::Request;

/// Bios with one of these stay alone, as with Linux's `REQ_NOMERGE_FLAGS`.
const NEVER_MERGED: Flags = Flags::NOMERGE;

/// Pushed and not yet submitted requests, in order.
#[derive(Debug)]
pub(super) struct Plug {
    requests: Vec<Request>,
    rules: MergeRules,
}

/// What bounds a merged request.
#[derive(Clone, Copy, Debug)]
struct MergeRules {
    sectors_max: u64,
    discard_sectors_max: u64,
    segments_max: u16,
    /// Bits of a sector that name its chunk: all ones from the chunk size on; 0 without chunks.
    chunk_mask: u64,
}

impl Plug {
    /// An empty plug with room for `depth` requests.
    pub(super) fn new(depth: usize, limits: &Limits) -> Plug {
        let rules = MergeRules {
            sectors_max: limits.sectors_max,
            discard_sectors_max: limits.discard_sectors_max,
            segments_max: limits.segments_max,
            chunk_mask: limits.chunk_mask(),
        };
        Plug { requests: Vec::with_capacity(depth), rules }
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

impl MergeRules {
    /// Whether the request may go before one that was pushed earlier. A write in a zone may not:
    /// pushed out of order, it would miss the write pointer, and merging must not hide that. Linux
    /// refuses the same merge (block/blk-merge.c, `bio_attempt_front_merge`).
    #[inline]
    fn front(self, request: &Request) -> bool {
        request.op() != Op::Write || self.chunk_mask == 0
    }

    /// Whether `first` and `second`, which follow each other on the device, may become one.
    #[inline]
    fn allow(self, first: &Request, second: &Request) -> bool {
        let sectors_max = match first.op() {
            Op::Read | Op::Write => self.sectors_max,
            Op::Discard => self.discard_sectors_max,
            // An append is never merged: each one is told where it landed.
            _ => return false,
        };
        first.op() == second.op()
            && first.prio() == second.prio()
            && !(first.flags() | second.flags()).intersects(NEVER_MERGED | Flags::FUA)
            && first.sectors() + second.sectors() <= sectors_max
            && first.segments() + second.segments() <= self.segments_max
            && (first.sector().0 ^ (second.end().0 - 1)) & self.chunk_mask == 0
    }
}
