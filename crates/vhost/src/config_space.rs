//! The configuration space and the features of virtio-blk: VIRTIO 1.3, 5.2.3 and 5.2.4.

use crate::device::DeviceShape;
use crate::request::RANGES_MAX;

/// The length of the configuration space with the fields of zoned devices, in bytes.
pub const CONFIG_BYTES: usize = 96;
/// The most data buffers of one request: a ring of 128 entries, as QEMU's is by default, has room
/// for them, the header and the status without tables of descriptors.
pub const SEGMENTS_MAX: u32 = 126;

/// Feature bits.
pub mod feature {
    #![expect(missing_docs, reason = "the names are those of the standard")]
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    pub const ZONED: u64 = 1 << 17;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    /// Of vhost-user, not of the device.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
}

/// The features that a device offers.
pub fn features(shape: &DeviceShape) -> u64 {
    use feature::*;
    let always = SEG_MAX
        | BLK_SIZE
        | FLUSH
        | TOPOLOGY
        | MQ
        | INDIRECT_DESC
        | EVENT_IDX
        | PROTOCOL_FEATURES
        | VERSION_1;
    let if_so = |is_so: bool, feature: u64| if is_so { feature } else { 0 };
    // VIRTIO 1.3, 5.2.5.2: a zoned device is reset by zones, and a driver ignores its discards.
    let is_zoned = shape.zones.is_some();
    always
        | if_so(shape.read_only, RO)
        | if_so(shape.discard_sectors_max > 0 && !shape.read_only && !is_zoned, DISCARD)
        | if_so(shape.write_zeroes_sectors_max > 0 && !shape.read_only, WRITE_ZEROES)
        | if_so(is_zoned, ZONED)
}

/// Prints the configuration space: VIRTIO 1.3, 5.2.4, `struct virtio_blk_config`.
pub fn print(shape: &DeviceShape, queues: u16) -> [u8; CONFIG_BYTES] {
    let mut bytes = [0; CONFIG_BYTES];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    let field32 = |value: u64| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
    put(0, &shape.sectors.to_le_bytes());
    put(12, &SEGMENTS_MAX.to_le_bytes());
    put(20, &field32(shape.block_sectors * 512));
    // The exponent of the physical block's length in logical blocks.
    let blocks = (shape.physical_block_sectors / shape.block_sectors).max(1);
    put(24, &[blocks.ilog2() as u8]); // Below 64.
    put(26, &u16::try_from(blocks).unwrap_or(u16::MAX).to_le_bytes());
    put(34, &queues.to_le_bytes());
    put(36, &field32(shape.discard_sectors_max));
    put(40, &RANGES_MAX.to_le_bytes());
    put(44, &field32(shape.physical_block_sectors.max(shape.block_sectors)));
    put(48, &field32(shape.write_zeroes_sectors_max));
    put(52, &RANGES_MAX.to_le_bytes());
    // A write-zeroes with the flag `unmap` may deallocate.
    put(56, &[1]);
    if let Some(zones) = &shape.zones {
        const HOST_MANAGED: u8 = 1;
        put(72, &field32(zones.zone_sectors));
        put(76, &zones.open_max.to_le_bytes());
        put(80, &zones.active_max.to_le_bytes());
        put(84, &field32(shape.append_sectors_max));
        put(88, &field32(shape.block_sectors * 512));
        put(92, &[HOST_MANAGED]);
    }
    bytes
}
