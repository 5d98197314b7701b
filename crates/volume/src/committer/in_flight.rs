//! Groups in flight: how they are begun, how they complete and become durable, and what happens to
//! their records then.
//!
//! After a long group, more are begun while it is in flight, to keep the disk busy. After a short
//! one, the next group is begun when the first has completed.
//!
//! How durable the log is, and how it becomes so:
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
//!
//! When a group has completed, its blocks enter the maps, and its records are answered.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::Status;
use blockyard_store::log_writer::{CommitWriter, Part, Payload, Tasks, blocks_of};
use blockyard_store::{Commit, Durability, LogWriter, SegmentStore, StoreFile, WriteBatch};
use blockyard_sync::completion_queue::CompletionQueue;
use blockyard_volume_format::entry::Entry;
use blockyard_volume_format::group::{self as format, Head, Places};

use super::{Committer, LogBatch, SYNC_DELAY_MAX, is_packed};
use crate::apply::Apply;
use crate::error::VolumeError;
use crate::pool::Pool;
use crate::record::{Body, Record, Reply};
use crate::segments::AllocationClass;
use crate::{checkpoint, relocate};

/// A group in flight.
struct InFlightBatch {
    group: LogBatch,
    /// The group's number.
    number: u64,
    segment: u32,
    /// The address of the group's first block.
    address: u64,
    len: u32,
}

/// The log writer and the groups that it writes.
pub(super) struct Pipeline<D: SegmentStore> {
    /// Made by the thread that runs the committer; only that thread uses it.
    pub(super) log_writer: Option<CommitWriter<D::File, D::LogWriter>>,
    /// Groups in flight, oldest first.
    batches: VecDeque<InFlightBatch>,
    /// Empty groups and write batches, kept for reuse.
    spare_groups: Vec<LogBatch>,
    spare_write_batches: Vec<WriteBatch>,
    /// Distinguishes the groups of this pool from those of another.
    mark: u64,
    /// Longest header of a group, in bytes.
    pub(super) head_bytes_max: usize,
}

impl<D: SegmentStore> Pipeline<D> {
    pub(super) fn new(pool: &Pool<D>) -> Pipeline<D> {
        let head = format::head_bytes(format::DESCRIPTORS_MAX, pool.align()) as usize;
        Pipeline {
            log_writer: None,
            batches: VecDeque::new(),
            spare_groups: Vec::new(),
            spare_write_batches: Vec::new(),
            mark: checkpoint::pool_mark(pool),
            head_bytes_max: head.min(pool.segments().bytes() as usize),
        }
    }

    /// Whether no group is in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// The number of the oldest group in flight.
    fn oldest(&self) -> Option<u64> {
        self.batches.front().map(|batch| batch.number)
    }

    /// Whether every group in flight is durable when it completes.
    fn are_all_durable(&self) -> bool {
        self.batches.iter().all(|batch| batch.group.durable)
    }

    /// Whether a change of the catalogue is in flight.
    pub(super) fn has_change(&self) -> bool {
        self.batches.iter().any(|batch| batch.group.changes_catalogue)
    }
}

/// Makes the log writer of the options.
fn choose<D: SegmentStore>(pool: &Pool<D>) -> CommitWriter<D::File, D::LogWriter> {
    if let Commit::TaskQueue(workers) = pool.options().commit {
        match Tasks::start(workers) {
            Ok(tasks) => return CommitWriter::Tasks(tasks),
            Err(error) => {
                let title = pool.segments().directory().title();
                tracing::error!("{title}: no {workers} workers ({error}): `commit=group` instead");
            }
        }
    }
    let scratch = pool.segments().scratch();
    CommitWriter::Group(pool.segments().directory().log_writer(scratch.as_ref()))
}

impl<D: SegmentStore> Committer<D> {
    /// The log writer, which the first call makes for the calling thread.
    pub(super) fn log_writer(&mut self) -> &mut CommitWriter<D::File, D::LogWriter> {
        let (pool, queue) = (&self.pool, self.intake.queue().completion_queue());
        self.pipeline.log_writer.get_or_insert_with(|| {
            let log_writer = choose(pool);
            if let Some(waker) = log_writer.waker() {
                queue.event_count().set_waker(waker);
            }
            log_writer
        })
    }

    /// Whether another group may be begun while others are in flight.
    pub(super) fn may_pipeline(&mut self) -> bool {
        let Some(last) = self.pipeline.batches.back() else { return true };
        let is_long = last.len >= self.pool.options().pipeline_bytes;
        let count = self.pipeline.batches.len();
        if !self.pool.segments().directory().reports_sync_error_to_all() {
            return false;
        }
        let log_writer = self.log_writer();
        (is_long || log_writer.takes_short()) && count < log_writer.depth()
    }

    /// Whether the group may be in flight together with the others. A sync covers only what was
    /// written when it begins, so a durable group may follow only durable groups.
    pub(super) fn can_pipeline(&self) -> bool {
        let LogBatch { records, descriptors, durable, .. } = &self.group;
        let len = self.group.len(self.pool.align());
        let is_plain = !records.is_empty() && !descriptors.is_empty();
        let much = self.unsynced.bytes() + u64::from(len) >= self.pool.options().sync_bytes;
        is_plain
            && self.fits_existing_segments()
            && !(much || *durable && !self.pipeline.are_all_durable())
    }

    /// Sleeps until the oldest group can complete, or a record arrives that may go into a group
    /// after it.
    pub(super) fn wait(&mut self) {
        let Self { pipeline, intake, group, .. } = self;
        // A record that could not follow the groups in flight still cannot when others arrive.
        let waits = group.records.is_empty() && intake.holds_none();
        let queue = intake.queue();
        let ended = match &mut pipeline.log_writer {
            Some(log_writer) if waits => {
                log_writer.wait(queue.completion_queue().event_count(), &|| queue.is_any())
            }
            _ => true,
        };
        if ended {
            self.complete_oldest();
            self.run_maintenance(false);
        }
    }

    /// Begins to write the group at the end of the log.
    pub(super) fn append(&mut self) -> Result<(), Status> {
        let (pages, bytes) = (self.group.pages, self.group.payload_bytes(self.pool.align()));
        self.pool.segments().begin_in_flight(pages, bytes);
        let begun = self.begin();
        if begun.is_err() {
            self.pool.segments().end_in_flight(pages, bytes);
        }
        begun
    }

    fn begin(&mut self) -> Result<(), Status> {
        let want = self.group.want.unwrap_or(AllocationClass::Free);
        let align = self.pool.align();
        let count = self.group.descriptors.len();
        let head_bytes = format::head_bytes(count, align);
        let len = self.group.len(align);
        let address = self.log.reserve(len, self.pool.segments(), want).ok_or(Status::NoSpc)?;
        let segment = self.log.place.segment;
        let durability = self.durability(segment)?;
        let head = Head {
            pool: self.pipeline.mark,
            epoch: self.log.epoch,
            number: self.log.place.number,
            chain: self.log.place.chain,
            durable: self.log.durable,
            next: self.log.place.next,
            count: count as u32,
            head_bytes,
            payload_bytes: self.group.payload_bytes(align),
        };
        debug_assert!(
            !self.group.durable || self.pipeline.are_all_durable(),
            "I3: a sync would not cover a group in flight"
        );
        let head_bytes_max = self.pipeline.head_bytes_max;
        let mut write_batch = self
            .pipeline
            .spare_write_batches
            .pop()
            .unwrap_or_else(|| WriteBatch::new(self.pool.memory().take_beyond(head_bytes_max)));
        let into = write_batch.head(head_bytes as usize);
        let chain = format::print(&head, &self.group.descriptors, into);
        self.group.pack(&mut write_batch, &self.pool);
        let (file, offset) = self.pool.segments().place(address).map_err(|_| Status::NoSpc)?;
        self.log_writer().begin(&file, offset, write_batch, durability);
        let empty = self.pipeline.spare_groups.pop().unwrap_or_default();
        let group = std::mem::replace(&mut self.group, empty);
        let address = address + u64::from(head_bytes);
        self.pipeline.batches.push_back(InFlightBatch {
            group,
            number: head.number,
            segment,
            address,
            len,
        });
        self.round.add_log_bytes(len);
        if want != AllocationClass::Move {
            self.throttle.spend(len);
        }
        self.log.advance(len, chain);
        Ok(())
    }

    /// Waits for the oldest group and answers its records.
    pub(super) fn complete_oldest(&mut self) {
        let Some((mut group, status, address)) = self.finish_io() else { return };
        self.publish(&group, status, address);
        self.expect_clients(group.records.len(), group.began);
        self.answers.answer(&self.pool, &mut group, status);
        self.answers.wake();
        group.clear();
        self.pipeline.spare_groups.push(group);
    }

    /// Waits until no group is in flight.
    pub(super) fn complete_all(&mut self) {
        while !self.pipeline.is_empty() {
            self.complete_oldest();
        }
    }

    /// Waits for the only group in flight, whose records become the current group again.
    pub(super) fn complete_alone(&mut self) -> Status {
        while self.pipeline.batches.len() > 1 {
            self.complete_oldest();
        }
        let Some((group, status, address)) = self.finish_io() else { return Status::Ok };
        self.publish(&group, status, address);
        let empty = std::mem::replace(&mut self.group, group);
        self.pipeline.spare_groups.push(empty);
        status
    }

    /// Enters the blocks of a group into the maps, if the group is in the log; `address` is that of
    /// its first block. Ends the group's time in flight.
    fn publish(&mut self, group: &LogBatch, status: Status, address: u64) {
        if status.is_ok() {
            publish_group(&self.pool, group, address);
            if group.frees {
                self.space.enospc_backoff = 0;
            }
        }
        self.pool.segments().end_in_flight(group.pages, group.payload_bytes(self.pool.align()));
    }

    /// Waits for the oldest group. Returns the group, its status and the address of its first
    /// block.
    fn finish_io(&mut self) -> Option<(LogBatch, Status, u64)> {
        let InFlightBatch { group, number, segment, address, len } =
            self.pipeline.batches.pop_front()?;
        let next = self.pipeline.oldest();
        debug_assert!(
            next.is_none_or(|next| next == number.saturating_add(1)),
            "I2: {number}, then {next:?}"
        );
        let (write_batch, result) = self.log_writer().end().unwrap_or((None, Ok(())));
        if let Some(mut write_batch) = write_batch {
            write_batch.clear();
            self.pipeline.spare_write_batches.push(write_batch);
        }
        if let Err(error) = result {
            let what = if group.durable { "a write to the log or its sync" } else { "a write" };
            self.pool.latch(&format!("{what} failed: {error}"));
        }
        // Groups after a failed one are not in the log either.
        if self.pool.is_latched() {
            return Some((group, Status::IoErr, address));
        }
        if group.durable {
            self.unsynced.end_durable(segment);
            self.log.durable = number;
        } else {
            self.unsynced.add(segment, len);
        }
        self.pool.meters().completed(&group.records, number, len, group.durable);
        Some((group, Status::Ok, address))
    }

    /// Takes the blocks of a group that found no space out of memory, and refuses the waiting
    /// writes that contain copies of them.
    pub(super) fn abort(&mut self) {
        if !self.pool.is_latched() {
            let mut records = std::mem::take(&mut self.group.records);
            self.refuse_copies(&mut records);
            self.group.records = records;
        }
    }
}

impl LogBatch {
    /// Puts the bytes that follow the header into a write batch.
    fn pack<D: SegmentStore>(&mut self, write_batch: &mut WriteBatch, pool: &Pool<D>) {
        let align = pool.align();
        if let [Record { body, volume: Some(volume), first, .. }] = &self.records[..] {
            let blocks = match body {
                Body::Write(payload) => payload.blocks().len() as u64,
                Body::Zero(blocks) => u64::from(*blocks),
                _ => 0,
            };
            write_batch.set_range(blocks_of(volume.meta.id, *first, blocks));
        }
        let mut changes = self.changes.drain(..);
        let parts = self.records.iter().filter_map(|record| match &record.body {
            Body::Write(payload) => Some((is_packed(record), Part::Write(payload.clone()))),
            Body::Catalogue(_) if record.durable => {
                changes.next().map(|bytes| (false, Part::Bytes(bytes)))
            }
            _ => None,
        });
        if !self.records.iter().any(is_packed) {
            parts.for_each(|(_, part)| write_batch.push(part));
            return;
        }
        // Encrypted blocks do not fill pages. A disk takes parts that end within a page by one
        // command each, and some file systems lock the file for such a write.
        let mut all = pool.memory().take_beyond(self.places.payload_bytes(align) as usize);
        let (mut places, mut end) = (Places::default(), 0);
        for (is_packed, part) in parts {
            let bytes = part.bytes();
            let at = places.add(is_packed, bytes.len() as u32, align) as usize;
            all[end..at].fill(0);
            end = at + bytes.len();
            all[at..end].copy_from_slice(bytes);
        }
        all[end..].fill(0);
        write_batch.push(Part::Write(Arc::new(Payload::new(all, Vec::new()))));
    }
}

// How durable the log is.

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
    fn add(&mut self, segment: u32, len: u32) {
        self.segments.insert(segment);
        self.bytes += u64::from(len);
    }

    /// Notes that a durable group in this segment has completed: with it, all groups before it are
    /// durable.
    fn end_durable(&mut self, segment: u32) {
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
    fn durability(&mut self, segment: u32) -> Result<Durability, Status> {
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

// What happens to the records of a group that has ended.

/// The answers to records: what they still have to report, and the threads to wake.
#[derive(Default)]
pub(super) struct Answers {
    /// Volumes with a write that was answered early and then found no space: their next flush
    /// returns the error.
    lost: BTreeSet<u32>,
    /// Completion queues that got answers, and whose owners are to be woken.
    wake_list: Vec<Arc<CompletionQueue<Reply>>>,
}

/// Enters a group's blocks into the maps; `address` is that of the first block. If a map cannot be
/// changed, the pool latches; opening it again reports the cause.
pub(super) fn publish_group<D: SegmentStore>(pool: &Pool<D>, group: &LogBatch, address: u64) {
    if let Err(error) = put(pool, group, address) {
        pool.latch(&format!("a map cannot be changed: {error}"));
    }
}

fn put<D: SegmentStore>(pool: &Pool<D>, group: &LogBatch, address: u64) -> Result<(), VolumeError> {
    let (align, mut places) = (pool.align(), Places::default());
    let copies = pool.volumes().copies;
    let mut maps = Apply::new(pool.segments(), copies);
    let mut entries = Vec::new();
    for record in &group.records {
        match (&record.body, &record.volume) {
            (Body::Write(payload), Some(volume)) => {
                let payload_bytes = payload.bytes().len() as u32;
                let at = address + places.add(payload.is_sealed(), payload_bytes, align);
                entries.clear();
                entries.extend(payload.blocks().iter().map(|stored| {
                    let place = at + u64::from(stored.offset);
                    Entry::new(place, stored.len, stored.codec, stored.crc)
                }));
                maps.publish(volume, record.first, &entries, record.serial)?;
            }
            (Body::Zero(blocks), Some(volume)) => {
                maps.zero(volume, record.first, u64::from(*blocks))?;
                volume.retire(record.first, *blocks, record.serial);
            }
            (Body::Move(moved), _) => {
                let segments = pool.segments();
                let is_left = |location: Entry| {
                    moved.pages.contains(&segments.split(location.address()).0)
                        || moved.lost.contains(&location)
                };
                let volumes = pool.volumes();
                // A block that could not be moved stays in its segment, which is therefore not
                // freed.
                _ = relocate::blocks(&volumes, &moved.moves, &mut maps);
                if !moved.pages.is_empty() || !moved.lost.is_empty() {
                    relocate::pages(&volumes, &moved.spans, is_left, &moved.lost, &mut maps);
                    maps.tally().dirtied += pool.roots().leave(is_left) as u64;
                }
            }
            (Body::Catalogue(change), _) if record.durable => {
                pool.volumes().apply(change, &mut maps)?;
                let len = change.print().len() as u32;
                places.add(false, len.next_multiple_of(align), align);
            }
            _ => {}
        }
    }
    Ok(())
}

impl Answers {
    /// Answers all records of the group. [`Answers::wake`] wakes the threads that wait for them.
    pub(super) fn answer<D: SegmentStore>(
        &mut self,
        pool: &Pool<D>,
        group: &mut LogBatch,
        status: Status,
    ) {
        for record in &mut group.records {
            let volume = record.volume.as_ref().map(|volume| volume.meta.id);
            if status == Status::NoSpc && matches!(record.body, Body::Write(_)) {
                pool.meters().refused();
            }
            let Some(reply) = &mut record.reply else {
                // This write was answered early. If it failed, the volume's next flush returns the
                // error.
                if let Some(id) = volume {
                    pool.dismiss();
                    if !status.is_ok() {
                        self.lost.insert(id);
                    }
                }
                continue;
            };
            let status = match &record.body {
                // A change that was refused before it entered the group.
                Body::Catalogue(_) if !record.durable => {
                    Status::from_u8(record.serial as u8).expect("it was put there as a status")
                }
                Body::Flush if volume.is_some_and(|id| self.lost.remove(&id)) => match status {
                    Status::Ok => Status::NoSpc,
                    status => status,
                },
                Body::Flush | Body::Stop if status == Status::NoSpc => Status::Ok,
                Body::Checkpoint if status.is_ok() && group.unchecked => Status::NoSpc,
                _ => status,
            };
            let to = reply.answer(status);
            if self.wake_list.last().is_none_or(|last| !Arc::ptr_eq(last, to)) {
                self.wake_list.push(Arc::clone(to));
            }
        }
    }

    /// Wakes the threads that wait for the answers.
    pub(super) fn wake(&mut self) {
        self.wake_list.drain(..).for_each(|queue| _ = queue.event_count().notify());
    }
}
