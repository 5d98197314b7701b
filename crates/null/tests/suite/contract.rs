//! The device contract on null devices of every kind, plain and wrapped.

use blockyard_null::{IrqMode, Null, NullConfig};
use blockyard_testing::contract;

/// 8 MiB of 4 KiB blocks, requests of at most 64 KiB.
fn flat() -> NullConfig {
    NullConfig { size: 8 << 20, bs: 4096, max_sectors: 128, ..NullConfig::default() }
}

/// A memory-backed device of 8 MiB.
fn backed() -> NullConfig {
    NullConfig { memory_backed: true, discard: true, ..flat() }
}

/// 16 zones of 512 KiB, of which 384 KiB can be written; two zones are conventional.
fn zoned() -> NullConfig {
    NullConfig {
        bs: 512,
        zoned: true,
        zone_size: 512 << 10,
        zone_capacity: 384 << 10,
        zone_nr_conv: 2,
        zone_append_max_sectors: 64,
        ..flat()
    }
}

/// Memory-backed zones, with limits low enough to be reached.
fn limited() -> NullConfig {
    NullConfig { memory_backed: true, zone_max_open: 3, zone_max_active: 5, ..zoned() }
}

fn suite(name: &str, config: NullConfig) {
    let open = Null::open(config.clone()).expect("the configuration fits");
    assert!(open.notes().is_empty(), "{:?}", open.notes());
    contract::run_wrapped(name, config.memory_backed, move || {
        Null::open(config.clone()).expect("the configuration fits")
    });
}

#[test]
fn plain() {
    suite("null", flat());
}

#[test]
fn memory_backed() {
    suite("memory", backed());
}

#[test]
fn sectors_of_512_bytes() {
    suite("memory, 512", NullConfig { bs: 512, max_sectors: 0, ..backed() });
}

#[test]
fn zones_without_data() {
    suite("zones", zoned());
}

#[test]
fn zones_with_data() {
    suite("zones with data", NullConfig { memory_backed: true, ..zoned() });
}

#[test]
fn zones_with_limits() {
    suite("zones with limits", limited());
    suite("limits without data", NullConfig { memory_backed: false, ..limited() });
}

#[test]
fn an_open_limit_alone_and_an_active_limit_alone() {
    suite("open limit", NullConfig { zone_max_active: 0, ..limited() });
    suite("active limit", NullConfig { zone_max_open: 0, ..limited() });
}

/// The last zone is shorter than the others.
#[test]
fn a_last_zone_that_is_short() {
    let size = (8 << 20) - (256 << 10);
    suite("runt", NullConfig { size, zone_capacity: 0, ..limited() });
}

#[test]
fn completion_by_softirq() {
    suite("softirq", NullConfig { irqmode: IrqMode::Softirq, ..backed() });
    suite("softirq, zones", NullConfig { irqmode: IrqMode::Softirq, ..limited() });
}

#[test]
fn completion_by_timer() {
    suite("timer", NullConfig { irqmode: IrqMode::Timer, hw_queue_depth: 8, ..backed() });
    suite("timer, zones", NullConfig { irqmode: IrqMode::Timer, ..limited() });
}

#[test]
fn a_write_cache() {
    suite("cache", NullConfig { cache_size: 1 << 20, ..backed() });
    suite("cache without fua", NullConfig { cache_size: 1 << 20, fua: false, ..backed() });
    suite("cache, zones", NullConfig { cache_size: 1 << 20, ..limited() });
}

#[test]
fn channels_share_a_hardware_queue() {
    let shared = NullConfig { submit_queues: Some(1), hw_queue_depth: 4, ..backed() };
    suite("one queue", shared.clone());
    suite("one queue, timer", NullConfig { irqmode: IrqMode::Timer, ..shared });
    suite(
        "one queue, zones",
        NullConfig { submit_queues: Some(1), hw_queue_depth: 4, ..limited() },
    );
}

#[test]
fn a_bandwidth_limit() {
    suite("mbps", NullConfig { mbps: 500, ..backed() });
}

fn gated(name: &str, config: NullConfig) {
    contract::run_gated(name, config.memory_backed, move || {
        Null::open(config.clone()).expect("the configuration fits")
    });
}

#[test]
fn with_zone_write_plug() {
    gated("zones", NullConfig { memory_backed: true, ..zoned() });
    gated("zones with limits", limited());
    gated("softirq, zones", NullConfig { irqmode: IrqMode::Softirq, ..limited() });
}

/// The device has no append, so that the zone write plug makes appends of writes.
#[test]
fn appends_made_of_writes() {
    let none = |config| NullConfig { zone_append_max_sectors: 0, ..config };
    gated("zones", none(NullConfig { memory_backed: true, ..zoned() }));
    gated("zones with limits", none(limited()));
    gated("timer, zones", none(NullConfig { irqmode: IrqMode::Timer, ..limited() }));
    let size = (8 << 20) - (256 << 10);
    gated("runt", none(NullConfig { size, zone_capacity: 0, ..limited() }));
    gated("cache, zones", none(NullConfig { cache_size: 1 << 20, fua: false, ..limited() }));
}
