//! Space: which groups may use what is left, what happens when there is none, and what records wait
//! for.
//!
//! **Admission.** Only writes that find no space are refused. Discards, flushes and acknowledged
//! writes use the reserve that writes leave, see [`crate::segments`].
//!
//! **The search for space.** Writes without space wait while another thread makes segments, or
//! checkpoints and cleans. Flushes, discards and acknowledged writes continue. A record that
//! overlaps a waiting write waits for it. A write of part of a block includes the rest of the block
//! as it was pending then, so writes of one block must keep their order.
//!
//! ```text
//! None ── park ──▸ NewSegments, Round ──┐
//! None ── throttle ──▸ Throttled ───────┴─ resume ──▸ None
//! ```
//!
//! A refused write has no effect. Before the answer its blocks are taken out of memory. Writes that
//! copied the rest of a block from it are refused too, and those that copied from these.
//!
//! **Waiting for a scan.** Catalogue changes that need more space than is known to be free wait for
//! one liveness scan before they are refused, if unknown bytes could cover them. Nothing else
//! waits.
//!
//! **Throttling.** While space is short, writes may use the bytes that cleaning frees, and a little
//! more. Each write waits a little, instead of all for a whole round of cleaning. Writes also wait
//! for a liveness scan that may not be interrupted, if the next checkpoint would become too large
//! meanwhile.

use std::collections::VecDeque;
use std::sync::Arc;

use blockyard_core::Status;
use blockyard_store::SegmentStore;
use blockyard_volume_format::superblock::SEGMENT_NONE;

use super::{Committer, LogBatch, want};
use crate::clean::Cleaning;
use crate::maintenance::{LivenessScan, RoundCommand, Stage};
use crate::pool::Pool;
use crate::record::{Body, Record};
use crate::segments::{AllocationClass, Progress};
use crate::{checkpoint, clean};

/// How often the search continues after a try that changed nothing.
const UNCHANGED_TRIES_MAX: usize = 5;

/// Most checkpoints with cleaning in one search for space.
const SEARCH_TRIES_MAX: usize = 64;

/// After a failed search for space, refuse this number of groups without searching again: a search
/// takes a checkpoint and cleaning.
const ENOSPC_BACKOFF_MAX: u32 = 16;

/// Result of looking for space for a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpaceFound {
    /// There is space, or the group has one record and is to be refused.
    Found,
    /// There is no space: each record is tried alone.
    None,
    /// The group waits for space.
    Later,
}

/// What writes wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum SpaceWait {
    /// They do not wait.
    #[default]
    None,
    /// Another thread makes segments.
    NewSegments,
    /// The checkpoint thread makes a checkpoint and cleans.
    Round,
    /// Cleaning is to free enough bytes: the writes are throttled.
    Throttled,
}

/// The records that wait for space, and the search for it.
#[derive(Default)]
pub(super) struct SpaceWaiters {
    wait: SpaceWait,
    records: VecDeque<Record>,
    /// What they need, if only segments are missing: number of pages, and of segments.
    needs: Option<(u64, usize)>,
    /// A waiting record was answered early, so a flush must wait for it.
    is_owed: bool,
    search: SpaceSearch,
    /// Number of further groups that are refused without a search, because the last search failed.
    pub(super) enospc_backoff: u32,
}

/// A search for space: the tries until space is found, or the search fails.
#[derive(Default)]
struct SpaceSearch {
    /// Making a segment was retried after it had failed.
    is_retried: bool,
    /// Number of tries.
    tried: usize,
    /// Number of tries in a row that changed nothing.
    unchanged: usize,
    before: Option<Progress>,
}

impl SpaceWaiters {
    /// Whether writes wait.
    pub(super) fn is_waiting(&self) -> bool {
        self.wait != SpaceWait::None
    }

    /// Makes writes wait.
    fn begin(&mut self, wait: SpaceWait) {
        self.wait = wait;
    }

    /// Whether no record waits.
    pub(super) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Keeps a record that must wait; returns any other record.
    fn keep<D: SegmentStore>(&mut self, record: Record, pool: &Pool<D>) -> Option<Record> {
        let waits = want(&record, pool) == Some(AllocationClass::Write)
            || self.records.iter().any(|other| overlap(other, &record))
            || self.is_owed && !matches!(record.body, Body::Move(_));
        if !waits {
            return Some(record);
        }
        self.is_owed |= record.reply.is_none();
        self.records.push_back(record);
        None
    }
}

/// Whether two records change a common block of one volume.
fn overlap(one: &Record, other: &Record) -> bool {
    let range = |record: &Record| match &record.body {
        Body::Write(payload) => record.first..record.first + payload.blocks().len() as u64,
        Body::Zero(blocks) => record.first..record.first + u64::from(*blocks),
        _ => 0..0,
    };
    let (a, b) = (range(one), range(other));
    let is_one = match (&one.volume, &other.volume) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        _ => false,
    };
    is_one && a.start < b.end && b.start < a.end
}

// Admission, and the search for space.

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
    fn affords_writes(&self) -> bool {
        if self.group.want != Some(AllocationClass::Write) {
            return true;
        }
        let bytes = self.group.payload_bytes(self.pool.align());
        self.pool.affords_writes(&self.group.records, bytes.into())
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
    fn segments_needed(&self) -> Option<usize> {
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
    fn return_records(&mut self) {
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

impl<D: SegmentStore> Committer<D> {
    /// The next record that need not wait for space.
    pub(super) fn next(&mut self) -> Option<Record> {
        loop {
            let record = self.intake.take()?;
            if self.intake.is_stopping() && !self.scan_waiters.is_empty() {
                // The waiting changes precede the stop.
                self.intake.hold(record);
                self.release_awaiting_scan();
                continue;
            }
            if !self.space.is_waiting() {
                return Some(record);
            }
            if self.intake.is_stopping() {
                // The waiting records precede the stop, and are not kept again.
                self.intake.hold(record);
                self.resume();
            } else if let Some(record) = self.space.keep(record, &self.pool) {
                return Some(record);
            }
        }
    }

    /// Releases the waiting records: either there is space now, or they start another search.
    fn resume(&mut self) {
        (self.space.wait, self.space.is_owed) = (SpaceWait::None, false);
        self.intake.hold_all(self.space.records.drain(..));
    }

    /// Releases the waiting records when their wait is over: segments were made, the checkpoint and
    /// its cleaning ended, or throttling ended.
    pub(super) fn end_wait(&mut self) {
        if !self.space.is_waiting() {
            return;
        }
        self.refuse_leaving();
        let is_over = match self.space.wait {
            SpaceWait::None | SpaceWait::NewSegments => !self.pool.is_preparing(),
            SpaceWait::Throttled => !self.is_throttled(),
            SpaceWait::Round => {
                let segments = self.pool.segments();
                let has = |(pages, taken)| segments.has(AllocationClass::Write, pages, taken);
                !self.round.is_running()
                    || self.pool.maintenance().stage().is_at_rest()
                    || self.space.needs.is_some_and(has)
            }
        };
        if is_over || self.pool.is_latched() {
            self.resume();
        }
    }

    /// Refuses waiting writes of handles that are being closed, because closing waits for them.
    fn refuse_leaving(&mut self) {
        if !self.pool.is_any_leaving() || self.pool.is_latched() {
            return;
        }
        let is_leaving = |pool: &Pool<D>, record: &Record| {
            matches!(record.body, Body::Write(_)) && pool.is_leaving(record)
        };
        if !self.space.records.iter().any(|record| is_leaving(&self.pool, record)) {
            return;
        }
        // After this, groups in flight are in the maps and no longer only in memory.
        self.complete_all();
        if self.pool.is_latched() {
            return;
        }
        let waiting = std::mem::take(&mut self.space.records).into_iter();
        let (mut refused, waiting): (Vec<Record>, Vec<Record>) =
            waiting.partition(|record| is_leaving(&self.pool, record));
        self.space.records = waiting.into();
        self.refuse_copies(&mut refused);
        let mut group = LogBatch { records: refused, ..LogBatch::default() };
        self.answers.answer(&self.pool, &mut group, Status::NoSpc);
        self.answers.wake();
    }

    /// Takes the blocks of refused records out of memory, and adds to these all waiting records
    /// that contain data copied from them. No group in flight may contain such blocks.
    pub(super) fn refuse_copies(&mut self, refused: &mut Vec<Record>) {
        let mut next = 0;
        while let Some(record) = refused.get(next) {
            // This comes first: afterwards no copy can begin, and all existing copies are in the
            // record queue or are held.
            let held = self.intake.held().iter();
            let waiting = self.space.records.iter().chain(held).chain(&self.group.records);
            record.withdraw(waiting);
            self.intake.empty_queue();
            for queue in [&mut self.space.records, self.intake.held()] {
                let all = std::mem::take(queue).into_iter();
                let (copies, others): (Vec<Record>, Vec<Record>) =
                    all.partition(|it| it.is_copy_of(&refused[next]));
                *queue = others.into();
                refused.extend(copies);
            }
            next += 1;
        }
    }

    /// Makes the group wait.
    fn park(&mut self, wait: SpaceWait) -> SpaceFound {
        self.space.begin(wait);
        let taken = self.segments_taken().filter(|_| self.affords_writes());
        self.space.needs = taken.map(|taken| (self.group.pages, taken));
        self.return_records();
        SpaceFound::Later
    }

    /// Notes that the group found space, which ends its search.
    fn found(&mut self) {
        if !self.space.is_waiting() && self.group.want == Some(AllocationClass::Write) {
            self.space.search = SpaceSearch::default();
        }
    }

    /// Starts or continues a search for space for the group. No group is in flight.
    fn search(&mut self) -> SpaceFound {
        let refused =
            if self.group.records.len() == 1 { SpaceFound::Found } else { SpaceFound::None };
        debug_assert!(
            self.space.is_empty() && !self.space.is_waiting(),
            "I6: writes wait for the last search"
        );
        if let Some(needed) = self.segments_needed().filter(|_| !self.intake.is_stopping()) {
            self.pool.prepare(needed);
            if self.pool.is_preparing() {
                return self.park(SpaceWait::NewSegments);
            }
        }
        // After a failed search, search only now and then.
        self.space.enospc_backoff = self.space.enospc_backoff.saturating_sub(1);
        if self.space.enospc_backoff > 0 || self.intake.is_stopping() {
            return refused;
        }
        // The last thread may still exist but be idle.
        if !self.round.is_running() || self.pool.maintenance().stage().is_at_rest() {
            self.join();
            if !self.space.search.is_retried && self.pool.segments().may_try_again() {
                // A thread that failed to make a segment may still exist; it does not try again.
                self.space.search.is_retried = self.pool.try_again();
                if self.pool.is_preparing() {
                    return self.park(SpaceWait::NewSegments);
                }
            }
            checkpoint::repeat(&self.pool);
            self.group.admitted = self.is_admitted();
            if self.group.admitted {
                self.found();
                return SpaceFound::Found;
            }
        }
        let now = self.pool.segments().progress();
        let search = &mut self.space.search;
        search.unchanged =
            if search.before.as_ref() == Some(&now) { search.unchanged + 1 } else { 0 };
        if search.unchanged > UNCHANGED_TRIES_MAX || search.tried >= SEARCH_TRIES_MAX {
            self.space.search = SpaceSearch::default();
            self.space.enospc_backoff = ENOSPC_BACKOFF_MAX;
            // No segment can be made in a directory that was removed, which is not missing space.
            self.pool.latch_if_removed();
            return refused;
        }
        if search.tried == 0 {
            self.pool.meters().searched();
        }
        (search.before, search.tried) = (Some(now), search.tried + 1);
        let found = self.park(SpaceWait::Round);
        if self.round.is_none() {
            self.start_checkpoint();
        }
        found
    }
}

// Records that wait for a liveness scan.

/// Most checkpoints made for one scan: a checkpoint may fail, or the scan may be interrupted.
const SCAN_TRIES_MAX: u32 = 4;

/// Changes of the catalogue that wait for a liveness scan.
#[derive(Default)]
pub(super) struct ScanWaiters {
    records: VecDeque<Record>,
    /// Number of checkpoints that were begun for a scan since one was requested.
    tries: u32,
}

impl ScanWaiters {
    /// Whether no record waits.
    pub(super) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }
}

impl<D: SegmentStore> Committer<D> {
    /// Whether a change must wait for a liveness scan.
    fn is_to_wait(&self, record: &Record) -> bool {
        match &record.body {
            Body::Catalogue(change) if !record.is_counted && !self.intake.is_stopping() => {
                !self.pool.affords(change) && self.pool.may_afford(change)
            }
            _ => false,
        }
    }

    /// Keeps a record that must wait for a liveness scan; returns any other record.
    pub(super) fn keep_awaiting_scan(&mut self, mut record: Record) -> Option<Record> {
        if !self.is_to_wait(&record) {
            return Some(record);
        }
        record.is_counted = true;
        let after = self.pool.segments().round() + 1;
        self.pool.maintenance().send(RoundCommand::Scan { after });
        if self.scan_waiters.is_empty() {
            self.scan_waiters.tries = 0;
        }
        self.scan_waiters.records.push_back(record);
        None
    }

    /// Starts a liveness scan for the records that wait for it and for other requests, or releases
    /// these records. The scan runs concurrently with writes if the pool runs threads.
    pub(super) fn resume_after_scan(&mut self) {
        if self.scan_waiters.is_empty() && self.pool.requested_scan().is_none() {
            self.scan_waiters.tries = 0;
            return;
        }
        let gives_up = self.intake.is_stopping()
            || self.pool.is_latched()
            || self.scan_waiters.tries >= SCAN_TRIES_MAX;
        if gives_up || self.pool.requested_scan().is_none() {
            if self.scan_waiters.tries >= SCAN_TRIES_MAX && self.pool.requested_scan().is_some() {
                let title = self.pool.segments().directory().title();
                tracing::warn!("{title}: {SCAN_TRIES_MAX} attempts at a liveness scan failed");
            }
            if gives_up {
                self.pool.maintenance().end_scan_requests(u64::MAX);
            }
            self.release_awaiting_scan();
            return;
        }
        if !self.pool.is_running() {
            self.scan_waiters.tries += 1;
            self.checkpoint_now(Cleaning::Needed { counts: true });
            return;
        }
        if self.round.has_ended() {
            self.join();
        }
        if self.round.is_none() {
            self.scan_waiters.tries += 1;
            self.start_checkpoint();
            return;
        }
        // The checkpoint thread scans only when it begins to clean.
        let maintenance = self.pool.maintenance();
        let has_scanned = matches!(maintenance.stage(), Stage::Cleaning | Stage::Resting);
        if has_scanned && !maintenance.scan().is_running() && !maintenance.must_finish() {
            maintenance.send(RoundCommand::Finish);
        }
    }

    /// Releases the records that wait for a scan.
    fn release_awaiting_scan(&mut self) {
        self.intake.hold_all(self.scan_waiters.records.drain(..));
    }
}

// Throttling.

/// Changed map pages, in bytes, below which a checkpoint is not worthwhile.
const DIRTY_BYTES_MIN: u64 = 256 << 10;

/// Bytes that writes may use in advance of what cleaning frees while space is short.
const AHEAD_BYTES: u64 = 256 << 10;

/// Writes wait if fewer than this number of segments are left for them.
const LEFT_MIN: usize = 2;

/// While a checkpoint must wait for a liveness scan, changed pages and log may grow to this
/// multiple of what normally starts a checkpoint.
const OVERRUN_DIRTY: u64 = 2;
const OVERRUN_LOG: u64 = 4;

/// The bytes that writes have used of those that cleaning freed for them.
#[derive(Default)]
pub(super) struct Throttle {
    spent_bytes: u64,
}

impl Throttle {
    /// Notes that a group that is not of moves took `len` bytes of the log.
    pub(super) fn spend(&mut self, len: u32) {
        self.spent_bytes += u64::from(len);
    }
}

impl<D: SegmentStore> Committer<D> {
    /// Changed pages, in bytes, at which a checkpoint starts: they are only in memory.
    pub(super) fn dirty_max(&self) -> u64 {
        (2 * self.pool.segments().leaves().limit_bytes()).max(DIRTY_BYTES_MIN)
    }

    /// Whether a checkpoint that must wait for a liveness scan has reached the limit of pages to
    /// write or of log to replay, so that writes must wait.
    pub(super) fn is_overrun(&self) -> bool {
        // A thread that has ended, for whatever reason, is joined soon.
        let is_second = self.pool.maintenance().scan() == LivenessScan::Second;
        let waits = is_second && !self.round.has_ended();
        if !waits || self.intake.is_stopping() || self.pool.is_latched() {
            return false;
        }
        let log = self.round.cleaning_since().unwrap_or(0)
            + OVERRUN_LOG * self.pool.options().checkpoint_bytes;
        self.pool.segments().dirty_bytes() >= OVERRUN_DIRTY * self.dirty_max()
            || self.round.log_bytes() >= log
    }

    /// Whether writes must wait for cleaning, or for the checkpoint before it.
    pub(super) fn is_throttled(&mut self) -> bool {
        if self.is_overrun() {
            return true;
        }
        let (pool, maintenance) = (&self.pool, self.pool.maintenance());
        let stage = maintenance.stage();
        let never_waits = !self.round.is_running()
            || self.intake.is_stopping()
            || maintenance.must_finish()
            || pool.is_latched();
        if never_waits || stage != Stage::Cleaning || !clean::is_scarce(pool) {
            self.throttle.spent_bytes = maintenance.freed_bytes();
        }
        if never_waits || stage.is_at_rest() || !clean::is_scarce(pool) {
            return false;
        }
        let left = pool.segments().free_for(AllocationClass::Write);
        left < LEFT_MIN || self.throttle.spent_bytes >= maintenance.freed_bytes() + AHEAD_BYTES
    }

    /// Makes writes wait if they must. Records that are in a group already continue.
    pub(super) fn throttle(&mut self) {
        if !self.space.is_waiting() && self.group.records.is_empty() && self.is_throttled() {
            self.pool.meters().throttled();
            self.space.begin(SpaceWait::Throttled);
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_types)] // Two threads of a test that meet in a race.
mod tests {
    use std::hint::spin_loop;
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::SeqCst;
    use std::thread::yield_now;

    use super::*;
    use crate::stepped_pool::SteppedPool;

    /// Regression: the release of records that had waited for a scan withdrew every request for a
    /// scan, also one that a scrub sent between the check that there is none and the release. The
    /// scrub then ended without a scan, and the usage table kept its error.
    #[test]
    fn releasing_records_keeps_a_scan_request_that_arrives_meanwhile() {
        const ROUNDS: u64 = 5000;
        let mut stepped = SteppedPool::new("scan-request");
        let SteppedPool { pool, committer, .. } = &mut stepped;
        let [begun, sent, ended] = &[const { AtomicU64::new(0) }; 3];
        let mut lost = 0;
        std::thread::scope(|scope| {
            let pool = &*pool;
            scope.spawn(move || {
                let mut delay = 0_u32;
                for round in 1..=ROUNDS {
                    while begun.load(SeqCst) < round {
                        spin_loop();
                    }
                    let checkpoints = pool.segments().round();
                    (0..delay).for_each(|_| spin_loop());
                    pool.request_scan();
                    sent.fetch_add(1, SeqCst);
                    while ended.load(SeqCst) < round {
                        yield_now();
                    }
                    // The committer makes a checkpoint if it saw the request: the next one is sent
                    // later. Otherwise it is sent earlier, so that it meets the release.
                    delay = match pool.segments().round() > checkpoints {
                        true => delay + 1,
                        false => delay.saturating_sub(1),
                    };
                }
            });
            for round in 1..=ROUNDS {
                let checkpoints = pool.segments().round();
                committer.scan_waiters.tries = 0;
                committer.scan_waiters.records.push_back(Record::of(Body::Flush, None));
                begun.fetch_add(1, SeqCst);
                committer.resume_after_scan();
                while sent.load(SeqCst) < round {
                    yield_now();
                }
                let is_seen = pool.segments().round() > checkpoints;
                lost += u64::from(!is_seen && pool.requested_scan().is_none());
                pool.maintenance().end_scan_requests(u64::MAX);
                committer.scan_waiters.records.clear();
                committer.intake.held().clear();
                ended.fetch_add(1, SeqCst);
            }
        });
        assert_eq!(lost, 0);
    }
}
