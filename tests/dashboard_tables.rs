//! The tables of the dashboard: their columns, and the text that a value of the API has in them.
//!
//! The formats are written here a second time, so that the test does not ask the page about itself.

use serde_json::{Value, json};

use crate::browser::Browser;

/// How a column shows a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// A name; `-` for none.
    Name,
    /// A whole number with all its digits; `-` for none.
    Number,
    /// A number of events, or of events per second.
    Count,
    /// Bytes per second as a number of MiB.
    Mib,
    /// A number of bytes.
    Bytes,
    /// A limit in bytes; 0 is none.
    Limit,
    /// A time in nanoseconds.
    Duration,
    Ratio,
    Percent,
}

/// A column: its heading, the field of the row that it shows, and how.
type Column = (&'static str, &'static str, Format);

const DEVICES: [Column; 12] = [
    ("DEVICE", "device", Format::Name),
    ("r/s", "reads_per_second", Format::Count),
    ("w/s", "writes_per_second", Format::Count),
    ("rMB/s", "read_bytes_per_second", Format::Mib),
    ("wMB/s", "written_bytes_per_second", Format::Mib),
    ("r_await", "read_await_ns", Format::Duration),
    ("w_await", "write_await_ns", Format::Duration),
    ("p50", "p50_ns", Format::Duration),
    ("p99", "p99_ns", Format::Duration),
    ("p99.9", "p999_ns", Format::Duration),
    ("aqu-sz", "queue_size", Format::Ratio),
    ("err/s", "errors_per_second", Format::Count),
];

const CLIENTS: [Column; 11] = [
    ("PROTOCOL", "protocol", Format::Name),
    ("ID", "id", Format::Number),
    ("PEER", "peer", Format::Name),
    ("DEVICE", "device", Format::Name),
    ("HOST", "host", Format::Name),
    ("CTRL", "controller", Format::Number),
    ("QUEUE", "queue", Format::Number),
    ("req/s", "requests_per_second", Format::Count),
    ("rMB/s", "read_bytes_per_second", Format::Mib),
    ("wMB/s", "written_bytes_per_second", Format::Mib),
    ("err/s", "errors_per_second", Format::Count),
];

const SCHEDULER: [Column; 7] = [
    ("CLASS", "class", Format::Name),
    ("DIRECTION", "direction", Format::Name),
    ("queued", "queued", Format::Count),
    ("ins/s", "inserted_per_second", Format::Count),
    ("disp/s", "dispatched_per_second", Format::Count),
    ("merged/s", "merged_per_second", Format::Count),
    ("expired/s", "expired_per_second", Format::Count),
];

const RAM: [Column; 8] = [
    ("DEVICE", "device", Format::Name),
    ("data", "orig_data_size", Format::Bytes),
    ("compr", "compr_data_size", Format::Bytes),
    ("used", "mem_used_total", Format::Bytes),
    ("limit", "mem_limit", Format::Limit),
    ("ratio", "ratio", Format::Ratio),
    ("same", "same_pages", Format::Count),
    ("huge", "huge_pages", Format::Count),
];

const POOLS: [Column; 12] = [
    ("POOL", "pool", Format::Name),
    ("STATE", "state", Format::Name),
    ("used", "used_bytes", Format::Bytes),
    ("avail", "available_bytes", Format::Bytes),
    ("fill", "fill", Format::Percent),
    ("vols", "volumes", Format::Count),
    ("wMB/s", "data_bytes_per_second", Format::Mib),
    ("amp", "write_amplification", Format::Ratio),
    ("syncs/s", "syncs_per_second", Format::Count),
    ("cleaned/s", "segments_cleaned_per_second", Format::Count),
    ("moved/s", "moved_bytes_per_second", Format::Mib),
    ("waits/s", "cleaning_waits_per_second", Format::Count),
];

/// A script that resolves to a sample of the stream, the sample before it, and all that the page
/// shows of them: the page and the script get the same events.
const LOOK: &str = "new Promise((done) => {
  const source = new EventSource('/v1/stream');
  const text = (it) => it.textContent;
  const texts = (selector) => [...document.querySelectorAll(selector)].map(text);
  const cell = (it) => ({ text: text(it), value: it.dataset.value ?? null });
  const table = (id) => {
    const { tHead, tBodies } = document.getElementById(id);
    const rows = [...tBodies[0].rows].map((row) => [...row.cells].map(cell));
    return { headings: [...tHead.rows[0].cells].map(text), rows };
  };
  let last = null;
  source.addEventListener('sample', ({ data }) => setTimeout(() => {
    const [before, sample] = [last, JSON.parse(data)];
    last = sample;
    const isShown = String(sample.time_ms) === document.documentElement.dataset.time;
    // The last sample comes again with a new stream.
    if (!isShown || before === null || before.time_ms === sample.time_ms) return;
    if (!(CONDITION)) return;
    source.close();
    done({
      before,
      sample,
      devices: table('devices'),
      clients: table('clients'),
      scheduler: table('scheduler-table'),
      ram: table('ram-table'),
      pools: table('pools-table'),
      captions: texts('#pools-segments figcaption'),
      segments: texts('#pools-segments .column span'),
      summary: text(document.getElementById('summary')),
      facts: text(document.getElementById('device-facts')),
    });
  }, 100));
})";

/// What the page shows, as soon as a condition on `sample` holds.
pub(crate) fn look(browser: &mut Browser, condition: &str) -> Value {
    browser.value(&LOOK.replace("CONDITION", condition))
}

/// Compares everything that the page shows of `device`, and of the yard, with the values of
/// `sample`.
#[track_caller]
pub(crate) fn compare(seen: &Value, sample: &Value, device: &str) {
    let devices = sample["devices"].as_array().unwrap();
    compare_table(&seen["devices"], &DEVICES, devices);
    compare_table(&seen["clients"], &CLIENTS, sample["clients"].as_array().unwrap());
    let of_device = |sample: &Value| {
        let all = sample["devices"].as_array().unwrap();
        all.iter().find(|it| it["device"] == device).unwrap().clone()
    };
    let shown = of_device(sample);
    let seconds = number(&sample["time_ms"]) - number(&seen["before"]["time_ms"]);
    let rows = scheduler_rows(&of_device(&seen["before"]), &shown, seconds / 1000.0);
    compare_table(&seen["scheduler"], &SCHEDULER, &rows);
    let ram: Vec<Value> = devices.iter().filter(|it| !it["ram"].is_null()).map(ram_row).collect();
    compare_table(&seen["ram"], &RAM, &ram);
    let pools = sample["pools"].as_array().unwrap();
    compare_table(&seen["pools"], &POOLS, &pools.iter().map(pool_row).collect::<Vec<_>>());

    let captions: Vec<String> = pools.iter().map(caption).collect();
    assert_eq!(seen["captions"], json!(captions));
    let segments: Vec<String> = pools.iter().flat_map(segments).collect();
    assert_eq!(seen["segments"], json!(segments));
    let facts = format!(
        "{} device of {}, scheduler {}",
        shown["kind"].as_str().unwrap(),
        bytes(number(&shown["size_bytes"])),
        shown["scheduler"].as_str().unwrap()
    );
    assert_eq!(seen["facts"], facts);
    let iops = devices.iter().fold(0.0, |sum, it| {
        let of = |kind: &str| number(&it[format!("{kind}_per_second")]);
        sum + (of("reads") + of("writes") + of("discards") + of("flushes"))
    });
    let process = &sample["process"];
    let summary = format!(
        "pid {}   {} IOPS   CPU {}%   memory {}",
        process["pid"],
        count(iops),
        fixed(100.0 * number(&process["cpus"]), 0),
        bytes(number(&process["resident_bytes"]))
    );
    assert_eq!(seen["summary"], summary);
}

/// Compares the text of each cell of a table, and the number that the cell keeps with it.
#[track_caller]
fn compare_table(shown: &Value, columns: &[Column], rows: &[Value]) {
    let headings: Vec<&str> = columns.iter().map(|(heading, ..)| *heading).collect();
    assert_eq!(shown["headings"], json!(headings));
    let shown = shown["rows"].as_array().unwrap();
    assert_eq!(shown.len(), rows.len(), "{shown:?} {rows:?}");
    for (cells, row) in shown.iter().zip(rows) {
        let cells = cells.as_array().unwrap();
        assert_eq!(cells.len(), columns.len(), "{cells:?}");
        for (cell, (heading, field, format)) in cells.iter().zip(columns) {
            let value = &row[*field];
            assert_eq!(cell["text"], text(*format, value), "{heading}: {row}");
            let has_number = ![Format::Name, Format::Percent].contains(format);
            let wanted = value.as_f64().filter(|_| has_number);
            let kept = cell["value"].as_str().map(|text| text.parse::<f64>().unwrap());
            // The last digit of a number may be lost where JSON is read.
            let is_same = match (kept, wanted) {
                (Some(kept), Some(wanted)) => (kept - wanted).abs() <= 1e-12 * wanted,
                (kept, wanted) => kept == wanted,
            };
            assert!(is_same, "{heading}: {kept:?} {wanted:?}: {row}");
        }
    }
}

/// The counts of a scheduler since the sample before, per second.
fn scheduler_rows(before: &Value, now: &Value, seconds: f64) -> Vec<Value> {
    let counts = |device: &Value| device["scheduler_counts"].as_array().unwrap().clone();
    let rows = counts(now).into_iter().zip(counts(before));
    rows.map(|(mut row, old)| {
        assert_eq!((&row["class"], &row["direction"]), (&old["class"], &old["direction"]));
        for name in ["inserted", "dispatched", "merged", "expired"] {
            let rate = (number(&row[name]) - number(&old[name])) / seconds;
            row[format!("{name}_per_second")] = json!(rate);
        }
        row
    })
    .collect()
}

fn ram_row(device: &Value) -> Value {
    let mut row = device["ram"]["mm_stat"].clone();
    row["ratio"] = json!(number(&row["orig_data_size"]) / number(&row["mem_used_total"]));
    row["device"] = device["device"].clone();
    row
}

fn pool_row(pool: &Value) -> Value {
    let mut row = pool.clone();
    let (used, available) = (number(&pool["used_bytes"]), number(&pool["available_bytes"]));
    row["fill"] = json!(100.0 * used / (used + available));
    row["state"] = json!(match (&pool["failed_read_only"], &pool["copies_bad"]) {
        (Value::Bool(true), _) => "failed",
        (_, bad) if *bad == 0 => "good",
        _ => "degraded",
    });
    row
}

/// The text above the segments of a pool.
fn caption(pool: &Value) -> String {
    let of = |field: &str| number(&pool[field]);
    format!(
        "{}: {} segments of {}, {} free; segments in use by live data",
        pool["pool"].as_str().unwrap(),
        count(of("segments")),
        bytes(of("segment_bytes")),
        count(of("segments_free"))
    )
}

/// The texts of the columns of a pool's segments: above each its count, and below its tenth.
fn segments(pool: &Value) -> Vec<String> {
    let counts = pool["segments_by_live"].as_array().unwrap().iter().enumerate();
    counts.flat_map(|(tenth, it)| [count(number(it)), format!("{}%", 10 * tenth)]).collect()
}

#[track_caller]
fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn text(format: Format, value: &Value) -> String {
    if value.is_null() {
        return "-".to_owned();
    }
    match format {
        Format::Name => value.as_str().unwrap().to_owned(),
        Format::Number => value.to_string(),
        Format::Count => count(number(value)),
        Format::Mib => count(number(value) / 1_048_576.0),
        Format::Bytes => bytes(number(value)),
        Format::Limit if *value == 0 => "none".to_owned(),
        Format::Limit => bytes(number(value)),
        Format::Duration => duration(number(value)),
        Format::Ratio => three_digits(number(value)),
        Format::Percent => format!("{}%", fixed(number(value), 0)),
    }
}

/// A number with this many digits after the point. As in JavaScript, a tie is rounded up.
fn fixed(value: f64, digits: usize) -> String {
    // No value here has more digits than these.
    let all = format!("{value:.64}");
    let rest = &all[all.find('.').unwrap() + 1 + digits..];
    let is_tie = rest.starts_with('5') && rest[1..].bytes().all(|digit| digit == b'0');
    let value = if is_tie { value.next_up() } else { value };
    format!("{value:.digits$}")
}

fn three_digits(value: f64) -> String {
    match value {
        100.0.. => fixed(value, 0),
        10.0.. => fixed(value, 1),
        _ => fixed(value, 2),
    }
}

fn count(value: f64) -> String {
    match value {
        1e9.. => three_digits(value / 1e9) + "G",
        1e6.. => three_digits(value / 1e6) + "M",
        1e3.. => three_digits(value / 1e3) + "k",
        _ if value.fract() == 0.0 => value.to_string(),
        _ => three_digits(value),
    }
}

fn bytes(value: f64) -> String {
    let scales = [(50, "P"), (40, "T"), (30, "G"), (20, "M"), (10, "K")];
    let scales = scales.map(|(power, unit)| ((1_u64 << power) as f64, unit));
    match scales.into_iter().find(|(least, _)| value >= *least) {
        Some((least, unit)) => three_digits(value / least) + unit,
        None => value.to_string(),
    }
}

fn duration(ns: f64) -> String {
    match ns {
        1e9.. => three_digits(ns / 1e9) + "s",
        1e6.. => three_digits(ns / 1e6) + "ms",
        1e3.. => three_digits(ns / 1e3) + "us",
        _ => format!("{}ns", fixed(ns, 0)),
    }
}

#[test]
fn numbers_have_three_digits_and_ties_are_rounded_up() {
    let counts = [0.0, 7.0, 0.125, 12.25, 999.5, 1115.0, 12_250.0, 3e6].map(count);
    assert_eq!(counts, ["0", "7", "0.13", "12.3", "1000", "1.11k", "12.3k", "3.00M"]);
    let sizes = [0.0, 1023.0, 1024.0, 102_912.0, 65_536.0 * 1024.0].map(bytes);
    assert_eq!(sizes, ["0", "1023", "1.00K", "101K", "64.0M"]);
    let times = [999.4, 12_500.0, 2.5e9].map(duration);
    assert_eq!(times, ["999ns", "12.5us", "2.50s"]);
}
