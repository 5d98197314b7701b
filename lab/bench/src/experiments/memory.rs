//! `memory`: the physical memory of the product for each device, connection, zone and volume, and
//! for the map of a volume.

mod pools;
mod servers;

use std::thread;
use std::time::{Duration, Instant};

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Comparison, Experiment, Variant, VariantRole, Workload};
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::tools::child::CommandLine;
use crate::tools::nbd_client::{NbdClient, NbdOp, NbdRequests, Place};
use crate::tools::server::Server;

/// The experiment's name on the command line.
pub const NAME: &str = "memory";

const NULL: &str = "null";
const ZONED: &str = "zoned";
const RAM: &str = "ram";
const SMR: &str = "smr";
const FILE: &str = "file";
const VOLUME: &str = "volume";
const NBD: &str = "nbd";
const NBD_RAM: &str = "nbd-ram";
const NBD_FILE: &str = "nbd-file";
const NBD_VOLUME: &str = "nbd-volume";
const NVME: &str = "nvme";
const VHOST: &str = "vhost";
const FUSE: &str = "fuse";
const MAP_HIT: &str = "map-hit";
const MAP_MISS: &str = "map-miss";
const MAP_DEFAULT: &str = "map-default";

const DEVICE: Workload =
    Workload { name: "device", about: "one more device without channels; jobs are the devices" };
const IDLE: Workload = Workload {
    name: "idle",
    about: "one more connection (NBD), I/O queue (NVMe/TCP), ring (vhost-user-blk) or open file \
            (FUSE) that has done reads of 4 KiB and then rested for 2.5 seconds; jobs are their \
            number",
};
const BUSY: Workload = Workload {
    name: "busy",
    about: "one more connection, queue or ring directly after writes of 128 KiB, 32 in flight on \
            each; jobs are their number",
};
const ZONE: Workload = Workload {
    name: "zone",
    about: "one more zone of 256 MiB, from a disk with 1000 zones to one of 14 TB, which has \
            52156, all empty; `memory_total` is that of the larger disk",
};
const MAP: Workload = Workload {
    name: "map-1t",
    about: "a volume of 1 TiB with 16 KiB blocks and a block in each of its 262144 leaves, after \
            its pool was opened: memory beyond that of a pool with an empty volume",
};
const READ_MAP: Workload = Workload {
    name: "read-1t",
    about: "random reads of whole blocks of the volume of `map-1t`, one in flight: of leaves that \
            are in the map cache, of leaves that are not, and of all leaves with the default \
            cache of 128 MiB; `device_bytes` are the bytes read from the disk for each",
};
const OPEN_10000: Workload = Workload {
    name: "open-10000",
    about: "a pool with 10000 volumes of 1 GiB, each with a written block: time from the start of \
            `blockyard serve` with one of them until a client is connected to it, its memory then, \
            and the peak, which includes the program",
};
const USE_10000: Workload = Workload {
    name: "use-10000",
    about: "the same pool, in process: time until each of its volumes is an open device that has \
            completed a read",
};

/// Measures a cell once.
type MeasureMemory = fn(&Settings, &Round<'_>) -> Result<Sample, LabError>;

/// The memory of one more.
const MEMORY: Metric = Metric::less("memory", "B");
/// The memory of all of them, or of the process.
const MEMORY_TOTAL: Metric = Metric::less("memory_total", "B");
/// The greatest physical memory of the process, with its program.
const MEMORY_PEAK: Metric = Metric::less("memory_peak", "B");
/// The wall time of an operation that is done once.
const TIME: Metric = Metric::less("time", "ns");
/// Bytes from the disk for each operation.
const DEVICE_BYTES: Metric = Metric::less("device_bytes", "B");

/// The aims for a pool with 10,000 volumes.
const OPEN_NS_MAX: f64 = 5e9;
const OPEN_BYTES_MAX: f64 = 200e6;

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let mut cells = servers::cells(settings);
    cells.extend(pools::cells(settings));
    let all = [DEVICE, IDLE, BUSY, ZONE, MAP, READ_MAP, OPEN_10000, USE_10000];
    let listed = |workload: &Workload| cells.iter().any(|cell| cell.workload == workload.name);
    Experiment {
        name: NAME,
        title: "the memory of devices, connections, zones, maps and volumes",
        about: "Anonymous memory of `blockyard serve`, as `/proc/PID/smaps_rollup` has it: heap, \
                stacks and mapped buffers, without the program, shared memory, and what the kernel \
                holds for the process. The memory of one is the difference between a server with \
                few and one with many, divided by the difference of their numbers. It depends \
                hardly on the load of the machine.",
        published: Vec::new(),
        variants: variants(),
        workloads: all.into_iter().filter(listed).collect(),
        comparisons: comparisons(),
        plots: vec![MEMORY, MEMORY_TOTAL],
        cells,
    }
}

fn variants() -> Vec<Variant> {
    let variant = |(name, about)| Variant { name, kind: VariantRole::Product, about };
    [
        (NULL, "null devices without memory"),
        (ZONED, "zoned null devices without memory; as a device, with 64 zones"),
        (RAM, "RAM disks of 1 GiB, empty"),
        (SMR, "SMR disks in memory; as a device, with 64 zones"),
        (FILE, "files of 1 MiB, by io_uring with direct I/O where the system allows it"),
        (VOLUME, "volumes of one pool"),
        (NBD, "NBD, of a null device without memory"),
        (NBD_RAM, "NBD, of a RAM disk"),
        (NBD_FILE, "NBD, of a file"),
        (NBD_VOLUME, "NBD, of a volume"),
        (NVME, "NVMe/TCP, of a null device without memory"),
        (VHOST, "vhost-user-blk, of a null device without memory"),
        (FUSE, "FUSE by `/dev/fuse`, of a null device without memory"),
        (MAP_HIT, "4096 leaves, which are in the cache"),
        (MAP_MISS, "a map cache of two leaves, the smallest"),
        (MAP_DEFAULT, "the default map cache, which holds an eighth of the leaves"),
    ]
    .map(variant)
    .into()
}

fn comparisons() -> Vec<Comparison> {
    let cost = |metric| Comparison::new(MAP_HIT, MAP_MISS, metric).under(READ_MAP.name).cost();
    let at_most = |words, most, metric, workload: Workload| {
        Comparison::to(words, most, VOLUME, metric).under(workload.name).aim(1.0)
    };
    vec![
        cost(Metric::CPU_PER_OP),
        cost(Metric::NS_PER_OP),
        at_most("5 s", OPEN_NS_MAX, TIME, OPEN_10000),
        at_most("200 MB", OPEN_BYTES_MAX, MEMORY_PEAK, OPEN_10000),
        at_most("5 s", OPEN_NS_MAX, TIME, USE_10000),
    ]
}

/// Starts a server by a line, and waits until an NBD client gets the export `last`: a server
/// accepts before it has opened its devices, in the order of the line.
fn started(
    line: CommandLine,
    last: &str,
    settings: &Settings,
    round: &Round<'_>,
) -> Result<Server, LabError> {
    let line = line.with(&[("PROGRAM", &settings.program.display())]);
    let server = Server::start(line, settings, round.stop)?;
    let place = Place::Unix(server.socket());
    let requests = NbdRequests { op: NbdOp::Read, len: 4096, depth: 1 };
    let began = Instant::now();
    while let Err(refused) = NbdClient::connect(&place, last, requests, round.seed) {
        if round.stop.is_set() {
            return Err(LabError::Interrupted);
        }
        if began.elapsed() > READY_MAX {
            return Err(refused);
        }
        thread::sleep(READY_LOOK);
    }
    Ok(server)
}

/// The memory of one more, from the memory of processes with few and with many.
fn slope(few: (u64, usize), many: (u64, usize)) -> Sample {
    let bytes = many.0 as f64 - few.0 as f64;
    let each = bytes / (many.1 - few.1) as f64;
    Sample::of(MEMORY, each).with(MEMORY_TOTAL, many.0 as f64)
}

/// Converts an error of the product into one that names the operation.
fn failed<E: ToString>(what: &'static str) -> impl FnOnce(E) -> LabError {
    move |error| LabError::failed(what, error.to_string())
}

/// The time after which a server without its last device has failed, and the interval of looks.
const READY_MAX: Duration = Duration::from_secs(60);
const READY_LOOK: Duration = Duration::from_millis(5);

/// How long clients rest: longer than any server keeps the memory of idle ones.
const REST: Duration = Duration::from_millis(2500);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_one_is_that_of_the_difference() {
        let sample = slope((1000, 2), (9000, 10));
        assert_eq!(sample.values, [(MEMORY, 1000.0), (MEMORY_TOTAL, 9000.0)]);
        // Noise of a process must not become a panic.
        assert_eq!(slope((1000, 2), (900, 12)).values[0], (MEMORY, -10.0));
    }
}
