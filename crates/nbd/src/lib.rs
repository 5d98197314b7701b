//! NBD: the network block device protocol, fixed newstyle, from the handshake to the last reply.
//!
//! ```text
//! server ─ accepts ▸ session ─ handshake ▸ connection ─ transport, wire ◂▸ command ◂▸ channel
//! ```
//!
//! - [`wire`] has the byte formats, [`handshake`] and [`command`] the rules. None of them does I/O,
//!   and a fuzzer drives all three without a socket.
//! - A connection has one thread and one channel. The thread blocks in the socket; then it parses,
//!   submits, reaps and answers all requests that it has received as one batch.
//! - Zone semantics do not cross NBD: a zoned disk is read anywhere and written at its write
//!   pointers, and a write elsewhere fails with `NBD_EIO`.
//!
//! Sections named in comments are those of the protocol document, `doc/proto.md` of the NBD
//! project.

mod access;
mod buffers;
mod client;
pub mod command;
mod connection;
pub mod endpoint;
pub mod exports;
pub mod handshake;
mod listener;
mod memory;
mod pause;
mod server;
mod session;
mod tcp;
pub mod tls;
mod transport;
mod unix;
pub mod wire;

pub use access::{AllowLists, EVERY_EXPORT};
pub use client::ConnectionInfo;
pub use endpoint::{Endpoint, EndpointError, ListenError, SocketAccess, UnixPlace};
pub use exports::{ExportError, ExportInfo, ExportOptions, Exports};
pub use memory::{LIMIT_BYTES_MIN, MemoryBudget, MemoryUse, SHARE_BYTES};
pub use pause::{
    Adopted, ConnectionCounts, ConnectionState, PauseError, PausedConnection, PausedServer,
    SkippedPayload,
};
pub use server::{ACTIVATED, BoundServer, Server, ServerError, ServerOptions};
pub use tcp::listen_tcp;
pub use tls::{TlsConfig, TlsError, TlsMode};
pub use unix::listen_unix;
