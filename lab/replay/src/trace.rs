//! A recorded trace: the requests that went into a scheduler and came out of it, with their times;
//! and the text format.
//!
//! The text is a first line, a header of `key value` lines, the line `events`, a line per event,
//! and `end COUNT`. An event is a letter, the microseconds since the event before it, `R`, `W` or
//! `D` (discard), the class (`-` where the kernel does not print it), the first sector and the
//! length:
//!
//! ```text
//! I 0 R be 31616 8       inserted into the scheduler, after the plug
//! i 0 R be 388120 8      inserted in one list with the one before
//! D 3 R be 31616 8       issued to the driver
//! C 90 R be 31616 8      completed
//! Q 1 R be 31616 8       returned by the driver
//! M 0 W be 86544 8       a request that became part of the one before it
//! B 0 W - 86552 8        a bio that joined the request before it
//! F 0 W - 86536 8        a bio that joined the request after it
//! ```

use std::fmt::{self, Write};

use blockyard_core::bio::Prio;

/// The first line: the name and version of the format.
pub const FIRST_LINE: &str = "blockyard deadline trace 1";

/// The operation of a request, as far as a scheduler distinguishes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// A read.
    Read,
    /// A write.
    Write,
    /// A discard, which is scheduled with the writes.
    Discard,
}

impl OpKind {
    /// The letter that stands for it.
    pub const fn letter(self) -> char {
        match self {
            OpKind::Read => 'R',
            OpKind::Write => 'W',
            OpKind::Discard => 'D',
        }
    }

    /// The kind of a letter; `None` for an unknown one.
    pub const fn from_letter(letter: u8) -> Option<OpKind> {
        match letter {
            b'R' => Some(OpKind::Read),
            b'W' => Some(OpKind::Write),
            b'D' => Some(OpKind::Discard),
            _ => None,
        }
    }
}

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// A request was inserted into the scheduler.
    Insert,
    /// A request was inserted in one list with the one before: no decision was made in between.
    InsertMore,
    /// A request went to the driver.
    Issue,
    /// A request completed.
    Complete,
    /// The driver returned a request.
    Requeue,
    /// A request became part of the one before it.
    Merge,
    /// A bio joined the request before it.
    BackMerge,
    /// A bio joined the request after it.
    FrontMerge,
}

impl EventKind {
    const LETTERS: [(EventKind, u8); 8] = [
        (EventKind::Insert, b'I'),
        (EventKind::InsertMore, b'i'),
        (EventKind::Issue, b'D'),
        (EventKind::Complete, b'C'),
        (EventKind::Requeue, b'Q'),
        (EventKind::Merge, b'M'),
        (EventKind::BackMerge, b'B'),
        (EventKind::FrontMerge, b'F'),
    ];

    /// The letter that stands for it.
    pub fn letter(self) -> char {
        let found = EventKind::LETTERS.iter().find(|(what, _)| *what == self);
        char::from(found.expect("every kind of event has a letter").1)
    }

    /// The kind of event of a letter; `None` for an unknown one.
    pub fn from_letter(letter: u8) -> Option<EventKind> {
        EventKind::LETTERS.iter().find(|(_, other)| *other == letter).map(|(what, _)| *what)
    }

    /// Whether the kernel prints no class for it: a bio joins a request that has one.
    pub const fn is_bio(self) -> bool {
        matches!(self, EventKind::BackMerge | EventKind::FrontMerge)
    }
}

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// Microseconds since the first event.
    pub at_us: u64,
    /// The kind of the event.
    pub what: EventKind,
    /// The operation of the request.
    pub kind: OpKind,
    /// The class; none for a bio.
    pub class: Option<Prio>,
    /// The first sector.
    pub sector: u64,
    /// The length in sectors.
    pub sectors: u32,
}

impl TraceEvent {
    /// The first sector after it.
    pub const fn end(&self) -> u64 {
        self.sector + self.sectors as u64
    }

    /// Whether it is of the same request or bio as the other.
    pub fn is_same(&self, other: &TraceEvent) -> bool {
        (self.kind, self.class, self.sector, self.sectors)
            == (other.kind, other.class, other.sector, other.sectors)
    }
}

/// The scheduler's tunables, under the kernel's names and in its units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelTunables {
    /// Milliseconds after which a read has expired.
    pub read_expire: u32,
    /// Milliseconds after which a write has expired.
    pub write_expire: u32,
    /// How many batches of reads go before waiting writes.
    pub writes_starved: u32,
    /// Whether bios join requests at their front.
    pub front_merges: u32,
    /// How many asynchronous requests and writes may be in the scheduler.
    pub async_depth: u32,
    /// Requests of a batch.
    pub fifo_batch: u32,
    /// Milliseconds after which a request of a lower class goes before a higher one.
    pub prio_aging_expire: u32,
}

impl Default for KernelTunables {
    /// The tunables of a loop device whose scheduler was just set.
    fn default() -> KernelTunables {
        KernelTunables {
            read_expire: 500,
            write_expire: 5000,
            writes_starved: 2,
            front_merges: 1,
            async_depth: 256,
            fifo_batch: 16,
            prio_aging_expire: 10_000,
        }
    }
}

impl KernelTunables {
    /// The kernel's names, in the order of its documentation.
    pub const NAMES: [&'static str; 7] = [
        "read_expire",
        "write_expire",
        "writes_starved",
        "front_merges",
        "async_depth",
        "fifo_batch",
        "prio_aging_expire",
    ];

    /// The values in the order of [`KernelTunables::NAMES`].
    pub fn values(&self) -> [u32; 7] {
        [
            self.read_expire,
            self.write_expire,
            self.writes_starved,
            self.front_merges,
            self.async_depth,
            self.fifo_batch,
            self.prio_aging_expire,
        ]
    }

    /// The value with this name.
    pub fn value_mut(&mut self, name: &str) -> Option<&mut u32> {
        Some(match name {
            "read_expire" => &mut self.read_expire,
            "write_expire" => &mut self.write_expire,
            "writes_starved" => &mut self.writes_starved,
            "front_merges" => &mut self.front_merges,
            "async_depth" => &mut self.async_depth,
            "fifo_batch" => &mut self.fifo_batch,
            "prio_aging_expire" => &mut self.prio_aging_expire,
            _ => return None,
        })
    }
}

/// The kernel's tick. Deadlines are counted in ticks, so a replay must know when they occurred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tick {
    /// Microseconds from one to the next.
    pub period_us: u32,
    /// Microseconds from the last one to the first event; below the period.
    pub phase_us: u32,
}

impl Default for Tick {
    /// The tick of a kernel with 250 Hz.
    fn default() -> Tick {
        Tick { period_us: 4000, phase_us: 0 }
    }
}

impl Tick {
    /// The number of ticks up to that time, after the last one before the first event.
    pub const fn count(self, at_us: u64) -> u64 {
        (at_us + self.phase_us as u64) / self.period_us as u64
    }

    /// The number of ticks of `ms` milliseconds; the kernel rounds up.
    pub const fn of_ms(self, ms: u32) -> u64 {
        (ms as u64 * 1000).div_ceil(self.period_us as u64)
    }
}

/// The origin of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TraceHeader {
    /// The workload's name.
    pub workload: String,
    /// The kernel's release.
    pub kernel: String,
    /// The device's name and what lay below it.
    pub device: String,
    /// The device's size in sectors.
    pub sectors: u64,
    /// The number of requests that the driver accepts.
    pub tags: u32,
    /// The number of requests that the scheduler accepts (`nr_requests`).
    pub requests: u32,
    /// The queue's `nomerges`.
    pub nomerges: u32,
    /// The scheduler's tunables.
    pub tunables: KernelTunables,
    /// The kernel's tick.
    pub tick: Tick,
    /// The fio command line that made the load.
    pub fio: String,
}

/// A trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// The origin.
    pub header: TraceHeader,
    /// The events, in order.
    pub events: Vec<TraceEvent>,
}

impl Trace {
    /// The number of requests that went to the driver, which is the number of decisions.
    pub fn issues(&self) -> usize {
        self.events.iter().filter(|event| event.what == EventKind::Issue).count()
    }

    /// The trace as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        self.print(&mut text).expect("a string takes all that is written to it");
        text
    }

    fn print(&self, text: &mut String) -> fmt::Result {
        let TraceHeader {
            workload,
            kernel,
            device,
            sectors,
            tags,
            requests,
            nomerges,
            tick,
            fio,
            ..
        } = &self.header;
        writeln!(text, "{FIRST_LINE}\nworkload {workload}\nkernel {kernel}\ndevice {device}")?;
        writeln!(text, "sectors {sectors}\ntags {tags}\nrequests {requests}")?;
        writeln!(text, "nomerges {nomerges}")?;
        for (name, value) in KernelTunables::NAMES.iter().zip(self.header.tunables.values()) {
            writeln!(text, "{name} {value}")?;
        }
        writeln!(text, "tick {} {}\nfio {fio}\nevents", tick.period_us, tick.phase_us)?;
        let mut last = 0;
        for event in &self.events {
            let TraceEvent { at_us, what, kind, class, sector, sectors } = *event;
            let (what, kind) = (what.letter(), kind.letter());
            let class = class.map_or("-", Prio::name);
            writeln!(text, "{what} {} {kind} {class} {sector} {sectors}", at_us - last)?;
            last = at_us;
        }
        writeln!(text, "end {}", self.events.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_letter_is_read_back() {
        for (what, letter) in EventKind::LETTERS {
            assert_eq!(EventKind::from_letter(letter), Some(what));
            assert_eq!(what.letter(), char::from(letter));
        }
        for kind in [OpKind::Read, OpKind::Write, OpKind::Discard] {
            assert_eq!(OpKind::from_letter(kind.letter() as u8), Some(kind));
        }
        assert_eq!((EventKind::from_letter(b'x'), OpKind::from_letter(b'x')), (None, None));
    }

    #[test]
    fn every_tunable_is_found_by_its_name() {
        let mut tunables = KernelTunables::default();
        for (name, value) in KernelTunables::NAMES.into_iter().zip(tunables.values()) {
            assert_eq!(tunables.value_mut(name).copied(), Some(value), "{name}");
        }
        assert_eq!(tunables.value_mut("fifo"), None);
    }

    #[test]
    fn ticks_are_counted_from_the_one_before_the_first_event() {
        let tick = Tick { period_us: 4000, phase_us: 3000 };
        assert_eq!([0, 999, 1000, 4999, 5000].map(|at| tick.count(at)), [0, 0, 1, 1, 2]);
        assert_eq!([0, 1, 4, 5, 10].map(|ms| tick.of_ms(ms)), [0, 1, 1, 2, 3]);
    }
}
