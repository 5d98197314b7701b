//! Middleware: devices that wrap a device. A delay; a fault injector, which also records traces.

mod delayed;
mod fault_injector;
mod faulty;
mod injected_delays;
mod interceptors;
mod recorder;

pub use delayed::{Delayed, DelayedQueue};
pub use fault_injector::{FaultInjector, InjectedFaults, RULES_MAX, RuleStatus};
pub use faulty::{Faulty, FaultyQueue};
pub(crate) use recorder::PieceMark;
pub use recorder::{
    LostEvents, Recorder, Recording, TraceEvent, TraceKind, TracePoint, TraceSource, TraceWriter,
};

/// Forwards the control plane to the wrapped device, except for the methods that a wrapper changes.
macro_rules! forward_control_plane {
    () => {
        fn geometry(&self) -> &crate::geometry::Geometry {
            self.inner.geometry()
        }

        fn limits(&self) -> &crate::limits::Limits {
            self.inner.limits()
        }

        fn report_zones(
            &self,
            from: crate::units::Sector,
            zones_max: usize,
            out: &mut Vec<crate::zone::ZoneInfo>,
        ) -> Result<(), crate::device::DeviceError> {
            self.inner.report_zones(from, zones_max, out)
        }

        fn extent(&self, from: crate::units::Sector, sectors: u64) -> crate::device::Extent {
            self.inner.extent(from, sectors)
        }
    };
}
use forward_control_plane;
