//! What goes wrong: with a file, and with a file system before it is open.

use blockyard_core::{DeviceError, Status};

use crate::superblock::SuperblockError;

/// Why a file refused something. [`FileError::errno`] is what a system call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The zone is read-only or offline.
    #[error("the zone is read-only or offline")]
    Immutable,
    /// The file system refuses changes.
    #[error("the file system is read-only")]
    ReadOnly,
    /// The position is at or above the zone's capacity.
    #[error("there is no room in the zone")]
    NoRoom,
    /// Only direct writes reach a sequential file.
    #[error("a sequential file is written by direct I/O only")]
    Buffered,
    /// A conventional file has no write pointer to append at.
    #[error("a conventional file takes no appends")]
    AppendConventional,
    /// Position or length is no multiple of the block size.
    #[error("position and length are to be multiples of the block size")]
    Unaligned,
    /// A sequential file is written at its end and nowhere else.
    #[error("a sequential file is written at its write pointer only")]
    NotAtWritePointer,
    /// An append is longer than the device takes at once.
    #[error("an append takes at most {max} bytes")]
    TooLong {
        /// The most bytes.
        max: usize,
    },
    /// A file is truncated to nothing or, if sequential, to its capacity.
    #[error("a sequential file is truncated to 0 or to its capacity, another not at all")]
    NotTruncatable,
    /// As many files are open for writing as the device can have open zones.
    #[error("no more zones can be open")]
    TooManyOpen,
    /// The file was not opened for this.
    #[error("the file is not open for that")]
    NotOpenForThat,
    /// Data landed where they should not have, or only some of them.
    #[error("the data did not land at the write pointer")]
    Misplaced,
    /// The device failed.
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

/// Why a file system could not be opened or made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("zonefs ({device}) ERROR: {problem}")]
pub struct ZoneFsError {
    /// The device.
    pub device: String,
    /// What is wrong with it.
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
    /// It has no zones.
    #[error("Not a zoned block device")]
    NotZoned,
    /// It has no zone for a file: zone 0 holds the superblock.
    #[error("no zone but the first can be a file; wanted a device with two zones or more")]
    NoUsableZone,
    /// The superblock will not do.
    #[error(transparent)]
    Superblock(#[from] SuperblockError),
    /// It reports fewer or more zones than it has.
    #[error("the report has {got} zones; the device has {wanted}")]
    ZoneCount {
        /// Zones that it has.
        wanted: u32,
        /// Zones that it reports.
        got: u64,
    },
    /// Its control plane refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An I/O failed.
    #[error("{what} failed with {status} ({})", status.errno_name())]
    Io {
        /// What was being done.
        what: &'static str,
        /// How it ended.
        status: Status,
    },
    /// There is something on it already.
    #[error("the device holds {what}; -f overwrites it")]
    Holds {
        /// What is there.
        what: &'static str,
    },
    /// It refuses changes.
    #[error("the device is read-only")]
    ReadOnly,
    /// What was written cannot be read back.
    #[error(
        "the superblock cannot be read back; a device that keeps data (memory_backed=1) would do"
    )]
    Forgetful,
    /// The system gave no random bytes.
    #[error("making a UUID: {0}")]
    Random(String),
}
