//! When segments are cleaned, and which: those with least in them. Where space is short just as
//! many as are wanted, one after the other, and no sooner: garbage that is left alone grows, and
//! the less counts in a segment the less is moved for what is won. Where there is room nothing is
//! cleaned, but what would make a pool grow beyond twice of what counts in it.

use std::collections::BTreeSet;

use crate::checkpoint::{Frozen, Marks};
use crate::pool::Pool;
use crate::segments::Want;
use crate::store::Directory;

/// Segments that may be garbage, beside as many as what counts takes, before a pool that grows is
/// cleaned.
const GARBAGE_SEGMENTS: u64 = 4;

/// Where space is short so many segments should be free beyond what writes leave to others and a
/// checkpoint takes, and two batches of blocks fill that are on their way elsewhere. Of a short
/// pool one in so many of all.
const SLACK: usize = 4;
const SLACK_PART: usize = 20;
const SLACK_MIN: usize = 2;

/// What is moved by one record: in bytes at most, and one in so many of a pool, or a segment.
const MOVE_BYTES: u64 = 2 << 20;
const BATCH_PART: u64 = 256;

/// The log behind a checkpoint takes one in so many of the bytes that do not count, where space is
/// short: it is not cleaned before the next one.
const ROUND_PART: u64 = 4;

/// Segments that are chosen at once.
const CHOSEN: usize = 16;

/// How many segments should be free where space is short.
fn goal<D: Directory>(pool: &Pool<D>) -> usize {
    let segments = pool.segments();
    let slack = segments.beside() + SLACK + batches(pool);
    let part = segments.files().len() / SLACK_PART;
    (segments.reserved() + part).min(slack).max(segments.reserved() + SLACK_MIN)
}

/// What is moved by one record, in bytes: of a short pool a small part.
fn whole_batch_bytes<D: Directory>(pool: &Pool<D>) -> u64 {
    let bytes = u64::from(pool.segments().bytes());
    let part = pool.segments().files().len() as u64 * bytes / BATCH_PART;
    part.max(bytes).min(MOVE_BYTES)
}

/// How many segments two batches fill that are on their way.
fn batches<D: Directory>(pool: &Pool<D>) -> usize {
    (2 * whole_batch_bytes(pool)).div_ceil(pool.segments().bytes().into()) as usize
}

/// Whether so little is free that cleaning would not find room to begin with, if what is on its way
/// came to nothing, which it does when somebody cannot wait for it.
pub(super) fn is_close<D: Directory>(pool: &Pool<D>) -> bool {
    pool.segments().free() + 1 < pool.segments().reserved() + batches(pool)
}

/// What is moved by one record now.
pub(super) fn batch_bytes<D: Directory>(pool: &Pool<D>) -> u64 {
    match is_close(pool) {
        true => u64::from(pool.segments().bytes()) / 4,
        false => whole_batch_bytes(pool),
    }
}

/// Whether space is short.
pub(crate) fn is_scarce<D: Directory>(pool: &Pool<D>) -> bool {
    pool.segments().available() < goal(pool)
}

/// Whether it may soon be.
pub(super) fn is_near<D: Directory>(pool: &Pool<D>) -> bool {
    pool.segments().available() < 2 * goal(pool)
}

/// Whether it will not grow yet: it does not, or what is there has room for what is written behind
/// two checkpoints.
fn is_roomy<D: Directory>(pool: &Pool<D>) -> bool {
    let segments = pool.segments();
    let round = (pool.options().checkpoint_bytes / u64::from(segments.bytes())).max(2);
    !segments.grows() || segments.free() as u64 >= segments.reserved() as u64 + 2 * round
}

/// Whether as much is free as there should be, if so many segments more will be.
pub(super) fn is_enough<D: Directory>(pool: &Pool<D>, more: usize) -> bool {
    pool.segments().available() + more > goal(pool)
}

/// Whether it is so short that writes are refused.
fn is_dire<D: Directory>(pool: &Pool<D>) -> bool {
    pool.segments().available() <= pool.segments().reserved()
}

/// What of so many bytes that were won writes may have: less where less is free than there should
/// be, so that there will be more.
pub(super) fn share<D: Directory>(pool: &Pool<D>, bytes: u64) -> u64 {
    let segments = pool.segments();
    let wanted = goal(pool).saturating_sub(segments.reserved()).max(1) as u64;
    bytes * (segments.free_for(Want::Write) as u64).min(wanted) / wanted
}

/// How much log there may be until the next checkpoint. Where space is short there is less, because
/// the log is not cleaned before; least where nobody cleans, which is done behind a checkpoint.
pub(crate) fn round_bytes<D: Directory>(pool: &Pool<D>, is_cleaned: bool) -> u64 {
    let (segments, most) = (pool.segments(), pool.options().checkpoint_bytes);
    if !is_scarce(pool) && !is_cleaned {
        return most;
    }
    let bytes = u64::from(segments.bytes());
    let some = match is_cleaned {
        true => segments.spare_bytes() / ROUND_PART,
        false => segments.free() as u64 * bytes / 8,
    };
    some.max(2 * bytes).min(most)
}

/// How many bytes may be counted that do not count any more. Where segments are short none: those
/// in which less was found than counts are cleaned once it was counted again. Where what counts is
/// so much that writes are refused next to none, however many segments are free.
pub(super) fn bearable_unknown<D: Directory>(pool: &Pool<D>, frozen: &Frozen) -> u64 {
    let counted: u64 = frozen.whole.live.iter().sum();
    let segments = pool.segments();
    match (is_dire(pool), is_scarce(pool)) {
        _ if pool.wanted_count().is_some_and(|round| frozen.round >= round) => 0,
        (true, _) => 0,
        _ if pool.unpromised_bytes() < pool.early_bytes() => u64::from(segments.bytes()) / 2,
        (_, true) if segments.counts().spoiled > 0 => 0,
        (_, true) => counted / 32,
        _ => counted / 4,
    }
}

/// What is to be cleaned.
pub(super) struct Choice {
    /// The first one first.
    pub(super) victims: Vec<u32>,
    /// Only until there is enough.
    pub(super) for_space: bool,
}

/// Whether a checkpoint has pages in a segment.
pub(super) fn has_pages(frozen: &Frozen, marks: &Marks, number: u32) -> bool {
    marks.live_bytes(number) > at(&frozen.whole.live, number)
}

fn at(counts: &[u64], number: u32) -> u64 {
    counts.get(number as usize).copied().unwrap_or(0)
}

/// The segments to be cleaned next, but for those that were: where space is short those with least
/// in them, else until there is no more garbage in the rest than a pool that grows may have.
pub(super) fn choose<D: Directory>(
    pool: &Pool<D>,
    frozen: &Frozen,
    marks: &Marks,
    seen: &BTreeSet<u32>,
) -> Choice {
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
    let live_bytes = |number: u32| {
        marks.live_bytes(number).saturating_sub(at(old, number)) + at(&blocks, number)
    };
    let live: u64 = used.iter().map(|number| live_bytes(*number)).sum();
    let garbage = (used.len() as u64 * size).saturating_sub(live);
    // Half of the space.
    let bearable = live + GARBAGE_SEGMENTS * size;
    let mut excess = if is_roomy(pool) { 0 } else { garbage.saturating_sub(bearable) };
    let (for_space, is_dire) = (is_scarce(pool), is_dire(pool));
    // Where space is short, little garbage is worth the work too.
    let parts = match (is_dire, for_space) {
        (true, _) => 32,
        (_, true) => 16,
        _ => 8,
    };
    let is_worth = |number: u32| live_bytes(number) * parts <= size * (parts - 1);
    used.retain(|number| !seen.contains(number) && is_worth(*number));
    // Pages first where there is next to no room: that takes none.
    let is_thin =
        |number: u32| is_dire && has_pages(frozen, marks, number) && 2 * live_bytes(number) < size;
    let key = |number: &u32| (!is_thin(*number), live_bytes(*number));
    let mut victims = Vec::new();
    if for_space {
        if used.len() > CHOSEN {
            used.select_nth_unstable_by_key(CHOSEN, key);
            used.truncate(CHOSEN);
        }
        used.sort_by_key(key);
        victims = used;
    } else if excess > 0 {
        used.sort_by_key(key);
        for number in used {
            if excess == 0 {
                break;
            }
            excess = excess.saturating_sub(size.saturating_sub(live_bytes(number)));
            victims.push(number);
        }
    }
    Choice { victims, for_space }
}
