//! Primitive: the wake flag.
//!
//! Protects   the requests for a turn of one task, of the many tasks that a thread serves.
//! Why        the thread sleeps on one descriptor for all its tasks: the flag names the task, and
//!            merges the wake-ups of one that has not had its turn yet.
//! States     lowered; raised: the task is to get a turn, and the thread is woken or about to be;
//!            ended: it stays raised, and wakes nothing.
//! Order      no lock.
//! Common     one exchange by the thread that asks; a load by the thread that serves, for each of
//!            its tasks, when it was woken.
//! Cost       about 6 ns; a system call for the first request before a turn.
//! Before     a descriptor for each task, or a system call for each request.
//!
//! | thread that asks | thread that serves |
//! | --- | --- |
//! | stores the data | lowers its descriptor |
//! | raises the flag | takes the flag |
//! | if it was lowered: raises the descriptor | if it was raised: gives the turn, which looks for data |
//!
//! A request that finds the flag raised comes before the turn for an earlier request, which sees
//! its data. The descriptor is raised after the flag and lowered before the flag is taken, so that
//! a flag which is raised later wakes the thread again.

use crate::atomics::{AtomicBool, Ordering};

/// The flag of a task.
#[derive(Debug)]
pub struct WakeFlag {
    is_raised: AtomicBool,
}

impl Default for WakeFlag {
    fn default() -> WakeFlag {
        WakeFlag::new()
    }
}

impl WakeFlag {
    /// A flag that is lowered.
    pub fn new() -> WakeFlag {
        WakeFlag { is_raised: AtomicBool::new(false) }
    }

    /// Asks for a turn, which sees what the caller has stored before. `true` if the caller has to
    /// wake the thread that serves.
    #[inline]
    #[must_use]
    pub fn raise(&self) -> bool {
        // AcqRel: pairs with the one in `take`.
        !self.is_raised.swap(true, Ordering::AcqRel)
    }

    /// Whether a turn was asked for since the last call. For the thread that serves, after it has
    /// lowered its descriptor.
    #[inline]
    pub fn take(&self) -> bool {
        // Relaxed: the descriptor makes the flag visible. AcqRel: pairs with the one in `raise`.
        self.is_raised.load(Ordering::Relaxed) && self.is_raised.swap(false, Ordering::AcqRel)
    }

    /// Ends the task: later requests wake nothing. For the thread that serves, which does not take
    /// the flag any more.
    pub fn end(&self) {
        // Relaxed: it publishes nothing.
        self.is_raised.store(true, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn requests_before_a_turn_wake_once_and_those_after_the_end_wake_nothing() {
        let flag = WakeFlag::new();
        assert!(!flag.take());
        assert!(flag.raise() && !flag.raise());
        assert!(flag.take() && !flag.take());
        assert!(flag.raise());
        flag.end();
        assert!(!flag.raise() && !flag.raise());
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::atomics::{AtomicU32, Condvar, Mutex};
    use loom::sync::Arc;

    /// The descriptor of a thread, and the data and flags of its tasks. Loom's waits have no
    /// time-out, so that a lost wake-up is a deadlock.
    struct Shared<const TASKS: usize> {
        is_woken: Mutex<bool>,
        woken: Condvar,
        tasks: [(WakeFlag, AtomicU32); TASKS],
    }

    impl<const TASKS: usize> Shared<TASKS> {
        fn new() -> Arc<Shared<TASKS>> {
            let tasks = std::array::from_fn(|_| (WakeFlag::new(), AtomicU32::new(0)));
            Arc::new(Shared { is_woken: Mutex::new(false), woken: Condvar::new(), tasks })
        }

        /// Stores data for a task and asks for a turn; returns whether it has woken the thread.
        fn ask(&self, task: usize, data: u32) -> bool {
            let (flag, stored) = &self.tasks[task];
            stored.fetch_add(data, Ordering::Relaxed);
            let wakes = flag.raise();
            if wakes {
                *self.is_woken.lock().unwrap() = true;
                self.woken.notify_one();
            }
            wakes
        }

        /// Sleeps, and gives turns until they have seen this data of each task.
        fn serve(&self, wanted: u32) {
            let mut seen = [0; TASKS];
            while seen != [wanted; TASKS] {
                let mut is_woken = self.is_woken.lock().unwrap();
                while !*is_woken {
                    is_woken = self.woken.wait(is_woken).unwrap();
                }
                *is_woken = false;
                drop(is_woken);
                for ((flag, stored), seen) in self.tasks.iter().zip(&mut seen) {
                    if flag.take() {
                        *seen = stored.load(Ordering::Relaxed);
                    }
                }
            }
        }
    }

    /// Two threads ask for turns of one task: a turn sees the data of both.
    #[test]
    fn no_request_for_one_task_is_lost() {
        loom::model(|| {
            let shared = Shared::<1>::new();
            let threads = [1, 2].map(|data| {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || shared.ask(0, data))
            });
            shared.serve(3);
            let woken = threads.map(|thread| thread.join().unwrap());
            assert!(woken[0] || woken[1]);
        });
    }

    /// The tasks of a thread share its descriptor: the wake-up for one takes none from the other.
    #[test]
    fn no_request_for_another_task_is_lost() {
        loom::model(|| {
            let shared = Shared::<2>::new();
            let threads = [0, 1].map(|task| {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || {
                    shared.ask(task, 1);
                })
            });
            shared.serve(1);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }

    /// A thread asks twice, while the task ends after a turn: a request after the end wakes
    /// nothing, and no other flag is touched.
    #[test]
    fn no_request_wakes_after_the_end() {
        loom::model(|| {
            let shared = Shared::<1>::new();
            let other = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || {
                u32::from(other.ask(0, 1)) + u32::from(other.ask(0, 1))
            });
            let turns = u32::from(shared.tasks[0].0.take());
            shared.tasks[0].0.end();
            assert!(!shared.tasks[0].0.raise(), "the caller comes after the end");
            let woken = thread.join().unwrap();
            assert!(woken <= 1 + turns, "each turn allows one more wake-up");
            assert!(!shared.ask(0, 1));
        });
    }
}
