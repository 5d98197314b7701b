//! The product's scheduler queue: submit rings, and a dispatcher, which is the first thread that
//! arrives.
//!
//! An insertion publishes a batch in the submit ring of the submitter. To dispatch, a thread
//! becomes the dispatcher or notifies the present one. The dispatcher drains all submit rings in
//! one pass, merges new requests with waiting ones, and removes the next requests. While the device
//! is full, requests stay in the submit rings unless one of them fills up. A waiting request holds
//! no tag.
//!
//! If nothing waits and the device has capacity, requests take the fast path and stay with their
//! thread. For this a submit ring gets a lease: a number of requests that may be in flight, and its
//! own copy of the sweep. Its channel advances the lease by itself, without becoming the
//! dispatcher, on a cache line that no other thread reads. A thread that needs the order for
//! anything else first revokes the leases, so that the order accounts for the passed requests. A
//! thread that leaves requests waiting marks the leases with requests in flight, so that the
//! channel that completes one of them dispatches next.
#![allow(unsafe_code)]

use std::sync::Arc;

use blockyard_sync::atomics::yield_now;
use blockyard_sync::combining_lock::{CombiningLock, RoundResult, RunResult};
use blockyard_sync::completion_queue::{CompletionQueue, Receiver};
use blockyard_sync::leases::Leases;
use blockyard_sync::submit_rings::{SubmitRing, SubmitRings};

use super::{
    Bypass, BypassRefusal, Left, QueuedRequest, Report, SchedulerQueue, SchedulerQueueConfig,
    SortedBatch,
};
use crate::bio::{Op, Prio};
use crate::sched::deadline::{CLASSES, Deadline, Direction, Item, Kind, Sweep};
use crate::units::Nanos;

/// Submit rings of a device: submitters beyond this number share rings. Few and small ones for
/// tests with random interleavings, so that they fill up.
const RINGS: usize = if cfg!(shuttle) { 16 } else { 128 };
/// Capacity of a submit ring, in requests.
const RING_LEN: usize = if cfg!(shuttle) { 4 } else { 128 };
/// A submit ring with this number of requests is drained even if the device is full.
const DRAIN_ABOVE: usize = RING_LEN / 2;
/// Maximum number of requests that one pass drains from the submit rings.
const DRAIN_MAX: usize = if cfg!(shuttle) { 4 } else { 256 };
/// A dispatcher that is notified again and again stops after this number of rounds.
const ROUNDS_MAX: usize = 4;

/// How often a thread that wants the fast path checks whether another thread's brief dispatch has
/// ended. This takes less than a microsecond, while being served by the other thread costs several.
const LOOKS: u32 = if cfg!(shuttle) { 2 } else { 16 };

/// Minimum number of requests of a lease, unless one thread may have fewer. With it a channel needs
/// no new lease for a slightly larger batch.
const LEASE_MIN: u32 = 4;

/// The shared state of the product's scheduler queue: submit rings, order, completion reports and
/// leases.
pub struct Dispatcher {
    rings: Arc<SubmitRings<QueuedRequest>>,
    lock: CombiningLock<DispatchState>,
    reports: Arc<CompletionQueue<Report>>,
    /// The lease of each submit ring: the sweep of passed requests, and how many of them are in
    /// flight.
    leases: Leases<Sweep>,
}

/// What the dispatcher records about a submit ring whose requests take the fast path.
#[derive(Clone, Copy, Debug, Default)]
struct LeaseRecord {
    /// Maximum number of requests in flight by the lease; 0 without a lease.
    most: u32,
    may_write: bool,
    /// Reads and writes that the order counts as in flight.
    in_flight: [u32; 2],
}

/// The state that only the dispatcher accesses.
struct DispatchState {
    order: Deadline<QueuedRequest>,
    reports: Receiver<Report>,
    drained: Vec<QueuedRequest>,
    /// Requests for which the order had no space. They go before those in the submit rings.
    held: Vec<QueuedRequest>,
    refused: Vec<QueuedRequest>,
    /// Requests that were drained together may be inserted in any order: the device has no zones.
    sorts: bool,
    depth: usize,
    /// The minimum number of requests of a lease.
    lease_min: u32,
    /// Requests in flight, without those of leases that are granted now.
    in_flight: usize,
    /// The last round left requests waiting, in the order or in the submit rings.
    left_waiting: bool,
    lease_records: Box<[LeaseRecord; RINGS]>,
    /// One bit per submit ring: it has a lease; it has requests in flight without a lease.
    leased: Bits,
    bypassing: Bits,
    /// Requests that all granted leases together allow in flight, and the part that allows writes.
    reserved: usize,
    reserved_writes: usize,
    /// The class of all leases.
    class: Prio,
    /// When the latest requests of a revoked lease passed.
    swept_at: Nanos,
    /// The submit ring at which the next search for an idle lease begins.
    next_idle: usize,
}

/// One bit for each submit ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Bits([u64; RINGS.div_ceil(64)]);

impl Bits {
    const NONE: Bits = Bits([0; RINGS.div_ceil(64)]);

    #[inline]
    fn set(&mut self, ring: usize, is_set: bool) {
        let bit = 1 << (ring % 64);
        let word = &mut self.0[ring / 64];
        *word = if is_set { *word | bit } else { *word & !bit };
    }

    /// The first set bit at or after `from`.
    #[inline]
    fn next(&self, from: usize) -> Option<usize> {
        (from / 64..self.0.len()).find_map(|index| {
            let low = if index == from / 64 { from % 64 } else { 0 };
            let word = self.0[index] & (u64::MAX << low);
            (word != 0).then(|| index * 64 + word.trailing_zeros() as usize)
        })
    }

    /// Calls `each` with the number of every set bit.
    #[inline]
    fn each(self, mut each: impl FnMut(usize)) {
        let mut from = 0;
        while from < RINGS
            && let Some(ring) = self.next(from)
        {
            each(ring);
            from = ring + 1;
        }
    }
}

impl DispatchState {
    /// Passes requests if nothing else waits, and grants their submit ring a lease for the next
    /// ones. The ring must belong to one channel only.
    #[cold]
    fn admit(
        &mut self,
        leases: &Leases<Sweep>,
        ring: usize,
        sorted: &mut SortedBatch,
        now: Nanos,
    ) -> Result<(), BypassRefusal> {
        if self.left_waiting {
            // The new requests go before requests of a lower class that wait.
            let mut lower = CLASSES.into_iter().skip(sorted.prio() as usize + 1);
            let goes_before = lower.any(|prio| self.order.queued(prio) > 0);
            return Err(if goes_before {
                BypassRefusal::Unfit
            } else {
                BypassRefusal::WaitingFirst
            });
        }
        self.revoke(leases, ring);
        self.apply_reports(leases, now);
        if self.class != sorted.prio() {
            self.revoke_all(leases);
        }
        self.count_all(leases, false);
        if self.lease_records[ring].in_flight != [0; 2]
            || (self.class != sorted.prio() && self.bypassing != Bits::NONE)
        {
            return Err(BypassRefusal::Unfit);
        }
        self.class = sorted.prio();
        let [reads, writes] = sorted.counts();
        let (count, depth) = (reads + writes, self.depth as u32);
        let mut most = count.next_power_of_two().max(self.lease_min).min(depth);
        let throttled_room = self.order.throttled_room();
        let writes_max = throttled_room.saturating_sub(self.reserved_writes).min(self.depth) as u32;
        if writes > 0 {
            most = most.min(writes_max);
        }
        // A channel that only reads reserves nothing of the limit for writes.
        let may_write = writes > 0 || (throttled_room >= self.depth && most <= writes_max);
        if count > most {
            return Err(BypassRefusal::Unfit);
        }
        if !self.frees_capacity(leases, most as usize) {
            // A smaller lease is enough if it holds these requests.
            let left = self.depth.saturating_sub(self.in_flight + self.reserved) as u32;
            if left < count {
                return Err(BypassRefusal::Busy);
            }
            most = most.min(left);
        }
        let sweep = self.order.lend(sorted.prio(), [true, may_write], most, now);
        let mut sweep = sweep.ok_or(BypassRefusal::Unfit)?;
        if !sorted.dispatch(&mut sweep, now) {
            return Err(BypassRefusal::Unfit);
        }
        self.reserved += most as usize;
        self.reserved_writes += if may_write { most as usize } else { 0 };
        self.lease_records[ring] = LeaseRecord { most, may_write, in_flight: [0; 2] };
        self.leased.set(ring, true);
        self.bypassing.set(ring, false);
        // SAFETY: this thread is the dispatcher, so it is the only one that grants leases. The
        // submit ring belongs to its channel, and its old lease was revoked above.
        unsafe { leases.grant(ring, sweep, [reads, writes]) };
        Ok(())
    }

    /// Revokes leases without requests in flight until `count` more requests fit; returns whether
    /// they fit. If revoking all of them would not suffice, revokes none.
    fn frees_capacity(&mut self, leases: &Leases<Sweep>, count: usize) -> bool {
        let has_room =
            |state: &DispatchState| state.in_flight + state.reserved + count <= state.depth;
        if has_room(self) {
            return true;
        }
        let (mut idle, mut next) = (Bits::NONE, self.next_idle);
        let mut missing = self.in_flight + self.reserved + count - self.depth;
        for _ in 0..self.leased.0.iter().map(|word| word.count_ones()).sum::<u32>() {
            let Some(ring) = self.leased.next(next).or_else(|| self.leased.next(0)) else {
                break;
            };
            next = (ring + 1) % RINGS;
            if leases.in_flight(ring, false) == [0; 2] {
                idle.set(ring, true);
                missing = missing.saturating_sub(self.lease_records[ring].most as usize);
            }
            if missing == 0 {
                self.next_idle = next;
                idle.each(|ring| self.revoke(leases, ring));
                // A channel may have passed requests by one of these leases meanwhile.
                return has_room(self);
            }
        }
        false
    }

    /// Revokes the lease of a submit ring, if it has one, and accounts for its requests in the
    /// order.
    fn revoke(&mut self, leases: &Leases<Sweep>, ring: usize) {
        // SAFETY: this thread is the dispatcher, so it is the only one that revokes leases.
        let Some(sweep) = (unsafe { leases.revoke(ring) }) else { return };
        // Of several leases, the one that was used last defines the position of the sweep.
        let is_latest = sweep.at() >= self.swept_at;
        if is_latest {
            self.swept_at = sweep.at();
        }
        self.order.settle(&sweep, is_latest);
        let record = &mut self.lease_records[ring];
        let LeaseRecord { most, may_write, .. } = std::mem::take(record);
        self.reserved -= most as usize;
        self.reserved_writes -= if may_write { most as usize } else { 0 };
        // All its requests count as in flight until `count` checks.
        record.in_flight = sweep.taken();
        self.in_flight += sweep.taken().iter().sum::<u32>() as usize;
        self.leased.set(ring, false);
        self.bypassing.set(ring, true);
        self.count(leases, ring, false);
    }

    /// Revokes all leases, because the order is needed for something else.
    #[inline]
    fn revoke_all(&mut self, leases: &Leases<Sweep>) {
        if self.leased != Bits::NONE {
            self.leased.each(|ring| self.revoke(leases, ring));
        }
        self.swept_at = Nanos(0);
    }

    /// Counts requests of a submit ring without a lease that have completed; returns whether there
    /// were any. With `awaits`, marks the ring: the channel that completes a request of it later
    /// must dispatch.
    fn count(&mut self, leases: &Leases<Sweep>, ring: usize, awaits: bool) -> bool {
        let in_flight = leases.in_flight(ring, awaits);
        let before = std::mem::replace(&mut self.lease_records[ring].in_flight, in_flight);
        for direction in Direction::ALL {
            let at = direction as usize;
            let count = (before[at] - in_flight[at]) as usize;
            if count > 0 {
                self.order.completed_many(Kind { prio: self.class, direction }, count);
                self.in_flight -= count;
            }
        }
        if in_flight == [0; 2] {
            self.bypassing.set(ring, false);
        }
        before != in_flight
    }

    /// Counts completed requests, as `count`, for all submit rings that have requests in flight.
    #[inline]
    fn count_all(&mut self, leases: &Leases<Sweep>, awaits: bool) -> bool {
        let mut is_any = false;
        if self.bypassing != Bits::NONE {
            self.bypassing.each(|ring| is_any |= self.count(leases, ring, awaits));
        }
        is_any
    }

    /// Takes back a request that took the fast path and was not started.
    #[cold]
    fn requeue_undone(
        &mut self,
        leases: &Leases<Sweep>,
        ring: usize,
        queued: QueuedRequest,
        now: Nanos,
    ) {
        // From here on the request waits in the order, so no request may take the fast path.
        self.revoke_all(leases);
        let mut counts = [0; 2];
        counts[queued.kind().direction as usize] = 1;
        leases.end(ring, counts);
        let in_flight = &mut self.lease_records[ring].in_flight;
        *in_flight = [in_flight[0] - counts[0], in_flight[1] - counts[1]];
        self.in_flight -= 1;
        self.order.requeue(queued, now);
    }

    /// Processes the reports.
    #[inline]
    fn apply_reports(&mut self, leases: &Leases<Sweep>, now: Nanos) {
        while let Some(report) = self.reports.take() {
            match report {
                Report::Completed(kind, count) => {
                    let count = count as usize;
                    self.order.completed_many(kind, count);
                    self.in_flight -= count;
                }
                Report::Undone(queued, None) => {
                    self.order.requeue(queued, now);
                    self.in_flight -= 1;
                }
                Report::Undone(queued, Some(ring)) => {
                    self.requeue_undone(leases, ring.into(), queued, now);
                }
                Report::Remainder(queued) => {
                    if let Err(queued) = self.order.insert_at_head(queued, now) {
                        self.held.push(queued);
                    }
                }
            }
        }
    }

    /// Drains the submit rings into the order.
    #[inline]
    fn drain_rings(&mut self, rings: &SubmitRings<QueuedRequest>, at_least: usize, now: Nanos) {
        if !self.held.is_empty() {
            self.retry(now);
        }
        // The space for refused requests bounds the pass, so that a request without space does not
        // block the others.
        let most = DRAIN_MAX.min(self.held.capacity() - self.held.len()).min(self.order.room());
        if most == 0 {
            return;
        }
        // SAFETY: only the dispatcher reaches this code, through the combining lock.
        unsafe { rings.drain(most, at_least, &mut self.drained) };
        let order = &mut self.order;
        self.drained.retain(|queued| {
            // A flush has no sector and does not wait for requests that have one.
            queued.op() != Op::Flush || order.insert_at_head(*queued, now).is_err()
        });
        if self.sorts {
            // In ascending order the positions of successive insertions are close to each other.
            self.drained.sort_unstable_by_key(|queued| queued.sector());
        }
        order.insert_batch(self.drained.drain(..), now, &mut self.held);
    }

    /// One round: processes reports, drains the submit rings, and appends the next requests to
    /// `out`. Returns whether it left the rings alone because the device is full.
    #[inline]
    fn round(
        &mut self,
        scheduler_queue: &Dispatcher,
        now: Nanos,
        is_room: bool,
        end: usize,
        out: &mut Vec<QueuedRequest>,
    ) -> bool {
        self.revoke_all(&scheduler_queue.leases);
        self.apply_reports(&scheduler_queue.leases, now);
        self.count_all(&scheduler_queue.leases, false);
        let free = self.depth - self.in_flight;
        let holds_back = !is_room || free == 0;
        self.drain_rings(&scheduler_queue.rings, if holds_back { DRAIN_ABOVE } else { 0 }, now);
        if !holds_back && !self.is_full() && scheduler_queue.rings.is_occupied() {
            // Requests that arrived during the insertion may merge with the inserted ones.
            self.drain_rings(&scheduler_queue.rings, 0, now);
        }
        let room = free.min(end - out.len());
        let taken = self.order.next_batch(room, now, |queued| out.push(queued));
        self.in_flight += taken;
        holds_back
    }

    /// Whether other threads could start more: tags are free, and a request is or may be next.
    #[inline]
    fn is_more(&self, scheduler_queue: &Dispatcher) -> bool {
        let has_come = || scheduler_queue.rings.is_occupied() && !self.is_full();
        self.in_flight < self.depth && (self.order.is_ready() || has_come())
    }

    /// Whether the order accepts no request before one completes. Requests in the submit rings are
    /// no work then: otherwise a thread that looks for work would find them again and again and
    /// never sleep.
    #[inline]
    fn is_full(&self) -> bool {
        self.order.room() == 0 || self.held.len() == self.held.capacity()
    }

    /// Records and returns whether any request waits, in the order or in the submit rings.
    #[inline]
    fn note_waiting(&mut self, scheduler_queue: &Dispatcher) -> bool {
        self.left_waiting =
            !self.order.is_empty() || !self.held.is_empty() || scheduler_queue.rings.is_occupied();
        self.left_waiting
    }

    #[cold]
    fn retry(&mut self, now: Nanos) {
        std::mem::swap(&mut self.held, &mut self.refused);
        self.order.insert_batch(self.refused.drain(..), now, &mut self.held);
    }
}

impl SchedulerQueue for Dispatcher {
    const NAME: &'static str = "combiner";

    const BYPASSES: bool = true;

    type SubmitRing = SubmitRing<QueuedRequest>;

    fn new(config: &SchedulerQueueConfig) -> Dispatcher {
        let depth = usize::from(config.depth);
        let reports = CompletionQueue::open(2 * depth);
        Dispatcher {
            rings: SubmitRings::new(RINGS, RING_LEN),
            reports: Arc::clone(reports.completion_queue()),
            lock: CombiningLock::new(DispatchState {
                order: config.order(),
                reports,
                drained: Vec::with_capacity(DRAIN_MAX),
                held: Vec::with_capacity(2 * DRAIN_MAX),
                refused: Vec::with_capacity(2 * DRAIN_MAX),
                sorts: config.zones.is_none(),
                depth,
                lease_min: LEASE_MIN.min(config.take_max.into()),
                in_flight: 0,
                left_waiting: false,
                lease_records: Box::new([LeaseRecord::default(); RINGS]),
                leased: Bits::NONE,
                bypassing: Bits::NONE,
                reserved: 0,
                reserved_writes: 0,
                class: Prio::BestEffort,
                swept_at: Nanos(0),
                next_idle: 0,
            }),
            leases: Leases::new(RINGS, Sweep::NONE),
        }
    }

    fn open(&self) -> SubmitRing<QueuedRequest> {
        self.rings.open()
    }

    #[inline]
    fn room(&self, ring: &SubmitRing<QueuedRequest>) -> usize {
        ring.room()
    }

    #[inline]
    fn insert(
        &self,
        ring: &mut SubmitRing<QueuedRequest>,
        requests: &[QueuedRequest],
        _now: Nanos,
    ) -> usize {
        ring.publish(requests)
    }

    #[inline]
    fn dispatch(
        &self,
        _: &mut SubmitRing<QueuedRequest>,
        now: Nanos,
        room: usize,
        out: &mut Vec<QueuedRequest>,
    ) -> Left {
        let (end, is_room) = (out.len() + room, room > 0);
        let (mut rounds, mut is_more) = (0, false);
        let ran = self.lock.run(|state| {
            self.rings.attend();
            let mut holds_back = state.round(self, now, is_room, end, out);
            // A thread that has filled its room calls again. Otherwise requests are left: the
            // channels with passed requests in flight are marked to dispatch when one completes. If
            // one has completed meanwhile, there is more to do now.
            while state.note_waiting(self)
                && !(is_room && out.len() == end)
                && state.count_all(&self.leases, true)
            {
                holds_back = state.round(self, now, is_room, end, out);
            }
            is_more = is_room && out.len() == end && state.left_waiting && state.is_more(self);
            if is_more {
                // This thread may take long until it calls again; meanwhile another thread can
                // dispatch.
                self.rings.abandon();
            }
            self.rings.hold_back(holds_back || state.is_full());
            rounds += 1;
            if rounds < ROUNDS_MAX { RoundResult::Whole } else { RoundResult::Enough }
        });
        match ran {
            // The caller dispatches again anyway.
            _ if is_more => Left::More,
            RunResult::Enough => Left::Undone,
            RunResult::Whole | RunResult::Elsewhere => Left::Nothing,
        }
    }

    #[inline]
    fn bypass(
        &self,
        ring: &mut SubmitRing<QueuedRequest>,
        sorted: &mut SortedBatch,
        now: Nanos,
    ) -> Result<Bypass, BypassRefusal> {
        if ring.is_shared() {
            // Two channels cannot share a lease.
            return Err(BypassRefusal::Unfit);
        }
        let ring = ring.number();
        let counts = sorted.counts();
        let step = |sweep: &mut Sweep, in_flight: u32| {
            in_flight + counts[0] + counts[1] <= sweep.most()
                && sorted.prio() == sweep.prio()
                && sorted.dispatch(sweep, now)
        };
        // SAFETY: the submit ring belongs to this channel, which is borrowed mutably.
        if unsafe { self.leases.begin(ring, counts, step) } {
            return Ok(Bypass { is_called: false });
        }
        let admit = |state: &mut DispatchState| state.admit(&self.leases, ring, sorted, now);
        match self.lock.try_briefly(LOOKS, admit) {
            None => Err(BypassRefusal::Busy),
            Some((Ok(()), is_called)) => Ok(Bypass { is_called }),
            Some((Err(_), true)) => Err(BypassRefusal::WaitingFirst),
            Some((Err(why), false)) => Err(why),
        }
    }

    #[inline]
    fn bypass_completed(&self, ring: &mut SubmitRing<QueuedRequest>, counts: [u32; 2]) -> bool {
        self.leases.end(ring.number(), counts)
    }

    fn bypass_id(&self, ring: &SubmitRing<QueuedRequest>) -> u16 {
        ring.number() as u16
    }

    #[inline]
    fn report(&self, reports: &mut Vec<Report>) {
        if !reports.is_empty() {
            self.reports.post(reports.drain(..));
        }
    }

    #[inline]
    fn is_work(&self) -> bool {
        self.rings.is_work()
    }

    fn notify(&self) -> bool {
        self.lock.notify()
    }

    fn abandon(&self) {
        self.rings.abandon();
    }

    #[inline]
    fn is_abandoned(&self) -> bool {
        self.rings.is_abandoned()
    }

    fn with_order(&self, work: &mut dyn FnMut(&mut Deadline<QueuedRequest>)) {
        loop {
            let ran = self.lock.run(|state| {
                state.revoke_all(&self.leases);
                state.apply_reports(&self.leases, Nanos(0));
                state.count_all(&self.leases, false);
                work(&mut state.order);
                // A thread that has notified this one meanwhile is not served here.
                RoundResult::Enough
            });
            if ran != RunResult::Elsewhere {
                return self.abandon();
            }
            yield_now();
        }
    }
}
