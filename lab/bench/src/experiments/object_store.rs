//! `object-store`: a pool in an object store, compared with a pool in a directory and with the
//! object store's own rates.

use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::Disk;
use blockyard_core::blocking::Io;
use blockyard_core::{Bio, Flags, SECTOR_BYTES, Sector};
use blockyard_object::{BucketSettings, LocalAcknowledgement, ObjectClient};
use blockyard_volume::Options;
use bytes::Bytes;
use tokio::runtime::Runtime;

use crate::error::LabError;
use crate::experiment::{Cell, Comparison, Experiment, Settings, Variant, VariantRole, Workload};
use crate::experiments::sync_writes::Clients;
use crate::load::durable::{Ask, Ios};
use crate::load::workers::{self, Work};
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::stop::Stop;
use crate::tools::bucket_place::{BucketPool, LabBucket, SharedBucket, volume};
use crate::tools::cpu::of_process;
use crate::tools::pool_place::{self, Commit, PoolShape};

/// The experiment's name on the command line.
pub const NAME: &str = "object-store";

const DIRECTORY: &str = "directory";
const ACK_LOCAL: &str = "ack-local";
const ACK_OBJECT: &str = "ack-object";
const REQUESTS: &str = "requests";

const WRITE_4K: Workload = Workload {
    name: "write-4k",
    about: "4 KiB random durable writes, one in flight for each job; `requests`: a PUT of 4 KiB \
            for each",
};
const WRITE: Workload = Workload {
    name: "sequential-write",
    about: "sequential writes of 1 MiB by one thread, 32 in flight, and a flush after every 128; \
            `requests`: PUTs of 4 MiB, 16 at once",
};
const READ: Workload = Workload {
    name: "sequential-read",
    about: "sequential reads of 1 MiB by one thread, 32 in flight, which the cache does not have; \
            `requests`: GETs of 4 MiB, 16 at once",
};
const OPEN: Workload = Workload {
    name: "open",
    about: "opens a volume of 1 TiB in a pool with 100,000 segments, on a machine with an empty \
            cache, and closes it",
};

/// The least part of the durable writes of a pool in a directory.
const AIM_LOCAL: f64 = 0.9;
/// The least number of writes for each PUT's worth of time.
const AIM_OBJECT: f64 = 20.0;
/// The least part of the object store's own rate.
const AIM_SEQUENTIAL: f64 = 0.8;
/// The longest opening, in nanoseconds.
const OPEN_NS: f64 = 3e9;
/// The number of clients for which the aims on small writes hold.
const MANY: u32 = 32;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;
/// RequestJob of the sequential loads in flight: those of a volume, and PUTs or GETs.
const SEQUENTIAL_DEPTH: usize = 32;
const REQUESTS_AT_ONCE: u32 = 16;
/// Writes between two flushes.
const FLUSH_EVERY: u32 = 128;
/// The length of a PUT or GET that is compared with a sequential load, in bytes.
const LARGE_BYTES: usize = 4 << 20;
/// Objects that each job of PUTs writes in turn.
const NAMES: u64 = 64;
/// Segments of the pool that is opened, and their length in bytes.
const SEGMENTS: usize = 100_000;
const SEGMENT_BYTES: u32 = 32 << 10;

/// The pool in a directory.
static SHAPE: PoolShape =
    PoolShape { name: "pool", block_bytes: 4096, volume_bytes: GIB, pool_bytes: 2 * GIB };

/// A pool whose object store acknowledges syncs.
fn by_object(name: &'static str) -> BucketPool {
    BucketPool {
        name,
        settings: BucketSettings::default(),
        block_bytes: 4096,
        volume_bytes: GIB,
        capacity_bytes: 8 * GIB,
    }
}

/// A pool whose local log acknowledges syncs.
fn by_log() -> BucketPool {
    let local = LocalAcknowledgement::default();
    let memory_bytes = local.lag_bytes_max + 64 * MIB;
    let settings = BucketSettings { local: Some(local), memory_bytes, ..Default::default() };
    BucketPool { settings, ..by_object(ACK_LOCAL) }
}

/// A pool that is written and read from its start to its end.
fn sequential() -> BucketPool {
    // A quarter of the volume, so that a read finds nothing of the one before.
    let settings = BucketSettings { cache_bytes: GIB / 4, ..Default::default() };
    BucketPool { settings, block_bytes: 128 << 10, ..by_object("sequential") }
}

/// A pool with many segments.
fn long() -> BucketPool {
    let settings = BucketSettings { segment_bytes: SEGMENT_BYTES, ..Default::default() };
    BucketPool {
        settings,
        block_bytes: 16 << 10,
        volume_bytes: TIB,
        capacity_bytes: 2 * SEGMENTS as u64 * u64::from(SEGMENT_BYTES),
        ..by_object("open")
    }
}

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let shared = SharedBucket::default();
    let jobs: &[u32] = if settings.quick { &[MANY] } else { &[1, 4, MANY] };
    let mut cells = Vec::new();
    for &jobs in jobs {
        cells.extend(small_writes(settings, &shared, jobs));
    }
    if !settings.quick {
        cells.extend(sequential_cells(settings, &shared));
        cells.push(open_cell(settings, &shared));
    }
    let variant = |name, kind, about| Variant { name, kind, about };
    let bandwidth = |workload: Workload| {
        Comparison::new(REQUESTS, ACK_OBJECT, Metric::BANDWIDTH)
            .under(workload.name)
            .aim(AIM_SEQUENTIAL)
    };
    let small = |before, after| Comparison::new(before, after, Metric::IOPS).under(WRITE_4K.name);
    Experiment {
        name: NAME,
        title: "a pool in an object store",
        about: "A volume whose pool lies in an object store, MinIO on this machine, which syncs \
                each object. Its durable writes are compared with those of a pool in a directory \
                of the same disk, and with a PUT for each write; sequential loads with PUTs and \
                GETs by the same client. All run in one process, whose CPU time is that of client \
                and volume; MinIO runs on the same processors. Volumes have no \
                compression, and the data are noise.",
        published: Vec::new(),
        variants: vec![
            variant(REQUESTS, VariantRole::Limit, "requests to the object store, without a pool"),
            variant(DIRECTORY, VariantRole::Product, "a pool in a directory"),
            variant(ACK_LOCAL, VariantRole::Product, "a pool in the object store, `ack=local`"),
            variant(ACK_OBJECT, VariantRole::Product, "a pool in the object store, `ack=object`"),
        ],
        workloads: vec![WRITE_4K, WRITE, READ, OPEN],
        comparisons: vec![
            small(DIRECTORY, ACK_LOCAL).aim(AIM_LOCAL),
            small(REQUESTS, ACK_OBJECT).from_jobs(MANY).aim(AIM_OBJECT),
            bandwidth(WRITE),
            bandwidth(READ),
            Comparison::to("3 s", OPEN_NS, ACK_OBJECT, Metric::NS_PER_OP).under(OPEN.name).aim(1.0),
        ],
        plots: vec![Metric::IOPS, Metric::BANDWIDTH],
        cells,
    }
}

/// The cells of small durable writes by this number of clients.
fn small_writes(settings: &Settings, shared: &SharedBucket, jobs: u32) -> Vec<Cell> {
    let ios = Ios { ask: Ask::DurableWrite, len: 4096, depth: 1 };
    let (commit, delay) = (Commit::Group, Duration::ZERO);
    let clients = Clients { threads: jobs, ios, pool: &SHAPE, commit, delay };
    let settings_of = settings.clone();
    let directory = move |round: &Round<'_>| {
        let path = SHAPE.fresh(&settings_of)?;
        let disk = pool_place::open(&path, commit, delay, Options::default())?;
        clients.measure(&*disk, round)
    };
    let mut cells = vec![Cell::new(DIRECTORY, WRITE_4K.name, jobs, directory)];
    for (variant, pool) in [(ACK_LOCAL, by_log()), (ACK_OBJECT, by_object(ACK_OBJECT))] {
        let (settings, shared) = (settings.clone(), shared.clone());
        cells.push(Cell::new(variant, WRITE_4K.name, jobs, move |round| {
            let disk = volume(&shared.get(&settings)?.open(&pool)?)?;
            clients.measure(&*disk, round)
        }));
    }
    let load = RequestLoad { is_put: true, len: 4096, at_once: jobs };
    cells.push(load.cell(settings, shared, WRITE_4K.name, jobs));
    cells
}

fn sequential_cells(settings: &Settings, shared: &SharedBucket) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (workload, ask, is_put) in
        [(WRITE, Ask::Stream(FLUSH_EVERY), true), (READ, Ask::SequentialRead, false)]
    {
        let ios = Ios { ask, len: MIB, depth: SEQUENTIAL_DEPTH };
        let (commit, delay) = (Commit::Group, Duration::ZERO);
        let clients = Clients { threads: 1, ios, pool: &SHAPE, commit, delay };
        let (settings_of, shared_of) = (settings.clone(), shared.clone());
        cells.push(Cell::new(ACK_OBJECT, workload.name, 1, move |round| {
            let pool = shared_of.get(&settings_of)?.open(&sequential())?;
            let disk = volume(&pool)?;
            if !is_put && !is_written(&*disk)? {
                pool_place::fill(&*disk, round.stop)?;
            }
            clients.measure(&*disk, round)
        }));
        let load = RequestLoad { is_put, len: LARGE_BYTES, at_once: REQUESTS_AT_ONCE };
        cells.push(load.cell(settings, shared, workload.name, 1));
    }
    cells
}

/// Whether the end of a volume was written.
fn is_written(disk: &dyn Disk) -> Result<bool, LabError> {
    let failed = |status| LabError::failed("reading a volume", status);
    let channel = disk.open().map_err(|error| LabError::failed("reading a volume", error))?;
    let mut last = [0; 4096];
    let at = disk.geometry().sectors - last.len() as u64 / SECTOR_BYTES;
    Io::new(channel, last.len()).read(Sector(at), &mut last).map_err(failed)?;
    Ok(last != [0; 4096])
}

fn open_cell(settings: &Settings, shared: &SharedBucket) -> Cell {
    let (settings, shared) = (settings.clone(), shared.clone());
    Cell::new(ACK_OBJECT, OPEN.name, 1, move |round| {
        let bucket = shared.get(&settings)?;
        grow(&bucket, round.stop)?;
        let began = Instant::now();
        let pool = bucket.open(&long())?;
        let disk = volume(&pool)?;
        let ns = began.elapsed().as_nanos() as f64;
        let segments = pool.pool().segments().counts().all;
        drop(disk);
        let requests = pool.pool().segments().directory().requests().total();
        let note = format!("{segments} segments, {requests} requests");
        Ok(Sample { notes: vec![note], ..Sample::of(Metric::NS_PER_OP, ns) })
    })
}

/// Writes to a sparse volume until its pool has all segments.
fn grow(bucket: &LabBucket, stop: &Stop) -> Result<(), LabError> {
    let shape = long();
    let pool = bucket.open(&shape)?;
    let disk = volume(&pool)?;
    let failed = |status| LabError::failed("filling a volume", status);
    let channel = disk.open().map_err(|error| LabError::failed("filling a volume", error))?;
    let block = shape.block_bytes as usize;
    let mut io = Io::new(channel, block);
    let mut rng = fastrand::Rng::with_seed(7);
    let noise: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(block).collect();
    let blocks = shape.volume_bytes / block as u64;
    while pool.pool().segments().counts().all < SEGMENTS {
        if stop.is_set() {
            return Err(LabError::Interrupted);
        }
        let at = rng.u64(..blocks) * block as u64 / SECTOR_BYTES;
        io.write(Sector(at), &noise, Flags::NONE).map_err(failed)?;
    }
    io.run(Bio::flush()).map(drop).map_err(failed)
}

/// RequestJob to the object store as a load.
#[derive(Clone, Copy, Debug)]
struct RequestLoad {
    is_put: bool,
    /// Length of each object, in bytes.
    len: usize,
    /// The number of requests in flight.
    at_once: u32,
}

impl RequestLoad {
    fn cell(
        self,
        settings: &Settings,
        shared: &SharedBucket,
        workload: &'static str,
        jobs: u32,
    ) -> Cell {
        let (settings, shared) = (settings.clone(), shared.clone());
        Cell::new(REQUESTS, workload, jobs, move |round| {
            let bucket = shared.get(&settings)?;
            let client = bucket.client("requests")?;
            let works = (0..self.at_once).map(|job| {
                let (client, runtime) = (Arc::clone(&client), Arc::clone(bucket.runtime()));
                RequestJob::new(client, runtime, self, job)
            });
            let works = works.collect::<Result<Vec<_>, LabError>>()?;
            self.measure(works, round)
        })
    }

    fn measure(self, works: Vec<RequestJob>, round: &Round<'_>) -> Result<Sample, LabError> {
        let outcome = workers::run(works, round, || of_process(std::process::id()))?;
        let what = "CPU time of the lab";
        let before = outcome.gauge.0.as_ref().map_err(|error| LabError::failed(what, error))?;
        let after = outcome.gauge.1.as_ref().map_err(|error| LabError::failed(what, error))?;
        let cpu = after.saturating_sub(*before);
        if outcome.ios == 0 {
            return Err(LabError::failed(NAME, "no request ended in the measured window"));
        }
        let (ios, wall) = (outcome.ios as f64, outcome.wall.as_secs_f64());
        Ok(Sample::of(Metric::IOPS, ios / wall)
            .with(Metric::CPU_PER_IO, cpu.as_nanos() as f64 / ios)
            .with(Metric::BANDWIDTH, ios * self.len as f64 / wall)
            .with(Metric::CPUS, cpu.as_secs_f64() / wall))
    }
}

/// One job: requests one after the other.
struct RequestJob {
    client: Arc<ObjectClient>,
    runtime: Arc<Runtime>,
    load: RequestLoad,
    job: u32,
    count: u64,
    body: Bytes,
}

impl RequestJob {
    /// A job, whose objects are there if it reads them.
    fn new(
        client: Arc<ObjectClient>,
        runtime: Arc<Runtime>,
        load: RequestLoad,
        job: u32,
    ) -> Result<RequestJob, LabError> {
        let mut rng = fastrand::Rng::with_seed(job.into());
        let body: Bytes = std::iter::repeat_with(|| rng.u8(..)).take(load.len).collect();
        let requests = RequestJob { client, runtime, load, job, count: 0, body };
        if !load.is_put {
            requests.put()?;
        }
        Ok(requests)
    }

    fn name(&self) -> String {
        let number = if self.load.is_put { self.count % NAMES } else { 0 };
        format!("{}/{}/{number}", self.load.len, self.job)
    }

    fn put(&self) -> Result<(), LabError> {
        let name = self.name();
        let put = self.client.put(&name, &self.body);
        self.runtime.block_on(put).map_err(|error| LabError::failed("a PUT", error))
    }
}

impl Work for RequestJob {
    fn turn(&mut self) -> Result<u64, LabError> {
        self.count += 1;
        if self.load.is_put {
            self.put()?;
            return Ok(1);
        }
        let (name, failed) = (self.name(), |error| LabError::failed("a GET", error));
        let got = self.runtime.block_on(self.client.get(&name, None));
        match got.map_err(|error| failed(error.to_string()))? {
            Some(object) if object.bytes.len() == self.load.len => Ok(1),
            _ => Err(failed(format!("{name} does not have its bytes"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use blockyard_testing::capability::Capability;

    use super::*;
    use crate::experiments::sync_writes::AMPLIFICATION;
    use crate::scratch::Scratch;

    #[test]
    fn pools_and_requests_are_measured() {
        if Capability::ObjectStores.is_skipped() {
            return;
        }
        let scratch = Scratch::new().unwrap();
        let settings = Settings {
            quick: true,
            engine: None,
            program: "by".into(),
            lab: "blockyard-lab".into(),
            scratch: scratch.path().to_owned(),
            processors: 2,
            peers: Default::default(),
        };
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(50));
        let round = Round { warm_up, duration, number: 0, seed: 1, stop: &stop };
        let shared = SharedBucket::default();
        let mut cells = small_writes(&settings, &shared, 2);
        let load = RequestLoad { is_put: false, len: 4096, at_once: 2 };
        cells.push(load.cell(&settings, &shared, READ.name, 1));
        assert_eq!(cells.len(), 5);
        for cell in cells {
            let sample = (cell.body)(&round).unwrap();
            // Without a directory on this machine, nothing is written to its disk by this process.
            let is_expected = |(metric, value): &(Metric, f64)| {
                *value > 0.0 || *metric == AMPLIFICATION && cell.variant == ACK_OBJECT
            };
            assert!(sample.values.iter().all(is_expected), "{cell:?}: {sample:?}");
        }
    }
}
