//! Room: which pages hold data.
//!
//! Protects   the truth of "this page was never written": a bit per page.
//! Why        a device of terabytes keeps memory for what was written only, and says so to whoever
//!            copies it; and a read of a hole must not even cost page tables.
//! States     clear: the page reads as zeros, its memory is untouched or about to be freed. Set:
//!            the memory is the data.
//! Order      no lock. A writer copies first and sets the bit then; a discard clears the bit first
//!            and frees the memory then, with a full fence between the two on either side. So
//!            whoever sees the bit sees the data, and whoever does not finds zeros: what the page
//!            held before, or will. And a bit that is clear after a race of both is that of a page
//!            that was freed after the copy: no old data wait under it for the next write.
//! Common     one load of a word that shares its cache line with 511 other pages; a fence a write.
//! Cost       a read-modify-write for the first write to a page only; the fence some 20 cycles.
//! Before     a tree of pages under the device's lock.
//!
//! Above the bits stands a summary, one bit per [`CHUNK_PAGES`] pages, set before the first bit of
//! its chunk and never cleared: a scan of ten empty terabytes looks at some ten thousand words.

use crate::atomics::{AtomicU64, Ordering, fence};

/// Pages in a word of the map.
const WORD_PAGES: u64 = 64;
/// Pages under one bit of the summary.
pub const CHUNK_PAGES: u64 = 64 * WORD_PAGES;

/// A bit per page, all clear at first. Its own memory is touched only where bits are set.
#[derive(Debug)]
pub struct PageBitmap {
    words: Box<[AtomicU64]>,
    summary: Box<[AtomicU64]>,
    pages: u64,
}

impl PageBitmap {
    /// A clear map of `pages` pages; `None` if there is no memory for it.
    pub fn new(pages: u64) -> Option<PageBitmap> {
        let words = zeroed(pages.div_ceil(WORD_PAGES))?;
        let summary = zeroed(pages.div_ceil(CHUNK_PAGES).div_ceil(u64::from(u64::BITS)))?;
        Some(PageBitmap { words, summary, pages })
    }

    /// How many pages it covers.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether the page holds data.
    #[inline]
    pub fn get(&self, page: u64) -> bool {
        // Acquire: pairs with the Release in `set`, so that the data are seen with the bit.
        let word = self.words[(page / WORD_PAGES) as usize].load(Ordering::Acquire);
        word >> (page % WORD_PAGES) & 1 != 0
    }

    /// Notes that the page holds data, which have been copied before; says whether that is new.
    #[inline]
    pub fn set(&self, page: u64) -> bool {
        self.set_range(page, page + 1)
    }

    /// Notes that the pages from `first` to before `end` hold data, which have been copied before;
    /// says whether that is new for any of them.
    #[inline]
    pub fn set_range(&self, first: u64, end: u64) -> bool {
        // Keeps the copy before the look at the bit; pairs with the fence in `clear`. Without it a
        // writer may see the bit as it was before a discard, and its copy become visible after the
        // memory was freed: data under a clear bit, which the next write would bring to light.
        fence(Ordering::SeqCst);
        let mut new = false;
        for page in first..end {
            let (word, bit) = (&self.words[(page / WORD_PAGES) as usize], 1 << (page % WORD_PAGES));
            // Relaxed: if the bit is set already there is nothing to publish that was not before; a
            // discard of the same page at the same time may win, as it may on any disk.
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
        // Release: pairs with the Acquire in `get` and `run`; it also keeps the summary before the
        // bit for whoever has seen the bit.
        word.fetch_or(bit, Ordering::Release);
    }

    /// Notes that the pages from `first` to before `end` hold nothing. Their memory is freed
    /// afterwards. Chunks that were never written are skipped.
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

    /// Whether `page` holds data, and how many pages from it on are of the same kind, at most up to
    /// `end`. `page` must lie before `end`.
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

/// Zeroed words; the system provides their memory when they are first written. `None` if it
/// refuses.
#[cfg(not(loom))]
#[allow(unsafe_code)]
pub(crate) fn zeroed(words: u64) -> Option<Box<[AtomicU64]>> {
    let words = usize::try_from(words).ok()?;
    if words == 0 {
        return Some(Box::default());
    }
    let layout = std::alloc::Layout::array::<AtomicU64>(words).ok()?;
    // SAFETY: the layout is not of size 0.
    let start = unsafe { std::alloc::alloc_zeroed(layout) };
    if start.is_null() {
        return None;
    }
    // SAFETY: the memory was allocated with the layout of such a slice by the allocator of boxes,
    // belongs to nobody else, and zeros are a valid value of an AtomicU64.
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
    fn agrees_with_a_plain_vector() {
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
    fn a_map_that_no_memory_can_hold_is_refused() {
        assert!(PageBitmap::new(u64::MAX >> 4).is_none());
    }

    #[test]
    fn a_huge_map_is_one_hole() {
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
    fn whoever_sees_the_bit_sees_the_data_and_no_bit_is_lost() {
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
    fn clearing_neighbours_loses_nothing() {
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

    /// A write and a discard of the same page at the same time: either may win, but a page that is
    /// not marked holds nothing.
    #[test]
    fn no_data_lie_under_a_clear_bit() {
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
