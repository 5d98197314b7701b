//! What an experiment's variant takes here: one thread alone, and two on two processors.
//!
//! Measured in slices as limits are ([`crate::limits::slices`]), so that the model is held against
//! what two undisturbed processors do.

use std::sync::Arc;

use blockyard_core::Disk;

use crate::error::LabError;
use crate::limits::pair::together;
use crate::limits::slices::alone;
use crate::load::{Load, Worker};
use crate::sample::Round;

/// Opens a fresh device.
pub type Open = fn() -> Result<Arc<dyn Disk>, LabError>;

/// Nanoseconds of wall time per I/O of all threads together, with one thread or with two.
///
/// # Errors
/// If the device cannot be opened, an I/O fails, or the machine is too busy.
pub fn ns_per_io(round: &Round<'_>, open: Open, load: &Load) -> Result<f64, LabError> {
    let disk = open()?;
    let worker = |number| Worker::open(&*disk, load, number, round.seed);
    let mut failed = [None, None];
    let reading = {
        let [first, second] = &mut failed;
        if load.threads == 1 {
            let mut run = batches(worker(0)?, first);
            alone(round, |ops| {
                run(ops);
            })
        } else {
            together(round, false, [batches(worker(0)?, first), batches(worker(1)?, second)])
        }
    };
    if let Some(status) = failed.into_iter().flatten().next() {
        return Err(LabError::failed(disk.name().to_owned(), status));
    }
    Ok(reading?.ns_per_op / load.depth as f64)
}

/// Batches of a worker, as many as are asked for, until one fails.
fn batches(
    mut worker: Worker,
    failed: &mut Option<blockyard_core::Status>,
) -> impl FnMut(u32) -> u64 {
    move |ops| {
        for _ in 0..ops {
            if failed.is_some() {
                break;
            }
            if let Err(status) = worker.batch() {
                *failed = Some(status);
            }
        }
        0
    }
}
