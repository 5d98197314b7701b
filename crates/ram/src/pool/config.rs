//! Configuration of a pool, and how it divides the pool's addresses.

use std::fmt;
use std::num::NonZeroU32;

use blockyard_sync::block_table::{OBJECT_BYTES_MAX, PLACES_MAX};

use super::layout::{COUNT_BYTES, Layout, UNIT_BYTES};
use super::memory::{HUGE_BYTES, PAGE_BYTES};

/// Bytes by which the largest object may exceed the length field of a word: a checksum.
const TAIL_BYTES_MAX: usize = 4;
/// Usual size of a segment, in bytes.
const SEGMENT_BYTES: usize = 256 << 10;
/// Minimum number of objects of the largest size that fit in a segment.
const SEGMENT_OBJECTS: usize = 16;
/// Maximum address range of a shard in bytes: offsets in a shard have 32 bits.
const SHARD_BYTES_MAX: u64 = (UNIT_BYTES as u64) << 32;
/// Maximum number of shards, unless the address range needs more.
const SHARDS_MAX: usize = 16;
/// Segments that a shard can have in addition to its part of the address range.
const SEGMENTS_SPARE: u64 = 8;
/// 1/64 of the limit is reserved for compaction, which needs free space to work.
pub(super) const RESERVE_PART: u32 = 64;
/// Configuration of a pool.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Uncompressed size of the device in bytes: the pool reserves twice this address range.
    pub device_bytes: u64,
    /// The largest object in bytes, which is the block size. At most 65536, plus 4 for a checksum.
    /// A word stores lengths up to 65536; in a pool with larger objects, 65536 stands for the
    /// largest length, and no object may have a length in between.
    pub object_bytes_max: usize,
    /// Limit on the memory that the pool takes from the system, in bytes; rounded down to pages.
    pub limit_bytes: Option<u64>,
    /// Maximum number of channels and background workers at a time.
    pub slots_max: u32,
    /// Number of shards, rounded up to a power of two; `None` for one per CPU.
    pub shards: Option<NonZeroU32>,
    /// Segment size in bytes, rounded up to a power of two. `None` for 256 KiB, or less with a
    /// small limit, or the size of 16 of the largest objects.
    pub segment_bytes: Option<usize>,
    /// Whether several words can refer to one object. Each object then has a refcount of 4 bytes.
    pub counted: bool,
}

impl PoolConfig {
    /// A configuration for a device of `device_bytes` with these blocks; the rest has defaults.
    pub fn new(device_bytes: u64, block_bytes: usize) -> PoolConfig {
        PoolConfig {
            device_bytes,
            object_bytes_max: block_bytes,
            limit_bytes: None,
            slots_max: 1024,
            shards: None,
            segment_bytes: None,
            counted: false,
        }
    }

    /// Computes the division of the addresses.
    ///
    /// # Errors
    /// If `object_bytes_max` is out of range.
    pub(super) fn layout(&self) -> Result<Layout, PoolError> {
        let object = self.object_bytes_max;
        if !(1..=OBJECT_BYTES_MAX + TAIL_BYTES_MAX).contains(&object) {
            return Err(PoolError::ObjectBytes { bytes: object });
        }
        let head = if self.counted { COUNT_BYTES } else { 0 };
        let whole = object + head;
        // With a small limit, segments are small: one segment is half of the reserve for
        // compaction.
        let limit = self.limit_bytes.unwrap_or(u64::MAX) / u64::from(2 * RESERVE_PART);
        let usual = limit.min(SEGMENT_BYTES as u64) as usize;
        let segment = self.segment_bytes.unwrap_or(usual.max(object * SEGMENT_OBJECTS));
        let segment = segment.max(whole).max(PAGE_BYTES).next_power_of_two();
        let most = PLACES_MAX * UNIT_BYTES as u64;
        let wanted = self.device_bytes.saturating_mul(2).clamp(segment as u64, most);
        let processors = || std::thread::available_parallelism().map_or(1, usize::from);
        let shards = match self.shards {
            Some(shards) => u64::from(shards.get()),
            None => processors().min(SHARDS_MAX) as u64,
        };
        let shards = shards.max(wanted.div_ceil(SHARD_BYTES_MAX)).next_power_of_two();
        let each = (wanted / shards).div_ceil(segment as u64) + SEGMENTS_SPARE;
        let each = each.min(SHARD_BYTES_MAX.min(most / shards) / segment as u64);
        let segment_units = (segment / UNIT_BYTES) as u32;
        // A large shard is divided into stretches that can become huge pages.
        let is_large = wanted / shards >= HUGE_BYTES as u64;
        let stretch = if is_large { (HUGE_BYTES / segment).max(1) } else { 1 };
        Ok(Layout::new(shards as u32, segment_units, stretch as u32, each as u32, object, head))
    }
}

/// Why a pool cannot be created.
#[derive(Debug)]
#[non_exhaustive]
pub enum PoolError {
    /// The largest object is out of range.
    ObjectBytes {
        /// The requested size.
        bytes: usize,
    },
    /// The system does not reserve the address range.
    Addresses {
        /// The requested size in bytes.
        bytes: u64,
        /// The system's error number.
        errno: i32,
    },
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PoolError::ObjectBytes { bytes } => {
                write!(
                    f,
                    "block size {bytes}: must be 1 to {} bytes",
                    OBJECT_BYTES_MAX + TAIL_BYTES_MAX
                )
            }
            PoolError::Addresses { bytes, errno } => write!(
                f,
                "the system does not reserve {bytes} bytes of addresses for the pool: {}; a \
                 smaller size needs fewer",
                std::io::Error::from_raw_os_error(*errno)
            ),
        }
    }
}

impl std::error::Error for PoolError {}
