//! Which request is next: one decision for each request, exactly as mq-deadline decides.
//!
//! This includes a behaviour that looks like an oversight. While several classes are queued, the
//! search for an aged request begins a new batch even if it finds none. So the class that is served
//! continues in sector order, and its expired requests wait for the end of the sweep.
//!
//! There is one difference. If an expiry time is lowered, Linux takes requests that were queued
//! before for younger than they are. It then delays them for a while even if no other request
//! waits. Here the age is used only for the aging of classes and delays no request.

use super::insert::is_before;
use super::kind::{Direction, row};
use super::order::Cursor;
use super::tunables::Tunable;
use super::{Deadline, Item};
use crate::bio::Prio;
use crate::units::Nanos;

/// A request to dispatch.
#[derive(Clone, Copy, Debug)]
struct Choice {
    place: u32,
    /// The position in the sector order, if the request was found by continuing the sweep.
    swept: Option<Cursor>,
}

impl<T: Item> Deadline<T> {
    /// Removes the next request. `None` does not mean that no request waits: a class may wait for
    /// requests in flight of a higher class. Call again after each completion.
    #[inline]
    pub fn next(&mut self, now: Nanos) -> Option<T> {
        if let Some(place) = self.at_head.first() {
            return Some(self.dispatch_at_head(place));
        }
        let choice = self.decide(now)?;
        Some(self.dispatch(choice, now))
    }

    /// Removes up to `room` next requests, one after the other; returns their number.
    #[inline]
    pub fn next_batch(&mut self, room: usize, now: Nanos, mut take: impl FnMut(T)) -> usize {
        let mut taken = 0;
        while taken < room {
            let run = self.run(room - taken, now, &mut take);
            if run == 0 {
                let Some(item) = self.next(now) else { break };
                take(item);
                taken += 1;
            }
            taken += run;
        }
        taken
    }

    /// Continues a batch while [`Deadline::next`] would make the same decisions: no request is at
    /// the head, only one class is queued, and the next requests are in one leaf. Returns the
    /// number of removed requests, at most `room`.
    #[inline]
    fn run(&mut self, room: usize, now: Nanos, take: &mut impl FnMut(T)) -> usize {
        let batch_left = self.tunables.unsigned(Tunable::FifoBatch).saturating_sub(self.batching);
        let room = room.min(batch_left as usize);
        let mut classes = super::CLASSES.into_iter().filter(|prio| self.queued[*prio as usize] > 0);
        let (Some(prio), None) = (classes.next(), classes.next()) else { return 0 };
        if room == 0 || !self.at_head.is_empty() {
            return 0;
        }
        let row = &mut self.rows[row(prio, self.last_direction)];
        let cursor = row.order.following(&self.leaves, row.latest);
        let Some((cursor, keys)) = row.order.run(&self.leaves, cursor) else { return 0 };
        let mut count = 0;
        for key in keys.iter().take(room) {
            let entry = &self.entries[key.place];
            if entry.in_line {
                break;
            }
            row.counters.expired += u64::from(!is_before(now.0, entry.deadline));
            row.latest = key.sector;
            row.fifo.remove(&mut self.entries, key.place);
            take(self.entries.take(key.place));
            count += 1;
        }
        if count > 0 {
            row.order.sweep(&mut self.leaves, cursor, count, row.latest);
            row.counters.dispatched += count as u64;
            self.batching += count as u32;
        }
        count
    }

    /// Chooses the next request among those that are not at the head.
    fn decide(&mut self, now: Nanos) -> Option<Choice> {
        if self.is_empty() {
            return None;
        }
        if self.queued.iter().filter(|queued| **queued > 0).count() >= 2 {
            let oldest = now.0.wrapping_sub(self.tunables.nanos(Tunable::PrioAgingExpire));
            for prio in [Prio::BestEffort, Prio::Idle] {
                let aged = self.choose(prio, now, Some(oldest));
                if aged.is_some() {
                    return aged;
                }
            }
        }
        for prio in super::CLASSES {
            if self.queued[prio as usize] > 0 {
                return self.choose(prio, now, None);
            }
        }
        None
    }

    /// Dispatches the first request of this kind that starts at this sector, regardless of whether
    /// it is the next one. For a replay of another scheduler's decisions.
    pub fn take_at(&mut self, kind: super::Kind, sector: u64, now: Nanos) -> Option<T> {
        let order = &self.rows[kind.row()].order;
        let (_, key) = order.after(&self.leaves, order.following(&self.leaves, sector))?;
        if key.sector != sector {
            return None;
        }
        let place = key.place;
        if self.last_direction != kind.direction
            || self.batching >= self.tunables.unsigned(Tunable::FifoBatch)
        {
            self.last_direction = kind.direction;
            self.batching = 0;
        }
        self.batching = self.batching.saturating_add(1);
        Some(self.dispatch(Choice { place, swept: None }, now))
    }

    /// Chooses a request within a class; with `oldest`, only one that was submitted at that time or
    /// before. The batch state changes even if the request turns out too young.
    #[inline]
    fn choose(&mut self, prio: Prio, now: Nanos, oldest: Option<u64>) -> Option<Choice> {
        let batch_max = self.tunables.unsigned(Tunable::FifoBatch);
        let swept = if self.batching < batch_max {
            self.following(row(prio, self.last_direction))
        } else {
            None
        };
        let (choice, direction) = match swept {
            Some(choice) => (choice, self.last_direction),
            None => {
                let direction = self.choose_direction(prio)?;
                self.last_direction = direction;
                self.batching = 0;
                (self.begin_batch(row(prio, direction), now), direction)
            }
        };
        let choice = self.first_of_zone(choice);
        if let Some(oldest) = oldest {
            let entry = &self.entries[choice.place];
            let expire = self.expire[direction as usize];
            if is_before(oldest, entry.deadline.wrapping_sub(expire)) {
                return None;
            }
        }
        self.batching = self.batching.saturating_add(1);
        Some(choice)
    }

    /// The next request of a row in sector order, after the latest position.
    #[inline]
    fn following(&self, row: usize) -> Option<Choice> {
        let row = &self.rows[row];
        if row.fifo.is_empty() {
            return None;
        }
        let cursor = row.order.following(&self.leaves, row.latest);
        let (cursor, key) = row.order.after(&self.leaves, cursor)?;
        Some(Choice { place: key.place, swept: Some(cursor) })
    }

    /// The direction of the next batch of a class, or `None` if no request of the class waits.
    /// Reads go first, unless waiting writes have been passed over for `writes_starved` batches of
    /// reads.
    fn choose_direction(&mut self, prio: Prio) -> Option<Direction> {
        let has_reads = !self.rows[row(prio, Direction::Read)].fifo.is_empty();
        let has_writes = !self.rows[row(prio, Direction::Write)].fifo.is_empty();
        if has_reads {
            if !has_writes {
                return Some(Direction::Read);
            }
            let starved = self.starved;
            self.starved = starved.wrapping_add(1);
            if starved < self.tunables.unsigned(Tunable::WritesStarved) {
                return Some(Direction::Read);
            }
        } else if !has_writes {
            return None;
        }
        self.starved = 0;
        Some(Direction::Write)
    }

    /// The first request of a new batch of a row that is not empty: the oldest one if it has
    /// expired or if the sweep has ended.
    fn begin_batch(&self, row: usize, now: Nanos) -> Choice {
        let oldest = self.rows[row].fifo.first().expect("the row is not empty");
        let is_expired = !is_before(now.0, self.entries[oldest].deadline);
        let swept = if is_expired { None } else { self.following(row) };
        swept.unwrap_or(Choice { place: oldest, swept: None })
    }

    /// Replaces a write to a sequential zone by the first waiting write of its zone.
    #[inline]
    fn first_of_zone(&self, choice: Choice) -> Choice {
        let entry = &self.entries[choice.place];
        if entry.in_line
            && let Some(zone_lists) = &self.zone_lists
            && let Some(zone) = zone_lists.zone_of(entry.sector)
        {
            let first = zone_lists.first(zone);
            if first != choice.place {
                return Choice { place: first, swept: None };
            }
        }
        choice
    }

    /// Removes a request from all orders.
    #[inline]
    fn dispatch(&mut self, choice: Choice, now: Nanos) -> T {
        let Choice { place, swept } = choice;
        let entry = &self.entries[place];
        let (kind, sector, deadline, in_line) =
            (entry.kind, entry.sector, entry.deadline, entry.in_line);
        if in_line
            && let Some(zone_lists) = &mut self.zone_lists
            && let Some(zone) = zone_lists.zone_of(sector)
        {
            zone_lists.remove(&mut self.entries, zone, place);
        }
        let row = &mut self.rows[kind.row()];
        match swept {
            Some(cursor) => row.order.sweep(&mut self.leaves, cursor, 1, sector),
            None => {
                let cursor = row.order.find(&self.leaves, sector, place);
                row.order.remove(&mut self.leaves, cursor);
            }
        }
        row.fifo.remove(&mut self.entries, place);
        row.latest = sector;
        row.counters.dispatched += 1;
        row.counters.expired += u64::from(!is_before(now.0, deadline));
        self.entries.take(place)
    }

    /// Removes a request from the head. It has no deadline, so it is not counted as expired.
    #[cold]
    fn dispatch_at_head(&mut self, place: u32) -> T {
        self.at_head.remove(&mut self.entries, place);
        let entry = &self.entries[place];
        let row = &mut self.rows[entry.kind.row()];
        if entry.end > entry.sector {
            row.latest = entry.sector;
        }
        row.counters.dispatched += 1;
        self.entries.take(place)
    }
}
