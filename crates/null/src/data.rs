//! The data of a device: the storage, and optionally a volatile write cache above it.
#![allow(unsafe_code)]

use blockyard_core::{Extent, SECTOR_SHIFT, Sector, Segment};

use crate::cache::WriteCache;
use crate::error::NullError;
use crate::storage::Storage;

/// The byte that a sequential zone reads as above its write pointer.
pub(crate) const ABOVE_WP: u8 = 0xff;

/// The data of a device.
#[derive(Debug)]
pub(crate) struct Data {
    storage: Storage,
    cache: Option<WriteCache>,
}

impl Data {
    /// Creates storage that reads as zeros; `cache_bytes` of 0 means no cache.
    pub(crate) fn new(len_bytes: u64, cache_bytes: u64) -> Result<Data, NullError> {
        let cache = match cache_bytes {
            0 => None,
            _ => Some(
                WriteCache::new(cache_bytes)
                    .ok_or_else(|| NullError::no_memory("cache_size", cache_bytes))?,
            ),
        };
        Ok(Data { storage: Storage::new(len_bytes)?, cache })
    }

    /// Reads into a segment of a request; sectors from `readable_end` on read as 0xFF. `soon` is
    /// the sector of a later read, for a prefetch.
    #[inline]
    pub(crate) fn read(
        &self,
        at: Sector,
        segment: &Segment,
        readable_end: Sector,
        soon: Option<Sector>,
    ) {
        let readable = (readable_end.0.saturating_sub(at.0) << SECTOR_SHIFT) as usize;
        let len = segment.len_bytes.min(readable);
        let into = segment.data.as_ptr();
        // SAFETY: a segment is valid for its length until its request is completed, and the caller
        // holds the started request; `len` is at most that.
        unsafe {
            match &self.cache {
                None => self.storage.read(at.bytes(), into, len, soon.map(Sector::bytes)),
                Some(cache) => cache.read(&self.storage, at.bytes(), into, len),
            }
            if len < segment.len_bytes {
                into.add(len).write_bytes(ABOVE_WP, segment.len_bytes - len);
            }
        }
    }

    /// Writes the first `len_bytes` of a segment of a request; `through` bypasses the cache.
    #[inline]
    pub(crate) fn write(&self, at: Sector, segment: &Segment, len_bytes: usize, through: bool) {
        let from = segment.data.as_ptr().cast_const();
        let len = len_bytes.min(segment.len_bytes);
        // SAFETY: as in `read`.
        unsafe {
            match &self.cache {
                None => self.storage.write(at.bytes(), from, len),
                Some(cache) if !through => cache.write(&self.storage, at.bytes(), from, len),
                Some(cache) => cache.replace(at.bytes(), len as u64, |next, len| {
                    // SAFETY: `next` lies in the range, which the caller's segment covers.
                    let from = from.add((next - at.bytes()) as usize);
                    self.storage.write(next, from, len as usize);
                }),
            }
        }
    }

    /// Zeroes a range, bypassing the cache. With `keep` it stays allocated.
    pub(crate) fn zero(&self, at: Sector, sectors: u64, keep: bool) {
        let (at, len_bytes) = (at.bytes(), sectors << SECTOR_SHIFT);
        match &self.cache {
            None => self.storage.zero(at, len_bytes, keep),
            Some(cache) if !keep => cache.discard(&self.storage, at, len_bytes),
            Some(cache) => {
                cache.replace(at, len_bytes, |at, len| self.storage.zero(at, len, true));
            }
        }
    }

    /// Moves cached data to the storage.
    pub(crate) fn flush(&self) {
        if let Some(cache) = &self.cache {
            cache.flush(&self.storage);
        }
    }

    /// Drops cached data.
    pub(crate) fn power_cut(&self) {
        if let Some(cache) = &self.cache {
            cache.power_cut();
        }
    }

    /// The extent at `from`: a run of one kind, at most `sectors` long.
    pub(crate) fn extent(&self, from: Sector, sectors: u64) -> Extent {
        let run = self.storage.run(from.bytes(), (from + sectors).bytes());
        let sectors = run.len_bytes >> SECTOR_SHIFT;
        Extent { sectors, allocated: run.written, zero: !run.written }
    }
}
