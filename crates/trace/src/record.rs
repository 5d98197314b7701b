//! Records a trace: drains what the queues of a device have recorded, sorts it, and prints it in
//! blktrace's format.
//!
//! The events of one queue arrive in the order in which it recorded them, and the submission of a
//! bio with its request. The writer keeps events for [`WINDOW`], to print them in the order of
//! time; one that arrives later than that is printed out of order, and counted.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::io::{self, Write};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use blockyard_core::clock::{Clock, Monotonic};
use blockyard_core::middleware::{LostEvents, Recording, TraceEvent, TraceKind, TraceSource};
use blockyard_core::{Flags, Nanos, Op, SECTOR_BYTES};
use serde::{Deserialize, Serialize};

use crate::format::{HEAD_BYTES, TraceRecord, category, code};
use crate::operation::IN_DATA;

/// The device number of all traces: 240:0, which Linux reserves for local use.
const DEVICE: u32 = 240 << 20;

/// How long events are kept to be sorted.
const WINDOW: Duration = Duration::from_secs(1);

/// Most events that are kept to be sorted: about 16 MiB.
const SORTED_MAX: usize = 1 << 18;

/// The longest sleep of the writer.
const SLEEP: Duration = Duration::from_millis(10);

/// How often printed events are passed on, so that a reader of a pipe sees them.
const FLUSH_INTERVAL: Duration = Duration::from_millis(200);

/// Bytes kept free below the size limit, for the messages at the end.
const END_BYTES: u64 = 1024;

/// Most names of threads that are looked up in one trace.
const THREADS_MAX: usize = 4096;

/// The longest length that fits into an event, in sectors: whole blocks of 4 KiB.
const SECTORS_MAX: u64 = (u32::MAX as u64 / 4096) * 4096 / SECTOR_BYTES;

/// How the text of a message about lost events begins and ends.
const LOST: (&str, &str) = ("blockyard: lost ", " events");

/// What recorders ask the system for.
pub const SOURCE: TraceSource = TraceSource { thread_id, now: || Monotonic.now() };

/// The number by which the system knows the calling thread.
fn thread_id() -> u32 {
    thread_local! {
        static NUMBER: Cell<u32> = const { Cell::new(0) };
    }
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned());
        }
        number.get()
    })
}

/// When a trace ends by itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct RecordLimits {
    /// How long it lasts at most.
    pub duration: Option<Duration>,
    /// How long its file is at most, in bytes.
    pub bytes_max: Option<u64>,
}

/// Why a trace has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceEnd {
    /// It was stopped.
    Stopped,
    /// The time of the trace was over.
    Duration,
    /// The file has reached its size limit.
    Size,
    /// The device was closed.
    DeviceClosed,
}

impl TraceEnd {
    fn text(self) -> &'static str {
        match self {
            TraceEnd::Stopped => "stopped",
            TraceEnd::Duration => "at the end of its duration",
            TraceEnd::Size => "at its size limit",
            TraceEnd::DeviceClosed => "the device was closed",
        }
    }
}

/// What a trace contains.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct TraceTally {
    /// Events of requests.
    pub events: u64,
    /// Bios that clients submitted (Q).
    pub queued: u64,
    /// Requests that were issued to the device (D).
    pub issued: u64,
    /// Requests that have completed (C).
    pub completed: u64,
    /// Bios that were merged into a request (M).
    pub merged: u64,
    /// Cuts of bios above the device's limits (X).
    pub split: u64,
    /// Requests that the device did not start at once (R).
    pub requeued: u64,
    /// Completions with an error.
    pub errors: u64,
    /// Events that did not fit into the memory for them.
    pub lost: u64,
    /// Length of the trace in bytes.
    pub bytes: u64,
}

impl TraceTally {
    /// Counts an event of a trace.
    pub fn add(&mut self, record: &TraceRecord) {
        self.bytes += (HEAD_BYTES + record.pdu.len()) as u64;
        let mut code = record.code & !code::CGROUP;
        let mut error = u64::from(record.error);
        if record.is_note() {
            let Some(message) = record.message() else { return };
            if let Some(text) = message.strip_prefix(LOST.0)
                && let Some((count, _)) = text.split_once(LOST.1)
            {
                self.lost = self.lost.saturating_add(count.parse().unwrap_or(0));
                return;
            }
            let Some(zone) = ZoneMessage::parse(message) else { return };
            (code, error) = (zone.code, zone.errno);
        }
        self.events += 1;
        match code {
            code::QUEUE => self.queued += 1,
            code::ISSUE => self.issued += 1,
            code::COMPLETE => {
                self.completed += 1;
                self.errors += u64::from(error != 0);
            }
            code::BACK_MERGE | code::FRONT_MERGE => self.merged += 1,
            code::SPLIT => self.split += 1,
            code::REQUEUE => self.requeued += 1,
            _ => {}
        }
    }
}

/// An operation on zones, which version 7 has no category for, as the text of a message:
/// `zone_reset Q 524288`, with ` error 5` at the end of a completion that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneMessage {
    /// The operation.
    pub op: Op,
    /// What has happened to it, one of [`code`].
    pub code: u16,
    /// The start of the zone.
    pub sector: u64,
    /// The error number of a completion; 0 for none.
    pub errno: u64,
}

/// The letters of the events that messages tell of.
const LETTERS: [(&str, u16); 6] = [
    ("Q", code::QUEUE),
    ("G", code::GET_REQUEST),
    ("I", code::INSERT),
    ("D", code::ISSUE),
    ("R", code::REQUEUE),
    ("C", code::COMPLETE),
];

impl ZoneMessage {
    /// Reads the text of a message; `None` if it is another text.
    pub fn parse(text: &str) -> Option<ZoneMessage> {
        let mut words = text.split(' ');
        let name = words.next()?;
        let op = Op::from_name(name).filter(|op| op.is_zone_mgmt() && op.name() == name)?;
        let letter = words.next()?;
        let (_, code) = LETTERS.into_iter().find(|(other, _)| *other == letter)?;
        let sector = words.next()?.parse().ok()?;
        let errno = match (words.next(), words.next(), words.next()) {
            (None, ..) => 0,
            (Some("error"), Some(errno), None) => errno.parse().ok()?,
            _ => return None,
        };
        Some(ZoneMessage { op, code, sector, errno })
    }

    /// The text of the message.
    pub fn text(&self) -> String {
        let letter = LETTERS.iter().find(|(_, code)| *code == self.code);
        let letter = letter.map_or("Q", |(letter, _)| letter);
        let text = format!("{} {letter} {}", self.op, self.sector);
        if self.errno == 0 { text } else { format!("{text} error {}", self.errno) }
    }
}

/// Records a trace until it is stopped, a limit is reached, `is_closed` says that the device was
/// closed, or `out` fails. `title` says what is recorded.
///
/// # Errors
/// If `out` fails.
pub fn write_trace(
    recording: &Recording,
    title: &str,
    limits: RecordLimits,
    is_closed: impl Fn() -> bool,
    out: &mut impl Write,
) -> io::Result<(TraceEnd, TraceTally)> {
    let start = Instant::now();
    let mut printer = TracePrinter::new(out, limits.bytes_max);
    printer.begin(title)?;
    let (mut events, mut lost, mut flushed) = (Vec::new(), Vec::new(), start);
    let (mut sorter, mut threads) = (Sorter::default(), Threads::default());
    let ended = loop {
        recording.recorder().wait(SLEEP);
        let ended = match () {
            // First: a device that is closed stops its trace.
            () if is_closed() => Some(TraceEnd::DeviceClosed),
            () if recording.recorder().is_stopped() => Some(TraceEnd::Stopped),
            () if limits.duration.is_some_and(|duration| start.elapsed() >= duration) => {
                Some(TraceEnd::Duration)
            }
            () => None,
        };
        if ended.is_some() {
            recording.detach();
        }
        let mut print = |sorter: &mut Sorter, threads: &mut Threads, until| {
            while let Some(event) = sorter.next(until) {
                if let Some(name) = threads.take_name(event.thread) {
                    printer.thread(&event, name)?;
                }
                printer.event(&event)?;
            }
            io::Result::Ok(())
        };
        // After a slow write all rings may be full: those above SORTED_MAX are printed meanwhile.
        let mut position = Some(0);
        while let Some(at) = position {
            position = recording.recorder().drain(at, &mut events, &mut lost);
            for event in events.drain(..) {
                threads.meet(event.thread);
                sorter.add(event);
            }
            print(&mut sorter, &mut threads, 0)?;
        }
        let until = match ended {
            Some(_) => u64::MAX,
            None => Monotonic.now().0.saturating_sub(WINDOW.as_nanos() as u64),
        };
        print(&mut sorter, &mut threads, until)?;
        for lost in lost.drain(..) {
            printer.lost(lost)?;
        }
        if printer.is_full {
            break TraceEnd::Size;
        }
        if let Some(ended) = ended {
            break ended;
        }
        if flushed.elapsed() >= FLUSH_INTERVAL {
            printer.flush()?;
            flushed = Instant::now();
        }
    };
    recording.detach();
    printer.end(ended, sorter.late)?;
    Ok((ended, printer.tally))
}

/// Events by time, and those of one time in the order of their arrival.
#[derive(Debug, Default)]
struct Sorter {
    heap: BinaryHeap<Reverse<Arrived>>,
    arrived: u64,
    /// The time of the last event that was returned.
    last: Nanos,
    /// Events that arrived after a later one was returned.
    late: u64,
}

#[derive(Debug)]
struct Arrived {
    number: u64,
    event: TraceEvent,
}

impl Arrived {
    fn key(&self) -> (Nanos, u64) {
        (self.event.at, self.number)
    }
}

impl PartialEq for Arrived {
    fn eq(&self, other: &Arrived) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Arrived {}

impl PartialOrd for Arrived {
    fn partial_cmp(&self, other: &Arrived) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Arrived {
    fn cmp(&self, other: &Arrived) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

impl Sorter {
    fn add(&mut self, event: TraceEvent) {
        self.late += u64::from(event.at < self.last);
        self.heap.push(Reverse(Arrived { number: self.arrived, event }));
        self.arrived += 1;
    }

    /// The next event, if it is older than `until_ns` or there are too many.
    fn next(&mut self, until_ns: u64) -> Option<TraceEvent> {
        let Reverse(first) = self.heap.peek()?;
        if first.event.at.0 >= until_ns && self.heap.len() <= SORTED_MAX {
            return None;
        }
        let Reverse(Arrived { event, .. }) = self.heap.pop()?;
        self.last = self.last.max(event.at);
        Some(event)
    }
}

/// The names of the threads that record events, read when the first event of a thread arrives: it
/// may have ended before the event is printed.
#[derive(Debug, Default)]
struct Threads {
    met: BTreeSet<u32>,
    /// Names that were not printed yet.
    names: BTreeMap<u32, [u8; 16]>,
    last: u32,
}

impl Threads {
    fn meet(&mut self, thread: u32) {
        if thread == self.last || self.met.len() >= THREADS_MAX {
            return;
        }
        self.last = thread;
        if self.met.insert(thread)
            && let Ok(comm) = std::fs::read(format!("/proc/self/task/{thread}/comm"))
        {
            let (mut name, comm) = ([0; 16], comm.trim_ascii_end());
            // The kernel's names have at most 15 bytes.
            let len = comm.len().min(name.len() - 1);
            name[..len].copy_from_slice(&comm[..len]);
            self.names.insert(thread, name);
        }
    }

    fn take_name(&mut self, thread: u32) -> Option<[u8; 16]> {
        if self.names.is_empty() { None } else { self.names.remove(&thread) }
    }
}

/// Prints events.
struct TracePrinter<'o, W> {
    out: &'o mut W,
    bytes_max: u64,
    /// The next event did not fit below the size limit.
    is_full: bool,
    /// The next sequence number of each queue.
    sequences: Vec<u32>,
    /// The time of the last event.
    time_ns: u64,
    bytes: Vec<u8>,
    record: TraceRecord,
    tally: TraceTally,
}

impl<'o, W: Write> TracePrinter<'o, W> {
    fn new(out: &'o mut W, bytes_max: Option<u64>) -> TracePrinter<'o, W> {
        TracePrinter {
            out,
            bytes_max: bytes_max.unwrap_or(u64::MAX),
            is_full: false,
            sequences: Vec::new(),
            time_ns: Monotonic.now().0,
            bytes: Vec::new(),
            record: TraceRecord::default(),
            tally: TraceTally::default(),
        }
    }

    /// Prints the time of day, as blktrace does, and what is recorded.
    fn begin(&mut self, title: &str) -> io::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut pdu = (now.as_secs() as u32).to_le_bytes().to_vec();
        pdu.extend(now.subsec_nanos().to_le_bytes());
        self.note(code::NOTE_TIMESTAMP, 0, 0, &pdu)?;
        self.message(0, &format!("blockyard: {title}"))?;
        self.flush()
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// Prints the event in `self.record`, unless it is too long for the limit.
    fn print(&mut self, is_end: bool) -> io::Result<()> {
        let reserve = if is_end { 0 } else { END_BYTES };
        let len = (HEAD_BYTES + self.record.pdu.len()) as u64;
        if self.is_full && !is_end || self.tally.bytes + len + reserve > self.bytes_max {
            self.is_full = true;
            return Ok(());
        }
        let cpu = self.record.cpu as usize;
        if self.sequences.len() <= cpu {
            self.sequences.resize(cpu + 1, 0);
        }
        self.sequences[cpu] = self.sequences[cpu].wrapping_add(1);
        self.record.sequence = self.sequences[cpu];
        self.record.device = DEVICE;
        self.tally.add(&self.record);
        self.bytes.clear();
        self.record.print(&mut self.bytes);
        self.out.write_all(&self.bytes)
    }

    fn note(&mut self, code: u16, cpu: u32, pid: u32, pdu: &[u8]) -> io::Result<()> {
        self.fill_note(code, cpu, pid, pdu);
        self.print(false)
    }

    fn fill_note(&mut self, code: u16, cpu: u32, pid: u32, pdu: &[u8]) {
        let record = &mut self.record;
        (record.time_ns, record.code, record.categories) = (self.time_ns, code, category::NOTIFY);
        (record.sector, record.bytes, record.error) = (0, 0, 0);
        (record.cpu, record.pid) = (cpu, pid);
        record.pdu.clear();
        record.pdu.extend_from_slice(pdu);
    }

    fn message(&mut self, cpu: u32, text: &str) -> io::Result<()> {
        self.note(code::NOTE_MESSAGE, cpu, 0, text.as_bytes())
    }

    fn lost(&mut self, LostEvents { queue, count }: LostEvents) -> io::Result<()> {
        let (start, end) = LOST;
        match queue {
            Some(queue) => self.message(queue, &format!("{start}{count}{end} of queue {queue}")),
            None => self.message(0, &format!("{start}{count}{end} of further queues")),
        }
    }

    fn end(&mut self, ended: TraceEnd, late: u64) -> io::Result<()> {
        if late > 0 {
            let text = format!("blockyard: {late} events are out of order");
            self.fill_note(code::NOTE_MESSAGE, 0, 0, text.as_bytes());
            self.print(true)?;
        }
        let text = format!("blockyard: the trace has ended: {}", ended.text());
        self.fill_note(code::NOTE_MESSAGE, 0, 0, text.as_bytes());
        self.print(true)?;
        self.flush()
    }

    /// Prints the name of a thread before its first event.
    fn thread(&mut self, event: &TraceEvent, name: [u8; 16]) -> io::Result<()> {
        self.time_ns = event.at.0;
        self.note(code::NOTE_PROCESS, event.queue, event.thread, &name)
    }

    fn event(&mut self, event: &TraceEvent) -> io::Result<()> {
        // Notes have the time of an event near them.
        self.time_ns = event.at.0;
        if event.op.is_zone_mgmt() {
            let errno = event.status.errno().unsigned_abs().into();
            let (op, code, sector) = (event.op, code_of(event.kind).0, event.sector.0);
            let text = ZoneMessage { op, code, sector, errno }.text();
            return self.note(code::NOTE_MESSAGE, event.queue, event.thread, text.as_bytes());
        }
        let (mut sector, mut left) = (event.sector.0, event.sectors);
        loop {
            let sectors = left.min(SECTORS_MAX);
            self.fill_event(event, sector, sectors);
            self.print(false)?;
            (sector, left) = (sector + sectors, left - sectors);
            // Of a bio that is too long for an event, the next event has the rest. A request has
            // one event, so that its issue is found by its completion.
            if left == 0 || event.kind != TraceKind::Queue {
                return Ok(());
            }
        }
    }

    fn fill_event(&mut self, event: &TraceEvent, sector: u64, sectors: u64) {
        let record = &mut self.record;
        let (code, of_kind) = code_of(event.kind);
        record.time_ns = event.at.0;
        (record.code, record.categories) = (code, of_kind | categories(event.op, event.flags));
        record.sector = sector;
        record.bytes = (sectors * SECTOR_BYTES) as u32;
        (record.cpu, record.pid) = (event.queue, event.thread);
        // As Linux stores it: the negative number, in 16 bits.
        record.error = (-event.status.errno()) as u16;
        record.pdu.clear();
        if event.kind == TraceKind::Split {
            record.pdu.extend_from_slice(&(sector + sectors).to_be_bytes());
        } else if IN_DATA.contains(&event.op) {
            record.pdu.extend_from_slice(event.op.name().as_bytes());
        }
    }
}

/// The code and the category of a kind of event.
fn code_of(kind: TraceKind) -> (u16, u64) {
    match kind {
        TraceKind::Queue => (code::QUEUE, category::QUEUE),
        TraceKind::Split => (code::SPLIT, 0),
        TraceKind::GetRequest => (code::GET_REQUEST, category::QUEUE),
        TraceKind::Merge => (code::BACK_MERGE, category::QUEUE),
        TraceKind::Insert => (code::INSERT, category::QUEUE),
        TraceKind::Issue => (code::ISSUE, category::ISSUE | category::FS),
        TraceKind::Requeue => (code::REQUEUE, category::REQUEUE | category::FS),
        TraceKind::Complete => (code::COMPLETE, category::COMPLETE | category::FS),
    }
}

/// The categories of an operation.
pub(crate) fn categories(op: Op, flags: Flags) -> u64 {
    let mut categories = match op {
        Op::Read => category::READ,
        Op::Flush => category::WRITE | category::FLUSH,
        Op::Discard => category::WRITE | category::DISCARD,
        _ => category::WRITE,
    };
    for (flag, category) in [
        (Flags::PREFLUSH, category::FLUSH),
        (Flags::FUA, category::FUA),
        (Flags::SYNC, category::SYNC),
    ] {
        if flags.contains(flag) {
            categories |= category;
        }
    }
    categories
}

#[cfg(test)]
mod tests {
    use blockyard_core::{Sector, Status};

    use super::*;

    fn event_at(at_ns: u64) -> TraceEvent {
        TraceEvent {
            at: Nanos(at_ns),
            sector: Sector(0),
            sectors: 8,
            thread: 1,
            queue: 0,
            kind: TraceKind::Queue,
            op: Op::Read,
            flags: Flags::NONE,
            status: Status::Ok,
        }
    }

    #[test]
    fn events_are_sorted_and_late_ones_counted() {
        let mut sorter = Sorter::default();
        [5, 3, 9, 3].into_iter().for_each(|at| sorter.add(event_at(at)));
        let until = |sorter: &mut Sorter, until| {
            std::iter::from_fn(|| sorter.next(until)).map(|event| event.at.0).collect::<Vec<_>>()
        };
        assert_eq!(until(&mut sorter, 6), [3, 3, 5]);
        assert_eq!(sorter.late, 0);
        sorter.add(event_at(4));
        sorter.add(event_at(5));
        assert_eq!(sorter.late, 1, "5 is not before 5");
        assert_eq!(until(&mut sorter, u64::MAX), [4, 5, 9]);
    }

    #[test]
    fn no_more_events_than_the_limit_are_kept() {
        let mut sorter = Sorter::default();
        (0..SORTED_MAX as u64 + 3).for_each(|at| sorter.add(event_at(at)));
        let printed: Vec<u64> =
            std::iter::from_fn(|| sorter.next(0)).map(|event| event.at.0).collect();
        assert_eq!((printed, sorter.heap.len()), (vec![0, 1, 2], SORTED_MAX));
    }

    /// A reader of a trace counts the events that its messages name as lost.
    #[test]
    fn lost_events_are_in_the_tally_of_the_trace() {
        let mut bytes = Vec::new();
        let mut printer = TracePrinter::new(&mut bytes, None);
        for (queue, count) in [(Some(1), 7), (None, 5)] {
            printer.lost(LostEvents { queue, count }).unwrap();
        }
        assert_eq!(printer.tally.lost, 12);
        let (mut tally, mut record) = (TraceTally::default(), TraceRecord::default());
        let mut reader = crate::TraceReader::new(&bytes[..]);
        while reader.read(&mut record).unwrap() {
            tally.add(&record);
        }
        assert_eq!((tally.lost, tally.events), (12, 0));
    }

    #[test]
    fn zone_operations_are_messages() {
        for text in ["zone_reset Q 524288", "zone_reset_all D 0", "zone_open C 8 error 5"] {
            assert_eq!(ZoneMessage::parse(text).unwrap().text(), text);
        }
        for text in [
            "",
            "zone_reset",
            "zone_reset Q",
            "zone_reset Z 8",
            "zone_reset Q -8",
            "write Q 8",
            "ZONE_RESET Q 8",
            "zone_reset C 8 error",
            "zone_reset C 8 error 5 6",
        ] {
            assert_eq!(ZoneMessage::parse(text), None, "{text}");
        }
    }
}
