//! The seam between who sends SCSI commands and who carries them out: an emulated disk, or a real
//! one behind a system call.

use std::io;

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

/// A command that was not carried out at all, so that the device has no status for it.
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
    /// The way to the device failed.
    #[error("the device does not answer: {0}")]
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
}
