//! `blockyard-lab`: the command line and its commands.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blockyard_yard::suggestion::suggestion;
use blockyard_yard::table::Table;
use clap::{Args, Subcommand};

use crate::collect::collect;
use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Experiment, Peers};
use crate::headlines;
use crate::kernel_replay::{self, command::KernelReplayCommand};
use crate::progress::{self, Progress};
use crate::registry;
use crate::report::{self, text};
use crate::results::{Results, write_whole};
use crate::row_filter::RowFilter;
use crate::run::{self, RunPlan};
use crate::scale::{self, command::ScaleArgs};
use crate::scratch::Scratch;
use crate::serve::{self, ServeArgs};
use crate::stop::Stop;
use crate::tools::engine;
use crate::tools::nvme_peer::NvmePeer;
use crate::tools::vhost_peer::VhostPeer;

/// The directory in which cargo puts the engine; it may also be in the program's directory.
const BUILT: &str = "target/release";

/// The commands of the lab.
#[derive(Debug, Subcommand)]
pub enum LabCommand {
    /// List the experiments
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Run experiments, and keep and print their results
    Run(RunArgs),
    /// Run all experiments
    All(AllArgs),
    /// Make a report of results: a page of HTML that needs no network, and a Markdown file with the
    /// same tables
    Report(ReportArgs),
    /// Write the table of headline figures into docs/measuring.md
    Headlines(HeadlinesArgs),
    /// Predict throughput on more cores than this machine has, by the Universal Scalability Law
    Scale(ScaleArgs),
    /// Compare the product's schedulers with the running kernel's
    #[command(subcommand)]
    KernelReplay(KernelReplayCommand),
    /// Serve a volume over NBD in a way that the product does not, for an experiment
    #[command(hide = true)]
    Serve(ServeArgs),
}

/// `lab list`.
#[derive(Args, Debug)]
pub struct ListArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `lab run`.
#[derive(Args, Debug)]
#[command(after_help = RUN_HELP)]
pub struct RunArgs {
    /// The experiments, as `blockyard-lab list` names them
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// How they are run.
    #[command(flatten)]
    pub how: HowArgs,
}

/// `lab all`.
#[derive(Args, Debug)]
#[command(after_help = RUN_HELP)]
pub struct AllArgs {
    /// How they are run.
    #[command(flatten)]
    pub how: HowArgs,
}

/// `lab report`.
#[derive(Args, Debug)]
pub struct ReportArgs {
    /// Files of results [default: the latest of each experiment in --from]
    #[arg(value_name = "RESULTS")]
    pub results: Vec<PathBuf>,
    /// The directory of results
    #[arg(long, value_name = "DIR", default_value = "lab-results")]
    pub from: PathBuf,
    /// The page; the Markdown gets the same name with .md [default: report.html in --from]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// `lab headlines`.
#[derive(Args, Debug)]
pub struct HeadlinesArgs {
    /// Files of results, which replace the stored ones [default: the stored results]
    #[arg(value_name = "RESULTS")]
    pub results: Vec<PathBuf>,
    /// The directory of the documents
    #[arg(long, value_name = "DIR", default_value = "docs")]
    pub docs: PathBuf,
}

const RUN_HELP: &str = "\
Every round takes each variant once, in turns; the verdicts come from the rounds. Ctrl-C ends the
run and keeps what was measured; a second Ctrl-C ends it at once.

Examples:
  blockyard-lab run zone-locks --quick
  blockyard-lab run hot-path --only product/
  blockyard-lab run nbd limits --rounds 9 --out results
  blockyard-lab report
";

/// How experiments are run.
#[derive(Args, Debug)]
pub struct HowArgs {
    /// A first look in under 30 seconds per experiment: fewer cells, shorter, 3 rounds
    #[arg(long)]
    pub quick: bool,
    /// Rounds: at least 5, with --quick at least 3 [default: 5, with --quick 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(3..=1000))]
    pub rounds: Option<u32>,
    /// Seconds of each measurement [default: what makes an experiment take about two minutes, at
    /// least 0.25]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub seconds: Option<Duration>,
    /// Only these cells; either side may be left out, a third part is jobs: `/random-read/8`; may
    /// be repeated
    #[arg(long, value_name = "VARIANT/WORKLOAD")]
    pub only: Vec<RowFilter>,
    /// The library of the fio engine [default: the libblockyard_fio-*.so in this program's
    /// directory, or in target/release, that the installed fio accepts]
    #[arg(long, value_name = "PATH")]
    pub engine: Option<PathBuf>,
    /// A device of another NVMe/TCP target that listens already, for `nvme`: null, memory or zoned,
    /// then the target's address, the NQN, the process, and SPDK's RPC socket if it polls; may be
    /// repeated
    #[arg(long, value_name = "DEVICE=ADDRESS:PORT,NQN,PID[,RPC]")]
    pub nvme_peer: Vec<NvmePeer>,
    /// A device of another vhost-user-blk server that listens already: null, for `vhost`, tmpfs or
    /// disk, for `file-vhost`, then its socket, the process, and SPDK's RPC socket if it polls; may
    /// be repeated
    #[arg(long, value_name = "DEVICE=SOCKET,PID[,RPC]")]
    pub vhost_peer: Vec<VhostPeer>,
    /// Where results are kept, a file per run
    #[arg(long, value_name = "DIR", default_value = "lab-results")]
    pub out: PathBuf,
    /// Print the results as JSON instead of text
    #[arg(long)]
    pub json: bool,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.001..=3600.0).contains(seconds));
    let seconds = seconds.ok_or("expected seconds from 0.001 to 3600, e.g. 0.5")?;
    Ok(Duration::from_secs_f64(seconds))
}

/// The reasons for which a command of the lab fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The command line is invalid.
    #[error("{0}")]
    Usage(String),
    /// Ctrl-C ended the run; earlier measurements are kept.
    #[error("{0}")]
    Interrupted(String),
    /// Output to `out` failed.
    #[error("standard output: {0}")]
    Output(#[from] io::Error),
    /// A prerequisite is missing or failed.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// No cell was measured.
    #[error("nothing was measured; the reasons stand above")]
    Nothing,
}

/// Runs the command.
///
/// # Errors
/// See [`CommandError`].
pub fn run(command: &LabCommand, out: &mut impl Write) -> Result<(), CommandError> {
    match command {
        LabCommand::List(args) => list(args, out),
        LabCommand::Run(args) => measure(&args.names, &args.how, out),
        LabCommand::All(args) => {
            let names: Vec<String> =
                registry::experiments().iter().map(|(name, _)| (*name).to_owned()).collect();
            measure(&names, &args.how, out)
        }
        LabCommand::Scale(args) => scale::command::run(args, out),
        LabCommand::Report(args) => report(args, out),
        LabCommand::Headlines(args) => Ok(headlines::update(&args.results, &args.docs)?),
        LabCommand::KernelReplay(command) => kernel_replay::command::run(command, out),
        LabCommand::Serve(args) => Ok(serve::run(args)?),
    }
}

fn report(args: &ReportArgs, out: &mut impl Write) -> Result<(), CommandError> {
    let runs = report::runs(&args.results, &args.from)?;
    let page = args.out.clone().unwrap_or_else(|| args.from.join("report.html"));
    let markdown = page.with_extension("md");
    if markdown == page {
        let message = format!("--out {}: the page's name ends in .html", page.display());
        return Err(CommandError::Usage(message));
    }
    let html = report::html::page(&runs).map_err(|error| LabError::failed("the page", error))?;
    let text = report::markdown::text(&runs);
    for (path, text) in [(&page, html), (&markdown, text)] {
        write_whole(path, text.as_bytes()).map_err(LabError::io(path.display().to_string()))?;
    }
    writeln!(out, "{}\n{}", page.display(), markdown.display())?;
    Ok(())
}

fn list(args: &ListArgs, out: &mut impl Write) -> Result<(), CommandError> {
    let settings = settings(&HowArgs::default(), Path::new(""))?;
    let plan = plan(&HowArgs::default())?;
    let experiments = registry::experiments().into_iter().map(|(_, build)| build(&settings));
    let experiments: Vec<Experiment> = experiments.collect();
    if args.json {
        let list: Vec<_> =
            experiments.iter().map(|experiment| described(experiment, &plan)).collect();
        let text = serde_json::to_string_pretty(&list).map_err(io::Error::from)?;
        return Ok(writeln!(out, "{text}")?);
    }
    let mut table = Table::new(["NAME", "WHAT", "VARIANTS", "TAKES"]);
    for experiment in &experiments {
        let variants = experiment.variants.len().to_string();
        let time = progress::words(plan.estimate(&experiment.cells));
        let row = [experiment.name, experiment.title, &variants, &time];
        table.row(row);
    }
    table.print(&["WHAT"], out)?;
    writeln!(out, "\n`blockyard-lab run NAME` runs one, `--quick` for a first look.")?;
    Ok(())
}

fn described(experiment: &Experiment, plan: &RunPlan) -> serde_json::Value {
    serde_json::json!({
        "name": experiment.name,
        "title": experiment.title,
        "about": experiment.about,
        "variants": experiment.variants.iter().map(|variant| serde_json::json!({
            "name": variant.name, "kind": variant.kind.name(), "about": variant.about,
        })).collect::<Vec<_>>(),
        "workloads": experiment.workloads.iter().map(|workload| serde_json::json!({
            "name": workload.name, "about": workload.about,
        })).collect::<Vec<_>>(),
        "cells": experiment.cells.len(),
        "seconds": plan.estimate(&experiment.cells).as_secs(),
    })
}

impl Default for HowArgs {
    fn default() -> HowArgs {
        HowArgs {
            quick: false,
            rounds: None,
            seconds: None,
            only: Vec::new(),
            engine: None,
            nvme_peer: Vec::new(),
            vhost_peer: Vec::new(),
            out: PathBuf::new(),
            json: false,
        }
    }
}

fn plan(how: &HowArgs) -> Result<RunPlan, CommandError> {
    let least = if how.quick { 3 } else { 5 };
    let rounds = how.rounds.unwrap_or(least);
    if rounds < least {
        let message =
            format!("invalid --rounds `{rounds}`: expected at least 5, or 3 with --quick");
        return Err(CommandError::Usage(message));
    }
    Ok(RunPlan { rounds, measure: how.seconds, quick: how.quick })
}

fn settings(how: &HowArgs, scratch: &Path) -> Result<Settings, CommandError> {
    let lab = std::env::current_exe().map_err(LabError::io("the program's own path"))?;
    if let Some(engine) = how.engine.as_ref().filter(|engine| !engine.is_file()) {
        let message = format!("--engine {}: no such file; `make fio` builds it", engine.display());
        return Err(CommandError::Usage(message));
    }
    // fio runs in another directory, and searches the linker's path for a name without a slash.
    let engine = how.engine.clone().map(|path| std::path::absolute(&path).unwrap_or(path));
    Ok(Settings {
        quick: how.quick,
        engine,
        program: lab.with_file_name("blockyard"),
        lab,
        scratch: scratch.to_owned(),
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        peers: Peers { nvme: how.nvme_peer.clone(), vhost: how.vhost_peer.clone() },
    })
}

/// The engine from the default directories. If fio accepts none of those found, says why.
fn engine(program: &Path, progress: &Progress) -> Option<PathBuf> {
    let own_folder = program.parent().into_iter();
    let folders: Vec<&Path> = own_folder.chain([Path::new(BUILT)]).collect();
    engine::fitting(&folders).unwrap_or_else(|why| {
        progress.say(&why);
        None
    })
}

/// The experiments of these names with the chosen cells.
fn chosen(
    names: &[String],
    how: &HowArgs,
    settings: &Settings,
) -> Result<Vec<Experiment>, CommandError> {
    let known = registry::experiments();
    let mut experiments: Vec<Experiment> = Vec::new();
    for name in names {
        let Some((_, build)) = known.iter().find(|(other, _)| other == name) else {
            let names = known.iter().map(|(name, _)| *name);
            let near = suggestion(name, names.clone());
            let all = names.collect::<Vec<_>>().join(", ");
            let message = format!("no experiment is called `{name}`{near}; there are: {all}");
            return Err(CommandError::Usage(message));
        };
        if experiments.iter().all(|experiment| experiment.name != name) {
            experiments.push(build(settings));
        }
    }
    for only in &how.only {
        only.check(&experiments).map_err(CommandError::Usage)?;
    }
    if !how.only.is_empty() {
        for experiment in &mut experiments {
            experiment.cells.retain(|cell| how.only.iter().any(|only| only.takes(cell)));
        }
        // An experiment without a chosen cell is not run, and keeps its latest results.
        experiments.retain(|experiment| !experiment.cells.is_empty());
    }
    Ok(experiments)
}

fn measure(names: &[String], how: &HowArgs, out: &mut impl Write) -> Result<(), CommandError> {
    let plan = plan(how)?;
    let scratch = Scratch::new()?;
    let mut progress = Progress::on_stderr();
    let mut settings = settings(how, scratch.path())?;
    if settings.engine.is_none() {
        settings.engine = engine(&settings.program, &progress);
    }
    let (experiments, processors) = (chosen(names, how, &settings)?, settings.processors as f64);
    let stop = Stop::by_signal().map_err(LabError::io("catching Ctrl-C"))?;
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut results = Results::new(format!("blockyard-lab {}", words.join(" ")), how.quick);
    results.only = how.only.iter().map(ToString::to_string).collect();
    if let Some(load) = results.load_before.filter(|load| *load > processors / 2.0) {
        let advice = "CPU times hold better than throughput";
        progress.say(&format!("the machine is busy, load {load:.1} before the run: {advice}"));
    }
    let began = Instant::now();
    let mut path = PathBuf::new();
    for (at, experiment) in experiments.iter().enumerate() {
        let later = experiments[at + 1..].iter().map(|later| plan.estimate(&later.cells)).sum();
        progress.later(later);
        let outcome = run::run(experiment, &plan, &stop, &mut progress);
        collect(&mut results, experiment, &plan, &outcome);
        results.fractions = crate::ratios::of(&results);
        results.seconds = began.elapsed().as_secs_f64();
        results.load_after = crate::machine::load();
        // After each experiment, so that a failure of the next one does not lose its results.
        path = results.write(&how.out)?;
        if results.interrupted {
            break;
        }
    }
    progress.pause();
    if how.json {
        let text = serde_json::to_string_pretty(&results).map_err(io::Error::from)?;
        writeln!(out, "{text}")?;
    } else {
        text::print(&results, out)?;
        writeln!(
            out,
            "\nresults in {}; `blockyard-lab report` makes a page of them",
            path.display()
        )?;
    }
    out.flush()?;
    match () {
        () if results.interrupted => {
            let message = format!("interrupted; what was measured is in {}", path.display());
            Err(CommandError::Interrupted(message))
        }
        () if results.rows.is_empty() => Err(CommandError::Nothing),
        () => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn how() -> HowArgs {
        HowArgs::default()
    }

    #[test]
    fn an_unknown_experiment_is_answered_with_the_near_ones() {
        let settings = settings(&how(), Path::new("")).unwrap();
        let error = chosen(&["clok".to_owned()], &how(), &settings).unwrap_err().to_string();
        assert!(error.contains("did you mean `clock`?"), "{error}");
        let error = chosen(&["x".to_owned()], &how(), &settings).unwrap_err().to_string();
        assert!(error.contains("there are: "), "{error}");
    }

    #[test]
    fn too_few_rounds_are_refused() {
        let rounds = |quick, rounds| plan(&HowArgs { quick, rounds, ..how() }).map(|p| p.rounds);
        assert_eq!(rounds(false, None).unwrap(), 5);
        assert_eq!(rounds(true, None).unwrap(), 3);
        assert_eq!(rounds(true, Some(4)).unwrap(), 4);
        assert!(rounds(false, Some(4)).unwrap_err().to_string().contains("invalid --rounds `4`"));
    }

    #[test]
    fn an_engine_that_is_not_there_is_named() {
        let how = HowArgs { engine: Some("/nowhere/engine.so".into()), ..how() };
        let error = settings(&how, Path::new("")).unwrap_err().to_string();
        assert!(error.contains("/nowhere/engine.so"), "{error}");
    }

    #[test]
    fn seconds_are_bounded() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "-1", "nan", "inf", "4000", "x"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
