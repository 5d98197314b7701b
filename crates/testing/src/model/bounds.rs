//! Which bios are valid, and where the block layer splits those that are too long.

use blockyard_core::Status;
use blockyard_core::bio::{Bio, Op};

use super::Model;

impl Model {
    /// The status of a bio that fails before it reaches the device; the first row that applies.
    ///
    /// | case | status |
    /// | --- | --- |
    /// | a change to a read-only device | IOERR |
    /// | length 0 where a range is required, or no whole blocks | INVAL |
    /// | beyond the end of the device | IOERR |
    /// | no such operation on this device | NOTSUPP |
    /// | append not at the start of a zone, or longer than the limit | IOERR |
    /// | zone operation not at the start of a zone, or beyond the end | INVAL |
    pub(super) fn check(&self, bio: &Bio) -> Result<(), Status> {
        if self.limits.read_only && bio.op.is_write() {
            return Err(Status::IoErr);
        }
        if bio.op.has_range() {
            self.check_range(bio)?;
        }
        if !self.has_op(bio.op) {
            return Err(Status::NotSupp);
        }
        let Some(zones) = &self.geometry.zones else { return Ok(()) };
        let at_a_zone =
            bio.sector.0 < self.geometry.sectors && bio.sector.0.is_multiple_of(zones.zone_sectors);
        match bio.op {
            Op::ZoneAppend if !at_a_zone => Err(Status::IoErr),
            Op::ZoneAppend if bio.sectors > self.limits.zone_append_sectors_max => {
                Err(Status::IoErr)
            }
            Op::ZoneReset | Op::ZoneOpen | Op::ZoneClose | Op::ZoneFinish if !at_a_zone => {
                Err(Status::Inval)
            }
            _ => Ok(()),
        }
    }

    fn has_op(&self, op: Op) -> bool {
        match op {
            Op::Read | Op::Write | Op::Flush => true,
            Op::Discard => self.limits.discard_sectors_max > 0,
            Op::WriteZeroes => self.limits.write_zeroes_sectors_max > 0,
            Op::ZoneAppend => self.zones.is_some() && self.limits.zone_append_sectors_max > 0,
            Op::ZoneReset | Op::ZoneResetAll | Op::ZoneOpen | Op::ZoneClose | Op::ZoneFinish => {
                self.zones.is_some()
            }
        }
    }

    fn check_range(&self, bio: &Bio) -> Result<(), Status> {
        let block = self.geometry.block_sectors();
        let aligned = bio.sector.0.is_multiple_of(block) && bio.sectors.is_multiple_of(block);
        if bio.sectors == 0 || !aligned {
            return Err(Status::Inval);
        }
        match bio.sector.0.checked_add(bio.sectors) {
            Some(end) if end <= self.geometry.sectors => Ok(()),
            _ => Err(Status::IoErr),
        }
    }

    /// Whether the block layer executes the bio in one piece.
    pub fn is_one_piece(&self, bio: &Bio) -> bool {
        matches!(bio.op, Op::ZoneAppend)
            || !bio.op.has_range()
            || self.piece_sectors(bio.op, bio.sector.0, bio.sectors) == bio.sectors
    }

    /// How many of the next `left` sectors go into one piece.
    pub(super) fn piece_sectors(&self, op: Op, at: u64, left: u64) -> u64 {
        let block = self.geometry.block_sectors();
        let max = match op {
            Op::Discard => self.limits.discard_sectors_max,
            Op::WriteZeroes => self.limits.write_zeroes_sectors_max,
            _ => self.limits.sectors_max,
        };
        let mut sectors = left.min((max / block * block).max(block));
        if self.limits.chunk_sectors > 0 {
            sectors = sectors.min(self.limits.chunk_sectors - at % self.limits.chunk_sectors);
        }
        sectors
    }
}
