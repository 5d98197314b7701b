//! Leaves that clients' threads read into memory before a write, so that the committer need not
//! read them when it changes the map.

use std::sync::Arc;
use std::time::Instant;

use blockyard_core::Status;
use blockyard_store::SegmentStore;
use blockyard_volume_format::FAN;

use super::VolumeHandle;
use crate::error::VolumeError;
use crate::map::{Leaf, Map, NotResident};

impl<D: SegmentStore> VolumeHandle<D> {
    /// Reads a leaf of the map into memory.
    pub(super) fn fetch(&self, leaf: &Arc<Leaf>) -> Result<(), Status> {
        match self.pool.segments().load(leaf) {
            Ok(_) => Ok(()),
            Err(error) => {
                self.log_unreadable(&error);
                Err(match error {
                    VolumeError::Io { .. } => Status::Medium,
                    _ => Status::Protection,
                })
            }
        }
    }

    /// Logs that a leaf cannot be read: the first such read at once, later ones by their number.
    #[cold]
    fn log_unreadable(&self, error: &VolumeError) {
        let name = &self.volume.meta.name;
        match self.pool.segments().unreadable_pages().due(1, Instant::now()) {
            Some(1) => tracing::error!("{name}: {error}; its {FAN} blocks cannot be read"),
            Some(count) => tracing::error!(
                "{name}: {error}; {count} reads of map pages failed since the last line, and \
                 `blockyard volume scrub` lists the damage"
            ),
            None => tracing::debug!("{name}: {error}; its {FAN} blocks cannot be read"),
        }
    }

    /// Reads the leaves of some blocks of one span into memory, so that a damaged leaf is found
    /// before the write is in the log. Each leaf is read once. If the cache is too small to keep
    /// all of them, the committer reads those that were evicted.
    pub(super) fn prefetch(&self, first: u64, end: u64) -> Result<(), Status> {
        let (number, from) = Map::place(first);
        let to = from + (end - first) as u32;
        let mut block = from;
        while block < to {
            let next = to.min((block / FAN as u32 + 1) * FAN as u32);
            let away = || self.volume.map.with(number, |span| span.away(block, next));
            while let Some(NotResident(leaf)) = away() {
                match self.fetch(&leaf) {
                    Ok(()) => break,
                    Err(status)
                        if away().is_some_and(|NotResident(now)| Arc::ptr_eq(&now, &leaf)) =>
                    {
                        return Err(status);
                    }
                    // The leaf was replaced meanwhile.
                    Err(_) => {}
                }
            }
            block = next;
        }
        Ok(())
    }

    /// Reads the leaves that a range of zeros changes only in part. Leaves that are dropped as a
    /// whole are not read, but counted if the volume has a reservation.
    pub(super) fn prefetch_edges(&self, first: u64, end: u64) -> Result<(), Status> {
        let fan = FAN as u64;
        let edges = [(first, first % fan), (end - 1, end % fan)];
        for (edge, _) in edges.into_iter().filter(|(_, part)| *part > 0) {
            self.prefetch(edge, edge + 1)?;
        }
        if self.volume.reserved_bytes() > 0 {
            self.pool.segments().count_owned(&self.volume.map, first, end - first);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::Options;
    use crate::stepped_pool::SteppedPool;

    /// Regression: a write of blocks in two leaves never ended, because reading one leaf evicted
    /// the other.
    #[test]
    fn a_cache_of_least_length_is_enough_for_a_write_of_two_leaves() {
        let options = Options { map_cache_bytes: 4096, ..Options::default() };
        let mut stepped = SteppedPool::by("one-leaf", 60, options);
        stepped.take("w", 40 * 256);
        for number in 1..40 {
            stepped.write(number * 256 - 4, 8);
        }
        for number in 1..40 {
            stepped.checkpoint();
            stepped.write(number * 256 - 4, 8);
        }
        // Parts of two blocks, whose rest must be read.
        for number in 1..40 {
            stepped.checkpoint();
            let at = number * 256 * 4096 - 512;
            stepped.submit(|handle| handle.write(at, 1024, &|_, bytes| bytes.fill(7), 1, true));
        }
        let live = stepped.pool.find("w").unwrap();
        assert!(live.map.with(0, |span| span.away(0, 40 * 256)).is_some(), "it caches two leaves");
    }
}
