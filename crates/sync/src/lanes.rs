//! Room: the lanes.
//!
//! Protects   what submitters hand to the one who orders it, on its way there.
//! Why        inserting must not cost a submitter a fight with the others: each writes to a ring of
//!            its own, and whoever has the [`crate::role`] of the dispatcher empties them all.
//! States     a lane holds what lies between its head and its tail. Its bit among the occupied is
//!            set while somebody has to look at it. The last lanes are shared by those submitters
//!            who came when all others were taken.
//! Order      none for a lane of one's own; rank LANE for a shared one, taken to write to it.
//! Common     one release store publishes a batch; a fence, and a load of the bit, which is set.
//! Cost       about 8 ns a batch and 1 ns a value; a read-modify-write where the bit was clear.
//! Before     an insertion under the scheduler's lock, for each request.
//!
//! | who publishes | who drains |
//! | --- | --- |
//! | tail | clears the bits |
//! | full fence | full fence |
//! | sets its bit if that is clear | reads the tails |
//!
//! One of the two sees the other: a value that the drain misses has its bit set again, and whoever
//! set it goes on to take the role or to kick its holder.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::MaybeUninit;
use std::sync::{Arc, PoisonError};

use crate::atomics::{AtomicBool, AtomicU32, AtomicU64, Mutex, Ordering, fence};
use crate::cell::RoomCell;
use crate::lock::Lock;
use crate::pad::Padded;
use crate::rank::ranks;
use crate::sleep_lock::SleepLock;

/// One in so many lanes is shared, and one at least.
const SHARED_PART: usize = 16;

/// Lanes in a word of occupied ones.
const WORD: usize = 64;

/// Lanes of values that are plain data.
pub struct Lanes<T> {
    rings: Box<[Ring<T>]>,
    /// A bit for each lane that somebody has to look at.
    occupied: Box<[Padded<AtomicU64>]>,
    /// How many lanes from the first on have one owner each.
    owned: usize,
    doorman: Mutex<Doorman>,
    /// The lane after the one at which a drain had no more room: the next begins there, so that
    /// each has its turn.
    next: Padded<AtomicU32>,
    /// The drain leaves what lies in the lanes where it is.
    held_back: AtomicBool,
    /// Work was left behind that could be done, and nobody is at it.
    abandoned: AtomicBool,
}

/// Which lanes have no owner.
#[derive(Debug)]
struct Doorman {
    free: Vec<usize>,
    next_shared: usize,
}

struct Ring<T> {
    /// The number of the next value to take; written by who drains.
    head: Padded<AtomicU32>,
    /// The number of the next value to come; written by who publishes.
    tail: Padded<AtomicU32>,
    places: Box<[RoomCell<MaybeUninit<T>>]>,
    /// Taken to publish in a lane that is shared.
    turn: SleepLock<(), { ranks::LANE }>,
}

// SAFETY: a place is written by the one who publishes in the lane and read by the one who drains,
// each at a time; head and tail order the two.
unsafe impl<T: Send> Sync for Ring<T> {}

impl<T: Copy> Ring<T> {
    fn new(values: usize) -> Ring<T> {
        let count = values.max(1).next_power_of_two();
        Ring {
            head: Padded(AtomicU32::new(0)),
            tail: Padded(AtomicU32::new(0)),
            places: (0..count).map(|_| RoomCell::new(MaybeUninit::uninit())).collect(),
            turn: SleepLock::new(()),
        }
    }

    #[inline]
    fn place(&self, number: u32) -> &RoomCell<MaybeUninit<T>> {
        &self.places[number as usize & (self.places.len() - 1)]
    }

    /// How many values there is room for, for the one who publishes. Who only looks at a shared
    /// lane may see a head that is older than the tail: then none.
    #[inline]
    fn room(&self) -> usize {
        // Acquire: pairs with the Release in `drain`, so that what was there has been read.
        let head = self.head.load(Ordering::Acquire);
        // Relaxed: this thread's own, or written under the lane's lock.
        let tail = self.tail.load(Ordering::Relaxed);
        self.places.len().saturating_sub(tail.wrapping_sub(head) as usize)
    }

    /// Publishes as many values as there is room for, from the first on; says how many.
    ///
    /// # Safety
    /// Nobody else publishes in this lane meanwhile.
    #[inline]
    unsafe fn publish(&self, values: &[T]) -> usize {
        let count = self.room().min(values.len());
        let tail = self.tail.load(Ordering::Relaxed);
        for (index, value) in values[..count].iter().enumerate() {
            let place = self.place(tail.wrapping_add(index as u32));
            // SAFETY: the place lies behind the tail, where nobody reads, and there is room.
            unsafe { place.with_mut(|it| *it = MaybeUninit::new(*value)) };
        }
        // Release: pairs with the Acquire in `drain`.
        self.tail.store(tail.wrapping_add(count as u32), Ordering::Release);
        count
    }

    /// Takes up to `most` values; says whether the lane is empty now.
    ///
    /// # Safety
    /// Nobody else drains this lane meanwhile.
    #[inline]
    unsafe fn drain(&self, most: usize, out: &mut Vec<T>) -> bool {
        // Relaxed: whoever drained before has given its role up, which orders the two.
        let head = self.head.load(Ordering::Relaxed);
        // Acquire: pairs with the Release in `publish`.
        let len = self.tail.load(Ordering::Acquire).wrapping_sub(head) as usize;
        let count = len.min(most);
        for index in 0..count {
            let place = self.place(head.wrapping_add(index as u32));
            // SAFETY: the place lies between head and tail, so it was written and is left alone.
            out.push(unsafe { place.with_mut(|it| it.assume_init_read()) });
        }
        // Release: pairs with the Acquire in `room`.
        self.head.store(head.wrapping_add(count as u32), Ordering::Release);
        count == len
    }

    #[inline]
    fn len(&self) -> usize {
        let head = self.head.load(Ordering::Relaxed);
        self.tail.load(Ordering::Acquire).wrapping_sub(head) as usize
    }
}

impl<T: Copy + Send> Lanes<T> {
    /// So many empty lanes, two at least, for so many values each. Some of them are shared.
    pub fn new(lanes: usize, values: usize) -> Arc<Lanes<T>> {
        let lanes = lanes.max(2);
        let owned = lanes - (lanes / SHARED_PART).max(1);
        Arc::new(Lanes {
            rings: (0..lanes).map(|_| Ring::new(values)).collect(),
            occupied: (0..lanes.div_ceil(WORD)).map(|_| Padded(AtomicU64::new(0))).collect(),
            owned,
            doorman: Mutex::new(Doorman { free: (0..owned).rev().collect(), next_shared: 0 }),
            next: Padded(AtomicU32::new(0)),
            held_back: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
        })
    }

    /// A lane for one more submitter: its own, or one that it shares.
    pub fn open(self: &Arc<Self>) -> Lane<T> {
        let mut doorman = self.doorman.lock().unwrap_or_else(PoisonError::into_inner);
        let number = doorman.free.pop().unwrap_or_else(|| {
            let shared = doorman.next_shared;
            doorman.next_shared = (shared + 1) % (self.rings.len() - self.owned);
            self.owned + shared
        });
        Lane { lanes: Arc::clone(self), number }
    }

    /// Whether somebody has to take the role: something lies in a lane and is not held back, or
    /// work was abandoned. Who has to know for sure fences before.
    #[inline]
    pub fn is_work(&self) -> bool {
        if self.abandoned.load(Ordering::Relaxed) {
            return true;
        }
        self.is_occupied() && !self.held_back.load(Ordering::Relaxed)
    }

    /// Whether something lies in a lane, held back or not.
    #[inline]
    pub fn is_occupied(&self) -> bool {
        self.occupied.iter().any(|word| word.load(Ordering::Relaxed) != 0)
    }

    /// Notes that work is left behind that could be done.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }

    /// Whether work was left behind, and nobody has come to it yet. Only looks.
    #[inline]
    pub fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Notes that somebody is at what was left behind.
    #[inline]
    pub fn attend(&self) {
        if self.abandoned.load(Ordering::Relaxed) {
            self.abandoned.store(false, Ordering::Relaxed);
        }
    }

    /// Notes whether what lies in the lanes is to stay there until the dispatcher comes again.
    #[inline]
    pub fn hold_back(&self, holds_back: bool) {
        if self.held_back.load(Ordering::Relaxed) != holds_back {
            self.held_back.store(holds_back, Ordering::Relaxed);
        }
    }

    /// Moves what lies in the lanes to `out`, up to `most` values altogether, from lanes that hold
    /// `at_least` so many. What is left keeps its bit. Where `most` ends it, the next begins with
    /// the lane that follows.
    ///
    /// # Safety
    /// Nobody else drains the lanes meanwhile: the caller has the dispatcher's role.
    pub unsafe fn drain(&self, most: usize, at_least: usize, out: &mut Vec<T>) {
        let end = out.len() + most;
        // Relaxed: only who drains uses it, and has the role.
        let start = self.next.load(Ordering::Relaxed) as usize;
        let words = self.occupied.len();
        // The word with the first lane comes twice: from that lane on, and in the end up to it.
        let up_to_start = (1 << (start % WORD)) - 1;
        for step in 0..=words {
            let part = match step {
                0 => !up_to_start,
                _ if step == words => up_to_start,
                _ => u64::MAX,
            };
            let index = (start / WORD + step) % words;
            if self.occupied[index].load(Ordering::Relaxed) & part != 0 && out.len() < end {
                // SAFETY: by this function's contract.
                unsafe { self.drain_word(index, part, end, at_least, out) };
            }
        }
    }

    /// The same from the lanes of one word whose bits are in `part`.
    ///
    /// # Safety
    /// As [`Lanes::drain`].
    #[inline]
    unsafe fn drain_word(
        &self,
        index: usize,
        part: u64,
        end: usize,
        at_least: usize,
        out: &mut Vec<T>,
    ) {
        let word = &self.occupied[index];
        let all = word.swap(0, Ordering::Relaxed);
        // Full: pairs with the fence in `Lane::publish`.
        fence(Ordering::SeqCst);
        let (mut bits, mut left) = (all & part, all & !part);
        while bits != 0 {
            let bit = bits.trailing_zeros() as usize;
            bits &= bits - 1;
            let lane = index * WORD + bit;
            let ring = &self.rings[lane];
            let is_room = out.len() < end;
            let most = if ring.len() < at_least { 0 } else { end - out.len() };
            // SAFETY: by this function's contract.
            if !unsafe { ring.drain(most, out) } {
                left |= 1 << bit;
            }
            if is_room && out.len() == end {
                let next = (lane + 1) % self.rings.len();
                // Relaxed: as above.
                self.next.store(next as u32, Ordering::Relaxed);
            }
        }
        if left != 0 {
            word.fetch_or(left, Ordering::Relaxed);
        }
    }
}

/// A submitter's end of a lane. Belongs to one thread at a time.
pub struct Lane<T: Copy + Send> {
    lanes: Arc<Lanes<T>>,
    number: usize,
}

impl<T: Copy + Send> Lane<T> {
    #[inline]
    fn ring(&self) -> &Ring<T> {
        &self.lanes.rings[self.number]
    }

    /// Its number among the lanes, which those that share it have too.
    #[inline]
    pub fn number(&self) -> usize {
        self.number
    }

    /// Whether others publish here too.
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.number >= self.lanes.owned
    }

    /// For how many values there is room, unless others fill it.
    #[inline]
    pub fn room(&self) -> usize {
        self.ring().room()
    }

    /// Publishes as many values as there is room for, from the first on; says how many. They are
    /// seen by whoever takes the dispatcher's role after that, or is kicked.
    #[inline]
    pub fn publish(&mut self, values: &[T]) -> usize {
        let ring = self.ring();
        let count = if self.is_shared() {
            // SAFETY: under the lane's lock.
            ring.turn.with(|()| unsafe { ring.publish(values) })
        } else {
            // SAFETY: the lane has one owner, which is borrowed mutably.
            unsafe { ring.publish(values) }
        };
        if count > 0 {
            // Full: pairs with the fence in `Lanes::drain`.
            fence(Ordering::SeqCst);
            let (word, bit) = (self.number / WORD, 1 << (self.number % WORD));
            let word = &self.lanes.occupied[word];
            if word.load(Ordering::Relaxed) & bit == 0 {
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
        count
    }
}

impl<T: Copy + Send> Drop for Lane<T> {
    fn drop(&mut self) {
        if !self.is_shared() {
            let doorman = self.lanes.doorman.lock();
            doorman.unwrap_or_else(PoisonError::into_inner).free.push(self.number);
        }
    }
}

impl<T> fmt::Debug for Lanes<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lanes { rings, owned, .. } = self;
        write!(f, "Lanes({owned} owned of {})", rings.len())
    }
}

impl<T: Copy + Send> fmt::Debug for Lane<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lane({})", self.number)
    }
}

#[cfg(all(test, loom))]
mod model;

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    fn drained<T: Copy + Send>(lanes: &Lanes<T>, most: usize, at_least: usize) -> Vec<T> {
        let mut out = Vec::new();
        // SAFETY: the tests drain from one thread.
        unsafe { lanes.drain(most, at_least, &mut out) };
        out
    }

    #[test]
    fn lanes_wrap_around_and_fill_up() {
        let lanes = Lanes::new(4, 4);
        let mut lane = lanes.open();
        for round in 0..10 {
            assert_eq!(lane.publish(&[round, round + 1, round + 2]), 3);
            assert_eq!((lane.publish(&[7, 8]), lane.room()), (1, 0));
            assert!(lanes.is_work());
            assert_eq!(drained(&lanes, 3, 0), [round, round + 1, round + 2]);
            assert!(lanes.is_work(), "one is left");
            assert_eq!(drained(&lanes, 3, 2), [] as [i32; 0], "not enough of them");
            assert!(lanes.is_work());
            lanes.hold_back(true);
            assert!(!lanes.is_work());
            lanes.hold_back(false);
            assert_eq!(drained(&lanes, 3, 0), [7]);
            assert!(!lanes.is_work());
        }
    }

    /// Lanes whose owners fill them up as fast as they are emptied do not keep the others waiting.
    #[test]
    fn each_lane_has_its_turn() {
        for count in [5, 64, 130] {
            let lanes = Lanes::new(count, 4);
            let owned = count - (count / SHARED_PART).max(1);
            let mut all: Vec<_> = (0..owned).map(|_| lanes.open()).collect();
            let mut seen = vec![0; owned];
            for _ in 0..3 * owned {
                for (number, lane) in all.iter_mut().enumerate() {
                    lane.publish(&[number; 4]);
                }
                drained(&lanes, 2, 0).iter().for_each(|number| seen[*number] += 1);
            }
            assert!(seen.iter().all(|times| *times == 6), "{seen:?}");
        }
    }

    #[test]
    fn who_comes_late_shares_and_who_goes_makes_way() {
        let lanes = Lanes::new(3, 2);
        let mut own = [lanes.open(), lanes.open()];
        let mut shared = [lanes.open(), lanes.open()];
        assert_eq!(own.each_ref().map(Lane::is_shared), [false; 2]);
        assert_eq!(shared.each_ref().map(Lane::is_shared), [true; 2]);
        assert_eq!(shared.each_mut().map(|lane| lane.publish(&[1, 2])), [2, 0]);
        assert_eq!(own.each_mut().map(|lane| lane.publish(&[3])), [1, 1]);
        assert_eq!(drained(&lanes, 9, 0).len(), 4);
        let [first, _] = own;
        drop(first);
        let mut next = lanes.open();
        assert!(!next.is_shared());
        assert_eq!(next.publish(&[4]), 1);
        assert_eq!(drained(&lanes, 9, 0), [4]);
    }
}
