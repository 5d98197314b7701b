//! A deterministic scheduler for the threads of a pool. One thread runs at a time; the next one is
//! drawn whenever a thread is about to access the disk or to wait. So a seed reproduces the order
//! of operations.
#![allow(clippy::disallowed_types)] // Test code.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use blockyard_testing::simulated_store::Operation;
use blockyard_volume::thread::{Schedule, Work, set_schedule};

/// The number of the thread that runs the committer and the client.
const FIRST: usize = 0;

thread_local! {
    /// The number of this thread in its pool, if it belongs to one.
    static ME: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Weights of threads: a thread is drawn in proportion to its weight.
const WEIGHTS: [u32; 4] = [1, 3, 10, 40];

#[derive(Debug)]
struct State {
    random: fastrand::Rng,
    /// The thread that runs.
    turn: usize,
    /// The threads that have not ended, each with its weight.
    live: BTreeMap<usize, u32>,
    /// The threads whose condition was false when last checked; nothing was done since.
    asleep: BTreeSet<usize>,
    begun: usize,
    /// Number of operations done.
    done: u64,
    /// The committer has no work, and runs only if no other thread can.
    is_idle: bool,
    /// The simulated process was killed.
    is_killed: bool,
}

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

/// The scheduler; clones share its state.
#[derive(Clone)]
pub(crate) struct Turns(Arc<Inner>);

/// The panic payload that ends a thread of a killed process.
struct Killed;

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Turns")
    }
}

impl State {
    /// Notes that something was done for which other threads may wait.
    fn wake(&mut self) {
        self.asleep.clear();
        self.done += 1;
    }

    /// Draws the next thread from those that are awake.
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
    /// Makes a scheduler; the calling thread is the one with the committer.
    pub(crate) fn new(mut random: fastrand::Rng) -> Turns {
        ME.set(Some(FIRST));
        let weight = random.choice(WEIGHTS).unwrap();
        let live = BTreeMap::from([(FIRST, weight)]);
        let (turn, asleep) = (FIRST, BTreeSet::new());
        let (begun, is_idle, is_killed) = (FIRST, false, false);
        let state = State { random, turn, live, asleep, begun, done: 0, is_idle, is_killed };
        let turns = Turns(Arc::new(Inner { state: Mutex::new(state), changed: Condvar::new() }));
        set_schedule(Arc::new(turns.clone()));
        turns
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until this thread may run.
    fn wait<'a>(&self, state: MutexGuard<'a, State>, me: usize) -> MutexGuard<'a, State> {
        let is_over = |it: &mut State| it.turn != me && !it.is_killed;
        self.0.changed.wait_while(state, is_over).unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the drawn thread run, and waits until this one may run again.
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

    /// Called before an operation: other threads may run first.
    pub(crate) fn step(&self) {
        let Some(me) = ME.get() else { return };
        let mut state = self.state();
        state.wake();
        let drawn = state.draw(None).expect("this one is there");
        self.pass(state, me, drawn);
    }

    /// Called before an operation that changes nothing: other threads may run first, unless this is
    /// the committer's thread.
    pub(crate) fn step_for_read(&self) {
        if ME.get().is_some_and(|me| me != FIRST) {
            self.step();
        }
    }

    /// The committer has no work: lets other threads run. Returns whether any of them did anything.
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

    /// Notes that something was done for which other threads may wait.
    pub(crate) fn wake(&self) {
        self.state().wake();
    }

    /// Kills the simulated process: none of its threads does anything further.
    pub(crate) fn kill(&self) {
        self.state().is_killed = true;
        self.0.changed.notify_all();
    }
}

/// Lets other threads run before an operation on the store.
pub(crate) fn hook(turns: &Turns) -> impl Fn(Operation) + Send + Sync + 'static {
    let turns = turns.clone();
    move |operation| match operation {
        Operation::Read => turns.step_for_read(),
        Operation::FailedRead | Operation::FailedSync | Operation::CheckLocation => {}
        _ => turns.step(),
    }
}

impl Schedule for Turns {
    fn wrap(&self, work: Work) -> Work {
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

    /// Lets other threads run until the condition is true.
    fn wait_until(&self, is_true: &dyn Fn() -> bool) {
        let Some(me) = ME.get() else { return };
        // Other threads may wait for what this one has done.
        self.wake();
        while !is_true() {
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
}
