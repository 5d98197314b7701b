//! Two threads on two processors: their operations on shared memory at once, and in turns.
#![allow(unsafe_code)]
#![allow(clippy::disallowed_types, reason = "atomics are what is measured here")]

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use blockyard_sync::pad::Padded;

use crate::error::LabError;
use crate::limits::slices::{
    LimitReading, SLICE_LENGTH, Slice, SliceSpan, batch_of, clock_ns, quicker, thread_cpu_ns,
    undisturbed,
};
use crate::sample::Round;

/// The processors that this process may use, ascending.
fn processors() -> Vec<usize> {
    // SAFETY: an all-zero set is a valid, empty one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a valid set of the given size.
    let answer = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) };
    if answer != 0 {
        return Vec::new();
    }
    let count = libc::CPU_SETSIZE as usize;
    // SAFETY: every number is below the size of the set.
    (0..count).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect()
}

/// Keeps the calling thread on one processor. A refusal only makes the measurement noisier.
fn pin(cpu: usize) {
    // SAFETY: an all-zero set is a valid, empty one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `processors` gave the number, which is below the size of the set.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the set is valid, of the size that is given.
    unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
}

/// The two processors on which a pair runs.
///
/// # Errors
/// If there is only one.
fn two_processors() -> Result<[usize; 2], LabError> {
    match processors()[..] {
        [first, second, ..] => Ok([first, second]),
        _ => Err(LabError::missing("a second processor", "let the process use two (taskset)")),
    }
}

/// The words through which the two threads communicate.
#[derive(Debug, Default)]
struct Board {
    stop: Padded<AtomicBool>,
    /// The id of the second thread's CPU clock; 0 until the thread runs.
    clock: Padded<AtomicI64>,
    /// The operations that the second thread has done.
    ops: Padded<AtomicU64>,
    turns: Padded<AtomicU64>,
}

/// Two threads share the memory if at least one in this many operations follows one of the other
/// thread.
const TURNS_SHARE: u64 = 1000;

/// The number of operations of a batch that followed an operation of the other thread.
pub type Turns = u64;

/// Two threads that run at once, each on a processor of its own. Each of `runs` does the requested
/// number of operations and returns how many of them followed one of the other thread. `sleeps` is
/// set if the threads sleep while they wait. CPU time then does not show whether a slice was
/// disturbed, so only slices count in which both threads had turns.
///
/// # Errors
/// If there is only one processor, the run is interrupted, or the two never ran undisturbed
/// together.
pub fn together(
    round: &Round<'_>,
    sleeps: bool,
    runs: [impl FnMut(u32) -> Turns + Send; 2],
) -> Result<LimitReading, LabError> {
    let [mut first_run, mut second_run] = runs;
    let cpus = two_processors()?;
    let board = Board::default();
    let batch = batch_of(|ops| {
        first_run(ops);
    });
    let mut slices = thread::scope(|scope| {
        let second = thread::Builder::new().name("limits-second".into());
        let spawned = second.spawn_scoped(scope, || {
            second_of_pair(cpus[1], batch, &board, &mut second_run);
        });
        spawned.map_err(LabError::io("starting a second thread"))?;
        let first = thread::Builder::new().name("limits-first".into());
        let first = first.spawn_scoped(scope, || {
            pin(cpus[0]);
            first_of_pair(round, sleeps, batch, &board, &mut first_run)
        });
        let slices = first.map_err(LabError::io("starting a first thread")).and_then(|first| {
            first.join().map_err(|_| LabError::failed("measurement", "its thread panicked"))?
        });
        // Relaxed: the flag publishes no data.
        board.stop.store(true, Ordering::Relaxed);
        slices
    })?;
    if sleeps {
        for slice in &mut slices {
            let shared = slice.turns * TURNS_SHARE >= slice.ops;
            slice.cpu_ns = if shared { slice.wall_ns } else { 0.0 };
        }
    }
    undisturbed(&slices)
}

fn second_of_pair(cpu: usize, batch: u32, board: &Board, run: &mut impl FnMut(u32) -> Turns) {
    pin(cpu);
    let mut clock = 0;
    // SAFETY: the thread is the calling one, and `clock` is a valid pointer for the result.
    if unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) } == 0 {
        // Relaxed: the number publishes no other data.
        board.clock.store(i64::from(clock), Ordering::Relaxed);
    }
    // Small pieces, so that the first thread can read the progress of this one.
    let piece = (batch / 8).max(1);
    // Relaxed, here and below: these are statistics.
    while !board.stop.load(Ordering::Relaxed) {
        let turns = run(piece);
        board.ops.fetch_add(u64::from(piece), Ordering::Relaxed);
        board.turns.fetch_add(turns, Ordering::Relaxed);
    }
}

fn first_of_pair(
    round: &Round<'_>,
    sleeps: bool,
    batch: u32,
    board: &Board,
    run: &mut impl FnMut(u32) -> Turns,
) -> Result<Vec<Slice>, LabError> {
    let span = SliceSpan::begin(round);
    let mut slices = Vec::new();
    while !(if sleeps { span.is_over() } else { span.is_over_with(&slices) }) {
        let counts = span.counts();
        let clock = board.clock.load(Ordering::Relaxed);
        if clock == 0 {
            thread::yield_now();
            continue;
        }
        let clock = clock as libc::clockid_t;
        let (ops_before, turns_before) =
            (board.ops.load(Ordering::Relaxed), board.turns.load(Ordering::Relaxed));
        let (started, own, other) = (Instant::now(), thread_cpu_ns(), clock_ns(clock));
        let (mut ops, mut turns) = (0, 0);
        while started.elapsed() < SLICE_LENGTH {
            turns += run(batch);
            ops += u64::from(batch);
        }
        let (own, other) = (thread_cpu_ns() - own, clock_ns(clock) - other);
        let wall_ns = started.elapsed().as_nanos() as f64;
        ops += board.ops.load(Ordering::Relaxed) - ops_before;
        turns += board.turns.load(Ordering::Relaxed) - turns_before;
        if counts {
            slices.push(Slice { wall_ns, cpu_ns: own.min(other), ops, turns });
        }
    }
    span.check()?;
    Ok(slices)
}

/// The processor of a round trip's second thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairPlacement {
    /// A processor of its own.
    Other,
    /// The first thread's processor: each round trip needs two context switches.
    Same,
}

/// A round trip between two threads. `ask` makes one and `answer` serves one; `answer` ends by
/// returning false. `hang_up` makes the waiting `answer` return.
///
/// The result is the time of half a round trip: from one thread to the other.
///
/// # Errors
/// If there is only one processor, the run is interrupted, or `ask` failed.
pub fn in_turns(
    round: &Round<'_>,
    place: PairPlacement,
    mut ask: impl FnMut() -> Result<(), LabError> + Send,
    mut answer: impl FnMut() -> bool + Send,
    hang_up: impl FnOnce(),
) -> Result<LimitReading, LabError> {
    let cpus = match place {
        PairPlacement::Other => two_processors()?,
        PairPlacement::Same => [processors().first().copied().unwrap_or(0); 2],
    };
    let slices = thread::scope(|scope| {
        let second = thread::Builder::new().name("limits-answer".into());
        let second = second.spawn_scoped(scope, move || {
            pin(cpus[1]);
            while answer() {}
        });
        second.map_err(LabError::io("starting a second thread"))?;
        let first = thread::Builder::new().name("limits-ask".into());
        let first = first.spawn_scoped(scope, || {
            pin(cpus[0]);
            ask_in_slices(round, &mut ask)
        });
        let slices = first.map_err(LabError::io("starting a first thread")).and_then(|first| {
            first.join().map_err(|_| LabError::failed("measurement", "its thread panicked"))?
        });
        hang_up();
        slices
    })?;
    quicker(&slices)
}

fn ask_in_slices(
    round: &Round<'_>,
    ask: &mut impl FnMut() -> Result<(), LabError>,
) -> Result<Vec<Slice>, LabError> {
    let span = SliceSpan::begin(round);
    let mut slices = Vec::new();
    while !span.is_over() {
        let counts = span.counts();
        let started = Instant::now();
        let mut ops = 0;
        while started.elapsed() < SLICE_LENGTH {
            for _ in 0..16 {
                ask()?;
            }
            ops += 32;
        }
        if counts {
            let wall_ns = started.elapsed().as_nanos() as f64;
            slices.push(Slice { wall_ns, cpu_ns: wall_ns, ops, turns: 0 });
        }
    }
    span.check()?;
    Ok(slices)
}
