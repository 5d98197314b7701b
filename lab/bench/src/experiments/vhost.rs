//! `vhost`: our vhost-user-blk server compared with QEMU's and with other servers.

use std::path::Path;
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
use crate::tools::vhost_peer::{VhostDevice, VhostPeer};

/// The experiment's name on the command line.
pub const NAME: &str = "vhost";

const OURS: &str = "blockyard";
const POLLED: &str = "blockyard-polled";
const QEMU: &str = "qemu-storage-daemon";
const PEER: &str = "peer";

/// The least ratio of IOPS per CPU second of the server to those of QEMU's.
const AIM: f64 = 1.3;
/// The length of the device, in bytes.
const DEVICE_BYTES: u64 = 1 << 40;
/// The length of a request, in bytes.
const BLOCK: u64 = 4096;
/// The time that starting and ending a server takes.
const OVERHEAD: Duration = Duration::from_millis(150);

/// The servers that a cell starts; each serves a device that costs nothing to read.
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

/// The server of a variant.
#[derive(Clone, Debug)]
enum TestedVhostServer {
    Started(&'static ServerKind),
    Peer(VhostPeer),
}

impl TestedVhostServer {
    fn variant(&self) -> Variant {
        match self {
            TestedVhostServer::Started(ServerKind { name, about, .. }) => {
                let is_peer = *name == QEMU;
                let kind = if is_peer { VariantRole::Peer } else { VariantRole::Product };
                Variant { name, kind, about }
            }
            TestedVhostServer::Peer(_) => Variant {
                name: PEER,
                kind: VariantRole::Peer,
                about: "another vhost-user-blk server, a device without memory",
            },
        }
    }
}

/// All servers.
fn tested(settings: &Settings) -> Vec<TestedVhostServer> {
    let peers = settings.peers.vhost.iter().filter(|peer| peer.device == VhostDevice::Null);
    let started = SERVERS.iter().map(TestedVhostServer::Started);
    started.chain(peers.cloned().map(TestedVhostServer::Peer)).collect()
}

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let (loads, rings): (&[RingLoad], &[u32]) = match settings.quick {
        true => (&LOADS[..2], &[1]),
        false => (&LOADS, &[1, 2]),
    };
    let servers = tested(settings);
    let mut cells = Vec::new();
    for load in loads {
        for &jobs in rings {
            for server in &servers {
                let (server, settings) = (server.clone(), settings.clone());
                let name = server.variant().name;
                let body = move |round: &Round<'_>| measure(&server, load, jobs, &settings, round);
                let cell = Cell::new(name, load.workload.name, jobs, body);
                cells.push(cell.overhead(OVERHEAD));
            }
        }
    }
    let has_peer = servers.iter().any(|server| matches!(server, TestedVhostServer::Peer(_)));
    Experiment {
        name: NAME,
        title: "vhost-user-blk servers",
        about: "CPU cost and throughput of our vhost-user-blk server, compared with that of QEMU's \
                storage daemon and, with --vhost-peer, with another one that listens already. The \
                client is a driver that others wrote (crate virtio-driver), with a thread for each \
                ring; it sleeps when nothing is left to take, as a guest does. CPU time \
                (`cpu_per_io`, ns) is that of the server only; of a server that polls and has an \
                RPC socket, the time of the polls that found work. `client_cpus` is that of the \
                client.",
        published: Vec::new(),
        variants: servers.iter().map(TestedVhostServer::variant).collect(),
        workloads: loads.iter().map(|load| load.workload).collect(),
        comparisons: comparisons(has_peer),
        plots: vec![Metric::CPU_PER_IO, Metric::IOPS, Metric::P99],
        cells,
    }
}

fn comparisons(has_peer: bool) -> Vec<Comparison> {
    let mut all = Vec::new();
    for load in &LOADS {
        let compare = |before, after, metric| {
            Comparison::new(before, after, metric).under(load.workload.name)
        };
        let cpu = compare(QEMU, OURS, Metric::CPU_PER_IO);
        all.push(if load.is_write { cpu } else { cpu.aim(AIM) });
        all.push(compare(QEMU, OURS, Metric::IOPS));
        all.push(compare(QEMU, POLLED, Metric::IOPS));
        if !has_peer {
            continue;
        }
        for (after, metric) in [
            (OURS, Metric::CPU_PER_IO),
            (OURS, Metric::IOPS),
            (POLLED, Metric::CPU_PER_IO),
            (POLLED, Metric::IOPS),
        ] {
            let to_peer = compare(PEER, after, metric);
            let has_aim = after == POLLED && !load.is_write;
            all.push(to_peer.from_jobs(2));
            let one = to_peer.up_to_jobs(1);
            all.push(if has_aim { one.aim(1.0) } else { one });
        }
    }
    all
}

fn measure(
    server: &TestedVhostServer,
    load: &RingLoad,
    jobs: u32,
    settings: &Settings,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let requests = VhostRequests { is_write: load.is_write, len: BLOCK, depth: load.depth };
    match server {
        TestedVhostServer::Peer(peer) => {
            run(&peer.socket, &|| peer.process.cpu(), requests, jobs, round)
        }
        TestedVhostServer::Started(kind) => {
            let _stopped = settings.peers.stop()?;
            let server = kind.start(settings, DEVICE_BYTES, round.stop)?;
            run(&server.socket(), &|| server.cpu(), requests, jobs, round)
        }
    }
}

/// Sends requests to the server at a socket by one ring for each job; `cpu` is the CPU time of the
/// server until now.
pub(super) fn run(
    socket: &Path,
    cpu: &dyn Fn() -> Result<Duration, LabError>,
    requests: VhostRequests,
    jobs: u32,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let mut client = VhostClient::connect(socket, jobs as usize, requests)?;
    let rings = client.rings(round.seed)?;
    let outcome = workers::run(rings, round, cpu)?;
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
        .with(Metric::BANDWIDTH, ios * requests.len as f64 / wall)
        .with(Metric::CPUS, cpu.as_secs_f64() / wall)
        .with(Metric::CLIENT_CPUS, outcome.cpu.as_secs_f64() / wall)
        .with(Metric::P50, latency.value_at_quantile(0.5) as f64)
        .with(Metric::P99, latency.value_at_quantile(0.99) as f64);
    Ok(Sample { latency: LatencyPercentiles::of(&latency), ..sample })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_without_memory_is_measured_and_compared() {
        let peers = |text: &[&str]| {
            let vhost = text.iter().map(|text| text.parse().unwrap()).collect();
            crate::experiment::Peers { nvme: Vec::new(), vhost }
        };
        let settings = |peers| Settings {
            quick: false,
            engine: None,
            program: "by".into(),
            lab: "blockyard-lab".into(),
            scratch: "/tmp".into(),
            processors: 2,
            peers,
        };
        let alone = build(&settings(peers(&["disk=/s,1"])));
        assert_eq!((alone.variants.len(), alone.cells.len()), (3, 4 * 2 * 3));
        let experiment = build(&settings(peers(&["null=/s,1,/rpc"])));
        assert_eq!((experiment.variants.len(), experiment.cells.len()), (4, 4 * 2 * 4));
        let aims = experiment.comparisons.iter().filter(|it| it.before == PEER && it.aim.is_some());
        // CPU time and IOPS of each load of reads.
        assert_eq!(aims.count(), 2 * 3);
    }
}
