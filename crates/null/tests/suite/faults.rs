//! The device's own faults, injected at random between bios, compared with the model.

use std::sync::Arc;

use blockyard_core::Status;
use blockyard_core::bio::{Bio, Flags, Op};
use blockyard_core::channel::ChannelConfig;
use blockyard_core::composed::Composed;
use blockyard_core::device::DeviceError;
use blockyard_core::disk::Disk;
use blockyard_core::inject::Injection;
use blockyard_core::units::{Sector, ZoneNo};
use blockyard_core::zone::{ZoneCond, ZoneType};
use blockyard_null::{IrqMode, Null, NullConfig};
use blockyard_testing::clock::ManualClock;
use blockyard_testing::contract::Fixture;
use blockyard_testing::seed::Seed;
use blockyard_testing::workload::{Mix, Workload};

/// A disk on a clock that moves only when a thread sleeps.
fn disk(config: NullConfig) -> Arc<dyn Disk> {
    let null = Null::open(config).expect("the configuration fits");
    let (depth, clock) = (ChannelConfig { depth: 64 }, ManualClock::new());
    Arc::new(Composed::with_clock("n".to_owned(), "null", null, depth, clock))
}

fn backed() -> NullConfig {
    NullConfig {
        size: 8 << 20,
        bs: 4096,
        max_sectors: 64,
        memory_backed: true,
        discard: true,
        ..NullConfig::default()
    }
}

fn zoned() -> NullConfig {
    NullConfig {
        zoned: true,
        zone_size: 512 << 10,
        zone_capacity: 384 << 10,
        zone_nr_conv: 1,
        zone_max_open: 3,
        zone_max_active: 5,
        discard: false,
        ..backed()
    }
}

fn inject(disk: &dyn Disk, name: &str, value: &str) -> Result<(), DeviceError> {
    disk.inject(&Injection::Device { name: name.to_owned(), value: value.to_owned() })
}

/// Executes a random bio of the workload on disk and model.
fn step(fixture: &mut Fixture, workload: &mut Workload) {
    let bio = workload.next(&fixture.model);
    if bio.op.has_data() && bio.sectors <= 4096 {
        let mut data = vec![0; bio.sectors as usize * 512];
        workload.fill(&mut data);
        fixture.region.write(0, &data);
    }
    fixture.both(bio);
}

fn bad_blocks(config: NullConfig, stream: u64) {
    let seed = Seed::from_env();
    let _watch = seed.watch("bad blocks");
    let mut fixture = Fixture::new(disk(config), true);
    let mut workload = Workload::new(seed, stream, Mix { odd_per_mille: 30, ..Mix::wild() });
    for count in 0..3000 {
        if count % 20 == 0 {
            let start = workload.below(fixture.model.geometry().sectors / 2);
            let range = start..start + 1 + workload.below(40);
            let text = format!("{}-{}", range.start, range.end - 1);
            match workload.below(6) {
                0 => {
                    inject(&*fixture.disk, "badblocks", &format!("-{text}")).unwrap();
                    fixture.model.bad_blocks().clear(range);
                }
                1 => {
                    let once = workload.below(2) == 0;
                    let value = if once { "1" } else { "0" };
                    inject(&*fixture.disk, "badblocks_once", value).unwrap();
                    fixture.model.bad_blocks().once = once;
                }
                2 => {
                    let partial = workload.below(2) == 0;
                    let value = if partial { "1" } else { "0" };
                    inject(&*fixture.disk, "badblocks_partial_io", value).unwrap();
                    fixture.model.bad_blocks().partial_io = partial;
                }
                _ => {
                    inject(&*fixture.disk, "badblocks", &format!("+{text}")).unwrap();
                    fixture.model.bad_blocks().add(range);
                }
            }
        }
        step(&mut fixture, &mut workload);
        fixture.same_report();
    }
    inject(&*fixture.disk, "badblocks", "-0-16383").unwrap();
    fixture.model.bad_blocks().clear(0..16_384);
    fixture.same_contents();
}

#[test]
fn bad_blocks_on_a_flat_device() {
    bad_blocks(backed(), 1);
}

#[test]
fn bad_blocks_in_zones() {
    bad_blocks(zoned(), 2);
}

/// Zones become read-only, offline and normal again while the workload runs.
#[test]
fn broken_zones_fail_requests() {
    let seed = Seed::from_env();
    let _watch = seed.watch("zones that break");
    let mut fixture = Fixture::new(disk(zoned()), true);
    let mut workload = Workload::new(seed, 3, Mix::wild());
    let zone_sectors = fixture.model.geometry().zones.as_ref().unwrap().zone_sectors;
    for count in 0..4000 {
        if count % 25 == 0 {
            let zone = workload.below(10);
            let (name, cond) = match workload.below(3) {
                0 => ("zone_offline", ZoneCond::Offline),
                _ => ("zone_readonly", ZoneCond::ReadOnly),
            };
            let sector = zone * zone_sectors + workload.below(zone_sectors);
            let (number, minus) = (ZoneNo(zone as u32), ["", "-"][workload.below(2) as usize]);
            let answer = inject(&*fixture.disk, name, &format!("{minus}{sector}"));
            // Repeating the fault, or repairing a zone that does not have it, changes nothing.
            let known = fixture.model.report()[zone as usize];
            let can_break = known.kind != ZoneType::Conventional;
            assert_eq!(answer.is_ok(), can_break, "zone {zone}");
            if can_break && (known.cond == cond) != minus.is_empty() {
                assert!(fixture.model.toggle(number, cond), "zone {zone}");
            }
            fixture.same_report();
        }
        step(&mut fixture, &mut workload);
    }
    fixture.same_report();
    fixture.same_contents();
}

/// A requeued request is retried until it succeeds; none is lost or executed twice.
#[test]
fn requeued_requests_are_offered_again() {
    let seed = Seed::from_env();
    let _watch = seed.watch("requeued");
    let mut fixture = Fixture::new(disk(zoned()), true);
    inject(&*fixture.disk, "requeue", "1,60,0,-1").unwrap();
    let mut workload = Workload::new(seed, 4, Mix::wild());
    for _ in 0..2000 {
        step(&mut fixture, &mut workload);
    }
    fixture.same_report();
    fixture.same_contents();
}

/// A request that never completes ends with a timeout; the clock makes the wait short.
#[test]
fn requests_without_completion_time_out() {
    let mut fixture =
        Fixture::new(disk(NullConfig { irqmode: IrqMode::Softirq, ..backed() }), true);
    inject(&*fixture.disk, "timeout", "1,100,0,3").unwrap();
    for _ in 0..3 {
        let buf = fixture.buf(0);
        assert_eq!(fixture.run(Bio::write(Sector(0), 8, buf)).status, Status::Timeout);
    }
    let read = Bio::new(Op::Read, Sector(0), 8);
    assert_eq!(fixture.both(read).status, Status::Ok, "the bound of three is kept");
}

/// A power cut loses unflushed data and no flushed data.
#[test]
fn a_power_cut_empties_the_cache_only() {
    let mut fixture = Fixture::new(disk(NullConfig { cache_size: 1 << 20, ..backed() }), true);
    let write = |fixture: &mut Fixture, at: u64, byte: u8, flags: Flags| {
        fixture.region.write(0, &[byte; 4096]);
        fixture.run(Bio::write(Sector(at), 8, fixture.buf(0)).with_flags(flags)).status
    };
    let read = |fixture: &mut Fixture, at: u64| {
        assert_eq!(fixture.run(Bio::read(Sector(at), 8, fixture.buf(0))).status, Status::Ok);
        let mut data = [0; 4096];
        fixture.region.read(0, &mut data);
        assert!(data.iter().all(|byte| *byte == data[0]), "torn at {at}");
        data[0]
    };
    assert_eq!(write(&mut fixture, 0, 1, Flags::NONE), Status::Ok);
    assert_eq!(fixture.run(Bio::flush()).status, Status::Ok);
    assert_eq!(write(&mut fixture, 8, 2, Flags::FUA), Status::Ok);
    assert_eq!(write(&mut fixture, 16, 3, Flags::NONE), Status::Ok);
    assert_eq!(write(&mut fixture, 24, 4, Flags::PREFLUSH), Status::Ok);
    assert_eq!(write(&mut fixture, 0, 5, Flags::NONE), Status::Ok);
    assert_eq!([0, 8, 16, 24].map(|at| read(&mut fixture, at)), [5, 2, 3, 4]);
    inject(&*fixture.disk, "power_cut", "").unwrap();
    assert_eq!([0, 8, 16, 24].map(|at| read(&mut fixture, at)), [1, 2, 3, 0]);
}

#[test]
fn invalid_faults_are_refused() {
    let flat = disk(backed());
    for (name, value) in [
        ("badblocks", "0-7"),
        ("badblocks", "+7-0"),
        ("badblocks_once", "2"),
        ("zone_readonly", "0"),
        ("timeout", "1,2"),
        ("requeue", "x"),
        ("meteor", "1"),
    ] {
        let error = inject(&*flat, name, value).expect_err(name);
        assert!(!error.to_string().is_empty());
    }
    let zoned = disk(zoned());
    for value in ["", "x", "99999999", "-1", "0"] {
        inject(&*zoned, "zone_offline", value).expect_err(value);
    }
}
