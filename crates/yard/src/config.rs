//! The yard's configuration in TOML.
//!
//! The text is read from toml's parse tree, not through serde, so every key and value keeps its
//! position in the file. A device's keys come from the same table as its URI's, and an error about
//! an unknown key suggests the nearest known one.

use std::ops::Range;
use std::path::PathBuf;

use blockyard_nbd::{Endpoint, UnixPlace};

use crate::spec::DeviceSpec;
use crate::ublk::UblkPlace;
use crate::vhost::VhostPlace;

mod backup;
mod nvme;
mod read;
mod schema;
mod tls;

pub use backup::{BACKUP_NAME_MAX, BACKUP_TIMEOUT, BACKUPS_MAX, BackupSettings};
pub use nvme::{
    NVME_CONNECTIONS, NVME_THREADS, NvmePlaces, NvmeProblem, NvmeSettings, NvmeSettingsError,
};
pub use read::parse;
pub use schema::schema;
pub use tls::{TlsMode, TlsPlaces, TlsProblem, TlsSettings};

/// The longest configuration, in bytes.
pub const LEN_MAX: usize = 1 << 20;

/// The most devices of a yard.
pub const DEVICES_MAX: usize = 4096;

/// The default yard: what `blockyard serve` serves without arguments, and `blockyard init` writes.
pub const TEMPLATE: &str = include_str!("config/template.toml");

/// The word for no socket, of NBD or of the control API.
pub const NO_SOCKET: &str = "none";

/// A configuration with valid values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// The endpoints of NBD; `None` if the file does not name any.
    pub nbd: Option<Vec<Endpoint>>,
    /// The endpoints of NVMe.
    pub nvme: Vec<Endpoint>,
    /// The endpoints of NVMe discovery alone.
    pub nvme_discovery: Vec<Endpoint>,
    /// The sockets at which hypervisors find devices.
    pub vhost: Vec<VhostPlace>,
    /// The devices that are block devices of the kernel.
    pub ublk: Vec<UblkPlace>,
    /// The access of NVMe hosts.
    pub nvme_access: NvmeSettings,
    /// The positions of its settings in the text.
    pub nvme_places: NvmePlaces,
    /// The control socket, [`NO_SOCKET`] for none; `None` if the file does not name one.
    pub control: Option<UnixPlace>,
    /// The directories below which requests of the control API may name files.
    pub api_directories: Vec<PathBuf>,
    /// The endpoint for metrics, in addition to the control socket.
    pub metrics: Option<Endpoint>,
    /// The endpoint for the dashboard.
    pub web: Option<Endpoint>,
    /// The file with the token that clients of the dashboard have to show.
    pub web_token_file: Option<PathBuf>,
    /// The directory where the devices are mounted as files.
    pub fuse: Option<PathBuf>,
    /// Whether users other than the daemon's can access those files.
    pub fuse_allow_other: bool,
    /// Whether the daemon is a standby.
    pub standby: bool,
    /// The most bytes for the buffers of all NBD connections; `None` if the file does not set it.
    pub nbd_memory: Option<u64>,
    /// The percentage of the time in which the thread of each ring of a virtual machine may poll.
    pub vhost_poll: Option<u32>,
    /// The TLS settings of NBD.
    pub tls: TlsSettings,
    /// The positions of the TLS settings in the text.
    pub tls_places: TlsPlaces,
    /// The backup policies.
    pub backups: Vec<BackupSettings>,
    /// The devices, in the file's order.
    pub devices: Vec<DeviceSpec>,
    /// The positions of each device in the text.
    pub places: Vec<DevicePlaces>,
}

impl Config {
    /// The conflict in the file's settings of NVMe, if the command line adds none to them. `text`
    /// is the configuration.
    pub fn check_nvme(&self, text: &str) -> Option<ConfigError> {
        let (span, message, help) = self.nvme_places.tell(self.nvme_access.check().err()?);
        Some(ConfigError::at(text, span, message, Some(help.to_owned())))
    }

    /// The conflict in the file's TLS settings, if the command line adds none to them. `text` is
    /// the configuration.
    pub fn check_tls(&self, text: &str) -> Option<ConfigError> {
        let problem = self.tls.check(self.tls_places.mode.is_some()).err()?;
        let (span, message, help) = self.tls_places.tell(problem);
        Some(ConfigError::at(text, span, message, Some(help.to_owned())))
    }
}

/// The positions of a device in the text, for errors that occur only when the device is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DevicePlaces {
    /// The position of the name.
    pub name: Range<usize>,
    /// The position of each parameter's value.
    pub values: Vec<(&'static str, Range<usize>)>,
}

impl DevicePlaces {
    /// The position of a parameter's value, or of the device's name.
    pub fn of(&self, key: &str) -> Range<usize> {
        let value = self.values.iter().find(|(name, _)| *name == key);
        value.map_or_else(|| self.name.clone(), |(_, place)| place.clone())
    }
}

/// One error in a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {message}{}", ConfigError::tail(help))]
pub struct ConfigError {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// The position in the text, in bytes.
    pub span: Range<usize>,
    /// The error message.
    pub message: String,
    /// What is expected.
    pub help: Option<String>,
}

impl ConfigError {
    fn tail(help: &Option<String>) -> String {
        match help {
            Some(help) if help.starts_with("expected ") => format!(": {help}"),
            Some(help) => format!("; {help}"),
            None => String::new(),
        }
    }

    /// An error at a position of `text`.
    pub fn at(
        text: &str,
        span: Range<usize>,
        message: impl Into<String>,
        help: Option<String>,
    ) -> ConfigError {
        let start = text.floor_char_boundary(span.start.min(text.len()));
        let end = text.ceil_char_boundary(span.end.clamp(start, text.len()));
        let before = &text[..start];
        let line = before.matches('\n').count() + 1;
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        let column = before[line_start..].chars().count() + 1;
        ConfigError { line, column, span: start..end, message: message.into(), help }
    }
}
