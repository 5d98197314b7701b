//! Room: a word per block, exchanged whole.
//!
//! Protects   where the contents of each block are, and what is known of them.
//! Why        a block is replaced as a whole, and its contents never change where they lie: one
//!            exchange of 64 bits makes a write visible, and no reader is in its way.
//! States     the table below. A word with *locked* belongs to one writer of a part of the block;
//!            all other writers wait, readers read on.
//! Order      no lock but the bit in the word, whose holder reads, compresses and allocates: it may
//!            take the pool's locks (rank SHARD and above). Who waits for it sleeps at a bell, a
//!            leaf, shared by the blocks with the same remainder.
//! Common     a read is a pin (`pins`); a write of a whole block, a discard, is a load and an
//!            exchange; whatever works in the background is an exchange, and loses to a writer.
//! Cost       8 bytes a block; 5 ns an exchange. The bit is taken only after several exchanges have
//!            failed in a row.
//! Before     a reader/writer lock over the table; then a lock bit per entry that a read held while
//!            it decompressed.
//!
//! # The word
//! | bits | name | meaning |
//! | --- | --- | --- |
//! | 0 to 35 | place | of an object, in units of [`PLACE_BYTES`] in the pool; of a same-filled block, the 32-bit value; of one on the backing file, its place there in the same units |
//! | 36 to 51 | len | stored bytes less one: 1 to 65536 |
//! | 52, 53 | kind | 0 nothing, 1 an object, 2 same-filled, 3 on the backing file |
//! | 54 | huge | stored as it is; shorter than the block: repeated |
//! | 55 | incompressible | no algorithm makes it smaller |
//! | 56, 57 | codec | which of up to four algorithms made it |
//! | 58 to 60 | age | turns of idle tracking since the last access, 7 at most |
//! | 61 | under writeback | somebody copies it to the backing file |
//! | 62 | shared | other words may refer to the same object, which has a count |
//! | 63 | locked | a writer of a part has the block for himself |
//!
//! Kind and place together are the *reference*: what is pinned, and what is retired once.
//!
//! # Why it is sound
//! An object is written before the exchange that shows it (Release), is read after the load that
//! found it (Acquire), and is not written in between: immutable. Who takes a reference out of a
//! word by an exchange is the only one who has done so, and retires it; it is given back when no
//! reader has it pinned (`pins` has the argument). An exchange compares the whole word. While the
//! comparer has the old reference pinned, its memory cannot have become another object's, so the
//! same word means the same contents; a word without a reference means the same contents always.
//!
//! Several words may have one reference, all of them marked as shared. Then whoever takes it out of
//! one gives up that word's part, and the last one retires it; the mark is set by an exchange too,
//! so who takes the word out knows it. The count of parts is the owner's of the objects, under a
//! lock.
//!
//! | who | how | beside a writer of the whole block |
//! | --- | --- | --- |
//! | read | pin, load | sees the contents before or after |
//! | write of a whole block, discard | exchange until it succeeds | the last one stays, as on any disk |
//! | write of a block that is equal to another | pin and compare the other, mark it, count, exchange until it succeeds | the last one stays |
//! | recompress, writeback, compaction | pin, work, one exchange | loses; drops what it made |
//! | idle tracking, a read of an idle block | one exchange | loses; nothing to drop |
//! | write of a part | pin, merge, exchange; again; then the bit | its merge is made again on what the writer left; under the bit the writer waits |
//!
//! A writer that swapped without looking would put an end to the bit under its holder, whose merge
//! is of contents that are gone: so it looks, and exchanges.

mod word;

use std::collections::TryReserveError;

use crate::atomics::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering};
use crate::pad::Padded;
use crate::page_bitmap::zeroed;
use crate::pins::{Guard, Seat};

use word::LOCKED;

pub use word::{AGE_MAX, CODEC_MAX, Kind, OBJECT_BYTES_MAX, PLACE_BYTES, PLACES_MAX, Word};

/// Failed exchanges after which a writer of a part takes the bit.
const ATTEMPTS: u32 = 3;
/// Bells that waiters sleep at.
const BELLS: usize = if cfg!(any(loom, shuttle)) { 1 } else { 32 };

/// A word for each block of a device, [`Word::NOTHING`] at first.
#[derive(Debug)]
pub struct Entries {
    words: Box<[AtomicU64]>,
    bells: Box<[Padded<Bell>]>,
}

/// Where those sleep who wait for a locked word.
#[derive(Debug)]
struct Bell {
    turn: Mutex<()>,
    rung: Condvar,
}

impl Bell {
    fn new() -> Bell {
        Bell { turn: Mutex::new(()), rung: Condvar::new() }
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().expect("no holder panics: it looks at a word")
    }
}

impl Entries {
    /// Words for so many blocks. Their memory is touched where blocks are written only.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub fn new(blocks: u64) -> Result<Entries, TryReserveError> {
        let mut bells = Vec::new();
        bells.try_reserve_exact(BELLS)?;
        bells.extend((0..BELLS).map(|_| Padded(Bell::new())));
        let Some(words) = zeroed(blocks) else {
            // The allocator has just refused so much: it says so in the library's words.
            Vec::<u64>::new().try_reserve_exact(usize::MAX)?;
            unreachable!("no vector is that long");
        };
        Ok(Entries { words, bells: bells.into_boxed_slice() })
    }

    /// How many blocks there are.
    #[inline]
    pub fn blocks(&self) -> u64 {
        self.words.len() as u64
    }

    /// Memory that the words take when all blocks are written, in bytes.
    pub fn len_bytes(&self) -> usize {
        size_of_val(&*self.words)
    }

    /// The word now. What it refers to may be gone in the next moment: [`Seat::pin`] keeps it.
    #[inline]
    pub fn load(&self, block: u64) -> Word {
        // Acquire: pairs with the Release of the exchange that put the word there: the object's
        // bytes are seen.
        Word(self.words[block as usize].load(Ordering::Acquire))
    }

    /// Where a block's word lies, for who fetches it into the cache; nobody reads or writes there.
    #[inline]
    pub fn address(&self, block: u64) -> *const u8 {
        (&raw const self.words[block as usize]).cast()
    }

    /// The word as soon as nobody has the block for himself; sleeps until then.
    pub fn settled(&self, block: u64) -> Word {
        let word = self.load(block);
        if word.is_locked() { self.wait(block) } else { word }
    }

    /// Puts a word there, whatever stands there, and says what did. Waits while a writer of a part
    /// has the block.
    ///
    /// The caller retires what the old word refers to, unless the new one refers to it too.
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
            // AcqRel: shows the new object's bytes; sees those of the old one, whose memory the
            // caller is going to give back.
            let done = entry.compare_exchange_weak(now, new.0, Ordering::AcqRel, Ordering::Relaxed);
            match done {
                Ok(old) => return Word(old),
                Err(found) => now = found,
            }
        }
    }

    /// Puts `new` there if `old` still stands there. The caller has pinned what `old` refers to.
    ///
    /// On success the caller retires what `old` refers to, unless `new` refers to it too.
    ///
    /// # Errors
    /// What stands there instead: a writer was faster, or holds the block.
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

    /// Notes that the block was accessed, if it has aged. A writer that is faster has done so.
    #[inline]
    pub fn touch(&self, block: u64, word: Word) {
        if word.age() > 0 && !word.is_locked() {
            let _ = self.exchange(block, word, word.with_age(0));
        }
    }

    /// A turn of idle tracking for one block: one older, unless a writer comes in between.
    #[inline]
    pub fn grow_older(&self, block: u64) {
        let word = self.load(block);
        if word.kind() != Kind::Nothing && word.age() < AGE_MAX {
            let _ = self.exchange(block, word, word.with_age(word.age() + 1));
        }
    }

    /// Exchanges a word for one that `make` makes of it and of what it refers to, which is pinned;
    /// for a write of a part of the block. Returns the old word, which the caller retires.
    ///
    /// When writers were faster a few times, their turn is over: the block is locked, and they wait
    /// while `make` is called once more. `drop_made` gets what was made in vain.
    ///
    /// # Errors
    /// Whatever `make` says; the word is left alone.
    pub fn update<E>(
        &self,
        block: u64,
        seat: &mut Seat,
        mut make: impl FnMut(&Guard<'_>) -> Result<Word, E>,
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
        seat: &mut Seat,
        mut make: impl FnMut(&Guard<'_>) -> Result<Word, E>,
    ) -> Result<Word, E> {
        let held = self.lock(block);
        // The holder's own word cannot be exchanged, so this pins it at the first attempt.
        let mut guard = seat.pin(self, block);
        guard.unlocked();
        let made = make(&guard)?;
        Ok(held.put(made))
    }

    /// Takes the block for a writer of a part; waits while another has it.
    fn lock(&self, block: u64) -> Locked<'_> {
        let entry = &self.words[block as usize];
        let mut now = entry.load(Ordering::Relaxed);
        loop {
            if now & LOCKED != 0 {
                now = self.wait(block).0;
                continue;
            }
            // Acquire: sees what the word refers to, and all that earlier holders did.
            let locked = now | LOCKED;
            let done =
                entry.compare_exchange_weak(now, locked, Ordering::Acquire, Ordering::Relaxed);
            match done {
                Ok(_) => return Locked { entries: self, block, word: Word(now), put: Word(now) },
                Err(found) => now = found,
            }
        }
    }

    fn bell(&self, block: u64) -> &Bell {
        &self.bells[block as usize % self.bells.len()]
    }

    /// Sleeps until the word is not locked, and says what it is then.
    #[cold]
    fn wait(&self, block: u64) -> Word {
        let bell = self.bell(block);
        let mut turn = bell.turn();
        loop {
            let word = self.load(block);
            if !word.is_locked() {
                return word;
            }
            turn = bell.rung.wait(turn).expect("no holder panics: it looks at a word");
        }
    }
}

/// A block that one writer of a part has for himself.
struct Locked<'e> {
    entries: &'e Entries,
    block: u64,
    word: Word,
    /// What stands there afterwards: the same, unless something else is put.
    put: Word,
}

impl Locked<'_> {
    /// Puts another word there, lets go of the block, and says what stood there.
    fn put(mut self, new: Word) -> Word {
        debug_assert!(!new.is_locked());
        self.put = new;
        self.word
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let entry = &self.entries.words[self.block as usize];
        // Release: shows the new object's bytes. A store is enough: nobody exchanges a locked word.
        entry.store(self.put.0, Ordering::Release);
        let bell = self.entries.bell(self.block);
        // Who has seen the word locked is asleep by the time the turn is ours, or looks again.
        drop(bell.turn());
        bell.rung.notify_all();
    }
}

#[cfg(all(test, loom))]
mod model;

#[cfg(all(test, not(loom)))]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::pins::{Pinned, Pins};

    #[test]
    fn background_work_loses_to_a_writer() {
        let entries = Entries::new(4).unwrap();
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
    fn a_writer_of_a_part_that_fails_again_and_again_locks() {
        let entries = Entries::new(1).unwrap();
        let pins = Pins::new(2);
        let mut seat = pins.seat().unwrap();
        let (mut made, mut dropped) = (0, Vec::new());
        let old = entries.update(
            0,
            &mut seat,
            |guard| {
                made += 1;
                assert!(!guard.word().is_locked());
                if !entries.load(0).is_locked() {
                    // A writer of the whole block comes in between.
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
    fn an_error_and_a_panic_let_go_of_the_block() {
        let entries = Entries::new(1).unwrap();
        let pins = Pins::new(1);
        let mut seat = pins.seat().unwrap();
        let failed = entries.update_locked(0, &mut seat, |_| Err("no space"));
        assert_eq!(failed, Err("no space"));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            entries.update_locked(0, &mut seat, |_| -> Result<Word, ()> { panic!("inside") })
        }));
        assert!(panicked.is_err());
        assert_eq!(entries.replace(0, Word::same(1)), Word::NOTHING);
    }

    #[test]
    fn what_is_pinned_is_found_until_the_guard_goes() {
        let entries = Entries::new(2).unwrap();
        let pins = Pins::new(2);
        let (mut one, mut two) = (pins.seat().unwrap(), pins.seat().unwrap());
        assert!(pins.seat().is_none());
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
        assert!(!pinned.contains(b), "a forgotten guard goes with its seat");
        drop(one);
        assert_eq!((pins.seat().is_some(), pins.seats_used()), (true, 2));
    }

    #[test]
    fn a_table_that_no_memory_can_hold_is_refused() {
        assert!(Entries::new(u64::MAX >> 4).is_err());
        let entries = Entries::new(1 << 30).unwrap();
        assert_eq!(entries.load((1 << 30) - 1), Word::NOTHING);
        assert_eq!((entries.blocks(), entries.len_bytes()), (1 << 30, 8 << 30));
    }
}
