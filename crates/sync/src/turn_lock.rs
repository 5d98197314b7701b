//! Room: the ticket lock, a fair sleeping lock.
//!
//! Protects   long work that one thread does in pieces, between which other threads do short work.
//! Why        a thread that releases a lock and takes it again at once is faster than a thread that
//!            is woken for it. With a plain lock the others wait until all of the work is done.
//! States     an outer mutex, the door, and an inner mutex. The next thread holds the door until it
//!            has the inner mutex; a thread that comes back waits at the door.
//! Order      the rank `RANK`, docs/locks.md, for both: a thread that holds the inner mutex does
//!            not take the door.
//! Common     two compare-exchanges to take it, two exchanges to release it.
//! Cost       about 18 ns without contention; a system call with contention.
//! Before     `sleep_lock`, held for all of the work.

use std::fmt;
use std::sync::PoisonError;

use crate::atomics::Mutex;
use crate::rank::Held;

/// A fair sleeping lock of rank `RANK`.
pub struct TurnLock<T, const RANK: u8> {
    door: Mutex<()>,
    inside: Mutex<T>,
}

impl<T, const RANK: u8> TurnLock<T, RANK> {
    /// A lock that no thread holds.
    pub fn new(value: T) -> TurnLock<T, RANK> {
        TurnLock { door: Mutex::new(()), inside: Mutex::new(value) }
    }

    /// Calls `f` under the lock. A thread that already waits when another one releases the lock
    /// gets it before that one can take it again.
    pub fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let _held = Held::note(RANK);
        let next = self.door.lock().unwrap_or_else(PoisonError::into_inner);
        let mut value = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        drop(next);
        f(&mut value)
    }
}

impl<T, const RANK: u8> fmt::Debug for TurnLock<T, RANK> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TurnLock").field("rank", &RANK).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn sections_exclude_each_other() {
        let lock = TurnLock::<u64, 1>::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| lock.with(|count| *count += 1)));
            }
        });
        assert_eq!(lock.with(|count| *count), 4000);
    }

    #[test]
    fn a_panic_leaves_the_lock_usable() {
        let lock = TurnLock::<u64, 1>::new(7);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            lock.with(|_| panic!("inside the section"));
        }));
        assert!(panicked.is_err());
        assert_eq!(lock.with(|value| *value), 7);
    }

    /// A thread that comes back never overtakes the one at the door.
    #[test]
    fn who_waits_at_the_door_is_next() {
        let lock = TurnLock::<Vec<u32>, 1>::new(Vec::new());
        std::thread::scope(|scope| {
            lock.with(|order| {
                order.push(1);
                scope.spawn(|| lock.with(|order| order.push(2)));
                // The other thread holds the door and waits for this section to end.
                while lock.door.try_lock().is_ok() {
                    std::thread::yield_now();
                }
            });
            lock.with(|order| order.push(3));
        });
        assert_eq!(lock.with(|order| order.clone()), [1, 2, 3]);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn sections_exclude_each_other() {
        loom::model(|| {
            let lock = Arc::new(TurnLock::<u32, 1>::new(0));
            let other = Arc::clone(&lock);
            let thread = loom::thread::spawn(move || other.with(|count| *count += 1));
            lock.with(|count| *count += 1);
            lock.with(|count| *count += 1);
            thread.join().unwrap();
            assert_eq!(lock.with(|count| *count), 3);
        });
    }
}
