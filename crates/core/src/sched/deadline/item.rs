//! The interface of a schedulable request: a position on the device, a kind, and merging.

use std::mem;

use super::kind::Kind;
use crate::bio::Op;
use crate::request::MergeRules;
use crate::request::Request;
use crate::units::Sector;

/// A request as the order sees it.
pub trait Item: Sized {
    /// The class and the direction. A merge does not change them.
    fn kind(&self) -> Kind;

    /// The first sector.
    fn sector(&self) -> Sector;

    /// The length in sectors; 0 for a request without a range.
    fn sectors(&self) -> u64;

    /// Whether the request must follow earlier requests to the same sequential zone.
    fn keeps_zone_order(&self) -> bool {
        false
    }

    /// Whether `next`, which starts where this request ends, may be merged into it.
    fn joins(&self, next: &Self, rules: MergeRules) -> bool;

    /// Merges `next`, which starts where this request ends, to the end.
    fn merge_back(&mut self, next: Self);

    /// Merges `previous`, which ends where this request starts, to the front.
    fn merge_front(&mut self, previous: Self) {
        let next = mem::replace(self, previous);
        self.merge_back(next);
    }
}

impl Item for Request {
    #[inline]
    fn kind(&self) -> Kind {
        Kind::of(self.op(), self.prio())
    }

    #[inline]
    fn sector(&self) -> Sector {
        Request::sector(self)
    }

    #[inline]
    fn sectors(&self) -> u64 {
        Request::sectors(self)
    }

    /// Only writes keep the order of their zone: the device places an append, and the zone write
    /// plug separates zone management from writes.
    #[inline]
    fn keeps_zone_order(&self) -> bool {
        matches!(self.op(), Op::Write | Op::WriteZeroes)
    }

    #[inline]
    fn joins(&self, next: &Request, rules: MergeRules) -> bool {
        rules.allow(self, next)
    }

    #[inline]
    fn merge_back(&mut self, next: Request) {
        Request::merge_back(self, next);
    }
}
