//! Many threads on one device: appends leave no gap, and zone limits leak no resources.

use std::sync::Arc;

use crate::common::Fixture;
use blockyard_core::zone::ZoneCond;
use blockyard_core::*;
use blockyard_null::NullConfig;

#[test]
fn eight_threads_append_to_one_zone() {
    const THREADS: u64 = 8;
    const APPENDS: u64 = 512;
    let config = NullConfig {
        size: 64 << 20,
        zoned: true,
        zone_size: 32 << 20,
        memory_backed: true,
        ..NullConfig::default()
    };
    let mut fixture = Fixture::new(config);
    let append = |mut fixture: Fixture, thread: u64| {
        // Each block contains its thread and number; lengths are 1, 2 and 3 blocks.
        let mut landed = Vec::new();
        for first in (0..APPENDS).step_by(16) {
            let mut offset = 0;
            let bios: Vec<Bio> = (first..first + 16)
                .map(|index| {
                    let sectors = 1 + (index + thread) % 3;
                    for part in 0..sectors {
                        let stamp = [thread, index, part].map(u64::to_le_bytes).concat();
                        fixture.region.write(offset + part * 512, &stamp);
                    }
                    let bio = Bio::append(Sector(0), sectors, fixture.buf(offset));
                    offset += sectors * 512;
                    bio
                })
                .collect();
            for (done, index) in fixture.all(&bios).iter().zip(first..) {
                assert_eq!(done.status, Status::Ok);
                landed.push((done.sector.0, 1 + (index + thread) % 3, thread, index));
            }
        }
        landed
    };
    let mut landed: Vec<(u64, u64, u64, u64)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let fixture = fixture.another();
                scope.spawn(move || append(fixture, thread))
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    landed.sort_unstable();
    let mut next = 0;
    for &(sector, sectors, thread, index) in &landed {
        assert_eq!(sector, next, "no gap and no overlap");
        let data = fixture.read(sector, sectors).unwrap();
        for part in 0..sectors {
            let stamp = [thread, index, part].map(u64::to_le_bytes).concat();
            assert_eq!(data[(part * 512) as usize..][..24], stamp, "at {sector}");
        }
        next += sectors;
    }
    assert_eq!(landed.len() as u64, THREADS * APPENDS);
    assert_eq!(fixture.zone(0).wp, Sector(next));
}

/// The test in which null_blk of every kernel from 6.1 to 7.2 leaks zone resources: four threads,
/// each with its own zones of which at most one is active, and limits of 2 open and 6 active zones.
/// No write may fail, and after a reset of all zones six can be activated.
fn writers_leak_nothing(memory_backed: bool, cycles: u64) {
    const ZONE: u64 = 2048;
    let config = NullConfig {
        size: 64 << 20,
        bs: 4096,
        zoned: true,
        zone_size: 1 << 20,
        zone_max_open: 2,
        zone_max_active: 6,
        memory_backed,
        ..NullConfig::default()
    };
    let mut fixture = Fixture::new(config);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let mut fixture = fixture.another();
            scope.spawn(move || {
                for cycle in 0..cycles {
                    let start = (thread * 4 + cycle % 4) * ZONE;
                    for half in [start, start + ZONE / 2] {
                        assert_eq!(fixture.op(Op::Write, half, ZONE / 2), Status::Ok);
                    }
                    assert_eq!(fixture.op(Op::ZoneReset, start, 0), Status::Ok);
                }
            });
        }
    });
    let counts = fixture.disk.device().zones().unwrap().counts().unwrap();
    assert_eq!((counts.open, counts.explicit, counts.active), (0, 0, 0));
    assert_eq!(fixture.op(Op::ZoneResetAll, 0, 0), Status::Ok);
    for zone in 0..6 {
        assert_eq!(fixture.op(Op::Write, zone * ZONE, 8), Status::Ok);
    }
    assert_eq!(fixture.op(Op::Write, 6 * ZONE, 8), Status::ZoneActiveResource);
}

#[test]
fn writers_leak_nothing_without_memory() {
    writers_leak_nothing(false, 5000);
}

#[test]
fn writers_leak_nothing_with_memory() {
    writers_leak_nothing(true, 100);
}

/// All operations concurrently on few zones with tight limits: in the end the counters match the
/// zones.
#[test]
fn resource_counts_match_zones_after_concurrent_operations() {
    const ZONE: u64 = 64;
    const ZONES: u64 = 6;
    let config = NullConfig {
        size: ZONES * ZONE * 512,
        zoned: true,
        zone_size: ZONE * 512,
        zone_max_open: 2,
        zone_max_active: 4,
        ..NullConfig::default()
    };
    let fixture = Fixture::new(config);
    let ops = [
        Op::ZoneAppend,
        Op::ZoneOpen,
        Op::ZoneClose,
        Op::ZoneFinish,
        Op::ZoneReset,
        Op::ZoneAppend,
    ];
    let seed = 0x51ed_2701_u64;
    let device = Arc::clone(fixture.disk.device());
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let mut fixture = fixture.another();
            let device = Arc::clone(&device);
            scope.spawn(move || {
                let mut random = seed + thread;
                for step in 0..20_000 {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let (zone, op) = (random % ZONES, ops[(random >> 20) as usize % ops.len()]);
                    let sectors = if op == Op::ZoneAppend { 1 + (random >> 40) % 24 } else { 0 };
                    let status = fixture.op(op, zone * ZONE, sectors);
                    let counts = device.zones().unwrap().counts().unwrap();
                    assert!(counts.open <= 2 && counts.active <= 4, "seed {seed:#x}: {counts:?}");
                    if step % 8192 == 0 {
                        fixture.inject("zone_offline", &(zone * ZONE).to_string()).unwrap();
                    } else if step % 4096 == 0 {
                        let repair =
                            |zone| fixture.inject("zone_offline", &format!("-{}", zone * ZONE));
                        assert!((0..ZONES).all(|zone| repair(zone).is_ok()));
                    }
                    let known = [
                        Status::Ok,
                        Status::IoErr,
                        Status::ZoneOpenResource,
                        Status::ZoneActiveResource,
                    ];
                    assert!(known.contains(&status), "seed {seed:#x}: {status}");
                }
            });
        }
    });
    let conds: Vec<ZoneCond> = (0..ZONES).map(|zone| fixture.cond(zone * ZONE)).collect();
    let count =
        |wanted: &[ZoneCond]| conds.iter().filter(|cond| wanted.contains(cond)).count() as u32;
    let explicit = count(&[ZoneCond::ExplicitOpen]);
    let open = explicit + count(&[ZoneCond::ImplicitOpen]);
    let active = open + count(&[ZoneCond::Closed]);
    let counts = device.zones().unwrap().counts().unwrap();
    let counted = (counts.open, counts.explicit, counts.active);
    assert_eq!(counted, (open, explicit, active), "seed {seed:#x}: {conds:?}");
}

/// A read concurrent with a reset returns the old data or what an empty zone reads as, never zeros.
#[test]
fn readers_during_reset_see_no_zeros() {
    const SECTORS: u64 = 512;
    let config = NullConfig {
        size: 4 << 20,
        zoned: true,
        zone_size: 1 << 20,
        memory_backed: true,
        ..NullConfig::default()
    };
    let mut fixture = Fixture::new(config);
    for _ in 0..200 {
        assert_eq!(fixture.write(0, SECTORS, 0xaa), Status::Ok);
        let start = std::sync::Barrier::new(3);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let (mut fixture, start) = (fixture.another(), &start);
                scope.spawn(move || {
                    start.wait();
                    while {
                        let data = fixture.read(0, SECTORS).unwrap();
                        assert!(data.iter().all(|byte| [0xaa, 0xff].contains(byte)));
                        data[0] != 0xff
                    } {}
                });
            }
            start.wait();
            assert_eq!(fixture.op(Op::ZoneReset, 0, 0), Status::Ok);
        });
    }
}
