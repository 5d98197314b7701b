//! A door to a volume for tests: a channel of its own, used one operation at a time.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)] // A test may.

use std::sync::Arc;

use blockyard_core::Device;
use blockyard_core::blocking::Io;
use blockyard_core::channel::{Channel, ChannelConfig, ChannelStats, Stack};
use blockyard_core::clock::Monotonic;
use blockyard_core::sched::NoneScheduler;
use blockyard_volume::Volume;

/// A channel, and what it does while the caller waits; up to 2 MiB at a time.
pub fn door(volume: &Arc<Volume>) -> Io {
    Io::new(channel(volume), 2 << 20)
}

/// A channel.
pub fn channel(volume: &Arc<Volume>) -> Box<dyn Channel> {
    let config = ChannelConfig::default();
    let depth = usize::from(config.depth);
    let (sched, queue) = (NoneScheduler::new(depth), volume.open_queue().unwrap());
    let (geometry, limits) = (volume.geometry(), volume.limits());
    let stats = ChannelStats::new();
    let stack = Stack::new(config, geometry, limits, sched, queue, Monotonic, stats);
    Box::new(stack)
}
