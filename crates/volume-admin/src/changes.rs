//! Finds the blocks in which one snapshot differs from an older one, by comparing their maps. Pages
//! that both share are skipped, so the cost depends on what changed, not on the size of the volume.

use std::collections::VecDeque;
use std::fmt;
use std::ptr;
use std::sync::Arc;

use blockyard_volume::VolumeError;
use blockyard_volume::map::{Frozen, Leaf, Node, Page};
use blockyard_volume_format::entry::Entry;
use blockyard_volume_format::{FAN, NODE_BLOCKS};

/// Consecutive blocks that differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// The blocks are zeros in the newer snapshot.
    pub(crate) is_hole: bool,
}

/// How often a span is compared again because leaves were replaced on disk before they were read. A
/// page that cannot be read after that is damaged.
const TRIES: usize = 5;

/// Reads what a leaf contains.
pub(crate) type Read<'a> = Box<dyn FnMut(&Leaf) -> Result<Arc<Page>, VolumeError> + Send + 'a>;

/// Freezes the older and the newer map again.
type Freeze<'a> = Box<dyn FnMut() -> (Option<Frozen>, Frozen) + Send + 'a>;

/// Iterates over the runs that differ, in order. It compares one span at a time, so that few runs
/// are held in memory.
pub(crate) struct Changes<'a> {
    read: Read<'a>,
    freeze: Option<Freeze<'a>>,
    old: Option<Frozen>,
    new: Frozen,
    blocks: u64,
    /// The next span to be compared.
    number: usize,
    /// The runs found in the span that was compared last.
    runs: VecDeque<Run>,
}

impl<'a> Changes<'a> {
    /// Compares two maps that were frozen at the same moment. Without an older map, every block
    /// that is not a hole differs. `blocks` is the length of the newer map.
    pub(crate) fn between(
        old: Option<Frozen>,
        new: Frozen,
        blocks: u64,
        read: impl FnMut(&Leaf) -> Result<Arc<Page>, VolumeError> + Send + 'a,
    ) -> Changes<'a> {
        let (read, runs) = (Box::new(read), VecDeque::new());
        Changes { read, freeze: None, old, new, blocks, number: 0, runs }
    }

    /// Freezes the maps again by `freeze` if a page cannot be read. For maps of snapshots, whose
    /// contents never change: cleaning moves their blocks and pages, and other data may then
    /// replace the pages of maps that were frozen before.
    pub(crate) fn freezing_again(
        self,
        freeze: impl FnMut() -> (Option<Frozen>, Frozen) + Send + 'a,
    ) -> Changes<'a> {
        Changes { freeze: Some(Box::new(freeze)), ..self }
    }

    /// Compares a span, again if a page of it was replaced.
    fn span_now(&mut self) -> Result<(), VolumeError> {
        let mut tries = 1;
        loop {
            let compared = self.span();
            let Some(freeze) = &mut self.freeze else { return compared };
            if compared.is_ok() || tries == TRIES {
                return compared;
            }
            (self.old, self.new) = freeze();
            self.runs.clear();
            tries += 1;
        }
    }

    /// Skips the spans before that of the block `start`.
    pub(crate) fn starting_at(self, start: u64) -> Changes<'a> {
        Changes { number: (start / NODE_BLOCKS) as usize, ..self }
    }

    fn span(&mut self) -> Result<(), VolumeError> {
        let first = self.number as u64 * NODE_BLOCKS;
        let take = |frozen: &mut Frozen| frozen.get_mut(self.number).and_then(Option::take);
        let (old, new) = (self.old.as_mut().and_then(take), take(&mut self.new));
        if same(old.as_ref(), new.as_ref()) {
            return Ok(());
        }
        for at in 0..FAN {
            let leaf = |node: &Option<Arc<Node>>| node.as_ref().and_then(|it| it.leaf(at).cloned());
            let (old, new) = (leaf(&old), leaf(&new));
            if !same(old.as_ref(), new.as_ref()) {
                self.leaf(first + (at * FAN) as u64, old.as_deref(), new.as_deref())?;
            }
        }
        Ok(())
    }

    fn leaf(
        &mut self,
        first: u64,
        old: Option<&Leaf>,
        new: Option<&Leaf>,
    ) -> Result<(), VolumeError> {
        let mut page = |leaf: Option<&Leaf>| leaf.map(&mut self.read).transpose();
        let (old, new) = (page(old)?, page(new)?);
        let entry = |page: &Option<Arc<Page>>, at: usize| {
            page.as_ref().map_or(Entry::HOLE, |it| it.entries()[at])
        };
        for (at, block) in (0..FAN).zip(first..self.blocks) {
            let (old, new) = (entry(&old, at), entry(&new, at));
            if old != new {
                self.push(block, new.is_hole());
            }
        }
        Ok(())
    }

    fn push(&mut self, block: u64, is_hole: bool) {
        match self.runs.back_mut() {
            Some(last) if last.first + last.count == block && last.is_hole == is_hole => {
                last.count += 1;
            }
            _ => self.runs.push_back(Run { first: block, count: 1, is_hole }),
        }
    }
}

impl Iterator for Changes<'_> {
    type Item = Result<Run, VolumeError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.runs.is_empty() && self.number < self.new.len() {
            let read = self.span_now();
            self.number += 1;
            if let Err(error) = read {
                return Some(Err(error));
            }
        }
        self.runs.pop_front().map(Ok)
    }
}

impl fmt::Debug for Changes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Changes").field("number", &self.number).finish_non_exhaustive()
    }
}

fn same<T>(old: Option<&Arc<T>>, new: Option<&Arc<T>>) -> bool {
    match (old, new) {
        (Some(old), Some(new)) => ptr::eq(Arc::as_ptr(old), Arc::as_ptr(new)),
        (None, None) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_volume::map::{Map, Tally};
    use blockyard_volume_format::entry::Codec;

    fn put(map: &Map, blocks: std::ops::Range<u64>, number: u64) {
        for block in blocks {
            let (span, at) = Map::place(block);
            let entry = Entry::new((number + 1) * 4096, 4096, Codec::Raw, number);
            let mut tally = Tally::new(1 << 20);
            map.with(span, |span| span.set(at, &[entry], 1, &mut tally)).unwrap();
        }
    }

    /// A page that other data have replaced on disk is found by freezing the maps again; the runs
    /// that were found in the span before are not named twice.
    #[test]
    fn a_span_with_a_page_that_was_replaced_is_compared_again() {
        let map = Map::new(vec![None; 2], 0);
        put(&map, 0..300, 1);
        put(&map, NODE_BLOCKS..NODE_BLOCKS + 5, 1);
        let run = |first, count| Run { first, count, is_hole: false };
        for (broken, wanted) in [(3, true), (TRIES, false)] {
            let (mut reads, mut freezes) = (0, 0);
            // The second leaf of the first span cannot be read this often.
            let read = |leaf: &Leaf| {
                reads += 1;
                match reads % 2 == 0 && reads <= 2 * broken {
                    true => Err(VolumeError::Latched),
                    false => Ok(leaf.page().unwrap()),
                }
            };
            let freeze = || {
                freezes += 1;
                (None, map.freeze())
            };
            let changes = Changes::between(None, map.freeze(), 2 * NODE_BLOCKS, read);
            let found: Result<Vec<Run>, _> = changes.freezing_again(freeze).collect();
            match wanted {
                true => assert_eq!(found.unwrap(), [run(0, 300), run(NODE_BLOCKS, 5)]),
                false => assert!(matches!(found, Err(VolumeError::Latched))),
            }
            assert_eq!(freezes, broken.min(TRIES - 1));
        }
    }

    #[test]
    fn only_what_differs_is_named() {
        let map = Map::new(vec![None; 3], 0);
        put(&map, 0..1000, 1);
        put(&map, NODE_BLOCKS * 2..NODE_BLOCKS * 2 + 10, 1);
        let old = map.freeze();
        let changed = |old: Option<&Frozen>, new: Frozen, blocks| -> Vec<Run> {
            let read = |leaf: &Leaf| Ok(leaf.page().unwrap());
            Changes::between(old.cloned(), new, blocks, read).map(Result::unwrap).collect()
        };
        assert_eq!(changed(Some(&old), map.freeze(), 3 * NODE_BLOCKS), []);
        put(&map, 500..510, 2);
        put(&map, NODE_BLOCKS - 1..NODE_BLOCKS + 2, 2);
        let mut tally = Tally::new(1 << 20);
        map.with(0, |span| span.clear(700, 800, 1, &mut tally)).unwrap();
        map.with(2, |span| span.clear(0, NODE_BLOCKS as u32, 1, &mut tally)).unwrap();
        let new = map.freeze();
        let run = |first, count, is_hole| Run { first, count, is_hole };
        let wanted = [
            run(500, 10, false),
            run(700, 100, true),
            run(NODE_BLOCKS - 1, 1, false),
            run(NODE_BLOCKS, 2, false),
            run(2 * NODE_BLOCKS, 4, true),
        ];
        assert_eq!(changed(Some(&old), new.clone(), 2 * NODE_BLOCKS + 4), wanted);
        let wanted = [
            run(0, 700, false),
            run(800, 200, false),
            run(NODE_BLOCKS - 1, 1, false),
            run(NODE_BLOCKS, 2, false),
        ];
        assert_eq!(changed(None, new, 3 * NODE_BLOCKS), wanted);
    }
}
