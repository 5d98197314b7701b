//! Insertion of requests: a new request merges with a neighbour if it can, else it enters the
//! order.

use super::entries::NONE;
use super::kind::Kind;
use super::order::{Cursor, Key, SECTOR_END};
use super::{Deadline, Item};
use crate::units::{Nanos, ZoneNo};

impl<T: Item> Deadline<T> {
    /// Inserts a request that was submitted by `now`, and merges it if possible.
    ///
    /// # Errors
    /// The request itself if it cannot be merged and the scheduler has no space for it
    /// ([`Deadline::admits`]).
    #[inline]
    pub fn insert(&mut self, item: T, now: Nanos) -> Result<(), T> {
        let range = range_of(&item);
        if item.keeps_zone_order()
            && let Some(zone_lists) = &self.zone_lists
            && let Some(zone) = zone_lists.zone_of(range.0)
        {
            return self.insert_into_zone(item, range, zone, now);
        }
        self.insert_free(item, range, now)
    }

    /// Inserts a request that need not keep the order of its zone.
    #[inline(always)]
    fn insert_free(&mut self, item: T, range: (u64, u64), now: Nanos) -> Result<(), T> {
        let (kind, (sector, end)) = (item.kind(), range);
        let cursor = self.rows[kind.row()].order.position_after(&self.leaves, sector);
        if let Some(place) = self.neighbour_before(&item, sector, kind, cursor) {
            self.merge_back(place, item, end);
            self.close_gap(place, kind, cursor);
            return Ok(());
        }
        if let Some((at, place)) = self.neighbour_after(&item, end, kind, cursor) {
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

    /// Inserts requests that were submitted by `now`, in their order. Appends those without space
    /// to `refused`, in their order. The caller must insert those again before requests that were
    /// submitted later.
    pub fn insert_batch(
        &mut self,
        items: impl IntoIterator<Item = T>,
        now: Nanos,
        refused: &mut Vec<T>,
    ) {
        if self.zone_lists.is_none() {
            for item in items {
                let range = range_of(&item);
                if let Err(item) = self.insert_free(item, range, now) {
                    refused.push(item);
                }
            }
            return;
        }
        // Requests that were refused before go before these.
        let mut is_order_kept = !refused.iter().any(T::keeps_zone_order);
        for item in items {
            let keeps_order = item.keeps_zone_order();
            let inserted = if keeps_order && !is_order_kept {
                // The refused request may be a write to the same zone.
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

    /// Inserts a request before all others, regardless of its class: for a request that must not
    /// wait, such as a flush. The last inserted request comes first. The request is neither sorted
    /// nor merged.
    ///
    /// # Errors
    /// The request itself if there is no space for it; `async_depth` does not apply.
    pub fn insert_at_head(&mut self, item: T, now: Nanos) -> Result<(), T> {
        if !self.has_room() {
            return Err(item);
        }
        let kind = item.kind();
        self.count_in(kind);
        self.put_at_head(item, kind, now);
        Ok(())
    }

    /// Puts a request that the device did not start back before all others. The caller requeues
    /// several requests from the last to the first. There is always space for it.
    ///
    /// If a request comes back in pieces, the first piece is requeued here. The other pieces are
    /// new requests: the caller passes them to [`Deadline::insert_at_head`] before the first piece,
    /// the last one first.
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

    /// Inserts a request that was not merged.
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

    /// The request before a position of the order, if it ends where the new request starts and can
    /// merge with it.
    #[inline]
    fn neighbour_before(&self, item: &T, sector: u64, kind: Kind, at: Cursor) -> Option<u32> {
        let Key { place, .. } = self.rows[kind.row()].order.before(&self.leaves, at)?;
        let entry = &self.entries[place];
        let touches = entry.end == sector && !entry.in_line;
        (touches && entry.item.as_ref()?.joins(item, self.rules)).then_some(place)
    }

    /// The request after a position of the order, with the position right before it, if it starts
    /// where the new request ends and can merge with it. As in Linux, it is tried after the request
    /// before the position.
    #[inline]
    fn neighbour_after(&self, item: &T, end: u64, kind: Kind, at: Cursor) -> Option<(Cursor, u32)> {
        let (at, key) = self.rows[kind.row()].order.after(&self.leaves, at)?;
        if key.sector != end || !self.is_front_merging {
            return None;
        }
        let entry = &self.entries[key.place];
        let joins = !entry.in_line && item.joins(entry.item.as_ref()?, self.rules);
        joins.then_some((at, key.place))
    }

    /// Merges a new request to the front of a waiting one.
    fn merge_front(&mut self, place: u32, item: T, sector: u64) {
        let entry = &mut self.entries[place];
        entry.sector = sector;
        entry.item.as_mut().expect("it waits").merge_front(item);
        let kind = entry.kind;
        self.count_merged(kind);
    }

    /// Merges a new request to the end of a waiting one.
    fn merge_back(&mut self, place: u32, item: T, end: u64) {
        let entry = &mut self.entries[place];
        entry.end = end;
        entry.item.as_mut().expect("it waits").merge_back(item);
        let kind = entry.kind;
        self.count_merged(kind);
    }

    /// Counts a new request of this kind that was merged at once.
    fn count_merged(&mut self, kind: Kind) {
        let counters = &mut self.rows[kind.row()].counters;
        counters.inserted += 1;
        counters.merged += 1;
    }

    /// Merges a waiting request, which has grown at its end, with the request after `cursor` if the
    /// two are now adjacent. The merged request takes the earlier deadline of both, with its FIFO
    /// position.
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

    /// Inserts a write to a sequential zone. It can merge only with the last write of its zone,
    /// because otherwise it would go before writes that were inserted earlier.
    fn insert_into_zone(
        &mut self,
        item: T,
        range: (u64, u64),
        zone: ZoneNo,
        now: Nanos,
    ) -> Result<(), T> {
        let kind = item.kind();
        let zone_lists = self.zone_lists.as_mut().expect("the caller has seen them");
        let last = zone_lists.last(zone).unwrap_or(NONE);
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
        let cursor = self.rows[kind.row()].order.position_after(&self.leaves, range.0);
        let place = self.enter(item, kind, range, cursor, now);
        if let Some(zone_lists) = &mut self.zone_lists {
            zone_lists.push(&mut self.entries, zone, place);
        }
        Ok(())
    }

    /// Whether the scheduler accepts a new request of this kind: the capacity is not used up, and
    /// for a throttled kind `async_depth` is not reached. Like Linux's default, an `async_depth` of
    /// at least the capacity is no limit.
    #[inline]
    pub fn admits(&self, kind: Kind) -> bool {
        self.has_room() && !(kind.is_throttled() && self.throttled >= self.throttled_max)
    }

    /// Whether the capacity is not used up. Requests that come back from the device have reserved
    /// entries.
    #[inline]
    fn has_room(&self) -> bool {
        self.entries.free_count() > self.in_flight_max
    }
}

/// The first sector of a request, and the first sector after it.
#[inline]
fn range_of<T: Item>(item: &T) -> (u64, u64) {
    let sector = item.sector().0.min(SECTOR_END - 1);
    (sector, sector.saturating_add(item.sectors()).min(SECTOR_END))
}

/// Whether a time is before another one. Both must be close together; the clock may wrap around.
#[inline]
pub(super) const fn is_before(time: u64, other: u64) -> bool {
    (time.wrapping_sub(other) as i64) < 0
}
