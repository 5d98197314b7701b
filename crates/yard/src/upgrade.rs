//! A live upgrade: this process starts the program again and hands its sockets, connections and
//! devices over.
//!
//! ```text
//!  the old process                                              the new process
//!
//!  SERVING
//!     │ starts the program; Offer ─────────────────────────────▸ reads its configuration
//!     ▾                                                             │
//!  STARTING ◂───────────────────────────────── Ready or Failed ◂────┘
//!     │ pauses connections between two requests, closes devices
//!     │ State, with descriptors ────────────────────────────────▸ opens the devices, and the
//!     ▾                                                          exports of the connections
//!  PAUSED ◂─────────────────────────────────── Opened or Failed ◂───┘
//!     │ Go ─────────────────────────────────────────────────────────┐
//!     ▾                                                             ▾
//!  LEAVING ◂──────────────────────────────────────────── Serving ── SERVING
//!     │
//!     ▾
//!  ENDED: exits, and removes no file
//!
//!  STARTING, PAUSED, LEAVING: at a failure, an end of the new process or a timeout this process
//!  kills the new one, opens the devices again and continues the connections: SERVING
//! ```
//!
//! 1. Until `Go` the new process reads nothing from a client and writes nothing to one. Then it
//!    can do nothing more that the system may refuse, as to start a thread: it has done so before.
//! 2. After `Go` the old process does neither.
//! 3. At most one of them has a pool open: the new one opens it after the old one has closed it,
//!    and the old one opens it again after the new one has ended.
//! 4. Every wait has a timeout.
//!
//! `outgoing.rs` is the old process's side, `incoming.rs` the new one's.
#![allow(clippy::disallowed_types)] // The state of an upgrade is control plane.

use std::ffi::OsString;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use tokio::sync::{RwLock, watch};

pub mod incoming;
mod link;
pub(crate) mod memory;
pub mod message;
pub(crate) mod outgoing;

pub use link::{Link, LinkError};

use message::{ListenerKind, ListenerState};

/// The environment variable that tells a program that its standard input is the socket of a
/// hand-over. Its value is the version of the format.
pub const VARIABLE: &str = "BLOCKYARD_HANDOVER";

/// `POST /v1/upgrade`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct UpgradeRequest {
    /// The absolute path of the program; by default that of the running one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// Disconnect the clients whose connections cannot be handed over.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// The response to `POST /v1/upgrade`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct UpgradeView {
    /// The new process.
    pub pid: u32,
    /// The connections that were handed over.
    pub connections: u64,
    /// The devices that were handed over.
    pub devices: u64,
    /// For how long clients waited, in ns: from the first connection that paused until the new
    /// process was told to serve.
    pub pause_ns: u64,
}

/// How this process was started, so that it can start its successor.
pub struct UpgradePlan {
    /// The program, by its path when this process started.
    pub program: PathBuf,
    /// The arguments of the program.
    pub args: Vec<OsString>,
    /// The reasons for which this process can have no successor.
    pub refusals: Vec<String>,
    /// Is called when another process serves what this one served: it ends this one.
    pub end: Box<dyn Fn() + Send + Sync>,
}

/// The state of this process in an upgrade. While one runs, the lock is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum UpgradeState {
    /// This process serves.
    #[default]
    Serving,
    /// Another process serves what this one served.
    Ended,
    /// The daemon ends without a successor.
    Ending,
}

/// A listener of the control plane, whose sockets are handed over.
#[derive(Debug)]
struct PlaneListener {
    kind: ListenerKind,
    place: String,
    sockets: Vec<OwnedFd>,
}

/// What an upgrade needs of the daemon, besides its devices and NBD servers.
pub struct Upgrade {
    plan: OnceLock<UpgradePlan>,
    state: Mutex<UpgradeState>,
    plane: Mutex<Vec<PlaneListener>>,
    /// Whether the listeners of the control plane accept no client.
    holding: watch::Sender<bool>,
    /// Requests of the control API share it; an upgrade has it alone.
    requests: Arc<RwLock<()>>,
    /// The process that serves what this one served.
    successor: OnceLock<u32>,
}

impl Default for Upgrade {
    fn default() -> Upgrade {
        Upgrade {
            plan: OnceLock::new(),
            state: Mutex::default(),
            plane: Mutex::default(),
            holding: watch::Sender::new(false),
            requests: Arc::default(),
            successor: OnceLock::new(),
        }
    }
}

impl fmt::Debug for Upgrade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upgrade").finish_non_exhaustive()
    }
}

impl Upgrade {
    /// Says how this process was started. Without this it can have no successor.
    pub fn set_plan(&self, plan: UpgradePlan) {
        // It is still empty: only the daemon sets it.
        let _ = self.plan.set(plan);
    }

    /// The lock that requests of the control API share.
    pub(crate) fn requests(&self) -> &Arc<RwLock<()>> {
        &self.requests
    }

    /// The process that serves what this one served, after an upgrade.
    pub(crate) fn successor(&self) -> Option<u32> {
        self.successor.get().copied()
    }

    /// Whether the listeners of the control plane are to accept no client.
    pub(crate) fn holding(&self) -> watch::Receiver<bool> {
        self.holding.subscribe()
    }

    /// Has the listeners of the control plane accept no client, or accept clients again.
    pub(crate) fn hold(&self, holds: bool) {
        self.holding.send_replace(holds);
    }

    /// Asks the process that serves what this one served to end, because of a signal that this one
    /// got. systemd sends signals to all processes of a service itself, and a terminal to all of a
    /// group.
    pub fn forward(&self, signal: &str) {
        let is_service =
            ["NOTIFY_SOCKET", "INVOCATION_ID"].iter().all(|it| std::env::var_os(it).is_some());
        let pid = self.successor().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        if let Some(pid) = pid
            && signal == "SIGTERM"
            && !is_service
            && let Err(error) = kill_process(pid, Signal::TERM)
        {
            tracing::error!(%error, signal, "the process that serves cannot be told to end");
        }
    }

    /// Notes a listener of the control plane.
    pub(crate) fn add_listener(&self, kind: ListenerKind, place: String, sockets: Vec<OwnedFd>) {
        let mut plane = self.plane.lock().unwrap_or_else(PoisonError::into_inner);
        plane.push(PlaneListener { kind, place, sockets });
    }

    /// Begins the end of the daemon, after an upgrade that runs; `false` if another process serves
    /// what this one served, so that it must exit and leave everything as it is.
    pub fn begin_end(&self) -> bool {
        let mut state = self.state();
        if *state == UpgradeState::Ended {
            return false;
        }
        *state = UpgradeState::Ending;
        true
    }

    fn state(&self) -> MutexGuard<'_, UpgradeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ListenerState {
    fn new(kind: ListenerKind, place: &str, sockets: usize) -> ListenerState {
        ListenerState { kind, place: place.to_owned(), sockets: sockets as u32 }
    }
}
