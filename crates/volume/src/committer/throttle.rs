//! Throttles writes: while space is short, they may use the bytes that cleaning frees, and a little
//! more. Each write waits a little, instead of all for a whole round of cleaning. Writes also wait
//! for a liveness scan that may not be interrupted, if the next checkpoint would become too large
//! meanwhile.

use blockyard_store::SegmentStore;

use super::Committer;
use super::space_waiters::SpaceWait;
use crate::clean;
use crate::maintenance::{LivenessScan, Stage};
use crate::segments::AllocationClass;

/// Changed map pages, in bytes, below which a checkpoint is not worthwhile.
const DIRTY_BYTES_MIN: u64 = 256 << 10;

/// Bytes that writes may use in advance of what cleaning frees while space is short.
const AHEAD_BYTES: u64 = 256 << 10;

/// Writes wait if fewer than this number of segments are left for them.
const LEFT_MIN: usize = 2;

/// While a checkpoint must wait for a liveness scan, changed pages and log may grow to this
/// multiple of what normally starts a checkpoint.
const OVERRUN_DIRTY: u64 = 2;
const OVERRUN_LOG: u64 = 4;

/// The bytes that writes have used of those that cleaning freed for them.
#[derive(Default)]
pub(super) struct Throttle {
    spent_bytes: u64,
}

impl Throttle {
    /// Notes that a group that is not of moves took `len` bytes of the log.
    pub(super) fn spend(&mut self, len: u32) {
        self.spent_bytes += u64::from(len);
    }
}

impl<D: SegmentStore> Committer<D> {
    /// Changed pages, in bytes, at which a checkpoint starts: they are only in memory.
    pub(super) fn dirty_max(&self) -> u64 {
        (2 * self.pool.segments().leaves().limit_bytes()).max(DIRTY_BYTES_MIN)
    }

    /// Whether a checkpoint that must wait for a liveness scan has so much to write that no more
    /// may be added.
    pub(super) fn is_overrun(&self) -> bool {
        // A thread that has ended, for whatever reason, is joined soon.
        let is_second = self.pool.maintenance().scan() == LivenessScan::Second;
        let waits = is_second && !self.round.has_ended();
        if !waits || self.intake.is_stopping() || self.pool.is_latched() {
            return false;
        }
        let log = self.round.cleaning_since().unwrap_or(0)
            + OVERRUN_LOG * self.pool.options().checkpoint_bytes;
        self.pool.segments().dirty_bytes() >= OVERRUN_DIRTY * self.dirty_max()
            || self.round.log_bytes() >= log
    }

    /// Whether writes must wait for cleaning, or for the checkpoint before it.
    pub(super) fn is_throttled(&mut self) -> bool {
        if self.is_overrun() {
            return true;
        }
        let (pool, maintenance) = (&self.pool, self.pool.maintenance());
        let stage = maintenance.stage();
        let never_waits = !self.round.is_running()
            || self.intake.is_stopping()
            || maintenance.must_finish()
            || pool.is_latched();
        if never_waits || stage != Stage::Cleaning || !clean::is_scarce(pool) {
            self.throttle.spent_bytes = maintenance.freed_bytes();
        }
        if never_waits || stage.is_at_rest() || !clean::is_scarce(pool) {
            return false;
        }
        let left = pool.segments().free_for(AllocationClass::Write);
        left < LEFT_MIN || self.throttle.spent_bytes >= maintenance.freed_bytes() + AHEAD_BYTES
    }

    /// Makes writes wait if they must. Records that are in a group already continue.
    pub(super) fn throttle(&mut self) {
        if !self.space.is_waiting() && self.group.records.is_empty() && self.is_throttled() {
            self.pool.meters().throttled();
            self.space.begin(SpaceWait::Throttled);
        }
    }
}
