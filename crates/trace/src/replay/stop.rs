//! The stop of a replay: a flag that ends its waits.
//!
//! The threads of a replay read the flag once an operation, without a lock. The lock is for the
//! condition variable alone: a thread that sleeps has checked the flag under it.
#![allow(clippy::disallowed_types)] // A replay is a client: its lock delays no other client.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use blockyard_sync::atomics::{AtomicBool, Ordering};

/// Stops a replay from another thread. Copies stop the same replay.
#[derive(Clone, Debug, Default)]
pub struct ReplayStop(Arc<StopState>);

#[derive(Debug, Default)]
struct StopState {
    is_stopped: AtomicBool,
    /// Held when the flag is set, and by a thread between its look at the flag and its sleep.
    sleep: Mutex<()>,
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
        {
            // A panic of another lock holder leaves nothing to repair.
            let _sleep = self.0.sleep.lock().unwrap_or_else(PoisonError::into_inner);
            // Relaxed: the flag publishes nothing but itself; the lock orders it with a sleep.
            self.0.is_stopped.store(true, Ordering::Relaxed);
        }
        self.0.changed.notify_all();
    }

    /// Whether the replay was stopped.
    pub fn is_stopped(&self) -> bool {
        // Relaxed: as in `stop`.
        self.0.is_stopped.load(Ordering::Relaxed)
    }

    /// Sleeps until `deadline`, or until the replay is stopped. Returns whether it was stopped.
    pub fn wait_until(&self, deadline: Instant) -> bool {
        // An operation that is due takes no lock.
        if deadline.saturating_duration_since(Instant::now()).is_zero() {
            return self.is_stopped();
        }
        let mut sleep = self.0.sleep.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if self.is_stopped() || left.is_zero() {
                return self.is_stopped();
            }
            let waited = self.0.changed.wait_timeout(sleep, left);
            sleep = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
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
