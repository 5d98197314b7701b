//! Memory usage of a pool, for statistics.

use blockyard_sync::lock::Lock;

use super::Pool;
use super::layout::UNIT_BYTES;
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

impl Pool {
    /// The memory usage now.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        let mut units = 0;
        for shard in &self.shards {
            shard.with(|shard| {
                let tally = shard.tally();
                usage.objects += tally.objects;
                usage.stored_bytes += tally.stored_bytes;
                units += tally.units;
                usage.duplicate_bytes += tally.duplicate_bytes;
                usage.free_bytes += shard.free_units() * UNIT_BYTES as u64;
                let retired = shard.retired.iter().map(|object| object.len_bytes() as u64);
                usage.retired_bytes += retired.sum::<u64>();
            });
        }
        usage.grain_bytes = units * UNIT_BYTES as u64 - usage.stored_bytes;
        let pages = self.arena.look();
        usage.used_bytes = pages.used * PAGE_BYTES as u64;
        usage.used_bytes_max = pages.used_max * PAGE_BYTES as u64;
        usage.limit_bytes = pages.limit.map(|limit| limit * PAGE_BYTES as u64);
        usage.pages_compacted = pages.compacted;
        usage
    }

    /// The number of objects in each size class that has any.
    pub fn size_classes(&self) -> Vec<SizeClass> {
        let mut objects = vec![0u64; self.layout.units_max as usize + 1];
        for shard in &self.shards {
            shard.with(|shard| {
                for (sum, &live) in objects.iter_mut().zip(shard.live()) {
                    *sum += u64::from(live);
                }
            });
        }
        let classes = (0u32..).zip(objects).filter(|&(_, objects)| objects > 0);
        classes
            .map(|(units, objects)| SizeClass { bytes: self.layout.largest(units), objects })
            .collect()
    }

    /// How full the pool is; cheap enough to call often: a few instructions per shard.
    pub fn load(&self) -> Load {
        let mut load = Load::default();
        for shard in &self.shards {
            let tally = shard.with(|shard| shard.tally());
            load.stored_bytes += tally.stored_bytes;
            load.placed_bytes += tally.placed_bytes;
        }
        load.used_bytes = self.arena.look().used * PAGE_BYTES as u64;
        load
    }

    /// Resets the maximum of pages in use to the current number.
    pub fn reset_used_max(&self) {
        self.arena.change(|pages| pages.used_max = pages.used);
    }

    /// Sets the limit, or removes it. If more is in use already, it stays, and no more is
    /// allocated.
    pub fn set_limit(&self, limit_bytes: Option<u64>) {
        let limit = limit_bytes.map(|bytes| bytes / PAGE_BYTES as u64);
        self.arena.change(|pages| pages.limit = limit);
    }
}
