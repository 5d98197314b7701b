//! Room: the bell.
//!
//! Protects   the sleep of one thread: whoever has something for it wakes it, and nobody who does
//!            not sleep is woken.
//! Why        waking costs a system call, and sleeping beside something that is there a request.
//! States     awake; asleep: the owner sleeps, or is about to; dozing: it sleeps by other means,
//!            and its caller is called.
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

use std::fmt;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use crate::atomics::{AtomicU32, Condvar, Mutex, Ordering, fence};

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;
const DOZING: u32 = 2;

/// Whom to call for somebody who sleeps by other means.
#[derive(Clone)]
pub struct Caller(Arc<dyn Fn() + Send + Sync>);

impl Caller {
    /// Calls this. It must not sleep, and may be called when nothing is there any more.
    pub fn new(call: impl Fn() + Send + Sync + 'static) -> Caller {
        Caller(Arc::new(call))
    }

    /// Calls.
    #[inline]
    pub fn call(&self) {
        (self.0)();
    }
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Caller").finish_non_exhaustive()
    }
}

/// A bell with one owner, the only one who sleeps by it.
#[derive(Debug)]
pub struct Bell {
    state: AtomicU32,
    /// Held by the owner from its look until it sleeps, so that it cannot be rung in between.
    falling_asleep: Mutex<()>,
    heard: Condvar,
    /// Called where the owner dozes, with the lock free.
    caller: OnceLock<Caller>,
}

impl Default for Bell {
    fn default() -> Bell {
        Bell::new()
    }
}

impl Bell {
    /// A bell whose owner is awake.
    pub fn new() -> Bell {
        let (state, falling_asleep) = (AtomicU32::new(AWAKE), Mutex::new(()));
        Bell { state, falling_asleep, heard: Condvar::new(), caller: OnceLock::new() }
    }

    /// Has somebody called when the owner dozes; says whether nobody was before.
    pub fn call(&self, caller: Caller) -> bool {
        self.caller.set(caller).is_ok()
    }

    /// Wakes the owner if it sleeps; says whether it did. What it is to find was put there before.
    #[inline]
    pub fn ring(&self) -> bool {
        // Full: pairs with the fence in `sleep`.
        fence(Ordering::SeqCst);
        self.state.load(Ordering::Relaxed) != AWAKE && self.wake()
    }

    #[cold]
    fn wake(&self) -> bool {
        let held = self.falling_asleep.lock().unwrap_or_else(PoisonError::into_inner);
        // One operation: who dozes writes without the lock, and what it writes in between must not
        // be lost. Acquire and release: pairs with the swaps in `doze` and `rise`.
        let before = self.state.swap(AWAKE, Ordering::AcqRel);
        drop(held);
        match before {
            ASLEEP => self.heard.notify_one(),
            DOZING => self.caller.get().into_iter().for_each(Caller::call),
            _ => {}
        }
        before != AWAKE
    }

    /// Wakes every owner that sleeps. What they are to find was put there before.
    #[inline]
    pub fn ring_all<'a>(bells: impl Iterator<Item = &'a Bell>) {
        // Full: pairs with the fence in `sleep`.
        fence(Ordering::SeqCst);
        for bell in bells.filter(|bell| bell.is_asleep()) {
            bell.wake();
        }
    }

    /// Wakes the first owner that sleeps; says whether there was one.
    pub fn ring_one<'a>(bells: impl Iterator<Item = &'a Bell>) -> bool {
        // Full: pairs with the fence in `sleep`.
        fence(Ordering::SeqCst);
        let mut asleep = bells.filter(|bell| bell.is_asleep());
        asleep.any(Bell::wake)
    }

    /// Whether the owner sleeps, or did a moment ago.
    #[inline]
    pub fn is_asleep(&self) -> bool {
        self.state.load(Ordering::Relaxed) != AWAKE
    }

    /// Sleeps until somebody rings, but not for longer, and not at all if `is_there` finds
    /// something: it is asked when the bell can be rung already. It only looks, and takes no lock.
    /// May return early.
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

    /// The owner is about to sleep by other means, until its caller wakes it; `false` if something
    /// is there, and it need not. It is awake again by [`Bell::rise`].
    pub fn doze(&self, is_there: impl FnOnce() -> bool) -> bool {
        // Acquire and release: pairs with the swap in `wake`.
        self.state.swap(DOZING, Ordering::AcqRel);
        // Full: pairs with the fence in `ring`. Who rings from here on calls, and that is still
        // heard when the owner sleeps.
        fence(Ordering::SeqCst);
        let sleeps = !is_there();
        if !sleeps {
            self.rise();
        }
        sleeps
    }

    /// The owner does not doze any more.
    pub fn rise(&self) {
        // Acquire and release: pairs with the swap in `wake`. Who has seen it dozing calls in vain.
        self.state.swap(AWAKE, Ordering::AcqRel);
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

    /// The same where the owner sleeps by other means: what is called stays called.
    #[test]
    fn who_dozes_is_called_for_what_is_put_there() {
        loom::model(|| {
            let shared = Arc::new((Bell::new(), AtomicU32::new(0)));
            let (called, heard) = (loom::sync::Mutex::new(false), loom::sync::Condvar::new());
            let descriptor = Arc::new((called, heard));
            let written = Arc::clone(&descriptor);
            shared.0.call(Caller::new(move || {
                *written.0.lock().unwrap() = true;
                written.1.notify_one();
            }));
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
