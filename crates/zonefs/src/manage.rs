//! Operations with exclusive access to a file: opening, closing, truncation and changes of
//! permissions.

use std::sync::Arc;
use std::time::SystemTime;

use blockyard_core::{Op, Status};

use crate::attributes::{FileKind, TreeNode};
use crate::error::FileError;
use crate::file::{AccessMode, File, Looks, ZoneFile, bit};
use crate::fs::ZoneFs;

/// A change of permissions, owner or time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttributeChange {
    /// New permissions.
    pub permissions: Option<u16>,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// New time of the last change; ignored for a directory.
    pub modified: Option<SystemTime>,
}

impl ZoneFs {
    /// Opens the file with this number in its directory.
    ///
    /// # Errors
    /// For writing: if the zone is read-only or offline, the file system is read-only, or, with
    /// `explicit-open`, no more zones can be open.
    pub fn open_file(
        self: &Arc<ZoneFs>,
        kind: FileKind,
        number: u32,
        access: AccessMode,
    ) -> Option<Result<ZoneFile, FileError>> {
        let file = Arc::clone(self.file(kind, number)?);
        Some(self.open_for(file, access))
    }

    fn open_for(
        self: &Arc<ZoneFs>,
        file: Arc<File>,
        access: AccessMode,
    ) -> Result<ZoneFile, FileError> {
        if access == AccessMode::Write {
            if file.is(bit::IMMUTABLE) {
                return Err(FileError::Immutable);
            }
            if self.is_read_only() {
                return Err(FileError::ReadOnly);
            }
            if file.kind == FileKind::Sequential {
                self.begin_writing(&file)?;
            }
        }
        Ok(ZoneFile { fs: Arc::clone(self), file, access })
    }

    /// Counts another handle that is open for writing. With `explicit-open` the first one opens the
    /// zone.
    fn begin_writing(&self, file: &File) -> Result<(), FileError> {
        let _alone = self.opens_explicitly().then(|| file.close_passage());
        let mut state = file.state();
        if state.writers == 0 {
            let others = self.add_writer();
            let opened =
                if self.opens_explicitly() { self.open_zone(file, others) } else { Ok(()) };
            if let Err(error) = opened {
                self.remove_writer();
                return Err(error);
            }
        }
        state.writers += 1;
        Ok(())
    }

    /// Opens the zone. The caller holds the file's state.
    fn open_zone(&self, file: &File, others: u32) -> Result<(), FileError> {
        let max = self.open_max();
        if max != 0 && others >= max {
            return Err(FileError::TooManyOpen);
        }
        if file.size() < file.capacity {
            self.control().run(Op::ZoneOpen, file.start).map_err(zone_error)?;
            file.set_zone_open(true);
        }
        Ok(())
    }

    /// Counts a closed handle that was open for writing. The last one closes the zone.
    fn end_writing(&self, file: &File) {
        // Only an explicitly opened zone can fail to close, which requires a recovery.
        let _alone = self.opens_explicitly().then(|| file.close_passage());
        let mut state = file.state();
        state.writers -= 1;
        if state.writers > 0 {
            return;
        }
        let zone_open = file.is_zone_open();
        file.set_zone_open(false);
        // A zone that has become full, read-only or offline is no longer open.
        if zone_open && file.size() < file.capacity && !file.is(bit::IMMUTABLE) {
            let closed = self.close_zone(file.start, file.size());
            if let Err(status) = closed {
                self.recover_alone(file, false);
                if !file.is(bit::IMMUTABLE) {
                    // Zones that stay open would soon prevent writes to other zones.
                    let why = format!("closing zone {} failed with {status}", file.zone);
                    self.become_read_only(&why);
                }
            }
        }
        self.remove_writer();
    }

    /// Closes a zone. Resets an empty one, since a device may otherwise keep it active.
    pub(crate) fn close_zone(
        &self,
        start: blockyard_core::Sector,
        written: u64,
    ) -> Result<(), Status> {
        let op = if written == 0 { Op::ZoneReset } else { Op::ZoneClose };
        self.control().run(op, start)
    }

    /// Changes permissions or owner until the file system is closed. The caller checks who may do
    /// so.
    ///
    /// # Errors
    /// If the zone is read-only or offline, the file system is read-only, or the change would make
    /// a directory writable.
    pub fn change(&self, node: TreeNode, change: AttributeChange) -> Result<(), FileError> {
        if self.is_read_only() {
            return Err(FileError::ReadOnly);
        }
        let set = |permissions: &mut u16, uid: &mut u32, gid: &mut u32| {
            *permissions = change.permissions.unwrap_or(*permissions);
            *uid = change.uid.unwrap_or(*uid);
            *gid = change.gid.unwrap_or(*gid);
        };
        let TreeNode::File(kind, number) = node else {
            if change.permissions.is_some_and(|bits| bits & 0o222 != 0) {
                return Err(FileError::Immutable);
            }
            self.with_directory(node, |directory| {
                set(&mut directory.permissions, &mut directory.uid, &mut directory.gid);
            });
            return Ok(());
        };
        let Some(file) = self.file(kind, number) else { return Err(FileError::NotOpenForThat) };
        let mut looks = file.looks();
        if file.is(bit::IMMUTABLE) {
            return Err(FileError::Immutable);
        }
        let Looks { permissions, uid, gid, modified } = &mut *looks;
        set(permissions, uid, gid);
        *modified = change.modified.unwrap_or(*modified);
        Ok(())
    }

    /// Truncates a sequential file to 0, which resets its zone, or to its capacity, which finishes
    /// it.
    ///
    /// # Errors
    /// If the file or the length cannot be truncated, or the device fails.
    pub fn truncate(
        &self,
        kind: FileKind,
        number: u32,
        len_bytes: u64,
    ) -> Option<Result<(), FileError>> {
        Some(self.truncate_file(self.file(kind, number)?, len_bytes))
    }

    pub(crate) fn truncate_file(&self, file: &File, len_bytes: u64) -> Result<(), FileError> {
        if file.is(bit::IMMUTABLE) {
            return Err(FileError::Immutable);
        }
        if self.is_read_only() {
            return Err(FileError::ReadOnly);
        }
        let op = match len_bytes {
            _ if file.kind == FileKind::Conventional => return Err(FileError::NotTruncatable),
            0 => Op::ZoneReset,
            len if len == file.capacity => Op::ZoneFinish,
            _ => return Err(FileError::NotTruncatable),
        };
        let _alone = file.close_passage();
        let _state = file.state();
        if file.size() == len_bytes {
            return Ok(());
        }
        let done = self.control().run(op, file.start);
        if let Err(status) = done {
            self.recover_alone(file, true);
            return Err(FileError::Device(status));
        }
        file.set_truncated(len_bytes);
        file.looks().modified = SystemTime::now();
        if file.is_zone_open() {
            // Both operations close the zone; reopen an empty one for further writes.
            file.set_zone_open(false);
            if len_bytes == 0 {
                self.control().run(Op::ZoneOpen, file.start).map_err(zone_error)?;
                file.set_zone_open(true);
            }
        }
        Ok(())
    }
}

/// Converts the status of a zone operation to an error of a file.
fn zone_error(status: Status) -> FileError {
    match status {
        Status::ZoneOpenResource | Status::ZoneActiveResource => FileError::TooManyOpen,
        other => FileError::Device(other),
    }
}

impl ZoneFile {
    /// Truncates the file; see [`ZoneFs::truncate`]. Waits for I/Os in flight.
    ///
    /// # Errors
    /// As [`ZoneFs::truncate`].
    pub fn truncate(&self, len_bytes: u64) -> Result<(), FileError> {
        match self.access {
            AccessMode::Read => Err(FileError::NotOpenForThat),
            AccessMode::Write => self.fs.truncate_file(&self.file, len_bytes),
        }
    }

    /// Sets the modification time to now. Callers that show times to programs call this once per
    /// request.
    pub(crate) fn touch(&self) {
        self.file.looks().modified = SystemTime::now();
    }
}

impl Drop for ZoneFile {
    fn drop(&mut self) {
        if self.access == AccessMode::Write && self.file.kind == FileKind::Sequential {
            self.fs.end_writing(&self.file);
        }
    }
}
