//! A device whose channels share a scheduler.

use std::fmt;
use std::sync::Arc;

use blockyard_sync::combining_lock::CombiningLock;
use blockyard_sync::poll_leader::PollLeader;
use blockyard_sync::rcu_cell::RcuCell;

use super::completion_router::CompletionRouter;
use super::shared_queue::SharedQueue;
use super::{
    Dispatcher, ORDER_CAPACITY, REQUESTS_MAX, ScheduledQueue, SchedulerQueue, SchedulerQueueConfig,
};
use crate::device::{Device, DeviceError, Extent};
use crate::geometry::Geometry;
use crate::inject::Injection;
use crate::limits::Limits;
use crate::middleware::{FaultInjector, TracePoint};
use crate::request::MergeRules;
use crate::sched::deadline::{Deadline, Stats, Tunables};
use crate::sched::{SchedulerControl, UnknownScheduler};
use crate::units::Sector;
use crate::zone::ZoneInfo;

/// Maximum number of requests that a thread takes at once, regardless of the device's depth: if the
/// thread is preempted, they wait with it.
const TAKE_MAX_LIMIT: u16 = 32;

/// The names of the available schedulers.
const AVAILABLE: [&str; 2] = ["none", "mq-deadline"];

/// The state that a scheduled device and its channels share.
pub(super) struct Shared<Q, F> {
    pub(super) scheduler_queue: F,
    pub(super) shared_queue: CombiningLock<SharedQueue<Q>>,
    pub(super) router: CompletionRouter,
    pub(super) poll_leader: PollLeader,
    /// Whether the scheduler is active; otherwise requests bypass it.
    pub(super) active: Arc<RcuCell<bool>>,
    pub(super) depth: u16,
    /// Maximum number of requests that a thread takes at once.
    pub(super) take_max: u16,
    /// The merge rules of the device.
    pub(super) rules: MergeRules,
    /// Sectors of a zone; 0 without zones.
    pub(super) zone_sectors: u64,
}

impl<Q, F> Shared<Q, F> {
    /// Maximum number of requests that a channel has in the scheduler or in flight.
    pub(super) fn requests_max(&self) -> u16 {
        self.depth.max(REQUESTS_MAX)
    }
}

/// `D` with the requests of all its channels in one order.
///
/// It keeps no order between requests of different threads, and a write to a zone may overtake
/// another one. A zoned device therefore needs a zone write plug
/// ([`crate::zone::gate::GateMode::ZoneWritePlug`]) above it.
pub struct Scheduled<D: Device, F: SchedulerQueue = Dispatcher> {
    inner: D,
    limits: Limits,
    shared: Arc<Shared<D::Queue, F>>,
}

impl<D: Device> Scheduled<D> {
    /// A device under the deadline scheduler, which is active at once if `active` is set.
    ///
    /// # Errors
    /// If the device can serve no more queues.
    pub fn new(inner: D, active: bool) -> Result<Scheduled<D>, DeviceError> {
        Scheduled::with_scheduler_queue(inner, active)
    }
}

/// How many requests a thread takes at once from a device with `depth` tags. A power of two, so
/// small that twice as many threads as processors can have some: a preempted thread keeps the
/// requests that it holds.
fn take_max_of(depth: u16, processors: usize) -> u16 {
    let take_max = usize::from(depth) / (2 * processors.max(1));
    let take_max = take_max.clamp(1, TAKE_MAX_LIMIT.into()) as u16;
    1 << take_max.ilog2()
}

/// Processors that this process may use; two for tests with random interleavings.
fn processors() -> usize {
    if cfg!(shuttle) { 2 } else { std::thread::available_parallelism().map_or(1, usize::from) }
}

impl<D: Device, F: SchedulerQueue> Scheduled<D, F> {
    /// A device with another scheduler queue, for comparisons.
    ///
    /// # Errors
    /// If the device can serve no more queues.
    pub fn with_scheduler_queue(inner: D, active: bool) -> Result<Scheduled<D, F>, DeviceError> {
        Scheduled::for_processors(inner, active, processors())
    }

    /// A device with another scheduler queue, tuned for a number of processors.
    ///
    /// # Errors
    /// If the device can serve no more queues.
    pub fn for_processors(
        inner: D,
        active: bool,
        processors: usize,
    ) -> Result<Scheduled<D, F>, DeviceError> {
        let depth = inner.limits().queue_depth.max(1);
        let config = SchedulerQueueConfig {
            depth,
            take_max: take_max_of(depth, processors),
            capacity: ORDER_CAPACITY,
            rules: MergeRules::new(inner.limits()),
            zones: inner.geometry().zones.clone(),
            tunables: Tunables::new(ORDER_CAPACITY as u32),
        };
        let shared = Shared {
            scheduler_queue: F::new(&config),
            shared_queue: CombiningLock::new(SharedQueue::new(inner.open_queue()?, depth)),
            router: CompletionRouter::new(),
            poll_leader: PollLeader::new(),
            active: Arc::new(RcuCell::new(active)),
            depth,
            take_max: config.take_max,
            rules: config.rules,
            zone_sectors: config.zones.as_ref().map_or(0, |zones| zones.zone_sectors),
        };
        let queue_depth = shared.requests_max();
        let limits = Limits { queue_depth, ordered: false, ..inner.limits().clone() };
        Ok(Scheduled { inner, limits, shared: Arc::new(shared) })
    }

    /// The wrapped device.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Calls `work` with the order, then wakes a thread for requests that arrived meanwhile.
    fn with_order(&self, work: &mut dyn FnMut(&mut Deadline<super::QueuedRequest>)) {
        self.shared.scheduler_queue.with_order(work);
        self.shared.router.notify_one();
    }
}

impl<D: Device, F: SchedulerQueue> Device for Scheduled<D, F> {
    type Queue = ScheduledQueue<D::Queue, F>;

    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn open_queue(&self) -> Result<Self::Queue, DeviceError> {
        let own = self.inner.open_queue()?;
        let target =
            self.shared.router.open(self.shared.requests_max().into()).ok_or(DeviceError::Os {
                what: "opening one more channel under a scheduler, which takes 65536",
                errno: 24, // EMFILE
            })?;
        Ok(ScheduledQueue::new(Arc::clone(&self.shared), own, target))
    }

    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        self.inner.report_zones(from, zones_max, out)
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        self.inner.extent(from, sectors)
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        self.inner.inject(injection)
    }

    fn scheduler(&self) -> Option<&dyn SchedulerControl> {
        Some(self)
    }

    fn trace_point(&self) -> Option<&TracePoint> {
        self.inner.trace_point()
    }

    fn fault_injector(&self) -> Option<&FaultInjector> {
        self.inner.fault_injector()
    }
}

impl<D: Device, F: SchedulerQueue> SchedulerControl for Scheduled<D, F> {
    fn available(&self) -> &'static [&'static str] {
        &AVAILABLE
    }

    fn active(&self) -> &'static str {
        AVAILABLE[usize::from(*self.shared.active.get())]
    }

    fn switch(&self, name: &str) -> Result<(), UnknownScheduler> {
        let active = match name {
            "none" => false,
            "mq-deadline" | "deadline" => true,
            _ => return Err(UnknownScheduler { name: name.to_owned() }),
        };
        self.shared.active.update(|_| active);
        Ok(())
    }

    fn tunables(&self) -> Tunables {
        let mut tunables = None;
        self.with_order(&mut |order| tunables = Some(*order.tunables()));
        tunables.expect("the order was looked at")
    }

    fn set(&self, tunables: Tunables) {
        self.with_order(&mut |order| order.set(tunables));
    }

    fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        self.with_order(&mut |order| stats = order.stats());
        stats
    }

    fn depth(&self) -> u16 {
        self.shared.depth
    }

    fn waiting(&self) -> usize {
        let mut waiting = 0;
        self.with_order(&mut |order| waiting = order.waiting());
        waiting
    }
}

impl<D: Device, F: SchedulerQueue> fmt::Debug for Scheduled<D, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheduled").field("scheduler", &self.active()).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn take_max_leaves_requests_for_twice_the_processors() {
        for (depth, processors, take_max) in [
            (128, 1, 32),
            (128, 2, 32),
            (64, 2, 16),
            (128, 3, 16),
            (128, 8, 8),
            (128, 64, 1),
            (128, 72, 1),
            (1024, 8, 32),
            (1024, 72, 4),
            (1, 1, 1),
            (3, 0, 1),
            (u16::MAX, 1, 32),
        ] {
            assert_eq!(
                take_max_of(depth, processors),
                take_max,
                "{depth} tags, {processors} processors"
            );
        }
    }
}
