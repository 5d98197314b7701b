//! The product's front: submit rings, and a dispatcher, which is the first thread that arrives.
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
use blockyard_sync::lanes::{Lane, Lanes};
use blockyard_sync::mailbox::{Mailbox, Owner};
use blockyard_sync::permits::Permits;
use blockyard_sync::role::{Ran, Role, Round};

use super::{Front, FrontConfig, Left, NotPassing, Passing, Queued, Report, Sheaf};
use crate::bio::{Op, Prio};
use crate::sched::deadline::{CLASSES, Deadline, Direction, Item, Kind, Sweep};
use crate::units::Nanos;

/// Submit rings of a device: submitters beyond this number share rings. Few and small ones for
/// tests with random interleavings, so that they fill up.
const LANES: usize = if cfg!(shuttle) { 16 } else { 128 };
/// Capacity of a submit ring, in requests.
const LANE_LEN: usize = if cfg!(shuttle) { 4 } else { 128 };
/// A submit ring with this number of requests is drained even if the device is full.
const HIGH: usize = LANE_LEN / 2;
/// Maximum number of requests that one pass drains from the submit rings.
const PASS: usize = if cfg!(shuttle) { 4 } else { 256 };
/// A dispatcher that is notified again and again stops after this number of rounds.
const ROUNDS_MAX: usize = 4;

/// How often a thread that wants the fast path checks whether another thread's brief dispatch has
/// ended. This takes less than a microsecond, while being served by the other thread costs several.
const LOOKS: u32 = if cfg!(shuttle) { 2 } else { 16 };

/// Minimum number of requests of a lease, unless one thread may have fewer. With it a channel needs
/// no new lease for a slightly larger batch.
const PERMIT_MIN: u32 = 4;

/// The shared state of the product's front: submit rings, order, completion reports and leases.
pub struct Combiner {
    lanes: Arc<Lanes<Queued>>,
    role: Role<Core>,
    reports: Arc<Mailbox<Report>>,
    /// The lease of each submit ring: the sweep of passed requests, and how many of them are in
    /// flight.
    permits: Permits<Sweep>,
}

/// What the dispatcher records about a submit ring whose requests take the fast path.
#[derive(Clone, Copy, Debug, Default)]
struct Passer {
    /// Maximum number of requests in flight by the lease; 0 without a lease.
    most: u32,
    may_write: bool,
    /// Reads and writes that the order counts as in flight.
    in_flight: [u32; 2],
}

/// The state that only the dispatcher accesses.
struct Core {
    order: Deadline<Queued>,
    reports: Owner<Report>,
    drained: Vec<Queued>,
    /// Requests for which the order had no space. They go before those in the submit rings.
    held: Vec<Queued>,
    refused: Vec<Queued>,
    /// Requests that were drained together may be inserted in any order: the device has no zones.
    sorts: bool,
    depth: usize,
    /// The minimum number of requests of a lease.
    permit_min: u32,
    /// Requests in flight, without those of leases that are granted now.
    in_flight: usize,
    /// The last round left requests waiting, in the order or in the submit rings.
    is_behind: bool,
    passers: Box<[Passer; LANES]>,
    /// One bit per submit ring: it has a lease; it has requests in flight without a lease.
    permitted: Bits,
    passing: Bits,
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
struct Bits([u64; LANES.div_ceil(64)]);

impl Bits {
    const NONE: Bits = Bits([0; LANES.div_ceil(64)]);

    #[inline]
    fn set(&mut self, lane: usize, is_set: bool) {
        let bit = 1 << (lane % 64);
        let word = &mut self.0[lane / 64];
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
        while from < LANES
            && let Some(lane) = self.next(from)
        {
            each(lane);
            from = lane + 1;
        }
    }
}

impl Core {
    /// Passes requests if nothing else waits, and grants their submit ring a lease for the next
    /// ones. The ring must belong to one channel only.
    #[cold]
    fn admit(
        &mut self,
        permits: &Permits<Sweep>,
        lane: usize,
        sheaf: &mut Sheaf,
        now: Nanos,
    ) -> Result<(), NotPassing> {
        if self.is_behind {
            // The new requests go before requests of a lower class that wait.
            let mut lower = CLASSES.into_iter().skip(sheaf.prio() as usize + 1);
            let goes_before = lower.any(|prio| self.order.queued(prio) > 0);
            return Err(if goes_before { NotPassing::Unfit } else { NotPassing::Behind });
        }
        self.take_back(permits, lane);
        self.hear(permits, now);
        if self.class != sheaf.prio() {
            self.take_all_back(permits);
        }
        self.count_all(permits, false);
        if self.passers[lane].in_flight != [0; 2]
            || (self.class != sheaf.prio() && self.passing != Bits::NONE)
        {
            return Err(NotPassing::Unfit);
        }
        self.class = sheaf.prio();
        let [reads, writes] = sheaf.counts();
        let (count, depth) = (reads + writes, self.depth as u32);
        let mut most = count.next_power_of_two().max(self.permit_min).min(depth);
        let throttled_room = self.order.throttled_room();
        let writes_max = throttled_room.saturating_sub(self.reserved_writes).min(self.depth) as u32;
        if writes > 0 {
            most = most.min(writes_max);
        }
        // A channel that only reads reserves nothing of the limit for writes.
        let may_write = writes > 0 || (throttled_room >= self.depth && most <= writes_max);
        if count > most {
            return Err(NotPassing::Unfit);
        }
        if !self.makes_room(permits, most as usize) {
            // A smaller lease is enough if it holds these requests.
            let left = self.depth.saturating_sub(self.in_flight + self.reserved) as u32;
            if left < count {
                return Err(NotPassing::Busy);
            }
            most = most.min(left);
        }
        let sweep = self.order.lend(sheaf.prio(), [true, may_write], most, now);
        let mut sweep = sweep.ok_or(NotPassing::Unfit)?;
        if !sheaf.pass(&mut sweep, now) {
            return Err(NotPassing::Unfit);
        }
        self.reserved += most as usize;
        self.reserved_writes += if may_write { most as usize } else { 0 };
        self.passers[lane] = Passer { most, may_write, in_flight: [0; 2] };
        self.permitted.set(lane, true);
        self.passing.set(lane, false);
        // SAFETY: this thread is the dispatcher, so it is the only one that grants leases. The
        // submit ring belongs to its channel, and its old lease was revoked above.
        unsafe { permits.grant(lane, sweep, [reads, writes]) };
        Ok(())
    }

    /// Revokes leases without requests in flight until `count` more requests fit; returns whether
    /// they fit. If revoking all of them would not suffice, revokes none.
    fn makes_room(&mut self, permits: &Permits<Sweep>, count: usize) -> bool {
        let has_room = |core: &Core| core.in_flight + core.reserved + count <= core.depth;
        if has_room(self) {
            return true;
        }
        let (mut idle, mut next) = (Bits::NONE, self.next_idle);
        let mut missing = self.in_flight + self.reserved + count - self.depth;
        for _ in 0..self.permitted.0.iter().map(|word| word.count_ones()).sum::<u32>() {
            let Some(lane) = self.permitted.next(next).or_else(|| self.permitted.next(0)) else {
                break;
            };
            next = (lane + 1) % LANES;
            if permits.under_way(lane, false) == [0; 2] {
                idle.set(lane, true);
                missing = missing.saturating_sub(self.passers[lane].most as usize);
            }
            if missing == 0 {
                self.next_idle = next;
                idle.each(|lane| self.take_back(permits, lane));
                // A channel may have passed requests by one of these leases meanwhile.
                return has_room(self);
            }
        }
        false
    }

    /// Revokes the lease of a submit ring, if it has one, and accounts for its requests in the
    /// order.
    fn take_back(&mut self, permits: &Permits<Sweep>, lane: usize) {
        // SAFETY: this thread is the dispatcher, so it is the only one that revokes leases.
        let Some(sweep) = (unsafe { permits.withdraw(lane) }) else { return };
        // Of several leases, the one that was used last defines the position of the sweep.
        let is_latest = sweep.at() >= self.swept_at;
        if is_latest {
            self.swept_at = sweep.at();
        }
        self.order.settle(&sweep, is_latest);
        let passer = &mut self.passers[lane];
        let Passer { most, may_write, .. } = std::mem::take(passer);
        self.reserved -= most as usize;
        self.reserved_writes -= if may_write { most as usize } else { 0 };
        // All its requests count as in flight until `count` checks.
        passer.in_flight = sweep.taken();
        self.in_flight += sweep.taken().iter().sum::<u32>() as usize;
        self.permitted.set(lane, false);
        self.passing.set(lane, true);
        self.count(permits, lane, false);
    }

    /// Revokes all leases, because the order is needed for something else.
    #[inline]
    fn take_all_back(&mut self, permits: &Permits<Sweep>) {
        if self.permitted != Bits::NONE {
            self.permitted.each(|lane| self.take_back(permits, lane));
        }
        self.swept_at = Nanos(0);
    }

    /// Counts requests of a submit ring without a lease that have completed; returns whether there
    /// were any. With `awaits`, marks the ring: the channel that completes a request of it later
    /// must dispatch.
    fn count(&mut self, permits: &Permits<Sweep>, lane: usize, awaits: bool) -> bool {
        let in_flight = permits.under_way(lane, awaits);
        let before = std::mem::replace(&mut self.passers[lane].in_flight, in_flight);
        for direction in Direction::ALL {
            let at = direction as usize;
            let count = (before[at] - in_flight[at]) as usize;
            if count > 0 {
                self.order.completed_many(Kind { prio: self.class, direction }, count);
                self.in_flight -= count;
            }
        }
        if in_flight == [0; 2] {
            self.passing.set(lane, false);
        }
        before != in_flight
    }

    /// Counts completed requests, as `count`, for all submit rings that have requests in flight.
    #[inline]
    fn count_all(&mut self, permits: &Permits<Sweep>, awaits: bool) -> bool {
        let mut is_any = false;
        if self.passing != Bits::NONE {
            self.passing.each(|lane| is_any |= self.count(permits, lane, awaits));
        }
        is_any
    }

    /// Takes back a request that took the fast path and was not started.
    #[cold]
    fn take_undone(&mut self, permits: &Permits<Sweep>, lane: usize, queued: Queued, now: Nanos) {
        // From here on the request waits in the order, so no request may take the fast path.
        self.take_all_back(permits);
        let mut counts = [0; 2];
        counts[queued.kind().direction as usize] = 1;
        permits.end(lane, counts);
        let in_flight = &mut self.passers[lane].in_flight;
        *in_flight = [in_flight[0] - counts[0], in_flight[1] - counts[1]];
        self.in_flight -= 1;
        self.order.requeue(queued, now);
    }

    /// Processes the reports.
    #[inline]
    fn hear(&mut self, permits: &Permits<Sweep>, now: Nanos) {
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
                Report::Undone(queued, Some(lane)) => {
                    self.take_undone(permits, lane.into(), queued, now);
                }
                Report::Rest(queued) => {
                    if let Err(queued) = self.order.insert_at_head(queued, now) {
                        self.held.push(queued);
                    }
                }
            }
        }
    }

    /// Drains the submit rings into the order.
    #[inline]
    fn take_in(&mut self, lanes: &Lanes<Queued>, at_least: usize, now: Nanos) {
        if !self.held.is_empty() {
            self.retry(now);
        }
        // The space for refused requests bounds the pass, so that a request without space does not
        // block the others.
        let most = PASS.min(self.held.capacity() - self.held.len()).min(self.order.room());
        if most == 0 {
            return;
        }
        // SAFETY: only the dispatcher reaches this code, through the combining lock.
        unsafe { lanes.drain(most, at_least, &mut self.drained) };
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
        front: &Combiner,
        now: Nanos,
        is_room: bool,
        end: usize,
        out: &mut Vec<Queued>,
    ) -> bool {
        self.take_all_back(&front.permits);
        self.hear(&front.permits, now);
        self.count_all(&front.permits, false);
        let free = self.depth - self.in_flight;
        let holds_back = !is_room || free == 0;
        self.take_in(&front.lanes, if holds_back { HIGH } else { 0 }, now);
        if !holds_back && !self.is_full() && front.lanes.is_occupied() {
            // Requests that arrived during the insertion may merge with the inserted ones.
            self.take_in(&front.lanes, 0, now);
        }
        let room = free.min(end - out.len());
        let taken = self.order.next_batch(room, now, |queued| out.push(queued));
        self.in_flight += taken;
        holds_back
    }

    /// Whether other threads could start more: tags are free, and a request is or may be next.
    #[inline]
    fn is_more(&self, front: &Combiner) -> bool {
        let has_come = || front.lanes.is_occupied() && !self.is_full();
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
    fn note_behind(&mut self, front: &Combiner) -> bool {
        self.is_behind =
            !self.order.is_empty() || !self.held.is_empty() || front.lanes.is_occupied();
        self.is_behind
    }

    #[cold]
    fn retry(&mut self, now: Nanos) {
        std::mem::swap(&mut self.held, &mut self.refused);
        self.order.insert_batch(self.refused.drain(..), now, &mut self.held);
    }
}

impl Front for Combiner {
    const NAME: &'static str = "combiner";

    const PASSES: bool = true;

    type Lane = Lane<Queued>;

    fn new(config: &FrontConfig) -> Combiner {
        let depth = usize::from(config.depth);
        let reports = Mailbox::open(2 * depth);
        Combiner {
            lanes: Lanes::new(LANES, LANE_LEN),
            reports: Arc::clone(reports.mailbox()),
            role: Role::new(Core {
                order: config.order(),
                reports,
                drained: Vec::with_capacity(PASS),
                held: Vec::with_capacity(2 * PASS),
                refused: Vec::with_capacity(2 * PASS),
                sorts: config.zones.is_none(),
                depth,
                permit_min: PERMIT_MIN.min(config.hand.into()),
                in_flight: 0,
                is_behind: false,
                passers: Box::new([Passer::default(); LANES]),
                permitted: Bits::NONE,
                passing: Bits::NONE,
                reserved: 0,
                reserved_writes: 0,
                class: Prio::BestEffort,
                swept_at: Nanos(0),
                next_idle: 0,
            }),
            permits: Permits::new(LANES, Sweep::NONE),
        }
    }

    fn open(&self) -> Lane<Queued> {
        self.lanes.open()
    }

    #[inline]
    fn room(&self, lane: &Lane<Queued>) -> usize {
        lane.room()
    }

    #[inline]
    fn insert(&self, lane: &mut Lane<Queued>, requests: &[Queued], _now: Nanos) -> usize {
        lane.publish(requests)
    }

    #[inline]
    fn dispatch(
        &self,
        _: &mut Lane<Queued>,
        now: Nanos,
        room: usize,
        out: &mut Vec<Queued>,
    ) -> Left {
        let (end, is_room) = (out.len() + room, room > 0);
        let (mut rounds, mut is_more) = (0, false);
        let ran = self.role.run(|core| {
            self.lanes.attend();
            let mut holds_back = core.round(self, now, is_room, end, out);
            // A thread that has filled its room calls again. Otherwise requests are left: the
            // channels with passed requests in flight are marked to dispatch when one completes. If
            // one has completed meanwhile, there is more to do now.
            while core.note_behind(self)
                && !(is_room && out.len() == end)
                && core.count_all(&self.permits, true)
            {
                holds_back = core.round(self, now, is_room, end, out);
            }
            is_more = is_room && out.len() == end && core.is_behind && core.is_more(self);
            if is_more {
                // This thread may take long until it calls again; meanwhile another thread can
                // dispatch.
                self.lanes.abandon();
            }
            self.lanes.hold_back(holds_back || core.is_full());
            rounds += 1;
            if rounds < ROUNDS_MAX { Round::Whole } else { Round::Enough }
        });
        match ran {
            // The caller dispatches again anyway.
            _ if is_more => Left::More,
            Ran::Enough => Left::Undone,
            Ran::Whole | Ran::Elsewhere => Left::Nothing,
        }
    }

    #[inline]
    fn pass(
        &self,
        lane: &mut Lane<Queued>,
        sheaf: &mut Sheaf,
        now: Nanos,
    ) -> Result<Passing, NotPassing> {
        if lane.is_shared() {
            // Two channels cannot share a lease.
            return Err(NotPassing::Unfit);
        }
        let lane = lane.number();
        let counts = sheaf.counts();
        let step = |sweep: &mut Sweep, under_way: u32| {
            under_way + counts[0] + counts[1] <= sweep.most()
                && sheaf.prio() == sweep.prio()
                && sheaf.pass(sweep, now)
        };
        // SAFETY: the submit ring belongs to this channel, which is borrowed mutably.
        if unsafe { self.permits.begin(lane, counts, step) } {
            return Ok(Passing { is_called: false });
        }
        let admit = |core: &mut Core| core.admit(&self.permits, lane, sheaf, now);
        match self.role.brief(LOOKS, admit) {
            None => Err(NotPassing::Busy),
            Some((Ok(()), is_called)) => Ok(Passing { is_called }),
            Some((Err(_), true)) => Err(NotPassing::Behind),
            Some((Err(why), false)) => Err(why),
        }
    }

    #[inline]
    fn passed(&self, lane: &mut Lane<Queued>, counts: [u32; 2]) -> bool {
        self.permits.end(lane.number(), counts)
    }

    fn passer(&self, lane: &Lane<Queued>) -> u16 {
        lane.number() as u16
    }

    #[inline]
    fn report(&self, reports: &mut Vec<Report>) {
        if !reports.is_empty() {
            self.reports.post(reports.drain(..));
        }
    }

    #[inline]
    fn is_work(&self) -> bool {
        self.lanes.is_work()
    }

    fn kick(&self) -> bool {
        self.role.kick()
    }

    fn abandon(&self) {
        self.lanes.abandon();
    }

    #[inline]
    fn is_abandoned(&self) -> bool {
        self.lanes.is_abandoned()
    }

    fn with_order(&self, work: &mut dyn FnMut(&mut Deadline<Queued>)) {
        loop {
            let ran = self.role.run(|core| {
                core.take_all_back(&self.permits);
                core.hear(&self.permits, Nanos(0));
                core.count_all(&self.permits, false);
                work(&mut core.order);
                // A thread that has notified this one meanwhile is not served here.
                Round::Enough
            });
            if ran != Ran::Elsewhere {
                return self.abandon();
            }
            yield_now();
        }
    }
}
