//! `nvme-threads`: connections of our NVMe/TCP target that share threads, compared with a thread
//! for each.

use super::nvme::{self, NVME_NULL_NQN, OwnServer, QueueLoad, load};
use crate::error::LabError;
use crate::experiment::{Cell, Comparison, Experiment, Settings, Variant, VariantRole, Workload};
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::tools::nvme_client::{NvmeCommands, NvmeController, NvmeOp};

/// The experiment's name on the command line.
pub const NAME: &str = "nvme-threads";

/// The most I/O queues of a controller.
const CONTROLLER_QUEUES: u32 = 32;

const EACH: &str = "thread-each";
const PROCESSORS: &str = "thread-per-processor";
const ONE: &str = "one-thread";

/// A variant, and the options of its server.
const VARIANTS: [(Variant, &str); 3] = [
    (
        Variant {
            name: EACH,
            kind: VariantRole::Product,
            about: "as many threads as connections: --nvme-threads 1024",
        },
        "--nvme-threads 1024",
    ),
    (
        Variant {
            name: PROCESSORS,
            kind: VariantRole::Product,
            about: "as many threads as processors: the default",
        },
        "",
    ),
    (
        Variant { name: ONE, kind: VariantRole::Product, about: "one thread: --nvme-threads 1" },
        "--nvme-threads 1",
    ),
];

const LOADS: [QueueLoad; 2] = [
    load(NvmeOp::Read, 4096, 1, ["read-depth-1", "4 KiB random reads, 1 in flight on each queue"]),
    load(
        NvmeOp::Read,
        4096,
        32,
        ["read-depth-32", "4 KiB random reads, 32 in flight on each queue"],
    ),
];

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let queues: &[u32] = if settings.quick { &[4] } else { &[1, 4, 64, 512] };
    let mut cells = Vec::new();
    for load in &LOADS {
        for &jobs in queues {
            for (variant, options) in &VARIANTS {
                let settings = settings.clone();
                let body = move |round: &Round<'_>| measure(options, load, jobs, &settings, round);
                let cell = Cell::new(variant.name, load.workload.name, jobs, body);
                cells.push(cell.overhead(nvme::OVERHEAD));
            }
        }
    }
    let compare = |before, after| {
        [Metric::IOPS, Metric::CPU_PER_IO, Metric::P99]
            .map(|metric| Comparison::new(before, after, metric))
    };
    Experiment {
        name: NAME,
        title: "Threads of the NVMe/TCP target",
        about: "Queues of NVMe hosts that share the threads of the target, and the same with a \
                thread for each queue. The device has no memory and completes at once. The clients \
                are those of the experiment `nvme`, one thread for each queue, on the same \
                processors. CPU time (`cpu_per_io`, ns) is that of the server.",
        published: Vec::new(),
        variants: VARIANTS.map(|(variant, _)| variant).into(),
        workloads: LOADS.iter().map(|load| load.workload).collect::<Vec<Workload>>(),
        comparisons: [compare(EACH, PROCESSORS), compare(EACH, ONE)].concat(),
        plots: vec![Metric::IOPS, Metric::CPU_PER_IO, Metric::P99],
        cells,
    }
}

fn measure(
    options: &str,
    load: &QueueLoad,
    jobs: u32,
    settings: &Settings,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let server = OwnServer::start(settings, options, round.stop)?;
    let connect = |_| NvmeController::connect(server.nvme, NVME_NULL_NQN);
    let controllers =
        (0..jobs.div_ceil(CONTROLLER_QUEUES)).map(connect).collect::<Result<Vec<_>, _>>()?;
    let commands = NvmeCommands { op: load.op, len: load.len, depth: load.depth };
    let open = |job: u32| {
        let (controller, queue) = (job / CONTROLLER_QUEUES, job % CONTROLLER_QUEUES + 1);
        let seed = round.seed ^ u64::from(job) << 32;
        controllers[controller as usize].queue(queue as u16, commands, seed)
    };
    let queues = (0..jobs).map(open).collect::<Result<Vec<_>, _>>()?;
    let cpu = || server.running.cpu();
    let mut sample = nvme::run(queues, |queue| queue.latency(), &cpu, load, round)?;
    nvme::note_limit(&mut sample, jobs, settings);
    Ok(sample)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_of_queues_is_measured_with_each_number_of_threads() {
        let settings = Settings {
            quick: false,
            engine: None,
            program: "by".into(),
            lab: "blockyard-lab".into(),
            scratch: "/tmp".into(),
            processors: 2,
            peers: Default::default(),
        };
        let experiment = build(&settings);
        assert_eq!(experiment.cells.len(), 2 * 4 * 3);
        assert_eq!(experiment.comparisons.len(), 6);
    }
}
