//! What the order asks of a request: its priority class and its direction.

use crate::bio::{Op, Prio};

/// Which way the data go. Everything that changes the device is a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Direction {
    /// From the device.
    Read,
    /// To the device: writes, discards, changes of zones.
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

/// The classes from the first to the last.
pub const CLASSES: [Prio; 3] = [Prio::RealTime, Prio::BestEffort, Prio::Idle];

/// How many sorted orders and FIFOs there are: one per class and direction.
pub(super) const ROWS: usize = CLASSES.len() * Direction::ALL.len();

/// What the order asks of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kind {
    /// Its priority class.
    pub prio: Prio,
    /// Which way its data go.
    pub direction: Direction,
}

impl Kind {
    /// The kind of a request with this operation in this class.
    #[inline]
    pub const fn of(op: Op, prio: Prio) -> Kind {
        let direction = if op.is_write() { Direction::Write } else { Direction::Read };
        Kind { prio, direction }
    }

    /// Whether `async_depth` holds it back. Linux spares what is both synchronous and a read, and
    /// there every read is synchronous (`op_is_sync`).
    #[inline]
    pub(super) const fn is_throttled(self) -> bool {
        matches!(self.direction, Direction::Write)
    }

    /// The index of its class and direction.
    #[inline]
    pub(super) const fn row(self) -> usize {
        row(self.prio, self.direction)
    }
}

/// The index of a class and a direction among the rows.
#[inline]
pub(super) const fn row(prio: Prio, direction: Direction) -> usize {
    prio as usize * 2 + direction as usize
}
