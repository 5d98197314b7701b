//! The memory and the costs of a map of 1 TiB, and of a pool with 10,000 volumes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::blocking::Io;
use blockyard_core::{Bio, Disk, Flags, Sector};
use blockyard_volume::{Options, Running, Volume, VolumeConfig};

use super::*;
use crate::experiment::Cell;
use crate::tools::cpu;
use crate::tools::pool_place;

const TIB: u64 = 1 << 40;
const GIB: u64 = 1 << 30;
const BLOCK: usize = 16 << 10;
const BLOCK_SECTORS: u64 = BLOCK as u64 / 512;
/// Blocks of a leaf.
const LEAF_BLOCKS: u64 = 256;
/// Leaves of the volume of 1 TiB.
const LEAVES: u64 = TIB / (LEAF_BLOCKS * BLOCK as u64);
/// Leaves that are read if all reads are to find their leaf in the map cache.
const LEAVES_HOT: u64 = 4096;
const VOLUMES: u32 = 10_000;
/// Threads that make the volumes, so that their changes share log batches.
const MAKERS: u32 = 32;
/// Reads between two looks at the clock.
const READS: u64 = 16;

/// The time for making the pools, divided by the least number of rounds, and that for opening them.
const OVERHEAD_MAP: Duration = Duration::from_secs(8);
const OVERHEAD_VOLUMES: Duration = Duration::from_secs(6);

/// All cells of pools, which a quick run leaves out.
pub(super) fn cells(settings: &Settings) -> Vec<Cell> {
    if settings.quick {
        return Vec::new();
    }
    let all: [(&str, Workload, MeasureMemory, Duration); 6] = [
        (VOLUME, MAP, map, OVERHEAD_MAP),
        (MAP_HIT, READ_MAP, hits, OVERHEAD_VOLUMES),
        (MAP_MISS, READ_MAP, misses, OVERHEAD_VOLUMES),
        (MAP_DEFAULT, READ_MAP, reads_with_defaults, OVERHEAD_VOLUMES),
        (VOLUME, OPEN_10000, open, OVERHEAD_VOLUMES),
        (VOLUME, USE_10000, use_all, OVERHEAD_VOLUMES),
    ];
    let cell =
        |(variant, workload, measure, overhead): (&'static str, Workload, MeasureMemory, _)| {
            let settings = settings.clone();
            let body = move |round: &Round<'_>| measure(&settings, round);
            Cell::new(variant, workload.name, 1, body).overhead(overhead)
        };
    all.into_iter().map(cell).collect()
}

/// A pool that is made once in a run, by `fill`.
fn made_once(
    name: &str,
    settings: &Settings,
    fill: impl FnOnce(&Arc<Running>) -> Result<(), LabError>,
) -> Result<PathBuf, LabError> {
    let place = pool_place::place(settings)?;
    let (path, making) = (place.join(name), place.join(format!("{name}.new")));
    if path.exists() {
        return Ok(path);
    }
    let pool = pool_place::running(&making, Options::default())?;
    fill(&pool)?;
    drop(pool);
    std::fs::rename(&making, &path).map_err(LabError::io(path.display().to_string()))?;
    Ok(path)
}

fn first_volume(pool: &Arc<Running>) -> Result<Io, LabError> {
    io_of(&*pool_place::volume(pool)?)
}

fn io_of(disk: &dyn Disk) -> Result<Io, LabError> {
    Ok(Io::new(disk.open().map_err(failed("opening a volume"))?, BLOCK))
}

/// The first sector of a leaf of the volume of 1 TiB.
fn leaf_sector(leaf: u64) -> Sector {
    Sector(leaf * LEAF_BLOCKS * BLOCK_SECTORS)
}

/// The pool with the volume of 1 TiB. Its blocks are stored in a unit of the disk each.
fn map_pool(settings: &Settings, round: &Round<'_>) -> Result<PathBuf, LabError> {
    made_once("memory-map", settings, |pool| {
        pool.create(pool_place::VOLUME, TIB, BLOCK as u32).map_err(failed("a volume"))?;
        // With compression, which `pool_place::volume` has not.
        let config = VolumeConfig::new("pool", pool_place::VOLUME);
        let volume = Volume::open_in(Arc::clone(pool), config).map_err(failed("a volume"))?;
        let mut io = io_of(&*pool_place::disk(volume))?;
        let mut block = vec![1; BLOCK];
        for leaf in 0..LEAVES {
            if round.stop.is_set() {
                return Err(LabError::Interrupted);
            }
            block[..8].copy_from_slice(&leaf.to_le_bytes());
            io.write(leaf_sector(leaf), &block, Flags::NONE).map_err(failed("a write"))?;
        }
        io.run(Bio::flush()).map(drop).map_err(failed("a flush"))
    })
}

/// `blockyard serve` with a volume of a pool.
fn serve(
    pool: &Path,
    volume: &str,
    settings: &Settings,
    round: &Round<'_>,
) -> Result<Server, LabError> {
    let line = "PROGRAM serve volume:///VOLUME?path=POOL --nbd unix:SOCKET --control none";
    let line = CommandLine::new("", line).with(&[("POOL", &pool.display()), ("VOLUME", &volume)]);
    started(line, volume, settings, round)
}

fn map(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    let full = map_pool(settings, round)?;
    let empty = made_once("memory-empty", settings, |pool| {
        pool.create(pool_place::VOLUME, GIB, BLOCK as u32).map_err(failed("a volume"))
    })?;
    let memory = |pool: &Path| serve(pool, pool_place::VOLUME, settings, round)?.process().memory();
    let (empty, full) = (memory(&empty)?, memory(&full)?);
    Ok(slope((empty, 0), (full, 1)))
}

fn hits(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    reads(Options::default().map_cache_bytes, LEAVES_HOT, settings, round)
}

fn misses(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    reads(0, LEAVES, settings, round)
}

fn reads_with_defaults(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    reads(Options::default().map_cache_bytes, LEAVES, settings, round)
}

/// Random reads of one block of each of the first leaves. Before, as many leaves are read as the
/// cache can have, so that it is in its steady state.
fn reads(
    map_cache_bytes: u64,
    leaves: u64,
    settings: &Settings,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let path = map_pool(settings, round)?;
    let options = Options { map_cache_bytes, ..Options::default() };
    let pool = pool_place::running(&path, options)?;
    let mut io = first_volume(&pool)?;
    let mut block = vec![0; BLOCK];
    let mut read = |leaf: u64| {
        io.read(leaf_sector(leaf), &mut block).map_err(failed("a read"))?;
        match block[..8] == leaf.to_le_bytes() {
            true => Ok(()),
            false => Err(LabError::failed("a read", "the block has other data")),
        }
    };
    for leaf in 0..leaves.min(map_cache_bytes / 4096) {
        if round.stop.is_set() {
            return Err(LabError::Interrupted);
        }
        read(leaf)?;
    }
    let mut rng = fastrand::Rng::with_seed(round.seed);
    let cpu = || cpu::of_process(std::process::id()).map_err(LabError::io("CPU time"));
    let device = || pool_place::read_bytes().ok_or_else(|| no_counter("read_bytes"));
    let (began, cpu_before, bytes_before, mut count) = (Instant::now(), cpu()?, device()?, 0);
    while began.elapsed() < round.duration {
        if round.stop.is_set() {
            return Err(LabError::Interrupted);
        }
        for _ in 0..READS {
            read(rng.u64(..leaves))?;
        }
        count += READS;
    }
    let each = |value: f64| value / count.max(1) as f64;
    let wall = began.elapsed().as_nanos() as f64;
    let busy = cpu()?.saturating_sub(cpu_before).as_nanos() as f64;
    Ok(Sample::of(Metric::NS_PER_OP, each(wall))
        .with(Metric::CPU_PER_OP, each(busy))
        .with(DEVICE_BYTES, each((device()? - bytes_before) as f64)))
}

fn no_counter(name: &str) -> LabError {
    LabError::missing(format!("{name} in /proc/self/io"), "use a kernel with task I/O accounting")
}

/// The pool with many volumes.
fn volumes_pool(settings: &Settings, round: &Round<'_>) -> Result<PathBuf, LabError> {
    made_once("memory-volumes", settings, |pool| {
        let make = |maker| {
            for number in (maker..VOLUMES).step_by(MAKERS as usize) {
                if round.stop.is_set() {
                    return Err(LabError::Interrupted);
                }
                let name = format!("v{number}");
                pool.create(&name, GIB, BLOCK as u32).map_err(failed("a volume"))?;
                let volume = Volume::open_in(Arc::clone(pool), VolumeConfig::new("pool", name));
                let disk = pool_place::disk(volume.map_err(failed("a volume"))?);
                let written = io_of(&*disk)?.write(Sector(0), &[1; BLOCK], Flags::NONE);
                written.map_err(failed("a write"))?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let makers: Vec<_> =
                (0..MAKERS).map(|maker| scope.spawn(move || make(maker))).collect();
            let ends = makers.into_iter().map(|maker| maker.join().expect("makers do not panic"));
            ends.collect()
        })
    })
}

fn open(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    let pool = volumes_pool(settings, round)?;
    let began = Instant::now();
    let server = serve(&pool, pool_place::VOLUME, settings, round)?;
    let time = began.elapsed().as_nanos() as f64;
    let (memory, peak) = (server.process().memory()?, server.process().memory_peak()?);
    Ok(Sample::of(TIME, time)
        .with(MEMORY_TOTAL, memory as f64)
        .with(MEMORY_PEAK, peak as f64)
        .with(MEMORY, memory as f64 / f64::from(VOLUMES)))
}

fn use_all(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    let path = volumes_pool(settings, round)?;
    let began = Instant::now();
    let pool = pool_place::running(&path, Options::default())?;
    let (mut disks, mut block) = (Vec::new(), vec![0; BLOCK]);
    for number in 0..VOLUMES {
        if round.stop.is_set() {
            return Err(LabError::Interrupted);
        }
        let config = VolumeConfig::new("pool", format!("v{number}"));
        let volume = Volume::open_in(Arc::clone(&pool), config).map_err(failed("a volume"))?;
        let disk = pool_place::disk(volume);
        io_of(&*disk)?.read(Sector(0), &mut block).map_err(failed("a read"))?;
        disks.push(disk);
    }
    Ok(Sample::of(TIME, began.elapsed().as_nanos() as f64))
}
