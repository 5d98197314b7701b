//! Why a null device could not be created.

use blockyard_core::DeviceError;
use blockyard_zone_media::RecordError;

/// Why a null device could not be created.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NullError {
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
    /// The system has not enough memory.
    #[error(
        "{field}: `{value}` takes more memory than there is: {}",
        std::io::Error::from_raw_os_error(*.errno)
    )]
    Memory {
        /// The parameter that determines the amount.
        field: &'static str,
        /// The value of the parameter.
        value: u64,
        /// The error number.
        errno: i32,
    },
    /// The zones on the medium do not match the parameters.
    #[error("backing: {0}")]
    Zones(#[source] RecordError),
}

impl NullError {
    /// The error for a refused allocation that this parameter determines.
    pub(crate) fn no_memory(field: &'static str, value: u64) -> NullError {
        NullError::Memory { field, value, errno: libc::ENOMEM }
    }

    pub(crate) fn invalid(
        field: &'static str,
        value: impl ToString,
        wanted: impl Into<String>,
    ) -> NullError {
        NullError::Invalid { field, value: value.to_string(), wanted: wanted.into() }
    }
}

impl From<NullError> for DeviceError {
    fn from(error: NullError) -> DeviceError {
        match error {
            NullError::Invalid { field, value, wanted } => {
                DeviceError::Invalid { field, value, wanted }
            }
            NullError::Memory { errno, .. } => {
                DeviceError::Os { what: "reserving the device's memory", errno }
            }
            NullError::Zones(_) => {
                DeviceError::Os { what: "opening the recorded zones", errno: libc::EINVAL }
            }
        }
    }
}
