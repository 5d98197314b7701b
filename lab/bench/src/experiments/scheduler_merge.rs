//! `scheduler-merge`: whether waiting requests still merge.
//!
//! The published bucket patches were dropped for this reason: a request in a bucket could not be
//! merged and held a tag, and 64 threads that wrote sequentially to one disk lost 72.9 %.

use blockyard_baselines::{sched_buckets, sched_lock};

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Published, Workload};
use crate::experiments::schedulers::{self, NONE, PRODUCT};
use crate::load::BLOCK_BYTES;
use crate::load::streams::{StreamWriter, Streams};
use crate::load::workers;
use crate::metric::Metric;
use crate::sample::{Round, Sample};

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
            about: "64 threads write one sequential stream, one 4 KiB write in flight each; 64 \
                    tags",
        },
        tags: 64,
        streams: 1,
    },
    Case {
        workload: Workload {
            name: "four-streams",
            about: "64 threads write four sequential streams, one 4 KiB write in flight each; 64 \
                    tags",
        },
        tags: 64,
        streams: 4,
    },
    Case {
        workload: Workload {
            name: "one-stream-8-tags",
            about: "64 threads write one sequential stream, one 4 KiB write in flight each; 8 \
                    tags, so that requests wait",
        },
        tags: 8,
        streams: 1,
    },
    Case {
        workload: Workload {
            name: "four-streams-8-tags",
            about: "64 threads write four sequential streams, one 4 KiB write in flight each; 8 \
                    tags, so that requests wait",
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
        title: "merging of sequential writes by many threads",
        about: "Whether the scheduler merges writes of different channels, and the resulting IOPS. \
                64 threads write sequential streams together, each with one 4 KiB write in flight, \
                to a null device without data that takes 1 ms per request of any size. The first \
                thread that asks gets the next block of a stream, so that adjacent blocks are in \
                flight on different channels, and only a shared scheduler can merge them. \
                `request_bytes` is the mean length of a request at the device, and `merged_share` \
                the share of writes that merged. With as many tags as threads no request waits, \
                and only waiting requests merge; with fewer tags each merge is one more I/O per \
                tag.",
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
