//! The time of an I/O in stock fio with its own null engine: the least that a figure by fio can be.

use crate::error::LabError;
use crate::limits::slices::LimitReading;
use crate::sample::Round;
use crate::tools::fio::Fio;

/// The CPU time of a random 4 KiB read of fio's null engine at this depth, in batches of up to 64.
///
/// # Errors
/// If fio is not installed or fails, or its output cannot be parsed.
pub fn null_engine(round: &Round<'_>, depth: u32) -> Result<LimitReading, LabError> {
    let report = line(depth).run(round.warm_up, round.duration, round.stop)?;
    Ok(LimitReading::of(report.cpu.as_nanos() as f64 / report.ios as f64))
}

fn line(depth: u32) -> Fio {
    let batch = depth.min(64);
    Fio::new("--ioengine=null --size=10g --rw=randread --bs=4k --gtod_reduce=1 --norandommap")
        .option("iodepth", depth)
        .option("iodepth_batch_submit", batch)
        .option("iodepth_batch_complete_max", batch)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_line_is_in_batches_of_up_to_64() {
        let text = line(256).line(Duration::ZERO, Duration::from_secs(1)).text();
        let want = "--iodepth=256 --iodepth_batch_submit=64 --iodepth_batch_complete_max=64";
        assert!(text.contains("--ioengine=null") && text.contains(want), "{text}");
    }
}
