//! The device queue that all channels share, for devices that complete requests later: any thread
//! that waits for a completion starts requests here and polls.

use super::flights::{Flights, Landed};
use super::{Front, Left, Queued, Report};
use crate::device::{DeviceQueue, Due};
use crate::request::{Batch, Done};
use crate::units::Nanos;

/// The state that only the holder of the combining lock accesses.
#[derive(Debug)]
pub(super) struct Engine<Q> {
    queue: Q,
    flights: Flights,
    batch: Batch,
    done: Done,
    picked: Vec<Queued>,
    reports: Vec<Report>,
    /// Until when starting is pointless, because the queue left requests unstarted.
    blocked_until: Option<Nanos>,
}

/// The arguments of one turn with the shared queue.
pub(super) struct Pass<'a, F: Front> {
    pub(super) front: &'a F,
    pub(super) lane: &'a mut F::Lane,
    pub(super) now: Nanos,
    /// Completed requests, which return to their channels after the turn.
    pub(super) landed: &'a mut Vec<Landed>,
}

impl<Q: DeviceQueue> Engine<Q> {
    /// The shared queue of a device that executes `depth` requests at once.
    pub(super) fn new(queue: Q, depth: u16) -> Engine<Q> {
        let count = usize::from(depth);
        Engine {
            queue,
            flights: Flights::new(depth),
            batch: Batch::with_capacity(count),
            done: Done::with_capacity(count),
            picked: Vec::with_capacity(count),
            reports: Vec::with_capacity(2 * count),
            blocked_until: None,
        }
    }

    /// Polls for completions and starts requests until there are no more of either, or until it has
    /// started `most`. Returns the number of started requests, and whether work is left.
    pub(super) fn turn<F: Front>(&mut self, pass: &mut Pass<'_, F>, most: usize) -> (usize, bool) {
        let mut started = 0;
        self.queue.poll(pass.now, &mut self.done);
        loop {
            self.land(pass.landed);
            pass.front.report(&mut self.reports);
            let room = self.room(pass.now).min(pass.landed.capacity() - pass.landed.len());
            let left = pass.front.dispatch(pass.lane, pass.now, room, &mut self.picked);
            if self.picked.is_empty() {
                return (started, left == Left::Undone);
            }
            started += self.picked.len();
            self.start(pass.now, pass.landed);
            if started >= most {
                self.land(pass.landed);
                pass.front.report(&mut self.reports);
                return (started, true);
            }
        }
    }

    fn room(&self, now: Nanos) -> usize {
        if self.blocked_until.is_some_and(|until| now < until) {
            return 0;
        }
        self.flights.room().min(self.queue.room())
    }

    fn land(&mut self, landed: &mut Vec<Landed>) {
        while let Some(ended) = self.done.take() {
            let known = self.flights.land(ended, landed, &mut self.reports);
            debug_assert!(known.is_ok(), "the engine started it");
        }
    }

    fn start(&mut self, now: Nanos, landed: &mut Vec<Landed>) {
        for queued in self.picked.drain(..) {
            self.flights.launch(queued, None, &mut self.batch);
        }
        self.queue.start(now, &mut self.batch, &mut self.done);
        self.blocked_until = None;
        if !self.batch.is_empty() {
            self.take_leftovers(now, landed);
        }
    }

    #[cold]
    fn take_leftovers(&mut self, now: Nanos, landed: &mut Vec<Landed>) {
        let broken = self.flights.take_leftovers(&mut self.batch, &mut self.reports, landed);
        if !broken {
            self.blocked_until = Some(match self.queue.due() {
                Due::At(at) if at > now => at,
                _ => now + 1,
            });
        }
    }

    /// Lets the queue complete requests that only wait for a point in time, if all requests in
    /// flight belong to one channel, which is being dropped. The next turn finds the completions.
    pub(super) fn abort(&mut self, home: u16) {
        if self.flights.are_of(home) {
            self.queue.abort(&mut self.done);
        }
    }

    /// When a thread has to poll again.
    pub(super) fn due(&self) -> Due {
        let blocked = self.blocked_until.map_or(Due::Never, Due::At);
        self.queue.due().earlier(blocked)
    }
}
