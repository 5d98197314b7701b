//! Why a job cannot have its device: one line for fio's user.

use blockyard_core::DeviceError;
use blockyard_lab::baseline::BaselineError;
use blockyard_yard::stack::StackError;
use blockyard_yard::uri::UriError;

/// Why a job cannot have its device. Each text names the option and what would do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// No `dev=`.
    #[error(
        "dev: is missing; wanted, after --ioengine, a device URI, e.g. --dev=null:///n0?size=10G, \
         or a yard in TOML, e.g. --dev=yard.toml"
    )]
    Missing,
    /// The URI will not do.
    #[error("dev: {0}")]
    Uri(#[from] UriError),
    /// The yard's file cannot be read.
    #[error(
        "dev: `{path}` cannot be read: {error}; wanted a device URI, e.g. null:///n0?size=10G, or \
         a yard in TOML"
    )]
    Read {
        /// The file.
        path: String,
        /// What the system says.
        error: std::io::Error,
    },
    /// The yard's file is wrong; its first error.
    #[error("dev: `{path}`: {error}")]
    Yard {
        /// The file.
        path: String,
        /// Where and what.
        error: String,
    },
    /// The yard has no such device, or several and none was picked.
    #[error("dev: `{path}` {what}; it has {known}")]
    Pick {
        /// The file.
        path: String,
        /// What was asked of it.
        what: String,
        /// Its devices.
        known: String,
    },
    /// The parameters do not go together, or the system refused something.
    #[error("dev: {0}")]
    Stack(#[from] StackError),
    /// The device refused.
    #[error("dev: {0}")]
    Device(#[from] DeviceError),
    /// A device of this name is there already, and it is another.
    #[error(
        "dev: `{name}` is `{here}` for another job of this process and `{wanted}` for this one; \
         give one of them another name"
    )]
    Other {
        /// The device.
        name: String,
        /// What it is.
        here: String,
        /// What it should be.
        wanted: String,
    },
    /// One filename, two devices.
    #[error(
        "dev: filename `{file}` is device `{here}` for another job of this process and `{wanted}` \
         for this one; one filename is one device"
    )]
    File {
        /// The filename.
        file: String,
        /// The device that it was.
        here: String,
        /// The device that it should be.
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
        /// Its filename in another job.
        here: String,
        /// Its filename in this job.
        file: String,
    },
    /// No such scheduler.
    #[error("ioscheduler: `{name}` is not a scheduler here; {known} would do{advice}")]
    Scheduler {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
        /// The nearest one: begins with a semicolon, or is empty.
        advice: String,
    },
    /// No such baseline, or it will not do for the device.
    #[error(transparent)]
    Baseline(#[from] BaselineError),
}
