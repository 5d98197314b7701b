//! Primitive: leases (revocable, double-buffered).
//!
//! Protects   a state that each of many threads may advance by itself until another thread needs
//!            it, and the number of operations that it has in flight.
//! Why        threads that take turns at one state move its cache line between CPUs every time.
//!            While no other thread needs the state, each works on its own copy; a thread that
//!            needs the state revokes the copies.
//! States     an entry is closed, or open: then it holds a lease, and its owner may use it. It has
//!            two pages. The word says which page is valid. The owner writes to the other page, and
//!            makes it valid by the exchange that also counts the operations it has begun. A
//!            revocation closes the entry by one write; the page that is valid then is the final
//!            state.
//! Order      no lock. No thread waits for an owner, and no owner waits for a revocation.
//! Common     a load and an exchange to begin, and an addition to end, on an uncontended cache
//!            line.
//! Cost       about 12 ns for both.
//! Before     one state for all threads, under a lock or a combining lock, with one shared count.
//!
//! | | closed | open |
//! | --- | --- | --- |
//! | its owner begins an operation | refused | the other page becomes valid: open, more in flight |
//! | its owner ends an operation | less in flight | less in flight |
//! | the dispatcher grants a lease | open | - |
//! | the dispatcher revokes it | - | closed |
//!
//! The number in flight and the mark for awaited ends are in one word, and so in one order. An end
//! that comes before the mark is counted by the thread that sets the mark; an end that comes after
//! it sees the mark.
#![allow(unsafe_code)]

use crate::atomics::{AtomicU64, Ordering};
use crate::sync_cell::SyncCell;

/// The entry is open.
const OPEN: u64 = 1 << 63;
/// The second page is valid.
const PAGE: u64 = 1 << 62;
/// A thread awaits the end of operations in flight.
const AWAITED: u64 = 1 << 61;
/// The lowest bit of the second count.
const SECOND: u32 = 30;
/// Mask of a count.
const COUNT: u64 = (1 << SECOND) - 1;

/// A lease entry for each of a number of threads.
#[derive(Debug)]
pub struct Leases<T> {
    entries: Box<[LeaseEntry<T>]>,
}

#[derive(Debug)]
#[repr(C, align(128))]
struct LeaseEntry<T> {
    word: AtomicU64,
    pages: [SyncCell<T>; 2],
}

// SAFETY: a page is written by the owner of the entry while it is not valid, or by the dispatcher
// while the entry is closed. It is read while it is valid; the word orders the two.
unsafe impl<T: Send + Sync> Sync for Leases<T> {}

/// The two counts as they are in the word.
#[inline]
fn packed(counts: [u32; 2]) -> u64 {
    u64::from(counts[0]) | (u64::from(counts[1]) << SECOND)
}

#[inline]
fn counts_of(word: u64) -> [u32; 2] {
    [(word & COUNT) as u32, ((word >> SECOND) & COUNT) as u32]
}

impl<T> LeaseEntry<T> {
    #[inline]
    fn page(&self, word: u64) -> &SyncCell<T> {
        &self.pages[usize::from(word & PAGE != 0)]
    }
}

impl<T: Copy> Leases<T> {
    /// `entries` closed entries without operations in flight.
    pub fn new(entries: usize, blank: T) -> Leases<T> {
        let entry = |_| LeaseEntry {
            word: AtomicU64::new(0),
            pages: [SyncCell::new(blank), SyncCell::new(blank)],
        };
        Leases { entries: (0..entries).map(entry).collect() }
    }

    /// For the owner: if the entry is open, advances its state by `step` and counts the operations
    /// that this begins. `step` gets the number of operations in flight, of both kinds together.
    /// Returns `false` without any effect if the entry is closed or is being closed, or if `step`
    /// returns `false`.
    ///
    /// # Safety
    /// The caller is the owner of the entry: no other thread begins operations there or has it
    /// granted.
    #[inline]
    pub unsafe fn begin(
        &self,
        entry: usize,
        counts: [u32; 2],
        step: impl FnOnce(&mut T, u32) -> bool,
    ) -> bool {
        let entry = &self.entries[entry];
        // Acquire: pairs with the Release in `grant`, in case the entry has a new owner.
        let word = entry.word.load(Ordering::Acquire);
        if word & OPEN == 0 {
            return false;
        }
        // SAFETY: no thread writes to the valid page while the entry is open. If it has been closed
        // meanwhile, only its owner can have it opened again.
        let state = unsafe { entry.page(word).with(|state| *state) };
        let [first, second] = counts_of(word);
        let turned = (word ^ PAGE) + packed(counts);
        // SAFETY: only the owner accesses the page that is not valid.
        let goes_on = unsafe {
            entry.page(turned).with_mut(|page| {
                *page = state;
                step(page, first + second)
            })
        };
        if !goes_on {
            return false;
        }
        // Release: pairs with the Acquire in `revoke`. No Acquire: only the owner uses what it
        // begins.
        entry.word.compare_exchange(word, turned, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Counts the end of begun operations. Returns whether a thread awaits it: then the caller must
    /// make sure that a thread dispatches again.
    #[inline]
    pub fn end(&self, entry: usize, counts: [u32; 2]) -> bool {
        // Release: pairs with the Acquire in `in_flight`. Acquire: pairs with the Release there, so
        // that the caller sees the work that was left.
        self.entries[entry].word.fetch_sub(packed(counts), Ordering::AcqRel) & AWAITED != 0
    }

    /// For the dispatcher: grants a lease with an initial state and the operations that have begun
    /// in it.
    ///
    /// # Safety
    /// The caller is the owner of the entry and the dispatcher of all entries, and the entry is
    /// closed. No operation is in flight there, so that no other thread counts an end meanwhile.
    pub unsafe fn grant(&self, entry: usize, state: T, counts: [u32; 2]) {
        let entry = &self.entries[entry];
        let word = entry.word.load(Ordering::Relaxed) & !AWAITED;
        debug_assert_eq!((word & OPEN, counts_of(word)), (0, [0; 2]), "closed, and nothing there");
        // SAFETY: only the dispatcher and the owner access the pages of a closed entry.
        unsafe { entry.page(word).with_mut(|page| *page = state) };
        // Release: pairs with the Acquire in `begin`. A store is enough, because only owner and
        // dispatcher write to the word.
        entry.word.store((word | OPEN) + packed(counts), Ordering::Release);
    }

    /// For the dispatcher: revokes a lease. Closes the entry and returns its state, if it was open.
    ///
    /// # Safety
    /// The caller is the dispatcher: no other thread grants or revokes meanwhile.
    #[inline]
    pub unsafe fn revoke(&self, entry: usize) -> Option<T> {
        let entry = &self.entries[entry];
        // Acquire: pairs with the Release in `begin`.
        let word = entry.word.fetch_and(!OPEN, Ordering::AcqRel);
        // SAFETY: the page was valid when the entry was closed. Its owner may still write to the
        // other page, and opens the entry only as the dispatcher.
        (word & OPEN != 0).then(|| unsafe { entry.page(word).with(|state| *state) })
    }

    /// Number of operations in flight of an entry, by kind. With `awaits`, a thread that counts an
    /// end later learns that it is awaited.
    #[inline]
    pub fn in_flight(&self, entry: usize, awaits: bool) -> [u32; 2] {
        let word = &self.entries[entry].word;
        // Acquire and Release: pair with those in `end`.
        counts_of(match awaits {
            true => word.fetch_or(AWAITED, Ordering::AcqRel),
            false => word.load(Ordering::Acquire),
        })
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    fn begin(leases: &Leases<u64>, entry: usize, counts: [u32; 2], add: u64) -> bool {
        // SAFETY: the test is the owner of all entries and the dispatcher.
        unsafe {
            leases.begin(entry, counts, |state, _| {
                *state += add;
                true
            })
        }
    }

    #[test]
    fn owner_advances_state_until_lease_is_revoked() {
        let leases = Leases::new(2, 0);
        assert!(!begin(&leases, 1, [1, 0], 1), "closed");
        // SAFETY: the test is the owner of all entries and the dispatcher.
        unsafe { leases.grant(1, 10, [3, 0]) };
        assert!(begin(&leases, 1, [1, 4], 5) && begin(&leases, 1, [0, 1], 7));
        assert!(!begin(&leases, 0, [1, 0], 1), "another one's");
        // SAFETY: the test is the owner of all entries and the dispatcher.
        unsafe {
            assert!(!leases.begin(1, [1, 0], |state, in_flight| {
                assert_eq!((*state, in_flight), (22, 9));
                *state = 0;
                false
            }));
        }
        assert!(!leases.end(1, [4, 1]));
        // SAFETY: the test is the owner of all entries and the dispatcher.
        unsafe {
            assert_eq!(leases.revoke(0), None);
            assert_eq!(leases.revoke(1), Some(22));
            assert_eq!(leases.revoke(1), None);
        }
        assert!(!begin(&leases, 1, [1, 0], 1), "closed");
        assert_eq!(leases.in_flight(1, true), [0, 4]);
        assert!(leases.end(1, [0, 3]), "awaited");
        assert_eq!(leases.in_flight(1, false), [0, 1]);
        assert!(leases.end(1, [0, 1]), "the last one");
        // SAFETY: the test is the owner of all entries and the dispatcher.
        unsafe { leases.grant(1, 1, [1 << 29, 1]) };
        assert!(!leases.end(1, [0, 1]), "no more");
        // SAFETY: the test is the owner of all entries and the dispatcher.
        assert_eq!(unsafe { leases.revoke(1) }, Some(1));
        assert_eq!(leases.in_flight(1, false), [1 << 29, 0]);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::atomics::AtomicU32;
    use crate::combining_lock::{CombiningLock, RoundResult};
    use crate::event_count::EventCount;
    use loom::sync::Arc;
    use std::time::Duration;

    /// An owner begins and ends operations while the dispatcher revokes the lease and counts. All
    /// begun operations are in the revoked state. Operations that it counts as in flight end later,
    /// with the awaited mark.
    #[test]
    fn revoked_state_is_consistent() {
        loom::model(|| {
            let leases = Arc::new(Leases::new(1, [0_u32; 2]));
            // SAFETY: no other thread exists yet.
            unsafe { leases.grant(0, [0, 0], [0, 0]) };
            let other = Arc::clone(&leases);
            let thread = loom::thread::spawn(move || {
                let (mut begun, mut told) = (0, 0);
                for _ in 0..2 {
                    let step = |[a, b]: &mut [u32; 2], _| {
                        assert_eq!(a, b);
                        (*a, *b) = (*a + 1, *b + 1);
                        true
                    };
                    // SAFETY: this thread is the owner.
                    if unsafe { other.begin(0, [0, 1], step) } {
                        begun += 1;
                        told += u32::from(other.end(0, [0, 1]));
                    }
                }
                (begun, told)
            });
            // SAFETY: this thread is the dispatcher.
            let [begun, same] = unsafe { leases.revoke(0) }.unwrap();
            let [_, in_flight] = leases.in_flight(0, true);
            assert_eq!((begun, begun), (same, thread.join().unwrap().0));
            assert!(in_flight <= 1 && leases.in_flight(0, false) == [0, 0]);
        });
    }

    /// An owner whose lease was revoked gets a new one under the combining lock, while the
    /// dispatcher revokes again. Each begun operation is counted once, by whichever lease it began.
    #[test]
    fn operations_under_new_lease_count_once() {
        loom::model(|| {
            let entry = Arc::new((CombiningLock::new(0_u32), Leases::new(1, 0_u32)));
            let other = Arc::clone(&entry);
            let thread = loom::thread::spawn(move || {
                let (lock, leases) = &*other;
                let step = |state: &mut u32, _| {
                    *state += 1;
                    true
                };
                let mut begun = 0;
                for _ in 0..2 {
                    // SAFETY: this thread is the owner.
                    let has_begun = unsafe { leases.begin(0, [1, 0], step) } || {
                        let renew = |sum: &mut u32| {
                            // SAFETY: this thread holds the combining lock, and is the owner, which
                            // has no operation in flight.
                            unsafe {
                                *sum += leases.revoke(0).unwrap_or(0);
                                leases.grant(0, 1, [1, 0]);
                            }
                        };
                        lock.try_briefly(0, renew).is_some()
                    };
                    if has_begun {
                        begun += 1;
                        leases.end(0, [1, 0]);
                    }
                }
                begun
            });
            let (lock, leases) = &*entry;
            let take_back = |sum: &mut u32| {
                // SAFETY: this thread holds the combining lock.
                *sum += unsafe { leases.revoke(0) }.unwrap_or(0);
                RoundResult::Enough
            };
            let _ = lock.run(take_back);
            let _ = lock.run(take_back);
            let begun = thread.join().unwrap();
            let mut sum = 0;
            let _ = lock.run(|all| {
                take_back(all);
                sum = *all;
                RoundResult::Whole
            });
            assert_eq!((sum, leases.in_flight(0, false)), (begun, [0, 0]));
        });
    }

    /// An end that the dispatcher has not counted is reported to the thread that ends the
    /// operation.
    #[test]
    fn awaited_end_is_counted_or_announced() {
        loom::model(|| {
            let leases = Arc::new(Leases::new(2, ()));
            let count = |entry: usize| {
                // SAFETY: no other thread exists yet.
                unsafe { leases.grant(entry, (), [1, 0]) };
                let leases = Arc::clone(&leases);
                loom::thread::spawn(move || leases.end(entry, [1, 0]))
            };
            let threads = [count(0), count(1)];
            let counts = [0, 1].map(|entry| {
                // SAFETY: this thread is the dispatcher.
                assert!(unsafe { leases.revoke(entry) }.is_some());
                leases.in_flight(entry, true)[0]
            });
            let told = threads.map(|thread| u32::from(thread.join().unwrap()));
            assert_eq!(counts, told);
        });
    }

    /// The state of a device that executes one request at a time.
    #[derive(Default)]
    struct Books {
        in_flight: u32,
        waits: bool,
    }

    struct Device {
        lock: CombiningLock<Books>,
        leases: Leases<u32>,
        lane: AtomicU32,
        served: AtomicU32,
        event_count: EventCount,
    }

    impl Device {
        fn dispatch(&self) {
            let mut serves = false;
            let _ = self.lock.run(|books| {
                loop {
                    // SAFETY: this thread holds the combining lock, and so is the dispatcher.
                    let _ = unsafe { self.leases.revoke(0) };
                    books.in_flight = self.leases.in_flight(0, false)[0];
                    books.waits |= self.lane.swap(0, Ordering::Relaxed) == 1;
                    if books.waits && books.in_flight == 0 {
                        books.waits = false;
                        serves = true;
                    }
                    if !books.waits || self.leases.in_flight(0, true)[0] == books.in_flight {
                        return RoundResult::Whole;
                    }
                }
            });
            if serves {
                self.served.store(1, Ordering::Relaxed);
                self.event_count.notify();
            }
        }
    }

    /// A request uses a lease while another one arrives, finds no capacity and sleeps. The later of
    /// the two threads to look for work serves it.
    #[test]
    fn a_waiter_after_a_leased_operation_is_served() {
        loom::model(|| {
            let device = Arc::new(Device {
                lock: CombiningLock::new(Books::default()),
                leases: Leases::new(1, 0),
                lane: AtomicU32::new(0),
                served: AtomicU32::new(0),
                event_count: EventCount::new(),
            });
            // SAFETY: no other thread exists yet.
            unsafe { device.leases.grant(0, 0, [0, 0]) };
            let other = Arc::clone(&device);
            let thread = loom::thread::spawn(move || {
                // SAFETY: this thread is the owner.
                let begun = unsafe { other.leases.begin(0, [1, 0], |_, _| true) };
                if begun && other.leases.end(0, [1, 0]) {
                    other.dispatch();
                }
            });
            device.lane.store(1, Ordering::Relaxed);
            device.dispatch();
            let is_served = || device.served.load(Ordering::Relaxed) == 1;
            while !is_served() {
                device.event_count.sleep(Duration::from_secs(60), is_served);
            }
            thread.join().unwrap();
        });
    }
}
