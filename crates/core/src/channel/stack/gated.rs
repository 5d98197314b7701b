//! The path through the zone write plug, for channels that have one.

use super::Stack;
use crate::clock::Clock;
use crate::device::DeviceQueue;
use crate::request::{Done, Request};
use crate::sched::Scheduler;
use crate::units::Nanos;
use crate::zone::gate::Gate;

impl<S: Scheduler, Q: DeviceQueue, C: Clock, G: Gate> Stack<S, Q, C, G> {
    /// The completion batch above the zone write plug: requests that the channel has to complete.
    #[inline(always)]
    pub(super) fn homeward(&mut self) -> &mut Done {
        if G::ACTIVE { self.passage.homeward() } else { &mut self.done }
    }

    /// Submits the plugged requests, stamped with the time, to the zone write plug and starts what
    /// can start.
    pub(super) fn unplug_into_gate(&mut self, now: Nanos) {
        for mut request in self.plug.drain() {
            request.stamp(now);
            self.gate.enter(request, &mut self.passage);
        }
        self.come_through(now);
        self.dispatch(now);
        while self.catch_up(now) {}
    }

    /// Lets the zone write plug do one slow step; returns whether it did one.
    pub(super) fn catch_up(&mut self, now: Nanos) -> bool {
        let busy = self.gate.catch_up(&mut self.passage);
        if busy {
            self.come_through(now);
            self.dispatch(now);
        }
        busy
    }

    /// Submits one request of a flush sequence to the zone write plug.
    pub(super) fn enter_gate(&mut self, request: Request, now: Nanos) {
        self.gate.enter(request, &mut self.passage);
        self.come_through(now);
    }

    /// Passes the device's completions through the zone write plug, which may release waiting
    /// writes.
    pub(super) fn leave_gate(&mut self, now: Nanos) {
        while let Some(ended) = self.done.take() {
            if ended.is_returned() {
                self.tags.put(ended.tag().expect("it was started"));
                self.take_returned(ended);
            } else {
                self.gate.leave(ended, &mut self.passage);
            }
        }
        while let Some(ended) = self.passage.next_again() {
            if let Some(tag) = ended.tag() {
                self.tags.put(tag);
            }
            self.gate.take_back(ended.append_again(), &mut self.passage);
        }
        self.come_through(now);
    }

    /// Handles the device's completions, and releases writes that waited for other channels.
    pub(super) fn poll_gate(&mut self, now: Nanos) {
        self.gate.poll(now, &mut self.passage);
        self.leave_gate(now);
    }

    /// Passes requests that the zone write plug has released to the scheduler.
    fn come_through(&mut self, now: Nanos) {
        while let Some(request) = self.passage.next() {
            self.sched.insert(request, now);
        }
    }
}
