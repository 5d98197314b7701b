//! Data of memory-backed devices: allocation, zones, the write cache, extents.
#![allow(clippy::disallowed_types, clippy::unwrap_used)]

mod common;

use blockyard_core::zone::ZoneCond;
use blockyard_core::*;
use blockyard_null::NullConfig;
use common::{Fixture, REGION_BYTES};

fn memory(size: u64) -> NullConfig {
    NullConfig { size, memory_backed: true, discard: true, ..NullConfig::default() }
}

fn zoned(size: u64, zone_size: u64) -> NullConfig {
    NullConfig { zoned: true, zone_size, discard: false, ..memory(size) }
}

const HOLE: (bool, bool) = (false, true);
const DATA: (bool, bool) = (true, false);
const NOTHING: (bool, bool) = (false, false);

/// Length and kind of the extent at a sector.
fn extent(fixture: &Fixture, from: u64, sectors: u64) -> (u64, (bool, bool)) {
    let extent = fixture.disk.extent(Sector(from), sectors);
    (extent.sectors, (extent.allocated, extent.zero))
}

/// Resident memory of the process in bytes.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn data_round_trips_and_holes_read_as_zeros() {
    let mut fixture = Fixture::new(memory(1 << 20));
    assert!(fixture.holds(0, 2048, 0));
    assert_eq!(fixture.write(3, 10, 0xab), Status::Ok);
    assert!(fixture.holds(0, 3, 0) && fixture.holds(3, 10, 0xab) && fixture.holds(13, 2035, 0));
    assert_eq!(extent(&fixture, 0, 2048), (16, DATA));
    assert_eq!(extent(&fixture, 16, 2048), (2032, HOLE));
    assert_eq!(fixture.op(Op::Read, 2047, 2), Status::IoErr, "beyond the device");
}

#[test]
fn discard_and_write_zeroes_free_whole_pages() {
    let mut fixture = Fixture::new(memory(1 << 20));
    assert_eq!(fixture.write(0, 64, 1), Status::Ok);
    assert_eq!(fixture.op(Op::Discard, 4, 32), Status::Ok);
    assert!(fixture.holds(0, 4, 1) && fixture.holds(4, 32, 0) && fixture.holds(36, 28, 1));
    assert_eq!((extent(&fixture, 0, 64), extent(&fixture, 8, 64)), ((8, DATA), (24, HOLE)));
    assert_eq!(fixture.op(Op::WriteZeroes, 32, 32), Status::Ok);
    assert_eq!(extent(&fixture, 32, 32), (32, HOLE));
    let keep = Bio::new(Op::WriteZeroes, Sector(0), 64).with_flags(Flags::NOUNMAP);
    assert_eq!(fixture.one(keep).status, Status::Ok);
    assert!(fixture.holds(0, 64, 0));
    assert_eq!(extent(&fixture, 0, 2048), (64, DATA));
}

#[test]
fn sparse_ten_terabytes_free_memory_on_reset() {
    let before = resident_bytes();
    let mut fixture = Fixture::new(zoned(10 << 40, 256 << 20));
    const ZONE: u64 = (256 << 20) / 512;
    let zones = fixture.disk.geometry().zones.clone().unwrap().zone_count;
    assert_eq!(zones, 40960);
    for zone in (0..40960).step_by(640) {
        assert_eq!(fixture.append(zone * ZONE, 8, 7).status, Status::Ok);
        assert!(fixture.holds(zone * ZONE, 8, 7));
        assert!(fixture.holds(zone * ZONE + 8, 8, 0xff));
    }
    let sparse = resident_bytes().saturating_sub(before);
    assert!(sparse < 64 << 20, "64 blocks cost {sparse} bytes");
    let chunk = (REGION_BYTES / 512) as u64;
    for part in 0..128 {
        assert_eq!(fixture.write(ZONE + part * chunk, chunk, 9), Status::Ok);
    }
    let full = resident_bytes();
    assert!(full.saturating_sub(before) >= 128 << 20, "128 MiB were written");
    assert_eq!(fixture.op(Op::ZoneReset, ZONE, 0), Status::Ok);
    // Other tests run concurrently; they need far less than what was freed.
    let freed = full.saturating_sub(resident_bytes());
    assert!(freed > 96 << 20, "a reset freed {freed} bytes");
    assert!(fixture.holds(ZONE, 8, 0xff));
}

#[test]
fn unwritten_zone_sectors_read_as_ones_above_write_pointer() {
    let mut fixture = Fixture::new(NullConfig { zone_nr_conv: 1, ..zoned(8 << 20, 1 << 20) });
    assert!(fixture.holds(0, 2048, 0), "a conventional zone has no write pointer");
    assert_eq!(fixture.write(2048, 8, 3), Status::Ok);
    let data = fixture.read(2048, 16).unwrap();
    assert!(data[..4096].iter().all(|&byte| byte == 3));
    assert!(data[4096..].iter().all(|&byte| byte == 0xff));
    assert_eq!(extent(&fixture, 2048, 2048), (8, DATA));
    assert_eq!(extent(&fixture, 2056, 4096), (2040, NOTHING));
    assert_eq!(fixture.op(Op::ZoneFinish, 2048, 0), Status::Ok);
    assert!(fixture.holds(2056, 2040, 0), "finished: all of it is data");
    assert_eq!(extent(&fixture, 2056, 4096), (2040, HOLE));
    assert_eq!(fixture.op(Op::WriteZeroes, 4096, 16), Status::Ok);
    assert_eq!(fixture.zone(4096).wp, Sector(4112), "write-zeroes obeys the write pointer");
    assert_eq!(fixture.op(Op::WriteZeroes, 4096, 16), Status::IoErr);
}

#[test]
fn broken_zones_keep_or_lose_their_data_as_in_null_blk() {
    let limited = NullConfig { zone_max_open: 1, zone_max_active: 1, ..zoned(8 << 20, 1 << 20) };
    let mut fixture = Fixture::new(limited);
    assert_eq!(fixture.write(0, 8, 3), Status::Ok);
    assert_eq!(fixture.write(2048, 8, 3), Status::ZoneActiveResource);
    fixture.inject("zone_readonly", "7").unwrap();
    assert!(fixture.holds(0, 8, 3) && fixture.holds(8, 8, 0));
    assert_eq!(fixture.zone(0).wp, Sector::NONE);
    assert_eq!(fixture.write(2048, 8, 3), Status::Ok, "its resources were given back");
    fixture.inject("zone_offline", "0").unwrap();
    assert_eq!(fixture.read(0, 8), Err(Status::IoErr));
    assert_eq!(extent(&fixture, 0, 2048), (2048, NOTHING));
    fixture.inject("zone_offline", "-2047").unwrap();
    assert!(fixture.holds(0, 8, 0xff), "a repaired zone is empty");
    for (name, value) in [("zone_offline", "16384"), ("zone_readonly", "x"), ("no_such", "1")] {
        assert!(fixture.inject(name, value).is_err(), "{name} {value}");
    }
    let plain = Fixture::new(memory(1 << 20));
    assert!(plain.inject("zone_readonly", "0").is_err(), "no zones");
    let conventional = NullConfig { zone_nr_conv: 1, ..zoned(8 << 20, 1 << 20) };
    assert!(Fixture::new(conventional).inject("zone_offline", "5").is_err());
}

/// Regression: a script that made a zone read-only before each run found it writable in every
/// second run. `zone_readonly=SECTOR` on a read-only zone emptied it, and its data were lost.
#[test]
fn repeated_zone_fault_is_idempotent() {
    let mut fixture = Fixture::new(zoned(8 << 20, 1 << 20));
    assert_eq!(fixture.write(0, 8, 3), Status::Ok);
    for (name, cond) in [("zone_readonly", ZoneCond::ReadOnly), ("zone_offline", ZoneCond::Offline)]
    {
        for value in ["0", "7", "2047"] {
            fixture.inject(name, value).unwrap();
            assert_eq!(fixture.zone(0).cond, cond, "{name}={value}");
        }
    }
    // A repair applies only to the fault that it names: a zone with another fault, or with none,
    // stays as it is.
    fixture.inject("zone_readonly", "-0").unwrap();
    assert_eq!(fixture.zone(0).cond, ZoneCond::Offline);
    fixture.inject("zone_offline", "-0").unwrap();
    assert_eq!(fixture.zone(0).cond, ZoneCond::Empty);
    assert_eq!(fixture.write(0, 8, 4), Status::Ok);
    for name in ["zone_readonly", "zone_offline"] {
        fixture.inject(name, "-0").unwrap();
        assert!(fixture.holds(0, 8, 4), "{name}");
    }
}

#[test]
fn power_cut_loses_unflushed_data() {
    let cached = NullConfig { cache_size: 64 << 10, ..memory(1 << 20) };
    let mut fixture = Fixture::new(cached.clone());
    assert!(fixture.disk.limits().write_cache && fixture.disk.limits().fua);
    assert_eq!(fixture.write(0, 8, 1), Status::Ok);
    assert_eq!(fixture.op(Op::Flush, 0, 0), Status::Ok);
    assert_eq!(fixture.write(0, 4, 2), Status::Ok);
    fixture.region.write(0, &[3; 512]);
    let fua = Bio::write(Sector(5), 1, fixture.buf(0)).with_flags(Flags::FUA);
    assert_eq!(fixture.one(fua).status, Status::Ok);
    assert!(fixture.holds(0, 4, 2) && fixture.holds(5, 1, 3), "reads see the cache");
    fixture.inject("power_cut", "").unwrap();
    assert!(fixture.holds(0, 5, 1) && fixture.holds(5, 1, 3) && fixture.holds(6, 2, 1));
    // More than the cache holds: the oldest pages are written back.
    for sector in (0..1024).step_by(8) {
        assert_eq!(fixture.write(sector, 8, 4), Status::Ok);
    }
    assert!(fixture.holds(0, 1024, 4));
    fixture.inject("power_cut", "").unwrap();
    assert!(fixture.holds(0, 512, 4));
    let kept = fixture.read(0, 1024).unwrap().iter().filter(|&&byte| byte == 4).count();
    assert!(kept < 1024 * 512, "something was lost");
    assert_eq!(fixture.write(0, 64, 5), Status::Ok);
    assert_eq!(fixture.op(Op::Discard, 8, 8), Status::Ok);
    assert!(fixture.holds(8, 8, 0), "a discard goes past the cache");

    let mut plain = Fixture::new(NullConfig { fua: false, ..cached });
    assert!(plain.disk.limits().write_cache && !plain.disk.limits().fua);
    plain.region.write(0, &[6; 512]);
    let fua = Bio::write(Sector(5), 1, plain.buf(0)).with_flags(Flags::FUA);
    assert_eq!(plain.one(fua).status, Status::Ok);
    plain.inject("power_cut", "").unwrap();
    assert!(plain.holds(5, 1, 6), "a flush stands in for FUA");
}

#[test]
fn without_memory_nothing_is_copied() {
    let mut fixture = Fixture::new(NullConfig { size: 1 << 20, ..NullConfig::default() });
    assert_eq!(fixture.write(0, 8, 9), Status::Ok);
    assert!(fixture.holds(0, 8, 0x55), "the buffer is as it was");
    assert_eq!(extent(&fixture, 0, 2048), (2048, NOTHING));
    assert_eq!(fixture.op(Op::Discard, 0, 8), Status::NotSupp);
    assert_eq!(fixture.op(Op::WriteZeroes, 0, 8), Status::Ok);
    assert_eq!(fixture.op(Op::ZoneReset, 0, 0), Status::NotSupp);
    assert_eq!(fixture.op(Op::ZoneAppend, 0, 8), Status::NotSupp);
}
