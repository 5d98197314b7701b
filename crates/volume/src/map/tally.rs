//! What becomes of the bytes of segments while maps change: of each how many more or fewer count.
//!
//! A count is never too small: what may still be needed counts. What is not known any more, because
//! it was shared or not in memory, is noted, so that somebody counts again.

use std::collections::BTreeMap;

use crate::format::entry::Entry;

/// See the module.
#[derive(Clone, Debug)]
pub struct Tally {
    segment_bytes: u64,
    /// How many checkpoints have begun: a page that was changed since the last one is counted.
    pub(crate) round: u64,
    changes: BTreeMap<u32, i64>,
    /// Bytes that may not count any more when a leaf goes whose blocks nobody knows.
    pub(crate) leaf_bytes: u64,
    /// Bytes that may not count any more, and are counted.
    pub unknown_bytes: u64,
    /// Pages that the next checkpoint has to write and had not before.
    pub dirtied: u64,
    /// How many blocks more, or fewer, are the map's alone.
    pub owned: i64,
}

impl Tally {
    /// Nothing, in segments of this length.
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

    /// Something is there that counts.
    pub fn born(&mut self, entry: &Entry) {
        self.change(entry, 1);
    }

    /// Something does not count any more.
    pub fn died(&mut self, entry: &Entry) {
        self.change(entry, -1);
    }

    /// Something may not count any more.
    pub fn unknown(&mut self, bytes: u64) {
        self.unknown_bytes = self.unknown_bytes.saturating_add(bytes);
    }

    /// Of each segment how many bytes more, or fewer, count.
    pub fn changes(&self) -> impl Iterator<Item = (u32, i64)> {
        self.changes.iter().map(|(segment, bytes)| (*segment, *bytes))
    }
}
