//! Some requests of one channel, sorted, that could pass on to the device together.
//!
//! What can be found out about them without the others is found out before anybody is kept from the
//! order for it: whether they are of one kind, how they are sorted, and that none can be merged.

use crate::bio::Op;
use crate::request::{Batch, Started};
use crate::sched::deadline::Kind;

/// Bits of a key that say which request it is.
const INDEX_BITS: u32 = 6;

/// Most requests of a sheaf.
pub(super) const SHEAF_MAX: usize = 1 << INDEX_BITS;

/// Above the sectors that a key has place for: a device ends before that.
const SECTOR_END: u64 = 1 << 56;

/// Requests of one kind, by their first sectors.
#[derive(Debug)]
pub struct Sheaf {
    kind: Kind,
    /// First sector and place in the batch of each, ascending.
    keys: Vec<u64>,
    /// The first sector behind each, by its place in the batch.
    ends: Vec<u64>,
    /// Greatest tag of them.
    tag_max: u16,
    /// The requests by their place in the batch, on their way to that in the order.
    lifted: Vec<Option<Started>>,
}

impl Sheaf {
    /// No requests yet.
    pub(super) fn new() -> Sheaf {
        Sheaf {
            kind: Kind::of(Op::Read, crate::bio::Prio::BestEffort),
            keys: Vec::with_capacity(SHEAF_MAX),
            ends: Vec::with_capacity(SHEAF_MAX),
            tag_max: 0,
            lifted: Vec::with_capacity(SHEAF_MAX),
        }
    }

    /// Looks at the first `most` requests of a batch; says whether they can pass on together, if
    /// nothing else waits.
    #[inline]
    pub(super) fn look_at(&mut self, batch: &Batch, most: usize) -> bool {
        self.keys.clear();
        self.ends.clear();
        let count = batch.len().min(most).min(SHEAF_MAX);
        let mut tag_max = 0;
        for index in 0..count {
            let Some(request) = batch.get(index) else { return false };
            let kind = Kind::of(request.op(), request.prio());
            if index == 0 {
                self.kind = kind;
            }
            let (sector, sectors) = (request.sector().0, request.sectors());
            let is_plain = request.op() != Op::Flush && sectors > 0 && sector < SECTOR_END;
            if kind != self.kind || !is_plain {
                return false;
            }
            tag_max = tag_max.max(request.tag().0);
            self.keys.push(sector << INDEX_BITS | index as u64);
            self.ends.push(sector.saturating_add(sectors));
        }
        self.tag_max = tag_max;
        self.keys.sort_unstable();
        let ends = &self.ends;
        count > 0 && self.keys.windows(2).all(|pair| ends[index_of(pair[0])] != sector_of(pair[1]))
    }

    /// The kind of all.
    #[inline]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// How many there are.
    #[inline]
    pub fn count(&self) -> usize {
        self.keys.len()
    }

    /// What they are sorted by; [`Sheaf::sector`] has the first sector of each.
    #[inline]
    pub fn keys(&self) -> &[u64] {
        &self.keys
    }

    /// The first sector of the request with this key.
    #[inline]
    pub fn sector(key: &u64) -> u64 {
        sector_of(*key)
    }

    /// Whether all tags are below `depth`.
    #[inline]
    pub(super) fn has_tags_below(&self, depth: u16) -> bool {
        self.tag_max < depth
    }

    /// Moves the requests from the batch that was looked at to another one, in ascending order from
    /// index `first` on, and then from the start.
    #[inline]
    pub(super) fn lift(&mut self, first: usize, from: &mut Batch, to: &mut Batch) {
        self.lifted.extend((0..self.keys.len()).map(|_| from.next()));
        let (last, others) = self.keys.split_at(first);
        for key in others.iter().chain(last) {
            if let Some(started) = self.lifted[index_of(*key)].take() {
                to.push(started);
            }
        }
        self.lifted.clear();
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
