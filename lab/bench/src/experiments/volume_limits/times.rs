//! The operations that must be short: a snapshot's pause, a large discard, and openings.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use blockyard_core::blocking::Io;
use blockyard_core::{Bio, Disk, Flags, Op, SECTOR_BYTES, Sector};
use blockyard_volume::{Options, Running, Volume, VolumeConfig, VolumeError};

use super::space::DirectoryStore;
use super::traffic::WRITE_POOL;
use super::*;
use crate::load::durable::{Ask, Durable, IoSpan, Ios};
use crate::load::workers::{self, Work};
use crate::sample::{Round, Sample};
use crate::tools::child::CommandLine;
use crate::tools::nbd_client::{NbdClient, NbdOp, NbdRequests, Place};
use crate::tools::pool_place::{self, PoolShape};
use crate::tools::server::Server;

const OVERHEAD: Duration = Duration::from_millis(600);
/// The time that writing two volumes twice takes.
const OVERHEAD_LARGE: Duration = Duration::from_secs(3);
/// The time in which a server writes 1 GiB and the pool is opened again; and that time for small
/// writes.
const OVERHEAD_REOPEN: Duration = Duration::from_millis(2500);
const OVERHEAD_REOPEN_SMALL: Duration = Duration::from_secs(6);
/// The time from a snapshot until its deletion, and from then until the next; also after a write in
/// its place.
const SNAPSHOT_PAUSE: Duration = Duration::from_millis(1);
/// The number of consecutive snapshots, and then of writes in their place.
const IN_TURNS: usize = 8;
/// The pause between the two: meanwhile most of the shared data have been copied.
const REST: Duration = Duration::from_millis(30);
/// The number of writes whose times are kept.
const SPANS_MAX: usize = 1 << 21;
/// The length of a bio of the large discard, in bytes.
const DISCARD_BYTES: u64 = 1 << 30;
const TIB: u64 = 1 << 40;
const GIB: u64 = 1 << 30;
/// The volume of 1 GiB, for comparison with the one of 1 TiB.
const SMALL: &str = "v1";
/// The number of blocks written before the operation.
const SCATTERED: u64 = 4096;
/// The length of the log that is to be recovered, in bytes.
const LOG_BYTES: u64 = 1 << 30;
const LOG_WRITE_BYTES: u64 = 64 << 10;
const LOG_SMALL_BYTES: u64 = 4 << 10;
/// A checkpoint interval that is never reached.
const NO_CHECKPOINT_MIB: u64 = 16 << 10;
const VOLUMES: u32 = 1000;

static DISCARD_POOL: PoolShape = PoolShape {
    name: "pool-discard",
    block_bytes: 16 << 10,
    volume_bytes: TIB,
    pool_bytes: 256 << 20,
};
static LARGE_POOL: PoolShape =
    PoolShape { name: "pool-large", block_bytes: 16 << 10, volume_bytes: TIB, pool_bytes: 2 << 30 };
static REOPEN_POOL: PoolShape = PoolShape {
    name: "pool-reopen",
    block_bytes: 4096,
    volume_bytes: 1 << 30,
    pool_bytes: 2 << 30,
};

type Measure = fn(&Settings, &Round<'_>) -> Result<Sample, LabError>;

/// All cells for durations.
pub(super) fn cells(settings: &Settings) -> Vec<Cell> {
    let mut all: Vec<(Workload, u32, Measure, Duration)> =
        vec![(SNAPSHOT, 32, snapshot, OVERHEAD), (DISCARD, 1, discard, OVERHEAD)];
    if !settings.quick {
        all.push((SNAPSHOT_1T, 32, snapshot_large, OVERHEAD));
        all.push((CLONE, 1, clone, OVERHEAD_LARGE));
        all.push((ROLLBACK, 1, rollback, OVERHEAD_LARGE));
        all.push((REOPEN, 1, reopen::<LOG_WRITE_BYTES>, OVERHEAD_REOPEN));
        all.push((REOPEN_4K, 1, reopen::<LOG_SMALL_BYTES>, OVERHEAD_REOPEN_SMALL));
        all.push((OPEN_1000, 1, open_many, OVERHEAD));
    }
    let cell = |(workload, jobs, measure, overhead): (Workload, u32, Measure, Duration)| {
        let settings = settings.clone();
        let body = move |round: &Round<'_>| measure(&settings, round);
        Cell::new(VOLUME, workload.name, jobs, body).overhead(overhead)
    };
    let in_memory = |(workload, measure): (Workload, Measure)| {
        let settings = settings.clone();
        let body = move |round: &Round<'_>| {
            let folder = DirectoryStore::in_memory()?;
            measure(&Settings { scratch: folder.0.clone(), ..settings.clone() }, round)
        };
        Cell::new(IN_MEMORY, workload.name, 32, body).overhead(OVERHEAD)
    };
    let snapshots: [(Workload, Measure); 2] = [(SNAPSHOT, snapshot), (SNAPSHOT_1T, snapshot_large)];
    let wanted = if settings.quick { 0 } else { 2 };
    let cells = all.into_iter().map(cell);
    cells.chain(snapshots.into_iter().take(wanted).map(in_memory)).collect()
}

/// A thread that writes, or one that takes snapshots meanwhile.
enum Member {
    Writer(Durable),
    Snapshots(Snapshots),
}

/// Takes snapshots, and in turns with them writes one block durably, which waits for a group as a
/// snapshot does. The writes are the control: a disk's sync sometimes takes long and a thread may
/// be preempted, with or without snapshots.
struct Snapshots {
    pool: Arc<Running>,
    io: Io,
    number: u64,
    spans: Vec<IoSpan>,
    without: Vec<IoSpan>,
}

impl Snapshots {
    fn turn(&mut self) -> Result<u64, LabError> {
        for _ in 0..IN_TURNS {
            let name = format!("{}@{}", pool_place::VOLUME, self.number);
            self.number += 1;
            let began = Instant::now();
            self.pool.snapshot(&name).map_err(failed("a snapshot"))?;
            self.spans.push((began, Instant::now()));
            thread::sleep(SNAPSHOT_PAUSE);
            self.pool.destroy(&name).map_err(failed("a snapshot's end"))?;
            thread::sleep(SNAPSHOT_PAUSE);
        }
        thread::sleep(REST);
        for _ in 0..IN_TURNS {
            let began = Instant::now();
            self.io.write(Sector(0), &[1; 4096], Flags::FUA).map_err(failed("a write"))?;
            self.without.push((began, Instant::now()));
            thread::sleep(2 * SNAPSHOT_PAUSE);
        }
        Ok(IN_TURNS as u64)
    }
}

impl Work for Member {
    fn turn(&mut self) -> Result<u64, LabError> {
        match self {
            Member::Writer(writer) => writer.turn(),
            Member::Snapshots(snapshots) => snapshots.turn(),
        }
    }

    fn begin(&mut self) {
        match self {
            Member::Writer(writer) => writer.begin(),
            Member::Snapshots(Snapshots { spans, without, .. }) => {
                spans.clear();
                without.clear();
            }
        }
    }
}

fn snapshot(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    let path = WRITE_POOL.fresh_in(&settings.scratch)?;
    let pool = pool_place::running(&path, Options::default())?;
    let disk = pool_place::volume(&pool)?;
    pool_place::fill(&*disk, round.stop)?;
    snapshots(&pool, &*disk, round)
}

fn snapshot_large(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    let path = LARGE_POOL.fresh_in(&settings.scratch)?;
    let pool = pool_place::running(&path, Options::default())?;
    let disk = pool_place::volume(&pool)?;
    scatter(&*disk, round)?;
    snapshots(&pool, &*disk, round)
}

fn snapshots(pool: &Arc<Running>, disk: &dyn Disk, round: &Round<'_>) -> Result<Sample, LabError> {
    let ios = Ios { ask: Ask::DurableWrite, len: 4096, depth: 32 };
    let writer = Durable::open(disk, ios, round.seed)?.with_spans(SPANS_MAX);
    let io = Io::new(disk.open().map_err(failed("opening a volume"))?, 4096);
    let (pool, number) = (Arc::clone(pool), 0);
    let snapshots = Snapshots { pool, io, number, spans: Vec::new(), without: Vec::new() };
    let workers = vec![Member::Writer(writer), Member::Snapshots(snapshots)];
    let outcome = workers::run(workers, round, || ())?;
    let (mut ends, mut with, mut without) = (Vec::new(), Vec::new(), Vec::new());
    for member in outcome.workers {
        match member {
            Member::Writer(writer) => ends = writer.spans().iter().map(|span| span.1).collect(),
            Member::Snapshots(taken) => (with, without) = (taken.spans, taken.without),
        }
    }
    let iops = ends.len() as f64 / outcome.wall.as_secs_f64();
    let mut at = |spans: &[IoSpan]| {
        let mut pauses = pauses(&mut ends, spans);
        pauses.sort_unstable();
        let at = |part: usize| Some(pauses.get(pauses.len() * part / 100)?.as_nanos() as f64);
        let none = || LabError::failed(SNAPSHOT.name, "no snapshot was taken among the writes");
        Ok::<_, LabError>((at(50).ok_or_else(none)?, at(99).ok_or_else(none)?))
    };
    let ((p50, p99), (other_p50, other_p99)) = (at(&with)?, at(&without)?);
    let mut sample = Sample::of(PAUSE_P50, p50)
        .with(PAUSE_P99, p99)
        .with(WITHOUT_P50, other_p50)
        .with(WITHOUT_P99, other_p99)
        .with(ADDED_P99, p99 - other_p99)
        .with(Metric::IOPS, iops);
    let words = "A pause includes the time that passes between two log batches anyway. `without` \
                 is that of single durable writes, which alternate with the snapshots.";
    sample.notes.push(words.to_owned());
    Ok(sample)
}

/// For each span the longest time between the ends of two consecutive writes that overlaps the
/// span.
fn pauses(ends: &mut [Instant], spans: &[IoSpan]) -> Vec<Duration> {
    ends.sort_unstable();
    let pause = |(began, ended): &IoSpan| {
        let first = ends.partition_point(|end| end <= began).checked_sub(1)?;
        let gaps = ends[first..].windows(2).take_while(|pair| pair[0] <= *ended);
        gaps.map(|pair| pair[1] - pair[0]).max()
    };
    spans.iter().filter_map(pause).collect()
}

/// Writes blocks at offsets all over a disk; on one of 1 TiB in every part of its map.
fn scatter(disk: &dyn Disk, round: &Round<'_>) -> Result<(), LabError> {
    let opened = disk.open().map_err(failed("opening a volume"))?;
    let mut io = Io::new(opened, 16 << 10);
    let mut rng = fastrand::Rng::with_seed(round.seed);
    let block = vec![1; 16 << 10];
    let blocks = disk.geometry().sectors * SECTOR_BYTES / block.len() as u64;
    for _ in 0..SCATTERED {
        let at = rng.u64(..blocks) * block.len() as u64;
        let written = io.write(Sector(at / SECTOR_BYTES), &block, Flags::NONE);
        written.map_err(failed("a write"))?;
    }
    io.run(Bio::flush()).map(drop).map_err(failed("a flush"))
}

fn discard(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    let path = DISCARD_POOL.fresh(settings)?;
    let pool = pool_place::running(&path, Options::default())?;
    let disk = pool_place::volume(&pool)?;
    scatter(&*disk, round)?;
    let mut io = Io::new(disk.open().map_err(failed("opening a volume"))?, 4096);
    let began = Instant::now();
    for at in (0..TIB).step_by(DISCARD_BYTES as usize) {
        let bio = Bio::new(Op::Discard, Sector(at / SECTOR_BYTES), DISCARD_BYTES / SECTOR_BYTES);
        io.run(bio).map_err(failed("a discard"))?;
    }
    io.run(Bio::flush()).map_err(failed("a flush"))?;
    Ok(Sample::of(TIME, began.elapsed().as_nanos() as f64))
}

fn clone(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    with_snapshots(settings, round, |pool, name| {
        pool.clone_of(&format!("{name}@then"), &format!("{name}-clone"))
    })
}

fn rollback(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    with_snapshots(settings, round, |pool, name| pool.rollback(&format!("{name}@then")))
}

/// The duration of an operation on a volume of 1 TiB that was overwritten everywhere since its
/// snapshot, and on a volume of 1 GiB.
fn with_snapshots(
    settings: &Settings,
    round: &Round<'_>,
    what: fn(&Running, &str) -> Result<(), VolumeError>,
) -> Result<Sample, LabError> {
    let pool = pool_place::running(&LARGE_POOL.fresh(settings)?, Options::default())?;
    pool.create(SMALL, GIB, LARGE_POOL.block_bytes).map_err(failed("a volume"))?;
    let names = [pool_place::VOLUME, SMALL];
    for name in names {
        let config = VolumeConfig { name: name.to_owned(), ..pool_place::config() };
        let volume = Volume::open_in(Arc::clone(&pool), config).map_err(failed("a volume"))?;
        let disk = pool_place::disk(volume);
        scatter(&*disk, round)?;
        pool.snapshot(&format!("{name}@then")).map_err(failed("a snapshot"))?;
        scatter(&*disk, &Round { seed: !round.seed, ..*round })?;
    }
    // No volume is open as a device any more, because an open volume cannot be rolled back.
    let mut times = [0.0; 2];
    for (time, name) in times.iter_mut().zip(names) {
        let began = Instant::now();
        what(&pool, name).map_err(failed("a change of a volume"))?;
        *time = began.elapsed().as_nanos() as f64;
    }
    Ok(Sample::of(TIME, times[0]).with(TIME_GIB, times[1]))
}

/// The time to open a pool whose server was killed after writes of length `LEN`.
fn reopen<const LEN: u64>(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    let path = REOPEN_POOL.fresh(settings)?;
    let line = format!("LAB serve POOL --checkpoint-mib {NO_CHECKPOINT_MIB} --nbd SOCKET");
    let line = CommandLine::new("", &line)
        .with(&[("LAB", &settings.lab.display()), ("POOL", &path.display())]);
    let server = Server::start(line, settings, round.stop)?;
    let writes = NbdRequests { op: NbdOp::Write, len: LEN, depth: 16 };
    let place = Place::Unix(server.socket());
    let mut writer = NbdClient::connect(&place, pool_place::VOLUME, writes, round.seed)?;
    let mut left = LOG_BYTES / LEN;
    while left > 0 {
        if round.stop.is_set() {
            return Err(LabError::Interrupted);
        }
        left = left.saturating_sub(writer.turn()?);
    }
    writer.flush()?;
    // The server is killed, and has no time to close the pool.
    drop(server);
    let began = Instant::now();
    let pool = pool_place::running(&path, Options::default())?;
    let disk = pool_place::volume(&pool)?;
    first_read(&*disk)?;
    let time = began.elapsed();
    let recovered = pool.pool().activity().recovered_bytes;
    if recovered < LOG_BYTES {
        let why = format!("only {recovered} bytes of log followed the checkpoint");
        return Err(LabError::failed(REOPEN.name, why));
    }
    Ok(Sample::of(TIME, time.as_nanos() as f64))
}

fn first_read(disk: &dyn Disk) -> Result<(), LabError> {
    let opened = disk.open().map_err(failed("opening a volume"))?;
    let mut block = [0; 4096];
    Io::new(opened, block.len()).read(Sector(0), &mut block).map_err(failed("a read"))
}

/// A pool with many volumes, made once in a run.
fn many(settings: &Settings) -> Result<PathBuf, LabError> {
    let place = pool_place::place(settings)?;
    let (path, making) = (place.join("pool-1000"), place.join("pool-1000.new"));
    if path.exists() {
        return Ok(path);
    }
    let pool = pool_place::running(&making, Options::default())?;
    for number in 0..VOLUMES {
        let name = format!("v{number}");
        pool.create(&name, 1 << 30, 16 << 10).map_err(failed("a volume"))?;
        let volume = Volume::open_in(Arc::clone(&pool), VolumeConfig::new("pool", name));
        let disk = pool_place::disk(volume.map_err(failed("a volume"))?);
        let opened = disk.open().map_err(failed("opening a volume"))?;
        let mut io = Io::new(opened, 4096);
        for at in [0, 1 << 20] {
            io.write(Sector(at), &[number as u8; 4096], Flags::NONE).map_err(failed("a write"))?;
        }
    }
    drop(pool);
    std::fs::rename(&making, &path).map_err(LabError::io(path.display().to_string()))?;
    Ok(path)
}

fn open_many(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    let path = many(settings)?;
    let began = Instant::now();
    let pool = pool_place::running(&path, Options::default())?;
    let mut disks = Vec::new();
    for number in 0..VOLUMES {
        if round.stop.is_set() {
            return Err(LabError::Interrupted);
        }
        let config = VolumeConfig::new("pool", format!("v{number}"));
        let volume = Volume::open_in(Arc::clone(&pool), config).map_err(failed("a volume"))?;
        let disk = pool_place::disk(volume);
        first_read(&*disk)?;
        disks.push(disk);
    }
    Ok(Sample::of(TIME, began.elapsed().as_nanos() as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_the_longest_gap_that_a_snapshot_touches() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut ends = [8, 0, 1, 2, 3, 9, 20, 21].map(at);
        let pause = |from, to, ends: &mut [Instant]| pauses(ends, &[(at(from), at(to))]);
        assert_eq!(pause(4, 5, &mut ends), [Duration::from_millis(5)]);
        assert_eq!(pause(4, 10, &mut ends), [Duration::from_millis(11)]);
        assert_eq!(pause(2, 2, &mut ends), [Duration::from_millis(1)]);
        // Before the first write there is no end of a write, and so no pause.
        let early = Instant::now().checked_sub(Duration::from_secs(1)).unwrap();
        assert!(pauses(&mut ends, &[(early, early)]).is_empty());
    }
}
