//! A process is killed, and one of its writes reaches the disk after the next process has opened
//! the pool. The lock prevents this on one host; between two hosts nothing does. Then the late
//! group, which was never acknowledged, must be ignored, and existing data must stay.

use blockyard_testing::directory::{Change, SimulatedDirectory};
use blockyard_testing::seed::Seed;

use crate::fixture::{Fixture, format};
use crate::{look, shape, work};

/// Whether this is the write of a group.
fn is_group(change: &Change) -> bool {
    matches!(change, Change::Write { bytes, .. } if bytes.starts_with(b"BLKYGRP\n"))
}

#[test]
fn a_group_that_lands_late_is_passed_over() {
    let seed = Seed::from_env();
    let mut late = 0;
    for stream in 12_000..12_060 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let mut shape = shape(&mut random);
        shape.mirror = random.bool();
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut medium = directory.medium();
        let mut fixture = Fixture::open(&directory, &shape);
        work(&mut fixture, &mut random, &shape, 25);
        let (history, changes) = (fixture.history.clone(), directory.changes());
        drop(fixture);
        for (moment, change) in changes.iter().enumerate() {
            if is_group(change) {
                let found = medium.kill();
                let mut base = found.medium();
                let mut fixture = Fixture::open(&found, &shape);
                let contents = fixture.contents();
                history.check(moment, &contents);
                drop(fixture);
                found.changes().iter().for_each(|change| base.apply(change));
                base.apply(change);
                let again = base.kill();
                assert_eq!(Fixture::open(&again, &shape).contents(), contents, "after {moment}");
                // A group written in its place is valid.
                look(&history, moment, &base.kill(), &shape);
                late += 1;
            }
            medium.apply(change);
        }
    }
    assert!(late > 100, "only {late} writes were late");
}
