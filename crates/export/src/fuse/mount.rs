//! A mount: mounts an empty directory, and unmounts it.
#![allow(clippy::disallowed_types)] // Mounting and unmounting are control plane.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use blockyard_mounts::{
    DeviceNumber, abort_connection, abort_mounted, detach, topmost, unmount_unused,
};
use fuser::{Config, MountOption, Session, SessionACL};

use crate::fuse::device::DEVICE;
use crate::fuse::file_system::{FileSystem, Owner};
use crate::fuse::files::Files;
use crate::fuse::handshake::{Handshake, Rings};
use crate::fuse::mount_point::{self, MountError, SOURCE};
use crate::fuse::seat::Seats;
use crate::fuse::server::Server;
use crate::fuse::threads;

/// The interval of unmount attempts while a file is open.
const RETRY: Duration = Duration::from_millis(20);

/// How long an aborted mount may take to end.
const ABORT_GRACE: Duration = Duration::from_secs(1);

/// The options of a mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// Lets other users see the files; the files' modes still decide who may open them. Without
    /// this even root has no access to a user's mount.
    pub allow_other: bool,
    /// The number of serving threads. More than processors are slower.
    pub threads: usize,
    /// Whether to use io_uring if the kernel offers it.
    pub io_uring: bool,
}

/// The transport of requests from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transport {
    /// One at a time, read from `/dev/fuse`.
    Device,
    /// Many at a time, over io_uring.
    IoUring,
}

impl Transport {
    /// The transport's name, as it is shown.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Device => DEVICE,
            Transport::IoUring => "io_uring",
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Default for MountOptions {
    fn default() -> MountOptions {
        let threads = thread::available_parallelism().map_or(1, |count| count.get());
        MountOptions { allow_other: false, threads, io_uring: true }
    }
}

/// Whether the session has ended, and the threads that wait for it.
#[derive(Debug, Default)]
pub(crate) struct Ended(Mutex<bool>, Condvar);

impl Ended {
    pub(crate) fn set(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.1.notify_all();
    }

    fn within(&self, time: Duration) -> bool {
        let ended = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.1.wait_timeout_while(ended, time, |ended| !*ended);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// A mounted directory. Dropping it unmounts it.
pub struct Mount {
    dir: PathBuf,
    /// The device number of the mount.
    device: Option<DeviceNumber>,
    files: Arc<Files>,
    seats: Arc<Seats>,
    ended: Arc<Ended>,
    transport: Transport,
    /// `None` once unmounted.
    session: Mutex<Option<Serving>>,
}

/// The session and threads that serve a mount.
struct Serving {
    /// The mount, and the connection.
    session: Session<Handshake>,
    threads: Vec<JoinHandle<()>>,
}

impl Mount {
    /// Mounts the files at a directory. When this returns they can be opened.
    ///
    /// # Errors
    /// If the directory is unsuitable, or the system refuses to mount.
    pub fn start(
        files: Arc<Files>,
        dir: &Path,
        options: &MountOptions,
    ) -> Result<Mount, MountError> {
        let dir = mount_point::prepare(dir)?;
        if options.io_uring {
            match Mount::attempt(&files, &dir, options, Rings::wanted(options.threads)) {
                Err(MountError::Ring { source, .. }) => {
                    let dir = dir.display();
                    tracing::warn!(%dir, error = %source, "no FUSE over io_uring; serving without");
                }
                result => return result,
            }
        }
        Mount::attempt(&files, &dir, options, Rings::unwanted())
    }

    fn attempt(
        files: &Arc<Files>,
        dir: &Path,
        options: &MountOptions,
        rings: Arc<Rings>,
    ) -> Result<Mount, MountError> {
        let handshake = Handshake::new(Arc::clone(&rings));
        let session = Session::new(handshake, dir, &config(options))
            .map_err(|error| explain(dir, options, error))?;
        let rings = rings.take();
        let transport = if rings.is_empty() { Transport::Device } else { Transport::IoUring };
        let seats = Seats::new(Arc::clone(files), options.threads + rings.len());
        let ended = Arc::new(Ended::default());
        let owner = Owner {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            open_to_others: options.allow_other,
        };
        let file_system =
            FileSystem { files: Arc::clone(files), owner, mounted: SystemTime::now() };
        let (of_server, of_ended) = (Arc::clone(&seats), Arc::clone(&ended));
        let server = Arc::new(Server { file_system, seats: of_server, ended: of_ended });
        let failed = |source| match transport {
            Transport::Device => MountError::Mount { dir: dir.to_owned(), source },
            Transport::IoUring => MountError::Ring { dir: dir.to_owned(), source },
        };
        let threads = threads::start(&server, &session, options.threads, rings).map_err(failed)?;
        drop(server);
        files.attach(dir.to_owned(), Arc::clone(&seats), session.notifier(), transport);
        // Without the device number a mount in use cannot be aborted through it; there are other
        // ways.
        let device = topmost(dir).ok().flatten().map(|mount| mount.device);
        let session = Mutex::new(Some(Serving { session, threads }));
        let (dir, files) = (dir.to_owned(), Arc::clone(files));
        Ok(Mount { dir, device, files, seats, ended, transport, session })
    }

    /// The mount point with links resolved.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The transport of requests.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Whether it is still mounted: other programs can unmount it too.
    pub fn is_mounted(&self) -> bool {
        !self.ended.within(Duration::ZERO)
    }

    /// Unmounts. While files are open this waits, at most for `drain`; then programs with open
    /// files get errors.
    pub fn stop(&self, drain: Duration) {
        let session = self.session.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Serving { session, threads }) = session else { return };
        let deadline = Instant::now() + drain;
        if let Err(error) = self.unmount(deadline) {
            tracing::warn!(dir = %self.dir.display(), %error, "unmounting failed");
        }
        if self.ended.within(ABORT_GRACE) {
            // A panic of the thread was reported when it happened.
            threads.into_iter().for_each(|thread| _ = thread.join());
        } else {
            // The threads wait in the kernel, which ends the wait when this process ends.
            tracing::warn!(dir = %self.dir.display(), "files are still open; they fail soon");
        }
        // A drop would unmount whatever is mounted there by now, for example the next yard's files.
        // The leaked session only holds a descriptor of a connection that has ended.
        std::mem::forget(session);
        self.files.detach(&self.seats);
        self.seats.close_all(deadline);
    }

    /// Whether the mount visible at the directory is this one, not a later mount over it or the
    /// directory below.
    fn is_there(&self) -> bool {
        if !self.is_mounted() {
            return false;
        }
        let Some(device) = self.device else { return true };
        let seen = topmost(&self.dir).ok().flatten();
        // The device number of a mount that has ended is reused.
        seen.is_some_and(|mount| mount_point::is_ours(&mount) && mount.device == device)
    }

    fn unmount(&self, deadline: Instant) -> io::Result<()> {
        loop {
            if !self.is_there() {
                return Ok(());
            }
            match unmount_unused(&self.dir) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {}
                result => return result,
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.ended.within(left.min(RETRY));
        }
        tracing::warn!(dir = %self.dir.display(), "files are still open; cutting them off");
        // Root aborts the connection in one step; a user's mount is detached and then aborted if
        // possible.
        abort_mounted(&self.dir).or_else(|_| {
            detach(&self.dir)?;
            match self.device {
                Some((_, minor)) => abort_connection(minor),
                None => Ok(()),
            }
        })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

impl fmt::Debug for Mount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mount").field("dir", &self.dir).finish_non_exhaustive()
    }
}

fn config(options: &MountOptions) -> Config {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(SOURCE.to_owned()),
        MountOption::Subtype(SOURCE.to_owned()),
        // The kernel checks modes: even if other users are allowed, only the owner and root can
        // open a file.
        MountOption::DefaultPermissions,
        MountOption::NoAtime,
        MountOption::NoDev,
        MountOption::NoSuid,
        MountOption::NoExec,
    ];
    config.acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
    config
}

/// Explains an error of mounting, as far as its cause can be found.
fn explain(dir: &Path, options: &MountOptions, source: io::Error) -> MountError {
    let dir = dir.to_owned();
    if !Path::new(DEVICE).exists() {
        return MountError::NoFuse;
    }
    if source.kind() == io::ErrorKind::NotFound && !rustix::process::geteuid().is_root() {
        return MountError::NoMounter;
    }
    if options.allow_other && source.to_string().contains("user_allow_other") {
        return MountError::AllowOther(dir);
    }
    MountError::Mount { dir, source }
}
