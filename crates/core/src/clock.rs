//! The time source of the block layer: read once per batch, and replaceable so that tests need no
//! sleep.
//!
//! [`Monotonic`] reads the processor's counter where the kernel itself uses the counter. A small
//! batch pays for two readings of the clock. A reading of the system's clock takes 25 to 30 ns,
//! mostly to wait for the instructions before it; a reading of the counter alone takes a third of
//! that. Each thread has an *anchor*: a reading of both clocks at one moment, and the length of a
//! tick. The thread counts ticks from its anchor for at most a millisecond, then takes a new
//! anchor. So errors do not add up: a reading is as precise as two anchors a millisecond apart,
//! about ten nanoseconds.
//!
//! The counter is used only if `CPUID` reports one rate on all processors, and if the kernel uses
//! the counter as its clock source. The kernel monitors its clock source. A thread that finds the
//! counter wrong by more than [`WRONG_NS`] never reads it again.
//!
//! Readings of one thread never go back. Readings of two threads differ by their errors: a value
//! that passes between threads may look about ten nanoseconds younger than it is.

use std::cell::Cell;
use std::ops::RangeInclusive;
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
        Nanos(now_ns())
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

/// How long an anchor is valid, in nanoseconds.
const SPAN_NS: u64 = 1_000_000;
/// A counter that differs by more than this at the end of an anchor's span is wrong, in
/// nanoseconds.
const WRONG_NS: u64 = 20_000;
/// An anchor is good if both clocks were read within this number of ticks.
const CLOSE_TICKS: u64 = 1_000;
/// Attempts per renewal to read both clocks within [`CLOSE_TICKS`].
const TRIES: usize = 3;
/// Consecutive renewals that may fail before a thread stops using the counter.
const MISSES_MAX: u8 = 8;
/// Fraction bits of a rate.
const POINT: u32 = 32;
/// Plausible rates, of counters from 100 MHz to 100 GHz.
const RATES: RangeInclusive<u64> = (1 << POINT) / 100..=10 << POINT;

thread_local! {
    static ANCHOR: Cell<Anchor> = const { Cell::new(Anchor::NONE) };
}

/// The current time on the scale of [`system_ns`], in nanoseconds.
#[inline]
fn now_ns() -> u64 {
    ANCHOR.with(|anchor| match anchor.get().read(counter::now()) {
        Some(ns) => ns,
        None => renew(anchor),
    })
}

#[cold]
fn renew(anchor: &Cell<Anchor>) -> u64 {
    let old = anchor.get();
    if old.is_wrong || !counter::is_trusted() {
        return system_ns();
    }
    for _ in 0..TRIES {
        let (before, ns, after) = (counter::now(), system_ns(), counter::now());
        let took = after.wrapping_sub(before);
        if took < CLOSE_TICKS {
            let (renewed, now_ns) = old.renewed(before.wrapping_add(took / 2), ns);
            anchor.set(renewed);
            return now_ns;
        }
    }
    // Another thread ran in between on each attempt, or the system's clock is too slow to compare
    // the counter with.
    let ns = system_ns();
    anchor.set(old.missed());
    old.foretold(counter::now(), ns).map_or(ns, |foretold| foretold.max(ns))
}

/// The moment at which a thread last compared its time with the system's.
#[derive(Clone, Copy, Debug)]
struct Anchor {
    /// The counter at that moment.
    ticks: u64,
    /// The thread's time at that moment: the system's, or slightly later.
    ns: u64,
    /// The system's time at that moment.
    system_ns: u64,
    /// Nanoseconds per tick, a fixed-point number with [`POINT`] fraction bits.
    rate: u64,
    /// How long the anchor is valid, in ticks; 0 before the rate is known.
    span: u64,
    /// Consecutive renewals that failed.
    misses: u8,
    /// Whether the fields contain a comparison.
    is_set: bool,
    /// Whether the counter was found wrong.
    is_wrong: bool,
}

impl Anchor {
    const NONE: Anchor = Anchor {
        ticks: 0,
        ns: 0,
        system_ns: 0,
        rate: 0,
        span: 0,
        misses: 0,
        is_set: false,
        is_wrong: false,
    };
    /// The anchor of a thread that uses the system's clock from now on.
    const WRONG: Anchor = Anchor { is_wrong: true, ..Anchor::NONE };

    /// The time at a reading of the counter, if the anchor is still valid.
    #[inline]
    fn read(&self, ticks: u64) -> Option<u64> {
        let since = ticks.wrapping_sub(self.ticks);
        // Within a span the product is far below 64 bits.
        (since < self.span).then(|| self.ns + ((since * self.rate) >> POINT))
    }

    /// The time by this anchor, for a moment shortly after its span.
    fn foretold(&self, ticks: u64, system_ns: u64) -> Option<u64> {
        let is_near = system_ns.saturating_sub(self.system_ns) < 4 * SPAN_NS;
        let since = u128::from(ticks.wrapping_sub(self.ticks));
        let passed_ns = u64::try_from((since * u128::from(self.rate)) >> POINT);
        let foretold = self.ns.saturating_add(passed_ns.unwrap_or(u64::MAX));
        (self.span > 0 && is_near).then_some(foretold)
    }

    /// The anchor after a failed renewal; [`Anchor::WRONG`] after too many.
    fn missed(self) -> Anchor {
        if self.misses == MISSES_MAX {
            return Anchor::WRONG;
        }
        Anchor { misses: self.misses + 1, ..self }
    }

    /// The next anchor and the current time, from a reading of both clocks at one moment.
    fn renewed(&self, ticks: u64, system_ns: u64) -> (Anchor, u64) {
        if !self.is_set {
            let first = Anchor { ticks, ns: system_ns, system_ns, is_set: true, ..Anchor::NONE };
            return (first, system_ns);
        }
        let passed_ns = system_ns.saturating_sub(self.system_ns);
        if self.span == 0 && passed_ns < SPAN_NS {
            // Too little time has passed to compute the rate.
            return (*self, system_ns);
        }
        let since = ticks.wrapping_sub(self.ticks).max(1);
        let rate = (u128::from(passed_ns) << POINT) / u128::from(since);
        let rate = u64::try_from(rate).unwrap_or(u64::MAX);
        // After a long idle period there is nothing to compare: the anchor is set as if it were the
        // first.
        let ns = self.foretold(ticks, system_ns).unwrap_or(system_ns);
        if !RATES.contains(&rate) || ns.abs_diff(system_ns) > WRONG_NS {
            return (Anchor::WRONG, system_ns);
        }
        // Time must not go back: a thread that is ahead of the system's clock runs slower until it
        // is level.
        let ns = ns.max(system_ns);
        let slowed = rate - rate / SPAN_NS * (ns - system_ns);
        let span = (SPAN_NS << POINT) / rate;
        (Anchor { ticks, ns, system_ns, rate: slowed, span, misses: 0, ..*self }, ns)
    }
}

/// The time stamp counter of x86-64.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod counter {
    #![allow(unsafe_code)]

    use std::arch::x86_64::{__cpuid, _rdtsc};
    use std::fs;
    use std::sync::OnceLock;

    /// The file that names the kernel's clock source.
    const SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    /// The `CPUID` leaf for advanced power management.
    const POWER_PAGE: u32 = 0x8000_0007;
    /// The bit of [`POWER_PAGE`] for an invariant counter, whose rate does not change.
    const INVARIANT: u32 = 1 << 8;

    #[inline]
    pub(super) fn now() -> u64 {
        // SAFETY: every x86-64 processor has the instruction, and Linux lets programs use it.
        unsafe { _rdtsc() }
    }

    pub(super) fn is_trusted() -> bool {
        static TRUSTED: OnceLock<bool> = OnceLock::new();
        *TRUSTED.get_or_init(|| {
            let has_page = __cpuid(0x8000_0000).eax >= POWER_PAGE;
            let is_invariant = has_page && __cpuid(POWER_PAGE).edx & INVARIANT != 0;
            is_invariant && fs::read_to_string(SOURCE).is_ok_and(|name| name.trim() == "tsc")
        })
    }
}

/// No usable counter: every reading is the system's clock.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod counter {
    #[inline]
    pub(super) fn now() -> u64 {
        0
    }

    pub(super) fn is_trusted() -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ticks of a counter of 2.5 GHz.
    const TICKS_PER_MS: u64 = 2_500_000;

    /// A valid anchor of a counter of 2.5 GHz, 1 ms after the start.
    fn anchored() -> Anchor {
        let (first, ns) = Anchor::NONE.renewed(1000, 5_000_000);
        assert_eq!((ns, first.read(1001)), (5_000_000, None), "it knows no rate yet");
        let (same, ns) = first.renewed(1000 + TICKS_PER_MS / 2, 5_500_000);
        assert_eq!((ns, same.ticks), (5_500_000, 1000), "and waits for more time to pass");
        let (anchor, ns) = first.renewed(1000 + TICKS_PER_MS, 6_000_000);
        assert_eq!(ns, 6_000_000);
        anchor
    }

    #[test]
    fn counter_extends_anchor_for_one_millisecond() {
        let (anchor, at) = (anchored(), 1000 + TICKS_PER_MS);
        assert_eq!(anchor.read(at), Some(6_000_000));
        assert_eq!(anchor.read(at + 2500), Some(6_000_999), "rates are rounded down");
        assert_eq!(anchor.read(at + TICKS_PER_MS - 2500), Some(6_998_999));
        assert_eq!(anchor.read(at + TICKS_PER_MS + 10), None);
        assert_eq!(anchor.read(at - 1), None, "a counter that went back");
    }

    #[test]
    fn time_ahead_waits_for_system_clock() {
        let (mut anchor, mut ticks, mut system_ns) = (anchored(), 1000 + TICKS_PER_MS, 6_000_000);
        // The counter now runs faster by 1 in 1000 than before.
        let mut last = 0;
        for _ in 0..50 {
            for _ in 0..10 {
                ticks += TICKS_PER_MS / 10 + TICKS_PER_MS / 10_000;
                system_ns += 100_000;
                let now = anchor.read(ticks).unwrap_or_else(|| {
                    let (renewed, now) = anchor.renewed(ticks, system_ns);
                    anchor = renewed;
                    now
                });
                assert!(now > last, "{now} after {last}");
                assert!(now.abs_diff(system_ns) < 3000, "{now} at {system_ns}");
                last = now;
            }
        }
        assert!(last.abs_diff(system_ns) < 200, "{last} at {system_ns}");
    }

    #[test]
    fn jumping_counter_is_rejected() {
        let (anchor, at) = (anchored(), 1000 + TICKS_PER_MS);
        for ticks in [at + 3 * TICKS_PER_MS, at - 5, at + TICKS_PER_MS / 4, at] {
            let (wrong, now) = anchor.renewed(ticks, 7_000_000);
            assert!(wrong.is_wrong, "{ticks}");
            assert_eq!((now, wrong.read(ticks)), (7_000_000, None));
        }
    }

    #[test]
    fn slow_system_clock_disables_counter() {
        let mut anchor = anchored();
        for _ in 0..MISSES_MAX {
            anchor = anchor.missed();
            assert!(!anchor.is_wrong);
        }
        let (renewed, _) = anchor.renewed(1000 + 2 * TICKS_PER_MS, 7_000_000);
        assert_eq!((renewed.is_wrong, renewed.misses), (false, 0));
        assert!(anchor.missed().is_wrong);
    }

    #[test]
    fn anchor_is_renewed_after_sleep() {
        let (anchor, at) = (anchored(), 1000 + TICKS_PER_MS);
        let hour_ns = 3_600_000_000_000;
        // The counter is off by a millionth, as is the first rate.
        let ticks = at + 3_600_000 * TICKS_PER_MS + 9_000_000;
        let (renewed, now) = anchor.renewed(ticks, 6_000_000 + hour_ns);
        assert_eq!(now, 6_000_000 + hour_ns);
        assert!(!renewed.is_wrong && renewed.read(ticks + 2500) == Some(now + 999));
    }

    #[test]
    fn readings_match_system_clock_and_are_monotonic() {
        let mut last = 0;
        let until = system_ns() + 10 * SPAN_NS;
        while last < until {
            let (before, now, after) = (system_ns(), now_ns(), system_ns());
            assert!(now >= last, "{now} after {last}");
            assert!(now + WRONG_NS >= before && now <= after + WRONG_NS, "{before} {now} {after}");
            last = now;
        }
    }
}
