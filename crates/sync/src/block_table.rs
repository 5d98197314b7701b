//! Primitive: the block table, an atomic word per block.
//!
//! Protects   where the contents of each block are, and what is known of them.
//! Why        a block is replaced as a whole, and stored contents never change in place: one
//!            exchange of 64 bits makes a write visible, and no reader delays it.
//! States     the table below. A word with *locked* belongs to one writer of a part of the block;
//!            all other writers wait, and readers continue.
//! Order      no lock except the bit in the word. Its holder reads, compresses and allocates, so it
//!            may take the pool's locks (rank SHARD and above). Waiting threads sleep on a
//!            condition variable, a leaf, which blocks with the same remainder share.
//! Common     a read is a pin (`hazard_pointers`). A write of a whole block or a discard is a load
//! and an
//!            exchange. Background work is an exchange, and loses against a writer.
//! Cost       8 bytes a block; 5 ns an exchange. A writer of a part takes the bit only after
//!            several exchanges have failed in a row.
//! Before     a reader/writer lock over the table; then a lock bit per entry that a read held while
//!            it decompressed.
//!
//! # The word
//! | bits | name | meaning |
//! | --- | --- | --- |
//! | 0 to 35 | place | of an object, in units of [`PLACE_BYTES`] in the pool; of a same-filled block, the 32-bit value; of a block on the backing file, its position there in the same units |
//! | 36 to 51 | len | stored bytes minus one: 1 to 65536 |
//! | 52, 53 | kind | 0 nothing, 1 an object, 2 same-filled, 3 on the backing file |
//! | 54 | huge | stored uncompressed; if shorter than the block, repeated |
//! | 55 | incompressible | no algorithm makes it smaller |
//! | 56, 57 | codec | which of up to four algorithms compressed it |
//! | 58 to 60 | age | rounds of idle tracking since the last access, 7 at most |
//! | 61 | under writeback | a thread copies it to the backing file |
//! | 62 | shared | other words may refer to the same object, which has a refcount |
//! | 63 | locked | a writer of a part has exclusive access to the block |
//!
//! Kind and place together are the *reference*: a reader pins it, and a writer retires it once.
//!
//! # Why it is sound
//! An object is written before the exchange that publishes it (Release), is read after the load
//! that found it (Acquire), and does not change in between. Only one thread can remove a reference
//! from a word by an exchange; that thread retires it. The memory is freed when no reader has the
//! reference pinned (`hazard_pointers` has the argument). An exchange compares the whole word.
//! While a thread has the old reference pinned, its memory cannot hold another object, so an equal
//! word means equal contents. A word without a reference always means the same contents.
//!
//! Several words may have one reference; all of them are marked as shared. A thread that removes it
//! from one word releases that word's part, and the last one retires the reference. The mark is
//! also set by an exchange, so that a thread that removes the word sees the mark. The owner of the
//! objects keeps the refcount under a lock.
//!
//! | operation | how | concurrently with a writer of the whole block |
//! | --- | --- | --- |
//! | read | pin, load | sees the contents before or after |
//! | write of a whole block, discard | exchange until it succeeds | the last one wins |
//! | write of a block equal to another | pin and compare the other, mark it, count, exchange until it succeeds | the last one wins |
//! | recompression, writeback, compaction | pin, work, one exchange | loses; discards its result |
//! | idle tracking, a read of an idle block | one exchange | loses; nothing to discard |
//! | write of a part | pin, merge, exchange; repeat; then the bit | merges again with the writer's contents; while the bit is set the writer waits |
//!
//! A writer must not swap unconditionally: it would clear the bit of a holder, whose merge would be
//! of outdated contents. So it compares and exchanges.

mod word;

use std::collections::TryReserveError;

use crate::atomics::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering};
use crate::hazard_pointers::{HazardGuard, HazardSlot};
use crate::pad::Padded;
use crate::page_bitmap::zeroed;

use word::LOCKED;

pub use word::{AGE_MAX, CODEC_MAX, Kind, OBJECT_BYTES_MAX, PLACE_BYTES, PLACES_MAX, Word};

/// Failed exchanges after which a writer of a part takes the bit.
const ATTEMPTS: u32 = 3;
/// Number of condition variables for threads that wait for a locked word.
const WAITER_SLOTS: usize = if cfg!(any(loom, shuttle)) { 1 } else { 32 };

/// A word for each block of a device, [`Word::NOTHING`] at first.
#[derive(Debug)]
pub struct BlockTable {
    words: Box<[AtomicU64]>,
    waiters: Box<[Padded<Waiters>]>,
}

/// The condition variable of threads that wait for a locked word.
#[derive(Debug)]
struct Waiters {
    turn: Mutex<()>,
    notified: Condvar,
}

impl Waiters {
    fn new() -> Waiters {
        Waiters { turn: Mutex::new(()), notified: Condvar::new() }
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().expect("no holder panics: it looks at a word")
    }
}

impl BlockTable {
    /// A table for `blocks` blocks. Its memory is touched only where blocks are written.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn new(blocks: u64) -> Result<BlockTable, TryReserveError> {
        let mut waiters = Vec::new();
        waiters.try_reserve_exact(WAITER_SLOTS)?;
        waiters.extend((0..WAITER_SLOTS).map(|_| Padded(Waiters::new())));
        let Some(words) = zeroed(blocks) else {
            // The allocator has just refused this size. This call gets the library's error value
            // for it.
            Vec::<u64>::new().try_reserve_exact(usize::MAX)?;
            unreachable!("no vector is that long");
        };
        Ok(BlockTable { words, waiters: waiters.into_boxed_slice() })
    }

    /// Number of blocks.
    #[inline]
    pub fn blocks(&self) -> u64 {
        self.words.len() as u64
    }

    /// Memory of the table when all blocks are written, in bytes.
    pub fn len_bytes(&self) -> usize {
        size_of_val(&*self.words)
    }

    /// The present word. The object that it refers to may be freed at any moment:
    /// [`HazardSlot::pin`] keeps it.
    #[inline]
    pub fn load(&self, block: u64) -> Word {
        // Acquire: pairs with the Release of the exchange that stored the word: the object's bytes
        // are visible.
        Word(self.words[block as usize].load(Ordering::Acquire))
    }

    /// The address of a block's word, for prefetching; the caller does not access it.
    #[inline]
    pub fn address(&self, block: u64) -> *const u8 {
        (&raw const self.words[block as usize]).cast()
    }

    /// The word once no thread has it locked; sleeps until then.
    pub fn settled(&self, block: u64) -> Word {
        let word = self.load(block);
        if word.is_locked() { self.wait(block) } else { word }
    }

    /// Replaces a word unconditionally and returns the old one. Waits while a writer of a part has
    /// the block locked.
    ///
    /// The caller retires the reference of the old word, unless the new one has the same reference.
    #[inline]
    pub fn replace(&self, block: u64, new: Word) -> Word {
        debug_assert!(!new.is_locked());
        let entry = &self.words[block as usize];
        // Relaxed: the exchange orders.
        let mut now = entry.load(Ordering::Relaxed);
        loop {
            if now & LOCKED != 0 {
                now = self.wait(block).0;
            }
            // AcqRel: publishes the new object's bytes, and sees those of the old one, whose memory
            // the caller will free.
            let done = entry.compare_exchange_weak(now, new.0, Ordering::AcqRel, Ordering::Relaxed);
            match done {
                Ok(old) => return Word(old),
                Err(found) => now = found,
            }
        }
    }

    /// Replaces `old` by `new` if the word is still `old`. The caller has pinned the reference of
    /// `old`.
    ///
    /// On success the caller retires the reference of `old`, unless `new` has the same reference.
    ///
    /// # Errors
    /// The present word: a writer was faster, or has the block locked.
    #[inline]
    pub fn exchange(&self, block: u64, old: Word, new: Word) -> Result<(), Word> {
        if old.is_locked() {
            return Err(old);
        }
        debug_assert!(!new.is_locked());
        let entry = &self.words[block as usize];
        // AcqRel: as in `replace`.
        entry
            .compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Acquire)
            .map_or_else(|found| Err(Word(found)), |_| Ok(()))
    }

    /// Records an access to the block, if it has aged. If a writer is faster, it has recorded its
    /// own access.
    #[inline]
    pub fn touch(&self, block: u64, word: Word) {
        if word.age() > 0 && !word.is_locked() {
            let _ = self.exchange(block, word, word.with_age(0));
        }
    }

    /// Ages one block by a round of idle tracking, unless a concurrent writer changes it.
    #[inline]
    pub fn grow_older(&self, block: u64) {
        let word = self.load(block);
        if word.kind() != Kind::Nothing && word.age() < AGE_MAX {
            let _ = self.exchange(block, word, word.with_age(word.age() + 1));
        }
    }

    /// Replaces a word by the result of `make`, which gets the pinned old word: for a write of a
    /// part of the block. Returns the old word, which the caller retires.
    ///
    /// After several lost exchanges the block is locked: writers wait while `make` is called
    /// once more. `drop_made` gets results that were not stored.
    ///
    /// # Errors
    /// The error of `make`; the word does not change.
    pub fn update<E>(
        &self,
        block: u64,
        seat: &mut HazardSlot,
        mut make: impl FnMut(&HazardGuard<'_>) -> Result<Word, E>,
        mut drop_made: impl FnMut(Word),
    ) -> Result<Word, E> {
        for _ in 0..ATTEMPTS {
            let guard = seat.pin(self, block);
            let old = guard.word();
            if old.is_locked() {
                break;
            }
            let made = make(&guard)?;
            if self.exchange(block, old, made).is_ok() {
                return Ok(old);
            }
            drop(guard);
            drop_made(made);
        }
        self.update_locked(block, seat, make)
    }

    #[cold]
    fn update_locked<E>(
        &self,
        block: u64,
        seat: &mut HazardSlot,
        mut make: impl FnMut(&HazardGuard<'_>) -> Result<Word, E>,
    ) -> Result<Word, E> {
        let held = self.lock(block);
        // No other thread exchanges a locked word, so the first attempt of the pin succeeds.
        let mut guard = seat.pin(self, block);
        guard.unlocked();
        let made = make(&guard)?;
        Ok(held.put(made))
    }

    /// Locks the block for a writer of a part; waits while another one has it locked.
    fn lock(&self, block: u64) -> Locked<'_> {
        let entry = &self.words[block as usize];
        let mut now = entry.load(Ordering::Relaxed);
        loop {
            if now & LOCKED != 0 {
                now = self.wait(block).0;
                continue;
            }
            // Acquire: sees the object of the word, and all that earlier holders did.
            let locked = now | LOCKED;
            let done =
                entry.compare_exchange_weak(now, locked, Ordering::Acquire, Ordering::Relaxed);
            match done {
                Ok(_) => return Locked { entries: self, block, word: Word(now), put: Word(now) },
                Err(found) => now = found,
            }
        }
    }

    fn waiters(&self, block: u64) -> &Waiters {
        &self.waiters[block as usize % self.waiters.len()]
    }

    /// Sleeps until the word is not locked; returns it.
    #[cold]
    fn wait(&self, block: u64) -> Word {
        let waiters = self.waiters(block);
        let mut turn = waiters.turn();
        loop {
            let word = self.load(block);
            if !word.is_locked() {
                return word;
            }
            turn = waiters.notified.wait(turn).expect("no holder panics: it looks at a word");
        }
    }
}

/// A block that a writer of a part has locked.
struct Locked<'e> {
    entries: &'e BlockTable,
    block: u64,
    word: Word,
    /// The word to store on unlocking: the old word, unless `put` sets another.
    put: Word,
}

impl Locked<'_> {
    /// Sets a new word, unlocks the block, and returns the old word.
    fn put(mut self, new: Word) -> Word {
        debug_assert!(!new.is_locked());
        self.put = new;
        self.word
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let entry = &self.entries.words[self.block as usize];
        // Release: publishes the new object's bytes. A store is enough: no other thread exchanges a
        // locked word.
        entry.store(self.put.0, Ordering::Release);
        let waiters = self.entries.waiters(self.block);
        // A thread that has seen the word locked either sleeps when this lock is granted, or loads
        // the word again.
        drop(waiters.turn());
        waiters.notified.notify_all();
    }
}

#[cfg(all(test, loom))]
mod model;

#[cfg(all(test, not(loom)))]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::hazard_pointers::{HazardPointers, Pinned};

    #[test]
    fn background_work_yields_to_writer() {
        let entries = BlockTable::new(4).unwrap();
        let (old, new) = (Word::object(1, 100), Word::object(2, 200));
        assert_eq!(entries.replace(3, old), Word::NOTHING);
        assert_eq!(entries.replace(3, new), old);
        assert_eq!(entries.exchange(3, old, Word::object(7, 50)), Err(new));
        assert_eq!(entries.exchange(3, new, Word::object(7, 50)), Ok(()));
        entries.grow_older(3);
        entries.grow_older(3);
        entries.grow_older(0);
        assert_eq!((entries.load(3).age(), entries.load(0)), (2, Word::NOTHING));
        entries.touch(3, entries.load(3));
        assert_eq!(entries.load(3), Word::object(7, 50));
        let held = entries.lock(3);
        entries.grow_older(3);
        let locked = entries.load(3);
        assert_eq!(entries.exchange(3, locked, Word::object(8, 50)), Err(locked));
        drop(held);
        assert_eq!(entries.load(3), Word::object(7, 50));
    }

    #[test]
    fn partial_write_takes_lock_after_repeated_conflicts() {
        let entries = BlockTable::new(1).unwrap();
        let pins = HazardPointers::new(2);
        let mut seat = pins.slot().unwrap();
        let (mut made, mut dropped) = (0, Vec::new());
        let old = entries.update(
            0,
            &mut seat,
            |guard| {
                made += 1;
                assert!(!guard.word().is_locked());
                if !entries.load(0).is_locked() {
                    // A writer of the whole block interferes.
                    entries.replace(0, Word::object(made, 1));
                }
                Ok::<_, Infallible>(Word::object(100 + made, 1))
            },
            |word| dropped.push(word.place()),
        );
        assert_eq!(old, Ok(Word::object(3, 1)));
        assert_eq!((made, dropped), (4, vec![101, 102, 103]));
        assert_eq!(entries.load(0), Word::object(104, 1));
    }

    #[test]
    fn error_and_panic_unlock_the_block() {
        let entries = BlockTable::new(1).unwrap();
        let pins = HazardPointers::new(1);
        let mut seat = pins.slot().unwrap();
        let failed = entries.update_locked(0, &mut seat, |_| Err("no space"));
        assert_eq!(failed, Err("no space"));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            entries.update_locked(0, &mut seat, |_| -> Result<Word, ()> { panic!("inside") })
        }));
        assert!(panicked.is_err());
        assert_eq!(entries.replace(0, Word::same(1)), Word::NOTHING);
    }

    #[test]
    fn pinned_object_is_found_until_guard_drops() {
        let entries = BlockTable::new(2).unwrap();
        let pins = HazardPointers::new(2);
        let (mut one, mut two) = (pins.slot().unwrap(), pins.slot().unwrap());
        assert!(pins.slot().is_none());
        let (a, b) = (Word::object(1, 10), Word::backing(1, 10));
        entries.replace(0, a);
        entries.replace(1, b);
        let mut pinned = Pinned::with_capacity(2);
        let guard = one.pin(&entries, 0);
        let other = two.pin(&entries, 1);
        pins.look(&mut pinned);
        assert!(pinned.contains(a.with_age(3)) && pinned.contains(b));
        drop(guard);
        pins.look(&mut pinned);
        assert!(!pinned.contains(a) && pinned.contains(b));
        std::mem::forget(other);
        drop(two);
        pins.look(&mut pinned);
        assert!(!pinned.contains(b), "dropping a slot releases its forgotten guard");
        drop(one);
        assert_eq!((pins.slot().is_some(), pins.slots_used()), (true, 2));
    }

    #[test]
    fn table_larger_than_memory_is_refused() {
        assert!(BlockTable::new(u64::MAX >> 4).is_err());
        let entries = BlockTable::new(1 << 30).unwrap();
        assert_eq!(entries.load((1 << 30) - 1), Word::NOTHING);
        assert_eq!((entries.blocks(), entries.len_bytes()), (1 << 30, 8 << 30));
    }
}
