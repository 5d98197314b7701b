//! A zoned device: writes to a sequential zone keep the order of their insertion.

use blockyard_core::sched::deadline::Tunable;
use blockyard_core::{Limits, ZoneGeometry};

use crate::rig::Rig;

/// Ten zones of 1000 sectors (of 1024), the first two conventional.
fn rig(tuned: &[(Tunable, i64)]) -> Rig {
    let zones = ZoneGeometry {
        zone_sectors: 1024,
        zone_capacity_sectors: 1000,
        zone_count: 10,
        conventional_count: 2,
        open_max: 0,
        active_max: 0,
    };
    let limits = Limits { chunk_sectors: 1024, ..Limits::unlimited(16) };
    Rig::of(tuned, &limits, Some(zones))
}

#[test]
fn a_sweep_that_comes_to_the_middle_of_a_zone_begins_with_its_first_write() {
    let mut rig = rig(&[]);
    // The zone was written up to here and then reset.
    rig.insert("w2548");
    assert_eq!(rig.run(), "w2548");
    rig.insert("w2048! w2056! w2548! w2556! w4096!");
    assert_eq!(rig.run(), "w2048! w2056! w2548! w2556! w4096!");
}

#[test]
fn a_write_waits_for_those_before_it_in_its_zone_whatever_their_class() {
    let mut rig = rig(&[]);
    rig.insert("w2048! idle:w4096! w4104! w3072! rt:w4112!");
    // Real time goes first, but its zone dispatches the earlier requests before it.
    assert_eq!(rig.take(3), "idle:w4096! w4104! rt:w4112!");
    assert_eq!(rig.complete("idle:w0 w0 rt:w0").take(2), "w2048! w3072!");
}

#[test]
fn an_expired_write_goes_before_the_sweep_but_behind_its_zone() {
    let mut rig = rig(&[(Tunable::FifoBatch, 1), (Tunable::WriteExpire, 100)]);
    rig.insert("w3072!");
    assert_eq!(rig.run(), "w3072!");
    // The request that was inserted first is at the head of the FIFO, and the sweep is past it.
    rig.insert("w2056!").wait(1).insert("w2048! w4096!").wait(99);
    assert_eq!(rig.run(), "w2056! w4096! w2048!");
}

#[test]
fn insertion_is_the_order_even_if_it_is_not_that_of_the_sectors() {
    // These writes miss the write pointer; sorting them would hide that.
    let mut rig = rig(&[]);
    rig.insert("w2064 w2048 w2056");
    assert_eq!(rig.sorted(), "w2048+16 w2064");
    assert_eq!(rig.run(), "w2064 w2048+16");
}

#[test]
fn a_write_joins_the_last_one_of_its_zone_only() {
    let mut rig = rig(&[]);
    rig.insert("w2048 w3072 w2056 w3080 w2064");
    assert_eq!(rig.sorted(), "w2048+24 w3072+16");
    // The write between two others stays between them.
    rig.insert("w5120 w5500 w5128");
    assert_eq!(rig.sorted(), "w2048+24 w3072+16 w5120 w5128 w5500");
    assert_eq!(rig.run(), "w2048+24 w3072+16 w5120 w5500 w5128");
    // Writes of different classes do not merge either.
    rig.insert("w2048 rt:w2056");
    assert_eq!(rig.run(), "w2048 rt:w2056");
}

#[test]
fn reads_and_conventional_zones_are_free() {
    let mut rig = rig(&[]);
    rig.insert("w1016+8");
    assert_eq!(rig.run(), "w1016");
    rig.insert("w64 w0 w56 w1100 w1090!");
    assert_eq!(rig.sorted(), "w0 w56+16 w1090! w1100");
    assert_eq!(rig.run(), "w1090! w1100 w56+16 w0");
    rig.insert("r2100 r2048");
    assert_eq!(rig.run(), "r2048 r2100");
}

#[test]
fn a_write_behind_one_that_was_refused_is_refused_too() {
    let mut rig = rig(&[(Tunable::AsyncDepth, 1)]);
    assert_eq!(rig.try_insert("w2048 w3072 w2056 r0"), "w3072 w2056", "they are in order");
    assert_eq!(rig.run(), "w2048 r0");
    assert_eq!(rig.try_insert("w3072 w2056"), "w2056");
}

#[test]
fn a_write_behind_one_that_was_refused_earlier_is_refused_too() {
    let mut rig = rig(&[]);
    assert_eq!(rig.try_insert_behind("w2048", "r0 w2056"), "w2048 w2056", "there is room");
    assert_eq!(rig.run(), "r0");
    assert_eq!(rig.try_insert_behind("r3072", "w2048 w2056"), "r3072", "reads have no order");
}

#[test]
fn lines_of_many_zones_do_not_mix() {
    let mut rig = rig(&[(Tunable::FifoBatch, 2), (Tunable::WriteExpire, 0)]);
    for row in 0..5 {
        for zone in (2..10).rev() {
            rig.insert(&format!("w{}!", zone * 1024 + row * 8));
        }
    }
    let order = rig.run();
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
