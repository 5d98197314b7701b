//! The way through the gate, for channels that have one.

use super::Stack;
use crate::clock::Clock;
use crate::device::DeviceQueue;
use crate::request::{Done, Request};
use crate::sched::Scheduler;
use crate::units::Nanos;
use crate::zone::gate::Gate;

impl<S: Scheduler, Q: DeviceQueue, C: Clock, G: Gate> Stack<S, Q, C, G> {
    /// What is on its way up, behind the gate.
    #[inline(always)]
    pub(super) fn homeward(&mut self) -> &mut Done {
        if G::ACTIVE { self.passage.homeward() } else { &mut self.done }
    }

    /// Moves what was pushed on to the gate, stamped, and starts what can be started.
    pub(super) fn unplug_into_gate(&mut self, now: Nanos) {
        for mut request in self.plug.drain() {
            request.stamp(now);
            self.gate.enter(request, &mut self.passage);
        }
        self.come_through(now);
        self.dispatch(now);
        while self.catch_up(now) {}
    }

    /// Lets the gate do something that takes its time; says whether it did.
    pub(super) fn catch_up(&mut self, now: Nanos) -> bool {
        let busy = self.gate.catch_up(&mut self.passage);
        if busy {
            self.come_through(now);
            self.dispatch(now);
        }
        busy
    }

    /// Sends one request, of a flush sequence, into the gate.
    pub(super) fn enter_gate(&mut self, request: Request, now: Nanos) {
        self.gate.enter(request, &mut self.passage);
        self.come_through(now);
    }

    /// Takes what the device has completed through the gate, which may let others pass for it.
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

    /// The same, and lets pass what other channels have made way for.
    pub(super) fn poll_gate(&mut self, now: Nanos) {
        self.gate.poll(now, &mut self.passage);
        self.leave_gate(now);
    }

    /// Moves what has passed the gate on to the scheduler.
    fn come_through(&mut self, now: Nanos) {
        while let Some(request) = self.passage.next() {
            self.sched.insert(request, now);
        }
    }
}
