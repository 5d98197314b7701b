//! What a pool uses, for statistics.

use blockyard_sync::lock::Lock;

use super::Pool;
use super::layout::UNIT_BYTES;
use super::memory::PAGE_BYTES;

/// What a pool uses, at a moment. Counts of a pool that is written to meanwhile agree roughly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Objects, those included that are retired and not given back yet.
    pub objects: u64,
    /// Their bytes: zram's `compr_data_size`.
    pub stored_bytes: u64,
    /// Bytes of the system's pages in use: zram's `mem_used_total`.
    pub used_bytes: u64,
    /// The most that were in use since [`Pool::reset_used_max`]: zram's `mem_used_max`.
    pub used_bytes_max: u64,
    /// Most that may be used: zram's `mem_limit`.
    pub limit_bytes: Option<u64>,
    /// Bytes of objects that several words refer to, once more for each but the first.
    pub duplicate_bytes: u64,
    /// Bytes lost because objects begin at multiples of 16, and those of counts.
    pub grain_bytes: u64,
    /// Bytes that are free in the pages in use.
    pub free_bytes: u64,
    /// Bytes of objects that are in no word any more and wait to be given back.
    pub retired_bytes: u64,
    /// Pages that compaction has won: zram's `pages_compacted`.
    pub pages_compacted: u64,
}

impl Usage {
    /// Pages of the system in use: zsmalloc's `pages_used`.
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
    /// Bytes of all objects that there ever were: how much the pool has changed.
    pub placed_bytes: u64,
}

impl Load {
    /// Bytes of pages in use that are no object's.
    pub fn lost_bytes(&self) -> u64 {
        self.used_bytes.saturating_sub(self.stored_bytes)
    }

    /// Bytes of all objects that there ever were, and once more of those that are gone.
    pub(super) fn changed_bytes(&self) -> u64 {
        self.placed_bytes + self.placed_bytes.saturating_sub(self.stored_bytes)
    }
}

/// How many objects there are of one size class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeClass {
    /// The largest object of the class, in bytes; its least has 15 less at most.
    pub bytes: usize,
    /// Objects of the class.
    pub objects: u64,
}

impl Pool {
    /// What is used now.
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

    /// How many objects there are of each size, for classes that have any.
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

    /// How full it is, for who looks often: that costs a few instructions a shard.
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

    /// Begins to look for the most pages in use anew.
    pub fn reset_used_max(&self) {
        self.arena.change(|pages| pages.used_max = pages.used);
    }

    /// Sets another limit, or none. What is used beyond it stays; nothing more is taken.
    pub fn set_limit(&self, limit_bytes: Option<u64>) {
        let limit = limit_bytes.map(|bytes| bytes / PAGE_BYTES as u64);
        self.arena.change(|pages| pages.limit = limit);
    }
}
