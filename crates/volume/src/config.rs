//! The parameters of a volume.

use std::path::PathBuf;

use blockyard_core::Bytes;
use blockyard_os::private_file::read_private_bytes;
use blockyard_store::remote::{RemoteParameters, is_remote};
use blockyard_store::{Commit, PoolPaths, StoreKind};
use blockyard_volume_format::catalogue::is_name;
use blockyard_volume_format::properties::Properties;

use crate::codec::Compression;
use crate::encryption::{SECRET_MAX, Secret};
use crate::error::VolumeError;
use crate::names::volume_name_wanted;

/// The default level of Zstandard.
pub const ZSTD_LEVEL: u8 = 3;

/// When writes are made durable (`sync=`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SyncMode {
    /// On request: writes with FUA, and at a flush all writes before it.
    #[default]
    Standard,
    /// Every write is durable when it completes.
    Always,
    /// Never on request: flush and FUA complete at once.
    Disabled,
}

impl SyncMode {
    /// All modes, in the order of their codes in [`Properties`].
    const ALL: [SyncMode; 3] = [SyncMode::Standard, SyncMode::Always, SyncMode::Disabled];

    /// The code in [`Properties`].
    pub fn code(self) -> u8 {
        self as u8
    }
}

/// Which of the parameters that are also properties of a volume the caller has given. A parameter
/// that is given takes effect in place of the property that the pool has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Given {
    /// `compress`.
    pub compress: bool,
    /// `sync`.
    pub sync: bool,
    /// `iops`.
    pub iops: bool,
    /// `bandwidth`.
    pub bandwidth: bool,
    /// `read_only`.
    pub read_only: bool,
}

impl Given {
    /// All of them.
    pub const ALL: Given =
        Given { compress: true, sync: true, iops: true, bandwidth: true, read_only: true };

    /// These without those that are set in `properties`.
    pub(crate) fn without(self, properties: &Properties) -> Given {
        Given {
            compress: self.compress && properties.compress.is_none(),
            sync: self.sync && properties.sync.is_none(),
            iops: self.iops && properties.iops.is_none(),
            bandwidth: self.bandwidth && properties.bandwidth.is_none(),
            read_only: self.read_only && properties.read_only.is_none(),
        }
    }
}

/// The parameters of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeConfig {
    /// The directory or disk of the pool.
    pub path: PathBuf,
    /// The directory or disk of the second copy; `None`: the one that the first copy's label names.
    pub path2: Option<PathBuf>,
    /// The required number of copies, 1 or 2; 0: as many as the pool has.
    pub copies: u8,
    /// Open the pool with one of two copies, even if the missing one may be newer.
    pub degraded: bool,
    /// The name of the volume in the pool.
    pub name: String,
    /// The capacity in bytes; 0: that of the existing volume.
    pub size: u64,
    /// The block length in bytes of a new volume; 0: that of the existing volume, or 16 KiB.
    pub volblocksize: u32,
    /// How blocks are compressed that are written from now on.
    pub compress: Compression,
    /// When writes are made durable.
    pub sync: SyncMode,
    /// Most reads and writes started per second; 0: no limit.
    pub iops: u64,
    /// Most bytes read and written per second; 0: no limit.
    pub bandwidth: u64,
    /// Whether every change is refused.
    pub read_only: bool,
    /// Which of `compress`, `sync`, `iops`, `bandwidth` and `read_only` take effect in place of the
    /// properties that the pool has of the volume. The others have the value of the property, and
    /// if it is not set the one here.
    pub given: Given,
    /// Bytes reserved for the volume, which other volumes cannot use; 0: the existing reservation.
    pub reservation: u64,
    /// Memory for the pool's maps in bytes, if this opens the pool; 0: 128 MiB.
    pub map_cache: u64,
    /// How writes to the pool become durable; `None`: any way. A pool that is open with another
    /// value is refused.
    pub commit: Option<Commit>,
    /// How the pool's files are read and written; `None`: any way. A pool that is open with another
    /// value is refused.
    pub store: Option<StoreKind>,
    /// The parameters of a pool in an object store.
    pub remote: RemoteParameters,
    /// The file with the secret of an encrypted volume. A volume that this opening makes is
    /// encrypted if there is one. `None`: the volume is not encrypted, or unlocked.
    pub secret: Option<SecretFile>,
}

/// A file with the secret of an encrypted volume, of mode 0600 or 0400.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretFile {
    /// A passphrase: the file's bytes without a line end after them.
    Passphrase(PathBuf),
    /// A key: all bytes of the file.
    Key(PathBuf),
}

impl SecretFile {
    /// Reads the secret.
    ///
    /// # Errors
    /// If the file cannot be read, other users can access it, or it is too short or too long.
    pub fn read(&self) -> Result<Secret, VolumeError> {
        let (field, path) = match self {
            SecretFile::Passphrase(path) => ("passphrase_file", path),
            SecretFile::Key(path) => ("key_file", path),
        };
        // A line end after the longest passphrase.
        let bytes = read_private_bytes(path, SECRET_MAX as u64 + 2);
        let mut bytes = bytes.map_err(|source| VolumeError::SecretFile { field, source })?;
        let secret = match self {
            SecretFile::Key(_) => Secret::Key(bytes),
            SecretFile::Passphrase(_) => {
                for end in [b'\n', b'\r'] {
                    if bytes.last() == Some(&end) {
                        bytes.pop();
                    }
                }
                Secret::Passphrase(bytes)
            }
        };
        secret.check().map_err(|error| match error {
            VolumeError::Invalid { value, wanted, .. } => {
                VolumeError::Invalid { field, value: format!("{} {value}", path.display()), wanted }
            }
            other => other,
        })?;
        Ok(secret)
    }
}

/// The default block length, in bytes.
pub const BLOCK_BYTES: u32 = 16 << 10;

/// The least block length, in bytes.
pub const BLOCK_BYTES_MIN: u32 = 4096;

/// Largest volume, in bytes.
pub const SIZE_MAX: u64 = 1 << 50;

impl VolumeConfig {
    /// The parameters of an existing volume, or of a new one whose size is still to be set. Other
    /// parameters have their defaults.
    pub fn new(path: impl Into<PathBuf>, name: impl Into<String>) -> VolumeConfig {
        VolumeConfig {
            path: path.into(),
            path2: None,
            copies: 0,
            degraded: false,
            name: name.into(),
            size: 0,
            volblocksize: 0,
            compress: Compression::default(),
            sync: SyncMode::default(),
            iops: 0,
            bandwidth: 0,
            read_only: false,
            given: Given::ALL,
            reservation: 0,
            map_cache: 0,
            commit: None,
            store: None,
            remote: RemoteParameters::default(),
            secret: None,
        }
    }

    /// The parameters with these properties in place of those that were not given.
    pub(crate) fn with(self, properties: &Properties) -> VolumeConfig {
        let given = self.given;
        let compress = properties.compress.filter(|_| !given.compress);
        let sync = properties.sync.filter(|_| !given.sync);
        VolumeConfig {
            compress: compress.map_or(self.compress, Compression::of_code),
            sync: sync.map_or(self.sync, |code| SyncMode::ALL[usize::from(code) % 3]),
            iops: properties.iops.filter(|_| !given.iops).unwrap_or(self.iops),
            bandwidth: properties.bandwidth.filter(|_| !given.bandwidth).unwrap_or(self.bandwidth),
            read_only: properties.read_only.filter(|_| !given.read_only).unwrap_or(self.read_only),
            ..self
        }
    }

    /// The parameters with these properties, also in place of those that were given.
    pub(crate) fn with_all(self, properties: &Properties) -> VolumeConfig {
        let given = self.given.without(properties);
        VolumeConfig { given, ..self }.with(properties)
    }

    /// The pool's places: its directory or disk, and that of the second copy.
    ///
    /// # Errors
    /// If there are not as many copies as there have to be.
    pub(crate) fn places(&self) -> Result<PoolPaths, VolumeError> {
        let (path, path2) = (self.path.clone(), self.path2.clone());
        let (degraded, remote) = (self.degraded, self.remote.clone());
        let places = PoolPaths { path, path2, degraded, remote };
        let second = places.second()?;
        let refused = |value: &str, wanted: String| {
            Err(VolumeError::Invalid { field: "copies", value: value.to_owned(), wanted })
        };
        match (self.copies, second) {
            (2, None) => refused("2", "path2=PLACE too, for the second copy".to_owned()),
            (1, Some(second)) => {
                refused("1", format!("2: the other copy is at `{}`", second.display()))
            }
            _ => Ok(places),
        }
    }

    /// Refuses parameters that only pools in directories or on disks have, or only those in object
    /// stores.
    fn check_remote(&self) -> Result<(), VolumeError> {
        let refused = |field, value: String, wanted: &str| {
            let wanted = format!("{wanted}: the pool is in an object store");
            Err(VolumeError::Invalid { field, value, wanted })
        };
        if !is_remote(&self.path) {
            return Ok(self.remote.refuse()?);
        }
        self.remote.check()?;
        if let Some(path) = &self.path2 {
            return refused("path2", path.display().to_string(), "none");
        }
        match (self.copies, self.commit, self.store) {
            (copies @ 2.., ..) => refused("copies", copies.to_string(), "1"),
            (_, Some(commit @ Commit::TaskQueue(_)), _) => {
                refused("commit", commit.to_string(), "group")
            }
            (.., Some(store @ (StoreKind::Uring | StoreKind::Threads))) => {
                refused("store", store.to_string(), "auto")
            }
            _ => Ok(()),
        }
    }

    /// Checks what can be checked without the pool.
    ///
    /// # Errors
    /// If a value is invalid.
    pub fn check(&self) -> Result<(), VolumeError> {
        let refused = |field, value: String, wanted: &str| {
            Err(VolumeError::Invalid { field, value, wanted: wanted.to_owned() })
        };
        if self.path.as_os_str().is_empty() {
            return refused("path", String::new(), "the directory of a pool");
        }
        if let Some(path) = &self.path2 {
            let shown = || path.display().to_string();
            if path.as_os_str().is_empty() || *path == self.path {
                return refused("path2", shown(), "another path than `path`");
            }
            if self.copies == 1 {
                return refused("path2", shown(), "none where there is one copy: copies=2");
            }
        }
        self.check_remote()?;
        if self.copies > 2 {
            return refused("copies", self.copies.to_string(), "1 or 2");
        }
        if !is_name(&self.name) || self.name.contains('@') {
            return refused("name", self.name.clone(), &volume_name_wanted());
        }
        let block = self.volblocksize;
        if block != 0 && (!block.is_power_of_two() || !(BLOCK_BYTES_MIN..=65_536).contains(&block))
        {
            return refused(
                "volblocksize",
                Bytes(block.into()).to_string(),
                "4k, 8k, 16k, 32k or 64k",
            );
        }
        if let Compression::Zstd(level) = self.compress {
            if !(1..=19).contains(&level) {
                return refused("compress", format!("zstd:{level}"), "zstd:1 to zstd:19");
            }
            if !cfg!(feature = "c-codecs") {
                let wanted = "lz4 or none: this build has no zstd";
                return refused("compress", format!("zstd:{level}"), wanted);
            }
        }
        // The block length of an existing volume is not known here.
        let unit = if block == 0 { BLOCK_BYTES_MIN } else { block };
        if !self.size.is_multiple_of(unit.into()) {
            let wanted = format!("a multiple of volblocksize, {}", Bytes(unit.into()));
            return refused("size", Bytes(self.size).to_string(), &wanted);
        }
        if self.size > SIZE_MAX {
            return refused("size", Bytes(self.size).to_string(), "1P at most");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parameter_that_does_not_fit_is_refused_by_field() {
        let good = VolumeConfig { size: 1 << 30, ..VolumeConfig::new("/pool", "v0") };
        assert!(good.check().is_ok());
        for (config, want) in [
            (VolumeConfig { path: "".into(), ..good.clone() }, "invalid path ``"),
            (VolumeConfig { name: "v@1".into(), ..good.clone() }, "invalid name `v@1`"),
            (VolumeConfig { volblocksize: 6000, ..good.clone() }, "invalid volblocksize `6000`"),
            (
                VolumeConfig { compress: Compression::Zstd(20), ..good.clone() },
                "invalid compress `zstd:20`",
            ),
            (VolumeConfig { size: 5000, ..good.clone() }, "invalid size `5000`"),
            (
                VolumeConfig {
                    remote: RemoteParameters { capacity_bytes: 1, ..RemoteParameters::default() },
                    ..good.clone()
                },
                "invalid pool_size `1`: expected none, unless path=s3://BUCKET/PREFIX",
            ),
            (
                VolumeConfig { path: "s3://b/p".into(), copies: 2, ..good.clone() },
                "invalid copies `2`: expected 1: the pool is in an object store",
            ),
            (
                VolumeConfig {
                    path: "s3://b/p".into(),
                    commit: Some(Commit::TaskQueue(2)),
                    ..good.clone()
                },
                "invalid commit `taskq:2`: expected group: ",
            ),
            (VolumeConfig { size: 2 << 50, ..good }, "invalid size "),
        ] {
            let error = config.check().unwrap_err();
            assert!(error.to_string().starts_with(want), "{error}");
        }
    }
}
