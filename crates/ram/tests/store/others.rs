//! Memory use when one channel works on data that another has written: channels are bound to
//! shards, and freed space belongs to the shard in which it lies.

use super::*;

const SEGMENT: u64 = if cfg!(miri) { 16 << 10 } else { 64 << 10 };

/// Checks the maximum of used memory: at most a tenth more than before, plus one segment that the
/// working channel has begun. That segment is negligible on a disk, but not in the small test for
/// Miri.
fn check_most(store: &Store, before: u64) {
    let most = store.pool().usage().used_bytes_max;
    let bound = before + before / 10 + SEGMENT;
    assert!(most < bound, "{before} bytes became {most}, above {bound}");
}

fn shuffled(blocks: u64) -> Vec<u64> {
    let mut order: Vec<u64> = (0..blocks).collect();
    fastrand::Rng::with_seed(3).shuffle(&mut order);
    order
}

/// Blocks of many sizes that one channel has written, and another channel, bound to the other
/// shard.
fn written(blocks: u64) -> (Arc<Store>, Access) {
    let store = store(blocks, |config| config.segment_bytes = Some(SEGMENT as usize));
    let (mut first, other) = (store.access().unwrap(), store.access().unwrap());
    let mut random = fastrand::Rng::with_seed(1);
    for block in 0..blocks {
        let bytes = stamped(block, 1, any_len(&mut random));
        first.replace(block, New::Bytes(&bytes, Word::NOTHING)).unwrap();
    }
    store.pool().reset_used_max();
    (store, other)
}

/// Regression: a client that reconnected and overwrote its disk at random used twice the memory.
#[test]
fn overwriting_the_data_of_another_channel_takes_no_more_memory() {
    let blocks = if cfg!(miri) { 2000 } else { 8000 };
    let (store, mut other) = written(blocks);
    let before = store.pool().usage().used_bytes;
    let mut random = fastrand::Rng::with_seed(2);
    for block in shuffled(blocks) {
        let bytes = stamped(block, 2, any_len(&mut random));
        other.replace(block, New::Bytes(&bytes, Word::NOTHING)).unwrap();
    }
    check_most(&store, before);
    check_accounts(&mut other, 2);
}

/// Regression: recompression of other channels' data used half as much memory again.
#[test]
fn smaller_object_takes_no_more_memory() {
    let blocks = if cfg!(miri) { 2000 } else { 8000 };
    let (store, mut other) = written(blocks);
    let before = store.pool().usage().used_bytes;
    for block in shuffled(blocks) {
        let made = other.remake(block, |word, bytes, maker| {
            let smaller = &bytes[..bytes.len() * 9 / 10 + 1];
            maker.make(New::Bytes(smaller, word)).map(Some)
        });
        assert!(made.unwrap().is_some());
    }
    check_most(&store, before);
    check_accounts(&mut other, 2);
}

/// Regression: the shard with the most free space had only small holes, and hid all other shards.
#[test]
fn fitting_hole_is_found_among_many_that_do_not_fit() {
    let blocks = if cfg!(miri) { 1000 } else { 4000 };
    let (large, small) = (blocks / 4, 2 * blocks);
    let store = store(small + large, |config| {
        config.segment_bytes = Some(SEGMENT as usize);
        config.shards = NonZeroU32::new(4);
    });
    let mut accesses: Vec<_> = (0..3).map(|_| store.access().unwrap()).collect();
    let mut write = |channel: usize, block, number, len_bytes| {
        let bytes = stamped(block, number, len_bytes);
        accesses[channel].replace(block, New::Bytes(&bytes, Word::NOTHING)).unwrap();
    };
    (0..small).for_each(|block| write(0, block, 1, BLOCK / 8));
    (0..large).for_each(|block| write(1, small + block, 1, BLOCK / 2));
    for block in (0..small).step_by(2) {
        accesses[0].replace(block, New::Word(Word::NOTHING)).unwrap();
    }
    accesses[0].reclaim();
    let usage = store.pool().usage();
    assert!(usage.free_bytes >= large * BLOCK as u64 / 2, "{usage:?}");
    store.pool().reset_used_max();
    for block in shuffled(large) {
        let bytes = stamped(small + block, 2, BLOCK / 2);
        accesses[2].replace(small + block, New::Bytes(&bytes, Word::NOTHING)).unwrap();
    }
    check_most(&store, usage.used_bytes);
    check_accounts(&mut accesses[2], 2);
}

/// Copying an object into another shard's hole touches nothing that is read, moved or freed there
/// concurrently. Miri detects two threads that access the same bytes.
#[test]
fn holes_of_another_shard_are_filled_while_it_is_read_and_compacted() {
    let blocks = if cfg!(miri) { 300 } else { 8000 };
    let store = store(blocks, |config| config.segment_bytes = Some(SEGMENT as usize));
    let (mut first, mut other) = (store.access().unwrap(), store.access().unwrap());
    let fill = |access: &mut Access, block, number| {
        let bytes = stamped(block, number, BLOCK / 4);
        access.replace(block, New::Bytes(&bytes, Word::NOTHING)).unwrap();
    };
    (0..blocks).for_each(|block| fill(&mut first, block, 1));
    for block in (0..blocks).step_by(2) {
        first.replace(block, New::Word(Word::NOTHING)).unwrap();
    }
    first.reclaim();
    let used = store.pool().usage().used_bytes;
    fill(&mut other, 0, 2);
    assert_eq!(store.pool().usage().used_bytes, used, "it lies in a hole");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (turn, block) in shuffled(blocks).into_iter().enumerate() {
                read(&mut first, block);
                if turn % (blocks as usize / 4) == 0 {
                    first.compact(|| false);
                }
            }
        });
        shuffled(blocks).into_iter().rev().for_each(|block| fill(&mut other, block, 3));
    });
    check_accounts(&mut other, 3);
}
