//! The unprivileged user as whom the tests run commands that must work without root.

// The tests of one program share the device's mode; this is no data path.
#![allow(clippy::disallowed_types)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The uid of a user who has no privileges and exists on every system.
pub(crate) const NOBODY: u32 = 65534;

const FUSE: &str = "/dev/fuse";

/// The number of tests that need the device open to all users, and its mode before the first of
/// them.
static WANTED: Mutex<(usize, u32)> = Mutex::new((0, 0));

/// Opens /dev/fuse to all users, as udev does, until the last of these is dropped. Without udev
/// only root can access the device. Only root can use this.
pub(crate) struct Opened;

impl Opened {
    pub(crate) fn new() -> Opened {
        let mut wanted = wanted();
        if wanted.0 == 0 {
            wanted.1 = fs::metadata(FUSE).unwrap().permissions().mode();
            fs::set_permissions(FUSE, fs::Permissions::from_mode(0o666)).unwrap();
        }
        wanted.0 += 1;
        Opened
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let mut wanted = wanted();
        wanted.0 -= 1;
        if wanted.0 == 0 {
            let _ = fs::set_permissions(FUSE, fs::Permissions::from_mode(wanted.1));
        }
    }
}

/// A panic of a test leaves a consistent value: the count is right at every moment.
fn wanted() -> MutexGuard<'static, (usize, u32)> {
    WANTED.lock().unwrap_or_else(PoisonError::into_inner)
}
