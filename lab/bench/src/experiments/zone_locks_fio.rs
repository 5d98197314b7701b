//! The cells of `zone-locks` that stock fio drives, by the published command lines.
//!
//! fio has a lock per zone of its own (`zonemode=zbd`), which all its jobs share, so it shows less
//! of a gain than the threads of [`crate::load`]. Its rows are here because fio's figures are the
//! published ones.

use std::time::Duration;

use blockyard_baselines::{lock_per_zone, one_lock};

use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Published, Workload};
use crate::metric::Metric;
use crate::sample::Round;
use crate::tools::fio::Fio;

/// The published number of jobs.
const JOBS: u32 = 96;
/// The least run time in which each of 96 jobs gets its turn on few processors. Threads in process
/// wait for one another and need less.
const RUNTIME_MIN: Duration = Duration::from_millis(300);
/// The time that starting and ending fio takes, and the longer run.
const OVERHEAD: Duration = Duration::from_millis(700);
/// The published options, except the operation.
const COMMON: &str = "--filename=z --zonemode=zbd --direct=1 --bs=4k --gtod_reduce=1 --numjobs=96";

/// The reason for the smaller differences of these cells.
const WHY_LESS: &str = "With fio the variants differ less than in process. fio itself uses most of \
                        the CPU time per I/O (compare the same workload in process), and it has \
                        its own lock per zone, so that on few CPUs a lock of the device is seldom \
                        the bottleneck.";

const READ: Workload = Workload {
    name: "random-read-fio",
    about: "4 KiB random reads by stock fio: --zonemode=zbd --direct=1 --bs=4k --rw=randread \
            --read_beyond_wp=1 --iodepth=8 --numjobs=96",
};
const WRITE: Workload = Workload {
    name: "random-write-fio",
    about: "4 KiB writes to random zones by stock fio: --zonemode=zbd --direct=1 --bs=4k \
            --rw=randwrite --iodepth=1 --numjobs=96",
};

/// The workloads, each with its own options and the ratio that is the aim.
const WORKLOADS: [(Workload, &str, f64); 2] = [
    (READ, "--rw=randread --read_beyond_wp=1 --iodepth=8", 3.0),
    (WRITE, "--rw=randwrite --iodepth=1", 1.5),
];

/// The workloads of a run: a quick run has only the reads.
fn listed(settings: &Settings) -> &'static [(Workload, &'static str, f64)] {
    if settings.quick { &WORKLOADS[..1] } else { &WORKLOADS }
}

/// The workloads, without their options and aims.
pub(super) fn workloads(settings: &Settings) -> impl Iterator<Item = Workload> {
    listed(settings).iter().map(|(workload, ..)| *workload)
}

/// The cells, on the device `dev`. A variant that is a baseline is selected by `before=`.
pub(super) fn cells(
    settings: &Settings,
    dev: &'static str,
    variants: &[&'static str],
    product: &'static str,
) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (workload, part, _) in listed(settings) {
        for &variant in variants {
            let before = (variant != product).then_some(variant);
            let settings = settings.clone();
            let body = move |round: &Round<'_>| {
                let fio = Fio::on_engine(&settings, dev, before, &format!("{COMMON} {part}"))?;
                let duration = round.duration.max(RUNTIME_MIN);
                let report = fio.run(round.warm_up, duration, round.stop)?;
                let mut sample = report.sample(settings.processors);
                sample.notes.push(WHY_LESS.to_owned());
                Ok(sample)
            };
            cells.push(Cell::new(variant, workload.name, JOBS, body).overhead(OVERHEAD));
        }
    }
    cells
}

/// The published figures of these rows, which use the published command lines.
pub(super) fn published(settings: &Settings, source: &'static str) -> Vec<Published> {
    let row = |variant, workload: Workload, kilo_iops: f64| Published {
        variant,
        workload: workload.name,
        jobs: JOBS,
        metric: Metric::IOPS,
        value: kilo_iops * 1000.0,
        source,
    };
    let mut rows = vec![
        row(one_lock::NAME, READ, 1361.0),
        row(lock_per_zone::NAME, READ, 4096.0),
        row(one_lock::NAME, WRITE, 465.0),
        row(lock_per_zone::NAME, WRITE, 456.0),
    ];
    rows.retain(|row| workloads(settings).any(|workload| workload.name == row.workload));
    rows
}

/// The comparisons and their aims, by wall time and by CPU time.
pub(super) fn comparisons(
    settings: &Settings,
    product: &'static str,
) -> impl Iterator<Item = Comparison> {
    listed(settings).iter().map(move |(workload, _, aim)| {
        Comparison::new(one_lock::NAME, product, Metric::IOPS).under(workload.name).aim(*aim)
    })
}
