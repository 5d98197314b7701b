//! `blockyard-lab kernel-replay`: records the decisions of a kernel's scheduler, and replays them.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use blockyard_replay::file;
use blockyard_replay::replay::replay;
use blockyard_replay::trace::Trace;
use blockyard_replay::verdict::{DeviationCause, ReplayResult, SHARE_MIN};
use blockyard_replay::workloads::{TraceWorkload, WORKLOADS, find};
use blockyard_yard::suggestion::suggestion;
use blockyard_yard::table::Table;
use clap::{Args, Subcommand};
use serde::Serialize;

use crate::command::CommandError;
use crate::error::LabError;
use crate::kernel_replay::record::{RecordDirs, record};
use crate::results::write_whole;
use crate::stop::Stop;

/// A scheduler that a kernel has too.
#[derive(Debug, Subcommand)]
pub enum KernelReplayCommand {
    /// mq-deadline, which corresponds to the product's scheduler `deadline`
    #[command(subcommand)]
    Deadline(DeadlineCommand),
}

/// The operation on a scheduler.
#[derive(Debug, Subcommand)]
pub enum DeadlineCommand {
    /// Record what mq-deadline decides under fio; needs root
    Record(RecordArgs),
    /// Hold the product's decisions against recorded ones
    Replay(ReplayArgs),
}

/// `lab kernel-replay deadline record`.
#[derive(Args, Debug)]
#[command(after_help = RECORD_HELP)]
pub struct RecordArgs {
    /// The workloads [default: all]
    #[arg(value_name = "WORKLOAD")]
    pub names: Vec<String>,
    /// List the workloads and record nothing
    #[arg(long)]
    pub list: bool,
    /// Where the traces go, a file per workload, in place of older ones
    #[arg(long, value_name = "DIR", default_value = "lab-traces")]
    pub out: PathBuf,
    /// The directory of the file below the loop device. A disk below it completes on whatever
    /// processor it likes; memory completes on the one that everything else is on
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    pub below: PathBuf,
    /// Where tracefs is mounted
    #[arg(long, value_name = "DIR", default_value = "/sys/kernel/tracing")]
    pub tracefs: PathBuf,
}

const RECORD_HELP: &str = "\
A loop device over a new file gets mq-deadline, fio makes the load, and an instance of tracefs
records it. Device, file and instance go when it ends, Ctrl-C included.

Examples:
  blockyard-lab kernel-replay deadline record --list
  blockyard-lab kernel-replay deadline record mixed classes --out traces
";

/// `lab kernel-replay deadline replay`.
#[derive(Args, Debug)]
pub struct ReplayArgs {
    /// The traces, as `record` or tracefs wrote them, packed by gzip or not
    #[arg(required = true, value_name = "TRACE")]
    pub traces: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
///
/// # Errors
/// See [`CommandError`].
pub fn run(command: &KernelReplayCommand, out: &mut impl Write) -> Result<(), CommandError> {
    let KernelReplayCommand::Deadline(command) = command;
    match command {
        DeadlineCommand::Record(args) if args.list => list(out),
        DeadlineCommand::Record(args) => record_all(args, out),
        DeadlineCommand::Replay(args) => replay_all(args, out),
    }
}

fn list(out: &mut impl Write) -> Result<(), CommandError> {
    let mut table = Table::new(["NAME", "WHAT", "TUNED"]);
    for workload in WORKLOADS {
        let mut tuned: Vec<String> =
            workload.tunables.iter().map(|(name, value)| format!("{name}={value}")).collect();
        if workload.nomerges > 0 {
            tuned.push(format!("nomerges={}", workload.nomerges));
        }
        table.row([workload.name, workload.about, &tuned.join(" ")]);
    }
    Ok(table.print(&["WHAT", "TUNED"], out)?)
}

fn chosen(names: &[String]) -> Result<Vec<&'static TraceWorkload>, CommandError> {
    if names.is_empty() {
        return Ok(WORKLOADS.iter().collect());
    }
    let named = |name: &String| {
        find(name).ok_or_else(|| {
            let known = WORKLOADS.iter().map(|workload| workload.name);
            let near = suggestion(name, known);
            let list = "`blockyard-lab kernel-replay deadline record --list` lists them";
            CommandError::Usage(format!("no workload is called `{name}`{near}; {list}"))
        })
    };
    names.iter().map(named).collect()
}

fn record_all(args: &RecordArgs, out: &mut impl Write) -> Result<(), CommandError> {
    let workloads = chosen(&args.names)?;
    let stop = Stop::by_signal().map_err(LabError::io("catching Ctrl-C"))?;
    let what = || args.out.display().to_string();
    std::fs::create_dir_all(&args.out).map_err(|error| LabError::io(what())(error))?;
    let place = RecordDirs { below: args.below.clone(), tracefs: args.tracefs.clone() };
    for workload in workloads {
        let trace = match record(workload, &place, &stop) {
            Err(LabError::Interrupted) => {
                let why = format!("interrupted; what was recorded before is in {}", what());
                return Err(CommandError::Interrupted(why));
            }
            other => other?,
        };
        let path = args.out.join(format!("{}.trace.gz", workload.name));
        write(&path, &trace)?;
        let decisions = trace.issues();
        writeln!(out, "{}: {decisions} decisions, {}", path.display(), summary(&judge(&trace)?))?;
        out.flush()?;
    }
    Ok(())
}

/// Reads the trace of a file.
fn read(path: &Path) -> Result<Trace, LabError> {
    let name = || path.display().to_string();
    let bytes = std::fs::read(path).map_err(LabError::io(name()))?;
    let text = file::text(&bytes).map_err(LabError::io(name()))?;
    file::trace(&text).map_err(|error| LabError::failed(name(), error))
}

/// Writes the trace, compressed, and replaces the file.
fn write(path: &Path, trace: &Trace) -> Result<(), LabError> {
    let packed = file::packed(trace).map_err(LabError::io("gzip"))?;
    write_whole(path, &packed).map_err(LabError::io(path.display().to_string()))
}

fn judge(trace: &Trace) -> Result<ReplayResult, LabError> {
    replay(trace).map_err(|error| LabError::failed("replay", error.why))
}

/// A verdict in a few words.
fn summary(verdict: &ReplayResult) -> String {
    let ReplayResult { unexplained, joins_missed, .. } = verdict;
    let explained = verdict.explained_all();
    let share = percent(verdict.share());
    let missed = match joins_missed {
        0 => String::new(),
        count => format!(", {count} merges missed"),
    };
    format!("{share} equal, {explained} explained, {unexplained} not{missed}")
}

/// A percentage, rounded down so that the printed value is reached.
fn percent(share: f64) -> String {
    format!("{:.2} %", (share * 10_000.0).floor() / 100.0)
}

/// A trace and the result of its replay.
#[derive(Debug, Serialize)]
struct Judged<'a> {
    trace: String,
    workload: &'a str,
    kernel: &'a str,
    share: f64,
    #[serde(flatten)]
    verdict: &'a ReplayResult,
}

fn replay_all(args: &ReplayArgs, out: &mut impl Write) -> Result<(), CommandError> {
    let mut judged = Vec::new();
    for path in &args.traces {
        let trace = read(path)?;
        let verdict = replay(&trace)
            .map_err(|error| LabError::failed(path.display().to_string(), error.why))?;
        judged.push((path.as_path(), trace, verdict));
    }
    match args.json {
        true => json(&judged, out)?,
        false => text(&judged, out)?,
    }
    let bad = judged.iter().filter(|(_, _, verdict)| !verdict.is_good(SHARE_MIN)).count();
    out.flush()?;
    match bad {
        0 => Ok(()),
        count => {
            let what = format!("{count} of {} traces", judged.len());
            let why = "fewer than 99 % are equal, or a difference has no explanation";
            Err(LabError::failed(what, why).into())
        }
    }
}

type JudgedTrace<'a> = (&'a Path, Trace, ReplayResult);

fn json(judged: &[JudgedTrace<'_>], out: &mut impl Write) -> Result<(), CommandError> {
    let list: Vec<Judged<'_>> = judged
        .iter()
        .map(|(path, trace, verdict)| Judged {
            trace: path.display().to_string(),
            workload: &trace.header.workload,
            kernel: &trace.header.kernel,
            share: verdict.share(),
            verdict,
        })
        .collect();
    let text = serde_json::to_string_pretty(&list).map_err(io::Error::from)?;
    Ok(writeln!(out, "{text}")?)
}

fn text(judged: &[JudgedTrace<'_>], out: &mut impl Write) -> Result<(), CommandError> {
    let mut table = Table::new([
        "TRACE",
        "DECISIONS",
        "EQUAL",
        "EXPLAINED",
        "NOT",
        "MERGES",
        "EXPIRED",
        "AGED",
    ]);
    for (path, _, verdict) in judged {
        let rules: Vec<String> = DeviationCause::ALL
            .into_iter()
            .map(|rule| (rule, verdict.explained_by(rule)))
            .filter(|(_, count)| *count > 0)
            .map(|(rule, count)| format!("{rule} {count}"))
            .collect();
        let rules = if rules.is_empty() { "-".to_owned() } else { rules.join(", ") };
        let merges = match verdict.joins_missed {
            0 => verdict.joins.to_string(),
            missed => format!("{} ({missed} missed)", verdict.joins),
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.split(".trace").next().unwrap_or_default();
        table.row([
            name,
            &verdict.decisions.to_string(),
            &percent(verdict.share()),
            &rules,
            &verdict.unexplained.to_string(),
            &merges,
            &verdict.expired.to_string(),
            &verdict.aged.to_string(),
        ]);
    }
    table.print(&["EXPLAINED"], out)?;
    for (path, _, verdict) in judged {
        for difference in &verdict.differences {
            let policy = difference.policy.as_deref().unwrap_or("nothing");
            let (event, kernel) = (difference.event, &difference.kernel);
            writeln!(
                out,
                "{}: event {event}: the kernel took {kernel}, the policy {policy}",
                path.display()
            )?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn a_trace_file_is_read_packed_and_plain() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().join("a.trace.gz");
        let raw = "# tracer: nop\nfio-1 [000] . 1.000001: block_rq_insert: 7,1 R 8 () 8 + 8\n";
        let wanted = file::trace(raw).unwrap();
        write(&path, &wanted).unwrap();
        assert_eq!(read(&path).unwrap(), wanted);
        std::fs::write(&path, wanted.text()).unwrap();
        assert_eq!(read(&path).unwrap(), wanted);
    }

    #[test]
    fn a_damaged_trace_file_is_refused_by_its_name() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().join("bad.trace.gz");
        std::fs::write(&path, [0x1f, 0x8b, 8, 0, 1]).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("bad.trace.gz"));
        std::fs::write(&path, "nothing").unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("bad.trace.gz: line 1: it starts with `nothing`"), "{error}");
    }

    #[test]
    fn an_unknown_workload_is_answered_with_the_near_one() {
        let error = chosen(&["mixd".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("no workload is called `mixd`; did you mean `mixed`?"), "{error}");
        assert_eq!(chosen(&[]).unwrap().len(), WORKLOADS.len());
    }

    #[test]
    fn a_share_is_never_rounded_up() {
        assert_eq!(percent(0.98999), "98.99 %");
        assert_eq!(percent(1.0), "100.00 %");
    }
}
