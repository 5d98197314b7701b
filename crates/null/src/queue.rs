//! What one channel holds of a null device.
//!
//! In the common case (`irqmode` `none`, nothing armed, no limits) a batch is one loop: each
//! request is carried out and completed. Everything else is decided once a batch and goes another
//! way.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use blockyard_core::{Batch, DeviceQueue, Done, Due, Nanos, SECTOR_SHIFT, Started, Status};
use blockyard_sync::published::Reader;

use crate::config::IrqMode;
use crate::device::Shared;
use crate::faults::{Armed, Strike};
use crate::locked_zones::LockedZones;
use crate::transfer::Outcome;
use crate::zone_set::ZoneSet;

/// After how many nanoseconds a queue asks again for a tag that other channels hold, or offers a
/// requeued request again.
const RETRY_NS: u64 = 50_000;

/// What one channel holds of a null device.
pub struct NullQueue<Z: ZoneSet = LockedZones> {
    shared: Arc<Shared<Z>>,
    armed: Reader<Armed>,
    /// Nothing but an armed fault keeps this queue from the short way.
    short: bool,
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
}

impl<Z: ZoneSet> NullQueue<Z> {
    pub(crate) fn new(shared: Arc<Shared<Z>>, hardware: Option<usize>) -> NullQueue<Z> {
        let depth = usize::from(shared.config.hw_queue_depth);
        let short = shared.config.irqmode == IrqMode::None
            && shared.bandwidth.is_none()
            && hardware.is_none();
        NullQueue {
            armed: shared.faults.watch(),
            short,
            depth,
            hardware,
            held: Done::with_capacity(depth),
            held_until: VecDeque::with_capacity(depth),
            timing_out: VecDeque::with_capacity(depth),
            retry_at: None,
            shared,
        }
    }

    fn in_flight(&self) -> usize {
        self.held_until.len() + self.timing_out.len()
    }

    /// Starts requests one by one, each after all the questions.
    #[cold]
    fn start_carefully(&mut self, now: Nanos, armed: Armed, batch: &mut Batch, done: &mut Done) {
        while !batch.is_empty() {
            let mut tags = self.take_tags(batch.len().min(self.room()));
            if tags == 0 {
                if self.in_flight() == 0 {
                    // The tags are with other channels, which do not tell when they give them back.
                    self.retry_at = Some(now + RETRY_NS);
                }
                return;
            }
            while tags > 0 {
                let Some(started) = batch.next() else { break };
                if !self.start_one(now, armed, started, batch, done) {
                    return self.give_tags(tags);
                }
                tags -= 1;
            }
            self.give_tags(tags);
        }
    }

    /// Takes up to `wanted` tags of the shared hardware queue, if there is one.
    fn take_tags(&self, wanted: usize) -> usize {
        match self.hardware {
            Some(queue) => self.shared.queues[queue].take(wanted as u32) as usize,
            None => wanted,
        }
    }

    /// Starts one request, which holds a tag; `false` if it went back into the batch.
    fn start_one(
        &mut self,
        now: Nanos,
        armed: Armed,
        started: Started,
        batch: &mut Batch,
        done: &mut Done,
    ) -> bool {
        if armed.timeout || armed.requeue {
            match self.shared.faults.strike() {
                None => {}
                Some(Strike::Timeout) => {
                    let wait_ns = self.shared.config.request_timeout_ms * 1_000_000;
                    self.timing_out.push_back((now + wait_ns, started));
                    return true;
                }
                Some(Strike::Requeue) => {
                    batch.put_back(started);
                    self.retry_at = Some(now + RETRY_NS);
                    return false;
                }
            }
        }
        if let Some(bandwidth) = &self.shared.bandwidth
            && started.op().has_data()
            && let Err(at) = bandwidth.take(now.0, started.sectors() << SECTOR_SHIFT)
        {
            batch.put_back(started);
            self.retry_at = Some(Nanos(at));
            return false;
        }
        let faults = armed.badblocks.then_some(&self.shared.faults);
        let outcome = self.shared.carry_out(&started, faults);
        if outcome == Outcome::BreakUp {
            batch.break_up(started);
            return false;
        }
        let until = match self.shared.config.irqmode {
            IrqMode::None => {
                complete(started, outcome, done);
                self.give_tags(1);
                return true;
            }
            IrqMode::Softirq => Nanos(0),
            IrqMode::Timer => now + self.shared.config.completion_nsec,
        };
        complete(started, outcome, &mut self.held);
        self.held_until.push_back(until);
        true
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
        while let Some(started) = batch.next() {
            if let Some(next) = batch.peek() {
                self.shared.expect(next);
            }
            match self.shared.carry_out(&started, None) {
                Outcome::Done(status) => done.complete(started, status),
                Outcome::Landed(at) => done.complete_append(started, at),
                Outcome::BreakUp => return batch.break_up(started),
            }
        }
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

impl<Z: ZoneSet> fmt::Debug for NullQueue<Z> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NullQueue").field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}
