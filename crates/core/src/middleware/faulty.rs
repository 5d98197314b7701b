//! A fault injector: a device that fails or delays the requests that its rules select. It also
//! records the traces of a device (`recorder.rs`): both look at every request while they are in
//! use, and cost one comparison a batch while they are not.
//!
//! A request that a rule fails never reaches the device, so it cannot move a write pointer. A
//! request that a rule delays reaches the device at once and completes later, as if the device were
//! slow: a queue reports the time at which the next completion is due, and no thread waits.

use std::os::fd::RawFd;
use std::sync::Arc;

use blockyard_sync::rcu_cell::{RcuCell, RcuReader};

use super::fault_injector::FaultInjector;
use super::forward_control_plane;
use super::injected_delays::InjectedDelays;
use super::interceptors::{FaultCounts, FaultDecision, Interceptors, judge};
use super::recorder::{QueueRecorder, TracePoint};
use crate::bio::Status;
use crate::clock::Clock;
use crate::device::{Device, DeviceError, DeviceQueue, Due};
use crate::inject::Injection;
use crate::request::{Batch, CompletionBatch};
use crate::units::Nanos;
use crate::work::InlineRequest;

/// `D` with a fault injector and a trace recorder in front of it. Without rules, and while no trace
/// is recorded, it costs one load per batch.
#[derive(Debug)]
pub struct Faulty<D> {
    inner: D,
    interceptors: Arc<RcuCell<Interceptors>>,
    trace_point: TracePoint,
    injector: FaultInjector,
    counts: Arc<FaultCounts>,
}

impl<D: Device> Faulty<D> {
    /// `inner` without rules. `seed` determines the random decisions.
    pub fn new(inner: D, seed: u64) -> Faulty<D> {
        let interceptors = Arc::new(RcuCell::new(Interceptors::default()));
        let counts = Arc::new(FaultCounts::default());
        let trace_point = TracePoint::new(&interceptors);
        let injector = FaultInjector::new(&interceptors, &counts, seed);
        Faulty { inner, interceptors, trace_point, injector, counts }
    }

    /// To how many requests each rule has been applied, newest rule first.
    pub fn strikes(&self) -> Vec<u64> {
        self.injector.rules().iter().map(|rule| rule.applied).collect()
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
            observer: None,
            passed: Batch::with_capacity(depth),
            counts: Arc::clone(&self.counts),
            depth,
        })
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        match injection {
            Injection::AddRule(rule) => self.injector.add(rule.clone()).map(drop),
            Injection::RemoveRules => {
                self.injector.remove_all();
                Ok(())
            }
            Injection::Device { .. } => self.inner.inject(injection),
        }
    }

    fn trace_point(&self) -> Option<&TracePoint> {
        Some(&self.trace_point)
    }

    fn fault_injector(&self) -> Option<&FaultInjector> {
        Some(&self.injector)
    }
}

/// A queue of a [`Faulty`] device.
///
/// While there are rules, a recorder or delayed completions, the reader of the interceptors is
/// held, so that the one comparison that finds a change leads to them too.
#[derive(Debug)]
pub struct FaultyQueue<Q> {
    inner: Q,
    interceptors: RcuReader<Interceptors>,
    /// Boxed: it is rarely there.
    observer: Option<Box<Observer>>,
    passed: Batch,
    counts: Arc<FaultCounts>,
    depth: usize,
}

/// What looks at the completions of a queue, while a trace is recorded or a rule delays requests.
#[derive(Debug)]
struct Observer {
    recorder: Option<QueueRecorder>,
    delays: InjectedDelays,
}

impl<Q: DeviceQueue> FaultyQueue<Q> {
    /// Reads the interceptors, and returns whether each request has to be looked at.
    #[cold]
    #[inline(never)]
    fn look(&mut self) -> bool {
        let now = Arc::clone(self.interceptors.get());
        let keeps = self.observer.as_ref().is_some_and(|observer| !observer.delays.is_empty());
        if now.recorder.is_some() || now.has_latency() || keeps {
            let depth = self.depth;
            let new = || Box::new(Observer { recorder: None, delays: InjectedDelays::new(depth) });
            let recorder = &mut self.observer.get_or_insert_with(new).recorder;
            match &now.recorder {
                None => *recorder = None,
                Some(new) if recorder.as_ref().is_some_and(|old| old.is_of(new)) => {}
                Some(new) => *recorder = Some(new.open()),
            }
        } else {
            self.observer = None;
        }
        let is_any = !now.rules.is_empty() || self.observer.is_some();
        match is_any {
            true => self.interceptors.hold(),
            false => self.interceptors.release(),
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
        let mut observer = self.observer.take();
        if let Some(recorder) = recorder_of(&mut observer) {
            recorder.begin();
        }
        self.judge_batch(now, batch, done, &mut observer);
        if let Some(recorder) = recorder_of(&mut observer) {
            // Before the device has them: it may keep this thread for long.
            recorder.publish();
        }
        if !self.passed.is_empty() {
            match &mut observer {
                None => self.inner.start(now, &mut self.passed, done),
                Some(observer) => {
                    self.inner.start(now, &mut self.passed, &mut observer.delays.fresh);
                    observer.delays.take_completed(now, done);
                }
            }
            let left = (0..self.passed.len()).filter_map(|index| self.passed.get(index));
            if let Some(observer) = &mut observer {
                for started in left {
                    observer.delays.note(started.tag(), 0);
                    if let Some(recorder) = &mut observer.recorder {
                        recorder.requeued(now, started);
                    }
                }
            }
            batch.requeue_all(&mut self.passed);
        }
        if let Some(observer) = &mut observer {
            observer.delays.release(now, done);
        }
        if let Some(recorder) = recorder_of(&mut observer) {
            recorder.completed(done, before);
        }
        self.observer = observer;
    }

    /// Decides about the requests of a batch: those that go to the device are in `passed` then.
    fn judge_batch(
        &mut self,
        now: Nanos,
        batch: &mut Batch,
        done: &mut CompletionBatch,
        observer: &mut Option<Box<Observer>>,
    ) {
        let rules = Arc::clone(&self.interceptors.get().rules);
        let mut room = self.inner.room();
        while room > 0
            && let Some(mut started) = batch.next()
        {
            let (status, delay_ns) = match judge(&rules, &self.counts, &started) {
                FaultDecision::BreakUp => {
                    batch.break_up(started);
                    break;
                }
                FaultDecision::Pass => (Status::Ok, 0),
                FaultDecision::Inject { status, delay_ns } => (status, delay_ns),
            };
            if status.is_ok() {
                if let Some(observer) = observer {
                    observer.delays.note(started.tag(), delay_ns);
                    if let Some(recorder) = &mut observer.recorder {
                        recorder.issued(now, &mut started);
                    }
                }
                self.passed.push(started);
                room -= 1;
                continue;
            }
            if let Some(recorder) = recorder_of(observer) {
                let _ = recorder.queued(&mut started);
            }
            match observer {
                Some(observer) if delay_ns > 0 => {
                    let ended = started.defuse().end_with(status);
                    observer.delays.hold(now, ended, delay_ns);
                }
                _ => done.complete(started, status),
            }
        }
    }

    /// Whether a rule delays requests, or has delayed one that is not complete.
    #[cold]
    fn delays_requests(&mut self) -> bool {
        let is_delayed = self.observer.as_ref().is_some_and(|it| !it.delays.is_empty());
        is_delayed || self.interceptors.get().has_latency()
    }

    /// Polls while a trace is recorded or requests are delayed, or after that has ended.
    #[cold]
    #[inline(never)]
    fn poll_observed(&mut self, now: Nanos, done: &mut CompletionBatch) {
        let before = done.len();
        if let Some(observer) = &mut self.observer {
            self.inner.poll(now, &mut observer.delays.fresh);
            observer.delays.take_completed(now, done);
            observer.delays.release(now, done);
        }
        self.look();
        if let Some(recorder) = recorder_of(&mut self.observer)
            && done.len() > before
        {
            recorder.begin();
            recorder.completed(done, before);
        }
    }
}

fn recorder_of(observer: &mut Option<Box<Observer>>) -> Option<&mut QueueRecorder> {
    observer.as_mut().and_then(|observer| observer.recorder.as_mut())
}

impl<Q: DeviceQueue> DeviceQueue for FaultyQueue<Q> {
    #[inline]
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        if self.interceptors.unchanged().is_none() {
            return self.start_after_change(now, batch, done);
        }
        self.inner.start(now, batch, done);
    }

    #[inline(always)] // A call of its own costs a third of a null device's path.
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
        if self.observer.is_some() {
            return self.poll_observed(now, done);
        }
        self.inner.poll(now, done);
    }

    #[inline]
    fn room(&self) -> usize {
        self.inner.room()
    }

    #[inline]
    fn due(&self) -> Due {
        match &self.observer {
            None => self.inner.due(),
            Some(observer) => observer.delays.due().earlier(self.inner.due()),
        }
    }

    #[inline]
    fn is_immediate(&mut self) -> bool {
        if self.interceptors.unchanged().is_none() && self.look() && self.delays_requests() {
            return false;
        }
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
        let held = self.observer.as_ref().map_or(Due::Never, |observer| observer.delays.due());
        self.inner.sleep(held.earlier(until), clock);
    }

    fn abort(&mut self, done: &mut CompletionBatch) {
        match &mut self.observer {
            None => self.inner.abort(done),
            Some(observer) => {
                self.inner.abort(&mut observer.delays.fresh);
                observer.delays.abort(done);
            }
        }
    }
}
