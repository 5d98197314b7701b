//! Writer of the journal and the tables: the durable state of the zones, and pending changes to it.

use std::io;
use std::sync::Arc;

use crate::head::Id;
use crate::journal::{self, JournalRecord, RECORD_BYTES};
use crate::store::StoreFile;
use crate::tables;

/// A position in the log, to ask whether everything before it is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogPosition {
    checkpoint: u64,
    next: u32,
}

/// Journal and tables of an open disk.
///
/// Invariants:
/// 1. `image` is the table of `checkpoint` with the records below `next` applied.
/// 2. Records below `durable` are durable, and so is the table of `checkpoint`.
/// 3. A record is written only when the data that it counts as written are durable. Data that a
///    record gives up are freed only when the record is durable.
#[derive(Debug)]
pub(crate) struct Log<F> {
    pub(crate) journal: Arc<F>,
    pub(crate) tables: F,
    pub(crate) id: Id,
    /// Length of a slot of the tables in bytes.
    pub(crate) slot_bytes: u64,
    pub(crate) image: Vec<u64>,
    pub(crate) checkpoint: u64,
    /// Index of the next record.
    pub(crate) next: u32,
    pub(crate) durable: u32,
    /// Capacity of the journal in records.
    pub(crate) room: u32,
}

impl<F: StoreFile> Log<F> {
    /// The word of a zone, durable or about to be.
    pub(crate) fn word(&self, zone: u32) -> u64 {
        self.image[zone as usize]
    }

    /// Records states of zones; durable after the next sync. If the journal has not enough space,
    /// writes a checkpoint instead, which is durable at once.
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
            let record = JournalRecord { index, checkpoint, zone: *zone, durable, word: *word };
            bytes.extend(record.print());
            self.next = index + 1;
        }
        self.journal.write_at(journal::offset_of(first), &bytes)
    }

    /// The current end of the log.
    pub(crate) fn place(&self) -> LogPosition {
        LogPosition { checkpoint: self.checkpoint, next: self.next }
    }

    /// Whether everything that was recorded before a place is durable.
    pub(crate) fn is_durable(&self, place: LogPosition) -> bool {
        self.checkpoint > place.checkpoint || self.durable >= place.next
    }

    /// Notes that the journal was synced after the log had reached a place.
    pub(crate) fn synced(&mut self, place: LogPosition) {
        if self.checkpoint == place.checkpoint {
            self.durable = self.durable.max(place.next);
        }
    }

    /// Writes the full table durably, and restarts the journal.
    pub(crate) fn checkpoint(&mut self, clean: bool) -> io::Result<()> {
        let checkpoint = self.checkpoint + 1;
        let bytes = tables::print(&self.id, checkpoint, clean, &self.image);
        self.tables.write_at(checkpoint % 2 * self.slot_bytes, &bytes)?;
        self.tables.sync()?;
        (self.checkpoint, self.next, self.durable) = (checkpoint, 0, 0);
        Ok(())
    }
}
