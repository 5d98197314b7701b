//! `fio-engine`: the cost to fio of our engine and its device, compared with fio's own null engine.

use std::time::Duration;

use blockyard_baselines::no_device;

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Variant, VariantRole, Workload};
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::tools::fio::Fio;

/// The experiment's name on the command line.
pub const NAME: &str = "fio-engine";

pub(crate) const NULL: &str = "fio-null";
const ALONE: &str = "engine-alone";
const ENGINE: &str = "engine";

/// The device below our engine, as large as the file of fio's own engine.
const DEVICE: &str = "null:///n0?size=10G";
/// The options of the fio command line that both engines share.
const COMMON: &str = "--size=10G --rw=randread --bs=4k --gtod_reduce=1 --norandommap";
/// The time that starting and ending fio takes.
const OVERHEAD: Duration = Duration::from_millis(400);
/// The least ratio: our engine may lose five per cent.
const AIM: f64 = 0.95;

/// The workloads, each with its own fio options.
const WORKLOADS: [(Workload, &str); 2] = [
    (
        Workload {
            name: "read-depth-1",
            about: "4 KiB random reads, one at a time: --iodepth=1 --gtod_reduce=1 --norandommap",
        },
        "--iodepth=1",
    ),
    (
        Workload {
            name: "read-depth-64-batched",
            about: "4 KiB random reads in batches: --iodepth=64 --iodepth_batch_submit=64 \
                    --iodepth_batch_complete=64 --gtod_reduce=1 --norandommap",
        },
        "--iodepth=64 --iodepth_batch_submit=64 --iodepth_batch_complete=64",
    ),
];

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let jobs: &[u32] = if settings.quick { &[1] } else { &[1, 2] };
    let mut cells = Vec::new();
    for (workload, part) in WORKLOADS {
        for &jobs in jobs {
            for variant in [NULL, ALONE, ENGINE] {
                let settings = settings.clone();
                let body = move |round: &Round<'_>| {
                    let fio = line(&settings, variant, part)?.option("numjobs", jobs);
                    let report = fio.run(round.warm_up, round.duration, round.stop)?;
                    Ok(sample(&report.sample(settings.processors)))
                };
                cells.push(Cell::new(variant, workload.name, jobs, body).overhead(OVERHEAD));
            }
        }
    }
    Experiment {
        name: NAME,
        title: "our engine compared with fio's own null engine",
        about: "CPU cost to fio of our I/O engine and of the null device that the engine opens. \
                Every variant runs under the same fio command line. fio's own null engine \
                completes an I/O without any work, so it is the upper limit of fio itself. \
                `engine-alone` is our engine without a device: it shows the engine's own cost, \
                which may be 5 % at most. `engine` adds the null device, which checks, executes \
                and counts each I/O. The figures are I/Os per second of CPU time of fio's threads: \
                this metric stays valid on a loaded machine.",
        published: Vec::new(),
        variants: vec![
            Variant {
                name: NULL,
                kind: VariantRole::Limit,
                about: "fio's own null engine: --ioengine=null",
            },
            Variant {
                name: ALONE,
                kind: VariantRole::Limit,
                about: "our engine without a device: --ioengine=external:ENGINE \
                        --dev=null:///n0?size=10G --before=no-device",
            },
            Variant {
                name: ENGINE,
                kind: VariantRole::Product,
                about: "our engine and the null device: --ioengine=external:ENGINE \
                        --dev=null:///n0?size=10G",
            },
        ],
        workloads: WORKLOADS.map(|(workload, _)| workload).to_vec(),
        comparisons: vec![
            Comparison::new(NULL, ALONE, Metric::IOS_PER_CPU_SECOND).aim(AIM),
            Comparison::new(NULL, ENGINE, Metric::IOS_PER_CPU_SECOND),
        ],
        plots: vec![Metric::IOS_PER_CPU_SECOND, Metric::CPU_PER_IO],
        cells,
    }
}

fn line(settings: &Settings, variant: &str, part: &str) -> Result<Fio, LabError> {
    let options = format!("{COMMON} {part}");
    match variant {
        NULL => Ok(Fio::new(&format!("--ioengine=null {options}"))),
        ALONE => Fio::on_engine(settings, DEVICE, Some(no_device::NAME), &options),
        _ => Fio::on_engine(settings, DEVICE, None, &options),
    }
}

/// The sample, with I/Os per second of CPU time first, because the experiment compares those.
fn sample(given: &Sample) -> Sample {
    let mut values = given.values.clone();
    values.sort_by_key(|(metric, _)| *metric != Metric::IOS_PER_CPU_SECOND);
    Sample { values, ..given.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            quick: false,
            engine: Some("/l/e.so".into()),
            program: "by".into(),
            lab: "blockyard-lab".into(),
            scratch: "/tmp".into(),
            processors: 2,
            peers: Default::default(),
        }
    }

    #[test]
    fn the_lines_are_the_same_but_for_the_engine() {
        let text = |variant| {
            let line = line(&settings(), variant, "--iodepth=1").unwrap();
            line.line(Duration::ZERO, Duration::from_secs(1)).text()
        };
        let ours = "--ioengine=external:/l/e.so --dev=null:///n0?size=10G";
        assert_eq!(text(ENGINE), text(NULL).replace("--ioengine=null", ours));
        let alone = format!("{ours} --before=no-device");
        assert_eq!(text(ALONE), text(NULL).replace("--ioengine=null", &alone));
        assert!(text(NULL).contains("--ioengine=null --size=10G"), "{}", text(NULL));
    }

    #[test]
    fn every_cell_has_its_variant_and_workload() {
        let experiment = build(&settings());
        assert_eq!(experiment.cells.len(), 12);
        for cell in &experiment.cells {
            assert!(experiment.variants.iter().any(|variant| variant.name == cell.variant));
            assert!(experiment.workloads.iter().any(|workload| workload.name == cell.workload));
        }
    }

    #[test]
    fn the_requested_rows_come_first() {
        let given = Sample::of(Metric::IOPS, 1.0).with(Metric::IOS_PER_CPU_SECOND, 2.0);
        let want = [(Metric::IOS_PER_CPU_SECOND, 2.0), (Metric::IOPS, 1.0)];
        assert_eq!(sample(&given).values, want);
    }
}
