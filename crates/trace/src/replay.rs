//! Replays the operations of a trace on a device, at their times or as fast as the device goes.
//!
//! Each queue of the trace has a channel and a thread of its own here, up to [`CHANNELS_MAX`]; the
//! operations of one queue are submitted in their order, and those of one time together, so that
//! the plug merges what it has merged before. A channel has a bounded number of
//! operations in flight; if it is reached, later operations are late. Reads are discarded, and
//! writes write pseudo-random bytes. A [`ReplayStop`] ends all waits of a replay.

mod memory;
mod stop;

use std::collections::BTreeMap;
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
use memory::ReadMemory;

pub use stop::ReplayStop;

/// Most channels of a replay. The queues of a trace above it share them.
pub const CHANNELS_MAX: usize = 64;

/// Most operations of a channel that were read and not yet submitted.
const AHEAD_MAX: usize = 256;

/// The longest read or write, in bytes.
const DATA_BYTES_MAX: usize = 32 << 20;

/// Pseudo-random bytes of writes; longer writes end with zeros.
const RANDOM_BYTES: usize = 1 << 20;

/// How long a channel waits when its next operation has not been read yet, or other channels have
/// the memory for it.
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
    /// The system has no memory for the replay.
    #[error("cannot allocate {bytes} bytes for the data of the replay")]
    Memory {
        /// The number of bytes.
        bytes: usize,
    },
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
    /// Whether it was stopped before the end of the trace.
    #[serde(default)]
    pub is_stopped: bool,
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

    /// Counts an operation; one that was not submitted has no latency.
    fn completed(&mut self, op: Op, sectors: u64, status: Status, latency: Option<Duration>) {
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
        if let Some(latency) = latency {
            self.latency[class].add(latency);
        }
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

/// Replays operations in the order of time until `stop` stops it. Waits until all operations in
/// flight have completed.
///
/// # Errors
/// If the trace cannot be read or asks for a change that is not allowed: operations before that
/// have been replayed, but those that are not due yet are dropped. If the system has no channel,
/// memory or thread.
pub fn replay(
    disk: &dyn Disk,
    operations: impl Iterator<Item = Result<TraceOperation, TraceError>>,
    options: &ReplayOptions,
    stop: &ReplayStop,
) -> Result<ReplayView, ReplayError> {
    let reads = ReadMemory::new().ok_or(ReplayError::Memory { bytes: memory::READ_BYTES })?;
    let writes = random_region().ok_or(ReplayError::Memory { bytes: DATA_BYTES_MAX })?;
    let shared = SharedParts { disk, options, stop, reads: &reads, writes: &writes };
    thread::scope(|scope| {
        let mut lanes: Vec<Lane<'_>> = Vec::new();
        let mut begun: Option<(Instant, u64)> = None;
        let mut last_ns = 0;
        let submit_all = || -> Result<(), ReplayError> {
            for operation in operations {
                if stop.is_stopped() {
                    break;
                }
                let operation = operation?;
                if operation.op.is_write() && !options.write {
                    let TraceOperation { op, sector, .. } = operation;
                    return Err(ReplayError::Write { op, sector });
                }
                let (start, first_ns) =
                    *begun.get_or_insert_with(|| (Instant::now(), operation.at.0));
                last_ns = operation.at.0.saturating_sub(first_ns).max(last_ns);
                let due = due(start, operation.at.0.saturating_sub(first_ns), options.speed);
                let open = |index| start_lane(scope, shared, index);
                let lane = lane_of(&mut lanes, operation.queue, open)?;
                if lane.send((operation, due)).is_err() {
                    // The thread has ended: the replay is stopped, or `join` finds a panic.
                    stop.stop();
                }
            }
            Ok(())
        };
        let submitted = submit_all();
        if submitted.is_err() {
            stop.stop();
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
        submitted?;
        let elapsed = begun.map_or(Duration::ZERO, |(start, _)| start.elapsed());
        let (elapsed_ns, trace_ns) = (elapsed.as_nanos() as u64, last_ns);
        let is_stopped = stop.is_stopped();
        Ok(ReplayView { elapsed_ns, trace_ns, channels, is_stopped, ..results.view() })
    })
}

/// What all channels of a replay share.
#[derive(Clone, Copy)]
struct SharedParts<'r> {
    disk: &'r dyn Disk,
    options: &'r ReplayOptions,
    stop: &'r ReplayStop,
    reads: &'r ReadMemory,
    writes: &'r Arc<Region>,
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
    start: impl FnOnce(usize) -> Result<StartedLane<'s>, ReplayError>,
) -> Result<&'l SyncSender<(TraceOperation, Option<Instant>)>, ReplayError> {
    let found = lanes.iter().position(|lane| lane.queue == queue);
    let index = match found {
        Some(index) => index,
        None if lanes.len() == CHANNELS_MAX => queue as usize % CHANNELS_MAX,
        None => {
            let (sender, thread) = start(lanes.len())?;
            lanes.push(Lane { queue, sender, thread });
            lanes.len() - 1
        }
    };
    Ok(&lanes[index].sender)
}

fn start_lane<'s, 'r: 's>(
    scope: &'s Scope<'s, 'r>,
    shared: SharedParts<'r>,
    index: usize,
) -> Result<StartedLane<'s>, ReplayError> {
    let worker = ReplayChannel::new(shared.disk.open()?, shared, index);
    let (sender, receiver) = sync_channel(AHEAD_MAX);
    let builder = thread::Builder::new().name("replay".to_owned());
    let thread = builder.spawn_scoped(scope, move || worker.run(&receiver))?;
    Ok((sender, thread))
}

/// The memory that writes write, if the system has it. It begins with pseudo-random bytes, which no
/// device can compress: xorshift64 (G. Marsaglia, "Xorshift RNGs", 2003).
fn random_region() -> Option<Arc<Region>> {
    let region = Region::try_alloc(DATA_BYTES_MAX)?;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(RANDOM_BYTES);
    while bytes.len() < RANDOM_BYTES {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    region.write(0, &bytes);
    Some(region)
}

/// An operation in flight.
#[derive(Clone, Copy, Debug)]
struct SubmittedOperation {
    op: Op,
    sectors: u64,
    submitted: Instant,
    /// The range of a read in the memory for reads: its start.
    memory: Option<usize>,
}

/// The thread of one channel.
struct ReplayChannel<'r> {
    channel: Box<dyn Channel>,
    /// The index of the channel in the replay.
    index: usize,
    shared: SharedParts<'r>,
    reads: RegionId,
    writes: RegionId,
    in_flight: Vec<Option<SubmittedOperation>>,
    free: Vec<u16>,
    done: Vec<Completion>,
    /// The ranges of reads that have completed, start and length, to be freed under one lock.
    freed: Vec<(usize, usize)>,
    /// Slots of the bios that were pushed and not yet submitted.
    pushed: Vec<u16>,
    /// Their time in the trace.
    batch_at: Nanos,
    results: Results,
}

impl<'r> ReplayChannel<'r> {
    fn new(mut channel: Box<dyn Channel>, shared: SharedParts<'r>, index: usize) -> Self {
        let reads = channel.register(Arc::clone(&shared.reads.region));
        let writes = channel.register(Arc::clone(shared.writes));
        let depth = shared.options.queue_depth.clamp(1, QUEUE_DEPTH_MAX);
        ReplayChannel {
            channel,
            index,
            shared,
            reads,
            writes,
            in_flight: vec![None; depth.into()],
            free: (0..depth).rev().collect(),
            done: Vec::new(),
            freed: Vec::new(),
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
                if self.shared.stop.is_stopped() {
                    // The operations that wait here and in the queue are dropped.
                    (next, is_ended) = (None, true);
                    break;
                }
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
                // Other channels may have the memory.
                Some(_) if is_full && is_idle => {
                    self.shared.stop.wait_until(Instant::now() + POLL_INTERVAL);
                }
                Some(_) if is_full => self.channel.wait(Some(Instant::now() + POLL_INTERVAL)),
                Some((_, Some(due))) if is_idle => {
                    self.shared.stop.wait_until(due);
                }
                Some((_, due)) => self.channel.wait(due),
            }
        }
    }

    /// Pushes a bio for an operation; `false` if the channel, or the memory, is full.
    fn push(&mut self, operation: &TraceOperation) -> bool {
        let TraceOperation { op, flags, sector, sectors, .. } = *operation;
        let len = usize::try_from(sectors * SECTOR_BYTES).unwrap_or(usize::MAX);
        if op.has_data() && len > DATA_BYTES_MAX {
            self.results.completed(op, sectors, Status::Inval, None);
            return true;
        }
        let Some(slot) = self.free.pop() else { return false };
        let mut bio = Bio::new(op, sector, sectors).with_flags(flags).with_user_data(slot.into());
        let mut memory = None;
        if op == Op::Read {
            let Some(start) = self.shared.reads.take(self.index, len) else {
                self.free.push(slot);
                return false;
            };
            memory = Some(start);
            bio = bio.with_buf(BufRef { region: self.reads, offset: start as u64 });
        } else if op.has_data() {
            bio = bio.with_buf(BufRef { region: self.writes, offset: 0 });
        }
        if self.channel.push(&[bio]) == 0 {
            self.shared.reads.free(memory.map(|start| (start, len)));
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
            let len = (sectors * SECTOR_BYTES) as usize;
            self.freed.extend(memory.map(|start| (start, len)));
            self.free.push(user_data as u16);
            self.results.completed(op, sectors, status, Some(now - submitted));
        }
        self.shared.reads.free(self.freed.drain(..));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_divided_by_the_speed() {
        let start = Instant::now();
        assert_eq!(due(start, 1_000_000_000, Speed::Max), None);
        let at = due(start, 1_000_000_000, Speed::Factor(4.0));
        assert_eq!(at, Some(start + Duration::from_millis(250)));
    }
}
