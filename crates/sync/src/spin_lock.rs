//! Primitive: the spinning lock.
//!
//! Protects   a value with critical sections of a few instructions: a zone without data, counters.
//! Why        a sleeping lock costs a system call as soon as two threads contend, which is more
//!            than the whole critical section.
//! States     free, held. The word does not record waiting threads.
//! Order      the rank `RANK`, docs/locks.md. The critical section does not sleep, allocate, submit
//!            or log.
//! Common     one compare-exchange to take it, one store to release it.
//! Cost       about 4 ns without contention. A waiter reads until the word is free, and yields the
//!            CPU after `SPINS` reads: the holder may be preempted.
//! Before     one lock for all zones.
#![allow(unsafe_code)]

use crate::atomics::{AtomicBool, Ordering, spin_hint, yield_now};
use crate::lock::Lock;
use crate::rank::Held;
use crate::sync_cell::SyncCell;

/// Reads of a held lock before the waiter yields the CPU.
const SPINS: u32 = if cfg!(loom) { 1 } else { 64 };

/// A spinning lock of rank `RANK`.
#[derive(Debug)]
pub struct SpinLock<T, const RANK: u8> {
    held: AtomicBool,
    value: SyncCell<T>,
}

// SAFETY: only the holder of the lock accesses the value, one thread at a time.
unsafe impl<T: Send, const RANK: u8> Sync for SpinLock<T, RANK> {}

/// Releases the lock, also if the closure panics.
struct Unlock<'a>(&'a AtomicBool);

impl Drop for Unlock<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the Acquire of the next holder's exchange.
        self.0.store(false, Ordering::Release);
    }
}

impl<T, const RANK: u8> SpinLock<T, RANK> {
    #[inline]
    fn try_take(&self) -> bool {
        // Acquire: pairs with the Release in `Unlock`.
        self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[cold]
    fn wait(&self) {
        loop {
            for _ in 0..SPINS {
                // Relaxed: only a hint that an exchange may succeed now.
                if !self.held.load(Ordering::Relaxed) && self.try_take() {
                    return;
                }
                spin_hint();
            }
            yield_now();
        }
    }
}

impl<T: Send, const RANK: u8> Lock<T> for SpinLock<T, RANK> {
    fn new(value: T) -> SpinLock<T, RANK> {
        SpinLock { held: AtomicBool::new(false), value: SyncCell::new(value) }
    }

    #[inline]
    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let _held = Held::note(RANK);
        if !self.try_take() {
            self.wait();
        }
        let _unlock = Unlock(&self.held);
        // SAFETY: this thread holds the lock until `_unlock` is dropped.
        unsafe { self.value.with_mut(f) }
    }

    #[inline]
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, f: F) -> Result<R, F> {
        let _held = Held::note(RANK);
        if !self.try_take() {
            return Err(f);
        }
        let _unlock = Unlock(&self.held);
        // SAFETY: this thread holds the lock until `_unlock` is dropped.
        Ok(unsafe { self.value.with_mut(f) })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn four_threads_lose_no_update_and_panic_unlocks() {
        let lock = SpinLock::<u64, 1>::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| lock.with(|count| *count += 1)));
            }
        });
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            lock.with(|_| panic!("inside the section"));
        }));
        assert!(panicked.is_err());
        assert_eq!(lock.with(|count| *count), 40_000);
        assert_eq!(lock.try_with(|count| *count).ok(), Some(40_000));
    }

    #[test]
    fn try_lock_does_not_wait() {
        let lock = SpinLock::<u64, 1>::new(0);
        lock.with(|_| {
            std::thread::scope(|scope| {
                scope.spawn(|| assert!(lock.try_with(|count| *count += 1).is_err()));
            });
        });
        assert_eq!(lock.with(|count| *count), 0);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn critical_sections_exclude_each_other() {
        loom::model(|| {
            let lock = Arc::new(SpinLock::<u32, 1>::new(0));
            let other = Arc::clone(&lock);
            let thread = loom::thread::spawn(move || other.with(|count| *count += 1));
            lock.with(|count| *count += 1);
            thread.join().unwrap();
            assert_eq!(lock.with(|count| *count), 2);
        });
    }

    #[test]
    fn try_lock_excludes_lock() {
        loom::model(|| {
            let lock = Arc::new(SpinLock::<u32, 1>::new(0));
            let other = Arc::clone(&lock);
            let thread = loom::thread::spawn(move || other.with(|count| *count += 1));
            let mine = lock.try_with(|count| *count += 1).is_ok();
            thread.join().unwrap();
            assert_eq!(lock.with(|count| *count), 1 + u32::from(mine));
        });
    }
}
