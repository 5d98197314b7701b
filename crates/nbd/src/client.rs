//! A connection as the control plane sees it: the client, its statistics, and how to end it.
#![allow(clippy::disallowed_types)] // Control plane: a flag that is set once, and read in passing.

use std::fmt;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use blockyard_core::channel::ChannelGroup;
use blockyard_os::interrupt::ThreadNumber;
use blockyard_os::socket::{self, Wake};
use blockyard_sync::atomics::{AtomicBool, Ordering};
use blockyard_sync::counter::Counter;

use crate::memory::Lease;
use crate::pause::ConnectionCounts;
use crate::wire::Style;

/// How long a disconnected client's thread may take to end before a removal stops waiting for it.
pub(crate) const CUT_GRACE: Duration = Duration::from_secs(2);

/// Counters of a connection. Its thread writes them, any thread reads them.
#[derive(Debug, Default)]
pub(crate) struct ClientStats {
    pub(crate) requests: Counter,
    pub(crate) read_bytes: Counter,
    pub(crate) written_bytes: Counter,
    pub(crate) errors: Counter,
    pub(crate) batches: Counter,
}

/// The client's choices, known after the handshake.
#[derive(Clone, Debug)]
pub(crate) struct NegotiatedOptions {
    pub(crate) export: String,
    pub(crate) style: Style,
    pub(crate) contexts: bool,
    pub(crate) tls: bool,
}

/// A connection as other threads see it.
pub(crate) struct Client {
    pub(crate) id: u64,
    pub(crate) peer: String,
    pub(crate) since: SystemTime,
    pub(crate) stats: ClientStats,
    /// The channel of the connection, once it has one.
    pub(crate) channels: ChannelGroup,
    /// The connection's share of the memory for connections.
    pub(crate) lease: Lease,
    pub(crate) chosen: OnceLock<NegotiatedOptions>,
    /// Whether it was cut: its thread ends at the next check, with or without requests in flight.
    cut: AtomicBool,
    /// Whether the connection is to pause between two requests.
    pausing: AtomicBool,
    /// The thread of the connection in transmission, if its socket can be paused.
    thread: OnceLock<ThreadNumber>,
    shutdown: ShutdownHandle,
}

/// The transport of the connection.
pub(crate) enum ShutdownHandle {
    /// A socket, shared so that its descriptor is not reused while another thread shuts it down.
    Socket(Arc<OwnedFd>),
    /// Two pipes. Another thread cannot shut them down, so the connection's thread polls two wakes.
    Pipes {
        /// Stops reading after the bytes that have arrived.
        drain: Arc<Wake>,
        /// Stops writing.
        cut: Arc<Wake>,
    },
}

impl ClientStats {
    /// Counters that continue those of an earlier connection.
    fn from_counts(counts: &ConnectionCounts) -> ClientStats {
        let stats = ClientStats::default();
        stats.requests.add(counts.requests);
        stats.read_bytes.add(counts.read_bytes);
        stats.written_bytes.add(counts.written_bytes);
        stats.errors.add(counts.errors);
        stats.batches.add(counts.batches);
        stats
    }

    pub(crate) fn counts(&self) -> ConnectionCounts {
        ConnectionCounts {
            requests: self.requests.get(),
            read_bytes: self.read_bytes.get(),
            written_bytes: self.written_bytes.get(),
            errors: self.errors.get(),
            batches: self.batches.get(),
        }
    }
}

impl Client {
    pub(crate) fn new(
        id: u64,
        peer: String,
        shutdown: ShutdownHandle,
        lease: Lease,
    ) -> Arc<Client> {
        Client::since(id, peer, SystemTime::now(), shutdown, lease, &ConnectionCounts::default())
    }

    /// A client that was accepted earlier, perhaps by another process.
    pub(crate) fn since(
        id: u64,
        peer: String,
        since: SystemTime,
        shutdown: ShutdownHandle,
        lease: Lease,
        counts: &ConnectionCounts,
    ) -> Arc<Client> {
        let client = Arc::new(Client {
            id,
            peer,
            since,
            stats: ClientStats::from_counts(counts),
            channels: ChannelGroup::default(),
            lease,
            chosen: OnceLock::new(),
            cut: AtomicBool::new(false),
            pausing: AtomicBool::new(false),
            thread: OnceLock::new(),
            shutdown,
        });
        let evicted = Arc::downgrade(&client);
        client.lease.cut_with(move || {
            if let Some(client) = evicted.upgrade() {
                client.cut();
            }
        });
        client
    }

    /// Asks the connection to answer the requests that it has received and then to end.
    pub(crate) fn drain(&self) {
        match &self.shutdown {
            // Wakes a reader at once: it reads what has arrived, and then the end.
            ShutdownHandle::Socket(socket) => socket::shutdown(socket.as_ref(), Shutdown::Read),
            ShutdownHandle::Pipes { drain, .. } => drain.raise(),
        }
    }

    /// Notes the calling thread as that of the connection, which can be paused from now on.
    pub(crate) fn note_thread(&self) {
        // A connection has one thread.
        let _ = self.thread.set(ThreadNumber::current());
    }

    /// Whether the connection can be paused now: it is in transmission on a socket without TLS.
    pub(crate) fn can_pause(&self) -> bool {
        self.thread.get().is_some()
    }

    /// Whether the connection can never be paused: its transport has a state of its own.
    pub(crate) fn never_pauses(&self) -> bool {
        matches!(self.shutdown, ShutdownHandle::Pipes { .. })
            || self.chosen.get().is_some_and(|chosen| chosen.tls)
    }

    /// Asks the connection to pause. To be repeated until it has: the thread may be about to sleep.
    pub(crate) fn pause(&self) {
        // Relaxed: the flag publishes no data.
        self.pausing.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.get() {
            thread.interrupt();
        }
    }

    /// Withdraws the request to pause.
    pub(crate) fn proceed(&self) {
        // Relaxed: as in `pause`.
        self.pausing.store(false, Ordering::Relaxed);
    }

    /// Whether the connection is to pause.
    #[inline]
    pub(crate) fn is_pausing(&self) -> bool {
        // Relaxed: as in `pause`.
        self.pausing.load(Ordering::Relaxed)
    }

    /// Whether the connection is to end regardless of requests in flight.
    pub(crate) fn is_cut(&self) -> bool {
        // Relaxed: the flag publishes no data.
        self.cut.load(Ordering::Relaxed)
    }

    /// Ends the connection's transport, sent or not, and its wait for the device.
    pub(crate) fn cut(&self) {
        // Relaxed: as in `is_cut`; ending the transport wakes the connection's thread.
        self.cut.store(true, Ordering::Relaxed);
        match &self.shutdown {
            ShutdownHandle::Socket(socket) => socket::shutdown(socket.as_ref(), Shutdown::Both),
            ShutdownHandle::Pipes { drain, cut } => {
                drain.raise();
                cut.raise();
            }
        }
    }

    pub(crate) fn info(&self) -> ConnectionInfo {
        let chosen = self.chosen.get();
        ConnectionInfo {
            id: self.id,
            peer: self.peer.clone(),
            since: self.since,
            export: chosen.map(|chosen| chosen.export.clone()),
            tls: chosen.is_some_and(|chosen| chosen.tls),
            structured_replies: chosen.is_some_and(|chosen| chosen.style >= Style::Structured),
            extended_headers: chosen.is_some_and(|chosen| chosen.style == Style::Extended),
            block_status: chosen.is_some_and(|chosen| chosen.contexts),
            requests: self.stats.requests.get(),
            read_bytes: self.stats.read_bytes.get(),
            written_bytes: self.stats.written_bytes.get(),
            errors: self.stats.errors.get(),
            batches: self.stats.batches.get(),
            memory_bytes: self.lease.bytes(),
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("id", &self.id).field("peer", &self.peer).finish()
    }
}

/// A connection as listings show it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionInfo {
    /// The connection's number in this server.
    pub id: u64,
    /// The client's address.
    pub peer: String,
    /// The time of its acceptance.
    pub since: SystemTime,
    /// The export in use; `None` during the handshake.
    pub export: Option<String>,
    /// Whether the connection is encrypted.
    pub tls: bool,
    /// Whether structured replies are in use; extended headers imply them.
    pub structured_replies: bool,
    /// Whether extended headers are in use.
    pub extended_headers: bool,
    /// Whether `base:allocation` was selected.
    pub block_status: bool,
    /// Requests received.
    pub requests: u64,
    /// Bytes read from the export.
    pub read_bytes: u64,
    /// Bytes written to the export, without zeroed and trimmed ones.
    pub written_bytes: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// The number of sends; requests per send show how well requests share system calls.
    pub batches: u64,
    /// The bytes of the connection budget that it holds now.
    pub memory_bytes: u64,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::memory::MemoryBudget;

    /// A client with a memory budget of its own.
    pub(crate) fn client_with(budget_bytes: u64) -> Arc<Client> {
        let lease = MemoryBudget::new(budget_bytes).admit().expect("it is the first");
        let wake = || Arc::new(Wake::new().expect("there are descriptors"));
        Client::new(
            0,
            "test".to_owned(),
            ShutdownHandle::Pipes { drain: wake(), cut: wake() },
            lease,
        )
    }
}
