//! Zones as Linux's null_blk has locked them since 2020: one lock per zone, which reads take too.
//!
//! A separate lock protects the counts of open and active zones; it is taken only where a limit is
//! set. [`LockedZones`], the product's zones before each became a word, performs the writes. Reads
//! take the zone's lock here, as they do in null_blk.

use std::collections::TryReserveError;

use blockyard_core::zone::{
    Erase, Transfer, Zone, ZoneCond, ZoneInfo, ZoneLayout, ZoneOp, ZoneSet,
};
use blockyard_core::{Sector, Status, ZoneNo};
use blockyard_sync::lock::Lock;
use blockyard_sync::zone_resources::ZoneCounts;

use crate::locked_zones::{LockedZones, SleepingZone, SpinningZone};
use crate::tokens::{Tokens, TokensLock};

/// The baseline's name on a command line.
pub const NAME: &str = "lock-per-zone";

/// Zones with a lock each that reads take too. The parameters are those of [`LockedZones`].
#[derive(Debug)]
pub struct LockPerZone<S = SpinningZone, D = SleepingZone, R = TokensLock>(LockedZones<S, D, R>);

impl<S: Lock<Zone>, D: Lock<Zone>, R: Lock<Tokens>> LockPerZone<S, D, R> {
    /// The open and active zones now; `None` where no limit is set.
    pub fn counts(&self) -> Option<ZoneCounts> {
        self.0.counts()
    }
}

impl<S, D, R> ZoneSet for LockPerZone<S, D, R>
where
    S: Lock<Zone> + 'static,
    D: Lock<Zone> + 'static,
    R: Lock<Tokens> + 'static,
{
    fn new(layout: ZoneLayout) -> Result<Self, TryReserveError> {
        LockedZones::new(layout).map(LockPerZone)
    }

    #[inline]
    fn write<T: Transfer>(
        &self,
        zone: ZoneNo,
        at: Sector,
        sectors: u64,
        transfer: &mut T,
    ) -> Result<(), Status> {
        self.0.write(zone, at, sectors, transfer)
    }

    #[inline]
    fn append<T: Transfer>(
        &self,
        zone: ZoneNo,
        sectors: u64,
        transfer: &mut T,
    ) -> Result<Sector, Status> {
        self.0.append(zone, sectors, transfer)
    }

    fn manage<E: Erase>(&self, zone: ZoneNo, op: ZoneOp, erase: &mut E) -> Result<(), Status> {
        self.0.manage(zone, op, erase)
    }

    fn reset_all<E: Erase>(&self, erase: &mut E) {
        self.0.reset_all(erase);
    }

    #[inline]
    fn readable_end(&self, zone: ZoneNo) -> Result<Sector, Status> {
        self.0.look(zone, Zone::readable_end)
    }

    fn info(&self, zone: ZoneNo) -> ZoneInfo {
        self.0.info(zone)
    }

    fn break_zone<E: Erase>(&self, zone: ZoneNo, cond: ZoneCond, erase: &mut E) {
        self.0.break_zone(zone, cond, erase);
    }
}
