//! Why a cell could not be measured, or a command of the lab failed.

use std::io;

/// Why something was not measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// A tool, file or feature of the machine is not there.
    #[error("{what} is missing; {how}")]
    Missing {
        /// What is missing, e.g. "fio".
        what: String,
        /// What would bring it, e.g. "install the package fio".
        how: String,
    },
    /// It was there and did not do what was asked.
    #[error("{what}: {why}")]
    Failed {
        /// What failed, with its value: a command line, a device's URI.
        what: String,
        /// What it said.
        why: String,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, with the path or the value.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// Ctrl-C came before the measurement was complete; what it gave is thrown away.
    #[error("interrupted")]
    Interrupted,
}

impl LabError {
    /// Something is not there: what, and what would bring it.
    pub fn missing(what: impl Into<String>, how: impl Into<String>) -> LabError {
        LabError::Missing { what: what.into(), how: how.into() }
    }

    /// Something failed: what, and what it said.
    pub fn failed(what: impl Into<String>, why: impl ToString) -> LabError {
        LabError::Failed { what: what.into(), why: why.to_string() }
    }

    /// A system call failed while `what` was tried.
    pub fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> LabError {
        let what = what.into();
        move |source| LabError::Io { what, source }
    }
}
