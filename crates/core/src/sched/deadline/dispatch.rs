//! Whose turn it is: one decision for each request, exactly as mq-deadline makes it.
//!
//! That includes what looks like an oversight: while several classes are queued, the look for what
//! has aged begins a new batch even if it finds nothing, so that the class whose turn it is goes on
//! in sorted order, and its expired requests wait for the end of the sweep.
//!
//! One thing is otherwise. If an expiry time is lowered, Linux takes what was queued before for
//! younger than it is and holds it back for a while, even if nothing else is there. Here age counts
//! where it is asked for, in the aging of classes, and keeps nothing back elsewhere.

use super::insert::is_before;
use super::kind::{Direction, row};
use super::order::Cursor;
use super::tunables::Tunable;
use super::{Deadline, Item};
use crate::bio::Prio;
use crate::units::Nanos;

/// A request that is to be dispatched.
#[derive(Clone, Copy, Debug)]
struct Choice {
    place: u32,
    /// Where it stands in its order, if it was found there by going on from the latest position.
    swept: Option<Cursor>,
}

impl<T: Item> Deadline<T> {
    /// Takes the request whose turn it is. None does not mean that none waits: a class waits for
    /// what those before it have at the device, so ask again after each completion.
    #[inline]
    pub fn next(&mut self, now: Nanos) -> Option<T> {
        if let Some(place) = self.at_head.first() {
            return Some(self.dispatch_at_head(place));
        }
        let choice = self.decide(now)?;
        Some(self.dispatch(choice, now))
    }

    /// Takes up to `room` requests whose turn it is, one after the other; says how many.
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

    /// Goes on with a batch, as far as that is what [`Deadline::next`] would decide: nothing is at
    /// the head, one class alone is queued, and the next requests stand in one leaf. Says how many
    /// requests it has taken, up to `room`.
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

    /// Whose turn it is among what is not at the head.
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

    /// Takes the first request that was inserted with this kind and starts at this sector, as if
    /// its turn had come: for a replay of what another scheduler has decided.
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

    /// Decides within a class; with `oldest`, only for a request that started at that time or
    /// before. What it decides about the batch stays decided even if the request is too young.
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

    /// The next request of a row in sorted order, from the latest position on.
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

    /// The direction of the next batch of a class, if anything of it waits: reads, unless writes
    /// have waited for `writes_starved` batches of them.
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
    /// expired or if the sweep has come to its end.
    fn begin_batch(&self, row: usize, now: Nanos) -> Choice {
        let oldest = self.rows[row].fifo.first().expect("the row is not empty");
        let is_expired = !is_before(now.0, self.entries[oldest].deadline);
        let swept = if is_expired { None } else { self.following(row) };
        swept.unwrap_or(Choice { place: oldest, swept: None })
    }

    /// What goes to the device instead of a write to a sequential zone: the first of its line.
    #[inline]
    fn first_of_zone(&self, choice: Choice) -> Choice {
        let entry = &self.entries[choice.place];
        if entry.in_line
            && let Some(lines) = &self.lines
            && let Some(zone) = lines.zone_of(entry.sector)
        {
            let first = lines.first(zone);
            if first != choice.place {
                return Choice { place: first, swept: None };
            }
        }
        choice
    }

    /// Takes a request out of all orders.
    #[inline]
    fn dispatch(&mut self, choice: Choice, now: Nanos) -> T {
        let Choice { place, swept } = choice;
        let entry = &self.entries[place];
        let (kind, sector, deadline, in_line) =
            (entry.kind, entry.sector, entry.deadline, entry.in_line);
        if in_line
            && let Some(lines) = &mut self.lines
            && let Some(zone) = lines.zone_of(sector)
        {
            lines.remove(&mut self.entries, zone, place);
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

    /// Takes a request from before all others. It has no deadline, so it does not count as expired.
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
