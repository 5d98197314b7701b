//! Parameters of a `file` device. All of them are checked before a file is opened or created.

use std::fmt;
use std::path::PathBuf;

use blockyard_core::SECTOR_BYTES;

use crate::error::FileDeviceError;

/// Whether I/O bypasses the page cache (`O_DIRECT`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// If the kernel reports that direct I/O can access the file in its logical blocks. The kernel
    /// reports the alignment since Linux 6.1, for block devices and for most file systems on disks.
    #[default]
    Auto,
    /// Always: the opening fails if the file system has no direct I/O.
    On,
    /// Never.
    Off,
}

impl fmt::Display for Direct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Direct::Auto => "auto",
            Direct::On => "on",
            Direct::Off => "off",
        })
    }
}

/// The system calls that execute requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoEngine {
    /// io_uring if the system allows it, and blocking calls otherwise.
    #[default]
    Auto,
    /// io_uring: the opening fails if the system refuses it, as containers often do.
    Uring,
    /// Calls that block the thread of the channel.
    Blocking,
}

/// Parameters of a `file` device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileConfig {
    /// The regular file or block device.
    pub path: PathBuf,
    /// Length in bytes, a multiple of 512. If there is no file, it is created with this length. An
    /// existing one must have it. 0: there must be a file, whatever its length.
    pub size: u64,
    /// Whether I/O bypasses the page cache.
    pub direct: Direct,
    /// The system calls that execute requests.
    pub io: IoEngine,
    /// Open the file for reading only.
    pub read_only: bool,
}

impl FileConfig {
    /// Serves an existing file with all other parameters at their defaults.
    pub fn new(path: impl Into<PathBuf>) -> FileConfig {
        FileConfig {
            path: path.into(),
            size: 0,
            direct: Direct::Auto,
            io: IoEngine::Auto,
            read_only: false,
        }
    }

    /// Checks the parameters without accessing the file.
    ///
    /// # Errors
    /// If one is missing or invalid.
    pub fn check(&self) -> Result<(), FileDeviceError> {
        if self.path.as_os_str().is_empty() {
            return Err(FileDeviceError::NoPath);
        }
        if !self.size.is_multiple_of(SECTOR_BYTES) {
            let wanted = format!("a multiple of {SECTOR_BYTES} bytes");
            return Err(FileDeviceError::invalid("size", self.size, wanted));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_path_and_odd_size_are_refused() {
        assert!(matches!(FileConfig::new("").check(), Err(FileDeviceError::NoPath)));
        let config = FileConfig { size: 1000, ..FileConfig::new("/f") };
        let error = config.check().unwrap_err().to_string();
        assert_eq!(error, "invalid size `1000`: expected a multiple of 512 bytes");
        assert!(FileConfig { size: 1024, ..FileConfig::new("/f") }.check().is_ok());
    }
}
