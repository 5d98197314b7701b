//! Decisions within a class: sorted batches, deadlines between them, and the choice of a direction.

use blockyard_core::Prio;
use blockyard_core::sched::deadline::{Direction, Tunable};

use crate::rig::Rig;

#[test]
fn requests_go_in_sorted_order_from_the_latest_position_on() {
    let mut rig = Rig::new(&[]);
    rig.insert("r96 r32 r64");
    assert_eq!(rig.take(1), "r32");
    // A request that arrives at a sector before the sweep waits for the next sweep.
    rig.insert("r0 r48 r500");
    assert_eq!(rig.run(), "r48 r64 r96 r500 r0");
}

#[test]
fn equal_sectors_keep_the_order_of_their_insertion() {
    let mut rig = Rig::new(&[]);
    rig.insert("r64+1 r64+2 r64+3");
    assert_eq!(rig.take(2), "r64+1 r64+2");
    // The latest position is one of these requests, and does not hide the others.
    rig.insert("r64+4");
    assert_eq!(rig.run(), "r64+3 r64+4");
}

#[test]
fn many_equal_sectors_fill_several_leaves() {
    let mut rig = Rig::new(&[(Tunable::FifoBatch, 100)]);
    let text: Vec<String> = (1..=60).map(|len| format!("r64+{}", len * 100)).collect();
    rig.insert(&text.join(" "));
    assert_eq!(rig.run(), text.join(" "));
}

#[test]
fn at_the_end_of_a_sweep_the_next_one_starts_at_the_oldest_request() {
    let mut rig = Rig::new(&[]);
    rig.insert("r1000");
    assert_eq!(rig.take(1), "r1000");
    rig.insert("r400 r100 r600");
    // The sweep does not restart at sector 0: it goes one way only, and then starts at the head of
    // the FIFO.
    assert_eq!(rig.take(4), "r400 r600 r100");
}

#[test]
fn an_idle_queue_starts_in_the_direction_of_writes() {
    let mut rig = Rig::new(&[]);
    rig.insert("r0 w64 r16");
    assert_eq!(rig.run(), "w64 r0 r16");
    // The last batch was of reads, so it continues.
    rig.insert("w80 r32");
    assert_eq!(rig.run(), "r32 w80");
}

#[test]
fn deadlines_are_looked_at_between_batches_only() {
    let mut rig = Rig::new(&[(Tunable::FifoBatch, 3), (Tunable::ReadExpire, 100)]);
    rig.insert("r500");
    assert_eq!(rig.take(1), "r500");
    rig.insert("r10");
    rig.wait(100).insert("r600 r700 r800 r900");
    // Requests have expired now, but the batch has two more to go.
    assert_eq!(rig.take(2), "r600 r700");
    assert_eq!(rig.take(1), "r10");
    // The sweep continues from there.
    assert_eq!(rig.run(), "r800 r900");
    let stats = rig.order.stats();
    assert_eq!(stats.of(Prio::BestEffort, Direction::Read).expired, 1);
}

#[test]
fn a_deadline_is_expired_when_it_is_reached_and_not_before() {
    for (waited, order) in [(99, "r500 r800 r20"), (100, "r20 r500 r800")] {
        let mut rig = Rig::new(&[(Tunable::FifoBatch, 1), (Tunable::ReadExpire, 100)]);
        rig.insert("r400");
        assert_eq!(rig.take(1), "r400");
        rig.insert("r20").wait(1).insert("r500 r800").wait(waited - 1);
        assert_eq!(rig.run(), order, "after {waited} ms");
    }
}

#[test]
fn an_expiry_of_nothing_is_first_come_first_served_between_batches() {
    let mut rig = Rig::new(&[(Tunable::FifoBatch, 1), (Tunable::ReadExpire, 0)]);
    rig.insert("r90 r10 r50 r30");
    assert_eq!(rig.run(), "r90 r10 r50 r30");
    assert_eq!(rig.order.stats().of(Prio::BestEffort, Direction::Read).expired, 4);
}

#[test]
fn a_batch_of_none_makes_every_request_a_batch() {
    let mut rig = Rig::new(&[(Tunable::FifoBatch, 0), (Tunable::WritesStarved, 1)]);
    rig.insert("r10 r30 r50 r70 w10 w30");
    // One batch of reads for each batch of writes, and a batch is one request.
    assert_eq!(rig.run(), "r10 w10 r30 w30 r50 r70");
}

#[test]
fn writes_wait_for_so_many_batches_of_reads() {
    let reads = "r10 r30 r50 r70 r90";
    for (starved, order) in [
        (0, "w10 w30 r10 r30 r50 r70 r90"),
        (1, "r10 w10 r30 w30 r50 r70 r90"),
        (2, "r10 r30 w10 r50 r70 w30 r90"),
        (5, "r10 r30 r50 r70 r90 w10 w30"),
        (-1, "r10 r30 r50 r70 r90 w10 w30"),
    ] {
        let mut rig = Rig::new(&[(Tunable::FifoBatch, 1), (Tunable::WritesStarved, starved)]);
        rig.insert("r0");
        assert_eq!(rig.take(1), "r0", "so that the batch is over");
        rig.insert(reads).insert("w10 w30");
        assert_eq!(rig.run(), order, "writes_starved {starved}");
    }
}

#[test]
fn batches_of_reads_do_not_starve_writes_that_are_not_there() {
    let mut rig = Rig::new(&[(Tunable::FifoBatch, 1), (Tunable::WritesStarved, 1)]);
    rig.insert("r10 r30 r50");
    assert_eq!(rig.take(3), "r10 r30 r50");
    rig.insert("r70 r90 w10");
    // The request is expired only now.
    assert_eq!(rig.run(), "r70 w10 r90");
}

#[test]
fn a_batch_of_writes_that_has_begun_goes_on_before_reads() {
    let mut rig = Rig::new(&[(Tunable::FifoBatch, 3)]);
    rig.insert("w10 w30 w50 w70");
    assert_eq!(rig.take(1), "w10");
    rig.insert("r10 r30");
    assert_eq!(rig.run(), "w30 w50 r10 r30 w70");
}

#[test]
fn a_batch_ends_where_its_direction_has_nothing_ahead() {
    let mut rig = Rig::new(&[]);
    rig.insert("w100 w200");
    assert_eq!(rig.take(2), "w100 w200");
    rig.insert("w50 r10");
    // The write is before the sweep's position, so a new batch begins, and reads go first.
    assert_eq!(rig.run(), "r10 w50");
}

#[test]
fn each_direction_has_a_position_of_its_own() {
    let mut rig = Rig::new(&[(Tunable::FifoBatch, 2)]);
    rig.insert("w100 w200 w300 w400 r500 r600 r700");
    assert_eq!(rig.take(4), "w100 w200 r500 r600");
    assert_eq!(rig.take(3), "r700 w300 w400");
}

#[test]
fn changing_an_expiry_leaves_deadlines_as_they_are() {
    let mut rig = Rig::new(&[(Tunable::FifoBatch, 1), (Tunable::ReadExpire, 100)]);
    rig.insert("r400");
    assert_eq!(rig.take(1), "r400");
    rig.insert("r20");
    rig.tune(Tunable::ReadExpire, 1);
    rig.wait(50).insert("r500");
    assert_eq!(rig.take(1), "r500", "the old one has its old deadline");
    rig.insert("r600").wait(50);
    assert_eq!(rig.run(), "r20 r600");
}

#[test]
fn lowering_an_expiry_holds_nothing_back() {
    // Linux takes the request for one from the future until 499 ms have passed.
    let mut rig = Rig::new(&[]);
    rig.insert("r20");
    rig.tune(Tunable::ReadExpire, 1);
    assert_eq!(rig.run(), "r20");
}

#[test]
fn the_replay_of_a_foreign_decision_counts_as_one() {
    let mut rig = Rig::new(&[(Tunable::FifoBatch, 2)]);
    rig.insert("r10 r30 r50 r70");
    let kind = blockyard_core::sched::deadline::Kind {
        prio: Prio::BestEffort,
        direction: Direction::Read,
    };
    assert!(rig.order.take_at(kind, 11, Default::default()).is_none());
    assert!(rig.order.take_at(kind, 30, Default::default()).is_some());
    assert_eq!(rig.run(), "r50 r70 r10");
}
