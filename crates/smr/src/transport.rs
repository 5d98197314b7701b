//! The seam between who sends SCSI commands and who carries them out: an emulated disk, or a real
//! one behind a system call.

use std::io;

use blockyard_core::inject::Injection;
use blockyard_core::{DeviceError, Nanos};

use crate::sense::{ScsiStatus, Sense};

/// The data of one command: one contiguous buffer, in one direction.
#[derive(Debug)]
pub enum Data<'a> {
    /// None.
    None,
    /// From the device: the buffer is filled, from its start, as far as [`Outcome::transferred`].
    In(&'a mut [u8]),
    /// To the device.
    Out(&'a [u8]),
}

impl Data<'_> {
    /// Bytes of the buffer.
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
    /// What went wrong; with [`ScsiStatus::CheckCondition`] only.
    pub sense: Option<Sense>,
    /// Bytes transferred, in either direction.
    pub transferred: usize,
}

impl Outcome {
    /// A command that succeeded.
    pub const fn good(transferred: usize) -> Outcome {
        Outcome { status: ScsiStatus::Good, sense: None, transferred }
    }

    /// A command that failed, and why.
    pub const fn check(sense: Sense) -> Outcome {
        Outcome { status: ScsiStatus::CheckCondition, sense: Some(sense), transferred: 0 }
    }
}

/// A command that was not carried out, as far as one knows: the device gave no status for it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The buffer holds less than the command transfers.
    #[error("the command transfers {wanted} bytes, the buffer has {given}")]
    Buffer {
        /// What it transfers.
        wanted: u64,
        /// What the buffer can hold.
        given: u64,
    },
    /// The buffer is for the other direction.
    #[error("the command transfers data {wanted}, the buffer is for the other direction")]
    Direction {
        /// Which way its data go.
        wanted: &'static str,
    },
    /// The command's length is not one that SCSI has.
    #[error("a command of {0} bytes: 6, 10, 12 and 16 are understood")]
    CdbLength(usize),
    /// No answer came in time.
    #[error("the device gave no answer in time")]
    Timeout,
    /// There is no device any more.
    #[error("the device is gone")]
    Gone,
    /// The link to the device failed.
    #[error("the link failed (host status {host:#04x}, driver status {driver:#04x})")]
    Link {
        /// What the host adapter says: Linux's `DID_*`.
        host: u16,
        /// What its driver says: Linux's `DRIVER_*`.
        driver: u16,
    },
    /// The system did not pass the command on.
    #[error("the system did not pass the command on: {0}")]
    Io(#[from] io::Error),
}

/// A SCSI logical unit.
pub trait ScsiTransport: Send + Sync {
    /// Carries one command out, and returns when it is done. Any number of threads may do so at
    /// once.
    ///
    /// # Errors
    /// If it could not be carried out. A command that the device refused is no error here.
    fn execute(&self, cdb: &[u8], data: Data<'_>) -> Result<Outcome, TransportError>;

    /// When a command that was given at `now`, and has been carried out, is done by the device's
    /// own model of time; a time in the past for one without. Asked once a command, after it.
    fn due(&self, now: Nanos, cdb: &[u8]) -> Nanos {
        let _ = cdb;
        now
    }

    /// Whether every command is done when [`ScsiTransport::execute`] returns: there is no model of
    /// time, and none is asked for.
    fn is_immediate(&self) -> bool {
        true
    }

    /// Most bytes that one command can transfer, by the way to the device and not by the device.
    fn bytes_max(&self) -> usize {
        1 << 20
    }

    /// Carries out a fault that only this unit knows how to have (a zone that turns read-only, a
    /// power cut).
    ///
    /// # Errors
    /// If it has no such fault, or the value does not fit it.
    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        Err(DeviceError::NoSuchFault { fault: injection.name().to_owned() })
    }
}

/// A shared unit is a unit.
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

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        (**self).inject(injection)
    }
}
