//! Errors of a file, and of opening or creating a file system.

use blockyard_core::{DeviceError, Status};

use crate::superblock::SuperblockError;

/// Why an operation on a file failed. [`FileError::errno`] is what a system call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The zone is read-only or offline.
    #[error("the zone is read-only or offline")]
    Immutable,
    /// The file system is read-only.
    #[error("the file system is read-only")]
    ReadOnly,
    /// The position is at or above the zone's capacity.
    #[error("there is no room in the zone")]
    NoRoom,
    /// Sequential files accept only direct writes.
    #[error("a sequential file is written by direct I/O only")]
    Buffered,
    /// A conventional file has no write pointer to append at.
    #[error("a conventional file takes no appends")]
    AppendConventional,
    /// Offset or length is not a multiple of the block size.
    #[error("position and length are to be multiples of the block size")]
    Unaligned,
    /// A sequential file can only be written at its end.
    #[error("a sequential file is written at its write pointer only")]
    NotAtWritePointer,
    /// The append exceeds the device's limit.
    #[error("an append takes at most {max} bytes")]
    TooLong {
        /// The limit in bytes.
        max: usize,
    },
    /// A sequential file can be truncated only to 0 or to its capacity, a conventional file not at
    /// all.
    #[error("a sequential file is truncated to 0 or to its capacity, another not at all")]
    NotTruncatable,
    /// The maximum number of zones is open for files that are open for writing.
    #[error("no more zones can be open")]
    TooManyOpen,
    /// The file was not opened for this operation.
    #[error("the file is not open for that")]
    NotOpenForThat,
    /// The data were written at the wrong place, or only in part.
    #[error("the data did not land at the write pointer")]
    Misplaced,
    /// A device error.
    #[error("the device failed with {0}")]
    Device(Status),
}

impl FileError {
    /// The error number.
    pub const fn errno(self) -> i32 {
        match self {
            FileError::Immutable | FileError::NotTruncatable => libc::EPERM,
            FileError::ReadOnly => libc::EROFS,
            FileError::NoRoom => libc::EFBIG,
            FileError::Buffered | FileError::Misplaced => libc::EIO,
            FileError::AppendConventional
            | FileError::Unaligned
            | FileError::NotAtWritePointer
            | FileError::TooLong { .. } => libc::EINVAL,
            FileError::TooManyOpen => libc::EBUSY,
            FileError::NotOpenForThat => libc::EBADF,
            FileError::Device(status) => status.errno(),
        }
    }
}

/// Why a file system could not be opened or created.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("zonefs ({device}) ERROR: {problem}")]
pub struct ZoneFsError {
    /// The device.
    pub device: String,
    /// What is wrong with the device.
    pub problem: Problem,
}

impl ZoneFsError {
    pub(crate) fn new(device: &str, problem: impl Into<Problem>) -> ZoneFsError {
        ZoneFsError { device: device.to_owned(), problem: problem.into() }
    }
}

/// What is wrong with a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The device has no zones.
    #[error("Not a zoned block device")]
    NotZoned,
    /// The device has no zone for a file: zone 0 holds the superblock.
    #[error("no zone but the first can be a file; expected a device with two zones or more")]
    NoUsableZone,
    /// The superblock is invalid.
    #[error(transparent)]
    Superblock(#[from] SuperblockError),
    /// The report has another number of zones than the device.
    #[error("the report has {got} zones; the device has {wanted}")]
    ZoneCount {
        /// Number of zones of the device.
        wanted: u32,
        /// Number of zones in the report.
        got: u64,
    },
    /// An operation of the device's control plane failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An I/O failed.
    #[error("{what} failed with {status} ({})", status.errno_name())]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The status with which it failed.
        status: Status,
    },
    /// The device holds other data.
    #[error("the device holds {what}; -f overwrites it")]
    Holds {
        /// The kind of data.
        what: &'static str,
    },
    /// The device is read-only.
    #[error("the device is read-only")]
    ReadOnly,
    /// The superblock cannot be read back after it was written.
    #[error(
        "cannot read the superblock back: the device keeps no data; use one that does \
         (memory_backed=1)"
    )]
    Forgetful,
}
