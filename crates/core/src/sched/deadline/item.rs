//! What is put in order: anything with a place on the device that knows what it can merge with.

use std::mem;

use super::kind::Kind;
use crate::bio::Op;
use crate::channel::MergeRules;
use crate::request::Request;
use crate::units::Sector;

/// A request as the order sees it.
pub trait Item: Sized {
    /// Its class and its direction. A merge leaves them as they are.
    fn kind(&self) -> Kind;

    /// Its first sector.
    fn sector(&self) -> Sector;

    /// Its length in sectors; 0 for what has no range.
    fn sectors(&self) -> u64;

    /// Whether it has to stay behind what was inserted before it into the same sequential zone.
    fn keeps_zone_order(&self) -> bool {
        false
    }

    /// Whether `next`, which starts where this one ends, may become part of it.
    fn joins(&self, next: &Self, rules: MergeRules) -> bool;

    /// Takes `next`, which starts where this one ends, behind itself.
    fn merge_back(&mut self, next: Self);

    /// Takes `previous`, which ends where this one starts, before itself.
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

    /// An append goes where the device puts it, and the gate keeps changes of a zone apart.
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
