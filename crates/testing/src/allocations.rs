//! A counting allocator, for tests of code that must not allocate.
#![allow(unsafe_code)] // An allocator is unsafe.
#![allow(clippy::disallowed_types)] // A static count, which models of concurrency do not see.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The system's allocator, with a count of the allocations of each thread, and of the allocated
/// bytes. A test installs it as its `#[global_allocator]`.
#[derive(Debug)]
pub struct Counting;

/// The most threads of a test whose allocations are counted apart.
const THREADS_MAX: usize = 256;

thread_local! {
    static MADE: Cell<u64> = const { Cell::new(0) };
    /// The number of the thread in `MADE_BY_THREAD`, counted from 1; 0 before its first allocation.
    static NUMBER: Cell<usize> = const { Cell::new(0) };
}

unsafe extern "C" {
    /// The system's number of this thread, from the C library, with which std is linked.
    fn gettid() -> i32;
}

/// The system's number of a thread, and its allocations.
struct ThreadCount {
    id: AtomicU64,
    made: AtomicU64,
}

static THREADS: AtomicUsize = AtomicUsize::new(0);
static MADE_BY_THREAD: [ThreadCount; THREADS_MAX] =
    [const { ThreadCount { id: AtomicU64::new(0), made: AtomicU64::new(0) } }; THREADS_MAX];

static MADE_BY_ALL: AtomicU64 = AtomicU64::new(0);

/// Allocated bytes that were not freed.
static LIVE_BYTES: AtomicU64 = AtomicU64::new(0);

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

    /// The bytes that are allocated now, by all threads of the process.
    ///
    /// # Panics
    /// As [`Counting::made`].
    pub fn live_bytes() -> u64 {
        Counting::made();
        LIVE_BYTES.load(Ordering::SeqCst)
    }

    /// The threads that live, by the system's numbers: the name of each, and how many allocations
    /// it has made so far. A thread has its name after it has started.
    ///
    /// # Panics
    /// As [`Counting::made`], and if the process has had more than 256 threads.
    pub fn made_by_thread() -> BTreeMap<u64, (String, u64)> {
        Counting::made();
        let threads = THREADS.load(Ordering::SeqCst);
        assert!(threads <= THREADS_MAX, "{threads} threads");
        let of = |count: &ThreadCount| {
            let id = count.id.load(Ordering::SeqCst);
            let name = std::fs::read_to_string(format!("/proc/self/task/{id}/comm")).ok()?;
            Some((id, (name.trim_end().to_owned(), count.made.load(Ordering::SeqCst))))
        };
        MADE_BY_THREAD[..threads].iter().filter_map(of).collect()
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
        LIVE_BYTES.fetch_add(layout.size() as u64, Ordering::Relaxed);
        if NUMBER.get() == 0 {
            NUMBER.set(1 + THREADS.fetch_add(1, Ordering::SeqCst));
            if let Some(count) = MADE_BY_THREAD.get(NUMBER.get() - 1) {
                // SAFETY: the call has no precondition.
                count.id.store(unsafe { gettid() } as u64, Ordering::SeqCst);
            }
        }
        if let Some(count) = MADE_BY_THREAD.get(NUMBER.get() - 1) {
            count.made.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's contract is that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the memory came from `System` with this layout.
        unsafe { System.dealloc(memory, layout) }
    }
}
