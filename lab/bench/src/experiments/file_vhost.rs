//! `file-vhost`: a file that is served by vhost-user-blk, compared with other servers of the file
//! and with fio's own io_uring.

use std::path::Path;

use super::file::{COMMON, FILE_BYTES, FilePlace, OVERHEAD};
use super::vhost;
use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Variant, VariantRole, Workload};
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::tools::child::CommandLine;
use crate::tools::fio::Fio;
use crate::tools::server::Server;
use crate::tools::vhost_client::VhostRequests;
use crate::tools::vhost_peer::{VhostDevice, VhostPeer};

/// The experiment's name on the command line.
pub const NAME: &str = "file-vhost";

const RAW: &str = "fio-io_uring";
const OURS: &str = "blockyard";
const POLLED: &str = "blockyard-polled";
const QEMU: &str = "qemu-storage-daemon";
const PEER: &str = "peer";

/// The length of a request, in bytes.
const BLOCK: u64 = 4096;

/// The servers that a cell starts. `FILE` stands for the path of the file, `DIRECT` for `on` or
/// `off`, `SOCKET` for the path of the socket.
const SERVERS: [FileVhostServer; 3] = [
    FileVhostServer {
        name: OURS,
        about: "blockyard serve file:// --vhost",
        package: "",
        line: "PROGRAM serve file:///f?path=FILE&direct=DIRECT&io=uring --vhost f=unix:SOCKET \
               --nbd none --control none",
    },
    FileVhostServer {
        name: POLLED,
        about: "the same with --vhost-poll 100",
        package: "",
        line: "PROGRAM serve file:///f?path=FILE&direct=DIRECT&io=uring --vhost f=unix:SOCKET \
               --nbd none --control none --vhost-poll 100",
    },
    FileVhostServer {
        name: QEMU,
        about: "QEMU's storage daemon, driver file with aio=io_uring",
        package: "qemu-system-common",
        line: "qemu-storage-daemon --blockdev driver=file,node-name=f,filename=FILE,aio=io_uring,\
cache.direct=DIRECT --export type=vhost-user-blk,id=f,node-name=f,addr.type=unix,\
addr.path=SOCKET,writable=on",
    },
];

/// A server of a file as data.
#[derive(Debug)]
struct FileVhostServer {
    name: &'static str,
    about: &'static str,
    package: &'static str,
    line: &'static str,
}

/// What is in flight on the only ring.
struct FileRingLoad {
    workload: Workload,
    place: FilePlace,
    is_write: bool,
    depth: usize,
}

const fn load(
    place: FilePlace,
    is_write: bool,
    depth: usize,
    text: [&'static str; 2],
) -> FileRingLoad {
    FileRingLoad { workload: Workload { name: text[0], about: text[1] }, place, is_write, depth }
}

const LOADS: [FileRingLoad; 5] = {
    use FilePlace::{Disk, Memory};
    [
        load(Memory, false, 32, ["memory-read-32", "4 KiB random reads in tmpfs, 32 in flight"]),
        load(Memory, false, 1, ["memory-read-1", "4 KiB random reads in tmpfs, one at a time"]),
        load(Memory, true, 32, ["memory-write-32", "4 KiB random writes in tmpfs, 32 in flight"]),
        load(Disk, false, 32, ["disk-read-32", "4 KiB random direct reads, 32 in flight"]),
        load(Disk, false, 1, ["disk-read-1", "4 KiB random direct reads, one at a time"]),
    ]
};

/// What executes the requests of a variant.
#[derive(Clone, Debug)]
enum TestedFileServer {
    /// fio itself.
    Raw,
    Started(&'static FileVhostServer),
    Peer(VhostPeer),
}

impl TestedFileServer {
    fn variant(&self) -> Variant {
        let (name, kind, about) = match self {
            TestedFileServer::Raw => (
                RAW,
                VariantRole::Limit,
                "fio --ioengine=io_uring --registerfiles=1, without a server",
            ),
            TestedFileServer::Started(server) => {
                let is_peer = server.name == QEMU;
                let kind = if is_peer { VariantRole::Peer } else { VariantRole::Product };
                (server.name, kind, server.about)
            }
            TestedFileServer::Peer(_) => {
                (PEER, VariantRole::Peer, "another vhost-user-blk server, with files of its own")
            }
        };
        Variant { name, kind, about }
    }

    /// Whether the server has a file at this place.
    fn is_at(&self, place: FilePlace) -> bool {
        match self {
            TestedFileServer::Peer(peer) => match peer.device {
                VhostDevice::Null => false,
                VhostDevice::Tmpfs => place == FilePlace::Memory,
                VhostDevice::Disk => place == FilePlace::Disk,
            },
            _ => true,
        }
    }
}

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let loads = if settings.quick { &LOADS[..1] } else { &LOADS[..] };
    let peers = settings.peers.vhost.iter().filter(|peer| peer.device != VhostDevice::Null);
    let peers: Vec<_> = peers.cloned().map(TestedFileServer::Peer).collect();
    let started = SERVERS.iter().map(TestedFileServer::Started);
    let servers: Vec<_> = [TestedFileServer::Raw].into_iter().chain(started).collect();
    let mut cells = Vec::new();
    for load in loads {
        for server in servers.iter().chain(&peers).filter(|server| server.is_at(load.place)) {
            let (server, settings) = (server.clone(), settings.clone());
            let name = server.variant().name;
            let body = move |round: &Round<'_>| measure(&server, load, &settings, round);
            cells.push(Cell::new(name, load.workload.name, 1, body).overhead(OVERHEAD));
        }
    }
    let mut variants: Vec<_> = servers.iter().map(TestedFileServer::variant).collect();
    // The peers of both places are one variant.
    variants.extend(peers.first().map(TestedFileServer::variant));
    Experiment {
        name: NAME,
        title: "a file served by vhost-user-blk",
        about: "CPU cost and throughput of a file that is served by vhost-user-blk: by us, by \
                QEMU's storage daemon and, with --vhost-peer, by another server that listens \
                already and has files of its own. The client is that of `vhost`, with one ring. \
                CPU time (`cpu_per_io`, ns) is that of the server only; of a server that polls and \
                has an RPC socket, the time of the polls that found work. The limit is fio's own \
                io_uring, whose CPU time is that of fio's thread, which is client and server.",
        published: Vec::new(),
        variants,
        workloads: loads.iter().map(|load| load.workload).collect(),
        comparisons: comparisons(!peers.is_empty()),
        plots: vec![Metric::CPU_PER_IO, Metric::IOPS],
        cells,
    }
}

fn comparisons(has_peer: bool) -> Vec<Comparison> {
    let (cpu, iops) = (Metric::CPU_PER_IO, Metric::IOPS);
    let mut all = vec![
        Comparison::new(QEMU, OURS, cpu),
        Comparison::new(QEMU, OURS, iops),
        Comparison::new(QEMU, POLLED, cpu),
        Comparison::new(QEMU, POLLED, iops),
        Comparison::new(RAW, OURS, iops),
        Comparison::new(RAW, POLLED, iops),
    ];
    if has_peer {
        all.extend([
            Comparison::new(PEER, OURS, cpu),
            Comparison::new(PEER, OURS, iops),
            Comparison::new(PEER, POLLED, cpu),
            Comparison::new(PEER, POLLED, iops),
        ]);
    }
    all
}

fn measure(
    server: &TestedFileServer,
    load: &FileRingLoad,
    settings: &Settings,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let requests = VhostRequests { is_write: load.is_write, len: BLOCK, depth: load.depth };
    if let TestedFileServer::Peer(peer) = server {
        return vhost::run(&peer.socket, &|| peer.process.cpu(), requests, 1, round);
    }
    let file = load.place.fill(settings, round.seed)?;
    let _stopped = settings.peers.stop()?;
    if let TestedFileServer::Started(server) = server {
        let line = server_line(server, load.place, settings, &file.path());
        let server = Server::start(line, settings, round.stop)?;
        return vhost::run(&server.socket(), &|| server.cpu(), requests, 1, round);
    }
    let fio = fio_line(load, &file.path());
    Ok(fio.run(round.warm_up, round.duration, round.stop)?.sample(settings.processors))
}

fn server_line(
    server: &FileVhostServer,
    place: FilePlace,
    settings: &Settings,
    path: &Path,
) -> CommandLine {
    let direct = if place == FilePlace::Disk { "on" } else { "off" };
    let line = CommandLine::new(server.package, server.line);
    line.with(&[
        ("PROGRAM", &settings.program.display()),
        ("FILE", &path.display()),
        ("DIRECT", &direct),
    ])
}

fn fio_line(load: &FileRingLoad, path: &Path) -> Fio {
    let rw = if load.is_write { "randwrite" } else { "randread" };
    let batch = match load.depth {
        1 => String::new(),
        depth => format!("--iodepth_batch_submit=8 --iodepth_batch_complete_max={depth}"),
    };
    let options = format!(
        "--ioengine=io_uring --registerfiles=1 {COMMON} --rw={rw} --iodepth={} {batch} \
         --size={FILE_BYTES}",
        load.depth
    );
    let direct = u8::from(load.place == FilePlace::Disk);
    Fio::new(&options).option("direct", direct).option("filename", path.display())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::experiment::Peers;

    fn settings(peers: &[&str]) -> Settings {
        let vhost = peers.iter().map(|text| text.parse().unwrap()).collect();
        Settings {
            quick: false,
            engine: None,
            program: "by".into(),
            lab: "blockyard-lab".into(),
            scratch: "/tmp".into(),
            processors: 2,
            peers: Peers { nvme: Vec::new(), vhost },
        }
    }

    #[test]
    fn a_peer_is_measured_where_it_has_a_file() {
        let count = |peers| {
            let experiment = build(&settings(peers));
            (experiment.variants.len(), experiment.cells.len(), experiment.comparisons.len())
        };
        assert_eq!(count(&["null=/s,1"]), (4, 5 * 4, 6));
        assert_eq!(count(&["disk=/s,1"]), (5, 5 * 4 + 2, 10));
        assert_eq!(count(&["disk=/s,1", "tmpfs=/t,1"]), (5, 5 * 5, 10));
    }

    #[test]
    fn every_line_names_the_file_and_how_it_is_opened() {
        let settings = settings(&[]);
        for load in &LOADS {
            let is_disk = load.place == FilePlace::Disk;
            for server in &SERVERS {
                let line = server_line(server, load.place, &settings, Path::new("/d/f")).text();
                let direct = if is_disk { "direct=on" } else { "direct=off" };
                assert!(line.contains("=/d/f") && line.contains(direct), "{line}");
            }
            let line = fio_line(load, Path::new("/d/f")).line(Duration::ZERO, Duration::ZERO);
            let (direct, depth) = (u8::from(is_disk), load.depth);
            let ends = format!(" --direct={direct} --filename=/d/f --runtime=1ms");
            let text = line.text();
            assert!(
                text.ends_with(&ends) && text.contains(&format!("--iodepth={depth} ")),
                "{text}"
            );
        }
    }
}
