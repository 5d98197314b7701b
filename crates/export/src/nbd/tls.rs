//! TLS on a connection: certificates as nbdkit and QEMU lay them out, and a path of its own for
//! the bytes, because what is encrypted cannot be received in place.
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

/// The authority's certificate, by which clients are judged.
pub const CA_FILE: &str = "ca-cert.pem";
/// The server's certificate, with those that lead to the authority behind it.
pub const CERTIFICATE_FILE: &str = "server-cert.pem";
/// The server's private key.
pub const KEY_FILE: &str = "server-key.pem";

/// How a server does TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsConfig {
    /// Off, the client's choice, or required.
    pub mode: TlsMode,
    /// Directory of [`CERTIFICATE_FILE`] and [`KEY_FILE`], and of [`CA_FILE`] if clients are
    /// verified.
    pub certificates: PathBuf,
    /// Whether a client must show a certificate of the authority.
    pub verify_peer: bool,
    /// Which clients may use which export.
    pub allow: AllowLists,
}

/// Why TLS cannot be set up.
#[derive(Debug)]
#[non_exhaustive]
pub enum TlsError {
    /// This program was built without TLS.
    NotBuilt,
    /// A file cannot be read as what it should be.
    File {
        /// Which file.
        path: PathBuf,
        /// What was expected in it.
        wanted: &'static str,
        /// What was found.
        problem: String,
    },
    /// The certificate, key and authority do not go together.
    Mismatch {
        /// The directory.
        certificates: PathBuf,
        /// What does not fit.
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
