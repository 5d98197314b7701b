//! The files of the local log: when they are made and removed, their limits, and what an opener
//! says of files that are torn, damaged, missing or of another pool.

use std::fs::DirEntry;
use std::os::unix::fs::{DirEntryExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blockyard_object::{
    BucketError, BucketSettings, BucketStore, LocalAcknowledgement, ObjectClient, Opening, Retries,
};
use blockyard_store::remote::Acknowledge;
use blockyard_store::{SegmentFiles as _, StoreFile as _};
use blockyard_volume_format::object::ObjectId;
use blockyard_volume_format::object::batch::{
    self, Batch, BatchOperation, BatchRecord, LaterBatches, PAYLOAD_AT,
};
use blockyard_volume_format::object::local_log::{HEAD_BYTES, LogFile, parse_name};
use blockyard_volume_format::object::manifest::Manifest;
use blockyard_volume_format::segment_name;
use object_store::memory::InMemory;
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::connection::{Connection, pass};
use crate::machine::{LAG_BYTES, formatted, local_settings, log_folder, runtime};
use crate::storage::{
    call_before_first_put, make_superblock, manifest, names, object, open_read_only, replace, write,
};

/// The settings of a pool that compacts nothing.
fn settings() -> BucketSettings {
    BucketSettings {
        memory_bytes: 1 << 30,
        compact_bytes: 1 << 30,
        compact_batches: 1 << 30,
        ..local_settings()
    }
}

fn limits() -> LocalAcknowledgement {
    local_settings().local.unwrap()
}

/// A machine: its runtime and the directory of its log.
struct Place {
    runtime: Arc<Runtime>,
    folder: TempDir,
}

impl Place {
    fn new() -> Place {
        Place { runtime: runtime(), folder: log_folder() }
    }

    fn log(&self) -> &Path {
        self.folder.path()
    }

    fn open_with(
        &self,
        connection: &Connection,
        settings: BucketSettings,
    ) -> Result<BucketStore, BucketError> {
        let client = ObjectClient::over(Arc::new(connection.clone()), "pool", Retries::default());
        let request = Opening { log: Some(self.log()), take_over: true, ..Opening::default() };
        BucketStore::open(Arc::new(client), settings, request, &self.runtime)
    }

    fn open(&self, store: &Arc<InMemory>) -> BucketStore {
        self.open_with(&Connection::new(store), settings()).unwrap()
    }

    fn pass(&self, time: Duration) {
        self.runtime.block_on(pass(time));
    }

    /// The names of the files of the log, but that with the identity of the directory.
    fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.log()).unwrap();
        let mut names: Vec<String> =
            entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name != "id" && !name.starts_with("spare-"));
        names.sort();
        names
    }

    /// The spares: their names, and the numbers of their inodes.
    fn spares(&self) -> Vec<(String, u64)> {
        let entries = std::fs::read_dir(self.log()).unwrap().map(Result::unwrap);
        let named = entries.map(|it| (it.file_name().into_string().unwrap(), it.ino()));
        let mut spares: Vec<(String, u64)> =
            named.filter(|(name, _)| name.starts_with("spare-")).collect();
        spares.sort();
        spares
    }

    /// The number of the inode of the only file.
    fn inode(&self) -> u64 {
        let files = self.files();
        assert_eq!(files.len(), 1, "{files:?}");
        self.log().join(&files[0]).metadata().unwrap().ino()
    }
}

/// A pool with a superblock and four segments.
fn with_superblock() -> Arc<InMemory> {
    let store = formatted();
    let place = Place::new();
    let pool =
        place.open_with(&Connection::new(&store), BucketSettings { local: None, ..settings() });
    let pool = pool.unwrap();
    for name in pool.names().unwrap().iter().filter(|name| *name != "superblock") {
        pool.remove(name).unwrap();
    }
    for number in 0..4 {
        pool.create("new", 16 << 10).unwrap();
        pool.rename("new", &segment_name(number)).unwrap();
    }
    pool.sync_names().unwrap();
    store
}

/// The contents of the segments.
fn segments(pool: &BucketStore) -> Vec<Vec<u8>> {
    let mut names = pool.names().unwrap();
    names.retain(|name| name.starts_with("segment-"));
    names.sort();
    let read = |name: &String| {
        let mut bytes = vec![0; 16 << 10];
        pool.open(name).unwrap().unwrap().read_at(0, &mut bytes).unwrap();
        bytes
    };
    names.iter().map(read).collect()
}

/// What another machine would read.
fn elsewhere(store: &Arc<InMemory>) -> Vec<Vec<u8>> {
    segments(&open_read_only(store).unwrap())
}

#[test]
fn syncs_share_an_upload_and_the_file_is_removed_after_it() {
    let (store, place) = (with_superblock(), Place::new());
    let connection = Connection::new(&store);
    let pool = place.open_with(&connection, settings()).unwrap();
    let before = connection.plan().requests;
    let old = elsewhere(&store);
    for number in 0..10 {
        write(&pool, 0, number).unwrap();
    }
    assert_eq!(connection.plan().requests, before, "a sync sends a request");
    assert_eq!(place.files(), [format!("{:016x}-{:016x}", pool.epoch(), 0)]);
    assert_eq!(elsewhere(&store), old);
    let status = pool.upload_status();
    assert_eq!((status.acknowledge, status.lag_batches), (Acknowledge::Local, 1));
    assert!(status.lag_bytes > 10 * 512 && !status.is_waiting, "{status:?}");
    place.pass(limits().upload_delay * 2);
    assert_eq!(connection.plan().requests, before + 1);
    assert!(place.files().is_empty(), "{:?}", place.files());
    assert_eq!(elsewhere(&store), segments(&pool));
    assert_eq!(pool.lag().batches, 0);
}

#[test]
fn files_are_private() {
    use std::os::unix::fs::PermissionsExt;
    let (store, place) = (with_superblock(), Place::new());
    let pool = place.open(&store);
    for number in 0..3 {
        write(&pool, 0, number).unwrap();
        for entry in std::fs::read_dir(place.log()).unwrap().map(Result::unwrap) {
            let mode = entry.metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{entry:?}");
        }
        place.pass(limits().upload_delay * 2);
    }
}

/// The file of a batch that the object store has is used again for a later one, so that syncs do
/// not change its length.
#[test]
fn files_are_used_again() {
    let (store, place) = (with_superblock(), Place::new());
    std::fs::write(place.log().join("spare-3"), "of an earlier opener").unwrap();
    let local = Some(LocalAcknowledgement { lag_bytes_max: 1 << 20, ..closing().local.unwrap() });
    let settings = BucketSettings { local, ..closing() };
    let pool = place.open_with(&Connection::new(&store), settings).unwrap();
    let spares = place.spares();
    assert_eq!(spares.len(), 1, "{spares:?}");
    let first = spares[0].1;
    for number in 0..10 {
        for _ in 0..5 {
            write(&pool, 0, number).unwrap();
            assert_eq!((place.inode(), place.spares().len()), (first, 0));
        }
        place.pass(limits().upload_delay * 2);
        assert_eq!((place.files().len(), place.spares()), (0, spares.clone()));
    }
    // Batches that are uploaded together leave a few spares.
    for number in 0..100 {
        write(&pool, 0, number).unwrap();
    }
    assert!(place.files().len() > 5, "{:?}", place.files());
    place.pass(limits().upload_delay * 2);
    let spares = place.spares();
    assert_eq!((place.files().len(), spares.len()), (0, 4));
    write(&pool, 0, 1).unwrap();
    assert!(spares.iter().any(|(_, inode)| *inode == place.inode()));
    // One that is missing is not needed.
    for (name, _) in place.spares() {
        std::fs::remove_file(place.log().join(name)).unwrap();
    }
    place.pass(limits().upload_delay * 2);
    (0..40).for_each(|number| write(&pool, 0, number).unwrap());
    assert!(!pool.upload_status().has_log_failed);
    drop(pool);
    assert_eq!((place.files().len(), place.spares()), (0, vec![]));
}

/// The disk may be slow: the spare is there before the opener takes an epoch, and so before its
/// lease, which is too short for that.
#[test]
fn the_first_spare_is_made_before_the_pool_is_taken() {
    let (store, place) = (with_superblock(), Place::new());
    let connection = Connection::new(&store);
    let (lengths, log) = (Arc::new(Mutex::new(Vec::new())), place.log().to_owned());
    let seen = Arc::clone(&lengths);
    connection.plan().before_puts = Some(Arc::new(move || {
        let len = log.join("spare-0").metadata().map_or(0, |found| found.len());
        seen.lock().unwrap().push(len);
    }));
    let settings = BucketSettings { lease: Some(Duration::from_secs(30)), ..settings() };
    let pool = place.open_with(&connection, settings).unwrap();
    let lengths = lengths.lock().unwrap();
    assert!(lengths.len() > 2 && lengths.iter().all(|len| *len > 8 << 10), "{lengths:?}");
    drop(pool);
}

/// The names and contents of all files of a log.
fn everything(place: &Place) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(place.log()).unwrap().map(Result::unwrap);
    let read = |it: DirEntry| (it.file_name().into_string().unwrap(), std::fs::read(it.path()));
    let mut files: Vec<_> = entries.map(read).map(|(name, it)| (name, it.unwrap())).collect();
    files.sort();
    files
}

/// Regression: each opening that failed left its number in the directory, and a spare.
#[test]
fn an_opening_that_fails_leaves_the_log_as_it_was() {
    let (store, place) = (with_superblock(), Place::new());
    let pool = place.open_with(&Connection::new(&store), closing()).unwrap();
    write(&pool, 0, 1).unwrap();
    drop(pool);
    let before = everything(&place);
    assert_eq!(before.len(), 1, "{before:?}");
    let damaged = format!("batch/{:016x}/{:016x}", manifest(&store).epoch, 0);
    let bytes = object(&store, &damaged);
    replace(&store, &damaged, bytes[..100].to_vec());
    for _ in 0..3 {
        let error = place.open_with(&Connection::new(&store), closing()).unwrap_err().to_string();
        assert!(error.contains(&damaged), "{error}");
        assert_eq!(everything(&place), before);
    }
    replace(&store, &damaged, bytes);
    let connection = Connection::new(&store);
    let other = Arc::clone(&store);
    call_before_first_put(&connection, move || drop(Place::new().open(&other)));
    let error = place.open_with(&connection, closing()).unwrap_err();
    assert!(matches!(error, BucketError::Raced { .. }), "{error}");
    assert_eq!(everything(&place), before);
}

/// An opening that gets no answer from some request on may have taken an epoch or not.
#[test]
fn an_opening_that_gets_no_answer_leaves_no_spare() {
    let (store, place) = (with_superblock(), Place::new());
    let mut numbers = Vec::new();
    for cut_after in 0.. {
        let connection = Connection::new(&Arc::new(store.fork()));
        connection.plan().cut_after = cut_after;
        let opened = place.open_with(&connection, closing());
        let is_open = opened.is_ok();
        drop(opened);
        assert_eq!(place.spares(), []);
        let found = std::fs::read_to_string(place.log().join("id")).unwrap_or_default();
        numbers.push(found.lines().count());
        if is_open {
            break;
        }
    }
    // Only that of the request which replaces the manifest is kept, until a later one has it.
    assert!(numbers.len() > 10 && numbers.iter().all(|count| *count <= 3), "{numbers:?}");
    assert_eq!(numbers.last(), Some(&1));
}

/// A pool that another machine has taken over needs its spares no more.
#[test]
fn a_pool_that_was_taken_over_leaves_no_spares_when_it_is_closed() {
    let (store, place) = (with_superblock(), Place::new());
    let pool = place.open_with(&Connection::new(&store), closing()).unwrap();
    // Batches that are uploaded together leave several.
    (0..40).for_each(|number| write(&pool, 0, number).unwrap());
    place.pass(limits().upload_delay * 2);
    assert!(place.spares().len() > 2, "{:?}", place.spares());
    drop(Place::new().open(&store));
    write(&pool, 0, 1).unwrap();
    place.pass(limits().upload_delay * 2);
    write(&pool, 0, 2).unwrap_err();
    assert!(!place.spares().is_empty());
    drop(pool);
    assert_eq!(place.spares(), []);
}

/// A disk can be too full for a spare.
#[test]
fn a_log_without_spares_works() {
    let (store, place) = (with_superblock(), Place::new());
    for number in 0..4 {
        let blocked = place.log().join(format!("spare-{number}"));
        std::fs::create_dir_all(blocked.join("not empty")).unwrap();
    }
    let connection = Connection::new(&store);
    let pool = place.open_with(&connection, settings()).unwrap();
    for number in 0..5 {
        let before = connection.plan().requests;
        write(&pool, 0, number).unwrap();
        assert_eq!(connection.plan().requests, before, "a sync sends a request");
        assert_eq!(place.files().len(), 1);
        place.pass(limits().upload_delay * 2);
        assert_eq!(place.files(), [""; 0]);
    }
    write(&pool, 0, 9).unwrap();
    let expected = segments(&pool);
    drop(pool);
    assert_eq!(segments(&place.open(&store)), expected);
}

/// The machine stops while the file of the last batch is one that an earlier batch had.
#[test]
fn a_log_in_a_file_that_is_used_again_is_recovered() {
    let (store, place) = (with_superblock(), Place::new());
    let pool = place.open(&store);
    place.pass(Duration::from_secs(1));
    // Batches of different lengths, the longest first.
    for count in (0..8).rev() {
        (0..=count).for_each(|number| write(&pool, 0, number).unwrap());
        let (expected, kept) = (segments(&pool), Place::new());
        let name = &place.files()[0];
        let bytes = std::fs::read(place.log().join(name)).unwrap();
        let file = LogFile::parse(&bytes, id_of(name), None).unwrap().unwrap();
        assert_eq!((file.records.len(), file.torn_bytes), (usize::from(count) + 1, 0));
        let is_used_again = bytes[file.len_bytes..].iter().any(|byte| *byte != 0);
        assert_eq!(is_used_again, count < 7, "{count}");
        std::fs::write(kept.log().join(name), bytes).unwrap();
        let copy = Arc::new(store.fork());
        assert_eq!(segments(&kept.open(&copy)), expected);
        place.pass(limits().upload_delay * 2);
    }
}

#[test]
fn a_pool_that_is_closed_in_order_is_uploaded() {
    let (store, place) = (with_superblock(), Place::new());
    let close_time = Duration::from_secs(10);
    let local = Some(LocalAcknowledgement { close_time, ..limits() });
    let settings = BucketSettings { local, ..settings() };
    let pool = place.open_with(&Connection::new(&store), settings).unwrap();
    (0..20).for_each(|number| write(&pool, 1, number).unwrap());
    let expected = segments(&pool);
    drop(pool);
    assert!(place.files().is_empty(), "{:?}", place.files());
    assert_eq!(elsewhere(&store), expected);

    // If the object store does not answer, the log keeps what it lacks.
    let connection = Connection::new(&store);
    let pool = place.open_with(&connection, settings).unwrap();
    connection.plan().cut_after = 0;
    write(&pool, 1, 99).unwrap();
    drop(pool);
    let mut newer = expected.clone();
    newer[1][99 % 16 * 1024..][..512].fill(99);
    assert_eq!(place.files().len(), 1);
    assert_eq!(elsewhere(&store), expected);
    assert_eq!(segments(&place.open(&store)), newer);
}

/// While the object store does not answer, syncs are acknowledged up to the limits. Then they wait,
/// and fail after the longest outage.
#[test]
fn writes_wait_at_the_limits_of_the_lag() {
    for waits_for_time in [false, true] {
        let (store, place) = (with_superblock(), Place::new());
        let connection = Connection::new(&store);
        let pool = place.open_with(&connection, settings()).unwrap();
        place.pass(Duration::from_secs(1));
        let old = elsewhere(&store);
        connection.plan().cut_after = 0;
        let (mut written, mut expected) = (0, old.clone());
        if waits_for_time {
            write(&pool, 0, 0).unwrap();
            expected = segments(&pool);
            place.pass(limits().lag_time_max + Duration::from_secs(1));
            assert!(pool.upload_status().is_waiting);
            written = 1;
        }
        let first = written;
        for number in first..200 {
            if write(&pool, usize::from(number) % 4, number).is_err() {
                break;
            }
            let lag = pool.lag();
            assert!(lag.bytes <= LAG_BYTES && lag.time <= limits().lag_time_max, "{lag:?}");
            (written, expected) = (number + 1, segments(&pool));
        }
        match waits_for_time {
            true => assert_eq!(written, 1),
            // Each write has 512 bytes, and a record in the batch.
            false => assert!((30..48).contains(&written), "{written}"),
        }
        assert!(pool.upload_status().waits > 0);
        assert_eq!(elsewhere(&store), old);
        drop(pool);
        // The last write was not acknowledged, and may be there or not.
        let found = segments(&place.open(&store));
        let (mut differs, all) = (0, found.iter().flatten().zip(expected.iter().flatten()));
        all.for_each(|(one, other)| differs += usize::from(one != other));
        assert!(differs <= 512, "{differs} bytes differ");
    }
}

/// The log lies on a disk that fails, or whose directory was removed.
#[test]
fn syncs_wait_for_the_object_store_if_the_log_cannot_be_written() {
    let (store, place) = (with_superblock(), Place::new());
    let pool = place.open(&store);
    std::fs::remove_dir_all(place.log()).unwrap();
    for number in 0..5 {
        write(&pool, 0, number).unwrap();
        assert_eq!(elsewhere(&store), segments(&pool));
    }
}

/// An opener elsewhere takes a pool without a superblock for an interrupted creation.
#[test]
fn the_creation_of_a_pool_is_acknowledged_by_the_object_store() {
    let store = formatted();
    let place = Place::new();
    let pool = place.open(&store);
    pool.remove("superblock").unwrap();
    pool.sync_names().unwrap();
    place.pass(Duration::from_secs(1));
    make_superblock(&pool).unwrap();
    let names = open_read_only(&store).unwrap().names().unwrap();
    assert!(names.contains(&"superblock".to_owned()), "{names:?}");
}

/// A machine with a log of several files stops. Returns its contents after each sync.
fn stopped(store: &Arc<InMemory>, place: &Place) -> Vec<Vec<Vec<u8>>> {
    let connection = Connection::new(store);
    let pool = place.open_with(&connection, settings()).unwrap();
    place.pass(Duration::from_secs(1));
    connection.plan().cut_after = 0;
    let mut after = vec![segments(&pool)];
    for number in 0..24 {
        write(&pool, usize::from(number) % 4, number).unwrap();
        after.push(segments(&pool));
    }
    assert!(place.files().len() > 1, "{:?}", place.files());
    after
}

#[test]
fn a_log_that_ends_anywhere_has_a_prefix() {
    let (origin, first) = (with_superblock(), Place::new());
    let after = stopped(&origin, &first);
    let files = first.files();
    let last = files.last().unwrap();
    let whole = std::fs::read(first.log().join(last)).unwrap();
    // The file can be new, or one that an earlier batch had.
    let used = std::fs::read(first.log().join(&files[0])).unwrap();
    assert!(used.len() > whole.len());
    for remains in [&[] as &[u8], &used[..]] {
        let mut found = Vec::new();
        for len in (0..=whole.len()).step_by(61).chain([whole.len()]) {
            let (store, place) = (Arc::new(origin.fork()), Place::new());
            for name in &files {
                std::fs::copy(first.log().join(name), place.log().join(name)).unwrap();
            }
            let bytes = [&whole[..len], remains.get(len..).unwrap_or_default()].concat();
            std::fs::write(place.log().join(last), bytes).unwrap();
            let contents = segments(&place.open(&store));
            let at = after.iter().position(|it| *it == contents);
            found.push(at.unwrap_or_else(|| panic!("{len} bytes of the last file give no prefix")));
        }
        assert!(found.is_sorted(), "{found:?}");
        found.dedup();
        assert!(found.len() > 4 && found.last() == Some(&(after.len() - 1)), "{found:?}");
    }
}

/// The power was cut between the renaming of a spare and the sync of its first group: the name of
/// the next batch has zeros, or an earlier batch.
#[test]
fn a_file_of_which_nothing_was_durable_has_nothing() {
    let (origin, first) = (with_superblock(), Place::new());
    let after = stopped(&origin, &first);
    let files = first.files();
    let (epoch, number) = id_of(files.last().unwrap());
    let name = |number| format!("{epoch:016x}-{number:016x}");
    let used = std::fs::read(first.log().join(&files[0])).unwrap();
    let place_with = |next: &[u8]| {
        let place = Place::new();
        for name in &files {
            std::fs::copy(first.log().join(name), place.log().join(name)).unwrap();
        }
        std::fs::write(place.log().join(name(number + 1)), next).unwrap();
        place
    };
    let open = |place: &Place| {
        let store = Arc::new(origin.fork());
        place.open_with(&Connection::new(&store), settings())
    };
    for next in [&[] as &[u8], &[0; 9000], &used[..HEAD_BYTES - 1], &used[..]] {
        let place = place_with(next);
        assert_eq!(segments(&open(&place).unwrap()), after[after.len() - 1]);
        assert_eq!(place.files(), [""; 0]);
        // A later file says that it had something.
        let place = place_with(next);
        let later = std::fs::read(place.log().join(&files[0])).unwrap();
        std::fs::write(place.log().join(name(number + 2)), later).unwrap();
        let error = open(&place).unwrap_err().to_string();
        assert!(error.contains("is damaged") && error.contains(&name(number + 1)), "{error}");
    }
    // The file before was complete when the last one got its name.
    let place = place_with(&[]);
    let before = place.log().join(files.last().unwrap());
    let mut bytes = std::fs::read(&before).unwrap();
    let whole = LogFile::parse(&bytes, (epoch, number), None).unwrap().unwrap();
    bytes[whole.len_bytes - 1] ^= 1;
    std::fs::write(&before, &bytes).unwrap();
    let torn = LogFile::parse(&bytes, (epoch, number), None).unwrap().unwrap();
    assert!(torn.torn_bytes > 0 && torn.records.len() + 1 == whole.records.len());
    let error = open(&place).unwrap_err().to_string();
    assert!(error.contains("is damaged at its end") && error.contains(&name(number)), "{error}");
    // Only files of earlier batches of the opener become spares.
    let file = LogFile::parse(&used, id_of(&files[0]), None).unwrap().unwrap();
    let mut head = file.head;
    head.header.number = number + 2;
    let error = open(&place_with(&head.print())).unwrap_err().to_string();
    assert!(error.contains("has number = "), "{error}");
}

#[test]
fn a_damaged_or_missing_file_and_one_of_another_pool_are_refused_by_name() {
    let (store, place) = (with_superblock(), Place::new());
    let after = stopped(&store, &place);
    let files = place.files();
    let path = place.log().join(&files[0]);
    let intact = std::fs::read(&path).unwrap();
    let refused = |why: &str| {
        let error = place.open_with(&Connection::new(&store), settings()).unwrap_err();
        assert!(matches!(&error, BucketError::LocalLog { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(&files[0]) && text.contains(why), "{text}");
    };
    let mut bad = intact.clone();
    bad[200] ^= 1;
    std::fs::write(&path, bad).unwrap();
    refused("is damaged");
    let file = LogFile::parse(&intact, id_of(&files[0]), None).unwrap().unwrap();
    // The last groups are missing: the file ends, or has what was in it before.
    for end in [HEAD_BYTES, file.len_bytes / 2, file.len_bytes - 1] {
        std::fs::write(&path, &intact[..end]).unwrap();
        refused("is damaged at its end, and a later file is there");
        for byte in [0, 7] {
            let mut bad = intact.clone();
            bad[end..].fill(byte);
            std::fs::write(&path, bad).unwrap();
            refused("is damaged at its end, and a later file is there");
        }
    }
    std::fs::write(&path, [&[0; 512], &intact[512..]].concat()).unwrap();
    refused("expected its magic number");
    let second = place.log().join(&files[1]);
    let next = std::fs::read(&second).unwrap();
    std::fs::write(&path, &intact).unwrap();
    std::fs::write(&second, [&[0; HEAD_BYTES], &next[HEAD_BYTES..]].concat()).unwrap();
    let error = place.open_with(&Connection::new(&store), settings()).unwrap_err().to_string();
    assert!(error.contains(&files[1]) && error.contains("expected its magic number"), "{error}");
    std::fs::write(&second, next).unwrap();
    let mut other = file.head;
    other.header.pool ^= 1;
    std::fs::write(&path, [&other.print(), &intact[HEAD_BYTES..]].concat()).unwrap();
    refused("belongs to another pool");
    std::fs::remove_file(&path).unwrap();
    refused("is missing");
    // Nothing was taken over, uploaded or removed.
    std::fs::write(&path, intact).unwrap();
    assert_eq!(place.files(), files);
    assert_eq!(segments(&place.open(&store)), after[after.len() - 1]);
}

/// An opener takes its epoch, and stops before it seals the older ones.
fn stop_before_the_seals(store: &Arc<InMemory>) {
    let connection = Connection::new(store);
    let cut = connection.clone();
    // The first PUT replaces the manifest.
    connection.plan().before_puts = Some(Arc::new(move || {
        let mut plan = cut.plan();
        plan.cut_after = plan.requests;
    }));
    let stopped = Place::new().open_with(&connection, settings());
    assert!(matches!(stopped, Err(BucketError::Request(_))), "{stopped:?}");
}

/// The manifest names another opener, but the log is not void: no seal is there. The mark of the
/// log in the manifest tells whose groups are in a file whose head is damaged.
#[test]
fn a_damaged_file_is_named_also_after_another_machine_has_taken_an_epoch() {
    let (store, place) = (with_superblock(), Place::new());
    let pool = place.open(&store);
    write(&pool, 0, 1).unwrap();
    let expected = segments(&pool);
    drop(pool);
    let files = place.files();
    assert_eq!(files.len(), 1);
    stop_before_the_seals(&store);
    let path = place.log().join(&files[0]);
    let intact = std::fs::read(&path).unwrap();
    std::fs::write(&path, [&[0; HEAD_BYTES], &intact[HEAD_BYTES..]].concat()).unwrap();
    let error = place.open_with(&Connection::new(&store), settings()).unwrap_err().to_string();
    assert!(error.contains(&files[0]) && error.contains("expected its magic number"), "{error}");
    std::fs::write(&path, intact).unwrap();
    assert_eq!(segments(&place.open(&store)), expected);
}

/// A reader on the machine with the log finds what it has, and changes nothing.
#[test]
fn a_reader_finds_what_the_log_of_its_machine_has() {
    let (store, place) = (with_superblock(), Place::new());
    let after = stopped(&store, &place);
    let (files, batches) = (place.files(), names(&store, "batch"));
    let client = ObjectClient::over(Arc::new(Connection::new(&store)), "pool", Retries::default());
    let reader = BucketStore::open_read_only_with(
        Arc::new(client),
        settings(),
        Some(place.log()),
        &place.runtime,
    );
    assert_eq!(segments(&reader.unwrap()), after[after.len() - 1]);
    assert_eq!(elsewhere(&store), after[0]);
    assert_eq!((place.files(), names(&store, "batch")), (files, batches));
}

/// Two copies of a bucket have the same pool. The log of an opener of one is not that of the other.
#[test]
fn a_log_of_a_copy_of_the_pool_is_refused_by_name() {
    let (store, place) = (with_superblock(), Place::new());
    let copy = Arc::new(store.fork());
    stopped(&copy, &place);
    let other = Place::new().open_with(&Connection::new(&store), settings()).unwrap();
    for is_later in [false, true] {
        let error = place.open_with(&Connection::new(&store), settings()).unwrap_err().to_string();
        let name = format!("-{:016x}`, a file of its local log, is of another opener", 0);
        assert!(error.contains(&name), "{error}");
        if !is_later {
            (0..20).for_each(|number| write(&other, 0, number).unwrap());
            drop(Place::new().open(&store));
        }
    }
}

fn id_of(name: &str) -> (u64, u64) {
    parse_name(name).unwrap()
}

/// Requests of the process that ended can arrive late. A batch that follows one of which the log
/// has only a part must not be replayed.
#[test]
fn a_late_batch_after_an_incomplete_one_is_ignored() {
    let (store, place) = (with_superblock(), Place::new());
    let connection = Connection::new(&store);
    let pool = place.open_with(&connection, settings()).unwrap();
    place.pass(Duration::from_secs(1));
    connection.plan().cut_after = 0;
    let epoch = pool.epoch();
    write(&pool, 0, 1).unwrap();
    let expected = segments(&pool);
    drop(pool);
    let name = place.files().pop().unwrap();
    let file = std::fs::read(place.log().join(&name)).unwrap();
    let mut header = LogFile::parse(&file, id_of(&name), None).unwrap().unwrap().head.header;
    header.number += 1;
    let mut late = vec![0; PAYLOAD_AT];
    late.extend_from_slice(&[9; 512]);
    let operation = BatchOperation::Write { offset: 0, len: 512 };
    let records = [BatchRecord { file: 0, operation }];
    batch::complete(&mut late, &header, (LaterBatches::Replayed, 0), &records);
    replace(&store, &ObjectId::batch(epoch, header.number).to_string(), late);

    for _ in 0..2 {
        assert_eq!(segments(&place.open(&store)), expected);
        assert_eq!(elsewhere(&store), expected);
    }
    let recovered = object(&store, &ObjectId::batch(epoch, header.number - 1).to_string());
    assert_eq!(Batch::parse(&recovered).unwrap().later, LaterBatches::Ignored);
}

/// Another machine has taken the pool over: what the log has is lost, and its files are kept.
#[test]
fn the_log_of_a_machine_that_was_taken_over_is_kept_aside() {
    for compacts in [false, true] {
        let (store, place) = (with_superblock(), Place::new());
        let after = stopped(&store, &place);
        let files = place.files();
        let other = Place::new();
        let short = if compacts { local_settings() } else { settings() };
        let second = other
            .open_with(&Connection::new(&store), BucketSettings { local: None, ..short })
            .unwrap();
        assert_eq!(segments(&second), after[0]);
        for number in 0..40 {
            write(&second, 0, number).unwrap();
        }
        let expected = segments(&second);
        let has_batches = names(&store, &format!("batch/{:016x}", second.epoch() - 1)).len();
        assert!(has_batches >= 1, "a seal is never removed");
        assert_eq!(segments(&place.open(&store)), expected, "compacts: {compacts}");
        let lost: Vec<String> =
            place.files().into_iter().filter(|name| name.starts_with("lost-")).collect();
        let wanted: Vec<String> = files.iter().map(|name| format!("lost-{name}")).collect();
        assert_eq!(lost, wanted);
        for name in &files {
            let kept = std::fs::read(place.log().join(format!("lost-{name}"))).unwrap();
            let file = LogFile::parse(&kept, id_of(name), None).unwrap().unwrap();
            assert_eq!(file.len_bytes, kept.len(), "it has what was in the file before");
        }
        assert_eq!(segments(&place.open(&store)), expected);
    }
}

/// A power cut after the upload can bring removed files back.
#[test]
fn files_of_batches_that_were_uploaded_are_removed_again() {
    for compacts in [false, true] {
        let (store, place) = (with_superblock(), Place::new());
        let after = stopped(&store, &place);
        let kept = Place::new();
        for name in place.files() {
            std::fs::copy(place.log().join(&name), kept.log().join(&name)).unwrap();
        }
        let short = if compacts { local_settings() } else { settings() };
        let pool = place
            .open_with(&Connection::new(&store), BucketSettings { local: None, ..short })
            .unwrap();
        assert_eq!(segments(&pool), after[after.len() - 1]);
        for number in 0..40 {
            write(&pool, 0, number).unwrap();
        }
        let expected = segments(&pool);
        drop(pool);
        for name in kept.files() {
            std::fs::copy(kept.log().join(&name), place.log().join(&name)).unwrap();
        }
        let pool = place.open(&store);
        assert_eq!(segments(&pool), expected);
        assert_eq!(place.files(), [""; 0], "they are removed");
    }
}

/// The settings of a pool whose orderly close uploads everything.
fn closing() -> BucketSettings {
    let close_time = Duration::from_secs(10);
    BucketSettings { local: Some(LocalAcknowledgement { close_time, ..limits() }), ..settings() }
}

fn missing_since_ms(pool: &BucketStore) -> Option<u64> {
    pool.upload_status().missing_since_ms
}

fn now_ms() -> u64 {
    u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap()
}

/// The machine that had the pool is lost with its log. The time since when writes may be missing
/// is between the end of the last batch that the object store has, and the first write after it.
#[test]
fn an_opening_without_the_log_says_since_when_writes_may_be_missing() {
    for (uploads, compacts) in [(0, false), (3, false), (20, true)] {
        let (store, place) = (with_superblock(), Place::new());
        let connection = Connection::new(&store);
        let short = if compacts { local_settings() } else { settings() };
        let begin = now_ms();
        let pool = place.open_with(&connection, short).unwrap();
        for number in 0..uploads {
            write(&pool, 0, number).unwrap();
            place.pass(limits().upload_delay * 2);
        }
        assert_eq!(pool.lag().batches, 0);
        connection.plan().cut_after = 0;
        let end = now_ms();
        write(&pool, 1, 1).unwrap();
        drop(pool);
        // Each opening says it until a compaction has removed the batches of that epoch.
        for _ in 0..2 {
            let object = BucketSettings { local: None, ..settings() };
            let other = Place::new().open_with(&Connection::new(&store), object).unwrap();
            let since = missing_since_ms(&other).expect("writes are missing");
            assert!((begin..=end).contains(&since), "{since} is not in {begin} to {end}");
        }
        // A compaction keeps no mark of the epoch that it has made part of the table.
        let compacting = BucketSettings { local: None, ..local_settings() };
        let other = Place::new().open_with(&Connection::new(&store), compacting).unwrap();
        (0..40).for_each(|number| write(&other, 0, number).unwrap());
        drop(other);
        assert_eq!(manifest(&store).logs, []);
        let later = Place::new().open(&store);
        assert_eq!(missing_since_ms(&later), None);
    }
}

#[test]
fn an_opening_with_the_log_says_nothing_and_neither_does_one_after_an_orderly_close() {
    let (store, place) = (with_superblock(), Place::new());
    stopped(&store, &place);
    // The log is uploaded, also by an opening that has none itself.
    let object = BucketSettings { local: None, ..settings() };
    let pool = place.open_with(&Connection::new(&store), object).unwrap();
    assert_eq!((missing_since_ms(&pool), manifest(&store).logs), (None, vec![]));
    drop(pool);
    let pool = place.open_with(&Connection::new(&store), closing()).unwrap();
    write(&pool, 0, 1).unwrap();
    assert_eq!(manifest(&store).logs.len(), 1);
    drop(pool);
    assert_eq!(manifest(&store).logs, []);
    assert_eq!(missing_since_ms(&Place::new().open(&store)), None);
}

/// A close that could not upload everything keeps the mark, and so does one of a pool that another
/// machine has taken over.
#[test]
fn a_close_without_the_uploads_keeps_the_mark() {
    let (store, place) = (with_superblock(), Place::new());
    let connection = Connection::new(&store);
    let pool = place.open_with(&connection, closing()).unwrap();
    connection.plan().cut_after = 0;
    write(&pool, 0, 1).unwrap();
    drop(pool);
    assert_eq!(manifest(&store).logs.len(), 1);

    let (first, second) = (Place::new(), Place::new());
    let pool = first.open_with(&Connection::new(&store), closing()).unwrap();
    let other = second.open(&store);
    drop(pool);
    let logs = manifest(&store).logs;
    assert!(logs.iter().any(|mark| mark.epoch == other.epoch()), "{logs:?}");
}

/// The mark is removed although the manifest was replaced by a compaction that the close has
/// stopped before its answer.
#[test]
fn a_close_during_a_compaction_removes_the_mark() {
    let (store, place) = (with_superblock(), Place::new());
    let connection = Connection::new(&store);
    let compacting = BucketSettings { compact_batches: 3, ..closing() };
    let pool = place.open_with(&connection, compacting).unwrap();
    connection.plan().slow_swaps = 1;
    for number in 0..3 {
        write(&pool, 0, number).unwrap();
        place.pass(limits().upload_delay * 2);
    }
    let before = manifest(&store);
    assert_eq!((before.replays[0].first, before.logs.len()), (3, 1));
    let expected = segments(&pool);
    drop(pool);
    assert_eq!(manifest(&store), Manifest { logs: vec![], changes: before.changes + 1, ..before });
    assert_eq!(elsewhere(&store), expected);
}
