//! The product's scheduler without its leases: every request goes through submit rings, the
//! combining lock and the completion queue.
//!
//! Where the device completes at once and no request waits, the product passes requests on by
//! leases and does not use rings and lock. It needs them in every other case: for a device that
//! completes later, and for all submitters while a single request of a lower class waits. So they
//! are measured separately, too.

use std::fmt;

use blockyard_core::sched::deadline::Deadline;
use blockyard_core::sched::shared::{
    Dispatcher, Left, QueuedRequest, Report, SchedulerQueue, SchedulerQueueConfig,
};
use blockyard_core::units::Nanos;

/// The baseline's name in measurements.
pub const NAME: &str = "product-lanes";

/// The product's scheduler with its leases disabled.
pub struct LanesAlone(Dispatcher);

impl fmt::Debug for LanesAlone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LanesAlone").finish_non_exhaustive()
    }
}

impl SchedulerQueue for LanesAlone {
    const NAME: &'static str = "lanes";

    type SubmitRing = <Dispatcher as SchedulerQueue>::SubmitRing;

    fn new(config: &SchedulerQueueConfig) -> LanesAlone {
        LanesAlone(Dispatcher::new(config))
    }

    fn open(&self) -> Self::SubmitRing {
        self.0.open()
    }

    #[inline]
    fn room(&self, lane: &Self::SubmitRing) -> usize {
        self.0.room(lane)
    }

    #[inline]
    fn insert(&self, lane: &mut Self::SubmitRing, requests: &[QueuedRequest], now: Nanos) -> usize {
        self.0.insert(lane, requests, now)
    }

    #[inline]
    fn dispatch(
        &self,
        lane: &mut Self::SubmitRing,
        now: Nanos,
        room: usize,
        out: &mut Vec<QueuedRequest>,
    ) -> Left {
        self.0.dispatch(lane, now, room, out)
    }

    #[inline]
    fn report(&self, reports: &mut Vec<Report>) {
        self.0.report(reports);
    }

    #[inline]
    fn is_work(&self) -> bool {
        self.0.is_work()
    }

    fn notify(&self) -> bool {
        self.0.notify()
    }

    fn abandon(&self) {
        self.0.abandon();
    }

    #[inline]
    fn is_abandoned(&self) -> bool {
        self.0.is_abandoned()
    }

    fn with_order(&self, work: &mut dyn FnMut(&mut Deadline<QueuedRequest>)) {
        self.0.with_order(work);
    }
}
