//! An experiment as data: what is asked, which variants answer, and what others published.

use std::fmt;
use std::time::Duration;

use crate::error::LabError;
use crate::metric::Metric;
use crate::sample::{Round, Sample};

/// An experiment.
#[derive(Debug)]
pub struct Experiment {
    /// The name on the command line: `zone-locks`.
    pub name: &'static str,
    /// One line.
    pub title: &'static str,
    /// A paragraph: what is asked, and how it is measured.
    pub about: &'static str,
    /// What others published, shown beside ours.
    pub published: Vec<Published>,
    /// Who is measured.
    pub variants: Vec<Variant>,
    /// What is asked of them.
    pub workloads: Vec<Workload>,
    /// Which two variants are compared, by which metric.
    pub comparisons: Vec<Comparison>,
    /// The metrics that get a plot; if it is empty, the first that samples give.
    pub plots: Vec<Metric>,
    /// One measurement each, repeated by round.
    pub cells: Vec<Cell>,
}

/// What a variant is to the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// What the machine can do at best.
    Limit,
    /// The coarse lock, or whatever was there before the published change.
    Before,
    /// The published change.
    After,
    /// What this program ships.
    Product,
    /// A program that others wrote.
    Peer,
}

impl Kind {
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Limit => "limit",
            Kind::Before => "before",
            Kind::After => "after",
            Kind::Product => "product",
            Kind::Peer => "peer",
        }
    }
}

/// Somebody who is measured.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// Its name in results and on the command line: `one-lock`.
    pub name: &'static str,
    /// What it is to the experiment.
    pub kind: Kind,
    /// One line.
    pub about: &'static str,
}

/// Something that is asked of the variants.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Its name in results and on the command line: `random-read`.
    pub name: &'static str,
    /// One line: operation, size, depth; the command line where there is one.
    pub about: &'static str,
}

/// A row that others published.
#[derive(Clone, Copy, Debug)]
pub struct Published {
    /// The variant that it corresponds to.
    pub variant: &'static str,
    /// The workload that it corresponds to.
    pub workload: &'static str,
    /// Threads or processes.
    pub jobs: u32,
    /// What was measured.
    pub metric: Metric,
    /// In the metric's unit.
    pub value: f64,
    /// Who, when, on which machine.
    pub source: &'static str,
}

/// Two variants that are compared.
///
/// The ratio says how many times better `after` is: after to before where more is better, before
/// to after where less is.
#[derive(Clone, Copy, Debug)]
pub struct Comparison {
    /// The variant that is the measure, or the words for a value that is.
    pub before: &'static str,
    /// The value that is the measure in place of a variant.
    pub value: Option<f64>,
    /// The variant that is measured by it.
    pub after: &'static str,
    /// What is compared.
    pub metric: Metric,
    /// Only this workload; `None` is every workload that both have.
    pub workload: Option<&'static str>,
    /// Only from so many jobs on.
    pub jobs_min: u32,
    /// Only up to so many jobs.
    pub jobs_max: u32,
    /// The least ratio that is aimed at.
    pub aim: Option<f64>,
    /// Whether it is asked what `after` costs on top of `before`, of which it is made: a
    /// difference, which is neither better nor worse.
    pub is_cost: bool,
}

impl Comparison {
    /// A comparison under all workloads and numbers of jobs, without an aim.
    pub const fn new(before: &'static str, after: &'static str, metric: Metric) -> Comparison {
        Comparison {
            before,
            value: None,
            after,
            metric,
            workload: None,
            jobs_min: 1,
            jobs_max: u32::MAX,
            aim: None,
            is_cost: false,
        }
    }

    /// A comparison with a value that nobody measures, and the words for it.
    pub const fn to(
        words: &'static str,
        value: f64,
        after: &'static str,
        metric: Metric,
    ) -> Comparison {
        Comparison { value: Some(value), ..Comparison::new(words, after, metric) }
    }

    /// Only under this workload.
    pub const fn under(mut self, workload: &'static str) -> Comparison {
        self.workload = Some(workload);
        self
    }

    /// Only from so many jobs on.
    pub const fn from_jobs(mut self, jobs_min: u32) -> Comparison {
        self.jobs_min = jobs_min;
        self
    }

    /// Only up to so many jobs.
    pub const fn up_to_jobs(mut self, jobs_max: u32) -> Comparison {
        self.jobs_max = jobs_max;
        self
    }

    /// What `after` costs on top of `before`.
    pub const fn cost(mut self) -> Comparison {
        self.is_cost = true;
        self
    }

    /// With the least ratio that is aimed at.
    pub const fn aim(mut self, aim: f64) -> Comparison {
        self.aim = Some(aim);
        self
    }
}

/// Measures one cell once: opens what it needs, warms up, measures, closes.
pub type Body = Box<dyn Fn(&Round<'_>) -> Result<Sample, LabError> + Send + Sync>;

/// One variant under one workload with so many jobs.
pub struct Cell {
    /// The variant's name.
    pub variant: &'static str,
    /// The workload's name.
    pub workload: &'static str,
    /// Threads or processes that drive it.
    pub jobs: u32,
    /// About how long opening and closing take on top of what is measured; for the time left.
    pub overhead: Duration,
    /// The measurement.
    pub body: Body,
}

impl Cell {
    /// A cell whose opening and closing take next to no time.
    pub fn new(
        variant: &'static str,
        workload: &'static str,
        jobs: u32,
        body: impl Fn(&Round<'_>) -> Result<Sample, LabError> + Send + Sync + 'static,
    ) -> Cell {
        Cell { variant, workload, jobs, overhead: Duration::ZERO, body: Box::new(body) }
    }

    /// With about this much time for opening and closing.
    pub fn overhead(mut self, overhead: Duration) -> Cell {
        self.overhead = overhead;
        self
    }
}

impl fmt::Debug for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.variant, self.workload, self.jobs)
    }
}
