//! The bios that a channel has accepted, at fixed addresses, and which places are free.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use crate::bio::Bio;
use crate::request::{SLOT_NONE, Slot, Stage};

/// A fixed number of slots. Requests point at them, so they are reached by raw pointer only.
#[derive(Debug)]
pub(super) struct Slots {
    base: NonNull<Slot>,
    count: u16,
    free: Vec<u16>,
}

// SAFETY: the slots are plain data that this value alone owns; pointers to them travel in requests,
// and a request's slots are left alone until it has come home.
unsafe impl Send for Slots {}

impl Slots {
    /// `count` free slots.
    pub(super) fn new(count: u16) -> Slots {
        let slots: Box<[Slot]> = (0..count).map(Slot::empty).collect();
        let base = NonNull::from(Box::leak(slots)).cast::<Slot>();
        Slots { base, count, free: (0..count).rev().collect() }
    }

    /// How many are free.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// How many are taken.
    #[inline]
    pub(super) fn taken(&self) -> usize {
        usize::from(self.count) - self.free.len()
    }

    /// Takes a slot for a bio; `None` when all are taken.
    #[inline]
    pub(super) fn take(&mut self, bio: &Bio, data: NonNull<u8>) -> Option<NonNull<Slot>> {
        let index = self.free.pop()?;
        let slot = self.at(index);
        // SAFETY: `at` points into our slots, and a free slot is referred to by nobody else.
        unsafe {
            let slot = &mut *slot.as_ptr();
            slot.bio = *bio;
            slot.data = data;
            slot.parent = SLOT_NONE;
            slot.stage = Stage::Plain;
        }
        Some(slot)
    }

    /// Gives a slot back. No request may refer to it any more.
    #[inline]
    pub(super) fn put(&mut self, index: u16) {
        debug_assert!(index < self.count && self.free.len() < usize::from(self.count));
        self.free.push(index);
    }

    /// The address of a slot.
    #[inline]
    pub(super) fn at(&self, index: u16) -> NonNull<Slot> {
        assert!(index < self.count, "slot numbers come from this table");
        // SAFETY: index < count, so the result lies inside the allocation of `count` slots.
        unsafe { self.base.add(usize::from(index)) }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        let slots = NonNull::slice_from_raw_parts(self.base, usize::from(self.count));
        // SAFETY: `base` and `count` are those of the box that `new` leaked.
        drop(unsafe { Box::from_raw(slots.as_ptr()) });
    }
}
