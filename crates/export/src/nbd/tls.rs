//! TLS on a connection: certificates in the layout of nbdkit and QEMU. TLS needs a copying path of
//! its own, because encrypted bytes cannot be received in place.
//!
//! X.509 only: rustls has no suite with pre-shared keys.

use std::fmt;
use std::path::PathBuf;

use crate::nbd::access::AllowLists;

pub use crate::nbd::handshake::TlsMode;

#[cfg(not(feature = "tls"))]
mod absent;
#[cfg(feature = "tls")]
mod present;

#[cfg(not(feature = "tls"))]
pub(crate) use absent::{Acceptor, TlsLink};
#[cfg(feature = "tls")]
pub(crate) use present::{Acceptor, TlsLink};

/// The authority's certificate, with which clients are verified.
pub const CA_FILE: &str = "ca-cert.pem";
/// The server's certificate, followed by those that lead to the authority.
pub const CERTIFICATE_FILE: &str = "server-cert.pem";
/// The server's private key.
pub const KEY_FILE: &str = "server-key.pem";

/// The TLS configuration of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsConfig {
    /// Off, the client's choice, or required.
    pub mode: TlsMode,
    /// Directory of [`CERTIFICATE_FILE`] and [`KEY_FILE`], and of [`CA_FILE`] if clients are
    /// verified.
    pub certificates: PathBuf,
    /// Whether a client must show a certificate of the authority.
    pub verify_peer: bool,
    /// The clients that may use each export.
    pub allow: AllowLists,
}

/// The reason for which TLS cannot be set up.
#[derive(Debug)]
#[non_exhaustive]
pub enum TlsError {
    /// This program was built without TLS.
    NotBuilt,
    /// A file cannot be read or parsed.
    File {
        /// The path of the file.
        path: PathBuf,
        /// The expected contents.
        wanted: &'static str,
        /// The error.
        problem: String,
    },
    /// The certificate, key and authority do not match.
    Mismatch {
        /// The directory.
        certificates: PathBuf,
        /// The mismatch.
        problem: String,
    },
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TlsError::NotBuilt => {
                f.write_str("tls: this program was built without the feature `tls`: use `off`")
            }
            TlsError::File { path, wanted, problem } => {
                write!(f, "tls-certificates: {}: {problem}: {wanted} must be there", path.display())
            }
            TlsError::Mismatch { certificates, problem } => {
                write!(f, "tls-certificates: {}: {problem}", certificates.display())
            }
        }
    }
}

impl std::error::Error for TlsError {}
