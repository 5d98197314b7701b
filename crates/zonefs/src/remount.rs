//! Making the mount itself read-only, once the file system is: what the kernel's zonefs does after
//! an error with `errors=remount-ro`. It takes root; writes are refused without it just the same.
// One thread at most tries at a time; no I/O comes here.
#![allow(clippy::disallowed_types)]

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::mount::MountFlags;

/// How often it is tried: whoever has closed the last file open for writing is told so a moment
/// before the kernel has forgotten it.
const TRIES: u32 = 10;
const PAUSE: Duration = Duration::from_millis(20);

/// A mount that is to become read-only.
#[derive(Debug)]
pub(crate) struct Remount {
    path: PathBuf,
    /// It is done, impossible, or being tried.
    busy: AtomicBool,
}

impl Remount {
    pub(crate) fn new(path: PathBuf) -> Arc<Remount> {
        let busy = AtomicBool::new(!rustix::process::geteuid().is_root());
        Arc::new(Remount { path, busy })
    }

    /// Tries it on a thread of its own: the kernel may ask the file system something meanwhile.
    /// While files are open for writing it is refused; it comes again when one is closed.
    pub(crate) fn begin(self: &Arc<Remount>) {
        // AcqRel: who takes the turn comes after who gave it back.
        if self.busy.swap(true, Ordering::AcqRel) {
            return;
        }
        let remount = Arc::clone(self);
        let work = move || {
            if remount.run().is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy) {
                // Release: pairs with the swap above.
                remount.busy.store(false, Ordering::Release);
            }
        };
        let thread = std::thread::Builder::new().name("zonefs-remount".to_owned()).spawn(work);
        if let Err(error) = thread {
            tracing::warn!("remounting {}: {error}", self.path.display());
        }
    }

    fn run(&self) -> io::Result<()> {
        let flags =
            MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
        for _ in 1..TRIES {
            match rustix::mount::mount_remount(&self.path, flags, "") {
                Err(rustix::io::Errno::BUSY) => std::thread::sleep(PAUSE),
                end => return Ok(end?),
            }
        }
        Ok(rustix::mount::mount_remount(&self.path, flags, "")?)
    }
}
