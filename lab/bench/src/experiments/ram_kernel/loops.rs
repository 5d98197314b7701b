//! The rows that the lab drives itself: a loop around `pread` and `pwrite` on the kernel's device,
//! and inline I/Os on ours.

use std::fmt;
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use blockyard_core::Region;
use fastrand::Rng;

use super::{AimedRow, BLOCK_BYTES, NAME, OURS, ZRAM};
use crate::corpus::CORPUS_BYTES;
use crate::error::LabError;
use crate::experiment::Cell;
use crate::experiment::Settings;
use crate::experiments::ram_data::{Filling, disk};
use crate::load::records::{Does, Order, Part, Passed, Records, Task, Way};
use crate::load::workers::{self, Work};
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::tools::direct;
use crate::tools::zram_device::ZramDevice;

/// The time that filling a device takes.
const OVERHEAD: Duration = Duration::from_millis(250);

/// The cells of a row that the lab drives itself.
pub(super) fn cells(
    settings: &Settings,
    row: &'static AimedRow,
    jobs: u32,
    bytes: u64,
) -> [Cell; 2] {
    let (processors, does) = (settings.processors, row.does);
    let (scratch, filling) = (settings.scratch.clone(), Filling::whole(row.data, bytes));
    let kernel = move |round: &Round<'_>| {
        let source = row.data.bytes(&scratch, round.stop)?;
        let device = filling.zram(&scratch, round)?;
        let thread =
            |number: u64| ZramLoop::open(&device, source, does, bytes, round.seed ^ number);
        let works = (0..u64::from(jobs)).map(thread).collect::<Result<Vec<_>, LabError>>()?;
        sample(workers::run(works, round, || ())?, jobs, processors)
    };
    let scratch = settings.scratch.clone();
    let ours = move |round: &Round<'_>| {
        let source = row.data.bytes(&scratch, round.stop)?;
        let disk = disk(&filling.ram(&scratch, round)?);
        let (order, way) = (Order::Random, Way::Carry);
        let task = Task { does, order, way, record_bytes: BLOCK_BYTES };
        let part = Part { from: 0, len_bytes: bytes };
        let thread =
            |number: u64| Records::open_with(source, &disk, task, part, round.seed ^ number);
        let works = (0..u64::from(jobs)).map(thread).collect::<Result<Vec<_>, LabError>>()?;
        sample(workers::run(works, round, || ())?, jobs, processors)
    };
    [
        Cell::new(ZRAM, row.workload.name, jobs, kernel).overhead(OVERHEAD),
        Cell::new(OURS, row.workload.name, jobs, ours).overhead(OVERHEAD),
    ]
}

fn sample<W>(
    outcome: workers::WorkersResult<W, ()>,
    jobs: u32,
    processors: usize,
) -> Result<Sample, LabError> {
    if outcome.ios == 0 {
        return Err(LabError::failed(NAME, "no I/O ended in the measured window"));
    }
    let passed = Passed { records: outcome.ios, wall: outcome.wall, cpu: outcome.cpu };
    let sample = passed.limited_sample(BLOCK_BYTES, jobs as usize, processors);
    let per_second = outcome.ios as f64 / outcome.cpu.as_secs_f64();
    Ok(sample.with(Metric::IOS_PER_CPU_SECOND, per_second))
}

/// A thread that reads and writes a zram device as [`Records`] does ours.
struct ZramLoop {
    file: File,
    source: &'static Arc<Region>,
    buffer: Arc<Region>,
    does: Does,
    blocks: u64,
    rng: Rng,
}

impl fmt::Debug for ZramLoop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZramLoop").field("does", &self.does).finish_non_exhaustive()
    }
}

impl ZramLoop {
    fn open(
        device: &ZramDevice,
        source: &'static Arc<Region>,
        does: Does,
        bytes: u64,
        seed: u64,
    ) -> Result<ZramLoop, LabError> {
        Ok(ZramLoop {
            file: device.open()?,
            source,
            buffer: Region::alloc(BLOCK_BYTES as usize),
            does,
            blocks: bytes / BLOCK_BYTES,
            rng: Rng::with_seed(seed),
        })
    }
}

impl Work for ZramLoop {
    fn turn(&mut self) -> Result<u64, LabError> {
        let at = self.rng.u64(..self.blocks) * BLOCK_BYTES;
        let write = match self.does {
            Does::Read => false,
            Does::Write => true,
            Does::Either => self.rng.bool(),
        };
        let len = BLOCK_BYTES as usize;
        let done = if write {
            // The corpus block after the one that the device holds at this offset.
            let from = (at + BLOCK_BYTES) % CORPUS_BYTES as u64;
            direct::write(&self.file, self.source, from, len, at)
        } else {
            direct::read(&self.file, &self.buffer, 0, len, at)
        };
        done.map_err(LabError::io(ZRAM))?;
        Ok(1)
    }
}
