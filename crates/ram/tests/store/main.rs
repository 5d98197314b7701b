//! The store compared with a plain map of blocks: random writes, writes of parts, discards, marks
//! and compactions, with allocation failures; with one thread and with several.
#![allow(clippy::unwrap_used)]

mod limits;
mod others;

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use blockyard_ram::{Access, New, NoSpace, Pool, PoolConfig, Store};
use blockyard_sync::block_table::{BlockTable, Kind, Word};

/// Largest object of the tests.
const BLOCK: usize = if cfg!(miri) { 512 } else { 4096 };
/// Iterations: Miri takes a second for a millisecond's work.
const SCALE: u32 = if cfg!(miri) { 1 } else { 40 };

fn store(blocks: u64, change: impl FnOnce(&mut PoolConfig)) -> Arc<Store> {
    let mut config = PoolConfig::new(blocks * BLOCK as u64, BLOCK);
    config.slots_max = 16;
    config.shards = NonZeroU32::new(2);
    change(&mut config);
    Store::new(BlockTable::new(blocks).unwrap(), Pool::new(&config).unwrap())
}

/// Bytes that contain their block, writer number and length, and a checksum.
fn stamped(block: u64, number: u64, len_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; len_bytes.max(24)];
    let mut random = fastrand::Rng::with_seed(block << 32 ^ number);
    random.fill(&mut bytes);
    bytes[..8].copy_from_slice(&block.to_le_bytes());
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// The number in a stamped block; verifies the bytes.
fn number_of(block: u64, word: Word, bytes: &[u8]) -> Option<u64> {
    match word.kind() {
        Kind::Nothing => None,
        Kind::Same => Some(u64::from(word.value())),
        kind => {
            assert_eq!(kind, Kind::Object);
            let number = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
            assert_eq!(bytes, stamped(block, number, bytes.len()), "block {block}");
            Some(number)
        }
    }
}

fn read(access: &mut Access, block: u64) -> Option<u64> {
    access.read(block, |word, bytes| number_of(block, word, bytes))
}

/// A random length as compressors produce them: many below half a block, some uncompressed.
fn any_len(random: &mut fastrand::Rng) -> usize {
    match random.u32(..10) {
        0 => BLOCK,
        1..4 => random.usize(24..BLOCK / 8),
        _ => random.usize(24..BLOCK),
    }
}

#[test]
fn agrees_with_a_plain_map() {
    for seed in 0..if cfg!(miri) { 1 } else { 3 } {
        let blocks = if cfg!(miri) { 60 } else { 300 };
        let store = store(blocks, |config| config.segment_bytes = Some(32 << 10));
        store.pool().fail_allocations(NonZeroU32::new(20), seed);
        let mut access = store.access().unwrap();
        let mut plain = vec![None; blocks as usize];
        let mut random = fastrand::Rng::with_seed(seed);
        let mut failures = 0;
        for step in 1..=500 * u64::from(SCALE) {
            let block = random.u64(..blocks);
            let expected = &mut plain[block as usize];
            let bytes = stamped(block, step, any_len(&mut random));
            let failed = match random.u32(..100) {
                0..50 => {
                    let new =
                        access.replace(block, New::Bytes(&bytes, Word::NOTHING.with_codec(1)));
                    new.map(|_| *expected = Some(step)).is_err()
                }
                50..60 => {
                    access.replace(block, New::Word(Word::same(step as u32))).unwrap();
                    *expected = Some(step);
                    false
                }
                60..70 => {
                    access.replace(block, New::Word(Word::NOTHING)).unwrap();
                    *expected = None;
                    false
                }
                70..80 => access
                    .update(block, |word, old, maker| {
                        assert_eq!(number_of(block, word, old), *expected);
                        maker.make(New::Bytes(&bytes, Word::NOTHING))
                    })
                    .map(|_| *expected = Some(step))
                    .is_err(),
                80..90 => access
                    .remake(block, |word, old, maker| {
                        assert_eq!(number_of(block, word, old), *expected);
                        if old.is_empty() {
                            return Ok(None);
                        }
                        // Different bytes with the same meaning: recompression.
                        let number = expected.unwrap();
                        let bytes = stamped(block, number, any_len(&mut random));
                        maker.make(New::Bytes(&bytes, word)).map(Some)
                    })
                    .is_err(),
                90..99 => {
                    store.grow_older(block);
                    false
                }
                _ => {
                    access.compact(|| false);
                    false
                }
            };
            failures += u32::from(failed);
            assert_eq!(read(&mut access, block), plain[block as usize], "seed {seed} step {step}");
        }
        (0..blocks).for_each(|block| {
            assert_eq!(read(&mut access, block), plain[block as usize], "seed {seed} at {block}");
        });
        assert!(failures > 0, "seed {seed}: one in 20 was to fail");
        check_accounts(&mut access, seed);
    }
}

/// Checks that the pool's counters match the words and that nothing is left when all is discarded.
fn check_accounts(access: &mut Access, seed: u64) {
    let store = Arc::clone(access.store());
    access.reclaim();
    let words = (0..store.blocks()).map(|block| store.word(block));
    // By place: several words may refer to one object.
    let (mut objects, mut duplicates) = (HashMap::new(), 0);
    for word in words.filter(|word| word.kind() == Kind::Object) {
        if let Some(other) = objects.insert(word.place(), word) {
            assert!(word.is_shared() && other.is_shared(), "seed {seed}: {word:?} {other:?}");
            duplicates += word.len_bytes() as u64;
        }
    }
    let usage = store.pool().usage();
    let stored = objects.values().map(|word| word.len_bytes() as u64).sum::<u64>();
    assert_eq!((usage.objects, usage.stored_bytes), (objects.len() as u64, stored), "seed {seed}");
    assert_eq!(usage.duplicate_bytes, duplicates, "seed {seed}");
    assert_eq!(usage.retired_bytes, 0);
    assert_eq!(
        usage.used_bytes,
        usage.stored_bytes + usage.grain_bytes + usage.free_bytes,
        "seed {seed}"
    );
    let classes = store.pool().size_classes();
    assert_eq!(classes.iter().map(|class| class.objects).sum::<u64>(), usage.objects);
    for block in 0..store.blocks() {
        access.replace(block, New::Word(Word::NOTHING)).unwrap();
    }
    access.compact(|| false);
    let usage = store.pool().usage();
    assert_eq!((usage.objects, usage.used_bytes), (0, 0), "seed {seed}: {usage:?}");
    assert_eq!(usage.duplicate_bytes, 0, "seed {seed}");
    assert!(usage.used_bytes_max > 0);
}

/// The number in contents that were stamped for block 0, in whichever block they are.
fn number_in(word: Word, bytes: &[u8]) -> Option<u64> {
    number_of(0, word, bytes)
}

/// Few contents in many blocks, which share objects. Every block keeps its contents, and no object
/// is freed too early or too late.
#[test]
fn blocks_that_share_agree_with_a_plain_map() {
    for seed in 0..if cfg!(miri) { 1 } else { 3 } {
        let blocks = if cfg!(miri) { 20 } else { 200 };
        let store = store(blocks, |config| {
            config.segment_bytes = Some(32 << 10);
            config.counted = true;
        });
        store.pool().fail_allocations(NonZeroU32::new(20), seed);
        let mut access = store.access().unwrap();
        let mut plain = vec![None; blocks as usize];
        let mut random = fastrand::Rng::with_seed(seed);
        let mut shared = 0;
        for step in 1..=500 * u64::from(SCALE) {
            let block = random.u64(..blocks);
            shared += u64::from(share_or_change(&mut access, &mut plain, &mut random, block, step));
            let found = access.read(block, number_in);
            assert_eq!(found, plain[block as usize], "seed {seed} step {step}");
        }
        for block in 0..blocks {
            let found = access.read(block, number_in);
            assert_eq!(found, plain[block as usize], "seed {seed} at {block}");
        }
        assert!(shared > 0);
        check_accounts(&mut access, seed);
    }
}

/// A random operation on a block; returns whether the block now shares an object.
fn share_or_change(
    access: &mut Access,
    plain: &mut [Option<u64>],
    random: &mut fastrand::Rng,
    block: u64,
    step: u64,
) -> bool {
    let of = random.u64(..plain.len() as u64);
    let theirs = plain[of as usize];
    let expected = &mut plain[block as usize];
    let bytes = stamped(0, step, any_len(random));
    let new = New::Bytes(&bytes, Word::NOTHING);
    match random.u32(..100) {
        0..20 => {
            if access.replace(block, new).is_ok() {
                *expected = Some(step);
            }
        }
        20..60 => {
            let done = access.share(block, of, |word, bytes| number_in(word, bytes) == theirs);
            assert_eq!(done.is_some(), theirs.is_some(), "step {step}");
            if done.is_some() {
                *expected = theirs;
            }
            return done.is_some();
        }
        60..75 => {
            access.replace(block, New::Word(Word::NOTHING)).unwrap();
            *expected = None;
        }
        75..80 => {
            let changed = access.update(block, |word, old, maker| {
                assert_eq!(number_in(word, old), *expected);
                maker.make(new)
            });
            if changed.is_ok() {
                *expected = Some(step);
            }
        }
        80..90 => {
            let len = any_len(random);
            let _ = access.remake(block, |word, old, maker| {
                let Some(number) = number_in(word, old) else { return Ok(None) };
                maker.make(New::Bytes(&stamped(0, number, len), word)).map(Some)
            });
        }
        90..97 => {
            access.share_remade(block, of, |(own, bytes), (other, theirs)| {
                number_in(own, bytes) == number_in(other, theirs)
            });
        }
        97..99 => access.store().grow_older(block),
        _ => {
            access.compact(|| false);
        }
    }
    false
}

/// Several threads share objects concurrently: every block's contents are intact, and nothing is
/// left at the end.
#[test]
fn everybody_shares_at_once() {
    let blocks = 16;
    let store = store(blocks, |config| {
        config.segment_bytes = Some(32 << 10);
        config.counted = true;
    });
    let whole = number_in;
    std::thread::scope(|scope| {
        for thread in 0..6 {
            let store = &store;
            scope.spawn(move || {
                let mut access = store.access().unwrap();
                let mut random = fastrand::Rng::with_seed(thread);
                for step in 0..60 * u64::from(SCALE) {
                    let (block, of) = (random.u64(..blocks), random.u64(..blocks));
                    let number = thread << 32 | step;
                    let bytes = stamped(0, number, any_len(&mut random));
                    match random.u32(..if thread == 0 { 110 } else { 100 }) {
                        0..20 => drop(access.replace(block, New::Bytes(&bytes, Word::NOTHING))),
                        20..55 => {
                            access.share(block, of, |word, bytes| whole(word, bytes).is_some());
                        }
                        55..65 => drop(access.replace(block, New::Word(Word::NOTHING))),
                        65..75 => {
                            access.share_remade(block, of, |(own, bytes), (other, theirs)| {
                                whole(own, bytes).is_some() && whole(other, theirs).is_some()
                            });
                        }
                        75..80 => store.grow_older(block),
                        80..100 => {
                            access.read(block, whole);
                        }
                        _ => {
                            access.compact(|| false);
                        }
                    }
                }
            });
        }
    });
    let mut access = store.access().unwrap();
    for block in 0..blocks {
        access.read(block, whole);
    }
    check_accounts(&mut access, 0);
}

/// Full stretches become huge pages if the system supports it, with no visible effect: contents and
/// counters stay the same, and emptied pages go back to the system. Too long for Miri.
#[cfg(not(miri))]
#[test]
fn full_pages_are_gathered_once() {
    let blocks = 4 * 512 + 100;
    let store = store(blocks, |config| config.shards = NonZeroU32::new(2));
    let (mut one, mut two) = (store.access().unwrap(), store.access().unwrap());
    for block in 0..blocks {
        let access = if block % 2 == 0 { &mut one } else { &mut two };
        access.replace(block, New::Bytes(&stamped(block, 1, BLOCK), Word::NOTHING)).unwrap();
    }
    let used = store.pool().usage().used_bytes;
    assert_eq!(store.pool().gather(1, || false), 1);
    assert_eq!(store.pool().gather(u64::MAX, || true), 0);
    assert_eq!(store.pool().gather(u64::MAX, || false), 3);
    assert_eq!(store.pool().gather(u64::MAX, || false), 0, "they are huge");
    assert_eq!(store.pool().usage().used_bytes, used);
    for block in 0..blocks {
        assert_eq!(read(&mut one, block), Some(1));
    }
    for block in 0..blocks / 2 {
        one.replace(block, New::Word(Word::NOTHING)).unwrap();
    }
    one.reclaim();
    assert!(store.pool().usage().used_bytes <= used * 6 / 10);
    for block in 0..blocks {
        one.replace(block, New::Bytes(&stamped(block, 2, BLOCK), Word::NOTHING)).unwrap();
    }
    assert!(store.pool().gather(u64::MAX, || false) > 0, "they were small again");
    for block in 0..blocks {
        assert_eq!(read(&mut two, block), Some(2));
    }
    check_accounts(&mut one, 0);
}

/// A compaction of the whole pool does not block a small compaction by a write that reached the
/// limit.
#[test]
fn others_compact_between_passes() {
    let store = store(600, |config| config.segment_bytes = Some(4 * BLOCK));
    let (mut one, mut two) = (store.access().unwrap(), store.access().unwrap());
    for block in 0..600 {
        let bytes = stamped(block, 1, BLOCK / 2);
        one.replace(block, New::Bytes(&bytes, Word::NOTHING)).unwrap();
    }
    (0..600).filter(|block| block % 3 > 0).for_each(|block| {
        one.replace(block, New::Word(Word::NOTHING)).unwrap();
    });
    let mut between = 0;
    // `stop` is called before each pass without the lock. If the lock were held, this thread would
    // deadlock with itself.
    let done = one.compact(|| {
        between += 1;
        two.compact_some(0, || false);
        false
    });
    assert!(done.passes > 0 && between > 0, "{done:?}");
    for block in (0..600).step_by(3) {
        assert_eq!(read(&mut two, block), Some(1));
    }
    check_accounts(&mut one, 0);
}

/// A pass that is stopped leaves nearly all holes usable. Too long for Miri.
#[cfg(not(miri))]
#[test]
fn a_pass_that_is_stopped_leaves_its_holes() {
    let (blocks, len) = (40_000, 200);
    let store = store(blocks, |config| {
        config.shards = NonZeroU32::new(1);
        config.segment_bytes = Some(64 << 10);
    });
    let mut access = store.access().unwrap();
    let write = |access: &mut Access, block| {
        let bytes = stamped(block, 1, len);
        access.replace(block, New::Bytes(&bytes, Word::NOTHING)).unwrap();
    };
    (0..blocks).for_each(|block| write(&mut access, block));
    (1..blocks).step_by(2).for_each(|block| {
        access.replace(block, New::Word(Word::NOTHING)).unwrap();
    });
    access.reclaim();
    let mut asked = 0;
    let done = access.compact(|| {
        asked += 1;
        asked > 1
    });
    assert_eq!(done.objects_moved, 1023, "it was stopped in the middle of a pass");
    let used = store.pool().usage().used_bytes;
    // Each moved object has filled one hole, and has left one that is not recorded.
    let fit = blocks / 2 - 2 * done.objects_moved - 500;
    (1..blocks).step_by(2).take(fit as usize).for_each(|block| write(&mut access, block));
    assert!(store.pool().usage().used_bytes <= used, "{:?}", store.pool().usage());
    check_accounts(&mut access, 0);
}

/// A compaction of a long table checks for a stop during the walk, even if nothing is moved, so
/// that the device can close.
#[cfg(not(miri))]
#[test]
fn compaction_of_a_long_table_checks_for_a_stop() {
    let store = store(1 << 18, |config| config.segment_bytes = Some(4 * BLOCK));
    let mut access = store.access().unwrap();
    for block in 0..60 {
        let bytes = stamped(block, 1, BLOCK / 2);
        access.replace(block, New::Bytes(&bytes, Word::NOTHING)).unwrap();
    }
    (0..60).filter(|block| block % 3 > 0).for_each(|block| {
        access.replace(block, New::Word(Word::NOTHING)).unwrap();
    });
    let mut asked = 0;
    let done = access.compact(|| {
        asked += 1;
        false
    });
    assert!(done.passes > 0 && done.objects_moved > 0, "{done:?}");
    assert!(asked >= 4 * done.passes, "{asked} times in {done:?}");
    check_accounts(&mut access, 0);
}

#[test]
fn a_reader_keeps_its_object_and_no_other() {
    let store = store(200, |_| {});
    let (mut one, mut two) = (store.access().unwrap(), store.access().unwrap());
    for block in 0..200 {
        one.replace(block, New::Bytes(&stamped(block, 1, BLOCK / 4), Word::NOTHING)).unwrap();
    }
    two.read(7, |word, bytes| {
        for block in 0..200 {
            one.replace(block, New::Bytes(&stamped(block, 2, BLOCK / 4), Word::NOTHING)).unwrap();
        }
        one.compact(|| false);
        assert_eq!(number_of(7, word, bytes), Some(1));
        assert_eq!(one.store().pool().usage().retired_bytes, BLOCK as u64 / 4);
    });
    one.reclaim();
    assert_eq!((store.pool().usage().retired_bytes, read(&mut one, 7)), (0, Some(2)));
}

#[test]
fn as_many_channels_as_it_was_made_for() {
    let store = store(10, |config| config.slots_max = 2);
    let (one, two) = (store.access(), store.access());
    assert!(one.is_some() && two.is_some() && store.access().is_none());
    drop(one);
    assert!(store.access().is_some());
}

/// Writes, writes of parts, reads, compaction and aging concurrently, with more threads than CPUs.
#[test]
fn everybody_at_once() {
    let blocks = 64;
    let store = store(blocks, |config| config.segment_bytes = Some(32 << 10));
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let store = &store;
            scope.spawn(move || {
                let mut access = store.access().unwrap();
                let mut random = fastrand::Rng::with_seed(thread);
                for step in 0..60 * u64::from(SCALE) {
                    // Half of the operations go to a few hot blocks.
                    let block = if random.bool() { random.u64(..4) } else { random.u64(..blocks) };
                    let number = thread << 32 | step;
                    let bytes = stamped(block, number, any_len(&mut random));
                    match random.u32(..if thread == 0 { 120 } else { 100 }) {
                        0..30 => drop(access.replace(block, New::Bytes(&bytes, Word::NOTHING))),
                        30..35 => drop(access.replace(block, New::Word(Word::NOTHING))),
                        35..45 => drop(access.update(block, |word, old, maker| {
                            number_of(block, word, old);
                            maker.make(New::Bytes(&bytes, Word::NOTHING))
                        })),
                        45..50 => store.grow_older(block),
                        50..100 => {
                            read(&mut access, block);
                        }
                        _ => {
                            access.compact(|| false);
                        }
                    }
                }
            });
        }
    });
    let mut access = store.access().unwrap();
    for block in 0..blocks {
        read(&mut access, block);
    }
    check_accounts(&mut access, 0);
}

/// Partial writes increment a counter in one block, while other blocks are overwritten and
/// compaction runs. No increment is lost.
#[test]
fn no_part_is_lost() {
    let store = store(2, |_| {});
    let mut access = store.access().unwrap();
    access.replace(0, New::Bytes(&0u64.to_le_bytes(), Word::NOTHING)).unwrap();
    let (threads, each) = (4, 50 * u64::from(SCALE));
    let count = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let store = &store;
            scope.spawn(move || {
                let mut access = store.access().unwrap();
                for _ in 0..each {
                    let added = access.update(0, |_, bytes, maker| {
                        let more = (count(bytes) + 1).to_le_bytes();
                        maker.make(New::Bytes(&more, Word::NOTHING))
                    });
                    added.unwrap();
                }
            });
        }
    });
    access.read(0, |_, bytes| assert_eq!(count(bytes), threads * each));
}
