//! `blockyard-lab scale`: throughput on more cores than this machine has, by the law of
//! [`crate::scale`].

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;

use blockyard_yard::table::Table;
use clap::Args;
use serde::Serialize;

use crate::command::CommandError;
use crate::error::LabError;
use crate::load::UNDISTURBED_IOPS;
use crate::metric::Metric;
use crate::results::{Index, Results};
use crate::scale::Usl;

/// The greatest number of cores.
const CORES_MAX: u32 = 4096;

/// Arguments of `blockyard-lab scale`.
#[derive(Args, Debug)]
#[command(after_help = HELP)]
pub struct ScaleArgs {
    /// The experiment, of which results with one job and with two are stored
    pub name: String,
    /// Cores of the machine; each has one job
    #[arg(long, value_name = "N", default_value_t = 96,
          value_parser = clap::value_parser!(u32).range(1..=i64::from(CORES_MAX)))]
    pub cores: u32,
    /// Results of `blockyard-lab run`
    #[arg(long, value_name = "DIR", default_value = "lab-results")]
    pub out: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

const HELP: &str = "\
A prediction is no measurement. The Universal Scalability Law is fitted to the measured numbers of
jobs, up to the processors of the machine. One and two jobs do not tell whether a loss is contention
(one job at a time) or coherence (cache lines that move between cores): so each prediction is a
range between the two. Published pairs are printed with the range of their ratio and its error.

Examples:
  blockyard-lab run zone-locks && blockyard-lab scale zone-locks --cores 48
  blockyard-lab scale ram-locks --cores 4 --json
";

/// The fits of one variant under one workload.
#[derive(Debug, Serialize)]
struct Fitted {
    variant: String,
    workload: String,
    /// Measured jobs and I/Os per second.
    measured: Vec<(u32, f64)>,
    /// Name, contention and coherence of each fit.
    fits: Vec<(&'static str, f64, f64)>,
    /// Number of cores, and the least and the greatest prediction in I/Os per second.
    predicted: Vec<(u32, f64, f64)>,
    #[serde(skip)]
    laws: Vec<Usl>,
}

impl Fitted {
    /// The least and the greatest prediction.
    fn range(&self, jobs: u32) -> (f64, f64) {
        let values = self.laws.iter().map(|law| law.throughput(jobs));
        values.fold((f64::INFINITY, 0.0), |(low, high), it| (it.min(low), it.max(high)))
    }
}

/// A published ratio of two variants, and the predicted one.
#[derive(Debug, Serialize)]
struct Published {
    workload: String,
    before: String,
    after: String,
    jobs: u32,
    published: f64,
    predicted: (f64, f64),
    /// By how much the nearer end of the range differs; 0 within it.
    error: f64,
}

/// The result of the command.
#[derive(Debug, Serialize)]
struct Answer {
    experiment: String,
    results: PathBuf,
    cores: u32,
    fits: Vec<Fitted>,
    published: Vec<Published>,
}

/// Runs the command.
///
/// # Errors
/// See [`CommandError`].
pub fn run(args: &ScaleArgs, out: &mut impl Write) -> Result<(), CommandError> {
    let index = Index::read(&args.out)?;
    let Some(file) = index.latest.get(&args.name) else {
        let (name, place) = (&args.name, args.out.display());
        let message = format!(
            "invalid experiment `{name}`: expected one with results in {place}; run \
             `blockyard-lab run {name}` first"
        );
        return Err(CommandError::Usage(message));
    };
    let path = args.out.join(file);
    let results = Results::read(&path)?;
    let fits = fitted(&results, &args.name, args.cores);
    if fits.is_empty() {
        let what = format!("results of {} with one job and with two", args.name);
        let how = "run it on two processors or more, without `--only`";
        return Err(LabError::missing(what, how).into());
    }
    let published = published(&results, &args.name, &fits);
    let (experiment, cores) = (args.name.clone(), args.cores);
    let answer = Answer { experiment, results: path, cores, fits, published };
    if args.json {
        let text = serde_json::to_string_pretty(&answer).map_err(io::Error::from)?;
        writeln!(out, "{text}")?;
    } else {
        print(&answer, out)?;
    }
    Ok(out.flush()?)
}

/// Fits the law to each variant and workload that was measured with at least two numbers of jobs,
/// of which each job had a processor.
fn fitted(results: &Results, experiment: &str, cores: u32) -> Vec<Fitted> {
    let processors = results.machine.processors as u32;
    let mut measured: BTreeMap<(&str, &str), Vec<(u32, f64)>> = BTreeMap::new();
    for metric in [UNDISTURBED_IOPS, Metric::IOPS] {
        let mut of_metric: BTreeMap<(&str, &str), Vec<(u32, f64)>> = BTreeMap::new();
        let rows = results.rows.iter().filter(|row| row.experiment == experiment);
        for row in rows.filter(|row| row.metric == metric.name && row.jobs <= processors) {
            let points = of_metric.entry((&row.variant, &row.workload)).or_default();
            points.push((row.jobs, row.median));
        }
        for (cell, points) in of_metric {
            // The first metric that has two numbers of jobs is used.
            if points.len() > 1 {
                measured.entry(cell).or_insert(points);
            }
        }
    }
    let fit = |((variant, workload), mut points): ((&str, &str), Vec<(u32, f64)>)| {
        points.sort_by_key(|point| point.0);
        let laws = Usl::fit(&points);
        let mut fitted = Fitted {
            variant: variant.to_owned(),
            workload: workload.to_owned(),
            measured: points,
            fits: laws.iter().map(|it| (it.name(), it.contention, it.coherence)).collect(),
            predicted: Vec::new(),
            laws,
        };
        let counts = core_counts(cores).into_iter();
        fitted.predicted = counts
            .map(|count| {
                let (low, high) = fitted.range(count);
                (count, low, high)
            })
            .collect();
        (!fitted.laws.is_empty()).then_some(fitted)
    };
    measured.into_iter().filter_map(fit).collect()
}

/// Powers of two below `cores`, and `cores`.
fn core_counts(cores: u32) -> Vec<u32> {
    let powers = std::iter::successors(Some(1), |n| Some(n * 2)).take_while(|&n| n < cores);
    powers.chain([cores]).collect()
}

/// Compares each published pair of one workload and one number of jobs with the predicted ratio.
/// Absolute values of another machine are not comparable.
fn published(results: &Results, experiment: &str, fits: &[Fitted]) -> Vec<Published> {
    let rows = results.published.iter().filter(|row| row.experiment == experiment);
    let rows: Vec<_> = rows.filter(|row| row.metric == Metric::IOPS.name).collect();
    let find = |variant: &str, workload: &str| {
        fits.iter().find(|fit| fit.variant == variant && fit.workload == workload)
    };
    let mut pairs = Vec::new();
    for (at, after) in rows.iter().enumerate() {
        let same = |row: &&&_| {
            let row: &crate::results::PublishedRow = row;
            row.workload == after.workload && row.jobs == after.jobs && row.source == after.source
        };
        let Some(before) = rows[..at].iter().find(same) else { continue };
        let (Some(slow), Some(fast)) =
            (find(&before.variant, &before.workload), find(&after.variant, &after.workload))
        else {
            continue;
        };
        // Both variants lose by the same cause: the fits are compared one by one.
        let ratios = slow.laws.iter().zip(&fast.laws);
        let ratios =
            ratios.map(|(slow, fast)| fast.throughput(after.jobs) / slow.throughput(after.jobs));
        let (low, high) =
            ratios.fold((f64::INFINITY, 0.0), |(low, high), it| (it.min(low), it.max(high)));
        let published = after.value / before.value;
        pairs.push(Published {
            workload: after.workload.clone(),
            before: before.variant.clone(),
            after: after.variant.clone(),
            jobs: after.jobs,
            published,
            predicted: (low, high),
            error: published.clamp(low, high) / published - 1.0,
        });
    }
    pairs
}

/// Formats I/Os per second in millions.
fn millions(value: f64) -> String {
    format!("{:.2}", value / 1e6)
}

/// Formats a range; one value if both ends are equal as printed.
fn range(low: String, high: String) -> String {
    if low == high { low } else { format!("{low} to {high}") }
}

fn print(answer: &Answer, out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "{}: PREDICTIONS by the Universal Scalability Law, not measurements; from {}",
        answer.experiment,
        answer.results.display()
    )?;
    writeln!(out, "\nmillion I/Os per second, by number of cores")?;
    let counts = core_counts(answer.cores).into_iter().map(|count| count.to_string());
    let headings: Vec<String> =
        ["VARIANT".to_owned(), "WORKLOAD".to_owned()].into_iter().chain(counts).collect();
    let mut table = Table::new(headings.iter().map(String::as_str));
    for fit in &answer.fits {
        let values = fit.predicted.iter().map(|&(_, low, high)| {
            let (low, high) = (millions(low), millions(high));
            range(low, high)
        });
        let names = [fit.variant.clone(), fit.workload.clone()];
        table.row(names.into_iter().chain(values));
    }
    table.print(&["WORKLOAD"], out)?;
    writeln!(out, "\nmeasured, and the fitted loss per further job")?;
    let mut table = Table::new(["VARIANT", "WORKLOAD", "JOBS", "MEASURED", "FIT", "LOSS"]);
    for fit in &answer.fits {
        let (jobs, values): (Vec<_>, Vec<_>) =
            fit.measured.iter().map(|&(jobs, value)| (jobs.to_string(), millions(value))).unzip();
        let names: Vec<&str> = fit.fits.iter().map(|it| it.0).collect();
        let losses = fit.fits.iter().map(|it| match *it {
            (_, contention, 0.0) => format!("{contention:.4}"),
            (_, 0.0, coherence) => format!("{coherence:.4} n"),
            (_, contention, coherence) => format!("{contention:.4} + {coherence:.4} n"),
        });
        table.row([
            fit.variant.clone(),
            fit.workload.clone(),
            jobs.join(", "),
            values.join(", "),
            names.join(" or "),
            losses.collect::<Vec<_>>().join(" or "),
        ]);
    }
    table.print(&["WORKLOAD"], out)?;
    if answer.published.is_empty() {
        return Ok(());
    }
    writeln!(out, "\npublished pairs: how many times as much the second variant does")?;
    let headings = ["WORKLOAD", "BEFORE", "AFTER", "JOBS", "PUBLISHED", "PREDICTED", "ERROR"];
    let mut table = Table::new(headings);
    for row in &answer.published {
        let (low, high) = row.predicted;
        table.row([
            row.workload.clone(),
            row.before.clone(),
            row.after.clone(),
            row.jobs.to_string(),
            format!("{:.2}x", row.published),
            range(format!("{low:.2}x"), format!("{high:.2}x")),
            format!("{:+.0}%", row.error * 100.0),
        ]);
    }
    table.print(&["BEFORE", "AFTER"], out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{PublishedRow, Row};

    fn row(variant: &str, jobs: u32, median: f64) -> Row {
        Row {
            experiment: "e".to_owned(),
            variant: variant.to_owned(),
            workload: "w".to_owned(),
            jobs,
            metric: Metric::IOPS.name.to_owned(),
            unit: "1/s".to_owned(),
            more_is_better: true,
            rounds: 5,
            median,
            min: median,
            max: median,
            values: vec![median],
        }
    }

    fn published_row(variant: &str, value: f64) -> PublishedRow {
        PublishedRow {
            experiment: "e".to_owned(),
            variant: variant.to_owned(),
            workload: "w".to_owned(),
            jobs: 48,
            metric: Metric::IOPS.name.to_owned(),
            unit: "1/s".to_owned(),
            value,
            source: "somewhere".to_owned(),
        }
    }

    fn results(processors: usize) -> Results {
        let mut results = Results::new("test".to_owned(), false);
        results.machine.processors = processors;
        results.rows = vec![row("a", 1, 100.0), row("a", 2, 160.0), row("a", 8, 90.0)];
        results.rows.extend([row("b", 1, 100.0), row("b", 2, 200.0), row("lone", 1, 100.0)]);
        results
    }

    #[test]
    fn jobs_without_a_processor_are_not_fitted() {
        let fits = fitted(&results(2), "e", 4);
        let names: Vec<&str> = fits.iter().map(|fit| fit.variant.as_str()).collect();
        assert_eq!(names, ["a", "b"], "one number of jobs gives no fit");
        assert_eq!(fits[0].measured, [(1, 100.0), (2, 160.0)]);
        let counts: Vec<u32> = fits[0].predicted.iter().map(|it| it.0).collect();
        assert_eq!(counts, [1, 2, 4]);
        let (low, high) = fits[0].range(4);
        assert!(low < high && high < 400.0, "{low} {high}");
        assert_eq!(fits[1].range(4), (400.0, 400.0));
        assert_eq!(fitted(&results(8), "e", 4)[0].measured.len(), 3);
    }

    #[test]
    fn a_published_ratio_outside_of_the_range_has_an_error() {
        let mut results = results(2);
        results.published = vec![published_row("a", 10.0), published_row("b", 15.0)];
        let fits = fitted(&results, "e", 48);
        let [pair] = &published(&results, "e", &fits)[..] else { panic!("one pair") };
        let (low, high) = pair.predicted;
        assert!(1.5 < low && low < high, "{low} {high}");
        assert_eq!(pair.error, low / 1.5 - 1.0);
    }
}
