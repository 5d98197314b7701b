//! What a virtual machine may know of a device: its size, its limits, its zones.

use blockyard_core::{Disk, ZoneGeometry};
use blockyard_sync::counter::Counter;

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

/// The counts of a ring's requests. The thread of the ring writes them, any thread reads them.
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
}
