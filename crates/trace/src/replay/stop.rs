//! The stop of a replay: a flag that ends its waits.
#![allow(clippy::disallowed_types)] // Control plane: read once an operation, changed once.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Stops a replay from another thread. Copies stop the same replay.
#[derive(Clone, Debug, Default)]
pub struct ReplayStop(Arc<StopState>);

#[derive(Debug, Default)]
struct StopState {
    is_stopped: Mutex<bool>,
    changed: Condvar,
}

impl ReplayStop {
    /// A stop of a replay that is to begin.
    pub fn new() -> ReplayStop {
        ReplayStop::default()
    }

    /// Stops the replay: it submits no further operation, and ends when those in flight have
    /// completed.
    pub fn stop(&self) {
        *self.flag() = true;
        self.0.changed.notify_all();
    }

    /// Whether the replay was stopped.
    pub fn is_stopped(&self) -> bool {
        *self.flag()
    }

    /// Sleeps until `deadline`, or until the replay is stopped. Returns whether it was stopped.
    pub fn wait_until(&self, deadline: Instant) -> bool {
        let mut is_stopped = self.flag();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if *is_stopped || left.is_zero() {
                return *is_stopped;
            }
            let waited = self.0.changed.wait_timeout(is_stopped, left);
            is_stopped = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn flag(&self) -> MutexGuard<'_, bool> {
        // A panic of another lock holder leaves the flag usable.
        self.0.is_stopped.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_stop_ends_a_wait_of_an_hour() {
        let stop = ReplayStop::new();
        assert!(!stop.wait_until(Instant::now()));
        let other = stop.clone();
        let waiter = std::thread::spawn(move || {
            other.wait_until(Instant::now() + Duration::from_secs(3600))
        });
        stop.stop();
        assert!(waiter.join().unwrap());
        assert!(stop.is_stopped() && stop.wait_until(Instant::now()));
    }
}
