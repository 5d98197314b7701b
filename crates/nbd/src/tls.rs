//! TLS on a connection: certificates in the layout of nbdkit and QEMU. TLS needs a copying path of
//! its own, because encrypted bytes cannot be received in place.
//!
//! X.509 only: rustls has no suite with pre-shared keys.

use std::fmt;
use std::path::PathBuf;

use crate::access::AllowLists;

pub use crate::handshake::TlsMode;

#[cfg(feature = "tls")]
mod present;

#[cfg(not(feature = "tls"))]
pub(crate) use absent::{Acceptor, TlsTransport};
#[cfg(feature = "tls")]
pub(crate) use present::{Acceptor, TlsTransport};

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

impl TlsConfig {
    /// Reads the files.
    ///
    /// # Errors
    /// If a server with this configuration could not start.
    pub fn check(&self) -> Result<(), TlsError> {
        Acceptor::load(self).map(drop)
    }
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

/// TLS in a build without it: there is no acceptor, so there is never a TLS transport.
#[cfg(not(feature = "tls"))]
mod absent {
    use std::io;
    use std::os::fd::{OwnedFd, RawFd};
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use blockyard_core::Region;
    use blockyard_os::socket::{Ready, WaitMode};

    use crate::memory::Lease;
    use crate::tls::{TlsConfig, TlsError, TlsMode};
    use crate::transport::Replies;

    /// A type without values.
    #[derive(Clone, Debug)]
    pub(crate) enum Acceptor {}

    impl Acceptor {
        pub(crate) fn load(config: &TlsConfig) -> Result<Option<Acceptor>, TlsError> {
            if config.mode == TlsMode::Off { Ok(None) } else { Err(TlsError::NotBuilt) }
        }

        pub(crate) fn accept(&self, _: Arc<OwnedFd>, _: Instant) -> io::Result<TlsTransport> {
            match *self {}
        }
    }

    /// A type without values.
    pub(crate) enum TlsTransport {}

    impl TlsTransport {
        pub(crate) fn subject(&self) -> Option<String> {
            match *self {}
        }

        pub(crate) fn wait(&mut self, _: Duration) -> io::Result<Ready> {
            match *self {}
        }

        pub(crate) fn wait_either(&mut self, _: Option<RawFd>, _: Duration) -> io::Result<Ready> {
            match *self {}
        }

        pub(crate) fn recv(
            &mut self,
            _: &Region,
            _: u64,
            _: usize,
            _: WaitMode,
        ) -> io::Result<usize> {
            match *self {}
        }

        pub(crate) fn send(
            &mut self,
            _: &Region,
            _: &mut Replies,
            _: &mut dyn FnMut(),
            _: &Lease,
        ) -> io::Result<()> {
            match *self {}
        }

        pub(crate) fn read(&mut self, _: &mut [u8], _: Instant) -> io::Result<usize> {
            match *self {}
        }

        pub(crate) fn write(&mut self, _: &[u8], _: Instant) -> io::Result<usize> {
            match *self {}
        }

        pub(crate) fn close(&mut self) {
            match *self {}
        }
    }
}
