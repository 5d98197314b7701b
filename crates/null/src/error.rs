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
    #[error(
        "{field}: `{value}` takes more memory than there is: {}",
        std::io::Error::from_raw_os_error(*.errno)
    )]
    Memory {
        /// The parameter that decides how much it is.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The error number.
        errno: i32,
    },
}

impl NullError {
    /// An allocation for this parameter was refused.
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
        }
    }
}
