//! The two traits of a device: its control plane, and the queue that one channel holds.

use std::fmt;
use std::os::fd::RawFd;

use crate::bio::Status;
use crate::clock::Clock;
use crate::geometry::Geometry;
use crate::inject::Injection;
use crate::limits::Limits;
use crate::middleware::{FaultInjector, TracePoint};
use crate::request::{Batch, CompletionBatch};
use crate::sched::SchedulerControl;
use crate::units::{Nanos, Sector};
use crate::work::InlineRequest;
use crate::zone::ZoneInfo;

/// The control plane of a device.
pub trait Device: Send + Sync + 'static {
    /// The queue that one channel holds of the device.
    type Queue: DeviceQueue;

    /// The shape of the device.
    fn geometry(&self) -> &Geometry;

    /// The limits of one request.
    fn limits(&self) -> &Limits;

    /// Opens a queue for one channel.
    ///
    /// # Errors
    /// If the device is gone or can serve no more queues.
    fn open_queue(&self) -> Result<Self::Queue, DeviceError>;

    /// Appends up to `zones_max` zones to `out`, from the zone that contains `from`. A device
    /// without zones appends none.
    ///
    /// # Errors
    /// If `from` lies beyond the end of the device.
    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError>;

    /// The allocation state of a range: the extent that starts at `from`, at least one block and at
    /// most `sectors` long. A device without this information reports the whole range as data.
    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        let _ = from;
        Extent { sectors, allocated: true, zero: false }
    }

    /// Injects a fault that only this device knows (bad blocks, a zone that becomes read-only, a
    /// power cut).
    ///
    /// # Errors
    /// If the device has no such fault, or the value is invalid.
    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        Err(DeviceError::NoSuchFault { fault: injection.name().to_owned() })
    }

    /// The scheduler that the channels of the device share, if there is one.
    fn scheduler(&self) -> Option<&dyn SchedulerControl> {
        None
    }

    /// Where recorders of traces are attached, if the device can be recorded.
    fn trace_point(&self) -> Option<&TracePoint> {
        None
    }

    /// The fault injector of the device, if it has one.
    fn fault_injector(&self) -> Option<&FaultInjector> {
        None
    }
}

/// A range of sectors with one allocation state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in sectors.
    pub sectors: u64,
    /// Whether memory or medium is allocated for the range.
    pub allocated: bool,
    /// Whether the range is known to read as zeros.
    pub zero: bool,
}

/// A device's queue for one channel. It belongs to one thread.
pub trait DeviceQueue: Send + 'static {
    /// Starts requests from the batch, in order. The channel offers requests that the queue leaves
    /// in the batch again later. The queue puts completions into `done` and calls nothing back.
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch);

    /// Executes a read or a write inline and returns its status, if `start` would complete it at
    /// once anyway. Returns `None` if the request has to come through `start`; then it is the next
    /// one that `start` gets. Called only while no other request of the channel is in flight.
    #[inline]
    fn execute_inline(&mut self, single: InlineRequest) -> Option<Status> {
        let _ = single;
        None
    }

    /// Moves requests that have completed into `done`.
    fn poll(&mut self, now: Nanos, done: &mut CompletionBatch);

    /// How many more requests the queue would start now.
    fn room(&self) -> usize;

    /// When `poll` will next find a completion.
    fn due(&self) -> Due;

    /// Whether a request that starts now would be complete when `start` returns, so that the
    /// calling thread spends the time and nothing is left to poll.
    #[inline]
    fn is_immediate(&mut self) -> bool {
        false
    }

    /// Whether other threads hold requests of the channel, so that the channel waits by
    /// [`DeviceQueue::sleep`].
    #[inline]
    fn waits_for_others(&self) -> bool {
        false
    }

    /// Sleeps until `poll` would find a completion, but not beyond `until`. A completion from
    /// another thread ends the sleep early.
    fn sleep<C: Clock>(&mut self, until: Due, clock: &C) {
        if let Due::At(at) = self.due().earlier(until) {
            clock.sleep_until(at);
        }
    }

    /// A descriptor that becomes readable when another thread has completed something for this
    /// queue. For callers that also wait for other events. After the first call,
    /// [`DeviceQueue::due`] reports only completions that depend on time.
    fn descriptor(&mut self) -> Option<RawFd> {
        None
    }

    /// Announces that the caller will sleep on the descriptor until it calls `poll` again. Returns
    /// `false` if `poll` would find a completion now.
    fn may_sleep(&mut self) -> bool {
        true
    }

    /// Completes requests that only wait for a point in time, because no thread waits for them any
    /// more. A queue that delays no request does nothing.
    fn abort(&mut self, done: &mut CompletionBatch) {
        let _ = done;
    }
}

/// When the next completion is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Nothing is in flight, or its completion does not depend on time.
    Never,
    /// At this time; a time in the past means now.
    At(Nanos),
}

impl Due {
    /// The earlier of two times.
    #[inline]
    pub fn earlier(self, other: Due) -> Due {
        match (self, other) {
            (Due::Never, due) | (due, Due::Never) => due,
            (Due::At(a), Due::At(b)) => Due::At(a.min(b)),
        }
    }
}

/// Why the control plane of a device refused an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device has no fault of this kind.
    NoSuchFault {
        /// The requested fault.
        fault: String,
    },
    /// A value is invalid for its field.
    Invalid {
        /// The parameter or argument.
        field: &'static str,
        /// The given value.
        value: String,
        /// The expected value.
        wanted: String,
    },
    /// The sector lies beyond the device.
    OutOfRange {
        /// The sector.
        sector: Sector,
        /// The device's length in sectors.
        sectors: u64,
    },
    /// The device has been closed.
    Gone,
    /// The system refused memory or another resource.
    Os {
        /// The failed operation.
        what: &'static str,
        /// The error number.
        errno: i32,
    },
}

impl DeviceError {
    /// The status of a request that fails with this error.
    pub fn status(&self) -> Status {
        match self {
            DeviceError::Gone => Status::Offline,
            DeviceError::Os { errno, .. } => {
                let mut failures = Status::ALL.iter().filter(|status| !status.is_ok());
                failures.find(|status| status.errno() == *errno).copied().unwrap_or(Status::IoErr)
            }
            _ => Status::IoErr,
        }
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceError::NoSuchFault { fault } => {
                write!(f, "this device has no fault `{fault}`")
            }
            DeviceError::Invalid { field, value, wanted } => {
                write!(f, "invalid {field} `{value}`: expected {wanted}")
            }
            DeviceError::OutOfRange { sector, sectors } => {
                write!(f, "sector {sector} lies beyond the device's {sectors} sectors")
            }
            DeviceError::Gone => f.write_str("the device has been closed"),
            DeviceError::Os { what, errno } => {
                write!(f, "{what}: {}", std::io::Error::from_raw_os_error(*errno))
            }
        }
    }
}

impl std::error::Error for DeviceError {}

/// A shared device is a device, so that middleware and disks can own it.
impl<D: Device> Device for std::sync::Arc<D> {
    type Queue = D::Queue;

    fn geometry(&self) -> &Geometry {
        (**self).geometry()
    }

    fn limits(&self) -> &Limits {
        (**self).limits()
    }

    fn open_queue(&self) -> Result<Self::Queue, DeviceError> {
        (**self).open_queue()
    }

    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        (**self).report_zones(from, zones_max, out)
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        (**self).extent(from, sectors)
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        (**self).inject(injection)
    }

    fn scheduler(&self) -> Option<&dyn SchedulerControl> {
        (**self).scheduler()
    }

    fn trace_point(&self) -> Option<&TracePoint> {
        (**self).trace_point()
    }

    fn fault_injector(&self) -> Option<&FaultInjector> {
        (**self).fault_injector()
    }
}
