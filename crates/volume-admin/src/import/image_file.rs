//! A file of a disk image: its bytes, its holes, and errors that name it.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::qcow2::MAGIC;
use super::{DiskFormat, ImageRange, ImportError, RangeKind};

/// A file that an image may name. It is looked up and not open, because to open it can have
/// effects: that of a watchdog starts its timer.
pub(super) struct FoundFile {
    place: File,
    path: PathBuf,
    is_image: bool,
    /// Device and inode.
    id: (u64, u64),
}

impl FoundFile {
    /// Looks a path up, and follows symbolic links.
    ///
    /// # Errors
    /// If there is none, or a directory of the path cannot be searched.
    pub(super) fn find(path: &Path) -> Result<FoundFile, ImportError> {
        let failed = |source| ImportError::Io { path: path.display().to_string(), source };
        let flags = OFlags::PATH.bits() as i32;
        let place = OpenOptions::new().read(true).custom_flags(flags).open(path);
        let place = place.map_err(failed)?;
        let metadata = place.metadata().map_err(failed)?;
        let kind = metadata.file_type();
        let is_image = kind.is_file() || kind.is_block_device();
        let id = (metadata.dev(), metadata.ino());
        Ok(FoundFile { place, path: path.to_owned(), is_image, id })
    }

    /// The path of the file that was found, in `/proc`: it leads to no other file.
    fn link(&self) -> String {
        format!("/proc/self/fd/{}", self.place.as_raw_fd())
    }

    /// The path without symbolic links.
    pub(super) fn real_path(&self) -> Result<PathBuf, ImportError> {
        std::fs::read_link(self.link()).map_err(|error| self.failed(error))
    }

    /// Opens the file for reading.
    ///
    /// # Errors
    /// If it is neither a regular file nor a block device, or cannot be opened.
    pub(super) fn open(self) -> Result<ImageFile, ImportError> {
        if !self.is_image {
            return Err(self.refused("expected a file or a block device"));
        }
        let mut file = File::open(self.link()).map_err(|error| self.failed(error))?;
        let len = file.seek(SeekFrom::End(0)).map_err(|error| self.failed(error))?;
        let FoundFile { path, id, .. } = self;
        Ok(ImageFile { file, path, len, id })
    }

    pub(super) fn refused(&self, why: impl Into<String>) -> ImportError {
        ImportError::Refused { path: self.path.display().to_string(), why: why.into() }
    }

    fn failed(&self, source: io::Error) -> ImportError {
        ImportError::Io { path: self.path.display().to_string(), source }
    }
}

/// A file or block device that is open for reading.
pub(super) struct ImageFile {
    file: File,
    path: PathBuf,
    /// Length in bytes.
    pub(super) len: u64,
    /// Device and inode.
    pub(super) id: (u64, u64),
}

impl ImageFile {
    /// The format that the first bytes show.
    pub(super) fn probe(&self) -> Result<DiskFormat, ImportError> {
        let mut magic = [0; MAGIC.len()];
        if self.len < magic.len() as u64 {
            return Ok(DiskFormat::Raw);
        }
        self.read(0, &mut magic)?;
        Ok(if magic == MAGIC { DiskFormat::Qcow2 } else { DiskFormat::Raw })
    }

    /// Reads bytes, all of which must be before the end.
    pub(super) fn read(&self, at: u64, into: &mut [u8]) -> Result<(), ImportError> {
        self.file.read_exact_at(into, at).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                let (len, end) = (self.len, at.saturating_add(into.len() as u64));
                self.damaged(format!("it ends at byte {len}, before byte {end} of its data"))
            }
            _ => self.failed(error),
        })
    }

    /// The data or the hole that begins at an offset below the length.
    pub(super) fn range(&self, at: u64) -> Result<ImageRange, ImportError> {
        let seek = |from| rustix::fs::seek(&self.file, from);
        let range = |kind, end: u64| Ok(ImageRange { kind, len: end.max(at + 1) - at });
        match seek(rustix::fs::SeekFrom::Data(at)) {
            Ok(data) if data > at => range(RangeKind::Zeros, data),
            Ok(_) => {
                let hole = seek(rustix::fs::SeekFrom::Hole(at));
                range(RangeKind::Data, hole.unwrap_or(self.len))
            }
            Err(Errno::NXIO) => range(RangeKind::Zeros, self.len),
            // A file system or device without holes.
            Err(_) => range(RangeKind::Data, self.len),
        }
    }

    fn failed(&self, source: io::Error) -> ImportError {
        ImportError::Io { path: self.path.display().to_string(), source }
    }

    pub(super) fn refused(&self, why: impl Into<String>) -> ImportError {
        ImportError::Refused { path: self.path.display().to_string(), why: why.into() }
    }

    pub(super) fn damaged(&self, why: impl Into<String>) -> ImportError {
        ImportError::Damaged { path: self.path.display().to_string(), why: why.into() }
    }
}
