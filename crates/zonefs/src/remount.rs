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
            let mut pause = PAUSE_MIN;
            while mount.upgrade().is_some_and(|mount| mount.is_refused(pause >= PAUSE_MAX)) {
                std::thread::sleep(pause);
                pause = (2 * pause).min(PAUSE_MAX);
            }
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
