//! Room: the permits.
//!
//! Protects   a state that each of many threads may move on by itself while nobody asks for it, and
//!            the count of what it has under way meanwhile.
//! Why        threads that take turns at one state hand its cache line to each other every time.
//!            Where nobody else looks, each works on a copy of its own, and whoever has to know
//!            the state takes the copies back.
//! States     a desk is closed, or open: then it holds a permit, and its owner may work on it. It
//!            has two pages. The word says which one counts; the owner writes to the other one,
//!            and turns the page by the exchange that also counts what it has begun. Who takes
//!            the permit back closes the desk by one write, and has the page that counts then.
//! Order      no lock. Nobody waits for an owner, and no owner for who takes its permit back.
//! Common     a load and an exchange to begin, and an addition to end, on a line that nobody else
//!            looks at.
//! Cost       about 12 ns for both.
//! Before     one state for all, under a lock or a role, and a count that goes round with it.
//!
//! | | closed | open |
//! | --- | --- | --- |
//! | its owner begins something | may not | turns the page: open, more is under way |
//! | its owner ends something | less is under way | less is under way |
//! | the keeper gives a permit | open | - |
//! | the keeper takes it back | - | closed |
//!
//! What is under way and whether somebody awaits its end are in one word, and so in one order: an
//! end comes before the mark, and is counted by who put it there, or behind it, and sees it.
#![allow(unsafe_code)]

use crate::atomics::{AtomicU64, Ordering};
use crate::cell::RoomCell;

/// The desk is open.
const OPEN: u64 = 1 << 63;
/// The second page counts.
const PAGE: u64 = 1 << 62;
/// The end of what is under way is awaited.
const AWAITED: u64 = 1 << 61;
/// Where the second count begins.
const SECOND: u32 = 30;
/// What a count holds.
const COUNT: u64 = (1 << SECOND) - 1;

/// A desk for each of some threads.
#[derive(Debug)]
pub struct Permits<T> {
    desks: Box<[Desk<T>]>,
}

#[derive(Debug)]
#[repr(C, align(128))]
struct Desk<T> {
    word: AtomicU64,
    pages: [RoomCell<T>; 2],
}

// SAFETY: a page is written by the desk's owner while it does not count, or by the keeper while the
// desk is closed, and read while it counts; the word orders the two.
unsafe impl<T: Send + Sync> Sync for Permits<T> {}

/// So many of the first kind and of the second, as the word has them.
#[inline]
fn packed(counts: [u32; 2]) -> u64 {
    u64::from(counts[0]) | (u64::from(counts[1]) << SECOND)
}

#[inline]
fn counts_of(word: u64) -> [u32; 2] {
    [(word & COUNT) as u32, ((word >> SECOND) & COUNT) as u32]
}

impl<T> Desk<T> {
    #[inline]
    fn page(&self, word: u64) -> &RoomCell<T> {
        &self.pages[usize::from(word & PAGE != 0)]
    }
}

impl<T: Copy> Permits<T> {
    /// So many closed desks, at which nothing is under way.
    pub fn new(desks: usize, blank: T) -> Permits<T> {
        let desk = |_| Desk {
            word: AtomicU64::new(0),
            pages: [RoomCell::new(blank), RoomCell::new(blank)],
        };
        Permits { desks: (0..desks).map(desk).collect() }
    }

    /// The owner's way: if the desk is open, lets `step` move the state on, and counts what
    /// that begins, so many of either kind. `step` is told how much is under way, of both kinds.
    /// False if the desk is closed, or is closed meanwhile, or if `step` says so: then nothing has
    /// happened.
    ///
    /// # Safety
    /// The caller is the desk's owner: no other thread begins anything there or has it granted.
    #[inline]
    pub unsafe fn begin(
        &self,
        desk: usize,
        counts: [u32; 2],
        step: impl FnOnce(&mut T, u32) -> bool,
    ) -> bool {
        let desk = &self.desks[desk];
        // Acquire: pairs with the Release in `grant`, in case the desk has changed its owner.
        let word = desk.word.load(Ordering::Acquire);
        if word & OPEN == 0 {
            return false;
        }
        // SAFETY: nobody writes to the page that counts while the desk is open; if it has been
        // closed meanwhile, only its owner can have it opened again.
        let state = unsafe { desk.page(word).with(|state| *state) };
        let [first, second] = counts_of(word);
        let turned = (word ^ PAGE) + packed(counts);
        // SAFETY: nobody looks at the page that does not count but the owner.
        let goes_on = unsafe {
            desk.page(turned).with_mut(|page| {
                *page = state;
                step(page, first + second)
            })
        };
        if !goes_on {
            return false;
        }
        // Release: pairs with the Acquire in `withdraw`. No Acquire: what is begun is the owner's.
        desk.word.compare_exchange(word, turned, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Counts the end of so many of either kind, which have begun. Says whether it is awaited: it
    /// is the caller's duty then to see to it that the keeper looks again.
    #[inline]
    pub fn end(&self, desk: usize, counts: [u32; 2]) -> bool {
        // Release: pairs with the Acquire in `under_way`. Acquire: pairs with the Release there, so
        // that the caller finds what was left undone.
        self.desks[desk].word.fetch_sub(packed(counts), Ordering::AcqRel) & AWAITED != 0
    }

    /// The keeper's way to give a permit, beginning with this state; so many of either kind have
    /// begun in it.
    ///
    /// # Safety
    /// The caller is the desk's owner and the keeper of all, and the desk is closed. Nothing is
    /// under way there, so that no other thread counts an end meanwhile.
    pub unsafe fn grant(&self, desk: usize, state: T, counts: [u32; 2]) {
        let desk = &self.desks[desk];
        let word = desk.word.load(Ordering::Relaxed) & !AWAITED;
        debug_assert_eq!((word & OPEN, counts_of(word)), (0, [0; 2]), "closed, and nothing there");
        // SAFETY: at a closed desk nobody looks at the pages but the keeper and the owner.
        unsafe { desk.page(word).with_mut(|page| *page = state) };
        // Release: pairs with the Acquire in `begin`. A store does, because owner and keeper alone
        // write to the word.
        desk.word.store((word | OPEN) + packed(counts), Ordering::Release);
    }

    /// The keeper's way to take a permit back: closes the desk and answers its state, if it was
    /// open.
    ///
    /// # Safety
    /// The caller is the keeper: nobody else grants or withdraws meanwhile.
    #[inline]
    pub unsafe fn withdraw(&self, desk: usize) -> Option<T> {
        let desk = &self.desks[desk];
        // Acquire: pairs with the Release in `begin`.
        let word = desk.word.fetch_and(!OPEN, Ordering::AcqRel);
        // SAFETY: the page counted when the desk was closed. Its owner writes to the other one, if
        // it had begun to, and opens the desk only as the keeper.
        (word & OPEN != 0).then(|| unsafe { desk.page(word).with(|state| *state) })
    }

    /// How many of either kind are under way at a desk. With `awaits`, whoever counts an end behind
    /// that is told so.
    #[inline]
    pub fn under_way(&self, desk: usize, awaits: bool) -> [u32; 2] {
        let word = &self.desks[desk].word;
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

    fn begin(permits: &Permits<u64>, desk: usize, counts: [u32; 2], add: u64) -> bool {
        // SAFETY: the test is all owners and the keeper.
        unsafe {
            permits.begin(desk, counts, |state, _| {
                *state += add;
                true
            })
        }
    }

    #[test]
    fn an_owner_moves_its_state_on_until_the_desk_is_closed() {
        let permits = Permits::new(2, 0);
        assert!(!begin(&permits, 1, [1, 0], 1), "closed");
        // SAFETY: as above.
        unsafe { permits.grant(1, 10, [3, 0]) };
        assert!(begin(&permits, 1, [1, 4], 5) && begin(&permits, 1, [0, 1], 7));
        assert!(!begin(&permits, 0, [1, 0], 1), "another one's");
        // SAFETY: as above.
        unsafe {
            assert!(!permits.begin(1, [1, 0], |state, under_way| {
                assert_eq!((*state, under_way), (22, 9));
                *state = 0;
                false
            }));
        }
        assert!(!permits.end(1, [4, 1]));
        // SAFETY: as above.
        unsafe {
            assert_eq!(permits.withdraw(0), None);
            assert_eq!(permits.withdraw(1), Some(22));
            assert_eq!(permits.withdraw(1), None);
        }
        assert!(!begin(&permits, 1, [1, 0], 1), "closed");
        assert_eq!(permits.under_way(1, true), [0, 4]);
        assert!(permits.end(1, [0, 3]), "awaited");
        assert_eq!(permits.under_way(1, false), [0, 1]);
        assert!(permits.end(1, [0, 1]), "the last one");
        // SAFETY: as above.
        unsafe { permits.grant(1, 1, [1 << 29, 1]) };
        assert!(!permits.end(1, [0, 1]), "no more");
        // SAFETY: as above.
        assert_eq!(unsafe { permits.withdraw(1) }, Some(1));
        assert_eq!(permits.under_way(1, false), [1 << 29, 0]);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::atomics::AtomicU32;
    use crate::bell::Bell;
    use crate::role::{Role, Round};
    use loom::sync::Arc;
    use std::time::Duration;

    /// An owner begins and ends while the keeper closes the desk and counts: whatever has begun is
    /// in the state that the keeper has, and whatever it counts as under way ends later, told.
    #[test]
    fn what_the_keeper_takes_back_is_whole() {
        loom::model(|| {
            let permits = Arc::new(Permits::new(1, [0_u32; 2]));
            // SAFETY: nobody else is there yet.
            unsafe { permits.grant(0, [0, 0], [0, 0]) };
            let other = Arc::clone(&permits);
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
            // SAFETY: this thread is the keeper.
            let [begun, same] = unsafe { permits.withdraw(0) }.unwrap();
            let [_, under_way] = permits.under_way(0, true);
            assert_eq!((begun, begun), (same, thread.join().unwrap().0));
            assert!(under_way <= 1 && permits.under_way(0, false) == [0, 0]);
        });
    }

    /// An owner whose permit is taken back gets another one, from the role, while the keeper comes
    /// again: what has begun is counted once, whichever of its permits it began with.
    #[test]
    fn what_begins_with_a_new_permit_is_counted_once() {
        loom::model(|| {
            let desk = Arc::new((Role::new(0_u32), Permits::new(1, 0_u32)));
            let other = Arc::clone(&desk);
            let thread = loom::thread::spawn(move || {
                let (role, permits) = &*other;
                let step = |state: &mut u32, _| {
                    *state += 1;
                    true
                };
                let mut begun = 0;
                for _ in 0..2 {
                    // SAFETY: this thread is the owner.
                    let has_begun = unsafe { permits.begin(0, [1, 0], step) } || {
                        let renew = |sum: &mut u32| {
                            // SAFETY: this thread has the role, and is the owner, which has
                            // nothing under way.
                            unsafe {
                                *sum += permits.withdraw(0).unwrap_or(0);
                                permits.grant(0, 1, [1, 0]);
                            }
                        };
                        role.brief(0, renew).is_some()
                    };
                    if has_begun {
                        begun += 1;
                        permits.end(0, [1, 0]);
                    }
                }
                begun
            });
            let (role, permits) = &*desk;
            let take_back = |sum: &mut u32| {
                // SAFETY: this thread has the role.
                *sum += unsafe { permits.withdraw(0) }.unwrap_or(0);
                Round::Enough
            };
            let _ = role.run(take_back);
            let _ = role.run(take_back);
            let begun = thread.join().unwrap();
            let mut sum = 0;
            let _ = role.run(|all| {
                take_back(all);
                sum = *all;
                Round::Whole
            });
            assert_eq!((sum, permits.under_way(0, false)), (begun, [0, 0]));
        });
    }

    /// Ends that the keeper has not counted are told to those who bring them about.
    #[test]
    fn what_is_awaited_is_counted_or_told() {
        loom::model(|| {
            let permits = Arc::new(Permits::new(2, ()));
            let count = |desk: usize| {
                // SAFETY: nobody else is there yet.
                unsafe { permits.grant(desk, (), [1, 0]) };
                let permits = Arc::clone(&permits);
                loom::thread::spawn(move || permits.end(desk, [1, 0]))
            };
            let threads = [count(0), count(1)];
            let counts = [0, 1].map(|desk| {
                // SAFETY: this thread is the keeper.
                assert!(unsafe { permits.withdraw(desk) }.is_some());
                permits.under_way(desk, true)[0]
            });
            let told = threads.map(|thread| u32::from(thread.join().unwrap()));
            assert_eq!(counts, told);
        });
    }

    /// The books of a device that takes one request at a time.
    #[derive(Default)]
    struct Books {
        in_flight: u32,
        waits: bool,
    }

    struct Device {
        role: Role<Books>,
        permits: Permits<u32>,
        lane: AtomicU32,
        served: AtomicU32,
        bell: Bell,
    }

    impl Device {
        fn dispatch(&self) {
            let mut serves = false;
            let _ = self.role.run(|books| {
                loop {
                    // SAFETY: this thread has the role, and so is the keeper.
                    let _ = unsafe { self.permits.withdraw(0) };
                    books.in_flight = self.permits.under_way(0, false)[0];
                    books.waits |= self.lane.swap(0, Ordering::Relaxed) == 1;
                    if books.waits && books.in_flight == 0 {
                        books.waits = false;
                        serves = true;
                    }
                    if !books.waits || self.permits.under_way(0, true)[0] == books.in_flight {
                        return Round::Whole;
                    }
                }
            });
            if serves {
                self.served.store(1, Ordering::Relaxed);
                self.bell.ring();
            }
        }
    }

    /// A request goes by a permit while another one comes, which finds no room and sleeps. It is
    /// served by whoever of the two is the last to look.
    #[test]
    fn who_waits_for_what_goes_by_a_permit_is_served() {
        loom::model(|| {
            let device = Arc::new(Device {
                role: Role::new(Books::default()),
                permits: Permits::new(1, 0),
                lane: AtomicU32::new(0),
                served: AtomicU32::new(0),
                bell: Bell::new(),
            });
            // SAFETY: nobody else is there yet.
            unsafe { device.permits.grant(0, 0, [0, 0]) };
            let other = Arc::clone(&device);
            let thread = loom::thread::spawn(move || {
                // SAFETY: this thread is the owner.
                let begun = unsafe { other.permits.begin(0, [1, 0], |_, _| true) };
                if begun && other.permits.end(0, [1, 0]) {
                    other.dispatch();
                }
            });
            device.lane.store(1, Ordering::Relaxed);
            device.dispatch();
            let is_served = || device.served.load(Ordering::Relaxed) == 1;
            while !is_served() {
                device.bell.sleep(Duration::from_secs(60), is_served);
            }
            thread.join().unwrap();
        });
    }
}
