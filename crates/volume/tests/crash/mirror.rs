//! Two copies: faults of one copy are invisible to clients and are repaired, also if the power is
//! cut at any moment meanwhile.

use std::collections::BTreeMap;

use blockyard_core::Status;
use blockyard_store::mirror::Resynced;
use blockyard_store::mirror::assemble::Terms;
use blockyard_store::{
    CopiesError, SegmentFiles as _, SegmentStore as _, StoreError, StoreFile as _, is_short,
};
use blockyard_testing::directory::{Medium, SimulatedDirectory};
use blockyard_testing::seed::Seed;
use blockyard_testing::simulated_store::{FaultPlan, SimulatedStore, When};
use blockyard_volume::VolumeError;
use blockyard_volume_format::catalogue::Change;
use blockyard_volume_format::segment_name;

use crate::damage::{fill_three_leaves, lost, rot_leaf};
use crate::fixture::{
    self, Fixture, Shape, Step, USE, assemble, finish_resync, format, pair, resync,
};
use crate::{look_everywhere, shape, work};

const DEGRADED: Terms = Terms::Use { degraded: true };

fn mirrored(random: &mut fastrand::Rng) -> Shape {
    Shape { mirror: true, ..shape(random) }
}

/// Opens a pool of two copies; returns it with both copies.
fn opened(directory: &SimulatedDirectory, shape: &Shape) -> (Fixture, [SimulatedStore; 2]) {
    let pair = pair(directory, shape.depth);
    let store = assemble(pair.clone().map(Some), USE).unwrap();
    (Fixture::of(store, directory, shape).unwrap(), pair)
}

/// The number of repairs, and which copies are good.
fn status(fixture: &Fixture) -> (u64, [bool; 2]) {
    let status = fixture.pool.segments().directory().copy_status();
    (
        status.iter().map(|it| it.repaired).sum(),
        [status[0].state.is_good(), status[1].state.is_good()],
    )
}

/// The files of one copy.
fn files(directory: &SimulatedDirectory, side: &str) -> BTreeMap<String, Vec<u8>> {
    fixture::files(directory, |name| name.starts_with(side))
}

/// Removes the files of one copy, and restores others in their place.
fn replace(directory: &SimulatedDirectory, side: &str, by: &BTreeMap<String, Vec<u8>>) {
    fixture::replace_files(directory, |name| name.starts_with(side), by);
}

/// Runs a workload on two copies, one of which fails in some way, and cuts the power after every
/// operation.
fn cut_everywhere(stream: u64, fault: impl Fn(&mut fastrand::Rng) -> FaultPlan) {
    let mut random = Seed::from_env().rng(stream);
    let shape = mirrored(&mut random);
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut medium = directory.medium();
    let (mut fixture, pair) = opened(&directory, &shape);
    pair[random.usize(..2)].set_faults(fault(&mut random));
    let count = random.usize(5..30);
    work(&mut fixture, &mut random, &shape, count);
    assert!(!fixture.pool.is_latched());
    let contents = fixture.contents();
    fixture.history.check(usize::MAX, &contents);
    let (history, changes) = (fixture.history.clone(), directory.changes());
    drop(fixture);
    look_everywhere(&mut medium, &changes, &mut random, &history, &shape);
}

#[test]
fn a_power_cut_below_both_copies_leaves_a_prefix_with_everything_durable() {
    for stream in 30_000..30_060 {
        let _watch = Seed::from_env().watch(&format!("stream {stream}"));
        cut_everywhere(stream, |_| FaultPlan::default());
    }
}

/// A copy that fails a write or a sync is marked as failed, invisibly to clients. After a power cut
/// at any later moment, the labels say which copy is good.
#[test]
fn a_copy_that_fails_is_given_up() {
    for stream in 31_000..31_060 {
        let _watch = Seed::from_env().watch(&format!("stream {stream}"));
        cut_everywhere(stream, |random| match random.bool() {
            true => {
                FaultPlan { failed_writes: When::After(random.u64(..20)), ..FaultPlan::default() }
            }
            false => {
                FaultPlan { failed_syncs: When::After(random.u64(..12)), ..FaultPlan::default() }
            }
        });
    }
}

/// Regression: a full copy was marked as failed, but the pool still counted that copy's free space,
/// and stayed full forever.
#[test]
fn a_failed_copy_is_not_checked_for_space() {
    let shape = Shape { mirror: true, ..Shape::tiny() };
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let [first, second] = pair(&directory, shape.depth);
    second.set_bytes_max(0);
    let store = assemble([Some(first), Some(second.clone())], USE).unwrap();
    let mut fixture = Fixture::of(store, &directory, &shape).unwrap();
    let write = |round: u64| Step::Write { first: round % 3, count: 1, fua: true };
    let is_full = |fixture: &mut Fixture| {
        (0..200).any(|round| {
            let is_full = fixture.take(write(round)) == Status::NoSpc;
            fixture.take(Step::Snapshot);
            is_full
        })
    };
    assert!(is_full(&mut fixture), "one of them is full");
    assert!((0..40).all(|round| fixture.take(write(round)) == Status::NoSpc), "and stays so");
    second.set_faults(FaultPlan { failed_syncs: When::After(0), ..FaultPlan::default() });
    assert_eq!(fixture.take(Step::Flush), Status::Ok);
    fixture.take(Step::Discard { first: 0, count: 1, fua: false });
    assert_eq!(fixture.take(Step::Flush), Status::Ok);
    assert_eq!(status(&fixture).1, [true, false]);
    assert!((0..40).any(|round| fixture.take(write(round)).is_ok()), "the other one has space");
    let contents = fixture.contents();
    fixture.history.check(usize::MAX, &contents);
}

/// Cuts the power after every operation of an opening too: of one that recovers, and of one that
/// resyncs a copy.
#[test]
fn a_power_cut_while_copies_are_made_equal_changes_nothing() {
    let seed = Seed::from_env();
    for stream in 32_000..32_012 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let mut shape = mirrored(&mut random);
        shape.options.segments_max = 16;
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut medium = directory.medium();
        let (mut fixture, pair) = opened(&directory, &shape);
        work(&mut fixture, &mut random, &shape, 8);
        if random.bool() {
            pair[random.usize(..2)]
                .set_faults(FaultPlan { failed_writes: When::After(0), ..FaultPlan::default() });
        }
        work(&mut fixture, &mut random, &shape, 8);
        let (history, changes) = (fixture.history.clone(), directory.changes());
        drop(fixture);
        let every = |moment: usize, found: &SimulatedDirectory, random: &mut fastrand::Rng| {
            let mut under: Medium = found.medium();
            let mut fixture = Fixture::open(found, &shape);
            let first = fixture.contents();
            history.check(moment, &first);
            finish_resync(&fixture);
            assert_eq!(status(&fixture).1, [true, true]);
            drop(fixture);
            for change in found.changes() {
                under.apply(&change);
                let again = under.cut(|_, count| random.usize(..count));
                assert_eq!(Fixture::open(&again, &shape).contents(), first, "cut after {change:?}");
            }
        };
        for (moment, change) in changes.iter().enumerate() {
            if moment % 7 == stream as usize % 7 {
                let found = medium.cut(|_, count| random.usize(..count));
                every(moment, &found, &mut random);
            }
            medium.apply(change);
        }
        every(changes.len(), &medium.cut(|_, _| 0), &mut random);
    }
}

/// Writes to two copies, of which one fails at some moment. Returns the disk with both, and the
/// number of the stale one.
fn with_a_stale_copy(shape: &Shape, random: &mut fastrand::Rng) -> (Fixture, usize) {
    let directory = SimulatedDirectory::default();
    format(&directory, shape);
    let (mut fixture, pair) = opened(&directory, shape);
    work(&mut fixture, random, shape, 8);
    let stale = random.usize(..2);
    pair[stale].set_faults(FaultPlan { failed_writes: When::After(0), ..FaultPlan::default() });
    work(&mut fixture, random, shape, 8);
    assert_eq!(fixture.take(Step::Flush), Status::Ok);
    (fixture, stale)
}

/// Takes steps of a resync until it ends or fails.
fn try_resync(fixture: &Fixture) -> Result<(), StoreError> {
    let Some(mut resync) = resync(fixture) else { return Ok(()) };
    while !matches!(
        resync.step(&fixture.pool.segments().files())?,
        Resynced::Complete | Resynced::Ended
    ) {}
    Ok(())
}

/// Regression: an opening did not end when a copy died during its resync. One of the copies dies
/// after every number of operations of an opening and the resync after it: both end. They fail only
/// if the copy died that had all data. When the copy is back, the pool has all data.
#[test]
fn a_copy_that_dies_while_one_is_resynced_stops_nothing() {
    let seed = Seed::from_env();
    for stream in 32_100..32_106 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let mut shape = mirrored(&mut random);
        shape.options.segments_max = 16;
        let (mut fixture, stale) = with_a_stale_copy(&shape, &mut random);
        let wanted = fixture.contents();
        assert!(!status(&fixture).1[stale], "no write has failed");
        let medium = fixture.directory.medium();
        drop(fixture);
        for dead in 0..2 {
            for operations in 0.. {
                let directory = medium.cut(|_, _| 0);
                let pair = pair(&directory, shape.depth);
                pair[dead].set_faults(FaultPlan {
                    failed_operations: When::After(operations),
                    ..FaultPlan::default()
                });
                let opened = assemble(pair.clone().map(Some), USE)
                    .and_then(|store| Fixture::of(store, &directory, &shape));
                let resynced = opened.and_then(|mut fixture| {
                    try_resync(&fixture)?;
                    assert_eq!(fixture.contents(), wanted);
                    Ok(())
                });
                let has_died = pair[dead].operations() > operations;
                if let Err(error) = resynced {
                    assert!(dead != stale, "after {operations}: {error}");
                }
                let mut fixture = Fixture::open(&directory, &shape);
                assert_eq!(fixture.contents(), wanted, "copy {dead} after {operations}");
                finish_resync(&fixture);
                assert_eq!(fixture.contents(), wanted, "copy {dead} after {operations}");
                assert_eq!(status(&fixture).1, [true, true]);
                if !has_died {
                    break;
                }
            }
        }
    }
}

/// The disk that has all data returns zeros from some moment of a resync on. They do not replace
/// what the stale copy has.
#[test]
fn zeros_of_a_dead_disk_do_not_replace_a_stale_copy() {
    let mut random = Seed::from_env().rng(32_200);
    let mut shape = mirrored(&mut random);
    shape.options.segments_max = 16;
    let (fixture, stale) = with_a_stale_copy(&shape, &mut random);
    let directory = fixture.directory.clone();
    drop(fixture);
    let sides = ["a/", "b/"];
    let (fixture, _) = opened(&directory, &shape);
    let before = files(&directory, sides[stale]);
    for name in files(&directory, sides[1 - stale]).keys() {
        let file = directory.open(name).unwrap();
        file.write_at(0, &vec![0; file.len() as usize]).unwrap();
    }
    assert!(resync(&fixture).is_some(), "the copy is to be resynced");
    _ = try_resync(&fixture);
    assert!(!status(&fixture).1[stale]);
    let after = files(&directory, sides[stale]);
    let differ = before.iter().filter(|(name, bytes)| after.get(*name) != Some(bytes));
    assert_eq!(differ.map(|(name, _)| name.as_str()).collect::<Vec<_>>(), [""; 0]);
}

/// Damages a copy in one way.
fn damage(directory: &SimulatedDirectory, side: &str, way: u8, random: &mut fastrand::Rng) {
    let all = files(directory, side);
    let segments: Vec<&String> = all.keys().filter(|name| name.contains("segment-")).collect();
    let segment = segments[random.usize(..segments.len())];
    let superblock = format!("{side}superblock");
    let make = |name: &str, bytes: &[u8]| {
        directory.create(name, bytes.len() as u64, 512).write_at(0, bytes).unwrap();
    };
    match way {
        0 => directory.remove(segment),
        1 => {
            directory.remove(segment);
            make(segment, &all[segment][..all[segment].len() / 2]);
        }
        // The files between would be missing.
        2 => make(&format!("{side}{}", segment_name(200)), &all[segment]),
        3 => directory.remove(&superblock),
        4 => make(&superblock, &vec![7; all[&superblock].len()]),
        _ => {
            let mut bytes = all[segment].clone();
            random.fill(&mut bytes);
            make(segment, &bytes);
        }
    }
    directory.settle();
}

/// A copy that comes back is damaged, or has files that the pool does not have: it is made equal
/// all the same, and is then sufficient alone.
#[test]
fn a_stale_copy_that_is_damaged_is_made_equal() {
    for stream in 32_300..32_324 {
        let _watch = Seed::from_env().watch(&format!("stream {stream}"));
        let mut random = Seed::from_env().rng(stream);
        let shape = mirrored(&mut random);
        let (mut fixture, stale) = with_a_stale_copy(&shape, &mut random);
        let wanted = fixture.contents();
        let directory = fixture.directory.clone();
        drop(fixture);
        directory.settle();
        let sides = ["a/", "b/"];
        damage(&directory, sides[stale], (stream % 6) as u8, &mut random);
        let (mut fixture, _) = opened(&directory, &shape);
        assert_eq!(fixture.contents(), wanted);
        work(&mut fixture, &mut random, &shape, 2);
        finish_resync(&fixture);
        let wanted = fixture.contents();
        assert_eq!(fixture.take(Step::Flush), Status::Ok);
        assert_eq!(status(&fixture).1, [true, true]);
        drop(fixture);
        let contents = |side: &str| -> BTreeMap<String, Vec<u8>> {
            let all = files(&directory, side).into_iter();
            let own = all.map(|(name, bytes)| (name[2..].to_owned(), bytes));
            own.filter(|(name, _)| name != "copy").collect()
        };
        assert!(contents("a/") == contents("b/"), "they differ");
        let mut alone = pair(&directory, shape.depth).map(Some);
        alone[1 - stale] = None;
        let store = assemble(alone, DEGRADED).unwrap();
        assert_eq!(Fixture::of(store, &directory, &shape).unwrap().contents(), wanted);
    }
}

/// One copy loses or misdirects writes, or misdirects or fails reads: a read always returns what
/// was last written.
#[test]
fn one_copy_that_lies_is_never_believed() {
    let seed = Seed::from_env();
    let mut mended = 0;
    for stream in 33_000..33_120 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let shape = mirrored(&mut random);
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let (mut fixture, pair) = opened(&directory, &shape);
        let side = random.usize(..2);
        let number = random.u64(1..20);
        let fault = match random.u8(..4) {
            0 => FaultPlan { lost_writes: When::Only(number), ..FaultPlan::default() },
            1 => FaultPlan { misdirected_writes: When::Only(number), ..FaultPlan::default() },
            2 => FaultPlan {
                misdirected_reads: When::Every(random.u64(2..5)),
                ..FaultPlan::default()
            },
            _ => FaultPlan { failed_reads: When::Every(random.u64(2..5)), ..FaultPlan::default() },
        };
        pair[side].set_faults(fault);
        for _ in 0..6 {
            work(&mut fixture, &mut random, &shape, 4);
            let contents = fixture.contents();
            fixture.history.check(usize::MAX, &contents);
        }
        assert!(!fixture.pool.is_latched());
        mended += status(&fixture).0;
        let (wanted, _) = (fixture.contents(), fixture.take(Step::Flush));
        drop(fixture);
        // An opening reads the faulty copy too.
        let store = assemble(pair.clone().map(Some), USE).unwrap();
        let mut fixture = Fixture::of(store, &directory, &shape).unwrap();
        assert_eq!(fixture.contents(), wanted, "{fault:?} of copy {side}");
        mended += status(&fixture).0;
        drop(fixture);
        pair[side].set_faults(FaultPlan::default());
        assert_eq!(opened(&directory, &shape).0.contents(), wanted);
    }
    assert!(mended > 20, "the faults were felt: {mended}");
}

/// Bits rot in one copy: all data can be read, and the damage is repaired. So the same bits may rot
/// in the other copy afterwards.
#[test]
fn rot_in_one_copy_is_put_right() {
    let seed = Seed::from_env();
    let mut mended = 0;
    for stream in 34_000..34_150 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let shape = mirrored(&mut random);
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let (mut fixture, _) = opened(&directory, &shape);
        work(&mut fixture, &mut random, &shape, 20);
        assert_eq!(fixture.take(Step::Flush), Status::Ok);
        let wanted = fixture.contents();
        drop(fixture);
        let names: Vec<String> = files(&directory, "a/").into_keys().collect();
        let name = names[random.usize(..names.len())].trim_start_matches("a/").to_owned();
        let len = directory.open(&format!("a/{name}")).unwrap().len();
        // Damage only one of the label's two slots.
        let len = if name == "copy" { len / 2 } else { len };
        let places: Vec<(u64, u8)> =
            (0..8).map(|_| (random.u64(..len), 1 << random.u8(..8))).collect();
        let both = [("a/", true), ("b/", false)];
        for (side, is_read) in both {
            let file = directory.open(&format!("{side}{name}")).unwrap();
            for (at, bit) in &places {
                let mut byte = [0];
                file.read_at(*at, &mut byte).unwrap();
                file.write_at(*at, &[byte[0] ^ bit]).unwrap();
            }
            let (mut fixture, _) = opened(&directory, &shape);
            assert_eq!(fixture.contents(), wanted, "{side}{name}");
            finish_resync(&fixture);
            if is_read {
                mended += status(&fixture).0;
            }
        }
    }
    assert!(mended > 30, "the rot was felt: {mended}");
}

/// Regression: a leaf that had rotted in one copy was given up permanently when the other copy,
/// which had it intact, could not be read for a moment or was missing.
#[test]
fn a_leaf_that_another_copy_may_have_is_not_given_up() {
    for is_away in [false, true] {
        let mut shape = Shape { mirror: true, blocks: 600, ..Shape::tiny() };
        shape.options.checkpoint_bytes = 256 << 10;
        shape.options.segments_max = 75;
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let (mut fixture, _) = opened(&directory, &shape);
        fill_three_leaves(&mut fixture);
        rot_leaf(&directory, &mut fixture, 2, "a/");
        drop(fixture);
        let (mut fixture, pair) = opened(&directory, &shape);
        pair[1].set_faults(if is_away {
            FaultPlan { failed_syncs: When::After(0), ..FaultPlan::default() }
        } else {
            FaultPlan { failed_reads: When::Every(1), ..FaultPlan::default() }
        });
        // Snapshots and overwrites that would start a liveness scan if one were possible.
        for _ in 0..12 {
            fixture.take(Step::Snapshot);
            for first in (0..512).step_by(8) {
                fixture.take(Step::Write { first, count: 8, fua: false });
            }
            let list = fixture.pool.list();
            let Some(snapshot) = list.iter().find(|meta| meta.is_snapshot) else { break };
            let mut answer = fixture.pool.submit_change(Change::Destroy { id: snapshot.id });
            fixture.run();
            answer.take().unwrap();
        }
        assert_eq!(status(&fixture).1, [true, !is_away]);
        pair[1].set_faults(FaultPlan::default());
        if is_away {
            drop(fixture);
            (fixture, _) = opened(&directory, &shape);
        }
        assert!(lost(&mut fixture).is_empty(), "it is in the other copy, away: {is_away}");
        assert!(status(&fixture).0 > 0, "and was mended");
    }
}

/// If the process has no descriptors left, an operation fails before it changes a copy. That says
/// nothing about the copy, which stays good.
#[test]
fn missing_descriptors_do_not_fail_a_copy() {
    let shape = Shape { mirror: true, ..Shape::tiny() };
    for side in 0..2 {
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let (mut fixture, pair) = opened(&directory, &shape);
        let store = fixture.pool.segments().directory();
        let file = store.open("superblock").unwrap().unwrap();
        let changes = directory.change_count();
        pair[side].set_faults(FaultPlan { no_descriptors: When::After(0), ..FaultPlan::default() });
        assert!(is_short(&store.open("superblock").unwrap_err()));
        assert!(is_short(&file.write_at(0, &[&[0; 512]]).unwrap_err()));
        assert!(is_short(&store.create("new", 4096).unwrap_err()));
        assert_eq!(status(&fixture).1, [true, true], "without descriptors for copy {side}");
        pair[side].set_faults(FaultPlan::default());
        let made = |name: &String| name.ends_with("new");
        assert!(!directory.names().iter().any(made), "the file is made in both copies or in none");
        assert!(directory.change_count() <= changes + 2, "only the file and its removal");
        assert!(fixture.take(Step::Write { first: 0, count: 1, fua: true }).is_ok());
    }
}

/// The error of assembling copies that must be refused.
fn error(found: Result<crate::fixture::Store, VolumeError>) -> CopiesError {
    match found {
        Err(VolumeError::Store(StoreError::Copies(error))) => error,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it was opened"),
    }
}

/// A copy that is missing at an opening may be the newer one, so opening the other alone needs
/// `degraded`. The copy that comes back is resynced. If each copy was used alone, both are refused
/// together.
#[test]
fn a_stale_copy_is_never_treated_as_current() {
    let seed = Seed::from_env();
    for stream in 35_000..35_040 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let shape = mirrored(&mut random);
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let (mut fixture, _) = opened(&directory, &shape);
        work(&mut fixture, &mut random, &shape, 10);
        assert_eq!(fixture.take(Step::Flush), Status::Ok);
        drop(fixture);
        let alone = random.usize(..2);
        let gone = ["a/", "b/"][1 - alone];
        let only = |which: usize| {
            let mut pair = pair(&directory, shape.depth).map(Some);
            pair[1 - which] = None;
            pair
        };
        let old = files(&directory, gone);
        replace(&directory, gone, &BTreeMap::new());
        for pair in [only(alone), pair(&directory, 1).map(Some)] {
            let refused = error(assemble(pair, USE));
            assert!(matches!(refused, CopiesError::Missing { .. }), "{refused}");
        }
        // Open one copy alone, first with `degraded`, then without: its label now says that it is
        // good alone.
        let mut fixture =
            Fixture::of(assemble(only(alone), DEGRADED).unwrap(), &directory, &shape).unwrap();
        work(&mut fixture, &mut random, &shape, 10);
        assert_eq!(fixture.take(Step::Flush), Status::Ok);
        drop(fixture);
        let mut fixture =
            Fixture::of(assemble(only(alone), USE).unwrap(), &directory, &shape).unwrap();
        fixture.take(Step::Write { first: 0, count: 1, fua: true });
        let wanted = fixture.contents();
        assert_eq!(status(&fixture).1, std::array::from_fn(|at| at == alone));
        drop(fixture);
        // The stale copy does not open alone without `degraded`. If it was opened alone, it does
        // not open with the other one either.
        replace(&directory, gone, &old);
        let refused = error(assemble(only(1 - alone), USE));
        assert!(matches!(refused, CopiesError::Missing { .. }), "{refused}");
        drop(assemble(only(1 - alone), DEGRADED).unwrap());
        let refused = error(assemble(pair(&directory, 1).map(Some), USE));
        assert!(matches!(refused, CopiesError::Split { .. }), "{refused}");
        // The stale copy is resynced, and is then sufficient alone.
        replace(&directory, gone, &old);
        let (mut fixture, _) = opened(&directory, &shape);
        finish_resync(&fixture);
        assert_eq!((fixture.contents(), status(&fixture).1), (wanted.clone(), [true, true]));
        drop(fixture);
        let store = assemble(only(1 - alone), DEGRADED).unwrap();
        assert_eq!(Fixture::of(store, &directory, &shape).unwrap().contents(), wanted);
    }
}

/// A copy that is still resyncing is refused alone.
#[test]
fn a_copy_that_is_not_complete_is_refused_alone() {
    let mut random = Seed::from_env().rng(36_000);
    let shape = mirrored(&mut random);
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let (mut fixture, pair_of) = opened(&directory, &shape);
    pair_of[1].set_faults(FaultPlan { failed_writes: When::After(0), ..FaultPlan::default() });
    work(&mut fixture, &mut random, &shape, 20);
    assert_eq!(status(&fixture).1, [true, false]);
    let wanted = fixture.contents();
    drop(fixture);
    directory.settle();
    let mut medium = directory.medium();
    let mut fixture = opened(&directory, &shape).0;
    finish_resync(&fixture);
    assert_eq!(fixture.contents(), wanted);
    drop(fixture);
    let mut refused = 0;
    for change in directory.changes() {
        medium.apply(&change);
        let found = medium.cut(|_, _| 0);
        let second = [None, Some(pair(&found, 1)[1].clone())];
        match assemble(second, DEGRADED) {
            Err(VolumeError::Store(StoreError::Copies(CopiesError::Stale { .. }))) => refused += 1,
            Err(error) => panic!("{error}"),
            Ok(_) => {}
        }
    }
    assert!(refused > 0);
}
