//! Every sequence of a few steps on three blocks, cut behind every operation, with every subset of
//! what was not durable: not by chance, all of them.

use std::collections::HashSet;

use blockyard_core::Status;
use blockyard_sim::directory::{Directory, Medium};

use crate::rig::{Rig, Shape, Step, format};
use crate::{fingerprint, look};

/// More subsets than this are not gone through.
const SUBSETS_MAX: usize = 1 << 9;

/// One image in so many is written on, which takes several times as long as to look at it.
const WRITTEN_ON: usize = 41;

/// What a sequence is made of.
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

/// Looks at each image of a moment once.
fn each_subset(medium: &Medium, mut look: impl FnMut(Directory)) {
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

/// Whether blocks are named in the order in which they come: three sequences that differ only in
/// which block is called which are one.
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

/// Goes through all sequences of this length, as far as their last step goes: what comes before is
/// the last step of a shorter one. Of those that differ only in the names of blocks, one, unless
/// all are asked for by `BLOCKYARD_CRASH_ALL=1`.
fn every_sequence(len: usize) -> usize {
    // Checkpoints come by every few groups, in small segments.
    let mut shape = Shape::tiny();
    shape.options.checkpoint_bytes = 2 << 10;
    let base = Directory::default();
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
        let mut rig = Rig::open(&directory, &shape);
        let mut rest = sequence;
        let mut before = 0;
        for _ in 0..len {
            before = directory.change_count();
            assert_eq!(rig.take(step(rest % STEPS)), Status::Ok);
            rest /= STEPS;
        }
        let (history, changes) = (rig.history.clone(), directory.changes());
        drop(rig);
        let mut seen = HashSet::new();
        for moment in 0..=changes.len() {
            if moment >= before {
                each_subset(&medium, |found| {
                    if seen.insert((fingerprint(&found), moment)) {
                        images += 1;
                        if images % WRITTEN_ON == 0 {
                            look(&history, moment, &found, &shape);
                        } else {
                            history.check(moment, &Rig::open(&found, &shape).contents());
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
