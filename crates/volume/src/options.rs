//! Limits and modes of an open pool. Tests make the limits small, measurements vary the modes.

use blockyard_store::{Commit, StoreKind};

use crate::segments::MAP_CACHE_BYTES;

/// Limits and modes of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Alignment of everything on disk in bytes; used when a pool is made.
    pub align: u32,
    /// Length of a segment in bytes; used when a pool is made.
    pub segment_bytes: u32,
    /// Most segments of the pool.
    pub segments_max: usize,
    /// Memory for writes that are not in the log yet, in bytes.
    pub memory_bytes: u64,
    /// A checkpoint starts after this many bytes of log.
    pub checkpoint_bytes: u64,
    /// A sync is made after this many bytes that no client asked to be durable.
    pub sync_bytes: u64,
    /// Most records in the committer's completion queue.
    pub records_max: u32,
    /// Another group is started while one is in flight only if that one has at least this many
    /// bytes, or the log writer takes short groups.
    pub pipeline_bytes: u32,
    /// How files are read and written.
    pub store: StoreKind,
    /// How writes become durable.
    pub commit: Commit,
    /// Most records in a group; with 1, each record is written and synced by itself.
    pub group_records: usize,
    /// Whether `create` may overwrite a disk that contains something other than a pool.
    pub consent: bool,
    /// Memory for map pages that are on disk too, in bytes.
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
