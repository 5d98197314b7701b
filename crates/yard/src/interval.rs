//! What a device did between two samples of its statistics.

use std::collections::BTreeMap;

use blockyard_core::channel::percentile_ns;
use serde_json::{Value, json};

use crate::ram::RamView;
use crate::view::{LatencyView, OpView, StatsView, dense, sparse};

/// Operations that count as writes, as in their latency.
const WRITES: [&str; 3] = ["write", "zone_append", "write_zeroes"];

/// Operations that manage zones, as in their latency.
const ZONE_COMMANDS: [&str; 5] =
    ["zone_reset", "zone_reset_all", "zone_open", "zone_close", "zone_finish"];

/// What a device did in an interval.
#[derive(Clone, Debug)]
pub struct Interval {
    /// The device.
    pub device: String,
    /// The length of the interval in seconds.
    pub seconds: f64,
    /// Reads.
    pub reads: OpView,
    /// Writes, appends and write-zeroes.
    pub writes: OpView,
    /// Discards.
    pub discards: OpView,
    /// Flushes.
    pub flushes: OpView,
    /// Commands on zones: reset, open, close and finish.
    pub zone_commands: OpView,
    /// All operations.
    pub all: OpView,
    /// Latency of reads: a count per bucket.
    pub read_latency: Vec<u64>,
    /// Latency of writes, appends and write-zeroes.
    pub write_latency: Vec<u64>,
    /// Latency of flushes.
    pub flush_latency: Vec<u64>,
    /// Latency of discards.
    pub discard_latency: Vec<u64>,
    /// Latency of commands on zones.
    pub zone_latency: Vec<u64>,
    /// The statistics of a RAM disk at the end of the interval.
    pub ram: Option<RamView>,
}

impl Interval {
    /// The interval from one sample to a later one; from the device's opening if there is none
    /// before, or only of another device of the same name.
    pub fn new(before: &[StatsView], now: &StatsView) -> Interval {
        Interval::since(before.iter().find(|other| other.device == now.device), now)
    }

    /// The interval from an earlier sample of the device of the same name.
    fn since(before: Option<&StatsView>, now: &StatsView) -> Interval {
        // A device that is younger than before is another device.
        let before = before.filter(|before| before.age_ns <= now.age_ns);
        let op = |name: &str| {
            let of = |stats: &StatsView| stats.ops.get(name).copied().unwrap_or_default();
            minus(of(now), before.map(of).unwrap_or_default())
        };
        let sum = |names: &[&str]| names.iter().copied().map(op).fold(OpView::default(), plus);
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
            writes: sum(&WRITES),
            discards: op("discard"),
            flushes: op("flush"),
            zone_commands: sum(&ZONE_COMMANDS),
            all: now.ops.keys().map(|name| op(name)).fold(OpView::default(), plus),
            read_latency: latency(|stats| &stats.read_latency),
            write_latency: latency(|stats| &stats.write_latency),
            flush_latency: latency(|stats| &stats.flush_latency),
            discard_latency: latency(|stats| &stats.discard_latency),
            zone_latency: latency(|stats| &stats.zone_latency),
            ram: now.ram,
        }
    }

    /// The intervals of all devices of a sample.
    pub fn of_all(before: &[StatsView], now: &[StatsView]) -> Vec<Interval> {
        let before: BTreeMap<&str, &StatsView> =
            before.iter().map(|stats| (stats.device.as_str(), stats)).collect();
        let since =
            |now: &StatsView| Interval::since(before.get(now.device.as_str()).copied(), now);
        now.iter().map(since).collect()
    }

    /// A number of events as events per second.
    pub fn rate(&self, count: u64) -> f64 {
        count as f64 / self.seconds
    }

    /// A percentile of the latency of reads and writes together, in nanoseconds, exact to 1/16;
    /// `None` without any.
    pub fn percentile_ns(&self, per_mille: u64) -> Option<u64> {
        let pairs = self.read_latency.iter().zip(&self.write_latency);
        percentile_ns(&pairs.map(|(reads, writes)| reads + writes).collect::<Vec<_>>(), per_mille)
    }

    /// The mean number of operations between their submission and their completion, as `aqu-sz` of
    /// iostat: by Little's law the sum of their latencies per time.
    pub fn queue_size(&self) -> f64 {
        let all = [
            &self.read_latency,
            &self.write_latency,
            &self.flush_latency,
            &self.discard_latency,
            &self.zone_latency,
        ];
        let sum: f64 = all.into_iter().map(|latency| total(latency).0 as f64).sum();
        sum / (self.seconds * 1e9)
    }

    /// The interval as JSON in base units.
    pub fn to_json(&self) -> Value {
        let percentile = |per_mille| self.percentile_ns(per_mille);
        json!({
            "device": self.device,
            "reads_per_second": self.rate(self.reads.ops),
            "writes_per_second": self.rate(self.writes.ops),
            "discards_per_second": self.rate(self.discards.ops),
            "flushes_per_second": self.rate(self.flushes.ops),
            "zone_commands_per_second": self.rate(self.zone_commands.ops),
            "read_bytes_per_second": self.rate(self.reads.bytes),
            "written_bytes_per_second": self.rate(self.writes.bytes),
            "discarded_bytes_per_second": self.rate(self.discards.bytes),
            "read_merges_per_second": self.rate(self.reads.merges),
            "write_merges_per_second": self.rate(self.writes.merges),
            "discard_merges_per_second": self.rate(self.discards.merges),
            "errors_per_second": self.rate(self.all.errors),
            "read_await_ns": mean_ns(&self.read_latency),
            "write_await_ns": mean_ns(&self.write_latency),
            "discard_await_ns": mean_ns(&self.discard_latency),
            "flush_await_ns": mean_ns(&self.flush_latency),
            "zone_await_ns": mean_ns(&self.zone_latency),
            "p50_ns": percentile(500),
            "p90_ns": percentile(900),
            "p99_ns": percentile(990),
            "p999_ns": percentile(999),
            "queue_size": self.queue_size(),
            "ram": self.ram,
        })
    }
}

/// The mean of a latency in nanoseconds, exact to 1/16; `None` without values.
pub fn mean_ns(latency: &[u64]) -> Option<u64> {
    let (sum, count) = total(latency);
    (count > 0).then(|| (sum / count) as u64)
}

/// The sum of the values of a latency, exact to 1/16, and their number.
fn total(latency: &[u64]) -> (u128, u128) {
    sparse(latency).into_iter().fold((0, 0), |(sum, total), (floor_ns, count)| {
        (sum + u128::from(floor_ns) * u128::from(count), total + u128::from(count))
    })
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
    use super::*;
    use crate::activity::fixture::stats;

    #[test]
    fn an_interval_without_a_sample_before_begins_at_the_opening() {
        let interval = Interval::new(&[], &stats(10, 100));
        assert_eq!((interval.reads.ops, interval.seconds), (100, 10.0));
        assert_eq!(interval.all.errors, 10);
        assert_eq!(interval.percentile_ns(990), Some(1024));
    }

    #[test]
    fn an_interval_has_the_difference_of_its_samples() {
        let interval = Interval::new(&[stats(10, 100)], &stats(12, 150));
        assert_eq!((interval.reads.ops, interval.rate(interval.reads.ops)), (50, 25.0));
        assert_eq!(mean_ns(&interval.read_latency), Some(1024));
        let (queue, wanted) = (interval.queue_size(), 50.0 * 1024.0 / 2e9);
        assert!((queue - wanted).abs() < 1e-12, "{queue} {wanted}");
    }

    #[test]
    fn each_class_of_operations_has_a_rate_and_a_latency() {
        let sample = |age_s: u64, count: u64| {
            let op = OpView { ops: count, merges: count / 2, ..OpView::default() };
            let names = ["discard", "flush", "zone_reset", "zone_open"];
            StatsView {
                ops: names.map(|name| (name.to_owned(), op)).into(),
                discard_latency: vec![(1 << 12, count)],
                flush_latency: vec![(1 << 13, count)],
                zone_latency: vec![(1 << 14, count), (1 << 16, count)],
                ..stats(age_s, 0)
            }
        };
        let interval = Interval::new(&[sample(10, 6)], &sample(12, 16));
        assert_eq!((interval.zone_commands.ops, interval.all.ops), (20, 40));
        let json = interval.to_json();
        for (field, wanted) in [
            ("discards_per_second", 5.0),
            ("discard_merges_per_second", 2.5),
            ("discard_await_ns", 4096.0),
            ("flushes_per_second", 5.0),
            ("flush_await_ns", 8192.0),
            ("zone_commands_per_second", 10.0),
            // The mean of as many of 2^14 as of 2^16.
            ("zone_await_ns", 40_960.0),
        ] {
            assert_eq!(json[field].as_f64(), Some(wanted), "{field}: {json}");
        }
        assert!(json["read_await_ns"].is_null() && json["write_await_ns"].is_null(), "{json}");
        let (queue, wanted) =
            (interval.queue_size(), 10.0 * (4096 + 8192 + 2 * 40_960) as f64 / 2e9);
        assert!((queue - wanted).abs() < 1e-12, "{queue} {wanted}");
    }

    #[test]
    fn a_younger_device_of_the_same_name_is_another_one() {
        let interval = Interval::new(&[stats(10, 100)], &stats(1, 7));
        assert_eq!((interval.reads.ops, interval.seconds), (7, 1.0));
    }
}
