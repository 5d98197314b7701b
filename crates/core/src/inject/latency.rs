//! Distributions of injected latency.

/// Longest latency that a rule may inject, in nanoseconds: five minutes, longer than the timeouts
/// of Linux's drivers (NVMe and NBD 30 s) and of its detector of hung tasks (120 s).
pub const LATENCY_NS_MAX: u64 = 300_000_000_000;

/// A distribution of latency. All times are at most [`LATENCY_NS_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Latency {
    /// Always the same time.
    Fixed {
        /// The latency.
        ns: u64,
    },
    /// Every time from `min_ns` to `max_ns` with the same probability.
    Uniform {
        /// The shortest latency.
        min_ns: u64,
        /// The longest latency, not below `min_ns`.
        max_ns: u64,
    },
    /// A distribution with these quantiles, which do not decrease; `p50_ns` is at least 1.
    ///
    /// Between the quantiles the logarithm of the latency is linear in the number of nines,
    /// `-log10(1 - p)`: the percentiles 50, 99 and 99.9 have 0.3, 2 and 3 nines. The least latency
    /// is half the median. Above the percentile 99.9 the line from 99 goes on to 99.99, which is
    /// the longest latency.
    Quantiles {
        /// The median.
        p50_ns: u64,
        /// The percentile 99.
        p99_ns: u64,
        /// The percentile 99.9.
        p999_ns: u64,
    },
}

impl Latency {
    /// The latency that the part `p` of all samples does not exceed, in nanoseconds: a uniformly
    /// random `p` from 0 to below 1 makes a sample.
    pub fn quantile_ns(self, p: f64) -> u64 {
        match self {
            Latency::Fixed { ns } => ns,
            Latency::Uniform { min_ns, max_ns } => {
                min_ns + ((max_ns - min_ns + 1) as f64 * p) as u64
            }
            Latency::Quantiles { p50_ns, p99_ns, p999_ns } => {
                let [p50, p99, p999] = [p50_ns, p99_ns, p999_ns].map(|ns| (ns as f64).ln());
                let points = [
                    (0.0, p50 - 2_f64.ln()),
                    (2_f64.log10(), p50),
                    (2.0, p99),
                    (3.0, p999),
                    (4.0, 2.0 * p999 - p99),
                ];
                let nines = -(1.0 - p).log10();
                let end = points.iter().position(|point| nines < point.0);
                let logarithm = match end {
                    Some(end) => {
                        let (from, to) = (points[end.max(1) - 1], points[end.max(1)]);
                        from.1 + (to.1 - from.1) * (nines - from.0) / (to.0 - from.0)
                    }
                    None => points[points.len() - 1].1,
                };
                (logarithm.exp().round() as u64).min(LATENCY_NS_MAX)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const SKEWED: Latency = Latency::Quantiles { p50_ns: MS / 5, p99_ns: 5 * MS, p999_ns: 50 * MS };

    /// Relative error of the logarithms.
    fn is_near(have: u64, want: u64) -> bool {
        have.abs_diff(want) <= want / 1000 + 1
    }

    #[test]
    fn quantiles_are_the_given_ones() {
        for (p, want) in [
            (0.0, MS / 10),
            (0.5, MS / 5),
            (0.99, 5 * MS),
            (0.999, 50 * MS),
            (0.9999, 500 * MS),
            (0.999_999, 500 * MS),
        ] {
            let have = SKEWED.quantile_ns(p);
            assert!(is_near(have, want), "{p}: {have}, expected {want}");
        }
        // One nine lies (1 - 0.301) / (2 - 0.301) of the way from the median to the percentile 99.
        let p90 = (MS / 5) as f64 * 25_f64.powf(0.699 / 1.699);
        assert!(is_near(SKEWED.quantile_ns(0.9), p90 as u64));
    }

    #[test]
    fn quantiles_never_decrease_and_are_bounded() {
        let longest =
            Latency::Quantiles { p50_ns: 1, p99_ns: LATENCY_NS_MAX / 10, p999_ns: LATENCY_NS_MAX };
        for latency in [SKEWED, longest, Latency::Uniform { min_ns: 3, max_ns: 9 }] {
            let mut last = 0;
            for step in 0..100_000 {
                let ns = latency.quantile_ns(f64::from(step) / 1e5);
                assert!((last..=LATENCY_NS_MAX).contains(&ns), "{latency:?} at {step}: {ns}");
                last = ns;
            }
        }
        let equal = Latency::Quantiles { p50_ns: 7, p99_ns: 7, p999_ns: 7 };
        assert_eq!([0.5, 0.9, 0.999_99].map(|p| equal.quantile_ns(p)), [7; 3]);
    }

    #[test]
    fn uniform_latency_has_both_ends() {
        let uniform = Latency::Uniform { min_ns: 10, max_ns: 13 };
        assert_eq!([0.0, 0.25, 0.5, 0.999].map(|p| uniform.quantile_ns(p)), [10, 11, 12, 13]);
        assert_eq!(Latency::Fixed { ns: 5 }.quantile_ns(0.7), 5);
    }
}
