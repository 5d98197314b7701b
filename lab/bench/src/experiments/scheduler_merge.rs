//! `scheduler-merge`: whether waiting requests still merge.
//!
//! The published bucket patches were dropped for this reason: a request in a bucket could not be
//! merged and held a tag, and 64 threads that wrote sequentially to one disk lost 72.9 %.

use crate::baseline::{sched_buckets, sched_lock};
use crate::error::LabError;
use crate::experiment::{Cell, Comparison, Experiment, Published, Workload};
use crate::experiments::schedulers::{self, NONE, PRODUCT};
use crate::load::BLOCK_BYTES;
use crate::load::streams::{StreamWriter, Streams};
use crate::load::workers;
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::settings::Settings;

/// The experiment's name on the command line.
pub const NAME: &str = "scheduler-merge";

/// The average length of a request at the device, in bytes.
const REQUEST_BYTES: Metric = Metric::more("request_bytes", "B");
/// The share of all writes that merged into another request.
const MERGED: Metric = Metric::more("merged_share", "");

const THREADS: u32 = 64;

/// A disk with its number of tags, and the number of streams that write to it.
#[derive(Clone, Copy)]
struct Case {
    workload: Workload,
    tags: u32,
    streams: usize,
}

const CASES: [Case; 4] = [
    Case {
        workload: Workload {
            name: "one-stream",
            about: "64 threads write one stream, 4 KiB at a time each; 64 tags",
        },
        tags: 64,
        streams: 1,
    },
    Case {
        workload: Workload {
            name: "four-streams",
            about: "64 threads write four streams, 4 KiB at a time each; 64 tags",
        },
        tags: 64,
        streams: 4,
    },
    Case {
        workload: Workload {
            name: "one-stream-8-tags",
            about: "64 threads write one stream, 4 KiB at a time each; 8 tags, so that they wait",
        },
        tags: 8,
        streams: 1,
    },
    Case {
        workload: Workload {
            name: "four-streams-8-tags",
            about: "64 threads write four streams, 4 KiB at a time each; 8 tags",
        },
        tags: 8,
        streams: 4,
    },
];

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let cases = if settings.quick { &CASES[2..3] } else { &CASES[..] };
    let mut cells = Vec::new();
    for &case in cases {
        for variant in schedulers::NAMES {
            let body = move |round: &Round<'_>| measure(round, variant, case);
            cells.push(Cell::new(variant, case.workload.name, THREADS, body));
        }
    }
    Experiment {
        name: NAME,
        title: "sequential writes by many threads: what still merges",
        about: "64 threads write sequential streams together, each one 4 KiB block at a time, to a \
                null device without data that takes 1 ms for a request whatever its size. A \
                stream's next block is that of whichever thread asks first, so neighbours are in \
                flight on different channels, and only a scheduler can merge them. What is merged \
                is counted where requests reach the device. With as many tags as threads nothing \
                has to wait, and what does not wait does not merge; with fewer, each merge is one \
                I/O more per tag.",
        published: published(),
        variants: schedulers::variants(),
        workloads: cases.iter().map(|case| case.workload).collect(),
        comparisons: comparisons(),
        plots: vec![Metric::IOPS, REQUEST_BYTES],
        cells,
    }
}

fn measure(round: &Round<'_>, variant: &'static str, case: Case) -> Result<Sample, LabError> {
    let uri = format!(
        "null:///m?size=64G&bs=4096&irqmode=timer&completion_nsec=1000000&hw_queue_depth={}",
        case.tags
    );
    let (disk, tap) = schedulers::open_tapped(variant, &uri)?;
    let streams = Streams::new(&*disk, case.streams);
    let writers = (0..THREADS as usize).map(|number| StreamWriter::open(&*disk, &streams, number));
    let writers = writers.collect::<Result<Vec<_>, _>>()?;
    let outcome = workers::run(writers, round, || tap.reading())?;
    let (size, merged) = outcome.gauge.1.since(outcome.gauge.0).size_and_merged(BLOCK_BYTES);
    Ok(outcome.sample(case.workload.name)?.with(REQUEST_BYTES, size).with(MERGED, merged))
}

fn comparisons() -> Vec<Comparison> {
    // The aim is to be within the noise of the one lock, which merges under the lock.
    let lock = |metric| Comparison::new(sched_lock::PARKING, PRODUCT, metric).aim(1.0);
    let bucket = |metric| Comparison::new(sched_buckets::NAME, PRODUCT, metric);
    vec![
        lock(Metric::IOPS),
        lock(REQUEST_BYTES),
        Comparison::new(sched_lock::SPINNING, PRODUCT, REQUEST_BYTES),
        bucket(Metric::IOPS),
        bucket(REQUEST_BYTES),
        Comparison::new(NONE, PRODUCT, Metric::IOPS),
    ]
}

fn published() -> Vec<Published> {
    Vec::new()
}
