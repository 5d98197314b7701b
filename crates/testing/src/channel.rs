//! A channel to a device without a scheduler, used one operation at a time.

use std::sync::Arc;

use blockyard_core::Device;
use blockyard_core::blocking::Io;
use blockyard_core::channel::{Channel, ChannelConfig, ChannelStats, Stack};
use blockyard_core::clock::Monotonic;

/// The longest request of [`handle`], in bytes.
const LEN_MAX: usize = 2 << 20;

/// A blocking adapter over a new channel, for requests of up to 2 MiB.
pub fn handle<D: Device>(device: &Arc<D>) -> Io
where
    D::Queue: 'static,
{
    Io::new(channel(device), LEN_MAX)
}

/// Opens a channel to a device.
///
/// # Panics
/// If the device refuses a queue.
pub fn channel<D: Device>(device: &Arc<D>) -> Box<dyn Channel>
where
    D::Queue: 'static,
{
    let config = ChannelConfig::default();
    let queue = device.open_queue().expect("the device has queues");
    let (geometry, limits) = (device.geometry(), device.limits());
    let stats = ChannelStats::new();
    Box::new(Stack::new(config, geometry, limits, queue, Monotonic, stats))
}
