//! The state that a device and its queues share.
#![allow(clippy::disallowed_types)] // The next hardware queue is control plane.

use std::sync::{Mutex, PoisonError};

use blockyard_core::{Geometry, Limits};
use blockyard_sync::tag_semaphore::TagSemaphore;
use blockyard_sync::token_bucket::TokenBucket;

use crate::config::NullConfig;
use crate::error::NullError;
use crate::faults::Faults;
use crate::shape::Shape;

/// Refills of the bandwidth limit per second, as in null_blk.
const TICKS_PER_SECOND: u64 = 50;

/// State that the device and its queues share. Every I/O reads it, so it has cache lines of its
/// own: writes of other data cannot invalidate them.
#[repr(align(128))]
pub(crate) struct Shared<B> {
    pub(crate) geometry: Geometry,
    pub(crate) limits: Limits,
    pub(crate) config: NullConfig,
    /// Data and zones.
    pub(crate) backend: B,
    pub(crate) faults: Faults,
    pub(crate) bandwidth: Option<TokenBucket>,
    /// The hardware queues that channels share; empty if each channel has its own.
    pub(crate) queues: Box<[TagSemaphore]>,
    next_queue: Mutex<usize>,
}

impl<B> Shared<B> {
    /// The state of a new device with a checked configuration. `make` opens its data and zones.
    pub(crate) fn new(
        shape: Shape,
        make: impl FnOnce(&Shape) -> Result<B, NullError>,
    ) -> Result<Shared<B>, NullError> {
        let faults = Faults::new(&shape.config, shape.geometry.block_sectors())?;
        let backend = make(&shape)?;
        let Shape { geometry, limits, config, .. } = shape;
        let bandwidth = (config.mbps > 0).then(|| {
            let bytes_per_tick = (u64::from(config.mbps) << 20) / TICKS_PER_SECOND;
            TokenBucket::new(bytes_per_tick, 1_000_000_000 / TICKS_PER_SECOND)
        });
        let depth = u32::from(config.hw_queue_depth);
        let queues =
            (0..config.submit_queues.unwrap_or(0)).map(|_| TagSemaphore::new(depth)).collect();
        let next_queue = Mutex::new(0);
        Ok(Shared { geometry, limits, config, backend, faults, bandwidth, queues, next_queue })
    }

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
