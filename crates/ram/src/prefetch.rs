//! Prefetching memory into the cache.
//!
//! A codec or a copy that reads uncached memory waits for it line by line. The hardware prefetcher
//! helps, but does not cross page boundaries. When all lines are prefetched at once while the
//! thread computes something else, they arrive in parallel.
#![allow(unsafe_code)]

/// Size of a cache line.
const LINE_BYTES: usize = 64;
/// Lines that are prefetched per loop iteration: a loop per line costs more than the prefetches.
const LINES_PER_LOOP: usize = 4;

/// Prefetches a range that the caller reads next. Its contents do not matter: a prefetch has no
/// visible effect, and an invalid address does no harm.
#[inline]
pub(crate) fn prefetch(from: *const u8, len_bytes: usize) {
    let (mut line, mut left) = (from, len_bytes.div_ceil(LINE_BYTES));
    while left >= LINES_PER_LOOP {
        for number in 0..LINES_PER_LOOP {
            prefetch_line(line.wrapping_add(number * LINE_BYTES));
        }
        line = line.wrapping_add(LINES_PER_LOOP * LINE_BYTES);
        left -= LINES_PER_LOOP;
    }
    for number in 0..left {
        prefetch_line(line.wrapping_add(number * LINE_BYTES));
    }
}

/// Prefetches a range that the caller reads after other work, which prefetching all lines at once
/// would delay.
#[inline]
pub(crate) fn prefetch_ahead(from: *const u8, len_bytes: usize) {
    for line in (0..len_bytes).step_by(LINE_BYTES) {
        prefetch_line(from.wrapping_add(line));
    }
}

/// Prefetches a range that the caller writes some time later. This invalidates the lines in the
/// caches of other CPUs, which may be reading them.
#[inline]
pub(crate) fn prefetch_to_write(from: *const u8, len_bytes: usize) {
    for line in (0..len_bytes).step_by(LINE_BYTES) {
        let line = from.wrapping_add(line);
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: as in `prefetch_line`. `prefetchw` is used directly because the library's
        // prefetch for writing compiles to one for reading unless the target has the instruction. A
        // CPU without `prefetchw` executes it as a no-op.
        unsafe {
            use std::arch::asm;
            asm!("prefetchw [{}]", in(reg) line, options(readonly, nostack, preserves_flags));
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = line;
    }
}

#[inline(always)]
fn prefetch_line(line: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch of any address has no visible effect and does not fault.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(line.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = line;
}
