//! The shared accesses of the experiment `zone-locks`, as steps.
//!
//! One operation is a batch: its I/Os reach the zones one right after the other. Most of a batch's
//! time passes before and after that, where no threads meet.

use blockyard_core::zone::WordZones;

use crate::baseline::lock_per_zone::{self, LockPerZone};
use crate::baseline::one_lock::{self, OneLock, QueuedZones};
use crate::experiments::zone_locks::disk;
use crate::load::{Load, Pattern};
use crate::scale::machine::Machine;
use crate::scale::measure::Open;
use crate::scale::steps::{Object, Operation, Pick, Step, Waiting};

/// The product's name in the experiment.
pub const PRODUCT: &str = "product";

/// The experiment's variants, coarsest first, and how each is opened.
pub const VARIANTS: [(&str, Open); 3] = [
    (one_lock::NAME_QUEUED, disk::<OneLock<QueuedZones>>),
    (lock_per_zone::NAME, disk::<LockPerZone>),
    (PRODUCT, disk::<WordZones>),
];

/// The number of zones of the experiment's device.
const ZONES: usize = 256;
/// The number of pairs of cache lines on which the coarse lock's zones lie.
const ZONE_LINES: usize = 80;
/// The times of a thread alone at the zones, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AtZone {
    /// The time from one I/O's zone to the next one's, with the lock if there is one.
    pub zone_ns: f64,
    /// The time under the lock, without taking and releasing it.
    pub hold_ns: f64,
}

/// A workload of the experiment, as far as it is modelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// The workload's name in the experiment.
    pub name: &'static str,
    /// Reads or writes.
    pub pattern: Pattern,
    /// I/Os of a batch.
    pub depth: usize,
}

impl Workload {
    /// The load of `threads` threads.
    pub fn load(&self, threads: usize) -> Load {
        Load { pattern: self.pattern, threads, depth: self.depth }
    }
}

/// The workloads that have published rows.
pub const WORKLOADS: [Workload; 2] = [
    Workload { name: "random-read", pattern: Pattern::RandomRead, depth: 8 },
    Workload { name: "random-write", pattern: Pattern::RandomWrite, depth: 1 },
];

/// The steps of a batch of a variant; `None` for a variant or a workload that is not modelled.
///
/// | | read | write |
/// | --- | --- | --- |
/// | one lock | the lock | the lock, whose lines hold the counts; under it the zone's line |
/// | lock per zone | the lock of any zone | the lock of a zone that is the thread's own |
/// | product | the word of any zone, which no thread changes | the word of the thread's zone |
///
/// `at_zone` is the time of a thread alone there.
pub fn operation(
    machine: &Machine,
    variant: &str,
    workload: &Workload,
    waiting: Waiting,
    at_zone: AtZone,
) -> Option<Operation> {
    let reads = workload.pattern == Pattern::RandomRead;
    let section = |pick, touches| Step::Section {
        waiting,
        lock: (0, pick),
        hold_ns: at_zone.hold_ns,
        touches,
    };
    let (objects, step) = match (variant, reads) {
        (one_lock::NAME_QUEUED, true) => (vec![("lock", 1)], section(Pick::Same, vec![])),
        (one_lock::NAME_QUEUED, false) => {
            let touches = vec![(1, Pick::Any, true)];
            (vec![("lock", 1), ("zone line", ZONE_LINES)], section(Pick::Same, touches))
        }
        (lock_per_zone::NAME, true) => (vec![("zone", ZONES)], section(Pick::Any, vec![])),
        (PRODUCT, true) => (vec![("word", ZONES)], Step::Read(0, Pick::Any)),
        // Zones of the thread's own, whose lines no other thread has.
        (lock_per_zone::NAME | PRODUCT, false) => (Vec::new(), Step::Work(0.0)),
        _ => return None,
    };
    let guarded_ns = match &step {
        Step::Section { hold_ns, .. } => machine.spin as f64 / 1000.0 + hold_ns,
        _ => 0.0,
    };
    let between_ns = (at_zone.zone_ns - guarded_ns).max(0.0);
    let mut steps = vec![Step::Rest];
    for _ in 0..workload.depth {
        steps.extend([Step::Work(between_ns), step.clone()]);
    }
    let objects = objects.into_iter().map(|(name, count)| Object { name, count }).collect();
    Some(Operation { objects, steps })
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT_ZONE: AtZone = AtZone { zone_ns: 20.0, hold_ns: 2.0 };

    #[test]
    fn every_variant_and_workload_is_described() {
        for (variant, _) in VARIANTS {
            for workload in WORKLOADS {
                let machine = Machine::default();
                let operation =
                    operation(&machine, variant, &workload, Waiting::Spin, AT_ZONE).unwrap();
                assert_eq!(operation.check(), Ok(()), "{variant} {}", workload.name);
            }
        }
        let none = operation(&Machine::default(), "none", &WORKLOADS[0], Waiting::Spin, AT_ZONE);
        assert_eq!(none, None);
    }
}
