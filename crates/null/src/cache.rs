//! A volatile write cache: holds written data until a flush, like the cache of a disk.
//!
//! A write completes when its data are in the cache. A flush, FUA or a lack of space moves data to
//! the storage. A power cut loses the data in the cache. The cache is divided into parts by page
//! number, each with a lock. A page is looked up, moved and read under its part's lock, so a reader
//! finds it either in the cache or in the storage. The memory is bounded and reserved when the
//! device is created.
#![allow(unsafe_code)]

use std::collections::HashMap;

use blockyard_core::SECTOR_BYTES;
use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;

use crate::storage::{PAGE_BYTES, Storage};

/// Maximum number of parts of a cache.
const PARTS_MAX: u64 = 16;

/// The volatile write cache of a device.
#[derive(Debug)]
pub(crate) struct WriteCache {
    parts: Box<[SleepLock<CacheShard, { ranks::CACHE }>]>,
}

/// A cache slot: a page number, and a mask of the sectors that are newer than the storage's. A mask
/// of 0 means that the slot is free.
#[derive(Clone, Copy, Debug, Default)]
struct CacheSlot {
    page: u64,
    newer: u8,
}

#[derive(Debug)]
struct CacheShard {
    slots: Box<[CacheSlot]>,
    /// A page of memory per slot.
    memory: Box<[u8]>,
    /// Slot of each cached page. Has twice the needed capacity, so that it never grows.
    by_page: HashMap<u64, usize>,
    /// Free slots.
    free: Vec<usize>,
    /// The slot to evict next, round robin.
    hand: usize,
}

/// The sectors of a page that a byte range in it covers, as a mask.
fn sector_mask(offset: u64, len_bytes: u64) -> u8 {
    let (first, end) = (offset / SECTOR_BYTES, (offset + len_bytes).div_ceil(SECTOR_BYTES));
    (((1u16 << (end - first)) - 1) << first) as u8
}

/// Splits a byte range at page boundaries: calls `f` with the position and length of each piece.
fn for_each_page(at: u64, len_bytes: u64, mut f: impl FnMut(u64, u64)) {
    let (mut next, end) = (at, at + len_bytes);
    while next < end {
        let page_end = (next / PAGE_BYTES + 1) * PAGE_BYTES;
        let part_end = page_end.min(end);
        f(next, part_end - next);
        next = part_end;
    }
}

impl WriteCache {
    /// Creates an empty cache of `len_bytes`, at least a page; `None` if there is not enough
    /// memory.
    pub(crate) fn new(len_bytes: u64) -> Option<WriteCache> {
        let pages = len_bytes / PAGE_BYTES;
        let count = pages.clamp(1, PARTS_MAX);
        let slots = (pages / count).max(1) as usize;
        let part = |_| Some(SleepLock::new(CacheShard::new(slots)?));
        Some(WriteCache { parts: (0..count).map(part).collect::<Option<_>>()? })
    }

    fn with_part<R>(&self, at: u64, f: impl FnOnce(&mut CacheShard) -> R) -> R {
        let part = at / PAGE_BYTES % self.parts.len() as u64;
        self.parts[part as usize].with(f)
    }

    /// Copies data into the cache.
    ///
    /// # Safety
    /// `from` must be valid for reads of `len_bytes`.
    pub(crate) unsafe fn write(
        &self,
        storage: &Storage,
        at: u64,
        from: *const u8,
        len_bytes: usize,
    ) {
        for_each_page(at, len_bytes as u64, |next, len| {
            self.with_part(next, |part| {
                let slot = part.slot_for(next / PAGE_BYTES, storage);
                let offset = next % PAGE_BYTES;
                // SAFETY: the source range lies in the caller's; the destination is this slot's
                // page, and `offset + len` stays within it.
                unsafe {
                    let from = from.add((next - at) as usize);
                    let into = part.page_memory(slot).add(offset as usize);
                    into.copy_from_nonoverlapping(from, len as usize);
                }
                part.slots[slot].newer |= sector_mask(offset, len);
                // The page counts as allocated from now on, although the storage has zeros until
                // the write-back. Under the lock: a thread that finds the slot must find the mark
                // too.
                storage.mark(next, len);
            });
        });
    }

    /// Reads newer sectors from the cache and the rest from the storage.
    ///
    /// # Safety
    /// `into` must be valid for writes of `len_bytes`.
    pub(crate) unsafe fn read(&self, storage: &Storage, at: u64, into: *mut u8, len_bytes: usize) {
        for_each_page(at, len_bytes as u64, |next, len| {
            self.with_part(next, |part| {
                // SAFETY: the destination range lies in the caller's.
                unsafe {
                    let into = into.add((next - at) as usize);
                    storage.read(next, into, len as usize, None);
                    part.read_newer(next, into, len);
                }
            });
        });
    }

    /// Drops a range from the cache before it is changed in the storage. `change` changes one page,
    /// under the lock of the page's part.
    pub(crate) fn replace(&self, at: u64, len_bytes: u64, mut change: impl FnMut(u64, u64)) {
        for_each_page(at, len_bytes, |next, len| {
            self.with_part(next, |part| {
                part.forget(next / PAGE_BYTES, sector_mask(next % PAGE_BYTES, len));
                change(next, len);
            });
        });
    }

    /// Zeroes a range and frees its memory. First drops it from the cache, so that no cached page
    /// is written to the freed storage. A concurrent write may lose its mark, which is then set
    /// again.
    pub(crate) fn discard(&self, storage: &Storage, at: u64, len_bytes: u64) {
        self.forget(at, len_bytes);
        storage.zero(at, len_bytes, false);
        self.mark(storage, at, len_bytes);
    }

    /// Drops a long range from the cache.
    fn forget(&self, at: u64, len_bytes: u64) {
        self.for_each_cached(at, len_bytes, |part, next, len| {
            part.forget(next / PAGE_BYTES, sector_mask(next % PAGE_BYTES, len));
        });
    }

    /// Marks the cached pages of a range as allocated.
    fn mark(&self, storage: &Storage, at: u64, len_bytes: u64) {
        self.for_each_cached(at, len_bytes, |part, next, len| {
            if part.by_page.contains_key(&(next / PAGE_BYTES)) {
                storage.mark(next, len);
            }
        });
    }

    /// Calls `f` for the cached pages of a long range, under their parts' locks. Iterates over
    /// pages or over slots, whichever are fewer.
    fn for_each_cached(
        &self,
        at: u64,
        len_bytes: u64,
        mut f: impl FnMut(&mut CacheShard, u64, u64),
    ) {
        let slots: usize = self.parts.iter().map(|part| part.with(|part| part.slots.len())).sum();
        if len_bytes / PAGE_BYTES <= slots as u64 {
            for_each_page(at, len_bytes, |next, len| {
                self.with_part(next, |part| f(part, next, len));
            });
            return;
        }
        let end = at + len_bytes;
        for part in &self.parts {
            part.with(|part| {
                for slot in 0..part.slots.len() {
                    let CacheSlot { page, newer } = part.slots[slot];
                    let start = (page * PAGE_BYTES).max(at);
                    let stop = ((page + 1) * PAGE_BYTES).min(end);
                    if newer != 0 && start < stop {
                        f(part, start, stop - start);
                    }
                }
            });
        }
    }

    /// Moves all cached data to the storage.
    pub(crate) fn flush(&self, storage: &Storage) {
        for part in &self.parts {
            part.with(|part| {
                for slot in 0..part.slots.len() {
                    part.write_back(slot, storage);
                }
            });
        }
    }

    /// Drops all cached data.
    pub(crate) fn power_cut(&self) {
        for part in &self.parts {
            part.with(|part| {
                for slot in 0..part.slots.len() {
                    part.release(slot);
                }
            });
        }
    }
}

/// A vector of `len` times `value`; `None` if there is not enough memory.
fn filled<T: Clone>(len: usize, value: T) -> Option<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).ok()?;
    values.resize(len, value);
    Some(values)
}

/// `len` zero bytes, `len > 0`, for which the system provides memory at the first write; `None` if
/// it refuses.
fn zeros(len: usize) -> Option<Box<[u8]>> {
    let layout = std::alloc::Layout::array::<u8>(len).ok()?;
    assert!(len > 0, "a part has slots");
    // SAFETY: the layout's size is not 0.
    let start = unsafe { std::alloc::alloc_zeroed(layout) };
    if start.is_null() {
        return None;
    }
    // SAFETY: the memory was allocated by the allocator of boxes with the layout of such a slice,
    // has no other owner, and is initialized.
    Some(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(start, len)) })
}

impl CacheShard {
    fn new(slots: usize) -> Option<CacheShard> {
        let mut by_page = HashMap::new();
        by_page.try_reserve(2 * slots).ok()?;
        let mut free = filled(slots, 0)?;
        free.iter_mut().zip((0..slots).rev()).for_each(|(free, slot)| *free = slot);
        Some(CacheShard {
            slots: filled(slots, CacheSlot::default())?.into_boxed_slice(),
            memory: zeros(slots * PAGE_BYTES as usize)?,
            by_page,
            free,
            hand: 0,
        })
    }

    fn page_memory(&mut self, slot: usize) -> *mut u8 {
        let page = PAGE_BYTES as usize;
        self.memory[slot * page..(slot + 1) * page].as_mut_ptr()
    }

    /// The page's slot, or a free slot, or a slot that is evicted.
    fn slot_for(&mut self, page: u64, storage: &Storage) -> usize {
        if let Some(&slot) = self.by_page.get(&page) {
            return slot;
        }
        if self.free.is_empty() {
            self.write_back(self.hand, storage);
            self.hand = (self.hand + 1) % self.slots.len();
        }
        let slot = self.free.pop().expect("every slot is free or cached, and one was freed");
        self.slots[slot] = CacheSlot { page, newer: 0 };
        self.by_page.insert(page, slot);
        slot
    }

    /// Moves the newer sectors of a slot to the storage and frees the slot.
    fn write_back(&mut self, slot: usize, storage: &Storage) {
        let CacheSlot { page, newer } = self.slots[slot];
        for sector in (0..8).filter(|sector| newer >> sector & 1 != 0) {
            let offset = sector * SECTOR_BYTES;
            // SAFETY: the sector lies in the slot's page.
            unsafe {
                let from = self.page_memory(slot).add(offset as usize);
                storage.write(page * PAGE_BYTES + offset, from, SECTOR_BYTES as usize);
            }
        }
        self.release(slot);
    }

    fn release(&mut self, slot: usize) {
        if self.slots[slot].newer != 0 {
            self.by_page.remove(&self.slots[slot].page);
            self.slots[slot].newer = 0;
            self.free.push(slot);
        }
    }

    fn forget(&mut self, page: u64, sectors: u8) {
        let Some(&slot) = self.by_page.get(&page) else { return };
        let left = self.slots[slot].newer & !sectors;
        if left == 0 {
            self.release(slot);
        } else {
            self.slots[slot].newer = left;
        }
    }

    /// Copies the newer sectors of a range within one page.
    ///
    /// # Safety
    /// `into` must be valid for writes of `len_bytes`.
    unsafe fn read_newer(&mut self, at: u64, into: *mut u8, len_bytes: u64) {
        let Some(&slot) = self.by_page.get(&(at / PAGE_BYTES)) else { return };
        let offset = at % PAGE_BYTES;
        let wanted = self.slots[slot].newer & sector_mask(offset, len_bytes);
        for sector in (0..8).filter(|sector| wanted >> sector & 1 != 0) {
            let position = sector * SECTOR_BYTES;
            // SAFETY: the mask keeps the sector inside the range, which starts at a sector
            // boundary.
            unsafe {
                let from = self.page_memory(slot).add(position as usize);
                let into = into.add((position - offset) as usize);
                into.copy_from_nonoverlapping(from, SECTOR_BYTES as usize);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 64 * PAGE_BYTES;

    fn write(cache: &WriteCache, storage: &Storage, at: u64, data: &[u8]) {
        // SAFETY: a slice is valid for its length.
        unsafe { cache.write(storage, at, data.as_ptr(), data.len()) }
    }

    fn read(cache: &WriteCache, storage: &Storage, at: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0xaa; len];
        // SAFETY: a vector is valid for its length.
        unsafe { cache.read(storage, at, data.as_mut_ptr(), len) };
        data
    }

    #[test]
    fn cache_is_transparent_until_power_cut() {
        let storage = Storage::new(LEN).unwrap();
        let cache = WriteCache::new(5 * PAGE_BYTES).unwrap();
        let mut plain = vec![0u8; LEN as usize];
        let mut random = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        for round in 0..4000u64 {
            let at = next(LEN / 512) * 512;
            let len = (512 * (1 + next(30))).min(LEN - at);
            let range = at as usize..(at + len) as usize;
            match next(6) {
                0..=2 => {
                    let data = vec![round as u8; len as usize];
                    write(&cache, &storage, at, &data);
                    plain[range].copy_from_slice(&data);
                }
                3 => {
                    cache.replace(at, len, |at, len| storage.zero(at, len, true));
                    plain[range].fill(0);
                }
                4 => assert_eq!(read(&cache, &storage, at, len as usize), plain[range]),
                _ if next(20) == 0 => {
                    cache.flush(&storage);
                    cache.power_cut();
                }
                _ => {}
            }
        }
        assert_eq!(read(&cache, &storage, 0, LEN as usize), plain);
        write(&cache, &storage, 512, &[0xee; 512]);
        cache.power_cut();
        assert_ne!(read(&cache, &storage, 512, 512), [0xee; 512]);
    }

    #[test]
    fn discard_of_long_range_keeps_other_pages() {
        let storage = Storage::new(LEN).unwrap();
        let cache = WriteCache::new(4 * PAGE_BYTES).unwrap();
        for page in [0, 1, 62, 63] {
            write(&cache, &storage, page * PAGE_BYTES, &[9; 4096]);
        }
        cache.forget(512, LEN - 1024);
        cache.flush(&storage);
        let back = read(&cache, &storage, 0, LEN as usize);
        let kept = back.iter().filter(|&&byte| byte == 9).count();
        assert_eq!((back[0], back[511], back[LEN as usize - 1], kept), (9, 9, 9, 1024));
    }

    /// Block status must not report cached data as a hole: a write between the two steps of a
    /// discard keeps its mark.
    #[test]
    fn cached_pages_are_marked_after_discard() {
        let storage = Storage::new(LEN).unwrap();
        let cache = WriteCache::new(4 * PAGE_BYTES).unwrap();
        for (at, len) in [(0, LEN), (PAGE_BYTES, 2 * PAGE_BYTES)] {
            cache.forget(at, len);
            write(&cache, &storage, 2 * PAGE_BYTES, &[7; 4096]);
            storage.zero(at, len, false);
            assert!(!storage.run(2 * PAGE_BYTES, LEN).written);
            cache.mark(&storage, at, len);
            let run = storage.run(2 * PAGE_BYTES, LEN);
            assert!(run.written && run.len_bytes == PAGE_BYTES);
            assert_eq!(read(&cache, &storage, 2 * PAGE_BYTES, 4096), [7; 4096]);
        }
        cache.discard(&storage, 0, LEN);
        assert!(!storage.run(0, LEN).written);
        assert_eq!(read(&cache, &storage, 2 * PAGE_BYTES, 4096), [0; 4096]);
    }
}
