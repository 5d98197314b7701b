//! Merge rules: which requests the plug, the zone write plug and the scheduler may merge.

use std::ops::Range;

use crate::bio::{Flags, Op};
use crate::limits::Limits;
use crate::request::Request;
use crate::units::Sector;

/// A bio with one of these flags is never merged, as with Linux's `REQ_NOMERGE_FLAGS`.
const NEVER_MERGED: Flags = Flags::NOMERGE;

/// Bounds of a merged request.
#[derive(Clone, Copy, Debug)]
pub struct MergeRules {
    sectors_max: u64,
    discard_sectors_max: u64,
    segments_max: u16,
    /// The bits of a sector that identify its chunk: all bits from the chunk size up; 0 without
    /// chunks.
    chunk_mask: u64,
}

impl MergeRules {
    /// The rules for a device with these limits.
    pub fn new(limits: &Limits) -> MergeRules {
        MergeRules {
            sectors_max: limits.sectors_max,
            discard_sectors_max: limits.discard_sectors_max,
            segments_max: limits.segments_max,
            chunk_mask: limits.chunk_mask(),
        }
    }

    /// Whether the request may be merged in front of one that was pushed earlier. A write in a zone
    /// may not: pushed out of order, it would fail at the write pointer, and merging must not hide
    /// that. Linux refuses the same merge (block/blk-merge.c, `bio_attempt_front_merge`).
    #[inline]
    pub(super) fn front(self, request: &Request) -> bool {
        request.op() != Op::Write || self.chunk_mask == 0
    }

    /// Whether `first` and `second` may be merged. The caller checks that they are adjacent.
    #[inline]
    pub(crate) fn allow(self, first: &Request, second: &Request) -> bool {
        first.op() == second.op()
            && first.prio() == second.prio()
            && !(first.flags() | second.flags()).intersects(NEVER_MERGED | Flags::FUA)
            && self.fits(
                first.op(),
                first.sector()..second.end(),
                first.segments() + second.segments(),
            )
    }

    /// Whether the device accepts this range and segment count in one merged request.
    #[inline]
    pub fn fits(self, op: Op, range: Range<Sector>, segments: u16) -> bool {
        let sectors_max = match op {
            Op::Read | Op::Write => self.sectors_max,
            Op::Discard => self.discard_sectors_max,
            // Appends are never merged, because each append returns its own sector.
            _ => return false,
        };
        range.end - range.start <= sectors_max
            && segments <= self.segments_max
            && (range.start.0 ^ (range.end.0 - 1)) & self.chunk_mask == 0
    }
}
