//! What one channel holds of a null device.
//!
//! In the common case (`irqmode` `none`, nothing armed, no limits) a batch is one loop: each
//! request is carried out and completed. Everything else is decided once a batch and goes another
//! way.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use blockyard_core::zone::{WordZones, ZoneSet};
use blockyard_core::{
    Batch, DeviceQueue, Done, Due, Nanos, SECTOR_SHIFT, Single, Started, Status, Work,
};
use blockyard_sync::published::Reader;
use blockyard_sync::tag_budget::TagBudget;

use crate::config::IrqMode;
use crate::device::Shared;
use crate::faults::{Armed, Strike};
use crate::transfer::{Outcome, reads_at};

/// After how many nanoseconds a queue asks again for a tag that other channels hold.
const TAG_RETRY_NS: u64 = 50_000;
/// After how many nanoseconds a queue that has its share of the tags looks whether the share has
/// grown, because another channel was closed. Its own completions give it tags before that, unless
/// they take longer.
const SHARE_RETRY_NS: u64 = 10_000_000;
/// After how many nanoseconds a requeued request is offered again.
const REQUEUE_NS: u64 = 1_000_000;

/// Where a request went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Went {
    /// It is complete, and its tag free again.
    Out,
    /// It completes later, and keeps its tag until then.
    On,
    /// Into the batch again, which ends with that.
    Back,
}

/// What one channel holds of a null device.
pub struct NullQueue<Z: ZoneSet = WordZones> {
    shared: Arc<Shared<Z>>,
    armed: Reader<Armed>,
    /// Nothing but an armed fault keeps this queue from the short way.
    short: bool,
    /// A read or a write is nothing but its completion: there are neither zones nor memory.
    idle: bool,
    depth: usize,
    /// The shared hardware queue, as an index.
    hardware: Option<usize>,
    /// Requests that are carried out and complete later, oldest first, and when each does.
    held: Done,
    held_until: VecDeque<Nanos>,
    /// Requests that will time out, oldest first.
    timing_out: VecDeque<(Nanos, Started)>,
    /// When what was left in the batch is worth another try.
    retry_at: Option<Nanos>,
    /// Before this time nothing is started: a request was requeued.
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
            held: Done::with_capacity(depth),
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

    /// Starts requests one by one, each after all the questions. A tag whose request is complete
    /// serves the next one; what is left of them goes back at the end.
    #[cold]
    fn start_carefully(&mut self, now: Nanos, armed: Armed, batch: &mut Batch, done: &mut Done) {
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
                Went::Out => {}
                Went::On => tags -= 1,
                Went::Back => break,
            }
        }
        self.give_tags(tags);
    }

    /// Takes up to `wanted` tags of the shared hardware queue, if there is one, but no more than
    /// this channel's share.
    fn take_tags(&self, wanted: usize) -> usize {
        let Some(queue) = self.hardware else { return wanted };
        let queue = &self.shared.queues[queue];
        queue.take(wanted.min(self.share_left(queue)) as u32) as usize
    }

    /// How many tags of a shared hardware queue this channel may have beside those it has.
    fn share_left(&self, queue: &TagBudget) -> usize {
        (queue.share() as usize).saturating_sub(self.in_flight())
    }

    /// When it is worth while to ask for tags again, whatever becomes of the requests that this
    /// channel has in flight: they may take longer than those of others.
    fn tags_at(&self, now: Nanos) -> Option<Nanos> {
        let queue = &self.shared.queues[self.hardware?];
        // Other channels do not tell when they give tags back, nor when they are closed.
        let retry_ns = if self.share_left(queue) > 0 { TAG_RETRY_NS } else { SHARE_RETRY_NS };
        Some(now + retry_ns)
    }

    /// Starts one request, which holds a tag.
    ///
    /// First of all a merged request is broken up where a fault may strike, so that it strikes a
    /// bio. Then the bandwidth is asked for, and last the faults: each is asked once a request,
    /// and what did not pass is not charged.
    fn start_one(
        &mut self,
        now: Nanos,
        armed: Armed,
        started: Started,
        batch: &mut Batch,
        done: &mut Done,
    ) -> Went {
        if armed.any() && started.is_merged() {
            batch.break_up(started);
            return Went::Back;
        }
        let bytes = if started.op().has_data() { started.sectors() << SECTOR_SHIFT } else { 0 };
        let bandwidth = self.shared.bandwidth.as_ref().filter(|_| bytes > 0);
        if let Some(bandwidth) = bandwidth
            && let Err(at) = bandwidth.take(now.0, bytes)
        {
            batch.put_back(started);
            self.retry_at = Some(Nanos(at));
            return Went::Back;
        }
        let strikes = armed.timeout || armed.requeue;
        match if strikes { self.shared.faults.strike() } else { None } {
            None => {}
            Some(Strike::Timeout) => {
                let wait_ns = self.shared.config.request_timeout_ms * 1_000_000;
                self.timing_out.push_back((now + wait_ns, started));
                return Went::On;
            }
            Some(Strike::Requeue) => {
                if let Some(bandwidth) = bandwidth {
                    bandwidth.give_back(bytes);
                }
                batch.put_back(started);
                self.resume_at = now + REQUEUE_NS;
                self.retry_at = Some(self.resume_at);
                return Went::Back;
            }
        }
        let faults = armed.badblocks.then_some(&self.shared.faults);
        let outcome = self.shared.carry_out(&started, faults, None);
        if outcome == Outcome::BreakUp {
            if let Some(bandwidth) = bandwidth {
                bandwidth.give_back(bytes);
            }
            batch.break_up(started);
            return Went::Back;
        }
        if armed.badblocks && outcome == Outcome::Done(Status::IoErr) {
            self.shared.faults.disarm_spent();
        }
        let until = match self.shared.config.irqmode {
            IrqMode::None => {
                complete(started, outcome, done);
                return Went::Out;
            }
            IrqMode::Softirq => Nanos(0),
            IrqMode::Timer => now + self.shared.config.completion_nsec,
        };
        complete(started, outcome, &mut self.held);
        self.held_until.push_back(until);
        Went::On
    }

    /// Gives tags back to the shared hardware queue.
    fn give_tags(&self, tags: usize) {
        if let Some(queue) = self.hardware {
            self.shared.queues[queue].give(tags as u32);
        }
    }
}

#[inline]
fn complete(started: Started, outcome: Outcome, done: &mut Done) {
    match outcome {
        Outcome::Done(status) => done.complete(started, status),
        Outcome::Landed(at) => done.complete_append(started, at),
        Outcome::BreakUp => unreachable!("the caller breaks it up"),
    }
}

impl<Z: ZoneSet> DeviceQueue for NullQueue<Z> {
    #[inline]
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut Done) {
        self.retry_at = None;
        let armed = **self.armed.get();
        if !self.short || armed.any() {
            return self.start_carefully(now, armed, batch, done);
        }
        let has_data = self.shared.has_data();
        while let Some(started) = batch.next() {
            // The one after the next: memory takes longer to answer than one copy takes.
            let soon = if has_data { reads_at(batch.get(1)) } else { None };
            match self.shared.carry_out(&started, None, soon) {
                Outcome::Done(status) => done.complete(started, status),
                Outcome::Landed(at) => done.complete_append(started, at),
                Outcome::BreakUp => return batch.break_up(started),
            }
        }
    }

    #[inline]
    fn carry(&mut self, single: Single) -> Option<Status> {
        if !self.short || self.armed.unchanged()?.any() {
            return None;
        }
        if self.idle {
            return Some(Status::Ok);
        }
        let (op, sector, sectors, data) =
            (single.op(), single.sector(), single.sectors(), single.data());
        Some(self.shared.carry_single(op, sector, sectors, data))
    }

    #[inline]
    fn poll(&mut self, now: Nanos, done: &mut Done) {
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
        // Tags of a shared hardware queue are asked for at the start: other channels do not tell
        // when they give theirs back, so the answer here could never be waited for.
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

    fn abort(&mut self, done: &mut Done) {
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
