//! `stats`: what the devices have done, as `iostat -x` shows it.

use std::io::Write;
use std::time::Duration;

use blockyard_yard::interval::{Interval, mean_ns};
use blockyard_yard::ram::RamView;
use blockyard_yard::table::{Table, duration};
use blockyard_yard::view::StatsView;

use crate::args::StatsArgs;
use crate::devices::{client, host_text, print_json};
use crate::failure::{Code, Failure};
use crate::human::print_table;

const MIB: f64 = (1 << 20) as f64;

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
    for interval in Interval::of_all(before, now) {
        table.row(row(&interval));
    }
    print_table(table, &[], out)?;
    if now.iter().any(|stats| !stats.hosts.is_empty()) {
        writeln!(out)?;
    }
    for stats in now {
        for host in &stats.hosts {
            writeln!(out, "{} nvme: {}", stats.device, host_text(None, host))?;
        }
    }
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

fn row(interval: &Interval) -> [String; 13] {
    let rate = |count: u64| format!("{:.1}", interval.rate(count));
    let mib = |bytes: u64| format!("{:.2}", interval.rate(bytes) / MIB);
    let percentile = |per_mille| time(interval.percentile_ns(per_mille));
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
        rate(interval.all.errors),
    ]
}

fn time(ns: Option<u64>) -> String {
    ns.map_or_else(|| "-".to_owned(), duration)
}

#[cfg(test)]
mod tests {
    use blockyard_yard::view::HostView;

    use super::*;
    use crate::top::fixture::stats;

    #[test]
    fn the_first_line_is_the_mean_since_the_beginning() {
        let cells = row(&Interval::new(&[], &stats(10, 100)));
        let want = [
            "d", "10.0", "0.0", "10.00", "0.00", "0.0", "0.0", "1.0us", "-", "1.0us", "1.0us",
            "1.0us", "1.0",
        ];
        assert_eq!(cells, want);
    }

    #[test]
    fn the_nvme_hosts_of_a_device_follow_the_table() {
        let host = |controller, queue_numbers: &[u16]| HostView {
            nqn: "nqn.a".to_owned(),
            subsystem: "nqn.2026-11.io.blockyard:d".to_owned(),
            peer: "tcp:192.0.2.1:50000".to_owned(),
            controller,
            queues: queue_numbers.len() as u64,
            queue_numbers: queue_numbers.to_vec(),
        };
        let hosts = vec![host(1, &[1, 2]), host(2, &[])];
        let (mut out, now) = (Vec::new(), StatsView { hosts, ..stats(10, 100) });
        print(&[], &[now], &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<_> = text.lines().skip(2).collect();
        let begin = "d nvme: nqn.a at tcp:192.0.2.1:50000, controller";
        let wanted = [
            String::new(),
            format!("{begin} 1 of nqn.2026-11.io.blockyard:d, queues 1 2"),
            format!("{begin} 2 of nqn.2026-11.io.blockyard:d, no queue"),
        ];
        assert_eq!(lines, wanted);
    }

    #[test]
    fn the_next_lines_are_of_the_interval() {
        let cells = row(&Interval::new(&[stats(10, 100)], &stats(11, 150)));
        assert_eq!(cells[1], "50.0");
        assert_eq!(cells[3], "50.00");
    }
}
