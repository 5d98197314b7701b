//! What a pool is made for, and how its addresses are divided by that.

use std::fmt;
use std::num::NonZeroU32;

use blockyard_sync::entry_words::{OBJECT_BYTES_MAX, PLACES_MAX};

use super::layout::{Layout, UNIT_BYTES};
use super::memory::{HUGE_BYTES, PAGE_BYTES};
use super::shares;

/// What the largest object may be longer than a word can say.
const TAIL_BYTES_MAX: usize = 4;
/// Usual size of a segment, in bytes.
const SEGMENT_BYTES: usize = 256 << 10;
/// Objects of the largest size that a segment holds at least.
const SEGMENT_OBJECTS: usize = 16;
/// Most bytes of addresses that a shard can have: its offsets are 32 bits.
const SHARD_BYTES_MAX: u64 = (UNIT_BYTES as u64) << 32;
/// Most shards, unless so many addresses are wanted that they take more.
const SHARDS_MAX: usize = 16;
/// Segments that a shard can have beyond its part of what is wanted.
const SEGMENTS_SPARE: u64 = 8;
/// One part in so many of the limit is left to compaction, which needs room to make room.
pub(super) const RESERVE_PART: u32 = 64;
/// What a pool is made for.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Bytes of the device, uncompressed: the pool has addresses for twice as much.
    pub device_bytes: u64,
    /// The largest object, in bytes: the block size. At most 65536, and four for a checksum: then
    /// there are none between.
    pub object_bytes_max: usize,
    /// Most bytes that the pool may take from the system, rounded down to pages.
    pub limit_bytes: Option<u64>,
    /// Most channels and background workers at a time.
    pub seats_max: u32,
    /// Into how many parts it is cut, rounded up to a power of two; `None` for one per processor.
    pub shards: Option<NonZeroU32>,
    /// Size of a segment in bytes, rounded up to a power of two; `None` for 256 KiB, less if the
    /// limit is small, or 16 of the largest objects.
    pub segment_bytes: Option<usize>,
    /// Whether several words can refer to one object: each object has a count of them then, of 4
    /// bytes.
    pub counted: bool,
}

impl PoolConfig {
    /// For a device of so many bytes in blocks of so many; everything else as usual.
    pub fn new(device_bytes: u64, block_bytes: usize) -> PoolConfig {
        PoolConfig {
            device_bytes,
            object_bytes_max: block_bytes,
            limit_bytes: None,
            seats_max: 1024,
            shards: None,
            segment_bytes: None,
            counted: false,
        }
    }

    /// How its addresses are divided.
    ///
    /// # Errors
    /// If objects cannot be that large.
    pub(super) fn layout(&self) -> Result<Layout, PoolError> {
        let object = self.object_bytes_max;
        if !(1..=OBJECT_BYTES_MAX + TAIL_BYTES_MAX).contains(&object) {
            return Err(PoolError::ObjectBytes { bytes: object });
        }
        let head = if self.counted { shares::COUNT_BYTES } else { 0 };
        let whole = object + head;
        // A small limit takes small segments: half of what is kept for compaction is one of them.
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
        // What a shard fills can become huge pages, if it is that much.
        let is_large = wanted / shards >= HUGE_BYTES as u64;
        let stretch = if is_large { (HUGE_BYTES / segment).max(1) } else { 1 };
        Ok(Layout::new(shards as u32, segment_units, stretch as u32, each as u32, object, head))
    }
}

/// Why there is no pool.
#[derive(Debug)]
#[non_exhaustive]
pub enum PoolError {
    /// An object cannot be that large.
    ObjectBytes {
        /// What was asked for.
        bytes: usize,
    },
    /// The system does not reserve so many addresses.
    Addresses {
        /// How many bytes were asked for.
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
