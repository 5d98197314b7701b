//! Some requests of one channel, sorted, that could pass on to the device together.
//!
//! What can be found out about them without the others is found out before anything is asked of
//! them: whether they are of one class, how they are sorted, that none can be merged, and that no
//! zone gets two writes, whose order would have to be kept.

use crate::bio::{Op, Prio};
use crate::channel::MergeRules;
use crate::request::Batch;
use crate::sched::deadline::{Kind, Sweep};
use crate::units::Nanos;

/// Bits of a key that say which request it is.
const INDEX_BITS: u32 = 6;

/// Most requests of a sheaf.
pub(super) const SHEAF_MAX: usize = 1 << INDEX_BITS;

/// Above the sectors that a key has place for: a device ends before that.
const SECTOR_END: u64 = 1 << 56;

/// Requests of one class, by direction and by their first sectors.
#[derive(Debug)]
pub struct Sheaf {
    prio: Prio,
    /// First sector and place in the batch of each, ascending, by direction.
    keys: [[u64; SHEAF_MAX]; 2],
    /// How many there are of either.
    counts: [usize; 2],
    /// The first sector behind each, by its place in the batch.
    ends: [u64; SHEAF_MAX],
    /// Greatest tag of them.
    tag_max: u16,
    /// What may become one request.
    rules: MergeRules,
    /// Sectors of a zone; 0 for a device without zones.
    zone_sectors: u64,
    /// Places in the batch, in the order in which they pass on.
    turns: [u8; SHEAF_MAX],
}

impl Sheaf {
    /// No requests yet, of a device that merges by these rules, with zones of so many sectors or
    /// with none.
    pub(super) fn new(rules: MergeRules, zone_sectors: u64) -> Sheaf {
        Sheaf {
            prio: Prio::BestEffort,
            keys: [[0; SHEAF_MAX]; 2],
            counts: [0; 2],
            ends: [0; SHEAF_MAX],
            tag_max: 0,
            rules,
            zone_sectors,
            turns: [0; SHEAF_MAX],
        }
    }

    /// Looks at the first `most` requests of a batch; says whether they can pass on together, if
    /// nothing else waits.
    #[inline]
    pub(super) fn look_at(&mut self, batch: &Batch, most: usize) -> bool {
        let count = batch.len().min(most).min(SHEAF_MAX);
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

    /// Whether two requests that touch may become one.
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

    /// Zones have a power of two of sectors, their capacity may be less.
    #[inline]
    fn are_of_one_zone(&self, pair: &[u64]) -> bool {
        sector_of(pair[0]) ^ sector_of(pair[1]) < self.zone_sectors
    }

    /// The class of all.
    #[inline]
    pub fn prio(&self) -> Prio {
        self.prio
    }

    /// How many reads there are and how many writes.
    #[inline]
    pub fn counts(&self) -> [u32; 2] {
        self.counts.map(|count| count as u32)
    }

    /// How many requests there are.
    #[inline]
    pub fn count(&self) -> usize {
        self.counts[0] + self.counts[1]
    }

    /// Has all of them pass through a sweep, which decides in which order they go; says
    /// whether they may.
    #[inline]
    pub fn pass(&mut self, sweep: &mut Sweep, now: Nanos) -> bool {
        let Sheaf { keys: [reads, writes], counts, turns, .. } = self;
        let mut turn = turns.iter_mut();
        let take = |key: &u64| {
            if let Some(turn) = turn.next() {
                *turn = index_of(*key) as u8;
            }
        };
        let sorted = [&reads[..counts[0]], &writes[..counts[1]]];
        sweep.pass(sorted, |key| sector_of(*key), now, take)
    }

    /// Puts the requests, which have passed and are the first of this batch, in their order.
    #[inline]
    pub(super) fn arrange(&self, batch: &mut Batch) {
        batch.arrange(&self.turns[..self.count()]);
    }

    /// Whether all tags are below `depth`.
    #[inline]
    pub(super) fn has_tags_below(&self, depth: u16) -> bool {
        self.tag_max < depth
    }

    /// How many reads and writes have been started, if the others are still in the batch.
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
    key as usize & (SHEAF_MAX - 1)
}
