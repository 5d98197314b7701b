//! One measurement of one cell: its parameters and its result.

use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::error::LabError;
use crate::metric::Metric;
use crate::stop::Stop;

/// The interval at which a measurement that waits checks the stop flag.
const SLICE: Duration = Duration::from_millis(20);

/// The parameters of one measurement.
#[derive(Clone, Copy, Debug)]
pub struct Round<'a> {
    /// The time before the measured window.
    pub warm_up: Duration,
    /// The length of the measured window.
    pub duration: Duration,
    /// The round's number, from 0.
    pub number: u32,
    /// A seed that differs by cell and round; equal in the next run.
    pub seed: u64,
    /// Set by Ctrl-C; a measurement that sees it ends with [`crate::LabError::Interrupted`].
    pub stop: &'a Stop,
}

impl Round<'_> {
    /// Sleeps for `duration`, while other threads work.
    ///
    /// # Errors
    /// [`LabError::Interrupted`], soon after Ctrl-C.
    pub fn pause(&self, duration: Duration) -> Result<(), LabError> {
        let start = Instant::now();
        while start.elapsed() < duration {
            if self.stop.is_set() {
                return Err(LabError::Interrupted);
            }
            thread::sleep(SLICE.min(duration.saturating_sub(start.elapsed())));
        }
        Ok(())
    }
}

/// The result of one measurement.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// The values, in the order in which they are shown. Every throughput should have the CPU time
    /// per I/O with it.
    pub values: Vec<(Metric, f64)>,
    /// Latencies, if they were measured.
    pub latency: Option<LatencyPercentiles>,
    /// The counts of counting locks, if there were any.
    pub rooms: Vec<RoomCount>,
    /// The side that limited the throughput: `server`, `client`, `machine`.
    pub limit: Option<String>,
    /// Notes for the reader of the result.
    pub notes: Vec<String>,
}

impl Sample {
    /// A sample with one value.
    pub fn of(metric: Metric, value: f64) -> Sample {
        Sample { values: vec![(metric, value)], ..Sample::default() }
    }

    /// Adds a value.
    pub fn with(mut self, metric: Metric, value: f64) -> Sample {
        self.values.push((metric, value));
        self
    }
}

/// The percentiles at which latencies are kept. The least, the median and the greatest are always
/// kept; another one is kept if at least `BEYOND_MIN` samples lie beyond it, so that it is not
/// chance which sample is taken.
pub const PERCENTILES: [f64; 12] =
    [0.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9, 99.99, 99.999, 100.0];

/// The least number of samples beyond each of the [`PERCENTILES`].
const BEYOND_MIN: f64 = 10.0;

/// A latency distribution: pairs of percentile and nanoseconds, ascending in both.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LatencyPercentiles(pub Vec<(f64, f64)>);

impl LatencyPercentiles {
    /// The percentiles of a histogram of nanoseconds; `None` if it is empty.
    pub fn of(histogram: &Histogram<u64>) -> Option<LatencyPercentiles> {
        let at = |percentile| (percentile, histogram.value_at_percentile(percentile) as f64);
        let count = histogram.len() as f64;
        let is_known = |percentile: &f64| match *percentile {
            0.0 | 50.0 | 100.0 => true,
            // On both sides, because the fastest samples are as few as the slowest.
            p => count * p.min(100.0 - p) / 100.0 >= BEYOND_MIN - 1e-6,
        };
        let points = PERCENTILES.into_iter().filter(is_known).map(at).collect();
        (!histogram.is_empty()).then_some(LatencyPercentiles(points))
    }
}

/// The counts of one lock during one measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoomCount {
    /// The lock's name, and which of several it is: `zone_words`.
    pub room: String,
    /// How often it was taken.
    pub acquisitions: u64,
    /// How often another thread held it.
    pub contended: u64,
    /// How long it was held: median, 99th percentile, greatest.
    pub hold_ns: [f64; 3],
    /// How long threads waited for it that had to wait: median, 99th percentile, greatest.
    pub wait_ns: [f64; 3],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_histogram() {
        let mut histogram = Histogram::<u64>::new(3).unwrap();
        assert_eq!(LatencyPercentiles::of(&histogram), None);
        (1..=1000).for_each(|ns| histogram.record(ns).unwrap());
        let LatencyPercentiles(points) = LatencyPercentiles::of(&histogram).unwrap();
        assert_eq!(points[3], (50.0, 500.0));
        assert_eq!(points.last(), Some(&(100.0, 1000.0)));
        assert!(points.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1));
        // Ten of a thousand samples lie beyond the 99th percentile, one beyond the next.
        let kept: Vec<f64> = points.iter().map(|point| point.0).collect();
        assert_eq!(kept, [0.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 100.0]);
    }
}
