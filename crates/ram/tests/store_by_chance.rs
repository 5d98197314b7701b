//! The store under random interleavings from shuttle: eight threads, more than loom can explore.
//! `make shuttle`; without `--cfg shuttle` this file is empty.
#![cfg(shuttle)]
#![allow(clippy::unwrap_used)]

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use blockyard_ram::{Access, New, Pool, PoolConfig, Store};
use blockyard_sync::block_table::{BlockTable, Kind, PLACE_BYTES, Word};
use shuttle::rand::{Rng, thread_rng};
use shuttle::thread;

const BLOCKS: u64 = 3;
const SEGMENT: usize = 4096;

fn store() -> Arc<Store> {
    store_of(BLOCKS, false)
}

fn store_of(blocks: u64, counted: bool) -> Arc<Store> {
    let mut config = PoolConfig::new(blocks * 256, 256);
    config.counted = counted;
    config.slots_max = 9;
    config.shards = NonZeroU32::new(2);
    config.segment_bytes = Some(SEGMENT);
    Store::new(BlockTable::new(blocks).unwrap(), Pool::new(&config).unwrap())
}

/// Runs a body under both of shuttle's random schedulers.
fn draw(body: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(body.clone(), 2_000);
    shuttle::check_pct(body, 2_000, 3);
}

/// `17 + value` bytes that all have this value.
fn bytes(value: u8) -> Vec<u8> {
    vec![value; 17 + usize::from(value)]
}

/// The value of a block's bytes; checks that they are intact.
fn value(word: Word, bytes: &[u8]) -> Option<u8> {
    if word.kind() != Kind::Object {
        return None;
    }
    let value = bytes[0];
    assert_eq!(bytes.len(), 17 + usize::from(value), "{word:?}");
    // Lets other threads run during the read.
    for part in bytes.chunks(40) {
        thread::yield_now();
        assert!(part.iter().all(|&byte| byte == value), "{word:?} changed under a reader");
    }
    Some(value)
}

fn read(access: &mut Access, block: u64) -> Option<u8> {
    access.read(block, value)
}

/// All operations concurrently; afterwards the pool holds exactly what the words refer to.
#[test]
fn a_storm_of_eight() {
    draw(|| {
        let store = store();
        let work = |number: u8| {
            let store = Arc::clone(&store);
            move || {
                let mut access = store.access().unwrap();
                for _ in 0..4 {
                    let block = thread_rng().gen_range(0..BLOCKS);
                    let bytes = bytes(number * 16 + thread_rng().gen_range(0..16));
                    match thread_rng().gen_range(0..8) {
                        0..2 => drop(access.replace(block, New::Bytes(&bytes, Word::NOTHING))),
                        2 => drop(access.replace(block, New::Word(Word::NOTHING))),
                        3 => drop(access.update(block, |word, old, maker| {
                            value(word, old);
                            maker.make(New::Bytes(&bytes, Word::NOTHING))
                        })),
                        4 => {
                            let _ =
                                access.remake(block, |word, old, maker| match value(word, old) {
                                    None => Ok(None),
                                    Some(_) => maker.make(New::Bytes(old, word)).map(Some),
                                });
                        }
                        5 => store.grow_older(block),
                        6 if number == 0 => {
                            access.compact(|| false);
                        }
                        _ => {
                            read(&mut access, block);
                        }
                    }
                }
            }
        };
        let threads: Vec<_> = (0..8).map(|number| thread::spawn(work(number))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let mut access = store.access().unwrap();
        access.reclaim();
        let held = (0..BLOCKS).filter(|&block| read(&mut access, block).is_some()).count();
        let usage = store.pool().usage();
        assert_eq!((usage.objects, usage.retired_bytes), (held as u64, 0));
    });
}

/// All operations concurrently, while blocks share objects.
#[test]
fn a_storm_of_eight_that_share() {
    draw(|| {
        let store = store_of(BLOCKS, true);
        let work = |number: u8| {
            let store = Arc::clone(&store);
            move || {
                let mut access = store.access().unwrap();
                for _ in 0..4 {
                    let block = thread_rng().gen_range(0..BLOCKS);
                    let of = thread_rng().gen_range(0..BLOCKS);
                    let bytes = bytes(number * 16 + thread_rng().gen_range(0..16));
                    match thread_rng().gen_range(0..9) {
                        0..2 => drop(access.replace(block, New::Bytes(&bytes, Word::NOTHING))),
                        2 => drop(access.replace(block, New::Word(Word::NOTHING))),
                        3..6 => {
                            access.share(block, of, |word, bytes| value(word, bytes).is_some());
                        }
                        6 => {
                            access.share_remade(block, of, |(own, bytes), (other, theirs)| {
                                value(own, bytes).is_some() && value(other, theirs).is_some()
                            });
                        }
                        7 if number < 2 => {
                            access.compact(|| false);
                        }
                        _ => {
                            read(&mut access, block);
                        }
                    }
                }
            }
        };
        let threads: Vec<_> = (0..8).map(|number| thread::spawn(work(number))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let mut access = store.access().unwrap();
        access.reclaim();
        let words = (0..BLOCKS).map(|block| store.word(block));
        let mut places: Vec<_> =
            words.filter(|word| word.kind() == Kind::Object).map(Word::place).collect();
        places.sort_unstable();
        places.dedup();
        let usage = store.pool().usage();
        assert_eq!((usage.objects, usage.retired_bytes), (places.len() as u64, 0));
        for block in 0..BLOCKS {
            read(&mut access, block);
            access.replace(block, New::Word(Word::NOTHING)).unwrap();
        }
        access.reclaim();
        let usage = store.pool().usage();
        assert_eq!((usage.objects, usage.duplicate_bytes), (0, 0));
    });
}

/// Seven threads increment a counter in one block while one overwrites another block and compacts:
/// no increment is lost, and every thread that waits for the lock bit is woken.
#[test]
fn seven_writers_of_parts() {
    draw(|| {
        let store = store();
        store.access().unwrap().replace(0, New::Bytes(&[0; 8], Word::NOTHING)).unwrap();
        let count = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
        let add = || {
            let store = Arc::clone(&store);
            thread::spawn(move || {
                let mut access = store.access().unwrap();
                for _ in 0..3 {
                    let added = access.update(0, |_, old, maker| {
                        let more = count(old) + 1;
                        thread::yield_now();
                        maker.make(New::Bytes(&more.to_le_bytes(), Word::NOTHING))
                    });
                    added.unwrap();
                }
            })
        };
        let threads: Vec<_> = (0..7).map(|_| add()).collect();
        let mut access = store.access().unwrap();
        for number in 0..3 {
            access.replace(1, New::Bytes(&bytes(number), Word::NOTHING)).unwrap();
            access.compact(|| false);
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        access.read(0, |_, bytes| assert_eq!(count(bytes), 21));
    });
}

/// Channels of one shard fill holes of the other shard, and free there what they overwrite, while
/// that shard is read and compacted.
#[test]
fn holes_of_another_shard_are_filled_while_it_is_compacted() {
    const MANY: u64 = 40;
    const WRITTEN: u64 = 6;
    // In a small pool, every second segment belongs to the same shard.
    let shard = |word: Word| word.place() / (SEGMENT as u64 / PLACE_BYTES) % 2;
    // Not shuttle's atomics: they count over all runs.
    static FILLED: AtomicU64 = AtomicU64::new(0);
    static MOVED: AtomicU64 = AtomicU64::new(0);
    draw(move || {
        let store = store_of(MANY, false);
        // Shards are assigned in turn.
        let mut accesses: Vec<_> = (0..6).map(|_| store.access().unwrap()).collect();
        let mut first = accesses.remove(0);
        for block in 0..MANY {
            let bytes = bytes(180 + block as u8);
            first.replace(block, New::Bytes(&bytes, Word::NOTHING)).unwrap();
        }
        let full = shard(store.word(0));
        assert!((0..MANY).all(|block| shard(store.word(block)) == full));
        for block in (1..MANY).step_by(2) {
            first.replace(block, New::Word(Word::NOTHING)).unwrap();
        }
        first.reclaim();
        let work = |(number, mut access): (usize, Access)| {
            move || {
                for step in 0..4 {
                    let block = thread_rng().gen_range(0..WRITTEN);
                    match number {
                        // The channels of the other shard.
                        0 | 2 | 4 => {
                            let bytes = bytes(150 + number as u8 * 8 + step);
                            access.replace(block, New::Bytes(&bytes, Word::NOTHING)).unwrap();
                            access.reclaim();
                        }
                        1 if step < 2 => {
                            let moved = access.compact(|| false).objects_moved;
                            MOVED.fetch_add(moved, Relaxed);
                        }
                        1 => {}
                        _ => {
                            read(&mut access, block);
                        }
                    }
                }
            }
        };
        let threads = accesses.into_iter().enumerate().map(work).map(thread::spawn);
        let threads: Vec<_> = threads.collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        // Every second block was empty, so channels of the other shard have written these.
        let words = (1..WRITTEN).step_by(2).map(|block| store.word(block));
        let objects = words.filter(|word| word.kind() == Kind::Object);
        FILLED.fetch_add(objects.filter(|&word| shard(word) == full).count() as u64, Relaxed);
        first.reclaim();
        let held = (0..MANY).filter(|&block| read(&mut first, block).is_some()).count();
        let usage = store.pool().usage();
        assert_eq!((usage.objects, usage.retired_bytes), (held as u64, 0));
    });
    let (filled, moved) = (FILLED.load(Relaxed), MOVED.load(Relaxed));
    assert!(filled > 0 && moved > 0, "nothing was shown");
}
