//! The experiment `limits`: the best that this machine can do.
//!
//! Each limit is a variant, named in [`names`], under the workload of its group. Code that reports
//! a figure as a fraction of a limit finds the limit by its name.

use std::time::Duration;

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Experiment, Variant, VariantRole, Workload};
use crate::limits::atomic::{self, Update};
use crate::limits::slices::LimitReading;
use crate::limits::{fio, locks, memory, sockets, uring, wake};
use crate::sample::Round;

/// The experiment's name on the command line.
pub const NAME: &str = "limits";

/// The names of the limits, for code that reports a figure as a fraction of one.
pub mod names {
    /// A copy of 4 KiB within the nearest cache.
    pub const COPY_HOT: &str = "copy-4k-hot";
    /// A copy of 4 KiB from random offsets of 16 MiB.
    pub const COPY_16M: &str = "copy-4k-16m";
    /// A copy of 4 KiB from random offsets of 1 GiB.
    pub const COPY_1G: &str = "copy-4k-1g";
    /// Sequential copies of a large buffer.
    pub const COPY_STREAM: &str = "copy-stream";
    /// `fetch_add` on an atomic.
    pub const FETCH_ADD: &str = "fetch-add";
    /// `compare_exchange` on an atomic, repeated until it succeeds.
    pub const COMPARE_EXCHANGE: &str = "compare-exchange";
    /// The time from a store on one processor until another processor sees it.
    pub const LINE_TRANSFER: &str = "line-transfer";
    /// The product's spin lock.
    pub const SPIN_LOCK: &str = "spin-lock";
    /// The product's spin lock, taken by two threads strictly in turn.
    pub const SPIN_HAND_OVER: &str = "spin-lock-hand-over";
    /// The product's sleeping lock.
    pub const SLEEP_LOCK: &str = "sleep-lock";
    /// The product's sleeping lock, taken by two threads strictly in turn.
    pub const SLEEP_HAND_OVER: &str = "sleep-lock-hand-over";
    /// The standard library's mutex.
    pub const STD_MUTEX: &str = "std-mutex";
    /// The standard library's mutex, taken by two threads strictly in turn.
    pub const STD_HAND_OVER: &str = "std-mutex-hand-over";
    /// The pause between two loads of a held lock.
    pub const PAUSE: &str = "pause";
    /// The time from one thread's wake until another wakes from a futex.
    pub const FUTEX_WAKE: &str = "futex-wake";
    /// The waker's system call.
    pub const FUTEX_CALL: &str = "futex-call";
    /// The time from one thread's write until another wakes from reading an eventfd.
    pub const EVENTFD: &str = "eventfd";
    /// A yield with no other thread to run.
    pub const YIELD: &str = "yield";
    /// A switch between two threads of one processor.
    pub const CONTEXT_SWITCH: &str = "context-switch";
    /// One reading of the clock.
    pub const CLOCK: &str = "clock";
    /// A no-op of io_uring, one per system call.
    pub const URING_1: &str = "io-uring-nop-1";
    /// A no-op of io_uring, 32 per system call.
    pub const URING_32: &str = "io-uring-nop-32";
    /// Half a round trip over a unix socket.
    pub const UNIX_SOCKET: &str = "unix-socket";
    /// Half a round trip over TCP on 127.0.0.1.
    pub const TCP_LOOPBACK: &str = "tcp-loopback";
    /// The CPU time of an I/O of fio's null engine at depth 1.
    pub const FIO_NULL_1: &str = "fio-null-1";
    /// The CPU time of an I/O of fio's null engine at depth 64 in batches.
    pub const FIO_NULL_64: &str = "fio-null-64";
}

const MEMORY: &str = "memory";
const ATOMICS: &str = "atomics";
const LOCKS: &str = "locks";
const WAKING: &str = "waking";
const CALLS: &str = "calls";
const SOCKETS: &str = "sockets";
const FIO: &str = "fio";

/// Measures one limit once.
type Measure = fn(&Round<'_>) -> Result<LimitReading, LabError>;

/// A limit: its name, group, number of threads, a line of description, and its measurement.
type Limit = (&'static str, &'static str, u32, &'static str, Measure);

/// All limits. A new one needs a name above and a row here.
const LIMITS: &[Limit] = &[
    (names::COPY_HOT, MEMORY, 1, "copy of 4 KiB within the L1 cache", memory::copy_hot),
    (names::COPY_16M, MEMORY, 1, "copy of 4 KiB from random offsets in 16 MiB", |round| {
        memory::copy_random(round, 16 << 20)
    }),
    (names::COPY_1G, MEMORY, 1, "copy of 4 KiB from random offsets in 1 GiB", |round| {
        memory::copy_random(round, 1 << 30)
    }),
    (
        names::COPY_STREAM,
        MEMORY,
        1,
        "copies of 1 MiB, sequentially through 256 MiB",
        memory::copy_stream,
    ),
    (names::FETCH_ADD, ATOMICS, 1, "fetch_add of one atomic", |round| {
        atomic::uncontended(round, Update::Add)
    }),
    (names::FETCH_ADD, ATOMICS, 2, "fetch_add of one atomic", |round| {
        atomic::contended(round, Update::Add)
    }),
    (names::COMPARE_EXCHANGE, ATOMICS, 1, "compare_exchange of one atomic", |round| {
        atomic::uncontended(round, Update::Exchange)
    }),
    (names::COMPARE_EXCHANGE, ATOMICS, 2, "compare_exchange of one atomic", |round| {
        atomic::contended(round, Update::Exchange)
    }),
    (names::LINE_TRANSFER, ATOMICS, 2, "a store until another CPU sees it", atomic::line_transfer),
    (names::SPIN_LOCK, LOCKS, 1, "our spin lock", locks::uncontended::<locks::Spin>),
    (names::SPIN_LOCK, LOCKS, 2, "our spin lock", |round| {
        locks::contended::<locks::Spin>(round, false)
    }),
    (
        names::SPIN_HAND_OVER,
        LOCKS,
        2,
        "our spin lock, taken by two threads in turn",
        locks::hand_over::<locks::Spin>,
    ),
    (names::SLEEP_LOCK, LOCKS, 1, "our sleeping lock", locks::uncontended::<locks::Sleep>),
    (names::SLEEP_LOCK, LOCKS, 2, "our sleeping lock", |round| {
        locks::contended::<locks::Sleep>(round, true)
    }),
    (
        names::SLEEP_HAND_OVER,
        LOCKS,
        2,
        "our sleeping lock, taken by two threads in turn",
        locks::hand_over::<locks::Sleep>,
    ),
    (names::STD_MUTEX, LOCKS, 1, "std::sync::Mutex", locks::uncontended::<locks::Standard>),
    (names::STD_MUTEX, LOCKS, 2, "std::sync::Mutex", |round| {
        locks::contended::<locks::Standard>(round, true)
    }),
    (
        names::STD_HAND_OVER,
        LOCKS,
        2,
        "std::sync::Mutex, taken by two threads in turn",
        locks::hand_over::<locks::Standard>,
    ),
    (names::PAUSE, LOCKS, 1, "the pause between two loads of a held lock", wake::pause),
    (names::FUTEX_WAKE, WAKING, 2, "futex wake until the sleeping thread runs", wake::futex),
    (names::EVENTFD, WAKING, 2, "eventfd write until its reader runs", wake::eventfd),
    (
        names::CONTEXT_SWITCH,
        WAKING,
        2,
        "switch to another thread on the same CPU",
        wake::context_switch,
    ),
    (names::FUTEX_CALL, CALLS, 1, "futex wake without a sleeping thread", wake::futex_call),
    (names::YIELD, CALLS, 1, "sched_yield with no other thread to run", wake::yield_alone),
    (names::CLOCK, CALLS, 1, "a reading of the monotonic clock", wake::clock),
    (names::URING_1, CALLS, 1, "io_uring no-op, 1 per system call", |round| uring::no_op(round, 1)),
    (names::URING_32, CALLS, 1, "io_uring no-op, 32 per system call", |round| {
        uring::no_op(round, 32)
    }),
    (names::UNIX_SOCKET, SOCKETS, 2, "64 bytes to another thread, unix socket", sockets::unix),
    (names::TCP_LOOPBACK, SOCKETS, 2, "64 bytes to another thread, TCP", sockets::tcp),
    (names::FIO_NULL_1, FIO, 1, "an I/O of fio's null engine, depth 1, CPU time", |round| {
        fio::null_engine(round, 1)
    }),
    (names::FIO_NULL_64, FIO, 1, "an I/O of fio's null engine, depth 64, CPU time", |round| {
        fio::null_engine(round, 64)
    }),
];

/// Lists the experiment's cells. A quick run leaves out fio's figure at depth 1.
pub fn build(settings: &Settings) -> Experiment {
    let listed = |limit: &&Limit| !(settings.quick && limit.0 == names::FIO_NULL_1);
    let mut variants: Vec<Variant> = Vec::new();
    for &(name, _, _, about, _) in LIMITS.iter().filter(listed) {
        if variants.last().is_none_or(|last| last.name != name) {
            variants.push(Variant { name, kind: VariantRole::Limit, about });
        }
    }
    let workload = |name, about| Workload { name, about };
    Experiment {
        name: NAME,
        title: "the upper limits of this machine",
        about: "Time in nanoseconds of one operation, each measured alone. A measurement consists \
                of slices of half a millisecond. Slices in which another process used the CPU are \
                dropped; for operations that sleep, the faster quarter of the slices is used. A \
                time between two threads is half a round trip. With two jobs, two threads on two \
                CPUs work on the same location, and the time is that of both together. The rows of \
                fio are CPU time, all others wall time.",
        published: Vec::new(),
        variants,
        workloads: vec![
            workload(MEMORY, "memory copies"),
            workload(ATOMICS, "one atomic on its own cache line"),
            workload(LOCKS, "a lock that protects one addition"),
            workload(WAKING, "half a round trip between threads that sleep"),
            workload(CALLS, "system calls and clock readings"),
            workload(SOCKETS, "half a round trip of 64 bytes"),
            workload(FIO, "4 KiB random reads by fio's own null engine"),
        ],
        comparisons: Vec::new(),
        plots: Vec::new(),
        cells: LIMITS.iter().filter(listed).map(cell).collect(),
    }
}

/// The cell that measures the limit `name` with `jobs` threads, if there is one.
pub fn find_cell(name: &str, jobs: u32) -> Option<Cell> {
    LIMITS.iter().find(|limit| limit.0 == name && limit.2 == jobs).map(cell)
}

fn cell(&(name, group, jobs, _, measure): &Limit) -> Cell {
    let cell = Cell::new(name, group, jobs, move |round| Ok(measure(round)?.sample()));
    match (group, name) {
        (FIO, _) => cell.overhead(Duration::from_millis(1000)),
        (_, names::COPY_1G) => cell.overhead(Duration::from_millis(400)),
        (_, names::COPY_STREAM) => cell.overhead(Duration::from_millis(200)),
        _ => cell,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::error::LabError;
    use crate::metric::Metric;
    use crate::stop::Stop;

    /// On any machine, a limit is measured or the error says why it was not.
    #[test]
    fn every_limit_gives_a_time_or_a_reason() {
        let stop = Stop::new();
        let round = Round {
            warm_up: Duration::ZERO,
            duration: Duration::from_millis(5),
            number: 0,
            seed: 1,
            stop: &stop,
        };
        for (name, group, jobs, _, measure) in LIMITS {
            if *group == FIO || [names::COPY_1G, names::COPY_STREAM].contains(name) {
                continue;
            }
            match measure(&round) {
                Ok(reading) => assert!(reading.ns_per_op > 0.0, "{name} with {jobs}: {reading:?}"),
                // The machine was too busy for so short a measurement, or has one processor.
                Err(LabError::Failed { what, .. }) if what == "measurement" => {}
                Err(LabError::Missing { what, .. }) if what == "a second processor" => {}
                Err(error) => panic!("{name} with {jobs}: {error}"),
            }
        }
    }

    #[test]
    fn no_limit_is_listed_twice() {
        let mut seen = HashSet::new();
        for (name, _, jobs, _, _) in LIMITS {
            assert!(seen.insert((name, jobs)), "{name} with {jobs} jobs stands twice");
            assert!(find_cell(name, *jobs).is_some());
        }
    }

    #[test]
    fn a_sample_of_copies_has_its_bandwidth() {
        let reading = LimitReading { bytes_per_op: 4096.0, ..LimitReading::of(1024.0) };
        assert_eq!(reading.sample().values[1], (Metric::BANDWIDTH, 4e9));
    }
}
