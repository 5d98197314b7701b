//! Zones with a word each: the contract, agreement with zones that have a lock each, and what must
//! hold when threads meet.
#![allow(clippy::disallowed_types, clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use blockyard_core::channel::ChannelConfig;
use blockyard_core::inject::Injection;
use blockyard_core::sched::NoneScheduler;
use blockyard_core::zone::{WordZones, ZoneCond, ZoneSet};
use blockyard_core::{Bio, Composed, Disk, Op, SECTOR_BYTES, Sector, Status};
use blockyard_null::{LockedZones, Null, NullConfig};
use blockyard_sim::contract::{self, Rig, Subject};
use blockyard_sim::seed::Seed;
use blockyard_sim::workload::{Mix, Workload};

/// 12 zones of 256 KiB, two of them conventional, and a last one that is short by half.
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

/// Limits low enough to be met.
fn limits() -> NullConfig {
    NullConfig { zone_max_open: 3, zone_max_active: 5, ..zones() }
}

fn with_data(config: NullConfig) -> NullConfig {
    NullConfig { memory_backed: true, ..config }
}

fn null<Z: ZoneSet>(config: &NullConfig) -> Arc<Null<Z>> {
    Arc::new(Null::open_with(config.clone()).unwrap())
}

#[test]
fn the_contract_is_kept() {
    let cached = NullConfig { cache_size: 1 << 20, ..with_data(limits()) };
    for config in [zones(), limits(), with_data(zones()), with_data(limits()), cached] {
        contract::run(&Subject::plain("words", config.memory_backed, move || {
            null::<WordZones>(&config)
        }));
    }
}

fn disk<Z: ZoneSet>(config: &NullConfig) -> Arc<dyn Disk> {
    let (name, channels) = ("pair".to_owned(), ChannelConfig::default());
    Arc::new(Composed::new(name, "null", null::<Z>(config), channels, NoneScheduler::new))
}

/// A wild bio goes to both, and to the model that wild bios come from.
struct Pair {
    words: Rig,
    locks: Rig,
    workload: Workload,
}

impl Pair {
    fn new(config: &NullConfig, seed: Seed, stream: u64) -> Pair {
        let mix = Mix { hot_zones: 4, ..Mix::wild() };
        Pair {
            words: Rig::new(disk::<WordZones>(config), config.memory_backed),
            locks: Rig::new(disk::<LockedZones>(config), config.memory_backed),
            workload: Workload::new(seed, stream, mix),
        }
    }

    fn rigs(&mut self) -> [&mut Rig; 2] {
        [&mut self.words, &mut self.locks]
    }

    /// One bio with the same data on both; status, sector and what a read found must be the same.
    fn step(&mut self, count: u64) {
        let bio = self.workload.next(&self.words.model).with_user_data(count);
        let wanted = if bio.op.has_data() { bio.sectors.saturating_mul(SECTOR_BYTES) } else { 0 };
        let len = self.words.region.len_bytes().min(usize::try_from(wanted).unwrap_or(usize::MAX));
        let mut data = vec![0; len];
        self.workload.fill(&mut data);
        let ends = self.rigs().map(|rig| {
            let mut data = data.clone();
            rig.region.write(0, &data);
            let end = rig.run(bio.with_buf(rig.buf(0)));
            rig.region.read(0, &mut data);
            (end, data)
        });
        assert_eq!(ends[0].0, ends[1].0, "end of {bio:?}");
        assert!(ends[0].1 == ends[1].1, "data after {bio:?}");
        self.words.model.apply(&bio, &mut data);
    }

    fn inject(&mut self, name: &str, value: &str) {
        let injection = Injection::Device { name: name.to_owned(), value: value.to_owned() };
        let done = self.rigs().map(|rig| rig.disk.inject(&injection));
        assert_eq!(done[0], done[1]);
    }

    /// Makes a zone read-only or offline, or good again.
    fn break_zone(&mut self) {
        let zones = self.words.report();
        let zone = zones[self.workload.below(zones.len() as u64) as usize];
        let (name, cond) = match self.workload.below(2) {
            0 => ("zone_offline", ZoneCond::Offline),
            _ => ("zone_readonly", ZoneCond::ReadOnly),
        };
        self.inject(name, &zone.start.0.to_string());
        let geometry = self.words.disk.geometry().zones.clone().unwrap();
        self.words.model.toggle(geometry.zone_of(zone.start), cond);
    }

    /// Puts a bad block somewhere, which is good again once it was hit.
    fn spoil(&mut self) {
        let sector = self.workload.below(self.words.disk.geometry().sectors);
        self.inject("badblocks", &format!("+{sector}-{sector}"));
    }
}

fn agree(name: &str, config: &NullConfig, stream: u64, bad_blocks: bool) {
    let seed = Seed::from_env();
    let _watch = seed.watch(name);
    let mut pair = Pair::new(config, seed, stream);
    if bad_blocks {
        pair.inject("badblocks_once", "1");
        pair.inject("badblocks_partial_io", "1");
    }
    for count in 0..4000 {
        pair.step(count);
        if bad_blocks && count % 4 == 0 {
            pair.spoil();
        }
        if count % 64 == 0 {
            pair.break_zone();
        }
        if count % 16 == 0 {
            assert_eq!(pair.words.report(), pair.locks.report());
        }
    }
    assert_eq!(pair.words.report(), pair.locks.report());
}

#[test]
fn words_and_locks_agree() {
    agree("zones", &zones(), 11, false);
    agree("limits", &limits(), 12, false);
    agree("zones with data", &with_data(zones()), 13, false);
    agree("limits with data", &with_data(limits()), 14, false);
    let small = NullConfig { zone_capacity: 192 << 10, size: 3 << 20, ..limits() };
    agree("a small capacity", &with_data(small), 15, false);
    agree("full at first", &with_data(NullConfig { zone_full: true, ..limits() }), 16, false);
}

#[test]
fn words_and_locks_agree_on_bad_blocks() {
    agree("bad blocks", &limits(), 17, true);
    agree("bad blocks with data", &with_data(limits()), 18, true);
}

/// The published failure of null_blk: every writer has one active zone at most, so no write may
/// fail while there are as many active tokens as writers, and where there are fewer, for want of
/// one only; after a reset of all zones every token is there again.
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
    let device = null::<WordZones>(&config);
    let name = "race".to_owned();
    let channels = ChannelConfig::default();
    let disk: Arc<dyn Disk> =
        Arc::new(Composed::new(name, "null", Arc::clone(&device), channels, NoneScheduler::new));
    std::thread::scope(|scope| {
        for writer in 0..writers {
            let disk = Arc::clone(&disk);
            scope.spawn(move || {
                let mut rig = Rig::new(disk, memory_backed);
                let mut run = |op, sector, sectors| {
                    let buf = rig.buf(0);
                    rig.run(Bio::new(op, Sector(sector), sectors).with_buf(buf)).status
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
    let mut rig = Rig::new(disk, memory_backed);
    let mut run = |op, sector, sectors| {
        let buf = rig.buf(0);
        rig.run(Bio::new(op, Sector(sector), sectors).with_buf(buf)).status
    };
    assert_eq!(run(Op::ZoneResetAll, 0, 0), Status::Ok);
    for zone in 0..6 {
        assert_eq!(run(Op::Write, zone * ZONE, 8), Status::Ok);
    }
    assert_eq!(run(Op::Write, 6 * ZONE, 8), Status::ZoneActiveResource);
}

#[test]
fn four_writers_lose_no_token() {
    race(4, 10_000, false);
    race(4, 1_000, true);
}

#[test]
fn thirty_two_writers_lose_no_token() {
    race(32, 1_000, false);
    race(32, 100, true);
}

/// A read beside a reset *and* a rewrite: zones with locks answer with a mixture of old and new
/// data now and then. Here a read finds one life of the zone, or the moment between two.
#[test]
fn a_read_beside_a_reset_and_a_rewrite_is_no_mixture() {
    const SECTORS: u64 = 128;
    let config = NullConfig {
        size: 1 << 20,
        zoned: true,
        zone_size: 1 << 20,
        memory_backed: true,
        ..NullConfig::default()
    };
    let disk = disk::<WordZones>(&config);
    let (stop, ready) = (AtomicBool::new(false), Barrier::new(3));
    let filled = |rig: &mut Rig, op, byte: u8| {
        rig.region.write(0, &vec![byte; (SECTORS * SECTOR_BYTES) as usize]);
        let buf = rig.buf(0);
        let status = rig.run(Bio::new(op, Sector(0), SECTORS).with_buf(buf)).status;
        assert_eq!(status, Status::Ok);
    };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let (disk, stop, ready) = (Arc::clone(&disk), &stop, &ready);
            scope.spawn(move || {
                let mut rig = Rig::new(disk, true);
                let mut data = vec![0; (SECTORS * SECTOR_BYTES) as usize];
                ready.wait();
                while !stop.load(Ordering::SeqCst) {
                    filled(&mut rig, Op::Read, 0x55);
                    rig.region.read(0, &mut data);
                    let first = data[0];
                    assert!(first != 0 && first != 0x55, "{first:#x}");
                    let end = data.iter().position(|&byte| byte != first);
                    assert_eq!(end, None, "{first:#x} and then {:#x}", data[end.unwrap_or(0)]);
                }
            });
        }
        let mut rig = Rig::new(Arc::clone(&disk), true);
        ready.wait();
        for round in 0..3000u32 {
            filled(&mut rig, Op::Write, 1 + (round % 64) as u8);
            assert_eq!(rig.run(Bio::new(Op::ZoneReset, Sector(0), 0)).status, Status::Ok);
        }
        stop.store(true, Ordering::SeqCst);
    });
}

/// Appends and write-zeroes of several threads into one zone, while others read and report: all
/// land beside each other, and what a report's write pointer has passed can be read.
#[test]
fn appends_of_four_threads_land_apart_while_others_look() {
    const THREADS: u64 = 4;
    const EACH: u64 = 300;
    let config = NullConfig {
        size: 16 << 20,
        zoned: true,
        zone_size: 16 << 20,
        memory_backed: true,
        ..NullConfig::default()
    };
    let disk = disk::<WordZones>(&config);
    let mut landed: Vec<(u64, u64, u8)> = std::thread::scope(|scope| {
        let append = |thread: u64| {
            let disk = Arc::clone(&disk);
            move || {
                let mut rig = Rig::new(disk, true);
                let mut landed = Vec::new();
                for index in 0..EACH {
                    let (sectors, byte) = (1 + (index + thread) % 9, 1 + thread as u8);
                    rig.region.write(0, &vec![byte; (sectors * SECTOR_BYTES) as usize]);
                    let buf = rig.buf(0);
                    let done = rig.run(Bio::append(Sector(0), sectors, buf));
                    assert_eq!(done.status, Status::Ok);
                    landed.push((done.sector.0, sectors, byte));
                    let wp = rig.report()[0].wp.0;
                    assert!(wp >= done.sector.0 + sectors);
                    let read = Bio::read(Sector(wp - 1), 1, buf);
                    assert_eq!(rig.run(read).status, Status::Ok);
                    let mut data = [0; SECTOR_BYTES as usize];
                    rig.region.read(0, &mut data);
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
    let mut rig = Rig::new(disk, true);
    let mut data = vec![0; (9 * SECTOR_BYTES) as usize];
    for (sector, sectors, byte) in landed {
        assert_eq!(sector, next, "no gap and no overlap");
        let buf = rig.buf(0);
        assert_eq!(rig.run(Bio::read(Sector(sector), sectors, buf)).status, Status::Ok);
        rig.region.read(0, &mut data);
        assert!(data[..(sectors * SECTOR_BYTES) as usize].iter().all(|&found| found == byte));
        next += sectors;
    }
    assert_eq!(rig.report()[0].wp, Sector(next));
}
