//! Compaction: objects of sparse segments move elsewhere, and the segments go back to the system.
//!
//! The sparsest segments are chosen, nothing more is allocated in them, and the table of words is
//! walked once: whose object lies in one of them gets a copy of it somewhere else, by an exchange
//! that loses to any writer. A segment goes back when its last object is given back. What stays
//! behind, because a writer had allocated it and not shown it yet, keeps its segment until it goes,
//! or until the next compaction.
#![allow(unsafe_code)]

use blockyard_sync::entry_words::Entries;
use blockyard_sync::lock::Lock;
use blockyard_sync::pins::Seat;

use super::layout::{Layout, PAGE_UNITS};
use super::{Cache, Object, Pool};

/// Segments with less than one part in so many free are left alone.
const SPARSE: u32 = 64;
/// Passes over the table at most.
const PASSES_MAX: u32 = 64;
/// Objects of one part in so many of the pool are moved in a pass.
const PASS_PART: u64 = 8;
/// And of so many segments at least.
const PASS_SEGMENTS: u64 = 16;

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
    /// `stop` says so; it is asked once in a while. Writers and readers go on meanwhile.
    ///
    /// # Safety
    /// The words of the entries refer to objects of this pool only, and the seat is one of
    /// [`Pool::pins`].
    pub unsafe fn compact(
        &mut self,
        entries: &Entries,
        seat: &mut Seat,
        mut stop: impl FnMut() -> bool,
    ) -> Compacted {
        let mut done = Compacted::default();
        while done.passes < PASSES_MAX && !stop() {
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
            let freed_bytes = freed * Layout::bytes(PAGE_UNITS) as u64;
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
            let pool = std::sync::Arc::clone(self.pool());
            // SAFETY: the guard has it pinned, by this function's contract.
            let bytes = unsafe { pool.bytes(object, &guard) };
            let Ok(copy) = self.alloc_in(pool.layout.shard(object.place()), bytes) else {
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
    segment_units: u64,
}

impl Marks {
    #[inline]
    fn contains(&self, object: Object) -> bool {
        let segment = object.place() / self.segment_units;
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
        let used = self.arena.look().used * u64::from(PAGE_UNITS);
        let segment_units = u64::from(self.layout.segment_units);
        let mut left = (used / PASS_PART).max(PASS_SEGMENTS * segment_units);
        let fits = |victim: &Victim| {
            let live = u64::from(victim.live);
            let fits = live <= left;
            left = left.saturating_sub(live);
            fits
        };
        victims.into_iter().take_while(fits).collect()
    }

    /// Lets nothing more be allocated in the victims, and marks them.
    fn drain(&self, victims: &[Victim]) -> Marks {
        let shards = u64::from(self.layout.shards);
        let segment_units = u64::from(self.layout.segment_units);
        let mut marks = Marks { bits: Vec::new(), segment_units };
        for (number, shard) in (0u32..).zip(&self.shards) {
            let own = victims.iter().filter(|victim| victim.shard == number);
            let own: Vec<u32> = own.map(|victim| victim.segment).collect();
            for &segment in &own {
                let mark = (u64::from(segment) * shards + u64::from(number)) as usize;
                if marks.bits.len() <= mark / 64 {
                    marks.bits.resize(mark / 64 + 1, 0);
                }
                marks.bits[mark / 64] |= 1 << (mark % 64);
            }
            if !own.is_empty() {
                shard.with(|shard| shard.drain(&own, self.ground()));
            }
        }
        marks
    }
}
