//! Requests of the kernel: descriptors become bios, zones become entries of a report.

use blockyard_core::zone::{ZoneCond, ZoneInfo, ZoneType};
use blockyard_core::{Bio, Flags, Op, Sector, Status};

use crate::abi::{Descriptor, io_flag, op};
use crate::shape::{DeviceShape, ZONE_BYTES};

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// One operation of the device. A bio with data has no buffer yet.
    Io(Bio),
    /// A report of zones, from the one that begins at a sector.
    Report {
        /// The first sector of the first zone.
        from: Sector,
        /// The number of zones that the answer has room for.
        zones: u32,
    },
}

impl DeviceShape {
    /// Plans a request. The data of a planned bio are not longer than
    /// [`DeviceShape::io_bytes_max`], and neither is the answer to a report.
    ///
    /// # Errors
    /// The status of an invalid request.
    pub fn plan(&self, it: Descriptor) -> Result<Plan, Status> {
        let fua = if it.flags & io_flag::FUA != 0 { Flags::FUA } else { Flags::NONE };
        let keep = if it.flags & io_flag::NOUNMAP != 0 { Flags::NOUNMAP } else { Flags::NONE };
        match it.op {
            op::READ => self.plan_data(Op::Read, it),
            op::WRITE => Ok(self.plan_data(Op::Write, it)?.with_flags(fua)),
            op::FLUSH => Ok(Bio::flush()),
            op::DISCARD => self.plan_range(Op::Discard, it),
            op::WRITE_ZEROES => Ok(self.plan_range(Op::WriteZeroes, it)?.with_flags(fua | keep)),
            op::ZONE_APPEND => {
                Ok(self.plan_data(Op::ZoneAppend, self.in_zone(it)?)?.with_flags(fua))
            }
            op::ZONE_OPEN => self.plan_zone(Op::ZoneOpen, it),
            op::ZONE_CLOSE => self.plan_zone(Op::ZoneClose, it),
            op::ZONE_FINISH => self.plan_zone(Op::ZoneFinish, it),
            op::ZONE_RESET => self.plan_zone(Op::ZoneReset, it),
            op::ZONE_RESET_ALL => match self.zones {
                Some(_) => self.writable(Bio::new(Op::ZoneResetAll, Sector(0), 0)),
                None => Err(Status::NotSupp),
            },
            op::REPORT_ZONES => return self.plan_report(it),
            _ => Err(Status::NotSupp),
        }
        .map(Plan::Io)
    }

    fn writable(&self, bio: Bio) -> Result<Bio, Status> {
        if self.params.read_only && bio.op.is_write() { Err(Status::IoErr) } else { Ok(bio) }
    }

    /// Plans an operation on a range of whole blocks.
    fn plan_range(&self, op: Op, it: Descriptor) -> Result<Bio, Status> {
        let sectors = u64::from(it.count);
        let end = it.sector.checked_add(sectors).ok_or(Status::IoErr)?;
        if sectors == 0 || end > self.params.sectors {
            return Err(Status::IoErr);
        }
        if !(it.sector | sectors).is_multiple_of(self.block_sectors) {
            return Err(Status::Inval);
        }
        self.writable(Bio::new(op, Sector(it.sector), sectors))
    }

    fn plan_data(&self, op: Op, it: Descriptor) -> Result<Bio, Status> {
        if u64::from(it.count) * 512 > u64::from(self.io_bytes_max) {
            return Err(Status::Inval);
        }
        self.plan_range(op, it)
    }

    /// The descriptor, if it names the start of a sequential zone.
    fn in_zone(&self, it: Descriptor) -> Result<Descriptor, Status> {
        let zones = self.zones.as_ref().ok_or(Status::NotSupp)?;
        let is_start = it.sector.is_multiple_of(zones.zone_sectors);
        let is_inside = it.sector < self.params.sectors;
        if is_start && is_inside && self.is_sequential(it.sector) {
            Ok(it)
        } else {
            Err(Status::IoErr)
        }
    }

    fn plan_zone(&self, op: Op, it: Descriptor) -> Result<Bio, Status> {
        self.writable(Bio::new(op, Sector(self.in_zone(it)?.sector), 0))
    }

    fn plan_report(&self, it: Descriptor) -> Result<Plan, Status> {
        let zones = self.zones.as_ref().ok_or(Status::NotSupp)?;
        let is_start = it.sector.is_multiple_of(zones.zone_sectors);
        let zones_max = self.io_bytes_max / ZONE_BYTES as u32;
        if !is_start || it.sector >= self.params.sectors || !(1..=zones_max).contains(&it.count) {
            return Err(Status::Inval);
        }
        Ok(Plan::Report { from: Sector(it.sector), zones: it.count })
    }
}

/// An entry of a report: `struct blk_zone` of Linux's `blkzoned.h`.
pub fn zone_entry(zone: &ZoneInfo) -> [u8; ZONE_BYTES] {
    let mut bytes = [0; ZONE_BYTES];
    bytes[..8].copy_from_slice(&zone.start.0.to_ne_bytes());
    bytes[8..16].copy_from_slice(&zone.sectors.to_ne_bytes());
    bytes[16..24].copy_from_slice(&zone.wp.0.to_ne_bytes());
    bytes[24] = match zone.kind {
        ZoneType::Conventional => 1,
        ZoneType::SequentialWriteRequired => 2,
    };
    bytes[25] = zone.cond as u8;
    bytes[32..40].copy_from_slice(&zone.capacity_sectors.to_ne_bytes());
    bytes
}

// Linux numbers the conditions as ZBC does.
const _: () = assert!(ZoneCond::Offline as u8 == 0xf && ZoneCond::NotWp as u8 == 0);

#[cfg(test)]
mod tests {
    use blockyard_core::{Geometry, Limits, ZoneGeometry};

    use super::*;

    fn shape(zoned: bool, read_only: bool) -> DeviceShape {
        let zones = zoned.then_some(ZoneGeometry {
            zone_sectors: 4096,
            zone_capacity_sectors: 4000,
            zone_count: 16,
            conventional_count: 2,
            open_max: 0,
            active_max: 0,
        });
        let sectors = 16 * 4096;
        let geometry =
            Geometry { sectors, logical_block_bytes: 4096, physical_block_bytes: 4096, zones };
        let limits = Limits { read_only, zone_append_sectors_max: 64, ..Limits::unlimited(16) };
        DeviceShape::new(&geometry, &limits).unwrap()
    }

    fn descriptor(op: u8, sector: u64, count: u32) -> Descriptor {
        Descriptor { op, flags: 0, count, sector }
    }

    fn bio(plan: Result<Plan, Status>) -> Bio {
        match plan {
            Ok(Plan::Io(bio)) => bio,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn reads_and_writes_are_whole_blocks_on_the_device() {
        let shape = shape(false, false);
        let read = bio(shape.plan(descriptor(op::READ, 8, 16)));
        assert_eq!((read.op, read.sector, read.sectors), (Op::Read, Sector(8), 16));
        let it = Descriptor { flags: io_flag::FUA | 1 << 8, ..descriptor(op::WRITE, 0, 8) };
        let write = bio(shape.plan(it));
        assert_eq!((write.op, write.flags), (Op::Write, Flags::FUA));
        for (sector, count, status) in [
            (0, 0, Status::IoErr),
            (16 * 4096, 8, Status::IoErr),
            (u64::MAX - 7, 16, Status::IoErr),
            (4, 8, Status::Inval),
            (0, 4, Status::Inval),
            // Longer than the memory of a request.
            (0, 1032, Status::Inval),
            (0, u32::MAX, Status::Inval),
        ] {
            assert_eq!(shape.plan(descriptor(op::READ, sector, count)), Err(status), "{sector}");
        }
    }

    #[test]
    fn a_device_refuses_what_it_does_not_have() {
        let plain = shape(false, false);
        for op in [op::ZONE_APPEND, op::ZONE_RESET, op::ZONE_RESET_ALL, op::REPORT_ZONES, 4, 255] {
            assert_eq!(plain.plan(descriptor(op, 0, 8)), Err(Status::NotSupp), "{op}");
        }
        let read_only = shape(true, true);
        for op in [op::WRITE, op::DISCARD, op::WRITE_ZEROES, op::ZONE_APPEND, op::ZONE_OPEN] {
            assert_eq!(read_only.plan(descriptor(op, 8192, 8)), Err(Status::IoErr), "{op}");
        }
        assert!(read_only.plan(descriptor(op::READ, 8192, 8)).is_ok());
        assert!(read_only.plan(descriptor(op::FLUSH, 0, 0)).is_ok());
    }

    #[test]
    fn zone_operations_name_the_start_of_a_sequential_zone() {
        let shape = shape(true, false);
        let append = bio(shape.plan(descriptor(op::ZONE_APPEND, 8192, 8)));
        assert_eq!((append.op, append.sectors), (Op::ZoneAppend, 8));
        for op in [op::ZONE_OPEN, op::ZONE_CLOSE, op::ZONE_FINISH, op::ZONE_RESET] {
            // The kernel gives the length of the zone.
            let managed = bio(shape.plan(descriptor(op, 8192, 4096)));
            assert!(managed.op.is_zone_mgmt() && managed.sectors == 0, "{op}");
            for sector in [0, 4096, 8200, 16 * 4096] {
                assert_eq!(shape.plan(descriptor(op, sector, 4096)), Err(Status::IoErr));
            }
        }
        assert_eq!(bio(shape.plan(descriptor(op::ZONE_RESET_ALL, 0, 0))).op, Op::ZoneResetAll);
    }

    #[test]
    fn a_report_begins_at_a_zone_and_fits_into_its_request() {
        let shape = shape(true, false);
        let wanted = Plan::Report { from: Sector(4096), zones: 8192 };
        assert_eq!(shape.plan(descriptor(op::REPORT_ZONES, 4096, 8192)), Ok(wanted));
        for (sector, zones) in [(8, 1), (16 * 4096, 1), (0, 0), (0, 8193)] {
            let plan = shape.plan(descriptor(op::REPORT_ZONES, sector, zones));
            assert_eq!(plan, Err(Status::Inval), "{sector} {zones}");
        }
    }

    #[test]
    fn an_entry_of_a_report_has_the_bytes_of_the_kernel() {
        let zone = ZoneInfo {
            start: Sector(8192),
            sectors: 4096,
            capacity_sectors: 4000,
            wp: Sector(8200),
            kind: ZoneType::SequentialWriteRequired,
            cond: ZoneCond::ImplicitOpen,
        };
        let bytes = zone_entry(&zone);
        assert_eq!(bytes[..8], 8192_u64.to_ne_bytes());
        assert_eq!(bytes[8..16], 4096_u64.to_ne_bytes());
        assert_eq!(bytes[16..24], 8200_u64.to_ne_bytes());
        assert_eq!((bytes[24], bytes[25]), (2, 2));
        assert_eq!(bytes[32..40], 4000_u64.to_ne_bytes());
    }
}
