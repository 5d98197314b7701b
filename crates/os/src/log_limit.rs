//! A bound on log lines of one kind.
//!
//! A rotting disk has thousands of damaged blocks, and a guest can damage its rings as often as it
//! likes: a line for each would fill the log. The first event is logged at once. Later ones are
//! counted, and at most one line per interval states how many there were.
#![allow(clippy::disallowed_types)] // An event is an error, and about to be logged.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Shortest time between two lines: at most 1,440 lines a day.
const INTERVAL: Duration = Duration::from_secs(60);

/// Events of one kind that are not in the log yet.
#[derive(Debug, Default)]
pub struct LogLimit(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    logged_at: Option<Instant>,
    unlogged: u64,
    total: u64,
}

impl LogLimit {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts events, and takes the number of those that are to be logged now.
    pub fn due(&self, count: u64, now: Instant) -> Option<u64> {
        let mut state = self.state();
        state.unlogged += count;
        state.total += count;
        if state.logged_at.is_some_and(|at| now.saturating_duration_since(at) < INTERVAL) {
            return None;
        }
        state.logged_at = Some(now);
        Some(std::mem::take(&mut state.unlogged))
    }

    /// Takes the number of events that are not in the log yet.
    pub fn take(&self) -> u64 {
        std::mem::take(&mut self.state().unlogged)
    }

    /// The number of all events.
    pub fn total(&self) -> u64 {
        self.state().total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a scrub of 8 MiB, of which one copy had rotted, wrote 1,022 warnings, two per
    /// block.
    #[test]
    fn events_are_one_line_an_interval() {
        let (events, start) = (LogLimit::default(), Instant::now());
        let lines: Vec<u64> = (0..511)
            .filter_map(|number| events.due(1, start + Duration::from_millis(number)))
            .collect();
        assert_eq!(lines, [1]);
        assert_eq!(events.due(1, start + INTERVAL), Some(511));
        assert_eq!(events.due(1, start + INTERVAL), None);
        assert_eq!((events.take(), events.total()), (1, 513));
        assert_eq!(events.due(1, start + 2 * INTERVAL), Some(1));
    }
}
