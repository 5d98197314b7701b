//! How much of a pool a volume or snapshot refers to.

use blockyard_store::PoolBacking;
use blockyard_volume::record::OpenVolume;
use blockyard_volume::segments::Segments;
use blockyard_volume::{ReadOnlyPool, Running, VolumeError};
use blockyard_volume_format::catalogue::VolumeMeta;
use blockyard_volume_format::entry::Entry;

/// The data that a volume or snapshot refers to, including shared data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The volume.
    pub meta: VolumeMeta,
    /// Blocks that are not holes.
    pub blocks: u64,
    /// Bytes of these blocks as stored.
    pub stored_bytes: u64,
}

/// Counts the data that a volume or snapshot of an open pool refers to, by walking its map.
///
/// # Errors
/// If there is none of this name.
pub fn usage(running: &Running, name: &str) -> Result<Usage, VolumeError> {
    let live = running.pool().find(name)?;
    running.pool().settle();
    count(running.pool().segments(), &live)
}

/// Counts the data that a volume or snapshot of a pool refers to that is opened for reading only.
///
/// # Errors
/// If there is none of this name.
pub fn usage_read_only(pool: &ReadOnlyPool<PoolBacking>, name: &str) -> Result<Usage, VolumeError> {
    let live = pool.find(name)?;
    count(pool.segments(), &live)
}

fn count(segments: &Segments<PoolBacking>, live: &OpenVolume) -> Result<Usage, VolumeError> {
    let mut usage = Usage { meta: live.listed(), blocks: 0, stored_bytes: 0 };
    for (number, node) in live.map.freeze().iter().enumerate() {
        for (at, leaf) in node.iter().flat_map(|node| node.leaves()) {
            let page = segments.page_now(&live.map, (number, at), leaf)?;
            let is_there = |entry: &&Entry| !entry.is_hole() && !entry.is_lost();
            for entry in page.entries().iter().filter(is_there) {
                usage.blocks += 1;
                usage.stored_bytes += u64::from(entry.stored_bytes());
            }
        }
    }
    Ok(usage)
}
