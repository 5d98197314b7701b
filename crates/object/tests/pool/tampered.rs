//! Objects that are changed in the object store: a pool returns an error that names the object, or
//! the data that were written.

use std::sync::Arc;
use std::time::Duration;

use blockyard_object::{BucketSettings, BucketStore};
use blockyard_store::{SegmentFiles as _, StoreFile as _, StoreLocation as _};
use blockyard_testing::seed::Seed;
use blockyard_volume_format::object::{LEASE, MANIFEST, ObjectHeader, ObjectKind};
use blockyard_volume_format::segment_name;
use object_store::memory::InMemory;

use crate::connection::{Connection, Moment};
use crate::machine::{Machine, formatted, settings};
use crate::storage::{
    LongSegment, contents, idle, make_segments, names, object, open, open_at, open_read_only,
    remove, replace, try_contents, write,
};

type Contents = Vec<Vec<u8>>;

/// What is done to an object.
#[derive(Clone, Copy, Debug)]
enum Tampering {
    /// A bit is changed in the byte at this part, of 100, of its length.
    Flip(usize),
    /// It ends after this part of its length.
    Truncate(usize),
    Remove,
    /// The object of this name of another pool, which has other contents.
    OfAnotherPool,
    /// Another object of the same kind.
    OfAnotherPlace,
}

/// Batches of the last epoch, none of which a compaction has copied. No seal ends it.
const LAST: u8 = 40;

/// Uploads at once, as `docs/object-store-internals.md` has it.
const UPLOADS_MAX: u64 = 16;

/// Makes batches, seals, segments, parts of the table, a manifest and a lease. Returns the contents
/// after each write of the last epoch.
fn fill(store: &Arc<InMemory>, first: u8) -> Vec<Contents> {
    make_segments(store, 4);
    let lease = Some(Duration::from_secs(30));
    let pool = open(store, BucketSettings { lease, ..settings() });
    (0..50).for_each(|at| write(&pool, usize::from(at) % 4, first + at).unwrap());
    drop(pool);
    let pool = open(store, BucketSettings { lease, ..idle() });
    let mut states = vec![contents(&pool)];
    for at in 0..LAST {
        write(&pool, usize::from(at) % 4, first + 50 + at).unwrap();
        states.push(contents(&pool));
    }
    states
}

/// Returns `None` if there is nothing to be done.
fn tamper(store: &Arc<InMemory>, other: &Arc<InMemory>, name: &str, how: Tampering) -> Option<()> {
    let mut bytes = object(store, name);
    let at = |part: usize| (bytes.len() - 1) * part / 100;
    match how {
        Tampering::Flip(part) => {
            let at = at(part);
            bytes[at] ^= 0x10;
        }
        Tampering::Truncate(part) => bytes.truncate(at(part)),
        Tampering::Remove => {
            remove(store, name);
            return Some(());
        }
        Tampering::OfAnotherPool => {
            names(other, "").iter().find(|it| *it == name)?;
            bytes = object(other, name);
        }
        Tampering::OfAnotherPlace => {
            let (kind, _) = name.split_once('/')?;
            let others = names(store, kind);
            bytes = object(store, others.iter().find(|it| *it != name)?);
        }
    }
    replace(store, name, bytes);
    Some(())
}

/// The contents that an opening for use, or for reading, finds.
fn found(store: &Arc<InMemory>, for_use: bool) -> Result<Contents, String> {
    let opened = match for_use {
        true => open_at(&Connection::new(store), idle(), None),
        false => open_read_only(store),
    };
    let read = |pool: BucketStore| try_contents(&pool).map_err(|error| error.to_string());
    opened.map_err(|error| error.to_string()).and_then(read)
}

/// The number of a batch of the last epoch.
fn last_batch(store: &Arc<InMemory>, name: &str) -> Option<u64> {
    let manifest = crate::storage::manifest(store);
    let number = name.strip_prefix(&format!("batch/{:016x}/", manifest.epoch))?;
    u64::from_str_radix(number, 16).ok()
}

/// Whether an object has a kind.
fn is_a(store: &Arc<InMemory>, name: &str, kind: ObjectKind) -> bool {
    ObjectHeader::parse(&object(store, name)).is_ok_and(|(header, _)| header.kind == kind)
}

#[test]
fn a_changed_object_is_named_or_has_no_effect() {
    let mut random = Seed::from_env().rng(3);
    let (store, other) = (formatted(), Arc::new(InMemory::new()));
    Machine::open(&Connection::new(&other), None).unwrap().close();
    let (states, _) = (fill(&store, 1), fill(&other, 120));
    let expected = states.last().unwrap();
    let (mut errors, mut shorter) = (0, 0);
    for name in names(&store, "") {
        let at = random.usize(1..99);
        let ways = [
            Tampering::Flip(0),
            Tampering::Flip(at),
            Tampering::Flip(100),
            Tampering::Truncate(0),
            Tampering::Truncate(at),
            Tampering::Remove,
            Tampering::OfAnotherPool,
            Tampering::OfAnotherPlace,
        ];
        for (how, for_use) in ways.into_iter().flat_map(|how| [(how, false), (how, true)]) {
            let copy = Arc::new(store.fork());
            if tamper(&copy, &other, &name, how).is_none() {
                continue;
            }
            let case = format!("{how:?} of `{name}`, for use: {for_use}");
            match found(&copy, for_use) {
                Ok(found) if found == *expected => {
                    // A batch of the last epoch is needed, whatever happened to it.
                    assert!(last_batch(&store, &name).is_none() && name != MANIFEST, "{case}");
                }
                // Nothing tells that one of the last batches was there.
                Ok(found) => {
                    let last = last_batch(&store, &name).filter(|number| {
                        matches!(how, Tampering::Remove)
                            && number + UPLOADS_MAX >= u64::from(LAST)
                            && found == states[*number as usize]
                    });
                    assert!(last.is_some(), "{case}: wrong data");
                    shorter += 1;
                }
                Err(error) => {
                    let is_named = error.contains(&format!("`{name}`"))
                        // The objects do not fit to it.
                        || name == MANIFEST && error.contains("belongs to another pool")
                        || name == MANIFEST && error.contains("holds no pool");
                    assert!(is_named && name != LEASE, "{case}: {error}");
                    errors += 1;
                }
            }
        }
    }
    assert_eq!(shorter, 2 * UPLOADS_MAX);
    for kind in [ObjectKind::Seal, ObjectKind::Segment, ObjectKind::Table] {
        assert!(names(&store, "").iter().any(|name| is_a(&store, name, kind)), "no {kind:?}");
    }
    assert!(errors > 500, "{errors} errors");
}

/// An opening that finds that a batch is missing seals nothing: when the object is restored, the
/// pool has all that was written.
#[test]
fn a_pool_has_everything_when_a_missing_batch_is_restored() {
    let store = formatted();
    let states = fill(&store, 1);
    let name = format!("batch/{:016x}/{:016x}", crate::storage::manifest(&store).epoch, 7);
    let bytes = object(&store, &name);
    remove(&store, &name);
    for for_use in [false, true, true] {
        let error = found(&store, for_use).unwrap_err();
        assert_eq!(error, format!("`{name}` is missing from the object store; restore the object"));
    }
    replace(&store, &name, bytes);
    assert_eq!(found(&store, true).as_ref(), Ok(states.last().unwrap()));
}

/// Regression: an opening that could not read the pool had ended the opener that could, and each
/// further one used an epoch up.
#[test]
fn an_opening_that_cannot_read_the_pool_leaves_it_to_its_opener() {
    let store = formatted();
    fill(&store, 1);
    let pool = open(&store, idle());
    (0..20).for_each(|at| write(&pool, usize::from(at) % 4, 1 + at).unwrap());
    let manifest = crate::storage::manifest(&store);
    let part = manifest.parts.iter().flatten().next().unwrap().to_string();
    for name in [part, format!("batch/{:016x}/{:016x}", manifest.epoch, 0)] {
        let bytes = object(&store, &name);
        let damaged = [&bytes[..bytes.len() - 1], &[!bytes[bytes.len() - 1]]].concat();
        for tampered in [None, Some(damaged)] {
            remove(&store, &name);
            tampered.into_iter().for_each(|bytes| replace(&store, &name, bytes));
            let before = (names(&store, ""), object(&store, MANIFEST));
            for _ in 0..3 {
                let error = found(&store, true).unwrap_err();
                assert!(error.contains(&format!("`{name}`")), "{error}");
            }
            assert!(before == (names(&store, ""), object(&store, MANIFEST)), "`{name}`");
            write(&pool, 0, 1).unwrap();
        }
        replace(&store, &name, bytes);
    }
    let expected = contents(&pool);
    assert!(found(&store, true) == Ok(expected));
    write(&pool, 0, 1).unwrap_err();
}

/// Reads a segment from its start to its end, as a machine with an empty cache. Returns the numbers
/// of the parts that could not be read, and the errors.
fn failed_reads(segment: &LongSegment, len: usize) -> Vec<(usize, String)> {
    let cache = tempfile::tempdir().unwrap();
    let pool = segment.open(LongSegment::settings(), Some(cache.path()));
    let file = pool.open(&segment_name(0)).unwrap().unwrap();
    let mut into = vec![0; len];
    let parts = segment.bytes.chunks(len).enumerate();
    let failed = parts.filter_map(|(number, part)| {
        match file.read_at((number * len) as u64, &mut into) {
            Ok(()) => assert!(into == part, "other bytes in part {number}"),
            Err(error) => return Some((number, error.to_string())),
        }
        None
    });
    failed.collect()
}

/// Regression: a damaged chunk of 32 KiB made the 4 MiB around it unreadable.
#[test]
fn only_reads_of_a_damaged_chunk_fail() {
    const LEN: usize = 64 << 10;
    let segment = LongSegment::new();
    assert_eq!(failed_reads(&segment, LEN), []);
    let name = segment.object();
    let mut bytes = object(&segment.store, &name);
    bytes[4 << 20] ^= 1;
    replace(&segment.store, &name, bytes);
    let failed = failed_reads(&segment, LEN);
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert!(failed[0].1.starts_with(&format!("`{name}` is damaged in the object")), "{failed:?}");
}

/// Regression: an emptied object ended the pool when a compaction read it.
#[test]
fn reads_of_a_shortened_object_fail_and_the_pool_goes_on() {
    let segment = LongSegment::new();
    let name = segment.object();
    let bytes = object(&segment.store, &name);
    for rest in [1 << 20, 100, 1, 0] {
        replace(&segment.store, &name, bytes[..rest].to_vec());
        let failed = failed_reads(&segment, 1 << 20);
        assert_eq!(failed.len(), 4, "{failed:?}");
        let is_named = |(_, error): &(usize, String)| error.starts_with(&format!("`{name}` is "));
        assert!(failed.iter().all(is_named), "{failed:?}");
    }
    // More than 64 extents: a compaction copies the whole segment.
    let settings = BucketSettings { compact_batches: 80, ..LongSegment::settings() };
    let pool = segment.open(settings, None);
    let file = pool.open(&segment_name(0)).unwrap().unwrap();
    for number in 0..200 {
        file.write_at(number << 10, &[&[1; 512]]).unwrap();
        file.sync().unwrap();
    }
    assert!(!names(&segment.store, "segment").is_empty(), "no compaction");
    pool.check_location().unwrap();
}

/// A writer that is still alive creates more batches than an opener reads ahead, at any moment of
/// the opening. Those that it creates before the opener's seal are replayed.
#[test]
fn batches_that_come_while_a_pool_is_opened_are_replayed() {
    const LATE: u64 = UPLOADS_MAX + 4;
    let store = formatted();
    let states = fill(&store, 1);
    let last = |name: &String| last_batch(&store, name);
    let end = names(&store, "batch").iter().filter_map(last).max().unwrap() + 1;
    let is_late = |name: &String| last(name).is_some_and(|number| number >= end - LATE);
    let mut late: Vec<String> = names(&store, "batch");
    late.retain(is_late);
    let late: Vec<_> = late.into_iter().map(|name| (object(&store, &name), name)).collect();
    late.iter().for_each(|(_, name)| remove(&store, name));
    let mut replayed = Vec::new();
    for number in 1.. {
        let copy = Arc::new(store.fork());
        let connection = Connection::new(&copy);
        let (other, batches) = (Arc::clone(&copy), late.clone());
        let create = move || {
            let there = names(&other, "batch");
            let free = batches.into_iter().filter(|(_, name)| !there.contains(name));
            free.for_each(|(bytes, name)| replace(&other, &name, bytes));
        };
        connection.plan().hook = Some((Moment::Before(number), Box::new(create)));
        let pool = open_at(&connection, idle(), None);
        let found = pool.map_err(|error| error.to_string()).and_then(|pool| {
            let found = try_contents(&pool).map_err(|error| error.to_string())?;
            Ok(states.iter().position(|state| *state == found))
        });
        let found = found.unwrap_or_else(|error| panic!("before request {number}: {error}"));
        replayed.push(found.unwrap_or_else(|| panic!("before request {number}: other contents")));
        if connection.plan().hook.is_some() {
            break;
        }
    }
    assert_eq!(replayed.iter().max(), Some(&(states.len() - 1)), "all batches, once");
    assert_eq!(replayed.last(), Some(&(states.len() - 1 - LATE as usize)), "none that come later");
}
