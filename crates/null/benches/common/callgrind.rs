//! Counts the instructions of benches by valgrind's tool callgrind, and compares the counts with
//! `instructions.txt`.
//!
//! The program runs itself under valgrind, once for each bench: `PROGRAM --count NAME`. Callgrind
//! collects only while the function `COLLECTED` of the program runs, which is [`collected`] unless
//! another thread does the work. So the set-up does not count. The count of one program does not
//! vary, so one run is enough.

use std::env;
use std::hint::black_box;
use std::process::{Command, ExitCode};

use super::{BATCH, BATCHES, COLLECTED};

/// Tolerance above the recorded count, in percent.
const SLACK_PERCENT: u64 = 5;

/// The recorded counts: a name and instructions per I/O in each line.
const RECORDED: &str = include_str!("../instructions.txt");

/// A bench of [`BATCH`] times [`BATCHES`] I/Os.
pub(crate) struct Bench {
    name: &'static str,
    run: Box<dyn Fn()>,
}

/// A bench with its name in `instructions.txt`: counts `measured`, but not `setup`, which makes its
/// argument.
pub(crate) fn bench<T: 'static>(
    name: &'static str,
    setup: fn() -> T,
    measured: fn(T) -> T,
) -> Bench {
    Bench { name, run: Box::new(move || drop(collected(measured, setup()))) }
}

/// The measured part of a bench, with a name that callgrind can find.
#[inline(never)]
fn collected<T>(measured: fn(T) -> T, input: T) -> T {
    black_box(measured(black_box(input)))
}

/// The `main` of a program of benches: counts all of them, prints the counts, and fails if a count
/// is too high.
pub(crate) fn run(benches: &[Bench]) -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let [option, name] = &arguments[..]
        && option == "--count"
    {
        let bench = benches.iter().find(|bench| bench.name == name);
        (bench.expect("the program names its own benches").run)();
        return ExitCode::SUCCESS;
    }
    let mut too_many = 0;
    for Bench { name, .. } in benches {
        let (count, recorded, ios) = (count(name), recorded(name), BATCH * BATCHES);
        let limit = recorded * ios * (100 + SLACK_PERCENT) / 100;
        let verdict = if count > limit { "FAILED" } else { "ok" };
        println!("{name}: {} instructions per I/O, {recorded} recorded: {verdict}", count / ios);
        too_many += u8::from(count > limit);
    }
    ExitCode::from(too_many)
}

/// The instructions of a bench.
fn count(name: &str) -> u64 {
    let program = env::current_exe().expect("Linux knows the path of a program");
    let output = Command::new("valgrind")
        // The environment lies on the stack, and moves what follows it.
        .env_clear()
        .envs(env::var_os("PATH").map(|path| ("PATH", path)))
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg("--collect-atstart=no")
        .arg(format!("--toggle-collect={COLLECTED}"))
        .arg(program)
        .args(["--count", name])
        .output()
        .unwrap_or_else(|error| panic!("cannot run valgrind: {error}; install valgrind"));
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find_map(|line| line.split_once("Collected :"));
    let count = line.and_then(|(_, count)| count.trim().parse().ok());
    match count {
        // A program in which callgrind does not find the function collects nothing.
        Some(count) if output.status.success() && count > 0 => count,
        _ => panic!("invalid output of valgrind for {name}: expected a count: {text}"),
    }
}

/// The count that `instructions.txt` records for a bench.
fn recorded(name: &str) -> u64 {
    let line = RECORDED.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let count = line.and_then(|count| count.trim().parse().ok());
    count.unwrap_or_else(|| panic!("instructions.txt has no line for {name}"))
}
