//! Decides when to clean, and which segments: those with the least live data. While space is short,
//! it cleans one segment after another, no more and no sooner than needed: garbage that is left
//! alone grows, and emptier segments cost less to clean. While there is space, it cleans only what
//! would make a pool grow beyond twice its live data.

use std::collections::BTreeSet;

use blockyard_store::SegmentStore;

use crate::frozen::{Frozen, Marks};
use crate::pool::Pool;
use crate::segments::AllocationClass;

/// Segments of garbage that a growing pool may have, in addition to one segment per segment of live
/// data, before it is cleaned.
const GARBAGE_SEGMENTS: u64 = 4;

/// The goal while space is short: this number of free segments, in addition to the reserves of
/// writes, the needs of a checkpoint, and two batches of moves. In a small pool the goal is a
/// fraction of all segments, 1 / `SLACK_PART`, and at least `SLACK_MIN`.
const SLACK: usize = 4;
const SLACK_PART: usize = 20;
const SLACK_MIN: usize = 2;

/// Bytes that one record moves: at most `MOVE_BYTES`, and 1 / `BATCH_PART` of the pool or a
/// segment, whichever is more.
const MOVE_BYTES: u64 = 2 << 20;
const BATCH_PART: u64 = 256;

/// While space is short, the log between checkpoints takes at most 1 / `ROUND_PART` of the bytes
/// that are not live: the log after the last checkpoint cannot be cleaned.
const ROUND_PART: u64 = 4;

/// Most segments chosen together.
const CHOSEN: usize = 16;

/// The number of segments that should be free while space is short.
fn goal<D: SegmentStore>(pool: &Pool<D>) -> usize {
    let segments = pool.segments();
    let slack = segments.kept_for_checkpoint() + SLACK + batches(pool);
    let part = segments.files().len() / SLACK_PART;
    (segments.reserved() + part).min(slack).max(segments.reserved() + SLACK_MIN)
}

/// Bytes that one record moves; fewer in a small pool.
fn whole_batch_bytes<D: SegmentStore>(pool: &Pool<D>) -> u64 {
    let bytes = u64::from(pool.segments().bytes());
    let part = pool.segments().files().len() as u64 * bytes / BATCH_PART;
    part.max(bytes).min(MOVE_BYTES)
}

/// The number of segments that two batches in flight fill.
fn batches<D: SegmentStore>(pool: &Pool<D>) -> usize {
    (2 * whole_batch_bytes(pool)).div_ceil(pool.segments().bytes().into()) as usize
}

/// Whether so few segments are free that cleaning could not begin again if the moves in flight were
/// given up. That happens when the round must finish.
pub(super) fn is_near_reserve<D: SegmentStore>(pool: &Pool<D>) -> bool {
    pool.segments().free() + 1 < pool.segments().reserved() + batches(pool)
}

/// Bytes that one record moves now.
pub(super) fn batch_bytes<D: SegmentStore>(pool: &Pool<D>) -> u64 {
    match is_near_reserve(pool) {
        true => u64::from(pool.segments().bytes()) / 4,
        false => whole_batch_bytes(pool),
    }
}

/// Whether space is short.
pub(crate) fn is_scarce<D: SegmentStore>(pool: &Pool<D>) -> bool {
    pool.segments().available() < goal(pool)
}

/// Whether space may soon be short.
pub(super) fn is_nearly_scarce<D: SegmentStore>(pool: &Pool<D>) -> bool {
    pool.segments().available() < 2 * goal(pool)
}

/// Whether the pool will not grow soon: it cannot grow, or the existing segments have space for the
/// log of two checkpoints, and more than the segments that are made ahead.
fn has_free_space<D: SegmentStore>(pool: &Pool<D>) -> bool {
    let segments = pool.segments();
    let log = 2 * pool.options().checkpoint_bytes / u64::from(segments.bytes());
    let wanted = log.max(pool.beyond() as u64 + 1);
    !segments.grows() || segments.free() as u64 >= segments.reserved() as u64 + wanted
}

/// Whether enough segments are free, if `more` more become free.
pub(super) fn is_enough<D: SegmentStore>(pool: &Pool<D>, more: usize) -> bool {
    pool.segments().available() + more > goal(pool)
}

/// Whether space is so short that writes are refused.
fn refuses_writes<D: SegmentStore>(pool: &Pool<D>) -> bool {
    pool.segments().available() <= pool.segments().reserved()
}

/// The part of freed bytes that writes may use. It is smaller the fewer segments are free, so that
/// their number grows.
pub(super) fn share<D: SegmentStore>(pool: &Pool<D>, bytes: u64) -> u64 {
    let segments = pool.segments();
    let wanted = goal(pool).saturating_sub(segments.reserved()).max(1) as u64;
    bytes * (segments.free_for(AllocationClass::Write) as u64).min(wanted) / wanted
}

/// Most bytes of log until the next checkpoint. While space is short there are fewer, because the
/// log after a checkpoint cannot be cleaned. Fewest while no thread cleans, because cleaning
/// follows a checkpoint.
pub(crate) fn round_bytes<D: SegmentStore>(pool: &Pool<D>, is_cleaned: bool) -> u64 {
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

/// How many unknown bytes (counted, but possibly not live) are tolerated before a liveness scan.
/// None while segments are short: quarantined segments can be cleaned only after a scan. Next to
/// none if so much is live that writes are refused, however many segments are free.
pub(super) fn tolerated_unknown<D: SegmentStore>(pool: &Pool<D>, frozen: &Frozen) -> u64 {
    let counted: u64 = frozen.whole.live.iter().sum();
    let segments = pool.segments();
    match (refuses_writes(pool), is_scarce(pool)) {
        _ if pool.requested_scan().is_some_and(|round| frozen.round >= round) => 0,
        (true, _) => 0,
        _ if pool.unreserved_bytes() < pool.early_bytes() => u64::from(segments.bytes()) / 2,
        (_, true) if segments.counts().quarantined > 0 => 0,
        (_, true) => counted / 32,
        _ => counted / 4,
    }
}

/// The segments to clean next.
pub(super) struct Choice {
    /// In the order in which to clean them.
    pub(super) victims: Vec<u32>,
    /// Whether to clean only until enough segments are free.
    pub(super) for_space: bool,
}

/// Whether a segment contains pages of the checkpoint.
pub(super) fn has_pages(frozen: &Frozen, marks: &Marks, number: u32) -> bool {
    marks.live_bytes(number) > at(&frozen.whole.live, number)
}

fn at(counts: &[u64], number: u32) -> u64 {
    counts.get(number as usize).copied().unwrap_or(0)
}

/// Chooses the segments to clean next, except those in `seen`. While space is short: those with the
/// least live data. Otherwise: as many as bring the garbage down to what a growing pool may have.
pub(super) fn choose<D: SegmentStore>(
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
    // Blocks by the current live counts, pages by those of the checkpoint.
    let ((blocks, _), old) = (segments.live(), &frozen.whole.live);
    let live_bytes = |number: u32| {
        marks.live_bytes(number).saturating_sub(at(old, number)) + at(&blocks, number)
    };
    let live: u64 = used.iter().map(|number| live_bytes(*number)).sum();
    let garbage = (used.len() as u64 * size).saturating_sub(live);
    // Garbage may take as much space as live data.
    let tolerated = live + GARBAGE_SEGMENTS * size;
    let mut excess = if has_free_space(pool) { 0 } else { garbage.saturating_sub(tolerated) };
    let (for_space, refuses_writes) = (is_scarce(pool), refuses_writes(pool));
    // While space is short, segments with little garbage are worth cleaning too.
    let parts = match (refuses_writes, for_space) {
        (true, _) => 32,
        (_, true) => 16,
        _ => 8,
    };
    let is_worth = |number: u32| live_bytes(number) * parts <= size * (parts - 1);
    used.retain(|number| !seen.contains(number) && is_worth(*number));
    // When writes are refused, prefer segments of pages: giving pages up needs no space.
    let is_thin = |number: u32| {
        refuses_writes && has_pages(frozen, marks, number) && 2 * live_bytes(number) < size
    };
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
