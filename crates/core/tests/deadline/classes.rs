//! Priority classes: which class waits for which, aging, and requests that go before all classes.

use blockyard_core::Prio;
use blockyard_core::sched::deadline::{Direction, Tunable};

use crate::fixture::Fixture;

#[test]
fn lower_class_waits_for_higher_classes() {
    let mut fixture = Fixture::new(&[]);
    fixture.insert("idle:r0 r10 rt:r20 idle:r30 rt:r40 r50");
    assert_eq!(fixture.run(), "rt:r20 rt:r40 r10 r50 idle:r0 idle:r30");
}

#[test]
fn requests_in_flight_count_as_queued() {
    let mut fixture = Fixture::new(&[]);
    fixture.insert("idle:w0 r10 rt:r20");
    assert_eq!(fixture.take(9), "rt:r20", "nothing else while it is at the device");
    assert!(!fixture.order.is_empty(), "though two wait");
    assert_eq!(fixture.complete("rt:r20").take(9), "r10");
    assert_eq!(fixture.take(9), "");
    assert_eq!(fixture.complete("r10").take(9), "idle:w0");
    // A class waits neither for lower classes nor for itself.
    assert_eq!(fixture.insert("idle:w80 r90 r70").take(9), "r70 r90");
}

#[test]
fn batch_count_spans_all_classes() {
    let mut fixture = Fixture::new(&[(Tunable::FifoBatch, 2), (Tunable::WritesStarved, 0)]);
    fixture.insert("rt:r10");
    assert_eq!(fixture.run(), "rt:r10");
    // One request of the batch of reads is left, for any class.
    fixture.insert("r10 r30 w10");
    assert_eq!(fixture.run(), "r10 w10 r30");
}

#[test]
fn aged_class_goes_first() {
    let mut fixture = Fixture::new(&[(Tunable::PrioAgingExpire, 100)]);
    fixture.insert("idle:r0");
    fixture.wait(1).insert("r10 r30");
    fixture.wait(98).insert("rt:r20");
    assert_eq!(fixture.take(1), "rt:r20");
    fixture.insert("rt:r40");
    // After 99 ms no request has aged.
    assert_eq!(fixture.take(1), "rt:r40");
    fixture.insert("rt:r60");
    assert_eq!(fixture.wait(1).take(1), "idle:r0", "after 100 ms the oldest has");
    assert_eq!(fixture.take(1), "rt:r60");
    fixture.insert("rt:r80");
    assert_eq!(fixture.wait(1).take(2), "r10 r30", "and then the next");
    assert_eq!(fixture.take(2), "rt:r80");
}

#[test]
fn of_two_aged_classes_the_higher_goes_first() {
    let mut fixture = Fixture::new(&[(Tunable::PrioAgingExpire, 100)]);
    fixture.insert("idle:r0 rt:w0");
    fixture.wait(10).insert("r10");
    fixture.wait(100).insert("rt:r20");
    assert_eq!(fixture.take(3), "r10 idle:r0 rt:r20");
}

#[test]
fn first_class_and_single_class_do_not_age() {
    let mut fixture = Fixture::new(&[(Tunable::PrioAgingExpire, 0), (Tunable::FifoBatch, 1)]);
    fixture.insert("rt:r20 rt:r10 r80 r60");
    // Both classes have waited for 0 ms: best effort goes before real time.
    assert_eq!(fixture.take(2), "r60 r80");
    assert_eq!(fixture.complete("r60 r80").take(2), "rt:r10 rt:r20");
}

#[test]
fn age_is_computed_from_the_deadline() {
    // The request was queued with a deadline in 500 ms. With an expiry of 450 ms it seems 50 ms
    // younger, with an expiry of 600 ms it seems 100 ms older.
    for (expire, waited) in [(500, 100), (450, 150), (600, 0)] {
        let mut fixture = Fixture::new(&[(Tunable::PrioAgingExpire, 100)]);
        fixture.insert("r10 rt:r0");
        fixture.tune(Tunable::ReadExpire, expire);
        if waited > 0 {
            fixture.wait(waited - 1);
            assert_eq!(fixture.take(1), "rt:r0", "{expire}");
            fixture.insert("rt:r20").wait(1);
        }
        assert_eq!(fixture.take(1), "r10", "{expire}");
    }
}

#[test]
fn aging_check_ends_a_batch_that_cannot_continue() {
    // As in Linux: the best-effort class has no reads ahead, so the search in it begins a batch of
    // writes, whether or not the write has aged.
    let mut fixture = Fixture::new(&[]);
    fixture.insert("rt:r10 rt:r30 rt:w50 w70");
    assert_eq!(fixture.take(1), "rt:w50", "the first batch may be one of writes");
    assert_eq!(fixture.take(1), "rt:r10");
    fixture.insert("rt:w60");
    assert_eq!(fixture.take(1), "rt:w60");
}

#[test]
fn batch_boundary_is_ignored_while_two_classes_wait() {
    // As in Linux: the search for an aged request begins a new batch and finds the expired request
    // too young to go before another class. The class then continues that batch.
    for (other, order) in [("", "r400 r10 r500"), ("idle:r0", "r400 r500 r10 idle:r0")] {
        let mut fixture = Fixture::new(&[(Tunable::FifoBatch, 1), (Tunable::ReadExpire, 100)]);
        fixture.insert("r300");
        assert_eq!(fixture.run(), "r300");
        fixture.insert("r10").wait(50).insert(other).insert("r400 r500");
        assert_eq!(fixture.take(1), "r400", "nothing is expired yet");
        fixture.complete("r400").wait(50);
        assert_eq!(format!("r400 {}", fixture.run()), order);
    }
}

#[test]
fn head_insertions_go_first_in_reverse_order() {
    let mut fixture = Fixture::new(&[]);
    fixture.insert("rt:r10 r20").insert_at_head("idle:w30 f0+0 w8");
    assert_eq!(fixture.take(4), "w8 f0+0 idle:w30 rt:r10");
    let stats = fixture.order.stats();
    assert_eq!(stats.of(Prio::Idle, Direction::Write).dispatched, 1, "it counts in its own class");
    assert_eq!(fixture.order.queued(Prio::Idle), 1);
}

#[test]
fn head_insertion_moves_sweep_but_not_batch() {
    let mut fixture = Fixture::new(&[(Tunable::FifoBatch, 2)]);
    fixture.insert("r10 r30 r100 r120 w0");
    assert_eq!(fixture.take(2), "w0 r10");
    fixture.insert_at_head("r90");
    assert_eq!(fixture.take(1), "r90");
    assert_eq!(fixture.take(1), "r100", "from the position of the one at the head on");
    fixture.insert_at_head("f0+0");
    assert_eq!(fixture.take(2), "f0+0 r120", "a flush has no position");
}

#[test]
fn head_insertion_is_not_merged() {
    let mut fixture = Fixture::new(&[]);
    fixture.insert("r0").insert_at_head("r8").insert("r16");
    assert_eq!(fixture.sorted(), "r0 r16");
    assert_eq!(fixture.run(), "r8 r16 r0");
}

#[test]
fn requeued_request_goes_first_and_keeps_its_age() {
    let mut fixture = Fixture::new(&[]);
    fixture.insert("w10 w30 w50 rt:r0");
    assert_eq!(fixture.take(1), "rt:r0");
    assert_eq!(fixture.complete("rt:r0").take(2), "w10 w30");
    fixture.requeue("w30 w10").insert("rt:r90");
    let counters = *fixture.order.stats().of(Prio::BestEffort, Direction::Write);
    assert_eq!((counters.inserted, counters.requeued, counters.dispatched), (3, 2, 2));
    assert_eq!((counters.queued(), counters.in_flight()), (3, 0));
    assert_eq!(fixture.take(9), "w10 w30 rt:r90");
    let counters = *fixture.order.stats().of(Prio::BestEffort, Direction::Write);
    assert_eq!((counters.dispatched, counters.in_flight()), (4, 2));
}
