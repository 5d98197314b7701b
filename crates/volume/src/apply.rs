//! Maps as the log changes them: blocks put in, blocks taken out. Pages that are not in memory are
//! read first, with no lock held; and what becomes of the bytes of segments is counted.

use crate::error::VolumeError;
use crate::format::entry::Entry;
use crate::format::{FAN, NODE_BLOCKS};
use crate::map::{Away, Map, Span, Tally};
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
        let end = self.span(&live.map, number, |span, tally| span.set(from, entries, now, tally));
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
        let put = self.span(&live.map, number, |span, tally| {
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
                end = self.span(&live.map, number, |span, tally| span.clear(from, to, now, tally));
            }
        });
        live.gain(std::mem::take(&mut self.tally.owned));
        end
    }

    /// A volume will be promised something: what it owns was not counted exactly.
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
        map: &Map,
        number: usize,
        mut change: impl FnMut(&mut Span, &mut Tally) -> Result<(), Away>,
    ) -> Result<(), VolumeError> {
        loop {
            match map.with(number, |span| change(span, &mut self.tally)) {
                Ok(()) => return Ok(()),
                Err(Away(leaf)) => self.segments.load(&leaf)?,
            };
        }
    }
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
