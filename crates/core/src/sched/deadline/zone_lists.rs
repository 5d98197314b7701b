//! Per-zone lists of waiting writes, in the order of their insertion, regardless of class: a
//! sequential zone accepts writes only at its write pointer.
//!
//! The sector order and the FIFO decide when a zone is served; the list of the zone decides which
//! write is dispatched. Linux instead lets one write of a zone at a time into the scheduler (zone
//! write plugging). If a zone write plug above the scheduler does the same, each list has at most
//! one write.

use super::entries::{Entries, NONE};
use crate::geometry::ZoneGeometry;
use crate::units::{Sector, ZoneNo};

/// The list of one zone: its first and its last entry. A number is stored plus one, so that an
/// empty list is all zeros and the memory of zones that are never written is never touched.
#[derive(Clone, Copy, Debug, Default)]
struct ZoneList {
    first: u32,
    last: u32,
}

/// The lists of all zones.
#[derive(Clone, Debug)]
pub(super) struct ZoneLists {
    zones: ZoneGeometry,
    lists: Vec<ZoneList>,
}

impl ZoneLists {
    /// Empty lists.
    pub(super) fn new(zones: ZoneGeometry) -> ZoneLists {
        let lists = vec![ZoneList::default(); ZoneNo(zones.zone_count).index()];
        ZoneLists { zones, lists }
    }

    /// The zone of this sector if it is a sequential zone, which has a list.
    #[inline]
    pub(super) fn zone_of(&self, sector: u64) -> Option<ZoneNo> {
        let zone = self.zones.zone_of(Sector(sector));
        (!self.zones.is_conventional(zone) && zone.index() < self.lists.len()).then_some(zone)
    }

    /// The last entry of a zone's list.
    #[inline]
    pub(super) fn last(&self, zone: ZoneNo) -> Option<u32> {
        self.lists[zone.index()].last.checked_sub(1)
    }

    /// The first entry of a zone's list, which must not be empty.
    #[inline]
    pub(super) fn first(&self, zone: ZoneNo) -> u32 {
        self.lists[zone.index()].first - 1
    }

    /// Adds an entry at the end of a zone's list.
    pub(super) fn push<T>(&mut self, entries: &mut Entries<T>, zone: ZoneNo, place: u32) {
        let list = &mut self.lists[zone.index()];
        let last = std::mem::replace(&mut list.last, place + 1);
        entries[place].in_line = true;
        (entries[place].zone_previous, entries[place].zone_next) = (NONE, NONE);
        match last.checked_sub(1) {
            None => list.first = place + 1,
            Some(last) => {
                entries[last].zone_next = place;
                entries[place].zone_previous = last;
            }
        }
    }

    /// Removes an entry from a zone's list.
    pub(super) fn remove<T>(&mut self, entries: &mut Entries<T>, zone: ZoneNo, place: u32) {
        let list = &mut self.lists[zone.index()];
        let (previous, next) = (entries[place].zone_previous, entries[place].zone_next);
        match previous {
            NONE => list.first = next.wrapping_add(1),
            previous => entries[previous].zone_next = next,
        }
        match next {
            NONE => list.last = previous.wrapping_add(1),
            next => entries[next].zone_previous = previous,
        }
        entries[place].in_line = false;
    }
}
