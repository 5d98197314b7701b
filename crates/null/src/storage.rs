//! The memory of a device: one mapping of its whole size, of which the system provides only the
//! written pages, and a bitmap of the pages that hold data.
//!
//! Even a read does not touch a page that was never written or was discarded: the bitmap says that
//! it is zero. So a device of terabytes takes memory, page tables included, only for written data.
//! The granularity is a page of 4 KiB. When the last page of an aligned 2 MiB range is written, the
//! system is asked to merge the range into one huge page. That costs no memory and saves address
//! translations: random reads of a large device then take about two thirds of the time.
//!
//! Concurrent I/O on the same sectors may tear, as on any disk. The bytes are copied through raw
//! pointers and no reference to them exists. A read that overlaps a write in time returns old
//! bytes, new bytes or a mixture.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use blockyard_sync::page_bitmap::PageBitmap;

use crate::copy::{self, Copier};
use crate::error::NullError;

/// Granularity of allocation in bytes.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// Size of a huge page.
const HUGE_BYTES: u64 = 2 << 20;
/// Pages in a huge page.
const HUGE_PAGES: u64 = HUGE_BYTES / PAGE_BYTES;
/// The file with the system's policy on transparent huge pages.
const HUGE_SETTING: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// A run of bytes of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ByteRun {
    pub(crate) len_bytes: u64,
    /// Whether the run was written; if not, it is zeros and takes no memory.
    pub(crate) written: bool,
}

/// The memory of a device.
#[derive(Debug)]
pub(crate) struct Storage {
    /// First byte of the device, within the mapping.
    base: NonNull<u8>,
    len_bytes: u64,
    mapping: NonNull<u8>,
    mapping_len: usize,
    written: PageBitmap,
    copier: Copier,
    /// A bit per huge page that was requested. Each range is requested only once: merging it again
    /// after every discard and rewrite of one page would not be worth the copy.
    gathered: PageBitmap,
    /// By policy the system would provide huge pages unasked; the mapping opted out.
    unasked: bool,
}

// SAFETY: the mapping is accessed only through raw pointers, as the head of this file describes;
// all other fields are Sync themselves.
unsafe impl Send for Storage {}
// SAFETY: as for Send.
unsafe impl Sync for Storage {}

impl Storage {
    /// Maps a device of `len_bytes` zeros.
    pub(crate) fn new(len_bytes: u64) -> Result<Storage, NullError> {
        let setting = std::fs::read_to_string(HUGE_SETTING);
        Storage::map(len_bytes, setting.is_ok_and(|setting| gives_unasked(&setting)))
    }

    /// Maps a device on a system that provides huge pages `unasked`, or does not.
    fn map(len_bytes: u64, unasked: bool) -> Result<Storage, NullError> {
        let refused = |errno| NullError::Memory { field: "size", value: len_bytes, errno };
        let pages = len_bytes.div_ceil(PAGE_BYTES);
        let mapping_len = usize::try_from(pages * PAGE_BYTES)
            .ok()
            .and_then(|len| len.checked_add(HUGE_BYTES as usize))
            .ok_or_else(|| refused(libc::ENOMEM))?;
        // Before the mapping: an early return would leak the mapping.
        let written = PageBitmap::new(pages).ok_or_else(|| refused(libc::ENOMEM))?;
        let gathered = PageBitmap::new(pages / HUGE_PAGES).ok_or_else(|| refused(libc::ENOMEM))?;
        // SAFETY: an anonymous mapping at an address that the system chooses touches no other
        // memory.
        let mapping = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapping_len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapping == libc::MAP_FAILED {
            return Err(refused(last_errno()));
        }
        let mapping = NonNull::new(mapping.cast::<u8>()).ok_or_else(|| refused(libc::ENOMEM))?;
        let skip = mapping.as_ptr().align_offset(HUGE_BYTES as usize);
        // SAFETY: `skip` is less than HUGE_BYTES, by which the mapping is longer than the device.
        let base = unsafe { mapping.add(skip) };
        // With a huge page for every first write, 4 KiB of data would take 2 MiB.
        if unasked {
            let rounded = (pages * PAGE_BYTES) as usize;
            // SAFETY: the range lies in the mapping. A system that does not know the advice returns
            // an error, and the mapping works in any case.
            unsafe { libc::madvise(base.as_ptr().cast(), rounded, libc::MADV_NOHUGEPAGE) };
        }
        Ok(Storage {
            base,
            len_bytes,
            mapping,
            mapping_len,
            written,
            copier: Copier::new(),
            gathered,
            unasked,
        })
    }

    /// Address of a byte of the device.
    ///
    /// # Panics
    /// If the range exceeds the device: the layers above have checked it.
    #[inline]
    fn address(&self, at: u64, len_bytes: u64) -> *mut u8 {
        let fits = at <= self.len_bytes && len_bytes <= self.len_bytes - at;
        assert!(fits, "{len_bytes} bytes at {at} lie beyond the device");
        // SAFETY: the assertion shows that the range lies on the device, which is inside the
        // mapping.
        unsafe { self.base.as_ptr().add(at as usize) }
    }

    /// Copies from the device. Prefetches the page at `soon`, an offset on the device that a later
    /// request reads.
    ///
    /// # Safety
    /// `into` must be valid for writes of `len_bytes`.
    #[inline]
    pub(crate) unsafe fn read(&self, at: u64, into: *mut u8, len_bytes: usize, soon: Option<u64>) {
        let soon = soon.map(|soon| self.address(soon, 0).cast_const());
        let from = self.address(at, len_bytes as u64);
        let page = at / PAGE_BYTES;
        let one_page = (at + len_bytes as u64).div_ceil(PAGE_BYTES) <= page + 1;
        if one_page && self.written.get(page) {
            // SAFETY: `address` checked the source, the caller's contract covers the destination,
            // and buffers lie outside of this mapping.
            unsafe { self.copier.copy(from, into, len_bytes, soon) };
        } else {
            if let Some(soon) = soon {
                copy::fetch(soon);
            }
            // SAFETY: this function's own contract.
            unsafe { self.read_runs(at, into, len_bytes) };
        }
    }

    /// Copies written pages, and writes zeros for the others.
    ///
    /// # Safety
    /// As for `read`.
    unsafe fn read_runs(&self, at: u64, into: *mut u8, len_bytes: usize) {
        let end = at + len_bytes as u64;
        let mut next = at;
        while next < end {
            let ByteRun { len_bytes: run, written } = self.run(next, end);
            let from = self.address(next, run);
            // SAFETY: the run lies between `at` and `end`, so both sides are valid by `read`'s
            // contract.
            unsafe {
                let into = into.add((next - at) as usize);
                if written {
                    into.copy_from_nonoverlapping(from, run as usize);
                } else {
                    into.write_bytes(0, run as usize);
                }
            }
            next += run;
        }
    }

    /// The run of one kind that starts at `at` and ends at or before `end`; `end` is above `at` and
    /// on the device.
    pub(crate) fn run(&self, at: u64, end: u64) -> ByteRun {
        let page = at / PAGE_BYTES;
        let (written, pages) = self.written.run(page, end.div_ceil(PAGE_BYTES));
        let run_end = ((page + pages) * PAGE_BYTES).min(end);
        ByteRun { len_bytes: run_end - at, written }
    }

    /// Copies to the device.
    ///
    /// # Safety
    /// `from` must be valid for reads of `len_bytes`.
    #[inline]
    pub(crate) unsafe fn write(&self, at: u64, from: *const u8, len_bytes: usize) {
        let into = self.address(at, len_bytes as u64);
        // SAFETY: `address` checked the destination, the caller's contract covers the source, and
        // buffers lie outside of this mapping.
        unsafe { into.copy_from_nonoverlapping(from, len_bytes) };
        self.mark(at, len_bytes as u64);
    }

    /// Marks a range as holding data; the data are already there.
    #[inline]
    pub(crate) fn mark(&self, at: u64, len_bytes: u64) {
        let (first, end) = (at / PAGE_BYTES, (at + len_bytes).div_ceil(PAGE_BYTES));
        if self.written.set_range(first, end) {
            self.gather(at, len_bytes);
        }
    }

    /// Requests huge pages for ranges whose last missing page this write completed.
    #[cold]
    fn gather(&self, at: u64, len_bytes: u64) {
        for huge in at / HUGE_BYTES..(at + len_bytes).div_ceil(HUGE_BYTES) {
            let page = huge * HUGE_PAGES;
            if page + HUGE_PAGES > self.written.pages()
                || self.written.run(page, page + HUGE_PAGES) != (true, HUGE_PAGES)
            {
                continue;
            }
            if !self.gathered.set(huge) {
                continue;
            }
            // A concurrent discard costs memory at most: pages freed before the merge are zeros in
            // the huge page, and pages freed later are freed from it. Pages whose bit is clear now
            // must not be freed: a writer may have copied its data and not set the bit yet.
            let len = HUGE_BYTES as usize;
            // SAFETY: the aligned range lies in the mapping, and its contents stay the same. A
            // system that does not support it returns an error, and the small pages stay.
            unsafe {
                let start = self.base.as_ptr().add((huge * HUGE_BYTES) as usize).cast();
                if self.unasked {
                    libc::madvise(start, len, libc::MADV_HUGEPAGE);
                }
                libc::madvise(start, len, libc::MADV_COLLAPSE);
                if self.unasked {
                    // The huge page stays; discarded parts come back as small pages.
                    libc::madvise(start, len, libc::MADV_NOHUGEPAGE);
                }
            }
        }
    }

    /// Zeroes a range. With `keep` it stays, or becomes, allocated; otherwise its whole pages are
    /// freed.
    pub(crate) fn zero(&self, at: u64, len_bytes: u64, keep: bool) {
        let into = self.address(at, len_bytes);
        if keep {
            // SAFETY: `address` checked the range.
            unsafe { into.write_bytes(0, len_bytes as usize) };
            self.mark(at, len_bytes);
            return;
        }
        let end = at + len_bytes;
        let first = at.next_multiple_of(PAGE_BYTES);
        // The last page of the device may be partial.
        let after = if end == self.len_bytes { end.next_multiple_of(PAGE_BYTES) } else { end };
        let after = after / PAGE_BYTES * PAGE_BYTES;
        if first >= after {
            self.zero_in_page(at, len_bytes);
            return;
        }
        self.zero_in_page(at, first - at);
        self.free(first, after);
        self.zero_in_page(after, end.saturating_sub(after));
    }

    /// Writes zeros to a part of one or two pages, if they hold data.
    fn zero_in_page(&self, at: u64, len_bytes: u64) {
        let end = at + len_bytes;
        let mut next = at;
        while next < end {
            let page_end = (next / PAGE_BYTES + 1) * PAGE_BYTES;
            let part = page_end.min(end) - next;
            if self.written.get(next / PAGE_BYTES) {
                // SAFETY: `address` checks the range.
                unsafe { self.address(next, part).write_bytes(0, part as usize) };
            }
            next += part;
        }
    }

    /// Frees whole pages: first clears their bits, then returns the memory.
    fn free(&self, first: u64, after: u64) {
        self.written.clear(first / PAGE_BYTES, after / PAGE_BYTES);
        let len = (after - first) as usize;
        // SAFETY: both ends are page boundaries of the mapping; private anonymous memory reads as
        // zeros after MADV_DONTNEED.
        let answer = unsafe {
            libc::madvise(self.base.as_ptr().add(first as usize).cast(), len, libc::MADV_DONTNEED)
        };
        assert_eq!(answer, 0, "our own pages can be freed: errno {}", last_errno());
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        // SAFETY: `map` created this mapping, and no borrow of it exists.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.mapping_len) };
    }
}

/// Whether a system with this policy provides huge pages unasked. The file lists all values, with
/// the current one in brackets.
fn gives_unasked(setting: &str) -> bool {
    setting.split_whitespace().any(|word| word == "[always]")
}

fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Resident pages of the process.
#[cfg(test)]
pub(crate) fn resident_pages() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse().unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(storage: &Storage, at: u64, data: &[u8]) {
        // SAFETY: a slice is valid for its length.
        unsafe { storage.write(at, data.as_ptr(), data.len()) }
    }

    fn read(storage: &Storage, at: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0xaa; len];
        // SAFETY: a vector is valid for its length.
        unsafe { storage.read(at, data.as_mut_ptr(), len, None) };
        data
    }

    #[test]
    fn matches_vector_model() {
        const LEN: u64 = 40 * PAGE_BYTES + 1024;
        let storage = Storage::new(LEN).unwrap();
        let mut plain = vec![0u8; LEN as usize];
        let mut random = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        for round in 0..3000u64 {
            let at = next(LEN / 512) * 512;
            let len = (512 * (1 + next(40))).min(LEN - at);
            let range = at as usize..(at + len) as usize;
            match next(4) {
                0 => {
                    let data = vec![round as u8 | 1; len as usize];
                    write(&storage, at, &data);
                    plain[range].copy_from_slice(&data);
                }
                1 => {
                    storage.zero(at, len, next(2) == 0);
                    plain[range].fill(0);
                }
                2 => assert_eq!(read(&storage, at, len as usize), plain[range], "{round}"),
                _ => {
                    let run = storage.run(at, at + len);
                    assert!(run.len_bytes > 0 && run.len_bytes <= len);
                    let kind = at as usize..(at + run.len_bytes) as usize;
                    assert!(run.written || plain[kind].iter().all(|&byte| byte == 0));
                }
            }
        }
        assert_eq!(read(&storage, 0, LEN as usize), plain);
        storage.zero(0, LEN, false);
        assert_eq!(storage.run(0, LEN), ByteRun { len_bytes: LEN, written: false });
    }

    /// Number of resident pages in a range.
    fn resident(storage: &Storage, at: u64, len_bytes: u64) -> usize {
        let mut pages = vec![0u8; (len_bytes / PAGE_BYTES) as usize];
        let start = storage.address(at, len_bytes).cast();
        // SAFETY: the range is the mapping's own, and there is a byte for each of its pages.
        let answer = unsafe { libc::mincore(start, len_bytes as usize, pages.as_mut_ptr()) };
        assert_eq!(answer, 0, "errno {}", last_errno());
        pages.iter().filter(|&&page| page & 1 == 1).count()
    }

    #[test]
    fn selected_huge_page_setting_is_read() {
        assert!(gives_unasked("[always] madvise never\n"));
        for setting in ["always [madvise] never\n", "always madvise [never]\n", "always\n", ""] {
            assert!(!gives_unasked(setting), "{setting}");
        }
    }

    #[test]
    fn huge_pages_keep_data() {
        // Both policies are tested, whatever this system's is.
        for unasked in [false, true] {
            let storage = Storage::map(3 * HUGE_BYTES + PAGE_BYTES, unasked).unwrap();
            let byte = |page: u64| (page % 251) as u8 + 1;
            // Writes the pages in an order that leaves one in the middle for last, which completes
            // the range.
            let pages =
                (HUGE_PAGES..HUGE_PAGES + 256).rev().chain(HUGE_PAGES + 257..2 * HUGE_PAGES);
            for page in pages.chain([HUGE_PAGES + 256]) {
                assert!(!storage.gathered.get(1));
                write(&storage, page * PAGE_BYTES, &[byte(page); PAGE_BYTES as usize]);
            }
            let gathered = [0, 1, 2].map(|huge| storage.gathered.get(huge));
            assert_eq!(gathered, [false, true, false]);
            let holds = |page: u64, byte| {
                read(&storage, page * PAGE_BYTES, PAGE_BYTES as usize).iter().all(|&b| b == byte)
            };
            for page in HUGE_PAGES..2 * HUGE_PAGES {
                assert!(holds(page, byte(page)), "page {page}, unasked {unasked}");
            }
            assert_eq!(resident(&storage, HUGE_BYTES, HUGE_BYTES), HUGE_PAGES as usize);

            // A page of the huge page is discarded and written again.
            let page = HUGE_PAGES + 7;
            storage.zero(page * PAGE_BYTES, PAGE_BYTES, false);
            assert_eq!(resident(&storage, page * PAGE_BYTES, PAGE_BYTES), 0);
            assert!(holds(page, 0) && holds(page - 1, byte(page - 1)));
            write(&storage, page * PAGE_BYTES, &[9; PAGE_BYTES as usize]);
            assert!(holds(page, 9) && holds(page + 1, byte(page + 1)));

            // The whole range is discarded, and the memory is returned to the system.
            storage.zero(HUGE_BYTES, HUGE_BYTES, false);
            assert_eq!(resident(&storage, HUGE_BYTES, HUGE_BYTES), 0);
            assert!(read(&storage, HUGE_BYTES, HUGE_BYTES as usize).iter().all(|&b| b == 0));
            assert_eq!(resident(&storage, HUGE_BYTES, HUGE_BYTES), 0, "reads touch nothing");
            write(&storage, HUGE_BYTES, &[5; PAGE_BYTES as usize]);
            assert!(holds(HUGE_PAGES, 5) && holds(HUGE_PAGES + 1, 0));
            if unasked {
                let pages = resident(&storage, HUGE_BYTES, HUGE_BYTES);
                assert_eq!(pages, 1, "what comes back is small");
            }
        }
    }

    #[test]
    fn sparse_ten_terabytes_use_memory_for_written_pages_only() {
        const LEN: u64 = 10 << 40;
        let before = resident_pages();
        let storage = Storage::new(LEN).unwrap();
        for part in 0..64 {
            write(&storage, part * (LEN / 64), &[7; 4096]);
        }
        assert_eq!(read(&storage, LEN - 4096, 4096), [0; 4096]);
        let hole = ByteRun { len_bytes: LEN / 64 - 4096, written: false };
        assert_eq!(storage.run(4096, LEN), hole);
        // One page of data, and one or two each of page tables and bitmap; other tests run
        // concurrently.
        let grown = resident_pages().saturating_sub(before) * 4096;
        assert!(grown < 64 << 20, "{grown} bytes");
    }
}
