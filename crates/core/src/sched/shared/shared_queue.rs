//! The device queue that all channels share, for devices that complete requests later: any thread
//! that waits for a completion starts requests here and polls.

use super::in_flight::{CompletedChain, InFlightTable};
use super::{Left, QueuedRequest, Report, SchedulerQueue};
use crate::device::{DeviceQueue, Due};
use crate::request::{Batch, CompletionBatch};
use crate::units::Nanos;

/// The state that only the holder of the combining lock accesses.
#[derive(Debug)]
pub(super) struct SharedQueue<Q> {
    queue: Q,
    in_flight: InFlightTable,
    batch: Batch,
    done: CompletionBatch,
    picked: Vec<QueuedRequest>,
    reports: Vec<Report>,
    /// Until when starting is pointless, because the queue left requests unstarted.
    blocked_until: Option<Nanos>,
}

/// The arguments of one turn with the shared queue.
pub(super) struct DispatchRound<'a, F: SchedulerQueue> {
    pub(super) scheduler_queue: &'a F,
    pub(super) ring: &'a mut F::SubmitRing,
    pub(super) now: Nanos,
    /// Completed requests, which return to their channels after the turn.
    pub(super) completed: &'a mut Vec<CompletedChain>,
}

impl<Q: DeviceQueue> SharedQueue<Q> {
    /// The shared queue of a device that executes `depth` requests at once.
    pub(super) fn new(queue: Q, depth: u16) -> SharedQueue<Q> {
        let count = usize::from(depth);
        SharedQueue {
            queue,
            in_flight: InFlightTable::new(depth),
            batch: Batch::with_capacity(count),
            done: CompletionBatch::with_capacity(count),
            picked: Vec::with_capacity(count),
            reports: Vec::with_capacity(2 * count),
            blocked_until: None,
        }
    }

    /// Polls for completions and starts requests until there are no more of either, or until it has
    /// started `most`. Returns the number of started requests, and whether work is left.
    pub(super) fn round<F: SchedulerQueue>(
        &mut self,
        round: &mut DispatchRound<'_, F>,
        most: usize,
    ) -> (usize, bool) {
        let mut started = 0;
        self.queue.poll(round.now, &mut self.done);
        loop {
            self.complete(round.completed);
            round.scheduler_queue.report(&mut self.reports);
            let room = self.room(round.now).min(round.completed.capacity() - round.completed.len());
            let left =
                round.scheduler_queue.dispatch(round.ring, round.now, room, &mut self.picked);
            if self.picked.is_empty() {
                return (started, left == Left::Undone);
            }
            started += self.picked.len();
            self.start(round.now, round.completed);
            if started >= most {
                self.complete(round.completed);
                round.scheduler_queue.report(&mut self.reports);
                return (started, true);
            }
        }
    }

    fn room(&self, now: Nanos) -> usize {
        if self.blocked_until.is_some_and(|until| now < until) {
            return 0;
        }
        self.in_flight.room().min(self.queue.room())
    }

    fn complete(&mut self, completed: &mut Vec<CompletedChain>) {
        while let Some(ended) = self.done.take() {
            let known = self.in_flight.complete(ended, completed, &mut self.reports);
            debug_assert!(known.is_ok(), "the shared_queue started it");
        }
    }

    fn start(&mut self, now: Nanos, completed: &mut Vec<CompletedChain>) {
        for queued in self.picked.drain(..) {
            self.in_flight.start(queued, None, &mut self.batch);
        }
        self.queue.start(now, &mut self.batch, &mut self.done);
        self.blocked_until = None;
        if !self.batch.is_empty() {
            self.requeue_unstarted(now, completed);
        }
    }

    #[cold]
    fn requeue_unstarted(&mut self, now: Nanos, completed: &mut Vec<CompletedChain>) {
        let broken =
            self.in_flight.requeue_unstarted(&mut self.batch, &mut self.reports, completed);
        if !broken {
            self.blocked_until = Some(match self.queue.due() {
                Due::At(at) if at > now => at,
                _ => now + 1,
            });
        }
    }

    /// Lets the queue complete requests that only wait for a point in time, if all requests in
    /// flight belong to one channel, which is being dropped. The next turn finds the completions.
    pub(super) fn abort(&mut self, target: u16) {
        if self.in_flight.all_belong_to(target) {
            self.queue.abort(&mut self.done);
        }
    }

    /// When a thread has to poll again.
    pub(super) fn due(&self) -> Due {
        let blocked = self.blocked_until.map_or(Due::Never, Due::At);
        self.queue.due().earlier(blocked)
    }
}
