//! The shape of a device: its size, its blocks, its zones.

use crate::units::{Sector, ZoneNo};

/// The shape of a device. It does not change while the device is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Capacity in sectors.
    pub sectors: u64,
    /// Smallest unit of I/O, in bytes: a power of two of at least 512.
    pub logical_block_bytes: u32,
    /// Smallest unit that the device writes without read-modify-write, in bytes.
    pub physical_block_bytes: u32,
    /// The zones, for a zoned device.
    pub zones: Option<ZoneGeometry>,
}

/// The zones of a zoned device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneGeometry {
    /// Distance between the starts of two zones, in sectors: a power of two.
    pub zone_sectors: u64,
    /// Writable sectors of a sequential zone.
    pub zone_capacity_sectors: u64,
    /// Number of zones.
    pub zone_count: u32,
    /// Number of conventional zones, which come first.
    pub conventional_count: u32,
    /// Maximum number of open zones; 0 means no limit.
    pub open_max: u32,
    /// Maximum number of active zones (open or closed); 0 means no limit.
    pub active_max: u32,
}

impl Geometry {
    /// The capacity in bytes.
    pub fn len_bytes(&self) -> u64 {
        Sector(self.sectors).bytes()
    }

    /// Sectors in a logical block.
    pub fn block_sectors(&self) -> u64 {
        u64::from(self.logical_block_bytes) >> crate::units::SECTOR_SHIFT
    }
}

impl ZoneGeometry {
    /// The zone that contains a sector. The sector must lie on the device.
    #[inline]
    pub fn zone_of(&self, sector: Sector) -> ZoneNo {
        ZoneNo((sector.0 >> self.zone_sectors.trailing_zeros()) as u32)
    }

    /// The first sector of a zone.
    #[inline]
    pub fn start_of(&self, zone: ZoneNo) -> Sector {
        Sector(u64::from(zone.0) * self.zone_sectors)
    }

    /// Whether a zone is conventional.
    #[inline]
    pub fn is_conventional(&self, zone: ZoneNo) -> bool {
        zone.0 < self.conventional_count
    }
}
