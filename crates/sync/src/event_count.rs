//! Primitive: the eventcount.
//!
//! Protects   the sleep of one thread: a thread that has produced something for it wakes it, and a
//!            thread that does not sleep is not woken.
//! Why        a wakeup costs a system call, and a thread that sleeps although its data has arrived
//!            delays a request.
//! States     awake; asleep: the owner sleeps or is about to; dozing: the owner sleeps by other
//!            means, and its waker is called.
//! Order      a leaf, taken alone.
//! Common     a fence and a load by the thread that wakes, while the owner is awake.
//! Cost       about 6 ns if the owner is awake; a lock and a system call if it sleeps.
//! Before     a wakeup for each completion.
//!
//! | owner | waking thread |
//! | --- | --- |
//! | sets its state to asleep | stores the data |
//! | full fence | full fence |
//! | looks for data | checks whether the owner is asleep |
//!
//! At least one of the two sees the other. The mutex covers the time between the owner's check and
//! its sleep.

use std::fmt;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use crate::atomics::{AtomicU32, Condvar, Mutex, Ordering, fence};

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;
const DOZING: u32 = 2;

/// A function that wakes a thread which sleeps by other means.
#[derive(Clone)]
pub struct Waker(Arc<dyn Fn() + Send + Sync>);

impl Waker {
    /// A waker that calls `call`. `call` must not sleep, and may be called when there is no data
    /// any more.
    pub fn new(call: impl Fn() + Send + Sync + 'static) -> Waker {
        Waker(Arc::new(call))
    }

    /// Calls the function.
    #[inline]
    pub fn wake(&self) {
        (self.0)();
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Waker").finish_non_exhaustive()
    }
}

/// An eventcount with one owner, the only thread that sleeps on it.
#[derive(Debug)]
pub struct EventCount {
    state: AtomicU32,
    /// Held by the owner from its check until it sleeps, so that no wakeup is lost in between.
    falling_asleep: Mutex<()>,
    heard: Condvar,
    /// Called without the lock if the owner dozes.
    waker: OnceLock<Waker>,
}

impl Default for EventCount {
    fn default() -> EventCount {
        EventCount::new()
    }
}

impl EventCount {
    /// An eventcount whose owner is awake.
    pub fn new() -> EventCount {
        let (state, falling_asleep) = (AtomicU32::new(AWAKE), Mutex::new(()));
        EventCount { state, falling_asleep, heard: Condvar::new(), waker: OnceLock::new() }
    }

    /// Sets the waker for a dozing owner; returns `false` if one was set before.
    pub fn set_waker(&self, waker: Waker) -> bool {
        self.waker.set(waker).is_ok()
    }

    /// Wakes the owner if it sleeps; returns whether it did. The caller has stored the data before.
    #[inline]
    pub fn notify(&self) -> bool {
        // Full: pairs with the fence in `sleep`.
        fence(Ordering::SeqCst);
        self.state.load(Ordering::Relaxed) != AWAKE && self.wake()
    }

    #[cold]
    fn wake(&self) -> bool {
        let held = self.falling_asleep.lock().unwrap_or_else(PoisonError::into_inner);
        // One operation: a dozing owner writes without the lock, and its write must not be lost in
        // between. Acquire and release: pairs with the swaps in `doze` and `rise`.
        let before = self.state.swap(AWAKE, Ordering::AcqRel);
        drop(held);
        match before {
            ASLEEP => self.heard.notify_one(),
            DOZING => self.waker.get().into_iter().for_each(Waker::wake),
            _ => {}
        }
        before != AWAKE
    }

    /// Wakes every owner that sleeps. The caller has stored their data before.
    #[inline]
    pub fn notify_all<'a>(event_counts: impl Iterator<Item = &'a EventCount>) {
        // Full: pairs with the fence in `sleep`.
        fence(Ordering::SeqCst);
        for event_count in event_counts.filter(|event_count| event_count.is_asleep()) {
            event_count.wake();
        }
    }

    /// Wakes the first owner that sleeps; returns whether there was one.
    pub fn notify_one<'a>(event_counts: impl Iterator<Item = &'a EventCount>) -> bool {
        // Full: pairs with the fence in `sleep`.
        fence(Ordering::SeqCst);
        let mut asleep = event_counts.filter(|event_count| event_count.is_asleep());
        asleep.any(EventCount::wake)
    }

    /// Whether the owner sleeps, or did a moment ago.
    #[inline]
    pub fn is_asleep(&self) -> bool {
        self.state.load(Ordering::Relaxed) != AWAKE
    }

    /// Sleeps until a thread wakes the owner, for `at_most` at most. Does not sleep if `is_there`
    /// finds data; it is called when the eventcount can already be signalled, must have no side
    /// effects, and must take no lock. May return early.
    pub fn sleep(&self, at_most: Duration, is_there: impl FnOnce() -> bool) {
        let mut held = self.falling_asleep.lock().unwrap_or_else(PoisonError::into_inner);
        self.state.store(ASLEEP, Ordering::Relaxed);
        // Full: pairs with the fence in `ring`.
        fence(Ordering::SeqCst);
        if !is_there() {
            held = match self.heard.wait_timeout(held, at_most) {
                Ok((held, _)) => held,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        self.state.store(AWAKE, Ordering::Relaxed);
        drop(held);
    }

    /// Announces that the owner will sleep by other means until its waker is called. Returns
    /// `false` if `is_there` finds data, so that the owner need not sleep. [`EventCount::rise`]
    /// makes it awake again.
    pub fn doze(&self, is_there: impl FnOnce() -> bool) -> bool {
        // Acquire and release: pairs with the swap in `wake`.
        self.state.swap(DOZING, Ordering::AcqRel);
        // Full: pairs with the fence in `ring`. A thread that signals from here on calls the waker,
        // and the owner still notices that call when it sleeps.
        fence(Ordering::SeqCst);
        let sleeps = !is_there();
        if !sleeps {
            self.rise();
        }
        sleeps
    }

    /// Ends the dozing of the owner.
    pub fn rise(&self) {
        // Acquire and release: pairs with the swap in `wake`. A thread that saw the owner dozing
        // calls the waker needlessly.
        self.state.swap(AWAKE, Ordering::AcqRel);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn sleep_returns_if_data_exists_and_awake_owner_is_not_woken() {
        let event_count = EventCount::new();
        assert!(!event_count.notify());
        event_count.sleep(Duration::from_secs(3600), || true);
        assert!(!event_count.is_asleep() && !event_count.notify());
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::atomics::AtomicU32;
    use loom::sync::Arc;

    /// Loom's waits have no timeout, so that a lost wakeup is a deadlock.
    #[test]
    fn sleeping_owner_is_woken_for_data() {
        loom::model(|| {
            let shared = Arc::new((EventCount::new(), AtomicU32::new(0)));
            let other = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || {
                for _ in 0..2 {
                    other.1.fetch_add(1, Ordering::Relaxed);
                    other.0.notify();
                }
            });
            let there = |wanted| shared.1.load(Ordering::Relaxed) >= wanted;
            for wanted in 1..3 {
                while !there(wanted) {
                    shared.0.sleep(Duration::from_secs(60), || there(wanted));
                }
            }
            thread.join().unwrap();
        });
    }

    /// A dozing owner is called for data that is stored meanwhile: a call is not lost.
    #[test]
    fn dozing_owner_is_called_for_data() {
        loom::model(|| {
            let shared = Arc::new((EventCount::new(), AtomicU32::new(0)));
            let (called, heard) = (loom::sync::Mutex::new(false), loom::sync::Condvar::new());
            let descriptor = Arc::new((called, heard));
            let written = Arc::clone(&descriptor);
            shared.0.set_waker(Waker::new(move || {
                *written.0.lock().unwrap() = true;
                written.1.notify_one();
            }));
            let other = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || {
                for _ in 0..2 {
                    other.1.fetch_add(1, Ordering::Relaxed);
                    other.0.notify();
                }
            });
            let there = |wanted| shared.1.load(Ordering::Relaxed) >= wanted;
            for wanted in 1..3 {
                while !there(wanted) {
                    if shared.0.doze(|| there(wanted)) {
                        let mut called = descriptor.0.lock().unwrap();
                        while !*called {
                            called = descriptor.1.wait(called).unwrap();
                        }
                        *called = false;
                        drop(called);
                        shared.0.rise();
                    }
                }
            }
            thread.join().unwrap();
        });
    }
}
