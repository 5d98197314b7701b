//! When the channel next has work to do, and the sleep until then.

use std::time::{Duration, Instant};

use super::Stack;
use crate::channel::Channel;
use crate::clock::{Clock, Monotonic};
use crate::device::{DeviceQueue, Due};
use crate::sched::Scheduler;
use crate::units::Nanos;
use crate::zone::gate::Gate;

/// Longest sleep while a write waits in the zone write plug. Other channels wake this one; the
/// bound covers a wakeup that is missing.
const GATE_SLEEP_MAX: Duration = Duration::from_millis(50);

impl<S: Scheduler, Q: DeviceQueue, C: Clock, G: Gate> Stack<S, Q, C, G> {
    /// When the layers below the zone write plug next have work to do.
    pub(super) fn due_below(&self) -> Due {
        if !self.done.is_empty() || (G::ACTIVE && self.passage.is_anybody_home()) {
            return Due::At(Nanos(0));
        }
        let room = self.queue.room().min(self.tags.room());
        if room > 0 && !self.sched.is_empty() && self.queue.due() == Due::Never {
            return Due::At(Nanos(0));
        }
        self.queue.due()
    }

    /// Sleeps while other threads hold requests of this channel.
    #[cold]
    pub(super) fn wait_for_others(&mut self, deadline: Due) {
        let home = !self.done.is_empty() || (G::ACTIVE && self.passage.is_anybody_home());
        let goes = !self.sched.is_empty() && self.queue.room().min(self.tags.room()) > 0;
        if !home && !goes {
            let gate = if G::ACTIVE { self.gate.due() } else { Due::Never };
            self.queue.sleep(gate.earlier(deadline), &self.clock);
        }
    }

    /// Sleeps until `reap` would find a completion, or until the deadline.
    pub(super) fn sleep(&mut self, deadline: Option<Instant>) {
        if self.queue.waits_for_others() {
            let deadline = deadline.map_or(Due::Never, |at| Due::At(Monotonic::nanos_of(at)));
            return self.wait_for_others(deadline);
        }
        if G::ACTIVE && self.gate.waits() && self.due_below() == Due::Never {
            return self.gate.sleep(Monotonic::until(deadline, GATE_SLEEP_MAX));
        }
        let deadline = deadline.map_or(Due::Never, |at| Due::At(Monotonic::nanos_of(at)));
        match self.due() {
            Due::Never => {}
            due => {
                if let Due::At(at) = due.earlier(deadline) {
                    self.clock.sleep_until(at);
                }
            }
        }
    }
}
