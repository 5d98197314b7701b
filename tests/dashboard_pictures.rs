//! The page of the dashboard with fixed data: how it looks, and names that contain markup.
//!
//! A small server answers as the daemon would: with the files of the page, a history of five
//! minutes, a sample, and the zones of a device. The pictures go to the directory for temporary
//! files of cargo, and are compared with those in docs/images.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use blockyard_testing::terminal_picture::{VARIABLE, is_written};
use data_encoding::BASE64;
use serde_json::{Value, json};

use crate::browser::Browser;

/// The time of the last point, in ms: 1 December 2026, 12:00 UTC.
const NOW_MS: u64 = 1_796_126_400_000;
/// Points of the history: five minutes.
const POINTS: u64 = 300;
/// Rows of the heat map.
const ROWS: usize = 24;
/// Zones of the device.
const ZONES: u64 = 1900;

/// The squares of 8 by 8 pixels that may differ between a picture and that in the manual. A few
/// pixels at the edges of plots change from run to run; one more link changes 71 squares.
const SQUARES_MAX: u64 = 16;

/// The names of the fixture's device and clients.
#[derive(Clone, Copy)]
struct Names {
    device: &'static str,
    peer: &'static str,
    host: &'static str,
    pool: &'static str,
}

const PLAIN: Names = Names {
    device: "zoned0",
    peer: "192.168.7.21:53122",
    host: "nqn.2014-08.org.nvmexpress:uuid:4dd5a6b1-51c4-4a24-9a6d-1e1c9f7e0a01",
    pool: "/srv/pool",
};

/// Values of one second, which rise and fall over the time.
struct Second {
    reads: f64,
    writes: f64,
    p50_ns: f64,
    p99_ns: f64,
    heat: [u64; ROWS],
}

impl Second {
    fn new(index: u64) -> Second {
        let phase = index as f64 / 23.0;
        let reads = (41_000.0 + 9_000.0 * phase.sin()).round();
        let writes = (12_500.0 + 4_000.0 * (phase * 0.7).cos()).round();
        let p50_ns = (88_000.0 + 20_000.0 * phase.sin()).round();
        let slow = if index % 60 < 12 { 5.0 } else { 1.0 };
        let mut heat = [0; ROWS];
        for (row, count) in heat.iter_mut().enumerate() {
            let distance = row as f64 - 7.0 - phase.sin() * 0.6;
            let tail = if (9..15).contains(&row) { 60.0 * slow / (row as f64 - 7.0) } else { 0.0 };
            *count = ((reads + writes) * (-distance * distance).exp() * 0.5 + tail) as u64;
        }
        Second { reads, writes, p50_ns, p99_ns: p50_ns * 4.0 * slow, heat }
    }
}

fn history(names: Names) -> Value {
    let seconds: Vec<Second> = (0..POINTS).map(Second::new).collect();
    let times = (1..=POINTS).map(|index| NOW_MS - (POINTS - index) * 1000);
    let list = |value: fn(&Second) -> f64| seconds.iter().map(value).collect::<Vec<_>>();
    let floor = |row: usize| if row == 0 { 0 } else { 1_u64 << (row + 9) };
    json!({
        "device": names.device,
        "step_ms": 1000,
        "times_ms": times.collect::<Vec<_>>(),
        "reads_per_second": list(|it| it.reads),
        "writes_per_second": list(|it| it.writes),
        "read_bytes_per_second": list(|it| it.reads * 4096.0),
        "written_bytes_per_second": list(|it| it.writes * 16_384.0),
        "errors_per_second": list(|_| 0.0),
        "queue_size": list(|it| it.reads * it.p50_ns / 1e9),
        "p50_ns": list(|it| it.p50_ns),
        "p99_ns": list(|it| it.p99_ns),
        "latency_floors_ns": (0..ROWS).map(floor).collect::<Vec<_>>(),
        "latency": seconds.iter().map(|it| it.heat).collect::<Vec<_>>(),
    })
}

fn device(name: &str, kind: &str, share: f64) -> Value {
    let second = Second::new(POINTS - 1);
    let (reads, writes) = ((second.reads * share).round(), (second.writes * share).round());
    json!({
        "device": name, "kind": kind, "size_bytes": 487_u64 << 30, "read_only": false,
        "zone_count": 0, "open_max": 0, "active_max": 0, "scheduler": "none",
        "scheduler_counts": [], "latency": second.heat, "ram": null,
        "reads_per_second": reads, "writes_per_second": writes,
        "discards_per_second": 0.0, "flushes_per_second": 2.0,
        "read_bytes_per_second": reads * 4096.0, "written_bytes_per_second": writes * 16_384.0,
        "errors_per_second": 0.0, "read_await_ns": 91_000, "write_await_ns": 143_000,
        "p50_ns": second.p50_ns, "p99_ns": second.p99_ns, "p999_ns": second.p99_ns * 2.0,
        "queue_size": reads * 91e-6,
    })
}

fn sample(names: Names) -> Value {
    let mut zoned = device(names.device, "null", 1.0);
    (zoned["zone_count"], zoned["open_max"], zoned["active_max"]) =
        (json!(ZONES), json!(14), json!(28));
    zoned["scheduler"] = json!("mq-deadline");
    let classes =
        ["rt", "be", "idle"].into_iter().flat_map(|class| [(class, "read"), (class, "write")]);
    let counts = classes.map(|(class, direction)| {
        let queued = if class == "be" { 37 } else { 0 };
        json!({ "class": class, "direction": direction, "inserted": 1_000_000, "merged": 4_100,
            "dispatched": 999_963, "completed": 999_950, "expired": 12, "requeued": 0,
            "queued": queued })
    });
    zoned["scheduler_counts"] = json!(counts.collect::<Vec<_>>());
    let mut ram = device("ram0", "ram", 0.2);
    ram["ram"] = json!({ "mm_stat": {
        "orig_data_size": 3_221_225_472_u64, "compr_data_size": 1_052_770_304, "same_pages": 18_112,
        "mem_used_total": 1_094_713_344, "mem_limit": 2_147_483_648_u64, "huge_pages": 941 } });
    let mut failing = device("vol0", "volume", 0.01);
    failing["errors_per_second"] = json!(3.0);
    let client = |protocol: &str, id: u64, peer: &str, host: Value| {
        json!({ "protocol": protocol, "id": id, "peer": peer, "device": names.device, "host": host,
            "queue": if host.is_null() { Value::Null } else { json!(id) },
            "requests_per_second": 9_120.0, "read_bytes_per_second": 36e6,
            "written_bytes_per_second": 71e6, "errors_per_second": 0.0 })
    };
    json!({
        "time_ms": NOW_MS, "interval_ns": 1_000_000_000,
        "process": { "pid": 4711, "cpus": 1.37, "cpu_ns_per_io": 19_000.0,
            "resident_bytes": 214 << 20 },
        "devices": [zoned, ram, failing],
        "pools": [{ "pool": names.pool, "failed_read_only": false, "copies_bad": 0,
            "used_bytes": 61_u64 << 30, "available_bytes": 139_u64 << 30, "volumes": 7,
            "data_bytes_per_second": 88e6, "write_amplification": 1.31, "syncs_per_second": 412.0,
            "segments_cleaned_per_second": 3.0, "moved_bytes_per_second": 11e6,
            "cleaning_waits_per_second": 0.0, "segment_bytes": 8 << 20, "segments": 25_600,
            "segments_free": 16_108, "segments_by_live": [640, 211, 304, 418, 522, 701, 955, 1310,
            1871, 2560] }],
        "clients": [client("nvme", 1, names.peer, json!(names.host)),
            client("nvme", 2, names.peer, json!(names.host)),
            client("nbd", 3, "unix:/run/blockyard/nbd.sock", Value::Null)],
        "clients_count": 3,
    })
}

fn zones(names: Names) -> Value {
    let run = |zone: u64| match zone {
        0..4 => (zone, 1, 0, 0),
        4..1100 => (zone, 1, 14, 255),
        1100..1114 => (zone, 1, 2, (zone * 37 % 250) as u8 + 3),
        1114..1122 => (zone, 1, 4, (zone * 53 % 250) as u8 + 3),
        1500 => (zone, 1, 13, 0),
        1501 => (zone, 1, 15, 0),
        _ => (zone, 1, if zone.is_multiple_of(97) { 3 } else { 1 }, 0),
    };
    json!({ "device": names.device, "full": true, "zone_count": ZONES, "zone_sectors": 524_288,
        "too_many": false, "runs": (0..ZONES).map(run).collect::<Vec<_>>() })
}

/// A server of the page with fixed data. Its threads end with the test's process.
struct FixtureServer {
    address: String,
    _thread: JoinHandle<()>,
}

impl FixtureServer {
    fn start(names: Names) -> FixtureServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}/", listener.local_addr().unwrap());
        let serve = move || {
            for client in listener.incoming().map_while(Result::ok) {
                std::thread::spawn(move || answer(client, names));
            }
        };
        FixtureServer { address, _thread: std::thread::spawn(serve) }
    }
}

fn asset(path: &str) -> Option<(PathBuf, &'static str)> {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../yard/assets");
    let file = match path {
        "/" => assets.join("dashboard/index.html"),
        "/uplot.js" => assets.join("uplot/uPlot-1.6.32.iife.min.js"),
        "/uplot.css" => assets.join("uplot/uPlot-1.6.32.min.css"),
        path => assets.join("dashboard").join(path.trim_start_matches('/')),
    };
    let content_type = match file.extension()?.to_str()? {
        "html" => "text/html; charset=utf-8",
        "js" => "text/javascript",
        "css" => "text/css",
        "svg" => "image/svg+xml",
        _ => return None,
    };
    file.exists().then_some((file, content_type))
}

/// Answers one request. A stream stays open: the client closes it.
fn answer(mut client: TcpStream, names: Names) {
    let mut lines = BufReader::new(client.try_clone().unwrap()).lines().map_while(Result::ok);
    let request = lines.next().unwrap_or_default();
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    lines.by_ref().find(String::is_empty);
    let path = path.split('?').next().unwrap();
    let (content_type, content) = match path {
        "/v1/stream" => {
            let event = |name: &str, data: Value| format!("event: {name}\ndata: {data}\n\n");
            let text = event("sample", sample(names)) + &event("zones", zones(names));
            ("text/event-stream", text.into_bytes())
        }
        "/v1/history" => ("application/json", history(names).to_string().into_bytes()),
        path => match asset(path) {
            Some((file, content_type)) => (content_type, fs::read(file).unwrap()),
            None => ("text/plain", b"not found".to_vec()),
        },
    };
    let is_stream = path == "/v1/stream";
    let length = match is_stream {
        true => String::new(),
        false => format!("Content-Length: {}\r\n", content.len()),
    };
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n{length}Connection: close\r\n\r\n"
    );
    // A browser that has closed the connection needs no answer.
    let _ = client.write_all(head.as_bytes()).and_then(|()| client.write_all(&content));
    if is_stream {
        lines.last();
    }
}

/// A browser with the page of the fixture, once all of it is drawn.
fn drawn(server: &FixtureServer, width: u32, height: u32, scheme: &str) -> Browser {
    let mut browser = Browser::start();
    browser.look(width, height, scheme);
    browser.open(&server.address);
    browser.wait("document.querySelectorAll('.uplot').length === 3");
    browser.wait("document.documentElement.dataset.points === '300'");
    browser.wait("document.querySelectorAll('#zones-legend [data-count]').length === 8");
    assert_eq!(browser.value("document.documentElement.dataset.error ?? null"), Value::Null);
    browser
}

/// Width and height in the head of a PNG.
fn size(png: &[u8]) -> (u32, u32) {
    assert_eq!(png[..8], *b"\x89PNG\r\n\x1a\n");
    let number = |at: usize| u32::from_be_bytes(png[at..at + 4].try_into().unwrap());
    (number(16), number(20))
}

/// The number of squares of 8 by 8 pixels in which the mean brightness of two pictures differs by
/// more than 16 of 255 levels, which smoothing the edges of letters in another way does not change;
/// all squares if one picture is larger. The browser reads the pictures.
fn squares_that_differ(browser: &mut Browser, one: &[u8], other: &[u8]) -> u64 {
    browser.open("about:blank");
    let script = "(async () => {
        const pixels = async (data) => {
            const image = new Image();
            image.src = `data:image/png;base64,${data}`;
            await image.decode();
            const canvas = document.createElement('canvas');
            [canvas.width, canvas.height] = [image.width, image.height];
            const context = canvas.getContext('2d');
            context.drawImage(image, 0, 0);
            return context.getImageData(0, 0, image.width, image.height);
        };
        const [one, other] = [await pixels('{one}'), await pixels('{other}')];
        const { width, height } = one;
        if (other.width !== width || other.height !== height) return width * height / 64;
        let found = 0;
        for (let top = 0; top < height; top += 8) {
            for (let left = 0; left < width; left += 8) {
                let sum = 0;
                for (let y = top; y < Math.min(top + 8, height); y += 1) {
                    for (let x = left; x < Math.min(left + 8, width); x += 1) {
                        const at = (y * width + x) * 4;
                        for (const colour of [0, 1, 2]) {
                            sum += one.data[at + colour] - other.data[at + colour];
                        }
                    }
                }
                if (Math.abs(sum) > 16 * 3 * 64) found += 1;
            }
        }
        return found;
    })()";
    let script = script.replace("{one}", &BASE64.encode(one));
    let found = browser.value(&script.replace("{other}", &BASE64.encode(other)));
    found.as_f64().unwrap_or_else(|| panic!("{found}")) as u64
}

/// Compares a picture with that in the manual.
fn check(browser: &mut Browser, name: &str, png: &[u8]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/images").join(name);
    if is_written() {
        fs::write(&path, png).unwrap();
    }
    let kept = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let differ = squares_that_differ(browser, png, &kept);
    assert!(
        differ <= SQUARES_MAX,
        "docs/images/{name} differs from the page in {differ} squares; write it again by \
         `{VARIABLE}=write cargo test -p blockyard --test interop pictures`, and look at it"
    );
}

#[test]
fn the_page_is_drawn_in_light_and_dark_and_on_a_phone() {
    let server = FixtureServer::start(PLAIN);
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let mut pictures = Vec::new();
    for (name, width, scheme) in [
        ("dashboard-light", 1280, "light"),
        ("dashboard-dark", 1280, "dark"),
        ("dashboard-phone", 390, "light"),
    ] {
        let mut browser = drawn(&server, width, 1000, scheme);
        // The whole page, down to the connections.
        let height = browser.value("document.documentElement.scrollHeight").as_u64().unwrap();
        let height = u32::try_from(height).unwrap();
        assert!(height > 1000, "{name}: {height}");
        browser.look(width, height, scheme);
        browser.wait(&format!("window.innerHeight === {height}"));
        // Nothing is wider than the window, but tables, which scroll by themselves.
        let overflow =
            "document.documentElement.scrollWidth - document.documentElement.clientWidth";
        assert_eq!(browser.value(overflow), 0, "{name}");
        let png = browser.picture();
        assert_eq!(size(&png), (width, height), "{name}");
        // A page without text and plots compresses to much less.
        assert!(png.len() > 30_000, "{name}: {} bytes", png.len());
        fs::write(directory.join(format!("{name}.png")), &png).unwrap();
        pictures.push(png);
        // The cell of a full zone has the colour of full zones.
        let colours = "(() => {
            const canvas = document.getElementById('zone-map');
            const legend = document.querySelector('[data-condition=full] .swatch');
            const { width, height } = canvas;
            const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);
            const wanted = getComputedStyle(legend).backgroundColor.match(/\\d+/g).map(Number);
            let found = 0;
            for (let at = 0; at < data.length; at += 4) {
              if (wanted.every((it, part) => data[at + part] === it)) found += 1;
            }
            return found / (data.length / 4);
        })()";
        let part = browser.value(colours).as_f64().unwrap();
        assert!((0.3..0.65).contains(&part), "{name}: {part}");
        check(&mut browser, &format!("{name}.png"), pictures.last().unwrap());
    }
    assert_ne!(pictures[0], pictures[1]);
}

#[test]
fn a_picture_of_other_text_or_colours_differs() {
    let (mut browser, names) = (Browser::start(), Names { device: "zoned-other", ..PLAIN });
    let picture = |names, scheme| {
        let server = FixtureServer::start(names);
        drawn(&server, 1280, 1560, scheme).picture()
    };
    let light = picture(PLAIN, "light");
    let (dark, other) = (picture(PLAIN, "dark"), picture(names, "light"));
    assert!(squares_that_differ(&mut browser, &light, &dark) > 10_000);
    assert!(squares_that_differ(&mut browser, &light, &other) > SQUARES_MAX);
}

#[test]
fn a_name_with_markup_is_text() {
    let evil = "<img src=x onerror=\"window.pwned=1\"><script>window.pwned=1</script>'\"&amp;";
    let names = Names { device: evil, peer: evil, host: evil, pool: evil };
    let server = FixtureServer::start(names);
    let mut browser = drawn(&server, 1280, 1560, "light");
    assert_eq!(browser.value("window.pwned ?? null"), Value::Null);
    assert_eq!(browser.value("document.querySelectorAll('main img, main script').length"), 0);
    for cell in [
        "#devices tbody td.name",
        "#pools-table tbody td.name",
        "#clients tbody td.name:nth-child(3)",
        "#clients tbody td.name:nth-child(5)",
        "#device-title",
    ] {
        let text = browser.value(&format!("document.querySelector('{cell}').textContent"));
        assert_eq!(text, evil, "{cell}");
    }
    // The address names the device, and leads to it again.
    browser.press("ArrowDown");
    assert_eq!(browser.value("decodeURIComponent(location.hash.slice(1))"), evil);
}
