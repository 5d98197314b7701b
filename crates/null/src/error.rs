//! Why a null device could not be made.

use blockyard_core::DeviceError;

/// Why a null device could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NullError {
    /// A parameter does not fit.
    #[error("{field}: `{value}` will not do: {wanted}")]
    Invalid {
        /// The parameter.
        field: &'static str,
        /// What was given.
        value: String,
        /// What would do.
        wanted: String,
    },
    /// The system refused memory.
    #[error("size: mapping {len_bytes} bytes: {}", std::io::Error::from_raw_os_error(*.errno))]
    Memory {
        /// How much was asked for.
        len_bytes: u64,
        /// The error number.
        errno: i32,
    },
}

impl NullError {
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
                DeviceError::Os { what: "mapping the device's memory", errno }
            }
        }
    }
}
