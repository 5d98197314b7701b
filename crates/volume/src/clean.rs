//! Cleaning: what still counts in segments with little of it is written again at the end of the
//! log, so that they become free as a whole.
//!
//! It comes behind a checkpoint, whose walk through the maps has found how much of each segment
//! counts, and looks at the same maps. What is written meanwhile is not undone: a move changes an
//! entry only if it is still what it was.

mod count;

use std::collections::HashSet;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use blockyard_sync::mailbox::{Mailbox, Owner};

use crate::bytes::crc;
use crate::checkpoint::{Frozen, Marks};
use crate::format::FAN;
use crate::format::NODE_BLOCKS;
use crate::format::entry::Entry;
use crate::map::{Leaf, Node};
use crate::pool::Pool;
use crate::record::{Body, Moved, Payload, Record, Reply, Return, Stored};
use crate::store::Directory;

/// What is moved by one record, in bytes.
const MOVE_BYTES: usize = 256 << 10;

/// Segments that may be garbage before any is cleaned.
const GARBAGE_SEGMENTS: u64 = 4;

/// Free segments below which cleaning goes on until there is next to no garbage.
const SCARCE: usize = 8;

/// Longest sleep before another look whether the committer has answered.
const LOOK: Duration = Duration::from_millis(5);

/// Cleans behind a checkpoint beside the committer, waiting for it.
pub(crate) fn beside<D: Directory>(pool: &Pool<D>, frozen: &Frozen, marks: &Marks) {
    // One may come late.
    let mut replies: Owner<Reply> = Mailbox::open(2);
    each(pool, frozen, marks, |moved| {
        let reply = Return { to: Arc::clone(replies.mailbox()), token: 0 };
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
    let scarce = pool.segments().available() < SCARCE;
    count::again(pool, frozen, scarce);
    let victims = choose(pool, frozen, marks);
    if victims.is_empty() {
        return;
    }
    let found = Found::new(pool, frozen, &victims);
    let mut pages = found.pages;
    let mut left = &found.blocks[..];
    while !pool.is_poisoned() && (!left.is_empty() || !pages.is_empty()) {
        let (moved, rest) = read(pool, left, std::mem::take(&mut pages));
        left = rest;
        if !hand(moved) {
            return;
        }
    }
}

/// The segments to be cleaned: those with least in them, until the rest has little garbage.
fn choose<D: Directory>(pool: &Pool<D>, frozen: &Frozen, marks: &Marks) -> Vec<u32> {
    let pages = pool.page_place().map(|(segment, _)| segment);
    let is_open =
        |number| [frozen.log.segment, frozen.log.next].contains(&number) || pages == Some(number);
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
    let scarce = pool.segments().available() < SCARCE;
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

/// What counts in some segments.
#[derive(Default)]
struct Found {
    /// Blocks, by their numbers in the volumes that have them, in the order of their addresses.
    blocks: Vec<(u64, Entry)>,
    /// Segments with pages of maps.
    pages: Vec<u32>,
}

impl Found {
    fn new<D: Directory>(pool: &Pool<D>, frozen: &Frozen, victims: &[u32]) -> Found {
        let victims: HashSet<u32> = victims.iter().copied().collect();
        let segment = |entry: &Entry| pool.segments().split(entry.address()).0;
        let is_in = |entry: &Entry| !entry.is_hole() && victims.contains(&segment(entry));
        let (mut nodes, mut leaves) = (HashSet::new(), HashSet::new());
        let mut blocks: HashSet<(u64, Entry)> = HashSet::new();
        let mut pages = HashSet::new();
        for (.., map) in &frozen.volumes {
            for (number, node) in (0..).zip(map) {
                let Some(node) = node else { continue };
                if !nodes.insert(ptr::from_ref::<Node>(node)) {
                    continue;
                }
                pages.extend(node.home().filter(is_in).map(|home| segment(&home)));
                for (at, leaf) in node.leaves().iter().enumerate() {
                    let Some(leaf) = leaf else { continue };
                    if !leaves.insert(ptr::from_ref::<Leaf>(leaf)) {
                        continue;
                    }
                    pages.extend(leaf.home().filter(is_in).map(|home| segment(&home)));
                    let first = number * NODE_BLOCKS + (at * FAN) as u64;
                    let page = match pool.segments().page(leaf) {
                        Ok(page) => page,
                        Err(error) => {
                            tracing::error!("blocks that it names are not moved: {error}");
                            continue;
                        }
                    };
                    let entries = (first..).zip(page.entries()).filter(|(_, entry)| is_in(entry));
                    blocks.extend(entries.map(|(block, entry)| (block, *entry)));
                }
            }
        }
        let mut blocks: Vec<_> = blocks.into_iter().collect();
        blocks.sort_by_key(|(block, entry)| (entry.address(), *block));
        let mut pages: Vec<u32> = pages.into_iter().collect();
        pages.sort_unstable();
        Found { blocks, pages }
    }
}

/// Reads the first of some blocks; answers the rest. A damaged block stays where it is, and its
/// segment is left alone from then on: it would be the emptiest one for ever.
fn read<'a, D: Directory>(
    pool: &Pool<D>,
    blocks: &'a [(u64, Entry)],
    pages: Vec<u32>,
) -> (Moved, &'a [(u64, Entry)]) {
    let size = MOVE_BYTES.min(pool.segments().bytes() as usize / 4);
    let mut buffer = pool.memory().take_beyond(size);
    let files = pool.segments().files();
    let (mut stored, mut from) = (Vec::new(), Vec::new());
    let (mut filled, mut done) = (0, 0);
    for (block, entry) in blocks {
        let len = entry.stored_bytes() as usize;
        if filled + len > size || stored.len() >= 1024 {
            break;
        }
        done += 1;
        let bytes = &mut buffer[filled..filled + len];
        let read = pool.segments().read(&files, entry.address(), bytes);
        if read.is_err() || crc(bytes) != entry.crc() {
            let address = entry.address();
            tracing::error!("block {block}, at {address} of the pool, is damaged: not moved");
            let (segment, _) = pool.segments().split(address);
            if pool.segments().spoil(segment) {
                tracing::warn!("segment {segment} keeps its damage, and is not cleaned any more");
            }
            continue;
        }
        let (offset, codec, crc) = (filled as u32, entry.codec(), entry.crc());
        stored.push(Stored { offset, len: len as u32, codec, crc });
        from.push((*block, *entry));
        filled += len;
    }
    buffer.truncate(filled);
    (Moved { payload: Payload::new(buffer, stored), from, pages }, &blocks[done..])
}
