//! `stats`: what the devices have done, as `iostat -x` shows it.

use std::io::Write;
use std::time::Duration;

use blockyard_core::channel::percentile_ns;
use blockyard_yard::ram::RamView;
use blockyard_yard::table::{Table, duration};
use blockyard_yard::view::{LatencyView, OpView, StatsView, dense};

use crate::args::StatsArgs;
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};

const MIB: f64 = (1 << 20) as f64;

/// Operations that count as writes, as in their latency.
const WRITES: [&str; 3] = ["write", "zone_append", "write_zeroes"];

pub(crate) fn run(args: &StatsArgs, out: &mut impl Write) -> Result<(), Failure> {
    let client = client(&args.talk);
    let mut before: Vec<StatsView> = Vec::new();
    loop {
        let now = match &args.device {
            Some(name) => vec![client.stats_of(name)?],
            None => client.stats()?,
        };
        match (args.talk.json, args.watch) {
            (true, false) => print_json(&now, out)?,
            (true, true) => {
                // A line each time, so that a reader knows where one ends.
                let line = serde_json::to_string(&now)
                    .map_err(|error| Failure::new(Code::Failed, format!("JSON: {error}")))?;
                writeln!(out, "{line}")?;
            }
            (false, _) => print(&before, &now, out)?,
        }
        out.flush()?;
        if !args.watch {
            return Ok(());
        }
        before = now;
        std::thread::sleep(Duration::from_secs(args.interval));
        if !args.talk.json {
            writeln!(out)?;
        }
    }
}

fn print(before: &[StatsView], now: &[StatsView], out: &mut impl Write) -> Result<(), Failure> {
    let mut table = Table::new([
        "device", "r/s", "w/s", "rMB/s", "wMB/s", "rrqm/s", "wrqm/s", "r_await", "w_await", "p50",
        "p99", "p99.9", "err/s",
    ]);
    for stats in now {
        // A device of the same name that is younger than before is another device.
        let before = before
            .iter()
            .find(|other| other.device == stats.device && other.age_ns <= stats.age_ns);
        table.row(row(&Interval::new(before, stats)));
    }
    table.print(1, out)?;
    for stats in now {
        let Some(ram) = &stats.ram else { continue };
        writeln!(out)?;
        print_ram(&stats.device, ram, out)?;
    }
    Ok(())
}

/// zram's statistics, a group a line, with the names before the numbers.
fn print_ram(device: &str, ram: &RamView, out: &mut impl Write) -> Result<(), Failure> {
    for (group, fields) in ram.groups() {
        write!(out, "{device} {group}:")?;
        for (name, value) in fields {
            write!(out, " {name} {value}")?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// What happened between two looks at a device.
struct Interval {
    device: String,
    seconds: f64,
    reads: OpView,
    writes: OpView,
    errors: u64,
    read_latency: Vec<u64>,
    write_latency: Vec<u64>,
}

impl Interval {
    fn new(before: Option<&StatsView>, now: &StatsView) -> Interval {
        let op = |name: &str| {
            let of = |stats: &StatsView| stats.ops.get(name).copied().unwrap_or_default();
            minus(of(now), before.map(of).unwrap_or_default())
        };
        let latency = |of: fn(&StatsView) -> &LatencyView| {
            let mut counts = dense(of(now));
            if let Some(before) = before {
                let old = dense(of(before));
                counts.iter_mut().zip(old).for_each(|(new, old)| *new = new.saturating_sub(old));
            }
            counts
        };
        let age_ns = now.age_ns - before.map_or(0, |before| before.age_ns);
        Interval {
            device: now.device.clone(),
            seconds: (age_ns as f64 / 1e9).max(1e-9),
            reads: op("read"),
            writes: WRITES.into_iter().map(op).fold(OpView::default(), plus),
            errors: now.ops.keys().map(|name| op(name).errors).sum(),
            read_latency: latency(|stats| &stats.read_latency),
            write_latency: latency(|stats| &stats.write_latency),
        }
    }
}

fn row(interval: &Interval) -> [String; 13] {
    let rate = |count: u64| format!("{:.1}", count as f64 / interval.seconds);
    let mib = |bytes: u64| format!("{:.2}", bytes as f64 / MIB / interval.seconds);
    let both: Vec<u64> =
        interval.read_latency.iter().zip(&interval.write_latency).map(|(r, w)| r + w).collect();
    let percentile = |per_mille| time(percentile_ns(&both, per_mille));
    let (reads, writes) = (&interval.reads, &interval.writes);
    [
        interval.device.clone(),
        rate(reads.ops),
        rate(writes.ops),
        mib(reads.bytes),
        mib(writes.bytes),
        rate(reads.merges),
        rate(writes.merges),
        time(mean_ns(&interval.read_latency)),
        time(mean_ns(&interval.write_latency)),
        percentile(500),
        percentile(990),
        percentile(999),
        rate(interval.errors),
    ]
}

fn time(ns: Option<u64>) -> String {
    ns.map_or_else(|| "-".to_owned(), duration)
}

/// The mean of a latency, exact to 1/16; `None` without values.
fn mean_ns(latency: &[u64]) -> Option<u64> {
    let (mut sum, mut total) = (0_u128, 0_u128);
    for (floor_ns, count) in blockyard_yard::view::sparse(latency) {
        sum += u128::from(floor_ns) * u128::from(count);
        total += u128::from(count);
    }
    (total > 0).then(|| (sum / total) as u64)
}

fn minus(now: OpView, before: OpView) -> OpView {
    OpView {
        ops: now.ops.saturating_sub(before.ops),
        bytes: now.bytes.saturating_sub(before.bytes),
        errors: now.errors.saturating_sub(before.errors),
        merges: now.merges.saturating_sub(before.merges),
    }
}

fn plus(a: OpView, b: OpView) -> OpView {
    OpView {
        ops: a.ops + b.ops,
        bytes: a.bytes + b.bytes,
        errors: a.errors + b.errors,
        merges: a.merges + b.merges,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn stats(age_s: u64, reads: u64) -> StatsView {
        let op = OpView { ops: reads, bytes: reads << 20, errors: reads / 10, merges: 0 };
        StatsView {
            device: "d".to_owned(),
            age_ns: age_s * 1_000_000_000,
            channels: 1,
            ops: BTreeMap::from([("read".to_owned(), op)]),
            read_latency: vec![(1024, reads)],
            write_latency: Vec::new(),
            other_latency: Vec::new(),
            ram: None,
        }
    }

    #[test]
    fn the_first_line_is_the_mean_since_the_beginning() {
        let cells = row(&Interval::new(None, &stats(10, 100)));
        let want = [
            "d", "10.0", "0.0", "10.00", "0.00", "0.0", "0.0", "1.0us", "-", "1.0us", "1.0us",
            "1.0us", "1.0",
        ];
        assert_eq!(cells, want);
    }

    #[test]
    fn the_next_lines_are_of_the_interval() {
        let cells = row(&Interval::new(Some(&stats(10, 100)), &stats(11, 150)));
        assert_eq!(cells[1], "50.0");
        assert_eq!(cells[3], "50.00");
    }
}
