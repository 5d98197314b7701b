//! The bounds of a pool, which its tests make small and measurements choose.

use crate::segments::MAP_CACHE_BYTES;
use crate::store::{Commit, StoreKind};

/// Bounds of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// What everything on disk is a multiple of, in bytes; of a pool that is made.
    pub align: u32,
    /// Length of a segment in bytes; of a pool that is made.
    pub segment_bytes: u32,
    /// Most segments.
    pub segments_max: usize,
    /// Memory for what is on its way into the log, in bytes.
    pub memory_bytes: u64,
    /// A checkpoint is made after so many bytes of log.
    pub checkpoint_bytes: u64,
    /// A sync is made after so many bytes that nobody has asked to be durable.
    pub sync_bytes: u64,
    /// Most records in the committer's mailbox.
    pub records_max: u32,
    /// Another group is begun behind one that is on its way only if that is at least as long as
    /// this, in bytes.
    pub pipeline_bytes: u32,
    /// By what files are read and written.
    pub store: StoreKind,
    /// How writes become durable.
    pub commit: Commit,
    /// Most records in a group; 1 makes each durable by itself, one after the other.
    pub group_records: usize,
    /// What a disk has that is no pool may be overwritten by one that is made.
    pub consent: bool,
    /// Memory for pages of maps that are on disk too, in bytes.
    pub map_cache_bytes: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            align: 4096,
            segment_bytes: 32 << 20,
            segments_max: 1 << 22,
            memory_bytes: 64 << 20,
            checkpoint_bytes: 256 << 20,
            sync_bytes: 64 << 20,
            records_max: 1 << 13,
            pipeline_bytes: 256 << 10,
            store: StoreKind::Auto,
            commit: Commit::Group,
            group_records: 1000,
            consent: false,
            map_cache_bytes: MAP_CACHE_BYTES,
        }
    }
}
