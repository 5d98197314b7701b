//! Bounds: the capacity, `async_depth`, and the reserved entries of requeued requests.

use blockyard_core::sched::deadline::{Direction, Kind, Tunable};
use blockyard_core::{Op, Prio};

use crate::fixture::{CAPACITY, Fixture, IN_FLIGHT_MAX};

/// `count` requests that are not adjacent.
fn apart(op: &str, from: usize, count: usize) -> String {
    (from..from + count).map(|at| format!("{op}{}", at * 100)).collect::<Vec<_>>().join(" ")
}

#[test]
fn insert_beyond_capacity_returns_requests_in_order() {
    let mut fixture = Fixture::new(&[]);
    fixture.insert(&apart("r", 0, CAPACITY));
    assert_eq!(fixture.order.room(), 0);
    assert_eq!(fixture.try_insert("r50 r108 w0 r192"), "r50 w0", "the others have joined");
    assert_eq!(fixture.take(1), "r0");
    assert_eq!(fixture.order.room(), 1);
    assert_eq!(fixture.try_insert("r50 w0"), "w0");
}

#[test]
fn requeue_always_fits() {
    let mut fixture = Fixture::new(&[(Tunable::FifoBatch, 100)]);
    fixture.insert(&apart("r", 0, IN_FLIGHT_MAX));
    let taken = fixture.take(IN_FLIGHT_MAX);
    fixture.insert(&apart("r", 100, CAPACITY));
    assert_eq!(fixture.try_insert("rt:r7"), "rt:r7");
    let backwards: Vec<&str> = taken.split(' ').rev().collect();
    fixture.requeue(&backwards.join(" "));
    assert_eq!(fixture.order.waiting(), CAPACITY + IN_FLIGHT_MAX);
    assert_eq!(fixture.take(IN_FLIGHT_MAX), taken);
    assert_eq!(fixture.complete(&taken).run(), apart("r", 100, CAPACITY));
    assert_eq!(fixture.order.room(), CAPACITY);
}

#[test]
fn async_depth_limits_writes_only() {
    let mut fixture = Fixture::new(&[(Tunable::AsyncDepth, 3)]);
    assert_eq!(fixture.try_insert("w0 w100 r0 idle:d200 w300 r100 rt:w400"), "w300 rt:w400");
    let write = Kind::of(Op::Write, Prio::BestEffort);
    assert!(!fixture.order.admits(write) && fixture.order.admits(Kind::of(Op::Read, Prio::Idle)));
    // A write that merges needs no entry.
    assert_eq!(fixture.try_insert("w8 w300"), "w300");
    assert_eq!(fixture.take(2), "w0+16 w100");
    assert_eq!(fixture.try_insert("w300"), "w300", "those at the device count");
    fixture.complete("w0");
    assert_eq!(fixture.try_insert("w300 w500"), "w500");
    // The limit does not apply at the head.
    fixture.insert_at_head("w700");
    assert_eq!(fixture.take(1), "w700");
    fixture.complete("w100 w700");
    assert_eq!(fixture.try_insert("w500 w600"), "w600");
}

#[test]
fn gap_merge_frees_an_entry() {
    let mut fixture = Fixture::new(&[(Tunable::AsyncDepth, 2)]);
    assert_eq!(fixture.try_insert("w0 w16 w8 w100 w200"), "w200");
    assert_eq!(fixture.run(), "w0+24 w100");
    assert_eq!(fixture.try_insert("w0 w100 w200"), "w200");
}

#[test]
fn default_tunables_throttle_nothing() {
    let mut fixture = Fixture::new(&[]);
    assert_eq!(fixture.order.tunables().get(Tunable::AsyncDepth), CAPACITY as i32);
    fixture.insert(&apart("w", 0, CAPACITY));
}

#[test]
fn statistics_count_each_class_and_direction() {
    let mut fixture = Fixture::new(&[(Tunable::ReadExpire, 10)]);
    fixture.insert("r0 r8 rt:w0 idle:r100").wait(10);
    assert_eq!(fixture.take(1), "rt:w0");
    fixture.complete("rt:w0");
    assert_eq!(fixture.take(9), "r0+16");
    let stats = fixture.order.stats();
    let shown: Vec<String> = stats
        .iter()
        .filter(|(_, _, counters)| counters.inserted > 0)
        .map(|(prio, direction, c)| {
            let (prio, direction) = (prio.name(), direction.name());
            let counts = [c.inserted, c.merged, c.dispatched, c.completed, c.expired];
            format!("{prio} {direction} {counts:?} {} {}", c.queued(), c.in_flight())
        })
        .collect();
    assert_eq!(
        shown,
        [
            "rt write [1, 0, 1, 1, 0] 0 0",
            "be read [2, 1, 1, 0, 1] 1 1",
            "idle read [1, 0, 0, 0, 0] 1 0",
        ]
    );
    assert_eq!(stats.of(Prio::Idle, Direction::Write).inserted, 0);
}

#[test]
fn order_of_thousands_stays_sorted() {
    use blockyard_core::request::MergeRules;
    use blockyard_core::sched::deadline::{Deadline, DeadlineConfig, Tunables};
    use blockyard_core::{Limits, Nanos};

    const COUNT: usize = 10_000;
    let mut tunables = Tunables::new(COUNT as u32);
    tunables.set(Tunable::FifoBatch, i64::from(i32::MAX)).unwrap();
    let mut order = Deadline::new(DeadlineConfig {
        capacity: COUNT,
        in_flight_max: 1,
        rules: MergeRules::new(&Limits::unlimited(1)),
        zones: None,
        tunables,
    });
    // A step that is coprime to the count visits every entry once.
    let mut refused = Vec::new();
    let pieces = (0..COUNT).map(|at| at * 7919 % COUNT * 100).map(|at| format!("r{at}"));
    let pieces: Vec<_> = pieces.map(|word| crate::fixture::read_one(&word)).collect();
    order.insert_batch(pieces, Nanos(0), &mut refused);
    assert!(refused.is_empty() && order.room() == 0);
    for at in 0..COUNT {
        let piece = order.next(Nanos(0)).unwrap();
        assert_eq!(crate::fixture::words([&piece]), format!("r{}", at * 100));
    }
    assert!(order.is_empty() && order.next(Nanos(0)).is_none());
}
