//! The lease of a remote pool: until when its opener may serve ([`LeaseTerm`]), and when a standby
//! may take the pool over ([`SeenLease`]).
//!
//! The lease is an object. Its opener replaces it again and again, each time by another version; a
//! standby reads it. Both measure by their own clocks, which need not agree.
//!
//! **An opener has stopped serving before a standby takes the pool over.** `L` is the length of the
//! lease:
//!
//! 1. The opener takes the time `s` before it sends a version, and serves until `s + L`, once the
//!    storage has confirmed that version. So version `v` lets it serve until `s(v) + L`.
//! 2. A standby that has `v` as the answer to its first read at the time `f` knows `s(v) <= f`: a
//!    version is sent before it can be read.
//! 3. The standby *claims* the lease at a time `q >= f + L`: it replaces version `v`, and only that
//!    one. So no version after `v` has been there. A version of this opener that comes later is
//!    refused: it finds the claim in place of the last version.
//! 4. So the opener serves until `s(v) + L <= f + L <= q` at most.
//! 5. The standby opens the pool only if no opener came after the one that it has watched.
//!
//! The opener measures by a clock that goes on while the machine is suspended. The proof needs that
//! the two clocks run equally fast while a lease lasts. [`serving_ns`] subtracts a hundredth, which
//! allows for clocks whose rates differ by less than that.
#![allow(clippy::disallowed_types)] // One word that stands for itself: no order is needed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::remote::Lease;

/// How often a standby reads a lease in its length.
pub const LEASE_READS: u32 = 3;

/// Nanoseconds since the machine was started, those in which it was suspended included.
pub fn boot_ns() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// For how long a confirmed version of a lease lets its opener serve, in nanoseconds, from before
/// it was sent.
pub fn serving_ns(length: Duration) -> u64 {
    let length_ns = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
    length_ns - length_ns / 100
}

/// What an opener may do at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serving {
    /// It serves.
    Yes,
    /// It must not serve now, and may later: the lease was not renewed in time.
    Held,
    /// It must not serve: the pool is lost, or the lease was not renewed for very long.
    Refused,
}

/// The last values of a term are states.
const UNLIMITED: u64 = u64::MAX;
const ENDED: u64 = u64::MAX - 1;
const REFUSED: u64 = u64::MAX - 2;

/// Until when the opener of a pool may serve. The thread that renews the lease sets it, and each
/// thread that serves reads it.
///
/// | value | state |
/// | --- | --- |
/// | a time of [`boot_ns`] | serves until then, and then holds requests |
/// | `REFUSED` | refuses requests until the lease is renewed |
/// | `ENDED` | refuses requests, permanently |
/// | `UNLIMITED` | there is no lease |
///
/// Order: relaxed. The value stands for itself: no other memory is read because of it.
#[derive(Debug)]
pub struct LeaseTerm(AtomicU64);

impl LeaseTerm {
    /// The term of an opener without a lease.
    pub fn unlimited() -> LeaseTerm {
        LeaseTerm(AtomicU64::new(UNLIMITED))
    }

    /// The term of an opener whose lease was never renewed.
    pub fn held() -> LeaseTerm {
        LeaseTerm(AtomicU64::new(0))
    }

    /// Whether the opener may serve now. Without a lease this reads no clock.
    pub fn serving(&self) -> Serving {
        match self.0.load(Ordering::Relaxed) {
            UNLIMITED => Serving::Yes,
            ENDED | REFUSED => Serving::Refused,
            until => Serving::until(until, boot_ns()),
        }
    }

    /// The storage has confirmed a version of the lease, which lets the opener serve until a time.
    pub fn renew(&self, until_ns: u64) {
        self.set(until_ns);
    }

    /// Holds requests until the next renewal.
    pub fn hold(&self) {
        self.set(0);
    }

    /// Refuses requests until the next renewal.
    pub fn refuse(&self) {
        self.set(REFUSED);
    }

    /// Refuses requests permanently: the pool is lost.
    pub fn end(&self) {
        self.0.store(ENDED, Ordering::Relaxed);
    }

    /// Sets the value, unless the pool is lost.
    fn set(&self, value: u64) {
        let set = |old| (old != ENDED).then_some(value);
        // An error is the value that stays.
        _ = self.0.try_update(Ordering::Relaxed, Ordering::Relaxed, set);
    }
}

impl Serving {
    fn until(until_ns: u64, now_ns: u64) -> Serving {
        if now_ns < until_ns { Serving::Yes } else { Serving::Held }
    }
}

/// When a standby asked the storage for a lease, and when it had the answer.
#[derive(Clone, Copy, Debug)]
pub struct AskedAt {
    /// Before the request.
    pub asked: Instant,
    /// After the answer.
    pub answered: Instant,
}

/// The lease that a standby has seen last.
#[derive(Debug, Default)]
pub struct SeenLease(Option<(Lease, Seen)>);

/// When a lease was seen that has not changed since.
#[derive(Clone, Copy, Debug)]
struct Seen {
    first_answered: Instant,
    last_asked: Instant,
}

impl SeenLease {
    /// The time for which a lease must not change: the longer one of the length that the standby
    /// was given and the one that the opener has promised.
    fn length(own: Duration, lease: &Lease) -> Duration {
        own.max(lease.length)
    }

    /// Adds an answer: the lease; `None` inside: there is none; `None`: the storage did not answer.
    /// Returns the lease if it has not changed for its length. Without a lease no opener has
    /// promised to renew one.
    ///
    /// The time begins again after a request without an answer, and after a pause that is longer
    /// than two intervals between requests: the opener may not have reached the storage either, or
    /// this machine was suspended.
    pub fn ran_out(
        &mut self,
        found: Option<Option<Lease>>,
        AskedAt { asked, answered }: AskedAt,
        own_length: Duration,
    ) -> Option<Lease> {
        let Some(lease) = found.flatten() else {
            self.0 = None;
            return None;
        };
        let length = SeenLease::length(own_length, &lease);
        let pause_max = own_length / LEASE_READS * 2;
        let first_answered = match self.0 {
            Some((seen, times)) if seen == lease && asked - times.last_asked <= pause_max => {
                times.first_answered
            }
            _ => answered,
        };
        self.0 = Some((lease, Seen { first_answered, last_asked: asked }));
        (asked.saturating_duration_since(first_answered) >= length).then_some(lease)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: Duration = Duration::from_secs(10);

    fn lease(opener: u8, renewals: u64) -> Lease {
        Lease { opener: [opener; 16], epoch: opener.into(), renewals, length: LENGTH }
    }

    #[test]
    fn a_term_without_a_lease_serves_until_it_ends() {
        let term = LeaseTerm::unlimited();
        assert_eq!(term.serving(), Serving::Yes);
        term.end();
        term.renew(u64::MAX / 2);
        assert_eq!(term.serving(), Serving::Refused);
    }

    #[test]
    fn a_term_holds_requests_until_it_is_renewed() {
        let term = LeaseTerm::held();
        assert_eq!(term.serving(), Serving::Held);
        term.renew(boot_ns() + 3_600_000_000_000);
        assert_eq!(term.serving(), Serving::Yes);
        term.renew(boot_ns());
        assert_eq!(term.serving(), Serving::Held);
        term.refuse();
        assert_eq!(term.serving(), Serving::Refused);
        term.renew(boot_ns() + 3_600_000_000_000);
        assert_eq!(term.serving(), Serving::Yes);
        term.hold();
        assert_eq!(term.serving(), Serving::Held);
    }

    #[test]
    fn a_lease_runs_out_if_it_does_not_change_for_its_length() {
        let begin = Instant::now();
        let lease = |opener, renewals| Some(Some(lease(opener, renewals)));
        let (removed, no_answer) = (Some(None), None);
        let mut seen = SeenLease::default();
        for (second, found, expected) in [
            (0, removed, false),
            (100, removed, false),
            (101, lease(1, 5), false),
            (104, lease(1, 5), false),
            (107, lease(1, 5), false),
            (110, lease(1, 5), false),
            // A renewal.
            (113, lease(1, 6), false),
            (116, lease(1, 6), false),
            (119, lease(1, 6), false),
            (122, lease(1, 6), false),
            // Another opener.
            (123, lease(2, 6), false),
            (126, lease(2, 6), false),
            (129, lease(2, 6), false),
            (132, lease(2, 6), false),
            (133, lease(2, 6), true),
            (134, removed, false),
            (135, lease(2, 6), false),
            (140, lease(2, 6), false),
            // An outage of the object store: the opener could not renew its lease either.
            (143, no_answer, false),
            (146, lease(2, 6), false),
            (150, lease(2, 6), false),
            (155, lease(2, 6), false),
            (156, lease(2, 6), true),
            // This machine was suspended, or its request took long.
            (170, lease(2, 6), false),
            (176, lease(2, 6), false),
            (179, lease(2, 6), false),
            (180, lease(2, 6), true),
        ] {
            let asked = begin + Duration::from_secs(second);
            let ran_out = seen.ran_out(found, AskedAt { asked, answered: asked }, LENGTH);
            assert_eq!(ran_out, found.flatten().filter(|_| expected), "at {second} s");
        }
    }

    #[test]
    fn the_longer_length_of_the_lease_and_of_the_standby_decides() {
        for (own, promised, expected) in [(3, 9, 9), (9, 3, 9), (6, 6, 6)] {
            let begin = Instant::now();
            let [own, promised] = [own, promised].map(Duration::from_secs);
            let lease = Lease { length: promised, ..lease(1, 1) };
            let mut seen = SeenLease::default();
            let ran_out = |second: &u64| {
                let asked = begin + Duration::from_secs(*second);
                let at = AskedAt { asked, answered: asked };
                seen.ran_out(Some(Some(lease)), at, own).is_some()
            };
            assert_eq!((0..20).find(ran_out), Some(expected));
        }
    }

    /// A machine of the model: its clock runs faster or slower than real time, in parts of 10,000.
    #[derive(Clone, Copy)]
    struct ModelClock(u64);

    impl ModelClock {
        fn draw(random: &mut fastrand::Rng) -> ModelClock {
            ModelClock(random.u64(9_960..=10_040))
        }

        fn read(self, real_ms: u64) -> u64 {
            1_000_000 + real_ms * self.0 / 10_000
        }
    }

    /// The opener of the model, which renews its lease.
    struct ModelOpener {
        clock: ModelClock,
        /// Until when it serves, on its clock.
        until_ms: u64,
        step: OpenerStep,
    }

    enum OpenerStep {
        Pauses,
        /// A version was sent at this time of its clock.
        Sent(u64),
        /// The storage has the version, and the opener does not know it.
        Stored(u64),
    }

    fn until_ms(sent_ms: u64) -> u64 {
        sent_ms + serving_ns(MODEL_LENGTH) / 1_000_000
    }

    impl ModelOpener {
        /// Takes a step at a real time.
        fn step(&mut self, now_ms: u64, stored: &mut Lease, random: &mut fastrand::Rng) {
            let clock_ms = self.clock.read(now_ms);
            self.step = match self.step {
                OpenerStep::Pauses => OpenerStep::Sent(clock_ms),
                OpenerStep::Sent(sent_ms) => {
                    stored.renewals += 1;
                    // An answer may be lost.
                    match random.u8(0..8) {
                        0 => OpenerStep::Pauses,
                        _ => OpenerStep::Stored(sent_ms),
                    }
                }
                OpenerStep::Stored(sent_ms) => {
                    self.until_ms = until_ms(sent_ms);
                    OpenerStep::Pauses
                }
            };
        }

        /// Whether it serves, or will because of an answer that is in flight. A version that was
        /// sent and is not stored finds the claim in its place.
        fn may_serve(&self, now_ms: u64) -> bool {
            let clock_ms = self.clock.read(now_ms);
            let in_flight = match self.step {
                OpenerStep::Stored(sent_ms) => until_ms(sent_ms),
                _ => 0,
            };
            Serving::until(self.until_ms.max(in_flight), clock_ms) == Serving::Yes
        }
    }

    /// The standby of the model.
    struct ModelStandby {
        clock: ModelClock,
        seen: SeenLease,
        step: StandbyStep,
    }

    enum StandbyStep {
        Pauses,
        /// It has asked for the lease at this time of its clock.
        Asked(u64),
        /// The storage has answered, and the standby does not know it.
        Answered(u64, Lease),
        /// It has asked to replace this version by a claim.
        Claims(Lease),
    }

    impl ModelStandby {
        /// Takes a step at a real time. Returns whether the lease is claimed.
        fn step(&mut self, now_ms: u64, stored: Lease, begin: Instant) -> bool {
            let clock_ms = self.clock.read(now_ms);
            let at = |ms: u64| begin + Duration::from_millis(ms);
            self.step = match self.step {
                StandbyStep::Pauses => StandbyStep::Asked(clock_ms),
                StandbyStep::Asked(asked_ms) => StandbyStep::Answered(asked_ms, stored),
                StandbyStep::Answered(asked_ms, found) => {
                    let times = AskedAt { asked: at(asked_ms), answered: at(clock_ms) };
                    let ran_out = self.seen.ran_out(Some(Some(found)), times, MODEL_LENGTH);
                    ran_out.map_or(StandbyStep::Pauses, StandbyStep::Claims)
                }
                StandbyStep::Claims(seen) if seen == stored => return true,
                StandbyStep::Claims(_) => {
                    self.seen = SeenLease::default();
                    StandbyStep::Pauses
                }
            };
            false
        }
    }

    const MODEL_LENGTH: Duration = Duration::from_secs(3);

    /// Runs an opener and a standby with requests and pauses of any length: each may be cut off,
    /// slow or suspended for a time. Returns whether the standby has claimed the lease. From then
    /// on the opener must not serve.
    fn run_model(random: &mut fastrand::Rng) -> bool {
        let begin = Instant::now();
        let mut stored = Lease { length: MODEL_LENGTH, ..lease(1, 0) };
        let clock = ModelClock::draw(random);
        let mut opener = ModelOpener { clock, until_ms: 0, step: OpenerStep::Pauses };
        let (clock, seen) = (ModelClock::draw(random), SeenLease::default());
        let mut standby = ModelStandby { clock, seen, step: StandbyStep::Pauses };
        let (mut now_ms, mut next_ms) = (0, [0_u64; 2]);
        while now_ms < 120_000 {
            let which = usize::from(next_ms[1] < next_ms[0]);
            now_ms = now_ms.max(next_ms[which]);
            let delay_max_ms = if random.u8(0..16) == 0 { 9000 } else { 700 };
            next_ms[which] = now_ms + random.u64(1..delay_max_ms);
            if which == 0 {
                opener.step(now_ms, &mut stored, random);
            } else if standby.step(now_ms, stored, begin) {
                assert!(!opener.may_serve(now_ms), "the lease is claimed at {now_ms} ms");
                return true;
            }
        }
        false
    }

    #[test]
    fn an_opener_does_not_serve_after_a_standby_has_claimed_its_lease() {
        let claims =
            (0..20_000).filter(|seed| run_model(&mut fastrand::Rng::with_seed(*seed))).count();
        assert!((2000..19_000).contains(&claims), "{claims} claims in 20,000 runs");
    }
}
