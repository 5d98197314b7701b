//! The pages that all shards share, and their limit.

use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;

use super::RESERVE_PART;

/// What pages are taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Contents that a program writes: the reserve is left alone.
    Write,
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
    /// Given back by compaction.
    pub(super) compacted: u64,
    /// The shard of the next cache.
    next_shard: u32,
}

impl Pages {
    /// Pages that may still be taken.
    pub(super) fn free(&self, purpose: Purpose) -> u64 {
        let Some(limit) = self.limit else { return u64::MAX };
        let reserve = match purpose {
            Purpose::Write => limit / u64::from(RESERVE_PART),
            Purpose::Move => 0,
        };
        (limit - reserve).saturating_sub(self.used)
    }
}

impl Arena {
    pub(super) fn new(limit: Option<u64>) -> Arena {
        Arena(SleepLock::new(Pages { used: 0, used_max: 0, limit, compacted: 0, next_shard: 0 }))
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
