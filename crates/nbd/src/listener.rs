//! Listening sockets: opened, accepted from and removed.

use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

use blockyard_os::socket::{self, Family};

use crate::endpoint::{Endpoint, ListenError};
use crate::tcp::listen_tcp;
use crate::unix::listen_unix;

/// The sockets of one server.
#[derive(Debug)]
pub(crate) struct Listener {
    /// At least one; several only for a host with several addresses.
    sockets: Vec<Socket>,
    /// The file that is removed at the end.
    path: Option<PathBuf>,
}

/// A non-blocking listening socket.
#[derive(Debug)]
pub(crate) enum Socket {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    /// Listens at an endpoint; `None` for standard input and output, which have no listening
    /// socket.
    pub(crate) fn open(endpoint: Endpoint) -> Result<Option<Listener>, ListenError> {
        let name = endpoint.to_string();
        let system = |source| ListenError::System { endpoint: name.clone(), source };
        let (sockets, path) = match endpoint {
            Endpoint::Stdio => return Ok(None),
            Endpoint::Unix(place) => (vec![Socket::Unix(listen_unix(&place)?)], Some(place.path)),
            Endpoint::Tcp { host, port } => {
                let listeners = listen_tcp(&host, port).map_err(system)?;
                (listeners.into_iter().map(Socket::Tcp).collect(), None)
            }
        };
        Ok(Some(Listener::new(sockets, path).map_err(system)?))
    }

    /// Listening sockets, at least one, and the file to remove at the end.
    pub(crate) fn new(sockets: Vec<Socket>, path: Option<PathBuf>) -> io::Result<Listener> {
        let listener = Listener { sockets, path };
        listener.sockets.iter().try_for_each(|socket| match socket {
            Socket::Unix(listener) => listener.set_nonblocking(true),
            Socket::Tcp(listener) => listener.set_nonblocking(true),
        })?;
        Ok(listener)
    }

    /// A listening socket that another program made, such as systemd.
    pub(crate) fn adopt(socket: OwnedFd) -> Result<Listener, ListenError> {
        Listener::inherit(vec![socket])
    }

    /// Listening sockets that another program, or an earlier process, made. Their files are not
    /// removed at the end.
    pub(crate) fn inherit(sockets: Vec<OwnedFd>) -> Result<Listener, ListenError> {
        let sockets: Vec<_> = sockets.into_iter().map(Socket::adopt).collect::<Result<_, _>>()?;
        let endpoint = sockets.first().ok_or(ListenError::BadDescriptor)?.address();
        let refused = |source| ListenError::System { endpoint, source };
        Listener::new(sockets, None).map_err(refused)
    }

    /// Removes this file at the end.
    pub(crate) fn own(&mut self, path: PathBuf) {
        self.path = Some(path);
    }

    /// Leaves the file to another process.
    pub(crate) fn leave(&mut self) {
        self.path = None;
    }

    /// The sockets.
    pub(crate) fn sockets(&self) -> &[Socket] {
        &self.sockets
    }

    /// Host and port for a URI. The host is the given one, because certificates are issued to
    /// names, or `localhost` for all addresses at once. `None` unless it is TCP.
    pub(crate) fn uri_host(&self, given: Option<String>) -> Option<String> {
        let addresses = self.sockets.iter().filter_map(|socket| match socket {
            Socket::Tcp(listener) => listener.local_addr().ok(),
            Socket::Unix(_) => None,
        });
        let addresses: Vec<_> = addresses.collect();
        let first = addresses.first()?;
        let host = if addresses.iter().any(|address| address.ip().is_unspecified()) {
            "localhost".to_owned()
        } else {
            given.unwrap_or_else(|| first.ip().to_string())
        };
        let port = first.port();
        Some(if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // The file may have been removed already.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Socket {
    /// A socket that listens.
    fn adopt(socket: OwnedFd) -> Result<Socket, ListenError> {
        match socket::family(&socket) {
            _ if !socket::is_listening(&socket) => Err(ListenError::BadDescriptor),
            Family::Unix => Ok(Socket::Unix(UnixListener::from(socket))),
            Family::Inet => Ok(Socket::Tcp(TcpListener::from(socket))),
            Family::OtherSocket | Family::NoSocket => Err(ListenError::BadDescriptor),
        }
    }

    /// The next client and its address; `None` if no client waits.
    pub(crate) fn accept(&self) -> io::Result<Option<(Arc<OwnedFd>, String)>> {
        let accepted = match self {
            Socket::Unix(listener) => listener.accept().map(|(stream, _)| {
                let peer = socket::peer_pid(&stream)
                    .map_or("unix".to_owned(), |pid| format!("unix:pid={pid}"));
                (OwnedFd::from(stream), peer)
            }),
            Socket::Tcp(listener) => listener.accept().map(|(stream, address)| {
                set_no_delay(&stream);
                socket::keep_alive(&stream);
                (OwnedFd::from(stream), format!("tcp:{address}"))
            }),
        };
        match accepted {
            Ok((socket, peer)) => Ok(Some((Arc::new(socket), peer))),
            Err(error) if gone_already(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The address, as `unix:PATH` or `tcp:HOST:PORT` with the actual port.
    pub(crate) fn address(&self) -> String {
        match self {
            Socket::Unix(listener) => {
                let address = listener.local_addr().ok();
                let path = address.as_ref().and_then(|address| address.as_pathname());
                path.map_or("unix:".to_owned(), |path| format!("unix:{}", path.display()))
            }
            Socket::Tcp(listener) => {
                listener.local_addr().map_or("tcp:".to_owned(), |address| format!("tcp:{address}"))
            }
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Unix(listener) => listener.as_fd(),
            Socket::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// Sets TCP_NODELAY: replies are sent in batches, so waiting for more would only delay them.
fn set_no_delay(stream: &TcpStream) {
    // The connection works without the option too.
    let _ = stream.set_nodelay(true);
}

/// Whether an accept failed because the client disconnected or no client waits.
fn gone_already(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted
    )
}
