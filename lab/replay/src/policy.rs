//! The product's policy as a replay drives it.
//!
//! Time is counted as the kernel counts it. A tick of the kernel is a millisecond here, and
//! tunables in milliseconds become ticks, rounded up as the kernel rounds. So the policy compares
//! the numbers that the kernel compared.

use blockyard_core::bio::Prio;
use blockyard_core::limits::Limits;
use blockyard_core::request::MergeRules;
use blockyard_core::sched::deadline::{
    CLASSES, Deadline, DeadlineConfig, Direction, Item, Kind as PolicyKind, Tunable, Tunables,
};
use blockyard_core::units::{Nanos, Sector};

use crate::steps::{Leave, ReplayRequest};
use crate::trace::{OpKind, TraceHeader};

/// The tick at which a recording begins, large enough that no time before it is negative.
const TICK_FIRST: u64 = 1 << 32;
/// The policy's nanoseconds per tick.
const TICK_NS: u64 = 1_000_000;

/// A request and its permission to merge with others.
#[derive(Clone, Copy, Debug)]
struct MergeCandidate {
    request: ReplayRequest,
    leave: Leave,
}

impl Item for MergeCandidate {
    fn kind(&self) -> PolicyKind {
        kind(&self.request)
    }

    fn sector(&self) -> Sector {
        Sector(self.request.sector)
    }

    fn sectors(&self) -> u64 {
        u64::from(self.request.sectors)
    }

    fn joins(&self, next: &MergeCandidate, _rules: MergeRules) -> bool {
        self.leave.lead > 0 || next.leave.follow > 0
    }

    fn merge_back(&mut self, next: MergeCandidate) {
        let (mut own, mut other) = (self.leave, next.leave);
        match other.follow {
            0 => own.lead = own.lead.saturating_sub(1),
            _ => other.follow -= 1,
        }
        self.request.sectors = self.request.sectors.saturating_add(next.request.sectors);
        self.leave = Leave {
            follow: own.follow.saturating_add(other.follow),
            lead: own.lead.saturating_add(other.lead),
        };
    }
}

fn kind(request: &ReplayRequest) -> PolicyKind {
    let direction = match request.kind {
        OpKind::Read => Direction::Read,
        OpKind::Write | OpKind::Discard => Direction::Write,
    };
    PolicyKind { prio: request.class, direction }
}

fn nanos(tick: u64) -> Nanos {
    Nanos((TICK_FIRST + tick) * TICK_NS)
}

/// The policy under replay.
#[derive(Clone, Debug)]
pub struct Policy {
    order: Deadline<MergeCandidate>,
    /// Requests that the kernel has and the policy lacks, after a difference only.
    missing: Vec<PolicyKind>,
}

impl Policy {
    /// The policy with the tunables of a recording, and room for `waiting_max` requests.
    pub fn new(header: &TraceHeader, waiting_max: usize) -> Policy {
        let order = Deadline::new(DeadlineConfig {
            capacity: waiting_max,
            in_flight_max: 0,
            rules: MergeRules::new(&Limits::unlimited(1)),
            zones: None,
            tunables: tunables(header),
        });
        Policy { order, missing: Vec::new() }
    }

    /// Inserts a request.
    pub fn insert(&mut self, request: ReplayRequest, tick: u64) {
        self.put(MergeCandidate { request, leave: Leave::default() }, tick);
    }

    /// Inserts a bio or request that joined another request; returns whether it joined here.
    pub fn join(&mut self, request: ReplayRequest, leave: Leave, tick: u64) -> bool {
        let before = self.order.waiting();
        self.put(MergeCandidate { request, leave }, tick);
        let joins = usize::from(leave.follow) + usize::from(leave.lead);
        self.order.waiting() + joins == before + 1
    }

    fn put(&mut self, waiting: MergeCandidate, tick: u64) {
        if let Err(refused) = self.order.insert(waiting, nanos(tick)) {
            self.missing.push(kind(&refused.request));
        }
    }

    /// Inserts a request again that the driver returned.
    pub fn requeue(&mut self, request: ReplayRequest, tick: u64) {
        let kind = kind(&request);
        let counters = *self.order.stats().of(kind.prio, kind.direction);
        let was_given = counters.dispatched > counters.requeued + counters.completed;
        if was_given && self.order.room() > 0 {
            let waiting = MergeCandidate { request, leave: Leave::default() };
            self.order.requeue(waiting, nanos(tick));
        }
    }

    /// The request to dispatch next.
    pub fn next(&mut self, tick: u64) -> Option<ReplayRequest> {
        self.order.next(nanos(tick)).map(|waiting| waiting.request)
    }

    /// Takes the request that the kernel took, if it waits here.
    pub fn take(&mut self, request: &ReplayRequest, tick: u64) {
        let _ = self.order.take_at(kind(request), request.sector, nanos(tick));
    }

    /// Counts a completion.
    pub fn completed(&mut self, request: &ReplayRequest) {
        let kind = kind(request);
        match self.missing.iter().position(|missing| *missing == kind) {
            Some(at) => drop(self.missing.remove(at)),
            None => self.order.completed(kind),
        }
    }

    /// Whether a decision considers more than one class, so that a decision without a result may
    /// still change the state.
    pub fn has_classes(&self) -> bool {
        CLASSES.into_iter().filter(|class| self.order.queued(*class) > 0).count() > 1
    }

    /// Whether a class before this one has requests, which a decision for this class skips.
    pub fn is_passed_over(&self, class: Prio) -> bool {
        let before = CLASSES.into_iter().take_while(|other| *other != class);
        before.into_iter().any(|other| self.order.queued(other) > 0)
    }

    /// The number of requests that were dispatched after their deadline.
    pub fn expired(&self) -> u64 {
        self.order.stats().iter().map(|(_, _, counters)| counters.expired).sum()
    }

    /// Whether no request waits.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }
}

/// The tunables in ticks instead of milliseconds. `async_depth` bounds insertions, and the
/// recording has only insertions that happened.
fn tunables(header: &TraceHeader) -> Tunables {
    let (own, tick) = (&header.tunables, header.tick);
    let ticks = |ms| i64::try_from(tick.of_ms(ms)).unwrap_or(i64::MAX).min(i64::from(i32::MAX));
    let mut tunables = Tunables::new(u32::MAX);
    for (tunable, value) in [
        (Tunable::ReadExpire, ticks(own.read_expire)),
        (Tunable::WriteExpire, ticks(own.write_expire)),
        (Tunable::WritesStarved, i64::from(own.writes_starved)),
        // A bio that joined a request did so whatever the tunable said.
        (Tunable::FrontMerges, 1),
        (Tunable::FifoBatch, i64::from(own.fifo_batch)),
        (Tunable::PrioAgingExpire, ticks(own.prio_aging_expire)),
    ] {
        tunables.set(tunable, value).expect("the parser keeps tunables within their ranges");
    }
    tunables
}
