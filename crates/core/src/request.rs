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

mod batch;
mod done;

use std::ptr::NonNull;

pub use batch::Batch;
pub use done::Done;

use crate::bio::{Bio, Flags, Op, Prio};
use crate::status::Status;
use crate::units::{Nanos, Sector, Tag};

/// The tag of a request that holds none.
const TAG_NONE: u16 = u16::MAX;

/// One accepted bio, at a fixed address in its channel, and the request that it heads, if it heads
/// one. Two cache lines: the bio, and what became of it.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Slot {
    pub(crate) bio: Bio,
    /// Address of the data, resolved and checked when the bio was accepted; dangling without data.
    pub(crate) data: NonNull<u8>,
    /// The next bio of the same request.
    pub(crate) next: Option<NonNull<Slot>>,
    /// When the bio was submitted; one stamp for a whole batch.
    pub(crate) submitted: Nanos,
    /// The request's last bio.
    tail: NonNull<Slot>,
    /// The request's first sector; of a completed append, where it landed; of a parent in pieces,
    /// where the first of those that failed begins.
    sector: Sector,
    /// The request's length in sectors.
    sectors: u64,
    /// For a parent: pieces that are not complete yet.
    pub(crate) pieces: u16,
    /// Where the request comes home to, if it goes through a shared scheduler.
    home: u16,
    /// This slot's own number.
    pub(crate) index: u16,
    /// The slot of the bio that this one is a piece of, or `SLOT_NONE`.
    pub(crate) parent: u16,
    /// The request's tag, or `TAG_NONE`.
    tag: u16,
    /// How many bios the request is made of.
    segments: u16,
    /// The request's operation: the bio's, or that of a part of its flush sequence.
    op: Op,
    /// The request's flags: those of its bios together.
    flags: Flags,
    /// How the request ended; for a parent, the first error of a piece.
    pub(crate) status: Status,
    /// What part of a flush sequence is under way (`channel::flush`).
    pub(crate) stage: Stage,
}

const _: () = assert!(size_of::<Slot>() == 128, "a slot is two cache lines");

/// No slot, where a slot number is expected.
pub(crate) const SLOT_NONE: u16 = u16::MAX;

impl Slot {
    /// Of a parent with an error: where the first of the pieces that failed begins.
    pub(crate) fn failed_at(&self) -> Sector {
        self.sector
    }

    /// Notes where a piece that failed begins.
    pub(crate) fn set_failed_at(&mut self, sector: Sector) {
        self.sector = sector;
    }

    /// A slot that nothing is in.
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
            home: 0,
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
    /// No part: the request, of several bios, comes home undone, to be offered again bio by bio.
    Returned,
}

/// One bio, or several neighbours merged into one: a pointer to the slot of its first bio.
///
/// Invariants: (1) the slot is valid and no other request refers to it; (2) from the slot to its
/// `tail` the chain of `next` is whole; together they let every method below follow the pointer.
#[derive(Debug)]
pub struct Request(NonNull<Slot>);

// SAFETY: the slots belong to a channel that waits for all of its requests before it goes away, a
// slot has one request at a time, and the channel leaves a slot alone until its request comes home.
unsafe impl Send for Request {}

impl Request {
    /// A request of one bio.
    ///
    /// # Safety
    /// `slot` must be valid until the request has been completed, no other request may refer to
    /// it, and nobody else may touch it meanwhile.
    #[inline]
    pub(crate) unsafe fn of(mut slot: NonNull<Slot>) -> Request {
        // SAFETY: valid and ours alone by this function's own contract.
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

    /// The same slot's request as another operation: the parts of a flush sequence.
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

    /// The first sector after it.
    #[inline]
    pub fn end(&self) -> Sector {
        self.sector() + self.sectors()
    }

    /// What to do.
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

    /// How many bios it is made of.
    #[inline]
    pub fn segments(&self) -> u16 {
        self.slot().segments
    }

    #[inline]
    pub(crate) fn head(&self) -> NonNull<Slot> {
        self.0
    }

    /// The number of its first bio's slot, below the channel's depth: for what a gate keeps of it.
    #[inline]
    pub fn index(&self) -> u16 {
        self.slot().index
    }

    /// The request of a slot.
    ///
    /// # Safety
    /// The slot heads a request, and whoever works on it through the result holds that request.
    #[inline]
    pub(crate) unsafe fn from_raw(head: NonNull<Slot>) -> Request {
        Request(head)
    }

    /// The slot of its last bio.
    #[inline]
    pub(crate) fn tail(&self) -> NonNull<Slot> {
        self.slot().tail
    }

    /// Notes which of its bios is the last: not of all that are chained to it, of its own.
    #[inline]
    pub(crate) fn set_tail(&mut self, tail: NonNull<Slot>) {
        self.slot_mut().tail = tail;
    }

    /// Where it comes home to.
    #[inline]
    pub(crate) fn home(&self) -> u16 {
        self.slot().home
    }

    /// Notes where it comes home to.
    #[inline]
    pub(crate) fn set_home(&mut self, home: u16) {
        self.slot_mut().home = home;
    }

    /// Gives it another tag, and says which it had.
    #[inline]
    pub(crate) fn exchange_tag(&mut self, tag: Tag) -> Tag {
        Tag(std::mem::replace(&mut self.slot_mut().tag, tag.0))
    }

    /// Lets it be merged with nothing any more.
    pub(crate) fn never_merge(&mut self) {
        let slot = self.slot_mut();
        slot.flags = slot.flags | Flags::NOMERGE;
    }

    /// The request as started, with the tag that it has.
    pub(crate) fn into_started(self) -> Started {
        Started(self)
    }

    /// Sends it home as it has ended.
    #[inline]
    pub(crate) fn into_ended(self) -> Ended {
        Ended(self)
    }

    /// Ends it.
    #[inline]
    pub(crate) fn end_with(mut self, status: Status) -> Ended {
        self.slot_mut().status = status;
        Ended(self)
    }

    /// Sends it home undone, to be offered again bio by bio.
    pub(crate) fn give_back(mut self) -> Ended {
        self.slot_mut().stage = Stage::Returned;
        Ended(self)
    }

    /// Cuts the chain behind one of its bios: the request up to that one, and the rest, if any.
    ///
    /// # Safety
    /// `tail` is a bio of the chain, and the one behind it heads a request that was merged.
    pub(crate) unsafe fn cut_behind(
        mut self,
        mut tail: NonNull<Slot>,
    ) -> (Request, Option<Request>) {
        let (mut sectors, mut segments) = (0, 0);
        let mut next = Some(self.0);
        while let Some(slot) = next {
            // SAFETY: invariant (2), and no reference into the chain is alive.
            let slot_ref = unsafe { slot.as_ref() };
            sectors += slot_ref.bio.sectors;
            segments += 1;
            next = if slot == tail { None } else { slot_ref.next };
        }
        // SAFETY: by this function's contract, and as above.
        let rest = unsafe { tail.as_mut().next.take() };
        let slot = self.slot_mut();
        (slot.tail, slot.sectors, slot.segments) = (tail, sectors, segments);
        (self, rest.map(Request))
    }

    /// What goes down next in this request's slot, and where, if this is the flush before it. A bio
    /// that is split has none: its pieces have slots of their own.
    #[inline]
    pub(crate) fn follower(&self) -> Option<(Op, Sector)> {
        let slot = self.slot();
        let follows = slot.stage == Stage::PreFlush && slot.op == Op::Flush && slot.pieces == 0;
        follows.then_some((slot.bio.op, slot.bio.sector))
    }

    /// An append as the write that it is made of. It comes home as an append that landed there.
    pub(crate) fn append_at(mut self, sector: Sector) -> Request {
        debug_assert_eq!(self.op(), Op::ZoneAppend);
        let slot = self.slot_mut();
        slot.op = Op::Write;
        slot.sector = sector;
        slot.flags = slot.flags | Flags::NOMERGE;
        self
    }

    /// Takes the bios of `next`, which starts where this one ends, behind its own.
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
        // SAFETY: invariant (2): `last` is this request's own, and no reference to it is alive.
        unsafe { last.as_mut().next = Some(next.0) };
    }

    /// Takes the bios of `previous`, which ends where this one starts, before its own.
    #[inline]
    pub(crate) fn merge_front(&mut self, mut previous: Request) {
        std::mem::swap(self, &mut previous);
        self.merge_back(previous);
    }

    /// Stamps every bio of the request with the time of its submission.
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

    /// What to do.
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

    /// Whether it was merged from several bios.
    #[inline]
    pub fn is_merged(&self) -> bool {
        self.0.segments() > 1
    }

    /// Its number among the started requests of the channel.
    #[inline]
    pub fn tag(&self) -> Tag {
        Tag(self.0.slot().tag)
    }

    /// The request's data in the order of its sectors. Empty for operations without data.
    #[inline]
    pub fn segments(&self) -> Segments<'_> {
        let next = if self.op().has_data() { Some(self.0.head()) } else { None };
        Segments { next, _request: self }
    }

    /// The request, to look at.
    #[inline]
    pub(crate) fn request(&self) -> &Request {
        &self.0
    }

    /// Ends the token's life without the panic of `Drop`.
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

/// A completed request on its way home.
#[derive(Debug)]
#[must_use = "its bios wait for their completions"]
pub struct Ended(Request);

impl Ended {
    /// What was to be done.
    #[inline]
    pub fn op(&self) -> Op {
        self.0.op()
    }

    /// Its length in sectors.
    #[inline]
    pub fn sectors(&self) -> u64 {
        self.0.sectors()
    }

    /// The number of its first bio's slot, below the channel's depth: for a gate that keeps
    /// something about each request.
    #[inline]
    pub fn index(&self) -> u16 {
        self.0.index()
    }

    /// The slot of its first bio; the channel owns the slots again.
    #[inline]
    pub(crate) fn head(&self) -> NonNull<Slot> {
        self.0.head()
    }

    /// The tag that it held, if it was started at all.
    #[inline]
    pub(crate) fn tag(&self) -> Option<Tag> {
        let tag = self.0.slot().tag;
        (tag != TAG_NONE).then_some(Tag(tag))
    }

    /// How it ended.
    #[inline]
    pub fn status(&self) -> Status {
        self.0.slot().status
    }

    /// Whether it comes home undone, to be offered again bio by bio.
    #[inline]
    pub(crate) fn is_returned(&self) -> bool {
        self.0.slot().stage == Stage::Returned
    }

    /// The request that has ended.
    #[inline]
    pub(crate) fn into_request(self) -> Request {
        self.0
    }

    /// The request that came home undone; it holds no tag any more.
    pub(crate) fn into_undone(self) -> Request {
        let Ended(mut request) = self;
        let slot = request.slot_mut();
        (slot.stage, slot.tag) = (Stage::Plain, TAG_NONE);
        request
    }

    /// Whether it was a write that an append was made of.
    pub(crate) fn is_made_append(&self) -> bool {
        self.op() == Op::Write && self.0.slot().bio.op == Op::ZoneAppend
    }

    /// The append once more that it was made of. The tag is somebody else's again.
    pub(crate) fn append_again(self) -> Request {
        let Ended(mut request) = self;
        let slot = request.slot_mut();
        (slot.op, slot.sector, slot.tag) = (Op::ZoneAppend, slot.bio.sector, TAG_NONE);
        request
    }

    /// Where it landed, for an append that succeeded; otherwise its first sector.
    #[inline]
    pub fn sector(&self) -> Sector {
        self.0.sector()
    }
}
