//! Models of `submit_rings`, with the combining lock of the dispatcher and the eventcounts of
//! waiting threads.

use super::*;
use crate::combining_lock::{CombiningLock, RoundResult, RunResult};
use crate::event_count::EventCount;
use std::time::Duration;

/// A dispatcher with the values that it has taken and the device's capacity.
struct Front {
    lanes: Arc<SubmitRings<u32>>,
    lock: CombiningLock<Vec<u32>>,
    room: AtomicU32,
}

impl Front {
    fn new(lanes: usize, values: usize, room: u32) -> loom::sync::Arc<Front> {
        loom::sync::Arc::new(Front {
            lanes: SubmitRings::new(lanes, values),
            lock: CombiningLock::new(Vec::new()),
            room: AtomicU32::new(room),
        })
    }

    fn dispatch(&self) {
        let _ = self.lock.run(|taken| {
            let room = self.room.load(Ordering::Relaxed);
            if room > 0 {
                // SAFETY: the holder of the combining lock drains.
                unsafe { self.lanes.drain(9, 0, taken) };
            }
            self.lanes.hold_back(room == 0);
            RoundResult::Whole
        });
    }

    /// The taken values, in any order. None may be left.
    fn taken(&self) -> Vec<u32> {
        assert!(!self.lanes.is_work(), "no submission is pending, and work is left");
        let mut all = Vec::new();
        let ran = self.lock.run(|taken| {
            all = std::mem::take(taken);
            RoundResult::Whole
        });
        assert_eq!(ran, RunResult::Whole, "no other thread holds the lock");
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
fn published_values_are_dispatched_once() {
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
fn shared_ring_loses_no_value() {
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
fn ring_wraps_around() {
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
struct ModelDevice {
    lanes: Arc<SubmitRings<u32>>,
    /// Requests in flight, as the holder of the lock counts them.
    lock: CombiningLock<u32>,
    completed: AtomicU32,
    event_counts: [EventCount; 2],
    done: [AtomicU32; 2],
}

impl ModelDevice {
    /// Takes as many values as there is capacity for; returns them, and how the run ended.
    fn dispatch(&self) -> (Vec<u32>, RunResult) {
        let mut taken = Vec::new();
        let ran = self.lock.run(|in_flight| {
            self.lanes.attend();
            *in_flight -= self.completed.swap(0, Ordering::Acquire);
            let is_full = *in_flight == 1;
            if !is_full {
                // SAFETY: the holder of the combining lock drains.
                unsafe { self.lanes.drain(1, 0, &mut taken) };
                *in_flight = taken.len() as u32;
            }
            self.lanes.hold_back(is_full);
            if taken.is_empty() { RoundResult::Whole } else { RoundResult::Enough }
        });
        (taken, ran)
    }

    fn help(&self) {
        loop {
            let (taken, ran) = self.dispatch();
            for value in &taken {
                self.completed.fetch_add(1, Ordering::Release);
                self.done[*value as usize].store(1, Ordering::Relaxed);
                self.event_counts[*value as usize].notify();
            }
            if taken.is_empty() {
                if ran == RunResult::Enough {
                    self.lanes.abandon();
                    EventCount::notify_one(self.event_counts.iter());
                }
                return;
            }
        }
    }

    fn carry(&self, lane: &mut SubmitRing<u32>, me: usize) {
        let is_done = || self.done[me].load(Ordering::Relaxed) == 1;
        assert_eq!(lane.publish(&[me as u32]), 1);
        self.help();
        while !is_done() {
            let is_there = || is_done() || (self.lanes.is_work() && !self.lock.notify());
            self.event_counts[me].sleep(Duration::from_secs(60), is_there);
            self.help();
        }
    }
}

/// A device with one tag: a request that arrives while the tag is taken stays in its ring, and its
/// submitter sleeps. The thread with the tag completes its request without the lock, reports that,
/// and looks for work again.
#[test]
fn held_back_values_are_served_after_completion() {
    check(|| {
        let lanes = SubmitRings::new(3, 1);
        let (mut mine, mut other) = (lanes.open(), lanes.open());
        let device = loom::sync::Arc::new(ModelDevice {
            lanes,
            lock: CombiningLock::new(0),
            completed: AtomicU32::new(0),
            event_counts: [EventCount::new(), EventCount::new()],
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
fn abandoned_work_wakes_sleeper() {
    check(|| {
        let lanes = SubmitRings::new(3, 1);
        let shared = loom::sync::Arc::new((
            Arc::clone(&lanes),
            CombiningLock::new(()),
            [EventCount::new(), EventCount::new()],
            [AtomicU32::new(0), AtomicU32::new(0)],
        ));
        let work = |me: usize| {
            let shared = loom::sync::Arc::clone(&shared);
            let mut lane = lanes.open();
            move || {
                let (lanes, lock, event_counts, done) = &*shared;
                let is_done = || done[me].load(Ordering::Relaxed) == 1;
                assert_eq!(lane.publish(&[me as u32]), 1);
                while !is_done() {
                    let mut taken = Vec::new();
                    let ran = lock.run(|()| {
                        lanes.attend();
                        if taken.is_empty() {
                            // SAFETY: the holder of the combining lock drains.
                            unsafe { lanes.drain(1, 0, &mut taken) };
                            RoundResult::Whole
                        } else {
                            RoundResult::Enough
                        }
                    });
                    for value in taken {
                        done[value as usize].store(1, Ordering::Relaxed);
                        event_counts[value as usize].notify();
                    }
                    if ran == RunResult::Enough {
                        lanes.abandon();
                    }
                    if lanes.is_work() {
                        EventCount::notify_one(event_counts.iter());
                    }
                    if !is_done() {
                        let is_there = || is_done() || (lanes.is_work() && !lock.notify());
                        event_counts[me].sleep(Duration::from_secs(60), is_there);
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
