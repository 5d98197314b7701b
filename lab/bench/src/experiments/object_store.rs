//! `object-store`: a pool in an object store, compared with a pool in a directory and with the
//! object store's own rates.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use blockyard_core::Disk;
use blockyard_core::blocking::Io;
use blockyard_core::{Bio, Flags, SECTOR_BYTES, Sector};
use blockyard_object::{BucketSettings, Created, LocalAcknowledgement, ObjectClient};
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
use crate::tools::bucket_place::{BucketPool, LabBucket, OpenBucketPool, SharedBucket};
use crate::tools::cpu::of_process;
use crate::tools::pool_place::{self, Commit, PoolShape};

/// The experiment's name on the command line.
pub const NAME: &str = "object-store";

const DIRECTORY: &str = "directory";
const ACK_LOCAL: &str = "ack-local";
const ACK_OBJECT: &str = "ack-object";
const REQUESTS: &str = "requests";
const REQUESTS_IN_TURN: &str = "requests-in-turn";

const WRITE_4K: Workload = Workload {
    name: "write-4k",
    about: "4 KiB random durable writes, one in flight for each job; `requests`: a PUT of 4 KiB \
            for each, and `requests-in-turn`: one PUT after the other for all jobs",
};
const WRITE: Workload = Workload {
    name: "sequential-write",
    about: "sequential writes of 1 MiB by one thread, 32 in flight, and a flush after every 128; \
            `requests`: PUTs of 4 MiB, 16 at once",
};
const READ: Workload = Workload {
    name: "sequential-read",
    about: "sequential reads of 1 MiB by one thread, 32 in flight, of a volume that is written \
            everywhere and four times as long as the cache, which is empty; `requests`: GETs of \
            4 MiB, 16 at once",
};
const OPEN: Workload = Workload {
    name: "open",
    about: "opens a sparse volume of 1 TiB in a pool with 100,000 segments of 32 KiB, on a machine \
            with an empty cache",
};

/// The least part of the durable writes of a pool in a directory.
const AIM_LOCAL: f64 = 0.9;
/// The least number of writes in the time of a PUT that is alone.
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
/// The sequential reads or writes of a volume in flight.
const SEQUENTIAL_DEPTH: usize = 32;
/// The PUTs or GETs in flight that are compared with them.
const REQUESTS_AT_ONCE: u32 = 16;
/// Writes between two flushes.
const FLUSH_EVERY: u32 = 128;
/// The length of a PUT or GET that is compared with a sequential load, in bytes.
const LARGE_BYTES: usize = 4 << 20;
/// The length of a segment of the pool that is opened, in bytes.
const SEGMENT_BYTES: u32 = 32 << 10;

/// About how long a pool is opened, for small writes.
const OVERHEAD: Duration = Duration::from_millis(300);
/// About how long a volume is filled or a pool is closed, for sequential loads.
const OVERHEAD_SEQUENTIAL: Duration = Duration::from_secs(5);
/// About how long the pool with many segments is made and opened, shared among the rounds.
const OVERHEAD_OPEN: Duration = Duration::from_secs(30);

/// The pool in a directory.
static SHAPE: PoolShape =
    PoolShape { name: "pool", block_bytes: 4096, volume_bytes: GIB, pool_bytes: 2 * GIB };

/// The sizes of the measured pools.
#[derive(Clone, Copy, Debug)]
struct BucketSizes {
    /// The pool in a directory.
    directory: &'static PoolShape,
    /// The length of the volumes in the object store, but of the one that is opened.
    volume_bytes: u64,
    /// The segments of the pool that is opened.
    segments: usize,
}

/// The sizes of a run.
const SIZES: BucketSizes = BucketSizes { directory: &SHAPE, volume_bytes: GIB, segments: 100_000 };

impl BucketSizes {
    /// A pool whose object store acknowledges syncs.
    fn by_object(self, name: &'static str) -> BucketPool {
        BucketPool {
            name,
            settings: BucketSettings::default(),
            block_bytes: 4096,
            volume_bytes: self.volume_bytes,
            capacity_bytes: 8 * self.volume_bytes,
        }
    }

    /// A pool whose local log acknowledges syncs.
    fn by_log(self) -> BucketPool {
        let local = LocalAcknowledgement::default();
        let memory_bytes = local.lag_bytes_max + 64 * MIB;
        let settings = BucketSettings { local: Some(local), memory_bytes, ..Default::default() };
        BucketPool { settings, ..self.by_object(ACK_LOCAL) }
    }

    /// A pool that is written or read from its start to its end.
    fn sequential(self, name: &'static str) -> BucketPool {
        // A quarter of the volume, so that a read finds nothing of the one before.
        let cache_bytes = self.volume_bytes / 4;
        let settings = BucketSettings { cache_bytes, ..Default::default() };
        BucketPool { settings, block_bytes: 64 << 10, ..self.by_object(name) }
    }

    /// A pool with many segments.
    fn long(self) -> BucketPool {
        let settings = BucketSettings { segment_bytes: SEGMENT_BYTES, ..Default::default() };
        BucketPool {
            settings,
            block_bytes: 16 << 10,
            volume_bytes: TIB,
            capacity_bytes: (2 * self.segments as u64 * u64::from(SEGMENT_BYTES)).max(64 * MIB),
            ..self.by_object("open")
        }
    }
}

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let shared = SharedBucket::default();
    let jobs: &[u32] = if settings.quick { &[MANY] } else { &[1, 4, MANY] };
    let mut cells = Vec::new();
    for &jobs in jobs {
        cells.extend(small_writes(settings, &shared, SIZES, jobs));
    }
    if !settings.quick {
        cells.extend(sequential_cells(settings, &shared, SIZES));
        cells.push(open_cell(settings, &shared, SIZES));
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
                of the same disk, and with a PUT for each write: one PUT after the other, as of a \
                log without groups, and as many at once as there are clients. Of these, n clients \
                with one write in flight can have n times the first rate at most, by any design, \
                and of the second rate no more than the store slows n PUTs down. Sequential loads \
                are compared with PUTs and GETs by the same client. All run in one process, whose \
                CPU time is that of client and volume; MinIO runs on the same processors. Volumes \
                have no compression, and the data are noise.",
        published: Vec::new(),
        variants: vec![
            variant(REQUESTS, VariantRole::Limit, "requests to the object store, without a pool"),
            variant(REQUESTS_IN_TURN, VariantRole::Limit, "as `requests`, one after the other"),
            variant(DIRECTORY, VariantRole::Product, "a pool in a directory"),
            variant(ACK_LOCAL, VariantRole::Product, "a pool in the object store, `ack=local`"),
            variant(ACK_OBJECT, VariantRole::Product, "a pool in the object store, `ack=object`"),
        ],
        workloads: vec![WRITE_4K, WRITE, READ, OPEN],
        comparisons: vec![
            small(DIRECTORY, ACK_LOCAL).aim(AIM_LOCAL),
            small(REQUESTS_IN_TURN, ACK_OBJECT).from_jobs(MANY).aim(AIM_OBJECT),
            small(REQUESTS, ACK_OBJECT),
            bandwidth(WRITE),
            bandwidth(READ),
            Comparison::to("3 s", OPEN_NS, ACK_OBJECT, Metric::NS_PER_OP).under(OPEN.name).aim(1.0),
        ],
        plots: vec![Metric::IOPS, Metric::BANDWIDTH],
        cells,
    }
}

/// The cells of small durable writes by this number of clients.
fn small_writes(
    settings: &Settings,
    shared: &SharedBucket,
    sizes: BucketSizes,
    jobs: u32,
) -> Vec<Cell> {
    let ios = Ios { ask: Ask::DurableWrite, len: 4096, depth: 1 };
    let (commit, delay) = (Commit::Group, Duration::ZERO);
    let clients = Clients { threads: jobs, ios, pool: sizes.directory, commit, delay };
    let settings_of = settings.clone();
    let directory = move |round: &Round<'_>| {
        let path = sizes.directory.fresh(&settings_of)?;
        let disk = pool_place::open(&path, commit, delay, Options::default())?;
        clients.measure(&*disk, round)
    };
    let mut cells = vec![Cell::new(DIRECTORY, WRITE_4K.name, jobs, directory).overhead(OVERHEAD)];
    let pools = [(ACK_LOCAL, sizes.by_log()), (ACK_OBJECT, sizes.by_object(ACK_OBJECT))];
    for (variant, pool) in pools {
        let (settings, shared) = (settings.clone(), shared.clone());
        let body = move |round: &Round<'_>| {
            let pool = open_elsewhere(&*shared.get(&settings)?, &pool)?;
            let disk = pool_place::volume(&pool.running)?;
            let before = counts(&pool);
            let mut sample = clients.measure(&*disk, round)?;
            sample.notes.push(note(&pool, before));
            Ok(sample)
        };
        cells.push(Cell::new(variant, WRITE_4K.name, jobs, body).overhead(OVERHEAD));
    }
    let load = RequestLoad { is_put: true, len: 4096, at_once: jobs };
    cells.push(load.cell(settings, shared, (REQUESTS, WRITE_4K.name, jobs)));
    if jobs > 1 {
        let load = RequestLoad { at_once: 1, ..load };
        cells.push(load.cell(settings, shared, (REQUESTS_IN_TURN, WRITE_4K.name, jobs)));
    }
    cells
}

/// Opens a pool with an empty cache.
fn open_elsewhere(bucket: &LabBucket, pool: &BucketPool) -> Result<OpenBucketPool, LabError> {
    bucket.clear_cache()?;
    bucket.open(pool)
}

/// The writes of 4 KiB so far, and the objects that were created.
fn counts(pool: &OpenBucketPool) -> (u64, u64) {
    let created = pool.client.requests().create.requests;
    (pool.running.pool().activity().data_bytes / 4096, created)
}

/// How many writes have shared an object, and what the object store lacks at the end: with a local
/// log, a rate that the uploads do not sustain leaves a lag or has made writes wait.
fn note(pool: &OpenBucketPool, before: (u64, u64)) -> String {
    let (writes, created) = counts(pool);
    let upload = pool.upload_status();
    format!(
        "{} writes in {} created objects; the object store lacks {} bytes at the end, and writes \
         have waited for it {} times",
        writes - before.0,
        created - before.1,
        upload.lag_bytes,
        upload.waits
    )
}

fn sequential_cells(settings: &Settings, shared: &SharedBucket, sizes: BucketSizes) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (workload, ask, is_put) in
        [(WRITE, Ask::Stream(FLUSH_EVERY), true), (READ, Ask::SequentialRead, false)]
    {
        let ios = Ios { ask, len: MIB, depth: SEQUENTIAL_DEPTH };
        let (commit, delay) = (Commit::Group, Duration::ZERO);
        let clients = Clients { threads: 1, ios, pool: sizes.directory, commit, delay };
        let (settings_of, shared_of) = (settings.clone(), shared.clone());
        let shape = sizes.sequential(workload.name);
        let filled = OnceLock::new();
        let body = move |round: &Round<'_>| {
            let bucket = shared_of.get(&settings_of)?;
            if !is_put && filled.get().is_none() {
                let pool = bucket.open(&shape)?;
                pool_place::fill(&*pool_place::volume(&pool.running)?, round.stop)?;
                _ = filled.set(());
            }
            let pool = open_elsewhere(&bucket, &shape)?;
            let disk = pool_place::volume(&pool.running)?;
            match is_put {
                true => clients.measure(&*disk, round),
                false => measure_reads(clients, &pool, &*disk, round),
            }
        };
        let cell = Cell::new(ACK_OBJECT, workload.name, 1, body);
        cells.push(cell.overhead(OVERHEAD_SEQUENTIAL));
        let load = RequestLoad { is_put, len: LARGE_BYTES, at_once: REQUESTS_AT_ONCE };
        cells.push(load.cell(settings, shared, (REQUESTS, workload.name, 1)));
    }
    cells
}

/// Measures reads, which must come from the object store.
fn measure_reads(
    clients: Clients,
    pool: &OpenBucketPool,
    disk: &dyn Disk,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let requests = || pool.client.requests().get;
    let before = requests();
    let mut sample = clients.measure(disk, round)?;
    let after = requests();
    let (gets, bytes) = (after.requests - before.requests, after.bytes - before.bytes);
    let bandwidth = sample.values.iter().find(|(metric, _)| *metric == Metric::BANDWIDTH);
    let returned = bandwidth.map_or(0.0, |(_, rate)| rate * round.duration.as_secs_f64());
    // The opening has the last batch in memory.
    if (bytes as f64) < 0.9 * returned {
        let why = format!("{returned} bytes were read, and the object store has sent {bytes}");
        return Err(LabError::failed(READ.name, why));
    }
    sample.notes.push(format!("{gets} GETs of {} KiB", bytes / gets.max(1) / 1024));
    Ok(sample)
}

fn open_cell(settings: &Settings, shared: &SharedBucket, sizes: BucketSizes) -> Cell {
    let (settings, shared) = (settings.clone(), shared.clone());
    let body = move |round: &Round<'_>| {
        let (bucket, shape) = (shared.get(&settings)?, sizes.long());
        grow(&bucket, &shape, sizes.segments, round.stop)?;
        bucket.clear_cache()?;
        let began = Instant::now();
        let pool = bucket.open(&shape)?;
        let disk = pool_place::volume(&pool.running)?;
        let ns = began.elapsed().as_nanos() as f64;
        drop(disk);
        let segments = pool.running.pool().segments().counts().all;
        let requests = pool.client.requests();
        let (total, gets) = (requests.total(), requests.get.requests);
        let note = format!("{segments} segments, {total} requests, {gets} of them GETs");
        Ok(Sample { notes: vec![note], ..Sample::of(Metric::NS_PER_OP, ns) })
    };
    Cell::new(ACK_OBJECT, OPEN.name, 1, body).overhead(OVERHEAD_OPEN)
}

/// Writes to a sparse volume until its pool has this number of segments.
fn grow(
    bucket: &LabBucket,
    shape: &BucketPool,
    segments: usize,
    stop: &Stop,
) -> Result<(), LabError> {
    let pool = bucket.open(shape)?.running;
    let disk = pool_place::volume(&pool)?;
    let failed = |status| LabError::failed("filling a volume", status);
    let channel = disk.open().map_err(|error| LabError::failed("filling a volume", error))?;
    let block = shape.block_bytes as usize;
    let mut io = Io::new(channel, block);
    let mut rng = fastrand::Rng::with_seed(7);
    let noise: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(block).collect();
    let blocks = shape.volume_bytes / block as u64;
    while pool.pool().segments().counts().all < segments {
        if stop.is_set() {
            return Err(LabError::Interrupted);
        }
        let at = rng.u64(..blocks) * block as u64 / SECTOR_BYTES;
        io.write(Sector(at), &noise, Flags::NONE).map_err(failed)?;
    }
    io.run(Bio::flush()).map(drop).map_err(failed)
}

/// PUTs that create objects, or GETs, without a pool.
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
        (variant, workload, jobs): (&'static str, &'static str, u32),
    ) -> Cell {
        let (settings, shared) = (settings.clone(), shared.clone());
        let body = move |round: &Round<'_>| {
            let bucket = shared.get(&settings)?;
            let (client, folder) =
                (bucket.client("requests")?, format!("{:016x}", fastrand::u64(..)));
            let works = (0..self.at_once).map(|job| {
                let (client, runtime) = (Arc::clone(&client), Arc::clone(bucket.runtime()));
                RequestJob::new((client, runtime), self, format!("{folder}/{job}"))
            });
            let works = works.collect::<Result<Vec<_>, LabError>>()?;
            let sample = self.measure(works, round)?;
            remove(&bucket, &client, &folder)?;
            Ok(sample)
        };
        Cell::new(variant, workload, jobs, body).overhead(OVERHEAD)
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

/// Removes the objects of a load.
fn remove(bucket: &LabBucket, client: &ObjectClient, folder: &str) -> Result<(), LabError> {
    bucket.runtime().block_on(async {
        let failed = |error| LabError::failed("removing objects", error);
        let listed = client.list(folder).await.map_err(failed)?;
        let names: Vec<String> = listed.into_iter().map(|object| object.name).collect();
        client.delete(&names).await.map_err(failed)
    })
}

/// One job: requests one after the other.
struct RequestJob {
    client: Arc<ObjectClient>,
    runtime: Arc<Runtime>,
    load: RequestLoad,
    folder: String,
    /// The PUTs so far. Each creates an object, as those of a pool do.
    count: u64,
    body: Bytes,
}

impl RequestJob {
    /// A job, whose object is there if it reads it.
    fn new(
        (client, runtime): (Arc<ObjectClient>, Arc<Runtime>),
        load: RequestLoad,
        folder: String,
    ) -> Result<RequestJob, LabError> {
        let mut rng = fastrand::Rng::with_seed(load.len as u64);
        let body: Bytes = std::iter::repeat_with(|| rng.u8(..)).take(load.len).collect();
        let mut job = RequestJob { client, runtime, load, folder, count: 0, body };
        if !load.is_put {
            job.put()?;
        }
        Ok(job)
    }

    fn name(&self, number: u64) -> String {
        format!("{}/{number}", self.folder)
    }

    fn put(&mut self) -> Result<(), LabError> {
        let name = self.name(self.count);
        self.count += 1;
        let created = self.runtime.block_on(self.client.create(&name, &self.body));
        match created.map_err(|error| LabError::failed("a PUT", error))? {
            Created::New { .. } => Ok(()),
            Created::Taken(_) => Err(LabError::failed("a PUT", format!("{name} was there"))),
        }
    }
}

impl Work for RequestJob {
    fn turn(&mut self) -> Result<u64, LabError> {
        if self.load.is_put {
            self.put()?;
            return Ok(1);
        }
        let (name, failed) = (self.name(0), |error| LabError::failed("a GET", error));
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

    static SMALL: PoolShape = PoolShape {
        name: "pool",
        block_bytes: 4096,
        volume_bytes: 16 * MIB,
        pool_bytes: 128 * MIB,
    };

    #[test]
    fn each_cell_is_measured() {
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
        let sizes = BucketSizes { directory: &SMALL, volume_bytes: 64 * MIB, segments: 300 };
        let mut cells = small_writes(&settings, &shared, sizes, 2);
        cells.extend(sequential_cells(&settings, &shared, sizes));
        cells.push(open_cell(&settings, &shared, sizes));
        assert_eq!(cells.len(), 10);
        for cell in cells {
            let sample = (cell.body)(&round).unwrap();
            // Without a directory on this machine, nothing is written to its disk by this process.
            let is_expected = |(metric, value): &(Metric, f64)| {
                *value > 0.0 || *metric == AMPLIFICATION && cell.variant == ACK_OBJECT
            };
            assert!(sample.values.iter().all(is_expected), "{cell:?}: {sample:?}");
            if cell.workload == OPEN.name {
                let words: Vec<usize> = sample.notes[0]
                    .split(|it: char| !it.is_ascii_digit())
                    .filter_map(|word| word.parse().ok())
                    .collect();
                assert!(words[0] >= sizes.segments && words[1] < 100, "{:?}", sample.notes);
            }
        }
    }
}
