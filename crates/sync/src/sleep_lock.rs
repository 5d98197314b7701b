//! Primitive: the sleeping lock.
//!
//! Protects   a value with long critical sections: a zone while its data is copied or freed, a part
//!            of the write cache.
//! Why        a thread that waits for a copy should not use the CPU that the copy needs.
//! States     those of the standard library's mutex. Poisoning is ignored: a panic in a critical
//!            section is a bug of ours and ends the channel anyway.
//! Order      the rank `RANK`, docs/locks.md. The critical section may copy data and free memory;
//!            it does not submit or log.
//! Common     one compare-exchange to take it, one exchange to release it.
//! Cost       about 9 ns without contention; a system call with contention.
//! Before     one lock for the whole device.

use std::fmt;
use std::sync::{PoisonError, TryLockError};

use crate::atomics::Mutex;
use crate::lock::Lock;
use crate::rank::Held;

/// A sleeping lock of rank `RANK`.
pub struct SleepLock<T, const RANK: u8>(Mutex<T>);

impl<T, const RANK: u8> fmt::Debug for SleepLock<T, RANK> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SleepLock").field("rank", &RANK).finish_non_exhaustive()
    }
}

impl<T: Send, const RANK: u8> Lock<T> for SleepLock<T, RANK> {
    fn new(value: T) -> SleepLock<T, RANK> {
        SleepLock(Mutex::new(value))
    }

    #[inline]
    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let _held = Held::note(RANK);
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    #[inline]
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, f: F) -> Result<R, F> {
        let _held = Held::note(RANK);
        match self.0.try_lock() {
            Ok(mut value) => Ok(f(&mut value)),
            Err(TryLockError::Poisoned(poisoned)) => Ok(f(&mut poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => Err(f),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn lock_is_usable_after_panic() {
        let lock = SleepLock::<u64, 1>::new(7);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            lock.with(|_| panic!("inside the section"));
        }));
        assert!(panicked.is_err());
        assert_eq!(lock.with(|value| *value), 7);
        assert_eq!(lock.try_with(|value| *value).ok(), Some(7));
    }

    #[test]
    fn try_lock_does_not_wait() {
        let lock = SleepLock::<u64, 1>::new(0);
        lock.with(|_| {
            std::thread::scope(|scope| {
                scope.spawn(|| assert!(lock.try_with(|value| *value += 1).is_err()));
            });
        });
        assert_eq!(lock.with(|value| *value), 0);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn critical_sections_exclude_each_other() {
        loom::model(|| {
            let lock = Arc::new(SleepLock::<u32, 1>::new(0));
            let other = Arc::clone(&lock);
            let thread = loom::thread::spawn(move || other.with(|count| *count += 1));
            lock.with(|count| *count += 1);
            thread.join().unwrap();
            assert_eq!(lock.with(|count| *count), 2);
        });
    }
}
