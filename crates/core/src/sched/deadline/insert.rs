//! How requests come in: merged with a neighbour if they can be, else in order.

use super::entries::NONE;
use super::kind::Kind;
use super::order::{Cursor, Key, SECTOR_END};
use super::{Deadline, Item};
use crate::units::{Nanos, ZoneNo};

impl<T: Item> Deadline<T> {
    /// Takes a request that was submitted by `now`, and merges it if it can be.
    ///
    /// # Errors
    /// The request itself if there is no room for it ([`Deadline::admits`]) and nothing that it
    /// could join.
    #[inline]
    pub fn insert(&mut self, item: T, now: Nanos) -> Result<(), T> {
        let range = range_of(&item);
        if item.keeps_zone_order()
            && let Some(lines) = &self.lines
            && let Some(zone) = lines.zone_of(range.0)
        {
            return self.insert_into_zone(item, range, zone, now);
        }
        self.insert_free(item, range, now)
    }

    /// Takes a request that need not stay behind another one.
    #[inline(always)]
    fn insert_free(&mut self, item: T, range: (u64, u64), now: Nanos) -> Result<(), T> {
        let (kind, (sector, end)) = (item.kind(), range);
        let cursor = self.rows[kind.row()].order.behind(&self.leaves, sector);
        if let Some(place) = self.neighbour_before(&item, sector, kind, cursor) {
            self.merge_back(place, item, end);
            self.close_gap(place, kind, cursor);
            return Ok(());
        }
        if let Some((at, place)) = self.neighbour_behind(&item, end, kind, cursor) {
            self.merge_front(place, item, sector);
            self.rows[kind.row()].order.lower(&mut self.leaves, at, sector);
            return Ok(());
        }
        if !self.admits(kind) {
            return Err(item);
        }
        self.enter(item, kind, (sector, end), cursor, now);
        Ok(())
    }

    /// Takes requests that were submitted by `now`, in their order. Those that there is no room for
    /// go behind what is in `refused`, in their order. They are to be inserted again before what
    /// was submitted later.
    pub fn insert_batch(
        &mut self,
        items: impl IntoIterator<Item = T>,
        now: Nanos,
        refused: &mut Vec<T>,
    ) {
        if self.lines.is_none() {
            for item in items {
                let range = range_of(&item);
                if let Err(item) = self.insert_free(item, range, now) {
                    refused.push(item);
                }
            }
            return;
        }
        // What was refused before, and waits there, goes before these.
        let mut is_order_kept = !refused.iter().any(T::keeps_zone_order);
        for item in items {
            let keeps_order = item.keeps_zone_order();
            let inserted = if keeps_order && !is_order_kept {
                // The one that was refused may be a write to the same zone.
                Err(item)
            } else {
                self.insert(item, now)
            };
            if let Err(item) = inserted {
                is_order_kept &= !keeps_order;
                refused.push(item);
            }
        }
    }

    /// Takes a request before all others, whatever their class: for what must not wait, such as a
    /// flush. The one that was inserted last comes first. It is neither sorted nor merged.
    ///
    /// # Errors
    /// The request itself if there is no room for it; `async_depth` does not count.
    pub fn insert_at_head(&mut self, item: T, now: Nanos) -> Result<(), T> {
        if !self.has_room() {
            return Err(item);
        }
        let kind = item.kind();
        self.count_in(kind);
        self.put_at_head(item, kind, now);
        Ok(())
    }

    /// Takes a request back that the device did not start, before all others. Several come last to
    /// first. There is always room for it.
    ///
    /// A request that comes back in pieces comes back as its first piece; the others are new, and
    /// go through [`Deadline::insert_at_head`], the last one first and all of them before it.
    pub fn requeue(&mut self, item: T, now: Nanos) {
        let kind = item.kind();
        let counters = &mut self.rows[kind.row()].counters;
        counters.requeued += 1;
        debug_assert!(counters.requeued <= counters.dispatched, "what comes back was there");
        self.put_at_head(item, kind, now);
    }

    fn put_at_head(&mut self, item: T, kind: Kind, now: Nanos) {
        let range = range_of(&item);
        let place = self.entries.put(item, kind, range, now.0);
        self.at_head.push_front(&mut self.entries, place);
    }

    /// Counts a new request of this kind.
    #[inline]
    fn count_in(&mut self, kind: Kind) {
        self.rows[kind.row()].counters.inserted += 1;
        self.queued[kind.prio as usize] += 1;
        self.throttled += usize::from(kind.is_throttled());
    }

    /// Puts a request that was not merged in order.
    #[inline]
    fn enter(&mut self, item: T, kind: Kind, range: (u64, u64), cursor: Cursor, now: Nanos) -> u32 {
        self.count_in(kind);
        let deadline = now.0.wrapping_add(self.expire[kind.direction as usize]);
        let place = self.entries.put(item, kind, range, deadline);
        let row = &mut self.rows[kind.row()];
        row.order.insert(&mut self.leaves, cursor, Key { sector: range.0, place });
        row.fifo.push_back(&mut self.entries, place);
        place
    }

    /// The request before a point of its order, if it ends where a new one starts that it can take
    /// in.
    #[inline]
    fn neighbour_before(&self, item: &T, sector: u64, kind: Kind, at: Cursor) -> Option<u32> {
        let Key { place, .. } = self.rows[kind.row()].order.before(&self.leaves, at)?;
        let entry = &self.entries[place];
        let touches = entry.end == sector && !entry.in_line;
        (touches && entry.item.as_ref()?.joins(item, self.rules)).then_some(place)
    }

    /// The request behind a point of its order, and the point right before it, if it starts where a
    /// new one ends that it can take in. It is asked after the one before, as in Linux.
    #[inline]
    fn neighbour_behind(
        &self,
        item: &T,
        end: u64,
        kind: Kind,
        at: Cursor,
    ) -> Option<(Cursor, u32)> {
        let (at, key) = self.rows[kind.row()].order.after(&self.leaves, at)?;
        if key.sector != end || !self.is_front_merging {
            return None;
        }
        let entry = &self.entries[key.place];
        let joins = !entry.in_line && item.joins(entry.item.as_ref()?, self.rules);
        joins.then_some((at, key.place))
    }

    /// Puts a new request before the one in a place.
    fn merge_front(&mut self, place: u32, item: T, sector: u64) {
        let entry = &mut self.entries[place];
        entry.sector = sector;
        entry.item.as_mut().expect("it waits").merge_front(item);
        let kind = entry.kind;
        self.count_merged(kind);
    }

    /// Puts a new request behind the one in a place.
    fn merge_back(&mut self, place: u32, item: T, end: u64) {
        let entry = &mut self.entries[place];
        entry.end = end;
        entry.item.as_mut().expect("it waits").merge_back(item);
        let kind = entry.kind;
        self.count_merged(kind);
    }

    /// Counts a new request of this kind that became part of another one at once.
    fn count_merged(&mut self, kind: Kind) {
        let counters = &mut self.rows[kind.row()].counters;
        counters.inserted += 1;
        counters.merged += 1;
    }

    /// Merges the request in a place, which has grown at its end up to a point of its order, with
    /// the one behind the point if they touch now. The earlier deadline of both counts, with its
    /// place in the FIFO.
    fn close_gap(&mut self, place: u32, kind: Kind, cursor: Cursor) {
        let row = &mut self.rows[kind.row()];
        let Some((at, key)) = row.order.after(&self.leaves, cursor) else { return };
        let next = key.place;
        if self.entries[place].end != key.sector || self.entries[next].in_line {
            return;
        }
        let pair = (&self.entries[place].item, &self.entries[next].item);
        let (Some(item), Some(next_item)) = pair else { return };
        if !item.joins(next_item, self.rules) {
            return;
        }
        row.order.remove(&mut self.leaves, at);
        let (deadline, end) = (self.entries[next].deadline, self.entries[next].end);
        if is_before(deadline, self.entries[place].deadline) {
            row.fifo.remove(&mut self.entries, place);
            row.fifo.replace(&mut self.entries, next, place);
            self.entries[place].deadline = deadline;
        } else {
            row.fifo.remove(&mut self.entries, next);
        }
        row.counters.merged += 1;
        let next_item = self.entries.take(next);
        let entry = &mut self.entries[place];
        entry.end = end;
        entry.item.as_mut().expect("it waits").merge_back(next_item);
        self.queued[kind.prio as usize] -= 1;
        self.throttled -= usize::from(kind.is_throttled());
    }

    /// A write to a sequential zone: it can join the last one of its zone's line only, or it would
    /// go before what was inserted earlier.
    fn insert_into_zone(
        &mut self,
        item: T,
        range: (u64, u64),
        zone: ZoneNo,
        now: Nanos,
    ) -> Result<(), T> {
        let kind = item.kind();
        let lines = self.lines.as_mut().expect("the caller has seen them");
        let last = lines.last(zone).unwrap_or(NONE);
        if last != NONE && self.entries[last].end == range.0 && self.entries[last].kind == kind {
            let waits = self.entries[last].item.as_ref().expect("it waits");
            if waits.joins(&item, self.rules) {
                self.merge_back(last, item, range.1);
                return Ok(());
            }
        }
        if !self.admits(kind) {
            return Err(item);
        }
        let cursor = self.rows[kind.row()].order.behind(&self.leaves, range.0);
        let place = self.enter(item, kind, range, cursor, now);
        if let Some(lines) = &mut self.lines {
            lines.push(&mut self.entries, zone, place);
        }
        Ok(())
    }

    /// Whether a new request of this kind is taken: the capacity is not used up, and if it is
    /// throttled, `async_depth` is not either. Like Linux's default, an `async_depth` of the whole
    /// capacity or more bounds nothing.
    #[inline]
    pub fn admits(&self, kind: Kind) -> bool {
        self.has_room() && !(kind.is_throttled() && self.throttled >= self.throttled_max)
    }

    /// Whether the capacity is not used up. What comes back from the device has places of its own.
    #[inline]
    fn has_room(&self) -> bool {
        self.entries.free_count() > self.in_flight_max
    }
}

/// The first sector of a request, and the first one behind it.
#[inline]
fn range_of<T: Item>(item: &T) -> (u64, u64) {
    let sector = item.sector().0.min(SECTOR_END - 1);
    (sector, sector.saturating_add(item.sectors()).min(SECTOR_END))
}

/// Whether a time comes before another one; both are close together, and may wrap around.
#[inline]
pub(super) const fn is_before(time: u64, other: u64) -> bool {
    (time.wrapping_sub(other) as i64) < 0
}
