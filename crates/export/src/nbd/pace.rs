//! Adaptive batching: when to let requests accumulate before receiving them.
//!
//! If a client keeps many requests in flight and is slower than its server, the server sleeps
//! before every request. Each request then costs two system calls, a wake-up and a context switch
//! on both sides. A pause of some tens of microseconds before a receive lets a batch accumulate.
//! The client, still busy with earlier replies, does not notice. Its requests are answered sooner,
//! because neither side spends its time on wake-ups.
//!
//! The pause must end before the client runs out of work. So this learns how many requests the
//! client keeps in flight, by a longer probe pause now and then, and aims at batches of half as
//! many. A client with few in flight is never delayed except by the rare probe; the longer it has
//! had few, the rarer the probe.
//!
//! This is a state machine over counts, without a clock.

use std::time::Duration;

/// The probe pause that measures the client's depth, in microseconds.
const ASK_US: u32 = 200;
/// The longest and the shortest pause in use, in microseconds.
const NAP_MAX_US: u32 = 120;
const NAP_MIN_US: u32 = 10;
/// The first pause after a probe, in microseconds.
const NAP_FIRST_US: u32 = ASK_US / 4;
/// Below this depth pauses do not pay off.
const DEPTH_MIN: u64 = 8;
/// The requests before the first probe, and the most requests between probes.
const HOLD_MIN: u64 = 512;
const HOLD_MAX: u64 = 1 << 16;
/// The pauses after which the depth is probed again.
const NAPS_MAX: u32 = 256;
/// After this many consecutive pauses with hardly any gain, pausing stops.
const STRIKES_MAX: u32 = 2;

/// The state of the next receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// No pauses for this many requests.
    Awake { left: u64 },
    /// The last pause was a probe.
    Asking,
    /// Pauses are in use; their number since the last probe.
    Napping { naps: u32 },
}

/// The batching state of one connection.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    mode: Mode,
    /// The number of requests that the client keeps in flight, as observed.
    depth: u64,
    nap_us: u32,
    strikes: u32,
    /// The number of requests before the probe after the next one.
    hold: u64,
}

impl Pace {
    pub(crate) fn new() -> Pace {
        Pace {
            mode: Mode::Awake { left: HOLD_MIN },
            depth: 0,
            nap_us: NAP_FIRST_US,
            strikes: 0,
            hold: HOLD_MIN,
        }
    }

    /// The pause before the next receive; only called with nothing in flight that would be delayed.
    #[inline]
    pub(crate) fn nap(&mut self) -> Option<Duration> {
        let nap_us = match self.mode {
            Mode::Awake { left: 1.. } => return None,
            Mode::Awake { left: 0 } => {
                self.mode = Mode::Asking;
                ASK_US
            }
            Mode::Asking => ASK_US,
            Mode::Napping { naps } if naps >= NAPS_MAX => {
                self.mode = Mode::Asking;
                (2 * self.nap_us).min(ASK_US)
            }
            Mode::Napping { .. } => self.nap_us,
        };
        Some(Duration::from_micros(nap_us.into()))
    }

    /// Reports how many requests the last receive brought.
    #[inline]
    pub(crate) fn answered(&mut self, requests: u64) {
        match self.mode {
            Mode::Awake { left } => {
                self.mode = Mode::Awake { left: left.saturating_sub(requests) };
            }
            Mode::Asking => self.hear(requests),
            Mode::Napping { naps } => {
                self.mode = Mode::Napping { naps: naps + 1 };
                self.adapt(requests);
            }
        }
    }

    /// Evaluates a probe of the client's requests in flight.
    fn hear(&mut self, requests: u64) {
        if requests < DEPTH_MIN {
            self.wake();
            return;
        }
        self.depth = requests;
        self.strikes = 0;
        self.hold = HOLD_MIN;
        self.mode = Mode::Napping { naps: 0 };
    }

    /// Adjusts the pause for batches of half the depth.
    fn adapt(&mut self, requests: u64) {
        self.depth = self.depth.max(requests);
        if requests <= 1 {
            self.strikes += 1;
            if self.strikes >= STRIKES_MAX {
                self.wake();
            }
            return;
        }
        self.strikes = 0;
        if 2 * requests > self.depth {
            self.nap_us = (self.nap_us - self.nap_us.div_ceil(8)).max(NAP_MIN_US);
        } else if 8 * requests < 3 * self.depth {
            self.nap_us = (self.nap_us + self.nap_us.div_ceil(8)).min(NAP_MAX_US);
        }
    }

    /// Stops pausing for a while, which is longer each time.
    fn wake(&mut self) {
        self.mode = Mode::Awake { left: self.hold };
        self.hold = (2 * self.hold).min(HOLD_MAX);
        self.strikes = 0;
        self.nap_us = NAP_FIRST_US;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a client that keeps `depth` requests in flight and spends `cost_us` on each, and a
    /// server that needs a microsecond for each. Returns the sum of the pauses in microseconds, the
    /// requests, the receives, and the microseconds in which the client was idle.
    fn simulate(pace: &mut Pace, depth: u64, cost_us: u64, rounds: u64) -> (u64, u64, u64, u64) {
        let (mut naps_us, mut requests, mut idle_us) = (0, 0, 0);
        let mut with_client = depth;
        for _ in 0..rounds {
            let nap_us = pace.nap().map_or(0, |nap| nap.as_micros() as u64);
            naps_us += nap_us;
            // Without a pause the server receives as soon as there is a request.
            let sent = (nap_us / cost_us).clamp(1, with_client);
            if sent == with_client {
                idle_us += nap_us.saturating_sub(sent * cost_us);
            }
            requests += sent;
            pace.answered(sent);
            // While the server works, the client sends further requests.
            with_client = depth - (sent / cost_us).min(with_client - sent);
        }
        (naps_us, requests, rounds, idle_us)
    }

    #[test]
    fn a_deep_client_is_batched_and_never_starved() {
        for (depth, cost_us) in [(32, 4), (128, 4), (64, 8), (16, 5)] {
            let mut pace = Pace::new();
            simulate(&mut pace, depth, cost_us, 2000);
            let (naps_us, requests, receives, idle_us) =
                simulate(&mut pace, depth, cost_us, 20_000);
            assert!(requests / receives >= depth.min(32) / 4, "{depth}: {requests}");
            assert!(idle_us * 20 < naps_us, "{depth}: idle for {idle_us} of {naps_us}");
        }
    }

    #[test]
    fn a_client_with_few_in_flight_is_left_alone() {
        for depth in [1, 2, 4, 7] {
            let mut pace = Pace::new();
            let (naps_us, requests, ..) = simulate(&mut pace, depth, 5, 1 << 20);
            assert!(naps_us < requests / 100, "{depth}: {naps_us} for {requests}");
        }
    }

    #[test]
    fn a_client_that_becomes_shallow_is_left_alone_soon() {
        let mut pace = Pace::new();
        simulate(&mut pace, 64, 4, 4000);
        assert!(matches!(pace.mode, Mode::Napping { .. }));
        for depth in [1, 3] {
            let mut pace = pace.clone();
            simulate(&mut pace, depth, 4, 2 * u64::from(NAPS_MAX));
            assert!(matches!(pace.mode, Mode::Awake { .. }), "{depth}");
        }
    }
}
