//! Room: what readers have pinned.
//!
//! Protects   objects that a word refers to, from being given back while somebody reads them.
//! Why        a reader decompresses in place, from memory that a writer may replace meanwhile. It
//!            must not make the writer wait, nor wait itself, nor keep more than that one object.
//! States     a seat's slot is 0 (nothing is read) or the reference that its reader has pinned.
//! Order      no lock; a list of free seats has one of its own, a leaf, to open and close a seat.
//! Common     a pin is two loads, a store and a fence; its end is a store. All of it but the word
//!            itself is in a cache line that nobody else writes.
//! Cost       about 8 ns a pin. A look at all pins costs a load for each seat, once for so many
//!            retired objects as there are seats and some more.
//! Before     the entry's lock, held while a block was decompressed.
//!
//! # Why it is sound
//! | reader | who retires |
//! | --- | --- |
//! | loads the word: R | exchanges the word: R is no longer in it |
//! | stores R in its slot | |
//! | full fence | full fence |
//! | loads the word again | loads all slots |
//! | still R: reads; else begins again with what it found | gives back what is in no slot |
//!
//! One of the two fences comes first. If it is the reader's, the slot is seen, and the object
//! stays. If it is the other, the second load sees the exchange, and the reader lets go of R
//! without having touched it. A word that has come back to R meanwhile is no exception: then R is
//! in the word now, and whoever takes it out again does so after the reader's fence.
//!
//! The slot is cleared with Release and looked at with Acquire, so that the last read comes before
//! whatever the memory is used for; and it is set with Release, or the next pin would hide that end
//! from who sees the pin only.
//!
//! # Why not epochs
//! What is retired is bounded: each seat keeps one object at most, whatever happens to its thread.
//! A reader in an epoch that loses its processor keeps everything that is retired from then on, and
//! retired memory counts against the limit: writers would be refused because a reader sleeps.

use std::sync::Arc;

use crate::atomics::{AtomicU64, AtomicUsize, Mutex, Ordering, fence};
use crate::entry_words::{Entries, Word};
use crate::pad::Padded;

/// The pins of all readers of a device.
#[derive(Debug)]
pub struct Pins {
    slots: Box<[Padded<AtomicU64>]>,
    /// Seats below this were taken at some time.
    seats_used: AtomicUsize,
    free: Mutex<Vec<u32>>,
}

impl Pins {
    /// Room for so many seats, none taken.
    pub fn new(seats_max: u32) -> Arc<Pins> {
        Arc::new(Pins {
            slots: (0..seats_max).map(|_| Padded(AtomicU64::new(0))).collect(),
            seats_used: AtomicUsize::new(0),
            free: Mutex::new((0..seats_max).rev().collect()),
        })
    }

    /// A seat for one thread; `None` if all are taken.
    pub fn seat(self: &Arc<Pins>) -> Option<Seat> {
        let mut free = self.free.lock().expect("no holder panics: it pushes and pops");
        let number = free.pop()?;
        // Relaxed: ordered by the fences of `pin` and `look`, like the slot itself.
        self.seats_used.fetch_max(number as usize + 1, Ordering::Relaxed);
        drop(free);
        Some(Seat { pins: Arc::clone(self), number })
    }

    /// How many seats can be taken at a time.
    pub fn seats_max(&self) -> usize {
        self.slots.len()
    }

    /// How many objects can be pinned at most by the seats that were ever taken.
    pub fn seats_used(&self) -> usize {
        self.seats_used.load(Ordering::Relaxed)
    }

    /// What is pinned now, of all that was taken out of its word before the call.
    pub fn look(&self, pinned: &mut Pinned) {
        pinned.0.clear();
        // Full fence: pairs with the one in `pin`; see the head.
        fence(Ordering::SeqCst);
        let used = self.seats_used.load(Ordering::Relaxed);
        for slot in &self.slots[..used] {
            // Acquire: pairs with the Release in `Guard::drop`: its reads are over.
            let reference = slot.load(Ordering::Acquire);
            if reference != 0 {
                pinned.0.push(reference);
            }
        }
        pinned.0.sort_unstable();
    }
}

/// What a look has found pinned.
#[derive(Debug, Default)]
pub struct Pinned(Vec<u64>);

impl Pinned {
    /// An empty one that takes the pins of so many seats without allocating.
    pub fn with_capacity(seats: usize) -> Pinned {
        Pinned(Vec::with_capacity(seats))
    }

    /// Whether somebody reads what the word refers to.
    #[inline]
    pub fn contains(&self, word: Word) -> bool {
        self.0.binary_search(&word.reference()).is_ok()
    }
}

/// One thread's place among the readers. It pins one object at a time.
#[derive(Debug)]
pub struct Seat {
    pins: Arc<Pins>,
    number: u32,
}

impl Seat {
    /// Loads a block's word and pins what it refers to, until the guard goes.
    ///
    /// It begins again only when a writer has exchanged the word within these few instructions.
    #[inline]
    pub fn pin(&mut self, entries: &Entries, block: u64) -> Guard<'_> {
        let slot = &self.pins.slots[self.number as usize].0;
        let mut word = entries.load(block);
        while word.reference() != 0 {
            // Release: pairs with the Acquire in `look`; who sees this pin sees that the one before
            // it is over, of this seat's earlier owners too. The fence below orders the pin itself.
            slot.store(word.reference(), Ordering::Release);
            // Full fence: pairs with the one in `look`; see the head.
            fence(Ordering::SeqCst);
            let now = entries.load(block);
            if now.reference() == word.reference() {
                return Guard { slot, word: now };
            }
            word = now;
        }
        // Release: as in `Guard::drop`; a reference of an earlier turn may stand there.
        slot.store(0, Ordering::Release);
        Guard { slot, word }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // Release: a guard that was forgotten ends here.
        self.pins.slots[self.number as usize].store(0, Ordering::Release);
        let mut free = self.pins.free.lock().expect("no holder panics: it pushes and pops");
        free.push(self.number);
    }
}

/// As long as it lives, what its word refers to stays where it is.
#[derive(Debug)]
#[must_use]
pub struct Guard<'s> {
    slot: &'s AtomicU64,
    word: Word,
}

impl Guard<'_> {
    /// The word, as it was when it was pinned.
    #[inline]
    pub fn word(&self) -> Word {
        self.word
    }

    /// Makes it the word that stood there before the caller locked the block.
    pub(crate) fn unlocked(&mut self) {
        self.word = self.word.unlocked();
    }
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `look`: reads of the object come before.
        self.slot.store(0, Ordering::Release);
    }
}
