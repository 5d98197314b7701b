//! The volumes and snapshots of a pool, and how the catalogue changes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use blockyard_core::Status;
use blockyard_store::SegmentStore;
use blockyard_volume_format::catalogue::{
    Change, HOLDS_MAX, Hold, NAME_MAX, ScrubRecord, VOLUMES_MAX, VolumeMeta, is_name,
    is_volume_name,
};
use blockyard_volume_format::key_slot::KeySlot;
use blockyard_volume_format::properties::Properties;
use blockyard_volume_format::{FAN, FormatError, NODE_BLOCKS, PAGE_BYTES};

use super::HIDDEN_PREFIX;
use crate::apply::Apply;
use crate::error::VolumeError;
use crate::map::{Frozen, Map};
use crate::record::OpenVolume;

/// The volumes and snapshots of a pool.
#[derive(Debug, Default)]
pub struct Volumes {
    /// The number that the next volume or snapshot gets.
    pub next_id: u32,
    /// How many copies of maps have been made.
    pub copies: u32,
    /// The volumes and snapshots by number.
    pub by_id: BTreeMap<u32, Arc<OpenVolume>>,
    /// The numbers of the volumes and snapshots by name.
    pub(crate) by_name: HashMap<String, u32>,
    /// The keys of encrypted volumes, encrypted, by their identities.
    pub keys: BTreeMap<u64, KeySlot>,
    /// Removed volumes whose maps still use memory. The thread that asked for the removal frees
    /// them, which may take long.
    pub(crate) gone: Vec<Arc<OpenVolume>>,
    /// Numbers of the volumes that have a reservation.
    pub(crate) reserving: BTreeSet<u32>,
    /// The holds of snapshots, by their numbers.
    pub(crate) holds: BTreeMap<u32, Vec<Hold>>,
    /// The properties of volumes that have some, by their numbers.
    pub(crate) properties: BTreeMap<u32, Properties>,
    /// The last scrub.
    pub(crate) scrub: ScrubRecord,
    /// Blocks and map pages that were repaired from the other copy before the pool was opened.
    pub(crate) repaired_before: u64,
}

/// What a promotion changes.
pub(crate) struct Promotion {
    /// The number of the snapshot from which the clone was made.
    origin: u32,
    /// The number of the volume of that snapshot, which becomes the clone.
    volume: u32,
    /// That snapshot and the older ones, each with its new name.
    pub(crate) snapshots: Vec<(Arc<OpenVolume>, String)>,
}

/// A volume or snapshot with its map at one moment.
#[derive(Clone, Debug)]
pub struct FrozenVolume {
    /// Attributes of the volume.
    pub meta: VolumeMeta,
    /// The number of the volume from which it, and all that share blocks with it, descend.
    pub family: u32,
    /// Bytes of its reservation that the volume has not written yet.
    pub unused_reserved_bytes: u64,
    /// The holds of a snapshot.
    pub holds: Vec<Hold>,
    /// The properties of a volume.
    pub properties: Properties,
    /// The map.
    pub map: Arc<Frozen>,
}

impl Volumes {
    /// All volumes and snapshots, hidden ones too, with their maps. Cleaning moves blocks of all
    /// maps of a family together while it has the table of volumes locked, so equal blocks of these
    /// maps have equal entries.
    pub fn freeze(&self) -> Vec<FrozenVolume> {
        let freeze = |live: &Arc<OpenVolume>| FrozenVolume {
            meta: live.listed(),
            family: live.family,
            unused_reserved_bytes: live.unused_reserved_bytes(),
            holds: self.holds.get(&live.meta.id).cloned().unwrap_or_default(),
            properties: self.properties_of(live.meta.id),
            map: match live.meta.is_snapshot {
                true => live.map.whole(),
                false => Arc::new(live.map.freeze()),
            },
        };
        self.by_id.values().map(freeze).collect()
    }

    /// Finds a volume or snapshot by name.
    pub fn find(&self, name: &str) -> Option<&Arc<OpenVolume>> {
        self.by_id.get(self.by_name.get(name)?)
    }

    /// The last scrub that was completed.
    pub fn last_scrub(&self) -> Option<ScrubRecord> {
        Some(self.scrub).filter(|scrub| scrub.ended > 0)
    }

    /// Removes a name, unless another volume or snapshot has it by now.
    fn forget_name(&mut self, meta: &VolumeMeta) {
        if self.by_name.get(&meta.name) == Some(&meta.id) {
            self.by_name.remove(&meta.name);
        }
    }

    /// The volumes and snapshots without the hidden ones (see [`HIDDEN_PREFIX`]).
    pub(crate) fn list(&self) -> Vec<VolumeMeta> {
        let live = self.by_id.values();
        live.filter(|it| !it.meta.name.starts_with(HIDDEN_PREFIX)).map(|it| it.listed()).collect()
    }

    /// Completes a change and checks whether it can be applied.
    ///
    /// # Errors
    /// The status with which the change is refused.
    pub fn check(&self, change: &mut Change) -> Result<(), Status> {
        match change {
            Change::Several(changes) => {
                self.keeps_volumes_of_snapshots(changes)?;
                for (change, id) in changes.iter_mut().zip(self.next_id..) {
                    // Here it comes with a new volume, and a key that is there keeps its slot.
                    if let Change::PutKey(slot) = change
                        && let Some(known) = self.keys.get(&slot.id)
                    {
                        slot.clone_from(known);
                    }
                    self.check_one(change, id)?;
                }
                Ok(())
            }
            // Alone it replaces the slot of a key that is there.
            Change::PutKey(slot) if !self.keys.contains_key(&slot.id) => Err(Status::Inval),
            change => {
                self.keeps_volumes_of_snapshots(std::slice::from_ref(change))?;
                self.check_one(change, self.next_id)
            }
        }
    }

    /// Completes and checks a single change. A new volume gets the number `id`, which is free.
    fn check_one(&self, change: &mut Change, id: u32) -> Result<(), Status> {
        self.fits(change)?;
        let is_copy = matches!(change, Change::Copy(_));
        match change {
            Change::Create(meta) | Change::Copy(meta) => {
                let is_full = self.by_id.len() >= VOLUMES_MAX || id == u32::MAX;
                if self.find(&meta.name).is_some() || is_full {
                    return Err(Status::Inval);
                }
                meta.id = id;
                if is_copy {
                    meta.reserved_bytes = 0;
                }
            }
            Change::Destroy { id } | Change::Resize { id, .. } | Change::Rollback { id, .. } => {
                let live = self.by_id.get(id).ok_or(Status::Inval)?;
                // Another thread or device has the volume open.
                if Arc::strong_count(live) > 1 {
                    return Err(Status::DevResource);
                }
                if matches!(change, Change::Destroy { id } if !self.holds_of(*id).is_empty()) {
                    return Err(Status::DevResource);
                }
            }
            Change::Reserve { id, bytes } => {
                let live = self.by_id.get(id).ok_or(Status::Inval)?;
                if live.meta.is_snapshot || *bytes > live.meta.size_bytes() {
                    return Err(Status::Inval);
                }
                // Estimate the owned blocks from the pages in memory; nothing is read for it here.
                if *bytes > 0 && live.reserved_bytes() == 0 {
                    live.own(live.map.owned());
                }
            }
            Change::Rename { id, name } => self.check_rename(*id, name)?,
            Change::SnapshotAll { first_id, snapshot, .. } => {
                *first_id = id;
                self.check_snapshots(id, snapshot)?;
            }
            Change::Promote { id } => self.check_promote(*id)?,
            Change::Hold { id, hold } => {
                let live = self.by_id.get(id).ok_or(Status::Inval)?;
                let holds = self.holds_of(*id);
                let is_new = holds.iter().all(|it| it.tag != hold.tag);
                if !live.meta.is_snapshot || !is_new || holds.len() >= HOLDS_MAX {
                    return Err(Status::Inval);
                }
            }
            Change::Release { id, tag } => {
                self.holds_of(*id).iter().find(|it| it.tag == *tag).ok_or(Status::Inval)?;
            }
            Change::Set { id, .. } => {
                let live = self.by_id.get(id).ok_or(Status::Inval)?;
                if live.meta.is_snapshot {
                    return Err(Status::Inval);
                }
            }
            Change::Scrubbed(_) | Change::PutKey(_) => {}
            Change::Several(_) => return Err(Status::Inval),
        }
        match change {
            // The blocks that both have are encrypted by one key.
            Change::Copy(meta) => {
                meta.key = self.by_id.get(&meta.origin).ok_or(Status::Inval)?.meta.key;
                Ok(())
            }
            Change::Rollback { id, to } if !self.is_like(*id, *to) => Err(Status::Inval),
            _ => Ok(()),
        }
    }

    /// Whether the map of one volume can become that of another one: both have the same key and
    /// length of blocks.
    fn is_like(&self, id: u32, other: u32) -> bool {
        let find = |id| self.by_id.get(&id).map(|it| (it.meta.key, it.meta.block_bytes));
        find(other).is_some_and(|it| find(id) == Some(it))
    }

    /// Most pages of maps and of the catalogue that a change adds or modifies, not counting those
    /// that a checkpoint may write in any case.
    pub(crate) fn change_pages(&self, change: &Change) -> u64 {
        let roots = |id: &u32| self.by_id.get(id).map_or(0, |live| live.meta.root_count());
        // The roots, the catalogue pages that name them, and those with the volume's own data.
        let listed = |roots: usize| (roots + roots.div_ceil(FAN)) as u64 + 2;
        match change {
            Change::Create(meta) | Change::Copy(meta) => listed(meta.root_count()),
            Change::Rollback { id, .. } => listed(roots(id)),
            // Also a partly used leaf and a partly used node.
            Change::Resize { id, blocks } => {
                let nodes = blocks.div_ceil(NODE_BLOCKS) as usize;
                listed(roots(id).max(nodes.div_ceil(FAN))) + 2
            }
            Change::SnapshotAll { .. } => {
                self.only_volumes().map(|live| listed(live.meta.root_count())).sum()
            }
            // Each name may become longer.
            Change::Rename { id, .. } | Change::Promote { id } => {
                let names = self.by_id.get(id).map_or(0, |live| self.renamed(live).len());
                2 + (names * NAME_MAX).div_ceil(PAGE_BYTES) as u64
            }
            Change::Destroy { .. }
            | Change::Reserve { .. }
            | Change::Scrubbed(_)
            | Change::PutKey(_)
            | Change::Set { .. }
            | Change::Hold { .. }
            | Change::Release { .. } => 1,
            Change::Several(changes) => changes.iter().map(|it| self.change_pages(it)).sum(),
        }
    }

    /// Applies a change.
    ///
    /// # Errors
    /// If the change is impossible, which a checked one is not, or if a page cannot be read.
    pub(crate) fn apply<D: SegmentStore>(
        &mut self,
        change: &Change,
        maps: &mut Apply<'_, D>,
    ) -> Result<(), VolumeError> {
        if !matches!(change, Change::Several(_)) {
            maps.tally().dirtied += self.change_pages(change);
        }
        match change {
            Change::Create(meta) => {
                self.has_key(meta)?;
                self.put(meta, meta.id, vec![None; meta.node_count()], 0);
            }
            Change::Copy(meta) => {
                let family = self.live(meta.origin)?.family;
                let (nodes, copies) = self.copy(meta.origin, meta, maps)?;
                self.put(meta, family, nodes, copies);
            }
            Change::Several(all) => all.iter().try_for_each(|it| self.apply(it, maps))?,
            Change::Destroy { id } => {
                let gone = self.by_id.remove(id).ok_or_else(|| no_volume(*id))?;
                self.forget_name(&gone.meta);
                self.reserving.remove(id);
                self.holds.remove(id);
                self.properties.remove(id);
                maps.forget(&gone);
                self.drop_key(gone.meta.key);
                self.gone.push(gone);
            }
            Change::PutKey(slot) => _ = self.keys.insert(slot.id, slot.clone()),
            Change::Rollback { id, to } => {
                let gone = Arc::clone(self.live(*id)?);
                let (nodes, copies) = self.copy(*to, &gone.meta, maps)?;
                maps.forget(&gone);
                self.put(&replaced(&gone), gone.family, nodes, copies);
                self.gone.push(gone);
            }
            Change::Reserve { id, bytes } => {
                let live = self.live(*id)?;
                if *bytes > 0 && live.reserved_bytes() == 0 {
                    maps.count_owned(live);
                }
                self.reserve(*id, *bytes)?;
            }
            Change::Scrubbed(scrub) => self.scrub = *scrub,
            Change::Rename { id, name } => self.rename_all(*id, name)?,
            Change::SnapshotAll { first_id, snapshot, created, seed } => {
                self.snapshot_all(*first_id, snapshot, (*created, *seed), maps)?;
            }
            Change::Promote { id } => self.promote(*id)?,
            Change::Hold { id, hold } => self.holds.entry(*id).or_default().push(hold.clone()),
            Change::Release { id, tag } => self.release(*id, tag),
            Change::Set { id, properties } => self.set(*id, *properties),
            Change::Resize { id, blocks } => {
                let live = Arc::clone(self.live(*id)?);
                let (old, mut meta) = (live.meta.blocks, live.listed());
                if *blocks < old {
                    maps.zero(&live, *blocks, old - blocks)?;
                    meta = replaced(&live);
                }
                let mut nodes = live.map.freeze();
                meta.blocks = *blocks;
                meta.reserved_bytes = meta.reserved_bytes.min(meta.size_bytes());
                nodes.resize(meta.node_count(), None);
                self.put(&meta, live.family, nodes, live.map.copied());
                self.live(*id)?.own(live.owned());
            }
        }
        Ok(())
    }

    /// Refuses a volume whose key has no slot.
    fn has_key(&self, meta: &VolumeMeta) -> Result<(), VolumeError> {
        if meta.key == 0 || self.keys.contains_key(&meta.key) {
            return Ok(());
        }
        let (what, field) = ("change of the catalogue", "key");
        let (value, want) = (meta.key, "a key that has a slot");
        Err(FormatError::Field { what, field, value, want }.into())
    }

    /// Removes a key that no volume has any more.
    fn drop_key(&mut self, key: u64) {
        if self.by_id.values().all(|live| live.meta.key != key) {
            self.keys.remove(&key);
        }
    }

    /// The volumes, without snapshots and hidden ones.
    pub(crate) fn only_volumes(&self) -> impl Iterator<Item = &Arc<OpenVolume>> {
        let is_volume = |it: &&Arc<OpenVolume>| {
            !it.meta.is_snapshot && !it.meta.name.starts_with(HIDDEN_PREFIX)
        };
        self.by_id.values().filter(is_volume)
    }

    /// The snapshots of a volume, in order of creation.
    pub fn snapshots_of(&self, volume: &str) -> impl Iterator<Item = &Arc<OpenVolume>> {
        let is_of = move |it: &&Arc<OpenVolume>| {
            let rest = it.meta.name.strip_prefix(volume);
            rest.is_some_and(|rest| rest.starts_with('@'))
        };
        self.by_id.values().filter(is_of)
    }

    /// The holds of a snapshot.
    pub fn holds_of(&self, id: u32) -> &[Hold] {
        self.holds.get(&id).map_or(&[], Vec::as_slice)
    }

    /// The properties of a volume that the pool has.
    pub fn properties_of(&self, id: u32) -> Properties {
        self.properties.get(&id).copied().unwrap_or_default()
    }

    /// Sets properties of a volume; the others stay.
    pub(crate) fn set(&mut self, id: u32, properties: Properties) {
        if !properties.is_empty() {
            let known = self.properties.entry(id).or_default();
            *known = known.with(properties);
        }
    }

    /// What a new name of a volume or snapshot renames: the volume and its snapshots.
    fn renamed(&self, live: &Arc<OpenVolume>) -> Vec<Arc<OpenVolume>> {
        let snapshots = self.snapshots_of(&live.meta.name).filter(|_| !live.meta.is_snapshot);
        [live].into_iter().chain(snapshots).cloned().collect()
    }

    /// Checks whether a volume with its snapshots, or a snapshot, can get a name.
    fn check_rename(&self, id: u32, name: &str) -> Result<(), Status> {
        let live = self.by_id.get(&id).ok_or(Status::Inval)?;
        let old = &live.meta.name;
        let volume = |name: &str| name.split('@').next().map(str::to_owned);
        let is_valid = match live.meta.is_snapshot {
            true => name.contains('@') && is_name(name) && volume(name) == volume(old),
            false => is_volume_name(name),
        };
        if !is_valid || self.find(name).is_some() {
            return Err(Status::Inval);
        }
        let renamed = self.renamed(live);
        let grown = |it: &Arc<OpenVolume>| it.meta.name.len() - old.len() + name.len();
        if renamed.iter().any(|it| grown(it) > NAME_MAX) {
            return Err(Status::Inval);
        }
        // A reference in the table, and one in `renamed`.
        let is_used = |it: &Arc<OpenVolume>| Arc::strong_count(it) > 2;
        if renamed.iter().any(is_used) { Err(Status::DevResource) } else { Ok(()) }
    }

    /// Checks whether every volume can get a snapshot of this name, with numbers from `id` on.
    fn check_snapshots(&self, id: u32, snapshot: &str) -> Result<(), Status> {
        let count = self.only_volumes().count();
        let is_full = self.by_id.len() + count > VOLUMES_MAX || u32::MAX - id <= count as u32;
        let is_free = |live: &Arc<OpenVolume>| {
            let name = format!("{}@{snapshot}", live.meta.name);
            is_name(&name) && self.find(&name).is_none()
        };
        if count == 0 || is_full || !self.only_volumes().all(is_free) {
            return Err(Status::Inval);
        }
        Ok(())
    }

    /// Makes a snapshot of each volume, with numbers from `first_id` on, at the time and with
    /// identities from the seed in `made`.
    fn snapshot_all<D: SegmentStore>(
        &mut self,
        first_id: u32,
        snapshot: &str,
        made: (u64, u64),
        maps: &mut Apply<'_, D>,
    ) -> Result<(), VolumeError> {
        let (created, seed) = made;
        let origins: Vec<_> = self.only_volumes().map(|live| live.listed()).collect();
        for (id, origin) in (first_id..).zip(origins) {
            let meta = VolumeMeta {
                id,
                name: format!("{}@{snapshot}", origin.name),
                is_snapshot: true,
                origin: origin.id,
                guid: guid(seed, id),
                reserved_bytes: 0,
                created,
                ..origin
            };
            let family = self.live(meta.origin)?.family;
            let (nodes, copies) = self.copy(meta.origin, &meta, maps)?;
            self.put(&meta, family, nodes, copies);
        }
        Ok(())
    }

    /// What a clone gets if it is promoted; `None` if it is no clone, or its origin is gone.
    pub(crate) fn promotion(&self, id: u32) -> Option<Promotion> {
        let clone = self.by_id.get(&id).filter(|it| !it.meta.is_snapshot)?;
        let origin = self.by_id.get(&clone.origin()).filter(|it| it.meta.is_snapshot)?;
        let volume = self.find(origin.meta.name.split('@').next()?)?;
        let snapshots = self.snapshots_of(&volume.meta.name);
        let snapshots = snapshots.filter(|it| it.meta.id <= origin.meta.id);
        let new = |it: &Arc<OpenVolume>| {
            let rest = it.meta.name.split('@').nth(1).unwrap_or_default();
            (Arc::clone(it), format!("{}@{rest}", clone.meta.name))
        };
        (volume.meta.id != id).then(|| Promotion {
            origin: origin.meta.id,
            volume: volume.meta.id,
            snapshots: snapshots.map(new).collect(),
        })
    }

    fn check_promote(&self, id: u32) -> Result<(), Status> {
        for (it, name) in &self.promotion(id).ok_or(Status::Inval)?.snapshots {
            if !is_name(name) || self.find(name).is_some() {
                return Err(Status::Inval);
            }
            // A reference in the table, and one in the promotion.
            if Arc::strong_count(it) > 2 {
                return Err(Status::DevResource);
            }
        }
        Ok(())
    }

    fn promote(&mut self, id: u32) -> Result<(), VolumeError> {
        let promotion = self.promotion(id).ok_or_else(|| no_volume(id))?;
        let (clone, volume) = (self.live(id)?, self.live(promotion.volume)?);
        clone.set_origin(volume.origin());
        volume.set_origin(promotion.origin);
        for (snapshot, name) in promotion.snapshots {
            snapshot.set_origin(id);
            self.rename(&snapshot, name)?;
        }
        Ok(())
    }

    /// Renames a volume with its snapshots, or a snapshot.
    fn rename_all(&mut self, id: u32, name: &str) -> Result<(), VolumeError> {
        let live = Arc::clone(self.live(id)?);
        for old in self.renamed(&live) {
            let rest = old.meta.name.strip_prefix(&live.meta.name).unwrap_or_default();
            self.rename(&old, format!("{name}{rest}"))?;
        }
        Ok(())
    }

    fn release(&mut self, id: u32, tag: &str) {
        if let Some(holds) = self.holds.get_mut(&id) {
            holds.retain(|hold| hold.tag != tag);
        }
        self.holds.retain(|_, holds| !holds.is_empty());
    }

    /// Replaces a volume or snapshot, which is not in use, by itself with another name.
    fn rename(&mut self, live: &OpenVolume, name: String) -> Result<(), VolumeError> {
        let meta = VolumeMeta { name, ..live.listed() };
        self.put(&meta, live.family, live.map.freeze(), live.map.copied());
        self.live(meta.id)?.own(live.owned());
        Ok(())
    }

    /// The volumes that have a reservation.
    pub(crate) fn reserving(&self) -> impl Iterator<Item = &OpenVolume> {
        self.reserving.iter().filter_map(|id| self.by_id.get(id).map(|live| &**live))
    }

    /// Sets the reservation of a volume in bytes.
    fn reserve(&mut self, id: u32, bytes: u64) -> Result<(), VolumeError> {
        let live = self.live(id)?;
        live.reserve(bytes.min(live.meta.size_bytes()));
        match bytes {
            0 => _ = self.reserving.remove(&id),
            _ => _ = self.reserving.insert(id),
        }
        Ok(())
    }

    /// Inserts a volume or snapshot that a checkpoint has.
    pub(crate) fn insert(&mut self, live: OpenVolume) {
        let (id, bytes) = (live.meta.id, live.reserved_bytes());
        self.by_name.insert(live.meta.name.clone(), id);
        if let Some(before) = self.by_id.insert(id, Arc::new(live))
            && self.by_id[&id].meta.name != before.meta.name
        {
            self.forget_name(&before.meta);
        }
        if bytes > 0 {
            self.reserving.insert(id);
        } else {
            self.reserving.remove(&id);
        }
    }

    fn live(&self, id: u32) -> Result<&Arc<OpenVolume>, VolumeError> {
        self.by_id.get(&id).ok_or_else(|| no_volume(id))
    }

    /// Copies a map for a volume: returns its nodes, and the number of this copy.
    fn copy<D: SegmentStore>(
        &mut self,
        from: u32,
        meta: &VolumeMeta,
        maps: &mut Apply<'_, D>,
    ) -> Result<(Frozen, u32), VolumeError> {
        self.copies = self.copies.saturating_add(1);
        maps.copied(self.copies);
        let origin = self.live(from)?;
        let mut nodes = origin.map.share(self.copies);
        origin.own(0);
        nodes.resize(meta.node_count(), None);
        Ok((nodes, self.copies))
    }

    fn put(&mut self, meta: &VolumeMeta, family: u32, nodes: Frozen, copied: u32) {
        self.next_id = self.next_id.max(meta.id.saturating_add(1));
        self.insert(OpenVolume::new(meta.clone(), family, Map::new(nodes, copied)));
    }
}

/// The properties of a volume whose contents are being replaced.
fn replaced(live: &OpenVolume) -> VolumeMeta {
    let meta = live.listed();
    VolumeMeta { guid: meta.guid.wrapping_add(1), ..meta }
}

/// The identity of a snapshot that is made together with others.
fn guid(seed: u64, id: u32) -> u64 {
    // An odd factor keeps different numbers different.
    (seed ^ u64::from(id).wrapping_mul(0x9e37_79b9_7f4a_7c15)).max(1)
}

fn no_volume(id: u32) -> VolumeError {
    let (what, field) = ("change of the catalogue", "volume");
    let want = "the number of one that is there";
    VolumeError::Format(FormatError::Field { what, field, value: id.into(), want })
}
