//! The committer thread panics: no client waits forever, and the pool can be closed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockyard_core::Status;
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::simulated_store::{Operation, SimulatedStore};
use blockyard_volume::handle::{Outcome, VolumeHandle};
use blockyard_volume::{Compression, Options, Running};

/// Opens a pool.
fn open(directory: &SimulatedDirectory) -> (SimulatedStore, Arc<Running<SimulatedStore>>) {
    let store = SimulatedStore::new(directory);
    let options = Options { segment_bytes: 1 << 20, segments_max: 16, ..Options::default() };
    let running = Running::start(store.clone(), options).unwrap();
    (store, running)
}

/// Makes the next write to a file panic. Returns whether that is still to come.
fn panic_on_write(store: &SimulatedStore) -> Arc<AtomicBool> {
    let armed = Arc::new(AtomicBool::new(true));
    let own = Arc::clone(&armed);
    store.set_hook(move |operation| {
        let is_due = operation == Operation::Write && own.swap(false, Ordering::SeqCst);
        assert!(!is_due, "the write panics, as this test asked");
    });
    armed
}

/// Writes a block durably.
fn write(running: &Running<SimulatedStore>, block: u64) -> Status {
    let live = running.pool().find("v").unwrap();
    let mut handle = VolumeHandle::open(running.pool(), live, Compression::None, 4).unwrap();
    match handle.write(block * 4096, 4096, &|_, bytes| bytes.fill(7), 1, true) {
        Outcome::Taken => {}
        Outcome::Full => panic!("an empty pool has space"),
        Outcome::Ended(status) => return status,
    }
    loop {
        match handle.take() {
            Some(reply) => return reply.status,
            None => handle
                .completion_queue()
                .event_count()
                .sleep(Duration::from_secs(1), || handle.is_any()),
        }
    }
}

/// Regression: the group during which the committer panicked was dropped without answers. Its
/// clients, and every thread that closed the volume, waited forever.
#[test]
fn a_write_gets_an_error_if_its_group_panics() {
    let directory = SimulatedDirectory::default();
    let (store, running) = open(&directory);
    running.create("v", 1 << 20, 4096).unwrap();
    assert_eq!(write(&running, 0), Status::Ok);
    panic_on_write(&store);
    assert_eq!(write(&running, 1), Status::IoErr);
    assert!(running.pool().is_latched());
    assert_eq!(write(&running, 2), Status::IoErr);
    assert!(running.create("w", 1 << 20, 4096).is_err());
    drop(running);
    let (_, running) = open(&directory);
    assert_eq!(write(&running, 2), Status::Ok);
}

/// Regression: the record that stops the committer was lost in a panic, and closing the pool waited
/// forever.
#[test]
fn a_panic_while_a_pool_is_closed_does_not_keep_it_open() {
    let directory = SimulatedDirectory::default();
    let (store, running) = open(&directory);
    running.create("v", 1 << 20, 4096).unwrap();
    assert_eq!(write(&running, 0), Status::Ok);
    let armed = panic_on_write(&store);
    // Closing makes a checkpoint, which panics.
    drop(running);
    assert!(!armed.load(Ordering::SeqCst));
    let (_, running) = open(&directory);
    assert_eq!(write(&running, 1), Status::Ok);
}

/// Regression: after a few panics the committer thread ends permanently. A later request, such as a
/// snapshot, waited forever.
#[test]
fn a_request_to_an_ended_thread_gets_an_error() {
    let directory = SimulatedDirectory::default();
    let (store, running) = open(&directory);
    running.create("v", 1 << 20, 4096).unwrap();
    store.set_hook(|operation| {
        assert_ne!(operation, Operation::CheckLocation, "each check panics, as this test asked");
    });
    // The committer checks the directory once per second; this client sends requests all the time.
    while running.pool().is_running() {
        _ = running.reserve("v", 0);
    }
    assert!(running.pool().is_latched());
    assert!(running.snapshot("v@s").is_err());
    assert!(running.resize("v", 2 << 20, true).is_err());
    assert_eq!(write(&running, 0), Status::IoErr);
    drop(running);
    drop(open(&directory));
}
