//! An experiment as data: its workloads and variants, and what others published.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::LabError;
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::tools::nvme_peer::NvmePeer;
use crate::tools::peer::StoppedPeers;
use crate::tools::vhost_peer::VhostPeer;

/// An experiment.
#[derive(Debug)]
pub struct Experiment {
    /// The name on the command line: `zone-locks`.
    pub name: &'static str,
    /// One line of description.
    pub title: &'static str,
    /// A paragraph: the question of the experiment, and how it is measured.
    pub about: &'static str,
    /// Figures that others published, for comparison with ours.
    pub published: Vec<Published>,
    /// The variants that are measured.
    pub variants: Vec<Variant>,
    /// The workloads under which they are measured.
    pub workloads: Vec<Workload>,
    /// The pairs of variants that are compared, and by which metric.
    pub comparisons: Vec<Comparison>,
    /// The metrics that get a plot; if empty, the first that samples have.
    pub plots: Vec<Metric>,
    /// The measurements, each repeated in every round.
    pub cells: Vec<Cell>,
}

/// The settings that experiments may use to list their cells.
#[derive(Clone, Debug)]
pub struct Settings {
    /// A quick run: an experiment lists fewer cells, so that it ends in under 30 seconds.
    pub quick: bool,
    /// Blockyard's engine for fio, if `--engine` names it or it is in the program's directory.
    /// Without it, cells that need it end with [`LabError::Missing`].
    pub engine: Option<PathBuf>,
    /// The program `blockyard`, for servers that a cell starts.
    pub program: PathBuf,
    /// The program `blockyard-lab`, for servers that only measurements need.
    pub lab: PathBuf,
    /// A directory of the run's own for sockets and files; it is removed when the run ends.
    pub scratch: PathBuf,
    /// Processors that this process may use.
    pub processors: usize,
    /// Servers of other projects that listen already.
    pub peers: Peers,
}

/// Devices of other projects' servers that were started by hand and listen already.
#[derive(Clone, Debug, Default)]
pub struct Peers {
    /// Those of NVMe/TCP targets.
    pub nvme: Vec<NvmePeer>,
    /// Those of vhost-user-blk servers.
    pub vhost: Vec<VhostPeer>,
}

impl Peers {
    /// Stops the servers that poll, while another one is measured.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn stop(&self) -> Result<StoppedPeers, LabError> {
        let nvme = self.nvme.iter().map(|peer| &peer.process);
        StoppedPeers::stop(nvme.chain(self.vhost.iter().map(|peer| &peer.process)))
    }
}

/// The role of a variant in the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VariantRole {
    /// A limit of the machine.
    Limit,
    /// The coarse lock, or another design from before the published change.
    Before,
    /// The published change.
    After,
    /// The product.
    Product,
    /// A program of another project.
    Peer,
}

impl VariantRole {
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            VariantRole::Limit => "limit",
            VariantRole::Before => "before",
            VariantRole::After => "after",
            VariantRole::Product => "product",
            VariantRole::Peer => "peer",
        }
    }
}

/// A variant that is measured.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// The variant's name in results and on the command line: `one-lock`.
    pub name: &'static str,
    /// The variant's role.
    pub kind: VariantRole,
    /// One line.
    pub about: &'static str,
}

/// A workload under which variants are measured.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// The workload's name in results and on the command line: `random-read`.
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
    /// The metric.
    pub metric: Metric,
    /// The value in the metric's unit.
    pub value: f64,
    /// The author, the year and the machine.
    pub source: &'static str,
}

/// A comparison of two variants.
///
/// The ratio says how many times better `after` is: after to before where more is better, before to
/// after where less is.
#[derive(Clone, Copy, Debug)]
pub struct Comparison {
    /// The reference variant, or the description of a reference value.
    pub before: &'static str,
    /// The reference value in place of a variant.
    pub value: Option<f64>,
    /// The variant that is compared with the reference.
    pub after: &'static str,
    /// The metric that is compared.
    pub metric: Metric,
    /// Only this workload; `None` for every workload that both have.
    pub workload: Option<&'static str>,
    /// Only with at least this many jobs.
    pub jobs_min: u32,
    /// Only with at most this many jobs.
    pub jobs_max: u32,
    /// The least ratio that is the aim.
    pub aim: Option<f64>,
    /// Whether the result is the cost of `after` on top of `before`, which it contains: a
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

    /// A comparison with a value that is not measured, and its description.
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

    /// Only with at least this many jobs.
    pub const fn from_jobs(mut self, jobs_min: u32) -> Comparison {
        self.jobs_min = jobs_min;
        self
    }

    /// Only with at most this many jobs.
    pub const fn up_to_jobs(mut self, jobs_max: u32) -> Comparison {
        self.jobs_max = jobs_max;
        self
    }

    /// A comparison for the cost of `after` on top of `before`.
    pub const fn cost(mut self) -> Comparison {
        self.is_cost = true;
        self
    }

    /// With the least ratio that is the aim.
    pub const fn aim(mut self, aim: f64) -> Comparison {
        self.aim = Some(aim);
        self
    }
}

/// Measures one cell once: opens what it needs, warms up, measures, closes.
pub type Body = Box<dyn Fn(&Round<'_>) -> Result<Sample, LabError> + Send + Sync>;

/// One variant under one workload with a number of jobs.
pub struct Cell {
    /// The variant's name.
    pub variant: &'static str,
    /// The workload's name.
    pub workload: &'static str,
    /// The number of threads or processes of the load.
    pub jobs: u32,
    /// About how long opening and closing take in addition to the measurement; for the remaining
    /// time.
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

    /// Sets the time for opening and closing.
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
