//! Files with secrets: read only if no other user can read or change them.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use zeroize::Zeroizing;

/// The reason for which a file with secrets is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrivateFileError {
    /// It cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The path.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// Other users may read or change it.
    #[error(
        "invalid mode {mode:04o} of {path}: expected 0600 or 0400, so that no other user can read \
         it"
    )]
    Mode {
        /// The path.
        path: String,
        /// The permission bits.
        mode: u32,
    },
    /// It belongs to another user, who may read and change it.
    #[error("invalid owner {owner} of {path}: expected the user of this process, {own}, or root")]
    Owner {
        /// The path.
        path: String,
        /// The user id of the owner.
        owner: u32,
        /// The effective user id of this process.
        own: u32,
    },
}

/// Reads a file with secrets of at most `bytes_max` bytes. Dropping the text clears its memory.
///
/// # Errors
/// If the file cannot be read or is longer, is no regular file or no UTF-8, belongs to another
/// user, or other users can access it.
pub fn read_private(path: &Path, bytes_max: u64) -> Result<Zeroizing<String>, PrivateFileError> {
    let bytes = read_private_bytes(path, bytes_max)?;
    let text = std::str::from_utf8(&bytes).map_err(|_| PrivateFileError::Read {
        path: path.display().to_string(),
        source: io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8"),
    })?;
    Ok(Zeroizing::new(text.to_owned()))
}

/// Reads a file with secrets of at most `bytes_max` bytes, which need not be text. Dropping the
/// bytes clears their memory.
///
/// # Errors
/// As [`read_private`], but for UTF-8.
pub fn read_private_bytes(
    path: &Path,
    bytes_max: u64,
) -> Result<Zeroizing<Vec<u8>>, PrivateFileError> {
    let shown = || path.display().to_string();
    let failed = |source| PrivateFileError::Read { path: shown(), source };
    // The open of a FIFO that no process writes to would block.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    if !found.is_file() {
        return Err(failed(io::Error::other("it is no regular file")));
    }
    let mode = found.mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(PrivateFileError::Mode { path: shown(), mode });
    }
    let (owner, own) = (found.uid(), rustix::process::geteuid().as_raw());
    if owner != own && owner != 0 {
        return Err(PrivateFileError::Owner { path: shown(), owner, own });
    }
    if found.len() > bytes_max {
        return Err(failed(io::Error::other(format!("it has more than {bytes_max} bytes"))));
    }
    // Whole at once, so that no copy of a part is left in memory.
    let mut bytes = Zeroizing::new(Vec::with_capacity(found.len() as usize + 1));
    file.take(found.len()).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}
