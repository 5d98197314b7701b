//! What `top` shows: pages with a table each, for the screen, for text and for JSON.

use blockyard_core::channel::percentile_ns;
use blockyard_yard::activity::{Activity, PoolActivity};
use blockyard_yard::interval::{Interval, mean_ns};
use blockyard_yard::table::{Table, duration};

const MIB: f64 = (1 << 20) as f64;

/// The conditions of zones, in the order of their numbers, with headings as blkzone's short names.
const CONDITIONS: [(&str, &str); 8] = [
    ("not-wp", "conv"),
    ("empty", "empty"),
    ("implicit-open", "imp-open"),
    ("explicit-open", "exp-open"),
    ("closed", "closed"),
    ("full", "full"),
    ("read-only", "readonly"),
    ("offline", "offline"),
];

/// A page of `top`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TopPage {
    Devices,
    Zones,
    Ram,
    Pools,
    Clients,
}

impl TopPage {
    pub(crate) const ALL: [TopPage; 5] =
        [TopPage::Devices, TopPage::Zones, TopPage::Ram, TopPage::Pools, TopPage::Clients];

    /// The title.
    pub(crate) fn title(self) -> &'static str {
        match self {
            TopPage::Devices => "Devices",
            TopPage::Zones => "Zones",
            TopPage::Ram => "RAM disks",
            TopPage::Pools => "Pools",
            TopPage::Clients => "Clients",
        }
    }

    /// The headings of the columns. The first ones are of text.
    pub(crate) fn headings(self) -> Vec<&'static str> {
        match self {
            TopPage::Devices => vec![
                "DEVICE", "r/s", "w/s", "rMB/s", "wMB/s", "r_await", "w_await", "p50", "p99",
                "p99.9", "aqu-sz", "merges/s", "err/s",
            ],
            TopPage::Zones => {
                let conditions = CONDITIONS.into_iter().map(|(_, heading)| heading);
                ["DEVICE"].into_iter().chain(conditions).chain(["zones"]).collect()
            }
            TopPage::Ram => vec![
                "DEVICE", "data", "stored", "memory", "ratio", "limit", "same", "huge", "failed",
            ],
            TopPage::Pools => vec![
                "POOL",
                "STATE",
                "used",
                "avail",
                "fill",
                "vols",
                "wMB/s",
                "amp",
                "syncs/s",
                "cleaned/s",
                "moved/s",
                "waits/s",
            ],
            TopPage::Clients => {
                vec![
                    "PROTOCOL", "DEVICE", "QUEUE", "CLIENT", "req/s", "rMB/s", "wMB/s", "p50",
                    "p99", "err/s",
                ]
            }
        }
    }

    /// The number of columns of text, which come first.
    pub(crate) fn text_columns(self) -> usize {
        match self {
            TopPage::Devices | TopPage::Zones | TopPage::Ram => 1,
            TopPage::Pools => 2,
            TopPage::Clients => 4,
        }
    }

    /// The rows, in the yard's order.
    pub(crate) fn rows(self, activity: &Activity) -> Vec<Vec<TopCell>> {
        let seconds = activity.seconds;
        match self {
            TopPage::Devices => activity.devices.iter().map(device_row).collect(),
            TopPage::Zones => activity
                .zones
                .iter()
                .map(|device| {
                    let of = |name| device.zones.get(name).copied().unwrap_or(0);
                    let counts = CONDITIONS.map(|(name, _)| TopCell::count(of(name)));
                    let total = TopCell::count(device.zones.values().sum());
                    let name = TopCell::text(&device.device);
                    [name].into_iter().chain(counts).chain([total]).collect()
                })
                .collect(),
            TopPage::Ram => activity.devices.iter().filter_map(ram_row).collect(),
            TopPage::Pools => activity.pools.iter().map(|pool| pool_row(pool, seconds)).collect(),
            TopPage::Clients => activity
                .connections
                .iter()
                .map(|it| {
                    let (now, latency) = (&it.now, it.latency());
                    let client = match &now.host {
                        Some(host) => format!("{host} {}", now.peer),
                        None => now.peer.clone(),
                    };
                    vec![
                        TopCell::text(&now.protocol),
                        TopCell::text(now.device.as_deref().unwrap_or("-")),
                        now.queue.map_or_else(TopCell::none, |queue| TopCell::count(queue.into())),
                        TopCell::text(&client),
                        TopCell::rate(it.rate(seconds, |it| it.requests)),
                        TopCell::rate(it.rate(seconds, |it| it.read_bytes) / MIB),
                        TopCell::rate(it.rate(seconds, |it| it.written_bytes) / MIB),
                        TopCell::time(percentile_ns(&latency, 500)),
                        TopCell::time(percentile_ns(&latency, 990)),
                        TopCell::rate(it.rate(seconds, |it| it.errors)),
                    ]
                })
                .collect(),
        }
    }

    /// The table as text.
    pub(crate) fn table(self, activity: &Activity) -> Table {
        let mut table = Table::new(self.headings());
        for row in self.rows(activity) {
            table.row(row.into_iter().map(|cell| cell.text));
        }
        table
    }
}

/// A cell of a table: its text, and the number by which its column is sorted.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TopCell {
    pub(crate) text: String,
    pub(crate) number: Option<f64>,
}

impl TopCell {
    fn text(text: &str) -> TopCell {
        TopCell { text: text.to_owned(), number: None }
    }

    /// There is no value.
    fn none() -> TopCell {
        TopCell::text("-")
    }

    fn count(count: u64) -> TopCell {
        TopCell { text: count.to_string(), number: Some(count as f64) }
    }

    fn rate(rate: f64) -> TopCell {
        TopCell { text: short(rate), number: Some(rate) }
    }

    fn bytes(bytes: u64) -> TopCell {
        TopCell { text: short_bytes(bytes), number: Some(bytes as f64) }
    }

    fn time(ns: Option<u64>) -> TopCell {
        let text = ns.map_or_else(|| "-".to_owned(), duration);
        TopCell { text, number: Some(ns.unwrap_or(0) as f64) }
    }

    fn ratio(part: f64, whole: f64) -> TopCell {
        match whole > 0.0 {
            true => TopCell { text: format!("{:.2}", part / whole), number: Some(part / whole) },
            false => TopCell::none(),
        }
    }
}

/// A number with about three digits.
pub(crate) fn short(number: f64) -> String {
    match number {
        0.0 => "0".to_owned(),
        ..10.0 => format!("{number:.2}"),
        ..100.0 => format!("{number:.1}"),
        ..1e3 => format!("{number:.0}"),
        ..1e4 => format!("{:.2}k", number / 1e3),
        ..1e5 => format!("{:.1}k", number / 1e3),
        ..1e6 => format!("{:.0}k", number / 1e3),
        ..1e7 => format!("{:.2}M", number / 1e6),
        ..1e8 => format!("{:.1}M", number / 1e6),
        _ => format!("{:.0}M", number / 1e6),
    }
}

/// A length with about three digits and a binary unit.
pub(crate) fn short_bytes(bytes: u64) -> String {
    let (mut value, mut units) = (bytes as f64, ["", "K", "M", "G", "T", "P"].into_iter());
    let mut unit = units.next().unwrap_or_default();
    while value >= 1024.0
        && let Some(next) = units.next()
    {
        (value, unit) = (value / 1024.0, next);
    }
    match value {
        _ if unit.is_empty() => format!("{bytes}"),
        ..10.0 => format!("{value:.2}{unit}"),
        ..100.0 => format!("{value:.1}{unit}"),
        _ => format!("{value:.0}{unit}"),
    }
}

fn device_row(it: &Interval) -> Vec<TopCell> {
    let rate = |count: u64| TopCell::rate(it.rate(count));
    vec![
        TopCell::text(&it.device),
        rate(it.reads.ops),
        rate(it.writes.ops),
        TopCell::rate(it.rate(it.reads.bytes) / MIB),
        TopCell::rate(it.rate(it.writes.bytes) / MIB),
        TopCell::time(mean_ns(&it.read_latency)),
        TopCell::time(mean_ns(&it.write_latency)),
        TopCell::time(it.percentile_ns(500)),
        TopCell::time(it.percentile_ns(990)),
        TopCell::time(it.percentile_ns(999)),
        TopCell::rate(it.queue_size()),
        rate(it.all.merges),
        rate(it.all.errors),
    ]
}

fn ram_row(it: &Interval) -> Option<Vec<TopCell>> {
    let ram = it.ram?;
    let memory = ram.mm_stat;
    Some(vec![
        TopCell::text(&it.device),
        TopCell::bytes(memory.orig_data_size),
        TopCell::bytes(memory.compr_data_size),
        TopCell::bytes(memory.mem_used_total),
        TopCell::ratio(memory.orig_data_size as f64, memory.mem_used_total as f64),
        match memory.mem_limit {
            0 => TopCell::none(),
            limit => TopCell::bytes(limit),
        },
        TopCell::count(memory.same_pages),
        TopCell::count(memory.huge_pages),
        TopCell::count(ram.io_stat.failed_reads + ram.io_stat.failed_writes),
    ])
}

fn pool_row(pool: &PoolActivity, seconds: f64) -> Vec<TopCell> {
    let now = &pool.now;
    let state = match now.failed_read_only {
        true => "read-only",
        false if now.copies.iter().any(|copy| !copy.good) => "degraded",
        false => "good",
    };
    let (used, available) = (now.used_bytes as f64, now.available_bytes as f64);
    let fill = used / (used + available).max(1.0);
    vec![
        TopCell::text(&now.path),
        TopCell::text(state),
        TopCell::bytes(now.used_bytes),
        TopCell::bytes(now.available_bytes),
        TopCell { text: format!("{:.0}%", 100.0 * fill), number: Some(fill) },
        TopCell::count(now.volumes),
        TopCell::rate(pool.rate(seconds, |it| it.data_bytes) / MIB),
        write_amplification(pool),
        TopCell::rate(pool.rate(seconds, |it| it.syncs)),
        TopCell::rate(pool.rate(seconds, |it| it.segments_cleaned)),
        TopCell::rate(pool.rate(seconds, |it| it.moved_bytes) / MIB),
        TopCell::rate(pool.rate(seconds, |it| it.cleaning_waits)),
    ]
}

/// The bytes that the pool wrote per byte that it was given.
fn write_amplification(pool: &PoolActivity) -> TopCell {
    TopCell::ratio(pool.written_bytes() as f64, pool.grown(|it| it.data_bytes) as f64)
}

/// The line above the table.
pub(crate) fn summary(activity: &Activity) -> String {
    let per_io = match activity.cpu_ns_per_io() {
        Some(ns) => format!("{} of CPU per I/O", duration(ns as u64)),
        None => "no I/O".to_owned(),
    };
    format!(
        "pid {}   {} IOPS   CPU {:.0}%   {per_io}   memory {}",
        activity.process.pid,
        short(activity.iops()),
        100.0 * activity.cpus,
        short_bytes(activity.process.resident_bytes),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::fixture::sample;

    fn text(page: TopPage) -> String {
        let activity = Activity::new(&sample(10, 1), &sample(12, 1));
        let mut out = Vec::new();
        let texts = &page.headings()[..page.text_columns()];
        page.table(&activity).print(texts, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn numbers_have_about_three_digits() {
        let cases = [
            (0.0, "0"),
            (0.1234, "0.12"),
            (12.34, "12.3"),
            (999.4, "999"),
            (1234.0, "1.23k"),
            (45_678.0, "45.7k"),
            (999_999.0, "1000k"),
            (1_234_567.0, "1.23M"),
            (45_600_000.0, "45.6M"),
        ];
        for (number, wanted) in cases {
            assert_eq!(short(number), wanted);
        }
        let lengths = [(0, "0"), (1023, "1023"), (1024, "1.00K"), (20 << 20, "20.0M")];
        for (bytes, wanted) in lengths {
            assert_eq!(short_bytes(bytes), wanted);
        }
        assert_eq!(short_bytes(3 << 60), "3072P");
    }

    #[test]
    fn the_page_of_pools_has_fill_and_write_amplification() {
        assert_eq!(
            text(TopPage::Pools),
            "POOL       STATE   used  avail  fill  vols  wMB/s   amp  syncs/s  cleaned/s  moved/s  \
             waits/s\n\
             /srv/pool  good   25.0M  75.0M   25%     2   10.0  2.00        0       1.00     5.00  \
             0\n"
                .replace("5.00  0\n", "5.00        0\n")
        );
    }

    #[test]
    fn every_row_has_a_cell_for_each_heading() {
        let activity = Activity::new(&sample(10, 1), &sample(12, 1));
        for page in TopPage::ALL {
            for row in page.rows(&activity) {
                assert_eq!(row.len(), page.headings().len(), "{page:?}");
            }
        }
        assert!(text(TopPage::Zones).contains("60"), "{}", text(TopPage::Zones));
        assert!(text(TopPage::Clients).contains("unix:/run/nbd.sock"));
        assert!(TopPage::Ram.rows(&activity).is_empty());
    }

    #[test]
    fn json_has_base_units() {
        let activity = Activity::new(&sample(10, 1), &sample(12, 1));
        let json = activity.to_json();
        assert_eq!(json["interval_ns"], 2_000_000_000_u64);
        assert_eq!(json["devices"][0]["reads_per_second"], 100.0);
        assert_eq!(json["devices"][0]["read_bytes_per_second"], 104_857_600.0);
        assert_eq!(json["process"]["cpus"], 0.5);
        assert_eq!(json["pools"][0]["write_amplification"], 2.0);
        assert_eq!(json["clients"][0]["requests_per_second"], 50.0);
        assert_eq!(json["clients"][0]["p99_ns"], 1024);
        assert_eq!(json["zones"][0]["zones"]["empty"], 60);
    }
}
