//! The contract on the reference device: tests the block layer alone, above a simple correct device
//! that completes requests immediately or in random order.

use blockyard_core::geometry::{Geometry, ZoneGeometry};
use blockyard_core::limits::Limits;
use blockyard_testing::contract;
use blockyard_testing::model::Model;
use blockyard_testing::reference::Reference;
use blockyard_testing::seed::Seed;

/// 8 MiB of 4 KiB blocks, with limits that are low enough to be reached.
fn flat() -> (Geometry, Limits) {
    let geometry = Geometry {
        sectors: 16_384,
        logical_block_bytes: 4096,
        physical_block_bytes: 4096,
        zones: None,
    };
    let mut limits = Limits::unlimited(16);
    limits.sectors_max = 128;
    limits.segments_max = 4;
    limits.discard_sectors_max = 256;
    (geometry, limits)
}

/// 16 zones of 512 KiB, 384 KiB of it writable, two of them conventional; 3 open, 5 active.
fn zoned() -> (Geometry, Limits) {
    let (mut geometry, mut limits) = flat();
    geometry.logical_block_bytes = 512;
    geometry.zones = Some(ZoneGeometry {
        zone_sectors: 1024,
        zone_capacity_sectors: 768,
        zone_count: 16,
        conventional_count: 2,
        open_max: 3,
        active_max: 5,
    });
    limits.chunk_sectors = 1024;
    limits.discard_sectors_max = 0;
    limits.write_zeroes_sectors_max = 0;
    limits.zone_append_sectors_max = 64;
    (geometry, limits)
}

fn suite(name: &str, (geometry, limits): (Geometry, Limits), shuffled: bool) {
    let shuffled = shuffled.then(Seed::from_env);
    contract::run_wrapped(name, true, move || {
        Reference::new(Model::new(&geometry, &limits, true), shuffled)
    });
}

#[test]
fn flat_inline() {
    suite("flat inline", flat(), false);
}

#[test]
fn flat_shuffled() {
    suite("flat shuffled", flat(), true);
}

#[test]
fn zoned_inline() {
    suite("zoned inline", zoned(), false);
}

#[test]
fn zoned_shuffled_without_limits() {
    let (mut geometry, limits) = zoned();
    let zones = geometry.zones.as_mut().unwrap();
    (zones.open_max, zones.active_max) = (0, 0);
    suite("zoned shuffled", (geometry, limits), true);
}

/// A cache without FUA: PREFLUSH and FUA become sequences of flushes and writes.
#[test]
fn cached() {
    let (geometry, mut limits) = flat();
    limits.write_cache = true;
    suite("cached shuffled", (geometry, limits), true);
}

#[test]
fn cached_zones() {
    let (geometry, mut limits) = zoned();
    limits.write_cache = true;
    limits.fua = true;
    suite("cached zones", (geometry, limits), false);
}
