//! A counting allocator, for tests of code that must not allocate.
#![allow(unsafe_code)] // An allocator is unsafe.
#![allow(clippy::disallowed_types)] // A static count, which models of concurrency do not see.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// The system's allocator, with a count of the allocations of each thread. A test installs it as
/// its `#[global_allocator]`.
#[derive(Debug)]
pub struct Counting;

thread_local! {
    static MADE: Cell<u64> = const { Cell::new(0) };
}

static MADE_BY_ALL: AtomicU64 = AtomicU64::new(0);

impl Counting {
    /// How many allocations all threads of the process have made so far.
    ///
    /// # Panics
    /// As [`Counting::made`].
    pub fn made_by_all() -> u64 {
        let before = MADE_BY_ALL.load(Ordering::SeqCst);
        Counting::made();
        // The allocation of the check is no one's.
        MADE_BY_ALL.fetch_sub(1, Ordering::SeqCst);
        before
    }

    /// How many allocations this thread has made so far.
    ///
    /// # Panics
    /// If the program has another allocator, with which nothing would be counted.
    pub fn made() -> u64 {
        let before = MADE.get();
        drop(std::hint::black_box(Box::new(0_u8)));
        assert_eq!(MADE.get(), before + 1, "Counting is not the global allocator");
        MADE.set(before);
        before
    }
}

// SAFETY: every call is forwarded unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        MADE.set(MADE.get() + 1);
        MADE_BY_ALL.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract is that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the memory came from `System` with this layout.
        unsafe { System.dealloc(memory, layout) }
    }
}
