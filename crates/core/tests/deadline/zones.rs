//! A zoned device: writes to a sequential zone keep the order of their insertion.

use blockyard_core::sched::deadline::Tunable;
use blockyard_core::{Limits, ZoneGeometry};

use crate::fixture::Fixture;

/// Ten zones of 1000 sectors (of 1024), the first two conventional.
fn fixture(tuned: &[(Tunable, i64)]) -> Fixture {
    let zones = ZoneGeometry {
        zone_sectors: 1024,
        zone_capacity_sectors: 1000,
        zone_count: 10,
        conventional_count: 2,
        open_max: 0,
        active_max: 0,
    };
    let limits = Limits { chunk_sectors: 1024, ..Limits::unlimited(16) };
    Fixture::of(tuned, &limits, Some(zones))
}

#[test]
fn sweep_into_zone_starts_at_its_first_write() {
    let mut fixture = fixture(&[]);
    // The zone was written up to here and then reset.
    fixture.insert("w2548");
    assert_eq!(fixture.run(), "w2548");
    fixture.insert("w2048! w2056! w2548! w2556! w4096!");
    assert_eq!(fixture.run(), "w2048! w2056! w2548! w2556! w4096!");
}

#[test]
fn zone_writes_keep_order_across_classes() {
    let mut fixture = fixture(&[]);
    fixture.insert("w2048! idle:w4096! w4104! w3072! rt:w4112!");
    // Real time goes first, but its zone dispatches the earlier requests before it.
    assert_eq!(fixture.take(3), "idle:w4096! w4104! rt:w4112!");
    assert_eq!(fixture.complete("idle:w0 w0 rt:w0").take(2), "w2048! w3072!");
}

#[test]
fn expired_write_precedes_sweep_but_keeps_zone_order() {
    let mut fixture = fixture(&[(Tunable::FifoBatch, 1), (Tunable::WriteExpire, 100)]);
    fixture.insert("w3072!");
    assert_eq!(fixture.run(), "w3072!");
    // The request that was inserted first is at the head of the FIFO, and the sweep is past it.
    fixture.insert("w2056!").wait(1).insert("w2048! w4096!").wait(99);
    assert_eq!(fixture.run(), "w2056! w4096! w2048!");
}

#[test]
fn zone_order_is_insertion_order() {
    // These writes miss the write pointer; sorting them would hide that.
    let mut fixture = fixture(&[]);
    fixture.insert("w2064 w2048 w2056");
    assert_eq!(fixture.sorted(), "w2048+16 w2064");
    assert_eq!(fixture.run(), "w2064 w2048+16");
}

#[test]
fn write_merges_only_with_last_of_its_zone() {
    let mut fixture = fixture(&[]);
    fixture.insert("w2048 w3072 w2056 w3080 w2064");
    assert_eq!(fixture.sorted(), "w2048+24 w3072+16");
    // The write between two others stays between them.
    fixture.insert("w5120 w5500 w5128");
    assert_eq!(fixture.sorted(), "w2048+24 w3072+16 w5120 w5128 w5500");
    assert_eq!(fixture.run(), "w2048+24 w3072+16 w5120 w5500 w5128");
    // Writes of different classes do not merge either.
    fixture.insert("w2048 rt:w2056");
    assert_eq!(fixture.run(), "w2048 rt:w2056");
}

#[test]
fn reads_and_conventional_zones_are_unordered() {
    let mut fixture = fixture(&[]);
    fixture.insert("w1016+8");
    assert_eq!(fixture.run(), "w1016");
    fixture.insert("w64 w0 w56 w1100 w1090!");
    assert_eq!(fixture.sorted(), "w0 w56+16 w1090! w1100");
    assert_eq!(fixture.run(), "w1090! w1100 w56+16 w0");
    fixture.insert("r2100 r2048");
    assert_eq!(fixture.run(), "r2048 r2100");
}

#[test]
fn write_after_refused_write_is_refused() {
    let mut fixture = fixture(&[(Tunable::AsyncDepth, 1)]);
    assert_eq!(fixture.try_insert("w2048 w3072 w2056 r0"), "w3072 w2056", "they are in order");
    assert_eq!(fixture.run(), "w2048 r0");
    assert_eq!(fixture.try_insert("w3072 w2056"), "w2056");
}

#[test]
fn write_after_earlier_refused_write_is_refused() {
    let mut fixture = fixture(&[]);
    assert_eq!(fixture.try_insert_after("w2048", "r0 w2056"), "w2048 w2056", "there is room");
    assert_eq!(fixture.run(), "r0");
    assert_eq!(fixture.try_insert_after("r3072", "w2048 w2056"), "r3072", "reads have no order");
}

#[test]
fn lists_of_many_zones_are_independent() {
    let mut fixture = fixture(&[(Tunable::FifoBatch, 2), (Tunable::WriteExpire, 0)]);
    for row in 0..5 {
        for zone in (2..10).rev() {
            fixture.insert(&format!("w{}!", zone * 1024 + row * 8));
        }
    }
    let order = fixture.run();
    for zone in 2..10 {
        let of_zone: Vec<u64> = order
            .split(' ')
            .map(|word| word.trim_matches(['w', '!']).parse::<u64>().unwrap())
            .filter(|sector| sector / 1024 == zone)
            .collect();
        assert_eq!(of_zone.len(), 5);
        assert!(of_zone.is_sorted(), "{of_zone:?}");
    }
}
