//! The on-disk format of pools and streams: converts bytes to values and back, without I/O.
//! docs/format.md describes it.

pub mod bytes;
pub mod catalogue;
pub mod entry;
mod error;
pub mod group;
pub mod key_slot;
pub mod label;
pub mod object;
pub mod properties;
pub mod sealed;
pub mod stream;
pub mod superblock;

pub use error::FormatError;

/// The version of the format that this program writes.
pub const VERSION: u32 = 5;

/// The oldest version of the format that this program reads. The next opening of such a pool makes
/// it one of [`VERSION`].
pub const VERSION_OLDEST: u32 = 3;

/// Length of a page of the map or the catalogue, in bytes.
pub const PAGE_BYTES: usize = 4096;

/// Entries of a page of the map or the catalogue.
pub const FAN: usize = 256;

/// Blocks below one node of the map: 256 leaves of 256 blocks.
pub const NODE_BLOCKS: u64 = (FAN * FAN) as u64;

/// Longest block, in bytes.
pub const BLOCK_BYTES_MAX: u32 = 64 << 10;

/// The unit of addresses and lengths on disk, in bytes.
pub const UNIT: u64 = 512;

/// The file name of a segment.
pub fn segment_name(number: usize) -> String {
    format!("segment-{number:08x}")
}
