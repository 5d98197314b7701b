//! The text form of an endpoint: `unix:PATH`, `tcp:HOST:PORT` or `stdio`. A unix socket may have
//! options: [`UnixPlace`].

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use crate::nbd::unix::UnixPlace;

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
