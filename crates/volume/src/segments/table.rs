//! The state of each segment, which operations may take free ones, and how more are made.
//!
//! The last free segments are not for writes. Each allocation class leaves some to the classes
//! before it, see [`AllocationClass`]:
//!
//! - Checkpoints: segments are *kept* for the next one, enough for every changed page, all roots
//!   and the whole catalogue. The space after the pages of the last checkpoint is subtracted. More
//!   are kept for what a running checkpoint may still take. An operation that changes pages
//!   declares how many first, so that the reserve grows before. So a checkpoint finds space at any
//!   moment.
//! - Cleaning leaves those. It may take [`MOVING`] more: one for blocks, one for the log, one for
//!   pages that its moves change, and one spare. It begins a segment for blocks only if three are
//!   available. Otherwise it writes pages closer together, for which one is enough. It moves what
//!   fits, so at its end at least as many segments are free as at its beginning.
//! - Operations that free space, and writes that were acknowledged before, leave those too, and may
//!   take [`FREEING`] more.
//! - Writes leave all of them. They are refused before the pool has too little garbage to be
//!   cleaned, an eighth of what is used; see [`Table::left_bytes`]. So however blocks are
//!   overwritten, there is a segment from which cleaning moves less than it gains, and space to
//!   move it to.
//!
//! A segment that a checkpoint does not need is free directly after it if space is short: both
//! superblocks are then made to stand for that checkpoint. A segment of blocks that cleaning has
//! emptied is free even before the next checkpoint, under two conditions. The log after the older
//! of the two checkpoints does not pass through it, and says durably that nothing in it is live. So
//! a replay of that log does not need the segment.
//!
//! A pool in a directory grows: it makes files before they are needed, as long as the file system
//! has space. Other programs use that file system too, so its free space is measured after each new
//! segment, and periodically by the committer. The last measurement limits the number of segments,
//! and writes are refused accordingly, as on a disk of that size. In case other programs take the
//! space in between, segments are made ahead: enough that the live data leave enough garbage in the
//! existing segments for cleaning.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError, TryLockError};

use blockyard_store::SegmentStore;
use blockyard_volume_format::{PAGE_BYTES, segment_name};

use super::Segments;
use crate::thread;

/// Segments that cleaning may take of those that writes leave: blocks, log, pages, and a spare.
const MOVING: usize = 4;

/// Further segments for operations that free space: discards, and removing volumes.
const FREEING: usize = 1;

/// Segments that writes leave in addition to those for the next checkpoint.
pub(crate) const RESERVE: usize = MOVING + FREEING;

/// Segments that are partly filled: the log is in one and continues in another; pages and moved
/// blocks are in one each.
const OPEN: u64 = 4;

/// Pages that a checkpoint may write beyond those that are counted: a longer usage table.
const UPPER_MORE: u64 = 2;

/// The state of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Free,
    /// Allocated in this round.
    Used {
        round: u64,
    },
    /// Needed only by the checkpoint before the last one.
    Idle,
    /// To be discarded on the disk, and free after that.
    Discarded,
    /// Free, a hole in its file: it is filled before it is allocated.
    Hollow,
}

#[derive(Debug)]
pub(super) struct Table {
    pub(super) states: Vec<State>,
    /// Number of free segments, and of idle or discarded ones. The committer reads it with each
    /// group.
    pub(super) free: usize,
    pub(super) idle: usize,
    /// Number of hollow segments.
    pub(super) hollow: usize,
    /// Number of checkpoints that have begun.
    pub(super) round: u64,
    /// The checkpoints that the newest and the other superblock stand for. Segments taken before
    /// the older of the two are in no log that a replay would read.
    stand: (u64, u64),
    /// Most segments that there may be.
    pub(super) count_max: usize,
    /// How many more segments the file system had space for at the last measurement.
    pub(super) outside: usize,
    /// A segment could not be made: no more are made, whatever the measurement says.
    pub(super) full: bool,
    /// Segments with damaged data that cleaning would have to move.
    pub(super) quarantined: BTreeSet<u32>,
    /// Upper bound of the live bytes of blocks in each segment.
    pub(super) live: Vec<u64>,
    /// The sum of `live`.
    pub(super) counted: u64,
    /// Number of segments for which `live` was found too small.
    pub(super) raised: usize,
    /// Unknown bytes: those in `live` that may be garbage.
    pub(super) unknown_bytes: u64,
    /// Pages changed since the last checkpoint began.
    pub(super) dirtied: u64,
    /// Most pages that groups in flight change, and the bytes of blocks in them.
    pub(super) in_flight: (u64, u64),
    /// Pages that the last checkpoint needs.
    pub(super) pages: u64,
    /// Of `pages`, the map roots and catalogue pages.
    pub(super) upper: u64,
    /// Pages that fit after those of the last checkpoint in its segment.
    pub(super) rest: u64,
    /// Pages that the running checkpoint writes.
    frozen: u64,
    /// Segments that the running checkpoint may still take.
    under_way: usize,
    /// Pages per segment.
    pages_each: u64,
}

impl Table {
    /// Raises the most segments that there may be. They are made when they are needed.
    pub(super) fn grow(&mut self, count_max: usize) {
        if count_max > self.count_max {
            self.count_max = count_max;
            self.full = false;
        }
    }

    /// A table of `count` segments of `bytes` bytes, all in use, of at most `count_max`.
    pub(super) fn new(count: usize, count_max: usize, bytes: u32) -> Table {
        Table {
            states: vec![State::Used { round: 0 }; count],
            free: 0,
            idle: 0,
            hollow: 0,
            round: 1,
            count_max,
            outside: usize::MAX,
            stand: (0, 0),
            full: false,
            quarantined: BTreeSet::new(),
            live: vec![0; count],
            counted: 0,
            raised: 0,
            unknown_bytes: 0,
            dirtied: 0,
            in_flight: (0, 0),
            pages: 0,
            upper: 0,
            rest: 0,
            frozen: 0,
            under_way: 0,
            pages_each: u64::from(bytes) / PAGE_BYTES as u64,
        }
    }

    /// Begins a checkpoint and returns its round.
    pub(super) fn begin_round(&mut self) -> u64 {
        self.round += 1;
        self.under_way = self.kept(0);
        self.frozen = std::mem::take(&mut self.dirtied);
        // The space that the next checkpoint will find there is not known yet.
        self.rest = 0;
        self.round
    }

    /// Ends a checkpoint. If it failed, its pages are dirty again.
    pub(super) fn end_round(&mut self, is_written: bool) {
        let frozen = std::mem::take(&mut self.frozen);
        self.dirtied += if is_written { 0 } else { frozen };
        self.under_way = 0;
    }

    /// Whether the changed pages need so much space that writes will soon be refused.
    pub(super) fn is_dirty_limit_near(&self) -> bool {
        self.dirtied >= self.pages_each && self.kept_for_checkpoint() > self.free
    }

    /// Takes a free segment, if the reserve of the other classes stays free.
    pub(super) fn take(&mut self, want: AllocationClass) -> Option<u32> {
        if self.free <= self.left_by(want, 0) {
            return None;
        }
        let number = self.states.iter().position(|state| *state == State::Free)?;
        self.states[number] = State::Used { round: self.round };
        self.free -= 1;
        if want == AllocationClass::Checkpoint {
            self.under_way = self.under_way.saturating_sub(1);
        }
        self.quarantined.remove(&(number as u32));
        Some(number as u32)
    }

    /// How many segments have no live data, and are free after the next checkpoints. Segments of
    /// map pages have no live blocks either; there are at most twice as many as the pages fill.
    pub(super) fn dead(&self) -> usize {
        let used = self.states.iter().zip(&self.live);
        let empty = used.filter(|(state, live)| matches!(state, State::Used { .. }) && **live == 0);
        let of_pages = 2 * self.pages.div_ceil(self.pages_each) as usize + OPEN as usize;
        (empty.count() + self.idle).saturating_sub(of_pages)
    }

    /// Changes the state of each segment.
    pub(super) fn change_all(&mut self, change: impl Fn(u32, State) -> State) {
        let Table { states, free, idle, hollow, .. } = self;
        (*free, *idle, *hollow) = (0, 0, 0);
        for (number, state) in (0..).zip(states) {
            *state = change(number, *state);
            *free += usize::from(*state == State::Free);
            *idle += usize::from([State::Idle, State::Discarded].contains(state));
            *hollow += usize::from(*state == State::Hollow);
        }
    }

    /// Marks segments with live data as used, even if they were taken for free.
    pub(super) fn keep_counted(&mut self) {
        let live = std::mem::take(&mut self.live);
        self.change_all(|number, state| match state {
            State::Free | State::Idle | State::Hollow
                if live.get(number as usize).is_some_and(|it| *it > 0) =>
            {
                State::Used { round: 0 }
            }
            state => state,
        });
        self.live = live;
    }

    /// The newest superblock now stands for the checkpoint of this round, the other one for the one
    /// before.
    pub(super) fn stand_for(&mut self, round: u64) {
        self.stand = (round, self.stand.0);
    }

    /// Both superblocks now stand for the last checkpoint.
    pub(super) fn stand_for_one(&mut self) {
        self.stand.1 = self.stand.0;
    }

    /// Whether both superblocks stand for one checkpoint.
    pub(super) fn is_for_one(&self) -> bool {
        self.stand.0 == self.stand.1
    }

    /// Frees a segment that durably has no live data and that no replay reads. Returns whether
    /// these conditions hold.
    pub(super) fn release(&mut self, number: u32, to: State) -> bool {
        let live = self.live.get(number as usize).copied().unwrap_or(0);
        let is_old = |round| round < self.stand.0.min(self.stand.1);
        match self.states.get(number as usize) {
            Some(State::Used { round }) if live == 0 && is_old(*round) => {}
            _ => return false,
        }
        self.states[number as usize] = to;
        self.free += usize::from(to == State::Free);
        self.idle += usize::from(to != State::Free);
        true
    }

    /// Marks a segment as free.
    pub(super) fn put_back(&mut self, number: u32) {
        let before = std::mem::replace(&mut self.states[number as usize], State::Free);
        self.free += usize::from(before != State::Free);
        self.idle -= usize::from([State::Idle, State::Discarded].contains(&before));
        self.hollow -= usize::from(before == State::Hollow);
    }

    /// Makes the last free segment hollow and returns its number.
    pub(super) fn hollow_out(&mut self) -> Option<u32> {
        let number = self.states.iter().rposition(|state| *state == State::Free)?;
        self.states[number] = State::Hollow;
        self.free -= 1;
        self.hollow += 1;
        Some(number as u32)
    }

    /// Segments that occupy space in the file system.
    pub(super) fn existing_segments(&self) -> usize {
        self.states.len() - self.hollow
    }

    /// Pages that the next checkpoint writes.
    fn to_write(&self) -> u64 {
        self.dirtied + self.in_flight.0 + self.upper + UPPER_MORE
    }

    /// Pages of the next checkpoint that do not fit into the open segment, if `more` pages are
    /// changed.
    fn beyond(&self, more: u64) -> u64 {
        (self.to_write() + more).saturating_sub(self.rest)
    }

    /// Segments that the next checkpoint may take for its pages, if `more` pages are changed, and
    /// those that the running one may still take.
    fn kept(&self, more: u64) -> usize {
        self.under_way + self.beyond(more).div_ceil(self.pages_each) as usize
    }

    /// Segments that writes leave to other classes, and those that the next checkpoint may take in
    /// addition to those kept for it when it begins.
    pub(super) fn kept_for_checkpoint(&self) -> usize {
        self.left_by(AllocationClass::Write, 0) + self.kept(0)
    }

    /// Segments that this class leaves free, if `more` pages are changed.
    pub(super) fn left_by(&self, want: AllocationClass, more: u64) -> usize {
        match want {
            AllocationClass::Checkpoint => 0,
            AllocationClass::Move => self.kept(more),
            AllocationClass::Free => self.kept(more) + MOVING,
            AllocationClass::Write => self.kept(more) + RESERVE,
        }
    }

    /// How many more pages this class may change if it takes `taken` segments; `None` if it may not
    /// take these.
    pub(super) fn pages_left(&self, want: AllocationClass, taken: usize) -> Option<u64> {
        let spare = self.free.checked_sub(self.left_by(want, 0) + taken)? as u64;
        let beyond = self.beyond(0).div_ceil(self.pages_each);
        let have = (beyond + spare) * self.pages_each + self.rest;
        Some(have - self.to_write())
    }

    /// How many more segments can be made, as of the last measurement.
    pub(super) fn more(&self) -> usize {
        let most = if self.full { 0 } else { self.outside };
        self.count_max.saturating_sub(self.existing_segments()).min(most)
    }

    /// Bytes in use, with pages counted twice: a checkpoint writes new pages while the old ones
    /// stay.
    pub(super) fn used_bytes(&self) -> u64 {
        self.counted + self.in_flight.1 + 2 * self.pages * PAGE_BYTES as u64
    }

    /// How many bytes may be written in addition to the live data if there are `count` segments.
    /// Cleaning regains all garbage except what is spread thinly: an eighth of the space, after the
    /// reserve and the open segments. Pages count twice, because a checkpoint writes new ones while
    /// the old ones stay.
    pub(super) fn left_bytes(&self, count: usize) -> u64 {
        let upper = (self.upper + UPPER_MORE).div_ceil(self.pages_each);
        let usable = (count as u64).saturating_sub(OPEN + RESERVE as u64 + upper);
        let bytes = self.pages_each * PAGE_BYTES as u64;
        (usable * (bytes / 8 * 7)).saturating_sub(self.used_bytes())
    }
}

/// Allocation classes: what space is needed for. Each class leaves a reserve to those before it, so
/// operations that free space continue when writes are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AllocationClass {
    /// Pages of a checkpoint, for which enough is reserved.
    Checkpoint,
    /// Cleaning: the moved blocks, and their records in the log.
    Move,
    /// Operations that must continue: discards, changes of the catalogue that free space, and
    /// writes that were acknowledged already, which can no longer be refused for lack of space.
    Free,
    /// Writes, and new volumes and snapshots.
    Write,
}

/// How many segments there are of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All segments.
    pub all: usize,
    /// Free segments.
    pub free: usize,
    /// Segments that are free after the next checkpoint.
    pub idle: usize,
    /// Segments that have given their space back to the file system.
    pub hollow: usize,
    /// Segments with damaged blocks, which are no longer cleaned.
    pub quarantined: usize,
}

impl<D: SegmentStore> Segments<D> {
    /// Measures how many more segments can be made.
    pub fn measure_outside_space(&self) {
        let count = self.directory.growth_bytes() / u64::from(self.bytes);
        self.table().outside = usize::try_from(count).unwrap_or(usize::MAX);
    }

    /// How many segments are available: those that are free, or could be made.
    pub fn available(&self) -> usize {
        let table = self.table();
        table.free + table.more()
    }

    /// How many bytes may be written in addition to the live data, if other programs take no more
    /// of the file system than at the last measurement.
    pub fn left_bytes(&self) -> u64 {
        let table = self.table();
        table.left_bytes(table.existing_segments() + table.more())
    }

    /// Bytes in use, with pages counted twice, and [`Segments::left_bytes`].
    pub fn used_and_left_bytes(&self) -> (u64, u64) {
        let table = self.table();
        (table.used_bytes(), table.left_bytes(table.existing_segments() + table.more()))
    }

    /// Whether this allocation class may change `pages` pages and take `segments` segments of
    /// existing files. Makes segments if there are too few.
    pub fn may(&self, want: AllocationClass, pages: u64, segments: usize) -> bool {
        loop {
            let before = {
                let table = self.table();
                if table.free >= table.left_by(want, pages) + segments {
                    return true;
                }
                table.existing_segments()
            };
            if !self.grow_from(before) {
                return false;
            }
        }
    }

    /// How many segments must be free so that this class may change `pages` pages and take
    /// `segments`.
    pub(crate) fn needed(&self, want: AllocationClass, pages: u64, segments: usize) -> usize {
        self.table().left_by(want, pages) + segments
    }

    /// Whether more segments can be made, as of the last measurement.
    pub(crate) fn grows(&self) -> bool {
        self.table().more() > 0
    }

    /// Whether the changed pages need most of the space that is left for them.
    pub fn is_dirty_limit_near(&self) -> bool {
        let table = self.table();
        table.more() == 0 && table.is_dirty_limit_near()
    }

    /// Takes a free segment; makes one if none is free.
    pub fn take(&self, want: AllocationClass) -> Option<u32> {
        loop {
            let before = {
                let mut table = self.table();
                match table.take(want) {
                    Some(number) => {
                        drop(table);
                        return self.pinned(number);
                    }
                    None => table.existing_segments(),
                }
            };
            if !self.grow_from(before) {
                return None;
            }
        }
    }

    /// Pins a taken segment open. Returns none if there is no descriptor for it, which is treated
    /// as missing space.
    fn pinned(&self, number: u32) -> Option<u32> {
        match self.pin(number) {
            Ok(()) => Some(number),
            Err(error) => {
                let title = self.directory.title();
                tracing::warn!("{title}: segment {number} cannot be opened: {error}");
                self.put_back(number);
                None
            }
        }
    }

    /// Makes segments until `free` are free and the existing ones have space for `bytes` more
    /// bytes. Stops when there is no space, and makes at most `free`.
    pub fn prepare(&self, free: usize, bytes: u64) {
        for _ in 0..free {
            if !self.wants_more(free, bytes) || !self.grow() {
                return;
            }
        }
    }

    /// Whether fewer than `free` segments are free, or the existing ones have space for fewer than
    /// `bytes` bytes, and more can be made.
    pub fn wants_more(&self, free: usize, bytes: u64) -> bool {
        let table = self.table();
        let is_short = table.free < free || table.left_bytes(table.existing_segments()) < bytes;
        is_short && table.more() > 0
    }

    /// Makes one segment if there is space. Returns whether there is one more.
    pub fn grow(&self) -> bool {
        let before = self.table().existing_segments();
        self.grow_from(before)
    }

    /// Makes one segment, or refills one that has given its space back, unless another thread has
    /// done so since there were `before` segments.
    fn grow_from(&self, before: usize) -> bool {
        let is_held = || matches!(self.making.try_lock(), Err(TryLockError::WouldBlock));
        thread::wait_until(&|| !is_held());
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, is_hollow) = {
            let table = self.table();
            if table.existing_segments() > before {
                return true;
            }
            let hollow = table.states.iter().position(|state| *state == State::Hollow);
            let number = hollow.unwrap_or(table.states.len());
            if table.full || number >= table.count_max {
                return false;
            }
            (number, hollow.is_some())
        };
        if is_hollow {
            return self.fill(number);
        }
        match blockyard_store::make(&self.directory, &segment_name(number), u64::from(self.bytes)) {
            Ok(file) => {
                let file = Arc::new(file);
                self.files
                    .update(|files| files.iter().cloned().chain([Arc::clone(&file)]).collect());
                {
                    let mut table = self.table();
                    table.states.push(State::Free);
                    table.free += 1;
                    table.outside = table.outside.saturating_sub(1);
                }
                self.measure_outside_space();
                true
            }
            Err(error) => {
                tracing::warn!("{}: no more segments: {error}", self.directory.title());
                self.table().full = true;
                false
            }
        }
    }

    /// Refills a segment that has given its space back. Returns whether it is free now.
    fn fill(&self, number: usize) -> bool {
        let Some(file) = self.files.get().get(number).cloned() else { return false };
        let filled = self.directory.allocate(&file, u64::from(self.bytes));
        if let Err(error) = filled {
            tracing::warn!("{}: no more segments: {error}", self.directory.title());
            self.table().full = true;
            return false;
        }
        self.put_back(number as u32);
        self.measure_outside_space();
        true
    }

    /// How many bytes may be written, in addition to the live data, to the segments that occupy
    /// space.
    pub(crate) fn left_there(&self) -> u64 {
        let table = self.table();
        table.left_bytes(table.existing_segments())
    }

    /// Returns the space of `count` free segments to the file system: each file becomes a hole. The
    /// holes are filled before new segments are made.
    pub fn punch_holes(&self, count: usize) {
        for _ in 0..count {
            let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(number) = self.table().hollow_out() else { return };
            let Some(file) = self.files.get().get(number as usize).cloned() else { return };
            if let Err(error) = self.directory.deallocate(&file) {
                // A file system without holes in files does not support it.
                if error.kind() != std::io::ErrorKind::Unsupported {
                    let title = self.directory.title();
                    tracing::info!("{title}: cannot return free space to the file system: {error}");
                }
                self.put_back(number);
                return;
            }
        }
        self.measure_outside_space();
    }

    /// Whether a segment could not be made earlier, and there may be space now.
    pub fn may_try_again(&self) -> bool {
        self.measure_outside_space();
        let table = self.table();
        table.full && table.outside > 0 && table.existing_segments() < table.count_max
    }

    /// Tries again to make a segment after that has failed, if there may be space now. The space
    /// counts as available only when the segment exists.
    pub fn try_again(&self) {
        self.measure_outside_space();
        let tries = {
            let mut table = self.table();
            let tries = table.full && table.outside > 0;
            table.full &= !tries;
            tries
        };
        if tries {
            self.grow();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(free: usize) -> Table {
        let mut table = Table::new(free, free, 16 << 10);
        table.change_all(|_, _| State::Free);
        table
    }

    #[test]
    fn each_use_leaves_some_to_those_before_it() {
        let mut table = table(20);
        (table.dirtied, table.upper, table.rest) = (6, 3, 2);
        // Nine pages and two more: two fit into the open segment, the rest into three segments of
        // four pages.
        assert_eq!(table.left_by(AllocationClass::Move, 0), 3);
        assert_eq!(table.left_by(AllocationClass::Move, 3), 3);
        assert_eq!(table.left_by(AllocationClass::Move, 4), 4);
        for (want, left) in [
            (AllocationClass::Write, 8),
            (AllocationClass::Free, 7),
            (AllocationClass::Move, 3),
            (AllocationClass::Checkpoint, 0),
        ] {
            while table.take(want).is_some() {}
            assert_eq!(table.free, left, "{want:?}");
        }
    }

    #[test]
    fn dead_segments_have_neither_live_blocks_nor_pages() {
        let mut table = table(20);
        while table.free > 4 {
            table.take(AllocationClass::Checkpoint);
        }
        assert_eq!(table.dead(), 16 - OPEN as usize);
        table.live[3] = 1;
        assert_eq!(table.dead(), 15 - OPEN as usize);
        // Five pages fill two segments of four.
        table.pages = 5;
        assert_eq!(table.dead(), 15 - OPEN as usize - 4);
    }

    #[test]
    fn as_many_pages_may_change_as_are_kept_for() {
        for (free, rest) in [(3, 0), (5, 1), (9, 7)] {
            let mut table = table(free);
            (table.dirtied, table.upper, table.rest) = (5, 2, rest);
            for taken in 0..4 {
                let fits = |more| table.free >= table.left_by(AllocationClass::Move, more) + taken;
                match table.pages_left(AllocationClass::Move, taken) {
                    Some(most) => assert!(fits(most) && !fits(most + 1), "{free} {rest} {taken}"),
                    None => assert!(!fits(0), "{free} {rest} {taken}"),
                }
            }
        }
    }

    #[test]
    fn an_emptied_segment_is_free_if_no_replay_reads_it() {
        let mut table = table(4);
        let old = table.take(AllocationClass::Checkpoint).unwrap();
        let round = table.begin_round();
        table.end_round(true);
        let new = table.take(AllocationClass::Checkpoint).unwrap();
        table.stand_for(round);
        assert!(!table.release(old, State::Free), "the other superblock has an older log");
        table.stand_for_one();
        table.live[old as usize] = 1;
        assert!(!table.release(old, State::Free), "something counts");
        table.live[old as usize] = 0;
        assert!(!table.release(new, State::Free), "the log may be there");
        assert!(table.release(old, State::Free) && !table.release(old, State::Free));
        assert_eq!((table.free, table.idle), (3, 0));
    }

    #[test]
    fn a_checkpoint_in_progress_has_its_reserve() {
        let mut table = table(12);
        table.dirtied = 6;
        assert_eq!(table.left_by(AllocationClass::Move, 0), 2);
        table.begin_round();
        // Two for the running checkpoint, and one for the next one.
        assert_eq!(table.left_by(AllocationClass::Move, 0), 3);
        table.take(AllocationClass::Checkpoint);
        assert_eq!(table.left_by(AllocationClass::Move, 0), 2);
        table.end_round(false);
        assert_eq!((table.dirtied, table.left_by(AllocationClass::Move, 0)), (6, 2));
    }
}
