//! Mounting: serves the file system to all programs over FUSE.
#![allow(unsafe_code)] // A field is moved out of a session that must not be dropped.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_os::{DeviceNumber, Mounted, detach, topmost, unmount_unused};
use fuser::{BackgroundSession, Config, MountOption, Session, SessionACL};

use crate::error::ZoneFsError;
use crate::fs::ZoneFs;
use crate::fuse::ZoneFsServer;
use crate::remount::Remount;

/// Minimum number of threads that serve a mount, even on one CPU: a thread that waits for the
/// device must not block the others.
const THREADS_MIN: usize = 2;
/// Maximum number of threads that serve a mount.
const THREADS_MAX: usize = 8;

/// Time that the threads of an ended mount have to notice it.
const GRACE: Duration = Duration::from_secs(2);
/// Interval at which that is checked.
const LOOK: Duration = Duration::from_millis(2);

/// Why a mount or an unmount failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The file system cannot be opened.
    #[error(transparent)]
    FileSystem(#[from] ZoneFsError),
    /// The directory cannot be used as a mount point.
    #[error("{}: {source}; expected a directory to mount at", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The system refused the mount.
    #[error(
        "mounting at {} failed: {source}; without root it needs fusermount3 (Debian: fuse3) and a \
         /dev/fuse that all may open, and allow_other needs `user_allow_other` in /etc/fuse.conf",
        path.display()
    )]
    Refused {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The unmount failed.
    #[error("unmounting {} failed: {source}", path.display())]
    Unmount {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// A mounted file system. Dropping it unmounts it, even if programs use it.
pub struct Mount {
    fs: Arc<ZoneFs>,
    path: PathBuf,
    /// Device number of the mount, which distinguishes it from other mounts at the same directory.
    device: Option<DeviceNumber>,
    session: Option<BackgroundSession>,
}

impl Mount {
    /// Mounts a file system at a directory. Programs can use it when this returns. `ended` is
    /// called after the mount has ended.
    ///
    /// # Errors
    /// If the directory cannot be used, or the system refuses.
    pub fn new(
        fs: Arc<ZoneFs>,
        directory: &Path,
        ended: Box<dyn FnOnce() + Send + Sync>,
    ) -> Result<Mount, MountError> {
        let path = check_directory(directory)?;
        let refused = |source| MountError::Refused { path: path.clone(), source };
        let server = ZoneFsServer::new(Arc::clone(&fs), ended);
        let session = Session::new(server, &path, &config(&fs)).map_err(refused)?;
        let session = Some(session.spawn().map_err(refused)?);
        let device = device_at(&path).map_err(refused)?;
        if !fs.is_read_only() {
            fs.set_mount(Remount::new(path.clone()));
        }
        Ok(Mount { fs, path, device, session })
    }

    /// The file system.
    pub fn fs(&self) -> &Arc<ZoneFs> {
        &self.fs
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the mount has ended, whatever ended it.
    pub fn has_ended(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.guard.is_finished())
    }

    /// Whether another process has unmounted it and it has ended. That takes a moment: a detached
    /// file system continues until its last file is closed.
    pub fn was_unmounted(&self) -> bool {
        let is_seen = || match device_at(&self.path) {
            Ok(seen) => seen.is_some() && seen == self.device,
            // Unknown: assume that it is still mounted.
            Err(_) => true,
        };
        self.has_ended() || (!is_seen() && self.ends_soon())
    }

    /// Unmounts the file system if no program uses it. A later drop waits for the end.
    ///
    /// # Errors
    /// If a program uses it, or the system refuses; then it stays mounted.
    pub fn unmount(&self) -> Result<(), MountError> {
        if self.has_ended() {
            return Ok(());
        }
        self.unmount_ours(unmount_unused)
            .map_err(|source| MountError::Unmount { path: self.path.clone(), source })
    }

    /// Runs `unmount` on the path if our mount is there. After an `umount` by another process, the
    /// path may show the directory below or another mount.
    fn unmount_ours(&self, unmount: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
        let seen = device_at(&self.path)?;
        if seen.is_none() || seen != self.device {
            return Ok(());
        }
        unmount(&self.path)
    }

    /// Unmounts, or else detaches. Returns whether the threads have ended; otherwise they continue
    /// until the last file is closed.
    fn take_away(&self) -> bool {
        if self.unmount_ours(unmount_unused).is_ok() {
            return self.ends_soon();
        }
        // Open files keep the mount alive, and the threads that serve it.
        if let Err(error) = self.unmount_ours(detach) {
            tracing::warn!("unmounting {}: {error}", self.path.display());
        }
        false
    }

    /// Waits for the threads to end after an unmount. They do not end if another process detached
    /// the mount while files were open, or mounted something over it.
    fn ends_soon(&self) -> bool {
        let deadline = Instant::now() + GRACE;
        while !self.has_ended() {
            if Instant::now() >= deadline {
                tracing::warn!("{}: files are still open, or it is hidden", self.path.display());
                return false;
            }
            std::thread::sleep(LOOK);
        }
        true
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let ended = self.has_ended() || self.take_away();
        let Some(session) = self.session.take() else { return };
        // Do not drop the rest of the session: it takes an ended connection for a live one and
        // would unmount by path whatever is there now. This leaks a file descriptor.
        let session = ManuallyDrop::new(session);
        if !ended {
            return;
        }
        // SAFETY: `session` is neither used nor dropped after this: the handle has one owner.
        let guard = unsafe { std::ptr::read(&session.guard) };
        match guard.join() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!("serving {}: {error}", self.path.display()),
            Err(_) => tracing::warn!("serving {}: a thread panicked", self.path.display()),
        }
    }
}

impl std::fmt::Debug for Mount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mount").field("path", &self.path).finish_non_exhaustive()
    }
}

fn config(fs: &ZoneFs) -> Config {
    let mut config = Config::default();
    let threads = std::thread::available_parallelism().map_or(THREADS_MIN, usize::from);
    config.n_threads = Some(threads.clamp(THREADS_MIN, THREADS_MAX));
    // One queue per thread, if the process may open /dev/fuse: fusermount3 opens only the first one
    // for us. Otherwise the threads share one queue.
    config.clone_fd = File::options().read(true).write(true).open("/dev/fuse").is_ok();
    config.acl = match fs.options().allow_other {
        true => SessionACL::All,
        false => SessionACL::Owner,
    };
    config.mount_options = vec![
        // With a slash, as in a device path: programs look for one in /proc/mounts.
        MountOption::FSName(format!("/dev/blockyard/{}", fs.disk().name())),
        MountOption::Subtype("zonefs".to_owned()),
        MountOption::DefaultPermissions,
        MountOption::NoSuid,
        MountOption::NoDev,
        MountOption::NoAtime,
    ];
    if fs.is_read_only() {
        config.mount_options.push(MountOption::RO);
    }
    config
}

/// The device number of the mount at a path, if it is a FUSE mount. The number of an ended mount is
/// reused, also for other mounts.
fn device_at(path: &Path) -> io::Result<Option<DeviceNumber>> {
    Ok(topmost(path)?.filter(Mounted::is_fuse).map(|mount| mount.device))
}

fn check_directory(directory: &Path) -> Result<PathBuf, MountError> {
    let wrong = |source| MountError::Directory { path: directory.to_owned(), source };
    let path = directory.canonicalize().map_err(wrong)?;
    match path.is_dir() {
        true => Ok(path),
        false => Err(wrong(io::Error::from_raw_os_error(libc::ENOTDIR))),
    }
}
