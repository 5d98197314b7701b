//! The queue that one channel holds of a scheduled device.
//!
//! The channel puts requests into a submit ring. Then, and whenever its thread polls or is about to
//! sleep, it *helps*: it dispatches the next requests, of any channel, and starts them. If the
//! device completes requests within `start`, the channel starts them on its own device queue and
//! holds nothing that other threads could wait for. If nothing else waits, such requests take the
//! fast path and skip the submit ring. If the device completes requests later, one queue is shared
//! by all channels, and the holder of its combining lock uses it.

use std::cell::Cell;
use std::os::fd::RawFd;
use std::sync::Arc;

use blockyard_sync::atomics::yield_now;
use blockyard_sync::combining_lock::{RoundResult, RunResult};
use blockyard_sync::poll_leader::{NEVER, Wake};
use blockyard_sync::rcu_cell::RcuReader;

use super::completion_router::CompletionTarget;
use super::in_flight::{CompletedChain, InFlightTable};
use super::scheduled::Shared;
use super::shared_queue::DispatchRound;
use super::{Bypass, BypassRefusal, Left, QueuedRequest, Report, SchedulerQueue, SortedBatch};
use crate::bio::Status;
use crate::clock::Clock;
use crate::device::{DeviceQueue, Due};
use crate::request::{Batch, CompletedRequest, CompletionBatch};
use crate::units::Nanos;
use crate::work::InlineRequest;

/// Maximum number of requests that a channel inserts at once.
const STAGE_MAX: usize = 128;
/// Maximum number of requests, of any channel, that a channel starts in one call. Small for tests
/// with random interleavings, so that they also hand work to other threads.
const BUDGET: usize = if cfg!(shuttle) { 4 } else { 256 };
/// Longest sleep, in nanoseconds, without checking for work. Other threads wake this one; the bound
/// covers a missed wakeup.
const SLEEP_NS: u64 = 50_000_000;
/// How often a thread yields the CPU before it sleeps.
const YIELDS: usize = 2;
/// How soon, in nanoseconds, threads that wait for other events have to poll again for completions
/// from other threads.
const LOOK_NS: u64 = 50_000;

/// How often a thread yields the CPU for a batch that may be able to pass soon, before it takes the
/// slow path. The thread in its way was usually preempted, and being served by another thread costs
/// more than waiting for it.
const YIELDS_MAX: usize = 8;

/// How often a thread dispatches waiting requests before it adds its own to them.
const HELPS_MAX: usize = 2;

/// A channel's part of a scheduled device.
pub struct ScheduledQueue<Q: DeviceQueue, F: SchedulerQueue> {
    shared: Arc<Shared<Q, F>>,
    /// The bypass of the scheduler, and the queue for requests that complete within `start`.
    own: Q,
    mode: RcuReader<bool>,
    /// Whether the scheduler was active for the last batch.
    active: bool,
    /// Whether the scheduler was active for the last batch, or holds requests of this channel. If
    /// not, each call goes to the channel's own queue.
    is_engaged: bool,
    ring: F::SubmitRing,
    target: CompletionTarget,
    /// Requests of this channel that have not returned.
    out: usize,
    /// The submit ring was full when last checked. Other channels may fill it, too.
    refused: Cell<bool>,
    /// Completions that arrived while the channel was about to sleep.
    arrived: CompletionBatch,
    /// The requests that may take the fast path.
    sorted: SortedBatch,
    staged: Vec<QueuedRequest>,
    picked: Vec<QueuedRequest>,
    in_flight: InFlightTable,
    batch: Batch,
    results: CompletionBatch,
    completed: Vec<CompletedChain>,
    reports: Vec<Report>,
    look_at: Nanos,
    /// Whether requests go to the shared device queue.
    by_shared_queue: bool,
}

/// The result of helping.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Helped {
    /// All possible work was done.
    Whole,
    /// Another thread uses the shared queue, and looks for work once more before it stops.
    Elsewhere,
}

impl<Q: DeviceQueue, F: SchedulerQueue> ScheduledQueue<Q, F> {
    pub(super) fn new(
        shared: Arc<Shared<Q, F>>,
        own: Q,
        target: CompletionTarget,
    ) -> ScheduledQueue<Q, F> {
        let requests = usize::from(shared.requests_max());
        let (depth, take_max) = (usize::from(shared.depth), usize::from(shared.take_max));
        ScheduledQueue {
            own,
            mode: RcuReader::new(&shared.active),
            active: false,
            is_engaged: false,
            ring: shared.scheduler_queue.open(),
            target,
            out: 0,
            refused: Cell::new(false),
            arrived: CompletionBatch::with_capacity(requests),
            sorted: SortedBatch::new(shared.rules, shared.zone_sectors),
            staged: Vec::with_capacity(STAGE_MAX),
            picked: Vec::with_capacity(take_max),
            in_flight: InFlightTable::new(shared.take_max),
            batch: Batch::with_capacity(depth),
            results: CompletionBatch::with_capacity(depth),
            completed: Vec::with_capacity(2 * depth),
            reports: Vec::with_capacity(2 * depth),
            look_at: Nanos(0),
            by_shared_queue: false,
            shared,
        }
    }

    /// Does all work that can be done, for any channel. This channel's completions go into `done`,
    /// or are kept.
    fn help(&mut self, now: Nanos, mut done: Option<&mut CompletionBatch>) -> Helped {
        let (mut budget, mut helped) = (BUDGET, Helped::Whole);
        loop {
            // Requests on the shared queue stay there, even if the device now completes within
            // `start`.
            let is_held = self.shared.poll_leader.due() < NEVER;
            self.by_shared_queue = is_held || !self.own.is_immediate();
            let (started, left) = if !self.by_shared_queue {
                self.pick_and_run(now)
            } else {
                let (turn, ran) = self.run_shared_queue(now, budget);
                helped =
                    if ran == RunResult::Elsewhere { Helped::Elsewhere } else { Helped::Whole };
                turn
            };
            let done = done.as_deref_mut().unwrap_or(&mut self.arrived);
            self.out -= self.target.send(&mut self.completed, done);
            if started == 0 || started >= budget {
                if left || started > 0 {
                    // The rest is for another thread.
                    self.shared.scheduler_queue.abandon();
                    self.target.notify_one();
                }
                return helped;
            }
            budget -= started;
        }
    }

    /// Dispatches the next requests and runs them on the channel's own queue, which completes them
    /// at once. Returns their number, and whether work is left.
    fn pick_and_run(&mut self, now: Nanos) -> (usize, bool) {
        let ScheduledQueue { shared, ring, picked, in_flight, batch, .. } = self;
        let left = shared.scheduler_queue.dispatch(ring, now, in_flight.room(), picked);
        let count = picked.len();
        if count == 0 {
            return (0, left == Left::Undone);
        }
        if left == Left::More {
            self.target.notify_one();
        }
        for queued in picked.drain(..) {
            in_flight.start(queued, None, batch);
        }
        self.own.start(now, batch, &mut self.results);
        let is_awaited = self.settle();
        (count, left == Left::Undone || is_awaited)
    }

    /// Collects the results of a batch from the channel's own queue and reports them. Returns
    /// whether another request waits for them.
    fn settle(&mut self) -> bool {
        if !self.batch.is_empty() {
            let ScheduledQueue { in_flight, batch, reports, completed, .. } = self;
            in_flight.requeue_unstarted(batch, reports, completed);
        }
        while let Some(ended) = self.results.take() {
            self.complete(ended, None);
        }
        self.report()
    }

    /// Reports the fate of requests. Returns whether another request waits for them.
    fn report(&mut self) -> bool {
        let ScheduledQueue { shared, ring, reports, in_flight, .. } = self;
        shared.scheduler_queue.report(reports);
        let passed = in_flight.take_bypass_completed();
        passed != [0; 2] && shared.scheduler_queue.bypass_completed(ring, passed)
    }

    /// Takes a request that the channel's own queue has completed. A request that bypassed the
    /// scheduler goes into `done`.
    #[inline]
    fn complete(&mut self, ended: CompletedRequest, done: Option<&mut CompletionBatch>) {
        if let Err(ended) = self.in_flight.complete(ended, &mut self.completed, &mut self.reports) {
            done.unwrap_or(&mut self.arrived).put(ended);
        }
    }

    /// Takes a turn with the shared device queue, unless another thread has it. Returns the number
    /// of started requests, and whether work is left.
    fn run_shared_queue(&mut self, now: Nanos, most: usize) -> ((usize, bool), RunResult) {
        let ScheduledQueue { shared, ring, completed, target, .. } = self;
        let shared: &Shared<Q, F> = shared;
        let (mut started, mut left, mut wake) = (0, false, Wake::NoThread);
        let ran = shared.shared_queue.run(|shared_queue| {
            let mut round =
                DispatchRound { scheduler_queue: &shared.scheduler_queue, ring, now, completed };
            let (count, some_left) = shared_queue.round(&mut round, most - started);
            started += count;
            left = some_left;
            wake = shared.poll_leader.set_due(match shared_queue.due() {
                Due::At(at) => at.0,
                Due::Never => NEVER,
            });
            if started < most { RoundResult::Whole } else { RoundResult::Enough }
        });
        match wake {
            Wake::Leader(leader) if leader != u32::from(target.number()) => target.notify(leader),
            Wake::AnySleeper => {
                target.notify_one();
            }
            _ => {}
        }
        ((started, left), ran)
    }

    /// Yields the CPU to threads that may hold this channel's requests, which costs less than to
    /// sleep and be woken. Returns whether a completion has arrived.
    fn yields(&self) -> bool {
        if self.by_shared_queue {
            return false;
        }
        for _ in 0..YIELDS {
            yield_now();
            if self.target.is_any() {
                return true;
            }
        }
        false
    }

    /// Whether a completion has arrived.
    #[inline]
    fn has_completions(&self) -> bool {
        !self.arrived.is_empty() || self.target.is_any()
    }

    /// Sleeps once, until `until` at most, unless there is work. The poll leader (`leads`) sleeps
    /// no longer than until the shared queue is due.
    fn doze<C: Clock>(&self, until: Nanos, leads: bool, helped: Helped, clock: &C) {
        let Shared { poll_leader, scheduler_queue, shared_queue, .. } = &*self.shared;
        // The thread that uses the shared queue now will announce when it is due; until then the
        // announced time is old.
        let due = if leads && helped == Helped::Whole { Nanos(poll_leader.due()) } else { until };
        let until = until.min(due);
        if leads {
            poll_leader.plan(until.0);
        }
        clock.doze_until(until, &mut |duration| {
            self.target.event_count().sleep(duration, || {
                let early =
                    if leads { poll_leader.due() < until.0 } else { poll_leader.is_wanted() };
                self.target.is_any()
                    || (scheduler_queue.is_work()
                        && !scheduler_queue.notify()
                        && !(self.by_shared_queue && shared_queue.notify()))
                    || (early && !(leads && shared_queue.notify()))
            });
        });
        if leads {
            // This thread is awake and will poll soon.
            poll_leader.plan(0);
        }
    }

    /// Whether the scheduler holds requests of this channel, or completions have arrived.
    #[inline]
    fn has_out(&self) -> bool {
        self.out > 0 || self.refused.get() || !self.arrived.is_empty()
    }

    /// Reads whether the scheduler is active, and updates `is_engaged`.
    #[cold]
    fn look_at_mode(&mut self) {
        self.active = **self.mode.get();
        self.is_engaged = self.active || self.has_out() || self.in_flight.count() > 0;
    }

    /// Starts requests on the channel's own queue, bypassing the scheduler.
    #[cold]
    fn start_some(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        let room = self.own.room().min(usize::from(self.shared.depth));
        while self.batch.len() < room
            && let Some(started) = batch.next()
        {
            self.batch.push(started);
        }
        self.own.start(now, &mut self.batch, done);
        batch.requeue_all(&mut self.batch);
    }

    /// Starts requests after the mode has changed, or while the scheduler is in use.
    #[inline(never)]
    fn start_engaged(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        self.look_at_mode();
        if !self.active {
            // Until now the channel may have counted on the capacity of its submit ring.
            if batch.len() <= self.own.room() {
                return self.own.start(now, batch, done);
            }
            return self.start_some(now, batch, done);
        }
        if F::BYPASSES {
            self.bypass(now, batch, done);
            if batch.is_empty() {
                return;
            }
        }
        self.look_at = now + LOOK_NS;
        loop {
            let room = self.shared.scheduler_queue.room(&self.ring).min(STAGE_MAX);
            let target = self.target.number();
            let requests = std::iter::from_fn(|| batch.next()).take(room);
            self.staged.extend(requests.map(|started| QueuedRequest::take(started, target)));
            let taken = self.shared.scheduler_queue.insert(&mut self.ring, &self.staged, now);
            self.out += taken;
            for queued in self.staged.drain(taken..).rev() {
                batch.requeue(queued.into_started());
            }
            self.staged.clear();
            self.refused.set(taken == 0);
            self.help(now, Some(done));
            if batch.is_empty() || taken == 0 {
                return;
            }
        }
    }

    /// Polls while the scheduler is in use.
    #[inline(never)]
    fn poll_engaged(&mut self, now: Nanos, done: &mut CompletionBatch) {
        if self.in_flight.count() == 0 {
            self.own.poll(now, done);
        } else {
            self.own.poll(now, &mut self.results);
            while let Some(ended) = self.results.take() {
                self.complete(ended, Some(done));
            }
            let is_awaited = self.report();
            self.out -= self.target.send(&mut self.completed, done);
            if is_awaited {
                self.help(now, Some(done));
            }
        }
        if !self.has_out() {
            return;
        }
        if self.refused.get() {
            self.refused.set(self.shared.scheduler_queue.room(&self.ring) == 0);
        }
        self.look_at = now + LOOK_NS;
        let before = done.len();
        while done.take_from(&mut self.arrived) {}
        self.out -= self.target.collect(done);
        if done.len() == before {
            self.help(now, Some(done));
        }
    }

    /// How many requests can start while the scheduler is in use.
    #[inline(never)]
    fn room_engaged(&self) -> usize {
        if !self.active {
            return self.own.room();
        }
        let room = self.shared.scheduler_queue.room(&self.ring);
        if room == 0 {
            // The caller may have a request to start, and then waits for space.
            self.refused.set(true);
        }
        room
    }

    /// When to poll again while the scheduler is in use.
    #[inline(never)]
    fn due_engaged(&self) -> Due {
        if self.has_completions() {
            return Due::At(Nanos(0));
        }
        let due = self.own.due();
        if self.out == 0 && !self.refused.get() {
            return due;
        }
        due.earlier(Due::At(self.look_at.min(Nanos(self.shared.poll_leader.due()))))
    }

    // The fast path. The channel checks its requests by itself, asks the scheduler queue whether
    // they may go and in which order, and runs them on its own device queue, which completes them
    // at once. Such requests enter no submit ring, no order and no completion queue.

    /// Passes as much of a batch as possible, from its start. Completed requests go into `done`.
    #[inline]
    fn bypass(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        let (mut yields, mut helps) = (YIELDS_MAX, HELPS_MAX);
        let most = usize::from(self.shared.take_max);
        // Requests that this queue delays, because a delay fault was armed meanwhile, hold the tags
        // that passed requests would need.
        while !batch.is_empty()
            && self.in_flight.count() == 0
            && self.own.is_immediate()
            && self.sorted.look_at(batch, most)
        {
            let ScheduledQueue { shared, ring, sorted, .. } = self;
            let bypass = loop {
                match shared.scheduler_queue.bypass(ring, sorted, now) {
                    Err(BypassRefusal::Busy) if yields > 0 => {
                        yields -= 1;
                        yield_now();
                    }
                    answer => break answer,
                }
            };
            match bypass {
                Ok(bypass) => self.run(now, bypass, batch, done),
                Err(BypassRefusal::WaitingFirst) if helps > 0 => {
                    helps -= 1;
                    self.help(now, Some(done));
                }
                Err(_) => return,
            }
        }
    }

    /// Runs the requests that pass.
    #[inline]
    fn run(&mut self, now: Nanos, bypass: Bypass, batch: &mut Batch, done: &mut CompletionBatch) {
        let ScheduledQueue { shared, ring, sorted, .. } = self;
        sorted.arrange(batch);
        let keeps_tags = sorted.has_tags_below(shared.depth);
        if keeps_tags && sorted.count() == batch.len() {
            self.own.start(now, batch, done);
            self.batch.requeue_all(batch);
        } else {
            batch.move_first(sorted.count(), &mut self.batch);
            if keeps_tags {
                self.own.start(now, &mut self.batch, done);
            }
        }
        let is_whole = self.batch.is_empty();
        let counts = if is_whole { sorted.counts() } else { sorted.started(&self.batch) };
        let is_awaited = counts != [0; 2] && shared.scheduler_queue.bypass_completed(ring, counts);
        if !is_whole {
            self.start_with_tags(now, !keeps_tags, done);
        } else if is_awaited || bypass.is_called {
            self.help(now, Some(done));
        }
    }

    /// Gives passed requests device tags, and starts them if that was not tried yet. Those that do
    /// not start return to the order.
    #[cold]
    fn start_with_tags(&mut self, now: Nanos, starts: bool, done: &mut CompletionBatch) {
        let (target, bypass_id) =
            (self.target.number(), self.shared.scheduler_queue.bypass_id(&self.ring));
        self.out += self.batch.len();
        for _ in 0..self.batch.len() {
            if let Some(started) = self.batch.next() {
                let queued = QueuedRequest::take(started, target);
                self.in_flight.start(queued, Some(bypass_id), &mut self.batch);
            }
        }
        if starts {
            self.own.start(now, &mut self.batch, &mut self.results);
        }
        self.settle();
        self.help(now, Some(done));
    }
}

impl<Q: DeviceQueue, F: SchedulerQueue> DeviceQueue for ScheduledQueue<Q, F> {
    #[inline]
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        if self.is_engaged || self.mode.unchanged().is_none() {
            return self.start_engaged(now, batch, done);
        }
        self.own.start(now, batch, done);
    }

    #[inline(always)] // A call of its own costs a third of a null device's path.
    fn execute_inline(&mut self, single: InlineRequest) -> Option<Status> {
        if self.is_engaged || self.mode.unchanged().is_none() {
            self.look_at_mode();
            if self.is_engaged {
                return None;
            }
        }
        self.own.execute_inline(single)
    }

    #[inline]
    fn poll(&mut self, now: Nanos, done: &mut CompletionBatch) {
        if self.is_engaged { self.poll_engaged(now, done) } else { self.own.poll(now, done) }
    }

    #[inline]
    fn room(&self) -> usize {
        if self.is_engaged { self.room_engaged() } else { self.own.room() }
    }

    #[inline]
    fn due(&self) -> Due {
        if self.is_engaged { self.due_engaged() } else { self.own.due() }
    }

    #[inline]
    fn waits_for_others(&self) -> bool {
        (self.is_engaged && self.has_out()) || self.own.waits_for_others()
    }

    /// The descriptor of the bypass. Requests in the scheduler have none: `due` says when to poll
    /// for them.
    fn descriptor(&mut self) -> Option<RawFd> {
        self.own.descriptor()
    }

    fn may_sleep(&mut self) -> bool {
        !self.has_completions() && self.own.may_sleep()
    }

    fn sleep<C: Clock>(&mut self, until: Due, clock: &C) {
        if !self.has_out() {
            // In the bypass, the device's own threads wake this one.
            return self.own.sleep(until, clock);
        }
        let until = until.earlier(self.own.due());
        let mut leads = false;
        while !self.has_completions() {
            let now = clock.now();
            let helped = self.help(now, None);
            if self.refused.get() && self.shared.scheduler_queue.room(&self.ring) > 0 {
                break;
            }
            // No thread wakes this one when its submit ring has space again or a bypassing request
            // completes.
            let looks = self.refused.get() || self.own.waits_for_others();
            let longest = now + if looks { LOOK_NS } else { SLEEP_NS };
            let end = match until {
                Due::At(at) if at <= now => break,
                Due::At(at) => at.min(longest),
                Due::Never => longest,
            };
            if self.arrived.is_empty() && !self.yields() {
                leads = leads || self.shared.poll_leader.try_lead(self.target.number().into());
                self.doze(end, leads, helped, clock);
            }
        }
        if leads {
            self.shared.poll_leader.leave();
        }
        if self.shared.poll_leader.is_wanted() || self.shared.scheduler_queue.is_abandoned() {
            // Another thread must become the poll leader, or do the work for which this thread was
            // woken before it found its own requests complete.
            self.target.notify_one();
        }
    }

    fn abort(&mut self, done: &mut CompletionBatch) {
        self.own.abort(&mut self.results);
        while let Some(ended) = self.results.take() {
            self.complete(ended, Some(done));
        }
        if self.report() {
            // This channel is being dropped: another thread has to dispatch.
            self.shared.scheduler_queue.abandon();
            self.target.notify_one();
        }
        self.out -= self.target.send(&mut self.completed, done);
        if self.out > 0 {
            let target = self.target.number();
            let ran = self.shared.shared_queue.run(|shared_queue| {
                shared_queue.abort(target);
                RoundResult::Enough
            });
            if ran == RunResult::Enough {
                // A thread that notified this one relies on another look for work, and may sleep by
                // now. This channel is being dropped and does not look if its own requests are
                // complete.
                self.shared.scheduler_queue.abandon();
                self.target.notify_one();
            }
        }
    }
}
