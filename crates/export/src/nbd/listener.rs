//! Sockets that listen: opened, accepted from and removed.

use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::nbd::endpoint::Endpoint;
use crate::nbd::sys::{self, Family};

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// Another server answers at this path.
    #[error("unix:{}: a server listens there already: stop it or take another path", .0.display())]
    InUse(PathBuf),
    /// There is a file at the path that is no socket.
    #[error("unix:{}: the file there is no socket: remove it or take another path", .0.display())]
    NotASocket(PathBuf),
    /// The descriptor is no stream socket that listens.
    #[error(
        "socket: the descriptor is no listening stream socket of the unix or an internet family"
    )]
    BadDescriptor,
    /// The system refused.
    #[error("{endpoint}: cannot listen: {source}")]
    System {
        /// The endpoint.
        endpoint: String,
        /// What the system said.
        source: io::Error,
    },
}

/// A socket that listens.
#[derive(Debug)]
pub(crate) enum Listener {
    /// A unix socket, and the file to remove in the end.
    Unix(UnixListener, Option<PathBuf>),
    /// A TCP socket.
    Tcp(TcpListener),
}

impl Listener {
    /// Listens at an endpoint; `None` for standard input and output, where nobody listens.
    pub(crate) fn open(endpoint: Endpoint) -> Result<Option<Listener>, ListenError> {
        let name = endpoint.to_string();
        let system = |source| ListenError::System { endpoint: name.clone(), source };
        let listener = match endpoint {
            Endpoint::Stdio => return Ok(None),
            Endpoint::Unix(path) => {
                let listener = bind_unix(&path, system)?;
                Listener::Unix(listener, Some(path))
            }
            Endpoint::Tcp { host, port } => {
                let addresses = (host.as_str(), port).to_socket_addrs().map_err(system)?;
                let addresses: Vec<_> = addresses.collect();
                Listener::Tcp(TcpListener::bind(addresses.as_slice()).map_err(system)?)
            }
        };
        listener.set_nonblocking().map_err(system)?;
        Ok(Some(listener))
    }

    /// A socket that somebody else made and listens at, as systemd does.
    pub(crate) fn adopt(socket: OwnedFd) -> Result<Listener, ListenError> {
        let listener = match sys::family(&socket) {
            _ if !sys::is_listening(&socket) => return Err(ListenError::BadDescriptor),
            Family::Unix => Listener::Unix(UnixListener::from(socket), None),
            Family::Inet => Listener::Tcp(TcpListener::from(socket)),
            Family::OtherSocket | Family::NoSocket => return Err(ListenError::BadDescriptor),
        };
        let system = |source| ListenError::System { endpoint: listener.address(), source };
        listener.set_nonblocking().map_err(system)?;
        Ok(listener)
    }

    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Listener::Unix(listener, _) => listener.set_nonblocking(true),
            Listener::Tcp(listener) => listener.set_nonblocking(true),
        }
    }

    /// The next client and its name; `None` if none waits.
    pub(crate) fn accept(&self) -> io::Result<Option<(Arc<OwnedFd>, String)>> {
        let accepted = match self {
            Listener::Unix(listener, _) => listener.accept().map(|(stream, _)| {
                let peer = sys::peer_pid(&stream)
                    .map_or("unix".to_owned(), |pid| format!("unix:pid={pid}"));
                (OwnedFd::from(stream), peer)
            }),
            Listener::Tcp(listener) => listener.accept().map(|(stream, address)| {
                set_no_delay(&stream);
                sys::keep_alive(&stream);
                (OwnedFd::from(stream), format!("tcp:{address}"))
            }),
        };
        match accepted {
            Ok((socket, peer)) => Ok(Some((Arc::new(socket), peer))),
            Err(error) if gone_already(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The address, as `unix:PATH` or `tcp:HOST:PORT`, the port being the real one.
    pub(crate) fn address(&self) -> String {
        match self {
            Listener::Unix(_, Some(path)) => format!("unix:{}", path.display()),
            Listener::Unix(listener, None) => {
                let address = listener.local_addr().ok();
                let path = address.as_ref().and_then(|address| address.as_pathname());
                path.map_or("unix:".to_owned(), |path| format!("unix:{}", path.display()))
            }
            Listener::Tcp(listener) => {
                listener.local_addr().map_or("tcp:".to_owned(), |address| format!("tcp:{address}"))
            }
        }
    }
}

impl Listener {
    /// Host and port as a URI names them: the host as it was given, if it was, for certificates
    /// are issued to names; `localhost` for all addresses at once. `None` unless it is TCP.
    pub(crate) fn uri_host(&self, given: Option<String>) -> Option<String> {
        let Listener::Tcp(listener) = self else { return None };
        let address = listener.local_addr().ok()?;
        let host = if address.ip().is_unspecified() {
            "localhost".to_owned()
        } else {
            given.unwrap_or_else(|| address.ip().to_string())
        };
        let port = address.port();
        Some(if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(listener, _) => listener.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, Some(path)) = self {
            // It may be gone already; then there is nothing to do.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Replies are sent in batches; waiting for more to come would only delay them.
fn set_no_delay(stream: &TcpStream) {
    // A socket that refuses works all the same.
    let _ = stream.set_nodelay(true);
}

/// Whether an accept failed for the client's sake: it left, or there was none.
fn gone_already(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted
    )
}

/// Binds a unix socket. A file that nobody listens at any more is replaced.
fn bind_unix(
    path: &Path,
    system: impl Fn(io::Error) -> ListenError,
) -> Result<UnixListener, ListenError> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {}
        result => return result.map_err(system),
    }
    let metadata = std::fs::symlink_metadata(path).map_err(&system)?;
    if !metadata.file_type().is_socket() {
        return Err(ListenError::NotASocket(path.to_owned()));
    }
    match UnixStream::connect(path) {
        Ok(_) => return Err(ListenError::InUse(path.to_owned())),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
        Err(error) => return Err(system(error)),
    }
    std::fs::remove_file(path).map_err(&system)?;
    UnixListener::bind(path).map_err(system)
}
