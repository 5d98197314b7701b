//! A clock that moves only when a test advances it, or a thread sleeps on it.
//!
//! A test that waits for a timer would either take real time or guess how much. With this clock the
//! sleep *is* the advance: `sleep_until` sets the time and returns. So a delay of an hour takes no
//! real time and ends at exactly the requested moment.
// One shared number that tests advance from any thread; this is not the data path.
#![allow(clippy::disallowed_types)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_core::clock::Clock;
use blockyard_core::units::Nanos;

/// A clock that is advanced manually. Clones share one time.
#[derive(Clone, Debug, Default)]
pub struct ManualClock {
    now_ns: Arc<AtomicU64>,
}

impl ManualClock {
    /// A clock that stands at 0.
    pub fn new() -> ManualClock {
        ManualClock::default()
    }

    /// Advances the time by `ns` nanoseconds.
    pub fn advance(&self, ns: u64) {
        self.now_ns.fetch_add(ns, Ordering::SeqCst);
    }

    /// Advances the time to `at`; a time in the past changes nothing.
    pub fn advance_to(&self, at: Nanos) {
        self.now_ns.fetch_max(at.0, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Nanos {
        Nanos(self.now_ns.load(Ordering::SeqCst))
    }

    fn sleep_until(&self, at: Nanos) {
        self.advance_to(at);
        // Another thread may have to do what the caller waits for.
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleep_advances_the_clock_and_never_turns_it_back() {
        let clock = ManualClock::new();
        let other = clock.clone();
        clock.advance(5);
        assert_eq!(other.now(), Nanos(5));
        other.sleep_until(Nanos(3_600_000_000_000));
        assert_eq!(clock.now(), Nanos(3_600_000_000_000));
        clock.sleep_until(Nanos(7));
        assert_eq!(clock.now(), Nanos(3_600_000_000_000));
    }
}
