//! An array with reserved addresses for its maximum length: it grows without moving and without an
//! allocator, so that the data path never allocates. Unused items take no memory.
#![allow(unsafe_code)]

use std::fmt;
use std::ops::{Deref, DerefMut};

#[cfg(not(miri))]
use std::ptr::NonNull;

/// A list of up to `capacity` items.
pub(super) struct Table<T: Copy> {
    #[cfg(not(miri))]
    base: NonNull<T>,
    #[cfg(not(miri))]
    len: usize,
    /// Miri lacks these system calls: a list from the allocator.
    #[cfg(miri)]
    items: Vec<T>,
    capacity: usize,
}

#[cfg(not(miri))]
// SAFETY: the table owns its items, as a vector does.
unsafe impl<T: Copy + Send> Send for Table<T> {}

#[cfg(not(miri))]
impl<T: Copy> Table<T> {
    /// Creates an empty list with addresses for `capacity` items. Takes no memory.
    ///
    /// # Errors
    /// The system's error number.
    pub(super) fn reserve(capacity: usize) -> Result<Table<T>, i32> {
        assert!(size_of::<T>() > 0 && align_of::<T>() <= super::memory::PAGE_BYTES);
        let capacity = capacity.max(1);
        let len_bytes = capacity.checked_mul(size_of::<T>()).ok_or(libc::ENOMEM)?;
        let base = super::memory::map(len_bytes)?.cast::<T>();
        Ok(Table { base, len: 0, capacity })
    }

    /// Appends an item; `false` if the list is full.
    #[inline]
    pub(super) fn push(&mut self, item: T) -> bool {
        if self.len == self.capacity {
            return false;
        }
        // SAFETY: the item lies in the mapping, whose start is page-aligned, and the table owns it.
        unsafe { self.base.as_ptr().add(self.len).write(item) };
        self.len += 1;
        true
    }

    /// Removes the last item.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<T> {
        self.len = self.len.checked_sub(1)?;
        // SAFETY: the index is below the old length, so the item was written.
        Some(unsafe { self.base.as_ptr().add(self.len).read() })
    }

    /// Removes all items, and returns their memory to the system.
    pub(super) fn clear(&mut self) {
        let len_bytes = self.len * size_of::<T>();
        self.len = 0;
        // SAFETY: the range lies in the mapping, and contains no item any more.
        unsafe { libc::madvise(self.base.as_ptr().cast(), len_bytes, libc::MADV_DONTNEED) };
    }
}

#[cfg(not(miri))]
impl<T: Copy> Deref for Table<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `len` items were written, and the table owns them.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

#[cfg(not(miri))]
impl<T: Copy> DerefMut for Table<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

#[cfg(not(miri))]
impl<T: Copy> Drop for Table<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and its length did not overflow when it was created.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.capacity * size_of::<T>()) };
    }
}

#[cfg(miri)]
impl<T: Copy> Table<T> {
    pub(super) fn reserve(capacity: usize) -> Result<Table<T>, i32> {
        Ok(Table { items: Vec::new(), capacity: capacity.max(1) })
    }

    pub(super) fn push(&mut self, item: T) -> bool {
        let fits = self.items.len() < self.capacity;
        if fits {
            self.items.push(item);
        }
        fits
    }

    pub(super) fn pop(&mut self) -> Option<T> {
        self.items.pop()
    }

    pub(super) fn clear(&mut self) {
        self.items = Vec::new();
    }
}

#[cfg(miri)]
impl<T: Copy> Deref for Table<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.items
    }
}

#[cfg(miri)]
impl<T: Copy> DerefMut for Table<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.items
    }
}

impl<T: Copy> fmt::Debug for Table<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (len, capacity) = (self.len(), self.capacity);
        f.debug_struct("Table").field("len", &len).field("capacity", &capacity).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_holds_as_many_as_were_asked_for() {
        let mut table = Table::<u32>::reserve(1000).unwrap();
        assert!(table.is_empty() && table.pop().is_none());
        (0..1000).for_each(|number| assert!(table.push(number)));
        assert!(!table.push(1000));
        table[7] = 70;
        assert_eq!((table.len(), table[7], table.pop()), (1000, 70, Some(999)));
        table.clear();
        assert!(table.is_empty() && table.push(5));
        assert_eq!(table[..], [5]);
    }

    #[test]
    fn pool_beyond_the_address_space_is_refused() {
        if cfg!(miri) {
            return;
        }
        assert!(Table::<u64>::reserve(usize::MAX).is_err());
        assert!(Table::<u64>::reserve(1 << 58).is_err());
    }
}
