//! Fetching memory into the cache ahead of its use.
//!
//! A codec that reads what is not in the cache waits for it line by line, and so does a copy: the
//! processor fetches ahead by itself, but not over the border of a page. Asked for all at once, and
//! while something else is computed, the lines arrive side by side.
#![allow(unsafe_code)]

/// What the cache counts in.
const LINE_BYTES: usize = 64;
/// Lines that are asked for in a turn: counting them one by one takes longer than asking.
const TURN: usize = 4;

/// Fetches a range into the cache, for who reads it next. What lies there does not matter: nothing
/// is read that can be seen, and an address that is none does no harm.
#[inline]
pub(crate) fn fetch(from: *const u8, len_bytes: usize) {
    let (mut line, mut left) = (from, len_bytes.div_ceil(LINE_BYTES));
    while left >= TURN {
        for number in 0..TURN {
            fetch_line(line.wrapping_add(number * LINE_BYTES));
        }
        line = line.wrapping_add(TURN * LINE_BYTES);
        left -= TURN;
    }
    for number in 0..left {
        fetch_line(line.wrapping_add(number * LINE_BYTES));
    }
}

/// The same for who comes to it after other work, which all lines at once would hold up.
#[inline]
pub(crate) fn fetch_ahead(from: *const u8, len_bytes: usize) {
    for line in (0..len_bytes).step_by(LINE_BYTES) {
        fetch_line(from.wrapping_add(line));
    }
}

/// Fetches a range into the cache for who writes it some time later. Other processors lose it, who
/// may be reading it.
#[inline]
pub(crate) fn fetch_to_write(from: *const u8, len_bytes: usize) {
    for line in (0..len_bytes).step_by(LINE_BYTES) {
        let line = from.wrapping_add(line);
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: as in `fetch_line`. The library's prefetch for writing is one for reading, unless
        // the build is for newer processors only; one that does not know this does nothing.
        unsafe {
            use std::arch::asm;
            asm!("prefetchw [{}]", in(reg) line, options(readonly, nostack, preserves_flags));
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = line;
    }
}

#[inline(always)]
fn fetch_line(line: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch of any address neither reads anything that can be seen nor faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(line.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = line;
}
