//! Reads compared with the raw file, reads during writes, and writes with a snapshot.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockyard_core::Disk;
use blockyard_volume::{Options, Running};

use super::*;
use crate::experiments::sync_writes::Clients;
use crate::load::durable::{Ask, Durable, Ios};
use crate::load::workers;
use crate::sample::{LatencyPercentiles, Round, Sample};
use crate::stop::Stop;
use crate::tools::fio::Fio;
use crate::tools::pool_place::{self, Commit, PoolShape};

/// The time that opening a filled pool takes, and the time that filling one takes.
const OVERHEAD: Duration = Duration::from_millis(60);
const OVERHEAD_FILL: Duration = Duration::from_millis(600);
const OVERHEAD_FIO: Duration = Duration::from_millis(400);
/// The number of writes in flight during reads.
const CONCURRENT_WRITES: usize = 32;

static READ_POOL: PoolShape = PoolShape {
    name: "pool-read",
    block_bytes: 4096,
    volume_bytes: 512 << 20,
    pool_bytes: 768 << 20,
};
static LATENCY_POOL: PoolShape = PoolShape {
    name: "pool-latency",
    block_bytes: 4096,
    volume_bytes: 256 << 20,
    pool_bytes: 1536 << 20,
};
/// A pool short enough to be filled repeatedly.
pub(super) static WRITE_POOL: PoolShape = PoolShape {
    name: "pool-write",
    block_bytes: 4096,
    volume_bytes: 128 << 20,
    pool_bytes: 1536 << 20,
};
/// The pool of overwrites with enough free space that nothing is ever cleaned. A segment becomes
/// free without cleaning when all its 8192 blocks have been overwritten, which takes about 12
/// passes over the volume.
static ROOMY_POOL: PoolShape = PoolShape { name: "pool-roomy", pool_bytes: 3 << 30, ..WRITE_POOL };
/// The greatest write amplification without cleaning, with 32 writes in flight.
const BYTES_WITH_ROOM: f64 = 1.1;

/// All cells for throughput and latency.
pub(super) fn cells(settings: &Settings) -> Vec<Cell> {
    let few = settings.quick;
    let mut cells = Vec::new();
    let small: &[u32] = if few { &[32] } else { &[1, 32] };
    for &jobs in small {
        reads(&mut cells, settings, READ_4K, 4096, jobs);
    }
    if !few {
        for jobs in [1, 4] {
            reads(&mut cells, settings, READ_1M, 1 << 20, jobs);
        }
    }
    for (variant, with_writes) in [(VOLUME, false), (WITH_WRITES, true)] {
        let settings = settings.clone();
        let body = move |round: &Round<'_>| latency(&settings, round, with_writes);
        cells.push(Cell::new(variant, READ_LATENCY.name, 1, body).overhead(OVERHEAD));
    }
    for (variant, with_snapshot) in [(VOLUME, false), (WITH_SNAPSHOT, true)] {
        let settings = settings.clone();
        let body = move |round: &Round<'_>| writes(&settings, round, with_snapshot);
        cells.push(Cell::new(variant, WRITE_4K.name, 32, body).overhead(OVERHEAD_FILL));
    }
    cells.extend(asynchronous(settings, 32));
    cells
}

/// The cells of writes without a flush, faster than the disk.
fn asynchronous(settings: &Settings, jobs: u32) -> [Cell; 2] {
    let ours = settings.clone();
    let volume = move |round: &Round<'_>| {
        let pool = with_room(&ours)?;
        let ios = Ios { ask: Ask::Write, len: 4096, depth: jobs as usize };
        uncleaned(&pool, &*pool_place::volume(&pool)?, ios, round).map(longest)
    };
    let settings = settings.clone();
    let raw = move |round: &Round<'_>| {
        let bytes = READ_POOL.volume_bytes;
        let file = pool_place::raw_file(&settings, bytes)?;
        let fio = Fio::new("--ioengine=io_uring --rw=randwrite --direct=1 --norandommap")
            .option("bs", 4096)
            .option("size", bytes)
            .option("iodepth", jobs)
            .option("filename", file.display());
        Ok(longest(fio.run(round.warm_up, round.duration, round.stop)?.sample(usize::MAX)))
    };
    let volume = Cell::new(VOLUME, ASYNC_4K.name, jobs, volume).overhead(OVERHEAD);
    [volume, Cell::new(RAW, ASYNC_4K.name, jobs, raw).overhead(OVERHEAD_FIO)]
}

/// Adds the longest latency as a value.
fn longest(mut sample: Sample) -> Sample {
    let points = sample.latency.iter().flat_map(|latency| &latency.0);
    let longest = points.last().map(|(_, ns)| *ns);
    sample.values.extend(longest.map(|ns| (LONGEST, ns)));
    sample
}

/// A pool whose volume was filled once in this run.
fn filled(shape: &PoolShape, settings: &Settings, stop: &Stop) -> Result<PathBuf, LabError> {
    let mark = pool_place::place(settings)?.join(format!("{}.filled", shape.name));
    if mark.exists() {
        return Ok(pool_place::place(settings)?.join(shape.name));
    }
    let path = shape.fresh(settings)?;
    let disk = pool_place::open(&path, Commit::Group, Duration::ZERO, Options::default())?;
    pool_place::fill(&*disk, stop)?;
    fs::write(&mark, "").map_err(LabError::io(mark.display().to_string()))?;
    Ok(path)
}

fn reads(cells: &mut Vec<Cell>, settings: &Settings, workload: Workload, len: u64, jobs: u32) {
    let ours = settings.clone();
    let volume = move |round: &Round<'_>| {
        let path = filled(&READ_POOL, &ours, round.stop)?;
        let (commit, delay) = (Commit::Group, Duration::ZERO);
        let disk = pool_place::open(&path, commit, delay, Options::default())?;
        let ios = Ios { ask: Ask::Read, len, depth: 1 };
        Clients { threads: jobs, ios, pool: &READ_POOL, commit, delay }.measure(&*disk, round)
    };
    cells.push(Cell::new(VOLUME, workload.name, jobs, volume).overhead(OVERHEAD));
    let settings = settings.clone();
    let raw = move |round: &Round<'_>| {
        let bytes = READ_POOL.volume_bytes;
        let file = pool_place::raw_file(&settings, bytes)?;
        let fio =
            Fio::new("--ioengine=psync --rw=randread --direct=1 --norandommap --randrepeat=0")
                .option("bs", len)
                .option("size", bytes)
                .option("numjobs", jobs)
                .option("filename", file.display());
        Ok(fio.run(round.warm_up, round.duration, round.stop)?.sample(usize::MAX))
    };
    cells.push(Cell::new(RAW, workload.name, jobs, raw).overhead(OVERHEAD_FIO));
}

/// The latencies of reads, one at a time, with or without concurrent writes.
fn latency(settings: &Settings, round: &Round<'_>, with_writes: bool) -> Result<Sample, LabError> {
    let path = filled(&LATENCY_POOL, settings, round.stop)?;
    let disk = pool_place::open(&path, Commit::Group, Duration::ZERO, Options::default())?;
    let reads = Ios { ask: Ask::Read, len: 4096, depth: 1 };
    let writes = Ios { ask: Ask::DurableWrite, len: 4096, depth: CONCURRENT_WRITES };
    let mut works = vec![Durable::open(&*disk, reads, round.seed)?];
    if with_writes {
        works.push(Durable::open(&*disk, writes, round.seed ^ 1)?);
    }
    let outcome = workers::run(works, round, || ())?;
    let latency = outcome.workers[0].latency();
    let mut sample = Sample::of(Metric::P50, latency.value_at_quantile(0.5) as f64)
        .with(Metric::P99, latency.value_at_quantile(0.99) as f64)
        .with(Metric::IOPS, latency.len() as f64 / outcome.wall.as_secs_f64());
    if let Some(writer) = outcome.workers.get(1) {
        sample = sample.with(WRITES, writer.latency().len() as f64 / outcome.wall.as_secs_f64());
    }
    sample.latency = LatencyPercentiles::of(latency);
    Ok(sample)
}

/// Durable overwrites of a full volume, with or without a snapshot.
fn writes(settings: &Settings, round: &Round<'_>, snapshot: bool) -> Result<Sample, LabError> {
    let pool = with_room(settings)?;
    let disk = pool_place::volume(&pool)?;
    pool_place::fill(&*disk, round.stop)?;
    if snapshot {
        pool.snapshot(&format!("{}@live", pool_place::VOLUME)).map_err(failed("a snapshot"))?;
    }
    let ios = Ios { ask: Ask::DurableWrite, len: 4096, depth: 32 };
    let mut sample = uncleaned(&pool, &*disk, ios, round)?;
    let bytes = sample.values.iter().find(|(metric, _)| *metric == AMPLIFICATION);
    if let Some((_, bytes)) = bytes.filter(|(_, bytes)| *bytes > BYTES_WITH_ROOM) {
        let words = format!(
            "{} (with a snapshot: {snapshot}): {bytes:.2} device bytes per byte, more than \
             {BYTES_WITH_ROOM}: garbage collection ran, so the two variants are not comparable.",
            WRITE_4K.name
        );
        sample.notes.push(words);
    }
    Ok(sample)
}

/// A pool with an empty volume, in which nothing is cleaned.
pub(super) fn with_room(settings: &Settings) -> Result<Arc<Running>, LabError> {
    pool_place::running(&ROOMY_POOL.fresh(settings)?, Options::default())
}

/// Measures I/Os of one thread in a pool that is not cleaned meanwhile.
pub(super) fn uncleaned(
    pool: &Running,
    disk: &dyn Disk,
    ios: Ios,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let (commit, delay) = (Commit::Group, Duration::ZERO);
    let clients = Clients { threads: 1, ios, pool: &ROOMY_POOL, commit, delay };
    let before = pool.pool().activity();
    let sample = clients.measure(disk, round)?;
    let after = pool.pool().activity();
    not_cleaned(before.moved_bytes, after.moved_bytes)?;
    Ok(sample)
}

/// Fails if the pool was cleaned during the measurement.
fn not_cleaned(before: u64, after: u64) -> Result<(), LabError> {
    if after > before {
        let why = format!(
            "garbage collection moved {} bytes during the measurement; expected none",
            after - before
        );
        return Err(LabError::failed("a pool with room", why));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_of_a_pool_that_was_cleaned_is_refused() {
        assert!(not_cleaned(7, 7).is_ok());
        let error = not_cleaned(7, 9).unwrap_err().to_string();
        assert!(error.contains("moved 2 bytes"), "{error}");
    }
}
