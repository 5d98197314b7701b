//! Prefetches the map leaves that the log changes, by several threads.

use std::collections::HashMap;
use std::sync::Arc;

use super::Recovery;
use super::crew::{Crew, THREADS};
use super::groups::Group;
use crate::error::VolumeError;
use crate::format::group::{Descriptor, Kind};
use crate::map::{Away, Leaf, Map};
use crate::store::Directory;

impl<'a, D: Directory> Recovery<'a, D> {
    /// Reads the leaves that a group changes, if there are many.
    pub(super) fn bring<'scope>(
        &self,
        group: &Group,
        crew: &Crew<'scope, '_>,
    ) -> Result<(), VolumeError>
    where
        'a: 'scope,
    {
        let mut leaves: HashMap<*const Leaf, Arc<Leaf>> = HashMap::new();
        for Descriptor { kind, volume, block, .. } in &group.descriptors {
            let live = self.volumes.by_id.get(volume).filter(|_| *kind == Kind::Data);
            let Some(live) = live.filter(|live| *block < live.traits.blocks) else { continue };
            let (span, at) = Map::place(*block);
            if let Some(Away(leaf)) = live.map.with(span, |span| span.away(at, at + 1)) {
                leaves.insert(Arc::as_ptr(&leaf), leaf);
            }
        }
        if leaves.len() < THREADS {
            return Ok(());
        }
        let segments = self.segments;
        crew.each(leaves.into_values(), move |leaf| {
            // A read error is reported when the leaf is needed.
            _ = segments.load(&leaf);
            Ok(())
        })
    }
}
