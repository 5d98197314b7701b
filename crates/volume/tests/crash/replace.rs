//! A copy joins a pool in use or comes back, is resynced, replaces another one or is detached,
//! while clients write, and the power is cut after any operation of the disk: the pool has
//! everything that was durable, in each good copy, and a copy that is half resynced is never
//! believed.
#![allow(clippy::disallowed_types)] // A hook of a test shares the fixture with it.

use std::path::Path;
use std::sync::{Arc, Mutex};

use blockyard_core::Status;
use blockyard_store::mirror::assemble::{NamedCopy, Terms, successor};
use blockyard_store::mirror::{CopyState, Resynced};
use blockyard_store::{Mirror, SegmentFiles as _, SegmentStore as _, StoreError, StoreFile as _};
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::seed::Seed;
use blockyard_testing::simulated_store::{FaultPlan, Operation, SimulatedStore, When};
use blockyard_volume::{PoolVerifier, VolumeError};
use blockyard_volume_format::label::{self, Label};
use blockyard_volume_format::segment_name;

use crate::fixture::{
    Fixture, Shape, Step, Store, USE, assemble, compared_by_resync, files, finish_resync, format,
    pair, replace_files, resync,
};
use crate::{shape, work};

/// The copy at a path: `pool` is the only copy of a pool that began with one.
fn copy(directory: &SimulatedDirectory, shape: &Shape, path: &str) -> SimulatedStore {
    let copy = SimulatedStore::new(directory).with_depth(shape.depth);
    match path {
        "pool" => copy,
        "a" => copy.with_prefix("a/"),
        "b" => copy.with_prefix("b/"),
        "c" => copy.with_prefix("c/"),
        other => panic!("no copy is at `{other}`"),
    }
}

fn named(directory: &SimulatedDirectory, shape: &Shape, path: &str) -> NamedCopy<SimulatedStore> {
    let store = copy(directory, shape, path);
    // A directory without a file is one whose disk is not mounted.
    let is_there = path == "pool" || !store.names().unwrap().is_empty();
    NamedCopy { directory: is_there.then_some(store), path: path.into() }
}

fn label_of(directory: &SimulatedDirectory, shape: &Shape, path: &str) -> Option<Label> {
    let file = copy(directory, shape, path).open(label::FILE).unwrap()?;
    let mut bytes = vec![0; label::BYTES];
    file.read_at(0, &mut bytes).unwrap();
    Some(Label::newest(&bytes).unwrap().0)
}

/// Opens the pool as a configuration does that names one of its first copies.
fn reopen(
    directory: &SimulatedDirectory,
    shape: &Shape,
    path: &str,
    terms: Terms,
) -> Result<Store, VolumeError> {
    let known = |path: &Path| label_of(directory, shape, path.to_str().unwrap());
    let label = label_of(directory, shape, path);
    let given = named(directory, shape, path);
    if let Some(path) = label.as_ref().and_then(|label| successor(label, known)) {
        return reopen(directory, shape, path.to_str().unwrap(), terms);
    }
    let store = match label {
        Some(label) if !label.other.as_os_str().is_empty() => {
            let other = named(directory, shape, label.other.to_str().unwrap());
            Mirror::assemble([given, other], terms, &PoolVerifier)?
        }
        _ => Mirror::assemble_single(given, terms)?,
    };
    store.resume_joining(|path| {
        let given = named(directory, shape, path.to_str().unwrap());
        let missing = || StoreError::NoPool { path: path.to_owned(), why: "missing".to_owned() };
        given.directory.ok_or_else(missing)
    })?;
    store.resume_stale(&PoolVerifier)?;
    Ok(store)
}

/// Takes steps of a resync, with work of clients in between. Returns whether the copy is good.
fn resync_and_work(fixture: &mut Fixture, shape: &Shape, random: &mut fastrand::Rng) -> bool {
    let mut resync = resync(fixture).unwrap();
    loop {
        if random.u8(..3) == 0 {
            work(fixture, random, shape, 1);
        }
        match resync.step(&fixture.pool.segments().files()).unwrap() {
            Resynced::Bytes(_) | Resynced::InFlight | Resynced::Repair => {}
            Resynced::Complete => {
                fixture.pool.segments().renew();
                return true;
            }
            Resynced::Ended => return false,
        }
    }
}

/// What happens to the copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    /// One copy gets a second one.
    Attach,
    /// One copy gets a second one, and the first one is detached.
    Move,
    /// One copy is replaced.
    ReplaceOnly,
    /// The second one of two copies is replaced.
    Replace,
    /// The second one of two copies has failed, and comes back at the next opening.
    Return,
}

const CASES: [Case; 5] = [Case::Attach, Case::Move, Case::ReplaceOnly, Case::Replace, Case::Return];

impl Case {
    /// The path of the copy that a configuration names.
    fn path(self) -> &'static str {
        if self.is_pair() { "a" } else { "pool" }
    }

    /// Whether the pool has two copies at first.
    fn is_pair(self) -> bool {
        matches!(self, Case::Replace | Case::Return)
    }

    /// The path of the copy that is resynced.
    fn new_path(self) -> &'static str {
        if self == Case::Return { "b" } else { "c" }
    }

    /// The path of the copy that the new one replaces.
    fn replaces(self) -> Option<&'static str> {
        match self {
            Case::Attach | Case::Move | Case::Return => None,
            Case::ReplaceOnly => Some("pool"),
            Case::Replace => Some("b"),
        }
    }

    /// The copies at the end.
    fn left(self) -> &'static [&'static str] {
        match self {
            Case::Attach => &["pool", "c"],
            Case::Move | Case::ReplaceOnly => &["c"],
            Case::Replace => &["a", "c"],
            Case::Return => &["a", "b"],
        }
    }
}

fn shape_of(case: Case, random: &mut fastrand::Rng) -> Shape {
    let mut shape = Shape { mirror: case.is_pair(), ..shape(random) };
    shape.options.segments_max = 24;
    shape
}

fn join(fixture: &Fixture, case: Case, new: SimulatedStore) {
    let given = NamedCopy { directory: Some(new), path: "c".into() };
    let mirror = fixture.pool.segments().directory();
    mirror.join(given, case.replaces().map(AsRef::as_ref)).unwrap();
}

/// A pool with its first copies, of which nothing has been used yet.
fn first(directory: &SimulatedDirectory, shape: &Shape) -> Fixture {
    format(directory, shape);
    Fixture::open(directory, shape)
}

/// Opens the pool as [`reopen`] does.
fn reopened(
    directory: &SimulatedDirectory,
    shape: &Shape,
    path: &str,
) -> Result<Fixture, VolumeError> {
    Fixture::of(reopen(directory, shape, path, USE)?, directory, shape)
}

/// Begins a resync: the new copy joins, or the second one fails and comes back.
fn begin(mut fixture: Fixture, case: Case, shape: &Shape, random: &mut fastrand::Rng) -> Fixture {
    let directory = fixture.directory.clone();
    if case != Case::Return {
        join(&fixture, case, copy(&directory, shape, case.new_path()));
        return fixture;
    }
    let failed_writes = When::After(0);
    open_copy(&fixture, "b").set_faults(FaultPlan { failed_writes, ..FaultPlan::default() });
    work(&mut fixture, random, shape, 4);
    assert_eq!(fixture.take(Step::Write { first: 0, count: 1, fua: true }), Status::Ok);
    assert_eq!(fixture.take(Step::Flush), Status::Ok);
    let history = fixture.history.clone();
    drop(fixture);
    let mut fixture = reopened(&directory, shape, case.path()).unwrap();
    assert!(resync(&fixture).is_some(), "the copy has failed");
    fixture.history = history;
    fixture
}

/// The bytes of all segments of a pool.
fn segments_bytes(fixture: &Fixture) -> u64 {
    let segments = fixture.pool.segments();
    segments.files().len() as u64 * u64::from(segments.bytes())
}

/// The states of the copies, and why they are not good.
fn states(fixture: &Fixture) -> Vec<(CopyState, Option<String>)> {
    let status = fixture.pool.segments().directory().copy_status();
    status.into_iter().map(|copy| (copy.state, copy.why)).collect()
}

/// Takes steps of a resync until this number of segments is copied.
fn copy_segments(fixture: &Fixture, count: u64) {
    let mut resync = resync(fixture).unwrap();
    let (mut done, bytes) = (0, count * u64::from(fixture.pool.segments().bytes()));
    while done < bytes {
        match resync.step(&fixture.pool.segments().files()).unwrap() {
            Resynced::Bytes(bytes) => done += bytes,
            other => assert_eq!((other, done), (Resynced::Repair, 0)),
        }
    }
}

/// Each copy that an opening believes when the others are missing has the same contents.
fn check_alone(found: &SimulatedDirectory, shape: &Shape, opened: &mut Fixture) {
    let wanted = opened.contents();
    assert_eq!(opened.take(Step::Flush), Status::Ok);
    let sides = opened.pool.segments().directory().used();
    for side in sides {
        let path = side.path.to_str().unwrap().to_owned();
        let other = match label_of(found, shape, &path) {
            None => None,
            Some(label) => Some(label.other),
        };
        let alone = SimulatedDirectory::clone(&found.medium().cut(|_, _| 0));
        let given = named(&alone, shape, &path);
        let store = match other {
            None => Mirror::assemble_single(given, USE).unwrap(),
            Some(other) => {
                let missing = NamedCopy { directory: None, path: other };
                let terms = Terms::Use { degraded: true };
                Mirror::assemble([given, missing], terms, &PoolVerifier).unwrap()
            }
        };
        let mut fixture = Fixture::of(store, &alone, shape).unwrap();
        assert_eq!(fixture.contents(), wanted, "the copy at `{path}` alone");
    }
}

/// Whether the new copy says that it has everything.
fn is_new_good(directory: &SimulatedDirectory, shape: &Shape, case: Case) -> bool {
    let names = copy(directory, shape, case.new_path()).names().unwrap();
    let is_pool = names.iter().any(|name| name.as_str() == "superblock");
    match label_of(directory, shape, case.new_path()) {
        Some(label) => label.is_good(),
        None => is_pool,
    }
}

fn cut_everywhere(case: Case, stream: u64) {
    let mut random = Seed::from_env().rng(stream);
    let shape = shape_of(case, &mut random);
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut medium = directory.medium();
    let mut fixture = Fixture::open(&directory, &shape);
    work(&mut fixture, &mut random, &shape, 6);
    let mut fixture = begin(fixture, case, &shape, &mut random);
    assert!(resync_and_work(&mut fixture, &shape, &mut random));
    if case == Case::Move {
        fixture.pool.segments().directory().detach("pool".as_ref()).unwrap();
        fixture.pool.segments().renew();
    }
    work(&mut fixture, &mut random, &shape, 4);
    let sides = fixture.pool.segments().directory().used();
    let left: Vec<_> = sides.iter().map(|side| side.path.to_str().unwrap().to_owned()).collect();
    assert_eq!(left, case.left());
    let contents = fixture.contents();
    fixture.history.check(usize::MAX, &contents);
    let (history, changes) = (fixture.history.clone(), directory.changes());
    drop(fixture);
    let look = |moment: usize, found: &SimulatedDirectory| {
        // A half-resynced copy is never opened alone.
        if !is_new_good(found, &shape, case) && label_of(found, &shape, case.new_path()).is_some() {
            let missing = NamedCopy { directory: None, path: "x".into() };
            let alone = [named(found, &shape, case.new_path()), missing];
            let terms = Terms::Use { degraded: true };
            assert!(Mirror::assemble(alone, terms, &PoolVerifier).is_err(), "at {moment}");
        }
        let opened = reopened(found, &shape, case.path());
        let mut opened = opened.unwrap_or_else(|error| panic!("{case:?} at {moment}: {error}"));
        history.check(moment, &opened.contents());
        finish_resync(&opened);
        history.check(moment, &opened.contents());
        check_alone(found, &shape, &mut opened);
    };
    for (moment, change) in changes.iter().enumerate() {
        if moment % 5 == stream as usize % 5 {
            look(moment, &medium.cut(|_, count| random.usize(..count)));
        }
        medium.apply(change);
    }
    look(changes.len(), &medium.cut(|_, _| 0));
}

#[test]
fn a_power_cut_while_copies_join_and_leave_loses_nothing() {
    for (number, case) in CASES.into_iter().enumerate() {
        for stream in 0..6 {
            let stream = 61_000 + 100 * number as u64 + stream;
            let _watch = Seed::from_env().watch(&format!("{case:?}, stream {stream}"));
            cut_everywhere(case, stream);
        }
    }
}

/// The new copy refuses a write or a sync at some moment of its resync: clients do not notice, and
/// it is not believed afterwards, although its cursor says that a part of it is equal.
#[test]
fn a_new_copy_that_fails_is_not_believed() {
    let mut failed = 0;
    for (number, case) in CASES.into_iter().enumerate() {
        for stream in 0..12 {
            let stream = 62_000 + 100 * number as u64 + stream;
            let _watch = Seed::from_env().watch(&format!("{case:?}, stream {stream}"));
            let mut random = Seed::from_env().rng(stream);
            let shape = shape_of(case, &mut random);
            let directory = SimulatedDirectory::default();
            let mut fixture = first(&directory, &shape);
            work(&mut fixture, &mut random, &shape, 8);
            let mut fixture = begin(fixture, case, &shape, &mut random);
            let new = open_copy(&fixture, case.new_path());
            let after = When::After(random.u64(..40));
            new.set_faults(match random.bool() {
                true => FaultPlan { failed_writes: after, ..FaultPlan::default() },
                false => FaultPlan { failed_syncs: after, ..FaultPlan::default() },
            });
            if resync_and_work(&mut fixture, &shape, &mut random) {
                continue;
            }
            failed += 1;
            let status = fixture.pool.segments().directory().copy_status();
            let new_state = status.iter().find(|copy| copy.path == case.new_path()).unwrap().state;
            assert_eq!(new_state, CopyState::Failed);
            work(&mut fixture, &mut random, &shape, 4);
            assert!(!fixture.pool.is_latched());
            let wanted = fixture.contents();
            assert_eq!(fixture.take(Step::Flush), Status::Ok);
            drop(fixture);
            new.set_faults(FaultPlan::default());
            let mut fixture = reopened(&directory, &shape, case.path()).unwrap();
            assert_eq!(fixture.contents(), wanted);
            if case.replaces().is_none() {
                let segment = format!("{}/segment-", case.new_path());
                let is_empty = !directory.names().iter().any(|name| name.starts_with(&segment));
                // It begins again: the cursor is void.
                let all = (segments_bytes(&fixture), usize::from(!is_empty));
                assert_eq!(compared_by_resync(&fixture), all);
                check_alone(&directory, &shape, &mut fixture);
                continue;
            }
            assert!(resync(&fixture).is_none(), "the cursor is void");
            // A configuration may name the new copy already.
            drop(fixture);
            if let Ok(mut fixture) = reopened(&directory, &shape, case.new_path()) {
                assert!(resync(&fixture).is_none(), "{case:?}: the cursor is void");
                assert_eq!(fixture.contents(), wanted);
            }
        }
    }
    assert!(failed > 20, "{failed} copies have failed");
}

/// The store of the copy at a path, with its faults.
fn open_copy(fixture: &Fixture, path: &str) -> SimulatedStore {
    let sides = fixture.pool.segments().directory().sides();
    let side = sides.iter().find(|side| side.path.as_os_str() == path).unwrap();
    side.directory.clone().unwrap()
}

/// Regression: a copy that was replaced got no writes any more before its label said that it was
/// replaced, and was believed after a crash in between, or if its label could not be written.
/// Clients write while its label is written, or it fails then; the power is cut at every moment
/// from there on.
#[test]
fn a_replaced_copy_is_not_believed_before_its_label_says_so() {
    let cases = [Case::ReplaceOnly, Case::Replace].into_iter().flat_map(|case| {
        [(case, false), (case, true)].into_iter().flat_map(|it| [(it, 0), (it, 1), (it, 2)])
    });
    for ((case, fails), stream) in cases {
        let _watch = Seed::from_env().watch(&format!("{case:?}, {fails}, stream {stream}"));
        let mut random = Seed::from_env().rng(65_000 + stream);
        let shape = shape_of(case, &mut random);
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut medium = directory.medium();
        let mut fixture = Fixture::open(&directory, &shape);
        work(&mut fixture, &mut random, &shape, 4);
        let old = open_copy(&fixture, case.replaces().unwrap());
        join(&fixture, case, copy(&directory, &shape, "c"));
        let mut resync = resync(&fixture).unwrap();
        let fixture = Arc::new(Mutex::new(fixture));
        let from = loop {
            let files = fixture.lock().unwrap().pool.segments().files();
            let (clients, store, seed) = (Arc::clone(&fixture), old.clone(), random.u64(..));
            // The first write of a step to the old copy is that of its label.
            old.on_next(Operation::Write, move || match fails {
                true => {
                    let failed_writes = When::After(0);
                    store.set_faults(FaultPlan { failed_writes, ..FaultPlan::default() });
                }
                false => {
                    let fixture = &mut *clients.lock().unwrap();
                    work(fixture, &mut fastrand::Rng::with_seed(seed), &shape, 4);
                    assert_eq!(fixture.take(Step::Flush), Status::Ok);
                }
            });
            let from = directory.change_count();
            match resync.step(&files).unwrap() {
                Resynced::Complete => break from,
                stepped => assert_ne!(stepped, Resynced::Ended),
            }
        };
        old.set_hook(|_| {});
        let mut fixture = Arc::into_inner(fixture).unwrap().into_inner().unwrap();
        fixture.pool.segments().renew();
        work(&mut fixture, &mut random, &shape, 4);
        assert_eq!(fixture.take(Step::Flush), Status::Ok);
        let (history, changes) = (fixture.history.clone(), directory.changes());
        drop((fixture, resync));
        for (moment, change) in changes.iter().enumerate() {
            medium.apply(change);
            for path in [case.path(), case.replaces().unwrap(), "c"] {
                if moment < from {
                    continue;
                }
                let found = medium.cut(|_, count| random.usize(..count));
                let opened = reopen(&found, &shape, path, USE);
                let opened = opened.and_then(|store| Fixture::of(store, &found, &shape));
                let mut opened = opened.unwrap_or_else(|error| panic!("{case:?}: {error}"));
                history.check(moment + 1, &opened.contents());
            }
        }
    }
}

/// Regression: what a reader found in a copy that is resyncing was written over newer data of
/// clients, in both copies, if the segment was freed and written again meanwhile.
#[test]
fn a_repair_from_a_resyncing_copy_overwrites_no_newer_write() {
    let mut random = Seed::from_env().rng(66_000);
    let shape = shape_of(Case::Attach, &mut random);
    let directory = SimulatedDirectory::default();
    let fixture = first(&directory, &shape);
    let segments = fixture.pool.segments();
    let new = copy(&directory, &shape, "c");
    join(&fixture, Case::Attach, new.clone());
    let mut resync = resync(&fixture).unwrap();
    let files = segments.files();
    // A step copies one of these segments; all are equal then.
    files.iter().for_each(|_| _ = resync.step(&files).unwrap());
    let (number, old, written) = (files.len() - 1, [1; 512], [2; 512]);
    let (file, address) = (&files[number], segments.address(number as u32, 0));
    for (intact, want) in [(true, old), (false, written)] {
        file.write_at(0, &[&old]).unwrap();
        // The good copy has other data there.
        directory.open(&segment_name(number)).unwrap().write_at(0, &[3; 512]).unwrap();
        let calls = std::cell::Cell::new(0);
        let is_whole = |found: &[u8]| {
            calls.set(calls.get() + 1);
            if found == old && !intact {
                file.write_at(0, &[&written]).unwrap();
            }
            found == old
        };
        let mut found = [0; 512];
        let repaired = segments.read_whole(&files, address, &mut found, &is_whole).unwrap();
        assert_eq!((repaired, found, calls.get()), (usize::from(intact), old, 2));
        for copy in ["", "c/"] {
            let name = format!("{copy}{}", segment_name(number));
            directory.open(&name).unwrap().read_at(0, &mut found).unwrap();
            assert_eq!(found, want, "{name}");
        }
    }
}

/// A resync goes on where it was: an opening compares only what is above the cursor.
#[test]
fn a_resync_continues_at_its_cursor() {
    for case in [Case::Attach, Case::Return] {
        let mut random = Seed::from_env().rng(63_000);
        let shape = shape_of(case, &mut random);
        let directory = SimulatedDirectory::default();
        let mut fixture = first(&directory, &shape);
        work(&mut fixture, &mut random, &shape, 20);
        let mut fixture = begin(fixture, case, &shape, &mut random);
        let segment_bytes = u64::from(fixture.pool.segments().bytes());
        copy_segments(&fixture, 3);
        let wanted = fixture.contents();
        // The process is killed: nothing is closed.
        let found = directory.medium().kill();
        let mut fixture = reopened(&found, &shape, case.path()).unwrap();
        let count = fixture.pool.segments().files().len() as u64;
        assert_eq!(compared_by_resync(&fixture), ((count - 3) * segment_bytes, 0), "{case:?}");
        assert_eq!(fixture.contents(), wanted);
        check_alone(&found, &shape, &mut fixture);
    }
}

/// The progress of a resync only grows, and is that of the whole pool when all is copied: before
/// the copy replaces one of two, the good copies are repaired.
#[test]
fn the_progress_of_a_resync_grows_to_the_length_of_the_pool() {
    let mut random = Seed::from_env().rng(75_000);
    let shape = shape_of(Case::Replace, &mut random);
    let directory = SimulatedDirectory::default();
    let mut fixture = first(&directory, &shape);
    work(&mut fixture, &mut random, &shape, 20);
    join(&fixture, Case::Replace, copy(&directory, &shape, "c"));
    let mut resync = resync(&fixture).unwrap();
    let segments = fixture.pool.segments();
    let mut told = Vec::new();
    loop {
        let stepped = resync.step(&segments.files()).unwrap();
        let status = segments.directory().resync_status().unwrap();
        assert_eq!(status.replaces.as_deref(), Some(Path::new("b")));
        told.push((status.done_bytes, status.total_bytes));
        match stepped {
            Resynced::Bytes(_) => {}
            other => break assert_eq!(other, Resynced::Repair),
        }
    }
    assert!(told.is_sorted() && told.len() > 2, "{told:?}");
    let all = segments_bytes(&fixture);
    assert_eq!(told.last(), Some(&(all, all)));
    assert_eq!(resync.step(&segments.files()).unwrap(), Resynced::Complete);
    assert_eq!(segments.directory().resync_status(), None);
}

/// Regression: the cursor was void for a good copy that was restored from a backup, and the label
/// of the new copy still had it. After another crash, when the superblocks were equal again, it was
/// taken for valid.
#[test]
fn a_void_cursor_stays_void_after_another_crash() {
    for case in [Case::Attach, Case::ReplaceOnly] {
        let mut random = Seed::from_env().rng(69_000);
        let shape = shape_of(case, &mut random);
        let directory = SimulatedDirectory::default();
        let mut fixture = first(&directory, &shape);
        work(&mut fixture, &mut random, &shape, 20);
        let mut fixture = begin(fixture, case, &shape, &mut random);
        let is_own = |name: &str| !name.starts_with("c/");
        let backup = files(&directory, is_own);
        let mut resync = resync(&fixture).unwrap();
        for _ in 0..6 {
            work(&mut fixture, &mut random, &shape, 10);
            assert!(matches!(
                resync.step(&fixture.pool.segments().files()),
                Ok(Resynced::Bytes(_))
            ));
        }
        assert!(label_of(&directory, &shape, "c").unwrap().cursor > Some(2));
        let found = directory.medium().kill();
        replace_files(&found, is_own, &backup);
        // The process is killed again, after the opening.
        let opened = reopened(&found, &shape, "pool").unwrap();
        let found = found.medium().kill();
        drop(opened);
        let mut fixture = reopened(&found, &shape, "pool").unwrap();
        assert_eq!(compared_by_resync(&fixture).0, segments_bytes(&fixture), "{case:?}");
        if case == Case::Attach {
            check_alone(&found, &shape, &mut fixture);
        }
    }
}

/// Regression: a failed copy that another one replaced was not told so. A configuration that still
/// named it did not open the pool.
#[test]
fn a_failed_copy_that_was_replaced_leads_to_the_pool() {
    let mut random = Seed::from_env().rng(67_000);
    let shape = shape_of(Case::Replace, &mut random);
    let directory = SimulatedDirectory::default();
    let mut fixture = first(&directory, &shape);
    let failed_writes = When::Only(1);
    open_copy(&fixture, "b").set_faults(FaultPlan { failed_writes, ..FaultPlan::default() });
    assert_eq!(fixture.take(Step::Write { first: 0, count: 1, fua: true }), Status::Ok);
    let states = fixture.pool.segments().directory().copy_status();
    assert_eq!(states[1].state, CopyState::Failed);
    join(&fixture, Case::Replace, copy(&directory, &shape, "c"));
    finish_resync(&fixture);
    let wanted = fixture.contents();
    drop(fixture);
    assert!(label_of(&directory, &shape, "b").unwrap().is_detached());
    let store = reopen(&directory, &shape, "b", USE).unwrap();
    assert_eq!(Fixture::of(store, &directory, &shape).unwrap().contents(), wanted);
}

/// Regression: the cursor of a copy that joins was taken for valid by an opening of a copy that had
/// failed meanwhile. Both had the identities that they expected, and different data.
#[test]
fn a_cursor_is_void_for_a_copy_that_failed_meanwhile() {
    let mut random = Seed::from_env().rng(68_000);
    let shape = shape_of(Case::Replace, &mut random);
    let directory = SimulatedDirectory::default();
    let mut fixture = first(&directory, &shape);
    work(&mut fixture, &mut random, &shape, 20);
    join(&fixture, Case::Replace, copy(&directory, &shape, "c"));
    let mut resync = resync(&fixture).unwrap();
    for _ in 0..4 {
        assert!(matches!(resync.step(&fixture.pool.segments().files()), Ok(Resynced::Bytes(_))));
    }
    let failed_writes = When::Only(1);
    open_copy(&fixture, "b").set_faults(FaultPlan { failed_writes, ..FaultPlan::default() });
    let generation = |path| label_of(&directory, &shape, path).unwrap().generation;
    let before = generation("a");
    assert_eq!(fixture.take(Step::Write { first: 0, count: 1, fua: true }), Status::Ok);
    assert!(generation("a") > before && generation("c") == generation("a"));
    assert!(label_of(&directory, &shape, "c").unwrap().cursor > Some(0));
    // The other copy is lost.
    let found = directory.medium().kill();
    let missing = NamedCopy { directory: None, path: "a".into() };
    let terms = Terms::Use { degraded: true };
    let store = Mirror::assemble([missing, named(&found, &shape, "b")], terms, &PoolVerifier);
    let store = store.unwrap();
    store.resume_joining(|path| Ok(copy(&found, &shape, path.to_str().unwrap()))).unwrap();
    let mut fixture = Fixture::of(store, &found, &shape).unwrap();
    let wanted = fixture.contents();
    assert_eq!(compared_by_resync(&fixture), (segments_bytes(&fixture), 0));
    assert_eq!(fixture.contents(), wanted);
}

/// Why copies are refused.
#[test]
fn copies_that_cannot_join_or_leave_are_refused() {
    let mut random = Seed::from_env().rng(64_000);
    let shape = shape_of(Case::Replace, &mut random);
    let directory = SimulatedDirectory::default();
    let fixture = first(&directory, &shape);
    let mirror = fixture.pool.segments().directory();
    let refused = |path: &str, replaces: Option<&str>| {
        mirror.check_join(path.as_ref(), replaces.map(AsRef::as_ref)).unwrap_err().to_string()
    };
    assert!(refused("c", None).contains("has two good copies"), "{}", refused("c", None));
    assert!(refused("c", Some("x")).contains("expected a copy of the pool: `a`, `b`"));
    join(&fixture, Case::Replace, copy(&directory, &shape, "c"));
    assert!(refused("d", Some("a")).contains("`c` is resyncing"));
    let detach = |path: &str| mirror.detach(path.as_ref());
    let error = detach("b").unwrap_err().to_string();
    assert!(error.contains("`c` replaces it"), "{error}");
    let error = detach("a").unwrap_err().to_string();
    assert!(error.contains("`c` is resyncing"), "{error}");
    detach("c").unwrap();
    // A label has no space for this path.
    let given = copy(&directory, &shape, "c");
    let given = NamedCopy { directory: Some(given), path: "x".repeat(4000).into() };
    let error = mirror.join(given, Some("b".as_ref())).unwrap_err().to_string();
    assert!(error.contains("have more than 4000 bytes"), "{error}");
    detach("b").unwrap();
    let error = detach("a").unwrap_err().to_string();
    assert!(error.contains("last good copy"), "{error}");
    assert_eq!(label_of(&directory, &shape, "a"), None);
    assert!(label_of(&directory, &shape, "b").unwrap().is_detached());
}

/// Regression: an opening that continued a resync removed those segments of the half copy that the
/// good copy had lost, before it found that the pool did not open in the good copy.
#[test]
fn a_good_copy_that_does_not_open_costs_a_half_resynced_copy_nothing() {
    for case in [Case::Attach, Case::Return] {
        for is_short in [false, true] {
            let mut random = Seed::from_env().rng(70_000);
            let shape = shape_of(case, &mut random);
            let directory = SimulatedDirectory::default();
            let mut fixture = first(&directory, &shape);
            work(&mut fixture, &mut random, &shape, 20);
            let fixture = begin(fixture, case, &shape, &mut random);
            copy_segments(&fixture, 3);
            let found = directory.medium().kill();
            drop(fixture);
            let prefix = format!("{}/", case.new_path());
            let is_new = |name: &str| name.starts_with(&prefix);
            let is_good = |name: &str| match case {
                Case::Return => name.starts_with("a/"),
                _ => !is_new(name),
            };
            let whole = files(&found, is_good);
            let mut damaged = whole.clone();
            match is_short {
                false => damaged.retain(|name, _| !name.contains("segment-")),
                true => {
                    let segments = damaged.iter_mut().filter(|(name, _)| name.contains("segment-"));
                    segments.for_each(|(_, bytes)| bytes.truncate(bytes.len() / 2));
                }
            }
            replace_files(&found, is_good, &damaged);
            let before = files(&found, is_new);
            let opened = reopened(&found, &shape, case.path());
            assert!(opened.is_err(), "{case:?}: the good copy has no data");
            drop(opened);
            let after = files(&found, is_new);
            assert_eq!(after.keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>());
            assert!(after == before, "{case:?}: the half copy was changed");
            // The good copy is back.
            replace_files(&found, is_good, &whole);
            let mut fixture = reopened(&found, &shape, case.path()).unwrap();
            let (compared, repairs) = compared_by_resync(&fixture);
            assert!(compared < segments_bytes(&fixture) && repairs == 0, "{case:?}");
            check_alone(&found, &shape, &mut fixture);
        }
    }
}

/// A half copy has a segment that the good copy lacks, or with another length: its resync begins
/// again, and makes it equal.
#[test]
fn a_half_copy_with_other_segments_is_resynced_from_its_beginning() {
    for case in [Case::Attach, Case::Return] {
        for is_short in [false, true] {
            let mut random = Seed::from_env().rng(71_000);
            let shape = shape_of(case, &mut random);
            let directory = SimulatedDirectory::default();
            let mut fixture = first(&directory, &shape);
            work(&mut fixture, &mut random, &shape, 20);
            let mut fixture = begin(fixture, case, &shape, &mut random);
            copy_segments(&fixture, 3);
            let wanted = fixture.contents();
            let found = directory.medium().kill();
            drop(fixture);
            let new = copy(&found, &shape, case.new_path());
            let name = segment_name(if is_short { 1 } else { 200 });
            new.remove(&name).unwrap();
            drop(new.create(&name, 512).unwrap());
            found.settle();
            let mut fixture = reopened(&found, &shape, case.path()).unwrap();
            assert_eq!(compared_by_resync(&fixture), (segments_bytes(&fixture), 1), "{case:?}");
            assert_eq!(fixture.contents(), wanted);
            let len = new.open(&name).unwrap().map(|file| file.len().unwrap());
            let whole = u64::from(fixture.pool.segments().bytes());
            assert_eq!(len, is_short.then_some(whole), "{case:?}");
            check_alone(&found, &shape, &mut fixture);
        }
    }
}

/// Regression: when a copy that joined was given up at an opening, a stale copy that was resynced
/// instead began at the cursor of that one, and became good without the segments below it.
#[test]
fn a_stale_copy_is_not_resynced_from_the_cursor_of_another_copy() {
    let mut random = Seed::from_env().rng(72_000);
    let shape = shape_of(Case::Replace, &mut random);
    let directory = SimulatedDirectory::default();
    let mut fixture = first(&directory, &shape);
    work(&mut fixture, &mut random, &shape, 20);
    join(&fixture, Case::Replace, copy(&directory, &shape, "c"));
    let is_stale = |name: &str| name.starts_with("b/");
    let backup = files(&directory, is_stale);
    work(&mut fixture, &mut random, &shape, 20);
    assert_eq!(fixture.take(Step::Write { first: 0, count: 1, fua: true }), Status::Ok);
    assert_eq!(fixture.take(Step::Flush), Status::Ok);
    copy_segments(&fixture, 4);
    assert!(label_of(&directory, &shape, "c").unwrap().cursor > Some(2));
    let wanted = fixture.contents();
    let found = directory.medium().kill();
    drop(fixture);
    replace_files(&found, is_stale, &backup);
    let given = ["a", "b"].map(|path| named(&found, &shape, path));
    let store = Mirror::assemble(given, USE, &PoolVerifier).unwrap();
    let failing = copy(&found, &shape, "c");
    failing.set_faults(FaultPlan { failed_writes: When::After(0), ..FaultPlan::default() });
    store.resume_joining(|_| Ok(failing)).unwrap();
    store.resume_stale(&PoolVerifier).unwrap();
    let mut fixture = Fixture::of(store, &found, &shape).unwrap();
    let found_states: Vec<_> = states(&fixture).into_iter().map(|(state, _)| state).collect();
    assert_eq!(found_states, [CopyState::Good, CopyState::Resyncing, CopyState::Failed]);
    assert_eq!(compared_by_resync(&fixture), (segments_bytes(&fixture), 1));
    assert_eq!(fixture.contents(), wanted);
    check_alone(&found, &shape, &mut fixture);
}

/// Regression: the whole pool was verified again by each opening until the first segment of a copy
/// that was attached empty was copied. Such a copy cannot repair anything.
#[test]
fn a_copy_without_a_segment_causes_no_verification() {
    let mut random = Seed::from_env().rng(74_000);
    let shape = shape_of(Case::Attach, &mut random);
    let directory = SimulatedDirectory::default();
    let mut fixture = first(&directory, &shape);
    work(&mut fixture, &mut random, &shape, 20);
    assert_eq!(fixture.take(Step::Flush), Status::Ok);
    join(&fixture, Case::Attach, copy(&directory, &shape, "c"));
    let found = directory.medium().kill();
    drop(fixture);
    assert!(!found.names().iter().any(|name| name.starts_with("c/segment-")));
    let mut fixture = reopened(&found, &shape, "pool").unwrap();
    assert_eq!(compared_by_resync(&fixture), (segments_bytes(&fixture), 0));
    check_alone(&found, &shape, &mut fixture);
}

/// Regression: a copy came back whose file system was full. The pool had no space for new segments
/// then, although the good copy had.
#[test]
fn a_full_copy_that_comes_back_does_not_fill_the_pool() {
    for is_begun in [false, true] {
        let shape = Shape { mirror: true, ..Shape::tiny() };
        let directory = SimulatedDirectory::default();
        let mut fixture = first(&directory, &shape);
        let failed_writes = When::After(0);
        open_copy(&fixture, "b").set_faults(FaultPlan { failed_writes, ..FaultPlan::default() });
        let write = |round: u64| Step::Write { first: round % 3, count: 1, fua: true };
        // Snapshots keep the blocks, so that the pool grows.
        let grow = |fixture: &mut Fixture, count: usize| {
            let wanted = fixture.pool.segments().files().len() + count;
            for round in 0.. {
                assert_eq!(fixture.take(write(round)), Status::Ok);
                assert_eq!(fixture.take(Step::Snapshot), Status::Ok);
                if fixture.pool.segments().files().len() >= wanted {
                    break;
                }
            }
        };
        grow(&mut fixture, 6);
        assert_eq!(fixture.take(Step::Flush), Status::Ok);
        drop(fixture);
        if is_begun {
            let fixture = Fixture::open(&directory, &shape);
            copy_segments(&fixture, 1);
            let found = directory.medium().kill();
            drop(fixture);
            replace_files(&directory, |_| true, &files(&found, |_| true));
        }
        let pair = pair(&directory, shape.depth);
        pair[1].set_bytes_max(directory.bytes() + 512);
        let store = assemble(pair.clone().map(Some), USE).unwrap();
        let mut fixture = Fixture::of(store, &directory, &shape).unwrap();
        let (state, why) = states(&fixture).remove(1);
        let why = why.unwrap_or_default();
        assert_eq!(state, CopyState::Failed, "{why}");
        assert!(why.contains("need") && why.contains("its file system has 512 free"), "{why}");
        grow(&mut fixture, 2);
        let wanted = fixture.contents();
        assert_eq!(fixture.take(Step::Flush), Status::Ok);
        drop(fixture);
        // There is space again.
        let mut fixture = Fixture::open(&directory, &shape);
        finish_resync(&fixture);
        assert_eq!(fixture.contents(), wanted);
        check_alone(&directory, &shape, &mut fixture);
    }
}
