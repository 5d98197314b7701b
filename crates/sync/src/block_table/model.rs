//! Models of `block_table` and `hazard_pointers`: a pool of a few objects whose memory loom checks,
//! so that it finds a reader of memory that is written again. Each test runs in loom's explorer.
#![allow(unsafe_code)]

use std::convert::Infallible;

use loom::cell::UnsafeCell;
use loom::sync::Arc;

use super::*;
use crate::hazard_pointers::{HazardPointers, Pinned};

/// Explores all interleavings with at most `preemptions` preemptions.
fn explore(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(f);
}

/// A block, its hazard pointers, and memory for a few objects of one number each.
struct World {
    entries: BlockTable,
    pins: std::sync::Arc<HazardPointers>,
    memory: [UnsafeCell<u32>; 4],
    /// The number of words, minus one, that refer to the object at place 0, if they are marked as
    /// shared; and how often the last of them was removed.
    parts: Mutex<(u32, u32)>,
}

// SAFETY: loom reports every racing access to the memory.
unsafe impl Send for World {}
// SAFETY: as for `Send`.
unsafe impl Sync for World {}

impl World {
    /// A world whose block contains the number 1, at place 0.
    fn new() -> Arc<World> {
        World::with_blocks(1)
    }

    /// A world with `blocks` blocks; all except the first are empty.
    fn with_blocks(blocks: u64) -> Arc<World> {
        let memory = [1, 0, 0, 0].map(UnsafeCell::new);
        let (entries, parts) = (BlockTable::new(blocks).unwrap(), Mutex::new((0, 0)));
        let world = World { entries, pins: HazardPointers::new(3), memory, parts };
        world.entries.replace(0, Word::object(0, 1));
        Arc::new(world)
    }

    /// Writes an object, as the pool does before another thread can see it.
    fn make(&self, place: usize, number: u32) -> Word {
        // SAFETY: the test gives each place to one writer; loom checks it.
        self.memory[place].with_mut(|cell| unsafe { *cell = number });
        Word::object(place as u64, 1)
    }

    /// The contents of a pinned word; zeros are 0.
    fn contents(&self, word: Word) -> u32 {
        match word.kind() {
            // SAFETY: the object is pinned, or its word is locked; loom checks it.
            Kind::Object => self.memory[word.place() as usize].with(|cell| unsafe { *cell }),
            _ => word.value(),
        }
    }

    fn read(&self) -> u32 {
        let mut seat = self.pins.slot().unwrap();
        let guard = seat.pin(&self.entries, 0);
        self.contents(guard.word())
    }

    /// Frees an object's memory, to be used again at once, unless it is pinned.
    fn retire(&self, old: Word) {
        let mut pinned = Pinned::with_capacity(3);
        self.pins.look(&mut pinned);
        if old.reference() != 0 && !pinned.contains(old) {
            // SAFETY: no thread can find or read the object any more; loom checks it.
            self.memory[old.place() as usize].with_mut(|cell| unsafe { *cell = 666 });
        }
    }

    /// Takes a reference to the first block's object, if it still exists, and makes another block
    /// refer to it. The pool does this with a refcount under its lock.
    fn share(&self, block: u64) -> bool {
        let mut seat = self.pins.slot().unwrap();
        let guard = seat.pin(&self.entries, 0);
        let reference = guard.word().reference();
        if guard.word().kind() != Kind::Object || self.contents(guard.word()) != 1 {
            return false;
        }
        let mut parts = self.parts.lock().unwrap();
        let mut word = self.entries.load(0);
        loop {
            if word.is_locked() || word.reference() != reference {
                return false;
            }
            if word.is_shared() {
                break;
            }
            let marked = word.with_shared(true);
            match self.entries.exchange(0, word, marked) {
                Ok(()) => word = marked,
                Err(found) => word = found,
            }
        }
        parts.0 += 1;
        drop((parts, guard));
        self.take_out(self.entries.replace(block, word));
        true
    }

    /// Retires a reference that was removed from a word: the last one frees the memory.
    fn take_out(&self, old: Word) {
        if old.is_shared() {
            let mut parts = self.parts.lock().unwrap();
            if parts.0 > 0 {
                parts.0 -= 1;
                return;
            }
            parts.1 += 1;
        }
        self.retire(old);
    }

    fn discard(&self, block: u64) {
        self.take_out(self.entries.replace(block, Word::NOTHING));
    }

    fn write(&self, place: usize, number: u32) {
        let old = self.entries.replace(0, self.make(place, number));
        self.retire(old);
    }

    /// Moves the same contents to another place, as compaction or recompression does.
    fn relocate(&self, place: usize) -> bool {
        let mut seat = self.pins.slot().unwrap();
        let guard = seat.pin(&self.entries, 0);
        let old = guard.word();
        if old.kind() != Kind::Object {
            return false;
        }
        let new = self.make(place, self.contents(old));
        let done = self.entries.exchange(0, old, new).is_ok();
        drop(guard);
        if done {
            self.retire(old);
        }
        done
    }

    /// Adds to the number, as a writer of a part of the block does. Each attempt uses its own
    /// place, starting at `place`.
    fn add(&self, mut place: usize, amount: u32) {
        let mut seat = self.pins.slot().unwrap();
        let old = self.entries.update(
            0,
            &mut seat,
            |guard| {
                let made = self.make(place, self.contents(guard.word()) + amount);
                place += 1;
                Ok::<_, Infallible>(made)
            },
            drop,
        );
        self.retire(old.unwrap());
    }

    /// Adds to the number with the block locked from the start.
    fn add_locked(&self, place: usize, amount: u32) {
        let mut seat = self.pins.slot().unwrap();
        let make = |guard: &HazardGuard<'_>| {
            Ok::<_, Infallible>(self.make(place, self.contents(guard.word()) + amount))
        };
        let old = self.entries.update_locked(0, &mut seat, make);
        self.retire(old.unwrap());
    }
}

/// Runs two threads concurrently in one world.
fn concurrently(
    preemptions: usize,
    one: impl Fn(&World) + Copy + Send + Sync + 'static,
    two: impl Fn(&World) + Copy + Send + Sync + 'static,
    after: impl Fn(&World) + Copy + Send + Sync + 'static,
) {
    explore(preemptions, move || {
        let world = World::new();
        let other = Arc::clone(&world);
        let thread = loom::thread::spawn(move || one(&other));
        two(&world);
        thread.join().unwrap();
        after(&world);
    });
}

#[test]
fn reader_sees_old_or_new_data() {
    let read = |world: &World| assert!([1, 2].contains(&world.read()));
    concurrently(6, read, |world| world.write(1, 2), |world| assert_eq!(world.read(), 2));
}

/// The memory of the first object is reused for the third while a reader may be about to pin it:
/// the word changes back to its old value.
#[test]
fn reader_survives_aba_of_word() {
    let read = |world: &World| assert!([1, 2, 3].contains(&world.read()));
    let write = |world: &World| {
        let old = world.entries.replace(0, world.make(1, 2));
        let mut pinned = Pinned::with_capacity(3);
        world.pins.look(&mut pinned);
        if !pinned.contains(old) {
            world.write(old.place() as usize, 3);
        }
    };
    concurrently(6, read, write, |world| assert!([2, 3].contains(&world.read())));
}

#[test]
fn two_readers_keep_pinned_objects_during_write() {
    explore(3, || {
        let world = World::new();
        let reader = || {
            let world = Arc::clone(&world);
            loom::thread::spawn(move || assert!([1, 2].contains(&world.read())))
        };
        let readers = [reader(), reader()];
        world.write(1, 2);
        readers.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn reader_during_discard_sees_data_or_zeros() {
    let read = |world: &World| assert!([1, 0].contains(&world.read()));
    let discard = |world: &World| {
        let old = world.entries.replace(0, Word::NOTHING);
        world.retire(old);
    };
    concurrently(6, read, discard, |world| assert_eq!(world.read(), 0));
}

#[test]
fn compaction_keeps_object_of_reader() {
    let read = |world: &World| assert_eq!(world.read(), 1);
    concurrently(6, read, |world| assert!(world.relocate(1)), |world| assert_eq!(world.read(), 1));
}

#[test]
fn recompression_yields_to_writer() {
    let relocate = |world: &World| {
        world.relocate(2);
    };
    concurrently(6, relocate, |world| world.write(1, 2), |world| assert_eq!(world.read(), 2));
}

#[test]
fn concurrent_background_work_retires_once() {
    let relocate = |world: &World| {
        world.relocate(1);
    };
    let after = |world: &World| assert_eq!(world.read(), 1);
    concurrently(
        4,
        relocate,
        |world| {
            world.relocate(2);
        },
        after,
    );
}

/// Idle tracking and a reader's access exchange the flags of a word whose object is replaced
/// meanwhile.
#[test]
fn aging_does_not_restore_replaced_word() {
    let age = |world: &World| {
        world.entries.grow_older(0);
        world.entries.touch(0, world.entries.load(0));
    };
    concurrently(6, age, |world| world.write(1, 2), |world| assert_eq!(world.read(), 2));
}

#[test]
fn two_partial_writes_both_take_effect() {
    explore(4, || {
        let world = World::new();
        let other = Arc::clone(&world);
        let thread = loom::thread::spawn(move || other.add(1, 10));
        // The other thread fails at most once: it needs one place for each attempt.
        world.add_locked(3, 100);
        thread.join().unwrap();
        assert_eq!(world.read(), 111);
    });
}

#[test]
fn locked_updates_exclude_each_other() {
    let one = |world: &World| world.add_locked(1, 10);
    concurrently(5, one, |world| world.add_locked(2, 100), |world| assert_eq!(world.read(), 111));
}

/// A writer of the whole block waits for the bit, or its contents are merged: a merge with older
/// contents never undoes its write.
#[test]
fn write_during_locked_update_is_not_lost() {
    let one = |world: &World| world.add_locked(1, 10);
    let after = |world: &World| assert!([2, 12].contains(&world.read()));
    concurrently(5, one, |world| world.write(2, 2), after);
}

#[test]
fn reader_ignores_lock_bit() {
    let one = |world: &World| world.add_locked(1, 10);
    let read = |world: &World| assert!([1, 11].contains(&world.read()));
    concurrently(5, one, read, |world| assert_eq!(world.read(), 11));
}

/// A block takes a reference to an object while its only word is removed: the block has the
/// contents, or nothing.
#[test]
fn share_during_discard_keeps_object() {
    explore(5, || {
        let world = World::with_blocks(2);
        let other = Arc::clone(&world);
        let thread = loom::thread::spawn(move || other.discard(0));
        let joined = world.share(1);
        thread.join().unwrap();
        let word = world.entries.load(1);
        assert_eq!(word.kind() == Kind::Object, joined);
        if joined {
            assert_eq!(world.contents(word), 1);
            world.discard(1);
        }
    });
}

/// Two words of one object are removed while a third block tries to take a reference. The memory is
/// freed once, and not while the third block refers to it.
#[test]
fn last_reference_retires_object() {
    explore(3, || {
        let world = World::with_blocks(3);
        assert!(world.share(1));
        let (one, two) = (Arc::clone(&world), Arc::clone(&world));
        let threads = [
            loom::thread::spawn(move || one.discard(0)),
            loom::thread::spawn(move || two.discard(1)),
        ];
        if world.share(2) {
            assert_eq!(world.contents(world.entries.load(2)), 1);
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        if world.entries.load(2).kind() == Kind::Object {
            assert_eq!(world.contents(world.entries.load(2)), 1);
            world.discard(2);
        }
        assert_eq!(*world.parts.lock().unwrap(), (0, 1), "the last one is removed once");
    });
}

/// A move exchanges one of two words: the other word keeps the object, and its reader is not
/// disturbed.
#[test]
fn relocation_of_one_reference_keeps_other() {
    explore(4, || {
        let world = World::with_blocks(2);
        assert!(world.share(1));
        let other = Arc::clone(&world);
        let thread = loom::thread::spawn(move || {
            let mut seat = other.pins.slot().unwrap();
            let guard = seat.pin(&other.entries, 0);
            let old = guard.word();
            let new = other.make(1, other.contents(old));
            let done = other.entries.exchange(0, old, new).is_ok();
            drop(guard);
            if done {
                other.take_out(old);
            }
        });
        assert_eq!(world.read(), 1);
        world.discard(1);
        thread.join().unwrap();
        assert_eq!(world.read(), 1);
    });
}
