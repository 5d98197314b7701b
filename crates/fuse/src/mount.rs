//! A mount: mounts an empty directory, starts and ends the threads that serve it, and unmounts it.
#![allow(clippy::disallowed_types)] // Mounting and unmounting are control plane.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use blockyard_os::{
    DeviceNumber, abort_connection, abort_mounted, detach, topmost, unmount_unused,
};
use fuser::{Config, Filesystem, MountOption, Session, SessionACL};

use crate::device::{DeviceThread, clone_queue};
use crate::file_system::{FileOwner, FileSystem};
use crate::files::{DEVICE, Files, ThreadHandles, Transport};
use crate::handshake::{Handshake, Rings};
use crate::mount_point::{self, MountError, SOURCE};
use crate::ring::Prepared;
use crate::server::{MountServer, SessionEnd};

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

impl Default for MountOptions {
    fn default() -> MountOptions {
        let threads = thread::available_parallelism().map_or(1, |count| count.get());
        MountOptions { allow_other: false, threads, io_uring: true }
    }
}

/// A mounted directory. Dropping it unmounts it.
pub struct Mount {
    dir: PathBuf,
    /// The device number of the mount.
    device: Option<DeviceNumber>,
    files: Arc<Files>,
    handles: Arc<ThreadHandles>,
    ended: Arc<SessionEnd>,
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
        let handles = ThreadHandles::new(Arc::clone(files), options.threads + rings.len());
        let ended = Arc::new(SessionEnd::default());
        let owner = FileOwner {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            open_to_others: options.allow_other,
        };
        let file_system =
            FileSystem { files: Arc::clone(files), owner, mounted: SystemTime::now() };
        let (of_server, of_ended) = (Arc::clone(&handles), Arc::clone(&ended));
        let server = Arc::new(MountServer { file_system, handles: of_server, ended: of_ended });
        let failed = |source| match transport {
            Transport::Device => MountError::Mount { dir: dir.to_owned(), source },
            Transport::IoUring => MountError::Ring { dir: dir.to_owned(), source },
        };
        let threads = start_threads(&server, &session, options.threads, rings).map_err(failed)?;
        drop(server);
        files.attach(dir.to_owned(), Arc::clone(&handles), session.notifier(), transport);
        // Without the device number a mount in use cannot be aborted through it; there are other
        // ways.
        let device = topmost(dir).ok().flatten().map(|mount| mount.device);
        let session = Mutex::new(Some(Serving { session, threads }));
        let (dir, files) = (dir.to_owned(), Arc::clone(files));
        Ok(Mount { dir, device, files, handles, ended, transport, session })
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
        self.files.detach(&self.handles);
        self.handles.close_all(deadline);
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

/// Starts the threads of a mount. With rings a single thread reads the device, for messages that
/// need no reply.
///
/// # Errors
/// If there is no memory, thread or descriptor, or the kernel refuses a ring. Threads that were
/// started end with the session, which the caller drops.
fn start_threads<F: Filesystem>(
    server: &Arc<MountServer>,
    session: &Session<F>,
    count: usize,
    rings: Vec<Prepared>,
) -> io::Result<Vec<JoinHandle<()>>> {
    let device = session.as_fd().try_clone_to_owned()?;
    let count = if rings.is_empty() { count.max(1) } else { 1 };
    let mut threads = start_rings(server, &device, count, rings)?;
    let device = Arc::new(device);
    for thread_no in 0..count {
        let own = (thread_no > 0).then(|| clone_queue(&device)).flatten();
        let queue = own.map_or_else(|| Arc::clone(&device), Arc::new);
        let thread = DeviceThread::new(Arc::clone(server), thread_no, queue)?;
        threads.push(spawn(format!("files-serve-{thread_no}"), move || thread.serve())?);
    }
    Ok(threads)
}

/// Starts a thread for each ring, numbered from `first_thread` on. The kernel waits until all are
/// registered.
fn start_rings(
    server: &Arc<MountServer>,
    device: &OwnedFd,
    first_thread: usize,
    rings: Vec<Prepared>,
) -> io::Result<Vec<JoinHandle<()>>> {
    let (sender, registered) = channel();
    let count = rings.len();
    let mut threads = Vec::new();
    for (index, ring) in rings.into_iter().enumerate() {
        let mut thread = ring.thread(Arc::clone(server), first_thread + index, device.try_clone()?);
        let sender = sender.clone();
        threads.push(spawn(format!("files-ring-{index}"), move || {
            let result = thread.register();
            let is_registered = result.is_ok();
            // The thread that started this one waits for the result.
            let _ = sender.send(result);
            if is_registered {
                thread.serve();
            }
        })?);
    }
    drop(sender);
    registered.iter().take(count).collect::<io::Result<()>>()?;
    Ok(threads)
}

fn spawn(name: String, serve: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    Builder::new().name(name).spawn(serve)
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
