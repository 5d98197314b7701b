//! The two traits that a device is: its control plane, and what one channel holds of it.

use std::fmt;
use std::os::fd::RawFd;

use crate::clock::Clock;
use crate::geometry::Geometry;
use crate::inject::Injection;
use crate::limits::Limits;
use crate::request::{Batch, Done};
use crate::sched::shared::SchedulerControl;
use crate::status::Status;
use crate::units::{Nanos, Sector};
use crate::work::Single;
use crate::zone::ZoneInfo;

/// The control plane of a device.
pub trait Device: Send + Sync + 'static {
    /// What a channel holds of it.
    type Queue: DeviceQueue;

    /// Its shape.
    fn geometry(&self) -> &Geometry;

    /// What it takes in one request.
    fn limits(&self) -> &Limits;

    /// A new queue, for one channel.
    ///
    /// # Errors
    /// If the device is gone or can serve no more queues.
    fn open_queue(&self) -> Result<Self::Queue, DeviceError>;

    /// Appends up to `zones_max` zones to `out`, from the one that holds `from` on. A device
    /// without zones reports none.
    ///
    /// # Errors
    /// If `from` lies beyond the device.
    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError>;

    /// What is known of the range's contents: the extent that starts at `from`, at most `sectors`
    /// long and at least one block. A device that does not know says that all of it is data.
    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        let _ = from;
        Extent { sectors, allocated: true, zero: false }
    }

    /// Carries out a fault that only this device knows how to have (bad blocks, a zone that turns
    /// read-only, a power cut).
    ///
    /// # Errors
    /// If the device has no such fault, or the value does not fit it.
    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        Err(DeviceError::NoSuchFault { fault: injection.name().to_owned() })
    }

    /// The scheduler that its channels share, if they do.
    fn scheduler(&self) -> Option<&dyn SchedulerControl> {
        None
    }
}

/// A run of sectors of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in sectors.
    pub sectors: u64,
    /// Whether memory or medium is held for it.
    pub allocated: bool,
    /// Whether it is known to read as zeros.
    pub zero: bool,
}

/// What one channel holds of a device. Belongs to one thread.
pub trait DeviceQueue: Send + 'static {
    /// Starts requests from the batch, in order. What the queue leaves in the batch is offered
    /// again later. Completions go into `done`; none is called back.
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut Done);

    /// Carries a read or a write out on the spot and says how it ended, if `start` would complete
    /// it anyway; `None` leaves it undone, and it comes again through `start`. Asked only while
    /// nothing of the channel is in flight.
    #[inline]
    fn carry(&mut self, single: Single) -> Option<Status> {
        let _ = single;
        None
    }

    /// Moves what has become complete into `done`.
    fn poll(&mut self, now: Nanos, done: &mut Done);

    /// How many more requests it would start now.
    fn room(&self) -> usize;

    /// When `poll` will next find something.
    fn due(&self) -> Due;

    /// Whether what it starts now would be complete when `start` returns, so that whoever starts it
    /// spends the time and nothing is left to poll.
    #[inline]
    fn is_immediate(&mut self) -> bool {
        false
    }

    /// Whether something of the channel is in the hands of other threads, so that
    /// [`DeviceQueue::sleep`] is the way to wait for it.
    #[inline]
    fn waits_for_others(&self) -> bool {
        false
    }

    /// Sleeps until `poll` would find something, but not beyond `until`. Returns early, in time,
    /// where another thread has brought it.
    fn sleep<C: Clock>(&mut self, until: Due, clock: &C) {
        if let Due::At(at) = self.due().earlier(until) {
            clock.sleep_until(at);
        }
    }

    /// A descriptor that can be read when others have brought something for who sleeps: for callers
    /// that sleep on other things as well. Once it was asked for, [`DeviceQueue::due`] says only
    /// what time brings.
    fn descriptor(&mut self) -> Option<RawFd> {
        None
    }

    /// The caller is about to sleep on the descriptor until it calls `poll` again; `false` if that
    /// would find something now.
    fn may_sleep(&mut self) -> bool {
        true
    }

    /// Completes at once what only waits for a time to come, because nobody waits for it any more.
    /// A queue that keeps nothing back has nothing to do.
    fn abort(&mut self, done: &mut Done) {
        let _ = done;
    }
}

/// When something is next to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Nothing is under way.
    Never,
    /// At this time; a time in the past means now.
    At(Nanos),
}

impl Due {
    /// The earlier of two.
    #[inline]
    pub fn earlier(self, other: Due) -> Due {
        match (self, other) {
            (Due::Never, due) | (due, Due::Never) => due,
            (Due::At(a), Due::At(b)) => Due::At(a.min(b)),
        }
    }
}

/// Why the control plane of a device refused something.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device has no fault of this kind.
    NoSuchFault {
        /// What was asked for.
        fault: String,
    },
    /// A value does not fit the field.
    Invalid {
        /// The parameter or argument.
        field: &'static str,
        /// What was given.
        value: String,
        /// What would do.
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
        /// What was being done.
        what: &'static str,
        /// The error number.
        errno: i32,
    },
}

impl DeviceError {
    /// The status of a request that fails for this reason.
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
                write!(f, "{field}: `{value}` will not do: wanted {wanted}")
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

/// A shared device is a device: middleware and disks own what they wrap.
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
}
