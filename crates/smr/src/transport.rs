//! The interface between a sender of SCSI commands and the logical unit that executes them: an
//! emulated disk, or a real one through a system call.

use std::io;

use blockyard_core::inject::Injection;
use blockyard_core::{DeviceError, Extent, Nanos, Sector};

use crate::sense::{ScsiStatus, Sense};

/// The data of one command: one contiguous buffer, in one direction.
#[derive(Debug)]
pub enum Data<'a> {
    /// No data.
    None,
    /// From the device: the buffer is filled from its start, up to [`Outcome::transferred`] bytes.
    In(&'a mut [u8]),
    /// To the device.
    Out(&'a [u8]),
}

impl Data<'_> {
    /// Length of the buffer in bytes.
    pub fn len(&self) -> usize {
        match self {
            Data::None => 0,
            Data::In(buffer) => buffer.len(),
            Data::Out(buffer) => buffer.len(),
        }
    }

    /// Whether there is no byte to transfer.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The status byte.
    pub status: ScsiStatus,
    /// The cause; only with [`ScsiStatus::CheckCondition`].
    pub sense: Option<Sense>,
    /// Bytes transferred, in either direction.
    pub transferred: usize,
}

impl Outcome {
    /// A command that succeeded.
    pub const fn good(transferred: usize) -> Outcome {
        Outcome { status: ScsiStatus::Good, sense: None, transferred }
    }

    /// A command that failed with this sense data.
    pub const fn check(sense: Sense) -> Outcome {
        Outcome { status: ScsiStatus::CheckCondition, sense: Some(sense), transferred: 0 }
    }
}

/// A command that was presumably not executed: the device returned no status.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The buffer is smaller than the command's data.
    #[error("the command transfers {wanted} bytes, the buffer has {given}")]
    Buffer {
        /// Bytes that the command transfers.
        wanted: u64,
        /// Size of the buffer in bytes.
        given: u64,
    },
    /// The buffer is for the other direction.
    #[error("the command transfers data {wanted}, the buffer is for the other direction")]
    Direction {
        /// The direction of the command's data.
        wanted: &'static str,
    },
    /// SCSI has no commands of this length.
    #[error("a command of {0} bytes: 6, 10, 12 and 16 are understood")]
    CdbLength(usize),
    /// The command timed out.
    #[error("the device gave no answer in time")]
    Timeout,
    /// The device is gone.
    #[error("the device is gone")]
    Gone,
    /// The link to the device failed.
    #[error("the link failed (host status {host:#04x}, driver status {driver:#04x})")]
    Link {
        /// The host adapter's status: Linux's `DID_*`.
        host: u16,
        /// The driver's status: Linux's `DRIVER_*`.
        driver: u16,
    },
    /// The system did not pass the command on.
    #[error("the system did not pass the command on: {0}")]
    Io(#[from] io::Error),
}

/// A SCSI logical unit.
pub trait ScsiTransport: Send + Sync {
    /// Executes one command and returns when it has finished. Any number of threads may call
    /// concurrently.
    ///
    /// # Errors
    /// If the command could not be executed. A command that the device refused is not an error.
    fn execute(&self, cdb: &[u8], data: Data<'_>) -> Result<Outcome, TransportError>;

    /// When a command that arrived at `now` and was executed is done by the device's timing model;
    /// a time in the past without a model. Called once per command, after its execution.
    fn due(&self, now: Nanos, cdb: &[u8]) -> Nanos {
        let _ = cdb;
        now
    }

    /// Whether every command is done when [`ScsiTransport::execute`] returns, and costs little more
    /// than the copy of its data. `false` with a timing model, and for a drive: merging pays there,
    /// so the driver executes no request inline.
    fn is_immediate(&self) -> bool {
        true
    }

    /// Maximum bytes of one command, as limited by the transport and not by the device.
    fn bytes_max(&self) -> usize {
        1 << 20
    }

    /// The allocation state of a range, as [`blockyard_core::Device::extent`].
    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        let _ = from;
        Extent { sectors, allocated: true, zero: false }
    }

    /// Injects a fault that only this unit implements, such as a zone that becomes read-only, or a
    /// power cut.
    ///
    /// # Errors
    /// If the unit has no such fault, or the value is invalid.
    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        Err(DeviceError::NoSuchFault { fault: injection.name().to_owned() })
    }
}

/// A shared unit.
impl<T: ScsiTransport + ?Sized> ScsiTransport for std::sync::Arc<T> {
    fn execute(&self, cdb: &[u8], data: Data<'_>) -> Result<Outcome, TransportError> {
        (**self).execute(cdb, data)
    }

    fn due(&self, now: Nanos, cdb: &[u8]) -> Nanos {
        (**self).due(now, cdb)
    }

    fn is_immediate(&self) -> bool {
        (**self).is_immediate()
    }

    fn bytes_max(&self) -> usize {
        (**self).bytes_max()
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        (**self).extent(from, sectors)
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        (**self).inject(injection)
    }
}
