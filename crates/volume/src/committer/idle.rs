//! States all groups as durable when the log is idle.
//!
//! A group's header states up to which group the log was durable when that header was written. So
//! no header states it of the last groups until another one follows, and recovery could not
//! distinguish rot in them from a write that a power cut has torn. An empty group after them states
//! it. If no segment has space for that group, a superblock states it.

use std::time::Duration;

use blockyard_store::SegmentStore;

use super::Committer;
use crate::checkpoint;

/// Time without records after which the log counts as idle. A client that sends its next durable
/// write when it has the answer to the last one leaves gaps a hundred times shorter. A disk that
/// takes 10 ms for a durable write spends at most a tenth of its time on these groups.
pub(super) const QUIET: Duration = Duration::from_millis(100);

impl<D: SegmentStore> Committer<D> {
    /// Does the work of an idle pool: makes every group durable, and states that durably.
    pub fn rest(&mut self) {
        self.settle();
        self.record_durable();
    }

    /// Whether every group is stated as durable: by the last group, which is empty, or by a
    /// superblock.
    pub(super) fn is_recorded(&self) -> bool {
        self.recorded == self.log.last()
    }

    /// States durably that every group is durable. Writes at most one unit, and nothing if it is
    /// already stated.
    pub(super) fn record_durable(&mut self) {
        let is_settled = self.in_flight.is_empty() && self.unsynced.is_empty();
        if self.is_recorded() || !is_settled || self.pool.is_latched() {
            return;
        }
        let others = std::mem::take(&mut self.group);
        self.group.durable = true;
        let has_place = self.finds_place();
        let is_written = has_place && self.append().is_ok() && self.complete_alone().is_ok();
        self.group = others;
        // Only one thread at a time writes superblocks: if one does, a later call tries again.
        let is_busy = self.checkpoint.as_ref().is_some_and(|thread| !thread.is_ended());
        let durable = self.log.last();
        if is_written || (!has_place && !is_busy && checkpoint::state_durable(&self.pool, durable))
        {
            self.recorded = self.log.last();
            self.pool.meters().recorded(self.recorded);
        }
    }
}
