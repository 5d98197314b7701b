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

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use blockyard_sync::mailbox::{Mailbox, Owner};

use crate::buffer::Buffer;
use crate::bytes::crc;
use crate::checkpoint::{Frozen, Marks};
use crate::format::entry::{Entry, STORED_MAX};
use crate::format::group::head_bytes;
use crate::format::{FAN, NODE_BLOCKS};
use crate::pool::Pool;
use crate::record::{Body, Move, Moved, Record, Reply, Return};
use crate::relocate::Spans;
use crate::segments::Want;
use crate::store::Directory;

pub(crate) use cold::Cold;
use summary::Block;

/// What is moved by one record, in bytes.
const MOVE_BYTES: usize = 1 << 20;

/// Blocks that are moved by one record at most.
const MOVES_MAX: usize = 1024;

/// Segments that may be garbage before any is cleaned.
const GARBAGE_SEGMENTS: u64 = 4;

/// Where space is short as many segments should be free, beyond those that writes leave to others,
/// as are one in so many of all; at least some, and no more than three rounds of the log take.
const FREE_PART: usize = 20;
const FREE_MIN: usize = 2;

/// Longest sleep before another look whether the committer has answered.
const LOOK: Duration = Duration::from_millis(5);

/// What is done behind a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cleaning {
    /// Nothing.
    Nothing,
    /// Segments are cleaned, if space is short; it is counted again what counts if that is worth
    /// it.
    Due,
    /// The same because somebody has found no space: nobody breaks it off, so that it may have the
    /// last segment that is kept for it.
    Needed {
        /// Whether it may be counted again.
        counts: bool,
    },
}

/// Cleans behind a checkpoint beside the committer, waiting for it.
pub(crate) fn beside<D: Directory>(pool: &Pool<D>, frozen: &Frozen, marks: &Marks) {
    // One may come late.
    let mut replies: Owner<Reply> = Mailbox::open(2);
    each(pool, frozen, marks, Cleaning::Due, |moved| {
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
    cleaning: Cleaning,
    mut hand: impl FnMut(Moved) -> bool,
) {
    if cleaning == Cleaning::Nothing {
        return;
    }
    if matches!(cleaning, Cleaning::Due | Cleaning::Needed { counts: true }) {
        count::again(pool, frozen, bearable_unknown(pool, frozen));
    }
    let victims = choose(pool, frozen, marks);
    let old = &frozen.whole.live;
    let has_pages =
        |number: &u32| marks.live_bytes(*number) > old.get(*number as usize).copied().unwrap_or(0);
    let pages = victims.iter().copied().filter(has_pages).collect();
    let (pages, page_count) = pages_that_fit(pool, frozen, pages);
    let round = pool.segments().round();
    if !pages.is_empty() {
        let spans = bring_pages(pool, frozen, &pages);
        if !hand(Moved { moves: Vec::new(), pages, spans, page_count, round }) {
            return;
        }
    }
    for victim in victims {
        // A checkpoint that is due goes first.
        if pool.is_hurried() || !empty(pool, victim, &mut hand) {
            return;
        }
    }
}

/// Those of some segments with pages for which the next checkpoint finds room, if what is in them
/// is written again: their pages, and each node that names one. Answers how many these are, too.
fn pages_that_fit<D: Directory>(
    pool: &Pool<D>,
    frozen: &Frozen,
    mut segments: Vec<u32>,
) -> (Vec<u32>, u64) {
    if segments.is_empty() {
        return (segments, 0);
    }
    let mut counts: HashMap<u32, u64> = segments.iter().map(|number| (*number, 0)).collect();
    let (mut nodes, mut leaves) = (HashSet::new(), HashSet::new());
    let segment = |home: Entry| pool.segments().split(home.address()).0;
    for node in frozen.volumes.iter().flat_map(|(.., map)| map.iter().flatten()) {
        if !nodes.insert(Arc::as_ptr(node)) {
            continue;
        }
        let mut left: HashSet<u32> = node.home().map(segment).into_iter().collect();
        for (_, leaf) in node.leaves() {
            let Some(number) = leaf.home().map(segment) else { continue };
            left.insert(number);
            if leaves.insert(Arc::as_ptr(leaf))
                && let Some(count) = counts.get_mut(&number)
            {
                *count += 1;
            }
        }
        for number in left {
            counts.entry(number).and_modify(|count| *count += 1);
        }
    }
    let most = pool.segments().pages_left(Want::Move, 0).unwrap_or(0);
    let mut page_count = 0;
    segments.retain(|number| {
        let count = counts.get(number).copied().unwrap_or(0);
        let fits = page_count + count <= most;
        page_count += if fits { count } else { 0 };
        fits
    });
    (segments, page_count)
}

/// Finds the spans that have pages in some segments, and brings their leaves into memory: these are
/// about to be left, and the committer has no time to look for them or to read.
fn bring_pages<D: Directory>(pool: &Pool<D>, frozen: &Frozen, segments: &[u32]) -> Spans {
    let is_left = |home: Entry| segments.contains(&pool.segments().split(home.address()).0);
    let mut spans = Spans::new();
    for (_, copied, map) in &frozen.volumes {
        for (number, node) in map.iter().enumerate() {
            let Some(node) = node else { continue };
            let left = node.leaves().filter(|(_, leaf)| leaf.home().is_some_and(is_left));
            let mut is_any = node.home().is_some_and(is_left);
            for (_, leaf) in left {
                is_any = true;
                if pool.is_running() && !pool.is_hurried() {
                    // What cannot be read stays where it is, and is told then.
                    _ = pool.segments().load(leaf);
                }
            }
            if is_any {
                spans.insert((copied.family, number));
            }
        }
    }
    spans
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
        let Some(most) = pages_left(pool) else { return false };
        let Batch { blocks: batch, bytes, pages: page_count, rest } = read(pool, left, most);
        if rest.len() == left.len() {
            // Not even one: a checkpoint has to write pages first.
            return false;
        }
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
            let Block { family, number, entry, .. } = *block;
            Move { family, block: number, from: entry, to }
        });
        let moves = moves.collect();
        if !hand(Moved { moves, page_count, round, ..Moved::default() }) {
            return false;
        }
    }
    true
}

/// How many pages may be changed by a batch of blocks, which takes a segment for them and one for
/// the log at most; `None` if there is no room for one, or none for a segment of pages beside it.
fn pages_left<D: Directory>(pool: &Pool<D>) -> Option<u64> {
    let segments = pool.segments();
    let taken = if batch_there(pool).is_some() { 1 } else { 2 };
    segments.pages_left(Want::Move, taken + 1)?;
    segments.pages_left(Want::Move, taken)
}

/// How many segments should be free where space is short: what is written until those that are
/// cleaned now are free, two checkpoints on, has to find a place.
fn goal<D: Directory>(pool: &Pool<D>) -> usize {
    pool.segments().reserved() + beyond(pool)
}

/// How many of them there are beyond those that writes leave to others.
fn beyond<D: Directory>(pool: &Pool<D>) -> usize {
    let segments = pool.segments();
    let rounds = 3 * pool.options().checkpoint_bytes / u64::from(segments.bytes());
    (segments.files().len() / FREE_PART).min(rounds as usize).max(FREE_MIN)
}

/// How many bytes may be moved behind a checkpoint: what is cleaned now is free two of them on, and
/// until then others have to find a place too.
fn budget<D: Directory>(pool: &Pool<D>) -> u64 {
    let (segments, most) = (pool.segments(), 2 * pool.options().checkpoint_bytes);
    if !is_scarce(pool) {
        return most;
    }
    let half = segments.free_for(Want::Write) / 2;
    // What is open has room for some, also where no segment can be had.
    let some = half.max(segments.free_for(Want::Move).min(2)).max(1);
    most.min(some as u64 * u64::from(segments.bytes()))
}

/// Whether space is short.
pub(crate) fn is_scarce<D: Directory>(pool: &Pool<D>) -> bool {
    pool.segments().available() < goal(pool)
}

/// Whether it is so short that writes are refused.
fn is_dire<D: Directory>(pool: &Pool<D>) -> bool {
    pool.segments().available() <= pool.segments().reserved()
}

/// How much log there may be until the next checkpoint. Where space is short there is less, because
/// what is not needed any more is free two checkpoints on.
pub(crate) fn round_bytes<D: Directory>(pool: &Pool<D>) -> u64 {
    let (segments, most) = (pool.segments(), pool.options().checkpoint_bytes);
    if !is_scarce(pool) {
        return most;
    }
    let bytes = u64::from(segments.bytes());
    (segments.free() as u64 * bytes / 8).max(2 * bytes).min(most)
}

/// How many bytes may be counted that do not count any more. Where segments are short none: those
/// in which less was found than counts are cleaned once it was counted again. Where what counts is
/// so much that writes are refused next to none, however many segments are free.
fn bearable_unknown<D: Directory>(pool: &Pool<D>, frozen: &Frozen) -> u64 {
    let counted: u64 = frozen.whole.live.iter().sum();
    let segments = pool.segments();
    match (is_dire(pool), is_scarce(pool)) {
        (true, _) => 0,
        _ if segments.left_bytes() < pool.early_bytes() => u64::from(segments.bytes()) / 2,
        (_, true) => counted / 32,
        _ => counted / 4,
    }
}

/// The segments to be cleaned: those with least in them, until the rest has little garbage, and
/// where space is short until there will be as many free ones as there should be.
fn choose<D: Directory>(pool: &Pool<D>, frozen: &Frozen, marks: &Marks) -> Vec<u32> {
    let segments = pool.segments();
    let pages = pool.page_place().map(|(segment, _)| segment);
    let cold = pool.cold().map(|cold| cold.segment);
    let log = [frozen.log.segment, frozen.log.next];
    let is_open = |number| log.contains(&number) || [pages, cold].contains(&Some(number));
    let size = u64::from(segments.bytes());
    let mut used = segments.used_before(frozen.round);
    used.retain(|number| !is_open(*number));
    // Blocks as they are counted now, and pages as the checkpoint has found them.
    let ((blocks, _), old) = (segments.live(), &frozen.whole.live);
    let at = |counts: &[u64], number: u32| counts.get(number as usize).copied().unwrap_or(0);
    let live_bytes = |number: u32| {
        marks.live_bytes(number).saturating_sub(at(old, number)) + at(&blocks, number)
    };
    let live: u64 = used.iter().map(|number| live_bytes(*number)).sum();
    let garbage = (used.len() as u64 * size).saturating_sub(live);
    let counts = segments.counts();
    let wanted = match is_scarce(pool) {
        true => goal(pool).saturating_sub(counts.free + counts.idle) as u64 * size,
        false => 0,
    };
    // A third of the space, where there is enough.
    let bearable = live / 2 + GARBAGE_SEGMENTS * size;
    let mut excess = garbage.saturating_sub(bearable).max(garbage.min(wanted));
    // What is cleaned is log too, which brings the next checkpoint nearer.
    let mut budget = budget(pool);
    // Where writes are refused, little garbage is worth the work too.
    let parts = if is_dire(pool) { 32 } else { 8 };
    // Pages first where there is next to no room: that takes none.
    let is_dire = is_dire(pool);
    let is_thin = |number: u32| {
        let pages = marks.live_bytes(number) > at(old, number);
        is_dire && pages && 2 * live_bytes(number) < size
    };
    used.sort_by_key(|number| (!is_thin(*number), live_bytes(*number)));
    let mut victims = Vec::new();
    for number in used {
        let bytes = live_bytes(number);
        if bytes * parts > size * (parts - 1) {
            continue;
        }
        if excess == 0 || bytes > budget {
            break;
        }
        budget -= bytes;
        excess = excess.saturating_sub(size.saturating_sub(bytes));
        victims.push(number);
    }
    victims
}

/// Blocks that are moved at once.
struct Batch<'a> {
    blocks: Vec<Block>,
    /// Their bytes.
    bytes: Buffer,
    /// How many pages of maps that changes at most.
    pages: u64,
    /// The blocks behind them.
    rest: &'a [Block],
}

/// Most bytes of a batch: a block at least, and a segment has room for two.
fn batch_bytes<D: Directory>(pool: &Pool<D>) -> usize {
    let segment = pool.segments().bytes() as usize;
    MOVE_BYTES.min(segment / 4).max(STORED_MAX as usize).min(segment / 2)
}

/// Most bytes of a batch that goes behind the last one: the end of a segment is filled, as these
/// are not cleaned before there is garbage in them. `None` if there is next to no room.
fn batch_there<D: Directory>(pool: &Pool<D>) -> Option<usize> {
    let most = batch_bytes(pool);
    let room = pool.cold()?.room(pool.segments().bytes()) as usize;
    let count = room / pool.align() as usize;
    let head = head_bytes(count.min(MOVES_MAX), pool.align()) as usize;
    let room = room.checked_sub(head)?.min(most);
    (room >= most / 8).then_some(room)
}

/// Reads the first of some blocks, which change no more than so many pages. A damaged block stays
/// where it is, and its segment is left alone from then on: it would be the emptiest one for ever.
fn read<'a, D: Directory>(pool: &Pool<D>, blocks: &'a [Block], most: u64) -> Batch<'a> {
    let first = blocks.first().map_or(0, |block| block.entry.stored_bytes() as usize);
    let size = batch_there(pool).filter(|size| *size >= first);
    let size = size.unwrap_or_else(|| batch_bytes(pool));
    let mut buffer = pool.memory().take_beyond(size);
    let (files, mut whole) = (pool.segments().files(), Vec::new());
    let (mut filled, mut done, mut pages) = (0, 0, 0);
    let (mut leaves, mut nodes) = (HashSet::new(), HashSet::new());
    // Direct I/O wants memory that begins at a page.
    let mut stored = pool.memory().take_beyond(STORED_MAX as usize);
    for block in blocks {
        let len = block.entry.stored_bytes() as usize;
        if (filled + len > size && done > 0) || whole.len() >= MOVES_MAX {
            break;
        }
        let leaf = (block.family, block.number / FAN as u64);
        let node = (block.family, block.number / NODE_BLOCKS);
        let more = if leaves.contains(&leaf) { 0 } else { block.leaves };
        let more = more + if nodes.contains(&node) { 0 } else { block.nodes };
        if pages + more > most {
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
        pages += more;
        leaves.insert(leaf);
        nodes.insert(node);
        whole.push(*block);
    }
    buffer.truncate(filled);
    Batch { blocks: whole, bytes: buffer, pages, rest: &blocks[done..] }
}
