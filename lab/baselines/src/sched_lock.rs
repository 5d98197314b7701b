//! mq-deadline as Linux has always had it: one lock over insertion and dispatch.
//!
//! A submitter takes the lock to insert its requests, merging under the lock where it can, and
//! takes it again for each request that it dispatches. Every submitter dispatches, until the device
//! is full or no request waits. The policy is the product's: only the locking differs. In Linux the
//! lock spins and is granted in the order of arrival. A lock that goes to the first thread that
//! takes it mostly stays with one thread. A lock that parks its waiters is the usual choice in user
//! space.

use std::fmt;

use blockyard_core::sched::deadline::Deadline;
use blockyard_core::sched::shared::{
    Left, QueuedRequest, REQUESTS_MAX, Report, SchedulerQueue, SchedulerQueueConfig,
};
use blockyard_core::units::Nanos;
use blockyard_sync::lock::Lock;
use blockyard_sync::sleep_lock::SleepLock;
use blockyard_sync::spin_lock::SpinLock;

use crate::queued_lock;
use crate::sched_order::{Ledger, OrderState};

/// The name with a lock that spins.
pub const SPINNING: &str = "sched-lock-spin";
/// The name with a lock that spins and is granted in the order of arrival.
pub const QUEUED: &str = "sched-lock-queued";
/// The name with a lock that parks its waiters.
pub const PARKING: &str = "sched-lock-park";

/// The rank of the lock: a submitter holds no lock when it takes this one, and takes no further
/// lock under it.
const RANK: u8 = 60;

/// The published form: a spin lock that is granted in the order of arrival.
pub type QueuedLock = OneSchedLock<queued_lock::QueuedLock<OrderState>>;
/// The scheduler with a spin lock that goes to the first thread that takes it.
pub type SpinningLock = OneSchedLock<SpinLock<OrderState, RANK>>;
/// The scheduler with a lock that parks its waiters.
pub type ParkingLock = OneSchedLock<SleepLock<OrderState, RANK>>;

/// mq-deadline under one lock of type `L`.
pub struct OneSchedLock<L> {
    lock: L,
    ledger: Ledger,
}

impl<L> fmt::Debug for OneSchedLock<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OneSchedLock").field("ledger", &self.ledger).finish_non_exhaustive()
    }
}

impl<L: Lock<OrderState> + 'static> SchedulerQueue for OneSchedLock<L> {
    const NAME: &'static str = "one-lock";

    type SubmitRing = ();

    fn new(config: &SchedulerQueueConfig) -> OneSchedLock<L> {
        let lock = L::new(OrderState::new(config));
        OneSchedLock { lock, ledger: Ledger::new() }
    }

    fn open(&self) {}

    #[inline]
    fn room(&self, (): &()) -> usize {
        usize::from(REQUESTS_MAX)
    }

    #[inline]
    fn insert(&self, (): &mut (), requests: &[QueuedRequest], now: Nanos) -> usize {
        self.lock.with(|waiting| {
            waiting.take_in(requests, now);
            self.ledger.change();
            self.ledger.leave(waiting, None);
        });
        requests.len()
    }

    #[inline]
    fn dispatch(&self, (): &mut (), now: Nanos, room: usize, out: &mut Vec<QueuedRequest>) -> Left {
        let end = out.len() + room;
        loop {
            let next = self.lock.with(|waiting| {
                let seen = self.ledger.settle(waiting);
                let next = if out.len() < end { waiting.next(now) } else { None };
                self.ledger.leave(waiting, next.is_none().then_some(seen));
                next
            });
            let is_last = next.is_none();
            out.extend(next);
            if is_last || out.len() == end {
                return if self.is_work() { Left::Undone } else { Left::Nothing };
            }
        }
    }

    #[inline]
    fn report(&self, reports: &mut Vec<Report>) {
        if reports.is_empty() {
            return;
        }
        self.ledger.note(reports);
        if !reports.is_empty() {
            self.lock.with(|waiting| {
                self.ledger.settle(waiting);
                reports.drain(..).for_each(|report| waiting.hear(report, Nanos(0)));
                self.ledger.change();
                self.ledger.leave(waiting, None);
            });
        }
    }

    #[inline]
    fn is_work(&self) -> bool {
        self.ledger.is_work()
    }

    /// No thread dispatches for others.
    fn notify(&self) -> bool {
        false
    }

    fn abandon(&self) {
        self.ledger.change();
    }

    fn with_order(&self, work: &mut dyn FnMut(&mut Deadline<QueuedRequest>)) {
        self.lock.with(|waiting| {
            self.ledger.settle(waiting);
            work(waiting.order());
            self.ledger.change();
            self.ledger.leave(waiting, None);
        });
    }
}
