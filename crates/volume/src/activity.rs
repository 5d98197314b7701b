//! What a pool has done since it was opened, and how much space it has: for metrics and for people.

use blockyard_sync::counter::{Counter, Histogram};

use crate::error::VolumeError;
use crate::pool::Pool;
use crate::record::{Body, Record};
use crate::running::Running;
use crate::segments::RESERVE;
use crate::store::Directory;
use crate::store::mirror::CopyStatus;

/// What the committer counts, alone.
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
    /// Counted by whoever makes the checkpoint: one at a time does.
    page_bytes: Counter,
    /// The same of cleaning.
    cold_bytes: Counter,
    cleaned: Counter,
    /// The committer's.
    waits: Counter,
    searches: Counter,
}

impl Meters {
    /// A group is in the log, so long with its head.
    pub(crate) fn landed(&self, records: &[Record], number: u64, len: u32, synced: bool) {
        self.groups.add(1);
        self.group_sizes.add(len.into(), 1);
        self.log_bytes.add(len.into());
        self.number.add(number.saturating_sub(self.number.get()));
        self.syncs.add(synced.into());
        for record in records {
            match (&record.body, &record.volume) {
                (Body::Write(payload), Some(volume)) => {
                    let block = u64::from(volume.traits.block_bytes);
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

    /// It was recorded that groups up to this one are durable.
    pub(crate) fn recorded(&self, number: u64) {
        self.recorded.add(number.saturating_sub(self.recorded.get()));
    }

    /// So many bytes of log were found behind the checkpoint.
    pub(crate) fn recovered(&self, bytes: u64) {
        self.recovered_bytes.add(bytes);
    }

    /// So many bytes of pages of maps and of the catalogue were written.
    pub(crate) fn paged(&self, bytes: u64) {
        self.page_bytes.add(bytes);
    }

    /// So many bytes were written elsewhere by cleaning, with their heads.
    pub(crate) fn cooled(&self, bytes: u64) {
        self.cold_bytes.add(bytes);
    }

    /// So many segments were emptied, and are free.
    pub(crate) fn cleaned(&self, count: usize) {
        self.cleaned.add(count as u64);
    }

    /// Writes wait for cleaning.
    pub(crate) fn held_back(&self) {
        self.waits.add(1);
    }

    /// Space is looked for, because somebody has found none.
    pub(crate) fn searched(&self) {
        self.searches.add(1);
    }

    /// A file was synced for itself.
    pub(crate) fn synced(&self) {
        self.syncs.add(1);
    }

    /// A checkpoint was begun.
    pub(crate) fn checkpointed(&self) {
        self.checkpoints.add(1);
    }
}

/// What a pool has done since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// Groups in the log.
    pub groups: u64,
    /// How many of them are how long: by the buckets of [`blockyard_sync::counter`].
    pub group_sizes: Vec<u64>,
    /// Bytes of groups, with their heads.
    pub log_bytes: u64,
    /// Bytes of blocks that were written, before compression.
    pub data_bytes: u64,
    /// The same as they were stored.
    pub stored_bytes: u64,
    /// Bytes that cleaning has written again, as they are stored.
    pub moved_bytes: u64,
    /// Syncs of the log, those included that were part of a write.
    pub syncs: u64,
    /// Checkpoints that were begun.
    pub checkpoints: u64,
    /// The number of the last group: the position of the log.
    pub number: u64,
    /// The last group when the log has recorded that every group is durable.
    pub recorded: u64,
    /// Bytes of groups that opening it has found behind the last checkpoint.
    pub recovered_bytes: u64,
    /// Bytes of pages of maps and of the catalogue that checkpoints have written.
    pub page_bytes: u64,
    /// Bytes that cleaning has written elsewhere, with their heads.
    pub cold_bytes: u64,
    /// Segments that cleaning has emptied.
    pub cleaned: u64,
    /// How often writes have waited for their part of cleaning.
    pub waits: u64,
    /// How often space was looked for, because somebody has found none.
    pub searches: u64,
}

/// A pool, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolStatus {
    /// Length of a segment in bytes.
    pub segment_bytes: u64,
    /// Segments.
    pub segments: u64,
    /// Segments that are free, those included that will be after the next checkpoint.
    pub segments_free: u64,
    /// Segments that only checkpoints and cleaning may have.
    pub segments_reserved: u64,
    /// What is free where the pool is, in bytes: there it grows.
    pub outside_free_bytes: u64,
    /// Bytes of blocks that count, and of pages of maps, twice.
    pub used_bytes: u64,
    /// Bytes that may be written beside these, with those for which the pool can grow: reserves are
    /// not among them.
    pub available_bytes: u64,
    /// Volumes and snapshots.
    pub volumes: u64,
    /// Nothing is written any more, because a write or a sync has failed.
    pub poisoned: bool,
    /// Where it has two copies, how they are.
    pub copies: Vec<CopyStatus>,
    /// What it has done since it was opened.
    pub activity: Activity,
}

impl<D: Directory> Pool<D> {
    /// What it has done since it was opened.
    pub fn activity(&self) -> Activity {
        let meters = self.meters();
        Activity {
            groups: meters.groups.get(),
            group_sizes: meters.group_sizes.counts().collect(),
            log_bytes: meters.log_bytes.get(),
            data_bytes: meters.data_bytes.get(),
            stored_bytes: meters.stored_bytes.get(),
            moved_bytes: meters.moved_bytes.get(),
            syncs: meters.syncs.get(),
            checkpoints: meters.checkpoints.get(),
            number: meters.number.get(),
            recorded: meters.recorded.get(),
            recovered_bytes: meters.recovered_bytes.get(),
            page_bytes: meters.page_bytes.get(),
            cold_bytes: meters.cold_bytes.get(),
            cleaned: meters.cleaned.get(),
            waits: meters.waits.get(),
            searches: meters.searches.get(),
        }
    }
}

impl Running {
    /// How it is.
    ///
    /// # Errors
    /// If the system does not say how much space there is.
    pub fn status(&self) -> Result<PoolStatus, VolumeError> {
        let pool = self.pool();
        let counts = pool.counts();
        let (used_bytes, available_bytes) = pool.segments().used_and_left_bytes();
        Ok(PoolStatus {
            segment_bytes: pool.segments().bytes().into(),
            segments: (counts.all - counts.hollow) as u64,
            segments_free: (counts.free + counts.idle) as u64,
            segments_reserved: RESERVE as u64,
            outside_free_bytes: pool.segments().directory().free_bytes()?,
            used_bytes,
            available_bytes,
            volumes: pool.list().len() as u64,
            poisoned: pool.is_poisoned(),
            copies: pool.segments().directory().status(),
            activity: pool.activity(),
        })
    }
}
