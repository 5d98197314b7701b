//! The lease: how often it is renewed, by whom, and what a fenced opener learns by it.

use std::sync::Arc;
use std::time::Duration;

use blockyard_object::{BucketSettings, BucketStore, ObjectClient, Opening, Retries};
use blockyard_store::StoreLocation as _;
use blockyard_volume_format::object::{LEASE, ObjectHeader, ObjectKind};
use object_store::memory::InMemory;
use tokio::runtime::Runtime;

use crate::connection::{Connection, pass};
use crate::machine::{formatted, runtime, settings};
use crate::storage::object;

const LENGTH: Duration = Duration::from_secs(30);

/// A machine that has the pool open.
struct Place {
    pool: BucketStore,
    connection: Connection,
    runtime: Arc<Runtime>,
}

impl Place {
    fn open(store: &Arc<InMemory>, lease: Option<Duration>) -> Place {
        let (connection, runtime) = (Connection::new(store), runtime());
        let client = ObjectClient::over(Arc::new(connection.clone()), "pool", Retries::default());
        let request = Opening { take_over: true, ..Opening::default() };
        let settings = BucketSettings { lease, ..settings() };
        let pool = BucketStore::open(Arc::new(client), settings, request, &runtime).unwrap();
        Place { pool, connection, runtime }
    }

    fn pass(&self, time: Duration) {
        self.runtime.block_on(pass(time));
    }

    fn requests_in(&self, time: Duration) -> u64 {
        let before = self.connection.plan().requests;
        self.pass(time);
        self.connection.plan().requests - before
    }

    fn failure(&self) -> Option<String> {
        self.pool.check_location().err().map(|error| error.to_string())
    }
}

/// The epoch of the lease, and how often it was renewed.
fn lease(store: &Arc<InMemory>) -> (u64, u64) {
    let (header, _) = ObjectHeader::parse_as(&object(store, LEASE), ObjectKind::Lease).unwrap();
    (header.epoch, header.number)
}

#[test]
fn an_idle_pool_sends_three_renewals_in_the_length_of_its_lease_and_without_one_nothing() {
    let store = formatted();
    let place = Place::open(&store, Some(LENGTH));
    place.pass(Duration::from_secs(1));
    let (epoch, renewals) = lease(&store);
    assert_eq!(epoch, place.pool.epoch());
    assert_eq!(place.requests_in(Duration::from_secs(3600)), 360);
    assert_eq!(lease(&store), (epoch, renewals + 360));
    let place = Place::open(&store, None);
    place.pass(Duration::from_secs(1));
    assert_eq!(place.requests_in(Duration::from_secs(3600)), 0);
}

/// No client writes: without the lease the older machine would not notice.
#[test]
fn an_idle_machine_learns_by_its_next_renewal_that_it_was_taken_over() {
    for is_renewed_between in [false, true] {
        let store = formatted();
        let first = Place::open(&store, Some(LENGTH));
        first.pass(Duration::from_secs(1));
        let second = Place::open(&store, Some(LENGTH));
        if is_renewed_between {
            // The second machine has not written its lease yet.
            first.pass(LENGTH);
            assert_eq!((first.failure(), lease(&store).0), (None, first.pool.epoch()));
        }
        second.pass(Duration::from_secs(1));
        assert_eq!(lease(&store).0, second.pool.epoch());
        first.pass(LENGTH / 3);
        let why = first.failure().expect("it was taken over");
        let expected = "another opener has taken over the pool: `lease` is written in epoch";
        assert!(why.starts_with(expected), "{why}");
        second.pass(LENGTH);
        assert_eq!((second.failure(), lease(&store).0), (None, second.pool.epoch()));
    }
}

#[test]
fn renewals_continue_after_an_outage() {
    let store = formatted();
    let place = Place::open(&store, Some(LENGTH));
    place.pass(Duration::from_secs(1));
    let before = lease(&store);
    place.connection.plan().cut_after = 0;
    place.pass(Duration::from_secs(300));
    assert_eq!(lease(&store), before);
    place.connection.plan().cut_after = u64::MAX;
    place.pass(Duration::from_secs(300));
    assert!(lease(&store).1 > before.1 + 20, "{:?} after {before:?}", lease(&store));
    assert_eq!(place.failure(), None);
}
