//! Aligned memory with a limit, whose buffers are reused.
//!
//! Direct I/O needs aligned memory, and data from a socket are not aligned. A write's data are
//! therefore copied once, together with the checksum. From then on they are passed by reference,
//! and no code can change them.
#![allow(unsafe_code)]

use std::alloc::{self, Layout};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;
use blockyard_sync::tag_semaphore::TagSemaphore;

/// Alignment of addresses and lengths, in bytes.
pub const ALIGN: usize = 4096;

/// Number of size classes that are cached: 4 KiB to 4 MiB by powers of two, and from 12 KiB on one
/// between each two. An encrypted block is a little longer than a power of two.
const CLASSES: usize = 21;

/// Unused buffers of a size class are cached as long as they are a smaller part of the limit than
/// this (1/4), or few.
const KEPT_PART: u64 = 4;
const KEPT_MIN: usize = 4;

/// Buffers of at least this length, in bytes, lie in huge pages where the system has them. The disk
/// then gets one address instead of hundreds: a write of 1 MiB takes four fifths of the time.
const LONG: usize = 128 << 10;
const HUGE: usize = 2 << 20;

/// A pool with less memory than this, in bytes, uses no huge pages: one would be too large a share.
const HUGE_FROM_BYTES: u64 = 16 << 20;

/// An allocation that buffers lie in.
struct Chunk {
    base: NonNull<u8>,
    layout: Layout,
}

/// Bytes at an address that is a multiple of [`ALIGN`]: a part of a chunk that has no other owner.
struct Aligned {
    base: NonNull<u8>,
    len: usize,
    /// Keeps the chunk allocated as long as one of its parts exists.
    _chunk: Arc<Chunk>,
}

// SAFETY: an `Aligned` owns its part of the chunk exclusively, as a box does.
unsafe impl Send for Aligned {}
// SAFETY: `&Aligned` gives only shared references to the bytes.
unsafe impl Sync for Aligned {}

// SAFETY: a `Chunk` owns its memory, as a box does, and gives no access to the bytes.
unsafe impl Send for Chunk {}
// SAFETY: a `&Chunk` gives no access to the bytes.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn new(len: usize, align: usize) -> Chunk {
        let layout =
            Layout::from_size_align(len, align).expect("lengths are bounded far below isize::MAX");
        // SAFETY: the layout's size is not 0.
        let base = unsafe { alloc::alloc(layout) };
        let Some(base) = NonNull::new(base) else { alloc::handle_alloc_error(layout) };
        if align >= HUGE {
            // SAFETY: `madvise` gets memory that this chunk owns. The advice is optional: if it
            // fails, the memory works as well.
            unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        }
        // SAFETY: `len` bytes were allocated at `base`.
        unsafe { base.write_bytes(0, len) };
        Chunk { base, layout }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated with this layout, and no part of the chunk exists any
        // more.
        unsafe { alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

impl Aligned {
    /// Allocates a chunk and divides it into parts of this length: one, or those that fill a huge
    /// page.
    fn parts(len: usize, huge: bool) -> impl Iterator<Item = Aligned> {
        let len = len.max(ALIGN);
        let is_huge = huge && (LONG..=HUGE).contains(&len);
        let (whole, align) = if is_huge { (HUGE, HUGE) } else { (len, ALIGN) };
        let chunk = Arc::new(Chunk::new(whole, align));
        (0..whole / len).map(move |part| {
            // SAFETY: the part begins inside the chunk.
            let base = unsafe { chunk.base.byte_add(part * len) };
            Aligned { base, len, _chunk: Arc::clone(&chunk) }
        })
    }
}

/// The buffer memory of a pool.
pub struct Memory {
    /// Memory left below the limit, in units of [`ALIGN`].
    budget: TagSemaphore,
    huge: bool,
    /// Most bytes of unused buffers of a size class.
    kept_bytes_max: u64,
    shelves: [SleepLock<Vec<Aligned>, { ranks::SHELF }>; CLASSES],
}

impl Memory {
    /// Makes a memory with a limit in bytes.
    pub fn new(limit_bytes: u64) -> Arc<Memory> {
        let units = (limit_bytes / ALIGN as u64).clamp(1, u64::from(u32::MAX) / 2);
        let shelves = std::array::from_fn(|_| SleepLock::new(Vec::new()));
        let huge = limit_bytes >= HUGE_FROM_BYTES;
        let (budget, kept_bytes_max) = (TagSemaphore::new(units as u32), limit_bytes / KEPT_PART);
        Arc::new(Memory { budget, huge, kept_bytes_max, shelves })
    }

    /// The size class of a length: the rounded length in bytes and the index of its shelf.
    fn class(len: usize) -> (usize, usize) {
        let len = len.next_multiple_of(ALIGN);
        let long = len.next_power_of_two();
        let class = 2 * (long / ALIGN).trailing_zeros() as usize;
        match long / 4 * 3 {
            between if between >= len && between.is_multiple_of(ALIGN) => (between, class - 1),
            _ => (long, class),
        }
    }

    /// Takes a buffer, if the limit allows it.
    #[inline]
    pub fn take(self: &Arc<Self>, len: usize) -> Option<Buffer> {
        let units = (Memory::class(len).0 / ALIGN) as u32;
        let got = self.budget.take(units);
        if got < units {
            self.budget.give(got);
            return None;
        }
        Some(self.make(len, units))
    }

    /// Takes a buffer regardless of the limit, for uses whose number is bounded elsewhere.
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

    /// Returns a part to its shelf, or frees it if the shelf is full.
    fn keep(&self, memory: Aligned) {
        let Some(shelf) = self.shelves.get(Memory::class(memory.len).1) else { return };
        let count_max = KEPT_MIN.max((self.kept_bytes_max / memory.len as u64) as usize);
        let left = shelf.with(|shelf| {
            if shelf.len() < count_max {
                shelf.push(memory);
                None
            } else {
                Some(memory)
            }
        });
        drop(left);
    }

    /// Bytes left below the limit.
    pub fn free_bytes(&self) -> u64 {
        u64::from(self.budget.free()) * ALIGN as u64
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("free_bytes", &self.free_bytes()).finish_non_exhaustive()
    }
}

/// Aligned bytes from a [`Memory`], to which they return when dropped. The initial contents are
/// arbitrary.
pub struct Buffer {
    /// `Some` until the buffer is dropped.
    memory: Option<Aligned>,
    len: usize,
    units: u32,
    home: Arc<Memory>,
}

impl Buffer {
    /// Shortens the buffer to at most `len` bytes.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    #[inline]
    fn base(&self) -> NonNull<u8> {
        self.memory.as_ref().expect("it is there until the buffer is dropped").base
    }
}

impl Deref for Buffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the memory has at least `len` bytes, all initialised, and is borrowed with the
        // buffer.
        unsafe { std::slice::from_raw_parts(self.base().as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the memory has at least `len` bytes, all initialised, and is borrowed mutably
        // with the buffer.
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

/// Memory for intermediate results: empty at first, and as long as the longest use so far.
#[derive(Debug)]
pub struct ScratchBuffer {
    memory: Arc<Memory>,
    buffer: Option<Buffer>,
}

impl ScratchBuffer {
    /// Takes nothing yet.
    pub fn new(memory: &Arc<Memory>) -> ScratchBuffer {
        ScratchBuffer { memory: Arc::clone(memory), buffer: None }
    }

    /// The first `len` bytes, with arbitrary contents. Takes a longer buffer if necessary,
    /// regardless of the memory's limit.
    #[inline]
    pub fn first(&mut self, len: usize) -> &mut [u8] {
        if self.len() < len {
            self.buffer = None;
        }
        let memory = &self.memory;
        let take = || memory.take_beyond(len.next_power_of_two());
        &mut self.buffer.get_or_insert_with(take)[..len]
    }
}

impl Deref for ScratchBuffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.buffer.as_deref().unwrap_or_default()
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

    #[test]
    fn scratch_memory_grows_to_its_longest_use() {
        let mut scratch = ScratchBuffer::new(&Memory::new(1));
        assert!(scratch.is_empty());
        assert_eq!(scratch.first(5000).len(), 5000);
        scratch.first(5000).fill(7);
        assert_eq!(scratch.first(6000)[..5000], [7; 5000], "8192 bytes are there");
        assert_eq!(scratch.first(10_000).len(), 10_000);
        assert_eq!(scratch.first(100).len(), 100);
        assert!(scratch.len() >= 10_000);
    }

    #[test]
    fn lengths_are_rounded_up_to_their_classes() {
        let pages = |pages: usize| (pages * ALIGN, Memory::class(pages * ALIGN));
        for (len, (whole, class)) in (1..=1024).map(pages) {
            assert!(whole >= len && whole % ALIGN == 0 && class < CLASSES, "{len}");
            assert!(whole <= len / 2 * 3, "{len} in {whole}");
            assert_eq!(Memory::class(whole), (whole, class), "a buffer returns to its shelf");
        }
        assert_eq!(Memory::class(16_896), (24 << 10, 5));
    }

    /// Parts of one huge page do not overlap, and the page stays allocated as long as one part
    /// exists.
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
