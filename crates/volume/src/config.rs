//! The parameters of a volume.

use std::path::PathBuf;

use crate::admin::volume_name_wanted;
use crate::error::VolumeError;
use crate::format::catalogue::is_name;
use crate::store::mirror::places::Places;
use crate::store::{Commit, StoreKind};

/// How blocks are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// By LZ4, where that saves anything.
    #[default]
    Lz4,
    /// By Zstandard of a level, 1 to 19, where that saves anything.
    Zstd(u8),
}

/// The level of Zstandard where nothing else is said.
pub const ZSTD_LEVEL: u8 = 3;

/// What is durable when.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SyncMode {
    /// What is asked to be: writes with FUA, and what was written before a flush.
    #[default]
    Standard,
    /// Every write when it is answered.
    Always,
    /// Nothing by request: flush and FUA are answered at once.
    Disabled,
}

/// The parameters of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeConfig {
    /// The pool's directory, or its disk.
    pub path: PathBuf,
    /// The same of its second copy; where none is named, the one that the first one knows.
    pub path2: Option<PathBuf>,
    /// How many copies there have to be: 1 or 2; 0: as many as there are.
    pub copies: u8,
    /// Where one of two copies is not there, and may be the newer one, the other one will do.
    pub degraded: bool,
    /// The volume's name in it.
    pub name: String,
    /// Its capacity in bytes; 0: what it has.
    pub size: u64,
    /// Length of a block in bytes, of a volume that is made; 0: what it has, or 16 KiB.
    pub volblocksize: u32,
    /// How blocks are compressed that are written from now on.
    pub compress: Compression,
    /// What is durable when.
    pub sync: SyncMode,
    /// Most reads and writes that begin in a second; 0: any number.
    pub iops: u64,
    /// Most bytes of them in a second; 0: any number.
    pub bandwidth: u64,
    /// Bytes that it is promised, which others do not get; 0: what it is promised already.
    pub reservation: u64,
    /// Memory for the maps of the pool in bytes, if it is opened now; 0: 128 MiB.
    pub map_cache: u64,
    /// How writes to the pool become durable, if that matters: a pool that is open otherwise is
    /// refused.
    pub commit: Option<Commit>,
    /// By what the pool's files are read and written, in the same way.
    pub store: Option<StoreKind>,
}

/// Length of a block where nothing else is said.
pub const BLOCK_BYTES: u32 = 16 << 10;

/// Shortest block.
pub const BLOCK_BYTES_MIN: u32 = 4096;

/// Largest volume, in bytes.
pub const SIZE_MAX: u64 = 1 << 50;

impl VolumeConfig {
    /// A volume that is there, or whose size is still to be said, with all else as it is by
    /// default.
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
            reservation: 0,
            map_cache: 0,
            commit: None,
            store: None,
        }
    }

    /// Where the pool is.
    ///
    /// # Errors
    /// If there are not as many copies as there have to be.
    pub(crate) fn places(&self) -> Result<Places, VolumeError> {
        let (path, path2) = (self.path.clone(), self.path2.clone());
        let places = Places { path, path2, degraded: self.degraded };
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

    /// Checks what can be checked without looking at the pool.
    ///
    /// # Errors
    /// If a value does not fit.
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
                return refused("path2", shown(), "another place than `path`");
            }
            if self.copies == 1 {
                return refused("path2", shown(), "none where there is one copy: copies=2");
            }
        }
        if self.copies > 2 {
            return refused("copies", self.copies.to_string(), "1 or 2");
        }
        if !is_name(&self.name) || self.name.contains('@') {
            return refused("name", self.name.clone(), &volume_name_wanted());
        }
        let block = self.volblocksize;
        if block != 0 && (!block.is_power_of_two() || !(BLOCK_BYTES_MIN..=65_536).contains(&block))
        {
            return refused("volblocksize", block.to_string(), "4k, 8k, 16k, 32k or 64k");
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
        // What a volume has that is there is not known yet.
        let unit = if block == 0 { BLOCK_BYTES_MIN } else { block };
        if !self.size.is_multiple_of(unit.into()) {
            let wanted = format!("a multiple of volblocksize, {unit}");
            return refused("size", self.size.to_string(), &wanted);
        }
        if self.size > SIZE_MAX {
            return refused("size", self.size.to_string(), "1P at most");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_by_field() {
        let good = VolumeConfig { size: 1 << 30, ..VolumeConfig::new("/pool", "v0") };
        assert!(good.check().is_ok());
        for (config, want) in [
            (VolumeConfig { path: "".into(), ..good.clone() }, "path: `` will not do"),
            (VolumeConfig { name: "v@1".into(), ..good.clone() }, "name: `v@1` will not do"),
            (VolumeConfig { volblocksize: 6000, ..good.clone() }, "volblocksize: `6000`"),
            (
                VolumeConfig { compress: Compression::Zstd(20), ..good.clone() },
                "compress: `zstd:20` will not do",
            ),
            (VolumeConfig { size: 5000, ..good.clone() }, "size: `5000` will not do"),
            (VolumeConfig { size: 2 << 50, ..good }, "size: "),
        ] {
            let error = config.check().unwrap_err();
            assert!(error.to_string().starts_with(want), "{error}");
        }
    }
}
