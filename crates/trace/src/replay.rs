//! Replays the operations of a trace on a device, at their times or as fast as the device goes.
//!
//! Each queue of the trace has a channel and a thread of its own here, up to [`CHANNELS_MAX`]; the
//! operations of one queue are submitted in their order, and those of one time together, so that
//! the plug merges what it has merged before. A channel has a bounded number of
//! operations in flight; if it is reached, later operations are late. Reads are discarded, and
//! writes write pseudo-random bytes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use blockyard_core::channel::percentile_ns;
use blockyard_core::{
    Bio, BufRef, Channel, Completion, DeviceError, Disk, Nanos, Op, Region, RegionId, SECTOR_BYTES,
    Sector, Status,
};
use blockyard_sync::counter::{HISTOGRAM_BUCKETS, bucket_of};
use serde::{Deserialize, Serialize};

use crate::format::TraceError;
use crate::operation::TraceOperation;

/// Most channels of a replay. The queues of a trace above it share them.
pub const CHANNELS_MAX: usize = 64;

/// Most operations of a channel that were read and not yet submitted.
const AHEAD_MAX: usize = 256;

/// ReadMemory of a channel for reads in flight, and the longest read or write, in bytes.
const MEMORY_BYTES: usize = 32 << 20;

/// Pseudo-random bytes of writes; longer writes end with zeros.
const RANDOM_BYTES: usize = 1 << 20;

/// How long a channel waits for a completion when its next operation has not been read yet.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The longest time from the start to an operation: a year. A later one is submitted then.
const AFTER_MAX: Duration = Duration::from_secs(366 * 86_400);

/// Operations in flight on one channel, at most.
pub const QUEUE_DEPTH_MAX: u16 = 4096;

/// How fast operations are submitted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Speed {
    /// At their times, divided by this factor.
    Factor(f64),
    /// As fast as the device completes them.
    Max,
}

/// How a trace is replayed.
#[derive(Clone, Copy, Debug)]
pub struct ReplayOptions {
    /// How fast.
    pub speed: Speed,
    /// Operations in flight on each channel, at most; from 1 to [`QUEUE_DEPTH_MAX`].
    pub queue_depth: u16,
    /// Whether operations that change the device are replayed. Otherwise such an operation ends the
    /// replay.
    pub write: bool,
}

/// Why a replay has ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The trace cannot be read.
    #[error(transparent)]
    Format(#[from] TraceError),
    /// The trace asks for changes.
    #[error("the trace changes the device ({op} at sector {sector}); --write replays that")]
    Write {
        /// The operation.
        op: Op,
        /// First sector.
        sector: Sector,
    },
    /// The device has no channel for the replay.
    #[error("cannot open a channel of the device: {0}")]
    Channel(#[from] DeviceError),
    /// The system has no thread for the replay.
    #[error("cannot start a thread of the replay: {0}")]
    Thread(#[from] std::io::Error),
}

/// Operations of one kind.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct OpTotal {
    /// How many there were.
    pub operations: u64,
    /// The length of all in bytes, whether they have failed or not.
    pub bytes: u64,
    /// How many have failed.
    pub errors: u64,
}

/// Percentiles of a time, exact to 1/16; 0 without values.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct Percentiles {
    /// Median, in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile, in nanoseconds.
    pub p99_ns: u64,
    /// The longest, in nanoseconds.
    pub max_ns: u64,
}

/// What a replay has done.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct ReplayView {
    /// Operations by name: `read`, `write`, `zone_append`, ...
    pub operations: BTreeMap<String, OpTotal>,
    /// Errors by status: `IOERR`, ...
    pub errors: BTreeMap<String, u64>,
    /// From submission to completion, of reads.
    pub read_latency: Percentiles,
    /// From submission to completion, of all that changes the device.
    pub write_latency: Percentiles,
    /// From submission to completion, of flushes.
    pub flush_latency: Percentiles,
    /// How long after their times operations were submitted; 0 as fast as possible.
    pub lateness: Percentiles,
    /// How long it took, in nanoseconds.
    pub elapsed_ns: u64,
    /// From the first to the last operation of the trace, in nanoseconds.
    pub trace_ns: u64,
    /// The number of channels.
    pub channels: u64,
}

impl ReplayView {
    /// The sum over all kinds.
    pub fn total(&self) -> OpTotal {
        self.operations.values().fold(OpTotal::default(), |sum, one| OpTotal {
            operations: sum.operations + one.operations,
            bytes: sum.bytes + one.bytes,
            errors: sum.errors + one.errors,
        })
    }
}

/// Counts of times, and the longest.
#[derive(Clone, Debug)]
struct Times {
    counts: Vec<u64>,
    max_ns: u64,
}

impl Times {
    fn new() -> Times {
        Times { counts: vec![0; HISTOGRAM_BUCKETS], max_ns: 0 }
    }

    fn add(&mut self, time: Duration) {
        let time_ns = time.as_nanos() as u64;
        self.counts[bucket_of(time_ns)] += 1;
        self.max_ns = self.max_ns.max(time_ns);
    }

    fn merge(&mut self, other: &Times) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum += count);
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    fn percentiles(&self) -> Percentiles {
        let of = |per_mille| percentile_ns(&self.counts, per_mille).unwrap_or(0);
        Percentiles { p50_ns: of(500), p99_ns: of(990), max_ns: self.max_ns }
    }
}

/// What the channels have done.
#[derive(Debug)]
struct Results {
    totals: BTreeMap<&'static str, OpTotal>,
    errors: BTreeMap<&'static str, u64>,
    /// Of reads, changes and flushes.
    latency: [Times; 3],
    lateness: Times,
}

impl Results {
    fn new() -> Results {
        let (latency, lateness) = ([(); 3].map(|()| Times::new()), Times::new());
        Results { totals: BTreeMap::new(), errors: BTreeMap::new(), latency, lateness }
    }

    fn completed(&mut self, op: Op, sectors: u64, status: Status, latency: Duration) {
        let total = self.totals.entry(op.name()).or_default();
        total.operations += 1;
        total.bytes += sectors * SECTOR_BYTES;
        if !status.is_ok() {
            total.errors += 1;
            *self.errors.entry(status.name()).or_default() += 1;
        }
        let class = match op {
            Op::Read => 0,
            Op::Flush => 2,
            _ => 1,
        };
        self.latency[class].add(latency);
    }

    fn merge(&mut self, other: &Results) {
        for (name, one) in &other.totals {
            let sum = self.totals.entry(name).or_default();
            sum.operations += one.operations;
            sum.bytes += one.bytes;
            sum.errors += one.errors;
        }
        for (name, count) in &other.errors {
            *self.errors.entry(name).or_default() += count;
        }
        self.latency.iter_mut().zip(&other.latency).for_each(|(sum, one)| sum.merge(one));
        self.lateness.merge(&other.lateness);
    }

    fn view(&self) -> ReplayView {
        let [reads, writes, flushes] = &self.latency;
        let owned = |name: &&str| (*name).to_owned();
        ReplayView {
            operations: self.totals.iter().map(|(name, one)| (owned(name), *one)).collect(),
            errors: self.errors.iter().map(|(name, count)| (owned(name), *count)).collect(),
            read_latency: reads.percentiles(),
            write_latency: writes.percentiles(),
            flush_latency: flushes.percentiles(),
            lateness: self.lateness.percentiles(),
            ..ReplayView::default()
        }
    }
}

/// Replays operations in the order of time. Waits until all have completed.
///
/// # Errors
/// If the trace cannot be read or asks for a change that is not allowed; what came before has been
/// replayed. If the system has no channel or thread.
pub fn replay(
    disk: &dyn Disk,
    operations: impl Iterator<Item = Result<TraceOperation, TraceError>>,
    options: &ReplayOptions,
) -> Result<ReplayView, ReplayError> {
    let writes = random_region();
    thread::scope(|scope| {
        let mut lanes: Vec<Lane<'_>> = Vec::new();
        let mut begun: Option<(Instant, u64)> = None;
        let (mut last_ns, mut failure) = (0, None);
        for operation in operations {
            let operation = match operation {
                Ok(operation) => operation,
                Err(error) => {
                    failure = Some(error.into());
                    break;
                }
            };
            if operation.op.is_write() && !options.write {
                let TraceOperation { op, sector, .. } = operation;
                failure = Some(ReplayError::Write { op, sector });
                break;
            }
            let (start, first_ns) = *begun.get_or_insert_with(|| (Instant::now(), operation.at.0));
            last_ns = operation.at.0.saturating_sub(first_ns).max(last_ns);
            let due = due(start, operation.at.0.saturating_sub(first_ns), options.speed);
            match lane_of(&mut lanes, operation.queue, || start_lane(scope, disk, options, &writes))
            {
                // A thread that has ended has panicked; `join` says so.
                Ok(lane) => drop(lane.send((operation, due))),
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        let channels = lanes.len() as u64;
        let mut results = Results::new();
        for Lane { sender, thread, .. } in lanes {
            drop(sender);
            match thread.join() {
                Ok(one) => results.merge(&one),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        let elapsed = begun.map_or(Duration::ZERO, |(start, _)| start.elapsed());
        let view = results.view();
        let elapsed_ns = elapsed.as_nanos() as u64;
        match failure {
            Some(failure) => Err(failure),
            None => Ok(ReplayView { elapsed_ns, trace_ns: last_ns, channels, ..view }),
        }
    })
}

/// When an operation is due; `None`: as soon as possible.
fn due(start: Instant, after_ns: u64, speed: Speed) -> Option<Instant> {
    match speed {
        Speed::Max => None,
        Speed::Factor(factor) => {
            let after = Duration::try_from_secs_f64(after_ns as f64 / 1e9 / factor);
            Some(start + after.unwrap_or(AFTER_MAX).min(AFTER_MAX))
        }
    }
}

/// A channel's thread, as the reader of the trace sees it.
struct Lane<'s> {
    queue: u32,
    sender: SyncSender<(TraceOperation, Option<Instant>)>,
    thread: ScopedJoinHandle<'s, Results>,
}

type StartedLane<'s> =
    (SyncSender<(TraceOperation, Option<Instant>)>, ScopedJoinHandle<'s, Results>);

/// The way to the channel of a queue, which is started if it is new.
fn lane_of<'l, 's>(
    lanes: &'l mut Vec<Lane<'s>>,
    queue: u32,
    start: impl FnOnce() -> Result<StartedLane<'s>, ReplayError>,
) -> Result<&'l SyncSender<(TraceOperation, Option<Instant>)>, ReplayError> {
    let found = lanes.iter().position(|lane| lane.queue == queue);
    let index = match found {
        Some(index) => index,
        None if lanes.len() == CHANNELS_MAX => queue as usize % CHANNELS_MAX,
        None => {
            let (sender, thread) = start()?;
            lanes.push(Lane { queue, sender, thread });
            lanes.len() - 1
        }
    };
    Ok(&lanes[index].sender)
}

fn start_lane<'s>(
    scope: &'s Scope<'s, '_>,
    disk: &dyn Disk,
    options: &ReplayOptions,
    writes: &Arc<Region>,
) -> Result<StartedLane<'s>, ReplayError> {
    let worker = ReplayChannel::new(disk.open()?, options.queue_depth, writes);
    let (sender, receiver) = sync_channel(AHEAD_MAX);
    let builder = thread::Builder::new().name("replay".to_owned());
    let thread = builder.spawn_scoped(scope, move || worker.run(&receiver))?;
    Ok((sender, thread))
}

/// ReadMemory with pseudo-random bytes at its start, which no device can compress: xorshift64
/// (G. Marsaglia, "Xorshift RNGs", 2003).
fn random_region() -> Arc<Region> {
    let region = Region::alloc(MEMORY_BYTES);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(RANDOM_BYTES);
    while bytes.len() < RANDOM_BYTES {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    region.write(0, &bytes);
    region
}

/// ReadMemory for reads in flight: ranges that are taken one after the other, in a circle.
#[derive(Debug, Default)]
struct ReadMemory {
    /// The taken ranges, oldest first: their number, end and whether they are still used.
    taken: VecDeque<(u64, usize, bool)>,
    /// The number of the next range.
    next: u64,
    /// Where the next range begins.
    head: usize,
}

impl ReadMemory {
    /// Takes a range; returns its number and start, or `None` if there is no space now.
    fn take(&mut self, len: usize) -> Option<(u64, usize)> {
        // The oldest range begins where the one before it, which was freed, has ended.
        let tail = self.tail();
        let start = match self.taken.is_empty() {
            true => 0,
            false if self.head > tail && self.head + len <= MEMORY_BYTES => self.head,
            false if self.head > tail && len < tail => 0,
            false if self.head < tail && self.head + len < tail => self.head,
            false => return None,
        };
        if start + len > MEMORY_BYTES {
            return None;
        }
        self.head = start + len;
        let number = self.next;
        self.next += 1;
        self.taken.push_back((number, start, true));
        Some((number, start))
    }

    /// Where the oldest range begins.
    fn tail(&self) -> usize {
        self.taken.front().map_or(0, |(_, start, _)| *start)
    }

    fn free(&mut self, number: u64) {
        if let Some(range) = self.taken.iter_mut().find(|range| range.0 == number) {
            range.2 = false;
        }
        while self.taken.front().is_some_and(|range| !range.2) {
            self.taken.pop_front();
        }
    }
}

/// An operation in flight.
#[derive(Clone, Copy, Debug)]
struct SubmittedOperation {
    op: Op,
    sectors: u64,
    submitted: Instant,
    memory: Option<u64>,
}

/// The thread of one channel.
struct ReplayChannel {
    channel: Box<dyn Channel>,
    reads: RegionId,
    writes: RegionId,
    memory: ReadMemory,
    in_flight: Vec<Option<SubmittedOperation>>,
    free: Vec<u16>,
    done: Vec<Completion>,
    /// Slots of the bios that were pushed and not yet submitted.
    pushed: Vec<u16>,
    /// Their time in the trace.
    batch_at: Nanos,
    results: Results,
}

impl ReplayChannel {
    fn new(mut channel: Box<dyn Channel>, queue_depth: u16, writes: &Arc<Region>) -> ReplayChannel {
        let reads = channel.register(Region::alloc(MEMORY_BYTES));
        let writes = channel.register(Arc::clone(writes));
        let depth = queue_depth.clamp(1, QUEUE_DEPTH_MAX);
        ReplayChannel {
            channel,
            reads,
            writes,
            memory: ReadMemory::default(),
            in_flight: vec![None; depth.into()],
            free: (0..depth).rev().collect(),
            done: Vec::new(),
            pushed: Vec::new(),
            batch_at: Nanos(0),
            results: Results::new(),
        }
    }

    fn run(mut self, operations: &Receiver<(TraceOperation, Option<Instant>)>) -> Results {
        blockyard_os::sharpen_timers();
        let (mut next, mut is_ended) = (None, false);
        loop {
            let mut is_full = false;
            loop {
                if next.is_none() && !is_ended {
                    match operations.try_recv() {
                        Ok(operation) => next = Some(operation),
                        Err(TryRecvError::Disconnected) => is_ended = true,
                        Err(TryRecvError::Empty) => {}
                    }
                }
                let Some((operation, due)) = next else { break };
                if due.is_some_and(|due| due > Instant::now()) {
                    break;
                }
                if operation.at != self.batch_at {
                    self.submit();
                    self.batch_at = operation.at;
                }
                if !self.push(&operation) {
                    is_full = true;
                    break;
                }
                if let Some(due) = due {
                    self.results.lateness.add(due.elapsed());
                }
                next = None;
            }
            self.submit();
            self.reap();
            let is_idle = self.free.len() == self.in_flight.len();
            match next {
                None if is_idle && is_ended => return self.results,
                None if is_idle => match operations.recv() {
                    Ok(operation) => next = Some(operation),
                    Err(_) => is_ended = true,
                },
                None if is_ended => self.channel.wait(None),
                None => self.channel.wait(Some(Instant::now() + POLL_INTERVAL)),
                Some(_) if is_full && !is_idle => self.channel.wait(None),
                // A channel without anything in flight takes any operation.
                Some(_) if is_full => {}
                Some((_, due)) if is_idle => {
                    let due = due.map(|due| due.saturating_duration_since(Instant::now()));
                    thread::sleep(due.unwrap_or_default());
                }
                Some((_, due)) => self.channel.wait(due),
            }
        }
    }

    /// Pushes a bio for an operation; `false` if the channel, or the memory, is full.
    fn push(&mut self, operation: &TraceOperation) -> bool {
        let TraceOperation { op, flags, sector, sectors, .. } = *operation;
        let len = usize::try_from(sectors * SECTOR_BYTES).unwrap_or(usize::MAX);
        if op.has_data() && len > MEMORY_BYTES {
            self.results.completed(op, sectors, Status::Inval, Duration::ZERO);
            return true;
        }
        let Some(slot) = self.free.pop() else { return false };
        let mut bio = Bio::new(op, sector, sectors).with_flags(flags).with_user_data(slot.into());
        let mut memory = None;
        if op == Op::Read {
            let Some((number, start)) = self.memory.take(len) else {
                self.free.push(slot);
                return false;
            };
            memory = Some(number);
            bio = bio.with_buf(BufRef { region: self.reads, offset: start as u64 });
        } else if op.has_data() {
            bio = bio.with_buf(BufRef { region: self.writes, offset: 0 });
        }
        if self.channel.push(&[bio]) == 0 {
            memory.into_iter().for_each(|number| self.memory.free(number));
            self.free.push(slot);
            return false;
        }
        let submitted = Instant::now();
        self.in_flight[usize::from(slot)] =
            Some(SubmittedOperation { op, sectors, submitted, memory });
        self.pushed.push(slot);
        true
    }

    /// Submits the pushed bios.
    fn submit(&mut self) {
        if self.pushed.is_empty() {
            return;
        }
        let now = Instant::now();
        for slot in self.pushed.drain(..) {
            if let Some(in_flight) = &mut self.in_flight[usize::from(slot)] {
                in_flight.submitted = now;
            }
        }
        self.channel.submit();
    }

    fn reap(&mut self) {
        if self.channel.reap(&mut self.done) == 0 {
            return;
        }
        let now = Instant::now();
        for Completion { user_data, status, .. } in self.done.drain(..) {
            let ended = self.in_flight.get_mut(user_data as usize).and_then(Option::take);
            let Some(SubmittedOperation { op, sectors, submitted, memory }) = ended else {
                continue;
            };
            memory.into_iter().for_each(|number| self.memory.free(number));
            self.free.push(user_data as u16);
            self.results.completed(op, sectors, status, now - submitted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_taken_in_a_circle() {
        let mut memory = ReadMemory::default();
        let half = MEMORY_BYTES / 2;
        assert_eq!(memory.take(MEMORY_BYTES + 1), None);
        assert_eq!(memory.take(half), Some((0, 0)));
        assert_eq!(memory.take(half), Some((1, half)));
        assert_eq!(memory.take(512), None);
        memory.free(1);
        assert_eq!(memory.take(512), None, "the older range is still used");
        memory.free(0);
        assert_eq!(memory.take(half + 512), Some((2, 0)));
        assert_eq!(memory.take(half), None);
        assert_eq!(memory.take(half - 512), Some((3, half + 512)));
        memory.free(2);
        assert_eq!(memory.take(half), Some((4, 0)));
        assert_eq!(memory.take(512), None, "the start of the circle must stay free");
        memory.free(3);
        assert_eq!(memory.take(MEMORY_BYTES), None);
        memory.free(4);
        assert_eq!(memory.take(MEMORY_BYTES), Some((5, 0)));
    }

    #[test]
    fn times_are_divided_by_the_speed() {
        let start = Instant::now();
        assert_eq!(due(start, 1_000_000_000, Speed::Max), None);
        let at = due(start, 1_000_000_000, Speed::Factor(4.0));
        assert_eq!(at, Some(start + Duration::from_millis(250)));
    }
}
