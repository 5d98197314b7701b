//! The fast path: requests that need not wait go in and out in one decision.
//!
//! If no request waits and the device accepts all new requests, the positions of the sweeps
//! determine the order. So a sorted batch passes through as it is: from the latest position to its
//! end, and then from its start. The remaining work is to count the requests and to record the new
//! positions of sweep and batch. Reads and writes that come together alternate by `fifo_batch` and
//! `writes_starved` as usual.
//!
//! For a zoned device the order receives requests unsorted, so that a sweep that has ended
//! continues at the request that was submitted first. The fast path sorts there too and continues
//! at the lowest sector. No zone sees the difference, because the batch has at most one write per
//! zone.
//!
//! The fast path needs only a few words of state. The order lends them to one or several threads
//! until something else is asked of the order. Each borrower sweeps by itself, as if the requests
//! of the others came before or after its own. The last borrower's position is where the order
//! continues.

use super::insert::is_before;
use super::kind::{Direction, Kind};
use super::order::SECTOR_END;
use super::tunables::Tunable;
use super::{Deadline, Item};
use crate::bio::Prio;
use crate::units::Nanos;

/// The sweep positions of one class, while requests of that class use the fast path.
#[derive(Clone, Copy, Debug)]
pub struct Sweep {
    /// The first sector of the latest request, by direction.
    latest: [u64; 2],
    /// When the latest requests passed.
    at: u64,
    /// Number of requests that passed, by direction.
    taken: [u32; 2],
    /// Requests of the present batch so far, and the maximum.
    batching: u32,
    fifo_batch: u32,
    /// How often reads went before writes that came with them, and the maximum.
    starved: u32,
    writes_starved: u32,
    /// Maximum number of requests in flight at a time.
    most: u32,
    prio: Prio,
    /// The direction of the present batch.
    direction: Direction,
    /// Which directions may pass.
    may: [bool; 2],
}

impl Sweep {
    /// A sweep that lets no request pass.
    pub const NONE: Sweep = Sweep {
        latest: [0; 2],
        at: 0,
        taken: [0; 2],
        batching: 0,
        fifo_batch: 0,
        starved: 0,
        writes_starved: 0,
        most: 0,
        prio: Prio::BestEffort,
        direction: Direction::Write,
        may: [false; 2],
    };
}

impl<T: Item> Deadline<T> {
    /// Lends the sweep positions of a class. Requests of that class may then pass if they are
    /// submitted at `now` or later, in the directions of `may`, up to `most` at a time.
    ///
    /// Returns `None` if a request waits or another class has requests in flight. Until all lent
    /// sweeps are back, the caller must not use the order for anything but lending.
    pub fn lend(&self, prio: Prio, may: [bool; 2], most: u32, now: Nanos) -> Option<Sweep> {
        let others = super::CLASSES.into_iter().filter(|other| *other != prio);
        // A request that is expired when it arrives is ordered by its age.
        let is_young = self.expire.map(|expire| is_before(now.0, now.0.wrapping_add(expire)));
        let may_pass =
            self.is_empty() && others.map(|other| self.queued[other as usize]).sum::<usize>() == 0;
        let row = |direction| Kind { prio, direction }.row();
        let sweep = Sweep {
            latest: Direction::ALL.map(|direction| self.rows[row(direction)].latest),
            at: now.0,
            taken: [0; 2],
            batching: self.batching,
            fifo_batch: self.tunables.unsigned(Tunable::FifoBatch),
            starved: self.starved,
            writes_starved: self.tunables.unsigned(Tunable::WritesStarved),
            most: most.min(self.room().min(u32::MAX as usize) as u32),
            prio,
            direction: self.last_direction,
            may: [may[0] && is_young[0], may[1] && is_young[1]],
        };
        may_pass.then_some(sweep)
    }

    /// How many more requests that change the device may be in flight before `async_depth` limits
    /// them.
    pub fn throttled_room(&self) -> usize {
        self.throttled_max.saturating_sub(self.throttled)
    }

    /// Takes a lent sweep back and counts its requests. If it is the `latest` of those that were
    /// lent, the order continues at its position.
    pub fn settle(&mut self, sweep: &Sweep, latest: bool) {
        for (direction, taken) in Direction::ALL.into_iter().zip(sweep.taken) {
            if taken == 0 {
                continue;
            }
            let (kind, count) = (Kind { prio: sweep.prio, direction }, taken as usize);
            let row = &mut self.rows[kind.row()];
            row.counters.inserted += count as u64;
            row.counters.dispatched += count as u64;
            self.queued[kind.prio as usize] += count;
            if kind.is_throttled() {
                self.throttled += count;
            }
            if latest {
                row.latest = sweep.latest[direction as usize];
            }
        }
        if latest && sweep.taken != [0; 2] {
            self.batching = sweep.batching;
            self.last_direction = sweep.direction;
            self.starved = sweep.starved;
        }
    }
}

impl Sweep {
    /// The class of the requests that may pass.
    #[inline]
    pub fn prio(&self) -> Prio {
        self.prio
    }

    /// When the latest requests passed.
    #[inline]
    pub fn at(&self) -> Nanos {
        Nanos(self.at)
    }

    /// Maximum number of requests in flight at a time.
    #[inline]
    pub fn most(&self) -> u32 {
        self.most
    }

    /// Whether requests that change the device may pass.
    #[inline]
    pub fn may_write(&self) -> bool {
        self.may[Direction::Write as usize]
    }

    /// Number of reads and writes that passed.
    #[inline]
    pub fn taken(&self) -> [u32; 2] {
        self.taken
    }

    /// Passes requests: inserts all of them and removes them again, handing each to `take` in
    /// dispatch order. The effect is that of [`Deadline::insert_batch`] followed by
    /// [`Deadline::next_batch`] if the device has capacity for all.
    ///
    /// The requests come by direction, reads first. All are of the sweep's class and have a range.
    /// They are sorted by their first sector, `sector`, and no two neighbours of a direction can be
    /// merged. Returns `false` if they may not pass; then the sweep is unchanged.
    #[inline]
    pub fn pass<K>(
        &mut self,
        sorted: [&[K]; 2],
        sector: impl Fn(&K) -> u64 + Copy,
        now: Nanos,
        take: impl FnMut(&K),
    ) -> bool {
        let mut taken = self.taken;
        for direction in Direction::ALL {
            let keys = sorted[direction as usize];
            debug_assert!(keys.is_sorted_by_key(sector));
            let Some(last) = keys.last() else { continue };
            let sum = taken[direction as usize].checked_add(keys.len() as u32);
            match sum.filter(|_| self.may[direction as usize] && sector(last) < SECTOR_END - 1) {
                Some(sum) => taken[direction as usize] = sum,
                None => return false,
            }
        }
        self.at = now.0;
        self.taken = taken;
        match sorted {
            [reads, []] => self.pass_one(Direction::Read, reads, sector, take),
            [[], writes] => self.pass_one(Direction::Write, writes, sector, take),
            both => self.pass_both(both, sector, take),
        }
        true
    }

    /// Passes requests of one direction.
    #[inline]
    fn pass_one<K>(
        &mut self,
        direction: Direction,
        sorted: &[K],
        sector: impl Fn(&K) -> u64,
        take: impl FnMut(&K),
    ) {
        let (Some(first), Some(last)) = (sorted.first(), sorted.last()) else { return };
        let latest = &mut self.latest[direction as usize];
        let passed = if sector(first) >= *latest {
            0
        } else {
            sorted.partition_point(|key| sector(key) < *latest)
        };
        *latest = sector(if passed > 0 { &sorted[passed - 1] } else { last });
        // The requests up to the end of the sweep, and then those from its start.
        let (low, high) = sorted.split_at(passed);
        self.count(direction, high.len() as u32, self.direction == direction);
        self.count(direction, low.len() as u32, false);
        high.iter().chain(low).for_each(take);
    }

    /// Counts requests of one sweep in batches of `fifo_batch`.
    #[inline]
    fn count(&mut self, direction: Direction, count: u32, goes_on: bool) {
        if count == 0 {
            return;
        }
        let left = if goes_on { self.fifo_batch.saturating_sub(self.batching) } else { 0 };
        if count <= left {
            self.batching += count;
            return;
        }
        self.batching = (count - left - 1) % self.fifo_batch.max(1) + 1;
        self.direction = direction;
        if direction == Direction::Write {
            self.starved = 0;
        }
    }

    /// Passes reads and writes that came together: they alternate.
    fn pass_both<K>(
        &mut self,
        sorted: [&[K]; 2],
        sector: impl Fn(&K) -> u64,
        mut take: impl FnMut(&K),
    ) {
        let latest = self.latest;
        // For each direction: the number of requests from the latest position on. The others come
        // after them.
        let ahead = Direction::ALL.map(|direction| {
            let (keys, latest) = (sorted[direction as usize], latest[direction as usize]);
            keys.len() - keys.partition_point(|key| sector(key) < latest)
        });
        let mut gone = [0; 2];
        while gone[0] + gone[1] < sorted[0].len() + sorted[1].len() {
            let waits = [gone[0] < sorted[0].len(), gone[1] < sorted[1].len()];
            let last = self.direction as usize;
            let goes_on = waits[last] && gone[last] != ahead[last];
            if !goes_on || self.batching >= self.fifo_batch {
                self.direction = self.choose(waits);
                self.batching = 0;
            }
            self.batching = self.batching.saturating_add(1);
            let at = self.direction as usize;
            let passed = sorted[at].len() - ahead[at];
            let index = if gone[at] < ahead[at] { passed + gone[at] } else { gone[at] - ahead[at] };
            let key = &sorted[at][index];
            self.latest[at] = sector(key);
            gone[at] += 1;
            take(key);
        }
    }

    /// The direction of the next batch.
    fn choose(&mut self, waits: [bool; 2]) -> Direction {
        if waits == [true, false] {
            return Direction::Read;
        }
        if waits[0] {
            let starved = self.starved;
            self.starved = starved.wrapping_add(1);
            if starved < self.writes_starved {
                return Direction::Read;
            }
        }
        self.starved = 0;
        Direction::Write
    }
}
