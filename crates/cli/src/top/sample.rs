//! Samples of a yard, and what happened between two of them.

use blockyard_yard::client::{Client, ClientError};
use blockyard_yard::process::ProcessView;
use blockyard_yard::view::{ConnectionView, StatsView};
use blockyard_yard::volumes::PoolView;
use blockyard_yard::zone_counts::ZoneCountsView;

use crate::interval::Interval;

/// Everything that `top` shows, at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sample {
    pub(crate) process: ProcessView,
    pub(crate) stats: Vec<StatsView>,
    pub(crate) zones: Vec<ZoneCountsView>,
    pub(crate) pools: Vec<PoolView>,
    pub(crate) connections: Vec<ConnectionView>,
}

impl Sample {
    /// Asks a yard; for zones only if they are wanted, since a device may have to count them.
    ///
    /// # Errors
    /// If the yard does not answer.
    pub(crate) fn take(client: &Client, with_zones: bool) -> Result<Sample, ClientError> {
        Ok(Sample {
            process: client.process()?,
            stats: client.stats()?,
            zones: if with_zones { client.zone_counts()? } else { Vec::new() },
            pools: client.pools()?,
            connections: client.connections()?,
        })
    }
}

/// What happened between two samples, and the state at the second one.
#[derive(Clone, Debug)]
pub(crate) struct Activity {
    /// The length of the interval.
    pub(crate) seconds: f64,
    pub(crate) process: ProcessView,
    /// The processors that the daemon kept busy.
    pub(crate) cpus: f64,
    pub(crate) devices: Vec<Interval>,
    pub(crate) zones: Vec<ZoneCountsView>,
    pub(crate) pools: Vec<PoolActivity>,
    pub(crate) connections: Vec<ConnectionActivity>,
}

/// A pool at the second sample, and at the first one if it was open then.
#[derive(Clone, Debug)]
pub(crate) struct PoolActivity {
    pub(crate) now: PoolView,
    pub(crate) before: Option<PoolView>,
}

/// A connection at the second sample, and at the first one if it was open then.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionActivity {
    pub(crate) now: ConnectionView,
    pub(crate) before: Option<ConnectionView>,
}

impl Activity {
    /// What happened between two samples of one yard. If the daemon was restarted in between, its
    /// counters began at zero.
    pub(crate) fn new(before: &Sample, now: &Sample) -> Activity {
        let nothing = Sample { process: before.process, ..Sample::default() };
        // In a container, a daemon that was restarted may have the same id.
        let same =
            before.process.pid == now.process.pid && before.process.cpu_ns <= now.process.cpu_ns;
        let before = if same { before } else { &nothing };
        let since_ns = now.process.sampled_ns.saturating_sub(before.process.sampled_ns);
        let seconds = (since_ns as f64 / 1e9).max(1e-9);
        let cpu_before_ns = if same { before.process.cpu_ns } else { 0 };
        let cpu_ns = now.process.cpu_ns.saturating_sub(cpu_before_ns);
        let key = |it: &ConnectionView| (it.protocol.clone(), it.id, it.peer.clone());
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
                    before: before.pools.iter().find(|it| it.path == now.path).cloned(),
                    now: now.clone(),
                })
                .collect(),
            connections: now
                .connections
                .iter()
                .map(|now| ConnectionActivity {
                    before: before.connections.iter().find(|it| key(it) == key(now)).cloned(),
                    now: now.clone(),
                })
                .collect(),
        }
    }

    /// Operations of all devices per second.
    pub(crate) fn iops(&self) -> f64 {
        self.devices.iter().map(|it| it.rate(it.all.ops)).sum()
    }

    /// CPU time of the daemon per operation, in nanoseconds; `None` without operations.
    pub(crate) fn cpu_ns_per_io(&self) -> Option<f64> {
        let iops = self.iops();
        (iops > 0.0).then(|| self.cpus * 1e9 / iops)
    }
}

impl PoolActivity {
    /// How much a counter grew per second; 0 for a pool that was not open before.
    pub(crate) fn rate(&self, seconds: f64, count: fn(&PoolView) -> u64) -> f64 {
        self.grown(count) as f64 / seconds
    }

    /// How much a counter grew.
    pub(crate) fn grown(&self, count: fn(&PoolView) -> u64) -> u64 {
        self.before.as_ref().map_or(0, |before| count(&self.now).saturating_sub(count(before)))
    }
}

impl ConnectionActivity {
    /// How much a counter grew per second; from zero for a connection that is new.
    pub(crate) fn rate(&self, seconds: f64, count: fn(&ConnectionView) -> u64) -> f64 {
        let before = self.before.as_ref().map_or(0, count);
        count(&self.now).saturating_sub(before) as f64 / seconds
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::interval::tests::stats;

    /// A yard after this many seconds: 100 reads a second of device `d`, which cost it half a
    /// processor, and a client with half of them.
    pub(crate) fn sample(seconds: u64, pid: u32) -> Sample {
        let process = ProcessView {
            pid,
            sampled_ns: seconds * 1_000_000_000,
            cpu_ns: seconds * 500_000_000,
            resident_bytes: 20 << 20,
        };
        let connection = ConnectionView {
            protocol: "nbd".to_owned(),
            id: 3,
            peer: "unix:/run/nbd.sock".to_owned(),
            device: Some("d".to_owned()),
            requests: 50 * seconds,
            read_bytes: (50 * seconds) << 20,
            ..ConnectionView::default()
        };
        let pool = PoolView {
            path: "/srv/pool".to_owned(),
            volumes: 2,
            segment_bytes: 1 << 20,
            segments: 100,
            used_bytes: 25 << 20,
            available_bytes: 75 << 20,
            data_bytes: (10 * seconds) << 20,
            log_bytes: (15 * seconds) << 20,
            moved_bytes: (5 * seconds) << 20,
            segments_cleaned: seconds,
            ..PoolView::default()
        };
        let zones = ZoneCountsView {
            device: "d".to_owned(),
            zones: [("empty".to_owned(), 60), ("full".to_owned(), 4)].into(),
        };
        Sample {
            process,
            stats: vec![stats(seconds, 100 * seconds)],
            zones: vec![zones],
            pools: vec![pool],
            connections: vec![connection],
        }
    }

    #[test]
    fn rates_are_those_of_the_interval() {
        let activity = Activity::new(&sample(10, 1), &sample(12, 1));
        assert_eq!((activity.seconds, activity.cpus, activity.iops()), (2.0, 0.5, 100.0));
        assert_eq!(activity.cpu_ns_per_io(), Some(5e6));
        let connection = &activity.connections[0];
        assert_eq!(connection.rate(activity.seconds, |it| it.requests), 50.0);
        assert_eq!(activity.pools[0].grown(|it| it.segments_cleaned), 2);
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
