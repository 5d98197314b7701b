//! `fuse`: our block file compared with QEMU's, by the same fio command lines.

use std::time::Duration;

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Published, Variant, VariantRole, Workload};
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::tools::file_server::{FileServerKind, KINDS, OURS_COUNT};
use crate::tools::fio::{Fio, FioReport};

/// The experiment's name on the command line.
pub const NAME: &str = "fuse";

/// The fio options that all servers and workloads share.
const READ: &str = "--rw=randread --bs=4k --size=1G --direct=1 --norandommap --randrepeat=0";
/// The size of the device that fio reads, in bytes.
const READ_BYTES: u64 = 1 << 30;
/// The time that starting and ending fio and a server takes.
const OVERHEAD: Duration = Duration::from_millis(500);

/// How fio reads, the least ratio that is the aim, and the number of jobs from which the aim holds.
struct ReadMethod {
    workload: Workload,
    options: &'static str,
    aim: f64,
    aim_jobs: u32,
}

const WAYS: [ReadMethod; 2] = [
    ReadMethod {
        workload: Workload {
            name: "sync",
            about: "4 KiB random reads by fio, direct, synchronous (psync)",
        },
        options: "--ioengine=psync",
        aim: 4.0,
        aim_jobs: 2,
    },
    ReadMethod {
        workload: Workload {
            name: "depth-32",
            about: "4 KiB random reads by fio, direct, 32 in flight for each job (io_uring)",
        },
        options: "--ioengine=io_uring --iodepth=32",
        aim: 3.0,
        aim_jobs: 1,
    },
];

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let jobs: &[u32] = if settings.quick { &[2] } else { &[1, 2] };
    let mut cells = Vec::new();
    for server in &KINDS {
        for way in &WAYS {
            cells.extend(jobs.iter().map(|&jobs| cell(server, way, jobs, settings)));
        }
    }
    Experiment {
        name: NAME,
        title: "Block files over FUSE",
        about: "Cost and throughput of a file in a FUSE mount, whose data another process serves. \
                Each server mounts a file that it reads without cost, and the same fio command \
                lines read that file. CPU time (`cpu_per_io`, ns) is that of the server only; \
                `client_cpus` is the CPU time of fio, which includes the kernel's part. There is \
                no warm-up: a measurement begins with the first request.",
        published: published(),
        variants: KINDS.iter().map(variant).collect(),
        workloads: WAYS.iter().map(|way| way.workload).collect(),
        comparisons: comparisons(),
        plots: vec![Metric::IOPS, Metric::IOS_PER_CPU_SECOND, Metric::P99],
        cells,
    }
}

fn variant(server: &FileServerKind) -> Variant {
    let is_ours = server.io_uring.is_some();
    let kind = if is_ours { VariantRole::Product } else { VariantRole::Peer };
    Variant { name: server.name, kind, about: server.about }
}

fn comparisons() -> Vec<Comparison> {
    let (ours, theirs) = KINDS.split_at(OURS_COUNT);
    let pairs = ours.iter().flat_map(|ours| theirs.iter().map(move |theirs| (ours, theirs)));
    let against = |(ours, theirs): (&FileServerKind, &FileServerKind)| {
        let (ours, theirs) = (ours.name, theirs.name);
        WAYS.iter().flat_map(move |way| {
            let compare =
                move |metric| Comparison::new(theirs, ours, metric).under(way.workload.name);
            [
                compare(Metric::IOPS).from_jobs(way.aim_jobs).aim(way.aim),
                compare(Metric::IOS_PER_CPU_SECOND),
            ]
        })
    };
    let [device, ring] = [ours[0].name, ours[1].name];
    let between = WAYS.iter().flat_map(|way| {
        let compare = |metric| Comparison::new(device, ring, metric).under(way.workload.name);
        [compare(Metric::IOPS), compare(Metric::IOS_PER_CPU_SECOND)]
    });
    pairs.flat_map(against).chain(between).collect()
}

/// The figures of a bare prototype and of QEMU at the time when the aims were set.
fn published() -> Vec<Published> {
    const SOURCE: &str = "fio 3.33, 2 virtual CPUs (AMD EPYC), Linux 6.18, loaded machine, +-50 %; \
                          our figures are those of a prototype of 35 lines";
    let row = |variant, at: usize, jobs, iops| {
        let workload = WAYS[at].workload.name;
        Published { variant, workload, jobs, metric: Metric::IOPS, value: iops, source: SOURCE }
    };
    vec![
        row("blockyard", 0, 1, 34e3),
        row("blockyard", 0, 2, 200e3),
        row("blockyard", 1, 1, 357e3),
        row("blockyard", 1, 2, 366e3),
        row("qemu-storage-daemon", 0, 1, 18e3),
        row("qemu-storage-daemon", 0, 2, 29e3),
        row("qemu-storage-daemon", 1, 1, 78e3),
        row("qemu-storage-daemon", 1, 2, 87e3),
    ]
}

fn cell(
    server_kind: &'static FileServerKind,
    way: &'static ReadMethod,
    jobs: u32,
    settings: &Settings,
) -> Cell {
    let settings = settings.clone();
    let body = move |round: &Round<'_>| {
        let server = server_kind.start(&settings, READ_BYTES, round.stop)?;
        let before = server.cpu()?;
        let fio = Fio::new(READ).option("filename", server.file().display());
        let report = line(fio, way, jobs).run(Duration::ZERO, round.duration, round.stop)?;
        let cpu = server.cpu()?.saturating_sub(before);
        sample(&report, cpu)
    };
    Cell::new(server_kind.name, way.workload.name, jobs, body).overhead(OVERHEAD)
}

fn line(mut fio: Fio, way: &ReadMethod, jobs: u32) -> Fio {
    for option in way.options.split_whitespace() {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        fio = fio.option(name.trim_start_matches('-'), value);
    }
    fio.option("numjobs", jobs)
}

fn sample(report: &FioReport, server_cpu: Duration) -> Result<Sample, LabError> {
    if server_cpu.is_zero() {
        return Err(LabError::failed("CPU time of the server", "it used none"));
    }
    let (ios, seconds) = (report.ios as f64, server_cpu.as_secs_f64());
    let sample = Sample::of(Metric::IOPS, report.iops)
        .with(Metric::CPU_PER_IO, seconds * 1e9 / ios)
        .with(Metric::IOS_PER_CPU_SECOND, ios / seconds)
        .with(Metric::BANDWIDTH, report.bandwidth)
        .with(Metric::CPUS, seconds / report.runtime.as_secs_f64())
        .with(Metric::CLIENT_CPUS, report.cpus());
    Ok(report.latencies(sample))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_differs_by_file_way_and_jobs_only() {
        let fio = || Fio::new(READ).option("filename", "/m/null0");
        let text = |way| line(fio(), way, 2).line(Duration::ZERO, Duration::from_secs(1)).text();
        let want = "--rw=randread --bs=4k --size=1G --direct=1 --norandommap --randrepeat=0 \
                    --filename=/m/null0";
        let sync = format!("{want} --ioengine=psync --numjobs=2 --runtime=1000ms");
        assert!(text(&WAYS[0]).ends_with(&sync), "{}", text(&WAYS[0]));
        let deep = format!("{want} --ioengine=io_uring --iodepth=32 --numjobs=2 --runtime=1000ms");
        assert!(text(&WAYS[1]).ends_with(&deep), "{}", text(&WAYS[1]));
    }

    #[test]
    fn cost_is_the_servers_alone() {
        let report = FioReport {
            ios: 1000,
            iops: 500.0,
            bandwidth: 500.0 * 4096.0,
            runtime: Duration::from_secs(2),
            cpu: Duration::from_secs(2),
            latency: None,
        };
        let sample = sample(&report, Duration::from_secs(1)).unwrap();
        assert!(sample.values.contains(&(Metric::CPU_PER_IO, 1e6)));
        assert!(sample.values.contains(&(Metric::CPUS, 0.5)));
        assert!(super::sample(&report, Duration::ZERO).is_err());
    }
}
