//! Cuts the power of a pool after every write, sync and change of a name, and checks what an
//! opening finds: the state after a prefix of the steps that contains all durable steps. Blocks are
//! old or new, never torn; snapshots are exact.
//!
//! The workload runs once, on a simulated directory that records every operation. Each prefix of
//! the record is a moment at which the power may have been cut.
#![allow(clippy::unwrap_used)] // Test code.

mod catalogue;
mod concurrent;
mod counts;
mod damage;
mod encrypted;
mod every_way;
mod fixture;
mod full;
mod late;
mod long;
mod losses;
mod mirror;
mod once;
mod partly;
mod replace;
mod reservation;
mod rot;
mod settle;
mod threads;
mod turns;

use std::collections::HashSet;

use blockyard_core::Status;
use blockyard_testing::directory::{Change, Medium, SimulatedDirectory};
use blockyard_testing::seed::Seed;
use blockyard_testing::simulated_store::{FaultPlan, SimulatedStore, When};
use blockyard_volume::{Compression, Options};
use crc_fast::CrcAlgorithm;

use fixture::{Fixture, History, Shape, Step, format};

/// Number of seeds in `make test`; `BLOCKYARD_CRASH_SEEDS` overrides it.
const SEEDS: u64 = 1000;

/// Random images per moment, in addition to that of durable data only and that of all data.
const SAMPLES: usize = 1;

fn seeds() -> u64 {
    match std::env::var("BLOCKYARD_CRASH_SEEDS") {
        Ok(text) => text.parse().expect("BLOCKYARD_CRASH_SEEDS is a number"),
        Err(_) => SEEDS,
    }
}

/// A random shape.
fn shape(random: &mut fastrand::Rng) -> Shape {
    let mut shape = Shape::tiny();
    shape.block_bytes = [512, 1024, 2048][random.usize(..3)];
    shape.blocks = random.u64(3..12);
    if random.bool() {
        shape.compression = Compression::Lz4;
    }
    shape.options.checkpoint_bytes = random.u64(2 << 10..20 << 10);
    shape.options.sync_bytes = random.u64(1 << 10..20 << 10);
    // So few segments that cleaning runs all the time and space sometimes runs out.
    if random.u8(..3) == 0 {
        shape.options.segments_max = random.usize(16..26);
    }
    if random.bool() {
        let bytes = random.u32(..4096);
        (shape.depth, shape.options.pipeline_bytes) = (2 + bytes as usize % 3, bytes);
    }
    if random.u8(..4) == 0 {
        (shape.spread, shape.blocks) = (true, random.u64(5..=16));
    }
    shape.encrypted = random.u8(..4) == 0;
    if shape.encrypted && shape.block_bytes >= 1024 {
        // No multiple of this alignment is the length of an encrypted block.
        shape.options.align = 1024;
    }
    shape
}

fn step(random: &mut fastrand::Rng, shape: &Shape) -> Step {
    let first = random.u64(..shape.blocks);
    let count = random.u64(1..=shape.together(first, 4));
    match random.u8(..20) {
        0..8 => Step::Write { first, count, fua: random.u8(..3) == 0 },
        8..12 => Step::Part { block: first, fua: random.u8(..3) == 0 },
        12..15 => Step::Flush,
        15..19 => Step::Discard { first, count, fua: random.u8(..3) == 0 },
        _ => Step::Snapshot,
    }
}

/// Takes random steps, some of them concurrently.
fn work(fixture: &mut Fixture, random: &mut fastrand::Rng, shape: &Shape, count: usize) {
    let mut begun = 0;
    while begun < count {
        let step = step(random, shape);
        let status = fixture.begin(step);
        assert!(status.is_ok() || status == Status::Resource, "{status}");
        begun += 1;
        match random.u8(..6) {
            // The next step may then be in flight together with this group.
            0 => _ = fixture.committer.turn(),
            1 if status.is_ok() => {}
            _ => go_on(fixture),
        }
    }
    go_on(fixture);
}

fn go_on(fixture: &mut Fixture) {
    let status = fixture.go_on();
    assert!(status.is_ok() || status == Status::NoSpc, "{status}");
}

/// A checksum of the names and contents of a directory.
pub(crate) fn fingerprint(directory: &SimulatedDirectory) -> u64 {
    let mut digest = crc_fast::Digest::new(CrcAlgorithm::Crc64Nvme);
    directory.each_file(|name, bytes| {
        digest.update(name.as_bytes());
        digest.update(&(bytes.len() as u64).to_le_bytes());
        digest.update(bytes);
    });
    digest.finalize()
}

/// Opens what a cut has left, checks it, and writes: what is made durable now must be there after
/// another cut.
fn look(history: &History, moment: usize, found: &SimulatedDirectory, shape: &Shape) {
    let mut base = found.medium();
    let mut fixture = Fixture::open(found, shape);
    let contents = fixture.contents();
    history.check(moment, &contents);
    fixture.check_counts();
    let last = shape.blocks - 1;
    match fixture.take(Step::Write { first: last, count: 1, fua: true }) {
        Status::Ok => {}
        Status::NoSpc => return,
        other => panic!("{other}"),
    }
    found.changes().iter().for_each(|change| base.apply(change));
    let mut wanted = contents;
    wanted.0[last as usize] = 1;
    fixture.check_counts();
    let again = base.cut(|_, _| 0);
    let mut fixture = Fixture::open(&again, shape);
    assert_eq!(fixture.contents(), wanted, "after one more cut");
    fixture.check_counts();
}

/// Regression: two syncs of one file were in flight on a system that reports an error to only one
/// of them. The later sync got the error, and data that the earlier one had lost were acknowledged
/// as durable.
#[test]
fn a_single_group_is_in_flight_where_an_error_is_reported_once() {
    for depth in [1, 3] {
        let mut random = fastrand::Rng::with_seed(depth as u64);
        let tiny = Shape::tiny();
        let options = Options { pipeline_bytes: 0, ..tiny.options };
        let shape = Shape { depth, options, blocks: 40, ..tiny };
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let store = SimulatedStore::new(&directory).with_depth(depth).with_error_reported_once();
        let mut fixture = Fixture::on(store, &directory, &shape).unwrap();
        work(&mut fixture, &mut random, &shape, 200);
    }
}

fn cut_everywhere(stream: u64, fault: FaultPlan) {
    let mut random = Seed::from_env().rng(stream);
    let shape = shape(&mut random);
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut medium = directory.medium();
    let store = SimulatedStore::new(&directory).with_depth(shape.depth);
    let mut fixture = Fixture::on(store.clone(), &directory, &shape).unwrap();
    store.set_faults(fault);
    let count = random.usize(5..40);
    work(&mut fixture, &mut random, &shape, count);
    let (history, changes) = (fixture.history.clone(), directory.changes());
    drop(fixture);
    look_everywhere(&mut medium, &changes, &mut random, &history, &shape);
}

/// Checks what power cuts leave after every operation. Of a moment, a check uses only the number of
/// steps that must be durable, so an image is checked once for each such number.
fn look_everywhere(
    medium: &mut Medium,
    changes: &[Change],
    random: &mut fastrand::Rng,
    history: &History,
    shape: &Shape,
) {
    let mut seen = HashSet::new();
    for moment in 0..=changes.len() {
        let mut check = |found: SimulatedDirectory| {
            if seen.insert((fingerprint(&found), history.durable(moment))) {
                look(history, moment, &found, shape);
            }
        };
        check(medium.cut(|_, _| 0));
        check(medium.cut(|_, count| count - 1));
        check(medium.kill());
        for _ in 0..SAMPLES {
            check(medium.cut(|_, count| random.usize(..count)));
        }
        if let Some(change) = changes.get(moment) {
            medium.apply(change);
        }
    }
}

#[test]
fn a_power_cut_leaves_a_prefix_with_everything_durable() {
    let half = seeds() / 2;
    let run = |streams: std::ops::Range<u64>| {
        for stream in streams {
            let _watch = Seed::from_env().watch(&format!("stream {stream}"));
            cut_everywhere(stream, FaultPlan::default());
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| run(0..half));
        run(half..seeds());
    });
}

/// Tests the checker itself: on a disk whose syncs do nothing, it must fail.
#[test]
fn a_disk_without_syncs_does_not_pass() {
    let noticed = (0..20).filter(|stream| {
        std::panic::catch_unwind(|| {
            cut_everywhere(*stream, FaultPlan { ignored_syncs: &[""], ..FaultPlan::default() })
        })
        .is_err()
    });
    assert!(noticed.count() >= 10, "most histories have something durable in them");
}

/// Cuts the power after every operation of an opening that follows a cut: the contents stay the
/// same.
#[test]
fn a_power_cut_during_recovery_changes_nothing() {
    let seed = Seed::from_env();
    for stream in 5000..5040 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let shape = shape(&mut random);
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut medium: Medium = directory.medium();
        let mut fixture = Fixture::open(&directory, &shape);
        work(&mut fixture, &mut random, &shape, 25);
        let (history, changes) = (fixture.history.clone(), directory.changes());
        drop(fixture);
        for moment in 0..=changes.len() {
            let found = medium.cut(|_, count| random.usize(..count));
            let mut under = found.medium();
            let first = Fixture::open(&found, &shape).contents();
            history.check(moment, &first);
            for change in found.changes() {
                under.apply(&change);
                let again = under.cut(|_, count| random.usize(..count));
                assert_eq!(Fixture::open(&again, &shape).contents(), first, "cut after {change:?}");
            }
            if let Some(change) = changes.get(moment) {
                medium.apply(change);
            }
        }
    }
}

/// After a kill, data that were not synced are in the page cache, where the next opening finds
/// them. The opening makes them durable before it relies on them, so a later power cut loses none
/// of them.
#[test]
fn a_power_cut_after_a_kill_loses_nothing_that_recovery_found() {
    let seed = Seed::from_env();
    for stream in 5100..5180 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let shape = shape(&mut random);
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut medium: Medium = directory.medium();
        let mut fixture = Fixture::open(&directory, &shape);
        work(&mut fixture, &mut random, &shape, 25);
        let changes = directory.changes();
        drop(fixture);
        for change in &changes {
            medium.apply(change);
            let found = medium.kill();
            let mut fixture = Fixture::open(&found, &shape);
            let mut wanted = fixture.contents();
            let last = shape.blocks - 1;
            if random.bool()
                && fixture.take(Step::Write { first: last, count: 1, fua: true }).is_ok()
            {
                wanted.0[last as usize] = 1;
            }
            let mut under = medium.clone();
            found.changes().iter().for_each(|change| under.apply(change));
            for again in [under.cut(|_, _| 0), under.cut(|_, count| random.usize(..count))] {
                assert_eq!(
                    Fixture::open(&again, &shape).contents(),
                    wanted,
                    "cut after {change:?}"
                );
            }
        }
    }
}

/// A write or a sync fails once. From then on the pool acknowledges nothing as durable, and the
/// next opening finds everything that was. The kernel dropped the unsynced data without another
/// error.
#[test]
fn an_error_latches_the_pool_and_opening_it_again_heals() {
    let seed = Seed::from_env();
    for stream in 6000..6150 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let shape = shape(&mut random);
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut medium = directory.medium();
        let store = SimulatedStore::new(&directory).with_depth(shape.depth);
        let mut fixture = Fixture::on(store.clone(), &directory, &shape).unwrap();
        let after = When::After(random.u64(..12));
        store.set_faults(match stream % 2 {
            0 => FaultPlan { failed_syncs: after, ..FaultPlan::default() },
            _ => FaultPlan { failed_writes: after, ..FaultPlan::default() },
        });
        let mut errors = 0;
        for _ in 0..40 {
            let status = fixture.take(step(&mut random, &shape));
            assert!(matches!(status, Status::Ok | Status::IoErr | Status::NoSpc), "{status}");
            if errors > 0 {
                assert_eq!(status, Status::IoErr, "latched");
            }
            errors += usize::from(status == Status::IoErr);
        }
        assert!(errors > 0 && fixture.pool.is_latched());
        store.set_faults(FaultPlan::default());
        // The kernel reported the error once; the next sync would succeed.
        assert_eq!(fixture.take(Step::Flush), Status::IoErr, "never tried again");
        let (history, moment) = (fixture.history.clone(), directory.change_count());
        directory.changes().iter().for_each(|change| medium.apply(change));
        drop(fixture);
        look(&history, moment, &medium.cut(|_, _| 0), &shape);
        look(&history, moment, &medium.kill(), &shape);
        look(&history, moment, &medium.cut(|_, count| random.usize(..count)), &shape);
    }
}

/// Without space, only the write fails; earlier data stay.
#[test]
fn no_space_is_an_error_of_that_write_alone() {
    let mut shape = Shape::tiny();
    shape.options.segments_max = 16;
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut fixture = Fixture::open(&directory, &shape);
    let mut refused = 0;
    // Snapshots keep overwritten blocks live until there is no space for more.
    for round in 0..400 {
        let status = fixture.take(Step::Write { first: round % 3, count: 1, fua: true });
        match status {
            Status::Ok => {}
            Status::NoSpc => refused += 1,
            other => panic!("{other}"),
        }
        if refused == 0 && round % 4 == 3 {
            fixture.take(Step::Snapshot);
        }
        let contents = fixture.contents();
        fixture.history.check(usize::MAX, &contents);
    }
    assert!(refused > 0, "it has no end");
    assert!(!fixture.pool.is_latched());
    assert_eq!(fixture.take(Step::Flush), Status::Ok);
    let history = fixture.history.clone();
    drop(fixture);
    let mut fixture = Fixture::open(&directory, &shape);
    history.check(usize::MAX, &fixture.contents());
}

/// Overwritten blocks are freed: a small pool accepts any amount of writes.
#[test]
fn space_comes_back() {
    let mut shape = Shape::tiny();
    shape.options.segments_max = 16;
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut fixture = Fixture::open(&directory, &shape);
    for round in 0..2000 {
        let status = fixture.take(Step::Write { first: 0, count: 3, fua: round % 2 == 0 });
        assert_eq!(status, Status::Ok, "round {round}: {:?}", fixture.pool.counts());
    }
    assert!(fixture.pool.counts().all <= 16);
    let contents = fixture.contents();
    drop(fixture);
    assert_eq!(Fixture::open(&directory, &shape).contents(), contents);
}

/// A file system that is full for a while: writes fail, and succeed when there is space again.
#[test]
fn a_full_file_system_is_no_end() {
    let shape = Shape::tiny();
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let store = SimulatedStore::new(&directory);
    let mut fixture = Fixture::on(store.clone(), &directory, &shape).unwrap();
    store.set_faults(FaultPlan { full: When::After(2), ..FaultPlan::default() });
    let mut refused = false;
    for round in 0..200 {
        let status = fixture.take(Step::Write { first: round % 3, count: 1, fua: true });
        refused = status == Status::NoSpc;
        if refused {
            break;
        }
        assert_eq!(status, Status::Ok);
        fixture.take(Step::Snapshot);
    }
    assert!(refused, "it was full");
    store.set_faults(FaultPlan::default());
    // The pool searches for space again, but not for every write.
    let write = Step::Write { first: 0, count: 3, fua: true };
    assert!((0..40).any(|_| fixture.take(write.clone()).is_ok()), "there is space again");
    let contents = fixture.contents();
    fixture.history.check(usize::MAX, &contents);
}

/// Live blocks are scattered among garbage. Cleaning moves them, also those of snapshots, which
/// stay exact; a power cut at any moment loses nothing.
#[test]
fn cleaning_frees_space_and_changes_nothing() {
    let seed = Seed::from_env();
    for stream in 9000..9006 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let mut shape = Shape::tiny();
        shape.blocks = 40;
        shape.block_bytes = 1024;
        shape.options.segments_max = 22;
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut medium = directory.medium();
        let mut fixture = Fixture::open(&directory, &shape);
        for first in [0, 10, 20, 30] {
            assert_eq!(fixture.take(Step::Write { first, count: 10, fua: true }), Status::Ok);
        }
        assert_eq!(fixture.take(Step::Snapshot), Status::Ok);
        for round in 0..600 {
            let first = random.u64(..shape.blocks);
            let status = fixture.take(Step::Write { first, count: 1, fua: round % 4 == 0 });
            assert_eq!(status, Status::Ok, "round {round}: {:?}", fixture.pool.counts());
        }
        let (history, changes) = (fixture.history.clone(), directory.changes());
        history.check(usize::MAX, &fixture.contents());
        drop(fixture);
        for (moment, change) in (1..).zip(&changes) {
            medium.apply(change);
            if moment % 16 == stream as usize % 16 {
                look(&history, moment, &medium.cut(|_, _| 0), &shape);
                look(&history, moment, &medium.cut(|_, count| random.usize(..count)), &shape);
            }
        }
    }
}
