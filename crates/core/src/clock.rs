//! Time as the stack sees it: read once per batch, and replaceable, so that tests need not sleep.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::units::Nanos;

/// Where a channel takes its time from.
pub trait Clock: Send + 'static {
    /// The time now.
    fn now(&self) -> Nanos;
    /// Sleeps until `at`, or returns at once if that is past.
    fn sleep_until(&self, at: Nanos);

    /// The same by `sleep`, which somebody can end early, where the time is that of the world. A
    /// clock that is moved by sleeping moves to `at`.
    fn doze_until(&self, at: Nanos, sleep: &mut dyn FnMut(Duration)) {
        let _ = sleep;
        self.sleep_until(at);
    }
}

mod ticks;

/// The machine's monotonic clock, as `CLOCK_MONOTONIC`, but cheaper where the processor's counter
/// can be had. All of a process's instances share one start.
#[derive(Clone, Copy, Debug, Default)]
pub struct Monotonic;

/// The instant that counts as 0 for every [`Monotonic`] of this process.
fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now)
}

/// The system's clock, since the start.
fn system_ns() -> u64 {
    start().elapsed().as_nanos() as u64
}

impl Monotonic {
    /// A standard-library instant on this clock's scale; instants before the start count as 0.
    pub fn nanos_of(instant: Instant) -> Nanos {
        Nanos(instant.saturating_duration_since(start()).as_nanos() as u64)
    }

    /// The time that is left until an instant, but no more than `bound`.
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
