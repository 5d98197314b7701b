//! Making the mount itself read-only, once the file system is: what the kernel's zonefs does after
//! an error with `errors=remount-ro`. It takes root; writes are refused without it just the same.
// One thread at most tries at a time; no I/O comes here.
#![allow(clippy::disallowed_types)]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::mount::MountFlags;

/// The first pause between two tries. The kernel tells of the last close of a file a moment before
/// it has forgotten the file.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// The longest: a program may keep a file open for writing for hours.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A mount that is to become read-only.
#[derive(Debug)]
pub(crate) struct Remount {
    path: PathBuf,
    /// It is done, impossible, or being tried until it is.
    busy: AtomicBool,
    /// The log was told that it takes long.
    told: AtomicBool,
}

impl Remount {
    pub(crate) fn new(path: PathBuf) -> Arc<Remount> {
        let busy = AtomicBool::new(!rustix::process::geteuid().is_root());
        Arc::new(Remount { path, busy, told: AtomicBool::new(false) })
    }

    /// Tries it on a thread of its own, as the kernel may ask the file system something meanwhile,
    /// until it is done, impossible, or the mount has gone. While files are open for writing the
    /// kernel refuses it.
    pub(crate) fn begin(self: &Arc<Remount>) {
        // Relaxed: nothing else is published by it.
        if self.busy.swap(true, Ordering::Relaxed) {
            return;
        }
        // The mount owns the rest: without it the path may be another's.
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

    /// Tries once; whether it is to be tried again. With `long` it has failed for a while, of which
    /// the log is told once.
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
