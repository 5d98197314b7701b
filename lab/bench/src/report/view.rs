//! The contents of all reports, in their order.

use crate::results::{ExperimentInfo, Fraction, PublishedRow, Ratio, Results, Row};

/// One experiment of one run.
#[derive(Clone, Copy, Debug)]
pub struct Section<'a> {
    /// The run's index in the report.
    pub run: usize,
    /// The run.
    pub results: &'a Results,
    /// The experiment.
    pub info: &'a ExperimentInfo,
}

/// The measured and published values under one workload.
#[derive(Debug)]
pub struct Grid<'a> {
    /// The workload's name.
    pub workload: &'a str,
    /// The workload in a line; empty if the experiment has no description.
    pub about: &'a str,
    /// The metrics in the order of the cells' samples: name and unit.
    pub metrics: Vec<(&'a str, &'a str)>,
    /// By number of jobs, then in the order of the variants, then the published ones.
    pub lines: Vec<GridLine<'a>>,
}

/// A line of a [`Grid`].
#[derive(Debug)]
pub struct GridLine<'a> {
    /// Threads or processes.
    pub jobs: u32,
    /// The variant.
    pub variant: &'a str,
    /// The kind of the variant, or `published`.
    pub kind: &'a str,
    /// The values, by metric of the grid.
    pub values: Vec<Option<IndexedValue<'a>>>,
    /// The limit of the cell.
    pub limited_by: Option<&'a str>,
    /// The source, if it was published.
    pub source: Option<&'a str>,
}

/// A value with its index in the results.
#[derive(Clone, Copy, Debug)]
pub enum IndexedValue<'a> {
    /// Measured here: `rows[at]`.
    Measured(usize, &'a Row),
    /// Published by others: `published[at]`.
    Published(usize, &'a PublishedRow),
}

impl IndexedValue<'_> {
    /// The value or the median of its rounds.
    pub fn median(&self) -> f64 {
        match self {
            IndexedValue::Measured(_, row) => row.median,
            IndexedValue::Published(_, row) => row.value,
        }
    }

    /// The unit.
    pub fn unit(&self) -> &str {
        match self {
            IndexedValue::Measured(_, row) => &row.unit,
            IndexedValue::Published(_, row) => &row.unit,
        }
    }
}

impl<'a> Section<'a> {
    /// Every experiment of some runs.
    pub fn all(runs: &'a [Results]) -> Vec<Section<'a>> {
        let sections = runs.iter().enumerate().flat_map(|(run, results)| {
            results.experiments.iter().map(move |info| Section { run, results, info })
        });
        sections.collect()
    }

    /// The experiment's items of a list of the results, with their indices.
    pub fn part<T>(
        &self,
        list: &'a [T],
        experiment: fn(&T) -> &str,
    ) -> impl Iterator<Item = (usize, &'a T)> + use<'a, T> {
        let name = &self.info.name;
        list.iter().enumerate().filter(move |(_, item)| experiment(item) == name)
    }

    /// The measured rows.
    pub fn rows(&self) -> impl Iterator<Item = (usize, &'a Row)> + use<'a> {
        self.part(&self.results.rows, |row| &row.experiment)
    }

    /// The comparisons.
    pub fn ratios(&self) -> impl Iterator<Item = (usize, &'a Ratio)> + use<'a> {
        self.part(&self.results.ratios, |ratio| &ratio.experiment)
    }

    /// The published rows.
    pub fn published(&self) -> impl Iterator<Item = (usize, &'a PublishedRow)> + use<'a> {
        self.part(&self.results.published, |row| &row.experiment)
    }

    /// The load of the machine by other processes, in words.
    pub fn others(&self) -> Option<String> {
        let (busy, stolen) = (self.info.others_busy?, self.info.stolen?);
        let mut text = format!("Others kept {busy:.2} processors busy meanwhile");
        if stolen >= 0.005 {
            text.push_str(&format!(", the host took {stolen:.2}"));
        }
        Some(text + ".")
    }

    /// The kind of a variant.
    pub fn kind(&self, variant: &str) -> &'a str {
        let found = self.info.variants.iter().find(|other| other.name == variant);
        found.map_or("", |variant| &variant.kind)
    }

    /// A grid per measured workload, in the experiment's order.
    pub fn grids(&self) -> Vec<Grid<'a>> {
        let mut names: Vec<&str> = self.info.workloads.iter().map(|w| w.name.as_str()).collect();
        let rows = self.rows().map(|(_, row)| row.workload.as_str());
        for name in rows.chain(self.published().map(|(_, row)| row.workload.as_str())) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let grids = names.into_iter().map(|workload| self.grid(workload));
        grids.filter(|grid| grid.lines.iter().any(|line| line.source.is_none())).collect()
    }

    fn grid(&self, workload: &'a str) -> Grid<'a> {
        let about = self.info.workloads.iter().find(|other| other.name == workload);
        let about = about.map_or("", |workload| &workload.about);
        let mut grid = Grid { workload, about, metrics: Vec::new(), lines: Vec::new() };
        for (at, row) in self.rows().filter(|(_, row)| row.workload == workload) {
            let kind = self.kind(&row.variant);
            let line = grid.line(row.jobs, &row.variant, kind, None);
            line.limited_by = self.limited_by(&row.variant, workload, row.jobs);
            grid.put(row.jobs, (&row.variant, kind), (&row.metric, &row.unit), |value| {
                value.replace(IndexedValue::Measured(at, row));
            });
        }
        for (at, row) in self.published().filter(|(_, row)| row.workload == workload) {
            grid.line(row.jobs, &row.variant, "published", Some(&row.source));
            grid.put(row.jobs, (&row.variant, "published"), (&row.metric, &row.unit), |value| {
                value.replace(IndexedValue::Published(at, row));
            });
        }
        let count = grid.metrics.len();
        grid.lines.iter_mut().for_each(|line| line.values.resize(count, None));
        let place = |variant: &str| self.info.variants.iter().position(|v| v.name == variant);
        grid.lines.sort_by_key(|line| {
            (line.jobs, line.source.is_some(), place(line.variant).unwrap_or(usize::MAX))
        });
        grid
    }

    /// Fractions of limits.
    pub fn fractions(&self) -> impl Iterator<Item = (usize, &'a Fraction)> + use<'a> {
        self.part(&self.results.fractions, |fraction| &fraction.experiment)
    }

    /// The limit of a cell.
    pub fn limited_by(&self, variant: &str, workload: &str, jobs: u32) -> Option<&'a str> {
        let limits = &self.results.limits;
        let mut limits = self.part(limits, |limit| &limit.experiment).map(|(_, limit)| limit);
        let found = limits.find(|limit| {
            (limit.variant.as_str(), limit.workload.as_str(), limit.jobs)
                == (variant, workload, jobs)
        });
        found.map(|limit| limit.limited_by.as_str())
    }
}

impl<'a> Grid<'a> {
    fn line(
        &mut self,
        jobs: u32,
        variant: &'a str,
        kind: &'a str,
        source: Option<&'a str>,
    ) -> &mut GridLine<'a> {
        let is_it =
            |line: &GridLine<'_>| (line.jobs, line.variant, line.kind) == (jobs, variant, kind);
        let at = self.lines.iter().position(is_it).unwrap_or_else(|| {
            let values = Vec::new();
            self.lines.push(GridLine { jobs, variant, kind, values, limited_by: None, source });
            self.lines.len() - 1
        });
        &mut self.lines[at]
    }

    fn put(
        &mut self,
        jobs: u32,
        (variant, kind): (&'a str, &'a str),
        metric: (&'a str, &'a str),
        put: impl FnOnce(&mut Option<IndexedValue<'a>>),
    ) {
        let at = self.metrics.iter().position(|other| *other == metric).unwrap_or_else(|| {
            self.metrics.push(metric);
            self.metrics.len() - 1
        });
        let line = self.line(jobs, variant, kind, None);
        if line.values.len() <= at {
            line.values.resize(at + 1, None);
        }
        put(&mut line.values[at]);
    }
}

/// The name of a metric for a heading: `cpu per io`.
pub fn heading(metric: &str) -> String {
    metric.replace('_', " ")
}

/// Half the range of a row in percent of its median.
pub fn spread_percent(row: &Row) -> f64 {
    if row.median == 0.0 { 0.0 } else { (row.max - row.min) / 2.0 / row.median.abs() * 100.0 }
}

/// A fraction as people read it: `61 %`.
pub fn percent(fraction: f64) -> String {
    format!("{:.0} %", fraction * 100.0)
}

/// The text in place of a ratio whose interval is too wide.
pub const NO_FIGURE: &str = "no figure";

/// The widest interval of a ratio that is shown, as high end to low end. Beyond two orders of
/// magnitude the rounds measured something other than the difference: `0.0011x to 124000x`.
const INTERVAL_MAX: f64 = 100.0;

/// Whether the interval of a ratio is narrow enough to show the ratio.
pub fn has_figure(ratio: &Ratio) -> bool {
    let ends = ratio.low > 0.0 && ratio.high.is_finite() && ratio.median.is_finite();
    ends && ratio.high / ratio.low <= INTERVAL_MAX
}

/// The ratio in words: `product against one-lock: 3.42x in iops (95 %: 3.31x to 3.50x), faster`.
pub fn sentence(ratio: &Ratio) -> String {
    use crate::quantity::ratio as times;
    let Ratio { after, before, median, low, high, .. } = ratio;
    let metric = heading(&ratio.metric);
    let interval = match ratio.rounds {
        0..3 => "too few rounds for an interval".to_owned(),
        _ => format!("95 %: {} to {}", times(*low), times(*high)),
    };
    if let Some(cost) = ratio.cost {
        let cost = crate::quantity::quantity(cost, &ratio.unit);
        return format!("{after} costs {cost} more than {before} in {metric}");
    }
    let verdict = ratio.verdict.name();
    let mut text = match has_figure(ratio) {
        true => {
            let median = times(*median);
            format!("{after} against {before}: {median} in {metric} ({interval}), {verdict}")
        }
        false => format!("{after} against {before}: {NO_FIGURE} in {metric}, {verdict}"),
    };
    if let Some(published) = ratio.published {
        text.push_str(&format!("; published {}", times(published)));
    }
    if let (Some(aim), Some(state)) = (ratio.aim, ratio.aim_state) {
        text.push_str(&format!("; aim {} {}", times(aim), state.name()));
    }
    text
}
