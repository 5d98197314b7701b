//! What looks at the requests of a device: the rules of the fault injector and the recorder of a
//! trace. The control plane replaces it, and the queues of the device read it.
//!
//! The rules are those of Linux's error injector (block/error-injection.c): an operation, a range,
//! a status and a chance, the newest rule first. In addition a rule can delay completions. Rules
//! apply to bios as they were pushed: a merged request to which a rule might apply is broken up.

use std::sync::Arc;

use blockyard_sync::quota::Quota;

use super::recorder::Recorder;
use crate::bio::Status;
use crate::inject::Rule;
use crate::request::Started;

/// What looks at the requests of a device.
#[derive(Clone, Debug, Default)]
pub(super) struct Interceptors {
    /// The rules of the fault injector, newest first.
    pub(super) rules: Arc<Vec<Arc<ArmedRule>>>,
    /// The recorder of a trace, while one is attached.
    pub(super) recorder: Option<Arc<Recorder>>,
}

impl Interceptors {
    /// Whether a rule delays completions.
    pub(super) fn has_latency(&self) -> bool {
        self.rules.iter().any(|armed| armed.rule.latency.is_some())
    }
}

/// The counts of the faults that a device's rules have injected, also of rules that were removed.
#[derive(Debug)]
pub(super) struct FaultCounts {
    /// Requests that were failed.
    pub(super) failed: Quota,
    /// Requests whose completions were delayed.
    pub(super) delayed: Quota,
}

impl Default for FaultCounts {
    fn default() -> FaultCounts {
        FaultCounts { failed: Quota::new(u64::MAX), delayed: Quota::new(u64::MAX) }
    }
}

/// A rule and how often it has been applied.
#[derive(Debug)]
pub(super) struct ArmedRule {
    pub(super) id: u64,
    pub(super) rule: Rule,
    seed: u64,
    /// Requests that matched, whether or not the chance hit.
    pub(super) matched: Quota,
    /// Requests to which the rule was applied.
    pub(super) applied: Quota,
}

impl ArmedRule {
    /// Arms a rule. `device_seed` determines its random numbers if it has no seed of its own.
    pub(super) fn new(id: u64, rule: Rule, device_seed: u64) -> ArmedRule {
        let seed = rule.seed.unwrap_or_else(|| mix(device_seed ^ mix(id)));
        let (matched, applied) = (Quota::new(u64::MAX), Quota::new(rule.times.unwrap_or(u64::MAX)));
        ArmedRule { id, rule, seed, matched, applied }
    }

    /// Whether the rule applies to this request, apart from its chance. An operation without
    /// sectors matches a rule whose range contains its sector, which is normally 0.
    fn is_about(&self, started: &Started) -> bool {
        let rule = &self.rule;
        if rule.op.is_some_and(|op| op != started.op()) || self.applied.is_spent() {
            return false;
        }
        let rule_end = rule.start.0.saturating_add(rule.sectors);
        if started.sectors() == 0 {
            return started.sector().0 >= rule.start.0 && started.sector().0 < rule_end;
        }
        started.sector().0 < rule_end && rule.start.0 < started.end().0
    }

    /// Decides about one more matching request. Returns a random number if the rule is applied.
    ///
    /// The decision depends on the seed and on how many requests have matched before, and not on
    /// the queue: equal sequences of requests meet equal faults.
    fn take(&self) -> Option<u64> {
        let number = self.matched.take_numbered()?;
        let random = mix(self.seed.wrapping_add(number.wrapping_mul(GOLDEN)));
        (self.rule.chance.hits(random) && self.applied.take()).then(|| mix(random))
    }
}

/// What happens to a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FaultDecision {
    Pass,
    BreakUp,
    /// The request fails with `status`, unless that is `Ok`, and completes `delay_ns` later.
    Inject {
        status: Status,
        delay_ns: u64,
    },
}

/// Decides about a request: the newest rule that fails it and the newest that delays it win.
pub(super) fn judge(
    rules: &[Arc<ArmedRule>],
    counts: &FaultCounts,
    started: &Started,
) -> FaultDecision {
    let mut delay_ns = None;
    let mut status = Status::Ok;
    for armed in rules {
        let is_more = !armed.rule.status.is_ok() || delay_ns.is_none();
        if !is_more || !armed.is_about(started) {
            continue;
        }
        if started.is_merged() {
            return FaultDecision::BreakUp;
        }
        let Some(random) = armed.take() else { continue };
        if let Some(latency) = armed.rule.latency.filter(|_| delay_ns.is_none()) {
            // The upper 53 bits, as many as an f64 holds: from 0 to below 1.
            delay_ns = Some(latency.quantile_ns((random >> 11) as f64 / (1_u64 << 53) as f64));
            counts.delayed.take();
        }
        if !armed.rule.status.is_ok() {
            status = armed.rule.status;
            counts.failed.take();
            break;
        }
    }
    match (status, delay_ns) {
        (Status::Ok, None) => FaultDecision::Pass,
        (status, delay_ns) => FaultDecision::Inject { status, delay_ns: delay_ns.unwrap_or(0) },
    }
}

/// The increment of splitmix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finalizer of splitmix64 (G. Steele et al., OOPSLA 2014): equal inputs have equal outputs,
/// and outputs of neighbours are independent.
fn mix(value: u64) -> u64 {
    let mut state = value.wrapping_add(GOLDEN);
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inject::{Chance, Latency};

    fn armed(chance: Chance) -> ArmedRule {
        let rule = Rule { chance, seed: Some(7), ..Rule::new(Status::IoErr) };
        ArmedRule::new(1, rule, 0)
    }

    #[test]
    fn chance_is_kept_and_equal_seeds_decide_equally() {
        for (chance, want) in [
            (Chance::OneIn(1), 100_000),
            (Chance::OneIn(100), 1_000),
            (Chance::PerMillion(30_000), 3_000),
            (Chance::PerMillion(0), 0),
        ] {
            let (one, other) = (armed(chance), armed(chance));
            let hits = (0..100_000).filter(|_| {
                let hit = one.take();
                assert_eq!(hit, other.take());
                hit.is_some()
            });
            let hits = hits.count() as i64;
            // Five standard deviations of a binomial distribution.
            assert!((hits - want).pow(2) <= 25 * want, "{chance:?}: {hits}");
            assert_eq!(one.matched.used(), 100_000);
        }
    }

    /// The quantiles of 100,000 samples with a fixed seed, against those of the rule.
    #[test]
    fn samples_have_the_quantiles_of_the_rule() {
        let (p50_ns, p99_ns, p999_ns) = (200_000, 5_000_000, 50_000_000);
        let latency = Latency::Quantiles { p50_ns, p99_ns, p999_ns };
        let armed = armed(Chance::OneIn(1));
        let mut samples: Vec<u64> = (0..100_000)
            .map(|_| {
                let random = armed.take().expect("the rule always applies");
                latency.quantile_ns((random >> 11) as f64 / (1_u64 << 53) as f64)
            })
            .collect();
        samples.sort_unstable();
        for (index, want, percent) in
            [(50_000, p50_ns, 2), (99_000, p99_ns, 10), (99_900, p999_ns, 30)]
        {
            let have = samples[index];
            assert!(have.abs_diff(want) * 100 <= want * percent, "{index}: {have} of {want}");
        }
        assert!(samples[0] >= p50_ns / 2 && samples[99_999] <= 10 * p999_ns);
    }
}
