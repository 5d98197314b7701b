//! The keys of encrypted volumes that a pool has in memory.
//!
//! ```text
//!                unlock                        lock (if nothing uses it)
//!   locked ─────────────▸ unlocked ──────────────────────────────────────▸ locked
//!      │                      ▴ unlock
//!      │ open with a secret   │
//!      └──────────────▸ in use by devices ── the last of them is closed ─▸ locked
//! ```
//!
//! Volumes that share blocks share a key: a snapshot, a clone and their origin are unlocked and
//! locked together.
#![allow(clippy::disallowed_types)] // Keys come and go rarely.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockyard_volume_format::catalogue::VolumeMeta;
use blockyard_volume_format::key_slot::KeySlot;

use crate::encryption::VolumeKey;
use crate::error::VolumeError;

/// The volume keys that a pool has in memory, by their identities.
#[derive(Debug, Default)]
pub struct Keyring(Mutex<BTreeMap<u64, HeldKey>>);

#[derive(Debug)]
struct HeldKey {
    key: Arc<VolumeKey>,
    /// Whether it stays without a device, until it is locked.
    is_unlocked: bool,
    /// Devices that were opened with its secret.
    devices: usize,
}

impl Keyring {
    fn held(&self) -> MutexGuard<'_, BTreeMap<u64, HeldKey>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The key of a volume or snapshot; `None` if it is not encrypted.
    ///
    /// # Errors
    /// If it is encrypted and its key is not here.
    pub fn of(&self, meta: &VolumeMeta) -> Result<Option<Arc<VolumeKey>>, VolumeError> {
        if meta.key == 0 {
            return Ok(None);
        }
        match self.held().get(&meta.key) {
            Some(held) => Ok(Some(Arc::clone(&held.key))),
            None => Err(VolumeError::Locked { name: meta.name.clone() }),
        }
    }

    /// Whether the key of a volume or snapshot is here.
    pub fn is_unlocked(&self, meta: &VolumeMeta) -> bool {
        self.held().contains_key(&meta.key)
    }

    /// Adds a key until it is locked.
    pub(crate) fn unlock(&self, key: VolumeKey) {
        let mut held = self.held();
        let it = held.entry(key.id()).or_insert_with(|| HeldKey::new(key));
        it.is_unlocked = true;
    }

    /// Keeps the key of an unlocked volume in memory until the result is dropped; `None` if the
    /// volume is not encrypted.
    ///
    /// # Errors
    /// If it is locked.
    pub(crate) fn lend_unlocked(
        self: &Arc<Keyring>,
        meta: &VolumeMeta,
    ) -> Result<Option<LentKey>, VolumeError> {
        if meta.key == 0 {
            return Ok(None);
        }
        match self.held().get_mut(&meta.key) {
            None => Err(VolumeError::Locked { name: meta.name.clone() }),
            Some(held) => {
                held.devices += 1;
                Ok(Some(LentKey { keyring: Arc::clone(self), id: meta.key }))
            }
        }
    }

    /// Removes a key that nothing uses.
    ///
    /// # Errors
    /// Why it cannot be removed.
    pub(crate) fn lock(&self, id: u64) -> Result<(), &'static str> {
        let mut held = self.held();
        match held.get(&id) {
            None => Err("locked already"),
            Some(it) if it.devices > 0 || Arc::strong_count(&it.key) > 1 => {
                Err("in use, or a volume that shares its key is; close that first")
            }
            Some(_) => {
                held.remove(&id);
                Ok(())
            }
        }
    }

    /// Removes the keys that no volume has any more.
    pub(crate) fn keep(&self, slots: &BTreeMap<u64, KeySlot>) {
        self.held().retain(|id, held| held.devices > 0 || slots.contains_key(id));
    }

    /// Adds a key until the result is dropped.
    pub(crate) fn lend(self: &Arc<Keyring>, key: VolumeKey) -> LentKey {
        let id = key.id();
        self.held().entry(id).or_insert_with(|| HeldKey::new(key)).devices += 1;
        LentKey { keyring: Arc::clone(self), id }
    }
}

impl HeldKey {
    fn new(key: VolumeKey) -> HeldKey {
        HeldKey { key: Arc::new(key), is_unlocked: false, devices: 0 }
    }
}

/// A device's part in a key that is in memory.
#[derive(Debug)]
pub(crate) struct LentKey {
    keyring: Arc<Keyring>,
    id: u64,
}

impl Drop for LentKey {
    fn drop(&mut self) {
        let mut held = self.keyring.held();
        if let Some(it) = held.get_mut(&self.id) {
            it.devices -= 1;
            if it.devices == 0 && !it.is_unlocked {
                held.remove(&self.id);
            }
        }
    }
}
