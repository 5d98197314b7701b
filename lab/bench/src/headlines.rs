//! The table of headline figures in docs/measuring.md, made from stored results.
//!
//! `docs/measurements/headlines.json` has the parts of the results that the table shows. The table
//! is never edited by hand: a test compares it with that file.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::LabError;
use crate::quantity::quantity;
use crate::results::{Ratio, Results, Row, write_whole};
use crate::stats::AimState;

/// The stored results, in the directory of the documents.
const STORED: &str = "measurements/headlines.json";

/// The page with the table, in the directory of the documents.
const PAGE: &str = "measuring.md";

/// The lines of the page between which the table is.
const BEGIN: &str = "<!-- `blockyard-lab headlines` writes from here -->";
const END: &str = "<!-- to here -->";

/// One line of the table: a comparison of an experiment.
struct Headline {
    what: &'static str,
    compared: &'static str,
    experiment: &'static str,
    workload: &'static str,
    metric: &'static str,
    before: &'static str,
    after: &'static str,
    /// The page with the details, without `.md`.
    page: &'static str,
    /// Whether `before` is a bound: the table shows the value instead of the ratio.
    is_bound: bool,
}

/// A comparison of two variants.
const fn line(
    [what, compared]: [&'static str; 2],
    [experiment, workload, metric]: [&'static str; 3],
    [before, after]: [&'static str; 2],
    page: &'static str,
) -> Headline {
    Headline { what, compared, experiment, workload, metric, before, after, page, is_bound: false }
}

impl Headline {
    const fn bound(mut self) -> Headline {
        self.is_bound = true;
        self
    }

    fn is_of(&self, ratio: &Ratio) -> bool {
        [&ratio.experiment, &ratio.workload, &ratio.metric, &ratio.before, &ratio.after]
            == [self.experiment, self.workload, self.metric, self.before, self.after]
    }

    fn has_row(&self, row: &Row) -> bool {
        [&row.experiment, &row.workload, &row.metric, &row.variant]
            == [self.experiment, self.workload, self.metric, self.after]
    }
}

const READS: [&str; 3] = ["nbd", "read-depth-32", "iops"];
const DURABLE: [&str; 3] = ["sync-writes", "4k", "iops"];
const DURABLE_NBD: [&str; 3] = ["sync-writes", "nbd-4k", "iops"];

/// The lines of the table, in its order.
const HEADLINES: &[Headline] = &[
    line(
        ["NBD, random reads of 4 KiB, depth 32", "qemu-storage-daemon"],
        READS,
        ["qemu-storage-daemon", "blockyard"],
        "nbd",
    ),
    line(
        ["the same, per CPU second of the server", "qemu-storage-daemon"],
        ["nbd", "read-depth-32", "ios_per_cpu_second"],
        ["qemu-storage-daemon", "blockyard"],
        "nbd",
    ),
    line(["the same, IOPS", "qemu-nbd"], READS, ["qemu-nbd", "blockyard"], "nbd"),
    line(["the same, IOPS", "nbdkit"], READS, ["nbdkit", "blockyard"], "nbd"),
    line(
        ["durable writes of 4 KiB", "the raw file, fio with `O_DSYNC`"],
        DURABLE,
        ["raw", "group"],
        "volume",
    ),
    line(
        ["the same", "32 workers that each sync one write"],
        DURABLE,
        ["log-taskq-32", "group"],
        "volume",
    ),
    line(
        ["writes of 4 KiB with FUA over NBD", "qemu-nbd, raw file"],
        DURABLE_NBD,
        ["qemu-nbd", "group"],
        "volume",
    ),
    line(["the same", "qemu-nbd, qcow2"], DURABLE_NBD, ["qcow2", "group"], "volume"),
    line(
        ["durable writes of 1 MiB", "the raw file, fio with `O_DSYNC`"],
        ["sync-writes", "1m", "bandwidth"],
        ["raw", "group"],
        "volume",
    ),
    line(
        ["random reads of 4 KiB from a volume", "the raw file"],
        ["volume-limits", "read-4k", "iops"],
        ["raw", "volume"],
        "volume",
    ),
    line(
        ["write amplification, writes of 4 KiB, 16 in flight", "at most 1.15"],
        ["volume-limits", "device-bytes", "device_bytes_per_byte"],
        ["1.15 bytes", "volume"],
        "volume",
    )
    .bound(),
    line(
        ["write amplification, random overwrites, pool 80 % full", "at most 2.5"],
        ["volume-limits", "overwrite", "device_bytes_per_byte"],
        ["2.5 bytes", "volume-80-full"],
        "volume",
    )
    .bound(),
    line(
        ["RAM disk, random reads, data that compress to a half", "the kernel's zram"],
        ["ram-kernel", "read-50", "iops"],
        ["zram", "blockyard"],
        "ram",
    ),
    line(
        ["RAM disk, reads and writes of a mixed corpus", "the kernel's zram"],
        ["ram-kernel", "mixed", "iops"],
        ["zram", "blockyard"],
        "ram",
    ),
    line(
        ["zoned random writes", "one lock over all zones"],
        ["zone-locks", "random-write", "iops"],
        ["one-lock", "product"],
        "zone-locks",
    ),
    line(
        ["zoned random reads", "one lock over all zones"],
        ["zone-locks", "random-read", "iops"],
        ["one-lock", "product"],
        "zone-locks",
    ),
    line(
        ["scheduler, submitters at depth 4, null device", "one parking lock"],
        ["scheduler", "depth-4", "iops"],
        ["sched-lock-park", "product"],
        "scheduler",
    ),
    line(
        ["the same", "one spinning lock"],
        ["scheduler", "depth-4", "iops"],
        ["sched-lock-spin", "product"],
        "scheduler",
    ),
    line(
        ["zone appends into one zone", "writes under a lock per zone"],
        ["zone-append", "one-zone", "iops"],
        ["write-locked", "append"],
        "zone-append",
    ),
    line(
        ["block file over FUSE, synchronous reads", "qemu-storage-daemon's FUSE export"],
        ["fuse", "sync", "iops"],
        ["qemu-storage-daemon", "blockyard-io_uring"],
        "fuse",
    ),
    line(
        ["block file over FUSE, reads at depth 32", "qemu-storage-daemon's FUSE export"],
        ["fuse", "depth-32", "iops"],
        ["qemu-storage-daemon", "blockyard-io_uring"],
        "fuse",
    ),
    line(
        ["reads while `top`, `iostat` and the dashboard observe", "no observer"],
        ["observers", "read-depth-128", "iops"],
        ["none", "all-three"],
        "observers",
    ),
    line(
        [
            "CPU time of these observers and of the daemon for them, as a part of all processors",
            "at most 0.01",
        ],
        ["observers", "read-depth-128", "observing_share"],
        ["0.01 of the processors", "all-three"],
        "observers",
    )
    .bound(),
];

/// A command line without `--out`: where a run kept its results says nothing about them.
fn without_out(command: &str) -> String {
    let mut words = command.split(' ');
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        match word {
            "--out" => _ = words.next(),
            word if word.starts_with("--out=") => {}
            word => kept.push(word),
        }
    }
    kept.join(" ")
}

/// Reduces results to what the table shows.
fn reduced(runs: Vec<Results>) -> Vec<Results> {
    let reduced = runs.into_iter().map(|mut run| {
        run.ratios.retain(|ratio| HEADLINES.iter().any(|line| line.is_of(ratio)));
        run.rows.retain(|row| HEADLINES.iter().any(|line| line.is_bound && line.has_row(row)));
        for info in &mut run.experiments {
            info.variants.clear();
            info.workloads.clear();
            info.plots.clear();
        }
        let none: (Vec<_>, Vec<_>, Vec<_>, Vec<_>) = Default::default();
        (run.latency, run.rooms, run.limits, run.fractions) = none;
        let none: (Vec<_>, Vec<_>, Vec<_>) = Default::default();
        (run.published, run.not_measured, run.notes) = none;
        run.command = without_out(&run.command);
        run
    });
    reduced.filter(|run| !run.ratios.is_empty()).collect()
}

/// The page with the table of these results in place of the one that it has.
///
/// # Errors
/// If a comparison is missing, or was measured twice, or the page has no place for the table.
pub fn page(runs: &[Results], page: &str) -> Result<String, LabError> {
    let place = || LabError::missing(format!("`{BEGIN}` in {PAGE}"), "write it and `{END}`");
    let (before, rest) = page.split_once(BEGIN).ok_or_else(place)?;
    let (_, after) = rest.split_once(END).ok_or_else(place)?;
    Ok(format!("{before}{BEGIN}\n\n{}\n{END}{after}", table(runs)?))
}

fn table(runs: &[Results]) -> Result<String, LabError> {
    let mut text = "| what | compared with | ratio | aim | details |\n| --- | --- | --- | --- | \
                    --- |\n"
        .to_owned();
    for headline in HEADLINES {
        let Headline { what, compared, page, .. } = headline;
        let (figure, aim) = figure(headline, runs)?;
        let details = format!("[{page}](measurements/{page}.md)");
        _ = writeln!(text, "| {what} | {compared} | {figure} | {aim} | {details} |");
    }
    text.push_str("\n| experiment | day | rounds | machine | load before |\n");
    text.push_str("| --- | --- | --- | --- | --- |\n");
    for run in runs {
        let names: Vec<&str> = run.experiments.iter().map(|info| info.name.as_str()).collect();
        let machine = &run.machine;
        let (day, _) = run.started.split_once('T').unwrap_or((&run.started, ""));
        let rounds = run.experiments.iter().map(|info| info.rounds).min().unwrap_or_default();
        _ = writeln!(
            text,
            "| {} | {day} | {rounds} | {}, {} processors{}, Linux {} | {} |",
            names.join(", "),
            machine.cpu,
            machine.processors,
            if machine.is_virtual { " of a virtual machine" } else { "" },
            machine.kernel,
            run.load_before.map_or("unknown".to_owned(), |load| format!("{load:.2}")),
        );
    }
    Ok(text)
}

/// The figure of a line, by numbers of jobs, and what it says about the aim.
fn figure(headline: &Headline, runs: &[Results]) -> Result<(String, String), LabError> {
    let Headline { experiment, workload, .. } = headline;
    let missing = |what: &str| {
        let Headline { before, after, metric, .. } = headline;
        let what = format!("{what}: {experiment}, {workload}, {metric}, {after} against {before}");
        LabError::missing(what, "run the experiment, once and with all its cells")
    };
    let found = runs.iter().flat_map(|run| run.ratios.iter().map(move |ratio| (run, ratio)));
    let mut found: Vec<(&Results, &Ratio)> =
        found.filter(|(_, ratio)| headline.is_of(ratio)).collect();
    found.sort_by_key(|(_, ratio)| ratio.jobs);
    let is_twice = found.windows(2).any(|two| two[0].1.jobs == two[1].1.jobs);
    match found.is_empty() {
        true => return Err(missing("no comparison")),
        false if is_twice => return Err(missing("more than one comparison")),
        false => {}
    }
    let mut figures = Vec::new();
    for (run, ratio) in &found {
        let value = if headline.is_bound {
            let row = run.rows.iter().find(|row| headline.has_row(row) && row.jobs == ratio.jobs);
            let Row { median, min, max, .. } = row.ok_or_else(|| missing("no value"))?;
            format!("{} ({} to {})", number(*median), number(*min), number(*max))
        } else {
            let Ratio { median, low, high, .. } = ratio;
            format!("{} ({} to {})", number(*median), number(*low), number(*high))
        };
        figures.push(match (found.len(), ratio.jobs, *workload) {
            (1, 1, _) => value,
            (_, 1, _) => format!("1 job: {value}"),
            (_, jobs, _) => format!("{jobs} jobs: {value}"),
        });
    }
    Ok((figures.join("; "), aim(headline, &found)))
}

/// A number of three digits without a unit.
fn number(value: f64) -> String {
    quantity(value, "ratio").replace(" ratio", "")
}

/// The aim, and whether all figures reach it; empty without one.
fn aim(headline: &Headline, found: &[(&Results, &Ratio)]) -> String {
    let aimed: Vec<_> =
        found.iter().filter_map(|(_, ratio)| Some((ratio.aim?, ratio.aim_state?))).collect();
    let Some((aim, _)) = aimed.first() else { return String::new() };
    let state = match () {
        () if aimed.iter().any(|(_, state)| *state == AimState::NotMet) => ", **missed**",
        () if aimed.iter().any(|(_, state)| *state == AimState::Open) => ", open",
        () => ", met",
    };
    let aim = if headline.is_bound { headline.compared.to_owned() } else { number(*aim) };
    format!("{aim}{state}")
}

/// Writes the table into the documents in `docs`: of these files of results, whose shown parts it
/// stores there, or without files of the stored ones.
///
/// # Errors
/// As [`page`]; if a file cannot be read or written. Nothing is written if a comparison is missing.
pub fn update(results: &[PathBuf], docs: &Path) -> Result<(), LabError> {
    let (stored, shown) = (docs.join(STORED), docs.join(PAGE));
    let io = |path: &Path| LabError::io(path.display().to_string());
    let runs = match results {
        [] => read_stored(&stored)?,
        files => {
            let runs = files.iter().map(|file| Results::read(file));
            reduced(runs.collect::<Result<_, _>>()?)
        }
    };
    let text = page(&runs, &fs::read_to_string(&shown).map_err(io(&shown))?)?;
    let json = serde_json::to_string_pretty(&runs)
        .map_err(|error| LabError::failed("the results", error))?;
    write_whole(&stored, format!("{json}\n").as_bytes()).map_err(io(&stored))?;
    write_whole(&shown, text.as_bytes()).map_err(io(&shown))
}

/// The stored results.
///
/// # Errors
/// If the file cannot be read, or has other contents.
pub fn read_stored(path: &Path) -> Result<Vec<Results>, LabError> {
    let shown = path.display().to_string();
    let bytes = fs::read(path).map_err(LabError::io(shown.clone()))?;
    serde_json::from_slice(&bytes).map_err(|error| LabError::failed(shown, error))
}
