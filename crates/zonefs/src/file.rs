//! A file: one zone, or several conventional zones.
//!
//! A native append holds no exclusive lock: any number of threads append to one file concurrently,
//! and the device returns where their data landed. Operations that need exclusive access
//! (truncation, opening and closing the zone, recovery after an error) wait for the I/Os in flight
//! and block new ones.
//!
//! Lock order: `order`, `passage`, `state`, `looks`. All but the last are held during operations of
//! the device; reading attributes takes only `looks`.
// These are inode locks, above the block layer. A native append holds `order` and `passage` shared.
#![allow(clippy::disallowed_types)]

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::SystemTime;

use blockyard_core::zone::ZoneCond;
use blockyard_core::{Flags, Op, SECTOR_BYTES, Sector, Status};

use crate::attributes::FileKind;
use crate::error::FileError;
use crate::fs::ZoneFs;
use crate::io_handle::{BUFFER_BYTES, IoHandle};
use crate::layout::Shape;

/// Bits of [`File::bits`].
pub(crate) mod bit {
    /// The zone can neither be read nor written, or is treated so.
    pub(crate) const OFFLINE: u32 = 1;
    /// The zone can only be read, or is treated so.
    pub(crate) const READ_ONLY: u32 = 2;
    /// The file cannot be read; set together with `OFFLINE` or `READ_ONLY`, so it cannot be written
    /// either.
    pub(crate) const UNREADABLE: u32 = 4;
    /// The file can no longer change.
    pub(crate) const IMMUTABLE: u32 = OFFLINE | READ_ONLY;
}

/// A file's state, shared by all its open handles.
pub(crate) struct File {
    pub(crate) kind: FileKind,
    /// Number of the first zone.
    pub(crate) zone: u32,
    /// Number of zones.
    pub(crate) zones: u32,
    /// First sector.
    pub(crate) start: Sector,
    /// Capacity in bytes.
    pub(crate) capacity: u64,
    /// Exclusive during a positioned write to a sequential file, and during a write of part of a
    /// block. Shared by appends if the device chooses their place.
    order: RwLock<()>,
    /// Shared by I/Os in flight; exclusive ("closed") while the file must not change.
    passage: RwLock<()>,
    /// Readable bytes. Grows in any order of completions; shrinks only while `passage` is closed.
    size: AtomicU64,
    /// Number of truncations. Changes only while `passage` is closed.
    truncations: AtomicU64,
    /// See [`bit`]. Changes only while `passage` is closed.
    bits: AtomicU32,
    /// Whether the zone is explicitly open because the file is open for writing.
    zone_open: AtomicBool,
    state: Mutex<State>,
    looks: Mutex<Looks>,
}

/// State that is locked while the file's zone is opened or closed.
pub(crate) struct State {
    /// Number of handles open for writing, for a sequential file.
    pub(crate) writers: u32,
}

/// Attributes that `stat` returns and that rarely change. Never locked during I/O.
pub(crate) struct Looks {
    /// Permissions.
    pub(crate) permissions: u16,
    /// Owner.
    pub(crate) uid: u32,
    /// Group.
    pub(crate) gid: u32,
    /// Time of the last write or truncation.
    pub(crate) modified: SystemTime,
}

impl File {
    pub(crate) fn new(shape: &Shape, permissions: u16, uid: u32, gid: u32) -> File {
        let bits = match shape.cond {
            ZoneCond::Offline => bit::OFFLINE | bit::UNREADABLE,
            // A read-only zone's write pointer is unknown, so its data cannot be read.
            ZoneCond::ReadOnly => bit::READ_ONLY | bit::UNREADABLE,
            _ => 0,
        };
        let permissions = if bits == 0 { permissions } else { 0 };
        let modified = SystemTime::now();
        File {
            kind: shape.kind,
            zone: shape.zone,
            zones: shape.zones,
            start: shape.start,
            capacity: shape.capacity,
            order: RwLock::new(()),
            passage: RwLock::new(()),
            size: AtomicU64::new(shape.written),
            truncations: AtomicU64::new(0),
            bits: AtomicU32::new(bits),
            zone_open: AtomicBool::new(false),
            state: Mutex::new(State { writers: 0 }),
            looks: Mutex::new(Looks { permissions, uid, gid, modified }),
        }
    }

    /// Taken by an I/O in flight, shared with other I/Os.
    pub(crate) fn enter(&self) -> RwLockReadGuard<'_, ()> {
        // The lock guards no data that a panic could leave inconsistent.
        self.passage.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the I/Os in flight and blocks new ones.
    pub(crate) fn close_passage(&self) -> RwLockWriteGuard<'_, ()> {
        self.passage.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // The state is a single number.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn looks(&self) -> MutexGuard<'_, Looks> {
        // The fields are set individually and do not depend on each other.
        self.looks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_zone_open(&self) -> bool {
        // Relaxed: set under `state`, which orders it for threads that act on it.
        self.zone_open.load(Ordering::Relaxed)
    }

    /// The caller holds `state`.
    pub(crate) fn set_zone_open(&self, open: bool) {
        // Relaxed: as above.
        self.zone_open.store(open, Ordering::Relaxed);
    }

    /// Taken by a write that must know where it lands.
    fn in_order(&self) -> RwLockWriteGuard<'_, ()> {
        self.order.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Taken by appends, which land wherever the device puts them.
    fn in_any_order(&self) -> RwLockReadGuard<'_, ()> {
        self.order.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn size(&self) -> u64 {
        // Acquire: pairs with the Release of `grow`, so that a thread that sees the size sees the
        // data.
        self.size.load(Ordering::Acquire)
    }

    /// Grows the file to at least `end`.
    fn grow(&self, end: u64) {
        // Release: pairs with the Acquire in `size`.
        self.size.fetch_max(end, Ordering::Release);
    }

    /// Sets the size. The caller has closed the passage.
    pub(crate) fn set_size(&self, size: u64) {
        // Release: pairs with the Acquire in `size`.
        self.size.store(size, Ordering::Release);
    }

    /// Number of truncations so far.
    pub(crate) fn truncations(&self) -> u64 {
        // Relaxed: changes only while the passage is closed, which orders it for every I/O.
        self.truncations.load(Ordering::Relaxed)
    }

    /// Records a truncation to this size. The caller has closed the passage.
    pub(crate) fn set_truncated(&self, size: u64) {
        // Relaxed: as above.
        self.truncations.fetch_add(1, Ordering::Relaxed);
        self.set_size(size);
    }

    pub(crate) fn bits(&self) -> u32 {
        // Relaxed: set while the passage is closed, which orders them for every I/O.
        self.bits.load(Ordering::Relaxed)
    }

    /// Sets bits. The caller has closed the passage.
    pub(crate) fn add_bits(&self, bits: u32) {
        // Relaxed: as for `bits`.
        self.bits.fetch_or(bits, Ordering::Relaxed);
    }

    pub(crate) fn is(&self, bits: u32) -> bool {
        self.bits() & bits != 0
    }
}

/// The access for which a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessMode {
    /// Reading.
    Read,
    /// Reading and writing.
    Write,
}

/// How to execute a write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Manner {
    /// Write at the write pointer, wherever it is.
    pub(crate) append: bool,
    /// Make the data durable before returning.
    pub(crate) durable: bool,
}

/// An open file. Dropping it closes it.
///
/// Threads share a `ZoneFile`, and each brings its own [`IoHandle`].
pub struct ZoneFile {
    pub(crate) fs: Arc<ZoneFs>,
    pub(crate) file: Arc<File>,
    pub(crate) access: AccessMode,
}

/// Why an I/O failed: refused before it reached the device, or failed by the device.
pub(crate) enum Failed {
    Refused(FileError),
    ByDevice(Status),
    /// The device did not do what it was asked to.
    Misplaced,
}

impl From<FileError> for Failed {
    fn from(error: FileError) -> Failed {
        Failed::Refused(error)
    }
}

impl ZoneFile {
    /// The kind of the file.
    pub fn kind(&self) -> FileKind {
        self.file.kind
    }

    /// Size in bytes; for a sequential file, up to the write pointer.
    pub fn size(&self) -> u64 {
        self.file.size()
    }

    /// Capacity in bytes.
    pub fn capacity(&self) -> u64 {
        self.file.capacity
    }

    /// Appends whole blocks in one write and returns their offset in the file. Any number of
    /// threads may append to one file concurrently.
    ///
    /// # Errors
    /// [`FileError::NoRoom`] if the data do not fit, and then nothing changes;
    /// [`FileError::TooLong`] if they exceed [`ZoneFs::append_bytes_max`].
    pub fn append(&self, io: &mut IoHandle, data: &[u8]) -> Result<u64, FileError> {
        if data.len() > BUFFER_BYTES {
            return Err(FileError::TooLong { max: self.fs.append_bytes_max() });
        }
        io.buffer().write(0, data);
        self.append_buffer(io, data.len())
    }

    /// Appends the first `len_bytes` of the handle's buffer, as [`ZoneFile::append`] does.
    ///
    /// # Errors
    /// As [`ZoneFile::append`].
    pub fn append_buffer(&self, io: &mut IoHandle, len_bytes: usize) -> Result<u64, FileError> {
        self.append_part(io, len_bytes, false)
    }

    fn append_part(
        &self,
        io: &mut IoHandle,
        len_bytes: usize,
        durable: bool,
    ) -> Result<u64, FileError> {
        if self.file.kind == FileKind::Conventional {
            return Err(FileError::AppendConventional);
        }
        if len_bytes > self.fs.append_bytes_max() {
            return Err(FileError::TooLong { max: self.fs.append_bytes_max() });
        }
        if !self.fs.is_aligned(len_bytes as u64) {
            return Err(FileError::Unaligned);
        }
        let truncations;
        let done = {
            let native = self.fs.appends_natively();
            let _shared = native.then(|| self.file.in_any_order());
            let _alone = (!native).then(|| self.file.in_order());
            let _in_flight = self.file.enter();
            truncations = self.file.truncations();
            self.append_in_flight(io, None, len_bytes, durable)
        };
        done.map_err(|failed| self.after_write(failed, len_bytes as u64, truncations))
    }

    /// Appends the first `len_bytes` of the handle's buffer. `known` is the offset at which they
    /// must land, if no other thread appends.
    fn append_in_flight(
        &self,
        io: &mut IoHandle,
        known: Option<u64>,
        len_bytes: usize,
        durable: bool,
    ) -> Result<u64, Failed> {
        self.check_write()?;
        let (file, len) = (&self.file, len_bytes as u64);
        let before = file.size();
        if before + len > file.capacity {
            return Err(FileError::NoRoom.into());
        }
        if len == 0 {
            return Ok(before);
        }
        let (op, sector) = match self.fs.appends_natively() {
            true => (Op::ZoneAppend, file.start),
            // The caller excludes other writes.
            false => (Op::Write, file.start + before / SECTOR_BYTES),
        };
        let flags = if durable { Flags::FUA } else { Flags::NONE };
        let landed = io.transfer(op, sector, len / SECTOR_BYTES, 0, flags);
        let landed = landed.map_err(Failed::ByDevice)?;
        let landed = if op == Op::Write { sector } else { landed };
        let inside = landed >= file.start;
        let offset = landed.0.saturating_sub(file.start.0) * SECTOR_BYTES;
        let elsewhere = known.is_some_and(|known| known != offset);
        if !inside || elsewhere || offset > file.capacity - len {
            return Err(Failed::Misplaced);
        }
        file.grow(offset + len);
        Ok(offset)
    }

    /// Writes whole blocks at `offset` and returns the number of bytes written; a write that
    /// crosses the capacity is shortened. In a sequential file `offset` must be the current size.
    ///
    /// # Errors
    /// The first one that applies in the table of docs/zonefs.md.
    pub fn write(&self, io: &mut IoHandle, offset: u64, data: &[u8]) -> Result<usize, FileError> {
        self.write_direct(io, offset, data, Manner::default())
    }

    pub(crate) fn write_direct(
        &self,
        io: &mut IoHandle,
        offset: u64,
        data: &[u8],
        manner: Manner,
    ) -> Result<usize, FileError> {
        let sequential = self.file.kind == FileKind::Sequential;
        self.check_write()?;
        if manner.append && !sequential {
            return Err(FileError::AppendConventional);
        }
        let truncations;
        let end = {
            let _order = sequential.then(|| self.file.in_order());
            // Enter before reading the offset and leave after the last write: a truncation comes
            // before or after the whole write.
            let _in_flight = self.file.enter();
            truncations = self.file.truncations();
            self.write_in_flight(io, offset, data, manner)
        };
        end.map_err(|failed| self.after_write(failed, 0, truncations))
    }

    fn write_in_flight(
        &self,
        io: &mut IoHandle,
        offset: u64,
        data: &[u8],
        manner: Manner,
    ) -> Result<usize, Failed> {
        let sequential = self.file.kind == FileKind::Sequential;
        let offset = if manner.append { self.file.size() } else { offset };
        if offset >= self.file.capacity {
            return Err(FileError::NoRoom.into());
        }
        let len = (self.file.capacity - offset).min(data.len() as u64) as usize;
        if !self.fs.is_aligned(offset) || !self.fs.is_aligned(len as u64) {
            return Err(FileError::Unaligned.into());
        }
        if sequential && offset != self.file.size() {
            return Err(FileError::NotAtWritePointer.into());
        }
        let piece = if sequential { self.fs.append_bytes_max() } else { BUFFER_BYTES };
        let mut done = 0;
        for part in data[..len].chunks(piece) {
            let at = offset + done as u64;
            io.buffer().write(0, part);
            if sequential {
                self.append_in_flight(io, Some(at), part.len(), manner.durable)?;
            } else {
                self.write_anywhere(io, at, part.len(), manner.durable)?;
            }
            done += part.len();
        }
        Ok(done)
    }

    /// Writes the contents of the buffer to a conventional file.
    fn write_anywhere(
        &self,
        io: &mut IoHandle,
        offset: u64,
        len_bytes: usize,
        durable: bool,
    ) -> Result<(), Failed> {
        self.check_write()?;
        let sector = self.file.start + offset / SECTOR_BYTES;
        let flags = if durable { Flags::FUA } else { Flags::NONE };
        let sectors = len_bytes as u64 / SECTOR_BYTES;
        io.transfer(Op::Write, sector, sectors, 0, flags).map(drop).map_err(Failed::ByDevice)
    }

    /// Writes any bytes of a conventional file: reads the rest of partially written blocks first.
    pub(crate) fn write_buffered(
        &self,
        io: &mut IoHandle,
        offset: u64,
        data: &[u8],
        manner: Manner,
    ) -> Result<usize, FileError> {
        self.check_write()?;
        let sequential = self.file.kind == FileKind::Sequential;
        if manner.append && !sequential {
            return Err(FileError::AppendConventional);
        }
        let offset = if manner.append { self.file.size() } else { offset };
        if offset >= self.file.capacity {
            return Err(FileError::NoRoom);
        }
        if sequential {
            return Err(FileError::Buffered);
        }
        let block = u64::from(self.fs.block_bytes());
        let len = (self.file.capacity - offset).min(data.len() as u64) as usize;
        let _order = self.file.in_order();
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let first = at - at % block;
            let skip = (at - first) as usize;
            let part = (len - done).min(BUFFER_BYTES - skip);
            let covered = (skip + part).next_multiple_of(block as usize);
            if skip != 0 || covered != skip + part {
                // Only the first and the last block can be written partially.
                self.fill(io, first, 0, block as usize)?;
                if covered > block as usize {
                    let last = covered - block as usize;
                    self.fill(io, first + last as u64, last, block as usize)?;
                }
            }
            io.buffer().write(skip as u64, &data[done..done + part]);
            let end = {
                let _in_flight = self.file.enter();
                self.write_anywhere(io, first, covered, manner.durable)
            };
            // A conventional file is never truncated.
            end.map_err(|failed| self.after_write(failed, 0, 0))?;
            done += part;
        }
        Ok(done)
    }

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// If the zone is read-only or offline, or the device fails.
    pub fn sync(&self, io: &mut IoHandle) -> Result<(), FileError> {
        if self.file.is(bit::IMMUTABLE) {
            return Err(FileError::Immutable);
        }
        let end = {
            let _in_flight = self.file.enter();
            io.run(Op::Flush, Sector(0))
        };
        end.map_err(|status| {
            self.fs.recover(&self.file, true);
            FileError::Device(status)
        })
    }

    /// Whether writes to the file are allowed.
    fn check_write(&self) -> Result<(), FileError> {
        if self.access == AccessMode::Read {
            Err(FileError::NotOpenForThat)
        } else if self.file.is(bit::IMMUTABLE) {
            Err(FileError::Immutable)
        } else if self.fs.is_read_only() {
            Err(FileError::ReadOnly)
        } else {
            Ok(())
        }
    }

    /// Recovers from a failed write and returns its error. `wanted` is the length of an append that
    /// may have failed because other appends took the space, otherwise 0. `truncations` is the
    /// file's number of truncations when the write began.
    fn after_write(&self, failed: Failed, wanted: u64, truncations: u64) -> FileError {
        let error = match failed {
            Failed::Refused(error) => return error,
            Failed::Misplaced => FileError::Misplaced,
            Failed::ByDevice(status) => FileError::Device(status),
        };
        if wanted > 0 && self.fs.has_no_room(&self.file, wanted, truncations) {
            return FileError::NoRoom;
        }
        self.fs.recover(&self.file, true);
        error
    }
}

impl std::fmt::Debug for ZoneFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ZoneFile")
            .field("zone", &self.file.zone)
            .field("size", &self.size())
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

impl ZoneFile {
    /// Reads up to `into.len()` bytes at `offset` and returns their number; fewer at the end of the
    /// file.
    ///
    /// # Errors
    /// If the zone cannot be read or the device fails.
    pub fn read(
        &self,
        io: &mut IoHandle,
        offset: u64,
        into: &mut [u8],
    ) -> Result<usize, FileError> {
        self.read_whole(io, offset, into, false)
    }

    /// Reads a consistent state of the file: a truncation comes before or after the whole read.
    /// `whole` refuses a range that is not whole blocks.
    fn read_whole(
        &self,
        io: &mut IoHandle,
        offset: u64,
        into: &mut [u8],
        whole: bool,
    ) -> Result<usize, FileError> {
        let end = {
            // Enter before reading the size, and leave after the last read.
            let _in_flight = self.file.enter();
            self.read_in_flight(io, offset, into, whole)
        };
        end.map_err(|failed| self.after_read(failed))
    }

    fn read_in_flight(
        &self,
        io: &mut IoHandle,
        offset: u64,
        into: &mut [u8],
        whole: bool,
    ) -> Result<usize, Failed> {
        let len = self.readable()?.saturating_sub(offset).min(into.len() as u64) as usize;
        let is_whole = self.fs.is_aligned(offset) && self.fs.is_aligned(len as u64);
        if whole && len > 0 && !is_whole {
            return Err(FileError::Unaligned.into());
        }
        let block = u64::from(self.fs.block_bytes());
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let first = at - at % block;
            let skip = (at - first) as usize;
            let part = (len - done).min(BUFFER_BYTES - skip);
            self.fill_in_flight(io, first, 0, (skip + part).next_multiple_of(block as usize))?;
            io.buffer().read(skip as u64, &mut into[done..done + part]);
            done += part;
        }
        Ok(done)
    }

    /// Reads whole blocks only, as O_DIRECT requires.
    pub(crate) fn read_direct(
        &self,
        io: &mut IoHandle,
        offset: u64,
        into: &mut [u8],
    ) -> Result<usize, FileError> {
        self.read_whole(io, offset, into, true)
    }

    /// Whether the file can be read: its zone is not offline, and was not read-only at the mount.
    pub fn is_readable(&self) -> bool {
        !self.file.is(bit::UNREADABLE)
    }

    /// The size, or an error if the file cannot be read.
    fn readable(&self) -> Result<u64, FileError> {
        if self.is_readable() { Ok(self.file.size()) } else { Err(FileError::Immutable) }
    }

    /// Reads whole blocks into the handle's buffer, from byte `at` of the buffer on.
    pub(crate) fn fill(
        &self,
        io: &mut IoHandle,
        offset: u64,
        at: usize,
        len_bytes: usize,
    ) -> Result<(), FileError> {
        let end = {
            let _in_flight = self.file.enter();
            self.fill_in_flight(io, offset, at, len_bytes)
        };
        end.map_err(|failed| self.after_read(failed))
    }

    /// Reads whole blocks into the handle's buffer; the caller has entered the passage.
    fn fill_in_flight(
        &self,
        io: &mut IoHandle,
        offset: u64,
        at: usize,
        len_bytes: usize,
    ) -> Result<(), Failed> {
        let sector = self.file.start + offset / SECTOR_BYTES;
        let sectors = len_bytes as u64 / SECTOR_BYTES;
        let end = io.transfer(Op::Read, sector, sectors, at, Flags::NONE);
        end.map(drop).map_err(Failed::ByDevice)
    }

    /// Recovers from a failed read and returns its error.
    fn after_read(&self, failed: Failed) -> FileError {
        let error = match failed {
            Failed::Refused(error) => return error,
            Failed::Misplaced => FileError::Misplaced,
            Failed::ByDevice(status) => FileError::Device(status),
        };
        self.fs.recover(&self.file, false);
        error
    }
}
