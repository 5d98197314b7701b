//! The contract of all devices on emulated SMR disks, through the driver's side: bios in, commands
//! across, sense data back.

use blockyard_sim::contract;
use blockyard_sim::model::Rules;
use blockyard_smr::config::DiskConfig;
use blockyard_smr::disk::Disk;
use blockyard_smr::media::Memory;
use blockyard_smr::sd::Sd;

/// 16 zones of 512 KiB, two of them conventional, no limit.
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

/// The same with a limit that is met.
fn limited() -> DiskConfig {
    DiskConfig { zone_max_open: 3, ..zoned() }
}

fn open(config: &DiskConfig) -> Sd<Disk<Memory>> {
    let memory = Memory::new(config.size, config.zone_size).expect("there is memory");
    let disk = Disk::open(config.clone(), memory).expect("the configuration fits");
    Sd::open(disk).expect("the emulated disk can be driven")
}

fn suite(name: &str, config: DiskConfig) {
    contract::run_wrapped_by(Rules::Zbc, name, true, move || open(&config));
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

/// 512e: what is addressed by 512 bytes is written by 4096.
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

/// Behind the gate, where appends become writes, as Linux makes them for such disks.
#[test]
fn appends_that_become_writes() {
    for (name, config) in [
        ("smr", zoned()),
        ("smr, limited", limited()),
        ("smr, 512e", DiskConfig { physical_block: 4096, ..zoned() }),
        ("smr, gaps", DiskConfig { zone_capacity: 384 << 10, ..limited() }),
    ] {
        contract::run_gated_by(Rules::Zbc, name, true, move || open(&config));
    }
}
