//! A device as exporters and the control plane see it: with a name, and with its type hidden.

use crate::channel::{Channel, Stats};
use crate::device::{DeviceError, Extent};
use crate::geometry::Geometry;
use crate::inject::Injection;
use crate::limits::Limits;
use crate::middleware::{FaultInjector, TracePoint};
use crate::sched::SchedulerControl;
use crate::units::Sector;
use crate::zone::ZoneInfo;
use crate::zone::gate::GateView;

/// A composed device with a name: the device itself, its middleware and its scheduler.
///
/// Linux calls this a disk (`struct gendisk`). Static composition ends here: `open` returns a
/// `Box<dyn Channel>`, and everything below it is monomorphic.
pub trait Disk: Send + Sync {
    /// The name, unique in a yard.
    fn name(&self) -> &str;

    /// The kind of device, as in its URI: `null`, `ram`.
    fn kind(&self) -> &'static str;

    /// The shape of the device.
    fn geometry(&self) -> &Geometry;

    /// The limits of one request.
    fn limits(&self) -> &Limits;

    /// Opens a channel for one thread.
    ///
    /// # Errors
    /// If the device is gone or can serve no more queues.
    fn open(&self) -> Result<Box<dyn Channel>, DeviceError>;

    /// Reports zones, as [`crate::device::Device::report_zones`].
    ///
    /// # Errors
    /// If `from` lies beyond the end of the device.
    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError>;

    /// The allocation state of a range, as [`crate::device::Device::extent`].
    fn extent(&self, from: Sector, sectors: u64) -> Extent;

    /// Injects a fault: a rule of the fault injector, or a fault of the device itself.
    ///
    /// # Errors
    /// If neither has such a fault, or the value is invalid.
    fn inject(&self, injection: &Injection) -> Result<(), DeviceError>;

    /// How zone writes are ordered; `None` for a device without zones.
    fn gate(&self) -> Option<GateView> {
        None
    }

    /// The scheduler that the channels share; `None` where each channel has its own.
    fn scheduler(&self) -> Option<&dyn SchedulerControl> {
        None
    }

    /// Where recorders of traces are attached; `None` if the device cannot be recorded.
    fn trace_point(&self) -> Option<&TracePoint> {
        None
    }

    /// The fault injector; `None` if the device has none.
    fn fault_injector(&self) -> Option<&FaultInjector> {
        None
    }

    /// The sum of the counters of all channels, open and closed.
    fn stats(&self) -> Stats;
}
