//! The committer thread panics: no client waits forever, and the pool can be closed.
#![allow(clippy::disallowed_types, clippy::unwrap_used)] // Test code, with a flag as trap.

mod place;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockyard_core::Status;
use blockyard_store::{
    Blocking, BlockingReads, EventFd, PoolFile, PoolStore, SegmentFiles, SegmentStore, StoreFile,
    StoreLocation,
};
use blockyard_volume::handle::{Outcome, VolumeHandle};
use blockyard_volume::{Compression, Options, Running};

use place::Place;

/// A directory in which the next write to a file panics, or each check of the directory, when
/// armed.
#[derive(Debug)]
struct Trap {
    inner: PoolStore,
    armed: Arc<AtomicBool>,
    looks: Arc<AtomicBool>,
}

#[derive(Debug)]
struct TrapFile {
    inner: PoolFile,
    armed: Arc<AtomicBool>,
}

impl Trap {
    fn file(&self, inner: PoolFile) -> TrapFile {
        TrapFile { inner, armed: Arc::clone(&self.armed) }
    }
}

impl StoreFile for TrapFile {
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.inner.read_at(offset, into)
    }

    fn write_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        assert!(!self.armed.swap(false, Ordering::SeqCst), "the trap of this test");
        self.inner.write_at(offset, parts)
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }
}

impl SegmentFiles for Trap {
    type File = TrapFile;

    fn open(&self, name: &str) -> io::Result<Option<TrapFile>> {
        Ok(self.inner.open(name)?.map(|file| self.file(file)))
    }

    fn create(&self, name: &str, len: u64) -> io::Result<TrapFile> {
        Ok(self.file(self.inner.create(name, len)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.inner.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.inner.remove(name)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        self.inner.names()
    }

    fn sync_names(&self) -> io::Result<()> {
        self.inner.sync_names()
    }
}

impl StoreLocation for Trap {
    fn title(&self) -> String {
        self.inner.title()
    }

    fn check_location(&self) -> io::Result<()> {
        assert!(!self.looks.load(Ordering::SeqCst), "the other trap of this test");
        self.inner.check_location()
    }

    fn fresh_id(&self) -> io::Result<[u8; 16]> {
        self.inner.fresh_id()
    }
}

impl SegmentStore for Trap {
    type LogWriter = Blocking;
    type Reads = BlockingReads;

    fn log_writer(&self, _: Option<&Arc<TrapFile>>) -> Blocking {
        Blocking::default()
    }

    fn reads(&self, _: Option<&EventFd>) -> BlockingReads {
        BlockingReads::default()
    }
}

fn open(path: &Path) -> (Arc<Running<Trap>>, Arc<AtomicBool>) {
    let (running, armed, _) = open_both(path);
    (running, armed)
}

/// Opens a pool, with both flags of its [`Trap`].
fn open_both(path: &Path) -> (Arc<Running<Trap>>, Arc<AtomicBool>, Arc<AtomicBool>) {
    let (armed, looks) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
    let inner = PoolStore::take(path).unwrap();
    let trap = Trap { inner, armed: Arc::clone(&armed), looks: Arc::clone(&looks) };
    let options = Options { segment_bytes: 1 << 20, segments_max: 16, ..Options::default() };
    (Running::start(trap, options).unwrap(), armed, looks)
}

/// Writes a block durably.
fn write(running: &Running<Trap>, block: u64) -> Status {
    let live = running.pool().find("v").unwrap();
    let mut handle = VolumeHandle::open(running.pool(), live, Compression::None, 4);
    match handle.write(block * 4096, 4096, &|_, bytes| bytes.fill(7), 1, true) {
        Outcome::Taken => {}
        Outcome::Full => panic!("an empty pool has room"),
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
    let place = Place::new(&std::env::temp_dir(), "blockyard-volume-panic");
    let path = place.fresh();
    let (running, armed) = open(&path);
    running.create("v", 1 << 20, 4096).unwrap();
    assert_eq!(write(&running, 0), Status::Ok);
    armed.store(true, Ordering::SeqCst);
    assert_eq!(write(&running, 1), Status::IoErr);
    assert!(running.pool().is_latched());
    assert_eq!(write(&running, 2), Status::IoErr);
    assert!(running.create("w", 1 << 20, 4096).is_err());
    drop(running);
    let (running, _) = open(&path);
    assert_eq!(write(&running, 2), Status::Ok);
}

/// Regression: the record that stops the committer was lost in a panic, and closing the pool waited
/// forever.
#[test]
fn a_panic_while_a_pool_is_closed_does_not_keep_it_open() {
    let place = Place::new(&std::env::temp_dir(), "blockyard-volume-panic-close");
    let path = place.fresh();
    let (running, armed) = open(&path);
    running.create("v", 1 << 20, 4096).unwrap();
    assert_eq!(write(&running, 0), Status::Ok);
    armed.store(true, Ordering::SeqCst);
    // Closing makes a checkpoint, which panics.
    drop(running);
    assert!(!armed.load(Ordering::SeqCst));
    let (running, _) = open(&path);
    assert_eq!(write(&running, 1), Status::Ok);
}

/// Regression: after a few panics the committer thread ends permanently. A later request, such as a
/// snapshot, waited forever.
#[test]
fn a_request_to_an_ended_thread_gets_an_error() {
    let place = Place::new(&std::env::temp_dir(), "blockyard-volume-panic-gone");
    let path = place.fresh();
    let (running, _, looks) = open_both(&path);
    running.create("v", 1 << 20, 4096).unwrap();
    looks.store(true, Ordering::SeqCst);
    // The committer checks the directory once per second; this client sends requests all the time.
    while running.pool().is_running() {
        _ = running.reserve("v", 0);
    }
    assert!(running.pool().is_latched());
    assert!(running.snapshot("v@s").is_err());
    assert!(running.resize("v", 2 << 20).is_err());
    assert_eq!(write(&running, 0), Status::IoErr);
    drop(running);
    drop(open(&path));
}
