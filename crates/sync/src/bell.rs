//! Room: the bell.
//!
//! Protects   the sleep of one thread: whoever has something for it wakes it, and nobody who does
//!            not sleep is woken.
//! Why        waking costs a system call, and sleeping beside something that is there a request.
//! States     awake; asleep: the owner sleeps, or is about to.
//! Order      a leaf, taken alone.
//! Common     a fence and a load by who rings, as the owner is awake.
//! Cost       about 6 ns where the owner is awake; a lock and a system call where it sleeps.
//! Before     a wake-up for each completion.
//!
//! | who sleeps | who rings |
//! | --- | --- |
//! | notes that it is asleep | puts the thing where the owner looks |
//! | full fence | full fence |
//! | looks whether something is there | looks whether the owner is asleep |
//!
//! One of the two sees the other. The mutex closes the gap between the look and the sleep.

use std::sync::PoisonError;
use std::time::Duration;

use crate::atomics::{AtomicBool, Condvar, Mutex, Ordering, fence};

/// A bell with one owner, the only one who sleeps by it.
#[derive(Debug, Default)]
pub struct Bell {
    asleep: AtomicBool,
    /// Held by the owner from its look until it sleeps, so that it cannot be rung in between.
    falling_asleep: Mutex<()>,
    heard: Condvar,
}

impl Bell {
    /// A bell whose owner is awake.
    pub fn new() -> Bell {
        let (asleep, falling_asleep) = (AtomicBool::new(false), Mutex::new(()));
        Bell { asleep, falling_asleep, heard: Condvar::new() }
    }

    /// Wakes the owner if it sleeps; says whether it did. What it is to find was put there before.
    #[inline]
    pub fn ring(&self) -> bool {
        // Full: pairs with the fence in `sleep`.
        fence(Ordering::SeqCst);
        self.asleep.load(Ordering::Relaxed) && self.wake()
    }

    #[cold]
    fn wake(&self) -> bool {
        let held = self.falling_asleep.lock().unwrap_or_else(PoisonError::into_inner);
        // Relaxed: written under the lock. Whoever rings next finds somebody else asleep.
        let slept = self.asleep.load(Ordering::Relaxed);
        self.asleep.store(false, Ordering::Relaxed);
        drop(held);
        if slept {
            self.heard.notify_one();
        }
        slept
    }

    /// Wakes every owner that sleeps. What they are to find was put there before.
    #[inline]
    pub fn ring_all<'a>(bells: impl Iterator<Item = &'a Bell>) {
        // Full: pairs with the fence in `sleep`.
        fence(Ordering::SeqCst);
        for bell in bells.filter(|bell| bell.asleep.load(Ordering::Relaxed)) {
            bell.wake();
        }
    }

    /// Wakes the first owner that sleeps; says whether there was one.
    pub fn ring_one<'a>(bells: impl Iterator<Item = &'a Bell>) -> bool {
        // Full: pairs with the fence in `sleep`.
        fence(Ordering::SeqCst);
        let mut asleep = bells.filter(|bell| bell.asleep.load(Ordering::Relaxed));
        asleep.any(Bell::wake)
    }

    /// Whether the owner sleeps, or did a moment ago.
    #[inline]
    pub fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }

    /// Sleeps until somebody rings, but not for longer, and not at all if `is_there` finds
    /// something: it is asked when the bell can be rung already. It only looks, and takes no lock.
    /// May return early.
    pub fn sleep(&self, at_most: Duration, is_there: impl FnOnce() -> bool) {
        let mut held = self.falling_asleep.lock().unwrap_or_else(PoisonError::into_inner);
        self.asleep.store(true, Ordering::Relaxed);
        // Full: pairs with the fence in `ring`.
        fence(Ordering::SeqCst);
        if !is_there() {
            held = match self.heard.wait_timeout(held, at_most) {
                Ok((held, _)) => held,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        self.asleep.store(false, Ordering::Relaxed);
        drop(held);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn nobody_sleeps_beside_what_is_there_and_nobody_awake_is_rung() {
        let bell = Bell::new();
        assert!(!bell.ring());
        bell.sleep(Duration::from_secs(3600), || true);
        assert!(!bell.is_asleep() && !bell.ring());
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::atomics::AtomicU32;
    use loom::sync::Arc;

    /// Loom's waits have no end by themselves, so that a lost wake-up is a deadlock.
    #[test]
    fn who_sleeps_is_woken_for_what_is_put_there() {
        loom::model(|| {
            let shared = Arc::new((Bell::new(), AtomicU32::new(0)));
            let other = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || {
                for _ in 0..2 {
                    other.1.fetch_add(1, Ordering::Relaxed);
                    other.0.ring();
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
}
