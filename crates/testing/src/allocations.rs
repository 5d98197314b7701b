//! A counting allocator, for tests of code that must not allocate.
#![allow(unsafe_code)] // An allocator is unsafe.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, with a count of the allocations of each thread. A test installs it as
/// its `#[global_allocator]`.
#[derive(Debug)]
pub struct Counting;

thread_local! {
    static MADE: Cell<u64> = const { Cell::new(0) };
}

impl Counting {
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
        // SAFETY: the caller's contract is that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the memory came from `System` with this layout.
        unsafe { System.dealloc(memory, layout) }
    }
}
