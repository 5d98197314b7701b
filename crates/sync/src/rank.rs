//! Lock ranks: debug builds check that a thread takes locks in the order of docs/locks.md.
//!
//! A thread may take a lock only if its rank is above that of every lock that it holds. Two locks
//! of one rank, two zones for example, are therefore never held together, and no cycle can form.

/// Ranks of locks, lowest first. The table in docs/locks.md is this list.
pub mod ranks {
    /// The devices of a serving thread of a FUSE mount.
    pub const FUSE_HANDLES: u8 = 2;
    /// The queues of the zone write plug.
    pub const GATE: u8 = 5;
    /// A zone's lock.
    pub const ZONE: u8 = 10;
    /// The state of a zone on a medium in files.
    pub const MEDIA_ZONE: u8 = 12;
    /// The zones of a medium's data file that have changed since the last flush.
    pub const MEDIA_DIRTY: u8 = 14;
    /// A part of the volatile write cache.
    pub const CACHE: u8 = 20;
    /// Open and active zones.
    pub const RESOURCES: u8 = 30;
    /// Injected faults.
    pub const FAULTS: u8 = 40;
    /// The bandwidth limit.
    pub const BUCKET: u8 = 50;
    /// Compaction of the pool of compressed objects.
    pub const COMPACTION: u8 = 55;
    /// A shard of the pool of compressed objects.
    pub const SHARD: u8 = 60;
    /// The pages and the limit that the shards of that pool share.
    pub const ARENA: u8 = 70;
    /// A span of a volume's map.
    pub const SPAN: u8 = 72;
    /// The part of a leaf of a volume's map that is in memory.
    pub const LEAF: u8 = 74;
    /// Buffers that a pool of volumes keeps for reuse.
    pub const SHELF: u8 = 76;
    /// Publishing in a shared submit ring. No lock is taken under it.
    pub const SUBMIT_RING: u8 = 80;
}

/// Proof that a lock of a rank is held. It costs nothing in release builds.
#[derive(Debug)]
#[must_use]
pub(crate) struct Held {
    #[cfg(all(debug_assertions, not(any(loom, shuttle))))]
    before: u8,
}

#[cfg(all(debug_assertions, not(any(loom, shuttle))))]
thread_local! {
    /// Rank of the last lock that this thread took and still holds; 0 for none.
    static TOP: std::cell::Cell<u8> = const { std::cell::Cell::new(0) };
}

impl Held {
    /// Records that a lock is about to be taken.
    ///
    /// # Panics
    /// In debug builds, if the thread already holds a lock of this or a higher rank.
    #[inline]
    pub(crate) fn note(rank: u8) -> Held {
        #[cfg(all(debug_assertions, not(any(loom, shuttle))))]
        {
            let before = TOP.get();
            assert!(rank > before, "lock of rank {rank} taken under a lock of rank {before}");
            TOP.set(rank);
            Held { before }
        }
        #[cfg(not(all(debug_assertions, not(any(loom, shuttle)))))]
        {
            let _ = rank;
            Held {}
        }
    }
}

#[cfg(all(debug_assertions, not(any(loom, shuttle))))]
impl Drop for Held {
    fn drop(&mut self) {
        TOP.set(self.before);
    }
}

#[cfg(all(test, debug_assertions, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn locks_are_taken_in_rising_rank() {
        let outer = Held::note(ranks::ZONE);
        drop(Held::note(ranks::RESOURCES));
        drop(Held::note(ranks::CACHE));
        drop(outer);
        drop(Held::note(ranks::ZONE));
    }

    #[test]
    #[should_panic(expected = "rank 10 taken under a lock of rank 10")]
    fn second_lock_of_equal_rank_panics() {
        let _one = Held::note(ranks::ZONE);
        let _two = Held::note(ranks::ZONE);
    }
}
