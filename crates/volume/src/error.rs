//! Why a volume could not be opened, or something asked of it not be done.

use std::io;
use std::path::PathBuf;

use blockyard_core::Status;

use crate::holder::Holder;
pub use crate::store::mirror::assemble::CopiesError;

/// Why a volume refused something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VolumeError {
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
    /// There is no pool.
    #[error(
        "`{}` holds no pool of volumes; expected the directory or the disk of a pool",
        path.display()
    )]
    NoPool {
        /// What was named.
        path: PathBuf,
    },
    /// Another process has the pool.
    #[error("path: `{}` is in use by {holder}; wanted a pool of its own", path.display())]
    InUse {
        /// The pool's directory.
        path: PathBuf,
        /// Who has it.
        holder: Holder,
    },
    /// Another process had the pool, and is gone; what it had begun is not.
    #[error(
        "path: `{}` is locked by process {pid}, which does not run here: either writes that it had \
         begun are still on their way to the disk, or it runs elsewhere; wanted a pool that nobody \
         writes to. Try again when the disk answers",
        path.display()
    )]
    Unfinished {
        /// The pool's directory.
        path: PathBuf,
        /// The number of the process that had it.
        pid: u32,
    },
    /// The system refused something.
    #[error("path: {doing}: {source}")]
    Io {
        /// What was being done, with what.
        doing: String,
        /// Why it was refused.
        source: io::Error,
    },
    /// What is there is not a pool that this program can open.
    #[error("path: {0}")]
    Format(#[from] FormatError),
    /// Copies of a pool do not go together, or one is missing.
    #[error("path: {0}")]
    Copies(#[from] CopiesError),
    /// A stream is not one that can be received.
    #[error("stream: {0}")]
    Stream(FormatError),
    /// A stream could not be read or written on.
    #[error("stream: {0}")]
    Pipe(io::Error),
    /// Blocks cannot be read.
    #[error("`{name}`: {count} blocks from block {first} on cannot be read: {status}")]
    Unreadable {
        /// The volume or snapshot.
        name: String,
        /// The first block of those that were read at once.
        first: u64,
        /// How many.
        count: u64,
        /// Why.
        status: Status,
    },
    /// Whoever wanted it wants no more.
    #[error("it was stopped")]
    Stopped,
    /// There is no volume of this name.
    #[error("`{name}` is no volume of this pool")]
    NoSuchVolume {
        /// The name.
        name: String,
    },
    /// There is one already.
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
        /// What holds it.
        why: String,
    },
    /// No space.
    #[error("the pool has no space left; remove volumes or snapshots, or make room where it is")]
    NoSpace,
    /// A write or a sync has failed, so nothing more is written until the pool is opened again.
    #[error("the pool is read-only since a write or a sync failed; open it again")]
    Poisoned,
}

impl VolumeError {
    /// Whether a page of a map is not what was written there, in no copy that is there.
    pub(crate) fn is_rotten_page(&self) -> bool {
        matches!(self, VolumeError::Format(FormatError::Page { .. }))
    }

    /// Makes an I/O error tell what was being done.
    pub(crate) fn io(doing: impl Into<String>) -> impl FnOnce(io::Error) -> VolumeError {
        let doing = doing.into();
        move |source| VolumeError::Io { doing, source }
    }

    /// Makes an I/O error one of a stream.
    pub(crate) fn stream() -> impl FnOnce(io::Error) -> VolumeError {
        VolumeError::Pipe
    }

    /// The parameter that is to blame, as far as one is.
    pub fn field(&self) -> &'static str {
        match self {
            VolumeError::Invalid { field, .. } => field,
            _ => "path",
        }
    }
}

impl FormatError {
    /// Whether a newer program has written the bytes: they are not damaged.
    pub fn is_of_newer(&self) -> bool {
        matches!(self, FormatError::Version { .. })
    }
}

/// What is wrong with bytes that were read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// They do not begin as they should.
    #[error("`{what}` does not begin with the mark of one")]
    Magic {
        /// What was looked for.
        what: &'static str,
    },
    /// The checksum does not fit.
    #[error("`{what}` is damaged: its checksum is {found:#018x}, not {want:#018x}")]
    Checksum {
        /// What was looked for.
        what: &'static str,
        /// The checksum of what is there.
        found: u64,
        /// The one that was noted.
        want: u64,
    },
    /// A newer program made this.
    #[error("`{what}` is of version {found}; this program knows version {known}")]
    Version {
        /// What was read.
        what: &'static str,
        /// Its version.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// A field has an impossible value.
    #[error("`{what}` has {field} = {value}; wanted {want}")]
    Field {
        /// What was read.
        what: &'static str,
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What would be possible.
        want: &'static str,
    },
    /// A page of a map is damaged.
    #[error(
        "a page of the map, segment {segment} offset {offset}, is damaged: its checksum is \
         {found:#018x}, not {want:#018x}"
    )]
    Page {
        /// The segment.
        segment: u32,
        /// Where in it, in bytes.
        offset: u64,
        /// The checksum of what is there.
        found: u64,
        /// The one that was noted.
        want: u64,
    },
    /// Something is missing in the middle of the log.
    #[error(
        "the log is damaged: group {number} should be in segment {segment} at offset {offset}, \
         and was durable; what is behind it cannot be read without it. Wanted the segments as they \
         were written"
    )]
    Log {
        /// The segment.
        segment: u32,
        /// Where in it, in bytes.
        offset: u32,
        /// The group that is missing.
        number: u64,
    },
    /// It ends too early.
    #[error("`{what}` ends after {len} bytes")]
    Short {
        /// What was read.
        what: &'static str,
        /// Its length.
        len: u64,
    },
}
