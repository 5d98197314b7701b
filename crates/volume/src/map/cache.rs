//! The cache of leaves that are in memory and on disk, with a bound. Eviction is second chance
//! (CLOCK): a leaf that was used since its last turn stays for another, others are evicted and read
//! again when needed.
//!
//! Leaves that changed since the last checkpoint are not in the cache; checkpoints bound their
//! number.
#![allow(clippy::disallowed_types)] // Leaves are read from disk, which takes far longer.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use blockyard_volume_format::PAGE_BYTES;

use super::page::{Evicted, Leaf};

/// Leaves examined for eviction when one is added.
const EXAMINED: usize = 8;

/// Least capacity in leaves: a write of parts of two blocks needs the leaves of both.
const LEAVES_MIN: usize = 2;

/// A bounded cache of clean leaves.
#[derive(Debug)]
pub struct Cache {
    limit: usize,
    /// Leaves in the order in which they are examined.
    ring: Mutex<VecDeque<Weak<Leaf>>>,
}

impl Cache {
    /// A cache of at most this many bytes, or of what one write needs if that is more.
    pub fn new(limit_bytes: u64) -> Cache {
        let limit = usize::try_from(limit_bytes).unwrap_or(usize::MAX) / PAGE_BYTES;
        Cache { limit: limit.max(LEAVES_MIN), ring: Mutex::default() }
    }

    /// Adds a leaf that is on disk and now in memory too.
    pub fn keep(&self, leaf: &Arc<Leaf>) {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.push_back(Arc::downgrade(leaf));
        for _ in 0..EXAMINED {
            if ring.len() <= self.limit {
                return;
            }
            let Some(first) = ring.pop_front() else { return };
            if first.upgrade().is_some_and(|leaf| leaf.evict() == Evicted::Used) {
                ring.push_back(first);
            }
        }
    }

    /// The bound of the cache, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        (self.limit * PAGE_BYTES) as u64
    }

    /// Number of leaves in the cache.
    pub fn count(&self) -> usize {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_volume_format::entry::{Codec, Entry};

    #[test]
    fn the_least_recently_used_page_is_evicted_first() {
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
        let here = || leaves.iter().filter(|leaf| leaf.is_resident()).count();
        assert!(here() <= 5 && leaves[2].is_resident(), "{}", here());
        assert!(cache.count() <= 4 + 1);
    }
}
