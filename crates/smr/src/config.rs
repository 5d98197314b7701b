//! What an emulated disk is to be like, and whether that can be.

use blockyard_core::zone::ZoneCond;
use thiserror::Error;

use crate::sense::SenseFormat;

/// Largest disk: addresses in bytes stay far from overflow.
const SIZE_MAX: u64 = 1 << 60;
/// Most zones: each takes memory of its own, whatever is written.
const ZONES_MAX: u64 = 1 << 22;

/// An emulated disk. Lengths are bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// Capacity, a multiple of the physical block. The last zone may be shorter than the others.
    pub size: u64,
    /// Distance between the starts of two zones: a power of two.
    pub zone_size: u64,
    /// Length of a sequential zone; 0 means the zone size. What is left of it is a gap zone, which
    /// holds nothing.
    pub zone_capacity: u64,
    /// How many zones are conventional, from the first one on.
    pub zone_nr_conv: u32,
    /// How many zones may be open; 0 means any number.
    pub zone_max_open: u32,
    /// Unit of addresses and lengths: 512 or 4096.
    pub logical_block: u32,
    /// Unit of writes to sequential zones: 512 or 4096, not below the logical block.
    pub physical_block: u32,
    /// Reads beyond the write pointer and across zones are answered (URSWRZ); Linux drives no other
    /// disk.
    pub unrestricted_reads: bool,
    /// What is written may be lost with the power until it is flushed.
    pub write_cache: bool,
    /// Form of sense data in answers to REQUEST SENSE and in the control mode page.
    pub sense_format: SenseFormat,
    /// Unit serial number: up to 20 letters and digits.
    pub serial: String,
}

impl Default for DiskConfig {
    fn default() -> DiskConfig {
        DiskConfig {
            size: 14 << 40,
            zone_size: 256 << 20,
            zone_capacity: 0,
            zone_nr_conv: 524,
            zone_max_open: 128,
            logical_block: 512,
            physical_block: 4096,
            unrestricted_reads: true,
            write_cache: true,
            sense_format: SenseFormat::Descriptor,
            serial: "BY000001".to_owned(),
        }
    }
}

/// Why there is no such disk.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiskError {
    /// A field has a value that it cannot have.
    #[error("{field}: {value} will not do; want {wanted}")]
    Invalid {
        /// The field of [`DiskConfig`].
        field: &'static str,
        /// Its value.
        value: String,
        /// What would do.
        wanted: String,
    },
    /// The medium's record of a zone is not one of this disk.
    #[error(
        "the medium has zone {zone} as {cond} with {written_sectors} sectors written; want {wanted}"
    )]
    Zone {
        /// Its number.
        zone: u32,
        /// Its condition there.
        cond: ZoneCond,
        /// How much of it is written there.
        written_sectors: u64,
        /// What would do.
        wanted: String,
    },
    /// The medium is one of another disk.
    #[error("the medium has {found} zones, the disk {wanted}: it belongs to another geometry")]
    ZoneCount {
        /// Zones on the medium.
        found: usize,
        /// Zones of the disk.
        wanted: u32,
    },
    /// There is no memory for so many zones.
    #[error("no memory for the state of {zones} zones; a larger zone_size takes less")]
    Memory {
        /// How many zones.
        zones: u32,
    },
}

fn invalid(
    field: &'static str,
    value: impl ToString,
    wanted: impl Into<String>,
) -> Result<(), DiskError> {
    Err(DiskError::Invalid { field, value: value.to_string(), wanted: wanted.into() })
}

impl DiskConfig {
    /// Length of a sequential zone that is no runt.
    pub fn sequential_bytes(&self) -> u64 {
        if self.zone_capacity == 0 { self.zone_size } else { self.zone_capacity }
    }

    /// Whether such a disk can be.
    ///
    /// # Errors
    /// The first field that is wrong, and what would do.
    pub fn check(&self) -> Result<(), DiskError> {
        let (logical, physical) = (self.logical_block, self.physical_block);
        if ![512, 4096].contains(&logical) {
            return invalid("logical_block", logical, "512 or 4096");
        }
        if ![512, 4096].contains(&physical) || physical < logical {
            let wanted = format!("512 or 4096, and at least logical_block ({logical})");
            return invalid("physical_block", physical, wanted);
        }
        let block = u64::from(physical);
        if self.size == 0 || self.size > SIZE_MAX || !self.size.is_multiple_of(block) {
            let wanted = format!("a multiple of physical_block ({block}) up to 2^60 bytes");
            return invalid("size", self.size, wanted);
        }
        let zone_size = self.zone_size;
        if !zone_size.is_power_of_two() || zone_size < block || zone_size > self.size {
            let wanted = format!("a power of two from {block} to size ({})", self.size);
            return invalid("zone_size", zone_size, wanted);
        }
        let zones = self.size.div_ceil(zone_size);
        if zones > ZONES_MAX {
            let wanted = format!("at least {}", self.size.div_ceil(ZONES_MAX).next_power_of_two());
            return invalid("zone_size", zone_size, wanted);
        }
        let capacity = self.sequential_bytes();
        if capacity > zone_size || !capacity.is_multiple_of(block) {
            let wanted = format!("a multiple of {block}, at most zone_size ({zone_size})");
            return invalid("zone_capacity", capacity, wanted);
        }
        if u64::from(self.zone_nr_conv) >= zones {
            let wanted = format!("below the number of zones ({zones})");
            return invalid("zone_nr_conv", self.zone_nr_conv, wanted);
        }
        let plain = self.serial.chars().all(|letter| letter.is_ascii_alphanumeric());
        if self.serial.is_empty() || self.serial.len() > 20 || !plain {
            return invalid("serial", &self.serial, "1 to 20 letters and digits");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_is_named() {
        let good = DiskConfig::default();
        assert_eq!(good.check(), Ok(()));
        let wrong = |change: fn(&mut DiskConfig)| {
            let mut config = DiskConfig::default();
            change(&mut config);
            match config.check() {
                Err(DiskError::Invalid { field, .. }) => field,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(wrong(|config| config.logical_block = 1024), "logical_block");
        assert_eq!(wrong(|config| config.physical_block = 256), "physical_block");
        assert_eq!(wrong(|config| config.size += 512), "size");
        assert_eq!(wrong(|config| config.size = 0), "size");
        assert_eq!(wrong(|config| config.zone_size = 3 << 20), "zone_size");
        assert_eq!(wrong(|config| config.zone_size = 4096), "zone_size");
        assert_eq!(wrong(|config| config.zone_capacity = 1 << 40), "zone_capacity");
        assert_eq!(wrong(|config| config.zone_nr_conv = 60_000), "zone_nr_conv");
        assert_eq!(wrong(|config| config.serial = "a b".to_owned()), "serial");
        let four_k = DiskConfig { logical_block: 4096, physical_block: 512, ..good };
        assert!(four_k.check().is_err());
    }
}
