//! Counters of a pool since it was opened: for metrics and for `show`.

use blockyard_sync::counter::{Counter, Histogram};

use crate::record::{Body, Record};

/// Counters of a pool. Only the committer increments them, except where a field says otherwise.
#[derive(Debug, Default)]
pub(crate) struct Meters {
    groups: Counter,
    group_sizes: Histogram,
    log_bytes: Counter,
    data_bytes: Counter,
    stored_bytes: Counter,
    moved_bytes: Counter,
    syncs: Counter,
    checkpoints: Counter,
    number: Counter,
    recorded: Counter,
    recovered_bytes: Counter,
    /// Incremented by the thread that makes the checkpoint; only one checkpoint runs at a time.
    page_bytes: Counter,
    /// Incremented by the thread that cleans; only one thread cleans at a time.
    cold_bytes: Counter,
    cleaned: Counter,
    /// Incremented by the committer.
    waits: Counter,
    searches: Counter,
    refused: Counter,
}

impl Meters {
    /// Counts a group that was written to the log. `len` is the length in bytes including the
    /// header; `synced` says whether the group was synced.
    pub(crate) fn completed(&self, records: &[Record], number: u64, len: u32, synced: bool) {
        self.groups.add(1);
        self.group_sizes.add(len.into(), 1);
        self.log_bytes.add(len.into());
        self.number.add(number.saturating_sub(self.number.get()));
        self.syncs.add(synced.into());
        for record in records {
            match (&record.body, &record.volume) {
                (Body::Write(payload), Some(volume)) => {
                    let block = u64::from(volume.meta.block_bytes);
                    self.data_bytes.add(payload.blocks().len() as u64 * block);
                    self.stored_bytes.add(payload.bytes().len() as u64);
                }
                (Body::Move(moved), _) => {
                    let bytes = moved.moves.iter().map(|it| u64::from(it.to.stored_bytes()));
                    self.moved_bytes.add(bytes.sum());
                }
                _ => {}
            }
        }
    }

    /// Notes that the log states all groups up to `number` as durable.
    pub(crate) fn recorded(&self, number: u64) {
        self.recorded.add(number.saturating_sub(self.recorded.get()));
    }

    /// Adds bytes of log that an opening found after the checkpoint.
    pub(crate) fn recovered(&self, bytes: u64) {
        self.recovered_bytes.add(bytes);
    }

    /// Adds bytes of map pages and catalogue pages that a checkpoint wrote.
    pub(crate) fn wrote_pages(&self, bytes: u64) {
        self.page_bytes.add(bytes);
    }

    /// Adds bytes that cleaning wrote to cold segments, headers included.
    pub(crate) fn wrote_cold(&self, bytes: u64) {
        self.cold_bytes.add(bytes);
    }

    /// Adds segments that cleaning emptied and freed.
    pub(crate) fn cleaned(&self, count: usize) {
        self.cleaned.add(count as u64);
    }

    /// Counts one time that writes are throttled until cleaning has freed space.
    pub(crate) fn throttled(&self) {
        self.waits.add(1);
    }

    /// Counts one search for space, which starts when a write finds none.
    pub(crate) fn searched(&self) {
        self.searches.add(1);
    }

    /// Counts a write that fails for lack of space.
    pub(crate) fn refused(&self) {
        self.refused.add(1);
    }

    /// Counts a sync that was not part of a group's write.
    pub(crate) fn synced(&self) {
        self.syncs.add(1);
    }

    /// Counts a checkpoint that begins.
    pub(crate) fn checkpointed(&self) {
        self.checkpoints.add(1);
    }

    /// The counters now.
    pub(crate) fn activity(&self) -> Activity {
        Activity {
            groups: self.groups.get(),
            group_sizes: self.group_sizes.counts().collect(),
            log_bytes: self.log_bytes.get(),
            data_bytes: self.data_bytes.get(),
            stored_bytes: self.stored_bytes.get(),
            moved_bytes: self.moved_bytes.get(),
            syncs: self.syncs.get(),
            checkpoints: self.checkpoints.get(),
            number: self.number.get(),
            recorded: self.recorded.get(),
            recovered_bytes: self.recovered_bytes.get(),
            page_bytes: self.page_bytes.get(),
            cold_bytes: self.cold_bytes.get(),
            cleaned: self.cleaned.get(),
            waits: self.waits.get(),
            searches: self.searches.get(),
            refused: self.refused.get(),
        }
    }
}

/// Counters of a pool since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// Groups written to the log.
    pub groups: u64,
    /// Histogram of group lengths in bytes, by the buckets of [`blockyard_sync::counter`].
    pub group_sizes: Vec<u64>,
    /// Bytes of groups, headers included.
    pub log_bytes: u64,
    /// Bytes of blocks that clients wrote, before compression.
    pub data_bytes: u64,
    /// Bytes of blocks that clients wrote, as stored.
    pub stored_bytes: u64,
    /// Bytes of blocks that cleaning moved, as stored.
    pub moved_bytes: u64,
    /// Syncs of the log, including those that were part of a write.
    pub syncs: u64,
    /// Checkpoints begun.
    pub checkpoints: u64,
    /// Number of the last group: the position of the log.
    pub number: u64,
    /// Number of the last group when the log last stated every group as durable.
    pub recorded: u64,
    /// Bytes of groups that the opening found after the last checkpoint.
    pub recovered_bytes: u64,
    /// Bytes of map pages and catalogue pages that checkpoints wrote.
    pub page_bytes: u64,
    /// Bytes that cleaning wrote to cold segments, headers included.
    pub cold_bytes: u64,
    /// Segments that cleaning emptied.
    pub cleaned: u64,
    /// How often writes were throttled until cleaning had freed space.
    pub waits: u64,
    /// How often the pool searched for space because a write had found none.
    pub searches: u64,
    /// Writes that failed for lack of space (ENOSPC).
    pub refused: u64,
}
