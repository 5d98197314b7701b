//! The shared accesses of the experiment `zone-locks`, as steps.
//!
//! One operation is a batch: its I/Os reach the zones one right after the other, and most of a
//! batch's time passes before and after, where nobody meets anybody.

use crate::baseline::lock_per_zone::{self, LockPerZone};
use crate::baseline::locked_zones::LockedZones;
use crate::baseline::one_lock::{self, OneLock};
use crate::experiments::zone_locks::disk;
use crate::load::{Load, Pattern};
use crate::scale::measure::Open;
use crate::scale::steps::{Object, Operation, Pick, Step, Waiting};

/// The product's name in the experiment.
pub const PRODUCT: &str = "product";

/// The experiment's variants, coarsest first, and how each is opened.
pub const VARIANTS: [(&str, Open); 3] = [
    (one_lock::NAME, disk::<OneLock>),
    (lock_per_zone::NAME, disk::<LockPerZone>),
    (PRODUCT, disk::<LockedZones>),
];

/// Zones of the experiment's device.
const ZONES: usize = 256;
/// Pairs of cache lines on which the coarse lock's zones lie, side by side.
const ZONE_LINES: usize = 80;
/// Work between two zones of a batch, in nanoseconds: the completion of one request and the next
/// request's way to its zone. An estimate: about a third of what the floor `bare` of the experiment
/// `hot-path` takes beyond its generator, which also makes and checks the requests.
const BETWEEN_NS: f64 = 5.0;
/// Work under the lock for a read, and for a write: a few instructions, and some dozen.
const READ_HOLD_NS: f64 = 2.0;
const WRITE_HOLD_NS: f64 = 8.0;

/// A workload of the experiment, as far as the model goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Its name in the experiment.
    pub name: &'static str,
    /// Reads or writes.
    pub pattern: Pattern,
    /// I/Os of a batch.
    pub depth: usize,
}

impl Workload {
    /// The load that so many threads are.
    pub fn load(&self, threads: usize) -> Load {
        Load { pattern: self.pattern, threads, depth: self.depth }
    }
}

/// The workloads that have published rows.
pub const WORKLOADS: [Workload; 2] = [
    Workload { name: "random-read", pattern: Pattern::RandomRead, depth: 8 },
    Workload { name: "random-write", pattern: Pattern::RandomWrite, depth: 1 },
];

/// What a batch of a variant does; `None` for a variant or a workload that is not modelled.
///
/// | | read | write |
/// | --- | --- | --- |
/// | one lock | the lock | the lock, whose lines hold the counts; under it the zone's line |
/// | lock per zone | the lock of any zone | the lock of a zone that is the thread's own |
/// | product | the word of any zone, which nobody changes | the same |
pub fn operation(variant: &str, workload: &Workload, waiting: Waiting) -> Option<Operation> {
    let reads = workload.pattern == Pattern::RandomRead;
    let (objects, step) = match (variant, reads) {
        (one_lock::NAME, true) => (vec![("lock", 1)], section(waiting, Pick::Same, true, vec![])),
        (one_lock::NAME, false) => {
            let touches = vec![(1, Pick::Any, true)];
            let objects = vec![("lock", 1), ("zone line", ZONE_LINES)];
            (objects, section(waiting, Pick::Same, false, touches))
        }
        (lock_per_zone::NAME, true) => {
            (vec![("zone", ZONES)], section(waiting, Pick::Any, true, vec![]))
        }
        (PRODUCT, true) => (vec![("word", ZONES)], Step::Read(0, Pick::Any)),
        // Zones of the thread's own: nobody else has their lines.
        (lock_per_zone::NAME | PRODUCT, false) => (Vec::new(), Step::Work(0.0)),
        _ => return None,
    };
    let mut steps = vec![Step::Rest];
    for _ in 0..workload.depth {
        steps.extend([Step::Work(BETWEEN_NS), step.clone()]);
    }
    let objects = objects.into_iter().map(|(name, count)| Object { name, count }).collect();
    Some(Operation { objects, steps })
}

fn section(waiting: Waiting, pick: Pick, reads: bool, touches: Vec<(usize, Pick, bool)>) -> Step {
    let hold_ns = if reads { READ_HOLD_NS } else { WRITE_HOLD_NS };
    Step::Section { waiting, lock: (0, pick), hold_ns, touches }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_and_workload_is_described() {
        for (variant, _) in VARIANTS {
            for workload in WORKLOADS {
                let operation = operation(variant, &workload, Waiting::Spin).unwrap();
                assert_eq!(operation.check(), Ok(()), "{variant} {}", workload.name);
            }
        }
        assert_eq!(operation("none", &WORKLOADS[0], Waiting::Spin), None);
    }
}
