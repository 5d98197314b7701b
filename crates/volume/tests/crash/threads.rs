//! A pool with all its threads: the committer, a checkpoint thread that also cleans, and a thread
//! that makes segments. Only writes that need space wait for these threads.
#![allow(clippy::disallowed_types)] // Test code.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use blockyard_core::Status;
use blockyard_store::Mirror;
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::seed::Seed;
use blockyard_testing::simulated_store::{FaultPlan, Operation, SimulatedStore, When};
use blockyard_volume::handle::{Outcome, VolumeHandle};
use blockyard_volume::{Compression, Running};
use blockyard_volume_format::catalogue::{Change, VolumeMeta};

use crate::fixture::{Blocks, Shape, Store, format, read};

type Pool = Arc<Running<Store>>;

/// Polls for an event that is not signalled: their number, and the time between two of them.
const LOOKS: usize = 3000;
const LOOK: Duration = Duration::from_millis(10);

fn shape(segments_max: usize) -> Shape {
    let mut shape = Shape::tiny();
    (shape.block_bytes, shape.blocks) = (2048, 600);
    shape.options.segment_bytes = 32 << 10;
    shape.options.segments_max = segments_max;
    shape
}

fn start(shape: &Shape) -> (SimulatedStore, Pool) {
    let directory = SimulatedDirectory::default();
    format(&directory, shape);
    let store = SimulatedStore::new(&directory);
    let running = Running::start(Mirror::single(store.clone(), "pool"), shape.options).unwrap();
    (store, running)
}

/// While this exists, the maintenance threads of a pool wait before each operation.
struct Closed(Arc<(Mutex<bool>, Condvar)>);

impl Closed {
    fn new(store: &SimulatedStore) -> Closed {
        let gate = Arc::new((Mutex::new(true), Condvar::new()));
        let closed = Closed(Arc::clone(&gate));
        store.set_hook(move |_| {
            let waits = ["volume-checkpoint", "volume-segments"];
            if std::thread::current().name().is_some_and(|name| waits.contains(&name)) {
                let (is_closed, opened) = &*gate;
                let guard = is_closed.lock().unwrap();
                drop(opened.wait_while(guard, |is_closed| *is_closed).unwrap());
            }
        });
        closed
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        let (is_closed, opened) = &*self.0;
        *is_closed.lock().unwrap() = false;
        opened.notify_all();
    }
}

fn handle(running: &Pool) -> VolumeHandle<Store> {
    VolumeHandle::open(running.pool(), running.pool().find("v").unwrap(), Compression::None, 256)
        .unwrap()
}

/// Starts a write of part of a block.
fn begin(handle: &mut VolumeHandle<Store>, at: u64, len: usize, word: u32, token: u32) {
    let fill = |_: usize, into: &mut [u8]| {
        into.chunks_mut(4).for_each(|part| part.copy_from_slice(&word.to_le_bytes()));
    };
    while handle.write(at, len, &fill, token, false) != Outcome::Taken {
        std::thread::yield_now();
    }
}

/// Waits for a reply.
fn answer(handle: &mut VolumeHandle<Store>) -> (u32, Status) {
    loop {
        match handle.take() {
            Some(reply) => return (reply.token, reply.status),
            None => handle
                .completion_queue()
                .event_count()
                .sleep(Duration::from_millis(50), || handle.is_any()),
        }
    }
}

fn write(handle: &mut VolumeHandle<Store>, block: u64, word: u32) -> Status {
    begin(handle, block * 2048, 2048, word, 1);
    answer(handle).1
}

fn flush(handle: &mut VolumeHandle<Store>) {
    assert!(handle.flush(2) == Outcome::Taken);
    assert_eq!(answer(handle), (2, Status::Ok));
}

fn discard(handle: &mut VolumeHandle<Store>, block: u64, count: u64) {
    assert!(handle.zero(block * 2048, count * 2048, 3, false) == Outcome::Taken);
    assert_eq!(answer(handle), (3, Status::Ok));
}

/// Writes until a write is refused for lack of space.
fn fill(handle: &mut VolumeHandle<Store>) {
    let mut blocks = (0..600).cycle();
    while write(handle, blocks.next().unwrap(), 1).is_ok() {}
}

/// Fills a pool, discards a little, and writes until a write waits for space. That write is then
/// pending, and gets no space before the gate is opened.
fn until_one_waits(
    store: &SimulatedStore,
    running: &Pool,
) -> (VolumeHandle<Store>, VolumeHandle<Store>, Closed) {
    let (mut waiting, mut other) = (handle(running), handle(running));
    fill(&mut waiting);
    discard(&mut waiting, 0, 4);
    for _ in 0..1000 {
        let closed = Closed::new(store);
        begin(&mut waiting, 5 * 2048, 1024, 7, 1);
        flush(&mut other);
        let Some(reply) = waiting.take() else { return (waiting, other, closed) };
        // Making space may need a checkpoint, which the gate would block.
        drop(closed);
        match reply.status {
            Status::NoSpc => discard(&mut other, 0, 1),
            status => assert_eq!(status, Status::Ok),
        }
    }
    panic!("none waits: {:?}", running.pool().counts());
}

/// Regression: all later records waited together with a write that waited for space.
#[test]
fn nothing_waits_with_a_write_for_which_there_is_no_space() {
    let (store, running) = start(&shape(24));
    let (mut waiting, mut other, closed) = until_one_waits(&store, &running);
    for _ in 0..10 {
        flush(&mut other);
    }
    assert!(waiting.take().is_none());
    drop(closed);
    assert_eq!(answer(&mut waiting), (1, Status::Ok));
}

/// Writes and discards of a block keep their order while the first one waits. The second write
/// copies the other half of the block from the first, which is pending.
#[test]
fn a_request_that_overlaps_a_waiting_write_waits_for_it() {
    let (store, running) = start(&shape(24));
    let (mut third, mut last) = (handle(&running), handle(&running));
    let (mut waiting, mut other, closed) = until_one_waits(&store, &running);
    begin(&mut other, 5 * 2048 + 1024, 1024, 9, 4);
    assert!(third.zero(4 * 2048, 3 * 2048, 5, false) == Outcome::Taken);
    begin(&mut third, 6 * 2048 + 512, 512, 8, 6);
    flush(&mut last);
    assert!(waiting.take().is_none() && other.take().is_none() && third.take().is_none());
    drop(closed);
    assert_eq!(answer(&mut waiting), (1, Status::Ok));
    assert_eq!(answer(&mut other), (4, Status::Ok));
    assert_eq!((answer(&mut third), answer(&mut third)), ((5, Status::Ok), (6, Status::Ok)));
    let mut found = Vec::new();
    assert!(last.read(4 * 2048, 3 * 2048, |part| found.extend_from_slice(part)).is_ok());
    let mut wanted = vec![0; 3 * 2048];
    let words = wanted[2 * 2048 + 512..][..512].chunks_mut(4);
    words.for_each(|word| word.copy_from_slice(&8_u32.to_le_bytes()));
    assert!(found == wanted);
}

/// Closing a pool ends its search for space.
#[test]
fn a_write_that_waits_is_answered_when_the_pool_is_closed() {
    let (store, running) = start(&shape(24));
    let (mut waiting, other, closed) = until_one_waits(&store, &running);
    drop(other);
    let closing = std::thread::spawn(move || drop(running));
    let (_, status) = answer(&mut waiting);
    assert!(matches!(status, Status::Ok | Status::NoSpc), "{status}");
    drop(closed);
    closing.join().unwrap();
}

/// Regression: closing a device waited for its writes as long as the search for space lasted.
#[test]
fn a_device_that_is_closed_does_not_wait_for_space() {
    let (store, running) = start(&shape(24));
    let (waiting, _other, closed) = until_one_waits(&store, &running);
    let closing = std::thread::spawn(move || drop(waiting));
    for _ in 0..LOOKS {
        if closing.is_finished() {
            break;
        }
        std::thread::park_timeout(LOOK);
    }
    assert!(closing.is_finished(), "it waits");
    drop(closed);
    closing.join().unwrap();
}

/// Regression: writes that no client asked to be durable were not synced during a search for space.
#[test]
fn writes_during_a_search_for_space_become_durable() {
    let (store, running) = start(&shape(24));
    let (mut waiting, mut other, closed) = until_one_waits(&store, &running);
    discard(&mut other, 20, 1);
    let syncs = || running.pool().activity().syncs;
    let before = syncs();
    for _ in 0..LOOKS {
        if syncs() > before {
            break;
        }
        std::thread::park_timeout(LOOK);
    }
    assert!(waiting.take().is_none());
    assert!(syncs() > before, "it is not durable");
    drop(closed);
    assert_eq!(answer(&mut waiting), (1, Status::Ok));
}

/// Regression: the committer made segments itself if the thread that makes them was slower than the
/// writes.
#[test]
fn a_flush_does_not_wait_for_segments_that_are_made() {
    let (store, running) = start(&shape(1000));
    let (mut waiting, mut other) = (handle(&running), handle(&running));
    let closed = Closed::new(&store);
    let mut begun = 0;
    for round in 0_u32.. {
        assert!(round < 1000, "none waits: {:?}", running.pool().counts());
        begin(&mut waiting, u64::from(round % 600) * 2048, 2048, round, round);
        begun += 1;
        flush(&mut other);
        match waiting.take() {
            None => break,
            Some(reply) => assert_eq!(reply.status, Status::Ok),
        }
    }
    drop(closed);
    assert_eq!(answer(&mut waiting), (begun - 1, Status::Ok));
}

/// Regression: if a write was admitted and then found no segment, the committer made one itself
/// while all clients waited.
#[test]
fn the_log_makes_no_segment_where_writes_look_for_space() {
    let (store, running) = start(&shape(60));
    store.set_faults(FaultPlan { full: When::After(8), ..FaultPlan::default() });
    let mut handle = handle(&running);
    let created = Arc::new(Mutex::new(HashMap::<String, u64>::new()));
    let own = Arc::clone(&created);
    store.set_hook(move |operation| {
        if operation == Operation::Create {
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            *own.lock().unwrap().entry(name).or_default() += 1;
        }
    });
    let created_by = |name: &str| created.lock().unwrap().get(name).copied().unwrap_or(0);
    for round in 0..3 {
        fill(&mut handle);
        discard(&mut handle, 0, 60);
        assert_eq!(created_by("volume-log"), 0, "round {round}");
    }
    assert!(created_by("volume-segments") > 8, "it is tried again");
}

/// Regression: after one successful retry to make a segment, the next failure was not retried. A
/// write was refused although the file system had space.
#[test]
fn it_is_tried_again_each_time_to_make_a_segment() {
    let mut shape = shape(1000);
    shape.options.checkpoint_bytes = 1 << 20;
    let (store, running) = start(&shape);
    let (mut waiting, mut other) = (handle(&running), handle(&running));
    let mut writes = 0_u32..1000;
    for round in 0..3 {
        let closed = Closed::new(&store);
        let waits = writes.find(|number| {
            begin(&mut waiting, u64::from(number % 600) * 2048, 2048, *number, *number);
            flush(&mut other);
            waiting.take().map(|reply| assert_eq!(reply.status, Status::Ok)).is_none()
        });
        store.set_faults(FaultPlan { full: When::Only(1), ..FaultPlan::default() });
        drop(closed);
        let end = answer(&mut waiting);
        assert_eq!(end, (waits.unwrap(), Status::Ok), "{round}: {:?}", running.pool().counts());
    }
}

/// A full pool with all its threads, and concurrent writes, discards and snapshots: every request
/// is answered, acknowledged data are there, and space is freed.
#[test]
fn a_full_pool_works_with_its_threads() {
    let seed = Seed::from_env();
    let (mut refused, mut done) = (0, 0);
    for stream in 9400..9412 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let (store, running) = start(&shape(random.usize(20..36)));
        if random.bool() {
            store.set_bytes_max(random.u64(20..36) * (32 << 10));
        }
        let mut handle = handle(&running);
        let mut model: Blocks = vec![0; 600];
        let mut waiting: HashMap<u32, (u64, u64)> = HashMap::new();
        let mut snapshot: Option<u32> = None;
        for number in 1..3000_u32 {
            let block = random.u64(..600);
            if waiting.len() > 40 || waiting.values().any(|(it, _)| *it == block) {
                let (token, status) = answer(&mut handle);
                let (block, value) = waiting.remove(&token).unwrap();
                match status {
                    Status::Ok => (model[block as usize], done) = (value, done + 1),
                    Status::NoSpc if value > 0 => refused += 1,
                    other => panic!("{other}: {:?}, {:?}", running.pool().counts(), running.pool()),
                }
                continue;
            }
            if random.u32(..8) == 0 {
                assert!(handle.zero(block * 2048, 2048, number, false) == Outcome::Taken);
                waiting.insert(number, (block, 0));
            } else {
                let value = u64::from(number);
                let fill = |_: usize, into: &mut [u8]| {
                    into.chunks_mut(8).for_each(|part| part.copy_from_slice(&value.to_le_bytes()));
                };
                if handle.write(block * 2048, 2048, &fill, number, false) == Outcome::Taken {
                    waiting.insert(number, (block, value));
                }
            }
            if number % 300 == 0 {
                let pool = running.pool();
                if let Some(id) = snapshot.take() {
                    assert_eq!(pool.wait(pool.submit_change(Change::Destroy { id })), Status::Ok);
                } else {
                    let origin = pool.find("v").unwrap().meta.clone();
                    let name = format!("v@{number}");
                    let (origin, meta) = (origin.id, origin);
                    let meta = VolumeMeta { name: name.clone(), is_snapshot: true, origin, ..meta };
                    match pool.wait(pool.submit_change(Change::Copy(meta))) {
                        Status::Ok => snapshot = Some(pool.find(&name).unwrap().meta.id),
                        other => assert_eq!(other, Status::NoSpc),
                    }
                }
            }
        }
        while !waiting.is_empty() {
            let (token, status) = answer(&mut handle);
            let (block, value) = waiting.remove(&token).unwrap();
            match status {
                Status::Ok => model[block as usize] = value,
                other => assert_eq!(other, Status::NoSpc),
            }
        }
        let shape = shape(48);
        assert!(read(&mut handle, &shape).unwrap() == model);
        drop((handle, running));
        let running = Running::start(Mirror::single(store.clone(), "pool"), shape.options).unwrap();
        assert!(read(&mut self::handle(&running), &shape).unwrap() == model, "opened again");
    }
    assert!(refused > 0 && done > 1000, "{refused} refused, {done} done");
}
