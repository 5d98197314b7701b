//! Listening TCP sockets at every address of a host, as servers of other protocols do: a client
//! that resolves the name may connect to any of them.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};

/// The most addresses of one host.
const ADDRESSES_MAX: usize = 16;

/// The number of ports chosen by the system that are tried: a port that is free at a host's first
/// address may be in use at its second.
const PORTS_MAX: usize = 16;

/// Listens at every address of a host, in the order of its resolution, and at one port for all of
/// them; with port 0 the system chooses it. An address that this machine lacks, or whose family it
/// lacks, is skipped if another one remains.
///
/// # Errors
/// If the host is unknown, has more than 16 addresses, or the system refuses one for another
/// reason, for example because it is in use.
pub fn listen_tcp(host: &str, port: u16) -> io::Result<Vec<TcpListener>> {
    let mut addresses = Vec::new();
    for address in (host, port).to_socket_addrs()? {
        // A hosts file may list an address twice.
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    if addresses.len() > ADDRESSES_MAX {
        let what = format!("{host} has {} addresses, more than {ADDRESSES_MAX}", addresses.len());
        return Err(io::Error::new(ErrorKind::InvalidInput, what));
    }
    listen_at(&addresses, TcpListener::bind)
}

fn listen_at(
    addresses: &[SocketAddr],
    bind: impl Fn(SocketAddr) -> io::Result<TcpListener>,
) -> io::Result<Vec<TcpListener>> {
    let mut tries = 1;
    loop {
        let chosen = addresses.iter().all(|address| address.port() == 0);
        match bind_all(addresses, &bind) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && chosen && tries < PORTS_MAX => {
                tries += 1;
            }
            result => return result,
        }
    }
}

/// Binds all addresses; those with port 0 to the port of the first one.
fn bind_all(
    addresses: &[SocketAddr],
    bind: impl Fn(SocketAddr) -> io::Result<TcpListener>,
) -> io::Result<Vec<TcpListener>> {
    let mut listeners: Vec<TcpListener> = Vec::with_capacity(addresses.len());
    let mut absent = None;
    for &address in addresses {
        let mut address = address;
        if let Some(first) = listeners.first().filter(|_| address.port() == 0) {
            address.set_port(first.local_addr()?.port());
        }
        match bind(address) {
            Ok(listener) => listeners.push(listener),
            Err(error) if is_absent(&error) => {
                tracing::debug!(%address, %error, "not listened at");
                absent = absent.or(Some(error));
            }
            Err(error) => return Err(io::Error::new(error.kind(), format!("{address}: {error}"))),
        }
    }
    match absent {
        Some(error) if listeners.is_empty() => Err(error),
        None if listeners.is_empty() => Err(io::Error::from(ErrorKind::AddrNotAvailable)),
        _ => Ok(listeners),
    }
}

/// Whether the machine lacks this address, or its family.
fn is_absent(error: &io::Error) -> bool {
    error.kind() == ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(libc::EAFNOSUPPORT)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn found(listeners: &[TcpListener]) -> Vec<SocketAddr> {
        listeners.iter().map(|listener| listener.local_addr().unwrap()).collect()
    }

    #[test]
    fn a_port_of_the_systems_choice_is_the_same_at_every_address() {
        let listeners = listen_at(&addresses(&["127.0.0.1:0", "127.0.0.2:0"]), TcpListener::bind);
        let found = found(&listeners.unwrap());
        assert_eq!(
            [found[0].ip().to_string(), found[1].ip().to_string()],
            ["127.0.0.1", "127.0.0.2"]
        );
        assert!(found[0].port() != 0 && found[0].port() == found[1].port(), "{found:?}");
    }

    #[test]
    fn another_port_is_tried_if_one_is_taken_at_the_second_address() {
        let refusals = Cell::new(3);
        let bind = |address: SocketAddr| match address.ip().to_string().as_str() {
            "127.0.0.2" if refusals.replace(refusals.get() - 1) > 0 => {
                Err(io::Error::from_raw_os_error(libc::EADDRINUSE))
            }
            _ => TcpListener::bind(address),
        };
        let both = addresses(&["127.0.0.1:0", "127.0.0.2:0"]);
        assert_eq!(listen_at(&both, bind).unwrap().len(), 2);
        refusals.set(i32::MAX);
        assert_eq!(listen_at(&both, bind).unwrap_err().kind(), ErrorKind::AddrInUse);
        assert_eq!(refusals.get(), i32::MAX - PORTS_MAX as i32, "the tries are bounded");
    }

    #[test]
    fn an_address_that_is_not_there_is_left_out_and_one_in_use_is_not() {
        for errno in [libc::EAFNOSUPPORT, libc::EADDRNOTAVAIL] {
            let bind = |address: SocketAddr| match address {
                SocketAddr::V6(_) => Err(io::Error::from_raw_os_error(errno)),
                SocketAddr::V4(_) => TcpListener::bind(address),
            };
            let listeners = listen_at(&addresses(&["[::1]:0", "127.0.0.1:0"]), bind).unwrap();
            assert_eq!(found(&listeners)[0].ip().to_string(), "127.0.0.1");
            let error = listen_at(&addresses(&["[::1]:0", "[::2]:0"]), bind).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(errno));
        }
        let taken = TcpListener::bind("127.0.0.2:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let both = addresses(&[&format!("127.0.0.1:{port}"), &format!("127.0.0.2:{port}")]);
        let error = listen_at(&both, TcpListener::bind).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrInUse);
        assert!(error.to_string().starts_with(&format!("127.0.0.2:{port}: ")), "{error}");
    }
}
