//! Compaction: objects of sparse segments move elsewhere, and the segments go back to the system.
//!
//! The sparsest segments are chosen, nothing more is allocated in them, and the table of words is
//! walked once: whose object lies in one of them gets a copy of it somewhere else, by an exchange
//! that loses to any writer. A segment goes back when its last object is given back. What stays
//! behind, because a writer had allocated it and not shown it yet, keeps its segment until it goes,
//! or until the next compaction.
#![allow(unsafe_code)]

use std::sync::Arc;

use blockyard_sync::entry_words::Entries;
use blockyard_sync::lock::Lock;
use blockyard_sync::pins::Seat;

use super::arena::Purpose;
use super::layout::{Layout, PAGE_UNITS, UNIT_BYTES};
use super::memory::PAGE_BYTES;
use super::{Cache, Object, Pool, RESERVE_PART};

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
    /// compacts waits.
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
        let pool = Arc::clone(self.pool());
        // SAFETY: by this function's contract.
        pool.compacting.with(|()| unsafe { self.compact_until(entries, seat, u64::MAX, stop) })
    }

    /// Makes room for somebody who has met the limit, and says whether it is worth another try: if
    /// a good part of the pages in use is free, but not where it could be used.
    ///
    /// # Safety
    /// As for [`Cache::compact`].
    #[cold]
    pub unsafe fn make_room(&mut self, entries: &Entries, seat: &mut Seat) -> bool {
        let pool = Arc::clone(self.pool());
        pool.compacting.with(|()| {
            let pages = pool.arena.look();
            // Who held the lock before may have done it.
            if pages.limit.is_some() && pages.free(Purpose::Write) > 0 {
                return true;
            }
            let used = pages.used * PAGE_BYTES as u64;
            let free: u64 =
                pool.shards.iter().map(|shard| shard.with(|shard| shard.free_units())).sum();
            if free * UNIT_BYTES as u64 * ROOM_PART < used {
                return false;
            }
            let enough = (pages.used / u64::from(RESERVE_PART)).max(ROOM_PAGES);
            // SAFETY: by this function's contract.
            let done = unsafe { self.compact_until(entries, seat, enough, || false) };
            done.pages_freed > 0
        })
    }

    /// The same until so many pages are won. The caller holds the lock.
    ///
    /// # Safety
    /// As for [`Cache::compact`].
    unsafe fn compact_until(
        &mut self,
        entries: &Entries,
        seat: &mut Seat,
        enough: u64,
        mut stop: impl FnMut() -> bool,
    ) -> Compacted {
        let mut done = Compacted::default();
        while done.passes < PASSES_MAX && done.pages_freed < enough && !stop() {
            self.reclaim_all();
            let victims = self.pool().victims();
            if victims.is_empty() {
                break;
            }
            let used = self.pool().arena.look().used;
            let marks = self.pool().drain(&victims);
            let moved = done.bytes_moved;
            // SAFETY: by this function's contract.
            unsafe { self.move_away(entries, seat, &marks, &mut done, &mut stop) };
            self.reclaim_all();
            done.passes += 1;
            let freed = used.saturating_sub(self.pool().arena.look().used);
            self.pool().arena.change(|pages| pages.compacted += freed);
            done.pages_freed += freed;
            let freed_bytes = freed * PAGE_BYTES as u64;
            if freed_bytes * u64::from(SPARSE) <= done.bytes_moved - moved {
                break;
            }
        }
        done
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
        let mut misses = 0;
        for block in 0..entries.blocks() {
            let is_marked = |object| marks.contains(object);
            if !Object::of(entries.load(block)).is_some_and(is_marked) {
                continue;
            }
            if done.objects_moved % 1024 == 1023 && stop() {
                return;
            }
            let guard = seat.pin(entries, block);
            let old = guard.word();
            let Some(object) = Object::of(old).filter(|&object| is_marked(object)) else {
                continue;
            };
            // An object of several words cannot be exchanged in one of them; a locked word is
            // going to be exchanged by its holder.
            if old.is_shared() || old.is_locked() {
                continue;
            }
            let pool = Arc::clone(self.pool());
            // SAFETY: the guard has it pinned, by this function's contract.
            let bytes = unsafe { pool.bytes(object, &guard) };
            let shard = pool.layout.shard(object.place());
            let Ok(copy) = self.alloc_in(shard, bytes, Purpose::Move) else {
                misses += 1;
                if misses == MISSES_MAX {
                    return;
                }
                continue;
            };
            let exchanged = entries.exchange(block, old, old.moved_to(copy.place()));
            drop(guard);
            if exchanged.is_ok() {
                done.objects_moved += 1;
                done.bytes_moved += object.len_bytes() as u64;
                // SAFETY: we have taken it out of its word, and objects have one word unless they
                // are shared.
                unsafe { self.retire(object) };
            } else {
                // SAFETY: it was not shown.
                unsafe { self.free(copy) };
            }
        }
    }
}

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
    /// The segments that a pass is to empty: the sparsest, as many as a pass moves.
    fn victims(&self) -> Vec<Victim> {
        let mut victims = Vec::new();
        for (number, shard) in (0u32..).zip(&self.shards) {
            shard.with(|shard| {
                victims.extend(shard.candidates().map(|candidate| Victim {
                    shard: number,
                    segment: candidate.segment,
                    live: candidate.granted - candidate.free,
                    granted: candidate.granted,
                }));
            });
        }
        victims.retain(|victim| (victim.granted - victim.live) * SPARSE > victim.granted);
        victims.sort_unstable_by_key(|victim| {
            u64::from(victim.live) * u64::from(u32::MAX) / u64::from(victim.granted)
        });
        let pages = self.arena.look();
        let used = pages.used * u64::from(PAGE_UNITS);
        let segment_units = u64::from(self.layout.segment_units());
        // Under a limit no more than there is room for: all of a pass is moved before any goes.
        let room = pages.free(Purpose::Move).saturating_mul(u64::from(PAGE_UNITS));
        let mut left = (used / PASS_PART).max(PASS_SEGMENTS * segment_units).min(room);
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
