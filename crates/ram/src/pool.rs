//! The pool: compressed objects, back to back.
//!
//! zsmalloc gives each size class pages of its own, and every class leaves its last pages half
//! empty: 12 % over the compressed bytes of a small disk. Here objects of all sizes share a segment
//! and follow each other in steps of 16 bytes; the classes are those of the *holes* that freed
//! objects leave, and a hole goes to the next object of its class. An object has no header: the
//! block's word knows its size, and the table of words is what compaction walks.
//!
//! ```text
//! Cache ─ alloc ▸ its Shard ─ hole of the class, else a larger one, else the open segment
//!               ▸ a hole of another Shard: of those that have one, the Shard that has most free
//!               ▸ its Shard ─ a segment that is begun
//!       ─ retire ▸ its Shard's list ─ look at the pins ▸ hole in the object's own Shard
//! Arena: pages in use and their limit.   Memory: one range of addresses.
//! ```
//!
//! A shard's lock is taken for a moment, by the one or two channels that have it; other channels
//! come to it with what they freed, in batches, for holes when it has many and their own shard is
//! full, and when the limit leaves them no other way. Without the second, whoever overwrites what
//! another channel has written would take as much memory again before any segment is empty. If all
//! data lie in one shard, as they do when one channel has written them, all others come there for
//! holes. They wait for one another only while an eighth of it is free; else who finds somebody at
//! it begins a segment of his own, and so what is overwritten comes to be in all shards.
//!
//! **Bounds.** Pages in use never exceed the limit; retired objects, holes and what was asked for
//! ahead lie in them and so count. A shard's list of retired objects has 16 and twice the number of
//! seats at most; when it is full, all but what is pinned is given back, and each seat pins one.
#![allow(unsafe_code)]

mod arena;
mod compact;
mod config;
mod holes;
mod layout;
mod memory;
mod object;
mod shard;
mod shares;
mod table;
mod usage;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use blockyard_sync::lock::Lock;
use blockyard_sync::pad::Padded;
use blockyard_sync::pins::{Guard, Pinned, Pins};
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;
use blockyard_sync::turn_lock::TurnLock;

use arena::{Arena, Purpose};
use compact::Room;
use layout::{Layout, PAGE_UNITS};
use memory::{Memory, PAGE_BYTES};
use shard::{Failing, Ground, Reach, Shard};

pub use compact::Compacted;
pub use config::{PoolConfig, PoolError};
pub use object::Object;
pub use usage::{Load, SizeClass, Usage};

/// Retired objects in a shard's list beyond twice the number of seats.
const RETIRED: usize = 16;

/// There is no place for the object within the limit, or no memory in the system. Nothing has
/// changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoSpace;

impl fmt::Display for NoSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no memory for the block within the limit")
    }
}

impl std::error::Error for NoSpace {}

/// Compressed objects of one device.
#[derive(Debug)]
pub struct Pool {
    shards: Box<[Padded<SleepLock<Shard, { ranks::SHARD }>>]>,
    arena: Arena,
    /// Held by the one who compacts, for a pass.
    compacting: TurnLock<Room, { ranks::COMPACTION }>,
    memory: Memory,
    layout: Layout,
    pins: Arc<Pins>,
}

impl Pool {
    /// An empty pool.
    ///
    /// # Errors
    /// If the configuration fits no pool, or the system does not reserve the addresses.
    pub fn new(config: &PoolConfig) -> Result<Arc<Pool>, PoolError> {
        let layout = config.layout()?;
        let bytes = layout.len_bytes();
        let memory = Memory::reserve(bytes as usize)
            .map_err(|errno| PoolError::Addresses { bytes, errno })?;
        let retired_max = RETIRED + 2 * config.seats_max as usize;
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
            compacting: TurnLock::new(Room::default()),
            memory,
            layout,
            pins: Pins::new(config.seats_max),
        }))
    }

    /// Where readers of its objects take their seats.
    pub fn pins(&self) -> &Arc<Pins> {
        &self.pins
    }

    /// What one channel, or one worker, allocates through.
    pub fn cache(self: &Arc<Pool>) -> Cache {
        Cache {
            shard: self.arena.next_shard(self.layout.shards()),
            other: None,
            pool: Arc::clone(self),
            scratch: Scratch::new(self.pins.seats_max()),
        }
    }

    /// Fetches the bytes of what may be an object into the cache, for who is going to read them.
    #[inline]
    pub fn fetch(&self, object: Object) {
        self.memory.fetch(self.layout.start(object.place()), self.layout.object_bytes(object));
    }

    /// Fetches what may be an object into the cache, for who is going to free it: one of the next
    /// objects is written where it lies.
    #[inline]
    pub fn fetch_to_free(&self, object: Object) {
        let at = self.layout.start(object.place());
        self.memory.fetch_to_write(at, self.layout.object_bytes(object));
    }

    /// An object's bytes, as long as it is pinned.
    ///
    /// # Safety
    /// `guard` has pinned the object, through entries whose words refer to this pool's objects and
    /// a seat of this pool's [`Pool::pins`].
    #[inline]
    pub unsafe fn bytes<'g>(&'g self, object: Object, guard: &'g Guard<'_>) -> &'g [u8] {
        debug_assert_eq!(guard.word().reference(), object.word().reference());
        // SAFETY: the object was written before its word was shown; it is pinned for `'g`.
        unsafe {
            self.memory.bytes(self.layout.start(object.place()), self.layout.object_bytes(object))
        }
    }

    /// The same where something else than a pin keeps others from giving it back, as a lock around
    /// its word does.
    ///
    /// # Safety
    /// It comes from this pool, and is neither freed nor retired while the bytes are looked at.
    #[inline]
    pub unsafe fn bytes_kept(&self, object: Object) -> &[u8] {
        // SAFETY: the object was written before anybody knew it; the caller keeps it.
        unsafe {
            self.memory.bytes(self.layout.start(object.place()), self.layout.object_bytes(object))
        }
    }

    /// Fails one in so many allocations by chance from now on; `None` for none. For tests.
    pub fn fail_allocations(&self, one_in: Option<NonZeroU32>, seed: u64) {
        for (number, shard) in self.shards.iter().enumerate() {
            // Never 0, which would stay 0.
            let random = seed.wrapping_add(number as u64).wrapping_mul(2) | 1;
            let failing = one_in.map(|one_in| Failing { one_in: one_in.get(), random });
            shard.with(|shard| shard.failing = failing);
        }
    }

    /// Of the shards but this one that have a hole for so many units, and as many free places as a
    /// segment, the one with most. Those that somebody is at are not asked: he may be long.
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

    fn ground(&self, purpose: Purpose) -> Ground<'_> {
        Ground { memory: &self.memory, arena: &self.arena, purpose }
    }

    /// Asks the system to make huge pages of what is filled, `count_max` at most, and says of how
    /// many: they cost no memory, and spare address translations. `stop` is asked in between.
    pub fn gather(&self, count_max: u64, mut stop: impl FnMut() -> bool) -> u64 {
        let mut count = 0;
        for (number, shard) in (0u32..).zip(&self.shards) {
            let mut from = 0;
            while count < count_max && !stop() {
                let Some(first) = shard.with(|shard| shard.begin_gathering(&mut from)) else {
                    break;
                };
                // Without the lock: it takes some hundred microseconds.
                self.memory.gather(self.layout.segment_start(number, first));
                shard.with(|shard| shard.end_gathering(self.ground(Purpose::Write)));
                count += 1;
            }
        }
        count
    }

    /// Gives back what was retired through one shard, and is not pinned.
    fn reclaim(&self, number: usize, scratch: &mut Scratch) {
        let Scratch { pinned, foreign } = scratch;
        self.shards[number].with(|shard| {
            // Under the lock: what is in the list now was taken out of its word before.
            self.pins.look(pinned);
            let mut kept = 0;
            for index in 0..shard.retired.len() {
                let object = shard.retired[index];
                if pinned.contains(object.word()) {
                    shard.retired[kept] = object;
                    kept += 1;
                } else if self.layout.shard(object.place()) == number as u32 {
                    // SAFETY: retired objects are in no word, this one is not pinned, and it
                    // leaves the list.
                    unsafe { shard.give(object, self.ground(Purpose::Write)) };
                } else {
                    foreign.push(object);
                }
            }
            shard.retired.truncate(kept);
        });
        // SAFETY: as above; they have left the list.
        unsafe { self.give_all(foreign) };
    }

    /// Frees objects of any shards, each shard's in one go.
    ///
    /// # Safety
    /// They were allocated, and nobody can find or read them any more.
    unsafe fn give_all(&self, objects: &mut Vec<Object>) {
        objects.sort_unstable_by_key(|object| self.layout.shard(object.place()));
        let same =
            |a: &Object, b: &Object| self.layout.shard(a.place()) == self.layout.shard(b.place());
        for group in objects.chunk_by(same) {
            let number = self.layout.shard(group[0].place());
            self.shards[number as usize].with(|shard| {
                for &object in group {
                    // SAFETY: this is the object's shard, and the caller's contract.
                    unsafe { shard.give(object, self.ground(Purpose::Write)) };
                }
            });
        }
        objects.clear();
    }
}

/// What a reclaim works with, kept so that it need not allocate.
#[derive(Debug)]
struct Scratch {
    pinned: Pinned,
    foreign: Vec<Object>,
}

impl Scratch {
    fn new(seats_max: usize) -> Scratch {
        let foreign = Vec::with_capacity(RETIRED + 2 * seats_max);
        Scratch { pinned: Pinned::with_capacity(seats_max), foreign }
    }
}

/// One channel's way to allocate and to free. It is bound to one shard, which it leaves only when
/// that one has nothing left, or would begin a segment while another has many holes.
#[derive(Debug)]
pub struct Cache {
    pool: Arc<Pool>,
    shard: u32,
    /// The shard whose holes are used when its own is full.
    other: Option<Other>,
    scratch: Scratch,
}

/// A shard that is not the channel's own.
#[derive(Clone, Copy, Debug)]
struct Other {
    shard: u32,
    /// [`Shard::has_much`], when somebody looked last.
    has_much: bool,
}

/// What asking another shard has led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Place(u64),
    /// It has no hole that fits.
    Nothing,
    /// Somebody is at it.
    Taken,
}

impl Cache {
    /// The pool that it allocates from.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Stores bytes as an object that nobody else knows yet. It is shown by a word, or freed.
    ///
    /// # Errors
    /// If there is no place within the limit, or the system has no memory.
    ///
    /// # Panics
    /// If there are no bytes, or more than the largest object has.
    #[inline]
    pub fn alloc(&mut self, bytes: &[u8]) -> Result<Object, NoSpace> {
        self.alloc_in(self.shard, bytes, Purpose::Write)
    }

    /// The same for what takes the place of something larger: it may use a part of what the limit
    /// leaves to compaction, since it gives back more than it takes.
    ///
    /// # Errors
    /// As for [`Cache::alloc`].
    ///
    /// # Panics
    /// As for [`Cache::alloc`].
    pub fn alloc_smaller(&mut self, bytes: &[u8]) -> Result<Object, NoSpace> {
        self.alloc_in(self.shard, bytes, Purpose::Shrink)
    }

    #[inline]
    fn alloc_in(&mut self, shard: u32, bytes: &[u8], purpose: Purpose) -> Result<Object, NoSpace> {
        let pool = &*self.pool;
        let units = pool.layout.units_of(bytes.len());
        assert!((1..=pool.layout.units_max).contains(&units), "{} bytes", bytes.len());
        let said = pool.layout.object_bytes(Object::new(0, bytes.len()));
        assert_eq!(said, bytes.len(), "no word can say how long this object is");
        let place = pool.shards[shard as usize].with(|shard| {
            if shard.strikes() {
                return Err(NoSpace);
            }
            // Compaction moves within a shard.
            let reach = if purpose == Purpose::Move { Reach::Fresh } else { Reach::Begun };
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
        // SAFETY: the place was allocated just now, so it is ours alone.
        unsafe {
            self.pool.begin_count(object);
            self.pool.memory.write(self.pool.layout.start(place), bytes);
        }
        Ok(object)
    }

    /// A place when the shard's open segment is full: a hole of another shard that has many, or a
    /// segment that is begun.
    #[inline(never)]
    fn alloc_beyond(&mut self, len_bytes: usize, purpose: Purpose) -> Option<u64> {
        if purpose == Purpose::Move {
            return None;
        }
        // Who recompresses has time, and is to take no page that he need not.
        let waits = purpose == Purpose::Shrink;
        let mut found = self.alloc_in_other(len_bytes, purpose, waits);
        if found == Found::Nothing {
            let units = self.pool.layout.units_of(len_bytes);
            self.other = self.pool.freest_but(self.shard, units);
            found = self.alloc_in_other(len_bytes, purpose, waits);
        }
        if let Found::Place(place) = found {
            return Some(place);
        }
        let pool = &*self.pool;
        let shard = &pool.shards[self.shard as usize];
        let place = shard.with(|shard| shard.alloc(len_bytes, Reach::Fresh, pool.ground(purpose)));
        if place.is_none() && found == Found::Taken {
            // The limit is met: waiting for one is less than going through all.
            found = self.alloc_in_other(len_bytes, purpose, true);
        }
        if let Found::Place(place) = found { Some(place) } else { place }
    }

    /// A hole of the other shard. Unless `waits` says so it is waited for only while much of it is
    /// free: if all data lie in one shard, whoever overwrites them moves them to his own, in place
    /// of meeting everybody else at that one's lock for as long as they are written.
    fn alloc_in_other(&mut self, len_bytes: usize, purpose: Purpose, waits: bool) -> Found {
        let Some(other) = &mut self.other else { return Found::Nothing };
        let pool = &*self.pool;
        let alloc = |shard: &mut Shard| {
            let place = shard.alloc(len_bytes, Reach::Holes, pool.ground(purpose));
            (place, shard.has_much())
        };
        let shard = &pool.shards[other.shard as usize];
        let (place, has_much) = match shard.try_with(alloc) {
            Ok(found) => found,
            Err(alloc) if waits || other.has_much => shard.with(alloc),
            Err(_) => return Found::Taken,
        };
        other.has_much = has_much;
        place.map_or(Found::Nothing, Found::Place)
    }

    /// The same when the shard has nothing left: what is retired is given back, and the other
    /// shards are asked.
    #[cold]
    fn alloc_anywhere(&mut self, len_bytes: usize, purpose: Purpose) -> Result<u64, NoSpace> {
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

    /// Frees an object that was not shown to anybody.
    ///
    /// # Safety
    /// It comes from this pool's [`Cache::alloc`], is in no word, was in none, and is freed once.
    pub unsafe fn free(&mut self, object: Object) {
        self.scratch.foreign.push(object);
        // SAFETY: by this function's contract; the list is empty otherwise.
        unsafe { self.pool.give_all(&mut self.scratch.foreign) };
    }

    /// Hands in an object that was just taken out of its word; it is given back when no reader has
    /// it pinned.
    ///
    /// # Safety
    /// It comes from this pool, no word refers to it any more, and it is retired once. Readers pin
    /// it through this pool's [`Pool::pins`] only. If its word was marked as shared it is not
    /// retired but given up ([`Cache::give_up`]).
    #[inline]
    pub unsafe fn retire(&mut self, object: Object) {
        let pool = &*self.pool;
        let full = RETIRED + 2 * pool.pins.seats_used();
        let number = self.shard as usize;
        let is_full = pool.shards[number].with(|shard| {
            shard.retired.push(object);
            shard.retired.len() >= full
        });
        if is_full {
            pool.reclaim(number, &mut self.scratch);
        }
    }

    /// Gives back everything that is retired and not pinned, whoever has retired it.
    pub fn reclaim_all(&mut self) {
        for number in 0..self.pool.shards.len() {
            self.pool.reclaim(number, &mut self.scratch);
        }
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
    /// Long enough for whoever does not wait, however busy the machine is.
    const LONG: Duration = Duration::from_secs(30);
    /// Most often enough for a thread to come to a lock.
    const SHORT: Duration = Duration::from_millis(20);

    /// A shard of 64 segments that has holes, as many as so many segments; and a channel of the
    /// other shard, which is empty.
    fn with_holes(segments: usize) -> (Arc<Pool>, u32, Cache) {
        let mut config = PoolConfig::new(64 << 20, 4096);
        config.shards = NonZeroU32::new(2);
        config.segment_bytes = Some(SEGMENT);
        let pool = Pool::new(&config).unwrap();
        let (mut full, empty) = (pool.cache(), pool.cache());
        let objects = 64 * SEGMENT / OBJECT;
        let objects: Vec<_> = (0..objects).map(|_| full.alloc(&[1; OBJECT]).unwrap()).collect();
        for &object in objects.iter().step_by(64 / segments) {
            // SAFETY: nobody knows it, and it is freed once.
            unsafe { full.free(object) };
        }
        assert_eq!(pool.usage().free_bytes, (segments * SEGMENT) as u64);
        (pool, full.shard, empty)
    }

    fn shard_of_next(cache: &mut Cache) -> u32 {
        let object = cache.alloc(&[2; OBJECT]).unwrap();
        cache.pool.layout.shard(object.place())
    }

    fn shard_of_next_beside(held: u32, cache: &mut Cache, time: Duration) -> u32 {
        shard_beside(held, cache, time, shard_of_next)
    }

    /// The same by a thread, while a shard is held until that has ended or so much time is over.
    fn shard_beside(
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
    fn another_shard_that_somebody_is_at_is_left_alone() {
        let (_, full, mut cache) = with_holes(2);
        let own = cache.shard;
        assert_eq!(shard_of_next(&mut cache), full);
        assert_eq!(shard_of_next_beside(full, &mut cache, LONG), own);
        // Its own segment is full again: it goes to the holes.
        for _ in 1..SEGMENT / OBJECT {
            assert_eq!(shard_of_next(&mut cache), own);
        }
        assert_eq!(shard_of_next(&mut cache), full);
    }

    #[test]
    fn a_shard_that_somebody_is_at_is_not_asked_what_it_has() {
        let (_, full, mut cache) = with_holes(16);
        let own = cache.shard;
        assert_eq!(shard_of_next_beside(full, &mut cache, LONG), own);
    }

    #[test]
    fn another_shard_of_which_much_is_free_is_waited_for() {
        let (_, full, mut cache) = with_holes(16);
        assert_eq!(shard_of_next(&mut cache), full);
        assert_eq!(shard_of_next_beside(full, &mut cache, SHORT), full);
    }

    #[test]
    fn at_the_limit_another_shard_is_waited_for_before_all_are_gone_through() {
        let (pool, full, mut cache) = with_holes(2);
        pool.set_limit(Some(pool.usage().used_bytes));
        assert_eq!(shard_of_next(&mut cache), full);
        let object = cache.alloc(&[3; OBJECT]).unwrap();
        // SAFETY: nobody knows it, so it is in no word, and it is retired once.
        unsafe { cache.retire(object) };
        assert_eq!(shard_of_next_beside(full, &mut cache, SHORT), full);
        let retired = pool.shards[cache.shard as usize].with(|shard| shard.retired.len());
        assert_eq!(retired, 1, "what was retired was looked through");
    }

    #[test]
    fn what_becomes_smaller_waits_for_another_shard() {
        let (_, full, mut cache) = with_holes(2);
        assert_eq!(shard_of_next(&mut cache), full);
        let smaller = |cache: &mut Cache| {
            let object = cache.alloc_smaller(&[2; OBJECT]).unwrap();
            cache.pool.layout.shard(object.place())
        };
        assert_eq!(shard_beside(full, &mut cache, SHORT, smaller), full);
    }
}
