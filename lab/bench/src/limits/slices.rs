//! Time in slices, of which only those count in which no other process had the processor.
//!
//! A limit is the best that the machine can do. On a machine with other load, an average over a
//! second mostly shows that load. So a measurement is cut into slices of about a millisecond, each
//! with the wall time and CPU time of its threads. A slice in which a computing thread was off its
//! processor is discarded, and the median of the rest is the result.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use crate::error::LabError;
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::stats::Summary;

/// Least length of a slice.
pub const SLICE_LENGTH: Duration = Duration::from_micros(500);
/// Least length of a batch between two readings of the clock, so that their cost is negligible.
const BATCH: Duration = Duration::from_micros(20);
/// The number of attempts to time a number of operations.
const TRIES: u32 = 3;
/// A computing thread is undisturbed if it got this share of the time.
const UNDISTURBED: f64 = 0.97;
/// With fewer undisturbed slices than this there is no result.
const SLICES_MIN: usize = 3;
/// A measurement without enough undisturbed slices goes on for up to this multiple of its duration.
const PATIENCE: u32 = 8;

/// The number of operations of a thread between two turns of another thread.
pub const OPS_PER_TURN: Metric = Metric::more("ops_per_turn", "");

/// One slice of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    /// The wall time of the slice.
    pub wall_ns: f64,
    /// The CPU time of the thread that got the least.
    pub cpu_ns: f64,
    /// The operations of all threads.
    pub ops: u64,
    /// The number of times the turn changed from one thread to the other.
    pub turns: u64,
}

impl Slice {
    /// Whether all threads had their processors to themselves.
    fn is_undisturbed(&self) -> bool {
        self.cpu_ns >= UNDISTURBED * self.wall_ns
    }
}

/// The result of a limit's measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LimitReading {
    /// The wall time per operation of all threads together.
    pub ns_per_op: f64,
    /// The bytes that an operation moves; 0 if it moves no data.
    pub bytes_per_op: f64,
    /// Operations per turn, where threads took turns.
    pub ops_per_turn: Option<f64>,
}

impl LimitReading {
    /// The reading of an operation that takes this long.
    pub fn of(ns_per_op: f64) -> LimitReading {
        LimitReading { ns_per_op, bytes_per_op: 0.0, ops_per_turn: None }
    }

    /// The reading as a sample of the experiment.
    pub fn sample(&self) -> Sample {
        let mut sample = Sample::of(Metric::NS_PER_OP, self.ns_per_op);
        if self.bytes_per_op > 0.0 {
            sample = sample.with(Metric::BANDWIDTH, self.bytes_per_op / self.ns_per_op * 1e9);
        }
        if let Some(ops) = self.ops_per_turn {
            sample = sample.with(OPS_PER_TURN, ops);
        }
        sample
    }
}

/// The duration of a measurement, and the signal that may end it.
#[derive(Clone, Copy, Debug)]
pub struct SliceSpan<'a> {
    round: &'a Round<'a>,
    started: Instant,
}

impl<'a> SliceSpan<'a> {
    /// A span that begins now.
    pub fn begin(round: &'a Round<'a>) -> SliceSpan<'a> {
        SliceSpan { round, started: Instant::now() }
    }

    /// Whether the warm-up is over.
    pub fn counts(&self) -> bool {
        self.started.elapsed() >= self.round.warm_up
    }

    /// Whether the time is over.
    pub fn is_over(&self) -> bool {
        self.started.elapsed() >= self.round.warm_up + self.round.duration
            || self.round.stop.is_set()
    }

    /// Whether the time is over and there are enough undisturbed slices, or the extended time is
    /// over.
    pub fn is_over_with(&self, slices: &[Slice]) -> bool {
        let Round { warm_up, duration, .. } = *self.round;
        let enough = || slices.iter().filter(|slice| slice.is_undisturbed()).count() >= SLICES_MIN;
        self.is_over()
            && (self.round.stop.is_set()
                || enough()
                || self.started.elapsed() >= warm_up + duration * PATIENCE)
    }

    /// The measurement's random seed.
    pub fn seed(&self) -> u64 {
        self.round.seed
    }

    /// Fails if Ctrl-C ended the measurement.
    ///
    /// # Errors
    /// [`LabError::Interrupted`].
    pub fn check(&self) -> Result<(), LabError> {
        if self.round.stop.is_set() { Err(LabError::Interrupted) } else { Ok(()) }
    }
}

/// The CPU time that the calling thread has used.
pub fn thread_cpu_ns() -> f64 {
    clock_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// The time of a clock of the system.
pub fn clock_ns(clock: libc::clockid_t) -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid pointer for the result, and nothing else is written.
    let answer = unsafe { libc::clock_gettime(clock, &raw mut time) };
    // A thread that has ended has no clock, and no time passes for it.
    if answer == 0 { time.tv_sec as f64 * 1e9 + time.tv_nsec as f64 } else { 0.0 }
}

/// The number of operations of a batch that is long enough for the cost of the clock not to matter.
pub(super) fn batch_of(mut run: impl FnMut(u32)) -> u32 {
    let mut ops = 1;
    loop {
        // The least of several attempts: one in which the thread was preempted shows nothing.
        let least = (0..TRIES).map(|_| {
            let started = Instant::now();
            run(ops);
            started.elapsed()
        });
        if least.min().is_some_and(|least| least >= BATCH) || ops >= 1 << 20 {
            return ops;
        }
        ops *= 2;
    }
}

/// Measures one thread alone. `run` does the requested number of operations.
///
/// # Errors
/// If it is interrupted, or never had a processor to itself.
pub fn alone(round: &Round<'_>, mut run: impl FnMut(u32)) -> Result<LimitReading, LabError> {
    let span = SliceSpan::begin(round);
    let batch = batch_of(&mut run);
    let mut slices = Vec::new();
    while !span.is_over_with(&slices) {
        let counts = span.counts();
        let (started, cpu) = (Instant::now(), thread_cpu_ns());
        let mut ops = 0;
        while started.elapsed() < SLICE_LENGTH {
            run(batch);
            ops += u64::from(batch);
        }
        let cpu_ns = thread_cpu_ns() - cpu;
        let wall_ns = started.elapsed().as_nanos() as f64;
        if counts {
            slices.push(Slice { wall_ns, cpu_ns, ops, turns: 0 });
        }
    }
    span.check()?;
    undisturbed(&slices)
}

/// The median of the slices in which all threads had their processors.
///
/// # Errors
/// If there are too few of them.
pub fn undisturbed(slices: &[Slice]) -> Result<LimitReading, LabError> {
    let kept: Vec<Slice> = slices.iter().filter(|slice| slice.is_undisturbed()).copied().collect();
    if kept.len() < SLICES_MIN {
        let why = format!(
            "only {} of {} slices had the processors to themselves; the machine is too busy: stop \
             other programs, or use a longer --seconds",
            kept.len(),
            slices.len(),
        );
        return Err(LabError::failed("measurement", why));
    }
    Ok(LimitReading { ns_per_op: quantile(&kept, 0.5), ..turns_of(&kept) })
}

/// The lower quartile of the slices, for operations that sleep. CPU time does not show there
/// whether other load disturbed a slice, but any disturbance made the slice slower.
///
/// # Errors
/// If there are too few slices.
pub fn quicker(slices: &[Slice]) -> Result<LimitReading, LabError> {
    if slices.len() < SLICES_MIN {
        let why = format!("only {} slices; try a longer --seconds", slices.len());
        return Err(LabError::failed("measurement", why));
    }
    Ok(LimitReading { ns_per_op: quantile(slices, 0.25), ..turns_of(slices) })
}

/// A quantile of the time per operation. There is at least one slice.
fn quantile(slices: &[Slice], q: f64) -> f64 {
    let mut values: Vec<f64> =
        slices.iter().map(|slice| slice.wall_ns / slice.ops.max(1) as f64).collect();
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * q).round() as usize]
}

/// Operations per turn, the median of the slices; `None` if no turns were taken. The sum over all
/// slices would be wrong: while one thread is preempted for a hundredth of the time, the other does
/// more operations in that one turn than in many others.
fn turns_of(slices: &[Slice]) -> LimitReading {
    let turned = slices.iter().filter(|slice| slice.turns > 0);
    let values: Vec<f64> = turned.map(|slice| slice.ops as f64 / slice.turns as f64).collect();
    let ops_per_turn = Summary::of(&values).map(|summary| summary.median);
    LimitReading { ops_per_turn, ..LimitReading::of(0.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(wall_ns: f64, cpu_ns: f64, ops: u64) -> Slice {
        Slice { wall_ns, cpu_ns, ops, turns: ops / 4 }
    }

    #[test]
    fn disturbed_slices_are_left_out() {
        let slices = [
            slice(1000.0, 1000.0, 100),
            slice(1000.0, 400.0, 40),
            slice(1100.0, 1099.0, 100),
            slice(1200.0, 1190.0, 100),
        ];
        let reading = undisturbed(&slices).unwrap();
        assert_eq!((reading.ns_per_op, reading.ops_per_turn), (11.0, Some(4.0)));
        let error = undisturbed(&slices[..3]).unwrap_err().to_string();
        assert!(error.contains("only 2 of 3 slices"), "{error}");
    }

    #[test]
    fn sleepers_are_read_at_the_lower_quartile() {
        let slices: Vec<_> = (1..=5).map(|n| slice(f64::from(n) * 100.0, 0.0, 10)).collect();
        assert_eq!(quicker(&slices).unwrap().ns_per_op, 20.0);
        assert!(quicker(&slices[..2]).is_err());
    }
}
