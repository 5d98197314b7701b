//! Counts the live bytes that segments gain and lose while maps change.
//!
//! A live count is never too small: bytes that may still be needed are counted. Bytes whose state
//! is no longer known, because they were shared or not in memory, are noted as unknown, so that a
//! liveness scan can correct the count.

use std::collections::BTreeMap;

use blockyard_volume_format::entry::Entry;

/// Changes of the live counts, collected by one thread.
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
