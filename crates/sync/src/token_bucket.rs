//! Primitive: the token bucket, a bandwidth limit.
//!
//! Protects   the bytes that may still be transferred in this tick.
//! Why        all queues of a device share one limit (null_blk's `mbps`).
//! States     `left` above 0: requests may start; else they wait for the next tick. A request may
//!            take more than is left, and the following ticks pay the debt. So a request above one
//!            tick's share can pass, and the mean rate is right.
//! Order      rank BUCKET; no lock is taken under it.
//! Common     a spinning lock around an addition; only if a limit is set.
//! Cost       about 5 ns a request.
//! Before     a timer that refills, and stopped queues.

use crate::lock::Lock;
use crate::rank::ranks;
use crate::spin_lock::SpinLock;

/// A budget of bytes that is refilled every tick.
#[derive(Debug)]
pub struct TokenBucket {
    bytes_per_tick: u64,
    tick_ns: u64,
    state: SpinLock<State, { ranks::BUCKET }>,
}

#[derive(Debug)]
struct State {
    /// The tick of the last refill, counted from time 0.
    tick: u64,
    /// The bytes that may be transferred; negative for a debt.
    left: i64,
}

impl TokenBucket {
    /// A full bucket. Neither value may be 0, and a tick's bytes must be below 2^62.
    pub fn new(bytes_per_tick: u64, tick_ns: u64) -> TokenBucket {
        assert!(tick_ns > 0 && bytes_per_tick > 0 && bytes_per_tick < 1 << 62);
        let state = State { tick: 0, left: bytes_per_tick as i64 };
        TokenBucket { bytes_per_tick, tick_ns, state: SpinLock::new(state) }
    }

    /// Takes `bytes` at the time `now_ns`.
    ///
    /// # Errors
    /// If nothing is left: the time at which to try again, in nanoseconds.
    pub fn take(&self, now_ns: u64, bytes: u64) -> Result<(), u64> {
        let tick = now_ns / self.tick_ns;
        let full = self.bytes_per_tick as i64;
        self.state.with(|state| {
            // Queues read the clock before this call, so a tick may seem to go backwards.
            if tick > state.tick {
                let ticks = i64::try_from(tick - state.tick).unwrap_or(i64::MAX);
                state.left = state.left.saturating_add(ticks.saturating_mul(full)).min(full);
                state.tick = tick;
            }
            if state.left > 0 {
                let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
                state.left = state.left.saturating_sub(bytes);
                return Ok(());
            }
            let ticks = state.left.unsigned_abs() / self.bytes_per_tick + 1;
            Err(state.tick.saturating_add(ticks).saturating_mul(self.tick_ns))
        })
    }

    /// Returns the bytes of a transfer that did not take place.
    pub fn give_back(&self, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let full = self.bytes_per_tick as i64;
        self.state.with(|state| state.left = state.left.saturating_add(bytes).min(full));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn mean_rate_equals_limit_for_any_request_size() {
        for bytes in [1, 100, 1000, 4096, 1 << 20] {
            let bucket = TokenBucket::new(1000, 20);
            let (mut now, mut passed) = (0, 0);
            while now < 20 * 10_000 {
                match bucket.take(now, bytes) {
                    Ok(()) => passed += bytes,
                    Err(at) => {
                        assert!(at > now);
                        now = at;
                    }
                }
            }
            let wanted = 1000 * 10_000;
            assert!(passed <= wanted + 1000 + bytes, "{bytes}: {passed}");
            assert!(passed + bytes >= wanted - 1000, "{bytes}: {passed}");
        }
    }

    #[test]
    fn idle_time_accumulates_one_tick_at_most() {
        let bucket = TokenBucket::new(1000, 20);
        assert_eq!(bucket.take(20_000_000, 1000), Ok(()));
        assert_eq!(bucket.take(20_000_000, 1), Err(20_000_020));
        bucket.give_back(500);
        assert_eq!(bucket.take(20_000_000, 500), Ok(()));
        bucket.give_back(u64::MAX);
        assert_eq!(bucket.take(20_000_000, 1000), Ok(()));
        assert_eq!(bucket.take(20_000_000, 1), Err(20_000_020));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn two_queues_share_one_budget() {
        loom::model(|| {
            let bucket = Arc::new(TokenBucket::new(10, 20));
            let other = Arc::clone(&bucket);
            let thread = loom::thread::spawn(move || other.take(0, 10).is_ok());
            let mine = bucket.take(0, 10).is_ok();
            assert!(mine != thread.join().unwrap(), "one of them, and only one, passes");
        });
    }
}
