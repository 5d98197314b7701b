//! What the log records when no writer has come for a while: that all of it is durable.
//!
//! The head of a group says up to which group the log was durable when that head was written. So
//! nothing says it of the last groups before another one follows, and recovery could not tell a bit
//! that has rotted in them from a write that a power cut has torn. An empty group that follows them
//! says it. Where no segment has room for one, a superblock does.

use std::time::Duration;

use super::Committer;
use crate::checkpoint;
use crate::store::Directory;

/// How long no record arrives before the log counts as idle. A client that sends its next durable
/// write when it has the answer to the last one leaves gaps a hundred times shorter. A disk that
/// takes 10 ms for a durable write is busy with such records a tenth of its time at most.
pub(super) const QUIET: Duration = Duration::from_millis(100);

impl<D: Directory> Committer<D> {
    /// Does what waits until no writer has come for a while: makes every group durable, and records
    /// that.
    pub fn rest(&mut self) {
        self.settle();
        self.record_durable();
    }

    /// Whether it is recorded that every group is durable: by the last group, which is empty and
    /// may rot, or by a superblock.
    pub(super) fn is_recorded(&self) -> bool {
        self.recorded == self.log.last()
    }

    /// Records, durably, that every group is durable. It is at most one write of one unit, and none
    /// where that is recorded.
    pub(super) fn record_durable(&mut self) {
        let is_settled = self.flights.is_empty() && self.unsynced.is_empty();
        if self.is_recorded() || !is_settled || self.pool.is_poisoned() {
            return;
        }
        let others = std::mem::take(&mut self.group);
        self.group.durable = true;
        let has_place = self.finds_place();
        let is_written = has_place && self.append().is_ok() && self.land_alone().is_ok();
        self.group = others;
        // A superblock is written by one thread at a time: a later call tries again.
        let is_busy = self.checkpoint.as_ref().is_some_and(|thread| !thread.is_ended());
        let durable = self.log.last();
        if is_written || (!has_place && !is_busy && checkpoint::state_durable(&self.pool, durable))
        {
            self.recorded = self.log.last();
            self.pool.meters().recorded(self.recorded);
        }
    }
}
