//! Searching for space. Writes without space wait while another thread makes segments, or
//! checkpoints and cleans. Flushes, discards and acknowledged writes continue.
//!
//! A record that overlaps a waiting write waits for it. A write of part of a block includes the
//! rest of the block as it was pending then, so writes of one block must keep their order.
//!
//! ```text
//! None ── park ──▸ NewSegments, Round ──┐
//! None ── throttle ──▸ Throttled ───────┴─ resume ──▸ None
//! ```
//!
//! A refused write has no effect. Before the answer its blocks are taken out of memory. Writes that
//! copied the rest of a block from it are refused too, and those that copied from these.

use std::collections::VecDeque;
use std::sync::Arc;

use blockyard_core::Status;
use blockyard_store::SegmentStore;

use super::Committer;
use super::batch::{LogBatch, want};
use crate::checkpoint;
use crate::pool::Pool;
use crate::record::{Body, Record};
use crate::segments::{AllocationClass, Progress};

/// How often the search continues after a try that changed nothing.
pub(super) const UNCHANGED_TRIES_MAX: usize = 5;

/// Most checkpoints with cleaning in one search for space.
pub(super) const SEARCH_TRIES_MAX: usize = 64;

/// After a failed search for space, refuse this number of groups without searching again: a search
/// takes a checkpoint and cleaning.
pub(super) const ENOSPC_BACKOFF_MAX: u32 = 16;

/// Result of looking for space for a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpaceFound {
    /// There is space, or the group has one record and is to be refused.
    Found,
    /// There is no space: each record is tried alone.
    None,
    /// The group waits for space.
    Later,
}

/// What writes wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum SpaceWait {
    /// They do not wait.
    #[default]
    None,
    /// Another thread makes segments.
    NewSegments,
    /// The checkpoint thread makes a checkpoint and cleans.
    Round,
    /// Cleaning is to free enough bytes: the writes are throttled.
    Throttled,
}

/// The records that wait for space, and the search for it.
#[derive(Default)]
pub(super) struct SpaceWaiters {
    wait: SpaceWait,
    records: VecDeque<Record>,
    /// What they need, if only segments are missing: number of pages, and of segments.
    needs: Option<(u64, usize)>,
    /// A waiting record was answered early, so a flush must wait for it.
    is_owed: bool,
    search: SpaceSearch,
    /// Number of further groups that are refused without a search, because the last search failed.
    pub(super) enospc_backoff: u32,
}

/// A search for space: the tries until space is found, or the search fails.
#[derive(Default)]
struct SpaceSearch {
    /// Making a segment was retried after it had failed.
    is_retried: bool,
    /// Number of tries.
    tried: usize,
    /// Number of tries in a row that changed nothing.
    unchanged: usize,
    before: Option<Progress>,
}

impl SpaceWaiters {
    /// Whether writes wait.
    pub(super) fn is_waiting(&self) -> bool {
        self.wait != SpaceWait::None
    }

    /// Makes writes wait.
    pub(super) fn begin(&mut self, wait: SpaceWait) {
        self.wait = wait;
    }

    /// Whether no record waits.
    pub(super) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Keeps a record that must wait; returns any other record.
    fn keep<D: SegmentStore>(&mut self, record: Record, pool: &Pool<D>) -> Option<Record> {
        let waits = want(&record, pool) == Some(AllocationClass::Write)
            || self.records.iter().any(|other| overlap(other, &record))
            || self.is_owed && !matches!(record.body, Body::Move(_));
        if !waits {
            return Some(record);
        }
        self.is_owed |= record.reply.is_none();
        self.records.push_back(record);
        None
    }
}

/// Whether two records change a common block of one volume.
fn overlap(one: &Record, other: &Record) -> bool {
    let range = |record: &Record| match &record.body {
        Body::Write(payload) => record.first..record.first + payload.blocks().len() as u64,
        Body::Zero(blocks) => record.first..record.first + u64::from(*blocks),
        _ => 0..0,
    };
    let (a, b) = (range(one), range(other));
    let is_one = match (&one.volume, &other.volume) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        _ => false,
    };
    is_one && a.start < b.end && b.start < a.end
}

impl<D: SegmentStore> Committer<D> {
    /// The next record that need not wait for space.
    pub(super) fn next(&mut self) -> Option<Record> {
        loop {
            let record = self.intake.take()?;
            if self.intake.is_stopping() && !self.scan_waiters.is_empty() {
                // The waiting changes precede the stop.
                self.intake.hold(record);
                self.release_awaiting_scan();
                continue;
            }
            if !self.space.is_waiting() {
                return Some(record);
            }
            if self.intake.is_stopping() {
                // The waiting records precede the stop, and are not kept again.
                self.intake.hold(record);
                self.resume();
            } else if let Some(record) = self.space.keep(record, &self.pool) {
                return Some(record);
            }
        }
    }

    /// Releases the waiting records: either there is space now, or they start another search.
    pub(super) fn resume(&mut self) {
        (self.space.wait, self.space.is_owed) = (SpaceWait::None, false);
        self.intake.hold_all(self.space.records.drain(..));
    }

    /// Releases the waiting records when their wait is over: segments were made, the checkpoint and
    /// its cleaning ended, or throttling ended.
    pub(super) fn end_wait(&mut self) {
        if !self.space.is_waiting() {
            return;
        }
        self.refuse_leaving();
        let is_over = match self.space.wait {
            SpaceWait::None | SpaceWait::NewSegments => !self.pool.is_preparing(),
            SpaceWait::Throttled => !self.is_throttled(),
            SpaceWait::Round => {
                let segments = self.pool.segments();
                let has = |(pages, taken)| segments.has(AllocationClass::Write, pages, taken);
                !self.round.is_running()
                    || self.pool.maintenance().stage().is_at_rest()
                    || self.space.needs.is_some_and(has)
            }
        };
        if is_over || self.pool.is_latched() {
            self.resume();
        }
    }

    /// Refuses waiting writes of handles that are being closed, because closing waits for them.
    fn refuse_leaving(&mut self) {
        if !self.pool.is_any_leaving() || self.pool.is_latched() {
            return;
        }
        let is_leaving = |pool: &Pool<D>, record: &Record| {
            matches!(record.body, Body::Write(_)) && pool.is_leaving(record)
        };
        if !self.space.records.iter().any(|record| is_leaving(&self.pool, record)) {
            return;
        }
        // After this, groups in flight are in the maps and no longer only in memory.
        self.complete_all();
        if self.pool.is_latched() {
            return;
        }
        let waiting = std::mem::take(&mut self.space.records).into_iter();
        let (mut refused, waiting): (Vec<Record>, Vec<Record>) =
            waiting.partition(|record| is_leaving(&self.pool, record));
        self.space.records = waiting.into();
        self.refuse_copies(&mut refused);
        let mut group = LogBatch { records: refused, ..LogBatch::default() };
        self.answers.answer(&self.pool, &mut group, Status::NoSpc);
        self.answers.wake();
    }

    /// Takes the blocks of refused records out of memory, and adds to these all waiting records
    /// that contain data copied from them. No group in flight may contain such blocks.
    pub(super) fn refuse_copies(&mut self, refused: &mut Vec<Record>) {
        let mut next = 0;
        while let Some(record) = refused.get(next) {
            // This comes first: afterwards no copy can begin, and all existing copies are in the
            // record queue or are held.
            let held = self.intake.held().iter();
            let waiting = self.space.records.iter().chain(held).chain(&self.group.records);
            record.withdraw(waiting);
            self.intake.empty_queue();
            for queue in [&mut self.space.records, self.intake.held()] {
                let all = std::mem::take(queue).into_iter();
                let (copies, others): (Vec<Record>, Vec<Record>) =
                    all.partition(|it| it.is_copy_of(&refused[next]));
                *queue = others.into();
                refused.extend(copies);
            }
            next += 1;
        }
    }

    /// Makes the group wait.
    fn park(&mut self, wait: SpaceWait) -> SpaceFound {
        self.space.begin(wait);
        let taken = self.segments_taken().filter(|_| self.affords_writes());
        self.space.needs = taken.map(|taken| (self.group.pages, taken));
        self.return_records();
        SpaceFound::Later
    }

    /// Notes that the group found space, which ends its search.
    pub(super) fn found(&mut self) {
        if !self.space.is_waiting() && self.group.want == Some(AllocationClass::Write) {
            self.space.search = SpaceSearch::default();
        }
    }

    /// Starts or continues a search for space for the group. No group is in flight.
    pub(super) fn search(&mut self) -> SpaceFound {
        let refused =
            if self.group.records.len() == 1 { SpaceFound::Found } else { SpaceFound::None };
        debug_assert!(
            self.space.is_empty() && !self.space.is_waiting(),
            "I6: writes wait for the last search"
        );
        if let Some(needed) = self.segments_needed().filter(|_| !self.intake.is_stopping()) {
            self.pool.prepare(needed);
            if self.pool.is_preparing() {
                return self.park(SpaceWait::NewSegments);
            }
        }
        // After a failed search, search only now and then.
        self.space.enospc_backoff = self.space.enospc_backoff.saturating_sub(1);
        if self.space.enospc_backoff > 0 || self.intake.is_stopping() {
            return refused;
        }
        // The last thread may still exist but be idle.
        if !self.round.is_running() || self.pool.maintenance().stage().is_at_rest() {
            self.join();
            if !self.space.search.is_retried && self.pool.segments().may_try_again() {
                // A thread that failed to make a segment may still exist; it does not try again.
                self.space.search.is_retried = self.pool.try_again();
                if self.pool.is_preparing() {
                    return self.park(SpaceWait::NewSegments);
                }
            }
            checkpoint::repeat(&self.pool);
            self.group.admitted = self.is_admitted();
            if self.group.admitted {
                self.found();
                return SpaceFound::Found;
            }
        }
        let now = self.pool.segments().progress();
        let search = &mut self.space.search;
        search.unchanged =
            if search.before.as_ref() == Some(&now) { search.unchanged + 1 } else { 0 };
        if search.unchanged > UNCHANGED_TRIES_MAX || search.tried >= SEARCH_TRIES_MAX {
            self.space.search = SpaceSearch::default();
            self.space.enospc_backoff = ENOSPC_BACKOFF_MAX;
            // No segment can be made in a directory that was removed, which is not missing space.
            self.pool.latch_if_removed();
            return refused;
        }
        if search.tried == 0 {
            self.pool.meters().searched();
        }
        (search.before, search.tried) = (Some(now), search.tried + 1);
        let found = self.park(SpaceWait::Round);
        if self.round.is_none() {
            self.start_checkpoint();
        }
        found
    }
}
