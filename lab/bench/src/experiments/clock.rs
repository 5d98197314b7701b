//! `clock`: the cost of reading the clock, and so the shortest time that the lab itself can
//! measure.

use std::hint::black_box;
use std::time::Instant;

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Variant, VariantRole, Workload};
use crate::metric::Metric;
use crate::sample::{Round, Sample};

/// The experiment's name on the command line.
pub const NAME: &str = "clock";

/// Builds the experiment.
pub fn build(_settings: &Settings) -> Experiment {
    Experiment {
        name: NAME,
        title: "the cost of reading the clock",
        about: "CPU time in nanoseconds of one clock reading, from a loop of readings divided by \
                their number. The lab reads a clock twice for each time that it takes, so twice \
                this cost is the shortest time that it can measure. The wall clock is read in user \
                space, a thread's CPU clock by a system call.",
        published: Vec::new(),
        variants: vec![
            Variant { name: "wall", kind: VariantRole::Limit, about: "CLOCK_MONOTONIC" },
            Variant { name: "thread", kind: VariantRole::Limit, about: "CLOCK_THREAD_CPUTIME_ID" },
        ],
        workloads: vec![Workload {
            name: "look",
            about: "readings of the clock, one after the other",
        }],
        comparisons: vec![Comparison::new("wall", "thread", Metric::NS_PER_OP).cost()],
        plots: vec![Metric::NS_PER_OP],
        cells: vec![
            Cell::new("wall", "look", 1, |round| {
                looks(round, || {
                    black_box(Instant::now());
                })
            }),
            Cell::new("thread", "look", 1, |round| {
                looks(round, || {
                    black_box(rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime));
                })
            }),
        ],
    }
}

fn looks(round: &Round<'_>, look: impl Fn()) -> Result<Sample, LabError> {
    for duration in [round.warm_up, round.duration] {
        let (start, mut count) = (Instant::now(), 0_u64);
        while start.elapsed() < duration {
            if round.stop.is_set() {
                return Err(LabError::Interrupted);
            }
            (0..1000).for_each(|_| look());
            count += 1000;
        }
        if duration == round.duration && count > 0 {
            let ns = start.elapsed().as_nanos() as f64 / count as f64;
            return Ok(Sample::of(Metric::NS_PER_OP, ns));
        }
    }
    Err(LabError::failed("clock", "the duration is zero"))
}
