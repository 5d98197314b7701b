//! A spin lock that is granted in the order of arrival, as Linux's `spin_lock` is.
//!
//! The product's spin lock goes to the thread that takes it first, mostly the thread that held it
//! last. The cache line stays with that processor, so a contended lock costs little more than an
//! uncontended one. Linux's spin locks are ticket locks since 2.6.25 and queued locks since 4.2: no
//! thread overtakes a waiter, so the lock and the data that it protects move to another processor
//! at each turn. That is the lock of the published "before".
//!
//! A kernel thread keeps its processor while it waits for or holds a spin lock. A thread in user
//! space may be preempted, and then all threads in the queue after it wait too. Results are
//! meaningful only with no more threads than processors.
#![allow(unsafe_code)]
#![allow(clippy::disallowed_types, reason = "the lock is this baseline's own; no product has it")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::{hint, thread};

use blockyard_sync::lock::Lock;
use blockyard_sync::sync_cell::SyncCell;

/// The number of loads before the waiting thread yields: the thread whose turn it is may have been
/// preempted.
const SPINS: u32 = 1 << 10;

/// A fair spin lock. It is aligned to a cache line, so that the value always lies on that line.
#[derive(Debug)]
#[repr(align(128))]
pub struct QueuedLock<T> {
    /// The next ticket.
    next: AtomicU32,
    /// The ticket whose turn it is.
    serving: AtomicU32,
    value: SyncCell<T>,
}

// SAFETY: only the thread whose turn it is reaches the value, one thread at a time.
unsafe impl<T: Send> Sync for QueuedLock<T> {}

/// A turn. Dropping it ends the turn, also when the closure panics.
struct QueueTurn<'a>(&'a AtomicU32, u32);

impl Drop for QueueTurn<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the Acquire of the thread that has the next ticket.
        self.0.store(self.1.wrapping_add(1), Ordering::Release);
    }
}

impl<T> QueuedLock<T> {
    #[inline]
    fn is_turn(&self, number: u32) -> bool {
        // Acquire: pairs with the Release that ended the turn before.
        self.serving.load(Ordering::Acquire) == number
    }

    #[cold]
    fn wait(&self, number: u32) {
        loop {
            for _ in 0..SPINS {
                if self.is_turn(number) {
                    return;
                }
                hint::spin_loop();
            }
            thread::yield_now();
        }
    }
}

impl<T: Send> Lock<T> for QueuedLock<T> {
    fn new(value: T) -> QueuedLock<T> {
        let (next, serving) = (AtomicU32::new(0), AtomicU32::new(0));
        QueuedLock { next, serving, value: SyncCell::new(value) }
    }

    #[inline]
    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        // Relaxed: the ticket is only a place in the queue.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        if !self.is_turn(number) {
            self.wait(number);
        }
        let _turn = QueueTurn(&self.serving, number);
        // SAFETY: it is this thread's turn until `_turn` is dropped.
        unsafe { self.value.with_mut(f) }
    }

    #[inline]
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, f: F) -> Result<R, F> {
        let number = self.serving.load(Ordering::Relaxed);
        // Acquire: pairs with the Release that ended the turn before. The exchange draws a ticket
        // only if its turn has come already, so this thread does not wait.
        let drawn = self.next.compare_exchange(
            number,
            number.wrapping_add(1),
            Ordering::Acquire,
            Ordering::Relaxed,
        );
        if drawn.is_err() || !self.is_turn(number) {
            return Err(f);
        }
        let _turn = QueueTurn(&self.serving, number);
        // SAFETY: it is this thread's turn until `_turn` is dropped.
        Ok(unsafe { self.value.with_mut(f) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_also_across_the_end_of_the_numbers() {
        const THREADS: usize = 4;
        const TURNS: u64 = 2_000;
        let lock = QueuedLock::new(0_u64);
        let last = u32::MAX - 100;
        lock.next.store(last, Ordering::Relaxed);
        lock.serving.store(last, Ordering::Relaxed);
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let lock = &lock;
                scope.spawn(move || {
                    let add = |value: &mut u64| {
                        let read = *value;
                        hint::black_box(&read);
                        *value = read + 1;
                    };
                    for _ in 0..TURNS {
                        match thread {
                            // `try_with` never waits, but takes a turn like `with`.
                            0 => while lock.try_with(add).is_err() {},
                            _ => lock.with(add),
                        }
                    }
                });
            }
        });
        assert_eq!(lock.with(|value| *value), THREADS as u64 * TURNS);
    }

    #[test]
    fn a_held_lock_is_not_waited_for_and_a_panic_ends_the_turn() {
        let lock = QueuedLock::new(());
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            lock.with(|()| {
                assert!(lock.try_with(|()| ()).is_err());
                panic!("as the test wants it");
            });
        }));
        assert!(panicked.is_err());
        assert!(lock.try_with(|()| ()).is_ok());
    }
}
