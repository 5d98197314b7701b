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
//! ordinary channel, and the scheduler `none` bypasses all of this. A [`SchedulerQueue`] is the way
//! in which requests enter and leave the order. The product uses [`Dispatcher`]; experiments
//! compare other scheduler queues with it.
//!
//! No thread waits for a lock here, and no request waits for a particular thread. Every thread that
//! waits for a completion does the work that can be done. A thread that leaves work wakes a
//! sleeping thread. docs/decisions/0016-shared-scheduler.md lists the invariants.

mod completion_router;
mod dispatcher;
mod in_flight;
mod queue;
mod scheduled;
mod shared_queue;
mod sorted_batch;

use crate::geometry::ZoneGeometry;
use crate::request::MergeRules;
use crate::sched::deadline::{Deadline, DeadlineConfig, Kind, Tunables};
use crate::units::Nanos;

pub use dispatcher::Dispatcher;
pub use in_flight::QueuedRequest;
pub use queue::ScheduledQueue;
pub use scheduled::Scheduled;
pub use sorted_batch::SortedBatch;

/// Maximum number of requests of one channel that wait in the scheduler or are in flight.
pub const REQUESTS_MAX: u16 = 1024;

/// Maximum number of requests in the order; more wait in the submit rings. Small for tests with
/// random interleavings.
pub const ORDER_CAPACITY: usize = if cfg!(shuttle) { 8 } else { 2048 };

/// What a scheduler queue needs to know about its device.
#[derive(Clone, Debug)]
pub struct SchedulerQueueConfig {
    /// Maximum number of requests in flight: the number of tags.
    pub depth: u16,
    /// Maximum number of requests that one thread takes at once, to execute one after the other.
    pub take_max: u16,
    /// Maximum number of requests in the order.
    pub capacity: usize,
    /// The merge rules of the device.
    pub rules: MergeRules,
    /// The zones of a zoned device.
    pub zones: Option<ZoneGeometry>,
    /// The tunable settings.
    pub tunables: Tunables,
}

impl SchedulerQueueConfig {
    /// An empty order with these bounds.
    pub fn order(&self) -> Deadline<QueuedRequest> {
        Deadline::new(DeadlineConfig {
            capacity: self.capacity,
            in_flight_max: usize::from(self.depth),
            rules: self.rules,
            zones: self.zones.clone(),
            tunables: self.tunables,
        })
    }
}

/// What a [`SchedulerQueue::dispatch`] left undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing that can be done now.
    Nothing,
    /// Work is left: the caller must call again or call [`SchedulerQueue::abandon`].
    Undone,
    /// The caller has its maximum, and other threads could start more, which has been announced.
    /// The caller wakes a sleeping thread before it starts its own requests.
    More,
}

/// The fate of a request that [`SchedulerQueue::dispatch`] returned; each request is reported once.
#[derive(Clone, Copy, Debug)]
pub enum Report {
    /// This number of requests of this kind have completed.
    Completed(Kind, u32),
    /// The device did not start the request, or its first part: it is dispatched before all
    /// others. `None` if a dispatch returned it, else the number of the channel that passed it
    /// ([`SchedulerQueue::bypass_id`]).
    Undone(QueuedRequest, Option<u16>),
    /// The rest of a request that the device wants in parts: it is also dispatched first.
    Remainder(QueuedRequest),
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

/// The result of a successful [`SchedulerQueue::bypass`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bypass {
    /// Another request arrived meanwhile and waits for a [`SchedulerQueue::dispatch`].
    pub is_called: bool,
}

/// Why requests cannot take the fast path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BypassRefusal {
    /// Another thread works on the order, or other threads hold all tags, and they run or wait for
    /// a CPU. The caller may try again soon.
    Busy,
    /// Waiting requests go first. The caller may try again after it has dispatched those; in any
    /// case it must call [`SchedulerQueue::dispatch`].
    WaitingFirst,
    /// The requests must be inserted.
    Unfit,
}

/// The way in which the requests of many threads enter the order, and are dispatched from it.
///
/// Each inserted request is returned by one dispatch, on any thread, and reported once. A request
/// that is reported as undone is returned again.
pub trait SchedulerQueue: Send + Sync + Sized + 'static {
    /// The name in measurements.
    const NAME: &'static str;

    /// Whether [`SchedulerQueue::bypass`] can succeed.
    const BYPASSES: bool = false;

    /// The state that a channel holds.
    type SubmitRing: Send + 'static;

    /// Creates a scheduler queue for a device.
    fn new(config: &SchedulerQueueConfig) -> Self;

    /// Creates the state of a new channel.
    fn open(&self) -> Self::SubmitRing;

    /// How many requests could be inserted now.
    fn room(&self, ring: &Self::SubmitRing) -> usize;

    /// Inserts requests, from the first on, while there is space; returns their number.
    fn insert(&self, ring: &mut Self::SubmitRing, requests: &[QueuedRequest], now: Nanos) -> usize;

    /// The fast path: inserts requests and removes them again at once, all of them or none, if
    /// nothing else waits. The caller then starts them in the order of the sorted batch, and
    /// reports their completion by [`SchedulerQueue::bypass_completed`]. It reports requests that
    /// the device does not start as undone.
    ///
    /// # Errors
    /// Why the requests cannot take the fast path. A scheduler queue need not implement it.
    fn bypass(
        &self,
        ring: &mut Self::SubmitRing,
        sorted: &mut SortedBatch,
        now: Nanos,
    ) -> Result<Bypass, BypassRefusal> {
        let _ = (ring, sorted, now);
        Err(BypassRefusal::Unfit)
    }

    /// Counts reads and writes that took the fast path as completed. Returns whether the caller has
    /// to call [`SchedulerQueue::dispatch`], because another request may be able to go now.
    fn bypass_completed(&self, ring: &mut Self::SubmitRing, counts: [u32; 2]) -> bool {
        let _ = (ring, counts);
        false
    }

    /// The number by which a channel reports a passed request that was not started.
    fn bypass_id(&self, ring: &Self::SubmitRing) -> u16 {
        let _ = ring;
        0
    }

    /// Appends up to `room` next requests to `out`, within its capacity. If another thread is
    /// dispatching, it may leave the requests to that thread. With no room, it only takes in new
    /// requests. Returns what is left undone.
    fn dispatch(
        &self,
        ring: &mut Self::SubmitRing,
        now: Nanos,
        room: usize,
        out: &mut Vec<QueuedRequest>,
    ) -> Left;

    /// Reports the fate of requests that it returned; empties `reports`.
    fn report(&self, reports: &mut Vec<Report>);

    /// Whether a thread has to call [`SchedulerQueue::dispatch`]: there is work, and perhaps no
    /// thread is doing it. Has no side effects.
    fn is_work(&self) -> bool;

    /// Makes a thread that is dispatching look for work once more before it stops; returns whether
    /// there is such a thread.
    fn notify(&self) -> bool;

    /// Announces that work is left, so that [`SchedulerQueue::is_work`] returns true until a thread
    /// dispatches.
    fn abandon(&self);

    /// Whether left work is announced, so that a thread was or will be woken for it. Has no side
    /// effects.
    fn is_abandoned(&self) -> bool {
        false
    }

    /// Calls `work` with the order, for the control plane. May wait for other threads, and may
    /// leave work undone.
    fn with_order(&self, work: &mut dyn FnMut(&mut Deadline<QueuedRequest>));
}
