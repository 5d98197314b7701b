//! Medians, spreads, and whether two variants differ.

use serde::{Deserialize, Serialize};

/// The fewest rounds for an interval.
const INTERVAL_ROUNDS_MIN: usize = 3;

/// The fewest rounds for a verdict.
pub const VERDICT_ROUNDS_MIN: usize = 5;

/// The median of some values with the least and the greatest of them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The median; of an even number, the mean of the middle two.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
}

impl Summary {
    /// The summary of some values; `None` if there are none.
    pub fn of(values: &[f64]) -> Option<Summary> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        Some(Summary { median: middle(&sorted), min, max })
    }
}

/// The median of sorted values, of which there is at least one.
fn middle(sorted: &[f64]) -> f64 {
    (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2.0
}

/// The verdict of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ComparisonVerdict {
    /// The whole interval lies above 1.
    #[serde(rename = "faster")]
    Faster,
    /// The whole interval lies below 1.
    #[serde(rename = "slower")]
    Slower,
    /// The interval contains 1.
    #[serde(rename = "not significant")]
    NotSignificant,
    /// There are too few rounds for a verdict.
    #[serde(rename = "too few rounds")]
    TooFewRounds,
    /// The comparison is about a cost, not about better or worse.
    #[serde(rename = "cost")]
    Cost,
}

impl ComparisonVerdict {
    /// The words in results.
    pub fn name(self) -> &'static str {
        match self {
            ComparisonVerdict::Faster => "faster",
            ComparisonVerdict::Slower => "slower",
            ComparisonVerdict::NotSignificant => "not significant",
            ComparisonVerdict::TooFewRounds => "too few rounds",
            ComparisonVerdict::Cost => "cost",
        }
    }
}

/// Whether the interval of a ratio reaches an aim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AimState {
    /// The whole interval reaches the aim.
    #[serde(rename = "met")]
    Met,
    /// No part of the interval reaches the aim.
    #[serde(rename = "not met")]
    NotMet,
    /// Part of the interval reaches the aim, or there are too few rounds to tell.
    #[serde(rename = "open")]
    Open,
}

impl AimState {
    /// The words in results.
    pub fn name(self) -> &'static str {
        match self {
            AimState::Met => "met",
            AimState::NotMet => "not met",
            AimState::Open => "open",
        }
    }
}

/// How many times better one variant is than another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gain {
    /// The median of the rounds' ratios, inverted where less is better.
    pub median: f64,
    /// The lower end of its 95 % confidence interval.
    pub low: f64,
    /// The upper end.
    pub high: f64,
    /// The verdict from the interval.
    pub verdict: ComparisonVerdict,
}

impl Gain {
    /// Whether the interval reaches an aim.
    pub fn reaches(&self, aim: f64) -> AimState {
        match () {
            () if self.verdict == ComparisonVerdict::TooFewRounds => AimState::Open,
            () if self.low >= aim => AimState::Met,
            () if self.high < aim => AimState::NotMet,
            () => AimState::Open,
        }
    }
}

/// How many times better `after` is than `before`, from pairs (before, after) of the same round.
///
/// Each round gives the logarithm of its own ratio, so that an effect of the machine on a whole
/// round cancels. The interval is Student's, of the mean of those logarithms; where the median lies
/// outside of it, it is extended to the median. Below three rounds there is no interval, below five
/// no verdict.
///
/// `None` if there are no pairs or a value is not a positive number.
pub fn gain(pairs: &[(f64, f64)], more_is_better: bool) -> Option<Gain> {
    let is_usable = |value: f64| value.is_finite() && value > 0.0;
    if pairs.is_empty() || !pairs.iter().all(|(a, b)| is_usable(*a) && is_usable(*b)) {
        return None;
    }
    let mut logarithms: Vec<f64> =
        pairs.iter().map(|(before, after)| (after / before).ln()).collect();
    if !more_is_better {
        logarithms.iter_mut().for_each(|logarithm| *logarithm = -*logarithm);
    }
    logarithms.sort_by(f64::total_cmp);
    let median = middle(&logarithms);
    let rounds = logarithms.len();
    let (mut low, mut high) = (median, median);
    if rounds >= INTERVAL_ROUNDS_MIN {
        let mean = logarithms.iter().sum::<f64>() / rounds as f64;
        let squares: f64 = logarithms.iter().map(|logarithm| (logarithm - mean).powi(2)).sum();
        let error = (squares / (rounds - 1) as f64 / rounds as f64).sqrt();
        let half = student(rounds - 1) * error;
        (low, high) = (low.min(mean - half), high.max(mean + half));
    }
    let verdict = match () {
        () if rounds < VERDICT_ROUNDS_MIN => ComparisonVerdict::TooFewRounds,
        () if low > 0.0 => ComparisonVerdict::Faster,
        () if high < 0.0 => ComparisonVerdict::Slower,
        () => ComparisonVerdict::NotSignificant,
    };
    Some(Gain { median: median.exp(), low: low.exp(), high: high.exp(), verdict })
}

/// The 97.5 % quantile of Student's t for this many degrees of freedom, of which there are at least
/// two.
fn student(freedom: usize) -> f64 {
    const T: [f64; 19] = [
        4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
        2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    ];
    const Z: f64 = 1.959_964;
    T.get(freedom - 2).copied().unwrap_or_else(|| {
        // The first terms of its expansion about the normal quantile.
        let n = freedom as f64;
        Z + (Z.powi(3) + Z) / (4.0 * n)
            + (5.0 * Z.powi(5) + 16.0 * Z.powi(3) + 3.0 * Z) / (96.0 * n * n)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_median_is_of_odd_and_even_counts() {
        let of = |values: &[f64]| Summary::of(values).map(|s| (s.median, s.min, s.max));
        assert_eq!(of(&[3.0, 1.0, 8.0]), Some((3.0, 1.0, 8.0)));
        assert_eq!(of(&[3.0, 1.0, 8.0, 2.0]), Some((2.5, 1.0, 8.0)));
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn a_difference_beyond_the_noise_has_a_direction() {
        let before = [100.0, 104.0, 98.0, 101.0, 97.0];
        let pairs = |factor: f64| {
            let after = [103.0, 99.0, 100.0, 102.0, 98.0].map(|value| value * factor);
            before.into_iter().zip(after).collect::<Vec<_>>()
        };
        let verdict = |factor, more| gain(&pairs(factor), more).unwrap().verdict;
        assert_eq!(verdict(2.0, true), ComparisonVerdict::Faster);
        assert_eq!(verdict(0.5, true), ComparisonVerdict::Slower);
        assert_eq!(verdict(2.0, false), ComparisonVerdict::Slower);
        assert_eq!(verdict(0.5, false), ComparisonVerdict::Faster);
        assert_eq!(verdict(1.0, true), ComparisonVerdict::NotSignificant);
        let gain = gain(&pairs(2.0), true).unwrap();
        // The rounds' own ratios are 2.06, 1.90, 2.04, 2.02 and 2.02.
        assert!((gain.median - 196.0 / 97.0).abs() < 1e-9, "{gain:?}");
        assert!(1.9 < gain.low && gain.high < 2.11, "{gain:?}");
    }

    #[test]
    fn noise_common_to_a_round_does_not_widen_the_interval() {
        // The machine has half its speed in every other round; the ratio is 1.5 in all.
        let pairs: Vec<_> =
            [1.0, 0.5, 1.0, 0.5, 1.0].map(|speed| (100.0 * speed, 150.0 * speed)).to_vec();
        let gain = gain(&pairs, true).unwrap();
        for value in [gain.low, gain.median, gain.high] {
            assert!((value - 1.5).abs() < 1e-9, "{gain:?}");
        }
        assert_eq!(gain.verdict, ComparisonVerdict::Faster);
    }

    #[test]
    fn too_few_rounds_have_no_verdict() {
        let of = |rounds| gain(&[(1.0, 9.0), (1.0, 9.1)].repeat(5)[..rounds], true).unwrap();
        let two = of(2);
        assert!((two.low - two.high).abs() < 1e-9, "{two:?}");
        assert!(of(4).low < of(4).high);
        let verdicts = [2, 4, 5].map(|rounds| of(rounds).verdict);
        assert_eq!(
            verdicts,
            [
                ComparisonVerdict::TooFewRounds,
                ComparisonVerdict::TooFewRounds,
                ComparisonVerdict::Faster
            ]
        );
        assert_eq!(gain(&[], true), None);
        assert_eq!(gain(&[(0.0, 1.0)], true), None);
        assert_eq!(gain(&[(1.0, f64::NAN)], true), None);
    }

    #[test]
    fn the_quantile_goes_on_beyond_its_table() {
        assert!((student(20) - 2.086).abs() < 1e-9);
        assert!((student(21) - 2.0796).abs() < 1e-3, "{}", student(21));
        assert!((student(120) - 1.9799).abs() < 1e-3, "{}", student(120));
    }

    /// The share of trials with the verdict `of`, for two variants of which one is `factor` times
    /// the other. Each round has noise that both have in common, and noise of their own.
    fn share(
        seed: u64,
        rounds: usize,
        factor: f64,
        common: f64,
        own: f64,
        of: ComparisonVerdict,
    ) -> f64 {
        const TRIALS: usize = 2000;
        let mut random = fastrand::Rng::with_seed(seed);
        // Skewed like a shared machine: it is slow now and then.
        let mut noise = |by: f64| (by * (0.5 - random.f64() - 2.0 * random.f64().powi(6))).exp();
        let found = (0..TRIALS).filter(|_| {
            let round = |_| {
                let machine = 100.0 * noise(common);
                (machine * noise(own), machine * noise(own) * factor)
            };
            let pairs: Vec<_> = (0..rounds).map(round).collect();
            gain(&pairs, true).expect("all are positive").verdict == of
        });
        found.count() as f64 / TRIALS as f64
    }

    #[test]
    fn the_same_against_itself_is_seldom_a_difference() {
        for (rounds, common, own) in [(5, 0.0, 0.05), (5, 1.0, 0.05), (9, 1.0, 0.2), (30, 0.3, 0.1)]
        {
            let of = |verdict| share(2, rounds, 1.0, common, own, verdict);
            let wrong = of(ComparisonVerdict::Faster) + of(ComparisonVerdict::Slower);
            assert!(wrong <= 0.065, "{rounds} rounds, {common} and {own}: {wrong}");
        }
    }

    #[test]
    fn a_fifth_more_is_mostly_found_in_the_noise_of_both() {
        let found = share(3, 5, 1.2, 0.3, 0.1, ComparisonVerdict::Faster);
        assert!(found >= 0.8, "{found}");
        let wrong = share(3, 5, 1.2, 0.3, 0.1, ComparisonVerdict::Slower);
        assert!(wrong <= 0.01, "{wrong}");
    }

    #[test]
    fn an_aim_is_met_by_the_whole_interval_or_open() {
        let of = |median, low, high, verdict| Gain { median, low, high, verdict };
        let three = of(3.2, 3.0, 3.4, ComparisonVerdict::Faster);
        let states = [2.9, 3.0, 3.1, 3.4, 3.5].map(|aim| three.reaches(aim).name());
        assert_eq!(states, ["met", "met", "open", "open", "not met"]);
        assert_eq!(of(9.0, 8.0, 9.5, ComparisonVerdict::TooFewRounds).reaches(1.5), AimState::Open);
    }

    proptest! {
        #[test]
        fn the_interval_holds_the_ratio_of_scaled_values(
            values in prop::collection::vec(1.0..1e9_f64, 3..12),
            factor in 0.01..100.0_f64,
            more in any::<bool>(),
        ) {
            let pairs: Vec<_> = values.iter().map(|value| (*value, value * factor)).collect();
            let gain = gain(&pairs, more).unwrap();
            let factor = if more { factor } else { factor.recip() };
            prop_assert!(gain.low <= gain.median && gain.median <= gain.high);
            prop_assert!((gain.low / factor - 1.0).abs() < 1e-6, "{gain:?}");
            prop_assert!((gain.high / factor - 1.0).abs() < 1e-6, "{gain:?}");
        }

        #[test]
        fn turning_a_comparison_round_turns_its_verdict_round(
            pairs in prop::collection::vec((1.0..10.0_f64, 1.0..10.0_f64), 5..9),
        ) {
            let turned: Vec<_> = pairs.iter().map(|(a, b)| (*b, *a)).collect();
            let one = gain(&pairs, true).unwrap();
            let other = gain(&turned, true).unwrap();
            prop_assert!((one.median * other.median - 1.0).abs() < 1e-9);
            let verdict = match one.verdict {
                ComparisonVerdict::Faster => ComparisonVerdict::Slower,
                ComparisonVerdict::Slower => ComparisonVerdict::Faster,
                even => even,
            };
            prop_assert_eq!(other.verdict, verdict);
        }
    }
}
