//! The metrics of a yard with a device of each kind, the dashboard for Grafana and the alerts for
//! Prometheus: every name that these use exists, and promtool accepts all of them.
#![allow(clippy::unwrap_used)] // A test that cannot go on ends where it stands.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use blockyard_core::blocking::Io;
use blockyard_core::{Flags, Sector};
use blockyard_volume_admin::prune::Period;
use blockyard_yard::client::Client;
use blockyard_yard::config::BackupSettings;
use blockyard_yard::daemon::{Daemon, DaemonOptions};
use blockyard_yard::endpoint::Endpoint;
use blockyard_yard::paths::TempDir;
use blockyard_yard::uri;
use blockyard_yard::vhost::VhostPlace;
use blockyard_yard::volumes::{ScrubLine, VolumeRequest};
use blockyard_yard::warnings::WarningKind;
use serde_json::Value;

/// The most requests for metrics until the peaks are there; a request takes milliseconds.
const POLLS_MAX: usize = 100_000;

/// A yard with a device of each kind, an NBD client and a socket for hypervisors.
struct Fixture {
    client: Client,
    nbd: UnixStream,
    daemon: Daemon,
    temp: TempDir,
}

impl Fixture {
    /// The kinds of the warnings, without that of the policy: its pool is not open, so it fails at
    /// its first run, before or after the test asks.
    fn warnings(&self) -> Vec<String> {
        let warnings = self.client.status().unwrap().warnings.into_iter().map(|it| it.kind);
        warnings.filter(|kind| kind != "backup_failed").collect()
    }

    fn new() -> Fixture {
        let temp = TempDir::new().unwrap();
        let path = |name: &str| temp.path().join(name);
        fs::write(path("file"), [0; 1 << 20]).unwrap();
        let uris = [
            "null:///null?size=1G&scheduler=mq-deadline".to_owned(),
            "null:///zoned?size=1G&zoned=1&zone_size=64M&zone_nr_conv=2".to_owned(),
            "ram:///ram?size=1M".to_owned(),
            "smr:///smr?size=64M&zone_size=4M&zone_nr_conv=1".to_owned(),
            format!("file:///file?path={}", path("file").display()),
            format!(
                "volume:///volume?size=64M&path={}&path2={}&copies=2&compress=none",
                path("a").display(),
                path("b").display()
            ),
        ];
        let options = DaemonOptions {
            devices: uris.iter().map(|text| uri::parse(text).unwrap()).collect(),
            nbd: vec![Endpoint::Unix(path("nbd.sock").into())],
            metrics: Some(Endpoint::Tcp { host: "127.0.0.1".to_owned(), port: 0 }),
            vhost: vec![VhostPlace::of("null", &format!("unix:{}", path("v").display())).unwrap()],
            control: Some(path("control.sock").into()),
            // Of a pool that is not open: its metrics are there, and it changes nothing.
            backups: vec![BackupSettings {
                name: "offsite".to_owned(),
                pool: path("none"),
                volumes: Vec::new(),
                snapshots: Period::Hour,
                keep: None,
                target: Vec::new(),
                timeout: Duration::from_secs(1),
                raw: true,
            }],
            ..DaemonOptions::default()
        };
        let daemon = Daemon::start(&options).unwrap();
        let mut nbd = UnixStream::connect(path("nbd.sock")).unwrap();
        nbd.read_exact(&mut [0; 18]).unwrap();
        // Fixed newstyle without zeroes, then NBD_OPT_EXPORT_NAME and its reply.
        nbd.write_all(&3_u32.to_be_bytes()).unwrap();
        nbd.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\x04null").unwrap();
        nbd.read_exact(&mut [0; 10]).unwrap();
        let client = Client::new(path("control.sock"));
        // The peaks are there after the second sample.
        let has_peaks =
            |_| client.metrics().unwrap().contains("\nblockyard_device_peak_queue_size{");
        assert!((0..POLLS_MAX).any(has_peaks), "the yard samples its devices");
        Fixture { client, nbd, daemon, temp }
    }

    /// The answer of the listener for metrics, with its header.
    fn get(&self, accept: &str) -> String {
        let answer = self.ask(None, accept);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        answer
    }

    /// The answer to a request that names this host, or else the listener's.
    fn ask(&self, host: Option<&str>, accept: &str) -> String {
        let address = self.daemon.control().unwrap().metrics_address().unwrap();
        let place = address.strip_prefix("http://").unwrap().strip_suffix("/metrics").unwrap();
        let mut stream = TcpStream::connect(place).unwrap();
        let host = host.unwrap_or(place);
        let request =
            format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\n{accept}Connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Reads 4096 bytes by the NBD client, which gets a simple reply.
    fn read(&mut self, cookie: u64) {
        let command = [&0x2560_9513_u32.to_be_bytes()[..], &[0; 4]].concat();
        let range = [&(cookie * 65_536).to_be_bytes()[..], &4096_u32.to_be_bytes()].concat();
        self.nbd.write_all(&[command, cookie.to_be_bytes().to_vec(), range].concat()).unwrap();
        let mut reply = [0; 16 + 4096];
        self.nbd.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    }

    fn scrub(&self) -> ScrubLine {
        let mut text = String::new();
        let request = VolumeRequest::default();
        self.client.scrub(&request).unwrap().read_to_string(&mut text).unwrap();
        serde_json::from_str(text.lines().last().unwrap()).unwrap()
    }
}

fn contrib(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib").join(name)
}

/// The labels that the series of each metric have, by name.
fn labels_by_metric(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut metrics: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, rest) = line.split_at(line.find(['{', ' ']).unwrap());
        let labels = metrics.entry(name.to_owned()).or_default();
        labels.extend(selected_labels(rest));
    }
    metrics
}

/// The names of labels in `{NAME="VALUE",NAME=~"VALUE"}` at the beginning of a text.
fn selected_labels(text: &str) -> Vec<String> {
    let (mut names, mut name, mut is_quoted) = (Vec::new(), String::new(), false);
    let Some(text) = text.strip_prefix('{') else { return names };
    let mut chars = text.chars();
    while let Some(char) = chars.next() {
        match char {
            '\\' if is_quoted => _ = chars.next(),
            '"' => is_quoted = !is_quoted,
            _ if is_quoted => {}
            '}' => break,
            ',' => name.clear(),
            '=' | '!' if !name.is_empty() => names.push(std::mem::take(&mut name)),
            _ if char.is_alphanumeric() || char == '_' => name.push(char),
            _ => {}
        }
    }
    names
}

/// Each metric of ours in a text, with the names of the labels by which it is selected.
fn metrics_used(text: &str) -> Vec<(String, Vec<String>)> {
    let starts = text.match_indices("blockyard_").map(|(at, _)| &text[at..]);
    let is_other = |char: char| !char.is_ascii_lowercase() && !char.is_ascii_digit() && char != '_';
    let split = starts.map(|text| text.split_at(text.find(is_other).unwrap_or(text.len())));
    split.map(|(name, rest)| (name.to_owned(), selected_labels(rest))).collect()
}

/// The queries of a dashboard.
fn queries(dashboard: &Value, found: &mut Vec<String>) {
    match dashboard {
        Value::Array(items) => items.iter().for_each(|item| queries(item, found)),
        Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_str() {
                    Some(query) if name == "expr" || name == "definition" => {
                        found.push(query.to_owned());
                    }
                    _ => queries(value, found),
                }
            }
        }
        _ => {}
    }
}

fn dashboard_queries() -> Vec<String> {
    let text = fs::read_to_string(contrib("grafana/blockyard.json")).unwrap();
    let mut found = Vec::new();
    queries(&serde_json::from_str(&text).unwrap(), &mut found);
    found
}

/// Runs promtool with an input; it must succeed.
fn promtool(args: &[&str], input: &str) -> String {
    let mut child = Command::new("promtool")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("cannot run promtool: `make deps` installs it");
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success(), "promtool {args:?}: {text}");
    text
}

#[test]
fn every_metric_of_the_dashboard_and_of_the_alerts_exists() {
    let mut fixture = Fixture::new();
    // The latency of a client has series from its first operation on.
    fixture.read(0);
    let text = fixture.client.metrics().unwrap();
    let known = labels_by_metric(&text);
    let queries = dashboard_queries();
    assert!(queries.len() > 30, "{queries:?}");
    let alerts = fs::read_to_string(contrib("prometheus/alerts.yaml")).unwrap();
    let tests = fs::read_to_string(contrib("prometheus/alerts_test.yaml")).unwrap();
    for (file, text) in
        [("dashboard", queries.join("\n")), ("alerts", alerts), ("tests of alerts", tests)]
    {
        let used = metrics_used(&text);
        assert!(used.len() >= 6, "{file}: {used:?}");
        for (name, selected) in used {
            let Some(labels) = known.get(&name) else {
                panic!("{file}: `{name}` is no metric: {:?}", known.keys())
            };
            for label in selected.iter().filter(|label| *label != "instance") {
                assert!(labels.contains(label), "{file}: `{name}` has no label `{label}`");
            }
        }
    }
}

#[test]
fn every_warning_raises_an_alert() {
    let alerts = fs::read_to_string(contrib("prometheus/alerts.yaml")).unwrap();
    // The conditions of these have metrics of their own.
    let by_metric = [
        (WarningKind::NoSpace, "BlockyardPoolNoSpace"),
        (WarningKind::PoolReadOnly, "BlockyardPoolFailedReadOnly"),
        (WarningKind::CopyBad, "BlockyardPoolCopyBad"),
        (WarningKind::DeviceLatched, "BlockyardDeviceLatched"),
        (WarningKind::ScrubDamage, "BlockyardScrubFoundDamage"),
        (WarningKind::BackupFailed, "BlockyardBackupFailed"),
    ];
    let kinds: BTreeSet<&str> = alerts
        .lines()
        .filter(|line| line.contains("blockyard_warnings{kind="))
        .flat_map(|line| line.split('"').nth(1).unwrap().split('|'))
        .collect();
    for kind in WarningKind::ALL {
        let alert = by_metric.iter().find(|(it, _)| *it == kind);
        let has_alert = alert.is_some_and(|(_, name)| alerts.contains(&format!("alert: {name}\n")));
        assert!(has_alert || kinds.contains(kind.name()), "{}", kind.name());
    }
}

#[test]
fn every_metric_is_in_the_manual_and_the_manual_has_no_other() {
    let fixture = Fixture::new();
    let text = fixture.client.metrics().unwrap();
    let families: BTreeSet<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .map(str::to_owned)
        .collect();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    let page = fs::read_to_string(page).unwrap();
    let rows =
        page.lines().filter_map(|line| line.strip_prefix("| `blockyard_")?.split('`').next());
    let described: BTreeSet<_> = rows.map(|name| format!("blockyard_{name}")).collect();
    assert_eq!(described, families);
}

#[test]
fn the_latency_of_a_client_is_that_of_its_operations() {
    let mut fixture = Fixture::new();
    let latency = |fixture: &Fixture, family: &str| -> Vec<String> {
        let text = fixture.client.metrics().unwrap();
        let family = format!("blockyard_client_latency_seconds_{family}{{");
        text.lines().filter(|line| line.starts_with(&family)).map(str::to_owned).collect()
    };
    assert_eq!(latency(&fixture, "count"), [""; 0], "it has done nothing");
    (0..3).for_each(|cookie| fixture.read(cookie));
    let counts = latency(&fixture, "count");
    assert_eq!(counts.len(), 1, "{counts:?}");
    assert!(counts[0].contains("device=\"null\",op=\"read\"} 3"), "{counts:?}");
    assert!(counts[0].contains("{protocol=\"nbd\","), "{counts:?}");
    let sums = latency(&fixture, "sum");
    let sum: f64 = sums[0].rsplit_once(' ').unwrap().1.parse().unwrap();
    assert!(sum > 0.0, "{sums:?}");
    let buckets = latency(&fixture, "bucket");
    let last = buckets.iter().find(|line| line.contains("le=\"+Inf\"")).unwrap();
    assert!(last.ends_with(" 3") && buckets.len() == 5, "{buckets:?}");
    // The metrics of the device are the sum of all its channels.
    let text = fixture.client.metrics().unwrap();
    let device = "blockyard_device_latency_seconds_count{device=\"null\",op=\"read\"} 3";
    assert!(text.lines().any(|line| line == device), "{text}");
    assert_eq!(promtool(&["check", "metrics"], &text), "");
}

#[test]
fn promtool_has_nothing_to_say_about_the_metrics() {
    let fixture = Fixture::new();
    let text = fixture.client.metrics().unwrap();
    assert!(text.contains("\nblockyard_client_requests_total{protocol=\"nbd\","), "{text}");
    assert_eq!(promtool(&["check", "metrics"], &text), "");
}

#[test]
fn promtool_accepts_the_alerts_and_the_queries_of_the_dashboard() {
    let path = |name| contrib(name).display().to_string();
    promtool(&["check", "rules", &path("prometheus/alerts.yaml")], "");
    promtool(&["test", "rules", &path("prometheus/alerts_test.yaml")], "");
    let temp = TempDir::new().unwrap();
    let file = temp.path().join("rules.yaml");
    let mut rules = "groups:\n  - name: dashboard\n    rules:\n".to_owned();
    let queries = dashboard_queries();
    let of_panels = queries.iter().filter(|query| !query.starts_with("label_values("));
    for (index, query) in of_panels.enumerate() {
        let query = query.replace("$__rate_interval", "5m");
        // A string of JSON is one of YAML too.
        let query = Value::String(query);
        rules.push_str(&format!("      - record: query_{index}\n        expr: {query}\n"));
    }
    fs::write(&file, rules).unwrap();
    promtool(&["check", "rules", file.to_str().unwrap()], "");
}

#[test]
fn a_client_chooses_the_format_by_its_accept_header() {
    let fixture = Fixture::new();
    let open = fixture.get("Accept: application/openmetrics-text;version=1.0.0,*/*;q=0.1\r\n");
    assert!(open.contains("content-type: application/openmetrics-text; version=1.0.0"), "{open}");
    assert!(open.contains("\n# TYPE blockyard_device_ops counter\n"), "{open}");
    assert!(open.contains("\n# EOF\n"), "{open}");
    for accept in ["", "Accept: */*\r\n", "Accept: text/plain\r\n"] {
        let text = fixture.get(accept);
        assert!(text.contains("content-type: text/plain; version=0.0.4"), "{text}");
        assert!(text.contains("\n# TYPE blockyard_device_ops_total counter\n"), "{text}");
        assert!(!text.contains("# EOF"), "{text}");
    }
}

/// The bug: a page of another site could read the metrics through a browser on this machine, by a
/// name of its own that leads to 127.0.0.1 (DNS rebinding).
#[test]
fn a_request_that_names_another_host_gets_no_metrics() {
    let fixture = Fixture::new();
    for host in ["evil.example", "evil.example:9464", "127.0.0.1.evil.example"] {
        let answer = fixture.ask(Some(host), "");
        assert!(answer.starts_with("HTTP/1.1 421"), "{answer}");
        assert!(!answer.contains("blockyard_"), "{answer}");
    }
    for host in ["localhost", "127.0.0.1:1", "[::1]"] {
        assert!(fixture.ask(Some(host), "").starts_with("HTTP/1.1 200"), "{host}");
    }
}

/// Changes the block that begins with `start` in a copy of a pool.
fn rot(copy: &Path, start: &[u8]) {
    let mut rotted = 0;
    for file in fs::read_dir(copy).unwrap() {
        let path = file.unwrap().path();
        let content = if path.is_file() { fs::read(&path).unwrap() } else { continue };
        if let Some(at) = blockyard_testing::position(&content, start) {
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.write_all_at(&[content[at] ^ 1], at as u64).unwrap();
            file.sync_all().unwrap();
            rotted += 1;
        }
    }
    assert_eq!(rotted, 1, "{}", copy.display());
}

#[test]
fn damage_that_a_scrub_cannot_repair_is_counted() {
    let fixture = Fixture::new();
    let counted = |name: &str| {
        let text = fixture.client.metrics().unwrap();
        let start = format!("blockyard_pool_{name}_total{{");
        let line = text.lines().find(|line| line.starts_with(&start)).unwrap().to_owned();
        line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let data: Vec<u8> =
        (0..16384_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 7) as u8).collect();
    let entry = fixture.daemon.devices().find("volume").unwrap();
    let mut io = Io::new(entry.disk.open().unwrap(), data.len());
    io.write(Sector(0), &data, Flags::FUA).unwrap();
    drop(io);
    assert_eq!((counted("scrubs"), counted("scrub_damaged")), (0, 0));
    assert_eq!(fixture.scrub().report.unwrap().damaged, 0);
    assert_eq!((counted("scrubs"), counted("scrub_damaged")), (1, 0));
    rot(&fixture.temp.path().join("b"), &data[..512]);
    let report = fixture.scrub().report.unwrap();
    assert_eq!((report.damaged, report.mended), (0, 1), "{report:?}");
    assert_eq!((counted("scrubs"), counted("scrub_damaged"), counted("mended")), (2, 0, 1));
    for copy in ["a", "b"] {
        rot(&fixture.temp.path().join(copy), &data[..512]);
    }
    let report = fixture.scrub().report.unwrap();
    assert_eq!((report.damaged, report.mended), (1, 0), "{report:?}");
    assert_eq!((counted("scrubs"), counted("scrub_damaged"), counted("mended")), (3, 1, 1));
    assert_eq!(fixture.client.status().unwrap().state, "critical");
    assert_eq!(fixture.warnings(), ["scrub_damage"]);
    let text = fixture.client.metrics().unwrap();
    assert!(text.contains("blockyard_warnings{kind=\"scrub_damage\"} 1\n"), "{text}");
    assert!(text.contains("blockyard_warnings_raised_total{kind=\"scrub_damage\"} 1\n"), "{text}");
    let no_object_store = !text.contains("blockyard_pool_upload_lag_bytes{");
    assert!(no_object_store && text.contains("# TYPE blockyard_pool_upload_lag_bytes"), "{text}");
}

#[test]
fn a_scrub_that_has_not_begun_is_neither_paused_nor_resumed() {
    let fixture = Fixture::new();
    let of = |verb: &str| fixture.client.volume(verb, &VolumeRequest::default());
    let code = |verb: &str| of(verb).unwrap_err().code().unwrap_or_default().to_owned();
    assert_eq!([code("pause-scrub"), code("resume-scrub")], ["invalid"; 2]);
    assert_eq!(fixture.scrub().report.unwrap().damaged, 0);
    let pool = &fixture.client.pools().unwrap()[0];
    assert_eq!((pool.scrub, pool.scrubs, pool.writes_refused), (None, 1, 0));
    assert_eq!(fixture.warnings(), [""; 0]);
}
