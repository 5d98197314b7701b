//! The memory that a full device takes.

use super::{FULL, MEMORY, OURS, OVERHEAD_PART, RATIO, ZRAM};
use crate::error::LabError;
use crate::experiment::Cell;
use crate::experiments::ram_data::{FillData, Filling};
use crate::sample::{Round, Sample};
use crate::settings::Settings;

/// The cells: both sides, filled with the corpus.
pub(super) fn cells(settings: &Settings, bytes: u64) -> [Cell; 2] {
    let filling = Filling::whole(FillData::Corpus, bytes);
    let scratch = settings.scratch.clone();
    let kernel = move |round: &Round<'_>| {
        let device = filling.zram(&scratch, round)?;
        let stat = device.mm_stat()?;
        let total = stat.mem_used_total + device.table_bytes();
        memory(stat.orig_data_size, stat.compr_data_size, total)
    };
    let scratch = settings.scratch.clone();
    let ours = move |round: &Round<'_>| {
        let stats = filling.ram(&scratch, round)?.stats();
        let mm = stats.mm;
        memory(mm.orig_data_size, mm.compr_data_size, mm.mem_used_total + stats.table_bytes)
    };
    [Cell::new(ZRAM, FULL.name, 1, kernel), Cell::new(OURS, FULL.name, 1, ours)]
}

fn memory(plain: u64, compressed: u64, total: u64) -> Result<Sample, LabError> {
    if compressed == 0 {
        return Err(LabError::failed(FULL.name, "nothing was stored"));
    }
    let (plain, compressed, total) = (plain as f64, compressed as f64, total as f64);
    Ok(Sample::of(MEMORY, total)
        .with(RATIO, plain / compressed)
        .with(OVERHEAD_PART, (total / compressed - 1.0) * 100.0))
}
