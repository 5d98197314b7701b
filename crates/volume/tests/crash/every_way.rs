//! Exhaustive power cuts: every sequence of a few steps on three blocks, cut after every operation,
//! with every subset of what was not durable.

use std::collections::HashSet;

use blockyard_core::Status;
use blockyard_testing::directory::{Medium, SimulatedDirectory};

use crate::fixture::{Fixture, Shape, Step, format};
use crate::{fingerprint, look};

/// Most subsets at one moment.
const SUBSETS_MAX: usize = 1 << 9;

/// One in this number of images is written to again, which takes several times as long as a check.
const WRITTEN_ON: usize = 41;

/// Number of different steps.
const STEPS: usize = 11;

fn step(number: usize) -> Step {
    let first = number as u64 % 3;
    match number {
        0..3 => Step::Write { first, count: 1, fua: false },
        3..6 => Step::Write { first, count: 1, fua: true },
        6..9 => Step::Discard { first, count: 1, fua: false },
        9 => Step::Flush,
        _ => Step::Snapshot,
    }
}

/// Calls `look` for each image that a cut at this moment can leave.
fn each_subset(medium: &Medium, mut look: impl FnMut(SimulatedDirectory)) {
    let choices = medium.choices();
    let all = choices.iter().product::<usize>();
    assert!(all <= SUBSETS_MAX, "{all} subsets");
    for mut number in 0..all {
        look(medium.cut(|_, count| {
            let choice = number % count;
            number /= count;
            choice
        }));
    }
}

/// Whether the sequence uses the blocks in the order 0, 1, 2. Sequences that differ only in the
/// numbers of blocks are equivalent.
fn is_plain(mut sequence: usize, len: usize) -> bool {
    let mut known = 0;
    for _ in 0..len {
        let number = sequence % STEPS;
        sequence /= STEPS;
        if number < 9 && number % 3 > known {
            return false;
        }
        known += usize::from(number < 9 && number % 3 == known);
    }
    true
}

/// Runs all sequences of this length, and cuts during their last step; earlier steps are the last
/// step of a shorter sequence. Equivalent sequences run once, unless `BLOCKYARD_CRASH_ALL=1` asks
/// for all.
fn every_sequence(len: usize) -> usize {
    // Small segments, and a checkpoint every few groups.
    let mut shape = Shape::tiny();
    shape.options.checkpoint_bytes = 2 << 10;
    let base = SimulatedDirectory::default();
    format(&base, &shape);
    let clean = base.medium();
    let all = std::env::var_os("BLOCKYARD_CRASH_ALL").is_some();
    let mut images = 0;
    for sequence in 0..STEPS.pow(len as u32) {
        if !all && !is_plain(sequence, len) {
            continue;
        }
        let directory = clean.kill();
        let mut medium = directory.medium();
        let mut fixture = Fixture::open(&directory, &shape);
        let mut rest = sequence;
        let mut before = 0;
        for _ in 0..len {
            before = directory.change_count();
            assert_eq!(fixture.take(step(rest % STEPS)), Status::Ok);
            rest /= STEPS;
        }
        let (history, changes) = (fixture.history.clone(), directory.changes());
        drop(fixture);
        let mut seen = HashSet::new();
        for moment in 0..=changes.len() {
            if moment >= before {
                each_subset(&medium, |found| {
                    if seen.insert((fingerprint(&found), moment)) {
                        images += 1;
                        if images % WRITTEN_ON == 0 {
                            look(&history, moment, &found, &shape);
                        } else {
                            history.check(moment, &Fixture::open(&found, &shape).contents());
                        }
                    }
                });
            }
            if let Some(change) = changes.get(moment) {
                medium.apply(change);
            }
        }
    }
    images
}

#[test]
fn every_sequence_of_up_to_three_steps() {
    let images: usize = (1..=3).map(every_sequence).sum();
    assert!(images > 3_000, "{images}");
}

#[test]
fn every_sequence_of_four_steps() {
    let images = every_sequence(4);
    assert!(images > 10_000, "{images}");
}
