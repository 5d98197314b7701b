//! Connections that a server has paused between two requests, so that this process or another one
//! can continue them.
//!
//! ```text
//!            pause                        every client paused
//!  SERVING ─────────▸ PAUSING ────────────────────────────────▸ PAUSED
//!     ▴                  │ deadline: a client has not paused       │
//!     │    resume        ▾                                         │ resume
//!     └──────────────────┴─────────────────────────────────────────┘
//! ```
//!
//! 1. A paused connection has no request in flight, and every reply has been sent.
//! 2. Bytes of a request that has arrived in part, or that was not parsed yet, are part of the
//!    paused connection.
//! 3. Nothing is read from or written to the socket of a paused connection, so it can be continued
//!    by this server or by another process, but by one of them only.
#![allow(clippy::disallowed_types)] // Control plane: a pause happens at an upgrade.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant, SystemTime};

use crate::listener::Listener;
use crate::wire::{NbdError, Style};

/// How long a server waits for clients in their handshake before it pauses the others. A client
/// that takes longer is disconnected: it has negotiated nothing yet.
pub(crate) const HANDSHAKES_MAX: Duration = Duration::from_millis(500);

/// How often a thread that sleeps in a receive is interrupted until it has paused.
pub(crate) const INTERRUPT_INTERVAL: Duration = Duration::from_millis(1);

/// A connection between two requests.
#[derive(Debug)]
pub struct PausedConnection {
    /// The client's socket.
    pub socket: Arc<OwnedFd>,
    /// The rest.
    pub state: ConnectionState,
}

/// What was negotiated on a connection, and how far the client's requests have been read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionState {
    /// The connection's number in its server.
    pub id: u64,
    /// The client's address.
    pub peer: String,
    /// The time of its acceptance.
    pub since: SystemTime,
    /// The export's name.
    pub export: String,
    /// The format of requests and replies.
    pub style: Style,
    /// Whether `base:allocation` was selected.
    pub contexts: bool,
    /// Requests must be multiples of this many bytes, a power of two.
    pub min_block_bytes: u32,
    /// The size of the export, as the client knows it.
    pub len_bytes: u64,
    /// The logical block of the device, in bytes.
    pub block_bytes: u64,
    /// The transmission flags, as the client knows them.
    pub flags: u16,
    /// Bytes that were received and not parsed.
    pub unread: Vec<u8>,
    /// A payload of which the rest is discarded.
    pub skipped: Option<SkippedPayload>,
    /// The counts so far.
    pub counts: ConnectionCounts,
}

/// The payload of a refused request, which is discarded before the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkippedPayload {
    /// The bytes that are still to be discarded; not zero.
    pub left: u64,
    /// The request's cookie.
    pub cookie: u64,
    /// The request's offset.
    pub offset: u64,
    /// The error of the reply.
    pub error: NbdError,
}

/// Counts of a connection, as [`ConnectionInfo`](crate::ConnectionInfo) has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionCounts {
    /// Requests received.
    pub requests: u64,
    /// Bytes read from the export.
    pub read_bytes: u64,
    /// Bytes written to the export.
    pub written_bytes: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// The number of sends.
    pub batches: u64,
}

/// A server that accepts no client and whose connections are paused. Dropping it closes the
/// sockets of this process.
pub struct PausedServer {
    /// `None` for standard input and output.
    pub(crate) listener: Option<Listener>,
    pub(crate) connections: Vec<PausedConnection>,
    pub(crate) since: Instant,
}

impl PausedServer {
    /// The listening sockets.
    pub fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.listener.iter().flat_map(|listener| listener.sockets()).map(AsFd::as_fd)
    }

    /// The time from which on no request was taken.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// The connections.
    pub fn connections(&self) -> &[PausedConnection] {
        &self.connections
    }

    /// Closes the sockets, and leaves their files to the process that serves them now.
    pub fn leave(mut self) {
        if let Some(listener) = &mut self.listener {
            listener.leave();
        }
    }
}

impl fmt::Debug for PausedServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let connections = self.connections.len();
        f.debug_struct("PausedServer").field("connections", &connections).finish_non_exhaustive()
    }
}

/// The reason for which a server cannot be paused. It serves its clients as before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PauseError {
    /// Clients did not read their replies, or their device did not complete their requests.
    #[error(
        "client {peer} had requests that were not answered in {seconds} s: it does not read its \
         replies, or its device is slow"
    )]
    Busy {
        /// The first of these clients.
        peer: String,
        /// The time that they had.
        seconds: u64,
    },
    /// A client's connection can never be paused.
    #[error("client {peer} uses TLS, or is connected by pipes")]
    Never {
        /// The first of these clients.
        peer: String,
    },
    /// The system refuses to interrupt threads.
    #[error("cannot interrupt threads: {0}")]
    System(String),
}

/// Connections of an earlier process that are ready to be continued. Dropping it forgets them:
/// nothing has been read from their sockets, nor written to them.
#[derive(Debug, Default)]
pub struct Adopted {
    /// Starts the thread of each connection.
    pub(crate) starts: Vec<Sender<()>>,
}

impl Adopted {
    /// Continues the connections.
    pub fn start(self) {
        // A thread that is not there has reported its failure.
        self.starts.into_iter().for_each(|start| _ = start.send(()));
    }
}
