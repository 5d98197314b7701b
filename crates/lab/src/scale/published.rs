//! The published rows of the zone locks, compared with the model.
//!
//! That machine is not available, and the published text says little of it: two sockets of 24
//! cores. So its parameters are assumptions, listed in [`machine`]. The cost of an I/O in the
//! kernel (system calls, the block layer, fio) is not known either. It is fitted so that the model
//! gives the row *lock per zone*. Only the row *one lock* is then a prediction: a model that was
//! fitted to both would prove nothing.

use crate::baseline::{lock_per_zone, one_lock};
use crate::load::Pattern;
use crate::scale::machine::{Machine, ns};
use crate::scale::simulation::Simulation;
use crate::scale::steps::Waiting;
use crate::scale::zone_locks::{self, AtZone, Workload};

/// The published pairs: workload, one lock, lock per zone, in I/Os per second.
pub const ROWS: [(&str, f64, f64); 2] =
    [("random-read", 1_361_000.0, 4_096_000.0), ("random-write", 465_000.0, 456_000.0)];

/// The time from a request's arrival at the null device to the end of its section; and the part of
/// it under the lock, for a read and for a write. Assumed: a few instructions and some dozen.
const ZONE_NS: f64 = 40.0;
const READ_HOLD_NS: f64 = 2.0;
const WRITE_HOLD_NS: f64 = 8.0;
/// The steps of the fit. Each divides the remaining error by ten or more, because the fitted part
/// is nearly all of an I/O's time.
const FIT_STEPS: usize = 6;

/// A published row and the model's value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    /// The variant.
    pub variant: &'static str,
    /// The workload.
    pub workload: &'static str,
    /// Published I/Os per second.
    pub published: f64,
    /// The model's I/Os per second.
    pub modelled: f64,
    /// Whether the row was an input of the model: then it shows nothing of the model's error.
    pub fitted: bool,
}

impl Row {
    /// The model's relative error.
    pub fn error(&self) -> f64 {
        self.modelled / self.published - 1.0
    }
}

/// The published machine, as far as it is known or assumed:
///
/// - 48 cores of two sockets: published. One thread per core: assumed.
/// - A line takes 60 ns to a core of the same socket and 140 ns to the other socket: assumed, the
///   order of magnitude of servers of 2019 and 2020.
/// - After another core has read a line that one core changed, both can read it: assumed from the
///   published protocol of these processors.
/// - The kernel's spin lock queues its waiters: known. Taking and releasing it with interrupts off
///   takes 20 ns alone: assumed.
pub fn machine() -> Machine {
    Machine {
        cores: 48,
        sockets: 2,
        threads_per_core: 1,
        transfer_near: ns(60.0),
        transfer_far: ns(140.0),
        spin: ns(20.0),
        migrates: false,
        ..Machine::default()
    }
}

/// Both pairs of rows: *lock per zone* fitted, *one lock* predicted.
///
/// # Errors
/// If the model refuses its own description of them.
pub fn rows(seed: u64) -> Result<Vec<Row>, String> {
    let machine = machine();
    let mut rows = Vec::new();
    for (name, one, per_zone) in ROWS {
        let workload = zone_locks::WORKLOADS.iter().find(|workload| workload.name == name);
        let workload = workload.ok_or_else(|| format!("`{name}` is not modelled"))?;
        let modelled = |variant, alone_ns| iops(&machine, variant, workload, alone_ns, seed);
        let mut alone_ns = machine.cores as f64 / per_zone * 1e9;
        for _ in 0..FIT_STEPS {
            let off_ns = |iops: f64| machine.cores as f64 * 1e9 / iops;
            let off = off_ns(modelled(lock_per_zone::NAME, alone_ns)?) - off_ns(per_zone);
            alone_ns -= off;
        }
        let row = |variant, published, fitted| -> Result<Row, String> {
            let modelled = modelled(variant, alone_ns)?;
            Ok(Row { variant, workload: name, published, modelled, fitted })
        };
        rows.push(row(lock_per_zone::NAME, per_zone, true)?);
        rows.push(row(one_lock::NAME_QUEUED, one, false)?);
    }
    Ok(rows)
}

/// I/Os per second of all cores with the kernel's lock.
fn iops(
    machine: &Machine,
    variant: &str,
    workload: &Workload,
    alone_ns: f64,
    seed: u64,
) -> Result<f64, String> {
    // The kernel's requests arrive one by one: a system call and the block layer are between them.
    let single = Workload { depth: 1, ..*workload };
    let reads = workload.pattern == Pattern::RandomRead;
    let hold_ns = if reads { READ_HOLD_NS } else { WRITE_HOLD_NS };
    let at_zone = AtZone { zone_ns: ZONE_NS, hold_ns };
    let operation = zone_locks::operation(machine, variant, &single, Waiting::Queue, at_zone)
        .ok_or_else(|| format!("`{variant}` is not modelled"))?;
    let result = Simulation::run(machine, &operation, machine.cores, alone_ns, seed)?;
    Ok(result.ops_per_second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fitted_rows_are_met_and_the_others_are_not_fitted() {
        let rows = rows(1).unwrap();
        assert_eq!(rows.len(), 4);
        for row in &rows {
            assert_eq!(row.fitted, row.variant == lock_per_zone::NAME);
            assert!(row.error().is_finite());
            if row.fitted {
                assert!(row.error().abs() < 0.02, "{row:?}");
            }
        }
    }
}
