//! Zones as Linux's null_blk locked them until 2020: one lock over all of them.
//!
//! Every operation on a zone takes the one lock, reads too. Open and active zones are counted even
//! where no limit is set, and data are copied under the lock. The lock spins where the device holds
//! no data and sleeps where it does. The transitions of a zone are the product's state machine:
//! only the locking differs.
//!
//! A read with data asks twice how far the zone can be read and copies between the two, as the
//! device does with any zone set; null_blk took the lock once and copied under it. The published
//! case is a read without data, which takes the lock once in both.

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

use crate::close_implicitly;
use crate::queued_lock::QueuedLock;

/// The baseline's name on a command line.
pub const NAME: &str = "one-lock";

/// The name of the variant whose lock, where there are no data, is granted in the order of arrival.
pub const NAME_QUEUED: &str = "one-lock-queued";

/// The lock where there are no data, granted in the order of arrival as Linux's spin locks are.
pub type QueuedZones = QueuedLock<LockedZones>;
/// The lock where there are no data, granted to the thread that takes it first.
pub type SpinningZones = SpinLock<LockedZones, { ranks::ZONE }>;
/// The lock under which data are copied.
pub type SleepingZones = SleepLock<LockedZones, { ranks::ZONE }>;

/// Zones protected by one lock: of type `S` without data, of type `D` with data.
#[derive(Debug)]
pub struct OneLock<S = SpinningZones, D = SleepingZones> {
    lock: EitherLock<S, D>,
}

#[derive(Debug)]
enum EitherLock<S, D> {
    Spinning(S),
    Sleeping(D),
}

/// All zones and their counts: the value that the lock protects.
#[derive(Debug)]
pub struct LockedZones {
    zones: Vec<Zone>,
    /// For each zone the value of `openings` at its last implicit opening.
    opened: Vec<u64>,
    openings: u64,
    counts: ZoneCounts,
    limits: ZoneLimits,
}

fn is_active(holding: Holding) -> bool {
    holding != Holding::Nothing
}

fn is_open(holding: Holding) -> bool {
    matches!(holding, Holding::Implicit | Holding::Explicit)
}

impl LockedZones {
    fn zone(&mut self, number: ZoneNo) -> &mut Zone {
        &mut self.zones[number.index()]
    }

    /// Counts that a zone holds `to` instead of `from`.
    fn count(&mut self, number: ZoneNo, from: Holding, to: Holding) {
        let counts = &mut self.counts;
        let explicit = |holding| u32::from(holding == Holding::Explicit);
        counts.active = counts.active + u32::from(is_active(to)) - u32::from(is_active(from));
        counts.open = counts.open + u32::from(is_open(to)) - u32::from(is_open(from));
        counts.explicit = counts.explicit + explicit(to) - explicit(from);
        if to == Holding::Implicit && from != Holding::Implicit {
            self.openings += 1;
            self.opened[number.index()] = self.openings;
        }
    }

    /// Counts that a zone holds `to` instead of `from` if the limits allow it; another zone may
    /// have to be closed first.
    fn take(&mut self, number: ZoneNo, from: Holding, to: Holding) -> Result<(), Status> {
        let ZoneLimits { open_max, active_max } = self.limits;
        let becomes_active = is_active(to) && !is_active(from);
        if becomes_active && active_max != 0 && self.counts.active >= active_max {
            return Err(Status::ZoneActiveResource);
        }
        let becomes_open = is_open(to) && !is_open(from);
        if becomes_open && open_max != 0 && self.counts.open >= open_max {
            self.close_oldest().ok_or(Status::ZoneOpenResource)?;
        }
        self.count(number, from, to);
        Ok(())
    }

    /// Closes the zone that has been implicitly open for longest, if there is one.
    fn close_oldest(&mut self) -> Option<()> {
        let implicit =
            (0..self.zones.len()).filter(|&at| self.zones[at].holding() == Holding::Implicit);
        let oldest = implicit.min_by_key(|&at| self.opened[at])?;
        close_implicitly(&mut self.zones[oldest]);
        let holds = self.zones[oldest].holding();
        self.count(ZoneNo(oldest as u32), Holding::Implicit, holds);
        Some(())
    }

    /// Writes to a zone that has permitted the write; `to` is the zone's next condition.
    fn put<T: Transfer>(
        &mut self,
        number: ZoneNo,
        to: ZoneCond,
        at: Sector,
        sectors: u64,
        transfer: &mut T,
    ) -> Result<Sector, Status> {
        let from = self.zone(number).holding();
        self.take(number, from, holding_of(to))?;
        self.zone(number).enter(to);
        let (sectors, status) = transfer.admit(at, sectors);
        transfer.copy(at, sectors);
        self.zone(number).advance(sectors);
        let holds = self.zone(number).holding();
        self.count(number, holding_of(to), holds);
        if status.is_ok() { Ok(at) } else { Err(status) }
    }

    fn manage<E: Erase>(
        &mut self,
        number: ZoneNo,
        op: ZoneOp,
        erase: &mut E,
    ) -> Result<(), Status> {
        let zone = *self.zone(number);
        let step = zone.step(op)?;
        self.take(number, zone.holding(), step.through)?;
        if step.to == ZoneCond::Empty && zone.wp() > zone.start() {
            erase.erase(zone.start(), zone.end() - zone.start());
        }
        self.zone(number).enter(step.to);
        self.count(number, step.through, holding_of(step.to));
        Ok(())
    }

    fn break_zone<E: Erase>(&mut self, number: ZoneNo, cond: ZoneCond, erase: &mut E) {
        let zone = *self.zone(number);
        if zone.cond() == cond {
            erase.erase(zone.start(), zone.end() - zone.start());
            self.zone(number).enter(ZoneCond::Empty);
        } else {
            self.zone(number).enter(cond);
            self.count(number, zone.holding(), Holding::Nothing);
        }
    }
}

impl<S: Lock<LockedZones>, D: Lock<LockedZones>> OneLock<S, D> {
    /// Calls `f` with the zones under the lock.
    #[inline]
    fn with<R>(&self, f: impl FnOnce(&mut LockedZones) -> R) -> R {
        match &self.lock {
            EitherLock::Spinning(lock) => lock.with(f),
            EitherLock::Sleeping(lock) => lock.with(f),
        }
    }
}

impl<S, D> ZoneSet for OneLock<S, D>
where
    S: Lock<LockedZones> + 'static,
    D: Lock<LockedZones> + 'static,
{
    fn new(layout: ZoneLayout) -> Result<Self, TryReserveError> {
        let ZoneLayout { zones: geometry, sectors, full, data } = layout;
        let count = geometry.zone_count as usize;
        let (mut zones, mut opened) = (Vec::new(), Vec::new());
        zones.try_reserve_exact(count)?;
        opened.try_reserve_exact(count)?;
        opened.resize(count, 0);
        for number in (0..geometry.zone_count).map(ZoneNo) {
            let start = geometry.start_of(number);
            let length = geometry.zone_sectors.min(sectors - start.0);
            let capacity = geometry.zone_capacity_sectors.min(length);
            let mut zone = match geometry.is_conventional(number) {
                true => Zone::conventional(start, length),
                false => Zone::sequential(start, length, capacity),
            };
            if full && zone.cond() == ZoneCond::Empty {
                zone.fill();
            }
            zones.push(zone);
        }
        let limits = ZoneLimits { open_max: geometry.open_max, active_max: geometry.active_max };
        let zones =
            LockedZones { zones, opened, openings: 0, counts: ZoneCounts::default(), limits };
        let lock = match data {
            false => EitherLock::Spinning(S::new(zones)),
            true => EitherLock::Sleeping(D::new(zones)),
        };
        Ok(OneLock { lock })
    }

    fn write<T: Transfer>(
        &self,
        zone: ZoneNo,
        at: Sector,
        sectors: u64,
        transfer: &mut T,
    ) -> Result<(), Status> {
        self.with(|zones| {
            let to = zones.zone(zone).step_write(at, sectors)?;
            zones.put(zone, to, at, sectors, transfer).map(drop)
        })
    }

    fn append<T: Transfer>(
        &self,
        zone: ZoneNo,
        sectors: u64,
        transfer: &mut T,
    ) -> Result<Sector, Status> {
        self.with(|zones| {
            let to = zones.zone(zone).step_append(sectors)?;
            let at = zones.zone(zone).wp();
            zones.put(zone, to, at, sectors, transfer)
        })
    }

    fn manage<E: Erase>(&self, zone: ZoneNo, op: ZoneOp, erase: &mut E) -> Result<(), Status> {
        self.with(|zones| zones.manage(zone, op, erase))
    }

    fn reset_all<E: Erase>(&self, erase: &mut E) {
        self.with(|zones| {
            for number in 0..zones.zones.len() {
                let done = zones.manage(ZoneNo(number as u32), ZoneOp::ResetAll, erase);
                debug_assert_eq!(done, Ok(()), "no zone refuses to be one of all");
            }
        });
    }

    fn readable_end(&self, zone: ZoneNo) -> Result<Sector, Status> {
        self.with(|zones| zones.zone(zone).readable_end())
    }

    fn info(&self, zone: ZoneNo) -> ZoneInfo {
        self.with(|zones| zones.zone(zone).info())
    }

    fn break_zone<E: Erase>(&self, zone: ZoneNo, cond: ZoneCond, erase: &mut E) {
        self.with(|zones| zones.break_zone(zone, cond, erase));
    }
}
