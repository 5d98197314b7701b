//! Zones with one atomic word each: the device contract, and what must hold under concurrency.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use blockyard_core::channel::ChannelConfig;
use blockyard_core::zone::AtomicZoneSet;
use blockyard_core::{Bio, Composed, Disk, Op, SECTOR_BYTES, Sector, Status};
use blockyard_null::{Null, NullConfig};
use blockyard_testing::contract::{self, Fixture, Subject};

/// 12 zones of 256 KiB: two are conventional, and the last one has half the size.
fn zones() -> NullConfig {
    NullConfig {
        size: (3 << 20) - (128 << 10),
        bs: 512,
        max_sectors: 128,
        zoned: true,
        zone_size: 256 << 10,
        zone_nr_conv: 2,
        zone_append_max_sectors: 64,
        ..NullConfig::default()
    }
}

/// Limits low enough to be reached.
fn limits() -> NullConfig {
    NullConfig { zone_max_open: 3, zone_max_active: 5, ..zones() }
}

fn with_data(config: NullConfig) -> NullConfig {
    NullConfig { memory_backed: true, ..config }
}

fn null(config: &NullConfig) -> Arc<Null<AtomicZoneSet>> {
    Arc::new(Null::open_with(config.clone()).unwrap())
}

#[test]
fn keeps_the_device_contract() {
    let cached = NullConfig { cache_size: 1 << 20, ..with_data(limits()) };
    for config in [zones(), limits(), with_data(zones()), with_data(limits()), cached] {
        contract::run(&Subject::plain("words", config.memory_backed, move || null(&config)));
    }
}

fn disk(config: &NullConfig) -> Arc<dyn Disk> {
    let (name, channels) = ("words".to_owned(), ChannelConfig::default());
    Arc::new(Composed::new(name, "null", null(config), channels))
}

/// The published failure of null_blk. Every writer has at most one active zone. If there are as
/// many active resources as writers, no write may fail; if there are fewer, a write may fail only
/// for lack of one. After a reset of all zones every resource is free again.
fn race(writers: u64, cycles: u64, memory_backed: bool) {
    const ZONE: u64 = 128;
    let config = NullConfig {
        size: writers * 4 * ZONE * SECTOR_BYTES,
        zoned: true,
        zone_size: ZONE * SECTOR_BYTES,
        zone_max_open: 2,
        zone_max_active: 6,
        memory_backed,
        ..NullConfig::default()
    };
    let device = null(&config);
    let name = "race".to_owned();
    let channels = ChannelConfig::default();
    let disk: Arc<dyn Disk> = Arc::new(Composed::new(name, "null", Arc::clone(&device), channels));
    std::thread::scope(|scope| {
        for writer in 0..writers {
            let disk = Arc::clone(&disk);
            scope.spawn(move || {
                let mut fixture = Fixture::new(disk, memory_backed);
                let mut run = |op, sector, sectors| {
                    let buf = fixture.buf(0);
                    fixture.run(Bio::new(op, Sector(sector), sectors).with_buf(buf)).status
                };
                for cycle in 0..cycles {
                    let start = (writer * 4 + cycle % 4) * ZONE;
                    for half in [start, start + ZONE / 2] {
                        let status = run(Op::Write, half, ZONE / 2);
                        let crowded = writers > 6 && half == start;
                        if crowded && status == Status::ZoneActiveResource {
                            break;
                        }
                        assert_eq!(status, Status::Ok, "{writer} in cycle {cycle} at {half}");
                    }
                    assert_eq!(run(Op::ZoneReset, start, 0), Status::Ok);
                }
            });
        }
    });
    let counts = device.zones().unwrap().counts().unwrap();
    assert_eq!((counts.open, counts.explicit, counts.active), (0, 0, 0));
    let mut fixture = Fixture::new(disk, memory_backed);
    let mut run = |op, sector, sectors| {
        let buf = fixture.buf(0);
        fixture.run(Bio::new(op, Sector(sector), sectors).with_buf(buf)).status
    };
    assert_eq!(run(Op::ZoneResetAll, 0, 0), Status::Ok);
    for zone in 0..6 {
        assert_eq!(run(Op::Write, zone * ZONE, 8), Status::Ok);
    }
    assert_eq!(run(Op::Write, 6 * ZONE, 8), Status::ZoneActiveResource);
}

#[test]
fn four_writers_leak_no_open_resource() {
    race(4, 10_000, false);
    race(4, 1_000, true);
}

#[test]
fn thirty_two_writers_leak_no_open_resource() {
    race(32, 1_000, false);
    race(32, 100, true);
}

/// A read concurrent with a reset *and* a rewrite: a device with zone locks sometimes returns a
/// mixture of old and new data. Here a read returns the data from before or after the reset, or an
/// empty zone.
#[test]
fn read_during_reset_and_rewrite_is_not_mixed() {
    const SECTORS: u64 = 128;
    let config = NullConfig {
        size: 1 << 20,
        zoned: true,
        zone_size: 1 << 20,
        memory_backed: true,
        ..NullConfig::default()
    };
    let disk = disk(&config);
    let (stop, ready) = (AtomicBool::new(false), Barrier::new(3));
    let filled = |fixture: &mut Fixture, op, byte: u8| {
        fixture.region.write(0, &vec![byte; (SECTORS * SECTOR_BYTES) as usize]);
        let buf = fixture.buf(0);
        let status = fixture.run(Bio::new(op, Sector(0), SECTORS).with_buf(buf)).status;
        assert_eq!(status, Status::Ok);
    };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let (disk, stop, ready) = (Arc::clone(&disk), &stop, &ready);
            scope.spawn(move || {
                let mut fixture = Fixture::new(disk, true);
                let mut data = vec![0; (SECTORS * SECTOR_BYTES) as usize];
                ready.wait();
                while !stop.load(Ordering::SeqCst) {
                    filled(&mut fixture, Op::Read, 0x55);
                    fixture.region.read(0, &mut data);
                    let first = data[0];
                    assert!(first != 0 && first != 0x55, "{first:#x}");
                    let end = data.iter().position(|&byte| byte != first);
                    assert_eq!(end, None, "{first:#x} and then {:#x}", data[end.unwrap_or(0)]);
                }
            });
        }
        let mut fixture = Fixture::new(Arc::clone(&disk), true);
        ready.wait();
        for round in 0..3000u32 {
            filled(&mut fixture, Op::Write, 1 + (round % 64) as u8);
            assert_eq!(fixture.run(Bio::new(Op::ZoneReset, Sector(0), 0)).status, Status::Ok);
        }
        stop.store(true, Ordering::SeqCst);
    });
}

/// Several threads append and write zeroes to one zone while others read and report: no two writes
/// overlap, and everything below a reported write pointer can be read.
#[test]
fn appends_of_four_threads_do_not_overlap_during_reports() {
    const THREADS: u64 = 4;
    const EACH: u64 = 300;
    let config = NullConfig {
        size: 16 << 20,
        zoned: true,
        zone_size: 16 << 20,
        memory_backed: true,
        ..NullConfig::default()
    };
    let disk = disk(&config);
    let mut landed: Vec<(u64, u64, u8)> = std::thread::scope(|scope| {
        let append = |thread: u64| {
            let disk = Arc::clone(&disk);
            move || {
                let mut fixture = Fixture::new(disk, true);
                let mut landed = Vec::new();
                for index in 0..EACH {
                    let (sectors, byte) = (1 + (index + thread) % 9, 1 + thread as u8);
                    fixture.region.write(0, &vec![byte; (sectors * SECTOR_BYTES) as usize]);
                    let buf = fixture.buf(0);
                    let done = fixture.run(Bio::append(Sector(0), sectors, buf));
                    assert_eq!(done.status, Status::Ok);
                    landed.push((done.sector.0, sectors, byte));
                    let wp = fixture.report()[0].wp.0;
                    assert!(wp >= done.sector.0 + sectors);
                    let read = Bio::read(Sector(wp - 1), 1, buf);
                    assert_eq!(fixture.run(read).status, Status::Ok);
                    let mut data = [0; SECTOR_BYTES as usize];
                    fixture.region.read(0, &mut data);
                    assert!(data[0] >= 1 && data[0] <= THREADS as u8, "{} at {wp}", data[0]);
                    assert!(data.iter().all(|&byte| byte == data[0]), "torn at {wp}");
                }
                landed
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(append(thread))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    landed.sort_unstable();
    let mut next = 0;
    let mut fixture = Fixture::new(disk, true);
    let mut data = vec![0; (9 * SECTOR_BYTES) as usize];
    for (sector, sectors, byte) in landed {
        assert_eq!(sector, next, "no gap and no overlap");
        let buf = fixture.buf(0);
        assert_eq!(fixture.run(Bio::read(Sector(sector), sectors, buf)).status, Status::Ok);
        fixture.region.read(0, &mut data);
        assert!(data[..(sectors * SECTOR_BYTES) as usize].iter().all(|&found| found == byte));
        next += sectors;
    }
    assert_eq!(fixture.report()[0].wp, Sector(next));
}
