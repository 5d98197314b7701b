//! The stack: the whole path between `push` and the device queue, and back, compiled into one type.
//!
//! ```text
//! push ─── check ▸ split ▸ plug (merge)
//! submit ─ plug ▸ zone write plug ▸ FIFO ▸ channel tag ▸ device queue
//! reap ◂── completion batch ◂ pieces, flush parts ◂ tag freed ◂ zone write plug released ◂──┘
//! ```
//!
//! A plain read or write that is the only bio of the channel goes from the plug to the completion
//! batch, if the device executes it inline.
//!
//! Requests wait in the FIFO for a channel tag. After the stack come the parts that it owns: the
//! plug, the slots, which hold the accepted bios, and the tags, which number the started requests.
//! `rules.rs` says what becomes of a bio. A fault injector and the scheduler are not in this file:
//! they wrap the device queue.
//!
//! A stack belongs to one thread. After `new` it allocates nothing, and it reads the clock once a
//! batch.
#![allow(unsafe_code)]

use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::group::EndsCounters;
use super::rules::{self, Route, Rules, Unsubmitted};
use super::stats::{ChannelStats, NEVER_STARTED, Tally};
use super::{Channel, Waker};
use crate::bio::{Bio, BufRef, Completion, Flags, Op, RegionId, Status};
use crate::clock::{Clock, Monotonic};
use crate::device::{DeviceQueue, Due};
use crate::geometry::Geometry;
use crate::limits::Limits;
use crate::region::Region;
use crate::request::{
    Batch, CompletedRequest, CompletionBatch, MergeRules, Request, Ring, SLOT_NONE, Slot, Stage,
};
use crate::units::{Nanos, SECTOR_SHIFT, Sector, Tag};
use crate::work::InlineRequest;
use crate::zone::gate::{Gate, GateQueues, NoGate};

/// The interval, in nanoseconds, at which a channel that is being dropped polls for requests that
/// only it waits for.
const CLOSING_LOOK_NS: u64 = 10_000_000;

/// Longest sleep while a write waits in the zone write plug. Other channels wake this one; the
/// bound covers a wakeup that is missing.
const GATE_SLEEP_MAX: Duration = Duration::from_millis(50);

/// Bounds of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelConfig {
    /// Maximum number of bios between push and reap, from 4 to 32768. Each piece of a split bio is
    /// counted too.
    pub depth: u16,
}

impl Default for ChannelConfig {
    fn default() -> ChannelConfig {
        ChannelConfig { depth: 256 }
    }
}

/// A channel over a zone write plug and a device queue. The alignment prevents false sharing: every
/// I/O writes to the stack, and the adjacent memory may belong to another thread.
#[repr(align(128))]
pub struct Stack<Q: DeviceQueue, C: Clock = Monotonic, G: Gate = NoGate> {
    queue: Q,
    /// Requests that wait for a channel tag, first in, first out, as under Linux's scheduler
    /// `none`.
    waiting: Ring<Request>,
    gate: G,
    queues: GateQueues,
    clock: C,
    rules: Rules,
    plug: Plug,
    slots: Slots,
    tags: Tags,
    batch: Batch,
    done: CompletionBatch,
    unsubmitted: Option<Unsubmitted>,
    in_flight: usize,
    regions: Vec<Option<Arc<Region>>>,
    stats: Arc<ChannelStats>,
    tally: Tally,
    /// The channel is being dropped: it starts nothing more, not even the next part of a flush
    /// sequence.
    closing: bool,
    /// The last field: all others are dropped before it.
    _counters_end: EndsCounters,
}

impl<Q: DeviceQueue, C: Clock> Stack<Q, C> {
    /// A channel of `config.depth` bios over a queue of a device with this geometry and these
    /// limits, without a zone write plug.
    ///
    /// # Panics
    /// If the depth is out of range. The configuration's parser checks the range.
    pub fn new(
        config: ChannelConfig,
        geometry: &Geometry,
        limits: &Limits,
        queue: Q,
        clock: C,
        stats: Arc<ChannelStats>,
    ) -> Stack<Q, C> {
        Stack::with_gate(config, geometry, limits, (NoGate, queue), clock, stats)
    }
}

impl<Q: DeviceQueue, C: Clock, G: Gate> Stack<Q, C, G> {
    /// A channel as by [`Stack::new`], with a zone write plug. The channel's user sees these
    /// limits.
    ///
    /// # Panics
    /// If the depth is out of range, as for [`Stack::new`].
    pub fn with_gate(
        config: ChannelConfig,
        geometry: &Geometry,
        limits: &Limits,
        (gate, queue): (G, Q),
        clock: C,
        stats: Arc<ChannelStats>,
    ) -> Stack<Q, C, G> {
        assert!((4..=32768).contains(&config.depth), "depth {} is out of range", config.depth);
        let depth = usize::from(config.depth);
        Stack {
            queue,
            waiting: Ring::with_capacity(depth),
            gate,
            queues: GateQueues::new(if G::ACTIVE { depth } else { 0 }, Arc::clone(&stats)),
            clock,
            rules: Rules::new(geometry, limits),
            plug: Plug::new(depth, limits),
            slots: Slots::new(config.depth),
            tags: Tags::new(limits.queue_depth.clamp(1, config.depth)),
            batch: Batch::with_capacity(depth),
            done: CompletionBatch::with_capacity(depth),
            unsubmitted: None,
            in_flight: 0,
            regions: Vec::new(),
            _counters_end: EndsCounters(Arc::clone(&stats)),
            stats,
            tally: Tally::default(),
            closing: false,
        }
    }

    /// Takes a bio into a slot. The caller has checked that a slot is free.
    #[inline]
    fn accept(&mut self, bio: &Bio) {
        self.in_flight += 1;
        if self.rules.is_plain(bio)
            && let Ok(data) = self.resolve(bio)
        {
            let slot = self.slots.take(bio, data).expect("push asked for room");
            self.plug(slot);
        } else if bio.op.has_range() {
            self.accept_any(bio);
        } else {
            self.accept_without_range(bio);
        }
    }

    /// Takes a bio without a range, and ignores its range fields.
    #[cold]
    fn accept_without_range(&mut self, bio: &Bio) {
        self.accept_any(&rules::normal(bio));
    }

    /// Takes a bio that is invalid, too long, or not a plain read or write.
    fn accept_any(&mut self, bio: &Bio) {
        let (data, status) = match self.rules.check(bio).and_then(|()| self.resolve(bio)) {
            Ok(data) => (data, Status::Ok),
            Err(status) => (NonNull::dangling(), status),
        };
        let slot = self.slots.take(bio, data).expect("push asked for room");
        if !status.is_ok() {
            // SAFETY: the slot stays taken until `reap` has seen the request.
            let request = unsafe { Request::of(slot) };
            self.completions().enter(request, status);
        } else if self.rules.piece_sectors(bio) < bio.sectors {
            self.split(slot, bio, data);
        } else {
            self.route(slot, bio);
        }
    }

    /// Adds the request of a slot's bio to the plug.
    #[inline(always)]
    fn plug(&mut self, slot: NonNull<Slot>) {
        // SAFETY: the slot was just taken; this request is the only one that refers to it, and the
        // slot stays taken until the request has completed.
        let request = unsafe { Request::of(slot) };
        let op = request.op();
        if self.plug.add(request) {
            self.stats.merged(op);
        }
    }

    /// The address of a bio's data; `INVAL` unless the data lies in a registered region.
    #[inline]
    fn resolve(&self, bio: &Bio) -> Result<NonNull<u8>, Status> {
        if !bio.op.has_data() {
            return Ok(NonNull::dangling());
        }
        self.address(bio.buf, bio.sectors).ok_or(Status::Inval)
    }

    /// The address of `sectors` sectors in a region, if the region is registered and contains them.
    #[inline]
    fn address(&self, buf: BufRef, sectors: u64) -> Option<NonNull<u8>> {
        let region = self.regions.get(buf.region.0 as usize)?.as_ref()?;
        region.range(buf.offset, sectors << SECTOR_SHIFT)
    }

    /// Passes a bio, or a piece of one, to the plug, or completes it if it needs no request.
    fn route(&mut self, mut slot: NonNull<Slot>, bio: &Bio) {
        match rules::route(bio, self.rules.limits()) {
            Route::Plain(flags) => {
                // SAFETY: the slot was just taken, and no request refers to it.
                unsafe { slot.as_mut().bio.flags = flags };
                self.plug(slot);
            }
            Route::Nothing => {
                // SAFETY: the slot was just taken and stays taken until `reap` has seen the
                // request.
                let request = unsafe { Request::of(slot) };
                self.completions().enter(request, Status::Ok);
            }
            Route::Sequence(stage) => {
                // SAFETY: the slot was just taken and stays taken until `reap` has seen the
                // request.
                let request = unsafe { rules::flush_part(slot, stage, self.rules.limits()) };
                self.plug.add(request);
            }
        }
    }

    /// Begins to split a bio. A flush sequence, if needed, applies to the whole bio.
    #[cold]
    fn split(&mut self, mut slot: NonNull<Slot>, bio: &Bio, data: NonNull<u8>) {
        let limits = self.rules.limits();
        let stage = match rules::route(bio, limits) {
            Route::Sequence(stage) => stage,
            Route::Plain(_) | Route::Nothing => Stage::Plain,
        };
        // SAFETY: the slot was just taken, and no request refers to it.
        let parent = unsafe { slot.as_mut() };
        rules::begin_split(parent);
        parent.stage = stage;
        let waits = stage == Stage::PreFlush;
        let pieces = Bio { flags: rules::piece_flags(bio, limits), ..*bio };
        // The flush is a request of the whole bio.
        let whole_sectors = if waits { 0 } else { bio.sectors };
        let parent = parent.index;
        let unsubmitted = Unsubmitted { bio: pieces, data, parent, waits, whole_sectors };
        self.unsubmitted = Some(unsubmitted);
        if waits {
            // SAFETY: the slot stays taken until the bio is complete, and no other request refers
            // to it until the flush has completed.
            let request = unsafe { rules::flush_part(slot, stage, limits) };
            self.plug.add(request);
        } else {
            self.cut_rest();
        }
    }

    /// Cuts the bio that is being split into pieces, while slots are free.
    #[cold]
    fn cut_rest(&mut self) {
        let Some(mut unsubmitted) = self.unsubmitted.take_if(|unsubmitted| !unsubmitted.waits)
        else {
            return;
        };
        let mut parent = self.slots.at(unsubmitted.parent);
        while !unsubmitted.is_empty() {
            if self.slots.room() == 0 {
                self.unsubmitted = Some(unsubmitted);
                return;
            }
            let (bio, data) = unsubmitted.cut(self.rules.piece_sectors(&unsubmitted.bio));
            let mut slot = self.slots.take(&bio, data).expect("there is room");
            // SAFETY: this bio has taken both slots, and no request refers to either yet.
            unsafe {
                slot.as_mut().parent = unsubmitted.parent;
                parent.as_mut().pieces += 1;
            }
            self.route(slot, &bio);
        }
        // SAFETY: only slot numbers refer to the slot of a parent, never a request.
        let complete =
            rules::piece_done(unsafe { parent.as_mut() }, Status::Ok, unsubmitted.bio.sector);
        debug_assert!(!complete, "the last piece was cut just now");
    }

    /// Starts waiting requests while the device and the tags have capacity.
    #[inline]
    fn dispatch(&mut self, now: Nanos) {
        while !self.waiting.is_empty() {
            let room = self.queue.room().min(self.tags.room());
            for _ in 0..room {
                let Some(request) = self.waiting.pop_front() else { break };
                let tag = self.tags.take().expect("room counts the free tags");
                self.batch.start(request, tag);
            }
            if !self.start(now) {
                return;
            }
        }
    }

    /// Executes the only bio of the channel, which is in the plug, if it is a plain read or write
    /// and the device executes it inline. Returns `false` if the bio has to be submitted.
    #[inline(never)] // Keeps `submit` of a batch short.
    fn execute_only(&mut self, now: Nanos) -> bool {
        let Some(request) = self.plug.requests.first() else { return false };
        // SAFETY: the request is in the plug, so no other thread has its slot.
        let slot = unsafe { request.head().as_ref() };
        let (op, sector) = (slot.bio.op, slot.bio.sector);
        // A piece of a split bio has a parent, and a part of a flush sequence has a stage.
        if (slot.stage, slot.parent) != (Stage::Plain, SLOT_NONE)
            || !matches!(op, Op::Read | Op::Write)
            || slot.bio.flags.intersects(Flags::FUA | Flags::PREFLUSH)
            || (G::ACTIVE && !self.gate.may_execute_inline(op, sector))
        {
            return false;
        }
        let single = InlineRequest::new(op, sector, slot.bio.sectors, slot.data);
        let Some(status) = self.queue.execute_inline(single) else { return false };
        let mut request = self.plug.requests.pop().expect("it is the first");
        request.stamp(now);
        request.exchange_tag(self.tags.take().expect("nothing else is started"));
        self.completions().put(request.end_with(status));
        true
    }

    /// Submits the plugged requests, stamped with the time, and starts what the device accepts. If
    /// no request waits in the FIFO, they go to the device directly, as in Linux.
    #[inline]
    fn unplug(&mut self, now: Nanos) {
        if G::ACTIVE {
            return self.unplug_into_gate(now);
        }
        let direct =
            if self.waiting.is_empty() { self.queue.room().min(self.tags.room()) } else { 0 };
        let mut requests = self.plug.drain();
        for mut request in requests.by_ref().take(direct) {
            request.stamp(now);
            let tag = self.tags.take().expect("room counts the free tags");
            self.batch.start(request, tag);
        }
        for mut request in requests {
            request.stamp(now);
            self.waiting.push_back(request);
        }
        if self.batch.is_empty() || self.start(now) {
            self.dispatch(now);
        }
    }

    /// Hands the batch to the device; returns whether the device may accept more requests now.
    #[inline]
    fn start(&mut self, now: Nanos) -> bool {
        if self.batch.is_empty() {
            return false;
        }
        self.queue.start(now, &mut self.batch, &mut self.done);
        if G::ACTIVE {
            self.leave_gate();
        }
        self.batch.is_empty() || self.requeue_unstarted()
    }

    /// Completes a request: frees its tag and completes each of its bios, or advances their
    /// sequences.
    #[inline]
    fn finish(&mut self, ended: CompletedRequest, now: Nanos, out: &mut Vec<Completion>) {
        let tag = ended.tag();
        if let Some(tag) = tag {
            self.tags.put(tag);
        }
        let (status, landed) = (ended.status(), ended.sector());
        let mut next = Some(ended.head());
        while let Some(slot) = next {
            // SAFETY: the request has completed, so its slots belong to this channel again.
            let slot_ref = unsafe { slot.as_ref() };
            next = slot_ref.next;
            let latency_ns =
                if tag.is_some() { now.since(slot_ref.submitted) } else { NEVER_STARTED };
            if slot_ref.stage != Stage::Plain || slot_ref.parent != SLOT_NONE {
                if slot_ref.stage == Stage::Returned {
                    return self.requeue_returned(ended);
                }
                self.finish_rare(slot, (status, landed), latency_ns, out);
                continue;
            }
            let append = slot_ref.bio.op == Op::ZoneAppend && status.is_ok();
            let sector = if append { landed } else { slot_ref.bio.sector };
            self.complete(slot, status, sector, latency_ns, out);
        }
    }

    /// Handles the end of a part of a flush sequence or of a piece of a split bio.
    #[cold]
    fn finish_rare(
        &mut self,
        mut slot: NonNull<Slot>,
        (status, landed): (Status, Sector),
        latency_ns: u64,
        out: &mut Vec<Completion>,
    ) {
        // SAFETY: the request has completed, so the slot belongs to this channel again.
        let slot_ref = unsafe { slot.as_mut() };
        let next = rules::next_part(slot_ref, status, landed, self.rules.limits());
        let next = next.filter(|_| !self.closing);
        if let Some(unsubmitted) = self.unsubmitted.as_mut().filter(|unsubmitted| unsubmitted.waits)
            && unsubmitted.parent == slot_ref.index
        {
            if let Some(stage) = next {
                // The pieces are the next part of the sequence; `reap` cuts them now.
                slot_ref.stage = stage;
                unsubmitted.waits = false;
                return;
            }
            slot_ref.pieces = 0;
            self.unsubmitted = None;
        }
        if let Some(stage) = next {
            self.follow(slot, stage);
            return;
        }
        let sector = slot_ref.bio.sector;
        if slot_ref.parent == SLOT_NONE {
            self.complete(slot, status, sector, latency_ns, out);
            return;
        }
        let mut parent = self.slots.at(slot_ref.parent);
        self.slots.put(slot_ref.index);
        // SAFETY: a parent's slot stays taken until its last piece completes, and only slot numbers
        // refer to it.
        let parent_ref = unsafe { parent.as_mut() };
        if rules::piece_done(parent_ref, status, sector) {
            let (status, sector) = (parent_ref.status, parent_ref.bio.sector);
            let next = rules::next_part(parent_ref, status, sector, self.rules.limits());
            match next.filter(|_| !self.closing) {
                Some(stage) => self.follow(parent, stage),
                None => self.complete(parent, status, sector, latency_ns, out),
            }
        }
    }

    /// Submits the next part of a flush sequence.
    fn follow(&mut self, slot: NonNull<Slot>, stage: Stage) {
        // SAFETY: the slot stays taken, and only the next request of the sequence refers to it.
        let request = unsafe { rules::flush_part(slot, stage, self.rules.limits()) };
        if G::ACTIVE {
            self.enter_gate(request);
        } else {
            self.waiting.push_back(request);
        }
    }

    /// Completes a bio to its submitter and frees its slot.
    ///
    /// Always inlined: for a plain bio the call costs as much as the body.
    #[inline(always)]
    fn complete(
        &mut self,
        slot: NonNull<Slot>,
        status: Status,
        sector: Sector,
        latency_ns: u64,
        out: &mut Vec<Completion>,
    ) {
        // SAFETY: the slot belongs to this channel, and no request refers to it.
        let slot = unsafe { slot.as_ref() };
        let bio = &slot.bio;
        self.tally.add(&self.stats, bio.op, status.is_ok(), bio.sectors, latency_ns);
        out.push(Completion { user_data: bio.user_data, sector, status });
        self.slots.put(slot.index);
        self.in_flight -= 1;
    }

    /// The completion batch above the zone write plug: requests that the channel has to complete.
    #[inline(always)]
    fn completions(&mut self) -> &mut CompletionBatch {
        if G::ACTIVE { self.queues.completions() } else { &mut self.done }
    }

    /// Submits the plugged requests, stamped with the time, to the zone write plug and starts what
    /// can start.
    fn unplug_into_gate(&mut self, now: Nanos) {
        for mut request in self.plug.drain() {
            request.stamp(now);
            self.gate.enter(request, &mut self.queues);
        }
        self.queue_forwarded();
        self.dispatch(now);
        while self.catch_up(now) {}
    }

    /// Lets the zone write plug do one slow step; returns whether it did one.
    fn catch_up(&mut self, now: Nanos) -> bool {
        let busy = self.gate.catch_up(&mut self.queues);
        if busy {
            self.queue_forwarded();
            self.dispatch(now);
        }
        busy
    }

    /// Submits one request of a flush sequence to the zone write plug.
    fn enter_gate(&mut self, request: Request) {
        self.gate.enter(request, &mut self.queues);
        self.queue_forwarded();
    }

    /// Passes the device's completions through the zone write plug, which may release waiting
    /// writes.
    fn leave_gate(&mut self) {
        while let Some(ended) = self.done.take() {
            if ended.is_returned() {
                self.tags.put(ended.tag().expect("it was started"));
                self.requeue_returned(ended);
            } else {
                self.gate.leave(ended, &mut self.queues);
            }
        }
        while let Some(ended) = self.queues.next_again() {
            if let Some(tag) = ended.tag() {
                self.tags.put(tag);
            }
            self.gate.requeue(ended.append_again(), &mut self.queues);
        }
        self.queue_forwarded();
    }

    /// Handles the device's completions, and releases writes that waited for other channels.
    fn poll_gate(&mut self, now: Nanos) {
        self.gate.poll(now, &mut self.queues);
        self.leave_gate();
    }

    /// Moves requests that the zone write plug has released to the FIFO.
    fn queue_forwarded(&mut self) {
        while let Some(request) = self.queues.next() {
            self.waiting.push_back(request);
        }
    }

    /// Returns the requests that the device did not start to the FIFO, in order. Returns
    /// whether one of them was broken up, so that another start makes sense now.
    #[cold]
    fn requeue_unstarted(&mut self) -> bool {
        let broken = self.batch.take_broken();
        while let Some((request, tag)) = self.batch.take_unstarted() {
            self.tags.put(tag);
            if broken && self.batch.is_empty() {
                self.requeue_bios(request);
            } else {
                self.waiting.push_front(request);
            }
        }
        broken
    }

    /// Requeues the bios of a request that the device returned unexecuted. Its tag is free.
    #[cold]
    fn requeue_returned(&mut self, ended: CompletedRequest) {
        self.requeue_bios(ended.into_undone());
    }

    /// Requeues the bios of a merged request one by one; they are never merged again.
    fn requeue_bios(&mut self, request: Request) {
        // Reverses the chain in place, because the request that is requeued last comes first.
        let first = request.head();
        let mut next = Some(first);
        let mut reversed: Option<NonNull<Slot>> = None;
        while let Some(mut slot) = next {
            // SAFETY: the chain belongs to a request that only this function holds.
            let slot_ref = unsafe { slot.as_mut() };
            next = slot_ref.next;
            slot_ref.next = reversed;
            reversed = Some(slot);
        }
        while let Some(mut slot) = reversed {
            let head = slot;
            // SAFETY: only this function holds the chain; the slot's new request is the only one
            // that refers to it.
            let single = unsafe {
                reversed = slot.as_mut().next.take();
                slot.as_mut().bio.flags = slot.as_ref().bio.flags | Flags::NOMERGE;
                Request::of(slot)
            };
            if G::ACTIVE && head != first {
                // SAFETY: the first bio's slot belongs to this channel; only its number is read.
                let index = unsafe { first.as_ref() }.index;
                if let Some(single) = self.gate.broken(index, single) {
                    self.waiting.push_front(single);
                }
            } else {
                self.waiting.push_front(single);
            }
        }
    }

    /// When the layers below the zone write plug next have work to do.
    fn due_below(&self) -> Due {
        if !self.done.is_empty() || (G::ACTIVE && self.queues.has_completions()) {
            return Due::At(Nanos(0));
        }
        let room = self.queue.room().min(self.tags.room());
        if room > 0 && !self.waiting.is_empty() && self.queue.due() == Due::Never {
            return Due::At(Nanos(0));
        }
        self.queue.due()
    }

    /// Sleeps while other threads hold requests of this channel.
    #[cold]
    fn wait_for_others(&mut self, deadline: Due) {
        let is_complete = !self.done.is_empty() || (G::ACTIVE && self.queues.has_completions());
        let can_start = !self.waiting.is_empty() && self.queue.room().min(self.tags.room()) > 0;
        if !is_complete && !can_start {
            let gate = if G::ACTIVE { self.gate.due() } else { Due::Never };
            self.queue.sleep(gate.earlier(deadline), &self.clock);
        }
    }

    /// Sleeps until `reap` would find a completion, or until the deadline.
    fn sleep(&mut self, deadline: Option<Instant>) {
        if self.queue.waits_for_others() {
            let deadline = deadline.map_or(Due::Never, |at| Due::At(Monotonic::nanos_of(at)));
            return self.wait_for_others(deadline);
        }
        if G::ACTIVE && self.gate.waits() && self.due_below() == Due::Never {
            return self.gate.sleep(Monotonic::until(deadline, GATE_SLEEP_MAX));
        }
        let deadline = deadline.map_or(Due::Never, |at| Due::At(Monotonic::nanos_of(at)));
        match self.due() {
            Due::Never => {}
            due => {
                if let Due::At(at) = due.earlier(deadline) {
                    self.clock.sleep_until(at);
                }
            }
        }
    }
}

impl<Q: DeviceQueue, C: Clock, G: Gate> Channel for Stack<Q, C, G> {
    fn register(&mut self, region: Arc<Region>) -> RegionId {
        let free = self.regions.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.regions.push(None);
            self.regions.len() - 1
        });
        self.regions[index] = Some(region);
        RegionId(index as u32)
    }

    fn unregister(&mut self, region: RegionId) -> bool {
        if self.in_flight > 0 {
            return false;
        }
        match self.regions.get_mut(region.0 as usize) {
            Some(entry) => entry.take().is_some(),
            None => false,
        }
    }

    fn push(&mut self, bios: &[Bio]) -> usize {
        let mut taken = 0;
        for bio in bios {
            if self.slots.room() == 0 || self.unsubmitted.is_some() {
                break;
            }
            self.accept(bio);
            taken += 1;
        }
        taken
    }

    fn submit(&mut self) {
        if !self.plug.is_empty() {
            let now = self.clock.now();
            if self.in_flight != 1 || !self.execute_only(now) {
                self.unplug(now);
            }
        }
    }

    #[inline]
    fn execute_inline(
        &mut self,
        op: Op,
        sector: Sector,
        sectors: u64,
        buf: BufRef,
    ) -> Option<Status> {
        // Requests in flight go first.
        if self.in_flight > 0 || !self.rules.is_plain_range(op, sector, sectors) {
            return None;
        }
        if G::ACTIVE && !self.gate.may_execute_inline(op, sector) {
            return None;
        }
        let data = self.address(buf, sectors)?;
        let status = self.queue.execute_inline(InlineRequest::new(op, sector, sectors, data))?;
        self.stats.executed_inline(op, status.is_ok(), sectors);
        Some(status)
    }

    fn note_latency(&mut self, op: Op, latency_ns: u64, bios: u64) {
        self.stats.latency(op, latency_ns, bios);
    }

    fn reap(&mut self, out: &mut Vec<Completion>) -> usize {
        if self.in_flight == 0 {
            return 0;
        }
        let before = out.len();
        let now = self.clock.now();
        self.queue.poll(now, &mut self.done);
        if G::ACTIVE {
            self.poll_gate(now);
        }
        loop {
            while let Some(ended) = self.completions().take() {
                self.finish(ended, now, out);
            }
            if self.unsubmitted.as_ref().is_some_and(|unsubmitted| !unsubmitted.waits) {
                self.cut_rest();
                self.unplug(now);
            } else if !self.waiting.is_empty() {
                self.dispatch(now);
            } else if !(G::ACTIVE && self.catch_up(now)) {
                break;
            }
            if self.completions().is_empty() && !(G::ACTIVE && self.catch_up(now)) {
                break;
            }
        }
        self.tally.settle(&self.stats);
        out.len() - before
    }

    fn wait(&mut self, deadline: Option<Instant>) {
        self.sleep(deadline);
    }

    fn due(&self) -> Due {
        let due = self.due_below();
        if G::ACTIVE { due.earlier(self.gate.due()) } else { due }
    }

    fn set_waker(&mut self, waker: Waker) {
        self.gate.set_waker(waker);
    }

    fn descriptor(&mut self) -> Option<RawFd> {
        self.queue.descriptor()
    }

    fn may_sleep(&mut self) -> bool {
        self.queue.may_sleep()
    }

    fn counters(&self) -> Option<Arc<ChannelStats>> {
        Some(Arc::clone(&self.stats))
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

/// Waits for the requests that the device has started, because they point to the slots and regions.
/// Discards requests that were not started: their submitter no longer exists.
impl<Q: DeviceQueue, C: Clock, G: Gate> Drop for Stack<Q, C, G> {
    fn drop(&mut self) {
        drop(self.plug.drain());
        self.gate.close();
        self.unsubmitted = None;
        self.closing = true;
        let mut out = Vec::new();
        while self.tags.taken() > 0 {
            while self.waiting.pop_front().is_some() {}
            self.queue.abort(&mut self.done);
            let ended = self.reap(&mut out);
            out.clear();
            if self.queue.waits_for_others() {
                // The requests started since then may include one that no other thread waits for.
                let soon = self.clock.now() + CLOSING_LOOK_NS;
                self.wait_for_others(Due::At(soon));
                continue;
            }
            match self.due() {
                Due::At(at) => self.clock.sleep_until(at),
                // The device reports nothing in flight although tags are taken: it panicked within
                // a call.
                Due::Never if ended == 0 => return,
                Due::Never => {}
            }
        }
    }
}

// The plug collects pushed bios until `submit` and merges neighbours into one request. As in
// Linux's plug, a bio is compared with the request that was added last, and joins its end (back
// merge) or its start (front merge). A client can notice merging only by the speed. If a device
// would fail a merged request because of some of its bios, the request is broken up again
// ([`Batch::break_up`]).

/// Requests that were pushed and not yet submitted, in order.
#[derive(Debug)]
struct Plug {
    requests: Vec<Request>,
    rules: MergeRules,
}

impl Plug {
    /// An empty plug with space for `depth` requests.
    fn new(depth: usize, limits: &Limits) -> Plug {
        Plug { requests: Vec::with_capacity(depth), rules: MergeRules::new(limits) }
    }

    /// Whether the plug holds no request.
    #[inline]
    fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Adds a request; returns whether it was merged into the previous request.
    #[inline(always)]
    fn add(&mut self, request: Request) -> bool {
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

    /// Removes all requests, in order.
    #[inline]
    fn drain(&mut self) -> std::vec::Drain<'_, Request> {
        self.requests.drain(..)
    }
}

// The two resources of a channel: slots, which hold the bios that it has accepted at fixed
// addresses, and tags, which number its started requests. One thread owns both, so the free ones
// are plain stacks.

/// A fixed number of slots. Requests point to slots, so all access is through raw pointers.
#[derive(Debug)]
pub(super) struct Slots {
    base: NonNull<Slot>,
    count: u16,
    free: Vec<u16>,
}

// SAFETY: the slots are plain data that only this value owns. Requests carry pointers to slots, and
// the channel does not touch the slots of a request until it has completed.
unsafe impl Send for Slots {}

impl Slots {
    /// `count` free slots.
    pub(super) fn new(count: u16) -> Slots {
        let slots: Box<[Slot]> = (0..count).map(Slot::empty).collect();
        let base = NonNull::from(Box::leak(slots)).cast::<Slot>();
        Slots { base, count, free: (0..count).rev().collect() }
    }

    /// Number of free slots.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// Number of taken slots.
    #[inline]
    pub(super) fn taken(&self) -> usize {
        usize::from(self.count) - self.free.len()
    }

    /// Takes a slot for a bio; `None` when all are taken.
    #[inline]
    pub(super) fn take(&mut self, bio: &Bio, data: NonNull<u8>) -> Option<NonNull<Slot>> {
        let index = self.free.pop()?;
        let slot = self.at(index);
        // SAFETY: `at` points into our slots, and no other pointer to a free slot is in use.
        unsafe {
            let slot = &mut *slot.as_ptr();
            slot.bio = *bio;
            slot.data = data;
            slot.parent = SLOT_NONE;
            slot.stage = Stage::Plain;
        }
        Some(slot)
    }

    /// Frees a slot. No request may refer to it.
    #[inline]
    pub(super) fn put(&mut self, index: u16) {
        debug_assert!(index < self.count && self.free.len() < usize::from(self.count));
        self.free.push(index);
    }

    /// The address of a slot.
    #[inline]
    pub(super) fn at(&self, index: u16) -> NonNull<Slot> {
        assert!(index < self.count, "slot numbers come from this table");
        // SAFETY: index < count, so the result lies inside the allocation of `count` slots.
        unsafe { self.base.add(usize::from(index)) }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        let slots = NonNull::slice_from_raw_parts(self.base, usize::from(self.count));
        // SAFETY: `base` and `count` are those of the box that `new` leaked.
        drop(unsafe { Box::from_raw(slots.as_ptr()) });
    }
}

/// The free tags of a channel.
#[derive(Debug)]
pub(super) struct Tags {
    free: Vec<u16>,
    count: u16,
}

impl Tags {
    /// Tags from 0 to `count`.
    pub(super) fn new(count: u16) -> Tags {
        Tags { free: (0..count).rev().collect(), count }
    }

    /// Number of free tags.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// Number of taken tags.
    #[inline]
    pub(super) fn taken(&self) -> usize {
        usize::from(self.count) - self.free.len()
    }

    /// Takes the tag that was freed last: its cache lines are still in the cache.
    #[inline]
    pub(super) fn take(&mut self) -> Option<Tag> {
        self.free.pop().map(Tag)
    }

    /// Frees a tag.
    #[inline]
    pub(super) fn put(&mut self, tag: Tag) {
        debug_assert!(
            tag.0 < self.count && !self.free.contains(&tag.0),
            "{tag:?} given back twice"
        );
        self.free.push(tag.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tag_is_taken_once() {
        let mut tags = Tags::new(3);
        let taken: Vec<Tag> = std::iter::from_fn(|| tags.take()).collect();
        assert_eq!(taken, [Tag(0), Tag(1), Tag(2)]);
        assert_eq!((tags.room(), tags.taken()), (0, 3));
        tags.put(Tag(1));
        assert_eq!(tags.take(), Some(Tag(1)));
        assert_eq!(tags.take(), None);
    }
}
