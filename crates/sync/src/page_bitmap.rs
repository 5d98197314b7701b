//! Primitive: the bitmap of pages that hold data.
//!
//! Protects   the information that a page was never written: a bit per page.
//! Why        a device of terabytes holds memory only for written pages, and reports the rest as
//!            holes; and a read of a hole must not even cost page tables.
//! States     clear: the page reads as zeros, and its memory is untouched or about to be freed.
//!            Set: the memory is the data.
//! Order      no lock. A writer first copies and then sets the bit; a discard first clears the bit
//!            and then frees the memory, with a full fence between the two steps on either side. So
//!            a reader that sees the bit sees the data, and another reader finds zeros, the
//!            contents before the write or after the discard. If a race leaves the bit clear, the
//!            page was freed after the copy: no old data remains under it for the next write.
//! Common     one load of a word that shares its cache line with 511 other pages; a fence per
//!            write.
//! Cost       a read-modify-write only for the first write to a page; the fence costs about 20
//!            cycles.
//! Before     a tree of pages under the device's lock.
//!
//! A summary has one bit per [`CHUNK_PAGES`] pages. It is set before the first bit of its chunk and
//! never cleared: a scan of ten empty terabytes reads about ten thousand words.

use crate::atomics::{AtomicU64, Ordering, fence};

/// Pages per word of the bitmap.
const WORD_PAGES: u64 = 64;
/// Pages per bit of the summary.
pub const CHUNK_PAGES: u64 = 64 * WORD_PAGES;

/// A bit per page, all clear at first. The memory of the bitmap is touched only where bits are set.
#[derive(Debug)]
pub struct PageBitmap {
    words: Box<[AtomicU64]>,
    summary: Box<[AtomicU64]>,
    pages: u64,
}

impl PageBitmap {
    /// A clear bitmap of `pages` pages; `None` if there is not enough memory.
    pub fn new(pages: u64) -> Option<PageBitmap> {
        let words = zeroed(pages.div_ceil(WORD_PAGES))?;
        let summary = zeroed(pages.div_ceil(CHUNK_PAGES).div_ceil(u64::from(u64::BITS)))?;
        Some(PageBitmap { words, summary, pages })
    }

    /// Number of pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether the page holds data.
    #[inline]
    pub fn get(&self, page: u64) -> bool {
        // Acquire: pairs with the Release in `set`, so that the data is seen with the bit.
        let word = self.words[(page / WORD_PAGES) as usize].load(Ordering::Acquire);
        word >> (page % WORD_PAGES) & 1 != 0
    }

    /// Marks a page as holding data, which has been copied before; returns whether its bit was
    /// clear.
    #[inline]
    pub fn set(&self, page: u64) -> bool {
        self.set_range(page, page + 1)
    }

    /// Marks the pages from `first` to before `end` as holding data, which has been copied before;
    /// returns whether any of their bits was clear.
    #[inline]
    pub fn set_range(&self, first: u64, end: u64) -> bool {
        // Keeps the copy before the load of the bit; pairs with the fence in `clear`. Without it a
        // writer may see the bit as it was before a discard, and its copy may become visible after
        // the memory was freed. Then data would lie under a clear bit, and the next write would
        // expose it.
        fence(Ordering::SeqCst);
        let mut new = false;
        for page in first..end {
            let (word, bit) = (&self.words[(page / WORD_PAGES) as usize], 1 << (page % WORD_PAGES));
            // Relaxed: if the bit is set already, there is nothing new to publish. A concurrent
            // discard of the same page may win, as on any disk.
            if word.load(Ordering::Relaxed) & bit == 0 {
                self.set_first(page, word, bit);
                new = true;
            }
        }
        new
    }

    #[cold]
    fn set_first(&self, page: u64, word: &AtomicU64, bit: u64) {
        let chunk = page / CHUNK_PAGES;
        let summary = &self.summary[(chunk / 64) as usize];
        if summary.load(Ordering::Relaxed) >> (chunk % 64) & 1 == 0 {
            summary.fetch_or(1 << (chunk % 64), Ordering::Relaxed);
        }
        // Release: pairs with the Acquire in `get` and `run`. It also orders the summary before the
        // bit, for a thread that has seen the bit.
        word.fetch_or(bit, Ordering::Release);
    }

    /// Marks the pages from `first` to before `end` as empty; the caller frees their memory
    /// afterwards. Skips chunks that were never written.
    pub fn clear(&self, first: u64, end: u64) {
        let end = end.min(self.pages);
        let mut page = first;
        while page < end {
            if page.is_multiple_of(CHUNK_PAGES) && !self.chunk_touched(page / CHUNK_PAGES) {
                page += CHUNK_PAGES;
                continue;
            }
            let (bit, word_end) = (page % WORD_PAGES, page - page % WORD_PAGES + WORD_PAGES);
            let mut mask = u64::MAX << bit;
            if end < word_end {
                mask &= u64::MAX >> (word_end - end);
            }
            let word = &self.words[(page / WORD_PAGES) as usize];
            if word.load(Ordering::Relaxed) & mask != 0 {
                // Relaxed: the fence below orders it.
                word.fetch_and(!mask, Ordering::Relaxed);
            }
            page = word_end;
        }
        // Keeps the clearing before the freeing; pairs with the fence in `set_range`.
        fence(Ordering::SeqCst);
    }

    /// Whether `page` holds data, and how many pages from it on are equal in this, at most up to
    /// `end`. `page` must be below `end`.
    pub fn run(&self, page: u64, end: u64) -> (bool, u64) {
        let end = end.min(self.pages);
        debug_assert!(page < end);
        let kind = self.get(page);
        let mut at = page;
        while at < end {
            if !kind && at.is_multiple_of(CHUNK_PAGES) && !self.chunk_touched(at / CHUNK_PAGES) {
                at += CHUNK_PAGES;
                continue;
            }
            // Acquire: as in `get`.
            let word = self.words[(at / WORD_PAGES) as usize].load(Ordering::Acquire);
            let other = (if kind { !word } else { word }) >> (at % WORD_PAGES);
            if other != 0 {
                at += u64::from(other.trailing_zeros());
                break;
            }
            at += WORD_PAGES - at % WORD_PAGES;
        }
        (kind, at.min(end) - page)
    }

    fn chunk_touched(&self, chunk: u64) -> bool {
        let word = self.summary[(chunk / 64) as usize].load(Ordering::Relaxed);
        word >> (chunk % 64) & 1 != 0
    }
}

/// Zeroed words; the system provides their memory when they are first written. `None` if the system
/// refuses.
#[cfg(not(loom))]
#[allow(unsafe_code)]
pub(crate) fn zeroed(words: u64) -> Option<Box<[AtomicU64]>> {
    let words = usize::try_from(words).ok()?;
    if words == 0 {
        return Some(Box::default());
    }
    let layout = std::alloc::Layout::array::<AtomicU64>(words).ok()?;
    // SAFETY: the size of the layout is not 0.
    let start = unsafe { std::alloc::alloc_zeroed(layout) };
    if start.is_null() {
        return None;
    }
    // SAFETY: the allocator of boxes allocated the memory with the layout of such a slice. It has
    // no other owner, and zeros are a valid value of an AtomicU64.
    Some(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(start.cast(), words)) })
}

#[cfg(loom)]
pub(crate) fn zeroed(words: u64) -> Option<Box<[AtomicU64]>> {
    Some((0..words).map(|_| AtomicU64::new(0)).collect())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn matches_vector_model() {
        let pages = 3 * CHUNK_PAGES + 77;
        let map = PageBitmap::new(pages).unwrap();
        let mut plain = vec![false; pages as usize];
        let mut random = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        for round in 0..2000 {
            let first = next(pages);
            let end = (first + 1 + next(if round % 50 == 0 { pages } else { 300 })).min(pages);
            if next(3) == 0 {
                map.clear(first, end);
                plain[first as usize..end as usize].fill(false);
            } else {
                (first..end).for_each(|page| assert_eq!(map.set(page), !plain[page as usize]));
                plain[first as usize..end as usize].fill(true);
            }
            let from = next(pages);
            let kind = plain[from as usize];
            let run = plain[from as usize..].iter().take_while(|&&p| p == kind).count() as u64;
            assert_eq!(map.run(from, pages), (kind, run), "round {round} at {from}");
            assert_eq!(map.get(from), kind);
        }
    }

    #[test]
    fn bitmap_larger_than_memory_is_refused() {
        assert!(PageBitmap::new(u64::MAX >> 4).is_none());
    }

    #[test]
    fn huge_empty_bitmap_is_one_run() {
        let pages = 10 << 40 >> 12;
        let map = PageBitmap::new(pages).unwrap();
        assert_eq!(map.run(0, pages), (false, pages));
        map.set(pages - 1);
        assert_eq!(map.run(5, pages), (false, pages - 6));
        assert_eq!(map.run(5, 100), (false, 95));
        map.clear(0, pages);
        assert_eq!(map.run(0, pages), (false, pages));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::atomics::AtomicU32;
    use loom::sync::Arc;

    #[test]
    fn set_bit_implies_visible_data() {
        loom::model(|| {
            let map = Arc::new(PageBitmap::new(128).unwrap());
            let data = Arc::new(AtomicU32::new(0));
            let (other, copied) = (Arc::clone(&map), Arc::clone(&data));
            let thread = loom::thread::spawn(move || {
                copied.store(7, Ordering::Relaxed);
                other.set(3);
            });
            map.set(4);
            if map.get(3) {
                assert_eq!(data.load(Ordering::Relaxed), 7);
            }
            thread.join().unwrap();
            assert!(map.get(3) && map.get(4));
            assert_eq!(map.run(3, 128), (true, 2));
        });
    }

    #[test]
    fn concurrent_clear_of_neighbours_keeps_bits() {
        loom::model(|| {
            let map = Arc::new(PageBitmap::new(64).unwrap());
            map.set(1);
            let other = Arc::clone(&map);
            let thread = loom::thread::spawn(move || other.clear(1, 2));
            map.set(2);
            thread.join().unwrap();
            assert_eq!((map.get(1), map.get(2)), (false, true));
        });
    }

    /// A write and a concurrent discard of the same page: either may win, but a page without its
    /// bit holds no data.
    #[test]
    fn clear_bit_implies_no_data() {
        loom::model(|| {
            let map = Arc::new(PageBitmap::new(64).unwrap());
            let data = Arc::new(AtomicU32::new(1));
            map.set(3);
            let (other, freed) = (Arc::clone(&map), Arc::clone(&data));
            let thread = loom::thread::spawn(move || {
                other.clear(3, 4);
                freed.store(0, Ordering::Relaxed);
            });
            data.store(7, Ordering::Relaxed);
            map.set(3);
            thread.join().unwrap();
            if !map.get(3) {
                assert_eq!(data.load(Ordering::Relaxed), 0);
            }
        });
    }
}
