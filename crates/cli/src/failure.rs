//! How commands fail: what is said on standard error, and the exit code.

use std::io;

use blockyard_store::StoreError;
use blockyard_volume::VolumeError;
use blockyard_yard::client::ClientError;
use blockyard_yard::daemon::{DaemonError, ServerError};
use blockyard_yard::error::StackError;
use blockyard_yard::error::YardError;

/// Exit codes, as the help and docs/cli.md list them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    /// Anything that has no code of its own.
    Failed = 1,
    /// Wrong use of the command line, URIs on it included, whether this program or the yard finds
    /// it; clap says 2 too.
    Usage = 2,
    /// The configuration, or a file that it names, is invalid.
    Config = 3,
    /// No yard answers on the control socket or not in time, or the socket cannot be used.
    Unreachable = 4,
    /// There is no such device, volume or pool.
    NoSuchDevice = 5,
    /// The yard, or a device or zone of it, refused.
    Refused = 6,
    /// `volume check`, `scrub` or `verify-stream` found damage, or a copy that is not good, or a
    /// pool is so damaged that it cannot be opened.
    Damaged = 7,
}

impl Code {
    /// The code for an error of a pool.
    pub(crate) fn of_pool(error: &VolumeError) -> Code {
        match error {
            VolumeError::NoSuchVolume { .. }
            | VolumeError::NoBase { .. }
            | VolumeError::Store(StoreError::NoPool { .. }) => Code::NoSuchDevice,
            VolumeError::Format(error) | VolumeError::Store(StoreError::Format(error))
                if !error.is_of_newer() =>
            {
                Code::Damaged
            }
            VolumeError::Exists { .. }
            | VolumeError::Busy { .. }
            | VolumeError::NotCopied { .. }
            | VolumeError::KeyChanged { .. }
            | VolumeError::Shrinks { .. }
            | VolumeError::Locked { .. }
            | VolumeError::WrongKey { .. }
            | VolumeError::NotEncrypted { .. }
            | VolumeError::Store(StoreError::InUse { .. } | StoreError::Copies(_)) => Code::Refused,
            _ => Code::Failed,
        }
    }
}

/// Why a command failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Something to say, and a code.
    Said(Code, String),
    /// All has been said already.
    Silent(Code),
    /// The reader of standard output closed it: nothing is printed.
    OutputClosed,
}

impl Failure {
    /// A failure with this code.
    pub(crate) fn new(code: Code, message: impl ToString) -> Failure {
        Failure::Said(code, message.to_string())
    }

    /// What is said.
    pub(crate) fn text(&self) -> &str {
        match self {
            Failure::Said(_, message) => message,
            Failure::Silent(_) => "it failed",
            Failure::OutputClosed => "standard output is closed",
        }
    }
}

impl From<io::Error> for Failure {
    /// An error of standard output.
    fn from(error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::OutputClosed,
            _ => Failure::new(Code::Failed, format!("standard output: {error}")),
        }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Failure {
        let code = match &error {
            ClientError::Unreachable { .. }
            | ClientError::TimedOut { .. }
            | ClientError::Socket { .. } => Code::Unreachable,
            ClientError::Refused(refusal)
                if matches!(
                    refusal.code.as_str(),
                    "no_such_device" | "no_such_rule" | "no_such_volume" | "no_such_pool"
                ) =>
            {
                Code::NoSuchDevice
            }
            // The yard finds an invalid value of an option or of a URI as the command itself does.
            ClientError::Refused(refusal)
                if matches!(
                    refusal.code.as_str(),
                    "invalid" | "unknown_key" | "unknown_kind" | "out_of_range"
                ) =>
            {
                Code::Usage
            }
            ClientError::Refused(_) => Code::Refused,
            _ => Code::Failed,
        };
        Failure::new(code, error)
    }
}

impl From<DaemonError> for Failure {
    fn from(error: DaemonError) -> Failure {
        let code = match &error {
            DaemonError::Device { source: YardError::Stack(StackError::Volume(error)), .. } => {
                Code::of_pool(error)
            }
            DaemonError::Device { source: YardError::Stack(StackError::InUse { .. }), .. } => {
                Code::Refused
            }
            DaemonError::Device { .. }
            | DaemonError::ApiDirectory(_)
            | DaemonError::NvmeSettings(_)
            | DaemonError::Nbd(ServerError::Tls(_)) => Code::Config,
            DaemonError::StdioTwice | DaemonError::Nbd(ServerError::TlsOnPipes) => Code::Usage,
            _ => Code::Failed,
        };
        Failure::new(code, error)
    }
}
