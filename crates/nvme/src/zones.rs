//! Zones in the terms of ZNS: Zone Management Send and Receive, the bytes of a report, and the
//! exact status of an operation that the device refused.
//!
//! A device says `IOERR` to all that a zone does not permit. ZNS has a status for each reason, so
//! the zone is looked at after the refusal.

use blockyard_core::zone::{ZoneCond, ZoneInfo};
use blockyard_core::{Disk, Op, Sector, Status};

use crate::command::{Sqe, StatusCode};
use crate::namespace::{BioPlan, DATA_BYTES_MAX, NamespaceShape, ZonedShape};

/// The bytes of the header of a zone report, and of each descriptor.
pub const DESCRIPTOR_BYTES: u32 = 64;

/// The zones that one query to the device reports.
pub(crate) const QUERY_ZONES: usize = 256;
/// The queries to the device that a command makes before other commands, and other connections of
/// the thread, have their turns: a device may have millions of zones.
const SCAN_QUERIES_MAX: u32 = 16;

/// An action of Zone Management Send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneAction {
    /// The operation; `None` for the action Offline Zone.
    pub op: Option<Op>,
    /// Select All.
    pub all: bool,
}

impl ZoneAction {
    /// Parses a Zone Management Send.
    ///
    /// # Errors
    /// If the action is not supported.
    pub fn parse(sqe: &Sqe) -> Result<ZoneAction, StatusCode> {
        let dword = sqe.dword(13);
        let op = match dword & 0xff {
            0x01 => Some(Op::ZoneClose),
            0x02 => Some(Op::ZoneFinish),
            0x03 => Some(Op::ZoneOpen),
            0x04 => Some(Op::ZoneReset),
            0x05 => None,
            _ => return Err(StatusCode::INVALID_FIELD),
        };
        Ok(ZoneAction { op, all: dword & 1 << 8 != 0 })
    }

    /// Whether Select All applies the action to a zone in this condition (ZNS 1.1, 3.4.3).
    pub fn selects(&self, cond: ZoneCond) -> bool {
        let is_open = matches!(cond, ZoneCond::ImplicitOpen | ZoneCond::ExplicitOpen);
        match self.op {
            Some(Op::ZoneOpen) => cond == ZoneCond::Closed,
            Some(Op::ZoneClose) => is_open,
            Some(Op::ZoneFinish) => is_open || cond == ZoneCond::Closed,
            Some(_) => is_open || matches!(cond, ZoneCond::Closed | ZoneCond::Full),
            None => cond == ZoneCond::ReadOnly,
        }
    }
}

/// A Zone Management Receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportRequest {
    /// The logical block in the first zone.
    pub first: u64,
    /// The condition of the zones to report; `None` for all zones.
    pub only: Option<ZoneCond>,
    /// Whether the number of zones counts those in the report alone.
    pub partial: bool,
    /// The bytes of the report.
    pub len_bytes: u32,
}

impl ReportRequest {
    /// Parses a Zone Management Receive.
    ///
    /// # Errors
    /// If the action or filter does not exist, or the report would be too long.
    pub fn parse(sqe: &Sqe) -> Result<ReportRequest, StatusCode> {
        let (len, dword) = (u64::from(sqe.dword(12)) * 4 + 4, sqe.dword(13));
        // Without descriptor extensions there is no extended report.
        if dword & 0xff != 0 || len > u64::from(DATA_BYTES_MAX) {
            return Err(StatusCode::INVALID_FIELD);
        }
        let only = match dword >> 8 & 0xff {
            0 => None,
            1 => Some(ZoneCond::Empty),
            2 => Some(ZoneCond::ImplicitOpen),
            3 => Some(ZoneCond::ExplicitOpen),
            4 => Some(ZoneCond::Closed),
            5 => Some(ZoneCond::Full),
            6 => Some(ZoneCond::ReadOnly),
            7 => Some(ZoneCond::Offline),
            _ => return Err(StatusCode::INVALID_FIELD),
        };
        let partial = dword & 1 << 16 != 0;
        Ok(ReportRequest { first: sqe.slba(), only, partial, len_bytes: len as u32 })
    }

    /// The number of the zone with which the report begins.
    pub(crate) fn first_zone(&self, zones: &ZonedShape) -> u32 {
        // The first block lies in the namespace, which has at most `u32::MAX` zones.
        (self.first / zones.zone_blocks) as u32
    }

    /// Makes the next part of the report, by at most [`SCAN_QUERIES_MAX`] queries to the device;
    /// `true` at its end. `put` gets an offset and bytes, and all bytes of the report once.
    /// `scratch` is memory for zones.
    ///
    /// # Errors
    /// If the device does not report its zones.
    pub(crate) fn print_part(
        &self,
        (disk, shape): (&dyn Disk, &NamespaceShape),
        progress: &mut ReportProgress,
        scratch: &mut Vec<ZoneInfo>,
        mut put: impl FnMut(u32, &[u8]),
    ) -> Result<bool, StatusCode> {
        let Some(zones) = &shape.zones else { return Err(StatusCode::INVALID_OPCODE) };
        let room = (self.len_bytes / DESCRIPTOR_BYTES).saturating_sub(1);
        for _ in 0..SCAN_QUERIES_MAX {
            let is_full = self.partial && progress.found >= room;
            if is_full || !query(disk, shape, zones, progress.next, scratch)? {
                self.print_frame(progress.found, room, put);
                return Ok(true);
            }
            progress.next += scratch.len() as u32;
            for zone in scratch.iter().filter(|zone| self.only.is_none_or(|it| it == zone.cond)) {
                if progress.found < room {
                    put((progress.found + 1) * DESCRIPTOR_BYTES, &descriptor(zone, shape));
                } else if self.partial {
                    break;
                }
                progress.found += 1;
            }
        }
        Ok(false)
    }

    /// Prints what a report has before and after its descriptors.
    fn print_frame(&self, found: u32, room: u32, mut put: impl FnMut(u32, &[u8])) {
        let mut header = [0; DESCRIPTOR_BYTES as usize];
        header[..8].copy_from_slice(&u64::from(found).to_le_bytes());
        let header_bytes = self.len_bytes.min(DESCRIPTOR_BYTES);
        put(0, &header[..header_bytes as usize]);
        let mut at = (found.min(room) + 1) * DESCRIPTOR_BYTES;
        while at < self.len_bytes {
            let part = (self.len_bytes - at).min(DESCRIPTOR_BYTES);
            put(at, &[0; DESCRIPTOR_BYTES as usize][..part as usize]);
            at += part;
        }
    }
}

/// How far a report is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReportProgress {
    /// The number of the next zone to look at.
    pub(crate) next: u32,
    /// The zones found so far, also those for which the report has no room.
    pub(crate) found: u32,
}

/// Asks the device for the zones from `number` on; `false` if there are none.
fn query(
    disk: &dyn Disk,
    shape: &NamespaceShape,
    zones: &ZonedShape,
    number: u32,
    scratch: &mut Vec<ZoneInfo>,
) -> Result<bool, StatusCode> {
    scratch.clear();
    if number >= zones.count {
        return Ok(false);
    }
    let from = shape.sector(u64::from(number) * zones.zone_blocks);
    match disk.report_zones(from, QUERY_ZONES, scratch) {
        Ok(()) => Ok(!scratch.is_empty()),
        Err(error) => Err(StatusCode::of(error.status(), Op::Read)),
    }
}

/// The descriptor of a zone.
fn descriptor(zone: &ZoneInfo, shape: &NamespaceShape) -> [u8; DESCRIPTOR_BYTES as usize] {
    let mut bytes = [0; DESCRIPTOR_BYTES as usize];
    let has_pointer = matches!(
        zone.cond,
        ZoneCond::Empty | ZoneCond::ImplicitOpen | ZoneCond::ExplicitOpen | ZoneCond::Closed
    );
    let pointer = if has_pointer { shape.block(zone.wp) } else { u64::MAX };
    // Sequential write required, the only type of ZNS.
    bytes[0] = 2;
    // The numbers of ZBC's conditions are those of ZNS.
    bytes[1] = (zone.cond as u8) << 4;
    let capacity = shape.block(Sector(zone.capacity_sectors));
    for (at, value) in [(8, capacity), (16, shape.block(zone.start)), (24, pointer)] {
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// What a search for a zone to which Select All applies has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ZoneSearch {
    /// The zone of this number.
    Found(u32),
    /// Nothing yet: the search goes on with the zone of this number.
    Pauses(u32),
    /// There is none left.
    Ends,
}

/// Looks for the next zone from `number` on to which Select All applies an action, by at most
/// [`SCAN_QUERIES_MAX`] queries to the device.
///
/// # Errors
/// If the device does not report its zones.
pub(crate) fn next_selected(
    (disk, shape): (&dyn Disk, &NamespaceShape),
    zones: &ZonedShape,
    action: ZoneAction,
    mut number: u32,
    scratch: &mut Vec<ZoneInfo>,
) -> Result<ZoneSearch, StatusCode> {
    for _ in 0..SCAN_QUERIES_MAX {
        if !query(disk, shape, zones, number, scratch)? {
            return Ok(ZoneSearch::Ends);
        }
        if let Some(at) = scratch.iter().position(|zone| action.selects(zone.cond)) {
            return Ok(ZoneSearch::Found(number + at as u32));
        }
        number += scratch.len() as u32;
    }
    Ok(ZoneSearch::Pauses(number))
}

/// The status of an operation on a zoned device that failed with `status`, by the zone after it.
pub fn refusal(bio: &BioPlan, status: Status, zone: &ZoneInfo) -> StatusCode {
    if status != Status::IoErr {
        return StatusCode::of(status, bio.op);
    }
    use ZoneCond::{Empty, Full, Offline, ReadOnly};
    let is_lost = matches!(zone.cond, ReadOnly | Offline);
    match bio.op {
        Op::Read if zone.cond == Offline => StatusCode::ZONE_OFFLINE,
        Op::Write | Op::WriteZeroes | Op::ZoneAppend => match zone.cond {
            Full => StatusCode::ZONE_FULL,
            ReadOnly => StatusCode::ZONE_READ_ONLY,
            Offline => StatusCode::ZONE_OFFLINE,
            _ if bio.op == Op::ZoneAppend => {
                let left = zone.capacity_sectors.saturating_sub(zone.wp.0 - zone.start.0);
                if bio.sectors > left { StatusCode::ZONE_BOUNDARY } else { StatusCode::INTERNAL }
            }
            _ if bio.sector != zone.wp => StatusCode::ZONE_INVALID_WRITE,
            _ => StatusCode::INTERNAL,
        },
        Op::ZoneOpen if is_lost || zone.cond == Full => StatusCode::ZONE_TRANSITION,
        Op::ZoneClose if is_lost || matches!(zone.cond, Empty | Full) => {
            StatusCode::ZONE_TRANSITION
        }
        Op::ZoneFinish | Op::ZoneReset if is_lost => StatusCode::ZONE_TRANSITION,
        _ => StatusCode::INTERNAL,
    }
}

#[cfg(test)]
mod tests {
    use blockyard_core::zone::ZoneType;
    use blockyard_core::{Flags, Sector};

    use super::*;

    fn zone(cond: ZoneCond, wp: u64) -> ZoneInfo {
        ZoneInfo {
            start: Sector(2048),
            sectors: 2048,
            capacity_sectors: 1024,
            wp: Sector(wp),
            kind: ZoneType::SequentialWriteRequired,
            cond,
        }
    }

    fn shape() -> NamespaceShape {
        NamespaceShape {
            block_shift: 12,
            blocks: 1024,
            preferred_blocks: 1,
            discards: false,
            write_zeroes: true,
            write_cache: false,
            read_only: false,
            zones: None,
        }
    }

    #[test]
    fn a_descriptor_has_its_fields_in_blocks() {
        let bytes = descriptor(&zone(ZoneCond::Closed, 2056), &shape());
        assert_eq!(bytes[..8], [2, 0x40, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[8..16], 128u64.to_le_bytes());
        assert_eq!(bytes[16..24], 256u64.to_le_bytes());
        assert_eq!(bytes[24..32], 257u64.to_le_bytes());
        let full = descriptor(&zone(ZoneCond::Full, 3072), &shape());
        assert_eq!((full[1], &full[24..32]), (0xe0, &[0xff; 8][..]));
    }

    #[test]
    fn each_refusal_has_the_status_of_zns() {
        use ZoneCond::{Closed, Empty, Full, ImplicitOpen, Offline, ReadOnly};
        let bio = |op, sector, sectors| BioPlan {
            op,
            sector: Sector(sector),
            sectors,
            flags: Flags::NONE,
        };
        let cases = [
            (bio(Op::Write, 2048, 8), zone(Full, 3072), StatusCode::ZONE_FULL),
            (bio(Op::Write, 2048, 8), zone(ReadOnly, u64::MAX), StatusCode::ZONE_READ_ONLY),
            (bio(Op::Write, 2048, 8), zone(Offline, u64::MAX), StatusCode::ZONE_OFFLINE),
            (bio(Op::Write, 2048, 8), zone(Closed, 2056), StatusCode::ZONE_INVALID_WRITE),
            (bio(Op::Write, 2056, 8), zone(Closed, 2056), StatusCode::INTERNAL),
            (bio(Op::ZoneAppend, 2048, 8), zone(Full, 3072), StatusCode::ZONE_FULL),
            (bio(Op::ZoneAppend, 2048, 16), zone(Closed, 3064), StatusCode::ZONE_BOUNDARY),
            (bio(Op::ZoneAppend, 2048, 8), zone(Closed, 3064), StatusCode::INTERNAL),
            (bio(Op::Read, 2048, 8), zone(Offline, u64::MAX), StatusCode::ZONE_OFFLINE),
            (bio(Op::ZoneOpen, 2048, 0), zone(Full, 3072), StatusCode::ZONE_TRANSITION),
            (bio(Op::ZoneClose, 2048, 0), zone(Empty, 2048), StatusCode::ZONE_TRANSITION),
            (bio(Op::ZoneClose, 2048, 0), zone(ImplicitOpen, 2056), StatusCode::INTERNAL),
            (bio(Op::ZoneFinish, 2048, 0), zone(Offline, 2048), StatusCode::ZONE_TRANSITION),
            (bio(Op::ZoneReset, 2048, 0), zone(ReadOnly, 2048), StatusCode::ZONE_TRANSITION),
        ];
        for (bio, zone, wanted) in cases {
            assert_eq!(refusal(&bio, Status::IoErr, &zone), wanted, "{bio:?} {:?}", zone.cond);
        }
        let active = refusal(&cases[0].0, Status::ZoneActiveResource, &cases[0].1);
        assert_eq!(active, StatusCode::ZONE_TOO_MANY_ACTIVE);
    }
}
