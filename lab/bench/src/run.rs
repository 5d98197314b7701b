//! A run: rounds over an experiment's cells, until all are done or Ctrl-C is pressed.
//!
//! Each round measures every cell once. Cells that are compared (equal workload and jobs) are
//! neighbours. Their order is reversed in every other round and rotates by one after each such pair
//! of rounds, and so does the order of the groups. So other load of the machine, and the effects of
//! a cell on the next one, affect all cells alike.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::error::LabError;
use crate::experiment::{Cell, Experiment};
use crate::machine::{Clocks, Others};
use crate::progress::Progress;
use crate::sample::{Round, Sample};
use crate::stop::Stop;

/// The time budget of an experiment, if every measurement is long enough within it.
const BUDGET: Duration = Duration::from_secs(120);
/// The time budget of an experiment in a quick run.
const BUDGET_QUICK: Duration = Duration::from_secs(22);
/// The longest default duration of a measurement.
const MEASURE_MAX: Duration = Duration::from_secs(2);
/// The shortest default; an experiment with many cells exceeds its budget instead.
const MEASURE_MIN: Duration = Duration::from_millis(250);
/// The shortest default of a quick run.
const MEASURE_MIN_QUICK: Duration = Duration::from_millis(50);
/// The longest warm-up.
const WARM_UP_MAX: Duration = Duration::from_millis(500);
/// With more jobs per processor than this, a measurement takes twice as long, because the jobs take
/// turns.
const CROWD: usize = 4;

/// The number and duration of the measurements.
#[derive(Clone, Copy, Debug)]
pub struct RunPlan {
    /// The number of rounds.
    pub rounds: u32,
    /// The duration of each measurement; `None` for one that fits the budget of an experiment.
    pub measure: Option<Duration>,
    /// Whether it is a quick run.
    pub quick: bool,
}

/// The times of one measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// The time before the measured window.
    pub warm_up: Duration,
    /// The measured window.
    pub measure: Duration,
}

impl RunPlan {
    /// The times of each measurement of these cells.
    pub fn timing(&self, cells: &[Cell]) -> Timing {
        let measure = self.measure.unwrap_or_else(|| {
            let (budget, least) = match self.quick {
                true => (BUDGET_QUICK, MEASURE_MIN_QUICK),
                false => (BUDGET, MEASURE_MIN),
            };
            let overhead: Duration = cells.iter().map(|cell| cell.overhead).sum();
            let measured = budget.saturating_sub(overhead * self.rounds);
            let count = (self.parts(cells) * self.rounds).max(1);
            // A sixth of a cell's time is its warm-up.
            (measured / count * 5 / 6).clamp(least, MEASURE_MAX)
        });
        Timing { warm_up: (measure / 5).min(WARM_UP_MAX), measure }
    }

    /// About how long all rounds of the cells take.
    pub fn estimate(&self, cells: &[Cell]) -> Duration {
        let Timing { warm_up, measure } = self.timing(cells);
        let overhead: Duration = cells.iter().map(|cell| cell.overhead).sum();
        (overhead + (warm_up + measure) * self.parts(cells)) * self.rounds
    }

    /// The number of cells; those that take twice as long count as two.
    fn parts(&self, cells: &[Cell]) -> u32 {
        cells.iter().map(|cell| self.stretch(cell)).sum()
    }

    /// The factor by which this cell is measured longer than others.
    fn stretch(&self, cell: &Cell) -> u32 {
        let is_crowded = cell.jobs as usize > CROWD * processors();
        if is_crowded && !self.quick && self.measure.is_none() { 2 } else { 1 }
    }
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The results of one cell.
#[derive(Debug, Default)]
pub struct Measured {
    /// The samples with their rounds.
    pub samples: Vec<(u32, Sample)>,
    /// The error after which the cell was not measured again.
    pub failed: Option<LabError>,
}

/// The results of an experiment.
#[derive(Debug)]
pub struct ExperimentResults {
    /// The results by cell, in the experiment's order.
    pub measured: Vec<Measured>,
    /// The times of each measurement.
    pub timing: Timing,
    /// Whether Ctrl-C was pressed before the end.
    pub interrupted: bool,
    /// The load of the machine by other processes meanwhile, if the system reports it.
    pub others: Option<Others>,
}

/// Runs an experiment.
pub fn run(
    experiment: &Experiment,
    plan: &RunPlan,
    stop: &Stop,
    progress: &mut Progress,
) -> ExperimentResults {
    let cells = &experiment.cells;
    let clocks = Clocks::now();
    let timing = plan.timing(cells);
    let mut measured: Vec<Measured> = cells.iter().map(|_| Measured::default()).collect();
    let time_of = |cell| (timing.warm_up + timing.measure) * plan.stretch(cell);
    // The expected time of each cell: as planned until it has been measured once.
    let mut expected: Vec<Duration> =
        cells.iter().map(|cell| cell.overhead + time_of(cell)).collect();
    let mut interrupted = stop.is_set();
    'rounds: for number in 0..plan.rounds {
        let order = order(cells, number);
        for (place, &at) in order.iter().enumerate() {
            if measured[at].failed.is_some() {
                continue;
            }
            if stop.is_set() {
                interrupted = true;
                break 'rounds;
            }
            let alive = |at: &&usize| measured[**at].failed.is_none();
            let later = (plan.rounds - number - 1) * order.iter().filter(alive).count() as u32;
            let mean = expected.iter().sum::<Duration>() / cells.len() as u32;
            let now = order[place..].iter().filter(alive).map(|at| expected[*at]).sum::<Duration>();
            progress.step(experiment.name, &cells[at], number, plan.rounds, now + mean * later);
            let began = Instant::now();
            let seed = seed(experiment.name, &cells[at], number);
            let stretch = plan.stretch(&cells[at]);
            let (warm_up, duration) = (timing.warm_up * stretch, timing.measure * stretch);
            match measure(&cells[at], &Round { warm_up, duration, number, seed, stop }) {
                Ok(sample) => measured[at].samples.push((number, sample)),
                Err(LabError::Interrupted) => {
                    interrupted = true;
                    break 'rounds;
                }
                // Ctrl-C also kills the tools that this process runs; their errors are no result.
                Err(_) if stop.is_set() => {
                    interrupted = true;
                    break 'rounds;
                }
                Err(error) => {
                    progress.failed(experiment.name, &cells[at], &error);
                    measured[at].failed = Some(error);
                }
            }
            expected[at] = began.elapsed();
        }
    }
    let others = clocks.and_then(|before| Some(Clocks::now()?.since(&before)));
    ExperimentResults { measured, timing, interrupted, others }
}

/// The order of the cells in a round.
fn order(cells: &[Cell], round: u32) -> Vec<usize> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for at in 0..cells.len() {
        let is_like = |group: &&mut Vec<usize>| {
            let other = &cells[group[0]];
            (other.workload, other.jobs) == (cells[at].workload, cells[at].jobs)
        };
        match groups.iter_mut().find(is_like) {
            Some(group) => group.push(at),
            None => groups.push(vec![at]),
        }
    }
    groups.iter_mut().for_each(|group| turn(group, round));
    turn(&mut groups, round);
    groups.concat()
}

/// Permutes a row: three cells take each of their six orders before one is repeated.
fn turn<T>(row: &mut [T], round: u32) {
    if !row.is_empty() {
        row.rotate_left(round as usize / 2 % row.len());
    }
    if round % 2 == 1 {
        row.reverse();
    }
}

/// A seed that is equal for all variants of a workload in a round, and in the next run.
fn seed(experiment: &str, cell: &Cell, round: u32) -> u64 {
    // FNV-1a: the standard library's hash may change in its next version.
    let words = format!("{experiment}/{}/{}/{round}", cell.workload, cell.jobs);
    words.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

fn measure(cell: &Cell, round: &Round<'_>) -> Result<Sample, LabError> {
    // A cell that panics must not lose the results of others.
    let sample = catch_unwind(AssertUnwindSafe(|| (cell.body)(round)))
        .unwrap_or_else(|panic| Err(LabError::failed(format!("{cell:?}"), said(&*panic))))?;
    let wrong = sample.values.iter().find(|(_, value)| !value.is_finite());
    match wrong {
        Some((metric, value)) => {
            Err(LabError::failed(metric.name, format!("{value} is no measurement")))
        }
        None if sample.values.is_empty() => Err(LabError::failed("sample", "it has no values")),
        None => Ok(sample),
    }
}

fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("it panicked: {}", text.unwrap_or("without a word"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::mpsc;

    use super::*;
    use crate::metric::Metric;

    const PLAN: RunPlan = RunPlan { rounds: 5, measure: Some(Duration::ZERO), quick: false };

    fn experiment(cells: Vec<Cell>) -> Experiment {
        Experiment {
            name: "e",
            title: "",
            about: "",
            published: Vec::new(),
            variants: Vec::new(),
            workloads: Vec::new(),
            comparisons: Vec::new(),
            plots: Vec::new(),
            cells,
        }
    }

    fn cell(variant: &'static str, workload: &'static str, jobs: u32) -> Cell {
        Cell::new(variant, workload, jobs, |round| {
            Ok(Sample::of(Metric::IOPS, f64::from(round.number) + 1.0))
        })
    }

    #[test]
    fn compared_cells_are_neighbours_and_take_turns() {
        let cells = [
            cell("a", "read", 1),
            cell("a", "write", 1),
            cell("b", "read", 1),
            cell("b", "write", 1),
        ];
        assert_eq!(order(&cells, 0), [0, 2, 1, 3]);
        assert_eq!(order(&cells, 1), [3, 1, 2, 0]);
        assert_eq!(order(&cells, 2), [3, 1, 2, 0]);
        assert_eq!(order(&cells, 3), [0, 2, 1, 3]);
        assert_eq!(order(&[], 3), [0; 0]);
        let three = ["a", "b", "c"].map(|variant| cell(variant, "read", 1));
        let orders: BTreeSet<Vec<usize>> = (0..6).map(|round| order(&three, round)).collect();
        assert_eq!(orders.len(), 6, "{orders:?}");
    }

    #[test]
    fn a_cell_that_fails_leaves_the_others_alone() {
        let fails = Cell::new("b", "read", 1, |round| match round.number {
            0 => Ok(Sample::of(Metric::IOPS, 1.0)),
            _ => Err(LabError::missing("fio", "install it")),
        });
        let panics = Cell::new("c", "read", 1, |_| panic!("on purpose"));
        let nothing = Cell::new("d", "read", 1, |_| Ok(Sample::of(Metric::IOPS, f64::NAN)));
        let experiment = experiment(vec![cell("a", "read", 1), fails, panics, nothing]);
        let outcome = run(&experiment, &PLAN, &Stop::new(), &mut Progress::silent());
        assert!(!outcome.interrupted);
        let rounds = |at: usize| outcome.measured[at].samples.len();
        assert_eq!([rounds(0), rounds(1), rounds(2), rounds(3)], [5, 1, 0, 0]);
        let why = |at: usize| outcome.measured[at].failed.as_ref().unwrap().to_string();
        assert_eq!(why(1), "fio is missing; install it");
        assert!(why(2).contains("on purpose"), "{}", why(2));
        assert!(why(3).contains("NaN"), "{}", why(3));
    }

    #[test]
    fn a_stop_keeps_what_was_measured() {
        let (stop, seen) = (Stop::new(), Stop::new());
        let (sender, receiver) = mpsc::channel();
        let stops = Cell::new("b", "read", 1, {
            let stop = stop.clone();
            move |round| {
                sender.send(round.number).expect("the test listens");
                if round.number == 2 {
                    stop.set();
                    return Err(LabError::failed("fio", "killed by a signal"));
                }
                Ok(Sample::of(Metric::IOPS, 1.0))
            }
        });
        seen.set();
        let experiment = experiment(vec![cell("a", "read", 1), stops]);
        let outcome = run(&experiment, &PLAN, &stop, &mut Progress::silent());
        assert!(outcome.interrupted);
        assert_eq!(outcome.measured[1].samples.len(), 2);
        assert!(outcome.measured[1].failed.is_none());
        drop(experiment);
        assert_eq!(receiver.iter().collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn the_time_of_a_measurement_fits_the_budget() {
        let cells = |count| (0..count).map(|_| cell("a", "read", 1)).collect::<Vec<_>>();
        let plan = RunPlan { rounds: 5, measure: None, quick: false };
        for count in [1, 10, 60, 80] {
            assert!(plan.estimate(&cells(count)) <= BUDGET + Duration::from_secs(1), "{count}");
        }
        assert_eq!(plan.timing(&cells(1)).measure, MEASURE_MAX);
        let quick = RunPlan { rounds: 3, measure: None, quick: true };
        assert!(quick.estimate(&cells(30)) <= Duration::from_secs(30));
        let slow = vec![cell("a", "read", 1).overhead(Duration::from_secs(60))];
        assert_eq!(plan.timing(&slow).measure, MEASURE_MIN);
        assert_eq!(quick.timing(&cells(1000)).measure, MEASURE_MIN_QUICK);
    }

    #[test]
    fn many_jobs_are_measured_for_longer() {
        let crowd = (CROWD * processors() + 1) as u32;
        let cells = [cell("a", "read", 1), cell("a", "read", crowd)];
        let plan = RunPlan { rounds: 5, measure: None, quick: false };
        assert_eq!(cells.each_ref().map(|cell| plan.stretch(cell)), [1, 2]);
        let asked = RunPlan { measure: Some(Duration::from_secs(1)), ..plan };
        assert_eq!(asked.stretch(&cells[1]), 1);
    }

    #[test]
    fn variants_of_a_round_have_the_same_seed() {
        let seed = |variant, round| seed("e", &cell(variant, "read", 1), round);
        assert_eq!(seed("a", 1), seed("b", 1));
        assert_ne!(seed("a", 1), seed("a", 2));
    }
}
