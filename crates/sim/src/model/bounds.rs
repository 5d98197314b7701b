//! Which bios make sense, and where the block layer cuts those that are too long.

use blockyard_core::bio::{Bio, Op};
use blockyard_core::status::Status;

use super::Model;

impl Model {
    /// What a bio fails with before it gets to the device, if it does.
    ///
    /// | case | status |
    /// | --- | --- |
    /// | no such operation on this device | NOTSUPP |
    /// | length 0 where a range is due | INVAL |
    /// | start or length no multiple of the block | INVAL |
    /// | beyond the end of the device | IOERR |
    /// | zone operation not at the start of a zone | INVAL |
    /// | append not at the start of a zone, or longer than the limit | INVAL |
    pub(super) fn check(&self, bio: &Bio) -> Result<(), Status> {
        if !self.has_op(bio.op) {
            return Err(Status::NotSupp);
        }
        if self.limits.read_only && bio.op.is_write() {
            return Err(Status::IoErr);
        }
        if bio.op.has_range() {
            self.check_range(bio)?;
        }
        let names_a_zone =
            bio.op == Op::ZoneAppend || (bio.op.is_zone_mgmt() && bio.op != Op::ZoneResetAll);
        if names_a_zone {
            if bio.sector.0 >= self.geometry.sectors {
                return Err(Status::IoErr);
            }
            let zone_sectors = self.geometry.zones.as_ref().map_or(1, |zones| zones.zone_sectors);
            if !bio.sector.0.is_multiple_of(zone_sectors) {
                return Err(Status::Inval);
            }
        }
        if bio.op == Op::ZoneAppend && bio.sectors > self.limits.zone_append_sectors_max {
            return Err(Status::Inval);
        }
        Ok(())
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
