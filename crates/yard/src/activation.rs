//! Sockets that systemd passed (`LISTEN_FDS`), as sd_listen_fds(3) describes.
#![allow(unsafe_code)] // A descriptor's number becomes its owner here, once.

use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

/// Whether systemd passed sockets to this process. Call this before the process opens anything: a
/// number in the variables that is too high would name a descriptor of this program.
///
/// # Errors
/// If the variables are invalid, or name a descriptor that is no listening socket.
pub fn is_activated() -> io::Result<bool> {
    let mut fds = sd_notify::listen_fds()?.peekable();
    let is_activated = fds.peek().is_some();
    for fd in fds {
        // SAFETY: `listen_fds` has changed the descriptor's flags, so it is open, and nothing
        // closes it within this call.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        if !matches!(rustix::net::sockopt::socket_acceptconn(socket), Ok(true)) {
            return Err(io::Error::other(format!("descriptor {fd} is no listening socket")));
        }
    }
    Ok(is_activated)
}

/// The passed sockets, which the caller owns from now on. Call this once in a process, after
/// [`is_activated`] has checked them.
///
/// # Errors
/// If the variables are invalid.
pub fn sockets() -> io::Result<Vec<OwnedFd>> {
    let fds = sd_notify::listen_fds()?;
    // SAFETY: systemd opened these descriptors for this process and no other code here knows of
    // them; each number occurs once, and callers ask once.
    Ok(fds.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect())
}
