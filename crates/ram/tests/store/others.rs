//! Memory when one channel works on what another has written: shards are of channels, and what
//! becomes free belongs to the shard in which it lies.

use super::*;

fn shuffled(blocks: u64) -> Vec<u64> {
    let mut order: Vec<u64> = (0..blocks).collect();
    fastrand::Rng::with_seed(3).shuffle(&mut order);
    order
}

/// Blocks of many sizes that one channel has written, and another channel, which has the other
/// shard.
fn written(blocks: u64) -> (Arc<Store>, Access) {
    let store = store(blocks, |config| config.segment_bytes = Some(64 << 10));
    let (mut first, other) = (store.access().unwrap(), store.access().unwrap());
    let mut random = fastrand::Rng::with_seed(1);
    for block in 0..blocks {
        let bytes = stamped(block, 1, any_len(&mut random));
        first.replace(block, New::Bytes(&bytes, Word::NOTHING)).unwrap();
    }
    store.pool().reset_used_max();
    (store, other)
}

/// A client that came again and overwrote its disk at random took as much memory again.
#[test]
fn what_another_channel_has_written_is_overwritten_where_it_lies() {
    let blocks = if cfg!(miri) { 2000 } else { 8000 };
    let (store, mut other) = written(blocks);
    let before = store.pool().usage().used_bytes;
    let mut random = fastrand::Rng::with_seed(2);
    for block in shuffled(blocks) {
        let bytes = stamped(block, 2, any_len(&mut random));
        other.replace(block, New::Bytes(&bytes, Word::NOTHING)).unwrap();
    }
    let most = store.pool().usage().used_bytes_max;
    assert!(most < before * 5 / 4, "{before} bytes became {most}");
    check_accounts(&mut other, 2);
}

/// Recompression works on what channels have written, and took half as much memory again.
#[test]
fn what_becomes_smaller_takes_no_more_memory() {
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
    let most = store.pool().usage().used_bytes_max;
    assert!(most < before + before / 20, "{before} bytes became {most}");
    check_accounts(&mut other, 2);
}
