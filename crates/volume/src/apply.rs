//! Maps as the log changes them: blocks put in, blocks taken out. Pages that are not in memory are
//! read first, with no lock held; and what becomes of the bytes of segments is counted.

use std::sync::Arc;

use crate::error::VolumeError;
use crate::format::entry::Entry;
use crate::format::{FAN, NODE_BLOCKS};
use crate::map::{Away, Leaf, Map, Page, Span, Tally};
use crate::record::Live;
use crate::segments::Segments;
use crate::store::Directory;

/// See the module.
pub(crate) struct Apply<'a, D: Directory> {
    segments: &'a Segments<D>,
    /// Births of leaves that begin now.
    now: u32,
    tally: Tally,
}

impl<'a, D: Directory> Apply<'a, D> {
    /// Changes of maps after so many copies of maps.
    pub(crate) fn new(segments: &'a Segments<D>, copies: u32) -> Apply<'a, D> {
        let now = copies.saturating_add(1);
        let mut tally = Tally::new(segments.bytes());
        tally.round = segments.round();
        segments.begin_changes();
        Apply { segments, now, tally }
    }

    /// The segments that it counts for.
    pub(crate) fn segments(&self) -> &'a Segments<D> {
        self.segments
    }

    /// There have been so many copies by now.
    pub(crate) fn copied(&mut self, copies: u32) {
        self.now = copies.saturating_add(1);
    }

    /// Counts what becomes of segments.
    pub(crate) fn tally(&mut self) -> &mut Tally {
        &mut self.tally
    }

    /// Blocks of one span are in the log.
    ///
    /// # Errors
    /// If a page cannot be read.
    pub(crate) fn write(
        &mut self,
        live: &Live,
        first: u64,
        entries: &[Entry],
    ) -> Result<(), VolumeError> {
        let ((number, from), now) = (Map::place(first), self.now);
        let end = self.span(live, number, |span, tally| span.set(from, entries, now, tally));
        live.gain(std::mem::take(&mut self.tally.owned));
        end
    }

    /// The same of blocks that were on their way by this number, and are not any more.
    ///
    /// # Errors
    /// As [`Apply::write`].
    pub(crate) fn land(
        &mut self,
        live: &Live,
        first: u64,
        entries: &[Entry],
        serial: u64,
    ) -> Result<(), VolumeError> {
        let ((number, from), now) = (Map::place(first), self.now);
        let end = from + entries.len() as u32;
        let put = self.span(live, number, |span, tally| {
            span.set(from, entries, now, tally)?;
            span.retire(from, end, serial);
            Ok(())
        });
        live.gain(std::mem::take(&mut self.tally.owned));
        put
    }

    /// Blocks are zeros in the log.
    ///
    /// # Errors
    /// If a page cannot be read.
    pub(crate) fn zero(&mut self, live: &Live, first: u64, blocks: u64) -> Result<(), VolumeError> {
        let now = self.now;
        // What it is promised again is counted in its blocks. Who asked for it has looked already,
        // unless this is an opening.
        if live.reserved_bytes() > 0 {
            self.segments.count_owned(&live.map, first, blocks);
        }
        self.tally.leaf_bytes = leaf_bytes(live);
        let mut end = Ok(());
        Map::each_span(first, blocks, |number, from, to| {
            if end.is_ok() {
                end = self.span(live, number, |span, tally| span.clear(from, to, now, tally));
            }
        });
        live.gain(std::mem::take(&mut self.tally.owned));
        end
    }

    /// What a volume that is promised something owns was not counted exactly: it is now.
    pub(crate) fn count_owned(&self, live: &Live) {
        self.segments.count_owned(&live.map, 0, live.map.span_count() as u64 * NODE_BLOCKS);
        live.own(live.map.owned());
    }

    /// Nobody needs a map any more, unless others share it.
    pub(crate) fn forget(&mut self, live: &Live) {
        self.tally.unknown(live.map.leaf_count() * leaf_bytes(live));
    }

    fn span(
        &mut self,
        live: &Live,
        number: usize,
        mut change: impl FnMut(&mut Span, &mut Tally) -> Result<(), Away>,
    ) -> Result<(), VolumeError> {
        loop {
            match live.map.with(number, |span| change(span, &mut self.tally)) {
                Ok(()) => return Ok(()),
                Err(Away(leaf)) => {
                    if let Err(error) = self.segments.load(&leaf) {
                        self.lose(live, number, &leaf, error)?;
                    }
                }
            }
        }
    }

    /// A page that has rotted is to be changed: what is in the log has its place there, and the
    /// other blocks that it named are lost.
    fn lose(
        &mut self,
        live: &Live,
        number: usize,
        leaf: &Arc<Leaf>,
        error: VolumeError,
    ) -> Result<(), VolumeError> {
        let home = leaf.home().filter(|_| self.segments.is_lost(&error));
        let Some(home) = home else { return Err(error) };
        let (at, is_own) = live.map.with(number, |span| {
            let mut leaves = span.node().into_iter().flat_map(|node| node.leaves());
            let at = leaves.find(|(_, it)| Arc::ptr_eq(it, leaf)).map(|(at, _)| at);
            (at, span.owns(leaf))
        });
        let (name, first) = (&live.traits.name, first_block(number, at.unwrap_or(0)));
        tracing::error!("{name}: {FAN} blocks from {first} on are lost: {error}");
        let fresh = leaf.fresh_count();
        self.tally.unknown(leaf_bytes(live));
        leaf.fill(&Arc::new(Page::lost(home)));
        // What was its alone is not any more.
        match fresh {
            _ if !is_own => {}
            // How much of what is counted that was nobody knows: an opening has time to look.
            None if live.reserved_bytes() > 0 => {
                self.count_owned(live);
                self.tally.owned = 0;
            }
            fresh => self.tally.owned -= fresh.map_or(FAN as i64, i64::from),
        }
        Ok(())
    }
}

/// The first block of a leaf of a span.
pub(crate) fn first_block(span: usize, leaf: usize) -> u64 {
    span as u64 * NODE_BLOCKS + (leaf * FAN) as u64
}

/// What the blocks of a leaf take at most.
fn leaf_bytes(live: &Live) -> u64 {
    FAN as u64 * u64::from(live.traits.block_bytes)
}

/// What it has counted holds.
impl<D: Directory> Drop for Apply<'_, D> {
    fn drop(&mut self) {
        self.segments.end_changes(&self.tally);
    }
}
