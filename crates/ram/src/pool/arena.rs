//! The pages that all shards share, and their limit.

use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;

use super::config::RESERVE_PART;

/// With a limit of fewer segments than this, the reserve for compaction is less than a segment.
const SEGMENTS_MIN: u64 = 32;

/// The purpose of an allocation of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PagePurpose {
    /// A client's write: must leave the whole reserve free.
    Write,
    /// An object that replaces a larger one: must leave half of the reserve free.
    Shrink,
    /// An object that compaction moves, which frees more pages: may use the whole reserve.
    Move,
}

/// The number of pages in use, and its limit.
#[derive(Debug)]
pub(super) struct Arena(SleepLock<ArenaPages, { ranks::ARENA }>);

/// The state of an arena.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArenaPages {
    pub(super) used: u64,
    /// Maximum of `used` since the last reset.
    pub(super) used_max: u64,
    pub(super) limit: Option<u64>,
    /// Pages of a segment.
    segment: u64,
    /// Pages that compaction has freed.
    pub(super) compacted: u64,
    /// The shard for the next cache.
    next_shard: u32,
}

impl ArenaPages {
    /// Number of pages that may still be taken for this purpose.
    pub(super) fn free(&self, purpose: PagePurpose) -> u64 {
        let Some(limit) = self.limit else { return u64::MAX };
        // Emptying a segment needs a segment's worth of space, even if the limit is small now. But
        // a limit of few segments is left to contents.
        let least = if limit >= SEGMENTS_MIN * self.segment { self.segment } else { 0 };
        let reserve = match purpose {
            PagePurpose::Write => (limit / u64::from(RESERVE_PART)).max(least),
            PagePurpose::Shrink => (limit / u64::from(2 * RESERVE_PART)).max(least),
            PagePurpose::Move => 0,
        };
        (limit - reserve).saturating_sub(self.used)
    }
}

impl Arena {
    /// Creates an arena with no pages in use; segments have `segment` pages.
    pub(super) fn new(limit: Option<u64>, segment: u64) -> Arena {
        let pages =
            ArenaPages { used: 0, used_max: 0, limit, segment, compacted: 0, next_shard: 0 };
        Arena(SleepLock::new(pages))
    }

    /// Takes up to `wanted` pages, at least `needed`; `None` if the limit allows fewer.
    pub(super) fn take(&self, needed: u32, wanted: u32, purpose: PagePurpose) -> Option<u32> {
        self.0.with(|pages| {
            let free = pages.free(purpose);
            if free < u64::from(needed) {
                return None;
            }
            let taken = u64::from(wanted).min(free);
            pages.used += taken;
            pages.used_max = pages.used_max.max(pages.used);
            Some(taken as u32)
        })
    }

    /// Returns pages.
    pub(super) fn give(&self, count: u32) {
        self.0.with(|pages| pages.used -= u64::from(count));
    }

    pub(super) fn look(&self) -> ArenaPages {
        self.0.with(|pages| *pages)
    }

    pub(super) fn change<R>(&self, f: impl FnOnce(&mut ArenaPages) -> R) -> R {
        self.0.with(f)
    }

    /// The shard for the next cache, round robin.
    pub(super) fn next_shard(&self, shards: u32) -> u32 {
        self.0.with(|pages| {
            pages.next_shard = (pages.next_shard + 1) % shards;
            pages.next_shard
        })
    }
}
