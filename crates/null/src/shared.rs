//! The state that a device and its queues share.
#![allow(clippy::disallowed_types)] // The next hardware queue is control plane.

use std::sync::{Mutex, PoisonError};

use blockyard_core::zone::{ZoneLayout, ZoneSet};
use blockyard_core::{Geometry, Limits};
use blockyard_sync::tag_semaphore::TagSemaphore;
use blockyard_sync::token_bucket::TokenBucket;

use crate::config::NullConfig;
use crate::data::Data;
use crate::error::NullError;
use crate::faults::Faults;
use crate::shape::Shape;

/// Refills of the bandwidth limit per second, as in null_blk.
const TICKS_PER_SECOND: u64 = 50;

/// State that the device and its queues share. Every I/O reads it, so it has cache lines of its
/// own: writes of other data cannot invalidate them.
#[repr(align(128))]
pub(crate) struct Shared<Z> {
    pub(crate) geometry: Geometry,
    pub(crate) limits: Limits,
    pub(crate) config: NullConfig,
    pub(crate) zones: Option<Z>,
    pub(crate) data: Option<Data>,
    pub(crate) faults: Faults,
    pub(crate) bandwidth: Option<TokenBucket>,
    /// The hardware queues that channels share; empty if each channel has its own.
    pub(crate) queues: Box<[TagSemaphore]>,
    next_queue: Mutex<usize>,
}

impl<Z: ZoneSet> Shared<Z> {
    /// The state of a new device, and a sentence for each parameter that was corrected.
    pub(crate) fn new(config: &NullConfig) -> Result<(Shared<Z>, Vec<String>), NullError> {
        let Shape { geometry, limits, config, notes } = Shape::new(config)?;
        let make_zones = |zones| {
            let (sectors, full, data) = (geometry.sectors, config.zone_full, config.memory_backed);
            Z::new(ZoneLayout { zones, sectors, full, data })
                .map_err(|_| NullError::no_memory("zone_size", config.zone_size))
        };
        let zones = geometry.zones.clone().map(make_zones).transpose()?;
        let data = match config.memory_backed {
            true => Some(Data::new(config.size, config.cache_size)?),
            false => None,
        };
        let bandwidth = (config.mbps > 0).then(|| {
            let bytes_per_tick = (u64::from(config.mbps) << 20) / TICKS_PER_SECOND;
            TokenBucket::new(bytes_per_tick, 1_000_000_000 / TICKS_PER_SECOND)
        });
        let depth = u32::from(config.hw_queue_depth);
        let queues =
            (0..config.submit_queues.unwrap_or(0)).map(|_| TagSemaphore::new(depth)).collect();
        let shared = Shared {
            faults: Faults::new(&config, geometry.block_sectors())?,
            geometry,
            limits,
            config,
            zones,
            data,
            bandwidth,
            queues,
            next_queue: Mutex::new(0),
        };
        Ok((shared, notes))
    }
}

impl<Z> Shared<Z> {
    /// The hardware queue for the next channel, as an index into `queues`.
    pub(crate) fn next_queue(&self) -> Option<usize> {
        if self.queues.is_empty() {
            return None;
        }
        let mut next = self.next_queue.lock().unwrap_or_else(PoisonError::into_inner);
        let queue = *next;
        *next = (queue + 1) % self.queues.len();
        Some(queue)
    }
}
