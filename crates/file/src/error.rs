//! Why a file could not be opened as a device.

use std::io;
use std::path::PathBuf;

/// Why a file could not be opened as a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileDeviceError {
    /// The parameter `path` is missing.
    #[error("path: missing: expected the regular file or block device to serve")]
    NoPath,
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
    /// A program has the file open for writing, or has locked it.
    #[error("cannot open `{}`: it is in use {owner}; end that program first", .path.display())]
    InUse {
        /// The file.
        path: PathBuf,
        /// The program, as the end of a sentence.
        owner: String,
    },
    /// The system refused an operation.
    #[error("cannot {verb} `{}`: {source}{advice}", .path.display())]
    Io {
        /// The operation.
        verb: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
        /// A way out: begins with a semicolon, or is empty.
        advice: &'static str,
    },
    /// The system refuses io_uring.
    #[error("io: the system refuses io_uring: {0}; io=blocking works without")]
    NoUring(io::Error),
}

impl FileDeviceError {
    pub(crate) fn invalid(
        field: &'static str,
        value: impl ToString,
        wanted: impl Into<String>,
    ) -> FileDeviceError {
        FileDeviceError::Invalid { field, value: value.to_string(), wanted: wanted.into() }
    }

    /// The parameter that the error is about.
    pub fn field(&self) -> &'static str {
        match self {
            FileDeviceError::Invalid { field, .. } => field,
            FileDeviceError::NoUring(_) => "io",
            FileDeviceError::NoPath
            | FileDeviceError::InUse { .. }
            | FileDeviceError::Io { .. } => "path",
        }
    }
}
