//! How much space each volume and snapshot of a pool takes: what it refers to, and what destroying
//! it frees.
//!
//! Volumes and snapshots that come from one another are a *family*; only they share blocks, and a
//! shared block has the same number in each. So the maps of a family are compared place by place.
//! Maps share nodes and leaves by reference: what several maps share is looked at once, and a leaf
//! that all of them share is not even read again once its stored blocks are counted.
//!
//! **Cost.** Each leaf of the pool is read once at most, and no block: 4 KiB per 256 blocks. A
//! leaf keeps the count of its stored blocks in memory until it changes, so a later count reads
//! only leaves that changed, and those of which maps have different versions.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use blockyard_store::{PoolBacking, SegmentStore};
use blockyard_volume::map::{Leaf, Node, Page, StoredBlocks};
use blockyard_volume::pool::{FrozenVolume, HIDDEN_PREFIX};
use blockyard_volume::segments::Segments;
use blockyard_volume::{Pool, ReadOnlyPool, VolumeError};
use blockyard_volume_format::FAN;
use blockyard_volume_format::catalogue::{Hold, VolumeMeta};
use blockyard_volume_format::properties::Properties;

/// How often a family is counted again because leaves were replaced while they were read. A page
/// that cannot be read after that is damaged.
const TRIES: usize = 5;

/// The space of a volume or snapshot, in bytes of blocks as stored. Map pages do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// Blocks that it refers to.
    pub blocks: u64,
    /// Bytes that it refers to, also those that others refer to.
    pub refer_bytes: u64,
    /// Bytes that destroying it frees: of a snapshot, those that only it refers to; of a volume,
    /// which is destroyed with its snapshots, those that nothing else refers to.
    pub freed_bytes: u64,
    /// The part of `freed_bytes` that only snapshots of the volume refer to.
    pub snapshots_bytes: u64,
    /// What the volume has reserved and not written.
    pub unused_reserved_bytes: u64,
}

impl Space {
    /// Bytes that are available to others after the volume or snapshot is destroyed.
    pub fn used_bytes(&self) -> u64 {
        self.freed_bytes.saturating_add(self.unused_reserved_bytes)
    }
}

/// A volume or snapshot of a list.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Name, size and other attributes.
    pub meta: VolumeMeta,
    /// The volume or snapshot that it was copied from, if that exists.
    pub origin: Option<String>,
    /// The holds of a snapshot.
    pub holds: Vec<Hold>,
    /// The properties of a volume.
    pub properties: Properties,
    /// What it takes; `None` if a page of a map of its family cannot be read.
    pub space: Option<Space>,
    /// What may be written to a volume, its reservation included.
    pub available_bytes: Option<u64>,
}

/// Lists the volumes and snapshots of an open pool with their space, or the one of this name.
///
/// # Errors
/// If there is none of this name.
pub fn list<D: SegmentStore>(
    pool: &Pool<D>,
    name: Option<&str>,
) -> Result<Vec<Listed>, VolumeError> {
    if let Some(name) = name {
        pool.find(name)?;
    }
    pool.settle();
    let (freeze, unreserved) = (|| pool.volumes().freeze(), pool.unreserved_bytes());
    let is_shown = |meta: &VolumeMeta| name.is_none_or(|name| meta.name == name);
    let (segments, is_shown, is_gone) = (pool.segments(), &is_shown, &|_| false);
    Ok(SpaceCount { segments, is_shown, unreserved, is_gone }.list(&freeze).0)
}

/// Lists the volumes and snapshots of an open pool without their space: nothing is read.
pub fn list_without_space<D: SegmentStore>(pool: &Pool<D>) -> Vec<Listed> {
    let volumes = pool.volumes();
    let shown = volumes.by_id.values().filter(|it| !it.meta.name.starts_with(HIDDEN_PREFIX));
    let listed = shown.map(|live| {
        let meta = live.listed();
        let origin = volumes.by_id.get(&meta.origin).filter(|_| !meta.is_snapshot);
        Listed {
            origin: origin.map(|it| it.meta.name.clone()),
            holds: volumes.holds_of(meta.id).to_vec(),
            properties: volumes.properties_of(meta.id),
            space: None,
            available_bytes: None,
            meta,
        }
    });
    listed.collect()
}

/// Lists the volumes and snapshots of a pool that is opened for reading only, as [`list`].
///
/// # Errors
/// If there is none of this name.
pub fn list_read_only(
    pool: &ReadOnlyPool<PoolBacking>,
    name: Option<&str>,
) -> Result<Vec<Listed>, VolumeError> {
    if let Some(name) = name {
        pool.find(name)?;
    }
    let freeze = || pool.volumes().freeze();
    let (segments, unused) = (pool.segments(), pool.volumes().unused_reserved_bytes());
    let unreserved = segments.left_bytes().saturating_sub(unused);
    let is_shown = |meta: &VolumeMeta| name.is_none_or(|name| meta.name == name);
    let (is_shown, is_gone) = (&is_shown, &|_| false);
    Ok(SpaceCount { segments, is_shown, unreserved, is_gone }.list(&freeze).0)
}

/// Bytes that destroying these volumes and snapshots together frees.
///
/// # Errors
/// If a page of a map cannot be read.
pub fn freed_bytes<D: SegmentStore>(
    pool: &Pool<D>,
    ids: &HashSet<u32>,
) -> Result<u64, VolumeError> {
    pool.settle();
    let freeze = || pool.volumes().freeze();
    let (is_gone, is_shown) =
        (|id: u32| ids.contains(&id), |meta: &VolumeMeta| ids.contains(&meta.id));
    let (segments, unreserved) = (pool.segments(), 0);
    SpaceCount { segments, is_shown: &is_shown, unreserved, is_gone: &is_gone }.list(&freeze).1
}

/// A count of the space of volumes and snapshots.
struct SpaceCount<'a, D: SegmentStore> {
    segments: &'a Segments<D>,
    /// Says which ones are listed; only their families are counted.
    is_shown: &'a dyn Fn(&VolumeMeta) -> bool,
    /// Free bytes of the pool that no volume has reserved.
    unreserved: u64,
    /// Says which volumes and snapshots go.
    is_gone: &'a dyn Fn(u32) -> bool,
}

impl<D: SegmentStore> SpaceCount<'_, D> {
    /// Counts the families. Returns the list, and the bytes that are freed.
    fn list(
        &self,
        freeze: &dyn Fn() -> Vec<FrozenVolume>,
    ) -> (Vec<Listed>, Result<u64, VolumeError>) {
        let mut frozen = freeze();
        let is_asked = |it: &FrozenVolume| (self.is_shown)(&it.meta);
        let mut left: HashSet<u32> =
            frozen.iter().filter(|it| is_asked(it)).map(|it| it.family).collect();
        let (mut spaces, mut gone_bytes) = (HashMap::new(), Ok(0));
        for attempt in 1..=TRIES {
            for family in left.clone() {
                match Family::new(&frozen, family, self.is_gone).count(self.segments) {
                    Ok((counted, freed)) => {
                        spaces.extend(counted);
                        gone_bytes = gone_bytes.map(|bytes| bytes + freed);
                        left.remove(&family);
                    }
                    Err(error) if attempt == TRIES => {
                        tracing::warn!("the space of some volumes cannot be counted: {error}");
                        gone_bytes = Err(error);
                    }
                    Err(_) => {}
                }
            }
            if left.is_empty() {
                break;
            }
            frozen = freeze();
        }
        let names: HashMap<u32, String> =
            frozen.iter().map(|it| (it.meta.id, it.meta.name.clone())).collect();
        let is_shown = |it: &FrozenVolume| is_asked(it) && !it.meta.name.starts_with(HIDDEN_PREFIX);
        let all = frozen.into_iter().filter(is_shown).map(|it| {
            let FrozenVolume { meta, unused_reserved_bytes, holds, properties, .. } = it;
            let space = spaces.get(&meta.id).map(|it| Space { unused_reserved_bytes, ..*it });
            let available = self.unreserved.saturating_add(unused_reserved_bytes);
            Listed {
                origin: names.get(&meta.origin).filter(|_| !meta.is_snapshot).cloned(),
                available_bytes: (!meta.is_snapshot).then_some(available),
                holds,
                properties,
                meta,
                space,
            }
        });
        (all.collect(), gone_bytes)
    }
}

/// Stands for several.
const MANY: u32 = u32::MAX;

/// Which maps refer to a node, a leaf or a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holders {
    /// The number of the only one, or [`MANY`].
    map: u32,
    /// The only volume that it or its snapshots are of, by its place in the family, or [`MANY`].
    volume: u32,
    /// Whether one of them is a volume, and not a snapshot.
    has_volume: bool,
    /// Whether all of them go.
    gone: bool,
}

impl Holders {
    fn with(self, other: Holders) -> Holders {
        let only = |one: u32, other: u32| if one == other { one } else { MANY };
        Holders {
            map: only(self.map, other.map),
            volume: only(self.volume, other.volume),
            has_volume: self.has_volume || other.has_volume,
            gone: self.gone && other.gone,
        }
    }

    /// Whether a block of these holders is in no count but those of what refers to it.
    fn is_nobodys(&self) -> bool {
        self.map == MANY && self.volume == MANY && !self.gone
    }
}

/// The maps of a family.
struct Family<'a> {
    maps: Vec<&'a FrozenVolume>,
    /// Who holds what only the map of this place has.
    holders: Vec<Holders>,
    spaces: Vec<Space>,
    gone_bytes: u64,
}

/// A node and the places of the maps that have it.
struct SharedNode<'a> {
    node: &'a Node,
    holders: Holders,
    maps: Vec<usize>,
    stored: (u64, u64),
}

impl<'a> Family<'a> {
    fn new(frozen: &'a [FrozenVolume], family: u32, is_gone: &dyn Fn(u32) -> bool) -> Family<'a> {
        let maps: Vec<&FrozenVolume> = frozen.iter().filter(|it| it.family == family).collect();
        let places: HashMap<&str, u32> =
            (0..).zip(&maps).map(|(place, it)| (it.meta.name.as_str(), place)).collect();
        let holders = (0..).zip(&maps).map(|(place, it)| {
            // A hidden snapshot has no volume that has its name.
            let volume = it.meta.name.split('@').next().unwrap_or_default();
            Holders {
                map: place,
                volume: places.get(volume).copied().unwrap_or(place),
                has_volume: !it.meta.is_snapshot,
                gone: is_gone(it.meta.id),
            }
        });
        let (holders, spaces) = (holders.collect(), vec![Space::default(); maps.len()]);
        Family { maps, holders, spaces, gone_bytes: 0 }
    }

    /// Counts the space of all, and the bytes that go.
    fn count<D: SegmentStore>(
        mut self,
        segments: &Segments<D>,
    ) -> Result<(Vec<(u32, Space)>, u64), VolumeError> {
        let spans = self.maps.iter().map(|it| it.map.len()).max().unwrap_or(0);
        for number in 0..spans {
            self.span(segments, number)?;
        }
        let ids = self.maps.iter().map(|it| it.meta.id);
        Ok((ids.zip(self.spaces).collect(), self.gone_bytes))
    }

    fn span<D: SegmentStore>(
        &mut self,
        segments: &Segments<D>,
        number: usize,
    ) -> Result<(), VolumeError> {
        let mut nodes: Vec<SharedNode<'_>> = Vec::new();
        let mut places: HashMap<*const Node, usize> = HashMap::new();
        for (at, it) in self.maps.iter().enumerate() {
            let Some(Some(node)) = it.map.get(number) else { continue };
            let holders = self.holders[at];
            match places.get(&Arc::as_ptr(node)) {
                Some(place) => {
                    let known = &mut nodes[*place];
                    known.holders = known.holders.with(holders);
                    known.maps.push(at);
                }
                None => {
                    places.insert(Arc::as_ptr(node), nodes.len());
                    nodes.push(SharedNode { node, holders, maps: vec![at], stored: (0, 0) });
                }
            }
        }
        for at in 0..FAN {
            self.leaves(segments, &mut nodes, at)?;
        }
        for SharedNode { maps, stored: (blocks, bytes), .. } in nodes {
            for at in maps {
                self.spaces[at].blocks += blocks;
                self.spaces[at].refer_bytes += bytes;
            }
        }
        Ok(())
    }

    /// Counts the leaves at one place of the nodes of a span.
    fn leaves<D: SegmentStore>(
        &mut self,
        segments: &Segments<D>,
        nodes: &mut [SharedNode<'_>],
        at: usize,
    ) -> Result<(), VolumeError> {
        let mut leaves: Vec<(&Leaf, Holders)> = Vec::new();
        let mut places: HashMap<*const Leaf, usize> = HashMap::new();
        for SharedNode { node, holders, .. } in nodes.iter() {
            let Some(leaf) = node.leaf(at) else { continue };
            match places.get(&Arc::as_ptr(leaf)) {
                Some(place) => leaves[*place].1 = leaves[*place].1.with(*holders),
                None => {
                    places.insert(Arc::as_ptr(leaf), leaves.len());
                    leaves.push((leaf, *holders));
                }
            }
        }
        let stored = match &leaves[..] {
            [] => return Ok(()),
            // No version of this leaf but one, or none that is in a count: its sum suffices.
            [(leaf, holders)] => {
                let stored = stored(segments, leaf)?;
                self.add(*holders, stored.bytes.into());
                vec![stored]
            }
            all if all.iter().all(|(_, holders)| holders.is_nobodys()) => {
                all.iter().map(|(leaf, _)| stored(segments, leaf)).collect::<Result<_, _>>()?
            }
            all => self.versions(segments, all)?,
        };
        for shared in nodes.iter_mut() {
            let Some(leaf) = shared.node.leaf(at) else { continue };
            let StoredBlocks { blocks, bytes } = stored[places[&Arc::as_ptr(leaf)]];
            shared.stored.0 += u64::from(blocks);
            shared.stored.1 += u64::from(bytes);
        }
        Ok(())
    }

    /// Counts several versions of a leaf, block by block.
    fn versions<D: SegmentStore>(
        &mut self,
        segments: &Segments<D>,
        leaves: &[(&Leaf, Holders)],
    ) -> Result<Vec<StoredBlocks>, VolumeError> {
        let read = |(leaf, holders): &(&Leaf, Holders)| Ok((segments.page(leaf)?, *holders));
        let pages: Vec<(Arc<Page>, Holders)> =
            leaves.iter().map(read).collect::<Result<_, VolumeError>>()?;
        for block in 0..FAN {
            let mut versions: BTreeMap<u64, (u32, Holders)> = BTreeMap::new();
            for (page, holders) in &pages {
                let entry = &page.entries()[block];
                if !entry.is_hole() && !entry.is_lost() {
                    let version = (entry.stored_bytes(), *holders);
                    let known = versions.entry(entry.address()).or_insert(version);
                    known.1 = known.1.with(*holders);
                }
            }
            for (bytes, holders) in versions.into_values() {
                self.add(holders, bytes.into());
            }
        }
        let note = |((leaf, _), (page, _)): (&(&Leaf, _), &(Arc<Page>, _))| leaf.note_stored(page);
        Ok(leaves.iter().zip(&pages).map(note).collect())
    }

    /// Adds bytes that these refer to.
    fn add(&mut self, holders: Holders, bytes: u64) {
        let Holders { map, volume, has_volume, gone } = holders;
        let snapshot = self.maps.get(map as usize).filter(|it| it.meta.is_snapshot);
        if snapshot.is_some() {
            self.spaces[map as usize].freed_bytes += bytes;
        }
        // Blocks of a hidden snapshot are its own.
        if volume != MANY && self.maps.get(volume as usize).is_some_and(|it| !it.meta.is_snapshot) {
            self.spaces[volume as usize].freed_bytes += bytes;
            self.spaces[volume as usize].snapshots_bytes += if has_volume { 0 } else { bytes };
        }
        self.gone_bytes += if gone { bytes } else { 0 };
    }
}

/// The stored blocks of a leaf.
fn stored<D: SegmentStore>(
    segments: &Segments<D>,
    leaf: &Leaf,
) -> Result<StoredBlocks, VolumeError> {
    match leaf.stored() {
        Some(stored) => Ok(stored),
        None => Ok(leaf.note_stored(&*segments.page(leaf)?)),
    }
}
