//! Results as JSON: what a run wrote down. docs/lab.md describes every field.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

use serde::{Deserialize, Serialize};

use crate::error::LabError;
use crate::machine::Machine;
use crate::sample::{LatencyPercentiles, RoomCount};
use crate::stats::{AimState, Verdict};

/// The version of the schema; it changes when a field changes its meaning or goes.
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
    /// When it began, in UTC: `2026-11-21T05:00:00.123Z`.
    pub started: String,
    /// How long it took.
    pub seconds: f64,
    /// Whether it was a first look only: fewer cells, shorter, fewer rounds.
    pub quick: bool,
    /// What `--only` chose, one entry each; empty if every cell was wanted.
    #[serde(default)]
    pub only: Vec<String>,
    /// Whether Ctrl-C ended it; what was measured before is here.
    pub interrupted: bool,
    /// Where it ran.
    pub machine: Machine,
    /// The load average of the last minute before the run.
    pub load_before: Option<f64>,
    /// The same after it.
    pub load_after: Option<f64>,
    /// What was measured.
    pub experiments: Vec<ExperimentInfo>,
    /// The measured values, one row per cell and metric.
    pub rows: Vec<Row>,
    /// The comparisons.
    pub ratios: Vec<Ratio>,
    /// Latency distributions.
    pub latency: Vec<Latency>,
    /// What the rooms counted.
    pub rooms: Vec<Room>,
    /// What limited each cell, where that is known.
    pub limits: Vec<Limit>,
    /// Values as fractions of what the machine can do at best.
    #[serde(default)]
    pub fractions: Vec<Fraction>,
    /// What others published.
    pub published: Vec<PublishedRow>,
    /// Cells that gave nothing, or not in every round, and why.
    pub not_measured: Vec<NotMeasured>,
    /// Sentences about the run.
    pub notes: Vec<Note>,
    /// What a model predicts; never a measurement.
    pub predictions: Vec<Prediction>,
}

impl Results {
    /// Results of this program on this machine, of nothing yet.
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
            predictions: Vec::new(),
        }
    }

    /// Keeps only the experiments whose names are wanted.
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
        self.predictions.retain(|prediction| wanted(&prediction.experiment));
    }

    /// What its measurements of an experiment are worth beside those of other runs; `None` if there
    /// are none. A run takes the place of one that is worth no more.
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

    /// Writes it over the file that it was read from.
    ///
    /// # Errors
    /// If it cannot be written. The file that was there before is then still whole.
    pub fn rewrite(&self, path: &Path) -> Result<(), LabError> {
        write_json(path, self)
    }

    /// Writes it into a directory, which is made if need be, as a file of this run's own, and puts
    /// it into the directory's index. Returns the file's path.
    ///
    /// # Errors
    /// If something cannot be written. The file that was there before is then still whole.
    pub fn write(&self, directory: &Path) -> Result<PathBuf, LabError> {
        fs::create_dir_all(directory).map_err(LabError::io(directory.display().to_string()))?;
        let name = format!("run-{}.json", self.started.replace([':', '-'], ""));
        let path = directory.join(&name);
        write_json(&path, self)?;
        let mut index = Index::read(directory)?;
        for info in &self.experiments {
            let Some(weight) = self.weight(&info.name) else { continue };
            // A file that is gone, or that cannot be read, is worth nothing.
            let place = |file: &String| Path::new(file).file_name().map(|at| directory.join(at));
            let before = index.latest.get(&info.name).filter(|before| **before != name);
            let before = before.and_then(place).and_then(|path| Results::read(&path).ok());
            if before.and_then(|before| before.weight(&info.name)) <= Some(weight) {
                index.latest.insert(info.name.clone(), name.clone());
            }
        }
        for prediction in &self.predictions {
            index.predicted.insert(prediction.experiment.clone(), name.clone());
        }
        write_json(&directory.join(INDEX), &index)?;
        Ok(path)
    }
}

/// See [`Results::weight`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Weight {
    /// Not every cell, or not every round.
    Part,
    /// A first look.
    Quick,
    /// A run.
    Whole,
}

/// The latest file of results by experiment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Index {
    /// File names by experiment that was measured.
    pub latest: BTreeMap<String, String>,
    /// File names by experiment of which something was predicted; a prediction takes no
    /// measurement's place.
    #[serde(default)]
    pub predicted: BTreeMap<String, String>,
}

impl Index {
    /// The index of a directory; empty if there is none.
    ///
    /// # Errors
    /// If it is there and cannot be read.
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
    /// Its name.
    pub name: String,
    /// One line.
    pub title: String,
    /// A paragraph.
    pub about: String,
    /// Rounds that were asked for.
    pub rounds: u32,
    /// Seconds of one measurement.
    pub seconds: f64,
    /// Seconds before it that did not count.
    pub warm_up_seconds: f64,
    /// Whether Ctrl-C ended it before its last round.
    #[serde(default)]
    pub interrupted: bool,
    /// Processors that were busy with what others did meanwhile, on average.
    #[serde(default)]
    pub others_busy: Option<f64>,
    /// Processors whose time went to other virtual machines meanwhile, on average.
    #[serde(default)]
    pub stolen: Option<f64>,
    /// Who was measured.
    pub variants: Vec<VariantInfo>,
    /// What was asked of them.
    pub workloads: Vec<WorkloadInfo>,
    /// The names of the metrics that get plots.
    pub plots: Vec<String>,
}

/// A variant of an experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VariantInfo {
    /// Its name.
    pub name: String,
    /// `limit`, `before`, `after`, `product` or `peer`.
    pub kind: String,
    /// One line.
    pub about: String,
}

/// A workload of an experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkloadInfo {
    /// Its name.
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
    /// Its unit.
    pub unit: String,
    /// Whether more of it is better.
    pub more_is_better: bool,
    /// Rounds that gave a value.
    pub rounds: u32,
    /// Their median.
    pub median: f64,
    /// Their least.
    pub min: f64,
    /// Their greatest.
    pub max: f64,
    /// All of them, by round.
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
    /// The variant that is the measure.
    pub before: String,
    /// The variant that is measured by it.
    pub after: String,
    /// Rounds in which both were measured.
    pub rounds: u32,
    /// The median of the rounds' ratios, the better way up: above 1, `after` is better.
    pub median: f64,
    /// The lower end of its 95 % confidence interval.
    pub low: f64,
    /// The upper end.
    pub high: f64,
    /// Whether that is a difference.
    pub verdict: Verdict,
    /// The metric's unit.
    pub unit: String,
    /// The median of the rounds' differences in that unit, where the verdict is `cost`: what
    /// `after` takes on top of `before`.
    pub cost: Option<f64>,
    /// The least that is aimed at; none where the client limited `after`.
    pub aim: Option<f64>,
    /// How the interval stands to it.
    pub aim_state: Option<AimState>,
    /// The same ratio of the published rows, where there are both with as many jobs.
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

/// What one room counted over the rounds: counts are sums, times medians, greatest times greatest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Room {
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

/// What limited a cell.
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
    /// `server`, `client`, `machine`, ...; what most rounds said.
    pub limited_by: String,
}

/// A value as a fraction of what the machine can do at best.
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
    /// The metric whose median is read so.
    pub metric: String,
    /// Its unit.
    pub unit: String,
    /// The limit's name.
    pub limit: String,
    /// What the limit would let the metric be.
    pub best: f64,
    /// How much of that is reached: 1 is all; of less-is-better, the best to the value.
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
    /// Its unit.
    pub unit: String,
    /// The value.
    pub value: f64,
    /// Who, when, on which machine.
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
    /// Rounds that it gave before it failed.
    pub rounds: u32,
    /// What was missing, or what went wrong.
    pub why: String,
}

/// A sentence about an experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Note {
    /// The experiment.
    pub experiment: String,
    /// The sentence.
    pub text: String,
}

/// What a model predicts for a machine that is not here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// The experiment whose shared accesses are modelled.
    pub experiment: String,
    /// The variant.
    pub variant: String,
    /// The workload.
    pub workload: String,
    /// Processor cores of the modelled machine.
    pub cores: u32,
    /// Its sockets.
    pub sockets: u32,
    /// Threads or processes.
    pub jobs: u32,
    /// The metric.
    pub metric: String,
    /// Its unit.
    pub unit: String,
    /// What is predicted.
    pub value: f64,
    /// What was measured or published for the same, where it was.
    pub known: Option<f64>,
    /// Where that is from.
    pub known_source: Option<String>,
    /// By how much the prediction is off: `value / known - 1`.
    pub error: Option<f64>,
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

/// Writes a file so that a reader sees the old one or the new one, whole.
fn write_json(path: &Path, value: &impl Serialize) -> Result<(), LabError> {
    let what = || path.display().to_string();
    let mut bytes =
        serde_json::to_vec_pretty(value).map_err(|error| LabError::failed(what(), error))?;
    bytes.push(b'\n');
    write_whole(path, &bytes).map_err(LabError::io(what()))
}

/// Writes beside the file and renames over it.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}", std::process::id()));
    fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, path)).inspect_err(|_| {
        // It is of no use to anybody; that it stays is no worse than the error itself.
        let _ = fs::remove_file(&beside);
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

    /// A run that measured one cell at a second of its own.
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
    fn what_is_written_is_read_and_indexed() {
        let directory = crate::scratch::Scratch::new().unwrap();
        let results = measured(0, true);
        let path = results.write(directory.path()).unwrap();
        assert_eq!(Results::read(&path).unwrap(), results);
        let index = Index::read(directory.path()).unwrap();
        assert_eq!(directory.path().join(&index.latest["a"]), path);
        assert!(index.predicted.is_empty());
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
