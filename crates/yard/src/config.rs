//! The yard's configuration in TOML.
//!
//! The text is walked by hand over toml's parse tree, not through serde: so every key and value
//! keeps its place in the file, a device's keys come from the same table as its URI's, and a wrong
//! key can be answered with the nearest right one.

use std::ops::Range;
use std::path::PathBuf;

use crate::listen::Listen;
use crate::spec::DeviceSpec;

mod read;
mod schema;

pub use read::parse;
pub use schema::schema;

/// Longest configuration, in bytes.
pub const LEN_MAX: usize = 1 << 20;

/// Most devices of a yard.
pub const DEVICES_MAX: usize = 4096;

/// The default yard: what `blockyard serve` serves without arguments, and `blockyard init` writes.
pub const TEMPLATE: &str = include_str!("config/template.toml");

/// What stands for no control socket where a path could stand.
pub const NO_SOCKET: &str = "none";

/// A configuration, checked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// Where NBD is served; `None` if the file does not say.
    pub nbd: Option<Vec<Listen>>,
    /// The control socket, [`NO_SOCKET`] for none; `None` if the file does not say.
    pub control: Option<PathBuf>,
    /// Where metrics are served beside the control socket.
    pub metrics: Option<Listen>,
    /// TLS for NBD.
    pub tls: TlsSettings,
    /// The devices, in the file's order.
    pub devices: Vec<DeviceSpec>,
    /// Where in the text each device's table stands.
    pub places: Vec<DevicePlaces>,
}

/// How NBD is secured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsSettings {
    /// Whether TLS is offered or demanded.
    pub mode: TlsMode,
    /// Directory with `server-cert.pem`, `server-key.pem` and, to verify clients, `ca-cert.pem`.
    pub certificates: Option<PathBuf>,
    /// Whether clients must show a certificate that `ca-cert.pem` signed.
    pub verify_peer: bool,
}

/// Whether TLS is offered or demanded, as `nbdkit --tls`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsMode {
    /// Not offered.
    #[default]
    Off,
    /// Offered.
    On,
    /// Demanded.
    Require,
}

impl TlsMode {
    /// The words for the modes.
    pub const WORDS: [&'static str; 3] = ["off", "on", "require"];

    /// The mode that a word means.
    pub fn from_word(word: &str) -> Option<TlsMode> {
        match word {
            "off" => Some(TlsMode::Off),
            "on" => Some(TlsMode::On),
            "require" => Some(TlsMode::Require),
            _ => None,
        }
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
