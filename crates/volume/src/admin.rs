//! Operations on a pool other than I/O: create, snapshot, clone, roll back, resize and destroy
//! volumes by name. Each is a record in the log, ordered among the writes, and durable when it is
//! answered.

use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

use blockyard_core::Bytes;
use blockyard_store::SegmentStore;
use blockyard_volume_format::catalogue::{
    Change, HOLDS_MAX, Hold, NAME_MAX, SEVERAL_MAX, TAG_MAX, VolumeMeta, is_tag,
};
use blockyard_volume_format::properties::Properties;

use crate::config::{BLOCK_BYTES, SIZE_MAX};
use crate::encryption::{Secret, VolumeKey};
use crate::error::VolumeError;
use crate::names::{
    invalid, new_volume_name, receive_state_name, received_name, snapshot_name, volume_name,
};
use crate::pool::{HIDDEN_PREFIX, RECEIVE_STATE_PREFIX};
use crate::running::Running;

/// Checks the parameters of a volume that is to be made, as far as that needs no pool, so that a
/// refused `create` leaves nothing on disk, not even a pool. `block_bytes` 0 stands for 16 KiB.
///
/// # Errors
/// Names the first invalid value.
pub fn check_new(
    name: &str,
    size: u64,
    block_bytes: u32,
    reserved_bytes: u64,
) -> Result<(), VolumeError> {
    new_volume_name(name)?;
    let block_bytes = if block_bytes == 0 { BLOCK_BYTES } else { block_bytes };
    if !block_bytes.is_power_of_two() || !(4096..=65_536).contains(&block_bytes) {
        let value = Bytes(block_bytes.into()).to_string();
        return invalid("volblocksize", &value, "4k, 8k, 16k, 32k or 64k");
    }
    blocks(size, block_bytes)?;
    within_size(reserved_bytes, size)
}

/// Refuses a reservation that exceeds the size of its volume.
fn within_size(reserved_bytes: u64, size: u64) -> Result<(), VolumeError> {
    match reserved_bytes <= size {
        true => Ok(()),
        false => {
            let wanted = format!("the size at most, {}", Bytes(size));
            invalid("reservation", &Bytes(reserved_bytes).to_string(), &wanted)
        }
    }
}

/// Converts a size in bytes to a number of whole blocks.
fn blocks(size: u64, block_bytes: u32) -> Result<u64, VolumeError> {
    let unit = u64::from(block_bytes);
    match size > 0 && size.is_multiple_of(unit) && size <= SIZE_MAX {
        true => Ok(size / unit),
        false => {
            let wanted = format!("a multiple of volblocksize, {}, up to 1P", Bytes(unit));
            invalid("size", &Bytes(size).to_string(), &wanted)
        }
    }
}

/// The time now, in seconds since 1970 (UTC).
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl<D: SegmentStore> Running<D> {
    fn meta(&self, name: &str) -> Result<VolumeMeta, VolumeError> {
        // Return a copy and drop the reference at once: a volume that is referenced is in use.
        Ok(self.pool().find(name)?.meta.clone())
    }

    /// Draws a random identity for a snapshot.
    fn fresh_guid(&self) -> Result<u64, VolumeError> {
        let id = self.pool().segments().directory().fresh_id();
        let id = id.map_err(VolumeError::io("cannot draw an identity"))?;
        Ok(blockyard_volume_format::bytes::u64_at(&id, 0).max(1))
    }

    /// Refuses a name that is taken.
    ///
    /// # Errors
    /// If a volume or snapshot has this name.
    pub fn is_free(&self, name: &str) -> Result<(), VolumeError> {
        match self.pool().find(name) {
            Ok(_) => Err(VolumeError::Exists { name: name.to_owned() }),
            Err(_) => Ok(()),
        }
    }

    /// Makes a volume of zeros. `block_bytes` 0 stands for 16 KiB.
    ///
    /// # Errors
    /// If the name is taken, or a value is invalid.
    pub fn create(&self, name: &str, size: u64, block_bytes: u32) -> Result<(), VolumeError> {
        self.create_reserved(name, size, block_bytes, 0, None)
    }

    /// Makes a volume of zeros with a reservation of `reserved_bytes`. With a secret the volume is
    /// encrypted, by a new key that the secret decrypts.
    ///
    /// # Errors
    /// As [`Running::create`], or if the unreserved space is less than the reservation.
    pub fn create_reserved(
        &self,
        name: &str,
        size: u64,
        block_bytes: u32,
        reserved_bytes: u64,
        secret: Option<&Secret>,
    ) -> Result<(), VolumeError> {
        check_new(name, size, block_bytes, 0)?;
        let block_bytes = if block_bytes == 0 { BLOCK_BYTES } else { block_bytes };
        self.is_free(name)?;
        let (name_given, blocks, name) = (name, blocks(size, block_bytes)?, name.to_owned());
        self.may_reserve(reserved_bytes, size, 0)?;
        let meta = VolumeMeta {
            id: 0,
            name,
            is_snapshot: false,
            origin: 0,
            block_bytes,
            blocks,
            guid: 0,
            reserved_bytes,
            created: now(),
            key: 0,
        };
        let Some(secret) = secret else {
            return self.pool().change(&meta.name.clone(), Change::Create(meta));
        };
        let slot = VolumeKey::draw(self.fresh_guid()?)?.wrap(secret)?;
        let meta = VolumeMeta { key: slot.id, ..meta };
        let changes = vec![Change::PutKey(slot), Change::Create(meta)];
        self.pool().change(name_given, Change::Several(changes))
    }

    /// Makes a snapshot `VOLUME@SNAPSHOT` of all writes that were answered before.
    ///
    /// # Errors
    /// If the name is taken, or there is no such volume.
    pub fn snapshot(&self, name: &str) -> Result<(), VolumeError> {
        let origin = self.meta(snapshot_name(name)?.0)?;
        self.is_free(name)?;
        let (name_of, guid, created) = (name.to_owned(), self.fresh_guid()?, now());
        let meta = VolumeMeta {
            name: name_of,
            is_snapshot: true,
            origin: origin.id,
            guid,
            created,
            ..origin
        };
        self.pool().change(name, Change::Copy(meta))
    }

    /// Makes a hidden snapshot of a volume, which the next opening destroys, and returns its name.
    ///
    /// # Errors
    /// If there is no such volume, or no space for the snapshot.
    pub fn snapshot_unseen(&self, volume: &str) -> Result<String, VolumeError> {
        volume_name(volume)?;
        let (origin, guid) = (self.meta(volume)?, self.fresh_guid()?);
        // The name of a volume that is being received has one of these marks; this one has two.
        let name = format!("{HIDDEN_PREFIX}{HIDDEN_PREFIX}{guid:016x}");
        let (named, created) = (name.clone(), now());
        let origin_id = origin.id;
        let meta =
            VolumeMeta { name, is_snapshot: true, origin: origin_id, guid, created, ..origin };
        self.pool().change(volume, Change::Copy(meta))?;
        Ok(named)
    }

    /// Makes a volume with the contents of a snapshot, whose blocks the two share.
    ///
    /// # Errors
    /// If the name is taken, or there is no such snapshot.
    pub fn clone_of(&self, snapshot: &str, name: &str) -> Result<(), VolumeError> {
        snapshot_name(snapshot)?;
        new_volume_name(name)?;
        let origin = self.meta(snapshot)?;
        self.is_free(name)?;
        let (name, guid, created) = (name.to_owned(), 0, now());
        let origin_id = origin.id;
        let meta =
            VolumeMeta { name, is_snapshot: false, origin: origin_id, guid, created, ..origin };
        self.pool().change(&meta.name.clone(), Change::Copy(meta))
    }

    /// Restores a volume to the contents of one of its snapshots. The volume must not be in use.
    ///
    /// # Errors
    /// If there is no such snapshot, its length or block size differs, or the volume is in use.
    pub fn rollback(&self, snapshot: &str) -> Result<(), VolumeError> {
        let name = snapshot_name(snapshot)?.0;
        let to = self.meta(snapshot)?;
        let before = self.meta(name)?;
        let _held = self.hold(&before)?;
        // Before the hold, another thread could have resized the volume or given its name to
        // another one.
        let volume = self.meta(name)?;
        if volume.id != before.id {
            return Err(VolumeError::NoSuchVolume { name: name.to_owned() });
        }
        if to.block_bytes != volume.block_bytes {
            let wanted = format!("a snapshot with blocks of {}", Bytes(volume.block_bytes.into()));
            return invalid("name", snapshot, &wanted);
        }
        if to.blocks != volume.blocks {
            let (has, was) = (Bytes(volume.size_bytes()), Bytes(to.size_bytes()));
            let wanted = format!(
                "a snapshot of {has}, the present size of `{name}`; the snapshot has {was}: resize \
                 `{name}` to {was} first"
            );
            return invalid("name", snapshot, &wanted);
        }
        self.pool().change(&volume.name, Change::Rollback { id: volume.id, to: to.id })
    }

    /// Changes the length of a volume, which must not be in use. Blocks beyond a shorter length are
    /// lost, so it needs `may_shrink`.
    ///
    /// # Errors
    /// If the length is invalid, or shorter without `may_shrink`, or the volume is in use.
    pub fn resize(&self, name: &str, size: u64, may_shrink: bool) -> Result<(), VolumeError> {
        volume_name(name)?;
        let before = self.meta(name)?;
        let _held = self.hold(&before)?;
        // Another thread may have resized the volume before the hold.
        let volume = self.meta(name)?;
        if volume.id != before.id {
            return Err(VolumeError::NoSuchVolume { name: name.to_owned() });
        }
        let blocks = blocks(size, volume.block_bytes)?;
        if blocks < volume.blocks && !may_shrink {
            let (name, from) = (name.to_owned(), volume.size_bytes());
            return Err(VolumeError::Shrinks { name, from, to: size });
        }
        let gone = volume.blocks.saturating_sub(blocks);
        if gone > 0 {
            let live = self.pool().find(name)?;
            if live.reserved_bytes() > 0 {
                self.pool().segments().count_owned(&live.map, blocks, gone);
            }
        }
        self.pool().change(name, Change::Resize { id: volume.id, blocks })
    }

    /// Reserves `bytes` for a volume, before compression; other volumes cannot use that space. 0
    /// removes the reservation.
    ///
    /// # Errors
    /// If that is more than the volume's size, or than the space that is neither used nor reserved.
    pub fn reserve(&self, name: &str, bytes: u64) -> Result<(), VolumeError> {
        let _attributes = self.attributes();
        let id = self.check_reserve(name, bytes)?;
        self.pool().change(name, Change::Reserve { id, bytes })
    }

    /// Sets properties of a volume, and its reservation in bytes, all or none. The volume may be a
    /// device, to which they apply at once, unless its clients could not learn of the change
    /// ([`Running::needs_closing`]).
    ///
    /// # Errors
    /// If there is no such volume, it would have to be closed, or there is no space for the
    /// reservation.
    pub fn set(
        &self,
        name: &str,
        properties: Properties,
        reservation: Option<u64>,
    ) -> Result<(), VolumeError> {
        volume_name(name)?;
        let _attributes = self.attributes();
        let meta = self.meta(name)?;
        let id = meta.id;
        let needs_closing = self.needs_closing(id, &properties);
        let _held = needs_closing.then(|| self.hold(&meta)).transpose()?;
        let mut changes = vec![Change::Set { id, properties }];
        if let Some(bytes) = reservation {
            self.check_reserve(name, bytes)?;
            changes.push(Change::Reserve { id, bytes });
        }
        self.pool().change(name, Change::Several(changes))?;
        self.apply(id, &properties);
        Ok(())
    }

    /// Checks a reservation, and counts the blocks of the volume that it needs. Returns the number
    /// of the volume.
    fn check_reserve(&self, name: &str, bytes: u64) -> Result<u32, VolumeError> {
        volume_name(name)?;
        let (id, size, has) = {
            let live = self.pool().find(name)?;
            // The blocks of a volume without a reservation were not counted exactly.
            let is_exact = bytes == 0 || live.reserved_bytes() > 0;
            if !is_exact {
                self.pool().segments().count_owned(&live.map, 0, live.meta.blocks);
            }
            let owned = if is_exact { live.owned() } else { live.map.owned() };
            let owned = owned.saturating_mul(live.meta.block_bytes.into());
            (live.meta.id, live.meta.size_bytes(), live.reserved_bytes().max(owned))
        };
        self.may_reserve(bytes, size, has)?;
        Ok(id)
    }

    /// Refuses a reservation that exceeds the volume's size, or what is unreserved plus what the
    /// volume already has.
    fn may_reserve(&self, bytes: u64, size: u64, has: u64) -> Result<(), VolumeError> {
        within_size(bytes, size)?;
        self.pool().segments().measure_outside_space();
        let most = self.pool().unreserved_bytes().saturating_add(has);
        // If unknown bytes could cover the reservation, accept it here: the committer starts a
        // liveness scan before it refuses.
        if bytes > most.saturating_add(self.pool().segments().unknown_bytes()) {
            let wanted =
                format!("at most {most} bytes, the space that is neither used nor reserved");
            return invalid("reservation", &Bytes(bytes).to_string(), &wanted);
        }
        Ok(())
    }

    /// Removes a snapshot, or a volume that has no snapshots.
    ///
    /// # Errors
    /// If there is no such volume or snapshot, it is in use, or has a hold.
    pub fn destroy(&self, name: &str) -> Result<(), VolumeError> {
        self.meta(name)?;
        self.destroy_all(&self.doomed(name, false)?)
    }

    /// What a name means for `destroy`, in the order in which it is destroyed:
    ///
    /// - `VOLUME`: the volume; with `recursive` also its snapshots.
    /// - `VOLUME@SNAPSHOT`: the snapshot.
    /// - `VOLUME@A%B`: the snapshots from A to B in order of creation; without A from the oldest
    ///   one, without B to the newest one.
    /// - `@SNAPSHOT` with `recursive`: the snapshots of this name of all volumes.
    ///
    /// # Errors
    /// If there is none, one of them has a hold, or a volume has snapshots that are not destroyed.
    pub fn doomed(&self, name: &str, recursive: bool) -> Result<Vec<VolumeMeta>, VolumeError> {
        let volumes = self.pool().volumes();
        let no_volume = |name: &str| VolumeError::NoSuchVolume { name: name.to_owned() };
        let find = |name: &str| {
            let found = volumes.find(name).map(|live| live.listed());
            found.ok_or_else(|| no_volume(name))
        };
        let doomed: Vec<VolumeMeta> = match name.split_once('@') {
            Some(("", snapshot)) if recursive => {
                let names = volumes.only_volumes().map(|it| format!("{}@{snapshot}", it.meta.name));
                let found: Vec<_> = names.filter_map(|name| find(&name).ok()).collect();
                if found.is_empty() { Err(no_volume(name)) } else { Ok(found) }?
            }
            Some((volume, range)) if range.contains('%') => {
                let (first, last) = range.split_once('%').unwrap_or_default();
                let end = |end: &str, none: u32| match end {
                    "" => Ok(none),
                    end => find(&format!("{volume}@{end}")).map(|it| it.id),
                };
                find(volume)?;
                let range = end(first, 0)?..=end(last, u32::MAX)?;
                let found = volumes.snapshots_of(volume).filter(|it| range.contains(&it.meta.id));
                let found: Vec<_> = found.map(|it| it.listed()).collect();
                if found.is_empty() {
                    let wanted = "a range that has a snapshot: the older one first";
                    return invalid("name", name, wanted);
                }
                found
            }
            Some(_) => vec![find(name)?],
            None => {
                let meta = find(name)?;
                let mut snapshots: Vec<_> =
                    volumes.snapshots_of(name).map(|it| it.listed()).collect();
                if let Some(snapshot) = snapshots.first().filter(|_| !recursive) {
                    let why = format!(
                        "needed by its snapshot `{}`; destroy that first, or use -r \
                         (`\"recursive\": true`)",
                        snapshot.name
                    );
                    return Err(VolumeError::Busy { name: name.to_owned(), why });
                }
                snapshots.push(meta);
                snapshots
            }
        };
        for meta in &doomed {
            if let Some(hold) = volumes.holds_of(meta.id).first() {
                let why = format!("held by `{}`; release that first", hold.tag);
                return Err(VolumeError::Busy { name: meta.name.clone(), why });
            }
        }
        Ok(doomed)
    }

    /// Destroys what [`Running::doomed`] has found, nothing if one is a device. Up to eight go
    /// together, a volume with its newest snapshots; if the process ends, the rest stays.
    ///
    /// # Errors
    /// If one of them is being sent, or was held or removed meanwhile: then those before it are
    /// destroyed. A volume that has got a snapshot meanwhile stays, with its newest snapshots.
    pub fn destroy_all(&self, doomed: &[VolumeMeta]) -> Result<(), VolumeError> {
        let held = doomed.iter().map(|meta| self.hold(meta)).collect::<Result<Vec<_>, _>>()?;
        self.destroy_held(doomed)?;
        drop(held);
        Ok(())
    }

    /// As [`Running::destroy_all`]; nothing is destroyed if `check` refuses. While it checks,
    /// and until they are destroyed, none of them can be a device, and no key slot, property or
    /// reservation of the pool changes. So `check` must not change any.
    ///
    /// # Errors
    /// As [`Running::destroy_all`], and those of `check`.
    pub fn destroy_all_if(
        &self,
        doomed: &[VolumeMeta],
        check: impl FnOnce() -> Result<(), VolumeError>,
    ) -> Result<(), VolumeError> {
        let held = doomed.iter().map(|meta| self.hold(meta)).collect::<Result<Vec<_>, _>>()?;
        let _attributes = self.attributes();
        check()?;
        self.destroy_held(doomed)?;
        drop(held);
        Ok(())
    }

    /// As [`Running::destroy_all`]. The caller holds all of them.
    fn destroy_held(&self, doomed: &[VolumeMeta]) -> Result<(), VolumeError> {
        // A volume is the last one. The committer refuses to destroy it without a snapshot that was
        // made meanwhile.
        for some in doomed.rchunks(SEVERAL_MAX).rev() {
            let destroy = |meta: &VolumeMeta| Change::Destroy { id: meta.id };
            let Some(last) = some.last() else { continue };
            let change = match some {
                [one] => destroy(one),
                some => Change::Several(some.iter().map(destroy).collect()),
            };
            let changed = self.pool().change(&last.name, change);
            changed.map_err(|error| self.new_snapshot(doomed).unwrap_or(error))?;
        }
        Ok(())
    }

    /// The error if a volume that is to be destroyed has got a snapshot meanwhile.
    fn new_snapshot(&self, doomed: &[VolumeMeta]) -> Option<VolumeError> {
        let volume = doomed.last().filter(|meta| !meta.is_snapshot)?;
        let volumes = self.pool().volumes();
        let mut snapshots = volumes.snapshots_of(&volume.name);
        let new = snapshots.find(|it| doomed.iter().all(|meta| meta.id != it.meta.id))?;
        let why = "a snapshot that was made meanwhile; run the command again".to_owned();
        Some(VolumeError::Busy { name: new.meta.name.clone(), why })
    }

    /// Renames a volume, which must not be in use, with its snapshots; or a snapshot, whose new
    /// name has the same volume.
    ///
    /// # Errors
    /// If a name is invalid or taken, there is no such volume, or it is in use.
    pub fn rename(&self, name: &str, new: &str) -> Result<(), VolumeError> {
        let meta = self.meta(name)?;
        match name.split_once('@') {
            None => {
                volume_name(name)?;
                new_volume_name(new)?;
            }
            Some((volume, _)) if snapshot_name(new)?.0 != volume => {
                return invalid("new", new, &format!("`{volume}@` and the new name"));
            }
            Some(_) => {}
        }
        self.is_free(new)?;
        let longest = {
            let volumes = self.pool().volumes();
            volumes.snapshots_of(name).map(|it| it.meta.name.len() - name.len()).max()
        };
        if new.len() + longest.unwrap_or(0) > NAME_MAX {
            let wanted = format!("a name with which those of snapshots have {NAME_MAX} characters");
            return invalid("new", new, &wanted);
        }
        let _held = self.hold(&meta)?;
        self.pool().change(name, Change::Rename { id: meta.id, name: new.to_owned() })
    }

    /// Makes a snapshot `VOLUME@SNAPSHOT` of each volume, all at one moment of the log: of all
    /// writes that were answered before. Returns their names.
    ///
    /// # Errors
    /// If a name is invalid or taken, or there is no volume.
    pub fn snapshot_all(&self, snapshot: &str) -> Result<Vec<String>, VolumeError> {
        let names: Vec<String> = {
            let volumes = self.pool().volumes();
            volumes.only_volumes().map(|it| format!("{}@{snapshot}", it.meta.name)).collect()
        };
        if names.is_empty() {
            return invalid("pool", "", "one that has a volume");
        }
        for name in &names {
            snapshot_name(name)?;
            self.is_free(name)?;
        }
        let (seed, created) = (self.fresh_guid()?, now());
        let (first_id, snapshot) = (0, snapshot.to_owned());
        let change = Change::SnapshotAll { first_id, snapshot, created, seed };
        self.pool().change(&names[0], change)?;
        Ok(names)
    }

    /// Exchanges a clone and its origin: the clone gets the snapshot that it was cloned from, and
    /// the older snapshots of that volume, which becomes a clone. Both may be in use. Returns the
    /// new names of the snapshots.
    ///
    /// # Errors
    /// If it is no clone, the clone has a snapshot of the same name already, or one of the
    /// snapshots is in use.
    pub fn promote(&self, name: &str) -> Result<Vec<String>, VolumeError> {
        volume_name(name)?;
        let id = self.meta(name)?.id;
        let names = {
            let volumes = self.pool().volumes();
            let Some(promotion) = volumes.promotion(id) else {
                return invalid("name", name, "a clone whose origin exists");
            };
            promotion.snapshots.into_iter().map(|(_, name)| name).collect::<Vec<_>>()
        };
        for new in &names {
            snapshot_name(new)?;
            self.is_free(new)?;
        }
        self.pool().change(name, Change::Promote { id })?;
        Ok(names)
    }

    /// Holds a snapshot: it cannot be destroyed until [`Running::release`].
    ///
    /// # Errors
    /// If there is no such snapshot, the tag is invalid, or the snapshot has it or too many.
    pub fn hold_snapshot(&self, name: &str, tag: &str) -> Result<(), VolumeError> {
        snapshot_name(name)?;
        let id = self.meta(name)?.id;
        if !is_tag(tag) {
            let wanted = format!(
                "1 to {TAG_MAX} letters, digits, `-`, `_`, `.`, `:` and `+`, the first neither `-` \
                 nor `.`"
            );
            return invalid("tag", tag, &wanted);
        }
        let (has, count) = {
            let volumes = self.pool().volumes();
            let holds = volumes.holds_of(id);
            (holds.iter().any(|hold| hold.tag == tag), holds.len())
        };
        if has {
            return invalid("tag", tag, &format!("one that `{name}` does not have"));
        }
        if count >= HOLDS_MAX {
            return invalid("tag", tag, &format!("at most {HOLDS_MAX} holds of `{name}`"));
        }
        let hold = Hold { tag: tag.to_owned(), created: now() };
        self.pool().change(name, Change::Hold { id, hold })
    }

    /// Releases a hold of a snapshot.
    ///
    /// # Errors
    /// If there is no such snapshot, or it has no such hold.
    pub fn release(&self, name: &str, tag: &str) -> Result<(), VolumeError> {
        snapshot_name(name)?;
        let id = self.meta(name)?.id;
        if self.pool().volumes().holds_of(id).iter().all(|hold| hold.tag != tag) {
            return invalid("tag", tag, &format!("the tag of a hold of `{name}`"));
        }
        self.pool().change(name, Change::Release { id, tag: tag.to_owned() })
    }

    /// Removes volumes that were received incompletely and cannot be continued, and snapshots that
    /// were made only to be sent.
    pub(crate) fn forget_all(&self) {
        let volumes = self.pool().volumes();
        let names = volumes.by_id.values().map(|live| live.meta.name.clone());
        let names: BTreeSet<_> = names.filter(|name| name.starts_with(HIDDEN_PREFIX)).collect();
        drop(volumes);
        let is_kept = |name: &str| match name.strip_prefix(RECEIVE_STATE_PREFIX) {
            Some(volume) => names.contains(&received_name(volume)),
            None => names.contains(&receive_state_name(&name[HIDDEN_PREFIX.len_utf8()..])),
        };
        names.iter().filter(|name| !is_kept(name)).for_each(|name| self.forget(name));
    }

    /// Removes a hidden volume or snapshot.
    pub fn forget(&self, name: &str) {
        let Ok(id) = self.pool().find(name).map(|live| live.meta.id) else { return };
        if let Err(error) = self.pool().change(name, Change::Destroy { id }) {
            tracing::warn!("cannot remove `{name}` before the next opening of the pool: {error}");
        }
    }
}
