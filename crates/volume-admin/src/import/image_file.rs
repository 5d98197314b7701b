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

/// A file or block device.
pub(super) struct ImageFile {
    file: File,
    path: PathBuf,
    /// Length in bytes.
    pub(super) len: u64,
    /// Device and inode.
    pub(super) id: (u64, u64),
}

impl ImageFile {
    /// Opens a file or a block device for reading.
    ///
    /// # Errors
    /// If it is something else, or cannot be opened.
    pub(super) fn open(path: &Path) -> Result<ImageFile, ImportError> {
        let shown = path.display().to_string();
        let failed = |source| ImportError::Io { path: shown.clone(), source };
        // Opening a named pipe must not wait for a writer.
        let flags = OFlags::NONBLOCK.bits() as i32;
        let mut file =
            OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        let kind = metadata.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            let why = "expected a file or a block device".to_owned();
            return Err(ImportError::Refused { path: shown, why });
        }
        let len = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let id = (metadata.dev(), metadata.ino());
        Ok(ImageFile { file, path: path.to_owned(), len, id })
    }

    /// The path of the open file, without symbolic links.
    pub(super) fn real_path(&self) -> Result<PathBuf, ImportError> {
        let link = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        std::fs::read_link(link).map_err(|error| self.failed(error))
    }

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

    pub(super) fn failed(&self, source: io::Error) -> ImportError {
        ImportError::Io { path: self.path.display().to_string(), source }
    }

    pub(super) fn refused(&self, why: impl Into<String>) -> ImportError {
        ImportError::Refused { path: self.path.display().to_string(), why: why.into() }
    }

    pub(super) fn damaged(&self, why: impl Into<String>) -> ImportError {
        ImportError::Damaged { path: self.path.display().to_string(), why: why.into() }
    }
}
