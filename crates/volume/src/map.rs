//! The block map of a volume, which says where each block is: a radix tree of pages, divided into
//! spans with a lock each.
//!
//! A span is a node of the map with the pending writes of its blocks: 65,536 blocks, which is 1 GiB
//! of 16 KiB blocks. The lock is held to look blocks up and to enter new ones, never during I/O.
//! Under one hold of the lock, a client's thread enters the blocks of a write as *pending* and
//! posts its record to the committer's completion queue, so that both have the same order. The
//! committer enters blocks into the tree when they are in the log, in log order. So the tree always
//! equals what a recovery would find.
//!
//! After the map come its parts: the pending writes of a span ([`Pending`]), the counts of what a
//! change makes live and dead ([`Tally`]), and the cache of leaves ([`Cache`]). The pages are in
//! `map/page.rs`.
#![allow(clippy::disallowed_types)] // The cache: a leaf is read from disk, which takes far longer.

pub mod page;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use blockyard_store::log_writer::Payload;
use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;
use blockyard_volume_format::entry::Entry;
use blockyard_volume_format::{FAN, NODE_BLOCKS, PAGE_BYTES};

use page::Evicted;
pub use page::{Generation, Leaf, Node, Page, StoredBlocks};

/// What the map says of a block.
#[derive(Clone, Debug)]
pub enum Lookup {
    /// The block is zeros.
    Zero,
    /// The block is pending: block `index` of a write that is not in the log yet.
    Memory {
        /// The contents of the write.
        payload: Arc<Payload>,
        /// The number of the block in the write.
        index: u32,
        /// The number of the write in the span.
        serial: u64,
        /// The write may still be refused for lack of space.
        may_fail: bool,
    },
    /// The block is pending zeros, which are not in the log yet.
    Cleared {
        /// The number of the write in the span.
        serial: u64,
        /// The request may still be refused for lack of space.
        may_fail: bool,
    },
    /// The block is stored at this entry.
    Disk(Entry),
    /// The leaf that names the block must be read first.
    NotResident(Arc<Leaf>),
}

/// A leaf that is not in memory and must be read first.
#[derive(Clone, Debug)]
pub struct NotResident(pub Arc<Leaf>);

impl Lookup {
    /// Whether two lookups found the same contents, written by the same write.
    pub fn is_same(&self, other: &Lookup) -> bool {
        match (self, other) {
            (Lookup::Zero, Lookup::Zero) => true,
            (Lookup::Memory { serial: a, .. }, Lookup::Memory { serial: b, .. })
            | (Lookup::Cleared { serial: a, .. }, Lookup::Cleared { serial: b, .. }) => a == b,
            (Lookup::Disk(a), Lookup::Disk(b)) => a == b,
            _ => false,
        }
    }

    /// The number of the pending write, if it may still be refused.
    pub fn unsettled(&self) -> Option<u64> {
        match self {
            Lookup::Memory { serial, may_fail: true, .. }
            | Lookup::Cleared { serial, may_fail: true } => Some(*serial),
            _ => None,
        }
    }
}

/// A span: one node of the map and the pending writes of its blocks. Blocks are numbered from the
/// beginning of the span.
#[derive(Debug, Default)]
pub struct Span {
    node: Option<Arc<Node>>,
    pending: Pending,
    /// The number of the last write.
    serial: u64,
    /// The number of copies of maps that had been made when this map was last copied.
    copied: u32,
}

impl Span {
    /// Looks up a block, pending writes first.
    pub fn find(&self, block: u32) -> Lookup {
        match self.pending.at(block) {
            Some(Coming { serial, what: What::Zero, may_fail }) => {
                Lookup::Cleared { serial, may_fail }
            }
            Some(Coming { serial, what: What::Data { payload, index }, may_fail }) => {
                Lookup::Memory { payload, index, serial, may_fail }
            }
            None => match self.entry(block) {
                Ok(Entry::HOLE) => Lookup::Zero,
                Ok(entry) => Lookup::Disk(entry),
                Err(NotResident(leaf)) => Lookup::NotResident(leaf),
            },
        }
    }

    /// The entry of a block in the tree.
    ///
    /// # Errors
    /// If the leaf is not in memory.
    pub fn entry(&self, block: u32) -> Result<Entry, NotResident> {
        let leaf = self.node.as_ref().and_then(|node| node.leaf(block as usize / FAN));
        let Some(leaf) = leaf else { return Ok(Entry::HOLE) };
        leaf.entry(block as usize % FAN).ok_or_else(|| NotResident(Arc::clone(leaf)))
    }

    /// The first leaf of a range of blocks that is not in memory.
    pub fn away(&self, first: u32, end: u32) -> Option<NotResident> {
        let node = self.node.as_ref()?;
        let leaves = first as usize / FAN..(end as usize).div_ceil(FAN);
        let mut leaves = leaves.filter_map(|at| node.leaf(at));
        leaves.find(|leaf| !leaf.is_resident()).map(|leaf| NotResident(Arc::clone(leaf)))
    }

    /// The leaves owned by this map that a range covers completely, and whose number of fresh
    /// blocks is unknown.
    pub(crate) fn uncounted(&self, first: u32, end: u32) -> Vec<Arc<Leaf>> {
        let whole = (first as usize).div_ceil(FAN)..end as usize / FAN;
        let leaves = whole.filter_map(|at| self.node.as_ref()?.leaf(at));
        let own = leaves.filter(|leaf| self.owns(leaf));
        own.filter(|leaf| leaf.fresh_count().is_none()).cloned().collect()
    }

    /// Whether a leaf belongs to this map alone.
    pub(crate) fn owns(&self, leaf: &Leaf) -> bool {
        self.stamp(0, 0).owns(leaf)
    }

    /// The blocks that only this map has, as far as is known.
    fn owned(&self) -> u64 {
        let leaves = self.node.iter().flat_map(|node| node.leaves().map(|(_, leaf)| leaf));
        let own = leaves.filter(|leaf| self.owns(leaf));
        own.map(|leaf| leaf.fresh_count().map_or(0, u64::from)).sum()
    }

    /// Enters blocks as pending, and returns the number of this write. `may_fail`: the write is
    /// answered later, and until then may be refused for lack of space.
    pub fn begin(&mut self, first: u32, end: u32, what: What, may_fail: bool) -> u64 {
        self.serial += 1;
        let serial = self.serial;
        self.pending.insert(first, end, Coming { serial, what, may_fail });
        serial
    }

    /// Removes what is left of the pending write `serial`.
    pub fn retire(&mut self, first: u32, end: u32, serial: u64) {
        self.pending.retire(first, end, serial);
    }

    /// Makes blocks of a pending write visible again, see [`Pending::restore`].
    pub(crate) fn restore(&mut self, first: u32, end: u32, coming: &Coming) {
        self.pending.restore(first, end, coming);
    }

    fn stamp(&self, now: u32, round: u64) -> Generation {
        Generation { copied: self.copied, now, round }
    }

    /// Enters blocks from `first` on into the tree, after they were written to the log. `now` is
    /// the birth epoch for new leaves.
    ///
    /// # Errors
    /// If a leaf is not in memory; then the blocks before it may have been entered.
    pub fn set(
        &mut self,
        first: u32,
        entries: &[Entry],
        now: u32,
        tally: &mut Tally,
    ) -> Result<(), NotResident> {
        let stamp = self.stamp(now, tally.round);
        let (mut block, mut entries) = (first as usize, entries);
        while !entries.is_empty() {
            let (number, from) = (block / FAN, block % FAN);
            let some;
            (some, entries) = entries.split_at(entries.len().min(FAN - from));
            let leaf = self.leaf_mut(number, stamp, tally)?;
            leaf.change(|page| {
                for (at, entry) in (from..).zip(some) {
                    retire(page, at, tally);
                    page.set(at, *entry, true);
                    tally.born(entry);
                    tally.owned += 1;
                }
            });
            block += some.len();
        }
        Ok(())
    }

    fn leaf_mut(
        &mut self,
        at: usize,
        stamp: Generation,
        tally: &mut Tally,
    ) -> Result<&mut Leaf, NotResident> {
        // Check this first, so that nothing changes if the leaf is missing.
        if let Some(leaf) = self.node.as_ref().and_then(|node| node.leaf(at))
            && !leaf.is_resident()
        {
            return Err(NotResident(Arc::clone(leaf)));
        }
        let node = node_mut(&mut self.node, tally);
        match node.own(at, stamp) {
            Some(is_news) => tally.dirtied += u64::from(is_news),
            // The cache evicted the leaf since the first check.
            None => {
                return Err(NotResident(node.leaf(at).cloned().expect("a new one is in memory")));
            }
        }
        Ok(node.owned(at))
    }

    /// Clears blocks in the tree, after the log states that they are zeros.
    ///
    /// # Errors
    /// As [`Span::set`].
    pub fn clear(
        &mut self,
        first: u32,
        end: u32,
        now: u32,
        tally: &mut Tally,
    ) -> Result<(), NotResident> {
        let stamp = self.stamp(now, tally.round);
        let is_whole = first == 0 && u64::from(end) == NODE_BLOCKS;
        let mut block = first as usize;
        while block < end as usize {
            let (number, from) = (block / FAN, block % FAN);
            let to = FAN.min(from + end as usize - block);
            block += to - from;
            let Some(leaf) = self.node.as_ref().and_then(|node| node.leaf(number)) else {
                continue;
            };
            if from > 0 || to < FAN {
                self.leaf_mut(number, stamp, tally)?.change(|page| {
                    for at in from..to {
                        retire(page, at, tally);
                        page.set(at, Entry::HOLE, false);
                    }
                });
                continue;
            }
            match leaf.page().filter(|_| stamp.owns(leaf)) {
                Some(page) => (0..FAN).for_each(|at| retire(&page, at, tally)),
                None => {
                    tally.unknown(tally.leaf_bytes);
                    // An upper bound, if the leaf was never read.
                    let most = || leaf.fresh_count().map_or(FAN as i64, i64::from);
                    tally.owned -= if stamp.owns(leaf) { most() } else { 0 };
                }
            }
            if !is_whole {
                node_mut(&mut self.node, tally).remove(number);
            }
        }
        if is_whole && self.node.take().is_some() {
            // Count the root, which changes too.
            tally.dirtied += 1;
        }
        Ok(())
    }

    /// The node of this span's tree.
    pub(crate) fn node(&self) -> Option<&Arc<Node>> {
        self.node.as_ref()
    }

    /// Replaces the node by one with the same contents that is to be written elsewhere on disk.
    fn replace(&mut self, node: Arc<Node>) {
        self.node = Some(node);
    }

    /// Whether no write is pending.
    pub fn is_settled(&self) -> bool {
        self.pending.is_empty()
    }
}

/// Prepares a node for a change, and counts it and its root as pages that the next checkpoint must
/// write. A node that another map shares is copied.
fn node_mut<'a>(node: &'a mut Option<Arc<Node>>, tally: &mut Tally) -> &'a mut Node {
    let is_new = node.is_none();
    let node = node.get_or_insert_default();
    // Another map may share the node.
    let is_shared = Arc::get_mut(node).is_none();
    let is_news = is_new || is_shared || !node.is_dirty(tally.round);
    tally.dirtied += 2 * u64::from(is_news);
    let node = Arc::make_mut(node);
    node.soil(tally.round);
    node
}

/// Accounts for an overwritten block: it is no longer live if only this map had it, and unknown
/// otherwise.
fn retire(page: &Page, at: usize, tally: &mut Tally) {
    let entry = &page.entries()[at];
    if page.is_fresh(at) {
        tally.died(entry);
        tally.owned -= 1;
    } else if !entry.is_hole() && !entry.is_lost() {
        tally.unknown(entry.stored_bytes().into());
    }
}

/// The block map of a volume or snapshot.
pub struct Map {
    spans: Box<[SleepLock<Span, { ranks::SPAN }>]>,
    /// All nodes, cached since a caller asked for them and none has changed.
    whole: SleepLock<Option<Arc<Frozen>>, { ranks::SPAN }>,
}

/// A map at one moment: nodes that no longer change.
pub type Frozen = Vec<Option<Arc<Node>>>;

impl Map {
    /// Makes a map of these nodes, last copied when `copied` copies had been made.
    pub fn new(nodes: Frozen, copied: u32) -> Map {
        let span = |node| SleepLock::new(Span { node, copied, ..Span::default() });
        Map { spans: nodes.into_iter().map(span).collect(), whole: SleepLock::new(None) }
    }

    /// The nodes for a copy of the map. From now on no existing page belongs to this map alone.
    pub fn share(&self, copies: u32) -> Frozen {
        let share = |span: &mut Span| {
            span.copied = copies;
            span.node.clone()
        };
        self.spans.iter().map(|span| span.with(share)).collect()
    }

    /// The number of copies of maps that had been made when this map was last copied.
    pub fn copied(&self) -> u32 {
        self.spans.first().map_or(0, |span| span.with(|span| span.copied))
    }

    /// The blocks that only this map has, as far as is known.
    pub(crate) fn owned(&self) -> u64 {
        self.spans.iter().map(|span| span.with(|span| span.owned())).sum()
    }

    /// Number of spans.
    pub fn span_count(&self) -> usize {
        self.spans.len()
    }

    /// The span of a block, and the block's number in it.
    #[inline]
    pub fn place(block: u64) -> (usize, u32) {
        ((block / NODE_BLOCKS) as usize, (block % NODE_BLOCKS) as u32)
    }

    /// Number of leaves.
    pub(crate) fn leaf_count(&self) -> u64 {
        let count = |span: &mut Span| span.node.as_ref().map_or(0, |node| node.count());
        self.spans.iter().map(|span| span.with(count)).sum()
    }

    /// Calls `f` with a span, under its lock.
    ///
    /// # Panics
    /// If there is no such span; callers check bounds.
    #[inline]
    pub fn with<R>(&self, span: usize, f: impl FnOnce(&mut Span) -> R) -> R {
        self.spans[span].with(f)
    }

    /// Calls `f` for each span of a range of blocks, with the span's number, the first block in it
    /// and the block after the last.
    pub fn each_span(first: u64, count: u64, mut f: impl FnMut(usize, u32, u32)) {
        let end = first + count;
        let mut block = first;
        while block < end {
            let (span, from) = Map::place(block);
            let to = NODE_BLOCKS.min(u64::from(from) + end - block) as u32;
            f(span, from, to);
            block += u64::from(to - from);
        }
    }

    /// The tree at this moment. Consistent if no group is published meanwhile, which only the
    /// committer does.
    pub fn freeze(&self) -> Frozen {
        self.spans.iter().map(|span| span.with(|span| span.node.clone())).collect()
    }

    /// The tree of a map that is not written, such as a snapshot's. It is cached until a node is
    /// replaced.
    pub(crate) fn whole(&self) -> Arc<Frozen> {
        let known = self.whole.with(|whole| whole.clone());
        debug_assert!(known.iter().all(|known| is_same(known, &self.freeze())), "it was written");
        known.unwrap_or_else(|| {
            let whole = Arc::new(self.freeze());
            self.whole.with(|known| *known = Some(Arc::clone(&whole)));
            whole
        })
    }

    /// Replaces a node, see [`Span::replace`].
    pub(crate) fn replace(&self, span: usize, node: Arc<Node>) {
        self.with(span, |span| span.replace(node));
        self.whole.with(|whole| *whole = None);
    }
}

/// Whether two maps have the same nodes.
fn is_same(one: &Frozen, other: &Frozen) -> bool {
    let same = |(one, other): (&Option<Arc<Node>>, &Option<Arc<Node>>)| match (one, other) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        (one, other) => one.is_none() && other.is_none(),
    };
    one.len() == other.len() && one.iter().zip(other).all(same)
}

impl fmt::Debug for Map {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Map({} spans)", self.spans.len())
    }
}

/// The new contents of a range.
#[derive(Clone, Debug)]
pub enum What {
    /// Data of a write, from its block `index` on.
    Data {
        /// The contents of the write.
        payload: Arc<Payload>,
        /// The block of the write at which the range begins.
        index: u32,
    },
    /// Zeros.
    Zero,
}

impl What {
    /// The contents of the rest of the range, `blocks` further on.
    pub(crate) fn from(&self, blocks: u32) -> What {
        match self {
            What::Data { payload, index } => {
                What::Data { payload: Arc::clone(payload), index: index + blocks }
            }
            What::Zero => What::Zero,
        }
    }
}

#[derive(Clone, Debug)]
struct Range {
    end: u32,
    serial: u64,
    what: What,
    may_fail: bool,
}

/// The pending contents of a block or range.
#[derive(Clone, Debug)]
pub struct Coming {
    /// The number of the write.
    pub serial: u64,
    /// The new contents.
    pub what: What,
    /// The write is not answered yet, and may still be refused for lack of space.
    pub may_fail: bool,
}

/// Pending writes: ranges of blocks that are not in the log yet, by their first block, each with
/// the number of its write. Ranges do not overlap: a later write replaces what it covers of earlier
/// ones.
#[derive(Clone, Debug, Default)]
pub struct Pending(BTreeMap<u32, Range>);

impl Pending {
    /// Whether no write is pending.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The pending contents of a block, if there are any.
    pub fn at(&self, block: u32) -> Option<Coming> {
        let (first, range) = self.0.range(..=block).next_back()?;
        let Range { end, serial, may_fail, .. } = *range;
        (block < end).then(|| Coming { serial, what: range.what.from(block - first), may_fail })
    }

    /// Adds a range.
    pub fn insert(&mut self, first: u32, end: u32, coming: Coming) {
        self.remove(first, end);
        let Coming { serial, what, may_fail } = coming;
        self.0.insert(first, Range { end, serial, what, may_fail });
    }

    /// Removes everything in a range.
    fn remove(&mut self, first: u32, end: u32) {
        // The range that begins before `first` may reach into this one, or beyond it.
        if let Some((&at, range)) = self.0.range_mut(..first).next_back()
            && range.end > first
        {
            let behind = (range.end > end).then(|| Range {
                end: range.end,
                serial: range.serial,
                what: range.what.from(end - at),
                may_fail: range.may_fail,
            });
            range.end = first;
            if let Some(behind) = behind {
                self.0.insert(end, behind);
            }
        }
        while let Some((&at, _)) = self.0.range(first..end).next() {
            let range = self.0.remove(&at).expect("it has just been found");
            if range.end > end {
                let what = range.what.from(end - at);
                self.0.insert(end, Range { what, ..range });
            }
        }
    }

    /// Makes blocks of a write visible again, after a write that had replaced them was refused.
    /// Blocks of later writes stay.
    pub fn restore(&mut self, first: u32, end: u32, coming: &Coming) {
        for block in first..end {
            if self.at(block).is_none_or(|it| it.serial < coming.serial) {
                let what = coming.what.from(block - first);
                self.insert(block, block + 1, Coming { what, ..*coming });
            }
        }
    }

    /// Removes what is left of a write.
    pub fn retire(&mut self, first: u32, end: u32, serial: u64) {
        let mut from = first;
        // All pieces of a write are inside its range.
        while from < end
            && let Some((&at, range)) = self.0.range(from..end).next()
        {
            from = range.end;
            if range.serial == serial {
                self.0.remove(&at);
            }
        }
    }
}

/// Changes of the live counts of segments, collected by one thread while maps change.
///
/// A live count is never too small: bytes that may still be needed are counted. Bytes whose state
/// is no longer known, because they were shared or not in memory, are noted as unknown, so that a
/// liveness scan can correct the count.
#[derive(Clone, Debug)]
pub struct Tally {
    segment_bytes: u64,
    /// Number of checkpoints that have begun; a page that first changes in this round is counted.
    pub(crate) round: u64,
    changes: BTreeMap<u32, i64>,
    /// Bytes that become unknown when a leaf is dropped whose entries are not in memory.
    pub(crate) leaf_bytes: u64,
    /// Bytes that are still counted as live, but may not be.
    pub unknown_bytes: u64,
    /// Pages that the next checkpoint must write in addition.
    pub dirtied: u64,
    /// Change of the number of blocks that only the map has.
    pub owned: i64,
}

impl Tally {
    /// No changes, for segments of this length.
    pub fn new(segment_bytes: u32) -> Tally {
        let changes = BTreeMap::new();
        let (segment_bytes, leaf_bytes) = (segment_bytes.into(), 0);
        let (round, unknown_bytes, dirtied, owned) = (0, 0, 0, 0);
        Tally { segment_bytes, round, changes, leaf_bytes, unknown_bytes, dirtied, owned }
    }

    fn change(&mut self, entry: &Entry, sign: i64) {
        if !entry.is_hole() {
            let segment = (entry.address() / self.segment_bytes) as u32;
            *self.changes.entry(segment).or_default() += sign * i64::from(entry.stored_bytes());
        }
    }

    /// Counts bytes that become live.
    pub fn born(&mut self, entry: &Entry) {
        self.change(entry, 1);
    }

    /// Counts bytes that are no longer live.
    pub fn died(&mut self, entry: &Entry) {
        self.change(entry, -1);
    }

    /// Counts bytes that may no longer be live.
    pub fn unknown(&mut self, bytes: u64) {
        self.unknown_bytes = self.unknown_bytes.saturating_add(bytes);
    }

    /// The change of live bytes of each segment.
    pub fn changes(&self) -> impl Iterator<Item = (u32, i64)> {
        self.changes.iter().map(|(segment, bytes)| (*segment, *bytes))
    }
}

/// Leaves examined for eviction when one is added.
const EXAMINED: usize = 8;

/// Least capacity in leaves: a write of parts of two blocks needs the leaves of both.
const LEAVES_MIN: usize = 2;

/// A bounded cache of leaves that are in memory and on disk. Eviction is second chance (CLOCK): a
/// leaf that was used since its last turn stays for another, others are evicted and read again when
/// needed.
///
/// Leaves that changed since the last checkpoint are not in the cache; checkpoints bound their
/// number.
#[derive(Debug)]
pub struct Cache {
    limit: usize,
    /// Leaves in the order in which they are examined.
    ring: Mutex<VecDeque<Weak<Leaf>>>,
}

impl Cache {
    /// A cache of at most this many bytes, or of what one write needs if that is more.
    pub fn new(limit_bytes: u64) -> Cache {
        let limit = usize::try_from(limit_bytes).unwrap_or(usize::MAX) / PAGE_BYTES;
        Cache { limit: limit.max(LEAVES_MIN), ring: Mutex::default() }
    }

    /// Adds a leaf that is on disk and now in memory too.
    pub fn keep(&self, leaf: &Arc<Leaf>) {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.push_back(Arc::downgrade(leaf));
        for _ in 0..EXAMINED {
            if ring.len() <= self.limit {
                return;
            }
            let Some(first) = ring.pop_front() else { return };
            if first.upgrade().is_some_and(|leaf| leaf.evict() == Evicted::Used) {
                ring.push_back(first);
            }
        }
    }

    /// The bound of the cache, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        (self.limit * PAGE_BYTES) as u64
    }

    /// Number of leaves in the cache.
    pub fn count(&self) -> usize {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

#[cfg(test)]
mod tests {
    use blockyard_volume_format::entry::{Codec, Entry};

    use super::*;

    fn entry(number: u64) -> Entry {
        Entry::new(number * 4096, 4096, Codec::Raw, number)
    }

    #[test]
    fn ranges_are_cut_at_spans() {
        let mut parts = Vec::new();
        Map::each_span(NODE_BLOCKS - 2, 5, |span, from, to| parts.push((span, from, to)));
        assert_eq!(parts, [(0, 65_534, 65_536), (1, 0, 3)]);
    }

    fn set(span: &mut Span, block: u32, entry: Entry) -> Tally {
        let mut tally = Tally::new(1 << 20);
        span.set(block, &[entry], 1, &mut tally).unwrap();
        tally
    }

    fn clear(span: &mut Span, from: u32, to: u32) -> Tally {
        let mut tally = Tally::new(1 << 20);
        span.clear(from, to, 1, &mut tally).unwrap();
        tally
    }

    #[test]
    fn a_frozen_map_does_not_change() {
        let map = Map::new(vec![None], 0);
        map.with(0, |span| set(span, 300, entry(1)));
        let frozen = map.freeze();
        map.with(0, |span| set(span, 300, entry(2)));
        map.with(0, |span| set(span, 1, entry(3)));
        let old = frozen[0].as_ref().unwrap();
        assert_eq!(old.leaf(1).unwrap().entry(44), Some(entry(1)));
        assert!(old.leaf(0).is_none());
        assert_eq!(map.with(0, |span| span.entry(300)).unwrap(), entry(2));
    }

    /// Regression: each checkpoint visited every node of every snapshot, while all writes waited.
    #[test]
    fn nodes_of_a_map_that_stays_are_looked_at_once() {
        let map = Map::new(vec![None, None], 0);
        map.with(1, |span| set(span, 300, entry(1)));
        let (whole, again) = (map.whole(), map.whole());
        assert!(Arc::ptr_eq(&whole, &again) && whole[0].is_none() && whole[1].is_some());
        let moved = Arc::new(Node::clone(whole[1].as_ref().unwrap()));
        map.replace(1, Arc::clone(&moved));
        let now = map.whole();
        assert!(Arc::ptr_eq(now[1].as_ref().unwrap(), &moved) && !Arc::ptr_eq(&now, &whole));
    }

    #[test]
    fn clearing_takes_whole_leaves_and_parts() {
        let map = Map::new(vec![None], 0);
        map.with(0, |span| {
            (0..1024).for_each(|block| drop(set(span, block, entry(u64::from(block) + 1))));
            let tally = clear(span, 100, 600);
            let died: i64 = tally.changes().map(|(_, bytes)| bytes).sum();
            assert_eq!((died, tally.unknown_bytes), (-500 * 4096, 0));
            for block in 0..1024 {
                let gone = (100..600).contains(&block);
                assert_eq!(span.entry(block).unwrap().is_hole(), gone, "{block}");
            }
            clear(span, 0, NODE_BLOCKS as u32);
            assert!(span.node.is_none());
        });
    }

    /// An overwritten block that a snapshot shares stays in the live count; one written after the
    /// snapshot does not.
    #[test]
    fn blocks_that_snapshots_may_share_stay_live() {
        let map = Map::new(vec![None], 0);
        map.with(0, |span| set(span, 5, entry(1)));
        let snapshot = Map::new(map.share(1), 1);
        let write = |map: &Map, number: u64| {
            let mut tally = Tally::new(1 << 20);
            map.with(0, |span| span.set(5, &[entry(number)], 2, &mut tally)).unwrap();
            tally.changes().map(|(_, bytes)| bytes).sum::<i64>()
        };
        assert_eq!((write(&map, 2), write(&map, 3)), (4096, 0));
        // A copy of the snapshot owns none of its blocks, even if no other map has them.
        let twin = Map::new(snapshot.share(2), 2);
        drop(snapshot);
        assert_eq!(write(&twin, 4), 4096);
    }

    #[test]
    fn a_page_that_is_not_in_memory_is_requested() {
        let map = Map::new(vec![None], 0);
        let leaf = map.with(0, |span| {
            set(span, 5, entry(1));
            Arc::clone(span.node().unwrap().leaf(0).unwrap())
        });
        leaf.settle(entry(9));
        while leaf.evict() != page::Evicted::Gone {}
        map.with(0, |span| {
            assert!(matches!(span.find(6), Lookup::NotResident(_)) && span.away(0, 300).is_some());
            assert!(span.away(256, 300).is_none());
            let mut tally = Tally::new(1 << 20);
            assert!(span.set(5, &[entry(2)], 1, &mut tally).is_err());
            assert!(span.clear(5, 6, 1, &mut tally).is_err());
            assert_eq!((tally.changes().count(), tally.dirtied), (0, 0));
            tally.leaf_bytes = 256 * 4096;
            assert!(span.clear(0, 300, 1, &mut tally).is_ok());
            assert_eq!(tally.unknown_bytes, 256 * 4096, "all that it may have had");
        });
    }

    /// Regression: if another thread held a leaf while it was changed, its page was counted again
    /// each time, and the reserve for the next checkpoint soon exceeded the pool.
    #[test]
    fn a_page_is_counted_once_until_a_checkpoint() {
        let map = Map::new(vec![None], 0);
        let set = |round| {
            let mut tally = Tally::new(1 << 20);
            tally.round = round;
            map.with(0, |span| span.set(5, &[entry(1)], 1, &mut tally)).unwrap();
            tally.dirtied
        };
        // A leaf, its node, and a root.
        assert_eq!((set(1), set(1)), (3, 0));
        let leaf = map.with(0, |span| Arc::clone(span.node().unwrap().leaf(0).unwrap()));
        assert_eq!(set(1), 0, "a reader holds the leaf");
        drop(leaf);
        assert_eq!((set(2), set(2)), (3, 0), "a checkpoint has begun");
    }

    #[test]
    fn a_write_in_flight_hides_the_durable_block() {
        let map = Map::new(vec![None], 0);
        map.with(0, |span| {
            set(span, 5, entry(1));
            let serial = span.begin(4, 6, What::Zero, false);
            assert!(matches!(span.find(5), Lookup::Cleared { .. }));
            clear(span, 4, 6);
            span.retire(4, 6, serial);
            assert!(matches!(span.find(5), Lookup::Zero) && span.is_settled());
        });
    }

    /// Compares the ranges with a table that has a cell for each block.
    #[test]
    fn ranges_are_what_a_table_says() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..200 {
            let mut pending = Pending::default();
            let mut table = [0u64; 40];
            let mut writes = Vec::new();
            for serial in 1..60 {
                let first = random.u32(0..40);
                let end = random.u32(first + 1..=40);
                if random.u8(..) < 100 && !writes.is_empty() {
                    let (first, end, serial) = writes.swap_remove(random.usize(..writes.len()));
                    pending.retire(first, end, serial);
                    table.iter_mut().filter(|it| **it == serial).for_each(|it| *it = 0);
                } else {
                    let coming = Coming { serial, what: What::Zero, may_fail: false };
                    pending.insert(first, end, coming);
                    table[first as usize..end as usize].fill(serial);
                    writes.push((first, end, serial));
                }
                for block in 0..40 {
                    let found = pending.at(block).map_or(0, |coming| coming.serial);
                    assert_eq!(found, table[block as usize], "block {block}");
                }
            }
            for (first, end, serial) in writes {
                pending.retire(first, end, serial);
            }
            assert!(pending.is_empty());
        }
    }

    #[test]
    fn the_least_recently_used_page_is_evicted_first() {
        let cache = Cache::new(4 * PAGE_BYTES as u64);
        let leaf = |number: u64| {
            let leaf = Leaf::at(Entry::new(number * 4096, 4096, Codec::Raw, 1), 1);
            leaf.fill(&Arc::default());
            Arc::new(leaf)
        };
        let leaves: Vec<_> = (0..20).map(leaf).collect();
        for leaf in &leaves {
            cache.keep(leaf);
            leaves[2].page();
        }
        let here = || leaves.iter().filter(|leaf| leaf.is_resident()).count();
        assert!(here() <= 5 && leaves[2].is_resident(), "{}", here());
        assert!(cache.count() <= 4 + 1);
    }
}
