//! `smr-append`: the cost on a shingled disk of appends that a driver makes of writes.

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Published, Variant, VariantRole, Workload};
use crate::experiments::zone_append::{WriteMethod, ZONES, blocks, open};
use crate::metric::Metric;
use crate::sample::{Round, Sample};

/// The experiment's name on the command line.
pub const NAME: &str = "smr-append";

/// A 14 TB drive with simulated times, under the scheduler that such drives need.
const DEVICE: &str = "smr:///s?size=14T&zone_size=256M&zone_nr_conv=0&timing=1\
                      &scheduler=mq-deadline";

const WRITE: &str = "write-locked";
const APPEND: &str = "append";
const ONE_THREAD: &str = "one-thread";
const MANY_THREADS: &str = "many-threads";

/// The aim is no regression; appends may be slightly slower.
const AIM: f64 = 0.97;

const VARIANTS: [(Variant, WriteMethod); 2] = [
    (
        Variant {
            name: WRITE,
            kind: VariantRole::Before,
            about: "writes at the write pointer, one in flight per zone: a bit per zone is tried, \
                    and the write is requeued if it is set",
        },
        WriteMethod::WriteLocked,
    ),
    (
        Variant {
            name: APPEND,
            kind: VariantRole::Product,
            about: "zone appends through the zonefs library, which the zone gate converts into \
                    writes",
        },
        WriteMethod::Append,
    ),
];

/// The workloads, each with its number of threads.
const WORKLOADS: [(Workload, u32); 2] = [
    (
        Workload {
            name: ONE_THREAD,
            about: "64 KiB blocks by one thread, each to a random one of 8 zones",
        },
        1,
    ),
    (
        Workload {
            name: MANY_THREADS,
            about: "64 KiB blocks by 8 threads, each to a random one of 8 zones",
        },
        8,
    ),
];

/// Builds the experiment.
pub fn build(_settings: &Settings) -> Experiment {
    let mut cells = Vec::new();
    for (workload, jobs) in WORKLOADS {
        for (variant, way) in VARIANTS {
            let body = move |round: &Round<'_>| measure(round, way, jobs);
            cells.push(Cell::new(variant.name, workload.name, jobs, body));
        }
    }
    let compared = |metric| Comparison::new(WRITE, APPEND, metric);
    Experiment {
        name: NAME,
        title: "ordered writes and zone appends on a shingled disk",
        about: "IOPS of synchronous 64 KiB writes and zone appends on a shingled disk. A drive has \
                no append command: the driver converts an append into a write at a write pointer \
                that it caches. Each thread writes one 64 KiB block after the other to zones of an \
                emulated 14 TB drive with the times of a real one (timing=1; the drive's buffer \
                takes the writes), under mq-deadline. The aim is that appends are at most 3 % \
                slower than writes; a gain is not expected. The published rows are those of a real \
                drive.",
        published: published(),
        variants: VARIANTS.map(|variant| variant.0).to_vec(),
        workloads: WORKLOADS.map(|workload| workload.0).to_vec(),
        comparisons: vec![compared(Metric::IOPS).aim(AIM), compared(Metric::CPU_PER_IO)],
        plots: vec![Metric::IOPS, Metric::CPU_PER_IO],
        cells,
    }
}

fn published() -> Vec<Published> {
    let source = "Linux 5.8 (2020), zonefs on a 14 TB SMR disk, synchronous 64 KiB";
    let row = |variant, workload, jobs, value| Published {
        variant,
        workload,
        jobs,
        metric: Metric::IOPS,
        value,
        source,
    };
    vec![
        row(WRITE, ONE_THREAD, 1, 797.0),
        row(APPEND, ONE_THREAD, 1, 806.0),
        row(WRITE, MANY_THREADS, 8, 745.0),
        row(APPEND, MANY_THREADS, 8, 768.0),
    ]
}

fn measure(round: &Round<'_>, way: WriteMethod, jobs: u32) -> Result<Sample, LabError> {
    blocks(round, &open(DEVICE)?, way, jobs, ZONES)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::stop::Stop;

    #[test]
    fn both_ways_get_blocks_onto_the_drive() {
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(5));
        let round = Round { warm_up, duration, number: 0, seed: 7, stop: &stop };
        for (_, way) in VARIANTS {
            for (_, jobs) in WORKLOADS {
                let sample = measure(&round, way, jobs).unwrap();
                assert!(sample.values[0].1 > 0.0, "{way:?} {jobs}: {sample:?}");
            }
        }
    }
}
