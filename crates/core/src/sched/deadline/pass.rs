//! Requests that need not wait: they come in and go out in one decision.
//!
//! Where nothing waits and the device takes all that comes, the order has nothing to hold: whose
//! turn it is follows from where the sweep stands. So a sorted batch is passed on as it is, from
//! the latest position to its end and then from its start, and what is left to do is to count, and
//! to note where the sweep and the batch of `fifo_batch` stand then. That costs the same for any
//! number of requests. It needs few words, which are lent out as long as nothing else is asked of
//! the order, so that threads that take turns have one cache line to hand over.

use super::insert::is_before;
use super::kind::{Direction, Kind};
use super::order::SECTOR_END;
use super::tunables::Tunable;
use super::{Deadline, Item};
use crate::units::Nanos;

/// Where the sweep of one kind stands, while requests of that kind pass on.
#[derive(Clone, Copy, Debug)]
pub struct Sweep {
    /// The first sector of the latest request.
    latest: u64,
    /// How many have passed on.
    taken: u32,
    /// Most that can at a time.
    most: u32,
    /// Requests of the batch so far, and the most.
    batching: u32,
    fifo_batch: u32,
    kind: Kind,
    /// The latest batch is of this direction, so that what comes goes on with it.
    goes_on: bool,
    /// Another batch has begun.
    has_begun: bool,
}

impl<T: Item> Deadline<T> {
    /// Lends the sweep of a kind out, if requests of it that are submitted at `now` or later can
    /// pass on: nothing waits, and no other class has anything at the device. Until it is back,
    /// nothing else is asked of the order.
    pub fn lend(&self, kind: Kind, now: Nanos) -> Option<Sweep> {
        let others = super::CLASSES.into_iter().filter(|prio| *prio != kind.prio);
        let deadline = now.0.wrapping_add(self.expire[kind.direction as usize]);
        let may_pass = self.is_empty()
            && others.map(|prio| self.queued[prio as usize]).sum::<usize>() == 0
            // What is expired when it comes goes by its age.
            && is_before(now.0, deadline)
            && self.lines.is_none();
        let sweep = Sweep {
            latest: self.rows[kind.row()].latest,
            taken: 0,
            most: self.room().min(u32::MAX as usize) as u32,
            batching: self.batching,
            fifo_batch: self.tunables.unsigned(Tunable::FifoBatch),
            kind,
            goes_on: self.last_direction == kind.direction,
            has_begun: false,
        };
        may_pass.then_some(sweep)
    }

    /// How many requests of a kind may be at the device, with all others there, so that what
    /// passes on is not held back by `async_depth`.
    pub fn passing_max(&self, kind: Kind) -> usize {
        if kind.is_throttled() { self.throttled_max } else { usize::MAX }
    }

    /// Takes the sweep back that was lent, and counts what has passed on.
    pub fn settle(&mut self, sweep: Sweep) {
        if sweep.taken == 0 {
            return;
        }
        let (kind, count) = (sweep.kind, sweep.taken as usize);
        let row = &mut self.rows[kind.row()];
        row.latest = sweep.latest;
        row.counters.inserted += count as u64;
        row.counters.dispatched += count as u64;
        self.queued[kind.prio as usize] += count;
        if kind.is_throttled() {
            self.throttled += count;
        }
        self.batching = sweep.batching;
        self.last_direction = kind.direction;
        if sweep.has_begun && kind.direction == Direction::Write {
            self.starved = 0;
        }
    }
}

impl Sweep {
    /// The kind of what can pass on.
    #[inline]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Inserts requests and takes all of them out again at once. It is what
    /// [`Deadline::insert_batch`] and then [`Deadline::next_batch`] do, if there is room at the
    /// device for all, and no more are there than [`Deadline::passing_max`].
    ///
    /// All are of the sweep's kind and have a range, and they are sorted by `sector`, their first
    /// one; none ends where the next one starts. They go out from the one whose index is answered
    /// to the last one, and then from the first one on. None if it is not to be: then nothing has
    /// happened.
    #[inline]
    pub fn pass<K>(&mut self, sorted: &[K], sector: impl Fn(&K) -> u64) -> Option<usize> {
        let (first, last) = (sorted.first()?, sorted.last()?);
        debug_assert!(sorted.is_sorted_by_key(&sector));
        let count = sorted.len() as u32;
        let taken = self.taken.checked_add(count)?;
        if count > self.most || sector(last) >= SECTOR_END - 1 {
            return None;
        }
        let behind = if sector(first) >= self.latest {
            0
        } else {
            sorted.partition_point(|key| sector(key) < self.latest)
        };
        self.latest = sector(if behind > 0 { &sorted[behind - 1] } else { last });
        self.taken = taken;
        // Up to the end of the sweep, and once more from its start.
        self.count(count - behind as u32);
        self.goes_on = false;
        self.count(behind as u32);
        self.goes_on = true;
        Some(if behind < sorted.len() { behind } else { 0 })
    }

    /// Counts requests of one sweep in batches of `fifo_batch`.
    #[inline]
    fn count(&mut self, count: u32) {
        if count == 0 {
            return;
        }
        let left = if self.goes_on { self.fifo_batch.saturating_sub(self.batching) } else { 0 };
        if count <= left {
            self.batching += count;
            return;
        }
        self.batching = (count - left - 1) % self.fifo_batch.max(1) + 1;
        self.has_begun = true;
    }
}
