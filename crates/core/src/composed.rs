//! A [`Disk`] of any device, where static composition ends.

use std::fmt;
use std::sync::Arc;

use crate::channel::{Channel, ChannelConfig, ChannelGroup, ChannelStats, Stack, Stats};
use crate::clock::{Clock, Monotonic};
use crate::device::{Device, DeviceError, Extent};
use crate::disk::Disk;
use crate::geometry::Geometry;
use crate::inject::Injection;
use crate::limits::Limits;
use crate::middleware::{FaultInjector, TracePoint};
use crate::sched::SchedulerControl;
use crate::units::Sector;
use crate::zone::ZoneInfo;
use crate::zone::gate::{GateView, Gates, Ungated};

/// A named device and, if zone writes need ordering, a zone write plug.
pub struct Composed<D, C = Monotonic, W = Ungated> {
    name: String,
    kind: &'static str,
    device: D,
    limits: Limits,
    config: ChannelConfig,
    gates: W,
    clock: C,
    channels: ChannelGroup,
}

impl<D: Device> Composed<D> {
    /// `device` under the name `name`.
    pub fn new(name: String, kind: &'static str, device: D, config: ChannelConfig) -> Composed<D> {
        Composed::with_clock(name, kind, device, config, Monotonic)
    }
}

impl<D: Device, C: Clock + Clone> Composed<D, C> {
    /// A disk as by [`Composed::new`], with the caller's clock.
    pub fn with_clock(
        name: String,
        kind: &'static str,
        device: D,
        config: ChannelConfig,
        clock: C,
    ) -> Composed<D, C> {
        let limits = device.limits().clone();
        let (gates, channels) = (Ungated, ChannelGroup::default());
        Composed { name, kind, device, limits, config, gates, clock, channels }
    }

    /// Returns the disk with a zone write plug.
    pub fn with_gates<W: Gates>(self, gates: W) -> Composed<D, C, W> {
        let limits = gates.limits(&self.limits);
        let Composed { name, kind, device, config, clock, channels, .. } = self;
        Composed { name, kind, device, limits, config, gates, clock, channels }
    }
}

impl<D: Device, C: Clock + Clone, W: Gates> Composed<D, C, W> {
    /// Returns the disk as read-only: every change fails.
    pub fn read_only(mut self) -> Self {
        self.limits.read_only = true;
        self
    }

    /// The wrapped device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Opens a channel as a concrete type, for callers that need no `dyn`.
    ///
    /// # Errors
    /// If the device is gone or can serve no more queues.
    pub fn open_stack(&self) -> Result<Stack<D::Queue, C, W::Gate>, DeviceError> {
        self.stack(ChannelStats::new())
    }

    fn stack(&self, stats: Arc<ChannelStats>) -> Result<Stack<D::Queue, C, W::Gate>, DeviceError> {
        // The first reading of a process checks in files whether the processor's counter is usable.
        self.clock.now();
        let layers = (self.gates.open(self.config.depth), self.device.open_queue()?);
        let (config, geometry) = (self.config, self.device.geometry());
        Ok(Stack::with_gate(config, geometry, &self.limits, layers, self.clock.clone(), stats))
    }
}

impl<D, C, W> Disk for Composed<D, C, W>
where
    D: Device,
    C: Clock + Clone + Sync,
    W: Gates,
{
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> &'static str {
        self.kind
    }

    fn geometry(&self) -> &Geometry {
        self.device.geometry()
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn open(&self) -> Result<Box<dyn Channel>, DeviceError> {
        let stats = ChannelStats::new();
        let stack = self.stack(Arc::clone(&stats))?;
        self.channels.add_counters(stats);
        Ok(Box::new(stack))
    }

    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        self.device.report_zones(from, zones_max, out)
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        self.device.extent(from, sectors)
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        let done = self.device.inject(injection);
        // A fault may have changed zones even if it failed in the end.
        self.gates.zones_changed();
        done
    }

    fn gate(&self) -> Option<GateView> {
        self.device.geometry().zones.as_ref().map(|_| self.gates.view())
    }

    fn scheduler(&self) -> Option<&dyn SchedulerControl> {
        self.device.scheduler()
    }

    fn trace_point(&self) -> Option<&TracePoint> {
        self.device.trace_point()
    }

    fn fault_injector(&self) -> Option<&FaultInjector> {
        self.device.fault_injector()
    }

    fn stats(&self) -> Stats {
        self.channels.sum()
    }
}

impl<D, C, W> fmt::Debug for Composed<D, C, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Composed { name, kind, .. } = self;
        f.debug_struct("Composed").field("name", name).field("kind", kind).finish_non_exhaustive()
    }
}
