//! Reads from segments, from whichever copy has intact data.

use std::io;
use std::sync::Arc;

use blockyard_store::buffer::{ALIGN, Buffer, Memory};
use blockyard_store::{GoodCopies, SegmentStore, StoreFile};
use blockyard_volume_format::bytes::crc;
use blockyard_volume_format::entry::Entry;
use blockyard_volume_format::{FormatError, PAGE_BYTES};

use super::{Files, Segments};
use crate::error::VolumeError;
use crate::map::{Leaf, Map, Page};
use crate::recovery::workers::Workers;

/// A long read is split into at most `PARTS` parts of at least `PART_BYTES` bytes.
const PARTS: usize = 16;
const PART_BYTES: usize = 256 << 10;

impl<D: SegmentStore> Segments<D> {
    /// Reads a map page and verifies its checksum.
    ///
    /// # Errors
    /// As [`Segments::load`].
    pub fn read_page(&self, location: Entry) -> Result<Buffer, VolumeError> {
        let mut bytes = Memory::new(PAGE_BYTES as u64).take_beyond(PAGE_BYTES);
        let (segment, offset) = self.split(location.address());
        let want = location.crc();
        let is_whole = |bytes: &[u8]| crc(bytes) == want;
        let files = self.files();
        let failed = || {
            let doing = format!("cannot read a page of the map, segment {segment} offset {offset}");
            VolumeError::io(doing)
        };
        let read = self.read_whole(&files, location.address(), &mut bytes, &is_whole);
        read.map(drop).map_err(failed())?;
        let found = crc(&bytes);
        if found != location.crc() {
            // The page is damaged only if it is so in each copy, not if one could not be read.
            let file = files.get(segment as usize);
            for copy in file.into_iter().flat_map(|file| file.copies().numbers()) {
                self.read_copy(&files, copy, location.address(), &mut bytes).map_err(failed())?;
                if is_whole(&bytes) {
                    return Ok(bytes);
                }
            }
            return Err(FormatError::Page { segment, offset, found, want: location.crc() }.into());
        }
        Ok(bytes)
    }

    /// The contents of a leaf, or of its current version. If the volume is written meanwhile, the
    /// page of an older version may have been replaced by other data.
    ///
    /// # Errors
    /// If the current version cannot be read.
    pub fn page_now(
        &self,
        map: &Map,
        (number, at): (usize, usize),
        leaf: &Arc<Leaf>,
    ) -> Result<Arc<Page>, VolumeError> {
        let mut leaf = Arc::clone(leaf);
        loop {
            let error = match self.page(&leaf) {
                Ok(page) => return Ok(page),
                Err(error) => error,
            };
            match map.with(number, |span| span.node().and_then(|node| node.leaf(at).cloned())) {
                Some(now) if Arc::ptr_eq(&now, &leaf) => return Err(error),
                Some(now) => leaf = now,
                None => return Ok(Arc::default()),
            }
        }
    }

    /// Whether a map page is permanently lost: it is damaged in every copy, and no copy is missing
    /// that may have it.
    pub(crate) fn is_lost(&self, error: &VolumeError) -> bool {
        error.is_rotten_page()
            && self.directory.copy_status().iter().all(|copy| copy.state.is_good())
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
            Workers::new(scope).all(parts, read)?.into_iter().collect()
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
            return match read_resyncing(&**file, offset, into, is_whole) {
                Some(repaired) => {
                    self.repaired(usize::from(repaired), address);
                    Ok(usize::from(repaired))
                }
                // Return the damaged data of the good copy, not those of the stale one.
                None => first.and_then(|()| file.read_at(offset, into)).map(|()| 0),
            };
        }
        let mut last = first;
        for copy in copies.numbers() {
            let read = self.read_copy(files, copy, address, into);
            if read.is_ok() && is_whole(into) {
                let repaired = file.repair(offset, into).unwrap_or_else(|error| {
                    tracing::error!("segment {segment} offset {offset} is not mended: {error}");
                    0
                });
                self.repaired(repaired, address);
                return Ok(repaired);
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
pub(crate) fn read_resyncing<F: StoreFile>(
    file: &F,
    offset: u64,
    into: &mut [u8],
    is_whole: &dyn Fn(&[u8]) -> bool,
) -> Option<bool> {
    let read = file.read_resyncing(offset, into);
    if read.is_err() || !is_whole(into) {
        return None;
    }
    let written = file.write_at(offset, &[into]).and_then(|()| file.sync());
    if let Err(error) = &written {
        tracing::error!("what is damaged at {offset} is not mended: {error}");
    }
    Some(written.is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stepped_pool::SteppedPool;

    /// Regression: a leaf that was replaced during the count was reported as damaged, because its
    /// place had other data by then.
    #[test]
    fn a_page_that_has_gone_meanwhile_is_looked_for_where_it_is() {
        let mut stepped = SteppedPool::new("usage");
        stepped.write(0, 4);
        stepped.checkpoint();
        let live = stepped.pool.find("v").unwrap();
        let leaf = || live.map.with(0, |span| span.node().unwrap().leaf(0).cloned().unwrap());
        let old = leaf();
        let segments = stepped.pool.segments();
        let (file, offset) = segments.place(old.location().unwrap().address()).unwrap();
        let count = |leaf: &Arc<Leaf>| {
            let page = segments.page_now(&live.map, (0, 0), leaf);
            page.map(|page| page.entries().iter().filter(|entry| !entry.is_hole()).count())
        };
        let mut bytes = stepped.pool.memory().take_beyond(4096);
        bytes.fill(9);
        while old.is_resident() {
            old.evict();
        }
        file.write_at(offset, &[&bytes]).unwrap();
        assert!(count(&old).is_err(), "it is damaged");
        let (now, mut page) = (Page::default(), Page::default());
        page.set(
            3,
            blockyard_volume_format::entry::Entry::new(4096, 4096, Default::default(), 1),
            false,
        );
        for (contents, blocks) in [(now, 0), (page, 1)] {
            let now = Arc::new(Leaf::new(Arc::new(contents), 1));
            let mut node = crate::map::Node::default();
            node.put(0, now);
            live.map.replace(0, Arc::new(node));
            assert_eq!(count(&old).unwrap(), blocks);
        }
    }
}
