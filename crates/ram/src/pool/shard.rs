//! A shard: a part of the pool with segments of its own.
//!
//! A segment is filled from its start, objects of all sizes back to back; the shard asks for pages
//! as the segment fills. A freed object becomes a hole ([`Holes`]), and holes are used before fresh
//! pages. An empty segment goes back to the system at once. Compaction reclaims free space that is
//! too small to use where it lies.
#![allow(unsafe_code)]

use super::arena::{Arena, PagePurpose};
use super::holes::Holes;
use super::layout::{Layout, Object, PAGE_UNITS};
use super::memory::Memory;
use super::table::Table;

/// Pages that a shard asks for at a time: one system call for about 15 objects of 2 KiB.
const GRANT_PAGES: u32 = 8;
/// Smallest hole that is recorded, in units: hardly any object fits in a smaller one.
const HOLE_UNITS_MIN: u32 = 2;
/// Stale holes, those of empty segments, are purged when they reach this number and half of all
/// holes.
const STALE_MIN: usize = 1024;

/// The state of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The segment is being filled.
    Open,
    /// The segment was filled; its holes are used.
    Sealed,
    /// Compaction is moving its objects away; nothing is allocated in it.
    Draining,
    /// The segment has no objects and no pages. Some of its holes may still be recorded.
    Empty,
    /// The segment has no objects, no pages and no recorded holes.
    Unused,
}

/// A segment: 256 KiB or more of consecutive places. Counts are in units.
#[derive(Clone, Copy, Debug)]
struct Segment {
    state: State,
    /// All objects and holes lie below this offset.
    end: u32,
    /// Pages are present below this offset. Invariant: `end <= granted`.
    granted: u32,
    /// Free units below `end`; in a sealed segment, below `granted`.
    free: u32,
    /// Number of its recorded holes.
    holes: u32,
    /// Whether a huge page was requested for it since its pages were granted.
    gathered: bool,
}

/// A segment that compaction may choose.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) segment: u32,
    pub(super) free: u32,
    pub(super) granted: u32,
    /// Whether it has no objects. Only possible for the open segment.
    pub(super) is_empty: bool,
}

/// Counters of a shard.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ShardCounters {
    pub(super) objects: u64,
    /// Bytes of the objects.
    pub(super) stored_bytes: u64,
    /// Bytes of all objects that were ever allocated.
    pub(super) placed_bytes: u64,
    /// Units that the objects take.
    pub(super) units: u64,
    /// Units that have pages.
    pub(super) granted: u64,
    /// For each shared object, its length times the number of additional parts in it.
    pub(super) duplicate_bytes: u64,
}

/// Fault injection: allocations that fail at random, for tests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failing {
    pub(super) one_in: u32,
    pub(super) random: u64,
}

/// Where an allocation may take its place from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// Holes only.
    Holes,
    /// Holes or the open segment.
    Begun,
    /// Holes, the open segment or a new segment.
    Fresh,
}

/// What a shard allocates from.
#[derive(Clone, Copy)]
pub(super) struct Ground<'p> {
    pub(super) memory: &'p Memory,
    pub(super) arena: &'p Arena,
    /// The purpose for which pages are requested.
    pub(super) purpose: PagePurpose,
}

/// One of several equal parts of the pool. Accessed only under its lock.
#[derive(Debug)]
pub(super) struct Shard {
    number: u32,
    layout: Layout,
    segments: Table<Segment>,
    open: Option<u32>,
    unused: Table<u32>,
    holes: Holes,
    /// Number of recorded holes that lie in empty segments.
    stale: usize,
    /// Offset and size of the holes of draining segments.
    drained: Vec<(u32, u32)>,
    /// Objects of any shard that were retired through this one and not freed yet.
    pub(super) retired: Vec<Object>,
    pub(super) failing: Option<Failing>,
    tally: ShardCounters,
    /// Number of objects by size in units.
    live: Box<[u32]>,
    /// The stretch for which a huge page is being requested. Its pages must not be returned
    /// meanwhile: the huge page would bring them back.
    gathering: Option<u32>,
}

impl Shard {
    /// Creates an empty shard.
    ///
    /// # Errors
    /// The system's error number, if it does not reserve the addresses of the tables.
    pub(super) fn new(number: u32, layout: Layout, retired_max: usize) -> Result<Shard, i32> {
        let segments_max = layout.segments_max as usize;
        // No two holes overlap, and holes of a single unit are rare. A hole beyond the capacity of
        // the lists is not reused until its segment is empty.
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
            tally: ShardCounters::default(),
            live: vec![0; layout.units_max as usize + 1].into_boxed_slice(),
            gathering: None,
        })
    }

    pub(super) fn tally(&self) -> ShardCounters {
        self.tally
    }

    /// Counts an additional part in an object.
    pub(super) fn joined(&mut self, object: Object) {
        self.tally.duplicate_bytes += object.len_bytes() as u64;
    }

    /// Counts that a part in an object was given up and another one remains.
    pub(super) fn left(&mut self, object: Object) {
        self.tally.duplicate_bytes -= object.len_bytes() as u64;
    }

    /// Number of objects by size in units.
    pub(super) fn live(&self) -> &[u32] {
        &self.live
    }

    /// Free units in pages that are present, in all segments.
    pub(super) fn free_units(&self) -> u64 {
        self.tally.granted - self.tally.units
    }

    /// Whether at least an eighth of the shard's pages is free.
    #[inline]
    pub(super) fn has_much(&self) -> bool {
        self.free_units() * 8 >= self.tally.granted
    }

    /// Whether the shard may have a hole of `units`. A hole of an empty segment can make this
    /// wrong.
    #[inline]
    pub(super) fn fits(&self, units: u32) -> bool {
        self.holes.first_from(units).is_some()
    }

    /// Whether the injected fault makes this allocation fail.
    #[inline]
    pub(super) fn strikes(&mut self) -> bool {
        let Some(failing) = &mut self.failing else { return false };
        failing.random ^= failing.random << 13;
        failing.random ^= failing.random >> 7;
        failing.random ^= failing.random << 17;
        failing.random.is_multiple_of(u64::from(failing.one_in))
    }

    /// Allocates a place for `len_bytes`; `None` if there is none within this reach or within the
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
            // A remainder too small to record stays free until the segment is empty.
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
                // An injected fault: the system refuses pages.
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

    /// Begins a segment that has no pages yet.
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

    /// Seals the open segment; the rest of its pages becomes a hole.
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
    /// The object lies in this shard, was allocated, and no thread can find or read it any more.
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

    /// Returns the pages of an empty segment to the system.
    #[cold]
    fn empty(&mut self, number: u32, ground: Ground<'_>) {
        let stretch = self.layout.stretch_of(number);
        if self.gathering == Some(stretch) {
            return;
        }
        // A huge page was requested for the whole stretch, so any of its segments shows it, unless
        // that segment was emptied since.
        let mut segments = self.layout.segments_of(stretch);
        let is_gathered =
            |number| self.segments.get(number as usize).is_some_and(|it: &Segment| it.gathered);
        let gathered = segments.any(is_gathered);
        let segment = &mut self.segments[number as usize];
        debug_assert_eq!(segment.free, segment.granted);
        let (granted, holes) = (segment.granted, segment.holes);
        *segment = Segment { state: State::Empty, ..Segment::UNUSED };
        if granted > 0 {
            let start = self.layout.segment_start(self.number, number);
            // SAFETY: all its places are free, and places are only allocated under this lock.
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

    /// Drops the holes of empty segments, so that these segments can be used again.
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

    /// Finds the next stretch, from segment `from` on, that has all its pages and for which no huge
    /// page was requested yet. Returns its first segment; its pages stay until
    /// [`Shard::end_gathering`]. Advances `from` past the stretch. `None` at the end.
    pub(super) fn begin_gathering(&mut self, from: &mut u32) -> Option<u32> {
        // Another thread is requesting huge pages for this shard; it continues where we would have.
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

    /// Returns the pages of segments that became empty meanwhile.
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

    /// The segments that compaction could empty, including the open one if it has holes.
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

    /// Stops allocation in these segments, and drops their holes.
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

    /// Returns the remaining draining segments to normal use: the pass could not empty them, or was
    /// stopped. Their holes become usable again, except those of the objects that the pass moved.
    pub(super) fn end_draining(&mut self) {
        for (at, units) in std::mem::take(&mut self.drained) {
            let segment = &mut self.segments[self.layout.segment_of(at) as usize];
            // A segment that was emptied, and maybe used again, is no longer draining.
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
    /// Whether the segment's holes may be used.
    #[inline]
    fn is_used(self) -> bool {
        matches!(self, State::Open | State::Sealed)
    }
}

impl Segment {
    const UNUSED: Segment =
        Segment { state: State::Unused, end: 0, granted: 0, free: 0, holes: 0, gathered: false };

    /// Asks for pages up to `end` and some more; `false` if the limit or the system refuses.
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
            // Some pages may have been provided. They are not in use and must not look so to the
            // system.
            // SAFETY: nothing was allocated in the range yet.
            unsafe { ground.memory.give_back(start, Layout::bytes(granted), false) };
            ground.arena.give(pages);
            return false;
        }
        self.granted += granted;
        true
    }
}
