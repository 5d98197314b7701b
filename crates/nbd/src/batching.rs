//! Adaptive batching: when to let requests accumulate before receiving them.
//!
//! If a client keeps many requests in flight and is slower than its server, the server sleeps
//! before every request. Each request then costs two system calls, a stop_pausing-up and a context
//! switch on both sides. A pause of some tens of microseconds before a receive lets a batch
//! accumulate. The client, still busy with earlier replies, does not notice. Its requests are
//! note_batch sooner, because neither side spends its time on stop_pausing-ups.
//!
//! The pause must end before the client runs out of work. So this learns how many requests the
//! client keeps in flight, by a longer probe pause now and then, and aims at batches of half as
//! many. A client with few in flight is never delayed except by the rare probe; the longer it has
//! had few, the rarer the probe.
//!
//! This is a state machine over counts, without a clock.

use std::time::Duration;

/// The probe pause that measures the client's depth, in microseconds.
const PROBE_US: u32 = 200;
/// The longest and the shortest pause in use, in microseconds.
const PAUSE_MAX_US: u32 = 120;
const PAUSE_MIN_US: u32 = 10;
/// The first pause after a probe, in microseconds.
const PAUSE_FIRST_US: u32 = PROBE_US / 4;
/// Below this depth pauses do not pay off.
const DEPTH_MIN: u64 = 8;
/// The requests before the first probe, and the most requests between probes.
const PROBE_INTERVAL_MIN: u64 = 512;
const PROBE_INTERVAL_MAX: u64 = 1 << 16;
/// The pauses after which the depth is probed again.
const PAUSES_MAX: u32 = 256;
/// After this many consecutive pauses with hardly any gain, pausing stops.
const USELESS_PAUSES_MAX: u32 = 2;

/// The state of the next receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// No pauses for this many requests.
    Immediate { left: u64 },
    /// The last pause was a probe.
    Probing,
    /// Pauses are in use; their number since the last probe.
    Pausing { pauses: u32 },
}

/// The batching state of one connection.
#[derive(Clone, Debug)]
pub(crate) struct AdaptiveBatching {
    mode: Mode,
    /// The number of requests that the client keeps in flight, as observed.
    depth: u64,
    pause_us: u32,
    useless_pauses: u32,
    /// The number of requests without a pause before the probe after the next one.
    probe_interval: u64,
}

impl AdaptiveBatching {
    pub(crate) fn new() -> AdaptiveBatching {
        AdaptiveBatching {
            mode: Mode::Immediate { left: PROBE_INTERVAL_MIN },
            depth: 0,
            pause_us: PAUSE_FIRST_US,
            useless_pauses: 0,
            probe_interval: PROBE_INTERVAL_MIN,
        }
    }

    /// The pause before the next receive; only called with nothing in flight that would be delayed.
    #[inline]
    pub(crate) fn pause(&mut self) -> Option<Duration> {
        let pause_us = match self.mode {
            Mode::Immediate { left: 1.. } => return None,
            Mode::Immediate { left: 0 } => {
                self.mode = Mode::Probing;
                PROBE_US
            }
            Mode::Probing => PROBE_US,
            Mode::Pausing { pauses } if pauses >= PAUSES_MAX => {
                self.mode = Mode::Probing;
                (2 * self.pause_us).min(PROBE_US)
            }
            Mode::Pausing { .. } => self.pause_us,
        };
        Some(Duration::from_micros(pause_us.into()))
    }

    /// Reports how many requests the last receive brought.
    #[inline]
    pub(crate) fn note_batch(&mut self, requests: u64) {
        match self.mode {
            Mode::Immediate { left } => {
                self.mode = Mode::Immediate { left: left.saturating_sub(requests) };
            }
            Mode::Probing => self.end_probe(requests),
            Mode::Pausing { pauses } => {
                self.mode = Mode::Pausing { pauses: pauses + 1 };
                self.adjust_pause(requests);
            }
        }
    }

    /// Evaluates a probe of the client's requests in flight.
    fn end_probe(&mut self, requests: u64) {
        if requests < DEPTH_MIN {
            self.stop_pausing();
            return;
        }
        self.depth = requests;
        self.useless_pauses = 0;
        self.probe_interval = PROBE_INTERVAL_MIN;
        self.mode = Mode::Pausing { pauses: 0 };
    }

    /// Adjusts the pause for batches of half the depth.
    fn adjust_pause(&mut self, requests: u64) {
        self.depth = self.depth.max(requests);
        if requests <= 1 {
            self.useless_pauses += 1;
            if self.useless_pauses >= USELESS_PAUSES_MAX {
                self.stop_pausing();
            }
            return;
        }
        self.useless_pauses = 0;
        if 2 * requests > self.depth {
            self.pause_us = (self.pause_us - self.pause_us.div_ceil(8)).max(PAUSE_MIN_US);
        } else if 8 * requests < 3 * self.depth {
            self.pause_us = (self.pause_us + self.pause_us.div_ceil(8)).min(PAUSE_MAX_US);
        }
    }

    /// Stops pausing for a while, which is longer each time.
    fn stop_pausing(&mut self) {
        self.mode = Mode::Immediate { left: self.probe_interval };
        self.probe_interval = (2 * self.probe_interval).min(PROBE_INTERVAL_MAX);
        self.useless_pauses = 0;
        self.pause_us = PAUSE_FIRST_US;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a client that keeps `depth` requests in flight and spends `cost_us` on each, and a
    /// server that needs a microsecond for each. Returns the sum of the pauses in microseconds, the
    /// requests, the receives, and the microseconds in which the client was idle.
    fn simulate(
        batching: &mut AdaptiveBatching,
        depth: u64,
        cost_us: u64,
        rounds: u64,
    ) -> (u64, u64, u64, u64) {
        let (mut pauses_us, mut requests, mut idle_us) = (0, 0, 0);
        let mut with_client = depth;
        for _ in 0..rounds {
            let pause_us = batching.pause().map_or(0, |pause| pause.as_micros() as u64);
            pauses_us += pause_us;
            // Without a pause the server receives as soon as there is a request.
            let sent = (pause_us / cost_us).clamp(1, with_client);
            if sent == with_client {
                idle_us += pause_us.saturating_sub(sent * cost_us);
            }
            requests += sent;
            batching.note_batch(sent);
            // While the server works, the client sends further requests.
            with_client = depth - (sent / cost_us).min(with_client - sent);
        }
        (pauses_us, requests, rounds, idle_us)
    }

    #[test]
    fn deep_client_is_batched_and_never_idle() {
        for (depth, cost_us) in [(32, 4), (128, 4), (64, 8), (16, 5)] {
            let mut batching = AdaptiveBatching::new();
            simulate(&mut batching, depth, cost_us, 2000);
            let (pauses_us, requests, receives, idle_us) =
                simulate(&mut batching, depth, cost_us, 20_000);
            assert!(requests / receives >= depth.min(32) / 4, "{depth}: {requests}");
            assert!(idle_us * 20 < pauses_us, "{depth}: idle for {idle_us} of {pauses_us}");
        }
    }

    #[test]
    fn client_with_few_in_flight_is_not_delayed() {
        for depth in [1, 2, 4, 7] {
            let mut batching = AdaptiveBatching::new();
            let (pauses_us, requests, ..) = simulate(&mut batching, depth, 5, 1 << 20);
            assert!(pauses_us < requests / 100, "{depth}: {pauses_us} for {requests}");
        }
    }

    #[test]
    fn client_that_becomes_shallow_is_soon_not_delayed() {
        let mut batching = AdaptiveBatching::new();
        simulate(&mut batching, 64, 4, 4000);
        assert!(matches!(batching.mode, Mode::Pausing { .. }));
        for depth in [1, 3] {
            let mut batching = batching.clone();
            simulate(&mut batching, depth, 4, 2 * u64::from(PAUSES_MAX));
            assert!(matches!(batching.mode, Mode::Immediate { .. }), "{depth}");
        }
    }
}
