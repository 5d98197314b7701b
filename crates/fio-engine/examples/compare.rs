//! The engine beside fio's own null engine: CPU time per I/O, rounds interleaved, medians.
//!
//! ```text
//! cargo run -p blockyard-fio-engine --example compare -- target/release/libblockyard_fio-31.so 7
//! ```
//!
//! CPU time, because it holds on a machine that others use too.

use std::process::{Command, ExitCode};

use serde_json::Value;

/// Rounds where none are asked for; fewer than five make no median.
const ROUNDS: usize = 5;

/// What is compared: a name, and what the fio line has more.
const SHAPES: [(&str, &[&str]); 2] = [
    ("depth 1", &["--iodepth=1"]),
    (
        "depth 64, batches of 64",
        &["--iodepth=64", "--iodepth_batch_submit=64", "--iodepth_batch_complete=64"],
    ),
];

/// One engine's way to run the line.
struct Contender {
    name: &'static str,
    args: Vec<String>,
}

fn contenders(engine: &str) -> Vec<Contender> {
    let ours = |dev: &str| vec![format!("--ioengine=external:{engine}"), format!("--dev={dev}")];
    vec![
        Contender {
            name: "fio's null engine",
            args: vec!["--ioengine=null".into(), "--size=250G".into()],
        },
        Contender { name: "null device", args: ours("null:///n?size=250G") },
        Contender { name: "null device with zones", args: ours("null:///n?size=250G&zoned=1") },
    ]
}

/// Nanoseconds of CPU per I/O in one run.
fn run(contender: &Contender, shape: &[&str]) -> Result<f64, String> {
    let line = "--name=t --thread --filename=/dev/n --rw=randread --bs=4k --time_based --runtime=2 \
                --gtod_reduce=1 --norandommap --output-format=json";
    let output = Command::new("fio")
        .args(line.split_whitespace())
        .args(&contender.args)
        .args(shape)
        .output()
        .map_err(|error| format!("fio cannot be run: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let report = text.find('{').map_or("", |at| &text[at..]);
    let report: Value = serde_json::from_str(report)
        .map_err(|_| format!("fio failed: {}", String::from_utf8_lossy(&output.stderr)))?;
    let job = &report["jobs"][0];
    let number = |value: &Value| value.as_f64().filter(|number| *number > 0.0);
    let share = job["usr_cpu"].as_f64().unwrap_or(0.0) + job["sys_cpu"].as_f64().unwrap_or(0.0);
    match (number(&job["read"]["total_ios"]), number(&job["job_runtime"])) {
        (Some(ios), Some(milliseconds)) => Ok(share / 100.0 * milliseconds * 1e6 / ios),
        _ => Err(format!("fio did nothing: {}", String::from_utf8_lossy(&output.stderr))),
    }
}

fn compare(engine: &str, rounds: usize) -> Result<(), String> {
    let contenders = contenders(engine);
    println!("| shape | engine | ns of CPU per I/O, median [min to max] | over fio's own |");
    println!("| --- | --- | --- | --- |");
    for (shape, args) in SHAPES {
        let mut times = vec![Vec::new(); contenders.len()];
        for _ in 0..rounds {
            for (times, contender) in times.iter_mut().zip(&contenders) {
                times.push(run(contender, args)?);
            }
        }
        times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
        let median = |times: &[f64]| times[times.len() / 2];
        let base = median(&times[0]);
        for (times, contender) in times.iter().zip(&contenders) {
            let (mid, low, high) = (median(times), times[0], times[times.len() - 1]);
            let over = (mid / base - 1.0) * 100.0;
            let name = contender.name;
            println!("| {shape} | {name} | {mid:.1} [{low:.1} to {high:.1}] | {over:+.1} % |");
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let (engine, rounds) = (args.next(), args.next().map_or(Ok(ROUNDS), |text| text.parse()));
    let (Some(engine), Ok(rounds @ 1..=100)) = (engine, rounds) else {
        eprintln!("compare: wanted the engine's path and 1 to 100 rounds ({ROUNDS} if not given)");
        return ExitCode::from(2);
    };
    match compare(&engine, rounds) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("compare: {error}");
            ExitCode::FAILURE
        }
    }
}
