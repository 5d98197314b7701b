//! Why a disk cannot be driven.

use crate::transport::TransportError;

/// Why a disk cannot be driven.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SdError {
    /// A command that probing requires did not reach the disk.
    #[error("{command}: {source}")]
    Transport {
        /// The command.
        command: &'static str,
        /// The cause.
        source: TransportError,
    },
    /// The disk refused a command that probing requires.
    #[error("{command}: the disk refuses: {sense}")]
    Refused {
        /// The command.
        command: &'static str,
        /// The disk's sense data.
        sense: String,
    },
    /// The disk responded, but this driver does not support it.
    #[error("this disk cannot be driven: {what}")]
    Unfit {
        /// What the disk lacks.
        what: String,
    },
}

impl SdError {
    pub(super) fn unfit(what: impl Into<String>) -> SdError {
        SdError::Unfit { what: what.into() }
    }
}
