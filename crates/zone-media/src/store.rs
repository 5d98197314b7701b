//! The operations that a medium needs from a directory and its files. They are few, so that a
//! simulated directory can record every one and simulate a power cut after it.
//!
//! Written data are visible at once. They are durable when `sync` of their file has returned, and
//! the file itself when [`Store::sync_names`] has. A power cut before that may preserve any part.

use std::fmt;
use std::io;

use crate::head::Id;

/// A directory.
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// An open file of the directory.
    type File: StoreFile;

    /// Name of the directory in messages.
    fn title(&self) -> String;

    /// Opens a file; `None` if there is none of this name.
    ///
    /// # Errors
    /// If the file exists and cannot be opened.
    fn open(&self, name: &str) -> io::Result<Option<Self::File>>;

    /// Creates a file of `len` zeros, replacing an existing one.
    ///
    /// # Errors
    /// If the file cannot be created.
    fn create(&self, name: &str, len: u64) -> io::Result<Self::File>;

    /// Renames a file, replacing an existing one.
    ///
    /// # Errors
    /// If the file cannot be renamed.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file, if there is one of this name.
    ///
    /// # Errors
    /// If the file exists and cannot be removed.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Whether files with the names of a disk's files may be those of an interrupted creation.
    fn may_have_remains(&self) -> bool {
        true
    }

    /// Called before the first file of a new disk is created, in a directory without other files.
    fn begin_disk(&self) {}

    /// Fails if the disk was removed or replaced while it is open. Called before each sync of the
    /// journal.
    ///
    /// # Errors
    /// Says what is gone.
    fn look(&self) -> io::Result<()> {
        Ok(())
    }

    /// Makes the creation, renaming and removal of files durable.
    ///
    /// # Errors
    /// If they may not be durable.
    fn sync_names(&self) -> io::Result<()>;

    /// The names of all files.
    ///
    /// # Errors
    /// If the directory cannot be read.
    fn names(&self) -> io::Result<Vec<String>>;

    /// Identifies the current boot: data that were written during it remain visible until it ends,
    /// synced or not.
    ///
    /// # Errors
    /// If the system does not provide it.
    fn boot(&self) -> io::Result<Id>;

    /// A new unique identity.
    ///
    /// # Errors
    /// If the system does not provide one.
    fn fresh_id(&self) -> io::Result<Id>;
}

/// An open file. Several threads use it concurrently.
#[expect(clippy::len_without_is_empty, reason = "no file of a medium is empty")]
pub trait StoreFile: fmt::Debug + Send + Sync + 'static {
    /// Length of the file in bytes.
    ///
    /// # Errors
    /// If the system does not provide it.
    fn len(&self) -> io::Result<u64>;

    /// Reads bytes; bytes that were never written read as zeros.
    ///
    /// # Errors
    /// If the bytes cannot be read, or the file ends before.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes bytes within the file's length.
    ///
    /// # Errors
    /// If some bytes may not be written.
    fn write_at(&self, offset: u64, from: &[u8]) -> io::Result<()>;

    /// Zeroes a range and frees its space.
    ///
    /// # Errors
    /// If that fails.
    fn punch(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Offset of the first byte that lies in no hole, or of a byte before it; `None` if the file
    /// has only holes.
    ///
    /// # Errors
    /// If the system does not provide it.
    fn first_data(&self) -> io::Result<Option<u64>>;

    /// Makes everything durable that was written before.
    ///
    /// # Errors
    /// If some of it may not be durable; the caller does not retry.
    fn sync(&self) -> io::Result<()>;
}

/// All bytes of a file, if it exists; at most `len_max`, which bounds the cost of a wrong file.
pub(crate) fn load<S: Store>(store: &S, name: &str, len_max: u64) -> io::Result<Option<Vec<u8>>> {
    let Some(file) = store.open(name)? else { return Ok(None) };
    let len = file.len()?.min(len_max);
    let len = usize::try_from(len).map_err(|_| io::ErrorKind::FileTooLarge)?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
    bytes.resize(len, 0);
    file.read_at(0, &mut bytes)?;
    Ok(Some(bytes))
}
