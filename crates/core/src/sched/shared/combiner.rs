//! The product's front: lanes, and a dispatcher who is whoever comes first.
//!
//! Inserting publishes a batch in a lane of the submitter's own. Dispatching takes the role of the
//! dispatcher, or tells the one who has it: its holder empties all lanes in one pass, merges what
//! it finds with what waits, and takes out what is next. While the device has no room everything
//! stays in the lanes, unless one of them fills up; what waits there or in order holds no tag.
//!
//! Where nothing waits and the device has room, what comes passes on instead, and the requests stay
//! with the thread that has them. For that a lane gets a permit: so many requests at the device at
//! a time, and a sweep of its own, which its channel moves on by itself, without the role and on a
//! line that nobody else looks at. Whoever has to ask the order for something else takes the
//! permits back, so that the order knows what has passed on; and whoever leaves something waiting
//! behind leaves word where something is at the device yet that its end is awaited.
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

/// Lanes of a device: one for each submitter up to so many, some of them shared. Interleavings are
/// drawn with few and small ones, so that they fill up.
const LANES: usize = if cfg!(shuttle) { 16 } else { 128 };
/// Requests that a lane holds.
const LANE_LEN: usize = if cfg!(shuttle) { 4 } else { 128 };
/// A lane with so many is emptied whether the device has room or not.
const HIGH: usize = LANE_LEN / 2;
/// Most requests that one pass takes from the lanes.
const PASS: usize = if cfg!(shuttle) { 4 } else { 256 };
/// After so many passes that somebody has kicked for, the role is given up.
const ROUNDS_MAX: usize = 4;

/// How often a thread that wants to pass something on looks whether another one, which does so just
/// now, is done: less than a microsecond, where to be served by that one costs several.
const LOOKS: u32 = if cfg!(shuttle) { 2 } else { 16 };

/// A permit is for so many requests at least, as far as one thread may have so many, so that a
/// channel need not have another one for every batch that is a little larger.
const PERMIT_MIN: u32 = 4;

/// See the module.
pub struct Combiner {
    lanes: Arc<Lanes<Queued>>,
    role: Role<Core>,
    reports: Arc<Mailbox<Report>>,
    /// By lane: how far what passes on has swept, and how much of it is at the device.
    permits: Permits<Sweep>,
}

/// What is known of a lane whose requests pass on.
#[derive(Clone, Copy, Debug, Default)]
struct Passer {
    /// Most requests that it may have at the device; 0 while it has no permit.
    most: u32,
    may_write: bool,
    /// Reads and writes that the order takes for being at the device.
    in_flight: [u32; 2],
}

/// What the holder of the role works on.
struct Core {
    order: Deadline<Queued>,
    reports: Owner<Report>,
    drained: Vec<Queued>,
    /// What the order had no room for. It comes before what is in the lanes.
    held: Vec<Queued>,
    refused: Vec<Queued>,
    /// What was taken in together may be inserted in any order: there are no zones.
    sorts: bool,
    depth: usize,
    /// What a permit is for at least.
    permit_min: u32,
    /// Requests at the device, but those that are there by a permit which is out.
    in_flight: usize,
    /// The last round left something waiting, here or in the lanes.
    is_behind: bool,
    passers: Box<[Passer; LANES]>,
    /// Lanes with a permit, and lanes that have something at the device without one, a bit each.
    permitted: Bits,
    passing: Bits,
    /// What all permits that are out allow at the device together, and of that for writes too.
    reserved: usize,
    reserved_writes: usize,
    /// The class of all permits.
    class: Prio,
    /// When the latest requests of a permit that was taken back have passed on.
    swept_at: Nanos,
    /// Where the look for a permit that can be taken back begins.
    next_idle: usize,
}

/// A bit for each lane.
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

    /// The first one from `from` on that is set.
    #[inline]
    fn next(&self, from: usize) -> Option<usize> {
        (from / 64..self.0.len()).find_map(|index| {
            let low = if index == from / 64 { from % 64 } else { 0 };
            let word = self.0[index] & (u64::MAX << low);
            (word != 0).then(|| index * 64 + word.trailing_zeros() as usize)
        })
    }

    /// Calls `each` with all that are set.
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
    /// Lets requests pass on that nothing else waits with, if they may, and gives their lane a
    /// permit to go on doing so. The lane is one channel's own.
    #[cold]
    fn admit(
        &mut self,
        permits: &Permits<Sweep>,
        lane: usize,
        sheaf: &mut Sheaf,
        now: Nanos,
    ) -> Result<(), NotPassing> {
        if self.is_behind {
            // What comes goes before what waits in a lower class.
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
        // Who only reads reserves nothing of what is scarce for writes.
        let may_write = writes > 0 || (throttled_room >= self.depth && most <= writes_max);
        if count > most {
            return Err(NotPassing::Unfit);
        }
        if !self.makes_room(permits, most as usize) {
            // What is left will do, if it is enough for these.
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
        // SAFETY: this thread has the role, so it is the keeper; the lane is its own, and the
        // permit was taken back above.
        unsafe { permits.grant(lane, sweep, [reads, writes]) };
        Ok(())
    }

    /// Takes permits back from lanes that have nothing at the device now, until so many more
    /// requests may go there; says whether they may. Where it would not come to that, all keep what
    /// they have.
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
                // One of them may have begun something meanwhile.
                return has_room(self);
            }
        }
        false
    }

    /// Takes the permit of a lane back, if it has one: the order knows then what has passed on.
    fn take_back(&mut self, permits: &Permits<Sweep>, lane: usize) {
        // SAFETY: this thread has the role, so it is the keeper.
        let Some(sweep) = (unsafe { permits.withdraw(lane) }) else { return };
        // Of several the one that was the last says where the sweep stands.
        let is_latest = sweep.at() >= self.swept_at;
        if is_latest {
            self.swept_at = sweep.at();
        }
        self.order.settle(&sweep, is_latest);
        let passer = &mut self.passers[lane];
        let Passer { most, may_write, .. } = std::mem::take(passer);
        self.reserved -= most as usize;
        self.reserved_writes -= if may_write { most as usize } else { 0 };
        // All of it is at the device, until that is looked at.
        passer.in_flight = sweep.taken();
        self.in_flight += sweep.taken().iter().sum::<u32>() as usize;
        self.permitted.set(lane, false);
        self.passing.set(lane, true);
        self.count(permits, lane, false);
    }

    /// Takes all permits back, because something else is to be asked of the order.
    #[inline]
    fn take_all_back(&mut self, permits: &Permits<Sweep>) {
        if self.permitted != Bits::NONE {
            self.permitted.each(|lane| self.take_back(permits, lane));
        }
        self.swept_at = Nanos(0);
    }

    /// Counts what is complete of what a lane without a permit had at the device; says whether that
    /// was anything. With `awaits`, whoever completes something of that later is told to come.
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

    /// The same for all that have something there.
    #[inline]
    fn count_all(&mut self, permits: &Permits<Sweep>, awaits: bool) -> bool {
        let mut is_any = false;
        if self.passing != Bits::NONE {
            self.passing.each(|lane| is_any |= self.count(permits, lane, awaits));
        }
        is_any
    }

    /// Takes a request back that had passed on by a lane's permit and was not started.
    #[cold]
    fn take_undone(&mut self, permits: &Permits<Sweep>, lane: usize, queued: Queued, now: Nanos) {
        // From here on it is the order's: it waits, and nothing passes on.
        self.take_all_back(permits);
        let mut counts = [0; 2];
        counts[queued.kind().direction as usize] = 1;
        permits.end(lane, counts);
        let in_flight = &mut self.passers[lane].in_flight;
        *in_flight = [in_flight[0] - counts[0], in_flight[1] - counts[1]];
        self.in_flight -= 1;
        self.order.requeue(queued, now);
    }

    /// Takes what was reported.
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

    /// Moves what lies in the lanes into the order.
    #[inline]
    fn take_in(&mut self, lanes: &Lanes<Queued>, at_least: usize, now: Nanos) {
        if !self.held.is_empty() {
            self.retry(now);
        }
        // What is held bounds what is taken: a request that must wait does not stop the others.
        let most = PASS.min(self.held.capacity() - self.held.len()).min(self.order.room());
        if most == 0 {
            return;
        }
        // SAFETY: what is reached through the role is reached by its holder.
        unsafe { lanes.drain(most, at_least, &mut self.drained) };
        let order = &mut self.order;
        self.drained.retain(|queued| {
            // A flush is for no place on the device, and does not wait for those who have one.
            queued.op() != Op::Flush || order.insert_at_head(*queued, now).is_err()
        });
        if self.sorts {
            // In ascending order insertions find their places next to each other.
            self.drained.sort_unstable_by_key(|queued| queued.sector());
        }
        order.insert_batch(self.drained.drain(..), now, &mut self.held);
    }

    /// Hears what has become of requests, takes new ones in and gives out those whose turn it is.
    /// Says whether it has left the lanes as they are.
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
            // What has come while those found their places may continue one of them.
            self.take_in(&front.lanes, 0, now);
        }
        let room = free.min(end - out.len());
        let taken = self.order.next_batch(room, now, |queued| out.push(queued));
        self.in_flight += taken;
        holds_back
    }

    /// Whether others could start more: something waits whose turn it is, or may be, and there are
    /// tags.
    #[inline]
    fn is_more(&self, front: &Combiner) -> bool {
        let has_come = || front.lanes.is_occupied() && !self.is_full();
        self.in_flight < self.depth && (self.order.is_ready() || has_come())
    }

    /// Whether nothing more can be taken in before something is complete. What lies in the lanes is
    /// no work then: whoever looked for some would find it again and again, and not sleep.
    #[inline]
    fn is_full(&self) -> bool {
        self.order.room() == 0 || self.held.len() == self.held.capacity()
    }

    /// Notes whether anything waits, here or in the lanes.
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
            // Who has filled its room comes again. Else whoever completes what has passed on is
            // told that it is awaited, or has completed it before, and there is more to do.
            while core.note_behind(self)
                && !(is_room && out.len() == end)
                && core.count_all(&self.permits, true)
            {
                holds_back = core.round(self, now, is_room, end, out);
            }
            is_more = is_room && out.len() == end && core.is_behind && core.is_more(self);
            if is_more {
                // Until this thread comes again, which may take long, somebody else can.
                self.lanes.abandon();
            }
            self.lanes.hold_back(holds_back || core.is_full());
            rounds += 1;
            if rounds < ROUNDS_MAX { Round::Whole } else { Round::Enough }
        });
        match ran {
            // It comes again anyway.
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
            // Two channels cannot have one permit.
            return Err(NotPassing::Unfit);
        }
        let lane = lane.number();
        let counts = sheaf.counts();
        let step = |sweep: &mut Sweep, under_way: u32| {
            under_way + counts[0] + counts[1] <= sweep.most()
                && sheaf.prio() == sweep.prio()
                && sheaf.pass(sweep, now)
        };
        // SAFETY: the lane is this channel's own, and borrowed mutably.
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
                // Who has kicked meanwhile is not served here.
                Round::Enough
            });
            if ran != Ran::Elsewhere {
                return self.abandon();
            }
            yield_now();
        }
    }
}
