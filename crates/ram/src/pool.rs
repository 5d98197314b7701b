//! The pool: compressed objects, back to back.
//!
//! zsmalloc gives each size class its own pages, and every class leaves its last pages half empty:
//! an overhead of 12 % over the compressed bytes of a small disk. Here objects of all sizes share a
//! segment and follow each other at multiples of 16 bytes. Size classes apply to the *holes* that
//! freed objects leave: a hole goes to the next object of its class. An object has no header: the
//! block's word knows its size, and compaction walks the table of words.
//!
//! ```text
//! Cache ─ alloc ▸ its Shard ─ hole of the class, else a larger one, else the open segment
//!               ▸ a hole of another Shard: the one with the most free space
//!               ▸ its Shard ─ a new segment
//!       ─ retire ▸ its Shard's list ─ scan the pins ▸ hole in the object's own Shard
//! Arena: pages in use and their limit.   Memory: one range of addresses.
//! ```
//!
//! One or two channels use a shard, and each holds the shard's lock only briefly. Other channels
//! take the lock in three cases: to free objects, in batches; for holes, when the shard has many
//! and their own shard is full; and when the limit leaves no other way. Without the second case, a
//! channel that overwrites another channel's data would take the same memory again before any
//! segment became empty.
//!
//! If one channel has written all data, all data lie in one shard and all other channels look for
//! holes there. They wait for its lock only while at least an eighth of the shard is free.
//! Otherwise a channel that finds the lock taken begins a new segment in its own shard, so that
//! overwritten data spread over the shards.
//!
//! **Bounds.** Pages in use never exceed the limit; they include retired objects, holes, and pages
//! requested ahead. A shard's list of retired objects has at most 16 entries plus twice the number
//! of hazard-pointer slots. When the list is full, all unpinned objects are freed; each slot pins
//! one.
#![allow(unsafe_code)]

mod arena;
mod compact;
mod config;
mod holes;
mod layout;
mod memory;
mod shard;
mod shares;
mod table;
mod usage;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use blockyard_sync::hazard_pointers::{HazardGuard, HazardPointers, Pinned};
use blockyard_sync::lock::Lock;
use blockyard_sync::pad::Padded;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;
use blockyard_sync::ticket_lock::TicketLock;

use arena::{Arena, PagePurpose};
use compact::CompactionState;
use layout::{Layout, PAGE_UNITS, UNIT_BYTES};
use memory::{Memory, PAGE_BYTES};
use shard::{Failing, Ground, Reach, Shard};

pub use compact::Compacted;
pub use config::{PoolConfig, PoolError};
pub use layout::Object;
pub use usage::{Load, SizeClass, Usage};

/// Length of a shard's list of retired objects, in addition to twice the number of slots.
const RETIRED: usize = 16;

/// The limit leaves no space for the object, or the system has no memory. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoSpace;

impl fmt::Display for NoSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no memory for the block within the limit")
    }
}

impl std::error::Error for NoSpace {}

/// The compressed objects of one device.
#[derive(Debug)]
pub struct Pool {
    shards: Box<[Padded<SleepLock<Shard, { ranks::SHARD }>>]>,
    arena: Arena,
    /// Serializes compaction: a thread holds it for one pass.
    compacting: TicketLock<CompactionState, { ranks::COMPACTION }>,
    memory: Memory,
    layout: Layout,
    pins: Arc<HazardPointers>,
}

impl Pool {
    /// Creates an empty pool.
    ///
    /// # Errors
    /// If the configuration is invalid, or the system does not reserve the addresses.
    pub fn new(config: &PoolConfig) -> Result<Arc<Pool>, PoolError> {
        let layout = config.layout()?;
        let bytes = layout.len_bytes();
        let memory = Memory::reserve(bytes as usize)
            .map_err(|errno| PoolError::Addresses { bytes, errno })?;
        let retired_max = RETIRED + 2 * config.slots_max as usize;
        let shard = |number| {
            let shard = Shard::new(number, layout, retired_max);
            let shard = shard.map_err(|errno| PoolError::Addresses { bytes, errno })?;
            Ok(Padded(SleepLock::new(shard)))
        };
        Ok(Arc::new(Pool {
            shards: (0..layout.shards()).map(shard).collect::<Result<_, PoolError>>()?,
            arena: Arena::new(
                config.limit_bytes.map(|bytes| bytes / PAGE_BYTES as u64),
                u64::from(layout.segment_units() / PAGE_UNITS),
            ),
            compacting: TicketLock::new(CompactionState::default()),
            memory,
            layout,
            pins: HazardPointers::new(config.slots_max),
        }))
    }

    /// The hazard pointers with which readers pin objects of this pool.
    pub fn pins(&self) -> &Arc<HazardPointers> {
        &self.pins
    }

    /// Creates the allocation handle of one channel or worker.
    pub fn cache(self: &Arc<Pool>) -> Cache {
        Cache {
            shard: self.arena.next_shard(self.layout.shards()),
            other: None,
            pool: Arc::clone(self),
            scratch: Scratch::new(self.pins.slots_max()),
        }
    }

    /// Prefetches the bytes of a possible object for a thread that reads them next.
    #[inline]
    pub fn fetch(&self, object: Object) {
        self.memory.fetch(self.layout.start(object.place()), self.layout.object_bytes(object));
    }

    /// Prefetches a possible object for a thread that frees it: a later object is written to its
    /// place.
    #[inline]
    pub fn fetch_to_free(&self, object: Object) {
        let at = self.layout.start(object.place());
        self.memory.fetch_to_write(at, self.layout.object_bytes(object));
    }

    /// An object's bytes, valid while the object is pinned.
    ///
    /// # Safety
    /// `guard` pins the object: it comes from entries whose words refer to this pool's objects, and
    /// from a slot of this pool's [`Pool::pins`].
    #[inline]
    pub unsafe fn bytes<'g>(&'g self, object: Object, guard: &'g HazardGuard<'_>) -> &'g [u8] {
        debug_assert_eq!(guard.word().reference(), object.word().reference());
        // SAFETY: the object was written before its word was published; it is pinned for `'g`.
        unsafe {
            self.memory.bytes(self.layout.start(object.place()), self.layout.object_bytes(object))
        }
    }

    /// An object's bytes, where something other than a pin keeps the object from being freed, such
    /// as a lock on its word.
    ///
    /// # Safety
    /// The object comes from this pool, and is neither freed nor retired while the bytes are in
    /// use.
    #[inline]
    pub unsafe fn bytes_kept(&self, object: Object) -> &[u8] {
        // SAFETY: the object was written before it was published; the caller keeps it from being
        // freed.
        unsafe {
            self.memory.bytes(self.layout.start(object.place()), self.layout.object_bytes(object))
        }
    }

    /// Fault injection for tests: makes one in `one_in` allocations fail at random; `None` for
    /// none.
    pub fn fail_allocations(&self, one_in: Option<NonZeroU32>, seed: u64) {
        for (number, shard) in self.shards.iter().enumerate() {
            // The random state must not be 0, which would stay 0.
            let random = seed.wrapping_add(number as u64).wrapping_mul(2) | 1;
            let failing = one_in.map(|one_in| Failing { one_in: one_in.get(), random });
            shard.with(|shard| shard.failing = failing);
        }
    }

    /// Among the other shards that have a hole of `units` and at least a segment of free space, the
    /// one with the most free space. Skips shards whose lock is taken: the holder may take long.
    fn freest_but(&self, shard: u32, units: u32) -> Option<Other> {
        let others = (0u32..).zip(&self.shards).filter(|(number, _)| *number != shard);
        let fitting = others.filter_map(|(number, shard)| {
            let look = |shard: &mut Shard| {
                let free = shard.fits(units).then(|| shard.free_units())?;
                Some((free, Other { shard: number, has_much: shard.has_much() }))
            };
            shard.try_with(look).ok().flatten()
        });
        let (free, other) = fitting.max_by_key(|(free, _)| *free)?;
        (free >= u64::from(self.layout.segment_units())).then_some(other)
    }

    fn ground(&self, purpose: PagePurpose) -> Ground<'_> {
        Ground { memory: &self.memory, arena: &self.arena, purpose }
    }

    /// Asks the system to turn full stretches into huge pages, at most `count_max`. Returns how
    /// many it asked for. Huge pages cost no memory and save address translations. `stop` is called
    /// in between.
    pub fn gather(&self, count_max: u64, mut stop: impl FnMut() -> bool) -> u64 {
        let mut count = 0;
        for (number, shard) in (0u32..).zip(&self.shards) {
            let mut from = 0;
            while count < count_max && !stop() {
                let Some(first) = shard.with(|shard| shard.begin_gathering(&mut from)) else {
                    break;
                };
                // Without the shard's lock: the call takes some hundred microseconds.
                self.memory.gather(self.layout.segment_start(number, first));
                shard.with(|shard| shard.end_gathering(self.ground(PagePurpose::Write)));
                count += 1;
            }
        }
        count
    }

    /// Frees the objects that were retired through one shard and are not pinned.
    fn reclaim(&self, number: usize, scratch: &mut Scratch) {
        let Scratch { pinned, foreign } = scratch;
        self.shards[number].with(|shard| {
            // Under the lock: each object in the list was taken out of its word before this scan.
            self.pins.look(pinned);
            let mut kept = 0;
            for index in 0..shard.retired.len() {
                let object = shard.retired[index];
                if pinned.contains(object.word()) {
                    shard.retired[kept] = object;
                    kept += 1;
                } else if self.layout.shard(object.place()) == number as u32 {
                    // SAFETY: a retired object is in no word, this one is not pinned, and it leaves
                    // the list.
                    unsafe { shard.give(object, self.ground(PagePurpose::Write)) };
                } else {
                    foreign.push(object);
                }
            }
            shard.retired.truncate(kept);
        });
        // SAFETY: as above; the objects have left the list.
        unsafe { self.give_all(foreign) };
    }

    /// Frees objects of any shards, with one lock acquisition per shard.
    ///
    /// # Safety
    /// The objects were allocated, and no thread can find or read them any more.
    unsafe fn give_all(&self, objects: &mut Vec<Object>) {
        objects.sort_unstable_by_key(|object| self.layout.shard(object.place()));
        let same =
            |a: &Object, b: &Object| self.layout.shard(a.place()) == self.layout.shard(b.place());
        for group in objects.chunk_by(same) {
            let number = self.layout.shard(group[0].place());
            self.shards[number as usize].with(|shard| {
                for &object in group {
                    // SAFETY: this is the object's shard, and the rest is the caller's contract.
                    unsafe { shard.give(object, self.ground(PagePurpose::Write)) };
                }
            });
        }
        objects.clear();
    }
}

/// Buffers for a reclaim, kept so that it does not allocate.
#[derive(Debug)]
struct Scratch {
    pinned: Pinned,
    foreign: Vec<Object>,
}

impl Scratch {
    fn new(slots_max: usize) -> Scratch {
        let foreign = Vec::with_capacity(RETIRED + 2 * slots_max);
        Scratch { pinned: Pinned::with_capacity(slots_max), foreign }
    }
}

/// The allocation handle of one channel. It is bound to one shard. It uses another one only if its
/// own has no space left, or would begin a segment while another shard has many holes.
#[derive(Debug)]
pub struct Cache {
    pool: Arc<Pool>,
    shard: u32,
    /// The shard whose holes to use when the own shard is full.
    other: Option<Other>,
    scratch: Scratch,
}

/// A shard other than the channel's own.
#[derive(Clone, Copy, Debug)]
struct Other {
    shard: u32,
    /// [`Shard::has_much`] when a thread examined it last.
    has_much: bool,
}

/// The result of asking another shard for space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FoundSpace {
    Place(u64),
    /// The shard has no hole that fits.
    Nothing,
    /// Another thread holds the shard's lock.
    Taken,
}

impl Cache {
    /// The pool of this handle.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Stores bytes as a new object that no other thread knows. The caller publishes it in a word
    /// or frees it.
    ///
    /// # Errors
    /// If there is no space within the limit, or the system has no memory.
    ///
    /// # Panics
    /// If `bytes` is empty or longer than the largest object.
    #[inline]
    pub fn alloc(&mut self, bytes: &[u8]) -> Result<Object, NoSpace> {
        self.alloc_in(self.shard, bytes, PagePurpose::Write)
    }

    /// Stores bytes that replace a larger object. This may use a part of the space that the limit
    /// reserves for compaction, since it frees more than it takes.
    ///
    /// # Errors
    /// As for [`Cache::alloc`].
    ///
    /// # Panics
    /// As for [`Cache::alloc`].
    pub fn alloc_smaller(&mut self, bytes: &[u8]) -> Result<Object, NoSpace> {
        self.alloc_in(self.shard, bytes, PagePurpose::Shrink)
    }

    #[inline]
    fn alloc_in(
        &mut self,
        shard: u32,
        bytes: &[u8],
        purpose: PagePurpose,
    ) -> Result<Object, NoSpace> {
        let pool = &*self.pool;
        let units = pool.layout.units_of(bytes.len());
        assert!((1..=pool.layout.units_max).contains(&units), "{} bytes", bytes.len());
        let said = pool.layout.object_bytes(Object::new(0, bytes.len()));
        assert_eq!(said, bytes.len(), "no word can say how long this object is");
        let place = pool.shards[shard as usize].with(|shard| {
            if shard.strikes() {
                return Err(NoSpace);
            }
            // Compaction moves objects within their shard.
            let reach = if purpose == PagePurpose::Move { Reach::Fresh } else { Reach::Begun };
            Ok(shard.alloc(bytes.len(), reach, pool.ground(purpose)))
        })?;
        let place = match place {
            Some(place) => place,
            None => match self.alloc_beyond(bytes.len(), purpose) {
                Some(place) => place,
                None => self.alloc_anywhere(bytes.len(), purpose)?,
            },
        };
        let object = Object::new(place, bytes.len());
        // SAFETY: the place was just allocated, so only this thread uses it.
        unsafe {
            self.pool.begin_count(object);
            self.pool.memory.write(self.pool.layout.start(place), bytes);
        }
        Ok(object)
    }

    /// Finds space when the shard's open segment is full: a hole of another shard that has many, or
    /// a new segment.
    #[inline(never)]
    fn alloc_beyond(&mut self, len_bytes: usize, purpose: PagePurpose) -> Option<u64> {
        if purpose == PagePurpose::Move {
            return None;
        }
        // Recompression is not urgent, and must not take a page that it does not need: it waits.
        let waits = purpose == PagePurpose::Shrink;
        let mut found = self.alloc_in_other(len_bytes, purpose, waits);
        if found == FoundSpace::Nothing {
            let units = self.pool.layout.units_of(len_bytes);
            self.other = self.pool.freest_but(self.shard, units);
            found = self.alloc_in_other(len_bytes, purpose, waits);
        }
        if let FoundSpace::Place(place) = found {
            return Some(place);
        }
        let pool = &*self.pool;
        let shard = &pool.shards[self.shard as usize];
        let place = shard.with(|shard| shard.alloc(len_bytes, Reach::Fresh, pool.ground(purpose)));
        if place.is_none() && found == FoundSpace::Taken {
            // The limit is reached: waiting for one shard costs less than searching all of them.
            found = self.alloc_in_other(len_bytes, purpose, true);
        }
        if let FoundSpace::Place(place) = found { Some(place) } else { place }
    }

    /// Takes a hole of the other shard. Unless `waits` is set, it waits for that shard's lock only
    /// while much of the shard is free. If all data lie in one shard, channels that overwrite them
    /// thus move them to their own shards. So they do not contend for that one lock all the time.
    fn alloc_in_other(
        &mut self,
        len_bytes: usize,
        purpose: PagePurpose,
        waits: bool,
    ) -> FoundSpace {
        let Some(other) = &mut self.other else { return FoundSpace::Nothing };
        let pool = &*self.pool;
        let alloc = |shard: &mut Shard| {
            let place = shard.alloc(len_bytes, Reach::Holes, pool.ground(purpose));
            (place, shard.has_much())
        };
        let shard = &pool.shards[other.shard as usize];
        let (place, has_much) = match shard.try_with(alloc) {
            Ok(found) => found,
            Err(alloc) if waits || other.has_much => shard.with(alloc),
            Err(_) => return FoundSpace::Taken,
        };
        other.has_much = has_much;
        place.map_or(FoundSpace::Nothing, FoundSpace::Place)
    }

    /// Finds space when the shard has none left: frees all retired objects that it can, and asks
    /// all shards.
    #[cold]
    fn alloc_anywhere(&mut self, len_bytes: usize, purpose: PagePurpose) -> Result<u64, NoSpace> {
        self.reclaim_all();
        let pool = &*self.pool;
        let shards = pool.shards.len();
        let mut turns = (0..shards).map(|turn| (self.shard as usize + turn) % shards);
        let place = turns.find_map(|number| {
            let ground = pool.ground(purpose);
            pool.shards[number].with(|shard| shard.alloc(len_bytes, Reach::Fresh, ground))
        });
        place.ok_or(NoSpace)
    }

    /// Frees an object that was never published.
    ///
    /// # Safety
    /// The object comes from this pool's [`Cache::alloc`], was never in a word, and is freed once.
    pub unsafe fn free(&mut self, object: Object) {
        self.scratch.foreign.push(object);
        // SAFETY: by this function's contract; the list has no other object.
        unsafe { self.pool.give_all(&mut self.scratch.foreign) };
    }

    /// Retires an object that was just taken out of its word; it is freed when no reader has it
    /// pinned.
    ///
    /// # Safety
    /// The object comes from this pool, no word refers to it any more, and it is retired once.
    /// Readers pin it only through this pool's [`Pool::pins`]. An object whose word was marked as
    /// shared is not retired but given up ([`Cache::give_up`]).
    #[inline]
    pub unsafe fn retire(&mut self, object: Object) {
        let pool = &*self.pool;
        let full = RETIRED + 2 * pool.pins.slots_used();
        let number = self.shard as usize;
        let is_full = pool.shards[number].with(|shard| {
            shard.retired.push(object);
            shard.retired.len() >= full
        });
        if is_full {
            pool.reclaim(number, &mut self.scratch);
        }
    }

    /// Frees all retired objects that are not pinned, whichever channel retired them.
    pub fn reclaim_all(&mut self) {
        for number in 0..self.pool.shards.len() {
            self.pool.reclaim(number, &mut self.scratch);
        }
    }
}

impl Pool {
    /// The memory usage now.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        let mut units = 0;
        for shard in &self.shards {
            shard.with(|shard| {
                let tally = shard.tally();
                usage.objects += tally.objects;
                usage.stored_bytes += tally.stored_bytes;
                units += tally.units;
                usage.duplicate_bytes += tally.duplicate_bytes;
                usage.free_bytes += shard.free_units() * UNIT_BYTES as u64;
                let retired = shard.retired.iter().map(|object| object.len_bytes() as u64);
                usage.retired_bytes += retired.sum::<u64>();
            });
        }
        usage.grain_bytes = units * UNIT_BYTES as u64 - usage.stored_bytes;
        let pages = self.arena.look();
        usage.used_bytes = pages.used * PAGE_BYTES as u64;
        usage.used_bytes_max = pages.used_max * PAGE_BYTES as u64;
        usage.limit_bytes = pages.limit.map(|limit| limit * PAGE_BYTES as u64);
        usage.pages_compacted = pages.compacted;
        usage
    }

    /// The number of objects in each size class that has any.
    pub fn size_classes(&self) -> Vec<SizeClass> {
        let mut objects = vec![0u64; self.layout.units_max as usize + 1];
        for shard in &self.shards {
            shard.with(|shard| {
                for (sum, &live) in objects.iter_mut().zip(shard.live()) {
                    *sum += u64::from(live);
                }
            });
        }
        let classes = (0u32..).zip(objects).filter(|&(_, objects)| objects > 0);
        classes
            .map(|(units, objects)| SizeClass { bytes: self.layout.largest(units), objects })
            .collect()
    }

    /// How full the pool is; cheap enough to call often: a few instructions per shard.
    pub fn load(&self) -> Load {
        let mut load = Load::default();
        for shard in &self.shards {
            let tally = shard.with(|shard| shard.tally());
            load.stored_bytes += tally.stored_bytes;
            load.placed_bytes += tally.placed_bytes;
        }
        load.used_bytes = self.arena.look().used * PAGE_BYTES as u64;
        load
    }

    /// Resets the maximum of pages in use to the current number.
    pub fn reset_used_max(&self) {
        self.arena.change(|pages| pages.used_max = pages.used);
    }

    /// Sets the limit, or removes it. If more is in use already, it stays, and no more is
    /// allocated.
    pub fn set_limit(&self, limit_bytes: Option<u64>) {
        let limit = limit_bytes.map(|bytes| bytes / PAGE_BYTES as u64);
        self.arena.change(|pages| pages.limit = limit);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    const OBJECT: usize = 2048;
    const SEGMENT: usize = 64 << 10;
    /// Timeout that a thread which does not wait for a lock never reaches, however busy the machine
    /// is.
    const LONG: Duration = Duration::from_secs(30);
    /// Usually enough time for a thread to reach a lock.
    const SHORT: Duration = Duration::from_millis(20);

    /// A shard of 64 segments whose holes add up to `segments` segments, and a channel of the other
    /// shard, which is empty.
    fn with_holes(segments: usize) -> (Arc<Pool>, u32, Cache) {
        let mut config = PoolConfig::new(64 << 20, 4096);
        config.shards = NonZeroU32::new(2);
        config.segment_bytes = Some(SEGMENT);
        let pool = Pool::new(&config).unwrap();
        let (mut full, empty) = (pool.cache(), pool.cache());
        let objects = 64 * SEGMENT / OBJECT;
        let objects: Vec<_> = (0..objects).map(|_| full.alloc(&[1; OBJECT]).unwrap()).collect();
        for &object in objects.iter().step_by(64 / segments) {
            // SAFETY: no other thread knows the object, and it is freed once.
            unsafe { full.free(object) };
        }
        assert_eq!(pool.usage().free_bytes, (segments * SEGMENT) as u64);
        (pool, full.shard, empty)
    }

    fn shard_of_next(cache: &mut Cache) -> u32 {
        let object = cache.alloc(&[2; OBJECT]).unwrap();
        cache.pool.layout.shard(object.place())
    }

    fn shard_of_next_while_locked(held: u32, cache: &mut Cache, time: Duration) -> u32 {
        shard_while_locked(held, cache, time, shard_of_next)
    }

    /// Allocates in a thread while shard `held` is locked. The lock is released when that thread
    /// has finished or after `time`.
    fn shard_while_locked(
        held: u32,
        cache: &mut Cache,
        time: Duration,
        shard_of: fn(&mut Cache) -> u32,
    ) -> u32 {
        let pool = Arc::clone(&cache.pool);
        let end = Instant::now() + time;
        thread::scope(|scope| {
            let next = pool.shards[held as usize].with(|_| {
                let next = scope.spawn(|| shard_of(cache));
                while !next.is_finished() && Instant::now() < end {
                    thread::park_timeout(Duration::from_millis(1));
                }
                next
            });
            next.join().unwrap()
        })
    }

    #[test]
    fn locked_shard_of_another_channel_is_skipped() {
        let (_, full, mut cache) = with_holes(2);
        let own = cache.shard;
        assert_eq!(shard_of_next(&mut cache), full);
        assert_eq!(shard_of_next_while_locked(full, &mut cache, LONG), own);
        // The channel's own segment is full again, so it uses the holes of the other shard.
        for _ in 1..SEGMENT / OBJECT {
            assert_eq!(shard_of_next(&mut cache), own);
        }
        assert_eq!(shard_of_next(&mut cache), full);
    }

    #[test]
    fn locked_shard_is_not_searched_for_holes() {
        let (_, full, mut cache) = with_holes(16);
        let own = cache.shard;
        assert_eq!(shard_of_next_while_locked(full, &mut cache, LONG), own);
    }

    #[test]
    fn another_shard_of_which_much_is_free_is_waited_for() {
        let (_, full, mut cache) = with_holes(16);
        assert_eq!(shard_of_next(&mut cache), full);
        assert_eq!(shard_of_next_while_locked(full, &mut cache, SHORT), full);
    }

    #[test]
    fn at_the_limit_another_shard_is_waited_for_before_all_are_gone_through() {
        let (pool, full, mut cache) = with_holes(2);
        pool.set_limit(Some(pool.usage().used_bytes));
        assert_eq!(shard_of_next(&mut cache), full);
        let object = cache.alloc(&[3; OBJECT]).unwrap();
        // SAFETY: no other thread knows the object, so it is in no word; it is retired once.
        unsafe { cache.retire(object) };
        assert_eq!(shard_of_next_while_locked(full, &mut cache, SHORT), full);
        let retired = pool.shards[cache.shard as usize].with(|shard| shard.retired.len());
        assert_eq!(retired, 1, "what was retired was looked through");
    }

    #[test]
    fn shrinking_write_waits_for_another_shard() {
        let (_, full, mut cache) = with_holes(2);
        assert_eq!(shard_of_next(&mut cache), full);
        let smaller = |cache: &mut Cache| {
            let object = cache.alloc_smaller(&[2; OBJECT]).unwrap();
            cache.pool.layout.shard(object.place())
        };
        assert_eq!(shard_while_locked(full, &mut cache, SHORT, smaller), full);
    }
}
