//! Loads a checkpoint: the catalogue, the roots that it names, and the nodes of all maps. Leaves
//! are read when they are needed.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use blockyard_store::SegmentStore;
use blockyard_volume_format::bytes::crc;
use blockyard_volume_format::catalogue::{self, CATALOGUE_BYTES_MAX, Listed};
use blockyard_volume_format::entry::{ENTRY_BYTES, Entry};
use blockyard_volume_format::superblock::{FILE, Superblock};
use blockyard_volume_format::{FAN, FormatError, PAGE_BYTES};

use super::Recovery;
use crate::error::VolumeError;
use crate::map::{Frozen, Leaf, Map, Node, page};
use crate::record::OpenVolume;

impl<D: SegmentStore> Recovery<'_, D> {
    /// Reads the catalogue and the maps of the checkpoint.
    pub(super) fn load(&mut self) -> Result<(), VolumeError> {
        let Superblock { catalogue: place, catalogue_bytes: len, .. } = self.superblock;
        if place.is_hole() {
            return Ok(());
        }
        if !(1..=CATALOGUE_BYTES_MAX).contains(&len) {
            let (what, field, want) = (FILE, "catalogue_bytes", "1 to 2^30");
            return Err(FormatError::Field { what, field, value: len, want }.into());
        }
        self.segments.want(Some(self.segments.split(place.address()).0 as usize))?;
        let bytes = self.roots.read_tree(self.segments, place, len as usize)?;
        let (found, want) = (crc(&bytes), self.superblock.catalogue_crc);
        if found != want {
            return Err(FormatError::Checksum { what: "catalogue", found, want }.into());
        }
        let (whole, listed) = catalogue::parse(&bytes)?;
        self.segments.want(whole.live.iter().rposition(|bytes| *bytes > 0))?;
        (self.volumes.next_id, self.volumes.copies) = (whole.next_id, whole.copies);
        (self.volumes.scrub, self.volumes.repaired_before) = (whole.scrub, whole.repaired);
        self.volumes.keys = whole.keys.into_iter().map(|slot| (slot.id, slot)).collect();
        self.marks.blocks(&whole.live);
        self.segments.set_live(whole.live, whole.unknown_bytes);
        // Snapshots share most of their nodes and leaves.
        let mut shared = Shared::default();
        let mut maps = Vec::with_capacity(listed.len());
        for Listed { meta, family, copied, owned, holds, properties, roots } in listed {
            if meta.block_bytes < self.superblock.align {
                let (what, field, value) = ("catalogue", "block_bytes", meta.block_bytes.into());
                let want = "the superblock's `align` at least";
                return Err(FormatError::Field { what, field, value, want }.into());
            }
            let frozen = self.nodes(&roots, meta.node_count(), &mut shared)?;
            maps.push(frozen.clone());
            let live = OpenVolume::new(meta, family, Map::new(frozen, copied));
            live.own(owned);
            if !holds.is_empty() {
                self.volumes.holds.insert(live.meta.id, holds);
            }
            self.volumes.set(live.meta.id, properties);
            self.volumes.insert(live);
        }
        self.page_count = self.marks.pages(maps.iter()) + self.roots.count() as u64;
        self.roots.mark(&mut self.marks);
        self.page_place = self.behind(place, &maps);
        Ok(())
    }

    /// Where the next checkpoint continues: after all pages of this one in the segment of the
    /// catalogue's top page, which was written last. A full pool has no new segment for each
    /// opening.
    fn behind(&self, top: Entry, maps: &[Frozen]) -> Option<(u32, u32)> {
        let (segment, _) = self.segments.split(top.address());
        let (mut end, mut seen) = (0, HashSet::new());
        let mut look = |location: Entry| {
            let (number, offset) = self.segments.split(location.address());
            if number == segment {
                end = end.max(offset + u64::from(location.stored_bytes()));
            }
        };
        self.roots.locations().copied().for_each(&mut look);
        for node in maps.iter().flatten().flatten() {
            // Snapshots share most nodes.
            if seen.insert(Arc::as_ptr(node)) {
                node.location().into_iter().for_each(&mut look);
                node.leaves().filter_map(|(_, leaf)| leaf.location()).for_each(&mut look);
            }
        }
        let end = end.next_multiple_of(u64::from(self.superblock.align).max(PAGE_BYTES as u64));
        (end < u64::from(self.segments.bytes())).then_some((segment, end as u32))
    }

    /// Reads the nodes of a map.
    fn nodes(
        &mut self,
        roots: &[Entry],
        count: usize,
        shared: &mut Shared,
    ) -> Result<Frozen, VolumeError> {
        let mut frozen = Frozen::new();
        for root in roots {
            let left = FAN.min(count - frozen.len());
            if root.is_hole() {
                frozen.resize(frozen.len() + left, None);
                continue;
            }
            let locations = match shared.roots.get(root) {
                Some(locations) => Arc::clone(locations),
                None => {
                    let page = self.roots.read(self.segments, *root)?;
                    let locations = parse_root(&page).ok_or_else(|| {
                        let (what, field, value) = ("root of a map", "entry", root.address());
                        FormatError::Field { what, field, value, want: "a place on disk" }
                    })?;
                    let locations = Arc::new(locations);
                    shared.roots.insert(*root, Arc::clone(&locations));
                    locations
                }
            };
            for location in &locations[..left] {
                frozen.push(match location.is_hole() {
                    true => None,
                    false => Some(self.node(*location, shared)?),
                });
            }
        }
        Ok(frozen)
    }

    /// Reads a node, without its leaves.
    fn node(&self, location: Entry, shared: &mut Shared) -> Result<Arc<Node>, VolumeError> {
        if let Some(node) = shared.nodes.get(&location) {
            return Ok(Arc::clone(node));
        }
        let impossible = || FormatError::Field {
            what: "page of the map",
            field: "entry",
            value: location.address(),
            want: "a place on disk",
        };
        let bytes = self.segments.read_page(location)?;
        let locations = page::parse_node(&bytes).ok_or_else(impossible)?;
        let end = self.segments.address(self.segments.counts().all as u32, 0);
        let mut node = Node::default();
        for (at, leaf) in locations.into_iter().enumerate() {
            let Some((location, birth)) = leaf else { continue };
            if location.address() >= end {
                let (what, field) = ("page of the map", "leaf");
                let (value, want) = (location.address(), "a place in a segment that is there");
                return Err(FormatError::Field { what, field, value, want }.into());
            }
            let leaf = shared.leaves.entry((location, birth));
            node.put(at, Arc::clone(leaf.or_insert_with(|| Arc::new(Leaf::at(location, birth)))));
        }
        node.settle(location);
        let node = Arc::new(node);
        shared.nodes.insert(location, Arc::clone(&node));
        Ok(node)
    }
}

/// Pages that were read, by their addresses, so that volumes share them.
#[derive(Default)]
struct Shared {
    roots: HashMap<Entry, Arc<Vec<Entry>>>,
    nodes: HashMap<Entry, Arc<Node>>,
    leaves: HashMap<(Entry, u32), Arc<Leaf>>,
}

/// The entries of a root page; `None` if one is invalid.
fn parse_root(page: &[u8]) -> Option<Vec<Entry>> {
    page.chunks_exact(ENTRY_BYTES).map(Entry::parse).collect()
}
