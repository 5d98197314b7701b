//! A fault injector: a device that fails the requests that its rules select. It also records the
//! traces of a device (`recorder.rs`): both look at every request while they are in use, and cost
//! one comparison a batch while they are not.
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
use super::recorder::{QueueRecorder, Recorder, TracePoint};
use crate::bio::Status;
use crate::clock::Clock;
use crate::device::{Device, DeviceError, DeviceQueue, Due};
use crate::inject::{Injection, Rule};
use crate::request::{Batch, CompletionBatch, Started};
use crate::units::Nanos;
use crate::work::InlineRequest;

/// A rule and how often it may still fail a request.
#[derive(Clone, Debug)]
pub(super) struct Armed {
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

/// What looks at the requests of a device.
#[derive(Debug, Default)]
pub(super) struct Interceptors {
    /// The rules of the fault injector, newest first.
    pub(super) rules: Arc<Vec<Armed>>,
    /// The recorder of a trace, while one is attached.
    pub(super) recorder: Option<Arc<Recorder>>,
}

/// `D` with a fault injector and a trace recorder in front of it. Without rules, and while no trace
/// is recorded, it costs one load per batch.
#[derive(Debug)]
pub struct Faulty<D> {
    inner: D,
    interceptors: Arc<RcuCell<Interceptors>>,
    trace_point: TracePoint,
    seed: u64,
    /// Counts queues, so that each has its own random sequence.
    queues: Quota,
}

impl<D: Device> Faulty<D> {
    /// `inner` without rules. `seed` determines the random decisions.
    pub fn new(inner: D, seed: u64) -> Faulty<D> {
        let interceptors = Arc::new(RcuCell::new(Interceptors::default()));
        let trace_point = TracePoint::new(&interceptors);
        Faulty { inner, interceptors, trace_point, seed, queues: Quota::new(u64::MAX) }
    }

    /// How many requests each rule has failed, newest rule first.
    pub fn strikes(&self) -> Vec<u64> {
        self.interceptors.get().rules.iter().map(|armed| armed.left.used()).collect()
    }

    fn set_rules(&self, change: impl FnOnce(&[Armed]) -> Vec<Armed>) {
        self.interceptors.update(|now| {
            let (rules, recorder) = (Arc::new(change(&now.rules)), now.recorder.clone());
            Interceptors { rules, recorder }
        });
    }
}

impl<D: Device> Device for Faulty<D> {
    type Queue = FaultyQueue<D::Queue>;

    forward_control_plane!();

    fn open_queue(&self) -> Result<Self::Queue, DeviceError> {
        let depth = usize::from(self.limits().queue_depth);
        Ok(FaultyQueue {
            inner: self.inner.open_queue()?,
            interceptors: RcuReader::new(&self.interceptors),
            recorder: None,
            passed: Batch::with_capacity(depth),
            chance: Chance::new(self.seed, self.queues.take_numbered().unwrap_or(0)),
        })
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        match injection {
            Injection::AddRule(rule) => {
                if self.interceptors.get().rules.len() >= RULES_MAX {
                    return Err(DeviceError::Invalid {
                        field: "add",
                        value: format!("rule {}", RULES_MAX + 1),
                        wanted: format!("at most {RULES_MAX} rules; `removeall` forgets them"),
                    });
                }
                let left = Arc::new(Quota::new(rule.times.unwrap_or(u64::MAX)));
                let armed = Armed { rule: rule.clone(), left };
                self.set_rules(|rules| {
                    std::iter::once(armed).chain(rules.iter().cloned()).collect()
                });
                Ok(())
            }
            Injection::RemoveRules => {
                self.set_rules(|_| Vec::new());
                Ok(())
            }
            Injection::Device { .. } => self.inner.inject(injection),
        }
    }

    fn trace_point(&self) -> Option<&TracePoint> {
        Some(&self.trace_point)
    }
}

/// A queue of a [`Faulty`] device.
///
/// While there are rules or a recorder, the reader of the interceptors is held, so that the one
/// comparison that finds a change leads to them too.
#[derive(Debug)]
pub struct FaultyQueue<Q> {
    inner: Q,
    interceptors: RcuReader<Interceptors>,
    /// The recorder of this queue, while a trace is recorded. Boxed: it is rarely there.
    recorder: Option<Box<QueueRecorder>>,
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
    /// Reads the interceptors, and returns whether there are any.
    #[cold]
    #[inline(never)]
    fn look(&mut self) -> bool {
        let now = self.interceptors.get();
        let is_any = !now.rules.is_empty() || now.recorder.is_some();
        match &now.recorder {
            None => self.recorder = None,
            Some(new) if self.recorder.as_ref().is_some_and(|old| old.is_of(new)) => {}
            Some(new) => self.recorder = Some(Box::new(new.open())),
        }
        if is_any {
            self.interceptors.hold();
        }
        is_any
    }

    /// Starts a batch after the interceptors have changed, or while there are any.
    #[inline(never)]
    fn start_after_change(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        if self.look() {
            self.start_intercepted(now, batch, done);
        } else {
            self.inner.start(now, batch, done);
        }
    }

    /// Starts a batch request by request, while there are interceptors. Requests before a failing
    /// request start before it completes, so the order is kept.
    #[cold]
    fn start_intercepted(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        let before = done.len();
        let rules = Arc::clone(&self.interceptors.get().rules);
        let mut recorder = self.recorder.take();
        if let Some(recorder) = &mut recorder {
            recorder.begin();
        }
        let mut room = self.inner.room();
        while room > 0
            && let Some(mut started) = batch.next()
        {
            match judge(&rules, &started, &mut self.chance) {
                FaultDecision::Pass => {
                    if let Some(recorder) = &mut recorder {
                        recorder.issued(now, &mut started);
                    }
                    self.passed.push(started);
                    room -= 1;
                }
                FaultDecision::Fail(status) => {
                    if let Some(recorder) = &mut recorder {
                        let _ = recorder.queued(&mut started);
                    }
                    done.complete(started, status);
                }
                FaultDecision::BreakUp => {
                    batch.break_up(started);
                    break;
                }
            }
        }
        if let Some(recorder) = &mut recorder {
            // Before the device has them: it may keep this thread for long.
            recorder.publish();
        }
        if !self.passed.is_empty() {
            self.inner.start(now, &mut self.passed, done);
            if let Some(recorder) = &mut recorder {
                let left = (0..self.passed.len()).filter_map(|index| self.passed.get(index));
                left.for_each(|started| recorder.requeued(now, started));
            }
            batch.requeue_all(&mut self.passed);
        }
        if let Some(recorder) = &mut recorder {
            recorder.completed(done, before);
        }
        self.recorder = recorder;
    }

    /// Polls while a trace is recorded, or after that has ended.
    #[cold]
    #[inline(never)]
    fn poll_recorded(&mut self, now: Nanos, done: &mut CompletionBatch) {
        let before = done.len();
        self.inner.poll(now, done);
        self.look();
        if let Some(recorder) = &mut self.recorder
            && done.len() > before
        {
            recorder.begin();
            recorder.completed(done, before);
        }
    }
}

impl<Q: DeviceQueue> DeviceQueue for FaultyQueue<Q> {
    #[inline]
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        if self.interceptors.unchanged().is_none() {
            return self.start_after_change(now, batch, done);
        }
        self.inner.start(now, batch, done);
    }

    #[inline]
    fn execute_inline(&mut self, single: InlineRequest) -> Option<Status> {
        // With rules, every request has to be compared with them in `start`, and with a recorder it
        // is recorded there.
        if self.interceptors.unchanged().is_none() && self.look() {
            return None;
        }
        self.inner.execute_inline(single)
    }

    #[inline]
    fn poll(&mut self, now: Nanos, done: &mut CompletionBatch) {
        if self.recorder.is_some() {
            return self.poll_recorded(now, done);
        }
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
