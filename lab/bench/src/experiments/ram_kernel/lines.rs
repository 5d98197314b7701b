//! The published lines on both sides: the fio line, and iozone's rows as fio options.

use std::sync::Arc;
use std::time::Duration;

use super::{OURS, ZRAM};
use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Published, Variant, VariantRole};
use crate::experiments::cached::Cached;
use crate::experiments::ram_lines::{COLUMNS, Call, FioRow, JOBS, LINES};
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::tools::fio::Fio;
use crate::tools::zram_device::ZramDevice;

/// The time that starting and ending fio takes, and the longer run.
const OVERHEAD: Duration = Duration::from_millis(400);
/// The overhead of a run that first fills our device from a snapshot of 800 MiB.
const OVERHEAD_LOAD: Duration = Duration::from_millis(1000);
/// The source of the kernel's figures.
const SOURCE_FIO: &str = "fio 3.33, 2 virtual CPUs (AMD Zen 5), Linux 6.18, loaded machine, the \
                          best of 5 runs, reads and writes together";
const SOURCE_IOZONE: &str = "fio 3.33 on files of ext4 on zram, 2 virtual CPUs (AMD Zen 5), Linux \
                             6.18, loaded machine, the best of 3 runs, reads and writes together";

/// The throughput of the present kernel's zram by these lines with lz4, in MB/s.
const KERNELS: [(&str, u32, &str); 12] = [
    ("fio-seq-write", 4039, SOURCE_FIO),
    ("fio-seq-read", 14_059, SOURCE_FIO),
    ("fio-seq-rw", 5084, SOURCE_FIO),
    ("fio-rand-rw", 4722, SOURCE_FIO),
    ("iozone-initial-write", 1740, SOURCE_IOZONE),
    ("iozone-rewrite", 3866, SOURCE_IOZONE),
    ("iozone-read", 9986, SOURCE_IOZONE),
    ("iozone-re-read", 9533, SOURCE_IOZONE),
    ("iozone-reverse-read", 9642, SOURCE_IOZONE),
    ("iozone-random-read", 8738, SOURCE_IOZONE),
    ("iozone-mixed", 5707, SOURCE_IOZONE),
    ("iozone-random-write", 3976, SOURCE_IOZONE),
];

/// A column of the published tables. `ram-locks` measures these variants.
const fn column(name: &'static str) -> Variant {
    Variant {
        name,
        kind: VariantRole::Before,
        about: "zram of 2014, published figures; the experiment `ram-locks` measures this variant",
    }
}

/// The variants for which there are only published figures.
pub(super) const VARIANTS: [Variant; 5] = [
    column(COLUMNS[0]),
    column(COLUMNS[1]),
    column(COLUMNS[2]),
    column(COLUMNS[3]),
    column(COLUMNS[4]),
];

/// The cells; a quick run has none.
pub(super) fn cells(settings: &Settings) -> Vec<Cell> {
    let (kept, mut cells) = (Cached::new(), Vec::new());
    for line in LINES.iter().filter(|_| !settings.quick) {
        let (name, is_loaded) = (line.workload.name, line.is_large());
        let (theirs, kept) = (settings.clone(), kept.clone());
        let kernel = move |round: &Round<'_>| on_zram(round, &theirs, line, &kept);
        cells.push(Cell::new(ZRAM, name, JOBS, kernel).overhead(OVERHEAD));
        let settings = settings.clone();
        let ours = move |round: &Round<'_>| on_ours(round, &settings, line);
        let overhead = if is_loaded { OVERHEAD_LOAD } else { OVERHEAD };
        cells.push(Cell::new(OURS, name, JOBS, ours).overhead(overhead));
    }
    cells
}

/// Measures a line on zram. The first row that needs the large device fills it; it is kept until
/// the experiment ends.
fn on_zram(
    round: &Round<'_>,
    settings: &Settings,
    line: &FioRow,
    kept: &Cached<ZramDevice>,
) -> Result<Sample, LabError> {
    let make = || Ok(Arc::new(line.filling().zram(&settings.scratch, round)?));
    let device = if line.is_large() { kept.get(make)? } else { make()? };
    let engine = match line.call {
        Call::Sync => "sync",
        Call::Psync => "psync",
    };
    let fio = Fio::new(&format!("--ioengine={engine} {}", line.options()));
    let fio = fio.option("filename", device.path().display());
    Ok(line.run(&fio, round)?.sample(settings.processors))
}

fn on_ours(round: &Round<'_>, settings: &Settings, line: &FioRow) -> Result<Sample, LabError> {
    let dev = line.uri(&settings.scratch, "");
    let fio = Fio::on_engine(settings, &dev, None, &line.options())?.option("filename", "r");
    if line.filling().filled > 0 {
        line.filling().snapshot(&settings.scratch, round)?;
    }
    Ok(line.run(&fio, round)?.sample(settings.processors))
}

pub(super) fn comparisons() -> impl Iterator<Item = Comparison> {
    LINES.iter().flat_map(|line| {
        [Metric::IOS_PER_CPU_SECOND, Metric::BANDWIDTH]
            .map(|metric| Comparison::new(ZRAM, OURS, metric).under(line.workload.name))
    })
}

/// The tables of 2014, and the kernel's figures at the time when this experiment was planned.
pub(super) fn published() -> impl Iterator<Item = Published> {
    let kernels = KERNELS.into_iter().map(|(workload, megabytes, source)| Published {
        variant: ZRAM,
        workload,
        jobs: JOBS,
        metric: Metric::BANDWIDTH,
        value: f64::from(megabytes) * 1e6,
        source,
    });
    LINES.iter().flat_map(FioRow::published).chain(kernels)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use crate::stop::Stop;

    /// The kernel's rows need the privilege to make a device, as other tests of the project do.
    /// Ours would need the fio engine, which these tests do not have.
    #[test]
    fn the_kernels_device_is_measured_by_the_published_lines() {
        let (stop, scratch) = (Stop::new(), Scratch::new().unwrap());
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(5));
        let round = Round { warm_up, duration, number: 0, seed: 3, stop: &stop };
        let settings = Settings {
            quick: false,
            engine: None,
            program: std::path::PathBuf::new(),
            lab: "blockyard-lab".into(),
            scratch: scratch.path().to_owned(),
            processors: 2,
            peers: Default::default(),
        };
        let cells = cells(&settings);
        assert_eq!(cells.len(), 2 * (8 + 11));
        for cell in cells.iter().filter(|cell| ["fio-seq-rw"].contains(&cell.workload)) {
            let sample = (cell.body)(&round);
            if cell.variant == OURS {
                let error = sample.unwrap_err().to_string();
                assert_eq!(error, "libblockyard_fio-*.so is missing; run `make fio`");
                continue;
            }
            let sample = sample.unwrap();
            let has = |wanted| sample.values.iter().any(|(metric, _)| *metric == wanted);
            assert!(has(Metric::BANDWIDTH) && has(Metric::IOS_PER_CPU_SECOND), "{sample:?}");
        }
        for (workload, ..) in KERNELS {
            assert!(LINES.iter().any(|line| line.workload.name == workload), "{workload}");
        }
        assert_eq!(published().filter(|row| row.workload == "iozone-pread").count(), 5);
    }
}
