//! Loads a checkpoint: the catalogue, the roots that it names, and the nodes of all maps. Leaves
//! are read when they are needed.
#![allow(clippy::disallowed_types)] // A flag of an opening, which waits for the disk.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockyard_store::SegmentStore;
use blockyard_volume_format::bytes::crc;
use blockyard_volume_format::catalogue::{self, CATALOGUE_BYTES_MAX, Listed};
use blockyard_volume_format::entry::{ENTRY_BYTES, Entry};
use blockyard_volume_format::superblock::{FILE, Superblock};
use blockyard_volume_format::{FAN, FormatError, PAGE_BYTES};

use super::Recovery;
use super::workers::Workers;
use crate::error::VolumeError;
use crate::map::{Frozen, Leaf, Map, Node, page};
use crate::record::OpenVolume;
use crate::roots::Roots;
use crate::segments::Segments;

/// Pages are read by several threads from this number on: below it they take a few milliseconds of
/// a disk.
const PARALLEL_FROM: usize = 64;

/// Pages that are read before the first of them is parsed, which bounds their memory to 4 MiB.
const AT_ONCE: usize = 1024;

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
        let shared = self.read_maps(&listed)?;
        let mut maps = Vec::with_capacity(listed.len());
        for Listed { meta, family, copied, owned, holds, properties, roots } in listed {
            if meta.block_bytes < self.superblock.align {
                let (what, field, value) = ("catalogue", "block_bytes", meta.block_bytes.into());
                let want = "the superblock's `align` at least";
                return Err(FormatError::Field { what, field, value, want }.into());
            }
            let frozen = shared.map(&roots, meta.node_count());
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

    /// Reads the roots and nodes of all maps, each once, without the leaves.
    fn read_maps(&mut self, listed: &[Listed]) -> Result<Shared, VolumeError> {
        let (segments, upper) = (self.segments, &mut self.roots);
        // In order, with the number of entries of each root that name nodes.
        let (mut roots, mut counts) = (Vec::new(), HashMap::<Entry, usize>::new());
        for Listed { meta, roots: of_map, .. } in listed {
            for (at, root) in of_map.iter().enumerate().filter(|(_, root)| !root.is_hole()) {
                Roots::check(*root)?;
                let left = FAN.min(meta.node_count().saturating_sub(at * FAN));
                let count = counts.entry(*root).or_insert_with(|| {
                    roots.push(*root);
                    0
                });
                *count = left.max(*count);
            }
        }
        let mut shared = Shared::default();
        each_page(segments, &roots, |root, page| {
            let impossible = || {
                let (what, field, value) = ("root of a map", "entry", root.address());
                FormatError::Field { what, field, value, want: "a place on disk" }
            };
            let mut locations = parse_root(page).ok_or_else(impossible)?;
            locations.truncate(counts[&root]);
            let last = locations.iter().rposition(|location| !location.is_hole());
            locations.truncate(last.map_or(0, |last| last + 1));
            locations.shrink_to_fit();
            upper.put(page, root);
            shared.roots.insert(root, locations);
            Ok(())
        })?;
        let mut seen = HashSet::new();
        let nodes = roots.iter().flat_map(|root| &shared.roots[root]);
        let nodes: Vec<Entry> =
            nodes.filter(|node| !node.is_hole() && seen.insert(**node)).copied().collect();
        each_page(segments, &nodes, |location, page| {
            let node = node(segments, location, page, &mut shared.leaves)?;
            shared.nodes.insert(location, node);
            Ok(())
        })?;
        Ok(shared)
    }
}

/// Reads pages, several at once if there are many, and passes each to `take`. Begins no read after
/// one has failed: a store that does not answer takes a minute for each.
fn each_page<D: SegmentStore>(
    segments: &Segments<D>,
    locations: &[Entry],
    mut take: impl FnMut(Entry, &[u8]) -> Result<(), VolumeError>,
) -> Result<(), VolumeError> {
    if locations.len() < PARALLEL_FROM {
        let mut locations = locations.iter();
        return locations.try_for_each(|at| take(*at, &segments.read_page(*at)?));
    }
    let has_failed = AtomicBool::new(false);
    // Relaxed: the results themselves come by a channel.
    let read = |at| {
        let page = (!has_failed.load(Ordering::Relaxed)).then(|| segments.read_page(at))?;
        has_failed.fetch_or(page.is_err(), Ordering::Relaxed);
        Some((at, page))
    };
    std::thread::scope(|scope| {
        let workers = Workers::new(scope);
        for some in locations.chunks(AT_ONCE) {
            let pages = workers.all(some.iter().copied(), read);
            let pages = pages.map_err(VolumeError::io("cannot read the maps"))?;
            // Some are missing only if the read of another one has failed.
            for (at, page) in pages.into_iter().flatten() {
                take(at, &page?)?;
            }
        }
        Ok(())
    })
}

/// Parses a node, without its leaves.
fn node<D: SegmentStore>(
    segments: &Segments<D>,
    location: Entry,
    page: &[u8],
    leaves: &mut HashMap<(Entry, u32), Arc<Leaf>>,
) -> Result<Arc<Node>, VolumeError> {
    let impossible = || FormatError::Field {
        what: "page of the map",
        field: "entry",
        value: location.address(),
        want: "a place on disk",
    };
    let locations = page::parse_node(page).ok_or_else(impossible)?;
    let end = segments.address(segments.counts().all as u32, 0);
    let mut node = Node::default();
    for (at, leaf) in locations.into_iter().enumerate() {
        let Some((location, birth)) = leaf else { continue };
        if location.address() >= end {
            let (what, field) = ("page of the map", "leaf");
            let (value, want) = (location.address(), "a place in a segment that is there");
            return Err(FormatError::Field { what, field, value, want }.into());
        }
        let leaf = leaves.entry((location, birth));
        node.put(at, Arc::clone(leaf.or_insert_with(|| Arc::new(Leaf::at(location, birth)))));
    }
    node.settle(location);
    Ok(Arc::new(node))
}

/// Pages that were read, by their addresses, so that volumes share them.
#[derive(Default)]
struct Shared {
    /// The nodes of each root, up to the last that exists.
    roots: HashMap<Entry, Vec<Entry>>,
    nodes: HashMap<Entry, Arc<Node>>,
    leaves: HashMap<(Entry, u32), Arc<Leaf>>,
}

impl Shared {
    /// The nodes of a map, which were all read.
    fn map(&self, roots: &[Entry], count: usize) -> Frozen {
        let mut frozen = Frozen::with_capacity(count);
        for root in roots {
            let whole = count.min(frozen.len() + FAN);
            let nodes = self.roots.get(root).into_iter().flatten();
            frozen
                .extend(nodes.map(|node| self.nodes.get(node).cloned()).take(whole - frozen.len()));
            frozen.resize(whole, None);
        }
        frozen
    }
}

/// The entries of a root page; `None` if one is invalid.
fn parse_root(page: &[u8]) -> Option<Vec<Entry>> {
    page.chunks_exact(ENTRY_BYTES).map(Entry::parse).collect()
}
