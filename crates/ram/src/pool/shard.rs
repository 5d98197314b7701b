//! A part of the pool: segments of its own, and the places in them.
//!
//! A segment is filled from its start, objects of all sizes back to back; pages are asked for as
//! the filling goes on. What is freed becomes a hole ([`Holes`]); holes are used before fresh
//! pages. A segment that holds nothing any more goes back to the system at once. Whatever is free
//! and of no use where it lies, because too small, is won back by compaction.
#![allow(unsafe_code)]

use super::arena::{Arena, Purpose};
use super::holes::Holes;
use super::layout::{Layout, PAGE_UNITS};
use super::memory::Memory;
use super::object::Object;
use super::table::Table;

/// Pages that a shard asks for at a time: one call to the system for some 15 objects of 2 KiB.
const GRANT_PAGES: u32 = 8;
/// A hole smaller than this is not noted: nothing would fit in it.
const HOLE_UNITS_MIN: u32 = 2;
/// Holes of segments that are gone are dropped when there are so many, and half of all.
const STALE_MIN: usize = 1024;

/// What a segment is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It is being filled.
    Open,
    /// It was filled; its holes are used.
    Sealed,
    /// Its objects are being moved away; nothing is allocated in it.
    Draining,
    /// It holds nothing and has no pages. Holes of it may still be noted.
    Empty,
    /// The same, and nothing of it is noted.
    Unused,
}

/// 256 KiB or more of consecutive places. Counts are in units.
#[derive(Clone, Copy, Debug)]
struct Segment {
    state: State,
    /// Objects and holes lie below.
    end: u32,
    /// Pages are there below. Invariant: `end <= granted`.
    granted: u32,
    /// Free places below `end`; of a sealed segment, below `granted`.
    free: u32,
    /// Holes of it that are noted.
    holes: u32,
    /// It was asked for as part of a huge page since its pages came.
    gathered: bool,
}

/// A segment that compaction may choose.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) segment: u32,
    pub(super) free: u32,
    pub(super) granted: u32,
    /// Whether it holds nothing: only of the open one, which may have few places in use.
    pub(super) is_empty: bool,
}

/// What a shard counts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) objects: u64,
    /// Bytes of the objects.
    pub(super) stored_bytes: u64,
    /// Bytes of all objects that there ever were.
    pub(super) placed_bytes: u64,
    /// Places that they take.
    pub(super) units: u64,
    /// Places that have pages.
    pub(super) granted: u64,
    /// Bytes of objects once more for each part in them but the first.
    pub(super) duplicate_bytes: u64,
}

/// Fails allocations by chance, for tests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failing {
    pub(super) one_in: u32,
    pub(super) random: u64,
}

/// How far a shard goes for a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// Only what was freed is used again.
    Holes,
    /// The segment that is being filled goes on.
    Begun,
    /// Another segment is begun.
    Fresh,
}

/// What a shard stands on.
#[derive(Clone, Copy)]
pub(super) struct Ground<'p> {
    pub(super) memory: &'p Memory,
    pub(super) arena: &'p Arena,
    /// What pages are asked for.
    pub(super) purpose: Purpose,
}

/// One of several equal parts of the pool. Reached under its lock only.
#[derive(Debug)]
pub(super) struct Shard {
    number: u32,
    layout: Layout,
    segments: Table<Segment>,
    open: Option<u32>,
    unused: Table<u32>,
    holes: Holes,
    /// Noted holes of segments that are not used any more.
    stale: usize,
    /// Holes of draining segments: where, and how large.
    drained: Vec<(u32, u32)>,
    /// Objects that were retired through this shard and not given back yet; of any shard.
    pub(super) retired: Vec<Object>,
    pub(super) failing: Option<Failing>,
    tally: Tally,
    /// Objects by their size in units.
    live: Box<[u32]>,
    /// The stretch that a huge page is asked for now: its pages do not go meanwhile, or they would
    /// come again with it.
    gathering: Option<u32>,
}

impl Shard {
    /// An empty one.
    ///
    /// # Errors
    /// The system's error number, if it has no addresses for the tables.
    pub(super) fn new(number: u32, layout: Layout, retired_max: usize) -> Result<Shard, i32> {
        let segments_max = layout.segments_max as usize;
        // No two holes overlap, and those of a single unit are few: what is one too many is lost
        // until its segment is empty.
        let holes_max = (segments_max << layout.segment_units().ilog2()) / HOLE_UNITS_MIN as usize;
        Ok(Shard {
            number,
            layout,
            segments: Table::reserve(segments_max)?,
            open: None,
            unused: Table::reserve(segments_max)?,
            holes: Holes::new(layout.units_max, holes_max)?,
            stale: 0,
            drained: Vec::new(),
            retired: Vec::with_capacity(retired_max),
            failing: None,
            tally: Tally::default(),
            live: vec![0; layout.units_max as usize + 1].into_boxed_slice(),
            gathering: None,
        })
    }

    pub(super) fn tally(&self) -> Tally {
        self.tally
    }

    /// Counts that one more has a part in an object.
    pub(super) fn joined(&mut self, object: Object) {
        self.tally.duplicate_bytes += object.len_bytes() as u64;
    }

    /// Counts that one less has a part in an object, and another still has.
    pub(super) fn left(&mut self, object: Object) {
        self.tally.duplicate_bytes -= object.len_bytes() as u64;
    }

    /// Objects by their size in units.
    pub(super) fn live(&self) -> &[u32] {
        &self.live
    }

    /// Places that are free in pages that are there, of open segments and others.
    pub(super) fn free_units(&self) -> u64 {
        self.tally.granted - self.tally.units
    }

    /// Whether an eighth of it is free.
    #[inline]
    pub(super) fn has_much(&self) -> bool {
        self.free_units() * 8 >= self.tally.granted
    }

    /// Whether it may have a hole for so many units: one of a segment that is gone deceives.
    #[inline]
    pub(super) fn fits(&self, units: u32) -> bool {
        self.holes.first_from(units).is_some()
    }

    /// Whether an allocation is to fail, as was asked for.
    #[inline]
    pub(super) fn strikes(&mut self) -> bool {
        let Some(failing) = &mut self.failing else { return false };
        failing.random ^= failing.random << 13;
        failing.random ^= failing.random >> 7;
        failing.random ^= failing.random << 17;
        failing.random.is_multiple_of(u64::from(failing.one_in))
    }

    /// A place for an object of so many bytes; `None` if there is none so near, or within the
    /// limit.
    #[inline]
    pub(super) fn alloc(
        &mut self,
        len_bytes: usize,
        reach: Reach,
        ground: Ground<'_>,
    ) -> Option<u64> {
        let units = self.layout.units_of(len_bytes);
        let at = match self.alloc_in_hole(units) {
            Some(at) => at,
            None if reach == Reach::Holes => return None,
            None => self.alloc_at_end(units, reach, ground)?,
        };
        self.tally.objects += 1;
        self.tally.stored_bytes += len_bytes as u64;
        self.tally.placed_bytes += len_bytes as u64;
        self.tally.units += u64::from(units);
        self.live[units as usize] += 1;
        Some(self.layout.place(self.number, at))
    }

    #[inline]
    fn alloc_in_hole(&mut self, units: u32) -> Option<u32> {
        while let Some((at, size)) = self.holes.pop(units) {
            let segment = &mut self.segments[self.layout.segment_of(at) as usize];
            if !segment.state.is_used() {
                self.stale -= 1;
                continue;
            }
            segment.holes -= 1;
            segment.free -= units;
            // A rest too small to note stays free, and is won back when the segment is empty.
            let rest = size - units;
            if rest >= HOLE_UNITS_MIN && self.holes.push(at + units, rest) {
                segment.holes += 1;
            }
            return Some(at);
        }
        None
    }

    fn alloc_at_end(&mut self, units: u32, reach: Reach, ground: Ground<'_>) -> Option<u32> {
        loop {
            let number = match self.open {
                Some(number) => number,
                None if reach != Reach::Fresh => return None,
                None => self.begin_segment()?,
            };
            let segment = &mut self.segments[number as usize];
            let (at, end) = (segment.end, segment.end + units);
            if end > self.layout.segment_units() {
                self.seal(number, ground);
                continue;
            }
            if end > segment.granted {
                // The system refuses pages now and then, if that was asked for.
                let refuses = self.strikes();
                let segment = &mut self.segments[number as usize];
                let before = segment.granted;
                if !segment.grant(self.layout, self.number, number, end, ground, refuses) {
                    return None;
                }
                self.tally.granted += u64::from(segment.granted - before);
            }
            self.segments[number as usize].end = end;
            return Some(number * self.layout.segment_units() + at);
        }
    }

    /// Opens a segment that has no pages yet.
    #[cold]
    fn begin_segment(&mut self) -> Option<u32> {
        if self.unused.is_empty() && self.segments.len() == self.layout.segments_max as usize {
            self.purge();
        }
        let number = match self.unused.pop() {
            Some(number) => number,
            None if self.segments.len() == self.layout.segments_max as usize => return None,
            None => {
                self.segments.push(Segment::UNUSED);
                self.segments.len() as u32 - 1
            }
        };
        self.segments[number as usize].state = State::Open;
        self.open = Some(number);
        Some(number)
    }

    /// Closes the open segment; what is left of its pages becomes a hole.
    #[cold]
    fn seal(&mut self, number: u32, ground: Ground<'_>) {
        let segment = &mut self.segments[number as usize];
        let (at, rest) = (segment.end, segment.granted - segment.end);
        segment.state = State::Sealed;
        segment.end = segment.granted;
        segment.free += rest;
        self.open = None;
        if segment.free == segment.granted {
            self.empty(number, ground);
        } else if (HOLE_UNITS_MIN..=self.layout.units_max).contains(&rest)
            && self.holes.push(number * self.layout.segment_units() + at, rest)
        {
            self.segments[number as usize].holes += 1;
        }
    }

    /// Frees an object's place.
    ///
    /// # Safety
    /// The object lies in this shard, was allocated, and nobody can find or read it any more.
    #[inline]
    pub(super) unsafe fn give(&mut self, object: Object, ground: Ground<'_>) {
        let len_bytes = self.layout.object_bytes(object);
        let units = self.layout.units_of(len_bytes);
        let at = self.layout.offset(object.place());
        self.tally.objects -= 1;
        self.tally.stored_bytes -= len_bytes as u64;
        self.tally.units -= u64::from(units);
        self.live[units as usize] -= 1;
        let number = self.layout.segment_of(at);
        let segment = &mut self.segments[number as usize];
        segment.free += units;
        if segment.state != State::Open && segment.free == segment.granted {
            self.empty(number, ground);
        } else if segment.state.is_used() && self.holes.push(at, units) {
            segment.holes += 1;
        }
    }

    /// Gives the pages of a segment back that holds nothing.
    #[cold]
    fn empty(&mut self, number: u32, ground: Ground<'_>) {
        let stretch = self.layout.stretch_of(number);
        if self.gathering == Some(stretch) {
            return;
        }
        // The whole stretch was gathered, so any of its segments knows; but what was given back of
        // it since does not.
        let mut beside = self.layout.segments_of(stretch);
        let is_gathered =
            |number| self.segments.get(number as usize).is_some_and(|it: &Segment| it.gathered);
        let gathered = beside.any(is_gathered);
        let segment = &mut self.segments[number as usize];
        debug_assert_eq!(segment.free, segment.granted);
        let (granted, holes) = (segment.granted, segment.holes);
        *segment = Segment { state: State::Empty, ..Segment::UNUSED };
        if granted > 0 {
            let start = self.layout.segment_start(self.number, number);
            // SAFETY: all its places are free, and it is under this lock that any is allocated.
            unsafe { ground.memory.give_back(start, Layout::bytes(granted), gathered) };
            ground.arena.give(granted / PAGE_UNITS);
            self.tally.granted -= u64::from(granted);
        }
        self.stale += holes as usize;
        if holes == 0 {
            self.segments[number as usize].state = State::Unused;
            self.unused.push(number);
        } else if self.stale > STALE_MIN && self.stale * 2 > self.holes.count() {
            self.purge();
        }
    }

    /// Drops the holes of segments that are not used any more, so that those can be opened again.
    fn purge(&mut self) {
        let Shard { segments, layout, drained, .. } = self;
        self.holes.retain(|at, units| {
            let state = segments[layout.segment_of(at) as usize].state;
            if state == State::Draining && drained.try_reserve(1).is_ok() {
                drained.push((at, units));
            }
            state.is_used()
        });
        self.stale = 0;
        for (number, segment) in self.segments.iter_mut().enumerate() {
            if !segment.state.is_used() {
                segment.holes = 0;
            }
            if segment.state == State::Empty {
                segment.state = State::Unused;
                self.unused.push(number as u32);
            }
        }
    }

    /// The next stretch from segment `from` on that has all its pages and was not made a huge page
    /// yet, by its first segment; its pages stay until [`Shard::end_gathering`]. Leaves in `from`
    /// where to go on; `None` at the end.
    pub(super) fn begin_gathering(&mut self, from: &mut u32) -> Option<u32> {
        // Somebody else is at it, and his pages must stay: he goes on where we would have.
        if self.gathering.is_some() {
            return None;
        }
        let stretch = self.layout.huge_stretch()?;
        let full = self.layout.segment_units();
        while (*from + stretch) as usize <= self.segments.len() {
            let first = *from;
            *from += stretch;
            let segments = &self.segments[first as usize..(first + stretch) as usize];
            let is_whole = segments.iter().all(|segment| segment.granted == full);
            if is_whole && segments.iter().any(|segment| !segment.gathered) {
                self.gathering = Some(self.layout.stretch_of(first));
                return Some(first);
            }
        }
        None
    }

    /// Gives back what has become empty meanwhile.
    pub(super) fn end_gathering(&mut self, ground: Ground<'_>) {
        let Some(stretch) = self.gathering.take() else { return };
        for number in self.layout.segments_of(stretch) {
            let segment = &mut self.segments[number as usize];
            segment.gathered = true;
            if segment.state != State::Open && segment.free == segment.granted {
                self.empty(number, ground);
            }
        }
    }

    /// The segments that compaction could empty, the open one included if it has holes.
    pub(super) fn candidates(&self) -> impl Iterator<Item = Candidate> + '_ {
        let numbered = (0..).zip(self.segments.iter());
        numbered.filter(|(_, segment)| segment.granted > 0 && segment.free > 0).map(
            |(number, segment)| Candidate {
                segment: number,
                free: segment.free,
                granted: segment.granted,
                is_empty: segment.free == segment.end,
            },
        )
    }

    /// Allocates nothing more in those segments, and drops their holes.
    pub(super) fn drain(&mut self, victims: &[u32], ground: Ground<'_>) {
        for &number in victims {
            if self.open == Some(number) {
                self.seal(number, ground);
            }
            let segment = &mut self.segments[number as usize];
            if segment.state == State::Sealed {
                segment.state = State::Draining;
            }
        }
        self.purge();
    }

    /// Has what is left in those segments used as before: a pass was not able to move it, or was
    /// stopped. Their holes come back, but for those that were left by what it did move.
    pub(super) fn end_draining(&mut self) {
        for (at, units) in std::mem::take(&mut self.drained) {
            let segment = &mut self.segments[self.layout.segment_of(at) as usize];
            // One that was emptied is not draining any more, whatever it is by now.
            if segment.state == State::Draining && self.holes.push(at, units) {
                segment.holes += 1;
            }
        }
        for segment in self.segments.iter_mut() {
            if segment.state == State::Draining {
                segment.state = State::Sealed;
            }
        }
    }
}

impl State {
    /// Whether its holes may be used.
    #[inline]
    fn is_used(self) -> bool {
        matches!(self, State::Open | State::Sealed)
    }
}

impl Segment {
    const UNUSED: Segment =
        Segment { state: State::Unused, end: 0, granted: 0, free: 0, holes: 0, gathered: false };

    /// Asks for pages up to `end` and some more; `false` if there are none within the limit.
    #[cold]
    fn grant(
        &mut self,
        layout: Layout,
        shard: u32,
        number: u32,
        end: u32,
        ground: Ground<'_>,
        refuses: bool,
    ) -> bool {
        let needed = (end - self.granted).div_ceil(PAGE_UNITS);
        let room = (layout.segment_units() - self.granted) / PAGE_UNITS;
        let wanted = needed.max(GRANT_PAGES).min(room);
        let Some(pages) = ground.arena.take(needed, wanted, ground.purpose) else { return false };
        let start = layout.segment_start(shard, number) + Layout::bytes(self.granted) as u64;
        let granted = pages * PAGE_UNITS;
        if refuses || !ground.memory.populate(start, Layout::bytes(granted)) {
            // Some of it may be there: that is not in use, and must not look so to the system.
            // SAFETY: nothing was allocated there yet.
            unsafe { ground.memory.give_back(start, Layout::bytes(granted), false) };
            ground.arena.give(pages);
            return false;
        }
        self.granted += granted;
        true
    }
}
