//! The published fio line, and some of iozone's rows, by stock fio with our engine.

use std::time::Duration;

use blockyard_baselines::locked_ram;

use super::{PRODUCT, guardings};
use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Published, Workload};
use crate::experiments::ram_data::FillData;
use crate::experiments::ram_lines::{FioRow, JOBS, LINES};
use crate::sample::{Round, Sample};
use crate::tools::fio::Fio;

/// The time that starting and ending fio, the longer run, and loading the device from a snapshot
/// take.
const OVERHEAD: Duration = Duration::from_millis(800);

/// The reason for the smaller differences of these cells.
const WHY_LESS: &str = "The published fio line refills its buffers with noise before each write: \
                        fio uses most of the CPU time of a write, no block compresses, and a read \
                        copies a block that is stored raw. These rows therefore show less of the \
                        cost of a lock than the rows in process.";

/// The rows; whether each is measured for all variants or for the most important; whether a quick
/// run includes it.
const LISTED: [(&str, bool, bool); 10] = [
    ("fio-seq-write", true, false),
    ("fio-seq-read", true, true),
    ("fio-seq-rw", true, false),
    ("fio-rand-rw", true, false),
    ("fio-seq-read-50", false, false),
    ("fio-rand-rw-50", false, false),
    ("iozone-rewrite", false, false),
    ("iozone-read", false, false),
    ("iozone-random-read", false, false),
    ("iozone-mixed", false, false),
];
/// The most important variants.
const FEW: [&str; 3] = [locked_ram::TABLE_LOCK, locked_ram::BIT_SPIN, PRODUCT];

fn listed(settings: &Settings) -> impl Iterator<Item = (&'static FioRow, bool)> + use<> {
    let is_quick = settings.quick;
    let rows = LISTED.into_iter().filter(move |(.., quick)| *quick || !is_quick);
    rows.map(|(name, all, _)| {
        let line = LINES.iter().find(|line| line.workload.name == name);
        (line.expect("a row of the published lines"), all)
    })
}

pub(super) fn workloads(settings: &Settings) -> impl Iterator<Item = Workload> + use<> {
    listed(settings).map(|(line, _)| line.workload)
}

/// The cells of the rows.
pub(super) fn cells(settings: &Settings) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (line, all) in listed(settings) {
        for guarding in guardings(settings) {
            let name = guarding.variant.name;
            if all || FEW.contains(&name) {
                let (settings, before) = (settings.clone(), guarding.before);
                let body = move |round: &Round<'_>| measure(round, &settings, before, line);
                cells.push(Cell::new(name, line.workload.name, JOBS, body).overhead(OVERHEAD));
            }
        }
    }
    cells
}

fn measure(
    round: &Round<'_>,
    settings: &Settings,
    before: Option<&str>,
    line: &FioRow,
) -> Result<Sample, LabError> {
    let dev = line.uri(&settings.scratch, "&compact=0");
    let fio = Fio::on_engine(settings, &dev, before, &line.options())?.option("filename", "r");
    line.filling().snapshot(&settings.scratch, round)?;
    let mut sample = line.run(&fio, round)?.sample(settings.processors);
    if line.data == FillData::Noise {
        sample.notes.push(WHY_LESS.to_owned());
    }
    Ok(sample)
}

/// The published figures of these rows, which use the published command lines.
pub(super) fn published(settings: &Settings) -> impl Iterator<Item = Published> {
    listed(settings).flat_map(|(line, _)| line.published())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use crate::stop::Stop;

    #[test]
    fn fio_needs_its_engine() {
        let (stop, scratch) = (Stop::new(), Scratch::new().unwrap());
        let none = Duration::ZERO;
        let round = Round { warm_up: none, duration: none, number: 0, seed: 3, stop: &stop };
        let settings = Settings {
            quick: true,
            engine: None,
            program: std::path::PathBuf::new(),
            lab: "blockyard-lab".into(),
            scratch: scratch.path().to_owned(),
            processors: 2,
            peers: Default::default(),
        };
        assert_eq!(cells(&Settings { quick: false, ..settings.clone() }).len(), 4 * 6 + 6 * 3);
        let cells = cells(&settings);
        assert_eq!(cells.len(), 3);
        let error = (cells[0].body)(&round).unwrap_err().to_string();
        assert_eq!(error, "libblockyard_fio-*.so is missing; run `make fio`");
    }
}
