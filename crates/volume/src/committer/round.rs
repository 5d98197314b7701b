//! Maintenance that the committer begins: checkpoint rounds, and the checks that it does once a
//! second.
//!
//! A checkpoint is made by a thread of its own:
//!
//! ```text
//! None ── start_checkpoint ──▸ Running ── the thread ends ──▸ Ended ── join ──▸ None
//! ```
//!
//! What the thread does while it runs: see `maintenance.rs`.
//!
//! The periodic checks: whether the pool still exists and belongs to this process, and whether
//! segments without data can be freed or return their space.

use std::sync::Arc;

use blockyard_store::SegmentStore;
use blockyard_volume_format::catalogue::CatalogueImage;
use blockyard_volume_format::superblock::SEGMENT_NONE;

use super::Committer;
use super::in_flight::publish_group;
use crate::checkpoint;
use crate::clean::{self, Cleaning};
use crate::frozen::{Copied, Frozen};
use crate::maintenance::{LivenessScan, RoundCommand, Stage};
use crate::pool::{Pool, WriteAck};
use crate::record::{Body, Record, Relocation};
use crate::segments::AllocationClass;
use crate::thread::{self, Thread};

/// After a failed checkpoint, wait for 1 / `RETRY_PART` of the usual log between checkpoints before
/// trying again.
const RETRY_PART: u64 = 8;

/// The checkpoint thread, as the committer sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RoundState {
    /// There is no thread.
    None,
    /// The thread runs.
    Running,
    /// The thread has done its work, or has panicked, and was not joined.
    Ended,
}

/// The checkpoint thread, and the length of the log since the last checkpoint began.
pub(super) struct Round {
    thread: Option<Thread>,
    /// Bytes of log since the last checkpoint began.
    log_bytes: u64,
    /// The value of `log_bytes` when the last checkpoint began.
    frozen_bytes: u64,
    /// After a failed checkpoint, the value of `log_bytes` from which the next one may begin.
    retry_at: u64,
    /// The value of `log_bytes` when cleaning after the current checkpoint began.
    cleaning_since: Option<u64>,
    /// The repairs since the pool was opened that the last checkpoint has counted.
    repaired: u64,
}

impl Round {
    /// No round, after a log of `log_bytes`. The log that an opening found counts, so that a pool
    /// that is killed repeatedly still makes checkpoints.
    pub(super) fn new(log_bytes: u64) -> Round {
        let (thread, cleaning_since) = (None, None);
        Round { thread, log_bytes, frozen_bytes: 0, retry_at: 0, cleaning_since, repaired: 0 }
    }

    fn state(&self) -> RoundState {
        match &self.thread {
            None => RoundState::None,
            Some(thread) if thread.is_ended() => RoundState::Ended,
            Some(_) => RoundState::Running,
        }
    }

    /// Whether a checkpoint thread runs.
    pub(super) fn is_running(&self) -> bool {
        self.state() == RoundState::Running
    }

    /// Whether a checkpoint thread has ended and is to be joined.
    pub(super) fn has_ended(&self) -> bool {
        self.state() == RoundState::Ended
    }

    /// Whether there is no checkpoint thread: the last one was joined.
    pub(super) fn is_none(&self) -> bool {
        self.state() == RoundState::None
    }

    /// Bytes of log since the last checkpoint began.
    pub(super) fn log_bytes(&self) -> u64 {
        self.log_bytes
    }

    /// Counts bytes that were appended to the log.
    pub(super) fn add_log_bytes(&mut self, bytes: u32) {
        self.log_bytes += u64::from(bytes);
    }

    /// The value of [`Round::log_bytes`] when cleaning after the current checkpoint began.
    pub(super) fn cleaning_since(&self) -> Option<u64> {
        self.cleaning_since
    }

    /// The repairs since the pool was opened that the last checkpoint has counted.
    pub(super) fn repaired(&self) -> u64 {
        self.repaired
    }

    /// Begins a checkpoint.
    fn begin(&mut self) {
        self.frozen_bytes = std::mem::take(&mut self.log_bytes);
        self.retry_at = 0;
    }

    /// Notes that the last checkpoint failed: the log since the one before it keeps its length.
    fn fail(&mut self, checkpoint_bytes: u64) {
        self.log_bytes += std::mem::take(&mut self.frozen_bytes);
        self.retry_at = self.log_bytes + checkpoint_bytes / RETRY_PART;
    }

    /// The value of [`Round::log_bytes`] from which the next checkpoint may begin.
    #[cfg(test)]
    pub(super) fn retry_at(&self) -> u64 {
        self.retry_at
    }

    /// Replaces the checkpoint thread.
    #[cfg(test)]
    pub(super) fn set_thread(&mut self, thread: Thread) {
        self.thread = Some(thread);
    }
}

impl<D: SegmentStore> Committer<D> {
    /// Begins a checkpoint if one is due, and updates when writes are acknowledged. With `at_once`
    /// the checkpoint is made on this thread. Returns whether it is durable.
    pub(super) fn run_maintenance(&mut self, at_once: bool) -> bool {
        if self.round.has_ended() {
            self.join();
        }
        // Changed pages are only in memory, so their number is bounded too.
        let dirty_max = self.dirty_max();
        let is_cleaned = !self.round.is_none() && self.pool.maintenance().stage().is_durable();
        let round_bytes = clean::round_bytes(&self.pool, is_cleaned);
        let dirty = self.pool.segments().dirty_bytes() >= dirty_max;
        let is_long = self.round.log_bytes >= round_bytes.max(self.round.retry_at);
        let much = dirty || is_long || self.pool.segments().is_dirty_limit_near();
        if self.pool.is_latched() {
            return false;
        }
        if at_once {
            self.join();
            return self.checkpoint_now(Cleaning::Nothing);
        }
        // While the checkpoint's pages are being written, the checkpoint must complete.
        if self.round.cleaning_since.is_none() && is_cleaned {
            self.round.cleaning_since = Some(self.round.log_bytes);
        }
        let is_overdue = |from| dirty || self.round.log_bytes >= from + round_bytes;
        let overdue = self.round.cleaning_since.is_some_and(is_overdue);
        if much && self.round.is_none() {
            self.start_checkpoint();
        } else if overdue
            && !self.pool.maintenance().must_finish()
            && self.pool.maintenance().scan() != LivenessScan::Second
        {
            // Cleaning after the last checkpoint had its time. A scan that was interrupted before
            // may complete.
            self.pool.maintenance().send(RoundCommand::Finish);
        } else if is_cleaned && clean::is_scarce(&self.pool) {
            self.pool.maintenance().send(RoundCommand::Clean);
        }
        self.pool.prepare(0);
        self.update_write_ack();
        true
    }

    /// Updates when writes are acknowledged that need not be durable.
    fn update_write_ack(&self) {
        // Writes that are answered early are only in memory, and must find space in existing files.
        // Segments that could still be made do not count, because the file system may be full.
        let free = self.pool.segments().free_for(AllocationClass::Write);
        let next = usize::from(self.log.place.next != SEGMENT_NONE);
        let bytes = (free + next) as u64 * u64::from(self.pool.segments().bytes());
        let wanted = self.pool.early_bytes();
        let left = self.pool.segments().left_bytes();
        let is_low = bytes.min(left) < wanted || self.pool.reserves_all_but(wanted);
        let is_in_log = is_low || self.is_overrun();
        self.pool.set_write_ack(if is_in_log { WriteAck::InLog } else { WriteAck::InMemory });
    }

    /// The maps as they are now, with the end of the log.
    pub(crate) fn freeze(&mut self) -> Frozen {
        self.round.begin();
        self.pool.meters().checkpointed();
        let round = self.pool.segments().begin_round();
        let volumes = self.pool.volumes();
        let maps = volumes.by_id.values();
        let maps = maps.map(|live| {
            let (family, last, owned) = (live.family, live.map.copied(), live.owned());
            let copied = Copied { family, last, owned };
            // A snapshot's map does not change.
            let map = match live.meta.is_snapshot {
                true => live.map.whole(),
                false => Arc::new(live.map.freeze()),
            };
            (live.listed(), copied, map)
        });
        let (live, unknown_bytes) = self.pool.segments().live();
        let (next_id, copies, scrub) = (volumes.next_id, volumes.copies, volumes.scrub);
        self.round.repaired = self.pool.segments().repaired_count();
        let repaired = volumes.repaired_before.saturating_add(self.round.repaired);
        let keys = volumes.keys.values().cloned().collect();
        let whole = CatalogueImage { next_id, copies, live, unknown_bytes, scrub, repaired, keys };
        let (holds, properties) = (volumes.holds.clone(), volumes.properties.clone());
        let volumes = maps.collect();
        Frozen { round, log: self.log.place, whole, volumes, holds, properties }
    }

    /// Makes a checkpoint on this thread, then cleans. Returns whether the checkpoint is durable.
    pub(super) fn checkpoint_now(&mut self, cleaning: Cleaning) -> bool {
        // The checkpoint must follow all groups that it refers to.
        self.complete_all();
        if self.pool.is_latched() || !self.sync() {
            return false;
        }
        debug_assert!(self.round.is_none(), "I5: the last checkpoint thread was not joined");
        let (frozen, pool) = (self.freeze(), Arc::clone(&self.pool));
        let Some(marks) = checkpoint::run(&pool, &frozen) else {
            self.round.fail(self.pool.options().checkpoint_bytes);
            return false;
        };
        clean::inline(&pool, &frozen, &marks, cleaning, |moved| self.move_blocks(moved));
        true
    }

    /// Writes and publishes a group of moves durably. Returns false if there was no space or it
    /// failed. No other group may be in flight.
    pub(crate) fn move_blocks(&mut self, moved: Relocation) -> bool {
        let others = std::mem::take(&mut self.group);
        let align = self.pool.align();
        let record = Record::of(Body::Move(Arc::new(moved)), None);
        self.group.take(record, &self.pool, align);
        let is_written = match self.group.descriptors.is_empty() {
            true if self.fits_changed_pages() && self.sync() => {
                publish_group(&self.pool, &self.group, 0);
                true
            }
            true => false,
            false => self.is_admitted() && self.append().is_ok() && self.complete_alone().is_ok(),
        };
        self.group = others;
        is_written
    }

    /// Makes a checkpoint concurrently with writes, if the pool runs threads.
    pub(super) fn start_checkpoint(&mut self) {
        if !self.pool.is_running() {
            self.checkpoint_now(Cleaning::Due);
            return;
        }
        self.complete_all();
        if self.pool.is_latched() || !self.sync() {
            return;
        }
        debug_assert!(self.round.is_none(), "I5: the last checkpoint thread was not joined");
        let (frozen, pool) = (self.freeze(), Arc::clone(&self.pool));
        let run = move || {
            let of = Arc::downgrade(&pool);
            let is_waited_for =
                |pool: Arc<Pool<D>>| pool.maintenance().must_finish() || clean::is_scarce(&pool);
            thread::set_yielding(move || of.upgrade().is_none_or(is_waited_for));
            let marks = checkpoint::run(&pool, &frozen);
            if let Some(marks) = &marks {
                pool.set_stage(Stage::Scanning);
                clean::concurrent(&pool, &frozen, marks);
            }
            frozen.drop_yielding();
            pool.set_stage(if marks.is_some() { Stage::Resting } else { Stage::Idle });
        };
        self.pool.set_stage(Stage::Writing);
        self.round.cleaning_since = None;
        match Thread::start("volume-checkpoint", run) {
            Ok(thread) => self.round.thread = Some(thread),
            Err(error) => {
                tracing::warn!("no thread for a checkpoint: {error}");
                self.pool.set_stage(Stage::Idle);
                self.pool.segments().end_round(false);
                self.round.fail(self.pool.options().checkpoint_bytes);
            }
        }
    }

    /// Waits for the checkpoint thread. Its cleaning may be waiting for this thread, so this
    /// requests its stop.
    pub(super) fn join(&mut self) {
        let Some(thread) = self.round.thread.take() else { return };
        self.pool.maintenance().send(RoundCommand::Finish);
        if !thread.join() {
            self.pool.latch("a checkpoint has panicked");
        }
        self.pool.maintenance().withdraw_finish();
        if !self.pool.maintenance().stage().is_durable() {
            self.round.fail(self.pool.options().checkpoint_bytes);
        }
    }
}

// The checks once a second.

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
