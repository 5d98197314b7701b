//! What the coarse schedulers have behind their locks: the product's policy, and what is counted
//! around it.
//!
//! As in Linux a completion takes no lock: it is counted in a word of its class and direction,
//! which whoever holds the lock next takes over, and whether there is work is read from two more.
#![allow(clippy::disallowed_types)] // A baseline has locks and words of its own, by definition.

use std::mem;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use blockyard_core::Op;
use blockyard_core::sched::deadline::{CLASSES, Deadline, DeadlineConfig, Direction, Kind};
use blockyard_core::sched::shared::{FrontConfig, Queued, Report};
use blockyard_core::units::Nanos;
use blockyard_sync::pad::Padded;

/// Most requests that wait in order. Where a submitter would sleep for room in Linux the stack has
/// no place to, so there is room for as many as any experiment has.
const CAPACITY: usize = 1 << 15;

/// What a lock is around.
#[derive(Debug)]
pub struct Waiting {
    order: Deadline<Queued>,
    /// What the order did not take because of `async_depth`: it comes before what comes later.
    held: Vec<Queued>,
    refused: Vec<Queued>,
    in_flight: usize,
    depth: usize,
}

impl Waiting {
    /// An empty order.
    pub fn new(config: &FrontConfig) -> Waiting {
        Waiting {
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

    /// The policy.
    pub fn order(&mut self) -> &mut Deadline<Queued> {
        &mut self.order
    }

    /// How many requests wait.
    #[inline]
    pub fn count(&self) -> usize {
        self.order.waiting() + self.held.len()
    }

    /// How many more the device takes.
    #[inline]
    pub fn room(&self) -> usize {
        self.depth - self.in_flight
    }

    /// Takes requests in, one after the other, each merged where it can be.
    #[inline]
    pub fn take_in(&mut self, requests: &[Queued], now: Nanos) {
        if !self.held.is_empty() {
            mem::swap(&mut self.held, &mut self.refused);
            self.order.insert_batch(self.refused.drain(..), now, &mut self.held);
        }
        for &request in requests {
            // A flush is for no place on the device, and does not wait for those who have one.
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

    /// The next request, if the device takes one.
    #[inline]
    pub fn next(&mut self, now: Nanos) -> Option<Queued> {
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

    /// Takes back what the device did not do.
    pub fn hear(&mut self, report: Report, now: Nanos) {
        match report {
            Report::Completed(kind, count) => self.completed(kind, count as usize),
            Report::Undone(request, _) => {
                self.order.requeue(request, now);
                self.in_flight -= 1;
            }
            Report::Rest(request) => {
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

/// What is known without the lock.
#[derive(Debug)]
pub struct Ledger {
    /// Completions by class and direction that the order does not know of yet.
    completed: Padded<[AtomicUsize; CLASSES.len() * 2]>,
    /// Changes with everything that may have made something possible.
    changes: Padded<AtomicU64>,
    /// What `changes` was when nothing was possible.
    stalled: AtomicU64,
    /// How many requests wait.
    waiting: AtomicUsize,
}

impl Ledger {
    /// Nothing waits.
    pub fn new() -> Ledger {
        Ledger {
            completed: Padded(Default::default()),
            changes: Padded(AtomicU64::new(1)),
            stalled: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
        }
    }

    /// Something may be possible now that was not before.
    #[inline]
    pub fn change(&self) {
        // Release: pairs with the Acquire in `settle`, so that it finds what was counted before.
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Counts completions, says how many, and leaves the other reports to be heard under the lock.
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

    /// Tells the order, under its lock, what was completed; answers what to give to
    /// [`Ledger::leave`].
    #[inline]
    pub fn settle(&self, waiting: &mut Waiting) -> u64 {
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

    /// Notes, under the lock, how many wait; and with `stalled` that nothing was possible as things
    /// were then.
    #[inline]
    pub fn leave(&self, waiting: &Waiting, stalled: Option<u64>) {
        // Relaxed: written under the lock, and read as a hint that `changes` makes good.
        self.waiting.store(waiting.count(), Ordering::Relaxed);
        if let Some(seen) = stalled {
            self.stalled.store(seen, Ordering::Relaxed);
        }
    }

    /// Whether requests wait and something may be possible.
    #[inline]
    pub fn is_work(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0 && self.has_changed()
    }

    /// Whether something has changed since nothing was possible.
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
