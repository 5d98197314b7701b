//! `sync-writes`: durable writes in three ways. Threads write one after the other, or workers sync
//! each for itself, or one committer makes all waiting writes durable together. The references are
//! the raw file and other servers.

mod in_process;
mod over_nbd;
mod published;

use std::path::PathBuf;
use std::time::Duration;

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Comparison, Experiment, Variant, VariantRole, Workload};
use crate::metric::Metric;
use crate::tools::pool_place::{self, Commit, PoolShape};

pub(crate) use in_process::Clients;

/// The experiment's name on the command line.
pub const NAME: &str = "sync-writes";

const SERIAL: &str = "serial";
const TASKQ: &str = "taskq-32";
const LOG_TASKQ: &str = "log-taskq-32";
const GROUP: &str = "group";
const GROUP_ONE_THREAD: &str = "group-one-thread";
const RAW: &str = "raw";
const SERIAL_4C: &str = "serial-4c";
const TASKQ_4C: &str = "taskq-32-4c";
const LOG_TASKQ_4C: &str = "log-taskq-32-4c";
const GROUP_4C: &str = "group-4c";
const NBDKIT: &str = "nbdkit";
const NBDKIT_4C: &str = "nbdkit-4c";
const NBDKIT_SERIAL: &str = "nbdkit-serial";
const NBDKIT_SERIAL_4C: &str = "nbdkit-serial-4c";
const QEMU: &str = "qemu-nbd";
const QEMU_4C: &str = "qemu-nbd-4c";
const QCOW2: &str = "qcow2";
const QCOW2_4C: &str = "qcow2-4c";

/// Bytes written to the disk per acknowledged byte.
pub(crate) const AMPLIFICATION: Metric = Metric::less("device_bytes_per_byte", "");

/// A length of writes, with its workloads and its pool.
#[derive(Clone, Copy, Debug)]
struct Size {
    len: u64,
    pool: &'static PoolShape,
}

const GIB: u64 = 1 << 30;

/// The pool with 4 KiB blocks for writes of that length, and the default for longer writes.
static POOL_4K: PoolShape =
    PoolShape { name: "pool-4k", block_bytes: 4096, volume_bytes: GIB, pool_bytes: 2 * GIB };
static POOL_16K: PoolShape =
    PoolShape { name: "pool-16k", block_bytes: 16 << 10, volume_bytes: GIB, pool_bytes: 3 * GIB };
/// The length of the raw file in bytes: as long as a volume, except in a quick run.
fn raw_bytes(settings: &Settings) -> u64 {
    if settings.quick { GIB / 4 } else { GIB }
}

/// The path that is written to under this commit mode: a new pool, or for workers the raw file.
fn source(settings: &Settings, pool: &PoolShape, commit: Commit) -> Result<PathBuf, LabError> {
    match commit {
        Commit::TaskWorkers => pool_place::raw_file(settings, raw_bytes(settings)),
        _ => pool.fresh(settings),
    }
}

const SMALL: Size = Size { len: 4 << 10, pool: &POOL_4K };
const MIDDLE: Size = Size { len: 16 << 10, pool: &POOL_16K };
const LARGE: Size = Size { len: 1 << 20, pool: &POOL_16K };

const W_4K: Workload = Workload {
    name: "4k",
    about: "4 KiB random durable writes in process: one thread per job, one write in flight each",
};
const W_16K: Workload = Workload { name: "16k", about: "as `4k` with 16 KiB writes" };
const W_1M: Workload = Workload { name: "1m", about: "as `4k` with 1 MiB writes" };
const W_RESTORE: Workload = Workload {
    name: "restore",
    about: "a restore: sequential 1 MiB writes, 4 in flight, and a flush after every 32",
};
const W_RESTORE_3MS: Workload = Workload {
    name: "restore-disk-3ms",
    about: "as `restore`; each write to the disk takes 3 ms longer",
};
const W_NBD_4K: Workload = Workload {
    name: "nbd-4k",
    about: "4 KiB random writes with FUA over NBD; jobs are the writes in flight over all \
            connections",
};
const W_NBD_16K: Workload =
    Workload { name: "nbd-16k", about: "as `nbd-4k` with 16 KiB writes; our own servers only" };
const W_NBD_1M: Workload = Workload { name: "nbd-1m", about: "as `nbd-4k` with 1 MiB writes" };

/// A disk whose writes are delayed.
#[derive(Debug)]
struct Delayed {
    delay: Duration,
    /// The delay for nbdkit's delay filter, which counts milliseconds.
    filter: Option<&'static str>,
    small: Workload,
    large: Workload,
    nbd_small: Option<Workload>,
    nbd_large: Workload,
}

macro_rules! delayed {
    ($us:literal, $name:literal, $filter:expr, $nbd_small:expr) => {
        Delayed {
            delay: Duration::from_micros($us),
            filter: $filter,
            small: Workload {
                name: concat!("4k-disk-", $name),
                about: concat!("as `4k`; each write to the disk takes ", $name, " longer"),
            },
            large: Workload {
                name: concat!("1m-disk-", $name),
                about: concat!("as `1m`; each write to the disk takes ", $name, " longer"),
            },
            nbd_small: $nbd_small,
            nbd_large: Workload {
                name: concat!("nbd-1m-disk-", $name),
                about: concat!("as `nbd-1m`; each write to the disk takes ", $name, " longer"),
            },
        }
    };
}

static DELAYED: [Delayed; 4] = [
    delayed!(100, "0.1ms", None, None),
    delayed!(1000, "1ms", Some("1ms"), None),
    delayed!(
        3000,
        "3ms",
        Some("3ms"),
        Some(Workload {
            name: "nbd-4k-disk-3ms",
            about: "as `nbd-4k`; each write to the disk takes 3 ms longer",
        })
    ),
    delayed!(10_000, "10ms", Some("10ms"), None),
];
/// The index of the delay that the published effect needs.
const PUBLISHED_DELAY: usize = 2;

/// The published gain of the workers, on one connection.
const AIM_SERIAL: f64 = 3.15;
const AIM_CONNECTIONS: f64 = 0.95;
const AIM_RAW: f64 = 1.5;
const AIM_TASKQ: f64 = 2.0;
const AIM_RAW_LARGE: f64 = 0.9;
const AIM_QEMU: f64 = 1.5;
const AIM_QCOW2: f64 = 10.0;
/// The number of clients, or of requests in flight, for which the aims on small writes hold.
const MANY: u32 = 32;

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let mut cells = in_process::cells(settings);
    cells.extend(over_nbd::cells(settings));
    let mut workloads =
        vec![W_4K, W_16K, W_1M, W_RESTORE, W_RESTORE_3MS, W_NBD_4K, W_NBD_16K, W_NBD_1M];
    for delayed in &DELAYED {
        workloads.extend([delayed.small, delayed.large, delayed.nbd_large]);
        workloads.extend(delayed.nbd_small);
    }
    workloads.retain(|workload| cells.iter().any(|cell| cell.workload == workload.name));
    Experiment {
        name: NAME,
        title: "durable writes: serial, by workers, and by group commit",
        about: "Cost of durable writes: IOPS, latency, CPU time per write (ns), and device bytes \
                per written byte. The variants differ in how they write and sync: one write after \
                the other, 32 workers that each sync their own write, or one committer that syncs \
                all waiting writes together. The pools lie in the directory for temporary files \
                (TMPDIR), which must be on a disk, and have all their segments before the \
                measurement. Volumes have 1 GiB, checksums and no compression (the data are \
                noise); their blocks have 4 KiB for 4 KiB writes and 16 KiB for longer ones. The \
                raw file has the same size and is fully allocated; fio writes it in place with \
                O_DIRECT and O_DSYNC, without checksums. On a delayed disk each write to a file \
                takes the given time longer, concurrently with others, as with nbdkit's delay \
                filter. Over NBD the lab's own client keeps writes in flight on each connection \
                (`-4c`: four connections), each with FUA. CPU time is that of the process: in \
                process clients and volume together, over NBD the server only. `group-one-thread` \
                has all its clients in one thread, as a server has.",
        published: published::rows(&workloads),
        variants: variants(),
        workloads,
        comparisons: comparisons(),
        plots: vec![Metric::IOPS, Metric::BANDWIDTH, Metric::P99, AMPLIFICATION],
        cells,
    }
}

fn variants() -> Vec<Variant> {
    let variant = |name, kind, about| Variant { name, kind, about };
    vec![
        variant(
            SERIAL,
            VariantRole::Before,
            "the submitting thread writes and syncs, one write at a time, to the product's log",
        ),
        variant(SERIAL_4C, VariantRole::Before, "as `serial`, over four connections"),
        variant(
            TASKQ,
            VariantRole::After,
            "a baseline of the lab: 32 workers, each of which writes the raw file in place with \
             checksums and syncs its own write",
        ),
        variant(TASKQ_4C, VariantRole::After, "as `taskq-32`, over four connections"),
        variant(
            LOG_TASKQ,
            VariantRole::After,
            "the product with commit=taskq:32: 32 workers, each of which writes a request to the \
             log and syncs its own write",
        ),
        variant(LOG_TASKQ_4C, VariantRole::After, "as `log-taskq-32`, over four connections"),
        variant(
            GROUP,
            VariantRole::Product,
            "group commit: one committer writes and syncs all waiting writes together",
        ),
        variant(GROUP_4C, VariantRole::Product, "as `group`, over four connections"),
        variant(
            GROUP_ONE_THREAD,
            VariantRole::Product,
            "group commit; all clients are in one thread, in process",
        ),
        variant(
            RAW,
            VariantRole::Limit,
            "fio on a raw file: --direct=1 --ioengine=psync --sync=dsync --numjobs=N",
        ),
        variant(
            NBDKIT,
            VariantRole::Peer,
            "nbdkit with its file plugin and 32 threads; on a delayed disk with --filter=delay",
        ),
        variant(NBDKIT_4C, VariantRole::Peer, "as `nbdkit`, over four connections"),
        variant(NBDKIT_SERIAL, VariantRole::Peer, "nbdkit, serialised by --filter=noparallel"),
        variant(
            NBDKIT_SERIAL_4C,
            VariantRole::Peer,
            "nbdkit, serialised by --filter=noparallel, over four connections",
        ),
        variant(QEMU, VariantRole::Peer, "qemu-nbd on a raw file: --cache=none --aio=threads"),
        variant(QEMU_4C, VariantRole::Peer, "as `qemu-nbd`, over four connections"),
        variant(QCOW2, VariantRole::Peer, "qemu-nbd on a new qcow2 image with 64 KiB clusters"),
        variant(QCOW2_4C, VariantRole::Peer, "as `qcow2`, over four connections"),
    ]
}

fn comparisons() -> Vec<Comparison> {
    let iops = |before, after| Comparison::new(before, after, Metric::IOPS);
    let bandwidth = |before, after| Comparison::new(before, after, Metric::BANDWIDTH);
    let published = &DELAYED[PUBLISHED_DELAY];
    let mut all = vec![
        iops(RAW, GROUP).under(W_4K.name).from_jobs(MANY).aim(AIM_RAW),
        iops(RAW, GROUP_ONE_THREAD).under(W_4K.name).from_jobs(MANY).aim(AIM_RAW),
        iops(LOG_TASKQ, GROUP).under(W_4K.name).from_jobs(MANY).aim(AIM_TASKQ),
        iops(LOG_TASKQ, GROUP_ONE_THREAD).under(W_4K.name).from_jobs(MANY).aim(AIM_TASKQ),
        // The workers write in place, without a log, which is less work than the volume's.
        iops(TASKQ, GROUP).under(W_4K.name).from_jobs(MANY),
        iops(TASKQ, GROUP_ONE_THREAD).under(W_4K.name).from_jobs(MANY),
        bandwidth(RAW, GROUP).under(W_1M.name).aim(AIM_RAW_LARGE),
        bandwidth(SERIAL, GROUP).under(published.nbd_large.name).from_jobs(4).aim(AIM_SERIAL),
        bandwidth(GROUP_4C, GROUP)
            .under(published.nbd_large.name)
            .from_jobs(4)
            .aim(AIM_CONNECTIONS),
        iops(QEMU, GROUP).under(W_NBD_4K.name).from_jobs(MANY).aim(AIM_QEMU),
        iops(QCOW2, GROUP).under(W_NBD_4K.name).from_jobs(MANY).aim(AIM_QCOW2),
        bandwidth(NBDKIT_SERIAL, NBDKIT).under(published.nbd_large.name),
        bandwidth(SERIAL, TASKQ).under(published.nbd_large.name),
        bandwidth(SERIAL, GROUP).under(W_RESTORE.name),
        bandwidth(RAW, GROUP).under(W_RESTORE.name),
        bandwidth(SERIAL, GROUP).under(W_RESTORE_3MS.name),
    ];
    for workload in [W_4K, W_16K, W_1M, W_NBD_4K, W_NBD_16K, W_NBD_1M] {
        all.push(iops(SERIAL, TASKQ).under(workload.name));
        all.push(iops(SERIAL, GROUP).under(workload.name));
    }
    for workload in [W_NBD_4K, W_NBD_1M] {
        all.push(iops(NBDKIT, GROUP).under(workload.name));
        all.push(iops(QEMU_4C, GROUP_4C).under(workload.name));
    }
    for delayed in &DELAYED {
        all.push(iops(SERIAL, GROUP).under(delayed.small.name));
        all.push(iops(SERIAL, GROUP).under(delayed.large.name));
        if delayed.delay != published.delay {
            all.push(bandwidth(SERIAL, GROUP).under(delayed.nbd_large.name));
        }
        all.push(bandwidth(NBDKIT, GROUP).under(delayed.nbd_large.name));
        if let Some(workload) = delayed.nbd_small {
            all.push(iops(SERIAL, GROUP).under(workload.name));
        }
    }
    all
}
