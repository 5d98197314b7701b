//! `scheduler-kernel`: the published fio line on our schedulers, and on the running kernel's own.
//!
//! `fio --ioscheduler=mq-deadline --numjobs=72 --iodepth=128 --iodepth_batch_submit=64
//! --iodepth_batch_complete=64 --rw=randread`, by our engine on a null device, and by io_uring on a
//! loop device over memory, which the kernel's mq-deadline and none schedule.

use std::time::Duration;

use blockyard_baselines::{sched_buckets, sched_lock};

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Published, Variant, VariantRole, Workload};
use crate::experiments::schedulers::{NONE, PRODUCT};
use crate::machine::Clocks;
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::tools::fio::Fio;
use crate::tools::loop_device::LoopDevice;

/// The experiment's name on the command line.
pub const NAME: &str = "scheduler-kernel";

/// The CPU time of the whole machine per I/O: the kernel executes a loop device's I/Os in threads
/// of its own, which fio does not see.
const MACHINE_CPU: Metric = Metric::less("machine_cpu_per_io", "ns");

const KERNEL_DEADLINE: &str = "kernel-mq-deadline";
const KERNEL_NONE: &str = "kernel-none";

/// The devices: as large as the published one.
const DEVICE: &str = "null:///s?size=250G";
const LOOP_BYTES: u64 = 250 << 30;
/// The options that all runs of the published line share.
const COMMON: &str = "--bs=4096 --gtod_reduce=1 --invalidate=1 --norandommap --rw=randread \
                      --buffered=0";
/// The least run time in which each of the jobs gets its turn on a processor.
const RUNTIME_MIN: Duration = Duration::from_millis(500);
/// The time that starting and ending fio takes.
const OVERHEAD: Duration = Duration::from_millis(900);

/// The workloads, each with its number of jobs and its own options.
const WORKLOADS: [(Workload, u32, &str); 3] = [
    (
        Workload {
            name: "published-line",
            about: "4 KiB random reads by stock fio: --ioscheduler=mq-deadline --numjobs=72 \
                    --iodepth=128 --iodepth_batch_submit=64 --iodepth_batch_complete=64 \
                    --rw=randread --bs=4096",
        },
        72,
        "--iodepth=128 --iodepth_batch_submit=64 --iodepth_batch_complete=64",
    ),
    (
        Workload { name: "one-job", about: "the line of `published-line` with --numjobs=1" },
        1,
        "--iodepth=128 --iodepth_batch_submit=64 --iodepth_batch_complete=64",
    ),
    (
        Workload {
            name: "shallow",
            about: "the line of `published-line` with --numjobs=32 --iodepth=4 and without batches",
        },
        32,
        "--iodepth=4",
    ),
];

/// The owner of the scheduler.
#[derive(Clone, Copy)]
enum Whose {
    /// Our scheduler with our engine, as a baseline or as the product.
    Ours(Option<&'static str>),
    /// The kernel's scheduler, on a loop device.
    Kernels,
}

/// The variants, each with the scheduler's name as fio takes it.
const VARIANTS: [(Variant, Whose, &str); 7] = [
    (
        Variant {
            name: PRODUCT,
            kind: VariantRole::Product,
            about: "our fio engine and the product's mq-deadline",
        },
        Whose::Ours(None),
        "mq-deadline",
    ),
    (
        Variant {
            name: sched_lock::SPINNING,
            kind: VariantRole::Before,
            about: "our fio engine and mq-deadline under one spin lock, taken for each request",
        },
        Whose::Ours(Some(sched_lock::SPINNING)),
        "mq-deadline",
    ),
    (
        Variant {
            name: sched_lock::PARKING,
            kind: VariantRole::Before,
            about: "our fio engine and mq-deadline under one lock that parks its waiters",
        },
        Whose::Ours(Some(sched_lock::PARKING)),
        "mq-deadline",
    ),
    (
        Variant {
            name: sched_buckets::NAME,
            kind: VariantRole::After,
            about: "our fio engine and mq-deadline with 32 buckets and a dispatching bit",
        },
        Whose::Ours(Some(sched_buckets::NAME)),
        "mq-deadline",
    ),
    (
        Variant {
            name: NONE,
            kind: VariantRole::Product,
            about: "our fio engine without a scheduler",
        },
        Whose::Ours(None),
        "none",
    ),
    (
        Variant {
            name: KERNEL_DEADLINE,
            kind: VariantRole::Peer,
            about: "the kernel's mq-deadline: fio's io_uring on a loop device over memory",
        },
        Whose::Kernels,
        "mq-deadline",
    ),
    (
        Variant {
            name: KERNEL_NONE,
            kind: VariantRole::Peer,
            about: "the kernel's none: fio's io_uring on a loop device over memory",
        },
        Whose::Kernels,
        "none",
    ),
];

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let workloads = if settings.quick { &WORKLOADS[..1] } else { &WORKLOADS[..] };
    let mut cells = Vec::new();
    for &(workload, jobs, part) in workloads {
        for (variant, whose, scheduler) in VARIANTS {
            let options = format!("{COMMON} {part} --numjobs={jobs} --ioscheduler={scheduler}");
            let settings = settings.clone();
            let body = move |round: &Round<'_>| match whose {
                Whose::Ours(before) => ours(round, &settings, before, &options),
                Whose::Kernels => kernels(round, &settings, scheduler, &options),
            };
            cells.push(Cell::new(variant.name, workload.name, jobs, body).overhead(OVERHEAD));
        }
    }
    Experiment {
        name: NAME,
        title: "the published fio line, compared with the kernel's own schedulers",
        about: "IOPS and CPU time of the whole machine per I/O (ns) of stock fio with the \
                published command line; only the engine and the device differ from it. Our \
                schedulers run in fio's process on a null device. The kernel's schedulers run on a \
                loop device over memory, because null_blk needs a kernel with that module. A loop \
                device's I/Os pass through a system call, the loop driver and its threads, which \
                is most of their cost. Compare therefore the two rows of the kernel with each \
                other, and our rows with each other. Random reads hardly ever merge. If this \
                process may not make a loop device, the rows of the kernel are missing and the \
                report states the reason.",
        published: published(),
        variants: VARIANTS.map(|(variant, ..)| variant).to_vec(),
        workloads: workloads.iter().map(|(workload, ..)| *workload).collect(),
        comparisons: comparisons(),
        plots: vec![Metric::IOPS, MACHINE_CPU],
        cells,
    }
}

/// Runs the line with our engine.
fn ours(
    round: &Round<'_>,
    settings: &Settings,
    before: Option<&str>,
    options: &str,
) -> Result<Sample, LabError> {
    let fio = Fio::on_engine(settings, DEVICE, before, options)?.option("filename", "/dev/nullb0");
    timed(round, settings, &fio)
}

/// Runs the line on a loop device.
fn kernels(
    round: &Round<'_>,
    settings: &Settings,
    scheduler: &str,
    options: &str,
) -> Result<Sample, LabError> {
    let device = LoopDevice::new(LOOP_BYTES, 512)?;
    device.set_scheduler(scheduler)?;
    let fio = Fio::new(&format!("--ioengine=io_uring {options}"))
        .option("filename", device.path().display());
    let sample = timed(round, settings, &fio)?;
    match device.scheduler()? {
        now if now == scheduler => Ok(sample),
        now => {
            Err(LabError::failed(device.path().display().to_string(), format!("it is under {now}")))
        }
    }
}

fn timed(round: &Round<'_>, settings: &Settings, fio: &Fio) -> Result<Sample, LabError> {
    let before = Clocks::now();
    // The whole run is measured, because the machine's CPU times do not exclude a warm-up.
    let runtime = round.warm_up + round.duration.max(RUNTIME_MIN);
    let report = fio.run(Duration::ZERO, runtime, round.stop)?;
    let sample = report.sample(settings.processors);
    let busy = before.zip(Clocks::now()).map(|(before, now)| now.busy_since(&before));
    Ok(match busy {
        Some(busy) => sample.with(MACHINE_CPU, busy.as_nanos() as f64 / report.ios as f64),
        None => sample,
    })
}

fn comparisons() -> Vec<Comparison> {
    let mut comparisons = Vec::new();
    for metric in [Metric::IOPS, Metric::CPU_PER_IO] {
        comparisons.push(Comparison::new(sched_lock::SPINNING, PRODUCT, metric));
        comparisons.push(Comparison::new(sched_lock::PARKING, PRODUCT, metric));
        comparisons.push(Comparison::new(sched_buckets::NAME, PRODUCT, metric));
    }
    comparisons.push(Comparison::new(NONE, PRODUCT, Metric::CPU_PER_IO).cost());
    comparisons.push(Comparison::new(KERNEL_DEADLINE, PRODUCT, Metric::IOPS));
    comparisons.push(Comparison::new(KERNEL_NONE, KERNEL_DEADLINE, MACHINE_CPU).cost());
    comparisons
}

fn published() -> Vec<Published> {
    let row = |variant, workload, jobs, kilo_iops: f64, source| Published {
        variant,
        workload,
        jobs,
        metric: Metric::IOPS,
        value: kilo_iops * 1000.0,
        source,
    };
    let fio = "the published fio line on null_blk, Linux 6.7 (January 2024), about";
    let poc = "Linux block layer, proof of concept of January 2024, single-queue device, 32-thread \
               desktop";
    vec![
        row(sched_lock::SPINNING, "published-line", 72, 150.0, fio),
        row(sched_lock::SPINNING, "one-job", 1, 1100.0, fio),
        row(sched_lock::SPINNING, "shallow", 32, 1313.0, poc),
        row(sched_buckets::NAME, "shallow", 32, 2300.0, poc),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop::Stop;

    /// The rows of the kernel need no engine, and use the kernel's scheduler.
    #[test]
    fn the_kernels_rows_are_measured() {
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(10));
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
        let options = format!("{COMMON} --iodepth=4 --numjobs=2 --ioscheduler=mq-deadline");
        let sample = kernels(&round, &settings, "mq-deadline", &options).unwrap();
        assert!(sample.values.iter().all(|value| value.1 > 0.0), "{sample:?}");
        let error = ours(&round, &settings, None, &options).unwrap_err().to_string();
        assert_eq!(error, "libblockyard_fio-*.so is missing; run `make fio`");
    }
}
