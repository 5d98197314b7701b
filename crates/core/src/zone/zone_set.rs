//! The seam between a device and the guarding of its zones.
//!
//! A [`ZoneSet`] keeps condition and write pointer of every zone. The device asks it in whole
//! operations and hands it a [`Transfer`] for the data, so that an implementation is free to copy
//! them under a zone's lock, or to reserve room, copy outside of any lock, and commit.

use std::collections::TryReserveError;

use super::info::{ZoneCond, ZoneInfo};
use super::machine::{Zone, ZoneOp};
use crate::geometry::ZoneGeometry;
use crate::status::Status;
use crate::units::{Sector, ZoneNo};

/// What a zone set is made for.
#[derive(Clone, Debug)]
pub struct ZoneLayout {
    /// The zones.
    pub zones: ZoneGeometry,
    /// The device's length in sectors; the last zone may be shorter than the others.
    pub sectors: u64,
    /// Sequential zones are full at first.
    pub full: bool,
    /// Data are copied while a zone is worked on, so that it takes long.
    pub data: bool,
}

impl ZoneLayout {
    /// Where a zone starts and ends.
    #[inline]
    pub fn range(&self, zone: ZoneNo) -> (Sector, Sector) {
        let start = self.zones.start_of(zone);
        (start, start + self.zones.zone_sectors.min(self.sectors - start.0))
    }

    /// An empty sequential zone in a zone's place.
    #[inline]
    pub fn sequential(&self, zone: ZoneNo) -> Zone {
        let (start, end) = self.range(zone);
        let sectors = end - start;
        Zone::sequential(start, sectors, self.zones.zone_capacity_sectors.min(sectors))
    }

    /// A zone as it is at first.
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

    /// A write to a conventional zone: nobody needs to wait for anybody.
    ///
    /// # Errors
    /// `IOERR` outside of the zone, or the status that the transfer was admitted with.
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

/// The data of a write on their way to a zone.
pub trait Transfer {
    /// Whether `admit` may admit less than it is asked for. If not, it need not be asked.
    fn may_fall_short(&self) -> bool;

    /// How many of the sectors can be transferred to `at`, and the status of the request then.
    /// Asked once the zone has permitted all of them; an implementation whose permission is taken
    /// back by a race asks again.
    fn admit(&mut self, at: Sector, sectors: u64) -> (u64, Status);

    /// Transfers the first `sectors` to `at`. Called once at most.
    fn copy(&mut self, at: Sector, sectors: u64);
}

/// What is done with the data of zones that become empty: called with a range of sectors.
pub trait Erase {
    /// Forgets the data of a range.
    fn erase(&mut self, start: Sector, sectors: u64);
}

/// The zones of a device. Zone numbers must be below `zone_count`.
pub trait ZoneSet: Send + Sync + 'static {
    /// All zones as they are at first.
    ///
    /// # Errors
    /// If there is no memory for them.
    fn new(layout: ZoneLayout) -> Result<Self, TryReserveError>
    where
        Self: Sized;

    /// Writes at a sector of the zone.
    ///
    /// # Errors
    /// A status of docs/zones.md, or the one that the transfer was admitted with.
    fn write<T: Transfer>(
        &self,
        zone: ZoneNo,
        at: Sector,
        sectors: u64,
        transfer: &mut T,
    ) -> Result<(), Status>;

    /// Writes at the zone's write pointer, and says where that was.
    ///
    /// # Errors
    /// As for a write.
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

    /// Resets every zone that can be.
    fn reset_all<E: Erase>(&self, erase: &mut E);

    /// How far the zone holds data; above, it reads as 0xFF.
    ///
    /// A read copies data below that end and then asks again: whoever takes data away lowers the
    /// end before, or keeps who asks waiting until they are gone.
    ///
    /// # Errors
    /// `IOERR` if it is offline.
    fn readable_end(&self, zone: ZoneNo) -> Result<Sector, Status>;

    /// How often data of the zone were taken away. A read asks before anything else, and again when
    /// it has copied: if the number has changed, the zone was empty for a moment meanwhile, and the
    /// read answers as of that moment. An implementation that does not count leaves a read beside a
    /// reset *and* a rewrite with a mixture.
    fn erasures(&self, zone: ZoneNo) -> u64 {
        let _ = zone;
        0
    }

    /// A zone's row in a report.
    fn info(&self, zone: ZoneNo) -> ZoneInfo;

    /// Makes a sequential zone read-only or offline; one that is so already becomes empty again.
    fn break_zone<E: Erase>(&self, zone: ZoneNo, cond: ZoneCond, erase: &mut E);
}
