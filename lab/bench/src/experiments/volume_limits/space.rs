//! Write amplification: of a pool with free space, and of a pool that is full to 80 % of its
//! reported capacity.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockyard_volume::{Options, Running};

use super::traffic::WRITE_POOL;
use super::*;
use crate::experiments::sync_writes::Clients;
use crate::load::durable::{Ask, Durable, Ios};
use crate::load::workers::Work;
use crate::sample::{Round, Sample};
use crate::tools::pool_place::{self, Commit};

const OVERHEAD: Duration = Duration::from_millis(100);
/// The time that filling a pool and overwriting it once takes.
const OVERHEAD_FULL: Duration = Duration::from_secs(60);
/// The segments of the pool that its volume fills. The pool keeps a number of segments free, some
/// 40 including those that are open or hold pages. With 5120 segments this is as small a part as of
/// a pool of 100 GiB with 3200 segments of 32 MiB.
const SEGMENTS_FULL: usize = 5120;
const SEGMENT_BYTES: u32 = 1 << 20;
const MEMORY_BYTES: u64 = 16 << 20;
/// The pool with free space has this many times the segments for a volume of the same size.
const ROOMY: usize = 2;
/// The greatest error of the pool's fill, in per cent.
const OFF_MAX: u64 = 1;

/// All cells for write amplification.
pub(super) fn cells(settings: &Settings) -> Vec<Cell> {
    let mut cells = Vec::new();
    let depths: &[u32] = if settings.quick { &[16] } else { &[1, 16] };
    for &jobs in depths {
        let settings = settings.clone();
        let body = move |round: &Round<'_>| {
            let pool = traffic::with_room(&settings)?;
            let ios = Ios { ask: Ask::DurableWrite, len: 4096, depth: jobs as usize };
            traffic::uncleaned(&pool, &*pool_place::volume(&pool)?, ios, round)
        };
        cells.push(Cell::new(VOLUME, DEVICE_BYTES.name, jobs, body).overhead(OVERHEAD));
    }
    if settings.quick {
        return cells;
    }
    for (variant, full) in [(VOLUME, None), (FULL, Some(80)), (FULLER, Some(90))] {
        let settings = settings.clone();
        let body = move |round: &Round<'_>| overwrite(&settings, round, full);
        cells.push(Cell::new(variant, OVERWRITE.name, 32, body).overhead(OVERHEAD_FULL));
    }
    cells
}

fn measure(pool: &Arc<Running>, jobs: u32, round: &Round<'_>) -> Result<Sample, LabError> {
    let disk = pool_place::volume(pool)?;
    let ios = Ios { ask: Ask::DurableWrite, len: 4096, depth: jobs as usize };
    let (commit, delay) = (Commit::Group, Duration::ZERO);
    Clients { threads: 1, ios, pool: &WRITE_POOL, commit, delay }.measure(&*disk, round)
}

/// The fill that a pool reports, in per cent.
fn per_cent(pool: &Running) -> Result<u64, LabError> {
    let status = pool.status().map_err(failed("how full a pool is"))?;
    Ok(status.used_bytes * 100 / (status.used_bytes + status.available_bytes).max(1))
}

/// Overwrites a volume durably in a new pool, which is either full to the given per cent or has
/// free space.
fn overwrite(
    settings: &Settings,
    round: &Round<'_>,
    full: Option<u64>,
) -> Result<Sample, LabError> {
    let path = DirectoryStore(pool_place::place(settings)?.join("pool-full"));
    let segments = if full.is_some() { SEGMENTS_FULL } else { ROOMY * SEGMENTS_FULL };
    let options = Options {
        segment_bytes: SEGMENT_BYTES,
        segments_max: segments,
        memory_bytes: MEMORY_BYTES,
        ..Options::default()
    };
    let pool = pool_place::running(&path.0, options)?;
    for _ in pool.pool().counts().all..segments {
        pool.pool().segments().grow();
    }
    let room = pool.status().map_err(failed("a pool"))?.available_bytes;
    let wanted = room / 100 * full.unwrap_or(80 / ROOMY as u64);
    // A page of the map, for 256 blocks, takes the space of two.
    let volume = wanted / (256 + 2) * 256 / 4096 * 4096;
    pool.create(pool_place::VOLUME, volume, 4096).map_err(failed("a volume"))?;
    if let Some(full) = full {
        let disk = pool_place::volume(&pool)?;
        pool_place::fill(&*disk, round.stop)?;
        // As many bytes as the pool has, because the measurement is of the steady state.
        let ios = Ios { ask: Ask::DurableWrite, len: 4096, depth: 64 };
        let mut writer = Durable::open(&*disk, ios, round.seed ^ 5)?;
        let mut left = segments as u64 * u64::from(SEGMENT_BYTES) / 4096;
        while left > 0 {
            if round.stop.is_set() {
                return Err(LabError::Interrupted);
            }
            left = left.saturating_sub(writer.turn()?);
        }
        let found = per_cent(&pool)?;
        if found.abs_diff(full) > OFF_MAX {
            let why = format!("it is {found} % full, and {full} % were expected");
            return Err(LabError::failed("a pool", why));
        }
    }
    measure(&pool, 32, round)
}

/// The directory of a pool, which is removed after the measurement.
pub(super) struct DirectoryStore(pub(super) PathBuf);

impl DirectoryStore {
    /// A directory in memory.
    pub(super) fn in_memory() -> Result<DirectoryStore, LabError> {
        let path = PathBuf::from(format!("/dev/shm/blockyard-lab-{}", std::process::id()));
        fs::create_dir_all(&path).map_err(LabError::io(path.display().to_string()))?;
        Ok(DirectoryStore(path))
    }
}

impl Drop for DirectoryStore {
    fn drop(&mut self) {
        // A directory on disk lies in the run's own directory, which is removed anyway.
        let _ = fs::remove_dir_all(&self.0);
    }
}
