//! Where requests that wait are kept: places of a fixed number, and lists through them.
//!
//! A list is a chain of place numbers, so that a request is in its FIFO, in its zone's line or
//! among the free places without anything being allocated.

use std::ops::{Index, IndexMut};

use super::kind::Kind;

/// No place.
pub(super) const NONE: u32 = u32::MAX;

/// A request that waits, and its neighbours in the lists.
#[derive(Clone, Debug)]
pub(super) struct Entry<T> {
    /// Invariant: none exactly in a free place.
    pub(super) item: Option<T>,
    /// Its first sector, and its key in the sorted order.
    pub(super) sector: u64,
    /// The first sector after it.
    pub(super) end: u64,
    /// When it is expired, in nanoseconds.
    pub(super) deadline: u64,
    /// The one before it in its FIFO.
    previous: u32,
    /// The one behind it in its FIFO, at the head, or among the free places.
    next: u32,
    /// The one before it in its zone's line.
    pub(super) zone_previous: u32,
    /// The one behind it in its zone's line.
    pub(super) zone_next: u32,
    pub(super) kind: Kind,
    /// Whether it stands in its zone's line.
    pub(super) in_line: bool,
}

/// A fixed number of places.
#[derive(Clone, Debug)]
pub(super) struct Entries<T> {
    entries: Vec<Entry<T>>,
    free: u32,
    free_count: usize,
}

impl<T> Entries<T> {
    /// So many free places.
    pub(super) fn new(count: usize) -> Entries<T> {
        let count = u32::try_from(count).ok().filter(|count| *count < NONE);
        let count = count.expect("a scheduler holds fewer requests than there are place numbers");
        let kind = Kind::of(crate::bio::Op::Read, crate::bio::Prio::BestEffort);
        let entry = |index: u32| Entry {
            item: None,
            sector: 0,
            end: 0,
            deadline: 0,
            previous: NONE,
            next: if index + 1 == count { NONE } else { index + 1 },
            zone_previous: NONE,
            zone_next: NONE,
            kind,
            in_line: false,
        };
        let free = if count == 0 { NONE } else { 0 };
        Entries { entries: (0..count).map(entry).collect(), free, free_count: count as usize }
    }

    /// How many places there are.
    #[inline]
    pub(super) fn count(&self) -> usize {
        self.entries.len()
    }

    /// How many places are free.
    #[inline]
    pub(super) fn free_count(&self) -> usize {
        self.free_count
    }

    /// Puts a request into a free place, of which there is one. It is in no list yet.
    #[inline]
    pub(super) fn put(&mut self, item: T, kind: Kind, range: (u64, u64), deadline: u64) -> u32 {
        let place = self.free;
        let entry = &mut self.entries[place as usize];
        self.free = entry.next;
        self.free_count -= 1;
        entry.item = Some(item);
        (entry.sector, entry.end) = range;
        (entry.kind, entry.deadline) = (kind, deadline);
        place
    }

    /// Takes the request out of a place, which is free then and in no list any more.
    #[inline]
    pub(super) fn take(&mut self, place: u32) -> T {
        let entry = &mut self.entries[place as usize];
        entry.next = self.free;
        entry.in_line = false;
        self.free = place;
        self.free_count += 1;
        entry.item.take().expect("a place in a list holds a request")
    }
}

impl<T> Index<u32> for Entries<T> {
    type Output = Entry<T>;
    #[inline]
    fn index(&self, place: u32) -> &Entry<T> {
        &self.entries[place as usize]
    }
}

impl<T> IndexMut<u32> for Entries<T> {
    #[inline]
    fn index_mut(&mut self, place: u32) -> &mut Entry<T> {
        &mut self.entries[place as usize]
    }
}

/// A chain of places: a FIFO, or the requests at the head.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    first: u32,
    last: u32,
}

impl List {
    /// A list of nothing.
    pub(super) const EMPTY: List = List { first: NONE, last: NONE };

    /// The first place.
    #[inline]
    pub(super) fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    /// Whether there is none.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.first == NONE
    }

    /// Adds a place behind the others.
    #[inline]
    pub(super) fn push_back<T>(&mut self, entries: &mut Entries<T>, place: u32) {
        let last = std::mem::replace(&mut self.last, place);
        (entries[place].previous, entries[place].next) = (last, NONE);
        match last {
            NONE => self.first = place,
            last => entries[last].next = place,
        }
    }

    /// Adds a place before the others.
    pub(super) fn push_front<T>(&mut self, entries: &mut Entries<T>, place: u32) {
        let first = std::mem::replace(&mut self.first, place);
        (entries[place].previous, entries[place].next) = (NONE, first);
        match first {
            NONE => self.last = place,
            first => entries[first].previous = place,
        }
    }

    /// Takes a place out.
    #[inline]
    pub(super) fn remove<T>(&mut self, entries: &mut Entries<T>, place: u32) {
        let (previous, next) = (entries[place].previous, entries[place].next);
        match previous {
            NONE => self.first = next,
            previous => entries[previous].next = next,
        }
        match next {
            NONE => self.last = previous,
            next => entries[next].previous = previous,
        }
    }

    /// Puts `new`, which is in no list, where `old` was.
    pub(super) fn replace<T>(&mut self, entries: &mut Entries<T>, old: u32, new: u32) {
        let (previous, next) = (entries[old].previous, entries[old].next);
        (entries[new].previous, entries[new].next) = (previous, next);
        match previous {
            NONE => self.first = new,
            previous => entries[previous].next = new,
        }
        match next {
            NONE => self.last = new,
            next => entries[next].previous = new,
        }
    }
}
