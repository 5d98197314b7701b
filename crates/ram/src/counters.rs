//! Counters of a device, by zram's names.
//!
//! Each thread that works on blocks has a [`CounterHandle`] of its own, so counting writes to no
//! cache line that another thread writes; zram pays two to four shared atomics per write for the
//! same numbers. One thread may store a block and another free it: the counters of the one go up
//! and those of the other down. So the counters of one thread mean nothing; only the sum is right.
#![allow(clippy::disallowed_types)] // The registry is control plane.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use blockyard_sync::counter::Counter;

/// A quantity that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Count {
    /// Reads that failed: the stored data is damaged, or the backing file failed.
    FailedReads,
    /// Writes that failed, for lack of memory or because a block that they change is damaged.
    FailedWrites,
    /// Writes that failed for lack of memory.
    WritesRefused,
    /// Blocks that a discard or a write-zeroes freed.
    NotifyFree,
    /// Blocks that hold data.
    Stored,
    /// Compressed bytes of the objects.
    Compressed,
    /// Same-filled blocks.
    Same,
    /// Blocks that are stored uncompressed now.
    Huge,
    /// Blocks that were stored uncompressed since the device was created.
    HugeSince,
    /// Blocks in the backing file now.
    Backed,
    /// Blocks read from the backing file.
    BackedReads,
    /// Blocks written to the backing file.
    BackedWrites,
    /// Sub-block writes that were repeated because another write replaced the block first.
    PatchRetries,
}

/// Number of counters.
const COUNTS: usize = Count::PatchRetries as usize + 1;

/// The counters of one thread.
#[derive(Debug, Default)]
struct Tallied([Counter; COUNTS]);

/// A thread's handle on its counters, which stay in the registry until it is dropped.
pub(crate) struct CounterHandle {
    counts: Arc<Tallied>,
    registry: Arc<CounterRegistry>,
}

impl CounterHandle {
    /// Adds `n`; a two's-complement negative `n` subtracts, since the counters wrap.
    #[inline]
    pub(crate) fn add(&self, what: Count, n: u64) {
        self.counts.0[what as usize].add(n);
    }
}

impl Drop for CounterHandle {
    fn drop(&mut self) {
        let mut tallies = self.registry.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Tallies { closed, open } = &mut *tallies;
        if let Some(index) = open.iter().position(|counts| Arc::ptr_eq(counts, &self.counts)) {
            closed.add(&open.swap_remove(index));
        }
    }
}

impl fmt::Debug for CounterHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tally").field(&self.counts.0).finish()
    }
}

/// All tallies of a device: those of live threads, and the sum of the closed ones.
#[derive(Debug, Default)]
pub(crate) struct CounterRegistry(Mutex<Tallies>);

#[derive(Debug, Default)]
struct Tallies {
    closed: Sum,
    open: Vec<Arc<Tallied>>,
}

/// A sum over all tallies.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sum([u64; COUNTS]);

impl Sum {
    fn add(&mut self, counts: &Tallied) {
        for (sum, count) in self.0.iter_mut().zip(&counts.0) {
            *sum = sum.wrapping_add(count.get());
        }
    }

    /// A counter. The decrement of one thread may be visible before the increment of another; a sum
    /// that is negative for a moment reads as zero.
    pub(crate) fn get(&self, what: Count) -> u64 {
        u64::try_from(self.0[what as usize] as i64).unwrap_or(0)
    }
}

impl CounterRegistry {
    /// Creates a tally for one thread.
    pub(crate) fn open(self: &Arc<Self>) -> CounterHandle {
        let counts = Arc::new(Tallied::default());
        let mut tallies = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tallies.open.push(Arc::clone(&counts));
        CounterHandle { counts, registry: Arc::clone(self) }
    }

    /// The sum over all threads now.
    pub(crate) fn sum(&self) -> Sum {
        let tallies = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sum = tallies.closed.clone();
        for counts in &tallies.open {
            sum.add(counts);
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sum_is_right_if_another_thread_subtracts() {
        let counters = Arc::new(CounterRegistry::default());
        let (one, two) = (counters.open(), counters.open());
        one.add(Count::Stored, 5);
        two.add(Count::Stored, 3u64.wrapping_neg());
        assert_eq!(counters.sum().get(Count::Stored), 2);
        drop(one);
        assert_eq!(counters.sum().get(Count::Stored), 2);
        two.add(Count::Stored, 3u64.wrapping_neg());
        assert_eq!(counters.sum().get(Count::Stored), 0);
        drop(two);
        counters.open().add(Count::Stored, 1);
        assert_eq!(counters.sum().get(Count::Stored), 0);
    }
}
