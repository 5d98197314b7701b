//! The control API over a real socket: requests of commands, and invalid requests.
#![allow(clippy::unwrap_used)] // A test that cannot go on ends where it stands.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockyard_core::{Flags, Nanos, Op, Sector};
use blockyard_trace::TraceOperation;
use blockyard_yard::api::PATHS;
use blockyard_yard::client::{Client, ClientError};
use blockyard_yard::config::NvmeSettings;
use blockyard_yard::daemon::{Daemon, DaemonOptions};
use blockyard_yard::endpoint::Endpoint;
use blockyard_yard::entry::WORK_MAX;
use blockyard_yard::paths::TempDir;
use blockyard_yard::trace::ReplayQuery;
use blockyard_yard::vhost::VhostPlace;
use blockyard_yard::view::{ErrorBody, ListenRequest, ListenerView, RootView, ZoneRequest};
use blockyard_yard::volumes::VolumeRequest;
use blockyard_yard::{uri, zones};
use virtio_driver::{VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags};

/// A daemon for one test, and a client of it.
struct Served {
    client: Client,
    // Dropped in this order: the daemon's sockets are in the directory.
    daemon: Daemon,
    temp: TempDir,
}

fn serve(uris: &[&str]) -> Served {
    serve_with(uris, NvmeSettings::default())
}

fn serve_with(uris: &[&str], nvme_access: NvmeSettings) -> Served {
    let temp = TempDir::new().unwrap();
    let control = temp.path().join("control.sock");
    let options = DaemonOptions {
        devices: uris.iter().map(|text| uri::parse(text).unwrap()).collect(),
        nbd: vec![Endpoint::Unix(temp.path().join("nbd.sock").into())],
        control: Some(control.clone().into()),
        nvme_access,
        ..DaemonOptions::default()
    };
    Served { daemon: Daemon::start(&options).unwrap(), client: Client::new(control), temp }
}

const ZONED: &str = "null:///z?size=1G&zoned=1&zone_size=64M&zone_nr_conv=2&zone_max_open=3\
                     &zone_max_active=4&memory_backed=1";

fn refused<T: std::fmt::Debug>(result: Result<T, ClientError>) -> (String, String, String) {
    match result {
        Err(ClientError::Refused(error)) => {
            (error.code, error.field.unwrap_or_default(), error.message)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn devices_are_listed_shown_added_and_removed() {
    let served = serve(&["null:///a?size=1G", ZONED]);
    let client = &served.client;
    assert_eq!(client.version().unwrap().api, 1);
    let names: Vec<_> = client.devices().unwrap().into_iter().map(|d| d.name).collect();
    assert_eq!(names, ["a", "z"]);
    let zoned = client.device("z").unwrap().zoned.unwrap();
    assert_eq!((zoned.zone_count, zoned.open_max, zoned.active_max), (16, 3, 4));
    let added = client.add("null:///b?size=2G&bs=4k").unwrap();
    assert_eq!((added.size_bytes, added.logical_block_bytes), (2 << 30, 4096));
    assert_eq!(added.uri, "null:///b?size=2G&bs=4k");
    assert_eq!(client.remove("a", false).unwrap().name, "a");
    let names: Vec<_> = client.devices().unwrap().into_iter().map(|d| d.name).collect();
    assert_eq!(names, ["z", "b"]);
    assert_eq!(client.connections().unwrap(), []);
}

#[test]
fn refusals_name_the_field_and_the_value() {
    let served = serve(&["null:///a?size=1G", ZONED]);
    let client = &served.client;
    let (code, _, message) = refused(client.device("aa"));
    assert_eq!(code, "no_such_device");
    assert_eq!(message, "there is no device `aa`; did you mean `a`?");
    assert_eq!(refused(client.remove("nope", false)).0, "no_such_device");
    assert_eq!(refused(client.device("../x")).0, "no_such_device");
    assert_eq!(refused(client.add("null:///a?size=1G")).0, "taken");
    let (code, field, _) = refused(client.add("null:///n?siz=1G"));
    assert_eq!((code.as_str(), field.as_str()), ("unknown_key", "siz"));
    let (code, field, _) = refused(client.add("null:///n?zoned=1&zone_size=3M"));
    assert_eq!((code.as_str(), field.as_str()), ("invalid", "zone_size"));
    assert_eq!(refused(client.add("nul:///n")).0, "unknown_kind");
    assert_eq!(refused(client.zones("a", 0, 1)).0, "not_zoned");
    assert_eq!(refused(client.zones("z", u64::MAX, 1)).0, "out_of_range");
    assert_eq!(refused(client.inject("a", "nonsense")).0, "invalid");
    assert_eq!(refused(client.inject("a", "nonsense=1")).0, "no_such_fault");
    let (code, field, message) = refused(client.manage(
        "z",
        "opem",
        &ZoneRequest { from: Some(0), count: Some(1), force: false },
    ));
    assert_eq!((code.as_str(), field.as_str()), ("invalid", "verb"));
    assert!(message.contains("did you mean `open`?"), "{message}");
}

/// An NBD client of the device with this name of one letter.
fn nbd_client(served: &Served, name: u8) -> UnixStream {
    let mut nbd = UnixStream::connect(served.temp.path().join("nbd.sock")).unwrap();
    nbd.read_exact(&mut [0; 18]).unwrap();
    // Fixed newstyle without zeroes, then NBD_OPT_EXPORT_NAME and its reply.
    nbd.write_all(&3_u32.to_be_bytes()).unwrap();
    nbd.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\x01").unwrap();
    nbd.write_all(&[name]).unwrap();
    nbd.read_exact(&mut [0; 10]).unwrap();
    nbd
}

/// The bug: `zone reset`, `open` and `finish` changed a device whose clients had a file system on
/// it, and destroyed that file system.
#[test]
fn zones_do_not_change_under_clients_unless_forced() {
    let served = serve(&[ZONED]);
    let client = &served.client;
    let _nbd = nbd_client(&served, b'z');
    let zone = |force| ZoneRequest { from: Some(4 * 131_072), count: Some(1), force };
    for verb in ["open", "close", "finish", "reset", "reset-all"] {
        let (code, field, message) = refused(client.manage("z", verb, &zone(false)));
        assert_eq!((code.as_str(), field.as_str()), ("busy", "name"), "{verb}");
        assert!(message.contains("it has 1 client"), "{message}");
    }
    assert_eq!(client.manage("z", "finish", &zone(true)).unwrap().zones, 1);
    assert_eq!(client.manage("z", "reset", &zone(true)).unwrap().zones, 1);
}

/// The bug: a stopped yard accepted the connections of commands, which then waited for 90 seconds
/// without a message.
#[test]
fn a_yard_that_says_nothing_is_given_up_after_the_timeout() {
    let temp = TempDir::new().unwrap();
    let control = temp.path().join("control.sock");
    let _silent = std::os::unix::net::UnixListener::bind(&control).unwrap();
    let client = Client::new(control).with_timeout(Some(std::time::Duration::from_millis(20)));
    let error = client.version().unwrap_err();
    assert!(matches!(error, ClientError::TimedOut { .. }), "{error}");
}

#[test]
fn zones_are_reported_in_pages_and_managed() {
    let served = serve(&[ZONED]);
    let client = &served.client;
    let page = client.zones("z", 0, 5).unwrap();
    assert_eq!(page.zones.len(), 5);
    assert_eq!(page.next, Some(5 * 131_072));
    let rest = client.zones("z", page.next.unwrap(), zones::REPORT_MAX).unwrap();
    assert_eq!((rest.zones.len(), rest.next), (11, None));
    assert_eq!(page.zones[0].cond, "not-wp");
    let range = |zone: u64, count| ZoneRequest {
        from: Some(zone * 131_072),
        count: Some(count),
        force: false,
    };
    assert_eq!(client.manage("z", "open", &range(2, 3)).unwrap().zones, 3);
    let cond = |zone: u64| client.zones("z", zone * 131_072, 1).unwrap().zones[0].cond.clone();
    assert_eq!(
        (cond(2), cond(4), cond(5)),
        ("explicit-open".into(), "explicit-open".into(), "empty".into())
    );
    let (code, field, message) = refused(client.manage("z", "open", &range(5, 1)));
    assert_eq!((code.as_str(), field.as_str()), ("zone_operation_failed", "ZONE_OPEN_RESOURCE"));
    assert!(message.starts_with("zone 5 at sector 655360: open failed"), "{message}");
    client.manage("z", "finish", &range(2, 1)).unwrap();
    assert_eq!(cond(2), "full");
    client.manage("z", "close", &range(3, 1)).unwrap();
    assert_eq!(cond(3), "empty", "nothing was written to it");
    client.manage("z", "reset", &range(2, 1)).unwrap();
    assert_eq!(cond(2), "empty");
    assert_eq!(client.manage("z", "reset-all", &ZoneRequest::default()).unwrap().zones, 16);
    assert_eq!(cond(4), "empty");
    // A sector at which no zone begins, a count of zero, and too many zones.
    let odd = ZoneRequest { from: Some(8), count: Some(1), force: false };
    assert_eq!(refused(client.manage("z", "open", &odd)).1, "from");
    assert_eq!(refused(client.manage("z", "open", &range(2, 0))).1, "count");
    assert_eq!(refused(client.manage("z", "open", &range(15, 2))).1, "count");
    assert_eq!(refused(client.manage("z", "reset-all", &range(2, 1))).1, "from");
}

#[test]
fn faults_reach_the_injector_and_the_device() {
    let served = serve(&[ZONED]);
    let client = &served.client;
    client.inject("z", "add,op=ZONE_OPEN,status=MEDIUM,times=1").unwrap();
    let zone = ZoneRequest { from: Some(4 * 131_072), count: Some(1), force: false };
    assert_eq!(refused(client.manage("z", "open", &zone)).1, "MEDIUM");
    client.manage("z", "open", &zone).unwrap();
    client.inject("z", "zone_offline=655360").unwrap();
    let report = client.zones("z", 655_360, 1).unwrap();
    assert_eq!((report.zones[0].cond.as_str(), report.zones[0].wptr), ("offline", None));
    client.inject("z", "removeall").unwrap();
    let stats = client.stats_of("z").unwrap();
    assert_eq!((stats.ops["zone_open"].ops, stats.ops["zone_open"].errors), (2, 1));
    let text = client.metrics().unwrap();
    assert!(text.contains("blockyard_zones{device=\"z\",cond=\"offline\"} 1"), "{text}");
}

#[test]
fn rules_are_numbered_listed_counted_and_removed() {
    let served = serve(&[ZONED]);
    let client = &served.client;
    let first = client.inject("z", "add,op=ZONE_OPEN,zones=4-5,status=MEDIUM").unwrap();
    assert_eq!((first, client.inject("z", "zone_readonly=0").is_err()), (Some(1), true));
    assert_eq!(client.inject("z", "add,op=ZONE_OPEN,latency=1us").unwrap(), Some(2));
    assert_eq!(refused(client.inject("z", "add,zones=16,status=IOERR")).1, "zones");
    let zone = |zone: u64| ZoneRequest { from: Some(zone * 131_072), count: Some(1), force: false };
    assert_eq!(refused(client.manage("z", "open", &zone(5))).1, "MEDIUM");
    client.manage("z", "open", &zone(6)).unwrap();
    let faults = client.device("z").unwrap().faults;
    let counts: Vec<_> = faults.iter().map(|it| (it.id, it.matched, it.applied)).collect();
    assert_eq!(counts, [(2, 2, 2), (1, 1, 1)], "the newest first");
    let text = client.metrics().unwrap();
    for want in [
        "blockyard_device_injected_faults_total{device=\"z\",effect=\"error\"} 1\n",
        "blockyard_device_injected_faults_total{device=\"z\",effect=\"delay\"} 2\n",
        "blockyard_device_fault_rules{device=\"z\"} 2\n",
    ] {
        assert!(text.contains(want), "{want}");
    }
    assert_eq!(client.remove_faults("z", Some(1)).unwrap().removed, 1);
    assert_eq!(refused(client.remove_faults("z", Some(1))).0, "no_such_rule");
    assert_eq!(client.remove_faults("z", None).unwrap().removed, 1);
    assert_eq!(client.device("z").unwrap().faults, []);
}

/// A scenario lasts as long as its client: one that is gone leaves no rules.
#[test]
fn a_scenario_whose_client_is_gone_removes_its_rules() {
    let served = serve(&[ZONED]);
    let client = &served.client;
    let step = "[[step]]\nat = \"0s\"\nfor = \"24h\"\nzones = \"3-7\"\nstatus = \"IOERR\"\n";
    let mut answer = client.run_scenario(step, Some("z"), 7).unwrap();
    let mut line = [0; 512];
    let len = answer.read(&mut line).unwrap();
    let line: serde_json::Value = serde_json::from_slice(&line[..len]).unwrap();
    assert_eq!((&line["event"], &line["step"]), (&"begin".into(), &1.into()));
    assert_eq!(client.device("z").unwrap().faults.len(), 1);
    drop(answer);
    while !client.device("z").unwrap().faults.is_empty() {
        std::thread::yield_now();
    }
    let (code, _, message) = refused(client.run_scenario("[[step]]", None, 7));
    assert_eq!(code, "invalid");
    assert!(message.starts_with("line 1: the step has no `at`"), "{message}");
    let bad = step.replace("3-7", "3-99");
    let message = refused(client.run_scenario(&bad, Some("z"), 7)).2;
    assert_eq!(message, "line 1: invalid zones `3-99`: expected zones from 0 to 15");
}

#[test]
fn a_verb_on_the_whole_device_passes_over_what_it_cannot_change() {
    let served = serve(&["null:///z?size=1G&zoned=1&zone_size=64M&zone_nr_conv=2&zone_max_open=8"]);
    let client = &served.client;
    let all = ZoneRequest::default();
    let zone = |zone: u64| ZoneRequest { from: Some(zone * 131_072), count: Some(1), force: false };
    let (_, _, message) = refused(client.manage("z", "open", &all));
    let want = "zone 10 at sector 1310720: open failed with ZONE_OPEN_RESOURCE (ETOOMANYREFS): 8 \
                zones are open already, the most that this device allows; close, finish or reset \
                one first; 8 zones done before it";
    assert!(message.starts_with(want), "{message}");
    assert_eq!(client.manage("z", "close", &all).unwrap().zones, 8);
    assert_eq!(client.manage("z", "finish", &all).unwrap().zones, 14);
    for (verb, number, want) in [
        ("open", 0, "zone 0 is conventional"),
        ("open", 5, "zone 5 is full"),
        ("close", 5, "zone 5 is full"),
    ] {
        let (_, _, message) = refused(client.manage("z", verb, &zone(number)));
        assert!(message.contains(want), "{message}");
    }
}

#[test]
fn a_slow_device_has_a_bound_and_delays_no_other_request() {
    let served = serve(&[
        "null:///a?size=1G",
        "null:///z?size=1G&zoned=1&zone_size=64M&irqmode=timer&completion_nsec=20000000000",
    ]);
    let (sender, ends) = std::sync::mpsc::channel();
    let zone = ZoneRequest { from: Some(0), count: Some(1), force: false };
    for _ in 0..=WORK_MAX {
        let (client, zone, sender) = (served.client.clone(), zone.clone(), sender.clone());
        // Requests that still wait at the end of the test get no answer.
        std::thread::spawn(move || sender.send(client.manage("z", "open", &zone)));
    }
    // The device takes long, so the first answer is that of the refused request.
    assert_eq!(refused(ends.recv().unwrap()).0, "overloaded");
    let client = &served.client;
    assert_eq!(client.devices().unwrap().len(), 2);
    assert_eq!(client.stats().unwrap().len(), 2);
    assert_eq!(client.zones("z", 0, 1).unwrap().zones.len(), 1);
    assert!(client.metrics().unwrap().contains("\nblockyard_build_info{"));
}

/// What a client does with its sending direction after the request.
#[derive(PartialEq, Eq)]
enum Half {
    Open,
    Closed,
}

/// Sends raw bytes and returns the status line and the body.
fn raw(served: &Served, request: &[u8], half: Half) -> (String, String) {
    let mut stream = UnixStream::connect(served.client.path()).unwrap();
    // The server may answer and close before it has read everything.
    let _ = stream.write_all(request);
    // A client that closes its sending direction after a complete request may get no answer. After
    // noise that is no complete request the server may wait for more.
    if half == Half::Closed {
        let _ = stream.shutdown(std::net::Shutdown::Write);
    }
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    (head.lines().next().unwrap_or_default().to_owned(), body.to_owned())
}

fn request(method: &str, path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\
         \r\n{body}"
    )
    .into_bytes()
}

#[test]
fn bad_requests_get_an_error_in_json_and_the_daemon_lives_on() {
    let served = serve(&["null:///a?size=1G"]);
    let long = "x".repeat(100 << 10);
    let cases: [(&str, &str, &str, &str, &str); 12] = [
        ("GET", "/", "", "404", "no_such_path"),
        ("GET", "/v2/devices", "", "404", "no_such_path"),
        ("PUT", "/v1/devices", "", "405", "method_not_allowed"),
        ("POST", "/v1/devices", "", "400", "bad_body"),
        ("POST", "/v1/devices", "{", "400", "bad_body"),
        ("POST", "/v1/devices", "[]", "400", "bad_body"),
        ("POST", "/v1/devices", "{\"uri\":5}", "400", "bad_body"),
        ("POST", "/v1/devices", "{\"url\":\"null:///x\"}", "400", "bad_body"),
        ("POST", "/v1/devices", &long, "413", "bad_body"),
        ("GET", "/v1/devices/a/zones?from=-1", "", "400", "bad_query"),
        ("DELETE", "/v1/devices/a?drain_ms=99999999", "", "400", "invalid"),
        ("GET", "/v1/devices/%FF", "", "400", "bad_path"),
    ];
    for (method, path, body, status, code) in cases {
        let (line, body) = raw(&served, &request(method, path, body), Half::Open);
        assert!(line.starts_with(&format!("HTTP/1.1 {status} ")), "{method} {path}: {line} {body}");
        let error: ErrorBody = serde_json::from_str(&body).expect(path);
        assert_eq!(error.error.code, code, "{method} {path}: {body}");
    }
    for noise in [&b"\0\xff\x80 garbage\r\n\r\n"[..], b"GET", b"", b"GET / HTTP/9.9\r\n\r\n"] {
        raw(&served, noise, Half::Closed);
    }
    assert_eq!(served.client.devices().unwrap().len(), 1);
}

#[test]
fn the_root_lists_every_path() {
    let served = serve(&["null:///a?size=1G"]);
    let (line, body) = raw(&served, &request("GET", "/v1", ""), Half::Open);
    assert!(line.starts_with("HTTP/1.1 200 "), "{line}");
    let root: RootView = serde_json::from_str(&body).unwrap();
    assert_eq!(root.paths, PATHS);
    for path in PATHS {
        // A stream has no end; one of zones that the device lacks is refused.
        let path = if path == "/v1/stream" { "/v1/stream?zones=a" } else { path };
        let path = path.replace("{name}", "a").replace("{verb}", "open");
        let (_, body) = raw(&served, &request("GET", &path, ""), Half::Open);
        assert!(!body.contains("no_such_path"), "{path}: {body}");
    }
    let limits = served.client.device("a").unwrap().limits;
    assert_ne!(limits.sectors_max, Some(u64::MAX));
}

/// The bug: 64 connections that sent nothing blocked `/metrics` and the control socket permanently.
#[test]
fn clients_that_say_nothing_keep_no_request_out() {
    let served = serve(&["null:///a?size=1G"]);
    let silent: Vec<_> =
        (0..200).map(|_| UnixStream::connect(served.client.path()).unwrap()).collect();
    assert_eq!(served.client.devices().unwrap().len(), 1);
    drop(silent);
    assert_eq!(served.client.devices().unwrap().len(), 1);
}

#[test]
fn a_device_with_clients_goes_only_by_force() {
    let served = serve(&["null:///a?size=1G"]);
    let mut stream = UnixStream::connect(served.temp.path().join("nbd.sock")).unwrap();
    // The handshake of fixed newstyle, with NBD_OPT_EXPORT_NAME for the export `a`.
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    stream.write_all(&3_u32.to_be_bytes()).unwrap();
    stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\x01a").unwrap();
    let mut export = [0; 10];
    stream.read_exact(&mut export).unwrap();
    assert_eq!(u64::from_be_bytes(export[..8].try_into().unwrap()), 1 << 30);
    let client = &served.client;
    let connections = client.connections().unwrap();
    assert_eq!(connections[0].device.as_deref(), Some("a"));
    assert_eq!(refused(client.remove("a", false)).0, "busy");
    assert_eq!(client.device("a").unwrap().clients, 1);
    client.remove("a", true).unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "the client was disconnected");
    assert!(client.devices().unwrap().is_empty());
}

#[test]
fn a_socket_belongs_to_one_daemon_and_goes_with_it() {
    let served = serve(&["null:///a?size=1G"]);
    let path = served.client.path().to_owned();
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let options = DaemonOptions { control: Some(path.clone().into()), ..DaemonOptions::default() };
    let error = Daemon::start(&options).map(drop).unwrap_err().to_string();
    assert!(error.contains("another yard answers"), "{error}");
    let client = served.client.clone();
    drop(served.daemon);
    assert!(!path.exists());
    assert!(matches!(client.devices(), Err(ClientError::Unreachable { .. })));
    // A socket without a listener is replaced; a file is not.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    drop(Daemon::start(&options).unwrap());
    std::fs::write(&path, "precious").unwrap();
    let error = Daemon::start(&options).map(drop).unwrap_err().to_string();
    assert!(error.contains("is no socket"), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn metrics_are_served_alone_elsewhere() {
    let temp = TempDir::new().unwrap();
    let host = "127.0.0.1".to_owned();
    let options = DaemonOptions {
        devices: vec![uri::parse("null:///a?size=1G").unwrap()],
        metrics: Some(Endpoint::Tcp { host, port: 0 }),
        ..DaemonOptions::default()
    };
    let daemon = Daemon::start(&options).unwrap();
    let address = daemon.control().unwrap().metrics_address().unwrap().to_owned();
    let place = address.strip_prefix("http://").unwrap().strip_suffix("/metrics").unwrap();
    for (path, status) in [("/metrics", "HTTP/1.1 200"), ("/v1/devices", "HTTP/1.1 404")] {
        let mut stream = std::net::TcpStream::connect(place).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with(status), "{answer}");
    }
    drop(temp);
}

/// The admin queue of an NVMe host on a subsystem, and an I/O queue of it.
fn nvme_queues(address: std::net::SocketAddr, nqn: &str) -> [std::net::TcpStream; 2] {
    let mut controller = 0xffffu16;
    [(0u16, 31u16), (1, 127)].map(|(queue, entries)| {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        let mut request = [0; 128];
        (request[2], request[4]) = (128, 128);
        stream.write_all(&request).unwrap();
        stream.read_exact(&mut request).unwrap();
        let mut capsule = vec![0; 72 + 1024];
        (capsule[0], capsule[2], capsule[3]) = (4, 72, 72);
        capsule[4..8].copy_from_slice(&(72 + 1024u32).to_le_bytes());
        (capsule[8], capsule[9], capsule[12]) = (0x7f, 0x40, 1);
        capsule[40..44].copy_from_slice(&1024u32.to_le_bytes());
        capsule[47] = 1;
        capsule[50..52].copy_from_slice(&queue.to_le_bytes());
        capsule[52..54].copy_from_slice(&entries.to_le_bytes());
        let data = &mut capsule[72..];
        data[16..18].copy_from_slice(&controller.to_le_bytes());
        data[256..256 + nqn.len()].copy_from_slice(nqn.as_bytes());
        data[512..512 + HOST_NQN.len()].copy_from_slice(HOST_NQN.as_bytes());
        let answer = exchange(&mut stream, &capsule);
        controller = u16::from_le_bytes([answer[8], answer[9]]);
        if queue == 0 {
            let mut enable = [0; 72];
            (enable[0], enable[2], enable[4], enable[8], enable[9]) = (4, 72, 72, 0x7f, 0x40);
            enable[52] = 0x14;
            enable[56..60].copy_from_slice(&0x46_0061u32.to_le_bytes());
            exchange(&mut stream, &enable);
        }
        stream
    })
}

/// Sends a command that succeeds without data to the host; returns its completion.
fn exchange(stream: &mut std::net::TcpStream, capsule: &[u8]) -> [u8; 24] {
    stream.write_all(capsule).unwrap();
    let mut answer = [0; 24];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!((answer[0], &answer[22..24]), (5, &[0, 0][..]), "{answer:?}");
    answer
}

/// The refusal did not name the hosts of the subsystem of all devices.
#[test]
fn the_refusal_to_remove_a_device_names_the_hosts_of_all_devices() {
    let all = "nqn.2026-11.io.blockyard:all";
    let nvme = NvmeSettings { subsystem: Some(all.to_owned()), ..NvmeSettings::default() };
    let served = serve_with(&["null:///a?size=1G"], nvme);
    let place = "tcp:127.0.0.1:0".to_owned();
    let started = served.client.listen(&ListenRequest { place, discovery: false }).unwrap();
    let address = started.addresses[0].strip_prefix("tcp:").unwrap().parse().unwrap();
    let [admin, _io] = nvme_queues(address, all);
    let (code, _, message) = refused(served.client.remove("a", false));
    assert_eq!(code, "busy");
    let client = format!("it has 1 client (tcp:{})", admin.local_addr().unwrap());
    assert!(message.contains(&client), "{message}");
}

/// The metrics did not count their commands, and the list of connections did not say what they use.
#[test]
fn hosts_of_all_devices_are_in_devices_connections_and_metrics() {
    let all = "nqn.2026-11.io.blockyard:all";
    let nvme = NvmeSettings { subsystem: Some(all.to_owned()), ..NvmeSettings::default() };
    let served = serve_with(&["null:///a?size=1G", "null:///b?size=1G"], nvme);
    let client = &served.client;
    let place = "tcp:127.0.0.1:0".to_owned();
    let started = client.listen(&ListenRequest { place, discovery: false }).unwrap();
    let address = started.addresses[0].strip_prefix("tcp:").unwrap().parse().unwrap();
    let [admin, mut io] = nvme_queues(address, all);
    // A Flush of `a` succeeds, one beyond the namespaces is counted for no device.
    let mut flush = [0; 72];
    (flush[0], flush[2], flush[4], flush[9], flush[12]) = (4, 72, 72, 0x40, 1);
    exchange(&mut io, &flush);
    flush[12] = 3;
    io.write_all(&flush).unwrap();
    io.read_exact(&mut [0; 24]).unwrap();
    for name in ["a", "b"] {
        let shown = client.device(name).unwrap();
        let [host] = &shown.hosts[..] else { panic!("{shown:?}") };
        assert_eq!((shown.clients, host.queues), (1, 1), "{name}");
        assert_eq!((&*host.nqn, &*host.subsystem), (HOST_NQN, all));
        assert_eq!(host.peer, format!("tcp:{}", admin.local_addr().unwrap()));
        assert_ne!(shown.nqn.as_deref(), Some(all), "its own subsystem is another one");
    }
    let connections = client.connections().unwrap();
    let queues: Vec<_> = connections.iter().map(|it| (it.queue, it.device.as_deref())).collect();
    assert_eq!(queues, [(Some(0), None), (Some(1), None)]);
    let controller = client.device("a").unwrap().hosts[0].controller;
    for it in &connections {
        let of = (it.subsystem.as_deref(), it.host.as_deref(), it.controller);
        assert_eq!(of, (Some(all), Some(HOST_NQN), Some(controller)));
    }
    for stats in client.stats().unwrap() {
        let [host] = &stats.hosts[..] else { panic!("{stats:?}") };
        assert_eq!(
            (&*host.nqn, host.controller, &host.queue_numbers[..]),
            (HOST_NQN, controller, &[1][..])
        );
    }
    let text = client.metrics().unwrap();
    for (name, value) in [
        (r#"nvme_controllers{device="a"}"#, "1"),
        (r#"nvme_controllers{device="b"}"#, "1"),
        (r#"nvme_queues{device="b"}"#, "1"),
        (r#"nvme_commands_total{device="a"}"#, "1"),
        (r#"nvme_commands_total{device="b"}"#, "0"),
        (r#"nvme_errors_total{device="a"}"#, "0"),
    ] {
        assert!(text.contains(&format!("\nblockyard_{name} {value}\n")), "{name}: {text}");
    }
}

/// Executes a flush on each ring of a new hypervisor.
fn flush_by_vhost(socket: &Path, rings: usize) {
    let features = VirtioFeatureFlags::VERSION_1.bits() | 1 << 9 | 1 << 12;
    let transport = VhostUser::new(socket.to_str().unwrap(), features).unwrap();
    let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
    let queues = VirtioBlkQueue::setup_queues(transport.as_mut(), rings, 16).unwrap();
    for (index, mut queue) in queues.into_iter().enumerate() {
        queue.flush(()).unwrap();
        transport.get_submission_notifier(index).notify().unwrap();
        let done = loop {
            if let Some(done) = queue.completions().next() {
                break done;
            }
            std::thread::yield_now();
        };
        assert_eq!(done.ret, 0);
    }
}

#[test]
fn hypervisors_are_in_the_metrics_by_device_and_ring() {
    let temp = TempDir::new().unwrap();
    let (control, path) = (temp.path().join("control.sock"), temp.path().join("a.sock"));
    let uris = ["null:///a?size=1G", "null:///b?size=1G"];
    let options = DaemonOptions {
        devices: uris.iter().map(|text| uri::parse(text).unwrap()).collect(),
        vhost: vec![VhostPlace::of("a", &format!("unix:{}", path.display())).unwrap()],
        control: Some(control.clone().into()),
        ..DaemonOptions::default()
    };
    let _daemon = Daemon::start(&options).unwrap();
    let client = Client::new(control);
    for requests in 1..=2 {
        flush_by_vhost(&path, 2);
        let listed = client.vhost().unwrap();
        let rings = &listed[0].rings;
        assert_eq!((listed.len(), rings.len()), (1, 2), "{listed:?}");
        for (index, ring) in rings.iter().enumerate() {
            assert_eq!((ring.ring, ring.requests, ring.errors), (index as u64, requests, 0));
        }
        while client.vhost().unwrap()[0].is_connected {
            std::thread::yield_now();
        }
        let text = client.metrics().unwrap();
        for (name, value) in [
            (r#"vhost_connected{device="a"}"#, 0),
            (r#"vhost_queues{device="a"}"#, 0),
            (r#"vhost_requests_total{device="a",ring="0"}"#, requests),
            (r#"vhost_requests_total{device="a",ring="1"}"#, requests),
            (r#"vhost_errors_total{device="a",ring="1"}"#, 0),
            (r#"vhost_bytes_total{device="a",ring="1",op="read"}"#, 0),
            (r#"vhost_bytes_total{device="a",ring="1",op="write"}"#, 0),
        ] {
            assert!(text.contains(&format!("\nblockyard_{name} {value}\n")), "{name}: {text}");
        }
        for name in [
            r#"vhost_kicks_total{device="a",ring="0"}"#,
            r#"vhost_calls_total{device="a",ring="0"}"#,
            r#"vhost_sleeps_total{device="a",ring="0"}"#,
            r#"vhost_spins_total{device="a",ring="0",found="yes"}"#,
            r#"vhost_spins_total{device="a",ring="0",found="no"}"#,
            r#"vhost_spin_seconds_total{device="a",ring="0"}"#,
        ] {
            assert!(text.contains(&format!("\nblockyard_{name} ")), "{name}: {text}");
        }
        assert!(!text.contains(r#"vhost_requests_total{device="b""#), "{text}");
    }
    let _stream = UnixStream::connect(&path).unwrap();
    while !client.vhost().unwrap()[0].is_connected {
        std::thread::yield_now();
    }
    let text = client.metrics().unwrap();
    assert!(text.contains("\nblockyard_vhost_connected{device=\"a\"} 1\n"), "{text}");
}

/// The series of a family of a client's latency, without the names of the family and of its class.
fn latency_counts(client: &Client) -> Vec<String> {
    let text = client.metrics().unwrap();
    let prefix = "blockyard_client_latency_seconds_count{";
    text.lines().filter_map(|line| line.strip_prefix(prefix)).map(str::to_owned).collect()
}

#[test]
fn the_latency_of_a_queue_of_an_nvme_host_counts_its_commands() {
    let served = serve_with(&["null:///a?size=1G"], NvmeSettings::default());
    let place = "tcp:127.0.0.1:0".to_owned();
    let started = served.client.listen(&ListenRequest { place, discovery: false }).unwrap();
    let address = started.addresses[0].strip_prefix("tcp:").unwrap().parse().unwrap();
    let [_admin, mut io] = nvme_queues(address, "nqn.2026-11.io.blockyard:a");
    for count in 1..=3 {
        // A write of one block, with its data in the capsule.
        let mut capsule = vec![0; 72 + 512];
        (capsule[0], capsule[2], capsule[3]) = (4, 72, 72);
        capsule[4..8].copy_from_slice(&(72 + 512u32).to_le_bytes());
        (capsule[8], capsule[9], capsule[12]) = (0x01, 0x40, 1);
        capsule[40..44].copy_from_slice(&512u32.to_le_bytes());
        capsule[47] = 1;
        exchange(&mut io, &capsule);
        let counts = latency_counts(&served.client);
        let labels =
            format!(r#"peer="tcp:{}",host="{HOST_NQN}",controller="#, io.local_addr().unwrap());
        assert!(counts[0].starts_with(r#"protocol="nvme",server="","#), "{counts:?}");
        assert!(counts[0].contains(&labels), "{counts:?}");
        let rest = format!(r#",queue="1",device="a",op="write"}} {count}"#);
        assert!(counts.len() == 1 && counts[0].ends_with(&rest), "{counts:?}");
        let listed = served.client.connections().unwrap();
        let writes = |queue| {
            let found = listed.iter().find(|it| it.queue == Some(queue)).unwrap();
            found.write_latency.iter().map(|(_, count)| count).sum::<u64>()
        };
        assert_eq!((writes(0), writes(1)), (0, count));
    }
}

/// The latency of a hypervisor had the labels of the one before, if that left between the list of
/// connections and the look at its counters.
#[test]
fn the_latency_of_a_hypervisor_counts_its_requests() {
    let temp = TempDir::new().unwrap();
    let (control, path) = (temp.path().join("control.sock"), temp.path().join("a.sock"));
    let options = DaemonOptions {
        devices: vec![uri::parse("null:///a?size=1G&memory_backed=1&discard=1").unwrap()],
        vhost: vec![VhostPlace::of("a", &format!("unix:{}", path.display())).unwrap()],
        control: Some(control.clone().into()),
        ..DaemonOptions::default()
    };
    let _daemon = Daemon::start(&options).unwrap();
    let client = Client::new(control);
    for connection in 1..=2 {
        let features = VirtioFeatureFlags::VERSION_1.bits() | 1 << 9 | 1 << 12 | 1 << 13;
        let transport = VhostUser::new(path.to_str().unwrap(), features).unwrap();
        let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
        let queues = VirtioBlkQueue::setup_queues(transport.as_mut(), 2, 16).unwrap();
        for (index, mut queue) in queues.into_iter().enumerate() {
            queue.discard(0, 4096, ()).unwrap();
            transport.get_submission_notifier(index).notify().unwrap();
            let done = loop {
                if let Some(done) = queue.completions().next() {
                    break done;
                }
                std::thread::yield_now();
            };
            assert_eq!(done.ret, 0);
        }
        let peer = format!("process {}", std::process::id());
        let expected = format!(
            r#"protocol="vhost",server="",connection="{connection}",peer="{peer}",host="","#
        ) + r#"controller="",queue="",device="a",op="discard"} 2"#;
        assert_eq!(latency_counts(&client), [expected]);
        drop(transport);
        while client.vhost().unwrap()[0].is_connected {
            std::thread::yield_now();
        }
        assert_eq!(latency_counts(&client), [""; 0]);
    }
}

const HOST_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555";

/// NBD clients cannot learn a new length, so the volume must have none. NVMe hosts can.
#[test]
fn a_volume_grows_under_an_nvme_host_and_does_not_shrink() {
    let temp = TempDir::new().unwrap();
    let (control, pool) = (temp.path().join("control.sock"), temp.path().join("pool"));
    let uri = format!("volume:///v0?size=64M&path={}", pool.display());
    let host = "127.0.0.1".to_owned();
    let options = DaemonOptions {
        devices: vec![uri::parse(&uri).unwrap()],
        nvme: vec![Endpoint::Tcp { host, port: 0 }],
        control: Some(control.clone().into()),
        ..DaemonOptions::default()
    };
    let daemon = Daemon::start(&options).unwrap();
    let address = daemon.nvme().addresses(false)[0];
    let client = Client::new(control);
    let [mut admin, mut io] = nvme_queues(address, "nqn.2026-11.io.blockyard:v0");
    let shown = client.device("v0").unwrap();
    assert_eq!((shown.clients, shown.hosts.len()), (1, 1));
    assert_eq!((&*shown.hosts[0].nqn, shown.hosts[0].queues), (HOST_NQN, 1));
    // Reads the last block of a volume of this length; `false` if it is beyond the end.
    let block = shown.logical_block_bytes;
    let mut read = [0; 72];
    (read[0], read[2], read[4], read[8], read[9], read[12]) = (4, 72, 72, 2, 0x40, 1);
    read[40..44].copy_from_slice(&block.to_le_bytes());
    read[47] = 0x5a;
    let mut read_last = |mib: u64| {
        read[48..56].copy_from_slice(&((mib << 20) / u64::from(block) - 1).to_le_bytes());
        io.write_all(&read).unwrap();
        let mut answer = [0; 24];
        io.read_exact(&mut answer).unwrap();
        if answer[0] == 5 {
            assert_eq!(answer[22..24], (0x4080u16 << 1).to_le_bytes(), "LBA Out of Range");
            return false;
        }
        // The data, and the completion.
        io.read_exact(&mut vec![0; block as usize + 24]).unwrap();
        true
    };
    let resize = |size: u64, force: bool| {
        let (name, size_bytes) = ("v0".to_owned(), Some(size));
        client.volume("resize", &VolumeRequest { name, size_bytes, force, ..Default::default() })
    };
    assert!(read_last(64) && !read_last(128));
    assert_eq!(resize(128 << 20, false).unwrap().done, "resized v0 to 128M");
    assert!(read_last(128) && !read_last(129));
    assert_eq!(refused(resize(64 << 20, true)).0, "busy");
    // What the pool refuses leaves the volume as it was.
    assert!(resize((200 << 20) + 1000, false).is_err(), "no whole blocks");
    assert!(read_last(128));
    let mut keep_alive = [0; 72];
    (keep_alive[0], keep_alive[2], keep_alive[4], keep_alive[8]) = (4, 72, 72, 0x18);
    exchange(&mut admin, &keep_alive);
}

#[test]
fn nvme_listeners_come_and_go_while_the_yard_serves() {
    let served = serve(&["null:///a?size=1G", ZONED]);
    let client = &served.client;
    let listen = |place: &str, discovery: bool| {
        client.listen(&ListenRequest { place: place.to_owned(), discovery })
    };
    let unserved = |device: &str| {
        let shown = client.device(device).unwrap();
        assert_eq!(shown.nqn, None);
        assert!(shown.notes.iter().all(|note| !note.contains("NVMe")), "{:?}", shown.notes);
    };
    unserved("a");
    unserved("z");
    // No other test uses this address, so that the port stays free while nothing listens at it.
    let any = "tcp:127.0.78.2:0";
    // What is refused leaves nothing.
    for place in ["unix:/x", "stdio", "tcp:x", "nonsense"] {
        let (code, field, message) = refused(listen(place, false));
        assert_eq!((&*code, &*field), ("invalid", "place"));
        assert_eq!(message, format!("invalid place `{place}`: expected tcp:HOST:PORT"));
    }
    let (code, field, message) = refused(listen(any, true));
    assert_eq!((&*code, &*field), ("invalid", "discovery"), "{message}");
    let (code, field, message) = refused(client.unlisten(any, false));
    assert_eq!((&*code, &*field), ("no_such_listener", "place"));
    assert_eq!(message, format!("there is no NVMe listener at `{any}`; there is none"));
    assert_eq!(client.listeners().unwrap(), []);
    // The devices that are there are served, those that NVMe cannot describe say so.
    let started = listen(any, false).unwrap();
    assert_eq!((&*started.place, started.discovery, started.hosts), (any, false, 0));
    assert!(started.warnings[0].starts_with("any NVMe host that reaches"), "{started:?}");
    let [address] = &started.addresses[..] else { panic!("{started:?}") };
    let nqn = "nqn.2026-11.io.blockyard:a";
    assert_eq!(client.device("a").unwrap().nqn.as_deref(), Some(nqn));
    let notes = client.device("z").unwrap().notes;
    assert!(notes[0].starts_with("not served over NVMe: it has 2 conventional zones"), "{notes:?}");
    let (code, field, message) = refused(listen(address, false));
    assert_eq!((&*code, &*field), ("listen_failed", "place"));
    assert!(message.starts_with(&format!("cannot listen at `{address}`: ")), "{message}");
    assert!(listen(any, true).unwrap().warnings.is_empty(), "discovery shows names only");
    let places = |listed: Vec<ListenerView>| {
        listed.iter().map(|it| (it.discovery, it.hosts)).collect::<Vec<_>>()
    };
    assert_eq!(places(client.listeners().unwrap()), [(false, 0), (true, 0)]);
    // A listener that hosts use is stopped by force only, and their connections end.
    let socket = address.strip_prefix("tcp:").unwrap().parse().unwrap();
    let [mut admin, mut io] = nvme_queues(socket, nqn);
    assert_eq!(places(client.listeners().unwrap()), [(false, 1), (true, 0)]);
    assert_eq!(client.connections().unwrap().len(), 2);
    let (code, field, message) = refused(client.unlisten(address, false));
    assert_eq!((&*code, &*field), ("busy", "place"));
    assert!(message.contains("1 host is connected"), "{message}");
    assert_eq!(client.unlisten(address, true).unwrap().hosts, 1);
    for stream in [&mut admin, &mut io] {
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the connection ends");
    }
    unserved("a");
    unserved("z");
    assert_eq!(client.device("a").unwrap().clients, 0);
    // A device that is added meanwhile is served at the same port later.
    client.add("null:///b?size=1G").unwrap();
    assert_eq!(&listen(address, false).unwrap().addresses[0], address);
    let [_admin, _io] = nvme_queues(socket, "nqn.2026-11.io.blockyard:b");
    assert_eq!(client.device("b").unwrap().hosts.len(), 1);
}

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
