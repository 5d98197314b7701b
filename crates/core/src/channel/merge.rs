//! What may become one request with what: the rules that the plug, the zone gate and the scheduler
//! merge by.

use std::ops::Range;

use crate::bio::{Flags, Op};
use crate::limits::Limits;
use crate::request::Request;
use crate::units::Sector;

/// Bios with one of these stay alone, as with Linux's `REQ_NOMERGE_FLAGS`.
const NEVER_MERGED: Flags = Flags::NOMERGE;

/// What bounds a merged request.
#[derive(Clone, Copy, Debug)]
pub struct MergeRules {
    sectors_max: u64,
    discard_sectors_max: u64,
    segments_max: u16,
    /// Bits of a sector that name its chunk: all ones from the chunk size on; 0 without chunks.
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

    /// Whether the request may go before one that was pushed earlier. A write in a zone may not:
    /// pushed out of order, it would miss the write pointer, and merging must not hide that. Linux
    /// refuses the same merge (block/blk-merge.c, `bio_attempt_front_merge`).
    #[inline]
    pub(super) fn front(self, request: &Request) -> bool {
        request.op() != Op::Write || self.chunk_mask == 0
    }

    /// Whether `first` and `second`, which follow each other on the device, may become one.
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

    /// Whether the device takes so much in one request that was merged.
    #[inline]
    pub fn fits(self, op: Op, range: Range<Sector>, segments: u16) -> bool {
        let sectors_max = match op {
            Op::Read | Op::Write => self.sectors_max,
            Op::Discard => self.discard_sectors_max,
            // An append is never merged: each one is told where it landed.
            _ => return false,
        };
        range.end - range.start <= sectors_max
            && segments <= self.segments_max
            && (range.start.0 ^ (range.end.0 - 1)) & self.chunk_mask == 0
    }
}
