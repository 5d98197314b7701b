//! The leaves that are in memory and on disk: so many and no more. One that somebody has looked at
//! since its turn came last stays for another turn; the others are dropped, and read again when
//! they are wanted.
//!
//! Leaves that were changed since the last checkpoint are not among them: checkpoints bound those.
#![allow(clippy::disallowed_types)] // Leaves are read from disk, which takes far longer.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::page::{Evicted, Leaf};
use crate::format::PAGE_BYTES;

/// Leaves that are looked at for one that comes in.
const LOOKS: usize = 8;

/// A write of parts of two blocks needs the leaves of both at once.
const LEAVES_MIN: usize = 2;

/// See the module.
#[derive(Debug)]
pub struct Cache {
    limit: usize,
    /// By turns.
    ring: Mutex<VecDeque<Weak<Leaf>>>,
}

impl Cache {
    /// A cache of so many bytes, or what one write needs.
    pub fn new(limit_bytes: u64) -> Cache {
        let limit = usize::try_from(limit_bytes).unwrap_or(usize::MAX) / PAGE_BYTES;
        Cache { limit: limit.max(LEAVES_MIN), ring: Mutex::default() }
    }

    /// A leaf with a home is in memory now.
    pub fn keep(&self, leaf: &Arc<Leaf>) {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.push_back(Arc::downgrade(leaf));
        for _ in 0..LOOKS {
            if ring.len() <= self.limit {
                return;
            }
            let Some(first) = ring.pop_front() else { return };
            if first.upgrade().is_some_and(|leaf| leaf.evict() == Evicted::Used) {
                ring.push_back(first);
            }
        }
    }

    /// Its bound, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        (self.limit * PAGE_BYTES) as u64
    }

    /// How many leaves are in it.
    pub fn count(&self) -> usize {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::entry::{Codec, Entry};

    #[test]
    fn what_nobody_looks_at_goes_first() {
        let cache = Cache::new(4 * PAGE_BYTES as u64);
        let leaf = |number: u64| {
            let leaf = Leaf::at(Entry::new(number * 4096, 4096, Codec::Raw, 1), 1);
            leaf.fill(&Arc::default());
            Arc::new(leaf)
        };
        let leaves: Vec<_> = (0..20).map(leaf).collect();
        for leaf in &leaves {
            cache.keep(leaf);
            leaves[2].page();
        }
        let here = || leaves.iter().filter(|leaf| leaf.is_here()).count();
        assert!(here() <= 5 && leaves[2].is_here(), "{}", here());
        assert!(cache.count() <= 4 + 1);
    }
}
