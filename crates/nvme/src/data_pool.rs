//! The memory of a connection: one region, mapped once, in which data wait for the device or the
//! host.
//!
//! ```text
//! | in-capsule data, 8 KiB a slot | pool of pages for all other data |
//! ```
//!
//! Data in a capsule have a place of their own, because they come with the command and cannot wait.
//! All other data are asked for, by an R2T or a read of the device, when pages of the pool are
//! free. The region is mapped without reservation; a connection costs the memory that it touches,
//! and returns it when it is idle.

use std::io;
use std::sync::Arc;

use blockyard_core::Region;

use crate::identify::QUEUE_ENTRIES_MAX;
use crate::namespace::DATA_BYTES_MAX;
use crate::wire::IN_CAPSULE_BYTES_MAX;

/// The bytes of a page of the pool.
const PAGE_BYTES: usize = 4096;
/// The bytes of the pool: two commands with the longest data, so that one is transferred while the
/// other is executed.
const POOL_BYTES: usize = 2 * DATA_BYTES_MAX as usize;
/// The number of pages of the pool.
const PAGES: usize = POOL_BYTES / PAGE_BYTES;
/// The bytes of the places for data in capsules.
const CAPSULES_BYTES: usize = QUEUE_ENTRIES_MAX as usize * IN_CAPSULE_BYTES_MAX as usize;

/// Neighbouring pages of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageSpan {
    first: u16,
    count: u16,
}

impl PageSpan {
    /// The offset in the region.
    pub(crate) fn offset(self) -> u64 {
        (CAPSULES_BYTES + usize::from(self.first) * PAGE_BYTES) as u64
    }
}

/// The memory of a connection.
#[derive(Debug)]
pub(crate) struct DataPool {
    region: Arc<Region>,
    used: Box<[bool]>,
    /// Whether any of the region was touched since it was returned.
    is_touched: bool,
}

impl DataPool {
    pub(crate) fn new() -> io::Result<DataPool> {
        let region = blockyard_os::map_region(CAPSULES_BYTES + POOL_BYTES)?;
        Ok(DataPool { region, used: vec![false; PAGES].into(), is_touched: false })
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The offset of a slot's in-capsule data.
    pub(crate) fn capsule(&mut self, slot: u16) -> u64 {
        self.is_touched = true;
        u64::from(slot) * u64::from(IN_CAPSULE_BYTES_MAX)
    }

    /// Takes pages for this many bytes, at most twice [`DATA_BYTES_MAX`], which a Compare takes;
    /// `None` until enough neighbours are free.
    pub(crate) fn take(&mut self, bytes: u32) -> Option<PageSpan> {
        let count = (bytes as usize).div_ceil(PAGE_BYTES);
        let mut first = 0;
        while first + count <= self.used.len() {
            match self.used[first..first + count].iter().rposition(|used| *used) {
                Some(last) => first += last + 1,
                None => {
                    self.used[first..first + count].fill(true);
                    self.is_touched = true;
                    return Some(PageSpan { first: first as u16, count: count as u16 });
                }
            }
        }
        None
    }

    /// Returns pages.
    pub(crate) fn give(&mut self, span: PageSpan) {
        let first = usize::from(span.first);
        self.used[first..first + usize::from(span.count)].fill(false);
    }

    /// Keeps this many pages only, so that few commands of a test use all.
    #[cfg(test)]
    pub(crate) fn keep(&mut self, pages: usize) {
        assert!(self.is_free());
        self.used = vec![false; pages].into();
    }

    /// Whether idle memory could be returned.
    pub(crate) fn is_touched(&self) -> bool {
        self.is_touched
    }

    /// Whether no page is taken.
    pub(crate) fn is_free(&self) -> bool {
        self.used.iter().all(|used| !used)
    }

    /// Returns the memory to the system. Nothing may be in flight.
    pub(crate) fn shrink(&mut self) {
        debug_assert!(self.is_free(), "an idle connection holds no pages");
        blockyard_os::forget(&self.region, 0, self.region.len_bytes());
        self.is_touched = false;
    }
}

/// The digest of data in a region.
pub(crate) fn digest_of(region: &Region, at: u64, len: u32) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    let (mut bytes, mut done) = ([0; 4096], 0);
    while done < len {
        let part = (len - done).min(bytes.len() as u32) as usize;
        region.read(at + u64::from(done), &mut bytes[..part]);
        digest.update(&bytes[..part]);
        done += part as u32;
    }
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_never_overlap_and_come_back() {
        let mut pool = DataPool::new().unwrap();
        let first = pool.take(DATA_BYTES_MAX).unwrap();
        let small = pool.take(1).unwrap();
        assert_eq!(small.offset(), first.offset() + u64::from(DATA_BYTES_MAX));
        assert!(pool.take(DATA_BYTES_MAX).is_none(), "one page is missing");
        let next = pool.take(4097).unwrap();
        assert_eq!(next.offset(), small.offset() + 4096);
        pool.give(first);
        assert_eq!(pool.take(8192).unwrap().offset(), first.offset());
        assert!(first.offset() >= pool.capsule(127) + 8192);
        let end = next.offset() + 8192;
        assert!(pool.region().range(end, 0).is_some());
    }
}
