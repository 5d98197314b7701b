//! The lease: how often it is renewed, by whom, and what a fenced opener learns by it.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockyard_object::{
    BucketError, BucketSettings, BucketStore, LocalAcknowledgement, ObjectClient, Opening, Retries,
};
use blockyard_store::lease::boot_ns;
use blockyard_store::{Serving, StoreLocation as _};
use blockyard_volume_format::object::{LEASE, ObjectHeader, ObjectKind};
use object_store::memory::InMemory;
use tokio::runtime::Runtime;
use tokio::time::Instant;

use crate::connection::{Connection, Moment, pass};
use crate::machine::{formatted, local_settings, log_folder, runtime, settings};
use crate::storage::{call_before_first_put, idle, object, replace, with_segments, write};

const LENGTH: Duration = Duration::from_secs(30);

/// A machine that has the pool open.
struct Place {
    pool: BucketStore,
    connection: Connection,
    runtime: Arc<Runtime>,
}

impl Place {
    fn open(store: &Arc<InMemory>, lease: Option<Duration>) -> Place {
        let settings = BucketSettings { lease, ..settings() };
        Place::open_by(Connection::new(store), settings, Opening::default()).unwrap()
    }

    /// Opens a pool whose local log acknowledges syncs, with a lease.
    fn open_local(store: &Arc<InMemory>, log: &Path) -> Place {
        let local = LocalAcknowledgement {
            lag_bytes_max: 1 << 20,
            lag_time_max: Duration::from_secs(3600),
            ..local_settings().local.unwrap()
        };
        let settings = BucketSettings { lease: Some(LENGTH), local: Some(local), ..idle() };
        let request = Opening { log: Some(log), ..Opening::default() };
        Place::open_by(Connection::new(store), settings, request).unwrap()
    }

    fn open_by(
        connection: Connection,
        settings: BucketSettings,
        request: Opening<'_>,
    ) -> Result<Place, BucketError> {
        let runtime = runtime();
        let client = ObjectClient::over(Arc::new(connection.clone()), "pool", Retries::default());
        let request = Opening { take_over: true, ..request };
        let pool = BucketStore::open(Arc::new(client), settings, request, &runtime)?;
        Ok(Place { pool, connection, runtime })
    }

    fn serving(&self) -> Serving {
        self.pool.term().serving()
    }

    /// The time on the clock of this machine.
    fn now(&self) -> Instant {
        self.runtime.block_on(async { Instant::now() })
    }

    fn cut_off(&self) {
        self.connection.plan().cut_after = 0;
    }

    /// Reaches the object store again after a time.
    fn reconnect_after(&self, time: Duration) {
        let connection = self.connection.clone();
        self.runtime.spawn(async move {
            pass(time).await;
            connection.plan().cut_after = u64::MAX;
        });
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
    let (header, _) = ObjectHeader::parse_lease(&object(store, LEASE)).unwrap();
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
    for lease_of_second in [Some(LENGTH), None] {
        let store = formatted();
        let first = Place::open(&store, Some(LENGTH));
        first.pass(Duration::from_secs(1));
        let second = Place::open(&store, lease_of_second);
        assert_eq!(lease(&store).0, second.pool.epoch());
        first.pass(LENGTH / 3);
        let why = first.failure().expect("it was taken over");
        let expected = "another opener has taken over the pool: `lease` is written in epoch";
        assert!(why.starts_with(expected), "{why}");
        assert_eq!(first.serving(), Serving::Refused);
        second.pass(LENGTH);
        assert_eq!((second.failure(), lease(&store).0), (None, second.pool.epoch()));
        assert_eq!(second.serving(), Serving::Yes);
    }
}

/// The bug: a machine that was cut off acknowledged syncs by its log as long as the lag allowed
/// that, although a standby had the pool.
#[test]
fn a_machine_that_is_cut_off_acknowledges_by_its_log_until_its_lease_ends() {
    let (store, log) = (formatted(), log_folder());
    let place = Place::open_local(&store, log.path());
    place.pass(Duration::from_secs(1));
    place.cut_off();
    let before = place.now();
    write(&place.pool, 0, 1).unwrap();
    assert_eq!((place.now(), place.serving()), (before, Serving::Yes));
    place.pass(2 * LENGTH);
    assert!(place.serving() == Serving::Held && place.pool.upload_status().is_held);
    place.reconnect_after(Duration::from_secs(100));
    let before = place.now();
    write(&place.pool, 0, 2).unwrap();
    assert!(place.now() - before >= Duration::from_secs(100));
    place.pass(LENGTH);
    assert!(place.serving() == Serving::Yes && !place.pool.upload_status().is_held);
}

#[test]
fn a_sync_that_is_held_fails_when_the_pool_is_lost() {
    let (store, log) = (formatted(), log_folder());
    let place = Place::open_local(&store, log.path());
    place.pass(Duration::from_secs(1));
    place.cut_off();
    place.pass(2 * LENGTH);
    let second = Place::open(&store, Some(LENGTH));
    place.reconnect_after(Duration::from_secs(100));
    let error = write(&place.pool, 0, 2).unwrap_err().to_string();
    assert!(error.starts_with("another opener has taken over the pool"), "{error}");
    assert_eq!((place.serving(), second.failure()), (Serving::Refused, None));
}

#[test]
fn requests_are_refused_after_a_long_outage_until_the_lease_is_renewed() {
    let place = Place::open(&formatted(), Some(LENGTH));
    place.pass(Duration::from_secs(1));
    place.cut_off();
    place.pass(Duration::from_secs(500));
    assert_eq!(place.serving(), Serving::Held);
    place.pass(Duration::from_secs(500));
    assert_eq!((place.serving(), place.failure()), (Serving::Refused, None));
    place.reconnect_after(Duration::ZERO);
    place.pass(LENGTH);
    assert_eq!(place.serving(), Serving::Yes);
}

/// The bug: the lease was written at the end of an opening, so that a standby took an opener that
/// replayed for long for one that had died.
#[test]
fn the_lease_is_written_before_the_replay_and_renewed_in_it() {
    let store = with_segments(4);
    let place = Place::open_by(Connection::new(&store), idle(), Opening::default()).unwrap();
    let before = place.pool.epoch();
    let connection = Connection::new(&store);
    connection.plan().delay = Duration::from_secs(2);
    // What the opening has not read before it replaces the manifest.
    let write_more = move || (0..200).for_each(|value| write(&place.pool, 0, value).unwrap());
    call_before_first_put(&connection, write_more);
    let (seen, other) = (Arc::new(Mutex::new(None)), Arc::clone(&store));
    let found = Arc::clone(&seen);
    let look = move || *found.lock().unwrap() = Some(lease(&other));
    connection.plan().hook = Some((Moment::Before(150), Box::new(look)));
    let settings = BucketSettings { lease: Some(Duration::from_secs(12)), ..idle() };
    let place = Place::open_by(connection, settings, Opening::default()).unwrap();
    let (epoch, renewals) = seen.lock().unwrap().expect("the opening sends many requests");
    assert_eq!((epoch, place.pool.epoch()), (before + 1, before + 1));
    assert!(renewals > 0, "the lease was not renewed in the replay");
}

/// A claim of a standby: from then on the opener cannot renew its lease.
#[test]
fn an_opener_whose_lease_was_claimed_notices_it_at_its_next_renewal() {
    let store = formatted();
    let first = Place::open(&store, Some(LENGTH));
    let (header, length_ms) = ObjectHeader::parse_lease(&object(&store, LEASE)).unwrap();
    let claim = ObjectHeader { writer: [9; 16], ..header };
    replace(&store, LEASE, claim.lease(length_ms));
    // An opener that is not the next one after the one of the lease has nothing from the claim.
    let after = Opening { after: Some(header.epoch - 1), ..Opening::default() };
    let settings = BucketSettings { lease: Some(LENGTH), ..settings() };
    let refused = Place::open_by(Connection::new(&store), settings, after).err().unwrap();
    assert!(matches!(refused, BucketError::Raced { .. }), "{refused}");
    let after = Opening { after: Some(header.epoch), ..Opening::default() };
    let second = Place::open_by(Connection::new(&store), settings, after).unwrap();
    first.pass(LENGTH);
    assert!(first.failure().is_some() && second.failure().is_none());
    assert_eq!(lease(&store).0, second.pool.epoch());
}

#[test]
fn a_lease_that_is_no_lease_of_this_pool_is_replaced() {
    let other = ObjectHeader {
        kind: ObjectKind::Lease,
        pool: 1,
        writer: [1; 16],
        epoch: 1 << 40,
        number: 0,
    };
    for bytes in [vec![7; 100_000], other.lease(30_000)] {
        for length in [Some(LENGTH), None] {
            let store = formatted();
            replace(&store, LEASE, bytes.clone());
            let place = Place::open(&store, length);
            place.pass(LENGTH);
            assert_eq!((place.failure(), lease(&store).0), (None, place.pool.epoch()));
        }
    }
}

#[test]
fn a_command_keeps_the_lease_and_an_opener_without_one_withdraws_it() {
    let store = formatted();
    drop(Place::open(&store, Some(LENGTH)));
    let length = || ObjectHeader::parse_lease(&object(&store, LEASE)).unwrap().1;
    let request = Opening { keeps_lease: true, ..Opening::default() };
    let place = Place::open_by(Connection::new(&store), settings(), request).unwrap();
    place.pass(LENGTH);
    assert_eq!((length(), place.pool.upload_status().lease_ms), (30_000, 30_000));
    drop(place);
    let place = Place::open(&store, None);
    assert_eq!((length(), place.serving()), (0, Serving::Yes));
}

#[test]
fn the_requests_of_the_opening_are_no_part_of_the_price() {
    let store = Arc::new(InMemory::new());
    let request = Opening { capacity_bytes: Some(64 << 20), ..Opening::default() };
    let place = Place::open_by(Connection::new(&store), settings(), request).unwrap();
    let totals = place.pool.upload_status().requests;
    assert_eq!((totals.puts, totals.gets), (0, 0));
    assert!(place.pool.requests().total() > 100, "a pool is made without a preflight");
}

#[test]
fn renewals_continue_after_an_outage() {
    let store = formatted();
    let place = Place::open(&store, Some(LENGTH));
    place.pass(Duration::from_secs(1));
    let before = lease(&store);
    place.cut_off();
    place.pass(Duration::from_secs(300));
    assert_eq!(lease(&store), before);
    place.connection.plan().cut_after = u64::MAX;
    place.pass(Duration::from_secs(300));
    assert!(lease(&store).1 > before.1 + 20, "{:?} after {before:?}", lease(&store));
    assert_eq!(place.failure(), None);
}

/// The bug: each attempt began with a creation, which an existing lease refuses. So the three
/// requests of a renewal had to end within a third of the length.
#[test]
fn an_opener_on_a_slow_store_renews_over_an_existing_lease_and_after_an_outage() {
    let store = formatted();
    drop(Place::open(&store, Some(LENGTH)));
    let connection = Connection::new(&store);
    connection.plan().delay = Duration::from_secs(6);
    let settings = BucketSettings { lease: Some(LENGTH), ..settings() };
    let place = Place::open_by(connection, settings, Opening::default()).unwrap();
    assert_eq!(place.serving(), Serving::Yes);
    for _ in 0..3 {
        place.cut_off();
        place.pass(2 * LENGTH);
        assert_eq!(place.serving(), Serving::Held);
        // Another version than is known, as after a renewal whose answer was lost.
        replace(&store, LEASE, object(&store, LEASE));
        place.connection.plan().cut_after = u64::MAX;
        place.pass(2 * LENGTH);
        assert_eq!((place.serving(), place.failure()), (Serving::Yes, None));
    }
}

/// The time of a version is taken before it is sent. So a version that the object store confirms
/// after its end lets the opener serve no longer.
#[test]
fn a_version_that_is_confirmed_after_its_end_is_no_reason_to_serve() {
    const SHORT: Duration = Duration::from_millis(300);
    let store = formatted();
    let place = Place::open(&store, Some(SHORT));
    let (_, renewals) = lease(&store);
    let wait = || {
        let until_ns = boot_ns() + SHORT.as_nanos() as u64;
        while boot_ns() < until_ns {
            std::thread::yield_now();
        }
    };
    let next = place.connection.plan().requests + 1;
    place.connection.plan().hook = Some((Moment::Before(next), Box::new(wait)));
    place.pass(SHORT / 2);
    assert_eq!(lease(&store).1, renewals + 1);
    assert_eq!(place.serving(), Serving::Held);
}

/// The bug: the opening succeeded, and each request waited permanently.
#[test]
fn an_opening_whose_lease_is_never_confirmed_ends_with_an_error() {
    let store = formatted();
    let connection = Connection::new(&store);
    connection.plan().unwritable = Some(LEASE);
    let settings = BucketSettings { lease: Some(LENGTH), ..settings() };
    let error = Place::open_by(connection, settings, Opening::default()).err().unwrap();
    assert!(matches!(error, BucketError::Unconfirmed { .. }), "{error}");
}

/// A machine that had the pool last is started again, and another one is promoted meanwhile.
#[test]
fn a_machine_that_had_the_pool_last_does_not_take_it_from_an_opener_that_came_after() {
    let (store, log) = (formatted(), log_folder());
    let epoch = {
        let first = Place::open_local(&store, log.path());
        write(&first.pool, 0, 1).unwrap();
        first.pool.epoch()
    };
    let other = Place::open(&store, Some(LENGTH));
    let request = Opening { log: Some(log.path()), after: Some(epoch), ..Opening::default() };
    let settings = BucketSettings { lease: Some(LENGTH), ..settings() };
    let error = Place::open_by(Connection::new(&store), settings, request).err().unwrap();
    assert!(matches!(error, BucketError::Raced { .. }), "{error}");
    other.pass(LENGTH);
    assert_eq!((other.serving(), other.failure()), (Serving::Yes, None));
}
