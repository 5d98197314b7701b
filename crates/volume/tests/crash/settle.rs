//! A write that no client asked to be durable becomes durable after a while, and survives a power
//! cut.

use std::time::Duration;

use blockyard_testing::directory::SimulatedDirectory;
use blockyard_volume::Running;
use blockyard_volume::handle::{Outcome, VolumeHandle};

use crate::fixture::{Fixture, Shape, Store, USE, format, store};

/// Number of checks, and the time between two of them: two minutes together, where a second is
/// guaranteed, so that a busy machine does not fail the test.
const LOOKS_MAX: usize = 6000;
const PAUSE: Duration = Duration::from_millis(20);

/// The number in the block of the first write.
const FIRST: u64 = 7;

/// Writes a block without FUA and waits for the answer.
fn write(handle: &mut VolumeHandle<Store>, block: u64, number: u64) {
    let fill = |_: usize, into: &mut [u8]| {
        into.chunks_mut(8).for_each(|part| part.copy_from_slice(&number.to_le_bytes()));
    };
    assert!(matches!(handle.write(block * 512, 512, &fill, 0, false), Outcome::Taken));
    let reply = loop {
        match handle.take() {
            Some(reply) => break reply,
            None => handle.completion_queue().event_count().sleep(PAUSE, || handle.is_any()),
        }
    };
    assert!(reply.status.is_ok());
}

/// Writes a block and waits until it survives a cut, with or without other writes meanwhile.
fn becomes_durable(busy: bool) {
    let mut shape = Shape::tiny();
    // Neither the number of bytes nor a checkpoint triggers a sync.
    shape.options.segment_bytes = 1 << 20;
    shape.options.sync_bytes = 1 << 40;
    shape.options.checkpoint_bytes = 1 << 40;
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut medium = directory.medium();
    let pool = Running::start(store(&directory, &shape, USE).unwrap(), shape.options).unwrap();
    let live = pool.pool().find("v").unwrap();
    let mut handle = VolumeHandle::open(pool.pool(), live, shape.compression, 64).unwrap();
    write(&mut handle, 0, FIRST);
    let mut seen = 0;
    for _ in 0..LOOKS_MAX {
        let changes = directory.changes();
        changes[seen..].iter().for_each(|change| medium.apply(change));
        seen = changes.len();
        let found = medium.cut(|_, _| 0);
        if Fixture::open(&found, &shape).contents().0[0] == FIRST {
            return;
        }
        if busy {
            write(&mut handle, 1, FIRST + 1);
        }
        std::thread::park_timeout(PAUSE);
    }
    panic!("busy: {busy}: nothing has made it durable");
}

#[test]
fn writes_without_flush_become_durable_after_a_while() {
    becomes_durable(false);
}

#[test]
fn it_is_durable_while_others_write_too() {
    becomes_durable(true);
}
