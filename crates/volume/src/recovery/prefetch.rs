//! Prefetches the map leaves that the log changes, by several threads.

use std::collections::HashMap;
use std::sync::Arc;

use blockyard_store::SegmentStore;
use blockyard_volume_format::group::{Descriptor, Kind};

use super::Recovery;
use super::groups::Group;
use super::workers::{THREADS, Workers};
use crate::error::VolumeError;
use crate::map::{Leaf, Map, NotResident};

impl<'a, D: SegmentStore> Recovery<'a, D> {
    /// Reads the leaves that a group changes, if there are many.
    pub(super) fn prefetch<'scope>(
        &self,
        group: &Group,
        workers: &Workers<'scope, '_>,
    ) -> Result<(), VolumeError>
    where
        'a: 'scope,
    {
        let mut leaves: HashMap<*const Leaf, Arc<Leaf>> = HashMap::new();
        for Descriptor { kind, volume, block, .. } in &group.descriptors {
            let live = self.volumes.by_id.get(volume).filter(|_| *kind == Kind::Data);
            let Some(live) = live.filter(|live| *block < live.meta.blocks) else { continue };
            let (span, at) = Map::place(*block);
            if let Some(NotResident(leaf)) = live.map.with(span, |span| span.away(at, at + 1)) {
                leaves.insert(Arc::as_ptr(&leaf), leaf);
            }
        }
        if leaves.len() < THREADS {
            return Ok(());
        }
        let segments = self.segments;
        workers.each(leaves.into_values(), move |leaf| {
            // A read error is reported when the leaf is needed.
            _ = segments.load(&leaf);
            Ok(())
        })
    }
}
