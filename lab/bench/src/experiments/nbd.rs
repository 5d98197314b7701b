//! `nbd`: our NBD server compared with other NBD servers, by the same clients.

use std::time::Duration;

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Published, Variant, VariantRole, Workload};
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::tools::fio::Fio;
use crate::tools::server::{KINDS, ServerKind};
use crate::tools::{copy, fio};

/// The experiment's name on the command line.
pub const NAME: &str = "nbd";

/// Bytes per second of the server's CPU time.
const BANDWIDTH_PER_CPU: Metric = Metric::more("bandwidth_per_cpu_second", "B/s");

/// The fio options that all servers, depths and numbers of connections share.
const READ: &str = "--ioengine=nbd --rw=randread --bs=4k --size=10G --norandommap --randrepeat=0";
/// The size of the device that fio reads, in bytes.
const READ_BYTES: u64 = 10 << 30;
/// The streaming device has this many bytes per second of measurement.
const STREAM_BYTES_PER_SECOND: f64 = 2e9;
/// The least and greatest size of the streaming device.
///
/// The least keeps any server busy for about a second, so that the ten milliseconds for starting
/// nbdcopy do not matter.
const STREAM_BYTES: [u64; 2] = [4 << 30, 16 << 30];
/// The time that starting and ending fio and a server takes.
const OVERHEAD: Duration = Duration::from_millis(400);
/// A side is the limit if it keeps this fraction of its usable processors busy.
const BUSY: f64 = 0.9;
/// The name of the client in the text about the limiting side.
const CLIENT: &str = "client";
/// The least ratio to each of the other servers.
const AIM: f64 = 1.5;

/// The queue depth of each connection, with its workload.
const DEPTHS: [(u32, Workload); 3] = [
    (1, Workload { name: "read-depth-1", about: "4 KiB random reads by fio, 1 in flight" }),
    (32, Workload { name: "read-depth-32", about: "4 KiB random reads by fio, 32 in flight" }),
    (128, Workload { name: "read-depth-128", about: "4 KiB random reads by fio, 128 in flight" }),
];
const STREAM: Workload = Workload {
    name: "stream-1m",
    about: "reads of 1 MiB through the whole device: nbdcopy --connections=1 --no-extents \
            --request-size=1048576 -- URI null:",
};

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let depths = if settings.quick { &DEPTHS[1..2] } else { &DEPTHS[..] };
    let connections: &[u32] = if settings.quick { &[1] } else { &[1, 4] };
    let mut workloads: Vec<Workload> = depths.iter().map(|(_, workload)| *workload).collect();
    workloads.push(STREAM);
    let mut cells = Vec::new();
    for server in &KINDS {
        for (depth, workload) in depths {
            for &jobs in connections {
                cells.push(read_cell(server, workload.name, *depth, jobs, settings));
            }
        }
        cells.push(stream_cell(server, settings));
    }
    Experiment {
        name: NAME,
        title: "NBD servers over a unix socket",
        about: "CPU cost of a 4 KiB read for an NBD server, and the throughput of a stream. Each \
                server serves a device that it reads without cost, over a unix socket. The clients \
                are fio with its nbd engine (one job is one connection) and nbdcopy, with the same \
                command lines for every server. CPU time is that of the server only; `client_cpus` \
                is that of the client. IOPS and bandwidth describe a server only where the client \
                is not the bottleneck: there the aim for IOPS applies, elsewhere the aim for I/Os \
                per second of server CPU time. There is no warm-up: a measurement begins with the \
                first request.",
        published: published()
            .into_iter()
            .filter(|row| workloads.iter().any(|workload| workload.name == row.workload))
            .collect(),
        variants: KINDS.iter().map(variant).collect(),
        workloads,
        comparisons: comparisons(),
        plots: vec![
            Metric::IOS_PER_CPU_SECOND,
            Metric::IOPS,
            BANDWIDTH_PER_CPU,
            Metric::BANDWIDTH,
            Metric::P99,
        ],
        cells,
    }
}

fn variant(server: &ServerKind) -> Variant {
    let kind = if is_ours(server) { VariantRole::Product } else { VariantRole::Peer };
    Variant { name: server.name, kind, about: server.about }
}

fn is_ours(server: &ServerKind) -> bool {
    server.name == KINDS[0].name
}

fn comparisons() -> Vec<Comparison> {
    let ours = KINDS[0].name;
    let against = |peer: &ServerKind| {
        let compare = |metric| Comparison::new(peer.name, ours, metric);
        [
            compare(Metric::IOS_PER_CPU_SECOND).aim(AIM),
            compare(Metric::IOPS).aim(AIM),
            compare(BANDWIDTH_PER_CPU),
            compare(Metric::BANDWIDTH).under(STREAM.name),
        ]
    };
    KINDS[1..].iter().flat_map(against).collect()
}

/// The figures of other servers that docs/measurements/nbd.md lists.
fn published() -> Vec<Published> {
    const FIO: &str =
        "fio 3.33, unix socket, 2 virtual processors (AMD EPYC, Zen 5), loaded: +-30 %";
    const BENCH: &str = "qemu-img bench (sequential), 2 virtual processors (AMD EPYC, Zen 5), \
                         loaded: +-30 %";
    let row = |variant, at: usize, jobs, iops, source| {
        let workload = DEPTHS[at].1.name;
        Published { variant, workload, jobs, metric: Metric::IOPS, value: iops, source }
    };
    vec![
        row("nbdkit", 0, 1, 22e3, FIO),
        row("nbdkit", 1, 1, 144e3, FIO),
        row("nbdkit", 2, 1, 139e3, FIO),
        row("nbdkit", 1, 2, 178e3, FIO),
        row("qemu-storage-daemon", 0, 1, 22e3, BENCH),
        row("qemu-storage-daemon", 1, 1, 137e3, BENCH),
        row("qemu-storage-daemon", 2, 1, 140e3, BENCH),
    ]
}

fn read_cell(
    server_kind: &'static ServerKind,
    workload: &'static str,
    depth: u32,
    jobs: u32,
    settings: &Settings,
) -> Cell {
    let settings = settings.clone();
    let body = move |round: &Round<'_>| {
        let server = server_kind.start(&settings, READ_BYTES, round.stop)?;
        let before = server.cpu()?;
        let report = read_line(&server.uri(), depth, jobs).run(
            Duration::ZERO,
            round.duration,
            round.stop,
        )?;
        let cpu = server.cpu()?.saturating_sub(before);
        let used = processors_of(server_kind, jobs, &settings);
        let sample = read_sample(&report, cpu, used, settings.processors)?;
        Ok(noted(sample, is_ours(server_kind)))
    };
    Cell::new(server_kind.name, workload, jobs, body).overhead(OVERHEAD)
}

/// Adds a note to our own server's sample where the aim on IOPS does not apply.
fn noted(mut sample: Sample, is_ours: bool) -> Sample {
    let waits = sample.limit.as_deref().is_some_and(|limit| limit.contains(CLIENT));
    if is_ours && waits {
        sample.notes.push(
            "Where blockyard is limited by its client, or its client is the busier side (`limited \
             by`), the aim for IOPS does not apply: the aim for I/Os per second of server CPU time \
             does."
                .into(),
        );
    }
    sample
}

fn read_line(uri: &str, depth: u32, jobs: u32) -> Fio {
    Fio::new(READ).option("uri", uri).option("numjobs", jobs).option("iodepth", depth)
}

fn read_sample(
    report: &fio::FioReport,
    server_cpu: Duration,
    used: [f64; 2],
    processors: usize,
) -> Result<Sample, LabError> {
    if server_cpu.is_zero() {
        return Err(LabError::failed("CPU time of the server", "it used none"));
    }
    let (ios, seconds) = (report.ios as f64, server_cpu.as_secs_f64());
    let server_cpus = seconds / report.runtime.as_secs_f64();
    let sample = Sample::of(Metric::IOPS, report.iops)
        .with(Metric::CPU_PER_IO, seconds * 1e9 / ios)
        .with(Metric::IOS_PER_CPU_SECOND, ios / seconds)
        .with(Metric::BANDWIDTH, report.bandwidth)
        .with(Metric::CPUS, server_cpus)
        .with(Metric::CLIENT_CPUS, report.cpus());
    let limit = limit(used, [server_cpus, report.cpus()], processors);
    Ok(Sample { limit: Some(limit.into()), ..report.latencies(sample) })
}

fn stream_cell(kind: &'static ServerKind, settings: &Settings) -> Cell {
    let settings = settings.clone();
    let body = move |round: &Round<'_>| {
        let bytes = stream_bytes(round.duration);
        let server = kind.start(&settings, bytes, round.stop)?;
        let before = server.cpu()?;
        let ended = copy::run(&server.uri(), round)?;
        let server_seconds = server.cpu()?.saturating_sub(before).as_secs_f64();
        let (bytes, wall) = (bytes as f64, ended.wall.as_secs_f64());
        let (server_cpus, client_cpus) = (server_seconds / wall, ended.cpu.as_secs_f64() / wall);
        let sample = Sample::of(Metric::BANDWIDTH, bytes / wall)
            .with(BANDWIDTH_PER_CPU, bytes / server_seconds)
            .with(Metric::CPUS, server_cpus)
            .with(Metric::CLIENT_CPUS, client_cpus);
        let used = processors_of(kind, 1, &settings);
        let limit = limit(used, [server_cpus, client_cpus], settings.processors);
        Ok(Sample { limit: Some(limit.into()), ..sample })
    };
    Cell::new(kind.name, STREAM.name, 1, body).overhead(OVERHEAD)
}

/// The device size that takes about this long to read, in whole requests.
fn stream_bytes(duration: Duration) -> u64 {
    let bytes = (duration.as_secs_f64() * STREAM_BYTES_PER_SECOND) as u64;
    let [least, most] = STREAM_BYTES;
    bytes.clamp(least, most).next_multiple_of(copy::REQUEST_BYTES)
}

/// The number of processors that a server and its client can use: one per connection up to the
/// machine's number. Some servers use a single thread.
fn processors_of(server: &ServerKind, jobs: u32, settings: &Settings) -> [f64; 2] {
    let client = (jobs as usize).min(settings.processors) as f64;
    [server.threads_max.map_or(client, |most| client.min(f64::from(most))), client]
}

/// The side that was busy all the time; without such a side, the busier one.
///
/// `used` is the number of processors that each side can use, `busy` the number that it kept busy;
/// the server is first.
pub(super) fn limit(used: [f64; 2], busy: [f64; 2], processors: usize) -> &'static str {
    let [server, client] = busy;
    match (server >= BUSY * used[0], client >= BUSY * used[1]) {
        (true, true) => "both",
        (true, false) => "server",
        (false, true) => CLIENT,
        _ if server + client >= BUSY * processors as f64 => match server > client {
            true => "machine, most of it the server's",
            false => "machine, most of it the client's",
        },
        _ => match server > client {
            true => "neither; the server is busier",
            false => "neither; the client is busier",
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(quick: bool) -> Settings {
        let (program, scratch) = ("by".into(), "/tmp".into());
        Settings {
            quick,
            engine: None,
            program,
            lab: "blockyard-lab".into(),
            scratch,
            processors: 2,
            peers: Default::default(),
        }
    }

    #[test]
    fn everything_that_is_named_is_there() {
        for quick in [false, true] {
            let experiment = build(&settings(quick));
            let is_variant = |name| experiment.variants.iter().any(|variant| variant.name == name);
            for cell in &experiment.cells {
                assert!(is_variant(cell.variant), "{cell:?}");
                let has = |workload: &Workload| workload.name == cell.workload;
                assert!(experiment.workloads.iter().any(has), "{cell:?}");
            }
            for comparison in &experiment.comparisons {
                assert!(is_variant(comparison.before) && is_variant(comparison.after));
            }
            assert!(experiment.published.iter().all(|row| is_variant(row.variant)));
            assert_eq!(experiment.cells.len(), if quick { 8 } else { 28 });
        }
    }

    #[test]
    fn the_line_differs_by_server_depth_and_connections_only() {
        let line = read_line("nbd://a", 32, 4).line(Duration::ZERO, Duration::from_secs(3)).text();
        let want = "--ioengine=nbd --rw=randread --bs=4k --size=10G --norandommap --randrepeat=0 \
                    --uri=nbd://a --numjobs=4 --iodepth=32 --runtime=3000ms";
        assert!(line.ends_with(want), "{line}");
    }

    #[test]
    fn the_limit_is_who_is_busy() {
        let (one, all) = ([1.0, 1.0], [2.0, 2.0]);
        assert_eq!(limit(one, [1.0, 0.5], 2), "server");
        assert_eq!(limit(one, [0.5, 1.0], 2), "client");
        assert_eq!(limit(one, [0.95, 1.0], 2), "both");
        assert_eq!(limit(one, [0.5, 0.6], 2), "neither; the client is busier");
        assert_eq!(limit(all, [0.8, 1.2], 2), "machine, most of it the client's");
        assert_eq!(limit(all, [1.2, 0.8], 2), "machine, most of it the server's");
        assert_eq!(limit(all, [1.9, 0.1], 2), "server");
        let settings = settings(false);
        let used = |name, jobs| {
            let kind = KINDS.iter().find(|kind| kind.name == name).unwrap();
            processors_of(kind, jobs, &settings)
        };
        assert_eq!(used("blockyard", 4), [2.0, 2.0]);
        assert_eq!(used("blockyard", 1), [1.0, 1.0]);
        assert_eq!(used("qemu-nbd", 4), [1.0, 2.0]);
        assert_eq!(limit(used("qemu-nbd", 4), [0.97, 0.9], 2), "server");
    }

    #[test]
    fn a_stream_is_bounded_and_whole() {
        assert_eq!(stream_bytes(Duration::ZERO), 4 << 30);
        assert_eq!(stream_bytes(Duration::from_secs(3600)), 16 << 30);
        assert_eq!(stream_bytes(Duration::from_millis(3501)) % copy::REQUEST_BYTES, 0);
    }

    #[test]
    fn cost_is_the_servers_alone() {
        let report = fio::FioReport {
            ios: 1000,
            iops: 500.0,
            bandwidth: 500.0 * 4096.0,
            runtime: Duration::from_secs(2),
            cpu: Duration::from_secs(2),
            latency: None,
        };
        let sample = read_sample(&report, Duration::from_secs(1), [1.0, 1.0], 2).unwrap();
        assert_eq!(sample.limit.as_deref(), Some("client"));
        let notes = |is_ours| noted(sample.clone(), is_ours).notes;
        assert!(notes(true)[0].starts_with("Where blockyard is limited by its client"));
        assert!(notes(false).is_empty());
        assert!(sample.values.contains(&(Metric::CPU_PER_IO, 1e6)));
        assert!(sample.values.contains(&(Metric::IOS_PER_CPU_SECOND, 1000.0)));
        assert!(sample.values.contains(&(Metric::CPUS, 0.5)));
        assert!(sample.values.contains(&(Metric::CLIENT_CPUS, 1.0)));
        assert!(read_sample(&report, Duration::ZERO, [1.0, 1.0], 2).is_err());
    }
}
