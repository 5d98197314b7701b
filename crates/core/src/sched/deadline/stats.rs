//! What has become of the requests of each class and direction.

use super::kind::{CLASSES, Direction, ROWS, row};
use crate::bio::Prio;

/// Counts of one class and direction since the scheduler was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests that came in, those that were merged at once included.
    pub inserted: u64,
    /// Requests that became part of another one.
    pub merged: u64,
    /// Requests that went to the device; again each time after they came back.
    pub dispatched: u64,
    /// Requests that the device has completed.
    pub completed: u64,
    /// Requests that went to the device at their deadline or later.
    pub expired: u64,
    /// Requests that the device did not start, so that they came back.
    pub requeued: u64,
}

impl Counters {
    /// Requests that wait here or are at the device.
    pub const fn queued(&self) -> u64 {
        self.inserted - self.merged - self.completed
    }

    /// Requests that are at the device.
    pub const fn in_flight(&self) -> u64 {
        self.dispatched - self.requeued - self.completed
    }
}

/// The counts of every class and direction at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    pub(super) rows: [Counters; ROWS],
}

impl Stats {
    /// Those of one class and direction.
    pub const fn of(&self, prio: Prio, direction: Direction) -> &Counters {
        &self.rows[row(prio, direction)]
    }

    /// All of them, with their class and direction: `rt` before `be` before `idle`, and reads
    /// before writes.
    pub fn iter(&self) -> impl Iterator<Item = (Prio, Direction, &Counters)> {
        CLASSES.into_iter().flat_map(move |prio| {
            Direction::ALL.map(|direction| (prio, direction, self.of(prio, direction)))
        })
    }
}
