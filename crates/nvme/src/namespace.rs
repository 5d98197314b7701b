//! A device as an NVMe namespace: its blocks and zones in the terms of NVMe, and what each I/O
//! command asks of the device. No I/O.
//!
//! NVM Command Set Specification 1.0 and Zoned Namespace Command Set Specification 1.1.

use blockyard_core::{Flags, Geometry, Limits, Op, SECTOR_SHIFT, Sector};

use crate::command::{Sqe, StatusCode, io_opcode};
use crate::zones::{ReportRequest, ZoneAction};

/// The longest data of a command, in units of 4 KiB as a power of two (MDTS).
pub const DATA_EXPONENT: u8 = 8;
/// The longest data of a command, in bytes.
pub const DATA_BYTES_MAX: u32 = 4096 << DATA_EXPONENT;
/// The number (NSID) of a namespace that is the only one of its subsystem, if its name alone
/// identifies its data.
pub const NSID: u32 = 1;
/// The greatest number of a namespace.
pub const NSID_MAX: u32 = 4096;
/// The longest write-zeroes or discard of a namespace without zones that the device gets at once,
/// in sectors: 8 MiB. The device may execute it within the call.
pub const PIECE_SECTORS: u64 = (8 << 20) >> SECTOR_SHIFT;
/// The bytes of a range of a Dataset Management command.
pub const RANGE_BYTES: u32 = 16;
/// The longest list of ranges: the field for their number has 8 bits.
const RANGES_BYTES_MAX: u32 = 256 * RANGE_BYTES;

/// The reason for which a device cannot be a namespace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NamespaceError {
    /// ZNS has no conventional zones.
    #[error(
        "it has {count} conventional zones, which ZNS does not have: make it without them, or use \
         NBD, a block file or zonefs"
    )]
    Conventional {
        /// Their number.
        count: u32,
    },
    /// Linux ignores a zone that is shorter than the others.
    #[error(
        "its last zone is shorter than the others, which ZNS does not have: make its size a \
         multiple of the zone size, or use NBD, a block file or zonefs"
    )]
    ShortZone,
    /// The longest zone append is too short for its field, whose unit is 4 KiB.
    #[error(
        "its longest zone append is {bytes} bytes, and NVMe can say 8192 or more: raise \
         zone_append_max_sectors, or use NBD, a block file or zonefs"
    )]
    ShortAppend {
        /// The longest append, in bytes.
        bytes: u64,
    },
    /// Zones must consist of whole blocks.
    #[error(
        "its zones are not multiples of its blocks of {block_bytes} bytes: change the zone size \
         or capacity, or use NBD, a block file or zonefs"
    )]
    PartialBlock {
        /// The bytes of a block.
        block_bytes: u32,
    },
}

/// The zones of a namespace, in logical blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZonedShape {
    /// Distance between the starts of two zones: a power of two.
    pub zone_blocks: u64,
    /// Writable blocks of a zone.
    pub capacity_blocks: u64,
    /// Number of zones.
    pub count: u32,
    /// The most open zones; 0 means no limit.
    pub open_max: u32,
    /// The most active zones; 0 means no limit.
    pub active_max: u32,
    /// The longest append, in units of 4 KiB as a power of two (ZASL).
    pub append_exponent: u8,
}

/// A device in the terms of NVMe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceShape {
    /// The bytes of a logical block, as a power of two (LBADS).
    pub block_shift: u32,
    /// Number of logical blocks.
    pub blocks: u64,
    /// Blocks that the device writes without a read (NPWG).
    pub preferred_blocks: u32,
    /// Whether the device takes discards.
    pub discards: bool,
    /// Whether the device takes write-zeroes.
    pub write_zeroes: bool,
    /// Whether the device has a volatile write cache.
    pub write_cache: bool,
    /// Whether the device refuses all changes.
    pub read_only: bool,
    /// The zones, for a zoned device.
    pub zones: Option<ZonedShape>,
}

impl NamespaceShape {
    /// The namespace of a device.
    ///
    /// # Errors
    /// If NVMe cannot describe the device.
    pub fn of(geometry: &Geometry, limits: &Limits) -> Result<NamespaceShape, NamespaceError> {
        // A zoned device takes writes of whole physical blocks only, and ZNS knows one block size.
        let block_bytes = match geometry.zones {
            Some(_) => geometry.physical_block_bytes.max(geometry.logical_block_bytes),
            None => geometry.logical_block_bytes,
        };
        let block_shift = block_bytes.trailing_zeros();
        let sector_shift = block_shift - SECTOR_SHIFT;
        let zones = zoned_shape(geometry, limits, block_bytes)?;
        Ok(NamespaceShape {
            block_shift,
            blocks: geometry.sectors >> sector_shift,
            preferred_blocks: (geometry.physical_block_bytes >> block_shift).max(1),
            discards: limits.discard_sectors_max > 0,
            write_zeroes: limits.write_zeroes_sectors_max > 0,
            write_cache: limits.write_cache,
            read_only: limits.read_only,
            zones,
        })
    }

    /// The bytes of a logical block.
    pub fn block_bytes(&self) -> u32 {
        1 << self.block_shift
    }

    /// The sector at which a logical block begins.
    pub fn sector(&self, block: u64) -> Sector {
        Sector(block << (self.block_shift - SECTOR_SHIFT))
    }

    /// The logical block that begins at a sector.
    pub fn block(&self, sector: Sector) -> u64 {
        sector.0 >> (self.block_shift - SECTOR_SHIFT)
    }

    /// What an I/O command for this namespace asks for.
    ///
    /// # Errors
    /// The status of a command that is refused without asking the device.
    pub fn plan(&self, sqe: &Sqe) -> Result<IoPlan, StatusCode> {
        if sqe.is_fused() {
            return Err(StatusCode::INVALID_FIELD);
        }
        match sqe.opcode() {
            io_opcode::FLUSH => Ok(IoPlan::Bio(BioPlan::FLUSH)),
            io_opcode::READ => self.plan_range(sqe, Op::Read, fua_of(sqe)).map(IoPlan::Bio),
            io_opcode::COMPARE => self.plan_range(sqe, Op::Read, fua_of(sqe)).map(IoPlan::Compare),
            io_opcode::VERIFY => self.plan_range(sqe, Op::Read, fua_of(sqe)).map(IoPlan::Verify),
            io_opcode::WRITE => self.plan_range(sqe, Op::Write, fua_of(sqe)).map(IoPlan::Bio),
            io_opcode::WRITE_ZEROES if self.write_zeroes => {
                let mut flags = fua_of(sqe);
                if sqe.dword(12) & 1 << 25 == 0 {
                    flags = flags | Flags::NOUNMAP;
                }
                self.plan_range(sqe, Op::WriteZeroes, flags).map(IoPlan::Bio)
            }
            io_opcode::DATASET_MANAGEMENT if self.discards && self.zones.is_none() => {
                let count = (sqe.dword(10) & 0xff) + 1;
                // Linux sends the longest list, whatever the number of ranges is.
                let len = sqe.data()?.len;
                if !(count * RANGE_BYTES..=RANGES_BYTES_MAX).contains(&len) {
                    return Err(StatusCode::SGL_LENGTH_INVALID);
                }
                if sqe.dword(11) & 4 == 0 {
                    return Ok(IoPlan::Hints { len });
                }
                self.check_writable()?;
                Ok(IoPlan::Discards { count, len })
            }
            io_opcode::ZONE_APPEND | io_opcode::ZONE_SEND | io_opcode::ZONE_RECEIVE => {
                let zones = self.zones.as_ref().ok_or(StatusCode::INVALID_OPCODE)?;
                self.plan_zoned(sqe, zones)
            }
            _ => Err(StatusCode::INVALID_OPCODE),
        }
    }

    /// A discard of one range of a Dataset Management command; `None` for a range of no blocks.
    ///
    /// # Errors
    /// If the range ends beyond the namespace.
    pub fn plan_discard(&self, range: &DiscardRange) -> Result<Option<BioPlan>, StatusCode> {
        if range.blocks == 0 {
            return Ok(None);
        }
        let (sector, sectors) = self.range(range.first, range.blocks.into())?;
        Ok(Some(BioPlan { op: Op::Discard, sector, sectors, flags: Flags::NONE }))
    }

    fn check_writable(&self) -> Result<(), StatusCode> {
        if self.read_only { Err(StatusCode::READ_ONLY) } else { Ok(()) }
    }

    /// The sectors of a range of blocks that lies in the namespace.
    fn range(&self, first: u64, blocks: u64) -> Result<(Sector, u64), StatusCode> {
        let end = first.checked_add(blocks).filter(|end| *end <= self.blocks);
        let end = end.ok_or(StatusCode::LBA_RANGE)?;
        let sector = self.sector(first);
        Ok((sector, self.sector(end) - sector))
    }

    /// A read, write or write-zeroes.
    fn plan_range(&self, sqe: &Sqe, op: Op, flags: Flags) -> Result<BioPlan, StatusCode> {
        let (first, blocks) = (sqe.slba(), u64::from(sqe.dword(12) & 0xffff) + 1);
        if op.has_data() && blocks << self.block_shift > u64::from(DATA_BYTES_MAX) {
            return Err(StatusCode::INVALID_FIELD);
        }
        let (sector, sectors) = self.range(first, blocks)?;
        if op.is_write() {
            self.check_writable()?;
            if let Some(zones) = &self.zones {
                // The channel would divide the write at the zone's end and write its first part.
                let start = first & !(zones.zone_blocks - 1);
                if first + blocks > start + zones.capacity_blocks {
                    return Err(StatusCode::ZONE_BOUNDARY);
                }
            }
        }
        Ok(BioPlan { op, sector, sectors, flags })
    }

    fn plan_zoned(&self, sqe: &Sqe, zones: &ZonedShape) -> Result<IoPlan, StatusCode> {
        let first = sqe.slba();
        let in_range = first < self.blocks;
        match sqe.opcode() {
            io_opcode::ZONE_RECEIVE if in_range => ReportRequest::parse(sqe).map(IoPlan::Report),
            io_opcode::ZONE_APPEND if in_range => {
                let blocks = u64::from(sqe.dword(12) & 0xffff) + 1;
                let bytes = blocks << self.block_shift;
                let aligned = first.is_multiple_of(zones.zone_blocks);
                if !aligned || bytes > 4096 << zones.append_exponent {
                    return Err(StatusCode::INVALID_FIELD);
                }
                self.check_writable()?;
                let (sectors, flags) = (self.sector(blocks).0, fua_of(sqe));
                let (op, sector) = (Op::ZoneAppend, self.sector(first));
                Ok(IoPlan::Bio(BioPlan { op, sector, sectors, flags }))
            }
            io_opcode::ZONE_SEND => {
                let action = ZoneAction::parse(sqe)?;
                self.check_writable()?;
                if action.all {
                    return Ok(IoPlan::ManageAll(action));
                }
                if !in_range {
                    return Err(StatusCode::LBA_RANGE);
                }
                if !first.is_multiple_of(zones.zone_blocks) {
                    return Err(StatusCode::INVALID_FIELD);
                }
                let sector = self.sector(first);
                Ok(match action.op {
                    Some(op) => IoPlan::Bio(BioPlan { op, sector, sectors: 0, flags: Flags::NONE }),
                    None => IoPlan::Offline { sector },
                })
            }
            _ => Err(StatusCode::LBA_RANGE),
        }
    }
}

/// Force Unit Access.
fn fua_of(sqe: &Sqe) -> Flags {
    if sqe.dword(12) & 1 << 30 != 0 { Flags::FUA } else { Flags::NONE }
}

fn zoned_shape(
    geometry: &Geometry,
    limits: &Limits,
    block_bytes: u32,
) -> Result<Option<ZonedShape>, NamespaceError> {
    let Some(zones) = &geometry.zones else { return Ok(None) };
    if zones.conventional_count > 0 {
        return Err(NamespaceError::Conventional { count: zones.conventional_count });
    }
    if geometry.sectors != u64::from(zones.zone_count) * zones.zone_sectors {
        return Err(NamespaceError::ShortZone);
    }
    let block_sectors = u64::from(block_bytes) >> SECTOR_SHIFT;
    let parts = [zones.zone_sectors, zones.zone_capacity_sectors];
    if parts.iter().any(|sectors| !sectors.is_multiple_of(block_sectors)) {
        return Err(NamespaceError::PartialBlock { block_bytes });
    }
    let append_bytes = Sector(limits.zone_append_sectors_max.min(1 << 32)).bytes();
    // An exponent of 0 means the longest data of any command.
    let exponent = (append_bytes / 4096).checked_ilog2().filter(|exponent| *exponent > 0);
    let Some(exponent) = exponent else {
        return Err(NamespaceError::ShortAppend { bytes: append_bytes });
    };
    Ok(Some(ZonedShape {
        zone_blocks: zones.zone_sectors / block_sectors,
        capacity_blocks: zones.zone_capacity_sectors / block_sectors,
        count: zones.zone_count,
        open_max: zones.open_max,
        active_max: zones.active_max,
        append_exponent: (exponent as u8).min(DATA_EXPONENT),
    }))
}

/// One operation of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BioPlan {
    /// The operation.
    pub op: Op,
    /// The first sector; for zone operations the start of the zone.
    pub sector: Sector,
    /// The sectors; 0 for operations without a range.
    pub sectors: u64,
    /// Modifiers.
    pub flags: Flags,
}

/// What an I/O command asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoPlan {
    /// One operation of the device.
    Bio(BioPlan),
    /// A read whose data are compared with those of the host.
    Compare(BioPlan),
    /// A read whose data are dropped.
    Verify(BioPlan),
    /// Discards of ranges that the command's data list.
    Discards {
        /// The number of ranges.
        count: u32,
        /// The bytes of the list, which may be longer than they need.
        len: u32,
    },
    /// Hints about ranges, which are ignored.
    Hints {
        /// The bytes of the list.
        len: u32,
    },
    /// An operation on all zones in certain conditions.
    ManageAll(ZoneAction),
    /// A zone is to go offline.
    Offline {
        /// The start of the zone.
        sector: Sector,
    },
    /// A report of zones.
    Report(ReportRequest),
}

/// The data that a command moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// None.
    None,
    /// This many bytes from the host.
    FromHost(u32),
    /// This many bytes to the host.
    ToHost(u32),
}

impl IoPlan {
    /// The data that the command moves.
    pub fn transfer(&self) -> Transfer {
        match self {
            IoPlan::Bio(bio) if bio.op == Op::Read => Transfer::ToHost(bio.data_bytes()),
            IoPlan::Bio(bio) if bio.op.has_data() => Transfer::FromHost(bio.data_bytes()),
            IoPlan::Compare(bio) => Transfer::FromHost(bio.data_bytes()),
            IoPlan::Discards { len, .. } | IoPlan::Hints { len } => Transfer::FromHost(*len),
            IoPlan::Report(request) => Transfer::ToHost(request.len_bytes),
            IoPlan::Bio(_) | IoPlan::Verify(_) | IoPlan::ManageAll(_) | IoPlan::Offline { .. } => {
                Transfer::None
            }
        }
    }

    /// The bytes that the device reads and the host does not get.
    pub fn scratch_bytes(&self) -> u32 {
        match self {
            IoPlan::Compare(bio) | IoPlan::Verify(bio) => bio.data_bytes(),
            _ => 0,
        }
    }
}

impl BioPlan {
    /// A flush of the device.
    pub const FLUSH: BioPlan =
        BioPlan { op: Op::Flush, sector: Sector(0), sectors: 0, flags: Flags::NONE };

    /// Whether it is a read with Force Unit Access: what it returns has to be durable.
    pub fn is_durable_read(&self) -> bool {
        self.op == Op::Read && self.flags.contains(Flags::FUA)
    }

    /// The part before the next multiple of [`PIECE_SECTORS`], and the rest, if there is one. The
    /// multiples are those of the device: no piece ends within a block of it.
    pub fn split(self) -> (BioPlan, Option<BioPlan>) {
        let first = self.sectors.min(PIECE_SECTORS - self.sector.0 % PIECE_SECTORS);
        let (sector, sectors) = (Sector(self.sector.0 + first), self.sectors - first);
        let rest = (sectors > 0).then_some(BioPlan { sector, sectors, ..self });
        (BioPlan { sectors: first, ..self }, rest)
    }

    /// The bytes of the bio's data; at most [`DATA_BYTES_MAX`] for one that has data.
    fn data_bytes(&self) -> u32 {
        (self.sectors << SECTOR_SHIFT) as u32
    }
}

/// Checks that a command's data pointer matches its transfer.
///
/// # Errors
/// If the lengths differ, or the host wants to receive data in a capsule.
pub fn check_pointer(
    sqe: &Sqe,
    transfer: Transfer,
    in_capsule_len: usize,
) -> Result<(), StatusCode> {
    let (Transfer::FromHost(len) | Transfer::ToHost(len)) = transfer else { return Ok(()) };
    let pointer = sqe.data()?;
    if pointer.in_capsule && matches!(transfer, Transfer::ToHost(_)) {
        return Err(StatusCode::SGL_TYPE_INVALID);
    }
    let in_capsule = if pointer.in_capsule { len as usize } else { 0 };
    if pointer.len != len || in_capsule_len != in_capsule {
        return Err(StatusCode::SGL_LENGTH_INVALID);
    }
    Ok(())
}

/// A range of a Dataset Management command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscardRange {
    /// The first logical block.
    pub first: u64,
    /// The number of blocks.
    pub blocks: u32,
}

impl DiscardRange {
    /// Parses the [`RANGE_BYTES`] of a range.
    pub fn parse(bytes: &[u8; RANGE_BYTES as usize]) -> DiscardRange {
        DiscardRange { first: crate::wire::u64_at(bytes, 8), blocks: crate::wire::u32_at(bytes, 4) }
    }
}

#[cfg(test)]
mod tests {
    use blockyard_core::ZoneGeometry;

    use super::*;
    use crate::command::SQE_BYTES;

    fn geometry(sectors: u64, zones: Option<ZoneGeometry>) -> Geometry {
        Geometry { sectors, logical_block_bytes: 4096, physical_block_bytes: 4096, zones }
    }

    fn zones() -> ZoneGeometry {
        ZoneGeometry {
            zone_sectors: 2048,
            zone_capacity_sectors: 1024,
            zone_count: 4,
            conventional_count: 0,
            open_max: 2,
            active_max: 3,
        }
    }

    fn limits() -> Limits {
        Limits { zone_append_sectors_max: 255, ..Limits::unlimited(16) }
    }

    fn zoned() -> NamespaceShape {
        NamespaceShape::of(&geometry(8192, Some(zones())), &limits()).unwrap()
    }

    fn command(opcode: u8, slba: u64, dword12: u32, dword13: u32) -> Sqe {
        let mut bytes = [0; SQE_BYTES];
        bytes[0] = opcode;
        bytes[4] = 1;
        bytes[40..48].copy_from_slice(&slba.to_le_bytes());
        bytes[48..52].copy_from_slice(&dword12.to_le_bytes());
        bytes[52..56].copy_from_slice(&dword13.to_le_bytes());
        Sqe::parse(&bytes).unwrap()
    }

    #[test]
    fn a_zoned_device_has_its_limits_in_blocks() {
        let shape = zoned();
        assert_eq!((shape.block_shift, shape.blocks), (12, 1024));
        let zones = shape.zones.unwrap();
        assert_eq!((zones.zone_blocks, zones.capacity_blocks, zones.count), (256, 128, 4));
        // 255 sectors are 31 units of 4 KiB, and the field holds a power of two.
        assert_eq!(zones.append_exponent, 4);
    }

    #[test]
    fn what_zns_cannot_say_is_refused() {
        let refused = |zones: ZoneGeometry, sectors, limits: &Limits| {
            NamespaceShape::of(&geometry(sectors, Some(zones)), limits).unwrap_err()
        };
        let conventional = ZoneGeometry { conventional_count: 1, ..zones() };
        let error = refused(conventional, 8192, &limits());
        assert_eq!(error, NamespaceError::Conventional { count: 1 });
        assert_eq!(refused(zones(), 8184, &limits()), NamespaceError::ShortZone);
        let odd = ZoneGeometry { zone_capacity_sectors: 1023, ..zones() };
        assert_eq!(
            refused(odd, 8192, &limits()),
            NamespaceError::PartialBlock { block_bytes: 4096 }
        );
        for (sectors, bytes) in [(0, 0), (15, 7680)] {
            let short = Limits { zone_append_sectors_max: sectors, ..limits() };
            assert_eq!(refused(zones(), 8192, &short), NamespaceError::ShortAppend { bytes });
        }
    }

    #[test]
    fn a_write_over_the_capacity_of_a_zone_is_a_boundary_error() {
        let shape = zoned();
        let plan = |slba, blocks: u32| shape.plan(&command(io_opcode::WRITE, slba, blocks - 1, 0));
        assert!(plan(0, 128).is_ok());
        assert_eq!(plan(0, 129), Err(StatusCode::ZONE_BOUNDARY));
        assert_eq!(plan(127, 2), Err(StatusCode::ZONE_BOUNDARY));
        assert_eq!(plan(255, 2), Err(StatusCode::ZONE_BOUNDARY));
        assert_eq!(plan(1023, 2), Err(StatusCode::LBA_RANGE));
        assert_eq!(plan(u64::MAX, 1), Err(StatusCode::LBA_RANGE));
        assert!(shape.plan(&command(io_opcode::READ, 255, 1, 0)).is_ok());
    }

    #[test]
    fn an_append_names_a_zone_and_keeps_to_its_limit() {
        let shape = zoned();
        let plan =
            |slba, blocks: u32| shape.plan(&command(io_opcode::ZONE_APPEND, slba, blocks - 1, 0));
        let wanted =
            BioPlan { op: Op::ZoneAppend, sector: Sector(2048), sectors: 128, flags: Flags::NONE };
        assert_eq!(plan(256, 16), Ok(IoPlan::Bio(wanted)));
        assert_eq!(plan(256, 17), Err(StatusCode::INVALID_FIELD));
        assert_eq!(plan(257, 1), Err(StatusCode::INVALID_FIELD));
        assert_eq!(plan(1024, 1), Err(StatusCode::LBA_RANGE));
    }

    #[test]
    fn zone_commands_are_unknown_to_a_plain_namespace() {
        let plain = NamespaceShape::of(&geometry(8192, None), &limits()).unwrap();
        for opcode in [io_opcode::ZONE_APPEND, io_opcode::ZONE_SEND, io_opcode::ZONE_RECEIVE] {
            assert_eq!(plain.plan(&command(opcode, 0, 0, 0)), Err(StatusCode::INVALID_OPCODE));
        }
        let dsm = command(io_opcode::DATASET_MANAGEMENT, 4 << 32, 0, 0);
        assert_eq!(zoned().plan(&dsm), Err(StatusCode::INVALID_OPCODE));
    }

    /// The bug: Linux sends a list of 4096 bytes for any number of ranges, and every discard failed
    /// with Data SGL Length Invalid.
    #[test]
    fn a_list_of_ranges_may_be_longer_than_their_number() {
        let plain = NamespaceShape::of(&geometry(8192, None), &limits()).unwrap();
        let plan = |ranges: u64, attributes: u64, len: u32| {
            let slba = attributes << 32 | (ranges - 1);
            let mut bytes = *command(io_opcode::DATASET_MANAGEMENT, slba, 0, 0).bytes();
            bytes[1] = 0x40;
            bytes[32..36].copy_from_slice(&len.to_le_bytes());
            bytes[39] = 0x5a;
            plain.plan(&Sqe::parse(&bytes).unwrap())
        };
        for (ranges, len) in [(1, 16), (1, 4096), (3, 48), (3, 4096), (256, 4096)] {
            let wanted = IoPlan::Discards { count: ranges as u32, len };
            assert_eq!(plan(ranges, 4, len), Ok(wanted));
            assert_eq!(wanted.transfer(), Transfer::FromHost(len));
            assert_eq!(plan(ranges, 3, len), Ok(IoPlan::Hints { len }));
        }
        for (ranges, len) in [(1, 0), (1, 15), (3, 32), (1, 4097), (256, 4080), (256, u32::MAX)] {
            assert_eq!(plan(ranges, 4, len), Err(StatusCode::SGL_LENGTH_INVALID));
            assert_eq!(plan(ranges, 3, len), Err(StatusCode::SGL_LENGTH_INVALID));
        }
    }

    #[test]
    fn pieces_end_at_multiples_of_their_length() {
        let plan = |sector, sectors| BioPlan {
            op: Op::Discard,
            sector: Sector(sector),
            sectors,
            flags: Flags::NONE,
        };
        const MAX: u64 = PIECE_SECTORS;
        assert_eq!(plan(MAX, MAX).split(), (plan(MAX, MAX), None));
        assert_eq!(plan(8, MAX).split(), (plan(8, MAX - 8), Some(plan(MAX, 8))));
        assert_eq!(plan(0, 3 * MAX).split(), (plan(0, MAX), Some(plan(MAX, 2 * MAX))));
        assert_eq!(plan(MAX - 1, 1).split(), (plan(MAX - 1, 1), None));
        assert_eq!(plan(MAX, 0).split(), (plan(MAX, 0), None), "an operation on a zone");
    }

    #[test]
    fn reads_longer_than_mdts_are_refused() {
        let plain = NamespaceShape::of(&geometry(1 << 20, None), &limits()).unwrap();
        let read = |blocks: u32| plain.plan(&command(io_opcode::READ, 0, blocks - 1, 0));
        assert_eq!(read(256).unwrap().transfer(), Transfer::ToHost(1 << 20));
        assert_eq!(read(257), Err(StatusCode::INVALID_FIELD));
        let zeroes = plain.plan(&command(io_opcode::WRITE_ZEROES, 0, 0xffff, 0)).unwrap();
        assert_eq!(zeroes.transfer(), Transfer::None, "write-zeroes moves no data");
    }

    #[test]
    fn lengths_of_pointer_command_and_capsule_must_agree() {
        let with = |kind: u8, len: u32| {
            let mut bytes = [0; SQE_BYTES];
            bytes[1] = 0x40;
            bytes[32..36].copy_from_slice(&len.to_le_bytes());
            bytes[39] = kind;
            Sqe::parse(&bytes).unwrap()
        };
        let (from, to) = (Transfer::FromHost(512), Transfer::ToHost(512));
        assert_eq!(check_pointer(&with(0x01, 512), from, 512), Ok(()));
        assert_eq!(check_pointer(&with(0x5a, 512), from, 0), Ok(()));
        assert_eq!(check_pointer(&with(0x5a, 512), to, 0), Ok(()));
        let length = Err(StatusCode::SGL_LENGTH_INVALID);
        assert_eq!(check_pointer(&with(0x01, 512), from, 0), length);
        assert_eq!(check_pointer(&with(0x01, 512), from, 1024), length);
        assert_eq!(check_pointer(&with(0x5a, 512), from, 512), length);
        assert_eq!(check_pointer(&with(0x5a, 1024), to, 0), length);
        let wrong_type = Err(StatusCode::SGL_TYPE_INVALID);
        assert_eq!(check_pointer(&with(0x01, 512), to, 512), wrong_type);
        assert_eq!(check_pointer(&with(0x99, 512), Transfer::None, 512), Ok(()));
    }
}
