//! The device contract. In memory the devices run with everything that can wrap a device, in files
//! alone: each device of a suite syncs its files a few times.

use std::sync::atomic::{AtomicU32, Ordering};

use blockyard_null::{IrqMode, NullConfig, NullOnMedia, media_geometry};
use blockyard_testing::contract;
use blockyard_testing::temp_dir::TempDir;
use blockyard_zone_media::{Files, MemoryMedium, Options};

/// 16 zones of 512 KiB, of which 384 KiB can be written; two zones are conventional.
fn zoned() -> NullConfig {
    NullConfig {
        size: 8 << 20,
        max_sectors: 128,
        zoned: true,
        zone_size: 512 << 10,
        zone_capacity: 384 << 10,
        zone_nr_conv: 2,
        zone_append_max_sectors: 64,
        ..NullConfig::default()
    }
}

/// Those zones, with limits low enough to be reached.
fn limited() -> NullConfig {
    NullConfig { zone_max_open: 3, zone_max_active: 5, ..zoned() }
}

fn on_memory(config: &NullConfig) -> NullOnMedia<MemoryMedium> {
    let memory = MemoryMedium::new(config.size, config.zone_size).expect("there is memory");
    let null = NullOnMedia::open_on(config, memory).expect("the configuration fits");
    assert!(null.notes().is_empty(), "{:?}", null.notes());
    null
}

fn suite(name: &str, config: NullConfig) {
    contract::run_wrapped(name, true, move || on_memory(&config));
}

#[test]
fn no_limits() {
    suite("zones on a medium", zoned());
}

#[test]
fn limits() {
    suite("limits on a medium", limited());
    suite("open limit on a medium", NullConfig { zone_max_active: 0, ..limited() });
}

#[test]
fn blocks_of_4096_bytes_and_no_fua() {
    suite("4k on a medium", NullConfig { bs: 4096, fua: false, ..limited() });
}

/// The last zone is shorter than the others.
#[test]
fn a_last_zone_that_is_short() {
    let size = (8 << 20) - (256 << 10);
    suite("runt on a medium", NullConfig { size, zone_capacity: 0, ..limited() });
}

#[test]
fn completion_by_timer_in_a_shared_queue() {
    let config = NullConfig {
        irqmode: IrqMode::Timer,
        submit_queues: Some(1),
        hw_queue_depth: 4,
        ..limited()
    };
    suite("timer on a medium", config);
}

#[test]
fn with_zone_write_plug() {
    for (name, config) in [
        ("plug on a medium", limited()),
        ("appends made of writes", NullConfig { zone_append_max_sectors: 0, ..limited() }),
    ] {
        contract::run_gated(name, true, move || on_memory(&config));
    }
}

#[test]
fn in_files() {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let place = TempDir::new(&std::env::temp_dir(), "blockyard-null-contract");
    for (name, config) in [("in files", limited()), ("in files, no limits", zoned())] {
        let folder = place.path().to_owned();
        contract::run(&contract::Subject::plain(name, true, move || {
            let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
            let (geometry, _) = media_geometry(&config).expect("the configuration fits");
            let small = Options { journal_records: 64, data_files: 3, ..Options::new(geometry) };
            let files = Files::open(&folder.join(serial.to_string()), &small);
            NullOnMedia::open_on(&config, files.expect("there is room")).expect("it is new")
        }));
    }
}
