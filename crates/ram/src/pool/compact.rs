//! Compaction: moves the objects of sparse segments elsewhere and returns the segments to the
//! system.
//!
//! A pass chooses the sparsest segments as victims, stops allocation in them, and walks the table
//! of words once. Each object in a victim is copied elsewhere, and its word is exchanged for the
//! copy's; if a client replaces the word first, the copy is dropped. A victim goes back to the
//! system when its last object is freed. An object that a channel has allocated and not yet
//! published stays, and keeps its segment until it is freed or until the next compaction.
//!
//! A shared object is copied when the walk reaches the first of its words; the other words are
//! exchanged for the same copy. Until the pass ends, the compaction holds a part in both, so that
//! neither place can be reused.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;

use blockyard_sync::block_table::BlockTable;
use blockyard_sync::hazard_pointers::{HazardGuard, HazardSlot};
use blockyard_sync::lock::Lock;

use super::arena::{ArenaPages, PagePurpose};
use super::config::RESERVE_PART;
use super::layout::{Layout, PAGE_UNITS, UNIT_BYTES};
use super::memory::PAGE_BYTES;
use super::shard::Candidate;
use super::{Cache, NoSpace, Object, Pool};

/// Segments with less than 1/64 of their space free are not victims.
const SPARSE: u32 = 64;
/// Maximum passes over the table in one compaction.
const PASSES_MAX: u32 = 64;
/// A pass moves at most 1/8 of the objects in the pool, by size.
const PASS_PART: u64 = 8;
/// A pass may always move this many segments' worth of objects.
const PASS_SEGMENTS: u64 = 16;

/// A write that reaches the limit compacts only if at least 1/16 of the pages in use is free.
const ROOM_PART: u64 = 16;
/// Pages that such a compaction tries to free.
const ROOM_PAGES: u64 = 16;
/// A write compacts again only after one byte per word of the table was stored or freed: examining
/// a word costs about as much as storing a byte. A disk may be much larger than its stored data, so
/// 1/64 of the bytes in use is enough at the latest.
const ROOM_CHANGED_PART: u64 = 64;
/// Interval, in words and in objects, at which a pass checks whether to stop.
const LOOK_WORDS: u64 = 1 << 16;
const LOOK_OBJECTS: u64 = 1024;
/// Number of objects that find no space, after which a pass ends.
const MISSES_MAX: u32 = 64;

/// What a compaction did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// Objects that were moved.
    pub objects_moved: u64,
    /// Bytes of the moved objects.
    pub bytes_moved: u64,
    /// Pages returned to the system, minus those that the moved objects took.
    pub pages_freed: u64,
    /// Passes over the table.
    pub passes: u32,
}

impl Compacted {
    /// Whether the compaction has reached its bounds.
    fn is_over(&self, bounds: Bounds) -> bool {
        self.passes >= PASSES_MAX || self.pages_freed >= bounds.pages
    }
}

/// Limits on one compaction.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Number of freed pages after which the compaction ends.
    pages: u64,
    /// Bytes of objects to move; the last object may exceed it.
    bytes: u64,
}

impl Bounds {
    const NONE: Bounds = Bounds { pages: u64::MAX, bytes: u64::MAX };
}

/// State that writes which reach the limit share.
#[derive(Debug, Default)]
pub(super) struct CompactionState {
    /// Change counter and limit of the pool at the last compaction by a write.
    made_at: Option<(u64, Option<u64>)>,
}

impl CompactionState {
    /// Whether another compaction is worth trying, for a pool of `blocks` words. A refused write
    /// changes nothing, so repeating it does not cause another pass.
    fn is_due(&self, changed_bytes: u64, pages: &ArenaPages, blocks: u64) -> bool {
        let Some((then, limit)) = self.made_at else { return true };
        let least = blocks.min(pages.used * PAGE_BYTES as u64 / ROOM_CHANGED_PART);
        limit != pages.limit || changed_bytes.saturating_sub(then) >= least.max(1)
    }
}

/// A segment to empty.
#[derive(Clone, Copy)]
struct Victim {
    shard: u32,
    segment: u32,
    live: u32,
    granted: u32,
}

impl Cache {
    /// Compacts the pool of these entries until little is left to gain or `stop` returns true;
    /// `stop` is called from time to time. Reads and writes continue meanwhile; another compaction
    /// waits for at most a pass.
    ///
    /// # Safety
    /// The words of the entries refer to objects of this pool only. The hazard-pointer slot is one
    /// of [`Pool::pins`].
    pub unsafe fn compact(
        &mut self,
        entries: &BlockTable,
        seat: &mut HazardSlot,
        stop: impl FnMut() -> bool,
    ) -> Compacted {
        // SAFETY: by this function's contract.
        unsafe { self.compact_until(entries, seat, Bounds::NONE, stop) }
    }

    /// Compacts the pool, but moves objects of at most about `bytes_max` bytes.
    ///
    /// # Safety
    /// As for [`Cache::compact`].
    pub unsafe fn compact_some(
        &mut self,
        entries: &BlockTable,
        seat: &mut HazardSlot,
        bytes_max: u64,
        stop: impl FnMut() -> bool,
    ) -> Compacted {
        let bounds = Bounds { bytes: bytes_max, ..Bounds::NONE };
        // SAFETY: by this function's contract.
        unsafe { self.compact_until(entries, seat, bounds, stop) }
    }

    /// Frees space for an allocation that was refused by the limit, if a good part of the pages in
    /// use is free but not usable. Returns whether to try the allocation again.
    ///
    /// # Safety
    /// As for [`Cache::compact`].
    #[cold]
    pub unsafe fn make_room(&mut self, entries: &BlockTable, seat: &mut HazardSlot) -> bool {
        let mut done = Compacted::default();
        // SAFETY: by this function's contract.
        unsafe { self.make_some_room(entries, seat, &mut done) }
    }

    /// Does the work of [`Cache::make_room`] and adds what it did to `done`.
    ///
    /// # Safety
    /// As for [`Cache::compact`].
    unsafe fn make_some_room(
        &mut self,
        entries: &BlockTable,
        seat: &mut HazardSlot,
        done: &mut Compacted,
    ) -> bool {
        let pool = Arc::clone(self.pool());
        loop {
            // Other threads also free space concurrently: check again before each pass.
            let over = pool.compacting.with(|room| {
                let pages = pool.arena.look();
                let left = if pages.limit.is_some() { pages.free(PagePurpose::Write) } else { 0 };
                // Fewer free pages than the largest object needs are not enough: retrying would not
                // help that object.
                if left >= u64::from(pool.layout.units_max.div_ceil(PAGE_UNITS)) {
                    return Some(true);
                }
                let won = left > 0 || done.pages_freed > 0;
                let enough = (pages.used / u64::from(RESERVE_PART)).max(ROOM_PAGES);
                let bounds = Bounds { pages: enough, ..Bounds::NONE };
                if done.is_over(bounds) || !pool.has_much_free(pages.used) {
                    return Some(won);
                }
                let changed = pool.load().changed_bytes();
                if done.passes == 0 && !room.is_due(changed, &pages, entries.blocks()) {
                    return Some(won);
                }
                // SAFETY: by this function's contract.
                let goes_on = unsafe { self.pass(entries, seat, bounds, done, &mut || false) };
                room.made_at = Some((pool.load().changed_bytes(), pages.limit));
                (!goes_on).then_some(won || done.pages_freed > 0)
            });
            if let Some(is_worth_it) = over {
                return is_worth_it;
            }
        }
    }

    /// Compacts within bounds. Releases the lock after each pass.
    ///
    /// # Safety
    /// As for [`Cache::compact`].
    unsafe fn compact_until(
        &mut self,
        entries: &BlockTable,
        seat: &mut HazardSlot,
        bounds: Bounds,
        mut stop: impl FnMut() -> bool,
    ) -> Compacted {
        let pool = Arc::clone(self.pool());
        let mut done = Compacted::default();
        while !done.is_over(bounds) && !stop() {
            let goes_on = pool.compacting.with(|_| {
                // SAFETY: by this function's contract.
                unsafe { self.pass(entries, seat, bounds, &mut done, &mut stop) }
            });
            if !goes_on {
                break;
            }
        }
        done
    }

    /// Runs one pass over the table and returns whether another one is worthwhile. The caller holds
    /// the lock.
    ///
    /// # Safety
    /// As for [`Cache::compact`].
    unsafe fn pass(
        &mut self,
        entries: &BlockTable,
        seat: &mut HazardSlot,
        bounds: Bounds,
        done: &mut Compacted,
        stop: &mut impl FnMut() -> bool,
    ) -> bool {
        self.reclaim_all();
        let bytes_left = bounds.bytes.saturating_sub(done.bytes_moved);
        let victims = self.pool().victims(bytes_left);
        if victims.is_empty() {
            return false;
        }
        let used = self.pool().arena.look().used;
        let marks = self.pool().drain(&victims);
        let moved = done.bytes_moved;
        // SAFETY: by this function's contract.
        unsafe { self.move_away(entries, seat, &marks, done, stop) };
        self.reclaim_all();
        self.pool().shards.iter().for_each(|shard| shard.with(|shard| shard.end_draining()));
        done.passes += 1;
        let freed = used.saturating_sub(self.pool().arena.look().used);
        self.pool().arena.change(|pages| pages.compacted += freed);
        done.pages_freed += freed;
        let freed_bytes = freed * PAGE_BYTES as u64;
        freed_bytes * u64::from(SPARSE) > done.bytes_moved - moved
    }

    /// Moves all objects that lie in marked segments.
    ///
    /// # Safety
    /// As for [`Cache::compact`].
    unsafe fn move_away(
        &mut self,
        entries: &BlockTable,
        seat: &mut HazardSlot,
        marks: &Marks,
        done: &mut Compacted,
        stop: &mut impl FnMut() -> bool,
    ) {
        let (mut misses, mut copies) = (0, Copies::new());
        for block in 0..entries.blocks() {
            // Walking a large, sparse table takes long even if nothing is moved.
            if block % LOOK_WORDS == LOOK_WORDS - 1 && stop() {
                break;
            }
            let is_marked = |object| marks.contains(object);
            if !Object::of(entries.load(block)).is_some_and(is_marked) {
                continue;
            }
            if done.objects_moved % LOOK_OBJECTS == LOOK_OBJECTS - 1 && stop() {
                break;
            }
            let guard = seat.pin(entries, block);
            let old = guard.word();
            // The holder of a locked word is about to exchange it.
            if old.is_locked() || !Object::of(old).is_some_and(is_marked) {
                continue;
            }
            // SAFETY: by this function's contract; the guard has pinned the block's word.
            let moved = unsafe {
                if old.is_shared() {
                    self.move_shared(entries, block, guard, &mut copies)
                } else {
                    self.move_one(entries, block, guard)
                }
            };
            match moved {
                Ok(bytes) => {
                    done.objects_moved += u64::from(bytes > 0);
                    done.bytes_moved += bytes;
                }
                Err(NoSpace) => misses += 1,
            }
            if misses == MISSES_MAX {
                break;
            }
        }
        for (place, (object, copy)) in copies {
            debug_assert_eq!(place, object.place());
            // SAFETY: these are the two parts that `move_shared` took.
            unsafe {
                self.give_up(copy);
                self.give_up(object);
            }
        }
    }

    /// Moves a block's object and returns its size; 0 if a client's write came first.
    ///
    /// # Safety
    /// The guard pins the block's word through the entries and a slot of the pool. The word refers
    /// to an object and is not marked as shared.
    unsafe fn move_one(
        &mut self,
        entries: &BlockTable,
        block: u64,
        guard: HazardGuard<'_>,
    ) -> Result<u64, NoSpace> {
        let old = guard.word();
        let Some(object) = Object::of(old) else { return Ok(0) };
        // SAFETY: the guard pins the object, by this function's contract.
        let copy = unsafe { self.copy(object, &guard)? };
        let exchanged = entries.exchange(block, old, old.moved_to(copy.place()));
        drop(guard);
        if exchanged.is_ok() {
            // SAFETY: the exchange took the object out of its word. It had no other word: otherwise
            // the word would be marked as shared.
            unsafe { self.retire(object) };
            return Ok(object.len_bytes() as u64);
        }
        // SAFETY: the copy was never published.
        unsafe { self.free(copy) };
        Ok(0)
    }

    /// Moves a shared object, or exchanges one of its words for the copy that was made before.
    ///
    /// # Safety
    /// As for [`Cache::move_one`], except that the word is marked as shared.
    unsafe fn move_shared(
        &mut self,
        entries: &BlockTable,
        block: u64,
        guard: HazardGuard<'_>,
        copies: &mut Copies,
    ) -> Result<u64, NoSpace> {
        let pool = Arc::clone(self.pool());
        let old = guard.word();
        let Some(object) = Object::of(old) else { return Ok(0) };
        let mut bytes = 0;
        let copy = match copies.get(&object.place()) {
            Some(&(_, copy)) => copy,
            None => {
                copies.try_reserve(1).map_err(|_| NoSpace)?;
                // SAFETY: the guard pins the object, by this function's contract.
                let Some(_) = (unsafe { pool.join(entries, block, &guard) }) else { return Ok(0) };
                // SAFETY: as above.
                let copy = match unsafe { self.copy(object, &guard) } {
                    Ok(copy) => copy,
                    Err(NoSpace) => {
                        // SAFETY: this is the part that was just taken.
                        unsafe { self.give_up(object) };
                        return Err(NoSpace);
                    }
                };
                copies.insert(object.place(), (object, copy));
                bytes = object.len_bytes() as u64;
                copy
            }
        };
        // The pass holds one part in the copy; the word needs another.
        // SAFETY: the pass holds a part in the copy until it ends.
        unsafe { pool.add_part(copy) };
        let exchanged = entries.exchange(block, old, old.moved_to(copy.place()));
        drop(guard);
        // SAFETY: either the object was taken out of the word, or the copy was not published there.
        unsafe { self.give_up(if exchanged.is_ok() { object } else { copy }) };
        Ok(bytes)
    }

    /// Copies an object to another place in its shard.
    ///
    /// # Safety
    /// The guard pins the object.
    unsafe fn copy(&mut self, object: Object, guard: &HazardGuard<'_>) -> Result<Object, NoSpace> {
        let pool = Arc::clone(self.pool());
        // SAFETY: by this function's contract.
        let bytes = unsafe { pool.bytes(object, guard) };
        self.alloc_in(pool.layout.shard(object.place()), bytes, PagePurpose::Move)
    }
}

/// For each shared object that was moved, by place: the object and its copy.
type Copies = HashMap<u64, (Object, Object)>;

/// A bitmap of the marked segments, by their number in the pool.
struct Marks {
    bits: Vec<u64>,
    layout: Layout,
}

impl Marks {
    #[inline]
    fn contains(&self, object: Object) -> bool {
        let segment = self.layout.pool_segment(object.place());
        self.bits.get(segment as usize / 64).is_some_and(|word| word >> (segment % 64) & 1 != 0)
    }
}

impl Pool {
    /// Whether enough of the pages in use is free that compaction would gain some.
    fn has_much_free(&self, used_pages: u64) -> bool {
        let free: u64 =
            self.shards.iter().map(|shard| shard.with(|shard| shard.free_units())).sum();
        free * UNIT_BYTES as u64 * ROOM_PART >= used_pages * PAGE_BYTES as u64
    }

    /// Chooses the victims of a pass: the sparsest segments, as many as one pass moves, with
    /// objects of about `bytes_max` bytes at most. Empty if no segment qualifies.
    fn victims(&self, bytes_max: u64) -> Vec<Victim> {
        if bytes_max == 0 {
            return Vec::new();
        }
        let mut victims = Vec::new();
        for (number, shard) in (0u32..).zip(&self.shards) {
            shard.with(|shard| {
                let sparse = |candidate: &Candidate| {
                    candidate.is_empty || candidate.free * SPARSE > candidate.granted
                };
                victims.extend(shard.candidates().filter(sparse).map(|candidate| Victim {
                    shard: number,
                    segment: candidate.segment,
                    live: candidate.granted - candidate.free,
                    granted: candidate.granted,
                }));
            });
        }
        victims.sort_unstable_by_key(|victim| {
            u64::from(victim.live) * u64::from(u32::MAX) / u64::from(victim.granted)
        });
        let pages = self.arena.look();
        let used = pages.used * u64::from(PAGE_UNITS);
        let segment_units = u64::from(self.layout.segment_units());
        // With a limit, at most what fits: a pass moves all objects before it frees any segment.
        let room = pages.free(PagePurpose::Move).saturating_mul(u64::from(PAGE_UNITS));
        let mut left = (used / PASS_PART).max(PASS_SEGMENTS * segment_units).min(room);
        left = left.min(bytes_max.div_ceil(UNIT_BYTES as u64));
        let mut first = true;
        let fits = |victim: &Victim| {
            let live = u64::from(victim.live);
            let fits = live <= left || first;
            left = left.saturating_sub(live);
            first = false;
            fits
        };
        victims.into_iter().take_while(fits).collect()
    }

    /// Stops allocation in the victims, and marks them.
    fn drain(&self, victims: &[Victim]) -> Marks {
        let mut marks = Marks { bits: Vec::new(), layout: self.layout };
        for (number, shard) in (0u32..).zip(&self.shards) {
            let own = victims.iter().filter(|victim| victim.shard == number);
            let own: Vec<u32> = own.map(|victim| victim.segment).collect();
            for &segment in &own {
                let first = self.layout.place(number, segment * self.layout.segment_units());
                let mark = self.layout.pool_segment(first) as usize;
                if marks.bits.len() <= mark / 64 {
                    marks.bits.resize(mark / 64 + 1, 0);
                }
                marks.bits[mark / 64] |= 1 << (mark % 64);
            }
            if !own.is_empty() {
                shard.with(|shard| shard.drain(&own, self.ground(PagePurpose::Move)));
            }
        }
        marks
    }
}

#[cfg(test)]
mod tests {
    use blockyard_sync::block_table::Word;

    use super::*;
    use crate::pool::PoolConfig;

    const BLOCKS: u64 = 2048;

    /// Every second block is large and the others are small. The small ones are freed, and no large
    /// block fits in their holes.
    fn holes_that_nothing_fits_in() -> (BlockTable, Cache, HazardSlot) {
        let config = PoolConfig { segment_bytes: Some(64 << 10), ..PoolConfig::new(8 << 20, 4096) };
        let pool = Pool::new(&config).unwrap();
        let entries = BlockTable::new(BLOCKS).unwrap();
        let (mut cache, seat) = (pool.cache(), pool.pins().slot().unwrap());
        for block in 0..BLOCKS {
            let bytes = [1; 3000];
            let object = cache.alloc(&bytes[..if block % 2 == 0 { 3000 } else { 1000 }]).unwrap();
            entries.replace(block, object.word());
        }
        for block in (1..BLOCKS).step_by(2) {
            discard(&entries, &mut cache, block);
        }
        cache.reclaim_all();
        pool.set_limit(Some(1 << 20));
        (entries, cache, seat)
    }

    fn discard(entries: &BlockTable, cache: &mut Cache, block: u64) {
        let old = entries.replace(block, Word::NOTHING);
        // SAFETY: the word referred to the object and no longer does; nothing is shared here.
        unsafe { cache.retire(Object::of(old).unwrap()) };
    }

    /// Regression: each refused write walked the whole table, even if nothing had changed since the
    /// last.
    #[test]
    fn a_second_refusal_costs_no_other_pass() {
        let (entries, mut cache, mut seat) = holes_that_nothing_fits_in();
        let mut passes = |cache: &mut Cache| {
            let mut done = Compacted::default();
            // SAFETY: entries and slot belong to the pool.
            let is_worth_it = unsafe { cache.make_some_room(&entries, &mut seat, &mut done) };
            assert_eq!((is_worth_it, done.pages_freed), (false, 0), "{done:?}");
            done.passes
        };
        assert_eq!([(); 5].map(|()| passes(&mut cache)), [1, 0, 0, 0, 0]);
        discard(&entries, &mut cache, 100);
        cache.reclaim_all();
        assert_eq!(passes(&mut cache), 1, "3000 bytes are gone, for {BLOCKS} words");
        assert_eq!(passes(&mut cache), 0);
        cache.pool().set_limit(Some((1 << 20) + 4096));
        assert_eq!([(); 2].map(|()| passes(&mut cache)), [1, 0], "another limit");
    }
}
