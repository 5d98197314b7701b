//! How fast this machine copies memory.

use std::hint::black_box;

use crate::error::LabError;
use crate::limits::slices::{LimitReading, alone};
use crate::sample::Round;

/// The length of a copied block: a usual block.
const BLOCK_BYTES: usize = 4096;
/// The length of a copy when the bandwidth is measured.
const STREAM_BYTES: usize = 1 << 20;

/// Memory that has been touched, so that no page fault falls into the measurement.
fn touched(bytes: usize) -> Result<Vec<u8>, LabError> {
    let mut memory = Vec::new();
    memory
        .try_reserve_exact(bytes)
        .map_err(|error| LabError::failed(format!("{bytes} bytes of memory"), error))?;
    memory.resize(bytes, 0x5a);
    Ok(memory)
}

/// Copies 4 KiB from and to fixed offsets, which stay in the nearest cache.
///
/// # Errors
/// As [`alone`].
pub fn copy_hot(round: &Round<'_>) -> Result<LimitReading, LabError> {
    copy_random(round, BLOCK_BYTES)
}

/// Copies 4 KiB from random offsets of `from_bytes` to a fixed one.
///
/// # Errors
/// As [`alone`], or if there is too little memory.
pub fn copy_random(round: &Round<'_>, from_bytes: usize) -> Result<LimitReading, LabError> {
    let from = touched(from_bytes)?;
    let mut to = touched(BLOCK_BYTES)?;
    let blocks = from_bytes / BLOCK_BYTES;
    let mut random = fastrand::Rng::with_seed(round.seed);
    let reading = alone(round, |ops| {
        for _ in 0..ops {
            let at = random.usize(..blocks) * BLOCK_BYTES;
            to.copy_from_slice(&from[at..at + BLOCK_BYTES]);
            black_box(to.first());
        }
    })?;
    Ok(LimitReading { bytes_per_op: BLOCK_BYTES as f64, ..reading })
}

/// Copies 1 MiB at a time through 256 MiB repeatedly: the sequential bandwidth of memory.
///
/// # Errors
/// As [`alone`], or if there is too little memory.
pub fn copy_stream(round: &Round<'_>) -> Result<LimitReading, LabError> {
    let bytes = 256 << 20;
    let from = touched(bytes)?;
    let mut to = touched(bytes)?;
    let mut at = 0;
    let reading = alone(round, |ops| {
        for _ in 0..ops {
            to[at..at + STREAM_BYTES].copy_from_slice(&from[at..at + STREAM_BYTES]);
            black_box(to.get(at));
            at = (at + STREAM_BYTES) % bytes;
        }
    })?;
    Ok(LimitReading { bytes_per_op: STREAM_BYTES as f64, ..reading })
}
