//! A server: a listening unix socket, and the thread that serves its hypervisor.
//!
//! ```text
//! LISTENING ── a hypervisor connects ──▸ CONNECTED ── it leaves ──▸ LISTENING
//!      └───────────── stop ──▸ STOPPED ◂── stop ──┘
//! disk: PRESENT ── suspend ──▸ ABSENT ── resume ──▸ PRESENT
//! socket: ACCEPTS ── hold ──▸ HOLDS ── proceed ──▸ ACCEPTS
//! ```
//!
//! A device has one hypervisor at a time: another one waits until the first has left. While the
//! disk is absent, the connected hypervisor's requests wait, and others are refused. While the
//! server holds, a hypervisor that connects waits in the queue of the socket.
#![allow(clippy::disallowed_types)] // Control plane: no lock is taken for an I/O.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use blockyard_core::channel::{ChannelGroup, Stats};
use blockyard_core::rmw::SharedDisk;
use blockyard_os::socket::{self, Ready, Wake};
use blockyard_sync::atomics::{AtomicBool, Ordering};
use vhost::vhost_user::{BackendReqHandler, Error};

use crate::backend::{Backend, END_POLL_INTERVAL};
use crate::backend_channel::BackendChannel;
use crate::device::{DeviceCounts, RingCounts};

/// How long the server waits after it has refused a hypervisor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long the requests in flight may take when a server is dropped.
const DROP_DRAIN: Duration = Duration::from_secs(10);

/// A server as listings show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct VhostInfo {
    /// Whether a hypervisor is connected.
    pub is_connected: bool,
    /// The number of the connection in this server, from 1; 0 without one.
    pub connection: u64,
    /// The process of the hypervisor, if the system knows it.
    pub pid: Option<i32>,
    /// The rings that are being served.
    pub queues: usize,
    /// The memory of the guest, in bytes.
    pub memory_bytes: u64,
    /// The requests of this connection that were answered.
    pub requests: u64,
    /// The requests of this connection that were answered with an error.
    pub errors: u64,
    /// Bytes that were read through this connection.
    pub read_bytes: u64,
    /// Bytes that were written through this connection.
    pub written_bytes: u64,
    /// The rings that were served, also through earlier connections, by their indexes.
    pub rings: Vec<(usize, RingCounts)>,
}

/// A running server. Dropping it stops it.
pub struct VhostServer {
    shared: Arc<ServerShared>,
    /// `None` once joined.
    thread: Mutex<Option<JoinHandle<Arc<UnixListener>>>>,
    /// The socket, until the thread is joined.
    listener: Weak<UnixListener>,
}

struct ServerShared {
    /// The name of the device.
    name: String,
    poll_percent: u32,
    is_stopping: AtomicBool,
    /// Whether no hypervisor is accepted. Locked while one is.
    holds: Mutex<bool>,
    wake: Wake,
    counts: DeviceCounts,
    state: Mutex<ServerState>,
}

struct ServerState {
    /// `None` while the disk is being replaced.
    disk: Option<SharedDisk>,
    connected: Option<Connected>,
    /// The number of connections so far.
    connections: u64,
}

/// The hypervisor that is connected.
struct Connected {
    /// The number of the connection in the server, from 1.
    number: u64,
    pid: Option<i32>,
    /// To end the connection.
    socket: UnixStream,
    backend: Arc<Mutex<Backend>>,
    /// The channels of all rings, for a reader that does not wait for the backend.
    channels: Arc<ChannelGroup>,
    /// The counts of all rings when it connected.
    before: Vec<(usize, RingCounts)>,
    /// Whether the thread of the connection lets the rings go on after the message that it handles.
    owes_cancel: bool,
}

impl VhostServer {
    /// Serves a disk at a socket that listens already. The thread of each ring may look for work,
    /// instead of sleeping, for `poll_percent` percent of the time, of 100 at most. A server that
    /// `holds` accepts no hypervisor until [`VhostServer::proceed`].
    ///
    /// # Errors
    /// If the system refuses a thread or a descriptor.
    pub fn start(
        disk: SharedDisk,
        listener: UnixListener,
        poll_percent: u32,
        holds: bool,
    ) -> io::Result<VhostServer> {
        listener.set_nonblocking(true)?;
        let name = disk.disk.name().to_owned();
        let thread_name = format!("vhost-{name}");
        let shared = Arc::new(ServerShared {
            name,
            poll_percent,
            is_stopping: AtomicBool::new(false),
            holds: Mutex::new(holds),
            wake: Wake::new()?,
            counts: DeviceCounts::new(),
            state: Mutex::new(ServerState { disk: Some(disk), connected: None, connections: 0 }),
        });
        let listener = Arc::new(listener);
        let socket = Arc::downgrade(&listener);
        let accept = {
            let shared = Arc::clone(&shared);
            move || {
                shared.accept_all(&listener);
                listener
            }
        };
        let thread = thread::Builder::new().name(thread_name).spawn(accept)?;
        Ok(VhostServer { shared, thread: Mutex::new(Some(thread)), listener: socket })
    }

    /// The listening socket, for another process.
    ///
    /// # Errors
    /// If the server is stopped, or the system refuses a descriptor.
    pub fn socket(&self) -> io::Result<OwnedFd> {
        let listener = self.listener.upgrade().ok_or(ErrorKind::NotConnected)?;
        Ok(listener.try_clone()?.into())
    }

    /// Accepts no other hypervisor, which waits in the queue of the socket. When this returns, none
    /// is being accepted.
    pub fn hold(&self) {
        *self.shared.holds() = true;
        self.shared.wake.raise();
    }

    /// Accepts hypervisors, also one that has waited.
    pub fn proceed(&self) {
        *self.shared.holds() = false;
        self.shared.wake.raise();
    }

    /// The state of the server.
    pub fn info(&self) -> VhostInfo {
        let state = self.shared.state();
        let rings = self.shared.counts.get();
        let Some(Connected { number, pid, backend, before, .. }) = &state.connected else {
            return VhostInfo { rings, ..VhostInfo::default() };
        };
        // While a message is handled, which may wait for the device, they are not known.
        let known = backend.try_lock().map(|backend| (backend.running(), backend.memory_bytes()));
        let (queues, memory_bytes) = known.unwrap_or_default();
        let since = |counter: fn(&RingCounts) -> u64| {
            let sum = |rings: &[(usize, RingCounts)]| -> u64 {
                rings.iter().map(|(_, counts)| counter(counts)).sum()
            };
            sum(&rings) - sum(before)
        };
        VhostInfo {
            is_connected: true,
            connection: *number,
            pid: *pid,
            queues,
            memory_bytes,
            requests: since(|counts| counts.requests),
            errors: since(|counts| counts.errors),
            read_bytes: since(|counts| counts.read_bytes),
            written_bytes: since(|counts| counts.written_bytes),
            rings,
        }
    }

    /// The counters of the channels of the connection with this number; `None` if it has ended.
    pub fn channel_stats(&self, connection: u64) -> Option<Stats> {
        let state = self.shared.state();
        let connected = state.connected.as_ref().filter(|it| it.number == connection)?;
        let channels = Arc::clone(&connected.channels);
        drop(state);
        Some(channels.sum())
    }

    /// Asks the rings to stop, before [`VhostServer::suspend`] waits for them, or
    /// [`VhostServer::cancel_suspend`] lets them go on.
    pub fn begin_suspend(&self) {
        let state = self.shared.state();
        let backend = state.connected.as_ref().map(|it| Arc::clone(&it.backend));
        drop(state);
        // While a message is handled, `suspend` asks.
        if let Some(backend) = &backend
            && let Ok(backend) = backend.try_lock()
        {
            backend.begin_suspend();
        }
    }

    /// Lets the rings go on that [`VhostServer::begin_suspend`] has asked to stop. If a message is
    /// being handled, which may wait for the device, they go on after it; this does not wait for
    /// that.
    pub fn cancel_suspend(&self) {
        let mut state = self.shared.state();
        let Some(connected) = &mut state.connected else { return };
        let backend = Arc::clone(&connected.backend);
        let locked = match backend.try_lock() {
            Ok(locked) => Some(locked),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        // The thread of the connection looks at it with the same lock, after it has released the
        // backend's.
        connected.owes_cancel = locked.is_none();
        drop(state);
        if let Some(mut backend) = locked {
            backend.cancel_stop();
        }
    }

    /// Releases the disk, to replace it by another one while the hypervisor stays connected: the
    /// requests that were taken are completed, and later ones wait. `false` if the disk executes
    /// requests for longer than `drain`, or is released already; then nothing changes.
    pub fn suspend(&self, drain: Duration) -> bool {
        let deadline = Instant::now() + drain;
        let (disk, backend) = {
            let mut state = self.shared.state();
            let backend = state.connected.as_ref().map(|it| Arc::clone(&it.backend));
            (state.disk.take(), backend)
        };
        let Some(disk) = disk else { return false };
        let is_released = backend.is_none_or(|backend| {
            loop {
                // A message is being handled, which may wait for the device.
                if let Ok(mut backend) = backend.try_lock() {
                    return backend.suspend(deadline);
                }
                if Instant::now() >= deadline {
                    return false;
                }
                thread::sleep(END_POLL_INTERVAL);
            }
        });
        if !is_released {
            self.shared.state().disk = Some(disk);
        }
        is_released
    }

    /// Serves another disk. The hypervisor learns a larger capacity; it is disconnected if anything
    /// else is different, or the capacity smaller.
    pub fn resume(&self, disk: SharedDisk) {
        let mut state = self.shared.state();
        let new = Arc::clone(&disk.disk);
        state.disk = Some(disk);
        let Some(Connected { socket, backend, .. }) = &state.connected else { return };
        let socket = socket.try_clone();
        let backend = Arc::clone(backend);
        drop(state);
        if backend.lock().unwrap_or_else(PoisonError::into_inner).resume(new) {
            return;
        }
        tracing::warn!(
            device = self.shared.name,
            "the hypervisor is disconnected: it cannot go on with the device"
        );
        if let Ok(socket) = socket {
            socket::shutdown(&socket, Shutdown::Both);
        }
    }

    /// Disconnects the hypervisor and accepts no other one, without waiting for the threads.
    pub fn begin_stop(&self) {
        // Release: pairs with the Acquire in `is_stopping`.
        self.shared.is_stopping.store(true, Ordering::Release);
        self.shared.wake.raise();
        if let Some(connected) = &self.shared.state().connected {
            socket::shutdown(&connected.socket, Shutdown::Both);
        }
    }

    /// Completes the requests in flight and disconnects the hypervisor. If the disk executes them
    /// for longer than `drain`, threads that wait for it go on, and end when it has completed them.
    /// Returns whether all have ended: until then the guest must not be served by another server,
    /// because both would write its rings.
    pub fn stop(&self, drain: Duration) -> bool {
        self.begin_stop();
        let deadline = Instant::now() + drain;
        while !self.has_ended() {
            if Instant::now() >= deadline {
                let device = &self.shared.name;
                tracing::warn!(device, "requests of the hypervisor are still executed");
                return false;
            }
            thread::sleep(END_POLL_INTERVAL);
        }
        // A panic of the thread was reported when it happened.
        self.thread().take().map(JoinHandle::join);
        true
    }

    /// Whether all threads of a stopped server have ended.
    pub fn has_ended(&self) -> bool {
        self.thread().as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn thread(&self) -> MutexGuard<'_, Option<JoinHandle<Arc<UnixListener>>>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for VhostServer {
    fn drop(&mut self) {
        if !self.shared.is_stopping() {
            self.stop(DROP_DRAIN);
        }
    }
}

impl fmt::Debug for VhostServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VhostServer").field("device", &self.shared.name).finish_non_exhaustive()
    }
}

impl ServerShared {
    fn state(&self) -> MutexGuard<'_, ServerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn holds(&self) -> MutexGuard<'_, bool> {
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopping(&self) -> bool {
        // Acquire: pairs with the Release in `VhostServer::stop`.
        self.is_stopping.load(Ordering::Acquire)
    }

    fn accept_all(&self, listener: &UnixListener) {
        let device = &self.name;
        while !self.is_stopping() {
            let all = [listener];
            // While the server holds, it polls no socket.
            let sockets = if *self.holds() { &all[..0] } else { &all };
            match socket::wait_readable(sockets, &self.wake) {
                Ok(Ready::Yes) => {}
                Ok(Ready::Woken) => {
                    self.wake.lower();
                    continue;
                }
                Ok(Ready::No) => continue,
                Err(error) => {
                    tracing::error!(device, %error, "cannot wait for a hypervisor");
                    return;
                }
            }
            let registered = {
                // Until the hypervisor is known, so that `hold` leaves none that is not.
                let holds = self.holds();
                if *holds {
                    continue;
                }
                listener.accept().and_then(|(stream, _)| self.register(stream))
            };
            match registered.and_then(|(stream, backend)| self.serve(stream, &backend)) {
                Ok(()) => tracing::info!(device, "the hypervisor has left"),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::warn!(device, %error, "a hypervisor is disconnected");
                    // One that connects again and again does not fill the log.
                    thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
        self.counts.log_rest(device);
    }

    /// Makes a hypervisor the connected one.
    fn register(&self, stream: UnixStream) -> io::Result<(UnixStream, Arc<Mutex<Backend>>)> {
        stream.set_nonblocking(false)?;
        let pid = socket::peer_pid(&stream);
        let socket = stream.try_clone()?;
        let (backend, claim) = {
            let mut state = self.state();
            let Some(SharedDisk { disk, claim, .. }) = &state.disk else {
                return Err(io::Error::other("the device is being replaced"));
            };
            let counts = self.counts.clone();
            let before = counts.get();
            let backend = Backend::new(Arc::clone(disk), self.poll_percent, counts);
            let channels = backend.channels();
            let backend = Arc::new(Mutex::new(backend));
            let claim = Arc::clone(claim);
            state.connections += 1;
            state.connected = Some(Connected {
                number: state.connections,
                pid,
                socket,
                backend: Arc::clone(&backend),
                channels,
                before,
                owes_cancel: false,
            });
            (backend, claim)
        };
        // After it counts as a client: a claim that comes later finds it.
        if claim.is_claimed() {
            self.state().connected = None;
            return Err(io::Error::other("a file system or a change has claimed the device"));
        }
        tracing::info!(device = self.name, pid, "a hypervisor is connected");
        Ok((stream, backend))
    }

    /// Lets the rings go on, if [`VhostServer::cancel_suspend`] came while a message was handled.
    fn cancel_owed(&self) {
        let mut state = self.state();
        let Some(connected) = &mut state.connected else { return };
        if !std::mem::take(&mut connected.owes_cancel) {
            return;
        }
        let backend = Arc::clone(&connected.backend);
        drop(state);
        backend.lock().unwrap_or_else(PoisonError::into_inner).cancel_stop();
    }

    /// Serves a hypervisor until it leaves or the server stops.
    fn serve(&self, stream: UnixStream, backend: &Arc<Mutex<Backend>>) -> io::Result<()> {
        let ended = self.obey(stream, backend);
        backend.lock().unwrap_or_else(PoisonError::into_inner).close();
        self.state().connected = None;
        ended
    }

    /// Obeys the messages of a hypervisor.
    fn obey(&self, stream: UnixStream, backend: &Arc<Mutex<Backend>>) -> io::Result<()> {
        let connection = stream.try_clone()?;
        let mut handler = BackendReqHandler::from_stream(stream, Arc::clone(backend));
        // `stop` closes the connection that it finds; this one may have come after it.
        while !self.is_stopping() {
            // An error is one of the connection, which reading the message finds too.
            let channel = BackendChannel::peek(&connection).ok().flatten();
            let handled = handler.handle_request();
            if handled.is_ok()
                && let Some(channel) = channel
            {
                backend.lock().unwrap_or_else(PoisonError::into_inner).set_channel(channel);
            }
            // After the last use of the backend's lock, which may have kept `cancel_suspend` off.
            self.cancel_owed();
            match handled {
                Ok(()) => {}
                Err(Error::Disconnected) => break,
                Err(error) if is_refusal(&error) => {
                    self.counts.log_error(&self.name, "a message is refused", &error);
                }
                Err(_) if self.is_stopping() => break,
                Err(error) => return Err(io::Error::other(error.to_string())),
            }
        }
        Ok(())
    }
}

/// Whether an error is the answer to one message, after which the connection goes on.
fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::InvalidParam | Error::InvalidOperation(_) | Error::ReqHandlerError(_))
}
