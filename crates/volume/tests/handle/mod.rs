//! A channel to a volume for tests, used one operation at a time.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)] // Test code.

use std::sync::Arc;

use blockyard_core::Device;
use blockyard_core::blocking::Io;
use blockyard_core::channel::{Channel, ChannelConfig, ChannelStats, Stack};
use blockyard_core::clock::Monotonic;
use blockyard_volume::Volume;

/// A blocking adapter over a new channel, for requests of up to 2 MiB.
pub fn handle(volume: &Arc<Volume>) -> Io {
    Io::new(channel(volume), 2 << 20)
}

/// Opens a channel to a volume.
pub fn channel(volume: &Arc<Volume>) -> Box<dyn Channel> {
    let config = ChannelConfig::default();
    let queue = volume.open_queue().unwrap();
    let (geometry, limits) = (volume.geometry(), volume.limits());
    let stats = ChannelStats::new();
    let stack = Stack::new(config, geometry, limits, queue, Monotonic, stats);
    Box::new(stack)
}
