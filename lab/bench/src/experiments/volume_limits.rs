//! `volume-limits`: a volume compared with the raw file, and the duration of operations that must
//! be short.

mod space;
mod times;
mod traffic;

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Variant, VariantRole, Workload};
use crate::experiments::sync_writes::AMPLIFICATION;
use crate::metric::Metric;

/// The experiment's name on the command line.
pub const NAME: &str = "volume-limits";

const RAW: &str = "raw";
const VOLUME: &str = "volume";
const WITH_WRITES: &str = "volume-beside-writes";
const WITH_SNAPSHOT: &str = "volume-with-snapshot";
const FULL: &str = "volume-80-full";
const FULLER: &str = "volume-90-full";
const IN_MEMORY: &str = "volume-in-memory";

const READ_4K: Workload = Workload {
    name: "read-4k",
    about: "4 KiB random reads: one thread per job, one read in flight each; on the raw file by \
            fio's psync",
};
const READ_1M: Workload = Workload { name: "read-1m", about: "as `read-4k` with 1 MiB reads" };
const READ_LATENCY: Workload = Workload {
    name: "read-latency",
    about: "latency in nanoseconds of 4 KiB random reads, one in flight, without other load and \
            concurrently with 32 durable 4 KiB writes in flight",
};
const WRITE_4K: Workload = Workload {
    name: "write-4k",
    about: "4 KiB random durable overwrites of a full volume by one thread; jobs are the writes in \
            flight",
};
const ASYNC_4K: Workload = Workload {
    name: "async-4k",
    about: "4 KiB random writes without FUA or flush by one thread, as fast as the volume accepts \
            them; jobs are the writes in flight; on the raw file by fio's io_uring with O_DIRECT",
};
const DEVICE_BYTES: Workload = Workload {
    name: "device-bytes",
    about: "device bytes per written byte of 4 KiB durable writes by one thread, before garbage \
            collection begins; jobs are the writes in flight",
};
const OVERWRITE: Workload = Workload {
    name: "overwrite",
    about: "4 KiB random durable overwrites by one thread, in a pool with free space and in pools \
            whose used part is 80 or 90 % of the capacity that they report; into these, as many \
            bytes as the pool has are written before the measurement; jobs are the writes in \
            flight",
};
const SNAPSHOT: Workload = Workload {
    name: "snapshot",
    about: "snapshots of a full volume with 32 durable 4 KiB writes in flight: the longest time in \
            nanoseconds without a completed write, around each snapshot and, for comparison, \
            around a durable write in its place",
};
const SNAPSHOT_1T: Workload = Workload {
    name: "snapshot-1t",
    about: "as `snapshot`, of a volume of 1 TiB with 16 KiB blocks, 4096 of them written in all \
            parts of its map",
};
const DISCARD: Workload =
    Workload { name: "discard-1t", about: "time in nanoseconds of a discard of 1 TiB and a flush" };
const CLONE: Workload = Workload {
    name: "clone-1t",
    about: "time in nanoseconds to clone a snapshot of a volume of 1 TiB with 16 KiB blocks, 4096 \
            of them written in all parts of its map before the snapshot and as many after it; and \
            the same for a volume of 1 GiB",
};
const ROLLBACK: Workload = Workload {
    name: "rollback-1t",
    about: "time in nanoseconds to roll the volumes of `clone-1t` back to their snapshots",
};
const REOPEN: Workload = Workload {
    name: "reopen-1g",
    about: "time in nanoseconds from opening a pool to the end of a first read, after its server \
            was killed with 1 GiB of log after the last checkpoint",
};
const REOPEN_4K: Workload = Workload {
    name: "reopen-1g-4k",
    about: "as `reopen-1g`, with a log of 4 KiB writes instead of 64 KiB writes",
};
const OPEN_1000: Workload = Workload {
    name: "open-1000",
    about: "time in nanoseconds from opening a pool with 1000 volumes until each has completed a \
            read",
};

/// The wall time of an operation that is done once.
const TIME: Metric = Metric::less("time", "ns");
/// The wall time of the operation on a volume of 1 GiB, for comparison with one of 1 TiB.
const TIME_GIB: Metric = Metric::less("time_of_1g", "ns");
/// The pause of a snapshot, as [`SNAPSHOT`] describes.
const PAUSE_P50: Metric = Metric::less("pause_p50", "ns");
const PAUSE_P99: Metric = Metric::less("pause_p99", "ns");
/// The pause around writes in place of snapshots, and how much longer it is around snapshots.
const WITHOUT_P50: Metric = Metric::less("pause_p50_without", "ns");
const WITHOUT_P99: Metric = Metric::less("pause_p99_without", "ns");
const ADDED_P99: Metric = Metric::less("pause_p99_added", "ns");
/// The longest latency of an I/O.
const LONGEST: Metric = Metric::less("latency_longest", "ns");
/// The rate of durable writes concurrent with the measured reads.
const WRITES: Metric = Metric::more("writes", "1/s");

/// The aims for ratios, and the bounds of values.
const AIM_READS: f64 = 0.9;
const AIM_LATENCY: f64 = 1.0 / 3.0;
const AIM_SNAPSHOT: f64 = 0.9;
const AIM_FULL: f64 = 0.5;
const MOST_BYTES: f64 = 1.15;
const MOST_BYTES_FULL: f64 = 2.5;
const SECOND: f64 = 1e9;
/// The time in which a disk of 640 MB/s writes all the memory that a pool has for writes.
const LONGEST_WRITE: f64 = SECOND / 10.0;

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let mut cells = traffic::cells(settings);
    cells.extend(space::cells(settings));
    cells.extend(times::cells(settings));
    let all = [
        READ_4K,
        READ_1M,
        READ_LATENCY,
        WRITE_4K,
        ASYNC_4K,
        DEVICE_BYTES,
        OVERWRITE,
        SNAPSHOT,
        SNAPSHOT_1T,
        DISCARD,
        CLONE,
        ROLLBACK,
        REOPEN,
        REOPEN_4K,
        OPEN_1000,
    ];
    let listed = |workload: &Workload| cells.iter().any(|cell| cell.workload == workload.name);
    Experiment {
        name: NAME,
        title: "the limits of a volume: reads, device bytes, snapshots, discards, openings",
        about: "A volume compared with the raw file, its write amplification, and the duration of \
                operations that must be short. The pools lie in the directory for temporary files \
                (TMPDIR), which must be on a disk. Blocks have 4 KiB unless stated otherwise, with \
                checksums and without compression. Device bytes are those that the kernel counts \
                for this process (/proc/self/io).",
        published: Vec::new(),
        variants: variants(),
        workloads: all.into_iter().filter(listed).collect(),
        comparisons: comparisons(),
        plots: vec![Metric::IOPS, Metric::P99, AMPLIFICATION, TIME],
        cells,
    }
}

fn variants() -> Vec<Variant> {
    let variant = |name, kind, about| Variant { name, kind, about };
    vec![
        variant(RAW, VariantRole::Limit, "fio on a raw file with O_DIRECT"),
        variant(VOLUME, VariantRole::Product, "the volume, in process"),
        variant(
            WITH_WRITES,
            VariantRole::Product,
            "the volume, concurrently with 32 durable writes in flight",
        ),
        variant(
            WITH_SNAPSHOT,
            VariantRole::Product,
            "the volume, with a snapshot of all its blocks",
        ),
        variant(
            FULL,
            VariantRole::Product,
            "the volume in a pool that is 80 % full and collects garbage all the time",
        ),
        variant(FULLER, VariantRole::Product, "the volume in a pool that is 90 % full"),
        variant(
            IN_MEMORY,
            VariantRole::Product,
            "the volume in a pool in memory, which shows the cost without a disk",
        ),
    ]
}

fn comparisons() -> Vec<Comparison> {
    let at_most = |words, most, variant, metric, workload: Workload| {
        Comparison::to(words, most, variant, metric).under(workload.name).aim(1.0)
    };
    let ratio = |before, after, metric, workload: Workload, aim| {
        Comparison::new(before, after, metric).under(workload.name).aim(aim)
    };
    vec![
        ratio(RAW, VOLUME, Metric::IOPS, READ_4K, AIM_READS),
        ratio(RAW, VOLUME, Metric::BANDWIDTH, READ_1M, AIM_READS),
        ratio(VOLUME, WITH_WRITES, Metric::P99, READ_LATENCY, AIM_LATENCY),
        ratio(VOLUME, WITH_SNAPSHOT, Metric::IOPS, WRITE_4K, AIM_SNAPSHOT),
        ratio(VOLUME, FULL, Metric::IOPS, OVERWRITE, AIM_FULL),
        Comparison::new(VOLUME, FULLER, Metric::IOPS).under(OVERWRITE.name),
        Comparison::new(RAW, VOLUME, Metric::IOPS).under(ASYNC_4K.name),
        at_most("100 ms", LONGEST_WRITE, VOLUME, LONGEST, ASYNC_4K),
        at_most("1.15 bytes", MOST_BYTES, VOLUME, AMPLIFICATION, DEVICE_BYTES).from_jobs(16),
        at_most("2.5 bytes", MOST_BYTES_FULL, FULL, AMPLIFICATION, OVERWRITE),
        at_most("1 ms", SECOND / 1000.0, VOLUME, PAUSE_P99, SNAPSHOT),
        at_most("1 ms", SECOND / 1000.0, VOLUME, PAUSE_P99, SNAPSHOT_1T),
        at_most("1 ms", SECOND / 1000.0, IN_MEMORY, PAUSE_P99, SNAPSHOT),
        at_most("1 ms", SECOND / 1000.0, IN_MEMORY, PAUSE_P99, SNAPSHOT_1T),
        at_most("1 s", SECOND, VOLUME, TIME, DISCARD),
        at_most("1 s", SECOND, VOLUME, TIME, REOPEN),
        at_most("1 s", SECOND, VOLUME, TIME, REOPEN_4K),
        at_most("5 s", 5.0 * SECOND, VOLUME, TIME, OPEN_1000),
    ]
}

/// Converts an error of the volume into one that names the operation.
fn failed<E: ToString>(what: &'static str) -> impl FnOnce(E) -> LabError {
    move |error| LabError::failed(what, error.to_string())
}
