//! What is asked of a pool beside I/O: volumes, snapshots and clones by name. Each is a record of
//! the log, in its order among the writes, and durable when it is answered.

use crate::config::{BLOCK_BYTES, SIZE_MAX};
use crate::error::VolumeError;
use crate::format::catalogue::{
    Change, NAME_MAX, Traits, VOLUME_NAME_MAX, is_name, is_volume_name,
};
use crate::pool::ON_ITS_WAY;
use crate::running::Running;
use crate::store::Directory;

pub(crate) fn invalid<T>(field: &'static str, value: &str, wanted: &str) -> Result<T, VolumeError> {
    let (value, wanted) = (value.to_owned(), wanted.to_owned());
    Err(VolumeError::Invalid { field, value, wanted })
}

/// Refuses what cannot be the name of a volume that is there. One that an earlier version made may
/// have a name that no device can have.
pub(crate) fn volume_name(name: &str) -> Result<(), VolumeError> {
    match is_name(name) && !name.contains('@') {
        true => Ok(()),
        false => invalid("name", name, &volume_name_wanted()),
    }
}

/// Refuses what cannot be the name of a volume that is made: it has to be a device's name too.
pub(crate) fn new_volume_name(name: &str) -> Result<(), VolumeError> {
    match is_volume_name(name) {
        true => Ok(()),
        false => invalid("name", name, &volume_name_wanted()),
    }
}

/// What the name of a volume has to be.
pub(crate) fn volume_name_wanted() -> String {
    format!(
        "1 to {VOLUME_NAME_MAX} letters, digits, `-`, `_` and `.`, the first a letter or a digit"
    )
}

/// The two parts of a snapshot's name.
pub(crate) fn snapshot_name(name: &str) -> Result<(&str, &str), VolumeError> {
    let wanted = format!(
        "VOLUME@SNAPSHOT of at most {NAME_MAX} characters, SNAPSHOT of letters, digits, `-`, `_`, \
         `.`, `:` and `+`, the first neither `-` nor `.`"
    );
    match name.split_once('@').filter(|_| is_name(name)) {
        Some(parts) => Ok(parts),
        None => invalid("name", name, &wanted),
    }
}

/// Checks the parameters of a volume that is to be made, as far as that needs no pool: what is
/// refused leaves nothing, not even a pool. `block_bytes` 0: 16 KiB.
///
/// # Errors
/// The first value that is not possible.
pub fn check_new(
    name: &str,
    size: u64,
    block_bytes: u32,
    reserved_bytes: u64,
) -> Result<(), VolumeError> {
    new_volume_name(name)?;
    let block_bytes = if block_bytes == 0 { BLOCK_BYTES } else { block_bytes };
    if !block_bytes.is_power_of_two() || !(4096..=65_536).contains(&block_bytes) {
        return invalid("volblocksize", &block_bytes.to_string(), "4k, 8k, 16k, 32k or 64k");
    }
    if size == 0 {
        return invalid("size", "0", "the size of the volume, which does not exist yet");
    }
    blocks(size, block_bytes)?;
    match reserved_bytes <= size {
        true => Ok(()),
        false => invalid(
            "reservation",
            &reserved_bytes.to_string(),
            &format!("the size at most, {size}"),
        ),
    }
}

/// A length in whole blocks.
fn blocks(size: u64, block_bytes: u32) -> Result<u64, VolumeError> {
    let unit = u64::from(block_bytes);
    match size > 0 && size.is_multiple_of(unit) && size <= SIZE_MAX {
        true => Ok(size / unit),
        false => {
            let wanted = format!("a multiple of volblocksize, {unit}, up to 1P");
            invalid("size", &size.to_string(), &wanted)
        }
    }
}

impl<D: Directory> Running<D> {
    fn traits(&self, name: &str) -> Result<Traits, VolumeError> {
        // The reference goes at once: a volume that somebody refers to is in use.
        Ok(self.pool().find(name)?.traits.clone())
    }

    /// An identity for a snapshot.
    fn fresh_guid(&self) -> Result<u64, VolumeError> {
        let id = self.pool().segments().directory().fresh_id();
        let id = id.map_err(VolumeError::io("cannot draw an identity"))?;
        Ok(crate::bytes::u64_at(&id, 0).max(1))
    }

    pub(crate) fn is_free(&self, name: &str) -> Result<(), VolumeError> {
        match self.pool().find(name) {
            Ok(_) => Err(VolumeError::Exists { name: name.to_owned() }),
            Err(_) => Ok(()),
        }
    }

    /// Makes a volume of zeros; `block_bytes` 0: 16 KiB.
    ///
    /// # Errors
    /// If the name is taken, or a value does not fit.
    pub fn create(&self, name: &str, size: u64, block_bytes: u32) -> Result<(), VolumeError> {
        self.create_reserved(name, size, block_bytes, 0)
    }

    /// The same with so much space that it is promised.
    ///
    /// # Errors
    /// As [`Running::create`], or if there is not as much that nobody has or is promised.
    pub fn create_reserved(
        &self,
        name: &str,
        size: u64,
        block_bytes: u32,
        reserved_bytes: u64,
    ) -> Result<(), VolumeError> {
        check_new(name, size, block_bytes, 0)?;
        let block_bytes = if block_bytes == 0 { BLOCK_BYTES } else { block_bytes };
        self.is_free(name)?;
        let (blocks, name) = (blocks(size, block_bytes)?, name.to_owned());
        self.may_reserve(reserved_bytes, size, 0)?;
        let traits = Traits {
            id: 0,
            name,
            is_snapshot: false,
            origin: 0,
            block_bytes,
            blocks,
            guid: 0,
            reserved_bytes,
        };
        self.pool().change(&traits.name.clone(), Change::Create(traits))
    }

    /// Makes a snapshot `VOLUME@SNAPSHOT`, of what was answered before.
    ///
    /// # Errors
    /// If the name is taken, or there is no such volume.
    pub fn snapshot(&self, name: &str) -> Result<(), VolumeError> {
        let origin = self.traits(snapshot_name(name)?.0)?;
        self.is_free(name)?;
        let (name_of, guid) = (name.to_owned(), self.fresh_guid()?);
        let traits = Traits { name: name_of, is_snapshot: true, origin: origin.id, guid, ..origin };
        self.pool().change(name, Change::Copy(traits))
    }

    /// Makes a snapshot of a volume that nobody sees, to be gone at the next opening; answers its
    /// name.
    pub(crate) fn snapshot_unseen(&self, volume: &str) -> Result<String, VolumeError> {
        volume_name(volume)?;
        let (origin, guid) = (self.traits(volume)?, self.fresh_guid()?);
        // What is received for a volume has one of these marks and the volume's name.
        let name = format!("{ON_ITS_WAY}{ON_ITS_WAY}{guid:016x}");
        let named = name.clone();
        let traits = Traits { name, is_snapshot: true, origin: origin.id, guid, ..origin };
        self.pool().change(volume, Change::Copy(traits))?;
        Ok(named)
    }

    /// Makes a volume with the contents of a snapshot, whose blocks the two share.
    ///
    /// # Errors
    /// If the name is taken, or there is no such snapshot.
    pub fn clone_of(&self, snapshot: &str, name: &str) -> Result<(), VolumeError> {
        snapshot_name(snapshot)?;
        new_volume_name(name)?;
        let origin = self.traits(snapshot)?;
        self.is_free(name)?;
        let (name, guid) = (name.to_owned(), 0);
        let traits = Traits { name, is_snapshot: false, origin: origin.id, guid, ..origin };
        self.pool().change(&traits.name.clone(), Change::Copy(traits))
    }

    /// Gives a volume the contents of one of its snapshots again. It must not be a device.
    ///
    /// # Errors
    /// If there is no such snapshot, it has another length, or the volume is in use.
    pub fn rollback(&self, snapshot: &str) -> Result<(), VolumeError> {
        let name = snapshot_name(snapshot)?.0;
        let to = self.traits(snapshot)?;
        let before = self.traits(name)?;
        let _held = self.hold(&before)?;
        // Until it was held it could be resized, or another one be given its name.
        let volume = self.traits(name)?;
        if volume.id != before.id {
            return Err(VolumeError::NoSuchVolume { name: name.to_owned() });
        }
        if to.block_bytes != volume.block_bytes {
            let wanted = format!("a snapshot with blocks of {} bytes", volume.block_bytes);
            return invalid("name", snapshot, &wanted);
        }
        if to.blocks != volume.blocks {
            let has = volume.blocks * u64::from(volume.block_bytes);
            let wanted = format!("a snapshot of {has} bytes; resize the volume first");
            return invalid("name", snapshot, &wanted);
        }
        self.pool().change(&volume.name, Change::Rollback { id: volume.id, to: to.id })
    }

    /// Changes the length of a volume, which must not be a device. What lies beyond is gone.
    ///
    /// # Errors
    /// If the length does not fit, or the volume is in use.
    pub fn resize(&self, name: &str, size: u64) -> Result<(), VolumeError> {
        volume_name(name)?;
        let volume = self.traits(name)?;
        let blocks = blocks(size, volume.block_bytes)?;
        let _held = self.hold(&volume)?;
        let gone = volume.blocks.saturating_sub(blocks);
        if gone > 0 {
            let live = self.pool().find(name)?;
            if live.reserved_bytes() > 0 {
                self.pool().segments().count_owned(&live.map, blocks, gone);
            }
        }
        self.pool().change(name, Change::Resize { id: volume.id, blocks })
    }

    /// Promises a volume so much space, before compression: others do not get it. 0: nothing.
    ///
    /// # Errors
    /// If that is more than its size, or there is not as much that nobody has or is promised.
    pub fn reserve(&self, name: &str, bytes: u64) -> Result<(), VolumeError> {
        volume_name(name)?;
        let (id, size, has) = {
            let live = self.pool().find(name)?;
            // Who was promised nothing was not counted exactly.
            let is_exact = bytes == 0 || live.reserved_bytes() > 0;
            if !is_exact {
                self.pool().segments().count_owned(&live.map, 0, live.traits.blocks);
            }
            let owned = if is_exact { live.owned() } else { live.map.owned() };
            let owned = owned.saturating_mul(live.traits.block_bytes.into());
            (live.traits.id, live.traits.size_bytes(), live.reserved_bytes().max(owned))
        };
        self.may_reserve(bytes, size, has)?;
        self.pool().change(name, Change::Reserve { id, bytes })
    }

    /// Refuses a reservation that is more than a size, or than there is beside what the volume has.
    fn may_reserve(&self, bytes: u64, size: u64, has: u64) -> Result<(), VolumeError> {
        if bytes > size {
            return invalid(
                "reservation",
                &bytes.to_string(),
                &format!("the size at most, {size}"),
            );
        }
        self.pool().segments().look_outside();
        let most = self.pool().unpromised_bytes().saturating_add(has);
        // Blocks are counted again before that is refused for what may not count.
        if bytes > most.saturating_add(self.pool().segments().unknown_bytes()) {
            let wanted = format!("{most} at most, which nobody has or is promised");
            return invalid("reservation", &bytes.to_string(), &wanted);
        }
        Ok(())
    }

    /// Removes a volume, which must have no snapshots, or a snapshot.
    ///
    /// # Errors
    /// If there is none of this name, or it is in use.
    pub fn destroy(&self, name: &str) -> Result<(), VolumeError> {
        let volume = self.traits(name)?;
        // One that is made from now on is refused, or has the volume refused.
        let prefix = format!("{name}@");
        if let Some(snapshot) = self.pool().list().iter().find(|it| it.name.starts_with(&prefix)) {
            let why = format!("needed by its snapshot `{}`; destroy that first", snapshot.name);
            return Err(VolumeError::Busy { name: name.to_owned(), why });
        }
        let _held = self.hold(&volume)?;
        self.pool().change(name, Change::Destroy { id: volume.id })
    }
}
