//! The per-channel queue of a null device.
//!
//! In the common case (`irqmode` `none`, no fault armed, no limits) a batch is one loop that
//! executes and completes each request. The queue checks for all other cases once per batch and
//! handles them on a slow path.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use blockyard_core::{
    Batch, CompletionBatch, DeviceQueue, Due, InlineRequest, Nanos, Op, SECTOR_SHIFT, Sector,
    Started, Status, Work,
};
use blockyard_sync::rcu_cell::RcuReader;
use blockyard_sync::tag_semaphore::TagSemaphore;

use crate::backend::{Backend, TransferOutcome};
use crate::config::IrqMode;
use crate::faults::{Armed, FaultHit};
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

/// The part of a null device that one channel owns; `B` is where the device keeps its data.
pub struct NullQueue<B> {
    shared: Arc<Shared<B>>,
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

#[expect(private_bounds, reason = "no other crate has a backend; all these are private")]
impl<B: Backend> NullQueue<B> {
    pub(crate) fn new(shared: Arc<Shared<B>>, hardware: Option<usize>) -> NullQueue<B> {
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
            idle: shared.backend.is_idle(),
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
}

impl<B> NullQueue<B> {
    fn in_flight(&self) -> usize {
        self.held_until.len() + self.timing_out.len()
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

impl<B: Backend> DeviceQueue for NullQueue<B> {
    #[inline]
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        self.retry_at = None;
        let armed = **self.armed.get();
        if !self.short || armed.any() {
            return self.start_carefully(now, armed, batch, done);
        }
        if self.idle {
            let is_plain = |started: &Started| matches!(started.op(), Op::Read | Op::Write);
            while batch.get(0).is_some_and(is_plain) {
                let started = batch.next().expect("it is the first");
                done.complete(started, Status::Ok);
            }
        }
        let has_data = self.shared.backend.has_data();
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

impl<B> Drop for NullQueue<B> {
    fn drop(&mut self) {
        self.give_tags(self.in_flight());
        if let Some(queue) = self.hardware {
            self.shared.queues[queue].leave();
        }
    }
}

impl<B> fmt::Debug for NullQueue<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NullQueue").field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

/// The sector of a read; `None` for any other request.
#[inline]
fn reads_at(started: Option<&Started>) -> Option<Sector> {
    started.filter(|started| started.op() == Op::Read).map(Started::sector)
}
