//! What a medium needs of a directory and its files: few operations, so that a simulated directory
//! can record every one and cut the power behind it.
//!
//! What is written is visible at once. It is durable when `sync` of its file has returned, and the
//! file itself when [`Store::sync_names`] has; until then a power cut may keep any part of it.

use std::fmt;
use std::io;

use super::word::Id;

/// A directory.
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// An open file of it.
    type File: StoreFile;

    /// What it is called in messages.
    fn title(&self) -> String;

    /// Opens a file, if there is one of this name.
    ///
    /// # Errors
    /// If it is there and cannot be opened.
    fn open(&self, name: &str) -> io::Result<Option<Self::File>>;

    /// Makes a file of `len` zeros, in the place of one that is there.
    ///
    /// # Errors
    /// If it cannot be made.
    fn create(&self, name: &str, len: u64) -> io::Result<Self::File>;

    /// Renames a file, in the place of one that is there.
    ///
    /// # Errors
    /// If it cannot be renamed.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file, if there is one of this name.
    ///
    /// # Errors
    /// If it is there and cannot be removed.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Fails if the disk was removed or replaced while it is open. Asked before each sync of the
    /// journal.
    ///
    /// # Errors
    /// What is gone.
    fn look(&self) -> io::Result<()> {
        Ok(())
    }

    /// Makes durable which files there are.
    ///
    /// # Errors
    /// If they may not be.
    fn sync_names(&self) -> io::Result<()>;

    /// The names of all files.
    ///
    /// # Errors
    /// If they cannot be read.
    fn names(&self) -> io::Result<Vec<String>>;

    /// Names this run of the kernel: what was written under it is there for as long as it goes on,
    /// synced or not.
    ///
    /// # Errors
    /// If the system does not say.
    fn boot(&self) -> io::Result<Id>;

    /// An identity that nothing else has.
    ///
    /// # Errors
    /// If the system does not give one.
    fn fresh_id(&self) -> io::Result<Id>;
}

/// An open file. Several threads use it at once.
#[expect(clippy::len_without_is_empty, reason = "no file of a medium is empty")]
pub trait StoreFile: fmt::Debug + Send + Sync + 'static {
    /// Its length in bytes.
    ///
    /// # Errors
    /// If the system does not say.
    fn len(&self) -> io::Result<u64>;

    /// Reads; what was never written reads as zeros.
    ///
    /// # Errors
    /// If the bytes cannot be had, or if the file ends before.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes, inside the file's length.
    ///
    /// # Errors
    /// If some of it may not be written.
    fn write_at(&self, offset: u64, from: &[u8]) -> io::Result<()>;

    /// Makes a range zeros and gives its space back.
    ///
    /// # Errors
    /// If it cannot be.
    fn punch(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Makes everything durable that was written before.
    ///
    /// # Errors
    /// If some of it may not be; it is not asked again then.
    fn sync(&self) -> io::Result<()>;
}

/// All bytes of a file, if there is one; at most `len_max`, which bounds what a wrong file costs.
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
