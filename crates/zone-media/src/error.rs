//! Errors of a backing directory. Each names the value, the field, and what is expected.

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
        file: String,
        /// The length of the file.
        len: u64,
        /// The expected length.
        want: u64,
    },
    /// The file starts with wrong magic bytes.
    #[error("`{file}` does not begin with the mark of a Blockyard zoned disk")]
    Magic {
        /// The file.
        file: String,
    },
    /// The checksum does not match.
    #[error("`{file}` is damaged: its checksum is {found:#010x}, not {want:#010x}")]
    Checksum {
        /// The file.
        file: String,
        /// The checksum of the present bytes.
        found: u32,
        /// The stored checksum.
        want: u32,
    },
    /// Another version of the program wrote the file.
    #[error("`{file}` has format version {found}; this program knows version {known}")]
    Version {
        /// The file.
        file: String,
        /// The version found.
        found: u32,
        /// The version that this program knows.
        known: u32,
    },
    /// The file belongs to another disk.
    #[error("`{file}` belongs to another disk: expected {want}, as in `superblock`, found {found}")]
    Foreign {
        /// The file.
        file: String,
        /// The identity found, in hexadecimal digits.
        found: String,
        /// The identity of the disk.
        want: String,
    },
    /// The file is another one of the same disk.
    #[error("`{file}` is another file of the disk: expected number {want}, found {found}")]
    Exchanged {
        /// The file.
        file: String,
        /// The number found.
        found: u32,
        /// The number of the file.
        want: u32,
    },
    /// A field has an impossible value.
    #[error("`{file}` has {field} = {value}; expected {want}")]
    Field {
        /// The file.
        file: String,
        /// The field.
        field: &'static str,
        /// The value of the field.
        value: u64,
        /// What is expected.
        want: &'static str,
    },
    /// A zone has an impossible state.
    #[error("`{file}` says {word:#018x} of zone {zone}, which no such zone can be")]
    Zone {
        /// The file.
        file: String,
        /// Zone number.
        zone: u32,
        /// The recorded word of the zone.
        word: u64,
    },
    /// Something that was durable is missing.
    #[error("`{file}` is damaged: {what} was durable and is not there any more")]
    Lost {
        /// The file.
        file: String,
        /// What is missing.
        what: String,
    },
}

impl FormatError {
    pub(crate) fn field(
        file: &str,
        field: &'static str,
        value: u64,
        want: &'static str,
    ) -> FormatError {
        FormatError::Field { file: file.to_owned(), field, value, want }
    }

    /// The error for a byte that must be zero.
    pub(crate) fn reserved(file: &str, byte: u8) -> FormatError {
        let want = "0; a newer program may have made this disk";
        FormatError::field(file, "a reserved byte", u64::from(byte), want)
    }

    pub(crate) fn zone(file: &str, zone: u32, word: u64) -> FormatError {
        FormatError::Zone { file: file.to_owned(), zone, word }
    }

    pub(crate) fn lost(file: &str, what: String) -> FormatError {
        FormatError::Lost { file: file.to_owned(), what }
    }
}

/// Why a backing directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// An I/O error.
    #[error("{what}: {source}")]
    Io {
        /// The operation that failed.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// A file has invalid contents.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A file has not the length that it got when the disk was created.
    #[error("`{name}` has {len} bytes, not {want}: another program has changed it")]
    Length {
        /// Name of the file.
        name: String,
        /// The length of the file.
        len: u64,
        /// The expected length.
        want: u64,
    },
    /// The directory holds a disk with another geometry.
    #[error(
        "the backing holds a disk with {field}={kept}, not {field}={asked}; ask for \
         {field}={kept}, or give another backing"
    )]
    Geometry {
        /// The field, as the configuration names it.
        field: &'static str,
        /// The value of the disk.
        kept: u64,
        /// The requested value.
        asked: u64,
    },
    /// The directory holds other files.
    #[error(
        "the backing holds `{name}` and no zoned disk; give an empty directory or one that does \
         not exist yet"
    )]
    Stranger {
        /// The name of one of these files.
        name: String,
    },
    /// The directory holds the files of a disk without its superblock.
    #[error(
        "the backing holds the files of a zoned disk without `superblock`: restore that file, or \
         give an empty directory"
    )]
    NoSuperblock,
    /// The path is no directory.
    #[error("the backing {} is no directory: give an empty directory, or one that does not exist \
             yet", path.display())]
    NotDirectory {
        /// The path.
        path: PathBuf,
    },
    /// Another process has the disk open.
    #[error("{} is in use by another process: stop it, or give another backing", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
}

impl MediaError {
    /// An error of the system; `what` is the operation that failed.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> MediaError {
        let what = what.into();
        |source| MediaError::Io { what, source }
    }
}
