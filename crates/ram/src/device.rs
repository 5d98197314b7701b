//! The device: created from a configuration, with statistics and with faults injected at run time.
#![allow(clippy::disallowed_types)] // The lock that serializes background workers is control plane.

use std::fmt;
use std::io::Write;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockyard_core::inject::Injection;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{Device, DeviceError, Extent, Geometry, Limits, SECTOR_SHIFT, Sector};

use crate::background::{
    Recompressed, Replace, SaveError, Saved, Selection, StatesPage, Trained, WrittenBack,
};
use crate::blocks::Blocks;
use crate::compactor::Compactor;
use crate::config::RamConfig;
use crate::counters::Count;
use crate::error::RamError;
use crate::pool::{Compacted, SizeClass};
use crate::queue::RamQueue;
use crate::stats::{BdStat, DebugStat, DedupStat, IoStat, MmStat, RamStats};

/// Maximum number of blocks that one extent query examines.
const RUN_MAX: u64 = 1 << 20;
/// Seed of the injected `nospc` fault, so that its sequence is reproducible.
const CHANCE_SEED: u64 = 0xb10c_6a4d;

/// Names of the faults of the backing file: a dying disk, a disk that rejects the page cache's late
/// writes, and a full file system.
const EIO: &str = "backing_eio";
const LATE_EIO: &str = "backing_late_eio";
const ENOSPC: &str = "backing_enospc";

/// A compressed RAM disk.
///
/// Faults that [`Device::inject`] can set, in addition to those of the fault injector:
///
/// | name | value | effect |
/// | --- | --- | --- |
/// | `nospc` | a number N | one in N allocations fails at random; 0: none |
/// | `flip` | a sector | one bit of what is stored for its block flips |
/// | `backing_eio` | a number N | the next N reads and writes of the backing file fail with EIO |
/// | `backing_late_eio` | a number N | the next N batches fail with EIO when they are synced |
/// | `backing_enospc` | a number N | the next N writes to it stop half way with ENOSPC |
pub struct Ram {
    shared: Arc<Shared>,
    turn: Mutex<()>,
    compactor: Mutex<Option<Compactor>>,
}

/// Settings to change at run time; `None` or `false` leaves a setting as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Passed to [`Ram::set_mem_limit`].
    pub mem_limit: Option<u64>,
    /// Passed to [`Ram::set_compact`].
    pub compact: Option<u8>,
    /// Whether to call [`Ram::reset_mem_used_max`].
    pub resets_mem_used_max: bool,
}

/// State that the device and its queues share.
pub(crate) struct Shared {
    pub(crate) config: RamConfig,
    pub(crate) geometry: Geometry,
    pub(crate) limits: Limits,
    pub(crate) blocks: Blocks,
}

impl Ram {
    /// Creates a device that reads as zeros, or that has the contents of the snapshot in `load`.
    ///
    /// # Errors
    /// If a parameter is invalid, the snapshot cannot be loaded, or there is not enough memory.
    pub fn open(config: RamConfig) -> Result<Arc<Ram>, RamError> {
        config.check()?;
        let load = config.load.clone();
        let shared = Shared {
            geometry: config.geometry(),
            limits: config.limits(),
            blocks: Blocks::new(&config)?,
            config,
        };
        if let Some(path) = load {
            shared.blocks.load(&shared.config, &path)?;
        }
        let percent = shared.config.compact;
        let compactor = Mutex::new(None);
        let ram = Ram { shared: Arc::new(shared), turn: Mutex::new(()), compactor };
        ram.set_compact(percent)?;
        Ok(Arc::new(ram))
    }

    /// The parameters of the device.
    pub fn config(&self) -> &RamConfig {
        &self.shared.config
    }

    /// Compacts the pool and returns the freed pages to the system.
    ///
    /// # Errors
    /// If the maximum number of channels and workers is in use.
    pub fn compact(&self) -> Result<Compacted, RamError> {
        let _alone = self.exclusive();
        self.shared.blocks.compact()
    }

    /// Sets the overhead of the pool from which background compaction runs, in percent of the
    /// stored bytes; 0 disables it.
    ///
    /// # Errors
    /// If `percent` is invalid, or the system cannot create the thread.
    pub fn set_compact(&self, percent: u8) -> Result<(), RamError> {
        RamConfig::check_compact(percent)?;
        let mut compactor = self.compactor();
        if percent == 0 {
            *compactor = None;
        } else if let Some(running) = &*compactor {
            running.set_percent(percent);
        } else {
            let started = Compactor::start(self.shared.blocks.access()?, percent);
            *compactor = Some(started.map_err(|source| RamError::Thread { source })?);
        }
        Ok(())
    }

    /// Overhead of the pool from which background compaction runs, in percent; 0 if disabled.
    pub fn compact_percent(&self) -> u8 {
        self.compactor().as_ref().map_or(0, Compactor::percent)
    }

    /// Makes the background compaction check the pool at once, and waits until that round has
    /// ended.
    pub fn compact_in_background(&self) {
        if let Some(compactor) = &*self.compactor() {
            compactor.run_round();
        }
    }

    fn compactor(&self) -> MutexGuard<'_, Option<Compactor>> {
        self.compactor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the memory limit for data in bytes; 0 for no limit. If more is in use already, it stays
    /// in use, and no more is allocated.
    ///
    /// # Errors
    /// If the limit is too small to store anything.
    pub fn set_mem_limit(&self, bytes: u64) -> Result<(), RamError> {
        self.shared.config.check_mem_limit(bytes)?;
        self.shared.blocks.set_mem_limit(bytes);
        Ok(())
    }

    /// Changes several settings: all of them, or none if one is invalid.
    ///
    /// # Errors
    /// Those of each setting.
    pub fn set(&self, settings: &Settings) -> Result<(), RamError> {
        if let Some(bytes) = settings.mem_limit {
            self.shared.config.check_mem_limit(bytes)?;
        }
        // First the setting that can fail although its value is valid: it may have to create a
        // thread.
        if let Some(percent) = settings.compact {
            self.set_compact(percent)?;
        }
        if let Some(bytes) = settings.mem_limit {
            self.shared.blocks.set_mem_limit(bytes);
        }
        if settings.resets_mem_used_max {
            self.reset_mem_used_max();
        }
        Ok(())
    }

    /// Resets the maximum of memory in use to the current value.
    pub fn reset_mem_used_max(&self) {
        self.shared.blocks.store().pool().reset_used_max();
    }

    /// One round of idle tracking: every block ages by one until it is read or written.
    pub fn idle(&self) {
        self.shared.blocks.grow_older();
    }

    /// Recompresses the selected blocks with the configured further algorithms, where that makes
    /// them smaller.
    ///
    /// # Errors
    /// If the device has no recompression algorithm, or there is no working memory.
    pub fn recompress(&self, selection: &Selection) -> Result<Recompressed, RamError> {
        let _alone = self.exclusive();
        self.shared.blocks.recompress(selection)
    }

    /// Moves blocks to the backing file, at most `limit_bytes` bytes. Later reads of these blocks
    /// read the file.
    ///
    /// # Errors
    /// If the device has no backing file, or the file cannot be written; blocks that were not
    /// written stay in memory.
    pub fn write_back(
        &self,
        selection: &Selection,
        limit_bytes: u64,
    ) -> Result<WrittenBack, RamError> {
        let _alone = self.exclusive();
        self.shared.blocks.write_back(selection, limit_bytes)
    }

    /// Saves the contents to a file that `load` accepts. After a crash the file has its old
    /// contents or the complete new ones. A concurrent write is in the file or not, block by block.
    ///
    /// # Errors
    /// If the file cannot be written or must not be replaced, or a block cannot be read.
    pub fn save(&self, path: &Path, replace: Replace) -> Result<Saved, RamError> {
        let _alone = self.exclusive();
        self.shared.blocks.save(&self.shared.config, path, replace)
    }

    /// Saves the contents to a stream, in the format of [`Ram::save`]. Returns the number of blocks
    /// written.
    ///
    /// # Errors
    /// If the stream cannot be written, or a block cannot be read.
    pub fn save_to(&self, out: impl Write) -> Result<u64, SaveError> {
        let _alone = self.exclusive();
        self.shared.blocks.save_to(&self.shared.config, out)
    }

    /// Trains a zstd dictionary on the contents and writes it to a file, for the parameter `dict`
    /// of another device.
    ///
    /// # Errors
    /// If there is too little data to train on, this build has no zstd, or the file cannot be
    /// written.
    pub fn train(&self, path: &Path, replace: Replace) -> Result<Trained, RamError> {
        self.shared.blocks.train(path, replace)
    }

    /// Trains a zstd dictionary on the contents. Returns it with the number of blocks used.
    ///
    /// # Errors
    /// If there is too little data to train on, or this build has no zstd.
    pub fn dictionary(&self) -> Result<(Vec<u8>, u64), RamError> {
        self.shared.blocks.dictionary()
    }

    /// Lists up to `count` blocks that hold data, from block `first` on. A page of a sparse table
    /// may have fewer or none; the page says where the next one starts.
    pub fn states(&self, first: u64, count: usize) -> StatesPage {
        self.shared.blocks.states(first, count)
    }

    /// How many blocks have each age, in rounds of idle tracking.
    pub fn ages(&self) -> Vec<u64> {
        self.shared.blocks.ages().to_vec()
    }

    /// How many objects there are of each size class.
    pub fn size_classes(&self) -> Vec<SizeClass> {
        self.shared.blocks.store().pool().size_classes()
    }

    fn flip(&self, value: &str) -> Result<(), DeviceError> {
        let invalid = |wanted: &str| DeviceError::Invalid {
            field: "flip",
            value: value.to_owned(),
            wanted: wanted.to_owned(),
        };
        let sector = value.trim().parse().map(Sector).map_err(|_| invalid("a sector"))?;
        let Shared { geometry, blocks, .. } = &*self.shared;
        if sector.0 >= geometry.sectors {
            return Err(DeviceError::OutOfRange { sector, sectors: geometry.sectors });
        }
        match blocks.flip(sector.bytes() / blocks.unit() as u64)? {
            true => Ok(()),
            false => Err(invalid("a sector of a block that takes memory")),
        }
    }

    fn fail_backing(&self, field: &'static str, value: &str) -> Result<(), DeviceError> {
        let invalid = |wanted: &str| DeviceError::Invalid {
            field,
            value: value.to_owned(),
            wanted: wanted.to_owned(),
        };
        let times = value.trim().parse().map_err(|_| invalid("a number; 0: none"))?;
        let backing = self.shared.blocks.form.backing.as_ref();
        let backing = backing.ok_or_else(|| invalid("a device that was made with backing=FILE"))?;
        match field {
            LATE_EIO => backing.fail_late(times),
            ENOSPC => backing.fill_up(times),
            _ => backing.fail(times),
        }
        Ok(())
    }

    /// Locks out other background workers: each scans the table first and relies on running alone.
    fn exclusive(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The statistics now.
    pub fn stats(&self) -> RamStats {
        let Shared { blocks, .. } = &*self.shared;
        let (counts, pool) = (blocks.counts(), blocks.store().pool().usage());
        // The deduplication hints count as memory for data as well.
        let hints = blocks.hints_bytes();
        let compressed = counts.get(Count::Compressed);
        let pages = blocks.unit() as u64 >> 12;
        RamStats {
            io: IoStat {
                failed_reads: counts.get(Count::FailedReads),
                failed_writes: counts.get(Count::FailedWrites),
                invalid_io: 0,
                notify_free: counts.get(Count::NotifyFree),
            },
            mm: MmStat {
                orig_data_size: counts.get(Count::Stored) * blocks.unit() as u64,
                compr_data_size: compressed.saturating_sub(pool.duplicate_bytes),
                mem_used_total: pool.used_bytes + hints,
                mem_limit: pool.limit_bytes.map_or(0, |limit| limit + hints),
                mem_used_max: pool.used_bytes_max + hints,
                same_pages: counts.get(Count::Same),
                pages_compacted: pool.pages_compacted,
                huge_pages: counts.get(Count::Huge),
                huge_pages_since: counts.get(Count::HugeSince),
            },
            bd: BdStat {
                bd_count: counts.get(Count::Backed) * pages,
                bd_reads: counts.get(Count::BackedReads) * pages,
                bd_writes: counts.get(Count::BackedWrites) * pages,
            },
            debug: DebugStat::default(),
            dedup: DedupStat { dup_data_size: pool.duplicate_bytes, meta_data_size: hints },
            table_bytes: blocks.store().entries_bytes() as u64,
            patch_retries: counts.get(Count::PatchRetries),
            writes_refused: counts.get(Count::WritesRefused),
        }
    }
}

impl Device for Ram {
    type Queue = RamQueue;

    fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    fn open_queue(&self) -> Result<RamQueue, DeviceError> {
        let workspace = self.shared.blocks.workspace()?;
        Ok(RamQueue::new(Arc::clone(&self.shared), workspace))
    }

    fn report_zones(
        &self,
        from: Sector,
        _: usize,
        _: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        let sectors = self.shared.geometry.sectors;
        if from.0 < sectors {
            Ok(())
        } else {
            Err(DeviceError::OutOfRange { sector: from, sectors })
        }
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        let Shared { geometry, blocks, .. } = &*self.shared;
        let sectors = sectors.min(geometry.sectors.saturating_sub(from.0)).max(1);
        if from.0 >= geometry.sectors {
            return Extent { sectors, allocated: false, zero: false };
        }
        let unit = (blocks.unit() as u64) >> SECTOR_SHIFT;
        let (first, after) = (from.0 / unit, (from.0 + sectors).div_ceil(unit));
        let (run, extent) = blocks.run(first, (after - first).min(RUN_MAX));
        let end = ((first + run) * unit).min(from.0 + sectors);
        Extent { sectors: end - from.0, ..extent }
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        let Injection::Device { name, value } = injection else {
            return Err(DeviceError::NoSuchFault { fault: injection.name().to_owned() });
        };
        match name.as_str() {
            "nospc" => {
                let one_in: u32 = value.trim().parse().map_err(|_| DeviceError::Invalid {
                    field: "nospc",
                    value: value.clone(),
                    wanted: "a number; 0: none".to_owned(),
                })?;
                let pool = self.shared.blocks.store().pool();
                pool.fail_allocations(NonZeroU32::new(one_in), CHANCE_SEED);
                Ok(())
            }
            "flip" => self.flip(value),
            EIO => self.fail_backing(EIO, value),
            LATE_EIO => self.fail_backing(LATE_EIO, value),
            ENOSPC => self.fail_backing(ENOSPC, value),
            _ => Err(DeviceError::NoSuchFault { fault: name.clone() }),
        }
    }
}

impl fmt::Debug for Ram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ram").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the limit was set, and then there was no thread for compaction.
    #[test]
    fn settings_are_made_all_at_once_or_not_at_all() {
        let config = RamConfig { size: 4 << 20, compact: 0, ..RamConfig::default() };
        let ram = Ram::open(config).unwrap();
        let all =
            Settings { mem_limit: Some(1 << 20), compact: Some(5), resets_mem_used_max: true };
        let is_set = |ram: &Ram| (ram.stats().mm.mem_limit, ram.compact_percent());
        let crowd: Vec<_> = std::iter::from_fn(|| ram.shared.blocks.access().ok()).collect();
        let error = ram.set(&all).unwrap_err();
        assert!(matches!(error, RamError::Crowded { .. }), "{error}");
        assert_eq!(is_set(&ram), (0, 0));
        drop(crowd);
        for (settings, field) in [
            (Settings { compact: Some(101), ..all }, "compact"),
            (Settings { mem_limit: Some(1), ..all }, "mem_limit"),
        ] {
            assert_eq!(ram.set(&settings).unwrap_err().field(), field);
            assert_eq!(is_set(&ram), (0, 0), "{field}");
        }
        ram.set(&all).unwrap();
        assert_eq!(is_set(&ram), (1 << 20, 5));
        ram.set(&Settings::default()).unwrap();
        assert_eq!(is_set(&ram), (1 << 20, 5));
    }
}
