//! The threads of a pool go on one at a time: which one is drawn whenever one of them is about to
//! do something to the disk, or to wait. So a seed brings the same order of operations again.
#![allow(clippy::disallowed_types)] // A test may.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use blockyard_volume::store::Work;

/// The number of the thread that has the committer and the client.
const FIRST: usize = 0;

thread_local! {
    /// The number of this thread among those of its pool, if it is one of them.
    static ME: Cell<Option<usize>> = const { Cell::new(None) };
}

/// One of them is heavier than another one by as much as it is drawn more often.
const WEIGHTS: [u32; 4] = [1, 3, 10, 40];

#[derive(Debug)]
struct State {
    random: fastrand::Rng,
    /// Who goes on.
    turn: usize,
    /// Those that have not ended, each with its weight.
    live: BTreeMap<usize, u32>,
    /// Those that wait for something that was not so at their last look; nothing was done since.
    asleep: BTreeSet<usize>,
    begun: usize,
    /// Counts what was done.
    done: u64,
    /// The committer has nothing to do: it goes on if nobody else can.
    is_idle: bool,
    /// The process was killed.
    is_killed: bool,
}

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

/// See the module. Clones are the same.
#[derive(Clone)]
pub(crate) struct Turns(Arc<Inner>);

/// What ends a thread of a process that was killed.
struct Killed;

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Turns")
    }
}

impl State {
    /// Something was done that others may wait for.
    fn wake(&mut self) {
        self.asleep.clear();
        self.done += 1;
    }

    /// Draws the one that goes on of those that are not asleep.
    fn draw(&mut self, without: Option<usize>) -> Option<usize> {
        let is_awake = |it: &usize| !self.asleep.contains(it) && Some(*it) != without;
        let awake = || self.live.iter().filter(|(number, _)| is_awake(number));
        let sum: u32 = awake().map(|(_, weight)| weight).sum();
        if sum == 0 {
            return None;
        }
        let mut left = self.random.u32(..sum);
        let drawn = awake().find(|(_, weight)| {
            let is_it = left < **weight;
            left = left.saturating_sub(**weight);
            is_it
        });
        drawn.map(|(number, _)| *number)
    }
}

impl Turns {
    /// The calling thread has the committer.
    pub(crate) fn new(mut random: fastrand::Rng) -> Turns {
        ME.set(Some(FIRST));
        let weight = random.choice(WEIGHTS).unwrap();
        let live = BTreeMap::from([(FIRST, weight)]);
        let (turn, asleep) = (FIRST, BTreeSet::new());
        let (begun, is_idle, is_killed) = (FIRST, false, false);
        let state = State { random, turn, live, asleep, begun, done: 0, is_idle, is_killed };
        Turns(Arc::new(Inner { state: Mutex::new(state), changed: Condvar::new() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the turn of this one.
    fn wait<'a>(&self, state: MutexGuard<'a, State>, me: usize) -> MutexGuard<'a, State> {
        let is_over = |it: &mut State| it.turn != me && !it.is_killed;
        self.0.changed.wait_while(state, is_over).unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the one go on that was drawn, and waits for the turn of this one.
    fn pass(&self, mut state: MutexGuard<'_, State>, me: usize, drawn: usize) {
        if drawn != me {
            state.turn = drawn;
            self.0.changed.notify_all();
            state = self.wait(state, me);
        }
        let is_killed = state.is_killed;
        drop(state);
        if is_killed && me != FIRST && !std::thread::panicking() {
            resume_unwind(Box::new(Killed));
        }
    }

    /// Something is about to be done: others may do something before.
    pub(crate) fn step(&self) {
        let Some(me) = ME.get() else { return };
        let mut state = self.state();
        state.wake();
        let drawn = state.draw(None).expect("this one is there");
        self.pass(state, me, drawn);
    }

    /// The same for what changes nothing, and is looked at only where it is beside the committer.
    pub(crate) fn step_beside(&self) {
        if ME.get().is_some_and(|me| me != FIRST) {
            self.step();
        }
    }

    /// Others go on until something is so.
    pub(crate) fn until(&self, is_so: &dyn Fn() -> bool) {
        let Some(me) = ME.get() else { return };
        // What this one has done others may wait for.
        self.wake();
        while !is_so() {
            let mut state = self.state();
            if state.is_killed {
                self.pass(state, me, me);
                return;
            }
            state.asleep.insert(me);
            match state.draw(None).or(state.is_idle.then_some(FIRST)) {
                Some(drawn) => self.pass(state, me, drawn),
                None => {
                    drop(state);
                    panic!("all wait for each other");
                }
            }
        }
        self.wake();
    }

    /// The committer has nothing to do: others go on; says whether any of them did anything.
    pub(crate) fn idle(&self) -> bool {
        let mut state = self.state();
        let Some(drawn) = state.draw(Some(FIRST)) else { return false };
        state.asleep.insert(FIRST);
        state.is_idle = true;
        let done = state.done;
        self.pass(state, FIRST, drawn);
        let mut state = self.state();
        state.is_idle = false;
        state.done > done
    }

    /// Something was done that others may wait for.
    pub(crate) fn wake(&self) {
        self.state().wake();
    }

    /// What a thread does that is begun now.
    pub(crate) fn beside(&self, work: Work) -> Work {
        let mut state = self.state();
        state.begun += 1;
        let (me, weight) = (state.begun, state.random.choice(WEIGHTS).unwrap());
        state.live.insert(me, weight);
        drop(state);
        let turns = self.clone();
        Box::new(move || {
            ME.set(Some(me));
            let is_killed = turns.wait(turns.state(), me).is_killed;
            let ended = if is_killed { Ok(()) } else { catch_unwind(AssertUnwindSafe(work)) };
            let mut state = turns.state();
            state.live.remove(&me);
            state.wake();
            state.turn = state.draw(None).unwrap_or(FIRST);
            turns.0.changed.notify_all();
            drop(state);
            if let Err(why) = ended
                && !why.is::<Killed>()
            {
                resume_unwind(why);
            }
        })
    }

    /// Kills the process: none of its threads does anything any more.
    pub(crate) fn kill(&self) {
        self.state().is_killed = true;
        self.0.changed.notify_all();
    }
}
