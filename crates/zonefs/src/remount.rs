//! Makes the mount itself read-only after the file system has become so, as the kernel's zonefs
//! does after an error with `errors=remount-ro`. This needs root; without it writes are refused
//! just the same.
// At most one thread tries at a time; no I/O comes here.
#![allow(clippy::disallowed_types)]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::mount::MountFlags;

/// First pause between two attempts. The kernel reports the last close of a file slightly before it
/// releases the file.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// Longest pause between two attempts: a program may keep a file open for writing for hours.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A mount that must become read-only.
#[derive(Debug)]
pub(crate) struct Remount {
    path: PathBuf,
    /// Whether the remount is done, impossible, or in progress.
    busy: AtomicBool,
    /// Whether a warning about the delay was logged.
    told: AtomicBool,
}

impl Remount {
    pub(crate) fn new(path: PathBuf) -> Arc<Remount> {
        let busy = AtomicBool::new(!rustix::process::geteuid().is_root());
        Arc::new(Remount { path, busy, told: AtomicBool::new(false) })
    }

    /// Retries the remount in a separate thread, since the kernel may send requests to the file
    /// system meanwhile. Stops when the mount is read-only, cannot become so, or has ended. The
    /// kernel refuses the remount while files are open for writing.
    pub(crate) fn begin(self: &Arc<Remount>) {
        // Relaxed: the flag publishes no other data.
        if self.busy.swap(true, Ordering::Relaxed) {
            return;
        }
        // A weak reference: after the mount has ended, the path may belong to another one.
        let mount = Arc::downgrade(self);
        let work = move || {
            retry(
                |long| mount.upgrade().is_some_and(|mount| mount.is_refused(long)),
                std::thread::sleep,
            );
        };
        let thread = std::thread::Builder::new().name("zonefs-remount".to_owned()).spawn(work);
        if let Err(error) = thread {
            tracing::error!("cannot remount {} read-only: {error}", self.path.display());
        }
    }

    /// Tries once; returns whether to try again. `long` says that it has failed for a while, which
    /// is logged once.
    fn is_refused(&self, long: bool) -> bool {
        let path = self.path.display();
        let flags =
            MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
        match rustix::mount::mount_remount(&self.path, flags, "") {
            Ok(()) => return false,
            Err(rustix::io::Errno::BUSY) => {}
            Err(error) => {
                tracing::error!("cannot remount {path} read-only: {error}; its writes are refused");
                return false;
            }
        }
        // Relaxed: as above.
        if long && !self.told.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "cannot remount {path} read-only: a file is open for writing; trying until it is \
                 closed"
            );
        }
        true
    }
}

/// Tries until `is_refused` returns false, with a pause between two attempts. The argument of
/// `is_refused` is whether the attempts have failed for a while.
fn retry(is_refused: impl Fn(bool) -> bool, pause: impl Fn(Duration)) {
    let mut next = PAUSE_MIN;
    while is_refused(next >= PAUSE_MAX) {
        pause(next);
        next = (2 * next).min(PAUSE_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    /// The bug: the remount gave up after ten attempts, so the mount stayed writable if a program
    /// kept a file open for longer than that.
    #[test]
    fn a_remount_is_tried_until_the_last_file_is_closed() {
        let (attempts, pauses) = (Cell::new(0), RefCell::new(Vec::new()));
        let is_refused = |_| {
            attempts.set(attempts.get() + 1);
            attempts.get() <= 1000
        };
        retry(is_refused, |pause| pauses.borrow_mut().push(pause));
        assert_eq!((attempts.get(), pauses.borrow().len()), (1001, 1000));
        assert_eq!((pauses.borrow()[0], pauses.borrow()[999]), (PAUSE_MIN, PAUSE_MAX));
    }

    #[test]
    fn only_a_long_delay_is_reported() {
        let long = RefCell::new(Vec::new());
        let is_refused = |is_long| {
            long.borrow_mut().push(is_long);
            long.borrow().len() < 8
        };
        retry(is_refused, |_| ());
        assert_eq!(*long.borrow(), [false, false, false, false, false, false, true, true]);
    }
}
