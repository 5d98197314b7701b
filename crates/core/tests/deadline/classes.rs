//! Priority classes: which class waits for which, aging, and requests that go before all classes.

use blockyard_core::Prio;
use blockyard_core::sched::deadline::{Direction, Tunable};

use crate::rig::Rig;

#[test]
fn a_class_waits_for_those_before_it() {
    let mut rig = Rig::new(&[]);
    rig.insert("idle:r0 r10 rt:r20 idle:r30 rt:r40 r50");
    assert_eq!(rig.run(), "rt:r20 rt:r40 r10 r50 idle:r0 idle:r30");
}

#[test]
fn what_is_at_the_device_counts_as_queued() {
    let mut rig = Rig::new(&[]);
    rig.insert("idle:w0 r10 rt:r20");
    assert_eq!(rig.take(9), "rt:r20", "nothing else while it is at the device");
    assert!(!rig.order.is_empty(), "though two wait");
    assert_eq!(rig.complete("rt:r20").take(9), "r10");
    assert_eq!(rig.take(9), "");
    assert_eq!(rig.complete("r10").take(9), "idle:w0");
    // A class waits neither for lower classes nor for itself.
    assert_eq!(rig.insert("idle:w80 r90 r70").take(9), "r70 r90");
}

#[test]
fn a_batch_is_one_of_all_classes() {
    let mut rig = Rig::new(&[(Tunable::FifoBatch, 2), (Tunable::WritesStarved, 0)]);
    rig.insert("rt:r10");
    assert_eq!(rig.run(), "rt:r10");
    // One request of the batch of reads is left, for any class.
    rig.insert("r10 r30 w10");
    assert_eq!(rig.run(), "r10 w10 r30");
}

#[test]
fn a_class_that_has_waited_long_enough_goes_before_others() {
    let mut rig = Rig::new(&[(Tunable::PrioAgingExpire, 100)]);
    rig.insert("idle:r0");
    rig.wait(1).insert("r10 r30");
    rig.wait(98).insert("rt:r20");
    assert_eq!(rig.take(1), "rt:r20");
    rig.insert("rt:r40");
    // After 99 ms no request has aged.
    assert_eq!(rig.take(1), "rt:r40");
    rig.insert("rt:r60");
    assert_eq!(rig.wait(1).take(1), "idle:r0", "after 100 ms the oldest has");
    assert_eq!(rig.take(1), "rt:r60");
    rig.insert("rt:r80");
    assert_eq!(rig.wait(1).take(2), "r10 r30", "and then the next");
    assert_eq!(rig.take(2), "rt:r80");
}

#[test]
fn of_two_classes_that_have_waited_the_better_one_goes_first() {
    let mut rig = Rig::new(&[(Tunable::PrioAgingExpire, 100)]);
    rig.insert("idle:r0 rt:w0");
    rig.wait(10).insert("r10");
    rig.wait(100).insert("rt:r20");
    assert_eq!(rig.take(3), "r10 idle:r0 rt:r20");
}

#[test]
fn the_first_class_does_not_age_and_one_class_alone_does_not_either() {
    let mut rig = Rig::new(&[(Tunable::PrioAgingExpire, 0), (Tunable::FifoBatch, 1)]);
    rig.insert("rt:r20 rt:r10 r80 r60");
    // Both classes have waited for 0 ms: best effort goes before real time.
    assert_eq!(rig.take(2), "r60 r80");
    assert_eq!(rig.complete("r60 r80").take(2), "rt:r10 rt:r20");
}

#[test]
fn age_is_reckoned_back_from_the_deadline() {
    // The request was queued with a deadline in 500 ms. With an expiry of 450 ms it seems 50 ms
    // younger, with an expiry of 600 ms it seems 100 ms older.
    for (expire, waited) in [(500, 100), (450, 150), (600, 0)] {
        let mut rig = Rig::new(&[(Tunable::PrioAgingExpire, 100)]);
        rig.insert("r10 rt:r0");
        rig.tune(Tunable::ReadExpire, expire);
        if waited > 0 {
            rig.wait(waited - 1);
            assert_eq!(rig.take(1), "rt:r0", "{expire}");
            rig.insert("rt:r20").wait(1);
        }
        assert_eq!(rig.take(1), "r10", "{expire}");
    }
}

#[test]
fn looking_for_what_has_aged_ends_a_batch_that_it_cannot_go_on_with() {
    // As in Linux: the best-effort class has no reads ahead, so the search in it begins a batch of
    // writes, whether or not the write has aged.
    let mut rig = Rig::new(&[]);
    rig.insert("rt:r10 rt:r30 rt:w50 w70");
    assert_eq!(rig.take(1), "rt:w50", "the first batch may be one of writes");
    assert_eq!(rig.take(1), "rt:r10");
    rig.insert("rt:w60");
    assert_eq!(rig.take(1), "rt:w60");
}

#[test]
fn while_two_classes_are_queued_a_boundary_between_batches_passes_unseen() {
    // As in Linux: the search for an aged request begins a new batch and finds the expired request
    // too young to go before another class. The class then continues that batch.
    for (other, order) in [("", "r400 r10 r500"), ("idle:r0", "r400 r500 r10 idle:r0")] {
        let mut rig = Rig::new(&[(Tunable::FifoBatch, 1), (Tunable::ReadExpire, 100)]);
        rig.insert("r300");
        assert_eq!(rig.run(), "r300");
        rig.insert("r10").wait(50).insert(other).insert("r400 r500");
        assert_eq!(rig.take(1), "r400", "nothing is expired yet");
        rig.complete("r400").wait(50);
        assert_eq!(format!("r400 {}", rig.run()), order);
    }
}

#[test]
fn what_is_at_the_head_goes_first_and_the_last_one_of_it_before_all() {
    let mut rig = Rig::new(&[]);
    rig.insert("rt:r10 r20").insert_at_head("idle:w30 f0+0 w8");
    assert_eq!(rig.take(4), "w8 f0+0 idle:w30 rt:r10");
    let stats = rig.order.stats();
    assert_eq!(stats.of(Prio::Idle, Direction::Write).dispatched, 1, "it counts in its own class");
    assert_eq!(rig.order.queued(Prio::Idle), 1);
}

#[test]
fn what_is_at_the_head_moves_the_sweep_but_not_the_batch() {
    let mut rig = Rig::new(&[(Tunable::FifoBatch, 2)]);
    rig.insert("r10 r30 r100 r120 w0");
    assert_eq!(rig.take(2), "w0 r10");
    rig.insert_at_head("r90");
    assert_eq!(rig.take(1), "r90");
    assert_eq!(rig.take(1), "r100", "from the position of the one at the head on");
    rig.insert_at_head("f0+0");
    assert_eq!(rig.take(2), "f0+0 r120", "a flush has no position");
}

#[test]
fn what_is_at_the_head_is_not_merged() {
    let mut rig = Rig::new(&[]);
    rig.insert("r0").insert_at_head("r8").insert("r16");
    assert_eq!(rig.sorted(), "r0 r16");
    assert_eq!(rig.run(), "r8 r16 r0");
}

#[test]
fn what_comes_back_goes_first_and_is_not_new() {
    let mut rig = Rig::new(&[]);
    rig.insert("w10 w30 w50 rt:r0");
    assert_eq!(rig.take(1), "rt:r0");
    assert_eq!(rig.complete("rt:r0").take(2), "w10 w30");
    rig.requeue("w30 w10").insert("rt:r90");
    let counters = *rig.order.stats().of(Prio::BestEffort, Direction::Write);
    assert_eq!((counters.inserted, counters.requeued, counters.dispatched), (3, 2, 2));
    assert_eq!((counters.queued(), counters.in_flight()), (3, 0));
    assert_eq!(rig.take(9), "w10 w30 rt:r90");
    let counters = *rig.order.stats().of(Prio::BestEffort, Direction::Write);
    assert_eq!((counters.dispatched, counters.in_flight()), (4, 2));
}
