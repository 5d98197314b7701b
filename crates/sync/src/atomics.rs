//! The only import of atomics: those of the standard library, or of loom or shuttle in a model.

#[cfg(loom)]
pub use loom::sync::atomic::{
    AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
#[cfg(shuttle)]
pub use shuttle::sync::atomic::{
    AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
#[cfg(not(any(loom, shuttle)))]
pub use std::sync::atomic::{
    AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};

/// Tells the CPU, or the model, that this thread waits in a loop.
#[inline]
pub fn spin_hint() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(shuttle)]
    shuttle::hint::spin_loop();
    #[cfg(not(any(loom, shuttle)))]
    std::hint::spin_loop();
}

/// Yields the CPU to another thread.
pub fn yield_now() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(shuttle)]
    shuttle::thread::yield_now();
    #[cfg(not(any(loom, shuttle)))]
    std::thread::yield_now();
}

/// A lock that sleeps while it waits, for primitives whose holders may take long.
#[cfg(loom)]
pub use loom::sync::{Condvar, Mutex, MutexGuard};
/// A lock that sleeps while it waits, for primitives whose holders may take long.
#[cfg(shuttle)]
pub use shuttle::sync::{Condvar, Mutex, MutexGuard};
/// A lock that sleeps while it waits, for primitives whose holders may take long.
#[cfg(not(any(loom, shuttle)))]
pub use std::sync::{Condvar, Mutex, MutexGuard};
