//! A server: listening sockets and an accepting thread. The threads that serve its connections may
//! serve those of other servers too (`connection_threads.rs`).
//!
//! ```text
//! ACCEPTS ── hold ──▸ HOLDS ── proceed ──▸ ACCEPTS
//!    └──────── stop ────┴──▸ STOPPED
//! ```
//!
//! While a server holds, hosts that connect wait in the queues of its sockets. Those that it has
//! stay, until `disconnect`.
//!
//! Control plane: locks are taken when a host connects or disconnects, never for an I/O.
#![allow(clippy::disallowed_types)] // Control plane only, as said above.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use blockyard_core::channel::Stats;
use blockyard_os::socket::{self, Ready, Wake};
use blockyard_sync::atomics::{AtomicBool, Ordering};

use crate::connection_threads::ConnectionThreads;
use crate::fabrics::DISCOVERY_NQN;
use crate::host_link::{CUT_GRACE, HostLink, LinkInfo};
use crate::host_log::HostLogs;
use crate::session::SessionShared;
use crate::subsystems::Subsystems;

/// The requested send buffer of sockets: a batch of PDUs fits, so that sending does not block.
const SEND_BUFFER_BYTES: i32 = 1 << 20;

/// How long the server waits before it accepts again when the system is out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The most connections of a server at once, by default.
pub const CONNECTIONS_MAX: usize = 1024;

/// The limits of a server.
#[derive(Clone, Debug)]
pub struct TargetOptions {
    /// The most connections at once. A further one replaces the oldest that has no Connect yet or
    /// owes an authentication, or else the oldest of discovery; if there is none, it is
    /// disconnected at once.
    pub connections_max: usize,
    /// The time after a shutdown until connections are cut off. Meanwhile the device can complete
    /// commands.
    pub drain_timeout: Duration,
    /// Whether hosts find only the discovery subsystem at this server.
    pub discovery_only: bool,
    /// Whether hosts wait in the queues of the sockets until [`TargetServer::proceed`].
    pub holds: bool,
}

impl Default for TargetOptions {
    fn default() -> TargetOptions {
        let (connections_max, drain_timeout) = (CONNECTIONS_MAX, Duration::from_secs(5));
        TargetOptions { connections_max, drain_timeout, discovery_only: false, holds: false }
    }
}

/// A running server. Dropping it shuts it down.
pub struct TargetServer {
    shared: Arc<TargetShared>,
    /// `None` once joined.
    accepting: Mutex<Option<JoinHandle<()>>>,
    /// The sockets, while the accepting thread has them.
    listeners: Weak<[TcpListener]>,
    /// Kept until the connections have ended.
    _threads: Arc<ConnectionThreads>,
}

/// The state that the accepting thread, the connections' threads and the owner share. It does not
/// own the threads, which would have to join themselves.
pub(crate) struct TargetShared {
    pub(crate) session: Arc<SessionShared>,
    options: TargetOptions,
    addresses: Vec<SocketAddr>,
    stopping: AtomicBool,
    /// Whether no host is accepted. Locked while one is.
    holds: Mutex<bool>,
    /// Wakes the accepting thread.
    wake: Wake,
    links: Mutex<Links>,
    /// Notified when a connection ends.
    left: Condvar,
}

#[derive(Default)]
struct Links {
    next: u64,
    here: HashMap<u64, Arc<HostLink>>,
}

impl Links {
    /// Makes room for one more connection if needed: a host that connects and proves nothing must
    /// not block others. Cuts the oldest that has no Connect or owes an authentication; else the
    /// oldest of discovery, which asks for no secret and is for hosts in no list too. Returns the
    /// one that was cut.
    ///
    /// # Errors
    /// If there is none.
    fn make_room(&self, connections_max: usize) -> io::Result<Option<Arc<HostLink>>> {
        let is_full =
            || io::Error::other(format!("there are {connections_max} connections already"));
        if self.here.len() < connections_max {
            return Ok(None);
        }
        // Connections that were cut are ending, but they still have memory.
        if self.here.len() >= 2 * connections_max {
            return Err(is_full());
        }
        let staying = || self.here.values().filter(|link| !link.is_cut());
        if staying().count() < connections_max {
            return Ok(None);
        }
        let rank = |link: &Arc<HostLink>| match link.role.get() {
            None => Some(0),
            Some(role) if role.subsystem == DISCOVERY_NQN => Some(1),
            Some(_) => None,
        };
        let unproved = staying().filter_map(|link| Some(((rank(link)?, link.id), link)));
        let (_, oldest) = unproved.min_by_key(|(order, _)| *order).ok_or_else(is_full)?;
        oldest.cut();
        Ok(Some(Arc::clone(oldest)))
    }
}

impl TargetServer {
    /// Serves subsystems on sockets that listen already, at least one, with threads of its own.
    ///
    /// # Errors
    /// If the system refuses a thread or a descriptor.
    pub fn start(
        subsystems: Arc<Subsystems>,
        listeners: Vec<TcpListener>,
        options: TargetOptions,
    ) -> io::Result<TargetServer> {
        let threads = ConnectionThreads::new(ConnectionThreads::default_threads());
        TargetServer::start_on(threads, subsystems, listeners, options)
    }

    /// Serves subsystems as [`TargetServer::start`], with threads that may be those of other
    /// servers.
    ///
    /// # Errors
    /// If the system refuses a thread or a descriptor.
    pub fn start_on(
        threads: Arc<ConnectionThreads>,
        subsystems: Arc<Subsystems>,
        listeners: Vec<TcpListener>,
        options: TargetOptions,
    ) -> io::Result<TargetServer> {
        let mut addresses = Vec::new();
        for listener in &listeners {
            listener.set_nonblocking(true)?;
            addresses.push(listener.local_addr()?);
        }
        let TargetOptions { discovery_only, holds, .. } = options;
        let dh = Arc::clone(&threads.dh);
        let session = SessionShared { subsystems, discovery_only, dh };
        let shared = Arc::new(TargetShared {
            session: Arc::new(session),
            options,
            addresses,
            stopping: AtomicBool::new(false),
            holds: Mutex::new(holds),
            wake: Wake::new()?,
            links: Mutex::default(),
            left: Condvar::new(),
        });
        let listeners: Arc<[TcpListener]> = listeners.into();
        let sockets = Arc::downgrade(&listeners);
        let accept = {
            let (shared, threads) = (Arc::clone(&shared), Arc::clone(&threads));
            // The thread owns the listeners: they are closed when it has ended.
            move || shared.accept_all(&threads, &listeners)
        };
        let accepting = thread::Builder::new().name("nvme-accept".to_owned()).spawn(accept)?;
        if !discovery_only {
            shared.session.subsystems.add_ports(&shared.addresses);
        }
        let accepting = Mutex::new(Some(accepting));
        Ok(TargetServer { shared, accepting, listeners: sockets, _threads: threads })
    }

    /// The addresses, with the actual port.
    pub fn local_addrs(&self) -> &[SocketAddr] {
        &self.shared.addresses
    }

    /// The connections, in the order of arrival.
    pub fn connections(&self) -> Vec<LinkInfo> {
        let links: Vec<_> = self.shared.links().here.values().cloned().collect();
        let mut infos: Vec<_> = links.iter().map(|link| link.info()).collect();
        infos.sort_by_key(|info| info.id);
        infos
    }

    /// The counters of the channels of a connection, by its number and the address of its host;
    /// `None` without this connection.
    pub fn channel_stats(&self, id: u64, peer: &str) -> Option<Stats> {
        let link = self.shared.links().here.get(&id).cloned()?;
        (link.peer == peer).then(|| link.channels.sum())
    }

    /// The listening sockets, for another process.
    ///
    /// # Errors
    /// If the accepting thread has ended, or the system refuses descriptors.
    pub fn sockets(&self) -> io::Result<Vec<OwnedFd>> {
        let listeners = self.listeners.upgrade().ok_or(ErrorKind::NotConnected)?;
        listeners.iter().map(|listener| listener.try_clone().map(OwnedFd::from)).collect()
    }

    /// Accepts no more hosts, which wait in the queues of the sockets. When this returns, no host
    /// is being accepted.
    pub fn hold(&self) {
        *self.shared.holds() = true;
        self.shared.wake.raise();
    }

    /// Accepts hosts, also those that have waited.
    pub fn proceed(&self) {
        *self.shared.holds() = false;
        self.shared.wake.raise();
    }

    /// Asks the present hosts to drain.
    pub fn begin_disconnect(&self) {
        self.shared.links().here.values().for_each(|link| link.request_end());
    }

    /// Begins to stop without waiting: accepts no more hosts, and asks the present ones to drain.
    pub fn begin_shutdown(&self) {
        let shared = &self.shared;
        // Release: pairs with the Acquire in `is_stopping`.
        shared.stopping.store(true, Ordering::Release);
        shared.wake.raise();
        self.begin_disconnect();
    }

    /// Stops accepting, lets the device complete every host's commands, and disconnects all hosts
    /// when they have their answers. Connections that take too long are cut off. Does nothing if
    /// the server was stopped before.
    pub fn stop(&self) {
        TargetServer::stop_all(&[self], Instant::now() + self.shared.options.drain_timeout);
    }

    /// Stops several servers as [`TargetServer::stop`]: all share the deadline, and the time after
    /// it in which connections that were cut off end.
    pub fn stop_all(servers: &[&TargetServer], deadline: Instant) {
        servers.iter().for_each(|server| server.begin_shutdown());
        let is_first = |server: &&TargetServer| server.stop_accepting();
        let stopped: Vec<_> = servers.iter().copied().filter(is_first).collect();
        // Also hosts that were accepted just then.
        TargetServer::disconnect_all(&stopped, deadline);
        servers.iter().for_each(|server| server.shared.logs().flush());
    }

    /// Waits for the end of the accepting thread; `false` if an earlier call has.
    fn stop_accepting(&self) -> bool {
        let accepting = self.accepting.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(accepting) = accepting else { return false };
        // A panic of the thread was reported when it happened.
        let _ = accepting.join();
        let shared = &self.shared;
        if !shared.options.discovery_only {
            shared.session.subsystems.remove_ports(&shared.addresses);
        }
        true
    }

    /// Lets the device complete every host's commands, and disconnects all hosts when they have
    /// their answers. Connections that have not ended at the deadline are cut off.
    pub fn disconnect(&self, deadline: Instant) {
        TargetServer::disconnect_all(&[self], deadline);
    }

    /// Disconnects the hosts of several servers as [`TargetServer::disconnect`]: all share the
    /// deadline, and the time after it in which connections that were cut off end.
    pub fn disconnect_all(servers: &[&TargetServer], deadline: Instant) {
        servers.iter().for_each(|server| server.begin_disconnect());
        servers.iter().for_each(|server| drop(server.wait_for_hosts(deadline)));
        for server in servers {
            server.shared.links().here.values().for_each(|link| link.cut());
        }
        // They stop answering their hosts at their next turn, and end when the device has completed
        // their commands.
        let deadline = Instant::now() + CUT_GRACE;
        for server in servers {
            for link in server.wait_for_hosts(deadline) {
                tracing::warn!(id = link.id, peer = link.peer, "a host that was cut has not left");
            }
        }
    }

    /// Waits until all connections have ended, or the deadline. Returns those that have not.
    fn wait_for_hosts(&self, deadline: Instant) -> Vec<Arc<HostLink>> {
        let here = |links: &mut Links| !links.here.is_empty();
        let (links, left) = (self.shared.links(), socket::left(deadline));
        let waited = self.shared.left.wait_timeout_while(links, left, here);
        waited.unwrap_or_else(PoisonError::into_inner).0.here.values().cloned().collect()
    }
}

impl Drop for TargetServer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for TargetServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses = &self.shared.addresses;
        f.debug_struct("TargetServer").field("addresses", addresses).finish_non_exhaustive()
    }
}

impl TargetShared {
    fn links(&self) -> MutexGuard<'_, Links> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn holds(&self) -> MutexGuard<'_, bool> {
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopping(&self) -> bool {
        // Acquire: pairs with the Release in `begin_shutdown`.
        self.stopping.load(Ordering::Acquire)
    }

    /// The loop of the accepting thread.
    fn accept_all(
        self: &Arc<TargetShared>,
        threads: &ConnectionThreads,
        listeners: &[TcpListener],
    ) {
        while !self.is_stopping() {
            // While the server holds, it polls no socket.
            let sockets = if *self.holds() { &listeners[..0] } else { listeners };
            match socket::wait_readable(sockets, &self.wake) {
                Ok(Ready::Yes) => {}
                Ok(Ready::Woken) => {
                    self.wake.lower();
                    continue;
                }
                Ok(Ready::No) => continue,
                Err(error) => {
                    tracing::error!(%error, "cannot wait for NVMe hosts");
                    return;
                }
            }
            for listener in listeners {
                let holds = self.holds();
                if *holds {
                    break;
                }
                match listener.accept() {
                    Ok((stream, address)) => {
                        self.admit(threads, stream, &format!("tcp:{address}"));
                    }
                    Err(error) if is_gone(&error) => {}
                    Err(error) => {
                        // Out of descriptors or memory: hosts that disconnect make room.
                        drop(holds);
                        if self.logs().accepts.permits() {
                            tracing::warn!(%error, "cannot accept an NVMe host");
                        }
                        let links = self.links();
                        drop(self.left.wait_timeout(links, ACCEPT_PAUSE));
                    }
                }
            }
        }
    }

    /// The bounds of log lines that hosts cause.
    pub(crate) fn logs(&self) -> &HostLogs {
        &self.session.subsystems.logs
    }

    /// Notes that a connection has ended.
    pub(crate) fn end_link(&self, id: u64) {
        self.links().here.remove(&id);
        self.left.notify_all();
    }

    /// Gives a connection to a thread, if there is room for it.
    fn admit(self: &Arc<TargetShared>, threads: &ConnectionThreads, stream: TcpStream, peer: &str) {
        // PDUs are sent in batches, so waiting for more would only delay them. The connection works
        // without these options too.
        let _ = stream.set_nodelay(true);
        socket::keep_alive(&stream);
        socket::set_send_buffer(&stream, SEND_BUFFER_BYTES);
        let started = match socket::leaves_descriptors(stream.as_fd()) {
            true => self.start_link(threads, stream, peer),
            false => Err(io::Error::other(
                "few descriptors are left; raise the limit of open files (ulimit -n)",
            )),
        };
        if let Err(error) = started
            && self.logs().accepts.permits()
        {
            tracing::warn!(peer, %error, "an NVMe host was turned away");
        }
    }

    fn start_link(
        self: &Arc<TargetShared>,
        threads: &ConnectionThreads,
        stream: TcpStream,
        peer: &str,
    ) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        let address = stream.local_addr()?;
        let place = threads.place()?;
        let mut links = self.links();
        let cut = links.make_room(self.options.connections_max)?;
        let id = links.next;
        links.next += 1;
        let link = Arc::new(HostLink::new(id, peer.to_owned(), place.wake()));
        let admitted = place.admit(self, &link, (stream, address));
        if admitted.is_ok() {
            // The lock is held: the connection cannot have ended yet.
            links.here.insert(id, link);
        }
        drop(links);
        if let Some(link) = cut
            && self.logs().accepts.permits()
        {
            tracing::warn!(id = link.id, peer = link.peer, "cut off for one more connection");
        }
        admitted
    }
}

/// Whether an accept failed because the host disconnected or no host waits.
fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted
    )
}
