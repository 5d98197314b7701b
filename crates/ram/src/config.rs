//! Parameters of a RAM disk, and the geometry and limits that follow from them.

use std::path::PathBuf;

use blockyard_core::{Bytes, Geometry, Limits, SECTOR_BYTES};
use blockyard_sync::dedup_hints::DedupHints;

use crate::codec::{Codec, CodecConfig};
use crate::error::RamError;

/// Smallest and largest block that is compressed as a unit, in bytes.
pub(crate) const UNIT_BYTES: std::ops::RangeInclusive<u32> = 4096..=65_536;
/// Largest device in bytes. The table of words exhausts memory long before that.
const SIZE_MAX: u64 = 1 << 46;
/// Smallest memory limit in bytes: the pool asks the system for this much at a time.
const MEM_LIMIT_MIN: u64 = 32 << 10;
/// With a memory limit, deduplication has one hint per this many bytes of the limit.
const HINT_DATA_BYTES: u64 = 1 << 10;
/// Longest read or write, in sectors: compressing a MiB keeps a channel busy for a millisecond.
const SECTORS_MAX: u64 = (1 << 20) / SECTOR_BYTES;
/// Longest discard and write-zeroes, in sectors: 256 MiB, which is 65536 words of 4 KiB blocks.
const DISCARD_SECTORS_MAX: u64 = (256 << 20) / SECTOR_BYTES;
/// Requests that a queue accepts at once. Each completes while it is started.
const DEPTH: u16 = 128;

/// The names of the recompression parameters, by priority.
pub(crate) const RECOMPRESS_FIELDS: [&str; 3] = ["recomp_algo", "recomp_algo2", "recomp_algo3"];

/// Parameters of a RAM disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamConfig {
    /// Capacity in bytes, a multiple of `unit`. Default 4 GiB.
    pub size: u64,
    /// Logical block size in bytes: 512, 1024, 2048 or 4096. Default 4096, as in zram.
    pub bs: u32,
    /// Bytes that are compressed as one block: a power of two from 4 KiB to 64 KiB. Default 4096. A
    /// shorter write reads, modifies and writes the block.
    pub unit: u32,
    /// The codec for new blocks.
    pub codec: CodecConfig,
    /// The codecs for recompression, by priority: up to three. Default: none, and no recompression.
    pub recompress: Vec<CodecConfig>,
    /// Whether equal blocks are stored once. Default: no.
    pub dedup: bool,
    /// Whether each object has a checksum, so that a flipped bit is an error and not wrong data.
    pub checksum: bool,
    /// The backing file for writeback; `None`, the default, for no writeback.
    pub backing: Option<PathBuf>,
    /// A snapshot to load when the device is created; `None`, the default, for an empty device.
    pub load: Option<PathBuf>,
    /// Memory limit for data in bytes; 0, the default, for no limit. A write that would exceed it
    /// fails with NOSPC and changes nothing.
    pub mem_limit: u64,
    /// Overhead of the pool from which background compaction runs, in percent of the stored bytes.
    /// Default 3; 0 disables it.
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
    /// Checks the parameters and their combination.
    ///
    /// # Errors
    /// If a parameter is invalid, alone or in combination.
    pub fn check(&self) -> Result<(), RamError> {
        let RamConfig { size, bs, unit, .. } = *self;
        if !bs.is_power_of_two() || !(512..=4096).contains(&bs) {
            return Err(RamError::invalid("bs", bs, "512, 1024, 2048 or 4096"));
        }
        if !unit.is_power_of_two() || !UNIT_BYTES.contains(&unit) {
            return Err(RamError::invalid("unit", unit, "4k, 8k, 16k, 32k or 64k"));
        }
        if size == 0 || size > SIZE_MAX || !size.is_multiple_of(unit.into()) {
            let wanted = format!("a multiple of unit ({0}), from {0} to 64T", Bytes(unit.into()));
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

    /// Checks that a memory limit leaves enough space to store something.
    pub(crate) fn check_mem_limit(&self, bytes: u64) -> Result<(), RamError> {
        let least = MEM_LIMIT_MIN.max(2 * u64::from(self.unit)) + self.hints_bytes();
        if bytes > 0 && !(least..=SIZE_MAX).contains(&bytes) {
            let wanted = format!("{} to 64T, or 0 for no limit", Bytes(least));
            return Err(RamError::invalid("mem_limit", Bytes(bytes), wanted));
        }
        Ok(())
    }

    /// Number of deduplication hints: one per block, or one per KiB of the memory limit if there is
    /// one. 0 without deduplication.
    pub(crate) fn hint_slots(&self) -> u64 {
        let most = if self.mem_limit > 0 { self.mem_limit / HINT_DATA_BYTES } else { u64::MAX };
        if self.dedup { self.block_count().min(most).max(1) } else { 0 }
    }

    /// Memory that the hints take, in bytes; it counts towards the memory limit.
    pub(crate) fn hints_bytes(&self) -> u64 {
        if self.dedup { DedupHints::bytes_for(self.hint_slots()) } else { 0 }
    }

    pub(crate) fn check_compact(percent: u8) -> Result<(), RamError> {
        if percent > 100 {
            return Err(RamError::invalid("compact", percent, "1 to 100 percent, or 0 for never"));
        }
        Ok(())
    }

    /// Number of blocks of `unit` bytes.
    pub fn block_count(&self) -> u64 {
        self.size / u64::from(self.unit)
    }

    /// The geometry of a device with these parameters.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            sectors: self.size / SECTOR_BYTES,
            logical_block_bytes: self.bs,
            physical_block_bytes: self.unit,
            zones: None,
        }
    }

    /// The limits for one request to a device with these parameters.
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
    fn a_parameter_that_does_not_fit_is_refused_by_name() {
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
