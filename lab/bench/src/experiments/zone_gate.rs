//! `zone-gate`: the cost of keeping the writes of a zone in order, by the place where it is done.

use std::sync::Arc;

use blockyard_baselines::write_lock::{self, WriteLocks};
use blockyard_core::channel::ChannelConfig;
use blockyard_core::{Composed, Device, Disk};
use blockyard_null::{Null, NullConfig};
use blockyard_yard::{stack, uri};

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Published, Variant, VariantRole, Workload};
use crate::load::{self, Load, Pattern, UNDISTURBED_IOPS};
use crate::metric::Metric;
use crate::sample::Round;

/// The experiment's name on the command line.
pub const NAME: &str = "zone-gate";

/// 512 GiB without data, in 4 KiB blocks.
const SIZE: u64 = 512 << 30;
const PIPELINE: &str = "pipeline";
const PLUG: &str = "plug";

const OWN: &str = "one-zone-each";
const OWN_DEEP: &str = "one-zone-each-16";
const RANDOM_DEEP: &str = "random-zones-16";

/// The workloads, each with its zones per job and its I/Os in flight.
const WORKLOADS: [(Workload, u32, usize); 3] = [
    (
        Workload {
            name: OWN,
            about: "4 KiB writes, one in flight per job, each job to its own zone",
        },
        1,
        1,
    ),
    (
        Workload {
            name: OWN_DEEP,
            about: "4 KiB writes, 16 in flight per job, each job to its own zone",
        },
        1,
        16,
    ),
    (
        Workload {
            name: RANDOM_DEEP,
            about: "4 KiB writes to a random one of 256 zones per job, 16 in flight per job",
        },
        256,
        16,
    ),
];

const VARIANTS: [Variant; 3] = [
    Variant {
        name: write_lock::NAME,
        kind: VariantRole::Before,
        about: "a bit per zone, tried at dispatch; each dispatch tries all waiting writes again",
    },
    Variant {
        name: PLUG,
        kind: VariantRole::Product,
        about: "zone write plug: one write per zone in flight; later writes wait above the tags",
    },
    Variant {
        name: PIPELINE,
        kind: VariantRole::Product,
        about: "no gate: the device executes writes in the order of submission",
    },
];

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let processors = settings.processors;
    let all_jobs: &[u32] = if settings.quick { &[1, 2] } else { &[1, 2, 8] };
    let mut cells = Vec::new();
    for (workload, zones, depth) in WORKLOADS {
        for &jobs in all_jobs {
            for variant in VARIANTS {
                let load = Load { pattern: Pattern::RandomWrite, threads: jobs as usize, depth };
                let body = move |round: &Round<'_>| {
                    let disk = open(variant.name, zones * jobs)?;
                    Ok(load::run(&*disk, &load, round)?.sample(processors))
                };
                cells.push(Cell::new(variant.name, workload.name, jobs, body));
            }
        }
    }
    let compared = |before, after| Comparison::new(before, after, Metric::CPU_PER_IO);
    Experiment {
        name: NAME,
        title: "write order within a zone: a lock in the scheduler, a gate above it, or none",
        about: "CPU time per I/O (ns) of the method that keeps the writes of a zone in order. \
                Threads write at the write pointers of zones without data, on a null device that \
                completes writes at once, through the same stack and load generator: only that \
                method differs. No two jobs write to one zone and no writes merge, so that the \
                variants differ by the cost of the method alone. The published figures are MB/s of \
                Linux, converted to IOPS, on a null device with 16 cores and 32 threads.",
        published: published(),
        variants: VARIANTS.to_vec(),
        workloads: WORKLOADS.map(|workload| workload.0).to_vec(),
        comparisons: vec![
            compared(write_lock::NAME, PLUG),
            compared(PIPELINE, PLUG),
            Comparison::new(write_lock::NAME, PLUG, UNDISTURBED_IOPS),
            Comparison::new(write_lock::NAME, PIPELINE, UNDISTURBED_IOPS),
        ],
        plots: vec![Metric::CPU_PER_IO, UNDISTURBED_IOPS],
        cells,
    }
}

fn published() -> Vec<Published> {
    let source = "zone write plugging v5 (2024), null_blk, 4096 zones of 256 MB; the lock under \
                  mq-deadline, plugging under none";
    let row = |variant, workload, iops: f64| Published {
        variant,
        workload,
        jobs: 32,
        metric: Metric::IOPS,
        value: iops,
        source,
    };
    // Converts MB/s of 4 KiB writes into I/Os; random writes are published as I/Os.
    let of = |mb_per_second: f64| mb_per_second * 1e6 / 4096.0;
    vec![
        row(write_lock::NAME, OWN, of(940.0)),
        row(PLUG, OWN, of(2639.0)),
        row(write_lock::NAME, OWN_DEEP, of(840.0)),
        row(PLUG, OWN_DEEP, of(1715.0)),
        row(write_lock::NAME, RANDOM_DEEP, 424e3),
        row(PLUG, RANDOM_DEEP, 344e3),
    ]
}

/// A new device with `zones` zones, whose writes the variant keeps in order.
fn open(variant: &str, zones: u32) -> Result<Arc<dyn Disk>, LabError> {
    let zone_size = (SIZE / u64::from(zones.next_power_of_two())).max(1 << 20);
    let size = zone_size * u64::from(zones);
    if variant != write_lock::NAME {
        let text =
            format!("null:///g?size={size}&bs=4k&zoned=1&zone_size={zone_size}&gate={variant}");
        let spec = uri::parse(&text).map_err(|error| LabError::failed(text.clone(), error))?;
        return Ok(stack::open(&spec).map_err(|error| LabError::failed(text, error))?.disk);
    }
    let config = NullConfig { size, bs: 4096, zoned: true, zone_size, ..NullConfig::default() };
    let null = Null::open(config).map_err(|error| LabError::failed(NAME, error))?;
    let geometry = null
        .geometry()
        .zones
        .clone()
        .ok_or_else(|| LabError::failed(NAME, "a device that was made with zones has none"))?;
    let name = "g".to_owned();
    let depth = ChannelConfig { depth: 256 };
    let disk = Composed::new(name, "null", null, depth);
    Ok(Arc::new(disk.with_gates(WriteLocks::new(geometry))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop::Stop;
    use std::time::Duration;

    #[test]
    fn every_variant_writes_in_order() {
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
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::from_millis(1), Duration::from_millis(5));
        let round = Round { warm_up, duration, number: 0, seed: 3, stop: &stop };
        for cell in build(&settings).cells {
            let sample = (cell.body)(&round).unwrap_or_else(|error| panic!("{cell:?}: {error}"));
            assert!(sample.values[0].1 > 0.0, "{cell:?}");
        }
    }
}
