//! The control API over a real socket: requests of commands, and invalid requests.
#![allow(clippy::unwrap_used)] // A test that cannot go on ends where it stands.

mod clients;
mod replays;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use blockyard_yard::api::PATHS;
use blockyard_yard::client::{Client, ClientError};
use blockyard_yard::config::NvmeSettings;
use blockyard_yard::daemon::{Daemon, DaemonOptions};
use blockyard_yard::endpoint::Endpoint;
use blockyard_yard::entry::WORK_MAX;
use blockyard_yard::paths::TempDir;
use blockyard_yard::view::{ErrorBody, RootView, ZoneRequest};
use blockyard_yard::{uri, zones};

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
