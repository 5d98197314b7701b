//! Results as JSON, as a run writes them. docs/lab.md describes every field.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

use serde::{Deserialize, Serialize};

use crate::error::LabError;
use crate::machine::Machine;
use crate::sample::{LatencyPercentiles, RoomCount};
use crate::stats::{AimState, ComparisonVerdict};

/// The version of the schema; it changes when a field changes its meaning or is removed.
pub const SCHEMA: u32 = 2;

/// The longest file of results that is read.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// The index of the latest results in a directory.
const INDEX: &str = "latest.json";

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// The schema's version: [`SCHEMA`].
    pub schema: u32,
    /// This program and its version.
    pub program: String,
    /// The command line.
    pub command: String,
    /// The start of the run, in UTC: `2026-11-21T05:00:00.123Z`.
    pub started: String,
    /// The duration of the run, in seconds.
    pub seconds: f64,
    /// Whether it was a quick run: fewer cells, shorter, fewer rounds.
    pub quick: bool,
    /// The filters of `--only`; empty if all cells were run.
    #[serde(default)]
    pub only: Vec<String>,
    /// Whether Ctrl-C ended the run; earlier measurements are here.
    pub interrupted: bool,
    /// The machine.
    pub machine: Machine,
    /// The load average of the last minute before the run.
    pub load_before: Option<f64>,
    /// The load average of the last minute after the run.
    pub load_after: Option<f64>,
    /// The experiments that were measured.
    pub experiments: Vec<ExperimentInfo>,
    /// The measured values, one row per cell and metric.
    pub rows: Vec<Row>,
    /// The comparisons.
    pub ratios: Vec<Ratio>,
    /// Latency distributions.
    pub latency: Vec<Latency>,
    /// The counts of the counting locks.
    pub rooms: Vec<LockCounts>,
    /// The limit of each cell, where it is known.
    pub limits: Vec<Limit>,
    /// Values as fractions of the machine's limits.
    #[serde(default)]
    pub fractions: Vec<Fraction>,
    /// Figures that others published.
    pub published: Vec<PublishedRow>,
    /// Cells without a value, or not in every round, and the reasons.
    pub not_measured: Vec<NotMeasured>,
    /// Notes on the run.
    pub notes: Vec<Note>,
}

impl Results {
    /// Empty results of this program on this machine.
    pub fn new(command: String, quick: bool) -> Results {
        Results {
            schema: SCHEMA,
            program: format!("blockyard {}", env!("CARGO_PKG_VERSION")),
            command,
            started: crate::clock::utc_now(),
            seconds: 0.0,
            quick,
            only: Vec::new(),
            interrupted: false,
            machine: Machine::here(),
            load_before: crate::machine::load(),
            load_after: None,
            experiments: Vec::new(),
            rows: Vec::new(),
            ratios: Vec::new(),
            latency: Vec::new(),
            rooms: Vec::new(),
            limits: Vec::new(),
            fractions: Vec::new(),
            published: Vec::new(),
            not_measured: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Keeps only the experiments for which `wanted` is true.
    pub fn retain(&mut self, wanted: impl Fn(&str) -> bool) {
        self.experiments.retain(|info| wanted(&info.name));
        self.rows.retain(|row| wanted(&row.experiment));
        self.ratios.retain(|ratio| wanted(&ratio.experiment));
        self.latency.retain(|entry| wanted(&entry.experiment));
        self.rooms.retain(|room| wanted(&room.experiment));
        self.limits.retain(|limit| wanted(&limit.experiment));
        self.fractions.retain(|fraction| wanted(&fraction.experiment));
        self.published.retain(|row| wanted(&row.experiment));
        self.not_measured.retain(|cell| wanted(&cell.experiment));
        self.notes.retain(|note| wanted(&note.experiment));
    }

    /// The weight of the measurements of an experiment compared with those of other runs; `None`
    /// without measurements. A run replaces another one with no greater weight.
    fn weight(&self, experiment: &str) -> Option<Weight> {
        let info = self.experiments.iter().find(|info| info.name == experiment)?;
        let is_measured = self.rows.iter().any(|row| row.experiment == experiment);
        let weight = match () {
            () if !self.only.is_empty() || info.interrupted => Weight::Part,
            () if self.quick => Weight::Quick,
            () => Weight::Whole,
        };
        is_measured.then_some(weight)
    }

    /// Reads a file of results.
    ///
    /// # Errors
    /// If it cannot be read, is too long, or is no file of results of this schema.
    pub fn read(path: &Path) -> Result<Results, LabError> {
        let results: Results = read_json(path)?;
        if results.schema != SCHEMA {
            let why =
                format!("schema {} is not known; this program reads {SCHEMA}", results.schema);
            return Err(LabError::failed(path.display().to_string(), why));
        }
        Ok(results)
    }

    /// Writes the results to the file from which they were read.
    ///
    /// # Errors
    /// If they cannot be written. The old file is then still complete.
    pub fn rewrite(&self, path: &Path) -> Result<(), LabError> {
        write_json(path, self)
    }

    /// Writes the results into a directory, which is made if needed, as a file of this run's own,
    /// and updates the directory's index. Returns the file's path.
    ///
    /// # Errors
    /// If something cannot be written. The old index is then still complete.
    pub fn write(&self, directory: &Path) -> Result<PathBuf, LabError> {
        fs::create_dir_all(directory).map_err(LabError::io(directory.display().to_string()))?;
        let name = format!("run-{}.json", self.started.replace([':', '-'], ""));
        let path = directory.join(&name);
        write_json(&path, self)?;
        let mut index = Index::read(directory)?;
        for info in &self.experiments {
            let Some(weight) = self.weight(&info.name) else { continue };
            // A file that is missing or unreadable has no weight.
            let place = |file: &String| Path::new(file).file_name().map(|at| directory.join(at));
            let before = index.latest.get(&info.name).filter(|before| **before != name);
            let before = before.and_then(place).and_then(|path| Results::read(&path).ok());
            if before.and_then(|before| before.weight(&info.name)) <= Some(weight) {
                index.latest.insert(info.name.clone(), name.clone());
            }
        }
        write_json(&directory.join(INDEX), &index)?;
        Ok(path)
    }
}

/// The weight of measurements, least first, as [`Results::weight`] returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Weight {
    /// Some cells or rounds are missing.
    Part,
    /// A quick run.
    Quick,
    /// A full run.
    Whole,
}

/// The latest file of results by experiment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Index {
    /// File names by measured experiment.
    pub latest: BTreeMap<String, String>,
}

impl Index {
    /// The index of a directory; empty if there is none.
    ///
    /// # Errors
    /// If it exists and cannot be read.
    pub fn read(directory: &Path) -> Result<Index, LabError> {
        let path = directory.join(INDEX);
        match path.try_exists() {
            Ok(false) => Ok(Index::default()),
            _ => read_json(&path),
        }
    }
}

/// An experiment as it was run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExperimentInfo {
    /// The experiment's name.
    pub name: String,
    /// One line.
    pub title: String,
    /// A paragraph.
    pub about: String,
    /// The number of rounds that were requested.
    pub rounds: u32,
    /// Seconds of one measurement.
    pub seconds: f64,
    /// The duration of the warm-up before it, in seconds.
    pub warm_up_seconds: f64,
    /// Whether Ctrl-C ended it before its last round.
    #[serde(default)]
    pub interrupted: bool,
    /// The processors that other processes kept busy meanwhile, on average.
    #[serde(default)]
    pub others_busy: Option<f64>,
    /// The processors that the host gave to other virtual machines meanwhile, on average.
    #[serde(default)]
    pub stolen: Option<f64>,
    /// The variants that were measured.
    pub variants: Vec<VariantInfo>,
    /// The workloads under which they were measured.
    pub workloads: Vec<WorkloadInfo>,
    /// The names of the metrics that get plots.
    pub plots: Vec<String>,
}

/// A variant of an experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VariantInfo {
    /// The variant's name.
    pub name: String,
    /// `limit`, `before`, `after`, `product` or `peer`.
    pub kind: String,
    /// One line.
    pub about: String,
}

/// A workload of an experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkloadInfo {
    /// The workload's name.
    pub name: String,
    /// One line.
    pub about: String,
}

/// The values of one metric of one cell over the rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The experiment.
    pub experiment: String,
    /// The variant.
    pub variant: String,
    /// The workload.
    pub workload: String,
    /// Threads or processes.
    pub jobs: u32,
    /// The metric.
    pub metric: String,
    /// The metric's unit.
    pub unit: String,
    /// Whether more of it is better.
    pub more_is_better: bool,
    /// The number of rounds with a value.
    pub rounds: u32,
    /// The median of the values.
    pub median: f64,
    /// The least value.
    pub min: f64,
    /// The greatest value.
    pub max: f64,
    /// All values, by round.
    pub values: Vec<f64>,
}

/// How many times better one variant is than another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// The experiment.
    pub experiment: String,
    /// The workload.
    pub workload: String,
    /// Threads or processes.
    pub jobs: u32,
    /// The metric.
    pub metric: String,
    /// The reference variant.
    pub before: String,
    /// The variant that is compared with the reference.
    pub after: String,
    /// Rounds in which both were measured.
    pub rounds: u32,
    /// The median of the rounds' ratios, inverted where less is better: above 1, `after` is better.
    pub median: f64,
    /// The lower end of its 95 % confidence interval.
    pub low: f64,
    /// The upper end.
    pub high: f64,
    /// Whether the ratio shows a difference.
    pub verdict: ComparisonVerdict,
    /// The metric's unit.
    pub unit: String,
    /// The median of the rounds' differences in that unit, where the verdict is `cost`: the cost of
    /// `after` on top of `before`.
    pub cost: Option<f64>,
    /// The least ratio that is the aim; none where the client limited `after`.
    pub aim: Option<f64>,
    /// Whether the interval reaches the aim.
    pub aim_state: Option<AimState>,
    /// The ratio of the published rows, if both exist for this number of jobs.
    pub published: Option<f64>,
}

/// A latency distribution, the median of the rounds at each percentile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// The experiment.
    pub experiment: String,
    /// The variant.
    pub variant: String,
    /// The workload.
    pub workload: String,
    /// Threads or processes.
    pub jobs: u32,
    /// Pairs of percentile and nanoseconds.
    pub points: LatencyPercentiles,
}

/// The counts of one lock over the rounds: counts are sums, times are medians, greatest times are
/// the greatest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LockCounts {
    /// The experiment.
    pub experiment: String,
    /// The variant.
    pub variant: String,
    /// The workload.
    pub workload: String,
    /// Threads or processes.
    pub jobs: u32,
    /// The counts.
    #[serde(flatten)]
    pub count: RoomCount,
}

/// The limit of a cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limit {
    /// The experiment.
    pub experiment: String,
    /// The variant.
    pub variant: String,
    /// The workload.
    pub workload: String,
    /// Threads or processes.
    pub jobs: u32,
    /// `server`, `client`, `machine`, ...; the limit that most rounds named.
    pub limited_by: String,
}

/// A value as a fraction of the machine's limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fraction {
    /// The experiment.
    pub experiment: String,
    /// The variant.
    pub variant: String,
    /// The workload.
    pub workload: String,
    /// Threads or processes.
    pub jobs: u32,
    /// The metric, of which the median is used.
    pub metric: String,
    /// The metric's unit.
    pub unit: String,
    /// The limit's name.
    pub limit: String,
    /// The value of the metric at the limit.
    pub best: f64,
    /// The fraction that is reached: 1 is all; where less is better, the best divided by the value.
    pub fraction: f64,
}

/// A row that others published.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PublishedRow {
    /// The experiment.
    pub experiment: String,
    /// The variant that it corresponds to.
    pub variant: String,
    /// The workload that it corresponds to.
    pub workload: String,
    /// Threads or processes.
    pub jobs: u32,
    /// The metric.
    pub metric: String,
    /// The metric's unit.
    pub unit: String,
    /// The value.
    pub value: f64,
    /// The author, the year and the machine.
    pub source: String,
}

/// A cell without rows, or with fewer rounds than the others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NotMeasured {
    /// The experiment.
    pub experiment: String,
    /// The variant.
    pub variant: String,
    /// The workload.
    pub workload: String,
    /// Threads or processes.
    pub jobs: u32,
    /// The number of rounds before the cell failed.
    pub rounds: u32,
    /// The missing prerequisite, or the error.
    pub why: String,
}

/// A note on an experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Note {
    /// The experiment.
    pub experiment: String,
    /// The text.
    pub text: String,
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, LabError> {
    let what = || path.display().to_string();
    let len_bytes = fs::metadata(path).map_err(LabError::io(what()))?.len();
    if len_bytes > FILE_BYTES_MAX {
        let why = format!("{len_bytes} bytes; results have at most {FILE_BYTES_MAX}");
        return Err(LabError::failed(what(), why));
    }
    let bytes = fs::read(path).map_err(LabError::io(what()))?;
    serde_json::from_slice(&bytes)
        .map_err(|error| LabError::failed(what(), format!("no results of the lab: {error}")))
}

/// Writes a file so that a reader sees the old or the new contents, never a part.
fn write_json(path: &Path, value: &impl Serialize) -> Result<(), LabError> {
    let what = || path.display().to_string();
    let mut bytes =
        serde_json::to_vec_pretty(value).map_err(|error| LabError::failed(what(), error))?;
    bytes.push(b'\n');
    write_whole(path, &bytes).map_err(LabError::io(what()))
}

/// Writes a temporary file in the same directory and renames it over the file.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, path)).inspect_err(|_| {
        // The temporary file is useless; leaving it is no worse than the error itself.
        let _ = fs::remove_file(&temporary);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> ExperimentInfo {
        ExperimentInfo {
            name: "a".to_owned(),
            title: String::new(),
            about: String::new(),
            rounds: 3,
            seconds: 0.5,
            warm_up_seconds: 0.1,
            interrupted: false,
            others_busy: None,
            stolen: None,
            variants: Vec::new(),
            workloads: Vec::new(),
            plots: Vec::new(),
        }
    }

    /// A run that measured one cell, with a start time of its own.
    fn measured(second: u32, quick: bool) -> Results {
        let mut results = Results::new("test".to_owned(), quick);
        results.started = format!("2026-11-21T05:00:{second:02}Z");
        results.experiments.push(info());
        results.rows.push(Row {
            experiment: "a".to_owned(),
            variant: "v".to_owned(),
            workload: "w".to_owned(),
            jobs: 1,
            metric: "iops".to_owned(),
            unit: "1/s".to_owned(),
            more_is_better: true,
            rounds: 1,
            median: 1.0,
            min: 1.0,
            max: 1.0,
            values: vec![1.0],
        });
        results
    }

    #[test]
    fn a_result_file_is_read_and_indexed() {
        let directory = crate::scratch::Scratch::new().unwrap();
        let results = measured(0, true);
        let path = results.write(directory.path()).unwrap();
        assert_eq!(Results::read(&path).unwrap(), results);
        let index = Index::read(directory.path()).unwrap();
        assert_eq!(directory.path().join(&index.latest["a"]), path);
        let left: Vec<_> = fs::read_dir(directory.path()).unwrap().collect();
        assert_eq!(left.len(), 2, "{left:?}");
    }

    #[test]
    fn a_run_takes_the_place_only_of_what_is_worth_no_more() {
        let directory = crate::scratch::Scratch::new().unwrap();
        let latest = |results: &Results| {
            let path = results.write(directory.path()).unwrap();
            let index = Index::read(directory.path()).unwrap();
            index.latest.get("a").is_some_and(|file| directory.path().join(file) == path)
        };
        let mut nothing = measured(1, false);
        nothing.rows.clear();
        assert!(!latest(&nothing), "it has no row");
        let part = |second| Results { only: vec!["v/w".to_owned()], ..measured(second, false) };
        assert!(latest(&part(2)), "better than nothing");
        assert!(latest(&measured(3, true)));
        assert!(!latest(&part(4)));
        let mut interrupted = measured(5, false);
        interrupted.experiments[0].interrupted = true;
        assert!(!latest(&interrupted));
        assert!(latest(&measured(6, false)));
        assert!(!latest(&measured(7, true)));
        assert!(latest(&measured(8, false)), "its like");
    }

    #[test]
    fn another_schema_is_refused_by_its_number() {
        let directory = crate::scratch::Scratch::new().unwrap();
        let mut results = Results::new("test".to_owned(), true);
        results.schema = 99;
        let path = results.write(directory.path()).unwrap();
        let error = Results::read(&path).unwrap_err().to_string();
        assert!(error.contains("schema 99"), "{error}");
        fs::write(&path, "[1").unwrap();
        assert!(Results::read(&path).unwrap_err().to_string().contains("no results"));
    }
}
