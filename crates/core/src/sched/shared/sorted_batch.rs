//! A sorted batch: requests of one channel that may take the fast path to the device together.
//!
//! A channel makes these checks without other threads. The requests have one class, are sorted, and
//! cannot be merged with each other. No zone gets two writes, because their order would matter.

use crate::bio::{Op, Prio};
use crate::request::Batch;
use crate::request::MergeRules;
use crate::sched::deadline::{Kind, Sweep};
use crate::units::Nanos;

/// Bits of a key for the index of the request in the batch.
const INDEX_BITS: u32 = 6;

/// Maximum number of requests in a sorted batch.
pub(super) const SORTED_MAX: usize = 1 << INDEX_BITS;

/// Above the sectors that a key can hold; every device ends before.
const SECTOR_END: u64 = 1 << 56;

/// Requests of one class, by direction and first sector.
#[derive(Debug)]
pub struct SortedBatch {
    prio: Prio,
    /// First sector and batch index of each request, ascending, by direction.
    keys: [[u64; SORTED_MAX]; 2],
    /// Number of requests of each direction.
    counts: [usize; 2],
    /// The first sector after each request, by batch index.
    ends: [u64; SORTED_MAX],
    /// The highest tag of the requests.
    tag_max: u16,
    /// The merge rules of the device.
    rules: MergeRules,
    /// Sectors of a zone; 0 for a device without zones.
    zone_sectors: u64,
    /// Batch indices in dispatch order.
    turns: [u8; SORTED_MAX],
}

impl SortedBatch {
    /// An empty sorted batch for a device with these merge rules, and with zones of `zone_sectors`
    /// sectors or without zones.
    pub(super) fn new(rules: MergeRules, zone_sectors: u64) -> SortedBatch {
        SortedBatch {
            prio: Prio::BestEffort,
            keys: [[0; SORTED_MAX]; 2],
            counts: [0; 2],
            ends: [0; SORTED_MAX],
            tag_max: 0,
            rules,
            zone_sectors,
            turns: [0; SORTED_MAX],
        }
    }

    /// Reads the first `most` requests of a batch; returns whether they can take the fast path
    /// together if nothing else waits.
    #[inline]
    pub(super) fn look_at(&mut self, batch: &Batch, most: usize) -> bool {
        let count = batch.len().min(most).min(SORTED_MAX);
        let (mut counts, mut tag_max) = ([0; 2], 0);
        for index in 0..count {
            let Some(request) = batch.get(index) else { return false };
            let kind = Kind::of(request.op(), request.prio());
            if index == 0 {
                self.prio = kind.prio;
            }
            let (sector, sectors) = (request.sector().0, request.sectors());
            let is_plain = request.op() != Op::Flush && sectors > 0 && sector < SECTOR_END;
            if kind.prio != self.prio || !is_plain {
                return false;
            }
            tag_max = tag_max.max(request.tag().0);
            let at = kind.direction as usize;
            self.keys[at][counts[at]] = sector << INDEX_BITS | index as u64;
            counts[at] += 1;
            self.ends[index] = sector.saturating_add(sectors);
        }
        (self.counts, self.tag_max) = (counts, tag_max);
        let [reads, writes] = &mut self.keys;
        reads[..counts[0]].sort_unstable();
        writes[..counts[1]].sort_unstable();
        let [reads, writes] = self.keys();
        let touch = |pair: &[u64]| self.ends[index_of(pair[0])] == sector_of(pair[1]);
        let join = |pair: &[u64]| touch(pair) && self.may_join(batch, pair);
        let is_apart = |pair: &[u64]| !join(pair) && !self.are_of_one_zone(pair);
        count > 0 && !reads.windows(2).any(join) && writes.windows(2).all(is_apart)
    }

    /// Whether two adjacent requests may be merged.
    #[cold]
    fn may_join(&self, batch: &Batch, pair: &[u64]) -> bool {
        match (batch.get(index_of(pair[0])), batch.get(index_of(pair[1]))) {
            (Some(first), Some(second)) => self.rules.allow(first.request(), second.request()),
            _ => true,
        }
    }

    /// The keys of reads and of writes.
    #[inline]
    fn keys(&self) -> [&[u64]; 2] {
        [&self.keys[0][..self.counts[0]], &self.keys[1][..self.counts[1]]]
    }

    /// Whether two requests lie in one zone. Zones start at multiples of a power of two; their
    /// capacity may be less.
    #[inline]
    fn are_of_one_zone(&self, pair: &[u64]) -> bool {
        sector_of(pair[0]) ^ sector_of(pair[1]) < self.zone_sectors
    }

    /// The class of all requests.
    #[inline]
    pub fn prio(&self) -> Prio {
        self.prio
    }

    /// Number of reads and of writes.
    #[inline]
    pub fn counts(&self) -> [u32; 2] {
        self.counts.map(|count| count as u32)
    }

    /// Number of requests.
    #[inline]
    pub fn count(&self) -> usize {
        self.counts[0] + self.counts[1]
    }

    /// Passes all requests through a sweep, which decides their order; returns whether they may
    /// pass.
    #[inline]
    pub fn dispatch(&mut self, sweep: &mut Sweep, now: Nanos) -> bool {
        let SortedBatch { keys: [reads, writes], counts, turns, .. } = self;
        let mut turn = turns.iter_mut();
        let take = |key: &u64| {
            if let Some(turn) = turn.next() {
                *turn = index_of(*key) as u8;
            }
        };
        let sorted = [&reads[..counts[0]], &writes[..counts[1]]];
        sweep.pass(sorted, |key| sector_of(*key), now, take)
    }

    /// Reorders the passed requests, which are the first of this batch, into dispatch order.
    #[inline]
    pub(super) fn arrange(&self, batch: &mut Batch) {
        batch.arrange(&self.turns[..self.count()]);
    }

    /// Whether all tags are below `depth`.
    #[inline]
    pub(super) fn has_tags_below(&self, depth: u16) -> bool {
        self.tag_max < depth
    }

    /// Number of reads and writes that were started; the others are still in the batch.
    #[inline]
    pub(super) fn started(&self, left: &Batch) -> [u32; 2] {
        let mut counts = self.counts();
        for index in 0..left.len() {
            if let Some(request) = left.get(index) {
                counts[Kind::of(request.op(), self.prio).direction as usize] -= 1;
            }
        }
        counts
    }
}

#[inline]
fn sector_of(key: u64) -> u64 {
    key >> INDEX_BITS
}

#[inline]
fn index_of(key: u64) -> usize {
    key as usize & (SORTED_MAX - 1)
}
