//! A bound for the log lines that hosts can cause: any number of connections may be refused, but
//! the log must not grow without end by that.
//!
//! Control plane: the lock is taken for a line about a connection.
#![allow(clippy::disallowed_types)] // Control plane only, as said above.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The most lines of a period: enough for all queues of a host that fails.
const LINES_MAX: u32 = 64;

/// The length of a period. By both constants, the log grows by at most 6 lines a second.
const PERIOD: Duration = Duration::from_secs(10);

/// Counts the lines about the hosts of a table of subsystems.
#[derive(Debug, Default)]
pub(crate) struct LogLimit(Mutex<LogPeriod>);

#[derive(Debug, Default)]
struct LogPeriod {
    began: Option<Instant>,
    /// The lines of the period.
    lines: u32,
    /// The lines that were dropped in the period.
    dropped: u64,
}

impl LogPeriod {
    /// Counts a line; `None` if it is to be dropped, and otherwise the number of lines that were
    /// dropped in a period that has ended.
    fn take(&mut self, now: Instant) -> Option<u64> {
        if self.began.is_none_or(|began| now.saturating_duration_since(began) >= PERIOD) {
            let dropped = self.dropped;
            *self = LogPeriod { began: Some(now), lines: 1, dropped: 0 };
            return Some(dropped);
        }
        if self.lines == LINES_MAX {
            self.dropped += 1;
            return None;
        }
        self.lines += 1;
        Some(0)
    }
}

impl LogLimit {
    /// Whether a line about a host may be logged. The first one of a period logs before it how many
    /// lines of the last one were dropped.
    pub(crate) fn permits(&self) -> bool {
        let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now());
        if let Some(dropped @ 1..) = taken {
            tracing::warn!("{dropped} more lines about NVMe hosts were not logged");
        }
        taken.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host that connected again and again filled the disk with the log.
    #[test]
    fn a_period_has_a_bounded_number_of_lines_and_the_next_one_tells_of_the_others() {
        let (mut period, start) = (LogPeriod::default(), Instant::now());
        let lines = (0..1000).filter(|_| period.take(start).is_some()).count();
        assert_eq!(lines, LINES_MAX as usize);
        let later = start + PERIOD;
        assert_eq!(period.take(later - Duration::from_nanos(1)), None);
        assert_eq!(period.take(later), Some(1001 - u64::from(LINES_MAX)));
        assert_eq!(period.take(later), Some(0));
        assert_eq!(period.take(later + PERIOD), Some(0), "none was dropped");
    }
}
