//! The state of a pool, open or not: its space, its copies and its counters, for metrics and for
//! `show`.

use std::path::PathBuf;
use std::sync::Arc;

use blockyard_store::remote::UploadStatus;
use blockyard_store::{CopyStatus, PoolBacking, SegmentStore as _};
use blockyard_volume_format::catalogue::{ScrubRecord, VolumeMeta};

use crate::activity::Activity;
use crate::error::VolumeError;
use crate::options::Options;
use crate::pool::Volumes;
use crate::record::OpenVolume;
use crate::recovery::{self, ReadOnlyPool};
use crate::running::Running;
use crate::segments::{LIVE_TENTHS, RESERVE, Segments};

/// The state of a pool, for `show` and metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolStatus {
    /// Length of a segment in bytes.
    pub segment_bytes: u64,
    /// Number of segments, without those that gave their space back to the file system.
    pub segments: u64,
    /// Free segments, including those that the next checkpoint frees.
    pub segments_free: u64,
    /// Segments in use by the share of their bytes that is live blocks, in tenths.
    pub segments_by_live: [u64; LIVE_TENTHS],
    /// Segments that only checkpoints and cleaning may take.
    pub segments_reserved: u64,
    /// Free bytes of the file system or disk that holds the pool, into which the pool can grow.
    pub outside_free_bytes: u64,
    /// Bytes of live blocks, plus twice the bytes of map pages.
    pub used_bytes: u64,
    /// Bytes that can still be written, including those for which the pool can grow, without
    /// reserves.
    pub available_bytes: u64,
    /// Bytes that are reserved for volumes and that these have not written.
    pub unused_reserved_bytes: u64,
    /// Bytes of live blocks, and of map pages once: what is not garbage in the segments in use.
    pub live_bytes: u64,
    /// The last scrub that was completed.
    pub scrub: Option<ScrubRecord>,
    /// Blocks and map pages that were repaired from the other copy since the pool was made.
    pub repaired: u64,
    /// Number of volumes and snapshots.
    pub volumes: u64,
    /// A write or a sync failed: the pool accepts no more writes (it is latched).
    pub latched: bool,
    /// The state of each copy, if the pool has two.
    pub copies: Vec<CopyStatus>,
    /// How a pool in an object store acknowledges syncs, and what the object store lacks.
    pub upload: Option<UploadStatus>,
    /// Counters since the pool was opened.
    pub activity: Activity,
}

impl PoolStatus {
    fn new(
        segments: &Segments<PoolBacking>,
        volumes: &Volumes,
        latched: bool,
        activity: Activity,
    ) -> Result<PoolStatus, VolumeError> {
        let counts = segments.counts();
        let (used_bytes, available_bytes) = segments.used_and_left_bytes();
        Ok(PoolStatus {
            segment_bytes: segments.bytes().into(),
            segments: (counts.all - counts.hollow) as u64,
            segments_free: (counts.free + counts.idle) as u64,
            segments_by_live: segments.counts_by_live(),
            segments_reserved: RESERVE as u64,
            outside_free_bytes: segments.directory().free_bytes()?,
            used_bytes,
            available_bytes,
            unused_reserved_bytes: volumes.unused_reserved_bytes(),
            live_bytes: segments.stored_bytes(),
            scrub: volumes.last_scrub(),
            repaired: volumes.repaired_before.saturating_add(segments.repaired_count()),
            volumes: volumes.list().len() as u64,
            latched,
            copies: segments.directory().copy_status(),
            upload: segments.directory().upload_status(),
            activity,
        })
    }
}

impl Running {
    /// The state of this pool.
    ///
    /// # Errors
    /// If the system does not report the free space.
    pub fn status(&self) -> Result<PoolStatus, VolumeError> {
        let pool = self.pool();
        PoolStatus::new(pool.segments(), &pool.volumes(), pool.is_latched(), pool.activity())
    }
}

impl ReadOnlyPool<PoolBacking> {
    /// Opens a pool that no process has open, and changes nothing. A stale copy is not resynced.
    ///
    /// # Errors
    /// If the pool is too damaged to be opened.
    pub fn open(directory: PoolBacking) -> Result<Self, VolumeError> {
        recovery::look(directory, &Options::default())
    }

    /// The path of the pool.
    pub fn path(&self) -> PathBuf {
        self.segments.directory().path()
    }

    /// The volumes and snapshots.
    pub fn list(&self) -> Vec<VolumeMeta> {
        self.volumes.list()
    }

    /// Finds a volume or snapshot by name.
    ///
    /// # Errors
    /// If the pool has none of this name.
    pub fn find(&self, name: &str) -> Result<Arc<OpenVolume>, VolumeError> {
        let found = self.volumes.find(name).cloned();
        found.ok_or_else(|| VolumeError::NoSuchVolume { name: name.to_owned() })
    }

    /// The table of volumes and snapshots.
    pub fn volumes(&self) -> &Volumes {
        &self.volumes
    }

    /// The segments of the pool.
    pub fn segments(&self) -> &Segments<PoolBacking> {
        &self.segments
    }

    /// The state of the copies, if the pool has two.
    pub fn copies(&self) -> Vec<CopyStatus> {
        self.segments.directory().copy_status()
    }

    /// The state of this pool, without counters of activity.
    ///
    /// # Errors
    /// If the system does not report the free space.
    pub fn status(&self) -> Result<PoolStatus, VolumeError> {
        let activity = Activity { number: self.number, ..Activity::default() };
        PoolStatus::new(&self.segments, &self.volumes, false, activity)
    }
}
