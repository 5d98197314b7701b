//! A scheduler that the channels of a device share: it orders and merges the requests of all of
//! them.
//!
//! ```text
//! channel ─ batch ▸ if nothing waits: sort, pass (lease) ▸ the channel's own device queue
//! channel ─ batch ▸ submit ring ─┐                          ┌▸ device queue of the dispatcher
//! channel ─ batch ▸ submit ring ─┼ drain, sort, merge ▸ pop ┤
//! channel ─ batch ▸ submit ring ─┘  (by the dispatcher)     └▸ shared device queue (by its holder)
//! channel ◂─ completion queue, eventcount ◂── each request returns to its channel ◂──┘
//! ```
//!
//! [`Scheduled`] is a device that wraps a device, as middleware does: a channel over it is an
//! ordinary channel, and the scheduler `none` bypasses all of this. A [`Front`] is the way in which
//! requests enter and leave the order. The product uses [`Combiner`]; experiments compare other
//! fronts with it.
//!
//! No thread waits for a lock here, and no request waits for a particular thread. Every thread that
//! waits for a completion does the work that can be done. A thread that leaves work wakes a
//! sleeping thread. docs/decisions/0016-shared-scheduler.md lists the invariants.

mod combiner;
mod engine;
mod flights;
mod homes;
mod queue;
mod queued;
mod scheduled;
mod sheaf;

use crate::channel::MergeRules;
use crate::geometry::ZoneGeometry;
use crate::sched::deadline::{Deadline, DeadlineConfig, Kind, Stats, Tunables};
use crate::units::Nanos;

pub use combiner::Combiner;
pub use queue::ScheduledQueue;
pub use queued::Queued;
pub use scheduled::Scheduled;
pub use sheaf::Sheaf;

/// Maximum number of requests of one channel that wait in the scheduler or are in flight.
pub const REQUESTS_MAX: u16 = 1024;

/// Maximum number of requests in the order; more wait in the submit rings. Small for tests with
/// random interleavings.
pub const ORDER_CAPACITY: usize = if cfg!(shuttle) { 8 } else { 2048 };

/// What a front needs to know about its device.
#[derive(Clone, Debug)]
pub struct FrontConfig {
    /// Maximum number of requests in flight: the number of tags.
    pub depth: u16,
    /// Maximum number of requests that one thread takes at once, to execute one after the other.
    pub hand: u16,
    /// Maximum number of requests in the order.
    pub capacity: usize,
    /// The merge rules of the device.
    pub rules: MergeRules,
    /// The zones of a zoned device.
    pub zones: Option<ZoneGeometry>,
    /// The tunable settings.
    pub tunables: Tunables,
}

impl FrontConfig {
    /// An empty order with these bounds.
    pub fn order(&self) -> Deadline<Queued> {
        Deadline::new(DeadlineConfig {
            capacity: self.capacity,
            in_flight_max: usize::from(self.depth),
            rules: self.rules,
            zones: self.zones.clone(),
            tunables: self.tunables,
        })
    }
}

/// What a [`Front::dispatch`] left undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing that can be done now.
    Nothing,
    /// Work is left: the caller must call again or call [`Front::abandon`].
    Undone,
    /// The caller has its maximum, and other threads could start more, which has been announced.
    /// The caller wakes a sleeping thread before it starts its own requests.
    More,
}

/// The fate of a request that [`Front::dispatch`] returned; each request is reported once.
#[derive(Clone, Copy, Debug)]
pub enum Report {
    /// This number of requests of this kind have completed.
    Completed(Kind, u32),
    /// The device did not start the request, or its first part: it goes before all others. `None`
    /// if a dispatch returned it, else the number of the channel that passed it
    /// ([`Front::passer`]).
    Undone(Queued, Option<u16>),
    /// The rest of a request that the device wants in parts: it also goes before all others.
    Rest(Queued),
}

impl Report {
    /// Adds the completion of a request of this kind.
    #[inline]
    fn add_completed(reports: &mut Vec<Report>, kind: Kind) {
        match reports.last_mut() {
            Some(Report::Completed(last, count)) if *last == kind => *count += 1,
            _ => reports.push(Report::Completed(kind, 1)),
        }
    }
}

/// The result of a successful [`Front::pass`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passing {
    /// Another request arrived meanwhile and waits for a [`Front::dispatch`].
    pub is_called: bool,
}

/// Why requests cannot take the fast path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotPassing {
    /// Another thread works on the order, or other threads hold all tags, and they run or wait for
    /// a CPU. The caller may try again soon.
    Busy,
    /// Waiting requests go first. The caller may try again after it has dispatched those; in any
    /// case it must call [`Front::dispatch`].
    Behind,
    /// The requests must be inserted.
    Unfit,
}

/// The way in which the requests of many threads enter the order, and are dispatched from it.
///
/// Each inserted request is returned by one dispatch, on any thread, and reported once. A request
/// that is reported as undone is returned again.
pub trait Front: Send + Sync + Sized + 'static {
    /// The name in measurements.
    const NAME: &'static str;

    /// Whether [`Front::pass`] can succeed.
    const PASSES: bool = false;

    /// The state that a channel holds.
    type Lane: Send + 'static;

    /// Creates a front for a device.
    fn new(config: &FrontConfig) -> Self;

    /// Creates the state of a new channel.
    fn open(&self) -> Self::Lane;

    /// How many requests could be inserted now.
    fn room(&self, lane: &Self::Lane) -> usize;

    /// Inserts requests, from the first on, while there is space; returns their number.
    fn insert(&self, lane: &mut Self::Lane, requests: &[Queued], now: Nanos) -> usize;

    /// The fast path: inserts requests and removes them again at once, all of them or none, if
    /// nothing else waits. The caller then starts them in the order of the sheaf, and reports their
    /// completion by [`Front::passed`]. It reports requests that the device does not start as
    /// undone.
    ///
    /// # Errors
    /// Why the requests cannot take the fast path. A front need not implement it.
    fn pass(
        &self,
        lane: &mut Self::Lane,
        sheaf: &mut Sheaf,
        now: Nanos,
    ) -> Result<Passing, NotPassing> {
        let _ = (lane, sheaf, now);
        Err(NotPassing::Unfit)
    }

    /// Counts reads and writes that took the fast path as completed. Returns whether the caller has
    /// to call [`Front::dispatch`], because another request may be able to go now.
    fn passed(&self, lane: &mut Self::Lane, counts: [u32; 2]) -> bool {
        let _ = (lane, counts);
        false
    }

    /// The number by which a channel reports a passed request that was not started.
    fn passer(&self, lane: &Self::Lane) -> u16 {
        let _ = lane;
        0
    }

    /// Appends up to `room` next requests to `out`, within its capacity. If another thread is
    /// dispatching, it may leave the requests to that thread. With no room, it only takes in new
    /// requests. Returns what is left undone.
    fn dispatch(
        &self,
        lane: &mut Self::Lane,
        now: Nanos,
        room: usize,
        out: &mut Vec<Queued>,
    ) -> Left;

    /// Reports the fate of requests that it returned; empties `reports`.
    fn report(&self, reports: &mut Vec<Report>);

    /// Whether a thread has to call [`Front::dispatch`]: there is work, and perhaps no thread is
    /// doing it. Has no side effects.
    fn is_work(&self) -> bool;

    /// Makes a thread that is dispatching look for work once more before it stops; returns whether
    /// there is such a thread.
    fn kick(&self) -> bool;

    /// Announces that work is left, so that [`Front::is_work`] returns true until a thread
    /// dispatches.
    fn abandon(&self);

    /// Whether left work is announced, so that a thread was or will be woken for it. Has no side
    /// effects.
    fn is_abandoned(&self) -> bool {
        false
    }

    /// Calls `work` with the order, for the control plane. May wait for other threads, and may
    /// leave work undone.
    fn with_order(&self, work: &mut dyn FnMut(&mut Deadline<Queued>));
}

/// The scheduler of a device, as the control plane sees it.
pub trait SchedulerControl: Send + Sync {
    /// The names that [`SchedulerControl::switch`] takes.
    fn available(&self) -> &'static [&'static str];

    /// The name of the active scheduler.
    fn active(&self) -> &'static str;

    /// Activates another scheduler; the previous one still serves the requests that wait in it.
    ///
    /// # Errors
    /// If there is no scheduler of this name.
    fn switch(&self, name: &str) -> Result<(), UnknownScheduler>;

    /// The present tunables.
    fn tunables(&self) -> Tunables;

    /// Changes the tunables.
    fn set(&self, tunables: Tunables);

    /// The counters of requests so far.
    fn stats(&self) -> Stats;

    /// Number of requests that wait in the order.
    fn waiting(&self) -> usize;

    /// How many requests the device executes at once; its limits say how many a channel may submit.
    fn depth(&self) -> u16;
}

/// There is no scheduler of this name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownScheduler {
    /// The requested name.
    pub name: String,
}

impl std::fmt::Display for UnknownScheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "there is no scheduler `{}`: expected `none` or `mq-deadline`", self.name)
    }
}

impl std::error::Error for UnknownScheduler {}
