//! Primitive: the range lock.
//!
//! Protects   ranges of blocks: each block has one writer or any number of readers at a time.
//! Why        workers that know nothing of one another must execute overlapping requests one after
//!            the other, and all others concurrently.
//! States     a list of requests, the oldest first. Each waits for the earlier ones whose range
//!            overlaps its own, unless both only read; otherwise it holds its range.
//! Order      taken by a worker before any other lock; its list is a leaf. A thread has one range.
//! Common     a lock and a scan of the list, which is as long as there are workers.
//! Cost       about 30 ns to take and release without overlap.
//! Before     one request at a time.
//!
//! The lock is fair: a request never overtakes an earlier one that it overlaps.

use std::ops::Range;
use std::sync::PoisonError;

use crate::atomics::{Condvar, Mutex, MutexGuard};

/// The kind of access to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Shared with other readers.
    Read,
    /// Exclusive.
    Write,
}

#[derive(Debug)]
struct Holder {
    number: u64,
    range: Range<u64>,
    used: Use,
}

impl Holder {
    fn bars(&self, other: &Holder) -> bool {
        let both_read = self.used == Use::Read && other.used == Use::Read;
        let overlap = self.range.start < other.range.end && other.range.start < self.range.end;
        overlap && !both_read
    }
}

#[derive(Debug, Default)]
struct HolderList {
    next: u64,
    places: Vec<Holder>,
    /// Number of waiting threads.
    waiting: usize,
}

impl HolderList {
    fn may_go(&self, number: u64) -> bool {
        let own = self.places.iter().position(|place| place.number == number);
        own.is_none_or(|own| !self.places[..own].iter().any(|it| it.bars(&self.places[own])))
    }
}

/// A fair lock for ranges of blocks.
#[derive(Debug)]
pub struct RangeLock {
    list: Mutex<HolderList>,
    freed: Condvar,
}

impl Default for RangeLock {
    fn default() -> RangeLock {
        RangeLock { list: Mutex::new(HolderList::default()), freed: Condvar::new() }
    }
}

/// A range that is held until the guard is dropped.
#[derive(Debug)]
#[must_use]
pub struct Guard<'a> {
    lock: &'a RangeLock,
    number: u64,
}

impl RangeLock {
    fn list(&self) -> MutexGuard<'_, HolderList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a range, after all earlier requests that it overlaps.
    pub fn take(&self, range: Range<u64>, used: Use) -> Guard<'_> {
        let mut list = self.list();
        let number = list.next;
        list.next += 1;
        list.places.push(Holder { number, range, used });
        while !list.may_go(number) {
            list.waiting += 1;
            list = self.freed.wait(list).unwrap_or_else(PoisonError::into_inner);
            list.waiting -= 1;
        }
        Guard { lock: self, number }
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let mut list = self.lock.list();
        list.places.retain(|place| place.number != self.number);
        let waited = list.waiting > 0;
        drop(list);
        if waited {
            self.lock.freed.notify_all();
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn only_overlapping_requests_wait_in_order() {
        let place = |number, range, used| Holder { number, range, used };
        let places = vec![
            place(0, 0..10, Use::Read),
            place(1, 5..7, Use::Read),
            place(2, 9..12, Use::Write),
            place(3, 12..13, Use::Write),
            place(4, 8..10, Use::Read),
        ];
        let mut list = HolderList { places, ..HolderList::default() };
        let may_go: Vec<bool> = (0..5).map(|number| list.may_go(number)).collect();
        assert_eq!(may_go, [true, true, false, true, false]);
        list.places.remove(0);
        assert!(list.may_go(2) && !list.may_go(4));
    }

    #[test]
    fn overlapping_writers_lose_no_update() {
        let (lock, cells) = (RangeLock::default(), [(); 8].map(|()| Mutex::new(0_u64)));
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let (lock, cells) = (&lock, &cells);
                scope.spawn(move || {
                    for round in 0..500 {
                        let first = (thread * 7 + round * 3) % 6;
                        let _guard = lock.take(first..first + 3, Use::Write);
                        let three = || &cells[first as usize..first as usize + 3];
                        let before: Vec<u64> =
                            three().iter().map(|cell| *cell.lock().unwrap()).collect();
                        for (cell, before) in three().iter().zip(before) {
                            *cell.lock().unwrap() = before + 1;
                        }
                    }
                });
            }
        });
        let sum: u64 = cells.iter().map(|cell| *cell.lock().unwrap()).sum();
        assert_eq!(sum, 4 * 500 * 3, "no change was lost");
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::sync_cell::SyncCell;
    use loom::sync::Arc;

    struct Shared {
        lock: RangeLock,
        blocks: [SyncCell<u32>; 2],
    }

    // SAFETY: only the thread that holds a range accesses its cells; loom checks that.
    #[allow(unsafe_code)]
    unsafe impl Sync for Shared {}
    // SAFETY: as for `Sync`.
    #[allow(unsafe_code)]
    unsafe impl Send for Shared {}

    #[allow(unsafe_code)]
    fn add(shared: &Shared, range: Range<u64>) {
        let _guard = shared.lock.take(range.clone(), Use::Write);
        for block in range {
            // SAFETY: the range is held; loom checks that no other thread accesses it.
            unsafe { shared.blocks[block as usize].with_mut(|value| *value += 1) };
        }
    }

    /// Loom's waits have no timeout, so that a lost wakeup is a deadlock.
    #[test]
    fn writers_of_one_block_exclude_each_other() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let blocks = [SyncCell::new(0), SyncCell::new(0)];
            let shared = Arc::new(Shared { lock: RangeLock::default(), blocks });
            let threads = [0..2, 1..2].map(|range| {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || add(&shared, range))
            });
            add(&shared, 0..1);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            add(&shared, 0..2);
        });
    }

    #[test]
    fn readers_share_and_writer_excludes() {
        loom::model(|| {
            let lock = Arc::new(RangeLock::default());
            let other = Arc::clone(&lock);
            let one = lock.take(0..4, Use::Read);
            let thread = loom::thread::spawn(move || {
                let two = other.take(2..6, Use::Read);
                drop(two);
                drop(other.take(3..4, Use::Write));
            });
            drop(one);
            thread.join().unwrap();
        });
    }
}
