//! Zones with a lock each: a spin lock without data, a sleeping lock while data are copied.
//!
//! Conventional zones have no state that changes and need no lock. Reads load only the word that a
//! zone publishes. A separate lock protects the counts of open and active zones; it is never taken
//! where no limit is set ([`crate::zone_table`]). These were the product's zones before each zone
//! became a word. A read concurrent with a reset and a rewrite of its zone may return a mixture of
//! old and new data.

use std::collections::TryReserveError;

use blockyard_core::zone::{
    Erase, Transfer, Zone, ZoneCond, ZoneInfo, ZoneLayout, ZoneOp, ZoneSet, holding_of,
};
use blockyard_core::{Sector, Status, ZoneNo};
use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;
use blockyard_sync::spin_lock::SpinLock;
use blockyard_sync::zone_resources::{Holding, ZoneCounts, ZoneLimits};

use crate::tokens::{Grant, Tokens, TokensLock};
use crate::zone_table::{Attempt, Claim, UNREADABLE, ZoneTable};

/// The lock of a zone without data.
pub type SpinningZone = SpinLock<Zone, { ranks::ZONE }>;
/// The lock of a zone whose data are copied under the lock.
pub type SleepingZone = SleepLock<Zone, { ranks::ZONE }>;

/// Zones with a lock each: of type `S` without data, of type `D` with data. A lock of type `R`
/// protects the counts.
#[derive(Debug)]
pub struct LockedZones<S = SpinningZone, D = SleepingZone, R = TokensLock> {
    table: EitherTable<S, D, R>,
    layout: ZoneLayout,
}

#[derive(Debug)]
enum EitherTable<S, D, R> {
    Spinning(ZoneTable<S, R>),
    Sleeping(ZoneTable<D, R>),
}

/// Calls a method of the table, whichever variant it is.
macro_rules! on_table {
    ($self:expr, $table:ident => $call:expr) => {
        match &$self.table {
            EitherTable::Spinning($table) => $call,
            EitherTable::Sleeping($table) => $call,
        }
    };
}

impl<S: Lock<Zone>, D: Lock<Zone>, R: Lock<Tokens>> LockedZones<S, D, R> {
    /// The open and active zones now; `None` where no limit is set.
    pub fn counts(&self) -> Option<ZoneCounts> {
        on_table!(self, table => table.counts())
    }

    /// Calls `f` with a zone under its lock.
    #[inline]
    pub fn look<T>(&self, number: ZoneNo, f: impl FnOnce(&Zone) -> T) -> T {
        on_table!(self, table => table.look(number.0, f))
    }
}

/// Writes to a locked zone that has permitted the write; `to` is the zone's next condition.
#[inline]
fn put<R: Lock<Tokens>, T: Transfer>(
    zone: &mut Zone,
    claim: &mut Claim<'_, R>,
    to: ZoneCond,
    at: Sector,
    sectors: u64,
    transfer: &mut T,
) -> Attempt<Result<Sector, Status>> {
    if to != zone.cond() {
        match claim.take(zone.holding(), holding_of(to)) {
            Grant::Yes => zone.enter(to),
            Grant::MakeRoom => return Attempt::MakeRoom,
            Grant::No(refusal) => return Attempt::Done(Err(refusal.into())),
        }
    }
    let (sectors, status) = transfer.admit(at, sectors);
    transfer.copy(at, sectors);
    zone.advance(sectors);
    if zone.cond() == ZoneCond::Full {
        claim.settle(holding_of(to), Holding::Nothing);
    }
    Attempt::Done(if status.is_ok() { Ok(at) } else { Err(status) })
}

fn manage<L: Lock<Zone>, R: Lock<Tokens>, E: Erase>(
    table: &ZoneTable<L, R>,
    number: ZoneNo,
    op: ZoneOp,
    erase: &mut E,
) -> Result<(), Status> {
    table.change(number.0, |zone, claim| {
        let step = match zone.step(op) {
            Ok(step) => step,
            Err(status) => return Attempt::Done(Err(status)),
        };
        match claim.take(zone.holding(), step.through) {
            Grant::Yes => {}
            Grant::MakeRoom => return Attempt::MakeRoom,
            Grant::No(refusal) => return Attempt::Done(Err(refusal.into())),
        }
        if step.to == ZoneCond::Empty && zone.wp() > zone.start() {
            claim.show(zone.start().0);
            erase.erase(zone.start(), zone.end() - zone.start());
        }
        zone.enter(step.to);
        claim.settle(step.through, zone.holding());
        Attempt::Done(Ok(()))
    })
}

fn break_zone<L: Lock<Zone>, R: Lock<Tokens>, E: Erase>(
    table: &ZoneTable<L, R>,
    number: ZoneNo,
    cond: ZoneCond,
    erase: &mut E,
) {
    table.change(number.0, |zone, claim| {
        debug_assert!(zone.cond() != ZoneCond::NotWp, "conventional zones do not break");
        if zone.cond() == cond {
            claim.show(zone.start().0);
            erase.erase(zone.start(), zone.end() - zone.start());
            zone.enter(ZoneCond::Empty);
        } else {
            claim.settle(zone.holding(), Holding::Nothing);
            zone.enter(cond);
        }
        Attempt::Done(())
    });
}

impl<S, D, R> ZoneSet for LockedZones<S, D, R>
where
    S: Lock<Zone> + 'static,
    D: Lock<Zone> + 'static,
    R: Lock<Tokens> + 'static,
{
    fn new(layout: ZoneLayout) -> Result<Self, TryReserveError> {
        let geometry = &layout.zones;
        let limits = ZoneLimits { open_max: geometry.open_max, active_max: geometry.active_max };
        let zones =
            (0..geometry.zone_count as usize).map(|number| layout.zone(ZoneNo(number as u32)));
        let table = match layout.data {
            false => EitherTable::Spinning(ZoneTable::new(zones, limits)?),
            true => EitherTable::Sleeping(ZoneTable::new(zones, limits)?),
        };
        Ok(LockedZones { table, layout })
    }

    #[inline]
    fn write<T: Transfer>(
        &self,
        number: ZoneNo,
        at: Sector,
        sectors: u64,
        transfer: &mut T,
    ) -> Result<(), Status> {
        if self.layout.zones.is_conventional(number) {
            return self.layout.write_conventional(number, at, sectors, transfer);
        }
        let write = |zone: &mut Zone, claim: &mut Claim<'_, R>| match zone.step_write(at, sectors) {
            Ok(to) => put(zone, claim, to, at, sectors, transfer),
            Err(status) => Attempt::Done(Err(status)),
        };
        on_table!(self, table => table.change(number.0, write)).map(drop)
    }

    #[inline]
    fn append<T: Transfer>(
        &self,
        number: ZoneNo,
        sectors: u64,
        transfer: &mut T,
    ) -> Result<Sector, Status> {
        let append = |zone: &mut Zone, claim: &mut Claim<'_, R>| match zone.step_append(sectors) {
            Ok(to) => put(zone, claim, to, zone.wp(), sectors, transfer),
            Err(status) => Attempt::Done(Err(status)),
        };
        on_table!(self, table => table.change(number.0, append))
    }

    fn manage<E: Erase>(&self, number: ZoneNo, op: ZoneOp, erase: &mut E) -> Result<(), Status> {
        on_table!(self, table => manage(table, number, op, erase))
    }

    fn reset_all<E: Erase>(&self, erase: &mut E) {
        let geometry = &self.layout.zones;
        for number in geometry.conventional_count..geometry.zone_count {
            // No zone refuses a reset of all zones.
            let done = self.manage(ZoneNo(number), ZoneOp::ResetAll, erase);
            debug_assert_eq!(done, Ok(()));
        }
    }

    #[inline]
    fn readable_end(&self, number: ZoneNo) -> Result<Sector, Status> {
        if self.layout.zones.is_conventional(number) {
            return Ok(self.layout.range(number).1);
        }
        match on_table!(self, table => table.word(number.0)) {
            UNREADABLE => Err(Status::IoErr),
            end => Ok(Sector(end)),
        }
    }

    fn info(&self, number: ZoneNo) -> ZoneInfo {
        self.look(number, Zone::info)
    }

    fn break_zone<E: Erase>(&self, number: ZoneNo, cond: ZoneCond, erase: &mut E) {
        on_table!(self, table => break_zone(table, number, cond, erase));
    }
}
