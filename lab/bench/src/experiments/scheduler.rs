//! `scheduler`: the cost of one scheduler that all submitters of a device share.

use blockyard_baselines::{sched_buckets, sched_lanes, sched_lock};

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Published, Variant, VariantRole, Workload};
use crate::experiments::schedulers::{self, NONE, PRODUCT};
use crate::load::{self, Load, Pattern};
use crate::metric::Metric;
use crate::sample::{Round, Sample};

/// The experiment's name on the command line.
pub const NAME: &str = "scheduler";

/// The device: without data, as in the published command line.
const DEVICE: &str = "null:///s?size=250G&bs=512&hw_queue_depth=128";

const ALONE: &str = "product-alone";
/// The aim for the CPU time of a single submitter's I/O, in nanoseconds.
const AIM_NS: f64 = 100.0;
/// The queue depth of the single submitter that is the reference.
const ALONE_DEPTH: usize = 128;

const SHALLOW: &str = "depth-4";
const DEEP: &str = "depth-128";

const JOBS: [u32; 4] = [2, 8, 32, 72];
const JOBS_DEEP: [u32; 5] = [1, 2, 8, 32, 72];
const JOBS_QUICK: [u32; 2] = [1, 8];

/// The workloads, each with its I/Os in flight per thread, and the numbers of threads.
const WORKLOADS: [(Workload, usize, &[u32]); 2] = [
    (Workload { name: SHALLOW, about: "4 KiB random reads, 4 in flight per submitter" }, 4, &JOBS),
    (
        Workload { name: DEEP, about: "4 KiB random reads, 128 in flight per submitter" },
        128,
        &JOBS_DEEP,
    ),
];

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let mut cells = Vec::new();
    for (workload, depth, jobs) in WORKLOADS {
        let jobs = if settings.quick { &JOBS_QUICK } else { jobs };
        for &jobs in jobs {
            cells.extend(at(settings, workload.name, depth, jobs));
        }
    }
    Experiment {
        name: NAME,
        title: "one scheduler lock, buckets, and submit rings with a combining lock and leases",
        about: "Throughput (IOPS) and CPU time per I/O (ns) of one scheduler that many submitters \
                share. Threads read a null device without data at random offsets as fast as they \
                can, each through its own channel; all requests pass through the one scheduler. \
                Except for `none`, all variants have the same policy (mq-deadline), stack and load \
                generator, in one process; they differ in which thread may work on the policy, and \
                when. A thread submits a batch and reaps all of it before the next batch. \
                `product-alone` is the product with one submitter at depth 128, measured next to \
                each cell: the total of many submitters must not fall below it. `product-lanes` is \
                the product without leases: the cost for every submitter while a request waits in \
                the scheduler. On few CPUs submitters run in turn, so that the cost of a lock that \
                parks its waiters, high on many CPUs, hardly shows.",
        published: published(),
        variants: variants(),
        workloads: WORKLOADS.map(|(workload, ..)| workload).to_vec(),
        comparisons: comparisons(),
        plots: vec![Metric::IOPS, Metric::CPU_PER_IO],
        cells,
    }
}

/// The cells of a workload with `jobs` threads.
fn at(settings: &Settings, workload: &'static str, depth: usize, jobs: u32) -> Vec<Cell> {
    let processors = settings.processors;
    let cell = |label, variant, threads: u32, depth| {
        let load = Load { pattern: Pattern::RandomRead, threads: threads as usize, depth };
        let body = move |round: &Round<'_>| measure(round, variant, &load, processors);
        Cell::new(label, workload, jobs, body)
    };
    let mut cells: Vec<Cell> =
        schedulers::NAMES.map(|variant| cell(variant, variant, jobs, depth)).into();
    cells.push(cell(sched_lanes::NAME, sched_lanes::NAME, jobs, depth));
    if jobs as usize <= processors {
        cells.insert(0, cell(sched_lock::QUEUED, sched_lock::QUEUED, jobs, depth));
    }
    if jobs > 1 {
        cells.push(cell(ALONE, PRODUCT, 1, ALONE_DEPTH));
    }
    cells
}

fn measure(
    round: &Round<'_>,
    variant: &'static str,
    load: &Load,
    processors: usize,
) -> Result<Sample, LabError> {
    Ok(load::run(&*schedulers::open(variant, DEVICE)?, load, round)?.sample(processors))
}

fn variants() -> Vec<Variant> {
    let mut variants = schedulers::variants();
    variants.insert(
        0,
        Variant {
            name: sched_lock::QUEUED,
            kind: VariantRole::Before,
            about: "mq-deadline under one ticket spin lock, granted in the order of arrival as \
                    Linux's spin locks are: the published form. If a waiting thread is preempted, \
                    all threads after it in the queue stop, which cannot happen in the kernel; \
                    this variant is therefore measured only with at most as many jobs as CPUs",
        },
    );
    variants.push(Variant {
        name: sched_lanes::NAME,
        kind: VariantRole::Product,
        about: "the product without leases: all requests pass through submit rings, combining lock \
                and completion queue, as while a request of a lower class waits",
    });
    variants.push(Variant {
        name: ALONE,
        kind: VariantRole::Limit,
        about: "the product with one submitter at depth 128; the number of jobs of the row does \
                not apply",
    });
    variants
}

fn comparisons() -> Vec<Comparison> {
    let mut comparisons = vec![
        Comparison::to("100 ns", AIM_NS, PRODUCT, Metric::CPU_PER_IO)
            .under(DEEP)
            .up_to_jobs(1)
            .aim(1.0),
        Comparison::new(ALONE, PRODUCT, Metric::IOPS).from_jobs(2).aim(1.0),
    ];
    for metric in [Metric::IOPS, Metric::CPU_PER_IO] {
        let before = |name| Comparison::new(name, PRODUCT, metric).from_jobs(8);
        let aimed = |comparison: Comparison, aim| match metric == Metric::IOPS {
            true => comparison.aim(aim),
            false => comparison,
        };
        comparisons.push(aimed(before(sched_lock::SPINNING), 3.0));
        comparisons.push(aimed(before(sched_lock::PARKING), 1.2));
        comparisons.push(before(sched_buckets::NAME));
    }
    for before in [sched_lock::SPINNING, sched_lock::PARKING, sched_buckets::NAME] {
        comparisons.push(Comparison::new(before, sched_lanes::NAME, Metric::IOPS).from_jobs(8));
    }
    comparisons.push(Comparison::new(PRODUCT, sched_lanes::NAME, Metric::CPU_PER_IO).cost());
    comparisons.push(Comparison::new(sched_lock::QUEUED, PRODUCT, Metric::IOPS).from_jobs(2));
    comparisons.push(Comparison::new(NONE, PRODUCT, Metric::CPU_PER_IO).cost());
    comparisons
}

fn published() -> Vec<Published> {
    let poc = "Linux block layer, proof of concept of January 2024, single-queue device, 32-thread \
               desktop, random reads";
    let fio = "the published fio line on null_blk, Linux 6.7 (January 2024), about";
    let row = |variant, workload, jobs, kilo_iops: f64, source| Published {
        variant,
        workload,
        jobs,
        metric: Metric::IOPS,
        value: kilo_iops * 1000.0,
        source,
    };
    vec![
        row(sched_lock::SPINNING, DEEP, 1, 3090.0, poc),
        row(sched_lock::SPINNING, SHALLOW, 32, 1313.0, poc),
        row(sched_buckets::NAME, SHALLOW, 32, 2300.0, poc),
        row(sched_lock::SPINNING, DEEP, 1, 1100.0, fio),
        row(sched_lock::SPINNING, DEEP, 72, 150.0, fio),
    ]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::stop::Stop;

    #[test]
    fn every_variant_carries_many_submitters() {
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::from_millis(1), Duration::from_millis(10));
        let round = Round { warm_up, duration, number: 0, seed: 3, stop: &stop };
        let none = std::path::PathBuf::new();
        let settings = Settings {
            quick: true,
            engine: None,
            program: none.clone(),
            lab: "blockyard-lab".into(),
            scratch: none,
            processors: 2,
            peers: Default::default(),
        };
        for cell in build(&settings).cells {
            let sample = (cell.body)(&round).unwrap_or_else(|error| panic!("{cell:?}: {error}"));
            assert!(sample.values.iter().all(|value| value.1 > 0.0), "{cell:?}");
        }
    }
}
