//! A spinning lock that is handed over in the order of arrival, as Linux's `spin_lock` is.
//!
//! The product's spinning lock goes to whoever takes it first, which is mostly who has just had it:
//! its line stays with that processor, and a lock that all want costs little more than one that
//! nobody wants. Linux's spin locks are tickets since 2.6.25 and a queue since 4.2: nobody passes
//! who waits, and so the lock and what it protects go from processor to processor at each turn.
//! That is the lock that was published as "before".
//!
//! A thread of the kernel keeps its processor while it waits or holds. Ours may lose it, and then
//! all behind it wait too: it says something for as many threads as there are processors.
#![allow(unsafe_code)]
#![allow(clippy::disallowed_types, reason = "the lock is this baseline's own; no product has it")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::{hint, thread};

use blockyard_sync::cell::RoomCell;
use blockyard_sync::lock::Lock;

/// Looks at the lock before the processor is given up: the one whose turn it is may have lost its.
const SPINS: u32 = 1 << 10;

/// A lock that spins and is fair. It begins a line, so that what it protects lies with it wherever
/// it was allocated.
#[derive(Debug)]
#[repr(align(128))]
pub struct QueuedLock<T> {
    /// The number that the next one draws.
    next: AtomicU32,
    /// Whose turn it is.
    serving: AtomicU32,
    value: RoomCell<T>,
}

// SAFETY: the value is reached by whose turn it is only, one thread at a time.
unsafe impl<T: Send> Sync for QueuedLock<T> {}

/// Ends a turn, also when the closure panics.
struct Turn<'a>(&'a AtomicU32, u32);

impl Drop for Turn<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the Acquire of the one who has the next number.
        self.0.store(self.1.wrapping_add(1), Ordering::Release);
    }
}

impl<T> QueuedLock<T> {
    #[inline]
    fn is_turn(&self, number: u32) -> bool {
        // Acquire: pairs with the Release of the turn before.
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
        QueuedLock { next, serving, value: RoomCell::new(value) }
    }

    #[inline]
    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        // Relaxed: the number says only where in the queue one is.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        if !self.is_turn(number) {
            self.wait(number);
        }
        let _turn = Turn(&self.serving, number);
        // SAFETY: it is this thread's turn until `_turn` is dropped.
        unsafe { self.value.with_mut(f) }
    }

    #[inline]
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, f: F) -> Result<R, F> {
        let number = self.serving.load(Ordering::Relaxed);
        // Acquire: pairs with the Release of the turn before. The number is drawn only if it is
        // served already, so nothing is waited for.
        let drawn = self.next.compare_exchange(
            number,
            number.wrapping_add(1),
            Ordering::Acquire,
            Ordering::Relaxed,
        );
        if drawn.is_err() || !self.is_turn(number) {
            return Err(f);
        }
        let _turn = Turn(&self.serving, number);
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
                            // One that never waits takes its turns too.
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
