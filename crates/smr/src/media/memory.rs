//! A medium of memory: one mapping of the whole disk, of which the system provides only what is
//! written.
//!
//! Threads that write to different places meet in no lock of ours, and in none of a file: that is
//! why this is no file in memory. I/O that overlaps in time on the same bytes may tear, as on any
//! disk: the bytes are copied through raw pointers, and no reference to them exists.
#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;

use super::{Media, ZoneRecord};

/// Grain in which memory is given back.
const PAGE_BYTES: u64 = 4096;

/// Memory. Nothing of it outlives the process.
#[derive(Debug)]
pub struct Memory {
    base: NonNull<u8>,
    /// Bytes of the disk.
    len: u64,
    /// Bytes of the mapping: whole pages.
    mapped: usize,
    zone_bytes: u64,
}

// SAFETY: the mapping is reached through raw pointers only, see the head of this file; the rest are
// plain numbers.
unsafe impl Send for Memory {}
// SAFETY: as for Send.
unsafe impl Sync for Memory {}

impl Memory {
    /// A medium of `len` zeros, with zones of `zone_bytes`.
    ///
    /// # Errors
    /// If the system does not give it.
    pub fn new(len: u64, zone_bytes: u64) -> io::Result<Memory> {
        let mapped = len.max(1).next_multiple_of(PAGE_BYTES);
        let mapped = usize::try_from(mapped).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // SAFETY: an anonymous mapping where the system chooses touches no other memory.
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
        // Where the system gives huge pages unasked, 4 KiB would cost 2 MiB.
        // SAFETY: the range is the mapping. Where the advice is not known it fails, and the mapping
        // works all the same.
        unsafe { libc::madvise(base, mapped, libc::MADV_NOHUGEPAGE) };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Memory { base, len, mapped, zone_bytes })
    }

    /// Address of a byte of the disk, from which on `len` bytes lie on it.
    fn address(&self, offset: u64, len: u64) -> io::Result<*mut u8> {
        if offset > self.len || len > self.len - offset {
            let text = format!("{len} bytes at {offset} lie beyond the disk of {}", self.len);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        // SAFETY: the range was just found to lie on the disk, which is inside of the mapping.
        Ok(unsafe { self.base.as_ptr().add(offset as usize) })
    }

    /// Makes zeros by hand.
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

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this very mapping was made in `new`, and nobody borrows from it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}

impl Media for Memory {
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let from = self.address(offset, into.len() as u64)?;
        // SAFETY: `address` checked the source; a slice is valid for its length, and it is the
        // caller's and lies outside of the mapping, to which nobody has a reference.
        unsafe { into.as_mut_ptr().copy_from_nonoverlapping(from, into.len()) };
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        let into = self.address(offset, from.len() as u64)?;
        // SAFETY: as in `read`, the other way.
        unsafe { into.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.address(offset, len)?;
        let end = offset + len;
        // Whole pages are given back; those at the disk's end hold nothing else.
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
        // SAFETY: both ends are page boundaries of the mapping, and private anonymous memory that
        // is not needed reads as zeros afterwards.
        let answer = unsafe {
            let start = self.base.as_ptr().add(first as usize).cast();
            libc::madvise(start, (after - first) as usize, libc::MADV_DONTNEED)
        };
        if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
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
        let memory = Memory::new(10 << 40, 1 << 20).unwrap();
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
        let memory = Memory::new(LEN, 4 * PAGE_BYTES).unwrap();
        for start in (0..LEN).step_by(512) {
            for end in (start..=LEN).step_by(1536).chain([LEN]) {
                memory.write(0, &[5; LEN as usize]).unwrap();
                memory.zero(start, end - start).unwrap();
                let mut plain = vec![5; LEN as usize];
                plain[start as usize..end as usize].fill(0);
                let mut found = vec![1; LEN as usize];
                memory.read(0, &mut found).unwrap();
                assert!(found == plain, "{start} to {end}");
            }
        }
        assert!(memory.zero(LEN, 1).is_err());
        assert!(memory.read(LEN - 1, &mut [0; 2]).is_err());
        assert!(memory.write(u64::MAX, &[0]).is_err());
    }
}
