//! The map of a volume: where each block is. A radix of pages, cut into spans with a lock each.
//!
//! A span is a node of the map and what is not in the log yet: 65,536 blocks, a GiB of 16 KiB
//! blocks. Its lock is held to look blocks up and to put new ones in, never while anything is read
//! or written. Whoever writes puts its blocks among the *pending* ones and its record into the
//! committer's mailbox under one lock, so that both have one order; the committer puts into the
//! tree what is in the log, in the log's order. So the tree is always what a recovery would find.

pub mod page;
pub mod pending;

use std::fmt;
use std::sync::Arc;

use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;

pub use page::{Leaf, Node};
pub use pending::{Pending, What};

use crate::format::entry::Entry;
use crate::format::{FAN, NODE_BLOCKS};
use crate::record::Payload;

/// What is known of a block.
#[derive(Clone, Debug)]
pub enum Found {
    /// It is zeros.
    Zero,
    /// It is on its way into the log: block `index` of what was written.
    Memory {
        /// The write.
        payload: Arc<Payload>,
        /// The block's place in it.
        index: u32,
        /// The write's number in the span.
        serial: u64,
    },
    /// It is zeros that are on their way into the log.
    Cleared {
        /// Their number in the span.
        serial: u64,
    },
    /// It is there.
    Disk(Entry),
}

impl Found {
    /// Whether two looks have found the same contents, written by the same write.
    pub fn is_same(&self, other: &Found) -> bool {
        match (self, other) {
            (Found::Zero, Found::Zero) => true,
            (Found::Memory { serial: a, .. }, Found::Memory { serial: b, .. })
            | (Found::Cleared { serial: a }, Found::Cleared { serial: b }) => a == b,
            (Found::Disk(a), Found::Disk(b)) => a == b,
            _ => false,
        }
    }
}

/// A span: see the module. Blocks are counted from its beginning.
#[derive(Debug, Default)]
pub struct Span {
    node: Option<Arc<Node>>,
    pending: Pending,
    /// The number of the last write.
    serial: u64,
}

impl Span {
    /// What is known of a block.
    pub fn find(&self, block: u32) -> Found {
        match self.pending.at(block) {
            Some((serial, What::Zero)) => Found::Cleared { serial },
            Some((serial, What::Data { payload, index })) => {
                Found::Memory { payload: Arc::clone(&payload), index, serial }
            }
            None => match self.entry(block) {
                Entry::HOLE => Found::Zero,
                entry => Found::Disk(entry),
            },
        }
    }

    /// Where a block is that is in the log.
    pub fn entry(&self, block: u32) -> Entry {
        let leaf = self.node.as_ref().and_then(|node| node.leaf(block as usize / FAN));
        leaf.map_or(Entry::HOLE, |leaf| leaf.entries()[block as usize % FAN])
    }

    /// Puts blocks in that are on their way into the log; answers their number.
    pub fn begin(&mut self, first: u32, end: u32, what: What) -> u64 {
        self.serial += 1;
        self.pending.insert(first, end, self.serial, what);
        self.serial
    }

    /// Blocks of this number are not on their way any more.
    pub fn retire(&mut self, first: u32, end: u32, serial: u64) {
        self.pending.retire(first, end, serial);
    }

    /// A block is in the log.
    pub fn set(&mut self, block: u32, entry: Entry) {
        let node = Arc::make_mut(self.node.get_or_insert_default());
        node.leaf_mut(block as usize / FAN).set(block as usize % FAN, entry);
    }

    /// Blocks are zeros in the log.
    pub fn clear(&mut self, first: u32, end: u32) {
        let Some(node) = &mut self.node else { return };
        if first == 0 && u64::from(end) == NODE_BLOCKS {
            self.node = None;
            return;
        }
        let node = Arc::make_mut(node);
        let mut block = first as usize;
        while block < end as usize {
            let (leaf, from) = (block / FAN, block % FAN);
            let to = FAN.min(from + end as usize - block);
            if from == 0 && to == FAN {
                node.remove(leaf);
            } else if node.leaf(leaf).is_some() {
                let leaf = node.leaf_mut(leaf);
                (from..to).for_each(|at| leaf.set(at, Entry::HOLE));
            }
            block += to - from;
        }
    }

    /// The node of its tree.
    pub(crate) fn node(&self) -> Option<&Arc<Node>> {
        self.node.as_ref()
    }

    /// Puts another node in the place of its own, with the same contents elsewhere on disk.
    pub(crate) fn replace(&mut self, node: Arc<Node>) {
        self.node = Some(node);
    }

    /// Whether anything is on its way.
    pub fn is_settled(&self) -> bool {
        self.pending.is_empty()
    }
}

/// A map.
pub struct Map {
    spans: Box<[SleepLock<Span, { ranks::SPAN }>]>,
}

/// A map as it is at one moment: nodes that nobody changes any more.
pub type Frozen = Vec<Option<Arc<Node>>>;

impl Map {
    /// A map with these nodes.
    pub fn new(nodes: Frozen) -> Map {
        let span = |node| SleepLock::new(Span { node, ..Span::default() });
        Map { spans: nodes.into_iter().map(span).collect() }
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

    /// Works on a span under its lock.
    ///
    /// # Panics
    /// If there is no such span: bounds were checked before.
    #[inline]
    pub fn with<R>(&self, span: usize, f: impl FnOnce(&mut Span) -> R) -> R {
        self.spans[span].with(f)
    }

    /// Works on the parts of a range, span by span: the span, and the first block and the one
    /// behind the last one in it.
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

    /// The tree as it is. Consistent where nobody publishes meanwhile, which the committer alone
    /// does.
    pub fn freeze(&self) -> Frozen {
        self.spans.iter().map(|span| span.with(|span| span.node.clone())).collect()
    }
}

impl fmt::Debug for Map {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Map({} spans)", self.spans.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::entry::Codec;

    fn entry(number: u64) -> Entry {
        Entry::new(number * 4096, 4096, Codec::Raw, number)
    }

    #[test]
    fn ranges_are_cut_at_spans() {
        let mut parts = Vec::new();
        Map::each_span(NODE_BLOCKS - 2, 5, |span, from, to| parts.push((span, from, to)));
        assert_eq!(parts, [(0, 65_534, 65_536), (1, 0, 3)]);
    }

    #[test]
    fn a_frozen_map_does_not_change() {
        let map = Map::new(vec![None]);
        map.with(0, |span| span.set(300, entry(1)));
        let frozen = map.freeze();
        map.with(0, |span| span.set(300, entry(2)));
        map.with(0, |span| span.set(1, entry(3)));
        let old = frozen[0].as_ref().unwrap();
        assert_eq!(old.leaf(1).unwrap().entries()[44], entry(1));
        assert!(old.leaf(0).is_none());
        assert_eq!(map.with(0, |span| span.entry(300)), entry(2));
    }

    #[test]
    fn clearing_takes_whole_leaves_and_parts() {
        let map = Map::new(vec![None]);
        map.with(0, |span| {
            (0..1024).for_each(|block| span.set(block, entry(u64::from(block) + 1)));
            span.clear(100, 600);
            for block in 0..1024 {
                let gone = (100..600).contains(&block);
                assert_eq!(span.entry(block).is_hole(), gone, "{block}");
            }
            span.clear(0, NODE_BLOCKS as u32);
            assert!(span.node.is_none());
        });
    }

    #[test]
    fn what_is_on_its_way_hides_what_is_there() {
        let map = Map::new(vec![None]);
        map.with(0, |span| {
            span.set(5, entry(1));
            let serial = span.begin(4, 6, What::Zero);
            assert!(matches!(span.find(5), Found::Cleared { .. }));
            span.clear(4, 6);
            span.retire(4, 6, serial);
            assert!(matches!(span.find(5), Found::Zero) && span.is_settled());
        });
    }
}
