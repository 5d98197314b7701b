//! Groups in flight: how they are begun, and how they complete.
//!
//! After a long group, more are begun while it is in flight, to keep the disk busy. After a short
//! one, the next group is begun when the first has completed.

use std::collections::VecDeque;

use blockyard_core::Status;
use blockyard_store::log_writer::Part;
use blockyard_store::log_writer::{CommitWriter, Tasks, blocks_of};
use blockyard_store::{Commit, LogWriter, SegmentStore, WriteBatch};
use blockyard_volume_format::group::{self as format, Head};

use super::Committer;
use super::batch::LogBatch;
use super::publish;
use crate::checkpoint;
use crate::pool::Pool;
use crate::record::{Body, Record};
use crate::segments::AllocationClass;

/// A group in flight.
pub(super) struct InFlightBatch {
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
    log_writer: Option<CommitWriter<D::File, D::LogWriter>>,
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
        let (pages, bytes) = (self.group.pages, self.group.payload_bytes);
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
        let len = head_bytes + self.group.payload_bytes;
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
            payload_bytes: self.group.payload_bytes,
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
        self.group.pack(&mut write_batch);
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
            publish::group(&self.pool, group, address);
            if group.frees {
                self.space.enospc_backoff = 0;
            }
        }
        self.pool.segments().end_in_flight(group.pages, group.payload_bytes);
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
    fn pack(&mut self, write_batch: &mut WriteBatch) {
        if let [Record { body, volume: Some(volume), first, .. }] = &self.records[..] {
            let blocks = match body {
                Body::Write(payload) => payload.blocks().len() as u64,
                Body::Zero(blocks) => u64::from(*blocks),
                _ => 0,
            };
            write_batch.set_range(blocks_of(volume.meta.id, *first, blocks));
        }
        let mut changes = self.changes.drain(..);
        for record in &self.records {
            match &record.body {
                Body::Write(payload) => write_batch.push(Part::Write(payload.clone())),
                Body::Catalogue(_) if record.durable => {
                    changes
                        .next()
                        .into_iter()
                        .for_each(|bytes| write_batch.push(Part::Bytes(bytes)));
                }
                _ => {}
            }
        }
    }
}
