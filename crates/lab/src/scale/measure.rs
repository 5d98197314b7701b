//! Measures an experiment's variant on this machine: one thread alone, and two on two processors.
//!
//! Both are measured on one opening of the device, one right after the other. The address of the
//! device's memory decides how far its lines have to travel, and differs from opening to opening.
//! Measurements are in slices, as limits are ([`crate::limits::slices`]), so that the model is
//! compared with two undisturbed processors.

use std::sync::Arc;
use std::time::Duration;

use blockyard_core::{Bio, Disk, Op, Sector, Status};

use crate::error::LabError;
use crate::limits::pair::{gain_of_own_work, together};
use crate::limits::slices::alone;
use crate::limits::values::persist;
use crate::load::{Load, Worker};
use crate::sample::Round;
use crate::scale::zone_locks::Workload;
use crate::stats::Summary;

/// Opens a new device.
pub type Open = fn() -> Result<Arc<dyn Disk>, LabError>;

/// The number of batches of which the way to the zones is timed; the median is taken.
const TIMED_BATCHES: usize = 2000;
/// The factor by which the longer batches have more I/Os.
const DEEPER: usize = 4;

/// Two processors with a gain below this at plain arithmetic are threads of one core.
const GAIN_MIN: f64 = 1.9;
/// The duration of that check, before and after a measurement.
const GAIN_MEASURE: Duration = Duration::from_millis(4);
/// The number of attempts until both processors were whole cores.
const GAIN_TRIES: u32 = 8;

/// The measurements of one opening of a device, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Opening {
    /// The time per I/O of one thread alone.
    pub alone_ns: f64,
    /// The time per I/O of two threads together; `None` with one processor, or if the two were
    /// never whole cores.
    pub two_ns: Option<f64>,
    /// The time per I/O of two threads that share nothing, each with a device of its own.
    pub apart_ns: Option<f64>,
    /// The time from one I/O's zone to the next one's, of one thread alone.
    pub zone_ns: f64,
}

/// Opens a device and measures it.
///
/// # Errors
/// If the device cannot be opened, an I/O fails, or the machine is too busy.
pub fn opening(
    round: &Round<'_>,
    open: Open,
    workload: &Workload,
    two: bool,
) -> Result<Opening, LabError> {
    let disk = open()?;
    let ns_per_io = |disks: &[&dyn Disk], threads| {
        persist(|| {
            disks.iter().try_for_each(|disk| empty_zones(*disk))?;
            ns_per_io_on(round, disks, &workload.load(threads))
        })
    };
    let alone_ns = ns_per_io(&[&*disk], 1)?;
    let zone_ns = zone_ns(round, &*disk, &workload.load(1))?;
    if !two {
        return Ok(Opening { alone_ns, two_ns: None, apart_ns: None, zone_ns });
    }
    let two_ns = whole(round, || ns_per_io(&[&*disk], 2))?;
    let other = open()?;
    let apart_ns = whole(round, || ns_per_io(&[&*disk, &*other], 1))?;
    Ok(Opening { alone_ns, two_ns, apart_ns, zone_ns })
}

/// A measurement during which both processors were whole cores; `None` if they never were. The
/// processors of a virtual machine may be threads of one core for a while, which the model does not
/// cover.
pub(super) fn whole<T>(
    round: &Round<'_>,
    measure: impl Fn() -> Result<T, LabError>,
) -> Result<Option<T>, LabError> {
    let short = Round { warm_up: GAIN_MEASURE / 4, duration: GAIN_MEASURE, ..*round };
    let are_two = || Ok(persist(|| gain_of_own_work(&short))? >= GAIN_MIN);
    let mut before = are_two()?;
    for _ in 0..GAIN_TRIES {
        let measured = measure()?;
        let after = are_two()?;
        if before && after {
            return Ok(Some(measured));
        }
        before = after;
    }
    Ok(None)
}

/// Nanoseconds of wall time per I/O of all threads together, one or two, on a fresh device.
///
/// # Errors
/// As [`opening`].
pub fn ns_per_io(round: &Round<'_>, open: Open, load: &Load) -> Result<f64, LabError> {
    ns_per_io_on(round, &[&*open()?], load)
}

/// Nanoseconds of wall time per I/O on devices whose zones are empty: one device, or one for each
/// of two threads, of which it is then the only user.
///
/// Each thread opens its own channel, so that two threads' allocations share no cache line and the
/// threads meet only in the device.
fn ns_per_io_on(round: &Round<'_>, disks: &[&dyn Disk], load: &Load) -> Result<f64, LabError> {
    let worker = |disk, number| move || Worker::open(disk, load, number, round.seed);
    let mut failed = [None, None];
    let reading = {
        let [first, second] = &mut failed;
        let disk = disks[0];
        let run = batches(disk.name(), worker(disk, 0), first);
        let beside = match (disks.get(1), load.threads) {
            (Some(other), _) => Some((*other, 0)),
            (None, 1) => None,
            (None, _) => Some((disk, 1)),
        };
        match beside {
            None => {
                let mut run = run;
                alone(round, |ops| {
                    run(ops);
                })
            }
            Some((disk, number)) => {
                let runs = [run, batches(disk.name(), worker(disk, number), second)];
                together(round, false, runs)
            }
        }
    };
    if let Some(error) = failed.into_iter().flatten().next() {
        return Err(error);
    }
    Ok(reading?.ns_per_op / load.depth as f64)
}

/// Resets all zones, so that a writer's stream starts at the true write pointers.
fn empty_zones(disk: &dyn Disk) -> Result<(), LabError> {
    let name = || format!("resetting the zones of {}", disk.name());
    let mut channel = disk.open().map_err(|error| LabError::failed(name(), error))?;
    channel.push(&[Bio::new(Op::ZoneResetAll, Sector(0), 0)]);
    channel.submit();
    let mut done = Vec::new();
    while channel.reap(&mut done) == 0 {
        channel.wait(None);
    }
    match done.iter().map(|completion| completion.status).find(|status| !status.is_ok()) {
        None => Ok(()),
        Some(status) => Err(LabError::failed(name(), status)),
    }
}

/// The time from one I/O's zone to the next one's: the additional time for push and submit per
/// additional I/O in a batch. This excludes the fixed cost of a batch and of the clock.
fn zone_ns(round: &Round<'_>, disk: &dyn Disk, load: &Load) -> Result<f64, LabError> {
    let deep = Load { depth: load.depth * DEEPER, ..*load };
    let times = [load, &deep].map(|load| submit_ns(round, disk, load));
    let [short, long] = times;
    Ok(((long? - short?) / (deep.depth - load.depth) as f64).max(0.0))
}

/// The median time of push and submit of a batch.
fn submit_ns(round: &Round<'_>, disk: &dyn Disk, load: &Load) -> Result<f64, LabError> {
    empty_zones(disk)?;
    let mut worker = Worker::open(disk, load, 0, round.seed)?;
    let failed = |status: Status| LabError::failed(disk.name().to_owned(), status);
    let mut times = Vec::with_capacity(TIMED_BATCHES);
    for _ in 0..TIMED_BATCHES {
        times.push(nanos(worker.timed_batch().map_err(failed)?));
    }
    Ok(Summary::of(&times).map_or(0.0, |summary| summary.median))
}

fn nanos(time: Duration) -> f64 {
    time.as_nanos() as f64
}

/// Runs the requested batches, until one fails. The first call opens the worker.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scale::zone_locks::{VARIANTS, WORKLOADS};
    use crate::stop::Stop;

    /// A writer on a device that was written before starts with empty zones.
    #[test]
    fn an_opening_is_measured_again_and_again() {
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(5));
        let round = Round { warm_up, duration, number: 0, seed: 1, stop: &stop };
        for (variant, open) in VARIANTS {
            let disk = open().unwrap();
            for workload in WORKLOADS {
                for _ in 0..2 {
                    let zone_ns = zone_ns(&round, &*disk, &workload.load(1)).unwrap();
                    assert!(zone_ns < 1e6, "{variant} {}: {zone_ns}", workload.name);
                }
            }
        }
    }
}
