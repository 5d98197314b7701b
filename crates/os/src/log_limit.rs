//! A bound on log lines of one kind.
//!
//! A rotting disk has thousands of damaged blocks, a guest can damage its rings as often as it
//! likes, and a host can connect again and again: a line for each would fill the log. A number of
//! events per period is logged at once. Later ones are counted, and the next line that is logged
//! states how many there were.
#![allow(clippy::disallowed_types)] // An event is an error, and about to be logged.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Period by default: with one line in it, at most 1,440 lines a day.
const PERIOD: Duration = Duration::from_secs(60);

/// Events of one kind that are not in the log yet.
#[derive(Debug)]
pub struct LogLimit {
    /// The most lines of a period.
    lines: u32,
    period: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The beginning of the present period.
    began: Option<Instant>,
    /// The lines of the period.
    lines: u32,
    unlogged: u64,
    total: u64,
}

impl Default for LogLimit {
    /// One line a minute.
    fn default() -> LogLimit {
        LogLimit::new(1, PERIOD)
    }
}

impl LogLimit {
    /// At most this many lines in each period.
    pub const fn new(lines: u32, period: Duration) -> LogLimit {
        let state = State { began: None, lines: 0, unlogged: 0, total: 0 };
        LogLimit { lines, period, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts events, and takes the number of those that are to be logged now, by one line.
    pub fn due(&self, count: u64, now: Instant) -> Option<u64> {
        let mut state = self.state();
        state.unlogged += count;
        state.total += count;
        if state.began.is_none_or(|began| now.saturating_duration_since(began) >= self.period) {
            (state.began, state.lines) = (Some(now), 0);
        }
        if state.lines == self.lines {
            return None;
        }
        state.lines += 1;
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
    fn events_are_one_line_a_period_by_default() {
        let (events, start) = (LogLimit::default(), Instant::now());
        let lines: Vec<u64> = (0..511)
            .filter_map(|number| events.due(1, start + Duration::from_millis(number)))
            .collect();
        assert_eq!(lines, [1]);
        assert_eq!(events.due(1, start + PERIOD), Some(511));
        assert_eq!(events.due(1, start + PERIOD), None);
        assert_eq!((events.take(), events.total()), (1, 513));
        assert_eq!(events.due(1, start + 2 * PERIOD), Some(1));
    }

    /// Regression: an NVMe host that connected again and again filled the disk with the log.
    #[test]
    fn a_period_has_a_bounded_number_of_lines_and_the_next_one_tells_of_the_others() {
        const LINES: u32 = 64;
        let (events, start) = (LogLimit::new(LINES, PERIOD), Instant::now());
        let lines = (0..1000).filter(|_| events.due(1, start) == Some(1)).count();
        assert_eq!(lines, LINES as usize);
        let later = start + PERIOD;
        assert_eq!(events.due(1, later - Duration::from_nanos(1)), None);
        assert_eq!(events.due(1, later), Some(1002 - u64::from(LINES)));
        assert_eq!(events.due(1, later), Some(1));
        assert_eq!(events.due(1, later + PERIOD), Some(1), "none was dropped");
    }
}
