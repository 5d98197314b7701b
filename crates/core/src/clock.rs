//! The time source of the block layer: read once per batch, and replaceable so that tests need no
//! sleep.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::units::Nanos;

/// A source of time for a channel.
pub trait Clock: Send + 'static {
    /// The current time.
    fn now(&self) -> Nanos;
    /// Sleeps until `at`; returns at once if `at` is in the past.
    fn sleep_until(&self, at: Nanos);

    /// Sleeps until `at` by calling `sleep`, which another thread can end early. A manual clock,
    /// which advances when a thread sleeps, advances to `at` instead and ignores `sleep`.
    fn doze_until(&self, at: Nanos, sleep: &mut dyn FnMut(Duration)) {
        let _ = sleep;
        self.sleep_until(at);
    }
}

mod ticks;

/// The machine's monotonic clock, as `CLOCK_MONOTONIC`, read from the processor's counter where the
/// counter is usable. All instances of a process have the same start.
#[derive(Clone, Copy, Debug, Default)]
pub struct Monotonic;

/// The instant at which every [`Monotonic`] of this process reads 0.
fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now)
}

/// Nanoseconds since the start by the system's clock.
fn system_ns() -> u64 {
    start().elapsed().as_nanos() as u64
}

impl Monotonic {
    /// Converts a standard-library instant to this clock; instants before the start become 0.
    pub fn nanos_of(instant: Instant) -> Nanos {
        Nanos(instant.saturating_duration_since(start()).as_nanos() as u64)
    }

    /// The time that remains until an instant, at most `bound`.
    pub fn until(instant: Option<Instant>, bound: Duration) -> Duration {
        instant.map_or(bound, |at| at.saturating_duration_since(Instant::now()).min(bound))
    }
}

impl Clock for Monotonic {
    #[inline]
    fn now(&self) -> Nanos {
        Nanos(ticks::now_ns())
    }

    fn sleep_until(&self, at: Nanos) {
        let wait_ns = at.since(self.now());
        if wait_ns > 0 {
            std::thread::sleep(Duration::from_nanos(wait_ns));
        }
    }

    fn doze_until(&self, at: Nanos, sleep: &mut dyn FnMut(Duration)) {
        let wait_ns = at.since(self.now());
        if wait_ns > 0 {
            sleep(Duration::from_nanos(wait_ns));
        }
    }
}
