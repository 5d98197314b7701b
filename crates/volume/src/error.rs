//! Errors of the control plane: why a volume could not be opened, or an operation on it failed.

use std::io;
use std::sync::OnceLock;

use blockyard_core::Status;
use blockyard_store::StoreError;
use blockyard_volume_format::FormatError;

/// The first I/O error of a pool, with which the pool failed read-only. It is set once and stays
/// until the pool is opened again: after a failed sync the system may have dropped the data, and a
/// repeated one would report success.
///
/// The error of one mirror copy is not latched as long as the other copy is good. A shared
/// descriptor repeats a failed sync to all its users by a state of its own (`store/src/file.rs`),
/// because the system reports it only once.
#[derive(Debug, Default)]
pub struct ErrorLatch(OnceLock<String>);

impl ErrorLatch {
    /// Latches `cause`. Returns whether it is the first.
    pub(crate) fn set(&self, cause: &str) -> bool {
        self.0.set(cause.to_owned()).is_ok()
    }

    /// Whether an error was latched.
    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        self.0.get().is_some()
    }
}

/// Why a volume refused something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VolumeError {
    /// The storage of the pool refused something, or failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A parameter is invalid.
    #[error("invalid {field} `{value}`: expected {wanted}")]
    Invalid {
        /// The parameter.
        field: &'static str,
        /// What was given.
        value: String,
        /// What is expected instead.
        wanted: String,
    },
    /// A system call failed.
    #[error("path: {doing}: {source}")]
    Io {
        /// The operation that failed.
        doing: String,
        /// The cause.
        source: io::Error,
    },
    /// The pool's contents are invalid, or of an unknown version.
    #[error("path: {0}")]
    Format(#[from] FormatError),
    /// A stream is invalid.
    #[error("stream: {0}")]
    Stream(FormatError),
    /// Reading or writing a stream failed.
    #[error("stream: {0}")]
    Pipe(io::Error),
    /// Blocks cannot be read.
    #[error("`{name}`: {count} blocks from block {first} on cannot be read: {status}")]
    Unreadable {
        /// The volume or snapshot.
        name: String,
        /// The first block of the read that failed.
        first: u64,
        /// The number of blocks.
        count: u64,
        /// The status of the read.
        status: Status,
    },
    /// The operation was interrupted by its caller.
    #[error("it was stopped")]
    Stopped,
    /// There is no volume of this name.
    #[error("`{name}` is no volume of this pool")]
    NoSuchVolume {
        /// The name.
        name: String,
    },
    /// The name is taken.
    #[error("`{name}` exists already")]
    Exists {
        /// The name.
        name: String,
    },
    /// The volume is open, or something depends on it.
    #[error("`{name}` is {why}")]
    Busy {
        /// The name.
        name: String,
        /// Why it is busy.
        why: String,
    },
    /// The pool has no space left.
    #[error("the pool has no space left; remove volumes or snapshots, or free space at its path")]
    NoSpace,
    /// A write or a sync failed: the pool is latched until it is opened again.
    #[error("the pool is read-only since a write or a sync failed; open it again")]
    Latched,
}

impl VolumeError {
    /// Whether this says that a map page has rotted in every available copy.
    pub(crate) fn is_rotten_page(&self) -> bool {
        matches!(self, VolumeError::Format(FormatError::Page { .. }))
    }

    /// Adds to an I/O error what was being done.
    pub fn io(doing: impl Into<String>) -> impl FnOnce(io::Error) -> VolumeError {
        let doing = doing.into();
        move |source| VolumeError::Io { doing, source }
    }

    /// Turns an I/O error into the error of a stream.
    pub fn stream() -> impl FnOnce(io::Error) -> VolumeError {
        VolumeError::Pipe
    }

    /// The parameter that is invalid; `path` if the error has none.
    pub fn field(&self) -> &'static str {
        match self {
            VolumeError::Invalid { field, .. }
            | VolumeError::Store(StoreError::Invalid { field, .. }) => field,
            _ => "path",
        }
    }
}
