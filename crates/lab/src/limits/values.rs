//! Limits by name, from a run's results or measured now.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::LabError;
use crate::experiments::limits::{NAME, find_cell};
use crate::metric::Metric;
use crate::results::Results;
use crate::sample::Round;
use crate::stats::Summary;
use crate::stop::Stop;

/// The number of attempts at a measurement on a machine that is too busy.
const TRIES: u32 = 50;

/// The measured limits: medians by name, jobs and metric.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LimitValues(BTreeMap<(String, u32, String), f64>);

impl LimitValues {
    /// The limits in a run's results; empty if the run did not measure them.
    ///
    /// A figure becomes a fraction of a limit as follows:
    /// `LimitValues::of(&results).get(names::COPY_1G, 1, Metric::BANDWIDTH)`.
    pub fn of(results: &Results) -> LimitValues {
        let rows = results.rows.iter().filter(|row| row.experiment == NAME);
        LimitValues(
            rows.map(|row| ((row.variant.clone(), row.jobs, row.metric.clone()), row.median))
                .collect(),
        )
    }

    /// Measures these limits now, in turns.
    ///
    /// # Errors
    /// The first limit that cannot be measured.
    pub fn measure(
        wanted: &[(&str, u32)],
        rounds: u32,
        duration: Duration,
        stop: &Stop,
    ) -> Result<LimitValues, LabError> {
        let mut all: BTreeMap<(String, u32, String), Vec<f64>> = BTreeMap::new();
        for number in 0..rounds {
            for &(name, jobs) in wanted {
                let cell = find_cell(name, jobs)
                    .ok_or_else(|| missing(name, jobs, "see the names of the experiment limits"))?;
                let warm_up = duration / 5;
                let round = Round { warm_up, duration, number, seed: u64::from(number) + 1, stop };
                for (metric, value) in persist(|| (cell.body)(&round))?.values {
                    let key = (name.to_owned(), jobs, metric.name.to_owned());
                    all.entry(key).or_default().push(value);
                }
            }
        }
        let medians = all
            .into_iter()
            .filter_map(|(key, values)| Summary::of(&values).map(|summary| (key, summary.median)));
        Ok(LimitValues(medians.collect()))
    }

    /// The median of a limit.
    ///
    /// # Errors
    /// If the limit was not measured.
    pub fn get(&self, name: &str, jobs: u32, metric: Metric) -> Result<f64, LabError> {
        let key = (name.to_owned(), jobs, metric.name.to_owned());
        let value = self.0.get(&key).copied();
        value.ok_or_else(|| missing(name, jobs, "run `blockyard-lab run limits`"))
    }

    /// The limits with one value replaced.
    pub fn with(mut self, name: &str, jobs: u32, metric: Metric, value: f64) -> LimitValues {
        self.0.insert((name.to_owned(), jobs, metric.name.to_owned()), value);
        self
    }
}

/// Repeats a measurement that failed because the machine was too busy; the last failure if all
/// attempts fail.
///
/// # Errors
/// Missing prerequisites and interrupts, at once.
pub(crate) fn persist<T>(measure: impl Fn() -> Result<T, LabError>) -> Result<T, LabError> {
    let mut tries = 1;
    loop {
        match measure() {
            Err(LabError::Failed { .. }) if tries < TRIES => tries += 1,
            answer => return answer,
        }
    }
}

fn missing(name: &str, jobs: u32, how: &str) -> LabError {
    LabError::missing(format!("the limit {name} with {jobs} jobs"), how)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::limits::names;

    #[test]
    fn a_limit_is_found_by_name_jobs_and_metric() {
        let values = LimitValues::default().with(names::CLOCK, 1, Metric::NS_PER_OP, 21.5);
        assert_eq!(values.get(names::CLOCK, 1, Metric::NS_PER_OP).unwrap(), 21.5);
        let error = values.get(names::CLOCK, 2, Metric::NS_PER_OP).unwrap_err().to_string();
        assert!(error.contains("clock with 2 jobs"), "{error}");
        let stop = Stop::new();
        let none = LimitValues::measure(&[("speed", 1)], 1, Duration::from_millis(1), &stop);
        assert!(none.unwrap_err().to_string().contains("speed"));
    }
}
