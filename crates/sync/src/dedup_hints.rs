//! Primitive: hints for finding equal contents.
//!
//! Protects   nothing that must be correct: for a key, blocks that once had contents with that key.
//! Why        a write whose contents are already stored finds them without a tree and its lock. The
//!            writer pins and compares a candidate byte by byte; so a hint may be outdated, wrong
//!            or lost.
//! States     a slot is 0, or a tag of the key and the block's number plus one.
//! Order      no lock.
//! Common     one cache line of [`WAYS`] slots is searched; one store adds a block.
//! Cost       8 bytes a slot, all allocated at the start; a cache miss per write. In a full line a
//!            new hint replaces an old one.
//! Before     a tree by checksum under one lock, as in the patches that zram rejected.

use crate::atomics::{AtomicU64, Ordering};
use crate::page_bitmap::zeroed;

/// Slots that can hold a key's blocks: a cache line.
const WAYS: usize = if cfg!(any(loom, shuttle)) { 2 } else { 8 };
/// Bits of a block's number plus one.
const BLOCK_BITS: u32 = 37;
const BLOCK_MASK: u64 = (1 << BLOCK_BITS) - 1;

/// Keys, and blocks that may have contents with them.
#[derive(Debug)]
pub struct DedupHints {
    slots: Box<[AtomicU64]>,
}

impl DedupHints {
    /// Memory for this number of slots, in bytes.
    pub fn bytes_for(slots: u64) -> u64 {
        DedupHints::slots_for(slots).saturating_mul(8)
    }

    fn slots_for(slots: u64) -> u64 {
        slots.max(WAYS as u64).checked_next_power_of_two().unwrap_or(u64::MAX)
    }

    /// An empty table with `slots` slots, rounded up to a power of two; `None` if there is not
    /// enough memory.
    pub fn new(slots: u64) -> Option<DedupHints> {
        Some(DedupHints { slots: zeroed(DedupHints::slots_for(slots))? })
    }

    /// The memory of the table, in bytes.
    pub fn len_bytes(&self) -> u64 {
        size_of_val(&*self.slots) as u64
    }

    /// The slots of a key, and the value of a slot for that key and block 0.
    #[inline]
    fn line(&self, key: u64) -> (&[AtomicU64], u64) {
        let lines = self.slots.len() / WAYS;
        // High bits choose the line and low bits are the tag: keys are well mixed.
        let line = (key >> 32) as usize & (lines - 1);
        (&self.slots[line * WAYS..(line + 1) * WAYS], (key << BLOCK_BITS) + 1)
    }

    /// Blocks that may have contents with this key.
    #[inline]
    pub fn find(&self, key: u64) -> impl Iterator<Item = u64> + use<> {
        let (line, first) = self.line(key);
        let mut found = [0; WAYS];
        for (found, slot) in found.iter_mut().zip(line) {
            // Relaxed, as everywhere here: a slot publishes nothing but itself.
            *found = slot.load(Ordering::Relaxed);
        }
        let ours = move |slot: &u64| *slot != 0 && (*slot ^ first) & !BLOCK_MASK == 0;
        found.into_iter().filter(ours).map(|slot| (slot & BLOCK_MASK) - 1)
    }

    /// Adds a block that has contents with this key.
    #[inline]
    pub fn note(&self, key: u64, block: u64) {
        debug_assert!(block < BLOCK_MASK);
        let (line, first) = self.line(key);
        let new = first + block;
        let holds = |value| line.iter().position(|slot| slot.load(Ordering::Relaxed) == value);
        if holds(new).is_some() {
            return;
        }
        // If all slots are taken, the tag chooses the slot to replace: a different one for each
        // key.
        let slot = holds(0).unwrap_or(key as usize % WAYS);
        line[slot].store(new, Ordering::Relaxed);
    }

    /// Removes a block that had contents with this key.
    pub fn forget(&self, key: u64, block: u64) {
        let (line, first) = self.line(key);
        for slot in line {
            let old = first + block;
            let _ = slot.compare_exchange(old, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn found(hints: &DedupHints, key: u64) -> Vec<u64> {
        hints.find(key).collect()
    }

    #[test]
    fn noted_block_is_found_until_forgotten() {
        let hints = DedupHints::new(1000).unwrap();
        assert_eq!((hints.len_bytes(), DedupHints::bytes_for(1000)), (8192, 8192));
        let (key, other) = (0x1234_5678_9abc_def0, 0x1234_5678_0000_0001);
        assert!(found(&hints, key).is_empty() && found(&hints, 0).is_empty());
        for block in [0, 7, 7, (1 << 34) - 1] {
            hints.note(key, block);
        }
        hints.note(other, 9);
        hints.note(0, 0);
        assert_eq!(found(&hints, key), [0, 7, (1 << 34) - 1]);
        assert_eq!((found(&hints, other), found(&hints, 0)), (vec![9], vec![0]));
        hints.forget(key, 7);
        hints.forget(other, 7);
        assert_eq!(found(&hints, key), [0, (1 << 34) - 1]);
        assert_eq!(found(&hints, other), [9]);
    }

    #[test]
    fn full_line_replaces_one_entry() {
        let hints = DedupHints::new(0).unwrap();
        for key in 1..=100 {
            hints.note(key, key);
            assert_eq!(found(&hints, key), [key]);
        }
        let left = (1..=100).filter(|key| !found(&hints, *key).is_empty()).count();
        assert_eq!(left, WAYS);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;

    /// Two threads add, one removes, and one searches: every result was added for that key.
    #[test]
    fn find_returns_only_noted_blocks() {
        loom::model(|| {
            let hints = Arc::new(DedupHints::new(2).unwrap());
            let noting = |key, block| {
                let hints = Arc::clone(&hints);
                loom::thread::spawn(move || hints.note(key, block))
            };
            let threads = [noting(1, 10), noting(2, 20)];
            assert!(hints.find(1).all(|block| block == 10));
            assert!(hints.find(2).all(|block| block == 20));
            hints.forget(1, 10);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert!(hints.find(2).all(|block| block == 20));
        });
    }
}
