//! What the disk is given for what was asked: of a pool with room, and of one that is 80 % full.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockyard_volume::{Options, Running};

use super::traffic::WRITE_POOL;
use super::*;
use crate::experiments::sync_writes::Clients;
use crate::load::crew::Work;
use crate::load::durable::{Ask, Durable, Ios};
use crate::sample::{Round, Sample};
use crate::tools::pool_place::{self, Commit};

const OVERHEAD: Duration = Duration::from_millis(100);
/// What filling a pool and overwriting it once takes.
const OVERHEAD_FULL: Duration = Duration::from_secs(60);
/// The pool that is full of its volume. What is kept free is a number of segments, some 40 with
/// those that are open or have pages; of 1280 of them it made 0.85 of 0.8, so there are so many
/// that it is as small a part as of a pool of 100 GiB in segments of 32 MiB, which has 3200.
const VOLUME_BYTES: u64 = 4 << 30;
const SEGMENT_BYTES: u32 = 1 << 20;
const MEMORY_BYTES: u64 = 16 << 20;
/// Segments where the volume is 80 % of all, and where there is room.
const SEGMENTS_FULL: usize = (VOLUME_BYTES * 100 / 80 / SEGMENT_BYTES as u64) as usize;
const SEGMENTS_ROOMY: usize = 2 * SEGMENTS_FULL;

/// All cells.
pub(super) fn cells(settings: &Settings) -> Vec<Cell> {
    let mut cells = Vec::new();
    let depths: &[u32] = if settings.quick { &[16] } else { &[1, 16] };
    for &jobs in depths {
        let settings = settings.clone();
        let body = move |round: &Round<'_>| {
            let path = WRITE_POOL.fresh(&settings)?;
            let pool = pool_place::running(&path, Options::default())?;
            measure(&pool, jobs, round)
        };
        cells.push(Cell::new(VOLUME, DEVICE_BYTES.name, jobs, body).overhead(OVERHEAD));
    }
    if settings.quick {
        return cells;
    }
    for (variant, is_full) in [(VOLUME, false), (FULL, true)] {
        let settings = settings.clone();
        let body = move |round: &Round<'_>| overwrite(&settings, round, is_full);
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

/// Durable writes in a pool that is made for them.
fn overwrite(settings: &Settings, round: &Round<'_>, is_full: bool) -> Result<Sample, LabError> {
    let path = Folder(pool_place::place(settings)?.join("pool-full"));
    let segments = if is_full { SEGMENTS_FULL } else { SEGMENTS_ROOMY };
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
    pool.create(pool_place::VOLUME, VOLUME_BYTES, 4096).map_err(failed("a volume"))?;
    if is_full {
        let disk = pool_place::volume(&pool)?;
        pool_place::fill(&*disk, round.stop)?;
        // As much as the pool has: what is measured is the state that it comes to.
        let ios = Ios { ask: Ask::DurableWrite, len: 4096, depth: 64 };
        let mut writer = Durable::open(&*disk, ios, round.seed ^ 5)?;
        let mut left = segments as u64 * u64::from(SEGMENT_BYTES) / 4096;
        while left > 0 {
            if round.stop.is_set() {
                return Err(LabError::Interrupted);
            }
            left = left.saturating_sub(writer.turn()?);
        }
    }
    measure(&pool, 32, round)
}

/// A pool's directory that goes with the measurement.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // It lies in the run's own directory, which goes anyway.
        let _ = fs::remove_dir_all(&self.0);
    }
}
