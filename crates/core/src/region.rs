//! Registered memory that bios point into.
//!
//! A [`Region`] is a run of bytes at a fixed address, shared by reference count. A channel keeps
//! its registered regions alive, so a bio can name `{region, offset}` without a lifetime and
//! pushing it is safe. The one unsafe step is to make a region of foreign memory (a guest's, a
//! shared ring's).
//!
//! Devices access the bytes like DMA memory. This module copies bytes in and out only through raw
//! pointers and makes no reference to them. A thread that accesses a range while a bio on it is in
//! flight finds old bytes, new bytes or a mixture.
#![allow(unsafe_code)]

use std::alloc::{self, Layout};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Alignment of the memory that [`Region::alloc`] makes, in bytes.
pub const REGION_ALIGN: usize = 4096;

/// Memory at a fixed address that channels can register.
pub struct Region {
    base: NonNull<u8>,
    len_bytes: usize,
    owner: Owner,
}

/// What frees the memory.
enum Owner {
    Alloc(Layout),
    #[expect(dead_code, reason = "held for its Drop")]
    Foreign(Box<dyn Any + Send + Sync>),
}

// SAFETY: all access to the memory is through raw pointers, its owner is Send, and the copying
// methods promise nothing about bytes that are copied concurrently.
unsafe impl Send for Region {}
// SAFETY: as for Send; `&Region` gives out copies of bytes and the raw base address only.
unsafe impl Sync for Region {}

impl Region {
    /// A region of zeroed memory, aligned to [`REGION_ALIGN`].
    ///
    /// # Panics
    /// If `len_bytes` is 0 or above `isize::MAX`. Lengths come from the daemon's own limits.
    pub fn alloc(len_bytes: usize) -> Arc<Region> {
        assert!(len_bytes > 0, "a region has at least one byte");
        let layout = Layout::from_size_align(len_bytes, REGION_ALIGN)
            .expect("region lengths are bounded far below isize::MAX");
        // SAFETY: the layout's size is not 0, asserted above.
        let base = unsafe { alloc::alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { alloc::handle_alloc_error(layout) };
        Arc::new(Region { base, len_bytes, owner: Owner::Alloc(layout) })
    }

    /// A region over memory that `owner` keeps alive.
    ///
    /// # Safety
    /// - `base` must be valid for reads and writes of `len_bytes` until `owner` is dropped.
    /// - No Rust reference to any of these bytes may exist while a bio on them is in flight.
    pub unsafe fn foreign(
        base: NonNull<u8>,
        len_bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Arc<Region> {
        Arc::new(Region { base, len_bytes, owner: Owner::Foreign(owner) })
    }

    /// The length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The address of the first byte, for system calls that read or fill the region.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The address of a range, if the range lies inside the region.
    #[inline]
    pub fn range(&self, offset: u64, len_bytes: u64) -> Option<NonNull<u8>> {
        let end = offset.checked_add(len_bytes)?;
        if end > self.len_bytes as u64 {
            return None;
        }
        // SAFETY: offset <= end <= len_bytes, so the result stays inside the region's memory.
        Some(unsafe { self.base.add(offset as usize) })
    }

    /// Copies bytes out of the region.
    ///
    /// # Panics
    /// If the range does not lie inside the region.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let from = self.range(offset, into.len() as u64).expect("range inside the region");
        // SAFETY: `range` checked the source; a `&mut` slice cannot overlap it, because the
        // contract of `foreign` forbids references to region memory in use.
        unsafe { from.as_ptr().copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) }
    }

    /// Copies bytes into the region.
    ///
    /// # Panics
    /// If the range does not lie inside the region.
    pub fn write(&self, offset: u64, from: &[u8]) {
        let into = self.range(offset, from.len() as u64).expect("range inside the region");
        // SAFETY: `range` checked the destination; the slice does not overlap it, as above.
        unsafe { into.as_ptr().copy_from_nonoverlapping(from.as_ptr(), from.len()) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Owner::Alloc(layout) = self.owner {
            // SAFETY: `base` came from `alloc_zeroed` with this layout.
            unsafe { alloc::dealloc(self.base.as_ptr(), layout) }
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("len_bytes", &self.len_bytes).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_round_trip_and_ranges_are_checked() {
        let region = Region::alloc(8192);
        region.write(4090, b"across");
        let mut back = [0; 6];
        region.read(4090, &mut back);
        assert_eq!(&back, b"across");
        assert!(region.range(8192, 0).is_some());
        assert!(region.range(8191, 2).is_none());
        assert!(region.range(u64::MAX, 2).is_none());
        assert_eq!(region.base() as usize % REGION_ALIGN, 0);
    }

    #[test]
    fn foreign_memory_outlives_its_region() {
        let owner = Arc::new(());
        let mut memory = vec![7u8; 512].into_boxed_slice();
        let base = NonNull::new(memory.as_mut_ptr()).unwrap();
        // SAFETY: the box moves into the owner and its heap memory stays where it is.
        let region = unsafe { Region::foreign(base, 512, Box::new((memory, Arc::clone(&owner)))) };
        let mut back = [0; 1];
        region.read(511, &mut back);
        assert_eq!(back, [7]);
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(region);
        assert_eq!(Arc::strong_count(&owner), 1);
    }
}
