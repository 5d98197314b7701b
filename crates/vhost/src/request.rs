//! Requests of virtio-blk: VIRTIO 1.3, 5.2.6.
//!
//! A request is a chain of buffers: a header of 16 bytes and the data of a write, which the device
//! reads; then the data of a read and the status, which the device writes. Where one buffer ends
//! says nothing about where a part of the request ends (VIRTIO 1.3, 2.7.4).

use blockyard_core::zone::{ZoneCond, ZoneInfo, ZoneType};
use blockyard_core::{Bio, Flags, Op, Sector, Status};

use crate::device::DeviceShape;

/// The length of the header, in bytes.
pub const HEADER_BYTES: usize = 16;
/// The length of a segment of a discard or write-zeroes, in bytes.
pub const RANGE_BYTES: usize = 16;
/// The most segments of a discard or write-zeroes.
pub const RANGES_MAX: u32 = 32;
/// The length of the id of a device, in bytes.
pub const ID_BYTES: usize = 20;
/// The length of the header of a zone report, and of each zone in it, in bytes.
pub const ZONE_BYTES: usize = 64;

/// Types of requests.
pub mod kind {
    #![expect(missing_docs, reason = "the names are those of the standard")]
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
    pub const ZONE_APPEND: u32 = 15;
    pub const ZONE_REPORT: u32 = 16;
    pub const ZONE_OPEN: u32 = 18;
    pub const ZONE_CLOSE: u32 = 20;
    pub const ZONE_FINISH: u32 = 22;
    pub const ZONE_RESET: u32 = 24;
    pub const ZONE_RESET_ALL: u32 = 26;
}

/// The status byte of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BlkStatus {
    /// The request succeeded.
    Ok = 0,
    /// The device or the driver made an error.
    IoErr = 1,
    /// The device does not have this operation.
    Unsupp = 2,
    /// A command for zones is invalid.
    ZoneInvalidCmd = 3,
    /// A write does not begin at the write pointer of its zone.
    ZoneUnalignedWp = 4,
    /// Too many zones are open.
    ZoneOpenResource = 5,
    /// Too many zones are active.
    ZoneActiveResource = 6,
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkHeader {
    /// The type: one of [`kind`].
    pub kind: u32,
    /// The first sector of 512 bytes, for types that have one.
    pub sector: u64,
}

impl BlkHeader {
    /// Parses the header. Its priority (bytes 4 to 7) has no meaning without a feature that is not
    /// offered.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> BlkHeader {
        BlkHeader { kind: word32(bytes, 0), sector: word64(bytes, 8) }
    }

    /// Whether the device writes a sector at the beginning of what it may write, besides the status
    /// in the last byte. Between the two, Linux has seven bytes that belong to neither.
    pub fn returns_sector(&self) -> bool {
        self.kind == kind::ZONE_APPEND
    }
}

fn word32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]))
}

fn word64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]))
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// One operation of the device on a range, a zone or the whole device.
    Io {
        /// The operation.
        op: Op,
        /// The first sector.
        sector: Sector,
        /// The length in sectors; 0 for an operation without a range.
        sectors: u64,
        /// The modifiers.
        flags: Flags,
    },
    /// A discard or write-zeroes of this many segments, which are in the data that the device
    /// reads.
    Ranges {
        /// The operation.
        op: Op,
        /// The number of segments.
        count: u32,
    },
    /// The id of the device.
    GetId,
    /// A report of the zones from this sector on.
    Report {
        /// The sector.
        from: Sector,
    },
}

impl DeviceShape {
    /// Plans a request. `out_bytes` and `in_bytes` are the lengths of the data that the device
    /// reads and writes, without header and tail.
    ///
    /// # Errors
    /// The status of an invalid request.
    pub fn plan(
        &self,
        header: BlkHeader,
        out_bytes: u64,
        in_bytes: u64,
    ) -> Result<Plan, BlkStatus> {
        let BlkHeader { kind, sector } = header;
        match kind {
            kind::IN => self.plan_data(Op::Read, sector, in_bytes),
            kind::OUT => self.plan_data(Op::Write, sector, out_bytes),
            kind::FLUSH => Ok(io(Op::Flush, 0, 0)),
            kind::GET_ID => Ok(Plan::GetId),
            kind::DISCARD if self.discard_sectors_max > 0 => {
                self.plan_ranges(Op::Discard, out_bytes)
            }
            kind::WRITE_ZEROES if self.write_zeroes_sectors_max > 0 => {
                self.plan_ranges(Op::WriteZeroes, out_bytes)
            }
            kind::ZONE_APPEND
            | kind::ZONE_REPORT
            | kind::ZONE_OPEN
            | kind::ZONE_CLOSE
            | kind::ZONE_FINISH
            | kind::ZONE_RESET
            | kind::ZONE_RESET_ALL => self.plan_zone(kind, sector, out_bytes, in_bytes),
            _ => Err(BlkStatus::Unsupp),
        }
    }

    /// Plans a request with data: whole blocks on the device, within one zone.
    fn plan_data(&self, op: Op, sector: u64, bytes: u64) -> Result<Plan, BlkStatus> {
        let sectors = bytes / 512;
        let end = sector.checked_add(sectors).ok_or(BlkStatus::IoErr)?;
        let is_whole = bytes.is_multiple_of(512)
            && sectors.is_multiple_of(self.block_sectors)
            && sector.is_multiple_of(self.block_sectors);
        if sectors == 0 || end > self.sectors || (op.is_write() && self.read_only) {
            return Err(BlkStatus::IoErr);
        }
        if !is_whole {
            // VIRTIO 1.3, 5.2.6.2: a length or offset that is no multiple of write_granularity.
            let is_write = self.is_sequential(sector) && op.is_write();
            return Err(if is_write { BlkStatus::ZoneUnalignedWp } else { BlkStatus::IoErr });
        }
        if let Some(zones) = &self.zones {
            // VIRTIO 1.3, 5.2.6.2: a request that crosses the border of a sequential zone.
            let last = (end - 1) / zones.zone_sectors;
            let crosses = sector / zones.zone_sectors != last;
            if crosses && (self.is_sequential(sector) || self.is_sequential(end - 1)) {
                return Err(BlkStatus::ZoneInvalidCmd);
            }
        }
        Ok(io(op, sector, sectors))
    }

    fn plan_ranges(&self, op: Op, bytes: u64) -> Result<Plan, BlkStatus> {
        let count = bytes / RANGE_BYTES as u64;
        if self.read_only || count == 0 || !bytes.is_multiple_of(RANGE_BYTES as u64) {
            return Err(BlkStatus::IoErr);
        }
        if count > u64::from(RANGES_MAX) {
            return Err(BlkStatus::IoErr);
        }
        Ok(Plan::Ranges { op, count: count as u32 }) // At most RANGES_MAX.
    }

    /// Plans one segment of a discard or write-zeroes: VIRTIO 1.3, 5.2.6.
    ///
    /// # Errors
    /// The status of an invalid segment.
    pub fn plan_range(&self, op: Op, bytes: &[u8; RANGE_BYTES]) -> Result<Bio, BlkStatus> {
        const UNMAP: u32 = 1;
        let (sector, sectors) = (word64(bytes, 0), u64::from(word32(bytes, 8)));
        let flags = word32(bytes, 12);
        // VIRTIO 1.3, 5.2.6.2: other flags, and any flag of a discard, are not supported.
        if flags & !UNMAP != 0 || (op == Op::Discard && flags != 0) {
            return Err(BlkStatus::Unsupp);
        }
        let sectors_max = match op {
            Op::Discard => self.discard_sectors_max,
            _ => self.write_zeroes_sectors_max,
        };
        let end = sector.checked_add(sectors).ok_or(BlkStatus::IoErr)?;
        let is_whole =
            sector.is_multiple_of(self.block_sectors) && sectors.is_multiple_of(self.block_sectors);
        if sectors == 0 || sectors > sectors_max || end > self.sectors || !is_whole {
            return Err(BlkStatus::IoErr);
        }
        let flags = match op == Op::WriteZeroes && flags & UNMAP == 0 {
            true => Flags::NOUNMAP,
            false => Flags::NONE,
        };
        Ok(Bio::new(op, Sector(sector), sectors).with_flags(flags))
    }

    fn plan_zone(
        &self,
        kind: u32,
        sector: u64,
        out_bytes: u64,
        in_bytes: u64,
    ) -> Result<Plan, BlkStatus> {
        let Some(zones) = &self.zones else { return Err(BlkStatus::Unsupp) };
        if kind == kind::ZONE_REPORT {
            // A report has a header.
            let is_valid = sector < self.sectors && in_bytes >= ZONE_BYTES as u64;
            let report = Plan::Report { from: Sector(sector) };
            return is_valid.then_some(report).ok_or(BlkStatus::ZoneInvalidCmd);
        }
        if self.read_only {
            return Err(BlkStatus::IoErr);
        }
        if kind == kind::ZONE_RESET_ALL {
            return Ok(io(Op::ZoneResetAll, 0, 0));
        }
        let is_start = sector < self.sectors && sector.is_multiple_of(zones.zone_sectors);
        if !is_start || !self.is_sequential(sector) {
            return Err(BlkStatus::ZoneInvalidCmd);
        }
        let op = match kind {
            kind::ZONE_APPEND => {
                let sectors = out_bytes / 512;
                if sectors == 0 || !out_bytes.is_multiple_of(self.block_sectors * 512) {
                    return Err(BlkStatus::ZoneUnalignedWp);
                }
                if sectors > self.append_sectors_max {
                    return Err(BlkStatus::ZoneInvalidCmd);
                }
                return Ok(io(Op::ZoneAppend, sector, sectors));
            }
            kind::ZONE_OPEN => Op::ZoneOpen,
            kind::ZONE_CLOSE => Op::ZoneClose,
            kind::ZONE_FINISH => Op::ZoneFinish,
            _ => Op::ZoneReset,
        };
        Ok(io(op, sector, 0))
    }

    /// Whether a sector lies in a sequential zone.
    pub(crate) fn is_sequential(&self, sector: u64) -> bool {
        let Some(zones) = &self.zones else { return false };
        sector >= u64::from(zones.conventional_count) * zones.zone_sectors
    }

    /// The status of an operation that the device refused or that failed. `zone` is the zone of the
    /// operation's first sector, as the device reports it now.
    pub fn status_of(
        &self,
        op: Op,
        sector: Sector,
        status: Status,
        zone: Option<&ZoneInfo>,
    ) -> BlkStatus {
        match (status, zone) {
            (Status::Ok, _) => BlkStatus::Ok,
            (Status::NotSupp, _) => BlkStatus::Unsupp,
            (Status::ZoneOpenResource, _) => BlkStatus::ZoneOpenResource,
            (Status::ZoneActiveResource, _) => BlkStatus::ZoneActiveResource,
            (Status::IoErr, Some(zone)) if op == Op::Write && zone.wp != sector => {
                BlkStatus::ZoneUnalignedWp
            }
            (Status::IoErr, Some(_)) if op.is_zone_mgmt() => BlkStatus::ZoneInvalidCmd,
            _ => BlkStatus::IoErr,
        }
    }
}

fn io(op: Op, sector: u64, sectors: u64) -> Plan {
    Plan::Io { op, sector: Sector(sector), sectors, flags: Flags::NONE }
}

/// The header of a zone report: the number of zones in it.
pub fn report_header(zones: u64) -> [u8; ZONE_BYTES] {
    let mut bytes = [0; ZONE_BYTES];
    bytes[..8].copy_from_slice(&zones.to_le_bytes());
    bytes
}

/// A zone of a report: VIRTIO 1.3, 5.2.6, `struct virtio_blk_zone_descriptor`.
pub fn zone_descriptor(zone: &ZoneInfo) -> [u8; ZONE_BYTES] {
    let mut bytes = [0; ZONE_BYTES];
    bytes[..8].copy_from_slice(&zone.capacity_sectors.to_le_bytes());
    bytes[8..16].copy_from_slice(&zone.start.0.to_le_bytes());
    bytes[16..24].copy_from_slice(&zone.wp.0.to_le_bytes());
    bytes[24] = match zone.kind {
        ZoneType::Conventional => 1,
        ZoneType::SequentialWriteRequired => 2,
    };
    bytes[25] = zone.cond as u8;
    bytes
}

// VIRTIO 1.3, 5.2.6 numbers the conditions as ZBC does.
const _: () = assert!(ZoneCond::Offline as u8 == 0xf && ZoneCond::NotWp as u8 == 0);
