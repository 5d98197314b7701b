//! Zones locked as Linux's null_blk locks them, with the race that this causes.
//!
//! There is one lock per zone, and one more for the counts, as in the lock-per-zone baseline. But a
//! zone is closed to make room under the lock of the counts alone, while another thread may hold
//! the zone's lock. A writer that fills the zone at that moment finds it closed and returns no
//! token, so one token is lost permanently. The zone's condition is also set to open only after the
//! lock of the counts is released, so a search for a victim may skip the zone.
//!
//! This is written from a description of null_blk's method, to show what the experiment `race`
//! finds. Nothing is measured against it, and it is no reference for correctness.
// The races here are deliberate. The words are atomics, so that a race gives a wrong count and no
// undefined behaviour.
#![allow(clippy::disallowed_types)]

use std::collections::TryReserveError;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use blockyard_core::zone::{
    Erase, Transfer, Zone, ZoneCond, ZoneInfo, ZoneLayout, ZoneOp, ZoneSet,
};
use blockyard_core::{Sector, Status, ZoneNo};
use blockyard_sync::atomic_zones::Condition;
use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;
use blockyard_sync::spin_lock::SpinLock;

/// The baseline's name in the experiment.
pub const NAME: &str = "null_blk";

/// Zones locked as null_blk locks them.
#[derive(Debug)]
pub struct NullBlkZones {
    zones: Box<[LockedZone]>,
    counts: SpinLock<ZoneCounts, { ranks::RESOURCES }>,
    layout: ZoneLayout,
}

/// A zone. The holder of the lock owns condition and write pointer; `close_victim` breaks this
/// rule.
#[derive(Debug)]
#[repr(align(64))]
struct LockedZone {
    lock: SleepLock<(), { ranks::ZONE }>,
    cond: AtomicU8,
    /// The write pointer, in sectors from the zone's start.
    wp: AtomicU64,
}

impl LockedZone {
    fn cond(&self) -> ZoneCond {
        ZoneCond::from_bits(self.cond.load(Relaxed))
    }

    fn set(&self, cond: ZoneCond) {
        self.cond.store(cond.bits(), Relaxed);
    }
}

/// The counts of open and active zones. They are signed, because a lost token may be returned
/// twice.
#[derive(Debug, Default)]
struct ZoneCounts {
    implicit: i64,
    explicit: i64,
    closed: i64,
    /// The zone at which the next search for a victim starts.
    cursor: usize,
}

impl ZoneCounts {
    fn of(&mut self, cond: ZoneCond) -> Option<&mut i64> {
        match cond {
            ZoneCond::ImplicitOpen => Some(&mut self.implicit),
            ZoneCond::ExplicitOpen => Some(&mut self.explicit),
            ZoneCond::Closed => Some(&mut self.closed),
            _ => None,
        }
    }

    fn add(&mut self, cond: ZoneCond, by: i64) {
        if let Some(count) = self.of(cond) {
            *count += by;
        }
    }
}

impl NullBlkZones {
    fn line(&self, zone: ZoneNo) -> &LockedZone {
        &self.zones[zone.index()]
    }

    fn has_limits(&self) -> bool {
        self.layout.zones.open_max != 0 || self.layout.zones.active_max != 0
    }

    /// Counts an empty or closed zone as open, if the limits allow it.
    fn take(&self, from: ZoneCond, to: ZoneCond) -> Result<(), Status> {
        if !self.has_limits() {
            return Ok(());
        }
        let (open_max, active_max) =
            (i64::from(self.layout.zones.open_max), i64::from(self.layout.zones.active_max));
        self.counts.with(|counts| {
            let open = counts.implicit + counts.explicit;
            let active_left = active_max == 0 || open + counts.closed < active_max;
            if from == ZoneCond::Empty && !active_left {
                return Err(Status::ZoneActiveResource);
            }
            if open_max != 0 && open >= open_max {
                if counts.implicit <= 0 || !active_left {
                    return Err(Status::ZoneOpenResource);
                }
                self.close_victim(counts);
            }
            counts.add(from, -1);
            counts.add(to, 1);
            Ok(())
        })
    }

    /// Closes the next implicitly open zone in turn, without taking the zone's lock: this is the
    /// bug.
    fn close_victim(&self, counts: &mut ZoneCounts) {
        for _ in 0..self.zones.len() {
            let at = counts.cursor;
            counts.cursor = (at + 1) % self.zones.len();
            let line = &self.zones[at];
            if line.cond() != ZoneCond::ImplicitOpen {
                continue;
            }
            let to = match line.wp.load(Relaxed) {
                0 => ZoneCond::Empty,
                _ => ZoneCond::Closed,
            };
            counts.implicit -= 1;
            counts.add(to, 1);
            line.set(to);
            return;
        }
    }

    /// Counts that a zone holds no open or active resource, whatever its condition says.
    fn give_back(&self, line: &LockedZone) {
        if self.has_limits() {
            self.counts.with(|counts| counts.add(line.cond(), -1));
        }
    }

    fn put<T: Transfer>(
        &self,
        number: ZoneNo,
        at: Option<Sector>,
        sectors: u64,
        transfer: &mut T,
    ) -> Result<Sector, Status> {
        let (line, zone) = (self.line(number), self.layout.sequential(number));
        let capacity = zone.info().capacity_sectors;
        line.lock.with(|()| {
            let (cond, wp) = (line.cond(), line.wp.load(Relaxed));
            if matches!(cond, ZoneCond::Full | ZoneCond::ReadOnly | ZoneCond::Offline) {
                return Err(Status::IoErr);
            }
            let here = zone.start() + wp;
            if at.is_some_and(|at| at != here) || sectors > capacity - wp.min(capacity) {
                return Err(Status::IoErr);
            }
            if matches!(cond, ZoneCond::Empty | ZoneCond::Closed) {
                self.take(cond, ZoneCond::ImplicitOpen)?;
                line.set(ZoneCond::ImplicitOpen);
            }
            let (sectors, status) = transfer.admit(here, sectors);
            transfer.copy(here, sectors);
            line.wp.store(wp + sectors, Relaxed);
            if wp + sectors == capacity {
                // A zone that was closed concurrently returns no token here.
                if line.cond() != ZoneCond::Closed {
                    self.give_back(line);
                }
                line.set(ZoneCond::Full);
            }
            if status.is_ok() { Ok(here) } else { Err(status) }
        })
    }

    /// Moves a zone to a condition in which it holds no resource.
    fn settle(&self, number: ZoneNo, to: ZoneCond, erase: impl FnOnce(Sector, u64)) {
        let (line, zone) = (self.line(number), self.layout.sequential(number));
        let sectors = zone.info().sectors;
        line.lock.with(|()| {
            self.give_back(line);
            line.set(to);
            match to {
                ZoneCond::Full => line.wp.store(sectors, Relaxed),
                _ => {
                    line.wp.store(0, Relaxed);
                    erase(zone.start(), sectors);
                }
            }
        });
    }

    /// Opens or closes a zone by command.
    fn turn(&self, number: ZoneNo, op: ZoneOp) -> Result<(), Status> {
        let line = self.line(number);
        line.lock.with(|()| {
            let cond = line.cond();
            let to = match (op, cond) {
                (_, ZoneCond::Full | ZoneCond::ReadOnly | ZoneCond::Offline) => {
                    return Err(Status::IoErr);
                }
                (ZoneOp::Open, _) => ZoneCond::ExplicitOpen,
                (_, ZoneCond::Empty) => return Err(Status::IoErr),
                _ if line.wp.load(Relaxed) == 0 => ZoneCond::Empty,
                _ => ZoneCond::Closed,
            };
            if op == ZoneOp::Open && matches!(cond, ZoneCond::Empty | ZoneCond::Closed) {
                self.take(cond, to)?;
            } else if self.has_limits() {
                self.counts.with(|counts| {
                    counts.add(cond, -1);
                    counts.add(to, 1);
                });
            }
            line.set(to);
            Ok(())
        })
    }

    fn shown(&self, number: ZoneNo) -> Zone {
        if self.layout.zones.is_conventional(number) {
            return self.layout.zone(number);
        }
        let line = self.line(number);
        self.layout.sequential(number).restore(line.cond(), line.wp.load(Relaxed))
    }
}

impl ZoneSet for NullBlkZones {
    fn new(layout: ZoneLayout) -> Result<Self, TryReserveError> {
        let mut zones = Vec::new();
        zones.try_reserve_exact(layout.zones.zone_count as usize)?;
        zones.extend((0..layout.zones.zone_count).map(ZoneNo).map(|number| {
            let zone = layout.zone(number);
            let written = zone.readable_end().map_or(0, |end| end - zone.start());
            LockedZone {
                lock: SleepLock::new(()),
                cond: AtomicU8::new(zone.cond().bits()),
                wp: AtomicU64::new(written),
            }
        }));
        let counts = SpinLock::new(ZoneCounts::default());
        Ok(NullBlkZones { zones: zones.into_boxed_slice(), counts, layout })
    }

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
        self.put(number, Some(at), sectors, transfer).map(drop)
    }

    fn append<T: Transfer>(
        &self,
        number: ZoneNo,
        sectors: u64,
        transfer: &mut T,
    ) -> Result<Sector, Status> {
        if self.layout.zones.is_conventional(number) {
            return Err(Status::IoErr);
        }
        self.put(number, None, sectors, transfer)
    }

    fn manage<E: Erase>(&self, number: ZoneNo, op: ZoneOp, erase: &mut E) -> Result<(), Status> {
        let step = self.shown(number).step(op)?;
        if self.layout.zones.is_conventional(number) {
            return Ok(());
        }
        match op {
            ZoneOp::Finish => {
                // The transition goes through an open zone, so that the limits are checked.
                if matches!(self.line(number).cond(), ZoneCond::Empty | ZoneCond::Closed) {
                    self.turn(number, ZoneOp::Open)?;
                }
                self.settle(number, ZoneCond::Full, |_, _| {});
            }
            // An empty zone is skipped whatever its write pointer, as its condition shows.
            ZoneOp::Reset | ZoneOp::ResetAll
                if step.to == ZoneCond::Empty && self.line(number).cond() != ZoneCond::Empty =>
            {
                self.settle(number, ZoneCond::Empty, |at, sectors| erase.erase(at, sectors));
            }
            ZoneOp::Open | ZoneOp::Close => return self.turn(number, op),
            _ => {}
        }
        Ok(())
    }

    fn reset_all<E: Erase>(&self, erase: &mut E) {
        let geometry = &self.layout.zones;
        for number in geometry.conventional_count..geometry.zone_count {
            // No zone refuses a reset of all zones.
            let done = self.manage(ZoneNo(number), ZoneOp::ResetAll, erase);
            debug_assert_eq!(done, Ok(()));
        }
    }

    fn readable_end(&self, number: ZoneNo) -> Result<Sector, Status> {
        self.shown(number).readable_end()
    }

    fn info(&self, number: ZoneNo) -> ZoneInfo {
        self.shown(number).info()
    }

    fn break_zone<E: Erase>(&self, number: ZoneNo, cond: ZoneCond, erase: &mut E) {
        let to = if self.line(number).cond() == cond { ZoneCond::Empty } else { cond };
        self.settle(number, to, |at, sectors| erase.erase(at, sectors));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A transfer without data, which never fails.
    struct Nothing;

    impl Transfer for Nothing {
        fn may_fall_short(&self) -> bool {
            false
        }

        fn admit(&mut self, _: Sector, sectors: u64) -> (u64, Status) {
            (sectors, Status::Ok)
        }

        fn copy(&mut self, _: Sector, _: u64) {}
    }

    impl Erase for Nothing {
        fn erase(&mut self, _: Sector, _: u64) {}
    }

    fn zones() -> NullBlkZones {
        let zones = blockyard_core::ZoneGeometry {
            zone_sectors: 8,
            zone_capacity_sectors: 8,
            zone_count: 4,
            conventional_count: 0,
            open_max: 1,
            active_max: 2,
        };
        let layout = ZoneLayout { zones, sectors: 32, full: false, data: false };
        NullBlkZones::new(layout).unwrap()
    }

    fn write(zones: &NullBlkZones, number: u32, sectors: u64) -> Result<(), Status> {
        zones.append(ZoneNo(number), sectors, &mut Nothing).map(drop)
    }

    #[test]
    fn alone_it_counts_right() {
        let zones = zones();
        assert_eq!(write(&zones, 0, 4), Ok(()));
        assert_eq!(write(&zones, 1, 4), Ok(()));
        assert_eq!(zones.info(ZoneNo(0)).cond, ZoneCond::Closed);
        assert_eq!(write(&zones, 2, 4), Err(Status::ZoneActiveResource));
        assert_eq!(write(&zones, 1, 4), Ok(()));
        assert_eq!(zones.info(ZoneNo(1)).cond, ZoneCond::Full);
        assert_eq!(write(&zones, 0, 4), Ok(()));
        zones.reset_all(&mut Nothing);
        for number in 0..2 {
            assert_eq!(write(&zones, number, 4), Ok(()));
        }
    }

    /// The published bug, step by step: zone 0 is closed for zone 1 while a writer fills zone 0.
    #[test]
    fn a_victim_that_is_being_filled_loses_a_token() {
        struct Filling<'a>(&'a NullBlkZones);
        impl Transfer for Filling<'_> {
            fn may_fall_short(&self) -> bool {
                false
            }
            fn admit(&mut self, _: Sector, sectors: u64) -> (u64, Status) {
                (sectors, Status::Ok)
            }
            fn copy(&mut self, _: Sector, _: u64) {
                // The other writer needs a thread of its own, because this thread holds a zone's
                // lock.
                std::thread::scope(|scope| {
                    scope.spawn(|| assert_eq!(write(self.0, 1, 4), Ok(())));
                });
            }
        }
        let zones = zones();
        assert_eq!(write(&zones, 0, 4), Ok(()));
        assert_eq!(zones.append(ZoneNo(0), 4, &mut Filling(&zones)), Ok(Sector(4)));
        zones.reset_all(&mut Nothing);
        assert_eq!(write(&zones, 0, 4), Ok(()));
        assert_eq!(write(&zones, 1, 4), Err(Status::ZoneActiveResource), "one is lost");
    }
}
