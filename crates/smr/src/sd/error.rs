//! Why a disk could not be driven.

use crate::transport::TransportError;

/// Why a disk could not be driven.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SdError {
    /// A command that probing cannot do without did not reach the disk.
    #[error("{command}: {source}")]
    Transport {
        /// The command.
        command: &'static str,
        /// Why.
        source: TransportError,
    },
    /// The disk refused a command that probing cannot do without.
    #[error("{command}: the disk refuses: {sense}")]
    Refused {
        /// The command.
        command: &'static str,
        /// What the disk says.
        sense: String,
    },
    /// The disk answered, but it is none that this driver can drive.
    #[error("this disk cannot be driven: {what}")]
    Unfit {
        /// What it lacks.
        what: String,
    },
}

impl SdError {
    pub(super) fn unfit(what: impl Into<String>) -> SdError {
        SdError::Unfit { what: what.into() }
    }
}
