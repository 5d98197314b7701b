//! What a device is: its size, its blocks, its zones.

use crate::units::{Sector, ZoneNo};

/// The shape of a device. Fixed while it is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Capacity in sectors.
    pub sectors: u64,
    /// Smallest unit of I/O, in bytes: a power of two of at least 512.
    pub logical_block_bytes: u32,
    /// Smallest unit that is written without read-modify-write, in bytes.
    pub physical_block_bytes: u32,
    /// The zones, for a zoned device.
    pub zones: Option<ZoneGeometry>,
}

/// How a zoned device is divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneGeometry {
    /// Distance between the starts of two zones, in sectors: a power of two.
    pub zone_sectors: u64,
    /// How much of a sequential zone can be written, in sectors.
    pub zone_capacity_sectors: u64,
    /// How many zones there are.
    pub zone_count: u32,
    /// How many of them, from zone 0 on, are conventional.
    pub conventional_count: u32,
    /// At most so many zones may be open at once; 0 means no limit.
    pub open_max: u32,
    /// At most so many zones may be active (open or closed) at once; 0 means no limit.
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
    /// The zone that a sector is in. The sector must lie on the device.
    #[inline]
    pub fn zone_of(&self, sector: Sector) -> ZoneNo {
        ZoneNo((sector.0 >> self.zone_sectors.trailing_zeros()) as u32)
    }

    /// A zone's first sector.
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
