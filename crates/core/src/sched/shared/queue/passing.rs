//! The fast path of the scheduler: if nothing else waits, requests stay with their thread.
//!
//! The channel checks its requests by itself. It asks the front whether they may go and in which
//! order, and runs them on its own device queue, which completes them at once. Such requests enter
//! no submit ring, no order and no completion queue.

use blockyard_sync::atomics::yield_now;

use super::ScheduledQueue;
use crate::device::DeviceQueue;
use crate::request::{Batch, Done};
use crate::sched::shared::{Front, NotPassing, Passing, Queued};
use crate::units::Nanos;

/// How often a thread yields the CPU for a batch that may be able to pass soon, before it takes the
/// slow path. The thread in its way was usually preempted, and being served by another thread costs
/// more than waiting for it.
const YIELDS_MAX: usize = 8;

/// How often a thread dispatches waiting requests before it adds its own to them.
const HELPS_MAX: usize = 2;

impl<Q: DeviceQueue, F: Front> ScheduledQueue<Q, F> {
    /// Passes as much of a batch as possible, from its start. Completed requests go into `done`.
    #[inline]
    pub(super) fn pass(&mut self, now: Nanos, batch: &mut Batch, done: &mut Done) {
        let (mut yields, mut helps) = (YIELDS_MAX, HELPS_MAX);
        let most = usize::from(self.shared.hand);
        // Requests that this queue delays, because a delay fault was armed meanwhile, hold the tags
        // that passed requests would need.
        while !batch.is_empty()
            && self.flights.count() == 0
            && self.own.is_immediate()
            && self.sheaf.look_at(batch, most)
        {
            let ScheduledQueue { shared, lane, sheaf, .. } = self;
            let passing = loop {
                match shared.front.pass(lane, sheaf, now) {
                    Err(NotPassing::Busy) if yields > 0 => {
                        yields -= 1;
                        yield_now();
                    }
                    answer => break answer,
                }
            };
            match passing {
                Ok(passing) => self.run(now, passing, batch, done),
                Err(NotPassing::Behind) if helps > 0 => {
                    helps -= 1;
                    self.help(now, Some(done));
                }
                Err(_) => return,
            }
        }
    }

    /// Runs the requests that pass.
    #[inline]
    fn run(&mut self, now: Nanos, passing: Passing, batch: &mut Batch, done: &mut Done) {
        let ScheduledQueue { shared, lane, sheaf, .. } = self;
        sheaf.arrange(batch);
        let keeps_tags = sheaf.has_tags_below(shared.depth);
        if keeps_tags && sheaf.count() == batch.len() {
            self.own.start(now, batch, done);
            self.batch.take_back(batch);
        } else {
            batch.pass_on(sheaf.count(), &mut self.batch);
            if keeps_tags {
                self.own.start(now, &mut self.batch, done);
            }
        }
        let is_whole = self.batch.is_empty();
        let counts = if is_whole { sheaf.counts() } else { sheaf.started(&self.batch) };
        let is_awaited = counts != [0; 2] && shared.front.passed(lane, counts);
        if !is_whole {
            self.pass_with_tags(now, !keeps_tags, done);
        } else if is_awaited || passing.is_called {
            self.help(now, Some(done));
        }
    }

    /// Gives passed requests device tags, and starts them if that was not tried yet. Those that do
    /// not start return to the order.
    #[cold]
    fn pass_with_tags(&mut self, now: Nanos, starts: bool, done: &mut Done) {
        let (home, passer) = (self.home.number(), self.shared.front.passer(&self.lane));
        self.out += self.batch.len();
        for _ in 0..self.batch.len() {
            if let Some(started) = self.batch.next() {
                let queued = Queued::take(started, home);
                self.flights.launch(queued, Some(passer), &mut self.batch);
            }
        }
        if starts {
            self.own.start(now, &mut self.batch, &mut self.results);
        }
        self.settle();
        self.help(now, Some(done));
    }
}
