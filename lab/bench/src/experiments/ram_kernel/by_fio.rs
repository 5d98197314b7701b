//! The rows with 4 KiB blocks that stock fio drives.

use std::time::Duration;

use super::{AimedRow, FIO_ALONE, OURS, OURS_DEEP, ZRAM, ZRAM_URING, asked};
use crate::error::LabError;
use crate::experiment::Cell;
use crate::experiment::Settings;
use crate::experiments::ram_data::{ALGORITHM, FillData, Filling};
use crate::fio_bytes::HALF;
use crate::load::records::Does;
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::tools::fio::{Fio, FioReport};

/// The least run time in which each of the jobs gets its turn on a processor.
const RUNTIME_MIN: Duration = Duration::from_millis(300);
/// The time that starting and ending fio and filling a device takes.
const OVERHEAD: Duration = Duration::from_millis(1000);
/// The overhead of a quick run, whose device is a quarter as long.
const OVERHEAD_QUICK: Duration = Duration::from_millis(600);
/// The fio options that all lines share.
const COMMON: &str = "--bs=4k --direct=1 --norandommap --randrepeat=0 --gtod_reduce=1";

/// The fio engine that reaches the kernel's device.
#[derive(Clone, Copy)]
pub(super) enum Engine {
    Psync,
    Uring,
}

impl Engine {
    fn options(self) -> &'static str {
        match self {
            Engine::Psync => "--ioengine=psync",
            Engine::Uring => "--ioengine=io_uring --iodepth=32",
        }
    }

    /// The sample of a run. The kernel executes io_uring's requests on zram in threads of its own,
    /// because zram may block. fio counts only the time of its jobs' threads, so the CPU time of
    /// the whole machine is taken instead.
    fn sample(self, report: &FioReport, processors: usize) -> Sample {
        let mut sample = report.sample(processors);
        if let Engine::Uring = self {
            let of_cpu = [Metric::CPU_PER_IO, Metric::IOS_PER_CPU_SECOND, Metric::CPUS];
            sample.values.retain(|(metric, _)| !of_cpu.contains(metric));
        }
        sample
    }
}

/// The side that fio drives.
#[derive(Clone, Copy)]
pub(super) enum By {
    Zram(Engine),
    Ours(&'static str),
    Nothing,
}

const BY_FIO: [(&str, By); 5] = [
    (ZRAM, By::Zram(Engine::Psync)),
    (ZRAM_URING, By::Zram(Engine::Uring)),
    (OURS, By::Ours("--iodepth=1")),
    (OURS_DEEP, By::Ours("--iodepth=32 --iodepth_batch_submit=8 --iodepth_batch_complete_max=8")),
    (FIO_ALONE, By::Nothing),
];

/// The cells of a row that fio drives.
pub(super) fn cells(
    settings: &Settings,
    row: &'static AimedRow,
    jobs: u32,
    bytes: u64,
) -> Vec<Cell> {
    // The published lines are about fio's own data; for the corpus the two sides are enough.
    let few = settings.quick || row.data == FillData::Corpus;
    let overhead = if settings.quick { OVERHEAD_QUICK } else { OVERHEAD };
    let listed = BY_FIO.iter().filter(|(name, _)| !few || [ZRAM, OURS].contains(name));
    let mut cells = Vec::new();
    for &(name, by) in listed {
        let settings = settings.clone();
        let body = move |round: &Round<'_>| measure(round, &settings, row, by, jobs, bytes);
        cells.push(Cell::new(name, row.workload.name, jobs, body).overhead(overhead));
    }
    cells
}

pub(super) fn measure(
    round: &Round<'_>,
    settings: &Settings,
    row: &AimedRow,
    by: By,
    jobs: u32,
    bytes: u64,
) -> Result<Sample, LabError> {
    let half = if row.does == Does::Read { "" } else { HALF };
    let options = format!("{COMMON} {} {half} --numjobs={jobs}", asked(row.does).0);
    let runtime = round.duration.max(RUNTIME_MIN);
    let run = |fio: Fio| fio.run(round.warm_up, runtime, round.stop);
    let filling = Filling::whole(row.data, bytes);
    match by {
        By::Zram(engine) => {
            let device = filling.zram(&settings.scratch, round)?;
            let fio = Fio::new(&format!("{} {options}", engine.options()));
            let report = run(fio.option("filename", device.path().display()))?;
            Ok(engine.sample(&report, settings.processors))
        }
        By::Ours(depth) => {
            let load = filling.snapshot(&settings.scratch, round)?;
            let dev = format!("ram:///r?size={bytes}&algo={ALGORITHM}&load={}", load.display());
            let fio = Fio::on_engine(settings, &dev, None, &format!("{depth} {options}"))?;
            Ok(run(fio.option("filename", "r"))?.sample(settings.processors))
        }
        By::Nothing => {
            let fio = Fio::new(&format!("--ioengine=null {options}")).option("size", bytes);
            Ok(run(fio)?.sample(settings.processors))
        }
    }
}
