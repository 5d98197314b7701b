//! The committer: the thread that takes all waiting records, writes them as one group of the log,
//! makes it durable if a record asks for that, and answers the records.
//!
//! It does not wait for more records: those that arrive while a group is in flight form the next
//! group. Only the committer writes to the log and changes the trees of the maps.
//!
//! A group is in flight from the start of its write until it *lands*: then it is written, and
//! durable if a record asked for that, its blocks are in the maps, and its records are answered.
//! Groups land in log order. After a long group, more groups are started while it is in flight, to
//! keep the disk busy. After a short one, the next group starts when the first is written, before
//! its records are answered, so that the disk has work meanwhile.

mod awaiting_scan;
mod batch;
mod idle;
mod in_flight;
mod publish;
mod space;
mod space_waiters;
mod throttle;

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::Status;
use blockyard_store::tasks::CommitWriter;
use blockyard_store::{Commit, SegmentStore, WriteBatch};
use blockyard_sync::completion_queue::Receiver;
use blockyard_volume_format::catalogue::{CHANGE_BYTES_MAX, CatalogueImage};
use blockyard_volume_format::group as format;
use blockyard_volume_format::superblock::SEGMENT_NONE;

use crate::checkpoint;
use crate::clean::{self, Cleaning};
use crate::frozen::{Copied, Frozen};
use crate::log::LogEnd;
use crate::maintenance::{LivenessScan, RoundCommand, Stage};
use crate::pool::{Pool, WriteAck};
use crate::record::{Body, Record, Relocation};
use crate::segments::AllocationClass;
use crate::thread::{self, Thread};

use batch::{LogBatch, may_follow};
use idle::QUIET;
use in_flight::InFlightBatch;
use publish::WakeList;
use space_waiters::{SpaceFound, SpaceWaiters};

/// Longest group in bytes, unless a single write is longer. One large write is as fast as several,
/// and faster on a disk with high latency.
const GROUP_BYTES_MAX: u32 = 4 << 20;

/// Least number of groups in a segment, unless a single write is longer. Each header in a segment
/// names the segment in which the log continues, and one header may rot.
const SEGMENT_GROUPS: u32 = 2;

/// Most records in a group: the kernel takes at most 1024 parts in a call.
const RECORDS_MAX: usize = 1000;

/// Changed map pages, in bytes, below which a checkpoint is not worthwhile.
const DIRTY_BYTES_MIN: u64 = 256 << 10;

/// How long a write that no client asked to be durable may stay unsynced, and how often the
/// committer checks that the pool still exists.
const SETTLE: Duration = Duration::from_secs(1);

/// Segments that were free at each of this number of checks, one every [`SETTLE`], give their space
/// back.
const LOOKS: u32 = 60;

/// Most segments that give their space back together, so that a thread is not busy with them for
/// long: 32 GiB of segments of 32 MiB.
const GIVEN_MAX: usize = 1024;

/// Segments without live data for which an idle pool writes a checkpoint.
const DEAD_MIN: usize = 8;

/// An idle pool starts a liveness scan if its unknown bytes exceed 1 / `UNKNOWN_PART` of its used
/// bytes, or a segment.
const UNKNOWN_PART: u64 = 32;

/// Longest sleep of the committer while records wait for space or for a scan.
const SEARCH_LOOK: Duration = Duration::from_millis(2);

/// Most checkpoints with cleaning in one search for space.
const ROOM_TRIES: usize = 64;

/// After a failed search for space, refuse this number of groups without searching again.
const ENOSPC_BACKOFF_MAX: u32 = 16;

/// After a failed checkpoint, wait for 1 / `TRY_PART` of the usual log between checkpoints before
/// trying again.
const TRY_PART: u64 = 8;

/// What a turn did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It did some work.
    Worked,
    /// There was nothing to do.
    Idle,
    /// The pool was closed.
    Stopped,
}

/// The committer of a pool: its queues, the groups in flight, and the end of the log.
pub struct Committer<D: SegmentStore> {
    pool: Arc<Pool<D>>,
    /// Distinguishes the groups of this pool from those of another.
    mark: u64,
    records: Receiver<Record>,
    /// Records taken out of the completion queue that did not go into the last group.
    held: VecDeque<Record>,
    /// Number of next records that get a group each.
    singly: usize,
    group: LogBatch,
    /// Made by the thread that runs the committer; only that thread uses it.
    log_writer: Option<CommitWriter<D::File, D::LogWriter>>,
    /// Groups in flight, oldest first.
    in_flight: VecDeque<InFlightBatch>,
    /// Empty groups and write batches, kept for reuse.
    groups: Vec<LogBatch>,
    write_batches: Vec<WriteBatch>,
    log: LogEnd,
    /// Segments with groups that have landed but are not durable.
    unsynced: BTreeSet<u32>,
    unsynced_bytes: u64,
    /// The last group when the log last stated that all groups are durable.
    recorded: u64,
    /// Bytes of log since the last checkpoint began.
    since_checkpoint: u64,
    /// The value of `since_checkpoint` when the last checkpoint began.
    frozen_bytes: u64,
    /// After a failed checkpoint, the value of `since_checkpoint` from which the next one may
    /// begin.
    next_try: u64,
    checkpoint: Option<Thread>,
    /// The value of `since_checkpoint` when cleaning after the current checkpoint began.
    cleaning_since: Option<u64>,
    /// Bytes that writes have used of those that cleaning freed for them.
    spent: u64,
    /// Number of further groups that are refused without a search, because the last search failed.
    enospc_backoff: u32,
    search: SpaceWaiters,
    /// Changes of the catalogue that wait for a liveness scan, and how often one was begun for
    /// them.
    awaiting_scan: VecDeque<Record>,
    count_tries: u32,
    head_bytes_max: usize,
    /// Volumes with a write that was answered and then found no space: their next flush returns the
    /// error.
    lost: BTreeSet<u32>,
    /// Completion queues whose owners are to be woken.
    wake_list: WakeList,
    /// The pool is being closed: no further records are accepted.
    stopping: bool,
    /// The last group at the last check, and the last group when an idle pool started a scan.
    seen: u64,
    counted_at: Option<u64>,
    /// The least number of free segments at the checks since space was last given back, and the
    /// number of these checks.
    least_free: usize,
    looks: u32,
}

impl<D: SegmentStore> Committer<D> {
    pub(crate) fn new(pool: Arc<Pool<D>>, records: Receiver<Record>, log: LogEnd) -> Committer<D> {
        let head = format::head_bytes(format::DESCRIPTORS_MAX, pool.align()) as usize;
        Committer {
            mark: checkpoint::pool_mark(&pool),
            head_bytes_max: head.min(pool.segments().bytes() as usize),
            pool,
            records,
            held: VecDeque::new(),
            singly: 0,
            group: LogBatch::default(),
            log_writer: None,
            in_flight: VecDeque::new(),
            groups: Vec::new(),
            write_batches: Vec::new(),
            log,
            unsynced: BTreeSet::new(),
            unsynced_bytes: 0,
            // Opening the pool wrote this number to both superblock slots.
            recorded: log.last(),
            // Count the log that was found, so that a pool that is killed repeatedly still makes
            // checkpoints.
            since_checkpoint: log.found_bytes,
            frozen_bytes: 0,
            next_try: 0,
            checkpoint: None,
            cleaning_since: None,
            spent: 0,
            enospc_backoff: 0,
            search: SpaceWaiters::default(),
            awaiting_scan: VecDeque::new(),
            count_tries: 0,
            lost: BTreeSet::new(),
            wake_list: WakeList::new(),
            stopping: false,
            seen: 0,
            counted_at: None,
            least_free: usize::MAX,
            looks: 0,
        }
    }

    /// Runs until the pool is closed.
    pub fn run(&mut self) {
        self.log_writer();
        // The time at which the oldest group that is not durable was first seen.
        let mut loose: Option<Instant> = None;
        let mut looked = Instant::now();
        loop {
            if looked.elapsed() >= SETTLE {
                looked = Instant::now();
                self.look();
            }
            match self.turn() {
                Turn::Worked => self.settle_late(&mut loose),
                Turn::Stopped => return,
                // The thread that stopped the pool has panicked.
                Turn::Idle if self.stopping => return,
                Turn::Idle => {
                    let event_count = self.records.completion_queue().event_count();
                    let looks = self.search.is_on || !self.awaiting_scan.is_empty();
                    let is_waiting = self.unsynced.is_empty() && !self.is_recorded();
                    let most = match (looks, is_waiting) {
                        (true, _) => SEARCH_LOOK,
                        (false, true) => QUIET,
                        (false, false) => SETTLE,
                    };
                    event_count.sleep(most, || self.records.is_any());
                    if self.records.is_any() || self.search.is_on {
                        self.settle_late(&mut loose);
                    } else {
                        if looks {
                            self.settle()
                        } else {
                            self.rest()
                        }
                        loose = None;
                    }
                }
            }
        }
    }

    /// Syncs groups that no client asked to be durable, if they have waited too long since `loose`.
    fn settle_late(&mut self, loose: &mut Option<Instant>) {
        if self.unsynced.is_empty() {
            *loose = None;
        } else if loose.get_or_insert_with(Instant::now).elapsed() >= SETTLE {
            self.settle();
            *loose = None;
        }
    }

    /// Checks that the pool still exists, so that a removed pool does not acknowledge writes as
    /// durable. Checks how much space its file system has left, which other programs use too. Gives
    /// surplus space back to the file system.
    fn look(&mut self) {
        self.pool.segments().look_outside();
        self.pool.latch_if_removed();
        if self.pool.is_latched() {
            return;
        }
        let last = self.log.last();
        let is_idle = std::mem::replace(&mut self.seen, last) == last;
        // The locks do not keep out a process that reaches the pool by another name or from another
        // host. Its first write is a superblock with an epoch of its own.
        if !is_idle
            && let Err(error) = checkpoint::check_owner(self.pool.segments(), self.log.epoch)
        {
            self.pool.latch(&error.to_string());
            return;
        }
        self.count_if_idle(is_idle);
        self.least_free = self.least_free.min(self.pool.segments().free());
        self.looks += 1;
        if self.looks < LOOKS {
            return;
        }
        self.looks = 0;
        let least = std::mem::replace(&mut self.least_free, usize::MAX);
        let surplus = self.pool.surplus(least).min(GIVEN_MAX);
        if surplus > 0 {
            self.pool.punch_holes(surplus);
        } else if self.pool.segments().may_try_again() {
            self.pool.try_again();
        } else if is_idle {
            self.free_dead_segments();
        }
    }

    /// Starts a checkpoint if many segments have no live data, as after a large discard: they are
    /// free, and their space can be given back, after the second checkpoint from then on. A busy
    /// pool writes checkpoints anyway.
    fn free_dead_segments(&mut self) {
        let is_busy = self.checkpoint.as_ref().is_some_and(|thread| !thread.is_ended());
        if !is_busy && self.pool.segments().dead() >= DEAD_MIN {
            self.join();
            self.start_checkpoint();
        }
    }

    /// Starts a liveness scan if the pool is idle and many bytes may not be live any more, as after
    /// `destroy`, so that the reported free space becomes exact. Once only, until the next write.
    fn count_if_idle(&mut self, is_idle: bool) {
        let segments = self.pool.segments();
        let unknown = segments.unknown_bytes();
        let (used, _) = segments.used_and_left_bytes();
        let is_much = unknown >= u64::from(segments.bytes()).min(used / UNKNOWN_PART).max(1);
        if !is_idle || !is_much || self.counted_at == Some(self.log.last()) {
            return;
        }
        self.counted_at = Some(self.log.last());
        if self.pool.requested_scan().is_none() {
            self.pool.maintenance().send(RoundCommand::Scan { after: segments.round() + 1 });
        }
    }

    /// Syncs all groups, including those that no client asked to be durable.
    pub fn settle(&mut self) {
        self.complete_all();
        if !self.pool.is_latched() {
            self.sync();
        }
    }

    /// Writes one group, or waits for a group in flight.
    pub fn turn(&mut self) -> Turn {
        self.end_search();
        self.resume_after_scan();
        self.throttle();
        if !self.in_flight.is_empty() {
            if !self.may_pipeline() {
                if !self.may_submit_early() || !self.submit_next_early() {
                    self.complete_oldest();
                }
                return Turn::Worked;
            }
            self.gather();
            if !self.can_pipeline() {
                self.wait();
                return Turn::Worked;
            }
        } else {
            self.gather();
        }
        if self.group.records.is_empty() && self.awaiting_scan.is_empty() {
            return Turn::Idle;
        }
        if self.group.records.is_empty() {
            self.resume_after_scan();
            let waits = self.held.is_empty() && self.pool.is_running();
            return if waits { Turn::Idle } else { Turn::Worked };
        }
        self.carry_out()
    }

    /// Finds space for the group and commits it.
    fn carry_out(&mut self) -> Turn {
        let (stop, wants_checkpoint) = (self.group.stop, self.group.checkpoint);
        match self.finds_room() {
            SpaceFound::Found => {}
            SpaceFound::None => {
                self.part();
                return Turn::Worked;
            }
            SpaceFound::Later => return Turn::Worked,
        }
        match self.commit() {
            // Its records are answered when it lands.
            None if !wants_checkpoint => {
                if !self.may_pipeline() && !self.may_submit_early() {
                    self.complete_oldest();
                }
            }
            status => {
                let status = status.unwrap_or_else(|| self.complete_alone());
                self.group.unchecked = wants_checkpoint && !self.run_maintenance(true);
                let failed = wants_checkpoint && status.is_ok() && self.pool.is_latched();
                self.answer(if failed { Status::IoErr } else { status });
            }
        }
        self.run_maintenance(false);
        if stop {
            self.close();
            return Turn::Stopped;
        }
        Turn::Worked
    }

    /// Takes records out of the completion queue until the group is full.
    fn gather(&mut self) {
        let align = self.pool.align();
        let bytes_max = GROUP_BYTES_MAX.min(self.pool.segments().bytes() / SEGMENT_GROUPS);
        let alone = self.in_flight.is_empty();
        let changes_under_way = self.is_change_in_flight();
        let options = self.pool.options();
        let records_max = match options.commit {
            _ if self.singly > 0 => 1,
            Commit::Group => options.group_records.clamp(1, RECORDS_MAX),
            Commit::TaskQueue(_) => 1,
        };
        while self.group.records.len() < records_max && !self.group.closed {
            let Some(record) = self.next() else { return };
            let Some(record) = self.keep_awaiting_scan(record) else { continue };
            let group = &mut self.group;
            let (count, bytes) = match &record.body {
                Body::Write(payload) => (payload.blocks().len(), payload.bytes().len() as u32),
                Body::Zero(_) => (1, 0),
                Body::Move(moved) => (moved.moves.len(), 0),
                Body::Catalogue(_) => (1, (CHANGE_BYTES_MAX as u32).next_multiple_of(align)),
                Body::Flush | Body::Checkpoint | Body::Stop => (0, 0),
            };
            let count = group.descriptors.len() + count;
            let head = format::head_bytes(count, align);
            let fits = count <= format::DESCRIPTORS_MAX
                && head as usize <= self.head_bytes_max
                && u64::from(head + group.payload_bytes) + u64::from(bytes) <= bytes_max.into();
            let follows = match record.body {
                // A snapshot is a record, like the writes, which therefore need not stop for it.
                Body::Catalogue(_) => !group.changes_catalogue && !changes_under_way,
                _ => alone || may_follow(&record),
            };
            // A move has a group of its own, because it must not trigger a search for space.
            let fits = fits && !matches!(record.body, Body::Move(_));
            if (!fits && !group.records.is_empty()) || !follows {
                self.held.push_front(record);
                return;
            }
            self.singly = self.singly.saturating_sub(1);
            group.take(record, &self.pool, align);
        }
    }

    /// Begins to write the group. Returns the group's status, or `None` if it is in flight now.
    fn commit(&mut self) -> Option<Status> {
        if self.pool.is_latched() {
            self.complete_all();
            return Some(Status::IoErr);
        }
        if self.group.descriptors.is_empty() {
            self.complete_all();
            // A flush is answered by its sync, even if another record of its group is refused.
            if (self.group.durable && !self.sync()) || self.pool.is_latched() {
                return Some(Status::IoErr);
            }
            if !self.keeps_enough() {
                return Some(Status::NoSpc);
            }
            // A record that only gives pages up writes no group.
            publish::group(&self.pool, &self.group, 0);
            return Some(Status::Ok);
        }
        match self.write() {
            Ok(()) => None,
            Err(status) => {
                self.complete_all();
                // Records that only wait for earlier writes must not fail because of this one.
                let synced = !self.group.durable || self.sync();
                self.abort();
                Some(if synced { status } else { Status::IoErr })
            }
        }
    }

    /// Finds a place for the group and begins to write it there.
    fn write(&mut self) -> Result<(), Status> {
        if !self.group.admitted && !self.is_admitted() {
            return Err(Status::NoSpc);
        }
        let len = self.group.len(self.pool.align());
        let much = self.unsynced_bytes + u64::from(len) >= self.pool.options().sync_bytes;
        self.group.durable |= much;
        self.append()
    }

    /// Syncs all written groups and returns whether they are durable. A failed sync is never
    /// retried. No group may be in flight.
    fn sync(&mut self) -> bool {
        debug_assert!(self.in_flight.is_empty(), "a sync does not cover a group in flight");
        if !self.sync_segments() {
            return false;
        }
        self.log.durable = self.log.last();
        true
    }

    /// Answers all records of the group and empties it.
    fn answer(&mut self, status: Status) {
        publish::answer(&self.pool, &mut self.group, status, &mut self.lost, &mut self.wake_list);
        self.wake();
        self.group.clear();
    }

    /// Wakes the owners of records that were answered.
    fn wake(&mut self) {
        self.wake_list.drain(..).for_each(|name| _ = name.event_count().notify());
    }

    /// Begins a checkpoint if one is due, and updates whether space is low. With `at_once` the
    /// checkpoint is made on this thread. Returns whether it is durable.
    fn run_maintenance(&mut self, at_once: bool) -> bool {
        if self.checkpoint.as_ref().is_some_and(Thread::is_ended) {
            self.join();
        }
        // Changed pages are only in memory, so their number is bounded too.
        let dirty_max = self.dirty_max();
        let is_cleaned = self.checkpoint.is_some() && self.pool.maintenance().stage().is_durable();
        let round_bytes = clean::round_bytes(&self.pool, is_cleaned);
        let dirty = self.pool.segments().dirty_bytes() >= dirty_max;
        let is_long = self.since_checkpoint >= round_bytes.max(self.next_try);
        let much = dirty || is_long || self.pool.segments().is_dirty_limit_near();
        if self.pool.is_latched() {
            return false;
        }
        if at_once {
            self.join();
            return self.checkpoint_now(Cleaning::Nothing);
        }
        // While the checkpoint's pages are being written, the checkpoint must complete.
        if self.cleaning_since.is_none() && is_cleaned {
            self.cleaning_since = Some(self.since_checkpoint);
        }
        let is_overdue = |from| dirty || self.since_checkpoint >= from + round_bytes;
        let overdue = self.cleaning_since.is_some_and(is_overdue);
        if much && self.checkpoint.is_none() {
            self.start_checkpoint();
        } else if overdue
            && !self.pool.maintenance().must_finish()
            && self.pool.maintenance().scan() != LivenessScan::Second
        {
            // Cleaning after the last checkpoint had its time. A scan that was interrupted before
            // may complete.
            self.pool.maintenance().send(RoundCommand::Finish);
        } else if is_cleaned && clean::is_scarce(&self.pool) {
            self.pool.maintenance().send(RoundCommand::Clean);
        }
        self.pool.prepare(0);
        self.update_write_ack();
        true
    }

    /// Updates when writes are acknowledged that need not be durable.
    fn update_write_ack(&self) {
        // Writes that are answered early are only in memory, and must find space in existing files.
        // Segments that could still be made do not count, because the file system may be full.
        let free = self.pool.segments().free_for(AllocationClass::Write);
        let next = usize::from(self.log.place.next != SEGMENT_NONE);
        let bytes = (free + next) as u64 * u64::from(self.pool.segments().bytes());
        let wanted = self.pool.early_bytes();
        let left = self.pool.segments().left_bytes();
        let is_low = bytes.min(left) < wanted || self.pool.promises_all_but(wanted);
        let is_in_log = is_low || self.is_overrun();
        self.pool.set_write_ack(if is_in_log { WriteAck::InLog } else { WriteAck::InMemory });
    }

    /// The maps as they are now, with the end of the log.
    pub(crate) fn freeze(&mut self) -> Frozen {
        self.frozen_bytes = std::mem::take(&mut self.since_checkpoint);
        self.next_try = 0;
        self.pool.meters().checkpointed();
        let round = self.pool.segments().begin_round();
        let volumes = self.pool.volumes();
        let maps = volumes.by_id.values();
        let maps = maps.map(|live| {
            let (family, last, owned) = (live.family, live.map.copied(), live.owned());
            let copied = Copied { family, last, owned };
            // A snapshot's map does not change.
            let map = match live.meta.is_snapshot {
                true => live.map.whole(),
                false => Arc::new(live.map.freeze()),
            };
            (live.listed(), copied, map)
        });
        let (live, unknown_bytes) = self.pool.segments().live();
        let (next_id, copies) = (volumes.next_id, volumes.copies);
        let whole = CatalogueImage { next_id, copies, live, unknown_bytes };
        Frozen { round, log: self.log.place, whole, volumes: maps.collect() }
    }

    /// Makes a checkpoint on this thread, then cleans. Returns whether the checkpoint is durable.
    fn checkpoint_now(&mut self, cleaning: Cleaning) -> bool {
        // The checkpoint must follow all groups that it refers to.
        self.complete_all();
        if self.pool.is_latched() || !self.sync() {
            return false;
        }
        let (frozen, pool) = (self.freeze(), Arc::clone(&self.pool));
        let Some(marks) = checkpoint::run(&pool, &frozen) else {
            self.defer_checkpoint();
            return false;
        };
        clean::each(&pool, &frozen, &marks, cleaning, |moved| self.move_blocks(moved));
        true
    }

    /// Writes and publishes a group of moves durably. Returns false if there was no space or it
    /// failed. No other group may be in flight.
    pub(crate) fn move_blocks(&mut self, moved: Relocation) -> bool {
        let others = std::mem::take(&mut self.group);
        let align = self.pool.align();
        let record = Record::of(Body::Move(Arc::new(moved)), None);
        self.group.take(record, &self.pool, align);
        let is_written = match self.group.descriptors.is_empty() {
            true if self.keeps_enough() && self.sync() => {
                publish::group(&self.pool, &self.group, 0);
                true
            }
            true => false,
            false => self.is_admitted() && self.append().is_ok() && self.complete_alone().is_ok(),
        };
        self.group = others;
        is_written
    }

    /// Makes a checkpoint concurrently with writes, if the pool runs threads.
    fn start_checkpoint(&mut self) {
        if !self.pool.is_running() {
            self.checkpoint_now(Cleaning::Due);
            return;
        }
        self.complete_all();
        if self.pool.is_latched() || !self.sync() {
            return;
        }
        let (frozen, pool) = (self.freeze(), Arc::clone(&self.pool));
        let run = move || {
            let of = Arc::downgrade(&pool);
            let is_waited_for =
                |pool: Arc<Pool<D>>| pool.maintenance().must_finish() || clean::is_scarce(&pool);
            thread::set_yielding(move || of.upgrade().is_none_or(is_waited_for));
            let marks = checkpoint::run(&pool, &frozen);
            if let Some(marks) = &marks {
                pool.set_stage(Stage::Scanning);
                clean::concurrent(&pool, &frozen, marks);
            }
            frozen.let_go();
            pool.set_stage(if marks.is_some() { Stage::Resting } else { Stage::Idle });
        };
        self.pool.set_stage(Stage::Writing);
        self.cleaning_since = None;
        match Thread::start("volume-checkpoint", run) {
            Ok(thread) => self.checkpoint = Some(thread),
            Err(error) => {
                tracing::warn!("no thread for a checkpoint: {error}");
                self.pool.set_stage(Stage::Idle);
                self.pool.segments().end_round(false);
                self.defer_checkpoint();
            }
        }
    }

    /// Notes that the last checkpoint failed: the log after the one before it keeps its length.
    fn defer_checkpoint(&mut self) {
        self.since_checkpoint += std::mem::take(&mut self.frozen_bytes);
        self.next_try = self.since_checkpoint + self.pool.options().checkpoint_bytes / TRY_PART;
    }

    /// Waits for the checkpoint thread. Its cleaning may be waiting for this thread, so this
    /// asks it to stop.
    fn join(&mut self) {
        let Some(thread) = self.checkpoint.take() else { return };
        self.pool.maintenance().send(RoundCommand::Finish);
        if !thread.join() {
            self.pool.latch("a checkpoint has panicked");
        }
        self.pool.maintenance().withdraw_finish();
        if !self.pool.maintenance().stage().is_durable() {
            self.defer_checkpoint();
        }
    }

    /// Closes the pool: makes everything durable with a last checkpoint, so that the next opening
    /// has nothing to replay.
    fn close(&mut self) {
        self.complete_all();
        self.join();
        self.pool.end_preparing();
        let is_behind = self.since_checkpoint > 0 || !self.unsynced.is_empty();
        if !self.pool.is_latched() && (is_behind || !self.is_recorded()) {
            // If the superblock written now is lost, an opening by the other slot relies on the
            // log.
            self.rest();
            self.checkpoint_now(Cleaning::Nothing);
        }
    }
}

impl<D: SegmentStore> fmt::Debug for Committer<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Committer").field("log", &self.log).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
