//! Models of the submit rings, with the combining lock of the dispatcher and the eventcounts of
//! waiting threads.

use super::*;
use crate::bell::Bell;
use crate::role::{Ran, Role, Round};
use std::time::Duration;

/// A dispatcher with the values that it has taken and the device's capacity.
struct Front {
    lanes: Arc<Lanes<u32>>,
    role: Role<Vec<u32>>,
    room: AtomicU32,
}

impl Front {
    fn new(lanes: usize, values: usize, room: u32) -> loom::sync::Arc<Front> {
        loom::sync::Arc::new(Front {
            lanes: Lanes::new(lanes, values),
            role: Role::new(Vec::new()),
            room: AtomicU32::new(room),
        })
    }

    fn dispatch(&self) {
        let _ = self.role.run(|taken| {
            let room = self.room.load(Ordering::Relaxed);
            if room > 0 {
                // SAFETY: the holder of the combining lock drains.
                unsafe { self.lanes.drain(9, 0, taken) };
            }
            self.lanes.hold_back(room == 0);
            Round::Whole
        });
    }

    /// The taken values, in any order. None may be left.
    fn taken(&self) -> Vec<u32> {
        assert!(!self.lanes.is_work(), "quiet, and something is left");
        let mut all = Vec::new();
        let ran = self.role.run(|taken| {
            all = std::mem::take(taken);
            Round::Whole
        });
        assert_eq!(ran, Ran::Whole, "nobody else has the role");
        all.sort_unstable();
        all
    }
}

fn check(body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(body);
}

/// Two submitters, and a completion that frees the capacity which both need.
#[test]
fn what_is_published_is_dispatched_once() {
    check(|| {
        let front = Front::new(3, 1, 0);
        let submit = |value: u32| {
            let front = loom::sync::Arc::clone(&front);
            let mut lane = front.lanes.open();
            move || {
                assert_eq!(lane.publish(&[value]), 1);
                front.dispatch();
            }
        };
        let (first, mut second) = (submit(1), submit(2));
        let thread = loom::thread::spawn(first);
        let completion = {
            let front = loom::sync::Arc::clone(&front);
            loom::thread::spawn(move || {
                front.room.store(1, Ordering::Relaxed);
                front.dispatch();
            })
        };
        second();
        thread.join().unwrap();
        completion.join().unwrap();
        assert_eq!(front.taken(), [1, 2]);
    });
}

/// Two submitters share a ring.
#[test]
fn a_shared_lane_loses_nothing() {
    check(|| {
        let front = Front::new(2, 2, 1);
        let own = front.lanes.open();
        let submit = |value: u32| {
            let front = loom::sync::Arc::clone(&front);
            let mut lane = front.lanes.open();
            assert!(lane.is_shared());
            move || {
                assert_eq!(lane.publish(&[value]), 1);
                front.dispatch();
            }
        };
        let (first, mut second) = (submit(1), submit(2));
        let thread = loom::thread::spawn(first);
        second();
        thread.join().unwrap();
        drop(own);
        assert_eq!(front.taken(), [1, 2]);
    });
}

/// A ring of one place is used three times.
#[test]
fn a_lane_wraps_around() {
    check(|| {
        let front = Front::new(2, 1, 1);
        let mut lane = front.lanes.open();
        let other = loom::sync::Arc::clone(&front);
        let thread = loom::thread::spawn(move || other.dispatch());
        for value in 1..4 {
            while lane.publish(&[value]) == 0 {
                front.dispatch();
                loom::thread::yield_now();
            }
        }
        front.dispatch();
        thread.join().unwrap();
        assert_eq!(front.taken(), [1, 2, 3]);
    });
}

/// A device with one tag.
struct Device {
    lanes: Arc<Lanes<u32>>,
    /// Requests in flight, as the holder of the lock counts them.
    role: Role<u32>,
    completed: AtomicU32,
    bells: [Bell; 2],
    done: [AtomicU32; 2],
}

impl Device {
    /// Takes as many values as there is capacity for; returns them, and how the run ended.
    fn dispatch(&self) -> (Vec<u32>, Ran) {
        let mut taken = Vec::new();
        let ran = self.role.run(|in_flight| {
            self.lanes.attend();
            *in_flight -= self.completed.swap(0, Ordering::Acquire);
            let is_full = *in_flight == 1;
            if !is_full {
                // SAFETY: the holder of the combining lock drains.
                unsafe { self.lanes.drain(1, 0, &mut taken) };
                *in_flight = taken.len() as u32;
            }
            self.lanes.hold_back(is_full);
            if taken.is_empty() { Round::Whole } else { Round::Enough }
        });
        (taken, ran)
    }

    fn help(&self) {
        loop {
            let (taken, ran) = self.dispatch();
            for value in &taken {
                self.completed.fetch_add(1, Ordering::Release);
                self.done[*value as usize].store(1, Ordering::Relaxed);
                self.bells[*value as usize].ring();
            }
            if taken.is_empty() {
                if ran == Ran::Enough {
                    self.lanes.abandon();
                    Bell::ring_one(self.bells.iter());
                }
                return;
            }
        }
    }

    fn carry(&self, lane: &mut Lane<u32>, me: usize) {
        let is_done = || self.done[me].load(Ordering::Relaxed) == 1;
        assert_eq!(lane.publish(&[me as u32]), 1);
        self.help();
        while !is_done() {
            let is_there = || is_done() || (self.lanes.is_work() && !self.role.kick());
            self.bells[me].sleep(Duration::from_secs(60), is_there);
            self.help();
        }
    }
}

/// A device with one tag: a request that arrives while the tag is taken stays in its ring, and its
/// submitter sleeps. The thread with the tag completes its request without the lock, reports that,
/// and looks for work again.
#[test]
fn what_is_held_back_is_served_behind_a_completion() {
    check(|| {
        let lanes = Lanes::new(3, 1);
        let (mut mine, mut other) = (lanes.open(), lanes.open());
        let device = loom::sync::Arc::new(Device {
            lanes,
            role: Role::new(0),
            completed: AtomicU32::new(0),
            bells: [Bell::new(), Bell::new()],
            done: [AtomicU32::new(0), AtomicU32::new(0)],
        });
        let shared = loom::sync::Arc::clone(&device);
        let thread = loom::thread::spawn(move || shared.carry(&mut other, 1));
        device.carry(&mut mine, 0);
        thread.join().unwrap();
        assert!(!device.lanes.is_occupied());
    });
}

/// A dispatcher takes one value at a time and leaves the next to other threads. Waiting threads
/// sleep, and none sleeps forever.
#[test]
fn what_is_left_behind_wakes_who_sleeps() {
    check(|| {
        let lanes = Lanes::new(3, 1);
        let shared = loom::sync::Arc::new((
            Arc::clone(&lanes),
            Role::new(()),
            [Bell::new(), Bell::new()],
            [AtomicU32::new(0), AtomicU32::new(0)],
        ));
        let work = |me: usize| {
            let shared = loom::sync::Arc::clone(&shared);
            let mut lane = lanes.open();
            move || {
                let (lanes, role, bells, done) = &*shared;
                let is_done = || done[me].load(Ordering::Relaxed) == 1;
                assert_eq!(lane.publish(&[me as u32]), 1);
                while !is_done() {
                    let mut taken = Vec::new();
                    let ran = role.run(|()| {
                        lanes.attend();
                        if taken.is_empty() {
                            // SAFETY: the holder of the combining lock drains.
                            unsafe { lanes.drain(1, 0, &mut taken) };
                            Round::Whole
                        } else {
                            Round::Enough
                        }
                    });
                    for value in taken {
                        done[value as usize].store(1, Ordering::Relaxed);
                        bells[value as usize].ring();
                    }
                    if ran == Ran::Enough {
                        lanes.abandon();
                    }
                    if lanes.is_work() {
                        Bell::ring_one(bells.iter());
                    }
                    if !is_done() {
                        let is_there = || is_done() || (lanes.is_work() && !role.kick());
                        bells[me].sleep(Duration::from_secs(60), is_there);
                    }
                }
            }
        };
        let (first, mut second) = (work(0), work(1));
        let thread = loom::thread::spawn(first);
        second();
        thread.join().unwrap();
    });
}
