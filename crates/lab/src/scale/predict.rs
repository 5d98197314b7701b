//! Predictions of an experiment by core count, each beside what is known of it.

use std::time::Duration;

use crate::error::LabError;
use crate::limits::values::persist;
use crate::metric::Metric;
use crate::results::Prediction;
use crate::sample::Round;
use crate::scale::machine::Machine;
use crate::scale::measure::ns_per_io;
use crate::scale::published;
use crate::scale::simulation::Simulation;
use crate::scale::steps::Waiting;
use crate::scale::zone_locks::{VARIANTS, WORKLOADS, Workload, operation};
use crate::stats::Summary;
use crate::stop::Stop;

/// What was measured here: a variant, a workload, threads, and I/Os per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Known {
    /// The variant.
    pub variant: &'static str,
    /// The workload.
    pub workload: Workload,
    /// Threads, each on a processor of its own.
    pub threads: usize,
    /// I/Os per second of all threads; the median of the rounds.
    pub iops: f64,
}

/// Measures every variant with one thread and, where there is a second processor, with two. Each
/// round opens a device of its own, and takes every variant in turn.
///
/// # Errors
/// If something cannot be measured.
pub fn measure(rounds: u32, duration: Duration, stop: &Stop) -> Result<Vec<Known>, LabError> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mut cells = Vec::new();
    for workload in WORKLOADS {
        for threads in 1..=processors.min(2) {
            cells.extend(VARIANTS.map(|(variant, open)| (variant, open, workload, threads)));
        }
    }
    let mut values = vec![Vec::new(); cells.len()];
    for number in 0..rounds {
        for ((_, open, workload, threads), values) in cells.iter().zip(&mut values) {
            let seed = u64::from(number) + 1;
            let round = Round { warm_up: duration / 5, duration, number, seed, stop };
            let ns = persist(|| ns_per_io(&round, *open, &workload.load(*threads)))?;
            values.push(1e9 / ns);
        }
    }
    let known = cells.into_iter().zip(values).filter_map(|(cell, values)| {
        let (variant, _, workload, threads) = cell;
        Summary::of(&values).map(|s| Known { variant, workload, threads, iops: s.median })
    });
    Ok(known.collect())
}

/// 1, 2, 4 and so on, and the machine's own number.
pub fn core_counts(cores: usize) -> Vec<usize> {
    let mut counts: Vec<usize> =
        std::iter::successors(Some(1), |n| Some(n * 2)).take_while(|&n| n < cores).collect();
    counts.push(cores);
    counts
}

/// Predicts every variant by core count from what one thread takes alone. Two threads that were
/// measured stand beside the prediction for two cores, and did not go into it.
///
/// # Errors
/// If the machine will not do.
pub fn predict(machine: &Machine, known: &[Known], seed: u64) -> Result<Vec<Prediction>, String> {
    machine.check()?;
    let mut predictions = Vec::new();
    for alone in known.iter().filter(|known| known.threads == 1) {
        let Known { variant, workload, .. } = *alone;
        let operation = operation(variant, &workload, Waiting::Spin)
            .ok_or_else(|| format!("`{variant}` under `{}` is not modelled", workload.name))?;
        let batch_ns = workload.depth as f64 * 1e9 / alone.iops;
        for cores in core_counts(machine.cores) {
            let result = Simulation::run(machine, &operation, cores, batch_ns, seed)?;
            let value = result.ops_per_second * workload.depth as f64;
            let comparable = machine.threads_per_core == 1
                && machine.socket_of(cores - 1) == machine.socket_of(0);
            let measured = known.iter().find(|other| {
                comparable
                    && (other.variant, other.workload.name, other.threads)
                        == (variant, workload.name, cores)
            });
            predictions.push(prediction(
                (variant, workload.name),
                (cores as u32, cores.div_ceil(machine.cores / machine.sockets) as u32),
                cores * machine.threads_per_core,
                value,
                measured.map(|known| (known.iops, "measured here".to_owned())),
            ));
        }
    }
    Ok(predictions)
}

/// The published rows as predictions, those that are none marked as fitted.
///
/// # Errors
/// If the model refuses them.
pub fn published(seed: u64) -> Result<Vec<Prediction>, String> {
    let machine = published::machine();
    let rows = published::rows(seed)?.into_iter().map(|row| {
        let source = if row.fitted { "published; fitted to it" } else { "published" };
        prediction(
            (row.variant, row.workload),
            (machine.cores as u32, machine.sockets as u32),
            96,
            row.modelled,
            Some((row.published, source.to_owned())),
        )
    });
    Ok(rows.collect())
}

fn prediction(
    (variant, workload): (&str, &str),
    (cores, sockets): (u32, u32),
    jobs: usize,
    value: f64,
    known: Option<(f64, String)>,
) -> Prediction {
    Prediction {
        experiment: crate::experiments::zone_locks::NAME.to_owned(),
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
    fn one_core_is_what_was_measured_and_two_are_held_against_it() {
        let machine = Machine { cores: 4, ..Machine::default() };
        let known: Vec<Known> = VARIANTS
            .iter()
            .flat_map(|&(variant, _)| {
                let workload = WORKLOADS[0];
                [(1, 25e6), (2, 30e6)].map(|(threads, iops)| Known {
                    variant,
                    workload,
                    threads,
                    iops,
                })
            })
            .collect();
        let predictions = predict(&machine, &known, 1).unwrap();
        assert_eq!(predictions.len(), 3 * 3);
        for prediction in &predictions {
            match prediction.cores {
                1 => assert!(prediction.error.unwrap().abs() < 0.03, "{prediction:?}"),
                2 => assert_eq!(prediction.known, Some(30e6)),
                _ => assert_eq!(prediction.known, None),
            }
        }
        let none = Machine { cores: 0, ..machine };
        assert!(predict(&none, &known, 1).unwrap_err().contains("cores is 0"));
    }
}
