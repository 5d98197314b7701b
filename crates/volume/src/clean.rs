//! Cleaning (garbage collection): copies the live blocks out of segments that contain few, so that
//! whole segments become free.
//!
//! Cleaning follows a checkpoint and chooses victims by the live count of each segment. The group
//! headers in a segment name its blocks, and the maps say which of them are live. The cleaner
//! writes the live blocks to cold segments and syncs these; only then does a group of the log state
//! the moves. A concurrent write is not undone: a move changes a map entry only if the entry is
//! still the old one.
//!
//! A segment is free as soon as the log states durably that it has no live blocks, without another
//! checkpoint, see [`crate::segments`]. While space is short, cleaning runs concurrently with
//! writes, which are throttled: see `committer/space.rs`.

mod cold;
mod liveness_scan;
mod pages;
mod policy;
mod summary;
mod victim;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use blockyard_store::SegmentStore;
use blockyard_sync::completion_queue::{CompletionQueue, Receiver};
use blockyard_volume_format::entry::Entry;
use blockyard_volume_format::group::DESCRIPTOR_BYTES;

use crate::checkpoint;
use crate::frozen::{Frozen, Marks};
use crate::maintenance::Stage;
use crate::pool::Pool;
use crate::record::{Body, Move, Record, Relocation, Reply, ReplyTo};
use crate::segments::{AllocationClass, Segments};
use crate::thread;

use policy::{Choice, choose, has_pages};
pub(crate) use policy::{is_scarce, round_bytes};
use summary::Block;
use victim::{Piece, Victim};

/// Most blocks that one record moves.
const MOVES_MAX: usize = 1024;

/// Longest sleeps until the cleaner checks again whether the committer has answered or wants it to
/// end the round.
const ANSWER_CHECK_INTERVAL: Duration = Duration::from_millis(5);
const IDLE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Which cleaning follows a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cleaning {
    /// No cleaning.
    Nothing,
    /// Clean if space is short, and do a liveness scan if that is worth its cost.
    Due,
    /// Clean, but only a few segments, because a write found no space.
    Needed {
        /// Whether a liveness scan is allowed.
        counts: bool,
    },
}

/// Most segments that are cleaned for a write that found no space.
const NEEDED: usize = 4;

/// The way in which the cleaner submits its moves to the log.
trait RelocationSink {
    /// Begins a move. The move before it must have ended.
    fn begin(&mut self, moved: Relocation);

    /// Waits for the move that was begun. Returns whether it is durable, and everything before it.
    fn end(&mut self) -> bool;
}

/// Submits moves to the committer from another thread, as records.
struct Background<'a, D: SegmentStore> {
    pool: &'a Pool<D>,
    replies: Receiver<Reply>,
    awaits_reply: bool,
}

impl<D: SegmentStore> RelocationSink for Background<'_, D> {
    fn begin(&mut self, moved: Relocation) {
        let reply = ReplyTo::new(self.replies.completion_queue(), 0);
        self.pool.send(Record::of(Body::Move(Arc::new(moved)), Some(reply)));
        self.awaits_reply = true;
    }

    fn end(&mut self) -> bool {
        while self.awaits_reply {
            match self.replies.take() {
                Some(reply) => {
                    self.awaits_reply = false;
                    return reply.status.is_ok();
                }
                // The committer waits for this thread or has ended: the reply will come late or
                // never.
                None if self.will_not_reply() => return false,
                None => {
                    let is_any = || self.replies.is_any();
                    thread::wait_until(&|| is_any() || self.will_not_reply());
                    self.replies
                        .completion_queue()
                        .event_count()
                        .sleep(ANSWER_CHECK_INTERVAL, is_any);
                }
            }
        }
        true
    }
}

impl<D: SegmentStore> Background<'_, D> {
    /// Whether the committer will not reply now.
    fn will_not_reply(&self) -> bool {
        self.pool.maintenance().must_finish() || !self.pool.is_running()
    }
}

/// Executes moves on the committer's own thread.
struct Inline<F> {
    execute: F,
    is_done: bool,
}

impl<F: FnMut(Relocation) -> bool> RelocationSink for Inline<F> {
    fn begin(&mut self, moved: Relocation) {
        self.is_done = (self.execute)(moved);
    }

    fn end(&mut self) -> bool {
        self.is_done
    }
}

/// Cleans after a checkpoint, on a thread other than the committer's. Continues as long as space is
/// short or may soon be, and returns when another checkpoint is due.
pub(crate) fn concurrent<D: SegmentStore>(pool: &Pool<D>, frozen: &Frozen, marks: &Marks) {
    // Two places: the reply to a move that was given up may still arrive.
    let sink = Background { pool, replies: CompletionQueue::open(2), awaits_reply: false };
    let mut cleaner = Cleaner::new(pool, frozen, marks, sink);
    cleaner.scan_liveness();
    loop {
        pool.set_stage(Stage::Cleaning);
        let may_continue = cleaner.run(usize::MAX);
        pool.set_stage(Stage::Resting);
        if !may_continue || !policy::is_nearly_scarce(pool) {
            return;
        }
        // A command that the committer sends after this point ends the sleep below.
        let mut sent = pool.maintenance().sent();
        while !policy::is_scarce(pool) {
            if pool.maintenance().must_finish() || pool.is_latched() {
                return;
            }
            thread::wait_until(&|| pool.maintenance().sent() != sent);
            sent = pool.maintenance().sleep(IDLE_CHECK_INTERVAL, sent);
        }
    }
}

/// Cleans after a checkpoint on the committer's own thread: passes each move to `execute`, until
/// nothing is left to move or `execute` returns false.
pub(crate) fn inline<D: SegmentStore>(
    pool: &Pool<D>,
    frozen: &Frozen,
    marks: &Marks,
    cleaning: Cleaning,
    execute: impl FnMut(Relocation) -> bool,
) {
    let (counts, most) = match cleaning {
        Cleaning::Nothing => return,
        Cleaning::Due => (true, usize::MAX),
        Cleaning::Needed { counts } => (counts, NEEDED),
    };
    let mut cleaner = Cleaner::new(pool, frozen, marks, Inline { execute, is_done: true });
    if counts {
        cleaner.scan_liveness();
    }
    cleaner.run(most);
}

/// The moves of the next record.
#[derive(Default)]
struct PendingRelocations {
    moves: Vec<Move>,
    bytes: u64,
    /// The most map pages that these moves change.
    pages: u64,
    /// Segments to which the blocks were written; they must be synced before the record is sent.
    into: BTreeSet<u32>,
}

impl PendingRelocations {
    /// Adds blocks that were written to segment `into`, with their new places.
    fn add(&mut self, piece: &Piece<'_>, into: u32, places: Vec<Entry>) {
        let moves = piece.blocks.iter().zip(places).map(|(block, to)| {
            let Block { family, number, entry, .. } = *block;
            Move { family, block: number, from: entry, to }
        });
        self.moves.extend(moves);
        self.into.insert(into);
        self.pages += piece.pages;
        self.bytes += piece.bytes.len() as u64;
    }
}

/// Empties segments after one checkpoint.
struct Cleaner<'a, D: SegmentStore, C> {
    pool: &'a Pool<D>,
    frozen: &'a Frozen,
    marks: &'a Marks,
    sink: C,
    /// Number of checkpoints that had begun when cleaning started.
    round: u64,
    victim: Victim,
    pending: PendingRelocations,
    /// Most map pages that the record submitted last changes.
    submitted_pages: u64,
    /// Segments that were examined since this checkpoint.
    seen: BTreeSet<u32>,
    /// Segments whose live blocks were all submitted, or overwritten by clients.
    emptying: Vec<u32>,
    /// Segments that had no live blocks before the last record was submitted. They are free when
    /// that record is durable.
    emptied: Vec<u32>,
}

impl<'a, D: SegmentStore, C: RelocationSink> Cleaner<'a, D, C> {
    fn new(pool: &'a Pool<D>, frozen: &'a Frozen, marks: &'a Marks, sink: C) -> Self {
        Cleaner {
            pool,
            frozen,
            marks,
            sink,
            round: pool.segments().round(),
            victim: Victim::default(),
            pending: PendingRelocations::default(),
            submitted_pages: 0,
            seen: BTreeSet::new(),
            emptying: Vec::new(),
            emptied: Vec::new(),
        }
    }

    /// Does a liveness scan, if that is worth its cost. Leaves that cannot be read are given up, so
    /// that the next scan is complete.
    fn scan_liveness(&mut self) {
        let tolerated = policy::tolerated_unknown(self.pool, self.frozen);
        let mut lost = liveness_scan::scan(self.pool, self.frozen, tolerated).into_iter();
        if lost.all(|lost| self.submit(lost)) {
            self.end();
        }
    }

    /// Cleans until enough is free, `most` segments at most. Returns false if it ended for any
    /// other reason.
    fn run(&mut self, most: usize) -> bool {
        let mut left = most;
        loop {
            let Choice { victims, for_space } =
                choose(self.pool, self.frozen, self.marks, &self.seen);
            // No segment is worth cleaning, or cleaning is not needed yet.
            if victims.is_empty() {
                return self.finish() && !for_space;
            }
            if !self.begin(&victims) {
                self.finish();
                return false;
            }
            // The pages in these segments were given up, or could not be moved.
            let has_pages = |number: &u32| has_pages(self.frozen, self.marks, *number);
            let (pages, victims): (Vec<u32>, Vec<u32>) = victims.into_iter().partition(has_pages);
            self.seen.extend(pages);
            for victim in victims {
                let more = self.emptying.len() + self.emptied.len();
                if left == 0 || (for_space && policy::is_enough(self.pool, more)) {
                    return self.finish();
                }
                left -= 1;
                self.seen.insert(victim);
                // A checkpoint that is due has priority.
                if self.pool.maintenance().must_finish() || !self.empty(victim) {
                    self.finish();
                    return false;
                }
            }
        }
    }

    /// Prepares for emptying the victims. Returns whether that succeeded.
    fn begin(&mut self, victims: &[u32]) -> bool {
        // The log after the older superblock's checkpoint may pass through the victims.
        checkpoint::repeat(self.pool);
        if !self.pool.segments().is_for_one() {
            return false;
        }
        // This walk through all maps is worth its time once per checkpoint.
        if !self.seen.is_empty() {
            return true;
        }
        let pages = victims.iter().copied();
        let pages = pages.filter(|number| has_pages(self.frozen, self.marks, *number)).collect();
        let (pages, page_count) = pages::select(self.pool, self.frozen, pages);
        pages.is_empty() || {
            let spans = pages::prefetch(self.pool, self.frozen, &pages);
            let round = self.round;
            self.submit(Relocation { pages, spans, page_count, round, ..Relocation::default() })
        }
    }

    /// Submits a record after the one before has ended. Returns false if one of them is not
    /// durable.
    fn submit(&mut self, moved: Relocation) -> bool {
        if !self.end() {
            return false;
        }
        self.release();
        let segments = self.pool.segments();
        let (emptied, emptying) =
            self.emptying.drain(..).partition(|number| segments.live_bytes(*number) == 0);
        (self.emptied, self.emptying) = (emptied, emptying);
        self.submitted_pages = moved.page_count;
        self.sink.begin(moved);
        // When very few segments are free, wait for each record before the next.
        !policy::is_near_reserve(self.pool) || self.end()
    }

    /// Waits for the record submitted last, and returns whether it is durable. If not, nothing is
    /// known to be durable, and no segment is freed.
    fn end(&mut self) -> bool {
        let is_ended = self.sink.end();
        if !is_ended {
            self.emptied.clear();
        }
        is_ended
    }

    /// Frees the segments that were empty before the record that has now ended was submitted.
    fn release(&mut self) {
        let count = self.pool.segments().release(&self.emptied);
        self.pool.meters().cleaned(count);
        self.emptied.clear();
    }

    /// Syncs the blocks that were written and submits their moves.
    fn submit_pending(&mut self) -> bool {
        if self.pending.moves.is_empty() {
            return true;
        }
        let PendingRelocations { moves, pages: page_count, into, .. } =
            std::mem::take(&mut self.pending);
        for segment in into {
            if let Err(error) = self.pool.segments().sync(segment) {
                self.pool.latch(&format!("blocks could not be moved: {error}"));
                return false;
            }
        }
        self.submit(Relocation { moves, page_count, round: self.round, ..Relocation::default() })
    }

    /// Waits for all records, frees the segments that are then empty, and returns whether all
    /// succeeded.
    fn finish(&mut self) -> bool {
        if self.pool.maintenance().must_finish() || !self.submit_pending() || !self.end() {
            return false;
        }
        self.release();
        self.submitted_pages = 0;
        if self.emptying.is_empty() {
            return true;
        }
        let nothing = Relocation { round: self.round, ..Relocation::default() };
        let ended = self.submit(nothing) && self.end();
        if ended {
            self.release();
        }
        // Segments that still have live blocks are left for the next cleaning.
        self.emptying.clear();
        ended
    }

    /// The live blocks in the victim that was read, and their bytes; `None` if the segment's live
    /// count is higher.
    fn live_blocks(&self, number: u32) -> Option<(Vec<Block>, u64)> {
        let named = summary::named(self.pool, number, self.victim.bytes());
        find_live_blocks(self.pool.segments(), number, || summary::counting(self.pool, &named))
    }

    /// Moves the live blocks out of a segment. Returns whether cleaning may continue with others.
    fn empty(&mut self, number: u32) -> bool {
        let (pool, size) = (self.pool, u64::from(self.pool.segments().bytes()));
        let counted = pool.segments().live_bytes(number);
        if counted == 0 {
            self.emptying.push(number);
            return true;
        }
        self.victim.read(pool, number);
        let Some((found, bytes)) = self.live_blocks(number) else { return true };
        let mut left = &found[..];
        while !left.is_empty() {
            if pool.is_latched() || pool.maintenance().must_finish() {
                return false;
            }
            let taken = self.pending.pages + self.submitted_pages;
            let most = pages_left(pool).map(|most| most.saturating_sub(taken));
            let piece = most.map(|most| self.victim.piece(pool, left, most));
            let Some(piece) = piece.filter(|piece| piece.rest.len() < left.len()) else {
                // Not one block fits in addition to the pending moves; after these there may be
                // space.
                if !self.pending.moves.is_empty() || self.submitted_pages > 0 {
                    if !self.submit_pending() || !self.end() {
                        return false;
                    }
                    self.submitted_pages = 0;
                    continue;
                }
                // A checkpoint must write pages first.
                return false;
            };
            left = piece.rest;
            if piece.blocks.is_empty() {
                continue;
            }
            let (into, places) = match cold::write(pool, &piece.blocks, &piece.bytes) {
                Ok(Some(written)) => written,
                Ok(None) => return false,
                Err(error) => {
                    pool.latch(&format!("blocks could not be moved: {error}"));
                    return false;
                }
            };
            let moved = piece.bytes.len() as u64;
            // The blocks in `into` become live when the record is carried out. Until then its live
            // count is too low, so it must not be chosen as a victim.
            self.seen.insert(into);
            self.pending.add(&piece, into, places);
            let freed = size.saturating_sub(bytes) * moved / bytes.max(1);
            pool.maintenance().add_freed_bytes(policy::share(pool, freed));
            let descriptors = (size as usize / 4 / DESCRIPTOR_BYTES).min(MOVES_MAX);
            let is_full = self.pending.moves.len() >= descriptors
                || self.pending.bytes >= policy::batch_bytes(pool);
            if is_full && !self.submit_pending() {
                return false;
            }
        }
        self.emptying.push(number);
        true
    }
}

/// How often the live blocks of a segment are searched while maps change.
const FIND_TRIES: usize = 16;

/// The live blocks of a segment, as `find` returns them, and their bytes; `None` if the segment's
/// live count is higher. `find` also returns whether all pages could be read.
fn find_live_blocks<D: SegmentStore>(
    segments: &Segments<D>,
    number: u32,
    find: impl Fn() -> (Vec<Block>, bool),
) -> Option<(Vec<Block>, u64)> {
    for _ in 0..FIND_TRIES {
        let (found, is_read) = find();
        let bytes = found.iter().map(|block| u64::from(block.entry.stored_bytes())).sum();
        if segments.live_bytes(number) <= bytes {
            return Some((found, bytes));
        }
        // Blocks that were overwritten meanwhile may still be in the live count.
        let live = (0..FIND_TRIES).find_map(|_| {
            std::thread::yield_now();
            segments.stable_live_bytes(number)
        });
        match live {
            Some(live) if live <= bytes => return Some((found, bytes)),
            // A block of it was not found or is not live. The segment could not become free, so it
            // is quarantined until the next liveness scan.
            Some(live) => {
                if segments.quarantine(number) && !is_read {
                    // The liveness scan gives up pages that cannot be read.
                    segments.add_unknown_bytes(live);
                }
                return None;
            }
            None => {}
        }
    }
    None
}

/// Most pages that a batch of moves may change, if it takes at most one segment for blocks and one
/// for the log. `None` if not even one fits, or no segment is left for pages.
fn pages_left<D: SegmentStore>(pool: &Pool<D>) -> Option<u64> {
    let segments = pool.segments();
    let taken = if victim::open_space(pool).is_some() { 1 } else { 2 };
    segments.pages_left(AllocationClass::Move, taken + 1)?;
    segments.pages_left(AllocationClass::Move, taken)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::maintenance::RoundCommand;
    use crate::map::Tally;
    use crate::options::Options;
    use crate::stepped_pool::{BLOCK, FULL, SteppedPool};

    /// Segments of a pool that runs out of space in these tests.
    const SHORT: usize = 37;

    /// Regression: no liveness scan was done when only a reservation left too little space for
    /// others.
    #[test]
    fn a_reservation_lowers_the_unknown_garbage_that_is_tolerated() {
        let mut stepped = SteppedPool::new("reserved");
        for number in 0..14 {
            stepped.write(number * FULL, FULL);
        }
        let frozen = stepped.committer.freeze();
        let before = policy::tolerated_unknown(&stepped.pool, &frozen);
        assert_eq!(before, 14 * FULL * BLOCK / 4);
        stepped.reserve("w", (stepped.pool.unreserved_bytes() - (64 << 10)) / BLOCK * BLOCK);
        assert_eq!(policy::tolerated_unknown(&stepped.pool, &frozen), 32 << 10);
    }

    /// Several threads read leaves; the count must equal that of one thread.
    #[test]
    fn leaves_that_are_not_in_memory_are_counted_too() {
        let mut stepped = SteppedPool::new("counted");
        stepped.take("w", 100 * 256);
        for leaf in 0..100 {
            stepped.write(leaf * 256, 1);
        }
        let (frozen, _) = stepped.checkpoint();
        let leaves = || frozen.volumes.iter().flat_map(|(.., map)| map.iter().flatten());
        let away = || leaves().flat_map(|node| node.leaves()).map(|(_, leaf)| leaf);
        for leaf in away() {
            while leaf.is_resident() {
                leaf.evict();
            }
        }
        assert_eq!(away().count(), 100);
        let (live, _) = stepped.pool.segments().live();
        stepped.pool.segments().add_unknown_bytes(1);
        let frozen = stepped.committer.freeze();
        assert!(liveness_scan::scan(&stepped.pool, &frozen, 0).is_empty());
        assert_eq!(stepped.pool.segments().live(), (live, 0));
        assert!(away().all(|leaf| !leaf.is_resident()), "the scan does not cache them");
    }

    /// Regression: a live count that was too small was never corrected. The segment was eventually
    /// taken for empty and overwritten.
    #[test]
    fn a_live_count_that_was_too_small_is_corrected() {
        let mut stepped = SteppedPool::new("too-small");
        for number in 0..3 {
            stepped.write(number * FULL, FULL);
        }
        let pool = Arc::clone(&stepped.pool);
        let (segments, number) = (pool.segments(), stepped.segment(0));
        let (whole, _) = segments.live();
        let live = whole.iter().zip(0..).map(|(live, at)| if at == number { 0 } else { *live });
        segments.set_live(live.collect(), 1);
        // The segment seems to have no live blocks, so the checkpoint does not keep it.
        stepped.checkpoint();
        assert!(!segments.used_before(u64::MAX).contains(&number));
        let free = segments.free();
        let frozen = stepped.committer.freeze();
        // Writes and discards after the freeze must be counted as well.
        stepped.write(3 * FULL, FULL);
        stepped.discard(FULL, 4);
        let (now, _) = segments.live();
        assert!(liveness_scan::scan(&pool, &frozen, 0).is_empty());
        let (found, _) = segments.live();
        assert_eq!((found[number as usize], segments.raised()), (FULL * BLOCK, 1));
        let others = |live: &[u64]| {
            let others = live.iter().enumerate().filter(|(at, _)| *at != number as usize);
            others.map(|(_, live)| *live).collect::<Vec<u64>>()
        };
        assert_eq!(others(&found), others(&now));
        assert!(segments.used_before(u64::MAX).contains(&number));
        assert_eq!(
            segments.free() + 2,
            free,
            "the corrected segment is not free, and the write took one"
        );
        let frozen = stepped.committer.freeze();
        segments.add_unknown_bytes(1);
        assert!(liveness_scan::scan(&pool, &frozen, 0).is_empty());
        assert_eq!(segments.live().0, found);
    }

    /// Regression: with constant writes, a segment whose live count was higher than what was found
    /// was searched again after each checkpoint, without effect.
    #[test]
    fn writes_during_a_search_do_not_hide_a_wrong_live_count() {
        let mut stepped = SteppedPool::new("quarantined");
        stepped.write(0, 4);
        let (segments, number) = (stepped.pool.segments(), stepped.segment(0));
        let find = || {
            segments.begin_changes();
            segments.end_changes(&Tally::new(segments.bytes()));
            (Vec::new(), true)
        };
        assert!(find_live_blocks(segments, number, find).is_none());
        assert_eq!(segments.counts().quarantined, 1);
        segments.begin_changes();
        assert_eq!(segments.stable_live_bytes(number), None);
        segments.end_changes(&Tally::new(segments.bytes()));
        assert_eq!(segments.stable_live_bytes(number), Some(4 * BLOCK));
    }

    /// Regression: the cleaner waited for a committer that had panicked, and the pool stayed
    /// locked.
    #[test]
    fn cleaning_does_not_wait_for_a_committer_that_has_ended() {
        let stepped = SteppedPool::new("gone");
        let mut sink = Background {
            pool: &stepped.pool,
            replies: CompletionQueue::open(2),
            awaits_reply: false,
        };
        sink.begin(Relocation::default());
        assert!(!stepped.pool.is_running() && !sink.end());
    }

    /// Regression: cleaning without need halved the speed of a client with long writes.
    #[test]
    fn nothing_is_cleaned_while_there_is_free_space() {
        let chosen = |stepped: &mut SteppedPool| {
            let (frozen, marks) = stepped.checkpoint();
            let choice = choose(&stepped.pool, &frozen, &marks, &BTreeSet::new());
            assert!(!choice.for_space && !is_scarce(&stepped.pool));
            choice.victims.len()
        };
        // Each pass leaves one block of each group live.
        let write = |stepped: &mut SteppedPool, times: std::ops::Range<u64>| {
            for (time, number) in times.flat_map(|time| (0..14).map(move |it| (time, it))) {
                stepped.write(number * FULL + time, FULL - time);
            }
        };
        // The pool cannot grow: all its segments exist.
        let mut stepped = SteppedPool::of("space", 100, 100);
        write(&mut stepped, 0..5);
        assert_eq!(chosen(&mut stepped), 0, "four fifths of what is used are garbage");
        // The pool can grow.
        let mut stepped = SteppedPool::of("grows", 100, 1000);
        write(&mut stepped, 0..1);
        (0..10).for_each(|number| stepped.write(number * FULL + 1, FULL - 1));
        assert_eq!(chosen(&mut stepped), 0, "not half of it is");
        write(&mut stepped, 1..5);
        assert!(chosen(&mut stepped) > 20);
    }

    /// Regression: where a segment is longer than half of the log between checkpoints, the segments
    /// made ahead counted as enough space. A growing pool was cleaned only when it could grow no
    /// more.
    #[test]
    fn segments_made_ahead_do_not_count_as_space_for_garbage() {
        for checkpoint_bytes in [16 << 10, 64 << 10, 120 << 10] {
            let options = Options { checkpoint_bytes, segments_max: 1000, ..Options::default() };
            let mut stepped = SteppedPool::by("ahead", 10, options);
            let pool = Arc::clone(&stepped.pool);
            // Prevents cleaning until the pool is full of garbage.
            pool.maintenance().send(RoundCommand::Finish);
            for (time, number) in (0..5).flat_map(|time| (0..14).map(move |it| (time, it))) {
                stepped.write(number * FULL + time, FULL - time);
            }
            pool.maintenance().withdraw_finish();
            let (frozen, marks) = stepped.checkpoint();
            let segments = pool.segments();
            while segments.free() > segments.reserved() {
                assert!(segments.take(AllocationClass::Checkpoint).is_some());
            }
            pool.set_running(true);
            pool.prepare(0);
            pool.end_preparing();
            pool.set_running(false);
            assert!(segments.free() > segments.reserved() && !is_scarce(&pool));
            let victims = choose(&pool, &frozen, &marks, &BTreeSet::new()).victims;
            assert!(victims.len() > 10, "{checkpoint_bytes}: {victims:?} of {:?}", pool.counts());
        }
    }

    /// Regression: blocks whose move is in flight are not yet in the live count of their new
    /// segment. If a client discarded them as soon as they were, the segment became free before the
    /// discard was durable. After a crash the moves were replayed, and the segment contained other
    /// data.
    #[test]
    fn a_segment_that_is_the_target_of_a_move_in_flight_is_not_empty() {
        let stepped = RefCell::new(SteppedPool::of("move-in-flight", SHORT, SHORT));
        let pool = Arc::clone(&stepped.borrow().pool);
        let execute = |moved| stepped.borrow_mut().committer.move_blocks(moved);
        let segment = |block| stepped.borrow().segment(block);
        let cold = || pool.cold().map(|cold| cold.segment);
        // Write enough garbage that cleaning is worthwhile.
        for number in 0..14 {
            stepped.borrow_mut().write(number * FULL, FULL);
        }
        for number in 2..14 {
            stepped.borrow_mut().write(number * FULL + 1, FULL - 1);
        }
        // The last live blocks of the first segment go to a cold segment with space left.
        stepped.borrow_mut().write(0, 10);
        let (frozen, marks) = stepped.borrow_mut().checkpoint();
        let mut cleaner =
            Cleaner::new(&pool, &frozen, &marks, Inline { execute: &execute, is_done: true });
        assert!(cleaner.empty(segment(10)) && cleaner.finish());
        let into = segment(10);
        assert_eq!(cold(), Some(into));
        // Overwrite the moved blocks, so that the cold segment has no live blocks.
        stepped.borrow_mut().write(10, 4);
        stepped.borrow_mut().write(FULL, 3);
        assert_eq!(pool.segments().live_bytes(into), 0);
        let (frozen, marks) = stepped.borrow_mut().checkpoint();
        // The blocks of the second segment fill the cold segment.
        let mut cleaner =
            Cleaner::new(&pool, &frozen, &marks, Inline { execute: &execute, is_done: true });
        assert!(cleaner.empty(segment(FULL + 3)));
        assert_eq!(pool.segments().live_bytes(into), 0, "no move was submitted");
        assert_ne!(cold(), Some(into), "it is not full");
        let victims = |seen: &BTreeSet<u32>| choose(&pool, &frozen, &marks, seen).victims;
        assert!(is_scarce(&pool), "{:?}", pool.counts());
        assert_eq!(
            victims(&BTreeSet::new()).first(),
            Some(&into),
            "the usage table has no live data for it"
        );
        if victims(&cleaner.seen).contains(&into) {
            assert!(cleaner.empty(into));
        }
        assert!(cleaner.submit_pending());
        assert!(pool.segments().live_bytes(into) > 0);
        stepped.borrow_mut().discard(FULL + 3, FULL - 3);
        assert_eq!(pool.segments().live_bytes(into), 0);
        assert!(cleaner.finish());
        let used = pool.segments().used_before(u64::MAX);
        assert!(used.contains(&into), "it is free, and the discard is not durable");
    }
}
