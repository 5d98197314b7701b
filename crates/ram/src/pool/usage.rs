//! Memory usage of a pool, for statistics.

use super::memory::PAGE_BYTES;

/// Memory usage of a pool at a moment. While the pool is in use, the values agree only roughly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Number of objects, including those that are retired and not yet freed.
    pub objects: u64,
    /// Bytes of these objects: zram's `compr_data_size`.
    pub stored_bytes: u64,
    /// Bytes of the system's pages in use: zram's `mem_used_total`.
    pub used_bytes: u64,
    /// Maximum of `used_bytes` since [`Pool::reset_used_max`]: zram's `mem_used_max`.
    pub used_bytes_max: u64,
    /// The limit: zram's `mem_limit`.
    pub limit_bytes: Option<u64>,
    /// For each shared object, its length times the number of additional words that refer to it.
    pub duplicate_bytes: u64,
    /// Bytes lost to the alignment of objects to 16 bytes, and to refcounts.
    pub grain_bytes: u64,
    /// Free bytes in the pages in use.
    pub free_bytes: u64,
    /// Bytes of objects that no word refers to and that are not yet freed.
    pub retired_bytes: u64,
    /// Pages that compaction has freed: zram's `pages_compacted`.
    pub pages_compacted: u64,
}

impl Usage {
    /// System pages in use: zsmalloc's `pages_used`.
    pub fn pages_used(&self) -> u64 {
        self.used_bytes / PAGE_BYTES as u64
    }
}

/// How full a pool is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Bytes of the system's pages in use.
    pub used_bytes: u64,
    /// Bytes of the objects in them.
    pub stored_bytes: u64,
    /// Bytes of all objects that were ever allocated: a measure of how much the pool has changed.
    pub placed_bytes: u64,
}

impl Load {
    /// Bytes of the pages in use that no object occupies.
    pub fn lost_bytes(&self) -> u64 {
        self.used_bytes.saturating_sub(self.stored_bytes)
    }

    /// Bytes of all objects ever allocated plus bytes of all objects freed.
    pub(super) fn changed_bytes(&self) -> u64 {
        self.placed_bytes + self.placed_bytes.saturating_sub(self.stored_bytes)
    }
}

/// The number of objects of one size class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeClass {
    /// The largest object of the class in bytes; the smallest is at most 15 bytes shorter.
    pub bytes: usize,
    /// Number of objects in the class.
    pub objects: u64,
}
