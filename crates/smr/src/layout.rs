//! Layout of the zones of a disk.
//!
//! The disk is divided into slots of the zone size. A slot holds a conventional zone or a
//! sequential zone. If sequential zones are shorter than slots, a gap zone follows in the slot.
//! State is kept per slot: gap zones have none. All lengths here are in sectors.

use blockyard_core::zone::Zone;
use blockyard_core::{SECTOR_SHIFT, Sector};
use blockyard_zone_media::SequentialZones;

use crate::config::DiskConfig;

/// The kind of zone at a place of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZonePart {
    /// A zone with random writes.
    Conventional,
    /// A zone that is written at its write pointer.
    Sequential,
    /// A gap zone, without data.
    Gap,
}

/// A zone of any kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZonePlace {
    /// The slot of the zone.
    pub slot: u32,
    /// The kind of the zone.
    pub part: ZonePart,
    /// The first sector.
    pub start: Sector,
    /// The end: the first sector after the zone.
    pub end: Sector,
}

/// The zones of a disk.
#[derive(Clone, Debug)]
pub struct Layout {
    sectors: u64,
    zone_shift: u32,
    sequential_sectors: u64,
    conventional_count: u32,
}

impl Layout {
    /// The layout of a validated configuration.
    pub fn new(config: &DiskConfig) -> Layout {
        Layout {
            sectors: config.size >> SECTOR_SHIFT,
            zone_shift: (config.zone_size >> SECTOR_SHIFT).trailing_zeros(),
            sequential_sectors: config.sequential_bytes() >> SECTOR_SHIFT,
            conventional_count: config.zone_nr_conv,
        }
    }

    /// Sectors of the disk.
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Sectors of a slot; the last slot may be shorter.
    pub fn slot_sectors(&self) -> u64 {
        1 << self.zone_shift
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.sectors.div_ceil(self.slot_sectors()) as u32
    }

    /// Whether the disk has gap zones.
    pub fn has_gaps(&self) -> bool {
        self.sequential_sectors < self.slot_sectors()
    }

    /// Whether a slot holds a conventional zone.
    #[inline]
    pub fn is_conventional(&self, slot: u32) -> bool {
        slot < self.conventional_count
    }

    /// Number of slots with a conventional zone; these come first.
    pub fn conventional_count(&self) -> u32 {
        self.conventional_count
    }

    /// The conventional or sequential zone of a slot.
    #[inline]
    pub fn first(&self, slot: u32) -> ZonePlace {
        let start = Sector(u64::from(slot) << self.zone_shift);
        let slot_end = Sector((start.0 + self.slot_sectors()).min(self.sectors));
        if self.is_conventional(slot) {
            return ZonePlace { slot, part: ZonePart::Conventional, start, end: slot_end };
        }
        let end = slot_end.min(start + self.sequential_sectors);
        ZonePlace { slot, part: ZonePart::Sequential, start, end }
    }

    /// The gap zone of a slot, if it has one.
    pub fn gap(&self, slot: u32) -> Option<ZonePlace> {
        let start = self.first(slot).end;
        let end = Sector(((u64::from(slot) + 1) << self.zone_shift).min(self.sectors));
        (start < end).then_some(ZonePlace { slot, part: ZonePart::Gap, start, end })
    }

    /// The zone that contains a sector.
    #[inline]
    pub fn place_of(&self, sector: Sector) -> ZonePlace {
        let slot = (sector.0 >> self.zone_shift) as u32;
        let first = self.first(slot);
        if sector < first.end {
            return first;
        }
        self.gap(slot).expect("what is not in the first zone of a slot is in its gap")
    }
}

/// The zones that have a state, by slot.
impl SequentialZones for Layout {
    fn zone_count(&self) -> u32 {
        self.slots()
    }

    #[inline]
    fn is_conventional(&self, slot: u32) -> bool {
        Layout::is_conventional(self, slot)
    }

    fn conventional(&self, slot: u32) -> Zone {
        let ZonePlace { start, end, .. } = self.first(slot);
        Zone::conventional(start, end - start)
    }

    #[inline]
    fn sequential(&self, slot: u32) -> Zone {
        let ZonePlace { start, end, .. } = self.first(slot);
        Zone::sequential(start, end - start, end - start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zones_cover_the_disk_without_a_hole() {
        for (size, capacity) in [(10 << 20, 0), ((9 << 20) + 4096, 768 << 10), (9 << 20, 1 << 20)] {
            let config = DiskConfig {
                size,
                zone_size: 1 << 20,
                zone_capacity: capacity,
                zone_nr_conv: 2,
                ..DiskConfig::default()
            };
            config.check().unwrap();
            let layout = Layout::new(&config);
            let mut next = Sector(0);
            let mut gaps = 0;
            for slot in 0..layout.slots() {
                let zones = [Some(layout.first(slot)), layout.gap(slot)];
                for place in zones.into_iter().flatten() {
                    assert_eq!(place.start, next);
                    assert!(place.end > place.start);
                    for at in [place.start, Sector(place.end.0 - 1)] {
                        assert_eq!(layout.place_of(at), place);
                    }
                    gaps += u32::from(place.part == ZonePart::Gap);
                    next = place.end;
                }
            }
            assert_eq!(next.0, layout.sectors());
            assert_eq!(gaps > 0, layout.has_gaps());
        }
    }
}
