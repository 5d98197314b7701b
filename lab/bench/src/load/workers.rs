//! Workers: threads that each repeat a turn of their own work until the window is over.
//!
//! They serve loads that are no batches of a [`super::Pattern`]: threads that share one stream, or
//! that keep reads and writes in flight together. Each thread counts its own I/Os; those before the
//! window are discarded.
#![allow(clippy::disallowed_types)] // The phase is the lab's own, shared by design.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::LabError;
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::tools::cpu::of_thread;

/// The window has not begun.
const BEFORE: u8 = 0;
/// The window: I/Os count.
const WITHIN: u8 = 1;
/// The threads are to end.
const AFTER: u8 = 2;

/// How long a window waits beyond its end for each thread to have had a turn in it.
const TURN_MAX: Duration = Duration::from_secs(30);
/// The interval at which the measuring thread checks that.
const LOOK: Duration = Duration::from_millis(5);

/// The state that the threads share with the measuring thread.
#[derive(Debug)]
struct Shared {
    phase: AtomicU8,
    /// The number of threads that have completed a turn in the window, or failed.
    turned: AtomicUsize,
}

/// The work of one thread.
pub trait Work: Send {
    /// One turn. Returns the number of I/Os that ended in it.
    ///
    /// # Errors
    /// If an I/O failed; the thread ends with that error.
    fn turn(&mut self) -> Result<u64, LabError>;

    /// The window begins: measurements from before are discarded.
    fn begin(&mut self) {}

    /// The window is over. Called on the thread that ran the turns.
    fn end(&mut self) {}
}

/// The results of the workers in the window.
#[derive(Debug)]
pub struct WorkersResult<W, T> {
    /// The workers, with the measurements that each has kept.
    pub workers: Vec<W>,
    /// The number of I/Os that ended.
    pub ios: u64,
    /// The CPU time of the threads.
    pub cpu: Duration,
    /// The length of the window.
    pub wall: Duration,
    /// The gauge at the start and at the end of the window.
    pub gauge: (T, T),
}

impl<W, T> WorkersResult<W, T> {
    /// I/Os per second and CPU time per I/O.
    ///
    /// # Errors
    /// If no I/O ended in the window.
    pub fn sample(&self, name: &str) -> Result<Sample, LabError> {
        if self.ios == 0 {
            return Err(LabError::failed(name, "no I/O ended in the measured window"));
        }
        let ios = self.ios as f64;
        Ok(Sample::of(Metric::IOPS, ios / self.wall.as_secs_f64())
            .with(Metric::CPU_PER_IO, self.cpu.as_nanos() as f64 / ios))
    }
}

/// Runs each work on a thread of its own. Reads `gauge` at the start and at the end of the window.
///
/// # Errors
/// If an I/O fails, or the run is to stop.
pub fn run<W: Work, T>(
    works: Vec<W>,
    round: &Round<'_>,
    gauge: impl Fn() -> T,
) -> Result<WorkersResult<W, T>, LabError> {
    let shared = Shared { phase: AtomicU8::new(BEFORE), turned: AtomicUsize::new(0) };
    let start = Barrier::new(works.len() + 1);
    thread::scope(|scope| {
        let (shared, start) = (&shared, &start);
        let count = works.len();
        let threads: Vec<_> = works
            .into_iter()
            .map(|work| {
                scope.spawn(move || {
                    start.wait();
                    member(work, shared)
                })
            })
            .collect();
        start.wait();
        let window = measure(shared, count, round, gauge);
        // Relaxed: the phase publishes no data.
        shared.phase.store(AFTER, Ordering::Relaxed);
        let (mut workers, mut ios, mut cpu) = (Vec::new(), 0, Duration::ZERO);
        let mut failed = None;
        for thread in threads {
            match thread.join().expect("a member returns its errors") {
                Ok((work, did, took)) => {
                    workers.push(work);
                    ios += did;
                    cpu += took;
                }
                Err(error) => failed = Some(error),
            }
        }
        let (wall, gauge) = window?;
        match failed {
            None => Ok(WorkersResult { workers, ios, cpu, wall, gauge }),
            Some(error) => Err(error),
        }
    })
}

/// Waits for the window to pass; if some thread had no turn in it, also for that turn.
fn measure<T>(
    shared: &Shared,
    count: usize,
    round: &Round<'_>,
    gauge: impl Fn() -> T,
) -> Result<(Duration, (T, T)), LabError> {
    round.pause(round.warm_up)?;
    shared.phase.store(WITHIN, Ordering::Relaxed);
    let (since, before) = (Instant::now(), gauge());
    round.pause(round.duration)?;
    while shared.turned.load(Ordering::Relaxed) < count
        && since.elapsed() < round.duration + TURN_MAX
    {
        round.pause(LOOK)?;
    }
    Ok((since.elapsed(), (before, gauge())))
}

/// Runs one thread. Returns its work, the I/Os of the window, and their CPU time.
fn member<W: Work>(mut work: W, shared: &Shared) -> Result<(W, u64, Duration), LabError> {
    let (mut within, mut turned, mut ios, mut since) = (false, false, 0, Duration::ZERO);
    loop {
        match shared.phase.load(Ordering::Relaxed) {
            AFTER => break,
            WITHIN if !within => {
                within = true;
                (ios, since) = (0, of_thread());
                work.begin();
            }
            _ => {}
        }
        let did = work.turn().inspect_err(|_| {
            shared.turned.fetch_add(usize::from(!turned), Ordering::Relaxed);
        })?;
        ios += did;
        if within && !turned && did > 0 {
            turned = true;
            shared.turned.fetch_add(1, Ordering::Relaxed);
        }
    }
    let cpu = if within { of_thread() - since } else { Duration::ZERO };
    work.end();
    Ok((work, if within { ios } else { 0 }, cpu))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop::Stop;

    #[derive(Debug)]
    struct Count {
        turns: u64,
        fails: bool,
    }

    impl Work for Count {
        fn turn(&mut self) -> Result<u64, LabError> {
            if self.fails {
                return Err(LabError::failed("a turn", "it was to fail"));
            }
            self.turns += 1;
            Ok(2)
        }

        fn begin(&mut self) {
            self.turns = 0;
        }
    }

    fn workers(fails: bool) -> Result<WorkersResult<Count, u64>, LabError> {
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::from_millis(1), Duration::from_millis(20));
        let round = Round { warm_up, duration, number: 0, seed: 1, stop: &stop };
        let works = (0..3).map(|number| Count { turns: 0, fails: fails && number == 1 });
        run(works.collect(), &round, || 7)
    }

    #[test]
    fn only_the_window_counts() {
        let outcome = workers(false).unwrap();
        assert!(outcome.wall >= Duration::from_millis(20) && outcome.cpu > Duration::ZERO);
        assert_eq!(outcome.ios, 2 * outcome.workers.iter().map(|work| work.turns).sum::<u64>());
        assert_eq!(outcome.gauge, (7, 7));
        assert_eq!(outcome.sample("workers").unwrap().values[0].0, Metric::IOPS);
    }

    #[test]
    fn one_failure_ends_the_run() {
        assert_eq!(workers(true).unwrap_err().to_string(), "a turn: it was to fail");
    }
}
