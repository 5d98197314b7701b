//! The product's front: lanes, and a dispatcher who is whoever comes first.
//!
//! Inserting publishes a batch in a lane of the submitter's own. Dispatching takes the role of the
//! dispatcher, or tells the one who has it: its holder empties all lanes in one pass, merges what
//! it finds with what waits, and takes out what is next. While the device has no room everything
//! stays in the lanes, unless one of them fills up; what waits there or in order holds no tag.
#![allow(unsafe_code)]

use std::sync::Arc;

use blockyard_sync::atomics::yield_now;
use blockyard_sync::lanes::{Lane, Lanes};
use blockyard_sync::mailbox::{Mailbox, Owner};
use blockyard_sync::role::{Ran, Role, Round};

use super::{Front, FrontConfig, Queued, Report};
use crate::bio::Op;
use crate::sched::deadline::{Deadline, Item};
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

/// See the module.
pub struct Combiner {
    lanes: Arc<Lanes<Queued>>,
    role: Role<Core>,
    reports: Arc<Mailbox<Report>>,
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
    in_flight: usize,
    depth: usize,
}

impl Core {
    /// Takes what was reported.
    #[inline]
    fn hear(&mut self, now: Nanos) {
        while let Some(report) = self.reports.take() {
            match report {
                Report::Completed(kind, count) => {
                    let count = count as usize;
                    self.order.completed_many(kind, count);
                    self.in_flight -= count;
                }
                Report::Undone(queued) => {
                    self.order.requeue(queued, now);
                    self.in_flight -= 1;
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

    #[cold]
    fn retry(&mut self, now: Nanos) {
        std::mem::swap(&mut self.held, &mut self.refused);
        self.order.insert_batch(self.refused.drain(..), now, &mut self.held);
    }
}

impl Front for Combiner {
    const NAME: &'static str = "combiner";

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
                in_flight: 0,
                depth,
            }),
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
            core.hear(now);
            let free = core.depth - core.in_flight;
            let holds_back = !is_room || free == 0;
            core.take_in(&self.lanes, if holds_back { HIGH } else { 0 }, now);
            self.lanes.hold_back(holds_back || core.order.room() == 0);
            let room = free.min(end - out.len());
            core.in_flight += core.order.next_batch(room, now, |queued| out.push(queued));
            rounds += 1;
            if rounds < ROUNDS_MAX { Round::Whole } else { Round::Enough }
        });
        ran == Ran::Enough
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
                core.hear(Nanos(0));
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
