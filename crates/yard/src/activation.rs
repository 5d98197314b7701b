//! Sockets that systemd passed (`LISTEN_FDS`), as sd_listen_fds(3) describes.
#![allow(unsafe_code)] // A descriptor's number becomes its owner here, once.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Whether systemd passed sockets to this process.
pub fn is_activated() -> bool {
    let own = |pid: String| pid.parse() == Ok(std::process::id());
    std::env::var("LISTEN_PID").is_ok_and(own) && std::env::var_os("LISTEN_FDS").is_some()
}

/// The passed sockets, which the caller owns from now on. Call this once in a process.
///
/// # Errors
/// If the variables are invalid.
pub fn sockets() -> io::Result<Vec<OwnedFd>> {
    let fds = sd_notify::listen_fds()?;
    // SAFETY: systemd opened these descriptors for this process and no other code here knows of
    // them; each number occurs once, and callers ask once.
    Ok(fds.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect())
}
