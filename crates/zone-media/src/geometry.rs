//! The geometry of a medium: the superblock stores it, and it bounds everything that is read back.

use blockyard_core::SECTOR_BYTES;

use crate::error::FormatError;

/// Maximum number of zones of a medium: their table has 128 MiB.
pub(super) const ZONES_MAX: u64 = 1 << 24;

/// Largest medium in bytes: sums of offsets stay far from overflow.
const BYTES_MAX: u64 = 1 << 60;

/// The geometry of a medium. Zone `n` starts at `n * zone_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaGeometry {
    /// Length of the disk.
    pub bytes: u64,
    /// Distance between the starts of adjacent zones.
    pub zone_bytes: u64,
    /// Writable length of a sequential zone; a gap follows up to the next zone.
    pub zone_capacity_bytes: u64,
    /// Number of conventional zones, at the start of the disk.
    pub conventional_zones: u32,
    /// Length of a logical block.
    pub block_bytes: u32,
}

impl MediaGeometry {
    /// The fields, by the names of the configuration.
    pub(crate) fn fields(&self) -> [(&'static str, u64); 5] {
        [
            ("size", self.bytes),
            ("zone_size", self.zone_bytes),
            ("zone_capacity", self.zone_capacity_bytes),
            ("zone_nr_conv", u64::from(self.conventional_zones)),
            ("bs", u64::from(self.block_bytes)),
        ]
    }

    /// Validates every field.
    ///
    /// # Errors
    /// The first invalid field, with its value and what is expected.
    pub fn check(&self, file: &str) -> Result<(), FormatError> {
        let [size, zone, capacity, conventional, block] = self.fields();
        let refuse = |(field, value): (&'static str, u64), want: &'static str| {
            Err(FormatError::field(file, field, value, want))
        };
        if !matches!(self.block_bytes, 512 | 1024 | 2048 | 4096) {
            return refuse(block, "512, 1024, 2048 or 4096");
        }
        let whole = |bytes: u64| bytes > 0 && bytes.is_multiple_of(u64::from(self.block_bytes));
        if !whole(self.bytes) || self.bytes > BYTES_MAX {
            return refuse(size, "a multiple of the block size up to 1 EiB");
        }
        if !whole(self.zone_bytes) || self.zone_bytes > BYTES_MAX {
            return refuse(zone, "a multiple of the block size up to 1 EiB");
        }
        if self.bytes.div_ceil(self.zone_bytes) > ZONES_MAX {
            return refuse(zone, "so large that there are at most 16777216 zones");
        }
        if !whole(self.zone_capacity_bytes) || self.zone_capacity_bytes > self.zone_bytes {
            return refuse(capacity, "a multiple of the block size up to zone_size");
        }
        if self.conventional_zones > self.zone_count() {
            return refuse(conventional, "at most the number of zones");
        }
        Ok(())
    }

    /// Number of zones; the last one may be shorter than the others.
    pub fn zone_count(&self) -> u32 {
        let count = self.bytes.div_ceil(self.zone_bytes);
        u32::try_from(count).expect("`check` bounds the zones")
    }

    /// Start of a zone in bytes.
    pub fn start_of(&self, zone: u32) -> u64 {
        u64::from(zone) * self.zone_bytes
    }

    /// Distance from a zone's start to the next zone or the end of the disk, in bytes.
    pub fn len_of(&self, zone: u32) -> u64 {
        self.zone_bytes.min(self.bytes - self.start_of(zone))
    }

    /// Distance from a zone's start to the next zone or the end of the disk, in sectors.
    pub(crate) fn sectors_of(&self, zone: u32) -> u64 {
        self.len_of(zone) / SECTOR_BYTES
    }

    /// The zone that contains an offset.
    pub fn zone_at(&self, offset: u64) -> u32 {
        u32::try_from(offset / self.zone_bytes).expect("`check` bounds the zones")
    }

    /// Whether a zone is conventional.
    pub fn is_conventional(&self, zone: u32) -> bool {
        zone < self.conventional_zones
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> MediaGeometry {
        MediaGeometry {
            bytes: 14 << 40,
            zone_bytes: 256 << 20,
            zone_capacity_bytes: 256 << 20,
            conventional_zones: 524,
            block_bytes: 4096,
        }
    }

    #[test]
    fn a_runt_is_counted_and_shorter() {
        let runt = MediaGeometry { bytes: (14 << 40) - (1 << 20), ..geometry() };
        assert_eq!(runt.check("superblock"), Ok(()));
        assert_eq!(runt.zone_count(), geometry().zone_count());
        assert_eq!(runt.len_of(runt.zone_count() - 1), 255 << 20);
    }

    #[test]
    fn an_impossible_geometry_is_named() {
        let refused = [
            (MediaGeometry { block_bytes: 520, ..geometry() }, "bs"),
            (MediaGeometry { bytes: 0, ..geometry() }, "size"),
            (MediaGeometry { bytes: !4095, ..geometry() }, "size"),
            (MediaGeometry { zone_bytes: 0, ..geometry() }, "zone_size"),
            (MediaGeometry { zone_bytes: 4096, ..geometry() }, "zone_size"),
            (MediaGeometry { zone_capacity_bytes: 512 << 20, ..geometry() }, "zone_capacity"),
            (MediaGeometry { conventional_zones: 1 << 20, ..geometry() }, "zone_nr_conv"),
        ];
        for (geometry, name) in refused {
            let Err(FormatError::Field { field, .. }) = geometry.check("superblock") else {
                panic!("{name} is taken")
            };
            assert_eq!(field, name);
        }
    }
}

/// A geometry for the tests of the crate.
#[cfg(test)]
pub(crate) mod fixture {
    use super::MediaGeometry;

    pub(crate) const GEOMETRY: MediaGeometry = MediaGeometry {
        bytes: 16 << 20,
        zone_bytes: 1 << 20,
        zone_capacity_bytes: 1 << 20,
        conventional_zones: 2,
        block_bytes: 512,
    };
}
