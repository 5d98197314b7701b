//! Why a RAM disk could not be made, or something asked of it not be done.

use std::io;

use blockyard_core::{DeviceError, Status};

use crate::background::WrittenBack;
use crate::snapshot::SnapshotError;

/// Why a RAM disk refused something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RamError {
    /// A parameter does not fit.
    #[error("{field}: `{value}` will not do: wanted {wanted}")]
    Invalid {
        /// The parameter.
        field: &'static str,
        /// What was given.
        value: String,
        /// What would do.
        wanted: String,
    },
    /// The system refused memory.
    #[error(
        "{field}: `{value}` takes more memory than there is: {}",
        io::Error::from_raw_os_error(*.errno)
    )]
    Memory {
        /// The parameter that decides how much it is.
        field: &'static str,
        /// Its value.
        value: String,
        /// The error number.
        errno: i32,
    },
    /// The system has no thread for compaction.
    #[error("compact: no thread for it: {source}; compact=0 needs none")]
    Thread {
        /// What the system said.
        source: io::Error,
    },
    /// There are as many channels as there can be.
    #[error("{max} channels are open, and no more will do; close one first")]
    Crowded {
        /// How many there may be.
        max: u32,
    },
    /// A snapshot cannot be loaded.
    #[error("load: `{path}`: {source}")]
    Snapshot {
        /// The file.
        path: String,
        /// What is wrong with it.
        source: SnapshotError,
    },
    /// A block cannot be read, and so not be saved or loaded.
    #[error("block {block} {} ({status})", unreadable(*.status))]
    Unreadable {
        /// The block.
        block: u64,
        /// How a read of it ends.
        status: Status,
    },
    /// The backing file could not be written, after some of it was.
    #[error(
        "backing: `{path}`: cannot be written: {source}; {} in {} bytes there before, the \
         others stay in memory",
        written(done.blocks),
        done.bytes
    )]
    WriteBack {
        /// The file.
        path: String,
        /// What was written back and stays so.
        done: WrittenBack,
        /// What the system said.
        source: io::Error,
    },
    /// A file that a parameter names cannot be used.
    #[error("{field}: `{path}`: {what}: {source}")]
    File {
        /// The parameter.
        field: &'static str,
        /// The file.
        path: String,
        /// What was being done.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

fn written(blocks: u64) -> String {
    if blocks == 1 { "1 block went".to_owned() } else { format!("{blocks} blocks went") }
}

/// What is wrong with a block that ends a read so.
fn unreadable(status: Status) -> &'static str {
    match status {
        Status::IoErr => "cannot be read from the backing file",
        _ => "is damaged, and what it was is lost",
    }
}

impl RamError {
    pub(crate) fn invalid(
        field: &'static str,
        value: impl ToString,
        wanted: impl Into<String>,
    ) -> RamError {
        RamError::Invalid { field, value: value.to_string(), wanted: wanted.into() }
    }

    pub(crate) fn no_memory(field: &'static str, value: impl ToString) -> RamError {
        RamError::Memory { field, value: value.to_string(), errno: libc::ENOMEM }
    }

    /// The parameter that is to blame.
    pub fn field(&self) -> &'static str {
        match self {
            RamError::Invalid { field, .. }
            | RamError::Memory { field, .. }
            | RamError::File { field, .. } => field,
            RamError::Thread { .. } => "compact",
            RamError::WriteBack { .. } => "backing",
            RamError::Crowded { .. } => "size",
            RamError::Snapshot { .. } => "load",
            RamError::Unreadable { .. } => "block",
        }
    }
}

impl From<RamError> for DeviceError {
    fn from(error: RamError) -> DeviceError {
        match error {
            RamError::Invalid { field, value, wanted } => {
                DeviceError::Invalid { field, value, wanted }
            }
            RamError::Memory { errno, .. } => {
                DeviceError::Os { what: "reserving the device's memory", errno }
            }
            RamError::Thread { source } => DeviceError::Os {
                what: "starting the device's thread",
                errno: source.raw_os_error().unwrap_or(libc::EAGAIN),
            },
            RamError::Crowded { .. } => {
                DeviceError::Os { what: "opening one more channel", errno: libc::EMFILE }
            }
            RamError::Snapshot { .. } | RamError::Unreadable { .. } => {
                DeviceError::Os { what: "reading the device's blocks", errno: libc::EIO }
            }
            RamError::File { source, .. } | RamError::WriteBack { source, .. } => DeviceError::Os {
                what: "using the device's file",
                errno: source.raw_os_error().unwrap_or(libc::EIO),
            },
        }
    }
}
