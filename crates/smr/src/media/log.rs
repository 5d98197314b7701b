//! The writer of journal and tables: zones as they are durable, or on their way to be.

use std::io;
use std::sync::Arc;

use super::journal::{RECORD_BYTES, Record};
use super::store::StoreFile;
use super::tables;
use super::word::Id;

/// A place in the log: what was noted before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    checkpoint: u64,
    next: u32,
}

/// Journal and tables of an open disk.
///
/// Invariants:
/// 1. `image` is the table of `checkpoint` with the records below `next` applied.
/// 2. Records below `durable` are durable, and so is the table of `checkpoint`.
/// 3. A record is written only when the data that it counts as written are durable, and data that a
///    record gives up are given up only when it is durable.
#[derive(Debug)]
pub(crate) struct Log<F> {
    pub(crate) journal: Arc<F>,
    pub(crate) tables: F,
    pub(crate) id: Id,
    /// Length of a slot of the tables.
    pub(crate) slot_bytes: u64,
    pub(crate) image: Vec<u64>,
    pub(crate) checkpoint: u64,
    /// Place of the next record.
    pub(crate) next: u32,
    pub(crate) durable: u32,
    /// Places in the journal.
    pub(crate) room: u32,
}

impl<F: StoreFile> Log<F> {
    /// A zone's state, as it is kept or on its way to be.
    pub(crate) fn word(&self, zone: u32) -> u64 {
        self.image[zone as usize]
    }

    /// Notes states of zones; durable by the next sync. Where the journal has no room for them, a
    /// checkpoint takes its place, which is durable at once.
    pub(crate) fn append(&mut self, states: &[(u32, u64)]) -> io::Result<()> {
        if states.is_empty() {
            return Ok(());
        }
        for (zone, word) in states {
            self.image[*zone as usize] = *word;
        }
        if states.len() > (self.room - self.next) as usize {
            return self.checkpoint(false);
        }
        let mut bytes = Vec::with_capacity(states.len() * RECORD_BYTES);
        let first = self.next;
        for (index, (zone, word)) in (first..).zip(states) {
            let (checkpoint, durable) = (self.checkpoint, self.durable);
            let record = Record { index, checkpoint, zone: *zone, durable, word: *word };
            bytes.extend(record.print());
            self.next = index + 1;
        }
        self.journal.write_at(u64::from(first) * RECORD_BYTES as u64, &bytes)
    }

    /// How far the log has come.
    pub(crate) fn place(&self) -> Place {
        Place { checkpoint: self.checkpoint, next: self.next }
    }

    /// Whether everything is durable that was noted before a place.
    pub(crate) fn is_durable(&self, place: Place) -> bool {
        self.checkpoint > place.checkpoint || self.durable >= place.next
    }

    /// The journal was synced after the log had come to a place.
    pub(crate) fn synced(&mut self, place: Place) {
        if self.checkpoint == place.checkpoint {
            self.durable = self.durable.max(place.next);
        }
    }

    /// Writes the full table, durably, and begins the journal anew.
    pub(crate) fn checkpoint(&mut self, clean: bool) -> io::Result<()> {
        let checkpoint = self.checkpoint + 1;
        let bytes = tables::print(&self.id, checkpoint, clean, &self.image);
        self.tables.write_at(checkpoint % 2 * self.slot_bytes, &bytes)?;
        self.tables.sync()?;
        (self.checkpoint, self.next, self.durable) = (checkpoint, 0, 0);
        Ok(())
    }
}
