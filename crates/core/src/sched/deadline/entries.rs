//! Storage of waiting requests: a fixed number of entries, and lists that link them.
//!
//! A list is a chain of entry numbers. So a request can be in its FIFO, in the list of its zone or
//! in the free list without an allocation.

use std::ops::{Index, IndexMut};

use super::kind::Kind;

/// A number that means no entry.
pub(super) const NONE: u32 = u32::MAX;

/// A waiting request and its neighbours in the lists.
#[derive(Clone, Debug)]
pub(super) struct Entry<T> {
    /// Invariant: `None` if and only if the entry is free.
    pub(super) item: Option<T>,
    /// The first sector of the request and its key in the sector order.
    pub(super) sector: u64,
    /// The first sector after the request.
    pub(super) end: u64,
    /// When the request expires, in nanoseconds.
    pub(super) deadline: u64,
    /// The previous entry in the FIFO.
    previous: u32,
    /// The next entry in the FIFO, at the head, or in the free list.
    next: u32,
    /// The previous entry in the list of the zone.
    pub(super) zone_previous: u32,
    /// The next entry in the list of the zone.
    pub(super) zone_next: u32,
    pub(super) kind: Kind,
    /// Whether the entry is in the list of its zone.
    pub(super) in_line: bool,
}

/// A fixed number of entries. Memory for all of them is allocated at once, but an entry is first
/// written when it is first needed: a scheduler that has no requests takes no physical memory for
/// them.
#[derive(Clone, Debug)]
pub(super) struct Entries<T> {
    /// The entries that were used before.
    entries: Vec<Entry<T>>,
    /// The first of those that are free.
    free: u32,
    free_count: usize,
    count: usize,
}

impl<T> Entries<T> {
    /// `count` free entries.
    pub(super) fn new(count: usize) -> Entries<T> {
        let count = u32::try_from(count).ok().filter(|count| *count < NONE);
        let count = count.expect("a scheduler holds fewer requests than there are place numbers");
        let count = count as usize;
        Entries { entries: Vec::with_capacity(count), free: NONE, free_count: count, count }
    }

    /// Number of entries.
    #[inline]
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Number of free entries.
    #[inline]
    pub(super) fn free_count(&self) -> usize {
        self.free_count
    }

    /// Puts a request into a free entry, of which there must be one. The entry is in no list yet.
    #[inline]
    pub(super) fn put(&mut self, item: T, kind: Kind, range: (u64, u64), deadline: u64) -> u32 {
        if self.free == NONE {
            self.add_free();
        }
        let place = self.free;
        let entry = &mut self.entries[place as usize];
        self.free = entry.next;
        self.free_count -= 1;
        entry.item = Some(item);
        (entry.sector, entry.end) = range;
        (entry.kind, entry.deadline) = (kind, deadline);
        place
    }

    /// Adds an entry that was not used before to the free list, which is empty.
    #[cold]
    fn add_free(&mut self) {
        assert!(self.entries.len() < self.count, "the caller has checked that an entry is free");
        self.free = self.entries.len() as u32;
        self.entries.push(Entry {
            item: None,
            sector: 0,
            end: 0,
            deadline: 0,
            previous: NONE,
            next: NONE,
            zone_previous: NONE,
            zone_next: NONE,
            kind: Kind::of(crate::bio::Op::Read, crate::bio::Prio::BestEffort),
            in_line: false,
        });
    }

    /// Removes the request from an entry and frees the entry, which must be in no list.
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

/// A chain of entries: a FIFO, or the requests at the head.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    first: u32,
    last: u32,
}

impl List {
    /// An empty list.
    pub(super) const EMPTY: List = List { first: NONE, last: NONE };

    /// The first entry.
    #[inline]
    pub(super) fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    /// Whether the list is empty.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.first == NONE
    }

    /// Adds an entry at the end.
    #[inline]
    pub(super) fn push_back<T>(&mut self, entries: &mut Entries<T>, place: u32) {
        let last = std::mem::replace(&mut self.last, place);
        (entries[place].previous, entries[place].next) = (last, NONE);
        match last {
            NONE => self.first = place,
            last => entries[last].next = place,
        }
    }

    /// Adds an entry at the front.
    pub(super) fn push_front<T>(&mut self, entries: &mut Entries<T>, place: u32) {
        let first = std::mem::replace(&mut self.first, place);
        (entries[place].previous, entries[place].next) = (NONE, first);
        match first {
            NONE => self.last = place,
            first => entries[first].previous = place,
        }
    }

    /// Removes an entry.
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

    /// Replaces `old` by `new`, which must be in no list.
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
