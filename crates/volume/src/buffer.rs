//! Aligned memory, of which there is so much and no more, and which is used again.
//!
//! Direct I/O wants aligned memory, and what comes over a socket is not. So a write's data are
//! copied once, where they are checksummed anyway; afterwards they are passed on by reference, and
//! nobody can change them any more.
#![allow(unsafe_code)]

use std::alloc::{self, Layout};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;
use blockyard_sync::tag_budget::TagBudget;

/// What addresses and lengths are multiples of, in bytes.
pub const ALIGN: usize = 4096;

/// Sizes that are kept: 4 KiB to 2 MiB, each twice the one before.
const CLASSES: usize = 10;

/// Buffers of one size that are kept when nobody uses them.
const KEPT_MAX: usize = 64;

/// Buffers at least as long lie in pages of this size where the system has them, of which the disk
/// is told one address instead of hundreds: a write of 1 MiB is done in four fifths of the time.
const LONG: usize = 128 << 10;
const HUGE: usize = 2 << 20;

/// With less memory than this a page of that size is too much.
const HUGE_FROM_BYTES: u64 = 16 << 20;

/// Memory that buffers lie in.
struct Chunk {
    base: NonNull<u8>,
    layout: Layout,
}

/// Bytes at an address that is a multiple of [`ALIGN`]: a part of a chunk that is nobody else's.
struct Aligned {
    base: NonNull<u8>,
    len: usize,
    /// There as long as one of its parts is.
    _chunk: Arc<Chunk>,
}

// SAFETY: it owns its memory, as a box does.
unsafe impl Send for Aligned {}
// SAFETY: `&Aligned` gives shared references to bytes only.
unsafe impl Sync for Aligned {}

// SAFETY: it owns its memory, as a box does, and says nothing of it.
unsafe impl Send for Chunk {}
// SAFETY: the same.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn new(len: usize, align: usize) -> Chunk {
        let layout =
            Layout::from_size_align(len, align).expect("lengths are bounded far below isize::MAX");
        // SAFETY: the size is not 0.
        let base = unsafe { alloc::alloc(layout) };
        let Some(base) = NonNull::new(base) else { alloc::handle_alloc_error(layout) };
        if align >= HUGE {
            // SAFETY: advice about memory of its own. Where it is not taken all works the same.
            unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        }
        // SAFETY: so many bytes were allocated.
        unsafe { base.write_bytes(0, len) };
        Chunk { base, layout }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout, and no part of it is there any more.
        unsafe { alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

impl Aligned {
    /// Parts of this length of a new chunk: one, or as many as a huge page has.
    fn parts(len: usize, huge: bool) -> impl Iterator<Item = Aligned> {
        let len = len.max(ALIGN);
        let is_huge = huge && (LONG..=HUGE).contains(&len);
        let (whole, align) = if is_huge { (HUGE, HUGE) } else { (len, ALIGN) };
        let chunk = Arc::new(Chunk::new(whole, align));
        (0..whole / len).map(move |part| {
            // SAFETY: it begins inside the chunk.
            let base = unsafe { chunk.base.byte_add(part * len) };
            Aligned { base, len, _chunk: Arc::clone(&chunk) }
        })
    }
}

/// The memory of a pool.
pub struct Memory {
    /// What is left, in units of [`ALIGN`].
    budget: TagBudget,
    huge: bool,
    shelves: [SleepLock<Vec<Aligned>, { ranks::SHELF }>; CLASSES],
}

impl Memory {
    /// Memory for so many bytes.
    pub fn new(limit_bytes: u64) -> Arc<Memory> {
        let units = (limit_bytes / ALIGN as u64).clamp(1, u64::from(u32::MAX) / 2);
        let shelves = std::array::from_fn(|_| SleepLock::new(Vec::new()));
        let huge = limit_bytes >= HUGE_FROM_BYTES;
        Arc::new(Memory { budget: TagBudget::new(units as u32), huge, shelves })
    }

    /// The size that a buffer of this length has, and its place among those that are kept.
    fn class(len: usize) -> (usize, usize) {
        let len = len.next_multiple_of(ALIGN).next_power_of_two();
        (len, (len / ALIGN).trailing_zeros() as usize)
    }

    /// A buffer, if there is memory for it.
    pub fn take(self: &Arc<Self>, len: usize) -> Option<Buffer> {
        let units = (Memory::class(len).0 / ALIGN) as u32;
        let got = self.budget.take(units);
        if got < units {
            self.budget.give(got);
            return None;
        }
        Some(self.make(len, units))
    }

    /// A buffer in any case: for what a bound elsewhere keeps few.
    pub fn take_beyond(self: &Arc<Self>, len: usize) -> Buffer {
        self.make(len, 0)
    }

    fn make(self: &Arc<Self>, len: usize, units: u32) -> Buffer {
        let (whole, class) = Memory::class(len);
        let kept = self.shelves.get(class).and_then(|shelf| shelf.with(Vec::pop));
        let memory = kept.unwrap_or_else(|| {
            let mut parts = Aligned::parts(whole, self.huge);
            let first = parts.next().expect("a chunk has a part");
            parts.for_each(|part| self.keep(part));
            first
        });
        Buffer { memory: Some(memory), len, units, home: Arc::clone(self) }
    }

    /// Puts a part back, unless as many are kept as may be.
    fn keep(&self, memory: Aligned) {
        let Some(shelf) = self.shelves.get(Memory::class(memory.len).1) else { return };
        let left = shelf.with(|shelf| {
            if shelf.len() < KEPT_MAX {
                shelf.push(memory);
                None
            } else {
                Some(memory)
            }
        });
        drop(left);
    }

    /// How many bytes are left.
    pub fn free_bytes(&self) -> u64 {
        u64::from(self.budget.free()) * ALIGN as u64
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("free_bytes", &self.free_bytes()).finish_non_exhaustive()
    }
}

/// Aligned bytes out of a [`Memory`], to which they return. Their contents are anything at first.
pub struct Buffer {
    /// There until it is dropped.
    memory: Option<Aligned>,
    len: usize,
    units: u32,
    home: Arc<Memory>,
}

impl Buffer {
    /// Makes it shorter.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    fn base(&self) -> NonNull<u8> {
        self.memory.as_ref().expect("it is there until the buffer is dropped").base
    }
}

impl Deref for Buffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the memory has at least `len` bytes, all of them initialised, and is borrowed.
        unsafe { std::slice::from_raw_parts(self.base().as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base().as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.memory.take().into_iter().for_each(|memory| self.home.keep(memory));
        self.home.budget.give(self.units);
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_ends_and_comes_back() {
        let memory = Memory::new(8 * ALIGN as u64);
        let mut one = memory.take(5000).unwrap();
        one.fill(7);
        assert_eq!((one.len(), one.as_ptr() as usize % ALIGN), (5000, 0));
        let two = memory.take(4 * ALIGN).unwrap();
        assert!(memory.take(3 * ALIGN).is_none(), "two are left");
        assert_eq!(memory.free_bytes(), 2 * ALIGN as u64);
        let beyond = memory.take_beyond(64 * ALIGN);
        drop((one, two, beyond));
        assert_eq!(memory.free_bytes(), 8 * ALIGN as u64);
        assert_eq!(memory.take(100).map(|it| it.len()), Some(100));
    }

    /// Parts of one page overlap nowhere, and the page is there as long as one of them is.
    #[test]
    fn long_buffers_share_large_pages() {
        let memory = Memory::new(HUGE_FROM_BYTES);
        let mut all: Vec<Buffer> = (0..16).map(|_| memory.take(LONG).unwrap()).collect();
        for (number, buffer) in (1..).zip(&mut all) {
            assert!(buffer.iter().all(|byte| *byte == 0));
            buffer.fill(number);
        }
        let page = |buffer: &Buffer| buffer.as_ptr() as usize / HUGE;
        assert!(all.iter().all(|it| page(it) == page(&all[0])));
        let seventeenth = memory.take(LONG).unwrap();
        assert_ne!(page(&seventeenth), page(&all[0]));
        drop(memory);
        let last = all.pop().unwrap();
        drop((all, seventeenth));
        assert!(last.iter().all(|byte| *byte == 16));
    }
}
