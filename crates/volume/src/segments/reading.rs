//! Reads from segments, from whichever copy has intact data.

use std::io;

use super::{Files, Segments};
use crate::buffer::{ALIGN, Buffer, Memory};
use crate::bytes::crc;
use crate::error::{FormatError, VolumeError};
use crate::format::PAGE_BYTES;
use crate::format::entry::Entry;
use crate::recovery::crew::Crew;
use crate::store::{Directory, GoodCopies, StoreFile};

/// A long read is split into at most `PARTS` parts of at least `PART_BYTES` bytes.
const PARTS: usize = 16;
const PART_BYTES: usize = 256 << 10;

impl<D: Directory> Segments<D> {
    /// Reads a map page and verifies its checksum.
    ///
    /// # Errors
    /// As [`Segments::load`].
    pub fn read_page(&self, home: Entry) -> Result<Buffer, VolumeError> {
        let mut bytes = Memory::new(PAGE_BYTES as u64).take_beyond(PAGE_BYTES);
        let (segment, offset) = self.split(home.address());
        let want = home.crc();
        let is_whole = |bytes: &[u8]| crc(bytes) == want;
        let files = self.files();
        let failed = || {
            let doing = format!("cannot read a page of the map, segment {segment} offset {offset}");
            VolumeError::io(doing)
        };
        let read = self.read_whole(&files, home.address(), &mut bytes, &is_whole);
        read.map(drop).map_err(failed())?;
        let found = crc(&bytes);
        if found != home.crc() {
            // The page is damaged only if it is so in each copy, not if one could not be read.
            let file = files.get(segment as usize);
            for copy in file.into_iter().flat_map(|file| file.copies().numbers()) {
                self.read_copy(&files, copy, home.address(), &mut bytes).map_err(failed())?;
                if is_whole(&bytes) {
                    return Ok(bytes);
                }
            }
            return Err(FormatError::Page { segment, offset, found, want: home.crc() }.into());
        }
        Ok(bytes)
    }

    /// Whether a map page is permanently lost: it is damaged in every copy, and no copy is missing
    /// that may have it.
    pub(crate) fn is_lost(&self, error: &VolumeError) -> bool {
        error.is_rotten_page() && self.directory.has_all_copies()
    }

    /// Reads from one segment.
    ///
    /// # Errors
    /// If the read fails, or there is no such segment.
    #[inline]
    pub fn read(&self, files: &Files<D::File>, address: u64, into: &mut [u8]) -> io::Result<()> {
        let (segment, offset) = self.split(address);
        let file = files.get(segment as usize).ok_or(io::ErrorKind::UnexpectedEof)?;
        if offset + into.len() as u64 > u64::from(self.bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        file.read_at(offset, into)
    }

    /// The copies of a segment that hold all data now.
    #[inline]
    pub fn copies(&self, files: &Files<D::File>, segment: u32) -> GoodCopies {
        files.get(segment as usize).map_or(GoodCopies::ONE, |file| file.copies())
    }

    /// Reads one copy of a segment.
    ///
    /// # Errors
    /// As [`Segments::read`]; other copies are not tried.
    pub fn read_copy(
        &self,
        files: &Files<D::File>,
        copy: usize,
        address: u64,
        into: &mut [u8],
    ) -> io::Result<()> {
        let (segment, offset) = self.split(address);
        let file = files.get(segment as usize).ok_or(io::ErrorKind::UnexpectedEof)?;
        if offset + into.len() as u64 > u64::from(self.bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        file.read_copy(copy, offset, into)
    }

    /// Reads a long range of one copy in parallel parts.
    ///
    /// # Errors
    /// As [`Segments::read_copy`].
    pub fn read_long(
        &self,
        files: &Files<D::File>,
        copy: usize,
        address: u64,
        into: &mut [u8],
    ) -> io::Result<()> {
        let part_bytes = into.len().div_ceil(PARTS).max(PART_BYTES).next_multiple_of(ALIGN);
        if into.len() <= part_bytes {
            return self.read_copy(files, copy, address, into);
        }
        std::thread::scope(|scope| {
            let parts = (address..).step_by(part_bytes).zip(into.chunks_mut(part_bytes));
            let read = move |(place, part)| self.read_copy(files, copy, place, part);
            Crew::new(scope).all(parts, read)?.into_iter().collect()
        })
    }

    /// Reads from one segment, from the first copy whose data `is_whole` accepts, and writes these
    /// data over the copies that differ. Returns how many copies were repaired. Each copy that
    /// holds all data is tried, even if another one fails during the call. If `is_whole` accepts no
    /// copy, `into` holds the data of one that could be read.
    ///
    /// # Errors
    /// As [`Segments::read`], if no copy can be read.
    #[inline]
    pub fn read_whole(
        &self,
        files: &Files<D::File>,
        address: u64,
        into: &mut [u8],
        is_whole: &dyn Fn(&[u8]) -> bool,
    ) -> io::Result<usize> {
        // Taken once: another thread may mark a copy as failed while this one reads it.
        let copies = self.copies(files, self.split(address).0);
        let read = self.read_copy(files, copies.first(), address, into);
        if read.is_ok() && is_whole(into) {
            return Ok(0);
        }
        self.read_again(files, copies, address, into, is_whole, read)
    }

    #[cold]
    fn read_again(
        &self,
        files: &Files<D::File>,
        copies: GoodCopies,
        address: u64,
        into: &mut [u8],
        is_whole: &dyn Fn(&[u8]) -> bool,
        first: io::Result<()>,
    ) -> io::Result<usize> {
        let (segment, offset) = self.split(address);
        let Some(file) = files.get(segment as usize) else { return first.map(|()| 0) };
        if copies.count() < 2 {
            return match read_spare(&**file, offset, into, is_whole) {
                Some(mended) => {
                    self.repaired(usize::from(mended), address);
                    Ok(usize::from(mended))
                }
                // Return the damaged data of the good copy, not those of the stale one.
                None => first.and_then(|()| file.read_at(offset, into)).map(|()| 0),
            };
        }
        let mut last = first;
        for copy in copies.numbers() {
            let read = self.read_copy(files, copy, address, into);
            if read.is_ok() && is_whole(into) {
                let mended = file.mend(offset, into).unwrap_or_else(|error| {
                    tracing::error!("segment {segment} offset {offset} is not mended: {error}");
                    0
                });
                self.repaired(mended, address);
                return Ok(mended);
            }
            // Damaged data take precedence over a read error.
            last = last.or(read);
        }
        last.map(|()| 0)
    }
}

/// Reads damaged data from a copy that does not hold all data. If they are intact there, writes
/// them to the good copy. Returns whether the repair succeeded; none if the data are not intact
/// there either.
pub(crate) fn read_spare<F: StoreFile>(
    file: &F,
    offset: u64,
    into: &mut [u8],
    is_whole: &dyn Fn(&[u8]) -> bool,
) -> Option<bool> {
    let read = file.read_spare(offset, into);
    if read.is_err() || !is_whole(into) {
        return None;
    }
    let written = file.write_at(offset, &[into]).and_then(|()| file.sync());
    if let Err(error) = &written {
        tracing::error!("what is damaged at {offset} is not mended: {error}");
    }
    Some(written.is_ok())
}
