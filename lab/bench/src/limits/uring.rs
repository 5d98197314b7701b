//! The time that io_uring takes for a no-op.
#![allow(unsafe_code)]

use io_uring::{IoUring, opcode};

use crate::error::LabError;
use crate::limits::slices::{LimitReading, alone};
use crate::sample::Round;

/// No-ops, `batch` of them per system call.
///
/// # Errors
/// As [`alone`], or if the kernel refuses a ring.
pub fn no_op(round: &Round<'_>, batch: u32) -> Result<LimitReading, LabError> {
    let ring = IoUring::new(batch.max(2)).map_err(LabError::io("setting up an io_uring"));
    let mut ring = ring?;
    let mut refused = None;
    let reading = alone(round, |ops| {
        for _ in 0..ops {
            if let Err(error) = submit_and_reap(&mut ring, batch) {
                refused.get_or_insert(error);
            }
        }
    });
    match refused {
        Some(error) => Err(error),
        None => reading.map(|reading| LimitReading::of(reading.ns_per_op / f64::from(batch))),
    }
}

fn submit_and_reap(ring: &mut IoUring, batch: u32) -> Result<(), LabError> {
    for number in 0..batch {
        let entry = opcode::Nop::new().build().user_data(u64::from(number));
        // SAFETY: a no-op refers to no memory.
        let pushed = unsafe { ring.submission().push(&entry) };
        pushed.map_err(|error| LabError::failed("io_uring submission", error))?;
    }
    ring.submit_and_wait(batch as usize).map_err(LabError::io("io_uring_enter"))?;
    let reaped = ring.completion().count();
    if reaped == batch as usize {
        Ok(())
    } else {
        Err(LabError::failed("io_uring", format!("{reaped} of {batch} no-ops completed")))
    }
}
