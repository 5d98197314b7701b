//! The scheduler `deadline` against its slow model: random sequences of steps.
#![allow(clippy::unwrap_used)] // A test may panic.

use blockyard_core::request::MergeRules;
use blockyard_core::sched::deadline::{DeadlineConfig, Tunable, Tunables};
use blockyard_core::{Limits, Op, Prio, ZoneGeometry};
use blockyard_testing::deadline::{Lockstep, TestStep};
use proptest::prelude::*;

/// Sectors of the device, and of a zone of it.
const SECTORS: u64 = 512;
const ZONE_SECTORS: u64 = 64;

fn config(zoned: bool, capacity: usize) -> DeadlineConfig {
    let zones = ZoneGeometry {
        zone_sectors: ZONE_SECTORS,
        zone_capacity_sectors: ZONE_SECTORS,
        zone_count: (SECTORS / ZONE_SECTORS) as u32,
        conventional_count: 1,
        open_max: 0,
        active_max: 0,
    };
    let limits = Limits {
        sectors_max: 48,
        segments_max: 5,
        discard_sectors_max: 32,
        chunk_sectors: if zoned { ZONE_SECTORS } else { 0 },
        ..Limits::unlimited(8)
    };
    DeadlineConfig {
        capacity,
        in_flight_max: 8,
        rules: MergeRules::new(&limits),
        zones: zoned.then_some(zones),
        tunables: Tunables::new(capacity as u32),
    }
}

fn prio() -> impl Strategy<Value = Prio> {
    prop_oneof![6 => Just(Prio::BestEffort), 2 => Just(Prio::RealTime), 2 => Just(Prio::Idle)]
}

/// Mostly blocks of eight sectors, so that many are adjacent; some ranges of any length.
fn range() -> impl Strategy<Value = (u64, u64)> {
    let blocks = (0..SECTORS / 8).prop_map(|block| (block * 8, 8));
    let any = (0..SECTORS - 16, 1_u64..16);
    prop_oneof![9 => blocks, 1 => any]
}

fn insert() -> impl Strategy<Value = TestStep> {
    let op = prop_oneof![4 => Just(Op::Read), 4 => Just(Op::Write), 1 => Just(Op::Discard),
        1 => Just(Op::ZoneReset)];
    (op, prio(), range(), 0..16_u8).prop_map(|(op, prio, (sector, sectors), chance)| {
        let sectors = if op.has_range() { sectors } else { 0 };
        // A request does not cross the end of its zone: it would have been split.
        let sectors = sectors.min(ZONE_SECTORS - sector % ZONE_SECTORS);
        TestStep::Insert { op, prio, sector, sectors, merges: chance != 0, at_head: chance == 1 }
    })
}

fn tune() -> impl Strategy<Value = TestStep> {
    let values = [
        (Tunable::ReadExpire, vec![0, 1, 5, 500]),
        (Tunable::WriteExpire, vec![0, 2, 20, 5000]),
        (Tunable::WritesStarved, vec![-1, 0, 1, 2, 5]),
        (Tunable::FrontMerges, vec![0, 1]),
        (Tunable::AsyncDepth, vec![1, 3, 64]),
        (Tunable::FifoBatch, vec![0, 1, 2, 4, 16]),
        (Tunable::PrioAgingExpire, vec![0, 3, 30, 10_000]),
    ];
    let choices = values.into_iter().flat_map(|(tunable, values)| {
        values.into_iter().map(move |value| TestStep::Tune(tunable, value))
    });
    proptest::sample::select(choices.collect::<Vec<_>>())
}

fn step() -> impl Strategy<Value = TestStep> {
    prop_oneof![
        24 => insert(),
        8 => (1..12_usize).prop_map(TestStep::Dispatch),
        8 => (0..8_usize).prop_map(TestStep::Complete),
        1 => (0..8_usize).prop_map(TestStep::Requeue),
        4 => (0..8_u64).prop_map(TestStep::Wait),
        1 => tune(),
    ]
}

/// A few requests that arrive together and may bypass the scheduler.
fn pass() -> impl Strategy<Value = TestStep> {
    let op = prop_oneof![4 => Just(Op::Write), 1 => Just(Op::Discard)];
    let few = || (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(a, b, c)| a & b & c);
    let both = prop_oneof![
        2 => few().prop_map(|reads| (reads, 0)),
        2 => few().prop_map(|writes| (0, writes)),
        1 => (few(), few()),
        1 => (any::<u64>(), any::<u64>()),
    ];
    (op, prio(), both).prop_map(|(op, prio, (reads, writes))| TestStep::Pass {
        op,
        prio,
        reads,
        writes,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn every_step_is_that_of_the_model(
        zoned: bool,
        capacity in prop_oneof![Just(4_usize), Just(40), Just(400)],
        tuned in proptest::collection::vec(tune(), 0..4),
        steps in proptest::collection::vec(step(), 0..300),
    ) {
        let mut both = Lockstep::new(config(zoned, capacity));
        for step in tuned.into_iter().chain(steps) {
            both.step(step);
        }
        both.finish();
    }

    /// The queue is mostly empty, so requests bypass the scheduler.
    #[test]
    fn requests_are_dispatched_as_the_model_predicts(
        zoned: bool,
        tuned in proptest::collection::vec(tune(), 0..3),
        steps in proptest::collection::vec(
            prop_oneof![6 => pass(), 1 => insert(), 2 => (1..90_usize).prop_map(TestStep::Dispatch),
                1 => (0..8_u64).prop_map(TestStep::Wait)],
            1..100,
        ),
        completed in proptest::collection::vec(0..40_usize, 100),
    ) {
        let mut both = Lockstep::new(DeadlineConfig { in_flight_max: 80, ..config(zoned, 400) });
        for step in tuned {
            both.step(step);
        }
        for (step, completed) in steps.into_iter().zip(completed) {
            both.step(step);
            for _ in 0..completed {
                both.step(TestStep::Complete(0));
            }
        }
        both.finish();
    }

    /// Long queues, whose sorted order has many leaves.
    #[test]
    fn long_queues_are_those_of_the_model(
        inserts in proptest::collection::vec(insert(), 300..600),
        steps in proptest::collection::vec(step(), 0..100),
        is_one_class: bool,
        rooms in proptest::collection::vec(1..80_usize, 0..20),
        fifo_batch in prop_oneof![Just(3), Just(40), Just(i32::MAX)],
    ) {
        let mut both = Lockstep::new(DeadlineConfig { in_flight_max: 80, ..config(false, 1000) });
        both.step(TestStep::Tune(Tunable::FifoBatch, fifo_batch));
        for step in inserts {
            // Without merging, requests fill the queue.
            let TestStep::Insert { op, prio, sector, sectors, at_head, .. } = step else {
                continue;
            };
            let prio = if is_one_class { Prio::BestEffort } else { prio };
            both.step(TestStep::Insert { op, prio, sector, sectors, merges: false, at_head });
        }
        for step in steps {
            both.step(step);
        }
        // Empty leaves completely, in part, and slightly, and refill them in between.
        for (at, room) in rooms.into_iter().enumerate() {
            both.step(TestStep::Dispatch(room));
            for completed in 0..room {
                both.step(TestStep::Complete(completed));
            }
            for sector in 0..room as u64 / 2 {
                let (op, prio) = (Op::Read, Prio::BestEffort);
                let sector = sector * 24 + at as u64;
                let (sectors, merges, at_head) = (8, false, false);
                both.step(TestStep::Insert { op, prio, sector, sectors, merges, at_head });
            }
        }
        both.finish();
    }
}

/// Sweeps and batches that continue, end and begin again, by reads and by writes.
#[test]
fn passing_on_is_what_happens_where_nothing_waits() {
    let mut both = Lockstep::new(DeadlineConfig { in_flight_max: 80, ..config(false, 400) });
    let mut places = 0x1111_1111_1111_1111_u64;
    for round in 0..200 {
        let [reads, writes] = match round % 7 {
            0..=2 => [places, 0],
            3..=4 => [0, places],
            _ => [places, places.rotate_left(17)],
        };
        both.step(TestStep::Pass { op: Op::Write, prio: Prio::BestEffort, reads, writes });
        assert_eq!(both.passed(), round + 1);
        for _ in 0..reads.count_ones() + writes.count_ones() {
            both.step(TestStep::Complete(0));
        }
        places = places.rotate_left(5) & 0x5555_5555_5555_5555 | 1 << (round % 64);
    }
    both.finish();
}
