//! Turns the samples of cells into rows, ratios and the other results.

use crate::experiment::{Cell, Comparison, Experiment};
use crate::metric::Metric;
use crate::results::{
    ExperimentInfo, Latency, Limit, LockCounts, NotMeasured, Note, PublishedRow, Ratio, Results,
    Row, VariantInfo, WorkloadInfo,
};
use crate::run::{ExperimentResults, Measured, RunPlan};
use crate::sample::{LatencyPercentiles, RoomCount};
use crate::stats::{ComparisonVerdict, Summary, gain};

/// Adds the results of an experiment.
pub fn collect(
    results: &mut Results,
    experiment: &Experiment,
    plan: &RunPlan,
    outcome: &ExperimentResults,
) {
    results.interrupted |= outcome.interrupted;
    results.experiments.push(info(experiment, plan, outcome));
    results.published.extend(published(experiment));
    for (cell, measured) in experiment.cells.iter().zip(&outcome.measured) {
        add_cell(results, experiment.name, cell, measured);
        add_missing(results, experiment.name, cell, measured, outcome.interrupted);
    }
    for comparison in &experiment.comparisons {
        results.ratios.extend(ratios(experiment, comparison, &outcome.measured));
    }
}

fn info(experiment: &Experiment, plan: &RunPlan, outcome: &ExperimentResults) -> ExperimentInfo {
    let first = || {
        let samples = outcome.measured.iter().flat_map(|measured| &measured.samples);
        let metric = samples.filter_map(|(_, sample)| sample.values.first()).next();
        metric.map(|(metric, _)| metric.name.to_owned()).into_iter().collect()
    };
    let plots: Vec<String> = experiment.plots.iter().map(|metric| metric.name.to_owned()).collect();
    ExperimentInfo {
        name: experiment.name.to_owned(),
        title: experiment.title.to_owned(),
        about: experiment.about.to_owned(),
        rounds: plan.rounds,
        seconds: outcome.timing.measure.as_secs_f64(),
        warm_up_seconds: outcome.timing.warm_up.as_secs_f64(),
        interrupted: outcome.interrupted,
        others_busy: outcome.others.map(|others| others.busy),
        stolen: outcome.others.map(|others| others.stolen),
        variants: experiment
            .variants
            .iter()
            .map(|variant| VariantInfo {
                name: variant.name.to_owned(),
                kind: variant.kind.name().to_owned(),
                about: variant.about.to_owned(),
            })
            .collect(),
        workloads: experiment
            .workloads
            .iter()
            .map(|workload| WorkloadInfo {
                name: workload.name.to_owned(),
                about: workload.about.to_owned(),
            })
            .collect(),
        plots: if plots.is_empty() { first() } else { plots },
    }
}

fn published(experiment: &Experiment) -> impl Iterator<Item = PublishedRow> {
    experiment.published.iter().map(|row| PublishedRow {
        experiment: experiment.name.to_owned(),
        variant: row.variant.to_owned(),
        workload: row.workload.to_owned(),
        jobs: row.jobs,
        metric: row.metric.name.to_owned(),
        unit: row.metric.unit.to_owned(),
        value: row.value,
        source: row.source.to_owned(),
    })
}

fn add_cell(results: &mut Results, experiment: &str, cell: &Cell, measured: &Measured) {
    let (variant, workload, jobs) = (cell.variant.to_owned(), cell.workload.to_owned(), cell.jobs);
    let mut metrics: Vec<Metric> = Vec::new();
    for (metric, _) in measured.samples.iter().flat_map(|(_, sample)| &sample.values) {
        if !metrics.contains(metric) {
            metrics.push(*metric);
        }
    }
    for metric in metrics {
        let values: Vec<f64> = of(measured, metric).map(|(_, value)| value).collect();
        let Some(Summary { median, min, max }) = Summary::of(&values) else { continue };
        results.rows.push(Row {
            experiment: experiment.to_owned(),
            variant: variant.clone(),
            workload: workload.clone(),
            jobs,
            metric: metric.name.to_owned(),
            unit: metric.unit.to_owned(),
            more_is_better: metric.more_is_better,
            rounds: values.len() as u32,
            median,
            min,
            max,
            values,
        });
    }
    let experiment = experiment.to_owned();
    if let Some(points) = latency(measured) {
        let (experiment, variant, workload) =
            (experiment.clone(), variant.clone(), workload.clone());
        results.latency.push(Latency { experiment, variant, workload, jobs, points });
    }
    for count in rooms(measured) {
        let (experiment, variant, workload) =
            (experiment.clone(), variant.clone(), workload.clone());
        results.rooms.push(LockCounts { experiment, variant, workload, jobs, count });
    }
    for text in measured.samples.iter().flat_map(|(_, sample)| &sample.notes) {
        let note = Note { experiment: experiment.clone(), text: text.clone() };
        if !results.notes.contains(&note) {
            results.notes.push(note);
        }
    }
    if let Some(limited_by) = limited_by(measured) {
        results.limits.push(Limit { experiment, variant, workload, jobs, limited_by });
    }
}

fn add_missing(
    results: &mut Results,
    experiment: &str,
    cell: &Cell,
    measured: &Measured,
    interrupted: bool,
) {
    let why = match &measured.failed {
        Some(error) => error.to_string(),
        None if interrupted && measured.samples.is_empty() => "interrupted".to_owned(),
        None => return,
    };
    results.not_measured.push(NotMeasured {
        experiment: experiment.to_owned(),
        variant: cell.variant.to_owned(),
        workload: cell.workload.to_owned(),
        jobs: cell.jobs,
        rounds: measured.samples.len() as u32,
        why,
    });
}

/// A metric's values with their rounds.
fn of(measured: &Measured, metric: Metric) -> impl Iterator<Item = (u32, f64)> {
    measured.samples.iter().filter_map(move |(round, sample)| {
        let value = sample.values.iter().find(|(other, _)| *other == metric);
        value.map(|(_, value)| (*round, *value))
    })
}

/// The median of the rounds at each percentile.
fn latency(measured: &Measured) -> Option<LatencyPercentiles> {
    let all: Vec<_> =
        measured.samples.iter().filter_map(|(_, sample)| sample.latency.as_ref()).collect();
    // Only percentiles for which every round had enough samples.
    let has = |points: &LatencyPercentiles, at: f64| points.0.iter().any(|point| point.0 == at);
    let percentiles = all.first()?.0.iter().map(|(percentile, _)| *percentile);
    let percentiles = percentiles.filter(|at| all.iter().all(|points| has(points, *at)));
    let points = percentiles.filter_map(|percentile| {
        let points = all.iter().flat_map(|points| &points.0);
        let at: Vec<f64> = points.filter(|p| p.0 == percentile).map(|p| p.1).collect();
        Some((percentile, Summary::of(&at)?.median))
    });
    Some(LatencyPercentiles(points.collect()))
}

fn rooms(measured: &Measured) -> Vec<RoomCount> {
    let all = || measured.samples.iter().flat_map(|(_, sample)| &sample.rooms);
    let mut rooms: Vec<RoomCount> = Vec::new();
    for count in all() {
        if rooms.iter().any(|room| room.room == count.room) {
            continue;
        }
        let same: Vec<_> = all().filter(|other| other.room == count.room).collect();
        let times = |of: fn(&RoomCount) -> [f64; 3]| {
            [0, 1, 2].map(|at| {
                let values: Vec<f64> = same.iter().map(|count| of(count)[at]).collect();
                let summary = Summary::of(&values);
                summary.map_or(0.0, |summary| if at == 2 { summary.max } else { summary.median })
            })
        };
        rooms.push(RoomCount {
            room: count.room.clone(),
            acquisitions: same.iter().map(|count| count.acquisitions).sum(),
            contended: same.iter().map(|count| count.contended).sum(),
            hold_ns: times(|count| count.hold_ns),
            wait_ns: times(|count| count.wait_ns),
        });
    }
    rooms
}

/// The limit that most rounds named; of equally frequent ones, the first.
fn limited_by(measured: &Measured) -> Option<String> {
    let said: Vec<&String> =
        measured.samples.iter().filter_map(|(_, sample)| sample.limit.as_ref()).collect();
    let count = |limit: &String| said.iter().filter(|other| **other == limit).count();
    said.iter().rev().max_by_key(|limit| count(limit)).map(|limit| (*limit).clone())
}

/// The ratios of a comparison, for every workload and number of jobs that it covers.
fn ratios(experiment: &Experiment, comparison: &Comparison, measured: &[Measured]) -> Vec<Ratio> {
    let Comparison { before, value, after, metric, workload, jobs_min, jobs_max, aim, is_cost } =
        *comparison;
    let cells = experiment.cells.iter().zip(measured);
    let wanted = cells.clone().filter(|(cell, _)| {
        cell.variant == after
            && (jobs_min..=jobs_max).contains(&cell.jobs)
            && workload.is_none_or(|workload| workload == cell.workload)
    });
    wanted
        .filter_map(|(cell, ours)| {
            let (mut theirs, is_before) = (cells.clone(), |other: &Cell| {
                (other.variant, other.workload, other.jobs) == (before, cell.workload, cell.jobs)
            });
            let pairs: Vec<(f64, f64)> = match value {
                Some(value) => of(ours, metric).map(|(_, after)| (value, after)).collect(),
                None => pairs(theirs.find(|(other, _)| is_before(other))?.1, ours, metric),
            };
            let gain = gain(&pairs, metric.more_is_better)?;
            let differences: Vec<f64> =
                pairs.iter().map(|(before, after)| after - before).collect();
            let cost = Summary::of(&differences).filter(|_| is_cost).map(|summary| summary.median);
            // If a server waits for its client, the ratio shows nothing about the aim.
            let aim = aim.filter(|_| limited_by(ours).as_deref() != Some("client"));
            Some(Ratio {
                experiment: experiment.name.to_owned(),
                workload: cell.workload.to_owned(),
                jobs: cell.jobs,
                metric: metric.name.to_owned(),
                before: before.to_owned(),
                after: after.to_owned(),
                rounds: pairs.len() as u32,
                median: gain.median,
                low: gain.low,
                high: gain.high,
                verdict: if is_cost { ComparisonVerdict::Cost } else { gain.verdict },
                unit: metric.unit.to_owned(),
                cost,
                aim,
                aim_state: aim.map(|aim| gain.reaches(aim)),
                published: published_ratio(experiment, comparison, cell),
            })
        })
        .collect()
}

/// A metric's values in the rounds in which both cells were measured.
fn pairs(theirs: &Measured, ours: &Measured, metric: Metric) -> Vec<(f64, f64)> {
    let pair = |(round, before)| {
        let after = of(ours, metric).find(|(other, _)| *other == round)?.1;
        Some((before, after))
    };
    of(theirs, metric).filter_map(pair).collect()
}

fn published_ratio(experiment: &Experiment, comparison: &Comparison, cell: &Cell) -> Option<f64> {
    let value = |variant: &str| {
        let row = experiment.published.iter().find(|row| {
            (row.variant, row.workload, row.jobs) == (variant, cell.workload, cell.jobs)
                && row.metric == comparison.metric
        });
        row.map(|row| row.value)
    };
    let ratio = value(comparison.after)? / value(comparison.before)?;
    Some(if comparison.metric.more_is_better { ratio } else { ratio.recip() })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::error::LabError;
    use crate::experiment::{Published, Variant, VariantRole};
    use crate::run::Timing;
    use crate::sample::Sample;
    use crate::stats::AimState;

    const PLAN: RunPlan = RunPlan { rounds: 5, measure: None, quick: false };

    fn experiment() -> Experiment {
        let row = |variant, value| Published {
            variant,
            workload: "read",
            jobs: 2,
            metric: Metric::CPU_PER_IO,
            value,
            source: "a paper",
        };
        let variant = |name, kind| Variant { name, kind, about: "" };
        let cell = |variant, jobs| Cell::new(variant, "read", jobs, |_| Ok(Sample::default()));
        Experiment {
            name: "e",
            title: "",
            about: "",
            published: vec![row("old", 300.0), row("new", 100.0)],
            variants: vec![
                variant("old", VariantRole::Before),
                variant("new", VariantRole::Product),
            ],
            workloads: Vec::new(),
            comparisons: vec![
                Comparison::new("old", "new", Metric::CPU_PER_IO).from_jobs(2).aim(1.5),
            ],
            plots: Vec::new(),
            cells: vec![cell("old", 1), cell("new", 1), cell("old", 2), cell("new", 2)],
        }
    }

    /// One sample per value, each of a round of its own.
    fn measured(values: &[f64]) -> Measured {
        let sample = |value: f64| Sample {
            latency: Some(LatencyPercentiles(vec![(50.0, value), (100.0, 9.0 * value)])),
            rooms: vec![RoomCount {
                room: "zones".to_owned(),
                acquisitions: 10,
                contended: 1,
                hold_ns: [value, value, value],
                wait_ns: [0.0; 3],
            }],
            limit: Some(if value > 150.0 { "client" } else { "server" }.to_owned()),
            notes: vec!["said once".to_owned()],
            ..Sample::of(Metric::CPU_PER_IO, value)
        };
        let samples = values.iter().enumerate().map(|(at, value)| (at as u32, sample(*value)));
        Measured { samples: samples.collect(), failed: None }
    }

    fn collected(measured: Vec<Measured>, interrupted: bool) -> Results {
        let timing = Timing { warm_up: Duration::ZERO, measure: Duration::from_secs(1) };
        let mut results = Results::new(String::new(), false);
        let outcome = ExperimentResults { measured, timing, interrupted, others: None };
        collect(&mut results, &experiment(), &PLAN, &outcome);
        results
    }

    #[test]
    fn rows_and_ratios_are_made_of_the_rounds() {
        let old = measured(&[200.0, 210.0, 190.0, 205.0, 195.0]);
        let new = measured(&[100.0, 105.0, 95.0, 102.5, 97.5]);
        let one = || measured(&[150.0; 5]);
        let results = collected(vec![one(), one(), old, new], false);
        let row = &results.rows[3];
        assert_eq!((row.jobs, row.median, row.min, row.max), (2, 100.0, 95.0, 105.0));
        assert_eq!(row.values, [100.0, 105.0, 95.0, 102.5, 97.5]);
        assert_eq!(results.ratios.len(), 1, "from two jobs on");
        let ratio = &results.ratios[0];
        // Half the CPU time is twice as good.
        for value in [ratio.median, ratio.low, ratio.high] {
            assert!((value - 2.0).abs() < 1e-9, "{ratio:?}");
        }
        assert_eq!((ratio.aim_state, ratio.published), (Some(AimState::Met), Some(3.0)));
        assert_eq!((ratio.cost, ratio.unit.as_str()), (None, "ns"));
        assert_eq!(results.latency[3].points.0, [(50.0, 100.0), (100.0, 900.0)]);
        let room = &results.rooms[3].count;
        assert_eq!(
            (room.acquisitions, room.contended, room.hold_ns),
            (50, 5, [100.0, 100.0, 105.0])
        );
        assert_eq!(results.limits[2].limited_by, "client");
        assert_eq!(results.limits[3].limited_by, "server");
        assert_eq!(results.notes.len(), 1);
        assert_eq!(results.experiments[0].plots, ["cpu_per_io"]);
    }

    #[test]
    fn an_aim_is_not_met_by_chance() {
        let old = measured(&[200.0, 100.0, 300.0, 80.0, 400.0]);
        let new = measured(&[100.0, 400.0, 120.0, 300.0, 90.0]);
        let results = collected(vec![measured(&[]), measured(&[]), old, new], false);
        let ratio = &results.ratios[0];
        assert!(ratio.median >= 1.5, "{ratio:?}");
        assert_eq!(ratio.verdict, ComparisonVerdict::NotSignificant);
        assert_eq!(ratio.aim_state, Some(AimState::Open));
    }

    #[test]
    fn a_row_that_the_client_limits_has_no_aim() {
        let (old, new) = (measured(&[900.0; 5]), measured(&[300.0; 5]));
        let results = collected(vec![measured(&[]), measured(&[]), old, new], false);
        assert_eq!((results.ratios[0].aim, results.ratios[0].aim_state), (None, None));
    }

    #[test]
    fn a_cost_is_a_difference_without_a_verdict() {
        let asked = Comparison::new("old", "new", Metric::CPU_PER_IO).from_jobs(2).cost();
        let (old, new) = (measured(&[100.0, 110.0, 105.0]), measured(&[112.0, 120.0, 117.0]));
        let ratios = ratios(&experiment(), &asked, &[measured(&[]), measured(&[]), old, new]);
        assert_eq!((ratios[0].verdict, ratios[0].cost), (ComparisonVerdict::Cost, Some(12.0)));
    }

    #[test]
    fn a_value_is_a_measure_as_a_variant_is() {
        let asked = Comparison::to("150 ns", 150.0, "new", Metric::CPU_PER_IO);
        let asked = asked.from_jobs(2).up_to_jobs(2);
        let (old, new) = (measured(&[]), measured(&[100.0, 105.0, 95.0, 102.5, 97.5]));
        let ratios =
            ratios(&experiment(), &asked.aim(1.0), &[measured(&[]), measured(&[]), old, new]);
        assert_eq!((ratios[0].before.as_str(), ratios[0].median), ("150 ns", 1.5));
        assert_eq!((ratios[0].rounds, ratios[0].aim_state), (5, Some(AimState::Met)));
    }

    #[test]
    fn a_missing_result_says_why() {
        let mut failed = measured(&[1.0, 2.0]);
        failed.failed = Some(LabError::missing("fio", "install it"));
        let results = collected(vec![measured(&[]), measured(&[1.0]), measured(&[]), failed], true);
        let whys: Vec<_> = results
            .not_measured
            .iter()
            .map(|cell| (cell.variant.as_str(), cell.jobs, cell.rounds, cell.why.as_str()))
            .collect();
        let wanted = [
            ("old", 1, 0, "interrupted"),
            ("old", 2, 0, "interrupted"),
            ("new", 2, 2, "fio is missing; install it"),
        ];
        assert_eq!(whys, wanted);
        assert!(results.interrupted);
        assert_eq!(results.rows.len(), 2);
    }
}
