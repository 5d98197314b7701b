//! A server: one endpoint, an accepting thread, and a thread for each client.
//!
//! Control plane: locks are taken when a client connects or disconnects, never for an I/O.
#![allow(clippy::disallowed_types)] // Control plane only, as said above.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use blockyard_core::channel::Stats;
use blockyard_os::socket::{self, Family, Ready, Wake};
use blockyard_sync::atomics::{AtomicBool, Ordering};

use crate::client::{CUT_GRACE, Client, ConnectionInfo, ShutdownHandle};
use crate::endpoint::{Endpoint, ListenError};
use crate::exports::Exports;
use crate::listener::{Listener, Socket};
use crate::memory::{Lease, MemoryBudget};
use crate::pause::{
    Adopted, HANDSHAKES_MAX, INTERRUPT_INTERVAL, PauseError, PausedConnection, PausedServer,
};
use crate::session::{self, Resumable, SessionConfig, SessionEnd};
use crate::tls::{Acceptor, TlsConfig, TlsError, TlsMode};
use crate::transport::{Pipes, Transport};

/// The requested send buffer of sockets: a batch of replies fits, so that sending does not block.
const SEND_BUFFER_BYTES: i32 = 2 << 20;

/// The smallest requested send buffer.
const SEND_BUFFER_BYTES_MIN: i32 = 64 << 10;

/// How long the server waits before it accepts again when the system is out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The [`Server::place`] of sockets that another program made, such as systemd.
pub const ACTIVATED: &str = "activated";

/// The limits and options of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The most clients at once. A further one replaces the oldest that is still in its handshake;
    /// if there is none, it is disconnected at once.
    pub connections_max: usize,
    /// The most clients in their handshake at once; a further one replaces the oldest of them.
    pub handshakes_max: usize,
    /// How long a client may take from connecting to transmission.
    pub handshake_timeout: Duration,
    /// The time after a shutdown until clients are cut off. Meanwhile they can send the rest of a
    /// request and read their replies, and the device can complete requests.
    pub drain_timeout: Duration,
    /// TLS.
    pub tls: TlsConfig,
    /// The memory for connections; servers of one process share it.
    pub memory: Arc<MemoryBudget>,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            connections_max: 256,
            handshakes_max: 64,
            handshake_timeout: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(5),
            tls: TlsConfig::default(),
            memory: Arc::default(),
        }
    }
}

/// The reason for which a server cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The endpoint cannot be bound.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// TLS cannot be set up.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// A connection of an earlier process cannot be continued.
    #[error("the connection of client {peer}: {what}")]
    Resume {
        /// The client.
        peer: String,
        /// The reason.
        what: String,
    },
    /// TLS is not possible over pipes.
    #[error("stdio: TLS needs a socket, and standard input is none: use `off`")]
    TlsOnPipes,
    /// The system refused a thread or a descriptor.
    #[error("nbd server: {what}: {source}")]
    System {
        /// The operation.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// A running server. Dropping it shuts it down.
pub struct Server {
    shared: Arc<Shared>,
    /// `None` once joined. The thread returns its sockets.
    accepting: Mutex<Option<JoinHandle<Listener>>>,
    /// The sockets while no client is accepted.
    held: Mutex<Option<Listener>>,
}

/// A server whose sockets listen and that accepts no client yet: clients that connect wait.
/// Dropping it removes its sockets.
pub struct BoundServer {
    shared: Arc<Shared>,
    /// `None` for standard input and output, and once the accepting thread has it.
    listener: Option<Listener>,
    /// The file to remove at the end, of a socket that an earlier process made.
    inherits: Option<PathBuf>,
    /// The accepting thread, once there is one, which waits for the start.
    prepared: Option<PreparedThread>,
}

/// An accepting thread that waits for the start of its server.
struct PreparedThread {
    thread: JoinHandle<Listener>,
    /// Starts it, with the file that it removes at the end. Without a start it ends.
    start: Sender<Option<PathBuf>>,
}

/// The state that the accepting thread, the clients' threads and the owner share.
struct Shared {
    config: SessionConfig,
    options: ServerOptions,
    /// The endpoint as it was given; `activated` for a socket that another program made.
    place: String,
    /// At least one.
    addresses: Vec<String>,
    /// Host and port for URIs, if it listens on TCP.
    uri_host: Option<String>,
    stopping: AtomicBool,
    /// Whether no client is accepted, because the server pauses.
    holding: AtomicBool,
    /// The time at which clients are cut off; set when the server begins to stop.
    deadline: OnceLock<Instant>,
    /// Wakes the accepting thread.
    wake: Wake,
    clients: Mutex<Clients>,
    /// Notified when a client's thread ends, and when the server is finished.
    left: Condvar,
}

#[derive(Default)]
struct Clients {
    next: u64,
    here: HashMap<u64, Arc<Client>>,
    threads: HashMap<u64, JoinHandle<()>>,
    /// Clients whose threads are about to end and can be joined.
    ended: Vec<u64>,
    /// Whether connections that pause stay paused.
    pausing: bool,
    paused: Vec<PausedConnection>,
    finished: bool,
}

impl Clients {
    /// Makes room for one more client, by ending the oldest handshake if needed: a client that
    /// connects and sends nothing must not block others. `false` if there is no room.
    fn make_room(&self, options: &ServerOptions) -> bool {
        // Clients that were cut are ending, but their threads still count.
        if self.here.len() >= options.connections_max.saturating_add(options.handshakes_max) {
            return false;
        }
        let staying = || self.here.values().filter(|client| !client.is_cut());
        let handshakes = || staying().filter(|client| client.chosen.get().is_none());
        let full = staying().count() >= options.connections_max;
        if full || handshakes().count() >= options.handshakes_max {
            match handshakes().min_by_key(|client| client.id) {
                Some(oldest) => {
                    tracing::warn!(id = oldest.id, peer = oldest.peer, "cut off in its handshake");
                    oldest.cut();
                }
                None => return false,
            }
        }
        true
    }
}

impl Server {
    /// Starts serving exports at an endpoint.
    ///
    /// # Errors
    /// If the endpoint cannot be bound, the certificates are invalid, or the system refuses a
    /// thread.
    pub fn start(
        exports: Arc<Exports>,
        endpoint: Endpoint,
        options: ServerOptions,
    ) -> Result<Server, ServerError> {
        Server::bind(exports, endpoint, options)?.start()
    }

    /// Listens at an endpoint; clients are served from [`BoundServer::start`] on.
    ///
    /// # Errors
    /// If the endpoint cannot be bound, or the certificates are invalid.
    pub fn bind(
        exports: Arc<Exports>,
        endpoint: Endpoint,
        options: ServerOptions,
    ) -> Result<BoundServer, ServerError> {
        let host = match &endpoint {
            Endpoint::Tcp { host, .. } => Some(host.clone()),
            Endpoint::Unix(_) | Endpoint::Stdio => None,
        };
        let place = endpoint.to_string();
        Server::bind_by(exports, || Listener::open(endpoint), place, host, options)
    }

    /// Takes over the listening sockets of an earlier process, which were made for `endpoint`;
    /// `None` if another program made them. The file of a socket is removed at the end only if the
    /// server was started.
    ///
    /// # Errors
    /// If they are no such sockets, or the certificates are invalid.
    pub fn inherit(
        exports: Arc<Exports>,
        endpoint: Option<Endpoint>,
        sockets: Vec<OwnedFd>,
        options: ServerOptions,
    ) -> Result<BoundServer, ServerError> {
        let place = endpoint.as_ref().map_or_else(|| ACTIVATED.to_owned(), Endpoint::to_string);
        let (host, path) = match endpoint {
            Some(Endpoint::Tcp { host, .. }) => (Some(host), None),
            Some(Endpoint::Unix(place)) => (None, Some(place.path)),
            Some(Endpoint::Stdio) | None => (None, None),
        };
        let open = || Listener::inherit(sockets).map(Some);
        let mut bound = Server::bind_by(exports, open, place, host, options)?;
        bound.inherits = path;
        Ok(bound)
    }

    /// Takes over a socket that already listens, for example from systemd; clients are served from
    /// [`BoundServer::start`] on.
    ///
    /// # Errors
    /// If it is no such socket, or the certificates are invalid.
    pub fn adopt(
        exports: Arc<Exports>,
        socket: OwnedFd,
        options: ServerOptions,
    ) -> Result<BoundServer, ServerError> {
        let place = ACTIVATED.to_owned();
        Server::bind_by(exports, || Listener::adopt(socket).map(Some), place, None, options)
    }

    /// Listens at the sockets of `open`; `host` is the name that the user gave.
    fn bind_by(
        exports: Arc<Exports>,
        open: impl FnOnce() -> Result<Option<Listener>, ListenError>,
        place: String,
        host: Option<String>,
        options: ServerOptions,
    ) -> Result<BoundServer, ServerError> {
        let config = SessionConfig {
            exports,
            tls_mode: options.tls.mode,
            allow: Arc::new(options.tls.allow.clone()),
            acceptor: Acceptor::load(&options.tls)?,
            handshake_timeout: options.handshake_timeout,
        };
        let listener = open()?;
        let uri_host = listener.as_ref().and_then(|listener| listener.uri_host(host));
        let system = |what| move |source| ServerError::System { what, source };
        let shared = Arc::new(Shared {
            config,
            options,
            addresses: match &listener {
                Some(listener) => listener.sockets().iter().map(Socket::address).collect(),
                None => vec!["stdio".to_owned()],
            },
            place,
            uri_host,
            stopping: AtomicBool::new(false),
            holding: AtomicBool::new(false),
            deadline: OnceLock::new(),
            wake: Wake::new().map_err(system("making a wake"))?,
            clients: Mutex::default(),
            left: Condvar::new(),
        });
        Ok(BoundServer { shared, listener, inherits: None, prepared: None })
    }

    /// The endpoint as it was given; [`ACTIVATED`] for a socket that another program made.
    pub fn place(&self) -> &str {
        &self.shared.place
    }

    /// The address: `unix:PATH`, `tcp:ADDRESS:PORT` with the actual port, or `stdio`. The first of
    /// several addresses.
    pub fn local_addr(&self) -> &str {
        self.shared.address()
    }

    /// All addresses; several only if a host has several.
    pub fn local_addrs(&self) -> &[String] {
        &self.shared.addresses
    }

    /// The URI of an export for NBD clients; the empty name is the default export. `None` for
    /// standard input and output, which have none.
    pub fn uri(&self, export: &str) -> Option<String> {
        let scheme = match self.shared.options.tls.mode {
            TlsMode::Require => "nbds",
            TlsMode::Off | TlsMode::On => "nbd",
        };
        let export = escape(export, false);
        let address = self.shared.address();
        if let Some(path) = address.strip_prefix("unix:") {
            return Some(format!("{scheme}+unix:///{export}?socket={}", escape(path, true)));
        }
        self.shared.uri_host.as_ref().map(|host| format!("{scheme}://{host}/{export}"))
    }

    /// The connected clients, in the order of arrival.
    pub fn connections(&self) -> Vec<ConnectionInfo> {
        let clients = self.shared.clients();
        let mut infos: Vec<_> = clients.here.values().map(|client| client.info()).collect();
        drop(clients);
        infos.sort_by_key(|info| info.id);
        infos
    }

    /// The counters of the channel of a connection, by its number; `None` without this connection.
    /// A connection that another process has handed over begins at 0.
    pub fn channel_stats(&self, id: u64) -> Option<Stats> {
        let client = self.shared.clients().here.get(&id).cloned()?;
        Some(client.channels.sum())
    }

    /// Waits until the server is finished: for standard input and output when its client has
    /// disconnected, otherwise when it is shut down.
    pub fn wait(&self) {
        let mut clients = self.shared.clients();
        while !clients.finished {
            clients = self.shared.left.wait(clients).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The clients whose connections can never be paused, and why.
    pub fn unpausable(&self) -> Vec<(String, &'static str)> {
        let clients = self.shared.clients();
        let found = clients.here.values().filter(|client| client.never_pauses());
        found
            .map(|client| match client.chosen.get().is_some_and(|chosen| chosen.tls) {
                true => (client.peer.clone(), "its connection uses TLS"),
                false => (client.peer.clone(), "it is connected by pipes"),
            })
            .collect()
    }

    /// Accepts no more clients, which wait in the queues of the sockets, and lets those in their
    /// handshake end it. Returns after 500 ms at most; then it disconnects the clients that are
    /// still in their handshake.
    pub fn hold(&self) {
        let shared = &self.shared;
        // Release: pairs with the Acquire in `accepts`.
        shared.holding.store(true, Ordering::Release);
        shared.wake.raise();
        let accepting = self.accepting.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A panic of the thread was reported when it happened.
        if let Some(listener) = accepting.and_then(|accepting| accepting.join().ok()) {
            *self.held.lock().unwrap_or_else(PoisonError::into_inner) = Some(listener);
        }
        shared.wake.lower();
        let deadline = Instant::now() + HANDSHAKES_MAX;
        let mut clients = shared.clients();
        let is_new = |client: &&Arc<Client>| client.chosen.get().is_none();
        while clients.here.values().any(|client| is_new(&client)) && Instant::now() < deadline {
            let waited = shared.left.wait_timeout(clients, INTERRUPT_INTERVAL);
            clients = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        for client in clients.here.values().filter(is_new) {
            tracing::warn!(id = client.id, peer = client.peer, "cut off in its handshake");
            client.cut();
        }
    }

    /// Accepts no more clients, and pauses all connections between two requests. What a client has
    /// in flight is answered first, in `timeout`. Clients whose connections can never be paused are
    /// disconnected after their requests are answered, if the caller `disconnects` them.
    ///
    /// # Errors
    /// If a client has not paused in time, or never will. Then the server serves as before.
    pub fn pause(&self, timeout: Duration, disconnects: bool) -> Result<PausedServer, PauseError> {
        blockyard_os::interrupt::catch_interrupts()
            .map_err(|error| PauseError::System(error.to_string()))?;
        let shared = &self.shared;
        self.hold();
        let listener = self.held.lock().unwrap_or_else(PoisonError::into_inner).take();
        let since = Instant::now();
        let deadline = since + timeout;
        let mut clients = shared.clients();
        clients.pausing = true;
        let never = clients.here.values().filter(|client| client.never_pauses());
        let never: Vec<_> = never.cloned().collect();
        let seconds = timeout.as_secs();
        let failed = loop {
            match never.first() {
                Some(client) if !disconnects => {
                    break Some(PauseError::Never { peer: client.peer.clone() });
                }
                _ => never.iter().for_each(|client| client.drain()),
            }
            clients.here.values().for_each(|client| client.pause());
            let Some(first) = clients.here.values().next() else { break None };
            if Instant::now() >= deadline {
                break Some(PauseError::Busy { peer: first.peer.clone(), seconds });
            }
            let waited = shared.left.wait_timeout(clients, INTERRUPT_INTERVAL);
            clients = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        let connections = std::mem::take(&mut clients.paused);
        drop(clients);
        let paused = PausedServer { listener, connections, since };
        let Some(failed) = failed else { return Ok(paused) };
        if let Err(error) = self.resume(paused) {
            tracing::error!(%error, "a client is lost");
        }
        Err(failed)
    }

    /// Accepts clients again after [`Server::hold`], if the server was not paused.
    pub fn proceed(&self) {
        let listener = self.held.lock().unwrap_or_else(PoisonError::into_inner).take();
        let paused = PausedServer { listener, connections: Vec::new(), since: Instant::now() };
        if let Err(error) = self.resume(paused) {
            tracing::error!(%error, "no more clients are accepted");
        }
    }

    /// Continues what [`Server::pause`] paused. A connection whose export is gone, or has changed,
    /// is closed; the others are continued.
    ///
    /// # Errors
    /// The first connection that cannot be continued, or if the system refuses a thread.
    pub fn resume(&self, paused: PausedServer) -> Result<(), ServerError> {
        let shared = &self.shared;
        let PausedServer { listener, connections, .. } = paused;
        // The threads of the paused connections, whose numbers are used again.
        shared.join_ended();
        let mut clients = shared.clients();
        clients.pausing = false;
        clients.here.values().for_each(|client| client.proceed());
        drop(clients);
        let mut first = Ok(());
        for connection in connections {
            match shared.adopt(connection) {
                Ok(start) => Adopted { starts: vec![start] }.start(),
                Err(error) => first = first.and(Err(error)),
            }
        }
        // Release: pairs with the Acquire in `accepts`.
        shared.holding.store(false, Ordering::Release);
        if let Some(listener) = listener {
            let accepting = shared.start_accepting(listener, None)?;
            *self.accepting.lock().unwrap_or_else(PoisonError::into_inner) = Some(accepting);
        }
        first
    }

    /// Begins to stop without waiting: accepts no more clients, and asks the present ones to drain.
    /// The drain timeout runs from now on, so several servers that begin together end together.
    pub fn begin_shutdown(&self) {
        let shared = &self.shared;
        shared.deadline.get_or_init(|| Instant::now() + shared.options.drain_timeout);
        // Release: pairs with the Acquire in `stopping`.
        shared.stopping.store(true, Ordering::Release);
        shared.wake.raise();
        shared.clients().here.values().for_each(|client| client.drain());
    }

    /// Stops accepting, lets every client's requests be answered, disconnects them all, joins all
    /// threads and removes the unix socket. Clients that stall are cut off after the drain timeout.
    pub fn shutdown(self) {
        self.stop();
    }

    /// [`Server::shutdown`] for a shared server. Does nothing if it is already stopped.
    pub fn stop(&self) {
        self.begin_shutdown();
        let shared = &self.shared;
        let accepting = self.accepting.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(accepting) = accepting {
            // A panic of the thread was reported when it happened.
            drop(accepting.join());
        }
        drop(self.held.lock().unwrap_or_else(PoisonError::into_inner).take());
        let deadline = *shared.deadline.get_or_init(Instant::now);
        let mut clients = shared.clients();
        // Again: a client may have been accepted just then.
        clients.here.values().for_each(|client| client.drain());
        while !clients.here.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = shared.left.wait_timeout(clients, left);
            clients = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        clients.here.values().for_each(|client| client.cut());
        // They end at their next check; only a system call that does not return can delay one.
        let here = |clients: &mut Clients| !clients.here.is_empty();
        let waited = shared.left.wait_timeout_while(clients, CUT_GRACE, here);
        clients = waited.unwrap_or_else(PoisonError::into_inner).0;
        for client in clients.here.values() {
            tracing::warn!(
                id = client.id,
                peer = client.peer,
                "a client that was cut has not left"
            );
        }
        let Clients { threads, here, .. } = &mut *clients;
        let threads: Vec<_> = threads.drain().filter(|(id, _)| !here.contains_key(id)).collect();
        drop(clients);
        for (_, thread) in threads {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
        shared.clients().finished = true;
        shared.left.notify_all();
    }
}

impl BoundServer {
    /// The endpoint as it was given; [`ACTIVATED`] for a socket that another program made.
    pub fn place(&self) -> &str {
        &self.shared.place
    }

    /// Prepares connections of an earlier process to be continued, once the server is started:
    /// opens their exports.
    ///
    /// # Errors
    /// If one cannot be continued, because its export is not there or is another one. Then none
    /// is.
    pub fn adopt(&self, connections: Vec<PausedConnection>) -> Result<Adopted, ServerError> {
        let adopt = |connection| self.shared.adopt(connection);
        Ok(Adopted { starts: connections.into_iter().map(adopt).collect::<Result<_, _>>()? })
    }

    /// Starts the accepting thread, which accepts no client yet. After this [`BoundServer::start`]
    /// cannot fail, except on standard input and output.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn prepare(&mut self) -> Result<(), ServerError> {
        if let Some(listener) = self.listener.take() {
            let (start, starts) = channel();
            let thread = self.shared.start_accepting(listener, Some(starts))?;
            self.prepared = Some(PreparedThread { thread, start });
        }
        Ok(())
    }

    /// Starts serving clients, those that wait first.
    ///
    /// # Errors
    /// If the system refuses a thread or a descriptor.
    pub fn start(mut self) -> Result<Server, ServerError> {
        self.prepare()?;
        let shared = Arc::clone(&self.shared);
        let accepting = match self.prepared.take() {
            Some(PreparedThread { thread, start }) => {
                // A panic of the thread was reported when it happened.
                let _ = start.send(self.inherits.take());
                Some(thread)
            }
            None => {
                shared.serve_stdio()?;
                None
            }
        };
        Ok(Server { shared, accepting: Mutex::new(accepting), held: Mutex::default() })
    }
}

impl Drop for BoundServer {
    fn drop(&mut self) {
        if let Some(PreparedThread { thread, start }) = self.prepared.take() {
            drop(start);
            // A panic of the thread was reported when it happened.
            drop(thread.join());
        }
    }
}

impl fmt::Debug for BoundServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses = &self.shared.addresses;
        f.debug_struct("BoundServer").field("addresses", addresses).finish_non_exhaustive()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("addresses", &self.shared.addresses).finish_non_exhaustive()
    }
}

/// Percent-encodes characters that are not allowed in a URI's path or query.
fn escape(text: &str, slash: bool) -> String {
    let plain = |byte: u8| {
        byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || (slash && byte == b'/')
    };
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if plain(byte) {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

impl Shared {
    fn address(&self) -> &str {
        &self.addresses[0]
    }

    fn clients(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether clients are accepted now.
    fn accepts(&self) -> bool {
        // Acquire: pairs with the Release in `Server::hold`.
        !self.stopping() && !self.holding.load(Ordering::Acquire)
    }

    /// Starts the accepting thread. It waits for `starts`, if there is one, and ends without a
    /// start.
    fn start_accepting(
        self: &Arc<Shared>,
        mut listener: Listener,
        starts: Option<Receiver<Option<PathBuf>>>,
    ) -> Result<JoinHandle<Listener>, ServerError> {
        let shared = Arc::clone(self);
        let accept = move || {
            match starts.map(|starts| starts.recv()) {
                Some(Err(_)) => return listener,
                Some(Ok(Some(path))) => listener.own(path),
                Some(Ok(None)) | None => {}
            }
            shared.accept_all(&listener);
            listener
        };
        let thread = thread::Builder::new().name("nbd-accept".to_owned()).spawn(accept);
        thread.map_err(|source| ServerError::System { what: "starting a thread", source })
    }

    fn stopping(&self) -> bool {
        // Acquire: pairs with the Release in `Server::stop`.
        self.stopping.load(Ordering::Acquire)
    }

    /// The loop of the accepting thread.
    fn accept_all(self: &Arc<Shared>, listener: &Listener) {
        while self.accepts() {
            match socket::wait_readable(listener.sockets(), &self.wake) {
                Ok(Ready::Yes) => {}
                Ok(Ready::Woken | Ready::No) => continue,
                Err(error) => {
                    tracing::error!(address = self.address(), %error, "cannot wait for clients");
                    return;
                }
            }
            for socket in listener.sockets() {
                match socket.accept() {
                    Ok(Some((client, peer))) => self.admit(client, peer),
                    Ok(None) => {}
                    Err(error) => {
                        // Out of descriptors or memory: clients that disconnect make room.
                        let address = socket.address();
                        tracing::warn!(address, %error, "cannot accept a client");
                        self.pause();
                    }
                }
            }
            self.join_ended();
        }
    }

    /// Waits a short time, or until the server stops.
    fn pause(&self) {
        let clients = self.clients();
        drop(self.left.wait_timeout(clients, ACCEPT_PAUSE));
    }

    /// Joins the threads of clients that have left.
    fn join_ended(&self) {
        let mut clients = self.clients();
        let ended = std::mem::take(&mut clients.ended);
        let threads: Vec<_> = ended.iter().filter_map(|id| clients.threads.remove(id)).collect();
        drop(clients);
        for thread in threads {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
    }

    /// The send buffer of one more client. It is the system's memory and not part of the budget,
    /// but all send buffers together are bounded in proportion to the budget.
    fn send_buffer_bytes(&self) -> i32 {
        let quarter = self.options.memory.usage().limit_bytes / 4;
        let part = quarter / (self.clients().here.len() as u64 + 1);
        let part = i32::try_from(part).unwrap_or(i32::MAX);
        part.clamp(SEND_BUFFER_BYTES_MIN, SEND_BUFFER_BYTES)
    }

    /// Starts a thread for a client, if there is room for it.
    fn admit(self: &Arc<Shared>, socket: Arc<OwnedFd>, peer: String) {
        socket::set_send_buffer(socket.as_ref(), self.send_buffer_bytes());
        socket::set_timeouts(socket.as_ref(), self.options.memory.blocked_max());
        let line = ShutdownHandle::Socket(Arc::clone(&socket));
        let transport = Transport::Socket(Arc::clone(&socket));
        let left = match socket::leaves_descriptors(socket.as_ref()) {
            true => self.start_client(transport, Some(socket), peer, line),
            false => Err(io::Error::other(format!(
                "{peer}: few descriptors are left; raise the limit of open files (ulimit -n)"
            ))),
        };
        if let Err(error) = left {
            tracing::warn!(address = self.address(), %error, "a client was turned away");
        }
    }

    fn start_client(
        self: &Arc<Shared>,
        transport: Transport,
        socket: Option<Arc<OwnedFd>>,
        peer: String,
        line: ShutdownHandle,
    ) -> io::Result<()> {
        let mut clients = self.clients();
        if !clients.make_room(&self.options) {
            let max = self.options.connections_max;
            return Err(io::Error::other(format!("{peer}: there are {max} clients already")));
        }
        let lease = self.lease(&peer)?;
        let id = clients.next;
        clients.next += 1;
        let client = Client::new(id, peer, line, lease);
        self.spawn(&mut clients, client, move |shared, client| {
            session::run(&shared.config, transport, socket, client).map_err(|it| it.to_string())
        })
    }

    /// The memory of one more connection.
    fn lease(&self, peer: &str) -> io::Result<Lease> {
        let lease = self.options.memory.admit();
        lease.ok_or_else(|| {
            io::Error::other(format!("{peer}: the memory for NBD clients is in use"))
        })
    }

    /// Starts the thread of a client, which runs `session`.
    fn spawn(
        self: &Arc<Shared>,
        clients: &mut Clients,
        client: Arc<Client>,
        session: impl FnOnce(&Shared, &Arc<Client>) -> Result<SessionEnd, String> + Send + 'static,
    ) -> io::Result<()> {
        let id = client.id;
        clients.here.insert(id, Arc::clone(&client));
        let shared = Arc::clone(self);
        let thread = thread::Builder::new().name(format!("nbd-{id}")).spawn(move || {
            let departure = Departure { shared: &shared, id };
            shared.serve(&client, session(&shared, &client));
            drop(departure);
        });
        match thread {
            Ok(thread) => {
                clients.threads.insert(id, thread);
                Ok(())
            }
            Err(error) => {
                clients.here.remove(&id);
                Err(error)
            }
        }
    }

    /// Continues a connection that was paused, as often as a pause is given up, until its client
    /// leaves or it stays paused.
    fn serve(&self, client: &Arc<Client>, mut ended: Result<SessionEnd, String>) {
        loop {
            let paused = match ended {
                Ok(SessionEnd::Paused(paused)) => *paused,
                ended => return log_end(client, ended),
            };
            let mut clients = self.clients();
            if clients.pausing {
                clients.paused.push(paused);
                return;
            }
            drop(clients);
            // The pause was given up just then.
            let resumed = Resumable::new(&self.config, &paused, client);
            ended = resumed
                .map_err(|error| error.to_string())
                .and_then(|resumed| resumed.serve().map_err(|error| error.to_string()));
        }
    }

    /// Starts the thread of a paused connection. The thread opens the export, and continues the
    /// connection when the caller starts it.
    fn adopt(self: &Arc<Shared>, paused: PausedConnection) -> Result<Sender<()>, ServerError> {
        let state = &paused.state;
        let refused = |what: String| ServerError::Resume { peer: state.peer.clone(), what };
        let lease = self.lease(&state.peer).map_err(|error| refused(error.to_string()))?;
        let line = ShutdownHandle::Socket(Arc::clone(&paused.socket));
        let (id, since) = (state.id, state.since);
        let client = Client::since(id, state.peer.clone(), since, line, lease, &state.counts);
        let (report, reports) = channel();
        let (start, starts) = channel();
        let refused_peer = state.peer.clone();
        let session = move |shared: &Shared, client: &Arc<Client>| {
            let resumed = Resumable::new(&shared.config, &paused, client);
            // The socket of a connection that is not continued stays open elsewhere.
            drop(paused);
            let end = resumed.as_ref().err().map(ToString::to_string);
            // The server waits for it.
            let _ = report.send(end.clone());
            match (resumed, starts.recv()) {
                (Ok(resumed), Ok(())) => resumed.serve().map_err(|error| error.to_string()),
                _ => Err(end.unwrap_or_else(|| "it was not continued".to_owned())),
            }
        };
        let mut clients = self.clients();
        clients.next = clients.next.max(id.saturating_add(1));
        let spawned = self.spawn(&mut clients, client, session);
        drop(clients);
        let refused = |what: String| ServerError::Resume { peer: refused_peer.clone(), what };
        spawned.map_err(|error| refused(error.to_string()))?;
        match reports.recv() {
            Ok(None) => Ok(start),
            Ok(Some(what)) => Err(refused(what)),
            Err(_) => Err(refused("its thread ended".to_owned())),
        }
    }

    /// Serves one client on standard input and output.
    fn serve_stdio(self: &Arc<Shared>) -> Result<(), ServerError> {
        let system = |what| move |source| ServerError::System { what, source };
        let duplicate = |fd: &dyn AsFdObject| {
            fd.fd().try_clone_to_owned().map_err(system("duplicating standard input or output"))
        };
        let input = duplicate(&io::stdin())?;
        let output = duplicate(&io::stdout())?;
        let peer = "stdio".to_owned();
        let started = match socket::family(&input) {
            Family::Unix | Family::Inet => {
                // nbdinfo and others pass one socket as both.
                let socket = Arc::new(input);
                let line = ShutdownHandle::Socket(Arc::clone(&socket));
                let transport = Transport::Socket(Arc::clone(&socket));
                self.start_client(transport, Some(socket), peer, line)
            }
            Family::OtherSocket | Family::NoSocket => {
                if self.config.tls_mode != TlsMode::Off {
                    return Err(ServerError::TlsOnPipes);
                }
                let wake = || Wake::new().map(Arc::new).map_err(system("making a wake"));
                let (drain, cut) = (wake()?, wake()?);
                let line =
                    ShutdownHandle::Pipes { drain: Arc::clone(&drain), cut: Arc::clone(&cut) };
                let transport = Transport::Pipes(Pipes { input, output, drain, cut });
                self.start_client(transport, None, peer, line)
            }
        };
        started.map_err(system("starting a thread"))
    }
}

/// Logs the end of a client's session.
fn log_end(client: &Client, ended: Result<SessionEnd, String>) {
    let (id, peer) = (client.id, &client.peer);
    match ended {
        Ok(_) => tracing::debug!(id, peer, "client left"),
        Err(error) => tracing::info!(id, peer, %error, "client lost"),
    }
}

/// `AsFd` as a trait object, for two otherwise unrelated types.
trait AsFdObject {
    fn fd(&self) -> std::os::fd::BorrowedFd<'_>;
}

impl<T: AsFd> AsFdObject for T {
    fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.as_fd()
    }
}

/// Removes a client when its thread ends in any way.
struct Departure<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Departure<'_> {
    fn drop(&mut self) {
        let mut clients = self.shared.clients();
        clients.here.remove(&self.id);
        clients.ended.push(self.id);
        clients.finished |= self.shared.address() == "stdio";
        drop(clients);
        self.shared.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn clients_come_to_every_socket() {
        let sockets = ["127.0.0.1:0", "127.0.0.2:0"].map(|at| TcpListener::bind(at).unwrap());
        let addresses = sockets.each_ref().map(|socket| socket.local_addr().unwrap());
        let open = || Ok(Some(Listener::new(sockets.map(Socket::Tcp).into(), None).unwrap()));
        let place = "tcp:localhost:0".to_owned();
        let server = Server::bind_by(Exports::new(), open, place, None, ServerOptions::default());
        let server = server.unwrap().start().unwrap();
        for (address, said) in addresses.iter().zip(server.local_addrs()) {
            assert_eq!(*said, format!("tcp:{address}"));
            let mut greeting = [0; 8];
            TcpStream::connect(address).unwrap().read_exact(&mut greeting).unwrap();
            assert_eq!(&greeting, b"NBDMAGIC");
        }
    }

    #[test]
    fn uris_escape_what_they_must() {
        assert_eq!(escape("a b/c", false), "a%20b%2Fc");
        assert_eq!(escape("/run/x y.sock", true), "/run/x%20y.sock");
    }
}
