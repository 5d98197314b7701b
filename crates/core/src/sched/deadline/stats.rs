//! The counters of each class and direction.

use super::kind::{CLASSES, Direction, ROWS, row};
use crate::bio::Prio;

/// Counters of one class and direction since the scheduler was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Inserted requests, including those that were merged at once.
    pub inserted: u64,
    /// Requests that were merged into another one.
    pub merged: u64,
    /// Dispatched requests. A request that was requeued is counted each time.
    pub dispatched: u64,
    /// Requests that the device has completed.
    pub completed: u64,
    /// Requests that were dispatched at or after their deadline.
    pub expired: u64,
    /// Requests that the device did not start, so that they were requeued.
    pub requeued: u64,
}

impl Counters {
    /// Requests that wait or are in flight.
    pub const fn queued(&self) -> u64 {
        self.inserted - self.merged - self.completed
    }

    /// Requests in flight.
    pub const fn in_flight(&self) -> u64 {
        self.dispatched - self.requeued - self.completed
    }
}

/// The counters of every class and direction at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    pub(super) rows: [Counters; ROWS],
}

impl Stats {
    /// The counters of one class and direction.
    pub const fn of(&self, prio: Prio, direction: Direction) -> &Counters {
        &self.rows[row(prio, direction)]
    }

    /// All counters with their class and direction: `rt` before `be` before `idle`, and reads
    /// before writes.
    pub fn iter(&self) -> impl Iterator<Item = (Prio, Direction, &Counters)> {
        CLASSES.into_iter().flat_map(move |prio| {
            Direction::ALL.map(|direction| (prio, direction, self.of(prio, direction)))
        })
    }
}
