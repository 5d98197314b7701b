//! The address range of a pool, and the pages that the system provides for it.
//!
//! The whole range is reserved at once, so that an object's place is its address. The pool asks for
//! pages explicitly and returns them explicitly. Under Miri, which lacks these system calls, the
//! range is memory from the allocator.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use crate::prefetch::{prefetch, prefetch_to_write};

/// Page size of the system.
pub(super) const PAGE_BYTES: usize = 4096;
/// Size of a huge page, which [`Memory::gather`] makes.
pub(super) const HUGE_BYTES: usize = 2 << 20;

/// A reserved range of addresses.
#[derive(Debug)]
pub(super) struct Memory {
    /// Aligned to [`HUGE_BYTES`] within the mapping, which is longer by that much.
    base: NonNull<u8>,
    len_bytes: usize,
    #[cfg(not(miri))]
    mapping: NonNull<u8>,
}

// SAFETY: the memory is accessed only through raw pointers, by the contracts of the functions
// below.
unsafe impl Send for Memory {}
// SAFETY: as for Send.
unsafe impl Sync for Memory {}

impl Memory {
    /// The address of an offset.
    #[inline]
    fn address(&self, at: u64, len_bytes: usize) -> *mut u8 {
        let fits = at <= self.len_bytes as u64 && len_bytes as u64 <= self.len_bytes as u64 - at;
        assert!(fits, "{len_bytes} bytes at {at} lie beyond the pool");
        // SAFETY: the assertion shows that the range lies in the reserved one.
        unsafe { self.base.as_ptr().add(at as usize) }
    }

    /// Copies an object in.
    ///
    /// # Safety
    /// The range was allocated to the caller, and no other thread accesses it before it is
    /// published.
    #[inline]
    pub(super) unsafe fn write(&self, at: u64, bytes: &[u8]) {
        let to = self.address(at, bytes.len());
        // SAFETY: the range is reserved and belongs to the caller, so nothing overlaps.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Prefetches a range, all lines at once: a codec that reads it line by line would wait for
    /// most of them. The contents do not matter, and a prefetch has no visible effect.
    #[inline]
    pub(super) fn fetch(&self, at: u64, len_bytes: usize) {
        prefetch(self.address(at, len_bytes), len_bytes);
    }

    /// Prefetches a range, or its first page, that is about to be written.
    #[inline]
    pub(super) fn fetch_to_write(&self, at: u64, len_bytes: usize) {
        prefetch_to_write(self.address(at, len_bytes), len_bytes.min(PAGE_BYTES));
    }

    /// An object's bytes.
    ///
    /// # Safety
    /// The range holds an object that was written before and is not freed during `'g`.
    #[inline]
    pub(super) unsafe fn bytes<'g>(&self, at: u64, len_bytes: usize) -> &'g [u8] {
        let from = self.address(at, len_bytes);
        // SAFETY: the range is reserved; its bytes were written and do not change during `'g`.
        unsafe { std::slice::from_raw_parts(from, len_bytes) }
    }
}

/// Reserves addresses of whole pages. They take no memory until they are touched.
///
/// # Errors
/// The system's error number.
#[cfg(not(miri))]
pub(super) fn map(len_bytes: usize) -> Result<NonNull<u8>, i32> {
    // SAFETY: an anonymous mapping at an address that the system chooses touches no other memory.
    let mapping = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if mapping == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::ENOMEM));
    }
    NonNull::new(mapping.cast::<u8>()).ok_or(libc::ENOMEM)
}

#[cfg(not(miri))]
impl Memory {
    /// Reserves addresses, which take no memory.
    ///
    /// # Errors
    /// The system's error number.
    pub(super) fn reserve(len_bytes: usize) -> Result<Memory, i32> {
        let mapping = map(len_bytes.checked_add(HUGE_BYTES).ok_or(libc::ENOMEM)?)?;
        let skip = mapping.as_ptr().align_offset(HUGE_BYTES);
        // SAFETY: `skip` is less than HUGE_BYTES, by which the mapping is longer.
        let base = unsafe { mapping.add(skip) };
        // The system must not provide a huge page for a small one: the limit counts pages in use.
        // SAFETY: the range is the mapping. A system that does not know the advice returns an
        // error.
        unsafe { libc::madvise(base.as_ptr().cast(), len_bytes, libc::MADV_NOHUGEPAGE) };
        Ok(Memory { base, len_bytes, mapping })
    }

    /// Asks the system to merge the pages of one huge page's range, all present, into a huge page.
    /// Reads and writes of the range can continue concurrently.
    pub(super) fn gather(&self, at: u64) {
        let start = self.address(at, HUGE_BYTES).cast();
        // SAFETY: the aligned range lies in the mapping, and its contents stay the same. A system
        // that does not support it returns an error, and the small pages stay.
        unsafe {
            libc::madvise(start, HUGE_BYTES, libc::MADV_HUGEPAGE);
            libc::madvise(start, HUGE_BYTES, libc::MADV_COLLAPSE);
            // The huge page stays; pages that are returned and requested again are small ones.
            libc::madvise(start, HUGE_BYTES, libc::MADV_NOHUGEPAGE);
        }
    }

    /// Asks the system for the pages of a range; `false` if it has none.
    pub(super) fn populate(&self, at: u64, len_bytes: usize) -> bool {
        let start = self.address(at, len_bytes);
        // SAFETY: the range lies in the mapping; populating does not change contents.
        let done = unsafe { libc::madvise(start.cast(), len_bytes, libc::MADV_POPULATE_WRITE) };
        // Kernels before 5.14 do not know the advice and provide pages at the first access.
        done == 0 || std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL)
    }

    /// Returns the pages of a range to the system. The range then reads as zeros. `gathered` says
    /// that it may be part of a huge page.
    ///
    /// # Safety
    /// The range holds no object, and none is allocated in it concurrently.
    pub(super) unsafe fn give_back(&self, at: u64, len_bytes: usize, gathered: bool) {
        let start = self.address(at, len_bytes);
        if gathered && len_bytes < HUGE_BYTES {
            // The kernel does not free a part of a huge page until memory is short and it looks for
            // such pages. MADV_COLD on a part makes it split the huge page at once.
            // SAFETY: the range lies in the mapping; the advice does not change contents.
            unsafe { libc::madvise(start.cast(), len_bytes, libc::MADV_COLD) };
        }
        // SAFETY: the range lies in the mapping, and no thread reads its contents.
        unsafe { libc::madvise(start.cast(), len_bytes, libc::MADV_DONTNEED) };
    }
}

#[cfg(not(miri))]
impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and every reference to it has ended with the pool.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.len_bytes + HUGE_BYTES) };
    }
}

/// Memory from the allocator, for Miri.
#[cfg(miri)]
impl Memory {
    fn layout(len_bytes: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(len_bytes, PAGE_BYTES).expect("tests reserve little")
    }

    pub(super) fn reserve(len_bytes: usize) -> Result<Memory, i32> {
        // SAFETY: the length is not 0: a pool has at least one segment.
        let base = unsafe { std::alloc::alloc(Memory::layout(len_bytes)) };
        Ok(Memory { base: NonNull::new(base).ok_or(libc::ENOMEM)?, len_bytes })
    }

    pub(super) fn gather(&self, _: u64) {}

    pub(super) fn populate(&self, _: u64, _: usize) -> bool {
        true
    }

    pub(super) unsafe fn give_back(&self, at: u64, len_bytes: usize, _: bool) {
        let start = self.address(at, len_bytes);
        // Miri reports any concurrent access.
        // SAFETY: no other thread accesses the range, by this function's contract.
        unsafe { std::ptr::write_bytes(start, 0, len_bytes) };
    }
}

#[cfg(miri)]
impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by `reserve` with this layout.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), Memory::layout(self.len_bytes)) };
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use blockyard_testing::capability::Capability;

    use super::*;

    /// Whether the page at an address is part of a huge page, according to the kernel. `None` if
    /// the process lacks the privilege to read it.
    fn is_huge(address: *const u8) -> Option<bool> {
        const HUGE: u64 = 1 << 22;
        let entry = |file: &str, index: u64| {
            let mut word = [0; 8];
            File::open(file).ok()?.read_exact_at(&mut word, index * 8).ok()?;
            Some(u64::from_ne_bytes(word))
        };
        let mapped = entry("/proc/self/pagemap", (address as usize / PAGE_BYTES) as u64)?;
        // The lower 55 bits are the frame number; it reads as 0 without the privilege to see it.
        let frame = Some(mapped & ((1 << 55) - 1)).filter(|frame| *frame > 0)?;
        Some(entry("/proc/kpageflags", frame)? & HUGE != 0)
    }

    #[test]
    fn a_part_of_a_huge_page_that_is_given_back_is_free() {
        let memory = Memory::reserve(2 * HUGE_BYTES).unwrap();
        assert!(memory.populate(0, 2 * HUGE_BYTES));
        // SAFETY: the range belongs to this test, and no other thread accesses it.
        unsafe { memory.write(0, &[7; 100]) };
        // SAFETY: as above.
        unsafe { memory.write(256 << 10, &[9; 100]) };
        memory.gather(0);
        let first = memory.address(0, 1);
        match is_huge(first) {
            Some(true) => {}
            Some(false) => {
                return Capability::HugePages.is_missing("the kernel made no huge page");
            }
            None => return Capability::HugePages.is_missing("/proc/kpageflags needs root"),
        }
        // SAFETY: as above.
        unsafe { memory.give_back(256 << 10, 256 << 10, true) };
        assert_eq!(is_huge(first), Some(false), "what is left of it is small pages");
        // SAFETY: as above; the first bytes were written, and the others are zeros again.
        let (kept, gone) = unsafe { (memory.bytes(0, 100), memory.bytes(256 << 10, 100)) };
        assert!(kept == [7; 100] && gone == [0; 100]);
    }
}
