//! Locks that readers may share, of the kinds that were tried around zram's table.
//!
//! [`SharedLock`] is their common interface; a lock that cannot be shared admits one reader at a
//! time. All spin as the kernel's do, and yield their processor after a while: in user space the
//! holder may have been preempted.
#![allow(unsafe_code)]
#![allow(clippy::disallowed_types, reason = "the locks are the baselines' own; no product has one")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::{hint, thread};

use blockyard_sync::lock::Lock;
use blockyard_sync::spin_lock::SpinLock;
use blockyard_sync::sync_cell::SyncCell;

/// The number of loads of a held lock before the thread yields, as in the product's spin lock.
const SPINS: u32 = 64;

/// A lock around a value that readers may share.
pub trait SharedLock<T>: Send + Sync {
    /// An unlocked lock.
    fn new(value: T) -> Self;

    /// Runs `f` on the value, concurrently with other readers if the lock can be shared.
    fn read<R>(&self, f: impl FnOnce(&T) -> R) -> R;

    /// Runs `f` on the value exclusively.
    fn write<R>(&self, f: impl FnOnce(&mut T) -> R) -> R;

    /// Runs `f` on the value as `read` does, but returns `f` instead of waiting.
    ///
    /// # Errors
    /// `f`, if another thread holds the lock.
    fn try_read<R, F: FnOnce(&T) -> R>(&self, f: F) -> Result<R, F>;

    /// Runs `f` on the value as `write` does, but returns `f` instead of waiting.
    ///
    /// # Errors
    /// `f`, if another thread holds the lock.
    fn try_write<R, F: FnOnce(&mut T) -> R>(&self, f: F) -> Result<R, F>;
}

/// Calls `is_done` until it returns `true`, and yields now and then.
#[inline]
pub(crate) fn spin(mut is_done: impl FnMut() -> bool) {
    loop {
        for _ in 0..SPINS {
            if is_done() {
                return;
            }
            hint::spin_loop();
        }
        thread::yield_now();
    }
}

/// The lock of zram's entries when they had a `spinlock_t` each; readers do not share it.
impl<T: Send, const RANK: u8> SharedLock<T> for SpinLock<T, RANK> {
    fn new(value: T) -> SpinLock<T, RANK> {
        Lock::new(value)
    }

    #[inline]
    fn read<R>(&self, f: impl FnOnce(&T) -> R) -> R {
        self.with(|value| f(value))
    }

    #[inline]
    fn write<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        self.with(f)
    }

    #[inline]
    fn try_read<R, F: FnOnce(&T) -> R>(&self, f: F) -> Result<R, F> {
        let mut f = Some(f);
        let done = self.try_with(|value| f.take().map(|f| f(value)));
        match done {
            Ok(answer) => Ok(answer.expect("it was there, and is taken once")),
            Err(_) => Err(f.expect("it was not run")),
        }
    }

    #[inline]
    fn try_write<R, F: FnOnce(&mut T) -> R>(&self, f: F) -> Result<R, F> {
        self.try_with(f)
    }
}

/// A state word next to the value, taken by compare-and-swap in a loop; readers do not share it.
#[derive(Debug)]
pub struct CasLock<T> {
    state: AtomicU32,
    value: SyncCell<T>,
}

const IDLE: u32 = 0;
const ACCESS: u32 = 1;

// SAFETY: only the thread that has set the state reaches the value, one thread at a time.
unsafe impl<T: Send> Sync for CasLock<T> {}

/// A held [`CasLock`]. Dropping it releases the lock, also when the closure panics.
struct Idle<'a>(&'a AtomicU32);

impl Drop for Idle<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the Acquire of the next holder's exchange.
        self.0.store(IDLE, Ordering::Release);
    }
}

impl<T> CasLock<T> {
    #[inline]
    fn try_take(&self) -> Option<Idle<'_>> {
        // Acquire: pairs with the Release in `Idle`.
        let taken = self.state.compare_exchange(IDLE, ACCESS, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok().then(|| Idle(&self.state))
    }

    #[inline]
    fn take(&self) -> Idle<'_> {
        let mut idle = self.try_take();
        if idle.is_none() {
            spin(|| {
                idle = self.try_take();
                idle.is_some()
            });
        }
        idle.expect("spinning ends when it is there")
    }
}

impl<T: Send> SharedLock<T> for CasLock<T> {
    fn new(value: T) -> CasLock<T> {
        CasLock { state: AtomicU32::new(IDLE), value: SyncCell::new(value) }
    }

    #[inline]
    fn read<R>(&self, f: impl FnOnce(&T) -> R) -> R {
        self.write(|value| f(value))
    }

    #[inline]
    fn write<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let _idle = self.take();
        // SAFETY: this thread holds the lock until `_idle` is dropped.
        unsafe { self.value.with_mut(f) }
    }

    #[inline]
    fn try_read<R, F: FnOnce(&T) -> R>(&self, f: F) -> Result<R, F> {
        let Some(_idle) = self.try_take() else { return Err(f) };
        // SAFETY: as in `write`.
        Ok(unsafe { self.value.with_mut(|value| f(value)) })
    }

    #[inline]
    fn try_write<R, F: FnOnce(&mut T) -> R>(&self, f: F) -> Result<R, F> {
        let Some(_idle) = self.try_take() else { return Err(f) };
        // SAFETY: as in `write`.
        Ok(unsafe { self.value.with_mut(f) })
    }
}

/// A reader/writer lock that spins, as Linux's `rwlock_t` was in 2014. Readers enter while there is
/// no writer, and a writer waits until there is no reader, however long that takes.
#[derive(Debug)]
pub struct SpinRwLock<T> {
    /// The number of readers, and the writer bit.
    state: AtomicU32,
    value: SyncCell<T>,
}

const WRITER: u32 = 1 << 31;

// SAFETY: readers only read the value, and a writer has exclusive access.
unsafe impl<T: Send + Sync> Sync for SpinRwLock<T> {}

/// A held lock. Dropping it subtracts the number from the state, also when the closure panics.
struct Leave<'a>(&'a AtomicU32, u32);

impl Drop for Leave<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the Acquire of the next holder: a writer after readers, a reader or
        // writer after a writer.
        self.0.fetch_sub(self.1, Ordering::Release);
    }
}

impl<T> SpinRwLock<T> {
    #[inline]
    fn try_share(&self) -> Option<Leave<'_>> {
        // Acquire: pairs with the Release of the writer before.
        let before = self.state.fetch_add(1, Ordering::Acquire);
        let shared = Leave(&self.state, 1);
        // With a writer present the guard is dropped: the reader was counted for a moment, and the
        // writer bit stays.
        (before & WRITER == 0).then_some(shared)
    }

    #[inline]
    fn try_take(&self) -> Option<Leave<'_>> {
        // Acquire: pairs with the Releases of the holders before.
        let taken = self.state.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok().then(|| Leave(&self.state, WRITER))
    }

    #[inline]
    fn share(&self) -> Leave<'_> {
        let mut shared = self.try_share();
        if shared.is_none() {
            spin(|| {
                // Relaxed: only a hint that the next attempt may succeed.
                if self.state.load(Ordering::Relaxed) & WRITER == 0 {
                    shared = self.try_share();
                }
                shared.is_some()
            });
        }
        shared.expect("spinning ends when it is there")
    }

    #[inline]
    fn take(&self) -> Leave<'_> {
        let mut taken = self.try_take();
        if taken.is_none() {
            spin(|| {
                // Relaxed: only a hint that the next attempt may succeed.
                if self.state.load(Ordering::Relaxed) == 0 {
                    taken = self.try_take();
                }
                taken.is_some()
            });
        }
        taken.expect("spinning ends when it is there")
    }

    /// Calls `f` with the value for a reader.
    ///
    /// # Safety
    /// No writer holds the lock until `f` returns.
    #[inline]
    unsafe fn look<R>(&self, f: impl FnOnce(&T) -> R) -> R {
        // SAFETY: the cell admits one caller at a time, so readers share only a pointer that they
        // get from it; no writer holds the lock meanwhile, by this function's contract.
        let value: *const T = unsafe { self.value.with_mut(std::ptr::from_mut) };
        // SAFETY: the value lives as long as the lock, and is only read meanwhile.
        f(unsafe { &*value })
    }
}

impl<T: Send + Sync> SharedLock<T> for SpinRwLock<T> {
    fn new(value: T) -> SpinRwLock<T> {
        SpinRwLock { state: AtomicU32::new(0), value: SyncCell::new(value) }
    }

    #[inline]
    fn read<R>(&self, f: impl FnOnce(&T) -> R) -> R {
        let _shared = self.share();
        // SAFETY: no writer takes the lock until `_shared` is dropped.
        unsafe { self.look(f) }
    }

    #[inline]
    fn write<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let _taken = self.take();
        // SAFETY: no other thread holds the lock until `_taken` is dropped.
        unsafe { self.value.with_mut(f) }
    }

    #[inline]
    fn try_read<R, F: FnOnce(&T) -> R>(&self, f: F) -> Result<R, F> {
        let Some(_shared) = self.try_share() else { return Err(f) };
        // SAFETY: as in `read`.
        Ok(unsafe { self.look(f) })
    }

    #[inline]
    fn try_write<R, F: FnOnce(&mut T) -> R>(&self, f: F) -> Result<R, F> {
        let Some(_taken) = self.try_take() else { return Err(f) };
        // SAFETY: as in `write`.
        Ok(unsafe { self.value.with_mut(f) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREADS: u64 = 4;
    const TURNS: u64 = 1000;

    /// A writer changes two values one after the other; readers must find them equal.
    fn excludes<L: SharedLock<[u64; 2]>>() {
        let lock = L::new([0; 2]);
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let lock = &lock;
                scope.spawn(move || {
                    let look = |pair: &[u64; 2]| assert_eq!(pair[0], pair[1]);
                    let add = |pair: &mut [u64; 2]| {
                        pair[0] += 1;
                        hint::black_box(&pair);
                        pair[1] += 1;
                    };
                    for _ in 0..TURNS {
                        match thread {
                            0 => {
                                while lock.try_read(look).is_err() {}
                                while lock.try_write(add).is_err() {}
                            }
                            _ => {
                                lock.read(look);
                                lock.write(add);
                            }
                        }
                    }
                });
            }
        });
        assert_eq!(lock.read(|pair| *pair), [THREADS * TURNS; 2]);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            lock.write(|_| panic!("as the test wants it"));
        }));
        assert!(panicked.is_err() && lock.try_write(|_| ()).is_ok());
    }

    #[test]
    fn writers_are_alone_and_a_panic_unlocks() {
        excludes::<SpinLock<[u64; 2], 1>>();
        excludes::<CasLock<[u64; 2]>>();
        excludes::<SpinRwLock<[u64; 2]>>();
    }

    #[test]
    fn only_readers_of_a_reader_writer_lock_share_it() {
        let shared = SpinRwLock::new(());
        shared.read(|()| {
            assert!(shared.try_read(|()| ()).is_ok());
            assert!(shared.try_write(|()| ()).is_err());
        });
        shared.write(|()| assert!(shared.try_read(|()| ()).is_err()));
        assert!(shared.try_write(|()| ()).is_ok());
        let alone = CasLock::new(());
        alone.read(|()| assert!(alone.try_read(|()| ()).is_err()));
        alone.read(|()| assert!(alone.try_write(|()| ()).is_err()));
    }
}
