//! Figures as fractions of this machine's limits.
//!
//! A rule says which limit bounds a figure from above, and how the limit converts to the figure.
//! The limit must be measured in the same run, otherwise the fraction is left out: another run has
//! another load of the machine.

use crate::experiments::{
    clock, file, file_vhost, fio_engine, fuse, hot_path, limits, limits::names, memory, nbd, nvme,
    nvme_threads, object_store, observers, race, ram_kernel, ram_locks, scheduler,
    scheduler_kernel, scheduler_latency, scheduler_merge, schedulers, smr_append, socket_waits,
    sync_writes, vhost, volume_encryption, volume_limits, zone_append, zone_gate, zone_locks,
};
use crate::metric::Metric;
use crate::results::{Fraction, Results, Row};

/// The figures that are shown as a fraction of a limit.
struct RatioRule {
    experiment: &'static str,
    workload: &'static str,
    /// The metric of the figures.
    metric: Metric,
    /// Only with this many jobs.
    jobs: Option<u32>,
    /// Only of this variant.
    variant: Option<&'static str>,
    /// The limit's experiment, and its name there.
    limit: (&'static str, &'static str),
    limit_metric: Metric,
    /// The limit's workload, where it is another experiment's and has several.
    limit_workload: Option<&'static str>,
    /// Converts the limit's value to the best possible value of the metric.
    best: fn(f64) -> f64,
}

const fn rule(
    experiment: &'static str,
    workload: &'static str,
    metric: Metric,
    limit: (&'static str, &'static str),
    limit_metric: Metric,
) -> RatioRule {
    let (jobs, variant, limit_workload) = (None, None, None);
    let best = |value| value;
    RatioRule {
        experiment,
        workload,
        metric,
        jobs,
        variant,
        limit,
        limit_metric,
        limit_workload,
        best,
    }
}

/// CPU time per I/O, as a fraction of a limit's time.
const fn cpu(experiment: &'static str, workload: &'static str, limit: &'static str) -> RatioRule {
    let limit = (limits::NAME, limit);
    rule(experiment, workload, Metric::CPU_PER_IO, limit, Metric::NS_PER_OP)
}

/// CPU time per I/O, as a fraction of that of another variant of the experiment.
const fn same_experiment(
    experiment: &'static str,
    workload: &'static str,
    limit: &'static str,
) -> RatioRule {
    let limit = (experiment, limit);
    rule(experiment, workload, Metric::CPU_PER_IO, limit, Metric::CPU_PER_IO)
}

/// I/Os of one job, one after the other: each takes two messages, there and back.
const fn two_ways(
    experiment: &'static str,
    workload: &'static str,
    limit: &'static str,
) -> RatioRule {
    RatioRule {
        jobs: Some(1),
        best: |ns| 1e9 / (2.0 * ns),
        ..rule(experiment, workload, Metric::IOPS, (limits::NAME, limit), Metric::NS_PER_OP)
    }
}

/// The least time of a cycle of `race`, from a limit's time.
const fn cycle(workload: &'static str, limit: &'static str, best: fn(f64) -> f64) -> RatioRule {
    let limit = (limits::NAME, limit);
    RatioRule { best, ..rule(race::NAME, workload, race::CPU_PER_CYCLE, limit, Metric::NS_PER_OP) }
}

/// All rules; the first that matches a row applies. An asterisk matches the rest of a workload's
/// name.
const RULES: &[RatioRule] = &[
    // Every layer makes the bios, which is all that the generator does.
    same_experiment(hot_path::NAME, "*", "generator"),
    // A figure by fio includes fio's own time without a device.
    cpu(zone_locks::NAME, "random-read-fio", names::FIO_NULL_64),
    cpu(zone_locks::NAME, "random-write-fio", names::FIO_NULL_1),
    cpu(scheduler_kernel::NAME, "*", names::FIO_NULL_64),
    same_experiment(ram_kernel::NAME, "fio-*", ram_kernel::FIO_ALONE),
    // Moving a write pointer takes at least one exchange.
    cpu(zone_locks::NAME, "random-write*", names::COMPARE_EXCHANGE),
    cpu(zone_gate::NAME, "*", names::COMPARE_EXCHANGE),
    cpu(zone_append::NAME, "no-data*", names::COMPARE_EXCHANGE),
    // A read is checked and started on the device queue, however the zones are locked.
    RatioRule {
        limit_workload: Some(hot_path::ZONED_128),
        ..rule(
            zone_locks::NAME,
            "random-read*",
            Metric::CPU_PER_IO,
            (hot_path::NAME, hot_path::BARE),
            Metric::CPU_PER_IO,
        )
    },
    // Two writes and a reset, an exchange of the zone's word each.
    cycle("fill-and-reset", names::COMPARE_EXCHANGE, |ns| 3.0 * ns),
    // 64 KiB are copied; the rest is negligible.
    cycle("fill-and-reset-data", names::COPY_HOT, |ns| 16.0 * ns),
    // The cost of a scheduler is compared with the device without one.
    RatioRule {
        variant: Some(schedulers::PRODUCT),
        ..same_experiment(scheduler::NAME, "*", schedulers::NONE)
    },
    // Each path compresses or decompresses a block.
    same_experiment(ram_locks::NAME, "path-*", ram_locks::BARE),
    // With one request in flight, each request waits for a message to the server and one back.
    two_ways(nbd::NAME, "read-depth-1", names::UNIX_SOCKET),
    // Each request waits for two messages through the kernel, which wakes the server's thread and
    // is woken by it.
    two_ways(fuse::NAME, "sync", names::EVENTFD),
    // One thread copies the stream into the socket, and another copies it out.
    rule(
        nbd::NAME,
        "stream-1m",
        Metric::BANDWIDTH,
        (limits::NAME, names::COPY_STREAM),
        Metric::BANDWIDTH,
    ),
    // Both run under one fio command line, and fio's own engine does nothing.
    same_experiment(fio_engine::NAME, "*", fio_engine::NULL),
];

/// The experiments without a rule, and why no limit of the machine applies to them.
pub const NONE_APPLIES: &[(&str, &str)] = &[
    (clock::NAME, "what the lab itself costs is a limit, and has none"),
    (file::NAME, "its limit is in it: fio's own io_uring"),
    (file_vhost::NAME, "its limit is in it: fio's own io_uring, without a server"),
    (limits::NAME, "these are the limits"),
    (memory::NAME, "its rows are amounts of memory, which no limit of the machine bounds"),
    (nvme::NAME, "the kernel's TCP bounds it, which no limit measures; NBD over TCP is next to it"),
    (nvme_threads::NAME, "its rows are compared with each other; the clients share the processors"),
    (object_store::NAME, "its limit is in it: the requests alone, which the object store bounds"),
    (observers::NAME, "its rows are compared with each other; the client shares the processors"),
    (
        scheduler_latency::NAME,
        "a read waits for the device's 200 us and for others, which are data",
    ),
    (smr_append::NAME, "the drive's times bound it, which are data"),
    (socket_waits::NAME, "its rows are compared with each other; the kernel's TCP bounds both"),
    (sync_writes::NAME, "the disk's write and sync bound it, which are the rows of `raw`"),
    (volume_encryption::NAME, "its rows are compared with each other"),
    (volume_limits::NAME, "its limits are in it: the rows of `raw`, and times that are aimed at"),
    (vhost::NAME, "the wakes of two threads bound it, which no limit measures"),
    (scheduler_merge::NAME, "the device's 1 ms and its tags bound it, which are data"),
];

impl RatioRule {
    fn fits(&self, row: &Row) -> bool {
        let is_workload = match self.workload.strip_suffix('*') {
            Some(start) => row.workload.starts_with(start),
            None => row.workload == self.workload,
        };
        is_workload
            && row.experiment == self.experiment
            && row.metric == self.metric.name
            && self.jobs.is_none_or(|jobs| jobs == row.jobs)
            && self.variant.is_none_or(|variant| variant == row.variant)
            && (row.experiment.as_str(), row.variant.as_str()) != self.limit
    }

    /// The limit's value for a row. From another variant of the experiment it is that of the same
    /// workload and jobs. From the limits it is that of the first row, which is that of a single
    /// thread if there is one.
    fn limit(&self, row: &Row, rows: &[Row]) -> Option<f64> {
        let (experiment, variant) = self.limit;
        let found = rows.iter().find(|limit| {
            let is_like = (&limit.workload, limit.jobs) == (&row.workload, row.jobs);
            limit.experiment == experiment
                && limit.variant == variant
                && limit.metric == self.limit_metric.name
                && self.limit_workload.is_none_or(|workload| workload == limit.workload)
                && (is_like || experiment != self.experiment)
        });
        found.map(|limit| limit.median).filter(|value| *value > 0.0)
    }
}

/// Computes the fractions of the measured values that have a measured limit.
pub fn of(results: &Results) -> Vec<Fraction> {
    let read = |row: &Row| {
        let rule = RULES.iter().find(|rule| rule.fits(row))?;
        let best = (rule.best)(rule.limit(row, &results.rows)?);
        let (value, least) =
            if row.more_is_better { (row.median, best) } else { (best, row.median) };
        Some(Fraction {
            experiment: row.experiment.clone(),
            variant: row.variant.clone(),
            workload: row.workload.clone(),
            jobs: row.jobs,
            metric: row.metric.clone(),
            unit: row.unit.clone(),
            limit: rule.limit.1.to_owned(),
            best,
            fraction: if least > 0.0 { value / least } else { return None },
        })
    };
    results.rows.iter().filter_map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(place: (&str, &str, &str, u32), metric: Metric, median: f64) -> Row {
        let (experiment, variant, workload, jobs) = place;
        Row {
            experiment: experiment.to_owned(),
            variant: variant.to_owned(),
            workload: workload.to_owned(),
            jobs,
            metric: metric.name.to_owned(),
            unit: metric.unit.to_owned(),
            more_is_better: metric.more_is_better,
            rounds: 5,
            median,
            min: median,
            max: median,
            values: vec![median; 5],
        }
    }

    #[test]
    fn a_figure_is_a_fraction_of_its_own_limit() {
        let mut results = Results::new(String::new(), false);
        results.rows = vec![
            row(("hot-path", "generator", "batch-1", 1), Metric::CPU_PER_IO, 5.0),
            row(("hot-path", "generator", "batch-4", 1), Metric::CPU_PER_IO, 4.0),
            row(("hot-path", "whole", "batch-4", 1), Metric::CPU_PER_IO, 40.0),
            row(("nbd", "blockyard", "read-depth-1", 1), Metric::IOPS, 50_000.0),
            row(("nbd", "blockyard", "read-depth-1", 4), Metric::IOPS, 90_000.0),
            row(("nbd", "blockyard", "stream-1m", 1), Metric::BANDWIDTH, 2e9),
            row(("hot-path", "bare", "zoned-128", 1), Metric::CPU_PER_IO, 15.0),
            row(("zone-locks", "product", "random-read", 2), Metric::CPU_PER_IO, 30.0),
            row(("scheduler", "product", "depth-4", 8), Metric::CPU_PER_IO, 80.0),
            row(("scheduler", "product-alone", "depth-4", 8), Metric::CPU_PER_IO, 20.0),
            row(("scheduler", "none", "depth-4", 8), Metric::CPU_PER_IO, 40.0),
            row(("limits", names::UNIX_SOCKET, "sockets", 2), Metric::NS_PER_OP, 5000.0),
        ];
        let told: Vec<_> = of(&results)
            .into_iter()
            .map(|one| (one.workload, one.limit, one.best, one.fraction))
            .collect();
        let wanted = [
            ("batch-4".to_owned(), "generator".to_owned(), 4.0, 0.1),
            ("read-depth-1".to_owned(), names::UNIX_SOCKET.to_owned(), 100_000.0, 0.5),
            ("random-read".to_owned(), "bare".to_owned(), 15.0, 0.5),
            ("depth-4".to_owned(), "none".to_owned(), 40.0, 0.5),
        ];
        assert_eq!(told, wanted);
    }

    #[test]
    fn every_rule_names_what_there_is() {
        let settings = crate::Settings {
            quick: false,
            engine: None,
            program: "".into(),
            lab: "blockyard-lab".into(),
            scratch: "".into(),
            processors: 2,
            peers: Default::default(),
        };
        let of = |name: &str| {
            let all = crate::registry::experiments();
            let (_, build) = all.into_iter().find(|(other, _)| *other == name).unwrap();
            build(&settings)
        };
        for rule in RULES {
            let (limit, variant) = rule.limit;
            assert!(of(limit).variants.iter().any(|other| other.name == variant), "{variant}");
            let start = rule.workload.trim_end_matches('*');
            let workloads = of(rule.experiment).workloads;
            assert!(workloads.iter().any(|other| other.name.starts_with(start)), "{start}");
        }
    }

    /// A new experiment must have a rule, or a reason why no limit applies.
    #[test]
    fn every_experiment_has_a_rule_or_a_reason() {
        for (name, _) in crate::registry::experiments() {
            let rules = RULES.iter().any(|rule| rule.experiment == name);
            let reason = NONE_APPLIES.iter().any(|none| none.0 == name);
            assert!(rules != reason, "{name}: a rule, or a row in NONE_APPLIES");
        }
    }
}
