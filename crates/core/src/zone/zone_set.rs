//! The interface between a device and the synchronization of its zones.
//!
//! A [`ZoneSet`] holds the condition and the write pointer of every zone. The device calls it with
//! whole operations and a [`Transfer`] for the data. So an implementation may copy the data under a
//! zone's lock, or reserve a range, copy outside of any lock, and commit.

use std::collections::TryReserveError;

use super::info::{ZoneCond, ZoneInfo};
use super::machine::{Zone, ZoneOp};
use crate::bio::Status;
use crate::geometry::ZoneGeometry;
use crate::units::{Sector, ZoneNo};

/// The parameters of a zone set.
#[derive(Clone, Debug)]
pub struct ZoneLayout {
    /// The zones.
    pub zones: ZoneGeometry,
    /// The device's length in sectors; the last zone may be shorter than the others.
    pub sectors: u64,
    /// Whether sequential zones are full initially.
    pub full: bool,
    /// Whether data is copied during a zone operation, which makes the operation long.
    pub data: bool,
}

impl ZoneLayout {
    /// The first sector of a zone and the first sector after it.
    #[inline]
    pub fn range(&self, zone: ZoneNo) -> (Sector, Sector) {
        let start = self.zones.start_of(zone);
        (start, start + self.zones.zone_sectors.min(self.sectors - start.0))
    }

    /// An empty sequential zone with this number.
    #[inline]
    pub fn sequential(&self, zone: ZoneNo) -> Zone {
        let (start, end) = self.range(zone);
        let sectors = end - start;
        Zone::sequential(start, sectors, self.zones.zone_capacity_sectors.min(sectors))
    }

    /// The initial state of a zone.
    pub fn zone(&self, zone: ZoneNo) -> Zone {
        if self.zones.is_conventional(zone) {
            let (start, end) = self.range(zone);
            return Zone::conventional(start, end - start);
        }
        let mut zone = self.sequential(zone);
        if self.full {
            zone.fill();
        }
        zone
    }

    /// Writes to a conventional zone. Threads need not wait for each other.
    ///
    /// # Errors
    /// `IOERR` outside of the zone, or the status of [`Transfer::admit`].
    #[inline]
    pub fn write_conventional<T: Transfer>(
        &self,
        zone: ZoneNo,
        at: Sector,
        sectors: u64,
        transfer: &mut T,
    ) -> Result<(), Status> {
        let (start, end) = self.range(zone);
        if at < start || at > end || sectors > end - at {
            return Err(Status::IoErr);
        }
        let (sectors, status) = transfer.admit(at, sectors);
        transfer.copy(at, sectors);
        if status.is_ok() { Ok(()) } else { Err(status) }
    }
}

/// The data transfer of a write to a zone.
pub trait Transfer {
    /// Whether `admit` may permit less than the whole range. Otherwise the caller need not call it.
    fn may_fall_short(&self) -> bool;

    /// How many of the sectors can be transferred to `at`, and the resulting status of the request.
    /// Called after the zone has permitted all of them; an implementation that loses a race for the
    /// zone calls it again.
    fn admit(&mut self, at: Sector, sectors: u64) -> (u64, Status);

    /// Transfers the first `sectors` to `at`. Called at most once.
    fn copy(&mut self, at: Sector, sectors: u64);
}

/// How the data of zones that become empty is discarded.
pub trait Erase {
    /// Discards the data of a range.
    fn erase(&mut self, start: Sector, sectors: u64);
}

/// The zones of a device. Zone numbers must be below `zone_count`.
pub trait ZoneSet: Send + Sync + 'static {
    /// All zones in their initial state.
    ///
    /// # Errors
    /// If there is not enough memory.
    fn new(layout: ZoneLayout) -> Result<Self, TryReserveError>
    where
        Self: Sized;

    /// Writes at a sector of the zone.
    ///
    /// # Errors
    /// A status of docs/zones.md, or the status of [`Transfer::admit`].
    fn write<T: Transfer>(
        &self,
        zone: ZoneNo,
        at: Sector,
        sectors: u64,
        transfer: &mut T,
    ) -> Result<(), Status>;

    /// Writes at the zone's write pointer; returns the first sector of the data.
    ///
    /// # Errors
    /// As for [`ZoneSet::write`].
    fn append<T: Transfer>(
        &self,
        zone: ZoneNo,
        sectors: u64,
        transfer: &mut T,
    ) -> Result<Sector, Status>;

    /// Opens, closes, finishes or resets a zone.
    ///
    /// # Errors
    /// A status of docs/zones.md.
    fn manage<E: Erase>(&self, zone: ZoneNo, op: ZoneOp, erase: &mut E) -> Result<(), Status>;

    /// Resets every zone that can be reset.
    fn reset_all<E: Erase>(&self, erase: &mut E);

    /// The end of the readable data of the zone; above it, the zone reads as 0xFF.
    ///
    /// A read copies data below that end and then calls again. A thread that discards data lowers
    /// the end first, or makes this call wait until the data is gone.
    ///
    /// # Errors
    /// `IOERR` if the zone is offline.
    fn readable_end(&self, zone: ZoneNo) -> Result<Sector, Status>;

    /// How often data of the zone was discarded. A read calls this first, and again after it has
    /// copied. If the number has changed, the zone was empty for a moment in between, and the read
    /// returns the contents of that moment. With an implementation that does not count, a read that
    /// runs concurrently with a reset *and* a rewrite may return a mixture.
    fn erasures(&self, zone: ZoneNo) -> u64 {
        let _ = zone;
        0
    }

    /// The zone as a zone report shows it.
    fn info(&self, zone: ZoneNo) -> ZoneInfo;

    /// Makes a sequential zone read-only or offline. A zone that already is becomes empty again.
    fn break_zone<E: Erase>(&self, zone: ZoneNo, cond: ZoneCond, erase: &mut E);
}
