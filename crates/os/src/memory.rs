//! Mapped memory that costs nothing until it is touched.
#![allow(unsafe_code)] // The standard library does not map memory.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use blockyard_core::Region;

/// Mapped memory, unmapped when its region is dropped.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process; only its owner unmaps it.
unsafe impl Send for Mapping {}
// SAFETY: a shared reference to it gives no access to the memory.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the one that was mapped, and its region, which is being dropped, was
        // the only access to it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A region of fresh memory that costs nothing until it is touched.
///
/// # Errors
/// If the system refuses memory.
pub fn map_region(len: usize) -> io::Result<Arc<Region>> {
    // SAFETY: a new private mapping at an address of the system's choice affects no other memory.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let base = NonNull::new(base.cast::<u8>())
        .ok_or_else(|| io::Error::other("the system mapped memory at address 0"))?;
    let owner = Box::new(Mapping { base, len });
    // SAFETY: the mapping is readable and writable until `owner` is dropped, and no code makes
    // references to memory on which a bio is in flight.
    Ok(unsafe { Region::foreign(base, len, owner) })
}

/// Returns the memory of a page-aligned range to the system; it reads as zeros afterwards. No I/O
/// may be in flight on it.
pub fn forget(region: &Region, offset: u64, len: usize) {
    let Some(base) = region.range(offset, len as u64) else { return };
    // SAFETY: the range lies in a private anonymous mapping, so dropping its pages only zeroes
    // it; the caller has no I/O on it. Failure leaves the memory as it was.
    let _ = unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_DONTNEED) };
}
