//! Samples of the latency of requests that are executed inline, where two readings of the clock for
//! each request would cost as much as the request.
//!
//! A sample counts for all requests since the sample before it, so that counts and sums of
//! latencies are those of all requests. The gaps between samples are irregular: a guest whose
//! requests have a period would otherwise have the same request of each period measured.

/// Chooses the requests that are timed: one in 16.5 on average.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LatencySampler {
    /// The requests that were executed since the last one that was timed.
    untimed: u32,
    /// How many requests the next one that is timed follows.
    gap: u32,
    /// The state of the pseudo-random numbers, not 0.
    random: u32,
}

impl LatencySampler {
    /// The first request is timed.
    pub(crate) fn new() -> LatencySampler {
        LatencySampler { untimed: 0, gap: 0, random: 0x9e37_79b9 }
    }

    /// Whether the next request that is executed has to be timed.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.untimed == self.gap
    }

    /// Accounts for a request that was executed without being timed.
    #[inline]
    pub(crate) fn untimed(&mut self) {
        self.untimed += 1;
    }

    /// Accounts for a request that was timed. Returns the number of requests that it counts for.
    pub(crate) fn timed(&mut self) -> u64 {
        let requests = u64::from(std::mem::take(&mut self.untimed)) + 1;
        // Xorshift, by Marsaglia.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        self.gap = self.random >> 27; // Up to 31.
        requests
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum of latencies was a 16th of the true one, and of 32 requests with a period of 16 one
    /// was sampled, again and again.
    #[test]
    fn samples_count_for_all_requests_and_each_one_of_a_period() {
        const REQUESTS: u64 = 1 << 18;
        for period in [2, 3, 16, 32] {
            let mut sampler = LatencySampler::new();
            let mut counts = vec![0; period];
            for number in 0..REQUESTS {
                if sampler.is_due() {
                    counts[number as usize % period] += sampler.timed();
                } else {
                    sampler.untimed();
                }
            }
            let total: u64 = counts.iter().sum();
            assert!((REQUESTS - 31..=REQUESTS).contains(&total), "{period}: {total}");
            let share = REQUESTS / period as u64;
            let is_near = |count: &u64| count.abs_diff(share) < share / 4;
            assert!(counts.iter().all(is_near), "{period}: {share}, {counts:?}");
        }
    }
}
