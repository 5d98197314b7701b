//! Reading a file.

use blockyard_core::{Flags, Op, SECTOR_BYTES};

use crate::door::{BUFFER_BYTES, Door};
use crate::error::FileError;
use crate::file::{Failed, ZoneFile, bit};

impl ZoneFile {
    /// Reads up to `into.len()` bytes at `offset` and returns their number; fewer at the end of the
    /// file.
    ///
    /// # Errors
    /// If the zone cannot be read or the device fails.
    pub fn read(&self, door: &mut Door, offset: u64, into: &mut [u8]) -> Result<usize, FileError> {
        self.read_whole(door, offset, into, false)
    }

    /// Reads a consistent state of the file: a truncation comes before or after the whole read.
    /// `whole` refuses a range that is not whole blocks.
    fn read_whole(
        &self,
        door: &mut Door,
        offset: u64,
        into: &mut [u8],
        whole: bool,
    ) -> Result<usize, FileError> {
        let end = {
            // Enter before reading the size, and leave after the last read.
            let _in_flight = self.file.enter();
            self.read_in_flight(door, offset, into, whole)
        };
        end.map_err(|failed| self.after_read(failed))
    }

    fn read_in_flight(
        &self,
        door: &mut Door,
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
            self.fill_in_flight(door, first, 0, (skip + part).next_multiple_of(block as usize))?;
            door.buffer().read(skip as u64, &mut into[done..done + part]);
            done += part;
        }
        Ok(done)
    }

    /// Reads whole blocks only, as O_DIRECT requires.
    pub(crate) fn read_direct(
        &self,
        door: &mut Door,
        offset: u64,
        into: &mut [u8],
    ) -> Result<usize, FileError> {
        self.read_whole(door, offset, into, true)
    }

    /// Whether the file can be read: its zone is not offline, and was not read-only at the mount.
    pub fn is_readable(&self) -> bool {
        !self.file.is(bit::UNREADABLE)
    }

    /// The size, or an error if the file cannot be read.
    fn readable(&self) -> Result<u64, FileError> {
        if self.is_readable() { Ok(self.file.size()) } else { Err(FileError::Immutable) }
    }

    /// Reads whole blocks into the door's buffer, from byte `at` of the buffer on.
    pub(crate) fn fill(
        &self,
        door: &mut Door,
        offset: u64,
        at: usize,
        len_bytes: usize,
    ) -> Result<(), FileError> {
        let end = {
            let _in_flight = self.file.enter();
            self.fill_in_flight(door, offset, at, len_bytes)
        };
        end.map_err(|failed| self.after_read(failed))
    }

    /// Reads whole blocks into the door's buffer; the caller has entered the passage.
    fn fill_in_flight(
        &self,
        door: &mut Door,
        offset: u64,
        at: usize,
        len_bytes: usize,
    ) -> Result<(), Failed> {
        let sector = self.file.start + offset / SECTOR_BYTES;
        let sectors = len_bytes as u64 / SECTOR_BYTES;
        let end = door.transfer(Op::Read, sector, sectors, at, Flags::NONE);
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
