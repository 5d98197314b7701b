//! nobody: as whom the tests run what must work without root.

// The tests of one program share the device's mode; no data goes this way.
#![allow(clippy::disallowed_types)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// nobody: who has no rights, and whom every system has.
pub(crate) const NOBODY: u32 = 65534;

const FUSE: &str = "/dev/fuse";

/// How many tests want the device open to all, and the mode it had before the first of them.
static WANTED: Mutex<(usize, u32)> = Mutex::new((0, 0));

/// A /dev/fuse that all may open, as udev has it, until the last of these is dropped: one that no
/// udev has looked after is root's alone. Only root can have one.
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

/// What a failed test leaves is as good as before: the count is right at every moment.
fn wanted() -> MutexGuard<'static, (usize, u32)> {
    WANTED.lock().unwrap_or_else(PoisonError::into_inner)
}
