//! Lock ranks: debug builds check that a thread takes locks in the order of docs/locks.md.
//!
//! A thread may take a lock only if its rank is above that of every lock that it holds. Two locks
//! of one rank, two zones for example, are therefore never held together, and no cycle can form.

/// Rank of a lock, lowest first. The table in docs/locks.md is this list.
pub mod ranks {
    /// What a serving thread of a FUSE mount has of the devices.
    pub const SEAT: u8 = 2;
    /// Who is next in a zone.
    pub const GATE: u8 = 5;
    /// A zone's lock.
    pub const ZONE: u8 = 10;
    /// What a medium in files knows of a zone.
    pub const MEDIA_ZONE: u8 = 12;
    /// Which zones of a medium's file have changed since the last flush.
    pub const MEDIA_DIRTY: u8 = 14;
    /// A part of the volatile write cache.
    pub const CACHE: u8 = 20;
    /// Open and active zones.
    pub const RESOURCES: u8 = 30;
    /// Faults that were asked for.
    pub const FAULTS: u8 = 40;
    /// The bandwidth limit.
    pub const BUCKET: u8 = 50;
    /// Who compacts the pool of compressed objects.
    pub const COMPACTION: u8 = 55;
    /// A part of the pool of compressed objects.
    pub const SHARD: u8 = 60;
    /// What the parts of that pool share: pages and their limit.
    pub const ARENA: u8 = 70;
    /// A span of a volume's map.
    pub const SPAN: u8 = 72;
    /// What of a leaf of a volume's map is in memory.
    pub const LEAF: u8 = 74;
    /// Buffers of a pool of volumes that are kept.
    pub const SHELF: u8 = 76;
    /// Who publishes in a lane that is shared. Nothing is taken under it.
    pub const LANE: u8 = 80;
}

/// Proof that a lock of some rank is held, as long as it lives. Costs nothing in release builds.
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
    /// Notes that a lock is about to be taken.
    ///
    /// # Panics
    /// In debug builds, if a lock of this or a higher rank is held already.
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
    fn ranks_rise() {
        let outer = Held::note(ranks::ZONE);
        drop(Held::note(ranks::RESOURCES));
        drop(Held::note(ranks::CACHE));
        drop(outer);
        drop(Held::note(ranks::ZONE));
    }

    #[test]
    #[should_panic(expected = "rank 10 taken under a lock of rank 10")]
    fn two_zones_are_never_held_together() {
        let _one = Held::note(ranks::ZONE);
        let _two = Held::note(ranks::ZONE);
    }
}
