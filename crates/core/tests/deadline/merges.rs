//! Which requests merge, and which of two deadlines the merged request keeps.

use blockyard_core::sched::deadline::{Direction, Tunable};
use blockyard_core::{Limits, Prio};

use crate::rig::Rig;

/// Inserts requests one after the other into an empty scheduler, and compares the waiting requests.
fn check(tuned: &[(Tunable, i64)], limits: &Limits, cases: &[(&str, &str)]) {
    for (inserted, waits) in cases {
        let mut rig = Rig::of(tuned, limits, None);
        rig.insert(inserted);
        assert_eq!(rig.sorted(), *waits, "after {inserted}");
        assert_eq!(rig.order.waiting(), waits.split_whitespace().count(), "after {inserted}");
        let counters = rig.order.stats();
        let merged: u64 = counters.iter().map(|(_, _, counters)| counters.merged).sum();
        let gone = inserted.split_whitespace().count() - waits.split_whitespace().count();
        assert_eq!(merged as usize, gone, "after {inserted}");
    }
}

#[test]
fn neighbours_merge_behind_before_and_between() {
    check(
        &[],
        &Limits::unlimited(16),
        &[
            ("r0 r8", "r0+16"),
            ("r8 r0", "r0+16"),
            ("r0 r16 r8", "r0+24"),
            ("r32 r24 r16 r8 r0", "r0+40"),
            ("r0 r9", "r0 r9"),
            ("r0 r7", "r0 r7"),
            ("r0+8 r8+1 r9+100", "r0+109"),
            ("w0 w8 w24 w16", "w0+32"),
            ("d0+100 d100+50", "d0+150"),
            // Among equal ones, a request merges with the last one before it and the first one
            // after it.
            ("r0 r0+16 r16 r8!", "r0 r0+24 r8!"),
        ],
    );
}

#[test]
fn only_likes_merge() {
    check(
        &[],
        &Limits::unlimited(16),
        &[
            ("r0 w8", "r0 w8"),
            ("w0 d8", "w0 d8"),
            ("r0 rt:r8 idle:r16", "rt:r8 r0 idle:r16"),
            ("rt:r0 rt:r8", "rt:r0+16"),
            ("idle:w8 idle:w0", "idle:w0+16"),
            ("r0! r8", "r0! r8"),
            ("r0 r8! r16", "r0 r8! r16"),
            ("f0+0 f0+0", "f0+0 f0+0"),
        ],
    );
}

#[test]
fn without_front_merges_a_request_joins_only_behind() {
    check(
        &[(Tunable::FrontMerges, 0)],
        &Limits::unlimited(16),
        &[
            ("r0 r8", "r0+16"),
            ("r8 r0", "r0 r8"),
            // A back merge makes the two adjacent: as in Linux they then merge, too.
            ("r0 r16 r8", "r0+24"),
        ],
    );
}

#[test]
fn the_limits_of_the_device_bound_what_merges() {
    let limits = Limits { sectors_max: 24, ..Limits::unlimited(16) };
    let cases = [("r0 r8 r16 r24", "r0+24 r24"), ("r0+16 r24 r16", "r0+24 r24")];
    check(&[], &limits, &cases);
    let limits = Limits { segments_max: 2, ..Limits::unlimited(16) };
    check(&[], &limits, &[("w0 w8 w16", "w0+16 w16"), ("w0 w16 w24 w8", "w0+16 w16+16")]);
    let limits = Limits { chunk_sectors: 16, ..Limits::unlimited(16) };
    check(&[], &limits, &[("w0 w8 w16 w24", "w0+16 w16+16"), ("d8 d16", "d8 d16")]);
    let limits = Limits { discard_sectors_max: 20, ..Limits::unlimited(16) };
    check(&[], &limits, &[("d0 d8 d16", "d0+16 d16")]);
}

#[test]
fn who_was_there_keeps_its_deadline_when_a_new_one_joins_it() {
    for joins in ["r24", "r8"] {
        let tuned = [(Tunable::FifoBatch, 1), (Tunable::ReadExpire, 100)];
        let mut rig = Rig::new(&tuned);
        rig.insert("r900");
        assert_eq!(rig.take(1), "r900");
        rig.insert("r16").wait(60).insert(joins).insert("r950");
        // At 100 ms the merged request is expired, although half of it is young.
        rig.wait(40);
        assert!(rig.take(1).ends_with("+16"), "{joins}");
    }
}

#[test]
fn a_new_one_with_a_shorter_deadline_does_not_shorten_that_of_the_one_it_joins() {
    let mut rig = Rig::new(&[(Tunable::FifoBatch, 1), (Tunable::ReadExpire, 100)]);
    rig.insert("r900");
    assert_eq!(rig.take(1), "r900");
    rig.insert("r16");
    rig.tune(Tunable::ReadExpire, 1);
    rig.insert("r24 r950").wait(50);
    assert_eq!(rig.run(), "r950 r16+16");
}

#[test]
fn of_two_that_become_one_the_earlier_deadline_and_place_are_kept() {
    // The request after the gap is the older one.
    let tuned = [(Tunable::FifoBatch, 1), (Tunable::ReadExpire, 100)];
    let mut rig = Rig::new(&tuned);
    rig.insert("r900");
    assert_eq!(rig.take(1), "r900");
    rig.insert("r16").wait(10).insert("r500").wait(10).insert("r0").wait(10).insert("r8");
    rig.insert("r950").wait(70);
    // 100 ms after the oldest part arrived: before r500, which arrived second.
    assert_eq!(rig.take(1), "r0+24");
    assert_eq!(rig.wait(10).take(1), "r500");
    // The request before the gap is the older one.
    let mut rig = Rig::new(&tuned);
    rig.insert("r900");
    assert_eq!(rig.take(1), "r900");
    rig.insert("r0").wait(10).insert("r500").wait(10).insert("r16").wait(10).insert("r8");
    rig.insert("r950").wait(70);
    assert_eq!(rig.take(1), "r0+24");
    assert_eq!(rig.run(), "r500 r950");
}

#[test]
fn a_sequential_stream_of_many_becomes_few() {
    let limits = Limits { segments_max: 16, ..Limits::unlimited(16) };
    let mut rig = Rig::of(&[], &limits, None);
    // Four streams of 32 requests each, in turns.
    for at in 0..32 {
        for stream in 0..4 {
            rig.insert(&format!("w{}", stream * 100_000 + at * 8));
        }
    }
    assert_eq!(rig.order.waiting(), 8);
    let counters = *rig.order.stats().of(Prio::BestEffort, Direction::Write);
    assert_eq!((counters.inserted, counters.merged), (128, 120));
    assert_eq!(rig.order.queued(Prio::BestEffort), 8);
    assert!(rig.run().starts_with("w0+128 w128+128 w100000+128"));
    assert_eq!(rig.order.queued(Prio::BestEffort), 0);
}

#[test]
fn a_front_merge_moves_the_request_in_the_sorted_order() {
    let mut rig = Rig::new(&[]);
    rig.insert("r100 r200 r300");
    assert_eq!(rig.take(1), "r100");
    rig.insert("r192 r184");
    assert_eq!(rig.sorted(), "r184+24 r300");
    assert_eq!(rig.run(), "r184+24 r300");
    // The front merge moves it before the sweep's position: it is no longer ahead.
    rig.insert("r400 r500");
    assert_eq!(rig.take(1), "r400");
    rig.insert("r600 r492+8").insert("r392+100");
    assert_eq!(rig.run(), "r600 r392+116");
}
