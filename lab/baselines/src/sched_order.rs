//! The state that the coarse schedulers protect by their locks: the product's policy, and its
//! counts.
//!
//! As in Linux a completion takes no lock. It is counted in a word of its class and direction,
//! which the next holder of the lock takes over. Two more words say whether there is work.
#![allow(clippy::disallowed_types)] // A baseline has locks and words of its own, by definition.

use std::mem;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use blockyard_core::Op;
use blockyard_core::sched::deadline::{CLASSES, Deadline, DeadlineConfig, Direction, Kind};
use blockyard_core::sched::shared::{QueuedRequest, Report, SchedulerQueueConfig};
use blockyard_core::units::Nanos;
use blockyard_sync::pad::Padded;

/// The most requests that wait in the order. Linux's submitter would sleep for room; the stack
/// cannot, so there is room for the requests of every experiment.
const CAPACITY: usize = 1 << 15;

/// The value that the lock protects.
#[derive(Debug)]
pub struct OrderState {
    order: Deadline<QueuedRequest>,
    /// Requests that the order refused because of `async_depth`. They come before later requests.
    held: Vec<QueuedRequest>,
    refused: Vec<QueuedRequest>,
    in_flight: usize,
    depth: usize,
}

impl OrderState {
    /// An empty order.
    pub fn new(config: &SchedulerQueueConfig) -> OrderState {
        OrderState {
            order: Deadline::new(DeadlineConfig {
                capacity: CAPACITY,
                in_flight_max: usize::from(config.depth),
                rules: config.rules,
                zones: config.zones.clone(),
                tunables: config.tunables,
            }),
            held: Vec::with_capacity(CAPACITY),
            refused: Vec::with_capacity(CAPACITY),
            in_flight: 0,
            depth: usize::from(config.depth),
        }
    }

    /// The scheduling policy.
    pub fn order(&mut self) -> &mut Deadline<QueuedRequest> {
        &mut self.order
    }

    /// The number of requests that wait.
    #[inline]
    pub fn count(&self) -> usize {
        self.order.waiting() + self.held.len()
    }

    /// The number of further requests that the device accepts.
    #[inline]
    pub fn room(&self) -> usize {
        self.depth - self.in_flight
    }

    /// Inserts requests one after the other, merging each where possible.
    #[inline]
    pub fn take_in(&mut self, requests: &[QueuedRequest], now: Nanos) {
        if !self.held.is_empty() {
            mem::swap(&mut self.held, &mut self.refused);
            self.order.insert_batch(self.refused.drain(..), now, &mut self.held);
        }
        for &request in requests {
            // A flush has no position on the device, and does not wait for requests that have one.
            let is_in = match request.op() {
                Op::Flush => self.order.insert_at_head(request, now).is_ok(),
                _ if self.held.is_empty() => self.order.insert(request, now).is_ok(),
                _ => false,
            };
            if !is_in {
                self.held.push(request);
            }
        }
    }

    /// The next request to dispatch, if the device accepts one.
    #[inline]
    pub fn next(&mut self, now: Nanos) -> Option<QueuedRequest> {
        if !self.held.is_empty() {
            self.take_in(&[], now);
        }
        if self.room() == 0 {
            return None;
        }
        let next = self.order.next(now);
        self.in_flight += usize::from(next.is_some());
        next
    }

    /// Updates the order from a report of the device, for example of requests that it did not
    /// start.
    pub fn hear(&mut self, report: Report, now: Nanos) {
        match report {
            Report::Completed(kind, count) => self.completed(kind, count as usize),
            Report::Undone(request, _) => {
                self.order.requeue(request, now);
                self.in_flight -= 1;
            }
            Report::Remainder(request) => {
                if let Err(request) = self.order.insert_at_head(request, now) {
                    self.held.push(request);
                }
            }
        }
    }

    fn completed(&mut self, kind: Kind, count: usize) {
        self.order.completed_many(kind, count);
        self.in_flight -= count;
    }
}

/// The state that threads read without the lock.
#[derive(Debug)]
pub struct Ledger {
    /// Completions by class and direction that the order has not counted yet.
    completed: Padded<[AtomicUsize; CLASSES.len() * 2]>,
    /// Changes with every event that may have made a dispatch possible.
    changes: Padded<AtomicU64>,
    /// The value of `changes` when no dispatch was possible.
    stalled: AtomicU64,
    /// The number of requests that wait.
    waiting: AtomicUsize,
}

impl Ledger {
    /// A ledger of an empty order.
    pub fn new() -> Ledger {
        Ledger {
            completed: Padded(Default::default()),
            changes: Padded(AtomicU64::new(1)),
            stalled: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
        }
    }

    /// Notes that a dispatch may be possible now that was not possible before.
    #[inline]
    pub fn change(&self) {
        // Release: pairs with the Acquire in `settle`, so that `settle` finds earlier counts.
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Counts completions and returns their number; leaves the other reports in `reports`, to be
    /// processed under the lock.
    #[inline]
    pub fn note(&self, reports: &mut Vec<Report>) -> usize {
        let mut all = 0;
        reports.retain(|report| match *report {
            Report::Completed(kind, count) => {
                let row = kind.prio as usize * 2 + kind.direction as usize;
                // Relaxed: `change` publishes it.
                self.completed[row].fetch_add(count as usize, Ordering::Relaxed);
                all += count as usize;
                false
            }
            _ => true,
        });
        self.change();
        all
    }

    /// Tells the order, under its lock, about the completions. Returns the value to pass to
    /// [`Ledger::leave`].
    #[inline]
    pub fn settle(&self, waiting: &mut OrderState) -> u64 {
        // Acquire: pairs with the Release in `change`.
        let seen = self.changes.load(Ordering::Acquire);
        for (row, count) in self.completed.iter().enumerate() {
            if count.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let count = count.swap(0, Ordering::Relaxed);
            let kind = Kind { prio: CLASSES[row / 2], direction: Direction::ALL[row % 2] };
            waiting.completed(kind, count);
        }
        seen
    }

    /// Stores, under the lock, the number of waiting requests; and with `stalled` that no dispatch
    /// was possible in the state that `settle` saw.
    #[inline]
    pub fn leave(&self, waiting: &OrderState, stalled: Option<u64>) {
        // Relaxed: written under the lock, and read as a hint that `changes` corrects.
        self.waiting.store(waiting.count(), Ordering::Relaxed);
        if let Some(seen) = stalled {
            self.stalled.store(seen, Ordering::Relaxed);
        }
    }

    /// Whether requests wait and a dispatch may be possible.
    #[inline]
    pub fn is_work(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0 && self.has_changed()
    }

    /// Whether the state has changed since no dispatch was possible.
    #[inline]
    pub fn has_changed(&self) -> bool {
        self.changes.load(Ordering::Acquire) != self.stalled.load(Ordering::Relaxed)
    }
}

impl Default for Ledger {
    fn default() -> Ledger {
        Ledger::new()
    }
}
