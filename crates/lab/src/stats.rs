//! Medians, spreads, and whether two variants differ.

use serde::{Deserialize, Serialize};

/// Resamples of one interval.
const RESAMPLES: usize = 2000;

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

/// What a comparison says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// The whole interval lies above 1.
    #[serde(rename = "faster")]
    Faster,
    /// The whole interval lies below 1.
    #[serde(rename = "slower")]
    Slower,
    /// The interval holds 1, or there are too few rounds to have one.
    #[serde(rename = "not significant")]
    NotSignificant,
}

impl Verdict {
    /// The words in results.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Faster => "faster",
            Verdict::Slower => "slower",
            Verdict::NotSignificant => "not significant",
        }
    }
}

/// How many times better one variant is than another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gain {
    /// The ratio of the medians, the better way up.
    pub median: f64,
    /// The lower end of its 95 % confidence interval.
    pub low: f64,
    /// The upper end.
    pub high: f64,
    /// What that says.
    pub verdict: Verdict,
}

/// How many times better `after` is than `before`, from pairs (before, after) of the same round.
///
/// The interval is a bootstrap over rounds: a round is drawn with both of its values, so that what
/// the machine did in it falls on both. Percentile intervals of so few rounds are too narrow; as in
/// Hesterberg's expanded percentile interval (2015), both ends are moved away from the median, by
/// `t sqrt(n / (n - 1)) / z`. Under three rounds there is no interval, and no verdict.
///
/// `None` if there are no pairs or a value is not a positive number.
pub fn gain(pairs: &[(f64, f64)], more_is_better: bool, seed: u64) -> Option<Gain> {
    let is_usable = |value: f64| value.is_finite() && value > 0.0;
    if pairs.is_empty() || !pairs.iter().all(|(a, b)| is_usable(*a) && is_usable(*b)) {
        return None;
    }
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut befores, mut afters) = (Vec::new(), Vec::new());
    let mut ratio = |draw: &mut dyn FnMut(usize) -> usize| {
        befores.clear();
        afters.clear();
        for at in 0..pairs.len() {
            let (before, after) = pairs[draw(at)];
            befores.push(before);
            afters.push(after);
        }
        befores.sort_by(f64::total_cmp);
        afters.sort_by(f64::total_cmp);
        let ratio = middle(&afters) / middle(&befores);
        if more_is_better { ratio } else { ratio.recip() }
    };
    let median = ratio(&mut |at| at);
    let expansion = match pairs.len() {
        0..3 => {
            return Some(Gain {
                median,
                low: median,
                high: median,
                verdict: Verdict::NotSignificant,
            });
        }
        rounds => expansion(rounds),
    };
    let mut ratios: Vec<f64> =
        (0..RESAMPLES).map(|_| ratio(&mut |_| random.usize(..pairs.len()))).collect();
    ratios.sort_by(f64::total_cmp);
    let end = |at: usize| median * (ratios[at] / median).powf(expansion);
    let tail = RESAMPLES / 40;
    let (low, high) = (end(tail).min(median), end(RESAMPLES - 1 - tail).max(median));
    let verdict = match () {
        () if low > 1.0 => Verdict::Faster,
        () if high < 1.0 => Verdict::Slower,
        () => Verdict::NotSignificant,
    };
    Some(Gain { median, low, high, verdict })
}

/// By how much the percentile interval of so many rounds is too narrow.
fn expansion(rounds: usize) -> f64 {
    /// The 97.5 % quantile of Student's t for 2, 3, ... degrees of freedom.
    const T: [f64; 19] = [
        4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
        2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    ];
    const Z: f64 = 1.960;
    let t = T.get(rounds - 3).copied().unwrap_or(Z);
    let n = rounds as f64;
    (n / (n - 1.0)).sqrt() * t / Z
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
        let verdict = |factor, more| gain(&pairs(factor), more, 1).unwrap().verdict;
        assert_eq!(verdict(2.0, true), Verdict::Faster);
        assert_eq!(verdict(0.5, true), Verdict::Slower);
        assert_eq!(verdict(2.0, false), Verdict::Slower);
        assert_eq!(verdict(0.5, false), Verdict::Faster);
        assert_eq!(verdict(1.0, true), Verdict::NotSignificant);
        let gain = gain(&pairs(2.0), true, 1).unwrap();
        assert_eq!(gain.median, 2.0);
        assert!(1.8 < gain.low && gain.high < 2.2, "{gain:?}");
    }

    #[test]
    fn what_falls_on_both_of_a_round_does_not_widen_the_interval() {
        // The machine halves its speed in every other round; the ratio is 1.5 in all.
        let pairs: Vec<_> =
            [1.0, 0.5, 1.0, 0.5, 1.0].map(|speed| (100.0 * speed, 150.0 * speed)).to_vec();
        let gain = gain(&pairs, true, 7).unwrap();
        assert_eq!((gain.low, gain.median, gain.high), (1.5, 1.5, 1.5));
    }

    #[test]
    fn too_few_rounds_have_no_verdict() {
        let two = gain(&[(1.0, 9.0), (1.0, 9.0)], true, 1).unwrap();
        assert_eq!((two.median, two.verdict), (9.0, Verdict::NotSignificant));
        assert_eq!(gain(&[], true, 1), None);
        assert_eq!(gain(&[(0.0, 1.0)], true, 1), None);
        assert_eq!(gain(&[(1.0, f64::NAN)], true, 1), None);
    }

    #[test]
    fn the_same_against_itself_is_seldom_a_difference() {
        let mut random = fastrand::Rng::with_seed(2);
        // Noise of a few percent, skewed as that of a shared machine: sometimes a round is slow.
        let mut value = || 100.0 * (1.0 - 0.3 * random.f64().powi(4)) + random.f64();
        for rounds in [3, 5, 9] {
            let trials = 400;
            let found = (0..trials).filter(|trial| {
                let pairs: Vec<_> = (0..rounds).map(|_| (value(), value())).collect();
                gain(&pairs, true, *trial).unwrap().verdict != Verdict::NotSignificant
            });
            let share = found.count() as f64 / trials as f64;
            assert!(share <= 0.08, "{rounds} rounds: {share}");
        }
    }

    proptest! {
        #[test]
        fn the_interval_holds_the_ratio_of_scaled_values(
            values in prop::collection::vec(1.0..1e9_f64, 3..12),
            factor in 0.01..100.0_f64,
            more in any::<bool>(),
            seed in any::<u64>(),
        ) {
            let pairs: Vec<_> = values.iter().map(|value| (*value, value * factor)).collect();
            let gain = gain(&pairs, more, seed).unwrap();
            let factor = if more { factor } else { factor.recip() };
            prop_assert!(gain.low <= gain.median && gain.median <= gain.high);
            prop_assert!((gain.low / factor - 1.0).abs() < 1e-6, "{gain:?}");
            prop_assert!((gain.high / factor - 1.0).abs() < 1e-6, "{gain:?}");
        }

        #[test]
        fn turning_a_comparison_round_turns_its_verdict_round(
            pairs in prop::collection::vec((1.0..10.0_f64, 1.0..10.0_f64), 5..9),
            seed in any::<u64>(),
        ) {
            let turned: Vec<_> = pairs.iter().map(|(a, b)| (*b, *a)).collect();
            let one = gain(&pairs, true, seed).unwrap();
            let other = gain(&turned, true, seed).unwrap();
            prop_assert!((one.median * other.median - 1.0).abs() < 1e-9);
            let verdict = match one.verdict {
                Verdict::Faster => Verdict::Slower,
                Verdict::Slower => Verdict::Faster,
                Verdict::NotSignificant => Verdict::NotSignificant,
            };
            prop_assert_eq!(other.verdict, verdict);
        }
    }
}
