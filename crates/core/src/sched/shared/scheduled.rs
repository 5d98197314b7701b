//! A device whose channels share a scheduler.

use std::fmt;
use std::sync::Arc;

use blockyard_sync::published::Published;
use blockyard_sync::role::Role;
use blockyard_sync::watch::Watch;

use super::engine::Engine;
use super::homes::Homes;
use super::{
    Combiner, Front, FrontConfig, ORDER_CAPACITY, REQUESTS_MAX, ScheduledQueue, SchedulerControl,
    UnknownScheduler,
};
use crate::channel::MergeRules;
use crate::device::{Device, DeviceError, Extent};
use crate::geometry::Geometry;
use crate::inject::Injection;
use crate::limits::Limits;
use crate::sched::deadline::{Deadline, Stats, Tunables};
use crate::units::Sector;
use crate::zone::ZoneInfo;

/// Most requests that a thread takes at once, however deep the device: what it has in hand when it
/// loses its processor waits with it.
const HAND_MAX: u16 = 32;

/// The names of what there is.
const AVAILABLE: [&str; 2] = ["none", "mq-deadline"];

/// What a scheduled device and its channels share.
pub(super) struct Shared<Q, F> {
    pub(super) front: F,
    pub(super) engine: Role<Engine<Q>>,
    pub(super) homes: Homes,
    pub(super) watch: Watch,
    /// Whether the scheduler is at work; else requests go past it.
    pub(super) active: Arc<Published<bool>>,
    pub(super) depth: u16,
    /// Most requests that a thread takes at once.
    pub(super) hand: u16,
    /// What may become one request.
    pub(super) rules: MergeRules,
    /// Sectors of a zone; 0 without zones.
    pub(super) zone_sectors: u64,
}

impl<Q, F> Shared<Q, F> {
    /// Most requests that a channel has out.
    pub(super) fn requests_max(&self) -> u16 {
        self.depth.max(REQUESTS_MAX)
    }
}

/// `D`, with the requests of all its channels in one order.
///
/// It keeps no order between requests of different threads, and a write to a zone may overtake
/// another one: before zones there has to be a gate of [`crate::zone::gate::GateMode::Plug`].
pub struct Scheduled<D: Device, F: Front = Combiner> {
    inner: D,
    limits: Limits,
    shared: Arc<Shared<D::Queue, F>>,
}

impl<D: Device> Scheduled<D> {
    /// A device under the deadline scheduler, which is at work at once if `active` says so.
    ///
    /// # Errors
    /// If the device can serve no more queues.
    pub fn new(inner: D, active: bool) -> Result<Scheduled<D>, DeviceError> {
        Scheduled::with_front(inner, active)
    }
}

/// How many requests a thread takes at once, of a device with so many tags on a machine with so
/// many processors: a power of two, and so few that twice as many threads as there are processors
/// can have some, because those that have lost their processor keep what they have in hand.
fn hand_of(depth: u16, processors: usize) -> u16 {
    let hand = usize::from(depth) / (2 * processors.max(1));
    let hand = hand.clamp(1, HAND_MAX.into()) as u16;
    1 << hand.ilog2()
}

/// Processors that this program may use. Interleavings are drawn for a machine of two.
fn processors() -> usize {
    if cfg!(shuttle) { 2 } else { std::thread::available_parallelism().map_or(1, usize::from) }
}

impl<D: Device, F: Front> Scheduled<D, F> {
    /// The same with another way to the order: to compare them.
    ///
    /// # Errors
    /// As [`Scheduled::new`].
    pub fn with_front(inner: D, active: bool) -> Result<Scheduled<D, F>, DeviceError> {
        Scheduled::for_processors(inner, active, processors())
    }

    /// The same for threads that run on so many processors.
    ///
    /// # Errors
    /// As [`Scheduled::new`].
    pub fn for_processors(
        inner: D,
        active: bool,
        processors: usize,
    ) -> Result<Scheduled<D, F>, DeviceError> {
        let depth = inner.limits().queue_depth.max(1);
        let config = FrontConfig {
            depth,
            hand: hand_of(depth, processors),
            capacity: ORDER_CAPACITY,
            rules: MergeRules::new(inner.limits()),
            zones: inner.geometry().zones.clone(),
            tunables: Tunables::new(ORDER_CAPACITY as u32),
        };
        let shared = Shared {
            front: F::new(&config),
            engine: Role::new(Engine::new(inner.open_queue()?, depth)),
            homes: Homes::new(),
            watch: Watch::new(),
            active: Arc::new(Published::new(active)),
            depth,
            hand: config.hand,
            rules: config.rules,
            zone_sectors: config.zones.as_ref().map_or(0, |zones| zones.zone_sectors),
        };
        let queue_depth = shared.requests_max();
        let limits = Limits { queue_depth, ordered: false, ..inner.limits().clone() };
        Ok(Scheduled { inner, limits, shared: Arc::new(shared) })
    }

    /// The device itself.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Works on the order, and sees to it that what came meanwhile is not left lying.
    fn with_order(&self, work: &mut dyn FnMut(&mut Deadline<super::Queued>)) {
        self.shared.front.with_order(work);
        self.shared.homes.ring_one();
    }
}

impl<D: Device, F: Front> Device for Scheduled<D, F> {
    type Queue = ScheduledQueue<D::Queue, F>;

    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn open_queue(&self) -> Result<Self::Queue, DeviceError> {
        let own = self.inner.open_queue()?;
        let home =
            self.shared.homes.open(self.shared.requests_max().into()).ok_or(DeviceError::Os {
                what: "opening one more channel under a scheduler, which takes 65536",
                errno: 24, // EMFILE
            })?;
        Ok(ScheduledQueue::new(Arc::clone(&self.shared), own, home))
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
}

impl<D: Device, F: Front> SchedulerControl for Scheduled<D, F> {
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

impl<D: Device, F: Front> fmt::Debug for Scheduled<D, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheduled").field("scheduler", &self.active()).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn twice_as_many_threads_as_processors_have_something_in_hand() {
        for (depth, processors, hand) in [
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
            assert_eq!(hand_of(depth, processors), hand, "{depth} tags, {processors} processors");
        }
    }
}
