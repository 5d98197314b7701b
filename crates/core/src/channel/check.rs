//! Validation of a bio against the geometry and limits of the device, without side effects.

use crate::bio::{Bio, Flags, Op};
use crate::geometry::Geometry;
use crate::limits::Limits;
use crate::status::Status;
use crate::units::Sector;

/// `Rules::is_plain_range` recognizes a plain bio's operation by one comparison.
const _: () = assert!(Op::Read as u8 == 0 && Op::Write as u8 == 1, "reads and writes come first");

/// The geometry and limits in the form that the checks use.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    sectors: u64,
    block_mask: u64,
    /// Zone size of a zoned device.
    zone_sectors: Option<u64>,
    /// Longest read or write in sectors: whole blocks, and no longer than the device.
    piece_sectors_max: u64,
    /// The last operation, in declaration order, of a plain bio: a write, or a read if the device
    /// is read-only.
    plain_op_last: Op,
    /// The bits of a sector that identify its chunk: all bits from the chunk size up; 0 without
    /// chunks.
    chunk_mask: u64,
    limits: Limits,
}

impl Rules {
    pub(super) fn new(geometry: &Geometry, limits: &Limits) -> Rules {
        let block_mask = geometry.block_sectors() - 1;
        Rules {
            sectors: geometry.sectors,
            block_mask,
            piece_sectors_max: limits.sectors_max.min(geometry.sectors) & !block_mask,
            plain_op_last: if limits.read_only { Op::Read } else { Op::Write },
            chunk_mask: limits.chunk_mask(),
            zone_sectors: geometry.zones.as_ref().map(|zones| zones.zone_sectors),
            limits: limits.clone(),
        }
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Whether the bio is a plain read or write: valid, within the limits, and without FUA or
    /// PREFLUSH. Most bios are plain and need no other check.
    #[inline]
    pub(super) fn is_plain(&self, bio: &Bio) -> bool {
        self.is_plain_range(bio.op, bio.sector, bio.sectors)
            && !bio.flags.intersects(Flags::FUA | Flags::PREFLUSH)
    }

    /// Whether a read or write of this range, without flags, is plain.
    #[inline]
    pub(super) fn is_plain_range(&self, op: Op, Sector(sector): Sector, sectors: u64) -> bool {
        op as u8 <= self.plain_op_last as u8
            && (sector | sectors) & self.block_mask == 0
            && sectors.wrapping_sub(1) < self.piece_sectors_max
            // No piece is longer than the device.
            && sector <= self.sectors - sectors
            && (sector ^ (sector + sectors - 1)) & self.chunk_mask == 0
    }

    /// Checks whether the device supports the bio.
    ///
    /// | fault | status |
    /// | --- | --- |
    /// | no sectors, or not whole blocks | `INVAL` |
    /// | ends beyond the device | `IOERR` |
    /// | the device is read-only | `IOERR` |
    /// | the device has no such operation | `NOTSUPP` |
    /// | append: not at a zone's start, or longer than the append limit | `IOERR` |
    /// | zone operation: not at a zone's start, or beyond the device | `INVAL` |
    #[inline]
    pub(super) fn check(&self, bio: &Bio) -> Result<(), Status> {
        if bio.op.is_write() && self.limits.read_only {
            return Err(Status::IoErr);
        }
        if bio.op.has_range() {
            if bio.sectors == 0 || (bio.sector.0 | bio.sectors) & self.block_mask != 0 {
                return Err(Status::Inval);
            }
            let end = bio.sector.0.checked_add(bio.sectors).ok_or(Status::IoErr)?;
            if end > self.sectors {
                return Err(Status::IoErr);
            }
        }
        match bio.op {
            Op::Read | Op::Write | Op::Flush => Ok(()),
            _ => self.check_rare(bio),
        }
    }

    fn check_rare(&self, bio: &Bio) -> Result<(), Status> {
        let supported = |sectors_max: u64| match sectors_max {
            0 => Err(Status::NotSupp),
            _ => Ok(()),
        };
        match bio.op {
            Op::Discard => supported(self.limits.discard_sectors_max),
            Op::WriteZeroes => supported(self.limits.write_zeroes_sectors_max),
            Op::ZoneAppend => {
                let zone_sectors = self.zone_sectors.ok_or(Status::NotSupp)?;
                supported(self.limits.zone_append_sectors_max)?;
                let fits = bio.sectors <= self.limits.zone_append_sectors_max
                    && bio.sector.0.is_multiple_of(zone_sectors);
                if fits { Ok(()) } else { Err(Status::IoErr) }
            }
            Op::ZoneResetAll => self.zone_sectors.map(drop).ok_or(Status::NotSupp),
            Op::ZoneReset | Op::ZoneOpen | Op::ZoneClose | Op::ZoneFinish => {
                let zone_sectors = self.zone_sectors.ok_or(Status::NotSupp)?;
                let fits = bio.sector.0 < self.sectors && bio.sector.0.is_multiple_of(zone_sectors);
                if fits { Ok(()) } else { Err(Status::Inval) }
            }
            Op::Read | Op::Write | Op::Flush => Ok(()),
        }
    }

    /// The number of sectors, from the start of the bio, that one request may hold. It is the whole
    /// bio unless the bio exceeds a limit or crosses a chunk boundary. An append is never split.
    #[inline]
    pub(super) fn piece_sectors(&self, bio: &Bio) -> u64 {
        let sectors_max = match bio.op {
            Op::Read | Op::Write => self.limits.sectors_max,
            Op::Discard => self.limits.discard_sectors_max,
            Op::WriteZeroes => self.limits.write_zeroes_sectors_max,
            _ => return bio.sectors,
        };
        let piece = bio.sectors.min(sectors_max & !self.block_mask);
        match self.limits.chunk_sectors {
            0 => piece,
            chunk => piece.min(chunk - (bio.sector.0 & (chunk - 1))),
        }
    }
}

/// The bio without the fields that its operation ignores, so that no later layer uses them.
pub(super) fn normal(bio: &Bio) -> Bio {
    let mut bio = *bio;
    if !bio.op.has_range() {
        bio.sectors = 0;
    }
    if matches!(bio.op, Op::Flush | Op::ZoneResetAll) {
        bio.sector = Sector(0);
    }
    bio
}
