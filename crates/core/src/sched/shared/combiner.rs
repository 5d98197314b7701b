//! The product's front: lanes, and a dispatcher who is whoever comes first.
//!
//! Inserting publishes a batch in a lane of the submitter's own. Dispatching takes the role of the
//! dispatcher, or tells the one who has it: its holder empties all lanes in one pass, merges what
//! it finds with what waits, and takes out what is next. While the device has no room everything
//! stays in the lanes, unless one of them fills up; what waits there or in order holds no tag.
//!
//! Where nothing waits and the device has room, what comes passes on instead: the role is taken for
//! a moment, long enough to count and to move the sweep on, and the requests stay with the thread
//! that has them. That they are complete is noted on a sheet of that thread's own. Whoever leaves
//! something waiting behind collects the sheets, and leaves word there that more is awaited.
#![allow(unsafe_code)]

use std::sync::Arc;

use blockyard_sync::atomics::yield_now;
use blockyard_sync::lanes::{Lane, Lanes};
use blockyard_sync::mailbox::{Mailbox, Owner};
use blockyard_sync::role::{Ran, Role, Round};
use blockyard_sync::tallies::Tallies;

use super::{Front, FrontConfig, NotPassing, Passing, Queued, Report, Sheaf};
use crate::bio::{Op, Prio};
use crate::sched::deadline::{CLASSES, Deadline, Direction, Item, Kind, Sweep};
use crate::units::Nanos;

/// Lanes of a device: one for each submitter up to so many, some of them shared.
const LANES: usize = 128;
/// Requests that a lane holds.
const LANE_LEN: usize = 128;
/// A lane with so many is emptied whether the device has room or not.
const HIGH: usize = LANE_LEN / 2;
/// Most requests that one pass takes from the lanes.
const PASS: usize = 256;
/// After so many passes that somebody has kicked for, the role is given up.
const ROUNDS_MAX: usize = 4;

/// How often a thread that wants to pass something on looks whether another one, which does so just
/// now, is done: less than a microsecond, where to be served by that one costs several.
const LOOKS: u32 = if cfg!(shuttle) { 2 } else { 16 };

/// The order knows of more than so many completions at the latest.
const COMPLETED_MAX: u32 = 1 << 30;

/// See the module.
pub struct Combiner {
    lanes: Arc<Lanes<Queued>>,
    role: Role<Core>,
    reports: Arc<Mailbox<Report>>,
    /// What has passed on and is complete, by lane: reads and writes, all of one class.
    sheets: Tallies,
}

/// What requests that pass on need of the order and of the device: a cache line of it with the
/// role's word, so that nothing else goes from processor to processor.
#[derive(Debug)]
struct Express {
    /// Lent out by the order, if anything may pass on.
    sweep: Option<Sweep>,
    /// Requests at the device, and how many there may be so that more of that kind pass on.
    in_flight: u32,
    in_flight_max: u32,
    /// Requests of the sweep's kind that are complete, which the order does not know yet.
    completed: u32,
}

const _: () = assert!(size_of::<Express>() <= 56, "with the role's word it is one line");

/// What the holder of the role works on.
#[repr(C)]
struct Core {
    express: Express,
    order: Deadline<Queued>,
    reports: Owner<Report>,
    drained: Vec<Queued>,
    /// What the order had no room for. It comes before what is in the lanes.
    held: Vec<Queued>,
    refused: Vec<Queued>,
    /// What was taken in together may be inserted in any order: there are no zones.
    sorts: bool,
    depth: usize,
    /// The last round left something waiting, here or in the lanes.
    is_behind: bool,
    /// Lanes whose sheets may have something or will have, a bit each; all of them are clear once
    /// nothing is in flight.
    passing: [u64; LANES / 64],
    /// The class of what has passed on and is not known to be complete.
    class: Prio,
}

impl Core {
    /// Lets requests pass on that nothing else waits with; answers the index of the first one.
    #[inline]
    fn pass(
        &mut self,
        sheets: &Tallies,
        lane: usize,
        sheaf: &Sheaf,
        now: Nanos,
    ) -> Result<usize, NotPassing> {
        if let Express { sweep: Some(sweep), in_flight, completed, .. } = &mut self.express
            && sweep.kind() == sheaf.kind()
        {
            let mut counts = sheets.collect(lane, false);
            let own = std::mem::take(&mut counts[sheaf.kind().direction as usize]) as u32;
            (*in_flight, *completed) = (*in_flight - own, *completed + own);
            if counts != [0; 2] {
                self.settle();
                self.note_completed(counts);
            } else if let Some(first) = self.try_pass(lane, sheaf) {
                return Ok(first);
            }
        }
        self.pass_first(sheets, lane, sheaf, now)
    }

    #[inline]
    fn try_pass(&mut self, lane: usize, sheaf: &Sheaf) -> Option<usize> {
        let Express { sweep, in_flight, in_flight_max, completed } = &mut self.express;
        let after = *in_flight + sheaf.count() as u32;
        if after > *in_flight_max || *completed > COMPLETED_MAX {
            return None;
        }
        let first = sweep.as_mut()?.pass(sheaf.keys(), Sheaf::sector)?;
        *in_flight = after;
        let (word, bit) = (lane / 64, 1 << (lane % 64));
        if self.passing[word] & bit == 0 {
            self.passing[word] |= bit;
        }
        Some(first)
    }

    /// The same where the sweep of another kind is out, or none, or there is no room before all
    /// that was completed is known.
    #[cold]
    fn pass_first(
        &mut self,
        sheets: &Tallies,
        lane: usize,
        sheaf: &Sheaf,
        now: Nanos,
    ) -> Result<usize, NotPassing> {
        let kind = sheaf.kind();
        if self.is_behind {
            // What comes goes before what waits in a lower class.
            let mut lower = CLASSES.into_iter().skip(kind.prio as usize + 1);
            let goes_before = lower.any(|prio| self.order.queued(prio) > 0);
            return Err(if goes_before { NotPassing::Unfit } else { NotPassing::Behind });
        }
        self.settle();
        self.hear(now);
        self.collect_all(sheets, false);
        let sweep = self.order.lend(kind, now).ok_or(NotPassing::Unfit)?;
        self.class = kind.prio;
        let most = self.depth.min(self.order.passing_max(kind));
        self.express = Express { sweep: Some(sweep), in_flight_max: most as u32, ..self.express };
        match self.try_pass(lane, sheaf) {
            Some(first) => Ok(first),
            None if sheaf.count() > most => Err(NotPassing::Unfit),
            None => Err(NotPassing::Busy),
        }
    }

    /// Takes the sweep back, because something else is to be asked of the order.
    #[inline]
    fn settle(&mut self) {
        if let Some(sweep) = self.express.sweep.take() {
            self.order.settle(sweep);
            let completed = std::mem::take(&mut self.express.completed);
            self.order.completed_many(sweep.kind(), completed as usize);
        }
    }

    /// Takes what is noted on a sheet; says whether that was anything. The sweep is not out.
    #[inline]
    fn collect(&mut self, sheets: &Tallies, lane: usize, awaits: bool) -> bool {
        let counts = sheets.collect(lane, awaits);
        self.note_completed(counts);
        counts != [0; 2]
    }

    /// Notes that so many reads and writes that have passed on are complete. The sweep is not out.
    #[inline]
    fn note_completed(&mut self, counts: [usize; 2]) {
        for (direction, count) in Direction::ALL.into_iter().zip(counts) {
            if count > 0 {
                self.order.completed_many(Kind { prio: self.class, direction }, count);
                self.express.in_flight -= count as u32;
            }
        }
    }

    /// The same for all that have something or will have. With `awaits`, whoever completes
    /// something of that later is told to come.
    #[inline]
    fn collect_all(&mut self, sheets: &Tallies, awaits: bool) -> bool {
        self.passing != [0; LANES / 64] && self.collect_each(sheets, awaits)
    }

    #[cold]
    fn collect_each(&mut self, sheets: &Tallies, awaits: bool) -> bool {
        let mut is_any = false;
        for word in 0..self.passing.len() {
            let mut lanes = self.passing[word];
            while lanes != 0 {
                let lane = word * 64 + lanes.trailing_zeros() as usize;
                lanes &= lanes - 1;
                is_any |= self.collect(sheets, lane, awaits);
            }
        }
        if self.express.in_flight == 0 {
            self.passing = Default::default();
        }
        is_any
    }

    /// Takes what was reported.
    #[inline]
    fn hear(&mut self, now: Nanos) {
        while let Some(report) = self.reports.take() {
            match report {
                Report::Completed(kind, count) => {
                    let count = count as usize;
                    self.order.completed_many(kind, count);
                    self.express.in_flight -= count as u32;
                }
                Report::Undone(queued) => {
                    self.order.requeue(queued, now);
                    self.express.in_flight -= 1;
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
        self.settle();
        self.hear(now);
        self.collect_all(&front.sheets, false);
        let free = self.depth - self.express.in_flight as usize;
        let holds_back = !is_room || free == 0;
        self.take_in(&front.lanes, if holds_back { HIGH } else { 0 }, now);
        let room = free.min(end - out.len());
        let taken = self.order.next_batch(room, now, |queued| out.push(queued));
        self.express.in_flight += taken as u32;
        holds_back
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
                express: Express { sweep: None, in_flight: 0, in_flight_max: 0, completed: 0 },
                order: config.order(),
                reports,
                drained: Vec::with_capacity(PASS),
                held: Vec::with_capacity(2 * PASS),
                refused: Vec::with_capacity(2 * PASS),
                sorts: config.zones.is_none(),
                depth,
                is_behind: false,
                passing: Default::default(),
                class: Prio::BestEffort,
            }),
            sheets: Tallies::new(LANES),
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
    ) -> bool {
        let (end, is_room) = (out.len() + room, room > 0);
        let mut rounds = 0;
        let ran = self.role.run(|core| {
            self.lanes.attend();
            let mut holds_back = core.round(self, now, is_room, end, out);
            // Who has filled its room comes again. Else whoever completes what has passed on is
            // told that it is awaited, or has completed it before, and there is more to do.
            while core.note_behind(self)
                && !(is_room && out.len() == end)
                && core.collect_all(&self.sheets, true)
            {
                holds_back = core.round(self, now, is_room, end, out);
            }
            self.lanes.hold_back(holds_back || core.is_full());
            rounds += 1;
            if rounds < ROUNDS_MAX { Round::Whole } else { Round::Enough }
        });
        ran == Ran::Enough
    }

    #[inline]
    fn pass(
        &self,
        lane: &mut Lane<Queued>,
        sheaf: &Sheaf,
        now: Nanos,
    ) -> Result<Passing, NotPassing> {
        let lane = lane.number();
        let pass = |core: &mut Core| core.pass(&self.sheets, lane, sheaf, now);
        match self.role.brief(LOOKS, pass) {
            None => Err(NotPassing::Busy),
            Some((Ok(first), is_called)) => Ok(Passing { first, is_called }),
            Some((Err(_), true)) => Err(NotPassing::Behind),
            Some((Err(why), false)) => Err(why),
        }
    }

    #[inline]
    fn expect(&self) {
        self.role.expect();
    }

    #[inline]
    fn passed(&self, lane: &mut Lane<Queued>, kind: Kind, count: usize) -> bool {
        let is_write = kind.direction == Direction::Write;
        self.sheets.add(lane.number(), is_write, count as u32)
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

    fn with_order(&self, work: &mut dyn FnMut(&mut Deadline<Queued>)) {
        loop {
            let ran = self.role.run(|core| {
                core.settle();
                core.hear(Nanos(0));
                core.collect_all(&self.sheets, false);
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
