//! Records of a file per thread, as iozone reads and writes them: one thread, one part of the disk,
//! one record at a time, in some order.
//!
//! The data written come from the [`crate::corpus`], which is a channel's registered memory, so
//! that making the data costs nothing. Reads go to a buffer of one record.

use std::fmt;
use std::sync::Arc;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use blockyard_core::channel::Channel;
use blockyard_core::{
    Bio, BufRef, Completion, Disk, Op, Region, RegionId, SECTOR_BYTES, Sector, Status,
};
use fastrand::Rng;
use hdrhistogram::Histogram;

use super::workers::Work;
use super::{STARVED, is_starved, latencies};
use crate::corpus::{CORPUS_BYTES, corpus};
use crate::counted::{self, Counts};
use crate::error::LabError;
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::tools::cpu::of_thread;

/// iozone's stride, in records.
const STRIDE: u64 = 17;
/// The number of records of a pass after which the thread checks whether to stop.
const LOOK: u64 = 256;

/// The operation on a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Does {
    /// It is read.
    Read,
    /// It is written.
    Write,
    /// A read or a write, at random with equal probability.
    Either,
}

/// The order of the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Ascending.
    Forward,
    /// Descending.
    Backward,
    /// Every 17th, and after the end again from the next record on.
    Strided,
    /// Random.
    Random,
}

/// The interface through which a record is transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Push, submit and reap.
    Push,
    /// Executed inline at an offset that the call names: `pread`, `pwrite`.
    Carry,
}

/// The task of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// The operation on each record.
    pub does: Does,
    /// The order of the records.
    pub order: Order,
    /// The interface.
    pub way: Way,
    /// Length of a record in bytes.
    pub record_bytes: u64,
}

/// A part of a disk: where it begins, and how long it is, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The first byte.
    pub from: u64,
    /// The length in bytes.
    pub len_bytes: u64,
}

/// A thread with its part of a disk.
pub struct Records {
    channel: Box<dyn Channel>,
    source: RegionId,
    buffer: RegionId,
    task: Task,
    part: Part,
    /// The number of records of the part, and of the corpus.
    records: u64,
    sources: u64,
    /// The next record of the order, and the offset into the corpus for this pass.
    next: u64,
    shift: u64,
    rng: Rng,
    out: Vec<Completion>,
    /// Times from push to reap, if they are measured.
    latency: Option<Histogram<u64>>,
    /// The counts of the counting locks for this thread.
    counts: Counts,
}

impl fmt::Debug for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Records").field("task", &self.task).field("part", &self.part).finish()
    }
}

impl Records {
    /// A thread with a channel of its own.
    ///
    /// # Errors
    /// If the disk opens no channel, or there is no corpus.
    ///
    /// # Panics
    /// If the part has no record.
    pub fn open(disk: &dyn Disk, task: Task, part: Part, seed: u64) -> Result<Records, LabError> {
        Records::open_with(corpus()?, disk, task, part, seed)
    }

    /// A thread with a channel of its own that writes `bytes` instead of the corpus. They are as
    /// many.
    ///
    /// # Errors
    /// If the disk opens no channel.
    ///
    /// # Panics
    /// As [`Records::open`].
    pub fn open_with(
        bytes: &Arc<Region>,
        disk: &dyn Disk,
        task: Task,
        part: Part,
        seed: u64,
    ) -> Result<Records, LabError> {
        let channel = disk.open();
        let mut channel =
            channel.map_err(|error| LabError::failed(format!("opening {}", disk.name()), error))?;
        let records = part.len_bytes / task.record_bytes;
        assert!(records > 0, "{part:?} has no record of {task:?}");
        Ok(Records {
            source: channel.register(Arc::clone(bytes)),
            buffer: channel.register(Region::alloc(task.record_bytes as usize)),
            channel,
            task,
            part,
            records,
            sources: CORPUS_BYTES as u64 / task.record_bytes,
            next: 0,
            shift: seed % CORPUS_BYTES as u64,
            rng: Rng::with_seed(seed),
            out: Vec::with_capacity(1),
            latency: None,
            counts: Counts::default(),
        })
    }

    /// Also measures the time of each record.
    pub fn timed(self) -> Records {
        Records { latency: Some(latencies()), ..self }
    }

    /// The times of the records, in nanoseconds, if they were measured.
    pub fn latency(&self) -> Option<&Histogram<u64>> {
        self.latency.as_ref()
    }

    /// The counts of the counting locks for this thread in the window, if the disk has such locks.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// The next record of the order.
    #[inline]
    fn choose(&mut self) -> u64 {
        let at = self.next;
        let last = self.records - 1;
        match self.task.order {
            Order::Random => return self.rng.u64(..self.records),
            Order::Forward => self.next = if at == last { 0 } else { at + 1 },
            Order::Backward => {
                self.next = if at == last { 0 } else { at + 1 };
                return last - at;
            }
            Order::Strided => {
                let next = at + STRIDE;
                // The pass through the records of one phase is over: start the next phase.
                self.next =
                    if next > last { (at % STRIDE + 1) % STRIDE.min(last + 1) } else { next };
            }
        }
        if self.next == 0 {
            self.shift += 1;
        }
        at
    }

    /// Transfers one record.
    ///
    /// # Errors
    /// The status of the I/O, if it failed.
    #[inline]
    pub fn one(&mut self) -> Result<(), Status> {
        let record = self.choose();
        let write = match self.task.does {
            Does::Read => false,
            Does::Write => true,
            Does::Either => self.rng.bool(),
        };
        let bytes = self.task.record_bytes;
        let (op, buf) = if write {
            // Each pass writes another part of the corpus, so that the data differ.
            let source = (record + self.shift) % self.sources;
            (Op::Write, BufRef { region: self.source, offset: source * bytes })
        } else {
            (Op::Read, BufRef { region: self.buffer, offset: 0 })
        };
        let (at, sectors) =
            (Sector::containing(self.part.from + record * bytes), bytes / SECTOR_BYTES);
        let since = self.latency.is_some().then(Instant::now);
        let carried = match self.task.way {
            Way::Carry => self.channel.execute_inline(op, at, sectors, buf),
            Way::Push => None,
        };
        let status = match carried {
            Some(status) => status,
            None => self.push(Bio::new(op, at, sectors).with_buf(buf)),
        };
        if let (Some(since), Some(latency)) = (since, &mut self.latency) {
            latency.saturating_record(since.elapsed().as_nanos() as u64);
        }
        if status.is_ok() { Ok(()) } else { Err(status) }
    }

    #[inline]
    fn push(&mut self, bio: Bio) -> Status {
        self.out.clear();
        while self.channel.push(&[bio]) == 0 {
            self.channel.submit();
            self.channel.wait(None);
        }
        self.channel.submit();
        while self.channel.reap(&mut self.out) == 0 {
            self.channel.wait(None);
        }
        self.out[0].status
    }
}

impl Work for Records {
    fn turn(&mut self) -> Result<u64, LabError> {
        match self.one() {
            Ok(()) => Ok(1),
            Err(status) => Err(LabError::failed(format!("{:?}", self.task), status)),
        }
    }

    fn begin(&mut self) {
        if let Some(latency) = &mut self.latency {
            latency.reset();
        }
        counted::begin();
    }

    fn end(&mut self) {
        self.counts = counted::end();
    }
}

/// The result of one pass of some threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Passed {
    /// The records of all threads.
    pub records: u64,
    /// The time from the common start to the end of the last thread.
    pub wall: Duration,
    /// CPU time of all threads.
    pub cpu: Duration,
}

impl Passed {
    /// I/Os and bytes per second, and CPU time per I/O, of records of `record_bytes`.
    pub fn sample(&self, record_bytes: u64) -> Sample {
        let (records, seconds) = (self.records as f64, self.wall.as_secs_f64());
        Sample::of(Metric::BANDWIDTH, records * record_bytes as f64 / seconds)
            .with(Metric::IOPS, records / seconds)
            .with(Metric::CPU_PER_IO, self.cpu.as_nanos() as f64 / records)
            .with(Metric::CPUS, self.cpu.as_secs_f64() / seconds)
    }

    /// The sample of [`Passed::sample`], with a note where `threads` had less processor time than
    /// they could have used.
    pub fn limited_sample(&self, record_bytes: u64, threads: usize, processors: usize) -> Sample {
        let mut sample = self.sample(record_bytes);
        if is_starved(threads, processors, self.cpu, self.wall) {
            sample.limit = Some("machine".to_owned());
            sample.notes.push(STARVED.to_owned());
        }
        sample
    }
}

/// Runs each thread once through its part.
///
/// # Errors
/// If an I/O fails, or the run is to stop.
pub fn pass(threads: Vec<Records>, round: &Round<'_>) -> Result<Passed, LabError> {
    let records = threads.iter().map(|thread| thread.records).sum();
    let start = Barrier::new(threads.len() + 1);
    let (cpu, wall) = thread::scope(|scope| {
        let start = &start;
        let threads: Vec<_> = threads
            .into_iter()
            .map(|mut thread| {
                scope.spawn(move || {
                    start.wait();
                    let since = of_thread();
                    for record in 0..thread.records {
                        if record % LOOK == 0 && round.stop.is_set() {
                            return Err(LabError::Interrupted);
                        }
                        thread.turn()?;
                    }
                    Ok(of_thread() - since)
                })
            })
            .collect();
        start.wait();
        let since = Instant::now();
        let times = threads.into_iter().map(|thread| thread.join().expect("it does not panic"));
        let times = times.collect::<Result<Vec<Duration>, LabError>>()?;
        Ok::<_, LabError>((times.iter().sum(), since.elapsed()))
    })?;
    Ok(Passed { records, wall, cpu })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use blockyard_yard::{stack, uri};

    use super::super::workers;
    use super::*;
    use crate::stop::Stop;

    const RECORD: u64 = 16 << 10;
    const PART: Part = Part { from: 1 << 20, len_bytes: 40 * RECORD };

    fn disk() -> Arc<dyn Disk> {
        stack::open(&uri::parse("ram:///r?size=4M").unwrap()).unwrap().disk
    }

    fn task(does: Does, order: Order) -> Task {
        Task { does, order, way: Way::Push, record_bytes: RECORD }
    }

    #[test]
    fn every_order_comes_to_every_record_of_the_part() {
        let disk = disk();
        for order in [Order::Forward, Order::Backward, Order::Strided, Order::Random] {
            let mut records = Records::open(&*disk, task(Does::Read, order), PART, 3).unwrap();
            let turns = if order == Order::Random { 2000 } else { 40 };
            let seen: Vec<u64> = (0..turns).map(|_| records.choose()).collect();
            let all: BTreeSet<u64> = seen.iter().copied().collect();
            assert_eq!(all, (0..40).collect(), "{order:?}: {seen:?}");
            match order {
                Order::Forward => assert!(seen.is_sorted()),
                Order::Backward => assert!(seen.is_sorted_by(|a, b| a > b)),
                Order::Strided => assert_eq!(seen[..4], [0, 17, 34, 1]),
                Order::Random => {}
            }
        }
        // With fewer records than a stride all are reached too.
        let few = Part { len_bytes: 5 * RECORD, ..PART };
        let task = task(Does::Read, Order::Strided);
        let mut records = Records::open(&*disk, task, few, 3).unwrap();
        let seen: BTreeSet<u64> = (0..5).map(|_| records.choose()).collect();
        assert_eq!(seen, (0..5).collect());
    }

    #[test]
    fn a_pass_writes_the_part_and_nothing_else() {
        let disk = disk();
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(5));
        let round = Round { warm_up, duration, number: 0, seed: 1, stop: &stop };
        for way in [Way::Push, Way::Carry] {
            let task = Task { way, ..task(Does::Write, Order::Forward) };
            let half = PART.len_bytes / 2;
            let threads = [0, half].map(|from| {
                let part = Part { from: PART.from + from, len_bytes: half };
                Records::open(&*disk, task, part, 7).unwrap()
            });
            let passed = pass(threads.into(), &round).unwrap();
            assert_eq!(passed.records, 40);
            let [before, after] = [0, PART.from + PART.len_bytes]
                .map(|at| disk.extent(Sector::containing(at), u64::MAX));
            assert!(!before.allocated && before.sectors == PART.from / SECTOR_BYTES);
            assert!(!after.allocated);
            assert!(disk.extent(Sector::containing(PART.from), 8).allocated);
        }
        let task = task(Does::Either, Order::Random);
        let records = Records::open(&*disk, task, PART, 7).unwrap().timed();
        let outcome = workers::run(vec![records], &round, || ()).unwrap();
        assert!(outcome.ios > 0 && !outcome.workers[0].latency().unwrap().is_empty());
        stop.set();
        let records = Records::open(&*disk, task, PART, 7).unwrap();
        assert!(matches!(pass(vec![records], &round), Err(LabError::Interrupted)));
    }
}
