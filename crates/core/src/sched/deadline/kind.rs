//! The properties of a request that the order uses, priority class and direction, and the counters
//! of each class and direction.

use crate::bio::{Op, Prio};

/// The direction of the data. Every operation that changes the device is a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Direction {
    /// From the device.
    Read,
    /// To the device: writes, discards, zone management.
    Write,
}

impl Direction {
    /// Both, reads first.
    pub const ALL: [Direction; 2] = [Direction::Read, Direction::Write];

    /// The name in statistics: `read`, `write`.
    pub const fn name(self) -> &'static str {
        match self {
            Direction::Read => "read",
            Direction::Write => "write",
        }
    }
}

/// The classes from the highest to the lowest priority.
pub const CLASSES: [Prio; 3] = [Prio::RealTime, Prio::BestEffort, Prio::Idle];

/// Number of rows (a sector order and a FIFO each): one per class and direction.
pub(super) const ROWS: usize = CLASSES.len() * Direction::ALL.len();

/// The properties of a request that the order uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kind {
    /// The priority class.
    pub prio: Prio,
    /// The direction of the data.
    pub direction: Direction,
}

impl Kind {
    /// The kind of a request with this operation in this class.
    #[inline]
    pub const fn of(op: Op, prio: Prio) -> Kind {
        let direction = if op.is_write() { Direction::Write } else { Direction::Read };
        Kind { prio, direction }
    }

    /// Whether `async_depth` limits the kind. Linux exempts synchronous reads, and every read is
    /// synchronous there (`op_is_sync`).
    #[inline]
    pub(super) const fn is_throttled(self) -> bool {
        matches!(self.direction, Direction::Write)
    }

    /// The row index of this class and direction.
    #[inline]
    pub(super) const fn row(self) -> usize {
        row(self.prio, self.direction)
    }
}

/// The row index of a class and a direction.
#[inline]
pub(super) const fn row(prio: Prio, direction: Direction) -> usize {
    prio as usize * 2 + direction as usize
}

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
