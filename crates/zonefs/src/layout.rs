//! Assignment of zones to files.

use blockyard_core::zone::{ZoneCond, ZoneInfo, ZoneType};
use blockyard_core::{Disk, SECTOR_BYTES, Sector};

use crate::attributes::FileKind;
use crate::error::{Problem, ZoneFsError};

/// Number of zones per report.
const REPORT_ZONES: usize = 4096;

/// A file as derived from the zones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) kind: FileKind,
    /// Number of the first zone.
    pub(crate) zone: u32,
    /// Number of zones: 1 except for aggregated conventional zones.
    pub(crate) zones: u32,
    /// First sector.
    pub(crate) start: Sector,
    /// Capacity in bytes.
    pub(crate) capacity: u64,
    /// Condition of the zone; the worst one if there are several zones.
    pub(crate) cond: ZoneCond,
    /// Bytes below the write pointer; the capacity for a conventional file.
    pub(crate) written: u64,
}

/// All zones of a device.
///
/// # Errors
/// If the report fails or has another number of zones than the device.
pub(crate) fn report(disk: &dyn Disk) -> Result<Vec<ZoneInfo>, ZoneFsError> {
    let failed = |problem| ZoneFsError { device: disk.name().to_owned(), problem };
    let geometry = disk.geometry();
    let wanted = geometry.zones.as_ref().ok_or_else(|| failed(Problem::NotZoned))?.zone_count;
    let mut zones: Vec<ZoneInfo> = Vec::with_capacity(wanted as usize);
    let mut next = Sector(0);
    while next.0 < geometry.sectors && zones.len() <= wanted as usize {
        let before = zones.len();
        let reported = disk.report_zones(next, REPORT_ZONES, &mut zones);
        reported.map_err(|error| failed(error.into()))?;
        match zones.last() {
            Some(last) if zones.len() > before => next = last.start + last.sectors,
            _ => break,
        }
    }
    if zones.len() != wanted as usize {
        return Err(failed(Problem::ZoneCount { wanted, got: zones.len() as u64 }));
    }
    Ok(zones)
}

/// The files of both kinds, in the order of their zones. Zone 0 is not a file: it holds the
/// superblock.
pub(crate) fn files(zones: &[ZoneInfo], aggregate_conventional: bool) -> [Vec<Shape>; 2] {
    let mut files: [Vec<Shape>; 2] = Default::default();
    for (number, zone) in zones.iter().enumerate().skip(1) {
        let shape = shape(number as u32, zone);
        let list = &mut files[shape.kind.index()];
        let last = list.last_mut().filter(|last| {
            let adjoins = last.zone + last.zones == shape.zone;
            aggregate_conventional && shape.kind == FileKind::Conventional && adjoins
        });
        match last {
            Some(last) => {
                last.zones += 1;
                last.capacity += shape.capacity;
                last.written += shape.written;
                last.cond = worst(last.cond, shape.cond);
            }
            None => list.push(shape),
        }
    }
    files
}

fn shape(number: u32, zone: &ZoneInfo) -> Shape {
    let (kind, sectors) = match zone.kind {
        ZoneType::Conventional => (FileKind::Conventional, zone.sectors),
        ZoneType::SequentialWriteRequired => (FileKind::Sequential, zone.capacity_sectors),
    };
    let capacity = sectors * SECTOR_BYTES;
    let (zones, start, cond) = (1, zone.start, zone.cond);
    Shape { kind, zone: number, zones, start, capacity, cond, written: written(zone, capacity) }
}

/// Bytes below the write pointer. A read-only or offline zone has no known write pointer and counts
/// as empty.
pub(crate) fn written(zone: &ZoneInfo, capacity: u64) -> u64 {
    match (zone.kind, zone.cond) {
        (_, ZoneCond::Offline) => 0,
        (ZoneType::Conventional, _) | (_, ZoneCond::Full) => capacity,
        (_, ZoneCond::ReadOnly) => 0,
        _ => (zone.wp.0.saturating_sub(zone.start.0) * SECTOR_BYTES).min(capacity),
    }
}

/// The worse of two conditions: offline is worse than read-only, which is worse than all others.
pub(crate) fn worst(a: ZoneCond, b: ZoneCond) -> ZoneCond {
    let badness = |cond| match cond {
        ZoneCond::Offline => 2,
        ZoneCond::ReadOnly => 1,
        _ => 0,
    };
    if badness(b) > badness(a) { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zone(number: u64, kind: ZoneType, cond: ZoneCond, wp: u64) -> ZoneInfo {
        let start = Sector(number * 8);
        ZoneInfo { start, sectors: 8, capacity_sectors: 6, wp: Sector(wp), kind, cond }
    }

    fn zones() -> Vec<ZoneInfo> {
        use ZoneCond::{Closed, Full, NotWp, Offline, ReadOnly};
        use ZoneType::{Conventional as Cnv, SequentialWriteRequired as Seq};
        vec![
            zone(0, Cnv, NotWp, 8),
            zone(1, Cnv, NotWp, 16),
            zone(2, Cnv, ReadOnly, 24),
            zone(3, Seq, Closed, 27),
            zone(4, Seq, Full, 40),
            zone(5, Seq, Offline, u64::MAX),
            zone(6, Cnv, NotWp, 56),
        ]
    }

    #[test]
    fn zone_0_is_not_a_file_and_each_other_zone_is_one() {
        let [cnv, seq] = files(&zones(), false);
        assert_eq!(cnv.iter().map(|file| file.zone).collect::<Vec<_>>(), [1, 2, 6]);
        assert_eq!(cnv[0].capacity, 8 * 512);
        assert_eq!(seq.iter().map(|file| file.written).collect::<Vec<_>>(), [1536, 3072, 0]);
        assert_eq!(seq[0].capacity, 6 * 512);
    }

    #[test]
    fn contiguous_conventional_zones_become_one_file() {
        let [cnv, seq] = files(&zones(), true);
        let got: Vec<_> = cnv.iter().map(|file| (file.zone, file.zones, file.capacity)).collect();
        assert_eq!(got, [(1, 2, 8192), (6, 1, 4096)]);
        assert_eq!(cnv[0].cond, ZoneCond::ReadOnly);
        assert_eq!(seq.len(), 3);
    }
}
