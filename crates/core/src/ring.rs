//! A bounded queue of small values, for requests and completions between the layers of a channel.
//!
//! `VecDeque` can grow and pays for that on every push; a channel knows its bound when it opens.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::MaybeUninit;

/// A bounded double-ended queue.
pub(crate) struct Ring<T> {
    /// A power of two of entries. Invariant: the entries from `head` to `tail`, modulo the length,
    /// hold values, and no others do.
    places: Box<[MaybeUninit<T>]>,
    head: usize,
    tail: usize,
}

impl<T> Ring<T> {
    /// An empty ring for at least `capacity` values.
    pub(crate) fn with_capacity(capacity: usize) -> Ring<T> {
        let places = (0..capacity.max(1).next_power_of_two()).map(|_| MaybeUninit::uninit());
        Ring { places: places.collect(), head: 0, tail: 0 }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.tail.wrapping_sub(self.head)
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.tail == self.head
    }

    #[inline]
    fn place(&mut self, at: usize) -> &mut MaybeUninit<T> {
        let index = at & (self.places.len() - 1);
        // SAFETY: the length is a power of two, so the masked index is below it.
        unsafe { self.places.get_unchecked_mut(index) }
    }

    /// Adds a value at the end.
    ///
    /// # Panics
    /// If the ring is full: the bound is enforced where values enter the channel, not here.
    #[inline]
    pub(crate) fn push_back(&mut self, value: T) {
        assert!(self.len() < self.places.len(), "a ring is bounded by its channel's depth");
        self.place(self.tail).write(value);
        self.tail = self.tail.wrapping_add(1);
    }

    /// Adds a value at the front.
    ///
    /// # Panics
    /// If the ring is full, as for [`Ring::push_back`].
    pub(crate) fn push_front(&mut self, value: T) {
        assert!(self.len() < self.places.len(), "a ring is bounded by its channel's depth");
        self.head = self.head.wrapping_sub(1);
        self.place(self.head).write(value);
    }

    /// Takes the first value.
    #[inline]
    pub(crate) fn pop_front(&mut self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        let head = self.head;
        self.head = head.wrapping_add(1);
        // SAFETY: by the invariant the place held a value, and `head` has moved past it.
        Some(unsafe { self.place(head).assume_init_read() })
    }

    /// Takes the last value.
    pub(crate) fn pop_back(&mut self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        self.tail = self.tail.wrapping_sub(1);
        // SAFETY: by the invariant the place held a value, and `tail` has moved before it.
        Some(unsafe { self.place(self.tail).assume_init_read() })
    }

    /// Swaps the values at two indices, counted from the front.
    ///
    /// # Panics
    /// If an index is not below the length.
    #[inline]
    pub(crate) fn swap(&mut self, one: usize, other: usize) {
        assert!(one.max(other) < self.len(), "an index is out of bounds");
        let at = |index| self.head.wrapping_add(index) & (self.places.len() - 1);
        let (one, other) = (at(one), at(other));
        self.places.swap(one, other);
    }

    /// The value at `index`, counted from the front.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        if index >= self.len() {
            return None;
        }
        let at = self.head.wrapping_add(index) & (self.places.len() - 1);
        // SAFETY: by the invariant the place holds a value.
        Some(unsafe { self.places[at].assume_init_ref() })
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        while self.pop_front().is_some() {}
    }
}

impl<T> fmt::Debug for Ring<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring({} of {})", self.len(), self.places.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_wrap_around_and_values_are_dropped() {
        let mut ring: Ring<Box<u32>> = Ring::with_capacity(3);
        for round in 0..10 {
            ring.push_back(Box::new(round));
            ring.push_back(Box::new(round + 100));
            ring.push_front(Box::new(round + 200));
            assert_eq!(ring.len(), 3);
            assert_eq!(ring.get(0).map(|v| **v), Some(round + 200));
            assert_eq!(ring.get(3), None);
            ring.swap(0, 2);
            assert_eq!(ring.get(2).map(|v| **v), Some(round + 200));
            ring.swap(2, 0);
            ring.swap(1, 1);
            assert_eq!(*ring.pop_back().unwrap(), round + 100);
            assert_eq!(*ring.pop_front().unwrap(), round + 200);
            assert_eq!(*ring.pop_front().unwrap(), round);
            assert!(ring.pop_front().is_none() && ring.pop_back().is_none());
        }
        ring.push_back(Box::new(1));
    }

    #[test]
    #[should_panic(expected = "bounded")]
    fn push_to_full_ring_panics() {
        let mut ring = Ring::with_capacity(2);
        (0..3).for_each(|n| ring.push_back(n));
    }
}
