//! The committer: the thread that takes all waiting records, writes them as one group of the log,
//! makes it durable if a record requests that, and answers the records.
//!
//! It does not wait for more records, except for the clients of a slow store (`Returning`): those
//! that arrive while a group is in flight form the next group. Only the committer writes to the log
//! and changes the trees of the maps.
//!
//! The way of a record, and the functions that move it:
//!
//! ```text
//!                 gather           find_space            append
//! record queue ──────────▸ group ─────────────▸ admitted ───────▸ in flight
//!     held     ◂────────── │                       │ no place        │ complete_oldest
//!      ▴  return_records,  │                       ▾                 ▾
//!      │  split_group      │       refused ◂──── abort           answered
//!      │        park, keep ▾
//!      ├── resume ── waits for space
//!      └── release_awaiting_scan ── waits for a liveness scan ◂── keep_awaiting_scan, of gather
//! ```
//!
//! A group is in flight from the start of its write until it *completes*: then it is written, and
//! durable if a record asked for that, its blocks are in the maps, and its records are answered.
//!
//! The parts of the committer have states, whose diagrams are in their files:
//!
//! - `IntakeState` (here): whether the pool is being closed.
//! - `LogTail` (`in_flight.rs`): how durable the log is.
//! - `SpaceWait` (`space.rs`): what writes wait for.
//! - `RoundState` (`round.rs`): whether a checkpoint thread runs.
//!
//! ```text
//! IntakeState   Accepting ── Intake::take, of `Body::Stop` ──▸ Stopping
//! ```
//!
//! Invariants, which assertions cite by number:
//!
//! - I1: A sync of all groups begins while none is in flight: it covers what was written before.
//! - I2: Groups complete in log order, and those in flight have consecutive numbers.
//! - I3: A durable group is begun only if all groups in flight are durable: its sync does not cover
//!   a write that has not ended.
//! - I4: When a durable group completes, all groups before it are durable.
//! - I5: One thread at a time writes a checkpoint: the committer joins the last one first.
//! - I6: While writes wait for space, no search for more begins.
//! - I7: When the pool closes, no record waits: those that waited precede the stop.

mod in_flight;
mod round;
mod space;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::Status;
use blockyard_store::buffer::Buffer;
use blockyard_store::{Commit, LogWriter as _, SegmentStore};
use blockyard_sync::completion_queue::Receiver;
use blockyard_volume_format::FAN;
use blockyard_volume_format::bytes::crc;
use blockyard_volume_format::catalogue::{CHANGE_BYTES_MAX, Change};
use blockyard_volume_format::entry::Codec;
use blockyard_volume_format::group::{DESCRIPTORS_MAX, Descriptor, Kind, Places, head_bytes};

use crate::clean::Cleaning;
use crate::log::LogEnd;
use crate::pool::{Pool, Volumes};
use crate::record::{Body, Record, Relocation};
use crate::segments::AllocationClass;

use in_flight::{Answers, LogTail, Pipeline, QUIET, Unsynced, publish_group};
use round::{PeriodicChecks, Round};
use space::{ScanWaiters, SpaceFound, SpaceWaiters, Throttle};

/// Longest group in bytes, unless a single write is longer. One large write is as fast as several,
/// and faster on a disk with high latency.
const GROUP_BYTES_MAX: u32 = 4 << 20;

/// Least number of groups in a segment, unless a single write is longer. Each header in a segment
/// names the segment in which the log continues, and one header may rot.
const SEGMENT_GROUPS: u32 = 2;

/// Most records in a group: the kernel takes at most 1024 parts in a call.
const RECORDS_MAX: usize = 1000;

/// A group waits for returning clients for this fraction of the time that the last group took.
const RETURN_FRACTION: u32 = 10;

/// The longest wait for returning clients. A client in the same data centre answers in less, and a
/// group that an outage of the store has delayed says nothing about the next one.
const RETURN_TIME_MAX: Duration = Duration::from_millis(2);

/// How long a write that no client asked to be durable may stay unsynced.
const SYNC_DELAY_MAX: Duration = Duration::from_secs(1);

/// How often the committer does its periodic checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Longest sleep of the committer while records wait for space or for a scan.
const WAITERS_CHECK_INTERVAL: Duration = Duration::from_millis(2);

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

/// Clients that had answers a moment ago and probably send their next records at once.
///
/// Without it, the first of them would begin a group of its own on a store that is idle again, and
/// all others would wait for that: two groups of clients would take turns, and each client would
/// wait for two writes of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Returning {
    /// The records of the last group, and those that waited when it completed: what the next group
    /// has if all clients return.
    records: usize,
    /// Until when the next durable group waits for them.
    until: Instant,
}

/// The committer of a pool.
pub struct Committer<D: SegmentStore> {
    pool: Arc<Pool<D>>,
    intake: Intake,
    /// The group that is being gathered, or executed.
    group: LogBatch,
    pipeline: Pipeline<D>,
    log: LogEnd,
    unsynced: Unsynced,
    round: Round,
    throttle: Throttle,
    space: SpaceWaiters,
    scan_waiters: ScanWaiters,
    answers: Answers,
    /// The clients of the last durable group, if the log writer waits for them.
    returning: Option<Returning>,
    checks: PeriodicChecks,
}

impl<D: SegmentStore> Committer<D> {
    pub(crate) fn new(pool: Arc<Pool<D>>, queue: Receiver<Record>, log: LogEnd) -> Committer<D> {
        Committer {
            pipeline: Pipeline::new(&pool),
            pool,
            intake: Intake::new(queue),
            group: LogBatch::default(),
            // Opening the pool wrote this number to both superblock slots.
            unsynced: Unsynced::new(log.last()),
            round: Round::new(log.found_bytes),
            log,
            throttle: Throttle::default(),
            space: SpaceWaiters::default(),
            scan_waiters: ScanWaiters::default(),
            answers: Answers::default(),
            returning: None,
            checks: PeriodicChecks::default(),
        }
    }

    /// Runs until the pool is closed.
    pub fn run(&mut self) {
        self.log_writer();
        let mut checked = Instant::now();
        loop {
            if checked.elapsed() >= CHECK_INTERVAL {
                checked = Instant::now();
                self.run_periodic_checks();
            }
            match self.turn() {
                Turn::Worked => self.sync_late(),
                Turn::Stopped => return,
                // The thread that stopped the pool has panicked.
                Turn::Idle if self.intake.is_stopping() => return,
                Turn::Idle => self.sleep(),
            }
        }
    }

    /// Sleeps until a record arrives, then does the work of an idle log if none has.
    fn sleep(&mut self) {
        let have_waiters = self.space.is_waiting() || !self.scan_waiters.is_empty();
        let at_most = match self.log_tail() {
            _ if have_waiters => WAITERS_CHECK_INTERVAL,
            LogTail::Durable => QUIET,
            _ => SYNC_DELAY_MAX.min(CHECK_INTERVAL),
        };
        let queue = self.intake.queue();
        queue.completion_queue().event_count().sleep(at_most, || queue.is_any());
        if let Some(log_writer) = &mut self.pipeline.log_writer {
            log_writer.renew();
        }
        if queue.is_any() || self.space.is_waiting() {
            self.sync_late();
        } else if have_waiters {
            self.sync_all();
        } else {
            self.finish_idle_log();
        }
    }

    /// Writes one group, or waits for a group in flight.
    pub fn turn(&mut self) -> Turn {
        self.end_wait();
        self.resume_after_scan();
        self.throttle();
        if !self.pipeline.is_empty() {
            if !self.may_pipeline() {
                self.complete_oldest();
                return Turn::Worked;
            }
            self.gather();
            if !self.can_pipeline() {
                self.wait();
                return Turn::Worked;
            }
        } else {
            self.gather();
            self.wait_for_clients();
        }
        if self.group.records.is_empty() && self.scan_waiters.is_empty() {
            return Turn::Idle;
        }
        if self.group.records.is_empty() {
            self.resume_after_scan();
            let waits = self.intake.holds_none() && self.pool.is_running();
            return if waits { Turn::Idle } else { Turn::Worked };
        }
        self.execute_group()
    }

    /// Finds space for the group and commits it.
    fn execute_group(&mut self) -> Turn {
        let (stop, wants_checkpoint) = (self.group.stop, self.group.checkpoint);
        let waits = self.group.durable && self.log_writer().waits_for_clients();
        self.group.began = waits.then(Instant::now);
        match self.find_space() {
            SpaceFound::Found => {}
            SpaceFound::None => {
                self.split_group();
                return Turn::Worked;
            }
            SpaceFound::Later => return Turn::Worked,
        }
        match self.commit() {
            // Its records are answered when it completes.
            None if !wants_checkpoint => {
                if !self.may_pipeline() {
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
        let alone = self.pipeline.is_empty();
        let is_change_in_flight = self.pipeline.has_change();
        let options = self.pool.options();
        let records_max = match options.commit {
            _ if self.intake.is_single() => 1,
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
            let mut places = group.places;
            places.add(is_packed(&record), bytes, align);
            let count = group.descriptors.len() + count;
            let head = head_bytes(count, align);
            let fits = count <= DESCRIPTORS_MAX
                && head as usize <= self.pipeline.head_bytes_max
                && u64::from(head) + places.payload_bytes(align) <= bytes_max.into();
            let follows = match record.body {
                // A snapshot is a record, like the writes, which therefore need not stop for it.
                Body::Catalogue(_) => !group.changes_catalogue && !is_change_in_flight,
                _ => alone || may_follow(&record),
            };
            // A move has a group of its own, because it must not trigger a search for space.
            let fits = fits && !matches!(record.body, Body::Move(_));
            if (!fits && !group.records.is_empty()) || !follows {
                self.intake.hold(record);
                return;
            }
            self.intake.count_grouped();
            group.take(record, &self.pool, align);
        }
    }

    /// Before the records of a group that began at `began` are answered: notes whom the next
    /// durable group waits for.
    fn expect_clients(&mut self, answered: usize, began: Option<Instant>) {
        let Some(began) = began else { return };
        // None of those that are answered now is among those that wait.
        self.intake.empty_queue();
        let waiting = self.intake.held().len();
        let time = (began.elapsed() / RETURN_FRACTION).min(RETURN_TIME_MAX);
        let most = self.pool.options().group_records.clamp(1, RECORDS_MAX);
        let records = (answered + waiting).min(most);
        self.returning = Some(Returning { records, until: Instant::now() + time });
    }

    /// Waits until the clients of the last durable group have sent their next records, if the group
    /// is durable and has room, but not for long.
    fn wait_for_clients(&mut self) {
        if !self.group.durable {
            return;
        }
        let Some(Returning { records, until }) = self.returning.take() else { return };
        while self.group.records.len() < records
            && !self.group.closed
            && !self.intake.is_single()
            && self.intake.holds_none()
        {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let queue = self.intake.queue();
            queue.completion_queue().event_count().sleep(left, || queue.is_any());
            self.gather();
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
            if !self.fits_changed_pages() {
                return Some(Status::NoSpc);
            }
            // A record that only gives pages up writes no group.
            publish_group(&self.pool, &self.group, 0);
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
        let much = self.unsynced.bytes() + u64::from(len) >= self.pool.options().sync_bytes;
        self.group.durable |= much;
        self.append()
    }

    /// Answers all records of the group and empties it.
    fn answer(&mut self, status: Status) {
        self.expect_clients(self.group.records.len(), self.group.began);
        self.answers.answer(&self.pool, &mut self.group, status);
        self.answers.wake();
        self.group.clear();
    }

    /// Closes the pool: makes everything durable with a last checkpoint, so that the next opening
    /// has nothing to replay.
    fn close(&mut self) {
        debug_assert!(self.space.is_empty() && self.scan_waiters.is_empty(), "I7: a record waits");
        self.complete_all();
        self.join();
        self.pool.end_preparing();
        let is_recorded = self.log_tail() == LogTail::Recorded
            && self.round.log_bytes() == 0
            && self.round.repaired() == self.pool.segments().repaired_count();
        if !self.pool.is_latched() && !is_recorded {
            // If the superblock written now is lost, an opening by the other slot relies on the
            // log.
            self.finish_idle_log();
            self.checkpoint_now(Cleaning::Nothing);
        }
    }
}

impl<D: SegmentStore> fmt::Debug for Committer<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Committer").field("log", &self.log).finish_non_exhaustive()
    }
}

// The intake: the records of all volumes, in the order in which they go into groups.

/// Whether the pool is being closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IntakeState {
    /// Records are accepted.
    Accepting,
    /// The record that closes the pool was taken. No record waits any more: those that waited
    /// precede it.
    Stopping,
}

/// The records that are not in a group yet: first the held ones, then those in the record queue.
struct Intake {
    queue: Receiver<Record>,
    /// Records that were taken out of the queue and did not go into a group yet.
    held: VecDeque<Record>,
    /// Number of next records that get a group each, because their group found no space.
    single: usize,
    state: IntakeState,
}

impl Intake {
    fn new(queue: Receiver<Record>) -> Intake {
        Intake { queue, held: VecDeque::new(), single: 0, state: IntakeState::Accepting }
    }

    /// The record queue.
    fn queue(&self) -> &Receiver<Record> {
        &self.queue
    }

    /// Takes the next record.
    fn take(&mut self) -> Option<Record> {
        let record = self.held.pop_front().or_else(|| self.queue.take())?;
        if matches!(record.body, Body::Stop) {
            self.state = IntakeState::Stopping;
        }
        Some(record)
    }

    /// Whether the pool is being closed.
    fn is_stopping(&self) -> bool {
        self.state == IntakeState::Stopping
    }

    /// Puts a record before all others.
    fn hold(&mut self, record: Record) {
        self.held.push_front(record);
    }

    /// Puts records before all others, in their order.
    fn hold_all(&mut self, records: impl DoubleEndedIterator<Item = Record>) {
        records.rev().for_each(|record| self.hold(record));
    }

    /// Takes all records out of the queue and holds them.
    fn empty_queue(&mut self) {
        while let Some(record) = self.queue.take() {
            self.held.push_back(record);
        }
    }

    /// The held records.
    fn held(&mut self) -> &mut VecDeque<Record> {
        &mut self.held
    }

    /// Whether no record is held.
    fn holds_none(&self) -> bool {
        self.held.is_empty()
    }

    /// Gives each of the next `count` records a group of its own, in addition to those that get one
    /// already.
    fn add_single(&mut self, count: usize) {
        self.single += count;
    }

    /// Whether the next record gets a group of its own.
    fn is_single(&self) -> bool {
        self.single > 0
    }

    /// Notes that a record went into a group.
    fn count_grouped(&mut self) {
        self.single = self.single.saturating_sub(1);
    }
}

// The group: which records it takes, and what they need.

/// Records that are written together.
#[derive(Default)]
struct LogBatch {
    records: Vec<Record>,
    descriptors: Vec<Descriptor>,
    /// Bytes of catalogue changes, in the order of their descriptors.
    changes: Vec<Buffer>,
    /// Where the contents of the records are in the group's payload.
    places: Places,
    /// A record requests that the group is durable.
    durable: bool,
    /// A record requests a checkpoint.
    checkpoint: bool,
    /// A record may free space.
    frees: bool,
    /// The allocation class of the record that leaves the most space to others.
    want: Option<AllocationClass>,
    /// The most pages that the group changes.
    pages: u64,
    /// A requested checkpoint found no space.
    unchecked: bool,
    /// The group was admitted: space that others take meanwhile is not the group's.
    admitted: bool,
    stop: bool,
    /// The group contains a catalogue change, and may not contain another: each is checked against
    /// the current catalogue.
    changes_catalogue: bool,
    /// No further record may be added.
    closed: bool,
    /// When it began, if the next group waits for the clients that it answers.
    began: Option<Instant>,
}

/// Whether a record may be in a group that starts while another is in flight: its effect must not
/// depend on that group.
fn may_follow(record: &Record) -> bool {
    matches!(record.body, Body::Write(_) | Body::Zero(_) | Body::Flush)
}

/// Whether the contents of a record follow those of the record before without a gap.
fn is_packed(record: &Record) -> bool {
    matches!(&record.body, Body::Write(payload) if payload.is_sealed())
}

/// The allocation class of a record, if it needs space.
fn want<D: SegmentStore>(record: &Record, pool: &Pool<D>) -> Option<AllocationClass> {
    match &record.body {
        Body::Write(_) if record.reply.is_some() => Some(AllocationClass::Write),
        Body::Write(_) | Body::Zero(_) => Some(AllocationClass::Free),
        Body::Move(_) => Some(AllocationClass::Move),
        Body::Catalogue(change) if frees(change, &pool.volumes()) => Some(AllocationClass::Free),
        Body::Catalogue(_) => Some(AllocationClass::Write),
        Body::Flush | Body::Checkpoint | Body::Stop => None,
    }
}

/// Whether a catalogue change may free space. Growing a volume or its reservation does not.
fn frees(change: &Change, volumes: &Volumes) -> bool {
    let live = |id: &u32| volumes.by_id.get(id);
    match change {
        Change::Create(_)
        | Change::Copy(_)
        | Change::SnapshotAll { .. }
        | Change::Rename { .. }
        | Change::Promote { .. }
        | Change::Hold { .. }
        | Change::Scrubbed(_)
        | Change::Set { .. }
        | Change::PutKey(_) => false,
        Change::Reserve { id, bytes } => live(id).is_some_and(|it| *bytes <= it.reserved_bytes()),
        Change::Resize { id, blocks } => live(id).is_some_and(|it| *blocks <= it.meta.blocks),
        Change::Destroy { .. } | Change::Rollback { .. } | Change::Release { .. } => true,
        Change::Several(changes) => changes.iter().all(|change| frees(change, volumes)),
    }
}

/// The most pages of maps and of the catalogue that a record changes.
fn pages<D: SegmentStore>(record: &Record, pool: &Pool<D>) -> u64 {
    match &record.body {
        // The leaves, their node, and a root.
        Body::Write(payload) => leaves(record.first, payload.blocks().len() as u64) + 2,
        // The leaves between the first and the last are dropped as a whole.
        Body::Zero(blocks) => leaves(record.first, u64::from(*blocks)).min(2) + 2,
        Body::Move(moved) => moved.page_count,
        Body::Catalogue(change) => pool.volumes().change_pages(change),
        Body::Flush | Body::Checkpoint | Body::Stop => 0,
    }
}

/// The number of leaves that contain a range of blocks.
fn leaves(first: u64, blocks: u64) -> u64 {
    (first + blocks).div_ceil(FAN as u64) - first / FAN as u64
}

impl LogBatch {
    /// The length of the group in the log, in bytes.
    fn len(&self, align: u32) -> u32 {
        head_bytes(self.descriptors.len(), align) + self.payload_bytes(align)
    }

    /// The length of what follows the header, in bytes.
    fn payload_bytes(&self, align: u32) -> u32 {
        self.places.payload_bytes(align) as u32
    }

    /// Empties the group, but keeps its memory.
    fn clear(&mut self) {
        self.records.clear();
        self.descriptors.clear();
        self.changes.clear();
        let LogBatch { records, descriptors, changes, .. } = std::mem::take(self);
        *self = LogBatch { records, descriptors, changes, ..LogBatch::default() };
    }

    fn push(&mut self, descriptor: Descriptor) {
        self.descriptors.push(descriptor);
    }

    /// Adds the space and pages that a record needs.
    fn count<D: SegmentStore>(&mut self, record: &Record, pool: &Pool<D>) {
        self.want = self.want.max(want(record, pool));
        self.pages += pages(record, pool);
    }

    /// Adds a record.
    fn take<D: SegmentStore>(&mut self, mut record: Record, pool: &Pool<D>, align: u32) {
        self.count(&record, pool);
        match &mut record.body {
            Body::Write(payload) => {
                let volume = record.volume.as_ref().map_or(0, |volume| volume.meta.id);
                let blocks = (record.first..).zip(payload.blocks());
                self.descriptors.extend(blocks.map(|(block, stored)| Descriptor {
                    kind: Kind::Data,
                    codec: stored.codec,
                    volume,
                    from: 0,
                    to: 0,
                    block,
                    len: stored.len,
                    crc: stored.crc,
                }));
                self.places.add(payload.is_sealed(), payload.bytes().len() as u32, align);
            }
            Body::Zero(blocks) => {
                self.frees = true;
                let volume = record.volume.as_ref().map_or(0, |volume| volume.meta.id);
                let (kind, codec, block, len) = (Kind::Zero, Codec::Raw, record.first, *blocks);
                let (from, to, crc) = (0, 0, 0);
                self.push(Descriptor { kind, codec, volume, from, to, block, len, crc });
            }
            Body::Move(moved) => {
                self.closed = true;
                // A checkpoint began since: other data may be at the new places, so the blocks stay
                // where they were.
                if pool.segments().round() > moved.round {
                    record.body = Body::Move(nothing_moved(moved));
                } else {
                    self.descriptors.extend(moved.moves.iter().map(|moved| Descriptor {
                        kind: Kind::Move,
                        codec: moved.to.codec(),
                        volume: moved.family,
                        from: moved.from.address(),
                        to: moved.to.address(),
                        block: moved.block,
                        len: moved.to.stored_bytes(),
                        crc: moved.to.crc(),
                    }));
                }
            }
            Body::Catalogue(change) => {
                self.frees = true;
                self.changes_catalogue = true;
                let checked = pool.volumes().check(change);
                match checked {
                    Ok(()) if !pool.affords(change) => {
                        record.durable = false;
                        record.serial = Status::NoSpc as u64;
                    }
                    Ok(()) => self.take_change(&change.print(), pool, align),
                    Err(status) => {
                        record.durable = false;
                        record.serial = status as u64;
                    }
                }
            }
            Body::Flush => {}
            Body::Checkpoint => self.checkpoint = true,
            Body::Stop => {
                self.stop = true;
                self.closed = true;
            }
        }
        self.durable |= record.durable;
        self.records.push(record);
    }

    fn take_change<D: SegmentStore>(&mut self, change: &[u8], pool: &Pool<D>, align: u32) {
        let len = change.len() as u32;
        let mut bytes = pool.memory().take_beyond(len.next_multiple_of(align) as usize);
        bytes.fill(0);
        bytes[..change.len()].copy_from_slice(change);
        self.places.add(false, bytes.len() as u32, align);
        let (kind, crc) = (Kind::Catalogue, crc(&bytes));
        let (codec, volume, from, to, block) = (Codec::Raw, 0, 0, 0, 0);
        let descriptor = Descriptor { kind, codec, volume, from, to, block, len, crc };
        self.descriptors.push(descriptor);
        self.changes.push(bytes);
    }
}

/// A move of nothing, in place of one that is not made.
fn nothing_moved(moved: &Relocation) -> Arc<Relocation> {
    Arc::new(Relocation { round: moved.round, ..Relocation::default() })
}

#[cfg(test)]
mod tests;
