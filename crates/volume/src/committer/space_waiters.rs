//! Searching for space. Writes without space wait while another thread makes segments, or
//! checkpoints and cleans. Flushes, discards and acknowledged writes continue.
//!
//! A record that overlaps a waiting write waits for it. A write of part of a block includes the
//! rest of the block as it was pending then, so writes of one block must keep their order.
//!
//! A refused write has no effect. Before the answer its blocks are taken out of memory. Writes that
//! copied the rest of a block from it are refused too, and those that copied from these.

use std::collections::VecDeque;
use std::sync::Arc;

use blockyard_core::Status;
use blockyard_store::SegmentStore;

use super::batch::{LogBatch, want};
use super::{Committer, ENOSPC_BACKOFF_MAX, ROOM_TRIES, publish};
use crate::checkpoint;
use crate::pool::Pool;
use crate::record::{Body, Record};
use crate::segments::{AllocationClass, Progress};
use crate::thread::Thread;

/// How often the search continues after a try that changed nothing.
pub(super) const UNCHANGED_TRIES_MAX: usize = 5;

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

/// The records that wait for space, and the state of the search for them.
#[derive(Default)]
pub(super) struct SpaceWaiters {
    /// A thread is making space for the waiting records.
    pub(super) is_on: bool,
    /// They wait for new segments.
    makes: bool,
    /// They are throttled: they wait until cleaning has freed enough bytes.
    paces: bool,
    /// What they need, if only segments are missing: number of pages, and of segments.
    needs: Option<(u64, usize)>,
    waiting: VecDeque<Record>,
    /// A waiting record was answered early, so a flush must wait for it.
    is_owed: bool,
    /// Making a segment was retried after it had failed.
    is_retried: bool,
    /// Number of tries.
    tried: usize,
    /// Number of tries in a row that changed nothing.
    unchanged: usize,
    before: Option<Progress>,
}

impl SpaceWaiters {
    /// Makes writes wait until cleaning has freed enough bytes.
    pub(super) fn pace(&mut self) {
        (self.is_on, self.makes, self.paces) = (true, false, true);
    }

    /// Keeps a record that must wait; returns any other record.
    fn keep<D: SegmentStore>(&mut self, record: Record, pool: &Pool<D>) -> Option<Record> {
        let waits = want(&record, pool) == Some(AllocationClass::Write)
            || self.waiting.iter().any(|other| overlap(other, &record))
            || self.is_owed && !matches!(record.body, Body::Move(_));
        if !waits {
            return Some(record);
        }
        self.is_owed |= record.reply.is_none();
        self.waiting.push_back(record);
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
            let record = self.held.pop_front().or_else(|| self.records.take())?;
            self.stopping |= matches!(record.body, Body::Stop);
            if self.stopping && !self.awaiting_scan.is_empty() {
                // The waiting changes precede the stop.
                self.held.push_front(record);
                self.release_awaiting_scan();
                continue;
            }
            if !self.search.is_on {
                return Some(record);
            }
            if self.stopping {
                // The waiting records precede the stop, and are not kept again.
                self.held.push_front(record);
                self.resume();
            } else if let Some(record) = self.search.keep(record, &self.pool) {
                return Some(record);
            }
        }
    }

    /// Releases the waiting records: either there is space now, or they start another search.
    pub(super) fn resume(&mut self) {
        (self.search.is_on, self.search.is_owed) = (false, false);
        while let Some(record) = self.search.waiting.pop_back() {
            self.held.push_front(record);
        }
    }

    /// Releases the waiting records when their wait is over: segments were made, the checkpoint and
    /// its cleaning ended, or throttling ended.
    pub(super) fn end_search(&mut self) {
        if !self.search.is_on {
            return;
        }
        self.refuse_left();
        let has = |(pages, taken)| self.pool.segments().has(AllocationClass::Write, pages, taken);
        let has = self.search.needs.is_some_and(has);
        let is_over = match (self.search.makes, self.search.paces) {
            (true, _) => !self.pool.is_preparing(),
            (_, true) => !self.is_throttled(),
            _ => {
                self.checkpoint.as_ref().is_none_or(Thread::is_ended)
                    || self.pool.maintenance().stage().is_at_rest()
                    || has
            }
        };
        if is_over || self.pool.is_latched() {
            self.resume();
        }
    }

    /// Refuses waiting writes of handles that are being closed, because closing waits for them.
    fn refuse_left(&mut self) {
        if !self.pool.is_any_leaving() || self.pool.is_latched() {
            return;
        }
        let is_left = |pool: &Pool<D>, record: &Record| {
            matches!(record.body, Body::Write(_)) && pool.is_left(record)
        };
        if !self.search.waiting.iter().any(|record| is_left(&self.pool, record)) {
            return;
        }
        // After this, groups in flight are in the maps and no longer only in memory.
        self.complete_all();
        if self.pool.is_latched() {
            return;
        }
        let waiting = std::mem::take(&mut self.search.waiting).into_iter();
        let (mut left, waiting): (Vec<Record>, Vec<Record>) =
            waiting.partition(|record| is_left(&self.pool, record));
        self.search.waiting = waiting.into();
        self.refuse_copies(&mut left);
        let mut group = LogBatch { records: left, ..LogBatch::default() };
        let (pool, status) = (&self.pool, Status::NoSpc);
        publish::answer(pool, &mut group, status, &mut self.lost, &mut self.wake_list);
        self.wake();
    }

    /// Takes the blocks of refused records out of memory, and adds to these all waiting records
    /// that contain data copied from them. No group in flight may contain such blocks.
    pub(super) fn refuse_copies(&mut self, refused: &mut Vec<Record>) {
        let mut next = 0;
        while let Some(record) = refused.get(next) {
            // This comes first: afterwards no copy can begin, and all existing copies are in the
            // completion queue or queues.
            let waiting = self.search.waiting.iter().chain(&self.held).chain(&self.group.records);
            record.take_back(waiting);
            while let Some(record) = self.records.take() {
                self.held.push_back(record);
            }
            for queue in [&mut self.search.waiting, &mut self.held] {
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
    fn park(&mut self, makes: bool) -> SpaceFound {
        (self.search.is_on, self.search.makes, self.search.paces) = (true, makes, false);
        let taken = self.taken().filter(|_| self.fits());
        self.search.needs = taken.map(|taken| (self.group.pages, taken));
        self.put_back();
        SpaceFound::Later
    }

    /// Notes that the group found space, which ends its search.
    pub(super) fn found(&mut self) {
        let has_tried = self.search.tried > 0 || self.search.is_retried;
        if !self.search.is_on && has_tried && self.group.want == Some(AllocationClass::Write) {
            self.search = SpaceWaiters::default();
        }
    }

    /// Starts or continues a search for space for the group. No group is in flight.
    pub(super) fn search(&mut self) -> SpaceFound {
        let refused =
            if self.group.records.len() == 1 { SpaceFound::Found } else { SpaceFound::None };
        if let Some(needed) = self.lacks().filter(|_| !self.stopping) {
            self.pool.prepare(needed);
            if self.pool.is_preparing() {
                return self.park(true);
            }
        }
        // After a failed search, search only now and then.
        self.enospc_backoff = self.enospc_backoff.saturating_sub(1);
        if self.enospc_backoff > 0 || self.stopping {
            return refused;
        }
        // The last thread may still exist but be idle.
        let is_over = self.checkpoint.as_ref().is_none_or(Thread::is_ended);
        if is_over || self.pool.maintenance().stage().is_at_rest() {
            self.join();
            if !self.search.is_retried && self.pool.segments().may_try_again() {
                // A thread that failed to make a segment may still exist; it does not try again.
                self.search.is_retried = self.pool.try_again();
                if self.pool.is_preparing() {
                    return self.park(true);
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
        let search = &mut self.search;
        search.unchanged =
            if search.before.as_ref() == Some(&now) { search.unchanged + 1 } else { 0 };
        if search.unchanged > UNCHANGED_TRIES_MAX || search.tried >= ROOM_TRIES {
            self.search = SpaceWaiters::default();
            self.enospc_backoff = ENOSPC_BACKOFF_MAX;
            // No segment can be made in a directory that was removed, which is not missing space.
            self.pool.latch_if_removed();
            return refused;
        }
        if search.tried == 0 {
            self.pool.meters().searched();
        }
        (search.before, search.tried) = (Some(now), search.tried + 1);
        let room = self.park(false);
        if self.checkpoint.is_none() {
            self.start_checkpoint();
        }
        room
    }
}
