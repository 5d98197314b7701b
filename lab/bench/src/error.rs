//! The reasons for which a cell cannot be measured or a command of the lab fails.

use std::io;

/// The reason for which a measurement failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// A tool, file or feature of the machine is missing.
    #[error("{what} is missing; {how}")]
    Missing {
        /// The missing item, e.g. "fio".
        what: String,
        /// How to provide it, e.g. "install the package fio".
        how: String,
    },
    /// A tool or device exists and failed.
    #[error("{what}: {why}")]
    Failed {
        /// What failed, with its value: a command line, a device's URI.
        what: String,
        /// The error message.
        why: String,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation, with the path or the value.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// Ctrl-C came before the measurement was complete; its values are discarded.
    #[error("interrupted")]
    Interrupted,
}

impl LabError {
    /// A missing item, and how to provide it.
    pub fn missing(what: impl Into<String>, how: impl Into<String>) -> LabError {
        LabError::Missing { what: what.into(), how: how.into() }
    }

    /// A failed item, and its error message.
    pub fn failed(what: impl Into<String>, why: impl ToString) -> LabError {
        LabError::Failed { what: what.into(), why: why.to_string() }
    }

    /// A system call that failed during the operation `what`.
    pub fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> LabError {
        let what = what.into();
        move |source| LabError::Io { what, source }
    }
}
