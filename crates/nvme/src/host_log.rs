//! The log lines that hosts cause. Each kind has a bound of its own: a peer that only connects, or
//! fails to authenticate, does not hide the lines about hosts that use devices.
//!
//! Control plane: a lock is taken for a line about a connection or its channel.

use std::time::{Duration, Instant};

use blockyard_os::LogLimit;

/// The most lines of one kind in a period: enough for all queues of two hosts that fail. One more
/// says how many were dropped in earlier periods.
const LINES_MAX: u32 = 63;

/// The length of a period. By both constants, the log grows by at most 7 lines a second of a kind.
const PERIOD: Duration = Duration::from_secs(10);

/// A kind of log line, with its bound.
#[derive(Debug)]
pub(crate) struct HostLog {
    /// What the lines are about.
    about: &'static str,
    limit: LogLimit,
}

impl HostLog {
    const fn new(about: &'static str) -> HostLog {
        HostLog { about, limit: LogLimit::new(LINES_MAX, PERIOD) }
    }

    /// Whether a line may be logged. The first one of a period logs before it how many lines were
    /// dropped.
    pub(crate) fn permits(&self) -> bool {
        let due = self.limit.due(1, Instant::now());
        self.tell_of_dropped(due.map_or(0, |count| count - 1));
        due.is_some()
    }

    fn tell_of_dropped(&self, count: u64) {
        if count > 0 {
            tracing::warn!("{count} more lines about {} were not logged", self.about);
        }
    }
}

/// The kinds of log lines that hosts cause, of a table of subsystems.
#[derive(Debug)]
pub(crate) struct HostLogs {
    /// Connections that are not admitted, or cut for others.
    pub(crate) accepts: HostLog,
    /// Hosts that are refused, or do not authenticate.
    pub(crate) refusals: HostLog,
    /// The ends of connections whose host had not connected and authenticated.
    pub(crate) strangers: HostLog,
    /// The ends of connections of hosts.
    pub(crate) hosts: HostLog,
    /// Devices that give a queue no channel.
    pub(crate) channels: HostLog,
}

impl Default for HostLogs {
    fn default() -> HostLogs {
        HostLogs {
            accepts: HostLog::new("NVMe connections that were not admitted"),
            refusals: HostLog::new("NVMe hosts that were refused"),
            strangers: HostLog::new("NVMe connections that ended before a host used them"),
            hosts: HostLog::new("NVMe hosts that were disconnected"),
            channels: HostLog::new("devices that NVMe hosts could not use"),
        }
    }
}

impl HostLogs {
    /// Logs how many lines were dropped since the last one of each kind. To be called when a server
    /// has stopped: there may be no further line.
    pub(crate) fn flush(&self) {
        let HostLogs { accepts, refusals, strangers, hosts, channels } = self;
        for log in [accepts, refusals, strangers, hosts, channels] {
            log.tell_of_dropped(log.limit.take());
        }
    }
}
