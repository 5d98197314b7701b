//! The per-channel queue of a null device, and the execution of its requests.
//!
//! In the common case (`irqmode` `none`, no fault armed, no limits) a batch is one loop that
//! executes and completes each request. The queue checks for all other cases once per batch and
//! handles them on a slow path.

use std::collections::VecDeque;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use blockyard_core::zone::{AtomicZoneSet, Erase, Transfer, ZoneOp, ZoneSet};
use blockyard_core::{
    Batch, CompletionBatch, DeviceQueue, Due, Flags, InlineRequest, Nanos, Op, SECTOR_SHIFT,
    Sector, Started, Status, Work, ZoneNo,
};
use blockyard_sync::rcu_cell::RcuReader;
use blockyard_sync::tag_semaphore::TagSemaphore;

use crate::config::IrqMode;
use crate::data::Data;
use crate::faults::{Armed, FaultHit, Faults};
use crate::shared::Shared;

/// Time in nanoseconds after which a queue asks again for a tag that other channels hold.
const TAG_RETRY_NS: u64 = 50_000;
/// Time in nanoseconds after which a queue that has its share of the tags checks whether the share
/// has grown, because another channel was closed. Usually its own completions free tags before
/// that.
const SHARE_RETRY_NS: u64 = 10_000_000;
/// Time in nanoseconds after which a requeued request is offered again.
const REQUEUE_NS: u64 = 1_000_000;

/// The result of starting a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StartResult {
    /// The request is complete, and its tag is free again.
    Completed,
    /// The request completes later and keeps its tag until then.
    InFlight,
    /// The request is back in the batch, and the device starts no further request of it.
    NotStarted,
}

/// The part of a null device that one channel owns.
pub struct NullQueue<Z: ZoneSet = AtomicZoneSet> {
    shared: Arc<Shared<Z>>,
    armed: RcuReader<Armed>,
    /// Only an armed fault prevents the fast path of this queue.
    short: bool,
    /// A read or a write only has to complete: there are neither zones nor memory.
    idle: bool,
    depth: usize,
    /// Index of the shared hardware queue.
    hardware: Option<usize>,
    /// Executed requests that complete later, oldest first; the next field has their completion
    /// times.
    held: CompletionBatch,
    held_until: VecDeque<Nanos>,
    /// Requests that will time out, oldest first.
    timing_out: VecDeque<(Nanos, Started)>,
    /// When to try the requests left in the batch again.
    retry_at: Option<Nanos>,
    /// After a requeue: nothing is started before this time.
    resume_at: Nanos,
}

impl<Z: ZoneSet> NullQueue<Z> {
    pub(crate) fn new(shared: Arc<Shared<Z>>, hardware: Option<usize>) -> NullQueue<Z> {
        let depth = usize::from(shared.config.hw_queue_depth);
        let short = shared.config.irqmode == IrqMode::None
            && shared.bandwidth.is_none()
            && hardware.is_none();
        if let Some(queue) = hardware {
            shared.queues[queue].join();
        }
        NullQueue {
            armed: shared.faults.watch(),
            short,
            idle: shared.zones.is_none() && shared.data.is_none(),
            depth,
            hardware,
            held: CompletionBatch::with_capacity(depth),
            held_until: VecDeque::with_capacity(depth),
            timing_out: VecDeque::with_capacity(depth),
            retry_at: None,
            resume_at: Nanos(0),
            shared,
        }
    }

    fn in_flight(&self) -> usize {
        self.held_until.len() + self.timing_out.len()
    }

    /// Starts requests one by one, with all checks. The tag of a request that completed serves the
    /// next one; the remaining tags are returned at the end.
    #[cold]
    fn start_carefully(
        &mut self,
        now: Nanos,
        armed: Armed,
        batch: &mut Batch,
        done: &mut CompletionBatch,
    ) {
        if now < self.resume_at {
            self.retry_at = Some(self.resume_at);
            return;
        }
        let mut tags = 0;
        while !batch.is_empty() {
            if tags == 0 {
                tags = self.take_tags(batch.len().min(self.room()));
            }
            if tags == 0 {
                if self.room() > 0 {
                    self.retry_at = self.tags_at(now);
                }
                return;
            }
            let Some(started) = batch.next() else { break };
            match self.start_one(now, armed, started, batch, done) {
                StartResult::Completed => {}
                StartResult::InFlight => tags -= 1,
                StartResult::NotStarted => break,
            }
        }
        self.give_tags(tags);
    }

    /// Takes up to `wanted` tags of the shared hardware queue, but not more than this channel's
    /// share. Without a shared queue all tags are available.
    fn take_tags(&self, wanted: usize) -> usize {
        let Some(queue) = self.hardware else { return wanted };
        let queue = &self.shared.queues[queue];
        queue.take(wanted.min(self.share_left(queue)) as u32) as usize
    }

    /// How many more tags of a shared hardware queue this channel may take.
    fn share_left(&self, queue: &TagSemaphore) -> usize {
        (queue.share() as usize).saturating_sub(self.in_flight())
    }

    /// When to ask for tags again, regardless of this channel's own requests in flight: those may
    /// take longer than the requests of other channels.
    fn tags_at(&self, now: Nanos) -> Option<Nanos> {
        let queue = &self.shared.queues[self.hardware?];
        // Other channels do not notify this one when they return tags or are closed.
        let retry_ns = if self.share_left(queue) > 0 { TAG_RETRY_NS } else { SHARE_RETRY_NS };
        Some(now + retry_ns)
    }

    /// Starts one request, which holds a tag.
    ///
    /// First, a merged request is broken up if a fault may apply, so that the fault affects a
    /// single bio. Then comes the bandwidth limit, and last the faults: each is checked once per
    /// request, and a request that does not pass is not charged.
    fn start_one(
        &mut self,
        now: Nanos,
        armed: Armed,
        started: Started,
        batch: &mut Batch,
        done: &mut CompletionBatch,
    ) -> StartResult {
        if armed.any() && started.is_merged() {
            batch.break_up(started);
            return StartResult::NotStarted;
        }
        let bytes = if started.op().has_data() { started.sectors() << SECTOR_SHIFT } else { 0 };
        let bandwidth = self.shared.bandwidth.as_ref().filter(|_| bytes > 0);
        if let Some(bandwidth) = bandwidth
            && let Err(at) = bandwidth.take(now.0, bytes)
        {
            batch.requeue(started);
            self.retry_at = Some(Nanos(at));
            return StartResult::NotStarted;
        }
        let strikes = armed.timeout || armed.requeue;
        match if strikes { self.shared.faults.hit() } else { None } {
            None => {}
            Some(FaultHit::Timeout) => {
                let wait_ns = self.shared.config.request_timeout_ms * 1_000_000;
                self.timing_out.push_back((now + wait_ns, started));
                return StartResult::InFlight;
            }
            Some(FaultHit::Requeue) => {
                if let Some(bandwidth) = bandwidth {
                    bandwidth.give_back(bytes);
                }
                batch.requeue(started);
                self.resume_at = now + REQUEUE_NS;
                self.retry_at = Some(self.resume_at);
                return StartResult::NotStarted;
            }
        }
        let faults = armed.badblocks.then_some(&self.shared.faults);
        let outcome = self.shared.execute(&started, faults, None);
        if outcome == TransferOutcome::BreakUp {
            if let Some(bandwidth) = bandwidth {
                bandwidth.give_back(bytes);
            }
            batch.break_up(started);
            return StartResult::NotStarted;
        }
        if armed.badblocks && outcome == TransferOutcome::Done(Status::IoErr) {
            self.shared.faults.disarm_spent();
        }
        let until = match self.shared.config.irqmode {
            IrqMode::None => {
                complete(started, outcome, done);
                return StartResult::Completed;
            }
            IrqMode::Softirq => Nanos(0),
            IrqMode::Timer => now + self.shared.config.completion_nsec,
        };
        complete(started, outcome, &mut self.held);
        self.held_until.push_back(until);
        StartResult::InFlight
    }

    /// Returns tags to the shared hardware queue.
    fn give_tags(&self, tags: usize) {
        if let Some(queue) = self.hardware {
            self.shared.queues[queue].give(tags as u32);
        }
    }
}

#[inline]
fn complete(started: Started, outcome: TransferOutcome, done: &mut CompletionBatch) {
    match outcome {
        TransferOutcome::Done(status) => done.complete(started, status),
        TransferOutcome::Landed(at) => done.complete_append(started, at),
        TransferOutcome::BreakUp => unreachable!("the caller breaks it up"),
    }
}

impl<Z: ZoneSet> DeviceQueue for NullQueue<Z> {
    #[inline]
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        self.retry_at = None;
        let armed = **self.armed.get();
        if !self.short || armed.any() {
            return self.start_carefully(now, armed, batch, done);
        }
        let has_data = self.shared.has_data();
        while let Some(started) = batch.next() {
            // Prefetch for the request after the next: memory is slower than one copy.
            let soon = if has_data { reads_at(batch.get(1)) } else { None };
            match self.shared.execute(&started, None, soon) {
                TransferOutcome::Done(status) => done.complete(started, status),
                TransferOutcome::Landed(at) => done.complete_append(started, at),
                TransferOutcome::BreakUp => return batch.break_up(started),
            }
        }
    }

    #[inline]
    fn execute_inline(&mut self, single: InlineRequest) -> Option<Status> {
        if !self.short || self.armed.unchanged()?.any() {
            return None;
        }
        if self.idle {
            return Some(Status::Ok);
        }
        let (op, sector, sectors, data) =
            (single.op(), single.sector(), single.sectors(), single.data());
        Some(self.shared.execute_inline(op, sector, sectors, data))
    }

    #[inline]
    fn poll(&mut self, now: Nanos, done: &mut CompletionBatch) {
        if self.in_flight() == 0 {
            return;
        }
        let before = self.in_flight();
        while self.held_until.front().is_some_and(|&until| until <= now) {
            self.held_until.pop_front();
            done.take_from(&mut self.held);
        }
        while self.timing_out.front().is_some_and(|&(until, _)| until <= now) {
            let (_, started) = self.timing_out.pop_front().expect("there is a first");
            done.complete(started, Status::Timeout);
        }
        self.give_tags(before - self.in_flight());
    }

    #[inline]
    fn room(&self) -> usize {
        // Tags of a shared hardware queue are taken in `start`. Other channels do not notify this
        // one when they return tags, so a wait for room would never end.
        self.depth - self.in_flight()
    }

    fn due(&self) -> Due {
        let mut due = self.retry_at.map_or(Due::Never, Due::At);
        if let Some(&until) = self.held_until.front() {
            due = due.earlier(Due::At(until));
        }
        if let Some(&(until, _)) = self.timing_out.front() {
            due = due.earlier(Due::At(until));
        }
        due
    }

    #[inline]
    fn is_immediate(&mut self) -> bool {
        self.short && !self.armed.get().any()
    }

    fn abort(&mut self, done: &mut CompletionBatch) {
        let before = self.in_flight();
        self.held_until.clear();
        while done.take_from(&mut self.held) {}
        while let Some((_, started)) = self.timing_out.pop_front() {
            done.complete(started, Status::Timeout);
        }
        self.give_tags(before);
    }
}

impl<Z: ZoneSet> Drop for NullQueue<Z> {
    fn drop(&mut self) {
        self.give_tags(self.in_flight());
        if let Some(queue) = self.hardware {
            self.shared.queues[queue].leave();
        }
    }
}

impl<Z: ZoneSet> fmt::Debug for NullQueue<Z> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NullQueue").field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

// The execution of one request: the direction of its data, and its result.

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransferOutcome {
    /// With this status.
    Done(Status),
    /// As an append to this sector.
    Landed(Sector),
    /// Nothing was done: the request must be retried bio by bio, because only some bios fail.
    BreakUp,
}

/// The data of a write, an append or a write-zeroes.
struct Outbound<'a, W> {
    work: &'a W,
    data: Option<&'a Data>,
    /// Set while bad blocks are armed.
    faults: Option<&'a Faults>,
}

impl<W: Work> Transfer for Outbound<'_, W> {
    #[inline]
    fn may_fall_short(&self) -> bool {
        self.faults.is_some()
    }

    #[inline]
    fn admit(&mut self, at: Sector, sectors: u64) -> (u64, Status) {
        match self.faults {
            None => (sectors, Status::Ok),
            Some(faults) => admit(faults, at, sectors, self.work.is_merged()),
        }
    }

    #[inline]
    fn copy(&mut self, at: Sector, sectors: u64) {
        let Some(data) = self.data else { return };
        let flags = self.work.flags();
        if self.work.op() == Op::WriteZeroes {
            data.zero(at, sectors, flags.contains(Flags::NOUNMAP));
            return;
        }
        let through = flags.contains(Flags::FUA);
        let (mut at, mut left) = (at, Sector(sectors).bytes() as usize);
        for segment in self.work.segments() {
            data.write(at, &segment, left, through);
            if left <= segment.len_bytes {
                break;
            }
            left -= segment.len_bytes;
            at += Sector::containing(segment.len_bytes as u64).0;
        }
    }
}

/// How many sectors to transfer before a bad block, and the resulting status.
#[cold]
fn admit(faults: &Faults, at: Sector, sectors: u64, merged: bool) -> (u64, Status) {
    match faults.before_bad(at, sectors, merged) {
        None => (sectors, Status::Ok),
        Some(good) => (good, Status::IoErr),
    }
}

/// Reads the sectors before `end` into the segments of a request.
#[inline]
fn read_segments(
    data: &Data,
    work: &impl Work,
    end: Sector,
    readable_end: Sector,
    mut soon: Option<Sector>,
) {
    let mut at = work.sector();
    for mut segment in work.segments() {
        if at >= end {
            break;
        }
        let segment_sectors = Sector::containing(segment.len_bytes as u64).0;
        segment.len_bytes = segment.len_bytes.min(Sector(end - at).bytes() as usize);
        data.read(at, &segment, readable_end, soon.take());
        at += segment_sectors;
    }
}

/// The sector of a read; `None` for any other request.
#[inline]
fn reads_at(started: Option<&Started>) -> Option<Sector> {
    started.filter(|started| started.op() == Op::Read).map(Started::sector)
}

/// Frees the memory of zones that become empty.
pub(crate) struct Eraser<'a>(pub(crate) Option<&'a Data>);

impl Erase for Eraser<'_> {
    fn erase(&mut self, start: Sector, sectors: u64) {
        if let Some(data) = self.0 {
            data.zero(start, sectors, false);
        }
    }
}

impl<Z: ZoneSet> Shared<Z> {
    /// Whether the device stores data.
    #[inline]
    fn has_data(&self) -> bool {
        self.data.is_some()
    }

    /// Executes a request. `faults` is set while bad blocks are armed. `soon` is the sector of a
    /// later read, for a prefetch.
    #[inline]
    fn execute(
        &self,
        work: &impl Work,
        faults: Option<&Faults>,
        soon: Option<Sector>,
    ) -> TransferOutcome {
        let outcome = match work.op() {
            Op::Read => TransferOutcome::Done(self.read(work, faults, soon)),
            Op::Write => TransferOutcome::Done(self.write(work, faults)),
            Op::ZoneAppend => self.append(work, faults),
            _ => TransferOutcome::Done(self.execute_rare(work, faults)),
        };
        match outcome {
            TransferOutcome::Done(status) if !status.is_ok() && work.is_merged() => {
                TransferOutcome::BreakUp
            }
            outcome => outcome,
        }
    }

    /// Executes a read or a write of one bio while no fault is armed.
    // Not inlined, with its arguments in registers: keeps the caller's fast path, without zones and
    // memory, short.
    #[inline(never)]
    fn execute_inline(&self, op: Op, sector: Sector, sectors: u64, data: NonNull<u8>) -> Status {
        let single = InlineRequest::new(op, sector, sectors, data);
        match self.execute(&single, None, None) {
            TransferOutcome::Done(status) => status,
            TransferOutcome::Landed(_) | TransferOutcome::BreakUp => {
                unreachable!("no append, and nothing merged")
            }
        }
    }

    /// The zone that contains a request; `None` if the request crosses a zone boundary.
    #[inline]
    fn zone_of(&self, work: &impl Work) -> Option<ZoneNo> {
        let zones = self.geometry.zones.as_ref()?;
        let zone = zones.zone_of(work.sector());
        let last = zones.zone_of(Sector(work.end().0 - 1));
        (zone == last && zone.0 < zones.zone_count).then_some(zone)
    }

    #[inline]
    fn read(&self, work: &impl Work, faults: Option<&Faults>, mut soon: Option<Sector>) -> Status {
        let mut readable_end = Sector::NONE;
        let mut erasures = 0;
        let zone = self.zone_of(work);
        if let Some(zones) = &self.zones {
            let Some(zone) = zone else { return Status::IoErr };
            if self.has_data() {
                erasures = zones.erasures(zone);
            }
            match zones.readable_end(zone) {
                Ok(end) => readable_end = end,
                Err(status) => return status,
            }
        }
        let (sectors, status) = match faults {
            None => (work.sectors(), Status::Ok),
            Some(faults) => admit(faults, work.sector(), work.sectors(), work.is_merged()),
        };
        let Some(data) = &self.data else { return status };
        let end = work.sector() + sectors;
        loop {
            read_segments(data, work, end, readable_end, soon.take());
            let (Some(zones), Some(zone)) = (&self.zones, zone) else { return status };
            // Data are copied without a lock. A concurrent reset may have replaced them by zeros,
            // which later read as 0xFF, or they may have been written again. A reset lowers the
            // readable end and increments `erasures` before it erases, so a change is visible here.
            // The read then answers as of the moment when the zone was empty. The loop ends because
            // the readable end only falls.
            if erasures != zones.erasures(zone) && readable_end > Sector(0) {
                readable_end = Sector(0);
                continue;
            }
            match zones.readable_end(zone) {
                Ok(now) if now < readable_end.min(end) => readable_end = now,
                Ok(_) => return status,
                Err(status) => return status,
            }
        }
    }

    #[inline]
    fn write(&self, work: &impl Work, faults: Option<&Faults>) -> Status {
        let mut transfer = Outbound { work, data: self.data.as_ref(), faults };
        let (at, sectors) = (work.sector(), work.sectors());
        let Some(zones) = &self.zones else {
            let (sectors, status) = transfer.admit(at, sectors);
            transfer.copy(at, sectors);
            return status;
        };
        let Some(zone) = self.zone_of(work) else { return Status::IoErr };
        zones.write(zone, at, sectors, &mut transfer).map_or_else(|status| status, |()| Status::Ok)
    }

    #[inline]
    fn append(&self, work: &impl Work, faults: Option<&Faults>) -> TransferOutcome {
        let mut transfer = Outbound { work, data: self.data.as_ref(), faults };
        let zone = self.zone_of(work);
        let (Some(zones), Some(zone)) = (&self.zones, zone) else {
            return TransferOutcome::Done(Status::NotSupp);
        };
        match zones.append(zone, work.sectors(), &mut transfer) {
            Ok(at) => TransferOutcome::Landed(at),
            Err(status) => TransferOutcome::Done(status),
        }
    }

    fn execute_rare(&self, work: &impl Work, faults: Option<&Faults>) -> Status {
        let op = match work.op() {
            Op::Flush => {
                if let Some(data) = &self.data {
                    data.flush();
                }
                return Status::Ok;
            }
            Op::Discard => return self.discard(work, faults),
            Op::WriteZeroes => return self.write(work, faults),
            Op::ZoneResetAll => {
                let Some(zones) = &self.zones else { return Status::NotSupp };
                zones.reset_all(&mut Eraser(self.data.as_ref()));
                return Status::Ok;
            }
            Op::ZoneReset => ZoneOp::Reset,
            Op::ZoneOpen => ZoneOp::Open,
            Op::ZoneClose => ZoneOp::Close,
            Op::ZoneFinish => ZoneOp::Finish,
            Op::Read | Op::Write | Op::ZoneAppend => unreachable!("handled by `execute`"),
        };
        let (Some(zones), Some(geometry)) = (&self.zones, &self.geometry.zones) else {
            return Status::NotSupp;
        };
        let zone = geometry.zone_of(work.sector());
        if zone.0 >= geometry.zone_count {
            return Status::Inval;
        }
        let done = zones.manage(zone, op, &mut Eraser(self.data.as_ref()));
        done.map_or_else(|status| status, |()| Status::Ok)
    }

    fn discard(&self, work: &impl Work, faults: Option<&Faults>) -> Status {
        if self.limits.discard_sectors_max == 0 {
            return Status::NotSupp;
        }
        let (at, sectors) = (work.sector(), work.sectors());
        let (sectors, status) = match faults {
            None => (sectors, Status::Ok),
            Some(faults) => admit(faults, at, sectors, work.is_merged()),
        };
        if let Some(data) = &self.data {
            data.zero(at, sectors, false);
        }
        status
    }
}
