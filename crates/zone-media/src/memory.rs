//! A medium in memory: one mapping of the whole disk, of which the system provides only the written
//! pages, and a bitmap of the pages that hold data.
//!
//! Threads that write to different places share no lock, not even the kernel's lock of a file: that
//! is why this is not a file in memory. Concurrent I/O on the same bytes may tear, as on any disk:
//! the bytes are copied through raw pointers, and no reference to them exists.
#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;

use blockyard_core::{Extent, SECTOR_SHIFT, Sector};
use blockyard_sync::page_bitmap::PageBitmap;

use crate::medium::Media;
use crate::zone_word::ZoneRecord;

/// Granularity in which memory is freed, and in which the medium knows where data are.
const PAGE_BYTES: u64 = 4096;

/// A medium in memory; its contents are lost with the process.
#[derive(Debug)]
pub struct MemoryMedium {
    base: NonNull<u8>,
    /// Length of the disk in bytes.
    len: u64,
    /// Length of the mapping in bytes: whole pages.
    mapped: usize,
    zone_bytes: u64,
    /// The pages that hold data.
    written: PageBitmap,
}

// SAFETY: the mapping is accessed only through raw pointers, as the head of this file describes;
// the other fields are plain numbers, and a bitmap that is Sync itself.
unsafe impl Send for MemoryMedium {}
// SAFETY: as for Send.
unsafe impl Sync for MemoryMedium {}

impl MemoryMedium {
    /// Creates a medium of `len` zeros, with zones of `zone_bytes`.
    ///
    /// # Errors
    /// If the system refuses the mapping.
    pub fn new(len: u64, zone_bytes: u64) -> io::Result<MemoryMedium> {
        let mapped = len.max(1).next_multiple_of(PAGE_BYTES);
        let mapped = usize::try_from(mapped).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // Before the mapping: an early return would leak the mapping.
        let pages = mapped as u64 / PAGE_BYTES;
        let written = PageBitmap::new(pages).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: an anonymous mapping at an address that the system chooses touches no other
        // memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // With huge pages by default, 4 KiB of data would take 2 MiB.
        // SAFETY: the range is the mapping. A system that does not know the advice returns an
        // error, and the mapping works in any case.
        unsafe { libc::madvise(base, mapped, libc::MADV_NOHUGEPAGE) };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(MemoryMedium { base, len, mapped, zone_bytes, written })
    }

    /// Address of the byte at `offset`; checks that `len` bytes from there lie on the disk.
    fn address(&self, offset: u64, len: u64) -> io::Result<*mut u8> {
        if offset > self.len || len > self.len - offset {
            let text = format!("{len} bytes at {offset} lie beyond the disk of {}", self.len);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        // SAFETY: the check shows that the range lies on the disk, which is inside the mapping.
        Ok(unsafe { self.base.as_ptr().add(offset as usize) })
    }

    /// Writes zeros to a range.
    fn clear(&self, offset: u64, end: u64) -> io::Result<()> {
        let len = end.saturating_sub(offset);
        if len == 0 {
            return Ok(());
        }
        let address = self.address(offset, len)?;
        // SAFETY: `address` checked the range.
        unsafe { address.write_bytes(0, len as usize) };
        Ok(())
    }
}

impl Drop for MemoryMedium {
    fn drop(&mut self) {
        // SAFETY: `new` created this mapping, and no borrow of it exists.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}

impl Media for MemoryMedium {
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let from = self.address(offset, into.len() as u64)?;
        // SAFETY: `address` checked the source. The destination slice is valid for its length,
        // belongs to the caller, and lies outside the mapping, to which no reference exists.
        unsafe { into.as_mut_ptr().copy_from_nonoverlapping(from, into.len()) };
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        let into = self.address(offset, from.len() as u64)?;
        // SAFETY: as in `read`, with source and destination exchanged.
        unsafe { into.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        let end = offset + from.len() as u64;
        self.written.set_range(offset / PAGE_BYTES, end.div_ceil(PAGE_BYTES));
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.address(offset, len)?;
        let end = offset + len;
        // Whole pages are freed; a partial page at the disk's end holds nothing else.
        let first = offset.next_multiple_of(PAGE_BYTES);
        let after = match end == self.len {
            true => end.next_multiple_of(PAGE_BYTES),
            false => end / PAGE_BYTES * PAGE_BYTES,
        };
        if first >= after {
            return self.clear(offset, end);
        }
        self.clear(offset, first)?;
        self.clear(after, end)?;
        // Before the memory is freed, as the bitmap demands.
        self.written.clear(first / PAGE_BYTES, after / PAGE_BYTES);
        // SAFETY: both ends are page boundaries of the mapping, and private anonymous memory reads
        // as zeros after MADV_DONTNEED.
        let answer = unsafe {
            let start = self.base.as_ptr().add(first as usize).cast();
            libc::madvise(start, (after - first) as usize, libc::MADV_DONTNEED)
        };
        if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        let end = (from + sectors).bytes();
        let page = from.bytes() / PAGE_BYTES;
        let (allocated, pages) = self.written.run(page, end.div_ceil(PAGE_BYTES));
        let run_end = ((page + pages) * PAGE_BYTES).min(end);
        let sectors = (run_end - from.bytes()) >> SECTOR_SHIFT;
        Extent { sectors, allocated, zero: !allocated }
    }

    fn zone_changed(&self, _zone: u32, _state: ZoneRecord) -> io::Result<()> {
        Ok(())
    }

    fn reset(&self, zone: u32, _state: ZoneRecord) -> io::Result<()> {
        let offset = u64::from(zone) * self.zone_bytes;
        self.zero(offset, self.zone_bytes.min(self.len.saturating_sub(offset)))
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn zones(&self) -> Vec<ZoneRecord> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_keeps_bytes_and_forgets_a_zone() {
        let memory = MemoryMedium::new(10 << 40, 1 << 20).unwrap();
        let at = (9 << 40) + 512;
        memory.write(at, &[7; 1024]).unwrap();
        let mut bytes = [1; 1536];
        memory.read(at, &mut bytes).unwrap();
        assert_eq!(bytes[..1024], [7; 1024]);
        assert_eq!(bytes[1024..], [0; 512]);
        memory.zero(at, 512).unwrap();
        memory.read(at, &mut bytes).unwrap();
        assert_eq!((bytes[0], bytes[512]), (0, 7));
        memory.reset((at >> 20) as u32, ZoneRecord::EMPTY).unwrap();
        memory.read(at, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 1536]);
    }

    #[test]
    fn zeros_agree_with_a_plain_vector() {
        const LEN: u64 = 10 * PAGE_BYTES + 1024;
        let memory = MemoryMedium::new(LEN, 4 * PAGE_BYTES).unwrap();
        for start in (0..LEN).step_by(512) {
            for end in (start..=LEN).step_by(1536).chain([LEN]) {
                memory.write(0, &[5; LEN as usize]).unwrap();
                memory.zero(start, end - start).unwrap();
                let mut plain = vec![5; LEN as usize];
                plain[start as usize..end as usize].fill(0);
                let mut found = vec![1; LEN as usize];
                memory.read(0, &mut found).unwrap();
                assert!(found == plain, "{start} to {end}");
                let (mut at, sectors) = (0, LEN >> SECTOR_SHIFT);
                while at < sectors {
                    let extent = memory.extent(Sector(at), sectors - at);
                    let bytes =
                        Sector(at).bytes() as usize..Sector(at + extent.sectors).bytes() as usize;
                    let is_zero = plain[bytes.clone()].iter().all(|byte| *byte == 0);
                    assert!(is_zero || !extent.zero, "{start} to {end}: {extent:?} at {at}");
                    // Whole pages of zeros are freed.
                    let is_page = bytes.len() as u64 >= PAGE_BYTES;
                    assert!(!is_zero || !is_page || extent.zero, "{start} to {end}: {extent:?}");
                    at += extent.sectors;
                }
            }
        }
        assert!(memory.zero(LEN, 1).is_err());
        assert!(memory.read(LEN - 1, &mut [0; 2]).is_err());
        assert!(memory.write(u64::MAX, &[0]).is_err());
    }
}
