//! What one channel holds of a scheduled device.
//!
//! Requests go into a lane. Then, and whenever somebody looks for completions or is about to sleep,
//! the channel *helps*: it takes out what is next, of any channel, and starts it. Where the device
//! completes what it starts at once, the channel does so on a device queue of its own, and holds
//! nothing that others could wait for; there, what nothing else waits with passes on and sees no
//! lane. Where the device completes later, there is one queue for all, and who has the role of its
//! starter uses it.

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

/// Most requests that a channel inserts at once.
const STAGE_MAX: usize = 128;
/// Most requests that a channel starts in one go, whosever they are. Few where interleavings are
/// drawn, so that work is handed on there too.
const BUDGET: usize = if cfg!(shuttle) { 4 } else { 256 };
/// Longest sleep without another look. Others ring; this is a bound, so that a wait has one.
const SLEEP_NS: u64 = 50_000_000;
/// How often a thread lets others run before it sleeps.
const YIELDS: usize = 2;
/// How soon those who sleep on other things are to look again for what others do for them.
const LOOK_NS: u64 = 50_000;

/// A channel's part of a scheduled device.
pub struct ScheduledQueue<Q: DeviceQueue, F: Front> {
    shared: Arc<Shared<Q, F>>,
    /// The way past the scheduler, and where what completes at once is started.
    own: Q,
    mode: Reader<bool>,
    /// Whether the scheduler was at work for the last batch.
    active: bool,
    lane: F::Lane,
    home: Home,
    /// Requests of this channel that have not come home.
    out: usize,
    /// The lane had no room when that was asked. Others may fill it, too.
    refused: Cell<bool>,
    /// What came home while the channel was about to sleep.
    arrived: Done,
    /// What is to pass on.
    sheaf: Sheaf,
    staged: Vec<Queued>,
    picked: Vec<Queued>,
    flights: Flights,
    batch: Batch,
    results: Done,
    landed: Vec<Landed>,
    reports: Vec<Report>,
    look_at: Nanos,
    /// Whether requests go to the device queue that all share.
    by_engine: bool,
}

/// What helping came to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Helped {
    /// Everything that could be done was.
    Whole,
    /// Another thread is at the device, and looks once more before it goes.
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

    /// Does what can be done, for whomever. What comes home goes into `done`, or is kept.
    fn help(&mut self, now: Nanos, mut done: Option<&mut Done>) -> Helped {
        let (mut budget, mut helped) = (BUDGET, Helped::Whole);
        loop {
            // What was started there stays there, also if the device completes at once by now.
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
                    // Somebody else's turn.
                    self.shared.front.abandon();
                    self.home.ring_one();
                }
                return helped;
            }
            budget -= started;
        }
    }

    /// Takes out what is next and runs it on the channel's own queue, which completes it at once;
    /// says how much, and whether something is left.
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

    /// Takes what the channel's own queue has made of a batch of flights, and reports it. Says
    /// whether somebody waits for that.
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

    /// Reports what has become of requests. Says whether somebody waits for that.
    fn report(&mut self) -> bool {
        let ScheduledQueue { shared, lane, reports, flights, .. } = self;
        shared.front.report(reports);
        let passed = flights.take_passed();
        passed != [0; 2] && shared.front.passed(lane, passed)
    }

    /// Takes what the channel's own queue has completed: of a batch that it ran, or past the
    /// scheduler, which goes into `done`.
    #[inline]
    fn land(&mut self, ended: Ended, done: Option<&mut Done>) {
        if let Err(ended) = self.flights.land(ended, &mut self.landed, &mut self.reports) {
            done.unwrap_or(&mut self.arrived).put(ended);
        }
    }

    /// Has a turn with the device queue that all share, unless somebody else has it; says how much
    /// was started, and whether something is left.
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

    /// Lets others run for a moment, who may have what this channel waits for in their hands: that
    /// costs less than to sleep and to be woken. Says whether something has come home.
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

    /// Whether something has come home.
    #[inline]
    fn is_home(&self) -> bool {
        !self.arrived.is_empty() || self.home.is_any()
    }

    /// Sleeps once, at most until `until`, unless there is something to do. Who `keeps` the watch
    /// sleeps no longer than until something is due.
    fn doze<C: Clock>(&self, until: Nanos, keeps: bool, helped: Helped, clock: &C) {
        let Shared { watch, front, engine, .. } = &*self.shared;
        // Who is at the device now says when it is due; before that the time is an old one.
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
            // Awake, and soon to look.
            watch.plan(0);
        }
    }

    /// Whether something of this channel is in the scheduler, or came out of it.
    #[inline]
    fn has_out(&self) -> bool {
        self.out > 0 || self.refused.get() || !self.arrived.is_empty()
    }

    /// Starts requests on the channel's own queue, past the scheduler.
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
            // Whoever asks may have something to start, and waits for room then.
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

    /// That of the way past the scheduler. What is in the scheduler has none: `due` says when to
    /// look for it.
    fn descriptor(&mut self) -> Option<RawFd> {
        self.own.descriptor()
    }

    fn may_sleep(&mut self) -> bool {
        !self.is_home() && self.own.may_sleep()
    }

    fn sleep<C: Clock>(&mut self, until: Due, clock: &C) {
        if !self.has_out() {
            // Past the scheduler: the device's own threads ring.
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
            // Nobody rings when there is room in a lane, nor here for what went past.
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
            // Somebody else is to keep the watch, or to do what this one was woken for, before it
            // found that its own requests had come home.
            self.home.ring_one();
        }
    }

    fn abort(&mut self, done: &mut Done) {
        self.own.abort(&mut self.results);
        while let Some(ended) = self.results.take() {
            self.land(ended, Some(done));
        }
        if self.report() {
            // This channel goes away: somebody else looks.
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
                // Who has kicked meanwhile trusts that somebody looks once more, and may sleep by
                // now. This channel goes away, and does not look if its own requests are home.
                self.shared.front.abandon();
                self.home.ring_one();
            }
        }
    }
}
