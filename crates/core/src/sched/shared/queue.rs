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
use blockyard_sync::published::Reader;
use blockyard_sync::role::{Ran, Round};
use blockyard_sync::watch::{NEVER, Wake};

use super::engine::Pass;
use super::flights::{Flights, Landed};
use super::homes::Home;
use super::scheduled::Shared;
use super::{Front, Left, Queued, Report, Sheaf};
use crate::clock::Clock;
use crate::device::{DeviceQueue, Due};
use crate::request::{Batch, Done, Ended};
use crate::status::Status;
use crate::units::Nanos;
use crate::work::Single;

mod passing;

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

/// A channel's part of a scheduled device.
pub struct ScheduledQueue<Q: DeviceQueue, F: Front> {
    shared: Arc<Shared<Q, F>>,
    /// The bypass of the scheduler, and the queue for requests that complete within `start`.
    own: Q,
    mode: Reader<bool>,
    /// Whether the scheduler was active for the last batch.
    active: bool,
    lane: F::Lane,
    home: Home,
    /// Requests of this channel that have not returned.
    out: usize,
    /// The submit ring was full when last checked. Other channels may fill it, too.
    refused: Cell<bool>,
    /// Completions that arrived while the channel was about to sleep.
    arrived: Done,
    /// The requests that may take the fast path.
    sheaf: Sheaf,
    staged: Vec<Queued>,
    picked: Vec<Queued>,
    flights: Flights,
    batch: Batch,
    results: Done,
    landed: Vec<Landed>,
    reports: Vec<Report>,
    look_at: Nanos,
    /// Whether requests go to the shared device queue.
    by_engine: bool,
}

/// The result of helping.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Helped {
    /// All possible work was done.
    Whole,
    /// Another thread uses the shared queue, and looks for work once more before it stops.
    Elsewhere,
}

impl<Q: DeviceQueue, F: Front> ScheduledQueue<Q, F> {
    pub(super) fn new(shared: Arc<Shared<Q, F>>, own: Q, home: Home) -> ScheduledQueue<Q, F> {
        let requests = usize::from(shared.requests_max());
        let (depth, hand) = (usize::from(shared.depth), usize::from(shared.hand));
        ScheduledQueue {
            own,
            mode: Reader::new(&shared.active),
            active: false,
            lane: shared.front.open(),
            home,
            out: 0,
            refused: Cell::new(false),
            arrived: Done::with_capacity(requests),
            sheaf: Sheaf::new(shared.rules, shared.zone_sectors),
            staged: Vec::with_capacity(STAGE_MAX),
            picked: Vec::with_capacity(hand),
            flights: Flights::new(shared.hand),
            batch: Batch::with_capacity(depth),
            results: Done::with_capacity(depth),
            landed: Vec::with_capacity(2 * depth),
            reports: Vec::with_capacity(2 * depth),
            look_at: Nanos(0),
            by_engine: false,
            shared,
        }
    }

    /// Does all work that can be done, for any channel. This channel's completions go into `done`,
    /// or are kept.
    fn help(&mut self, now: Nanos, mut done: Option<&mut Done>) -> Helped {
        let (mut budget, mut helped) = (BUDGET, Helped::Whole);
        loop {
            // Requests on the shared queue stay there, even if the device now completes within
            // `start`.
            let is_held = self.shared.watch.due() < NEVER;
            self.by_engine = is_held || !self.own.is_immediate();
            let (started, left) = if !self.by_engine {
                self.pick_and_run(now)
            } else {
                let (turn, ran) = self.turn_engine(now, budget);
                helped = if ran == Ran::Elsewhere { Helped::Elsewhere } else { Helped::Whole };
                turn
            };
            let done = done.as_deref_mut().unwrap_or(&mut self.arrived);
            self.out -= self.home.send(&mut self.landed, done);
            if started == 0 || started >= budget {
                if left || started > 0 {
                    // The rest is for another thread.
                    self.shared.front.abandon();
                    self.home.ring_one();
                }
                return helped;
            }
            budget -= started;
        }
    }

    /// Dispatches the next requests and runs them on the channel's own queue, which completes them
    /// at once. Returns their number, and whether work is left.
    fn pick_and_run(&mut self, now: Nanos) -> (usize, bool) {
        let ScheduledQueue { shared, lane, picked, flights, batch, .. } = self;
        let left = shared.front.dispatch(lane, now, flights.room(), picked);
        let count = picked.len();
        if count == 0 {
            return (0, left == Left::Undone);
        }
        if left == Left::More {
            self.home.ring_one();
        }
        for queued in picked.drain(..) {
            flights.launch(queued, None, batch);
        }
        self.own.start(now, batch, &mut self.results);
        let is_awaited = self.settle();
        (count, left == Left::Undone || is_awaited)
    }

    /// Collects the results of a batch from the channel's own queue and reports them. Returns
    /// whether another request waits for them.
    fn settle(&mut self) -> bool {
        if !self.batch.is_empty() {
            let ScheduledQueue { flights, batch, reports, landed, .. } = self;
            flights.take_leftovers(batch, reports, landed);
        }
        while let Some(ended) = self.results.take() {
            self.land(ended, None);
        }
        self.report()
    }

    /// Reports the fate of requests. Returns whether another request waits for them.
    fn report(&mut self) -> bool {
        let ScheduledQueue { shared, lane, reports, flights, .. } = self;
        shared.front.report(reports);
        let passed = flights.take_passed();
        passed != [0; 2] && shared.front.passed(lane, passed)
    }

    /// Takes a request that the channel's own queue has completed. A request that bypassed the
    /// scheduler goes into `done`.
    #[inline]
    fn land(&mut self, ended: Ended, done: Option<&mut Done>) {
        if let Err(ended) = self.flights.land(ended, &mut self.landed, &mut self.reports) {
            done.unwrap_or(&mut self.arrived).put(ended);
        }
    }

    /// Takes a turn with the shared device queue, unless another thread has it. Returns the number
    /// of started requests, and whether work is left.
    fn turn_engine(&mut self, now: Nanos, most: usize) -> ((usize, bool), Ran) {
        let ScheduledQueue { shared, lane, landed, home, .. } = self;
        let shared: &Shared<Q, F> = shared;
        let (mut started, mut left, mut wake) = (0, false, Wake::Nobody);
        let ran = shared.engine.run(|engine| {
            let mut pass = Pass { front: &shared.front, lane, now, landed };
            let (count, some_left) = engine.turn(&mut pass, most - started);
            started += count;
            left = some_left;
            wake = shared.watch.set_due(match engine.due() {
                Due::At(at) => at.0,
                Due::Never => NEVER,
            });
            if started < most { Round::Whole } else { Round::Enough }
        });
        match wake {
            Wake::Keeper(keeper) if keeper != u32::from(home.number()) => home.ring(keeper),
            Wake::Anybody => {
                home.ring_one();
            }
            _ => {}
        }
        ((started, left), ran)
    }

    /// Yields the CPU to threads that may hold this channel's requests, which costs less than to
    /// sleep and be woken. Returns whether a completion has arrived.
    fn gives_way(&self) -> bool {
        if self.by_engine {
            return false;
        }
        for _ in 0..YIELDS {
            yield_now();
            if self.home.is_any() {
                return true;
            }
        }
        false
    }

    /// Whether a completion has arrived.
    #[inline]
    fn is_home(&self) -> bool {
        !self.arrived.is_empty() || self.home.is_any()
    }

    /// Sleeps once, until `until` at most, unless there is work. The poll leader (`keeps`) sleeps
    /// no longer than until the shared queue is due.
    fn doze<C: Clock>(&self, until: Nanos, keeps: bool, helped: Helped, clock: &C) {
        let Shared { watch, front, engine, .. } = &*self.shared;
        // The thread that uses the shared queue now will announce when it is due; until then the
        // announced time is old.
        let due = if keeps && helped == Helped::Whole { Nanos(watch.due()) } else { until };
        let until = until.min(due);
        if keeps {
            watch.plan(until.0);
        }
        clock.doze_until(until, &mut |duration| {
            self.home.bell().sleep(duration, || {
                let early = if keeps { watch.due() < until.0 } else { watch.is_wanted() };
                self.home.is_any()
                    || (front.is_work() && !front.kick() && !(self.by_engine && engine.kick()))
                    || (early && !(keeps && engine.kick()))
            });
        });
        if keeps {
            // This thread is awake and will poll soon.
            watch.plan(0);
        }
    }

    /// Whether the scheduler holds requests of this channel, or completions have arrived.
    #[inline]
    fn has_out(&self) -> bool {
        self.out > 0 || self.refused.get() || !self.arrived.is_empty()
    }

    /// Starts requests on the channel's own queue, bypassing the scheduler.
    #[cold]
    fn start_some(&mut self, now: Nanos, batch: &mut Batch, done: &mut Done) {
        let room = self.own.room().min(usize::from(self.shared.depth));
        while self.batch.len() < room
            && let Some(started) = batch.next()
        {
            self.batch.push(started);
        }
        self.own.start(now, &mut self.batch, done);
        batch.take_back(&mut self.batch);
    }
}

impl<Q: DeviceQueue, F: Front> DeviceQueue for ScheduledQueue<Q, F> {
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut Done) {
        self.active = **self.mode.get();
        if !self.active {
            if batch.len() <= self.own.room() {
                return self.own.start(now, batch, done);
            }
            return self.start_some(now, batch, done);
        }
        if F::PASSES {
            self.pass(now, batch, done);
            if batch.is_empty() {
                return;
            }
        }
        self.look_at = now + LOOK_NS;
        loop {
            let room = self.shared.front.room(&self.lane).min(STAGE_MAX);
            let home = self.home.number();
            let requests = std::iter::from_fn(|| batch.next()).take(room);
            self.staged.extend(requests.map(|started| Queued::take(started, home)));
            let taken = self.shared.front.insert(&mut self.lane, &self.staged, now);
            self.out += taken;
            for queued in self.staged.drain(taken..).rev() {
                batch.put_back(queued.into_started());
            }
            self.staged.clear();
            self.refused.set(taken == 0);
            self.help(now, Some(done));
            if batch.is_empty() || taken == 0 {
                return;
            }
        }
    }

    #[inline]
    fn carry(&mut self, single: Single) -> Option<Status> {
        let active = **self.mode.get();
        if active || self.out > 0 { None } else { self.own.carry(single) }
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) {
        if self.flights.count() == 0 {
            self.own.poll(now, done);
        } else {
            self.own.poll(now, &mut self.results);
            while let Some(ended) = self.results.take() {
                self.land(ended, Some(done));
            }
            let is_awaited = self.report();
            self.out -= self.home.send(&mut self.landed, done);
            if is_awaited {
                self.help(now, Some(done));
            }
        }
        if !self.has_out() {
            return;
        }
        if self.refused.get() {
            self.refused.set(self.shared.front.room(&self.lane) == 0);
        }
        self.look_at = now + LOOK_NS;
        let before = done.len();
        while done.take_from(&mut self.arrived) {}
        self.out -= self.home.collect(done);
        if done.len() == before {
            self.help(now, Some(done));
        }
    }

    #[inline]
    fn room(&self) -> usize {
        if !self.active {
            return self.own.room();
        }
        let room = self.shared.front.room(&self.lane);
        if room == 0 {
            // The caller may have a request to start, and then waits for space.
            self.refused.set(true);
        }
        room
    }

    fn due(&self) -> Due {
        if self.is_home() {
            return Due::At(Nanos(0));
        }
        let due = self.own.due();
        if self.out == 0 && !self.refused.get() {
            return due;
        }
        due.earlier(Due::At(self.look_at.min(Nanos(self.shared.watch.due()))))
    }

    fn waits_for_others(&self) -> bool {
        self.has_out() || self.own.waits_for_others()
    }

    /// The descriptor of the bypass. Requests in the scheduler have none: `due` says when to poll
    /// for them.
    fn descriptor(&mut self) -> Option<RawFd> {
        self.own.descriptor()
    }

    fn may_sleep(&mut self) -> bool {
        !self.is_home() && self.own.may_sleep()
    }

    fn sleep<C: Clock>(&mut self, until: Due, clock: &C) {
        if !self.has_out() {
            // In the bypass, the device's own threads wake this one.
            return self.own.sleep(until, clock);
        }
        let until = until.earlier(self.own.due());
        let mut keeps = false;
        while !self.is_home() {
            let now = clock.now();
            let helped = self.help(now, None);
            if self.refused.get() && self.shared.front.room(&self.lane) > 0 {
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
            if self.arrived.is_empty() && !self.gives_way() {
                keeps = keeps || self.shared.watch.keep(self.home.number().into());
                self.doze(end, keeps, helped, clock);
            }
        }
        if keeps {
            self.shared.watch.leave();
        }
        if self.shared.watch.is_wanted() || self.shared.front.is_abandoned() {
            // Another thread must become the poll leader, or do the work for which this thread was
            // woken before it found its own requests complete.
            self.home.ring_one();
        }
    }

    fn abort(&mut self, done: &mut Done) {
        self.own.abort(&mut self.results);
        while let Some(ended) = self.results.take() {
            self.land(ended, Some(done));
        }
        if self.report() {
            // This channel is being dropped: another thread has to dispatch.
            self.shared.front.abandon();
            self.home.ring_one();
        }
        self.out -= self.home.send(&mut self.landed, done);
        if self.out > 0 {
            let home = self.home.number();
            let ran = self.shared.engine.run(|engine| {
                engine.abort(home);
                Round::Enough
            });
            if ran == Ran::Enough {
                // A thread that notified this one relies on another look for work, and may sleep by
                // now. This channel is being dropped and does not look if its own requests are
                // complete.
                self.shared.front.abandon();
                self.home.ring_one();
            }
        }
    }
}
