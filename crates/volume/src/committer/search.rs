//! Writes for which there is no space wait while some is made, by segments, or looked for, by
//! checkpoints and cleaning behind them: beside the committer. Flushes, discards and what was
//! answered before go on.
//!
//! What overlaps a write that waits waits behind it. A part of a block is written with the rest of
//! it as that was on its way then, so that writes of a block keep their order.
//!
//! A write that is refused leaves nothing. Before the answer its blocks leave memory, and with it
//! are refused all writes that copied the rest of a block from it, and those that copied from
//! these.

use std::collections::VecDeque;
use std::sync::Arc;

use blockyard_core::Status;

use super::group::{Group, want};
use super::{Committer, ROOM_TRIES, VAIN_MAX, publish};
use crate::checkpoint;
use crate::clean::Phase;
use crate::pool::Pool;
use crate::record::{Body, Record};
use crate::segments::{Progress, Want};
use crate::store::Directory;
use crate::thread::Thread;

/// So many times space is looked for though the last time has changed nothing.
pub(super) const VAIN_TRIES: usize = 5;

/// What has become of a group that wanted space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// There is some, or it has one record and is to be refused.
    Found,
    /// There is none: each of its records is tried alone.
    None,
    /// It waits.
    Later,
}

/// See the module.
#[derive(Default)]
pub(super) struct Search {
    /// Something is on its way for those that wait.
    pub(super) is_on: bool,
    /// It is segments.
    makes: bool,
    /// It is their part of what cleaning wins.
    paces: bool,
    /// What they need, where nothing but segments is missing: so many pages, and segments.
    needs: Option<(u64, usize)>,
    waiting: VecDeque<Record>,
    /// One of them was answered before, so that a flush must not be answered without it.
    is_owed: bool,
    /// It was tried again to make a segment where one could not be made.
    is_retried: bool,
    /// How often space was looked for.
    tried: usize,
    /// How often nothing has changed by it.
    vain: usize,
    before: Option<Progress>,
}

impl Search {
    /// Writes wait for their part of what cleaning wins.
    pub(super) fn pace(&mut self) {
        (self.is_on, self.makes, self.paces) = (true, false, true);
    }

    /// Takes a record in if it has to wait.
    fn keep<D: Directory>(&mut self, record: Record, pool: &Pool<D>) -> Option<Record> {
        let waits = want(&record, pool) == Some(Want::Write)
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

/// Whether two records change a block of one volume.
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

impl<D: Directory> Committer<D> {
    /// The next record that need not wait for space.
    pub(super) fn next(&mut self) -> Option<Record> {
        loop {
            let record = self.held.pop_front().or_else(|| self.mail.take())?;
            self.stopping |= matches!(record.body, Body::Stop);
            if self.stopping && !self.uncounted.is_empty() {
                // They came before it.
                self.held.push_front(record);
                self.let_uncounted_go();
                continue;
            }
            if !self.search.is_on {
                return Some(record);
            }
            if self.stopping {
                // Those that wait come before it, and are not looked for again.
                self.held.push_front(record);
                self.resume();
            } else if let Some(record) = self.search.keep(record, &self.pool) {
                return Some(record);
            }
        }
    }

    /// Those that wait go on: either there is space now, or it is looked for once more.
    pub(super) fn resume(&mut self) {
        (self.search.is_on, self.search.is_owed) = (false, false);
        while let Some(record) = self.search.waiting.pop_back() {
            self.held.push_front(record);
        }
    }

    /// Goes on when that is there which writes wait for: segments, or a checkpoint and the cleaning
    /// behind it.
    pub(super) fn end_search(&mut self) {
        if !self.search.is_on {
            return;
        }
        self.refuse_left();
        let has = |(pages, taken)| self.pool.segments().has(Want::Write, pages, taken);
        let has = self.search.needs.is_some_and(has);
        let is_over = match (self.search.makes, self.search.paces) {
            (true, _) => !self.pool.is_preparing(),
            (_, true) => !self.is_held_back(),
            _ => {
                self.checkpoint.as_ref().is_none_or(Thread::is_ended)
                    || self.pool.pace().phase() == Phase::Rests
                    || has
            }
        };
        if is_over || self.pool.is_poisoned() {
            self.resume();
        }
    }

    /// Refuses the writes that wait of those who are leaving: they wait for that.
    fn refuse_left(&mut self) {
        if !self.pool.is_any_leaving() || self.pool.is_poisoned() {
            return;
        }
        let is_left = |pool: &Pool<D>, record: &Record| {
            matches!(record.body, Body::Write(_)) && pool.is_left(record)
        };
        if !self.search.waiting.iter().any(|record| is_left(&self.pool, record)) {
            return;
        }
        // Then what is on its way into the log is in the maps, and no longer only in memory.
        self.land_all();
        if self.pool.is_poisoned() {
            return;
        }
        let waiting = std::mem::take(&mut self.search.waiting).into_iter();
        let (mut left, waiting): (Vec<Record>, Vec<Record>) =
            waiting.partition(|record| is_left(&self.pool, record));
        self.search.waiting = waiting.into();
        self.take_back(&mut left);
        let mut group = Group { records: left, ..Group::default() };
        let (pool, status) = (&self.pool, Status::NoSpc);
        publish::answer(pool, &mut group, status, &mut self.lost, &mut self.names);
        self.wake();
    }

    /// Takes the blocks of refused records out of memory, and adds to these all records that wait
    /// and hold data copied from them. Nothing that these change is on its way into the log.
    pub(super) fn take_back(&mut self, refused: &mut Vec<Record>) {
        let mut next = 0;
        while let Some(record) = refused.get(next) {
            // First: then no further copy of it can begin, and all of them are in the mailbox. What
            // came before it was taken out of there before it.
            let waiting = self.search.waiting.iter().chain(&self.held).chain(&self.group.records);
            record.take_back(waiting);
            while let Some(record) = self.mail.take() {
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

    /// The group waits.
    fn park(&mut self, makes: bool) -> Room {
        (self.search.is_on, self.search.makes, self.search.paces) = (true, makes, false);
        let taken = self.taken().filter(|_| self.fits());
        self.search.needs = taken.map(|taken| (self.group.pages, taken));
        self.put_back();
        Room::Later
    }

    /// Notes that the group has found space.
    pub(super) fn found(&mut self) {
        let has_tried = self.search.tried > 0 || self.search.is_retried;
        if !self.search.is_on && has_tried && self.group.want == Some(Want::Write) {
            self.search = Search::default();
        }
    }

    /// Begins to look for space for the group, which nothing is on its way before, or goes on.
    pub(super) fn search(&mut self) -> Room {
        let refused = if self.group.records.len() == 1 { Room::Found } else { Room::None };
        if let Some(needed) = self.lacks().filter(|_| !self.stopping) {
            self.pool.prepare(needed);
            if self.pool.is_preparing() {
                return self.park(true);
            }
        }
        // Where it was in vain, only now and then again.
        self.in_vain = self.in_vain.saturating_sub(1);
        if self.in_vain > 0 || self.stopping {
            return refused;
        }
        // The thread of the last one may be there still, and do nothing.
        let is_over = self.checkpoint.as_ref().is_none_or(Thread::is_ended);
        if is_over || self.pool.pace().phase() == Phase::Rests {
            self.join();
            if !self.search.is_retried && self.pool.segments().may_try_again() {
                // One that could not make any may be there still: it does not try again.
                self.search.is_retried = self.pool.try_again();
                if self.pool.is_preparing() {
                    return self.park(true);
                }
            }
            checkpoint::repeat(&self.pool);
            self.group.admitted = self.is_admitted();
            if self.group.admitted {
                self.found();
                return Room::Found;
            }
        }
        let now = self.pool.segments().progress();
        let search = &mut self.search;
        search.vain = if search.before.as_ref() == Some(&now) { search.vain + 1 } else { 0 };
        if search.vain > VAIN_TRIES || search.tried >= ROOM_TRIES {
            self.search = Search::default();
            self.in_vain = VAIN_MAX;
            return refused;
        }
        if search.tried == 0 {
            self.pool.meters().searched();
        }
        (search.before, search.tried) = (Some(now), search.tried + 1);
        let room = self.park(false);
        if self.checkpoint.is_none() {
            self.checkpoint_beside();
        }
        room
    }
}
