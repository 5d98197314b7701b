//! The device: made from a configuration, asked for its statistics, and given faults at run time.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use blockyard_core::inject::Injection;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{Device, DeviceError, Extent, Geometry, Limits, SECTOR_SHIFT, Sector};

use crate::blocks::Blocks;
use crate::config::RamConfig;
use crate::counters::Count;
use crate::error::RamError;
use crate::queue::RamQueue;
use crate::stats::{BdStat, DebugStat, IoStat, MmStat, RamStats};

/// Most blocks that one question about an extent looks at.
const RUN_MAX: u64 = 1 << 20;
/// Where the dice of the injected fault begin, so that they fall the same way each time.
const CHANCE_SEED: u64 = 0xb10c_6a4d;

/// A compressed RAM disk.
///
/// Faults that it can be given by [`Device::inject`], beside those of the error injector:
///
/// | name | value | effect |
/// | --- | --- | --- |
/// | `nospc` | a number | one in so many objects finds no memory, by chance; 0: none |
pub struct Ram {
    shared: Arc<Shared>,
}

/// What the device and its queues share.
pub(crate) struct Shared {
    pub(crate) config: RamConfig,
    pub(crate) geometry: Geometry,
    pub(crate) limits: Limits,
    pub(crate) blocks: Blocks,
}

impl Ram {
    /// Makes a device that reads as zeros and holds nothing.
    ///
    /// # Errors
    /// If a parameter does not fit, or the system refuses memory.
    pub fn open(config: RamConfig) -> Result<Arc<Ram>, RamError> {
        config.check()?;
        let shared = Shared {
            geometry: config.geometry(),
            limits: config.limits(),
            blocks: Blocks::new(&config)?,
            config,
        };
        Ok(Arc::new(Ram { shared: Arc::new(shared) }))
    }

    /// Its parameters.
    pub fn config(&self) -> &RamConfig {
        &self.shared.config
    }

    /// Its statistics now.
    pub fn stats(&self) -> RamStats {
        let Shared { blocks, config, .. } = &*self.shared;
        let (counts, pool) = (blocks.counts(), blocks.store().pool().usage());
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
                compr_data_size: counts.get(Count::Compressed),
                mem_used_total: pool.used_bytes,
                mem_limit: config.mem_limit,
                mem_used_max: pool.used_bytes_max,
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
            table_bytes: blocks.store().entries_bytes() as u64,
            patch_retries: counts.get(Count::PatchRetries),
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
        let hand = self.shared.blocks.hand()?;
        Ok(RamQueue::new(Arc::clone(&self.shared), hand))
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
            _ => Err(DeviceError::NoSuchFault { fault: name.clone() }),
        }
    }
}

impl fmt::Debug for Ram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ram").field("config", &self.shared.config).finish_non_exhaustive()
    }
}
