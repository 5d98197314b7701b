//! NBD random reads, ours beside the servers that others wrote, by one fio line in one run.
//!
//! Rounds are taken in turns (each server once, then again), so that what else the machine does
//! falls on all of them. A figure is the median of the rounds with the least and the greatest. Wall
//! time says something about a server only where the server is the limit, so the table says which
//! side was, and gives the I/Os per second of server CPU time beside it.

mod fio;
mod server;

use std::error::Error;
use std::path::Path;

use fio::Load;
use server::{CONTENDERS, Contender};

const USAGE: &str = "bench-nbd [--quick] [--rounds N] [--seconds N]";
/// Connections and depth of each.
const LOADS: [Load; 4] = [
    Load { connections: 1, depth: 32 },
    Load { connections: 1, depth: 128 },
    Load { connections: 4, depth: 32 },
    Load { connections: 4, depth: 128 },
];

/// How long and how often.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Plan {
    rounds: usize,
    seconds: u32,
}

/// What one server did in one round.
#[derive(Debug, Clone, Copy, Default)]
struct Round {
    /// I/Os per second of wall time.
    iops: f64,
    /// I/Os per second of the server's CPU time.
    iops_per_cpu: f64,
    /// Processors that the server kept busy.
    server_cpus: f64,
    /// Processors that fio kept busy.
    client_cpus: f64,
}

/// Measures all servers under all loads and prints two tables in Markdown.
pub(crate) fn run(root: &Path, args: &[&str]) -> Result<(), Box<dyn Error>> {
    let plan = plan(args)?;
    let processors = std::thread::available_parallelism()?.get();
    println!("{processors} processors, {} rounds of {} s, in turns\n", plan.rounds, plan.seconds);
    println!("    {}\n", fio::line(LOADS[0], "URI", plan.seconds).join(" "));
    println!(
        "| connections x depth | server | thousand IOPS | thousand IOPS per server CPU-second \
         | server CPUs | client CPUs | limit |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    let mut ratios = Vec::new();
    for load in LOADS {
        let mut rounds = vec![Vec::new(); CONTENDERS.len()];
        for _ in 0..plan.rounds {
            for (contender, rounds) in CONTENDERS.iter().zip(&mut rounds) {
                rounds.push(measure(root, contender, load, plan.seconds)?);
            }
        }
        for (contender, rounds) in CONTENDERS.iter().zip(&rounds) {
            println!("{}", row(contender.name, load, rounds, processors));
        }
        ratios.push(ratio(load, &rounds, processors));
    }
    println!(
        "\n| connections x depth | IOPS, ours to the best other | the same per server CPU-second \
         | limit of ours |"
    );
    println!("| --- | --- | --- | --- |\n{}", ratios.join("\n"));
    Ok(())
}

fn plan(args: &[&str]) -> Result<Plan, Box<dyn Error>> {
    let mut plan = Plan { rounds: 5, seconds: 4 };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut number = || -> Result<u32, Box<dyn Error>> {
            let value = args.next().ok_or(format!("{arg} needs a number; {USAGE}"))?;
            let number = value.parse::<u32>().ok().filter(|number| (1..=3600).contains(number));
            Ok(number.ok_or(format!("{arg} {value}: a number from 1 to 3600 will do; {USAGE}"))?)
        };
        match *arg {
            "--quick" => plan = Plan { rounds: 2, seconds: 1 },
            "--rounds" => plan.rounds = number()? as usize,
            "--seconds" => plan.seconds = number()?,
            other => return Err(format!("`{other}` is no option; {USAGE}").into()),
        }
    }
    Ok(plan)
}

fn measure(
    root: &Path,
    contender: &Contender,
    load: Load,
    seconds: u32,
) -> Result<Round, Box<dyn Error>> {
    let server = server::start(root, contender)?;
    let before = server.cpu_seconds()?;
    let report = fio::run(load, &server.uri(), seconds)?;
    let cpu_seconds = server.cpu_seconds()? - before;
    Ok(Round {
        iops: report.iops,
        // A tick is the least that can be seen.
        iops_per_cpu: report.ios as f64 / cpu_seconds.max(server::TICK_SECONDS),
        server_cpus: cpu_seconds / report.seconds,
        client_cpus: report.cpus,
    })
}

/// The median, the least and the greatest.
fn spread(rounds: &[Round], of: fn(&Round) -> f64) -> (f64, f64, f64) {
    let mut values: Vec<f64> = rounds.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
    ((low + high) / 2.0, values[0], values[values.len() - 1])
}

fn median(rounds: &[Round], of: fn(&Round) -> f64) -> f64 {
    spread(rounds, of).0
}

fn row(name: &str, load: Load, rounds: &[Round], processors: usize) -> String {
    let thousands = |(median, least, greatest): (f64, f64, f64)| {
        format!("{:.0} [{:.0} to {:.0}]", median / 1e3, least / 1e3, greatest / 1e3)
    };
    format!(
        "| {} x {} | {name} | {} | {} | {:.2} | {:.2} | {} |",
        load.connections,
        load.depth,
        thousands(spread(rounds, |round| round.iops)),
        thousands(spread(rounds, |round| round.iops_per_cpu)),
        median(rounds, |round| round.server_cpus),
        median(rounds, |round| round.client_cpus),
        limit(load, rounds, processors),
    )
}

/// Who was busy all the time; if nobody was, who was busier.
fn limit(load: Load, rounds: &[Round], processors: usize) -> String {
    let (server, client) = (median(rounds, |r| r.server_cpus), median(rounds, |r| r.client_cpus));
    let most = load.connections.min(processors) as f64;
    let is_busy = |cpus: f64| cpus >= 0.9 * most;
    let limit = match (is_busy(server), is_busy(client)) {
        (true, true) => "both",
        (true, false) => "server",
        (false, true) => "client",
        _ if server + client >= 0.9 * processors as f64 => "machine, shared by both",
        _ => "neither",
    };
    if limit == "server" || limit == "client" {
        return limit.into();
    }
    let (busier, less, more) =
        if server > client { ("server", client, server) } else { ("client", server, client) };
    format!("{limit}; {busier} {:.1} x as busy", more / less.max(f64::EPSILON))
}

/// Ours, the first contender, against the best of the others.
fn ratio(load: Load, rounds: &[Vec<Round>], processors: usize) -> String {
    let ratio = |of: fn(&Round) -> f64| {
        let best = rounds[1..].iter().map(|rounds| median(rounds, of)).fold(0.0, f64::max);
        median(&rounds[0], of) / best
    };
    format!(
        "| {} x {} | {:.2} | {:.2} | {} |",
        load.connections,
        load.depth,
        ratio(|round| round.iops),
        ratio(|round| round.iops_per_cpu),
        limit(load, &rounds[0], processors),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(iops: f64, server_cpus: f64, client_cpus: f64) -> Round {
        Round { iops, iops_per_cpu: iops / server_cpus, server_cpus, client_cpus }
    }

    #[test]
    fn the_plan_is_what_was_asked() {
        assert_eq!(plan(&[]).unwrap(), Plan { rounds: 5, seconds: 4 });
        assert_eq!(plan(&["--quick"]).unwrap(), Plan { rounds: 2, seconds: 1 });
        assert_eq!(plan(&["--rounds", "7"]).unwrap(), Plan { rounds: 7, seconds: 4 });
        for bad in [&["--rounds"][..], &["--rounds", "0"], &["--seconds", "x"], &["--slow"]] {
            let error = plan(bad).unwrap_err().to_string();
            assert!(error.contains(bad[0]) && error.contains(USAGE), "{error}");
        }
    }

    #[test]
    fn the_median_is_of_odd_and_even_rounds() {
        let rounds = [3.0, 1.0, 8.0, 2.0].map(|iops| round(iops, 1.0, 1.0));
        assert_eq!(spread(&rounds[..3], |round| round.iops), (3.0, 1.0, 8.0));
        assert_eq!(spread(&rounds, |round| round.iops), (2.5, 1.0, 8.0));
    }

    #[test]
    fn the_limit_is_who_is_busy() {
        let one = Load { connections: 1, depth: 32 };
        assert_eq!(limit(one, &[round(1.0, 1.0, 0.5)], 2), "server");
        assert_eq!(limit(one, &[round(1.0, 0.5, 1.0)], 2), "client");
        assert_eq!(limit(one, &[round(1.0, 0.95, 1.0)], 2), "both; client 1.1 x as busy");
        assert_eq!(limit(one, &[round(1.0, 0.5, 0.5)], 2), "neither; client 1.0 x as busy");
        let four = Load { connections: 4, depth: 32 };
        assert_eq!(
            limit(four, &[round(1.0, 0.8, 1.2)], 2),
            "machine, shared by both; client 1.5 x as busy"
        );
    }

    #[test]
    fn ours_stands_against_the_best_other() {
        let load = Load { connections: 1, depth: 32 };
        let rounds = [30.0, 10.0, 20.0].map(|iops| vec![round(iops, 1.0, 0.5)]);
        assert_eq!(ratio(load, &rounds, 2), "| 1 x 32 | 1.50 | 1.50 | server |");
    }
}
