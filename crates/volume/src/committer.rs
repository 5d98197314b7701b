//! The committer: the thread that takes all waiting records, writes them as one group of the log,
//! makes it durable if a record requests that, and answers the records.
//!
//! It does not wait for more records: those that arrive while a group is in flight form the next
//! group. Only the committer writes to the log and changes the trees of the maps.
//!
//! The way of a record, and the functions that move it:
//!
//! ```text
//!                 gather           find_space            append
//! record queue ──────────▸ group ─────────────▸ admitted ───────▸ in flight
//!     held     ◂────────── │                       │ no place        │ complete_oldest
//!      ▴  return_records,  │                       ▾                 ▾
//!      │  split_group      │       refused ◂──── abort           answered
//!      │        park, keep ▾
//!      ├── resume ── waits for space
//!      └── release_awaiting_scan ── waits for a liveness scan ◂── keep_awaiting_scan, of gather
//! ```
//!
//! A group is in flight from the start of its write until it *completes*: then it is written, and
//! durable if a record asked for that, its blocks are in the maps, and its records are answered.
//!
//! The parts of the committer have states, whose diagrams are in their files:
//!
//! - `IntakeState` (`intake.rs`): whether the pool is being closed.
//! - `LogTail` (`durable.rs`): how durable the log is.
//! - `RoundState` (`round.rs`): whether a checkpoint thread runs.
//! - `SpaceWait` (`space_waiters.rs`): what writes wait for.
//!
//! Invariants, which assertions cite by number:
//!
//! - I1: A sync of all groups begins while none is in flight: it covers what was written before.
//! - I2: Groups complete in log order, and those in flight have consecutive numbers.
//! - I3: A durable group is begun only if all groups in flight are durable: its sync does not cover
//!   a write that has not ended.
//! - I4: When a durable group completes, all groups before it are durable.
//! - I5: One thread at a time writes a checkpoint: the committer joins the last one first.
//! - I6: While writes wait for space, no search for more begins.
//! - I7: When the pool closes, no record waits: those that waited precede the stop.

mod awaiting_scan;
mod batch;
mod durable;
mod in_flight;
mod intake;
mod periodic;
mod publish;
mod round;
mod space;
mod space_waiters;
mod throttle;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::Status;
use blockyard_store::{Commit, SegmentStore};
use blockyard_sync::completion_queue::Receiver;
use blockyard_volume_format::catalogue::CHANGE_BYTES_MAX;
use blockyard_volume_format::group as format;

use crate::clean::Cleaning;
use crate::log::LogEnd;
use crate::pool::Pool;
use crate::record::{Body, Record};

use awaiting_scan::ScanWaiters;
use batch::{LogBatch, may_follow};
use durable::{LogTail, QUIET, Unsynced};
use in_flight::Pipeline;
use intake::Intake;
use periodic::PeriodicChecks;
use publish::Answers;
use round::Round;
use space_waiters::{SpaceFound, SpaceWaiters};
use throttle::Throttle;

/// Longest group in bytes, unless a single write is longer. One large write is as fast as several,
/// and faster on a disk with high latency.
const GROUP_BYTES_MAX: u32 = 4 << 20;

/// Least number of groups in a segment, unless a single write is longer. Each header in a segment
/// names the segment in which the log continues, and one header may rot.
const SEGMENT_GROUPS: u32 = 2;

/// Most records in a group: the kernel takes at most 1024 parts in a call.
const RECORDS_MAX: usize = 1000;

/// How long a write that no client asked to be durable may stay unsynced.
const SYNC_DELAY_MAX: Duration = Duration::from_secs(1);

/// How often the committer does its periodic checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Longest sleep of the committer while records wait for space or for a scan.
const WAITERS_CHECK_INTERVAL: Duration = Duration::from_millis(2);

/// What a turn did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It did some work.
    Worked,
    /// There was nothing to do.
    Idle,
    /// The pool was closed.
    Stopped,
}

/// The committer of a pool.
pub struct Committer<D: SegmentStore> {
    pool: Arc<Pool<D>>,
    intake: Intake,
    /// The group that is being gathered, or executed.
    group: LogBatch,
    pipeline: Pipeline<D>,
    log: LogEnd,
    unsynced: Unsynced,
    round: Round,
    throttle: Throttle,
    space: SpaceWaiters,
    scan_waiters: ScanWaiters,
    answers: Answers,
    checks: PeriodicChecks,
}

impl<D: SegmentStore> Committer<D> {
    pub(crate) fn new(pool: Arc<Pool<D>>, queue: Receiver<Record>, log: LogEnd) -> Committer<D> {
        Committer {
            pipeline: Pipeline::new(&pool),
            pool,
            intake: Intake::new(queue),
            group: LogBatch::default(),
            // Opening the pool wrote this number to both superblock slots.
            unsynced: Unsynced::new(log.last()),
            round: Round::new(log.found_bytes),
            log,
            throttle: Throttle::default(),
            space: SpaceWaiters::default(),
            scan_waiters: ScanWaiters::default(),
            answers: Answers::default(),
            checks: PeriodicChecks::default(),
        }
    }

    /// Runs until the pool is closed.
    pub fn run(&mut self) {
        self.log_writer();
        let mut checked = Instant::now();
        loop {
            if checked.elapsed() >= CHECK_INTERVAL {
                checked = Instant::now();
                self.run_periodic_checks();
            }
            match self.turn() {
                Turn::Worked => self.sync_late(),
                Turn::Stopped => return,
                // The thread that stopped the pool has panicked.
                Turn::Idle if self.intake.is_stopping() => return,
                Turn::Idle => self.sleep(),
            }
        }
    }

    /// Sleeps until a record arrives, then does the work of an idle log if none has.
    fn sleep(&mut self) {
        let have_waiters = self.space.is_waiting() || !self.scan_waiters.is_empty();
        let at_most = match self.log_tail() {
            _ if have_waiters => WAITERS_CHECK_INTERVAL,
            LogTail::Durable => QUIET,
            _ => SYNC_DELAY_MAX.min(CHECK_INTERVAL),
        };
        let queue = self.intake.queue();
        queue.completion_queue().event_count().sleep(at_most, || queue.is_any());
        if queue.is_any() || self.space.is_waiting() {
            self.sync_late();
        } else if have_waiters {
            self.sync_all();
        } else {
            self.finish_idle_log();
        }
    }

    /// Writes one group, or waits for a group in flight.
    pub fn turn(&mut self) -> Turn {
        self.end_wait();
        self.resume_after_scan();
        self.throttle();
        if !self.pipeline.is_empty() {
            if !self.may_pipeline() {
                self.complete_oldest();
                return Turn::Worked;
            }
            self.gather();
            if !self.can_pipeline() {
                self.wait();
                return Turn::Worked;
            }
        } else {
            self.gather();
        }
        if self.group.records.is_empty() && self.scan_waiters.is_empty() {
            return Turn::Idle;
        }
        if self.group.records.is_empty() {
            self.resume_after_scan();
            let waits = self.intake.holds_none() && self.pool.is_running();
            return if waits { Turn::Idle } else { Turn::Worked };
        }
        self.execute_group()
    }

    /// Finds space for the group and commits it.
    fn execute_group(&mut self) -> Turn {
        let (stop, wants_checkpoint) = (self.group.stop, self.group.checkpoint);
        match self.find_space() {
            SpaceFound::Found => {}
            SpaceFound::None => {
                self.split_group();
                return Turn::Worked;
            }
            SpaceFound::Later => return Turn::Worked,
        }
        match self.commit() {
            // Its records are answered when it completes.
            None if !wants_checkpoint => {
                if !self.may_pipeline() {
                    self.complete_oldest();
                }
            }
            status => {
                let status = status.unwrap_or_else(|| self.complete_alone());
                self.group.unchecked = wants_checkpoint && !self.run_maintenance(true);
                let failed = wants_checkpoint && status.is_ok() && self.pool.is_latched();
                self.answer(if failed { Status::IoErr } else { status });
            }
        }
        self.run_maintenance(false);
        if stop {
            self.close();
            return Turn::Stopped;
        }
        Turn::Worked
    }

    /// Takes records out of the completion queue until the group is full.
    fn gather(&mut self) {
        let align = self.pool.align();
        let bytes_max = GROUP_BYTES_MAX.min(self.pool.segments().bytes() / SEGMENT_GROUPS);
        let alone = self.pipeline.is_empty();
        let is_change_in_flight = self.pipeline.has_change();
        let options = self.pool.options();
        let records_max = match options.commit {
            _ if self.intake.is_single() => 1,
            Commit::Group => options.group_records.clamp(1, RECORDS_MAX),
            Commit::TaskQueue(_) => 1,
        };
        while self.group.records.len() < records_max && !self.group.closed {
            let Some(record) = self.next() else { return };
            let Some(record) = self.keep_awaiting_scan(record) else { continue };
            let group = &mut self.group;
            let (count, bytes) = match &record.body {
                Body::Write(payload) => (payload.blocks().len(), payload.bytes().len() as u32),
                Body::Zero(_) => (1, 0),
                Body::Move(moved) => (moved.moves.len(), 0),
                Body::Catalogue(_) => (1, (CHANGE_BYTES_MAX as u32).next_multiple_of(align)),
                Body::Flush | Body::Checkpoint | Body::Stop => (0, 0),
            };
            let count = group.descriptors.len() + count;
            let head = format::head_bytes(count, align);
            let fits = count <= format::DESCRIPTORS_MAX
                && head as usize <= self.pipeline.head_bytes_max
                && u64::from(head + group.payload_bytes) + u64::from(bytes) <= bytes_max.into();
            let follows = match record.body {
                // A snapshot is a record, like the writes, which therefore need not stop for it.
                Body::Catalogue(_) => !group.changes_catalogue && !is_change_in_flight,
                _ => alone || may_follow(&record),
            };
            // A move has a group of its own, because it must not trigger a search for space.
            let fits = fits && !matches!(record.body, Body::Move(_));
            if (!fits && !group.records.is_empty()) || !follows {
                self.intake.hold(record);
                return;
            }
            self.intake.count_grouped();
            group.take(record, &self.pool, align);
        }
    }

    /// Begins to write the group. Returns the group's status, or `None` if it is in flight now.
    fn commit(&mut self) -> Option<Status> {
        if self.pool.is_latched() {
            self.complete_all();
            return Some(Status::IoErr);
        }
        if self.group.descriptors.is_empty() {
            self.complete_all();
            // A flush is answered by its sync, even if another record of its group is refused.
            if (self.group.durable && !self.sync()) || self.pool.is_latched() {
                return Some(Status::IoErr);
            }
            if !self.fits_changed_pages() {
                return Some(Status::NoSpc);
            }
            // A record that only gives pages up writes no group.
            publish::group(&self.pool, &self.group, 0);
            return Some(Status::Ok);
        }
        match self.write() {
            Ok(()) => None,
            Err(status) => {
                self.complete_all();
                // Records that only wait for earlier writes must not fail because of this one.
                let synced = !self.group.durable || self.sync();
                self.abort();
                Some(if synced { status } else { Status::IoErr })
            }
        }
    }

    /// Finds a place for the group and begins to write it there.
    fn write(&mut self) -> Result<(), Status> {
        if !self.group.admitted && !self.is_admitted() {
            return Err(Status::NoSpc);
        }
        let len = self.group.len(self.pool.align());
        let much = self.unsynced.bytes() + u64::from(len) >= self.pool.options().sync_bytes;
        self.group.durable |= much;
        self.append()
    }

    /// Answers all records of the group and empties it.
    fn answer(&mut self, status: Status) {
        self.answers.answer(&self.pool, &mut self.group, status);
        self.answers.wake();
        self.group.clear();
    }

    /// Closes the pool: makes everything durable with a last checkpoint, so that the next opening
    /// has nothing to replay.
    fn close(&mut self) {
        debug_assert!(self.space.is_empty() && self.scan_waiters.is_empty(), "I7: a record waits");
        self.complete_all();
        self.join();
        self.pool.end_preparing();
        let is_recorded = self.log_tail() == LogTail::Recorded && self.round.log_bytes() == 0;
        if !self.pool.is_latched() && !is_recorded {
            // If the superblock written now is lost, an opening by the other slot relies on the
            // log.
            self.finish_idle_log();
            self.checkpoint_now(Cleaning::Nothing);
        }
    }
}

impl<D: SegmentStore> fmt::Debug for Committer<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Committer").field("log", &self.log).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
