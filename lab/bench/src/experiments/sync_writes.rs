//! `sync-writes`: durable writes in three ways. Threads write one after the other, or workers sync
//! each for itself, or one committer makes all waiting writes durable together. The references are
//! the raw file and other servers.

mod in_process;
mod over_nbd;
mod published;

use std::path::PathBuf;
use std::time::Duration;

use crate::error::LabError;
use crate::experiment::{Comparison, Experiment, Variant, VariantRole, Workload};
use crate::metric::Metric;
use crate::settings::Settings;
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
    about: "4 KiB durable writes anywhere, in process: jobs threads, each one at a time",
};
const W_16K: Workload = Workload { name: "16k", about: "the same of 16 KiB" };
const W_1M: Workload = Workload { name: "1m", about: "the same of 1 MiB" };
const W_RESTORE: Workload = Workload {
    name: "restore",
    about: "a restore: sequential 1 MiB writes, 4 in flight, a flush after every 32",
};
const W_RESTORE_3MS: Workload = Workload {
    name: "restore-disk-3ms",
    about: "the same; each write to the disk takes 3 ms more",
};
const W_NBD_4K: Workload = Workload {
    name: "nbd-4k",
    about: "4 KiB writes with FUA anywhere, over NBD: jobs in flight in all",
};
const W_NBD_16K: Workload =
    Workload { name: "nbd-16k", about: "the same of 16 KiB, our own servers alone" };
const W_NBD_1M: Workload = Workload { name: "nbd-1m", about: "as nbd-4k, of 1 MiB" };

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
                about: concat!("as 4k; each write to the disk takes ", $name, " more"),
            },
            large: Workload {
                name: concat!("1m-disk-", $name),
                about: concat!("as 1m; each write to the disk takes ", $name, " more"),
            },
            nbd_small: $nbd_small,
            nbd_large: Workload {
                name: concat!("nbd-1m-disk-", $name),
                about: concat!("as nbd-1m; each write to the disk takes ", $name, " more"),
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
            about: "as nbd-4k; each write to the disk takes 3 ms more",
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
        title: "durable writes: serial, by workers, by groups",
        about: "What does it cost that many writes are durable when they are answered? The pools \
                lie in the directory for temporary files, which has to be on a disk (TMPDIR), and \
                have all their segments beforehand; volumes have 1 GiB, blocks of 4 KiB for \
                writes of 4 KiB and of 16 KiB for longer ones, checksums, and no compression, for \
                the data are noise. The raw file has 1 GiB too and is written everywhere; fio \
                writes it past the page cache with O_DSYNC, in place and without checksums. On a \
                delayed disk each write to a file takes so much longer, any number at a time, as \
                in nbdkit's delay filter. Over NBD a client of the lab's own keeps writes in \
                flight on each connection (`-4c`: four), every one with FUA. CPU time is that of \
                the process: in process of clients and volume together, over NBD of the server \
                alone. `group-one-thread` has its clients in one thread, as a server has them.",
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
            "the submitting thread writes and syncs, one at a time; the log is the product's",
        ),
        variant(SERIAL_4C, VariantRole::Before, "the same, over four connections"),
        variant(
            TASKQ,
            VariantRole::After,
            "32 workers, each of which writes and syncs for itself, on the raw file in place, with \
             checksums; a baseline of the lab's",
        ),
        variant(TASKQ_4C, VariantRole::After, "the same, over four connections"),
        variant(
            LOG_TASKQ,
            VariantRole::After,
            "32 workers as the product has them, commit=taskq:32: each writes a request to the log \
             and syncs for it",
        ),
        variant(LOG_TASKQ_4C, VariantRole::After, "the same, over four connections"),
        variant(
            GROUP,
            VariantRole::Product,
            "one committer: what waits is written and synced at once",
        ),
        variant(GROUP_4C, VariantRole::Product, "the same, over four connections"),
        variant(
            GROUP_ONE_THREAD,
            VariantRole::Product,
            "the same; all clients in one thread, in process",
        ),
        variant(
            RAW,
            VariantRole::Limit,
            "fio on a raw file: --direct=1 --ioengine=psync --sync=dsync --numjobs=N",
        ),
        variant(
            NBDKIT,
            VariantRole::Peer,
            "nbdkit file, 32 threads; --filter=delay where there is one",
        ),
        variant(NBDKIT_4C, VariantRole::Peer, "the same, over four connections"),
        variant(NBDKIT_SERIAL, VariantRole::Peer, "the same, serialised by --filter=noparallel"),
        variant(NBDKIT_SERIAL_4C, VariantRole::Peer, "the same, serialised, over four connections"),
        variant(QEMU, VariantRole::Peer, "qemu-nbd on a raw file: --cache=none --aio=threads"),
        variant(QEMU_4C, VariantRole::Peer, "the same, over four connections"),
        variant(QCOW2, VariantRole::Peer, "qemu-nbd on a fresh qcow2 image, clusters of 64k"),
        variant(QCOW2_4C, VariantRole::Peer, "the same, over four connections"),
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
