//! Figures as fractions of what this machine can do at best.
//!
//! A rule says which limit bounds a figure from above, and how the one becomes the other. A limit
//! is measured by the same run, or the fraction is left out: another run is another machine's load.

use crate::experiments::{fio_engine, hot_path, limits, limits::names, nbd, zone_locks};
use crate::metric::Metric;
use crate::results::{Fraction, Results, Row};

/// Which figures are read as a fraction of which limit.
struct Rule {
    experiment: &'static str,
    workload: &'static str,
    /// What is read as a fraction.
    metric: Metric,
    /// Only with so many jobs.
    jobs: Option<u32>,
    /// The limit's experiment, and its name there.
    limit: (&'static str, &'static str),
    limit_metric: Metric,
    /// From the limit's value to the best that the metric could be.
    best: fn(f64) -> f64,
}

const fn rule(
    experiment: &'static str,
    workload: &'static str,
    metric: Metric,
    limit: (&'static str, &'static str),
    limit_metric: Metric,
) -> Rule {
    Rule { experiment, workload, metric, jobs: None, limit, limit_metric, best: |value| value }
}

/// Every rule; the first that fits a row is its own. An asterisk ends what a workload begins with.
const RULES: [Rule; 5] = [
    // Every floor makes the bios, which is all that the generator does.
    rule(
        hot_path::NAME,
        "*",
        Metric::CPU_PER_IO,
        (hot_path::NAME, "generator"),
        Metric::CPU_PER_IO,
    ),
    // A write pointer is moved by one exchange at least.
    rule(
        zone_locks::NAME,
        "random-write*",
        Metric::CPU_PER_IO,
        (limits::NAME, names::COMPARE_EXCHANGE),
        Metric::NS_PER_OP,
    ),
    // With one request in flight, each waits for a message to the server and one back.
    Rule {
        jobs: Some(1),
        best: |ns| 1e9 / (2.0 * ns),
        ..rule(
            nbd::NAME,
            "read-depth-1",
            Metric::IOPS,
            (limits::NAME, names::UNIX_SOCKET),
            Metric::NS_PER_OP,
        )
    },
    // A stream is copied into the socket by one thread, and out of it by another.
    rule(
        nbd::NAME,
        "stream-1m",
        Metric::BANDWIDTH,
        (limits::NAME, names::COPY_STREAM),
        Metric::BANDWIDTH,
    ),
    // Both run under the same line of fio, whose own engine does nothing.
    rule(
        fio_engine::NAME,
        "*",
        Metric::CPU_PER_IO,
        (fio_engine::NAME, fio_engine::NULL),
        Metric::CPU_PER_IO,
    ),
];

impl Rule {
    fn fits(&self, row: &Row) -> bool {
        let is_workload = match self.workload.strip_suffix('*') {
            Some(start) => row.workload.starts_with(start),
            None => row.workload == self.workload,
        };
        is_workload
            && row.experiment == self.experiment
            && row.metric == self.metric.name
            && self.jobs.is_none_or(|jobs| jobs == row.jobs)
            && (row.experiment.as_str(), row.variant.as_str()) != self.limit
    }

    /// The limit's value for a row: of the same experiment under the same workload with as many
    /// jobs; of the limits by its first row, which is that of a thread alone where there is one.
    fn limit(&self, row: &Row, rows: &[Row]) -> Option<f64> {
        let (experiment, variant) = self.limit;
        let found = rows.iter().find(|limit| {
            let is_like = (&limit.workload, limit.jobs) == (&row.workload, row.jobs);
            limit.experiment == experiment
                && limit.variant == variant
                && limit.metric == self.limit_metric.name
                && (is_like || experiment != self.experiment)
        });
        found.map(|limit| limit.median).filter(|value| *value > 0.0)
    }
}

/// Reads what was measured as fractions of what was measured of the limits.
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
            row(("limits", names::UNIX_SOCKET, "sockets", 2), Metric::NS_PER_OP, 5000.0),
        ];
        let told: Vec<_> = of(&results)
            .into_iter()
            .map(|one| (one.workload, one.limit, one.best, one.fraction))
            .collect();
        let wanted = [
            ("batch-4".to_owned(), "generator".to_owned(), 4.0, 0.1),
            ("read-depth-1".to_owned(), names::UNIX_SOCKET.to_owned(), 100_000.0, 0.5),
        ];
        assert_eq!(told, wanted);
    }

    #[test]
    fn every_rule_names_what_there_is() {
        let settings = crate::Settings {
            quick: false,
            engine: None,
            program: "".into(),
            scratch: "".into(),
            processors: 2,
        };
        let of = |name: &str| {
            let all = crate::registry::experiments();
            let (_, build) = all.into_iter().find(|(other, _)| *other == name).unwrap();
            build(&settings)
        };
        for rule in &RULES {
            let (limit, variant) = rule.limit;
            assert!(of(limit).variants.iter().any(|other| other.name == variant), "{variant}");
            let start = rule.workload.trim_end_matches('*');
            let workloads = of(rule.experiment).workloads;
            assert!(workloads.iter().any(|other| other.name.starts_with(start)), "{start}");
        }
    }
}
