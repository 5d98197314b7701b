//! Operations on the keys of encrypted volumes: unlock, lock, and change the secret.

use std::sync::Arc;

use blockyard_store::SegmentStore;
use blockyard_volume_format::catalogue::{Change, VolumeMeta};
use blockyard_volume_format::key_slot::KeySlot;

use crate::config::SecretFile;
use crate::encryption::{Secret, VolumeKey};
use crate::error::VolumeError;
use crate::pool::Pool;
use crate::running::Running;

impl<D: SegmentStore> Pool<D> {
    /// The slot of a volume's key.
    ///
    /// # Errors
    /// If the volume is not encrypted.
    pub fn key_slot(&self, meta: &VolumeMeta) -> Result<KeySlot, VolumeError> {
        let slot = self.volumes().keys.get(&meta.key).cloned();
        slot.ok_or_else(|| VolumeError::NotEncrypted { name: meta.name.clone() })
    }

    /// Decrypts the key of an encrypted volume, and keeps it in memory until it is locked or the
    /// pool is closed.
    ///
    /// # Errors
    /// If there is no such volume, it is not encrypted, or the secret is not that of its key.
    pub fn unlock(&self, name: &str, secret: &Secret) -> Result<(), VolumeError> {
        let meta = self.find(name)?.meta.clone();
        self.keys().unlock(self.decrypt_key(&meta, secret)?);
        Ok(())
    }

    /// Decrypts the key of a volume.
    ///
    /// # Errors
    /// If the volume is not encrypted, or the secret is not that of its key.
    pub(crate) fn decrypt_key(
        &self,
        meta: &VolumeMeta,
        secret: &Secret,
    ) -> Result<VolumeKey, VolumeError> {
        let slot = self.key_slot(meta)?;
        let key = VolumeKey::unwrap(&slot, secret)?;
        key.ok_or_else(|| VolumeError::WrongKey { name: meta.name.clone() })
    }

    /// Checks that a file has the secret of a volume's key.
    ///
    /// # Errors
    /// If the file cannot be read, or has another secret.
    pub fn check_secret(&self, meta: &VolumeMeta, file: &SecretFile) -> Result<(), VolumeError> {
        self.decrypt_key(meta, &file.read()?).map(drop)
    }
}

impl<D: SegmentStore> Running<D> {
    /// Unlocks a volume: see [`Pool::unlock`].
    ///
    /// # Errors
    /// As [`Pool::unlock`].
    pub fn unlock(&self, name: &str, secret: &Secret) -> Result<(), VolumeError> {
        self.pool().unlock(name, secret)
    }

    /// Removes the key of an encrypted volume from memory.
    ///
    /// # Errors
    /// If there is no such volume, it is not encrypted, it is locked, or it or one that shares its
    /// key is in use.
    pub fn lock(&self, name: &str) -> Result<(), VolumeError> {
        let meta = self.pool().find(name)?.meta.clone();
        if meta.key == 0 {
            return Err(VolumeError::NotEncrypted { name: name.to_owned() });
        }
        let busy = |why: &str| VolumeError::Busy { name: name.to_owned(), why: why.to_owned() };
        self.pool().keys().lock(meta.key).map_err(busy)
    }

    /// Encrypts the key of a volume for another secret. Data are not written again. All volumes
    /// that share the key open by the new secret, and no longer by the old one.
    ///
    /// The old slot stays on the disk until its space is reused: who knows the old secret, and has
    /// the bytes of the pool, may still decrypt the key.
    ///
    /// # Errors
    /// If the volume is not encrypted, `old` is not the secret of its key, or without `old` the
    /// volume is locked.
    pub fn change_key(
        &self,
        name: &str,
        old: Option<&Secret>,
        new: &Secret,
    ) -> Result<(), VolumeError> {
        let _attributes = self.attributes();
        let meta = self.pool().find(name)?.meta.clone();
        self.pool().key_slot(&meta)?;
        let key = match old {
            Some(old) => Some(Arc::new(self.pool().decrypt_key(&meta, old)?)),
            None => self.pool().keys().of(&meta)?,
        };
        let key = key.ok_or_else(|| VolumeError::NotEncrypted { name: name.to_owned() })?;
        self.pool().change(name, Change::PutKey(key.wrap(new)?))
    }
}
