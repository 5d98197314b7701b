//! Errors of creating a RAM disk and of operations on it.

use std::io;

use blockyard_core::{DeviceError, Status};

use crate::stats::WrittenBack;

/// Why creating a RAM disk or an operation on it failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RamError {
    /// A parameter is invalid.
    #[error("invalid {field} `{value}`: expected {wanted}")]
    Invalid {
        /// The parameter.
        field: &'static str,
        /// The given value.
        value: String,
        /// What the parameter accepts.
        wanted: String,
    },
    /// The device was made without a parameter that the operation needs.
    #[error("cannot {verb}: the device has no {field}; make it with {field}={form}")]
    Lacks {
        /// The operation.
        verb: &'static str,
        /// The parameter.
        field: &'static str,
        /// A word for the values of the parameter.
        form: &'static str,
    },
    /// A dictionary cannot be trained.
    #[error("cannot train a dictionary on {blocks} blocks: {why}")]
    Untrained {
        /// The number of blocks that were used as samples.
        blocks: usize,
        /// The cause.
        why: &'static str,
    },
    /// The system has not enough memory.
    #[error(
        "{field}: `{value}` takes more memory than there is: {}",
        io::Error::from_raw_os_error(*.errno)
    )]
    Memory {
        /// The parameter that determines the amount.
        field: &'static str,
        /// The value of the parameter.
        value: String,
        /// The error number.
        errno: i32,
    },
    /// The system cannot create the compaction thread.
    #[error("compact: no thread for it: {source}; compact=0 needs none")]
    Thread {
        /// The system's error.
        source: io::Error,
    },
    /// The maximum number of channels and workers is in use.
    #[error("cannot open a channel: {max} channels, the most allowed, are open; close one first")]
    Crowded {
        /// The maximum.
        max: u32,
    },
    /// A snapshot cannot be loaded.
    #[error("load: `{path}`: {source}")]
    Snapshot {
        /// Path of the snapshot.
        path: String,
        /// What is wrong with the snapshot.
        source: SnapshotError,
    },
    /// A block cannot be read, and so cannot be saved or loaded.
    #[error("block {block} {} ({status})", unreadable(*.status))]
    Unreadable {
        /// The block number.
        block: u64,
        /// The status with which a read of the block fails.
        status: Status,
    },
    /// Writing the backing file failed after some blocks were written.
    #[error(
        "backing: `{path}`: cannot be written: {source}; {} in {} bytes there before, the \
         others stay in memory",
        written(done.blocks),
        done.bytes
    )]
    WriteBack {
        /// Path of the backing file.
        path: String,
        /// What was written before the failure and remains valid.
        done: WrittenBack,
        /// The system's error.
        source: io::Error,
    },
    /// A file that a parameter names cannot be used.
    #[error("{field}: `{path}`: {what}: {source}")]
    File {
        /// The parameter.
        field: &'static str,
        /// Path of the file.
        path: String,
        /// What failed.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

fn written(blocks: u64) -> String {
    if blocks == 1 { "1 block went".to_owned() } else { format!("{blocks} blocks went") }
}

/// Describes a block whose read fails with this status.
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

    /// The parameter that the error concerns.
    pub fn field(&self) -> &'static str {
        match self {
            RamError::Invalid { field, .. }
            | RamError::Lacks { field, .. }
            | RamError::Memory { field, .. }
            | RamError::File { field, .. } => field,
            RamError::Thread { .. } => "compact",
            RamError::Untrained { .. } => "dict",
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
            RamError::Lacks { field, form, .. } => {
                let (value, wanted) = (String::new(), form.to_owned());
                DeviceError::Invalid { field, value, wanted }
            }
            RamError::Untrained { .. } => {
                DeviceError::Os { what: "training a dictionary", errno: libc::EINVAL }
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

/// Why a file is not a valid snapshot, or cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// An I/O error.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The file is not a snapshot.
    #[error("it is no snapshot of a RAM disk")]
    Other,
    /// The snapshot has an unknown version.
    #[error("it is a snapshot of version {found}; this program reads version {reads}")]
    Version {
        /// Version of the snapshot.
        found: u32,
        /// Version that this program reads.
        reads: u32,
    },
    /// The file ends too early.
    #[error("it is cut off after {records} blocks")]
    Short {
        /// Number of complete blocks.
        records: u64,
    },
    /// The checksum of a block is right, but its bytes do not decompress.
    #[error("it is damaged: block {block} does not decompress")]
    Undecodable {
        /// The block number.
        block: u64,
    },
    /// A checksum or a field is wrong.
    #[error("it is damaged: {what}, after {records} blocks")]
    Damaged {
        /// What is wrong.
        what: &'static str,
        /// Number of complete blocks.
        records: u64,
    },
}

/// The bytes do not decompress to a block: a bit flipped, or another codec wrote them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damaged;
