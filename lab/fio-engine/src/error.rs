//! The reasons for which a job cannot have its device: one line for fio's user.

use blockyard_baselines::BaselineError;
use blockyard_core::DeviceError;
use blockyard_yard::error::StackError;
use blockyard_yard::uri::UriError;

/// The reason for which a job cannot have its device. Each text names the option and what is
/// expected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The option `dev=` is missing.
    #[error(
        "dev: is missing; expected after --ioengine: a device URI, e.g. --dev=null:///n0?size=10G, \
         or a yard in TOML, e.g. --dev=yard.toml"
    )]
    Missing,
    /// The URI is invalid.
    #[error("dev: {0}")]
    Uri(#[from] UriError),
    /// The configuration file cannot be read.
    #[error(
        "dev: `{path}` cannot be read: {error}; expected a device URI, e.g. null:///n0?size=10G, or \
         a yard in TOML"
    )]
    Read {
        /// The path of the file.
        path: String,
        /// The system's error.
        error: std::io::Error,
    },
    /// The configuration file is invalid; this has its first error.
    #[error("dev: `{path}`: {error}")]
    Yard {
        /// The path of the file.
        path: String,
        /// The position and the error.
        error: String,
    },
    /// The configuration has no such device, or several and the job names none.
    #[error("dev: `{path}` {what}; it has {known}")]
    Pick {
        /// The path of the file.
        path: String,
        /// The device that was requested.
        what: String,
        /// The devices in the file.
        known: String,
    },
    /// The parameters conflict, or the system refused an operation.
    #[error("dev: {0}")]
    Stack(#[from] StackError),
    /// The device refused an operation.
    #[error("dev: {0}")]
    Device(#[from] DeviceError),
    /// Another device of this name is already open.
    #[error(
        "dev: `{name}` is `{here}` for another job of this process and `{wanted}` for this one; \
         give one of them another name"
    )]
    Other {
        /// The name of the device.
        name: String,
        /// The URI of the open device.
        here: String,
        /// The URI that this job gives.
        wanted: String,
    },
    /// A filename is used for two devices.
    #[error(
        "dev: filename `{file}` is device `{here}` for another job of this process and `{wanted}` \
         for this one; one filename is one device"
    )]
    File {
        /// The filename.
        file: String,
        /// The device in another job.
        here: String,
        /// The device in this job.
        wanted: String,
    },
    /// fio would keep two write pointers for one zone.
    #[error(
        "filename: zoned device `{name}` is `{here}` for another job and `{file}` for this one, \
         and with zonemode=zbd fio keeps write pointers per filename; give both the same, e.g. \
         --filename=/dev/{name}"
    )]
    TwoFiles {
        /// The device.
        name: String,
        /// The filename in another job.
        here: String,
        /// The filename in this job.
        file: String,
    },
    /// There is no such scheduler.
    #[error("invalid ioscheduler `{name}`: expected one of {known}{advice}")]
    Scheduler {
        /// The requested name.
        name: String,
        /// The known names.
        known: String,
        /// A suggestion: begins with a semicolon, or is empty.
        advice: String,
    },
    /// The baseline does not exist, or does not fit the device.
    #[error(transparent)]
    Baseline(#[from] BaselineError),
}
