//! Endpoints: `unix:PATH`, `tcp:HOST:PORT` or `stdio`, and why a server cannot listen at one. A
//! unix socket may have options: [`UnixPlace`].

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The longest path of a unix socket, in bytes: `sun_path` has 108 including the NUL.
pub const SOCKET_PATH_LEN_MAX: usize = 107;

/// The most characters of an invalid text that an error shows.
const SHOWN_CHARS_MAX: usize = 80;

/// An endpoint of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A unix socket at this path. The file of a server that has ended is replaced.
    Unix(UnixPlace),
    /// A TCP port, at every address of a host.
    Tcp {
        /// Address or name; an IPv6 address without brackets.
        host: String,
        /// Port; 0 lets the system choose.
        port: u16,
    },
    /// One client on standard input and output, without a listening socket.
    Stdio,
}

/// The reason for which a text is no endpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{value}` is no place to listen at: {what}; expected {}", Endpoint::WANTED)]
pub struct EndpointError {
    value: String,
    what: &'static str,
}

impl Endpoint {
    /// The expected forms, for messages.
    pub const WANTED: &'static str = "unix:PATH, tcp:HOST:PORT or stdio";

    fn read(text: &str) -> Result<Endpoint, &'static str> {
        if text == "stdio" {
            return Ok(Endpoint::Stdio);
        }
        match text.split_once(':') {
            Some(("unix", place)) => UnixPlace::read(place).map(Endpoint::Unix),
            Some(("tcp", address)) => {
                // The last colon of `[::1]` belongs to the host.
                let parted = address.rsplit_once(':').filter(|(_, port)| !port.ends_with(']'));
                let (host, port) = parted.ok_or("the port is missing, or the host")?;
                let host = match host.strip_prefix('[') {
                    Some(rest) => rest.strip_suffix(']').ok_or("the `]` is missing")?,
                    None if host.contains(':') => {
                        return Err("an IPv6 address stands in brackets, as in tcp:[::1]:10809");
                    }
                    None => host,
                };
                if host.is_empty() {
                    return Err("the host is missing; 127.0.0.1 serves this machine only");
                }
                if host.len() > 253 || host.chars().any(|c| c.is_control() || c.is_whitespace()) {
                    return Err("the host is no name and no address");
                }
                let plain = port.bytes().all(|byte| byte.is_ascii_digit());
                let port = port.parse().ok().filter(|_| plain);
                let port = port.ok_or("the port must be a number from 0 to 65535")?;
                Ok(Endpoint::Tcp { host: host.to_owned(), port })
            }
            _ => Err("it begins with none of them"),
        }
    }
}

/// Checks that a path is valid for a unix socket.
pub fn check_socket_path(path: &Path) -> Result<(), &'static str> {
    let len = path.as_os_str().len();
    if len == 0 {
        return Err("the path is missing");
    }
    if len > SOCKET_PATH_LEN_MAX {
        return Err("the path is longer than the 107 bytes that a socket's may have");
    }
    if path.as_os_str().as_encoded_bytes().contains(&0) {
        return Err("the path has a zero byte");
    }
    Ok(())
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Endpoint, EndpointError> {
        let value = || text.chars().take(SHOWN_CHARS_MAX).flat_map(char::escape_debug).collect();
        Endpoint::read(text).map_err(|what| EndpointError { value: value(), what })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Unix(place) => write!(f, "unix:{place}"),
            Endpoint::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Endpoint::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Endpoint::Stdio => f.write_str("stdio"),
        }
    }
}

/// The default mode of a socket: only its owner can connect.
const MODE: u32 = 0o600;

/// The default mode of a socket with a group: the group can connect too.
const GROUP_MODE: u32 = 0o660;

/// The users that can connect to a unix socket; root always can.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SocketAccess {
    /// The name or number of the user that owns the socket; by default the server's.
    pub owner: Option<String>,
    /// The name or number of the socket's group; by default the server's.
    pub group: Option<String>,
    /// The permission bits; by default 0600, or 0660 with a group.
    pub mode: Option<u32>,
}

impl SocketAccess {
    /// The permission bits of the socket.
    pub fn mode(&self) -> u32 {
        self.mode.unwrap_or(if self.group.is_some() { GROUP_MODE } else { MODE })
    }
}

/// The path of a socket, and the users that can connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnixPlace {
    /// The socket's path.
    pub path: PathBuf,
    /// The users that can connect.
    pub access: SocketAccess,
}

impl UnixPlace {
    /// Parses `PATH[?owner=USER&group=GROUP&mode=OCTAL]`.
    ///
    /// # Errors
    /// The reason for which it is invalid.
    pub fn read(text: &str) -> Result<UnixPlace, &'static str> {
        let (path, options) = text.split_once('?').map_or((text, None), |(a, b)| (a, Some(b)));
        if path.starts_with('~') {
            return Err(
                "a path that begins with `~` is not expanded here: use $HOME, or `./~` for \
                        a directory of that name",
            );
        }
        let mut place = UnixPlace::from(PathBuf::from(path));
        check_socket_path(&place.path)?;
        for option in options.into_iter().flat_map(|options| options.split('&')) {
            let access = &mut place.access;
            let twice = match option.split_once('=') {
                Some((_, "")) => return Err("an option of the socket has no value"),
                Some(("owner", name)) => access.owner.replace(name.to_owned()).is_some(),
                Some(("group", name)) => access.group.replace(name.to_owned()).is_some(),
                Some(("mode", digits)) => {
                    let octal = digits.bytes().all(|digit| matches!(digit, b'0'..=b'7'));
                    let mode = u32::from_str_radix(digits, 8).ok().filter(|_| octal);
                    let mode = mode.filter(|mode| *mode <= 0o777);
                    let mode = mode.ok_or("the mode must be octal, from 0 to 777")?;
                    access.mode.replace(mode).is_some()
                }
                _ => return Err("a socket's options are owner=USER, group=GROUP and mode=OCTAL"),
            };
            if twice {
                return Err("an option of the socket is given twice");
            }
        }
        Ok(place)
    }
}

impl From<PathBuf> for UnixPlace {
    fn from(path: PathBuf) -> UnixPlace {
        UnixPlace { path, access: SocketAccess::default() }
    }
}

impl fmt::Display for UnixPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SocketAccess { owner, group, mode } = &self.access;
        let given = [
            owner.as_ref().map(|name| format!("owner={name}")),
            group.as_ref().map(|name| format!("group={name}")),
            mode.map(|mode| format!("mode={mode:04o}")),
        ];
        write!(f, "{}", self.path.display())?;
        let separators = std::iter::once('?').chain(std::iter::repeat('&'));
        let mut given = given.into_iter().flatten().zip(separators);
        given.try_for_each(|(option, separator)| write!(f, "{separator}{option}"))
    }
}

/// The right that the process lacks for a listener that the system has refused: the end of an error
/// text, empty if it lacks none.
pub fn missing_right(endpoint: &str, source: &io::Error) -> &'static str {
    // ip(7): EACCES is the refusal of a port below ip_unprivileged_port_start.
    let is_refused = source.kind() == io::ErrorKind::PermissionDenied;
    match is_refused && !endpoint.starts_with("unix:") {
        true => "; a port below 1024 needs CAP_NET_BIND_SERVICE",
        false => "",
    }
}

/// The reason for which a server cannot listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// Another server listens at this path.
    #[error("unix:{}: a server listens there already: stop it or take another path", .0.display())]
    InUse(PathBuf),
    /// A file that is no socket exists at the path.
    #[error("unix:{}: the file there is no socket: remove it or take another path", .0.display())]
    NotASocket(PathBuf),
    /// The descriptor is no listening stream socket.
    #[error(
        "socket: the descriptor is no listening stream socket of the unix or an internet family"
    )]
    BadDescriptor,
    /// The owner or group of a socket does not exist.
    #[error("invalid {what} `{name}`: the system has no such {what}; expected a name or a number")]
    Unknown {
        /// `owner` or `group`.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// The system refused an operation.
    #[error("{endpoint}: cannot listen: {source}{}", missing_right(endpoint, source))]
    System {
        /// The endpoint.
        endpoint: String,
        /// The system's error.
        source: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_form_is_read_and_printed() {
        for text in [
            "stdio",
            "unix:/run/x.sock",
            "unix:x?group=kvm&mode=0660",
            "tcp:127.0.0.1:10809",
            "tcp:[::1]:0",
            "tcp:a:1",
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn errors_say_what_would_do() {
        let long = format!("unix:/{}", "x".repeat(107));
        let cases = [
            ("", "none of them"),
            ("/run/x", "none of them"),
            ("udp:1:2", "none of them"),
            ("unix:", "the path is missing"),
            (&long, "107 bytes"),
            ("tcp:10809", "the port is missing"),
            ("tcp:[::1]", "the port is missing"),
            ("tcp::10809", "the host is missing"),
            ("tcp:a:b", "from 0 to 65535"),
            ("tcp:a:65536", "from 0 to 65535"),
            ("tcp:a:+1", "from 0 to 65535"),
            ("tcp:a:", "from 0 to 65535"),
            ("tcp:::1:5", "in brackets"),
            ("tcp:[::1:5", "`]` is missing"),
        ];
        for (text, want) in cases {
            let error = text.parse::<Endpoint>().unwrap_err().to_string();
            assert!(error.contains(want), "{text}: {error}");
            assert!(error.ends_with(Endpoint::WANTED), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(tcp:|unix:)?\\PC{0,40}") {
            if let Ok(endpoint) = text.parse::<Endpoint>() {
                prop_assert_eq!(endpoint.to_string().parse::<Endpoint>(), Ok(endpoint));
            }
        }
    }
}
