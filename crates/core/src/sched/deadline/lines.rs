//! Writes to one sequential zone wait in a line, in the order of their insertion, whatever class
//! they have: a zone takes them at its write pointer only.
//!
//! The sorted order and the FIFO decide when a zone is served; its line decides with what. Linux
//! lets one write of a zone at a time into the scheduler instead (zone write plugging), which a
//! gate above may still do; then each line is of one.

use super::entries::{Entries, NONE};
use crate::geometry::ZoneGeometry;
use crate::units::{Sector, ZoneNo};

/// The line of one zone: its first place and its last. Place 0 is kept as 1, and so on, so that a
/// zone without a line is all zeros, and memory of zones that are never written is never touched.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    first: u32,
    last: u32,
}

/// The lines of all zones.
#[derive(Clone, Debug)]
pub(super) struct Lines {
    zones: ZoneGeometry,
    lines: Vec<Line>,
}

impl Lines {
    /// Empty lines.
    pub(super) fn new(zones: ZoneGeometry) -> Lines {
        let lines = vec![Line::default(); ZoneNo(zones.zone_count).index()];
        Lines { zones, lines }
    }

    /// The zone whose line a write at this sector stands in, if it is a sequential one.
    #[inline]
    pub(super) fn zone_of(&self, sector: u64) -> Option<ZoneNo> {
        let zone = self.zones.zone_of(Sector(sector));
        (!self.zones.is_conventional(zone) && zone.index() < self.lines.len()).then_some(zone)
    }

    /// The last place of a zone's line.
    #[inline]
    pub(super) fn last(&self, zone: ZoneNo) -> Option<u32> {
        self.lines[zone.index()].last.checked_sub(1)
    }

    /// The first place of a zone's line, which is not empty.
    #[inline]
    pub(super) fn first(&self, zone: ZoneNo) -> u32 {
        self.lines[zone.index()].first - 1
    }

    /// Adds a place behind a zone's line.
    pub(super) fn push<T>(&mut self, entries: &mut Entries<T>, zone: ZoneNo, place: u32) {
        let line = &mut self.lines[zone.index()];
        let last = std::mem::replace(&mut line.last, place + 1);
        entries[place].in_line = true;
        (entries[place].zone_previous, entries[place].zone_next) = (NONE, NONE);
        match last.checked_sub(1) {
            None => line.first = place + 1,
            Some(last) => {
                entries[last].zone_next = place;
                entries[place].zone_previous = last;
            }
        }
    }

    /// Takes a place out of a zone's line.
    pub(super) fn remove<T>(&mut self, entries: &mut Entries<T>, zone: ZoneNo, place: u32) {
        let line = &mut self.lines[zone.index()];
        let (previous, next) = (entries[place].zone_previous, entries[place].zone_next);
        match previous {
            NONE => line.first = next.wrapping_add(1),
            previous => entries[previous].zone_next = next,
        }
        match next {
            NONE => line.last = previous.wrapping_add(1),
            next => entries[next].zone_previous = previous,
        }
        entries[place].in_line = false;
    }
}
