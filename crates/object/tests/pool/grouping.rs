//! How many durable writes share a PUT.

use blockyard_volume::committer::Turn;
use blockyard_volume::handle::{Outcome, VolumeHandle};
use blockyard_volume::{Compression, Options, Pool};

use crate::connection::Connection;
use crate::machine::{BLOCK, formatted, options};
use crate::storage::{idle, open_at};

const CLIENTS: u64 = 8;
const WRITES: u64 = 160;

/// Has all clients write a block each, durably, before the committer works, in rounds. Returns the
/// number of PUTs of batches, without one for each new segment.
fn puts(options: Options) -> u64 {
    let connection = Connection::new(&formatted());
    // A compaction would cause PUTs of its own.
    let store = open_at(&connection, idle(), None).unwrap();
    let (pool, mut committer) = Pool::open(store, options).unwrap();
    let created = || {
        let segments = pool.segments();
        (segments.directory().requests().create.requests, segments.counts().all as u64)
    };
    let client = |_| {
        let live = pool.find("v").unwrap();
        VolumeHandle::open(&pool, live, Compression::None, 1).unwrap()
    };
    let mut clients: Vec<_> = (0..CLIENTS).map(client).collect();
    let before = created();
    let mut answered = 0;
    for round in 0..WRITES / CLIENTS {
        for (number, client) in (0..).zip(&mut clients) {
            let fill = |_: usize, into: &mut [u8]| into.fill(round as u8);
            assert_eq!(client.write(number * BLOCK as u64, BLOCK, &fill, 0, true), Outcome::Taken);
        }
        while committer.turn() == Turn::Worked {}
        let replies = clients.iter_mut().filter_map(VolumeHandle::take);
        answered += replies.filter(|reply| reply.status.is_ok()).count() as u64;
    }
    assert_eq!(answered, WRITES);
    let after = created();
    (after.0 - before.0) - (after.1 - before.1)
}

/// The writes that wait when a PUT begins share it.
#[test]
fn durable_writes_that_wait_for_the_object_store_share_a_put() {
    let pipeline_bytes = Options::default().pipeline_bytes;
    // A checkpoint would cause PUTs of its own.
    let shared = puts(Options { pipeline_bytes, checkpoint_bytes: 1 << 20, ..options() });
    let most = WRITES / CLIENTS + 2;
    assert!(shared <= most, "{shared} PUTs for {WRITES} writes of {CLIENTS} clients");
}
