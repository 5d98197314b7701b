//! The machine's parameters, from the experiment `limits`.
//!
//! The inputs are the times of one thread alone, and of two threads for one cell and for one lock
//! with no work between two sections. The model predicts the results of two threads in an
//! experiment, so these are not inputs.

use crate::error::LabError;
use crate::experiments::limits::names;
use crate::limits::slices::OPS_PER_TURN;
use crate::limits::values::LimitValues;
use crate::metric::Metric;
use crate::scale::machine::{Machine, Time, ns};
use crate::scale::simulation::Simulation;
use crate::scale::steps::{Object, Operation, Pick, Step, Waiting};

/// The ratio of a line's transfer time to another socket and to a neighbour, unless it is given. An
/// assumption, not a measurement: this machine has one socket.
pub const FAR_TO_NEAR: f64 = 2.4;

/// The resolution of the part of an exchange that keeps its line.
const PINNED_STEPS: Time = 16;
/// The seed of the simulations that calibrate.
const SEED: u64 = 1;

/// The limits that calibration needs.
pub const NEEDED: &[(&str, u32)] = &[
    (names::FETCH_ADD, 1),
    (names::FETCH_ADD, 2),
    (names::PAUSE, 1),
    (names::YIELD, 1),
    (names::SPIN_LOCK, 1),
    (names::SPIN_LOCK, 2),
    (names::SLEEP_LOCK, 1),
    (names::FUTEX_CALL, 1),
    (names::FUTEX_WAKE, 2),
];

/// A machine of this many cores with this machine's parameters.
///
/// Two threads that only update one cell exchange its line all the time. The time from one turn to
/// the next is the line's transfer time. A core's updates in its turn after the first one happen
/// while the other core's request travels. On average the request arrives in the middle of an
/// update.
///
/// The time of two threads for one lock shows how long an exchange keeps its line: a request that
/// arrives meanwhile finds the lock held.
///
/// # Errors
/// If a limit was not measured.
pub fn machine(limits: &LimitValues, cores: usize, sockets: usize) -> Result<Machine, LabError> {
    let time = |name, jobs| limits.get(name, jobs, Metric::NS_PER_OP);
    let update = time(names::FETCH_ADD, 1)?;
    let ops_per_turn = limits.get(names::FETCH_ADD, 2, OPS_PER_TURN)?.max(1.0);
    let transfer = time(names::FETCH_ADD, 2)? * ops_per_turn;
    let retain = ((ops_per_turn - 0.5) * update).min(transfer / 2.0);
    let machine = Machine {
        cores,
        sockets,
        transfer_near: ns(transfer),
        transfer_far: ns(transfer * FAR_TO_NEAR),
        retain: ns(retain),
        pause: ns(time(names::PAUSE, 1)?).max(1),
        yielding: ns(time(names::YIELD, 1)?),
        spin: ns(time(names::SPIN_LOCK, 1)?),
        sleep: ns(time(names::SLEEP_LOCK, 1)?),
        update: ns(update),
        wake_call: ns(time(names::FUTEX_CALL, 1)?),
        wake: ns(time(names::FUTEX_WAKE, 2)?),
        pinned: 0,
        ..Machine::default()
    };
    let pinned = pinned(&machine, time(names::SPIN_LOCK, 2)?);
    Ok(Machine { pinned, ..machine })
}

/// The part of an exchange that keeps its line with which the model's time for two threads at one
/// lock is nearest to the measured one.
fn pinned(machine: &Machine, measured_ns: f64) -> Time {
    let two = Machine { cores: 2, sockets: 1, threads_per_core: 1, ..machine.clone() };
    let off = |pinned| {
        let machine = Machine { pinned, ..two.clone() };
        spin_lock_of_two(&machine, SEED).map_or(f64::MAX, |ns| (ns - measured_ns).abs())
    };
    let parts = (0..=PINNED_STEPS).map(|part| machine.update * part / PINNED_STEPS);
    parts.min_by(|&a, &b| off(a).total_cmp(&off(b))).unwrap_or(0)
}

/// Nanoseconds per section of two threads that only take one spin lock.
///
/// # Errors
/// If the machine is invalid.
pub fn spin_lock_of_two(machine: &Machine, seed: u64) -> Result<f64, String> {
    let hold_ns = 0.0;
    let lock = (0, Pick::Same);
    let operation = Operation {
        objects: vec![Object { name: "lock", count: 1 }],
        steps: vec![Step::Section { waiting: Waiting::Spin, lock, hold_ns, touches: Vec::new() }],
    };
    let alone_ns = machine.spin as f64 / 1000.0;
    let result = Simulation::run(machine, &operation, 2, alone_ns, seed)?;
    Ok(1e9 / result.ops_per_second)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn limits() -> LimitValues {
        let metric = Metric::NS_PER_OP;
        NEEDED
            .iter()
            .fold(LimitValues::default(), |limits, (name, jobs)| {
                limits.with(name, *jobs, metric, 10.0)
            })
            .with(names::FETCH_ADD, 1, metric, 7.0)
            .with(names::FETCH_ADD, 2, metric, 22.0)
            .with(names::FETCH_ADD, 2, OPS_PER_TURN, 3.0)
    }

    #[test]
    fn a_turn_is_a_transfer() {
        let machine = machine(&limits(), 48, 2).unwrap();
        assert_eq!((machine.cores, machine.sockets), (48, 2));
        assert_eq!((machine.transfer_near, machine.retain), (ns(66.0), ns(17.5)));
        assert!(super::machine(&LimitValues::default(), 2, 1).is_err());
    }
}
