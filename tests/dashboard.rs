//! The dashboard: the page in a browser, its stream and history, and who may see them.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::browser::Browser;
use crate::place::Place;
use crate::run::{bounded, nbdsh, ok, run};
use crate::yard::{BLOCKYARD, Yard};

const MEM0: &str = "null:///mem0?size=64M&memory_backed=1&discard=1&scheduler=mq-deadline";
const ZONED: &str = "null:///z0?size=64M&zoned=1&zone_size=4M&zone_nr_conv=2&memory_backed=1";
const RAM: &str = "ram:///r0?size=64M";

/// The address of the dashboard of a yard, as the yard printed it.
fn address(yard: &Yard) -> String {
    let out = fs::read_to_string(yard.place.file("out")).unwrap();
    let line = out.lines().find_map(|line| line.strip_prefix("dashboard at "));
    line.unwrap_or_else(|| panic!("no address: {out}")).to_owned()
}

fn serve(devices: &[&str]) -> (Yard, String) {
    let yard = Yard::serve(&[devices, &["--web", "tcp:127.0.0.1:0"]].concat());
    let address = address(&yard);
    (yard, address)
}

/// A status and the text of the answer to a request of curl.
fn curl(arguments: &[&str]) -> (String, String) {
    let line = [&["curl", "--silent", "--write-out", "\n%{http_code}"], arguments].concat();
    let out = run(&line).out;
    let (text, status) = out.rsplit_once('\n').unwrap_or(("", &out));
    (status.to_owned(), text.to_owned())
}

/// A script that resolves to a sample of the stream and to the cells of the table of devices that
/// show it: the page and the script get the same event.
const SAMPLE_AND_CELLS: &str = "new Promise((done) => {
  const source = new EventSource('/v1/stream');
  source.addEventListener('sample', ({ data }) => setTimeout(() => {
    const sample = JSON.parse(data);
    const busy = sample.devices.find((it) => it.device === 'mem0').reads_per_second > 0;
    const shown = document.documentElement.dataset.time;
    if (String(sample.time_ms) !== shown || !busy) return;
    source.close();
    const cells = (row) => [...row.cells].map((it) => [it.textContent, it.dataset.value ?? null]);
    const table = document.getElementById('devices');
    const headings = [...table.tHead.rows[0].cells].map((it) => it.textContent);
    done({ sample, headings, rows: [...table.tBodies[0].rows].map(cells) });
  }, 100));
})";

/// The columns of devices that have a value in the API of the same name.
const COLUMNS: [(&str, &str); 9] = [
    ("r/s", "reads_per_second"),
    ("w/s", "writes_per_second"),
    ("rMB/s", "read_bytes_per_second"),
    ("wMB/s", "written_bytes_per_second"),
    ("r_await", "read_await_ns"),
    ("p50", "p50_ns"),
    ("p99", "p99_ns"),
    ("aqu-sz", "queue_size"),
    ("err/s", "errors_per_second"),
];

#[test]
fn the_page_shows_the_values_of_the_api_and_fetches_nothing_else() {
    let (yard, address) = serve(&[MEM0, ZONED, RAM]);
    // A client that reads until the end of the test.
    let uri = yard.uri("mem0");
    let script = "while True: h.pread(4096, 0)";
    let mut client = bounded(&["nbdsh", "--uri", &uri, "--command", script]).spawn().unwrap();
    let mut browser = Browser::start();
    browser.open(&format!("{address}#mem0"));
    browser.wait("Number(document.documentElement.dataset.samples) >= 2");
    let seen = browser.value(SAMPLE_AND_CELLS);
    let devices = seen["sample"]["devices"].as_array().unwrap();
    assert_eq!(devices.len(), seen["rows"].as_array().unwrap().len());
    for (device, row) in devices.iter().zip(seen["rows"].as_array().unwrap()) {
        let cell = |heading: &str| {
            let headings = seen["headings"].as_array().unwrap();
            &row[headings.iter().position(|it| it == heading).unwrap()]
        };
        assert_eq!(cell("DEVICE")[0], device["device"], "{row}");
        for (heading, field) in COLUMNS {
            let shown = cell(heading)[1].as_str().map(|text| text.parse::<f64>().unwrap());
            let value = device[field].as_f64();
            // The last digit of a number may be lost where JSON is read.
            let is_same = match (shown, value) {
                (Some(shown), Some(value)) => (shown - value).abs() <= 1e-12 * value,
                (shown, value) => shown == value,
            };
            assert!(is_same, "{heading}: {shown:?} {value:?}: {row} {device}");
        }
    }
    // The reads of this client and no others; each is 4 KiB.
    let mem0 = &devices[0];
    let number = |name: &str| mem0[name].as_f64().unwrap();
    let bytes = number("read_bytes_per_second") / number("reads_per_second");
    assert!((bytes / 4096.0 - 1.0).abs() < 1e-9, "{bytes}");
    let latency: u64 = mem0["latency"].as_array().unwrap().iter().filter_map(Value::as_u64).sum();
    assert!(latency > 0, "{mem0}");
    // The history has the same point.
    let url = format!("{address}v1/history?device=mem0");
    let history: Value = serde_json::from_str(&ok(&["curl", "--silent", "--fail", &url])).unwrap();
    let times = history["times_ms"].as_array().unwrap();
    let at = times.iter().position(|it| *it == seen["sample"]["time_ms"]).unwrap();
    let kept = history["reads_per_second"][at].as_f64().unwrap();
    assert!((kept / number("reads_per_second") - 1.0).abs() < 1e-6, "{kept}");
    let client_reads = "[...document.querySelectorAll('#clients tbody tr')].some((row) => \
                        row.textContent.includes('nbd') && row.textContent.includes('mem0'))";
    browser.wait(client_reads);
    client.kill().unwrap();
    client.wait().unwrap();
    // Its history can be saved.
    let export = browser.value("document.getElementById('export').href");
    assert_eq!(export, json!(format!("{url}&step=1")));

    // Every part of the page is there, and every request of the browser was to the yard.
    browser.wait("document.querySelectorAll('.uplot').length === 3");
    for id in ["device", "scheduler", "ram"] {
        assert_eq!(
            browser.value(&format!("document.getElementById('{id}').hidden")),
            false,
            "{id}"
        );
    }
    assert_eq!(browser.value("document.documentElement.dataset.error ?? null"), Value::Null);
    let requests = browser.requests();
    assert!(requests.len() > 8, "{requests:?}");
    assert!(requests.iter().all(|url| url.starts_with(&address)), "{requests:?}");
    yard.serves("mem0");
}

#[test]
fn the_zone_map_follows_the_zones() {
    let (yard, address) = serve(&[ZONED]);
    let mut browser = Browser::start();
    browser.open(&format!("{address}#z0"));
    let legend = |condition: &str, count: u64| {
        format!(
            "document.querySelector('#zones-legend [data-condition=\"{condition}\"]')\
             ?.dataset.count === '{count}'"
        )
    };
    browser.wait(&legend("conventional", 2));
    browser.wait(&legend("empty", 14));
    // Half of zone 3, and all of zone 4.
    let script = "h.pwrite(bytes(2 << 20), 12 << 20)\nh.pwrite(bytes(4 << 20), 16 << 20)";
    nbdsh(&yard.uri("z0"), script);
    browser.wait(&legend("full", 1));
    browser.wait(&legend("implicit-open", 1));
    yard.command(&["zone", "finish", "z0", "-o", "40960", "-c", "1"]).ok();
    browser.wait(&legend("full", 2));
    browser.wait(&legend("empty", 11));
    // The counts of the map are those of the API.
    let counts = || {
        let line = ["top", "--json", "-n", "1", "-d", "0.1"];
        yard.command(&line).ok().json()["zones"][0]["zones"].clone()
    };
    assert_eq!(counts(), json!({"empty": 11, "full": 2, "implicit-open": 1, "not-wp": 2}));

    // The keyboard leads to a zone and its numbers.
    browser.press("z");
    for key in ["Home", "ArrowRight", "ArrowRight", "ArrowRight"] {
        browser.press(key);
    }
    browser.wait("document.getElementById('zone-note').dataset.zone === '3'");
    let note = browser.value("document.getElementById('zone-note').textContent");
    let wanted = "zone 3 (sequential-write-required): implicit-open, write pointer 2.00M of 4.00M; \
                  start 0x6000, length 0x2000, capacity 0x2000 sectors";
    assert_eq!(note, wanted);
    // The numbers of the chosen zone are live, too.
    yard.command(&["zone", "reset", "z0", "-o", "24576", "-c", "1", "--force"]).ok();
    browser.wait(
        "document.getElementById('zone-note').textContent.includes(': empty, write pointer 0 of')",
    );
    browser.wait(&legend("empty", 12));

    // fio writes to zones 6 to 11, three of them at a time.
    let uri = format!("--uri={}", yard.uri("z0"));
    let line = ["fio", "--name=zones", "--ioengine=nbd", &uri, "--rw=randwrite", "--bs=64k"];
    let zones = ["--zonemode=zbd", "--zonesize=4M", "--offset=24M", "--size=24M"];
    let more = ["--io_size=10M", "--max_open_zones=3", "--randseed=7"];
    ok(&[&line[..], &zones, &more].concat());
    let after = counts();
    let number = |condition: &str| after[condition].as_u64().unwrap();
    // Two zones were full before.
    assert!(number("full") + number("implicit-open") >= 5, "{after}");
    for condition in ["empty", "full", "implicit-open"] {
        browser.wait(&legend(condition, number(condition)));
    }
    assert_eq!(browser.value("document.documentElement.dataset.error ?? null"), Value::Null);
}

#[test]
fn only_requests_that_name_the_host_come_in_and_none_changes_anything() {
    let (yard, address) = serve(&[MEM0]);
    let (status, page) = curl(&[&address]);
    assert_eq!(status, "200");
    assert!(page.contains("<title>Blockyard</title>"), "{page}");
    for host in ["evil.example", "evil.example:80", ""] {
        let (status, text) = curl(&["--header", &format!("Host: {host}"), &address]);
        assert!(status == "421" || status == "400", "{host}: {status} {text}");
    }
    let stream = format!("{address}v1/stream");
    assert_eq!(curl(&["--header", "Sec-Fetch-Site: cross-site", &stream]).0, "403");
    // Nothing but GET, and no path of the control socket that changes or names more.
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        let (status, _) = curl(&["--request", method, &format!("{address}v1/version")]);
        assert_eq!(status, "405", "{method}");
    }
    for path in
        ["v1/devices", "v1/devices/mem0", "v1/connections", "metrics", "v1", "../etc/passwd"]
    {
        let (status, _) = curl(&["--path-as-is", &format!("{address}{path}")]);
        assert_eq!(status, "404", "{path}");
    }
    assert_eq!(curl(&["--request", "DELETE", &format!("{address}v1/devices/mem0")]).0, "404");
    yard.serves("mem0");
    let head = ok(&["curl", "--silent", "--head", &address]).to_lowercase();
    for line in [
        "content-security-policy: default-src 'none'; script-src 'self';",
        "x-content-type-options: nosniff",
        "referrer-policy: no-referrer",
        "cross-origin-resource-policy: same-origin",
        "content-type: text/html; charset=utf-8",
    ] {
        assert!(head.lines().any(|have| have.starts_with(line)), "{line}: {head}");
    }
    assert!(!head.contains("set-cookie") && !head.contains("access-control"), "{head}");
    let (status, text) = curl(&[&format!("{address}v1/stream?zones=mem0")]);
    assert_eq!(status, "409", "{text}");
    let (status, text) = curl(&[&format!("{address}v1/history?device=mem0&step=7")]);
    assert!(status == "400" && text.contains("1 or 60 seconds"), "{status} {text}");
}

#[test]
fn a_token_is_needed_where_other_machines_reach_the_page() {
    let place = Place::new();
    let token = "d0a1b2c3d4e5f60718293a4b5c6d7e8f";
    let file = place.write("token", token);
    let control = place.file("control");
    let line = |more: &[&str]| {
        let fixed = [BLOCKYARD, "serve", MEM0, "--nbd", "none", "--control", &control];
        run(&[&fixed, more].concat())
    };
    let refused = line(&["--web", "tcp:0.0.0.0:0"]).fails();
    refused.says(&["web: 0.0.0.0:0 can be reached from other machines; add --web-token-file"]);
    let refused = line(&["--web-token-file", &file]).fails();
    assert_eq!(refused.says(&["there is no dashboard"]).code, Some(2));
    fs::set_permissions(&file, PermissionsExt::from_mode(0o640)).unwrap();
    line(&["--web", "tcp:0.0.0.0:0", "--web-token-file", &file])
        .fails()
        .says(&["invalid mode 0640"]);
    fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();

    let args = [MEM0, "--web", "tcp:0.0.0.0:0", "--web-token-file", &file];
    let yard = Yard::serve_in(place, &args);
    let address = address(&yard).replace("0.0.0.0", "127.0.0.1");
    for path in ["", "dashboard.js", "v1/stream", "v1/history", "v1/version"] {
        let url = format!("{address}{path}");
        assert_eq!(curl(&[&url]).0, "401", "{path}");
        assert_eq!(curl(&["--user", "me:wrong", &url]).0, "401", "{path}");
    }
    let version = format!("{address}v1/version");
    assert_eq!(curl(&["--user", &format!("me:{token}"), &version]).0, "200");
    let bearer = format!("Authorization: Bearer {token}");
    assert_eq!(curl(&["--header", &bearer, &version]).0, "200");
    // A browser that has asked for the password shows the page, and the stream comes with it.
    let mut browser = Browser::start();
    let with_password = address.replace("http://", &format!("http://me:{token}@"));
    browser.open(&with_password);
    browser.wait("Number(document.documentElement.dataset.samples) >= 1");
    browser.wait("document.querySelectorAll('.uplot').length === 3");
}

/// The browser connects again, shows the new daemon, and has the history of the device.
#[test]
fn the_page_comes_back_with_the_yard() {
    let (yard, address) = serve(&[MEM0, RAM]);
    let mut browser = Browser::start();
    browser.open(&format!("{address}#r0"));
    browser.wait("document.getElementById('device-title').textContent === 'r0'");
    let pid = yard.pid();
    let summary = "document.getElementById('summary').textContent";
    browser.wait(&format!("{summary}.startsWith('pid {pid} ')"));
    drop(yard);
    let state = "document.getElementById('state').textContent";
    browser.wait(&format!("{state} === 'no connection'"));

    let place = address.trim_start_matches("http://").trim_end_matches('/');
    let yard = Yard::serve(&[MEM0, RAM, ZONED, "--web", &format!("tcp:{place}")]);
    let pid = yard.pid();
    browser.wait(&format!("{summary}.startsWith('pid {pid} ')"));
    browser.wait(&format!("{state}.startsWith('live')"));
    assert_eq!(browser.value("document.querySelectorAll('#devices tbody tr').length"), 3);
    assert_eq!(browser.value("document.getElementById('device-title').textContent"), "r0");
    // The keyboard chooses a device and a time; a device that comes and goes is in the table.
    browser.press("d");
    browser.press("ArrowDown");
    browser.wait("document.getElementById('device-title').textContent === 'z0'");
    browser.wait("document.querySelectorAll('#zones-legend [data-count]').length === 2");
    browser.press("3");
    browser.wait("document.querySelector('[data-range=week]').ariaPressed === 'true'");
    yard.command(&["add", "null:///late?size=1G"]).ok();
    browser.wait("document.querySelectorAll('#devices tbody tr').length === 4");
    yard.command(&["remove", "z0"]).ok();
    browser.wait("document.getElementById('device-title').textContent === 'mem0'");
    browser.wait("document.getElementById('zones').hidden");
    assert_eq!(browser.value("document.documentElement.dataset.error ?? null"), Value::Null);
}

/// The bug: the page asked for the zones of a device that had gone, was refused, and did so for
/// ever.
#[test]
fn the_page_comes_back_without_its_zoned_device() {
    let (yard, address) = serve(&[MEM0, ZONED]);
    let mut browser = Browser::start();
    browser.open(&format!("{address}#z0"));
    browser.wait("document.querySelectorAll('#zones-legend [data-count]').length === 2");
    drop(yard);
    browser.wait("document.getElementById('state').textContent === 'no connection'");
    let place = address.trim_start_matches("http://").trim_end_matches('/');
    let _yard = Yard::serve(&[MEM0, "--web", &format!("tcp:{place}")]);
    browser.wait("document.getElementById('device-title').textContent === 'mem0'");
    browser.wait("document.getElementById('state').textContent.startsWith('live')");
    assert_eq!(browser.value("document.documentElement.dataset.error ?? null"), Value::Null);
}

/// The bug: a history whose body broke off was an error of the page, which then had no history.
#[test]
fn the_page_pauses_and_loads_a_broken_history_again() {
    let (_yard, address) = serve(&[MEM0]);
    let mut browser = Browser::start();
    browser.open(&address);
    browser.wait("document.getElementById('state').textContent.startsWith('live')");
    browser.press("p");
    browser.wait("document.getElementById('state').textContent === 'paused'");
    let time = browser.value("document.documentElement.dataset.time");
    let samples = browser.value("Number(document.documentElement.dataset.samples)");
    browser.wait(&format!("document.documentElement.dataset.samples > {samples} + 1"));
    assert_eq!(browser.value("document.documentElement.dataset.time"), time);
    browser.press("p");
    browser.wait("document.getElementById('state').textContent.startsWith('live')");
    browser.value(
        "(window.calls = 0, window.real = window.fetch, window.fetch = async () => { \
         window.calls += 1; \
         return { ok: true, json: async () => { throw new TypeError('cut'); } }; }, null)",
    );
    browser.press("2");
    browser.wait("window.calls > 2");
    browser.value(
        "(window.calls = 0, window.fetch = async (url) => { window.calls += 1; return \
         window.real(url); }, null)",
    );
    browser.wait("window.calls === 1");
    let samples = browser.value("Number(document.documentElement.dataset.samples)");
    browser.wait(&format!("document.documentElement.dataset.samples > {samples} + 2"));
    assert_eq!(browser.value("window.calls"), json!(1), "it is loaded");
    assert_eq!(browser.value("document.documentElement.dataset.error ?? null"), Value::Null);
}

/// The bug: the page said "live" for five seconds each time when it connected again to a daemon
/// that took no more samples, and so sent the last one.
#[test]
fn the_page_shows_gaps_rates_and_the_end_of_samples() {
    let (_yard, address) = serve(&[MEM0]);
    let mut browser = Browser::start();
    browser.open(&address);
    browser.wait("document.getElementById('state').textContent.startsWith('live')");
    // A stream that the test sends, which begins with a sample of the yard. A page that was paused
    // connects again.
    let mut replace_stream = |class: &str, condition: &str| {
        browser.value(&format!("(window.EventSource = {class}, null)"));
        browser.press("p");
        browser.press("p");
        browser.wait(condition);
    };
    replace_stream(
        "class extends EventSource { constructor(url) { super(url); \
         this.addEventListener('sample', (event) => { \
         window.sample = JSON.parse(event.data); }); } }",
        "window.sample !== undefined",
    );
    replace_stream(
        "class { static OPEN = 1; static CLOSED = 2; readyState = 1; takes = {}; \
         constructor() { window.source = this; } \
         addEventListener(name, take) { this.takes[name] = take; } \
         close() {} \
         send(name, data) { this.takes[name]({ data: JSON.stringify(data) }); } }",
        "window.source !== undefined",
    );
    // The sampling hangs.
    browser.wait("document.getElementById('state').textContent.startsWith('no data since')");
    let state = "document.getElementById('state').textContent";
    let said = browser.value(&format!("(source.send('sample', sample), {state})"));
    assert!(said.as_str().unwrap().starts_with("no data since"), "{said}");
    // The next sample: in a second 250 requests were inserted.
    let next = "sample.time_ms += 1000, sample.devices[0].scheduler_counts[0].inserted += 250";
    let said = browser.value(&format!("({next}, source.send('sample', sample), {state})"));
    assert!(said.as_str().unwrap().starts_with("live"), "{said}");
    let cells = "[...document.querySelectorAll('#scheduler-table td')].map((it) => it.textContent)";
    let cells = browser.value(cells);
    assert!(cells.as_array().unwrap().contains(&json!("250")), "{cells}");
    let said = browser.value(&format!(
        "(source.send('gap', {{ lost: 3 }}), sample.time_ms += 1000, \
         source.send('sample', sample), {state})"
    ));
    assert_eq!(said, json!("3 events lost"));
    assert_eq!(browser.value("document.documentElement.dataset.error ?? null"), Value::Null);
}

/// Two clients of the control socket, and one that does not read. The tests of the API let a client
/// stall until it loses events.
#[test]
fn a_stream_is_for_curl_too_and_no_client_waits_for_another() {
    let yard = Yard::serve(&[MEM0, ZONED]);
    let control = yard.control();
    let mut stalled = UnixStream::connect(&control).unwrap();
    stalled.write_all(b"GET /v1/stream?zones=z0 HTTP/1.1\r\nHost: yard\r\n\r\n").unwrap();
    let line = ["curl", "--silent", "--no-buffer", "--unix-socket", &control];
    let line = [&line[..], &["http://yard/v1/stream?zones=z0"]].concat();
    // Both are connected before the events of one are read.
    let clients = [(); 2].map(|()| bounded(&line).stdout(Stdio::piped()).spawn().unwrap());
    let texts = clients.map(|mut client| {
        let mut out = BufReader::new(client.stdout.take().unwrap());
        let mut text = String::new();
        let is_complete = |text: &str| {
            text.matches("event: sample\n").count() >= 3 && text.contains("event: zones\n")
        };
        while !(is_complete(&text) && text.ends_with("\n\n")) {
            assert!(out.read_line(&mut text).unwrap() > 0, "the stream has ended: {text}");
        }
        // Ends `timeout`, and curl with it.
        ok(&["kill", &client.id().to_string()]);
        client.wait().unwrap();
        text
    });
    for text in texts {
        let events: Vec<&str> =
            text.split("\n\n").filter(|event| event.contains("\ndata: ")).collect();
        let samples: Vec<Value> = events
            .iter()
            .filter_map(|event| event.strip_prefix("event: sample\ndata: "))
            .map(|data| serde_json::from_str(data).unwrap())
            .collect();
        assert!(samples.len() >= 3, "{text}");
        assert_eq!(samples[0]["devices"][0]["device"], "mem0", "{text}");
        let times: Vec<u64> = samples.iter().map(|it| it["time_ms"].as_u64().unwrap()).collect();
        assert!(times.is_sorted_by(|a, b| a < b), "{times:?}");
        let zones = events.iter().find_map(|event| event.strip_prefix("event: zones\ndata: "));
        let zones: Value = serde_json::from_str(zones.unwrap()).unwrap();
        assert_eq!(zones["runs"], json!([[0, 2, 0, 0], [2, 14, 1, 0]]), "{text}");
    }
    let mut head = [0; 15];
    stalled.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 200 OK");
    yard.serves("mem0");
}

#[test]
fn a_socket_of_the_dashboard_lets_its_owner_in_only() {
    let place = Place::new();
    let socket = place.file("web.sock");
    let yard = Yard::serve_in(place, &[MEM0, "--web", &format!("unix:{socket}")]);
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(address(&yard), format!("unix:{socket}"));
    let get = |url: &str| curl(&["--unix-socket", &socket, url]).0;
    assert_eq!(get("http://localhost:9465/"), "200");
    assert_eq!(get("http://evil.example/"), "421");
}
