//! Primitive: the combining lock (flat combining).
//!
//! Protects   work that one thread at a time does for all. It orders the requests of a scheduler,
//!            or starts them on a device queue and polls for completions.
//! Why        the first thread that arrives does the serial work for all. A thread that arrives
//!            meanwhile notifies it and continues, instead of waiting for a lock.
//! States     idle; running: a thread holds the lock; brief: a thread holds it for a moment;
//!            kicked: the holder has been notified and must do another round.
//! Order      none: no thread waits for the lock. Its holder may take locks of any rank.
//! Common     one compare-exchange to take it and one to release it.
//! Cost       about 10 ns for both; a notification is one compare-exchange.
//! Before     a lock that every submitter takes for each of its requests.
//!
//! | | idle | running | brief | kicked |
//! | --- | --- | --- | --- | --- |
//! | a thread arrives | takes it: running | kicked, continues | kicked, continues | continues |
//! | a thread arrives briefly | takes it: brief | continues | checks again, bounded | continues |
//! | the holder finishes | - | idle | - | running, another round |
//! | the holder has done enough | - | idle | - | idle, and the caller learns it |
//! | the brief holder finishes | - | - | idle | idle, and the caller learns it |
//!
//! A brief use is shorter than the time to hand its work to another thread. A thread that finds a
//! brief holder therefore checks again, a bounded number of times, because the holder may be
//! preempted.
//!
//! The round that answers a notification sees everything that was published before it. Each
//! notification is a read-modify-write of the word, even if it changes nothing, and so is the
//! holder's answer.
#![allow(unsafe_code)]

use crate::atomics::{AtomicU32, Ordering, spin_hint};
use crate::sync_cell::SyncCell;

const IDLE: u32 = 0;
const RUNNING: u32 = 1;
const NOTIFIED: u32 = 2;
const BRIEF: u32 = 3;

/// The combining lock and its value. The word is at the start of a cache line that also holds the
/// start of the value: if threads alternate, one cache line moves between them.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct CombiningLock<T> {
    word: AtomicU32,
    value: SyncCell<T>,
}

// SAFETY: only the holder of the lock accesses the value, one thread at a time.
unsafe impl<T: Send> Sync for CombiningLock<T> {}

/// The result of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundResult {
    /// All work is done: the lock is released unless a thread has notified the holder meanwhile.
    Whole,
    /// The holder has done enough, and releases the lock even if it was notified.
    Enough,
}

/// The result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum RunResult {
    /// The work was not run: another thread holds the lock, and has been notified to do another
    /// round.
    Elsewhere,
    /// No work is left.
    Whole,
    /// The holder had done enough: work may be left, and the caller must take care of it.
    Enough,
}

/// Releases the lock when the holder has done enough, or panics; the value stays as it is.
struct ReleaseOnDrop<'a>(&'a AtomicU32);

impl Drop for ReleaseOnDrop<'_> {
    fn drop(&mut self) {
        // Release: pairs with the Acquire of the next holder. A read-modify-write, ordered after a
        // notification that arrived meanwhile: the caller takes care of its work.
        self.0.swap(IDLE, Ordering::AcqRel);
    }
}

impl<T> CombiningLock<T> {
    /// A lock that no thread holds.
    pub fn new(value: T) -> CombiningLock<T> {
        CombiningLock { word: AtomicU32::new(IDLE), value: SyncCell::new(value) }
    }

    /// Takes the lock and runs rounds until no notification is pending; or notifies the holder.
    #[inline]
    pub fn run(&self, mut round: impl FnMut(&mut T) -> RoundResult) -> RunResult {
        if self.enter() {
            let guard = ReleaseOnDrop(&self.word);
            let ran = loop {
                // SAFETY: this thread holds the lock.
                let done = unsafe { self.value.with_mut(&mut round) };
                match done {
                    RoundResult::Enough => break RunResult::Enough,
                    RoundResult::Whole if self.leave() => break RunResult::Whole,
                    RoundResult::Whole => {}
                }
            };
            if ran == RunResult::Whole {
                std::mem::forget(guard);
            }
            return ran;
        }
        RunResult::Elsewhere
    }

    /// Takes the lock, or notifies its holder; returns whether it took the lock.
    #[inline]
    fn enter(&self) -> bool {
        let mut state = self.word.load(Ordering::Relaxed);
        loop {
            let next = if state == IDLE { RUNNING } else { NOTIFIED };
            // Acquire: pairs with the Release of the previous holder. Release: pairs with the
            // Acquire in `leave` of the notified holder.
            match self.word.compare_exchange_weak(state, next, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return state == IDLE,
                Err(now) => state = now,
            }
        }
    }

    /// Takes the lock for a brief use if it is idle, or if a brief holder releases it within
    /// `looks` checks; notifies no thread. Returns the result of `work`, and whether a thread has
    /// sent a notification meanwhile: then the caller must look for work again.
    #[inline]
    pub fn try_briefly<R>(&self, looks: u32, work: impl FnOnce(&mut T) -> R) -> Option<(R, bool)> {
        // Acquire: pairs with the Release of the previous holder.
        let taken = self.word.compare_exchange(IDLE, BRIEF, Ordering::Acquire, Ordering::Relaxed);
        if let Err(state) = taken
            && !(state == BRIEF && self.look(looks))
        {
            return None;
        }
        let guard = ReleaseOnDrop(&self.word);
        // SAFETY: this thread holds the lock.
        let done = unsafe { self.value.with_mut(work) };
        std::mem::forget(guard);
        // Release: pairs with the Acquire of the next holder. Acquire: pairs with the Release of
        // the notifying thread, so that the caller sees its work.
        let left = self.word.swap(IDLE, Ordering::AcqRel);
        Some((done, left == NOTIFIED))
    }

    /// Checks whether a brief holder releases the lock, and then takes it for a brief use.
    #[cold]
    fn look(&self, looks: u32) -> bool {
        for _ in 0..looks {
            spin_hint();
            match self.word.load(Ordering::Relaxed) {
                BRIEF => {}
                IDLE => {
                    // Acquire: pairs with the Release of the previous holder.
                    let taken = self.word.compare_exchange(
                        IDLE,
                        BRIEF,
                        Ordering::Acquire,
                        Ordering::Relaxed,
                    );
                    if taken.is_ok() {
                        return true;
                    }
                }
                _ => return false,
            }
        }
        false
    }

    /// Releases the lock, unless a notification is pending; returns whether it did.
    #[inline]
    fn leave(&self) -> bool {
        // Release: pairs with the Acquire in `enter` of the next holder.
        let left =
            self.word.compare_exchange(RUNNING, IDLE, Ordering::Release, Ordering::Relaxed).is_ok();
        if !left {
            // Acquire: pairs with the Release in `enter` of the notifying threads.
            self.word.swap(RUNNING, Ordering::Acquire);
        }
        left
    }

    /// Notifies the holder, if there is one; returns whether there was one.
    #[inline]
    pub fn notify(&self) -> bool {
        let mut state = self.word.load(Ordering::Relaxed);
        while state != IDLE {
            // Release: pairs with the Acquire in `leave`.
            match self.word.compare_exchange_weak(
                state,
                NOTIFIED,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    /// Calls `f` with the value, without the lock: the mutable borrow excludes other threads.
    #[inline]
    pub fn alone<R>(&mut self, f: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: the lock is borrowed mutably.
        unsafe { self.value.with_mut(f) }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn notification_causes_one_more_round_unless_enough() {
        let lock = CombiningLock::new(0);
        let mut notifications = 2;
        let ran = lock.run(|rounds| {
            *rounds += 1;
            if notifications > 0 {
                notifications -= 1;
                assert!(lock.notify());
                assert_eq!(lock.run(|_| unreachable!("one has it")), RunResult::Elsewhere);
            }
            RoundResult::Whole
        });
        assert_eq!(ran, RunResult::Whole);
        assert!(!lock.notify(), "no thread holds the lock");
        let ran = lock.run(|rounds| {
            *rounds += 10;
            lock.notify();
            RoundResult::Enough
        });
        let mut lock = lock;
        assert_eq!((ran, lock.alone(|rounds| *rounds)), (RunResult::Enough, 13));
    }

    #[test]
    fn brief_holder_learns_of_notification() {
        let lock = CombiningLock::new(0);
        assert_eq!(lock.try_briefly(0, |value| std::mem::replace(value, 5)), Some((0, false)));
        let nested = lock.try_briefly(0, |value| {
            assert_eq!(lock.try_briefly(9, |_| unreachable!("one has it")), None);
            assert_eq!(lock.run(|_| unreachable!("one has it")), RunResult::Elsewhere);
            *value
        });
        assert_eq!(nested, Some((5, true)));
        let ran = lock.run(|_| {
            assert_eq!(lock.try_briefly(9, |_| unreachable!("one has it")), None);
            RoundResult::Whole
        });
        assert_eq!(ran, RunResult::Whole, "who comes for a moment does not notify");
    }

    #[test]
    fn panic_releases_combining_lock() {
        let lock = CombiningLock::new(0);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            lock.run(|_| panic!("inside the round"))
        }));
        assert!(panicked.is_err());
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            lock.try_briefly(0, |_| panic!("for a moment"))
        }));
        assert!(panicked.is_err());
        assert_eq!(lock.run(|_| RoundResult::Whole), RunResult::Whole);
    }

    #[test]
    fn four_threads_complete_all_work() {
        let lock = CombiningLock::new(0_u64);
        let wanted = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (lock, wanted) = (&lock, &wanted);
                scope.spawn(move || {
                    for _ in 0..10_000 {
                        wanted.fetch_add(1, Ordering::Relaxed);
                        let take = |done: &mut u64| {
                            *done += u64::from(wanted.swap(0, Ordering::Relaxed));
                        };
                        if thread % 2 == 0 && lock.try_briefly(20, take) == Some(((), false)) {
                            continue;
                        }
                        let _ = lock.run(|done| {
                            *done += u64::from(wanted.swap(0, Ordering::Relaxed));
                            RoundResult::Whole
                        });
                    }
                });
            }
        });
        let mut lock = lock;
        assert_eq!(lock.alone(|done| *done), 40_000);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;

    /// A round after a notification finds the work that was left before it, and rounds exclude each
    /// other.
    #[test]
    fn every_notification_is_served() {
        loom::model(|| {
            let shared = Arc::new((CombiningLock::new(0), [AtomicU32::new(0), AtomicU32::new(0)]));
            let come = |shared: &(CombiningLock<u32>, [AtomicU32; 2]), index: usize| {
                // Relaxed: the combining lock orders it.
                shared.1[index].fetch_add(1, Ordering::Relaxed);
                let _ = shared.0.run(|done| {
                    *done += shared.1.iter().map(|it| it.swap(0, Ordering::Relaxed)).sum::<u32>();
                    RoundResult::Whole
                });
            };
            let other = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || come(&other, 1));
            come(&shared, 0);
            thread.join().unwrap();
            let _ = shared.0.run(|done| {
                assert_eq!(*done, 2, "found by the rounds before");
                RoundResult::Whole
            });
        });
    }

    /// A brief holder takes care of the work that it was notified of.
    #[test]
    fn brief_holder_loses_no_notification() {
        loom::model(|| {
            let shared = Arc::new((CombiningLock::new(0), [AtomicU32::new(0), AtomicU32::new(0)]));
            let take = |shared: &(CombiningLock<u32>, [AtomicU32; 2]), done: &mut u32| {
                *done += shared.1.iter().map(|it| it.swap(0, Ordering::Relaxed)).sum::<u32>();
            };
            let run = move |shared: &(CombiningLock<u32>, [AtomicU32; 2])| {
                let _ = shared.0.run(|done| {
                    take(shared, done);
                    RoundResult::Whole
                });
            };
            let other = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || {
                // Relaxed: the combining lock orders it.
                other.1[1].fetch_add(1, Ordering::Relaxed);
                run(&other);
            });
            shared.1[0].fetch_add(1, Ordering::Relaxed);
            if shared.0.try_briefly(1, |done| take(&shared, done)) != Some(((), false)) {
                run(&shared);
            }
            thread.join().unwrap();
            let _ = shared.0.run(|done| {
                assert_eq!(*done, 2, "found by the rounds before");
                RoundResult::Whole
            });
        });
    }
}
