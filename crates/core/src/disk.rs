//! A device as exporters and the control plane see it: named, composed, and with any kind hidden.

use crate::channel::{Channel, Stats};
use crate::device::{DeviceError, Extent};
use crate::geometry::Geometry;
use crate::inject::Injection;
use crate::limits::Limits;
use crate::sched::shared::SchedulerControl;
use crate::units::Sector;
use crate::zone::ZoneInfo;
use crate::zone::gate::GateView;

/// A composed device: the device itself, its middleware and its scheduler, behind one name.
///
/// Linux calls this thing a disk (`struct gendisk`). It is where static composition ends: what it
/// opens is a `Box<dyn Channel>`, with everything below compiled into one piece.
pub trait Disk: Send + Sync {
    /// The name, unique in a yard.
    fn name(&self) -> &str;

    /// The kind of device, as in its URI: `null`, `ram`.
    fn kind(&self) -> &'static str;

    /// Its shape.
    fn geometry(&self) -> &Geometry;

    /// What it takes in one request.
    fn limits(&self) -> &Limits;

    /// A new channel, for one thread.
    ///
    /// # Errors
    /// If the device is gone or can serve no more queues.
    fn open(&self) -> Result<Box<dyn Channel>, DeviceError>;

    /// See [`crate::device::Device::report_zones`].
    ///
    /// # Errors
    /// If `from` lies beyond the device.
    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError>;

    /// See [`crate::device::Device::extent`].
    fn extent(&self, from: Sector, sectors: u64) -> Extent;

    /// Carries out a fault: a rule of the error injector, or one of the device's own.
    ///
    /// # Errors
    /// If nothing here has such a fault, or the value does not fit it.
    fn inject(&self, injection: &Injection) -> Result<(), DeviceError>;

    /// How changes of a zone are kept in order; `None` for a device without zones.
    fn gate(&self) -> Option<GateView> {
        None
    }

    /// The scheduler that its channels share; `None` where each channel is on its own.
    fn scheduler(&self) -> Option<&dyn SchedulerControl> {
        None
    }

    /// The sum over all channels, those already closed included.
    fn stats(&self) -> Stats;
}
