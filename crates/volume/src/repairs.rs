//! Log lines about damaged and repaired blocks, limited in number.
//!
//! A rotting disk has thousands of damaged blocks, and a line for each would fill the log. The
//! first one is logged at once. Later ones are counted, and at most one line per interval states
//! how many there were. Each single one is logged at level debug.
#![allow(clippy::disallowed_types)] // A repair syncs, which takes far longer than a lock.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Shortest time between two lines about one pool: at most 1,440 lines a day.
const INTERVAL: Duration = Duration::from_secs(60);

/// Events of one kind in a pool that are not in the log yet.
#[derive(Debug, Default)]
pub(crate) struct LogLimit(Mutex<State>);

/// The repairs of a pool that are not in the log yet.
#[derive(Debug, Default)]
pub(crate) struct Repairs(LogLimit);

#[derive(Debug, Default)]
struct State {
    logged_at: Option<Instant>,
    unlogged: u64,
    /// Events since the pool was opened.
    total: u64,
}

impl Repairs {
    /// Adds repairs of the data at an address of the pool.
    pub(crate) fn add(&self, count: u64, title: &str, address: u64) {
        tracing::debug!("{title}: repaired a block or page at {address} from the other copy");
        if let Some(count) = self.0.due(count, Instant::now()) {
            tracing::warn!(
                "{title}: repaired {count} damaged blocks or pages from the other copy, the last \
                 one at {address} of the pool; `blockyard volume show` counts them by copy"
            );
        }
    }

    /// The number of repairs since the pool was opened.
    pub(crate) fn count(&self) -> u64 {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).total
    }

    /// Logs the repairs that are not in the log yet.
    pub(crate) fn log_rest(&self, title: &str) {
        let count = self.0.take();
        if count > 0 {
            tracing::warn!("{title}: repaired {count} more blocks or pages from the other copy");
        }
    }
}

impl LogLimit {
    fn take(&self) -> u64 {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner).unlogged)
    }

    /// Counts events, and takes the number of those that are to be logged now.
    pub(crate) fn due(&self, count: u64, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.unlogged += count;
        state.total += count;
        if state.logged_at.is_some_and(|at| now.saturating_duration_since(at) < INTERVAL) {
            return None;
        }
        state.logged_at = Some(now);
        Some(std::mem::take(&mut state.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a scrub of 8 MiB, of which one copy had rotted, wrote 1,022 warnings, two per
    /// block.
    #[test]
    fn repairs_are_one_line_an_interval() {
        let (repairs, start) = (LogLimit::default(), Instant::now());
        let lines: Vec<u64> = (0..511)
            .filter_map(|number| repairs.due(1, start + Duration::from_millis(number)))
            .collect();
        assert_eq!(lines, [1]);
        assert_eq!(repairs.due(1, start + INTERVAL), Some(511));
        assert_eq!(repairs.due(1, start + INTERVAL), None);
        assert_eq!(repairs.take(), 1);
        assert_eq!(repairs.due(1, start + 2 * INTERVAL), Some(1));
    }
}
