//! Configuration of an emulated disk, and its validation.

use blockyard_core::Bytes;
use blockyard_zone_media::RecordError;
use thiserror::Error;

use crate::sense::SenseFormat;

/// Largest disk in bytes: calculations with byte addresses stay far from overflow.
const SIZE_MAX: u64 = 1 << 60;
/// Maximum number of zones: each takes memory, whether or not it is written.
const ZONES_MAX: u64 = 1 << 22;

/// Configuration of an emulated disk. Lengths are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// Capacity, a multiple of the physical block. The last zone may be shorter than the others.
    pub size: u64,
    /// Distance between the starts of adjacent zones: a power of two.
    pub zone_size: u64,
    /// Length of a sequential zone; 0 means the zone size. The rest of the zone size is a gap zone,
    /// which holds no data.
    pub zone_capacity: u64,
    /// Number of conventional zones, at the start of the disk.
    pub zone_nr_conv: u32,
    /// Maximum number of open zones; 0 means no limit.
    pub zone_max_open: u32,
    /// Unit of addresses and lengths: 512 or 4096.
    pub logical_block: u32,
    /// Unit of writes to sequential zones: 512 or 4096, at least the logical block.
    pub physical_block: u32,
    /// Whether reads above the write pointer and across zones succeed (URSWRZ); Linux supports no
    /// other disk.
    pub unrestricted_reads: bool,
    /// Whether writes may be lost at a power cut until they are flushed.
    pub write_cache: bool,
    /// Format of sense data in REQUEST SENSE and in the control mode page.
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

/// Why a disk cannot be created.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiskError {
    /// A field has an invalid value.
    #[error("invalid {field} `{value}`: expected {wanted}")]
    Invalid {
        /// The field of [`DiskConfig`].
        field: &'static str,
        /// The given value.
        value: String,
        /// What the field accepts.
        wanted: String,
    },
    /// The medium's records of the zones do not match the disk, or there is no memory for them.
    #[error(transparent)]
    Zones(#[from] RecordError),
}

fn invalid(
    field: &'static str,
    value: impl ToString,
    wanted: impl Into<String>,
) -> Result<(), DiskError> {
    Err(DiskError::Invalid { field, value: value.to_string(), wanted: wanted.into() })
}

impl DiskConfig {
    /// Length of a sequential zone, except a shorter last one.
    pub fn sequential_bytes(&self) -> u64 {
        if self.zone_capacity == 0 { self.zone_size } else { self.zone_capacity }
    }

    /// Validates the configuration.
    ///
    /// # Errors
    /// The first invalid field, with what it accepts.
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
            let wanted = format!("a multiple of physical_block ({block}) up to 1E");
            return invalid("size", self.size, wanted);
        }
        let zone_size = self.zone_size;
        if !zone_size.is_power_of_two() || zone_size < block || zone_size > self.size {
            let wanted = format!("a power of two from {block} to size ({})", Bytes(self.size));
            return invalid("zone_size", zone_size, wanted);
        }
        let zones = self.size.div_ceil(zone_size);
        if zones > ZONES_MAX {
            let wanted =
                format!("at least {}", Bytes(self.size.div_ceil(ZONES_MAX).next_power_of_two()));
            return invalid("zone_size", zone_size, wanted);
        }
        let capacity = self.sequential_bytes();
        if capacity > zone_size || !capacity.is_multiple_of(block) {
            let wanted = format!("a multiple of {block}, at most zone_size ({})", Bytes(zone_size));
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
    fn an_impossible_parameter_is_named() {
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
