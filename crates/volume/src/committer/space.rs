//! Admission: which groups may use the remaining space, and what happens when there is none.
//!
//! Only writes that find no space are refused. Discards, flushes and acknowledged writes use the
//! reserve that writes leave, see [`crate::segments`].

use blockyard_store::SegmentStore;
use blockyard_volume_format::superblock::SEGMENT_NONE;

use super::Committer;
use super::space_waiters::{ENOSPC_BACKOFF_MAX, SEARCH_TRIES_MAX, SpaceFound, UNCHANGED_TRIES_MAX};
use crate::checkpoint;
use crate::clean::Cleaning;
use crate::record::Body;
use crate::segments::AllocationClass;

impl<D: SegmentStore> Committer<D> {
    /// The number of segments that the group takes; `None` if it cannot be placed.
    pub(super) fn segments_taken(&self) -> Option<usize> {
        self.log.takes(self.group.len(self.pool.align()), self.pool.segments())
    }

    /// The allocation class of the group.
    fn class(&self) -> AllocationClass {
        self.group.want.unwrap_or(AllocationClass::Free)
    }

    /// Whether the group may be appended without using space reserved for others. Makes segments if
    /// there are too few.
    pub(super) fn is_admitted(&self) -> bool {
        let (want, pages) = (self.class(), self.group.pages);
        let taken = self.segments_taken();
        taken.is_some_and(|taken| self.pool.segments().may(want, pages, taken))
            && self.affords_writes()
    }

    /// Whether the group may be appended with the segments that exist, without waiting for new
    /// ones.
    pub(super) fn fits_existing_segments(&self) -> bool {
        let (want, pages) = (self.class(), self.group.pages);
        let taken = self.segments_taken();
        taken.is_some_and(|taken| self.pool.segments().has(want, pages, taken))
            && self.affords_writes()
    }

    /// Whether a write leaves enough garbage for cleaning to progress, and other volumes their
    /// reservations. Acknowledged writes were checked before.
    pub(super) fn affords_writes(&self) -> bool {
        if self.group.want != Some(AllocationClass::Write) {
            return true;
        }
        self.pool.affords_writes(&self.group.records, self.group.payload_bytes.into())
    }

    /// Whether a checkpoint will have space for the pages that the group changes, when the group
    /// itself is not written to the log.
    pub(super) fn fits_changed_pages(&self) -> bool {
        // A move has a group of its own. A flush together with a refused change is carried out.
        let moves = self.group.want == Some(AllocationClass::Move);
        !moves || self.pool.segments().has(AllocationClass::Move, self.group.pages, 0)
    }

    /// Finds space for the group, if there is any.
    pub(super) fn find_space(&mut self) -> SpaceFound {
        if self.group.descriptors.is_empty() || self.pool.is_latched() {
            return SpaceFound::Found;
        }
        // Another thread makes the space that writes wait for, if the pool runs threads.
        let may_wait = self.class() == AllocationClass::Write && self.pool.is_running();
        self.group.admitted =
            if may_wait { self.fits_existing_segments() } else { self.is_admitted() };
        if self.group.admitted {
            self.found();
            return SpaceFound::Found;
        }
        // A move is not searched for: after some checkpoints, other data could be at its new
        // places.
        if self.group.want == Some(AllocationClass::Move) {
            return SpaceFound::Found;
        }
        self.complete_all();
        // A log at its end can continue only where a checkpoint says, so no other group could be
        // written meanwhile.
        if may_wait && self.segments_taken().is_some() {
            return self.search();
        }
        self.group.admitted = self.make_space();
        if self.group.admitted || self.group.records.len() == 1 {
            SpaceFound::Found
        } else {
            SpaceFound::None
        }
    }

    /// The number of segments that must be free so that the group is admitted, if only segments are
    /// missing and more can be made.
    pub(super) fn segments_needed(&self) -> Option<usize> {
        let (segments, pages) = (self.pool.segments(), self.group.pages);
        let needed = segments.needed(self.class(), pages, self.segments_taken()?);
        (segments.free() < needed && segments.grows() && self.affords_writes()).then_some(needed)
    }

    /// Splits the group so that each record gets a group of its own, and one without space is
    /// refused alone.
    pub(super) fn split_group(&mut self) {
        // Waiting records that overlap one of these came later.
        self.resume();
        self.intake.add_single(self.group.records.len());
        self.return_records();
    }

    /// Returns the group's records to the intake, before all others.
    pub(super) fn return_records(&mut self) {
        let mut group = std::mem::take(&mut self.group);
        for mut record in group.records.drain(..).rev() {
            // A refused change is checked again.
            record.durable |= matches!(record.body, Body::Catalogue(_));
            self.intake.hold(record);
        }
        group.clear();
        self.group = group;
    }

    /// Makes space for the group on this thread: frees what the last two checkpoints no longer
    /// need, and cleans. If the log is at its end, it continues in a new segment.
    fn make_space(&mut self) -> bool {
        // After a failed search, search only now and then, unless the group must continue.
        self.space.enospc_backoff = self.space.enospc_backoff.saturating_sub(1);
        if self.space.enospc_backoff > 0 && self.class() == AllocationClass::Write {
            return false;
        }
        self.pool.meters().searched();
        self.join();
        self.pool.segments().try_again();
        let (mut unchanged, mut state) = (0, self.pool.segments().progress());
        for tried in 0..SEARCH_TRIES_MAX {
            checkpoint::repeat(&self.pool);
            if self.is_admitted() {
                self.space.enospc_backoff = 0;
                return true;
            }
            let now = self.pool.segments().progress();
            unchanged = if tried > 0 && now == state { unchanged + 1 } else { 0 };
            state = now;
            if unchanged > UNCHANGED_TRIES_MAX {
                break;
            }
            let before = self.log.place;
            let moved = self.take_log_segment();
            if let Some(segment) = moved {
                self.log.place.segment = segment;
                self.log.place.offset = 0;
                self.log.place.next = SEGMENT_NONE;
            }
            // A liveness scan walks all maps, which is worthwhile once; where clients wait for this
            // thread, only if nothing else helped.
            let counts =
                if self.pool.is_running() { unchanged == UNCHANGED_TRIES_MAX } else { tried == 0 };
            let cleaning = Cleaning::Needed { counts };
            if !self.checkpoint_now(cleaning) {
                // Only cleaning after a checkpoint could have written to the new segment, and there
                // was none.
                self.log.place = before;
                moved.inspect(|segment| self.pool.segments().put_back(*segment));
                break;
            }
        }
        checkpoint::repeat(&self.pool);
        let found = self.is_admitted();
        self.space.enospc_backoff = if found { 0 } else { ENOSPC_BACKOFF_MAX };
        found
    }

    /// A segment in which the log continues, if no group names one: only a checkpoint can name it.
    fn take_log_segment(&self) -> Option<u32> {
        let (len, segments) = (self.group.len(self.pool.align()), self.pool.segments());
        let ends = len <= segments.bytes() && !self.log.has_space(len, segments);
        ends.then(|| segments.take(AllocationClass::Move)).flatten()
    }
}
