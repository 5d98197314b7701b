//! Applies changes of the log to the maps: inserts blocks and clears them. Reads pages that are not
//! in memory first, without holding a lock, and counts the live data that segments gain and lose.

use std::sync::Arc;

use blockyard_store::SegmentStore;
use blockyard_volume_format::entry::Entry;
use blockyard_volume_format::{FAN, NODE_BLOCKS};

use crate::error::VolumeError;
use crate::map::{Leaf, Map, NotResident, Page, Span, Tally};
use crate::record::OpenVolume;
use crate::segments::Segments;

/// Applies changes of the log to the maps, and counts live data per segment.
pub(crate) struct Apply<'a, D: SegmentStore> {
    segments: &'a Segments<D>,
    /// Birth epoch of leaves that are made from now on.
    now: u32,
    tally: Tally,
}

impl<'a, D: SegmentStore> Apply<'a, D> {
    /// Starts changes of maps when `copies` copies of maps have been made.
    pub(crate) fn new(segments: &'a Segments<D>, copies: u32) -> Apply<'a, D> {
        let now = copies.saturating_add(1);
        let mut tally = Tally::new(segments.bytes());
        tally.round = segments.round();
        segments.begin_changes();
        Apply { segments, now, tally }
    }

    /// The segments whose live data it counts.
    pub(crate) fn segments(&self) -> &'a Segments<D> {
        self.segments
    }

    /// Notes that `copies` copies of maps have been made by now.
    pub(crate) fn copied(&mut self, copies: u32) {
        self.now = copies.saturating_add(1);
    }

    /// The counts of what segments gain and lose.
    pub(crate) fn tally(&mut self) -> &mut Tally {
        &mut self.tally
    }

    /// Enters blocks of one span into a volume's map; the log contains them.
    ///
    /// # Errors
    /// If a page cannot be read.
    pub(crate) fn write(
        &mut self,
        live: &OpenVolume,
        first: u64,
        entries: &[Entry],
    ) -> Result<(), VolumeError> {
        let ((number, from), now) = (Map::place(first), self.now);
        let end = self.span(live, number, |span, tally| span.set(from, entries, now, tally));
        live.gain(std::mem::take(&mut self.tally.owned));
        end
    }

    /// Enters blocks into a volume's map, and retires their pending write `serial`.
    ///
    /// # Errors
    /// As [`Apply::write`].
    pub(crate) fn publish(
        &mut self,
        live: &OpenVolume,
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

    /// Clears blocks in a volume's map; the log states that they are zeros.
    ///
    /// # Errors
    /// If a page cannot be read.
    pub(crate) fn zero(
        &mut self,
        live: &OpenVolume,
        first: u64,
        blocks: u64,
    ) -> Result<(), VolumeError> {
        let now = self.now;
        // Cleared blocks count towards the volume's reservation again, so the number that it owned
        // must be exact. The client's thread has counted them already, except in an opening.
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

    /// Counts exactly the blocks that a volume with a reservation owns, which was an estimate
    /// before.
    pub(crate) fn count_owned(&self, live: &OpenVolume) {
        self.segments.count_owned(&live.map, 0, live.map.span_count() as u64 * NODE_BLOCKS);
        live.own(live.map.owned());
    }

    /// Accounts for a map that is no longer needed: its blocks may be shared, so they become
    /// unknown bytes.
    pub(crate) fn forget(&mut self, live: &OpenVolume) {
        self.tally.unknown(live.map.leaf_count() * leaf_bytes(live));
    }

    fn span(
        &mut self,
        live: &OpenVolume,
        number: usize,
        mut change: impl FnMut(&mut Span, &mut Tally) -> Result<(), NotResident>,
    ) -> Result<(), VolumeError> {
        loop {
            match live.map.with(number, |span| change(span, &mut self.tally)) {
                Ok(()) => return Ok(()),
                Err(NotResident(leaf)) => {
                    if let Err(error) = self.segments.load(&leaf) {
                        self.lose(live, number, &leaf, error)?;
                    }
                }
            }
        }
    }

    /// Replaces a leaf that has rotted and is to be changed: the blocks in the log get their
    /// entries there, and the other blocks of the leaf are lost.
    fn lose(
        &mut self,
        live: &OpenVolume,
        number: usize,
        leaf: &Arc<Leaf>,
        error: VolumeError,
    ) -> Result<(), VolumeError> {
        let location = leaf.location().filter(|_| self.segments.is_lost(&error));
        let Some(location) = location else { return Err(error) };
        let (at, is_own) = live.map.with(number, |span| {
            let mut leaves = span.node().into_iter().flat_map(|node| node.leaves());
            let at = leaves.find(|(_, it)| Arc::ptr_eq(it, leaf)).map(|(at, _)| at);
            (at, span.owns(leaf))
        });
        let (name, first) = (&live.meta.name, first_block(number, at.unwrap_or(0)));
        tracing::error!("{name}: {FAN} blocks from {first} on are lost: {error}");
        let fresh = leaf.fresh_count();
        self.tally.unknown(leaf_bytes(live));
        leaf.fill(&Arc::new(Page::lost(location)));
        // The volume no longer owns the blocks that only it had.
        match fresh {
            _ if !is_own => {}
            // The number of owned blocks in the leaf is unknown. Count all of the volume's: an
            // opening has the time.
            None if live.reserved_bytes() > 0 => {
                self.count_owned(live);
                self.tally.owned = 0;
            }
            fresh => self.tally.owned -= fresh.map_or(FAN as i64, i64::from),
        }
        Ok(())
    }
}

/// The number of the first block of a leaf of a span.
pub(crate) fn first_block(span: usize, leaf: usize) -> u64 {
    span as u64 * NODE_BLOCKS + (leaf * FAN) as u64
}

/// The most bytes that the blocks of a leaf can take.
fn leaf_bytes(live: &OpenVolume) -> u64 {
    FAN as u64 * live.meta.stored_block_max()
}

/// Publishes the counts when the changes end.
impl<D: SegmentStore> Drop for Apply<'_, D> {
    fn drop(&mut self) {
        self.segments.end_changes(&self.tally);
    }
}
