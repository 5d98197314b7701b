//! Log lines about repaired blocks, limited in number.
//!
//! A rotting disk has thousands of damaged blocks, and a line for each would fill the log. The
//! first repair is logged at once. Later repairs are counted, and at most one line per interval
//! states how many there were. Each single repair is logged at level debug.
#![allow(clippy::disallowed_types)] // A repair syncs, which takes far longer than a lock.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Shortest time between two lines about one pool: at most 1,440 lines a day.
const INTERVAL: Duration = Duration::from_secs(60);

/// The repairs of a pool that are not in the log yet.
#[derive(Debug, Default)]
pub(crate) struct Repairs(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    logged_at: Option<Instant>,
    unlogged: u64,
}

impl Repairs {
    /// Adds repairs of the data at an address of the pool.
    pub(crate) fn add(&self, count: u64, title: &str, address: u64) {
        tracing::debug!("{title}: wrote a damaged piece at {address} again from the other copy");
        if let Some(count) = self.due(count, Instant::now()) {
            tracing::warn!(
                "{title}: wrote {count} damaged pieces again from the other copy, the last one at \
                 {address} of the pool; `blockyard volume show` counts them by copy"
            );
        }
    }

    /// Logs the repairs that are not in the log yet.
    pub(crate) fn log_rest(&self, title: &str) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = std::mem::take(&mut state.unlogged);
        drop(state);
        if count > 0 {
            tracing::warn!("{title}: wrote {count} more damaged pieces again from the other copy");
        }
    }

    /// Counts repairs, and takes the number of those that are to be logged now.
    fn due(&self, count: u64, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.unlogged += count;
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
        let (repairs, start) = (Repairs::default(), Instant::now());
        let lines: Vec<u64> = (0..511)
            .filter_map(|number| repairs.due(1, start + Duration::from_millis(number)))
            .collect();
        assert_eq!(lines, [1]);
        assert_eq!(repairs.due(1, start + INTERVAL), Some(511));
        assert_eq!(repairs.due(1, start + INTERVAL), None);
        repairs.log_rest("pool");
        assert_eq!(repairs.due(1, start + 2 * INTERVAL), Some(1));
    }
}
