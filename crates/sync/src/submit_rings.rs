//! Primitive: submit rings (SPSC rings).
//!
//! Protects   the requests that submitters pass to the dispatcher.
//! Why        an insertion must not contend with other submitters: each writes to its own ring, and
//!            the thread that holds the [`crate::combining_lock`] drains all rings.
//! States     a ring holds the values between its head and its tail. Its occupied bit is set while
//!            a dispatcher has to look at it. Submitters that arrive when all other rings are taken
//!            share the last rings.
//! Order      none for a ring with one owner; a shared ring has rank SUBMIT_RING, taken to write.
//! Common     one release store publishes a batch; then a fence, and a load of the bit, which is
//!            set.
//! Cost       about 8 ns a batch and 1 ns a value; a read-modify-write if the bit was clear.
//! Before     an insertion under the scheduler's lock, for each request.
//!
//! | submitter | dispatcher |
//! | --- | --- |
//! | stores the tail | clears the bits |
//! | full fence | full fence |
//! | sets its bit if it is clear | reads the tails |
//!
//! At least one of the two sees the other: the submitter sets the bit again for a value that the
//! drain misses. It then dispatches or notifies the dispatcher.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::MaybeUninit;
use std::sync::{Arc, PoisonError};

use crate::atomics::{AtomicBool, AtomicU32, AtomicU64, Mutex, Ordering, fence};
use crate::lock::Lock;
use crate::pad::Padded;
use crate::rank::ranks;
use crate::sleep_lock::SleepLock;
use crate::sync_cell::SyncCell;

/// One in this number of rings is shared, and at least one.
const SHARED_PART: usize = 16;

/// Rings per word of occupied bits.
const WORD: usize = 64;

/// Submit rings for values that are plain data.
pub struct SubmitRings<T> {
    rings: Box<[ChannelRing]>,
    places: AllPlaces<T>,
    /// Places of one ring.
    ring_len: usize,
    /// A bit for each ring that a dispatcher has to look at.
    occupied: Box<[Padded<AtomicU64>]>,
    /// Number of rings with one owner each, which come first.
    owned: usize,
    unassigned: Mutex<FreeRings>,
    /// The ring after the one at which a drain reached its limit. The next drain begins there, so
    /// that each ring gets its turn.
    next: Padded<AtomicU32>,
    /// The drain leaves the values in the rings, because the device is full.
    held_back: AtomicBool,
    /// Executable work was left, and no thread is doing it.
    abandoned: AtomicBool,
}

/// The rings without an owner.
#[derive(Debug)]
struct FreeRings {
    free: Vec<usize>,
    next_shared: usize,
}

struct ChannelRing {
    /// The number of the next value to take; the dispatcher writes it.
    head: Padded<AtomicU32>,
    /// The number of the next value to come; the submitter writes it.
    tail: Padded<AtomicU32>,
    /// Taken to publish in a shared ring.
    turn: SleepLock<(), { ranks::SUBMIT_RING }>,
}

/// The places of all rings, one ring after the other, in one allocation: those of rings that are
/// not used take no physical memory.
struct AllPlaces<T>(Box<[SyncCell<MaybeUninit<T>>]>);

// SAFETY: the submitter of the ring writes a place and the dispatcher reads it, one thread each at
// a time; head and tail order the two.
unsafe impl<T: Send> Sync for AllPlaces<T> {}

/// A ring with its places.
struct RingPlaces<'a, T> {
    ring: &'a ChannelRing,
    places: &'a [SyncCell<MaybeUninit<T>>],
}

impl<T: Copy> RingPlaces<'_, T> {
    #[inline]
    fn place(&self, number: u32) -> &SyncCell<MaybeUninit<T>> {
        &self.places[number as usize & (self.places.len() - 1)]
    }

    /// Free places, for the submitter. Another thread that shares the ring may read a head that is
    /// older than the tail; then the result is 0.
    #[inline]
    fn room(&self) -> usize {
        // Acquire: pairs with the Release in `drain`, so that the old values have been read.
        let head = self.ring.head.load(Ordering::Acquire);
        // Relaxed: this thread wrote it, or it was written under the lock of the ring.
        let tail = self.ring.tail.load(Ordering::Relaxed);
        self.places.len().saturating_sub(tail.wrapping_sub(head) as usize)
    }

    /// Publishes values, from the first on, while there is space; returns their number.
    ///
    /// # Safety
    /// No other thread publishes in this ring meanwhile.
    #[inline]
    unsafe fn publish(&self, values: &[T]) -> usize {
        let count = self.room().min(values.len());
        let tail = self.ring.tail.load(Ordering::Relaxed);
        for (index, value) in values[..count].iter().enumerate() {
            let place = self.place(tail.wrapping_add(index as u32));
            // SAFETY: the place lies after the tail, where no thread reads, and is free.
            unsafe { place.with_mut(|it| *it = MaybeUninit::new(*value)) };
        }
        // Release: pairs with the Acquire in `drain`.
        self.ring.tail.store(tail.wrapping_add(count as u32), Ordering::Release);
        count
    }

    /// Takes up to `most` values; returns whether the ring is empty now.
    ///
    /// # Safety
    /// No other thread drains this ring meanwhile.
    #[inline]
    unsafe fn drain(&self, most: usize, out: &mut Vec<T>) -> bool {
        // Relaxed: the previous dispatcher has released the combining lock, which orders the two.
        let head = self.ring.head.load(Ordering::Relaxed);
        // Acquire: pairs with the Release in `publish`.
        let len = self.ring.tail.load(Ordering::Acquire).wrapping_sub(head) as usize;
        let count = len.min(most);
        for index in 0..count {
            let place = self.place(head.wrapping_add(index as u32));
            // SAFETY: the place lies between head and tail, so it was written and does not change.
            out.push(unsafe { place.with_mut(|it| it.assume_init_read()) });
        }
        // Release: pairs with the Acquire in `room`.
        self.ring.head.store(head.wrapping_add(count as u32), Ordering::Release);
        count == len
    }

    #[inline]
    fn len(&self) -> usize {
        let head = self.ring.head.load(Ordering::Relaxed);
        self.ring.tail.load(Ordering::Acquire).wrapping_sub(head) as usize
    }
}

impl<T: Copy + Send> SubmitRings<T> {
    /// `submit_rings` empty rings, at least two, for `values` values each. Some of them are shared.
    pub fn new(lanes: usize, values: usize) -> Arc<SubmitRings<T>> {
        let lanes = lanes.max(2);
        let owned = lanes - (lanes / SHARED_PART).max(1);
        let ring = |_| ChannelRing {
            head: Padded(AtomicU32::new(0)),
            tail: Padded(AtomicU32::new(0)),
            turn: SleepLock::new(()),
        };
        let ring_len = values.max(1).next_power_of_two();
        Arc::new(SubmitRings {
            rings: (0..lanes).map(ring).collect(),
            places: AllPlaces(SyncCell::uninit_slice(lanes * ring_len)),
            ring_len,
            occupied: (0..lanes.div_ceil(WORD)).map(|_| Padded(AtomicU64::new(0))).collect(),
            owned,
            unassigned: Mutex::new(FreeRings { free: (0..owned).rev().collect(), next_shared: 0 }),
            next: Padded(AtomicU32::new(0)),
            held_back: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
        })
    }

    /// A ring with its places.
    #[inline]
    fn ring(&self, number: usize) -> RingPlaces<'_, T> {
        let places = &self.places.0[number * self.ring_len..][..self.ring_len];
        RingPlaces { ring: &self.rings[number], places }
    }

    /// A ring for one more submitter: its own, or a shared one.
    pub fn open(self: &Arc<Self>) -> SubmitRing<T> {
        let mut unassigned = self.unassigned.lock().unwrap_or_else(PoisonError::into_inner);
        let number = unassigned.free.pop().unwrap_or_else(|| {
            let shared = unassigned.next_shared;
            unassigned.next_shared = (shared + 1) % (self.rings.len() - self.owned);
            self.owned + shared
        });
        SubmitRing { lanes: Arc::clone(self), number }
    }

    /// Whether a thread has to dispatch: a ring holds values that may go, or work was left. A
    /// caller that relies on the answer must execute a full fence before.
    #[inline]
    pub fn is_work(&self) -> bool {
        if self.abandoned.load(Ordering::Relaxed) {
            return true;
        }
        self.is_occupied() && !self.held_back.load(Ordering::Relaxed)
    }

    /// Whether a ring holds values, even if they have to stay there.
    #[inline]
    pub fn is_occupied(&self) -> bool {
        self.occupied.iter().any(|word| word.load(Ordering::Relaxed) != 0)
    }

    /// Announces that executable work is left.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }

    /// Whether work is left that no thread has started. Has no side effects.
    #[inline]
    pub fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Withdraws the announcement of left work, because this thread does it.
    #[inline]
    pub fn attend(&self) {
        if self.abandoned.load(Ordering::Relaxed) {
            self.abandoned.store(false, Ordering::Relaxed);
        }
    }

    /// Sets whether the values have to stay in the rings until the dispatcher comes again.
    #[inline]
    pub fn hold_back(&self, holds_back: bool) {
        if self.held_back.load(Ordering::Relaxed) != holds_back {
            self.held_back.store(holds_back, Ordering::Relaxed);
        }
    }

    /// Moves values from rings that hold at least `at_least` to `out`, at most `most` values in
    /// total. A ring that is not emptied keeps its bit. If `most` ends the drain, the next drain
    /// begins at the following ring.
    ///
    /// # Safety
    /// No other thread drains the rings meanwhile: the caller holds the combining lock of the
    /// dispatcher.
    pub unsafe fn drain(&self, most: usize, at_least: usize, out: &mut Vec<T>) {
        let end = out.len() + most;
        // Relaxed: only the dispatcher uses it, under the combining lock.
        let start = self.next.load(Ordering::Relaxed) as usize;
        let words = self.occupied.len();
        // The word of the first ring comes twice: first from that ring on, and at the end up to it.
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

    /// Drains the rings of one word whose bits are in `part`.
    ///
    /// # Safety
    /// As for [`SubmitRings::drain`].
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
        // Full: pairs with the fence in `SubmitRing::publish`.
        fence(Ordering::SeqCst);
        let (mut bits, mut left) = (all & part, all & !part);
        while bits != 0 {
            let bit = bits.trailing_zeros() as usize;
            bits &= bits - 1;
            let lane = index * WORD + bit;
            let ring = self.ring(lane);
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

/// A submitter's end of a ring. It belongs to one thread at a time.
pub struct SubmitRing<T: Copy + Send> {
    lanes: Arc<SubmitRings<T>>,
    number: usize,
}

impl<T: Copy + Send> SubmitRing<T> {
    #[inline]
    fn ring(&self) -> RingPlaces<'_, T> {
        self.lanes.ring(self.number)
    }

    /// The number of the ring, which submitters that share it have in common.
    #[inline]
    pub fn number(&self) -> usize {
        self.number
    }

    /// Whether other threads publish in this ring, too.
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.number >= self.lanes.owned
    }

    /// Free places, unless other threads fill them.
    #[inline]
    pub fn room(&self) -> usize {
        self.ring().room()
    }

    /// Publishes values, from the first on, while there is space; returns their number. A thread
    /// that becomes the dispatcher after this, or is notified after this, sees them.
    #[inline]
    pub fn publish(&mut self, values: &[T]) -> usize {
        let ring = self.ring();
        let count = if self.is_shared() {
            // SAFETY: this thread holds the ring's lock.
            ring.ring.turn.with(|()| unsafe { ring.publish(values) })
        } else {
            // SAFETY: the ring has one owner, which is borrowed mutably.
            unsafe { ring.publish(values) }
        };
        if count > 0 {
            // Full: pairs with the fence in `SubmitRings::drain`.
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

impl<T: Copy + Send> Drop for SubmitRing<T> {
    fn drop(&mut self) {
        if !self.is_shared() {
            let unassigned = self.lanes.unassigned.lock();
            unassigned.unwrap_or_else(PoisonError::into_inner).free.push(self.number);
        }
    }
}

impl<T> fmt::Debug for SubmitRings<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SubmitRings { rings, owned, .. } = self;
        write!(f, "SubmitRings({owned} owned of {})", rings.len())
    }
}

impl<T: Copy + Send> fmt::Debug for SubmitRing<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SubmitRing({})", self.number)
    }
}

#[cfg(all(test, loom))]
mod model;

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    fn drained<T: Copy + Send>(lanes: &SubmitRings<T>, most: usize, at_least: usize) -> Vec<T> {
        let mut out = Vec::new();
        // SAFETY: the tests drain from one thread.
        unsafe { lanes.drain(most, at_least, &mut out) };
        out
    }

    #[test]
    fn rings_wrap_around_and_fill_up() {
        let lanes = SubmitRings::new(4, 4);
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

    /// Rings whose owners fill them as fast as they are drained do not starve the others.
    #[test]
    fn drain_is_fair_between_rings() {
        for count in [5, 64, 130] {
            let lanes = SubmitRings::new(count, 4);
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
    fn late_submitters_share_rings_and_freed_rings_are_reused() {
        let lanes = SubmitRings::new(3, 2);
        let mut own = [lanes.open(), lanes.open()];
        let mut shared = [lanes.open(), lanes.open()];
        assert_eq!(own.each_ref().map(SubmitRing::is_shared), [false; 2]);
        assert_eq!(shared.each_ref().map(SubmitRing::is_shared), [true; 2]);
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
