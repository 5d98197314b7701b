//! Which requests merge, and which of two deadlines the merged request keeps.

use blockyard_core::sched::deadline::{Direction, Tunable};
use blockyard_core::{Limits, Prio};

use crate::fixture::Fixture;

/// Inserts requests one after the other into an empty scheduler, and compares the waiting requests.
fn check(tuned: &[(Tunable, i64)], limits: &Limits, cases: &[(&str, &str)]) {
    for (inserted, waits) in cases {
        let mut fixture = Fixture::of(tuned, limits, None);
        fixture.insert(inserted);
        assert_eq!(fixture.sorted(), *waits, "after {inserted}");
        assert_eq!(fixture.order.waiting(), waits.split_whitespace().count(), "after {inserted}");
        let counters = fixture.order.stats();
        let merged: u64 = counters.iter().map(|(_, _, counters)| counters.merged).sum();
        let gone = inserted.split_whitespace().count() - waits.split_whitespace().count();
        assert_eq!(merged as usize, gone, "after {inserted}");
    }
}

#[test]
fn neighbours_merge_at_back_front_and_gap() {
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
fn only_equal_kinds_merge() {
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
fn without_front_merges_only_back_merges_happen() {
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
fn device_limits_bound_merges() {
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
fn merge_keeps_deadline_of_waiting_request() {
    for joins in ["r24", "r8"] {
        let tuned = [(Tunable::FifoBatch, 1), (Tunable::ReadExpire, 100)];
        let mut fixture = Fixture::new(&tuned);
        fixture.insert("r900");
        assert_eq!(fixture.take(1), "r900");
        fixture.insert("r16").wait(60).insert(joins).insert("r950");
        // At 100 ms the merged request is expired, although half of it is young.
        fixture.wait(40);
        assert!(fixture.take(1).ends_with("+16"), "{joins}");
    }
}

#[test]
fn merge_ignores_earlier_deadline_of_new_request() {
    let mut fixture = Fixture::new(&[(Tunable::FifoBatch, 1), (Tunable::ReadExpire, 100)]);
    fixture.insert("r900");
    assert_eq!(fixture.take(1), "r900");
    fixture.insert("r16");
    fixture.tune(Tunable::ReadExpire, 1);
    fixture.insert("r24 r950").wait(50);
    assert_eq!(fixture.run(), "r950 r16+16");
}

#[test]
fn gap_merge_keeps_earlier_deadline_and_position() {
    // The request after the gap is the older one.
    let tuned = [(Tunable::FifoBatch, 1), (Tunable::ReadExpire, 100)];
    let mut fixture = Fixture::new(&tuned);
    fixture.insert("r900");
    assert_eq!(fixture.take(1), "r900");
    fixture.insert("r16").wait(10).insert("r500").wait(10).insert("r0").wait(10).insert("r8");
    fixture.insert("r950").wait(70);
    // 100 ms after the oldest part arrived: before r500, which arrived second.
    assert_eq!(fixture.take(1), "r0+24");
    assert_eq!(fixture.wait(10).take(1), "r500");
    // The request before the gap is the older one.
    let mut fixture = Fixture::new(&tuned);
    fixture.insert("r900");
    assert_eq!(fixture.take(1), "r900");
    fixture.insert("r0").wait(10).insert("r500").wait(10).insert("r16").wait(10).insert("r8");
    fixture.insert("r950").wait(70);
    assert_eq!(fixture.take(1), "r0+24");
    assert_eq!(fixture.run(), "r500 r950");
}

#[test]
fn sequential_stream_merges_into_few_requests() {
    let limits = Limits { segments_max: 16, ..Limits::unlimited(16) };
    let mut fixture = Fixture::of(&[], &limits, None);
    // Four streams of 32 requests each, in turns.
    for at in 0..32 {
        for stream in 0..4 {
            fixture.insert(&format!("w{}", stream * 100_000 + at * 8));
        }
    }
    assert_eq!(fixture.order.waiting(), 8);
    let counters = *fixture.order.stats().of(Prio::BestEffort, Direction::Write);
    assert_eq!((counters.inserted, counters.merged), (128, 120));
    assert_eq!(fixture.order.queued(Prio::BestEffort), 8);
    assert!(fixture.run().starts_with("w0+128 w128+128 w100000+128"));
    assert_eq!(fixture.order.queued(Prio::BestEffort), 0);
}

#[test]
fn front_merge_moves_request_in_sorted_order() {
    let mut fixture = Fixture::new(&[]);
    fixture.insert("r100 r200 r300");
    assert_eq!(fixture.take(1), "r100");
    fixture.insert("r192 r184");
    assert_eq!(fixture.sorted(), "r184+24 r300");
    assert_eq!(fixture.run(), "r184+24 r300");
    // The front merge moves it before the sweep's position: it is no longer ahead.
    fixture.insert("r400 r500");
    assert_eq!(fixture.take(1), "r400");
    fixture.insert("r600 r492+8").insert("r392+100");
    assert_eq!(fixture.run(), "r600 r392+116");
}
