//! Where a server listens, in words and as a socket.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use crate::nbd::sys::{self, Family};

/// The port that IANA gave to NBD.
pub const PORT: u16 = 10809;

/// Longest path of a unix socket, in bytes.
const UNIX_PATH_BYTES_MAX: usize = 107;

/// Where a server listens.
#[derive(Debug)]
pub enum Endpoint {
    /// A unix socket at this path. The file of a server that is gone is replaced.
    Unix(PathBuf),
    /// A TCP port of a host's address; port 0 lets the system choose.
    Tcp(String, u16),
    /// No listening: one client on standard input and output.
    Stdio,
    /// A socket that listens already, as from systemd.
    Fd(OwnedFd),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Unix(path) => write!(f, "unix:{}", path.display()),
            Endpoint::Tcp(host, port) if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Endpoint::Tcp(host, port) => write!(f, "tcp:{host}:{port}"),
            Endpoint::Stdio => f.write_str("stdio"),
            Endpoint::Fd(_) => f.write_str("fd"),
        }
    }
}

/// An endpoint that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("endpoint `{text}`: {problem}: `unix:PATH`, `tcp:HOST:PORT` or `stdio` would do")]
pub struct EndpointError {
    /// What was given.
    pub text: String,
    /// What is wrong with it.
    pub problem: &'static str,
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Endpoint, EndpointError> {
        let wrong = |problem| EndpointError { text: text.to_owned(), problem };
        if text == "stdio" {
            return Ok(Endpoint::Stdio);
        }
        if let Some(path) = text.strip_prefix("unix:") {
            return match path.len() {
                0 => Err(wrong("the path is empty")),
                len if len > UNIX_PATH_BYTES_MAX => {
                    Err(wrong("the path is longer than the 107 bytes of a unix address"))
                }
                _ => Ok(Endpoint::Unix(PathBuf::from(path))),
            };
        }
        let Some(address) = text.strip_prefix("tcp:") else {
            return Err(wrong("it begins with none of the known words"));
        };
        let (host, port) = match address.rsplit_once(':') {
            // A colon inside brackets belongs to the host.
            Some((host, port)) if !port.ends_with(']') => {
                (host, port.parse().map_err(|_| wrong("the port is no number up to 65535"))?)
            }
            _ => (address, PORT),
        };
        let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = match inner {
            Some(inner) => inner,
            None if host.contains(':') => {
                return Err(wrong("an IPv6 address stands in brackets"));
            }
            None => host,
        };
        if host.is_empty() {
            return Err(wrong("the host is empty"));
        }
        Ok(Endpoint::Tcp(host.to_owned(), port))
    }
}

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
    #[error("fd: the descriptor is no listening stream socket of the unix or an internet family")]
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
            Endpoint::Tcp(host, port) => {
                let addresses = (host.as_str(), port).to_socket_addrs().map_err(system)?;
                let addresses: Vec<_> = addresses.collect();
                Listener::Tcp(TcpListener::bind(addresses.as_slice()).map_err(system)?)
            }
            Endpoint::Fd(fd) => match sys::family(&fd) {
                _ if !sys::is_listening(&fd) => return Err(ListenError::BadDescriptor),
                Family::Unix => Listener::Unix(UnixListener::from(fd), None),
                Family::Inet => Listener::Tcp(TcpListener::from(fd)),
                Family::OtherSocket | Family::NoSocket => return Err(ListenError::BadDescriptor),
            },
        };
        listener.set_nonblocking().map_err(system)?;
        Ok(Some(listener))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_and_written() {
        for text in ["unix:/run/x.sock", "tcp:127.0.0.1:10809", "tcp:[::1]:1", "stdio"] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
        assert_eq!("tcp:[::1]".parse::<Endpoint>().unwrap().to_string(), "tcp:[::1]:10809");
        assert_eq!("tcp:host".parse::<Endpoint>().unwrap().to_string(), "tcp:host:10809");
        let long = format!("unix:/{}", "x".repeat(107));
        for text in ["", "unix:", "tcp:", "tcp::1", "tcp:h:65536", "tcp:::1:5", "udp:h:1", &long] {
            let error = text.parse::<Endpoint>().unwrap_err();
            assert!(error.to_string().contains("would do"), "{error}");
        }
    }
}
