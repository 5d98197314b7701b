//! Errors of the control plane: why a volume could not be opened, or an operation on it failed.

use std::io;
use std::sync::OnceLock;

use blockyard_core::{Bytes, Status};
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
    #[error("{doing}: {source}")]
    Io {
        /// The operation that failed.
        doing: String,
        /// The cause.
        source: io::Error,
    },
    /// The pool's contents are invalid, or of an unknown version.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A stream is invalid.
    #[error("invalid stream at byte {offset}: {source}")]
    Stream {
        /// Where the header or record begins that is invalid.
        offset: u64,
        /// The cause.
        source: FormatError,
    },
    /// The bytes are no stream.
    #[error("it is not a stream of `blockyard volume send`, which begins with its magic number")]
    NotAStream,
    /// A stream ends before its end record.
    #[error("the stream ends at byte {offset}, before its end record: it was truncated")]
    StreamEnds {
        /// The number of bytes that there are.
        offset: u64,
    },
    /// The pool does not have the snapshot on which an incremental stream builds.
    #[error(
        "cannot receive the incremental stream `{stream}` as `{volume}`: this pool has no volume \
         `{volume}` with its base `{base}`; receive a complete stream of that snapshot first"
    )]
    NoBase {
        /// The snapshot that the stream makes.
        stream: String,
        /// The snapshot on which it builds.
        base: String,
        /// The volume that was to receive it.
        volume: String,
    },
    /// A resumable receive was interrupted, and keeps what it has.
    #[error(
        "{source}; `{volume}` is partly received and kept: `volume send POOL --resume {token}` \
         continues it, `volume receive --abort` drops it"
    )]
    Interrupted {
        /// The volume that is received.
        volume: String,
        /// The token by which the sender continues.
        token: String,
        /// Why it was interrupted.
        source: Box<VolumeError>,
    },
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
    /// There is no volume or snapshot of this name.
    #[error(
        "there is no {} `{name}` in this pool",
        if name.contains('@') { "snapshot" } else { "volume" }
    )]
    NoSuchVolume {
        /// The name.
        name: String,
    },
    /// The size of a volume that is to be made was not given.
    #[error("size is missing: expected the size of `{name}`, which does not exist yet")]
    NoSize {
        /// The name of the volume.
        name: String,
    },
    /// A resize would discard data.
    #[error(
        "cannot shrink `{name}` from {} to {}: this discards its data beyond {}; use --force \
         (`\"force\": true`) to do so",
        Bytes(*from), Bytes(*to), Bytes(*to)
    )]
    Shrinks {
        /// The volume.
        name: String,
        /// The size in bytes.
        from: u64,
        /// The requested size in bytes.
        to: u64,
    },
    /// The volume is encrypted, and its key is not in memory.
    #[error(
        "`{name}` is encrypted and locked: unlock it with `blockyard volume unlock`, or give its \
         key: to a device by key_file= or passphrase_file=, to a command by --key-file or \
         --passphrase-file"
    )]
    Locked {
        /// The volume or snapshot.
        name: String,
    },
    /// The secret does not decrypt the key of a volume.
    #[error(
        "cannot decrypt the key of `{name}`: expected the passphrase or key file that it was \
         created with or last changed to; another one was given, or the key slot was changed"
    )]
    WrongKey {
        /// The volume or snapshot.
        name: String,
    },
    /// The volume is not encrypted.
    #[error("`{name}` is not encrypted, so it has no key; only a new volume can be encrypted")]
    NotEncrypted {
        /// The volume or snapshot.
        name: String,
    },
    /// A file with a secret cannot be used.
    #[error("{field}: {source}")]
    SecretFile {
        /// The parameter that names the file.
        field: &'static str,
        /// The cause.
        source: blockyard_os::private_file::PrivateFileError,
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
    /// A volume that was to be destroyed has something that its copy in another pool lacks.
    #[error("`{name}` is {why}")]
    NotCopied {
        /// The volume or snapshot.
        name: String,
        /// What the copy lacks.
        why: String,
    },
    /// A volume that was to be destroyed has its key encrypted otherwise than its copy in another
    /// pool.
    #[error(
        "`{name}` is no longer as it was copied: its key was changed, and the copy opens by the \
         earlier passphrase or key"
    )]
    KeyChanged {
        /// The volume.
        name: String,
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
            VolumeError::NoSize { .. } | VolumeError::Shrinks { .. } => "size",
            VolumeError::SecretFile { field, .. } => field,
            _ => "path",
        }
    }
}
