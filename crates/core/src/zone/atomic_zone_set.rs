//! Zones with an atomic word each; data is copied outside of any lock.
//!
//! The state machine computes the new state of a zone, and the primitive exchanges the zone's word
//! for it ([`blockyard_sync::atomic_zones`]). Conventional zones have no state. Open and active
//! zones are counted under a lock, which is taken only if the device has a limit.

use std::collections::TryReserveError;

use blockyard_sync::atomic_zones::{AtomicZones, Change, UNREADABLE, ZoneView};
use blockyard_sync::lock::Lock;
use blockyard_sync::zone_resources::{Accounts, AccountsLock, Holding, ZoneCounts, ZoneLimits};

use super::info::{ZoneCond, ZoneInfo};
use super::machine::{Zone, ZoneOp, holding_of};
use super::zone_set::{Erase, Transfer, ZoneLayout, ZoneSet};
use crate::bio::Status;
use crate::units::{Sector, ZoneNo};

/// The zones of a device, with an atomic word each; `R` is the lock that guards the counts.
#[derive(Debug)]
pub struct AtomicZoneSet<R = AccountsLock> {
    words: AtomicZones<ZoneCond, R>,
    layout: ZoneLayout,
}

/// The part of a zone's state that its word holds.
#[inline]
fn view_of(zone: &Zone) -> ZoneView<ZoneCond> {
    let wp = zone.readable_end().map_or(UNREADABLE, |end| end - zone.start());
    ZoneView { cond: zone.cond(), wp }
}

/// Calls `admit` of a transfer once for each position, and keeps its first refusal. A bad block
/// that repairs itself when it is hit must not be hit a second time only because another thread won
/// a race.
struct Admission<'a, T> {
    transfer: &'a mut T,
    sectors: u64,
    at: Sector,
    answer: Option<(u64, Status)>,
}

impl<T: Transfer> Admission<'_, T> {
    /// How many sectors may be transferred to `at`, and the status of the request.
    #[inline]
    fn at(&mut self, at: Sector) -> (u64, Status) {
        let answer = match self.answer {
            Some(answer) if at == self.at => answer,
            Some((_, status)) if !status.is_ok() => (0, status),
            _ => self.transfer.admit(at, self.sectors),
        };
        (self.at, self.answer) = (at, Some(answer));
        answer
    }
}

impl<R: Lock<Accounts>> AtomicZoneSet<R> {
    /// The number of open and of active zones; `None` if no limit is set.
    pub fn counts(&self) -> Option<ZoneCounts> {
        self.words.counts()
    }

    /// A sequential zone in the state of its word.
    #[inline]
    fn zone(&self, number: ZoneNo, view: ZoneView<ZoneCond>) -> Zone {
        self.layout.sequential(number).restore(view.cond, view.wp)
    }

    /// Writes at the sector that `step` returns, if `step` permits the write.
    #[inline]
    fn put<T: Transfer>(
        &self,
        number: ZoneNo,
        sectors: u64,
        transfer: &mut T,
        step: impl Fn(&Zone) -> Result<(Sector, ZoneCond), Status>,
    ) -> Result<Sector, Status> {
        if transfer.may_fall_short() {
            return self.put_carefully(number, sectors, transfer, step);
        }
        let mut landed = Sector::NONE;
        let reservation = self.words.reserve(number.0, |view| {
            let zone = self.zone(number, view);
            let (at, to) = step(&zone)?;
            landed = at;
            Ok::<_, Status>(Self::written(zone, view, to, sectors))
        })?;
        transfer.copy(landed, sectors);
        drop(reservation);
        Ok(landed)
    }

    /// Writes as `put`, while bad blocks are armed.
    #[cold]
    fn put_carefully<T: Transfer>(
        &self,
        number: ZoneNo,
        sectors: u64,
        transfer: &mut T,
        step: impl Fn(&Zone) -> Result<(Sector, ZoneCond), Status>,
    ) -> Result<Sector, Status> {
        // The zone is opened first, as in null_blk. So a write that a limit refuses hits no bad
        // block, and a write that fails at a bad block leaves the zone open.
        self.words.exchange(number.0, |view| {
            let (_, to) = step(&self.zone(number, view))?;
            Ok::<_, Status>(Change { through: holding_of(to), to: ZoneView { cond: to, ..view } })
        })?;
        let mut admission = Admission { transfer, sectors, at: Sector::NONE, answer: None };
        let mut landed = (Sector::NONE, 0, Status::Ok);
        let reservation = self.words.reserve(number.0, |view| {
            let zone = self.zone(number, view);
            let (at, to) = step(&zone)?;
            let (sectors, status) = admission.at(at);
            landed = (at, sectors, status);
            Ok::<_, Status>(Self::written(zone, view, to, sectors))
        })?;
        let (at, sectors, status) = landed;
        transfer.copy(at, sectors);
        drop(reservation);
        if status.is_ok() { Ok(at) } else { Err(status) }
    }

    /// The state of a zone that enters `to` and is written.
    #[inline]
    fn written(
        mut zone: Zone,
        view: ZoneView<ZoneCond>,
        to: ZoneCond,
        sectors: u64,
    ) -> Change<ZoneCond> {
        zone.enter(to);
        zone.advance(sectors);
        let to_view = ZoneView { cond: zone.cond(), wp: view.wp + sectors };
        Change { through: holding_of(to), to: to_view }
    }

    /// The state of a zone after an operation.
    fn step(
        &self,
        number: ZoneNo,
        op: ZoneOp,
        view: ZoneView<ZoneCond>,
    ) -> Result<Change<ZoneCond>, Status> {
        let mut zone = self.zone(number, view);
        let step = zone.step(op)?;
        zone.enter(step.to);
        Ok(Change { through: step.through, to: view_of(&zone) })
    }

    fn eraser<'a, E: Erase>(
        &self,
        number: ZoneNo,
        erase: &'a mut E,
    ) -> impl FnOnce() + use<'a, E, R> {
        let (start, end) = self.layout.range(number);
        move || erase.erase(start, end - start)
    }
}

impl<R: Lock<Accounts> + 'static> ZoneSet for AtomicZoneSet<R> {
    fn new(layout: ZoneLayout) -> Result<Self, TryReserveError> {
        let geometry = &layout.zones;
        let limits = ZoneLimits { open_max: geometry.open_max, active_max: geometry.active_max };
        let zones =
            (0..geometry.zone_count as usize).map(|number| layout.zone(ZoneNo(number as u32)));
        let words = AtomicZones::new(zones.map(|zone| view_of(&zone)), limits, layout.data)?;
        Ok(AtomicZoneSet { words, layout })
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
        let step = |zone: &Zone| zone.step_write(at, sectors).map(|to| (at, to));
        self.put(number, sectors, transfer, step).map(drop)
    }

    #[inline]
    fn append<T: Transfer>(
        &self,
        number: ZoneNo,
        sectors: u64,
        transfer: &mut T,
    ) -> Result<Sector, Status> {
        if self.layout.zones.is_conventional(number) {
            return Err(Status::IoErr);
        }
        let step = |zone: &Zone| zone.step_append(sectors).map(|to| (zone.wp(), to));
        self.put(number, sectors, transfer, step)
    }

    fn manage<E: Erase>(&self, number: ZoneNo, op: ZoneOp, erase: &mut E) -> Result<(), Status> {
        if self.layout.zones.is_conventional(number) {
            return self.layout.zone(number).step(op).map(drop);
        }
        let step = |view| self.step(number, op, view);
        match op {
            ZoneOp::Finish | ZoneOp::Reset | ZoneOp::ResetAll => {
                self.words.replace(number.0, step, self.eraser(number, erase))
            }
            _ => self.words.exchange(number.0, step).map(drop),
        }
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
        match self.words.readable(number.0) {
            UNREADABLE => Err(Status::IoErr),
            end => Ok(self.layout.zones.start_of(number) + end),
        }
    }

    #[inline]
    fn erasures(&self, number: ZoneNo) -> u64 {
        self.words.erasures(number.0)
    }

    fn info(&self, number: ZoneNo) -> ZoneInfo {
        if self.layout.zones.is_conventional(number) {
            return self.layout.zone(number).info();
        }
        self.zone(number, self.words.look(number.0)).info()
    }

    fn break_zone<E: Erase>(&self, number: ZoneNo, cond: ZoneCond, erase: &mut E) {
        debug_assert!(!self.layout.zones.is_conventional(number), "they do not break");
        let step = |view| {
            let mut zone = self.zone(number, view);
            zone.enter(if zone.cond() == cond { ZoneCond::Empty } else { cond });
            // The zone holds no resources after this, so no limit can refuse it.
            Ok::<_, Status>(Change { through: Holding::Nothing, to: view_of(&zone) })
        };
        let done = self.words.replace(number.0, step, self.eraser(number, erase));
        debug_assert_eq!(done, Ok(()));
    }
}
