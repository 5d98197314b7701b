//! Throttles writes: while space is short, they wait for cleaning. They also wait for a liveness
//! scan that may not be interrupted, if the next checkpoint would become too large meanwhile.

use blockyard_store::SegmentStore;

use super::{Committer, DIRTY_BYTES_MIN};
use crate::clean;
use crate::maintenance::{LivenessScan, Stage};
use crate::segments::AllocationClass;
use crate::thread::Thread;

/// Bytes that writes may use in advance of what cleaning frees while space is short.
const AHEAD_BYTES: u64 = 256 << 10;

/// Writes wait if fewer than this number of segments are left for them.
const LEFT_MIN: usize = 2;

/// While a checkpoint must wait for a liveness scan, changed pages and log may grow to this
/// multiple of what normally starts a checkpoint.
const OVERRUN_DIRTY: u64 = 2;
const OVERRUN_LOG: u64 = 4;

impl<D: SegmentStore> Committer<D> {
    /// Changed pages, in bytes, at which a checkpoint starts: they are only in memory.
    pub(super) fn dirty_max(&self) -> u64 {
        (2 * self.pool.segments().leaves().limit_bytes()).max(DIRTY_BYTES_MIN)
    }

    /// Whether a checkpoint that must wait for a liveness scan has so much to write that no more
    /// may be added.
    pub(super) fn is_overrun(&self) -> bool {
        // A thread that has ended, for whatever reason, is joined soon.
        let is_over = self.checkpoint.as_ref().is_some_and(Thread::is_ended);
        let waits = self.pool.maintenance().scan() == LivenessScan::Second && !is_over;
        if !waits || self.stopping || self.pool.is_latched() {
            return false;
        }
        let log =
            self.cleaning_since.unwrap_or(0) + OVERRUN_LOG * self.pool.options().checkpoint_bytes;
        self.pool.segments().dirty_bytes() >= OVERRUN_DIRTY * self.dirty_max()
            || self.since_checkpoint >= log
    }

    /// Whether writes must wait for cleaning, or for the checkpoint before it.
    pub(super) fn is_throttled(&mut self) -> bool {
        if self.is_overrun() {
            return true;
        }
        let (pool, maintenance) = (&self.pool, self.pool.maintenance());
        let stage = maintenance.stage();
        let is_over = self.checkpoint.as_ref().is_none_or(Thread::is_ended);
        let never_waits =
            is_over || self.stopping || maintenance.must_finish() || pool.is_latched();
        if never_waits || stage != Stage::Cleaning || !clean::is_scarce(pool) {
            self.spent = maintenance.freed_bytes();
        }
        if never_waits || stage.is_at_rest() || !clean::is_scarce(pool) {
            return false;
        }
        let left = pool.segments().free_for(AllocationClass::Write);
        left < LEFT_MIN || self.spent >= maintenance.freed_bytes() + AHEAD_BYTES
    }

    /// Makes writes wait if they must. Records that are in a group already continue.
    pub(super) fn throttle(&mut self) {
        if !self.search.is_on && self.group.records.is_empty() && self.is_throttled() {
            self.pool.meters().held_back();
            self.search.pace();
        }
    }
}
