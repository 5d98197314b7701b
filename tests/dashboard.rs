//! The dashboard: the page in a browser, its stream and history, and who may see them.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};

use serde_json::{Value, json};

use crate::browser::Browser;
use crate::dashboard_tables::{compare, look};
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
    serve_in(Place::new(), devices)
}

fn serve_in(place: Place, devices: &[&str]) -> (Yard, String) {
    let yard = Yard::serve_in(place, &[devices, &["--web", "tcp:127.0.0.1:0"]].concat());
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

/// The most looks until a condition holds.
const LOOKS_MAX: u32 = 2000;

/// The answer of the control API.
fn get(yard: &Yard, path: &str) -> Value {
    let (control, url) = (yard.control(), format!("http://yard{path}"));
    let line = ["curl", "--silent", "--fail", "--unix-socket", &control, &url];
    run(&line).ok().json()
}

/// Ends a client that `bounded` started: `timeout` passes the signal on.
fn end(mut client: Child) {
    ok(&["kill", &client.id().to_string()]);
    client.wait().unwrap();
}

/// The state of a yard as its own requests of the API tell it, in the form of a sample: everything
/// that the page shows but rates.
fn state_of(yard: &Yard) -> Value {
    let mut devices = get(yard, "/v1/devices");
    for device in devices.as_array_mut().unwrap() {
        let name = device["name"].as_str().unwrap().to_owned();
        let ram = match device["kind"] == "ram" {
            true => get(yard, &format!("/v1/devices/{name}/ram")),
            false => Value::Null,
        };
        *device = json!({
            "device": name, "kind": device["kind"], "size_bytes": device["size_bytes"],
            "scheduler": device["scheduler"], "ram": ram,
        });
    }
    let mut pools = get(yard, "/v1/pools");
    for pool in pools.as_array_mut().unwrap() {
        // A pool with one copy has no list of them.
        let copies = pool["copies"].as_array().into_iter().flatten();
        let bad = copies.filter(|copy| copy["good"] == false).count();
        *pool = json!({
            "pool": pool["path"], "failed_read_only": pool["failed_read_only"], "copies_bad": bad,
            "used_bytes": pool["used_bytes"], "available_bytes": pool["available_bytes"],
            "volumes": pool["volumes"], "segment_bytes": pool["segment_bytes"],
            "segments": pool["segments"], "segments_free": pool["segments_free"],
            "segments_by_live": pool["segments_by_live"],
        });
    }
    let mut clients = get(yard, "/v1/connections");
    for client in clients.as_array_mut().unwrap() {
        *client = json!({
            "protocol": client["protocol"], "id": client["id"], "peer": client["peer"],
            "device": client["device"], "host": client["host"],
            "controller": client["controller"], "queue": client["queue"],
        });
    }
    json!({ "devices": devices, "pools": pools, "clients": clients })
}

/// A sample whose state is that of the API's other requests.
fn with_state(mut sample: Value, state: &Value) -> Value {
    for part in ["devices", "pools", "clients"] {
        let (rows, states) =
            (sample[part].as_array_mut().unwrap(), state[part].as_array().unwrap());
        assert_eq!(rows.len(), states.len(), "{part}");
        for (row, state) in rows.iter_mut().zip(states) {
            let fields = state.as_object().unwrap();
            fields.iter().for_each(|(name, value)| row[name] = value.clone());
        }
    }
    sample
}

/// A yard with a device of each kind that the page shows in its own way. The RAM disk holds data of
/// which a part compresses, a part repeats one word, and a part does neither.
fn serve_all() -> (Yard, String) {
    let place = Place::new();
    let pool = place.file("pool");
    let volume = format!("volume:///v0?size=64M&path={pool}");
    let (yard, address) = serve_in(place, &[MEM0, ZONED, RAM, &volume]);
    let data = "import os\nh.pwrite(b'blockyard' * 4096 + bytes(28672) + os.urandom(65536), 0)";
    nbdsh(&yard.uri("r0"), data);
    (yard, address)
}

/// A client of a device that runs a script of libnbd's shell until [`end`].
fn client(yard: &Yard, device: &str, script: &str) -> Child {
    bounded(&["nbdsh", "--uri", &yard.uri(device), "--command", script]).spawn().unwrap()
}

/// Reads, as fast as it can.
const READER: &str = "while True: h.pread(4096, 0)";

/// Writes and flushes, as fast as it can.
const WRITER: &str = "
import os
while True:
    for block in range(64):
        h.pwrite(os.urandom(65536), block << 16)
        h.flush()
";

#[test]
fn the_page_shows_the_values_of_the_api_and_fetches_nothing_else() {
    let (yard, address) = serve_all();
    let (reader, writer) = (client(&yard, "mem0", READER), client(&yard, "v0", WRITER));
    let mut browser = Browser::start();
    browser.open(&format!("{address}#mem0"));
    browser.wait("Number(document.documentElement.dataset.samples) >= 2");
    // The text of each cell is that of the sample, while all of it changes.
    let busy = "sample.devices.find((it) => it.device === 'mem0').reads_per_second > 0 \
                && sample.pools[0].data_bytes_per_second > 0 \
                && sample.pools[0].syncs_per_second > 0 && sample.clients.length === 2";
    let seen = look(&mut browser, busy);
    compare(&seen, &seen["sample"], "mem0");
    let devices = seen["sample"]["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 4);
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
    end(writer);
    end(reader);
    // Its history can be saved.
    let export = browser.value("document.getElementById('export').href");
    assert_eq!(export, json!(format!("{url}&step=1")));

    // Every part of the page is there, and every request of the browser was to the yard.
    browser.wait("document.querySelectorAll('.uplot').length === 3");
    for id in ["device", "scheduler", "ram", "pools"] {
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
fn the_tables_show_the_state_that_other_requests_of_the_api_return() {
    let (yard, address) = serve_all();
    let data = "import os\nh.pwrite(os.urandom(4 << 20), 0)\nh.flush()";
    nbdsh(&yard.uri("v0"), data);
    let reader = client(&yard, "mem0", READER);
    let mut browser = Browser::start();
    browser.open(&format!("{address}#mem0"));
    browser.wait("Number(document.documentElement.dataset.samples) >= 2");
    let idle = "sample.devices.find((it) => it.device === 'mem0').reads_per_second > 0 \
                && sample.pools[0].data_bytes_per_second === 0 && sample.clients.length === 1";
    // A checkpoint may change the pool once more, and other tests write to its file system.
    let looks = (0..60).find_map(|_| {
        let before = state_of(&yard);
        let seen = look(&mut browser, idle);
        (state_of(&yard) == before).then_some((seen, before))
    });
    let (seen, state) = looks.expect("an idle pool does not change");
    compare(&seen, &with_state(seen["sample"].clone(), &state), "mem0");
    // No figure is zero everywhere.
    let pool = &state["pools"][0];
    assert!(pool["used_bytes"].as_u64() >= Some(4 << 20), "{pool}");
    let memory = &state["devices"][2]["ram"]["mm_stat"];
    for part in ["compr_data_size", "same_pages", "huge_pages"] {
        assert!(memory[part].as_u64() > Some(0), "{part}: {memory}");
    }
    end(reader);
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
    cells_have_the_colours_of_the_zones(&mut browser, &yard);

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
fn a_click_shows_a_zone_and_its_write_pointer_moves_while_fio_writes() {
    let (yard, address) = serve(&[ZONED]);
    let mut browser = Browser::start();
    browser.open(&format!("{address}#z0"));
    browser.wait("document.querySelectorAll('#zones-legend [data-count]').length === 2");
    // At 64 KiB a second into three of four zones, none is full before fio's time limit.
    let uri = format!("--uri={}", yard.uri("z0"));
    let line = ["fio", "--name=zones", "--ioengine=nbd", &uri, "--rw=randwrite", "--bs=16k"];
    let zones = ["--zonemode=zbd", "--zonesize=4M", "--max_open_zones=3", "--randseed=7"];
    let slow = ["--rate=64k", "--offset=48M", "--size=16M"];
    let line = [&line[..], &zones, &slow].concat();
    let mut fio = bounded(&line).stdout(Stdio::null()).spawn().unwrap();
    let written = |zone: &Value| zone["cond"] == "implicit-open" && zone["wptr"] != 0;
    let zone = (0..LOOKS_MAX).find_map(|_| (12..16).find(|at| written(&zones_of(&yard)[*at])));
    let zone = zone.expect("fio writes");
    let CellPlaces { left, top, size } = CellPlaces::new(&mut browser);
    browser.click(left + size * (zone as f64 + 0.5), top + size / 2.0);
    let note = "document.getElementById('zone-note')";
    browser.wait(&format!("{note}.dataset.zone === '{zone}'"));
    let mut pointers = Vec::new();
    for _ in 0..3 {
        let text = browser.value(&format!("{note}.textContent"));
        let start =
            format!("zone {zone} (sequential-write-required): implicit-open, write pointer ");
        let pointer =
            text.as_str().unwrap().strip_prefix(&start).and_then(|it| it.split_once(" of"));
        pointers.push(bytes_of(pointer.unwrap_or_else(|| panic!("{text}")).0));
        browser.wait(&format!("{note}.textContent !== {text}"));
    }
    assert!(pointers.is_sorted_by(|one, next| one < next), "{pointers:?}");
    let told = zones_of(&yard)[zone]["wptr"].as_f64().unwrap() * 512.0;
    assert!(pointers[2] <= told * 1.005, "{pointers:?} {told}: three digits");
    // The cell fills from below.
    let filled = format!("({FILLED})({zone})");
    let before = browser.value(&filled);
    browser.wait(&format!("{filled} > {before}"));
    assert!(fio.try_wait().unwrap().is_none(), "fio has ended before the looks");
    end(fio);
    assert_eq!(browser.value("document.documentElement.dataset.error ?? null"), Value::Null);
}

/// The zones of `z0` by number, as the API reports them.
fn zones_of(yard: &Yard) -> Vec<Value> {
    get(yard, "/v1/devices/z0/zones")["zones"].as_array().unwrap().clone()
}

/// A size as the page shows it, in bytes.
fn bytes_of(text: &str) -> f64 {
    let unit = ["K", "M"].iter().position(|unit| text.ends_with(unit));
    let number = text.trim_end_matches(['K', 'M']).parse::<f64>().unwrap();
    unit.map_or(number, |unit| number * [1024.0, 1_048_576.0][unit])
}

/// Where the cells of the zone map are in the window, in pixels: all of them in one row.
struct CellPlaces {
    left: f64,
    top: f64,
    size: f64,
}

impl CellPlaces {
    /// Scrolls to the map.
    fn new(browser: &mut Browser) -> CellPlaces {
        let script = "(() => {
            const map = document.getElementById('zone-map');
            map.scrollIntoView({ block: 'center' });
            const { left, top } = map.getBoundingClientRect();
            return [left, top, map.width, map.height];
        })()";
        let found = browser.value(script);
        let [left, top, width, size] = [0, 1, 2, 3].map(|at| found[at].as_f64().unwrap());
        assert!(width >= 16.0 * size, "16 zones are in one row: {found}");
        CellPlaces { left, top, size }
    }
}

/// The number of lines of a zone's cell that have the colour of an open zone up to its write
/// pointer.
const FILLED: &str = "(zone) => {
    const map = document.getElementById('zone-map');
    const hex = getComputedStyle(document.documentElement).getPropertyValue('--zone-2');
    const wanted = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    const left = Math.floor(map.height * (zone + 0.5));
    const { data } = map.getContext('2d').getImageData(left, 0, 1, map.height);
    const lines = [...Array(map.height).keys()];
    return lines.filter((y) => wanted.every((it, part) => data[4 * y + part] === it)).length;
}";

/// Compares the colours of all cells of the zone map, in their upper and lower parts, with the
/// conditions and write pointers that the API reports.
fn cells_have_the_colours_of_the_zones(browser: &mut Browser, yard: &Yard) {
    let size = CellPlaces::new(browser).size;
    let mut numbers = |script: &str| -> Vec<f64> {
        let found = browser.value(script);
        found.as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect()
    };
    // The colours are named by the number of the condition in a ZBC zone descriptor.
    let mut named = |condition: u8| {
        numbers(&format!(
            "(() => {{
                const style = getComputedStyle(document.documentElement);
                const hex = style.getPropertyValue('--zone-{condition}');
                return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
            }})()"
        ))
    };
    let [conventional, empty, open, full] = [0, 1, 2, 14].map(&mut named);
    // The part of an open zone above its write pointer is paler.
    let pale: Vec<f64> =
        empty.iter().zip(&open).map(|(from, to)| (from + (to - from) * 0.3).trunc()).collect();
    let mut kinds = BTreeSet::new();
    for (number, zone) in zones_of(yard).iter().enumerate() {
        let condition = zone["cond"].as_str().unwrap();
        let is_half = zone["wptr"].as_f64() == zone["cap"].as_f64().map(|cap| cap / 2.0);
        let [upper, lower] = match condition {
            "not-wp" => [&conventional, &conventional],
            "empty" => [&empty, &empty],
            "full" => [&full, &full],
            "implicit-open" if is_half => [&pale, &open],
            _ => panic!("{zone}"),
        };
        let x = (size * (number as f64 + 0.5)).floor();
        for (part, wanted) in [(0.2, upper), (0.8, lower)] {
            let y = (size * part).floor();
            let found = numbers(&format!(
                "[...document.getElementById('zone-map').getContext('2d')
                    .getImageData({x}, {y}, 1, 1).data].slice(0, 3)"
            ));
            assert_eq!(&found, wanted, "{part}: {zone}");
        }
        kinds.insert(condition.to_owned());
    }
    assert_eq!(kinds.len(), 4, "{kinds:?}");
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
