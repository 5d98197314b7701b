//! The two resources of a channel: slots, which hold the bios that it has accepted at fixed
//! addresses, and tags, which number its started requests. One thread owns both, so the free ones
//! are plain stacks.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use crate::bio::Bio;
use crate::request::{SLOT_NONE, Slot, Stage};
use crate::units::Tag;

/// A fixed number of slots. Requests point to slots, so all access is through raw pointers.
#[derive(Debug)]
pub(super) struct Slots {
    base: NonNull<Slot>,
    count: u16,
    free: Vec<u16>,
}

// SAFETY: the slots are plain data that only this value owns. Requests carry pointers to slots, and
// the channel does not touch the slots of a request until it has completed.
unsafe impl Send for Slots {}

impl Slots {
    /// `count` free slots.
    pub(super) fn new(count: u16) -> Slots {
        let slots: Box<[Slot]> = (0..count).map(Slot::empty).collect();
        let base = NonNull::from(Box::leak(slots)).cast::<Slot>();
        Slots { base, count, free: (0..count).rev().collect() }
    }

    /// Number of free slots.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// Number of taken slots.
    #[inline]
    pub(super) fn taken(&self) -> usize {
        usize::from(self.count) - self.free.len()
    }

    /// Takes a slot for a bio; `None` when all are taken.
    #[inline]
    pub(super) fn take(&mut self, bio: &Bio, data: NonNull<u8>) -> Option<NonNull<Slot>> {
        let index = self.free.pop()?;
        let slot = self.at(index);
        // SAFETY: `at` points into our slots, and no other pointer to a free slot is in use.
        unsafe {
            let slot = &mut *slot.as_ptr();
            slot.bio = *bio;
            slot.data = data;
            slot.parent = SLOT_NONE;
            slot.stage = Stage::Plain;
        }
        Some(slot)
    }

    /// Frees a slot. No request may refer to it.
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

/// The free tags of a channel.
#[derive(Debug)]
pub(super) struct Tags {
    free: Vec<u16>,
    count: u16,
}

impl Tags {
    /// Tags from 0 to `count`.
    pub(super) fn new(count: u16) -> Tags {
        Tags { free: (0..count).rev().collect(), count }
    }

    /// Number of free tags.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// Number of taken tags.
    #[inline]
    pub(super) fn taken(&self) -> usize {
        usize::from(self.count) - self.free.len()
    }

    /// Takes the tag that was freed last: its cache lines are still in the cache.
    #[inline]
    pub(super) fn take(&mut self) -> Option<Tag> {
        self.free.pop().map(Tag)
    }

    /// Frees a tag.
    #[inline]
    pub(super) fn put(&mut self, tag: Tag) {
        debug_assert!(
            tag.0 < self.count && !self.free.contains(&tag.0),
            "{tag:?} given back twice"
        );
        self.free.push(tag.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tag_is_taken_once() {
        let mut tags = Tags::new(3);
        let taken: Vec<Tag> = std::iter::from_fn(|| tags.take()).collect();
        assert_eq!(taken, [Tag(0), Tag(1), Tag(2)]);
        assert_eq!((tags.room(), tags.taken()), (0, 3));
        tags.put(Tag(1));
        assert_eq!(tags.take(), Some(Tag(1)));
        assert_eq!(tags.take(), None);
    }
}
