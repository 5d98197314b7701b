//! The device contract on emulated SMR disks, through the driver: bios in, SCSI commands to the
//! disk, sense data back. Disks in memory run with everything that can wrap a device, disks in
//! files alone.
#![allow(clippy::disallowed_types)] // Counts directories, in a test.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use blockyard_smr::config::DiskConfig;
use blockyard_smr::disk::Disk;
use blockyard_smr::sd::Sd;
use blockyard_testing::contract;
use blockyard_testing::model::ZoneRules;
use blockyard_testing::temp_dir::TempDir;
use blockyard_zone_media::{CacheMode, Files, MediaGeometry, MemoryMedium, Options};

/// 16 zones of 512 KiB, two of them conventional, no limit on open zones.
fn zoned() -> DiskConfig {
    DiskConfig {
        size: 8 << 20,
        zone_size: 512 << 10,
        zone_nr_conv: 2,
        zone_max_open: 0,
        logical_block: 512,
        physical_block: 512,
        write_cache: false,
        ..DiskConfig::default()
    }
}

/// Those 16 zones with a limit on open zones that is low enough to be reached.
fn limited() -> DiskConfig {
    DiskConfig { zone_max_open: 3, ..zoned() }
}

fn open(config: &DiskConfig) -> Sd<Disk<MemoryMedium>> {
    let memory = MemoryMedium::new(config.size, config.zone_size).expect("there is memory");
    let disk = Disk::open(config.clone(), memory).expect("the configuration fits");
    Sd::open(disk).expect("the emulated disk can be driven")
}

fn suite(name: &str, config: DiskConfig) {
    contract::run_wrapped_by(ZoneRules::Zbc, name, true, move || open(&config));
}

#[test]
fn no_limit() {
    suite("smr", zoned());
}

#[test]
fn an_open_limit() {
    suite("smr, limited", limited());
}

#[test]
fn blocks_of_4096_bytes() {
    suite("smr, 4k", DiskConfig { logical_block: 4096, physical_block: 4096, ..limited() });
}

/// 512e: the disk is addressed in units of 512 bytes and written in units of 4096.
#[test]
fn physical_blocks_of_4096_bytes() {
    suite("smr, 512e", DiskConfig { physical_block: 4096, ..limited() });
}

#[test]
fn gaps() {
    suite("smr, gaps", DiskConfig { zone_capacity: 384 << 10, ..limited() });
}

#[test]
fn a_last_zone_that_is_short() {
    suite("smr, runt", DiskConfig { size: (8 << 20) - (256 << 10), ..limited() });
}

#[test]
fn a_volatile_cache() {
    suite("smr, cache", DiskConfig { write_cache: true, ..limited() });
}

/// With the zone write plug, which makes writes of appends, as Linux does for such disks.
#[test]
fn appends_that_become_writes() {
    for (name, config) in [
        ("smr", zoned()),
        ("smr, limited", limited()),
        ("smr, 512e", DiskConfig { physical_block: 4096, ..zoned() }),
        ("smr, gaps", DiskConfig { zone_capacity: 384 << 10, ..limited() }),
    ] {
        contract::run_gated_by(ZoneRules::Zbc, name, true, move || open(&config));
    }
}

/// Opens a disk in a new subdirectory.
fn open_files(config: &DiskConfig, cache: CacheMode, folder: &Path) -> Sd<Disk<Files>> {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let geometry = MediaGeometry {
        bytes: config.size,
        zone_bytes: config.zone_size,
        zone_capacity_bytes: config.sequential_bytes(),
        conventional_zones: config.zone_nr_conv,
        block_bytes: config.logical_block,
    };
    let options = Options { cache, journal_records: 64, data_files: 3, ..Options::new(geometry) };
    let files = Files::open(&folder.join(serial.to_string()), &options).expect("there is room");
    let disk = Disk::open(config.clone(), files).expect("the configuration fits");
    Sd::open(disk).expect("the emulated disk can be driven")
}

fn suite_in_files(name: &str, config: DiskConfig, cache: CacheMode) {
    let temp_dir = format!("blockyard-{}", name.replace([',', ' '], "-"));
    let temp_dir = TempDir::new(&std::env::temp_dir(), &temp_dir);
    let folder = temp_dir.path().to_owned();
    let make = move || open_files(&config, cache, &folder);
    contract::run(&contract::Subject::plain(name, true, make).with_rules(ZoneRules::Zbc));
}

#[test]
fn in_files() {
    suite_in_files("smr in files", limited(), CacheMode::Through);
}

#[test]
fn in_files_with_gaps_and_a_volatile_cache() {
    let config = DiskConfig { zone_capacity: 384 << 10, write_cache: true, ..limited() };
    suite_in_files("smr in files, volatile", config, CacheMode::Volatile { bytes: 16 << 10 });
}
