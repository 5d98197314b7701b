//! What each segment is, and who may have those that are free.
//!
//! The last free ones are not for writes. Each use leaves some to those before it, see [`Want`]:
//!
//! - As many are *kept* as the next checkpoint takes for every page that has changed, all roots and
//!   the whole catalogue, less the room behind the last one's pages; and as many as one that is on
//!   its way may take yet. Whoever changes pages says before how many, so that this grows first:
//!   a checkpoint finds its room at any moment.
//! - Cleaning leaves those. It may have [`MOVING`] more: one for blocks, one for the log, one for
//!   pages that its moves change, and one to spare. It begins a segment for blocks only where there
//!   are three, else it writes pages closer together, which one is enough for; and it moves what
//!   fits. So it ends with as many as it began with, at least.
//! - What makes room, and writes that were answered before, leave those too, and may have
//!   [`FREEING`] more.
//! - Writes leave all of them, and are refused before their pool has too little garbage to be
//!   cleaned: an eighth of what is used, see [`Table::left_bytes`]. So whatever is written again
//!   and again, there is a segment out of which less is moved than is won, and room to move it to.
//!
//! What a checkpoint does not need is free behind it at once where space is short: both superblocks
//! are made to stand for it. So is a segment of blocks that cleaning has emptied, before there is
//! another checkpoint: where the log behind the older of the two goes through none of it, and says
//! durably that nothing in it counts, whoever reads that log does not miss it.

use std::collections::BTreeSet;

use crate::format::PAGE_BYTES;

/// Segments that cleaning may have of those that writes leave: blocks, log, and pages.
const MOVING: usize = 4;

/// The same for what makes room by what it says: discards, and volumes that go.
const FREEING: usize = 1;

/// Segments that writes leave beside those for the next checkpoint.
pub(crate) const RESERVE: usize = MOVING + FREEING;

/// Segments that are not full: the log is in one and goes on in another, pages and blocks that were
/// moved are in one each.
const OPEN: u64 = 4;

/// Pages that a checkpoint may write beyond those that are counted: a longer table of segments.
const UPPER_MORE: u64 = 2;

/// What a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Free,
    /// Taken in this round.
    Used {
        round: u64,
    },
    /// Needed by the checkpoint before the last one only.
    Idle,
    /// Free as soon as the disk has been told that nobody needs it.
    Discarded,
    /// Free, with its space given back to the file system: it is filled again before it is taken.
    Hollow,
}

#[derive(Debug)]
pub(super) struct Table {
    pub(super) states: Vec<State>,
    /// How many of them are free, and idle or discarded: the committer asks with each group.
    pub(super) free: usize,
    pub(super) idle: usize,
    /// How many have given their space back.
    pub(super) hollow: usize,
    /// Counts the checkpoints that have begun.
    pub(super) round: u64,
    /// Which of them the newest superblock stands for, and which the other one: what was taken
    /// before the older of the two is in no log that anybody would read again.
    stand: (u64, u64),
    /// Most that there may be.
    pub(super) count_max: usize,
    /// How many more the file system had room for at the last look.
    pub(super) outside: usize,
    /// One could not be made: there are no more, whatever there is said to be room for.
    pub(super) full: bool,
    /// Those in which something is damaged that would have to be moved.
    pub(super) spoiled: BTreeSet<u32>,
    /// Of each how many bytes of blocks count, at most.
    pub(super) live: Vec<u64>,
    /// The sum of these.
    pub(super) counted: u64,
    /// How many of them were found to be too little.
    pub(super) raised: usize,
    /// Bytes of them that may not count any more.
    pub(super) unknown_bytes: u64,
    /// Pages that were changed since the last checkpoint began.
    pub(super) dirtied: u64,
    /// Pages that groups on their way change at most, and the bytes of blocks in them.
    pub(super) coming: (u64, u64),
    /// Pages that the last checkpoint needs.
    pub(super) pages: u64,
    /// Of these roots of maps and pages of the catalogue.
    pub(super) upper: u64,
    /// Pages for which there is room behind those of the last checkpoint.
    pub(super) rest: u64,
    /// Those that the checkpoint which is on its way writes.
    frozen: u64,
    /// Segments that it may take yet.
    under_way: usize,
    /// Pages of a segment.
    pages_each: u64,
}

impl Table {
    /// So many segments of this length, all of them used, of so many at most.
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
            spoiled: BTreeSet::new(),
            live: vec![0; count],
            counted: 0,
            raised: 0,
            unknown_bytes: 0,
            dirtied: 0,
            coming: (0, 0),
            pages: 0,
            upper: 0,
            rest: 0,
            frozen: 0,
            under_way: 0,
            pages_each: u64::from(bytes) / PAGE_BYTES as u64,
        }
    }

    /// A checkpoint begins.
    pub(super) fn begin_round(&mut self) -> u64 {
        self.round += 1;
        self.under_way = self.kept(0);
        self.frozen = std::mem::take(&mut self.dirtied);
        // What the next one finds there is not known yet.
        self.rest = 0;
        self.round
    }

    /// It has ended.
    pub(super) fn end_round(&mut self, is_written: bool) {
        let frozen = std::mem::take(&mut self.frozen);
        self.dirtied += if is_written { 0 } else { frozen };
        self.under_way = 0;
    }

    /// Whether the pages that have changed need so much that writes will soon find nothing left.
    pub(super) fn is_soiled(&self) -> bool {
        self.dirtied >= self.pages_each && self.beside() > self.free
    }

    /// Takes a free segment, if as many are left to others.
    pub(super) fn take(&mut self, want: Want) -> Option<u32> {
        if self.free <= self.left_by(want, 0) {
            return None;
        }
        let number = self.states.iter().position(|state| *state == State::Free)?;
        self.states[number] = State::Used { round: self.round };
        self.free -= 1;
        if want == Want::Checkpoint {
            self.under_way = self.under_way.saturating_sub(1);
        }
        self.spoiled.remove(&(number as u32));
        Some(number as u32)
    }

    /// Gives each segment another state.
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

    /// What counts keeps its segment from being free, also if that was not known.
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

    /// A superblock stands for the checkpoint of this round, and the other one for that before.
    pub(super) fn stand_for(&mut self, round: u64) {
        self.stand = (round, self.stand.0);
    }

    /// Both superblocks stand for the last checkpoint.
    pub(super) fn stand_for_one(&mut self) {
        self.stand.1 = self.stand.0;
    }

    /// Whether they do.
    pub(super) fn is_for_one(&self) -> bool {
        self.stand.0 == self.stand.1
    }

    /// Nothing counts in a segment any more, durably, and no log is read there: it is not used any
    /// more. Says whether that is so.
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

    /// A segment is free.
    pub(super) fn put_back(&mut self, number: u32) {
        let before = std::mem::replace(&mut self.states[number as usize], State::Free);
        self.free += usize::from(before != State::Free);
        self.idle -= usize::from([State::Idle, State::Discarded].contains(&before));
        self.hollow -= usize::from(before == State::Hollow);
    }

    /// Gives the space of the last free segment back; answers its number.
    pub(super) fn hollow_out(&mut self) -> Option<u32> {
        let number = self.states.iter().rposition(|state| *state == State::Free)?;
        self.states[number] = State::Hollow;
        self.free -= 1;
        self.hollow += 1;
        Some(number as u32)
    }

    /// Those that take space of the file system.
    pub(super) fn there(&self) -> usize {
        self.states.len() - self.hollow
    }

    /// Pages that the next checkpoint writes.
    fn to_write(&self) -> u64 {
        self.dirtied + self.coming.0 + self.upper + UPPER_MORE
    }

    /// Those of them beyond the open segment, if so many more are changed.
    fn beyond(&self, more: u64) -> u64 {
        (self.to_write() + more).saturating_sub(self.rest)
    }

    /// Segments that the next checkpoint may take for its pages, if so many more are changed, and
    /// those that the one on its way may.
    fn kept(&self, more: u64) -> usize {
        self.under_way + self.beyond(more).div_ceil(self.pages_each) as usize
    }

    /// Segments that writes leave to others, and those that the next checkpoint may take beside
    /// those that are kept for it already when it begins.
    pub(super) fn beside(&self) -> usize {
        self.left_by(Want::Write, 0) + self.kept(0)
    }

    /// Segments that this use leaves free, where so many more pages are changed.
    pub(super) fn left_by(&self, want: Want, more: u64) -> usize {
        match want {
            Want::Checkpoint => 0,
            Want::Move => self.kept(more),
            Want::Free => self.kept(more) + MOVING,
            Want::Write => self.kept(more) + RESERVE,
        }
    }

    /// How many more pages may be changed by this use if it takes so many segments; `None`: it may
    /// not take as many.
    pub(super) fn pages_left(&self, want: Want, taken: usize) -> Option<u64> {
        let spare = self.free.checked_sub(self.left_by(want, 0) + taken)? as u64;
        let beyond = self.beyond(0).div_ceil(self.pages_each);
        let have = (beyond + spare) * self.pages_each + self.rest;
        Some(have - self.to_write())
    }

    /// How many more can be made, as far as is known.
    pub(super) fn more(&self) -> usize {
        let most = if self.full { 0 } else { self.outside };
        self.count_max.saturating_sub(self.there()).min(most)
    }

    /// Bytes that count, with pages twice: a checkpoint writes them beside those of the one before.
    pub(super) fn used_bytes(&self) -> u64 {
        self.counted + self.coming.1 + 2 * self.pages * PAGE_BYTES as u64
    }

    /// How many bytes may be written beside those that count where there are so many segments, if
    /// all garbage is won back but what lies thin among them: an eighth of what there is, without
    /// what is kept and what is open. Pages count twice, as a checkpoint writes them beside those
    /// of the one before.
    pub(super) fn left_bytes(&self, count: usize) -> u64 {
        let upper = (self.upper + UPPER_MORE).div_ceil(self.pages_each);
        let usable = (count as u64).saturating_sub(OPEN + RESERVE as u64 + upper);
        let bytes = self.pages_each * PAGE_BYTES as u64;
        (usable * (bytes / 8 * 7)).saturating_sub(self.used_bytes())
    }
}

/// What space is wanted for. Each leaves some to those before it: what makes room goes on where
/// writes do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Want {
    /// The pages of a checkpoint, for which as much is kept as it needs.
    Checkpoint,
    /// Cleaning: what is moved, and what the log says of that.
    Move,
    /// What has to go on: discards, changes of the catalogue that make room, and writes that were
    /// answered before, as nobody could be told that there is no space for them.
    Free,
    /// Writes, and volumes and snapshots that are made.
    Write,
}

/// How many segments there are of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Files.
    pub all: usize,
    /// Free ones.
    pub free: usize,
    /// Free after the next checkpoint.
    pub idle: usize,
    /// Those that have given their space back to the file system.
    pub hollow: usize,
    /// Those with damaged blocks, which are not cleaned any more.
    pub spoiled: usize,
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
        // Nine pages and two more, four of which go into each of three segments.
        assert_eq!(table.left_by(Want::Move, 0), 3);
        assert_eq!(table.left_by(Want::Move, 3), 3);
        assert_eq!(table.left_by(Want::Move, 4), 4);
        for (want, left) in
            [(Want::Write, 8), (Want::Free, 7), (Want::Move, 3), (Want::Checkpoint, 0)]
        {
            while table.take(want).is_some() {}
            assert_eq!(table.free, left, "{want:?}");
        }
    }

    #[test]
    fn as_many_pages_may_change_as_are_kept_for() {
        for (free, rest) in [(3, 0), (5, 1), (9, 7)] {
            let mut table = table(free);
            (table.dirtied, table.upper, table.rest) = (5, 2, rest);
            for taken in 0..4 {
                let fits = |more| table.free >= table.left_by(Want::Move, more) + taken;
                match table.pages_left(Want::Move, taken) {
                    Some(most) => assert!(fits(most) && !fits(most + 1), "{free} {rest} {taken}"),
                    None => assert!(!fits(0), "{free} {rest} {taken}"),
                }
            }
        }
    }

    #[test]
    fn what_is_emptied_is_free_where_no_log_is_read() {
        let mut table = table(4);
        let old = table.take(Want::Checkpoint).unwrap();
        let round = table.begin_round();
        table.end_round(true);
        let new = table.take(Want::Checkpoint).unwrap();
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
    fn a_checkpoint_on_its_way_has_what_was_kept_for_it() {
        let mut table = table(12);
        table.dirtied = 6;
        assert_eq!(table.left_by(Want::Move, 0), 2);
        table.begin_round();
        // Two for it, and one for the next one.
        assert_eq!(table.left_by(Want::Move, 0), 3);
        table.take(Want::Checkpoint);
        assert_eq!(table.left_by(Want::Move, 0), 2);
        table.end_round(false);
        assert_eq!((table.dirtied, table.left_by(Want::Move, 0)), (6, 2));
    }
}
