//! The trace recorder: what a device's queues do, as events in rings that one writer drains.
//!
//! ```text
//! queue ─ events ▸ its ring ─┐
//! queue ─ events ▸ its ring ─┼▸ Recorder::drain, by the trace's writer
//! queue ─ events ▸ its ring ─┘
//! ```
//!
//! [`super::Faulty`] calls it, because that wraps every device and has to look for changes of its
//! rules anyway: while no trace is recorded, a batch has no check more, and a poll has one.
//! Recording never waits and never allocates. An event that does not fit into its ring is lost and
//! counted.
//!
//! A request says when its bios were submitted, so their events are recorded when the request
//! reaches the device, with the time of the submission. A writer that wants all events in the order
//! of time has to sort them.
#![allow(clippy::disallowed_types)] // The table of rings is control plane.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockyard_sync::atomics::{AtomicBool, AtomicU64, Ordering};
use blockyard_sync::event_count::EventCount;
use blockyard_sync::rcu_cell::RcuCell;
use blockyard_sync::trace_ring::{RingReader, RingWriter, trace_ring};

use super::interceptors::Interceptors;
use crate::bio::{Bio, Flags, Op, Status};
use crate::request::{CompletionBatch, Started};
use crate::units::{Nanos, Sector};

/// Events of one ring: at a million requests a second, a ring lasts about 2 ms.
const RING_EVENTS: usize = 8192;

/// Most rings of a recorder, each of 320 KiB. The events of queues above it are lost and counted.
const RINGS_MAX: usize = 256;

/// Events that a queue collects before it publishes them.
const BATCH_EVENTS: usize = 256;

/// What has happened, with the letters of `blkparse`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceKind {
    /// Q: a client has submitted a bio.
    Queue,
    /// X: a bio was cut after this part of it.
    Split,
    /// G: a bio became a request of its own.
    GetRequest,
    /// M: a bio was merged into a request.
    Merge,
    /// I: a request has to wait: for a zone, in the scheduler, or for the device.
    Insert,
    /// D: a request was issued to the device.
    Issue,
    /// R: the device did not start the request; it will be issued again.
    Requeue,
    /// C: a request has completed.
    Complete,
}

/// One event of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// When it happened, by the clock of the channels.
    pub at: Nanos,
    /// First sector. Of a completed append: where the data landed.
    pub sector: Sector,
    /// Length in sectors; 0 for operations without a range.
    pub sectors: u64,
    /// The thread that recorded it, as the system numbers threads.
    pub thread: u32,
    /// The queue that recorded it. Without an active scheduler each channel has a queue of its own.
    pub queue: u32,
    /// What has happened.
    pub kind: TraceKind,
    /// The operation.
    pub op: Op,
    /// Modifiers.
    pub flags: Flags,
    /// The status of a completed request; `Ok` otherwise.
    pub status: Status,
}

/// Records the events of a device's queues until its [`Recording`] is dropped.
pub struct Recorder {
    rings: Mutex<Rings>,
    /// The writer of the trace sleeps on it.
    event_count: EventCount,
    /// Events of queues without a ring.
    lost_without_ring: AtomicU64,
    is_stopped: AtomicBool,
    source: TraceSource,
}

/// What a recorder asks the system for.
#[derive(Clone, Copy, Debug)]
pub struct TraceSource {
    /// The number of the calling thread.
    pub thread_id: fn() -> u32,
    /// The present time, by the clock of the channels.
    pub now: fn() -> Nanos,
}

/// The rings of the queues that have started to record.
#[derive(Debug, Default)]
struct Rings {
    open: Vec<OpenRing>,
    queues: u32,
    /// The trace has ended: nothing reads rings any more.
    is_ended: bool,
}

#[derive(Debug)]
struct OpenRing {
    queue: u32,
    reader: RingReader<TraceEvent>,
    /// Lost events that were reported.
    reported: u64,
}

/// Events that were lost since the last report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostEvents {
    /// The queue; `None` for all queues without a ring.
    pub queue: Option<u32>,
    /// Their number.
    pub count: u64,
}

impl Recorder {
    fn rings(&self) -> MutexGuard<'_, Rings> {
        // A panic of another lock holder leaves the rings usable.
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves the recorded events of one ring to `events`, and reports losses. Begins at `position`
    /// 0, and returns the position of the next ring, or `None` after the last one. Events of one
    /// queue are in order.
    pub fn drain(
        &self,
        position: usize,
        events: &mut Vec<TraceEvent>,
        lost: &mut Vec<LostEvents>,
    ) -> Option<usize> {
        let mut report = |queue, total: u64, reported: &mut u64| {
            if total > *reported {
                lost.push(LostEvents { queue, count: total - *reported });
                *reported = total;
            }
        };
        // A ring at a time: a queue that opens its ring waits for this lock.
        let mut rings = self.rings();
        let Some(OpenRing { queue, reader, reported }) = rings.open.get_mut(position) else {
            // Relaxed: the count publishes nothing but itself.
            report(None, self.lost_without_ring.swap(0, Ordering::Relaxed), &mut 0);
            return None;
        };
        let is_closed = reader.is_closed();
        reader.drain(events);
        report(Some(*queue), reader.lost(), reported);
        if is_closed {
            rings.open.remove(position);
            return Some(position);
        }
        Some(position + 1)
    }

    /// Frees the rings of the queues that record no more. The queues of an ended trace learn of its
    /// end with their next batch, and an idle one keeps its own ring until then.
    fn end(&self) {
        let mut rings = self.rings();
        rings.is_ended = true;
        rings.open = Vec::new();
    }

    /// Sleeps for `at_most` at most; less if a ring is half full, or the recorder is stopped.
    pub fn wait(&self, at_most: Duration) {
        self.event_count.sleep(at_most, || self.is_stopped());
    }

    /// Asks the writer of the trace to end it.
    pub fn stop(&self) {
        // Relaxed: the fence in `notify` orders it before the check of the writer.
        self.is_stopped.store(true, Ordering::Relaxed);
        self.event_count.notify();
    }

    /// Whether the writer of the trace was asked to end it.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    /// The recorder of one more queue.
    pub(super) fn open(self: &Arc<Self>) -> QueueRecorder {
        let mut rings = self.rings();
        let queue = rings.queues;
        rings.queues += 1;
        let ring = (rings.open.len() < RINGS_MAX && !rings.is_ended).then(|| {
            let (writer, reader) = trace_ring(RING_EVENTS);
            rings.open.push(OpenRing { queue, reader, reported: 0 });
            writer
        });
        drop(rings);
        let (recorder, batch) = (Arc::clone(self), Vec::with_capacity(BATCH_EVENTS));
        QueueRecorder { recorder, ring, queue, thread: 0, batch }
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").finish_non_exhaustive()
    }
}

/// Where recorders are attached to a device. A device has one recorder at a time.
#[derive(Debug)]
pub struct TracePoint {
    interceptors: Arc<RcuCell<Interceptors>>,
    writer: Mutex<Option<Box<dyn TraceWriter>>>,
}

/// The writer of a trace that lasts as long as its device. Its `Drop` ends the trace.
pub trait TraceWriter: fmt::Debug + Send {}

impl TracePoint {
    pub(super) fn new(interceptors: &Arc<RcuCell<Interceptors>>) -> TracePoint {
        TracePoint { interceptors: Arc::clone(interceptors), writer: Mutex::default() }
    }

    /// Starts to record, from the next batch of each queue on. Returns `None` if the device is
    /// recorded already.
    pub fn record(&self, source: TraceSource) -> Option<Recording> {
        let recorder = Arc::new(Recorder {
            rings: Mutex::default(),
            event_count: EventCount::new(),
            lost_without_ring: AtomicU64::new(0),
            is_stopped: AtomicBool::new(false),
            source,
        });
        let mut is_attached = false;
        self.interceptors.update(|now| {
            is_attached = now.recorder.is_none();
            let recorder = now.recorder.as_ref().unwrap_or(&recorder);
            Interceptors { recorder: Some(Arc::clone(recorder)), ..now.clone() }
        });
        let interceptors = Arc::clone(&self.interceptors);
        is_attached.then_some(Recording { interceptors, recorder })
    }

    /// The recorder of the device, while it is recorded.
    pub fn recorder(&self) -> Option<Arc<Recorder>> {
        self.interceptors.get().recorder.clone()
    }

    /// Ends the recording of the device at once, and asks the writer of the trace to end it.
    /// Returns whether the device was recorded. Another trace may begin before that writer ends.
    pub fn stop(&self) -> bool {
        let mut stopped = None;
        self.interceptors.update(|now| {
            stopped = now.recorder.clone();
            Interceptors { recorder: None, ..now.clone() }
        });
        stopped.inspect(|recorder| recorder.stop()).is_some()
    }

    /// Keeps the writer of a trace until the device is closed.
    pub fn keep(&self, writer: Box<dyn TraceWriter>) {
        *self.writer.lock().unwrap_or_else(PoisonError::into_inner) = Some(writer);
    }
}

/// A device that is recorded. Dropping it ends that.
#[derive(Debug)]
pub struct Recording {
    interceptors: Arc<RcuCell<Interceptors>>,
    recorder: Arc<Recorder>,
}

impl Recording {
    /// The recorder.
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// Ends the recording; events that were recorded can still be drained.
    pub fn detach(&self) {
        self.interceptors.update(|now| {
            let recorder = now.recorder.clone();
            let recorder = recorder.filter(|other| !Arc::ptr_eq(other, &self.recorder));
            Interceptors { recorder, ..now.clone() }
        });
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.detach();
        self.recorder.end();
    }
}

/// The recorder of one queue. It belongs to the thread of the queue.
#[derive(Debug)]
pub(super) struct QueueRecorder {
    recorder: Arc<Recorder>,
    ring: Option<RingWriter<TraceEvent>>,
    queue: u32,
    /// The thread of the current batch.
    thread: u32,
    /// Events that are not published yet. Never longer than its capacity.
    batch: Vec<TraceEvent>,
}

impl QueueRecorder {
    /// Whether it records for this recorder.
    pub(super) fn is_of(&self, recorder: &Arc<Recorder>) -> bool {
        Arc::ptr_eq(&self.recorder, recorder)
    }

    /// Begins a batch of events, by the calling thread.
    pub(super) fn begin(&mut self) {
        self.thread = (self.recorder.source.thread_id)();
    }

    fn push(&mut self, event: TraceEvent) {
        if self.batch.len() == BATCH_EVENTS {
            self.publish();
        }
        self.batch.push(event);
    }

    fn event(&self, kind: TraceKind, at: Nanos, op: Op, flags: Flags) -> TraceEvent {
        let (thread, queue, status) = (self.thread, self.queue, Status::Ok);
        TraceEvent { at, sector: Sector(0), sectors: 0, thread, queue, kind, op, flags, status }
    }

    /// Publishes the events of the batch.
    pub(super) fn publish(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        match &mut self.ring {
            Some(ring) => {
                if ring.publish(&self.batch) {
                    self.recorder.event_count.notify();
                }
            }
            None => {
                // Relaxed: the count publishes nothing but itself.
                self.recorder
                    .lost_without_ring
                    .fetch_add(self.batch.len() as u64, Ordering::Relaxed);
            }
        }
        self.batch.clear();
    }

    /// Records the bios of a request that were not recorded before. Returns when the request was
    /// submitted, if its first bio is one of them.
    pub(super) fn queued(&mut self, started: &mut Started) -> Option<Nanos> {
        let (mut is_first, mut first) = (true, None);
        started.visit_bios(|bio, submitted, is_piece| {
            if !bio.flags.contains(Flags::TRACED) {
                bio.flags = bio.flags | Flags::TRACED;
                self.bio_queued(bio, submitted, is_piece, is_first);
                first = first.or(is_first.then_some(submitted));
            }
            is_first = false;
        });
        first
    }

    fn bio_queued(&mut self, bio: &Bio, submitted: Nanos, is_piece: bool, is_first: bool) {
        let blank = self.event(TraceKind::Queue, submitted, bio.op, bio.flags);
        let mut record = |kind, sectors| {
            self.push(TraceEvent { kind, sector: bio.sector, sectors, ..blank });
        };
        if is_piece {
            let piece = PieceMark::read(bio.user_data);
            if piece.whole_sectors > 0 {
                record(TraceKind::Queue, piece.whole_sectors);
            }
            if piece.is_followed {
                record(TraceKind::Split, bio.sectors);
            }
        } else {
            record(TraceKind::Queue, bio.sectors);
        }
        record(if is_first { TraceKind::GetRequest } else { TraceKind::Merge }, bio.sectors);
    }

    /// Records that a request is issued to the device.
    pub(super) fn issued(&mut self, now: Nanos, started: &mut Started) {
        if let Some(submitted) = self.queued(started)
            && submitted < now
        {
            self.record_started(TraceKind::Insert, submitted, started);
        }
        self.record_started(TraceKind::Issue, now, started);
    }

    /// Records that the device did not start a request.
    pub(super) fn requeued(&mut self, now: Nanos, started: &Started) {
        self.record_started(TraceKind::Requeue, now, started);
    }

    fn record_started(&mut self, kind: TraceKind, now: Nanos, started: &Started) {
        let blank = self.event(kind, now, started.op(), started.flags());
        self.push(TraceEvent { sector: started.sector(), sectors: started.sectors(), ..blank });
    }

    /// Records the completions of a batch from an index on, at the present time.
    pub(super) fn completed(&mut self, done: &CompletionBatch, from: usize) {
        if done.len() > from {
            let now = (self.recorder.source.now)();
            for index in from..done.len() {
                let Some(ended) = done.get(index) else { break };
                let blank = self.event(TraceKind::Complete, now, ended.op(), ended.flags());
                let (sector, sectors) = (ended.sector(), ended.sectors());
                self.push(TraceEvent { sector, sectors, status: ended.status(), ..blank });
            }
        }
        self.publish();
    }
}

/// What the user data of a piece of a split bio says, which no client gets to see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PieceMark {
    /// Of the first piece: the length of the whole bio in sectors; 0 for the others, and if another
    /// request of the bio came before.
    pub(crate) whole_sectors: u64,
    /// Whether another piece follows.
    pub(crate) is_followed: bool,
}

impl PieceMark {
    /// The mark as user data. A device has fewer than 2^55 sectors.
    pub(crate) fn user_data(self) -> u64 {
        self.whole_sectors << 1 | u64::from(self.is_followed)
    }

    fn read(user_data: u64) -> PieceMark {
        PieceMark { whole_sectors: user_data >> 1, is_followed: user_data & 1 == 1 }
    }
}
