//! The in-process load generator: threads that push, submit and reap as fast as they can.
//!
//! Each thread has a channel of its own and keeps `depth` I/Os in flight, in batches of that size.
//! After the warm-up the measuring thread reads the counters and CPU clocks of all load threads at
//! the start and at the end of the window. The load threads read a shared word once per batch, and
//! time every 64th batch. No thread allocates in the window.
//!
//! Where there is a processor for each thread, the window is also cut into slices
//! ([`crate::limits::slices`]). The slices in which all threads had a processor show how the
//! threads share the device, even on a machine with other load. The first load thread takes the
//! slices.
#![allow(clippy::disallowed_types)] // The phase is the lab's own, shared by design.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use blockyard_core::channel::Channel;
use blockyard_core::{Completion, Disk, Region, RegionId, Status};
use blockyard_sync::counter::Counter;
use blockyard_sync::pad::Padded;
use hdrhistogram::Histogram;

use crate::counted::{self, Counts};
use crate::error::LabError;
use crate::limits::slices::{SLICE_LENGTH, Slice, clock_ns, undisturbed};
use crate::metric::Metric;
use crate::sample::{LatencyPercentiles, Round, Sample};

pub mod durable;
pub mod mixed;
mod pattern;
pub mod records;
pub mod streams;
pub mod workers;

use pattern::Stream;
pub use pattern::{BLOCK_BYTES, Pattern};

/// One batch in this many is timed.
const TIMED: u64 = 64;
/// The greatest latency that the histogram distinguishes, in nanoseconds: ten seconds.
const LATENCY_MAX_NS: u64 = 10_000_000_000;
/// A load that gets less than this part of the processors that it could use is starved.
const GIVEN: f64 = 0.9;
/// The note for the reader of a starved result.
const STARVED: &str = "where the limit is `machine`, the threads had less than 9 tenths of the \
                       processors that they could have used, because other work ran there (see \
                       the column of processors kept busy): threads that do not run at the same \
                       moment do not wait for one another, so a coarse lock costs less there than \
                       on a quiet machine";
/// How long a measurement waits at most for each thread to have a turn.
const TURN_MAX: Duration = Duration::from_secs(30);
/// I/Os per second in slices in which every thread had a processor; the median of them.
pub const UNDISTURBED_IOPS: Metric = Metric::more("undisturbed_iops", "1/s");
/// If a thread's CPU time exceeds the slice by more than this factor, the clocks were read at
/// different moments.
const SAME_MOMENT: f64 = 1.05;
/// The most slices of a measurement.
const SLICES_MAX: usize = 1 << 16;
/// The interval at which a measurement checks whether each thread has had a turn.
const LOOK: Duration = Duration::from_millis(50);

/// The parameters of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// The access pattern.
    pub pattern: Pattern,
    /// The number of threads, each with a channel.
    pub threads: usize,
    /// The number of I/Os of a batch; a thread has one batch in flight.
    pub depth: usize,
}

/// The result of a measurement.
#[derive(Debug)]
pub struct LoadResult {
    /// Threads that ran.
    pub threads: usize,
    /// I/Os completed in the window.
    pub ios: u64,
    /// Length of the window.
    pub wall: Duration,
    /// CPU time of all threads in the window.
    pub cpu: Duration,
    /// The times from push to reap of the timed batches, in nanoseconds.
    pub latency: Histogram<u64>,
    /// The counts of the counting locks, if there were any.
    pub counts: Counts,
    /// The slices of the window, if each thread could have a processor.
    pub slices: Vec<Slice>,
}

impl LoadResult {
    /// I/Os per second and CPU time per I/O, with latencies; and whether the threads had the
    /// processors that they could have used.
    pub fn sample(&self, processors: usize) -> Sample {
        let cpu_per_io = self.cpu.as_nanos() as f64 / self.ios as f64;
        let starved = is_starved(self.threads, processors, self.cpu, self.wall);
        let mut sample = Sample {
            latency: LatencyPercentiles::of(&self.latency),
            rooms: self.counts.rooms(),
            limit: starved.then(|| "machine".to_owned()),
            notes: if starved { vec![STARVED.to_owned()] } else { Vec::new() },
            ..Sample::of(Metric::IOPS, self.ios as f64 / self.wall.as_secs_f64())
                .with(Metric::CPU_PER_IO, cpu_per_io)
                .with(Metric::CPUS, self.cpu.as_secs_f64() / self.wall.as_secs_f64())
        };
        // With too few slices there is no reading, and the value is left out.
        if let Ok(reading) = undisturbed(&self.slices) {
            sample = sample.with(UNDISTURBED_IOPS, 1e9 / reading.ns_per_op);
        }
        sample
    }
}

/// Whether threads that never waited had less processor time than they could have used.
fn is_starved(threads: usize, processors: usize, cpu: Duration, wall: Duration) -> bool {
    let usable = threads.min(processors) as f64 * wall.as_secs_f64();
    cpu.as_secs_f64() < GIVEN * usable
}

/// The phase of a measurement.
#[repr(u8)]
#[derive(Clone, Copy)]
enum LoadPhase {
    /// Wait, parked, for the other threads.
    Wait,
    WarmUp,
    Measure,
    Stop,
}

/// The state that all threads share: the phase, which only the measuring thread sets.
struct Shared(Padded<AtomicU8>);

impl Shared {
    fn set(&self, phase: LoadPhase) {
        // Release: pairs with the Acquire in `is`.
        self.0.store(phase as u8, Ordering::Release);
    }

    #[inline]
    fn is(&self, phase: LoadPhase) -> bool {
        // Acquire: pairs with the Release in `set`.
        self.0.load(Ordering::Acquire) == phase as u8
    }
}

/// The counters that a thread publishes while it runs.
#[derive(Default)]
struct ThreadCounters {
    ios: Counter,
    /// The id of the thread's CPU clock.
    clock: Counter,
    /// Nonzero once the thread has done a batch in the window, or has failed.
    measured: Counter,
}

/// Runs a load on a disk.
///
/// # Errors
/// If the disk has too few zones for the pattern, a channel or a thread cannot be had, an I/O
/// fails, or the run is to stop.
pub fn run(disk: &dyn Disk, load: &Load, round: &Round<'_>) -> Result<LoadResult, LabError> {
    let shared = Shared(Padded(AtomicU8::new(LoadPhase::Wait as u8)));
    let progress: Vec<Padded<ThreadCounters>> =
        (0..load.threads).map(|_| Padded::default()).collect();
    let mut workers = Vec::with_capacity(load.threads);
    for number in 0..load.threads {
        workers.push(Worker::open(disk, load, number, round.seed)?);
    }
    let name = || format!("{:?} on {}", load.pattern, disk.name());
    thread::scope(|scope| {
        let mut threads = Vec::with_capacity(load.threads);
        let window = start(scope, workers, &shared, &progress, &mut threads)
            .map_err(LabError::io(format!("starting {} threads", load.threads)))
            .and_then(|()| measure(&shared, &progress, round));
        shared.set(LoadPhase::Stop);
        let (mut latency, mut counts, mut failed) = (latencies(), Counts::default(), None);
        let mut slices = Vec::new();
        for thread in threads {
            // Where not all threads could be started, the others still wait for the first phase.
            thread.thread().unpark();
            match thread.join().expect("a load thread returns its errors") {
                Ok(work) => {
                    latency.add(work.latency).expect("both have the same range");
                    counts.add(&work.counts);
                    slices.extend(work.slices);
                }
                Err(status) => failed = Some(status),
            }
        }
        let (from, to) = window?;
        if let Some(status) = failed {
            return Err(LabError::failed(name(), status));
        }
        if to.ios == from.ios {
            return Err(LabError::failed(name(), "no I/O ended in the measured window"));
        }
        let (ios, wall, cpu) = (to.ios - from.ios, to.at - from.at, to.cpu - from.cpu);
        Ok(LoadResult { threads: load.threads, ios, wall, cpu, latency, counts, slices })
    })
}

/// Starts the threads, and lets them warm up once all are there.
fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    workers: Vec<Worker>,
    shared: &'scope Shared,
    progress: &'scope [Padded<ThreadCounters>],
    threads: &mut Vec<ScopedJoinHandle<'scope, Result<ThreadResult, Status>>>,
) -> io::Result<()> {
    let (ready, all) = channel();
    let all_progress = progress;
    for (worker, progress) in workers.into_iter().zip(progress) {
        let name = format!("load-{}", worker.number);
        let ready = ready.clone();
        let slicer = (worker.number == 0).then(|| Slicer::new(all_progress));
        let run = move || worker.run(shared, progress, slicer, &ready);
        threads.push(thread::Builder::new().name(name).spawn_scoped(scope, run)?);
    }
    for _ in 0..threads.len() {
        all.recv().expect("this function has a sender itself");
    }
    shared.set(LoadPhase::WarmUp);
    threads.iter().for_each(|thread| thread.thread().unpark());
    Ok(())
}

pub(crate) fn latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LATENCY_MAX_NS, 2).expect("the bounds are in order")
}

/// The sums over all threads at one moment.
struct Moment {
    at: Instant,
    ios: u64,
    cpu: Duration,
}

impl Moment {
    fn now(progress: &[Padded<ThreadCounters>]) -> Moment {
        let ios = progress.iter().map(|progress| progress.ios.get()).sum();
        let at = Instant::now();
        let cpu = progress.iter().map(|progress| cpu_time(progress.clock.get() as i32)).sum();
        Moment { at, ios, cpu }
    }
}

/// Waits for the window to pass, and returns the counters at its start and end. On a machine that
/// gives some thread no turn in so short a time, the window lasts until each has had one.
fn measure(
    shared: &Shared,
    progress: &[Padded<ThreadCounters>],
    round: &Round<'_>,
) -> Result<(Moment, Moment), LabError> {
    round.pause(round.warm_up)?;
    shared.set(LoadPhase::Measure);
    let from = Moment::now(progress);
    round.pause(round.duration)?;
    let measured = |progress: &Padded<ThreadCounters>| progress.measured.get() > 0;
    while !progress.iter().any(measured) && from.at.elapsed() < TURN_MAX {
        round.pause(LOOK)?;
    }
    Ok((from, Moment::now(progress)))
}

/// The id of the clock of this thread's CPU time, for other threads to read.
fn own_clock() -> i32 {
    let mut clock = 0;
    // SAFETY: the thread asks for itself, so it exists; the pointer is that of a local.
    let answer = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) };
    assert_eq!(answer, 0, "a running thread has a clock");
    clock
}

/// The time of a running thread's clock.
fn cpu_time(clock: i32) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is that of a local timespec.
    let answer = unsafe { libc::clock_gettime(clock, &raw mut time) };
    assert_eq!(answer, 0, "the clock of a load thread exists until the thread stops");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Cuts the window into slices, from one of the threads.
struct Slicer<'a> {
    progress: &'a [Padded<ThreadCounters>],
    slices: Vec<Slice>,
    started: Instant,
    ios: u64,
    /// CPU times of all threads when the slice began.
    cpu_ns: Vec<f64>,
}

impl<'a> Slicer<'a> {
    /// With more threads than processors no slice can be undisturbed, and none is taken.
    fn new(progress: &'a [Padded<ThreadCounters>]) -> Slicer<'a> {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let can_all_run = progress.len() <= processors;
        let slices = Vec::with_capacity(if can_all_run { SLICES_MAX } else { 0 });
        let cpu_ns = vec![0.0; progress.len()];
        Slicer { progress, slices, started: Instant::now(), ios: 0, cpu_ns }
    }

    /// Ends the slice if it is long enough. The first slice contains the warm-up.
    fn look(&mut self) {
        if self.started.elapsed() < SLICE_LENGTH || self.slices.len() == self.slices.capacity() {
            return;
        }
        let (mut least_ns, mut most_ns) = (f64::MAX, 0.0_f64);
        for (progress, before) in self.progress.iter().zip(&mut self.cpu_ns) {
            // For a thread that has ended this is 0, and the slice is discarded.
            let now = clock_ns(progress.clock.get() as i32);
            (least_ns, most_ns) = (least_ns.min(now - *before), most_ns.max(now - *before));
            *before = now;
        }
        let ios = self.progress.iter().map(|progress| progress.ios.get()).sum();
        let now = Instant::now();
        let wall_ns = (now - self.started).as_nanos() as f64;
        // Reading a clock is a system call, after which this thread is often preempted. The clocks
        // are then of different moments, and a later one shows more time than the slice.
        let cpu_ns = if most_ns <= SAME_MOMENT * wall_ns { least_ns } else { 0.0 };
        self.slices.push(Slice { wall_ns, cpu_ns, ops: ios - self.ios, turns: 0 });
        (self.started, self.ios) = (now, ios);
    }
}

/// One load thread.
pub struct Worker {
    number: usize,
    channel: Box<dyn Channel>,
    stream: Stream,
    out: Vec<Completion>,
    latency: Histogram<u64>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("number", &self.number).finish_non_exhaustive()
    }
}

/// The results of a thread.
struct ThreadResult {
    latency: Histogram<u64>,
    counts: Counts,
    slices: Vec<Slice>,
}

impl Worker {
    /// Opens thread `number` of a load.
    ///
    /// # Errors
    /// If the disk has too few zones for the load, or opens no channel.
    pub fn open(
        disk: &dyn Disk,
        load: &Load,
        number: usize,
        seed: u64,
    ) -> Result<Worker, LabError> {
        load.pattern.check(disk, load.threads)?;
        let channel = disk.open();
        let mut channel =
            channel.map_err(|error| LabError::failed(format!("opening {}", disk.name()), error))?;
        let region = Region::alloc(load.depth * BLOCK_BYTES as usize);
        let region: RegionId = channel.register(region);
        let seed = seed ^ (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Ok(Worker {
            number,
            channel,
            stream: Stream::new(disk, load, number, region, seed),
            out: Vec::with_capacity(load.depth),
            latency: latencies(),
        })
    }

    /// Runs until the phase says stop, or an I/O fails.
    fn run(
        mut self,
        shared: &Shared,
        progress: &ThreadCounters,
        mut slicer: Option<Slicer<'_>>,
        ready: &Sender<()>,
    ) -> Result<ThreadResult, Status> {
        progress.clock.add(own_clock() as u64);
        counted::begin();
        // The receiver is gone if another thread could not be started.
        let _ = ready.send(());
        while shared.is(LoadPhase::Wait) {
            thread::park();
        }
        let (mut measuring, mut told, mut batches, mut failed) = (false, false, 0_u64, None);
        loop {
            if shared.is(LoadPhase::Stop) {
                break;
            }
            if !measuring && shared.is(LoadPhase::Measure) {
                measuring = true;
                counted::begin();
            }
            if failed.is_some() {
                // The other threads must be able to read this thread's clock until the end.
                thread::yield_now();
                continue;
            }
            batches += 1;
            let since = (measuring && batches.is_multiple_of(TIMED)).then(Instant::now);
            match self.batch() {
                Ok(ios) => {
                    progress.ios.add(ios);
                    if measuring && !told {
                        told = true;
                        progress.measured.add(1);
                    }
                }
                Err(status) => {
                    failed = Some(status);
                    progress.measured.add(1);
                }
            }
            if let Some(since) = since {
                self.latency.saturating_record(since.elapsed().as_nanos() as u64);
                if let Some(slicer) = &mut slicer {
                    slicer.look();
                }
            }
        }
        let counts = counted::end();
        match failed {
            None => {
                let slices = slicer.map_or_else(Vec::new, |slicer| slicer.slices);
                Ok(ThreadResult { latency: self.latency, counts, slices })
            }
            Some(status) => Err(status),
        }
    }

    /// Runs one batch. Returns the time of push and submit, in which a device that executes inline
    /// does the I/Os.
    ///
    /// # Errors
    /// The status of an I/O that failed.
    pub fn timed_batch(&mut self) -> Result<Duration, Status> {
        let bios = self.stream.fill();
        self.out.clear();
        let started = Instant::now();
        let mut pushed = self.channel.push(bios);
        self.channel.submit();
        let took = started.elapsed();
        while self.out.len() < bios.len() {
            if self.channel.reap(&mut self.out) == 0 {
                self.channel.wait(None);
            }
            if pushed < bios.len() {
                pushed += self.channel.push(&bios[pushed..]);
                self.channel.submit();
            }
        }
        self.stream.settle(&self.out)?;
        Ok(took)
    }

    /// Runs one batch from push to reap. Returns the number of completed I/Os.
    ///
    /// # Errors
    /// The status of an I/O that failed.
    pub fn batch(&mut self) -> Result<u64, Status> {
        let bios = self.stream.fill();
        let mut pushed = 0;
        self.out.clear();
        while self.out.len() < bios.len() {
            if pushed < bios.len() {
                pushed += self.channel.push(&bios[pushed..]);
                self.channel.submit();
            }
            if self.channel.reap(&mut self.out) == 0 {
                self.channel.wait(None);
            }
        }
        self.stream.settle(&self.out)
    }
}

#[cfg(test)]
mod tests;
