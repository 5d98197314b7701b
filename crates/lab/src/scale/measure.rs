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
/// Each thread opens its own channel: what one allocates then lies on no line that another's lies
/// on, and nobody meets but in the device.
///
/// # Errors
/// If the device cannot be opened, an I/O fails, or the machine is too busy.
pub fn ns_per_io(round: &Round<'_>, open: Open, load: &Load) -> Result<f64, LabError> {
    let disk = open()?;
    let name = disk.name();
    let worker = |number| {
        let disk = &*disk;
        move || Worker::open(disk, load, number, round.seed)
    };
    let mut failed = [None, None];
    let reading = {
        let [first, second] = &mut failed;
        if load.threads == 1 {
            let mut run = batches(name, worker(0), first);
            alone(round, |ops| {
                run(ops);
            })
        } else {
            let runs = [batches(name, worker(0), first), batches(name, worker(1), second)];
            together(round, false, runs)
        }
    };
    if let Some(error) = failed.into_iter().flatten().next() {
        return Err(error);
    }
    Ok(reading?.ns_per_op / load.depth as f64)
}

/// Batches of a worker that is opened by the first of them, as many as are asked for, until
/// something fails.
fn batches(
    name: &str,
    open: impl Fn() -> Result<Worker, LabError>,
    failed: &mut Option<LabError>,
) -> impl FnMut(u32) -> u64 {
    let mut worker = None;
    move |ops| {
        for _ in 0..ops {
            if failed.is_some() {
                break;
            }
            let done = match &mut worker {
                Some(worker) => {
                    Worker::batch(worker).map(drop).map_err(|status| LabError::failed(name, status))
                }
                None => open().map(|opened| worker = Some(opened)),
            };
            if let Err(error) = done {
                *failed = Some(error);
            }
        }
        0
    }
}
