//! A clock that is cheap enough to read inside a lock: the processor's counter where it has one.
//!
//! On x86-64 it is the time stamp counter, elsewhere the system's clock. The counter takes about 10
//! ns less to read, and runs at a constant rate on every processor of the last decade. A reading is
//! not ordered with the instructions around it, so a single value is accurate to some nanoseconds
//! only.
#![allow(unsafe_code)]

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long the counter is compared with the system's clock.
const CALIBRATION: Duration = Duration::from_millis(5);

/// The counter's present value.
#[inline]
pub fn now() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction, and Linux lets programs use it.
    return unsafe { core::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    return system_ns();
}

/// The system's monotonic clock since its first reading.
fn system_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// The length of a tick, in nanoseconds. The first call takes some milliseconds.
pub fn tick_ns() -> f64 {
    static TICK_NS: OnceLock<f64> = OnceLock::new();
    *TICK_NS.get_or_init(|| {
        let (start_ns, start) = (system_ns(), now());
        while system_ns() - start_ns < CALIBRATION.as_nanos() as u64 {
            std::hint::spin_loop();
        }
        (system_ns() - start_ns) as f64 / now().wrapping_sub(start).max(1) as f64
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tick_is_a_plausible_fraction_of_time() {
        let tick = tick_ns();
        assert!((0.05..=200.0).contains(&tick), "{tick} ns");
        assert_eq!(tick, tick_ns());
        let first = now();
        assert!(now() >= first);
    }
}
