//! Replays of traces: their ends, and what they may write.

use std::io::{ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use blockyard_core::{Flags, Nanos, Op, Sector};
use blockyard_trace::TraceOperation;
use blockyard_yard::client::Client;
use blockyard_yard::entry::WORK_MAX;
use blockyard_yard::trace::ReplayQuery;

use crate::{Served, nbd_client, refused, serve};

/// A trace of writes at these times, in seconds.
fn writes_at(times_s: &[u64]) -> Vec<u8> {
    writes_at_ms(times_s.iter().map(|time_s| time_s * 1000))
}

/// A trace of writes at these times, in milliseconds.
fn writes_at_ms(times_ms: impl Iterator<Item = u64>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for time_ms in times_ms {
        let at = Nanos(time_ms * 1_000_000);
        let (op, flags, sector, sectors, queue) = (Op::Write, Flags::NONE, Sector(8), 8, 0);
        let one = TraceOperation { at, op, flags, sector, sectors, queue };
        one.record().print(&mut bytes);
    }
    bytes
}

/// The number of writes of the device `a`.
fn written(client: &Client) -> u64 {
    client.stats_of("a").unwrap().ops.get("write").map_or(0, |view| view.ops)
}

/// A request that replays two writes an hour apart, after the first of them.
fn replay_for_an_hour(served: &Served) -> UnixStream {
    let before = written(&served.client);
    let mut stream = UnixStream::connect(served.temp.path().join("control.sock")).unwrap();
    let trace = writes_at(&[0, 3600]);
    let head = format!(
        "POST /v1/devices/a/replay?write=true HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n",
        trace.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(&trace).unwrap();
    while written(&served.client) == before {
        std::thread::yield_now();
    }
    stream
}

/// The bug: when the connection of a replay ended, the replay went on, for as long as its trace.
#[test]
fn a_replay_ends_with_its_connection_and_is_a_client_until_then() {
    let served = serve(&["null:///a?size=1M"]);
    let client = &served.client;
    let query = ReplayQuery { write: true, ..ReplayQuery::default() };
    // More often than a device works on requests at once.
    for _ in 0..=WORK_MAX {
        let stream = replay_for_an_hour(&served);
        assert_eq!(client.device("a").unwrap().clients, 1);
        let (code, _, message) = refused(client.remove("a", false));
        assert_eq!(code, "busy");
        assert!(message.contains("1 client (replay)"), "{message}");
        let (code, _, message) = refused(client.replay("a", &query, &mut &writes_at(&[0])[..]));
        assert_eq!((code.as_str(), message.contains("in use by a replay")), ("busy", true));
        drop(stream);
        while client.device("a").unwrap().clients > 0 {
            std::thread::yield_now();
        }
    }
    let view = client.replay("a", &query, &mut &writes_at(&[0])[..]).unwrap();
    assert_eq!((view.total().operations, view.is_stopped), (1, false));
}

/// The bug: while a part of a long trace was not read yet, the end of the connection was not
/// noticed, and the daemon replayed for hours what it had buffered.
#[test]
fn a_replay_of_a_long_trace_ends_with_its_connection() {
    const OPERATIONS: u64 = 100_000;
    let served = serve(&["null:///a?size=1M"]);
    let client = &served.client;
    let mut stream = UnixStream::connect(served.temp.path().join("control.sock")).unwrap();
    // 4.8 MB, more than all buffers together, for 14 hours.
    let times_ms = (0..OPERATIONS).map(|number| number * 500);
    let trace = writes_at_ms(times_ms);
    let head = format!(
        "POST /v1/devices/a/replay?write=true HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n",
        trace.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    // Until the daemon takes no more.
    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let refused = stream.write_all(&trace).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::WouldBlock);
    assert_eq!(client.device("a").unwrap().clients, 1);
    drop(stream);
    while client.device("a").unwrap().clients > 0 {
        std::thread::yield_now();
    }
    assert!(written(client) < OPERATIONS / 10);
}

#[test]
fn a_replay_is_stopped_by_its_number_by_a_removal_and_by_the_end_of_the_yard() {
    let served = serve(&["null:///a?size=1M"]);
    let client = &served.client;
    assert_eq!(client.stop_replay("a", 7).unwrap().replays, 0);
    let query = ReplayQuery { write: true, id: Some(7), ..ReplayQuery::default() };
    std::thread::scope(|scope| {
        let replay = || client.replay("a", &query, &mut &writes_at(&[0, 3600])[..]).unwrap();
        // A replay that has not begun yet when its device is removed is refused.
        let start = || {
            let before = written(client);
            let replayed = scope.spawn(replay);
            while written(client) == before {
                std::thread::yield_now();
            }
            replayed
        };
        let replayed = start();
        assert_eq!(client.stop_replay("a", 8).unwrap().replays, 0);
        assert_eq!(client.stop_replay("a", 7).unwrap().replays, 1);
        assert!(replayed.join().unwrap().is_stopped);

        let replayed = start();
        client.remove("a", true).unwrap();
        assert!(replayed.join().unwrap().is_stopped);
    });
    client.add("null:///a?size=1M").unwrap();
    let disk = Arc::downgrade(&served.daemon.devices().find("a").unwrap().disk);
    let stream = replay_for_an_hour(&served);
    drop(served);
    assert!(disk.upgrade().is_none(), "the replay has ended");
    drop(stream);
}

#[test]
fn writes_are_not_replayed_under_clients_unless_forced() {
    let served = serve(&["null:///a?size=1M"]);
    let client = &served.client;
    let _nbd = nbd_client(&served, b'a');
    let write = ReplayQuery { write: true, ..ReplayQuery::default() };
    let replay = |query: &ReplayQuery| client.replay("a", query, &mut &writes_at(&[0])[..]);
    let (code, _, message) = refused(replay(&write));
    assert_eq!(code, "busy");
    assert!(message.contains("cannot replay writes on `a`: it has 1 client"), "{message}");
    assert_eq!(written(client), 0);
    let forced = ReplayQuery { force: true, ..write };
    assert_eq!(replay(&forced).unwrap().total().operations, 1);
    assert_eq!(written(client), 1);
}

#[test]
fn a_trace_that_lasts_too_long_or_is_damaged_is_refused_at_once() {
    let served = serve(&["null:///a?size=1M"]);
    let client = &served.client;
    let query = ReplayQuery { write: true, ..ReplayQuery::default() };
    let message = |query: &ReplayQuery, trace: &[u8]| {
        let (code, _, message) = refused(client.replay("a", query, &mut &*trace));
        assert!(["trace_failed", "invalid"].contains(&code.as_str()), "{code}");
        message
    };
    let days = writes_at(&[0, 86_401]);
    let wanted = "invalid time `86401000000000 ns` of the event at offset 48";
    assert!(message(&query, &days).starts_with(wanted));
    let short = ReplayQuery { duration_max_ms: Some(1000), ..query.clone() };
    assert!(message(&short, &writes_at(&[0, 2])).starts_with("invalid time"));
    let max = ReplayQuery { speed: Some("max".to_owned()), ..query.clone() };
    assert_eq!(client.replay("a", &max, &mut &days[..]).unwrap().total().operations, 2);
    let mut damaged = writes_at(&[0, 3600]);
    damaged.push(b'x');
    assert!(message(&query, &damaged).contains("offset 96"));
    let long = ReplayQuery { duration_max_ms: Some(u64::MAX), ..query };
    assert!(message(&long, &days).starts_with("invalid duration_max_ms"));
}
