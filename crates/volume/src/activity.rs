//! Counters of a pool since it was opened, and its space: for metrics and for `show`.

use blockyard_sync::counter::{Counter, Histogram};

use crate::error::VolumeError;
use crate::pool::Pool;
use crate::record::{Body, Record};
use crate::running::Running;
use crate::segments::RESERVE;
use crate::store::Directory;
use crate::store::mirror::CopyStatus;

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
}

impl Meters {
    /// Counts a group that was written to the log. `len` is the length in bytes including the
    /// header; `synced` says whether the group was synced.
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

    /// Notes that the log states all groups up to `number` as durable.
    pub(crate) fn recorded(&self, number: u64) {
        self.recorded.add(number.saturating_sub(self.recorded.get()));
    }

    /// Adds bytes of log that an opening found after the checkpoint.
    pub(crate) fn recovered(&self, bytes: u64) {
        self.recovered_bytes.add(bytes);
    }

    /// Adds bytes of map pages and catalogue pages that a checkpoint wrote.
    pub(crate) fn paged(&self, bytes: u64) {
        self.page_bytes.add(bytes);
    }

    /// Adds bytes that cleaning wrote to cold segments, headers included.
    pub(crate) fn cooled(&self, bytes: u64) {
        self.cold_bytes.add(bytes);
    }

    /// Adds segments that cleaning emptied and freed.
    pub(crate) fn cleaned(&self, count: usize) {
        self.cleaned.add(count as u64);
    }

    /// Counts one time that writes are throttled until cleaning has freed space.
    pub(crate) fn held_back(&self) {
        self.waits.add(1);
    }

    /// Counts one search for space, which starts when a write finds none.
    pub(crate) fn searched(&self) {
        self.searches.add(1);
    }

    /// Counts a sync that was not part of a group's write.
    pub(crate) fn synced(&self) {
        self.syncs.add(1);
    }

    /// Counts a checkpoint that begins.
    pub(crate) fn checkpointed(&self) {
        self.checkpoints.add(1);
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
}

/// The state of a pool, for `show` and metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolStatus {
    /// Length of a segment in bytes.
    pub segment_bytes: u64,
    /// Number of segments, without those that gave their space back to the file system.
    pub segments: u64,
    /// Free segments, including those that the next checkpoint frees.
    pub segments_free: u64,
    /// Segments that only checkpoints and cleaning may take.
    pub segments_reserved: u64,
    /// Free bytes of the file system or disk that holds the pool, into which the pool can grow.
    pub outside_free_bytes: u64,
    /// Bytes of live blocks, plus twice the bytes of map pages.
    pub used_bytes: u64,
    /// Bytes that can still be written, including those for which the pool can grow, without
    /// reserves.
    pub available_bytes: u64,
    /// Number of volumes and snapshots.
    pub volumes: u64,
    /// A write or a sync failed: the pool accepts no more writes (it is latched).
    pub poisoned: bool,
    /// The state of each copy, if the pool has two.
    pub copies: Vec<CopyStatus>,
    /// Counters since the pool was opened.
    pub activity: Activity,
}

impl<D: Directory> Pool<D> {
    /// The counters of this pool since it was opened.
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
    /// The state of this pool.
    ///
    /// # Errors
    /// If the system does not report the free space.
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
