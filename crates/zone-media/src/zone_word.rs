//! The state of a zone ([`ZoneRecord`]) and its zone word: eight bytes, as every file of a backing
//! directory stores it.
//!
//! Bits 0 to 7 are the condition, with the numbers of the ZBC zone descriptor. Bits 8 and up are
//! the number of written sectors of 512 bytes from the zone's start. Open conditions are not
//! stored: a zone that was open at a power cut is closed or empty afterwards (ZBC-2 4.5.3.5).

use blockyard_core::zone::ZoneCond;

use crate::geometry::MediaGeometry;

/// The number of written sectors of an unreadable zone.
pub const UNREADABLE: u64 = u64::MAX >> 8;

/// The state of a zone as a medium records it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneRecord {
    /// The condition of the zone.
    pub cond: ZoneCond,
    /// Number of written sectors from the start of the zone; the whole length if the zone is full
    /// or read-only.
    pub written_sectors: u64,
    /// How often the zone was emptied since the disk was opened. Of two records of one zone, the
    /// later one has more erasures or, if these are equal, more written sectors.
    pub erasures: u64,
}

impl ZoneRecord {
    /// The record of an empty zone.
    pub const EMPTY: ZoneRecord =
        ZoneRecord { cond: ZoneCond::Empty, written_sectors: 0, erasures: 0 };

    /// Whether this record of a zone is later than, or equal to, another one.
    pub fn follows(&self, other: &ZoneRecord) -> bool {
        (self.erasures, self.written_sectors) >= (other.erasures, other.written_sectors)
    }
}

/// A state as it is after a power cut: no zone is open.
pub(crate) fn settled(record: ZoneRecord) -> ZoneRecord {
    let cond = match record.cond {
        ZoneCond::ImplicitOpen | ZoneCond::ExplicitOpen | ZoneCond::Closed => {
            match record.written_sectors {
                0 => ZoneCond::Empty,
                _ => ZoneCond::Closed,
            }
        }
        cond => cond,
    };
    ZoneRecord { cond, ..record }
}

/// Encodes a state.
pub fn pack(record: ZoneRecord) -> u64 {
    let record = settled(record);
    record.written_sectors.min(UNREADABLE) << 8 | u64::from(record.cond as u8)
}

/// Decodes a state; `None` if a zone with this number cannot have it.
pub fn unpack(word: u64, zone: u32, geometry: &MediaGeometry) -> Option<ZoneRecord> {
    let number = (word & 0xff) as u8;
    let cond = ZoneCond::ALL.into_iter().find(|cond| *cond as u8 == number)?;
    let written_sectors = word >> 8;
    let sectors = geometry.sectors_of(zone);
    let fits = match cond {
        ZoneCond::NotWp => written_sectors <= sectors,
        ZoneCond::Empty => written_sectors == 0,
        ZoneCond::Closed => (1..=sectors).contains(&written_sectors),
        ZoneCond::Full => written_sectors <= sectors,
        ZoneCond::ReadOnly | ZoneCond::Offline => {
            written_sectors <= sectors || written_sectors == UNREADABLE
        }
        ZoneCond::ImplicitOpen | ZoneCond::ExplicitOpen => false,
    };
    let kind_fits = (cond == ZoneCond::NotWp) == geometry.is_conventional(zone);
    (fits && kind_fits).then_some(ZoneRecord { cond, written_sectors, erasures: 0 })
}

/// The initial state of a zone.
pub(crate) fn pristine(zone: u32, geometry: &MediaGeometry) -> ZoneRecord {
    match geometry.is_conventional(zone) {
        true => ZoneRecord {
            cond: ZoneCond::NotWp,
            written_sectors: geometry.sectors_of(zone),
            erasures: 0,
        },
        false => ZoneRecord::EMPTY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: MediaGeometry = MediaGeometry {
        bytes: 3 << 20,
        zone_bytes: 1 << 20,
        zone_capacity_bytes: 1 << 20,
        conventional_zones: 1,
        block_bytes: 512,
    };

    #[test]
    fn states_come_back_but_for_being_open() {
        for (cond, written_sectors, back) in [
            (ZoneCond::Empty, 0, ZoneCond::Empty),
            (ZoneCond::ExplicitOpen, 0, ZoneCond::Empty),
            (ZoneCond::ImplicitOpen, 7, ZoneCond::Closed),
            (ZoneCond::Closed, 2048, ZoneCond::Closed),
            (ZoneCond::Full, 2048, ZoneCond::Full),
            (ZoneCond::ReadOnly, UNREADABLE, ZoneCond::ReadOnly),
            (ZoneCond::Offline, u64::MAX, ZoneCond::Offline),
        ] {
            let word = pack(ZoneRecord { cond, written_sectors, erasures: 3 });
            let record = unpack(word, 1, &GEOMETRY).unwrap();
            let written_sectors = written_sectors.min(UNREADABLE);
            assert_eq!(record, ZoneRecord { cond: back, written_sectors, erasures: 0 });
        }
        let conventional = pristine(0, &GEOMETRY);
        assert_eq!(unpack(pack(conventional), 0, &GEOMETRY), Some(conventional));
    }

    #[test]
    fn impossible_zone_records_are_refused() {
        for word in [0x02, 0x103, 0x101, 0x04, 2049 << 8 | 4, 2049 << 8 | 0xe, 0x05, 0xff, 0x00] {
            assert_eq!(unpack(word, 1, &GEOMETRY), None, "{word:#x}");
        }
        assert_eq!(unpack(0x01, 0, &GEOMETRY), None);
    }
}
