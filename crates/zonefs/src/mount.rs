//! Mounting: the file system served to every program over FUSE.
#![allow(unsafe_code)] // A part is taken out of a session whose rest must not be dropped.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_mounts::{DeviceNumber, Mounted, detach, topmost, unmount_unused};
use fuser::{BackgroundSession, Config, MountOption, Session, SessionACL};

use crate::error::ZoneFsError;
use crate::fs::ZoneFs;
use crate::fuse::Server;
use crate::remount::Remount;

/// Fewest threads that serve a mount, however few processors there are: one that waits for the
/// device must not keep the others waiting.
const THREADS_MIN: usize = 2;
/// Most threads.
const THREADS_MAX: usize = 8;

/// How long the threads of a mount that is gone may take to notice.
const GRACE: Duration = Duration::from_secs(2);
/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(2);

/// Why a mount could not be made or ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The file system cannot be opened.
    #[error(transparent)]
    FileSystem(#[from] ZoneFsError),
    /// The directory will not do.
    #[error("{}: {source}; wanted a directory to mount at", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the system said.
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
        /// What the system said.
        source: io::Error,
    },
    /// It cannot be unmounted.
    #[error("unmounting {} failed: {source}", path.display())]
    Unmount {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// A mounted file system. Dropping it unmounts it, whoever uses it.
pub struct Mount {
    fs: Arc<ZoneFs>,
    path: PathBuf,
    /// The mount's device, by which it is told from what others mount at the same place.
    device: Option<DeviceNumber>,
    session: Option<BackgroundSession>,
}

impl Mount {
    /// Mounts a file system at a directory. When this returns, programs can use it. `ended` is
    /// called when it is mounted no longer.
    ///
    /// # Errors
    /// If the directory will not do or the system refuses.
    pub fn new(
        fs: Arc<ZoneFs>,
        directory: &Path,
        ended: Box<dyn FnOnce() + Send + Sync>,
    ) -> Result<Mount, MountError> {
        let path = check_directory(directory)?;
        let refused = |source| MountError::Refused { path: path.clone(), source };
        let server = Server::new(Arc::clone(&fs), ended);
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

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is no longer mounted, by whomever.
    pub fn has_ended(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.guard.is_finished())
    }

    /// Whether somebody else has unmounted it and it has ended, which takes a moment: a file system
    /// that is detached goes on until its last file is closed.
    pub fn was_unmounted(&self) -> bool {
        let is_seen = || match device_at(&self.path) {
            Ok(seen) => seen.is_some() && seen == self.device,
            // Nobody knows: it stays as it is.
            Err(_) => true,
        };
        self.has_ended() || (!is_seen() && self.ends_soon())
    }

    /// Unmounts it, if nobody uses it. What is dropped afterwards waits for the end.
    ///
    /// # Errors
    /// If a program uses it or the system refuses; then it goes on.
    pub fn unmount(&self) -> Result<(), MountError> {
        if self.has_ended() {
            return Ok(());
        }
        self.unmount_ours(unmount_unused)
            .map_err(|source| MountError::Unmount { path: self.path.clone(), source })
    }

    /// Runs `unmount` on the path if what is there is ours: after somebody else's `umount` it may
    /// be what lay below, or what was mounted since.
    fn unmount_ours(&self, unmount: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
        let seen = device_at(&self.path)?;
        if seen.is_none() || seen != self.device {
            return Ok(());
        }
        unmount(&self.path)
    }

    /// Takes the mount away, and says whether its threads have ended, rather than go on until the
    /// last file is closed.
    fn take_away(&self) -> bool {
        if self.unmount_ours(unmount_unused).is_ok() {
            return self.ends_soon();
        }
        // Whoever has a file open keeps it, and the threads that serve it.
        if let Err(error) = self.unmount_ours(detach) {
            tracing::warn!("unmounting {}: {error}", self.path.display());
        }
        false
    }

    /// Whether the threads end, now that it is not mounted here: not if somebody detached it with
    /// files open, or has mounted something else over it.
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
        // What else a session holds would, when it is dropped, unmount by path whatever is there
        // now: it takes a connection that has ended for one that has not. It costs a descriptor.
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
    // A queue for each thread, where they may open the device: fusermount3 opens one for us, but a
    // second one is ours to open. Without that they share one.
    config.clone_fd = File::options().read(true).write(true).open("/dev/fuse").is_ok();
    config.acl = match fs.options().allow_other {
        true => SessionACL::All,
        false => SessionACL::Owner,
    };
    config.mount_options = vec![
        // With a slash, as a device has it: programs look for one in /proc/mounts.
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

/// The device of the mount that is seen at a path, if one that a program serves is right there. The
/// number of a mount that has ended is given again, to what others mount as well.
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
