//! What a virtual machine may know of a device: its size, its limits, its zones.

use std::sync::Arc;

use blockyard_core::{Disk, ZoneGeometry};
use blockyard_sync::counter::Counter;
use blockyard_sync::pad::Padded;

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
        let (geometry, limits) = (disk.geometry(), disk.limits());
        let block_sectors = geometry.block_sectors();
        let whole = |sectors: u64| sectors.min(SECTORS_MAX) / block_sectors * block_sectors;
        let mut id = [0; ID_BYTES];
        for (byte, of_name) in id.iter_mut().zip(disk.name().bytes()) {
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
}

/// The counts of all rings of a device, by their indexes.
#[derive(Clone, Debug)]
pub(crate) struct DeviceCounts(Arc<[Arc<Padded<QueueCounts>>]>);

impl DeviceCounts {
    /// Counts of zero.
    pub(crate) fn new() -> DeviceCounts {
        DeviceCounts((0..QUEUES_MAX).map(|_| Arc::default()).collect())
    }

    /// The counts of a ring, for its thread.
    pub(crate) fn ring(&self, index: usize) -> Arc<Padded<QueueCounts>> {
        Arc::clone(&self.0[index])
    }

    /// The indexes of the rings that were served, and their counts.
    pub(crate) fn get(&self) -> Vec<(usize, RingCounts)> {
        let all = self.0.iter().map(|ring| ring.get()).enumerate();
        all.filter(|(_, counts)| *counts != RingCounts::default()).collect()
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
        }
    }
}
