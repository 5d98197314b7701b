//! `vhost`: our vhost-user-blk server compared with QEMU's.

use std::time::Duration;

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Variant, VariantRole, Workload};
use crate::load::latencies;
use crate::load::workers;
use crate::metric::Metric;
use crate::sample::{LatencyPercentiles, Round, Sample};
use crate::tools::server::ServerKind;
use crate::tools::vhost_client::{VhostClient, VhostRequests};

/// The experiment's name on the command line.
pub const NAME: &str = "vhost";

const OURS: &str = "blockyard";
const POLLED: &str = "blockyard-polled";
const QEMU: &str = "qemu-storage-daemon";

/// The least ratio of IOPS per CPU second of the server to those of QEMU's.
const AIM: f64 = 1.3;
/// The length of the device, in bytes.
const DEVICE_BYTES: u64 = 1 << 40;
/// The length of a request, in bytes.
const BLOCK: u64 = 4096;
/// The time that starting and ending a server takes.
const OVERHEAD: Duration = Duration::from_millis(150);

/// The servers; each serves a device that costs nothing to read.
const SERVERS: [ServerKind; 3] = [
    ServerKind {
        name: OURS,
        about: "blockyard serve --vhost, a null device without memory",
        package: "",
        line: "PROGRAM serve null:///null0?size=SIZE --vhost null0=unix:SOCKET --nbd none \
               --control none",
        threads_max: None,
    },
    ServerKind {
        name: POLLED,
        about: "the same with --vhost-poll 100: the thread of a ring spins for up to 50 us before \
                it sleeps",
        package: "",
        line: "PROGRAM serve null:///null0?size=SIZE --vhost null0=unix:SOCKET --nbd none \
               --control none --vhost-poll 100",
        threads_max: None,
    },
    ServerKind {
        name: QEMU,
        about: "QEMU's storage daemon, driver null-co, which reads without writing memory",
        package: "qemu-system-common",
        line: "qemu-storage-daemon --blockdev driver=null-co,node-name=null0,size=SIZE \
               --export type=vhost-user-blk,id=null0,node-name=null0,addr.type=unix,\
addr.path=SOCKET,writable=on,num-queues=4",
        // All rings of an export run in its main loop.
        threads_max: Some(1),
    },
];

/// What is in flight on each ring.
struct RingLoad {
    workload: Workload,
    is_write: bool,
    depth: usize,
}

const fn load(is_write: bool, depth: usize, text: [&'static str; 2]) -> RingLoad {
    RingLoad { workload: Workload { name: text[0], about: text[1] }, is_write, depth }
}

const LOADS: [RingLoad; 4] = [
    load(false, 1, ["read-depth-1", "4 KiB random reads, 1 in flight"]),
    load(false, 32, ["read-depth-32", "4 KiB random reads, 32 in flight"]),
    load(false, 128, ["read-depth-128", "4 KiB random reads, 128 in flight"]),
    load(true, 32, ["write-depth-32", "4 KiB random writes, 32 in flight"]),
];

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let (loads, rings): (&[RingLoad], &[u32]) = match settings.quick {
        true => (&LOADS[..2], &[1]),
        false => (&LOADS, &[1, 2]),
    };
    let mut cells = Vec::new();
    for load in loads {
        for &jobs in rings {
            for server in &SERVERS {
                let settings = settings.clone();
                let body = move |round: &Round<'_>| measure(server, load, jobs, &settings, round);
                let cell = Cell::new(server.name, load.workload.name, jobs, body);
                cells.push(cell.overhead(OVERHEAD));
            }
        }
    }
    let variant = |server: &ServerKind| {
        let kind = if server.name == QEMU { VariantRole::Peer } else { VariantRole::Product };
        Variant { name: server.name, kind, about: server.about }
    };
    let mut comparisons = Vec::new();
    for load in &LOADS {
        let compare =
            |after, metric| Comparison::new(QEMU, after, metric).under(load.workload.name);
        let cpu = compare(OURS, Metric::CPU_PER_IO);
        comparisons.push(if load.is_write { cpu } else { cpu.aim(AIM) });
        comparisons.push(compare(OURS, Metric::IOPS));
        comparisons.push(compare(POLLED, Metric::IOPS));
    }
    Experiment {
        name: NAME,
        title: "vhost-user-blk servers",
        about: "CPU cost and throughput of our vhost-user-blk server, compared with that of QEMU's \
                storage daemon. The client is a driver that others wrote (crate virtio-driver), \
                with a thread for each ring; it sleeps when nothing is left to take, as a guest \
                does. CPU time (`cpu_per_io`, ns) is that of the server only; `client_cpus` is \
                that of the client.",
        published: Vec::new(),
        variants: SERVERS.iter().map(variant).collect(),
        workloads: loads.iter().map(|load| load.workload).collect(),
        comparisons,
        plots: vec![Metric::CPU_PER_IO, Metric::IOPS, Metric::P99],
        cells,
    }
}

fn measure(
    server: &ServerKind,
    load: &RingLoad,
    jobs: u32,
    settings: &Settings,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let server = server.start(settings, DEVICE_BYTES, round.stop)?;
    let requests = VhostRequests { is_write: load.is_write, len: BLOCK, depth: load.depth };
    let mut client = VhostClient::connect(&server.socket(), jobs as usize, requests)?;
    let rings = client.rings(round.seed)?;
    let outcome = workers::run(rings, round, || server.cpu())?;
    if outcome.ios == 0 {
        return Err(LabError::failed(NAME, "no request ended in the measured window"));
    }
    let (before, after) = outcome.gauge;
    let before = before?;
    let cpu = after?.saturating_sub(before);
    let mut latency = latencies();
    for ring in &outcome.workers {
        latency.add(ring.latency()).expect("both have the same range");
    }
    let (ios, wall) = (outcome.ios as f64, outcome.wall.as_secs_f64());
    let sample = Sample::of(Metric::IOPS, ios / wall)
        .with(Metric::CPU_PER_IO, cpu.as_nanos() as f64 / ios)
        .with(Metric::BANDWIDTH, ios * BLOCK as f64 / wall)
        .with(Metric::CPUS, cpu.as_secs_f64() / wall)
        .with(Metric::CLIENT_CPUS, outcome.cpu.as_secs_f64() / wall)
        .with(Metric::P50, latency.value_at_quantile(0.5) as f64)
        .with(Metric::P99, latency.value_at_quantile(0.99) as f64);
    Ok(Sample { latency: LatencyPercentiles::of(&latency), ..sample })
}
