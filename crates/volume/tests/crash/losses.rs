//! One of two copies is lost at any moment, while several threads read, write and scrub: no client
//! gets an error.
#![allow(clippy::disallowed_types)] // A flag between the threads of a test.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use blockyard_core::Status;
use blockyard_store::mirror::assemble::Terms;
use blockyard_store::{SegmentStore as _, StoreLocation as _};
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::seed::Seed;
use blockyard_testing::simulated_store::{FaultPlan, Operation, SimulatedStore, When};
use blockyard_volume::handle::{Outcome, VolumeHandle};
use blockyard_volume::{Compression, Running};
use blockyard_volume_admin::check::check_in;
use blockyard_volume_admin::scrub::scrub;

use crate::fixture::{Fixture, Shape, Step, Store, USE, assemble, format, pair};

/// Number of losses in `make test`; `BLOCKYARD_LOSS_SEEDS` overrides it.
const LOSSES: u64 = 1000;

/// Blocks of the volume; each of two writers has one half.
const BLOCKS: u64 = 16;

fn losses() -> u64 {
    match std::env::var("BLOCKYARD_LOSS_SEEDS") {
        Ok(text) => text.parse().expect("BLOCKYARD_LOSS_SEEDS is a number"),
        Err(_) => LOSSES,
    }
}

fn mirrored() -> Shape {
    Shape { mirror: true, block_bytes: 1024, blocks: BLOCKS, ..Shape::tiny() }
}

fn opened(directory: &SimulatedDirectory, shape: &Shape) -> (Store, [SimulatedStore; 2]) {
    let pair = pair(directory, shape.depth);
    (assemble(pair.clone().map(Some), USE).unwrap(), pair)
}

/// Regression: a read failed on one copy while another thread marked that copy as failed. The read
/// returned the error of the lost copy, and the other copy was never read. A client got EIO in 2 of
/// 8 losses of a disk under load. A write of part of a block, which reads the rest, had the same
/// fault.
#[test]
fn a_read_that_fails_while_its_copy_is_given_up_reads_the_other_copy() {
    for lost in 0..2 {
        for part in [false, true] {
            let shape = mirrored();
            let directory = SimulatedDirectory::default();
            format(&directory, &shape);
            let (store, pair) = opened(&directory, &shape);
            let mut fixture = Fixture::of(store, &directory, &shape).unwrap();
            for first in [0, BLOCKS / 2] {
                assert!(fixture.take(Step::Write { first, count: BLOCKS / 2, fua: true }).is_ok());
            }
            let pool = Arc::clone(&fixture.pool);
            pair[lost].on_next(Operation::FailedRead, move || {
                pool.segments().directory().check_location().unwrap();
            });
            pair[lost].set_faults(FaultPlan {
                failed_operations: When::After(0),
                ..FaultPlan::default()
            });
            if part {
                assert_eq!(fixture.take(Step::Part { block: 3, fua: true }), Status::Ok);
            }
            let contents = fixture.contents();
            fixture.history.check(usize::MAX, &contents);
        }
    }
}

/// Regression: after a power cut `volume check` reported blocks of the last groups that had reached
/// only one copy as damaged, and named the other copy's disk. A good disk would have been replaced.
#[test]
fn blocks_that_reached_one_copy_only_are_not_reported_as_damaged() {
    let (mut in_one_copy, seed) = (0, Seed::from_env());
    for stream in 47_000..47_060 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let shape = mirrored();
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut medium = directory.medium();
        let (store, _) = opened(&directory, &shape);
        let mut fixture = Fixture::of(store, &directory, &shape).unwrap();
        for _ in 0..random.usize(4..30) {
            let first = random.u64(..BLOCKS - 4);
            let step = Step::Write { first, count: random.u64(1..=4), fua: random.bool() };
            assert!(fixture.take(step).is_ok());
        }
        let changes = directory.changes();
        drop(fixture);
        let moment = random.usize(..=changes.len());
        changes[..moment].iter().for_each(|change| medium.apply(change));
        let found = medium.cut(|_, count| random.usize(..count));
        let look =
            || check_in(assemble(pair(&found, 1).map(Some), Terms::ReadOnly).unwrap(), &mut |_| {});
        let before = look().unwrap();
        assert_eq!((before.damaged, &before.damage[..]), (0, &[][..]));
        in_one_copy += before.in_one_copy;
        drop(Fixture::open(&found, &shape));
        let after = look().unwrap();
        assert_eq!((after.damaged, after.in_one_copy), (0, 0), "an opening has made both equal");
    }
    assert!(in_one_copy > 5, "{in_one_copy} blocks were in one copy");
}

/// Regression: a scrub could not read a block in the copy that was just lost, while the next group
/// was being written to the same page. So it could not repair the block, and the pool had not
/// noticed the loss yet: the scrub reported a damaged block.
#[test]
fn a_scrub_waits_for_the_write_that_notices_the_loss_of_a_copy() {
    let shape = mirrored();
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let (store, pair) = opened(&directory, &shape);
    let running = Running::start(store, shape.options).unwrap();
    let write = |block: u64| {
        let pool = running.pool();
        let mut handle =
            VolumeHandle::open(pool, pool.find("v").unwrap(), Compression::None, 1).unwrap();
        let fill = |_: usize, into: &mut [u8]| into.fill(7);
        assert_eq!(handle.write(block * 1024, 1024, &fill, 1, true), Outcome::Taken);
        assert_eq!(answer(&mut handle), Status::Ok, "a write");
    };
    write(0);
    let [scrubbed, unread] = std::array::from_fn(|_| Arc::new(Barrier::new(2)));
    let (written, is_written) = channel();
    let is_answered = written.clone();
    pair[0].on_next(Operation::Read, {
        let scrubbed = Arc::clone(&scrubbed);
        move || {
            scrubbed.wait();
            is_written.recv().unwrap();
        }
    });
    let (is_first_write, is_first_read) = (AtomicBool::new(true), AtomicBool::new(true));
    pair[1].set_hook(move |operation| match operation {
        // If the scrub waits for it: the scrub has less to do until it attempts a repair than this
        // write until it ends.
        Operation::Write
            if is_first_write.swap(false, Ordering::Relaxed) && written.send(()).is_ok() =>
        {
            unread.wait();
        }
        Operation::FailedRead
            if !is_first_write.load(Ordering::Relaxed)
                && is_first_read.swap(false, Ordering::Relaxed) =>
        {
            unread.wait();
        }
        _ => {}
    });
    let faults = FaultPlan { failed_operations: When::After(0), ..FaultPlan::default() };
    pair[1].set_faults(faults);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            scrubbed.wait();
            write(1);
            // Another operation of the pool may have noticed the loss before this write.
            is_answered.send(()).unwrap_or_default();
        });
        let report = scrub(&running, 0, &mut |_, _| true).unwrap();
        assert_eq!((report.damaged, report.damage), (0, Vec::new()));
    });
    let copies = running.pool().segments().directory().copy_status();
    assert_eq!(copies.iter().map(|copy| copy.state.is_good()).collect::<Vec<_>>(), [true, false]);
}

/// Waits for the only reply of a handle.
fn answer(handle: &mut VolumeHandle<Store>) -> Status {
    loop {
        match handle.take() {
            Some(reply) => return reply.status,
            None => handle
                .completion_queue()
                .event_count()
                .sleep(Duration::from_millis(50), || handle.is_any()),
        }
    }
}

/// Writes blocks and parts of blocks in one half of the volume, and reads all of them back.
fn use_half(running: &Running<Store>, half: u64, mut random: fastrand::Rng) {
    let pool = running.pool();
    let mut handle =
        VolumeHandle::open(pool, pool.find("v").unwrap(), Compression::None, 4).unwrap();
    let mut model = vec![0_u8; 1024 * BLOCKS as usize / 2];
    let base = half * model.len() as u64;
    for number in 1..40 {
        let at = random.usize(..model.len() / 512) * 512;
        let len = (random.usize(1..=4) * 512).min(model.len() - at);
        let fill = |_: usize, into: &mut [u8]| into.fill(number);
        while handle.write(base + at as u64, len, &fill, 1, random.bool()) == Outcome::Full {
            std::thread::yield_now();
        }
        assert_eq!(answer(&mut handle), Status::Ok, "a write");
        model[at..at + len].fill(number);
        let mut found = Vec::new();
        let read = handle.read(base, model.len(), |part| found.extend_from_slice(part));
        assert_eq!(read, Status::Ok, "a read");
        assert!(found == model, "another contents");
    }
}

/// Loses one copy after a random number of its operations. Returns whether the pool noticed.
fn lose(stream: u64) -> bool {
    let _watch = Seed::from_env().watch(&format!("stream {stream}"));
    let mut random = Seed::from_env().rng(stream);
    let shape = mirrored();
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let (store, pair) = opened(&directory, &shape);
    let running = Running::start(store, shape.options).unwrap();
    let lost = &pair[random.usize(..2)];
    lost.set_faults(FaultPlan {
        failed_operations: When::After(random.u64(..150)),
        ..FaultPlan::default()
    });
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (running, ended) = (&running, &ended);
        let (first, second) = (random.fork(), random.fork());
        let writers = [
            scope.spawn(move || use_half(running, 0, first)),
            scope.spawn(move || use_half(running, 1, second)),
        ];
        let scrub = scope.spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let report = scrub(running, 0, &mut |_, _| true).unwrap();
                assert_eq!(report.damage, [], "a scrub");
            }
        });
        let ends = writers.map(|writer| writer.join());
        ended.store(true, Ordering::Relaxed);
        scrub.join().unwrap();
        ends.into_iter().for_each(|end| end.unwrap());
    });
    assert!(!running.pool().is_latched());
    let copies = running.pool().segments().directory();
    assert_eq!(copies.copy_status().len(), 2);
    copies.copy_status().iter().any(|copy| !copy.state.is_good())
}

#[test]
fn a_copy_that_is_lost_at_any_moment_is_not_noticed_by_a_client() {
    let count = losses();
    let lost = (45_000..45_000 + count).filter(|stream| lose(*stream)).count() as u64;
    assert!(lost > count / 2, "{lost} of {count} copies were lost in time");
}
