//! The state of an open pool: its space, its copies and its counters, for metrics and for `show`.

use blockyard_store::{CopyStatus, SegmentStore as _};

use crate::activity::Activity;
use crate::error::VolumeError;
use crate::running::Running;
use crate::segments::RESERVE;

/// The state of a pool, for `show` and metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolStatus {
    /// Length of a segment in bytes.
    pub segment_bytes: u64,
    /// Number of segments, without those that gave their space back to the file system.
    pub segments: u64,
    /// Free segments, including those that the next checkpoint frees.
    pub segments_free: u64,
    /// Segments that only checkpoints and cleaning may take.
    pub segments_reserved: u64,
    /// Free bytes of the file system or disk that holds the pool, into which the pool can grow.
    pub outside_free_bytes: u64,
    /// Bytes of live blocks, plus twice the bytes of map pages.
    pub used_bytes: u64,
    /// Bytes that can still be written, including those for which the pool can grow, without
    /// reserves.
    pub available_bytes: u64,
    /// Number of volumes and snapshots.
    pub volumes: u64,
    /// A write or a sync failed: the pool accepts no more writes (it is latched).
    pub latched: bool,
    /// The state of each copy, if the pool has two.
    pub copies: Vec<CopyStatus>,
    /// Counters since the pool was opened.
    pub activity: Activity,
}

impl Running {
    /// The state of this pool.
    ///
    /// # Errors
    /// If the system does not report the free space.
    pub fn status(&self) -> Result<PoolStatus, VolumeError> {
        let pool = self.pool();
        let counts = pool.counts();
        let (used_bytes, available_bytes) = pool.segments().used_and_left_bytes();
        Ok(PoolStatus {
            segment_bytes: pool.segments().bytes().into(),
            segments: (counts.all - counts.hollow) as u64,
            segments_free: (counts.free + counts.idle) as u64,
            segments_reserved: RESERVE as u64,
            outside_free_bytes: pool.segments().directory().free_bytes()?,
            used_bytes,
            available_bytes,
            volumes: pool.list().len() as u64,
            latched: pool.is_latched(),
            copies: pool.segments().directory().copy_status(),
            activity: pool.activity(),
        })
    }
}
