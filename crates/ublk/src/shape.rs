//! What the kernel learns of a device: its parameters, the number and depth of its queues.

use blockyard_core::{Disk, Geometry, Limits, ZoneGeometry};

use crate::abi::{Params, ZoneParams, feature};

/// The most queues of a device; each has a thread.
pub const QUEUES_MAX: u16 = 4;
/// The most requests of a queue.
pub const DEPTH_MAX: u16 = 128;
/// The longest logical block, in bytes: a page, as the driver demands.
pub const BLOCK_BYTES_MAX: u32 = 4096;
/// The length of a zone in a report, in bytes.
pub const ZONE_BYTES: usize = 64;
/// The longest request of a device whose zones do not need longer reports, in bytes.
pub const IO_BYTES: u32 = 512 << 10;
/// The most zones of a device: those of a report of 4 MiB, the longest that the kernel can map for
/// a request of its own (1,024 pages).
pub const ZONES_MAX: u32 = (4 << 20) / ZONE_BYTES as u32;
/// The memory for the data of a queue, in bytes: [`DEPTH_MAX`] requests of [`IO_BYTES`].
const QUEUE_BYTES: u32 = 64 << 20;

/// The longest discard and write-zeroes in sectors: what 32 bits hold, in whole blocks.
const RANGE_SECTORS_MAX: u64 = (u32::MAX as u64 + 1) - (1 << 16);

/// Why the kernel's ublk driver cannot have a device of this shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// A logical block is longer than a page.
    #[error(
        "invalid block size `{bytes}`: expected 512 to {BLOCK_BYTES_MAX} bytes, which are a page \
         of the kernel"
    )]
    BlockBytes {
        /// The length of a block, in bytes.
        bytes: u32,
    },
    /// The last zone is shorter than the others.
    #[error(
        "invalid capacity `{sectors}` sectors: expected a multiple of the zone size, \
         {zone_sectors} sectors, because the kernel's ublk driver does not count a shorter last \
         zone"
    )]
    ShortZone {
        /// The capacity, in sectors.
        sectors: u64,
        /// The length of a zone, in sectors.
        zone_sectors: u64,
    },
    /// There are more zones than one report of the driver can number.
    #[error(
        "invalid number of zones `{count}`: expected at most {ZONES_MAX}, which fit into one \
         report, because the kernel's ublk driver numbers the zones of each report from 0; larger \
         zones are fewer"
    )]
    ZoneCount {
        /// The number of zones.
        count: u32,
    },
    /// A zone is too long.
    #[error("invalid zone size `{sectors}` sectors: expected 2147483648 at most")]
    ZoneSectors {
        /// The length of a zone, in sectors.
        sectors: u64,
    },
    /// A zone does not consist of whole blocks.
    #[error(
        "invalid zone: its length and capacity are no multiples of the block size, {block_bytes} \
         bytes"
    )]
    PartialBlock {
        /// The length of a block, in bytes.
        block_bytes: u32,
    },
    /// A zoned device takes no append of a whole block.
    #[error(
        "invalid longest append `{bytes}` bytes: expected one block at least, as the kernel's ublk \
         driver demands for zones"
    )]
    ShortAppend {
        /// The longest append, in bytes.
        bytes: u64,
    },
}

/// A device as the kernel sees it. Lengths are in sectors of 512 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceShape {
    /// The parameters.
    pub params: Params,
    /// The length of a logical block.
    pub block_sectors: u64,
    /// The longest request, in bytes.
    pub io_bytes_max: u32,
    /// The zones, for a zoned device.
    pub zones: Option<ZoneGeometry>,
}

impl DeviceShape {
    /// The shape of a disk.
    ///
    /// # Errors
    /// If the driver cannot have it.
    pub fn of(disk: &dyn Disk) -> Result<DeviceShape, ShapeError> {
        DeviceShape::new(disk.geometry(), disk.limits())
    }

    /// The shape of a device with this geometry and these limits.
    ///
    /// # Errors
    /// If the driver cannot have it.
    pub fn new(geometry: &Geometry, limits: &Limits) -> Result<DeviceShape, ShapeError> {
        // Writes to a zone may have to consist of physical blocks, for which the driver has no
        // parameter.
        let block_bytes = match geometry.zones {
            Some(_) => geometry.physical_block_bytes.max(geometry.logical_block_bytes),
            None => geometry.logical_block_bytes,
        };
        if !(512..=BLOCK_BYTES_MAX).contains(&block_bytes) {
            return Err(ShapeError::BlockBytes { bytes: block_bytes });
        }
        let block_sectors = u64::from(block_bytes) / 512;
        let whole = |sectors: u64| {
            // At most RANGE_SECTORS_MAX.
            (sectors.min(RANGE_SECTORS_MAX) / block_sectors * block_sectors) as u32
        };
        let (io_bytes_max, zones) = match &geometry.zones {
            Some(zones) => {
                let io_bytes_max = check_zones(geometry.sectors, zones, block_bytes)?;
                (io_bytes_max, Some(zone_params(zones, limits, io_bytes_max, block_bytes)?))
            }
            None => (IO_BYTES, None),
        };
        let chunk_sectors = match &geometry.zones {
            Some(zones) => zones.zone_sectors,
            None => limits.chunk_sectors,
        };
        let params = Params {
            read_only: limits.read_only,
            write_cache: limits.write_cache,
            fua: limits.write_cache && limits.fua,
            logical_shift: block_bytes.trailing_zeros() as u8,
            physical_shift: geometry.physical_block_bytes.max(block_bytes).ilog2() as u8,
            sectors_max: io_bytes_max / 512,
            // A boundary beyond 32 bits splits hardly any request; the channel does it.
            chunk_sectors: u32::try_from(chunk_sectors).unwrap_or(0),
            sectors: geometry.sectors / block_sectors * block_sectors,
            discard_sectors_max: whole(limits.discard_sectors_max),
            write_zeroes_sectors_max: whole(limits.write_zeroes_sectors_max),
            zones,
        };
        Ok(DeviceShape { params, block_sectors, io_bytes_max, zones: geometry.zones.clone() })
    }

    /// Whether the kernel can go on with this shape instead of the one before: the capacity alone
    /// may differ, and be larger. Of a device with zones it may not, because the driver counts the
    /// zones once.
    pub(crate) fn succeeds(&self, before: &DeviceShape) -> bool {
        let params = Params { sectors: before.params.sectors, ..self.params };
        let same = DeviceShape { params, ..self.clone() };
        same == *before
            && self.params.sectors >= before.params.sectors
            && (self.zones.is_none() || self == before)
    }

    /// The number of queues on a machine with this many processors.
    pub fn queues(&self, processors: usize) -> u16 {
        processors.clamp(1, usize::from(QUEUES_MAX)) as u16 // At most QUEUES_MAX.
    }

    /// The number of requests of a queue, whose data fit into its memory.
    pub fn depth(&self) -> u16 {
        (QUEUE_BYTES / self.io_bytes_max).min(DEPTH_MAX.into()) as u16 // At most DEPTH_MAX.
    }

    /// The features of the block device. `keeps_data` says whether the device still has its data
    /// after a kill of the server, so that another one can go on.
    pub fn features(&self, keeps_data: bool) -> u64 {
        let recovery = match (keeps_data, &self.zones) {
            (false, _) => 0,
            (true, None) => feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE,
            // An append that is executed twice leaves its data twice, and a write that has moved
            // the write pointer fails when it comes again.
            (true, Some(_)) => feature::USER_RECOVERY,
        };
        let zoned = if self.zones.is_some() { feature::ZONED } else { 0 };
        feature::USER_COPY | feature::CMD_IOCTL_ENCODE | recovery | zoned
    }

    /// Whether a sector lies in a sequential zone.
    pub(crate) fn is_sequential(&self, sector: u64) -> bool {
        let Some(zones) = &self.zones else { return false };
        sector >= u64::from(zones.conventional_count) * zones.zone_sectors
    }
}

/// Checks the zones of a device, and returns the longest request in bytes: a report of all zones
/// has to fit into one.
fn check_zones(sectors: u64, zones: &ZoneGeometry, block_bytes: u32) -> Result<u32, ShapeError> {
    let ZoneGeometry { zone_sectors, zone_capacity_sectors, zone_count, .. } = *zones;
    if zone_sectors > 1 << 31 {
        return Err(ShapeError::ZoneSectors { sectors: zone_sectors });
    }
    if sectors != u64::from(zone_count) * zone_sectors {
        return Err(ShapeError::ShortZone { sectors, zone_sectors });
    }
    let block_sectors = u64::from(block_bytes) / 512;
    if [zone_sectors, zone_capacity_sectors].iter().any(|it| !it.is_multiple_of(block_sectors)) {
        return Err(ShapeError::PartialBlock { block_bytes });
    }
    if zone_count > ZONES_MAX {
        return Err(ShapeError::ZoneCount { count: zone_count });
    }
    let report_bytes = zone_count * ZONE_BYTES as u32; // At most 4 MiB.
    Ok(report_bytes.next_multiple_of(BLOCK_BYTES_MAX).max(IO_BYTES))
}

fn zone_params(
    zones: &ZoneGeometry,
    limits: &Limits,
    io_bytes_max: u32,
    block_bytes: u32,
) -> Result<ZoneParams, ShapeError> {
    let bytes_max = limits.zone_append_sectors_max.saturating_mul(512);
    let append_blocks = bytes_max.min(io_bytes_max.into()) / u64::from(block_bytes);
    if append_blocks == 0 {
        return Err(ShapeError::ShortAppend { bytes: bytes_max });
    }
    Ok(ZoneParams {
        // A limit above the number of zones limits nothing, and the driver refuses it.
        open_max: zones.open_max.min(zones.zone_count),
        active_max: zones.active_max.min(zones.zone_count),
        append_sectors_max: append_blocks as u32 * (block_bytes / 512), // Below io_bytes_max.
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(block: u32, physical: u32) -> Geometry {
        let (logical_block_bytes, physical_block_bytes) = (block, physical);
        Geometry { sectors: 1 << 21, logical_block_bytes, physical_block_bytes, zones: None }
    }

    fn zoned(zone_count: u32) -> Geometry {
        let zones = ZoneGeometry {
            zone_sectors: 8192,
            zone_capacity_sectors: 8000,
            zone_count,
            conventional_count: 2,
            open_max: 4,
            active_max: u32::MAX,
        };
        let sectors = 8192 * u64::from(zone_count);
        Geometry { sectors, zones: Some(zones), ..plain(512, 4096) }
    }

    fn limits() -> Limits {
        Limits { zone_append_sectors_max: 2047, ..Limits::unlimited(16) }
    }

    #[test]
    fn a_plain_device_has_its_blocks_and_limits() {
        let cached = Limits { write_cache: true, fua: true, read_only: true, ..limits() };
        let shape = DeviceShape::new(&plain(512, 8192), &cached).unwrap();
        let params = shape.params;
        assert_eq!((params.logical_shift, params.physical_shift), (9, 13));
        assert!(params.write_cache && params.fua && params.read_only);
        assert_eq!((params.sectors, params.sectors_max), (1 << 21, 1024));
        assert_eq!(params.discard_sectors_max, u32::MAX - 0xffff);
        assert_eq!((shape.queues(1), shape.queues(64), shape.depth()), (1, 4, 128));
        let none = Limits { discard_sectors_max: 0, ..limits() };
        let params = DeviceShape::new(&plain(4096, 512), &none).unwrap().params;
        assert_eq!((params.logical_shift, params.physical_shift), (12, 12));
        assert!(!params.write_cache && !params.fua && params.discard_sectors_max == 0);
    }

    #[test]
    fn a_plain_device_gets_its_requests_again_and_a_zoned_one_does_not() {
        let plain = DeviceShape::new(&plain(512, 512), &limits()).unwrap();
        let zoned = DeviceShape::new(&zoned(16), &limits()).unwrap();
        assert_ne!(plain.features(true) & feature::USER_RECOVERY_REISSUE, 0);
        assert_eq!(zoned.features(true) & feature::USER_RECOVERY_REISSUE, 0);
        assert_ne!(zoned.features(true) & feature::USER_RECOVERY, 0);
        assert_ne!(zoned.features(true) & feature::ZONED, 0);
        // One whose data are lost with the process is no device to go on with.
        assert_eq!(plain.features(false) & feature::USER_RECOVERY, 0);
    }

    #[test]
    fn a_larger_capacity_alone_succeeds_the_shape_before() {
        let shape = |geometry: &Geometry, limits: &Limits| DeviceShape::new(geometry, limits);
        let before = shape(&plain(512, 512), &limits()).unwrap();
        let with = |sectors| Geometry { sectors, ..plain(512, 512) };
        for (sectors, succeeds) in [(1 << 21, true), (1 << 22, true), (1 << 20, false)] {
            let after = shape(&with(sectors), &limits()).unwrap();
            assert_eq!(after.succeeds(&before), succeeds, "{sectors}");
        }
        let blocks = shape(&Geometry { sectors: 1 << 22, ..plain(4096, 4096) }, &limits()).unwrap();
        assert!(!blocks.succeeds(&before));
        let read_only = Limits { read_only: true, ..limits() };
        assert!(!shape(&with(1 << 22), &read_only).unwrap().succeeds(&before));
        let zones = |count| shape(&zoned(count), &limits()).unwrap();
        assert!(zones(16).succeeds(&zones(16)) && !zones(17).succeeds(&zones(16)));
    }

    #[test]
    fn a_zoned_device_has_physical_blocks_and_bounded_limits() {
        let shape = DeviceShape::new(&zoned(16), &limits()).unwrap();
        let zones = shape.params.zones.unwrap();
        assert_eq!((shape.params.logical_shift, shape.block_sectors), (12, 8));
        assert_eq!((zones.open_max, zones.active_max), (4, 16));
        // 2,047 sectors are beyond the longest request.
        assert_eq!((zones.append_sectors_max, shape.params.chunk_sectors), (1024, 8192));
        let short = Limits { zone_append_sectors_max: 15, ..limits() };
        let zones = DeviceShape::new(&zoned(16), &short).unwrap().params.zones.unwrap();
        assert_eq!(zones.append_sectors_max, 8);
    }

    #[test]
    fn a_report_of_all_zones_fits_into_one_request() {
        for (zones, bytes, depth) in
            [(16, 512 << 10, 128), (8193, (512 << 10) + 4096, 127), (65_536, 4 << 20, 16)]
        {
            let shape = DeviceShape::new(&zoned(zones), &limits()).unwrap();
            assert_eq!((shape.io_bytes_max, shape.depth()), (bytes, depth), "{zones}");
            assert_eq!(shape.params.sectors_max * 512, bytes);
        }
    }

    #[test]
    fn refusals_name_the_value_and_the_reason() {
        let refusal = |geometry: &Geometry, limits: &Limits| {
            DeviceShape::new(geometry, limits).unwrap_err().to_string()
        };
        let text = refusal(&plain(8192, 8192), &limits());
        assert!(text.starts_with("invalid block size `8192`: expected 512 to 4096"), "{text}");
        let short = Geometry { sectors: 8192 * 16 - 8, ..zoned(16) };
        let text = refusal(&short, &limits());
        assert!(
            text.starts_with("invalid capacity `131064` sectors: expected a multiple"),
            "{text}"
        );
        let text = refusal(&zoned(65_537), &limits());
        assert!(
            text.starts_with("invalid number of zones `65537`: expected at most 65536"),
            "{text}"
        );
        let none = Limits { zone_append_sectors_max: 7, ..limits() };
        let text = refusal(&zoned(16), &none);
        assert!(
            text.starts_with("invalid longest append `3584` bytes: expected one block"),
            "{text}"
        );
        let mut odd = zoned(16);
        odd.zones.as_mut().unwrap().zone_capacity_sectors = 7999;
        let text = refusal(&odd, &limits());
        assert!(text.contains("no multiples of the block size, 4096 bytes"), "{text}");
        let mut long = zoned(1);
        (long.zones.as_mut().unwrap().zone_sectors, long.sectors) = (1 << 32, 1 << 32);
        let text = refusal(&long, &limits());
        assert!(text.starts_with("invalid zone size `4294967296` sectors"), "{text}");
    }
}
