//! Metrics of the clients that are connected now, with a bound on their number.
//!
//! A series ends with its connection. A later connection of a client is another series. That of the
//! kernel, and any after a restart or a live upgrade, may have the labels of an earlier one, and
//! begins at 0 again.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use blockyard_core::channel::Stats;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::{LATENCIES, histogram};
use crate::view::ConnectionView;

/// The most connections with series of their own: those with the most requests. A connection has
/// four series of counters, and seven of latency for each class of operations.
const CLIENTS_MAX: usize = 128;

/// The upper bounds of the buckets of latency, as powers of two in nanoseconds: 65.5 us, 1.05 ms,
/// 16.8 ms and 268 ms. They are few because each connection has its own.
const BUCKET_POWERS: [u32; 4] = [16, 20, 24, 28];

/// The protocols, each with a count of its connections, also if it has none.
const PROTOCOLS: [&str; 4] = ["nbd", "nvme", "vhost", "ublk"];

/// The labels of a connection: name and value.
type ClientLabels = [(&'static str, String); 8];

/// A counter of a connection.
type CountOf = fn(&ClientCounts) -> u64;

/// The counters of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ClientCounts {
    requests: u64,
    errors: u64,
    read_bytes: u64,
    written_bytes: u64,
}

/// The latency of the operations of one class that a connection has submitted.
#[derive(Clone, Debug, Default)]
struct ClientLatency {
    sum_seconds: f64,
    count: u64,
    buckets: Vec<(f64, u64)>,
}

impl ClientLatency {
    fn new(latency: &[u64]) -> ClientLatency {
        let (sum_seconds, count, buckets) = histogram(latency, BUCKET_POWERS);
        ClientLatency { sum_seconds, count, buckets }
    }

    fn add(&mut self, other: ClientLatency) {
        if self.buckets.is_empty() {
            *self = other;
            return;
        }
        self.sum_seconds += other.sum_seconds;
        self.count += other.count;
        let pairs = self.buckets.iter_mut().zip(other.buckets);
        pairs.for_each(|((_, sum), (_, count))| *sum += count);
    }
}

/// The values of a connection.
#[derive(Debug, Default)]
struct ClientRow {
    counts: ClientCounts,
    /// By class, as in [`LATENCIES`].
    latency: [ClientLatency; LATENCIES.len()],
}

/// The connections of a scrape.
#[derive(Debug, Default)]
pub struct ClientMetrics {
    /// Number of connections by protocol.
    open: Vec<(&'static str, u64)>,
    /// Number of connections without series of their own.
    omitted: u64,
    rows: Vec<(ClientLabels, ClientRow)>,
}

impl ClientMetrics {
    /// Chooses the connections that have series, and reads the counters of their channels;
    /// `stats_of` returns `None` for a connection that has ended.
    pub fn new(
        mut connections: Vec<ConnectionView>,
        stats_of: impl Fn(&ConnectionView) -> Option<Stats>,
    ) -> ClientMetrics {
        let open = PROTOCOLS.map(|protocol| {
            let is_of = |it: &&ConnectionView| it.protocol == protocol;
            (protocol, connections.iter().filter(is_of).count() as u64)
        });
        let omitted = connections.len().saturating_sub(CLIENTS_MAX) as u64;
        connections.sort_by_key(|it| (Reverse(it.requests), it.id));
        connections.truncate(CLIENTS_MAX);
        let number = |number: Option<u16>| number.map_or_else(String::new, |it| it.to_string());
        let mut rows: BTreeMap<ClientLabels, ClientRow> = BTreeMap::new();
        for it in connections {
            let stats = stats_of(&it);
            let labels = [
                ("protocol", it.protocol),
                ("server", it.server.unwrap_or_default()),
                ("connection", it.id.to_string()),
                ("peer", it.peer),
                ("host", it.host.unwrap_or_default()),
                ("controller", number(it.controller)),
                ("queue", number(it.queue)),
                ("device", it.device.unwrap_or_default()),
            ];
            // A series must not appear twice.
            let ClientRow { counts, latency } = rows.entry(labels).or_default();
            counts.requests += it.requests;
            counts.errors += it.errors;
            counts.read_bytes += it.read_bytes;
            counts.written_bytes += it.written_bytes;
            if let Some(stats) = stats {
                let classes = latency.iter_mut().zip(LATENCIES);
                classes.for_each(|(sum, (_, of))| sum.add(ClientLatency::new(of(&stats))));
            }
        }
        ClientMetrics { open: open.to_vec(), omitted, rows: rows.into_iter().collect() }
    }

    /// The number of connections of a protocol.
    pub(super) fn count_of(&self, protocol: &str) -> u64 {
        self.open.iter().find(|(name, _)| *name == protocol).map_or(0, |(_, count)| *count)
    }

    pub(super) fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "Connections of clients that are open now, by protocol";
        let mut family = encoder.encode_descriptor("clients", help, None, MetricType::Gauge)?;
        for (protocol, count) in &self.open {
            family.encode_family(&[("protocol", *protocol)])?.encode_gauge(count)?;
        }
        let help = "Connections without series of their own, because others have more requests";
        encoder
            .encode_descriptor("clients_omitted", help, None, MetricType::Gauge)?
            .encode_gauge(&self.omitted)?;
        let counters: [(&str, &str, CountOf); 2] = [
            ("client_requests", "Requests of a connection", |it| it.requests),
            ("client_errors", "Requests of a connection that failed", |it| it.errors),
        ];
        for (name, help, value) in counters {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (labels, row) in &self.rows {
                family
                    .encode_family(labels)?
                    .encode_counter::<NoLabelSet, _, f64>(&value(&row.counts), None)?;
            }
        }
        let help = "Data that a connection has read or written";
        let mut family =
            encoder.encode_descriptor("client_bytes", help, None, MetricType::Counter)?;
        for (labels, row) in &self.rows {
            let counts = row.counts;
            for (op, bytes) in [("read", counts.read_bytes), ("write", counts.written_bytes)] {
                let labels = [labels.as_slice(), &[("op", op.to_owned())]].concat();
                family
                    .encode_family(&labels.as_slice())?
                    .encode_counter::<NoLabelSet, _, f64>(&bytes, None)?;
            }
        }
        let help = "Time from submit to completion of the operations that a connection submitted";
        let name = "client_latency_seconds";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (labels, row) in &self.rows {
            let classes = LATENCIES.iter().zip(&row.latency);
            for ((op, _), latency) in classes.filter(|(_, latency)| latency.count > 0) {
                let labels = [labels.as_slice(), &[("op", (*op).to_owned())]].concat();
                let ClientLatency { sum_seconds, count, buckets } = latency;
                family.encode_family(&labels.as_slice())?.encode_histogram::<NoLabelSet>(
                    *sum_seconds,
                    *count,
                    buckets,
                    None,
                )?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use blockyard_sync::counter::bucket_of;
    use prometheus_client::collector::Collector;
    use prometheus_client::registry::Registry;

    use super::*;

    #[derive(Debug)]
    struct Fixture(ClientMetrics);

    impl Collector for Fixture {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
            self.0.encode(&mut encoder)
        }
    }

    fn text(connections: Vec<ConnectionView>) -> String {
        text_with(connections, |_| None)
    }

    fn text_with(
        connections: Vec<ConnectionView>,
        stats_of: impl Fn(&ConnectionView) -> Option<Stats>,
    ) -> String {
        let mut registry = Registry::default();
        let metrics = ClientMetrics::new(connections, stats_of);
        registry.register_collector(Box::new(Fixture(metrics)));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    }

    fn connection(id: u64, requests: u64) -> ConnectionView {
        ConnectionView {
            protocol: "nbd".to_owned(),
            id,
            peer: "tcp:127.0.0.1:9".to_owned(),
            device: Some("d".to_owned()),
            requests,
            ..ConnectionView::default()
        }
    }

    #[test]
    fn a_name_that_a_client_chose_is_escaped() {
        let host = "nqn\"} 7\n# EOF\\".to_owned();
        let nvme = ConnectionView {
            protocol: "nvme".to_owned(),
            host: Some(host),
            controller: Some(5),
            queue: Some(1),
            ..connection(3, 1)
        };
        let text = text(vec![nvme]);
        let line = r#"client_requests_total{protocol="nvme",server="",connection="3","#.to_owned()
            + r#"peer="tcp:127.0.0.1:9",host="nqn\"} 7\n# EOF\\",controller="5",queue="1","#
            + r#"device="d"} 1"#;
        assert!(text.lines().any(|have| have == line), "{text}");
        assert_eq!(text.matches("\n# EOF").count(), 1, "{text}");
    }

    #[test]
    fn the_connections_with_the_most_requests_have_series() {
        let count = CLIENTS_MAX as u64 + 2;
        let text = text((0..count).map(|id| connection(id, id)).collect());
        let series = text.lines().filter(|line| line.starts_with("client_"));
        assert_eq!(series.count(), 4 * CLIENTS_MAX, "{text}");
        for absent in [r#"connection="0","#, r#"connection="1","#] {
            assert!(!text.contains(absent), "{text}");
        }
        assert!(text.contains(r#"connection="2","#), "{text}");
        for line in [
            "clients_omitted 2".to_owned(),
            format!("clients{{protocol=\"nbd\"}} {count}"),
            "clients{protocol=\"ublk\"} 0".to_owned(),
        ] {
            assert!(text.lines().any(|have| have == line), "{line}: {text}");
        }
    }

    /// The counters of channels with this many operations of each of these classes, of 2^17 ns.
    fn stats(classes: [(LatencyOf, u64); 2]) -> Stats {
        let mut stats = Stats::default();
        for (of, count) in classes {
            of(&mut stats)[bucket_of(1 << 17)] = count;
        }
        stats
    }

    type LatencyOf = fn(&mut Stats) -> &mut Vec<u64>;

    #[test]
    fn a_connection_has_the_latency_of_its_channels() {
        let stats_of = |it: &ConnectionView| match it.id {
            1 => Some(stats([(|it| &mut it.read_latency, 3), (|it| &mut it.flush_latency, 2)])),
            // Two connections of one series.
            2 => Some(stats([(|it| &mut it.write_latency, 4), (|it| &mut it.zone_latency, 1)])),
            _ => None,
        };
        let connections =
            vec![connection(1, 5), connection(2, 3), connection(2, 3), connection(3, 9)];
        let text = text_with(connections, stats_of);
        let value = |family: &str, id: u64, op: &str, le: &str| -> Option<f64> {
            let found = text.lines().find(|line| {
                let has = |label: &str, value: &str| line.contains(&format!("{label}=\"{value}\""));
                line.starts_with(&format!("client_latency_seconds_{family}{{"))
                    && has("connection", &id.to_string())
                    && has("op", op)
                    && (le.is_empty() || has("le", le))
            })?;
            found.rsplit_once(' ')?.1.parse().ok()
        };
        assert_eq!(value("count", 1, "read", ""), Some(3.0), "{text}");
        assert_eq!(value("count", 1, "flush", ""), Some(2.0), "{text}");
        let sum = value("sum", 1, "read", "").unwrap();
        assert!((sum - 3.0 * 131_072e-9).abs() < 1e-12, "{sum}");
        // Of the buckets, 2^17 ns is in the second.
        for (le, count) in [("0.000065536", 0.0), ("0.001048576", 3.0), ("+Inf", 3.0)] {
            assert_eq!(value("bucket", 1, "read", le), Some(count), "{le}: {text}");
        }
        assert_eq!(value("count", 2, "write", ""), Some(8.0), "{text}");
        assert_eq!(value("bucket", 2, "write", "0.001048576"), Some(8.0), "{text}");
        assert_eq!(value("count", 2, "zone", ""), Some(2.0), "{text}");
        for (id, op) in [(1, "write"), (1, "discard"), (2, "read"), (3, "read")] {
            assert_eq!(value("count", id, op, ""), None, "{id} {op}: {text}");
        }
    }

    #[test]
    fn the_series_of_all_connections_are_bounded() {
        let mut all = Stats::default();
        let Stats { read_latency, write_latency, flush_latency, discard_latency, .. } = &mut all;
        for latency in [read_latency, write_latency, flush_latency, discard_latency] {
            latency[0] = 1;
        }
        all.zone_latency[0] = 1;
        let count = CLIENTS_MAX as u64 + 2;
        let connections = (0..count).map(|id| connection(id, id)).collect();
        let text = text_with(connections, |_| Some(all.clone()));
        let series = text.lines().filter(|line| line.starts_with("client_"));
        assert_eq!(series.count(), 4992, "{text}");
    }

    /// The bug: two NBD servers number their connections alike. Connections of both were one
    /// series, whose counters decreased when one of them ended.
    #[test]
    fn connections_of_two_servers_are_two_series() {
        let at = |server: &str, requests| ConnectionView {
            server: Some(server.to_owned()),
            ..connection(1, requests)
        };
        let text = text(vec![at("unix:/a", 5), at("unix:/b", 7), at("unix:/b", 1)]);
        let series: Vec<_> =
            text.lines().filter(|line| line.starts_with("client_requests_total")).collect();
        assert_eq!(series.len(), 2, "{text}");
        assert!(series[0].contains(r#"server="unix:/a""#) && series[0].ends_with(" 5"), "{text}");
        assert!(series[1].ends_with(" 8"), "a series appears once: {text}");
    }
}
