//! A metric: its name, its unit, and whether more is better.

use serde::Serialize;

/// A quantity that is measured. Names are those of the JSON results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Metric {
    /// The name in results, in lower case with underscores.
    pub name: &'static str,
    /// The unit of its values: `1/s`, `ns`, `B/s`, or empty for plain numbers.
    pub unit: &'static str,
    /// Whether a greater value is the better one.
    pub more_is_better: bool,
}

impl Metric {
    /// I/Os per second of wall time.
    pub const IOPS: Metric = Metric::more("iops", "1/s");
    /// Bytes per second of wall time.
    pub const BANDWIDTH: Metric = Metric::more("bandwidth", "B/s");
    /// I/Os per second of CPU time of the measured side; meaningful on a loaded machine too.
    pub const IOS_PER_CPU_SECOND: Metric = Metric::more("ios_per_cpu_second", "1/s");
    /// CPU time per I/O of the measured side, all its threads; meaningful on a loaded machine too.
    pub const CPU_PER_IO: Metric = Metric::less("cpu_per_io", "ns");
    /// Operations other than I/Os per second of wall time.
    pub const OPS: Metric = Metric::more("ops", "1/s");
    /// Operations other than I/Os per second of CPU time.
    pub const OPS_PER_CPU_SECOND: Metric = Metric::more("ops_per_cpu_second", "1/s");
    /// Wall time per operation.
    pub const NS_PER_OP: Metric = Metric::less("ns_per_op", "ns");
    /// CPU time per operation.
    pub const CPU_PER_OP: Metric = Metric::less("cpu_per_op", "ns");
    /// Median latency.
    pub const P50: Metric = Metric::less("latency_p50", "ns");
    /// 99th percentile of latency.
    pub const P99: Metric = Metric::less("latency_p99", "ns");
    /// 99.9th percentile of latency.
    pub const P999: Metric = Metric::less("latency_p999", "ns");
    /// The number of processors that the measured side kept busy.
    pub const CPUS: Metric = Metric::less("cpus", "");
    /// The number of processors that the client kept busy.
    pub const CLIENT_CPUS: Metric = Metric::less("client_cpus", "");

    /// A metric of which more is better.
    pub const fn more(name: &'static str, unit: &'static str) -> Metric {
        Metric { name, unit, more_is_better: true }
    }

    /// A metric of which less is better.
    pub const fn less(name: &'static str, unit: &'static str) -> Metric {
        Metric { name, unit, more_is_better: false }
    }
}
