//! Zones with an atomic word each, in random interleavings of shuttle: more threads and longer runs
//! than loom can explore. Run by `make shuttle`; without `--cfg shuttle` this file is empty.
#![cfg(shuttle)]
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use blockyard_core::zone::{AtomicZoneSet, Erase, Transfer, ZoneCond, ZoneLayout, ZoneOp, ZoneSet};
use blockyard_core::{Sector, Status, ZoneGeometry, ZoneNo};
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;

const ZONE_SECTORS: u64 = 4;

fn zones(zone_count: u32, open_max: u32, active_max: u32, data: bool) -> Arc<AtomicZoneSet> {
    let zones = ZoneGeometry {
        zone_sectors: ZONE_SECTORS,
        zone_capacity_sectors: ZONE_SECTORS,
        zone_count,
        conventional_count: 0,
        open_max,
        active_max,
    };
    let sectors = u64::from(zone_count) * ZONE_SECTORS;
    Arc::new(AtomicZoneSet::new(ZoneLayout { zones, sectors, full: false, data }).unwrap())
}

/// The contents of the sectors; 0 means not written.
#[derive(Clone)]
struct Medium(Arc<Vec<AtomicU64>>);

impl Medium {
    fn new(sectors: u64) -> Medium {
        Medium(Arc::new((0..sectors).map(|_| AtomicU64::new(0)).collect()))
    }

    fn at(&self, sector: u64) -> u64 {
        self.0[sector as usize].load(Ordering::SeqCst)
    }
}

/// A transfer that writes a stamp to each sector.
struct Stamp<'a>(&'a Medium, u64);

impl Transfer for Stamp<'_> {
    fn may_fall_short(&self) -> bool {
        false
    }

    fn admit(&mut self, _: Sector, sectors: u64) -> (u64, Status) {
        (sectors, Status::Ok)
    }

    fn copy(&mut self, at: Sector, sectors: u64) {
        for sector in at.0..at.0 + sectors {
            self.0.0[sector as usize].store(self.1, Ordering::SeqCst);
        }
    }
}

impl Erase for Medium {
    fn erase(&mut self, start: Sector, sectors: u64) {
        for sector in start.0..start.0 + sectors {
            self.0[sector as usize].store(0, Ordering::SeqCst);
        }
    }
}

/// Runs a body in random interleavings of two kinds.
fn draw(body: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(body.clone(), 2_000);
    shuttle::check_pct(body, 2_000, 3);
}

fn counts_agree(zones: &AtomicZoneSet, zone_count: u32) {
    let count = |wanted: &[ZoneCond]| {
        let conds = (0..zone_count).map(|zone| zones.info(ZoneNo(zone)).cond);
        conds.filter(|cond| wanted.contains(cond)).count() as u32
    };
    let explicit = count(&[ZoneCond::ExplicitOpen]);
    let open = explicit + count(&[ZoneCond::ImplicitOpen]);
    let active = open + count(&[ZoneCond::Closed]);
    let counts = zones.counts().unwrap();
    assert_eq!((counts.open, counts.explicit, counts.active), (open, explicit, active));
}

/// The kernel's null_blk loses resources in this case. Each writer has at most one active zone, and
/// the open limit is below the number of writers, so that they constantly close each other's zones.
fn writers_lose_nothing(writers: u32, data: bool) {
    const EACH: u32 = 2;
    let zone_count = writers * EACH;
    let zones = zones(zone_count, 2, writers, data);
    let medium = Medium::new(u64::from(zone_count) * ZONE_SECTORS);
    let threads: Vec<_> = (0..writers)
        .map(|writer| {
            let (zones, mut medium) = (Arc::clone(&zones), medium.clone());
            thread::spawn(move || {
                for zone in (0..EACH).map(|zone| writer * EACH + zone) {
                    let start = u64::from(zone) * ZONE_SECTORS;
                    for half in [start, start + ZONE_SECTORS / 2] {
                        let sectors = ZONE_SECTORS / 2;
                        let stamp = &mut Stamp(&medium, half + 1);
                        let done = zones.write(ZoneNo(zone), Sector(half), sectors, stamp);
                        assert_eq!(done, Ok(()));
                    }
                    assert_eq!(zones.manage(ZoneNo(zone), ZoneOp::Reset, &mut medium), Ok(()));
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let counts = zones.counts().unwrap();
    assert_eq!((counts.open, counts.explicit, counts.active), (0, 0, 0));
    zones.reset_all(&mut medium.clone());
    for zone in 0..zone_count {
        let done = zones.append(ZoneNo(zone), 1, &mut Stamp(&medium, 1));
        let wanted = if zone < writers { Ok(()) } else { Err(Status::ZoneActiveResource) };
        assert_eq!(done.map(drop), wanted);
    }
}

#[test]
fn four_writers_lose_nothing() {
    draw(|| writers_lose_nothing(4, false));
}

#[test]
fn four_writers_with_data_lose_nothing() {
    draw(|| writers_lose_nothing(4, true));
}

#[test]
fn eight_writers_lose_nothing() {
    draw(|| writers_lose_nothing(8, false));
}

/// Runs every operation concurrently, on fewer zones than threads.
fn storm(threads: u64, data: bool) {
    const ZONES: u32 = 3;
    let zones = zones(ZONES, 1, 2, data);
    let medium = Medium::new(u64::from(ZONES) * ZONE_SECTORS);
    let work = |thread: u64| {
        let (zones, mut medium) = (Arc::clone(&zones), medium.clone());
        move || {
            for step in 0..6 {
                let zone = ZoneNo(thread_rng().gen_range(0..ZONES));
                let status = match thread_rng().gen_range(0..8) {
                    0..3 => {
                        let sectors = thread_rng().gen_range(1..=ZONE_SECTORS);
                        let stamp = &mut Stamp(&medium, (thread + 1) << 32 | step);
                        zones.append(zone, sectors, stamp).map(drop)
                    }
                    3 => zones.manage(zone, ZoneOp::Open, &mut medium),
                    4 => zones.manage(zone, ZoneOp::Close, &mut medium),
                    5 => zones.manage(zone, ZoneOp::Finish, &mut medium),
                    6 => zones.manage(zone, ZoneOp::Reset, &mut medium),
                    _ => {
                        zones.break_zone(zone, ZoneCond::Offline, &mut medium);
                        Ok(())
                    }
                };
                let counts = zones.counts().unwrap();
                assert!(counts.open <= 1 && counts.active <= 2, "{counts:?}");
                let known = [Status::IoErr, Status::ZoneOpenResource, Status::ZoneActiveResource];
                assert!(status.is_ok() || known.contains(&status.unwrap_err()), "{status:?}");
            }
        }
    };
    let threads: Vec<_> = (0..threads).map(|number| thread::spawn(work(number))).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    counts_agree(&zones, ZONES);
    // After the last thread, no data is left above the readable end of a zone.
    for zone in (0..ZONES).map(ZoneNo).filter(|_| data) {
        let info = zones.info(zone);
        if let Ok(end) = zones.readable_end(zone) {
            let above = end.0.max(info.start.0)..info.start.0 + ZONE_SECTORS;
            assert!(above.into_iter().all(|sector| medium.at(sector) == 0), "{info:?}");
        }
    }
}

#[test]
fn six_threads_with_all_operations_lose_nothing() {
    draw(|| storm(6, false));
}

#[test]
fn four_threads_with_all_operations_and_data_lose_nothing() {
    draw(|| storm(4, true));
}

/// Writers append, one thread resets, readers read. A reader finds data without a gap and from one
/// life of the zone, or learns that the zone was empty meanwhile.
#[test]
fn readers_find_contiguous_data() {
    draw(|| {
        let zones = zones(1, 0, 0, true);
        let medium = Medium::new(ZONE_SECTORS);
        let mut threads = Vec::new();
        for writer in 1..=3 {
            let (zones, medium) = (Arc::clone(&zones), medium.clone());
            threads.push(thread::spawn(move || {
                for _ in 0..3 {
                    if let Ok(at) = zones.append(ZoneNo(0), 1, &mut Stamp(&medium, writer)) {
                        let shown = zones.readable_end(ZoneNo(0)).unwrap();
                        // Or a reset has discarded it since, or is about to.
                        let gone = shown == Sector(0) || zones.erasures(ZoneNo(0)) > 0;
                        assert!(shown > at || gone, "{at:?} is not in {shown:?}");
                    }
                }
            }));
        }
        {
            let (zones, mut medium) = (Arc::clone(&zones), medium.clone());
            threads.push(thread::spawn(move || {
                for _ in 0..2 {
                    assert_eq!(zones.manage(ZoneNo(0), ZoneOp::Reset, &mut medium), Ok(()));
                }
            }));
        }
        for _ in 0..2 {
            let (zones, medium) = (Arc::clone(&zones), medium.clone());
            threads.push(thread::spawn(move || {
                let erasures = zones.erasures(ZoneNo(0));
                let end = zones.readable_end(ZoneNo(0)).unwrap();
                let found: Vec<u64> = (0..end.0).map(|sector| medium.at(sector)).collect();
                let again: Vec<u64> = (0..end.0).map(|sector| medium.at(sector)).collect();
                if zones.erasures(ZoneNo(0)) == erasures {
                    assert!(found.iter().all(|&stamp| stamp != 0), "a gap: {found:?}");
                    assert_eq!(found, again, "data changed under a reader that was not told");
                }
            }));
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
