//! Locks that readers may share, of the kinds that were tried around zram's table.
//!
//! [`SharedLock`] is what they have in common; a lock that cannot be shared lets one reader in at a
//! time. All spin, as the kernel's do, and give their processor up after a while: in user space the
//! holder may have lost its own.
#![allow(unsafe_code)]
#![allow(clippy::disallowed_types, reason = "the locks are the baselines' own; no product has one")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::{hint, thread};

use blockyard_sync::cell::RoomCell;
use blockyard_sync::lock::Lock;
use blockyard_sync::spin_lock::SpinLock;

/// Looks at a held lock before the processor is given up, as the product's spinning lock has them.
const SPINS: u32 = 64;

/// A lock around a value that readers may share.
pub trait SharedLock<T>: Send + Sync {
    /// An unlocked lock.
    fn new(value: T) -> Self;

    /// Runs `f` on the value, beside other readers if the lock can be shared.
    fn read<R>(&self, f: impl FnOnce(&T) -> R) -> R;

    /// Runs `f` on the value, alone.
    fn write<R>(&self, f: impl FnOnce(&mut T) -> R) -> R;

    /// The same as `read` if nobody is in the way; else gives `f` back without waiting.
    ///
    /// # Errors
    /// `f`, if somebody is.
    fn try_read<R, F: FnOnce(&T) -> R>(&self, f: F) -> Result<R, F>;

    /// The same as `write` if nobody is in the way; else gives `f` back without waiting.
    ///
    /// # Errors
    /// `f`, if somebody is.
    fn try_write<R, F: FnOnce(&mut T) -> R>(&self, f: F) -> Result<R, F>;
}

/// Tries until it is done, as often as it takes.
#[inline]
pub(super) fn spin(mut is_done: impl FnMut() -> bool) {
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

/// The lock that zram's entries had when they had a `spinlock_t` each: nobody shares it.
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

/// A state beside the value, taken by compare-and-swap and tried again and again: nobody shares it.
#[derive(Debug)]
pub struct CasLock<T> {
    state: AtomicU32,
    value: RoomCell<T>,
}

const IDLE: u32 = 0;
const ACCESS: u32 = 1;

// SAFETY: the value is reached by the one who has the state only, one thread at a time.
unsafe impl<T: Send> Sync for CasLock<T> {}

/// Gives a [`CasLock`] back, also when the closure panics.
struct Idle<'a>(&'a AtomicU32);

impl Drop for Idle<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the Acquire of the next one's exchange.
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
        CasLock { state: AtomicU32::new(IDLE), value: RoomCell::new(value) }
    }

    #[inline]
    fn read<R>(&self, f: impl FnOnce(&T) -> R) -> R {
        self.write(|value| f(value))
    }

    #[inline]
    fn write<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let _idle = self.take();
        // SAFETY: this thread has the state until `_idle` is dropped.
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

/// A reader/writer lock that spins, as Linux's `rwlock_t` was in 2014: readers come in as long as
/// no writer is there, and a writer waits until there is no reader, however long that takes.
#[derive(Debug)]
pub struct SpinRwLock<T> {
    /// Readers, and the bit of a writer.
    state: AtomicU32,
    value: RoomCell<T>,
}

const WRITER: u32 = 1 << 31;

// SAFETY: readers only read the value, and a writer has it alone.
unsafe impl<T: Send + Sync> Sync for SpinRwLock<T> {}

/// Takes what it says off the state, also when the closure panics.
struct Leave<'a>(&'a AtomicU32, u32);

impl Drop for Leave<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the Acquire of who comes next: a writer after readers, anybody after
        // a writer.
        self.0.fetch_sub(self.1, Ordering::Release);
    }
}

impl<T> SpinRwLock<T> {
    #[inline]
    fn try_share(&self) -> Option<Leave<'_>> {
        // Acquire: pairs with the Release of the writer before.
        let before = self.state.fetch_add(1, Ordering::Acquire);
        let shared = Leave(&self.state, 1);
        // Dropped where a writer is there: it was counted for a moment, and a writer's bit stays.
        (before & WRITER == 0).then_some(shared)
    }

    #[inline]
    fn try_take(&self) -> Option<Leave<'_>> {
        // Acquire: pairs with the Releases of those before.
        let taken = self.state.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok().then(|| Leave(&self.state, WRITER))
    }

    #[inline]
    fn share(&self) -> Leave<'_> {
        let mut shared = self.try_share();
        if shared.is_none() {
            spin(|| {
                // Relaxed: only a hint that it may succeed now.
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
                // Relaxed: as above.
                if self.state.load(Ordering::Relaxed) == 0 {
                    taken = self.try_take();
                }
                taken.is_some()
            });
        }
        taken.expect("spinning ends when it is there")
    }

    /// Lets a reader at the value.
    ///
    /// # Safety
    /// No writer is there until `f` returns.
    #[inline]
    unsafe fn look<R>(&self, f: impl FnOnce(&T) -> R) -> R {
        // SAFETY: the cell's door is for one, so what readers share is a pointer that they get
        // there; no writer is there meanwhile, by this function's contract.
        let value: *const T = unsafe { self.value.with_mut(std::ptr::from_mut) };
        // SAFETY: the value lives as long as the lock, and is only read meanwhile.
        f(unsafe { &*value })
    }
}

impl<T: Send + Sync> SharedLock<T> for SpinRwLock<T> {
    fn new(value: T) -> SpinRwLock<T> {
        SpinRwLock { state: AtomicU32::new(0), value: RoomCell::new(value) }
    }

    #[inline]
    fn read<R>(&self, f: impl FnOnce(&T) -> R) -> R {
        let _shared = self.share();
        // SAFETY: no writer comes in until `_shared` is dropped.
        unsafe { self.look(f) }
    }

    #[inline]
    fn write<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let _taken = self.take();
        // SAFETY: nobody else is in until `_taken` is dropped.
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

    /// Two values that a writer changes one after the other, and that readers find equal.
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
