//! Samples of a yard, and what happened between two of them.

use std::collections::BTreeMap;

use blockyard_core::channel::percentile_ns;
use serde_json::{Value, json};

use crate::interval::Interval;
use crate::process::ProcessView;
use crate::view::{ConnectionView, StatsView, dense};
use crate::volumes::PoolView;
use crate::zone_counts::ZoneCountsView;

/// Everything that `top` and the dashboard show, at one moment.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// The daemon.
    pub process: ProcessView,
    /// The statistics of all devices.
    pub stats: Vec<StatsView>,
    /// The zones of zoned devices by condition, if they were asked for.
    pub zones: Vec<ZoneCountsView>,
    /// The pools.
    pub pools: Vec<PoolView>,
    /// The connections of all clients.
    pub connections: Vec<ConnectionView>,
}

/// What happened between two samples, and the state at the second one.
#[derive(Clone, Debug)]
pub struct Activity {
    /// The length of the interval in seconds.
    pub seconds: f64,
    /// The daemon.
    pub process: ProcessView,
    /// The processors that the daemon kept busy.
    pub cpus: f64,
    /// What each device did.
    pub devices: Vec<Interval>,
    /// The zones of zoned devices by condition, if they were asked for.
    pub zones: Vec<ZoneCountsView>,
    /// The pools.
    pub pools: Vec<PoolActivity>,
    /// The connections of all clients.
    pub connections: Vec<ConnectionActivity>,
}

/// A pool at the second sample, and at the first one if it was open then.
#[derive(Clone, Debug)]
pub struct PoolActivity {
    /// The pool at the second sample.
    pub now: PoolView,
    /// The pool at the first sample.
    pub before: Option<PoolView>,
}

/// A connection at the second sample, and at the first one if it was open then.
#[derive(Clone, Debug)]
pub struct ConnectionActivity {
    /// The connection at the second sample.
    pub now: ConnectionView,
    /// The connection at the first sample.
    pub before: Option<ConnectionView>,
}

impl Activity {
    /// What happened between two samples of one yard. If the daemon was restarted in between, its
    /// counters began at zero.
    pub fn new(before: &Sample, now: &Sample) -> Activity {
        let nothing = Sample { process: before.process, ..Sample::default() };
        // In a container, a daemon that was restarted may have the same id.
        let same =
            before.process.pid == now.process.pid && before.process.cpu_ns <= now.process.cpu_ns;
        let before = if same { before } else { &nothing };
        let since_ns = now.process.sampled_ns.saturating_sub(before.process.sampled_ns);
        let seconds = (since_ns as f64 / 1e9).max(1e-9);
        let cpu_before_ns = if same { before.process.cpu_ns } else { 0 };
        let cpu_ns = now.process.cpu_ns.saturating_sub(cpu_before_ns);
        let pools_before: BTreeMap<&str, &PoolView> =
            before.pools.iter().map(|it| (it.path.as_str(), it)).collect();
        let connections_before: BTreeMap<_, &ConnectionView> =
            before.connections.iter().map(|it| (key(it), it)).collect();
        Activity {
            seconds,
            process: now.process,
            cpus: cpu_ns as f64 / 1e9 / seconds,
            devices: Interval::of_all(&before.stats, &now.stats),
            zones: now.zones.clone(),
            pools: now
                .pools
                .iter()
                .map(|now| PoolActivity {
                    before: pools_before.get(now.path.as_str()).map(|it| (*it).clone()),
                    now: now.clone(),
                })
                .collect(),
            connections: now
                .connections
                .iter()
                .map(|now| ConnectionActivity {
                    before: connections_before.get(&key(now)).map(|it| (*it).clone()),
                    now: now.clone(),
                })
                .collect(),
        }
    }

    /// Operations of all devices per second.
    pub fn iops(&self) -> f64 {
        self.devices.iter().map(|it| it.rate(it.all.ops)).sum()
    }

    /// CPU time of the daemon per operation, in nanoseconds; `None` without operations.
    pub fn cpu_ns_per_io(&self) -> Option<f64> {
        let iops = self.iops();
        (iops > 0.0).then(|| self.cpus * 1e9 / iops)
    }

    /// Everything as JSON, in base units.
    pub fn to_json(&self) -> Value {
        let seconds = self.seconds;
        json!({
            "interval_ns": (seconds * 1e9) as u64,
            "process": {
                "pid": self.process.pid,
                "cpus": self.cpus,
                "cpu_ns_per_io": self.cpu_ns_per_io(),
                "resident_bytes": self.process.resident_bytes,
            },
            "devices": self.devices.iter().map(Interval::to_json).collect::<Vec<_>>(),
            "zones": self.zones,
            "pools": self.pools.iter().map(|pool| json!({
                "pool": pool.now.path,
                "failed_read_only": pool.now.failed_read_only,
                "copies_bad": pool.now.copies.iter().filter(|copy| !copy.good).count(),
                "used_bytes": pool.now.used_bytes,
                "available_bytes": pool.now.available_bytes,
                "volumes": pool.now.volumes,
                "data_bytes_per_second": pool.rate(seconds, |it| it.data_bytes),
                "write_amplification": pool.write_amplification(),
                "syncs_per_second": pool.rate(seconds, |it| it.syncs),
                "segments_cleaned_per_second": pool.rate(seconds, |it| it.segments_cleaned),
                "moved_bytes_per_second": pool.rate(seconds, |it| it.moved_bytes),
                "cleaning_waits_per_second": pool.rate(seconds, |it| it.cleaning_waits),
            })).collect::<Vec<_>>(),
            "clients": self.connections.iter().map(|it| it.to_json(seconds)).collect::<Vec<_>>(),
        })
    }
}

/// What tells a connection from others. Each server counts its connections alone, and a hypervisor
/// has one for each of its disks.
fn key(it: &ConnectionView) -> (&str, Option<&str>, u64, &str, Option<&str>, Option<u16>) {
    (&it.protocol, it.server.as_deref(), it.id, &it.peer, it.device.as_deref(), it.queue)
}

impl PoolActivity {
    /// How much a counter grew per second; 0 for a pool that was not open before.
    pub fn rate(&self, seconds: f64, count: fn(&PoolView) -> u64) -> f64 {
        self.grown(count) as f64 / seconds
    }

    /// How much a counter grew.
    pub fn grown(&self, count: fn(&PoolView) -> u64) -> u64 {
        self.before.as_ref().map_or(0, |before| count(&self.now).saturating_sub(count(before)))
    }

    /// The bytes that the pool wrote.
    pub fn written_bytes(&self) -> u64 {
        self.grown(PoolView::written_bytes)
    }

    /// The bytes that the pool wrote per byte that it was given; `None` if it was given none.
    pub fn write_amplification(&self) -> Option<f64> {
        let given = self.grown(|it| it.data_bytes);
        (given > 0).then(|| self.written_bytes() as f64 / given as f64)
    }
}

impl ConnectionActivity {
    /// How much a counter grew per second; from zero for a connection that is new.
    pub fn rate(&self, seconds: f64, count: fn(&ConnectionView) -> u64) -> f64 {
        let before = self.before.as_ref().map_or(0, count);
        count(&self.now).saturating_sub(before) as f64 / seconds
    }

    /// The latency of the reads and writes of the interval together: a count per bucket. From zero
    /// for a connection that is new.
    pub fn latency(&self) -> Vec<u64> {
        let sum = |it: &ConnectionView| {
            let pairs = it.read_latency.iter().chain(&it.write_latency);
            dense(&pairs.copied().collect())
        };
        let mut counts = sum(&self.now);
        if let Some(before) = &self.before {
            let old = sum(before);
            counts.iter_mut().zip(old).for_each(|(new, old)| *new = new.saturating_sub(old));
        }
        counts
    }

    /// The interval of the connection as JSON, in base units.
    fn to_json(&self, seconds: f64) -> Value {
        let (now, latency) = (&self.now, self.latency());
        json!({
            "protocol": now.protocol,
            "id": now.id,
            "peer": now.peer,
            "device": now.device,
            "host": now.host,
            "controller": now.controller,
            "queue": now.queue,
            "requests_per_second": self.rate(seconds, |it| it.requests),
            "read_bytes_per_second": self.rate(seconds, |it| it.read_bytes),
            "written_bytes_per_second": self.rate(seconds, |it| it.written_bytes),
            "errors_per_second": self.rate(seconds, |it| it.errors),
            "p50_ns": percentile_ns(&latency, 500),
            "p90_ns": percentile_ns(&latency, 900),
            "p99_ns": percentile_ns(&latency, 990),
            "p999_ns": percentile_ns(&latency, 999),
        })
    }
}

#[cfg(test)]
pub(crate) mod fixture;

#[cfg(test)]
mod tests {
    use super::fixture::sample;
    use super::*;

    #[test]
    fn rates_are_those_of_the_interval() {
        let activity = Activity::new(&sample(10, 1), &sample(12, 1));
        assert_eq!((activity.seconds, activity.cpus, activity.iops()), (2.0, 0.5, 100.0));
        assert_eq!(activity.cpu_ns_per_io(), Some(5e6));
        let connection = &activity.connections[0];
        assert_eq!(connection.rate(activity.seconds, |it| it.requests), 50.0);
        // The reads of the two seconds.
        assert_eq!(connection.latency().iter().sum::<u64>(), 100);
        assert_eq!(percentile_ns(&connection.latency(), 990), Some(1024));
        assert_eq!(activity.pools[0].grown(|it| it.segments_cleaned), 2);
    }

    /// The bug: two connections of one process had the same key, so that one of them was compared
    /// with the other.
    #[test]
    fn connections_of_one_process_are_told_apart() {
        let of = |seconds: u64| {
            let mut sample = sample(seconds, 1);
            let one = &sample.connections[0];
            let vhost = |device: &str, requests| ConnectionView {
                protocol: "vhost".to_owned(),
                device: Some(device.to_owned()),
                requests,
                ..one.clone()
            };
            let nbd = |server: &str, requests| ConnectionView {
                server: Some(server.to_owned()),
                requests,
                ..one.clone()
            };
            sample.connections = vec![
                vhost("a", 10 * seconds),
                vhost("b", 20 * seconds),
                nbd("unix:/a", 30 * seconds),
                nbd("unix:/b", 40 * seconds),
            ];
            sample
        };
        let activity = Activity::new(&of(10), &of(12));
        let rates = activity.connections.iter().map(|it| it.rate(2.0, |it| it.requests));
        assert_eq!(rates.collect::<Vec<_>>(), [10.0, 20.0, 30.0, 40.0]);
    }

    #[test]
    fn a_restarted_daemon_has_no_sample_before() {
        let activity = Activity::new(&sample(10, 1), &sample(12, 2));
        assert_eq!(activity.devices[0].reads.ops, 1200);
        assert!(activity.pools[0].before.is_none());
        assert!(activity.connections[0].before.is_none());

        let mut young = sample(12, 1);
        young.process.cpu_ns = 1_000_000_000;
        let activity = Activity::new(&sample(10, 1), &young);
        assert_eq!((activity.seconds, activity.cpus), (2.0, 0.5));
        assert!(activity.pools[0].before.is_none());
    }
}
