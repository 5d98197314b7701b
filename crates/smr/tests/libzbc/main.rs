//! The cases of libzbc's conformance suite (sections 00 to 02) on the emulated disk, with their
//! numbers. The subjects are libzbc's, the tests are ours. docs/smr.md lists the cases and is
//! compared with the tables here: no case is missing or skipped.
#![allow(clippy::unwrap_used)] // A test that cannot continue panics.

mod completion;
mod fixture;
mod sense;
mod state;

use std::collections::BTreeSet;

use blockyard_smr::DiskConfig;
use fixture::{Case, Fixture};

type Change = fn(&mut DiskConfig);

/// The disks on which every case runs.
const DISKS: &[(&str, Change)] = &[
    ("512e, unrestricted reads", |_| {}),
    ("512e, restricted reads", |config| config.unrestricted_reads = false),
    ("4Kn, unrestricted reads", |config| config.logical_block = 4096),
    ("4Kn, restricted reads, no cache", |config| {
        config.logical_block = 4096;
        config.unrestricted_reads = false;
        config.write_cache = false;
    }),
];

/// A disk with gap zones. Sequential zones are not adjacent there, so accesses that cross from one
/// to the next have separate tests.
const GAPS: (&str, Change) = ("512e, gaps", |config| config.zone_capacity = 48 << 10);

fn run(section: &str, cases: &[Case], disks: &[(&str, Change)]) {
    for (disk, change) in disks {
        for Case { number, about, run } in cases {
            let fixture = Fixture::new(change);
            let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&fixture)));
            assert!(ran.is_ok(), "{section}.{number} ({about}) fails on a disk with {disk}");
        }
    }
}

#[test]
fn section_00_command_completion() {
    run("00", completion::CASES, DISKS);
    run("00", completion::CASES, &[GAPS]);
}

#[test]
fn section_01_sense_data() {
    run("01", sense::CASES, DISKS);
}

#[test]
fn section_02_state_machine() {
    for (_, change) in DISKS.iter().chain([&GAPS]) {
        for actions in state::ACTIONS {
            actions.run(|| Fixture::new(change));
        }
    }
    run("02", state::WRITES, DISKS);
    run("02", state::WRITES, &[GAPS]);
}

/// The numbers of all cases, with their section.
fn numbers() -> Vec<String> {
    let of = |section: &'static str, cases: &'static [Case]| {
        cases.iter().map(move |case| format!("{section}.{}", case.number))
    };
    let actions = state::ACTIONS.iter().flat_map(|actions| actions.numbers());
    of("00", completion::CASES)
        .chain(of("01", sense::CASES))
        .chain(actions.map(|number| format!("02.{number}")))
        .chain(of("02", state::WRITES))
        .collect()
}

#[test]
fn the_page_lists_every_case() {
    let all = numbers();
    let unique: BTreeSet<String> = all.iter().cloned().collect();
    assert_eq!((all.len(), unique.len()), (144, 144), "libzbc's sections 00 to 02");
    let page = include_str!("../../../../docs/smr.md");
    let listed: BTreeSet<String> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| 0"))
        .filter_map(|line| line.split(" |").next())
        .flat_map(expand)
        .collect();
    assert_eq!(listed, unique);
}

/// The case numbers in a table cell, such as `0.010, 011 to 015`, with the section before the
/// point.
fn expand(cell: &str) -> Vec<String> {
    let Some((section, list)) = cell.split_once('.') else { return Vec::new() };
    let mut numbers = Vec::new();
    for part in list.split(", ") {
        let (first, last) = part.split_once(" to ").unwrap_or((part, part));
        let bounds = (first.parse::<u32>().unwrap(), last.parse::<u32>().unwrap());
        numbers.extend((bounds.0..=bounds.1).map(|number| format!("0{section}.{number:03}")));
    }
    numbers
}
