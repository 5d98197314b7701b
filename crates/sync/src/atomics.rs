//! The one door to atomics: the standard library's, or those of loom or shuttle in a model.

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

/// Tells the processor, or the model, that this thread waits in a loop.
#[inline]
pub fn spin_hint() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(shuttle)]
    shuttle::hint::spin_loop();
    #[cfg(not(any(loom, shuttle)))]
    std::hint::spin_loop();
}

/// Lets another thread run.
pub fn yield_now() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(shuttle)]
    shuttle::thread::yield_now();
    #[cfg(not(any(loom, shuttle)))]
    std::thread::yield_now();
}

/// A lock that sleeps while it waits: for rooms whose holders may take long.
#[cfg(loom)]
pub use loom::sync::{Condvar, Mutex, MutexGuard};
/// A lock that sleeps while it waits: for rooms whose holders may take long.
#[cfg(shuttle)]
pub use shuttle::sync::{Condvar, Mutex, MutexGuard};
/// A lock that sleeps while it waits: for rooms whose holders may take long.
#[cfg(not(any(loom, shuttle)))]
pub use std::sync::{Condvar, Mutex, MutexGuard};
