//! No scheduler, but one queue: the requests of all channels get their tags in the order of
//! arrival.
//!
//! Linux's `none` does so on a device with one queue, where submitters that find no tag free wait
//! in line for one. The null device by itself gives each channel a share of its tags instead, so
//! that channels do not wait for one another.

use std::collections::VecDeque;
use std::fmt;

use blockyard_core::sched::deadline::Deadline;
use blockyard_core::sched::shared::{
    Left, QueuedRequest, REQUESTS_MAX, Report, SchedulerQueue, SchedulerQueueConfig,
};
use blockyard_core::units::Nanos;
use blockyard_sync::lock::Lock;
use blockyard_sync::sleep_lock::SleepLock;

/// The baseline's name in measurements.
pub const NAME: &str = "none-in-line";

/// The rank of the lock, equal to that of the other coarse schedulers.
const RANK: u8 = 60;

/// The number of requests for which the queue has memory at first; beyond that it grows.
const LINE_LEN: usize = 1 << 12;

/// The waiting requests, and the device's limits.
struct FifoState {
    waiting: VecDeque<QueuedRequest>,
    in_flight: usize,
    depth: usize,
    /// Unused, except that it stores the tunables.
    order: Deadline<QueuedRequest>,
}

/// A scheduler that passes requests on in the order of arrival.
pub struct Fifo(SleepLock<FifoState, RANK>);

impl fmt::Debug for Fifo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fifo").finish_non_exhaustive()
    }
}

impl SchedulerQueue for Fifo {
    const NAME: &'static str = "fifo";

    type SubmitRing = ();

    fn new(config: &SchedulerQueueConfig) -> Fifo {
        Fifo(SleepLock::new(FifoState {
            waiting: VecDeque::with_capacity(LINE_LEN),
            in_flight: 0,
            depth: config.depth.into(),
            order: config.order(),
        }))
    }

    fn open(&self) {}

    fn room(&self, (): &()) -> usize {
        usize::from(REQUESTS_MAX)
    }

    fn insert(&self, (): &mut (), requests: &[QueuedRequest], _now: Nanos) -> usize {
        self.0.with(|line| line.waiting.extend(requests));
        requests.len()
    }

    fn dispatch(&self, (): &mut (), _: Nanos, room: usize, out: &mut Vec<QueuedRequest>) -> Left {
        self.0.with(|line| {
            let count = room.min(line.depth - line.in_flight).min(line.waiting.len());
            out.extend(line.waiting.drain(..count));
            line.in_flight += count;
        });
        if self.is_work() { Left::Undone } else { Left::Nothing }
    }

    fn report(&self, reports: &mut Vec<Report>) {
        if reports.is_empty() {
            return;
        }
        self.0.with(|line| {
            for report in reports.drain(..) {
                match report {
                    Report::Completed(_, count) => line.in_flight -= count as usize,
                    Report::Undone(queued, _) => {
                        line.in_flight -= 1;
                        line.waiting.push_front(queued);
                    }
                    Report::Remainder(queued) => line.waiting.push_front(queued),
                }
            }
        });
    }

    fn is_work(&self) -> bool {
        self.0.with(|line| line.in_flight < line.depth && !line.waiting.is_empty())
    }

    /// No thread dispatches for others.
    fn notify(&self) -> bool {
        false
    }

    /// Waiting requests are found without it.
    fn abandon(&self) {}

    fn with_order(&self, work: &mut dyn FnMut(&mut Deadline<QueuedRequest>)) {
        self.0.with(|line| work(&mut line.order));
    }
}
