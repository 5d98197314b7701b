//! The yard's configuration in TOML.
//!
//! The text is walked by hand over toml's parse tree, not through serde: so every key and value
//! keeps its place in the file, a device's keys come from the same table as its URI's, and a wrong
//! key can be answered with the nearest right one.

use std::ops::Range;
use std::path::PathBuf;

use blockyard_export::nbd::{Endpoint, UnixPlace};

use crate::spec::DeviceSpec;

mod read;
mod schema;
mod tls;

pub use read::parse;
pub use schema::schema;
pub use tls::{TlsMode, TlsPlaces, TlsProblem, TlsSettings};

/// Longest configuration, in bytes.
pub const LEN_MAX: usize = 1 << 20;

/// Most devices of a yard.
pub const DEVICES_MAX: usize = 4096;

/// The default yard: what `blockyard serve` serves without arguments, and `blockyard init` writes.
pub const TEMPLATE: &str = include_str!("config/template.toml");

/// What stands for no socket, of NBD or of the control API, where one could stand.
pub const NO_SOCKET: &str = "none";

/// A configuration, each of its values checked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// Where NBD is served; `None` if the file does not say.
    pub nbd: Option<Vec<Endpoint>>,
    /// The control socket, [`NO_SOCKET`] for none; `None` if the file does not say.
    pub control: Option<UnixPlace>,
    /// The directories below which requests of the control API may name files.
    pub api_directories: Vec<PathBuf>,
    /// Where metrics are served beside the control socket.
    pub metrics: Option<Endpoint>,
    /// The directory where the devices are mounted as files.
    pub fuse: Option<PathBuf>,
    /// Whether users other than the daemon's see those files.
    pub fuse_allow_other: bool,
    /// Most bytes for the buffers of all NBD connections; `None` if the file does not say.
    pub nbd_memory: Option<u64>,
    /// TLS for NBD.
    pub tls: TlsSettings,
    /// Where in the text that stands.
    pub tls_places: TlsPlaces,
    /// The devices, in the file's order.
    pub devices: Vec<DeviceSpec>,
    /// Where in the text each device's table stands.
    pub places: Vec<DevicePlaces>,
}

impl Config {
    /// What of the file's TLS settings does not go together, where the command line adds nothing
    /// to them. `text` is what was read.
    pub fn check_tls(&self, text: &str) -> Option<ConfigError> {
        let problem = self.tls.check(self.tls_places.mode.is_some()).err()?;
        let (span, message, help) = self.tls_places.tell(problem);
        Some(ConfigError::at(text, span, message, Some(help.to_owned())))
    }
}

/// Where a device stands in the text: for errors that show only when it is made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DevicePlaces {
    /// The name.
    pub name: Range<usize>,
    /// Each parameter's value.
    pub values: Vec<(&'static str, Range<usize>)>,
}

impl DevicePlaces {
    /// The place of a parameter's value, or of the device's name.
    pub fn of(&self, key: &str) -> Range<usize> {
        let value = self.values.iter().find(|(name, _)| *name == key);
        value.map_or_else(|| self.name.clone(), |(_, place)| place.clone())
    }
}

/// One thing that is wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {message}{}", ConfigError::tail(help))]
pub struct ConfigError {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// The place in the text, in bytes.
    pub span: Range<usize>,
    /// What is wrong.
    pub message: String,
    /// What would do.
    pub help: Option<String>,
}

impl ConfigError {
    fn tail(help: &Option<String>) -> String {
        help.as_ref().map(|help| format!("; {help}")).unwrap_or_default()
    }

    /// An error at a place of `text`.
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
