//! The memory of I/O: regions that bios point into, and the data of one request as a run of bytes.
//!
//! A [`Region`] is a run of bytes at a fixed address, shared by reference count. A channel keeps
//! its registered regions alive, so a bio can name `{region, offset}` without a lifetime and
//! pushing it is safe. The one unsafe step is to make a region of foreign memory (a guest's, a
//! shared ring's). [`Pieces`] is what a device reads and writes: the data of a request in order,
//! regardless of how many pieces of memory hold it.
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

use crate::Segment;

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

fn layout(len_bytes: usize) -> Layout {
    Layout::from_size_align(len_bytes, REGION_ALIGN)
        .expect("region lengths are bounded far below isize::MAX")
}

impl Region {
    /// A region of zeroed memory, aligned to [`REGION_ALIGN`].
    ///
    /// # Panics
    /// If `len_bytes` is 0 or above `isize::MAX`. Lengths come from the daemon's own limits.
    pub fn alloc(len_bytes: usize) -> Arc<Region> {
        let region = Region::try_alloc(len_bytes);
        region.unwrap_or_else(|| alloc::handle_alloc_error(layout(len_bytes)))
    }

    /// A region as [`Region::alloc`] makes it; `None` if the system has no memory for it.
    ///
    /// # Panics
    /// If `len_bytes` is 0 or above `isize::MAX`.
    pub fn try_alloc(len_bytes: usize) -> Option<Arc<Region>> {
        assert!(len_bytes > 0, "a region has at least one byte");
        let layout = layout(len_bytes);
        // SAFETY: the layout's size is not 0, asserted above.
        let base = unsafe { alloc::alloc_zeroed(layout) };
        let base = NonNull::new(base)?;
        Some(Arc::new(Region { base, len_bytes, owner: Owner::Alloc(layout) }))
    }

    /// A region over memory that `owner` keeps alive.
    ///
    /// # Safety
    /// - `base` must be valid for reads and writes of `len_bytes` until `owner` is dropped.
    /// - No Rust reference to any of these bytes may exist while a bio on them is in flight, but a
    ///   reference to an atomic, for one access.
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
    #[inline]
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
    #[inline]
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

/// The data of a request, consumed from the front.
#[derive(Debug)]
pub struct Pieces<I> {
    segments: I,
    at: *mut u8,
    left: usize,
}

impl<I: Iterator<Item = Segment>> Pieces<I> {
    /// All data of a request.
    #[inline]
    pub fn new(segments: I) -> Pieces<I> {
        Pieces { segments, at: std::ptr::null_mut(), left: 0 }
    }

    /// Advances to the next piece if the current one is used up.
    #[inline]
    fn settle(&mut self) {
        while self.left == 0 {
            let Some(segment) = self.segments.next() else { return };
            (self.at, self.left) = (segment.data.as_ptr(), segment.len_bytes);
        }
    }

    /// Takes the next `len_bytes` if they lie in one piece. The pointer is valid for reads and
    /// writes of `len_bytes` until the request is completed.
    #[inline]
    pub fn take_whole(&mut self, len_bytes: usize) -> Option<*mut u8> {
        self.settle();
        if self.left < len_bytes {
            return None;
        }
        let at = self.at;
        self.advance(len_bytes);
        Some(at)
    }

    /// The address of the next bytes and how many of them lie in the current piece, for
    /// prefetching. Does not advance to the next piece.
    #[inline]
    pub fn ahead(&self) -> (*const u8, usize) {
        (self.at, self.left)
    }

    /// Skips bytes of the current piece.
    #[inline]
    fn advance(&mut self, len_bytes: usize) {
        self.left -= len_bytes;
        // SAFETY: the piece was at least that long, so the result is inside or one past its end.
        self.at = unsafe { self.at.add(len_bytes) };
    }

    /// Skips `len_bytes` bytes.
    ///
    /// # Panics
    /// If fewer bytes remain.
    #[inline]
    pub fn skip(&mut self, mut len_bytes: usize) {
        while len_bytes > 0 {
            self.settle();
            let len = self.left.min(len_bytes);
            assert!(len > 0, "a request has as many bytes as its range");
            self.advance(len);
            len_bytes -= len;
        }
    }

    /// Copies the next bytes out of the request.
    ///
    /// # Panics
    /// If fewer bytes remain.
    #[inline]
    pub fn read(&mut self, into: &mut [u8]) {
        let mut done = 0;
        while done < into.len() {
            self.settle();
            let len = self.left.min(into.len() - done);
            assert!(len > 0, "a request has as many bytes as its range");
            // SAFETY: the piece has `len` bytes, and so has the rest of `into`, which is ours and
            // no part of a request's memory.
            unsafe { into.as_mut_ptr().add(done).copy_from_nonoverlapping(self.at, len) };
            self.advance(len);
            done += len;
        }
    }

    /// Copies bytes into the request.
    ///
    /// # Panics
    /// If less space remains.
    #[inline]
    pub fn write(&mut self, from: &[u8]) {
        let mut done = 0;
        while done < from.len() {
            self.settle();
            let len = self.left.min(from.len() - done);
            assert!(len > 0, "a request has as many bytes as its range");
            // SAFETY: the piece has `len` bytes, and so has the rest of `from`, which is no part of
            // a request's memory.
            unsafe { self.at.copy_from_nonoverlapping(from.as_ptr().add(done), len) };
            self.advance(len);
            done += len;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

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

    #[test]
    fn bytes_are_in_order_for_any_piece_lengths() {
        let mut memory: Vec<u8> = (0..60).collect();
        let base = memory.as_mut_ptr();
        let piece = |at: usize, len_bytes| {
            // SAFETY: it lies in the vector.
            let data = NonNull::new(unsafe { base.add(at) }).unwrap();
            Segment { data, len_bytes }
        };
        let pieces = || Pieces::new([piece(40, 8), piece(0, 4), piece(20, 12)].into_iter());
        let mut all = [0; 24];
        pieces().read(&mut all);
        let wanted: Vec<u8> = (40..48).chain(0..4).chain(20..32).collect();
        assert_eq!(all[..], wanted);
        let mut some = pieces();
        assert_eq!(some.take_whole(8).map(|at| at as usize), Some(base as usize + 40));
        assert!(some.take_whole(5).is_none());
        some.write(&[200, 201, 202, 203, 204]);
        let (ahead, left) = some.ahead();
        assert_eq!((ahead as usize, left), (base as usize + 21, 11));
        assert_eq!(some.take_whole(11).map(|at| at as usize), Some(base as usize + 21));
        assert!(some.take_whole(1).is_none());
        let mut last = pieces();
        last.skip(13);
        assert_eq!(last.take_whole(2).map(|at| at as usize), Some(base as usize + 21));
        assert_eq!((&memory[..4], memory[20]), (&[200, 201, 202, 203][..], 204));
    }
}
