//! What a virtual machine may know of a device: its size, its limits, its zones.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Instant;

use blockyard_core::{Disk, Geometry, Limits, ZoneGeometry};
use blockyard_os::LogLimit;
use blockyard_sync::counter::Counter;
use blockyard_sync::pad::Padded;
use vhost::vhost_user::Error;

use crate::request::ID_BYTES;

/// The most rings of a device. QEMU makes one for each processor of the guest.
pub const QUEUES_MAX: usize = 64;
/// The most entries of a ring.
pub const QUEUE_ENTRIES_MAX: u16 = 1024;

/// The longest data that go through the bounce buffer of a ring, in bytes: more than Linux sends in
/// one request.
pub(crate) const BOUNCE_BYTES: u64 = 4 << 20;

/// The largest number of sectors that a field of 32 bits can have, in whole blocks of any size.
const SECTORS_MAX: u64 = (u32::MAX as u64 + 1) - (1 << 16);

/// A device, as requests and the configuration space see it. Lengths are in sectors of 512 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceShape {
    /// The capacity.
    pub sectors: u64,
    /// The length of a logical block.
    pub block_sectors: u64,
    /// The length of a physical block.
    pub physical_block_sectors: u64,
    /// The longest discard; 0 if there is none.
    pub discard_sectors_max: u64,
    /// The longest write-zeroes; 0 if there is none.
    pub write_zeroes_sectors_max: u64,
    /// The longest zone append; 0 if there is none.
    pub append_sectors_max: u64,
    /// Whether the device refuses all changes.
    pub read_only: bool,
    /// The zones, for a zoned device.
    pub zones: Option<ZoneGeometry>,
    /// The id: the device's name, cut off after 20 bytes.
    pub id: [u8; ID_BYTES],
}

impl DeviceShape {
    /// Whether a driver that knows a device by the shape `before` can go on with this one: only the
    /// capacity may differ, and be larger.
    pub(crate) fn succeeds(&self, before: &DeviceShape) -> bool {
        *before == DeviceShape { sectors: before.sectors, ..self.clone() }
            && self.sectors >= before.sectors
    }

    /// The shape of a disk.
    pub fn of(disk: &dyn Disk) -> DeviceShape {
        DeviceShape::new(disk.name(), disk.geometry(), disk.limits())
    }

    /// The shape of a disk of this name with this geometry and these limits.
    pub fn new(name: &str, geometry: &Geometry, limits: &Limits) -> DeviceShape {
        // A zoned disk may take writes of whole physical blocks only, and a guest has one length of
        // blocks.
        let block_bytes = match geometry.zones {
            Some(_) => geometry.physical_block_bytes.max(geometry.logical_block_bytes),
            None => geometry.logical_block_bytes,
        };
        let block_sectors = u64::from(block_bytes) / 512;
        let whole = |sectors: u64| sectors.min(SECTORS_MAX) / block_sectors * block_sectors;
        let mut id = [0; ID_BYTES];
        for (byte, of_name) in id.iter_mut().zip(name.bytes()) {
            *byte = of_name;
        }
        DeviceShape {
            sectors: geometry.sectors,
            block_sectors,
            physical_block_sectors: u64::from(geometry.physical_block_bytes) / 512,
            discard_sectors_max: whole(limits.discard_sectors_max),
            write_zeroes_sectors_max: whole(limits.write_zeroes_sectors_max),
            // An append in several buffers goes through the bounce buffer.
            append_sectors_max: whole(limits.zone_append_sectors_max.min(BOUNCE_BYTES / 512)),
            read_only: limits.read_only,
            zones: geometry.zones.clone(),
            id,
        }
    }
}

/// The counts of a ring, since the device is served. The thread of the ring, of which there is one
/// at a time, writes them, any thread reads them.
#[derive(Debug, Default)]
pub(crate) struct QueueCounts {
    /// Requests that were answered.
    pub(crate) requests: Counter,
    /// Requests that were answered with an error.
    pub(crate) errors: Counter,
    /// Bytes that were read.
    pub(crate) read_bytes: Counter,
    /// Bytes that were written.
    pub(crate) written_bytes: Counter,
    /// Kicks that ended a sleep: several that came before the thread woke up are one.
    pub(crate) kicks: Counter,
    /// Calls: interrupts that were sent to the guest.
    pub(crate) calls: Counter,
    /// Sleeps of the thread: those that end by a timeout count too, and one that has not ended.
    pub(crate) sleeps: Counter,
    /// Spins that found work.
    pub(crate) spins_found: Counter,
    /// Spins that found none, after which the thread slept.
    pub(crate) spins_empty: Counter,
    /// The time of all spins, in nanoseconds.
    pub(crate) spin_ns: Counter,
    /// How often the ring was malformed, and not served until the guest set it up again.
    pub(crate) faults: Counter,
}

/// The counts of a ring since its device is served; they are not reset when a hypervisor leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RingCounts {
    /// Requests that were answered.
    pub requests: u64,
    /// Requests that were answered with an error.
    pub errors: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
    /// Kicks that ended a sleep: several that came before the thread woke up are one.
    pub kicks: u64,
    /// Calls: interrupts that were sent to the guest.
    pub calls: u64,
    /// Sleeps of the thread: those that end by a timeout count too, and one that has not ended.
    pub sleeps: u64,
    /// Spins that found work.
    pub spins_found: u64,
    /// Spins that found none, after which the thread slept.
    pub spins_empty: u64,
    /// The time of all spins, in nanoseconds.
    pub spin_ns: u64,
    /// How often the ring was malformed, and not served until the guest set it up again.
    pub faults: u64,
}

/// The bounds on log lines about a device. A guest can cause as many faults as it likes, which must
/// not hide errors of the system.
#[derive(Debug, Default)]
pub(crate) struct LogLimits {
    /// Of malformed rings.
    pub(crate) faults: LogLimit,
    /// Of errors of the system, the device or the hypervisor.
    errors: LogLimit,
}

/// The counts of all rings of a device, by their indexes, and the bounds on log lines about it.
#[derive(Clone, Debug)]
pub(crate) struct DeviceCounts {
    rings: Arc<[Arc<Padded<QueueCounts>>]>,
    limits: Arc<LogLimits>,
}

impl DeviceCounts {
    /// Counts of zero.
    pub(crate) fn new() -> DeviceCounts {
        let rings = (0..QUEUES_MAX).map(|_| Arc::default()).collect();
        DeviceCounts { rings, limits: Arc::default() }
    }

    /// The counts of a ring, for its thread.
    pub(crate) fn ring(&self, index: usize) -> Arc<Padded<QueueCounts>> {
        Arc::clone(&self.rings[index])
    }

    /// The bounds on log lines about the device.
    pub(crate) fn log_limits(&self) -> Arc<LogLimits> {
        Arc::clone(&self.limits)
    }

    /// Logs the error of a message, or of a ring that no message asks for.
    pub(crate) fn log_error(&self, device: &str, what: &str, error: &Error) {
        let limit = match is_of_guest(error) {
            true => &self.limits.faults,
            false => &self.limits.errors,
        };
        if let Some(count) = limit.due(1, Instant::now()) {
            let more = more_lines(count);
            tracing::warn!(device, "{what}: {error}{more}");
        }
    }

    /// Logs how many lines were left out, when the device is not served any more. Before that the
    /// next line of the same kind says so.
    pub(crate) fn log_rest(&self, device: &str) {
        for limit in [&self.limits.faults, &self.limits.errors] {
            match limit.take() {
                0 => {}
                1 => tracing::warn!(device, "1 line about the device was left out"),
                count => tracing::warn!(device, "{count} lines about the device were left out"),
            }
        }
    }

    /// The indexes of the rings that were served, and their counts.
    pub(crate) fn get(&self) -> Vec<(usize, RingCounts)> {
        let all = self.rings.iter().map(|ring| ring.get()).enumerate();
        all.filter(|(_, counts)| *counts != RingCounts::default()).collect()
    }
}

/// Whether a guest can cause an error, by the place of a ring or its size.
fn is_of_guest(error: &Error) -> bool {
    match error {
        Error::InvalidParam => true,
        Error::ReqHandlerError(error) => error.kind() == ErrorKind::InvalidData,
        _ => false,
    }
}

/// The end of a log line that stands for this many.
pub(crate) fn more_lines(count: u64) -> String {
    match count {
        0 | 1 => String::new(),
        2 => "; 1 more line about the device was left out".to_owned(),
        _ => format!("; {} more lines about the device were left out", count - 1),
    }
}

impl QueueCounts {
    /// The counts now, or a moment ago.
    pub(crate) fn get(&self) -> RingCounts {
        RingCounts {
            requests: self.requests.get(),
            errors: self.errors.get(),
            read_bytes: self.read_bytes.get(),
            written_bytes: self.written_bytes.get(),
            kicks: self.kicks.get(),
            calls: self.calls.get(),
            sleeps: self.sleeps.get(),
            spins_found: self.spins_found.get(),
            spins_empty: self.spins_empty.get(),
            spin_ns: self.spin_ns.get(),
            faults: self.faults.get(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config_space;
    use crate::request::{BlkHeader, BlkStatus, kind};

    /// The bug: a guest was offered blocks of 512 bytes, and an SMR disk with physical blocks of
    /// 4096 bytes failed its writes.
    #[test]
    fn zoned_disk_has_blocks_of_the_physical_length() {
        let zones = ZoneGeometry {
            zone_sectors: 2048,
            zone_capacity_sectors: 2048,
            zone_count: 8,
            conventional_count: 2,
            open_max: 0,
            active_max: 0,
        };
        for (zones, block_bytes) in [(Some(zones), 4096), (None, 512)] {
            let is_zoned = zones.is_some();
            let geometry = Geometry {
                sectors: 8 * 2048,
                logical_block_bytes: 512,
                physical_block_bytes: 4096,
                zones,
            };
            let shape = DeviceShape::new("d", &geometry, &Limits::unlimited(16));
            let config = config_space::print(&shape, 1);
            let field =
                |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| config[at + byte]));
            let write_granularity = if is_zoned { block_bytes } else { 0 };
            assert_eq!((field(20), field(88)), (block_bytes, write_granularity));
            let write = |sector| shape.plan(BlkHeader { kind: kind::OUT, sector }, 512, 0).err();
            let refused = |status| is_zoned.then_some(status);
            assert_eq!(write(0), refused(BlkStatus::IoErr), "of a conventional zone");
            assert_eq!(write(3 * 2048), refused(BlkStatus::ZoneUnalignedWp));
        }
    }
}
