//! Requests in the scheduler: waiting in the order among those of other channels, and in flight on
//! one device queue.
//!
//! ```text
//! channel ─ Started ▸ QueuedRequest ─ insert, merge ▸ Started ▸ device
//! channel ◂─ CompletedRequest ◂─ split ◂──────────────── CompletedRequest ◂──┘
//! ```
//!
//! The fields that the scheduler compares are copied here, so that ordering does not touch the
//! memory of the channels. Merged requests become one chain of bios, as in a plug. Each must return
//! to its channel as it was before the merge, so the last bio of each request stays known.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use super::Report;
use crate::bio::{Op, Prio};
use crate::request::{Batch, CompletedRequest, MergeRules, Request, Slot, Started};
use crate::sched::deadline::{Item, Kind};
use crate::units::{Sector, Tag};

/// A waiting request, or several that were merged.
///
/// Invariants:
/// 1. Those of [`Request`], except that the slots may belong to several channels.
/// 2. In a chain of several requests, the first slot of each request but the first names that
///    request's last bio. The first slot of the chain names the last bio of the chain, and
///    `first_tail` is the last bio of the first request.
#[derive(Clone, Copy, Debug)]
pub struct QueuedRequest {
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
unsafe impl Send for QueuedRequest {}

impl QueuedRequest {
    /// Takes over a request that a channel has started, and the duty to complete it.
    #[inline]
    pub(crate) fn take(started: Started, target: u16) -> QueuedRequest {
        let mut request = started.defuse();
        request.set_completion_target(target);
        let first_tail = request.tail();
        QueuedRequest::of_chain(request, first_tail)
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
    pub(super) fn of_chain(request: Request, first_tail: NonNull<Slot>) -> QueuedRequest {
        QueuedRequest {
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
    pub(super) fn break_up(self) -> (QueuedRequest, Option<QueuedRequest>) {
        let chain_tail = self.request().tail();
        if chain_tail == self.first_tail {
            return (self, None);
        }
        // SAFETY: by invariant (2), and only the caller holds the chain.
        let (mut first, rest) = unsafe { self.request().split_after(self.first_tail) };
        first.never_merge();
        let rest = rest.map(|mut rest| {
            let first_tail = rest.tail();
            // SAFETY: the rest ends where the whole chain ended.
            rest = unsafe { rest.split_after(chain_tail) }.0;
            rest.never_merge();
            QueuedRequest::of_chain(rest, first_tail)
        });
        (QueuedRequest::of_chain(first, self.first_tail), rest)
    }
}

/// Splits a chain into the requests that it was merged from, first to last. `chain` and
/// `first_tail` must belong to one [`QueuedRequest`].
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
        // SAFETY: `tail` is a bio of the chain, by invariant (2) of `QueuedRequest`, and only this
        // function holds the chain.
        let (first, rest) = unsafe { chain.split_after(tail) };
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
pub(crate) fn part_completed(
    ended: CompletedRequest,
    first_tail: NonNull<Slot>,
    mut each: impl FnMut(u16, CompletedRequest),
) {
    let status = ended.status();
    part(ended.into_request(), first_tail, |request| {
        let target = request.completion_target();
        each(target, request.end_with(status));
    });
}

impl Item for QueuedRequest {
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
    fn joins(&self, next: &QueuedRequest, rules: MergeRules) -> bool {
        rules.allow(&self.request(), &next.request())
    }

    #[inline]
    fn merge_back(&mut self, next: QueuedRequest) {
        let mut request = self.request();
        request.merge_back(next.request());
        // By invariant (2): it is no longer the first request of its chain.
        next.request().set_tail(next.first_tail);
        self.sectors += next.sectors;
    }
}

/// The record of a request in flight.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    /// The first bio; `None` if the tag is free.
    head: Option<NonNull<Slot>>,
    /// The last bio of the first request in its chain.
    first_tail: NonNull<Slot>,
    /// The tag that the channel gave the first request.
    tag: Tag,
    kind: Kind,
    /// The number of the channel that passed the request on the fast path, if one did.
    bypass_id: Option<u16>,
}

/// A completed chain whose channels have not received it yet.
#[derive(Debug)]
pub(super) struct CompletedChain {
    ended: CompletedRequest,
    first_tail: NonNull<Slot>,
}

// SAFETY: as for `Request`.
unsafe impl Send for CompletedChain {}

impl CompletedChain {
    /// Hands each request of the chain to `each`, with its completion target.
    #[inline]
    pub(super) fn part(self, each: impl FnMut(u16, CompletedRequest)) {
        part_completed(self.ended, self.first_tail, each);
    }
}

/// The requests in flight on a queue, and the free tags.
#[derive(Debug)]
pub(super) struct InFlightTable {
    free: Vec<u16>,
    table: Box<[InFlight]>,
    /// Completed reads and writes that took the fast path.
    bypass_completed: [u32; 2],
}

// SAFETY: as for `Request`.
unsafe impl Send for InFlightTable {}

impl InFlightTable {
    /// A table for `count` requests.
    pub(super) fn new(count: u16) -> InFlightTable {
        let kind = Kind::of(Op::Read, Prio::BestEffort);
        let empty = InFlight {
            head: None,
            first_tail: NonNull::dangling(),
            tag: Tag(0),
            kind,
            bypass_id: None,
        };
        let table = vec![empty; count.into()].into();
        InFlightTable { free: (0..count).rev().collect(), table, bypass_completed: [0; 2] }
    }

    /// How many more requests can start.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// Number of requests in flight.
    #[inline]
    pub(super) fn count(&self) -> usize {
        self.table.len() - self.free.len()
    }

    /// Gives a request a tag and adds it to the batch. The caller has checked that a tag is free.
    /// `bypass_id` is the channel that passed the request on the fast path, or `None` after a
    /// dispatch.
    #[inline]
    pub(super) fn start(
        &mut self,
        queued: QueuedRequest,
        bypass_id: Option<u16>,
        batch: &mut Batch,
    ) {
        let tag = self.free.pop().expect("the caller has asked for room");
        let mut request = queued.request();
        let entry = InFlight {
            head: Some(request.head()),
            first_tail: queued.first_tail(),
            tag: request.exchange_tag(Tag(tag)),
            kind: queued.kind(),
            bypass_id,
        };
        self.table[usize::from(tag)] = entry;
        batch.start(request, Tag(tag));
    }

    /// Counts or reports the completion of a request.
    #[inline]
    fn report_completed(&mut self, entry: InFlight, reports: &mut Vec<Report>) {
        match entry.bypass_id {
            None => Report::add_completed(reports, entry.kind),
            Some(_) => self.bypass_completed[entry.kind.direction as usize] += 1,
        }
    }

    /// Returns and resets the number of completed reads and writes that took the fast path; these
    /// are not reported.
    #[inline]
    pub(super) fn take_bypass_completed(&mut self) -> [u32; 2] {
        std::mem::take(&mut self.bypass_completed)
    }

    /// Takes a request that the queue has completed: reports it and adds it to `completed`.
    ///
    /// # Errors
    /// The request itself, if it was not started here.
    #[inline]
    pub(super) fn complete(
        &mut self,
        ended: CompletedRequest,
        completed: &mut Vec<CompletedChain>,
        reports: &mut Vec<Report>,
    ) -> Result<(), CompletedRequest> {
        let tag = ended.tag().map_or(usize::MAX, |tag| usize::from(tag.0));
        let entry = match self.table.get_mut(tag) {
            Some(entry) if entry.head == Some(ended.head()) => entry,
            _ => return Err(ended),
        };
        entry.head = None;
        let entry = *entry;
        self.free.push(tag as u16);
        self.report_completed(entry, reports);
        let mut request = ended.into_request();
        request.exchange_tag(entry.tag);
        completed
            .push(CompletedChain { ended: request.into_completed(), first_tail: entry.first_tail });
        Ok(())
    }

    /// Whether all requests in flight belong to the channel with this completion target.
    pub(super) fn all_belong_to(&self, target: u16) -> bool {
        self.table.iter().filter_map(|entry| Some((entry.head?, entry.first_tail))).all(
            |(head, first_tail)| {
                // SAFETY: a slot in flight is the first of a request, which is only read.
                let request = unsafe { Request::from_raw(head) };
                request.tail() == first_tail && request.completion_target() == target
            },
        )
    }

    /// Takes back requests that the queue did not start. If the queue wants the first of them bio
    /// by bio, that request is split into the requests it was merged from. If it was not merged
    /// here, its channel gets it back and splits it. Returns whether the queue wanted that.
    pub(super) fn requeue_unstarted(
        &mut self,
        batch: &mut Batch,
        reports: &mut Vec<Report>,
        completed: &mut Vec<CompletedChain>,
    ) -> bool {
        let broken = batch.take_broken();
        while let Some((mut request, tag)) = batch.take_unstarted() {
            let entry = &mut self.table[usize::from(tag.0)];
            entry.head = None;
            let entry = *entry;
            self.free.push(tag.0);
            request.exchange_tag(entry.tag);
            let queued = QueuedRequest::of_chain(request, entry.first_tail);
            if !(broken && batch.is_empty()) {
                reports.push(Report::Undone(queued, entry.bypass_id));
                continue;
            }
            match queued.break_up() {
                (first, Some(rest)) => {
                    reports.push(Report::Remainder(rest));
                    reports.push(Report::Undone(first, entry.bypass_id));
                }
                (single, None) => {
                    self.report_completed(entry, reports);
                    let first_tail = single.first_tail();
                    completed.push(CompletedChain {
                        ended: single.request().return_unexecuted(),
                        first_tail,
                    });
                }
            }
        }
        broken
    }
}
