//! The volatile write cache of conventional zones: pages that a kill of the process loses.
//!
//! Sequential zones need no cache. Their data go to the file at once, above what is durably
//! recorded as written; an opening of the disk discards what lies there.

use std::collections::BTreeMap;
use std::io;

use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;

use crate::store::StoreFile;

/// Length of a page in bytes.
const PAGE: u64 = 4096;

/// Cached pages of one data file, by zone and page number. The last page of a zone may be shorter.
type CachedPages = BTreeMap<(u32, u64), Box<[u8]>>;

/// The location of a zone in its data file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ZonePlace<'a, F> {
    pub(crate) zone: u32,
    pub(crate) file: &'a F,
    /// Start of the zone in the file, in bytes.
    pub(crate) start: u64,
    /// Length of the zone in bytes.
    pub(crate) len: u64,
}

/// The cached pages of one data file.
#[derive(Debug)]
pub(crate) struct Overlay {
    pages: SleepLock<CachedPages, { ranks::CACHE }>,
    pages_max: usize,
}

impl Overlay {
    /// Creates a cache of `bytes`, at least one page.
    pub(crate) fn new(bytes: u64) -> Overlay {
        let pages_max = usize::try_from(bytes / PAGE).unwrap_or(usize::MAX).max(1);
        Overlay { pages: SleepLock::new(CachedPages::new()), pages_max }
    }

    /// Reads from an offset of the zone: cached pages from the cache, others from the file.
    pub(crate) fn read<F: StoreFile>(
        &self,
        place: ZonePlace<'_, F>,
        offset: u64,
        into: &mut [u8],
    ) -> io::Result<()> {
        self.pages.with(|pages| {
            place.file.read_at(place.start + offset, into)?;
            let end = offset + into.len() as u64;
            let (first, last) = (offset / PAGE, end.div_ceil(PAGE));
            for ((_, number), page) in pages.range((place.zone, first)..(place.zone, last)) {
                let page_start = number * PAGE;
                let from = page_start.max(offset);
                let to = (page_start + page.len() as u64).min(end);
                let part = &page[(from - page_start) as usize..(to - page_start) as usize];
                into[(from - offset) as usize..(to - offset) as usize].copy_from_slice(part);
            }
            Ok(())
        })
    }

    /// Writes at an offset of the zone. If the cache exceeds its size, all of it is written to the
    /// file, as a drive may do at any time.
    pub(crate) fn write<F: StoreFile>(
        &self,
        place: ZonePlace<'_, F>,
        offset: u64,
        from: &[u8],
    ) -> io::Result<()> {
        self.pages.with(|pages| {
            let end = offset + from.len() as u64;
            let mut next = offset;
            while next < end {
                let number = next / PAGE;
                let page_start = number * PAGE;
                let page_len = PAGE.min(place.len - page_start);
                let to = (page_start + page_len).min(end);
                let page = match pages.entry((place.zone, number)) {
                    std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
                    std::collections::btree_map::Entry::Vacant(entry) => {
                        let mut page = vec![0; page_len as usize].into_boxed_slice();
                        if to - next < page_len {
                            place.file.read_at(place.start + page_start, &mut page)?;
                        }
                        entry.insert(page)
                    }
                };
                let part = &mut page[(next - page_start) as usize..(to - page_start) as usize];
                part.copy_from_slice(&from[(next - offset) as usize..(to - offset) as usize]);
                next = to;
            }
            Ok(())
        })
    }

    /// Zeroes a range of the zone immediately: a drive may make unflushed data durable at any time.
    pub(crate) fn zero<F: StoreFile>(
        &self,
        place: ZonePlace<'_, F>,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        self.pages.with(|pages| {
            let end = offset + len;
            let (first, last) = (offset / PAGE, end.div_ceil(PAGE));
            for ((_, number), page) in pages.range_mut((place.zone, first)..(place.zone, last)) {
                let page_start = number * PAGE;
                let from = page_start.max(offset);
                let to = (page_start + page.len() as u64).min(end);
                page[(from - page_start) as usize..(to - page_start) as usize].fill(0);
            }
            place.file.punch(place.start + offset, len)
        })
    }

    /// Whether the cache exceeds its size.
    pub(crate) fn is_over_full(&self) -> bool {
        self.pages.with(|pages| pages.len() > self.pages_max)
    }

    /// Writes the pages of some zones to the file; `start_of` returns a zone's start in it.
    pub(crate) fn write_back<F: StoreFile>(
        &self,
        file: &F,
        zones: std::ops::RangeInclusive<u32>,
        start_of: impl Fn(u32) -> u64,
    ) -> io::Result<()> {
        self.pages.with(|pages| {
            let range = (*zones.start(), 0)..=(*zones.end(), u64::MAX);
            for ((zone, number), page) in pages.range(range.clone()) {
                file.write_at(start_of(*zone) + number * PAGE, page)?;
            }
            pages.retain(|key, _| !range.contains(key));
            Ok(())
        })
    }
}
