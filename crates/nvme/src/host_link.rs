//! A connection as the control plane sees it: the host, its statistics, and how to end it.
#![allow(clippy::disallowed_types)] // Control plane: a value that is set once, and read in passing.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use blockyard_core::channel::ChannelGroup;
use blockyard_os::socket::Wake;
use blockyard_sync::atomics::{AtomicBool, AtomicU64, Ordering};
use blockyard_sync::counter::Counter;
use blockyard_sync::wake_flag::WakeFlag;

/// How long a connection that was cut may take to end before a removal stops waiting for it.
pub(crate) const CUT_GRACE: Duration = Duration::from_secs(2);

/// Counters of the commands of a connection, all or those for one namespace. The thread of the
/// connection writes them, any thread reads them.
#[derive(Debug, Default)]
pub(crate) struct CommandStats {
    pub(crate) commands: Counter,
    pub(crate) read_bytes: Counter,
    pub(crate) written_bytes: Counter,
    pub(crate) errors: Counter,
    /// For a namespace: Read and Compare commands, and the sectors of these and of Verify.
    pub(crate) reads: Counter,
    pub(crate) read_sectors: Counter,
    /// For a namespace: commands that have written data of the host.
    pub(crate) writes: Counter,
}

/// Counts of I/O commands of several connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommandTotals {
    /// Commands received.
    pub commands: u64,
    /// Bytes read from the namespace.
    pub read_bytes: u64,
    /// Bytes written to the namespace, without zeroed and deallocated ones.
    pub written_bytes: u64,
    /// Commands completed with an error.
    pub errors: u64,
    /// Read and Compare commands that have completed without an error.
    pub reads: u64,
    /// The sectors that these commands, and Verify, have read.
    pub read_sectors: u64,
    /// Commands that have written data of the host.
    pub writes: u64,
}

impl CommandTotals {
    pub(crate) fn add(&mut self, stats: &CommandStats) {
        self.commands += stats.commands.get();
        self.read_bytes += stats.read_bytes.get();
        self.written_bytes += stats.written_bytes.get();
        self.errors += stats.errors.get();
        self.reads += stats.reads.get();
        self.read_sectors += stats.read_sectors.get();
        self.writes += stats.writes.get();
    }
}

/// What a connection is for, known after its Connect.
#[derive(Clone, Debug)]
pub(crate) struct LinkRole {
    pub(crate) subsystem: String,
    pub(crate) host: String,
    pub(crate) controller: u16,
    pub(crate) queue: u16,
}

/// Gives a connection a turn of its thread, which has one descriptor for all its connections.
#[derive(Debug)]
pub(crate) struct LinkWake {
    flag: WakeFlag,
    thread: Arc<Wake>,
}

impl LinkWake {
    /// Asks for a turn, which sees what was changed before.
    pub(crate) fn raise(&self) {
        if self.flag.raise() {
            self.thread.raise();
        }
    }

    /// Whether a turn was asked for since the last call. The thread lowers its own flag before.
    pub(crate) fn take(&self) -> bool {
        self.flag.take()
    }

    /// The connection gets no turn any more, and wakes its thread no more.
    pub(crate) fn end(&self) {
        self.flag.end();
    }
}

/// A connection as other threads see it.
pub(crate) struct HostLink {
    pub(crate) id: u64,
    /// The host's address.
    pub(crate) peer: String,
    since: SystemTime,
    pub(crate) stats: CommandStats,
    /// The channels of an I/O queue.
    pub(crate) channels: ChannelGroup,
    pub(crate) role: OnceLock<LinkRole>,
    /// Whether the connection is to end after the commands in flight.
    end_requested: AtomicBool,
    /// Whether it was cut: it stops answering its host at its next turn, and ends when the device
    /// has completed its commands.
    cut: AtomicBool,
    /// Whether it waits for its host to receive.
    stalled: AtomicBool,
    /// The serial number of the last association before which the connection is to receive what
    /// its host has sent; 0 for none.
    probe_asked: AtomicU64,
    /// The last of these numbers for which it has found its host still connected.
    probed: AtomicU64,
    /// Raised when the connection is to end, when the subsystem, or for discovery the table of
    /// subsystems, has changed, and when another thread has computed something for it.
    pub(crate) wake: LinkWake,
}

impl HostLink {
    /// A connection of a thread that sleeps until `thread` is raised.
    pub(crate) fn new(id: u64, peer: String, thread: Arc<Wake>) -> HostLink {
        HostLink {
            id,
            peer,
            since: SystemTime::now(),
            stats: CommandStats::default(),
            channels: ChannelGroup::default(),
            role: OnceLock::new(),
            end_requested: AtomicBool::new(false),
            cut: AtomicBool::new(false),
            stalled: AtomicBool::new(false),
            probe_asked: AtomicU64::new(0),
            probed: AtomicU64::new(0),
            wake: LinkWake { flag: WakeFlag::new(), thread },
        }
    }

    /// Asks the connection to complete the commands that the device executes and then to end.
    pub(crate) fn request_end(&self) {
        // Relaxed, here and below: the flags publish no data.
        self.end_requested.store(true, Ordering::Relaxed);
        self.wake.raise();
    }

    /// Whether the connection is to end after the commands in flight.
    pub(crate) fn is_end_requested(&self) -> bool {
        self.end_requested.load(Ordering::Relaxed)
    }

    /// Ends the connection, whether its answers are sent or not: it stops answering its host at its
    /// next turn, and ends when the device has completed its commands. After 10 s a thread of its
    /// own waits for that.
    pub(crate) fn cut(&self) {
        self.cut.store(true, Ordering::Relaxed);
        self.wake.raise();
    }

    /// Whether the connection was cut.
    pub(crate) fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Relaxed)
    }

    /// Whether the connection waits for its host to receive.
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed)
    }

    pub(crate) fn note_stalled(&self, stalled: bool) {
        self.stalled.store(stalled, Ordering::Relaxed);
    }

    /// Asks for a turn that receives what the host has sent: a later association of the host, of
    /// this serial number, is not to begin before. Serial numbers grow from 1.
    pub(crate) fn ask_to_probe(&self, serial: u64) {
        // Release: pairs with the Acquire in `begin_probe`. A receive that follows it sees what the
        // host sent before it connected again.
        self.probe_asked.fetch_max(serial, Ordering::Release);
        self.wake.raise();
    }

    /// To be called before a receive: the number for [`HostLink::note_probed`].
    pub(crate) fn begin_probe(&self) -> u64 {
        // Acquire: pairs with the Release in `ask_to_probe`.
        self.probe_asked.load(Ordering::Acquire)
    }

    /// Notes that the socket was empty, and not at its end, after [`HostLink::begin_probe`]; or
    /// that the host does not read, and has not closed it.
    pub(crate) fn note_probed(&self, serial: u64) {
        if self.probed.load(Ordering::Relaxed) < serial {
            // Release: pairs with the Acquire in `owes_probe`. What was received is executed.
            self.probed.store(serial, Ordering::Release);
        }
    }

    /// Whether the connection was asked to probe its socket before the association of this serial
    /// number, and has not.
    pub(crate) fn owes_probe(&self, serial: u64) -> bool {
        let asked = self.probe_asked.load(Ordering::Relaxed);
        // Acquire: pairs with the Release in `note_probed`.
        asked >= serial && self.probed.load(Ordering::Acquire) < serial
    }

    pub(crate) fn info(&self) -> LinkInfo {
        let role = self.role.get();
        LinkInfo {
            id: self.id,
            peer: self.peer.clone(),
            since: self.since,
            subsystem: role.map(|role| role.subsystem.clone()),
            host: role.map(|role| role.host.clone()),
            controller: role.map(|role| role.controller),
            queue: role.map(|role| role.queue),
            commands: self.stats.commands.get(),
            read_bytes: self.stats.read_bytes.get(),
            written_bytes: self.stats.written_bytes.get(),
            errors: self.stats.errors.get(),
        }
    }
}

impl fmt::Debug for HostLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostLink").field("id", &self.id).field("peer", &self.peer).finish()
    }
}

/// A connection as listings show it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinkInfo {
    /// The connection's number in this server.
    pub id: u64,
    /// The host's address.
    pub peer: String,
    /// The time of its acceptance.
    pub since: SystemTime,
    /// The NQN of the subsystem; `None` before the Connect.
    pub subsystem: Option<String>,
    /// The NQN of the host.
    pub host: Option<String>,
    /// The controller.
    pub controller: Option<u16>,
    /// The queue; 0 is the admin queue.
    pub queue: Option<u16>,
    /// Commands received.
    pub commands: u64,
    /// Bytes read from the namespace.
    pub read_bytes: u64,
    /// Bytes written to the namespace, without zeroed and deallocated ones.
    pub written_bytes: u64,
    /// Commands completed with an error.
    pub errors: u64,
}
