//! The kernel's switch for FUSE over io_uring: set while something is mounted, and put back.
//!
//! A mount looks at it once, when it is made. Whoever changes it holds a lock on it, so that two
//! that want different things take turns.

use std::fs::File;
use std::io::{self, Read};

use rustix::fs::{FlockOperation, flock};

use crate::error::LabError;

/// The switch: `Y` or `N`, for root to change.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// The switch as it is wanted, until this is dropped.
#[derive(Debug)]
pub struct FuseParameter {
    /// What is to be put back, if anything.
    before: Option<bool>,
    #[expect(dead_code, reason = "held for its lock, after the switch is put back")]
    lock: Option<File>,
}

impl FuseParameter {
    /// Has new mounts use io_uring, or not. Waits for others that want something of the switch.
    ///
    /// # Errors
    /// If the kernel has no FUSE over io_uring, or the switch cannot be changed.
    pub fn set(io_uring: bool) -> Result<FuseParameter, LabError> {
        let mut lock = match File::open(SWITCH) {
            // A kernel without it does without it.
            Err(error) if error.kind() == io::ErrorKind::NotFound && !io_uring => {
                return Ok(FuseParameter { before: None, lock: None });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let how = format!("{SWITCH} comes with Linux 6.14 and CONFIG_FUSE_IO_URING");
                return Err(LabError::missing("FUSE over io_uring", how));
            }
            file => file.map_err(LabError::io(SWITCH))?,
        };
        let locked = flock(&lock, FlockOperation::LockExclusive).map_err(io::Error::from);
        locked.map_err(LabError::io(SWITCH))?;
        let mut text = String::new();
        lock.read_to_string(&mut text).map_err(LabError::io(SWITCH))?;
        let is_on = text.starts_with('Y');
        let before = (is_on != io_uring).then_some(is_on);
        if before.is_some() {
            write(io_uring).map_err(|error| {
                let how = format!("root sets {SWITCH}: {error}");
                LabError::missing(format!("enable_uring={}", letter(io_uring)), how)
            })?;
        }
        Ok(FuseParameter { before, lock: Some(lock) })
    }
}

impl Drop for FuseParameter {
    fn drop(&mut self) {
        // It could be changed, so it can be changed back.
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

    #[test]
    fn the_switch_is_put_back() {
        let read = || std::fs::read_to_string(SWITCH).unwrap_or_default();
        let held = match FuseParameter::set(true) {
            Err(error @ LabError::Missing { .. }) => return eprintln!("skipped: {error}"),
            held => held.unwrap(),
        };
        assert_eq!(read(), "Y\n");
        let before = held.before.is_some();
        drop(held);
        let held = FuseParameter::set(false).unwrap();
        // As it was: whoever turned it on has turned it off.
        assert_eq!(held.before.is_none(), before);
        assert_eq!(read(), "N\n");
    }
}
