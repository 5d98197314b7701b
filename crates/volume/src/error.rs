//! Errors of the control plane: why a volume could not be opened, or an operation on it failed.

use std::io;
use std::path::PathBuf;

use blockyard_core::Status;

use crate::holder::Holder;
pub use crate::store::mirror::assemble::CopiesError;

/// Why a volume refused something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VolumeError {
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
    /// The place contains no pool.
    #[error(
        "`{}` holds no pool of volumes; expected the directory or the disk of a pool",
        path.display()
    )]
    NoPool {
        /// The place that was named.
        path: PathBuf,
    },
    /// Another process has the pool open.
    #[error("path: `{}` is in use by {holder}; expected a pool of its own", path.display())]
    InUse {
        /// The pool's directory.
        path: PathBuf,
        /// The process that has it open.
        holder: Holder,
    },
    /// The pool is locked by a process that does not run here: its writes are still in flight, or
    /// it runs on another host.
    #[error(
        "cannot open the pool at `{}`: process {pid} holds its lock and does not run here: either \
         its last writes are still in flight, or it runs in another container or on another host; \
         try again when the disk answers",
        path.display()
    )]
    Unfinished {
        /// The pool's directory.
        path: PathBuf,
        /// The process ID.
        pid: u32,
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
    /// The copies of a pool do not match, or one is missing.
    #[error("path: {0}")]
    Copies(#[from] CopiesError),
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
    #[error("the pool has no space left; remove volumes or snapshots, or make room where it is")]
    NoSpace,
    /// A write or a sync failed: the pool is latched until it is opened again.
    #[error("the pool is read-only since a write or a sync failed; open it again")]
    Poisoned,
}

impl VolumeError {
    /// Whether this says that a map page has rotted in every available copy.
    pub(crate) fn is_rotten_page(&self) -> bool {
        matches!(self, VolumeError::Format(FormatError::Page { .. }))
    }

    /// Adds to an I/O error what was being done.
    pub(crate) fn io(doing: impl Into<String>) -> impl FnOnce(io::Error) -> VolumeError {
        let doing = doing.into();
        move |source| VolumeError::Io { doing, source }
    }

    /// Turns an I/O error into the error of a stream.
    pub(crate) fn stream() -> impl FnOnce(io::Error) -> VolumeError {
        VolumeError::Pipe
    }

    /// The parameter that is invalid; `path` if the error has none.
    pub fn field(&self) -> &'static str {
        match self {
            VolumeError::Invalid { field, .. } => field,
            _ => "path",
        }
    }
}

impl FormatError {
    /// Whether a newer program wrote the bytes, so that they are not damaged.
    pub fn is_of_newer(&self) -> bool {
        matches!(self, FormatError::Version { .. })
    }
}

/// What is wrong with bytes that were read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The magic number is wrong.
    #[error("`{what}` does not begin with the mark of one")]
    Magic {
        /// The kind of object that was read.
        what: &'static str,
    },
    /// The checksum is wrong.
    #[error("`{what}` is damaged: its checksum is {found:#018x}, not {want:#018x}")]
    Checksum {
        /// The kind of object that was read.
        what: &'static str,
        /// The checksum of the bytes read.
        found: u64,
        /// The expected checksum.
        want: u64,
    },
    /// The version is newer than this program knows.
    #[error("`{what}` is of version {found}; this program knows version {known}")]
    Version {
        /// The kind of object that was read.
        what: &'static str,
        /// The version that was read.
        found: u32,
        /// The newest version that this program knows.
        known: u32,
    },
    /// A field has an invalid value.
    #[error("`{what}` has {field} = {value}; expected {want}")]
    Field {
        /// The kind of object that was read.
        what: &'static str,
        /// The field.
        field: &'static str,
        /// The value of the field.
        value: u64,
        /// What is expected instead.
        want: &'static str,
    },
    /// A map page is damaged.
    #[error(
        "a page of the map, segment {segment} offset {offset}, is damaged: its checksum is \
         {found:#018x}, not {want:#018x}"
    )]
    Page {
        /// The segment.
        segment: u32,
        /// The offset in the segment, in bytes.
        offset: u64,
        /// The checksum of the bytes read.
        found: u64,
        /// The expected checksum.
        want: u64,
    },
    /// A group that was durable is missing from the log.
    #[error(
        "the log is damaged: group {number} should be in segment {segment} at offset {offset}, \
         and was durable; what is behind it cannot be read without it. Wanted the segments as they \
         were written"
    )]
    Log {
        /// The segment.
        segment: u32,
        /// The offset in the segment, in bytes.
        offset: u32,
        /// The number of the missing group.
        number: u64,
    },
    /// The bytes end too early.
    #[error("`{what}` ends after {len} bytes")]
    Short {
        /// The kind of object that was read.
        what: &'static str,
        /// The number of bytes that there are.
        len: u64,
    },
}
