//! The kernel's parameter that enables FUSE over io_uring, for tests and measurements: set while a
//! file system is mounted, and restored.
//!
//! The kernel reads the parameter once, when a mount is made. The process that changes it holds a
//! file lock on it, so that two processes that want different values take turns.

use std::fs::File;
use std::io::{self, Read};

use rustix::fs::{FlockOperation, flock};

/// The parameter's file: `Y` or `N`; root may change it.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// Holds the parameter at a value until this guard is dropped.
#[derive(Debug)]
pub struct FuseParameter {
    /// The value to restore, if `set` changed it.
    before: Option<bool>,
    #[expect(dead_code, reason = "keeps the file lock until the parameter is restored")]
    lock: Option<File>,
}

impl FuseParameter {
    /// Makes new mounts use io_uring, or not. Waits while another process holds the parameter.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] if the kernel has no FUSE over io_uring, or if the process
    /// may not change the parameter; any other error of the parameter's file.
    pub fn set(io_uring: bool) -> io::Result<FuseParameter> {
        let mut lock = match File::open(SWITCH) {
            // A kernel without the parameter never uses io_uring.
            Err(error) if error.kind() == io::ErrorKind::NotFound && !io_uring => {
                return Ok(FuseParameter { before: None, lock: None });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(unsupported(format!(
                    "FUSE over io_uring is missing; \
                     {SWITCH} comes with Linux 6.14 and CONFIG_FUSE_IO_URING"
                )));
            }
            file => file.map_err(named)?,
        };
        flock(&lock, FlockOperation::LockExclusive).map_err(|error| named(error.into()))?;
        let mut text = String::new();
        lock.read_to_string(&mut text).map_err(named)?;
        let is_on = text.starts_with('Y');
        let before = (is_on != io_uring).then_some(is_on);
        if before.is_some() {
            write(io_uring).map_err(|error| {
                let value = letter(io_uring);
                unsupported(format!("enable_uring={value} is missing; root sets {SWITCH}: {error}"))
            })?;
        }
        Ok(FuseParameter { before, lock: Some(lock) })
    }
}

fn unsupported(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, message)
}

fn named(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{SWITCH}: {error}"))
}

impl Drop for FuseParameter {
    fn drop(&mut self) {
        // The parameter could be changed, so it can be restored.
        let _ = self.before.map(write);
    }
}

fn letter(on: bool) -> &'static str {
    if on { "Y" } else { "N" }
}

fn write(on: bool) -> io::Result<()> {
    std::fs::write(SWITCH, letter(on))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::Capability;

    #[test]
    fn dropping_the_guard_restores_the_parameter() {
        let read = || std::fs::read_to_string(SWITCH).unwrap_or_default();
        let held = match FuseParameter::set(true) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                return Capability::FuseUring.is_missing(error);
            }
            held => held.unwrap(),
        };
        assert_eq!(read(), "Y\n");
        let before = held.before.is_some();
        drop(held);
        let held = FuseParameter::set(false).unwrap();
        // The first guard has restored the value that it found.
        assert_eq!(held.before.is_none(), before);
        assert_eq!(read(), "N\n");
    }
}
