//! What the committer checks once a second: whether the pool still exists and belongs to this
//! process, and whether segments without data can be freed or return their space.

use blockyard_store::SegmentStore;

use super::Committer;
use crate::checkpoint;
use crate::maintenance::RoundCommand;

/// Segments that were free at each of this number of checks return their space to the file system.
const SURPLUS_CHECKS: u32 = 60;

/// Most segments that return their space together, so that a thread is not busy with them for long:
/// 32 GiB of segments of 32 MiB.
const HOLES_MAX: usize = 1024;

/// Segments without live data for which an idle pool writes a checkpoint.
pub(super) const DEAD_MIN: usize = 8;

/// An idle pool starts a liveness scan if its unknown bytes exceed 1 / `UNKNOWN_PART` of its used
/// bytes, or a segment.
const UNKNOWN_PART: u64 = 32;

/// What earlier checks have found.
pub(super) struct PeriodicChecks {
    /// The last group at the last check.
    last_group: u64,
    /// The last group when an idle pool last requested a liveness scan.
    scanned_at: Option<u64>,
    /// The least number of free segments at the checks since surplus space was last returned.
    least_free: usize,
    /// The number of these checks.
    count: u32,
}

impl Default for PeriodicChecks {
    fn default() -> PeriodicChecks {
        PeriodicChecks { last_group: 0, scanned_at: None, least_free: usize::MAX, count: 0 }
    }
}

impl<D: SegmentStore> Committer<D> {
    /// Checks that the pool still exists, so that a removed pool does not acknowledge writes as
    /// durable. Checks how much space its file system has left, which other programs use too.
    /// Returns surplus space to the file system.
    pub(super) fn run_periodic_checks(&mut self) {
        self.pool.segments().measure_outside_space();
        self.pool.latch_if_removed();
        if self.pool.is_latched() {
            return;
        }
        let last = self.log.last();
        let is_idle = std::mem::replace(&mut self.checks.last_group, last) == last;
        // The locks do not keep out a process that reaches the pool by another name or from another
        // host. Its first write is a superblock with an epoch of its own.
        if !is_idle
            && let Err(error) = checkpoint::check_owner(self.pool.segments(), self.log.epoch)
        {
            self.pool.latch(&error.to_string());
            return;
        }
        if is_idle {
            self.request_idle_scan();
        }
        self.checks.least_free = self.checks.least_free.min(self.pool.segments().free());
        self.checks.count += 1;
        if self.checks.count < SURPLUS_CHECKS {
            return;
        }
        self.checks.count = 0;
        let least_free = std::mem::replace(&mut self.checks.least_free, usize::MAX);
        let surplus = self.pool.surplus(least_free).min(HOLES_MAX);
        if surplus > 0 {
            self.pool.punch_holes(surplus);
        } else if self.pool.segments().may_try_again() {
            self.pool.try_again();
        } else if is_idle {
            self.free_dead_segments();
        }
    }

    /// Starts a checkpoint if many segments have no live data, as after a large discard: they are
    /// free, and can return their space, after the second checkpoint from then on. A busy pool
    /// writes checkpoints anyway.
    pub(super) fn free_dead_segments(&mut self) {
        if !self.round.is_running() && self.pool.segments().dead() >= DEAD_MIN {
            self.join();
            self.start_checkpoint();
        }
    }

    /// Requests a liveness scan of an idle pool if many bytes may not be live any more, as after
    /// `destroy`, so that the reported free space becomes exact. Once only, until the next write.
    fn request_idle_scan(&mut self) {
        let segments = self.pool.segments();
        let unknown = segments.unknown_bytes();
        let (used, _) = segments.used_and_left_bytes();
        let is_much = unknown >= u64::from(segments.bytes()).min(used / UNKNOWN_PART).max(1);
        if !is_much || self.checks.scanned_at == Some(self.log.last()) {
            return;
        }
        self.checks.scanned_at = Some(self.log.last());
        if self.pool.requested_scan().is_none() {
            self.pool.maintenance().send(RoundCommand::Scan { after: segments.round() + 1 });
        }
    }
}
