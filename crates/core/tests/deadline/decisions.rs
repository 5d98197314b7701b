//! Decisions within a class: sorted batches, deadlines between them, and the choice of a direction.

use blockyard_core::Prio;
use blockyard_core::sched::deadline::{Direction, Tunable};

use crate::fixture::Fixture;

#[test]
fn requests_are_sorted_from_last_position() {
    let mut fixture = Fixture::new(&[]);
    fixture.insert("r96 r32 r64");
    assert_eq!(fixture.take(1), "r32");
    // A request that arrives at a sector before the sweep waits for the next sweep.
    fixture.insert("r0 r48 r500");
    assert_eq!(fixture.run(), "r48 r64 r96 r500 r0");
}

#[test]
fn equal_sectors_keep_the_order_of_their_insertion() {
    let mut fixture = Fixture::new(&[]);
    fixture.insert("r64+1 r64+2 r64+3");
    assert_eq!(fixture.take(2), "r64+1 r64+2");
    // The latest position is one of these requests, and does not hide the others.
    fixture.insert("r64+4");
    assert_eq!(fixture.run(), "r64+3 r64+4");
}

#[test]
fn many_equal_sectors_fill_several_leaves() {
    let mut fixture = Fixture::new(&[(Tunable::FifoBatch, 100)]);
    let text: Vec<String> = (1..=60).map(|len| format!("r64+{}", len * 100)).collect();
    fixture.insert(&text.join(" "));
    assert_eq!(fixture.run(), text.join(" "));
}

#[test]
fn next_sweep_starts_at_oldest_request() {
    let mut fixture = Fixture::new(&[]);
    fixture.insert("r1000");
    assert_eq!(fixture.take(1), "r1000");
    fixture.insert("r400 r100 r600");
    // The sweep does not restart at sector 0: it moves in one direction, and then starts at the
    // head of the FIFO.
    assert_eq!(fixture.take(4), "r400 r600 r100");
}

#[test]
fn an_idle_queue_starts_in_the_direction_of_writes() {
    let mut fixture = Fixture::new(&[]);
    fixture.insert("r0 w64 r16");
    assert_eq!(fixture.run(), "w64 r0 r16");
    // The last batch was of reads, so it continues.
    fixture.insert("w80 r32");
    assert_eq!(fixture.run(), "r32 w80");
}

#[test]
fn deadlines_are_checked_between_batches_only() {
    let mut fixture = Fixture::new(&[(Tunable::FifoBatch, 3), (Tunable::ReadExpire, 100)]);
    fixture.insert("r500");
    assert_eq!(fixture.take(1), "r500");
    fixture.insert("r10");
    fixture.wait(100).insert("r600 r700 r800 r900");
    // Requests have expired now, but the batch has two more to go.
    assert_eq!(fixture.take(2), "r600 r700");
    assert_eq!(fixture.take(1), "r10");
    // The sweep continues from there.
    assert_eq!(fixture.run(), "r800 r900");
    let stats = fixture.order.stats();
    assert_eq!(stats.of(Prio::BestEffort, Direction::Read).expired, 1);
}

#[test]
fn deadline_expires_exactly_when_reached() {
    for (waited, order) in [(99, "r500 r800 r20"), (100, "r20 r500 r800")] {
        let mut fixture = Fixture::new(&[(Tunable::FifoBatch, 1), (Tunable::ReadExpire, 100)]);
        fixture.insert("r400");
        assert_eq!(fixture.take(1), "r400");
        fixture.insert("r20").wait(1).insert("r500 r800").wait(waited - 1);
        assert_eq!(fixture.run(), order, "after {waited} ms");
    }
}

#[test]
fn zero_expiry_is_fifo_between_batches() {
    let mut fixture = Fixture::new(&[(Tunable::FifoBatch, 1), (Tunable::ReadExpire, 0)]);
    fixture.insert("r90 r10 r50 r30");
    assert_eq!(fixture.run(), "r90 r10 r50 r30");
    assert_eq!(fixture.order.stats().of(Prio::BestEffort, Direction::Read).expired, 4);
}

#[test]
fn fifo_batch_zero_makes_each_request_a_batch() {
    let mut fixture = Fixture::new(&[(Tunable::FifoBatch, 0), (Tunable::WritesStarved, 1)]);
    fixture.insert("r10 r30 r50 r70 w10 w30");
    // One batch of reads for each batch of writes, and a batch is one request.
    assert_eq!(fixture.run(), "r10 w10 r30 w30 r50 r70");
}

#[test]
fn writes_wait_for_writes_starved_read_batches() {
    let reads = "r10 r30 r50 r70 r90";
    for (starved, order) in [
        (0, "w10 w30 r10 r30 r50 r70 r90"),
        (1, "r10 w10 r30 w30 r50 r70 r90"),
        (2, "r10 r30 w10 r50 r70 w30 r90"),
        (5, "r10 r30 r50 r70 r90 w10 w30"),
        (-1, "r10 r30 r50 r70 r90 w10 w30"),
    ] {
        let mut fixture =
            Fixture::new(&[(Tunable::FifoBatch, 1), (Tunable::WritesStarved, starved)]);
        fixture.insert("r0");
        assert_eq!(fixture.take(1), "r0", "so that the batch is over");
        fixture.insert(reads).insert("w10 w30");
        assert_eq!(fixture.run(), order, "writes_starved {starved}");
    }
}

#[test]
fn read_batches_count_only_while_writes_wait() {
    let mut fixture = Fixture::new(&[(Tunable::FifoBatch, 1), (Tunable::WritesStarved, 1)]);
    fixture.insert("r10 r30 r50");
    assert_eq!(fixture.take(3), "r10 r30 r50");
    fixture.insert("r70 r90 w10");
    // The request is expired only now.
    assert_eq!(fixture.run(), "r70 w10 r90");
}

#[test]
fn started_write_batch_continues_before_reads() {
    let mut fixture = Fixture::new(&[(Tunable::FifoBatch, 3)]);
    fixture.insert("w10 w30 w50 w70");
    assert_eq!(fixture.take(1), "w10");
    fixture.insert("r10 r30");
    assert_eq!(fixture.run(), "w30 w50 r10 r30 w70");
}

#[test]
fn batch_ends_at_end_of_its_sweep() {
    let mut fixture = Fixture::new(&[]);
    fixture.insert("w100 w200");
    assert_eq!(fixture.take(2), "w100 w200");
    fixture.insert("w50 r10");
    // The write is before the sweep's position, so a new batch begins, and reads go first.
    assert_eq!(fixture.run(), "r10 w50");
}

#[test]
fn each_direction_has_its_own_position() {
    let mut fixture = Fixture::new(&[(Tunable::FifoBatch, 2)]);
    fixture.insert("w100 w200 w300 w400 r500 r600 r700");
    assert_eq!(fixture.take(4), "w100 w200 r500 r600");
    assert_eq!(fixture.take(3), "r700 w300 w400");
}

#[test]
fn changing_an_expiry_leaves_deadlines_as_they_are() {
    let mut fixture = Fixture::new(&[(Tunable::FifoBatch, 1), (Tunable::ReadExpire, 100)]);
    fixture.insert("r400");
    assert_eq!(fixture.take(1), "r400");
    fixture.insert("r20");
    fixture.tune(Tunable::ReadExpire, 1);
    fixture.wait(50).insert("r500");
    assert_eq!(fixture.take(1), "r500", "the old one has its old deadline");
    fixture.insert("r600").wait(50);
    assert_eq!(fixture.run(), "r20 r600");
}

#[test]
fn lowering_expiry_delays_no_request() {
    // Linux takes the request for one from the future until 499 ms have passed.
    let mut fixture = Fixture::new(&[]);
    fixture.insert("r20");
    fixture.tune(Tunable::ReadExpire, 1);
    assert_eq!(fixture.run(), "r20");
}

#[test]
fn replayed_decision_counts_like_own_decision() {
    let mut fixture = Fixture::new(&[(Tunable::FifoBatch, 2)]);
    fixture.insert("r10 r30 r50 r70");
    let kind = blockyard_core::sched::deadline::Kind {
        prio: Prio::BestEffort,
        direction: Direction::Read,
    };
    assert!(fixture.order.take_at(kind, 11, Default::default()).is_none());
    assert!(fixture.order.take_at(kind, 30, Default::default()).is_some());
    assert_eq!(fixture.run(), "r50 r70 r10");
}
