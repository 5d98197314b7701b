//! A request that waits in a shared scheduler among those of other channels.
//!
//! ```text
//! channel ─ Started ▸ Queued ─ insert, merge ▸ Started ▸ device
//! channel ◂─ Ended ◂─ split ◂──────────────── Ended ◂──┘
//! ```
//!
//! The fields that the scheduler compares are copied here, so that ordering does not touch the
//! memory of the channels. Merged requests become one chain of bios, as in a plug. Each must return
//! to its channel as it was before the merge, so the last bio of each request stays known.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use crate::bio::{Op, Prio};
use crate::channel::MergeRules;
use crate::request::{Ended, Request, Slot, Started};
use crate::sched::deadline::{Item, Kind};
use crate::units::Sector;

/// A waiting request, or several that were merged.
///
/// Invariants:
/// 1. Those of [`Request`], except that the slots may belong to several channels.
/// 2. In a chain of several requests, the first slot of each request but the first names that
///    request's last bio. The first slot of the chain names the last bio of the chain, and
///    `first_tail` is the last bio of the first request.
#[derive(Clone, Copy, Debug)]
pub struct Queued {
    head: NonNull<Slot>,
    /// The last bio of the first request in the chain.
    first_tail: NonNull<Slot>,
    sector: Sector,
    sectors: u64,
    op: Op,
    prio: Prio,
}

// SAFETY: as for `Request`: each channel waits for all of its requests before it is dropped, and
// does not touch a slot until its request has completed.
unsafe impl Send for Queued {}

impl Queued {
    /// Takes over a request that a channel has started, and the duty to complete it.
    #[inline]
    pub(crate) fn take(started: Started, home: u16) -> Queued {
        let mut request = started.defuse();
        request.set_home(home);
        let first_tail = request.tail();
        Queued::again(request, first_tail)
    }

    /// Returns the request to its channel's batch.
    pub(super) fn into_started(self) -> Started {
        self.request().into_started()
    }

    /// The operation.
    #[inline]
    pub fn op(&self) -> Op {
        self.op
    }

    /// Whether the chain was merged from several requests, of one channel or of several.
    #[inline]
    pub fn is_merged(&self) -> bool {
        let tail = self.request().tail();
        tail != self.first_tail
    }

    /// The chain as one request.
    #[inline]
    pub(crate) fn request(&self) -> Request {
        // SAFETY: by invariant (1), and the owner of this value owns its slots.
        unsafe { Request::from_raw(self.head) }
    }

    #[inline]
    pub(crate) fn first_tail(&self) -> NonNull<Slot> {
        self.first_tail
    }

    /// A chain whose first request ends with the bio `first_tail`.
    #[inline]
    pub(super) fn again(request: Request, first_tail: NonNull<Slot>) -> Queued {
        Queued {
            head: request.head(),
            first_tail,
            sector: request.sector(),
            sectors: request.sectors(),
            op: request.op(),
            prio: request.prio(),
        }
    }

    /// Splits the first request off; returns it, and the rest if there is any. Neither is merged
    /// again.
    pub(super) fn break_up(self) -> (Queued, Option<Queued>) {
        let chain_tail = self.request().tail();
        if chain_tail == self.first_tail {
            return (self, None);
        }
        // SAFETY: by invariant (2), and only the caller holds the chain.
        let (mut first, rest) = unsafe { self.request().cut_behind(self.first_tail) };
        first.never_merge();
        let rest = rest.map(|mut rest| {
            let first_tail = rest.tail();
            // SAFETY: the rest ends where the whole chain ended.
            rest = unsafe { rest.cut_behind(chain_tail) }.0;
            rest.never_merge();
            Queued::again(rest, first_tail)
        });
        (Queued::again(first, self.first_tail), rest)
    }
}

/// Splits a chain into the requests that it was merged from, first to last. `chain` and
/// `first_tail` must belong to one [`Queued`].
#[inline]
pub(crate) fn part(chain: Request, first_tail: NonNull<Slot>, mut each: impl FnMut(Request)) {
    if chain.tail() == first_tail {
        return each(chain);
    }
    part_merged(chain, first_tail, &mut each);
}

#[cold]
fn part_merged(chain: Request, first_tail: NonNull<Slot>, each: &mut impl FnMut(Request)) {
    let mut next = Some((chain, first_tail));
    while let Some((chain, tail)) = next {
        // SAFETY: `tail` is a bio of the chain, by invariant (2) of `Queued`, and only this
        // function holds the chain.
        let (first, rest) = unsafe { chain.cut_behind(tail) };
        each(first);
        next = rest.map(|rest| {
            let tail = rest.tail();
            (rest, tail)
        });
    }
}

/// Splits a completed chain into its requests, with the chain's status, and hands each to `each`
/// with its completion target.
#[inline]
pub(crate) fn part_ended(
    ended: Ended,
    first_tail: NonNull<Slot>,
    mut each: impl FnMut(u16, Ended),
) {
    let status = ended.status();
    part(ended.into_request(), first_tail, |request| {
        let home = request.home();
        each(home, request.end_with(status));
    });
}

impl Item for Queued {
    #[inline]
    fn kind(&self) -> Kind {
        Kind::of(self.op, self.prio)
    }

    #[inline]
    fn sector(&self) -> Sector {
        self.sector
    }

    #[inline]
    fn sectors(&self) -> u64 {
        self.sectors
    }

    #[inline]
    fn keeps_zone_order(&self) -> bool {
        matches!(self.op, Op::Write | Op::WriteZeroes)
    }

    #[inline]
    fn joins(&self, next: &Queued, rules: MergeRules) -> bool {
        rules.allow(&self.request(), &next.request())
    }

    #[inline]
    fn merge_back(&mut self, next: Queued) {
        let mut request = self.request();
        request.merge_back(next.request());
        // By invariant (2): it is no longer the first request of its chain.
        next.request().set_tail(next.first_tail);
        self.sectors += next.sectors;
    }
}
