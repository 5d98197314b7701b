//! What ends or wakes a daemon.

/// An event that the daemon handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A signal that asks the daemon to end, by name.
    Signal(&'static str),
    /// The client on standard input has disconnected.
    StdioDone,
    /// The file system that the daemon serves is no longer mounted.
    Unmounted,
    /// The command for which the daemon runs has ended, with this exit code.
    CommandDone(u8),
    /// Another process serves what this one served.
    Upgraded,
    /// A standby is to serve.
    Promoted,
    /// The lease of a pool that a standby watches has run out.
    LeaseRanOut,
    /// A standby had one of its pools last: no other machine has opened it since.
    WasLast,
    /// A pool of a daemon that was a standby acknowledges nothing any more.
    PoolLost,
}
