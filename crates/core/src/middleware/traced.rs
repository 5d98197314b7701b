//! A device that logs the requests it starts and their completions.
//!
//! One line per event, in the columns of `blkparse`'s default output, so that people and scripts
//! can read it: device, queue, sequence, seconds, pid, action (D issued, C completed), the
//! operation's letters, sector + sectors; then the tag and, on completion, the status.
#![allow(clippy::disallowed_types)] // A lock for the trace file: traced runs are not measured.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::RawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use super::forward_control_plane;
use crate::bio::{Flags, Op};
use crate::clock::Clock;
use crate::device::{Device, DeviceError, DeviceQueue, Due};
use crate::inject::Injection;
use crate::request::{Batch, CompletionBatch, Started};
use crate::units::Nanos;

/// A queue writes its text to the trace when it reaches this length, in bytes.
const CHUNK_BYTES: usize = 32 << 10;

/// The start of each line: the device number.
const LINE_START: &str = "  8,0 ";

/// The destination of the lines of all queues of a device.
#[derive(Clone)]
pub struct Trace(Arc<Mutex<TraceFile>>);

struct TraceFile {
    sink: Box<dyn Write + Send>,
    queues: u32,
    failed: Option<io::ErrorKind>,
}

impl Trace {
    /// A trace into `sink`. If the sink fails, the trace ends and the I/O continues.
    pub fn new(sink: Box<dyn Write + Send>) -> Trace {
        Trace(Arc::new(Mutex::new(TraceFile { sink, queues: 0, failed: None })))
    }

    /// Whether a file may be truncated to become a trace: it is empty, or starts like a trace.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn may_replace(file: &File) -> io::Result<bool> {
        let mut start = [0; LINE_START.len()];
        let read = file.read_at(&mut start, 0)?;
        Ok(start[..read] == LINE_START.as_bytes()[..read])
    }

    /// Why the trace ended early, if it did.
    pub fn failure(&self) -> Option<io::ErrorKind> {
        self.0.lock().expect("no holder panics").failed
    }

    fn write(&self, text: &str) {
        let mut file = self.0.lock().expect("no holder panics");
        if file.failed.is_none()
            && let Err(error) =
                file.sink.write_all(text.as_bytes()).and_then(|()| file.sink.flush())
        {
            file.failed = Some(error.kind());
        }
    }

    fn next_queue(&self) -> u32 {
        let mut file = self.0.lock().expect("no holder panics");
        file.queues += 1;
        file.queues - 1
    }
}

impl std::fmt::Debug for Trace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Trace")
    }
}

/// `D` with a line for every request issued and completed.
#[derive(Debug)]
pub struct Traced<D> {
    inner: D,
    trace: Trace,
}

impl<D: Device> Traced<D> {
    /// `inner` with a trace.
    pub fn new(inner: D, trace: Trace) -> Traced<D> {
        Traced { inner, trace }
    }
}

impl<D: Device> Device for Traced<D> {
    type Queue = TracedQueue<D::Queue>;

    forward_control_plane!();

    fn open_queue(&self) -> Result<Self::Queue, DeviceError> {
        let depth = usize::from(self.limits().queue_depth);
        Ok(TracedQueue {
            inner: self.inner.open_queue()?,
            pen: Pen {
                queue: self.trace.next_queue(),
                trace: self.trace.clone(),
                sequence: 0,
                text: String::with_capacity(CHUNK_BYTES + 256),
            },
            passed: Batch::with_capacity(depth),
        })
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        self.inner.inject(injection)
    }
}

/// A queue of a [`Traced`] device.
#[derive(Debug)]
pub struct TracedQueue<Q> {
    inner: Q,
    pen: Pen,
    passed: Batch,
}

/// Writes one queue's lines.
#[derive(Debug)]
struct Pen {
    trace: Trace,
    queue: u32,
    sequence: u64,
    text: String,
}

impl Pen {
    fn begin(&mut self, now: Nanos, action: char) {
        self.sequence += 1;
        let (seconds, nanos) = (now.0 / 1_000_000_000, now.0 % 1_000_000_000);
        let _ = write!(
            self.text,
            "{LINE_START}{:4} {:8} {seconds:5}.{nanos:09} {:5} {action:>2} ",
            self.queue, self.sequence, 0
        );
    }

    fn issued(&mut self, now: Nanos, started: &Started) {
        self.begin(now, 'D');
        let letters = letters(started.op(), started.flags());
        let (sector, sectors, tag) = (started.sector(), started.sectors(), started.tag().0);
        let _ = writeln!(self.text, "{letters:>4} {sector} + {sectors} [tag {tag}]");
    }

    fn completed(&mut self, now: Nanos, done: &CompletionBatch, from: usize) {
        for index in from..done.len() {
            let Some((op, tag, status)) = done.get(index) else { break };
            self.begin(now, 'C');
            let letters = letters(op, Flags::NONE);
            let _ = writeln!(self.text, "{letters:>4} [tag {}] {status}", tag.0);
        }
        if self.text.len() >= CHUNK_BYTES {
            self.hand_on();
        }
    }

    fn hand_on(&mut self) {
        self.trace.write(&self.text);
        self.text.clear();
    }
}

impl Drop for Pen {
    fn drop(&mut self) {
        self.hand_on();
    }
}

/// `blkparse`'s letters for an operation; a zone operation has Z and a second letter.
fn letters(op: Op, flags: Flags) -> String {
    let mut letters = String::from(match op {
        Op::Read => "R",
        Op::Write => "W",
        Op::Flush => "F",
        Op::Discard => "D",
        Op::WriteZeroes => "WZ",
        Op::ZoneAppend => "ZA",
        Op::ZoneReset => "ZR",
        Op::ZoneResetAll => "ZRA",
        Op::ZoneOpen => "ZO",
        Op::ZoneClose => "ZC",
        Op::ZoneFinish => "ZF",
    });
    if flags.contains(Flags::FUA) {
        letters.push('F');
    }
    if flags.contains(Flags::SYNC) {
        letters.push('S');
    }
    letters
}

impl<Q: DeviceQueue> DeviceQueue for TracedQueue<Q> {
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        let mut room = self.inner.room();
        while room > 0
            && let Some(started) = batch.next()
        {
            self.pen.issued(now, &started);
            self.passed.push(started);
            room -= 1;
        }
        let before = done.len();
        self.inner.start(now, &mut self.passed, done);
        batch.requeue_all(&mut self.passed);
        self.pen.completed(now, done, before);
    }

    fn poll(&mut self, now: Nanos, done: &mut CompletionBatch) {
        let before = done.len();
        self.inner.poll(now, done);
        self.pen.completed(now, done, before);
    }

    fn room(&self) -> usize {
        self.inner.room()
    }

    fn due(&self) -> Due {
        self.inner.due()
    }

    #[inline]
    fn is_immediate(&mut self) -> bool {
        self.inner.is_immediate()
    }

    #[inline]
    fn waits_for_others(&self) -> bool {
        self.inner.waits_for_others()
    }

    fn descriptor(&mut self) -> Option<RawFd> {
        self.inner.descriptor()
    }

    fn may_sleep(&mut self) -> bool {
        self.inner.may_sleep()
    }

    fn sleep<C: Clock>(&mut self, until: Due, clock: &C) {
        self.inner.sleep(until, clock);
    }

    fn abort(&mut self, done: &mut CompletionBatch) {
        self.inner.abort(done);
    }
}
