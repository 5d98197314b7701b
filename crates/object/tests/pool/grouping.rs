//! How many durable writes share a PUT, with the storage that the daemon has.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockyard_object::{BucketStore, ProvidedStore};
use blockyard_store::{LogWriter as _, PoolBacking, PoolStore, SegmentStore as _};
use blockyard_volume::committer::Turn;
use blockyard_volume::handle::{Outcome, VolumeHandle};
use blockyard_volume::{Compression, Options, Pool};
use tempfile::TempDir;

use crate::connection::Connection;
use crate::machine::{BLOCK, formatted, log_folder, open_store_on, options, runtime};
use crate::storage::{idle, open_at};

/// Clients of a half.
const CLIENTS: usize = 4;

/// How long a PUT takes. A group waits for clients for a tenth of that.
const PUT_TIME: Duration = Duration::from_millis(20);

/// In one of this number of rounds the system must run the thread of the clients in time.
const ROUNDS_MAX: usize = 100;

/// The storage of a pool in the daemon.
fn backing(store: BucketStore) -> PoolBacking {
    let path = Path::new("s3://bucket/pool");
    let store = PoolStore::of_remote(path, Box::new(ProvidedStore::unlocked(store)));
    PoolBacking::single(store, path)
}

/// Clients that each have one durable write in flight.
#[derive(Clone)]
struct Clients(Arc<Mutex<Vec<VolumeHandle<PoolBacking>>>>);

impl Clients {
    fn of(pool: &Arc<Pool<PoolBacking>>) -> Clients {
        let client = |_| {
            let live = pool.find("v").unwrap();
            VolumeHandle::open(pool, live, Compression::None, 1).unwrap()
        };
        Clients(Arc::new(Mutex::new((0..CLIENTS).map(client).collect())))
    }

    /// Each client sends a write.
    fn send(&self) {
        for (block, client) in (0..).zip(self.0.lock().unwrap().iter_mut()) {
            let fill = |_: usize, into: &mut [u8]| into.fill(1);
            assert_eq!(client.write(block * BLOCK as u64, BLOCK, &fill, 0, true), Outcome::Taken);
        }
    }

    /// Takes the answers, and returns their number.
    fn answered(&self) -> usize {
        let mut clients = self.0.lock().unwrap();
        let replies = clients.iter_mut().filter_map(VolumeHandle::take);
        replies.map(|reply| assert!(reply.status.is_ok())).count()
    }
}

/// Whether the thread with this directory in `/proc` sleeps.
fn is_asleep(thread: &Path) -> bool {
    let stat = std::fs::read_to_string(thread.join("stat")).unwrap();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
}

/// Half of the clients write, and the other half while the PUT of these lasts. The next PUT has the
/// writes of all clients: those that waited for it, and those that were answered right before it.
///
/// The clients of the first half return late: only when the committer waits for them, or has begun
/// the next PUT without them.
#[test]
fn clients_that_are_answered_share_the_next_put_with_those_that_wait() {
    let connection = Connection::new(&formatted());
    // Neither a checkpoint nor a compaction causes PUTs of its own.
    let pipeline_bytes = Options::default().pipeline_bytes;
    let options = Options { pipeline_bytes, checkpoint_bytes: 1 << 20, ..options() };
    let store = backing(open_at(&connection, idle(), None).unwrap());
    let (pool, mut committer) = Pool::open(store, options).unwrap();
    let (first, second) = (Clients::of(&pool), Clients::of(&pool));
    let thread = PathBuf::from("/proc").join(std::fs::read_link("/proc/thread-self").unwrap());
    let (has_begun, sends) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (begun, due, waiting) = (Arc::clone(&has_begun), Arc::clone(&sends), second.clone());
    connection.plan().before_puts = Some(Arc::new(move || {
        begun.store(true, Ordering::Relaxed);
        if due.swap(false, Ordering::Relaxed) {
            waiting.send();
        }
        let began = Instant::now();
        while began.elapsed() < PUT_TIME {
            std::thread::yield_now();
        }
    }));
    for _ in 0..ROUNDS_MAX {
        sends.store(true, Ordering::Relaxed);
        first.send();
        assert_eq!(committer.turn(), Turn::Worked);
        assert_eq!((first.answered(), second.answered()), (CLIENTS, 0));
        has_begun.store(false, Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !has_begun.load(Ordering::Relaxed) && !is_asleep(&thread) {
                    std::thread::yield_now();
                }
                first.send();
            });
            assert_eq!(committer.turn(), Turn::Worked);
        });
        assert_eq!(second.answered(), CLIENTS, "writes that wait share a PUT");
        let returned = first.answered();
        if returned == CLIENTS {
            return;
        }
        while committer.turn() == Turn::Worked {}
        assert_eq!(returned + first.answered(), CLIENTS);
    }
    panic!("in {ROUNDS_MAX} rounds no PUT had the writes of all clients");
}

/// A sync of the local log takes no longer than the wait for clients would.
#[test]
fn a_pool_with_a_local_log_does_not_wait_for_clients() {
    for (log, waits) in [(None, true), (Some(log_folder()), false)] {
        let log = log.as_ref().map(TempDir::path);
        let store = open_store_on(&Connection::new(&formatted()), (None, log), &runtime());
        assert_eq!(backing(store.unwrap()).log_writer(None).waits_for_clients(), waits);
    }
}
