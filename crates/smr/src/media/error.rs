//! What can be wrong with a backing directory: the value, the field and what would do.

use std::io;
use std::path::PathBuf;

/// What is wrong with the bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The file is too short.
    #[error("`{file}` has {len} bytes, not {want}: it was cut short or belongs to something else")]
    Short {
        /// The file.
        file: &'static str,
        /// Its length.
        len: u64,
        /// The length that it should have.
        want: u64,
    },
    /// It does not begin as it should.
    #[error("`{file}` does not begin with the mark of a Blockyard SMR disk")]
    Magic {
        /// The file.
        file: &'static str,
    },
    /// The checksum does not match.
    #[error("`{file}` is damaged: its checksum is {found:#010x}, not {want:#010x}")]
    Checksum {
        /// The file.
        file: &'static str,
        /// The checksum of what is there.
        found: u32,
        /// The checksum that was kept.
        want: u32,
    },
    /// It was made by another version of the program.
    #[error("`{file}` has format version {found}; this program knows version {known}")]
    Version {
        /// The file.
        file: &'static str,
        /// The version found.
        found: u32,
        /// The version that is known.
        known: u32,
    },
    /// It belongs to another disk.
    #[error("`{file}` belongs to another disk than `superblock`")]
    Foreign {
        /// The file.
        file: &'static str,
    },
    /// A field has an impossible value.
    #[error("`{file}` has {field} = {value}; want {want}")]
    Field {
        /// The file.
        file: &'static str,
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What would do.
        want: &'static str,
    },
    /// A zone has an impossible state.
    #[error("`{file}` says {word:#018x} of zone {zone}, which no such zone can be")]
    Zone {
        /// The file.
        file: &'static str,
        /// The zone's number.
        zone: u32,
        /// What is kept of it.
        word: u64,
    },
    /// Something is missing that was durable once.
    #[error("`{file}` is damaged: {what} was durable and is not there any more")]
    Lost {
        /// The file.
        file: &'static str,
        /// What is missing.
        what: String,
    },
}

/// Why a backing directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// The system refuses something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The system's answer.
        source: io::Error,
    },
    /// A file is not as it should be.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// It holds a disk of another shape.
    #[error(
        "the backing holds a disk with {field}={kept}, not {field}={asked}; ask for \
         {field}={kept}, or give another backing"
    )]
    Geometry {
        /// The field, as the configuration names it.
        field: &'static str,
        /// The disk's value.
        kept: u64,
        /// The value asked for.
        asked: u64,
    },
    /// It holds something else.
    #[error(
        "the backing holds `{name}` and no SMR disk; give an empty directory or one that does not \
         exist yet"
    )]
    Stranger {
        /// One of the files found.
        name: String,
    },
    /// Another process has it open.
    #[error("{} is in use by another process: stop it, or give another backing", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
}

impl MediaError {
    /// An error of the system, and what was tried.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> MediaError {
        let what = what.into();
        |source| MediaError::Io { what, source }
    }
}
