//! Mounting: the file system served to every program over FUSE.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use fuser::{BackgroundSession, Config, MountOption, Session, SessionACL};
use rustix::mount::UnmountFlags;

use crate::error::ZoneFsError;
use crate::fs::ZoneFs;
use crate::fuse::Server;
use crate::remount::Remount;

/// Fewest threads that serve a mount, however few processors there are: one that waits for the
/// device must not keep the others waiting.
const THREADS_MIN: usize = 2;
/// Most threads.
const THREADS_MAX: usize = 8;

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
        if !fs.is_read_only() {
            fs.set_mount(Remount::new(path.clone()));
        }
        Ok(Mount { fs, path, session })
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

    /// Unmounts it, if nobody uses it. What is dropped afterwards waits for the end.
    ///
    /// # Errors
    /// If a program uses it or the system refuses; then it goes on.
    pub fn unmount(&self) -> Result<(), MountError> {
        if self.has_ended() {
            return Ok(());
        }
        unmount(&self.path, false)
            .map_err(|source| MountError::Unmount { path: self.path.clone(), source })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let Some(session) = self.session.take() else { return };
        // Whoever has a file open keeps it, and the threads that serve it: they end when the last
        // one is closed, or with this process.
        let busy = !session.guard.is_finished() && unmount(&self.path, false).is_err();
        if busy && !session.guard.is_finished() {
            if let Err(error) = unmount(&self.path, true) {
                tracing::warn!("unmounting {}: {error}", self.path.display());
            }
            std::mem::forget(session);
            return;
        }
        // The rest of the session would unmount again, and finds nothing.
        let BackgroundSession { guard, .. } = session;
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

/// Unmounts a directory; with `detach` even if it is in use. Who is not root needs fusermount3.
fn unmount(path: &Path, detach: bool) -> io::Result<()> {
    let flags = if detach { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(path, flags | UnmountFlags::NOFOLLOW) {
        Err(rustix::io::Errno::PERM) => unmount_by_fusermount(path, detach),
        end => Ok(end?),
    }
}

fn unmount_by_fusermount(path: &Path, detach: bool) -> io::Result<()> {
    let mut fusermount = Command::new("fusermount3");
    fusermount.arg(if detach { "-uz" } else { "-u" }).arg("--").arg(path);
    let output = fusermount.stdin(Stdio::null()).output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}

fn check_directory(directory: &Path) -> Result<PathBuf, MountError> {
    let wrong = |source| MountError::Directory { path: directory.to_owned(), source };
    let path = directory.canonicalize().map_err(wrong)?;
    match path.is_dir() {
        true => Ok(path),
        false => Err(wrong(io::Error::from_raw_os_error(libc::ENOTDIR))),
    }
}
