//! What a device counts, by zram's names.
//!
//! Each thread that works on blocks has a [`Tally`] of its own, so that counting touches no line
//! that another thread writes; zram pays two to four shared atomics a write for the same numbers. A
//! block that one thread stored and another frees is added in one tally and taken off in the other:
//! each is any number, their sum is right.
#![allow(clippy::disallowed_types)] // The list of tallies is control plane.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use blockyard_sync::counter::Counter;

/// Something that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Count {
    /// Reads that failed: what is stored is damaged, or the backing file failed.
    FailedReads,
    /// Writes that failed for lack of memory.
    FailedWrites,
    /// Blocks that a discard or a write-zeroes has freed.
    NotifyFree,
    /// Blocks that hold something.
    Stored,
    /// Bytes of objects, as compressed.
    Compressed,
    /// Blocks that are one word repeated.
    Same,
    /// Blocks stored raw, now.
    Huge,
    /// Blocks stored raw, since the device was made.
    HugeSince,
    /// Blocks on the backing file, now.
    Backed,
    /// Reads of the backing file, in blocks.
    BackedReads,
    /// Writes to the backing file, in blocks.
    BackedWrites,
    /// Sub-block writes that another writer overtook and that were made anew.
    PatchRetries,
}

/// How many there are.
const COUNTS: usize = Count::PatchRetries as usize + 1;

/// One thread's counts.
#[derive(Debug, Default)]
struct Tallied([Counter; COUNTS]);

/// One thread's counts, in the registry until it is dropped.
pub(crate) struct Tally {
    counts: Arc<Tallied>,
    registry: Arc<Counters>,
}

impl Tally {
    /// Counts `n`, which may stand for less than nothing: counts wrap.
    #[inline]
    pub(crate) fn add(&self, what: Count, n: u64) {
        self.counts.0[what as usize].add(n);
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        let mut tallies = self.registry.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Tallies { closed, open } = &mut *tallies;
        if let Some(index) = open.iter().position(|counts| Arc::ptr_eq(counts, &self.counts)) {
            closed.add(&open.swap_remove(index));
        }
    }
}

impl fmt::Debug for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tally").field(&self.counts.0).finish()
    }
}

/// All tallies of a device: the open ones, and the sum of those that are closed.
#[derive(Debug, Default)]
pub(crate) struct Counters(Mutex<Tallies>);

#[derive(Debug, Default)]
struct Tallies {
    closed: Sum,
    open: Vec<Arc<Tallied>>,
}

/// A sum over tallies.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sum([u64; COUNTS]);

impl Sum {
    fn add(&mut self, counts: &Tallied) {
        for (sum, count) in self.0.iter_mut().zip(&counts.0) {
            *sum = sum.wrapping_add(count.get());
        }
    }

    /// A count. What is added and taken off by different threads may be seen in the wrong order;
    /// a sum that is below zero for a moment counts as zero.
    pub(crate) fn get(&self, what: Count) -> u64 {
        u64::try_from(self.0[what as usize] as i64).unwrap_or(0)
    }
}

impl Counters {
    /// A tally for one thread.
    pub(crate) fn open(self: &Arc<Self>) -> Tally {
        let counts = Arc::new(Tallied::default());
        let mut tallies = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tallies.open.push(Arc::clone(&counts));
        Tally { counts, registry: Arc::clone(self) }
    }

    /// The sum now.
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
    fn what_one_thread_adds_another_takes_off() {
        let counters = Arc::new(Counters::default());
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
