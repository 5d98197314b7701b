//! The storage below the engine: files of a pool, written and read without the engine, so that a
//! test decides about each batch.

use std::io::ErrorKind;
use std::ops::Range;
use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockyard_object::{BucketError, BucketSettings, BucketStore, ObjectClient, Opening, Retries};
use blockyard_store::remote::is_unanswered;
use blockyard_store::{SegmentFiles as _, StoreFile as _, StoreLocation as _};
use blockyard_testing::seed::Seed;
use blockyard_volume_format::object::manifest::Manifest;
use blockyard_volume_format::segment_name;
use object_store::ObjectStoreExt as _;
use object_store::memory::InMemory;
use object_store::path::Path as ObjectPath;

use crate::connection::{Connection, Moment, pass};
use crate::machine::{formatted, open_store, runtime, settings};
use crate::recovery::objects;

pub(crate) const SEGMENT_BYTES: usize = 16 << 10;

/// No compaction begins with these.
pub(crate) fn idle() -> BucketSettings {
    BucketSettings {
        memory_bytes: 1 << 30,
        compact_bytes: 1 << 30,
        compact_batches: 1 << 30,
        ..settings()
    }
}

pub(crate) fn client(connection: &Connection) -> Arc<ObjectClient> {
    Arc::new(ObjectClient::over(Arc::new(connection.clone()), "pool", Retries::default()))
}

pub(crate) fn open(store: &Arc<InMemory>, settings: BucketSettings) -> BucketStore {
    open_at(&Connection::new(store), settings, None).unwrap()
}

pub(crate) fn open_at(
    connection: &Connection,
    settings: BucketSettings,
    cache: Option<&Path>,
) -> Result<BucketStore, BucketError> {
    let request = Opening { cache, take_over: true, ..Opening::default() };
    BucketStore::open(client(connection), settings, request, &runtime())
}

pub(crate) fn open_read_only(store: &Arc<InMemory>) -> Result<BucketStore, BucketError> {
    BucketStore::open_read_only(client(&Connection::new(store)), settings(), &runtime())
}

/// A store with a pool, whose files are this many segments.
pub(crate) fn with_segments(count: usize) -> Arc<InMemory> {
    let store = formatted();
    make_segments(&store, count);
    store
}

/// Replaces the files of a pool by this many segments.
pub(crate) fn make_segments(store: &Arc<InMemory>, count: usize) {
    let pool = open(store, idle());
    for name in pool.names().unwrap() {
        pool.remove(&name).unwrap();
    }
    for number in 0..count {
        pool.create("new", SEGMENT_BYTES as u64).unwrap();
        pool.rename("new", &segment_name(number)).unwrap();
    }
    pool.sync_names().unwrap();
}

/// Writes to four segments in turn, and syncs each write.
fn write_each(pool: &BucketStore, numbers: Range<u8>) {
    numbers.for_each(|number| write(pool, usize::from(number) % 4, number).unwrap());
}

/// Writes 512 bytes to a segment, in a batch of their own.
pub(crate) fn write(pool: &BucketStore, segment: usize, value: u8) -> std::io::Result<()> {
    let file = pool.open(&segment_name(segment))?.unwrap();
    let at = u64::from(value % 16) * 1024;
    file.write_at(at, &[&[value; 512]])?;
    file.sync()
}

/// The contents of all segments.
pub(crate) fn contents(pool: &BucketStore) -> Vec<Vec<u8>> {
    try_contents(pool).unwrap()
}

pub(crate) fn try_contents(pool: &BucketStore) -> std::io::Result<Vec<Vec<u8>>> {
    let mut names = pool.names().unwrap();
    names.sort();
    let read = |name: &String| {
        let mut bytes = vec![0; SEGMENT_BYTES];
        pool.open(name).unwrap().unwrap().read_at(0, &mut bytes)?;
        Ok(bytes)
    };
    names.iter().map(read).collect()
}

pub(crate) fn object(store: &Arc<InMemory>, name: &str) -> Vec<u8> {
    let path = ObjectPath::from(format!("pool/{name}"));
    runtime().block_on(async { store.get(&path).await.unwrap().bytes().await.unwrap() }).to_vec()
}

/// The names of the objects in a folder.
pub(crate) fn names(store: &Arc<InMemory>, folder: &str) -> Vec<String> {
    let listed = runtime().block_on(client(&Connection::new(store)).list(folder)).unwrap();
    listed.into_iter().map(|it| it.name).collect()
}

pub(crate) fn manifest(store: &Arc<InMemory>) -> Manifest {
    Manifest::parse(&object(store, "manifest")).unwrap()
}

/// A pool with more small batches between two compactions than one request removes.
#[test]
fn removals_keep_up_with_small_batches() {
    const BATCHES: usize = 2500;
    let store = with_segments(8);
    let settings = BucketSettings { compact_batches: BATCHES as u64, ..idle() };
    let pool = open(&store, settings);
    for number in 0..5 * BATCHES {
        write(&pool, number % 8, number as u8).unwrap();
    }
    let batches = objects(&store)["batch"];
    assert!(batches < 3 * BATCHES, "{batches} batches are left of {}", 5 * BATCHES);
    // Batches have consecutive numbers, so that they are few ranges.
    let ranges = manifest(&store).removals.len();
    assert!(ranges < 100, "the manifest has {ranges} ranges of objects to remove");
    assert_eq!(pool.left_objects(), 0);
}

/// What is acknowledged while a compaction runs is not copied by that one. The next one copies it,
/// also if the segment is not written again.
#[test]
fn compactions_free_the_memory_of_segments_that_are_not_written_again() {
    let store = with_segments(40);
    let mut random = Seed::from_env().rng(2);
    let connection = Connection::new(&store);
    connection.plan().random = Some(fastrand::Rng::with_seed(random.u64(..)));
    let pool = open_at(&connection, settings(), None).unwrap();
    for number in 0..200 {
        write(&pool, random.usize(1..40), number).unwrap();
    }
    for number in 0..100 {
        write(&pool, 0, number).unwrap();
    }
    // A compaction begins after 6 batches of at most 700 bytes, and as many come while it runs.
    let bytes = pool.batch_bytes_in_memory();
    assert!(bytes < 20 * 700, "{bytes} bytes of batches are in memory");
}

/// A pool with a segment of 16 MiB whose bytes are in four objects.
pub(crate) struct LongSegment {
    pub(crate) store: Arc<InMemory>,
    pub(crate) bytes: Vec<u8>,
}

impl LongSegment {
    pub(crate) fn settings() -> BucketSettings {
        let (batch_bytes, cache_bytes) = (4 << 20, 32 << 20);
        BucketSettings { batch_bytes, keep_bytes: 1 << 20, cache_bytes, ..idle() }
    }

    pub(crate) fn new() -> LongSegment {
        let bytes: Vec<u8> = (0..16 << 20).map(|at| (at / 512 % 251) as u8).collect();
        let segment = LongSegment { store: with_segments(0), bytes };
        let pool = segment.open(LongSegment::settings(), None);
        pool.create("new", segment.bytes.len() as u64).unwrap();
        pool.rename("new", &segment_name(0)).unwrap();
        let file = pool.open(&segment_name(0)).unwrap().unwrap();
        for (number, bytes) in segment.bytes.chunks(1 << 20).enumerate() {
            file.write_at((number as u64) << 20, &[bytes]).unwrap();
        }
        file.sync().unwrap();
        drop((file, pool));
        // More epochs than an opener replays without a compaction: the table names the objects.
        (0..9).for_each(|_| drop(segment.open(LongSegment::settings(), None)));
        segment
    }

    pub(crate) fn open(&self, settings: BucketSettings, cache: Option<&Path>) -> BucketStore {
        open_at(&Connection::new(&self.store), settings, cache).unwrap()
    }

    /// The second one of the objects.
    pub(crate) fn object(&self) -> String {
        let is_long = |name: &String| object(&self.store, name).len() > 4 << 20;
        names(&self.store, "batch").into_iter().filter(is_long).nth(1).unwrap()
    }
}

/// The requests and the bytes of a read of a segment.
fn read(segment: &LongSegment, pool: &BucketStore, at: usize, len: usize) -> (u64, u64) {
    let file = pool.open(&segment_name(0)).unwrap().unwrap();
    let (mut into, before) = (vec![0; len], pool.requests().get);
    file.read_at(at as u64, &mut into).unwrap();
    assert!(into == segment.bytes[at..at + len], "other bytes at {at}");
    let after = pool.requests().get;
    (after.requests - before.requests, after.bytes - before.bytes)
}

/// A stream reads more at once, the longer it is; a single read does not.
#[test]
fn reads_that_follow_each_other_share_requests() {
    const READ_LEN: usize = 64 << 10;
    let (segment, cache) = (LongSegment::new(), tempfile::tempdir().unwrap());
    let pool = segment.open(LongSegment::settings(), Some(cache.path()));
    let (requests, fetched) = read(&segment, &pool, 10 << 20, 4096);
    assert!(requests <= 2 && fetched < 300 << 10, "{requests} requests, {fetched} bytes");
    let (mut requests, mut fetched) = (0, 0);
    let len = segment.bytes.len();
    for at in (0..len).step_by(READ_LEN) {
        let of_read = read(&segment, &pool, at, READ_LEN);
        (requests, fetched) = (requests + of_read.0, fetched + of_read.1);
    }
    // Of each of the four objects the checksums and two parts, and the growing parts of the start.
    assert!(requests < 20, "{requests} requests for {} reads", len / READ_LEN);
    assert!(fetched < len as u64 * 9 / 8, "{fetched} bytes for {len}");
}

/// Regression: random reads of a segment passed for a stream, and each miss fetched 4 MiB.
#[test]
fn random_reads_of_one_segment_fetch_little() {
    let (segment, cache) = (LongSegment::new(), tempfile::tempdir().unwrap());
    // The reads are in one object, of which the cache has a quarter.
    let settings = BucketSettings { cache_bytes: 1 << 20, ..LongSegment::settings() };
    let pool = segment.open(settings, Some(cache.path()));
    let mut random = Seed::from_env().rng(7);
    let (mut misses, mut fetched) = (0, 0);
    for _ in 0..2000 {
        let at = (12 << 20) + random.usize(..1024) * 4096;
        let of_read = read(&segment, &pool, at, 4096);
        (misses, fetched) = (misses + of_read.0, fetched + of_read.1);
    }
    assert!(misses > 500, "{misses} misses");
    assert!(fetched / misses < 160 << 10, "{fetched} bytes for {misses} misses");
}

/// A read says nothing about writes.
#[test]
fn a_pool_goes_on_after_a_read_that_got_no_answer() {
    let segment = LongSegment::new();
    let connection = Connection::new(&segment.store);
    let pool = open_at(&connection, LongSegment::settings(), None).unwrap();
    let file = pool.open(&segment_name(0)).unwrap().unwrap();
    let mut into = [0; 512];
    connection.plan().is_off = Some(Box::new(|| true));
    let error = file.read_at(8 << 20, &mut into).unwrap_err();
    assert!(is_unanswered(&error) && error.to_string().contains("no success in"), "{error}");
    connection.plan().is_off = None;
    file.read_at(8 << 20, &mut into).unwrap();
    file.sync().unwrap();
}

/// The memory limit is the only reason for compactions.
#[test]
fn a_writer_that_waits_for_memory_goes_on_after_a_compaction() {
    const MEMORY_BYTES: u64 = 8 << 10;
    let store = with_segments(4);
    let limited = BucketSettings { memory_bytes: MEMORY_BYTES, ..idle() };
    let pool = open(&store, limited);
    for number in 0..200 {
        write(&pool, usize::from(number) % 4, number).unwrap();
        let bytes = pool.batch_bytes_in_memory();
        assert!(bytes < MEMORY_BYTES + 1024, "{bytes} bytes of batches are in memory");
    }
    drop(pool);
    // The batches that an opener replays take memory, too: more than the limit from the beginning.
    let pool = open(&store, idle());
    write_each(&pool, 0..40);
    let expected = contents(&pool);
    let pool = open(&store, limited);
    assert_eq!(contents(&pool), expected);
    write(&pool, 0, 1).unwrap();
    let bytes = pool.batch_bytes_in_memory();
    assert!(bytes < MEMORY_BYTES + 1024, "{bytes} bytes of batches are in memory");
}

#[test]
fn a_reader_has_what_is_durable_and_changes_nothing() {
    let store = with_segments(4);
    let pool = open(&store, idle());
    // The first batch of the newest epoch is durable: a reader has no open batch of that number.
    for number in 1..9 {
        write(&pool, usize::from(number) % 4, number).unwrap();
        let reader = open_read_only(&store).unwrap();
        assert_eq!(contents(&reader), contents(&pool));
    }
    let before = (objects(&store), manifest(&store));
    let reader = open_read_only(&store).unwrap();
    let refused = ErrorKind::ReadOnlyFilesystem;
    assert_eq!(reader.remove(&segment_name(0)).unwrap_err().kind(), refused);
    assert_eq!(reader.create("new", 512).map(drop).unwrap_err().kind(), refused);
    assert_eq!(reader.rename("new", &segment_name(0)).unwrap_err().kind(), refused);
    assert_eq!(reader.sync_names().unwrap_err().kind(), refused);
    let file = reader.open(&segment_name(1)).unwrap().unwrap();
    assert_eq!(file.write_at(0, &[&[1]]).unwrap_err().kind(), refused);
    reader.discard(&file);
    assert_eq!(contents(&reader), contents(&pool));
    assert_eq!((objects(&store), manifest(&store)), before);
    // The writer has noticed nothing.
    write(&pool, 0, 99).unwrap();
}

/// The writer compacts the pool and removes what the reader's manifest names, before the reader has
/// read it.
#[test]
fn a_reader_begins_again_if_the_writer_removes_what_it_needs() {
    for moment in [Moment::After(1), Moment::Before(3), Moment::Before(5), Moment::Before(8)] {
        let store = with_segments(4);
        let pool = open(&store, idle());
        write_each(&pool, 0..10);
        drop(pool);
        let writer = open(&store, settings());
        write(&writer, 0, 1).unwrap();
        let connection = Connection::new(&store);
        let expected = Arc::new(Mutex::new(None));
        let result = Arc::clone(&expected);
        let run = move || {
            write_each(&writer, 10..60);
            *result.lock().unwrap() = Some(contents(&writer));
        };
        connection.plan().hook = Some((moment, Box::new(run)));
        let reader = BucketStore::open_read_only(client(&connection), settings(), &runtime());
        let found = contents(&reader.unwrap());
        assert_eq!(Some(found), expected.lock().unwrap().take(), "{moment:?}");
    }
}

/// Regression: a reader found the first batch of an epoch, and not the last one of the epoch
/// before, which its writer had created after the reader had looked for it, and before the seal.
#[test]
fn a_reader_finds_no_batch_without_those_before_it() {
    let (mut with_late, mut with_both) = (0, 0);
    for number in 1.. {
        let store = with_segments(2);
        let writer = open(&store, idle());
        write(&writer, 0, 1).unwrap();
        // The next opener has taken its epoch, by its first PUT, and seals the writer's later.
        let ((taken, is_taken), (go_on, goes_on)) = (channel(), channel::<()>());
        let connection = Connection::new(&store);
        let puts = Mutex::new((0, taken, goes_on));
        connection.plan().before_puts = Some(Arc::new(move || {
            let (count, taken, goes_on) = &mut *puts.lock().unwrap();
            *count += 1;
            if *count == 2 {
                taken.send(()).unwrap();
                _ = goes_on.recv();
            }
        }));
        let opener = std::thread::spawn(move || {
            let pool = open_at(&connection, idle(), None).unwrap();
            write(&pool, 1, 2).unwrap();
            pool
        });
        is_taken.recv().unwrap();
        let reading = Connection::new(&store);
        let run = move || {
            write(&writer, 0, 3).unwrap();
            go_on.send(()).unwrap();
            opener.join().unwrap();
        };
        reading.plan().hook = Some((Moment::Before(number), Box::new(run)));
        let reader = BucketStore::open_read_only(client(&reading), settings(), &runtime()).unwrap();
        let found = contents(&reader);
        let has = |segment: usize, value: u8| found[segment][usize::from(value) * 1024] == value;
        assert!(has(0, 1) && (has(0, 3) || !has(1, 2)), "the writer's batch, request {number}");
        with_late += usize::from(has(0, 3));
        with_both += usize::from(has(1, 2));
        if reading.plan().hook.is_some() {
            break;
        }
    }
    assert!(with_late > 1 && with_both > 1, "{with_late} {with_both}");
}

/// The writer compacts the pool, and removes a batch that an opener needs, each time the opener
/// reads.
#[test]
fn an_opener_looks_at_a_pool_twice_at_most_before_it_takes_it() {
    let store = with_segments(4);
    let writer = open(&store, idle());
    write_each(&writer, 0..40);
    let name = format!("batch/{:016x}/{:016x}", writer.epoch(), 5);
    drop(writer);
    remove(&store, &name);
    let gets = |compacts: bool| {
        let copy = Arc::new(store.fork());
        let connection = Connection::new(&copy);
        let change = move || {
            let copy = Arc::clone(&copy);
            let change = move || {
                let Manifest { changes, .. } = manifest(&copy);
                let new = Manifest { changes: changes + 1, ..manifest(&copy) };
                replace(&copy, "manifest", new.print());
            };
            std::thread::spawn(change).join().unwrap();
        };
        if compacts {
            connection.plan().before_gets = Some(Arc::new(change));
        }
        let (client, request) =
            (client(&connection), Opening { take_over: true, ..Opening::default() });
        let opened = BucketStore::open(Arc::clone(&client), idle(), request, &runtime());
        let error = opened.unwrap_err().to_string();
        assert!(error.starts_with(&format!("`{name}` is missing")), "{error}");
        client.requests().get.requests
    };
    // Two looks, and the replay.
    let (one, all) = (gets(false), gets(true));
    assert!(one > 17 && all < 4 * one, "{one} and {all} requests");
}

/// The bug: a compaction kept the cache after its pool was closed.
#[test]
fn a_pool_is_opened_again_although_a_compaction_waits_for_the_store() {
    let store = with_segments(4);
    let folder = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let open = |connection: &Connection| {
        let cache = Some(folder.path());
        let request = Opening { cache, take_over: true, ..Opening::default() };
        BucketStore::open(client(connection), settings(), request, &runtime)
    };
    let connection = Connection::new(&store);
    let pool = open(&connection).unwrap();
    let mut written = 0;
    // The batch of each write is uploaded. What follows it, a compaction at last, gets no answer.
    for number in 1..=20 {
        let requests = connection.plan().requests;
        connection.plan().cut_after = requests + 1;
        if write(&pool, 0, number).is_err() {
            break;
        }
        written = number;
        // Lets the tasks run until they wait.
        runtime.block_on(pass(Duration::from_millis(1)));
        if connection.plan().requests > requests + 1 {
            break;
        }
    }
    assert!((1..20).contains(&written), "no compaction begins");
    drop(pool);
    let again = open(&Connection::new(&store)).unwrap();
    assert_eq!(contents(&again)[0][usize::from(written) % 16 * 1024], written);
}

/// The bug: a check took what the writer's compaction had removed for damage.
#[test]
fn a_reader_says_that_the_writer_has_removed_what_it_reads() {
    let store = with_segments(4);
    let writer = open(&store, settings());
    write_each(&writer, 0..40);
    let reader = open_read_only(&store).unwrap();
    let read = |segment| {
        let file = reader.open(&segment_name(segment)).unwrap().unwrap();
        let mut bytes = vec![0; SEGMENT_BYTES];
        file.read_at(0, &mut bytes)
    };
    assert!((0..4).all(|segment| read(segment).is_ok()));
    write_each(&writer, 0..200);
    let errors: Vec<String> =
        (0..4).filter_map(|segment| read(segment).err()).map(|it| it.to_string()).collect();
    assert!(!errors.is_empty(), "no object was removed");
    assert!(errors.iter().all(|it| it.contains("changes while it is read")), "{errors:?}");
    assert!(reader.check_location().is_err());
}

#[test]
fn a_path_without_a_pool_is_named_and_nothing_is_made() {
    let store = Arc::new(InMemory::new());
    for opened in [open_read_only(&store), open_at(&Connection::new(&store), settings(), None)] {
        let error = opened.unwrap_err();
        assert!(matches!(&error, BucketError::NoPool { .. }), "{error}");
    }
    assert!(objects(&store).is_empty());
}

/// Opens a pool that no other process may have open, or makes one.
pub(crate) fn open_alone(
    connection: &Connection,
    capacity_bytes: u64,
) -> Result<BucketStore, BucketError> {
    let capacity_bytes = Some(capacity_bytes);
    let request = Opening { capacity_bytes, ..Opening::default() };
    BucketStore::open(client(connection), settings(), request, &runtime())
}

/// Makes the superblock durable.
pub(crate) fn make_superblock(pool: &BucketStore) -> std::io::Result<()> {
    pool.create("new", 512)?;
    pool.rename("new", "superblock")?;
    pool.sync_names()
}

/// The bug: "no pool" was checked before the preflight, which takes seconds. A pool that another
/// opener made meanwhile was taken over without consent.
#[test]
fn a_pool_that_is_made_at_any_request_of_an_opener_is_not_taken_over() {
    let formatted = formatted();
    let mut count = 0;
    for number in 1.. {
        let store = Arc::new(InMemory::new());
        let connection = Connection::new(&store);
        let other = Arc::new(Mutex::new(None));
        let (result, into, from) = (Arc::clone(&other), Arc::clone(&store), formatted.clone());
        let run = move || {
            // If this opener has made its pool, the other one finds it.
            if !objects(&into).contains_key("manifest") {
                for name in names(&from, "") {
                    replace(&into, &name, object(&from, &name));
                }
            }
            let pool = open_store(&Connection::new(&into), None).unwrap();
            make_superblock(&pool).unwrap();
            *result.lock().unwrap() = Some(pool);
        };
        connection.plan().hook = Some((Moment::Before(number), Box::new(run)));
        let opened = open_alone(&connection, 64 << 20);
        let Some(other) = other.lock().unwrap().take() else { break };
        count += 1;
        let still_writes = make_superblock(&other);
        assert!(still_writes.is_ok(), "request {number}: {opened:?} ended the other opener");
    }
    assert!(count > 10, "{count} requests");
}

#[test]
fn an_interrupted_creation_can_be_repeated_with_another_capacity() {
    let store = Arc::new(InMemory::new());
    let connection = Connection::new(&store);
    let error = open_alone(&connection, 1 << 20).unwrap_err().to_string();
    assert!(error.starts_with("invalid pool_size `1048576`: expected 67108864 bytes"), "{error}");
    assert!(objects(&store).is_empty(), "a refused creation leaves objects");

    let first = open_alone(&connection, 1 << 40).unwrap();
    let error = open_read_only(&store).map(|pool| pool.names().unwrap());
    assert!(error.is_ok_and(|names| names.is_empty()));
    // The first maker might still run: it gets an error.
    let second = open_alone(&connection, 64 << 20).unwrap();
    assert!(make_superblock(&first).is_err());
    assert_eq!(manifest(&store).capacity_bytes, 64 << 20);
    make_superblock(&second).unwrap();

    let third = open_alone(&connection, 64 << 20);
    assert!(matches!(third, Err(BucketError::MayBeOpen { .. })), "{third:?}");
    make_superblock(&second).unwrap();
}

/// The cache is opened before the pool is taken over.
#[test]
fn a_cache_that_cannot_be_used_does_not_end_the_writer() {
    let store = with_segments(1);
    let folder = tempfile::tempdir().unwrap();
    let connection = Connection::new(&store);
    let pool = open_at(&connection, settings(), Some(folder.path())).unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "no directory").unwrap();
    for cache in [folder.path(), &file] {
        let refused = open_at(&Connection::new(&store), settings(), Some(cache));
        assert!(matches!(refused, Err(BucketError::Store(_))), "{refused:?}");
        write(&pool, 0, 1).unwrap();
    }
}

/// The writer compacts the pool, and replaces the manifest, while another machine takes it over.
#[test]
fn a_pool_is_taken_over_from_a_writer_that_compacts_it() {
    for is_late in [false, true] {
        let store = with_segments(4);
        let writer = open(&store, settings());
        let epoch = writer.epoch();
        let expected = Arc::new(Mutex::new(None));
        let (result, other) = (Arc::clone(&expected), Arc::clone(&store));
        let run = move || {
            let changes = manifest(&other).changes;
            write_each(&writer, 0..60);
            assert!(manifest(&other).changes > changes, "no compaction");
            *result.lock().unwrap() = Some((contents(&writer), writer));
        };
        let connection = Connection::new(&store);
        match is_late {
            // The first request reads the manifest, and the next ones read what it names.
            false => connection.plan().hook = Some((Moment::Before(2), Box::new(run))),
            // The first PUT replaces the manifest.
            true => call_before_first_put(&connection, run),
        }
        let pool = open_at(&connection, settings(), None).unwrap();
        let (found, writer) = expected.lock().unwrap().take().unwrap();
        assert_eq!(pool.epoch(), epoch + 1);
        assert!(contents(&pool) == found, "other contents, {is_late}");
        let error = write(&writer, 0, 1).unwrap_err().to_string();
        assert!(error.contains("another opener has taken over the pool"), "{error}");
    }
}

/// Calls a function on a thread of its own, which has another runtime, before the first PUT.
pub(crate) fn call_before_first_put(connection: &Connection, call: impl FnOnce() + Send + 'static) {
    let call = Mutex::new(Some(call));
    connection.plan().before_puts = Some(Arc::new(move || {
        let due = call.lock().unwrap().take();
        if let Some(call) = due {
            std::thread::spawn(call).join().unwrap();
        }
    }));
}

/// Plain writes may be lost, as with a disk that has a volatile cache: a machine that another one
/// has fenced takes them until it notices. It acknowledges no sync, so no flush and no write with
/// FUA.
#[test]
fn a_fenced_machine_takes_plain_writes_and_acknowledges_no_sync() {
    let store = with_segments(1);
    let first = open(&store, idle());
    write(&first, 0, 1).unwrap();
    let second = open(&store, idle());
    let file = first.open(&segment_name(0)).unwrap().unwrap();
    file.write_at(0, &[&[7; 512]]).unwrap();
    for _ in 0..2 {
        let error = file.sync().unwrap_err().to_string();
        assert!(error.contains("another opener has taken over the pool"), "{error}");
        // The machine has noticed.
        assert!(file.write_at(0, &[&[7; 512]]).is_err());
        assert!(file.read_at(0, &mut [0; 512]).is_err());
    }
    let mut expected = vec![0; SEGMENT_BYTES];
    expected[1024..1536].fill(1);
    assert_eq!(contents(&second), [expected]);
}

/// Each opening adds an epoch to the manifest, until one compacts the pool.
#[test]
fn openings_without_writes_leave_few_epochs_to_replay() {
    let store = with_segments(2);
    for number in 0..40 {
        let pool = open(&store, idle());
        assert_eq!(contents(&pool), vec![vec![0; SEGMENT_BYTES]; 2]);
        let epochs = manifest(&store).replays.len();
        assert!(epochs <= 9, "{epochs} after {number} openings");
    }
}

#[test]
fn objects_are_removed_after_the_delay_and_not_before() {
    let store = with_segments(4);
    let hour = Duration::from_secs(3600);
    let pool = open(&store, BucketSettings { removal_delay: hour, ..settings() });
    let before = objects(&store)["batch"];
    write_each(&pool, 0..60);
    assert_eq!(objects(&store)["batch"], before + 60);
    let waiting: u32 = manifest(&store).removals.iter().map(|it| it.count).sum();
    assert!(waiting > 40, "{waiting} objects are to be removed");
    drop(pool);
    let pool = open(&store, settings());
    write_each(&pool, 0..20);
    let after = objects(&store)["batch"];
    assert!(after < 40, "{after} batches of {}", before + 80);
}

/// A part of the table in the place of a newer one is intact, and has another number.
#[test]
fn a_part_of_the_table_of_another_place_is_refused() {
    let store = with_segments(2);
    let pool = open(&store, BucketSettings { removal_delay: Duration::MAX, ..settings() });
    let part = || manifest(&store).parts[0].unwrap();
    write(&pool, 0, 1).unwrap();
    let mut parts = Vec::new();
    for number in 0..60 {
        write(&pool, 1, number).unwrap();
        parts.push(part());
    }
    drop(pool);
    parts.dedup();
    let (older, newest) = (parts[parts.len() - 2].to_string(), part().to_string());
    replace(&store, &newest, object(&store, &older));
    let error = open_read_only(&store).unwrap_err().to_string();
    assert!(error.starts_with(&format!("`{newest}` belongs to another pool")), "{error}");
}

/// The bug: `serve` with `pool_size` made an empty pool in the place of one without a manifest.
#[test]
fn a_pool_without_its_manifest_is_not_taken_for_an_empty_place() {
    let store = with_segments(2);
    let before = objects(&store);
    remove(&store, "manifest");
    let error = open_alone(&Connection::new(&store), 64 << 20).unwrap_err().to_string();
    let expected = "cannot make a pool in `pool`: it has `batch/";
    assert!(error.starts_with(expected) && error.contains("and no manifest"), "{error}");
    assert_eq!(objects(&store).len() + 1, before.len(), "a refused creation changes objects");
    for left in ["lease", "segment/0/1", "table/0/1"] {
        let store = Arc::new(InMemory::new());
        replace(&store, left, Vec::new());
        let error = open_alone(&Connection::new(&store), 64 << 20).unwrap_err().to_string();
        assert!(error.contains(&format!("it has `{left}`, and no manifest")), "{error}");
    }
    // Neither what an interrupted preflight has left nor a file nor another pool is this pool.
    let store = Arc::new(InMemory::new());
    for other in ["preflight/0/1", "README", "other/manifest", "other/batch/0/1", "batches"] {
        replace(&store, other, vec![1]);
    }
    open_alone(&Connection::new(&store), 64 << 20).unwrap();
}

pub(crate) fn remove(store: &Arc<InMemory>, name: &str) {
    let path = ObjectPath::from(format!("pool/{name}"));
    runtime().block_on(store.delete(&path)).unwrap();
}

pub(crate) fn replace(store: &Arc<InMemory>, name: &str, bytes: Vec<u8>) {
    let path = ObjectPath::from(format!("pool/{name}"));
    runtime().block_on(store.put(&path, bytes.into())).unwrap();
}

/// What is damaged in the object store does not come into the cache: once the object is restored,
/// reads return it.
#[test]
fn a_damaged_object_is_named_and_not_cached() {
    let store = with_segments(2);
    let pool = open(&store, settings());
    for number in 0..30 {
        write(&pool, 0, number).unwrap();
    }
    drop(pool);
    // More epochs than an opener replays without a compaction: no bytes are in memory.
    (0..9).for_each(|_| drop(open(&store, idle())));
    let folder = tempfile::tempdir().unwrap();
    let connection = Connection::new(&store);
    let pool = open_at(&connection, idle(), Some(folder.path())).unwrap();
    let expected = contents(&open_read_only(&store).unwrap());
    let names = names(&store, "segment");
    let intact: Vec<Vec<u8>> = names.iter().map(|name| object(&store, name)).collect();
    for (name, bytes) in names.iter().zip(&intact) {
        let mut bad = bytes.clone();
        bad[100] ^= 1;
        replace(&store, name, bad);
    }
    let read = || {
        let mut bytes = vec![0; SEGMENT_BYTES];
        let file = pool.open(&segment_name(0)).unwrap().unwrap();
        file.read_at(0, &mut bytes).map(|()| bytes)
    };
    let error = read().map(drop).unwrap_err().to_string();
    assert!(error.contains("is damaged in the object store: "), "{error}");
    names.iter().zip(intact).for_each(|(name, bytes)| replace(&store, name, bytes));
    assert_eq!(read().unwrap(), expected[0]);
    assert_eq!(read().unwrap(), expected[0]);
    let (hits, _) = pool.cache_hits_and_misses();
    assert!(hits > 0, "the cache has nothing");
}

/// A compaction reads long batches to copy a segment with many extents. It leaves extents of a
/// damaged batch where they are.
#[test]
fn a_compaction_does_not_copy_damaged_bytes() {
    let store = with_segments(2);
    let long = BucketSettings { keep_bytes: 0, ..idle() };
    let pool = open(&store, long);
    let file = pool.open(&segment_name(0)).unwrap().unwrap();
    for number in 0..100 {
        file.write_at(128 * number, &[&[number as u8 + 1; 64]]).unwrap();
        file.sync().unwrap();
    }
    let expected = contents(&pool);
    let name = format!("batch/{:016x}/{:016x}", pool.epoch(), 50);
    drop((file, pool));
    let connection = Connection::new(&store);
    let pool = open_at(&connection, BucketSettings { compact_batches: 1, ..long }, None).unwrap();
    // The replay has found the object intact.
    let intact = object(&store, &name);
    let mut bad = intact.clone();
    bad[110] ^= 1;
    replace(&store, &name, bad);
    let before = manifest(&store).changes;
    for number in 0..10 {
        write(&pool, 1, number).unwrap();
    }
    assert!(manifest(&store).changes > before, "no compaction");
    let copied = names(&store, "segment");
    assert!(!copied.is_empty(), "nothing was copied");
    let mut bytes = [0; 64];
    let file = pool.open(&segment_name(0)).unwrap().unwrap();
    let error = file.read_at(128 * 50, &mut bytes).unwrap_err().to_string();
    assert!(error.contains("is damaged in the object store: "), "{error}");
    replace(&store, &name, intact);
    assert_eq!(contents(&pool)[0], expected[0]);
}
