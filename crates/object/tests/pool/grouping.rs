//! How many durable writes share a PUT, counted while each PUT takes so long that all clients wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use blockyard_object::BucketStore;
use blockyard_volume::handle::{Outcome, VolumeHandle};
use blockyard_volume::{Compression, Options, Pool};

use crate::connection::Connection;
use crate::machine::{BLOCK, formatted, open_store, options};

const CLIENTS: usize = 8;
const WRITES: usize = 20;

/// The clients that have not ended, and those of them that wait for an answer.
#[derive(Debug, Default)]
struct Clients {
    running: AtomicUsize,
    waiting: AtomicUsize,
}

/// One client: durable writes of a block, one after the other.
fn write(pool: &Arc<Pool<BucketStore>>, number: u64, clients: &Clients) {
    let live = pool.find("v").unwrap();
    let mut handle = VolumeHandle::open(pool, live, Compression::None, 1).unwrap();
    for _ in 0..WRITES {
        let fill = |_: usize, into: &mut [u8]| into.fill(number as u8);
        let write = handle.write(number * BLOCK as u64, BLOCK, &fill, 0, true);
        assert_eq!(write, Outcome::Taken);
        clients.waiting.fetch_add(1, Ordering::SeqCst);
        while !handle.is_any() {
            thread::yield_now();
        }
        clients.waiting.fetch_sub(1, Ordering::SeqCst);
        assert!(handle.take().unwrap().status.is_ok());
    }
    clients.running.fetch_sub(1, Ordering::SeqCst);
}

/// Runs all clients on a pool. Returns the number of PUTs of batches, without one for each new
/// segment.
fn puts(options: Options) -> u64 {
    let connection = Connection::new(&formatted());
    let clients = Arc::new(Clients::default());
    let store = open_store(&connection, None).unwrap();
    let (pool, mut committer) = Pool::open(store, options).unwrap();
    let created = || {
        let segments = pool.segments();
        (segments.directory().requests().create.requests, segments.counts().all as u64)
    };
    let before = created();
    clients.running.store(CLIENTS, Ordering::SeqCst);
    let all = Arc::clone(&clients);
    // A batch is there when no client is left that could send another write.
    connection.plan().before_puts = Some(Arc::new(move || {
        while all.waiting.load(Ordering::SeqCst) < all.running.load(Ordering::SeqCst) {
            thread::yield_now();
        }
    }));
    thread::scope(|scope| {
        for number in 0..CLIENTS as u64 {
            let (pool, clients) = (&pool, &clients);
            scope.spawn(move || write(pool, number, clients));
        }
        while clients.running.load(Ordering::SeqCst) > 0 {
            committer.turn();
        }
    });
    connection.plan().before_puts = None;
    let after = created();
    (after.0 - before.0) - (after.1 - before.1)
}

/// Of two PUTs, the second one has at least the writes that waited during the first one. So two of
/// them have a write of each client.
#[test]
fn durable_writes_that_wait_for_the_object_store_share_a_put() {
    let pipeline_bytes = Options::default().pipeline_bytes;
    // A checkpoint would cause PUTs of its own.
    let shared = puts(Options { pipeline_bytes, checkpoint_bytes: 1 << 20, ..options() });
    let most = 2 * WRITES as u64 + 2;
    assert!(shared <= most, "{shared} PUTs for {WRITES} writes of each of {CLIENTS} clients");
}
