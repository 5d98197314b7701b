//! How durable the log is, and how it becomes so.
//!
//! ```text
//!               complete_oldest                sync_segments           state_durable
//!   InFlight ─────────────────────▸ Unsynced ─────────────▸ Durable ────────────────▸ Recorded
//!     ▴  │  complete_oldest, of a durable group               ▴                          │
//!     │  └────────────────────────────────────────────────────┘                          │
//!     └─────────────────────────────── append, from any state ───────────────────────────┘
//! ```
//!
//! A group's header states up to which group the log was durable when that header was written. So
//! no header states it of the last groups until another one follows, and recovery could not
//! distinguish rot in them from a write that a power cut has torn. When the log is idle, an empty
//! group after them states it. If no segment has space for that group, a superblock states it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use blockyard_core::Status;
use blockyard_store::{Durability, SegmentStore, StoreFile};

use super::{Committer, SYNC_DELAY_MAX};
use crate::checkpoint;

/// Time without records after which the log counts as idle. A client that sends its next durable
/// write when it has the answer to the last one leaves gaps a hundred times shorter. A disk that
/// takes 10 ms for a durable write spends at most a tenth of its time on these groups.
pub(super) const QUIET: Duration = Duration::from_millis(100);

/// How durable the log is as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogTail {
    /// A group is in flight.
    InFlight,
    /// Groups are written and not durable.
    Unsynced,
    /// Every group is durable, but neither a later group nor a superblock states it of the last.
    Durable,
    /// It is stated durably that every group is durable: by the last group, which is empty, or by a
    /// superblock.
    Recorded,
}

/// The groups that are written and not durable, and what was stated durably.
pub(super) struct Unsynced {
    /// Segments that contain such groups.
    segments: BTreeSet<u32>,
    bytes: u64,
    /// The last group when it was last stated that all groups are durable.
    recorded: u64,
    /// When such a group was first seen.
    since: Option<Instant>,
}

impl Unsynced {
    /// No groups; it was stated that groups up to `recorded` are durable.
    pub(super) fn new(recorded: u64) -> Unsynced {
        Unsynced { segments: BTreeSet::new(), bytes: 0, recorded, since: None }
    }

    /// Bytes of the groups.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds a group of `len` bytes in this segment.
    pub(super) fn add(&mut self, segment: u32, len: u32) {
        self.segments.insert(segment);
        self.bytes += u64::from(len);
    }

    /// Notes that a durable group in this segment has completed: with it, all groups before it are
    /// durable.
    pub(super) fn end_durable(&mut self, segment: u32) {
        self.segments.remove(&segment);
        self.bytes = 0;
        debug_assert!(self.segments.is_empty(), "I4: a segment is not synced");
    }
}

impl<D: SegmentStore> Committer<D> {
    /// How durable the log is.
    pub(super) fn log_tail(&self) -> LogTail {
        if !self.pipeline.is_empty() {
            LogTail::InFlight
        } else if !self.unsynced.segments.is_empty() {
            LogTail::Unsynced
        } else if self.unsynced.recorded < self.log.last() {
            LogTail::Durable
        } else {
            LogTail::Recorded
        }
    }

    /// Syncs all groups, including those that no client asked to be durable.
    pub fn sync_all(&mut self) {
        self.complete_all();
        if !self.pool.is_latched() {
            self.sync();
        }
        self.unsynced.since = None;
    }

    /// Syncs groups that no client asked to be durable, if they have waited for too long.
    pub(super) fn sync_late(&mut self) {
        if self.unsynced.segments.is_empty() {
            self.unsynced.since = None;
        } else if self.unsynced.since.get_or_insert_with(Instant::now).elapsed() >= SYNC_DELAY_MAX {
            self.sync_all();
        }
    }

    /// Syncs all written groups and returns whether they are durable. A failed sync is never
    /// retried. No group may be in flight.
    pub(super) fn sync(&mut self) -> bool {
        debug_assert!(self.pipeline.is_empty(), "I1: a sync does not cover a group in flight");
        if !self.sync_segments() {
            return false;
        }
        self.log.durable = self.log.last();
        true
    }

    /// Syncs the segments of groups that are written; returns whether that succeeded. A failed sync
    /// is never retried.
    fn sync_segments(&mut self) -> bool {
        while let Some(segment) = self.unsynced.segments.pop_first() {
            let place = self.pool.segments().address(segment, 0);
            let synced = self.pool.segments().place(place).and_then(|(file, _)| file.sync());
            if let Err(error) = synced {
                self.pool.latch(&format!("a sync of the log failed: {error}"));
                return false;
            }
            self.pool.meters().synced();
        }
        self.unsynced.bytes = 0;
        true
    }

    /// Determines what must become durable with the group. Syncs other segments now.
    pub(super) fn durability(&mut self, segment: u32) -> Result<Durability, Status> {
        if !self.group.durable {
            return Ok(Durability::Nothing);
        }
        let own = self.unsynced.segments.remove(&segment);
        if !self.sync_segments() {
            return Err(Status::IoErr);
        }
        if own {
            self.unsynced.segments.insert(segment);
            return Ok(Durability::File);
        }
        Ok(Durability::Itself)
    }

    /// Does the work of an idle log: makes every group durable, and states that durably.
    pub fn finish_idle_log(&mut self) {
        self.sync_all();
        self.state_durable();
    }

    /// States durably that every group is durable. Writes at most one unit, and nothing if it is
    /// already stated.
    pub(super) fn state_durable(&mut self) {
        if self.log_tail() != LogTail::Durable || self.pool.is_latched() {
            return;
        }
        let others = std::mem::take(&mut self.group);
        self.group.durable = true;
        let has_space = self.fits_existing_segments();
        let is_written = has_space && self.append().is_ok() && self.complete_alone().is_ok();
        self.group = others;
        // Only one thread at a time writes superblocks: if one does, a later call tries again.
        let is_busy = self.round.is_running();
        let durable = self.log.last();
        if is_written || (!has_space && !is_busy && checkpoint::state_durable(&self.pool, durable))
        {
            self.unsynced.recorded = self.log.last();
            self.pool.meters().recorded(self.unsynced.recorded);
        }
    }
}
