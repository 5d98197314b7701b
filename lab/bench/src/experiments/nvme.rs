//! `nvme`: our NVMe/TCP target compared with our NBD server and with other targets.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use hdrhistogram::Histogram;

use super::nbd;
use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Variant, VariantRole, Workload};
use crate::load::latencies;
use crate::load::workers::{self, Work};
use crate::metric::Metric;
use crate::sample::{LatencyPercentiles, Round, Sample};
use crate::stop::Stop;
use crate::tools::child::{CommandLine, RunningChild};
use crate::tools::nbd_client::{NbdClient, NbdOp, NbdRequests, Place};
use crate::tools::nvme_client::{DEPTH_MAX, NvmeCommands, NvmeController, NvmeOp};
use crate::tools::nvme_peer::{NvmeDevice, NvmePeer};

/// The experiment's name on the command line.
pub const NAME: &str = "nvme";

/// The line that starts our server. `NVME` and `NBD` stand for the addresses of its ports.
const LINE: &str = "PROGRAM serve null:///null?size=1T&bs=4k \
                    null:///memory?size=256M&bs=4k&memory_backed=1 \
                    null:///zoned?size=2T&bs=4k&zoned=1&zone_size=1T \
                    --nvme tcp:NVME --nbd tcp:NBD --control none";
/// The beginning of the NQN of each of our devices.
const NQN_PREFIX: &str = "nqn.2026-11.io.blockyard:";
/// The NQN of our device without memory.
pub(super) const NVME_NULL_NQN: &str = "nqn.2026-11.io.blockyard:null";
/// The length of the writes that fill the device in memory.
const FILL_BYTES: u64 = 1 << 20;
/// The time that starting and ending a server takes, and filling its device in memory.
pub(super) const OVERHEAD: Duration = Duration::from_millis(150);

/// The greatest CPU time of an I/O, as a part of that of another target's. The aims of the
/// experiment are ratios of the other's time to ours.
const PART_OF_PEER: f64 = 0.7;
/// The greatest CPU time of an I/O, as a multiple of that of the NBD server.
const MULTIPLE_OF_NBD: f64 = 1.1;

/// What is in flight on each queue.
pub(super) struct QueueLoad {
    pub(super) workload: Workload,
    pub(super) op: NvmeOp,
    pub(super) len: u64,
    pub(super) depth: usize,
}

pub(super) const fn load(op: NvmeOp, len: u64, depth: usize, text: [&'static str; 2]) -> QueueLoad {
    QueueLoad { workload: Workload { name: text[0], about: text[1] }, op, len, depth }
}

const BLOCK: u64 = 4096;

/// The loads of devices without zones, on 1 and 4 queues.
const PLAIN: [QueueLoad; 6] = [
    load(NvmeOp::Read, BLOCK, 1, ["read-depth-1", "4 KiB random reads, 1 in flight"]),
    load(NvmeOp::Read, BLOCK, 32, ["read-depth-32", "4 KiB random reads, 32 in flight"]),
    load(
        NvmeOp::Read,
        BLOCK,
        DEPTH_MAX,
        ["read-depth-128", "4 KiB random reads, 127 in flight, which fill a queue of 128 entries"],
    ),
    load(NvmeOp::Write, BLOCK, 1, ["write-depth-1", "4 KiB random writes, 1 in flight"]),
    load(NvmeOp::Write, BLOCK, 32, ["write-depth-32", "4 KiB random writes, 32 in flight"]),
    load(
        NvmeOp::Write,
        BLOCK,
        DEPTH_MAX,
        [
            "write-depth-128",
            "4 KiB random writes, 127 in flight, which fill a queue of 128 entries",
        ],
    ),
];
/// The loads of a zoned device, on 1 and 2 queues.
const APPENDS: [QueueLoad; 2] = [
    load(NvmeOp::Append, BLOCK, 32, ["append-4k", "4 KiB appends to one zone, 32 in flight"]),
    load(NvmeOp::Append, 64 << 10, 32, ["append-64k", "64 KiB appends to one zone, 32 in flight"]),
];

/// The server of a variant.
#[derive(Clone, Debug)]
enum TestedServer {
    Nvme,
    /// As many servers as queues, with a queue each.
    NvmeEach,
    Nbd,
    Peer(NvmePeer),
}

const NVME_NULL: &str = "nvme-null";
const NVME_MEMORY: &str = "nvme-memory";
const NVME_ZONED: &str = "nvme-zoned";
const NVME_SEPARATE: &str = "nvme-zoned-separate";
const NBD_NULL: &str = "nbd-null";
const NBD_MEMORY: &str = "nbd-memory";
const PEER_NULL: &str = "peer-null";
const PEER_MEMORY: &str = "peer-memory";
const PEER_ZONED: &str = "peer-zoned";

/// A variant with its server and device.
#[derive(Clone, Debug)]
struct Tested {
    variant: Variant,
    server: TestedServer,
    device: NvmeDevice,
}

impl Tested {
    fn peer(peer: &NvmePeer) -> Tested {
        let (name, about) = match peer.device {
            NvmeDevice::Null => (PEER_NULL, "another NVMe/TCP target, a device without memory"),
            NvmeDevice::Memory => (PEER_MEMORY, "another NVMe/TCP target, a device in memory"),
            NvmeDevice::Zoned => (PEER_ZONED, "another NVMe/TCP target, a zoned device"),
        };
        let variant = Variant { name, kind: VariantRole::Peer, about };
        Tested { variant, server: TestedServer::Peer(peer.clone()), device: peer.device }
    }
}

/// All variants; neighbours are compared.
fn tested(settings: &Settings) -> Vec<Tested> {
    use {NvmeDevice::*, TestedServer::*};
    let ours = |name, server, device, about| Tested {
        variant: Variant { name, kind: VariantRole::Product, about },
        server,
        device,
    };
    let mut all = vec![
        ours(NVME_NULL, Nvme, Null, "blockyard serve --nvme, a null device without memory"),
        ours(NBD_NULL, Nbd, Null, "blockyard serve --nbd, a null device without memory"),
        ours(NVME_MEMORY, Nvme, Memory, "blockyard serve --nvme, a null device in memory"),
        ours(NBD_MEMORY, Nbd, Memory, "blockyard serve --nbd, a null device in memory"),
        ours(NVME_ZONED, Nvme, Zoned, "blockyard serve --nvme, a zoned null device"),
        ours(NVME_SEPARATE, NvmeEach, Zoned, "the same with a server and a device for each queue"),
    ];
    all.extend(settings.peers.nvme.iter().map(Tested::peer));
    all
}

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let tested = tested(settings);
    let (plain, appends, queues): (&[QueueLoad], &[QueueLoad], &[u32]) = match settings.quick {
        true => (&PLAIN[1..2], &APPENDS[..1], &[1]),
        false => (&PLAIN, &APPENDS, &[1, 4]),
    };
    let loads = || plain.iter().chain(appends);
    let mut cells = Vec::new();
    for load in loads() {
        let zoned = load.op == NvmeOp::Append;
        for &jobs in if zoned { &[1, 2] } else { queues } {
            let fitting = tested.iter().filter(|it| (it.device == NvmeDevice::Zoned) == zoned);
            cells.extend(fitting.map(|tested| cell(tested, load, jobs, settings)));
        }
    }
    Experiment {
        name: NAME,
        title: "NVMe/TCP targets on loopback",
        about: "CPU cost and throughput of our NVMe/TCP target, compared with our NBD server over \
                TCP and, with --nvme-peer, with other targets that listen already. The clients \
                are the lab's own, one thread for each queue or connection, and send and receive \
                as many requests per system call as they can. CPU time (`cpu_per_io`, ns) is that \
                of the server only; of a target that polls and has an RPC socket, the time of the \
                polls that found work. `client_cpus` is that of the clients. IOPS describe a \
                server only where the client is not the bottleneck. Queues of separate servers \
                share no lock and no zone, so `nvme-zoned-separate` with 2 queues shows what the \
                processors allow.",
        published: Vec::new(),
        variants: tested.iter().map(|tested| tested.variant).collect(),
        workloads: loads().map(|load| load.workload).collect(),
        comparisons: comparisons(settings),
        plots: vec![Metric::CPU_PER_IO, Metric::IOPS, Metric::P99],
        cells,
    }
}

fn comparisons(settings: &Settings) -> Vec<Comparison> {
    let mut all = Vec::new();
    for (before, after) in [(NBD_NULL, NVME_NULL), (NBD_MEMORY, NVME_MEMORY)] {
        for load in &PLAIN {
            let compare = |metric| Comparison::new(before, after, metric).under(load.workload.name);
            let cpu = compare(Metric::CPU_PER_IO);
            let has_aim = load.op == NvmeOp::Read && load.depth > 1;
            all.push(if has_aim { cpu.aim(1.0 / MULTIPLE_OF_NBD) } else { cpu });
            all.push(compare(Metric::IOPS));
        }
    }
    for load in &APPENDS {
        let compare = |metric| {
            let both = Comparison::new(NVME_SEPARATE, NVME_ZONED, metric);
            both.under(load.workload.name).from_jobs(2)
        };
        all.extend([compare(Metric::IOPS), compare(Metric::CPU_PER_IO)]);
    }
    for peer in &settings.peers.nvme {
        let (before, after, loads): (_, _, &[QueueLoad]) = match peer.device {
            NvmeDevice::Null => (PEER_NULL, NVME_NULL, &PLAIN),
            NvmeDevice::Memory => (PEER_MEMORY, NVME_MEMORY, &PLAIN),
            NvmeDevice::Zoned => (PEER_ZONED, NVME_ZONED, &APPENDS),
        };
        for load in loads {
            let compare = |metric| Comparison::new(before, after, metric).under(load.workload.name);
            let (cpu, iops) = (compare(Metric::CPU_PER_IO), compare(Metric::IOPS));
            let has_aim = load.op == NvmeOp::Read && load.depth > 1;
            all.push(if has_aim { cpu.aim(1.0 / PART_OF_PEER) } else { cpu });
            let is_full = load.op == NvmeOp::Read && load.depth == DEPTH_MAX;
            all.push(iops.from_jobs(2));
            all.push(if is_full { iops.up_to_jobs(1).aim(1.0) } else { iops.up_to_jobs(1) });
        }
    }
    all
}

fn cell(tested: &Tested, load: &'static QueueLoad, jobs: u32, settings: &Settings) -> Cell {
    let (tested, settings) = (tested.clone(), settings.clone());
    let name = tested.variant.name;
    let body = move |round: &Round<'_>| measure(&tested, load, jobs, &settings, round);
    Cell::new(name, load.workload.name, jobs, body).overhead(OVERHEAD)
}

fn measure(
    tested: &Tested,
    load: &QueueLoad,
    jobs: u32,
    settings: &Settings,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    if let TestedServer::Peer(peer) = &tested.server {
        return over_nvme(&[peer.address], &peer.nqn, &|| peer.process.cpu(), load, jobs, round);
    }
    let _stopped = settings.peers.stop()?;
    let count = if let TestedServer::NvmeEach = tested.server { jobs } else { 1 };
    let start = |_| OwnServer::start(settings, "", round.stop);
    let servers = (0..count).map(start).collect::<Result<Vec<_>, _>>()?;
    let device = match tested.device {
        NvmeDevice::Null => "null",
        NvmeDevice::Memory => "memory",
        NvmeDevice::Zoned => "zoned",
    };
    let place = Place::Tcp(servers[0].nbd);
    if tested.device == NvmeDevice::Memory {
        let writes = NbdRequests { op: NbdOp::Write, len: FILL_BYTES, depth: 1 };
        NbdClient::connect(&place, device, writes, round.seed)?.write_all()?;
    }
    let cpu = || servers.iter().map(|server| server.running.cpu()).sum();
    let mut sample = if let TestedServer::Nbd = tested.server {
        let op = if load.op == NvmeOp::Read { NbdOp::Read } else { NbdOp::Write };
        let requests = NbdRequests { op, len: load.len, depth: load.depth };
        let open = |job| NbdClient::connect(&place, device, requests, seed(round, job));
        let clients = (0..jobs).map(open).collect::<Result<Vec<_>, _>>()?;
        run(clients, |client| client.latency(), &cpu, load, round)?
    } else {
        let addresses: Vec<_> = servers.iter().map(|server| server.nvme).collect();
        over_nvme(&addresses, &format!("{NQN_PREFIX}{device}"), &cpu, load, jobs, round)?
    };
    note_limit(&mut sample, jobs, settings);
    Ok(sample)
}

/// The seed of a client.
fn seed(round: &Round<'_>, job: u32) -> u64 {
    round.seed ^ u64::from(job + 1) << 32
}

/// Measures queues that are spread over targets; `cpu` is the CPU time of all targets until now.
fn over_nvme(
    targets: &[SocketAddr],
    nqn: &str,
    cpu: &dyn Fn() -> Result<Duration, LabError>,
    load: &QueueLoad,
    jobs: u32,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let connect = |target: &SocketAddr| NvmeController::connect(*target, nqn);
    let controllers = targets.iter().map(connect).collect::<Result<Vec<_>, _>>()?;
    let commands = NvmeCommands { op: load.op, len: load.len, depth: load.depth };
    let open = |job: u32| {
        let (controller, queue) = (job as usize % targets.len(), job as usize / targets.len() + 1);
        controllers[controller].queue(queue as u16, commands, seed(round, job))
    };
    let mut queues = (0..jobs).map(open).collect::<Result<Vec<_>, _>>()?;
    if load.op == NvmeOp::Append {
        // The first queues have a target each.
        queues.iter_mut().take(targets.len()).try_for_each(|queue| queue.reset_zone())?;
    }
    run(queues, |queue| queue.latency(), cpu, load, round)
}

/// Notes what bounds the load of as many clients as jobs.
pub(super) fn note_limit(sample: &mut Sample, jobs: u32, settings: &Settings) {
    let used = (jobs as usize).min(settings.processors) as f64;
    let busy = [Metric::CPUS, Metric::CLIENT_CPUS].map(|metric| value(sample, metric));
    sample.limit = Some(nbd::limit([used; 2], busy, settings.processors).into());
}

fn value(sample: &Sample, metric: Metric) -> f64 {
    sample.values.iter().find(|value| value.0 == metric).map_or(0.0, |value| value.1)
}

/// Runs the clients; `cpu` is the CPU time of the server until now.
pub(super) fn run<W: Work>(
    clients: Vec<W>,
    latency_of: impl Fn(&W) -> &Histogram<u64>,
    cpu: &dyn Fn() -> Result<Duration, LabError>,
    load: &QueueLoad,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let outcome = workers::run(clients, round, cpu)?;
    if outcome.ios == 0 {
        return Err(LabError::failed(NAME, "no I/O ended in the measured window"));
    }
    let (before, after) = outcome.gauge;
    let before = before?;
    let cpu = after?.saturating_sub(before);
    let mut latency = latencies();
    for client in &outcome.workers {
        latency.add(latency_of(client)).expect("both have the same range");
    }
    let (ios, wall) = (outcome.ios as f64, outcome.wall.as_secs_f64());
    let sample = Sample::of(Metric::IOPS, ios / wall)
        .with(Metric::CPU_PER_IO, cpu.as_nanos() as f64 / ios)
        .with(Metric::BANDWIDTH, ios * load.len as f64 / wall)
        .with(Metric::CPUS, cpu.as_secs_f64() / wall)
        .with(Metric::CLIENT_CPUS, outcome.cpu.as_secs_f64() / wall)
        .with(Metric::P50, latency.value_at_quantile(0.5) as f64)
        .with(Metric::P99, latency.value_at_quantile(0.99) as f64);
    Ok(Sample { latency: LatencyPercentiles::of(&latency), ..sample })
}

/// Our server with all devices, for both protocols. Dropping it kills the server.
pub(super) struct OwnServer {
    pub(super) running: RunningChild,
    pub(super) nvme: SocketAddr,
    nbd: SocketAddr,
}

impl OwnServer {
    /// Starts the server, with more options.
    pub(super) fn start(
        settings: &Settings,
        options: &str,
        stop: &Stop,
    ) -> Result<OwnServer, LabError> {
        let [nvme, nbd] = free_ports().map_err(LabError::io("a free port"))?;
        let line = CommandLine::new("", &format!("{LINE} {options}")).with(&[
            ("PROGRAM", &settings.program.display()),
            ("NVME", &nvme),
            ("NBD", &nbd),
        ]);
        let mut running = line.start(None)?;
        running.until_ready(stop, || {
            let refused = [nvme, nbd].iter().find_map(|port| TcpStream::connect(port).err());
            refused.map(|refused| format!("it does not accept: {refused}"))
        })?;
        Ok(OwnServer { running, nvme, nbd })
    }
}

/// Two ports that were free.
pub(super) fn free_ports() -> std::io::Result<[SocketAddr; 2]> {
    let (one, other) = (TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?);
    Ok([one.local_addr()?, other.local_addr()?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::Peers;

    fn settings(nvme: Vec<NvmePeer>) -> Settings {
        Settings {
            quick: false,
            engine: None,
            program: "by".into(),
            lab: "blockyard-lab".into(),
            scratch: "/tmp".into(),
            processors: 2,
            peers: Peers { nvme, vhost: Vec::new() },
        }
    }

    #[test]
    fn a_peer_is_measured_next_to_our_target_and_compared_with_it() {
        let alone = build(&settings(Vec::new()));
        assert_eq!((alone.variants.len(), alone.cells.len()), (6, 6 * 2 * 4 + 2 * 2 * 2));
        let peer = |device| format!("{device}=127.0.0.1:1,nqn,1").parse().unwrap();
        let experiment = build(&settings(["null", "zoned"].map(peer).into()));
        assert_eq!((experiment.variants.len(), experiment.cells.len()), (8, 6 * 2 * 5 + 2 * 2 * 3));
        let aims = |before, metric| {
            let is_it = |it: &&Comparison| (it.before, it.metric) == (before, metric);
            let found = experiment.comparisons.iter().filter(is_it);
            found.filter_map(|it| Some((it.workload?, it.aim?))).collect::<Vec<_>>()
        };
        let ratio = 1.0 / PART_OF_PEER;
        let wanted = [("read-depth-32", ratio), ("read-depth-128", ratio)];
        assert_eq!(aims(PEER_NULL, Metric::CPU_PER_IO), wanted);
        assert_eq!(aims(PEER_NULL, Metric::IOPS), [("read-depth-128", 1.0)]);
        assert!(aims(PEER_ZONED, Metric::CPU_PER_IO).is_empty());
    }
}
