//! A request on its way down and up: what a plug makes of bios, what a device starts and completes.
//!
//! ```text
//! plug ─ Request ▸ scheduler ─ Request ▸ tags ─ Batch of Started ▸ device ─ Done ▸ channel
//! ```
//!
//! A request is one bio or several merged ones. The bios stay in the channel's slots
//! ([`crate::channel`]); a request points at the first and the last of them.
//!
//! **Exactly once.** A device gets [`Started`] tokens out of a [`Batch`]. Completing one consumes
//! it; a token that is dropped instead panics in debug builds. Nobody else can make a token, so
//! "forgot to complete" and "completed twice" cannot be written by accident.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ptr::NonNull;

use crate::bio::{Bio, Flags, Op, Prio};
use crate::status::Status;
use crate::units::{Nanos, Sector, Tag};

/// The tag of a request that holds none.
const TAG_NONE: u16 = u16::MAX;

/// One accepted bio, at a fixed address in its channel.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) bio: Bio,
    /// Address of the data, resolved and checked when the bio was accepted; dangling without data.
    pub(crate) data: NonNull<u8>,
    /// The next bio of the same request.
    pub(crate) next: Option<NonNull<Slot>>,
    /// When the bio was submitted; one stamp for a whole batch.
    pub(crate) submitted: Nanos,
    /// This slot's own number.
    pub(crate) index: u16,
    /// The slot of the bio that this one is a piece of, or `SLOT_NONE`.
    pub(crate) parent: u16,
    /// For a parent: pieces that are not complete yet.
    pub(crate) pieces: u32,
    /// For a parent: the first error of a piece.
    pub(crate) status: Status,
    /// What part of a flush sequence is under way (`channel::flush`).
    pub(crate) stage: Stage,
}

/// No slot, where a slot number is expected.
pub(crate) const SLOT_NONE: u16 = u16::MAX;

/// The part of a flush sequence that a slot's request stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// No sequence: the request is the bio.
    Plain,
    /// A flush before the data.
    PreFlush,
    /// The data of a sequence.
    Data,
    /// A flush after the data, in place of FUA.
    PostFlush,
}

/// One bio, or several neighbours merged into one.
#[derive(Debug)]
pub struct Request {
    head: NonNull<Slot>,
    tail: NonNull<Slot>,
    sector: Sector,
    sectors: u64,
    op: Op,
    flags: Flags,
    prio: Prio,
    segments: u16,
    tag: u16,
}

const _: () = assert!(size_of::<Request>() == 40, "a request is small enough to be passed along");

// SAFETY: the slots belong to a channel that waits for all of its requests before it goes away, a
// slot has one request at a time, and the channel leaves a slot alone until its request comes home.
unsafe impl Send for Request {}

impl Request {
    /// A request of one bio.
    ///
    /// # Safety
    /// `slot` must stay valid, and its bio unchanged, until the request has been completed.
    #[inline]
    pub(crate) unsafe fn of(slot: NonNull<Slot>) -> Request {
        // SAFETY: valid by this function's own contract.
        let bio = unsafe { &slot.as_ref().bio };
        Request {
            head: slot,
            tail: slot,
            sector: bio.sector,
            sectors: bio.sectors,
            op: bio.op,
            flags: bio.flags,
            prio: bio.prio,
            segments: 1,
            tag: TAG_NONE,
        }
    }

    /// The same slot's request as another operation: the flushes of a sequence.
    pub(crate) fn recast(mut self, op: Op, flags: Flags) -> Request {
        if op == Op::Flush {
            self.sector = Sector(0);
            self.sectors = 0;
        }
        self.op = op;
        self.flags = flags;
        self
    }

    /// First sector.
    #[inline]
    pub fn sector(&self) -> Sector {
        self.sector
    }

    /// Length in sectors.
    #[inline]
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// The first sector after it.
    #[inline]
    pub fn end(&self) -> Sector {
        self.sector + self.sectors
    }

    /// What to do.
    #[inline]
    pub fn op(&self) -> Op {
        self.op
    }

    /// Modifiers.
    #[inline]
    pub fn flags(&self) -> Flags {
        self.flags
    }

    /// Priority class.
    #[inline]
    pub fn prio(&self) -> Prio {
        self.prio
    }

    /// How many bios it is made of.
    #[inline]
    pub fn segments(&self) -> u16 {
        self.segments
    }

    pub(crate) fn head(&self) -> NonNull<Slot> {
        self.head
    }

    /// Takes the bios of `next`, which starts where this one ends, behind its own.
    #[inline]
    pub(crate) fn merge_back(&mut self, next: Request) {
        debug_assert_eq!(self.end(), next.sector);
        // SAFETY: both chains are whole and belong to live requests (the invariant of `of`); this
        // request is the only one that refers to `tail`.
        unsafe { self.tail.as_mut().next = Some(next.head) };
        self.tail = next.tail;
        self.sectors += next.sectors;
        self.segments += next.segments;
        self.flags = self.flags | next.flags;
    }

    /// Takes the bios of `previous`, which ends where this one starts, before its own.
    #[inline]
    pub(crate) fn merge_front(&mut self, mut previous: Request) {
        debug_assert_eq!(previous.end(), self.sector);
        // SAFETY: as in `merge_back`, with the roles changed.
        unsafe { previous.tail.as_mut().next = Some(self.head) };
        self.head = previous.head;
        self.sector = previous.sector;
        self.sectors += previous.sectors;
        self.segments += previous.segments;
        self.flags = self.flags | previous.flags;
    }

    /// Stamps every bio of the request with the time of its submission.
    #[inline]
    pub(crate) fn stamp(&mut self, now: Nanos) {
        let mut next = Some(self.head);
        while let Some(mut slot) = next {
            // SAFETY: the chain is whole until completion, and this request alone refers to it.
            let slot = unsafe { slot.as_mut() };
            slot.submitted = now;
            next = slot.next;
        }
    }
}

/// One piece of a request's data: contiguous memory that holds `len_bytes` of the request's range.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Address of its first byte: readable and writable for `len_bytes` until the request is
    /// completed.
    pub data: NonNull<u8>,
    /// Length in bytes.
    pub len_bytes: usize,
}

/// A started request: the duty to complete it exactly once, through [`Done`].
#[derive(Debug)]
pub struct Started(Request);

impl Started {
    /// The request's first sector.
    #[inline]
    pub fn sector(&self) -> Sector {
        self.0.sector
    }

    /// The request's length in sectors.
    #[inline]
    pub fn sectors(&self) -> u64 {
        self.0.sectors
    }

    /// The first sector after the request.
    #[inline]
    pub fn end(&self) -> Sector {
        self.0.end()
    }

    /// What to do.
    #[inline]
    pub fn op(&self) -> Op {
        self.0.op
    }

    /// Modifiers.
    #[inline]
    pub fn flags(&self) -> Flags {
        self.0.flags
    }

    /// Priority class.
    #[inline]
    pub fn prio(&self) -> Prio {
        self.0.prio
    }

    /// Whether it was merged from several bios.
    #[inline]
    pub fn is_merged(&self) -> bool {
        self.0.segments > 1
    }

    /// Its number among the started requests of the channel.
    #[inline]
    pub fn tag(&self) -> Tag {
        Tag(self.0.tag)
    }

    /// The request's data in the order of its sectors. Empty for operations without data.
    #[inline]
    pub fn segments(&self) -> Segments<'_> {
        let next = if self.0.op.has_data() { Some(self.0.head) } else { None };
        Segments { next, _request: self }
    }

    /// Ends the token's life without the panic of `Drop`.
    #[inline]
    fn defuse(self) -> Request {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is never used or dropped again, so the request is moved, not copied.
        unsafe { std::ptr::read(&raw const this.0) }
    }
}

#[cfg(debug_assertions)]
impl Drop for Started {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "request dropped without a completion: {:?}", self.0);
    }
}

/// The data of a request; see [`Started::segments`].
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
        // SAFETY: the chain stays whole until the request is completed, which needs the token
        // that this iterator borrows.
        let slot = unsafe { slot.as_ref() };
        self.next = slot.next;
        let len_bytes = Sector(slot.bio.sectors).bytes() as usize;
        Some(Segment { data: slot.data, len_bytes })
    }
}

/// Requests on their way to a device, in order. Bounded by the channel's depth.
#[derive(Debug)]
pub struct Batch {
    requests: VecDeque<Started>,
    /// The first request is to be offered again bio by bio.
    broken: bool,
}

impl Batch {
    /// An empty batch with room for `depth` requests.
    pub fn with_capacity(depth: usize) -> Batch {
        Batch { requests: VecDeque::with_capacity(depth), broken: false }
    }

    /// How many requests are left in it.
    #[inline]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether none is left.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// The next request, without taking it.
    #[inline]
    pub fn peek(&self) -> Option<&Started> {
        self.requests.front()
    }

    /// Takes the next request; whoever takes it owes its completion.
    #[inline]
    #[expect(clippy::should_implement_trait, reason = "a batch is also put back into")]
    pub fn next(&mut self) -> Option<Started> {
        self.requests.pop_front()
    }

    /// Adds a request behind the others: for middleware that passes requests on.
    #[inline]
    pub fn push(&mut self, started: Started) {
        self.requests.push_back(started);
    }

    /// Puts a request back before the others. What a device leaves in the batch was not started;
    /// the channel offers it again later, in the same order.
    #[inline]
    pub fn put_back(&mut self, started: Started) {
        self.requests.push_front(started);
    }

    /// Puts a merged request back before the others, to be offered again bio by bio: for a device
    /// that would have to fail it because of some of its bios only. The caller then leaves the
    /// batch alone, so that order is kept, and merging stays invisible.
    ///
    /// A request of one bio cannot be broken up; check [`Started::is_merged`] first.
    pub fn break_up(&mut self, started: Started) {
        debug_assert!(started.is_merged(), "only a merged request can be broken up");
        self.requests.push_front(started);
        self.broken = true;
    }

    /// Takes back what another batch has left, before its own: for middleware that passed requests
    /// on in a batch of its own.
    pub fn take_back(&mut self, left: &mut Batch) {
        if left.is_empty() {
            return;
        }
        self.broken = std::mem::take(&mut left.broken);
        while let Some(started) = left.requests.pop_back() {
            self.requests.push_front(started);
        }
    }

    /// Whether the first request is to be offered again bio by bio; asking forgets it.
    pub(crate) fn take_broken(&mut self) -> bool {
        std::mem::take(&mut self.broken)
    }

    #[inline]
    pub(crate) fn start(&mut self, mut request: Request, tag: Tag) {
        request.tag = tag.0;
        self.requests.push_back(Started(request));
    }

    /// Takes the last request back out of the batch, with the tag that it held.
    pub(crate) fn unstart_last(&mut self) -> Option<(Request, Tag)> {
        let mut request = self.requests.pop_back()?.defuse();
        let tag = Tag(request.tag);
        request.tag = TAG_NONE;
        Some((request, tag))
    }
}

/// One completed request.
#[derive(Debug)]
pub(crate) struct DoneEntry {
    pub(crate) head: NonNull<Slot>,
    /// For an append that succeeded, where it landed.
    pub(crate) sector: Sector,
    pub(crate) tag: u16,
    pub(crate) op: Op,
    pub(crate) status: Status,
}

// SAFETY: as for `Request`: the slot belongs to whoever holds the entry.
unsafe impl Send for DoneEntry {}

impl DoneEntry {
    /// The tag that the request held, if it was started at all.
    pub(crate) fn tag(&self) -> Option<Tag> {
        (self.tag != TAG_NONE).then_some(Tag(self.tag))
    }
}

/// The done ring: completed requests on their way up. Bounded by the channel's depth.
#[derive(Debug)]
pub struct Done {
    pub(crate) entries: VecDeque<DoneEntry>,
}

impl Done {
    /// An empty ring with room for `depth` completions.
    pub fn with_capacity(depth: usize) -> Done {
        Done { entries: VecDeque::with_capacity(depth) }
    }

    /// How many completions wait in it.
    #[inline]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether none waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Completes a request.
    #[inline]
    pub fn complete(&mut self, started: Started, status: Status) {
        let sector = started.sector();
        self.enter(started.defuse(), status, sector);
    }

    /// Completes a zone append whose data landed at `sector`.
    #[inline]
    pub fn complete_append(&mut self, started: Started, sector: Sector) {
        debug_assert_eq!(started.op(), Op::ZoneAppend);
        self.enter(started.defuse(), Status::Ok, sector);
    }

    /// Completes a request that never came to the device.
    #[inline]
    pub(crate) fn enter(&mut self, request: Request, status: Status, sector: Sector) {
        self.entries.push_back(DoneEntry {
            head: request.head,
            sector,
            tag: request.tag,
            op: request.op,
            status,
        });
    }

    /// Moves the oldest completion of `from` here: for middleware that holds completions back.
    #[inline]
    pub fn take_from(&mut self, from: &mut Done) -> bool {
        match from.entries.pop_front() {
            Some(entry) => {
                self.entries.push_back(entry);
                true
            }
            None => false,
        }
    }

    /// Operation, tag and status of the completion at `index`, oldest first: for middleware that
    /// looks on.
    pub fn get(&self, index: usize) -> Option<(Op, Tag, Status)> {
        self.entries.get(index).map(|entry| (entry.op, Tag(entry.tag), entry.status))
    }
}
