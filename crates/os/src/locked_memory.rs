//! Memory for keys: not swapped out, not in a core dump, and overwritten when it is freed.
#![allow(unsafe_code)] // The standard library does not map memory.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap_anonymous, munmap};
use zeroize::Zeroize;

/// A value in pages of its own, which are locked in memory and excluded from core dumps. Its bytes
/// are overwritten with zeros when it is dropped.
///
/// Copies that the compiler makes of a value before it is moved here, on the stack or in registers,
/// are not overwritten.
pub struct LockedMemory<T> {
    value: NonNull<T>,
    len: usize,
    is_locked: bool,
}

// SAFETY: a `LockedMemory` owns its value exclusively, as a box does.
unsafe impl<T: Send> Send for LockedMemory<T> {}
// SAFETY: `&LockedMemory` gives only shared references to the value.
unsafe impl<T: Sync> Sync for LockedMemory<T> {}

impl<T> LockedMemory<T> {
    /// Moves a value into locked pages. If the limit of locked memory (`RLIMIT_MEMLOCK`) is
    /// reached, the pages can be swapped out, and [`LockedMemory::is_locked`] says so.
    ///
    /// # Errors
    /// If the system refuses the memory.
    ///
    /// # Panics
    /// If the type's alignment is larger than a page.
    pub fn new(value: T) -> io::Result<LockedMemory<T>> {
        assert!(align_of::<T>() <= 4096, "a page is the alignment that mmap gives");
        let len = size_of::<T>().max(1);
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address that the system chooses.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, flags) }?;
        // SAFETY: both calls get pages of this mapping, and change no byte of them. A kernel that
        // refuses the advice gives the memory all the same.
        let is_locked = unsafe {
            let _ = madvise(base, len, Advice::LinuxDontDump);
            mlock(base, len).is_ok()
        };
        let value_at = NonNull::new(base.cast::<T>()).expect("mmap does not map address 0");
        // SAFETY: the mapping has the value's length at least, and its alignment.
        unsafe { value_at.write(value) };
        Ok(LockedMemory { value: value_at, len, is_locked })
    }

    /// Whether the pages cannot be swapped out.
    pub fn is_locked(&self) -> bool {
        self.is_locked
    }
}

impl<T> Deref for LockedMemory<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the value is there until it is dropped, and is borrowed with this.
        unsafe { self.value.as_ref() }
    }
}

impl<T> DerefMut for LockedMemory<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and this is the only reference.
        unsafe { self.value.as_mut() }
    }
}

impl<T> Drop for LockedMemory<T> {
    fn drop(&mut self) {
        // SAFETY: the value is dropped once, and nothing refers to it. Then its bytes, which belong
        // to this mapping, are overwritten by writes that are not optimised away, and unmapped,
        // which unlocks them.
        unsafe {
            self.value.drop_in_place();
            std::slice::from_raw_parts_mut(self.value.as_ptr().cast::<u8>(), self.len).zeroize();
            let _ = munmap(self.value.as_ptr().cast(), self.len);
        }
    }
}

impl<T> fmt::Debug for LockedMemory<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockedMemory").field("is_locked", &self.is_locked).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The line `name` of the mapping of an address in `/proc/self/smaps`.
    fn smaps(address: usize, name: &str) -> Option<String> {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_it = false;
        for line in text.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let hex = |text| usize::from_str_radix(text, 16).ok();
            if let Some((Some(start), Some(end))) = range.map(|(a, b)| (hex(a), hex(b))) {
                is_it = (start..end).contains(&address);
            } else if is_it && line.starts_with(name) {
                return Some(line.to_owned());
            }
        }
        None
    }

    #[test]
    fn memory_is_locked_and_not_in_a_core_dump() {
        let mut memory = LockedMemory::new([7_u8; 5000]).unwrap();
        memory[4999] = 8;
        assert_eq!((memory[0], memory[4999]), (7, 8));
        let address = memory.as_ptr() as usize;
        // The flags of madvise(MADV_DONTDUMP) and mlock.
        let flags = smaps(address, "VmFlags:").unwrap();
        assert!(flags.contains(" dd"), "{flags}");
        assert_eq!(flags.contains(" lo"), memory.is_locked(), "{flags}");
    }

    #[test]
    fn a_value_is_dropped_once() {
        let value = std::sync::Arc::new(());
        let memory = LockedMemory::new(std::sync::Arc::clone(&value)).unwrap();
        assert_eq!(std::sync::Arc::strong_count(&value), 2);
        drop(memory);
        assert_eq!(std::sync::Arc::strong_count(&value), 1);
    }
}
