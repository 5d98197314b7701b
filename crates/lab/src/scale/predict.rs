//! Predictions of an experiment by core count, each with the known figures for comparison.

use std::time::Duration;

use crate::baseline::one_lock;
use crate::error::LabError;
use crate::experiments::zone_locks;
use crate::metric::Metric;
use crate::results::Prediction;
use crate::sample::Round;
use crate::scale::machine::Machine;
use crate::scale::measure::{Opening, opening};
use crate::scale::published;
use crate::scale::simulation::Simulation;
use crate::scale::steps::Waiting;
use crate::scale::zone_locks::{AtZone, PRODUCT, VARIANTS, WORKLOADS, Workload, operation};
use crate::stats::Summary;
use crate::stop::Stop;

/// Memory that is allocated before each opening, so that the device has other addresses: the number
/// of blocks, and their lengths.
const SHIFT_BLOCKS: usize = 200;
const SHIFT_BYTES: std::ops::Range<usize> = 16..400;

/// The source of figures that this command measures itself.
pub const MEASURED_HERE: &str = "measured here";

/// The measurements of a variant under a workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Known {
    /// The variant.
    pub variant: &'static str,
    /// The workload.
    pub workload: Workload,
    /// I/Os per second of one thread alone; the median of the openings.
    pub alone_iops: f64,
    /// The throughput of two threads relative to one, each on a processor of its own: the mean of
    /// the openings, with the least and the greatest. `None` with one processor, or if the two were
    /// never whole cores.
    pub gain: Option<Gain>,
    /// The gain of two threads that share nothing, each on a device of its own.
    pub apart: Option<Gain>,
    /// Nanoseconds from one I/O's zone to the next one's, of one thread alone.
    pub zone_ns: f64,
}

/// The throughput of two threads relative to one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gain {
    /// From the mean time of an I/O over all openings. Two threads at one lock fall into one of two
    /// rhythms, one twice as fast as the other; a median would jump between them.
    pub mean: f64,
    /// The least gain of the openings.
    pub min: f64,
    /// The greatest gain of the openings.
    pub max: f64,
}

impl Gain {
    fn of(openings: &[Opening], together: fn(&Opening) -> Option<f64>) -> Option<Gain> {
        let times = openings.iter().filter_map(|all| Some(together(all)? / all.alone_ns));
        let times: Vec<f64> = times.collect();
        Summary::of(&times).map(|summary| Gain {
            mean: times.len() as f64 / times.iter().sum::<f64>(),
            min: 1.0 / summary.max,
            max: 1.0 / summary.min,
        })
    }
}

impl Known {
    /// Combines the openings of a device; `None` if there were none.
    fn of(variant: &'static str, workload: Workload, openings: &[Opening]) -> Option<Known> {
        let median = |value: fn(&Opening) -> f64| {
            let values: Vec<f64> = openings.iter().map(value).collect();
            Summary::of(&values).map(|summary| summary.median)
        };
        let gain = Gain::of(openings, |opening| opening.two_ns);
        let apart = Gain::of(openings, |opening| opening.apart_ns);
        let alone_iops = 1e9 / median(|opening| opening.alone_ns)?;
        let zone_ns = median(|opening| opening.zone_ns)?;
        Some(Known { variant, workload, alone_iops, gain, apart, zone_ns })
    }

    /// The slowdown of an I/O on private data while another processor works too.
    fn crowding(&self) -> f64 {
        self.apart.map_or(1.0, |apart| (2.0 / apart.mean).max(1.0))
    }

    /// I/Os per second of `threads` threads, if they were measured.
    pub fn iops(&self, threads: usize) -> Option<f64> {
        match threads {
            1 => Some(self.alone_iops),
            2 => Some(self.alone_iops * self.gain?.mean),
            _ => None,
        }
    }
}

/// Measures every variant with one thread and, where there is a second processor, with two. Each
/// round takes every variant in turn, and opens a device of its own for each.
///
/// # Errors
/// If something cannot be measured.
pub fn measure(rounds: u32, duration: Duration, stop: &Stop) -> Result<Vec<Known>, LabError> {
    let two = std::thread::available_parallelism().map_or(1, usize::from) > 1;
    let cells: Vec<_> = WORKLOADS
        .into_iter()
        .flat_map(|workload| VARIANTS.map(|(variant, open)| (variant, open, workload)))
        .collect();
    let mut openings = vec![Vec::new(); cells.len()];
    let mut random = fastrand::Rng::with_seed(1);
    let mut shift: Vec<Vec<u8>> = Vec::new();
    for number in 0..rounds {
        for ((_, open, workload), openings) in cells.iter().zip(&mut openings) {
            // Otherwise the allocator would give every device of a process the same offsets within
            // cache lines, which decide how two threads behave at one lock.
            shift.extend((0..SHIFT_BLOCKS).map(|_| vec![0; random.usize(SHIFT_BYTES)]));
            let seed = u64::from(number) + 1;
            let round = Round { warm_up: duration / 5, duration, number, seed, stop };
            openings.push(opening(&round, *open, workload, two)?);
        }
    }
    let known = cells.into_iter().zip(openings);
    Ok(known
        .filter_map(|((variant, _, workload), all)| Known::of(variant, workload, &all))
        .collect())
}

/// 1, 2, 4 and so on, and the machine's own number.
pub fn core_counts(cores: usize) -> Vec<usize> {
    let mut counts: Vec<usize> =
        std::iter::successors(Some(1), |n| Some(n * 2)).take_while(|&n| n < cores).collect();
    counts.push(cores);
    counts
}

/// Predicts every variant by core count from the time of one thread alone, and from its slowdown
/// while another works on a device of its own. Measurements of two threads on one device appear
/// next to the prediction for two cores, and are not inputs.
///
/// # Errors
/// If the machine is invalid.
pub fn predict(machine: &Machine, all: &[Known], seed: u64) -> Result<Vec<Prediction>, String> {
    machine.check()?;
    let mut predictions = Vec::new();
    for known in all {
        let Known { variant, workload, zone_ns, .. } = *known;
        let at_zone = AtZone { zone_ns, hold_ns: hold_ns(machine, all, known) };
        let operation = operation(machine, variant, &workload, waiting_at(variant), at_zone)
            .ok_or_else(|| format!("`{variant}` under `{}` is not modelled", workload.name))?;
        let batch_ns = workload.depth as f64 * 1e9 / known.alone_iops;
        let machine = &Machine { crowding: known.crowding(), ..machine.clone() };
        for cores in core_counts(machine.cores) {
            let result = Simulation::run(machine, &operation, cores, batch_ns, seed)?;
            let value = result.ops_per_second * workload.depth as f64;
            let comparable = machine.threads_per_core == 1
                && machine.socket_of(cores - 1) == machine.socket_of(0);
            let measured = known.iops(cores).filter(|_| comparable);
            predictions.push(prediction(
                zone_locks::NAME,
                (variant, workload.name),
                (cores as u32, cores.div_ceil(machine.cores / machine.sockets) as u32),
                cores * machine.threads_per_core,
                value,
                measured.map(|iops| (iops, MEASURED_HERE.to_owned())),
            ));
        }
    }
    Ok(predictions)
}

/// How waiters wait at the lab's own locks; for the variant without a lock it does not matter.
fn waiting_at(variant: &str) -> Waiting {
    if variant == one_lock::NAME_QUEUED { Waiting::Turn } else { Waiting::Spin }
}

/// The time that a variant spends under its lock: its time per zone beyond that of the product,
/// which has no lock there, and beyond taking and releasing a lock. The result may be 0, because a
/// processor overlaps operations.
fn hold_ns(machine: &Machine, all: &[Known], known: &Known) -> f64 {
    let product = all
        .iter()
        .find(|other| (other.variant, other.workload.name) == (PRODUCT, known.workload.name));
    let spin_ns = machine.spin as f64 / 1000.0;
    product.map_or(0.0, |product| (known.zone_ns - product.zone_ns - spin_ns).max(0.0))
}

/// The published rows as predictions. Those that are no predictions are marked as fitted.
///
/// # Errors
/// If the model refuses them.
pub fn published(seed: u64) -> Result<Vec<Prediction>, String> {
    let machine = published::machine();
    let rows = published::rows(seed)?.into_iter().map(|row| {
        let source = if row.fitted { "published; fitted to it" } else { "published" };
        prediction(
            zone_locks::NAME,
            (row.variant, row.workload),
            (machine.cores as u32, machine.sockets as u32),
            96,
            row.modelled,
            Some((row.published, source.to_owned())),
        )
    });
    Ok(rows.collect())
}

/// A value of the model, with the known value and its source.
pub(super) fn prediction(
    experiment: &str,
    (variant, workload): (&str, &str),
    (cores, sockets): (u32, u32),
    jobs: usize,
    value: f64,
    known: Option<(f64, String)>,
) -> Prediction {
    Prediction {
        experiment: experiment.to_owned(),
        variant: variant.to_owned(),
        workload: workload.to_owned(),
        cores,
        sockets,
        jobs: jobs as u32,
        metric: Metric::IOPS.name.to_owned(),
        unit: Metric::IOPS.unit.to_owned(),
        value,
        error: known.as_ref().map(|(known, _)| value / known - 1.0),
        known: known.as_ref().map(|(known, _)| *known),
        known_source: known.map(|(_, source)| source),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_double_up_to_the_machine() {
        assert_eq!(core_counts(1), [1]);
        assert_eq!(core_counts(2), [1, 2]);
        assert_eq!(core_counts(96), [1, 2, 4, 8, 16, 32, 64, 96]);
    }

    #[test]
    fn a_gain_is_that_of_the_mean_time() {
        let opening = |two_ns| Opening {
            alone_ns: 40.0,
            two_ns: Some(two_ns),
            apart_ns: Some(25.0),
            zone_ns: 20.0,
        };
        let known = Known::of("x", WORKLOADS[0], &[opening(20.0), opening(60.0)]).unwrap();
        assert_eq!((known.iops(1), known.iops(2), known.iops(4)), (Some(25e6), Some(25e6), None));
        assert_eq!((known.apart.unwrap().mean, known.crowding()), (1.6, 1.25));
        let gain = known.gain.unwrap();
        assert!((gain.max - 2.0).abs() < 1e-9 && (gain.min - 40.0 / 60.0).abs() < 1e-9);
        assert_eq!(Known::of("x", WORKLOADS[0], &[]), None);
    }

    #[test]
    fn one_core_is_what_was_measured_and_two_are_held_against_it() {
        let machine = Machine { cores: 4, ..Machine::default() };
        let workload = WORKLOADS[0];
        let gain = Some(Gain { mean: 1.2, min: 1.0, max: 1.5 });
        let known = VARIANTS.map(|(variant, _)| Known {
            variant,
            workload,
            alone_iops: 25e6,
            gain,
            apart: Some(Gain { mean: 1.6, min: 1.6, max: 1.6 }),
            zone_ns: 20.0,
        });
        let predictions = predict(&machine, &known, 1).unwrap();
        assert_eq!(predictions.len(), 3 * 3);
        for prediction in &predictions {
            match prediction.cores {
                1 => assert!(prediction.error.unwrap().abs() < 0.03, "{prediction:?}"),
                2 => {
                    assert_eq!(prediction.known, Some(30e6));
                    assert!(prediction.value < 41e6, "two apart do 1.6 times one: {prediction:?}");
                }
                _ => assert_eq!(prediction.known, None),
            }
        }
        let none = Machine { cores: 0, ..machine };
        assert!(predict(&none, &known, 1).unwrap_err().contains("cores is 0"));
    }
}
