//! The state machine of one zone, as ZBC-2 4.5.3 and NVMe ZNS 2.3 define it. Where they leave a
//! choice, it follows Linux's null_blk. It has no lock, clock or I/O.
//!
//! [`RULES`] is the machine: the effect of each operation in each condition. docs/zones.md shows
//! the same table for readers, with the cases that depend on the write pointer; a test compares the
//! two.

use blockyard_sync::atomic_zones::Condition;
use blockyard_sync::zone_resources::{Holding, ResourceError};

use super::info::{ZoneCond, ZoneInfo, ZoneType};
use crate::bio::Status;
use crate::units::Sector;

/// An operation on one zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ZoneOp {
    /// Read.
    Read,
    /// Write, at the write pointer if there is one. For a zone, write-zeroes is a write.
    Write,
    /// Write at the present write pointer.
    Append,
    /// Open explicitly.
    Open,
    /// Close.
    Close,
    /// Make the zone full.
    Finish,
    /// Make the zone empty.
    Reset,
    /// Make the zone empty as part of a reset of all zones: leaves zones alone that cannot or need
    /// not be reset.
    ResetAll,
}

impl ZoneOp {
    /// Every operation.
    pub const ALL: [ZoneOp; 8] = [
        ZoneOp::Read,
        ZoneOp::Write,
        ZoneOp::Append,
        ZoneOp::Open,
        ZoneOp::Close,
        ZoneOp::Finish,
        ZoneOp::Reset,
        ZoneOp::ResetAll,
    ];
}

/// The effect of an operation in a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    /// The operation fails with `IOERR`.
    Fail,
    /// The operation succeeds and does not change the condition.
    Stay,
    /// The operation changes the condition to this one.
    To(ZoneCond),
    /// The operation changes the condition to `Full`, and needs the resources of an open zone on
    /// the way.
    FullThroughOpen,
    /// The operation changes the condition to `Closed`, or to `Empty` if nothing was written.
    ClosedOrEmpty,
}

use Effect::{ClosedOrEmpty, Fail, FullThroughOpen, Stay, To};
use ZoneCond::{Empty, ExplicitOpen, Full, ImplicitOpen};

/// A row per operation, a column per condition in the order of [`ZoneCond::ALL`].
#[rustfmt::skip]
const RULES: [[Effect; 8]; ZoneOp::ALL.len()] = [
    // not-wp, empty, implicit-open, explicit-open, closed, full, read-only, offline
    /* read */
    [Stay, Stay, Stay, Stay, Stay, Stay, Stay, Fail],
    /* write */
    [Stay, To(ImplicitOpen), Stay, Stay, To(ImplicitOpen), Fail, Fail, Fail],
    /* append */
    [Fail, To(ImplicitOpen), Stay, Stay, To(ImplicitOpen), Fail, Fail, Fail],
    /* open */
    [Fail, To(ExplicitOpen), To(ExplicitOpen), Stay, To(ExplicitOpen), Fail, Fail, Fail],
    /* close */
    [Fail, Fail, ClosedOrEmpty, ClosedOrEmpty, Stay, Fail, Fail, Fail],
    /* finish */
    [Fail, FullThroughOpen, To(Full), To(Full), FullThroughOpen, Stay, Fail, Fail],
    /* reset */
    [Fail, Stay, To(Empty), To(Empty), To(Empty), To(Empty), Fail, Fail],
    /* reset all */
    [Stay, Stay, To(Empty), To(Empty), To(Empty), To(Empty), Stay, Stay],
];

/// The column of a condition in [`RULES`].
#[inline]
const fn column(cond: ZoneCond) -> usize {
    match cond {
        ZoneCond::NotWp => 0,
        ZoneCond::Empty => 1,
        ZoneCond::ImplicitOpen => 2,
        ZoneCond::ExplicitOpen => 3,
        ZoneCond::Closed => 4,
        ZoneCond::Full => 5,
        ZoneCond::ReadOnly => 6,
        ZoneCond::Offline => 7,
    }
}

/// A permitted change of the condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The resources that the zone must hold during the change, even if only for a moment.
    pub through: Holding,
    /// The final condition.
    pub to: ZoneCond,
}

/// The open and active resources that a zone in a condition holds.
#[inline]
pub const fn holding_of(cond: ZoneCond) -> Holding {
    match cond {
        ZoneCond::ImplicitOpen => Holding::Implicit,
        ZoneCond::ExplicitOpen => Holding::Explicit,
        ZoneCond::Closed => Holding::Closed,
        _ => Holding::Nothing,
    }
}

/// One zone.
///
/// Invariants:
/// 1. `start <= wp <= writable_end <= end`, except as in 2.
/// 2. `wp` is `Sector::NONE` in `ReadOnly` and `Offline`, and `end` in `NotWp` and after a finish.
/// 3. `Empty` has `wp == start`; `Closed` has `wp > start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zone {
    cond: ZoneCond,
    wp: Sector,
    writable_end: Sector,
    start: Sector,
    end: Sector,
}

impl Zone {
    /// A conventional zone.
    pub fn conventional(start: Sector, sectors: u64) -> Zone {
        let end = start + sectors;
        Zone { cond: ZoneCond::NotWp, wp: end, writable_end: end, start, end }
    }

    /// An empty sequential zone. `capacity_sectors` is at most `sectors`.
    pub fn sequential(start: Sector, sectors: u64, capacity_sectors: u64) -> Zone {
        debug_assert!(capacity_sectors <= sectors);
        Zone {
            cond: ZoneCond::Empty,
            wp: start,
            writable_end: start + capacity_sectors,
            start,
            end: start + sectors,
        }
    }

    /// The zone with a saved condition and a saved number of readable sectors.
    #[inline]
    #[must_use]
    pub fn restore(self, cond: ZoneCond, readable_sectors: u64) -> Zone {
        let wp = match cond {
            ZoneCond::ReadOnly | ZoneCond::Offline => Sector::NONE,
            _ => self.start + readable_sectors,
        };
        Zone { cond, wp, ..self }
    }

    /// The condition.
    #[inline]
    pub fn cond(&self) -> ZoneCond {
        self.cond
    }

    /// The open and active resources that the zone holds.
    #[inline]
    pub fn holding(&self) -> Holding {
        holding_of(self.cond)
    }

    /// The write pointer, as in [`ZoneInfo::wp`].
    #[inline]
    pub fn wp(&self) -> Sector {
        self.wp
    }

    /// The first sector.
    #[inline]
    pub fn start(&self) -> Sector {
        self.start
    }

    /// The first sector after the zone.
    #[inline]
    pub fn end(&self) -> Sector {
        self.end
    }

    #[inline]
    fn rule(&self, op: ZoneOp) -> Effect {
        RULES[op as usize][column(self.cond)]
    }

    /// Whether an operation without data is permitted, and its effect. Changes nothing.
    ///
    /// # Errors
    /// `IOERR` where the table in docs/zones.md says so.
    pub fn step(&self, op: ZoneOp) -> Result<Step, Status> {
        let to = match self.rule(op) {
            Effect::Fail => return Err(Status::IoErr),
            Effect::Stay => self.cond,
            Effect::To(to) => to,
            Effect::FullThroughOpen => {
                return Ok(Step { through: Holding::Implicit, to: ZoneCond::Full });
            }
            Effect::ClosedOrEmpty if self.wp == self.start => ZoneCond::Empty,
            Effect::ClosedOrEmpty => ZoneCond::Closed,
        };
        Ok(Step { through: holding_of(to), to })
    }

    /// Whether `sectors` may be written at `at`, and the condition that the zone enters before the
    /// data is transferred. Changes nothing.
    ///
    /// # Errors
    /// `IOERR` in a condition that permits no writes, off the write pointer, or beyond the
    /// capacity.
    #[inline]
    pub fn step_write(&self, at: Sector, sectors: u64) -> Result<ZoneCond, Status> {
        let to = self.step_data(ZoneOp::Write)?;
        let in_place = at == self.wp || (self.cond == ZoneCond::NotWp && at >= self.start);
        if in_place && self.fits(at, sectors) { Ok(to) } else { Err(Status::IoErr) }
    }

    /// Whether `sectors` may be appended at the write pointer, and the condition that the zone
    /// enters before the data is transferred.
    ///
    /// # Errors
    /// `IOERR` in a condition that permits no appends, or beyond the capacity.
    #[inline]
    pub fn step_append(&self, sectors: u64) -> Result<ZoneCond, Status> {
        let to = self.step_data(ZoneOp::Append)?;
        if self.fits(self.wp, sectors) { Ok(to) } else { Err(Status::IoErr) }
    }

    #[inline]
    fn step_data(&self, op: ZoneOp) -> Result<ZoneCond, Status> {
        match self.rule(op) {
            Effect::Stay => Ok(self.cond),
            Effect::To(to) => Ok(to),
            _ => Err(Status::IoErr),
        }
    }

    #[inline]
    fn fits(&self, at: Sector, sectors: u64) -> bool {
        // Compares without an addition, which could overflow: a client chooses the length.
        at <= self.writable_end && sectors <= self.writable_end - at
    }

    /// The end of the readable data. A sequential zone reads as 0xFF from there on.
    ///
    /// # Errors
    /// `IOERR` if the zone is offline.
    #[inline]
    pub fn readable_end(&self) -> Result<Sector, Status> {
        match self.rule(ZoneOp::Read) {
            // A read-only zone has no write pointer; all of it is data.
            Effect::Stay => Ok(self.wp.min(self.end)),
            _ => Err(Status::IoErr),
        }
    }

    /// Enters the condition of a [`Step`] or of `step_write`, and sets the write pointer to match.
    #[inline]
    pub fn enter(&mut self, cond: ZoneCond) {
        if cond == self.cond {
            return;
        }
        match cond {
            ZoneCond::Empty => self.wp = self.start,
            ZoneCond::Full => self.wp = self.end,
            ZoneCond::ReadOnly | ZoneCond::Offline => self.wp = Sector::NONE,
            _ => {}
        }
        self.cond = cond;
    }

    /// Advances the write pointer after data was transferred, by at most the permitted number of
    /// sectors. At the capacity the zone becomes full.
    #[inline]
    pub fn advance(&mut self, sectors: u64) {
        if self.cond == ZoneCond::NotWp {
            return;
        }
        self.wp += sectors;
        debug_assert!(self.wp <= self.writable_end);
        if self.wp == self.writable_end {
            self.cond = ZoneCond::Full;
        }
    }

    /// Makes an empty zone full, as if it had been written to its capacity.
    pub fn fill(&mut self) {
        debug_assert_eq!(self.cond, ZoneCond::Empty);
        self.advance(self.writable_end - self.start);
    }

    /// The zone as a zone report shows it.
    pub fn info(&self) -> ZoneInfo {
        let kind = match self.cond {
            ZoneCond::NotWp => ZoneType::Conventional,
            _ => ZoneType::SequentialWriteRequired,
        };
        ZoneInfo {
            start: self.start,
            sectors: self.end - self.start,
            capacity_sectors: self.writable_end - self.start,
            wp: self.wp,
            kind,
            cond: self.cond,
        }
    }
}

impl Condition for ZoneCond {
    const EMPTY: ZoneCond = ZoneCond::Empty;
    const CLOSED: ZoneCond = ZoneCond::Closed;

    #[inline]
    fn bits(self) -> u8 {
        self as u8
    }

    #[inline]
    fn from_bits(bits: u8) -> ZoneCond {
        match bits {
            0x0 => ZoneCond::NotWp,
            0x1 => ZoneCond::Empty,
            0x2 => ZoneCond::ImplicitOpen,
            0x3 => ZoneCond::ExplicitOpen,
            0x4 => ZoneCond::Closed,
            0xd => ZoneCond::ReadOnly,
            0xe => ZoneCond::Full,
            0xf => ZoneCond::Offline,
            _ => unreachable!("no condition has this number"),
        }
    }

    #[inline]
    fn holding(self) -> Holding {
        holding_of(self)
    }
}

impl From<ResourceError> for Status {
    fn from(refusal: ResourceError) -> Status {
        match refusal {
            ResourceError::OpenLimit => Status::ZoneOpenResource,
            ResourceError::ActiveLimit => Status::ZoneActiveResource,
        }
    }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
