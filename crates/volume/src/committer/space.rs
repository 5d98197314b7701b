//! Who may have what is left of the log, and what is done where nothing is.
//!
//! A write that finds no space is refused, and nothing else is: discards, flushes and what was
//! answered before have what writes leave to them, see [`crate::segments`].

use super::search::{Room, VAIN_TRIES};
use super::{Committer, ROOM_TRIES, VAIN_MAX};
use crate::checkpoint;
use crate::clean::Cleaning;
use crate::format::superblock::SEGMENT_NONE;
use crate::record::Body;
use crate::segments::Want;
use crate::store::Directory;

impl<D: Directory> Committer<D> {
    /// How many segments the group takes; `None` if it finds no place.
    pub(super) fn taken(&self) -> Option<usize> {
        self.log.takes(self.group.len(self.pool.align()), self.pool.segments())
    }

    fn want(&self) -> Want {
        self.group.want.unwrap_or(Want::Free)
    }

    /// Whether the group may be appended, so that others have what is left to them. Makes segments
    /// if there are too few.
    pub(super) fn is_admitted(&self) -> bool {
        let (want, pages) = (self.want(), self.group.pages);
        let taken = self.taken();
        taken.is_some_and(|taken| self.pool.segments().may(want, pages, taken)) && self.fits()
    }

    /// The same where nobody waits for a segment that is made.
    pub(super) fn finds_place(&self) -> bool {
        let (want, pages) = (self.want(), self.group.pages);
        let taken = self.taken();
        taken.is_some_and(|taken| self.pool.segments().has(want, pages, taken)) && self.fits()
    }

    /// Whether what a write adds leaves so much garbage that cleaning goes on, and to other volumes
    /// what these are promised. What was answered before was looked at then.
    pub(super) fn fits(&self) -> bool {
        if self.group.want != Some(Want::Write) {
            return true;
        }
        self.pool.affords_writes(&self.group.records, self.group.payload_bytes.into())
    }

    /// Whether a checkpoint will find room for the pages that the group changes, though it is not
    /// in the log.
    pub(super) fn keeps_enough(&self) -> bool {
        // Nothing else is with moves; a flush beside a change that was refused is carried out.
        let moves = self.group.want == Some(Want::Move);
        !moves || self.pool.segments().has(Want::Move, self.group.pages, 0)
    }

    /// Finds room for the group, if there is any.
    pub(super) fn finds_room(&mut self) -> Room {
        if self.group.descriptors.is_empty() || self.pool.is_poisoned() {
            return Room::Found;
        }
        // What writes wait for is done beside this thread, where others run.
        let beside = self.want() == Want::Write && self.pool.is_running();
        self.group.admitted = if beside { self.finds_place() } else { self.is_admitted() };
        if self.group.admitted {
            self.found();
            return Room::Found;
        }
        // Some checkpoints on, what was moved would lie where something else does.
        if self.group.want == Some(Want::Move) {
            return Room::Found;
        }
        self.land_all();
        // A log at its end goes on where a checkpoint says: nothing else can, until that is there.
        if beside && self.taken().is_some() {
            return self.search();
        }
        self.group.admitted = self.make_room();
        let is_there = self.group.admitted || self.group.records.len() == 1;
        if is_there { Room::Found } else { Room::None }
    }

    /// How many segments have to be free so that the group is admitted, if nothing but segments is
    /// missing and more can be made.
    pub(super) fn lacks(&self) -> Option<usize> {
        let (segments, pages) = (self.pool.segments(), self.group.pages);
        let needed = segments.needed(self.want(), pages, self.taken()?);
        (segments.free() < needed && segments.grows() && self.fits()).then_some(needed)
    }

    /// Takes the group apart, for a group for each of its records: one that finds no space is
    /// refused alone.
    pub(super) fn part(&mut self) {
        // What waits for space and overlaps one of them came later.
        self.resume();
        self.singly += self.group.records.len();
        self.put_back();
    }

    /// Takes the group apart.
    pub(super) fn put_back(&mut self) {
        let mut group = std::mem::take(&mut self.group);
        for mut record in group.records.drain(..).rev() {
            // What was refused is checked once more.
            record.durable |= matches!(record.body, Body::Catalogue(_));
            self.held.push_front(record);
        }
        group.clear();
        self.group = group;
    }

    /// Looks for space where there is none for the group: what two checkpoints do not need any
    /// more, and what cleaning wins back. The log moves there if it has come to its end.
    fn make_room(&mut self) -> bool {
        // Where it was in vain, only now and then again, unless it has to go on.
        self.in_vain = self.in_vain.saturating_sub(1);
        if self.in_vain > 0 && self.want() == Want::Write {
            return false;
        }
        self.pool.meters().searched();
        self.join();
        self.pool.segments().try_again();
        let (mut vain, mut state) = (0, self.pool.segments().progress());
        for tried in 0..ROOM_TRIES {
            checkpoint::repeat(&self.pool);
            if self.is_admitted() {
                self.in_vain = 0;
                return true;
            }
            let now = self.pool.segments().progress();
            vain = if tried > 0 && now == state { vain + 1 } else { 0 };
            state = now;
            if vain > VAIN_TRIES {
                break;
            }
            let before = self.log.place;
            let moved = self.new_place();
            if let Some(segment) = moved {
                self.log.place.segment = segment;
                self.log.place.offset = 0;
                self.log.place.next = SEGMENT_NONE;
            }
            // To count again is a walk through all maps, which is worth its time once; where others
            // wait for this thread only if nothing else has helped.
            let counts = if self.pool.is_running() { vain == VAIN_TRIES } else { tried == 0 };
            let cleaning = Cleaning::Needed { counts };
            if !self.checkpoint_now(cleaning) {
                // Nothing was written there, unless by cleaning behind a checkpoint.
                self.log.place = before;
                moved.inspect(|segment| self.pool.segments().put_back(*segment));
                break;
            }
        }
        checkpoint::repeat(&self.pool);
        let found = self.is_admitted();
        self.in_vain = if found { 0 } else { VAIN_MAX };
        found
    }

    /// A segment for the log to go on in, if no group names one: only a checkpoint can say where.
    fn new_place(&self) -> Option<u32> {
        let (len, segments) = (self.group.len(self.pool.align()), self.pool.segments());
        let ends = len <= segments.bytes() && !self.log.has_room(len, segments);
        ends.then(|| segments.take(Want::Move)).flatten()
    }
}
