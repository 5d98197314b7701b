//! Parameters of a RAM disk, and the shape that follows from them.

use std::path::PathBuf;

use blockyard_core::{Geometry, Limits, SECTOR_BYTES};
use blockyard_sync::hints::Hints;

use crate::codec::{Codec, CodecConfig};
use crate::error::RamError;

/// Smallest and largest block that is compressed as one, in bytes.
pub(crate) const UNIT_BYTES: std::ops::RangeInclusive<u32> = 4096..=65_536;
/// Largest device. Its table of a word per block must fit into memory long before that.
const SIZE_MAX: u64 = 1 << 46;
/// Least memory for data: less is not asked of the system at a time.
const MEM_LIMIT_MIN: u64 = 32 << 10;
/// Where memory is limited there is a hint for so much of it.
const HINT_DATA_BYTES: u64 = 1 << 10;
/// Longest read or write, in sectors: compressing a MiB keeps a channel busy for a millisecond.
const SECTORS_MAX: u64 = (1 << 20) / SECTOR_BYTES;
/// Longest discard and write-zeroes, in sectors: 256 MiB, which is 65536 words of 4 KiB blocks.
const DISCARD_SECTORS_MAX: u64 = (256 << 20) / SECTOR_BYTES;
/// Requests that a queue has at once. They complete while they are started.
const DEPTH: u16 = 128;

/// The parameters by which blocks are recompressed, by priority.
pub(crate) const RECOMPRESS_FIELDS: [&str; 3] = ["recomp_algo", "recomp_algo2", "recomp_algo3"];

/// Parameters of a RAM disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamConfig {
    /// Capacity in bytes, a multiple of `unit`. Default 4 GiB.
    pub size: u64,
    /// Logical block size in bytes: 512, 1024, 2048 or 4096. Default 4096, as zram's.
    pub bs: u32,
    /// How many bytes are compressed as one block: a power of two from 4 KiB to 64 KiB. Default
    /// 4096. A write of less than that reads, changes and writes the block.
    pub unit: u32,
    /// How blocks are compressed.
    pub codec: CodecConfig,
    /// How blocks are recompressed when that is asked for, by priority: up to three. Default: not
    /// at all.
    pub recompress: Vec<CodecConfig>,
    /// Equal blocks are stored once. Default: they are not.
    pub dedup: bool,
    /// A checksum with every object, so that a changed bit is an error and not data.
    pub checksum: bool,
    /// A file for blocks that are written back; `None`, the default, for none.
    pub backing: Option<PathBuf>,
    /// A snapshot that the device holds from the beginning; `None`, the default, for nothing.
    pub load: Option<PathBuf>,
    /// Most memory for data in bytes; 0, the default, for no limit. What would go beyond it fails
    /// with NOSPC and changes nothing.
    pub mem_limit: u64,
    /// From which overhead on the pool is compacted in the background, in percent of the stored
    /// bytes. Default 3; 0 for never.
    pub compact: u8,
}

impl Default for RamConfig {
    fn default() -> RamConfig {
        RamConfig {
            size: 4 << 30,
            bs: 4096,
            unit: 4096,
            codec: CodecConfig::default(),
            recompress: Vec::new(),
            dedup: false,
            checksum: false,
            backing: None,
            load: None,
            mem_limit: 0,
            compact: 3,
        }
    }
}

impl RamConfig {
    /// Checks that the parameters go together.
    ///
    /// # Errors
    /// If one does not fit.
    pub fn check(&self) -> Result<(), RamError> {
        let RamConfig { size, bs, unit, .. } = *self;
        if !bs.is_power_of_two() || !(512..=4096).contains(&bs) {
            return Err(RamError::invalid("bs", bs, "512, 1024, 2048 or 4096"));
        }
        if !unit.is_power_of_two() || !UNIT_BYTES.contains(&unit) {
            return Err(RamError::invalid("unit", unit, "a power of two from 4096 to 65536"));
        }
        if size == 0 || size > SIZE_MAX || !size.is_multiple_of(unit.into()) {
            let wanted = format!("a multiple of unit ({unit}), from {unit} to 2^46 bytes");
            return Err(RamError::invalid("size", size, wanted));
        }
        self.check_mem_limit(self.mem_limit)?;
        RamConfig::check_compact(self.compact)?;
        Codec::new(&self.codec, "algo")?;
        if self.recompress.len() > RECOMPRESS_FIELDS.len() {
            let count = self.recompress.len();
            return Err(RamError::invalid("recomp_algo", count, "three algorithms at most"));
        }
        for (recompress, field) in self.recompress.iter().zip(RECOMPRESS_FIELDS) {
            Codec::new(recompress, field)?;
        }
        Ok(())
    }

    /// Checks that something can be stored within a limit.
    pub(crate) fn check_mem_limit(&self, bytes: u64) -> Result<(), RamError> {
        let least = MEM_LIMIT_MIN.max(2 * u64::from(self.unit)) + self.hints_bytes();
        if bytes > 0 && !(least..=SIZE_MAX).contains(&bytes) {
            let wanted = format!("{least} to 2^46 bytes, or 0 for no limit");
            return Err(RamError::invalid("mem_limit", bytes, wanted));
        }
        Ok(())
    }

    /// Slots in which it is noted where equal blocks may be; 0 where none are looked for. One for
    /// each block, or for each KiB of memory, if that is limited.
    pub(crate) fn hint_slots(&self) -> u64 {
        let most = if self.mem_limit > 0 { self.mem_limit / HINT_DATA_BYTES } else { u64::MAX };
        if self.dedup { self.block_count().min(most).max(1) } else { 0 }
    }

    /// Memory that they take, which counts as used.
    pub(crate) fn hints_bytes(&self) -> u64 {
        if self.dedup { Hints::bytes_for(self.hint_slots()) } else { 0 }
    }

    pub(crate) fn check_compact(percent: u8) -> Result<(), RamError> {
        if percent > 100 {
            return Err(RamError::invalid("compact", percent, "1 to 100 percent, or 0 for never"));
        }
        Ok(())
    }

    /// How many blocks of `unit` bytes there are.
    pub fn block_count(&self) -> u64 {
        self.size / u64::from(self.unit)
    }

    /// The shape of a device of these parameters.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            sectors: self.size / SECTOR_BYTES,
            logical_block_bytes: self.bs,
            physical_block_bytes: self.unit,
            zones: None,
        }
    }

    /// What a device of these parameters takes in one request.
    pub fn limits(&self) -> Limits {
        Limits {
            sectors_max: SECTORS_MAX,
            discard_sectors_max: DISCARD_SECTORS_MAX,
            write_zeroes_sectors_max: DISCARD_SECTORS_MAX,
            ..Limits::unlimited(DEPTH)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Algo;

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let good = RamConfig::default;
        let too_long = || CodecConfig {
            algo: if cfg!(feature = "c-codecs") { Algo::Zstd } else { Algo::Lz4 },
            level: None,
            dictionary: Some(vec![0; (1 << 20) + 1].into()),
        };
        assert!(good().check().is_ok());
        for (config, field) in [
            (RamConfig { size: 0, ..good() }, "size"),
            (RamConfig { size: 4097, ..good() }, "size"),
            (RamConfig { size: 4096, unit: 8192, ..good() }, "size"),
            (RamConfig { size: 1 << 60, ..good() }, "size"),
            (RamConfig { bs: 256, ..good() }, "bs"),
            (RamConfig { bs: 8192, ..good() }, "bs"),
            (RamConfig { bs: 3000, ..good() }, "bs"),
            (RamConfig { unit: 2048, ..good() }, "unit"),
            (RamConfig { unit: 131_072, ..good() }, "unit"),
            (RamConfig { unit: 12_288, ..good() }, "unit"),
            (RamConfig { mem_limit: 4096, ..good() }, "mem_limit"),
            (RamConfig { compact: 101, ..good() }, "compact"),
            (RamConfig { dedup: true, mem_limit: 32 << 10, ..good() }, "mem_limit"),
            (RamConfig { codec: too_long(), ..good() }, "dict"),
        ] {
            assert_eq!(config.check().unwrap_err().field(), field, "{config:?}");
        }
    }
}
