//! A fault injector: a device that fails the requests that its rules select.
//!
//! The rules are those of Linux's error injector (block/error-injection.c): an operation, a range,
//! a status and a chance, the newest rule first. A request that a rule fails never reaches the
//! device, so it cannot move a write pointer. A merged request that a rule might fail is broken up
//! first: rules apply to bios as they were pushed.

use std::os::fd::RawFd;
use std::sync::Arc;

use blockyard_sync::quota::Quota;
use blockyard_sync::rcu_cell::{RcuCell, RcuReader};

use super::forward_control_plane;
use crate::bio::Status;
use crate::clock::Clock;
use crate::device::{Device, DeviceError, DeviceQueue, Due};
use crate::inject::{Injection, Rule};
use crate::request::{Batch, CompletionBatch, Started};
use crate::units::Nanos;
use crate::work::InlineRequest;

/// A rule and how often it may still fail a request.
#[derive(Clone, Debug)]
struct Armed {
    rule: Rule,
    left: Arc<Quota>,
}

impl Armed {
    /// Whether the rule applies to this request, apart from its chance. An operation without
    /// sectors matches a rule whose range contains its sector, which is normally 0.
    fn is_about(&self, started: &Started) -> bool {
        let rule = &self.rule;
        if rule.op.is_some_and(|op| op != started.op()) || self.left.is_spent() {
            return false;
        }
        let rule_end = rule.start.0.saturating_add(rule.sectors);
        if started.sectors() == 0 {
            return started.sector().0 >= rule.start.0 && started.sector().0 < rule_end;
        }
        started.sector().0 < rule_end && rule.start.0 < started.end().0
    }
}

/// Maximum number of rules: every request is compared with each rule.
pub const RULES_MAX: usize = 1024;

/// `D` with a fault injector in front of it. Without rules it costs one load per batch.
#[derive(Debug)]
pub struct Faulty<D> {
    inner: D,
    rules: Arc<RcuCell<Vec<Armed>>>,
    seed: u64,
    /// Counts queues, so that each has its own random sequence.
    queues: Quota,
}

impl<D: Device> Faulty<D> {
    /// `inner` without rules. `seed` determines the random decisions.
    pub fn new(inner: D, seed: u64) -> Faulty<D> {
        let (rules, queues) = (Arc::new(RcuCell::new(Vec::new())), Quota::new(u64::MAX));
        Faulty { inner, rules, seed, queues }
    }

    /// How many requests each rule has failed, newest rule first.
    pub fn strikes(&self) -> Vec<u64> {
        self.rules.get().iter().map(|armed| armed.left.used()).collect()
    }
}

impl<D: Device> Device for Faulty<D> {
    type Queue = FaultyQueue<D::Queue>;

    forward_control_plane!();

    fn open_queue(&self) -> Result<Self::Queue, DeviceError> {
        let depth = usize::from(self.limits().queue_depth);
        Ok(FaultyQueue {
            inner: self.inner.open_queue()?,
            rules: RcuReader::new(&self.rules),
            is_armed: false,
            passed: Batch::with_capacity(depth),
            chance: Chance::new(self.seed, self.queues.take_numbered().unwrap_or(0)),
        })
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        match injection {
            Injection::AddRule(rule) => {
                if self.rules.get().len() >= RULES_MAX {
                    return Err(DeviceError::Invalid {
                        field: "add",
                        value: format!("rule {}", RULES_MAX + 1),
                        wanted: format!("at most {RULES_MAX} rules; `removeall` forgets them"),
                    });
                }
                let left = Arc::new(Quota::new(rule.times.unwrap_or(u64::MAX)));
                let armed = Armed { rule: rule.clone(), left };
                self.rules
                    .update(|rules| std::iter::once(armed).chain(rules.iter().cloned()).collect());
                Ok(())
            }
            Injection::RemoveRules => {
                self.rules.update(|_| Vec::new());
                Ok(())
            }
            Injection::Device { .. } => self.inner.inject(injection),
        }
    }
}

/// A queue of a [`Faulty`] device.
#[derive(Debug)]
pub struct FaultyQueue<Q> {
    inner: Q,
    rules: RcuReader<Vec<Armed>>,
    /// Whether there were rules at the last batch.
    is_armed: bool,
    passed: Batch,
    chance: Chance,
}

/// The decision about a request.
enum FaultDecision {
    Pass,
    Fail(Status),
    BreakUp,
}

/// Decides about a request: the first rule that fails it wins.
fn judge(rules: &[Armed], started: &Started, chance: &mut Chance) -> FaultDecision {
    for armed in rules {
        if !armed.is_about(started) {
            continue;
        }
        if started.is_merged() {
            return FaultDecision::BreakUp;
        }
        if chance.one_in(armed.rule.chance) && armed.left.take() {
            return FaultDecision::Fail(armed.rule.status);
        }
    }
    FaultDecision::Pass
}

impl<Q: DeviceQueue> FaultyQueue<Q> {
    /// Reads whether there are rules, and updates `is_armed`.
    #[cold]
    fn look_at_rules(&mut self) {
        self.is_armed = !self.rules.get().is_empty();
    }

    /// Starts a batch after the rules have changed, or while there are rules.
    #[inline(never)]
    fn start_armed(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        self.look_at_rules();
        if !self.is_armed {
            return self.inner.start(now, batch, done);
        }
        let rules = Arc::clone(self.rules.get());
        self.start_judged(&rules, now, batch, done);
    }

    /// Starts a batch request by request, while there are rules. Requests before a failing request
    /// start before it completes, so the order is kept.
    #[cold]
    fn start_judged(
        &mut self,
        rules: &[Armed],
        now: Nanos,
        batch: &mut Batch,
        done: &mut CompletionBatch,
    ) {
        let mut room = self.inner.room();
        while room > 0
            && let Some(started) = batch.next()
        {
            match judge(rules, &started, &mut self.chance) {
                FaultDecision::Pass => {
                    self.passed.push(started);
                    room -= 1;
                }
                FaultDecision::Fail(status) => done.complete(started, status),
                FaultDecision::BreakUp => {
                    batch.break_up(started);
                    break;
                }
            }
        }
        if !self.passed.is_empty() {
            self.inner.start(now, &mut self.passed, done);
            batch.requeue_all(&mut self.passed);
        }
    }
}

impl<Q: DeviceQueue> DeviceQueue for FaultyQueue<Q> {
    #[inline]
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        if self.is_armed || self.rules.unchanged().is_none() {
            return self.start_armed(now, batch, done);
        }
        self.inner.start(now, batch, done);
    }

    #[inline]
    fn execute_inline(&mut self, single: InlineRequest) -> Option<Status> {
        // With rules, every request has to be compared with them in `start`.
        if self.is_armed || self.rules.unchanged().is_none() {
            self.look_at_rules();
            if self.is_armed {
                return None;
            }
        }
        self.inner.execute_inline(single)
    }

    #[inline]
    fn poll(&mut self, now: Nanos, done: &mut CompletionBatch) {
        self.inner.poll(now, done);
    }

    #[inline]
    fn room(&self) -> usize {
        self.inner.room()
    }

    #[inline]
    fn due(&self) -> Due {
        self.inner.due()
    }

    #[inline]
    fn is_immediate(&mut self) -> bool {
        self.inner.is_immediate()
    }

    #[inline]
    fn waits_for_others(&self) -> bool {
        self.inner.waits_for_others()
    }

    fn descriptor(&mut self) -> Option<RawFd> {
        self.inner.descriptor()
    }

    fn may_sleep(&mut self) -> bool {
        self.inner.may_sleep()
    }

    fn sleep<C: Clock>(&mut self, until: Due, clock: &C) {
        self.inner.sleep(until, clock);
    }

    fn abort(&mut self, done: &mut CompletionBatch) {
        self.inner.abort(done);
    }
}

/// Random numbers from a seed: xorshift64 (G. Marsaglia, "Xorshift RNGs", 2003). Never 0.
#[derive(Debug)]
struct Chance(u64);

impl Chance {
    /// The random sequence of one queue of a device: the seed and the number of the queue, mixed by
    /// the finalizer of splitmix64 (G. Steele et al., OOPSLA 2014).
    fn new(seed: u64, queue: u64) -> Chance {
        let mut state = seed.wrapping_add((queue + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Chance((state ^ (state >> 31)).max(1))
    }

    /// True once in `n` times; always true for 0 and 1.
    fn one_in(&mut self, n: u32) -> bool {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        n <= 1 || (self.0 >> 11).is_multiple_of(u64::from(n))
    }
}
