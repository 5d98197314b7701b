//! Primitive: hazard pointers.
//!
//! Protects   objects that a word refers to, from being freed while a thread reads them.
//! Why        a reader decompresses directly from memory that a writer may replace meanwhile. It
//!            must not make the writer wait, nor wait itself, nor keep more than that one object.
//! States     a slot is 0 (no object is read) or the reference that its reader has pinned.
//! Order      no lock; a list of free slots has its own lock, a leaf, to open and close a slot.
//! Common     a pin is two loads, a store and a fence; its end is a store. All of this except the
//!            word itself is on an uncontended cache line.
//! Cost       about 8 ns a pin. A scan of all pins costs a load per slot, once for slightly more
//!            retired objects than there are slots.
//! Before     the lock of the entry, held while a block was decompressed.
//!
//! # Why it is sound
//! | reader | thread that retires |
//! | --- | --- |
//! | loads the word: R | exchanges the word: R is no longer in it |
//! | stores R in its slot | |
//! | full fence | full fence |
//! | loads the word again | loads all slots |
//! | still R: reads; else starts again with the new value | frees the objects that are in no slot |
//!
//! One of the two fences comes first. If it is the reader's, the other thread sees the slot, and
//! the object stays. If it is the other thread's, the second load sees the exchange, and the reader
//! releases R without having read the object. The argument also covers a word that has changed back
//! to R meanwhile: R is in the word now, and a thread that removes it again does so after the
//! reader's fence.
//!
//! The slot is cleared with Release and scanned with Acquire, so that the last read comes before
//! the memory is reused. The slot is also set with Release: a scan that sees only the next pin must
//! still see that the previous one has ended.
//!
//! # Why not epochs
//! The number of retired objects is bounded: each slot keeps at most one object, whatever happens
//! to its thread. With epochs, a preempted reader keeps everything that is retired from then on.
//! Retired memory is charged against the limit, so writes would fail because a reader does not run.

use std::sync::Arc;

use crate::atomics::{AtomicU64, AtomicUsize, Mutex, Ordering, fence};
use crate::block_table::{BlockTable, Word};
use crate::pad::Padded;

/// The hazard pointers of all readers of a device.
#[derive(Debug)]
pub struct HazardPointers {
    slots: Box<[Padded<AtomicU64>]>,
    /// All slots that were ever taken are below this number.
    slots_used: AtomicUsize,
    free: Mutex<Vec<u32>>,
}

impl HazardPointers {
    /// `slots_max` free slots.
    pub fn new(slots_max: u32) -> Arc<HazardPointers> {
        Arc::new(HazardPointers {
            slots: (0..slots_max).map(|_| Padded(AtomicU64::new(0))).collect(),
            slots_used: AtomicUsize::new(0),
            free: Mutex::new((0..slots_max).rev().collect()),
        })
    }

    /// A slot for one thread; `None` if all are taken.
    pub fn slot(self: &Arc<HazardPointers>) -> Option<HazardSlot> {
        let mut free = self.free.lock().expect("no holder panics: it pushes and pops");
        let number = free.pop()?;
        // Relaxed: ordered by the fences of `pin` and `look`, like the slot itself.
        self.slots_used.fetch_max(number as usize + 1, Ordering::Relaxed);
        drop(free);
        Some(HazardSlot { pins: Arc::clone(self), number })
    }

    /// Number of slots.
    pub fn slots_max(&self) -> usize {
        self.slots.len()
    }

    /// Maximum number of objects that the slots taken so far can pin.
    pub fn slots_used(&self) -> usize {
        self.slots_used.load(Ordering::Relaxed)
    }

    /// Scans the objects that are pinned now, among those removed from their words before the call.
    pub fn look(&self, pinned: &mut Pinned) {
        pinned.0.clear();
        // Full fence: pairs with the one in `pin`; see the head of this file.
        fence(Ordering::SeqCst);
        let used = self.slots_used.load(Ordering::Relaxed);
        for slot in &self.slots[..used] {
            // Acquire: pairs with the Release in `HazardGuard::drop`: the reads have ended.
            let reference = slot.load(Ordering::Acquire);
            if reference != 0 {
                pinned.0.push(reference);
            }
        }
        pinned.0.sort_unstable();
    }
}

/// The references that a scan found pinned.
#[derive(Debug, Default)]
pub struct Pinned(Vec<u64>);

impl Pinned {
    /// An empty result that holds the pins of `seats` slots without an allocation.
    pub fn with_capacity(seats: usize) -> Pinned {
        Pinned(Vec::with_capacity(seats))
    }

    /// Whether a thread reads the object of this word.
    #[inline]
    pub fn contains(&self, word: Word) -> bool {
        self.0.binary_search(&word.reference()).is_ok()
    }
}

/// One thread's slot. It pins one object at a time.
#[derive(Debug)]
pub struct HazardSlot {
    pins: Arc<HazardPointers>,
    number: u32,
}

impl HazardSlot {
    /// Loads a block's word and pins its object until the guard is dropped.
    ///
    /// Repeats only if a writer has exchanged the word within these few instructions.
    #[inline]
    pub fn pin(&mut self, entries: &BlockTable, block: u64) -> HazardGuard<'_> {
        let slot = &self.pins.slots[self.number as usize].0;
        let mut word = entries.load(block);
        while word.reference() != 0 {
            // Release: pairs with the Acquire in `look`. A thread that sees this pin also sees that
            // the previous one has ended, including those of earlier owners of the slot. The fence
            // below orders the pin itself.
            slot.store(word.reference(), Ordering::Release);
            // Full fence: pairs with the one in `look`; see the head of this file.
            fence(Ordering::SeqCst);
            let now = entries.load(block);
            if now.reference() == word.reference() {
                return HazardGuard { slot, word: now };
            }
            word = now;
        }
        // Release: as in `HazardGuard::drop`; the slot may hold a reference of an earlier
        // iteration.
        slot.store(0, Ordering::Release);
        HazardGuard { slot, word }
    }
}

impl Drop for HazardSlot {
    fn drop(&mut self) {
        // Release: ends the pin of a guard that was forgotten.
        self.pins.slots[self.number as usize].store(0, Ordering::Release);
        let mut free = self.pins.free.lock().expect("no holder panics: it pushes and pops");
        free.push(self.number);
    }
}

/// A pin: while the guard exists, the object of its word is not freed.
#[derive(Debug)]
#[must_use]
pub struct HazardGuard<'s> {
    slot: &'s AtomicU64,
    word: Word,
}

impl HazardGuard<'_> {
    /// The word when it was pinned.
    #[inline]
    pub fn word(&self) -> Word {
        self.word
    }

    /// Replaces the word by the one before the caller locked the block.
    pub(crate) fn unlocked(&mut self) {
        self.word = self.word.unlocked();
    }
}

impl Drop for HazardGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `look`: reads of the object come before.
        self.slot.store(0, Ordering::Release);
    }
}
