//! The pages that all shards share, and their limit.

use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;

use super::config::RESERVE_PART;

/// A limit of fewer segments leaves compaction less than one.
const SEGMENTS_MIN: u64 = 32;

/// What pages are taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Contents that a program writes: the reserve is left alone.
    Write,
    /// Objects that take the place of larger ones: half of the reserve is left alone.
    Shrink,
    /// Objects that compaction moves, to give more pages back.
    Move,
}

/// Pages in use, and how many there may be.
#[derive(Debug)]
pub(super) struct Arena(SleepLock<Pages, { ranks::ARENA }>);

/// What an arena knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pages {
    pub(super) used: u64,
    /// The most that were used since it was last set back.
    pub(super) used_max: u64,
    pub(super) limit: Option<u64>,
    /// Pages of a segment.
    segment: u64,
    /// Given back by compaction.
    pub(super) compacted: u64,
    /// The shard of the next cache.
    next_shard: u32,
}

impl Pages {
    /// Pages that may still be taken.
    pub(super) fn free(&self, purpose: Purpose) -> u64 {
        let Some(limit) = self.limit else { return u64::MAX };
        // What is moved out of a segment needs as much room, whatever the limit is by now; but a
        // limit of few segments is for contents.
        let least = if limit >= SEGMENTS_MIN * self.segment { self.segment } else { 0 };
        let reserve = match purpose {
            Purpose::Write => (limit / u64::from(RESERVE_PART)).max(least),
            Purpose::Shrink => (limit / u64::from(2 * RESERVE_PART)).max(least),
            Purpose::Move => 0,
        };
        (limit - reserve).saturating_sub(self.used)
    }
}

impl Arena {
    /// No pages in use, of a pool whose segments have so many pages.
    pub(super) fn new(limit: Option<u64>, segment: u64) -> Arena {
        let pages = Pages { used: 0, used_max: 0, limit, segment, compacted: 0, next_shard: 0 };
        Arena(SleepLock::new(pages))
    }

    /// Counts up to `wanted` pages as used, `needed` at least; `None` if the limit allows fewer.
    pub(super) fn take(&self, needed: u32, wanted: u32, purpose: Purpose) -> Option<u32> {
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

    /// Counts pages as given back.
    pub(super) fn give(&self, count: u32) {
        self.0.with(|pages| pages.used -= u64::from(count));
    }

    pub(super) fn look(&self) -> Pages {
        self.0.with(|pages| *pages)
    }

    pub(super) fn change<R>(&self, f: impl FnOnce(&mut Pages) -> R) -> R {
        self.0.with(f)
    }

    /// A shard for the next cache, in turns.
    pub(super) fn next_shard(&self, shards: u32) -> u32 {
        self.0.with(|pages| {
            pages.next_shard = (pages.next_shard + 1) % shards;
            pages.next_shard
        })
    }
}
