//! Compaction: objects of sparse segments move elsewhere, and the segments go back to the system.
//!
//! The sparsest segments are chosen, nothing more is allocated in them, and the table of words is
//! walked once: whose object lies in one of them gets a copy of it somewhere else, by an exchange
//! that loses to any writer. A segment goes back when its last object is given back. What stays
//! behind, because a writer had allocated it and not shown it yet, keeps its segment until it goes,
//! or until the next compaction.
//!
//! An object that several words refer to is copied at the first of them that the walk comes to, and
//! the others are exchanged for the same copy; until the pass ends the compaction has a part in
//! both, so that neither place can become another object's.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;

use blockyard_sync::entry_words::Entries;
use blockyard_sync::lock::Lock;
use blockyard_sync::pins::{Guard, Seat};

use super::arena::{Pages, Purpose};
use super::config::RESERVE_PART;
use super::layout::{Layout, PAGE_UNITS, UNIT_BYTES};
use super::memory::PAGE_BYTES;
use super::shard::Candidate;
use super::{Cache, NoSpace, Object, Pool};

/// Segments with less than one part in so many free are left alone.
const SPARSE: u32 = 64;
/// Passes over the table at most.
const PASSES_MAX: u32 = 64;
/// Objects of one part in so many of the pool are moved in a pass.
const PASS_PART: u64 = 8;
/// And of so many segments at least.
const PASS_SEGMENTS: u64 = 16;

/// A write that meets the limit compacts if one part in so many of the pages in use is free.
const ROOM_PART: u64 = 16;
/// Pages that such a compaction wins at least, if it can.
const ROOM_PAGES: u64 = 16;
/// The next such compaction comes when for each word of the table a byte was stored or freed, but
/// at the latest when that is one part in so many of what is used: to look at a word costs what
/// storing a byte does, and a disk may be very much larger than what is stored.
const ROOM_CHANGED_PART: u64 = 64;
/// After so many words, and so many objects, a pass looks whether it is to stop.
const LOOK_WORDS: u64 = 1 << 16;
const LOOK_OBJECTS: u64 = 1024;
/// Objects that find no place in a pass, after which it ends.
const MISSES_MAX: u32 = 64;

/// What a compaction has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// Objects that lie elsewhere now.
    pub objects_moved: u64,
    /// Their bytes.
    pub bytes_moved: u64,
    /// Pages that went back to the system, less those that the moved objects took.
    pub pages_freed: u64,
    /// Passes over the table.
    pub passes: u32,
}

impl Compacted {
    /// Whether it has reached its bounds.
    fn is_over(&self, bounds: Bounds) -> bool {
        self.passes >= PASSES_MAX || self.pages_freed >= bounds.pages
    }
}

/// How much a compaction does at most.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// It ends when so many pages are won.
    pages: u64,
    /// Objects of so many bytes are moved, or a few more.
    bytes: u64,
}

impl Bounds {
    const NONE: Bounds = Bounds { pages: u64::MAX, bytes: u64::MAX };
}

/// What those who have met the limit leave to one another.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// How much the pool had changed when room was made last, and what the limit was.
    made_at: Option<(u64, Option<u64>)>,
}

impl Room {
    /// Whether it is worth trying to make more, of a pool that uses so many pages for so many
    /// blocks. Writes that are refused change nothing, so that another one costs no other pass.
    fn is_due(&self, changed_bytes: u64, pages: &Pages, blocks: u64) -> bool {
        let Some((then, limit)) = self.made_at else { return true };
        let least = blocks.min(pages.used * PAGE_BYTES as u64 / ROOM_CHANGED_PART);
        limit != pages.limit || changed_bytes.saturating_sub(then) >= least.max(1)
    }
}

/// A segment that is to be emptied.
#[derive(Clone, Copy)]
struct Victim {
    shard: u32,
    segment: u32,
    live: u32,
    granted: u32,
}

impl Cache {
    /// Compacts the pool whose objects the entries refer to, until there is little left to win or
    /// `stop` says so; it is asked once in a while. Writers and readers go on meanwhile; who else
    /// compacts waits for a pass.
    ///
    /// # Safety
    /// The words of the entries refer to objects of this pool only, and the seat is one of
    /// [`Pool::pins`].
    pub unsafe fn compact(
        &mut self,
        entries: &Entries,
        seat: &mut Seat,
        stop: impl FnMut() -> bool,
    ) -> Compacted {
        // SAFETY: by this function's contract.
        unsafe { self.compact_until(entries, seat, Bounds::NONE, stop) }
    }

    /// The same, but not more than objects of so many bytes are moved.
    ///
    /// # Safety
    /// As for [`Cache::compact`].
    pub unsafe fn compact_some(
        &mut self,
        entries: &Entries,
        seat: &mut Seat,
        bytes_max: u64,
        stop: impl FnMut() -> bool,
    ) -> Compacted {
        let bounds = Bounds { bytes: bytes_max, ..Bounds::NONE };
        // SAFETY: by this function's contract.
        unsafe { self.compact_until(entries, seat, bounds, stop) }
    }

    /// Makes room for somebody who has met the limit, and says whether it is worth another try: if
    /// a good part of the pages in use is free, but not where it could be used.
    ///
    /// # Safety
    /// As for [`Cache::compact`].
    #[cold]
    pub unsafe fn make_room(&mut self, entries: &Entries, seat: &mut Seat) -> bool {
        let mut done = Compacted::default();
        // SAFETY: by this function's contract.
        unsafe { self.make_some_room(entries, seat, &mut done) }
    }

    /// The same, and counts what it does.
    ///
    /// # Safety
    /// As for [`Cache::compact`].
    unsafe fn make_some_room(
        &mut self,
        entries: &Entries,
        seat: &mut Seat,
        done: &mut Compacted,
    ) -> bool {
        let pool = Arc::clone(self.pool());
        loop {
            // Others make room as well, and who compacts all of the pool gives pages back
            // meanwhile: it is looked again for each pass.
            let over = pool.compacting.with(|room| {
                let pages = pool.arena.look();
                let left = if pages.limit.is_some() { pages.free(Purpose::Write) } else { 0 };
                // A page or two are not enough for a large object, which finds no place in them
                // however often it is tried.
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

    /// The same within bounds. The lock is held for a pass and no longer.
    ///
    /// # Safety
    /// As for [`Cache::compact`].
    unsafe fn compact_until(
        &mut self,
        entries: &Entries,
        seat: &mut Seat,
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

    /// A pass over the table; whether another one is worth it. The caller holds the lock.
    ///
    /// # Safety
    /// As for [`Cache::compact`].
    unsafe fn pass(
        &mut self,
        entries: &Entries,
        seat: &mut Seat,
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
        entries: &Entries,
        seat: &mut Seat,
        marks: &Marks,
        done: &mut Compacted,
        stop: &mut impl FnMut() -> bool,
    ) {
        let (mut misses, mut copies) = (0, Copies::new());
        for block in 0..entries.blocks() {
            // A long table with little in it takes long as well.
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
            // A locked word is going to be exchanged by its holder.
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
            // SAFETY: these are the parts that `move_shared` has taken.
            unsafe {
                self.give_up(copy);
                self.give_up(object);
            }
        }
    }

    /// Moves a block's object, and says how many bytes that were: none if a writer was faster.
    ///
    /// # Safety
    /// The guard has pinned the block's word through the entries and a seat of the pool; it is an
    /// object's, and not marked as shared.
    unsafe fn move_one(
        &mut self,
        entries: &Entries,
        block: u64,
        guard: Guard<'_>,
    ) -> Result<u64, NoSpace> {
        let old = guard.word();
        let Some(object) = Object::of(old) else { return Ok(0) };
        // SAFETY: the guard has it pinned, by this function's contract.
        let copy = unsafe { self.copy(object, &guard)? };
        let exchanged = entries.exchange(block, old, old.moved_to(copy.place()));
        drop(guard);
        if exchanged.is_ok() {
            // SAFETY: we have taken it out of its word, and it had only this one: that word would
            // be marked otherwise.
            unsafe { self.retire(object) };
            return Ok(object.len_bytes() as u64);
        }
        // SAFETY: it was not shown.
        unsafe { self.free(copy) };
        Ok(0)
    }

    /// The same for an object that other words refer to as well.
    ///
    /// # Safety
    /// As for [`Cache::move_one`], but the word is marked as shared.
    unsafe fn move_shared(
        &mut self,
        entries: &Entries,
        block: u64,
        guard: Guard<'_>,
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
                // SAFETY: the guard has it pinned, by this function's contract.
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
        // The copy is ours because of our part in it; the word is to have another.
        // SAFETY: we have a part in it until the pass ends.
        unsafe { pool.add_part(copy) };
        let exchanged = entries.exchange(block, old, old.moved_to(copy.place()));
        drop(guard);
        // SAFETY: we have taken the object out of the word; or the copy was not shown there.
        unsafe { self.give_up(if exchanged.is_ok() { object } else { copy }) };
        Ok(bytes)
    }

    /// Copies an object to another place of its shard.
    ///
    /// # Safety
    /// The guard has it pinned.
    unsafe fn copy(&mut self, object: Object, guard: &Guard<'_>) -> Result<Object, NoSpace> {
        let pool = Arc::clone(self.pool());
        // SAFETY: by this function's contract.
        let bytes = unsafe { pool.bytes(object, guard) };
        self.alloc_in(pool.layout.shard(object.place()), bytes, Purpose::Move)
    }
}

/// By the places of objects that several words refer to: the object, and its copy.
type Copies = HashMap<u64, (Object, Object)>;

/// Which segments are marked, by their number in the pool.
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
    /// Whether so much of the pages in use is free that compaction would win some.
    fn has_much_free(&self, used_pages: u64) -> bool {
        let free: u64 =
            self.shards.iter().map(|shard| shard.with(|shard| shard.free_units())).sum();
        free * UNIT_BYTES as u64 * ROOM_PART >= used_pages * PAGE_BYTES as u64
    }

    /// The segments that a pass is to empty: the sparsest, as many as a pass moves, and of objects
    /// of not many more than `bytes_max`; none if that is nothing.
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
        // Under a limit no more than there is room for: all of a pass is moved before any goes.
        let room = pages.free(Purpose::Move).saturating_mul(u64::from(PAGE_UNITS));
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

    /// Lets nothing more be allocated in the victims, and marks them.
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
                shard.with(|shard| shard.drain(&own, self.ground(Purpose::Move)));
            }
        }
        marks
    }
}

#[cfg(test)]
mod tests {
    use blockyard_sync::entry_words::Word;

    use super::*;
    use crate::pool::PoolConfig;

    const BLOCKS: u64 = 2048;

    /// Every second block large, the others small, and those are gone: the large ones fit nowhere
    /// else.
    fn holes_that_nothing_fits_in() -> (Entries, Cache, Seat) {
        let config = PoolConfig { segment_bytes: Some(64 << 10), ..PoolConfig::new(8 << 20, 4096) };
        let pool = Pool::new(&config).unwrap();
        let entries = Entries::new(BLOCKS).unwrap();
        let (mut cache, seat) = (pool.cache(), pool.pins().seat().unwrap());
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

    fn discard(entries: &Entries, cache: &mut Cache, block: u64) {
        let old = entries.replace(block, Word::NOTHING);
        // SAFETY: the word had it, and has it no more; nothing is shared here.
        unsafe { cache.retire(Object::of(old).unwrap()) };
    }

    /// Each write that was refused walked the whole table, though nothing had changed since.
    #[test]
    fn what_is_refused_again_costs_no_other_pass() {
        let (entries, mut cache, mut seat) = holes_that_nothing_fits_in();
        let mut passes = |cache: &mut Cache| {
            let mut done = Compacted::default();
            // SAFETY: entries and seat are the pool's.
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
