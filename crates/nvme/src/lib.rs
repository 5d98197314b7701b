//! NVMe/TCP: a target for the NVM and the zoned namespace command sets.
//!
//! ```text
//! server ─ accepts ▸ connection_threads ─ gives turns ▸ connection
//! connection ─ wire ◂▸ admin, io_queue ◂▸ namespace, zones ◂▸ channel
//! ```
//!
//! - [`wire`], [`command`], [`fabrics`], [`auth_message`], [`identify`] and [`log_page`] have the
//!   byte formats, [`namespace`], [`zones`] and `authentication.rs` the rules. None of them does
//!   I/O, and a fuzzer drives them without a socket.
//! - A connection is a queue of a controller. It is a state machine that never waits and, for an
//!   I/O queue, has one channel for each namespace that it uses. A few threads share all
//!   connections: a thread sleeps in epoll; then each connection with something to do has a turn,
//!   in which it parses, submits, reaps and answers the commands that it has received as one batch.
//! - A device is the only namespace of a subsystem of its own, and one of many in the subsystem of
//!   all devices, if there is one (`all_devices.rs`). A zoned device is a zoned namespace: Zone
//!   Append and the management of zones cross the wire, with the statuses of ZNS.

mod access;
mod admin;
mod all_devices;
pub mod auth_message;
mod authentication;
pub mod command;
mod connection;
mod connection_threads;
mod controller;
mod data_pool;
mod dh;
mod dh_worker;
pub mod events;
pub mod fabrics;
mod host_link;
mod host_log;
mod host_stream;
pub mod identify;
mod inbox;
mod io_queue;
pub mod log_page;
pub mod namespace;
mod namespace_queue;
mod outbox;
pub mod secret;
mod server;
mod session;
mod slots;
mod subsystems;
mod thread_list;
pub mod wire;
pub mod zones;

pub use access::{
    AllowedHosts, AuthRules, EVERY_DEVICE, HostAccess, check_nqn, check_subsystem_nqn,
};
pub use connection_threads::{ConnectionThreads, THREADS_MAX};
pub use controller::QUEUES_MAX;
pub use host_link::{CommandTotals, LinkInfo};
pub use server::{CONNECTIONS_MAX, TargetOptions, TargetServer};
pub use subsystems::{
    HostInfo, NQN_PREFIX, NamespaceNumbers, SUBSYSTEMS_MAX, SubsystemError, SubsystemInfo,
    Subsystems, SuspendedSubsystem,
};
