//! Cleaning: what still counts in segments with little of it is written again elsewhere, so that
//! they become free as a whole.
//!
//! It comes behind a checkpoint, and goes by what is counted of each segment. The groups of a
//! segment name what is in it, the maps say what of that counts. It is written into segments of its
//! own, made durable, and only then named by a group of the log. What is written meanwhile is not
//! undone: a move changes an entry only if it is still what it was.

mod cold;
mod count;
mod summary;

use std::sync::Arc;
use std::time::Duration;

use blockyard_sync::mailbox::{Mailbox, Owner};

use crate::buffer::Buffer;
use crate::bytes::crc;
use crate::checkpoint::{Frozen, Marks};
use crate::format::entry::STORED_MAX;
use crate::pool::Pool;
use crate::record::{Body, Move, Moved, Record, Reply, Return};
use crate::store::Directory;

pub(crate) use cold::Cold;
use summary::Block;

/// What is moved by one record, in bytes.
const MOVE_BYTES: usize = 1 << 20;

/// Blocks that are moved by one record at most.
const MOVES_MAX: usize = 1024;

/// Segments that may be garbage before any is cleaned.
const GARBAGE_SEGMENTS: u64 = 4;

/// Free segments below which cleaning goes on until there is next to no garbage, at least.
const SCARCE_MIN: usize = 8;

/// Longest sleep before another look whether the committer has answered.
const LOOK: Duration = Duration::from_millis(5);

/// Cleans behind a checkpoint beside the committer, waiting for it.
pub(crate) fn beside<D: Directory>(pool: &Pool<D>, frozen: &Frozen, marks: &Marks) {
    // One may come late.
    let mut replies: Owner<Reply> = Mailbox::open(2);
    each(pool, frozen, marks, |moved| {
        let reply = Return::new(replies.mailbox(), 0);
        let body = Body::Move(Arc::new(moved));
        pool.send(Record { durable: false, ..Record::of(body, Some(reply)) });
        loop {
            match replies.take() {
                Some(reply) => return reply.status.is_ok(),
                // The committer waits for this thread: the answer comes later, or never.
                None if pool.is_hurried() => return false,
                None => replies.mailbox().bell().sleep(LOOK, || replies.is_any()),
            }
        }
    });
}

/// Hands on what is to be moved behind a checkpoint, until there is no more or nobody wants it.
pub(crate) fn each<D: Directory>(
    pool: &Pool<D>,
    frozen: &Frozen,
    marks: &Marks,
    mut hand: impl FnMut(Moved) -> bool,
) {
    let scarce = is_scarce(pool);
    count::again(pool, frozen, scarce);
    let victims = choose(pool, frozen, marks);
    let old = &frozen.whole.live;
    let has_pages =
        |number: &u32| marks.live_bytes(*number) > old.get(*number as usize).copied().unwrap_or(0);
    let pages: Vec<u32> = victims.iter().copied().filter(has_pages).collect();
    let round = pool.segments().round();
    if !pages.is_empty() && !hand(Moved { moves: Vec::new(), pages, round }) {
        return;
    }
    for victim in victims {
        // A checkpoint that is due goes first.
        if pool.is_hurried() || !empty(pool, victim, &mut hand) {
            return;
        }
    }
}

/// Moves what counts out of a segment; says whether others may follow.
fn empty<D: Directory>(pool: &Pool<D>, victim: u32, hand: &mut impl FnMut(Moved) -> bool) -> bool {
    if pool.segments().live_bytes(victim) == 0 {
        return true;
    }
    let found = summary::counting(pool, &summary::named(pool, victim));
    let bytes: u64 = found.iter().map(|block| u64::from(block.entry.stored_bytes())).sum();
    if pool.segments().live_bytes(victim) > bytes {
        // Something in it was not found, or does not count: it stays until all are counted again.
        pool.segments().spoil(victim);
    }
    let mut left = &found[..];
    while !left.is_empty() {
        if pool.is_poisoned() || pool.is_hurried() {
            return false;
        }
        let (batch, bytes, rest) = read(pool, left);
        left = rest;
        if batch.is_empty() {
            continue;
        }
        let round = pool.segments().round();
        let places = match cold::write(pool, &batch, &bytes) {
            Ok(Some(places)) => places,
            Ok(None) => return false,
            Err(error) => {
                pool.poison(&format!("blocks could not be moved: {error}"));
                return false;
            }
        };
        let moves = batch.iter().zip(places).map(|(block, to)| {
            let Block { family, number, entry } = *block;
            Move { family, block: number, from: entry, to }
        });
        if !hand(Moved { moves: moves.collect(), pages: Vec::new(), round }) {
            return false;
        }
    }
    true
}

/// Whether cleaning goes on until there is next to no garbage: what is written until what is
/// cleaned now is free, two checkpoints on, has to find a place.
fn is_scarce<D: Directory>(pool: &Pool<D>) -> bool {
    let segments = pool.segments();
    let wanted = 3 * pool.options().checkpoint_bytes / u64::from(segments.bytes());
    let most = (segments.count_max() / 8) as u64;
    segments.available() < (wanted.min(most) as usize).max(SCARCE_MIN)
}

/// The segments to be cleaned: those with least in them, until the rest has little garbage.
fn choose<D: Directory>(pool: &Pool<D>, frozen: &Frozen, marks: &Marks) -> Vec<u32> {
    let pages = pool.page_place().map(|(segment, _)| segment);
    let cold = pool.cold().map(|cold| cold.segment);
    let log = [frozen.log.segment, frozen.log.next];
    let is_open = |number| log.contains(&number) || [pages, cold].contains(&Some(number));
    let size = u64::from(pool.segments().bytes());
    let mut used = pool.segments().used_before(frozen.round);
    used.retain(|number| !is_open(*number));
    // Blocks as they are counted now, and pages as the checkpoint has found them.
    let ((blocks, _), old) = (pool.segments().live(), &frozen.whole.live);
    let at = |counts: &[u64], number: u32| counts.get(number as usize).copied().unwrap_or(0);
    let live_bytes = |number: u32| {
        marks.live_bytes(number).saturating_sub(at(old, number)) + at(&blocks, number)
    };
    let live: u64 = used.iter().map(|number| live_bytes(*number)).sum();
    let garbage = (used.len() as u64 * size).saturating_sub(live);
    let scarce = is_scarce(pool);
    // A third of the space, where there is enough.
    let bearable = if scarce { size } else { live / 2 + GARBAGE_SEGMENTS * size };
    let mut excess = garbage.saturating_sub(bearable);
    // What is cleaned is log too, which brings the next checkpoint nearer.
    let mut budget = 2 * pool.options().checkpoint_bytes;
    used.sort_by_key(|number| live_bytes(*number));
    let mut victims = Vec::new();
    for number in used {
        let bytes = live_bytes(number);
        if excess == 0 || bytes > budget || bytes * 8 > size * 7 {
            break;
        }
        budget -= bytes;
        excess = excess.saturating_sub(size.saturating_sub(bytes));
        victims.push(number);
    }
    victims
}

/// Reads the first of some blocks; answers those that are whole, their bytes, and the rest. A
/// damaged block stays where it is, and its segment is left alone from then on: it would be the
/// emptiest one for ever.
fn read<'a, D: Directory>(
    pool: &Pool<D>,
    blocks: &'a [Block],
) -> (Vec<Block>, Buffer, &'a [Block]) {
    // A block at least, and a segment has room for two.
    let size = MOVE_BYTES.min(pool.segments().bytes() as usize / 4).max(STORED_MAX as usize);
    let size = size.min(pool.segments().bytes() as usize / 2);
    let mut buffer = pool.memory().take_beyond(size);
    let (files, mut whole) = (pool.segments().files(), Vec::new());
    let (mut filled, mut done) = (0, 0);
    // Direct I/O wants memory that begins at a page.
    let mut stored = pool.memory().take_beyond(STORED_MAX as usize);
    for block in blocks {
        let len = block.entry.stored_bytes() as usize;
        if (filled + len > size && done > 0) || whole.len() >= MOVES_MAX {
            break;
        }
        done += 1;
        let (number, address) = (block.number, block.entry.address());
        let bytes = &mut stored[..len];
        let is_whole = |bytes: &[u8]| crc(bytes) == block.entry.crc();
        let read = pool.segments().read_whole(&files, address, bytes, &is_whole);
        if read.is_err() || !is_whole(bytes) || filled + len > size {
            tracing::error!("block {number}, at {address} of the pool, is damaged: not moved");
            let (segment, _) = pool.segments().split(address);
            if pool.segments().spoil(segment) {
                tracing::warn!("segment {segment} keeps its damage, and is not cleaned any more");
            }
            continue;
        }
        buffer[filled..filled + len].copy_from_slice(bytes);
        filled += len;
        whole.push(*block);
    }
    buffer.truncate(filled);
    (whole, buffer, &blocks[done..])
}
