//! `iostat`: what the devices do, with the columns of `iostat -x` or of `zpool iostat -l`.

use std::io::Write;
use std::time::Duration;

use blockyard_yard::client::Client;
use blockyard_yard::interval::{Interval, mean_ns};
use blockyard_yard::table::{Table, duration};
use blockyard_yard::view::{OpView, StatsView};
use serde_json::Value;

use crate::args::IostatArgs;
use crate::devices::client;
use crate::failure::{Code, Failure};
use crate::human::print_table;
use crate::top::{self, short};

const KIB: f64 = 1024.0;
const MIB: f64 = KIB * KIB;

/// The columns of `iostat -x` in its order, without `%util`, and commands on zones after flushes.
const EXTENDED: [&str; 24] = [
    "Device", "r/s", "rMB/s", "rrqm/s", "%rrqm", "r_await", "rareq-sz", "w/s", "wMB/s", "wrqm/s",
    "%wrqm", "w_await", "wareq-sz", "d/s", "dMB/s", "drqm/s", "%drqm", "d_await", "dareq-sz",
    "f/s", "f_await", "z/s", "z_await", "aqu-sz",
];

/// The columns of `zpool iostat -l` that are known here, flushes, and percentiles.
const LATENCY: [&str; 13] = [
    "device",
    "read/s",
    "write/s",
    "read_bw",
    "write_bw",
    "read_wait",
    "write_wait",
    "flush_wait",
    "discard_wait",
    "p50",
    "p90",
    "p99",
    "p99.9",
];

/// What is printed how often.
#[derive(Debug, PartialEq)]
pub(crate) struct ReportPlan {
    /// The devices or pools.
    pub(crate) devices: Vec<String>,
    pub(crate) interval: Option<Duration>,
    /// The number of reports; `None`: until Ctrl-C.
    pub(crate) count: Option<u64>,
}

impl ReportPlan {
    /// Devices, then an interval, then a number of reports, as iostat takes them: the words that
    /// are numbers at the end are no devices.
    pub(crate) fn new(words: &[String]) -> Result<ReportPlan, Failure> {
        let is_number = |word: &String| {
            word.starts_with(|first: char| first.is_ascii_digit() || first == '.')
                && word.parse::<f64>().is_ok()
        };
        let numbers = words.iter().rev().take(2).take_while(|word| is_number(word)).count();
        let (devices, numbers) = words.split_at(words.len() - numbers);
        let invalid = |field: &str, value: &String, wanted: &str| {
            Failure::new(Code::Usage, format!("invalid {field} {value:?}: {wanted}"))
        };
        let interval = numbers
            .first()
            .map(|word| top::delay(word).map_err(|wanted| invalid("INTERVAL", word, &wanted)));
        let count = numbers.get(1).map(|word| {
            let count = word.parse::<u64>().ok().filter(|count| *count > 0);
            count.ok_or_else(|| invalid("COUNT", word, "expected a whole number from 1"))
        });
        let (interval, count) = (interval.transpose()?, count.transpose()?);
        let count = if interval.is_none() { Some(1) } else { count };
        Ok(ReportPlan { devices: devices.to_vec(), interval, count })
    }
}

pub(crate) fn run(args: &IostatArgs, out: &mut impl Write) -> Result<(), Failure> {
    let plan = ReportPlan::new(&args.words)?;
    if args.no_first && plan.interval.is_none() {
        let message = "-y leaves out the only report: give an INTERVAL";
        return Err(Failure::new(Code::Usage, message));
    }
    let client = client(&args.talk);
    let (mut before, mut left) = (Vec::new(), plan.count);
    if args.no_first {
        before = sample(&client, &plan.devices)?;
        pause(&plan);
    }
    loop {
        let now = sample(&client, &plan.devices)?;
        print(args, &Interval::of_all(&before, &now), out)?;
        out.flush()?;
        left = left.map(|left| left - 1);
        if left == Some(0) {
            return Ok(());
        }
        before = now;
        pause(&plan);
        if !args.talk.json {
            writeln!(out)?;
        }
    }
}

pub(crate) fn pause(plan: &ReportPlan) {
    std::thread::sleep(plan.interval.unwrap_or_default());
}

fn sample(client: &Client, devices: &[String]) -> Result<Vec<StatsView>, Failure> {
    if devices.is_empty() {
        return Ok(client.stats()?);
    }
    Ok(devices.iter().map(|name| client.stats_of(name)).collect::<Result<_, _>>()?)
}

fn print(args: &IostatArgs, devices: &[Interval], out: &mut impl Write) -> Result<(), Failure> {
    if args.talk.json {
        // A line each time, so that a reader knows where one ends.
        let line: Value = devices.iter().map(Interval::to_json).collect();
        return Ok(writeln!(out, "{line}")?);
    }
    Ok(print_table(table(args.latency, devices), &[], out)?)
}

/// A report as a table, with the columns of `zpool iostat -l` or of `iostat -x`.
pub(crate) fn table(has_latency: bool, devices: &[Interval]) -> Table {
    let mut table = match has_latency {
        true => Table::new(LATENCY),
        false => Table::new(EXTENDED),
    };
    for device in devices {
        match has_latency {
            true => table.row(latency(device)),
            false => table.row(extended(device)),
        }
    }
    table
}

fn extended(it: &Interval) -> [String; 24] {
    let rate = |count: u64| format!("{:.2}", it.rate(count));
    let mib = |bytes: u64| format!("{:.2}", it.rate(bytes) / MIB);
    let merged = |op: &OpView| format!("{:.2}", 100.0 * part(op.merges, op.ops));
    let wait = |latency: &[u64]| format!("{:.3}", mean_ns(latency).unwrap_or(0) as f64 / 1e6);
    let size =
        |op: &OpView| format!("{:.2}", part(op.bytes, op.ops.saturating_sub(op.errors)) / KIB);
    let (reads, writes, discards) = (&it.reads, &it.writes, &it.discards);
    [
        it.device.clone(),
        rate(reads.ops),
        mib(reads.bytes),
        rate(reads.merges),
        merged(reads),
        wait(&it.read_latency),
        size(reads),
        rate(writes.ops),
        mib(writes.bytes),
        rate(writes.merges),
        merged(writes),
        wait(&it.write_latency),
        size(writes),
        rate(discards.ops),
        mib(discards.bytes),
        rate(discards.merges),
        merged(discards),
        wait(&it.discard_latency),
        size(discards),
        rate(it.flushes.ops),
        wait(&it.flush_latency),
        rate(it.zone_commands.ops),
        wait(&it.zone_latency),
        format!("{:.2}", it.queue_size()),
    ]
}

fn latency(it: &Interval) -> [String; 13] {
    let time = |ns: Option<u64>| ns.map_or_else(|| "-".to_owned(), duration);
    let percentile = |per_mille| time(it.percentile_ns(per_mille));
    let bandwidth = |bytes: u64| top::short_bytes(it.rate(bytes) as u64);
    [
        it.device.clone(),
        short(it.rate(it.reads.ops)),
        short(it.rate(it.writes.ops)),
        bandwidth(it.reads.bytes),
        bandwidth(it.writes.bytes),
        time(mean_ns(&it.read_latency)),
        time(mean_ns(&it.write_latency)),
        time(mean_ns(&it.flush_latency)),
        time(mean_ns(&it.discard_latency)),
        percentile(500),
        percentile(900),
        percentile(990),
        percentile(999),
    ]
}

fn part(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::fixture::stats;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn numbers_at_the_end_are_the_interval_and_the_count() {
        let cases = [
            ("", &[][..], None, Some(1)),
            ("d", &["d"], None, Some(1)),
            ("2", &[], Some(2000), None),
            ("0.5 3", &[], Some(500), Some(3)),
            ("a b 1 10", &["a", "b"], Some(1000), Some(10)),
            ("7 1 10", &["7"], Some(1000), Some(10)),
            ("nan", &["nan"], None, Some(1)),
        ];
        for (text, devices, interval, count) in cases {
            let interval = interval.map(Duration::from_millis);
            let devices = devices.iter().map(|it| (*it).to_owned()).collect();
            let wanted = ReportPlan { devices, interval, count };
            assert_eq!(ReportPlan::new(&words(text)).unwrap(), wanted, "{text}");
        }
        for text in ["0", "1 0", "1 1.5", "d .01 4"] {
            assert!(ReportPlan::new(&words(text)).is_err(), "{text}");
        }
    }

    #[test]
    fn columns_have_the_units_of_iostat() {
        let mut stats = stats(10, 100);
        let reads = stats.ops.get_mut("read").unwrap();
        // Ten have failed; of each eight, seven became part of another request.
        (reads.bytes, reads.merges) = (90 << 20, 87);
        let interval = Interval::new(&[], &stats);
        let row = extended(&interval);
        let of = |name| row[EXTENDED.iter().position(|it| *it == name).unwrap()].as_str();
        assert_eq!((of("r/s"), of("rMB/s"), of("rareq-sz")), ("10.00", "9.00", "1024.00"));
        assert_eq!((of("r_await"), of("w_await"), of("%rrqm")), ("0.001", "0.000", "87.00"));
        let row = latency(&interval);
        assert_eq!(row[..9], ["d", "10.0", "0", "9.00M", "0", "1.0us", "-", "-", "-"]);
    }

    #[test]
    fn columns_have_the_order_of_iostat() {
        // `iostat -xm` of sysstat 12.6.
        let wanted = "Device r/s rMB/s rrqm/s %rrqm r_await rareq-sz w/s wMB/s wrqm/s %wrqm \
                      w_await wareq-sz d/s dMB/s drqm/s %drqm d_await dareq-sz f/s f_await aqu-sz";
        let is_theirs = |name: &&str| !["z/s", "z_await"].contains(name);
        let ours: Vec<&str> = EXTENDED.into_iter().filter(is_theirs).collect();
        assert_eq!(ours, words(wanted));
    }

    #[test]
    fn discards_flushes_and_zone_commands_have_columns_of_their_own() {
        let op = |ops, bytes, merges| OpView { ops, bytes, errors: 0, merges };
        let stats = StatsView {
            ops: [
                ("discard", op(50, 50 << 20, 20)),
                ("flush", op(30, 0, 0)),
                ("zone_reset", op(16, 0, 0)),
                ("zone_finish", op(4, 0, 0)),
            ]
            .map(|(name, counts)| (name.to_owned(), counts))
            .into(),
            discard_latency: vec![(1 << 21, 50)],
            flush_latency: vec![(1 << 20, 30)],
            zone_latency: vec![(1 << 23, 20)],
            ..stats(10, 0)
        };
        let interval = Interval::new(&[], &stats);
        let row = extended(&interval);
        let of = |name| row[EXTENDED.iter().position(|it| *it == name).unwrap()].as_str();
        let discards = ["d/s", "dMB/s", "drqm/s", "%drqm", "d_await", "dareq-sz"].map(of);
        assert_eq!(discards, ["5.00", "5.00", "2.00", "40.00", "2.097", "1024.00"]);
        assert_eq!(["f/s", "f_await"].map(of), ["3.00", "1.049"]);
        assert_eq!(["z/s", "z_await"].map(of), ["2.00", "8.389"]);
        assert_eq!(
            ["r/s", "r_await", "w/s", "w_await"].map(of),
            ["0.00", "0.000", "0.00", "0.000"]
        );
        // 50 of 2^21 ns, 30 of 2^20 and 20 of 2^23 in 10 s.
        assert_eq!(of("aqu-sz"), "0.03");
        let row = latency(&interval);
        let of = |name| row[LATENCY.iter().position(|it| *it == name).unwrap()].as_str();
        let waits = ["read_wait", "write_wait", "flush_wait", "discard_wait"].map(of);
        assert_eq!(waits, ["-", "-", "1.05ms", "2.10ms"]);
    }
}
