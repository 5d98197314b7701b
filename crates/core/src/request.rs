//! A request: what a plug makes of bios, and what a device starts and completes.
//!
//! ```text
//! plug ─ Request ▸ tags ─ Batch of Started ▸ device ─ CompletionBatch ▸ channel
//! ```
//!
//! A request is one bio or several merged bios. The bios stay in the channel's slots
//! ([`crate::channel`]); a request points to the first and the last of them. [`MergeRules`] says
//! which requests may be merged.
//!
//! **Exactly once.** A device takes [`Started`] tokens out of a [`Batch`]. Completing a token
//! consumes it; a token that is dropped instead panics in debug builds. Code outside this module
//! cannot make a token, so a device cannot forget to complete a request or complete it twice by
//! accident.
//!
//! Between a channel and a device there are two batches: requests for the device, with those that
//! it did not start, and completed requests for the channel. Both are a [`Ring`]. `VecDeque` can
//! grow and pays for that on every push; a channel knows its bound when it opens.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;

use crate::bio::{Bio, Flags, Op, Prio, Status};
use crate::limits::Limits;
use crate::units::{Nanos, Sector, Tag};

/// The tag field of a request that holds no tag.
const TAG_NONE: u16 = u16::MAX;

/// One accepted bio, at a fixed address in its channel, and the state of the request whose first
/// bio it is. Two cache lines: the bio, and its state.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Slot {
    pub(crate) bio: Bio,
    /// Address of the data, checked when the bio was accepted; dangling if the bio has no data.
    pub(crate) data: NonNull<u8>,
    /// The next bio of the same request.
    pub(crate) next: Option<NonNull<Slot>>,
    /// When the bio was submitted; all bios of a batch have the same time.
    pub(crate) submitted: Nanos,
    /// The last bio of the request.
    tail: NonNull<Slot>,
    /// The first sector of the request. For a completed append: the first sector of its data. For
    /// the parent of pieces: where the first piece that failed begins.
    sector: Sector,
    /// The request's length in sectors.
    sectors: u64,
    /// For a parent: the number of pieces that are not complete yet.
    pub(crate) pieces: u16,
    /// The completion target of the request, if it passes through a shared scheduler.
    target: u16,
    /// The number of this slot.
    pub(crate) index: u16,
    /// The slot of the bio that this one is a piece of, or `SLOT_NONE`.
    pub(crate) parent: u16,
    /// The request's tag, or `TAG_NONE`.
    tag: u16,
    /// The number of bios in the request.
    segments: u16,
    /// The operation of the request: that of the bio or of a part of its flush sequence.
    op: Op,
    /// The flags of the request: the union of its bios' flags.
    flags: Flags,
    /// The status of the request; for a parent, the error of the first piece that failed.
    pub(crate) status: Status,
    /// The part of a flush sequence that is in flight (`channel::rules`).
    pub(crate) stage: Stage,
}

const _: () = assert!(size_of::<Slot>() == 128, "a slot is two cache lines");

/// A slot number that means no slot.
pub(crate) const SLOT_NONE: u16 = u16::MAX;

impl Slot {
    /// For a parent with an error: where the first piece that failed begins.
    pub(crate) fn failed_at(&self) -> Sector {
        self.sector
    }

    /// Records where a piece that failed begins.
    pub(crate) fn set_failed_at(&mut self, sector: Sector) {
        self.sector = sector;
    }

    /// A slot without a bio.
    pub(crate) fn empty(index: u16) -> Slot {
        Slot {
            bio: Bio::new(Op::Flush, Sector(0), 0),
            data: NonNull::dangling(),
            next: None,
            submitted: Nanos(0),
            tail: NonNull::dangling(),
            sector: Sector(0),
            sectors: 0,
            pieces: 0,
            target: 0,
            index,
            parent: SLOT_NONE,
            tag: TAG_NONE,
            segments: 0,
            op: Op::Flush,
            flags: Flags::NONE,
            status: Status::Ok,
            stage: Stage::Plain,
        }
    }
}

/// The part of a flush sequence that a slot's request executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// No sequence: the request executes the bio.
    Plain,
    /// A flush before the data.
    PreFlush,
    /// The data of a sequence.
    Data,
    /// A flush after the data, which replaces FUA.
    PostFlush,
    /// No part: a merged request returns unexecuted, and the channel offers it again bio by bio.
    Returned,
}

/// One bio, or several neighbours merged into one: a pointer to the slot of the first bio.
///
/// Invariants: (1) the slot is valid and no other request refers to it; (2) the chain of `next`
/// from the slot to its `tail` is complete. Together they allow every method below to follow the
/// pointer.
#[derive(Debug)]
pub struct Request(NonNull<Slot>);

// SAFETY: the slots belong to a channel, which waits for all of its requests before it is dropped.
// A slot has one request at a time, and the channel does not touch a slot until its request has
// completed.
unsafe impl Send for Request {}

impl Request {
    /// A request of one bio.
    ///
    /// # Safety
    /// `slot` must be valid until the request has been completed, no other request may refer to it,
    /// and no other code may access it meanwhile.
    #[inline]
    pub(crate) unsafe fn of(mut slot: NonNull<Slot>) -> Request {
        // SAFETY: the slot is valid and no other code accesses it, by this function's contract.
        let this = unsafe { slot.as_mut() };
        this.tail = slot;
        this.next = None;
        this.sector = this.bio.sector;
        this.sectors = this.bio.sectors;
        this.op = this.bio.op;
        this.flags = this.bio.flags;
        this.segments = 1;
        this.tag = TAG_NONE;
        Request(slot)
    }

    #[inline]
    fn slot(&self) -> &Slot {
        // SAFETY: invariant (1).
        unsafe { self.0.as_ref() }
    }

    #[inline]
    fn slot_mut(&mut self) -> &mut Slot {
        // SAFETY: invariant (1), and the request is borrowed mutably.
        unsafe { self.0.as_mut() }
    }

    /// Changes the operation of the request, for the parts of a flush sequence.
    pub(crate) fn recast(mut self, op: Op, flags: Flags) -> Request {
        let slot = self.slot_mut();
        if op == Op::Flush {
            slot.sector = Sector(0);
            slot.sectors = 0;
        }
        slot.op = op;
        slot.flags = flags;
        self
    }

    /// First sector.
    #[inline]
    pub fn sector(&self) -> Sector {
        self.slot().sector
    }

    /// Length in sectors.
    #[inline]
    pub fn sectors(&self) -> u64 {
        self.slot().sectors
    }

    /// The first sector after the request.
    #[inline]
    pub fn end(&self) -> Sector {
        self.sector() + self.sectors()
    }

    /// The operation.
    #[inline]
    pub fn op(&self) -> Op {
        self.slot().op
    }

    /// Modifiers.
    #[inline]
    pub fn flags(&self) -> Flags {
        self.slot().flags
    }

    /// Priority class.
    #[inline]
    pub fn prio(&self) -> Prio {
        self.slot().bio.prio
    }

    /// The number of bios in the request.
    #[inline]
    pub fn segments(&self) -> u16 {
        self.slot().segments
    }

    #[inline]
    pub(crate) fn head(&self) -> NonNull<Slot> {
        self.0
    }

    /// The number of the first bio's slot, below the channel's depth: a key for what a gate
    /// records.
    #[inline]
    pub fn index(&self) -> u16 {
        self.slot().index
    }

    /// Makes the request of a slot.
    ///
    /// # Safety
    /// The slot is the first of a request, and the caller owns that request.
    #[inline]
    pub(crate) unsafe fn from_raw(head: NonNull<Slot>) -> Request {
        Request(head)
    }

    /// The slot of the last bio.
    #[inline]
    pub(crate) fn tail(&self) -> NonNull<Slot> {
        self.slot().tail
    }

    /// Sets the last bio of this request; requests that were merged may be chained after it.
    #[inline]
    pub(crate) fn set_tail(&mut self, tail: NonNull<Slot>) {
        self.slot_mut().tail = tail;
    }

    /// The completion target.
    #[inline]
    pub(crate) fn completion_target(&self) -> u16 {
        self.slot().target
    }

    /// Sets the completion target.
    #[inline]
    pub(crate) fn set_completion_target(&mut self, target: u16) {
        self.slot_mut().target = target;
    }

    /// Replaces the tag; returns the old one.
    #[inline]
    pub(crate) fn exchange_tag(&mut self, tag: Tag) -> Tag {
        Tag(std::mem::replace(&mut self.slot_mut().tag, tag.0))
    }

    /// Excludes the request from merging.
    pub(crate) fn never_merge(&mut self) {
        let slot = self.slot_mut();
        slot.flags = slot.flags | Flags::NOMERGE;
    }

    /// Converts the request into a started one with its present tag.
    pub(crate) fn into_started(self) -> Started {
        Started(self)
    }

    /// Converts the request into a completed one with its present status.
    #[inline]
    pub(crate) fn into_completed(self) -> CompletedRequest {
        CompletedRequest(self)
    }

    /// Completes the request with a status.
    #[inline]
    pub(crate) fn end_with(mut self, status: Status) -> CompletedRequest {
        self.slot_mut().status = status;
        CompletedRequest(self)
    }

    /// Returns the request unexecuted; the channel offers it again bio by bio.
    pub(crate) fn return_unexecuted(mut self) -> CompletedRequest {
        self.slot_mut().stage = Stage::Returned;
        CompletedRequest(self)
    }

    /// Splits the chain after one of its bios. Returns the request up to that bio, and the rest, if
    /// any.
    ///
    /// # Safety
    /// `tail` must be a bio of the chain, and the bio after it must be the first of a request that
    /// was merged.
    pub(crate) unsafe fn split_after(
        mut self,
        mut tail: NonNull<Slot>,
    ) -> (Request, Option<Request>) {
        let (mut sectors, mut segments) = (0, 0);
        let mut next = Some(self.0);
        while let Some(slot) = next {
            // SAFETY: invariant (2), and no reference into the chain exists.
            let slot_ref = unsafe { slot.as_ref() };
            sectors += slot_ref.bio.sectors;
            segments += 1;
            next = if slot == tail { None } else { slot_ref.next };
        }
        // SAFETY: `tail` is a bio of the chain by this function's contract, and no reference into
        // the chain exists.
        let rest = unsafe { tail.as_mut().next.take() };
        let slot = self.slot_mut();
        (slot.tail, slot.sectors, slot.segments) = (tail, sectors, segments);
        (self, rest.map(Request))
    }

    /// If the request is the flush before a bio's data: the operation and sector of the request
    /// that follows in the same slot. `None` for a split bio, because its pieces have their own
    /// slots.
    #[inline]
    pub(crate) fn follower(&self) -> Option<(Op, Sector)> {
        let slot = self.slot();
        let follows = slot.stage == Stage::PreFlush && slot.op == Op::Flush && slot.pieces == 0;
        follows.then_some((slot.bio.op, slot.bio.sector))
    }

    /// Turns an append into a write at `sector`. On completion it is an append again, which landed
    /// there.
    pub(crate) fn append_at(mut self, sector: Sector) -> Request {
        debug_assert_eq!(self.op(), Op::ZoneAppend);
        let slot = self.slot_mut();
        slot.op = Op::Write;
        slot.sector = sector;
        slot.flags = slot.flags | Flags::NOMERGE;
        self
    }

    /// Appends the bios of `next`, which starts where this request ends.
    #[inline]
    pub(crate) fn merge_back(&mut self, next: Request) {
        debug_assert_eq!(self.end(), next.sector());
        let other = next.slot();
        let (tail, sectors, segments, flags) =
            (other.tail, other.sectors, other.segments, other.flags);
        let slot = self.slot_mut();
        let mut last = std::mem::replace(&mut slot.tail, tail);
        slot.sectors += sectors;
        slot.segments += segments;
        slot.flags = slot.flags | flags;
        // SAFETY: invariant (2): `last` belongs to this request, and no reference to it exists.
        unsafe { last.as_mut().next = Some(next.0) };
    }

    /// Prepends the bios of `previous`, which ends where this request starts.
    #[inline]
    pub(crate) fn merge_front(&mut self, mut previous: Request) {
        std::mem::swap(self, &mut previous);
        self.merge_back(previous);
    }

    /// Sets the submission time of every bio of the request.
    #[inline]
    pub(crate) fn stamp(&mut self, now: Nanos) {
        let mut next = Some(self.0);
        while let Some(mut slot) = next {
            // SAFETY: invariant (2), and the request is borrowed mutably.
            let slot = unsafe { slot.as_mut() };
            slot.submitted = now;
            next = slot.next;
        }
    }
}

/// One piece of a request's data: contiguous memory for `len_bytes` of the request's range.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Address of the first byte: readable and writable for `len_bytes` until the request is
    /// completed.
    pub data: NonNull<u8>,
    /// Length in bytes.
    pub len_bytes: usize,
}

/// A started request: a token for the duty to complete it exactly once, through
/// [`CompletionBatch`].
#[derive(Debug)]
pub struct Started(Request);

impl Started {
    /// The request's first sector.
    #[inline]
    pub fn sector(&self) -> Sector {
        self.0.sector()
    }

    /// The request's length in sectors.
    #[inline]
    pub fn sectors(&self) -> u64 {
        self.0.sectors()
    }

    /// The first sector after the request.
    #[inline]
    pub fn end(&self) -> Sector {
        self.0.end()
    }

    /// The operation.
    #[inline]
    pub fn op(&self) -> Op {
        self.0.op()
    }

    /// Modifiers.
    #[inline]
    pub fn flags(&self) -> Flags {
        self.0.flags()
    }

    /// Priority class.
    #[inline]
    pub fn prio(&self) -> Prio {
        self.0.prio()
    }

    /// Whether the request was merged from several bios.
    #[inline]
    pub fn is_merged(&self) -> bool {
        self.0.segments() > 1
    }

    /// The number of the request among the started requests of the channel.
    #[inline]
    pub fn tag(&self) -> Tag {
        Tag(self.0.slot().tag)
    }

    /// The data in the order of the sectors. Empty for operations without data.
    #[inline]
    pub fn segments(&self) -> Segments<'_> {
        let next = if self.op().has_data() { Some(self.0.head()) } else { None };
        Segments { next, _request: self }
    }

    /// The request, for inspection.
    #[inline]
    pub(crate) fn request(&self) -> &Request {
        &self.0
    }

    /// Calls `visit` with each bio of the request, when it was submitted, and whether it is a piece
    /// of a split bio. `visit` may change flags of the bio that no device reads.
    pub(crate) fn visit_bios(&mut self, mut visit: impl FnMut(&mut Bio, Nanos, bool)) {
        let mut next = Some(self.0.head());
        while let Some(mut slot) = next {
            // SAFETY: invariant (2), and the request is borrowed mutably.
            let slot = unsafe { slot.as_mut() };
            visit(&mut slot.bio, slot.submitted, slot.parent != SLOT_NONE);
            next = slot.next;
        }
    }

    /// Consumes the token without the panic of `Drop`.
    #[inline]
    pub(crate) fn defuse(self) -> Request {
        let this = std::mem::ManuallyDrop::new(self);
        Request(this.0.0)
    }
}

#[cfg(debug_assertions)]
impl Drop for Started {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "request dropped without a completion: {:?}", self.0);
    }
}

/// An iterator over the data of a request; [`Started::segments`] returns it.
#[derive(Debug)]
pub struct Segments<'a> {
    next: Option<NonNull<Slot>>,
    _request: &'a Started,
}

impl Iterator for Segments<'_> {
    type Item = Segment;

    #[inline]
    fn next(&mut self) -> Option<Segment> {
        let slot = self.next?;
        // SAFETY: the chain stays complete until the request is completed, and completing needs the
        // token that this iterator borrows.
        let slot = unsafe { slot.as_ref() };
        self.next = slot.next;
        let len_bytes = Sector(slot.bio.sectors).bytes() as usize;
        Some(Segment { data: slot.data, len_bytes })
    }
}

/// A completed request that its channel has not received yet.
#[derive(Debug)]
#[must_use = "its bios wait for their completions"]
pub struct CompletedRequest(Request);

impl CompletedRequest {
    /// The operation.
    #[inline]
    pub fn op(&self) -> Op {
        self.0.op()
    }

    /// The length in sectors.
    #[inline]
    pub fn sectors(&self) -> u64 {
        self.0.sectors()
    }

    /// Modifiers.
    #[inline]
    pub fn flags(&self) -> Flags {
        self.0.flags()
    }

    /// The number of the first bio's slot, below the channel's depth: a key for what a gate records
    /// about a request.
    #[inline]
    pub fn index(&self) -> u16 {
        self.0.index()
    }

    /// The slot of the first bio; the channel owns the slots again.
    #[inline]
    pub(crate) fn head(&self) -> NonNull<Slot> {
        self.0.head()
    }

    /// The tag, if the request was started.
    #[inline]
    pub(crate) fn tag(&self) -> Option<Tag> {
        let tag = self.0.slot().tag;
        (tag != TAG_NONE).then_some(Tag(tag))
    }

    /// The status.
    #[inline]
    pub fn status(&self) -> Status {
        self.0.slot().status
    }

    /// Whether the request returns unexecuted, to be offered again bio by bio.
    #[inline]
    pub(crate) fn is_returned(&self) -> bool {
        self.0.slot().stage == Stage::Returned
    }

    /// The request that has completed.
    #[inline]
    pub(crate) fn into_request(self) -> Request {
        self.0
    }

    /// The request that returned unexecuted, without a tag.
    pub(crate) fn into_undone(self) -> Request {
        let CompletedRequest(mut request) = self;
        let slot = request.slot_mut();
        (slot.stage, slot.tag) = (Stage::Plain, TAG_NONE);
        request
    }

    /// Whether the request is a write that executed an append.
    pub(crate) fn is_made_append(&self) -> bool {
        self.op() == Op::Write && self.0.slot().bio.op == Op::ZoneAppend
    }

    /// Turns the write back into the append, without a tag: the caller has freed the tag.
    pub(crate) fn append_again(self) -> Request {
        let CompletedRequest(mut request) = self;
        let slot = request.slot_mut();
        (slot.op, slot.sector, slot.tag) = (Op::ZoneAppend, slot.bio.sector, TAG_NONE);
        request
    }

    /// Where the data landed, for an append that succeeded; otherwise the first sector.
    #[inline]
    pub fn sector(&self) -> Sector {
        self.0.sector()
    }
}

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
    pub(crate) fn front(self, request: &Request) -> bool {
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

    /// The completion at `index`, oldest first, for middleware that observes completions.
    pub fn get(&self, index: usize) -> Option<&CompletedRequest> {
        self.requests.get(index)
    }
}

/// A bounded double-ended queue of small values, for requests and completions between the layers
/// of a channel.
pub(crate) struct Ring<T> {
    /// A power of two of entries. Invariant: the entries from `head` to `tail`, modulo the length,
    /// hold values, and no others do.
    places: Box<[MaybeUninit<T>]>,
    head: usize,
    tail: usize,
}

impl<T> Ring<T> {
    /// An empty ring for at least `capacity` values.
    pub(crate) fn with_capacity(capacity: usize) -> Ring<T> {
        let places = (0..capacity.max(1).next_power_of_two()).map(|_| MaybeUninit::uninit());
        Ring { places: places.collect(), head: 0, tail: 0 }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.tail.wrapping_sub(self.head)
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.tail == self.head
    }

    #[inline]
    fn place(&mut self, at: usize) -> &mut MaybeUninit<T> {
        let index = at & (self.places.len() - 1);
        // SAFETY: the length is a power of two, so the masked index is below it.
        unsafe { self.places.get_unchecked_mut(index) }
    }

    /// Adds a value at the end.
    ///
    /// # Panics
    /// If the ring is full: the bound is enforced where values enter the channel, not here.
    #[inline]
    pub(crate) fn push_back(&mut self, value: T) {
        assert!(self.len() < self.places.len(), "a ring is bounded by its channel's depth");
        self.place(self.tail).write(value);
        self.tail = self.tail.wrapping_add(1);
    }

    /// Adds a value at the front.
    ///
    /// # Panics
    /// If the ring is full, as for [`Ring::push_back`].
    pub(crate) fn push_front(&mut self, value: T) {
        assert!(self.len() < self.places.len(), "a ring is bounded by its channel's depth");
        self.head = self.head.wrapping_sub(1);
        self.place(self.head).write(value);
    }

    /// Takes the first value.
    #[inline]
    pub(crate) fn pop_front(&mut self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        let head = self.head;
        self.head = head.wrapping_add(1);
        // SAFETY: by the invariant the place held a value, and `head` has moved past it.
        Some(unsafe { self.place(head).assume_init_read() })
    }

    /// Takes the last value.
    pub(crate) fn pop_back(&mut self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        self.tail = self.tail.wrapping_sub(1);
        // SAFETY: by the invariant the place held a value, and `tail` has moved before it.
        Some(unsafe { self.place(self.tail).assume_init_read() })
    }

    /// Swaps the values at two indices, counted from the front.
    ///
    /// # Panics
    /// If an index is not below the length.
    #[inline]
    pub(crate) fn swap(&mut self, one: usize, other: usize) {
        assert!(one.max(other) < self.len(), "an index is out of bounds");
        let at = |index| self.head.wrapping_add(index) & (self.places.len() - 1);
        let (one, other) = (at(one), at(other));
        self.places.swap(one, other);
    }

    /// The value at `index`, counted from the front.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        if index >= self.len() {
            return None;
        }
        let at = self.head.wrapping_add(index) & (self.places.len() - 1);
        // SAFETY: by the invariant the place holds a value.
        Some(unsafe { self.places[at].assume_init_ref() })
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        while self.pop_front().is_some() {}
    }
}

impl<T> fmt::Debug for Ring<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring({} of {})", self.len(), self.places.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_wrap_around_and_values_are_dropped() {
        let mut ring: Ring<Box<u32>> = Ring::with_capacity(3);
        for round in 0..10 {
            ring.push_back(Box::new(round));
            ring.push_back(Box::new(round + 100));
            ring.push_front(Box::new(round + 200));
            assert_eq!(ring.len(), 3);
            assert_eq!(ring.get(0).map(|v| **v), Some(round + 200));
            assert_eq!(ring.get(3), None);
            ring.swap(0, 2);
            assert_eq!(ring.get(2).map(|v| **v), Some(round + 200));
            ring.swap(2, 0);
            ring.swap(1, 1);
            assert_eq!(*ring.pop_back().unwrap(), round + 100);
            assert_eq!(*ring.pop_front().unwrap(), round + 200);
            assert_eq!(*ring.pop_front().unwrap(), round);
            assert!(ring.pop_front().is_none() && ring.pop_back().is_none());
        }
        ring.push_back(Box::new(1));
    }

    #[test]
    #[should_panic(expected = "bounded")]
    fn push_to_full_ring_panics() {
        let mut ring = Ring::with_capacity(2);
        (0..3).for_each(|n| ring.push_back(n));
    }
}
