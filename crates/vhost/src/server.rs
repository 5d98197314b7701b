//! A server: a listening unix socket, and the thread that serves its hypervisor.
//!
//! ```text
//! LISTENING ── a hypervisor connects ──▸ CONNECTED ── it leaves ──▸ LISTENING
//!      └───────────── stop ──▸ STOPPED ◂── stop ──┘
//! ```
//!
//! A device has one hypervisor at a time: another one waits until the first has left.
#![allow(clippy::disallowed_types)] // Control plane: no lock is taken for an I/O.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use blockyard_core::Disk;
use blockyard_core::claim::ClaimState;
use blockyard_core::rmw::SharedDisk;
use blockyard_os::socket::{self, Ready, Wake};
use blockyard_sync::atomics::{AtomicBool, Ordering};
use vhost::vhost_user::{BackendReqHandler, Error};

use crate::backend::Backend;

/// How long the server waits after it has refused a hypervisor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A server as listings show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct VhostInfo {
    /// Whether a hypervisor is connected.
    pub is_connected: bool,
    /// The process of the hypervisor, if the system knows it.
    pub pid: Option<i32>,
    /// The rings that are being served.
    pub queues: usize,
    /// The memory of the guest, in bytes.
    pub memory_bytes: u64,
    /// Requests that were answered.
    pub requests: u64,
    /// Requests that were answered with an error.
    pub errors: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
}

/// A running server. Dropping it stops it.
pub struct VhostServer {
    shared: Arc<ServerShared>,
    /// `None` once joined.
    thread: Mutex<Option<JoinHandle<UnixListener>>>,
}

struct ServerShared {
    disk: Arc<dyn Disk>,
    claim: Arc<ClaimState>,
    is_stopping: AtomicBool,
    wake: Wake,
    connected: Mutex<Option<Connected>>,
}

/// The hypervisor that is connected.
struct Connected {
    pid: Option<i32>,
    /// To end the connection.
    socket: UnixStream,
    backend: Arc<Mutex<Backend>>,
}

impl VhostServer {
    /// Serves a disk at a socket that listens already.
    ///
    /// # Errors
    /// If the system refuses a thread or a descriptor.
    pub fn start(disk: SharedDisk, listener: UnixListener) -> io::Result<VhostServer> {
        let SharedDisk { disk, claim, .. } = disk;
        listener.set_nonblocking(true)?;
        let name = format!("vhost-{}", disk.name());
        let shared = Arc::new(ServerShared {
            disk,
            claim,
            is_stopping: AtomicBool::new(false),
            wake: Wake::new()?,
            connected: Mutex::new(None),
        });
        let accept = {
            let shared = Arc::clone(&shared);
            move || {
                shared.accept_all(&listener);
                listener
            }
        };
        let thread = thread::Builder::new().name(name).spawn(accept)?;
        Ok(VhostServer { shared, thread: Mutex::new(Some(thread)) })
    }

    /// The state of the server.
    pub fn info(&self) -> VhostInfo {
        let connected = self.shared.connected();
        let Some(Connected { pid, backend, .. }) = &*connected else {
            return VhostInfo::default();
        };
        let Ok(backend) = backend.try_lock() else {
            // A message is being handled, which may wait for the device.
            return VhostInfo { is_connected: true, pid: *pid, ..VhostInfo::default() };
        };
        VhostInfo {
            is_connected: true,
            pid: *pid,
            queues: backend.running(),
            memory_bytes: backend.memory_bytes(),
            requests: backend.count(|counts| counts.requests.get()),
            errors: backend.count(|counts| counts.errors.get()),
            read_bytes: backend.count(|counts| counts.read_bytes.get()),
            written_bytes: backend.count(|counts| counts.written_bytes.get()),
        }
    }

    /// Completes the requests in flight and disconnects the hypervisor. Returns the socket, for a
    /// server that goes on there; `None` if the server is stopped already.
    pub fn stop(&self) -> Option<UnixListener> {
        // Release: pairs with the Acquire in `is_stopping`.
        self.shared.is_stopping.store(true, Ordering::Release);
        self.shared.wake.raise();
        if let Some(connected) = &*self.shared.connected() {
            socket::shutdown(&connected.socket, Shutdown::Both);
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A panic of the thread was reported when it happened.
        thread?.join().ok()
    }
}

impl Drop for VhostServer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for VhostServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.shared.disk.name();
        f.debug_struct("VhostServer").field("device", &device).finish_non_exhaustive()
    }
}

impl ServerShared {
    fn connected(&self) -> MutexGuard<'_, Option<Connected>> {
        self.connected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopping(&self) -> bool {
        // Acquire: pairs with the Release in `VhostServer::stop`.
        self.is_stopping.load(Ordering::Acquire)
    }

    fn accept_all(&self, listener: &UnixListener) {
        let device = self.disk.name();
        while !self.is_stopping() {
            match socket::wait_readable(&[listener], &self.wake) {
                Ok(Ready::Yes) => {}
                Ok(Ready::Woken | Ready::No) => continue,
                Err(error) => {
                    tracing::error!(device, %error, "cannot wait for a hypervisor");
                    return;
                }
            }
            let served = listener.accept().and_then(|(stream, _)| self.serve(stream));
            match served {
                Ok(()) => tracing::info!(device, "the hypervisor has left"),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::warn!(device, %error, "a hypervisor is disconnected");
                    // One that connects again and again does not fill the log.
                    thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    /// Serves a hypervisor until it leaves or the server stops.
    fn serve(&self, stream: UnixStream) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        let pid = socket::peer_pid(&stream);
        let backend = Backend::new(Arc::clone(&self.disk));
        let backend = Arc::new(Mutex::new(backend));
        let connected =
            Connected { pid, socket: stream.try_clone()?, backend: Arc::clone(&backend) };
        *self.connected() = Some(connected);
        // After it counts as a client: a claim that comes later finds it.
        if self.claim.is_claimed() {
            *self.connected() = None;
            return Err(io::Error::other("a file system or a change has claimed the device"));
        }
        tracing::info!(device = self.disk.name(), pid, "a hypervisor is connected");
        let mut handler = BackendReqHandler::from_stream(stream, Arc::clone(&backend));
        let ended = loop {
            // `stop` closes the connection that it finds; this one may have come after it.
            if self.is_stopping() {
                break Ok(());
            }
            match handler.handle_request() {
                Ok(()) => {}
                Err(Error::Disconnected) => break Ok(()),
                Err(error) if is_refusal(&error) => {
                    tracing::warn!(device = self.disk.name(), %error, "a message is refused");
                }
                Err(_) if self.is_stopping() => break Ok(()),
                Err(error) => break Err(io::Error::other(error.to_string())),
            }
        };
        backend.lock().unwrap_or_else(PoisonError::into_inner).stop();
        *self.connected() = None;
        ended
    }
}

/// Whether an error is the answer to one message, after which the connection goes on.
fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::InvalidParam | Error::InvalidOperation(_) | Error::ReqHandlerError(_))
}
